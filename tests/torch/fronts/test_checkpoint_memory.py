"""An unchanged script of Trainer runs in a memory cgroup. Without Modicum the kernel kills it in
its first save. Within `loading()` it saves and another run resumes, both under the same limit.

Catches: a model, or an optimizer's state, that is gathered by one rank for a save; whole tensors of
a checkpoint on every rank, even briefly.
"""

import re
import time
from dataclasses import dataclass
from pathlib import Path

import pytest
from cage import Cage, cage, why_no_cage

pytest.importorskip("torch")
pytest.importorskip("transformers")
pytest.importorskip("accelerate")

from families import LARGE_TEXT, Family
from ranks import PATIENCE_S, Ranks, ranks

MIB = 1 << 20
WORLD = 2
MARGIN = 1.06
"""The cgroup's limit, as a multiple of the peak of a training that saves nothing."""
SIZES = LARGE_TEXT | {"num_hidden_layers": 24}


@dataclass(frozen=True)
class Ran:
    """A run in a memory cgroup."""

    log: str  # of rank 0
    peak_bytes: int  # of the cgroup, less the page cache that is left at the end
    passed: bool

    @property
    def losses(self) -> list[str]:
        return re.findall(r"'loss': '[0-9.]+'", self.log)


# test_job_memory.py compares a save with its promise always, by the kernel's counters.
pytestmark = pytest.mark.soak


@pytest.fixture(scope="module", autouse=True)
def can_cage() -> None:
    if reason := why_no_cage():
        pytest.skip(reason)


def run(logs: Path, limit_bytes: int, **arguments: object) -> Ran:
    """Runs the script. Its processes enter the cgroup after their imports, so that the memory of
    the imports is not counted."""
    with cage(limit_bytes) as inside, ranks(WORLD, logs) as started:
        procs = str(inside.directory / "cgroup.procs")
        started.tell("trains_in", cage=procs, **arguments)
        passed = all_end(started, inside)
        if passed:
            assert started.hear() == [None] * WORLD, started.logs()
        peak_bytes = inside.peak_bytes() - inside.file_bytes()
        return Ran((logs / "rank-0.log").read_text(), peak_bytes, passed)


def all_end(started: Ranks, inside: Cage) -> bool:
    """Waits until all ranks have answered, or until the kernel has killed one: the other ranks
    could wait long for a killed rank. Returns whether no rank was killed."""
    deadline = time.monotonic() + PATIENCE_S
    while not inside.oom_kills() and not all(line.poll() for line in started.lines):
        assert time.monotonic() < deadline, started.logs()
        time.sleep(0.05)
    return not inside.oom_kills()


def test_saves_in_a_cgroup_in_which_trainer_is_killed(tmp_path: Path) -> None:
    family = Family("dense", "Qwen3ForCausalLM", "qwen3", SIZES, "float32")
    how = {"directory": str(family.write(family.build(), tmp_path / "model")), "max_steps": 1}
    plain = how | {"by": "accelerate", "folder": str(tmp_path / "plain")}
    # Two steps, because in the first one the optimizer has no state yet. In the second step, as in
    # the first one after a resume, the activations exist next to that state.
    unsaved = plain | {"max_steps": 2, "save_strategy": "no"}
    training = run(tmp_path / "training", 16 << 30, **unsaved)
    assert training.passed and len(training.losses) == 2
    limit = int(training.peak_bytes * MARGIN)
    killed = run(tmp_path / "killed", limit, save_steps=1, **plain)
    assert not killed.passed and len(killed.losses) == 1, "not killed in its first save"
    own = how | {"by": "modicum", "folder": str(tmp_path / "own"), "save_steps": 1}
    ours = run(tmp_path / "ours", limit, **own)
    assert ours.passed and ours.losses == training.losses[:1]
    resumed = run(tmp_path / "resumed", limit, resume=True, **own | {"max_steps": 2})
    assert resumed.passed and resumed.losses == training.losses[1:]
    print(
        f"node peak {training.peak_bytes / MIB:.0f} MiB without saves; killed in a save under "
        f"a limit of {limit / MIB:.0f} MiB; within loading() {ours.peak_bytes / MIB:.0f} MiB, and "
        f"resuming {resumed.peak_bytes / MIB:.0f} MiB"
    )
