#!/usr/bin/env python3
"""mutants.py divides mutants into parts and keeps verdicts; mutants_generated.py makes faults of
the lines that it is given, and no other ones."""

import sys
import tempfile
import unittest
from pathlib import Path
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parent))
import mutants_generated

import mutants

CXX = """\
#include <map>  // 1 + 1
int total(const Rows& rows, int limit) {
  int sum = 0;
  for (const Row& row : rows) {
    if (row.size < limit && row.is_known) {
      sum += row.size;
      note("1 < 2", row);
    }
  }
  return sum * 2;
}
"""
PYTHON = '''\
def total(rows, limit=8):
    """1 + 1"""
    found = []
    for row in rows:
        if row.size <= limit and not row.lost:  # 3 + 3
            found.append(row)
            row.seen = True
    return found
'''


def names(file: str, text: str, lines: set[int]) -> list[str]:
    made = mutants_generated.generated(file, text, lines)
    return sorted(mutant.name.split(": ", 1)[1] for mutant in made)


class Generated(unittest.TestCase):
    def test_cxx_has_each_operator(self) -> None:
        condition = "row.size < limit && row.is_known"
        expected = [
            "bound: < -> <=",
            f"branch: {condition} -> !({condition})",
            "operator: && -> ||",
        ]
        self.assertEqual(names("modicum/io/a.cc", CXX, {5}), expected)
        expected = ["operator: += -> -=", "statement: sum += row.size; -> ;"]
        self.assertEqual(names("modicum/io/a.cc", CXX, {6}), expected)
        expected = ["constant: 2 -> 3", "operator: * -> +"]
        self.assertEqual(names("modicum/io/a.cc", CXX, {10}), expected)

    def test_cxx_literals_comments_and_declarations_stay(self) -> None:
        self.assertEqual(names("modicum/io/a.cc", CXX, {1, 2, 4, 8}), [])
        self.assertEqual(names("modicum/io/a.cc", CXX, {3}), ["constant: 0 -> 1"])
        expected = ['statement: note("1 < 2", row); -> ;']
        self.assertEqual(names("modicum/io/a.cc", CXX, {7}), expected)

    def test_python_has_each_operator(self) -> None:
        condition = "row.size <= limit and not row.lost"
        expected = [
            "bound: <= -> <",
            f"branch: {condition} -> not ({condition})",
            "operator: and -> or",
        ]
        file = "modicum/python/modicum/memory/a.py"
        self.assertEqual(names(file, PYTHON, {2, 3, 4, 5}), expected)
        expected = ["constant: True -> False", "statement: row.seen = True -> pass"]
        self.assertEqual(names(file, PYTHON, {7}), expected)

    def test_a_mutant_changes_one_place(self) -> None:
        text = "".join(f"void f{i}() {{\n  g();\n}}\n" for i in range(3))
        for line in (2, 5, 8):
            (mutant,) = mutants_generated.generated("modicum/io/a.cc", text, {line})
            changed = text.splitlines()
            changed[line - 1] = "  ;"
            self.assertEqual(mutants.mutated(text, mutant).splitlines(), changed)

    def test_each_room_has_its_tests(self) -> None:
        root = mutants.ROOT
        for path in [*root.glob("modicum/**/*.cc"), *root.glob("modicum/**/*.py")]:
            of = mutants_generated.tests_of(str(path.relative_to(root)))
            if "pytest" in of:
                self.assertTrue((root / of["pytest"].split()[0]).is_dir(), (path, of))


class Parts(unittest.TestCase):
    def test_the_parts_together_are_all(self) -> None:
        every = list(range(11))
        parts = [mutants.part_of(every, f"{part}/4") for part in (1, 2, 3, 4)]
        self.assertEqual(sorted(sum(parts, [])), every)
        for wrong in ("0/4", "5/4", "1", "1/0", "a/b"):
            with self.assertRaises(mutants.Refusal):
                mutants.part_of(every, wrong)


class Resumed(unittest.TestCase):
    """run_mutants with two mutants, of which the second survives."""

    def run_mutants(self, path: Path) -> tuple[int, list[str]]:
        """(exit code, the names of the mutants that were tried)."""
        pair = [mutants.Mutant(name, "", "Makefile", "help:\n", "", tests=".") for name in "ab"]
        tried = []

        def try_mutant(mutant: mutants.Mutant, *_rest: object) -> mutants.Outcome:
            tried.append(mutant.name)
            return mutants.Outcome(mutant, "survived" if mutant.name == "b" else "caught", 1.5)

        prepared = {mutant.name: mutants.Prepared([]) for mutant in pair}
        with (
            mock.patch.object(mutants, "copy_tree"),
            mock.patch.object(mutants, "check_unmutated", return_value=prepared),
            mock.patch.object(mutants, "try_mutant", try_mutant),
            mock.patch("builtins.print"),
        ):
            return mutants.run_mutants(pair, 1, Path("python3"), path), tried

    def test_a_mutant_with_a_verdict_is_not_tried_again(self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "verdicts-0123456789.json")
            mutants.write_verdicts(path, {"a": {"verdict": "caught", "seconds": 2.0}})
            self.assertEqual(self.run_mutants(path), (1, ["b"]))
            self.assertEqual(self.run_mutants(path), (1, []))
            self.assertEqual(mutants.read_verdicts(path)["b"]["verdict"], "survived")

    def test_verdicts_of_a_changed_tree_are_not_kept(self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "verdicts-0123456789+.json")
            self.assertEqual(self.run_mutants(path), (1, ["a", "b"]))
            self.assertEqual(self.run_mutants(path), (1, ["a", "b"]))


if __name__ == "__main__":
    unittest.main()
