#!/usr/bin/env python3
"""claims.py selects mutants, draws samples of them, and finds each fault of a claim."""

import argparse
import contextlib
import io
import sys
import tempfile
import unittest
from collections import Counter
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


def mutant(name: str, room: str = "io", claim: str = "", test: str = "", pytest: str = ""):
    return mutants.Mutant(name, claim, "a.cc", "1", "2", test, pytest, claim, room)


def many(**sizes: int) -> list[mutants.Mutant]:
    return [mutant(f"{room} {i}", room) for room, size in sizes.items() for i in range(size)]


class Lists(unittest.TestCase):
    def read(self, name: str, text: str) -> mutants.Mutant:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / name
            path.write_text(ENTRY.format(text))
            return mutants.read_mutants([path])[0]

    def test_a_claim_takes_the_place_of_a_house_test(self) -> None:
        fields = 'name = "m"\ntests = "^A"\n'
        read = self.read("stream-losses.toml", 'claim = "A claim."\n' + fields)
        self.assertEqual(
            (read.house_test, read.claim, read.room), ("A claim.", "A claim.", "stream")
        )
        read = self.read("io.toml", 'house_test = "unit: A.B"\n' + fields)
        self.assertEqual((read.house_test, read.claim, read.room), ("unit: A.B", "", "io"))
        with self.assertRaises(mutants.Refusal):
            self.read("io.toml", fields)

    def test_a_claim_needs_no_test_of_soak(self) -> None:
        read = self.read("io.toml", 'claim = "C."\nname = "m"\npytest = "tests/test_a.py -k b"\n')
        self.assertEqual(read.pytest, "tests/test_a.py -k b -m 'not soak'")


class Selections(unittest.TestCase):
    def select(self, listed: list[mutants.Mutant], *words: str) -> list[str]:
        parser = argparse.ArgumentParser()
        claims.add_options(parser)
        with contextlib.redirect_stdout(io.StringIO()):
            chosen = claims.selected(listed, parser.parse_args(words))
        return [one.name for one in chosen]

    def test_claims_and_samples(self) -> None:
        listed = [mutant("kept", claim="C."), mutant("other"), mutant("third", "plan")]
        self.assertEqual(self.select(listed), ["kept", "other", "third"])
        self.assertEqual(self.select(listed, "--claims"), ["kept"])
        self.assertEqual(self.select(listed, "--sample", "2"), ["other", "third"])
        self.assertEqual(self.select(listed, "--claims", "--sample", "2"), [*self.select(listed)])

    def test_a_sample_is_proportional_and_depends_on_the_seed_only(self) -> None:
        listed = many(io=60, plan=30, json=1)
        drawn = self.select(listed, "--sample", "31", "--seed", "7")
        self.assertEqual(
            Counter(name.split()[0] for name in drawn), {"io": 20, "plan": 10, "json": 1}
        )
        self.assertEqual(drawn, self.select(listed, "--sample", "31", "--seed", "7"))
        self.assertNotEqual(drawn, self.select(listed, "--sample", "31", "--seed", "8"))

    def test_each_room_has_one_and_no_room_more_than_it_holds(self) -> None:
        self.assertEqual(
            claims.shares({"io": 90, "json": 1, "synth": 2}, 3), dict(io=1, json=1, synth=1)
        )
        self.assertEqual(claims.shares({"io": 3, "json": 1}, 4), {"io": 3, "json": 1})
        for count in (1, 5):
            with self.assertRaises(mutants.Refusal):
                claims.shares({"io": 3, "json": 1}, count)


class Faults(unittest.TestCase):
    def finds(self, one: mutants.Mutant, what: str) -> None:
        found = list(claims.faults_of_tests([one], claims.ctests([TESTS]), RUN))
        self.assertTrue(any(what in fault for fault in found) if what else not found, found)

    def test_of_texts(self) -> None:
        listed = [mutant("a", claim="A."), mutant("b", claim="A."), mutant("c", claim="C" * 89)]
        same, long = claims.faults_of_text(listed)
        self.assertIn("'A.' is the claim of 2 mutants", same)
        self.assertIn("longer than 88", long)
        many_claims = [mutant(f"{i}", claim=f"{i}.") for i in range(191)]
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
    def test_a_table_has_the_claims_by_room(self) -> None:
        listed = [
            mutant("a", "plan", "A.", "^A"),
            mutant("b"),
            mutant("c", "io", "C.", pytest="t -k c"),
        ]
        rows = [line.split("  ") for line in claims.table(listed).splitlines()]
        self.assertEqual([row[0] for row in rows if row[0]], ["io (1)", "plan (1)"])
        self.assertIn("t -k c", claims.table(listed))


if __name__ == "__main__":
    unittest.main()
