#!/usr/bin/env python3
"""Checks the sources against docs/ARCHITECTURE.md and the limits of CONTRIBUTING.md, and the pages
against the sources.

check.py [TREE]: prints one line per finding, `file:line: message`, and exits 1 if there is any;
else it prints the number of files.
Standard library only; needs Universal Ctags, which measures functions.
"""

import ast
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import tomllib
from check_identifiers import check_identifiers
from check_pages import check_pages
from check_use import Trees, check_use

LINE_COLUMNS = 100
FUNCTION_LINES, TEST_FUNCTION_LINES = 70, 120
FILE_LINES, LONG_FILE_LINES = 500, 800
PARAMETERS = 5
EVERY_HEADER = "every public header"  # in the table: may include all rooms on lower floors
# The room that cmake/python.cmake builds, as a module instead of a library.
NOT_A_LIBRARY = "python"

CXX = {".h", ".cc"}
CODE = CXX | {".py", ".sh", ".cmake", ".txt", ".toml"}
INCLUDE = re.compile(r'^\s*#\s*include\s*(["<])([^">]+)[">]')
# A product with a size as a factor. A size is a call of a function of SIZE, on either side of `*`,
# or, on the left, a name that ends in _bytes, _numel or _count.
SIZE = r"\b(?:numel_of|bytes_of|numel|bytes|total|[a-z_]*_bytes)\([^()]*\)"
SIZE_PRODUCT = re.compile(rf"(?:{SIZE}|\w(?:_bytes|_numel|_count)\b)\s\*\s|\s\*\s[\w.>-]*{SIZE}")
# The definition of a type of the namespace, whose contents are not indented.
TYPE = re.compile(
    r"(?:struct|class|union|enum(?: class)?) (?:alignas\([^)]*\) )?(\w+)\b(?!( : \w+)?;)"
)
# Code that creates, removes, renames or copies a file may follow a link out of the checkpoint's
# directory. Only the functions in these files prevent that; all other code calls them.
CHANGES_FILES = re.compile(r"modicum/io/posix_\w+\.cc")
CXX_CHANGE = re.compile(
    r"(?<![\w>.:])(?:::)?(?:(?:unlink|mkdir|symlink|link)(?:at)?|rmdir|renameat2?)\("
    r"|(?<!\w)::(?:remove|rename)\(|\bstd::(?:remove|rename)\("
    r"|\b(?:fs|filesystem)::(?:remove|remove_all|rename|copy\w*|create_\w+)\("
)
PYTHON_CHANGES = {
    "os": {
        *("link", "makedirs", "mkdir", "remove", "removedirs", "rename", "renames", "replace"),
        *("rmdir", "symlink", "unlink"),
    },
    "shutil": {"copy", "copy2", "copyfile", "copymode", "copystat", "copytree", "move", "rmtree"},
}
PATH_CHANGES = {"hardlink_to", "mkdir", "rmdir", "symlink_to", "unlink"}
PATH_CHANGES_OF_ONE = {"rename", "replace"}  # with one argument; str.replace has two
# Methods of these names that change no file, and one that makes the directory that a script names.
NO_CHANGES = {"names.rename", "self._checkpoints.replace", "self.directory.mkdir"}
OPEN_TASK = re.compile(r"\bTO" + r"DO\b(?!\(#\d+\))")


@dataclass(frozen=True)
class Room:
    floor: int
    may_include: frozenset[str]


@dataclass(frozen=True)
class Architecture:
    rooms: dict[str, Room]
    library_rooms: dict[str, frozenset[str]]  # prefix of a header -> the rooms that may include it


# ---- the page


def table_rows(page: str, first_cell: str) -> list[list[str]]:
    """The cells of each row of the tables whose header begins with `first_cell`."""
    rows: list[list[str]] = []
    inside = False
    for line in page.splitlines():
        cells = [cell.strip() for cell in line.strip().strip("|").split("|")]
        if not line.lstrip().startswith("|"):
            inside = False
        elif inside and not set(cells[0]) <= set("-: "):
            rows.append(cells)
        elif cells[0] == first_cell:
            inside = True
    return rows


def names_in(cell: str) -> frozenset[str]:
    return frozenset(re.findall(r"[a-z_/]+", cell))


def read_architecture(page: str) -> Architecture:
    floors: dict[str, int] = {}
    cells: dict[str, str] = {}
    for name, floor, may_include, _charter in table_rows(page, "room"):
        floors[name.strip("`")] = int(floor)
        cells[name.strip("`")] = may_include
    rooms = {}
    for name, cell in cells.items():
        below = frozenset(other for other in floors if floors[other] < floors[name])
        rooms[name] = Room(floors[name], below if cell == EVERY_HEADER else names_in(cell))
    libraries = {row[0].strip("`"): names_in(row[1]) for row in table_rows(page, "library header")}
    return Architecture(rooms, libraries)


def check_table(rooms: dict[str, Room]) -> Iterator[str]:
    """No room may include an unknown room, a room on a higher floor, or, directly or through other
    rooms, itself."""
    where = "docs/ARCHITECTURE.md:1:"
    if not rooms:
        yield f"{where} no table of rooms (room | floor | may include | charter)"
    for name, room in rooms.items():
        for other in sorted(room.may_include):
            if other not in rooms:
                yield f"{where} `{name}` may include `{other}`, which is no room"
            elif rooms[other].floor > room.floor:
                yield f"{where} `{name}` on floor {room.floor} may include `{other}` above it"
    for name in rooms:
        if name in reachable(name, rooms):
            yield f"{where} `{name}` is in a cycle"


def reachable(start: str, rooms: dict[str, Room]) -> set[str]:
    """The rooms that `start` may include, directly or indirectly."""
    found: set[str] = set()
    ahead = [start]
    while ahead:
        here = rooms.get(ahead.pop())
        new = (here.may_include if here else frozenset()) - found
        found |= new
        ahead.extend(new)
    return found


def cmake_rooms(text: str) -> dict[str, frozenset[str]]:
    """The DEPENDS list of each modicum_room() of CMakeLists.txt."""
    rooms = {}
    code = re.sub(r"#.*", "", text)
    for name, rest in re.findall(r"\bmodicum_room\(\s*(\w+)([^)]*)\)", code):
        depends = re.search(r"\bDEPENDS\b(.*?)(?:\bPRIVATE\b|$)", rest, re.DOTALL)
        rooms[name] = frozenset(depends.group(1).split()) if depends else frozenset()
    return rooms


def check_cmake(text: str, rooms: dict[str, Room]) -> Iterator[str]:
    """The DEPENDS lists must equal the table."""
    built = cmake_rooms(text)
    for name in sorted(built.keys() | rooms.keys() - {NOT_A_LIBRARY}):
        if name not in rooms:
            yield f"CMakeLists.txt:1: `{name}` is no room of docs/ARCHITECTURE.md"
        elif name not in built:
            yield f"CMakeLists.txt:1: room `{name}` has no modicum_room()"
        else:
            missing = sorted(rooms[name].may_include - built[name])
            extra = sorted(built[name] - rooms[name].may_include)
            if missing:
                yield f"CMakeLists.txt:1: DEPENDS of `{name}` lacks {', '.join(missing)}"
            if extra:
                named = ", ".join(extra)
                yield f"CMakeLists.txt:1: DEPENDS of `{name}` has {named}, which the table lacks"


# ---- includes


def room_of(path: str) -> str | None:
    parts = path.split("/")
    return parts[1] if len(parts) > 2 and parts[0] == "modicum" else None


def is_test(path: str) -> bool:
    name = path.rsplit("/", 1)[-1]
    is_named_so = re.search(r"_(test|fuzz)\.(cc|py)$|_doubles?\.(h|cc)$", name)
    return is_named_so is not None or path.startswith("tests/")


def include_fault(path: str, header: str, architecture: Architecture) -> str | None:
    """The fault of an include of `modicum/...` in `path`, or None."""
    rooms = architecture.rooms
    user, parts = room_of(path), header.split("/")
    room, name = parts[1], parts[-1]
    if room not in rooms or len(parts) != 3:
        return f"{header} is in no room"
    if user == room:
        return None
    if user is not None and (user not in rooms or room not in rooms[user].may_include):
        return f"`{user}` may not include `{room}`"
    if re.search(r"_doubles?\.h$", name):
        return None if is_test(path) else f"{header} is for tests"
    if name != f"{room}.h":
        return f"{header} is internal: use modicum/{room}/{room}.h"
    return None


def library_fault(path: str, header: str, architecture: Architecture) -> str | None:
    for prefix, rooms in architecture.library_rooms.items():
        if header.startswith(prefix) and room_of(path) not in rooms:
            return f"{header} may be included only in {', '.join(sorted(rooms))}"
    return None


def check_includes(path: str, lines: list[str], architecture: Architecture) -> Iterator[str]:
    for number, line in enumerate(lines, start=1):
        match = INCLUDE.match(line)
        if not match:
            continue
        quote, header = match.groups()
        if header.startswith("modicum/"):
            fault = include_fault(path, header, architecture)
        elif quote == '"':
            fault = f"{header} is not named from the root (modicum/ROOM/...)"
        else:
            fault = library_fault(path, header, architecture)
        if fault:
            yield f"{path}:{number}: {fault}"


# ---- sizes


def check_place(path: str, rooms: dict[str, Room]) -> Iterator[str]:
    if room_of(path) not in {None, *rooms}:
        yield f"{path}:1: modicum/{room_of(path)} is no room of docs/ARCHITECTURE.md"


def check_lines(path: str, lines: list[str]) -> Iterator[str]:
    for number, line in enumerate(lines, start=1):
        if len(line) > LINE_COLUMNS:
            yield f"{path}:{number}: {len(line)} columns, {LINE_COLUMNS} are the limit"
        if OPEN_TASK.search(line):
            yield f"{path}:{number}: a to-do without an issue number, such as (#12)"


def check_types(root: Path, paths: list[str]) -> Iterator[str]:
    """No two headers define types of one name: they share a namespace, and the linker would merge
    the functions of one with those of the other without an error. (Highway's `-inl.h` have a
    namespace for each instruction set.)"""
    header_of: dict[str, str] = {}
    for path in paths:
        if not path.endswith(".h") or path.endswith("-inl.h") or room_of(path) is None:
            continue
        for number, line in enumerate((root / path).read_text().splitlines(), start=1):
            defined = TYPE.match(line)
            if defined is None:
                continue
            other = header_of.setdefault(defined[1], path)
            if other != path:
                yield f"{path}:{number}: {other} defines a type {defined[1]}, too"


def check_products(path: str, lines: list[str]) -> Iterator[str]:
    """No unchecked product of sizes, except in tests, `base`, which defines checked_mul, and
    `kernels`, whose callers check sizes."""
    if is_test(path) or room_of(path) in (None, "base", "kernels"):
        return
    for number, line in enumerate(lines, start=1):
        if SIZE_PRODUCT.search(line.split("//")[0]):
            yield f"{path}:{number}: an unchecked product of a size: use checked_mul (base/sizes.h)"


def python_changes(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """(line, name) of each call that makes, removes, renames or copies names."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module in PYTHON_CHANGES:
            for one in node.names:
                if one.name in PYTHON_CHANGES[node.module]:
                    yield node.lineno, f"{node.module}.{one.name}"
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            owner, name = ast.unparse(node.func.value), node.func.attr
            has_one = len(node.args) == 1 and not isinstance(node.args[0], ast.Starred)
            is_change = name in PATH_CHANGES or (
                name in PATH_CHANGES_OF_ONE and has_one and not node.keywords
            )
            if owner in PYTHON_CHANGES:
                is_change = name in PYTHON_CHANGES[owner]
            if is_change and f"{owner}.{name}" not in NO_CHANGES:
                yield node.lineno, f"{owner}.{name}"


def check_changes(path: str, lines: list[str]) -> Iterator[str]:
    """The program and the package change files only through FileSystem."""
    if not path.startswith("modicum/") or is_test(path) or CHANGES_FILES.fullmatch(path):
        return
    found: list[tuple[int, str]] = []
    if path.endswith(".py"):
        found += python_changes(ast.parse("\n".join(lines)))
    elif Path(path).suffix in CXX:
        for number, line in enumerate(lines, start=1):
            match = CXX_CHANGE.search(line.split("//")[0])
            found += [(number, match.group().rstrip("("))] if match else []
    for number, name in found:
        yield f"{path}:{number}: {name} may follow a link: use FileSystem, in Python _modicum"


def check_length(path: str, lines: list[str]) -> Iterator[str]:
    long_one = is_test(path) or room_of(path) == "kernels"
    limit = LONG_FILE_LINES if long_one else FILE_LINES
    if len(lines) > limit:
        yield f"{path}:1: {len(lines)} lines, {limit} are the limit"


@dataclass(frozen=True)
class Function:
    path: str
    name: str
    begin: int
    end: int
    signature: str  # C++: the parameters, with brackets; Python: unused


def functions(root: Path, paths: list[str]) -> Iterator[Function]:
    """The functions with a body, as ctags lists them. ctags calls lambdas `__anon...`."""
    command = (
        "ctags --languages=C++,Python --langmap=C++:+.h --kinds-C++=f --kinds-Python=fm"
        " --fields=+neS --output-format=json -f - -L -"
    )
    result = subprocess.run(
        command.split(),
        input="\n".join(paths),
        cwd=root,
        capture_output=True,
        text=True,
        check=True,
    )
    for line in result.stdout.splitlines():
        tag = json.loads(line)
        if "end" in tag:
            name = "a lambda" if tag["name"].startswith("__anon") else tag["name"]
            yield Function(tag["path"], name, tag["line"], tag["end"], tag.get("signature", "()"))


def check_functions(measured: list[Function]) -> Iterator[str]:
    for function in measured:
        limit = TEST_FUNCTION_LINES if is_test(function.path) else FUNCTION_LINES
        lines = function.end - function.begin + 1
        if lines > limit:
            where = f"{function.path}:{function.begin}"
            yield f"{where}: {function.name} has {lines} lines, {limit} are the limit"


# ---- parameters


def cxx_parameters(signature: str) -> int:
    """The number of parameters of a signature such as "(int a, std::map<int, int> b) const":
    1 + the commas outside inner brackets."""
    depth, commas = 0, 0
    for character in signature[: signature.rindex(")") + 1]:
        depth += (character in "(<[{") - (character in ")>]}")
        commas += character == "," and depth == 1
    return commas + 1 if signature[1:].strip(" )") not in ("", "void") else 0


def python_parameters(path: str, tree: ast.AST) -> Iterator[tuple[str, int, int]]:
    """(name, line, number of parameters) of each function, except tests, whose parameters are
    fixtures. Keyword-only parameters count for private functions only."""
    class_of = {
        method: node.name
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef)
        for method in node.body
    }
    for node in ast.walk(tree):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        if is_test(path) and node.name.startswith("test_"):
            continue
        names = [one.arg for one in node.args.posonlyargs + node.args.args]
        count = len(names) - (names[:1] in (["self"], ["cls"]))
        if re.match("_(?!_)", node.name):
            count += len(node.args.kwonlyargs)
        owner = class_of.get(node)
        yield f"{owner}.{node.name}" if owner else node.name, node.lineno, count


def check_parameters(measured: list[Function], trees: Trees, page: str) -> Iterator[str]:
    """A function has at most PARAMETERS parameters, unless the table of CONTRIBUTING.md lists it.
    An entry that is no longer needed must be removed from the table."""
    counted = [
        (one.path, one.name, one.begin, cxx_parameters(one.signature))
        for one in measured
        if one.path not in trees and room_of(one.path) != NOT_A_LIBRARY  # bindings may have more
    ]
    for path, tree in trees.items():
        counted += [(path, *found) for found in python_parameters(path, tree)]
    listed = {
        (place.strip("`"), name)
        for place, names in table_rows(page, "room or folder")
        for name in re.findall("`([^`]+)`", names)
    }
    needed = set()
    for path, name, line, count in counted:
        entry = (room_of(path) or path.split("/")[0], name)
        if count > PARAMETERS and entry in listed:
            needed.add(entry)
        elif count > PARAMETERS:
            yield f"{path}:{line}: {name} has {count} parameters, {PARAMETERS} are the limit"
    for place, name in sorted(listed - needed):
        yield f"CONTRIBUTING.md:1: `{name}` of `{place}` needs no exception any more: remove it"


# ---- the tree


def check_mutants(root: Path) -> Iterator[str]:
    """A mutant's `find` must occur exactly once in its file, and the mutant must be in a list of
    the file's room."""
    for path in sorted((root / "mutants").glob("*.toml")):
        for mutant in tomllib.loads(path.read_text()).get("mutant", []):
            where = f"{path.relative_to(root)}:1: mutant '{mutant['name']}'"
            source = root / mutant["file"]
            count = source.read_text().count(mutant["find"]) if source.is_file() else 0
            if count != 1:
                yield f"{where}: `find` must occur once in {mutant['file']}, occurs {count} times"
            room = mutant["file"].removeprefix("modicum/").partition("/")[0]
            if not path.stem.startswith(room):
                yield f"{where}: must be in mutants/{room}*.toml"


def all_files(root: Path) -> list[str]:
    """Files that git tracks or would add; without git, all files."""
    if (root / ".git").exists():
        command = ["git", "ls-files", "-co", "--exclude-standard"]
        listed = subprocess.run(command, cwd=root, capture_output=True, text=True, check=True)
        names = listed.stdout.splitlines()
    else:
        names = [str(path.relative_to(root)) for path in root.rglob("*")]
    return sorted(name for name in set(names) if (root / name).is_file())


def findings(root: Path) -> list[str]:
    architecture = read_architecture((root / "docs/ARCHITECTURE.md").read_text())
    found = list(check_table(architecture.rooms))
    found += check_cmake((root / "CMakeLists.txt").read_text(), architecture.rooms)
    files = all_files(root)
    paths = [name for name in files if Path(name).suffix in CODE or name == "Makefile"]
    for path in paths:
        text = (root / path).read_text()
        lines = text.splitlines()
        if Path(path).suffix in CXX:
            found += check_identifiers(path, text)
            found += check_includes(path, lines, architecture)
            found += check_products(path, lines)
        found += check_place(path, architecture.rooms)
        found += check_lines(path, lines)
        found += check_changes(path, lines)
        found += check_length(path, lines)
    trees: Trees = {
        path: ast.parse((root / path).read_text()) for path in paths if path.endswith(".py")
    }
    measured = list(functions(root, [path for path in paths if Path(path).suffix in CXX | {".py"}]))
    found += check_functions(measured)
    found += check_parameters(measured, trees, (root / "CONTRIBUTING.md").read_text())
    found += check_types(root, paths)
    found += check_mutants(root)
    found += check_use(root, files, trees)
    found += check_pages(root, files, trees)
    return found


def main() -> int:
    root = Path(sys.argv[1] if len(sys.argv) > 1 else Path(__file__).resolve().parent.parent)
    found = findings(root)
    for line in found:
        print(line)
    if not found:
        print(f"{len(all_files(root))} files, no findings")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
