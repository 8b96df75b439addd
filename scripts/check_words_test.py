#!/usr/bin/env python3
"""check_words.py finds each phrase of its table, and nothing in other sentences."""

import sys
import unittest
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
import check_words

FOUND = {
    "what is": "the bytes of what is stored",
    "look": "the page is not looked at",
    "stand": "names that stand in a file",
    "beside": "printed beside the outcome",
    "due": "a digit is due",
    "deal": "rank 0 deals it out",
    "has not": "names that the model has not",
    "nobody": "nobody reads it",
    "nothing": "Of nothing there are many shapes",
    "who": "who reads it",
    "says so": "the error says so",
    "for good": "it is gone for good",
    "time": "in its own good time",
    "taken for": "a dead process is taken for a living one",
    "saved step": "the newest step is resumed",
    "visible": "no rank waits until the step is visible",
    "step's files": "the step's record lists each file",
    "steps of a root": "the directory of all steps",
    "plane": "moved to the gradients' plane",
    "kernel": "promised and measured memory",
}
LEFT_ALONE = (
    "look up the FQN, look ahead by one window",
    "a stand-in for the device",
    "deals with both cases",
    "one rank's bytes are mistaken for another's",
    "the rank has not written its part, the page has not changed yet",
    "the saved step counts, an optimizer step, the newest checkpoint of step 100",
)


class CheckWords(unittest.TestCase):
    def test_every_phrase_is_found(self) -> None:
        for sentence in FOUND.values():
            found = list(check_words.findings("page.md", f"first\n{sentence}\n"))
            self.assertEqual(len(found), 1, (sentence, found))
            self.assertTrue(found[0].startswith("page.md:2: "), found)
        self.assertEqual(len(FOUND), len(check_words.PHRASES))

    def test_others_are_left_alone(self) -> None:
        for sentence in LEFT_ALONE:
            self.assertEqual(list(check_words.findings("page.md", sentence)), [], sentence)


if __name__ == "__main__":
    unittest.main()
