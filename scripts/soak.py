#!/usr/bin/env python3
"""Runs the parts of `make soak`, which `make test` leaves out, each within about an hour.

soak.py [PART...] [--again] [--list]: by default all parts, in the order of PARTS. Each part that
ends appends a row to benchmarks/SOAK.md; a part is left out if a row says that it passed at this
commit, unless --again is given. So an interrupted run goes on where it was. Exit 1 if a part
fails. Standard library only.
"""

import argparse
import datetime
import json
import subprocess
import sys
import time
import xml.etree.ElementTree as ET
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGE = Path("benchmarks/SOAK.md")
# Parts write these files; a commit that differs in them only is the commit.
WRITTEN = (str(PAGE), "benchmarks/CONFORMANCE.md", ".ci/tidy-base")
REST = "rest"


@dataclass(frozen=True)
class Part:
    """Either the soak tests of files under tests/, or targets of the Makefile. `reports`: the JUnit
    reports, or verdicts, of the targets; without any, each target counts as one."""

    tests: tuple[str, ...] = ()
    targets: tuple[str, ...] = ()
    reports: tuple[str, ...] = ()


def of_tests(*folders: str) -> Part:
    """The part with these test files, each folder given as "folder: names"."""
    parsed = [folder.split(": ") for folder in folders]
    return Part(
        tuple(f"tests/{of}/test_{name}.py" for of, names in parsed for name in names.split())
    )


PARTS = {
    "kills": of_tests(
        "cli: faults owners resume_worlds save_faults checkpoint_damage",
        "torch/fronts: checkpoint_kills preemption",
        "torch/save: damaged_checkpoints sigterm",
    ),
    "power-cuts": of_tests("cli: power_cuts"),
    "devices": of_tests("cli: bad_disks", "torch/load: faults", "torch/save: two_nodes"),
    "engines": of_tests(
        "torch/fronts: engines engine_strategies which_way optimizers",
        "torch/load: training",
        "torch/optim: deepspeed",
        "torch/save: zero_directories",
    ),
    "conformance": Part(targets=("conformance",)),
    "conformance-wheels": Part(targets=("conformance-wheels",)),
    "fuzzers": Part(targets=("test-fuzz",)),
    "sanitizers": Part(
        targets=("test-asan-all", "test-tsan-all"),
        reports=("ctest-asan-all.xml", "ctest-tsan-all.xml"),
    ),
    "pages": of_tests("page: accelerate_page page plan_page site strategies_page watch_page"),
    "first-hour": of_tests("package: first_hour cpp_page guide_commands killed_page"),
    "wheels": of_tests("package: wheels"),
    "mutants": Part(targets=("mutants",), reports=("mutants/verdicts-{commit}.json",)),
    "generated-mutants": Part(
        targets=("generated-mutants",), reports=("mutants/generated-{commit}.json",)
    ),
    "builds": Part(targets=("test-dev", "test-clang"), reports=("ctest-dev.xml",)),
    "elsewhere": Part(targets=("test-elsewhere",)),
    "tidy": Part(targets=("tidy-all",)),
    "memory": of_tests(
        "cli: convert memory watch watch_runs",
        "torch/fronts: accelerate_memory checkpoint_memory",
        "torch/load: memory",
        "torch/save: background_memory convert_memory",
    ),
    "values": of_tests(
        "cli: compared",
        "layouts: digest_grid dump layout_grid",
        "package: numerics_page",
        "recipes: fp8 saved_families ties value_oracle",
        "torch/save: foreign_mutants values",
    ),
    REST: Part(),  # the soak tests of all other files
}


# ---- what a part runs


def tests_of(root: Path, name: str) -> list[str]:
    """The test files of a part, all of which exist. Those of REST are in no other part, so that
    each soak test is in one part. (Tests of GPUs are in none.)"""
    named = [file for part in PARTS.values() for file in part.tests]
    twice = sorted({file for file in named if named.count(file) > 1})
    missing = sorted(file for file in named if not (root / file).is_file())
    if twice or missing:
        sys.exit(f"soak.py: files in two parts: {twice}; files that do not exist: {missing}")
    if name != REST:
        return list(PARTS[name].tests)
    found = {str(path.relative_to(root)) for path in (root / "tests").rglob("test_*.py")}
    return sorted(file for file in found - {*named} if not file.startswith("tests/gpu/"))


def commands_of(root: Path, name: str) -> list[list[str]]:
    if PARTS[name].targets:
        return [["make", "--no-print-directory", target] for target in PARTS[name].targets]
    report = f"--junitxml=build/soak/{name}.xml"
    return [["scripts/test.sh", "python-soak", report, *tests_of(root, name)]]


def reports_of(name: str, commit: str) -> list[str]:
    reports = PARTS[name].reports if PARTS[name].targets else (f"soak/{name}.xml",)
    return [f"build/{report.format(commit=commit)}" for report in reports]


# ---- what came of it


VERDICTS = {"caught": 0, "hung": 0, "survived": 1, "does not build": 1, "not run": 2}


def counts(report: Path) -> list[int]:
    """The numbers of tests of a report that passed, failed and were skipped; of mutants those that
    were caught, that survived or do not build, and that were not run."""
    found = [0, 0, 0]
    if report.suffix == ".json":
        for one in json.loads(report.read_text()).values():
            found[VERDICTS[one["verdict"]]] += 1
        return found
    for case in ET.parse(report).iter("testcase"):
        failed = case.find("failure") is not None or case.find("error") is not None
        found[1 if failed else 2 if case.find("skipped") is not None else 0] += 1
    return found


def commit_of(root: Path) -> str:
    """The commit HEAD, with `+` if the tree has other changes than what parts write."""
    head = git(root, "rev-parse", "--short=10", "HEAD").strip()
    changed = git(root, "status", "--porcelain").splitlines()
    return head + "+" * any(line[3:] not in WRITTEN for line in changed)


def git(root: Path, *words: str) -> str:
    command = ["git", *words]
    return subprocess.run(command, cwd=root, check=True, capture_output=True, text=True).stdout


def has_passed(page: str, name: str, commit: str) -> bool:
    rows = [[cell.strip() for cell in line.split("|")] for line in page.splitlines()]
    return any(row[2:4] == [name, commit] and row[-2] == "ok" for row in rows if len(row) > 4)


def cpu_model() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(": ")[2]
    return "unknown"


def run_part(root: Path, name: str, commit: str, again: bool = False) -> bool:
    """Runs a part, appends its row if any test has run, and returns whether it has passed."""
    reports = [root / report for report in reports_of(name, commit)]
    for report in reports:
        report.parent.mkdir(parents=True, exist_ok=True)
        if again or report.suffix != ".json":  # verdicts are kept: a run of mutants goes on
            report.unlink(missing_ok=True)
    begin = time.monotonic()
    stage = ["scripts/stage.sh", f"soak, {name}"]
    exits = [subprocess.call([*stage, *one], cwd=root) for one in commands_of(root, name)]
    took_s = round(time.monotonic() - begin)
    found = [counts(report) for report in reports if report.exists()]
    if not reports:
        found = [[int(code == 0), int(code != 0), 0] for code in exits]
    if not found:
        print(f"{name}: no test has run", file=sys.stderr)
        return False
    passed, failed, skipped = (sum(column) for column in zip(*found, strict=True))
    is_ok = not any(exits) and len(found) >= len(reports)
    date = datetime.date.today().isoformat()
    cells = (date, name, commit, cpu_model(), passed, failed, skipped, took_s)
    with (root / PAGE).open("a") as page:
        page.write(f"| {' | '.join(map(str, cells))} | {'ok' if is_ok else 'FAILED'} |\n")
    return is_ok


def main() -> int:
    parser = argparse.ArgumentParser(description="the parts of make soak")
    parser.add_argument("parts", nargs="*", metavar="PART", help=", ".join(PARTS))
    parser.add_argument("--again", action="store_true", help="also parts that have passed")
    parser.add_argument("--list", action="store_true", help="print the parts and stop")
    options = parser.parse_args()
    if unknown := {*options.parts} - {*PARTS}:
        parser.error(f"expected parts of {', '.join(PARTS)}; got {', '.join(sorted(unknown))}")
    if options.list:
        print("\n".join(PARTS))
        return 0
    failed = []
    for name in options.parts or PARTS:
        commit = commit_of(ROOT)
        if not options.again and has_passed((ROOT / PAGE).read_text(), name, commit):
            print(f"{name}: has passed at {commit}")
        elif not run_part(ROOT, name, commit, options.again):
            failed.append(name)
    print(f"failed: {', '.join(failed)}" if failed else "no part failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
