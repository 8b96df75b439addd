"""`HuggingFaceReader` under torch.distributed.checkpoint: what each rank then holds is its part of
what `from_pretrained` gives.

House test against outside oracles, `from_pretrained` cut by torch.chunk and torch's own reader. It
catches these mutations: a box in the wrong place; a strided cut read as one box; a conversion of
stored names only; a cast of bits; a part that every rank reads whole.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

import torch.distributed.checkpoint as dcp  # noqa: E402  (after torch is known to be there)
from ranks import Ranks, ranks  # noqa: E402
from sharding import Cut, assert_same, playing_new_rank  # noqa: E402
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader  # noqa: E402
from torch_front import (  # noqa: E402
    checkpoint_of,
    empty,
    from_pretrained,
    left_whole,
    local,
    local_part,
    shard,
)

import modicum  # noqa: E402
from modicum import _modicum  # noqa: E402
from modicum.torch.dcp import HuggingFaceReader  # noqa: E402

CUTS = (
    Cut("none", (1,)),
    Cut("fsdp2", (3,)),
    Cut("fsdp2", (3,), dim=1),
    Cut("hsdp", (2, 2)),
    Cut("tp-fsdp", (2, 2)),
    Cut("tp-fsdp", (3, 2)),
)
# As stored; tied; stacked and joined experts; joined along dim 0; transposed experts; renamed; FP8.
FAMILIES = ("llama", "llama_tied", "qwen3_moe", "olmo_hybrid", "qwen3_vl_moe", "bert", "qwen3_fp8")


@pytest.fixture(scope="module", autouse=True)
def whole_models() -> None:
    """Are there before a rank is played."""
    for name in FAMILIES:
        from_pretrained(name)


def read(model: Any, reader: Any) -> dict[str, Any]:
    """The state dict, which is on meta before."""
    state = model.state_dict()
    dcp.load(state, storage_reader=reader, no_dist=True)
    return state


def assert_parts(state: dict[str, Any], name: str, cut: Cut, rank: int) -> None:
    whole = from_pretrained(name)
    uncut, parameters = left_whole(whole), dict(whole.named_parameters(remove_duplicate=False))
    expected = whole.state_dict()
    assert state.keys() == expected.keys()
    for key, tensor in expected.items():
        is_cut = key in parameters and key not in uncut
        part = local_part(key, tensor, cut, rank) if is_cut else tensor
        assert_same(local(state[key]), part, f"{key} of rank {rank}, {cut}")


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("cut", CUTS, ids=str)
def test_every_rank_gets_its_part(name: str, cut: Cut) -> None:
    for rank in range(cut.world):
        with playing_new_rank(rank, cut.world):
            model = shard(empty(name), cut)
            state = read(model, HuggingFaceReader(checkpoint_of(name), model))
            assert_parts(state, name, cut, rank)
