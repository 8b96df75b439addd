"""A Python program that uses Modicum reports its ledgers and phases to the `modicum watch` that
runs it. A forked child reports only its own; after an exec nothing of the old program remains.

Catches: a phase that is not reported, or never ends; a child that returns its parent's ledger
entries; a ledger that outlives an exec; a retained heap that is measured only when phases begin and
end; a data worker whose rank is not its parent's; an engine that counts as a rank.
"""

import sys
from pathlib import Path
from typing import Any

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
        del held  # returns the entry to the child's copy of the ledger, not to the parent's
        own = _modicum.charge_init(modicum.Ledger(), 16 << 20)
        with memory.phase("work"):
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


EXEC = """
import os, sys, time
import modicum
from modicum import _modicum, memory

ledger = modicum.Ledger()
held = _modicum.charge_init(ledger, 64 << 20)
phase = memory.phase("before")  # kept in a variable: the phase ends when the object is deleted
phase.__enter__()  # and never exited: the exec ends it
time.sleep(0.2)
after = "import time; block = bytearray(b'1') * (32 << 20); time.sleep(0.4)"
os.execv(sys.executable, [sys.executable, "-c", after])
"""


def test_an_exec_ends_the_phases_and_ledgers_of_the_program(modicum: Path) -> None:
    done = run(modicum, "watch", "--json", "--", sys.executable, "-c", EXEC)
    assert done.code == 0, done.stderr
    timeline = done.json["timeline"]
    (phase,) = timeline["phases"]
    assert phase["name"] == "before" and phase["end_s"] < done.json["elapsed_s"] - 0.3
    (track,) = timeline["tracks"]
    owners = track["owners"]
    after = [at for at, time in enumerate(timeline["t_s"]) if time > phase["end_s"] + 0.05]
    assert after and max(value or 0 for value in owners["init"]) == 64 * MIB
    assert not any(owners["init"][at] for at in after)
    assert max(held_in(track, at) for at in after) > 32 * MIB


def held_in(track: Any, at: int) -> int:
    """Bytes of a process that no ledger has charged, of all kinds of memory."""
    return sum(line[at] or 0 for owner, line in track["owners"].items() if owner != "init")


HEAP = """
import ctypes, time
from modicum import memory

libc = ctypes.CDLL(None)
libc.malloc.restype = ctypes.c_void_p
libc.free.argtypes = [ctypes.c_void_p]
with memory.phase("run"):
    blocks = [libc.malloc(64 << 10) for _ in range(1024)]
    for block in blocks:
        ctypes.memset(block, 1, 64 << 10)
    time.sleep(0.4)
    for block in blocks[:-1]:
        libc.free(block)
    time.sleep(0.6)
"""


def test_memory_that_malloc_retains_is_an_owner(modicum: Path) -> None:
    done = run(modicum, "watch", "--json", "--", sys.executable, "-c", HEAP)
    assert done.code == 0, done.stderr
    (track,) = done.json["timeline"]["tracks"]
    retained = [value or 0 for value in track["owners"]["retained_heap"]]
    # The last block is at the heap's top: malloc can't return the blocks below it to the kernel.
    assert 60 * MIB < max(retained) < 72 * MIB
    held = [sum(values[at] or 0 for values in track["owners"].values())
            for at in range(len(retained))]  # fmt: skip
    full = next(at for at, bytes_ in enumerate(held) if bytes_ > 0.95 * max(held))
    assert retained[full] < 8 * MIB, "no block has been freed yet"


NODE = """
import ctypes, os, subprocess, sys, time

def hold(name, mib):
    ctypes.CDLL(None).prctl(15, name.encode(), 0, 0, 0)  # PR_SET_NAME
    block = bytearray(b"1") * (mib << 20)
    time.sleep(2)

def train():
    import modicum
    from modicum import _modicum, memory
    with memory.phase("train"):
        held = _modicum.charge_init(modicum.Ledger(), 48 << 20)
        child = os.fork()
        if child == 0:
            hold("data_worker", 16)
            os._exit(0)
        os.waitpid(child, 0)

def node():
    def start(role, **more):
        return subprocess.Popen([sys.executable, sys.argv[0], role], env=os.environ | more)
    ranks = [start("train", RANK=str(rank), LOCAL_RANK=str(rank)) for rank in range(2)]
    for process in [start("rollout"), *ranks]:
        assert process.wait() == 0

{"node": node, "train": train, "rollout": lambda: hold("rollout", 64)}[sys.argv[1]]()
"""


def test_a_data_worker_belongs_to_its_rank_and_an_engine_to_none(
    modicum: Path, tmp_path: Path
) -> None:
    """A node of reinforcement learning: two trainers with a data worker each, and an engine."""
    script = tmp_path / "node.py"
    script.write_text(NODE)
    done = run(modicum, "watch", "--json", "--", sys.executable, script, "node")
    assert done.code == 0, done.stderr
    timeline = done.json["timeline"]
    times = range(len(timeline["t_s"]))
    tracks = {track["label"]: track for track in timeline["tracks"]}
    assert len(tracks) == len(timeline["tracks"]) == 6
    for rank in range(2):
        trainer, worker = tracks[f"rank {rank}"], tracks[f"data_worker of rank {rank}"]
        assert trainer["rank"] == worker["rank"] == rank
        # 48 MiB are charged. After the fork PSS counts half of the pages shared with the worker.
        assert 40 * MIB < max(value or 0 for value in trainer["owners"]["init"]) <= 48 * MIB
        assert max(held_in(worker, at) for at in times) > 16 * MIB
    assert tracks["rollout"]["rank"] is None
    assert max(held_in(tracks["rollout"], at) for at in times) > 64 * MIB
    assert sorted(phase["rank"] for phase in timeline["phases"]) == [0, 1]
