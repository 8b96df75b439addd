"""The memory of DeepSpeed with its optimizer on the host, and of Modicum's optimizer under the same
training: by owner, forked workers included.

Compared with sums of Pss that are read without Modicum, DeepSpeed's own losses, and the forecast of
`modicum plan`. Must fail for these mutants: copies in workers that are missed, or counted once per
worker; a missed buffer of DeepSpeed; a protection that misses allocations of the first step; a step
that rounds differently from DeepSpeed's.
"""

import json
import os
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("deepspeed")

import torch
from program import run_json
from safetensors.torch import save_file

WIDE, NARROW = 2048, 1024
OURS = "--optimizer=modicum:fp32"
HOST = ("master", "gradient", "moments", "staging")
PARTITION = "offloaded weights"
# The forecast's fixed part is that of torch 2.13. The modules of a newer compiler hold more.
COMPILER_BYTES = 0 if torch.__version__.startswith("2.13.") else 11 << 20
# DeepSpeed 0.18 imports the compiler when it is imported itself: before the baseline.
if version("deepspeed").startswith("0.18."):
    COMPILER_BYTES -= 114_000_000
RUNS = {
    "none": ("none", NARROW, "--epochs=1", "--steps=6", "--clip=0"),
    "persistent": ("persistent", WIDE, "--epochs=1", "--steps=1"),
    "default": ("default", WIDE, "--steps=1"),
    "protected": ("default", WIDE, "--steps=1", "--protect"),
    "ours": ("persistent", WIDE, "--epochs=1", "--steps=1", OURS),
    "zero3": ("persistent", NARROW, "--epochs=1", "--steps=1", "--stage=3"),
    "zero3, offloaded": ("default", NARROW, "--steps=1", "--stage=3", "--offload-param"),
    "zero3, protected": (
        "default", NARROW, "--steps=1", "--stage=3", "--offload-param", "--protect"),
    "ours, narrow": ("none", NARROW, "--epochs=1", "--steps=6", "--clip=0", OURS),
}  # fmt: skip


class Runs:
    """The lines that each run prints after its epochs. A run starts when it is first needed."""

    def __init__(self) -> None:
        self._done: dict[str, list[dict[str, Any]]] = {}

    def __getitem__(self, name: str) -> list[dict[str, Any]]:
        if name not in self._done:
            self._done[name] = self._run(*RUNS[name])
        return self._done[name]

    @staticmethod
    def _run(workers: str, width: int, *words: str) -> list[dict[str, Any]]:
        program = Path(__file__).parents[2] / "support/zero2_memory.py"
        # malloc returns freed memory to the kernel, so that only memory in use is counted.
        environment = os.environ | {"MALLOC_MMAP_THRESHOLD_": "65536"}
        command = [sys.executable, str(program), "--workers", workers, f"--width={width}", *words]
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=600, env=environment
        )  # DeepSpeed compiles its kernel when it is first used, which takes minutes
        assert done.returncode == 0, done.stderr[-4000:]
        return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


@pytest.fixture(scope="module")
def runs() -> Runs:
    return Runs()


def owners(epoch: dict[str, Any]) -> dict[str, dict[str, float]]:
    return {owner["name"]: owner for owner in epoch["attribution"]["owners"]}


def copied(epoch: dict[str, Any], *names: str) -> float:
    """The copies in workers, in bytes per parameter, of owners that stay on the host with a GPU,
    too."""
    return sum(owners(epoch)[name]["copied_per_param"] for name in names or HOST)


def assert_adds_up(runs: Runs, name: str) -> None:
    """Asserts that the attributed bytes and the fixed ones, which the narrow model shows, are the
    Pss of the process tree, within 2 %."""
    (narrow,) = runs["ours, narrow" if name.startswith("ours") else "none"]
    fixed = narrow["attribution"]["unexplained_bytes"]
    for epoch in runs[name]:
        of = epoch["attribution"]
        known = sum(one["held_bytes"] + one["copied_bytes"] for one in of["owners"])
        assert known + of["baseline_bytes"] + fixed == pytest.approx(epoch["tree_bytes"], rel=0.02)
        assert of["total_bytes"] == pytest.approx(epoch["tree_bytes"], rel=0.01)


def largest() -> float:
    """The bytes of DeepSpeed's `temp_grad_buffer_for_cpu_offload` per parameter: the size of one
    layer of six."""
    return 2 / 6


def test_without_workers_deepspeed_holds_18_bytes(runs: Runs) -> None:
    (epoch,) = runs["none"]
    held = {name: owners(epoch)[name]["held_per_param"] for name in HOST}
    expected = {"master": 4, "gradient": 4, "moments": 8, "staging": 2 + largest()}
    assert held == pytest.approx(expected, rel=0.002)
    assert epoch["attribution"]["params"] == 6 * NARROW * NARROW
    assert copied(epoch) == 0
    assert_adds_up(runs, "none")


def test_persistent_workers_copy_10_bytes(runs: Runs) -> None:
    (epoch,) = runs["persistent"]
    assert epoch["attribution"]["forked"] == 2
    assert copied(epoch, "master") == pytest.approx(4, rel=0.01)
    assert copied(epoch, "gradient") == pytest.approx(4, rel=0.01)
    assert copied(epoch, "staging") == pytest.approx(2, rel=0.01)
    assert copied(epoch, "moments") == 0
    assert_adds_up(runs, "persistent")


def test_default_workers_copy_18_bytes_from_the_second_epoch_on(runs: Runs) -> None:
    first, second = runs["default"]
    assert copied(first) == pytest.approx(10, rel=0.02)
    assert copied(second) == pytest.approx(18, rel=0.02)
    assert copied(second, "moments") == pytest.approx(8, rel=0.02)
    assert_adds_up(runs, "default")


def test_workers_copy_no_protected_memory(runs: Runs) -> None:
    for epoch in runs["protected"]:
        assert epoch["attribution"]["forked"] == 2
        assert copied(epoch) < 0.02
    assert_adds_up(runs, "protected")
    # The weights, which a worker may use, are not protected.
    assert owners(runs["protected"][1])["weights"]["copied_per_param"] > 1.9
    losses = [epoch["losses"] for epoch in runs["default"]]
    assert [epoch["losses"] for epoch in runs["protected"]] == losses


def test_modicums_adamw_holds_16_bytes_and_makes_the_same_losses(runs: Runs) -> None:
    (epoch,) = runs["ours"]
    held = sum(owners(epoch)[name]["held_per_param"] for name in HOST if name in owners(epoch))
    assert held == pytest.approx(16, rel=0.002)
    assert sum(owners(epoch)[name]["copied_bytes"] for name in HOST if name in owners(epoch)) == 0
    assert_adds_up(runs, "ours")
    (theirs,), (epoch,) = runs["none"], runs["ours, narrow"]
    assert len(set(theirs["losses"])) == 6
    assert epoch["losses"] == theirs["losses"], "not the bits of DeepSpeed"


def assert_holds_18_of_zero_3(epoch: dict[str, Any]) -> None:
    """Asserts the bytes of masters, float32 gradients with their bfloat16 partitions, and moments,
    and that all owners add up to the Pss of the process tree."""
    of = owners(epoch)
    held = {name: of[name]["held_per_param"] for name in ("master", "gradient", "moments")}
    assert held == pytest.approx({"master": 4, "gradient": 4 + 2, "moments": 8}, rel=0.005)
    assert epoch["attribution"]["params"] == 6 * NARROW * NARROW
    known = sum(one["held_bytes"] + one["copied_bytes"] for one in of.values())
    rest = epoch["attribution"]["unexplained_bytes"] + epoch["attribution"]["baseline_bytes"]
    assert known + rest == pytest.approx(epoch["tree_bytes"], rel=0.02)


def test_zero_3_without_offloaded_weights_copies_10_bytes(runs: Runs) -> None:
    (epoch,) = runs["zero3"]
    assert_holds_18_of_zero_3(epoch)
    assert PARTITION not in owners(epoch)
    assert owners(epoch)["weights"]["held_per_param"] >= 2
    for name, expected in {"master": 4, "gradient": 6, "moments": 0}.items():
        assert copied(epoch, name) == pytest.approx(expected, rel=0.02, abs=0.01)


def test_zero_3_with_offloaded_weights_copies_12_then_20_bytes(runs: Runs) -> None:
    first, second = runs["zero3, offloaded"]
    for epoch, expected in ((first, 12), (second, 20)):
        assert_holds_18_of_zero_3(epoch)
        assert owners(epoch)[PARTITION]["held_per_param"] == pytest.approx(2, rel=0.005)
        assert copied(epoch, "master", "gradient", "moments", PARTITION) == pytest.approx(
            expected, rel=0.02
        )


def test_zero_3_protected_copies_nothing(runs: Runs) -> None:
    for epoch in runs["zero3, protected"]:
        assert_holds_18_of_zero_3(epoch)
        assert epoch["attribution"]["forked"] == 2
        assert copied(epoch, "master", "gradient", "moments", PARTITION) < 0.02
    losses = [epoch["losses"] for epoch in runs["zero3, offloaded"]]
    assert [epoch["losses"] for epoch in runs["zero3, protected"]] == losses


@pytest.mark.parametrize(
    ("name", "flags"),
    [
        ("none", []),
        ("persistent", ["--workers", 2, "--persistent-workers"]),
        ("default", ["--workers", 2]),
    ],
)
def test_the_forecast_is_within_2_percent(
    runs: Runs, modicum: Path, tmp_path: Path, name: str, flags: list[Any]
) -> None:
    """Compares `modicum plan --deepspeed` for the same parameters; it excludes device memory."""
    width = RUNS[name][1]
    weights = {f"{2 * i}.weight": torch.zeros(width, width).bfloat16() for i in range(6)}
    save_file(weights, tmp_path / "model.safetensors")
    config = {
        "bf16": {"enabled": True},
        "zero_optimization": {
            "stage": 2,
            "offload_optimizer": {"device": "cpu", "pin_memory": False},
        },
    }
    (tmp_path / "ds.json").write_text(json.dumps(config))
    of = run_json(modicum, "plan", tmp_path, "--deepspeed", tmp_path / "ds.json", *flags)
    forecast = COMPILER_BYTES + sum(line["bytes"] for line in of["deepspeed"]["lines"])
    epoch = runs[name][-1]
    named = owners(epoch)
    got = sum(named[owner]["held_bytes"] + named[owner]["copied_bytes"] for owner in HOST)
    got += epoch["attribution"]["unexplained_bytes"]
    assert got == pytest.approx(forecast, rel=0.02)
