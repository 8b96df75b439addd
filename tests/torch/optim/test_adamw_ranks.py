"""`modicum.torch.AdamW` on real ranks: FSDP2 shards that Modicum has loaded.

The oracle is torch.optim.AdamW on the same ranks. Must fail for these mutants: elements that are
numbered from the start of the shard; 8-bit moments that depend on the shards, or that are not held
in codes; a norm that counts replicas, or one rank's shards only; a rank that steps while another
skips; a gradient of FSDP2 that never reaches the plane.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from ranks import Ranks, ranks  # noqa: E402  (after torch is known to be there)
from torch_rank import adamw_rank  # noqa: E402
from transformers import AutoModelForCausalLM  # noqa: E402

FORMATS = ("fp32", "fp32-split", "bf16-moments", "int8-moments", "int8-moments-24")
WORLDS = (1, 2, 3, 8, *(pytest.param(n, marks=pytest.mark.soak) for n in (5, 6, 7)))


@pytest.fixture(scope="module")
def four(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    with ranks(4, tmp_path_factory.mktemp("adamw") / "ranks") as started:
        yield started


@pytest.fixture(scope="module")
def models(four: Ranks, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Sizes that 4 does not divide, eleven experts; and rows of 128 and 384 elements, whose moments
    8-bit formats hold in codes, with an embedding of several buckets."""
    folder = tmp_path_factory.mktemp("models")
    wanted: dict[str, dict[str, Any]] = {
        "qwen3": {"family": "qwen3", "config": {"tie_word_embeddings": True}},
        "qwen3_moe": {"family": "qwen3_moe", "config": {"num_experts": 11}, "dtype": "float32"},
        "rows": {
            "family": "qwen3",
            "config": {"hidden_size": 128, "intermediate_size": 384, "vocab_size": 1031},
            "dtype": "bfloat16",
        },
    }
    for name, facts in wanted.items():
        four.ask("write", directory=str(folder / name), **facts)
    return {name: str(folder / name) for name in wanted}


@pytest.mark.parametrize(
    ("model", "mesh"), [("qwen3", [4]), ("qwen3_moe", [4]), ("qwen3", [2, 2])], ids=str
)
def test_five_steps_are_those_of_torch(
    four: Ranks, models: dict[str, str], model: str, mesh: list[int]
) -> None:
    """Losses and parameters are equal in all bits, with several groups, one frozen parameter, and
    no gradient for experts that no token was routed to."""
    how: dict[str, Any] = {"directory": models[model], "mesh": mesh}
    expected = four.ask("adamw", by="torch", **how)
    got = four.ask("adamw", by="modicum", **how)
    for rank, (mine, theirs) in enumerate(zip(got, expected, strict=True)):
        assert mine["losses"] == theirs["losses"], f"rank {rank}"
        assert mine["after"] == theirs["after"], f"rank {rank}: other trained values"
        assert mine["before"] != mine["after"]
    # The four shards have different digests; with replicas, two shards have two equal ranks each.
    assert len({answer["digest"]["master"] for answer in got}) == 4 // (mesh[0] if mesh[1:] else 1)


@pytest.fixture(scope="module")
def of_one_process(models: dict[str, str]) -> dict[str, int]:
    """By format, the digest of the state of the model `rows`, not sharded."""
    made = {}
    for state_format in FORMATS:
        model = AutoModelForCausalLM.from_pretrained(models["rows"], dtype=torch.bfloat16)
        made[state_format] = adamw_rank.three_steps(model, state_format, threads=1)["state"]
    assert made["fp32"] == made["fp32-split"]
    assert len(set(made.values())) == 4, "only fp32 and fp32-split agree"
    return made


def assert_digests(
    started: Ranks, directory: str, mesh: list[int], threads: int, expected: dict[str, int]
) -> None:
    how: dict[str, Any] = {"directory": directory, "mesh": mesh, "threads": threads}
    for state_format, digest in expected.items():
        answers = started.ask("adamw_states", state_format=state_format, **how)
        shards = answers[: mesh[-1]]
        assert sum(of["state"] for of in shards) % 2**64 == digest, (state_format, mesh, threads)
        assert answers == shards * (len(answers) // mesh[-1]), "replicas differ"


@pytest.mark.parametrize("world", WORLDS)
def test_states_do_not_depend_on_shards(
    models: dict[str, str], of_one_process: dict[str, int], tmp_path: Path, world: int
) -> None:
    """With the same gradients the whole state, codes and scales included, has the digest of a
    model in one process, for any number of ranks and threads."""
    with ranks(world, tmp_path / "ranks") as started:
        for threads in (1, 3):
            assert_digests(started, models["rows"], [world], threads, of_one_process)


def test_states_do_not_depend_on_replicas(
    four: Ranks, models: dict[str, str], of_one_process: dict[str, int]
) -> None:
    for mesh in ([4], [2, 2], [4, 1]):
        assert_digests(four, models["rows"], mesh, 2, of_one_process)


@pytest.mark.parametrize("mesh", ([4], [2, 2]), ids=str)
def test_clips_by_the_norm_of_all_ranks(
    four: Ranks, models: dict[str, str], mesh: list[int]
) -> None:
    """For limits below, at and above the norm, norm and clip factor are the same on all ranks and
    within an ulp of float64's. torch sums its norm in float32: it agrees within 2^-20."""
    for answer in (answers := four.ask("adamw_norm", directory=models["qwen3"], mesh=mesh)):
        assert answer == answers[0], "another norm on another rank"
        assert answer["norm"] == pytest.approx(answer["fp64"], rel=2**-23)
        assert answer["norm"] == pytest.approx(answer["torch"], rel=2**-20)
        assert answer["factor"] == pytest.approx(answer["expected_factor"], rel=2**-23)


@pytest.mark.parametrize("bad", ("nan", "inf"))
def test_all_ranks_skip_what_is_bad_on_one(four: Ranks, models: dict[str, str], bad: str) -> None:
    how = {"directory": models["qwen3"], "mesh": [4], "bad": bad}
    for rank, answer in enumerate(four.ask("adamw_skip", **how)):
        assert answer["before"] == answer["after"], f"rank {rank} has written"
        assert answer["skipped"] == 1 and answer["norm"] == "nan", f"rank {rank}"
        assert answer["then"] != answer["after"], f"rank {rank} trains no further"


def test_dcp_saves_and_loads_the_state(four: Ranks, models: dict[str, str], tmp_path: Path) -> None:
    """torch.distributed.checkpoint saves the state and loads it, also into torch's own AdamW."""
    how = {"directory": models["qwen3"], "mesh": [4], "folder": str(tmp_path / "saved")}
    for rank, answer in enumerate(four.ask("adamw_checkpoint", **how)):
        assert answer["ours"] == answer["expected"], f"rank {rank}"
        assert answer["torch"] == answer["expected"], f"rank {rank}: torch.optim.AdamW"
