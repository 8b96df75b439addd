#!/usr/bin/env python3
"""Checks that each C++ test runs in at least one stage of `make test`.

check_skips.py REPORT...: reads ctest's JUnit reports, one per stage. Prints each test that every
stage skipped for a reason of the test's own, such as a sanitizer, and exits 1 if there is any, or
if a report is missing. Tests that only this machine can't run, for example since root may read
every file, are counted. Standard library only.
"""

import re
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

# Reasons that depend on the machine: the texts of GTEST_SKIP begin with these words.
OF_THE_MACHINE = re.compile(
    r"this kernel|this file system|only root|root (may|is)|needs root|one CPU"
)
REASON = re.compile(r"^\S+:\d+: Skipped\n(.*?)\n*^\[  SKIPPED \]", re.M | re.S)


def outcomes(report: Path) -> dict[tuple[str, str], str]:
    """For each test of a stage, by room and name: the reason why it was skipped, "" if it ran."""
    found = {}
    for case in ET.parse(report).iter("testcase"):
        room = next((one.get("value", "") for one in case.iter("property")), "")
        reason = REASON.search(case.findtext("system-out") or "")
        skipped = case.find("skipped") is not None
        found[room, case.get("name", "")] = (reason[1] if reason else "unknown") * skipped
    return found


def judged(stages: list[dict[tuple[str, str], str]]) -> tuple[list[str], int]:
    """(a finding for each test that no stage runs, the number of tests that this machine can't
    run)."""
    found, beyond = [], 0
    for test in sorted(set().union(*stages)):
        reasons = {stage[test] for stage in stages if test in stage}
        if "" in reasons:
            continue
        if any(OF_THE_MACHINE.match(reason) for reason in reasons):
            beyond += 1
        else:
            found.append(f"{test[0]}: {test[1]} runs in no stage: {'; '.join(sorted(reasons))}")
    return found, beyond


def main() -> int:
    reports = [Path(name) for name in sys.argv[1:]]
    missing = [report for report in reports if not report.exists()]
    unrun, beyond = judged([outcomes(report) for report in reports if report not in missing])
    found = [*(f"{report} is missing: its stage has not run" for report in missing), *unrun]
    all_run = f"each test runs in a stage, except {beyond} that this machine can't run"
    print("\n".join(found) or all_run)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
