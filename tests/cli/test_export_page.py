"""Runs the commands of docs/guide/export.md on recorded directories: checkpoints of runs, of DCP
and of DeepSpeed's ZeRO; accelerate's is one of DCP in its folder.

Catches: a command of the page that no longer works; tensors that are lost or have another dtype.
"""

import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")  # the recorded directories are its own
safetensors = pytest.importorskip("safetensors")

RECORDED = Path(__file__).parents[1] / "fixtures/formats-0.1"
COMMAND = "import sys; from modicum.cli import main; sys.argv[0] = 'modicum'; main()"
PLACES = {
    "ROOT/step-100": "torch/torch-adamw/step-2",
    "checkpoint-100": "trainer/checkpoint-2",
    "dcp": "dcp/directory",
    "accelerate/pytorch_model_fsdp_0": "dcp/directory",
    "zero": "zero/directory",
    "DIR": "torch/torch-adamw/step-2",
}


@pytest.fixture
def page(root: Path) -> str:
    return (root / "docs/guide/export.md").read_text()


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory, with a directory for each name on the page."""
    for place, recorded in PLACES.items():
        shutil.copytree(RECORDED / recorded, tmp_path / place)
    (tmp_path / "DIR/generation_config.json").write_text("{}")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def tensors_of(folder: Path) -> dict[str, Any]:
    """name -> (dtype, shape)"""
    found = {}
    for file in folder.glob("*.safetensors"):
        with safetensors.safe_open(file, "np") as opened:
            for name in opened.keys():  # noqa: SIM118  (it is no dict)
                part = opened.get_slice(name)
                found[name] = part.get_dtype(), part.get_shape()
    return found


def run(command: str) -> Path:
    """Runs a command of the page by the wheel's `modicum`; returns its output, the last word that
    is no flag and no flag's value."""
    wheel = f'modicum() {{ {sys.executable} -c "{COMMAND}" "$@"; }}'
    done = subprocess.run(
        ["bash", "-c", f"{wheel}\n{command}"], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, f"{command}\n{done.stderr}"
    return Path(command.partition(" --")[0].split()[-1])


def test_each_directory_of_the_table_is_converted(page: str, folder: Path) -> None:
    commands = re.findall(r"^\|.*`(modicum convert \S+ OUT)`", page, re.M)
    assert len(commands) == 6
    for command in commands:
        out = run(command)
        stored = tensors_of(folder / command.split()[2])
        found = tensors_of(out)
        assert found and (not stored or found == stored), command
        assert not (out / "COMMIT").exists() and not (out / "optimizer").exists()
        shutil.rmtree(out)


def test_the_other_commands_run(page: str, folder: Path) -> None:
    commands = re.findall(r"^(?:modicum|cp) .*$", page, re.M)
    assert len(commands) == 5
    for command in commands:
        out = run(command)
        wanted = re.search(r"--dtype (\w+)", command)
        if wanted:
            short = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}[wanted[1]]
            assert {dtype for dtype, _ in tensors_of(out).values()} <= {short, "I64", "BOOL"}
    assert {"config.json", "tokenizer.json"} <= {file.name for file in out.iterdir()}


def test_an_import_has_the_config_of_its_source(page: str, folder: Path) -> None:
    (block,) = re.findall(r"^```python\n(.*?)^```$", page, re.M | re.S)
    for name in ("dcp", "zero"):  # a checkpoint of each model
        source = run(f"modicum convert {name} of-{name}")
        (source / "config.json").write_text('{"model_type": "none"}')
        block = block.replace('source="DIR"', f'source="{source}"', 1)
    exec(compile(block, "export.md", "exec"), {})
    for step, source in (("ROOT/step-200", "of-dcp"), ("RUN/step-3", "of-zero")):
        assert tensors_of(folder / step) == tensors_of(folder / source)
        assert (folder / step / "config.json").read_text() == '{"model_type": "none"}'
