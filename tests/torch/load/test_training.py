"""A model that Modicum has loaded trains like one that torch has loaded: the losses of five steps,
and the parameters after them, are the same bit for bit.

The oracle is `from_pretrained` on every rank, then `fully_shard` of the whole model. Catches: FSDP2
gathers from other memory than the parameter's; an optimizer that steps parameters outside the
model; ties that are lost; values that are rounded where torch rounds none.
"""

import os
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
from cage import have
from program import run_json

pytest.importorskip("torch")
pytest.importorskip("transformers")

from ranks import Ranks, torchrun

SOAK = pytest.mark.soak
MESH = [4]
MIB = 1 << 20
EXAMPLE = "examples/finetune_fsdp2.py"


@pytest.fixture(scope="module")
def models(four: Ranks, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The directories of tiny models in Hugging Face's format. The world size, 4, divides few of
    their dims, and not the number of experts of qwen3_moe."""
    folder = tmp_path_factory.mktemp("models")
    tied = {"family": "qwen3", "config": {"tie_word_embeddings": True}}
    wanted = {
        "qwen3-fp32": tied,
        "qwen3-bf16": tied | {"dtype": "bfloat16"},
        "qwen3_moe": {"family": "qwen3_moe", "config": {"num_experts": 11}},
        "mixtral": {"family": "mixtral"},
    }
    for name, facts in wanted.items():
        four.ask("write", directory=str(folder / name), **facts)
    return {name: folder / name for name in wanted}


@pytest.mark.parametrize(
    ("model", "how", "ours"),
    [
        pytest.param("qwen3-fp32", {}, {}, id="dense"),
        pytest.param(
            "qwen3-fp32", {}, {"optimizer": "before"}, id="optimizer before sharding", marks=SOAK
        ),
        pytest.param(
            "qwen3-bf16", {}, {"optimizer": "between"}, id="optimizer before the load", marks=SOAK
        ),
        pytest.param("qwen3-bf16", {"dtype": "float32", "masters": True}, {}, id="fp32 masters"),
        pytest.param("qwen3-fp32", {"mesh": [2, 2]}, {}, id="replicas", marks=SOAK),
        pytest.param("qwen3-bf16", {}, {"by": "to_empty"}, id="memory of to_empty", marks=SOAK),
        pytest.param("qwen3_moe", {}, {"optimizer": "before"}, id="experts", marks=SOAK),
        pytest.param("mixtral", {"dtype": "bfloat16"}, {}, id="experts with a cast"),
    ],
)
def test_trains_as_if_torch_had_loaded(
    four: Ranks, models: dict[str, Path], model: str, how: dict[str, Any], ours: dict[str, Any]
) -> None:
    how = {"mesh": MESH, "directory": str(models[model])} | how
    expected = four.ask("train", by="torch", **how)
    got = four.ask("train", **{"by": "modicum"} | how | ours)
    for rank, (mine, theirs) in enumerate(zip(got, expected, strict=True)):
        assert mine["before"] == theirs["before"], f"rank {rank}: other loaded values"
        assert mine["losses"] == theirs["losses"], f"rank {rank}: other losses"
        assert mine["after"] == theirs["after"], f"rank {rank}: other trained values"
    before, after = expected[0]["before"], expected[0]["after"]
    learnt = [name for name, digest in after.items() if digest != before[name]]
    assert len(learnt) == len(after) - 1, "not all tensors but the frozen one changed"
    if "qwen3-" in model:  # these models have a tie
        head, embedding = "lm_head.weight", "model.embed_tokens.weight"
        assert got[0]["after"][head] == got[0]["after"][embedding] != got[0]["before"][head]


# ---- the example


def test_the_example_prints_losses_and_report_under_torchrun(
    two: Ranks, models: dict[str, Path], root: Path
) -> None:
    """The losses under torchrun equal those of the example's training of a model that torch has
    loaded, on the ranks of this test."""
    directory, steps = models["qwen3-bf16"], 3
    words = ("--dtype", "float32", "--steps", steps, "--check")
    done = torchrun(root, 2, EXAMPLE, directory, *words)
    assert done.returncode == 0, done.stderr
    two.ask("example", directory=str(directory), mesh=[2], dtype="float32", steps=steps)
    pattern = r"step \d+: loss \d+\.\d+"
    expected = re.findall(pattern, (two.folder / "rank-0.log").read_text())
    assert len(expected) == steps
    assert re.findall(pattern, done.stdout) == expected
    assert re.search(r"own-shard: .* every element loaded once", done.stdout)
    assert re.search(r"predicted +charged +measured +not explained", done.stdout)
    for rank in range(2):
        assert re.search(rf"rank {rank} +(\d+\.\d+ \wiB +){{3}}\d", done.stdout), done.stdout


@SOAK  # test_memory.py shows for the program always that a refusal reads no data
def test_the_example_over_budget_reads_no_data(modicum: Path, root: Path, tmp_path: Path) -> None:
    """Every rank that reports an error reports the same one."""
    if not have("fincore"):
        pytest.skip("fincore is not installed")
    directory = tmp_path / "qwen3-0.6b"
    run_json(modicum, "synth", directory, "--arch", "qwen3-0.6b", "--layers", 2, "--sparse")
    file = directory / "model.safetensors"
    forget(file)
    done = torchrun(root, 2, EXAMPLE, directory, "--budget", "600MiB")
    assert done.returncode != 0
    lines = re.findall(r"BudgetError: (.*)", done.stderr)
    # torchrun may end one rank before it prints the error.
    assert lines and len(set(lines)) == 1, done.stderr
    assert re.search(r"BUDGET: .*: budget 600\.00 MiB .*, short by \d+\.\d\d MiB;", lines[0]), lines
    assert cached_bytes(file) <= 1 * MIB, "more than headers and readahead"
    assert "step 0" not in done.stdout


def forget(file: Path) -> None:
    """Drops the file from the page cache."""
    with file.open("rb") as opened:
        os.fsync(opened.fileno())
        os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    assert cached_bytes(file) == 0


def cached_bytes(file: Path) -> int:
    """The bytes of a file in the page cache."""
    done = subprocess.run(
        ["fincore", "--bytes", "--noheadings", "--output", "RES", file],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    return int(done.stdout or 0)
