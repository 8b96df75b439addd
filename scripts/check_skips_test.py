#!/usr/bin/env python3
"""check_skips.py reports a test that no stage runs, and accepts those that one stage runs or that
the machine can't run."""

import sys
import tempfile
import unittest
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
import check_skips

RAN = '<testcase name="{name}" status="run">{room}<system-out>[  PASSED  ]</system-out></testcase>'
SKIPPED = """<testcase name="{name}" status="notrun"><skipped message="matched"/>{room}<system-out>
[ RUN      ] {name}
../../modicum/io/file_test.cc:292: Skipped
{reason}
[  SKIPPED ] {name} (0 ms)
</system-out></testcase>"""
ROOM = '<properties><property name="cmake_labels" value="io"/></properties>'
SANITIZED = "sanitizers hold shadow memory"


class Skips(unittest.TestCase):
    def judged(self, *stages: dict[str, str]) -> tuple[list[str], int]:
        """What check_skips says of stages, each given as test -> reason, "" if it ran."""
        with tempfile.TemporaryDirectory() as folder:
            read = []
            for number, tests in enumerate(stages):
                report = Path(folder, f"{number}.xml")
                cases = [
                    (SKIPPED if reason else RAN).format(name=name, reason=reason, room=ROOM)
                    for name, reason in tests.items()
                ]
                report.write_text(f"<testsuite>{''.join(cases)}</testsuite>")
                read.append(check_skips.outcomes(report))
            return check_skips.judged(read)

    def test_a_test_that_one_stage_runs_is_accepted(self) -> None:
        self.assertEqual(self.judged({"A.B": SANITIZED, "A.C": ""}, {"A.B": ""}), ([], 0))

    def test_a_test_that_every_stage_skips_is_reported(self) -> None:
        found = [f"io: A.B runs in no stage: {SANITIZED}"]
        self.assertEqual(self.judged({"A.B": SANITIZED}, {"A.C": ""}), (found, 0))
        self.assertEqual(self.judged({"A.B": SANITIZED}, {"A.B": SANITIZED}), (found, 0))

    def test_what_the_machine_cannot_run_is_counted(self) -> None:
        reason = "root may write any file"
        self.assertEqual(self.judged({"A.B": reason}, {"A.B": SANITIZED}), ([], 1))

    def test_each_reason_of_the_machine_is_one_of_a_test(self) -> None:
        root = Path(__file__).resolve().parent.parent
        texts = "".join(path.read_text() for path in root.glob("modicum/*/*_test.cc"))
        for words in ("this kernel", "this file system", "only root", "root may", "needs root"):
            self.assertIn(f'"{words}', texts)


if __name__ == "__main__":
    unittest.main()
