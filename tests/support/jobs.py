"""The memory of a training job under accelerate, with a dense model and `modicum.torch.AdamW`: what
is promised of each phase, what the kernel counts of that, and what else the ranks hold."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from program import run_json, strategy_of

STATE = "fp32"
OURS = ("weights", "gradient", "moments")  # owners of `memory.attribute`


@dataclass(frozen=True)
class Held:
    """Bytes of one phase, of all ranks."""

    promised: int
    ours: int
    """What the kernel counts of the promised memory."""
    process: int
    """Interpreters and libraries, before the job."""
    kept: int
    """What else the ranks hold at the end of the load, or of the steps (in `step` and `save`):
    modules imported since, buffers of torch and of the framework."""
    passing: int
    """What the phase's peak has in addition: activations, gathered parameters, gradients before
    they are divided. 0 in `save`, where all of it counts as ours."""


def job_of(modicum: Path, directory: Path, world: int) -> dict[str, int]:
    """What `plan` promises of each phase, without the processes that it assumes."""
    words = ("--ranks", world, "--optimizer", f"adamw:{STATE}", "--dtype", "float32")
    (node,) = strategy_of(run_json(modicum, "plan", directory, *words), "own-shard")["nodes"]
    phases = node["job"]["phases"]
    return {of["phase"]: of["bytes"] - of["by_purpose"]["process"] for of in phases}


def held_by_phase(planned: dict[str, int], answers: list[dict[str, Any]]) -> dict[str, Held]:
    """`answers`: what act `job` of `job_rank.py` has returned, by rank."""

    def total(phase: str, figure: str) -> int:
        return sum(of["phases"][phase][figure] for of in answers)

    process = sum(of["baseline_bytes"] for of in answers)
    ranks = answers[0]["load"]["ranks"]
    loaded = sum(of["kernel_peak_bytes"] - of["baseline_bytes"] for of in ranks)
    pages = sum(of["owners"][name] for of in answers for name in OURS)
    saving = total("save", "peak_bytes") - total("step", "end_bytes")
    others = total("step", "end_bytes") - process - pages

    def of(phase: str, promised: int, ours: int, kept: int) -> Held:
        passing = total(phase, "peak_bytes") - process - ours - kept
        return Held(promised, ours, process, kept, passing)

    # The promise of a load under accelerate covers the optimizer's state, too.
    promised = sum(of["promised_bytes"] - of["baseline_bytes"] for of in ranks)
    return {
        "load": of("load", promised, loaded, total("load", "end_bytes") - process - loaded),
        "step": of("step", planned["step"], pages, others),
        "save": of("save", planned["save"], pages + saving, others),
    }
