"""Under `empty_parameters` a model equals that of `from_pretrained`, except that its parameters
have no memory. Buffers are equal bit for bit, and dtypes and ties are the same.

The oracles are transformers in one process, and the same module built without the context. Two
usual ways to build an empty model are compared, too, and give wrong models. Catches: buffers left
as the constructor made them; an ignored list of names to keep in float32; an uninitialised buffer
that is accepted.
"""

import copy
import functools
import gc
import json
import os
import subprocess
import sys
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from families import ENCODER_DECODER, FAMILIES, VISION, Family  # noqa: E402
from sharding import assert_same, bits, playing_rank  # noqa: E402
from torch import nn  # noqa: E402
from torch.distributed.fsdp import fully_shard  # noqa: E402

import modicum  # noqa: E402
from modicum.torch.build.empty import empty_parameters  # noqa: E402

PACKAGE = Path(modicum.__file__).absolute().parent.parent  # not resolved: its files may be links
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


# ---- transformers models, against from_pretrained

MORE = (
    # Its initialiser computes different bits from its constructor, which runs in the model's dtype.
    Family(
        "gptj",
        "GPTJForCausalLM",
        "gptj",
        {
            "vocab_size": 101,
            "n_embd": 42,
            "n_layer": 2,
            "n_head": 3,
            "n_positions": 33,
            "rotary_dim": 6,
        },
    ),
    Family(
        "swin",
        "SwinModel",
        "swin",
        {
            "image_size": 12,
            "patch_size": 2,
            "embed_dim": 6,
            "depths": [1, 2],
            "num_heads": [1, 3],
            "window_size": 3,
        },
    ),
    Family(
        "resnet",
        "ResNetModel",
        "resnet",
        {"embedding_size": 7, "hidden_sizes": [7, 9], "depths": [1, 2]},
    ),
    Family("pegasus", "PegasusForConditionalGeneration", "pegasus", ENCODER_DECODER),
    Family("depth_pro", "Dinov2WithRegistersModel", "dinov2_with_registers", VISION),
)
# One family of each model class. Where FAMILIES has several of a class, it is the first of them: a
# dict keeps the last value of a key, and FAMILIES is reversed.
BUILT = tuple({family.cls: family for family in (*MORE, *reversed(FAMILIES))}.values())
# In float16 these models keep some tensors in float32.
KEPT_IN_FP16 = [family for family in BUILT if family.name in ("t5", "gpt_oss", "deepseek_v3")]


def config_of(family: Family) -> Any:
    return transformers.AutoConfig.for_model(family.model_type, **family.config)


def built(family: Family, dtype: Any) -> Any:
    return family.model_class._from_config(config_of(family), dtype=dtype)


@pytest.fixture(scope="module", autouse=True)
def quiet() -> None:
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()


@functools.cache
def from_pretrained(name: str, dtype: Any, place: Path) -> tuple[Any, Any]:
    """A family's model as constructed, and the model that `from_pretrained` loads after it was
    saved."""
    (family,) = (family for family in BUILT if family.name == name)
    plain = built(family, dtype)
    directory = family.write(plain, place / f"{name}-{dtype}")
    return plain, family.model_class.from_pretrained(directory, dtype=dtype)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("checkpoints")


def named(tensors: Any) -> dict[str, Any]:
    return dict(tensors(remove_duplicate=False))


def ties(model: Any) -> set[frozenset[str]]:
    """The names of each parameter; tied names are in one group."""
    names: dict[int, set[str]] = {}
    for name, parameter in named(model.named_parameters).items():
        names.setdefault(id(parameter), set()).add(name)
    return {frozenset(group) for group in names.values()}


def differences(model: nn.Module, expected: nn.Module) -> Iterator[str]:
    """How `model` differs from `expected`. Its parameters must be on meta."""
    parameters, others = named(model.named_parameters), named(expected.named_parameters)
    buffers, real = named(model.named_buffers), named(expected.named_buffers)
    if parameters.keys() != others.keys() or buffers.keys() != real.keys():
        yield "other names"
    if ties(model) != ties(expected):
        yield "other ties"
    if model.state_dict().keys() != expected.state_dict().keys():
        yield "other buffers are persistent"
    for name in parameters.keys() & others.keys():
        got, want = parameters[name], others[name]
        if not got.is_meta or (got.dtype, got.shape) != (want.dtype, want.shape):
            yield f"{name}: {got.dtype} {got.shape} on {got.device}"
    for name in buffers.keys() & real.keys():
        got, want = buffers[name], real[name]
        if got.device != want.device or (got.dtype, got.shape) != (want.dtype, want.shape):
            yield f"{name}: {got.dtype} {got.shape} on {got.device}"
        elif bits(got) != bits(want):
            yield f"{name}: {got.flatten()[:4].tolist()} instead of {want.flatten()[:4].tolist()}"


@pytest.mark.parametrize(
    ("family", "dtype"),
    [(family, dtype) for family in BUILT for dtype in (BF16, FP32)]
    + [(family, FP16) for family in KEPT_IN_FP16],
    ids=lambda value: getattr(value, "name", str(value).removeprefix("torch.")),
)
def test_a_model_equals_from_pretrained(family: Family, dtype: Any, place: Path) -> None:
    plain, expected = from_pretrained(family.name, dtype, place)
    with empty_parameters():
        model = built(family, dtype)
    assert [*differences(model, expected)] == []
    trainable = {name: p.requires_grad for name, p in plain.named_parameters()}
    assert {name: p.requires_grad for name, p in model.named_parameters()} == trainable


@pytest.mark.skipif(not hasattr(torch.Tensor, "grad_dtype"), reason="torch before 2.10")
def test_the_dtype_of_gradients_stays() -> None:
    with empty_parameters():
        parameter = nn.Parameter(torch.ones(2, dtype=BF16))
        parameter.grad_dtype = FP32
        module = nn.ParameterList([parameter])
    assert module[0].is_meta and module[0].grad_dtype == FP32


@pytest.mark.parametrize("around", [True, False], ids=["around", "within"])
def test_buffers_have_values_even_with_the_meta_device(around: bool, place: Path) -> None:
    _, expected = from_pretrained("falcon_h1", BF16, place)
    (family,) = (family for family in BUILT if family.name == "falcon_h1")
    contexts = [torch.device("meta"), empty_parameters()]
    first, second = contexts if around else reversed(contexts)
    with first, second:
        model = built(family, BF16)
    assert [*differences(model, expected)] == []


def test_a_model_within_a_module_has_equal_buffers(place: Path) -> None:
    class Wrapper(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            (family,) = (family for family in BUILT if family.name == "deepseek_v3")
            self.model = built(family, BF16)

    _, expected = from_pretrained("deepseek_v3", BF16, place)
    with empty_parameters():
        wrapper = Wrapper()
    assert [*differences(wrapper.model, expected)] == []


# ---- the usual ways, which fail


@contextmanager
def meta_device_and_memory() -> Iterator[Callable[[Any], None]]:
    """A context in which models are built on meta. Yields a function that allocates a model's
    buffers as `to_empty` does, with NaN for uninitialised memory."""

    def materialise(model: Any) -> None:
        for module in model.modules():
            for name, buffer in module._buffers.items():
                module._buffers[name] = torch.full_like(buffer, torch.nan, device="cpu")

    with torch.device("meta"):
        yield materialise


@contextmanager
def parameters_replaced() -> Iterator[Callable[[Any], None]]:
    """A context in which each parameter is replaced by a new one on meta, as by accelerate's
    `init_empty_weights`. Yields a function that does nothing."""
    register = nn.Module.register_parameter

    def register_on_meta(module: nn.Module, name: str, parameter: Any) -> None:
        register(module, name, parameter)
        if parameter is not None:
            other = nn.Parameter(parameter.to("meta"), requires_grad=parameter.requires_grad)
            module._parameters[name] = other

    nn.Module.register_parameter = register_on_meta
    try:
        yield lambda model: None
    finally:
        nn.Module.register_parameter = register


@pytest.mark.parametrize(
    ("naive", "name", "wrong"),
    [
        (meta_device_and_memory, "falcon_h1", "mup_vector: [nan"),
        (meta_device_and_memory, "llama", "inv_freq: [nan"),
        (parameters_replaced, "qwen2", "other ties"),
        (parameters_replaced, "gptj", "embed_positions: ["),
        (parameters_replaced, "deepseek_v3", "e_score_correction_bias: torch.bfloat16"),
    ],
)
def test_the_usual_ways_fail(naive: Any, name: str, wrong: str, place: Path) -> None:
    _, expected = from_pretrained(name, BF16, place)
    (family,) = (family for family in BUILT if family.name == name)
    with naive() as finish:
        model = built(family, BF16)
    finish(model)
    assert any(wrong in found for found in differences(model, expected))


# ---- any module, against its plain construction


class Buffers(nn.Module):
    """A module with a parameter and, from `make`, a buffer."""

    def __init__(self, make: Callable[[Any], Any], persistent: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(2, 3))
        self.register_buffer("table", make(self), persistent)


def written(tensor: Any, write: Callable[[Any], object]) -> Any:
    """The tensor, after a call of `write` with it."""
    write(tensor)
    return tensor


# Buffers whose values the constructor computes, from a module `m` with a parameter `weight`.
COMPUTED: dict[str, Callable[[Any], Any]] = {
    "int64": lambda m: torch.arange(5),
    "bool": lambda m: torch.ones(3, 3).tril() > 0,
    "0-dim": lambda m: torch.tensor(3),
    "float64": lambda m: torch.linspace(0, 1, 7, dtype=torch.float64),
    "float8": lambda m: torch.ones(3).to(torch.float8_e4m3fn),
    "without elements": lambda m: torch.empty(0, 3),
    "written": lambda m: written(torch.empty(3), lambda t: t.fill_(2)),
    "written as zero": lambda m: written(torch.empty(3), lambda t: t.zero_()),
    "written through data": lambda m: written(torch.empty(3), lambda t: t.data.fill_(2)),
    "written by rows": lambda m: written(
        torch.empty(2, 3), lambda t: [row.copy_(torch.arange(3)) for row in t]
    ),
    "written by index": lambda m: written(
        torch.empty(4), lambda t: [t.__setitem__(slice(i, None, 2), i) for i in (0, 1)]
    ),
    "written as output": lambda m: torch.add(torch.ones(4), 1, out=torch.empty(4)),
    "copied": lambda m: written(torch.empty(3), lambda t: t.copy_(torch.ones(3))),
    "resized": lambda m: torch.empty(0).resize_(3).fill_(2),
    "columns first": lambda m: torch.arange(6.0).reshape(2, 3).t(),
    "where the parameter is": lambda m: torch.arange(3, device=m.weight.device),
    "data where the parameter is": lambda m: torch.tensor([1, 2], device=m.weight.device),
    "moved to the parameter": lambda m: torch.arange(3).to(m.weight.device),
    "data like the parameter": lambda m: m.weight.new_tensor([1, 2]),
    "ones like the parameter": lambda m: torch.ones_like(m.weight),
    "a number like the parameter": lambda m: m.weight.new_full((2,), 7),
    "few random numbers": lambda m: torch.randn(3, generator=torch.Generator().manual_seed(1)),
    "many random numbers": lambda m: torch.rand(1 << 19, generator=torch.Generator()),
    "large": lambda m: torch.zeros(1 << 19).view(2, -1),
    "large and written": lambda m: written(torch.empty(1 << 19), lambda t: t.fill_(2)),
}


@pytest.mark.parametrize("persistent", [True, False], ids=["persistent", "not"])
@pytest.mark.parametrize("make", COMPUTED.values(), ids=COMPUTED)
def test_a_buffer_has_the_bits_of_its_constructor(make: Any, persistent: bool) -> None:
    plain = Buffers(make, persistent)
    for context in (nullcontext(), torch.device("meta")):
        with context, empty_parameters():
            module = Buffers(make, persistent)
        assert module.weight.is_meta and module.table.device.type == "cpu"
        assert_same(module.table, plain.table, "table")
        assert module.table.stride() == plain.table.stride()


# Buffers that the context does not compute. Their values are uninitialised memory, or depend on the
# values of a parameter, or are many random numbers from the global generator; or the buffer is a
# changed tensor, or a part of one, that was made like a parameter.
UNCOMPUTED: dict[str, Callable[[Any], Any]] = {
    "empty": lambda m: torch.empty(3),
    "empty of the old kind": lambda m: torch.FloatTensor(3),
    "cast": lambda m: torch.empty(3).to(BF16),
    "copied": lambda m: torch.ones(3).copy_(torch.empty(3)),
    "copied deeply": lambda m: copy.deepcopy(torch.empty(3)),
    "cloned": lambda m: torch.empty(3, 3).t().contiguous(),
    "a view": lambda m: torch.empty(6).view(2, 3)[1],
    "resized": lambda m: torch.zeros(1).resize_(5),
    "large": lambda m: torch.empty(1 << 19),
    "many random numbers": lambda m: torch.randn(1 << 19) * torch.arange(1 << 19),
    "like a parameter": lambda m: torch.empty_like(m.weight),
    "ones like a parameter, changed": lambda m: torch.ones_like(m.weight).mul_(2),
    "ones like a parameter, in part": lambda m: torch.ones_like(m.weight)[0],
    "a parameter's values": lambda m: m.weight.detach().clone(),
    "made of a parameter": lambda m: m.weight.detach() + torch.ones(3),
    "made of a parameter in place": lambda m: torch.ones(2, 3).add_(m.weight.detach()),
}


@pytest.mark.parametrize("make", UNCOMPUTED.values(), ids=UNCOMPUTED)
def test_an_uncomputed_buffer_is_refused(make: Any) -> None:
    with pytest.raises(modicum.UsageError, match="UNSUPPORTED: neither the constructor") as refused:
        with empty_parameters():
            module = nn.Sequential(nn.Linear(2, 2), nn.ModuleDict({"inner": Buffers(make)}))
    assert refused.value.tensor == "1.inner.table"
    assert refused.value.category == "UNSUPPORTED"
    # A persistent buffer is accepted, because a checkpoint has its values. Until then it is zero,
    # except where the constructor adds a parameter, which counts as zero, to ones.
    with empty_parameters():
        module = Buffers(make, persistent=True)
    assert module.table.device.type == "cpu"
    assert not module.table.any() or make is UNCOMPUTED["made of a parameter in place"]


@pytest.mark.parametrize("make", UNCOMPUTED.values(), ids=UNCOMPUTED)
def test_an_uncomputed_buffer_may_be_computed_before_the_context_ends(make: Any) -> None:
    with empty_parameters():
        module = Buffers(make)
        module.table.fill_(2)
    assert (module.table == 2).all()


def test_memory_is_never_uninitialised() -> None:
    for kib in (1, 4096):
        numel = kib * 1024 // 4
        torch.full((numel,), torch.nan)  # is freed here, so the next tensor may get this memory
        with empty_parameters():
            half = torch.empty(numel)
            half[0] = 1
            module = Buffers(lambda m: torch.empty(numel), persistent=True)
            module.register_buffer("partly", half, persistent=False)
        assert not module.table.any() and module.partly.sum() == 1


class Odd(nn.Parameter):
    """A custom parameter class, as in quantized models."""


def test_a_parameter_stays_the_same_object() -> None:
    with empty_parameters():
        held = [Odd(torch.ones(4, 6).t(), requires_grad=False)]
        held[0].keep = "this"
        one, other = nn.Module(), nn.Module()
        one.weight = other.weight = held[0]
        one.bias = nn.Parameter(torch.ones(2, dtype=torch.float64))
    assert one.weight is held[0] and other.weight is held[0]
    assert held[0].is_meta and type(held[0]) is Odd and held[0].keep == "this"
    assert held[0].shape == (6, 4) and held[0].stride() == (1, 6) and not held[0].requires_grad
    assert one.bias.dtype == torch.float64 and one.bias.requires_grad


@pytest.mark.parametrize(
    "make",
    [
        lambda: nn.Sequential(nn.Conv2d(3, 5, 3), nn.BatchNorm2d(5), nn.Dropout()),
        lambda: nn.LSTM(3, 5, num_layers=2, bidirectional=True),
        lambda: nn.MultiheadAttention(6, 2, kdim=4, vdim=5),
        lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(6, 2, 7, batch_first=True), 2),
        lambda: nn.Embedding(7, 3, padding_idx=1),
        lambda: nn.utils.parametrizations.weight_norm(nn.Linear(3, 5)),
        lambda: nn.ParameterList([nn.Parameter(torch.randn(3)), nn.Parameter(torch.rand(2))]),
        lambda: nn.Bilinear(2, 3, 4).to(BF16).requires_grad_(False),
    ],
    ids=lambda make: make.__code__.co_names[1],
)
def test_a_module_of_torch_equals_its_normal_construction(make: Callable[[], Any]) -> None:
    with torch.random.fork_rng():
        plain = make()
    with empty_parameters():
        module = make()
    assert [*differences(module, plain)] == []
    for got, want in zip(module.parameters(), plain.parameters(), strict=True):
        assert got.requires_grad == want.requires_grad and type(got) is type(want)
    if isinstance(module, nn.LSTM):
        assert {id(p) for p in module._flat_weights} == {id(p) for p in module.parameters()}


def test_a_lazy_module_stays_lazy() -> None:
    with empty_parameters():
        module = nn.LazyBatchNorm1d()
    assert nn.parameter.is_lazy(module.weight) and nn.parameter.is_lazy(module.running_mean)


# ---- existing modules, and later use


def test_existing_tensors_stay() -> None:
    (family,) = (family for family in BUILT if family.name == "t5")
    model, layer = family.build().to(FP16), nn.Linear(2, 2)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with empty_parameters():
        wrapper = nn.Sequential(model, layer, nn.Linear(2, 2))
        layer.add_module("adapter", nn.Linear(2, 2))
    assert not layer.weight.is_meta and layer.adapter.weight.is_meta and wrapper[2].weight.is_meta
    for name, tensor in model.state_dict().items():
        assert_same(tensor, before[name], name)


def test_existing_parts_of_a_new_model_keep_their_values() -> None:
    """Of a transformers model, whose initialiser runs again: a head, its copy, and a parameter."""
    (family,) = (family for family in BUILT if family.name == "llama")
    head = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    for tensor in head.state_dict().values():
        tensor.fill_(5)
    teacher = family.build()
    weight = teacher.lm_head.weight
    before = weight.detach().clone()
    with empty_parameters():
        model = built(family, BF16)
        model.score, model.other = head, copy.deepcopy(head)
        model.lm_head.weight = weight
        model.score.register_buffer("late", torch.ones(2))
    for part in (model.score, model.other):
        assert all(bool((tensor == 5).all()) for tensor in part[0].state_dict().values())
        assert all(bool((tensor == 5).all()) for tensor in part[1].state_dict().values())
    assert model.lm_head.weight is teacher.lm_head.weight and weight.dtype == before.dtype
    assert_same(weight.detach(), before, "lm_head.weight")
    assert model.model.norm.weight.is_meta and model.model.embed_tokens.weight.is_meta
    marked = [model.score[0], head[1], weight, *head.parameters(), *head.buffers()]
    assert not any(hasattr(member, "_is_hf_initialized") for member in marked)


def assert_plain() -> None:
    """Asserts that torch builds modules as if there had been no context."""
    layer = nn.Linear(2, 2)
    assert not layer.weight.is_meta and torch.zeros(2, device="meta").is_meta
    # The context gives large tensors mapped memory, which is not resizable.
    assert nn.Parameter(torch.randn(1 << 18)).untyped_storage().resizable()
    layer.table = nn.Buffer(torch.empty(2), persistent=False)  # raises no error


def test_torch_is_unchanged_afterwards() -> None:
    with empty_parameters():
        with empty_parameters():
            assert nn.Linear(2, 2).weight.is_meta
        assert nn.Linear(2, 2).weight.is_meta
    assert_plain()
    with pytest.raises(ZeroDivisionError), empty_parameters(), empty_parameters():
        Buffers(UNCOMPUTED["empty"])
        raise ZeroDivisionError
    assert_plain()
    with pytest.raises(modicum.UsageError), empty_parameters():
        kept = Buffers(UNCOMPUTED["empty"])
    assert_plain()
    assert not kept.table.any()


def test_sharding_is_refused_within_the_context_and_works_after_it() -> None:
    (family,) = (family for family in BUILT if family.name == "llama")
    with playing_rank(0, 2):
        mesh = torch.distributed.init_device_mesh("cpu", (2,))
        with pytest.raises(modicum.UsageError, match="shard the model after") as refused:
            with empty_parameters():
                fully_shard(built(family, BF16), mesh=mesh)
        assert refused.value.tensor == "model.embed_tokens.weight"
        with empty_parameters():
            model = built(family, BF16)
        fully_shard(model, mesh=mesh)
        assert {tensor.device.type for tensor in model.parameters()} == {"meta"}
        assert {tensor.device.type for tensor in model.buffers()} == {"cpu"}


def test_a_deleted_module_is_ignored() -> None:
    """The context keeps no reference to the module, so its uncomputed buffer is no error."""
    with empty_parameters():
        module = weakref.ref(Buffers(UNCOMPUTED["empty"]))
        gc.collect()
        assert module() is None


def test_nothing_above_torch_is_imported() -> None:
    code = "import sys, modicum.torch.build.empty; print(*sys.modules)"
    names = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | {"PYTHONPATH": str(PACKAGE)},
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    ).stdout.split()
    assert "torch" in names and not {"transformers", "accelerate", "deepspeed", "peft"} & {*names}


# ---- memory and time

PROBE = """
import json, sys, time
from pathlib import Path
import torch
from modicum.torch.build.empty import empty_parameters

def status_kib(name):
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(name)).split()[1])

def measured(make):
    Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM, the peak
    anon, peak, began = status_kib("RssAnon"), status_kib("VmHWM"), time.process_time()
    with empty_parameters():
        module = make()
    seconds = time.process_time() - began
    assert all(parameter.is_meta for parameter in module.parameters())
    assert not any(buffer.is_meta for buffer in module.buffers())
    mib = max(status_kib("RssAnon") - anon, status_kib("VmHWM") - peak) / 1024
    return {"cpu_s": seconds, "mib": mib, "numel": sum(p.numel() for p in module.parameters())}
"""


def probe(code: str) -> Any:
    """The JSON that PROBE + `code` prints in a new process."""
    done = subprocess.run(
        [sys.executable, "-c", PROBE + code],
        env=os.environ | {"PYTHONPATH": str(PACKAGE)},
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_a_32b_model_takes_neither_memory_nor_time() -> None:
    """The parameters would need 65.5 GB in bfloat16. The bounds are 50 MiB, and one second of CPU
    time in the fastest of three runs, since other programs may slow the machine down."""
    runs = probe("""
from transformers import Qwen3Config, Qwen3ForCausalLM
config = Qwen3Config(
    hidden_size=5120, num_hidden_layers=64, num_attention_heads=64, num_key_value_heads=8,
    intermediate_size=25600, vocab_size=151936, head_dim=128, tie_word_embeddings=False,
)
make = lambda: Qwen3ForCausalLM._from_config(config, dtype=torch.bfloat16)
print(json.dumps([measured(make) for _ in range(3)]))
""")
    assert runs[0]["numel"] == 32_762_123_264
    assert max(run["mib"] for run in runs) < 50
    assert min(run["cpu_s"] for run in runs) < 1


def test_large_tensors_take_no_memory() -> None:
    """Four parameters come from different functions of torch, one from a computation, and `huge`
    has 16 TiB. The buffer has 1 GiB."""
    run = probe("""
def make(rows):
    module = torch.nn.Module()
    for i, begin in enumerate((torch.zeros, torch.empty, torch.randn, torch.rand)):
        module.register_parameter(f"p{i}", torch.nn.Parameter(begin(rows, 1 << 14)))
    module.scaled = torch.nn.Parameter(torch.randn(rows, 1 << 14) / torch.arange(1, 16385))
    module.huge = torch.nn.Parameter(torch.empty(rows, 1 << 28))
    module.cache = torch.nn.Buffer(torch.zeros(rows, 1 << 14), persistent=False)
    return module
measured(lambda: make(64))  # so that lazy imports of torch are not measured below
print(json.dumps(measured(lambda: make(1 << 14))))
""")
    # p0 to p3 and `scaled`: 2^14 x 2^14; `huge`: 2^14 x 2^28.
    assert run["numel"] == (5 << 28) + (1 << 42)
    assert run["mib"] < 50
