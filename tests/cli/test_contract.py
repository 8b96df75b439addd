"""What scripts rely on: JSON keys, and the errors of broken files. Help, exit codes, refusals and
budgets are tested in modicum/cli/command_line_test.cc and promises_test.cc.

Catches: an error lacks its file.
"""

from pathlib import Path
from typing import Any

import pytest
from program import (
    STRATEGIES,
    failure,
    node_peak,
    offset_of,
    run_json,
)

NUMBER = (int, float)


@pytest.fixture(scope="module")
def moe(modicum: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small MoE in one file."""
    directory = tmp_path_factory.mktemp("contract") / "moe"
    run_json(modicum, "synth", directory, "--arch", "tiny-moe")
    return directory


@pytest.fixture
def broken(modicum: Path, tmp_path: Path) -> Path:
    """A small MoE in several files, which a test may damage."""
    directory = tmp_path / "broken"
    run_json(modicum, "synth", directory, "--arch", "tiny-moe", "--shard-size", 800)
    assert len(shards_of(directory)) > 2
    return directory


def shards_of(directory: Path) -> list[Path]:
    return sorted(directory.glob("*.safetensors"))


def test_plan_has_a_row_for_each_strategy_of_load(modicum: Path, moe: Path) -> None:
    rows = [row["name"] for row in run_json(modicum, "plan", moe)["strategies"]]
    assert sorted(rows) == sorted(STRATEGIES)
    error = failure(modicum, 2, "load", moe, "--strategy", "rank1-broadcast")
    assert all(name in error["message"] for name in STRATEGIES)


# ---- broken checkpoints


def test_a_missing_directory_is_an_io_error(modicum: Path, tmp_path: Path) -> None:
    for verb in ("plan", "load", "inspect"):
        assert failure(modicum, 13, verb, tmp_path / "nowhere")["category"] == "IO"


def test_a_truncated_file_is_named(modicum: Path, broken: Path) -> None:
    shard = shards_of(broken)[1]
    shard.write_bytes(shard.read_bytes()[:-5])
    error = failure(modicum, 10, "load", broken, "--ranks", 2)
    assert error["category"].startswith("FORMAT.")
    assert error["file"] == shard.name


# ---- keys


def assert_keys(value: dict[str, Any], **types: type | tuple[type, ...]) -> None:
    """Asserts that each key exists and has a value of the given type. A bool is not a number."""
    for key, expected in types.items():
        assert key in value, f"no key {key} in {sorted(value)}"
        found = value[key]
        accepted = isinstance(found, expected)
        assert accepted and (expected is bool or not isinstance(found, bool)), f"{key}: {found!r}"


def test_keys_of_synth_and_inspect(modicum: Path, tmp_path: Path) -> None:
    directory = tmp_path / "moe"
    made = run_json(modicum, "synth", directory, "--arch", "tiny-moe", "--shard-size", 800)
    assert_keys(made, files=int, tensors=int, data_bytes=int, written_bytes=int)
    listed = run_json(modicum, "inspect", directory)
    assert_keys(listed, checkpoint=dict, dtypes=dict, files=list, tensors=list, warnings=list)
    assert_keys(listed, model_type=str, tie_word_embeddings=bool)
    assert_keys(
        listed["checkpoint"], bytes=int, tensors=int, files=int, parameters=int, identity=str
    )
    assert listed["checkpoint"]["files"] == len(listed["files"]) == made["files"] > 2
    assert listed["checkpoint"]["bytes"] == made["data_bytes"]


def test_keys_of_plan(modicum: Path, moe: Path) -> None:
    flags = ("--ranks", 4, "--ranks-per-node", 2, "--budget", "auto")
    planned = run_json(modicum, "plan", moe, *flags)
    assert_keys(planned, checkpoint=dict, ranks=int, strategies=list, budget=dict, fits=bool)
    assert_keys(planned["checkpoint"], bytes=int, tensors=int, files=int)
    assert_keys(planned["budget"], bytes=int, source=str)
    assert planned["budget"]["source"].startswith(("cgroup v1 /", "cgroup v2 /", "MemAvailable"))
    for row in planned["strategies"]:
        assert_keys(
            row, name=str, storage_read_bytes=int, exchanged_bytes=int, nodes=list, ranks=list
        )
        assert_keys(row, overread_ratio=NUMBER)
        assert [node["node"] for node in row["nodes"]] == [0, 1]
        assert [rank["node"] for rank in row["ranks"]] == [0, 0, 1, 1]
        for node in row["nodes"]:
            assert_node(node)
        for number, rank in enumerate(row["ranks"]):
            assert_keys(rank, rank=int, node=int, peak_bytes=int)
            assert rank["rank"] == number


def assert_node(node: dict[str, Any]) -> None:
    """Asserts that a phase is the sum of its purposes, and that `peak_phase` is the largest phase.
    The node's peak may be larger, since its ranks may have their own peaks in other phases."""
    assert_keys(node, node=int, peak_bytes=int, peak_phase=str, peak_cause=str, phases=list)
    phases = {phase["phase"]: phase["bytes"] for phase in node["phases"]}
    assert phases[node["peak_phase"]] == max(phases.values())
    assert node["peak_bytes"] >= max(phases.values())
    for phase in node["phases"]:
        assert_keys(phase, phase=str, bytes=int, by_purpose=dict)
        assert sum(phase["by_purpose"].values()) == phase["bytes"]


def test_keys_of_load(modicum: Path, moe: Path) -> None:
    flags = ("--ranks", 4, "--ranks-per-node", 2)
    loaded = run_json(modicum, "load", moe, *flags)
    assert_keys(loaded, strategy=str, elapsed_s=NUMBER, check_s=NUMBER, bytes_loaded=int)
    assert_keys(loaded, storage_read_bytes=int, coverage=str, check=str, nodes=list, ranks=list)
    assert_keys(loaded, compared_bytes=int, not_compared=list)
    assert loaded["coverage"] == "proven" and loaded["check"] == "off"
    assert loaded["digest"] is None
    planned = run_json(modicum, "plan", moe, *flags, "--compare")
    assert loaded["full_per_rank_bytes"] == node_peak(planned, "full-per-rank")
    assert [node["node"] for node in loaded["nodes"]] == [0, 1]
    for node in loaded["nodes"]:
        assert_keys(node, peak_bytes=int, kernel_peak_bytes=int)
    figures = ("rank", "pid", "promised_bytes", "ledger_peak_bytes", "kernel_peak_bytes")
    figures += ("baseline_bytes", "unexplained_bytes", "page_cache_peak_bytes")
    for number, rank in enumerate(loaded["ranks"]):
        assert_keys(rank, **dict.fromkeys((*figures, "storage_read_bytes"), int))
        assert rank["rank"] == number
        explained = rank["ledger_peak_bytes"] + rank["baseline_bytes"]
        assert rank["unexplained_bytes"] == rank["kernel_peak_bytes"] - explained
    assert len({rank["pid"] for rank in loaded["ranks"]}) == 4
    with_digest = run_json(modicum, "load", moe, "--digest", "--check", "values")
    assert_keys(with_digest, digest=str, check_s=NUMBER)
    assert with_digest["check"] == "ok"


# ---- plans


def test_strategies_plan_to_read_what_they_are_named_for(modicum: Path, moe: Path) -> None:
    """own-shard reads each stored byte once over all ranks, rank0-broadcast once on rank 0,
    full-per-rank once on each rank."""
    planned = run_json(modicum, "plan", moe, "--ranks", 4)
    stored = planned["checkpoint"]["bytes"]
    reads = {row["name"]: row["storage_read_bytes"] for row in planned["strategies"]}
    assert stored <= reads["own-shard"] <= 1.02 * stored
    assert reads["rank0-broadcast"] == stored
    assert reads["full-per-rank"] == 4 * stored


def test_inspect_shows_the_offsets_of_the_header(modicum: Path, moe: Path) -> None:
    file = moe / "model.safetensors"
    for tensor in run_json(modicum, "inspect", moe)["tensors"]:
        assert tensor["begin"] == offset_of(file, tensor["name"])
