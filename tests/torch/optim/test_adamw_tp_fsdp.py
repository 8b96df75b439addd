"""`modicum.torch.AdamW` where tensor parallelism and FSDP2 shard one dim unevenly, on real ranks.

The oracles are one process with the complete model, whose results torch.chunk shards, and DTensor's
`full_tensor`. Catches: a shard of a shard treated as a shard of the complete parameter; elements
numbered from the start of the shard (the random bits of stochastic rounding depend on the global
index); replicas that a norm counts twice.
"""

import math
from functools import cache
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from ranks import Ranks  # noqa: E402
from sharding import Cut, bits  # noqa: E402
from torch_front import checkpoint_of, local_part, whole_gradient  # noqa: E402
from transformers import AutoModelForCausalLM  # noqa: E402

import modicum.torch  # noqa: E402  (after torch is known to be there)

MESHES = ((2, 2), (3, 2), (2, 3))  # (dp, tp); 53, 39 and 101 rows are cut unevenly
FORMATS = (("float32", "fp32"), ("bfloat16", "bf16-moments"), ("bfloat16", "int8-moments"))
# A configuration for int8 formats. Where tensor parallelism cuts columns for two or three ranks,
# each rank gets a multiple of 128 columns, so that no cut is inside a block of 128 elements.
ROWS = {
    "hidden_size": 128,
    "intermediate_size": 768,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 384,
}


@pytest.fixture(
    scope="module", params=(pytest.param(4, marks=pytest.mark.soak), 6), ids="{} ranks".format
)
def world(request: Any, worlds: dict[int, Ranks]) -> Ranks:
    return worlds[request.param]


def meshes_of(world: Ranks) -> list[tuple[int, int]]:
    return [mesh for mesh in MESHES if math.prod(mesh) == len(world.lines)]


@pytest.fixture(scope="module")
def rows(world: Ranks, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The directory of a checkpoint whose matrices are large enough for 8-bit moments."""
    folder = str(tmp_path_factory.mktemp("model") / "rows")
    world.ask("write", directory=folder, family="llama", config=ROWS)
    return folder


@cache
def by_one_process(
    directory: str, dtype: str, state_format: str
) -> tuple[dict[str, Any], float, set[str]]:
    """(every parameter and moment after three steps, by name; the norm of the gradients of a fourth
    step; the state formats in use)"""
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=getattr(torch, dtype))
    optimizer = modicum.torch.AdamW(model.named_parameters(), lr=1e-2, state_format=state_format)
    for step in range(4):
        for name, parameter in model.named_parameters():
            parameter.grad = whole_gradient(name, parameter.shape, step).to(parameter.dtype)
        if step < 3:
            optimizer.step()
            optimizer.zero_grad()
    squares = (p.grad.double().square().sum().item() for p in model.parameters())
    norm = math.sqrt(math.fsum(squares))
    values = dict(model.named_parameters())
    for name, entry in zip(list(values), optimizer.state_dict()["state"].values(), strict=True):
        values |= {f"{name} {moment}": entry[moment] for moment in ("exp_avg", "exp_avg_sq")}
    return values, norm, set(optimizer.held)


@pytest.mark.parametrize(("dtype", "state_format"), FORMATS)
def test_steps_are_those_of_one_process(
    world: Ranks, rows: str, dtype: str, state_format: str
) -> None:
    """After three steps, every rank's shards of parameters and moments are equal in all bits to
    those of one process. The norm of the next gradients is equal within 2^-22."""
    directory = rows if state_format == "int8-moments" else str(checkpoint_of("llama"))
    whole, norm, formats = by_one_process(directory, dtype, state_format)
    assert state_format in formats, "no parameter is in this format"
    for mesh in meshes_of(world):
        how = {"mesh": list(mesh), "dtype": dtype, "state_format": state_format}
        answers = world.ask("adamw_tp_fsdp", directory=directory, **how)
        for rank, answer in enumerate(answers):
            assert answer["held"].keys() == whole.keys()
            for name, mine in answer["held"].items():
                theirs = local_part(name.split()[0], whole[name], Cut("tp-fsdp", mesh), rank)
                assert mine == bits(theirs), f"{name} of rank {rank}, {mesh}"
            assert answer["norm"] == pytest.approx(norm, rel=2**-22)


def test_elements_are_those_of_full_tensor(world: Ranks) -> None:
    """For many shapes, the elements of `full_tensor()` with the indices of a rank's shard, by
    AdamW's numbering, are the shard. Each rank answers with the shapes for which they differ."""
    for mesh in meshes_of(world):
        answers = world.ask("adamw_elements", mesh=list(mesh))
        assert answers == [[]] * len(answers), mesh
