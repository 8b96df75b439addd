"""`modicum.torch.load` fills models sharded by FSDP2 with the values that `from_pretrained` loads
in one process: every rank's shard of every parameter, and every buffer, bit for bit. Tied names
have one Parameter, and `requires_grad` is as before the load.

Catches: a tie that becomes two parameters; a buffer left as it was built; the file's dtype instead
of the model's; a frozen parameter that trains because it was loaded.
"""

import re
from collections.abc import Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from families import FAMILIES, Family  # noqa: E402  (after torch is known to be there)
from sharding import Cut, playing_new_rank  # noqa: E402
from torch_front import (  # noqa: E402
    BY_NAME,
    WORLDS,
    assert_holds,
    assert_trains_as_built,
    checkpoint_of,
    empty,
    from_pretrained,
    load,
    shard,
)

BF16, FP32 = torch.bfloat16, torch.float32
# Every fifth family that is not quantized, and three more that keep some tensors in float32: all
# parameters of a module, a buffer, and one of the two parameters of a module.
CAST = [
    *[family.name for family in FAMILIES if family.quantization is None][::5],
    "ernie4_5_moe",
    "deepseek_v3",
    "inkling",
]
# Together these have a tie, packed and permuted rows, stacked experts, and a vision tower.
FEW = ("llama_tied", "olmo_hybrid", "qwen3_moe", "kimi_k25")
CUTS = (
    Cut("none", (2,)),
    Cut("fsdp2", (5,)),
    Cut("fsdp2", (3,), dim=1),
    Cut("hsdp", (2, 2)),
    Cut("tp-fsdp", (2, 2)),  # queries are cut twice along dim 0, outputs along both dims
    Cut("tp-fsdp", (2, 3), dim=1),  # outputs are cut twice along dim 1
)


def loaded(name: str, cut: Cut, built: Any, **options: Any) -> Iterator[tuple[int, Any]]:
    """Loads each simulated rank's model, built in the dtype `built`. Yields the rank and its
    model."""
    for rank in range(cut.world):
        with playing_new_rank(rank, cut.world):
            model = shard(empty(name, built), cut)
            report = load(model, checkpoint_of(name), **options)
            assert report.document["coverage"] == "proven" and len(report.ranks) == cut.world
            yield rank, model


def other_dtype(family: Family) -> Any:
    return BF16 if family.dtype == "float32" else FP32


@pytest.mark.parametrize("number", range(len(FAMILIES)), ids=lambda n: FAMILIES[n].name)
def test_every_family_has_the_values_of_from_pretrained(number: int) -> None:
    """Loads over 1, 2 or 3 ranks; in some cases every value is also compared with a second read."""
    name, cut = FAMILIES[number].name, Cut("fsdp2", (WORLDS[number % 3],))
    whole = from_pretrained(name)
    check = number % 4 == 0
    for rank, model in loaded(name, cut, whole.dtype, check=check):
        assert_holds(model, whole, cut, rank)
        assert_trains_as_built(model, name)


@pytest.mark.parametrize("cut", CUTS, ids=str)
@pytest.mark.parametrize("name", FEW)
def test_every_layout_has_the_values_of_from_pretrained(name: str, cut: Cut) -> None:
    whole = from_pretrained(name)
    for rank, model in loaded(name, cut, whole.dtype):
        assert_holds(model, whole, cut, rank)


@pytest.mark.parametrize("name", CAST)
def test_stored_values_are_cast_to_the_models_dtype(name: str) -> None:
    """The files are float32 and the model bfloat16, or the reverse."""
    dtype, cut = other_dtype(BY_NAME[name]), Cut("fsdp2", (2,))
    whole = from_pretrained(name, dtype)
    assert whole.dtype == dtype
    for rank, model in loaded(name, cut, dtype):
        assert_holds(model, whole, cut, rank)


@pytest.mark.parametrize("name", ["llama", "llama_tied", "mixtral"])
@pytest.mark.parametrize("cut", [Cut("none", (1,)), Cut("fsdp2", (3,))], ids=str)
def test_the_dtype_may_differ_from_the_models(name: str, cut: Cut) -> None:
    family = BY_NAME[name]
    dtype = other_dtype(family)
    whole = from_pretrained(name, dtype)
    built = getattr(torch, family.dtype)
    for rank, model in loaded(name, cut, built, dtype=dtype):
        assert_holds(model, whole, cut, rank)


@pytest.mark.parametrize("name", ["t5", "gpt_oss"])
def test_a_float16_model_keeps_its_own_names_in_float32(name: str) -> None:
    """transformers keeps other tensors in float32 in a float16 model than in a bfloat16 one."""
    whole = from_pretrained(name, torch.float16)
    assert {p.dtype for p in whole.parameters()} == {torch.float16, FP32}
    for rank, model in loaded(name, Cut("fsdp2", (2,)), torch.float16):
        assert_holds(model, whole, Cut("fsdp2", (2,)), rank)


def test_frozen_parameters_stay_frozen() -> None:
    """One FSDP2 unit is frozen whole, and another in part."""
    cut, whole = Cut("fsdp2", (2,)), from_pretrained("llama")
    with playing_new_rank(1, 2):
        model = empty("llama")
        frozen = {n for n, _ in model.named_parameters() if "q_proj" in n or ".0." in n}
        for name in frozen:
            model.get_parameter(name).requires_grad_(False)
        load(shard(model, cut), checkpoint_of("llama"))
        assert {n for n, p in model.named_parameters() if not p.requires_grad} == frozen
        assert_holds(model, whole, cut, 1)


def test_full_per_rank_gives_the_same_values() -> None:
    """This strategy, like own-shard, can be tested with simulated ranks. The others send bytes,
    which takes real ranks (test_strategies.py)."""
    cut = Cut("fsdp2", (3,))
    whole = from_pretrained("qwen3_moe")
    for rank, model in loaded("qwen3_moe", cut, whole.dtype, strategy="full-per-rank"):
        assert_holds(model, whole, cut, rank)


def test_a_model_without_a_process_group_is_loaded() -> None:
    model, whole = empty("llama_tied"), from_pretrained("llama_tied")
    report = load(model, checkpoint_of("llama_tied"), check=True)
    assert report.check == "ok" and report.digest == report.document["digest"]
    assert re.fullmatch("[0-9a-f]{16}", report.digest)
    assert report.full_per_rank_bytes == report.document["full_per_rank_bytes"]
    assert_holds(model, whole, Cut("none", (1,)), 0)
    tokens = torch.arange(3, 14).reshape(1, 11)
    with torch.no_grad():
        assert torch.equal(model.eval()(tokens).logits, whole.eval()(tokens).logits)
