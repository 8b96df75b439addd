"""The ranks of an unchanged script of Trainer within `modicum.torch.accelerate.loading` are killed
at random instants during or after a save. The script resumes from a whole checkpoint, and ends with
the same bits as a run that was not killed.

Catches: a checkpoint that is committed before all of its files are renamed, or before the script's
own files are written; a checkpoint that is resumed without COMMIT.
"""

import contextlib
import random
import time
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")
pytest.importorskip("accelerate")

from ranks import Ranks

STEPS = 12
HOW: dict[str, Any] = {
    "by": "modicum", "max_steps": STEPS, "save_steps": 1, "save_total_limit": 2,
}  # fmt: skip


@pytest.fixture(scope="module")
def model(one: Ranks, tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("models")
    sizes = {"hidden_size": 128, "intermediate_size": 256, "vocab_size": 1024}
    one.ask("write", directory=str(folder / "qwen3"), family="qwen3", config=sizes)
    return str(folder / "qwen3")


def committed(folder: Path) -> list[int]:
    """The step numbers of the committed checkpoints in `folder`, in order."""
    return sorted(int(path.parent.name.rpartition("-")[2]) for path in folder.glob("*-*/COMMIT"))


def kill_in_a_save(two: Ranks, folder: Path, count: int, wait_s: float) -> bool:
    """Kills both ranks `wait_s` after more than `count` checkpoints have been seen incomplete. (One
    that an earlier kill has left incomplete counts, too.) Returns False, without a kill, if the
    script ends before."""
    begun: set[Path] = set()
    while len(begun) <= count:
        with contextlib.suppress(FileNotFoundError):  # a checkpoint is removed during the glob
            begun |= {path.parent for path in folder.glob("checkpoint-*/.partial-*")}
        if any(line.poll() for line in two.lines):
            return False
        time.sleep(0.0005)
    time.sleep(wait_s)
    for rank in (0, 1):
        two.kill(rank)
    for process in two.processes:
        process.join()
    return True


def run_killed(
    two: Ranks, folder: Path, model: str, kills: int, seed: int
) -> tuple[dict[str, Any], int]:
    """Runs the script, kills it up to `kills` times, and resumes it after each kill. Returns the
    answer of the attempt that was not killed, and the number of kills after which there was an
    incomplete checkpoint."""
    draw = random.Random(seed)
    out, incomplete = folder / "out", 0
    for attempt in range(kills + 1):
        before = committed(out)
        arguments = {"directory": model, "folder": str(out), "resume": bool(before)} | HOW
        two.tell("trains", **arguments)
        count, wait_s = draw.randint(0, 2), draw.random() * 0.1
        if attempt < kills and kill_in_a_save(two, out, count, wait_s):
            after = committed(out)
            assert after[-1:] >= before[-1:], f"{before} before the kill, {after} after it"
            incomplete += any(out.glob("checkpoint-*/.partial-*"))
            continue
        (answer, _) = two.hear()
        assert isinstance(answer, dict), answer
        first = before[-1] + 1 if before else 1
        assert [*answer["losses"]] == [*range(first, STEPS + 1)], (
            f"did not resume from the newest committed checkpoint, {before[-1:]}"
        )
        return answer, incomplete
    raise AssertionError("the last attempt returns above")


# Always: a checkpoint without COMMIT (test_checkpoints.py), and faults and power cuts at every call
# of a save (modicum/checkpoint/run_test.cc).
@pytest.mark.soak
@pytest.mark.parametrize(("seeds", "kills"), [((1,), 3), (tuple(range(2, 14)), 5)])
def test_a_run_killed_while_saving_ends_with_the_same_bits(
    two: Ranks, tmp_path: Path, model: str, seeds: tuple[int, ...], kills: int
) -> None:
    (whole, _) = two.ask("trains", directory=model, folder=str(tmp_path / "out"), **HOW)
    incomplete = 0
    for seed in seeds:
        last, found = run_killed(two, tmp_path / f"{seed}", model, kills, seed)
        incomplete += found
        assert last["end"] == whole["end"]
        assert last["losses"].items() <= whole["losses"].items()
    print(f"{incomplete} kills left an incomplete checkpoint")
    assert incomplete > 0, "no kill hit a save"
