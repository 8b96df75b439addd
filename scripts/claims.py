"""Mutants with a claim: one for each promise of Modicum. Selects them and samples of the others for
mutants.py, prints their table and checks it."""

import argparse
import random
import re
import shlex
import subprocess
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Protocol, TypeVar

MOST_CLAIMS = 190
LONGEST_CLAIM = 88  # so that its line fits 100 columns


class Refusal(Exception):
    """The list of mutants, an option or the tree is invalid, so that no mutant can be tried."""


class Mutant(Protocol):
    name: str
    room: str
    claim: str
    file: str
    tests: str
    pytest: str


M = TypeVar("M", bound=Mutant)


# ---- the selection


def shares(sizes: dict[str, int], count: int) -> dict[str, int]:
    """How many of `count` draws each room gets: in proportion to its size, but at least one."""
    total = sum(sizes.values())
    if not len(sizes) <= count <= total:
        raise Refusal(f"--sample: expected {len(sizes)} to {total}, got {count}")
    got = dict.fromkeys(sizes, 1)
    for _ in range(count - len(sizes)):
        left = [room for room in sizes if got[room] < sizes[room]]
        got[max(left, key=lambda room: sizes[room] * count / total - got[room])] += 1
    return got


def sample(mutants: list[M], count: int, seed: int) -> list[M]:
    """`count` mutants, drawn by room, in their order. A change in one room's list changes no other
    room's draw, as long as the shares stay."""
    sizes = Counter(mutant.room for mutant in mutants)
    of_room = shares(sizes, count)
    print(f"seed {seed}: {count} of {len(mutants)} mutants without a claim:")
    print(", ".join(f"{room} {got} of {sizes[room]}" for room, got in of_room.items()))
    drawn = {
        name
        for room, got in of_room.items()
        for name in random.Random(f"{seed} {room}").sample(
            [mutant.name for mutant in mutants if mutant.room == room], got
        )
    }
    return [mutant for mutant in mutants if mutant.name in drawn]


def selected(mutants: list[M], options: argparse.Namespace) -> list[M]:
    """The mutants with a claim (--claims), a sample of the others (--sample), both or all."""
    if not options.claims and not options.sample:
        return mutants
    kept = [mutant for mutant in mutants if mutant.claim and options.claims]
    others = [mutant for mutant in mutants if not mutant.claim]
    return kept + (sample(others, options.sample, options.seed) if options.sample else [])


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--claims", action="store_true", help="only mutants with a claim")
    parser.add_argument(
        "--sample", type=int, default=0, metavar="N", help="N mutants without a claim, by room"
    )
    parser.add_argument("--seed", type=int, default=0, help="of --sample")
    parser.add_argument(
        "--check-claims",
        action="store_true",
        help="check that `make test` runs the tests of the claims, and stop",
    )


# ---- the table


def table(mutants: Iterable[Mutant]) -> str:
    """Claim, file and test of each mutant with a claim, by room."""
    by_room: dict[str, list[Mutant]] = {}
    for mutant in mutants:
        if mutant.claim:
            by_room.setdefault(mutant.room, []).append(mutant)
    lines = []
    for room, claimed in sorted(by_room.items()):
        lines += ["", f"{room} ({len(claimed)})"]
        lines += [f"  {one.claim:<{LONGEST_CLAIM}}  {one.file}  {test_of(one)}" for one in claimed]
    return "\n".join(lines[1:])


def test_of(mutant: Mutant) -> str:
    return mutant.tests or mutant.pytest


def faults_of_text(mutants: Iterable[Mutant]) -> Iterator[str]:
    """Claims that are too many, too long or stated twice."""
    claims = [mutant.claim for mutant in mutants if mutant.claim]
    if len(claims) > MOST_CLAIMS:
        yield f"expected {MOST_CLAIMS} claims at most, got {len(claims)}"
    for claim, times in Counter(claims).items():
        if times > 1:
            yield f"'{claim}' is the claim of {times} mutants"
        if len(claim) > LONGEST_CLAIM or "\n" in claim:
            yield f"'{claim}' is longer than {LONGEST_CLAIM} characters"


# ---- the tests


def ctests(sources: Iterable[str]) -> set[str]:
    """The names that ctest gives to the tests of these sources; of parametrised ones, a first."""
    names: set[str] = set()
    for source in sources:
        names |= {
            f"{suite}.{name}"
            for suite, name in re.findall(r"^TEST(?:_F)?\((\w+),\s*(\w+)\)", source, re.MULTILINE)
        }
        made = re.findall(r"^INSTANTIATE_TEST_SUITE_P\((\w+),\s*(\w+)", source, re.MULTILINE)
        parametrised = re.findall(r"^TEST_P\((\w+),\s*(\w+)\)", source, re.MULTILINE)
        names |= {
            f"{prefix}/{suite}.{name}/0"
            for suite, name in parametrised
            for prefix, of in made
            if of == suite
        }
    return names


def picked(arguments: str, tests: Iterable[str]) -> Iterator[str]:
    """Those of the tests, as --collect-only prints them, that pytest with these arguments runs."""
    parser = argparse.ArgumentParser()
    parser.add_argument("-k", default="")
    parser.add_argument("-m", default="not soak")
    options, words = parser.parse_known_args(shlex.split(arguments))
    paths = tuple(word for word in words if word.startswith("tests/"))
    if options.m != "not soak":
        return
    for test in tests:
        if test.startswith(paths) and (not options.k or is_match(options.k, test)):
            yield test


def is_match(expression: str, test: str) -> bool:
    """Whether -k selects the test: each word is part of its name, or not."""
    path, _, rest = test.lower().partition("::")
    name = f"{path.rpartition('/')[2]}::{rest}"

    def is_in(word: re.Match[str]) -> str:
        is_operator = word[0] in ("and", "or", "not")
        return word[0] if is_operator else str(word[0].lower() in name)

    return bool(eval(re.sub(r"[^\s()]+", is_in, expression)))


def collected(root: Path, python: Path, mutants: Iterable[Mutant]) -> set[str]:
    """The tests, without those of soak, in the files that the mutants name."""
    words = {word for mutant in mutants for word in shlex.split(mutant.pytest)}
    files = sorted({word.partition("::")[0] for word in words if word.startswith("tests/")})
    command = [str(python), "-m", "pytest", "--collect-only", "-q", "-m", "not soak"]
    command += ["--continue-on-collection-errors", "-p", "no:cacheprovider"]
    command += [file for file in files if (root / file).exists()]
    listed = subprocess.run(command, cwd=root, capture_output=True, text=True)
    lines = listed.stdout.splitlines()
    return {line for line in lines if line.startswith("tests/") and "::" in line}


def faults_of_tests(mutants: Iterable[M], of_ctest: set[str], of_pytest: set[str]) -> Iterator[str]:
    """Mutants with a claim of which `make test` runs no test."""
    for mutant in mutants:
        if mutant.tests and not any(re.search(mutant.tests, name) for name in of_ctest):
            yield f"'{mutant.name}': ctest has no test {mutant.tests}"
        if mutant.pytest and not any(picked(mutant.pytest, of_pytest)):
            yield f"'{mutant.name}': `make test` runs no test of {mutant.pytest}"


def faults(root: Path, python: Path, mutants: Iterable[M]) -> list[str]:
    kept = [mutant for mutant in mutants if mutant.claim]
    of_ctest = ctests(path.read_text() for path in root.glob("modicum/*/*_test.cc"))
    of_pytest = collected(root, python, kept)
    return [*faults_of_text(kept), *faults_of_tests(kept, of_ctest, of_pytest)]
