"""Known errors of loaders of sharded models that concern names. The numbers continue those of
`test_pitfalls.py`, and some are not used. Most tests also contain a minimal loader with the error,
and show that it gives another result than `modicum.torch.load`:

    11  names that do not match are only a warning
    12  a tower's conversions are lost, since `fully_shard` changes its class
    13  a wrapped model's names do not match, and each rank initialises its parameters at random
    16  experts are sorted by their names as text, 10 before 2
"""

import json
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")

from program import write_checkpoint, write_shards  # noqa: E402
from sharding import Cut, assert_same, playing_new_rank  # noqa: E402  (torch is there)
from torch import nn  # noqa: E402
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (  # noqa: E402
    checkpoint_wrapper,
)
from torch_front import (  # noqa: E402
    BY_NAME,
    assert_empty,
    assert_holds,
    checkpoint_of,
    chunk,
    config_of,
    differs,
    empty,
    from_pretrained,
    load,
    local,
    parameters_of,
    shard,
    stored_in,
)

import modicum  # noqa: E402
from modicum.torch import empty_parameters  # noqa: E402

TWO, THREE = Cut("fsdp2", (2,)), Cut("fsdp2", (3,))


# ---- 11


def test_11_stacked_experts_are_loaded() -> None:
    whole, directory = from_pretrained("qwen3_moe"), checkpoint_of("qwen3_moe")
    with playing_new_rank(1, 2):
        model = shard(empty("qwen3_moe"), TWO)
        load(model, directory)
        assert_holds(model, whole, TWO, 1)
    naive = BY_NAME["qwen3_moe"].model_class._from_config(whole.config, dtype=whole.dtype)
    naive.load_state_dict(stored_in(directory), strict=False)
    with pytest.raises(AssertionError, match="experts"):
        assert_holds(naive, whole, Cut("none", (1,)), 0)


EXPERT = "model.layers.0.mlp.experts.{}.down_proj.weight"
GATE = "model.layers.1.mlp.gate.weight"
GATE_OF = "model.layers.0.mlp.experts.{}.gate_proj.weight"
UP_OF = "model.layers.1.mlp.experts.{}.up_proj.weight"


def misspelt(stored: dict[str, Any]) -> None:
    stored["model.layers.1.mlp.gte.weight"] = stored.pop(GATE)


def without_an_expert(stored: dict[str, Any]) -> None:
    del stored[EXPERT.format(4)]


def without_the_gate_of_an_expert(stored: dict[str, Any]) -> None:
    del stored[GATE_OF.format(3)]


def without_the_up_of_an_expert(stored: dict[str, Any]) -> None:
    del stored[UP_OF.format(1)]


def of_another_size(stored: dict[str, Any]) -> None:
    stored[GATE] = stored[GATE][:-1].clone()


def with_one_more(stored: dict[str, Any]) -> None:
    stored["model.layers.2.mlp.gate.weight"] = torch.ones(2)


def without_a_gate(stored: dict[str, Any]) -> None:
    del stored[GATE]


@pytest.mark.parametrize(
    ("spoil", "tensor", "says"),
    [
        (misspelt, "model.layers.1.mlp.gte.weight", rf"unexpected.*nearest is '{GATE}'"),
        (without_a_gate, GATE,
         r"lacks 1 tensor of.*missing.*nearest is 'model\.layers\.0\.mlp\.gate"),
        (with_one_more, "model.layers.2.mlp.gate.weight",
         r"1 stored.*nearest is 'model\.layers\.\d"),
        (without_an_expert, "model.layers.0.mlp.experts.down_proj",
         r"another shape.*expected \[5, 39, 13\], got \[4, 39, 13\]"),
        (without_the_gate_of_an_expert, GATE_OF.format(3),
         r"lacks a tensor that 'model\.layers\.0.*gate_up_proj' is made of.*5, got 4"),
        (without_the_up_of_an_expert, UP_OF.format(1),
         r"lacks a tensor that 'model\.layers\.1.*gate_up_proj' is made of.*5, got 4"),
        (of_another_size, GATE, r"another shape.*expected \[5, 39\], got \[4, 39\]"),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)  # fmt: skip
def test_11_names_that_do_not_match_are_errors(
    spoil: Any, tensor: str, says: str, tmp_path: Path
) -> None:
    stored = stored_in(checkpoint_of("qwen3_moe"))
    spoil(stored)
    directory = write_checkpoint(tmp_path / "model", stored, files=2)
    with playing_new_rank(1, 2):
        model = shard(empty("qwen3_moe"), TWO)
        with pytest.raises(modicum.UsageError, match=says) as raised:
            load(model, directory)
        assert raised.value.category == "MISMATCH" and raised.value.tensor == tensor
        assert_empty(model)
    # With strict=False torch raises an error only for a tensor of another size.
    naive = BY_NAME["qwen3_moe"].model_class._from_config(config_of("qwen3_moe"))
    if spoil is not of_another_size:
        naive.load_state_dict(stored, strict=False)


# ---- 12


def renamed_names(model: Any, names: list[str]) -> set[str]:
    """The stored `names`, renamed by the rules that transformers has for the classes of the modules
    of `model`."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightRenaming, rename_source_key

    transforms = get_model_conversion_mapping(model)
    renamings = [t for t in transforms if isinstance(t, WeightRenaming)]
    converters = [t for t in transforms if not isinstance(t, WeightRenaming)]
    return {rename_source_key(name, renamings, converters)[0] for name in names}


@pytest.mark.parametrize("name", ["llava", "qwen2_5_vl"])
def test_12_a_sharded_towers_conversions_are_found(name: str) -> None:
    whole, directory = from_pretrained(name), checkpoint_of(name)
    names, wanted = list(stored_in(directory)), set(whole.state_dict())
    assert renamed_names(whole, names) == wanted
    for rank in range(3):
        with playing_new_rank(rank, 3):
            model = shard(empty(name), THREE)
            # fully_shard has changed the class of the tower, so its rules are not found.
            assert renamed_names(model, names) != wanted
            load(model, directory)
            assert_holds(model, whole, THREE, rank)


# ---- 13

LORA = {"r": 2, "target_modules": ["q_proj", "down_proj"], "modules_to_save": ["lm_head"]}


def with_adapters(model: Any) -> Any:
    return peft.get_peft_model(model, peft.LoraConfig(**LORA))


def empty_with_adapters(cut: Cut) -> Any:
    config = config_of("llama")
    with empty_parameters():
        model = with_adapters(BY_NAME["llama"].model_class(config))
    return shard(model, cut)


def base_of(wrapped: Any) -> dict[str, Any]:
    """The base's parameters, by their names without PEFT's wrapper."""
    return {
        name.removeprefix("base_model.model.")
        .replace(".base_layer", "")
        .replace(".original_module", ""): local(parameter)
        for name, parameter in parameters_of(wrapped).items()
        if "lora_" not in name and ".modules_to_save." not in name
    }


def adapters_of(wrapped: Any) -> dict[str, Any]:
    return {n: local(p) for n, p in parameters_of(wrapped).items() if "lora_" in n}


def assert_equal(got: dict[str, Any], expected: dict[str, Any]) -> None:
    assert got.keys() == expected.keys()
    for name, tensor in expected.items():
        assert_same(got[name], tensor, name)


@pytest.mark.parametrize("rank", range(2))
def test_13_the_base_is_the_same_in_a_wrapper(rank: int) -> None:
    directory = checkpoint_of("llama")
    with playing_new_rank(rank, 2):
        plain, wrapped = shard(empty("llama"), TWO), empty_with_adapters(TWO)
        load(plain, directory)
        load(wrapped, directory)
    assert not any(parameter.is_meta for parameter in wrapped.parameters())
    expected = {name: local(p) for name, p in parameters_of(plain).items()}
    assert_equal(base_of(wrapped), expected)
    # PEFT trains a copy of the head, which begins with the values of the head.
    copied = [p for n, p in parameters_of(wrapped).items() if ".modules_to_save." in n]
    assert [differs(local(p), expected["lm_head.weight"]) for p in copied] == [False]
    naive = with_adapters(BY_NAME["llama"].model_class(config_of("llama")))
    naive.load_state_dict(stored_in(directory), strict=False)
    with pytest.raises(AssertionError):
        assert_equal(base_of(naive), {n: t.detach() for n, t in from_pretrained("llama")
                                      .named_parameters()})  # fmt: skip


@pytest.mark.parametrize("rank", range(2))
def test_13_names_are_the_same_in_torchs_wrappers(rank: int) -> None:
    """Activation checkpointing and torch.compile insert parts into names that no file has."""
    whole, directory = from_pretrained("llama_tied"), checkpoint_of("llama_tied")
    with playing_new_rank(rank, 2):
        model = empty("llama_tied")
        for i, layer in enumerate(model.model.layers):
            model.model.layers[i] = checkpoint_wrapper(layer)
        compiled = torch.compile(shard(model, TWO))
        naive = set(compiled.state_dict()) & set(stored_in(directory))
        load(compiled, directory)
    inside = "_orig_mod.", "_checkpoint_wrapped_module."
    for name, parameter in parameters_of(compiled).items():
        bare = name.replace(inside[0], "").replace(inside[1], "")
        assert_same(local(parameter), chunk(whole.get_parameter(bare).detach(), 2, rank), name)
    assert not naive and all(any(part in n for n in parameters_of(compiled)) for part in inside)


def made_by_each_rank(whole: Any, rank: int) -> Any:
    """A shard as drawn by a loader in which every rank draws its own shard with the same seed."""
    return torch.randn(chunk(whole, 2, rank).shape, generator=torch.Generator().manual_seed(0))


def test_13_new_adapters_are_shards_of_one_draw() -> None:
    directory = checkpoint_of("llama")
    with playing_new_rank(0, 1):
        one = empty_with_adapters(Cut("fsdp2", (1,)))
        load(one, directory)
    whole = adapters_of(one)
    naive: dict[str, list[Any]] = {name: [] for name in whole}
    for world in (2, 3):
        for rank in range(world):
            with playing_new_rank(rank, world):
                model = empty_with_adapters(Cut("fsdp2", (world,)))
                load(model, checkpoint_of("llama"))
            assert_equal(adapters_of(model), {n: chunk(t, world, rank) for n, t in whole.items()})
            if world == 2:
                for name, tensor in whole.items():
                    naive[name].append(made_by_each_rank(tensor, rank))
    for name, tensor in whole.items():
        if "lora_B" in name:
            assert not tensor.any()
        else:
            assert len(tensor.unique(dim=0)) == len(tensor) and tensor.std() > 0
            drawn = torch.cat(naive[name])
            assert len(drawn.unique(dim=0)) < len(drawn), "no row of the naive loader is repeated"


def test_13_an_adapters_directory_is_loaded_after_the_base(tmp_path: Path) -> None:
    base = BY_NAME["llama"].model_class.from_pretrained(checkpoint_of("llama"))
    trained = with_adapters(base)
    for number, parameter in enumerate(p for p in trained.parameters() if p.requires_grad):
        nn.init.normal_(parameter, generator=torch.Generator().manual_seed(number))
    trained.save_pretrained(tmp_path)
    expected = {n: p.detach() for n, p in parameters_of(trained).items()}
    for rank in range(2):
        with playing_new_rank(rank, 2):
            model = empty_with_adapters(TWO)
            load(model, checkpoint_of("llama"))
            load(model, tmp_path)
        got = {n: local(p) for n, p in parameters_of(model).items()}
        assert_equal(got, {n: chunk(t, 2, rank) for n, t in expected.items()})


# ---- 16


def in_lexical_order(stored: dict[str, Any], target: str) -> Any:
    """The experts in the order of their sorted names."""
    prefix = target.replace("mlp.experts.down_proj", "block_sparse_moe.experts.")
    return torch.stack(
        [stored[n] for n in sorted(stored) if n.startswith(prefix) and n.endswith("w2.weight")]
    )


def test_16_experts_are_in_numerical_order(tmp_path: Path) -> None:
    """The numbers of the 12 files have no leading zeros either, so sorting the files as text would
    give another order than sorting them by number."""
    stored, whole = stored_in(checkpoint_of("mixtral_16")), from_pretrained("mixtral_16")
    tmp_path.joinpath("config.json").write_text(
        checkpoint_of("mixtral_16").joinpath("config.json").read_text()
    )
    write_shards(tmp_path, stored, files=12)
    index = tmp_path / "model.safetensors.index.json"
    weight_map = json.loads(index.read_text())["weight_map"]
    plain = {file: file.replace("-0000", "-").replace("-000", "-") for file in weight_map.values()}
    for file, name in plain.items():
        (tmp_path / file).rename(tmp_path / name)
    index.write_text(json.dumps({"weight_map": {n: plain[f] for n, f in weight_map.items()}}))
    assert "model-2-of-12.safetensors" in plain.values()
    for rank in range(3):
        with playing_new_rank(rank, 3):
            model = shard(empty("mixtral_16"), THREE)
            load(model, tmp_path)
            assert_holds(model, whole, THREE, rank)
    target = "model.layers.1.mlp.experts.down_proj"
    assert differs(in_lexical_order(stored, target), whole.get_parameter(target).detach())
