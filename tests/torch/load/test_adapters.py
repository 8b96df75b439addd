"""Models with several adapters of PEFT, and adapters whose first values are computed from the base
model: on every rank they have the bits that PEFT gives them after `from_pretrained`.

The oracle is PEFT in one process. Catches: magnitudes (of DoRA) that are not the norms of the
loaded weight, by any of the loads; trainable tokens that begin as other rows; an adapter's file
that is loaded into another adapter; an initialisation that needs the base's values and gets other
ones; trainable tokens that no forward can use.
"""

from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")

import torch.distributed.checkpoint as dcp  # noqa: E402  (torch is there)
from sharding import Cut, assert_same, playing_new_rank  # noqa: E402
from torch import nn  # noqa: E402
from torch.distributed.device_mesh import init_device_mesh  # noqa: E402
from torch.distributed.fsdp import fully_shard  # noqa: E402
from torch.distributed.tensor import Replicate  # noqa: E402
from torch.distributed.tensor.parallel import RowwiseParallel, parallelize_module  # noqa: E402
from torch_front import (  # noqa: E402
    BY_NAME,
    checkpoint_of,
    chunk,
    config_of,
    load,
    local,
    parameters_of,
    shard,
    stored_in,
)

import modicum.torch  # noqa: E402
from modicum.errors import UsageError  # noqa: E402
from modicum.torch import LoadRules  # noqa: E402
from modicum.torch.dcp import ModicumReader  # noqa: E402

LORA = {"r": 2, "target_modules": ["q_proj", "down_proj"]}
TOKENS = [4, 5, 1]


@pytest.fixture(scope="module", autouse=True)
def written() -> None:
    """Writes the checkpoints before a process group is simulated."""
    for name in ("llama", "llama_tied", "gpt2"):
        checkpoint_of(name)


def empty(name: str, *configs: dict[str, Any], dtype: Any = torch.float32, cut: Any = None) -> Any:
    """A model on meta with an adapter "default", and one "other" if there is a second
    configuration."""
    with modicum.torch.empty_parameters():
        model = BY_NAME[name].model_class._from_config(config_of(name), dtype=dtype)
        model = with_adapters(model, *configs)
    return model if cut is None else shard(model, cut)


def with_adapters(model: Any, config: dict[str, Any], *more: dict[str, Any]) -> Any:
    model = peft.get_peft_model(model, peft.LoraConfig(**config))
    for other in more:
        model.add_adapter("other", peft.LoraConfig(**other))
    return model


def by_peft(name: str, *configs: dict[str, Any], dtype: Any = torch.float32) -> Any:
    """The model of `from_pretrained` with adapters that PEFT has initialised."""
    base = BY_NAME[name].model_class.from_pretrained(checkpoint_of(name), dtype=dtype)
    return with_adapters(base, *configs)


def assert_loaded(model: Any, whole: Any, pattern: str, world: int, rank: int) -> None:
    """Asserts that the parameters of the base, and those of the adapters whose names contain
    `pattern`, are this rank's shards of the parameters of `whole`."""
    theirs = parameters_of(whole)
    compared = 0
    for name, parameter in parameters_of(model).items():
        assert not parameter.is_meta, name
        if "lora_" in name and pattern not in name:
            continue
        compared += pattern in name
        assert_same(local(parameter), chunk(theirs[name].detach(), world, rank), name)
    assert compared > 0


# ---- DoRA


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
@pytest.mark.parametrize("world", (1, 2, 3))
def test_magnitudes_are_the_norms_of_the_loaded_rows(world: int, dtype: Any) -> None:
    config = LORA | {"use_dora": True}
    whole = by_peft("llama", config, dtype=dtype)
    for rank in range(world):
        with playing_new_rank(rank, world):
            model = empty("llama", config, dtype=dtype, cut=Cut("fsdp2", (world,)))
            load(model, checkpoint_of("llama"))
            assert_loaded(model, whole, "lora_magnitude", world, rank)


@pytest.mark.parametrize("world", (1, 2))
def test_the_drop_in_computes_magnitudes(world: int) -> None:
    config = LORA | {"use_dora": True}
    whole = by_peft("llama", config)
    for rank in range(world):
        with playing_new_rank(rank, world):
            model = empty("llama", config, cut=Cut("fsdp2", (world,)))
            path = checkpoint_of("llama")
            modicum.torch.fsdp2_load_full_state_dict(model, path, progress=False)
            assert_loaded(model, whole, "lora_magnitude", world, rank)


def test_dcps_reader_refuses_magnitudes_or_keeps_them() -> None:
    """The reader fills a state dict, which may have other memory than the model."""
    model = by_peft("llama", LORA | {"use_dora": True})
    before = {n: t.clone() for n, t in model.state_dict().items() if "magnitude" in n}
    with pytest.raises(UsageError, match="UNSUPPORTED: .*'lora_magnitude': 'model'") as refused:
        ModicumReader(checkpoint_of("llama"), model)
    assert "lora_magnitude_vector" in refused.value.tensor
    rule = {"lora_magnitude": "model"}
    reader = ModicumReader(checkpoint_of("llama"), model, rules=LoadRules(missing=rule))
    state = model.state_dict()
    planner = dcp.DefaultLoadPlanner(allow_partial_load=True)
    dcp.load(state, storage_reader=reader, planner=planner, no_dist=True)
    assert before and all(torch.equal(state[name], value) for name, value in before.items())


def test_a_rule_for_magnitudes_takes_precedence() -> None:
    model = empty("llama", LORA | {"use_dora": True})
    load(model, checkpoint_of("llama"), rules=LoadRules(missing={"lora_magnitude": "ones"}))
    for name, parameter in model.named_parameters():
        assert "lora_magnitude" not in name or bool((parameter == 1).all()), name


def test_norms_of_rows_that_a_rank_lacks_are_refused() -> None:
    """FSDP2 shards the weight but not its magnitudes, so that a rank would need the norms of rows
    that it does not have."""
    with playing_new_rank(0, 2), pytest.raises(UsageError, match="other rows of a w") as refused:
        model = empty("llama", LORA | {"use_dora": True})
        magnitudes = {p for n, p in model.named_parameters() if "lora_magnitude" in n}
        fully_shard(model, mesh=init_device_mesh("cpu", (2,)), ignored_params=magnitudes)
        load(model, checkpoint_of("llama"))
    assert "lora_magnitude_vector" in refused.value.tensor
    assert all(parameter.is_meta for parameter in model.parameters())


@pytest.mark.parametrize("how", [False, "orthogonal"])
def test_norms_of_an_adapter_that_is_not_0_at_first_are_refused(how: Any) -> None:
    """PEFT's magnitude would then be the norm of the weight and the adapter's part together. The
    rule that the error names is accepted."""
    config = LORA | {"use_dora": True, "init_lora_weights": how}
    model = empty("llama", config)
    with pytest.raises(UsageError, match=f"B = 0.*init_lora_weights={how!r}") as refused:
        load(model, checkpoint_of("llama"))
    assert "lora_magnitude_vector" in refused.value.tensor
    rules = {"lora_magnitude": "ones", "lora_[AB]": "ones"}
    load(model, checkpoint_of("llama"), rules=LoadRules(missing=rules))
    with playing_new_rank(0, 2), pytest.raises(UsageError, match="B = 0"):
        load(empty("llama", config, cut=Cut("fsdp2", (2,))), checkpoint_of("llama"))


def test_norms_of_columns_are_refused() -> None:
    config = {"r": 2, "target_modules": ["c_attn"], "use_dora": True, "fan_in_fan_out": True}
    with playing_new_rank(0, 2), pytest.raises(UsageError, match="no rule") as refused:
        load(empty("gpt2", config, cut=Cut("fsdp2", (2,))), checkpoint_of("gpt2"))
    assert "lora_magnitude_vector" in refused.value.tensor


def test_a_trained_adapter_has_its_own_magnitudes(tmp_path: Path) -> None:
    config = LORA | {"use_dora": True}
    whole = by_peft("llama", config)
    fill(whole)
    whole.save_pretrained(tmp_path)
    with playing_new_rank(1, 2):
        model = empty("llama", config, cut=Cut("fsdp2", (2,)))
        load(model, checkpoint_of("llama"))
        load(model, tmp_path)
        assert_loaded(model, whole, "lora_", 2, 1)


# ---- trainable tokens


@pytest.mark.parametrize("name", ("llama", "llama_tied"))
@pytest.mark.parametrize("world", (1, 2))
def test_tokens_begin_as_the_rows_of_the_embedding(name: str, world: int) -> None:
    config = LORA | {"trainable_token_indices": TOKENS}
    whole = by_peft(name, config)
    # PEFT keeps the original rows of the tokens in buffers.
    originals = {n: b for n, b in whole.named_buffers() if "trainable_tokens_original" in n}
    assert originals
    for rank in range(world):
        with playing_new_rank(rank, world):
            model = empty(name, config, cut=Cut("fsdp2", (world,)))
            load(model, checkpoint_of(name))
            assert_loaded(model, whole, "trainable_tokens_delta", world, rank)
            buffers = dict(model.named_buffers())
            for buffer_name, value in originals.items():
                assert_same(buffers[buffer_name], value, buffer_name)


@pytest.mark.parametrize("layout", ("unit", "tp", "tp and fsdp2"))
def test_tokens_whose_embedding_no_forward_can_read_are_refused(layout: str) -> None:
    """Without Modicum the first forward fails, with torch's error about a mix of tensors and
    DTensors."""
    config = LORA | {"trainable_token_indices": TOKENS}
    of_unit = "without calling the embedding.*on a module around"
    reason = of_unit if layout == "unit" else "tensor parallelism.*leaves whole"
    message = f"trainable_token_indices.*{reason}"
    with playing_new_rank(0, 2), pytest.raises(UsageError, match=message) as refused:
        model = empty("llama", config)
        mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
        embedding = next(m for m in model.modules() if isinstance(m, nn.Embedding))
        if layout == "unit":
            fully_shard(embedding, mesh=mesh["tp"])
            fully_shard(model, mesh=mesh["tp"])
        else:
            style = RowwiseParallel(input_layouts=Replicate())
            parallelize_module(embedding, mesh["tp"], style)
        if layout == "tp and fsdp2":
            fully_shard(model, mesh=mesh["dp"])
        load(model, checkpoint_of("llama"))
    assert refused.value.category == "UNSUPPORTED"
    assert "trainable_tokens_" in refused.value.tensor
    base = (p for n, p in model.named_parameters() if "lora_" not in n)
    assert all(parameter.is_meta for parameter in base)


def test_trained_tokens_are_loaded_after_the_base(tmp_path: Path) -> None:
    config = LORA | {"trainable_token_indices": TOKENS}
    whole = by_peft("llama", config)
    fill(whole)
    whole.save_pretrained(tmp_path)
    with playing_new_rank(1, 2):
        model = empty("llama", config, cut=Cut("fsdp2", (2,)))
        load(model, checkpoint_of("llama"))
        load(model, tmp_path)
        assert_loaded(model, whole, "trainable_tokens_delta", 2, 1)


def test_a_save_has_the_values_of_training(tmp_path: Path) -> None:
    """The file has the trained values of the adapters, and the base's tensors unchanged."""
    model = empty("llama", LORA | {"use_dora": True, "trainable_token_indices": TOKENS})
    load(model, checkpoint_of("llama"))
    fill(model)
    saved = modicum.torch.save(
        model, tmp_path / "steps", step=1, options=modicum.torch.SaveOptions(adapters=False)
    )
    stored = stored_in(Path(saved.path))
    base = stored_in(checkpoint_of("llama"))
    assert all(torch.equal(stored[name], tensor) for name, tensor in base.items())
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            assert_same(stored[name], parameter.detach(), name)


# ---- several adapters


def fill(model: Any) -> None:
    """Overwrites all trained parameters, as training would."""
    for number, parameter in enumerate(p for p in model.parameters() if p.requires_grad):
        nn.init.normal_(parameter, generator=torch.Generator().manual_seed(number))


def test_an_adapters_file_is_loaded_into_the_adapter_that_is_named(tmp_path: Path) -> None:
    one, two = LORA, LORA | {"r": 3}
    whole = by_peft("llama", one, two)
    for adapter in ("default", "other"):
        whole.set_adapter(adapter)
        fill(whole)
    whole.save_pretrained(tmp_path)
    for rank in range(2):
        with playing_new_rank(rank, 2):
            model = empty("llama", one, two, cut=Cut("fsdp2", (2,)))
            load(model, checkpoint_of("llama"))
            load(model, tmp_path, rules=LoadRules(adapter="default"))
            load(model, tmp_path / "other", rules=LoadRules(adapter="other"))
            assert_loaded(model, whole, "lora_", 2, rank)


def test_a_load_into_one_of_several_adapters_must_name_it(tmp_path: Path) -> None:
    whole = by_peft("llama", LORA)
    whole.save_pretrained(tmp_path)
    model = empty("llama", LORA, LORA)
    load(model, checkpoint_of("llama"))
    with pytest.raises(UsageError, match="several adapters.*pass `adapter`") as refused:
        load(model, tmp_path)
    assert "default" in str(refused.value) and "other" in str(refused.value)
    with pytest.raises(UsageError, match="no adapter 'third'"):
        load(model, tmp_path, rules=LoadRules(adapter="third"))


# ---- initialisations that need the base's values


@pytest.mark.parametrize(
    "init", ("pissa", "pissa_niter_4", "olora", "mica", "lora_ga", "orthogonal")
)
def test_other_initialisations_from_the_base_are_refused(init: str) -> None:
    with playing_new_rank(0, 2), pytest.raises(UsageError, match="init_lora_weights") as refused:
        model = empty("llama", LORA | {"init_lora_weights": init}, cut=Cut("fsdp2", (2,)))
        load(model, checkpoint_of("llama"))
    assert "lora_" in refused.value.tensor and init in str(refused.value)
