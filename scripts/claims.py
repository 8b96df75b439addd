"""The claims of the mutants, one for each promise of Modicum: their table and their faults."""

import argparse
import re
import shlex
import subprocess
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Protocol

MOST_CLAIMS = 190
LONGEST_CLAIM = 88  # so that its line fits 100 columns


class Refusal(Exception):
    """The list of mutants, an option or the tree is invalid, so that no mutant can be tried."""


class Mutant(Protocol):
    name: str
    claim: str
    file: str
    tests: str
    pytest: str


# ---- the table


def table(mutants: Iterable[Mutant]) -> str:
    """Claim, file and test of each mutant."""
    return "\n".join(
        f"{mutant.claim:<{LONGEST_CLAIM}}  {mutant.file}  {mutant.tests or mutant.pytest}"
        for mutant in mutants
    )


def faults_of_text(mutants: Iterable[Mutant]) -> Iterator[str]:
    """Claims that are too many, too long or stated twice."""
    claims = [mutant.claim for mutant in mutants]
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


def faults_of_tests(
    mutants: Iterable[Mutant], of_ctest: set[str], of_pytest: set[str]
) -> Iterator[str]:
    """Mutants of which `make test` runs no test."""
    for mutant in mutants:
        if mutant.tests and not any(re.search(mutant.tests, name) for name in of_ctest):
            yield f"'{mutant.name}': ctest has no test {mutant.tests}"
        if mutant.pytest and not any(picked(mutant.pytest, of_pytest)):
            yield f"'{mutant.name}': `make test` runs no test of {mutant.pytest}"


def faults(root: Path, python: Path, mutants: Iterable[Mutant]) -> list[str]:
    mutants = list(mutants)
    of_ctest = ctests(path.read_text() for path in root.glob("modicum/*/*_test.cc"))
    of_pytest = collected(root, python, mutants)
    return [*faults_of_text(mutants), *faults_of_tests(mutants, of_ctest, of_pytest)]
