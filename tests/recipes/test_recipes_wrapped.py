"""Recipes of wrapped models (PEFT, torch.compile, activation checkpointing, FSDP2) and of modules
that are not transformers' (value heads, plain modules). For PEFT the oracle is PEFT itself: it
wraps a model that `from_pretrained` has loaded, and saves the adapters.

Catches: modules that PEFT has copied are left to the model; a tensor that an adapter's file lacks
is not reported; nested adapters get the same name; renamings that depend on the prefix of
torch.compile.
"""

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")

from families import FAMILIES, Family, fill  # noqa: E402  (after torch is known to be there)
from peft.utils import save_and_load  # noqa: E402
from recipe_oracle import evaluate  # noqa: E402
from safetensors.numpy import load_file  # noqa: E402
from sharding import playing_rank  # noqa: E402

import modicum as front  # noqa: E402
from modicum import recipes  # noqa: E402
from modicum.recipes.recipe import _transforms, text_with_callers  # noqa: E402
from modicum.recipes.structure import structure_of  # noqa: E402

BY_NAME = {family.name: family for family in FAMILIES}
LORA = {"r": 2, "target_modules": ["q_proj", "embed_tokens"]}
# By kind of adapter: a family, and the arguments of its LoraConfig.
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "dense": ("llama", LORA),
    "tied": ("qwen2", LORA),
    "head": ("llama", LORA | {"modules_to_save": ["lm_head"]}),
    "tied_head": ("qwen2", {"r": 2, "target_modules": ["q_proj"], "modules_to_save": ["lm_head"]}),
    "dora": ("llama", {"r": 2, "target_modules": ["q_proj"], "use_dora": True}),
    "tokens": ("llama", {"r": 2, "target_modules": ["q_proj"], "trainable_token_indices": [1, 5]}),
    "experts": ("mixtral", LORA | {
        "target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]}),
    "scoped": ("llava", {"r": 2, "target_modules": ["q_proj"]}),
}  # fmt: skip


@pytest.fixture(autouse=True)
def quiet() -> None:
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A function that returns the directory of a family's checkpoint, by the family's name."""
    places: dict[str, Path] = {}

    def of(name: str) -> Path:
        if name not in places:
            place = tmp_path_factory.mktemp(name) / "model"
            places[name] = BY_NAME[name].write(BY_NAME[name].build(), place)
        return places[name]

    return of


def on_meta(family: Family) -> Any:
    config = transformers.AutoConfig.for_model(family.model_type, **family.config)
    with torch.device("meta"):
        return family.model_class._from_config(config, dtype=torch.float32)


def with_adapters(model: Any, config: dict[str, Any], name: str = "default") -> Any:
    with torch.device(next(model.parameters()).device):
        return peft.get_peft_model(model, peft.LoraConfig(**config), adapter_name=name)


def stored_in(directory: Path) -> dict[str, Any]:
    """The arrays of all files, by name."""
    return {n: t for file in directory.glob("*.safetensors") for n, t in load_file(file).items()}


def values(recipe: recipes.Recipe, stored: dict[str, Any]) -> dict[str, Any]:
    """The values that numpy computes for all targets, except those that the model initialises."""
    made = {}
    for name, node in recipe.targets.items():
        node = recipe.targets[node["of"]] if node["op"] == "alias" else node
        if node["op"] not in ("caller", "init"):
            made[name] = torch.from_numpy(evaluate(node, stored).copy())
    return made


def assert_equal(made: dict[str, Any], expected: dict[str, Any]) -> None:
    assert made.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(made[name], tensor), name


# ---- PEFT: the base model


@pytest.mark.parametrize("kind", KINDS)
def test_the_base_loads_into_what_peft_has_wrapped(kind: str, written: Any) -> None:
    """The base model's nodes are those of the unwrapped model. Modules that PEFT has copied get the
    values of their originals. Adapters are left to the model."""
    name, config = KINDS[kind]
    family, directory = BY_NAME[name], written(name)
    wrapped = with_adapters(on_meta(family), config)
    names = list(wrapped.state_dict())
    recipe = recipes.recipe_for(wrapped, directory)
    assert list(recipe.targets) == names
    adapters = {name for name in names if re.search("lora_|trainable_tokens", name)}
    assert recipe.missing.keys() | recipe.norms.keys() <= adapters

    unwrapped = recipes.recipe_for(on_meta(family), directory)
    inner = {  # names in the unwrapped model
        n: save_and_load._peft_key_to_original_key(wrapped, n.removeprefix("base_model.model."))
        for n in names
        if n not in adapters and "modules_to_save" not in n
    }
    nodes = {inner[n]: recipe.targets[n] for n in inner}
    for node in nodes.values():
        if node["op"] == "alias":
            node["of"] = inner[node["of"]]
    assert nodes == unwrapped.targets and recipe.unused == unwrapped.unused

    loaded = with_adapters(family.model_class.from_pretrained(directory), config).state_dict()
    left = recipe.missing.keys() | recipe.norms.keys()
    expected = {n: t for n, t in loaded.items() if n not in left}
    made = values(recipes.recipe_for(wrapped, directory), stored_in(directory))
    assert_equal(made, {n: expected[n] for n in made})
    assert made.keys() == expected.keys()


def test_adapters_that_transformers_adds_change_no_name(written: Any) -> None:
    model = on_meta(BY_NAME["llama"])
    before = recipes.recipe_for(model, written("llama"))
    with torch.device("meta"):
        model.add_adapter(peft.LoraConfig(**LORA), adapter_name="fine")
    recipe = recipes.recipe_for(model, written("llama"))
    assert {
        name.replace(".base_layer", ""): node
        for name, node in recipe.targets.items()
        if name not in recipe.missing
    } == before.targets
    assert recipe.missing and all(".fine" in name for name in recipe.missing)


def test_a_model_wrapped_and_sharded_has_the_same_recipe() -> None:
    """fully_shard changes the inner model's class, by which transformers finds its conversions."""
    from torch.distributed.fsdp import fully_shard

    family = BY_NAME["nomic_bert"]
    wrapped = with_adapters(on_meta(family), {"r": 2, "target_modules": ["up_proj"]})
    stored = {"encoder.layers.0.attn.Wqkv.weight": ("float32", (126, 42))}
    whole = recipes.recipe_for(wrapped, stored, rules=recipes.LoadRules(missing="init"))
    key = "base_model.model.layers.0.self_attn.k_proj.weight"
    assert whole.targets[key]["op"] == "slice"
    with playing_rank(0, 2):
        for module in [*wrapped.base_model.model.layers, wrapped]:
            fully_shard(module)
        assert recipes.recipe_for(wrapped, stored, rules=recipes.LoadRules(missing="init")) == whole


def test_a_copy_declared_present_is_no_target(written: Any) -> None:
    wrapped = with_adapters(on_meta(BY_NAME["llama"]), KINDS["head"][1])
    copy = "base_model.model.lm_head.modules_to_save.default.weight"
    assert copy in recipes.recipe_for(wrapped, written("llama")).targets
    assert copy not in recipes.recipe_for(wrapped, written("llama"), present=[copy]).targets


# ---- PEFT: an adapter's file


@pytest.fixture(params=KINDS)
def adapter(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Any, str, Path, Any]:
    """(a wrapped model on meta, its adapter's name, the directory of the saved adapter, the state
    dict of the model that saved it, under the names of the model on meta)."""
    name, config = KINDS[request.param]
    saved = with_adapters(BY_NAME[name].build(), config)
    fill(saved)
    saved.save_pretrained(tmp_path / "adapter")
    wrapped = with_adapters(on_meta(BY_NAME[name]), config, "fine")
    expected = {n.replace(".default", ".fine"): t for n, t in saved.state_dict().items()}
    return wrapped, "fine", tmp_path / "adapter", expected


def base_of(model: Any) -> list[str]:
    """The names outside the adapter "fine": they need not be in its file."""
    return [n for n in model.state_dict() if ".fine" not in n]


def test_an_adapter_loads_under_its_name_in_the_model(adapter: Any) -> None:
    wrapped, name, directory, expected = adapter
    recipe = recipes.recipe_for(wrapped, directory, present=base_of(wrapped))
    assert recipe.missing == {} and recipe.unused == []
    made = values(recipe, stored_in(directory))
    assert made.keys() >= {n for n in expected if f".{name}" in n}
    assert_equal(made, {n: expected[n] for n in made})


def test_a_whole_state_dict_of_a_wrapped_model_loads(adapter: Any) -> None:
    wrapped, _, _, expected = adapter
    stored = {n: t.numpy() for n, t in expected.items()}
    assert_equal(values(recipes.recipe_for(wrapped, expected), stored), expected)


def small_adapter() -> tuple[Any, dict[str, Any]]:
    """A wrapped model on meta, and (dtype, shape) of each tensor of its adapter's file."""
    wrapped = with_adapters(on_meta(BY_NAME["llama"]), LORA, "fine")
    stored = {
        n.replace(".fine", ""): ("float32", tuple(t.shape))
        for n, t in wrapped.state_dict().items()
        if ".fine" in n
    }
    return wrapped, stored


def test_an_incomplete_adapter_or_one_without_a_base_is_refused() -> None:
    wrapped, stored = small_adapter()
    with pytest.raises(front.UsageError, match="the checkpoint lacks 21 tensors"):
        recipes.recipe_for(wrapped, stored)
    first = next(iter(stored))
    incomplete = {n: t for n, t in stored.items() if n != first}
    with pytest.raises(front.UsageError, match="the checkpoint lacks 1 tensor of") as caught:
        recipes.recipe_for(wrapped, incomplete, present=base_of(wrapped))
    assert caught.value.tensor == f"{first}.fine"
    # The model has two layers, 0 and 1.
    bad = {n.replace("layers.1", "layers.2"): t for n, t in stored.items()}
    with pytest.raises(front.UsageError, match="not in the model") as caught:
        recipes.recipe_for(wrapped, bad, present=base_of(wrapped))
    assert "layers.2" in caught.value.tensor
    assert "nearest is" in str(caught.value) and "lora_A" in str(caught.value)


def test_one_of_several_adapters_must_be_named() -> None:
    wrapped, stored = small_adapter()
    with torch.device("meta"):
        wrapped.add_adapter("other", peft.LoraConfig(**LORA))
    with pytest.raises(front.UsageError, match="not in the model"):
        recipes.recipe_for(wrapped, stored, present=base_of(wrapped))
    with pytest.raises(front.UsageError, match="no adapter 'third'"):
        recipes.recipe_for(wrapped, stored, rules=recipes.LoadRules(adapter="third"))
    present = [n for n in wrapped.state_dict() if ".other" not in n]
    recipe = recipes.recipe_for(
        wrapped, stored, present=present, rules=recipes.LoadRules(adapter="other")
    )
    assert recipe.targets.keys() == {n for n in wrapped.state_dict() if ".other" in n}


def test_an_adapters_old_names_are_renamed_like_the_bases() -> None:
    wrapped = with_adapters(on_meta(BY_NAME["llava"]), KINDS["scoped"][1])
    stored = {}
    for name, tensor in wrapped.state_dict().items():
        if "lora" in name and "language_model" in name:
            old = name.replace("model.model.language_model", "model.language_model.model")
            stored[old.replace(".default", "")] = ("float32", tuple(tensor.shape))
    present = [n for n in wrapped.state_dict() if "language_model" not in n or "lora" not in n]
    recipe = recipes.recipe_for(wrapped, stored, present=present)
    assert recipe.targets.keys() == wrapped.state_dict().keys() - present != set()


# ---- modules outside transformers


class Plain(torch.nn.Module):
    """A module with a tie, persistent buffers, and a buffer that is not persistent."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4))
        self.embed = torch.nn.Embedding(5, 4)
        self.head = torch.nn.Linear(4, 5, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))
        self.register_buffer("scratch", torch.zeros(3), persistent=False)


def test_a_plain_module_is_loaded_by_name() -> None:
    with torch.device("meta"):
        model = Plain()
    stored = {n: (str(t.dtype), tuple(t.shape)) for n, t in model.state_dict().items()}
    recipe = recipes.recipe_for(model, stored)
    assert list(recipe.targets) == list(stored)
    assert recipe.targets["layers.0.weight"] == {"op": "stored", "name": "layers.0.weight"}
    assert recipe.targets["head.weight"]["op"] == "alias"
    del stored["head.weight"], stored["layers.1.running_mean"]
    with pytest.raises(
        front.UsageError, match="lacks 1 tensor of.*'layers.1.running_var'"
    ) as caught:
        recipes.recipe_for(model, stored)
    assert caught.value.tensor == "layers.1.running_mean"
    recipe = recipes.recipe_for(model, stored, rules=recipes.LoadRules(missing="init"))
    assert list(recipe.missing) == ["layers.1.running_mean"]
    with pytest.raises(front.UsageError, match="nearest is 'steps'") as caught:
        recipes.recipe_for(
            model, stored | {"xsteps": ("int64", ())}, rules=recipes.LoadRules(missing="init")
        )
    assert caught.value.tensor == "xsteps"


def test_a_plain_module_needs_no_transformers(tmp_path: Path) -> None:
    script = (
        "import sys; sys.modules['transformers'] = None\n"
        "import torch, modicum.recipes as r\n"
        "model = torch.nn.Linear(2, 3)\n"
        "print(*r.recipe_for(model, model.state_dict(), dtype='bfloat16').targets)\n"
    )
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, cwd=tmp_path, check=True, capture_output=True, text=True)
    assert done.stdout.split() == ["weight", "bias"]


def test_a_plain_module_takes_adapters_too() -> None:
    with torch.device("meta"):
        model = Plain()
        stored = {n: (str(t.dtype), tuple(t.shape)) for n, t in model.state_dict().items()}
        wrapped = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=["layers.0"]))
    recipe = recipes.recipe_for(wrapped, stored)
    base = "base_model.model.layers.0.base_layer.weight"
    assert recipe.targets[base] == {"op": "stored", "name": "layers.0.weight"}
    assert recipe.missing and all("lora" in name for name in recipe.missing)


# ---- value heads


class ValueHead(torch.nn.Module):
    """Like TRL's: its state dict has the names of the inner model without "pretrained_model."."""

    def __init__(self, inner: Any) -> None:
        super().__init__()
        self.pretrained_model = inner
        self.v_head = torch.nn.Linear(39, 1)

    def state_dict(self, **options: Any) -> Any:
        head = self.v_head.state_dict(prefix="v_head.", **options)
        return self.pretrained_model.state_dict(**options) | head


@pytest.mark.parametrize("prefix", ["", "pretrained_model."])
@pytest.mark.parametrize("wrap", [False, True])
def test_a_value_head_is_loaded_by_name(prefix: str, wrap: bool, written: Any) -> None:
    inner = on_meta(BY_NAME["mixtral"])
    before = recipes.recipe_for(inner, written("mixtral")).targets
    with torch.device("meta"):
        model = ValueHead(with_adapters(inner, LORA) if wrap else inner)
    named = {f"{prefix}{n}": t for n, t in stored_in(written("mixtral")).items()}
    with pytest.raises(front.UsageError, match="lacks 2 tensors") as caught:
        recipes.recipe_for(model, named)
    assert caught.value.tensor == "v_head.weight"
    stored = named | dict(model.v_head.state_dict(prefix="v_head.").items())
    recipe = recipes.recipe_for(
        model, stored, rules=recipes.LoadRules(missing=["lora"] if wrap else "error")
    )
    assert recipe.targets["v_head.bias"] == {"op": "stored", "name": "v_head.bias"}
    path = "pretrained_model.base_model.model." if wrap else "pretrained_model."
    name = "model.layers.1.self_attn.k_proj.weight"
    assert recipe.targets[path + name] == {"op": "stored", "name": prefix + name}
    experts = "mlp.experts.gate_up_proj"
    node = recipe.targets[f"{path}model.layers.1.{experts}"]
    assert re.sub(re.escape(prefix), "", str(node)) == str(before[f"model.layers.1.{experts}"])
    assert all("lora" in n for n in recipe.missing)


def test_two_models_in_one_module_are_distinguished_by_prefix(written: Any) -> None:
    model = torch.nn.Module()
    model.actor, model.critic = on_meta(BY_NAME["llama"]), on_meta(BY_NAME["mixtral"])
    stored = {
        f"{prefix}.{n}": t
        for prefix, name in {"actor": "llama", "critic": "mixtral"}.items()
        for n, t in stored_in(written(name)).items()
    }
    recipe = recipes.recipe_for(model, stored)
    assert recipe.targets.keys() == model.state_dict().keys()
    assert recipe.targets["critic.model.layers.0.mlp.experts.down_proj"]["op"] == "stack"
    assert recipe.unused == ["actor.model.layers.1.self_attn.rotary_emb.inv_freq"]
    with pytest.raises(front.UsageError, match="not in the model"):
        recipes.recipe_for(model, written("llama"))


# ---- canonical names


def checkpointed(module: Any) -> Any:
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    return checkpoint_wrapper(module)


@pytest.mark.parametrize("wrap", [torch.compile, checkpointed], ids=["compiled", "checkpointed"])
def test_wrappers_do_not_change_the_recipe(wrap: Any, written: Any) -> None:
    """Wraps the whole model, a layer, and nested models, whose renamings depend on their path.
    Targets have canonical names, without the wrappers' prefixes."""
    family = BY_NAME["qwen2_5_vl"]
    before = recipes.recipe_for(on_meta(family), written("qwen2_5_vl"))
    assert before.targets.keys() == on_meta(family).state_dict().keys()
    model = on_meta(family)
    language = model.model.language_model
    language.layers[0] = wrap(language.layers[0])
    model.model.visual = wrap(model.model.visual)
    model.model.language_model = wrap(language)
    model.model = wrap(model.model)
    assert recipes.recipe_for(wrap(model), written("qwen2_5_vl")) == before


def test_nested_renamings_use_canonical_paths() -> None:
    """transformers limits a nested model's renamings to names below its path (scope_prefix)."""
    model = on_meta(BY_NAME["llava"])
    (part, _) = structure_of(model).parts
    before = [(str(t), t.scope_prefix) for t in _transforms(part, {}, None)]
    assert any(scope for _, scope in before)
    model.model.language_model = torch.compile(model.model.language_model)
    model.model.vision_tower = torch.compile(model.model.vision_tower)
    (part, _) = structure_of(model).parts
    assert [(str(t), t.scope_prefix) for t in _transforms(part, {}, None)] == before


def test_a_checkpoint_of_a_compiled_model_loads() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(2, 3))
    stored = torch.compile(model).state_dict()
    assert all(name.startswith("_orig_mod.") for name in stored)
    assert list(recipes.recipe_for(model, stored).targets) == list(model.state_dict())


# ---- heads, and declared tensors


def headless(name: str, labels: int = 3) -> tuple[Any, dict[str, Any]]:
    """A classifier of this class on meta, and the checkpoint of a causal language model: (dtype,
    shape) by name. It has a head of its own and lacks the classifier's."""
    family = BY_NAME["llama"]
    config = transformers.LlamaConfig(**family.config, num_labels=labels)
    with torch.device("meta"):
        model = getattr(transformers, name)._from_config(config, dtype=torch.bfloat16)
    stored = on_meta(family).state_dict().items()
    return model, {n: ("bfloat16", tuple(t.shape)) for n, t in stored}


@pytest.mark.parametrize("name", ["LlamaForSequenceClassification", "LlamaForTokenClassification"])
def test_a_head_that_is_not_stored_must_be_declared(name: str) -> None:
    model, stored = headless(name)
    with pytest.raises(front.UsageError, match="`unexpected` drops them") as caught:
        recipes.recipe_for(model, stored)
    assert caught.value.tensor == "lm_head.weight"
    with pytest.raises(front.UsageError, match="missing=.init.") as caught:
        recipes.recipe_for(model, stored, rules=recipes.LoadRules(unexpected="lm_head"))
    assert caught.value.tensor == "score.weight"
    for missing in ("init", "ignore", "score", ["score"], {r"^score\.": "model"}):
        recipe = recipes.recipe_for(
            model, stored, rules=recipes.LoadRules(unexpected="lm_head", missing=missing)
        )
        assert recipe.unused == ["lm_head.weight"]
        assert recipe.missing["score.weight"] == ("bfloat16", (3, 39))
        assert all(n.startswith("score.") for n in recipe.missing)


def test_a_tensor_declared_missing_may_be_stored_in_another_shape() -> None:
    model, stored = headless("LlamaForSequenceClassification")
    stored["score.weight"] = ("bfloat16", (2, 39))
    for missing in ("error", "init", ["norm"]):
        with pytest.raises(front.UsageError, match="another shape") as caught:
            recipes.recipe_for(
                model, stored, rules=recipes.LoadRules(unexpected="lm_head", missing=missing)
            )
        assert caught.value.tensor == "score.weight"
    recipe = recipes.recipe_for(
        model, stored, rules=recipes.LoadRules(unexpected="lm_head", missing=["score"])
    )
    assert list(recipe.missing) == ["score.weight"]
    assert recipe.unused == ["lm_head.weight", "score.weight"]


def test_tensors_left_to_the_model_are_in_the_document_but_not_in_the_text() -> None:
    family = BY_NAME["llama_tied"]
    model = on_meta(family)
    stored = {n: ("float32", tuple(t.shape)) for n, t in model.state_dict().items()}
    head, embedding = stored.pop("lm_head.weight"), stored.pop("model.embed_tokens.weight")
    recipe = recipes.recipe_for(model, stored, rules=recipes.LoadRules(missing="init"))
    assert list(recipe.missing) == ["model.embed_tokens.weight"]
    targets = recipe.document["targets"]
    assert list(targets) == list(model.state_dict())
    node = {"op": "caller", "shape": list(embedding[1]), "dtype": "float32"}
    assert targets["model.embed_tokens.weight"] == node
    assert targets["lm_head.weight"] == {"op": "alias", "of": "model.embed_tokens.weight"}
    assert "embed_tokens" not in recipe.text() and head == embedding
    assert json.loads(text_with_callers(recipe)) == recipe.document
    present = ["model.embed_tokens.weight"]
    assert recipes.recipe_for(model, stored, present=present).targets.keys() == stored.keys()


def test_some_names_are_kept_in_float32() -> None:
    model, stored = headless("LlamaForSequenceClassification")
    options: dict[str, Any] = {"unexpected": "lm_head", "missing": "init"}
    kept = recipes.recipe_for(
        model, stored, rules=recipes.LoadRules(keep_fp32="norm|score", **options)
    )
    dtypes = {n: node.get("dtype") for n, node in kept.targets.items()}
    assert {n for n, d in dtypes.items() if d == "float32"} == {
        n for n in dtypes if "norm" in n or "score" in n
    }
    cast = recipes.recipe_for(
        model, stored, dtype="float16", rules=recipes.LoadRules(keep_fp32="norm", **options)
    )
    assert cast.targets["model.norm.weight"]["dtype"] == "float32"
    assert cast.targets["model.embed_tokens.weight"]["dtype"] == "float16"
    assert cast.missing["score.weight"][0] == "float16"


@pytest.fixture(autouse=True)
def no_trace_of_compiling() -> Iterator[None]:
    yield
    torch.compiler.reset()


@pytest.mark.parametrize("base", (True, False))
def test_a_tensor_outside_takes_none_of_an_inner_models_by_its_name(
    base: bool, written: Any
) -> None:
    """As an encoder next to a norm of the program, or BERT next to a pooler. `base`: whether the
    file has the names of the base model, without its prefix. Once the names are those of the
    complete model, both tensors are read."""
    inner = on_meta(BY_NAME["llama"]).model if base else on_meta(BY_NAME["llama"])
    wrapper = torch.nn.Module()
    wrapper.encoder, wrapper.norm = inner, torch.nn.LayerNorm(8, device="meta")
    if not base:
        wrapper.model = torch.nn.ModuleDict({"norm": wrapper.norm})
        del wrapper.norm
    stored = {n: ("float32", tuple(t.shape)) for n, t in inner.state_dict().items()}
    name = "norm.weight" if base else "model.norm.weight"
    with pytest.raises(front.UsageError, match="lacks 2 tensors") as refused:
        recipes.recipe_for(wrapper, stored)
    assert refused.value.tensor == name and "nearest" not in str(refused.value)
    recipe = recipes.recipe_for(wrapper, stored, rules=recipes.LoadRules(missing=r"norm\."))
    assert recipe.targets[f"encoder.{name}"] == {"op": "stored", "name": name}
    assert {*recipe.missing} == {name, name.replace("weight", "bias")}
    if base:  # a file of the language model has the base model's names with its prefix
        whole = {f"model.{n}": described for n, described in stored.items()}
        there = {"norm.weight": ("float32", (8,)), "norm.bias": ("float32", (8,))}
        recipe = recipes.recipe_for(wrapper, whole | there)
        assert recipe.targets[name] == {"op": "stored", "name": name}
        assert recipe.targets[f"encoder.{name}"]["name"] == "model.norm.weight"
    own = {n: ("float32", tuple(t.shape)) for n, t in wrapper.state_dict().items()}
    recipe = recipes.recipe_for(wrapper, own)
    assert all(node == {"op": "stored", "name": n} for n, node in recipe.targets.items())
