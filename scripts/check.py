#!/usr/bin/env python3
"""Holds the sources against docs/ARCHITECTURE.md and against the size limits of CONTRIBUTING.md.

check.py [TREE]: prints one line per finding, `file:line: what is wrong`, and exits 1 if there is
any. Standard library only; functions are measured with Universal Ctags.
"""

import json
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import tomllib

LINE_COLUMNS = 100
FUNCTION_LINES, TEST_FUNCTION_LINES = 70, 120
FILE_LINES, LONG_FILE_LINES = 500, 800
EVERY_DOOR = "every door"
# Built by cmake/python.cmake, as a module and not as a library.
NOT_A_LIBRARY = "python"

CXX = {".h", ".cc"}
CODE = CXX | {".py", ".sh", ".cmake", ".txt", ".toml"}
INCLUDE = re.compile(r'^\s*#\s*include\s*(["<])([^">]+)[">]')
# A size (by the function that gives it, or by its name's end) times something.
SIZE = r"\b(?:numel_of|bytes_of|numel|bytes|total|[a-z_]*_bytes)\([^()]*\)"
SIZE_PRODUCT = re.compile(rf"(?:{SIZE}|\w(?:_bytes|_numel|_count)\b)\s\*\s|\s\*\s[\w.>-]*{SIZE}")
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
    """The cells of the rows below the header that begins with `first_cell`."""
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
        rooms[name] = Room(floors[name], below if cell == EVERY_DOOR else names_in(cell))
    libraries = {row[0].strip("`"): names_in(row[1]) for row in table_rows(page, "library header")}
    return Architecture(rooms, libraries)


def check_table(rooms: dict[str, Room]) -> Iterator[str]:
    """No arrow upward, none to a room that is not there, no cycle."""
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
            yield f"{where} `{name}` reaches itself"


def reachable(start: str, rooms: dict[str, Room]) -> set[str]:
    found: set[str] = set()
    ahead = [start]
    while ahead:
        here = rooms.get(ahead.pop())
        new = (here.may_include if here else frozenset()) - found
        found |= new
        ahead.extend(new)
    return found


def cmake_rooms(text: str) -> dict[str, frozenset[str]]:
    rooms = {}
    code = re.sub(r"#.*", "", text)
    for name, rest in re.findall(r"\bmodicum_room\(\s*(\w+)([^)]*)\)", code):
        depends = re.search(r"\bDEPENDS\b(.*?)(?:\bPRIVATE\b|$)", rest, re.DOTALL)
        rooms[name] = frozenset(depends.group(1).split()) if depends else frozenset()
    return rooms


def check_cmake(text: str, rooms: dict[str, Room]) -> Iterator[str]:
    """The DEPENDS lists are the table."""
    built = cmake_rooms(text)
    for name in sorted(built.keys() | rooms.keys() - {NOT_A_LIBRARY}):
        if name not in rooms:
            yield f"CMakeLists.txt:1: `{name}` is no room of docs/ARCHITECTURE.md"
        elif name not in built:
            yield f"CMakeLists.txt:1: room `{name}` has no modicum_room()"
        elif built[name] != rooms[name].may_include:
            apart = ", ".join(sorted(built[name] ^ rooms[name].may_include))
            yield f"CMakeLists.txt:1: DEPENDS of `{name}` disagrees with the table about: {apart}"


# ---- includes


def room_of(path: str) -> str | None:
    parts = path.split("/")
    return parts[1] if len(parts) > 2 and parts[0] == "modicum" else None


def is_test(path: str) -> bool:
    name = path.rsplit("/", 1)[-1]
    return bool(re.search(r"_test\.(cc|py)$|_doubles?\.(h|cc)$", name)) or path.startswith("tests/")


def include_fault(path: str, header: str, architecture: Architecture) -> str | None:
    """What is wrong with `path` including `modicum/...`, if anything is."""
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
        return f"{header} is behind the door modicum/{room}/{room}.h"
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
            yield f"{path}:{number}: an open task without its issue number, as in (#12)"


def check_products(path: str, lines: list[str]) -> Iterator[str]:
    """Outside the rooms that bound or need them, no product of sizes may overflow unseen."""
    if is_test(path) or room_of(path) in (None, "base", "kernels"):
        return
    for number, line in enumerate(lines, start=1):
        if SIZE_PRODUCT.search(line.split("//")[0]):
            yield f"{path}:{number}: a bare product of a size; base/sizes.h has checked_mul"


def check_length(path: str, lines: list[str]) -> Iterator[str]:
    long_one = is_test(path) or room_of(path) == "kernels"
    limit = LONG_FILE_LINES if long_one else FILE_LINES
    if len(lines) > limit:
        yield f"{path}:1: {len(lines)} lines, {limit} are the limit"


def functions(root: Path, paths: list[str]) -> Iterator[tuple[str, str, int, int]]:
    """(path, name, first line, last line) of each function body."""
    command = [
        "ctags",
        "--languages=C++,Python",
        "--langmap=C++:+.h",
        "--kinds-C++=f",
        "--kinds-Python=fm",
        "--fields=+ne",
        "--output-format=json",
        "-f",
        "-",
        "-L",
        "-",
    ]
    result = subprocess.run(
        command, input="\n".join(paths), cwd=root, capture_output=True, text=True, check=True
    )
    for line in result.stdout.splitlines():
        tag = json.loads(line)
        if "end" in tag:
            yield tag["path"], tag["name"], tag["line"], tag["end"]


def check_functions(root: Path, paths: list[str]) -> Iterator[str]:
    measured = [path for path in paths if Path(path).suffix in CXX | {".py"}]
    for path, name, begin, end in functions(root, measured):
        limit = TEST_FUNCTION_LINES if is_test(path) else FUNCTION_LINES
        if end - begin + 1 > limit:
            yield f"{path}:{begin}: {name} has {end - begin + 1} lines, {limit} are the limit"


# ---- the tree


def check_mutants(root: Path) -> Iterator[str]:
    """A mutant whose text is not found exactly once can't be applied, and proves nothing."""
    for path in sorted((root / "scripts").glob("mutants*.toml")):
        for mutant in tomllib.loads(path.read_text()).get("mutant", []):
            source = root / mutant["file"]
            count = source.read_text().count(mutant["find"]) if source.is_file() else 0
            if count != 1:
                where = f"{path.relative_to(root)}:1: mutant '{mutant['name']}'"
                yield f"{where}: its text stands {count} times in {mutant['file']}, expected once"


def source_files(root: Path) -> list[str]:
    """What git knows or would add; all files where there is no git."""
    if (root / ".git").exists():
        command = ["git", "ls-files", "-co", "--exclude-standard"]
        listed = subprocess.run(command, cwd=root, capture_output=True, text=True, check=True)
        names: Iterable[str] = listed.stdout.splitlines()
    else:
        names = (str(path.relative_to(root)) for path in root.rglob("*"))
    kept = {name for name in names if (root / name).is_file()}
    return sorted(name for name in kept if Path(name).suffix in CODE or name == "Makefile")


def findings(root: Path) -> list[str]:
    architecture = read_architecture((root / "docs/ARCHITECTURE.md").read_text())
    found = list(check_table(architecture.rooms))
    found += check_cmake((root / "CMakeLists.txt").read_text(), architecture.rooms)
    paths = source_files(root)
    for path in paths:
        lines = (root / path).read_text().splitlines()
        if Path(path).suffix in CXX:
            found += check_includes(path, lines, architecture)
            found += check_products(path, lines)
        found += check_place(path, architecture.rooms)
        found += check_lines(path, lines)
        found += check_length(path, lines)
    found += check_functions(root, paths)
    found += check_mutants(root)
    return found


def main() -> int:
    root = Path(sys.argv[1] if len(sys.argv) > 1 else Path(__file__).resolve().parent.parent)
    found = findings(root)
    for line in found:
        print(line)
    if not found:
        print(f"{len(source_files(root))} files keep the rules")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
