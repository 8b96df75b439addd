#!/usr/bin/env python3
"""Checks the uses of the Python package that no test runs: each name of it exists, and each call of
a function or class has the keywords and the number of arguments that it takes.

check_names.py: reads the Python files of tests/gpu, benchmarks, examples and integrations, the
Python code of README and the pages, and the added lines of patches; prints one line per finding,
`file:line: message`, and exits 1 if there is any. Runs none of them: it imports the installed
package and asks for signatures. tests/package/test_names.py calls it.
"""

import ast
import importlib
import inspect
import re
import subprocess
import sys
import textwrap
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

PACKAGE = "modicum"
SOURCES = ("tests/gpu/*.py", "benchmarks/*.py", "examples/*.py", "integrations/*.py")
PAGES = ("README.md", "docs/*.md", "docs/llms.txt", "skills/*.md")
GENERATED = ("docs/reference/python.md",)  # of docstrings
PATCHES = ("integrations/*.patch",)
FENCE = re.compile(r"^```python\n(.*?)^```", re.M | re.S)
INLINE = re.compile(r"`([^`\n]+)`")
PATH = re.compile(rf"(?<![\w./-]){PACKAGE}(?:\.[A-Za-z_]\w*)+")
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)

Scope = dict[str, str | None]  # name -> the dotted path that it is bound to; None: something else
# What pages use without an import. In prose `save` may be that of memory.
IN_PROSE: Scope = {
    name: f"{PACKAGE}.torch.{name}" for name in ("load", "resume", "empty_parameters")
}
ON_PAGES: Scope = {PACKAGE: PACKAGE, "save": f"{PACKAGE}.torch.save"} | IN_PROSE


# ---- the package


def member(holder: Any, path: str, name: str) -> Any:
    """`holder.name`, where `path` is the dotted path of `holder`. Throws AttributeError."""
    try:
        return getattr(holder, name)
    except ValueError as error:  # UsageError of a name of before
        raise AttributeError(str(error)) from error
    except AttributeError:
        if isinstance(holder, ModuleType):
            try:
                return importlib.import_module(f"{path}.{name}")
            except ModuleNotFoundError as error:
                if error.name != f"{path}.{name}":
                    raise
        if isinstance(holder, type) and any(
            name in vars(base).get("__annotations__", {}) for base in holder.__mro__
        ):
            return inspect.Parameter.empty  # a field, which the class object lacks
        raise


def unknown(path: str) -> str | None:
    """The shortest beginning of a dotted path that does not exist."""
    holder: Any = importlib.import_module(PACKAGE)
    at = PACKAGE
    for name in path.split(".")[1:]:
        try:
            holder = member(holder, at, name)
        except AttributeError:
            return f"{at}.{name}"
        at += f".{name}"
    return None


def found(path: str) -> Any:
    holder: Any = importlib.import_module(PACKAGE)
    for at in range(len(names := path.split("."))):
        holder = member(holder, ".".join(names[:at]), names[at]) if at else holder
    return holder


def signatures(callee: Any) -> list[inspect.Signature]:
    """The signatures of a function, or of a class's constructor; several if it has overloads, none
    if they can't be read. nanobind gives them as text."""
    texts = getattr(callee, "__nb_signature__", None)
    if texts is None and isinstance(callee, type):
        texts = getattr(callee.__init__, "__nb_signature__", None)
        if texts is not None:
            return [without_self(of_text(text)) for text, *_ in texts]
    if texts is not None:
        return [of_text(text) for text, *_ in texts]
    try:
        return [inspect.signature(callee)]
    except (TypeError, ValueError):
        return []


def without_self(signature: inspect.Signature) -> inspect.Signature:
    return signature.replace(parameters=list(signature.parameters.values())[1:])


def of_text(text: str) -> inspect.Signature:
    """The parameters of `def name(a: A[B], c: C = \\0) -> D`, without types."""
    while (less := re.sub(r"\[[^][]*\]", "", text)) != text:
        text = less  # types of arrays, such as ArrayLike[shape=(*)], are not Python
    (node,) = ast.parse(re.sub(r"\\\d+", "None", text) + ": ...").body
    assert isinstance(node, ast.FunctionDef)
    kind, args, empty = inspect.Parameter, node.args, inspect.Parameter.empty
    plain = [*args.posonlyargs, *args.args]
    required = len(plain) - len(args.defaults)
    parameters = [
        kind(one.arg, kind.POSITIONAL_OR_KEYWORD, default=empty if at < required else None)
        for at, one in enumerate(plain)
    ]
    if args.vararg:
        parameters.append(kind(args.vararg.arg, kind.VAR_POSITIONAL))
    parameters += [
        kind(one.arg, kind.KEYWORD_ONLY, default=None if default else empty)
        for one, default in zip(args.kwonlyargs, args.kw_defaults, strict=True)
    ]
    if args.kwarg:
        parameters.append(kind(args.kwarg.arg, kind.VAR_KEYWORD))
    return inspect.Signature(parameters)


# ---- a call


@dataclass(frozen=True)
class Call:
    positional: int
    keywords: tuple[str, ...]
    is_part: bool  # it may have more arguments: of `*rest`, `**more` or `...`

    @staticmethod
    def of(node: ast.Call) -> "Call":
        plain = [
            one
            for one in node.args
            if not isinstance(one, ast.Starred)
            and not (isinstance(one, ast.Constant) and one.value is ...)
        ]
        names = tuple(one.arg for one in node.keywords if one.arg is not None)
        is_part = len(plain) < len(node.args) or len(names) < len(node.keywords)
        return Call(len(plain), names, is_part)

    def fault(self, signature: inspect.Signature) -> str | None:
        bind: Callable[..., object] = signature.bind_partial if self.is_part else signature.bind
        takes_any = any(p.kind is p.VAR_KEYWORD for p in signature.parameters.values())
        wrong = [name for name in self.keywords if name not in signature.parameters]
        if wrong and not takes_any:
            return f"has no keyword '{wrong[0]}'"
        try:
            bind(*[None] * self.positional, **dict.fromkeys(self.keywords))
        except TypeError as error:
            return f"is called wrongly: {error}"
        return None


def fault_of(path: str, call: Call) -> str | None:
    """The fault of a call of `path`; of the last overload, if none takes the call."""
    faults = [call.fault(one) for one in signatures(found(path))]
    return None if None in faults or not faults else f"{path} {faults[-1]}"


# ---- the uses in a file


def imported(node: ast.Import | ast.ImportFrom) -> Iterator[str]:
    """The dotted paths of the package that an import names."""
    if isinstance(node, ast.Import):
        yield from (one.name for one in node.names if one.name.split(".")[0] == PACKAGE)
    else:
        yield from (path for _, path in bound_by(node) if path)


def bound_by(node: ast.AST) -> Iterator[tuple[str, str | None]]:
    """What an import binds: (name, dotted path); None for another package's."""
    if isinstance(node, ast.Import):
        for one in node.names:
            top = one.name.split(".")[0]
            path = one.name if one.asname else top
            yield one.asname or top, path if top == PACKAGE else None
    elif isinstance(node, ast.ImportFrom):
        for one in node.names:
            ours = not node.level and (node.module or "").split(".")[0] == PACKAGE
            yield one.asname or one.name, f"{node.module}.{one.name}" if ours else None


def bindings(body: list[ast.stmt] | ast.expr) -> Scope:
    """The names that a module or function binds, nested functions included: a name that is bound in
    two ways counts as another thing."""
    scope: Scope = {}
    for top in body if isinstance(body, list) else [body]:
        for node in ast.walk(top):
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                scope[node.id] = None
            elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                scope[node.name] = None
            for name, path in bound_by(node):
                scope[name] = path if scope.get(name, path) == path else None
    return scope


class Uses(ast.NodeVisitor):
    """Collects (line, message) of the wrong uses below a node."""

    def __init__(self, scope: Scope) -> None:
        self.scopes = [scope]
        self.faults: list[tuple[int, str]] = []

    def path_of(self, node: ast.expr) -> str | None:
        """The dotted path of an expression that begins with a name of the package."""
        if isinstance(node, ast.Attribute):
            path = self.path_of(node.value)
            return f"{path}.{node.attr}" if path else None
        if not isinstance(node, ast.Name):
            return None
        for scope in reversed(self.scopes):
            if node.id in scope:
                return scope[node.id]
        return None

    def check(self, line: int, path: str) -> bool:
        missing = unknown(path)
        if missing:
            self.faults.append((line, f"{missing} does not exist"))
        return missing is None

    def visit(self, node: ast.AST) -> None:
        if isinstance(node, FUNCTIONS):
            self.visit_function(node)
            return
        path = self.path_of(node) if isinstance(node, ast.Name | ast.Attribute) else None
        if isinstance(node, ast.Import | ast.ImportFrom):
            for path in imported(node):
                self.check(node.lineno, path)
        elif isinstance(node, ast.Name | ast.Attribute) and path:
            self.check(node.lineno, path)  # of `a.b.c` once, with its complete path
        elif isinstance(node, ast.Call):
            self.visit_call(node)
        else:
            self.generic_visit(node)

    def visit_call(self, node: ast.Call) -> None:
        path = self.path_of(node.func)
        if not path:
            self.generic_visit(node)
            return
        if self.check(node.lineno, path):
            fault = fault_of(path, Call.of(node))
            if fault:
                self.faults.append((node.lineno, fault))
        for part in [*node.args, *(keyword.value for keyword in node.keywords)]:
            self.visit(part)

    def visit_function(self, node: ast.AST) -> None:
        assert isinstance(node, FUNCTIONS)
        args = node.args
        every = [*args.posonlyargs, *args.args, *args.kwonlyargs, args.vararg, args.kwarg]
        names: Scope = {one.arg: None for one in every if one}
        self.scopes.append(names | bindings(node.body))
        for child in ast.iter_child_nodes(node):
            self.visit(child)
        self.scopes.pop()


def faults_in(tree: ast.Module, scope: Scope) -> list[tuple[int, str]]:
    uses = Uses(scope)
    uses.visit(tree)
    return sorted(set(uses.faults))


def of_source(text: str) -> Iterator[tuple[int, str]]:
    tree = ast.parse(text)
    yield from faults_in(tree, bindings(tree.body))


def of_prose(text: str) -> Iterator[tuple[int, str]]:
    """Names and calls in the sentences of a page, such as `load(check="values")`, where a call may
    leave out arguments."""
    text = re.sub(
        r"^```.*?^```", lambda fence: "\n" * fence[0].count("\n"), text, flags=re.M | re.S
    )
    for code in INLINE.finditer(text):
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # `\.` in a regular expression
                tree = ast.parse(code[1], mode="eval")
        except SyntaxError:
            continue  # a flag, a path or output
        scope: Scope = {PACKAGE: PACKAGE}
        if isinstance(tree.body, ast.Call):
            tree.body.args.append(ast.Constant(...))
            scope |= IN_PROSE
        uses = Uses(scope)
        uses.visit(tree)
        for _, fault in uses.faults:
            yield text.count("\n", 0, code.start()) + 1, fault


def of_page(text: str) -> Iterator[tuple[int, str]]:
    """The code of a page is one program: a later block uses the imports of earlier ones."""
    yield from of_prose(text)
    scope = dict(ON_PAGES)
    for block in FENCE.finditer(text):
        line = text.count("\n", 0, block.start(1))
        try:
            tree = ast.parse(textwrap.dedent(block[1]))
        except SyntaxError as error:
            yield line + (error.lineno or 1), f"the code is not Python: {error.msg}"
            continue
        scope |= bindings(tree.body)
        for at, fault in faults_in(tree, scope):
            yield line + at, fault


# ---- the uses in a patch


def balanced(text: str, begin: int) -> str:
    """`text` from `begin` to the end of the brackets that open there."""
    depth, end = 0, begin
    for end in range(begin, len(text)):
        depth += (text[end] in "([{") - (text[end] in ")]}")
        if depth == 0 and (text[end] in ")]}" or text[end] == "\n"):
            break
    return text[begin : end + 1]


def of_patch(text: str) -> Iterator[tuple[int, str]]:
    """Added lines only, but a call may end in a line that the patch keeps."""
    lines = text.splitlines()
    kept = [line[1:] if line[:1] in "+ " and line[:3] != "+++" else "" for line in lines]
    after = "\n".join(kept) + "\n"
    starts = [0]
    for line in kept:
        starts.append(starts[-1] + len(line) + 1)
    for number, line in enumerate(lines, 1):
        if not line.startswith("+") or line.startswith("+++"):
            continue
        for source in statements(after, starts[number - 1], kept[number - 1]):
            for _, fault in faults_in(ast.parse(source), {PACKAGE: PACKAGE}):
                yield number, fault


def statements(after: str, start: int, line: str) -> Iterator[str]:
    """The imports of the package and the uses of its dotted paths that begin in a line."""
    code = line.split("#")[0]
    if re.match(rf"\s*(?:from|import) {PACKAGE}\b", code):
        yield balanced(after, start).strip()
        return
    for match in PATH.finditer(code):
        end = start + match.end()
        yield match[0] + (balanced(after, end) if after[end] == "(" else "")


# ---- all files


def tracked(root: Path, patterns: tuple[str, ...]) -> list[str]:
    listed = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard", "--", *patterns],
        cwd=root, check=True, capture_output=True, text=True,
    )  # fmt: skip
    return [name for name in listed.stdout.splitlines() if (root / name).is_file()]


def findings(root: Path) -> Iterator[str]:
    for patterns, read in ((SOURCES, of_source), (PAGES, of_page), (PATCHES, of_patch)):
        for name in tracked(root, patterns):
            if name not in GENERATED:
                for line, fault in read((root / name).read_text()):
                    yield f"{name}:{line}: {fault}"


def main() -> int:
    lines = list(findings(Path(__file__).resolve().parent.parent))
    print(*lines, sep="\n", end="\n" if lines else "")
    return 1 if lines else 0


if __name__ == "__main__":
    sys.exit(main())
