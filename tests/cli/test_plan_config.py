"""`plan` of a config.json without weights: the plan of the checkpoint that `synth` writes with this
config.json, to the byte, for every family.

Catches: a shape that does not follow the config, a tensor that is missing, a tie that is stored; a
plan of a file that is next to the config; a load that begins without weights.
"""

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from program import failure, run_json

import modicum as front

LAYERS = {"deepseek-v3": 4, "qwen3-next-80b-a3b": 4}  # one or more of each kind
AS_STORED = ("--ranks", 8, "--ranks-per-node", 4)
CAST = ("--ranks", 3, "--dtype", "bfloat16", "--optimizer", "adamw:int8-moments")


def archs(modicum: Path, folder: Path) -> list[str]:
    expected = failure(modicum, 2, "synth", folder / "x", "--arch", "none")["expected"]
    return str(expected).replace(" or ", ", ").split(", ")


def planned(modicum: Path, *words: object) -> dict[str, Any]:
    done = run_json(modicum, "plan", *words)
    return {name: value for name, value in done.items() if name != "warnings"}


def test_the_plan_is_that_of_the_checkpoint(modicum: Path, tmp_path: Path) -> None:
    names = archs(modicum, tmp_path)
    assert len(names) == 16
    for arch in names:
        folder, alone = tmp_path / arch, tmp_path / f"{arch}-config"
        layers = LAYERS.get(arch, 2)
        words = ("--arch", arch, "--layers", layers, "--sparse")
        run_json(modicum, "synth", folder, *words)
        alone.mkdir()
        shutil.copy(folder / "config.json", alone)
        for path, flags in ((alone, AS_STORED), (alone / "config.json", CAST)):
            assert planned(modicum, path, *flags) == planned(modicum, folder, *flags), arch
        shutil.rmtree(folder)


def test_config_json_is_enough_for_a_plan_only(modicum: Path, tmp_path: Path) -> None:
    run_json(modicum, "synth", tmp_path / "moe", "--arch", "tiny-moe")
    config = tmp_path / "moe" / "config.json"
    (tmp_path / "moe" / "model.safetensors").unlink()
    (warning,) = run_json(modicum, "plan", config)["warnings"]
    assert warning.startswith("planned from config.json alone")
    assert front.plan(config, ranks=2) == run_json(modicum, "plan", config, "--ranks", 2)
    for verb in ("load", "inspect", "verify"):
        assert failure(modicum, 13, verb, tmp_path / "moe")["category"] == "IO"
    config.write_text(config.read_text().replace("qwen3_moe", "qwen4"))
    error = failure(modicum, 2, "plan", config)
    assert (error["category"], error["got"], error["file"]) == (
        "UNSUPPORTED", "qwen4", "config.json",
    )  # fmt: skip
    assert "gpt2, llama, qwen2," in error["expected"]


def test_the_wheels_command_plans_a_config(
    tmp_path: Path, modicum: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """org/config.json has the form of a model's name, ORG/NAME."""
    run_json(modicum, "synth", tmp_path / "org", "--arch", "tiny-moe")
    (tmp_path / "org" / "model.safetensors").unlink()
    monkeypatch.chdir(tmp_path)
    command = [sys.executable, "-m", "modicum.cli", "plan", "org/config.json", "--json"]
    done = subprocess.run(command, check=True, capture_output=True)
    assert json.loads(done.stdout) == run_json(modicum, "plan", "org/config.json")
