"""`modicum.torch.accelerate.loading` restores the attributes that it patches, builds the models of
`from_pretrained` without values, and refuses what it cannot load.

Catches: an attribute or environment variable that stays changed; an unknown version of accelerate
that is accepted; a forward with parameters on meta that raises no error; values of the script that
are lost without an error, also through `.data` or in a buffer; a moved layer that gets the values
of another one.
"""

import contextlib
import copy
import gc
import json
import os
import subprocess
import sys
import weakref
from collections.abc import Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
accelerate = pytest.importorskip("accelerate")
peft = pytest.importorskip("peft")

import accelerate_rank  # noqa: E402  (after torch is known to be there)
from accelerate.state import AcceleratorState  # noqa: E402
from accelerate.utils import fsdp_utils  # noqa: E402
from accelerate_alone import build, prepare  # noqa: E402
from accelerate_rank import accelerator_of  # noqa: E402
from families import FAMILIES  # noqa: E402
from peft.tuners import tuners_utils  # noqa: E402
from peft.tuners.lora import dora  # noqa: E402
from torch import nn  # noqa: E402
from torch.distributed.fsdp import fully_shard  # noqa: E402
from torch_front import (  # noqa: E402
    BY_NAME,
    alone,
    assert_same,
    buffer_bits,
    checkpoint_of,
    from_pretrained,
    parameters_of,
    ties_of,
)

from modicum.errors import BudgetError, UsageError  # noqa: E402
from modicum.torch import LoadRules  # noqa: E402
from modicum.torch.accelerate import loading  # noqa: E402
from modicum.upstream.transformers import source_of  # noqa: E402

TOKENS = torch.arange(3, 14).reshape(1, 11)
accelerate_module = sys.modules["accelerate.accelerator"]
# The modules and classes in which `loading` could patch attributes.
WHAT_CAN_CHANGE = (
    transformers.PreTrainedModel,
    accelerate.Accelerator,
    accelerate_module,
    fsdp_utils,
    nn.Module,
    tuners_utils.BaseTuner,
    tuners_utils.BaseTunerLayer,
    dora.DoraLinearLayer,
)


@pytest.fixture(scope="module", autouse=True)
def written() -> None:
    """Writes the checkpoints before a process group is simulated."""
    for name in ("llama", "llama_tied", "qwen2", "glm4_moe"):
        from_pretrained(name)


@pytest.fixture
def one_rank() -> Iterator[None]:
    """accelerate's FSDP2 over one rank."""
    with alone(), accelerate_rank.fsdp2_on_cpus():
        yield


def attributes() -> list[dict[str, Any]]:
    """The attributes of each owner in WHAT_CAN_CHANGE and, as the last entry, the environment."""
    return [dict(vars(owner)) for owner in WHAT_CAN_CHANGE] + [dict(os.environ)]


def differences(before: list[dict[str, Any]], after: list[dict[str, Any]]) -> set[str]:
    """The names of attributes and environment variables that exist on one side only, or whose
    values differ."""
    return {
        name
        for old, new in zip(before, after, strict=True)
        for name in old.keys() | new.keys()
        if old.get(name) is not new.get(name) and old.get(name) != new.get(name)
    }


# ---- patches


# The attributes that `loading` patches, in any of the owners.
CHANGED = {
    "get_init_context",
    "_load_pretrained_model",
    "_finalize_model_loading",
    "_from_config",
    "resize_token_embeddings",
    "_init_added_embeddings_weights_with_mean",
    "_init_added_lm_head_weights_with_mean",
    "_init_added_lm_head_bias_with_mean",
    "prepare",
    "prepare_model",
    "fsdp2_prepare_model",
    "save_fsdp_model",
    "save_fsdp_optimizer",
    "load_fsdp_model",
    "load_fsdp_optimizer",
    "save_state",
    "load_state",
    "save_model",
    "_get_base_layer_device_and_dtype",
    "_move_adapter_to_device_of_base_layer",
    "inject_adapter",
    "update_layer",
}


def test_everything_is_put_back() -> None:
    """A nested context patches nothing more, and restores nothing when it ends."""
    before = attributes()
    with loading():
        assert differences(before, attributes()) == CHANGED
        inside = attributes()
        with loading(budget="1GiB"):
            assert not differences(inside, attributes())
        assert not differences(inside, attributes())
        with pytest.raises(ZeroDivisionError), loading():
            raise ZeroDivisionError
        assert not differences(inside, attributes())
    assert not differences(before, attributes())
    with pytest.raises(ZeroDivisionError), loading():
        raise ZeroDivisionError
    assert not differences(before, attributes())


def test_a_refused_load_restores_the_scripts_objects(one_rank: None) -> None:
    """If the load would exceed the budget, `prepare` fails. The accelerator's plugin and the
    optimizer's groups are then as they were before `prepare`."""
    before = attributes()
    with pytest.raises(BudgetError), loading(budget="1MiB", progress=False) as context:
        model = build()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        groups = [list(group["params"]) for group in optimizer.param_groups]
        accelerator = accelerator_of(cpu_ram_efficient_loading=True)
        try:
            accelerator.prepare(model, optimizer)
        finally:
            assert accelerator.state.fsdp_plugin.cpu_ram_efficient_loading is True
            now = [list(group["params"]) for group in optimizer.param_groups]
            ids_now = [[id(parameter) for parameter in group] for group in now]
            assert ids_now == [[id(parameter) for parameter in group] for group in groups]
    # accelerate itself sets these environment variables.
    own = {"ACCELERATE_USE_FSDP", "FSDP_CPU_RAM_EFFICIENT_LOADING", "MASTER_PORT"}
    assert differences(before, attributes()) <= own
    assert context.report is None


def test_the_innermost_context_builds(one_rank: None) -> None:
    with loading(progress=False) as outer, loading(progress=False, check=True) as inner:
        model, _ = prepare(build(), cpu_ram_efficient_loading=True)
        assert model(TOKENS).logits.isfinite().all()
    assert outer.reports == [] and inner.report is not None and inner.report.check == "ok"


def test_the_context_that_built_a_model_loads_it(one_rank: None) -> None:
    with loading(progress=False) as outer:
        model = build()
        with loading(progress=False) as inner:
            prepare(model)
    assert inner.reports == [] and len(outer.reports) == 1


def test_importing_the_front_imports_nothing_above_torch() -> None:
    code = "import sys, modicum.torch.accelerate; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not {"transformers", "accelerate", "peft"} & {*done.stdout.split()}


# ---- built models


@pytest.mark.parametrize("family", FAMILIES, ids=[family.name for family in FAMILIES])
def test_builds_as_from_pretrained_but_for_values(family: Any, tmp_path: Any) -> None:
    """Dtypes, shapes, ties and non-persistent buffers are those of `from_pretrained`, and the state
    of torch's random numbers is unchanged. The files end after their headers, so reading a tensor
    would fail."""
    whole = from_pretrained(family.name)
    directory = tmp_path / "headers"
    directory.mkdir()
    for file in checkpoint_of(family.name).iterdir():
        data = file.read_bytes()
        if file.suffix == ".safetensors":
            data = data[: 8 + int.from_bytes(data[:8], "little")]
        (directory / file.name).write_bytes(data)
    random = torch.get_rng_state()
    with contextlib.suppress(UsageError), loading():
        model = family.model_class.from_pretrained(directory)
        assert torch.equal(torch.get_rng_state(), random)
        raise UsageError  # ends the context, which otherwise refuses a model without values
    mine, theirs = parameters_of(model), parameters_of(whole)
    assert all(parameter.is_meta for parameter in mine.values())
    assert {n: (p.dtype, p.shape) for n, p in mine.items()} == {
        n: (p.dtype, p.shape) for n, p in theirs.items()
    }
    assert ties_of(mine) == ties_of(theirs)
    persistent = {name for name in whole.state_dict() if name not in theirs}
    computed = {n: b for n, b in buffer_bits(model).items() if n not in persistent}
    assert computed == {n: b for n, b in buffer_bits(whole).items() if n not in persistent}
    assert model.training == whole.training and model.dtype == whole.dtype


@pytest.mark.parametrize(
    ("arguments", "what"),
    [
        ({"ignore_mismatched_sizes": True}, "ignore_mismatched_sizes"),
        ({"key_mapping": {"^a": "b"}}, "key_mapping"),
        ({"device_map": {"": "disk"}, "offload_folder": "."}, "device_map"),
        ({"output_loading_info": True}, "output_loading_info"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_arguments_that_would_be_ignored_are_refused(arguments: dict[str, Any], what: str) -> None:
    with pytest.raises(UsageError) as refused, loading():
        build(**arguments)
    assert refused.value.got == what


def test_files_other_than_safetensors_are_refused(tmp_path: Any) -> None:
    from_pretrained("llama").config.save_pretrained(tmp_path)
    torch.save({}, tmp_path / "pytorch_model.bin")
    with pytest.raises(UsageError, match="no safetensors") as refused, loading():
        BY_NAME["llama"].model_class.from_pretrained(tmp_path)
    assert refused.value.got == "pytorch_model.bin"


def test_files_that_lack_one_of_the_index_are_refused(tmp_path: Any) -> None:
    files = {name: str(tmp_path / f"{name}.safetensors") for name in "abc"}
    weights = {name: os.path.basename(file) for name, file in files.items()}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weights}))
    with pytest.raises(UsageError, match="other files than the index") as refused:
        source_of([files["a"], files["b"]])
    assert (refused.value.expected, refused.value.got) == (
        "3 files",
        "a difference in c.safetensors",
    )


def test_a_variant_of_several_files_is_refused_as_such(tmp_path: Any) -> None:
    whole = from_pretrained("llama")
    whole.save_pretrained(tmp_path, variant="fp16", max_shard_size="20KB")
    with pytest.raises(UsageError, match="`variant` if it has several files") as refused, loading():
        BY_NAME["llama"].model_class.from_pretrained(tmp_path, variant="fp16")
    assert refused.value.got.startswith("model.fp16-00001-of-")


def test_a_given_source_replaces_that_of_from_pretrained(one_rank: None, tmp_path: Any) -> None:
    whole = from_pretrained("llama")
    zeros = copy.deepcopy(whole)
    for parameter in zeros.parameters():
        parameter.data.zero_()
    zeros.save_pretrained(tmp_path)
    with loading(checkpoint_of("llama"), progress=False):
        model, _ = prepare(BY_NAME["llama"].model_class.from_pretrained(tmp_path))
    for name, parameter in model.named_parameters():
        assert_same(parameter.full_tensor().detach(), whole.get_parameter(name).detach(), name)


# ---- unknown versions


def reading(cls: Any, path: Any, *args: Any, config: Any, **kwargs: Any) -> Any:
    """A `from_pretrained` that calls none of the methods that Modicum replaces, and so would read
    tensors by itself."""
    return cls(config)


def finishing(cls: Any, path: Any, *args: Any, config: Any, **kwargs: Any) -> Any:
    """A `from_pretrained` that passes one argument more to `_finalize_model_loading`."""
    for context in cls.get_init_context(torch.float32, False, False, None):
        with context:
            model = cls(config)
    cls._load_pretrained_model(model, None, [], None, None)
    cls._finalize_model_loading(model, None, None, None)


@pytest.mark.parametrize(
    ("owner", "name", "instead", "message"),
    [
        (accelerate_module, "fsdp2_prepare_model", None, "fsdp2_prepare_model"),
        (accelerate_module, "fsdp2_prepare_model", lambda model: None, "fsdp2_prepare_model"),
        (AcceleratorState, "is_fsdp2", None, "say how FSDP2 is run"),
        (transformers.PreTrainedModel, "get_init_context", None, "get_init_context"),
        (transformers.PreTrainedModel, "from_pretrained", classmethod(reading), "does not hold"),
        (transformers.PreTrainedModel, "from_pretrained", classmethod(finishing), "_load"),
    ],
    ids=["gone", "other arguments", "no property", "no contexts", "reads", "finishes"],
)
def test_unknown_versions_are_refused(
    owner: Any, name: str, instead: Any, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error names what differs from the tested version, and the installed version."""
    if instead is None:
        monkeypatch.delattr(owner, name)
    else:
        monkeypatch.setattr(owner, name, instead)
    before = attributes()
    with pytest.raises(UsageError, match=message) as refused, loading():
        pytest.fail("the context was entered")
    assert refused.value.category == "UNSUPPORTED"
    assert "accelerate 1." in str(refused.value) or "transformers 5." in str(refused.value)
    assert not differences(before, attributes())


def test_an_unknown_peft_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A PEFT that moves adapters to the base's device outside of `_replace_module` is refused."""
    inject = tuners_utils.BaseTuner.inject_adapter

    def moving(self: Any, model: Any, *args: Any, **kwargs: Any) -> None:
        inject(self, model, *args, **kwargs)
        model.to("meta")

    monkeypatch.setattr(tuners_utils.BaseTuner, "inject_adapter", moving)
    with pytest.raises(UsageError, match="_replace_module") as refused, loading():
        pytest.fail("the context was entered")
    assert "peft 0." in str(refused.value)


@pytest.mark.parametrize("way", ["never shards", "shards nothing"])
def test_an_accelerate_that_shards_otherwise_is_refused(
    way: str, one_rank: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If `prepare` never called `fsdp2_prepare_model`, or if `fsdp2_prepare_model` did not shard,
    the script would get a model without values."""
    if way == "never shards":
        monkeypatch.setattr(accelerate.Accelerator, "_prepare_fsdp2", lambda self, *args: args)
    else:
        monkeypatch.setattr(
            accelerate_module, "fsdp2_prepare_model", lambda accelerator, model: model
        )
    before = attributes()[:-1]  # without the environment, which accelerate changes
    with pytest.raises(UsageError, match="fsdp2_prepare_model") as refused, loading(progress=False):
        prepare(build())
    assert refused.value.category == "UNSUPPORTED"
    assert not differences(before, attributes()[:-1])


# ---- no FSDP2


def test_no_fsdp2_is_refused_before_anything_is_built() -> None:
    """Without an FSDP plugin accelerate uses DDP for several CPU ranks."""
    with alone(), accelerate_rank.fsdp2_on_cpus():
        accelerate.Accelerator(cpu=True)
        with pytest.raises(UsageError, match="on CPUs accelerate takes DDP") as refused, loading():
            build()
    assert refused.value.got == "distributed_type MULTI_CPU"


def test_a_use_of_empty_values_without_fsdp2_names_fsdp2() -> None:
    """No call would give this model its values, so the advice to call prepare first would fail."""
    with alone(), accelerate_rank.fsdp2_on_cpus():
        with pytest.raises(UsageError, match="on CPUs accelerate takes DDP"), loading():
            model = build()
            accelerate.Accelerator(cpu=True)
            model.to("cpu")


def test_no_fsdp2_is_refused_at_prepare() -> None:
    with alone(), accelerate_rank.fsdp2_on_cpus():
        with pytest.raises(UsageError) as refused, loading():
            model = build()
            accelerate.Accelerator(cpu=True).prepare(model)
    assert refused.value.got == "distributed_type MULTI_CPU"


def test_fsdp1_is_refused() -> None:
    with alone(), accelerate_rank.fsdp2_on_cpus():
        plugin = accelerate.FullyShardedDataParallelPlugin(fsdp_version=1)
        accelerate.Accelerator(fsdp_plugin=plugin)
        with pytest.raises(UsageError) as refused, loading():
            build()
    assert refused.value.got == "distributed_type FSDP with fsdp_version=1"


def test_one_process_is_refused() -> None:
    from accelerate.state import GradientState

    try:
        with pytest.raises(UsageError) as refused, loading():
            model = build()
            accelerate.Accelerator(cpu=True).prepare(model)
    finally:
        AcceleratorState._reset_state(True)
        GradientState._reset_state()
    assert refused.value.got == "distributed_type NO"


# ---- missing values


def test_a_forward_without_values_is_refused() -> None:
    with pytest.raises(UsageError, match="a forward") as refused, loading():
        build()(TOKENS)
    assert refused.value.category == "USAGE"


def test_a_forward_after_the_context_is_refused() -> None:
    with contextlib.suppress(ZeroDivisionError), loading():
        model = build()
        raise ZeroDivisionError  # ends the context, which otherwise refuses a model without values
    with pytest.raises(UsageError, match="a forward"):
        model(TOKENS)


def test_a_forward_through_adapters_is_refused() -> None:
    """PEFT calls the `forward` of the wrapped model directly, so hooks on that model do not run."""
    with pytest.raises(UsageError, match="a forward"), loading():
        peft.get_peft_model(build(), peft.LoraConfig(target_modules=["q_proj"]))(TOKENS)


def test_a_model_without_prepare_is_refused_at_the_end(one_rank: None) -> None:
    with pytest.raises(UsageError, match="has no values yet.*LlamaForCausalLM"), loading():
        model = build()
    # After the context nothing loads the model, and torch refuses its meta tensors.
    with pytest.raises((NotImplementedError, RuntimeError)):
        model, _ = prepare(model, cpu_ram_efficient_loading=True)
        model(TOKENS)


def test_a_deleted_model_is_ignored() -> None:
    """The context keeps no reference to the model. A model that the script has deleted need not be
    prepared."""
    with loading() as active:
        model = weakref.ref(build())
        gc.collect()
        assert model() is None
    assert active.report is None


def test_a_model_built_outside_is_refused(one_rank: None) -> None:
    model = build()
    with pytest.raises(UsageError, match="prepare it outside"), loading():
        prepare(model)


def test_a_state_dict_that_would_be_lost_is_refused() -> None:
    whole = from_pretrained("llama").state_dict()
    with pytest.raises(UsageError, match="load_state_dict") as refused, loading():
        build().load_state_dict(whole)
    assert refused.value.tensor == "model.embed_tokens.weight"


def test_writing_to_an_empty_parameter_is_refused(one_rank: None) -> None:
    with pytest.raises(UsageError, match="written to") as refused, loading(progress=False):
        model = build()
        nn.init.zeros_(model.lm_head.weight)
        prepare(model)
    assert refused.value.tensor == "lm_head.weight"


# Writes that leave the parameter's own version counter unchanged.
THROUGH_DATA: dict[str, Any] = {
    "in place": lambda model: model.lm_head.weight.data.zero_(),
    "rows": lambda model: model.lm_head.weight.data[-2:].copy_(torch.ones(2, 1)),
    "assigned": lambda model: setattr(
        model.lm_head.weight, "data", model.get_input_embeddings().weight.data.clone()
    ),
    "merged": lambda model: peft.get_peft_model(
        model, peft.LoraConfig(target_modules=["lm_head"], init_lora_weights=False)
    ).merge_and_unload(),
}


@pytest.mark.parametrize("write", THROUGH_DATA)
def test_writes_through_data_are_refused(one_rank: None, write: str) -> None:
    """`.data` is torch's own again when every model has its values."""
    with pytest.raises(UsageError, match="written to") as refused, loading(progress=False):
        model = build()
        THROUGH_DATA[write](model)
        prepare(model)
    assert refused.value.tensor == "lm_head.weight"
    AcceleratorState._reset_state(True)
    with loading(progress=False):
        model = build()
        assert "data" in vars(torch.Tensor)
        prepare(model)
        assert "data" not in vars(torch.Tensor)


def test_conversions_through_data_are_no_writes(one_rank: None) -> None:
    """Casts, ties, and a resized embedding assign to `.data`, too."""
    whole = from_pretrained("llama_tied")
    with loading(progress=False):
        model = build("llama_tied", dtype=torch.bfloat16)
        model.resize_token_embeddings(model.config.vocab_size + 2)
        for parameter in model.parameters():
            parameter.data = parameter.data.to(torch.float32)
        model.tie_weights()
        model, _ = prepare(model)
    stored = whole.lm_head.weight.detach().bfloat16().float()
    assert_same(model.lm_head.weight.full_tensor().detach()[:-2], stored, "head")


def test_writing_to_a_resized_embedding_is_refused(one_rank: None) -> None:
    """The new rows are made by the load, which would overwrite the script's."""
    with pytest.raises(UsageError, match="written to") as refused, loading(progress=False):
        model = build()
        model.resize_token_embeddings(model.config.vocab_size + 2, mean_resizing=False)
        with torch.no_grad():
            model.get_input_embeddings().weight[-2:] = 7.0
        prepare(model)
    assert refused.value.tensor == "model.embed_tokens.weight"


def test_a_copy_of_a_written_model_is_refused(one_rank: None) -> None:
    with pytest.raises(UsageError, match="written to") as refused, loading(progress=False):
        model = build()
        nn.init.zeros_(model.lm_head.weight)
        prepare(copy.deepcopy(model))
    assert refused.value.tensor == "lm_head.weight"


MOVES: dict[str, Any] = {
    "swapped": lambda layers: [layers[1], layers[0]],
    "without the first": lambda layers: [layers[1]],
    "twice": lambda layers: [layers[1], layers[1]],
    "copied": lambda layers: [layers[0], copy.deepcopy(layers[0])],
}


@pytest.mark.parametrize("move", MOVES)
@pytest.mark.parametrize("wrapped", (False, True))
def test_moved_layers_are_refused(one_rank: None, move: str, wrapped: bool) -> None:
    with (
        pytest.raises(UsageError, match="moved or copied") as refused,
        loading(progress=False, rules=LoadRules(unexpected="ignore")),
    ):
        model = build()
        model.model.layers = nn.ModuleList(MOVES[move](model.model.layers))
        if wrapped:
            model = peft.get_peft_model(model, peft.LoraConfig(target_modules=["q_proj"]))
        prepare(model)
    at = 1 if move == "copied" else 0
    assert refused.value.expected.startswith(f"model.layers.{at}.self_attn.q_proj.")
    assert move == "copied" or refused.value.got.startswith("model.layers.1.self_attn.q_proj.")


def test_writing_to_a_persistent_buffer_is_refused(one_rank: None) -> None:
    """Before the load the buffer is zero. A cast does not count as a write."""
    name = "model.layers.1.mlp.gate.e_score_correction_bias"
    whole = from_pretrained("glm4_moe")
    with loading(progress=False):
        model, _ = prepare(build("glm4_moe").to(torch.float64).to(torch.float32))
    assert_same(model.get_buffer(name), whole.get_buffer(name), name)
    AcceleratorState._reset_state(True)
    with pytest.raises(UsageError, match="overwritten") as refused, loading(progress=False):
        model = build("glm4_moe")
        model.get_buffer(name).fill_(9.0)
        prepare(model)
    assert refused.value.tensor == name


def test_a_new_head_that_the_source_overwrites_is_refused(one_rank: None) -> None:
    with (
        pytest.raises(UsageError, match="overwritten by the source") as refused,
        loading(progress=False),
    ):
        model = build()
        model.lm_head = nn.Linear(model.config.hidden_size, model.config.vocab_size, bias=False)
        prepare(model)
    assert refused.value.tensor == "lm_head.weight"


def test_adapters_without_values_are_refused(one_rank: None) -> None:
    """With `low_cpu_mem_usage` PEFT makes new adapters on meta."""
    config = peft.LoraConfig(target_modules=["q_proj"])
    with pytest.raises(UsageError, match="base's values") as refused, loading(progress=False):
        prepare(peft.get_peft_model(build(), config, low_cpu_mem_usage=True))
    assert "lora_A" in refused.value.tensor


# ---- heads


def test_a_head_that_the_checkpoint_lacks_must_be_named_in_missing(one_rank: None) -> None:
    """`from_pretrained` would only warn, and each rank would draw a head of its own."""
    kind = transformers.LlamaForSequenceClassification
    lists: dict[str, Any] = {"unexpected": ["^lm_head"]}
    with (
        pytest.raises(UsageError, match="score.weight"),
        loading(progress=False, rules=LoadRules(**lists)),
    ):
        prepare(kind.from_pretrained(checkpoint_of("llama")))
    lists |= {"missing": ["^score"]}
    with loading(progress=False, rules=LoadRules(**lists)):
        model, _ = prepare(kind.from_pretrained(checkpoint_of("llama")))
        assert model.score.weight.full_tensor().abs().sum() > 0


def test_a_head_of_the_script_keeps_its_values(one_rank: None) -> None:
    """The script's module has a body from `from_pretrained` and a new head. The head keeps the
    script's values, and the body gets those of the file."""

    class WithValue(nn.Module):
        def __init__(self, body: Any) -> None:
            super().__init__()
            self.body = body
            self.value = nn.Linear(body.config.hidden_size, 1)

    whole = from_pretrained("llama")
    with loading(progress=False, rules=LoadRules(unexpected=["^lm_head"])):
        torch.manual_seed(3)
        model = WithValue(build())
        drawn = model.value.weight.detach().clone()
        model, _ = prepare(model, auto_wrap_policy="no_wrap")
    assert torch.equal(model.value.weight.full_tensor(), drawn)
    for name, parameter in model.body.named_parameters():
        assert_same(parameter.full_tensor().detach(), whole.get_parameter(name).detach(), name)


# ---- trained adapters


@pytest.fixture(scope="module")
def trained(written: None, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A directory of adapters, and the model from which they were saved."""
    torch.manual_seed(7)
    wrapped = peft.get_peft_model(
        copy.deepcopy(from_pretrained("llama")), peft.LoraConfig(target_modules=["q_proj"])
    )
    for name, parameter in wrapped.named_parameters():
        if "lora_" in name:
            nn.init.normal_(parameter)
    directory = tmp_path_factory.mktemp("adapters")
    wrapped.save_pretrained(directory)
    return directory, wrapped


def test_trained_adapters_keep_their_values(trained: Any, one_rank: None) -> None:
    directory, whole = trained
    with loading(progress=False):
        model = peft.PeftModel.from_pretrained(build(), directory, is_trainable=True)
        model, _ = prepare(model, auto_wrap_policy="no_wrap")
    for name, parameter in model.named_parameters():
        assert_same(parameter.full_tensor().detach(), whole.get_parameter(name).detach(), name)


ADAPTERS: dict[str, dict[str, Any]] = {
    "magnitudes": {"target_modules": ["q_proj", "down_proj"], "use_dora": True},
    "tokens": {"target_modules": ["q_proj"], "trainable_token_indices": [1, 5, 6]},
}


@pytest.mark.parametrize("sent", (False, True))
@pytest.mark.parametrize("kind", ADAPTERS)
def test_new_adapters_begin_as_the_base(one_rank: None, kind: str, sent: bool) -> None:
    """DoRA's magnitudes begin as norms of the base's weights, and trainable tokens begin as rows of
    the base's embedding. The model has two adapters of the kind."""
    torch.manual_seed(3)
    expected = with_two(copy.deepcopy(from_pretrained("llama")), ADAPTERS[kind])
    with loading(progress=False):
        model = build()
        torch.manual_seed(3)
        model = with_two(model, ADAPTERS[kind])
        model, _ = prepare(model, auto_wrap_policy="no_wrap", cpu_ram_efficient_loading=sent)
    assert_same_tensors(model, expected)


def with_two(model: Any, config: dict[str, Any]) -> Any:
    """The model with two adapters, of which the second has rank 3."""
    model = peft.get_peft_model(model, peft.LoraConfig(**config))
    model.add_adapter("other", peft.LoraConfig(**(config | {"r": 3})))
    return model


OWN_UNIT = {"transformer_cls_names_to_wrap": ["LlamaDecoderLayer", "Embedding"]}


@pytest.mark.parametrize("sent", (False, True))
@pytest.mark.parametrize(
    ("name", "how", "why"),
    [
        pytest.param("llama", OWN_UNIT, "a unit of its own: leave its class out", id="own unit"),
        pytest.param("llama_tied", {}, "are tied: call fully_shard", id="tied"),
        pytest.param("llama_tied", {"auto_wrap_policy": "no_wrap"}, "are tied", id="tied, whole"),
    ],
)
def test_tokens_that_accelerate_cannot_shard_are_refused(
    one_rank: None, name: str, how: dict[str, Any], why: str, sent: bool
) -> None:
    """Without Modicum `prepare` fails on these models with an error that does not name the
    tokens."""
    config = peft.LoraConfig(**ADAPTERS["tokens"])
    whole = peft.get_peft_model(copy.deepcopy(from_pretrained(name)), config)
    with pytest.raises((AttributeError, RuntimeError, TypeError)):
        prepare(whole, cpu_ram_efficient_loading=sent, **how)
    AcceleratorState._reset_state(True)
    with pytest.raises(UsageError, match=f"trainable_token_indices.*{why}") as refused, loading():
        prepare(peft.get_peft_model(build(name), config), cpu_ram_efficient_loading=sent, **how)
    assert refused.value.category == "UNSUPPORTED" and refused.value.__cause__ is not None
    assert "trainable_tokens_" in refused.value.tensor


def test_other_errors_of_accelerate_keep_their_text(one_rank: None) -> None:
    config = peft.LoraConfig(**ADAPTERS["tokens"])
    with pytest.raises(ValueError, match="Could not find.*Unknown"), loading():
        model = peft.get_peft_model(build(), config)
        prepare(model, transformer_cls_names_to_wrap=["Unknown"])


def test_tied_tokens_are_loaded_if_the_script_shards(one_rank: None) -> None:
    config = peft.LoraConfig(**ADAPTERS["tokens"])
    torch.manual_seed(3)
    expected = peft.get_peft_model(copy.deepcopy(from_pretrained("llama_tied")), config)
    with loading(progress=False):
        model = build("llama_tied")
        torch.manual_seed(3)
        model = peft.get_peft_model(model, config)
        for layer in model.get_base_model().model.layers:
            fully_shard(layer)
        model, _ = prepare(fully_shard(model), auto_wrap_policy="no_wrap")
    assert_same_tensors(model, expected)
    model(input_ids=TOKENS, labels=TOKENS).loss.backward()


@pytest.mark.parametrize("low_cpu_mem_usage", (False, True))
@pytest.mark.parametrize("kind", ADAPTERS)
def test_trained_magnitudes_and_tokens_keep_their_values(
    one_rank: None, tmp_path: Any, kind: str, low_cpu_mem_usage: bool
) -> None:
    """With `low_cpu_mem_usage` PEFT builds the adapters on meta."""
    config = peft.LoraConfig(**ADAPTERS[kind])
    expected = peft.get_peft_model(copy.deepcopy(from_pretrained("llama")), config)
    for number, parameter in enumerate(p for p in expected.parameters() if p.requires_grad):
        nn.init.normal_(parameter, generator=torch.Generator().manual_seed(number))
    expected.save_pretrained(tmp_path)
    how = {"is_trainable": True, "low_cpu_mem_usage": low_cpu_mem_usage}
    with loading(progress=False):
        model = peft.PeftModel.from_pretrained(build(), tmp_path, **how)
        model, _ = prepare(model, auto_wrap_policy="no_wrap")
    assert_same_tensors(model, expected)


def assert_same_tensors(model: Any, expected: Any) -> None:
    theirs = dict(expected.named_parameters()) | dict(expected.named_buffers())
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        whole = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
        assert_same(whole.detach(), theirs[name].detach(), name)


@pytest.mark.parametrize(
    "init", ("pissa", "pissa_niter_4", "OLoRA", "corda", "loftq", "mica", "lora_ga")
)
def test_initialisations_from_the_base_are_refused(init: str) -> None:
    """The error is raised before PEFT computes anything, so the test needs neither the data nor the
    packages, such as scipy, of these initialisations."""
    config = peft.LoraConfig(target_modules=["q_proj"])
    config.init_lora_weights = init
    with pytest.raises(UsageError, match="needs the base's values") as refused, loading():
        peft.get_peft_model(build(), config)
    assert init in refused.value.got


def test_several_models_in_one_are_refused(one_rank: None) -> None:
    """An actor and a critic in one module are refused. `fill` loads each of them alone."""
    with loading(progress=False) as context:
        actor, critic = build(), build("qwen2")
        with pytest.raises(UsageError, match="several models inside.*expected one") as refused:
            prepare(nn.ModuleList([actor, critic]))
        assert refused.value.category == "UNSUPPORTED"
        assert "LlamaForCausalLM and Qwen2ForCausalLM" in refused.value.got
        assert all(p.is_meta for p in [*actor.parameters(), *critic.parameters()])
        context.fill(actor)
        context.fill(critic)
    assert_same_tensors(actor, from_pretrained("llama"))


def test_a_directory_of_adapters_is_refused(trained: Any) -> None:
    """transformers would load the adapters while it builds the model."""
    directory, _ = trained
    config = peft.PeftConfig.from_pretrained(directory)
    config.base_model_name_or_path = str(checkpoint_of("llama"))
    config.save_pretrained(directory)
    with pytest.raises(UsageError, match="PeftModel.from_pretrained"), loading():
        BY_NAME["llama"].model_class.from_pretrained(directory)
