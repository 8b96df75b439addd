"""The owner of a checkpoint that Python saves is its process: not its forked children, and not
another save of the process.

Catches: a forked child removes the checkpoint, or ends its lock; a second save of the process ends
the lock of the first, or removes its checkpoint.
"""

import os
from pathlib import Path

from program import run_json

from modicum import _modicum


def left_by(program: Path, model: str, root: Path, step: int) -> list[str]:
    """The unfinished checkpoints that a save by another process leaves."""
    report = run_json(program, "save", model, root, "--step", step)
    left = [path.name for path in root.glob(".partial-*")]
    assert len(report["warnings"]) == len(left)
    return left


def test_forked_children_and_further_saves_leave_a_checkpoint_in_flight(
    modicum: Path, gpt2: Path, tmp_path: Path
) -> None:
    root = tmp_path / "root"
    step = _modicum.CheckpointSave(str(root), 1)
    name = Path(step.directory).name
    child = os.fork()
    if child == 0:
        step.discard()
        os._exit(0)
    os.waitpid(child, 0)
    assert left_by(modicum, str(gpt2), root, 2) == [name]
    other = _modicum.CheckpointSave(str(root), 3)
    assert sorted(path.name for path in root.glob(".partial-*")) == sorted(
        [name, Path(other.directory).name]
    )
    other.discard()
    assert left_by(modicum, str(gpt2), root, 4) == [name]
    step.discard()
    assert left_by(modicum, str(gpt2), root, 5) == []
