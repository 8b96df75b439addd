"""The engine in examples/engine_memory_efficient_load.py builds a model, adds adapters, shards,
loads, and makes an optimizer in AReaL's order. Its option `memory_efficient_load` does not change
the bits on any rank, except that random tensors are those that a single process would draw.

The oracle is `from_pretrained` on every rank, then `fully_shard` of the whole model. Catches: a
head, a tower or a base under adapters that stays empty; a tensor that each rank draws for itself; a
whole tensor in memory; a rank that reads another rank's shards.
"""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

from families import EVEN_TEXT, MROPE
from ranks import Ranks, ranks, torchrun

MIB = 1 << 20
STAGING_BYTES = 8 * MIB
# Memory of imports, and freed memory that glibc keeps.
PYTHON_BYTES = 6 * MIB
# Bytes that a rank reads of headers, config, index and /proc files.
BESIDES_BYTES = 256 << 10


@pytest.fixture(scope="module")
def four(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    with ranks(4, tmp_path_factory.mktemp("engines") / "ranks") as started:
        yield started


@pytest.fixture(scope="module")
def models(four: Ranks, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The directories of models whose vocabularies the world size, 4, does not divide. The large
    vocabularies of "causal-lm" and "vision-language" make their embeddings most of their bytes."""
    folder = tmp_path_factory.mktemp("models")
    text = {"vocab_size": 100003, "hidden_size": 101}
    tower = {"text_config": EVEN_TEXT | {"rope_parameters": MROPE, "vocab_size": 300007}}
    wanted: dict[str, Any] = {
        "causal-lm": {"family": "qwen3", "config": text},
        "value-head": {
            "family": "qwen3",
            "cls": "Qwen3ForTokenClassification",
            "config": {"num_labels": 1},
        },
        "vision-language": {"family": "qwen2_5_vl", "config": tower},
    }
    for name, facts in wanted.items():
        four.ask("write", directory=str(folder / name), dtype="bfloat16", **facts)
    return {name: str(folder / name) for name in wanted}


# The task, the checkpoint, options, and a pattern of the names of tensors that are drawn at random.
# Without `memory_efficient_load` each rank draws those for itself.
CASES = {
    "trained value head": ("value-head", "value-head", {}, None),
    "new value head": ("value-head", "causal-lm", {}, "^score"),
    "vision-language": ("vision-language", "vision-language", {}, None),
    "lora": ("causal-lm", "causal-lm", {"lora": True}, "lora_"),
    "from scratch": ("causal-lm", "causal-lm", {"init_from_scratch": True}, ""),
}
SOAK = pytest.mark.soak
QUICK = ("new value head", "vision-language", "lora")


@pytest.mark.parametrize(
    "case", [pytest.param(name, marks=() if name in QUICK else SOAK) for name in CASES]
)
def test_bits_do_not_depend_on_the_option_or_the_world_size(
    four: Ranks, one: Ranks, models: dict[str, str], case: str
) -> None:
    """Tensors that are read equal those of an engine without the option. Tensors that are drawn
    equal those that a single process draws with the option."""
    task, directory, options, drawn = CASES[case]
    how = {"task": task, "directory": models[directory], **options}
    got = four.ask("engine", memory_efficient_load=True, **how)
    expected = four.ask("engine", **how)
    for rank, (mine, theirs) in enumerate(zip(got, expected, strict=True)):
        assert mine["state"].keys() == theirs["state"].keys()
        assert mine["buffers"] == theirs["buffers"], f"rank {rank}"
        for name, digest in theirs["state"].items():
            if drawn is None or not re.search(drawn, name):
                assert mine["state"][name] == digest, f"{name} of rank {rank}"
    if drawn is not None:
        (alone,) = one.ask("engine", memory_efficient_load=True, **how)
        assert all(mine["whole"] == alone["whole"] for mine in got), "other random values"
        assert any(re.search(drawn, name) for name in alone["whole"])


@pytest.mark.parametrize(
    "case",
    (
        "vision-language",
        *(pytest.param(n, marks=pytest.mark.soak) for n in ("new value head", "lora")),
    ),
)
def test_a_node_holds_shards_and_staging(four: Ranks, models: dict[str, str], case: str) -> None:
    """By the kernel's counters a rank holds little more than its float32 shards. Without
    `memory_efficient_load` the ranks hold more than twice as much."""
    task, directory, options, _ = CASES[case]
    how = {"task": task, "directory": models[directory], "dtype": "float32", **options}
    got = four.ask("engine", memory_efficient_load=True, **how)
    theirs = four.ask("engine", **how)
    for rank, answer in enumerate(got):
        most = answer["local_bytes"] + STAGING_BYTES + PYTHON_BYTES
        assert answer["grown_bytes"] <= most, f"rank {rank}"
        assert answer["grown_bytes"] >= answer["local_bytes"], f"rank {rank}"
    node, upstream = (sum(of["grown_bytes"] for of in each) for each in (got, theirs))
    assert upstream > 2 * node, f"{upstream / MIB:.0f} MiB against {node / MIB:.0f} MiB"


@pytest.mark.parametrize("strategy", ("own-shard", "rank0-broadcast"))
def test_no_rank_reads_anothers_shards(four: Ranks, models: dict[str, str], strategy: str) -> None:
    """By the kernel's counters, with own-shard each rank reads the bytes of its own shards. With
    rank0-broadcast rank 0 reads all shards, and the other ranks read none."""
    how = {"task": "vision-language", "directory": models["vision-language"]}
    # The first run also reads the files of imports.
    four.ask("engine", memory_efficient_load=True, strategy=strategy, **how)
    got = four.ask("engine", memory_efficient_load=True, strategy=strategy, **how)
    model_bytes = sum(answer["local_bytes"] for answer in got)
    for rank, answer in enumerate(got):
        wanted = answer["local_bytes"] if strategy == "own-shard" else model_bytes * (rank == 0)
        about = pytest.approx(wanted, rel=0.02, abs=BESIDES_BYTES)
        assert answer["read_bytes"] == about, f"rank {rank}"


@pytest.mark.soak  # test_training.py runs another example under torchrun always
def test_the_example_trains_under_torchrun(models: dict[str, str], root: Path) -> None:
    words = ["examples/engine_memory_efficient_load.py", models["value-head"]]
    words += ["--task", "value-head", "--memory-efficient-load", "--budget", "4GiB", "--offload"]
    done = torchrun(root, 2, *words, "--steps", 2)
    assert done.returncode == 0, done.stderr
    assert len(re.findall(r"step \d: loss \d+\.\d+", done.stdout)) == 2
