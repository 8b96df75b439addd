#!/usr/bin/env python3
"""release.py: a commit that is not ready gets no tag, and each reason is named. The workflow of a
release publishes wheels and sdist, and nothing that lies next to them."""

import contextlib
import io
import re
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
import release
import soak


class Release(unittest.TestCase):
    """A repository that is ready for version 1.2.3."""

    def setUp(self) -> None:
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.root = Path(folder.name)
        (self.root / soak.PAGE).parent.mkdir()
        self.git("init", "-q")
        self.git("config", "user.name", "a")
        self.git("config", "user.email", "a@b")
        self.git("config", "tag.gpgSign", "false")
        self.write("CMakeLists.txt", "project(modicum VERSION 1.2.3 LANGUAGES CXX)\n")
        self.write("CHANGELOG.md", "# Changelog\n\n## [1.2.3] - 2026-01-02\n\nSaves are faster.\n")
        self.commit()
        self.rows = {part: self.row(part, self.head()) for part in soak.PARTS}
        self.write_rows()

    def git(self, *arguments: str) -> str:
        return release.git(self.root, *arguments)

    def head(self) -> str:
        return self.git("rev-parse", "--short=10", "HEAD")

    def write(self, name: str, text: str) -> None:
        (self.root / name).write_text(text)

    def commit(self) -> None:
        self.git("add", "-A")
        self.git("commit", "-q", "--allow-empty", "-m", "a")

    @staticmethod
    def row(part: str, commit: str, result: str = "ok") -> str:
        return f"| 2026-01-01 | {part} | {commit} | CPU | 1 | 0 | 0 | 9 | {result} |"

    def write_rows(self) -> None:
        self.write(str(soak.PAGE), "\n".join([*self.rows.values(), ""]))
        self.commit()

    def found(self, version: str = "1.2.3") -> list[str]:
        return list(release.findings(self.root, version))

    def test_a_ready_commit_has_no_findings(self) -> None:
        self.assertEqual(self.found(), [])

    def test_a_commit_that_is_not_ready_gets_no_tag(self) -> None:
        self.write("new", "")
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(io.StringIO()):
            self.assertEqual(release.main(self.root, ["1.2.3"]), 1)
        self.assertIn("not committed: ?? new", printed.getvalue())
        self.assertEqual(self.git("tag"), "")

    def test_check_makes_no_tag(self) -> None:
        with contextlib.redirect_stdout(io.StringIO()):
            self.assertEqual(release.main(self.root, ["1.2.3", "--check"]), 0)
        self.assertEqual(self.git("tag"), "")

    def test_versions(self) -> None:
        self.assertEqual(self.found("1.2"), ["expected a version X.Y.Z, got '1.2'"])
        words = self.found("1.3.0")
        self.assertIn("CMakeLists.txt: expected version 1.3.0, got 1.2.3", words)
        self.assertIn("CHANGELOG.md: expected a section '## [1.3.0] - YYYY-MM-DD'", words)

    def test_an_empty_section(self) -> None:
        self.write("CHANGELOG.md", "## [1.2.3] - 2026-01-02\n\n## [1.2.2] - 2026-01-01\n\nOld.\n")
        self.commit()
        self.assertEqual(self.found(), ["CHANGELOG.md: the section [1.2.3] is empty"])

    def test_what_is_left_in_the_changelog(self) -> None:
        ready = "## [1.2.3] - 2026-01-02\n\nNew.\n"
        cases = {
            "## [Unreleased]\n\n### Fixed\n\n": [],
            "## [Unreleased]\n\n### Fixed\n\nA crash.\n\n": ["an empty [Unreleased]"],
        }
        for unreleased, expected in cases.items():
            found = list(release.changelog_findings(unreleased + ready, "1.2.3"))
            self.assertEqual(len(found), len(expected), found)
            for words, line in zip(expected, found, strict=True):
                self.assertIn(words, line)
        for section, words in {
            "## [1.2.3] - 2026-99-99\n\nNew.\n": "got 2026-99-99",
            "## [1.2.3]\n\nNew.\n": "expected a section",
            "## [1.2.3] - 2026-01-02\n\n### Fixed\n": "is empty",
        }.items():
            (line,) = release.changelog_findings(section, "1.2.3")
            self.assertIn(words, line)

    def test_a_run_that_has_passed_no_test(self) -> None:
        first = next(iter(soak.PARTS))
        self.rows[first] = self.rows[first].replace("| CPU | 1 |", "| CPU | 0 |")
        self.write_rows()
        (line,) = self.found()
        self.assertTrue(line.endswith("passed no test"), line)

    def test_changes_since_the_run(self) -> None:
        for name in ("docs/" + "a.md", "tests/a.py", "README.md", "scripts/release.py"):
            (self.root / name).parent.mkdir(exist_ok=True)
            self.write(name, "a")
        self.write("CMakeLists.txt", "project(modicum VERSION 1.2.4 LANGUAGES CXX)\n")
        self.write("CHANGELOG.md", "## [1.2.4] - 2026-01-02\n\nSaves are faster.\n")
        self.commit()
        self.assertEqual(self.found("1.2.4"), [])
        for name in ("modicum/core.cc", "cmake/a.cmake", "scripts/wheels.sh"):
            (self.root / name).parent.mkdir(exist_ok=True)
            self.write(name, "a")
        self.commit()
        found = self.found("1.2.4")
        self.assertEqual(len(found), len(soak.PARTS))
        self.assertIn("since cmake/a.cmake and 2 other files changed", found[0])
        self.rows = {part: self.row(part, self.head()) for part in soak.PARTS}
        self.write_rows()
        self.write("CMakeLists.txt", "project(modicum VERSION 1.2.4 LANGUAGES C CXX)\n")
        self.commit()
        self.assertIn("since CMakeLists.txt changed", self.found("1.2.4")[0])

    def printed(self, *arguments: str) -> tuple[int, str]:
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(io.StringIO()):
            return release.main(self.root, [*arguments]), printed.getvalue().strip()

    def test_a_tag_that_exists(self) -> None:
        self.git("tag", "v1.2.3")
        self.assertEqual(self.printed("1.2.3"), (1, "the tag v1.2.3 exists"))
        self.assertEqual(self.printed("1.2.3", "--check")[0], 0)
        self.commit()
        for more in ((), ("--check",)):
            self.assertIn("v1.2.3 is at another commit", self.printed("1.2.3", *more)[1])

    def test_a_key_that_is_missing(self) -> None:
        self.git("config", "user.signingkey", "no-such-key")
        self.git("config", "gpg.program", "false")
        code, line = self.printed("1.2.3")
        self.assertEqual((code, self.git("tag")), (1, ""))
        self.assertRegex(line, r"^git can't sign the tag; .*user\.signingkey.*$")

    def test_each_part_of_soak_must_have_passed(self) -> None:
        first, second, third, fourth, *_ = soak.PARTS
        del self.rows[first]
        self.rows[second] += "\n" + self.row(second, self.head(), "FAILED")
        self.rows[third] = self.row(third, self.head() + "+")
        self.rows[fourth] = self.row(fourth, "0123456789")
        self.write_rows()
        expected = ("no run", "FAILED", "uncommitted changes", "is not in the release")
        for part, words, line in zip(soak.PARTS, expected, self.found(), strict=False):
            self.assertIn(f"part {part}: ", line)
            self.assertTrue(line.endswith(words), line)

    def test_parts_run_again_for_each_release(self) -> None:
        self.git("tag", "v1.2.2")
        found = self.found()
        self.assertEqual(len(found), len(soak.PARTS))
        self.assertIn("expected a run since v1.2.2", found[0])
        subprocess.run(["git", "tag", "-d", "v1.2.2"], cwd=self.root, capture_output=True)
        self.git("tag", "v1.2.3")  # this release itself
        self.assertEqual(self.found(), [])


class Workflows(unittest.TestCase):
    def setUp(self) -> None:
        folder = release.ROOT / ".github/workflows"
        self.texts = {path.name: path.read_text() for path in folder.glob("*.yml")}

    def test_only_wheels_and_sdist_are_published(self) -> None:
        """`twine check dist/*` refuses any other file, such as dist/wheels/commit."""
        published = re.findall(r"^ +(dist/\S+)$", self.texts["release.yml"], re.M)
        expected = [f"{place}/*.{kind}" for place in ("dist/wheels", "dist")
                    for kind in ("whl", "tar.gz")]  # fmt: skip
        self.assertEqual(published, expected)
        self.assertNotRegex(self.texts["release.yml"], r"path: dist/.")

    def test_actions_have_the_tag_of_a_version(self) -> None:
        for name, text in self.texts.items():
            for action in re.findall(r"uses: *(\S+)", text):
                self.assertRegex(action, r"^[\w/-]+@v\d+(\.\d+)*$", name)


if __name__ == "__main__":
    unittest.main()
