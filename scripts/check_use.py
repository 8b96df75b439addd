"""Files that nothing uses: a rule of check.py."""

import ast
import re
from collections.abc import Iterator
from fnmatch import fnmatch
from pathlib import Path

PACKAGE = "modicum/python/"
# Files that need not be named: .cc files, pages, tests, examples, mutants, embedded files, the
# fuzzers' first inputs, recorded formats, and files and folders in the root whose name begins with
# a dot.
FOUND_BY_PLACE = re.compile(
    r"^\.|^examples/|^mutants/|^modicum/synth/configs/|^modicum/report/page/|\.(cc|md)$"
    r"|^tests/fixtures/(fuzz/\w+|formats-0\.1)/|(^|/)(test_[^/]*|conftest|__init__|__main__)\.py$"
)
VARIABLE = re.compile(r"\$?\{\w+\}|\$\w+")  # for example in "requirements-$group.txt"
# An included header, a file with its ending, a dotted module, or a module in "module:function".
NAME = re.compile(r'(?<=#include ")[^"]+|[\w*-]+(?:\.[\w*-]+)+|(?<=")\w+(?=:\w)')

Trees = dict[str, ast.AST]  # path of a Python file -> its syntax tree


def imports(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """(line, dotted name) of each import of a Python file; `a.b` for `from a import b`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, one.name) for one in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield from ((node.lineno, f"{node.module}.{one.name}") for one in node.names)


def names_of(path: str) -> set[str]:
    """The names by which another file may refer to this one."""
    if path.endswith(".h"):
        return {path}
    name, parts = Path(path).name, Path(path.removeprefix(PACKAGE)).with_suffix("").parts
    if not path.endswith(".py"):
        return {name}
    dotted = [".".join(parts[i:]) for i in range(len(parts))]  # with any folder as the root
    return {dotted[0]} if path.startswith(f"{PACKAGE}modicum/") else {name, *dotted}


def check_use(root: Path, paths: list[str], trees: Trees) -> Iterator[str]:
    """Each file must be used by another one: a header is included; a module of the package is
    imported, or its dotted name occurs; any other file is imported or named. A name with a
    variable, such as "needs-$group.txt", names all files that match."""
    users: dict[str, set[str]] = {}  # name -> the files that contain it
    for path in paths:
        text = VARIABLE.sub("*", (root / path).read_text(errors="replace"))
        for word in set(NAME.findall(text)):
            users.setdefault(word, set()).add(path)
    for path, tree in trees.items():
        for _line, name in imports(tree):
            for module in (name, name.rpartition(".")[0]):  # of `from module import name`
                users.setdefault(module, set()).add(path)
    patterns = [word for word in users if "*" in word[3:] and "*" not in word[:3]]
    for path in paths:
        if "/" not in path or FOUND_BY_PLACE.search(path):
            continue
        names = names_of(path)
        names |= {word for word in patterns if fnmatch(Path(path).name, word)}
        if not set().union(*(users.get(name, ()) for name in names)) - {path}:
            yield f"{path}:1: nothing uses this file"
