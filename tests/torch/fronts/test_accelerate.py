"""A script of accelerate gives the same results with and without `modicum.torch.accelerate.loading`
around it. On four ranks FSDP2's units, the loaded values, the optimizer's groups, the losses and
the trained parameters are compared bit for bit.

The oracle is accelerate's `Accelerator` with FSDP2. Catches: a model that is sharded in other
units; values that are not rounded where accelerate rounds them; an optimizer's parameters that are
matched by address; adapters that lose their values; buffers moved to meta.
"""

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")
pytest.importorskip("accelerate")
pytest.importorskip("peft")

from ranks import Ranks

BF16 = {"mixed_precision": "bf16"}
# With this option accelerate reads the model on rank 0 and sends it to the other ranks.
SENT = {"cpu_ram_efficient_loading": True}


@pytest.fixture(scope="module")
def models(four: Ranks, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The directories of tiny models in Hugging Face's format. The world size, 4, divides few of
    their dims, and not the number of experts of qwen3_moe."""
    folder = tmp_path_factory.mktemp("models")
    tied = {"family": "qwen3", "config": {"tie_word_embeddings": True}}
    wanted: dict[str, dict[str, Any]] = {
        "qwen3": tied | {"dtype": "bfloat16"},
        "qwen3-fp32": tied,
        "llama": {"family": "llama", "dtype": "bfloat16"},
        "qwen3_moe": {"family": "qwen3_moe", "config": {"num_experts": 11}},
        "deepseek_v3": {"family": "deepseek_v3"},
        "gpt2": {"family": "gpt2"},
        "llava": {"family": "llava"},
    }
    for name, facts in wanted.items():
        four.ask("write", directory=str(folder / name), **facts)
    return {name: folder / name for name in wanted}


def assert_same(four: Ranks, theirs: dict[str, Any], ours: dict[str, Any]) -> list[dict[str, Any]]:
    """Runs the script without Modicum with the options `theirs`, and with Modicum with the options
    `ours`, and compares the answers. Returns Modicum's answers, one for each rank."""
    expected = four.ask("accelerated", by="accelerate", **theirs)
    got = four.ask("accelerated", by="modicum", **ours)
    for rank, (mine, oracle) in enumerate(zip(got, expected, strict=True)):
        for what in ("units", "bound", "before", "numbers", "after"):
            assert mine[what] == oracle[what], f"rank {rank}: {what!r} differs from accelerate's"
    first = expected[0]
    trained = [name for name, was in first["before"].items() if first["after"][name] != was]
    assert trained, "the training has changed no tensor"
    return got


@pytest.mark.parametrize(
    ("model", "how"),
    [
        pytest.param("qwen3", BF16 | SENT, id="dense, tied"),
        pytest.param("qwen3", BF16, id="every rank loads", marks=pytest.mark.soak),
        pytest.param("llama", SENT, id="no mixed precision", marks=pytest.mark.soak),
        pytest.param("qwen3-fp32", BF16 | SENT, id="rounded and upcast", marks=pytest.mark.soak),
        pytest.param("qwen3-fp32", BF16 | {"dtype": "float32"}, id="float32"),
        pytest.param(
            "qwen3",
            BF16 | SENT | {"grouped": True},
            id="three groups, frozen, tied",
            marks=pytest.mark.soak,
        ),
        pytest.param(
            "qwen3_moe",
            BF16 | SENT | {"grouped": True, "order": "scheduler optimizer model"},
            id="experts, another order",
        ),
        pytest.param("llama", BF16 | SENT | {"replicas": 2}, id="replicas"),
        pytest.param("llama", BF16 | SENT | {"offload": True}, id="offloaded"),
        pytest.param(
            "qwen3",
            BF16 | SENT | {"checkpointing": True},
            id="checkpointing",
            marks=pytest.mark.soak,
        ),
        pytest.param(
            "llama", BF16 | {"auto_wrap_policy": "no_wrap"}, id="one unit", marks=pytest.mark.soak
        ),
        pytest.param(
            "llama",
            {"ignored_modules": r"model\.layers\.0\.mlp"},
            id="ignored by name",
            marks=pytest.mark.soak,
        ),
        pytest.param("gpt2", {"dtype": None} | SENT, id="GPT-2"),
        pytest.param(
            "llava",
            BF16
            | SENT
            | {"cls": "AutoModelForImageTextToText", "dtype": None}
            | {"transformer_cls_names_to_wrap": ["LlamaDecoderLayer", "CLIPEncoderLayer"]},
            id="vision and language",
        ),
    ],
)
def test_trains_as_accelerate_does(
    four: Ranks, models: dict[str, Path], model: str, how: dict[str, Any]
) -> None:
    how = {"directory": str(models[model])} | how
    got = assert_same(four, how, how)
    # Each rank has the report of all four ranks.
    assert [len(answer["report"]["ranks"]) for answer in got] == [4] * 4


def test_persistent_buffers_are_loaded(four: Ranks, models: dict[str, Path]) -> None:
    """accelerate cannot broadcast persistent buffers, so the expected model is loaded by every
    rank."""
    how = {"directory": str(models["deepseek_v3"]), "dtype": None} | BF16
    assert_same(four, how, how | SENT)


@pytest.mark.parametrize(
    ("how", "adapters"),
    [
        pytest.param(SENT, {}, id="sent by rank 0"),
        pytest.param({}, {"seed": 5}, id="the same seed on each rank", marks=pytest.mark.soak),
        pytest.param(SENT, {"modules_to_save": ["lm_head"]}, id="with a head"),
        pytest.param(SENT, {"use_dora": True}, id="with DoRA's magnitudes"),
        pytest.param(
            {},
            {"seed": 5, "trainable_token_indices": [3, 4]},
            id="with trained tokens",
            marks=pytest.mark.soak,
        ),
    ],
)
def test_adapters_keep_their_values(
    four: Ranks, models: dict[str, Path], how: dict[str, Any], adapters: dict[str, Any]
) -> None:
    """PEFT draws the adapters' values when it wraps the model. Unless every rank sets the same
    seed, they differ between ranks, and accelerate has to send rank 0's values."""
    how = {"directory": str(models["llama"]), "adapters": adapters} | BF16 | how
    got = assert_same(four, how, how)
    # Each text has a digest, `requires_grad` and the placements.
    trained = [name for name, text in got[0]["before"].items() if " True " in text]
    kinds = ("lora_", "modules_to_save", "trainable_tokens")
    assert all(any(kind in name for kind in kinds) for name in trained) and trained


@pytest.mark.parametrize("strategy", ["node-reader", "rank0-broadcast"])
def test_strategies_give_the_same_training(
    four: Ranks, models: dict[str, Path], strategy: str
) -> None:
    how = {"directory": str(models["qwen3"])} | BF16 | SENT
    got = assert_same(four, how, how | {"options": {"strategy": strategy, "check": True}})
    assert got[0]["report"]["strategy"] == strategy
