#!/usr/bin/env python3
"""same_as.py finds each seeded difference between two builds, and none between runs of one."""

import contextlib
import io
import sys
import tempfile
import unittest
from pathlib import Path
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parent))
import same_as
import same_as_cases

PROGRAM = """\
#!/usr/bin/env python3
import json, os, sys, uuid
if sys.argv[1] == "save":
    os.mkdir("root")
    with open("root/COMMIT", "w") as file:
        json.dump({"step": STEP, "uuid": uuid.uuid4().hex}, file, separators=(",", ":"))
told = {"promised_bytes": PROMISE, "pid": os.getpid(), "elapsed_s": os.times().elapsed}
print(json.dumps(told | {"kernel_peak_bytes": os.getpid(), "words": sys.argv[1:3]}))
sys.exit(EXIT)
"""
CASES = [
    ("a load", ["load @model"]),
    ("a save", ["save @model root", "flip root/COMMIT 0", "plan"]),
]


class Builds(unittest.TestCase):
    def setUp(self) -> None:
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = Path(folder.name)
        for name, value in {"make_sources": lambda *_: None, "grid": lambda: CASES}.items():
            patch = mock.patch.object(same_as_cases, name, value)
            patch.start()
            self.addCleanup(patch.stop)

    def same_as(self, verb: str, promise: int = 100, step: int = 1, code: int = 0) -> tuple:
        """Exit code and output of the verb, with a build of these results."""
        program = self.folder / "modicum"
        text = PROGRAM.replace("PROMISE", str(promise)).replace("STEP", str(step))
        program.write_text(text.replace("EXIT", str(code)))
        program.chmod(0o755)
        words = ["same_as.py", verb, str(self.folder / "record"), "--modicum", str(program)]
        out = io.StringIO()
        with mock.patch.object(sys, "argv", words), contextlib.redirect_stdout(out):
            return same_as.main(), out.getvalue().splitlines()

    def test_two_runs_of_a_build_are_the_same(self) -> None:
        self.assertEqual(self.same_as("record"), (0, ["2 cases, 3 commands"]))
        self.assertEqual(self.same_as("compare"), (0, ["0 differences in 2 cases"]))

    def test_each_seeded_difference_is_printed(self) -> None:
        self.same_as("record")
        told = "a load: 0.out.promised_bytes: 100 -> 101"
        code, lines = self.same_as("compare", promise=101)
        self.assertEqual((code, lines[0], len(lines)), (1, told, 4))
        code, lines = self.same_as("compare", step=2)
        self.assertEqual((code, len(lines)), (1, 2))
        self.assertRegex(lines[0], r"^a save: 0.files.root/COMMIT: 25 \w+ -> 25 \w+$")
        self.assertIn("a load: 0.exit: 0 -> 3", self.same_as("compare", code=3)[1])

    def test_a_case_of_one_record_only_is_a_difference(self) -> None:
        self.assertEqual(list(same_as.differences({"a": []}, {})), ["a: only in the old record"])
        self.assertEqual(list(same_as.differences({}, {"a": []})), ["a: only in the new record"])
        self.assertEqual(
            list(same_as.differences({"a": [{"x": []}]}, {"a": [{"x": [1]}]})),
            ["a: 0.x: [] -> (absent)", "a: 0.x.0: (absent) -> 1"],
        )


class Records(unittest.TestCase):
    def test_measured_memory_is_left_out_but_not_promises(self) -> None:
        limit = {"bytes": 1, "source": "MemAvailable"}
        document = {"budget": limit, "ranks": [{"pid": 1, "promised_bytes": 2, "kernel_bytes": 3}]}
        kept = {"budget": {"source": "MemAvailable"}, "ranks": [{"promised_bytes": 2}]}
        self.assertEqual(same_as.steady(document), kept)
        flag = {"bytes": 1, "source": "flag"}
        self.assertEqual(same_as.steady(flag), flag)

    def test_names_of_owners_are_left_out_but_not_digests(self) -> None:
        uuid = "0123456789abcdef" * 2
        self.assertEqual(same_as.owned(f".partial-1-host.a_b.2-34-567-{uuid}"), ".partial-1-OWNER")
        self.assertEqual(same_as.owned(f'{{"uuid":"{uuid}"}}'), '{"uuid":"OWNER"}')
        self.assertEqual(same_as.owned(f'"digest":"{uuid}"'), f'"digest":"{uuid}"')

    def test_system_calls_are_in_order_without_descriptors(self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            trace = Path(folder) / "trace"
            lines = ['9  mkdirat(3</w>, "root", 0777) = 0', "9  fsync(4</w/root>)   = 0"]
            lines += ["8  fsync(5</w/a> <unfinished ...>", '9  openat(3</w>, "b", O_RDONLY) = 4']
            trace.write_text("\n".join(lines))
            calls = same_as.calls_of(trace, Path("/w"))
        self.assertEqual(calls, [['mkdirat(<>, "root", 0777)', "fsync(</root>)"], ["fsync(</a>)"]])

    def test_the_grid_has_each_verb_strategy_layout_and_format(self) -> None:
        lines = [line for _, commands in same_as_cases.grid() for line in commands]
        verbs = {"inspect", "plan", "load", "save", "resume", "rehearse", "convert", "diff"}
        self.assertLessEqual(verbs | {"verify", "step"}, {line.split()[0] for line in lines})
        for name in (*same_as_cases.STRATEGIES, *same_as_cases.LAYOUTS.values()):
            self.assertTrue(any(f"{name} " in line for line in lines if line.startswith("load")))
        for form in same_as_cases.FORMATS:
            for verb in ("plan", "save", "rehearse"):
                self.assertTrue(any(line.startswith(verb) and form in line for line in lines))


if __name__ == "__main__":
    unittest.main()
