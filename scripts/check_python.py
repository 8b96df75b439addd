#!/usr/bin/env python3
"""Checks that the imports of the Python package are in the table of docs/ARCHITECTURE.md, that only
`upstream/` uses private names of other packages, that no room uses those of another room, that no
name hides a module, and that variables, fields and classes are named by nouns.

check_python.py [TREE]: prints one line per finding, `file:line: message`, and exits 1 if there is
any. Standard library only.
"""

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

from check import Room, check_table, names_in, table_rows
from check_identifiers import NO_IDENTIFIERS, NO_TYPE_NAMES
from check_use import imports

PACKAGE = "modicum/python/modicum"
EVERYBODY = {"errors", "_modicum"}  # may be imported by every room
UPSTREAM = "upstream"
ATTRIBUTES = {"getattr", "hasattr", "setattr", "delattr"}
# Names with one leading underscore that are not private.
PUBLIC = {
    "_asdict",  # of NamedTuple
    "_modicum",  # our bindings
    "_replace",  # of NamedTuple
    "_scale_inv",  # ends the names of stored tensors
}
# Words that are no identifiers, by file: parameters that a caller names, a key in a file.
WORDS_OF_CALLERS = {
    "memory/recording.py": {"held"},
    "walk/calls.py": {"given", "into"},
}
# Participles, adjectives, adverbs and verbs alone, in addition to those of C++.
NO_CLASS_NAMES = NO_TYPE_NAMES | {
    "Above", "Around", "Ask", "Before", "Bound", "Built", "Consumed", "Emptied",
    "Flat", "InPlace", "Inside", "Later", "Managed", "May", "Noting", "Passing",
    "Printed", "Protected", "Reads", "Refused", "Seen", "Split", "Tiny", "Where",
}  # fmt: skip


def read_rooms(page: str) -> dict[str, Room]:
    """The rooms in the page's table of Python rooms."""
    return {
        name.strip("`"): Room(int(floor), names_in(may_import))
        for name, floor, may_import, _charter in table_rows(page, "Python room")
    }


def room_of(parts: tuple[str, ...]) -> str:
    """The room of a module, given by its path below the package without the suffix."""
    if parts == ("__init__",):
        return "modicum"
    return "/".join(parts[:2]) if parts[0] == "torch" and len(parts) > 2 else parts[0]


def imported(tree: ast.Module, package: Path) -> Iterator[tuple[int, tuple[str, ...]]]:
    """(line, path below the package) of each import of a module of the package."""
    for line, name in imports(tree):
        top, *path = name.split(".")
        if top == "modicum":
            yield line, module_of(tuple(path), package)


def module_of(path: tuple[str, ...], package: Path) -> tuple[str, ...]:
    """The module of a dotted name: the name itself, or its parent if it is not a module."""
    if not path:
        return ("__init__",)
    place = package.joinpath(*path)
    if place.is_dir():
        return (*path, "__init__")
    if place.with_suffix(".py").is_file() or place.with_suffix(".pyi").is_file():
        return path
    return module_of(path[:-1], package)


def check_imports(root: Path, rooms: dict[str, Room]) -> Iterator[str]:
    """Every room and every import between rooms must be in the table, and a file must make each
    import that the table allows."""
    package = root / PACKAGE
    unused = {(name, other) for name, room in rooms.items() for other in room.may_include}
    for path in sorted(package.rglob("*.py")):
        where = path.relative_to(root)
        user = room_of(path.relative_to(package).with_suffix("").parts)
        if user not in rooms:
            yield f"{where}:1: `{user}` is no Python room of docs/ARCHITECTURE.md"
            continue
        for line, module in imported(ast.parse(path.read_text()), package):
            room = room_of(module)
            unused.discard((user, room))
            if room not in {user, *EVERYBODY, *rooms[user].may_include}:
                yield f"{where}:{line}: `{user}` may not import `{room}`"
    for user, other in sorted(unused):
        yield f"docs/ARCHITECTURE.md:1: `{user}` may import `{other}`, and no file does"


def defined_in(tree: ast.Module) -> Iterator[str]:
    """Names that a module defines: functions, classes, parameters, variables, own attributes."""
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            yield node.name
        elif isinstance(node, ast.arg):
            yield node.arg
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            own = isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")
            yield from [node.attr] if own else []


def used_in(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """(line, name) of attributes, of imports, and of strings that consist of names, which may be
    arguments of getattr."""
    for node in ast.walk(tree):
        names: list[str] = []
        if isinstance(node, ast.Attribute):
            names = [node.attr]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [node.module or "", *(alias.name for alias in node.names)]
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            names = [node.value] if re.fullmatch(r"[\w.]+", node.value) else []
        for name in names:
            for part in name.split("."):
                yield getattr(node, "lineno", 1), part


def check_names(root: Path) -> Iterator[str]:
    """Only upstream/ may use private names of other packages."""
    package = root / PACKAGE
    outside = {
        path: ast.parse(path.read_text())
        for path in sorted([*package.rglob("*.py"), *package.rglob("*.pyi")])
        if path.relative_to(package).parts[0] != UPSTREAM
    }
    own = PUBLIC.union(*(defined_in(tree) for tree in outside.values()))
    for path, tree in outside.items():
        for line, name in used_in(tree):
            if re.match(r"_[^_]", name) and name not in own:
                where = path.relative_to(root)
                what = f"`{name}` is private to another package: only {UPSTREAM}/ may use it"
                yield f"{where}:{line}: {what}"


def attributes_in(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """(line, name) of attributes, of names imported from modules, and of names that are given to
    getattr and the like."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            yield node.lineno, node.attr
        elif isinstance(node, ast.ImportFrom):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            names = node.args[1:2] if node.func.id in ATTRIBUTES else []
            yield from ((of.lineno, str(of.value)) for of in names if isinstance(of, ast.Constant))


def check_room_names(root: Path) -> Iterator[str]:
    """No room may use a private name that only other rooms define. A name that the room defines as
    well counts as its own."""
    package = root / PACKAGE
    trees = {path: ast.parse(path.read_text()) for path in sorted(package.rglob("*.py"))}
    rooms = {path: room_of(path.relative_to(package).with_suffix("").parts) for path in trees}
    defined: dict[str, set[str]] = {room: set() for room in rooms.values()}
    for path, tree in trees.items():
        defined[rooms[path]].update(defined_in(tree))
    defined.pop(UPSTREAM, None)  # see check_names
    for path, tree in trees.items():
        room = rooms[path]
        if room == UPSTREAM:  # its private names are other packages'
            continue
        for line, name in attributes_in(tree):
            owners = sorted(one for one, names in defined.items() if name in names)
            if re.match(r"_[^_]", name) and name not in PUBLIC and owners and room not in owners:
                what = f"`{name}` is private to the room {' or '.join(f'`{of}`' for of in owners)}"
                yield f"{path.relative_to(root)}:{line}: {what}"


def check_hidden(root: Path) -> Iterator[str]:
    """No name that a package's `__init__` imports or defines hides one of the package's modules,
    since `from package import name` would then not import the module."""
    for path in sorted((root / PACKAGE).rglob("__init__.py")):
        tree = ast.parse(path.read_text())
        names = set(defined_in(tree))
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom):
                names |= {alias.asname or alias.name for alias in node.names}
        modules = {module.stem for module in path.parent.glob("*.py")}
        for name in sorted(names & modules):
            yield f"{path.relative_to(root)}:1: `{name}` hides the module of that name"


def assigned_in(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """(line, name) of the parameters, variables and attributes that a module sets."""
    for node in ast.walk(tree):
        if isinstance(node, ast.arg):
            yield node.lineno, node.arg
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.lineno, node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.lineno, node.attr
        elif isinstance(node, (ast.ExceptHandler, ast.MatchAs, ast.MatchStar)) and node.name:
            yield node.lineno, node.name


def types_in(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """(line, name) of the classes, and of the variables of a module, which may be aliases."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            yield node.lineno, node.name
    for node in tree.body:
        if isinstance(node, (ast.Assign, ast.AnnAssign)):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            yield from ((node.lineno, t.id) for t in targets if isinstance(t, ast.Name))


def check_identifiers(root: Path) -> Iterator[str]:
    """No variable, parameter or attribute has a name of NO_IDENTIFIERS, no class or alias one of
    NO_CLASS_NAMES, with or without underscores."""
    package = root / PACKAGE
    for path in sorted(package.rglob("*.py")):
        where, tree = path.relative_to(root), ast.parse(path.read_text())
        free = WORDS_OF_CALLERS.get(path.relative_to(package).as_posix(), set())
        for line, name in assigned_in(tree):
            if name.strip("_") in NO_IDENTIFIERS and name not in free:
                yield f"{where}:{line}: '{name}' is no identifier: name what it is"
        for line, name in types_in(tree):
            if name.strip("_") in NO_CLASS_NAMES:
                yield f"{where}:{line}: '{name}' is no class name: use a noun"


def findings(root: Path) -> list[str]:
    rooms = read_rooms((root / "docs/ARCHITECTURE.md").read_text())
    return [
        *check_table(rooms),
        *check_imports(root, rooms),
        *check_names(root),
        *check_room_names(root),
        *check_hidden(root),
        *check_identifiers(root),
    ]


def main() -> int:
    root = Path(sys.argv[1] if len(sys.argv) > 1 else Path(__file__).resolve().parent.parent)
    found = findings(root)
    for line in found:
        print(line)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
