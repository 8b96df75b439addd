#!/usr/bin/env python3
"""Mutation tests: applies the faults of mutants/*.toml, one at a time, and runs their tests, which
must fail. Each fault breaks a claim, one promise of Modicum.

mutants.py [FILE...] [--only TEXT] [--part I/N] [--again] [--list] [--jobs N] [--python PATH]. FILE
is one of mutants/*.toml; by default all are read. --list prints a table of the claims, --check
checks that `make test` runs their tests. Works on a copy of the tree under build/mutants. The tests
of a mutant are selected from ctest's, or are Python tests, which use the copy's program and
package. Each verdict is written to build/mutants/verdicts-COMMIT.json; a later run at this commit
does not try a mutant that has one, unless --again is given. Verdicts:

    caught          the tests fail
    hung            the Python tests exceed the time limit, which counts as caught
    survived        the tests pass: they do not detect the fault
    not run         the Python tests are all skipped: the package that they test is not installed
    does not build

Mutants of engines are run with --python build/conformance/engines/bin/python.

Exit 0 if no mutant survives and all build; 1 otherwise; 2, before any mutant is tried, if the list
is invalid (`find` does not occur exactly once in its file, for example) or the tests fail without a
mutant. Python 3.11 or later, standard library only.
"""

import argparse
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import claims
import tomllib
from claims import Refusal
from soak import commit_of

ROOT = Path(__file__).resolve().parent.parent
WORK = ROOT / "build/mutants"
SOURCE, BUILD, PACKAGE = WORK / "src", WORK / "build", WORK / "package"
UNMUTATED_TIMEOUT_S = 900  # of Python tests without a mutant
# The time limit of each test of ctest, and the least limit of the Python tests of a mutant. They
# may take three times as long as without the mutant if that is more: a slow test on a busy machine
# must not count as hung.
TEST_TIMEOUT_S = 120
HUNG = 124  # our exit status for Python tests that exceed their time limit
# Warnings are off, so that a mutant with an unused variable compiles.
CXX_FLAGS = "-O1 -w"


@dataclass(frozen=True)
class Mutant:
    name: str
    claim: str  # the promise that the mutant breaks
    file: str
    find: str
    replace: str
    # Exactly one of the following is set.
    tests: str = ""  # a regular expression over the names of ctest's tests
    pytest: str = ""  # arguments for pytest


@dataclass(frozen=True)
class Outcome:
    mutant: Mutant
    verdict: str
    seconds: float

    @property
    def failed(self) -> bool:
        return self.verdict in ("survived", "does not build")


# ---- the list


def read_mutants(paths: list[Path]) -> list[Mutant]:
    entries = [entry for path in paths for entry in read_list(path)]
    either = {"tests", "pytest"}
    fields = set(Mutant.__dataclass_fields__) - either
    for entry in entries:
        is_whole = set(entry) - either == fields and len(set(entry) & either) == 1
        if not is_whole or not all(isinstance(text, str) for text in entry.values()):
            expected = f"strings {', '.join(sorted(fields))}, and either tests or pytest"
            got = ", ".join(sorted(entry))
            raise Refusal(f"{entry.get('name', 'a mutant')}: expected {expected}; got {got}")
    mutants = [Mutant(**entry) for entry in entries]
    names = [mutant.name for mutant in mutants]
    for name in names:
        if names.count(name) > 1:
            raise Refusal(f"two mutants are called '{name}'")
    return mutants


def read_list(path: Path) -> list[dict[str, str]]:
    """The entries of a list. No entry may need the tests of soak."""
    entries = tomllib.loads(path.read_text())["mutant"]
    for entry in entries:
        if "pytest" in entry and " -m " not in entry["pytest"]:
            entry["pytest"] += " -m 'not soak'"
    return entries


def mutated(text: str, mutant: Mutant) -> str:
    count = text.count(mutant.find)
    if count != 1:
        raise Refusal(
            f"'{mutant.name}': `find` must occur once in {mutant.file}, occurs {count} times"
        )
    if mutant.find == mutant.replace:
        raise Refusal(f"'{mutant.name}' changes nothing")
    return text.replace(mutant.find, mutant.replace)


def part_of(mutants: list[Mutant], part: str) -> list[Mutant]:
    """Every N-th mutant from the I-th on, for the part "I/N"."""
    numbers = re.fullmatch(r"([1-9]\d*)/([1-9]\d*)", part)
    if not numbers or int(numbers[1]) > int(numbers[2]):
        raise Refusal(f"expected a part I/N with 1 <= I <= N, got '{part}'")
    return mutants[int(numbers[1]) - 1 :: int(numbers[2])]


# ---- the copy


def tree_files() -> list[str]:
    command = ["git", "ls-files", "-co", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    return [name for name in listed.stdout.splitlines() if (ROOT / name).is_file()]


def copy_tree() -> None:
    """Makes the copy equal to the tree. Writes only files that differ, to rebuild little."""
    wanted = set(tree_files())
    for path in list(SOURCE.rglob("*")) if SOURCE.exists() else []:
        if path.is_file() and str(path.relative_to(SOURCE)) not in wanted:
            path.unlink()
    for name in wanted:
        here, there = ROOT / name, SOURCE / name
        there.parent.mkdir(parents=True, exist_ok=True)
        if not there.exists() or there.read_bytes() != here.read_bytes():
            shutil.copyfile(here, there)


# ---- building and testing


def run(command: list[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command, capture_output=True, text=True, errors="replace", stdin=subprocess.DEVNULL
    )


def configure(python: Path | None) -> None:
    """Configures the build; with `python`, it includes the Python module for that interpreter."""
    module = [f"-DPython_EXECUTABLE={python}"] if python else []
    result = run(
        [
            "cmake",
            "-S",
            str(SOURCE),
            "-B",
            str(BUILD),
            "-G",
            "Ninja",
            "-DCMAKE_BUILD_TYPE=",
            f"-DCMAKE_CXX_FLAGS={CXX_FLAGS}",
            f"-DMODICUM_PYTHON={'ON' if python else 'OFF'}",
            *module,
        ]
    )
    if result.returncode != 0:
        raise Refusal(f"the tree does not configure:\n{result.stdout}{result.stderr}")


def build(targets: list[str], jobs: int) -> subprocess.CompletedProcess[str]:
    return run(["ninja", "-C", str(BUILD), "-j", str(jobs), *targets])


def test(pattern: str, jobs: int) -> subprocess.CompletedProcess[str]:
    return run(
        [
            "ctest",
            "--test-dir",
            str(BUILD),
            "-R",
            pattern,
            "-j",
            str(jobs),
            "--output-on-failure",
            "--no-tests=error",
            "--timeout",
            str(TEST_TIMEOUT_S),
        ]
    )


def lay_out_package() -> None:
    """Makes a folder that equals the installed Python package, with links to the copy's files and
    the built module."""
    package = PACKAGE / "modicum"
    shutil.rmtree(package, ignore_errors=True)
    package.mkdir(parents=True)
    for path in [*(SOURCE / "modicum/python/modicum").iterdir(), *BUILD.glob("_modicum*.so")]:
        (package / path.name).symlink_to(path)


def test_python(arguments: str, python: Path, timeout_s: float) -> subprocess.CompletedProcess[str]:
    """Runs pytest. With CI=true a test fails, instead of skipping, if its oracle is missing. No
    byte code is written, since a mutant's could be stale."""
    environment = os.environ | {
        "PYTHONPATH": str(PACKAGE),
        "PYTHONDONTWRITEBYTECODE": "1",
        "CI": "true",
    }
    command = [
        str(python),
        "-m",
        "pytest",
        "-x",
        "-q",
        "-p",
        "no:cacheprovider",
        *shlex.split(arguments),
        # As one word: pytest takes the root directory from words that are paths.
        f"--modicum={BUILD / 'modicum'}",
    ]
    try:
        return subprocess.run(
            command,
            capture_output=True,
            text=True,
            cwd=SOURCE,
            env=environment,
            stdin=subprocess.DEVNULL,
            timeout=timeout_s,
        )
    except subprocess.TimeoutExpired as late:
        return subprocess.CompletedProcess(command, HUNG, f"{late}", "")


def programs_of(mutant: Mutant) -> list[str]:
    """The build targets that the tests of a mutant need."""
    if mutant.pytest:
        return ["modicum", "_modicum"]
    result = run(["ctest", "--test-dir", str(BUILD), "-R", mutant.tests, "--show-only=json-v1"])
    listed = json.loads(result.stdout)["tests"]
    return sorted({Path(entry["command"][0]).name for entry in listed if "command" in entry})


@dataclass(frozen=True)
class Prepared:
    """The build targets of a mutant, and the time limit of its Python tests."""

    programs: list[str]
    timeout_s: float = TEST_TIMEOUT_S


def check_unmutated(mutants: list[Mutant], jobs: int, python: Path) -> dict[str, Prepared]:
    """Raises Refusal unless every selected test exists and passes without a mutant. Returns the
    preparation of each mutant, by name."""
    of_python = sorted({mutant.pytest for mutant in mutants} - {""})
    if of_python and run([str(python), "-c", "import nanobind, pytest"]).returncode != 0:
        raise Refusal(f"{python} lacks nanobind or pytest: scripts/venv.sh test wheel")
    configure(python if of_python else None)
    result = build(["all"], jobs)
    if result.returncode != 0:
        raise Refusal(f"the tree does not build:\n{result.stdout}{result.stderr}")
    programs = {mutant.name: programs_of(mutant) for mutant in mutants}
    for mutant in mutants:
        if not programs[mutant.name]:
            raise Refusal(f"'{mutant.name}': no test matches {mutant.tests}")
    results = []
    of_ctest = sorted({mutant.tests for mutant in mutants} - {""})
    if of_ctest:  # no parentheses around each: ctest's regular expressions allow only a few groups
        results.append(test("|".join(of_ctest), jobs))
    took_s = {"": 0.0}
    if of_python:
        lay_out_package()
    for arguments in of_python:
        start = time.monotonic()
        results.append(test_python(arguments, python, UNMUTATED_TIMEOUT_S))
        took_s[arguments] = time.monotonic() - start
    red = [result.stdout + result.stderr for result in results if result.returncode != 0]
    if red:
        raise Refusal("\n".join(["tests fail without a mutant:", *red]))
    return {
        mutant.name: Prepared(programs[mutant.name], max(TEST_TIMEOUT_S, 3 * took_s[mutant.pytest]))
        for mutant in mutants
    }


def verdict_on(mutant: Mutant, prepared: Prepared, jobs: int, python: Path) -> str:
    result = build(prepared.programs, jobs)
    if result.returncode != 0:
        print(result.stdout[-2000:], file=sys.stderr)
        return "does not build"
    if mutant.pytest:
        tested = test_python(mutant.pytest, python, prepared.timeout_s)
    else:
        tested = test(mutant.tests, jobs)
    if mutant.pytest and tested.returncode == 0 and " passed" not in tested.stdout:
        return "not run"
    return {0: "survived", HUNG: "hung"}.get(tested.returncode, "caught")


def try_mutant(mutant: Mutant, prepared: Prepared, jobs: int, python: Path) -> Outcome:
    start = time.monotonic()
    path = SOURCE / mutant.file
    original = path.read_text()
    path.write_text(mutated(original, mutant))
    try:
        verdict = verdict_on(mutant, prepared, jobs, python)
    finally:
        path.write_text(original)
        os.utime(path)  # so that ninja rebuilds it even within the clock's resolution
    return Outcome(mutant, verdict, time.monotonic() - start)


# ---- the report


def report(outcomes: list[Outcome]) -> None:
    width = max(len(outcome.mutant.name) for outcome in outcomes)
    print()
    for outcome in outcomes:
        print(f"{outcome.verdict:<14}  {outcome.mutant.name:<{width}}  {outcome.mutant.claim}")
    failed = sum(outcome.failed for outcome in outcomes)
    not_run = sum(outcome.verdict == "not run" for outcome in outcomes)
    print(f"\n{len(outcomes) - failed - not_run} passed, {not_run} not run, {failed} failed")


Verdicts = dict[str, dict[str, str | float]]  # name of a mutant -> verdict, seconds


def read_verdicts(path: Path) -> Verdicts:
    """The verdicts that earlier runs wrote. None if the tree has changes that are not in the commit
    (`+` in the file's name), which may be others now."""
    return json.loads(path.read_text()) if path.exists() and "+" not in path.name else {}


def write_verdicts(path: Path, verdicts: Verdicts) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.with_suffix(".new").write_text(json.dumps(verdicts, indent=1))
    path.with_suffix(".new").replace(path)


def run_mutants(mutants: list[Mutant], jobs: int, python: Path, path: Path) -> int:
    """Tries the mutants that have no verdict in the file `path`, and reports on all."""
    for mutant in mutants:
        mutated((ROOT / mutant.file).read_text(), mutant)
    verdicts = read_verdicts(path)
    left = [mutant for mutant in mutants if mutant.name not in verdicts]
    if left:
        copy_tree()
        prepared = check_unmutated(left, jobs, python)
    for mutant in left:
        outcome = try_mutant(mutant, prepared[mutant.name], jobs, python)
        verdicts[mutant.name] = {"verdict": outcome.verdict, "seconds": outcome.seconds}
        write_verdicts(path, verdicts)
        print(f"{outcome.verdict}: {mutant.name} ({outcome.seconds:.1f} s)", flush=True)
    outcomes = [Outcome(mutant, **verdicts[mutant.name]) for mutant in mutants]
    report(outcomes)
    return 1 if any(outcome.failed for outcome in outcomes) else 0


def check_claims(mutants: list[Mutant], python: Path) -> int:
    """Checks the mutants without trying them; prints the faults."""
    found = claims.faults(ROOT, python, mutants)
    print("\n".join(found or ["every claim has its test"]))
    return 1 if found else 0


def main() -> int:
    parser = argparse.ArgumentParser(description="mutation tests")
    parser.add_argument("files", nargs="*", type=Path, help="by default all of mutants/*.toml")
    parser.add_argument("--only", default="", help="only mutants with this text in their name")
    parser.add_argument("--part", default="1/1", help="I/N: every N-th mutant from the I-th on")
    parser.add_argument("--again", action="store_true", help="also mutants that have a verdict")
    parser.add_argument("--list", action="store_true", help="print the mutants and stop")
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument(
        "--python",
        type=Path,
        default=ROOT / ".venv/bin/python",
        help="interpreter for the Python tests, with the packages of `scripts/venv.sh test wheel`",
    )
    parser.add_argument(
        "--check", action="store_true", help="check that `make test` runs the tests, and stop"
    )
    options = parser.parse_args()
    try:
        mutants = read_mutants(options.files or sorted(ROOT.glob("mutants/*.toml")))
        if options.check:
            return check_claims(mutants, options.python)
        mutants = [mutant for mutant in mutants if options.only in mutant.name]
        mutants = part_of(mutants, options.part)
        if options.list:
            print(claims.table(mutants))
            return 0
        if not mutants:
            raise Refusal(f"no mutant has '{options.only}' in its name")
        path = WORK / f"verdicts-{commit_of(ROOT)}.json"
        if options.again:
            path.unlink(missing_ok=True)
        return run_mutants(mutants, options.jobs, options.python, path)
    except Refusal as refusal:
        print(f"mutants.py: {refusal}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
