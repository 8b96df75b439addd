"""An unchanged script of Trainer in a memory cgroup: without Modicum it is killed there in its
first save; within `loading()` it saves, and another run resumes, both under the same limit.

Must fail for these mutants: a model, or an optimizer's state, that is gathered by one rank for a
save; whole tensors of a checkpoint on every rank, even briefly.
"""

import re
import time
from dataclasses import dataclass
from pathlib import Path

import pytest
from cage import cage, why_no_cage

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

    log: str
    peak_bytes: int  # without page cache, which a first run fills with the files of imports
    passed: bool

    @property
    def losses(self) -> list[str]:
        return re.findall(r"'loss': '[0-9.]+'", self.log)


@pytest.fixture(scope="module", autouse=True)
def can_cage() -> None:
    if reason := why_no_cage():
        pytest.skip(reason)


def run(logs: Path, limit_bytes: int, **said: object) -> Ran:
    """Runs the script in processes that enter the cgroup after their imports."""
    with cage(limit_bytes) as inside, ranks(WORLD, logs) as started:
        procs = str(inside.directory / "cgroup.procs")
        started.tell("trains_in", cage=procs, **said)
        passed = ended(started, inside)
        if passed:
            assert started.hear() == [None] * WORLD, started.logs()
        peak_bytes = inside.peak_bytes() - inside.file_bytes()
        return Ran((logs / "rank-0.log").read_text(), peak_bytes, passed)


def ended(started: Ranks, inside: object) -> bool:
    """Waits until all ranks have ended, or until one is killed, for which the others may wait long.
    Returns whether none was killed."""
    deadline = time.monotonic() + PATIENCE_S
    while not inside.oom_kills() and not all(line.poll() for line in started.lines):
        assert time.monotonic() < deadline, started.logs()
        time.sleep(0.05)
    return not inside.oom_kills()


def test_saves_in_a_cgroup_in_which_trainer_is_killed(tmp_path: Path) -> None:
    one = Family("dense", "Qwen3ForCausalLM", "qwen3", SIZES, "float32")
    how = {"directory": str(one.write(one.build(), tmp_path / "model")), "max_steps": 1}
    plain = how | {"by": "accelerate", "folder": str(tmp_path / "plain")}
    # Two steps: the second one's activations exist next to the optimizer's state, as do those of
    # the first step after a resume.
    whole = plain | {"max_steps": 2, "save_strategy": "no"}
    training = run(tmp_path / "training", 16 << 30, **whole)
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
        f"node peak {training.peak_bytes / MIB:.0f} MiB without saves; killed in a save with "
        f"{limit / MIB:.0f} MiB; with the line {ours.peak_bytes / MIB:.0f} MiB, and resuming "
        f"{resumed.peak_bytes / MIB:.0f} MiB"
    )
