"""Every strategy loads the same bits. Each rank reports as many bytes read from the weights as the
kernel counts for it, apart from headers and small files.

Catches: a chunk sent to the wrong rank of a group; a rank that reads another rank's part; bytes
that are read and not counted; a digest that counts replicas twice, or leaves a rank out.
"""

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

from program import run_json
from ranks import Ranks

STRATEGIES = ("own-shard", "node-reader", "replica-striped", "rank0-broadcast", "full-per-rank")
MESHES = ([4], [2, 2])
# Bytes that a rank reads of headers, config, index and /proc files.
BESIDES_BYTES = 192 << 10


@pytest.fixture(scope="module")
def model(four: Ranks, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of 18 MiB, in which the bytes of weights are many more than those of headers. The
    world size, 4, does not divide its sizes."""
    directory = tmp_path_factory.mktemp("models") / "qwen3"
    sizes = {"vocab_size": 30001, "hidden_size": 101, "intermediate_size": 1013}
    four.ask("write", directory=str(directory), family="qwen3", config=sizes)
    return directory


@pytest.fixture(scope="module")
def expected(four: Ranks, model: Path) -> dict[int, list[Any]]:
    """The shards of each rank when torch loads, by the number of mesh axes."""
    return {len(m): four.ask("loaded", directory=str(model), mesh=m, by="torch") for m in MESHES}


def shares(strategy: str, replicas: int, nodes: int) -> list[tuple[float, float]]:
    """For each of four ranks, the fraction of the checkpoint that it reads from storage, and the
    fraction that it receives from other ranks."""
    held, per_node = replicas / 4, 4 // nodes
    if strategy == "full-per-rank":
        return [(1.0, 0)] * 4
    if strategy == "rank0-broadcast":
        return [(1.0, 0), *[(0, 1.0)] * 3]
    if strategy == "own-shard":
        return [(held, 0)] * 4
    if strategy == "replica-striped":
        return [(1 / 4, held - 1 / 4)] * 4
    # With node-reader the first rank of a node reads the shards of all its ranks, each part once.
    # Replicas are the outer mesh axis, so a node has replicas of a shard only if it has all ranks.
    leader = (min(1.0, per_node * held), 0)
    return [(0, held) if rank % per_node else leader for rank in range(4)]


@pytest.mark.parametrize("mesh", MESHES, ids=("shards", "replicas"))
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("nodes", (1, 2))
def test_bits_are_the_same_and_reads_are_counted(
    four: Ranks,
    model: Path,
    expected: dict[int, list[Any]],
    mesh: list[int],
    strategy: str,
    nodes: int,
) -> None:
    hosts = [f"host-{rank * nodes // 4}" for rank in range(4)]
    how = {"strategy": strategy, "staging": "1MiB"}  # smaller than a shard
    got = four.ask("loaded", directory=str(model), mesh=mesh, hosts=hosts, **how)
    report = got[0]["report"]
    stored = report["checkpoint"]["bytes"]
    assert report["strategy"] == strategy and report["coverage"] == "proven"
    assert len(report["nodes"]) == nodes and report["digest"] is None
    if strategy == "full-per-rank":
        peaks = [node["promised_bytes"] for node in report["nodes"]]
        assert report["full_per_rank_bytes"] == max(peaks)
    expected_shares = shares(strategy, 4 // mesh[-1], nodes)
    for rank, (mine, theirs) in enumerate(zip(got, expected[len(mesh)], strict=True)):
        assert mine["state"] == theirs["state"], f"rank {rank}: other shards"
        assert mine["report"] == report, f"rank {rank}: another report than rank 0's"
        of, (read, received) = report["ranks"][rank], expected_shares[rank]
        assert of["storage_read_bytes"] == pytest.approx(read * stored, rel=0.05), f"rank {rank}"
        assert of["exchanged_bytes"] == pytest.approx(received * stored, rel=0.05), f"rank {rank}"
        uncounted = mine["read_bytes"] - of["storage_read_bytes"]
        assert 0 <= uncounted <= BESIDES_BYTES, f"rank {rank}"


@pytest.mark.parametrize("mesh", MESHES, ids=("shards", "replicas"))
def test_a_checked_load_has_the_digest_of_the_program(
    four: Ranks, model: Path, modicum: Path, mesh: list[int]
) -> None:
    expected = run_json(modicum, "load", model, "--digest")["digest"]
    for answer in four.ask("loaded", directory=str(model), mesh=mesh, check=True):
        assert answer["report"]["digest"] == expected
