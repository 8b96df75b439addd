"""DeepSpeed under transformers' Trainer. `ProtectCallback` protects DeepSpeed's memory before
workers are forked. A forecast needs the configuration in which Trainer has resolved "auto" values.

Catches: a callback that calls `protect` before DeepSpeed has allocated its memory, or after the
workers are forked; one that refuses torch's optimizers, or that keeps the protection of a training
that failed; a forecast from a configuration with "auto".
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")
pytest.importorskip("accelerate")
pytest.importorskip("deepspeed")

import torch
from extensions import needs_extensions
from program import run_json

import modicum as front
from modicum.errors import UsageError
from modicum.torch.deepspeed import ProtectCallback, config_of

PROGRAM = Path(__file__).parents[2] / "support/deepspeed_trainer.py"
pytestmark = needs_extensions


def run(folder: Path, *words: str) -> dict[str, Any]:
    """Runs tests/support/deepspeed_trainer.py; returns the JSON object that it prints."""
    command = [sys.executable, str(PROGRAM), str(folder), *words]
    environment = os.environ | {"MALLOC_MMAP_THRESHOLD_": "65536"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(next(line for line in done.stdout.splitlines() if '"losses"' in line))


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return run(tmp_path_factory.mktemp("plain"))


def copied(answer: dict[str, Any]) -> float:
    """Bytes per parameter that workers keep as copies of master, gradient, moments and staging."""
    owners = {owner["name"]: owner for owner in answer["attribution"]["owners"]}
    names = ("master", "gradient", "moments", "staging")
    return sum(owners[name]["copied_per_param"] for name in names)


@pytest.mark.soak  # the callback is tested always with torch's optimizers (below)
def test_the_callback_protects_before_the_workers_are_forked(
    plain: dict[str, Any], tmp_path: Path
) -> None:
    protected = run(tmp_path, "--protect")
    assert plain["attribution"]["forked"] == protected["attribution"]["forked"] == 2
    assert copied(plain) == pytest.approx(10, rel=0.1)
    # What stays is the pages at the ends of allocations, about 0.2 bytes in this small model.
    assert copied(protected) < 1
    assert protected["losses"] == plain["losses"] and len(plain["losses"]) == 4
    assert protected["ended"]


def test_a_resolved_configuration_is_forecast(
    plain: dict[str, Any], modicum: Path, tmp_path: Path
) -> None:
    directory = tmp_path / "model"
    run_json(modicum, "synth", directory, "--arch", "qwen3-0.6b", "--layers", 1, "--sparse")
    config = plain["config"]
    assert config["gradient_accumulation_steps"] == 2 and config["train_batch_size"] == "auto"
    path = tmp_path / "ds_config.json"
    path.write_text(json.dumps(config))
    forecast = front.plan(directory, ranks=8, deepspeed=path)["deepspeed"]
    assert forecast
    path.write_text(json.dumps(config | {"gradient_accumulation_steps": "auto"}))
    with pytest.raises(UsageError, match="gradient_accumulation_steps.*auto"):
        front.plan(directory, deepspeed=path)


def test_arguments_without_deepspeed_are_refused() -> None:
    with pytest.raises(UsageError, match="TrainingArguments with deepspeed="):
        config_of(SimpleNamespace(hf_deepspeed_config=None))


def test_the_callback_protects_the_state_of_torchs_optimizers() -> None:
    parameter = torch.nn.Parameter(torch.ones(1 << 20))
    optimizer = torch.optim.AdamW([parameter])
    callback = ProtectCallback()
    for _ in range(2):  # an exception ends the first training
        callback.on_train_begin(None, None, None, optimizer=optimizer)
        assert callback.protection is not None
        assert len(optimizer._optimizer_step_post_hooks) == 1
        parameter.grad = torch.ones(1 << 20)
        optimizer.step()
        assert callback.protection.bytes > 11 << 20
    callback.on_train_end(None, None, None)
    assert callback.protection is None and not optimizer._optimizer_step_post_hooks
