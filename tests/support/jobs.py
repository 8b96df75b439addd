"""The memory of a training job under accelerate, with a dense model and `modicum.torch.AdamW`: what
is promised of each phase, what the kernel counts of that, and what else the ranks hold."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from program import run_json, strategy_of

STATE = "fp32"  # the state format of the AdamW
OURS = ("weights", "gradient", "moments")  # owners of `memory.attribute`


@dataclass(frozen=True)
class Held:
    """The memory of one phase (`load`, `step` or `save`), in bytes of all ranks together. `ours`,
    `process`, `kept` and `passing` add up to the peak."""

    promised: int
    ours: int
    """The part of the peak that the promise covers, as the kernel counts it."""
    process: int
    """Interpreters and libraries, before the job."""
    kept: int
    """Memory that is still held without being ours or the process's: modules imported since, and
    buffers of torch and of the framework. It is measured at the end of the load for `load`, and at
    the end of the steps for `step` and `save`."""
    passing: int
    """What the phase's peak has in addition: activations, gathered parameters, gradients before
    they are divided. 0 in `save`, where all that the save adds counts as ours."""


def job_of(modicum: Path, directory: Path, world: int) -> dict[str, int]:
    """The bytes that `plan` promises for each phase, less the interpreters and libraries, for which
    `plan` assumes a size."""
    words = ("--ranks", world, "--optimizer", f"adamw:{STATE}", "--dtype", "float32")
    (node,) = strategy_of(run_json(modicum, "plan", directory, *words), "own-shard")["nodes"]
    phases = node["job"]["phases"]
    return {phase["phase"]: phase["bytes"] - phase["by_purpose"]["process"] for phase in phases}


def held_by_phase(planned: dict[str, int], answers: list[dict[str, Any]]) -> dict[str, Held]:
    """The memory of each phase. `planned`: the result of `job_of`. `answers`: by rank, the result
    of `job_rank.job`."""

    def total(phase: str, figure: str) -> int:
        return sum(answer["phases"][phase][figure] for answer in answers)

    process = sum(answer["baseline_bytes"] for answer in answers)
    reports = answers[0]["load"]["ranks"]
    loaded = sum(report["kernel_peak_bytes"] - report["baseline_bytes"] for report in reports)
    ours = sum(answer["owners"][owner] for answer in answers for owner in OURS)
    added_by_save = total("save", "peak_bytes") - total("step", "end_bytes")
    kept = total("step", "end_bytes") - process - ours

    def held(phase: str, promised: int, ours: int, kept: int) -> Held:
        passing = total(phase, "peak_bytes") - process - ours - kept
        return Held(promised, ours, process, kept, passing)

    # The promise of a load under accelerate covers the optimizer's state, too.
    promised = sum(report["promised_bytes"] - report["baseline_bytes"] for report in reports)
    return {
        "load": held("load", promised, loaded, total("load", "end_bytes") - process - loaded),
        "step": held("step", planned["step"], ours, kept),
        "save": held("save", planned["save"], ours + added_by_save, kept),
    }
