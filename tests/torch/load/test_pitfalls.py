"""Known errors of loaders of sharded models. Most tests also contain a minimal loader with the
error, and show that it gives another result than `modicum.torch.load`:

     1  uninitialised memory is used as values
     4  each rank shards the stored tensors and converts its shard
     6  a tie is lost, and each of the two parameters has a part of the gradient
     8  buffers are treated as shards, or as parameters
     9  rows are distributed evenly where torch gives the first ranks more of them
    10  a tensor gets the file's dtype instead of the model's; a cast truncates

Errors that concern names are in `test_names.py`.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from program import write_checkpoint  # noqa: E402  (after torch is known to be there)
from sharding import Cut, assert_same, playing_new_rank  # noqa: E402
from torch import nn  # noqa: E402
from torch.distributed.fsdp import fully_shard  # noqa: E402
from torch_front import (  # noqa: E402
    BY_NAME,
    WORLDS,
    alone,
    assert_holds,
    checkpoint_of,
    chunk,
    config_of,
    differs,
    empty,
    from_pretrained,
    load,
    local,
    local_part,
    parameters_of,
    shard,
    stored_in,
)

import modicum  # noqa: E402
from modicum.torch import LoadRules, empty_parameters  # noqa: E402

TWO = Cut("fsdp2", (2,))
TOKENS = torch.arange(3, 14).reshape(1, 11)


def on_meta(name: str) -> Any:
    """The model, built on meta as users usually do."""
    with torch.device("meta"):
        return BY_NAME[name].model_class._from_config(
            config_of(name), dtype=getattr(torch, BY_NAME[name].dtype)
        )


def built(cls: type[nn.Module]) -> Any:
    """A module of the class whose parameters are on meta."""
    with empty_parameters():
        return cls()


# ---- 1


@contextmanager
def uninitialised_as_nan() -> Iterator[None]:
    """A context with torch's deterministic mode, in which torch fills uninitialised memory with NaN
    or the largest integer."""
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def materialised(name: str, whole: Any, cut: Cut, rank: int) -> Any:
    """A model by a loader that allocates all tensors and fills only the parameters."""
    model = shard(on_meta(name), cut).to_empty(device="cpu")
    for path, parameter in parameters_of(model).items():
        local(parameter).copy_(local_part(path, parameters_of(whole)[path].detach(), cut, rank))
    return model


@pytest.mark.parametrize("rank", range(2))
def test_1_no_tensor_is_uninitialised_memory(rank: int) -> None:
    whole = from_pretrained("llama")
    with playing_new_rank(rank, 2), uninitialised_as_nan():
        model = shard(empty("llama"), TWO)
        load(model, checkpoint_of("llama"), check=True)
        assert_holds(model, whole, TWO, rank)
        with pytest.raises(AssertionError, match="inv_freq of rank"):
            assert_holds(materialised("llama", whole, TWO, rank), whole, TWO, rank)


# ---- 4


def rotary(heads: int) -> Callable[[Any], Any]:
    """A conversion of the rows of each head: from pairs of neighbours to the first rows of all
    pairs, followed by the second ones."""
    return lambda w: w.view(heads, -1, 2, w.shape[-1]).transpose(1, 2).reshape(w.shape)


def stacked(shape: Any, *parts: Any) -> Any:
    """Stacks the experts' gates, and the experts' ups, and joins both along dim 1. `parts`: the
    gates, then the ups."""
    half = len(parts) // 2
    return torch.cat([torch.stack(parts[:half]), torch.stack(parts[half:])], 1)


HYBRID = "model.layers.0.linear_attn."
ATTENTION = "model.vision_tower.layers.0.attn."
# By conversion: a family, one of its parameters, the stored tensors of which it is made, a function
# that converts them to a parameter of a given shape, and the number of ranks.
CONVERSIONS: dict[str, tuple[str, str, list[str], Callable[..., Any], int]] = {
    "Concatenate": (
        "olmo_hybrid", HYBRID + "conv1d.weight",
        [f"{HYBRID}{kind}_conv1d.weight" for kind in "qkv"], lambda shape, *w: torch.cat(w), 2),
    "Concatenate_alike": (
        "olmo_hybrid_alike", HYBRID + "conv1d.weight",
        [f"{HYBRID}{kind}_conv1d.weight" for kind in "qkv"], lambda shape, *w: torch.cat(w), 3),
    "Chunk": (
        "nomic_bert", "layers.0.self_attn.k_proj.weight",
        ["encoder.layers.0.attn.Wqkv.weight"], lambda shape, w: w.chunk(3)[1], 2),
    "Chunk_in_four": (
        "hrm_text", "model.L_module.layers.0.self_attn.q_proj.weight",
        ["model.L_module.layers.0.attn.gqkv_proj.weight"], lambda shape, w: w.chunk(4)[1], 3),
    "PermuteForRope": (
        "mistral_large4", "model.vision_tower.transformer.layers.0.attention.k_proj.weight",
        ["vision_encoder.transformer.layers.0.attention.wk.weight"],
        lambda shape, w: rotary(7)(w), 3),
    "Chunk_PermuteForRope": (
        "kimi_k25", ATTENTION + "q_proj.weight",
        ["vision_tower.encoder.blocks.0.wqkv.weight"],
        lambda shape, w: rotary(3)(w.chunk(3)[0]), 2),
    "Interleave": (
        "inkling", "model.language_model.layers.0.mlp.gate_proj.weight",
        ["model.llm.layers.0.mlp.w13_dn.weight"], lambda shape, w: w[0::2], 2),
    "Transpose": (
        "ernie4_5_vl_moe", "model.language_model.layers.1.mlp.text_moe.gate.weight",
        ["model.layers.1.mlp.gate.weight"], lambda shape, w: w.t(), 2),
    "Transpose_square": (
        "qwen3_vl_moe_square", "model.language_model.layers.0.mlp.experts.gate_up_proj",
        ["model.language_model.layers.0.mlp.experts.gate_up_proj"],
        lambda shape, w: w if w.shape == shape else w.transpose(1, 2), 2),
    "MergeModulelist_Concatenate": (
        "mixtral", "model.layers.0.mlp.experts.gate_up_proj",
        [f"model.layers.0.block_sparse_moe.experts.{e}.{w}.weight"
         for w in ("w1", "w3") for e in range(11)], stacked, 2),
}  # fmt: skip


@pytest.mark.parametrize("conversion", CONVERSIONS)
def test_4_tensors_are_converted_before_they_are_sharded(conversion: str) -> None:
    name, target, sources, convert, world = CONVERSIONS[conversion]
    directory = checkpoint_of(name)
    stored = [stored_in(directory)[source] for source in sources]
    shape = from_pretrained(name).get_parameter(target).shape
    naive_is_wrong = []  # by rank
    for rank in range(world):
        with playing_new_rank(rank, world):
            model = shard(empty(name), Cut("fsdp2", (world,)))
            load(model, directory)
            expected = chunk(convert(shape, *stored), world, rank)
            assert_same(local(model.get_parameter(target)), expected, target)
            naive = convert(shape, *[chunk(source, world, rank) for source in stored])
            naive_is_wrong.append(differs(naive, expected))
    assert any(naive_is_wrong)


# ---- 6


def assert_tied(model: Any) -> None:
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    assert head.weight is embedding.weight
    assert local(head.weight).data_ptr() == local(embedding.weight).data_ptr()


def gradients(model: Any) -> dict[str, Any]:
    """This rank's gradients after one backward pass."""
    model.train()
    with torch.enable_grad():
        model(input_ids=TOKENS, labels=TOKENS).loss.backward()
    return {n: local(p.grad) for n, p in parameters_of(model).items()}


def assert_gradients(model: Any, whole: Any) -> None:
    expected = gradients(whole)
    for name, gradient in gradients(model).items():
        assert_same(gradient, expected[name], name)


def assigned(name: str) -> Any:
    """A model by a loader with `assign=True`, which makes a parameter of each name of a tie."""
    whole = BY_NAME[name].model_class.from_pretrained(checkpoint_of(name))
    model = on_meta(name)
    model.load_state_dict(whole.state_dict(), assign=True)
    for path, buffer in whole.named_buffers():
        module, _, leaf = path.rpartition(".")
        setattr(model.get_submodule(module), leaf, buffer)
    return model


@pytest.mark.parametrize("name", ["qwen2", "llama_tied_both_stored", "llama_tied_head_stored"])
@pytest.mark.parametrize("layout", ["none", "fsdp2"])
def test_6_ties_stay_ties(name: str, layout: str) -> None:
    directory = checkpoint_of(name)
    with alone():
        model = shard(empty(name), Cut(layout, (1,)))
        load(model, directory)
    assert_tied(model)
    with pytest.raises(AssertionError):
        assert_tied(on_meta(name).to_empty(device="cpu"))
    with pytest.raises(AssertionError):
        assert_tied(assigned(name))


def test_6_a_broken_tie_is_restored() -> None:
    """The load restores a tie that the model itself declares. After `fully_shard` it cannot, and
    refuses the model."""
    whole = from_pretrained("llama_tied")
    with playing_new_rank(0, 2):
        for layout in ("none", "fsdp2"):
            model = empty("llama_tied")
            model.lm_head.weight = nn.Parameter(torch.empty_like(model.lm_head.weight))
            shard(model, Cut(layout, (2,)))
            if layout == "fsdp2":
                with pytest.raises(modicum.UsageError, match="tie them before") as raised:
                    load(model, checkpoint_of("llama_tied"))
                assert raised.value.tensor == "lm_head.weight"
            else:
                load(model, checkpoint_of("llama_tied"))
                assert_tied(model)
                assert_holds(model, whole, Cut(layout, (2,)), 0)


@pytest.mark.parametrize("layout", ["none", "fsdp2"])
def test_6_the_gradient_of_a_tie_is_that_of_both_uses(layout: str) -> None:
    whole = BY_NAME["qwen2"].model_class.from_pretrained(checkpoint_of("qwen2"))
    with alone():
        model = shard(empty("qwen2"), Cut(layout, (1,)))
        load(model, checkpoint_of("qwen2"))
        assert_gradients(model, whole)
    whole.zero_grad()
    with pytest.raises(AssertionError, match="embed_tokens"):
        assert_gradients(assigned("qwen2"), whole)


# ---- 8


class Buffers(nn.Module):
    """A model with a parameter in bfloat16, persistent buffers of several dtypes and shapes, and a
    non-persistent buffer that the constructor computes."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(5, 3, dtype=torch.bfloat16))
        self.register_buffer("steps", torch.tensor(0))
        self.register_buffer("index", torch.zeros(7, dtype=torch.int64))
        self.register_buffer("mask", torch.zeros(2, 3, dtype=torch.bool))
        self.register_buffer("scale", torch.ones(3, dtype=torch.float32))
        self.register_buffer("empty", torch.zeros(0))
        self.register_buffer("table", torch.arange(4) / 3, persistent=False)

    @staticmethod
    def stored() -> dict[str, Any]:
        return {
            "weight": torch.arange(15).reshape(5, 3).bfloat16(),
            "steps": torch.tensor(2**53 + 1),
            "index": torch.arange(7) - 3,
            "mask": torch.tensor([[True, False, True], [False, True, True]]),
            "scale": torch.tensor([1 / 3, -1e-30, 7e30]),
            "empty": torch.zeros(0),
        }


def assert_buffers(model: Any) -> None:
    for name, tensor in Buffers.stored().items():
        if name != "weight":
            assert_same(model.get_buffer(name), tensor, name)
    assert_same(model.table, torch.arange(4) / 3, "table")


def all_are_shards(model: Any, stored: dict[str, Any]) -> None:
    """A loader that expects every tensor to be sharded."""
    for name, tensor in model.state_dict().items():
        part = chunk(stored[name], tensor.device_mesh.size(), tensor.device_mesh.get_local_rank())
        tensor.to_local().copy_(part)


def all_are_of_one_dtype(model: Any, stored: dict[str, Any]) -> None:
    """A loader that casts buffers to the dtype of the parameters."""
    model.load_state_dict(stored)
    model.to(torch.bfloat16)


@pytest.mark.parametrize("world", WORLDS)
def test_8_persistent_buffers_are_loaded_whole(world: int, tmp_path: Path) -> None:
    stored = Buffers.stored()
    directory = write_checkpoint(tmp_path / "model", stored, files=2)
    for rank in range(world):
        with playing_new_rank(rank, world):
            model = fully_shard(built(Buffers))
            load(model, directory, check=True)
            assert_buffers(model)
            assert_same(local(model.weight), chunk(stored["weight"], world, rank), "weight")
            with pytest.raises(AttributeError, match="device_mesh"):
                all_are_shards(fully_shard(Buffers()), stored)
    naive = Buffers()
    all_are_of_one_dtype(naive, stored)
    with pytest.raises(AssertionError, match="scale"):
        assert_buffers(naive)


class PersistentBuffers(Buffers):
    """The model without its non-persistent buffer."""

    def __init__(self) -> None:
        super().__init__()
        del self.table


def test_8_buffers_that_a_file_holds_may_be_on_meta(tmp_path: Path) -> None:
    stored = Buffers.stored()
    with torch.device("meta"):
        model = PersistentBuffers()
    load(model, write_checkpoint(tmp_path / "model", stored))
    for name, tensor in model.state_dict().items():
        assert_same(tensor, stored[name], name)


# ---- 9

ROWS = {"none": 0, "one": 1, "two": 2, "three": 3, "four": 4}


class Small(nn.Module):
    """A model with matrices of zero to four rows, a vector of one element, and a parameter without
    dims."""

    def __init__(self) -> None:
        super().__init__()
        for name, rows in ROWS.items():
            setattr(self, name, nn.Parameter(torch.zeros(rows, 3)))
        self.line = nn.Parameter(torch.zeros(1))
        self.scale = nn.Parameter(torch.zeros(()))


def evenly(whole: Any, world: int, rank: int) -> Any:
    """A distribution that gives one more row to each of the first ranks."""
    each, more = divmod(len(whole), world)
    begin = rank * each + min(rank, more)
    return whole[begin : begin + each + (rank < more)]


def small_values() -> dict[str, Any]:
    maker = torch.Generator().manual_seed(9)
    return {n: torch.randn(t.shape, generator=maker) for n, t in Small().state_dict().items()}


@pytest.mark.parametrize("world", [2, 3])
def test_9_few_rows_are_sharded_as_torch_shards_them(world: int, tmp_path: Path) -> None:
    stored = small_values()
    directory = write_checkpoint(tmp_path / "model", stored)
    naive_is_wrong = []
    for rank in range(world):
        with playing_new_rank(rank, world):
            model = built(Small)
            fully_shard(model, ignored_params={model.scale})
            load(model, directory, check=True)
            assert_same(model.scale.detach(), stored["scale"], "scale")
            for name in (*ROWS, "line"):
                expected = chunk(stored[name], world, rank)
                assert_same(local(model.get_parameter(name)), expected, name)
                naive_is_wrong.append(differs(evenly(stored[name], world, rank), expected))
    # Of 4 rows on 3 ranks torch gives 2, 2 and 0; on 2 ranks both distributions are the same.
    assert any(naive_is_wrong) == (world == 3)


def test_9_a_sharded_tensor_without_dims_is_refused_by_name() -> None:
    with playing_new_rank(0, 2), pytest.raises(ValueError, match="scale"):
        fully_shard(built(Small))


# ---- 10

# Values that lie halfway between two values of bfloat16 or float16; values that have too many bits
# for these dtypes, or are too large or too small for them; infinities, and -0.
HARD = torch.tensor(
    [1 + 2**-8, 1 + 3 * 2**-8, -(1 + 2**-8), 1 + 2**-8 + 2**-23, 1 / 3, 3.4028235e38, 1e-40,
     float("inf"), float("-inf"), -0.0, 65519.0, 65520.0, 2**-25, 3 * 2**-25]
)  # fmt: skip


class Kept(nn.Module):
    """A model of two layers, each an FSDP2 unit. The test keeps the second, `norm`, in float32."""

    dtype = torch.bfloat16

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.norm = nn.Module(), nn.Module()
        for module in (self.layer, self.norm):
            module.weight = nn.Parameter(torch.zeros(len(HARD), dtype=self.dtype))


class KeptHalf(Kept):
    dtype = torch.float16


class KeptWide(Kept):
    dtype = torch.float32


def cut_off(values: Any, dtype: Any) -> Any:
    """A cast from float32 to bfloat16 that drops the lower 16 bits instead of rounding."""
    return (values.view(torch.int32) >> 16).to(torch.int16).view(dtype)


@pytest.mark.parametrize("cls", [Kept, KeptHalf, KeptWide])
def test_10_values_have_the_models_dtype_and_torchs_rounding(cls: Any, tmp_path: Path) -> None:
    stored = {"layer.weight": HARD, "norm.weight": HARD.clone()}
    directory = write_checkpoint(tmp_path / "model", stored)
    for rank in range(2):
        with playing_new_rank(rank, 2):
            model = built(cls)
            for module in (model.layer, model.norm, model):
                fully_shard(module)
            load(model, directory, rules=LoadRules(keep_fp32=r"^norm\."))
            expected = chunk(HARD.to(cls.dtype), 2, rank)
            assert_same(local(model.layer.weight), expected, "layer")
            assert_same(local(model.norm.weight), chunk(HARD, 2, rank), "norm")
    # This loader gives the layer the file's dtype.
    assigning = cls()
    assigning.load_state_dict(stored, assign=True)
    assert differs(assigning.layer.weight, HARD.to(cls.dtype)) == (cls is not KeptWide)
    # This loader does not keep the norm in float32.
    ignoring = cls()
    ignoring.load_state_dict(stored)
    assert differs(ignoring.norm.weight, HARD) == (cls is not KeptWide)
    if cls is Kept:
        assert differs(cut_off(HARD, cls.dtype), HARD.to(cls.dtype))


def test_10_a_wider_dtype_has_the_same_numbers(tmp_path: Path) -> None:
    values = HARD.bfloat16()
    directory = write_checkpoint(
        tmp_path / "model", {"layer.weight": values, "norm.weight": values.half()}
    )
    with playing_new_rank(0, 1):
        model = fully_shard(built(KeptWide))
        load(model, directory)
    assert_same(local(model.layer.weight), values.float(), "layer")
    assert_same(local(model.norm.weight), values.half().float(), "norm")
