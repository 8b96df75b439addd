"""Runs the shell commands of docs/guide that need the program alone, as they are on the page, in a
directory with the checkpoints and files that they name; and (soak) those of torchrun, and the demo
of README.

Catches: a command of a page that no longer works, or that ends with another exit code.
"""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from cage import why_no_cage
from page_commands import blocks
from program import run_json

PAGES = ("convert", "deepspeed", "doctor", "measure", "plan", "save")
# Of these commands other tests run what can be run: see test_page_blocks.py.
FOREIGN = ("uvx ", "python examples/")
PROGRAM = "import time\nheld = bytearray({} << 20)\ntime.sleep(0.2)\n"
OFFLOAD = {
    "train_micro_batch_size_per_gpu": 1,
    "bf16": {"enabled": True},
    "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}},
}


def commands(page: Path) -> list[str]:
    """The lines of the `sh` blocks, without comments."""
    texts = [text for language, _, text in blocks(page) if language == "sh"]
    lines = [line.partition("  #")[0].strip() for text in texts for line in text.splitlines()]
    return [line for line in lines if not line.startswith(FOREIGN)]


@pytest.fixture
def place(modicum: Path, tmp_path: Path) -> Path:
    """A directory with what the pages name."""
    directory = tmp_path / "DIR"
    run_json(modicum, "synth", directory, "--arch", "tiny-moe")
    run_json(modicum, "synth", tmp_path / "deepseek-fp8", "--arch", "tiny-fp8")
    shutil.copy(directory / "config.json", tmp_path)
    (tmp_path / "ds_config.json").write_text(json.dumps(OFFLOAD))
    names = [tensor["name"] for tensor in run_json(modicum, "inspect", directory)["tensors"]]
    targets = {name: {"op": "stored", "name": name} for name in names}
    (tmp_path / "recipe.json").write_text(json.dumps({"targets": targets, "unused": []}))
    for name, mib in {"train": 20, "changed": 10}.items():
        (tmp_path / f"{name}.py").write_text(PROGRAM.format(mib))
    return tmp_path


@pytest.mark.parametrize("page", PAGES)
def test_the_commands_of_a_page_run(root: Path, modicum: Path, place: Path, page: str) -> None:
    texts = commands(root / f"docs/guide/{page}.md")
    assert texts
    if page == "convert":
        run_json(modicum, "save", place / "DIR", place / "ROOT", "--step", 100, "--ranks", 2)
    paths = [str(modicum.parent), str(Path(sys.executable).parent), os.environ["PATH"]]
    for text in texts:
        if " --limit " in text and why_no_cage():
            continue
        text = text.replace("COMMAND ARGUMENTS", "python train.py")
        text = text.replace("PID", str(os.getpid())).replace("--interval 60", "--interval 1")
        done = subprocess.run(
            ["bash", "-c", text], cwd=place, env=os.environ | {"PATH": os.pathsep.join(paths)},
            capture_output=True, text=True, timeout=120,
        )  # fmt: skip
        assert done.returncode == 0, f"{text}\n{done.stdout}\n{done.stderr}"


@pytest.mark.soak
@pytest.mark.parametrize("page", ["accelerate", "load", "tensor-parallel"])
def test_the_commands_of_torchrun_run(root: Path, tmp_path: Path, page: str) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.Qwen3Config(
        hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, vocab_size=128,
    )  # fmt: skip
    transformers.Qwen3ForCausalLM(config).save_pretrained(tmp_path / "model")
    texts = commands(root / f"docs/guide/{page}.md")
    assert texts
    for text in texts:
        launcher = f"{sys.executable} -m torch.distributed.run"
        text = re.sub("^torchrun", launcher, text).replace(" DIRECTORY", f" {tmp_path}/model")
        text = text.replace(" RUN", f" {tmp_path}/run")
        done = subprocess.run(
            ["bash", "-c", text], cwd=root, capture_output=True, text=True, timeout=300
        )
        assert done.returncode == 0, f"{text}\n{done.stdout}\n{done.stderr}"


@pytest.mark.soak
def test_the_demo_of_readme_runs(root: Path, modicum: Path) -> None:
    """What `make demo` runs after it has built the program."""
    done = subprocess.run(
        [root / "scripts/demo.sh", modicum], cwd=root, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0 and "values ok" in done.stdout, done.stderr
