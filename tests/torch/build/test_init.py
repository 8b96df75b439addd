"""`Initialiser` makes the tensors that a checkpoint lacks by the model's own rules: with the
distributions of transformers, torch and PEFT, with the same bits in every world, and without a
change of the model. A rule is code of the model that initialises tensors, such as `_init_weights`
or `reset_parameters`.

Catches: initial values that each rank draws for itself; a tensor that only the rule of its own
module makes; a parameter that a rule replaces and that keeps its old values; a parent's rule that
sees a wrapper in place of its child; a rule that runs on the model itself; tensors of several
modules held at a time.
"""

import random
import re
import subprocess
import sys
import weakref
from collections.abc import Iterable
from typing import Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")

from families import FAMILIES, Family  # noqa: E402  (after torch is known to be there)
from sharding import playing_rank  # noqa: E402
from torch import nn  # noqa: E402

import modicum  # noqa: E402
from modicum.torch.build.initialiser import Initialiser  # noqa: E402

BY_NAME = {family.name: family for family in FAMILIES}
CHOSEN = [
    "llama",
    "qwen2",
    "gemma2",
    "gemma3_text",
    "gpt2",
    "gpt_neox",
    "bloom",
    "opt",
    "mixtral",
    "qwen2_moe",
    "qwen3_moe",
    "gpt_oss",
    "deepseek_v3",
    "qwen3_next",
    "jamba",
    "mamba",
    "mamba2",
    "falcon_h1",
    "olmo_hybrid",
    "bert",
    "roberta",
    "dinov2",
    "vit",
    "clip",
    "siglip",
    "t5",
    "bart",
    "marian",
    "whisper",
    "llava",
    "qwen2_5_vl",
    "kimi_k25",
]
# Tensors without a rule: only the constructor sets their values.
WITHOUT_RULE = {"clip": {"logit_scale"}}
SEEDS = range(4)


@pytest.fixture(autouse=True)
def quiet() -> None:
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()


def config_of(family: Family) -> Any:
    return transformers.AutoConfig.for_model(family.model_type, **family.config)


def on_meta(family: Family, dtype: Any = None) -> Any:
    with torch.device("meta"):
        return family.model_class._from_config(config_of(family), dtype=dtype or torch.float32)


def tensors_of(model: Any) -> dict[str, Any]:
    """All tensors, non-persistent buffers included."""
    return model.state_dict() | dict(model.named_buffers())


def made(model: Any, names: Iterable[str], seed: int = 0) -> dict[str, Any]:
    """The tensors `names` of the model, made by an `Initialiser`."""
    initialiser = Initialiser(model, names, seed=seed)
    assert sorted(initialiser.order) == sorted(names)
    return {name: initialiser.whole(name).clone() for name in initialiser.order}


def assert_drawn_alike(ours: list[Any], theirs: list[Any], what: str) -> None:
    """Asserts that elements of `theirs` that are the same for every seed have that value in `ours`,
    and that the other elements of both have the same distribution. Each list has one tensor for
    each seed. By chance, the largest distance between the two empirical distribution functions
    exceeds 3 * sqrt(2 / n) once in thirty million cases (Kolmogorov-Smirnov, 2 * exp(-2 * 3 ** 2)),
    and a mean or a standard deviation differs by six standard errors once in five hundred
    million."""
    mine, other = torch.stack(ours).double(), torch.stack(theirs).double()
    assert mine.shape == other.shape, what
    fixed = (other == other[0]).all(0)
    assert torch.equal(mine[:, fixed], other[:, fixed]), f"{what}: other constants"
    assert not (mine == mine[0]).all(0)[~fixed].any(), f"{what}: does not vary with the seed"
    a, b = mine[:, ~fixed].flatten().sort()[0], other[:, ~fixed].flatten().sort()[0]
    n = len(a)
    if n == 0:
        return
    every = torch.cat([a, b])
    ranks = [torch.searchsorted(side, every, right=True) for side in (a, b)]
    distance = (ranks[0] - ranks[1]).abs().max() / n
    assert distance <= 3 * (2 / n) ** 0.5, f"{what}: another distribution"
    centred = b - b.mean()
    variance = centred.square().mean()
    kurtosis = centred.pow(4).mean() / variance.square()
    assert (a.mean() - b.mean()).abs() <= 6 * (2 * variance / n).sqrt(), f"{what}: another mean"
    bound = 6 * (2 * variance * (kurtosis - 1) / (4 * n)).sqrt()
    assert (a.std() - b.std()).abs() <= bound, f"{what}: another standard deviation"


def by_transformers(family: Family) -> list[dict[str, Any]]:
    """For each seed, the tensors of a model that its class has initialised."""
    models = []
    with torch.random.fork_rng(devices=[]):
        for seed in SEEDS:
            torch.manual_seed(seed)
            models.append(tensors_of(family.model_class(config_of(family))))
    return models


# ---- against the model's own initialisation


@pytest.mark.parametrize("name", CHOSEN)
def test_every_tensor_is_drawn_as_transformers_draws_it(name: str) -> None:
    family = BY_NAME[name]
    theirs = by_transformers(family)
    model = on_meta(family)
    names = [n for n in tensors_of(model) if n not in WITHOUT_RULE.get(name, ())]
    ours = [made(model, names, seed + 100) for seed in SEEDS]
    for tensor in names:
        assert_drawn_alike([o[tensor] for o in ours], [t[tensor] for t in theirs], tensor)


def test_a_rule_of_the_tensors_own_module_is_not_enough() -> None:
    """In GPT-2 the rule of the parent module (GPT2Attention or GPT2MLP) scales `c_proj.weight`. The
    rule of the layer that owns the tensor does not."""
    family, name = BY_NAME["gpt2"], "transformer.h.0.attn.c_proj.weight"
    naive = []
    with torch.random.fork_rng(devices=[]):
        for seed in SEEDS:
            model = family.model_class(config_of(family))
            torch.manual_seed(seed)
            owner = model.get_submodule(name.rpartition(".")[0])
            model._init_weights(owner)
            naive.append(owner.weight.detach())
    theirs = [t[name] for t in by_transformers(family)]
    with pytest.raises(AssertionError, match="another distribution"):
        assert_drawn_alike(naive, theirs, name)
    ours = [made(on_meta(family), [name], seed)[name] for seed in SEEDS]
    assert_drawn_alike(ours, theirs, name)


def test_the_comparison_finds_wrong_distributions() -> None:
    torch.manual_seed(0)
    theirs = [torch.randn(40, 40) for _ in SEEDS]
    assert_drawn_alike([torch.randn(40, 40) for _ in SEEDS], theirs, "")
    for wrong in (
        lambda: torch.randn(40, 40) * 1.1,
        lambda: torch.randn(40, 40) + 0.15,
        lambda: torch.empty(40, 40).uniform_(-(3**0.5), 3**0.5),
        lambda: torch.zeros(40, 40),
    ):
        with pytest.raises(AssertionError):
            assert_drawn_alike([wrong() for _ in SEEDS], theirs, "")
    constant = [torch.ones(3) for _ in SEEDS]
    with pytest.raises(AssertionError, match="other constants"):
        assert_drawn_alike([one * 1.0001 for one in constant], constant, "")


def test_rows_of_padding_are_zero_and_norms_are_one() -> None:
    values = made(on_meta(BY_NAME["bert"]), on_meta(BY_NAME["bert"]).state_dict())
    words = values["bert.embeddings.word_embeddings.weight"]
    assert not words[0].any() and words[1:].all(1).all()
    assert (values["bert.embeddings.LayerNorm.weight"] == 1).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_tensor_has_the_models_dtype_and_shape(dtype: Any) -> None:
    model = on_meta(BY_NAME["mixtral"], dtype)
    for name, tensor in made(model, model.state_dict()).items():
        expected = model.get_parameter(name)
        assert (tensor.dtype, tensor.shape) == (expected.dtype, expected.shape)
        assert tensor.device.type == "cpu" and tensor.is_contiguous() and not tensor.requires_grad


def test_a_head_over_a_causal_model_is_made_alone() -> None:
    config = transformers.LlamaConfig(**BY_NAME["llama"].config, num_labels=7)
    with torch.device("meta"):
        model = transformers.LlamaForSequenceClassification(config)
    initialiser = Initialiser(model, ["score.weight"])
    assert initialiser.largest_bytes == 7 * 39 * 4
    head = initialiser.whole("score.weight")
    # Six standard errors of a standard deviation of 7 * 39 normal numbers.
    assert abs(head.std() - 0.02) < 6 * 0.02 / (2 * 7 * 39) ** 0.5
    assert torch.equal(made(model, model.state_dict())["score.weight"], head)
    assert not torch.equal(Initialiser(model, ["score.weight"], seed=1).whole("score.weight"), head)


def test_tied_names_are_one_tensor() -> None:
    model = on_meta(BY_NAME["llama_tied"])
    initialiser = Initialiser(model, ["lm_head.weight", "model.embed_tokens.weight"])
    assert initialiser.order == ["model.embed_tokens.weight", "lm_head.weight"]
    first = initialiser.whole("lm_head.weight")
    assert initialiser.whole("model.embed_tokens.weight") is first
    assert not first[0].any()  # the embedding's row of padding, which the head's rule would fill


# ---- modules outside transformers


class Rows(nn.Module):
    """A module with a tensor of two parts. Its rule writes the first `parts` of them."""

    def __init__(self, parts: int) -> None:
        super().__init__()
        self.weight, self.parts = nn.Parameter(torch.empty(5, 3)), parts

    def reset_parameters(self) -> None:
        with torch.no_grad():
            for begin, end in [(0, 2), (2, 5)][: self.parts]:
                self.weight.data[begin:end] = 1.5


class Follower(nn.Module):
    """A module that is initialised from another module's values."""

    def __init__(self) -> None:
        super().__init__()
        self.leader, self.weight = nn.Linear(3, 3), nn.Parameter(torch.empty(3, 3))

    def reset_parameters(self) -> None:
        with torch.no_grad():
            self.weight.copy_(self.leader.weight)


class Table(nn.Embedding):
    """A module that replaces its parameter, as transformers 4's Marian does."""

    def reset_parameters(self) -> None:
        if hasattr(self, "weight"):
            rows = torch.arange(float(self.num_embeddings)).view(-1, 1)
            self.weight = nn.Parameter(rows.repeat(1, self.embedding_dim), requires_grad=False)


def plain() -> Any:
    return nn.ModuleDict(
        {
            "linear": nn.Linear(40, 50),
            "norm": nn.BatchNorm1d(7),
            "words": nn.Embedding(30, 40, padding_idx=2),
            "convolution": nn.Conv2d(4, 6, 3),
            "recurrent": nn.GRU(20, 10),
            "attention": nn.MultiheadAttention(24, 3),
            "block": nn.TransformerEncoderLayer(24, 3, 30),
            "rows": Rows(2),
        }
    )


def test_modules_of_torch_are_drawn_as_torch_draws_them() -> None:
    theirs = []
    with torch.random.fork_rng(devices=[]):
        for seed in SEEDS:
            torch.manual_seed(seed)
            theirs.append(plain())
            theirs[-1]["rows"].reset_parameters()  # which the constructor does not call
    with torch.device("meta"):
        model = plain()
    ours = [made(model, model.state_dict(), seed) for seed in SEEDS]
    for name in model.state_dict():
        expected = [t.state_dict()[name] for t in theirs]
        assert_drawn_alike([o[name] for o in ours], expected, name)


def test_the_values_of_a_parameter_that_a_rule_replaces_are_taken() -> None:
    with torch.device("meta"):
        model = nn.Sequential(Table(5, 3))
    before = model[0].weight
    values = Initialiser(model, ["0.weight"]).whole("0.weight")
    assert torch.equal(values, torch.arange(5.0).view(-1, 1).repeat(1, 3))
    assert model[0].weight is before and before.is_meta
    model[0].num_embeddings = 4
    with pytest.raises(modicum.UsageError, match=r"expected \[5, 3\], got \[4, 3\]") as caught:
        Initialiser(model, ["0.weight"]).whole("0.weight")
    assert caught.value.tensor == "0.weight"


@pytest.mark.parametrize("parts", [0, 1])
def test_a_tensor_that_no_rule_fills_completely_is_refused(parts: int) -> None:
    with torch.device("meta"):
        model = nn.Sequential(Rows(parts))
    with pytest.raises(modicum.UsageError, match="no rule") as caught:
        Initialiser(model, ["0.weight"])
    assert (caught.value.category, caught.value.tensor) == ("UNSUPPORTED", "0.weight")


def test_rules_that_fail_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with torch.device("meta"):
        model = nn.Sequential(Follower())
    initialiser = Initialiser(model, ["0.weight", "0.leader.weight"])
    with pytest.raises(modicum.UsageError, match="depends on the values") as caught:
        initialiser.whole("0.weight")
    assert caught.value.tensor == "0.weight"
    assert initialiser.whole("0.leader.weight").any()
    monkeypatch.setattr(Follower, "reset_parameters", lambda self: 1 / 0)
    with pytest.raises(modicum.UsageError, match="Follower.*division by zero"):
        Initialiser(model, ["0.weight"])


def test_unknown_names_are_refused() -> None:
    with torch.device("meta"):
        model = nn.Linear(2, 2)
    with pytest.raises(modicum.UsageError, match="no such tensor"):
        Initialiser(model, ["wheight"])
    with pytest.raises(modicum.UsageError, match="was not made for"):
        Initialiser(model, ["weight"]).whole("bias")
    assert Initialiser(model, []).largest_bytes == 0


# ---- PEFT


KINDS: dict[str, dict[str, Any]] = {
    "lora": {"target_modules": ["q_proj", "embed_tokens"]},
    "gaussian": {"target_modules": ["q_proj"], "init_lora_weights": "gaussian"},
    "random": {"target_modules": ["q_proj"], "init_lora_weights": False},
    "experts": {"target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]},
}


def with_adapters(model: Any, **config: Any) -> Any:
    with torch.device(next(model.parameters()).device):
        return peft.get_peft_model(model, peft.LoraConfig(r=8, **config))


@pytest.mark.parametrize("kind", KINDS)
def test_adapters_are_drawn_as_peft_draws_them(kind: str) -> None:
    family = BY_NAME["mixtral"]
    theirs = []
    with torch.random.fork_rng(devices=[]):
        for seed in SEEDS:
            torch.manual_seed(seed)
            theirs.append(
                with_adapters(family.model_class(config_of(family)), **KINDS[kind]).state_dict()
            )
    model = with_adapters(on_meta(family), **KINDS[kind])
    names = [name for name in model.state_dict() if "lora" in name]
    assert names
    ours = [made(model, names, seed) for seed in SEEDS]
    for name in names:
        assert_drawn_alike([o[name] for o in ours], [t[name] for t in theirs], name)


@pytest.mark.parametrize("name", ["llama", "gpt2", "mixtral"])
def test_a_wrapped_models_tensors_equal_the_unwrapped_ones(name: str) -> None:
    """GPT-2's rules of parent modules must find the children that PEFT has wrapped."""
    before = made(on_meta(BY_NAME[name]), on_meta(BY_NAME[name]).state_dict())
    head = {"modules_to_save": ["lm_head"]} if name == "llama" else {}
    targets = ["c_proj"] if name == "gpt2" else ["q_proj", "embed_tokens"]
    model = with_adapters(on_meta(BY_NAME[name]), target_modules=targets, **head)
    values = made(model, model.state_dict())
    infix = r"base_model\.model\.|\.base_layer|\.original_module|\.modules_to_save\.default"
    for tensor in [n for n in values if "lora" not in n]:
        assert torch.equal(values[tensor], before[re.sub(infix, "", tensor)]), tensor


class Parent(nn.Module):
    """A module that initialises a child's tensor by the child's name."""

    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(4, 4)

    def reset_parameters(self) -> None:
        for name, parameter in self.named_parameters():
            if name == "out.weight":
                nn.init.constant_(parameter, 0.25)


def test_the_rules_of_parents_see_children_without_wrappers() -> None:
    with torch.device("meta"):
        compiled, parent = Parent(), Parent()
        compiled.out = torch.compile(compiled.out)
        wrapped = peft.get_peft_model(parent, peft.LoraConfig(target_modules=["out"]))
    assert (made(compiled, ["out.weight"])["out.weight"] == 0.25).all()
    name = "base_model.model.out.base_layer.weight"
    assert (made(wrapped, [name])[name] == 0.25).all()


def test_two_adapters_get_different_values() -> None:
    model = with_adapters(on_meta(BY_NAME["llama"]), target_modules=["q_proj"])
    with torch.device("meta"):
        model.add_adapter("other", peft.LoraConfig(r=8, target_modules=["q_proj"]))
    values = made(model, [n for n in model.state_dict() if "lora_A" in n])
    first = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.default.weight"
    assert not torch.equal(values[first], values[first.replace("default", "other")])


def test_adapters_that_depend_on_the_base_are_refused_by_name() -> None:
    model = with_adapters(on_meta(BY_NAME["llama"]), target_modules=["q_proj"], use_dora=True)
    names = [n for n in model.state_dict() if "magnitude" in n]
    with pytest.raises(modicum.UsageError, match="no rule") as caught:
        Initialiser(model, names)
    assert caught.value.tensor == names[0]
    for module in model.modules():
        if hasattr(module, "peft_config"):
            module.peft_config["default"].init_lora_weights = "pissa"
    with pytest.raises(modicum.UsageError, match="pissa"):
        Initialiser(model, [names[0].replace("lora_magnitude_vector", "lora_A")])
    embedding = peft.PromptTuningConfig(num_virtual_tokens=3, task_type="CAUSAL_LM")
    prompted = peft.get_peft_model(on_meta(BY_NAME["llama"]).to_empty(device="cpu"), embedding)
    with pytest.raises(modicum.UsageError, match="no rule"):
        Initialiser(prompted, ["prompt_encoder.default.embedding.weight"])


@pytest.mark.parametrize(
    "config",
    [
        peft.IA3Config(target_modules=["q_proj"], feedforward_modules=[]),
        peft.LoHaConfig(target_modules=["q_proj"], r=2),
        peft.AdaLoraConfig(target_modules=["q_proj"], total_step=10),
    ],
    ids=lambda config: config.peft_type.value,
)
def test_other_kinds_of_adapters_have_rules_too(config: Any) -> None:
    model = peft.get_peft_model(on_meta(BY_NAME["llama"]).to_empty(device="cpu"), config)
    names = [n for n, p in model.named_parameters() if p.requires_grad]
    values = made(model, names)
    assert names and all(torch.isfinite(value).all() for value in values.values())
    for name, tensor in model.state_dict().items():
        if name in values and (tensor == tensor.flatten()[0]).all():
            assert torch.equal(values[name], tensor), name


# ---- sharded and wrapped


def wrapped_in_everything(name: str, sharded: bool = True) -> Any:
    """A model with adapters, a compiled block and a checkpointed block, sharded by FSDP2 if
    `sharded`."""
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
    from torch.distributed.fsdp import fully_shard

    model = with_adapters(on_meta(BY_NAME[name]), target_modules=["q_proj", "c_proj"])
    inner = model.base_model.model
    blocks = inner.transformer.h if name == "gpt2" else inner.model.layers
    for module in [*blocks, inner] if sharded else ():
        fully_shard(module)
    blocks[0], blocks[1] = torch.compile(blocks[0]), checkpoint_wrapper(blocks[1])
    return model


def canonical_names(model: Any) -> list[str]:
    infix = r"_orig_mod\.|_checkpoint_wrapped_module\."
    return [re.sub(infix, "", name) for name in tensors_of(model)]


@pytest.mark.parametrize("name", ["gpt2", "mixtral", "falcon_h1"])
def test_every_rank_makes_the_same_bits(name: str) -> None:
    """This holds although `fully_shard` changes the classes of modules, and although each rank has
    another global random state."""
    plain = with_adapters(on_meta(BY_NAME[name]), target_modules=["q_proj", "c_proj"])
    names = list(tensors_of(plain))
    expected = made(plain, names)
    for world in (1, 2, 3):
        for rank in range(world):
            torch.manual_seed(1000 * world + rank)
            with playing_rank(rank, world):
                model = wrapped_in_everything(name)
                local = dict(model.named_parameters())
                values = made(model, canonical_names(model))
            assert values.keys() == expected.keys()
            for tensor, value in values.items():
                assert torch.equal(value, expected[tensor]), tensor
            for path, parameter in local.items():
                whole = expected[re.sub(r"_orig_mod\.|_checkpoint_wrapped_module\.", "", path)]
                # torch.chunk returns fewer chunks if there are fewer rows than ranks.
                mine = [*whole.chunk(world), *[whole[:0]] * world][rank]
                assert parameter.to_local().shape == mine.shape, path


# ---- no side effects


def traces(model: Any) -> dict[int, Any]:
    """For each module, by its id: its class, the ids of its attributes, and of each tensor the id,
    the version, `requires_grad`, the device and the names of its attributes."""

    def of(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            flags = sorted(vars(value)) if hasattr(value, "__dict__") else []
            return id(value), value._version, value.requires_grad, value.device, str(flags)
        return id(value)

    return {
        id(module): (
            type(module),
            {name: of(value) for name, value in vars(module).items()},
            [(name, of(value)) for name, value in module._parameters.items()],
            [(name, of(value)) for name, value in module._buffers.items()],
            [(name, id(value)) for name, value in module._modules.items()],
        )
        for module in model.modules()
    }


def test_neither_the_model_nor_the_global_random_state_changes() -> None:
    for sharded in (False, True):
        with playing_rank(0, 2):
            model = wrapped_in_everything("gpt2", sharded)
            model.base_model.model.transformer.wte.weight._is_hf_initialized = True
            model.base_model.model._is_hf_initialized = True
            before = traces(model), torch.get_rng_state().tolist(), random.getstate()
            made(model, canonical_names(model))
            assert (traces(model), torch.get_rng_state().tolist(), random.getstate()) == before
    with torch.device("meta"):
        follower = Follower()
    before = traces(follower)
    with pytest.raises(modicum.UsageError):
        Initialiser(follower, ["weight"]).whole("weight")
    assert traces(follower) == before


def test_existing_values_stay() -> None:
    model = BY_NAME["gpt2"].build()
    values = {name: tensor.clone() for name, tensor in tensors_of(model).items()}
    made(model, values)
    assert all(torch.equal(tensor, values[name]) for name, tensor in tensors_of(model).items())


# ---- memory


class Block(bytearray):
    """Memory that, unlike a `bytearray`, can have a finalizer."""


class Allocator:
    """An argument `empty` of `Initialiser` that counts its calls and the bytes that it has
    allocated."""

    def __init__(self) -> None:
        self.held = 0  # bytes that are not freed yet
        self.most = 0  # the largest value of `held`
        self.calls = 0

    def __call__(self, shape: Any, *, dtype: Any) -> Any:
        block = Block(torch.Size(shape).numel() * dtype.itemsize)
        self.calls += 1
        self.held += len(block)
        self.most = max(self.most, self.held)
        weakref.finalize(block, self.give_back, len(block))
        return torch.frombuffer(block, dtype=dtype).view(shape)

    def give_back(self, nbytes: int) -> None:
        self.held -= nbytes


@pytest.mark.parametrize("name", ["gpt2", "mixtral", "mamba"])
def test_only_one_modules_tensors_exist_at_once(name: str) -> None:
    model = on_meta(BY_NAME[name])
    empty = Allocator()
    initialiser = Initialiser(model, model.state_dict(), empty=empty)
    assert empty.calls == 0
    owners: dict[str, int] = {}
    for tensor, value in model.state_dict(keep_vars=True).items():
        owner = tensor.rpartition(".")[0]
        owners[owner] = owners.get(owner, 0) + value.nbytes
    assert initialiser.largest_bytes == max(owners.values())
    for tensor in initialiser.order:
        initialiser.whole(tensor)
        assert empty.held <= initialiser.largest_bytes
    assert empty.most == initialiser.largest_bytes
    # In `order` the tensors of a module follow each other, so each tensor is allocated once. In two
    # of the models the head is tied.
    tied_count = 1 if name in ("gpt2", "mamba") else 0
    assert empty.calls == len(model.state_dict()) - tied_count
    del initialiser
    assert empty.held == 0


def test_only_the_module_of_a_missing_tensor_is_initialised() -> None:
    """The rule that makes the missing bias also makes the weight of the same Linear, which the
    checkpoint has. The Linear has 42 inputs and 42 outputs in float32."""
    empty = Allocator()
    model = on_meta(BY_NAME["bert"])
    initialiser = Initialiser(model, ["cls.predictions.transform.dense.bias"], empty=empty)
    initialiser.whole("cls.predictions.transform.dense.bias")
    assert empty.calls == 2 and initialiser.largest_bytes == (42 + 1) * 42 * 4


def test_importing_the_module_imports_no_framework_above_torch() -> None:
    script = "import sys, modicum.torch.build.initialiser; print(*sorted(sys.modules))"
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    loaded = {name.partition(".")[0] for name in done.stdout.split()}
    assert "torch" in loaded and not loaded & {"transformers", "peft", "accelerate", "deepspeed"}
