"""A Python program that uses Modicum reports its ledgers and phases to the `modicum watch` that
runs it; a forked child reports for itself alone.

House test. It catches these mutations: a phase that is not reported, or never ends; a child that
returns its parent's entries.
"""

import sys
from pathlib import Path

from program import run

MIB = 1 << 20

SCRIPT = """
import os, time
import modicum
from modicum import _modicum, memory

ledger = modicum.Ledger("1GiB")
_modicum.report_budget(5 << 30)
with memory.phase("train"):
    held = _modicum.charge_init(ledger, 64 << 20)
    time.sleep(0.2)
    child = os.fork()
    if child == 0:
        del held  # the entry is returned to a copy of the ledger
        own = _modicum.charge_init(modicum.Ledger(), 16 << 20)
        with memory.track("work"):
            time.sleep(0.4)
        os._exit(0)
    os.waitpid(child, 0)
    time.sleep(0.1)
del held
time.sleep(0.1)
print(os.getpid(), child, flush=True)
"""


def test_a_program_reports_its_ledgers_and_phases(modicum: Path) -> None:
    done = run(modicum, "watch", "--json", "--", sys.executable, "-c", SCRIPT)
    assert done.code == 0, done.stderr
    parent, child = map(int, done.stderr.split())
    timeline = done.json["timeline"]
    assert timeline["budget_bytes"] == 5 << 30
    tracks = {track["pid"]: track["owners"] for track in timeline["tracks"]}
    series = tracks[parent]["init"]
    assert max(value or 0 for value in series) == 64 * MIB
    phases = {(one["pid"], one["name"]): one for one in timeline["phases"]}
    assert set(phases) == {(parent, "train"), (child, "work")}
    train, work = phases[parent, "train"], phases[child, "work"]
    assert train["begin_s"] < work["begin_s"] < work["end_s"] < train["end_s"]
    for at, value in zip(timeline["t_s"], series, strict=True):
        if work["begin_s"] + 0.1 < at < work["end_s"] - 0.1:
            assert value == 64 * MIB, "the child has returned its parent's entry"
    assert 8 * MIB < max(value or 0 for value in tracks[child]["init"]) <= 16 * MIB
