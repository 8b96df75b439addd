"""Models allocated by `to_empty`, as is usual after `fully_shard` on meta. Tensors that no file
holds get the values of `from_pretrained`, or an error or a warning names them. Buffers that the
caller has set are unchanged.

The oracle is `from_pretrained`. Catches: a buffer left as `to_empty` made it; a buffer restored
although the caller set it; a tensor that the file lacks and that counts as loaded; uninitialised
memory without a warning.
"""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from safetensors.torch import save_file  # noqa: E402  (after torch is known to be there)
from sharding import Cut, bits, playing_new_rank  # noqa: E402
from torch import nn  # noqa: E402
from torch_front import (  # noqa: E402
    BY_NAME,
    assert_holds,
    checkpoint_of,
    config_of,
    empty,
    from_pretrained,
    load,
    shard,
)

from modicum.errors import UsageError  # noqa: E402
from modicum.torch import LoadRules  # noqa: E402

TOKENS = torch.arange(3, 14).reshape(1, 11)
WHOLE, TWO = Cut("none", (1,)), Cut("fsdp2", (2,))
# These models have as non-persistent buffers rotary tables (for text, for two kinds of layers, for
# three axes, for images), position ids, and the scale of an embedding.
FAMILIES = ("llama", "gemma3_text", "qwen2_5_vl", "clip", "jina_embeddings_v3", "nomic_bert")
# Parameters of a scaled rotary table.
SCALED = {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0,
          "high_freq_factor": 4.0, "original_max_position_embeddings": 8}  # fmt: skip


@contextmanager
def warned() -> Iterator[list[str]]:
    """Collects the warnings about tensors that no file holds. The list is filled when the context
    ends."""
    lines: list[str] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield lines
    lines += [str(w.message) for w in caught if "no file holds" in str(w.message)]


def emptied(model: Any) -> Any:
    """Allocates the model by `to_empty` in torch's deterministic mode, in which torch fills the
    memory with NaN or the largest integer."""
    torch.use_deterministic_algorithms(True)
    try:
        return model.to_empty(device="cpu")
    finally:
        torch.use_deterministic_algorithms(False)


def on_meta(name: str, cls: Any = None, **changes: Any) -> Any:
    """A family's model on meta, buffers included. `changes`: members of its configuration."""
    config = config_of(name)
    for field, value in changes.items():
        setattr(config, field, value)
    with torch.device("meta"):
        cls = cls or BY_NAME[name].model_class
        return cls._from_config(config, dtype=getattr(torch, BY_NAME[name].dtype))


def inv_freq_of(model: Any) -> Any:
    return model.model.rotary_emb.inv_freq


# ---- restored


@pytest.mark.parametrize("name", FAMILIES)
def test_a_load_restores_buffers_after_to_empty(name: str) -> None:
    whole = from_pretrained(name)
    model = emptied(on_meta(name))
    with warned() as lines:
        load(model, checkpoint_of(name))
    assert_holds(model, whole, WHOLE, 0)
    (line,) = lines
    assert "restored" in line and "to_empty" in line
    with warned() as lines:
        load(model, checkpoint_of(name))
    assert not lines


def test_the_default_device_of_the_program_does_not_matter() -> None:
    """The rotary table of a cast model counts as never written."""
    model = from_pretrained("llama").to(torch.bfloat16).float()
    with torch.device("meta"):
        load(model, checkpoint_of("llama"))
    assert not any(buffer.is_meta for buffer in model.buffers())


@pytest.mark.parametrize("name", ("llama", "gemma3_text", "qwen2_5_vl"))
@pytest.mark.parametrize("rank", range(2))
def test_each_rank_of_fsdp2_restores_buffers(name: str, rank: int) -> None:
    whole = from_pretrained(name)
    with playing_new_rank(rank, 2):
        model = emptied(shard(on_meta(name), TWO))
        with warned() as lines:
            load(model, checkpoint_of(name))
        assert_holds(model, whole, TWO, rank)
        assert len(lines) == (1 if rank == 0 else 0), "only rank 0 warns"


@pytest.mark.parametrize("name, changes", [("llama", {}), ("llama", {"rope_parameters": SCALED}),
                                           ("gemma3_text", {})])  # fmt: skip
def test_logits_are_those_of_from_pretrained(name: str, changes: dict[str, Any]) -> None:
    cls, source = BY_NAME[name].model_class, checkpoint_of(name)
    whole = cls.from_pretrained(source, **changes).eval()
    model = emptied(on_meta(name, **changes)).eval()
    with warned():
        load(model, source)
    with torch.no_grad():
        assert torch.equal(model(TOKENS).logits, whole(TOKENS).logits)


def test_tensors_that_the_file_lacks_count_as_missing_after_to_empty() -> None:
    cls = transformers.LlamaForSequenceClassification
    with pytest.raises(UsageError, match="lacks") as refused:
        load(
            emptied(on_meta("llama", cls)),
            checkpoint_of("llama"),
            rules=LoadRules(unexpected="ignore"),
        )
    assert refused.value.tensor == "score.weight"
    made, expected = emptied(on_meta("llama", cls)), empty("llama", cls=cls)
    with warned():
        for model in (made, expected):
            load(
                model,
                checkpoint_of("llama"),
                rules=LoadRules(missing="init", unexpected="ignore"),
            )
    assert bits(made.score.weight.detach()) == bits(expected.score.weight.detach())


# ---- left alone


def customised(model: Any) -> Any:
    """The model with a new buffer `inv_freq` that has twice the values."""
    model.model.rotary_emb.inv_freq = nn.Buffer(inv_freq_of(model) * 2, persistent=False)
    return model


@pytest.mark.parametrize("built", ("empty", "loaded", "real", "in place"))
def test_a_buffer_set_by_the_caller_stays(built: str) -> None:
    """The caller replaces the buffer of a model with parameters on meta, of one that was loaded
    before, or of one with values; or writes to the memory that `to_empty` has allocated."""
    source = checkpoint_of("llama")
    model = empty("llama") if built != "real" else BY_NAME["llama"].build()
    if built == "loaded":
        load(model, source)
    if built == "in place":
        model = emptied(on_meta("llama"))
        with torch.no_grad():
            inv_freq_of(model).fill_(0.25)
    else:
        customised(model)
    before = bits(inv_freq_of(model))
    with warned() as lines:
        load(model, source)
    assert bits(inv_freq_of(model)) == before
    # Parameters on meta, or a write in place, show that `to_empty` did not leave this value in the
    # buffer, so there is no warning. (Warnings about the buffer original_inv_freq are ignored.)
    is_certain = built in ("empty", "in place")
    lines = [line for line in lines if "original" not in line]
    assert len(lines) == (0 if is_certain else 1)
    assert all("left alone" in line and "rotary_emb.inv_freq" in line for line in lines)


@pytest.mark.parametrize("buffers", ("keep", "restore"))
def test_the_argument_buffers_keeps_or_restores_a_buffer(buffers: str) -> None:
    source = checkpoint_of("llama")
    model = customised(BY_NAME["llama"].model_class.from_pretrained(source))
    kept = bits(inv_freq_of(model))
    expected = kept if buffers == "keep" else bits(inv_freq_of(from_pretrained("llama")))
    with warned() as lines:
        load(model, source, rules=LoadRules(buffers=buffers))
    assert bits(inv_freq_of(model)) == expected
    assert len(lines) == (0 if buffers == "keep" else 1)


def test_an_unknown_value_of_buffers_is_refused() -> None:
    with pytest.raises(UsageError, match="buffers"):
        load(empty("llama"), checkpoint_of("llama"), rules=LoadRules(buffers="drop"))


# ---- modules without a rule


class Plain(nn.Module):
    """A module with a buffer that no rule makes."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 5)
        self.head = nn.Linear(5, 2)
        self.register_buffer("table", torch.arange(7) / 3, persistent=False)


@pytest.mark.parametrize("is_emptied", (False, True))
def test_tensors_with_no_rule_are_named(tmp_path: Any, is_emptied: bool) -> None:
    """After `to_empty` a warning names the buffer that no rule makes, and the parameters that the
    file lacks. Without `to_empty` all of them have their values."""
    save_file(dict(Plain().linear.state_dict(prefix="linear.")), tmp_path / "some.safetensors")
    if is_emptied:
        with torch.device("meta"):
            model = Plain()
        model = emptied(model)
    else:
        model = Plain()
    with warned() as lines:
        load(model, tmp_path / "some.safetensors")
    named = [line.rpartition(": ")[2] for line in lines]
    assert named == (["head.bias, head.weight, table"] if is_emptied else [])
