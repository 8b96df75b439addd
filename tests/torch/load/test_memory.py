"""The memory of each rank of a process group during a load, by the kernel's counters. It is
compared with the prediction for the rank, and with a naive loader, which loads the whole model on
each rank and then shards it.

Catches: memory that is held and not predicted, or predicted and never held; a cast that goes
through a copy; staging that grows with the largest tensor.
"""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from cage import Cage, cage, drop_page_cache, set_limit, why_no_cage
from program import run_json

pytest.importorskip("torch")
pytest.importorskip("transformers")

from ranks import GONE, Ranks, ranks

MIB = 1 << 20
# Memory that Python takes during the first load, before that load measures its baseline.
PYTHON_BYTES = 4 * MIB


def synth(modicum: Path, directory: Path, layers: int) -> Path:
    """A checkpoint with `layers` layers of qwen3-0.6b, whose files are not sparse. Its embedding
    has 297 MiB, and a layer has 30 MiB."""
    run_json(modicum, "synth", directory, "--arch", "qwen3-0.6b", "--layers", layers)
    return directory


@pytest.fixture(scope="module")
def model(modicum: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return synth(modicum, tmp_path_factory.mktemp("models") / "six", 6)


@pytest.fixture(scope="module")
def top_heavy(modicum: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model in which one tensor has nine tenths of the bytes."""
    return synth(modicum, tmp_path_factory.mktemp("models") / "one", 1)


@pytest.fixture(scope="module")
def new(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    """Two ranks that share no memory with another process."""
    with ranks(2, tmp_path_factory.mktemp("memory") / "ranks", fresh=True) as started:
        yield started


def predicted_growth(report: dict[str, Any], rank: int) -> int:
    """The bytes by which a rank's memory grows at most, by the report."""
    of = report["ranks"][rank]
    return of["promised_bytes"] - -(-of["baseline_bytes"] // MIB) * MIB


@pytest.mark.parametrize("dtype", (None, "float32"), ids=("as stored", "cast"))
@pytest.mark.parametrize("which", (pytest.param("model", marks=pytest.mark.soak), "top_heavy"))
def test_promise_is_kept_and_close(
    new: Ranks, request: pytest.FixtureRequest, which: str, dtype: str | None
) -> None:
    directory = request.getfixturevalue(which)
    answers = new.ask("measured", directory=str(directory), mesh=[2], by="modicum", dtype=dtype)
    for rank, answer in enumerate(answers):
        report, grown = answer["report"], answer["grown_bytes"]
        predicted, of = predicted_growth(report, rank), report["ranks"][rank]
        within = 0.9 * predicted <= grown <= predicted + PYTHON_BYTES
        assert within, f"rank {rank}: grew by {grown}, predicted {predicted} bytes"
        assert of["kernel_peak_bytes"] <= of["promised_bytes"], of
        assert abs(of["unexplained_bytes"]) <= 4 * MIB, of
        # The prediction is the shards and a constant, mostly staging, so it does not grow with the
        # largest tensor. After the load the rank holds the shards alone.
        assert predicted <= answer["local_bytes"] + 12 * MIB, f"rank {rank}"
        assert answer["kept_bytes"] <= answer["local_bytes"] + PYTHON_BYTES, f"rank {rank}"
    shards_bytes = sum(answer["local_bytes"] for answer in answers)
    stored_bytes = answers[0]["report"]["checkpoint"]["bytes"]
    assert shards_bytes == pytest.approx(stored_bytes * (1 if dtype is None else 2), rel=0.001)


@pytest.mark.soak
def test_loading_whole_and_then_sharding_needs_more(new: Ranks, model: Path) -> None:
    """Shows that the test above would fail for the naive loader."""
    how = {"directory": str(model), "mesh": [2], "dtype": "float32"}
    promised = new.ask("measured", by="modicum", **how)
    naive = new.ask("measured", by="torch", **how)
    for rank, answer in enumerate(naive):
        predicted = predicted_growth(promised[rank]["report"], rank)
        assert answer["grown_bytes"] > 2 * predicted, f"rank {rank}"


# ---- in memory cgroups


@pytest.fixture
def cages() -> Iterator[list[Cage]]:
    """One memory cgroup per rank, as if each ran in its own container."""
    if reason := why_no_cage():
        pytest.skip(reason)
    with contextlib.ExitStack() as stack:
        yield [stack.enter_context(cage(4 << 30)) for _ in range(4)]


@pytest.mark.soak  # test_job_memory.py compares promises with the kernel's counters always
def test_loads_in_cgroups_smaller_than_the_checkpoint(
    model: Path, cages: list[Cage], tmp_path: Path
) -> None:
    """Each rank's limit is 5 % above its prediction, which includes the process and its imports.
    The memory that the limit leaves next to the process is smaller than the checkpoint. In the same
    cgroups the kernel kills the naive loader."""
    procs = [one.directory / "cgroup.procs" for one in cages]
    how: dict[str, Any] = {"directory": str(model), "mesh": [4]}
    how["hosts"] = [f"pod-{rank}" for rank in range(4)]
    with ranks(4, tmp_path / "ranks", fresh=True, cages=procs) as four:
        report = four.ask("measured", by="modicum", **how)[0]["report"]
        for inside, rank in zip(cages, report["ranks"], strict=True):
            limit = rank["promised_bytes"] * 105 // 100
            left = limit - rank["baseline_bytes"]
            assert left < report["checkpoint"]["bytes"], "the checkpoint fits next to the process"
            set_limit(inside.directory, inside.version, limit)
        drop_page_cache(model)
        answers = four.ask("measured", by="modicum", check=True, **how)
        report = answers[0]["report"]
        assert report["check"] == "ok" and report["coverage"] == "proven"
        assert report["budget"]["source"].startswith(f"cgroup v{cages[0].version} ")
        assert report["budget"]["bytes"] <= limit + MIB
        assert [inside.oom_kills() for inside in cages] == [0] * 4
        four.tell("measured", by="torch", dtype="float32", **how)
        assert GONE in four.hear()
        assert sum(inside.oom_kills() for inside in cages) > 0
