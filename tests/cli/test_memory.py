"""The promised memory of loads, compared with the kernel's counters as the ranks and as another
process read them, and set as the limit of a memory cgroup.

Catches: a rank's promise is one page short; memory is held and not charged; a window (the buffer
for whole tensors) outlives its use; the record of a checkpoint is held and not charged; a load is
refused after its first read of data; the stacks of threads are not promised; the error after an OOM
kill does not say how much the plan needs.
"""

import json
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from cage import Cage, cage, drop_page_cache, have, why_no_cage
from program import (
    STRATEGIES,
    Ended,
    node_peak,
    run,
    run_json,
    strategy_of,
    tree_of,
    write_checkpoint,
)  # fmt: skip

MIB = 1 << 20
REFUSAL_BYTES = 32 * MIB  # the most that a refused load may charge to its cgroup


@pytest.fixture(scope="module")
def qwen25(modicum: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A real (not sparse) qwen2.5-0.5b: a gigabyte, removed at the end."""
    directory = tmp_path_factory.mktemp("memory") / "qwen2.5-0.5b"
    run_json(modicum, "synth", directory, "--arch", "qwen2.5-0.5b")
    yield directory
    shutil.rmtree(directory)


@pytest.fixture(scope="module")
def qwen3(modicum: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A sparse qwen3-0.6b: it takes little disk, and as much memory as one with data."""
    directory = tmp_path_factory.mktemp("memory") / "qwen3-0.6b"
    run_json(modicum, "synth", directory, "--arch", "qwen3-0.6b", "--sparse")
    return directory


@pytest.fixture(scope="module")
def promised(modicum: Path, qwen25: Path) -> int:
    """The promised memory of four ranks of qwen25 with own-shard, in bytes."""
    return node_peak(run_json(modicum, "plan", qwen25, "--ranks", 4), "own-shard")


@pytest.fixture(scope="module")
def can_cage() -> None:
    if reason := why_no_cage():
        pytest.skip(reason)


def load_in(inside: Cage, modicum: Path, directory: Path, *flags: object) -> Ended:
    """Runs `modicum load --json` with four ranks in a memory cgroup."""
    words = (modicum, "load", directory, "--ranks", 4, "--json", *flags)
    process = inside.start(*words)
    out, err = process.communicate(timeout=120)
    return Ended(process.returncode, out, err)


# ---- the kernel's figures in the report


def assert_kept(loaded: dict[str, Any]) -> None:
    """Asserts that the kernel's peak of each rank and node is at most its promise and not far below
    it, and that the ledger explains nearly all of a rank's peak."""
    for rank in loaded["ranks"]:
        promised, held = rank["promised_bytes"], rank["kernel_peak_bytes"]
        assert held <= promised, rank
        assert promised - held <= 0.03 * promised + 2 * MIB, rank
        assert abs(rank["unexplained_bytes"]) <= max(0.02 * held, 4 * MIB), rank
    per_node = len(loaded["ranks"]) / len(loaded["nodes"])
    for node in loaded["nodes"]:
        promised, held = node["peak_bytes"], node["kernel_peak_bytes"]
        assert held <= promised, node
        assert promised - held <= 0.03 * promised + (2 * per_node + 8) * MIB, node


@pytest.mark.parametrize(
    "flags",
    [
        (),
        ("--ranks-per-node", 2),
        ("--dtype", "float32"),
        ("--destination", "discard"),
        ("--strategy", "rank0-broadcast"),
    ],
    ids=lambda flags: " ".join(map(str, flags)) or "default",
)
def test_promise_is_kept_and_close(modicum: Path, qwen25: Path, flags: tuple[Any, ...]) -> None:
    assert_kept(run_json(modicum, "load", qwen25, "--ranks", 4, *flags))


@pytest.mark.parametrize("threads", (64, pytest.param(768, marks=pytest.mark.soak)))
def test_promise_covers_the_stacks_of_threads(modicum: Path, tmp_path: Path, threads: int) -> None:
    """In a load, and in each phase of a rehearsal: load, steps, save and resume."""
    directory = tmp_path / "gpt2"
    run_json(modicum, "synth", directory, "--arch", "gpt2", "--layers", 2, "--sparse")
    words = (directory, "--threads", threads)
    loaded = run_json(modicum, "load", *words, "--strategy", "full-per-rank")
    assert_covered(loaded["ranks"], threads)
    words += ("--dtype", "bf16", "--optimizer", "adamw:int8-moments", "--steps", 2)
    for phase in run_json(modicum, "rehearse", *words, "--save", tmp_path / "root")["phases"]:
        assert_covered(phase["ranks"], threads)


def assert_covered(ranks: list[dict[str, Any]], threads: int) -> None:
    """Asserts that each rank's peak is at most its promise, and below it by at most the usual
    margin and the promise for stacks: 24 KiB for each thread over 64."""
    for rank in ranks:
        promised, held = rank["promised_bytes"], rank["kernel_peak_bytes"]
        stacks = max(0, threads - 64) * 24 * 1024
        assert 0 <= promised - held <= 0.03 * promised + 2 * MIB + stacks, rank


# ---- the memory for a huge header

# Starts a program and prints its peak (bytes) as the kernel tells its parent.
PEAK = """
import os, resource, sys
pid = os.posix_spawn(sys.argv[1], sys.argv[1:], os.environ)
print(os.wait4(pid, 0)[2].ru_maxrss * 1024, file=sys.stderr)
"""
HEADER_TENSORS = 150_000


@pytest.fixture(scope="module")
def bomb(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file of an 8 MB header: empty tensors of short names, the most tensors per byte."""
    file = tmp_path_factory.mktemp("bomb") / "model.safetensors"
    entry = '"{:x}":{{"dtype":"U8","shape":[0],"data_offsets":[0,0]}}'
    header = "{" + ",".join(entry.format(i) for i in range(HEADER_TENSORS)) + "}"
    file.write_bytes(len(header).to_bytes(8, "little") + header.encode())
    return file


@pytest.mark.parametrize(
    ("words", "factor"),
    [(("inspect",), 4), (("inspect", "--json"), 7), (("plan", "-q"), 7.5)],
    ids=["inspect", "inspect --json", "plan"],
)
def test_memory_for_a_header_is_bounded(
    modicum: Path, bomb: Path, words: tuple[str, ...], factor: float
) -> None:
    """At most the header's size times a factor of docs/internals/memory.md, and 8 MiB for the
    process. A small process starts the program: the kernel's maximum of a child begins at the size
    of its parent, and pytest's process is large."""
    command = [sys.executable, "-S", "-E", "-c", PEAK, modicum, words[0], bomb, *words[1:]]
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True)
    peak = int(done.stderr)
    header = bomb.stat().st_size
    times = (peak - 8 * MIB) / header
    assert times <= factor, f"{times:.2f} times the header, and 8 MiB"
    assert peak >= header, "the program has read no header"


# ---- in a memory cgroup


def test_own_shard_passes_in_a_cage(
    modicum: Path, qwen25: Path, promised: int, can_cage: None
) -> None:
    """The limit is the promise + 5 %. It includes page cache, which the reader drops after use."""
    drop_page_cache(qwen25)
    with cage(promised * 105 // 100) as inside:
        done = load_in(inside, modicum, qwen25, "--check", "values")
        assert done.code == 0, done.stderr
        assert done.json["check"] == "ok"
        assert inside.oom_kills() == 0
        assert inside.peak_bytes() <= promised * 105 // 100
        assert done.json["budget"]["source"].startswith(f"cgroup v{inside.version} ")
        assert done.json["budget"]["bytes"] <= promised * 105 // 100
        (node,) = done.json["nodes"]
        assert done.json["checkpoint"]["bytes"] < node["cgroup_peak_bytes"] <= inside.peak_bytes()
    assert_kept(done.json)


def test_many_tensors_pass_in_a_cage(modicum: Path, tmp_path: Path, can_cage: None) -> None:
    """Names, manifests and the record of the checkpoint need more memory than values do. The
    launcher holds them before it starts the ranks."""
    torch = pytest.importorskip("torch")
    names = (f"layers.{i // 400}.mlp.experts.{i % 400}.down_proj.weight" for i in range(8000))
    tensors = {name: torch.full((1 + i % 3,), float(i)) for i, name in enumerate(names)}
    model = write_checkpoint(tmp_path / "model", tensors)
    root, new = tmp_path / "root", tmp_path / "new"
    run_json(modicum, "save", model, root, "--step", 1, "--optimizer", "adamw:fp32")
    for words in (
        ("resume", root),
        ("resume", root, "--optimizer", "adamw:int8-moments"),
        ("save", root / "step-1", new, "--step", 1, "--optimizer", "adamw:bf16-moments"),
    ):
        (node,) = run_json(modicum, *words)["nodes"]
        shutil.rmtree(new, ignore_errors=True)
        budget = node["promised_bytes"]
        with cage(budget) as inside:
            process = inside.start(modicum, *words, "--budget", budget, "--json")
            _, err = process.communicate(timeout=120)
            assert process.returncode == 0, (words, err)


def test_full_per_rank_is_refused_in_a_cage(
    modicum: Path, qwen25: Path, promised: int, can_cage: None
) -> None:
    """The load is refused before any data is read: the cgroup's peak has no page cache of data."""
    drop_page_cache(qwen25)
    with cage(promised * 105 // 100) as inside:
        done = load_in(inside, modicum, qwen25, "--strategy", "full-per-rank", "--budget", "auto")
        assert inside.peak_bytes() <= REFUSAL_BYTES
    assert done.code == 15, done.stderr
    assert done.error["category"] == "BUDGET"
    assert done.error["got"] - done.error["expected"] == done.error["shortfall_bytes"] > 0
    assert "cgroup" in done.error["message"]


def test_refusal_reads_no_data(modicum: Path, qwen25: Path, tmp_path: Path) -> None:
    """strace counts the bytes read from the data file: its header, and at most one page more."""
    if not have("strace"):
        pytest.skip("strace is not installed")
    trace = tmp_path / "trace"
    flags = ("--ranks", 4, "--strategy", "full-per-rank", "--budget", "1GiB")
    calls = "trace=read,pread64,readv,preadv,preadv2,mmap"
    command = ("strace", "-f", "-y", "-e", calls)
    words = [*command, "-o", trace, modicum, "load", qwen25, *flags]
    assert subprocess.run(list(map(str, words)), capture_output=True).returncode == 15
    reads = [line for line in trace.read_text().splitlines() if "model.safetensors>" in line]
    read_bytes = sum(int(line.rsplit("=", 1)[1].split()[0]) for line in reads)
    header = int.from_bytes((qwen25 / "model.safetensors").open("rb").read(8), "little")
    assert reads and not [line for line in reads if "mmap" in line]
    assert read_bytes <= header + 8 + 4096


def test_kill_is_explained(modicum: Path, qwen25: Path, promised: int, can_cage: None) -> None:
    """Without a budget the kernel kills a rank. The error names the rank and the plan's need."""
    with cage(promised * 105 // 100) as inside:
        done = load_in(inside, modicum, qwen25, "--strategy", "full-per-rank", "--budget", "none")
        assert inside.oom_kills() > 0
    assert done.code == 16, done.stderr
    error = done.error
    assert error["category"] == "NOMEM" and error["code"] == 16
    assert 0 <= error["culprit_rank"] < 4
    assert error["culprit_pid"] > 0
    assert f"rank {error['culprit_rank']}" in done.stderr
    assert str(error["culprit_pid"]) in done.stderr
    assert "memory" in done.stderr
    planned = run_json(modicum, "plan", qwen25, "--ranks", 4)
    (node,) = strategy_of(planned, "full-per-rank")["nodes"]
    assert f"the plan needs {node['peak_bytes'] / 2**30:.2f} GiB (" in error["message"]
    assert re.search(r"; \d+(\.\d\d MiB| B) had been read", error["message"]), error


# ---- as another process reads it


def held_bytes(pid: int) -> int:
    """A process's proportional share (PSS) of anonymous and shared memory; 0 if it has ended."""
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0
    words = [line.split() for line in lines]
    return sum(int(w[1]) for w in words if w[0] in ("Pss_Anon:", "Pss_Shmem:")) * 1024


def watched(modicum: Path, *words: object) -> tuple[dict[str, Any], int]:
    """Runs the program. Returns its JSON, and the highest of its process tree's sampled memory."""
    process = subprocess.Popen(
        [str(modicum), *map(str, words), "--json"], stdout=subprocess.PIPE, text=True
    )
    peak = 0
    while process.poll() is None:
        peak = max(peak, sum(map(held_bytes, tree_of(process.pid))))
        time.sleep(0.01)
    assert process.stdout is not None and process.returncode == 0
    return json.loads(process.stdout.read()), peak


@pytest.mark.parametrize("strategy", ("own-shard", "rank0-broadcast"))
def test_promise_holds_as_another_process_measures_it(
    modicum: Path, qwen25: Path, strategy: str
) -> None:
    """`--check values` makes the ranks hold their shards for longer, so that samples see them."""
    flags = ("--ranks", 4, "--strategy", strategy, "--check", "values")
    loaded, seen = watched(modicum, "load", qwen25, *flags)
    node = loaded["nodes"][0]
    assert seen <= node["peak_bytes"]
    assert seen >= loaded["checkpoint"]["bytes"], "no sample saw all shards"


# ---- strategies


@pytest.fixture(scope="module")
def planned(modicum: Path, qwen3: Path) -> dict[str, Any]:
    """The plan of qwen3-0.6b for eight ranks."""
    return run_json(modicum, "plan", qwen3, "--ranks", 8)


def load_on_eight_ranks(modicum: Path, qwen3: Path, strategy: str) -> dict[str, Any]:
    done = run(modicum, "load", qwen3, "--ranks", 8, "--strategy", strategy, "--json")
    if done.code == 15:
        pytest.skip(f"this machine has no room for {strategy}: {done.error['message']}")
    assert done.code == 0, done.stderr
    return done.json


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_plans_agree_with_the_kernel(
    modicum: Path, qwen3: Path, planned: dict[str, Any], strategy: str
) -> None:
    """With 8 ranks full-per-rank holds 8 models besides the shards, rank0-broadcast one on rank 0
    and the largest tensor on each other rank, and own-shard at most a tenth of the model."""
    loaded = load_on_eight_ranks(modicum, qwen3, strategy)
    held = loaded["nodes"][0]["kernel_peak_bytes"]
    promised = node_peak(planned, strategy)
    assert held <= promised
    assert promised - held <= 0.03 * promised
    model = planned["checkpoint"]["bytes"]
    sizes = [t["end"] - t["begin"] for t in run_json(modicum, "inspect", qwen3)["tensors"]]
    besides = besides_shards(planned, loaded, strategy)
    if strategy == "full-per-rank":
        assert besides == pytest.approx(8 * model, rel=0.05)
    elif strategy == "rank0-broadcast":
        assert besides == pytest.approx(model + 7 * max(sizes), rel=0.05)
    elif strategy == "own-shard":
        assert besides <= 0.1 * model


def besides_shards(planned: dict[str, Any], loaded: dict[str, Any], name: str) -> int:
    """The kernel's peak of the node minus the planned bytes of the shards."""
    phases = strategy_of(planned, name)["nodes"][0]["phases"]
    (shards,) = [p["by_purpose"]["shards"] for p in phases if p["phase"] == "hold"]
    return loaded["nodes"][0]["kernel_peak_bytes"] - shards
