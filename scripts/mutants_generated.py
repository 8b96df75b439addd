#!/usr/bin/env python3
"""Mutation tests with generated faults: small changes of lines that changed since a commit.

mutants_generated.py [--since COMMIT] [--seed N] [--count N] [--list] [--jobs N] [--python PATH].
Collects every fault that the operators below make on changed lines of modicum/ (C++ and Python, no
tests), draws N of them with the seed, and tries each as scripts/mutants.py does, with the tests of
its room. Prints the faults that survive, for which a test may be missing: some are equivalent to
the code. Exit 2 if the tests fail without a fault, else 0. Standard library only.
"""

import argparse
import ast
import io
import os
import random
import re
import subprocess
import sys
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from soak import commit_of

import mutants

ROOT = mutants.ROOT
PACKAGE = "modicum/python/modicum/"
NOT_CODE = re.compile(r"_(test|fuzz|doubles?)\.(cc|h)$|\.pyi$")
FLIPS = {"==": "!=", "!=": "==", "+": "-", "-": "+", "+=": "-=", "-=": "+=", "*": "+", "&&": "||"}
FLIPS |= {"||": "&&", "and": "or", "or": "and"}
BOUNDS = {"<": "<=", "<=": "<", ">": ">=", ">=": ">"}
CONSTANTS = {"true": "false", "false": "true", "True": "False", "False": "True"}
# Comments and literals of C++, in which nothing is changed.
MASKED = re.compile(
    r'(?sm)//[^\n]*|/\*.*?\*/|R"\(.*?\)"|"(?:\\.|[^"\\\n])*"|(?<!\w)\'(?:\\.|[^\'\\\n])+\''
)
BINARY = re.compile(r"(?<= )(==|!=|&&|\|\||[-+]=?|\*|[<>]=?)(?= )")
INTEGER = re.compile(r"(?<![\w.'])\d+(?![\w.'])")
# A call or an assignment that declares nothing.
STATEMENT = re.compile(r"[\w:.>\[\]*()-]*[\w\])](?:\(.*\)| [-+*/|&]?= .+);")


@dataclass(frozen=True)
class Edit:
    """Text in place of the columns [begin, end) of a line, which counts from 1."""

    line: int
    begin: int
    end: int
    text: str
    what: str


# ---- operators


def word_edits(line: int, begin: int, word: str) -> Iterator[Edit]:
    """The edits of an operator, an integer or a boolean constant."""
    for what, table in (("operator", FLIPS), ("bound", BOUNDS), ("constant", CONSTANTS)):
        if word in table:
            yield Edit(line, begin, begin + len(word), table[word], what)
    if word.isdecimal():
        yield Edit(line, begin, begin + len(word), str(int(word) + 1), "constant")


def closing(text: str, begin: int) -> int:
    """The index of the parenthesis that closes the one at `begin`; -1 if there is none."""
    depth = 0
    for at in range(begin, len(text)):
        depth += (text[at] == "(") - (text[at] == ")")
        if depth == 0:
            return at
    return -1


def cxx_edits(text: str) -> Iterator[Edit]:
    """On masked text: each comment and literal is as many spaces."""
    masked = MASKED.sub(lambda match: re.sub(r"[^\n]", " ", match[0]), text)
    lines, before = text.splitlines(), ";"  # before: the last character of the code above
    for number, line in enumerate(masked.splitlines(), 1):
        for match in (*BINARY.finditer(line), *INTEGER.finditer(line)):
            yield from word_edits(number, match.start(), match[0])
        for match in re.finditer(r"\b(?:true|false)\b", line):
            yield from word_edits(number, match.start(), match[0])
        for match in re.finditer(r"\b(?:if|while) \(", line):
            begin, end = match.end(), closing(line, match.end() - 1)
            if end >= 0 and ";" not in line[begin:end]:
                yield Edit(number, begin, end, f"!({lines[number - 1][begin:end]})", "branch")
        code = line.strip()
        if before in ";{}:" and STATEMENT.fullmatch(code):
            yield Edit(number, line.index(code), len(line.rstrip()), ";", "statement")
        before = code[-1:] or before


def python_edits(text: str) -> Iterator[Edit]:
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type in (tokenize.OP, tokenize.NAME, tokenize.NUMBER):
            yield from word_edits(*token.start, token.string)
    for node in ast.walk(ast.parse(text)):
        at = getattr(node, "lineno", 0)
        if isinstance(node, (ast.If, ast.While)) and node.test.end_lineno == node.test.lineno:
            begin, end = node.test.col_offset, node.test.end_col_offset
            old = text.splitlines()[node.test.lineno - 1][begin:end]
            yield Edit(node.test.lineno, begin, end, f"not ({old})", "branch")
        is_call = isinstance(node, ast.Expr) and isinstance(node.value, ast.Call)
        parts = (ast.Attribute, ast.Subscript)  # without a name's value the code fails anyway
        sets = isinstance(node, ast.Assign) and isinstance(node.targets[0], parts)
        if (is_call or sets or isinstance(node, ast.AugAssign)) and node.end_lineno == at:
            yield Edit(at, node.col_offset, node.end_col_offset, "pass", "statement")


# ---- mutants


def changed_lines(commit: str) -> dict[str, set[int]]:
    """The lines of code that differ from the commit, by file."""
    words = ["git", "diff", "-U0", "--no-renames", "--no-color", commit, "--", "modicum"]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        raise mutants.Refusal(done.stderr.strip())
    found: dict[str, set[int]] = {}
    file = ""
    for line in done.stdout.splitlines():
        if line.startswith("+++ "):
            file = line.removeprefix("+++ ").removeprefix("b/")
        elif match := re.match(r"@@ -\S+ \+(\d+)(?:,(\d+))? @@", line):
            first, count = int(match[1]), int(match[2] or 1)
            found.setdefault(file, set()).update(range(first, first + count))
    code = (".cc", ".h", ".py")
    return {one: of for one, of in found.items() if one.endswith(code) and not NOT_CODE.search(one)}


def tests_of(file: str) -> dict[str, str]:
    """The field `tests` or `pytest` of a mutant in this file: the tests of its room."""
    inside = file.removeprefix(PACKAGE)
    if inside.startswith("torch/"):
        room = {"loading": "load", "saving": "save"}.get(name := Path(inside).parts[1], name)
        folder = f"torch/{room}" if (ROOT / "tests/torch" / room).is_dir() else "torch/fronts"
    elif file.startswith("modicum/python/"):
        folder = "recipes" if inside.startswith("recipes/") else "package"
    else:
        text = "".join(path.read_text() for path in (ROOT / file).parent.glob("*_test.cc"))
        if suites := sorted(set(re.findall(r"^TEST\w*\((\w+),", text, re.M))):
            return {"tests": "|".join(rf"{suite}\." for suite in suites)}
        folder = "cli"
    return {"pytest": f"tests/{folder} -m 'not soak and not alone'"}


def mutant_of(file: str, text: str, edit: Edit) -> mutants.Mutant:
    """The mutant of an edit. Its `find` begins as many lines above as make it unique."""
    lines = text.splitlines(keepends=True)
    line = lines[edit.line - 1]
    changed = line[: edit.begin] + edit.text + line[edit.end :]
    first = edit.line - 1
    while first > 0 and text.count("".join(lines[first : edit.line])) > 1:
        first -= 1
    above = "".join(lines[first : edit.line - 1])
    old = line[edit.begin : edit.end]
    name = f"{file}:{edit.line}:{edit.begin + 1}: {edit.what}: {old} -> {edit.text}"
    return mutants.Mutant(name, edit.what, file, above + line, above + changed, **tests_of(file))


def generated(file: str, text: str, lines: set[int]) -> list[mutants.Mutant]:
    edits = python_edits(text) if file.endswith(".py") else cxx_edits(text)
    # Python's columns count bytes, so other lines than ASCII are left out.
    lines = {line for line in lines if text.splitlines()[line - 1].isascii()}
    return [mutant_of(file, text, edit) for edit in edits if edit.line in lines]


def main() -> int:
    parser = argparse.ArgumentParser(description="mutation tests with generated faults")
    parser.add_argument("--since", default="HEAD~20", help="a commit (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--count", type=int, default=20, help="the number of faults that are tried")
    parser.add_argument("--list", action="store_true", help="print the drawn faults and stop")
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--python", type=Path, default=ROOT / ".venv/bin/python")
    options = parser.parse_args()
    try:
        every = []
        for file, lines in sorted(changed_lines(options.since).items()):
            if (ROOT / file).is_file():
                every += generated(file, (ROOT / file).read_text(), lines)
        drawn = random.Random(options.seed).sample(every, min(options.count, len(every)))
        print(f"{len(drawn)} of {len(every)} faults since {options.since}, seed {options.seed}")
        if options.list:
            print("\n".join(mutant.name for mutant in drawn))
        elif drawn:
            verdicts = mutants.WORK / f"generated-{commit_of(ROOT)}.json"
            mutants.run_mutants(drawn, options.jobs, options.python, verdicts)
        return 0
    except mutants.Refusal as refusal:
        print(f"mutants_generated.py: {refusal}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
