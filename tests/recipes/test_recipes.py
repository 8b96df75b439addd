"""`modicum.recipes` on models of transformers: ties, missing and unexpected tensors, dtypes, FP8,
sharded models, and the command line.

Catches: a stored tensor that is dropped without a comparison; only one name of a tie that can be
its source; a regular expression that matches nothing and is accepted; conversions selected by the
class that FSDP2 makes; other quantizations that count as FP8.
"""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from program import failure, run, run_json

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

import numpy as np  # noqa: E402
from recipe_oracle import evaluate, upstream  # noqa: E402
from safetensors.torch import save_file  # noqa: E402
from transformers.conversion_mapping import get_model_conversion_mapping  # noqa: E402
from transformers.modeling_utils import LoadStateDictConfig  # noqa: E402
from transformers.quantizers.auto import AutoHfQuantizer  # noqa: E402

import modicum as front  # noqa: E402
import modicum.torch  # noqa: E402
from modicum import recipes  # noqa: E402
from modicum.recipes.__main__ import main  # noqa: E402

SMALL = {
    "hidden_size": 24,
    "intermediate_size": 20,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 50,
}
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


def on_meta(config: Any, name: str, dtype: Any = None) -> Any:
    """A model of this class of transformers, on meta."""
    with torch.device("meta"):
        return getattr(transformers, name)._from_config(config, dtype=dtype or torch.float32)


def llama(tied: bool = False, dtype: Any = None) -> Any:
    config = transformers.LlamaConfig(**SMALL, tie_word_embeddings=tied)
    return on_meta(config, "LlamaForCausalLM", dtype)


def mixtral() -> Any:
    config = transformers.MixtralConfig(**SMALL, num_local_experts=11)
    return on_meta(config, "MixtralForCausalLM")


def stored_of(model: Any) -> dict[str, Any]:
    """(dtype, shape) of each tensor of a checkpoint saved from this model."""
    return {name: (str(t.dtype), tuple(t.shape)) for name, t in model.state_dict().items()}


def per_expert(model: Any) -> dict[str, Any]:
    """(dtype, shape) of each tensor of a mixtral as stored on the hub: a tensor for each expert and
    matrix."""
    stored: dict[str, Any] = {}
    for name, (dtype, shape) in stored_of(model).items():
        block = name.replace(".mlp.", ".block_sparse_moe.").rpartition(".")[0]
        for expert in range(shape[0] if ".experts." in name else 0):
            if name.endswith("gate_up_proj"):
                half = (dtype, (shape[1] // 2, shape[2]))
                stored |= {f"{block}.{expert}.w1.weight": half, f"{block}.{expert}.w3.weight": half}
            else:
                stored[f"{block}.{expert}.w2.weight"] = (dtype, shape[1:])
        if ".experts." not in name:
            stored[name.replace(".mlp.", ".block_sparse_moe.")] = (dtype, shape)
    return stored


def leaf(name: str) -> dict[str, Any]:
    return {"op": "stored", "name": name}


# ---- the form of a recipe


def test_a_recipe_names_every_expert() -> None:
    recipe = recipes.recipe_for(mixtral(), per_expert(mixtral()))
    experts = "model.layers.1.block_sparse_moe.experts"
    sides = [[leaf(f"{experts}.{i}.{w}.weight") for i in range(11)] for w in ("w1", "w3")]
    stacks = [{"op": "stack", "dim": 0, "in": side} for side in sides]
    made = recipe.targets["model.layers.1.mlp.experts.gate_up_proj"]
    assert made == {"op": "cat", "dim": 1, "in": stacks}
    assert list(recipe.targets) == list(mixtral().state_dict())
    assert json.loads(recipe.text()) == {"targets": recipe.targets, "unused": []}
    assert ", " not in recipe.text()


def test_importing_needs_neither_torch_nor_transformers(tmp_path: Path) -> None:
    script = "import sys, modicum.recipes; print(*sorted(sys.modules))"
    command = [sys.executable, "-c", script]
    result = subprocess.run(command, cwd=tmp_path, check=True, capture_output=True, text=True)
    loaded = {name.partition(".")[0] for name in result.stdout.split()}
    assert not loaded & {"torch", "numpy", "transformers"}


# ---- ties


def test_a_tied_head_is_an_alias() -> None:
    model = llama(tied=True)
    stored = stored_of(model)
    del stored[HEAD]
    targets = recipes.recipe_for(model, stored).targets
    assert targets[HEAD] == {"op": "alias", "of": EMBEDDING}


def test_if_only_the_head_is_stored_it_is_the_source() -> None:
    model = llama(tied=True)
    stored = stored_of(model)
    del stored[EMBEDDING]
    targets = recipes.recipe_for(model, stored).targets
    assert targets[HEAD] == leaf(HEAD)
    assert targets[EMBEDDING] == {"op": "alias", "of": HEAD}


def test_both_names_of_a_tie_are_compared_or_untied() -> None:
    model = llama(tied=True)
    stored = stored_of(model)
    targets = recipes.recipe_for(model, stored, dtype="bfloat16").targets
    assert targets[EMBEDDING] == leaf(EMBEDDING) | {"dtype": "bfloat16"}
    assert targets[HEAD] == {"op": "alias", "of": EMBEDDING, "in": [leaf(HEAD)]}
    untied = recipes.recipe_for(model, stored, untie=True).targets
    assert (untied[EMBEDDING], untied[HEAD]) == (leaf(EMBEDDING), leaf(HEAD))


def test_a_tie_without_a_stored_name_is_missing() -> None:
    model = llama(tied=True)
    stored = stored_of(model)
    del stored[EMBEDDING], stored[HEAD]
    with pytest.raises(front.UsageError, match="lacks 2 tensors"):
        recipes.recipe_for(model, stored)


def test_a_tie_is_initialised_once() -> None:
    model = llama(tied=True)
    stored = stored_of(model)
    del stored[EMBEDDING], stored[HEAD]
    targets = recipes.recipe_for(
        model, stored, rules=recipes.LoadRules(missing={"embed": ("normal", 1.0)})
    ).targets
    assert (targets[EMBEDDING]["op"], targets[HEAD]) == ("init", {"op": "alias", "of": EMBEDDING})


def test_more_than_two_names_of_one_tensor() -> None:
    """T5 ties its shared embedding to those of both stacks and to the head."""
    config = transformers.T5Config(d_model=8, d_kv=4, d_ff=12, num_layers=1, num_heads=2)
    model = on_meta(config, "T5ForConditionalGeneration")
    stored = stored_of(model)
    names = ["shared.weight", "encoder.embed_tokens.weight", "decoder.embed_tokens.weight", HEAD]
    for source in names:
        less = {name: t for name, t in stored.items() if name == source or name not in names}
        targets = recipes.recipe_for(model, less).targets
        assert targets[source] == leaf(source)
        for other in set(names) - {source}:
            assert targets[other] == {"op": "alias", "of": source}


# ---- missing and unexpected


def test_a_missing_tensor_is_named_with_the_nearest_stored_name() -> None:
    stored = stored_of(llama())
    stored["model.layers.1.mlp.up_prj.weight"] = stored.pop("model.layers.1.mlp.up_proj.weight")
    with pytest.raises(front.UsageError) as caught:
        recipes.recipe_for(llama(), stored, rules=recipes.LoadRules(unexpected="ignore"))
    error = caught.value
    assert (error.category, error.code) == ("MISMATCH", 2)
    assert error.tensor == "model.layers.1.mlp.up_proj.weight"
    assert "nearest is 'model.layers.1.mlp.up_prj.weight'" in str(error)


def test_a_declared_missing_tensor_is_made_by_a_rule() -> None:
    model = llama(dtype=torch.bfloat16)
    stored = stored_of(model)
    del stored[HEAD], stored["model.norm.weight"], stored["model.layers.0.mlp.up_proj.weight"]
    rules = {HEAD: ("normal", 0.02), r"norm\.weight$": "ones", "up_proj": "model"}
    recipe = recipes.recipe_for(model, stored, rules=recipes.LoadRules(missing=rules))
    init = {"dtype": "bfloat16", "op": "init"}
    assert recipe.targets[HEAD] == init | {"rule": "normal", "std": 0.02, "shape": [50, 24]}
    assert recipe.targets["model.norm.weight"] == init | {"rule": "ones", "shape": [24]}
    assert recipe.missing == {"model.layers.0.mlp.up_proj.weight": ("bfloat16", (20, 24))}
    assert recipes.recipe_for(
        model, stored, rules=recipes.LoadRules(missing="ignore")
    ).missing.keys() == ({HEAD, "model.norm.weight", "model.layers.0.mlp.up_proj.weight"})
    with pytest.raises(front.UsageError, match="unknown initialisation rule"):
        recipes.recipe_for(
            model, stored, rules=recipes.LoadRules(missing=dict.fromkeys(rules, "uniform"))
        )


def test_tensors_that_a_model_lists_as_missing_are_left_to_it() -> None:
    """transformers' models list names that a checkpoint may lack, such as Marian's bias."""
    config = transformers.MarianConfig(
        vocab_size=30, d_model=8, encoder_layers=1, decoder_layers=1, encoder_attention_heads=2,
        decoder_attention_heads=2, encoder_ffn_dim=8, decoder_ffn_dim=8, pad_token_id=1,
    )  # fmt: skip
    model = on_meta(config, "MarianMTModel")
    stored = {name: t for name, t in stored_of(model).items() if "positions" not in name}
    del stored["final_logits_bias"]
    recipe = recipes.recipe_for(model, stored)
    assert "final_logits_bias" in recipe.missing and len(recipe.missing) == 3


@pytest.mark.parametrize(
    "unexpected", ["error", "ignore", r"\.extra$", [r"extra$", r"layers\.0\.ex"]]
)
def test_unexpected_tensors_are_an_error_unless_dropped(unexpected: Any) -> None:
    stored = stored_of(llama()) | {"model.layers.0.extra": ("float32", (3,))}
    if unexpected == "error":
        with pytest.raises(front.UsageError, match="1 stored tensor is not in") as caught:
            recipes.recipe_for(llama(), stored)
        assert caught.value.tensor == "model.layers.0.extra"
        return
    recipe = recipes.recipe_for(llama(), stored, rules=recipes.LoadRules(unexpected=unexpected))
    assert recipe.unused == ["model.layers.0.extra"]


def test_tensors_that_transformers_drops_are_unused() -> None:
    """Buffers of older versions: inv_freq in each layer of Llama-2, masks of GPT-2."""
    extra = "model.layers.0.self_attn.rotary_emb.inv_freq"
    stored = stored_of(llama()) | {extra: ("float32", (3,))}
    assert recipes.recipe_for(llama(), stored).unused == [extra]
    config = transformers.GPT2Config(n_embd=8, n_head=2, n_layer=1, vocab_size=20)
    model = on_meta(config, "GPT2LMHeadModel")
    stored = {name.removeprefix("transformer."): t for name, t in stored_of(model).items()}
    del stored[HEAD]
    stored["h.0.attn.bias"] = ("float32", (1, 1, 4, 4))
    recipe = recipes.recipe_for(model, stored)
    assert recipe.unused == ["h.0.attn.bias"]
    assert recipe.targets["transformer.wte.weight"] == leaf("wte.weight")


@pytest.mark.parametrize("pattern", ["(", "a(?=b)", r"(a)\1", "(" * 30_000])
@pytest.mark.parametrize("argument", ["keep_fp32", "missing", "unexpected"])
def test_an_invalid_regular_expression_is_refused(argument: str, pattern: str) -> None:
    model = llama()
    with pytest.raises(front.UsageError, match=f"{argument} is not a regular expression") as caught:
        recipes.recipe_for(model, stored_of(model), rules=recipes.LoadRules(**{argument: pattern}))
    assert caught.value.category == "USAGE"
    assert caught.value.got.startswith(pattern[:8])


def test_missing_of_another_type_is_refused() -> None:
    rules: Any = recipes.LoadRules(missing=3)  # type: ignore[arg-type]
    with pytest.raises(front.UsageError, match="USAGE: missing .expected .*got 3"):
        recipes.recipe_for(llama(), stored_of(llama()), rules=rules)


@pytest.mark.parametrize("argument", ["keep_fp32", "missing", "unexpected"])
def test_a_regular_expression_that_matches_nothing_is_refused(argument: str) -> None:
    model = llama()
    with pytest.raises(front.UsageError, match=f"{argument}: .* matches no name") as caught:
        recipes.recipe_for(
            model, stored_of(model), rules=recipes.LoadRules(**{argument: "no such tensor"})
        )
    assert caught.value.category == "USAGE"
    assert caught.value.got == "'no such tensor'"
    recipes.recipe_for(model, stored_of(model), rules=recipes.LoadRules(**{argument: "^model"}))


def test_no_regular_expression_can_hang() -> None:
    model = llama()
    stored = {**stored_of(model), "a" * 60: ("float32", (1,))}
    with pytest.raises(front.UsageError, match="matches no name"):
        recipes.recipe_for(model, stored, rules=recipes.LoadRules(unexpected="^(a+)+(a+)+(a+)+b$"))


def test_a_second_stored_tensor_for_one_target_is_refused() -> None:
    stored = stored_of(llama())
    stored["norm.weight"] = stored["model.norm.weight"]
    with pytest.raises(front.UsageError, match="two stored tensors are") as caught:
        recipes.recipe_for(llama(), stored)
    assert caught.value.tensor == "norm.weight"
    dropped = recipes.recipe_for(llama(), stored, rules=recipes.LoadRules(unexpected=r"^norm\."))
    assert dropped.unused == ["norm.weight"]
    assert dropped.targets["model.norm.weight"] == leaf("model.norm.weight")


def test_a_missing_expert_is_an_error() -> None:
    """A missing w1 leaves w1 and w3 uneven; a missing w2 changes the shape of a whole stack."""
    stored = per_expert(mixtral())
    del stored["model.layers.0.block_sparse_moe.experts.7.w1.weight"]
    with pytest.raises(front.UsageError, match="lacks a tensor that .*gate_up_proj") as caught:
        recipes.recipe_for(mixtral(), stored)
    assert caught.value.tensor == "model.layers.0.block_sparse_moe.experts.7.w1.weight"
    stored = per_expert(mixtral())
    del stored["model.layers.0.block_sparse_moe.experts.7.w2.weight"]
    with pytest.raises(front.UsageError, match="another shape") as caught:
        recipes.recipe_for(mixtral(), stored)
    assert caught.value.tensor == "model.layers.0.mlp.experts.down_proj"
    assert (caught.value.expected, caught.value.got) == ("[11, 24, 20]", "[10, 24, 20]")


# ---- dtypes


def dtypes_of(recipe: recipes.Recipe) -> set[str | None]:
    return {node.get("dtype") for node in recipe.targets.values()}


def test_the_models_dtype_is_in_the_recipe_if_the_stored_one_differs() -> None:
    stored = stored_of(llama(dtype=torch.bfloat16))
    assert dtypes_of(recipes.recipe_for(llama(dtype=torch.bfloat16), stored)) == {None}
    assert dtypes_of(recipes.recipe_for(llama(), stored)) == {"float32"}
    assert dtypes_of(recipes.recipe_for(llama(), stored, dtype=torch.float16)) == {"float16"}
    stored["model.norm.weight"] = ("int64", (24,))
    with pytest.raises(front.UsageError, match="cast") as caught:
        recipes.recipe_for(llama(), stored)
    assert (caught.value.category, caught.value.tensor) == ("UNSUPPORTED", "model.norm.weight")


def test_tensors_that_a_model_keeps_in_float32_are_kept() -> None:
    """T5 lists `wo` in _keep_in_fp32_modules."""
    config = transformers.T5Config(d_model=8, d_kv=4, d_ff=12, num_layers=1, num_heads=2)
    model = on_meta(config, "T5ForConditionalGeneration")
    targets = recipes.recipe_for(model, stored_of(model), dtype="float16").targets
    kept = {name for name, node in targets.items() if "dtype" not in node and "of" not in node}
    assert kept == {name for name in targets if ".wo." in name} != set()


class CountingBatches(transformers.PreTrainedModel):
    """A model whose list of tensors that stay in float32 matches an integer, too."""

    config_class = transformers.LlamaConfig
    _keep_in_fp32_modules_strict = ("norm",)

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.linear = torch.nn.Linear(4, 4, dtype=torch.bfloat16)
        self.norm = torch.nn.BatchNorm1d(4, dtype=torch.bfloat16)


def test_integers_among_the_tensors_that_stay_in_float32_are_loaded_as_they_are() -> None:
    model = CountingBatches(transformers.LlamaConfig())
    targets = recipes.recipe_for(model, stored_of(model), dtype="float16").targets
    dtypes = {name: node.get("dtype") for name, node in targets.items()}
    assert dtypes["norm.num_batches_tracked"] is None
    assert (dtypes["norm.weight"], dtypes["linear.weight"]) == ("float32", "float16")


def test_a_transformers_without_a_list_of_such_tensors_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = CountingBatches(transformers.LlamaConfig())
    stored = stored_of(model)
    monkeypatch.delattr(transformers.PreTrainedModel, "_get_dtype_plan")
    with pytest.raises(front.UsageError, match="keeps in float32: load it without dtype="):
        recipes.recipe_for(model, stored, dtype="float16")
    assert recipes.recipe_for(model, stored).targets


# ---- FP8


def fp8_model() -> Any:
    """A bfloat16 model on meta whose config states FP8 codes with a scale per 4 x 4 block."""
    config = transformers.Qwen3MoeConfig(
        **SMALL, num_experts=3, moe_intermediate_size=10, head_dim=6, decoder_sparse_step=1
    )
    config.quantization_config = {
        "quant_method": "fp8", "weight_block_size": [4, 4], "activation_scheme": "dynamic",
    }  # fmt: skip
    return on_meta(config, "Qwen3MoeForCausalLM", torch.bfloat16)


def fp8_checkpoint(model: Any) -> dict[str, Any]:
    """The model's tensors as stored: FP8 codes for every projection, with scales of 1 for each
    2 x 2 block; random values for all others. Since all scales are 1, no value depends on the size
    of a block."""
    tensors: dict[str, Any] = {}

    def add(name: str, shape: tuple[int, ...]) -> None:
        codes = torch.randint(0, 0x7F, shape, dtype=torch.uint8)
        tensors[name] = codes.view(torch.float8_e4m3fn)
        tensors[f"{name}_scale_inv"] = torch.ones(shape[0] // 2, shape[1] // 2)

    for name, tensor in model.state_dict().items():
        shape, before = tuple(tensor.shape), name.rpartition(".")[0]
        for expert in range(shape[0] if ".experts." in name else 0):
            if name.endswith("gate_up_proj"):
                add(f"{before}.{expert}.gate_proj.weight", (shape[1] // 2, shape[2]))
                add(f"{before}.{expert}.up_proj.weight", (shape[1] // 2, shape[2]))
            else:
                add(f"{before}.{expert}.down_proj.weight", shape[1:])
        if "_proj.weight" in name:
            add(name, shape)
        elif ".experts." not in name:
            tensors[name] = torch.randn(shape).to(tensor.dtype)
    return tensors


def test_fp8_codes_imply_their_scales() -> None:
    torch.manual_seed(0)
    model = fp8_model()
    tensors = fp8_checkpoint(model)
    recipe = recipes.recipe_for(model, tensors)
    assert recipe.unused == [] and "_scale_inv" not in recipe.text()
    quantizer = AutoHfQuantizer.from_config(
        dict(model.config.quantization_config, dequantize=True), pre_quantized=True
    )
    loading = LoadStateDictConfig(
        hf_quantizer=quantizer,
        dtype=torch.bfloat16,
        weight_mapping=get_model_conversion_mapping(model, None, quantizer),
    )
    info, _ = upstream.convert_and_load_state_dict_in_model(model, tensors, loading)
    assert not info.missing_keys | info.unexpected_keys and not info.conversion_errors
    as_numbers = {name: tensor.float().numpy() for name, tensor in tensors.items()}
    for name, tensor in model.state_dict().items():
        node = recipe.targets[name]
        is_code = "_proj" in name
        assert node.get("dtype") == ("bfloat16" if is_code else None), name
        assert np.array_equal(evaluate(node, as_numbers), tensor.float().numpy()), name


def compressed(**weights: Any) -> dict[str, Any]:
    """A quantization_config as llm-compressor writes it, with these settings of the weights."""
    group = {"targets": ["Linear"], "weights": {"num_bits": 8, "type": "float"} | weights}
    return {"quant_method": "compressed-tensors", "config_groups": {"group_0": group}}


@pytest.mark.parametrize("columns", (1, None), ids=("per channel", "per tensor"))
def test_fp8_codes_of_compressed_tensors_are_dequantised(
    tmp_path: Path, columns: int | None
) -> None:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**SMALL, quantization_config=compressed())
    with modicum.torch.empty_parameters():
        model = transformers.LlamaForCausalLM._from_config(config, dtype=torch.bfloat16)
    tensors: dict[str, Any] = {}
    expected = {}
    for name, tensor in model.state_dict().items():
        values = torch.randn(tensor.shape).to(torch.bfloat16)
        if "_proj" in name:
            codes = values.to(torch.float8_e4m3fn)
            scale = torch.rand((len(codes), columns) if columns else (1,)).to(torch.bfloat16)
            tensors |= {name: codes, f"{name}_scale": scale}
            values = (codes.float() * scale.float()).to(torch.bfloat16)
        expected[name] = values
        tensors.setdefault(name, values)
    save_file(tensors, tmp_path / "model.safetensors")
    modicum.torch.load(model, tmp_path, progress=False, budget="none")
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, expected[name]), name


@pytest.mark.parametrize(
    "config",
    [
        compressed(type="int", num_bits=4),
        compressed(num_bits=4),
        {"quant_method": "compressed-tensors", "config_groups": {"FP8": ["Linear"]}},
        {"quant_method": "compressed-tensors"},
    ],
    ids=("int4", "fp4", "a preset", "no groups"),
)
def test_other_codes_of_compressed_tensors_are_refused(config: dict[str, Any]) -> None:
    model = llama()
    model.config.quantization_config = config
    with pytest.raises(front.UsageError, match="'compressed-tensors'.*8-bit floats") as refused:
        recipes.recipe_for(model, stored_of(model))
    assert refused.value.category == "UNSUPPORTED"


def test_codes_without_a_scale_are_refused() -> None:
    model = fp8_model()
    tensors = fp8_checkpoint(model)
    del tensors["model.layers.0.self_attn.q_proj.weight_scale_inv"]
    with pytest.raises(front.UsageError, match="without a scale") as refused:
        recipes.recipe_for(model, tensors)
    assert refused.value.category == "UNSUPPORTED"


# Settings that transformers needs to recognise each method.
OTHERS = {
    "awq": {"bits": 4},
    "gptq": {"bits": 4},
    "bitsandbytes": {"load_in_4bit": True},
    "mxfp4": {},
    "modelopt": {"quant_algo": "NVFP4"},
    "torchao": {"quant_type": {"default": {"_type": "Int4WeightOnlyConfig"}}},
}


@pytest.mark.parametrize("nested", (False, True), ids=("own", "of the text model"))
@pytest.mark.parametrize("method", OTHERS)
def test_other_quantizations_are_refused(method: str, nested: bool) -> None:
    """Even if the checkpoint has the names and dtypes of the model."""
    model = llama()
    of = SimpleNamespace() if nested else model.config  # the config with the setting
    of.quantization_config = {"quant_method": method} | OTHERS[method]
    if nested:
        model.config.get_text_config = lambda decoder: of
    with pytest.raises(front.UsageError, match=f"'{method}' is not known") as refused:
        recipes.recipe_for(model, stored_of(model))
    assert (refused.value.category, refused.value.got) == ("UNSUPPORTED", method)


def test_a_quantization_that_transformers_has_parsed_is_refused() -> None:
    model = llama()
    model.config.quantization_config = transformers.Mxfp4Config()
    with pytest.raises(front.UsageError, match="'mxfp4' is not known"):
        recipes.recipe_for(model, stored_of(model))


# ---- models that are sharded already


@pytest.fixture
def world() -> Iterator[None]:
    """A fake process group of two ranks; this process is rank 0."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.usefixtures("world")
def test_a_sharded_model_has_the_recipe_of_the_whole_one() -> None:
    from torch.distributed.fsdp import FSDPModule, fully_shard

    config = transformers.NomicBertConfig(
        hidden_size=12, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2,
        vocab_size=30,
    )  # fmt: skip
    model = on_meta(config, "NomicBertModel")
    stored = stored_of(model)
    for layer in ("layers.0", "layers.1"):
        for part in "qkv":
            del stored[f"{layer}.self_attn.{part}_proj.weight"]
        stored[f"encoder.{layer}.attn.Wqkv.weight"] = ("float32", (36, 12))
    whole = recipes.recipe_for(model, stored)
    for module in [*model.layers, model]:
        fully_shard(module)
    assert isinstance(model, FSDPModule)
    classes = [type(module) for module in model.modules()]
    assert recipes.recipe_for(model, stored) == whole
    assert [type(module) for module in model.modules()] == classes
    assert whole.targets["layers.1.self_attn.k_proj.weight"]["op"] == "slice"


# ---- the command line


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """A checkpoint of a mixtral as stored on the hub, with an extra tensor."""
    model = mixtral()
    model.config.architectures = ["MixtralForCausalLM"]
    model.config.save_pretrained(tmp_path)
    tensors = {name: torch.zeros(shape) for name, (_, shape) in per_expert(model).items()}
    save_file(tensors | {"extra": torch.zeros(3)}, tmp_path / "model.safetensors")
    return tmp_path


def test_plan_accepts_the_recipe_of_the_command_line(
    modicum: Path, saved: Path, capsys: Any
) -> None:
    words = [str(saved), "--dtype", "bfloat16"]
    assert main(words) == 2
    told = capsys.readouterr()
    assert told.out == ""
    assert "modicum: MISMATCH: 1 stored tensor is not in the model" in told.err
    path = saved / "recipe.json"
    words += ["--ignore-unexpected", "-o", str(path)]
    command = [sys.executable, "-m", "modicum.recipes", *words]
    subprocess.run(command, cwd=saved, check=True, capture_output=True)
    planned = run_json(modicum, "plan", saved, "--recipe", path, "--ranks=2")
    assert planned["checkpoint"]["tensors"] == len(per_expert(mixtral())) + 1
    assert run(modicum, "load", saved, "--recipe", path, "--ranks=2").code == 0
    recipe = json.loads(path.read_text())
    assert recipe["unused"] == ["extra"]
    recipe["unused"] = []
    path.write_text(json.dumps(recipe))
    assert failure(modicum, 2, "plan", saved, "--recipe", path)["tensor"] == "extra"


def test_a_config_without_a_class_is_refused(saved: Path, capsys: Any) -> None:
    config = json.loads((saved / "config.json").read_text())
    (saved / "config.json").write_text(json.dumps(config | {"architectures": ["NoSuchModel"]}))
    assert main([str(saved)]) == 2
    assert "NoSuchModel" in capsys.readouterr().err
