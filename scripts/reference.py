#!/usr/bin/env python3
"""Writes docs/reference/python.md from docstrings, docs/reference/command-line.md from help texts.

reference.py [MODICUM]: MODICUM is the built program. Without it only python.md is written, from the
sources. tests/package/test_reference_page.py fails if a page is stale. Standard library only.
"""

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

PACKAGE = "modicum/python/modicum"
PYTHON_PAGE = "docs/reference/python.md"
COMMAND_PAGE = "docs/reference/command-line.md"
# Module -> the names to document; None: all names that it re-exports.
MODULES: dict[str, list[str] | None] = {
    "modicum": None,
    "modicum.torch": None,
    "modicum.torch.accelerate": ["Loading", "loading"],
    "modicum.torch.dcp": None,
    "modicum.torch.deepspeed": None,
    "modicum.torch.trainer": None,
    "modicum.imports": None,
    "modicum.memory": None,
    "modicum.recipes": ["meta_model", "read_recipe", "Recipe", "recipe_for"],
    "modicum.walk": [
        "Checkpoint",
        "Layout",
        "load",
        "make_layout",
        "make_plan",
        "make_recipe",
        "open_checkpoint",
        "Plan",
        "Recipe",
        "report",
        "Shards",
    ],
    "modicum.errors": [
        "Error",
        "BudgetError",
        "FormatError",
        "IntegrityError",
        "IoError",
        "PeerError",
        "PreemptedError",
        "UsageError",
    ],
}
# Classes that users construct. Of others the page has no constructor.
CONSTRUCTED = {
    "AdamW", "Ledger", "ModicumReader", "ModicumWriter", "ProtectCallback", "SaveOnSigtermCallback",
}  # fmt: skip
# The interface that torch.distributed.checkpoint calls, and no user.
CALLED_BY_DCP = {
    "finish", "prepare_global_plan", "prepare_local_plan", "read_data", "read_metadata",
    "set_up_storage_reader", "set_up_storage_writer", "stage", "storage_meta", "write_data",
    "validate_checkpoint_id",
}  # fmt: skip
# The verbs whose common flags the page lists once for all of them.
SHARED_BY = ("plan", "load", "rehearse", "save", "resume")
# Help texts that depend on the machine, and their replacements on the page.
OF_THIS_MACHINE = {"--isa": "an instruction set that this machine has; default: the fastest"}

Node = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


# ---- Python


def file_of(root: Path, module: str) -> Path:
    parts = module.split(".")[1:]
    folder = root.joinpath(PACKAGE, *parts)
    for path in (folder / "__init__.py", folder.with_suffix(".py"), folder.with_suffix(".pyi")):
        if path.is_file():
            return path
    raise FileNotFoundError(module)


def definitions(root: Path, module: str, name: str) -> list[Node]:
    """The function or class `module.name`, found through imports; of a function with overloads
    these, and its definition unless they are in a stub; empty for a value or module."""
    tree = ast.parse(file_of(root, module).read_text())
    named = [node for node in tree.body if isinstance(node, Node) and node.name == name]
    if named:
        return named if is_marked(named[0], "overload") else named[-1:]
    for node in tree.body:
        if isinstance(node, ast.ImportFrom) and node.module:
            for one in node.names:
                if (one.asname or one.name) == name and node.module != module:
                    try:
                        return definitions(root, node.module, one.name)
                    except FileNotFoundError:
                        return definitions(root, f"{node.module}.{one.name}", name)
    return []


def public_names(root: Path, module: str) -> list[str]:
    """Names that a package re-exports: `from module import name as name`."""
    body = ast.parse(file_of(root, module).read_text()).body
    imports = [one for node in body if isinstance(node, ast.ImportFrom) for one in node.names]
    return sorted((one.name for one in imports if one.asname == one.name), key=str.lower)


def constructors(node: ast.ClassDef) -> list[Node]:
    if node.name not in CONSTRUCTED:
        return []
    return [one for one in node.body if isinstance(one, Node) and one.name == "__init__"]


def signature(node: Node, columns: int = 96) -> str:
    """`name(a, *, b=1)`, with one parameter per line if one line is too long."""
    if isinstance(node, ast.ClassDef):
        shown = [signature(one, columns) for one in constructors(node)] or ["__init__"]
        return shown[0].replace("__init__", f"class {node.name}", 1)
    args = node.args
    shown = [ast.unparse(one) for one in args.posonlyargs + args.args]
    for i, value in enumerate(reversed(args.defaults), 1):
        shown[-i] += f" = {ast.unparse(value)}"
    shown = [one for one in shown if one not in ("self", "cls")]
    if args.vararg:
        shown.append(f"*{ast.unparse(args.vararg)}")
    elif args.kwonlyargs:
        shown.append("*")
    for one, default in zip(args.kwonlyargs, args.kw_defaults, strict=True):
        shown.append(ast.unparse(one) + (f" = {ast.unparse(default)}" if default else ""))
    if args.kwarg:
        shown.append(f"**{ast.unparse(args.kwarg)}")
    returns = f" -> {ast.unparse(node.returns)}" if node.returns else ""
    line = f"{node.name}({', '.join(shown)}){returns}"
    if len(line) <= columns:
        return line
    inner = "".join(f"    {one},\n" for one in shown)
    return f"{node.name}(\n{inner}){returns}"


def markdown_of(docstring: str) -> Iterator[str]:
    """A docstring in Markdown: sections (Args:, Raises:) become lists, other lines are kept."""
    in_section = False
    for line in docstring.strip().splitlines():
        if re.fullmatch(r"(Args|Returns|Raises|Yields|Attributes|Example):", line):
            in_section = True
            yield f"**{line[:-1]}**"
            yield ""
        elif in_section and (found := re.match(r"    ([\w.*]+(?:, [\w.*]+)*): (.*)", line)):
            yield f"- `{found[1]}`: {found[2]}"
        elif in_section and line.startswith("    "):
            yield f"  {line.strip()}" if line.startswith("     ") else line.strip()
        else:
            in_section = in_section and not line.strip()
            yield line


def is_marked(node: Node, decorator: str) -> bool:
    return any(ast.unparse(one) == decorator for one in node.decorator_list)


def members(node: ast.ClassDef) -> Iterator[str]:
    """The entries of public methods and properties: of a property its type, and the docstring."""
    for one in node.body:
        if not isinstance(one, Node) or one.name.startswith("_") or one.name in CALLED_BY_DCP:
            continue
        first, *others = (ast.get_docstring(one) or "").split("\n\n")
        if not first or any("setter" in ast.unparse(mark) for mark in one.decorator_list):
            continue
        is_property = is_marked(one, "property")
        returns = f": {ast.unparse(one.returns)}" if one.returns else ""
        shown = f"{one.name}{returns}" if is_property else signature(one, columns=1000)
        yield f"- `{shown}`: {' '.join(first.split())}"
        for paragraph in others:
            yield ""
            yield from (f"    {line}".rstrip() for line in markdown_of(paragraph))


def fields(node: ast.ClassDef) -> Iterator[str]:
    """A line for each public attribute that the body annotates, with the text below it."""
    for one, after in zip(node.body, [*node.body[1:], None], strict=True):
        if not isinstance(one, ast.AnnAssign) or ast.unparse(one.target).startswith("_"):
            continue
        text = ""
        if isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant):
            text = f": {' '.join(after.value.value.split())}"
        yield f"- `{ast.unparse(one.target)}: {ast.unparse(one.annotation)}`{text}"


def entry(module: str, nodes: list[Node]) -> Iterator[str]:
    """The part of the page about a class, or about a function and its overloads."""
    yield from (f"### `{module}.{nodes[0].name}`", "")
    for node in nodes:
        if nodes[0] is node or is_marked(node, "overload"):
            yield from ("```python", signature(node), "```", "")
        yield from markdown_of(ast.get_docstring(node) or "")
        yield ""
    node = nodes[-1]
    if isinstance(node, ast.ClassDef):
        for one in constructors(node):
            yield from ("", *markdown_of(ast.get_docstring(one) or ""))
        for heading, listed in (("Fields", [*fields(node)]), ("Members", [*members(node)])):
            if listed:
                yield from ("", f"**{heading}**", "", *listed)
    yield ""


def python_page(root: Path) -> str:
    lines = [
        "# Python API",
        "",
        "Written by `scripts/reference.py` from the docstrings: edit those. Any other path in the",
        "package may change. Errors of Modicum are classes of [errors.md](errors.md); others are",
        "named where they are raised.",
        "",
    ]
    for module, names in MODULES.items():
        tree = ast.parse(file_of(root, module).read_text())
        text = ast.get_docstring(tree, clean=False) or ""
        lines += [f"## {module}", "", *text.splitlines(), ""]
        for name in names or public_names(root, module):
            nodes = definitions(root, module, name)
            is_error = name.endswith("Error") and module != "modicum.errors"
            if nodes and not is_error:
                lines += entry(module, nodes)
    text = "\n".join(line.rstrip() for line in lines)
    return re.sub(r"\n{3,}", "\n\n", text).strip() + "\n"


# ---- the command line


@dataclass(frozen=True)
class Verb:
    summary: str
    usage: str
    flags: dict[str, str]  # flag as displayed -> its help
    notation: dict[str, str]  # SIZE, REGEX, ... -> its meaning


def help_of(program: Path, *words: str) -> str:
    done = subprocess.run([program, *words], check=True, capture_output=True, text=True)
    return done.stdout


def flags_of(text: str) -> Iterator[tuple[str, str]]:
    """(`--flag TYPE`, help) of each positional and option of a help text."""
    shown, described = "", ""
    for line in text.splitlines():
        if re.match(r"  [-A-Z]", line):
            if shown:
                yield shown, described
            shown, _, described = re.sub(r"\s{2,}", "\t", line.strip()).partition("\t")
        elif line.startswith(" " * 8):
            described = f"{described} {line.strip()}".strip()
    if shown:
        yield shown, described


def verb_of(program: Path, name: str) -> Verb:
    text = help_of(program, name, "--help-all")
    summary, _, rest = text.partition("\nUsage: ")
    summary, usage = summary.replace("\n", " "), rest.splitlines()[0]
    flags = {
        shown: OF_THIS_MACHINE.get(shown.split()[0], described)
        for shown, described in flags_of(text)
    }
    return Verb(summary, usage, flags, dict(re.findall(r"^([A-Z]+)  +(.*)$", text, re.M)))


def table(flags: dict[str, str]) -> list[str]:
    if not flags:
        return []
    cells = [(shown.replace("|", r"\|"), described) for shown, described in flags.items()]
    rows = [f"| `{shown}` | {described} |" for shown, described in cells]
    return ["| flag | |", "|---|---|", *rows, ""]


def shared_flags(verbs: list[Verb]) -> dict[str, str]:
    """The flags that all verbs have, with the help that most of them have. A verb with another help
    lists the flag again."""
    flags = [f for f in verbs[0].flags if all(f in verb.flags for verb in verbs)]
    helps = {f: [verb.flags[f] for verb in verbs] for f in flags}
    return {f: max(texts, key=texts.count) for f, texts in helps.items()}


def command_page(program: Path) -> str:
    listed = re.findall(r"^([a-z]+) +\S.*$", help_of(program, "--help"), re.M)
    names = [name for name in listed if name != "modicum"]
    verbs = {name: verb_of(program, name) for name in names}
    common = shared_flags(list(verbs.values()))
    of_runs = shared_flags([verbs[name] for name in SHARED_BY])
    shared = {f: t for f, t in of_runs.items() if f not in common}
    notation = {word: text for verb in verbs.values() for word, text in verb.notation.items()}
    lines = [
        "# Command line",
        "",
        "Written by `scripts/reference.py` from `modicum VERB --help-all`: edit the texts there.",
        "`modicum VERB --help` lists the flags that most runs need, in groups; a flag of another",
        "verb is refused. Exit codes are those of [errors.md](errors.md).",
        "",
        "| value | |",
        "|---|---|",
        *(f"| `{word}` | {text} |" for word, text in notation.items()),
        "",
        "| verb | |",
        "|---|---|",
        *(f"| [`{name}`](#{name}) | {verb.summary} |" for name, verb in verbs.items()),
        "",
        "## Every verb",
        "",
        *table(common),
        f"## {', '.join(f'`{one}`' for one in SHARED_BY[:-1])} and `{SHARED_BY[-1]}`",
        "",
        *table(shared),
    ]
    for name, verb in verbs.items():
        hidden = common | (shared if name in SHARED_BY else {})
        own = {f: t for f, t in verb.flags.items() if hidden.get(f) != t}
        lines += [f"## `{name}`", "", f"    {verb.usage}", "", *table(own)]
    return "\n".join(lines).rstrip() + "\n"


def main() -> int:
    root = Path(__file__).resolve().parent.parent
    (root / PYTHON_PAGE).write_text(python_page(root))
    if len(sys.argv) > 1:
        (root / COMMAND_PAGE).write_text(command_page(Path(sys.argv[1]).resolve()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
