"""`modicum.torch.AdamW` on real ranks, with FSDP2 shards that Modicum has loaded.

The oracles are torch.optim.AdamW on the same ranks, and Modicum's own in one process. Catches:
elements that are numbered from the start of the shard; 8-bit moments whose values depend on the
sharding, or that are not held as codes; a norm that counts replicas twice, or that has only this
rank's shards; a rank that steps while another rank skips the step; a gradient of FSDP2 that is not
in the state when the step begins.
"""

from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from ranks import Pool, Ranks  # noqa: E402  (after torch is known to be there)
from torch_rank import adamw_rank  # noqa: E402
from transformers import AutoModelForCausalLM  # noqa: E402

FORMATS = ("fp32", "fp32-split", "bf16-moments", "int8-moments", "int8-moments-24")
WORLDS = (3, *(pytest.param(n, marks=pytest.mark.soak) for n in (1, 2, 4, 5, 6, 7, 8)))


@pytest.fixture(scope="module")
def models(four: Ranks, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """By name, directories of checkpoints. The world size, 4, does not divide the sizes of "qwen3"
    and "qwen3_moe" (eleven experts). The matrices of "rows" have rows of 128 or 384 elements, so
    that the int8 formats hold 8-bit moments of them."""
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
        assert mine["after"] == theirs["after"], f"rank {rank}: the parameters differ from torch's"
        assert mine["before"] != mine["after"]
    # The ranks of one shard have equal digests; different shards have different ones.
    assert len({answer["digest"]["master"] for answer in got}) == mesh[-1]


@pytest.fixture(scope="module")
def of_one_process(models: dict[str, str]) -> dict[str, int]:
    """By format, the digest of the state for the model "rows" after three steps in this process."""
    made = {}
    for state_format in FORMATS:
        model = AutoModelForCausalLM.from_pretrained(models["rows"], dtype=torch.bfloat16)
        made[state_format] = adamw_rank.three_steps(model, state_format, threads=1)["state"]
    assert made["fp32"] == made["fp32-split"]
    assert len(set(made.values())) == 4, "expected only fp32 and fp32-split to agree"
    return made


def assert_digests(
    started: Ranks, directory: str, mesh: list[int], threads: int, expected: dict[str, int]
) -> None:
    how: dict[str, Any] = {"directory": directory, "mesh": mesh, "threads": threads}
    for state_format, digest in expected.items():
        answers = started.ask("adamw_states", state_format=state_format, **how)
        shards = answers[: mesh[-1]]  # those of the first replica
        got = sum(shard["state"] for shard in shards) % 2**64
        assert got == digest, (state_format, mesh, threads)
        assert answers == shards * (len(answers) // mesh[-1]), "replicas differ"


@pytest.mark.parametrize("world", WORLDS)
def test_states_do_not_depend_on_shards(
    pool: Pool, models: dict[str, str], of_one_process: dict[str, int], world: int
) -> None:
    """With the same gradients, the digests of all ranks add up to that of a model in one process,
    for any number of ranks and threads."""
    with pool.lend(world) as started:
        for threads in (1, 3):
            assert_digests(started, models["rows"], [world], threads, of_one_process)


def test_states_do_not_depend_on_replicas(
    four: Ranks, models: dict[str, str], of_one_process: dict[str, int]
) -> None:
    for mesh in ([2, 2], [4, 1]):
        assert_digests(four, models["rows"], mesh, 2, of_one_process)


@pytest.mark.parametrize("mesh", ([4], [2, 2]), ids=str)
def test_clips_by_the_norm_of_all_ranks(
    four: Ranks, models: dict[str, str], mesh: list[int]
) -> None:
    """For limits below, at and above the norm, norm and clip factor are the same on all ranks and
    within an ulp of float64's. torch sums its norm in float32: the norm is within 2^-20 of it."""
    answers = four.ask("adamw_norm", directory=models["qwen3"], mesh=mesh)
    for answer in answers:
        assert answer == answers[0], "ranks have different norms or factors"
        assert answer["norm"] == pytest.approx(answer["fp64"], rel=2**-23)
        assert answer["norm"] == pytest.approx(answer["torch"], rel=2**-20)
        assert answer["factor"] == pytest.approx(answer["expected_factor"], rel=2**-23)


@pytest.mark.parametrize("bad", ("nan", "inf"))
def test_all_ranks_skip_what_is_bad_on_one(four: Ranks, models: dict[str, str], bad: str) -> None:
    how = {"directory": models["qwen3"], "mesh": [4], "bad": bad}
    for rank, answer in enumerate(four.ask("adamw_skip", **how)):
        assert answer["before"] == answer["after"], f"rank {rank} has written"
        assert answer["skipped"] == 1 and answer["norm"] == "nan", f"rank {rank}"
        assert answer["then"] != answer["after"], f"rank {rank} does not make the next step"


def test_dcp_saves_and_loads_the_state(four: Ranks, models: dict[str, str], tmp_path: Path) -> None:
    """torch.distributed.checkpoint saves the state of Modicum's AdamW, and loads it into Modicum's
    and into torch's. Both go on as if the run had not been interrupted."""
    how = {"directory": models["qwen3"], "mesh": [4], "folder": str(tmp_path / "saved")}
    for rank, answer in enumerate(four.ask("adamw_checkpoint", **how)):
        assert answer["ours"] == answer["expected"], f"rank {rank}"
        assert answer["torch"] == answer["expected"], f"rank {rank}: torch.optim.AdamW"
