#!/usr/bin/env python3
"""claims.py prints the claims and finds each fault of one."""

import sys
import tempfile
import unittest
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
import claims

import mutants

ENTRY = '[[mutant]]\n{}file = "a.cc"\nfind = "1"\nreplace = "2"\n'
TESTS = """\
TEST(Sizes, DoNotWrap) {
TEST_F(Files,
       AreRead) {
TEST_P(Casts, AreExact) {
INSTANTIATE_TEST_SUITE_P(All, Casts, testing::Values(1, 2));
"""
RUN = ("tests/a/test_load.py::test_a_load[2/1-gpt2]", "tests/a/test_load.py::test_a_save")


def mutant(name: str, claim: str = "C.", test: str = "", pytest: str = "") -> mutants.Mutant:
    return mutants.Mutant(name, claim, "a.cc", "1", "2", test, pytest)


class Lists(unittest.TestCase):
    def read(self, name: str, text: str) -> mutants.Mutant:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / name
            path.write_text(ENTRY.format(text))
            return mutants.read_mutants([path])[0]

    def test_an_entry_needs_a_claim(self) -> None:
        fields = 'name = "m"\ntests = "^A"\n'
        self.assertEqual(self.read("io.toml", 'claim = "A claim."\n' + fields).claim, "A claim.")
        with self.assertRaises(mutants.Refusal):
            self.read("io.toml", fields)

    def test_a_claim_needs_no_test_of_soak(self) -> None:
        read = self.read("io.toml", 'claim = "C."\nname = "m"\npytest = "tests/test_a.py -k b"\n')
        self.assertEqual(read.pytest, "tests/test_a.py -k b -m 'not soak'")


class Tree(unittest.TestCase):
    def test_the_claims_are_few_short_and_different(self) -> None:
        listed = mutants.read_mutants(sorted(mutants.ROOT.glob("mutants/*.toml")))
        self.assertGreater(len(listed), 100)
        self.assertEqual([*claims.faults_of_text(listed)], [])


class Faults(unittest.TestCase):
    def finds(self, one: mutants.Mutant, what: str) -> None:
        found = list(claims.faults_of_tests([one], claims.ctests([TESTS]), RUN))
        self.assertTrue(any(what in fault for fault in found) if what else not found, found)

    def test_of_texts(self) -> None:
        listed = [mutant("a", "A."), mutant("b", "A."), mutant("c", "C" * 89)]
        same, long = claims.faults_of_text(listed)
        self.assertIn("'A.' is the claim of 2 mutants", same)
        self.assertIn("longer than 88", long)
        many_claims = [mutant(f"{i}", f"{i}.") for i in range(191)]
        self.assertEqual(
            [*claims.faults_of_text(many_claims)], ["expected 190 claims at most, got 191"]
        )

    def test_of_ctest(self) -> None:
        for test in (r"^Sizes\.DoNotWrap$", r"^Files\.", r"Casts\.AreExact", r"^(No\.|All/Casts)"):
            self.finds(mutant("m", test=test), "")
        self.finds(mutant("m", test=r"^Casts\."), r"no test ^Casts\.")

    def test_of_pytest(self) -> None:
        for test in ("", " -k a_load", " -k 'GPT2 and not (save or 3)'", "::test_a_save"):
            self.finds(mutant("m", pytest=f"tests/a/test_load.py{test}"), "")
        for test in (" -k resume", "::test_b", " -k a_load -m soak", " -k 'a_save and gpt2'"):
            self.finds(mutant("m", pytest=f"tests/a/test_load.py{test}"), "runs no test")


class Tables(unittest.TestCase):
    def test_a_row_has_claim_file_and_test(self) -> None:
        listed = [mutant("a", "A.", "^A"), mutant("c", pytest="t -k c")]
        first, second = claims.table(listed).splitlines()
        self.assertEqual(first.split(), ["A.", "a.cc", "^A"])
        self.assertIn("t -k c", second)


if __name__ == "__main__":
    unittest.main()
