#!/usr/bin/env python3
"""Checks which types a program that imports Modicum sees: mypy knows each public name, and the
result of each public function.

check_types.py: writes the program, which mentions each public name, to build/user.py, runs mypy on
it with the settings of pyproject.toml, prints the findings and exits 1 if there is any.
scripts/lint.sh calls it.
"""

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from reference import MODULES, file_of, public_names

# Functions whose result has no type here, and the reason.
UNTYPED = {"modicum.recipes.meta_model": "a model of transformers, which recipes may lack"}
REVEALED = re.compile(r':(\d+): note: Revealed type is "(.*)"$')


def names_of(root: Path, module: str) -> list[str]:
    """The names that a package re-exports, or the classes that a module defines."""
    body = ast.parse(file_of(root, module).read_text()).body
    classes = [node.name for node in body if isinstance(node, ast.ClassDef)]
    return public_names(root, module) or [one for one in classes if not one.startswith("_")]


def program(root: Path) -> list[str]:
    """The lines of the program: imports, then a line for each name."""
    uses = [f"{module}.{name}" for module in MODULES for name in names_of(root, module)]
    return [*(f"import {module}" for module in MODULES), *(f"reveal_type({one})" for one in uses)]


def is_known(shown: str) -> bool:
    """Whether mypy knows a type, which it shows as `def (a: A =) -> B` for a function."""
    while (less := re.sub(r"\[[^][]*\]", "", shown)) != shown:
        shown = less  # arguments and bounds of types
    return shown != "Any" and not re.search(r"-> Any\b", shown)


def findings(lines: list[str], output: str) -> Iterator[str]:
    known: dict[int, str] = {}
    for line in output.splitlines():
        if revealed := REVEALED.search(line):
            known[int(revealed[1])] = revealed[2]
        elif ": error: " in line:
            yield line
    for number, line in enumerate(lines, 1):
        name = line.removeprefix("reveal_type(").removesuffix(")")
        if name == line or name in UNTYPED:
            continue
        if number not in known:
            yield f"{name}: mypy does not reveal its type"
        elif not is_known(known[number]):
            yield f"{name}: mypy knows only {known[number]}"


def main() -> int:
    root = Path(__file__).resolve().parent.parent
    lines = program(root)
    source = root / "build/user.py"
    source.parent.mkdir(exist_ok=True)
    source.write_text("\n".join(lines) + "\n")
    command = [sys.executable, "-m", "mypy", "--config-file", "pyproject.toml", str(source)]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)
    found = list(findings(lines, done.stdout)) or [done.stderr] * (done.returncode != 0)
    print(*found, sep="\n", end="\n" if found else "")
    print(f"{len(lines) - len(MODULES)} public names, {len(found)} findings")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
