"""SIGTERM during `modicum.torch.save(grace=...)`, as torchrun sends it before it kills.

Must fail for these mutants: SIGTERM that is forgotten after the step is committed; a save that goes
on beyond its grace; one rank alone that ends; a second SIGTERM that is ignored; a handler of the
program that is replaced; a rate of the first, small pieces.
"""

import os
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

from ranks import GONE, Ranks, ranks
from sharding import Cut

TWO = Cut("fsdp2", (2,))
SENT_S = 20.0


@pytest.fixture
def two(tmp_path: Path) -> Iterator[Ranks]:
    with ranks(2, tmp_path / "ranks") as group:
        yield group


@pytest.fixture
def how(two: Ranks, tmp_path: Path) -> dict[str, Any]:
    """The arguments of an act, in which a rank writes the model in about thirty pieces."""
    sizes = {"hidden_size": 256, "intermediate_size": 512}
    folder = str(tmp_path / "model")
    two.ask("write", directory=folder, family="qwen3", config=sizes, dtype="float32")
    return {"directory": folder, "root": str(tmp_path / "steps"), "cut": TWO}


def begin(two: Ranks, how: dict[str, Any], tmp_path: Path, *, grace: float, pause_s: float) -> None:
    """Begins a slow save. Returns once both ranks write."""
    marks = tmp_path / "marks"
    marks.mkdir()
    two.tell("save_slowly", slow=(pause_s, str(marks)), grace=grace, **how)
    deadline = time.monotonic() + SENT_S
    while len(list(marks.iterdir())) < 2:
        assert time.monotonic() < deadline, two.logs()
        time.sleep(0.01)


def send(two: Ranks, *to: int) -> float:
    for rank in to:
        os.kill(two.pids[rank], signal.SIGTERM)
    return time.monotonic()


@pytest.mark.parametrize("to", ((0, 1), (1,)), ids=("both", "one"))
def test_the_step_is_committed_within_the_grace(
    two: Ranks, how: dict[str, Any], tmp_path: Path, modicum: Path, to: tuple[int, ...]
) -> None:
    """After the commit SIGTERM ends the process, as without a save."""
    begin(two, how, tmp_path, grace=60.0, pause_s=0.1)
    send(two, *to)
    heard = two.hear()
    for rank in range(2):
        if rank in to:
            two.processes[rank].join(10)
            assert heard[rank] is GONE, heard
            assert two.processes[rank].exitcode == -signal.SIGTERM
        else:
            assert heard[rank] == {"error": ""}
    assert sorted(p.name for p in (tmp_path / "steps").iterdir()) == ["latest", "step-1"]
    verified = subprocess.run([modicum, "verify", how["root"]], capture_output=True, text=True)
    assert verified.returncode == 0, verified.stderr


@pytest.mark.parametrize("to", ((0, 1), (1,)), ids=("both", "one"))
def test_all_ranks_end_a_save_that_does_not_fit(
    two: Ranks, how: dict[str, Any], tmp_path: Path, to: tuple[int, ...]
) -> None:
    begin(two, how, tmp_path, grace=3.0, pause_s=1.0)
    sent = send(two, *to)
    for answer in two.hear():
        assert answer["error"] == "PreemptedError" and "PREEMPTED: SIGTERM" in answer["message"]
        assert answer["default"], "SIGTERM stays held"
    assert time.monotonic() - sent < 3.0
    assert [*(tmp_path / "steps").iterdir()] == []


def test_a_second_signal_ends_the_save(two: Ranks, how: dict[str, Any], tmp_path: Path) -> None:
    begin(two, how, tmp_path, grace=600.0, pause_s=0.5)
    send(two, 0, 1)
    time.sleep(0.6)  # the kernel merges signals that are pending together
    sent = send(two, 0)
    for answer in two.hear():
        assert answer["error"] == "PreemptedError" and "a second SIGTERM" in answer["message"]
    assert time.monotonic() - sent < 2.0
    assert [*(tmp_path / "steps").iterdir()] == []


def test_a_handler_of_the_program_is_not_replaced(
    two: Ranks, how: dict[str, Any], tmp_path: Path
) -> None:
    for answer in two.ask("save_handling", **how):
        assert answer["error"] == "UsageError" and "handles SIGTERM itself" in answer["message"]
        assert answer["kept"]
    assert not (tmp_path / "steps").exists()
