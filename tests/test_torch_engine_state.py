"""`fsdp2_load_full_state_dict` in the place of the functions of this name: every rank then holds,
and trains, what it would if the whole model had been cut by FSDP2, or upstream's own function had
been called.

House test. It catches these mutations: a piece that goes to the wrong place; a rank that wants no
piece and holds up the others; what a rank built in another way and keeps; buffers that stay as
they were; a tie that comes apart; a second dtype.
"""

import re
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

import modicum.torch  # noqa: E402
from modicum.torch import full_state_dict  # noqa: E402
from ranks import Ranks, ranks  # noqa: E402  (after torch is known to be there)
from torch.distributed.fsdp import CPUOffloadPolicy  # noqa: E402

BUILT = (
    "alike",
    "others without parameters",
    "others on meta",
    "others from to_empty",
    "with values",
)


@pytest.fixture(scope="module")
def four(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    with ranks(4, tmp_path_factory.mktemp("engine") / "ranks") as started:
        yield started


def assert_same(four: Ranks, expected: list[Any], **how: Any) -> None:
    got = four.ask("state_dict_loaded", **how)
    for rank, (mine, theirs) in enumerate(zip(got, expected, strict=True)):
        assert mine["held"] == theirs["held"], f"rank {rank} holds something else"
        assert mine["loss"] == theirs["loss"], f"rank {rank}"
        assert mine["after"] == theirs["after"], f"rank {rank} trained otherwise"


@pytest.mark.parametrize("built", BUILT)
@pytest.mark.parametrize("form", ("accelerate", "engine", "areal"))
def test_every_rank_holds_its_part(four: Ranks, form: str, built: str) -> None:
    """Whoever built the model how. `to_empty` unties, so that there is nothing tied then."""
    kind = {"tied": built != "others from to_empty"}
    expected = four.ask("state_dict_loaded", by="torch", **kind)
    assert_same(four, expected, form=form, built=built, **kind)


@pytest.mark.parametrize("built", BUILT[:3])
@pytest.mark.parametrize("form", ("accelerate", "areal"))
def test_a_path_in_the_place_of_the_dict(
    four: Ranks, tmp_path: Path, form: str, built: str
) -> None:
    how = {"path": str(tmp_path / "toy.safetensors"), "options": {"budget": "none"}}
    expected = four.ask("state_dict_loaded", by="torch")
    assert_same(four, expected, form=form, built=built, **how)


def test_what_a_dict_lacks_keeps_its_values(four: Ranks) -> None:
    """With strict=False, and where there are values."""
    expected = four.ask("state_dict_loaded", by="torch")
    how = {"omit": ("experts.up", "seen"), "options": {"strict": False}}
    assert_same(four, expected, built="with values", **how)


@pytest.mark.parametrize("form", ("accelerate", "engine"))
def test_as_upstream(four: Ranks, form: str) -> None:
    """Where upstream's own function can do it: accelerate's takes no buffers, and both untie."""
    kind = {"form": form, "tied": False, "buffers": form == "engine", "built": "others on meta"}
    kind |= {"dtype": "bfloat16", "stored": "bfloat16"}
    assert_same(four, four.ask("state_dict_loaded", by="upstream", **kind), **kind)


@pytest.mark.parametrize(
    ("dtype", "stored"), [("bfloat16", "float32"), ("float32", "bfloat16"), ("float16", "float64")]
)
def test_parameters_have_the_models_dtype(four: Ranks, dtype: str, stored: str) -> None:
    how = {"dtype": dtype, "stored": stored, "buffers": False}
    expected = four.ask("state_dict_loaded", by="torch", **how)
    assert_same(four, expected, built="others on meta", **how)


@pytest.mark.parametrize("omit", ("head.weight", "embed.weight"))
def test_one_of_two_tied_names_is_enough(four: Ranks, omit: str) -> None:
    expected = four.ask("state_dict_loaded", by="torch")
    assert_same(four, expected, built="others on meta", omit=(omit,))


@pytest.mark.parametrize("form", ("accelerate", "engine", "areal"))
def test_offloaded_parameters(four: Ranks, form: str) -> None:
    expected = four.ask("state_dict_loaded", by="torch", offload=True)
    assert_same(four, expected, form=form, built="others on meta", offload=True)


def test_offloading_that_fully_shard_was_not_told_of(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each form has its word for it; parameters on a device are refused then, by name."""
    policy, on_gpu = CPUOffloadPolicy(pin_memory=False), torch.device("cuda", 0)

    class Walk:
        managed = {"norm.weight": SimpleNamespace(device=on_gpu)}

    def fill(model: Any, full: Any, offload: bool, rules: Any, options: Any) -> Any:
        full_state_dict._check_offload(Walk, offload)
        return model

    monkeypatch.setattr(full_state_dict, "_fill", fill)
    model, load = torch.nn.Linear(1, 1), modicum.torch.fsdp2_load_full_state_dict
    calls: list[tuple[Any, dict[str, Any]]] = [
        ((model, {}, policy), {}),  # AReaL
        ((model, {}, None, policy), {}),  # verl
        ((object(), model, {}, True), {}),  # accelerate
        ((object(), model, {}), {"offload_to_cpu": True}),  # axolotl
        ((), {"accelerator": None, "model": model, "full_sd": {}, "cpu_offload": True}),
    ]
    for arguments, named in calls:
        with pytest.raises(modicum.UsageError, match="cpu_offload .*norm.weight.* cuda:0"):
            load(*arguments, **named)
    for arguments in ((model, {}, None), (model, {}, None, None), (object(), model, {}, False)):
        assert load(*arguments) is model


def test_words_that_are_none() -> None:
    model = torch.nn.Linear(1, 1)
    for full, word in (({}, "budget"), ("/nowhere", "offload"), ({}, "missing")):
        with pytest.raises(TypeError, match=f"unknown argument '{word}'"):
            modicum.torch.fsdp2_load_full_state_dict(model, full, **{word: "1GiB"})


@pytest.mark.parametrize("piece", (8 << 20, 1 << 7, 1))
def test_pieces_of_any_size(four: Ranks, piece: int) -> None:
    expected = four.ask("state_dict_loaded", by="torch")
    assert_same(four, expected, built="others on meta", piece=piece)


@pytest.mark.parametrize(
    ("case", "message"),
    [
        ("missing", "MISMATCH: .* lacks a tensor .*experts"),
        ("unknown", "MISMATCH: 1 tensors .* no part of the model .*head.bias"),
        ("shape", r"MISMATCH: .*experts.* float32 \[3, 5, 4\].* float32 \[2, 5, 4\]"),
        ("meta", "UNSUPPORTED: nothing has computed .*experts"),
        ("kind", "MISMATCH: .*seen.* int64 .* float32"),
        ("tie", "MISMATCH: two tied names .*head.weight"),
        ("path on one rank", "CONFLICT: rank 1 has other inputs"),
        ("type", "USAGE: a state dict .*list"),
        ("other model", "CONFLICT: rank 2 has other inputs"),
    ],
)
def test_refused_on_every_rank(four: Ranks, case: str, message: str) -> None:
    """The same words everywhere, and nobody has half a model."""
    (said,) = set(four.ask("drop_in_refused", case=case))
    assert re.match(message, said), said
