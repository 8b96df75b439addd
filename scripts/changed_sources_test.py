#!/usr/bin/env python3
"""changed_sources.py selects changed sources and those that include a changed header."""

import subprocess
import sys
import tempfile
import unittest
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
import changed_sources

TREE = {
    ".clang-tidy": "Checks: '-*'\n",
    "modicum/a/a.h": "#pragma once\n",
    "modicum/a/a.cc": '#include "modicum/a/a.h"\n',
    "modicum/a/a_test.cc": '#include "modicum/a/a.h"\n',
    "modicum/b/b.h": '#include "modicum/a/a.h"\n',
    "modicum/b/b.cc": '#include <map>\n#include "modicum/b/b.h"\n',
    "modicum/c/c.cc": "int c();\n",
    "modicum/python/bindings.cc": '#include "modicum/a/a.h"\n',
}
ALL = ["modicum/a/a.cc", "modicum/b/b.cc", "modicum/c/c.cc"]


class Sources(unittest.TestCase):
    def setUp(self) -> None:
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.root = Path(folder.name)
        for name, text in TREE.items():
            self.write(name, text)
        self.git("init", "--quiet")
        self.git("add", ".")
        who = ("-c", "user.name=A", "-c", "user.email=a@example.org")
        self.git(*who, "commit", "--quiet", "--message", "first")
        self.first = self.git("rev-parse", "HEAD").strip()

    def git(self, *words: str) -> str:
        command = ["git", *words]
        done = subprocess.run(command, cwd=self.root, check=True, capture_output=True, text=True)
        return done.stdout

    def write(self, name: str, text: str) -> None:
        path = self.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    def sources(self) -> list[str]:
        return changed_sources.sources(self.root, self.first)

    def test_nothing_has_changed(self) -> None:
        self.assertEqual(self.sources(), [])

    def test_a_changed_source_and_a_new_one(self) -> None:
        self.write("modicum/c/c.cc", "int c(int);\n")
        self.write("modicum/c/new.cc", "int d();\n")
        self.assertEqual(self.sources(), ["modicum/c/c.cc", "modicum/c/new.cc"])

    def test_a_changed_header_selects_what_includes_it_through_others(self) -> None:
        self.write("modicum/a/a.h", "#pragma once\nint a();\n")
        self.assertEqual(self.sources(), ["modicum/a/a.cc", "modicum/b/b.cc"])

    def test_tests_and_bindings_are_left_out(self) -> None:
        self.write("modicum/a/a_test.cc", "")
        self.write("modicum/python/bindings.cc", "")
        (self.root / "modicum/b/b.cc").unlink()
        self.assertEqual(self.sources(), [])

    def test_other_settings_select_all(self) -> None:
        self.write(".clang-tidy", "Checks: '*'\n")
        self.assertEqual(self.sources(), ALL)

    def test_an_unknown_commit_selects_all(self) -> None:
        self.assertEqual(changed_sources.sources(self.root, ""), ALL)
        self.assertEqual(changed_sources.sources(self.root, "0" * 40), ALL)


if __name__ == "__main__":
    unittest.main()
