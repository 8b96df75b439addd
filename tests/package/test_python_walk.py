"""The walk (open_checkpoint, make_recipe, make_layout, make_plan, load, report) in Python without
torch: values, memory that the caller provides, charges, errors, Ctrl-C."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from clocks import lets_others_run
from program import run_json
from safetensors.numpy import load_file, save_file

import modicum
from modicum import _modicum
from modicum.recipes import Recipe, read_recipe

NAMES = ("a.weight", "b.weight", "scale", "step")


@pytest.fixture
def small(tmp_path: Path) -> Path:
    """A checkpoint with two matrices, a vector and a 0-d tensor."""
    generator = np.random.default_rng(7)
    save_file(
        {
            "a.weight": generator.standard_normal((7, 5), np.float32),
            "b.weight": generator.standard_normal((3, 2), np.float32),
            "scale": np.arange(9, dtype=np.float16),
            "step": np.array(12, dtype=np.int64),
        },
        tmp_path / "model.safetensors",
    )
    return tmp_path


@pytest.fixture(scope="module")
def large(modicum: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A sparse checkpoint of 0.9 GiB, whose load takes long enough to be interrupted."""
    directory = tmp_path_factory.mktemp("walk") / "large"
    run_json(modicum, "synth", directory, "--arch", "qwen3-0.6b", "--layers", 20, "--sparse")
    return directory


def planned(directory: Path, ranks: int = 3, **options):
    """The plan for a checkpoint whose tensors are loaded under their stored names."""
    recipe = modicum.walk.make_recipe(modicum.walk.open_checkpoint(directory))
    return modicum.walk.make_plan(recipe, modicum.walk.make_layout(recipe, ranks), **options)


def rows_of(whole: np.ndarray, rank: int, ranks: int) -> np.ndarray:
    """A rank's FSDP2 shard of `whole`, padded with zeros to the rows of the largest shard."""
    if whole.ndim == 0:
        return whole
    each = -(-whole.shape[0] // ranks)
    part = np.zeros((each, *whole.shape[1:]), whole.dtype)
    mine = whole[rank * each : (rank + 1) * each]
    part[: len(mine)] = mine
    return part


# Catches a shard of another rank, padding that is not written, and values loaded into another
# buffer than the caller's.
@pytest.mark.parametrize("rank", range(3))
def test_shards_equal_those_of_the_safetensors_package(small: Path, rank: int) -> None:
    whole = load_file(small / "model.safetensors")
    plan = planned(small, given=["b.weight"])
    mine = np.full((1, 2), 9, np.float32)
    shards = modicum.walk.load(plan, rank, into={"b.weight": mine}, check=True)
    assert sorted(shards) == sorted(NAMES)
    for name in ("a.weight", "scale", "step"):
        expected = rows_of(whole[name], rank, 3)
        assert np.asarray(shards[name]).tobytes() == expected.tobytes(), name
        assert np.from_dlpack(shards[name]).tobytes() == expected.tobytes(), name
    assert mine.tobytes() == rows_of(whole["b.weight"], rank, 3).tobytes()
    assert shards.shape("a.weight") == (3 if rank < 2 else 1, 5)
    assert shards.outcome["bytes_loaded"] > 0


# Catches memory that is freed while an array still refers to it, and a ledger entry that remains
# after the last array.
def test_an_array_keeps_its_memory_and_its_entry(small: Path) -> None:
    ledger = modicum.Ledger("9MiB")
    shards = modicum.walk.load(planned(small, ranks=1), ledger=ledger)
    assert set(ledger.held) == {"shards"}
    before = ledger.held_bytes
    view = memoryview(shards["a.weight"])
    others = sum(memoryview(shards[name]).nbytes for name in NAMES if name != "a.weight")
    assert ledger.held_bytes == before
    values = bytes(view)
    del shards
    assert ledger.held_bytes == before - others
    assert bytes(view) == values
    del view
    assert ledger.held_bytes == 0
    assert ledger.peak_bytes > before


def test_a_tie_is_one_buffer(tmp_path: Path) -> None:
    name = "model.embed_tokens.weight"
    save_file({name: np.ones((4, 2), np.float32)}, tmp_path / "m.safetensors")
    checkpoint = modicum.walk.open_checkpoint(tmp_path)
    text = json.dumps(
        {
            "targets": {
                "head": {"op": "alias", "of": "embed"},
                "embed": {"op": "stored", "name": name},
            },
            "unused": [],
        }
    )
    recipe = modicum.walk.make_recipe(checkpoint, text)
    assert {t["name"]: t["alias_of"] for t in recipe.targets} == {"head": "embed", "embed": None}
    shards = modicum.walk.load(modicum.walk.make_plan(recipe, modicum.walk.make_layout(recipe, 1)))
    assert shards["head"] is shards["embed"]


def test_a_recipe_goes_from_each_class_to_the_other(small: Path) -> None:
    """The way that both classes describe. Only the class of a checkpoint can be laid out."""
    checkpoint = modicum.walk.open_checkpoint(small)
    of_checkpoint = modicum.walk.make_recipe(checkpoint)
    path = small / "recipe.json"
    path.write_text(of_checkpoint.text)
    plain = read_recipe(path)
    assert isinstance(plain, Recipe) and plain.targets.keys() == {*NAMES}
    assert modicum.walk.make_recipe(checkpoint, plain.text()).targets == of_checkpoint.targets
    with pytest.raises(TypeError):
        modicum.walk.make_layout(plain, 2)


def test_the_report_has_a_row_for_each_rank(small: Path) -> None:
    plan = planned(small, baseline=64 << 20)
    outcomes = [modicum.walk.load(plan, rank).outcome for rank in range(3)]
    report = modicum.walk.report(plan, outcomes)
    assert report.strategy == "own-shard"
    assert report.document["coverage"] == "proven"
    assert [row["rank"] for row in report.ranks] == [0, 1, 2]
    for row in report.ranks:
        kernel, ledger = row["kernel_peak_bytes"], row["ledger_peak_bytes"]
        assert row["unexplained_bytes"] == kernel - ledger - row["baseline_bytes"]
        assert row["promised_bytes"] == plan.promised_bytes(row["rank"])
        assert ledger <= plan.ledger_limit_bytes(row["rank"])
    assert "rank 2" in str(report)


@pytest.mark.parametrize(
    ("act", "category", "says"),
    [
        (lambda d: planned(d, budget=4096), "BUDGET", "node 0"),
        (lambda d: planned(d, given=["unknown"]), "USAGE", "unknown"),
        (lambda d: planned(d, strategy="own_shard"), "USAGE", "own-shard"),
        (lambda d: modicum.walk.load(planned(d), 3), "USAGE", "rank"),
        (lambda d: modicum.walk.load(planned(d), check="bits"), "USAGE", "True or False"),
        (
            lambda d: modicum.walk.load(planned(d, strategy="rank0-broadcast")),
            "USAGE",
            "between ranks",
        ),
        (lambda d: modicum.walk.load(planned(d, given=["scale"])), "USAGE", "scale"),
        (lambda d: modicum.walk.load(planned(d), into={"x": bytearray(1)}), "USAGE", "'x'|x"),
        (
            lambda d: modicum.walk.load(planned(d), ledger=modicum.Ledger("4KiB")),
            "BUDGET",
            "no room",
        ),
        (lambda d: modicum.walk.open_checkpoint(d / "none"), "IO", "none"),
    ],
)
def test_invalid_arguments_are_refused(small: Path, act, category: str, says: str) -> None:
    with pytest.raises(modicum.Error, match=says) as raised:
        act(small)
    assert raised.value.category == category


def test_memory_that_is_not_the_callers_to_write_is_refused(small: Path) -> None:
    plan = planned(small, given=["b.weight"])
    # Read-only, and not contiguous. Both have the bytes of the shard.
    for wrong in (bytes(8), np.zeros((2, 4), np.float32)[:1, ::2]):
        with pytest.raises(modicum.UsageError, match=r"b\.weight"):
            modicum.walk.load(plan, into={"b.weight": wrong})


class DisagreeingRanks:
    """A stand-in for ranks whose plan has another digest."""

    def agree(self, digest: str) -> None:
        raise KeyError(digest)

    def report(self, document: str) -> str:
        return document


# Catches a load that allocates or reads before all ranks have agreed on the plan.
def test_nothing_is_allocated_before_all_agree(small: Path) -> None:
    ledger = modicum.Ledger()
    with pytest.raises(KeyError):
        _modicum.load(planned(small), 1, _modicum.Board(DisagreeingRanks()), ledger)
    assert ledger.peak_bytes == 0


# Catches a load that does not release the GIL.
def test_a_load_releases_the_gil(large: Path) -> None:
    plan = planned(large, ranks=1)
    assert lets_others_run(lambda: modicum.walk.load(plan))


# Loads the same checkpoint again and again, until SIGINT. Prints the bytes that the ledger still
# holds, the time, and the process's CPU time.
INTERRUPTED = """
import json, sys, time
import modicum
recipe = modicum.walk.make_recipe(modicum.walk.open_checkpoint(sys.argv[1]))
plan = modicum.walk.make_plan(recipe, modicum.walk.make_layout(recipe, 1))
ledger = modicum.Ledger()
print("begin", flush=True)
try:
    while True:
        modicum.walk.load(plan, ledger=ledger, check=True, threads=1)
except KeyboardInterrupt:
    at, cpu_s = time.time(), time.process_time()
    print(json.dumps({"held": ledger.held_bytes, "at": at, "cpu_s": cpu_s}), flush=True)
"""


# The same for the allocation of an optimizer's state.
INTERRUPTED_STATE = """
import json, sys, time
from modicum import _modicum
ledger = _modicum.Ledger()
shard = _modicum.AdamWShard("weight", [100_000_000], [(0, 100_000_000)])
print("begin", flush=True)
try:
    while True:
        _modicum.AdamW([shard], [_modicum.AdamOptions()], format="fp32", ledger=ledger, threads=2)
except KeyboardInterrupt:
    at, cpu_s = time.time(), time.process_time()
    print(json.dumps({"held": ledger.held_bytes, "at": at, "cpu_s": cpu_s}), flush=True)
"""


# Catches a signal that is handled only at the end of a call, and memory that an interrupted call
# still holds.
@pytest.mark.alone  # measures a duration
@pytest.mark.parametrize(
    ("program", "threads"), [(INTERRUPTED, 1), (INTERRUPTED_STATE, 2)], ids=["load", "AdamW"]
)
def test_ctrl_c_ends_a_call_within_a_second(program: str, threads: int, large: Path) -> None:
    """One second of wall time or, since the machine may be busy, of each thread's CPU time."""
    command = [sys.executable, "-c", program, large]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout.readline() == "begin\n"
            time.sleep(0.4)
            sent, cpu_s = time.time(), cpu_of(process.pid)
            process.send_signal(signal.SIGINT)
            out, _ = process.communicate(timeout=120)
        finally:
            process.kill()
    assert process.returncode == 0
    told = json.loads(out)
    assert told["held"] == 0
    assert min(told["at"] - sent, (told["cpu_s"] - cpu_s) / threads) < 1


def cpu_of(pid: int) -> float:
    """The CPU time of a process so far, in seconds."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
