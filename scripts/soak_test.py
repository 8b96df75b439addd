#!/usr/bin/env python3
"""soak.py: each soak test is in one part, a part that has passed is not run again at its commit,
and there is no row without a run."""

import subprocess
import sys
import tempfile
import unittest
from pathlib import Path
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parent))
import soak

REPORT = """<testsuite><testcase name="a"/><testcase name="b"><skipped/></testcase>
<testcase name="c">{failure}</testcase></testsuite>"""


class Partition(unittest.TestCase):
    def test_each_test_file_is_in_one_part(self) -> None:
        root = soak.ROOT
        parts = [part for part in soak.PARTS if not soak.PARTS[part].targets]
        files = sorted(file for part in parts for file in soak.tests_of(root, part))
        found = {str(path.relative_to(root)) for path in root.glob("tests/**/test_*.py")}
        self.assertEqual(files, sorted(file for file in found if "/gpu/" not in file))

    def test_a_file_that_does_not_exist_is_refused(self) -> None:
        with tempfile.TemporaryDirectory() as folder, self.assertRaises(SystemExit):
            soak.tests_of(Path(folder), "kills")

    def test_each_target_is_in_the_makefile(self) -> None:
        makefile = (soak.ROOT / "Makefile").read_text()
        for part in soak.PARTS.values():
            for target in part.targets:
                self.assertRegex(makefile, rf"(?m)^([\w-]+ )*{target}( [\w-]+)*:")


class Rows(unittest.TestCase):
    def setUp(self) -> None:
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.root = Path(folder.name)
        self.page = self.root / soak.PAGE
        self.page.parent.mkdir()
        self.page.write_text("| date | part | commit |\n")

    def run_part(self, name: str, report: str | None, code: int) -> bool:
        """Runs a part whose command writes the report, if any, and exits with `code`."""

        def call(*_command: object, **_options: object) -> int:
            if report is not None:
                (self.root / soak.reports_of(name, "abc")[0]).write_text(report)
            return code

        with mock.patch.object(subprocess, "call", call), mock.patch("builtins.print"):
            with mock.patch.object(soak, "tests_of", return_value=["tests/test_a.py"]):
                return soak.run_part(self.root, name, "abc")

    def row(self) -> list[str]:
        return [cell.strip() for cell in self.page.read_text().splitlines()[-1].split("|")[1:-1]]

    def test_a_part_that_has_passed_has_a_row(self) -> None:
        self.assertFalse(soak.has_passed(self.page.read_text(), "kills", "abc"))
        self.assertTrue(self.run_part("kills", REPORT.format(failure=""), 0))
        self.assertEqual(self.row()[1:3] + self.row()[4:7], ["kills", "abc", "2", "0", "1"])
        self.assertTrue(soak.has_passed(self.page.read_text(), "kills", "abc"))
        self.assertFalse(soak.has_passed(self.page.read_text(), "kills", "abd"))
        self.assertFalse(soak.has_passed(self.page.read_text(), "pages", "abc"))

    def test_a_part_that_has_failed_is_run_again(self) -> None:
        self.assertFalse(self.run_part("kills", REPORT.format(failure="<failure/>"), 1))
        self.assertEqual(self.row()[4:7] + self.row()[8:], ["1", "1", "1", "FAILED"])
        self.assertFalse(soak.has_passed(self.page.read_text(), "kills", "abc"))

    def test_without_a_report_there_is_no_row(self) -> None:
        (self.root / "build/soak").mkdir(parents=True)
        (self.root / "build/soak/kills.xml").write_text(REPORT.format(failure=""))  # an earlier one
        self.assertFalse(self.run_part("kills", None, 1))
        self.assertEqual(len(self.page.read_text().splitlines()), 1)

    def test_targets_without_reports_are_counted(self) -> None:
        self.assertTrue(self.run_part("fuzzers", None, 0))
        self.assertEqual(self.row()[4:7], ["1", "0", "0"])

    def test_verdicts_of_mutants_are_counted(self) -> None:
        verdicts = '{"a": {"verdict": "hung"}, "b": {"verdict": "survived"}}'
        self.assertFalse(self.run_part("mutants", verdicts, 1))
        self.assertEqual(self.row()[4:7], ["1", "1", "0"])
        # Again: verdicts of an earlier run are not those of this one.
        with mock.patch.object(subprocess, "call", return_value=2), mock.patch("builtins.print"):
            self.assertFalse(soak.run_part(self.root, "mutants", "abc", again=True))
        self.assertEqual(len(self.page.read_text().splitlines()), 2)


if __name__ == "__main__":
    unittest.main()
