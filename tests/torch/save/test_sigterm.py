"""SIGTERM during `modicum.torch.save(grace=...)`. torchrun sends it to ranks, and kills those that
still run after a time, the *grace*. A save that can end within the grace is committed before
SIGTERM ends the process; otherwise the save ends with an error, on all ranks.

Catches: a SIGTERM that has no effect after the saved checkpoint is committed; a save that goes on
beyond its grace; a save that ends on one rank only; a second SIGTERM that is ignored; a handler of
the program that is replaced; a forecast from the rate of the first, small pieces; a SIGTERM that
ends the process before the ranks have met; a rank that waits for others that have ended; a SIGTERM
that is lost if the save fails.
"""

import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

from ranks import GONE, Ranks
from sharding import Cut

ONE, TWO, MESH = Cut("none", (1,)), Cut("fsdp2", (2,)), Cut("tp-fsdp", (2, 2))
BEGIN_S = 20.0  # in which every rank must begin to write


@pytest.fixture
def how(two: Ranks, tmp_path: Path) -> dict[str, Any]:
    """Arguments of the functions in tests/support/saving_rank.py. A rank writes the model in about
    thirty pieces."""
    sizes = {"hidden_size": 256, "intermediate_size": 512}
    folder = str(tmp_path / "model")
    two.ask("write", directory=folder, family="qwen3", config=sizes, dtype="float32")
    return {"directory": folder, "root": str(tmp_path / "steps"), "cut": TWO}


@pytest.fixture
def on_mesh(four: Ranks, tmp_path: Path, request: pytest.FixtureRequest) -> dict[str, Any]:
    """As `how`, for four ranks of TP and FSDP2. Rows that TP divides are gathered in shared memory
    and written by one rank. The parameter is the model's family: "qwen3" or "mixtral"."""
    folder = str(tmp_path / "model")
    sizes = {"hidden_size": 256, "intermediate_size": 512 if request.param == "qwen3" else 128}
    four.ask("write", directory=folder, family=request.param, config=sizes, dtype="float32")
    return {"directory": folder, "root": str(tmp_path / "steps"), "cut": MESH}


def begin(
    group: Ranks, how: dict[str, Any], tmp_path: Path, *, grace: float, pause_s: float
) -> None:
    """Begins a save; returns once every rank writes its second piece. `pause_s`: seconds by which
    each piece is delayed."""
    marks = tmp_path / "marks"
    marks.mkdir()
    group.tell("save_slowly", slow=(pause_s, str(marks)), grace=grace, **how)
    deadline = time.monotonic() + BEGIN_S
    while len(list(marks.iterdir())) < how["cut"].world:
        assert time.monotonic() < deadline, group.logs()
        time.sleep(0.01)


def pieces(group: Ranks, tmp_path: Path) -> list[int]:
    """How many pieces each rank has begun after its first one."""
    return [(tmp_path / f"marks/rank-{rank}").stat().st_size for rank in range(group.size)]


def send(group: Ranks, *to: int) -> None:
    """Sends SIGTERM to these ranks."""
    for rank in to:
        os.kill(group.pids[rank], signal.SIGTERM)


def assert_ends_early(
    group: Ranks, tmp_path: Path, *to: int, most: int, words: str = "PREEMPTED: SIGTERM"
) -> None:
    """Sends SIGTERM to these ranks. Asserts that the save ends with an error on every rank, before
    a rank has begun more than `most` further pieces. (A busy machine makes pieces longer, so that
    a limit in seconds would measure the machine.)"""
    before = pieces(group, tmp_path)
    send(group, *to)
    for answer in group.hear():
        assert answer["error"] == "PreemptedError" and words in answer["message"]
        assert answer["default"], "SIGTERM does not have its default handler again"
    after = pieces(group, tmp_path)
    begun = [end - begin for begin, end in zip(before, after, strict=True)]
    assert max(begun) <= most, begun
    assert [*(tmp_path / "steps").iterdir()] == []


@pytest.mark.parametrize("to", ((0, 1), (1,)), ids=("both", "one"))
def test_the_checkpoint_is_committed_within_the_grace(
    two: Ranks, how: dict[str, Any], tmp_path: Path, modicum: Path, to: tuple[int, ...]
) -> None:
    """Then SIGTERM ends the ranks that it was sent to, and no others."""
    begin(two, how, tmp_path, grace=60.0, pause_s=0.1)
    send(two, *to)
    heard = two.hear()
    for rank in range(2):
        if rank in to:
            assert_ended(two, rank, heard[rank])
        else:
            assert heard[rank] == {"error": ""}
    assert_committed(how, modicum)


def assert_ended(group: Ranks, rank: int, answer: Any) -> None:
    """Asserts that SIGTERM has ended the rank."""
    assert answer is GONE, answer
    group.processes[rank].join(10)
    assert group.processes[rank].exitcode == -signal.SIGTERM


def assert_committed(how: dict[str, Any], modicum: Path) -> None:
    assert sorted(p.name for p in Path(how["root"]).iterdir()) == ["latest", "step-1"]
    verified = subprocess.run([modicum, "verify", how["root"]], capture_output=True, text=True)
    assert verified.returncode == 0, verified.stderr


@pytest.mark.parametrize("to", ((0, 1), (1,)), ids=("both", "one"))
def test_all_ranks_end_a_save_that_does_not_fit(
    two: Ranks, how: dict[str, Any], tmp_path: Path, to: tuple[int, ...]
) -> None:
    begin(two, how, tmp_path, grace=3.0, pause_s=1.0)
    assert_ends_early(two, tmp_path, *to, most=5)  # 3 s, the one in flight, and one at the signal


@pytest.mark.parametrize(
    ("on_mesh", "to"),
    (pytest.param("qwen3", (0, 1, 2, 3), marks=pytest.mark.soak), ("mixtral", (3,))),
    indirect=["on_mesh"],
)
def test_a_checkpoint_of_a_mesh_is_committed_within_the_grace(
    four: Ranks, on_mesh: dict[str, Any], tmp_path: Path, modicum: Path, to: tuple[int, ...]
) -> None:
    begin(four, on_mesh, tmp_path, grace=120.0, pause_s=0.05)
    send(four, *to)
    heard = four.hear()
    for rank in range(4):
        if rank in to:
            assert_ended(four, rank, heard[rank])
        else:
            assert heard[rank] == {"error": ""}
    assert_committed(on_mesh, modicum)


@pytest.mark.parametrize(
    ("on_mesh", "to"), (("qwen3", (2,)), ("mixtral", (0, 1, 2, 3))), indirect=["on_mesh"]
)
def test_all_ranks_of_a_mesh_end_a_save_that_does_not_fit(
    four: Ranks, on_mesh: dict[str, Any], tmp_path: Path, to: tuple[int, ...]
) -> None:
    """No rank waits for the rows of a rank whose save has ended."""
    begin(four, on_mesh, tmp_path, grace=3.0, pause_s=1.0)
    assert_ends_early(four, tmp_path, *to, most=5)  # 3 s, the one in flight, and one at the signal


def test_a_second_signal_ends_the_save(two: Ranks, how: dict[str, Any], tmp_path: Path) -> None:
    begin(two, how, tmp_path, grace=600.0, pause_s=0.5)
    send(two, 0, 1)
    time.sleep(1.2)  # SIGTERMs of the first second count as one
    assert_ends_early(two, tmp_path, 0, most=5, words="a second SIGTERM")


def test_a_handler_of_the_program_is_not_replaced(
    two: Ranks, how: dict[str, Any], tmp_path: Path
) -> None:
    for answer in two.ask("save_handling", **how):
        assert answer["error"] == "UsageError" and "handles SIGTERM itself" in answer["message"]
        assert answer["kept"]
    assert not (tmp_path / "steps").exists()


@pytest.mark.parametrize("to", ((0, 1), (0,), (1,)), ids=("both", "first", "last"))
@pytest.mark.parametrize("background", (False, True), ids=("foreground", "background"))
def test_a_signal_before_the_ranks_meet_is_held(
    two: Ranks, how: dict[str, Any], modicum: Path, to: tuple[int, ...], background: bool
) -> None:
    """The ranks `to` send themselves a SIGTERM in `save`, before the first collective. The
    checkpoint is committed, and then SIGTERM ends these ranks."""
    kind = {"step": 1, "grace": 60.0, "background": background}
    each = {rank: {"signals": int(rank in to)} for rank in range(2)}
    two.tell("save_signalled", each, kind=kind, **how)
    for rank, answer in enumerate(two.hear()):
        if rank in to:
            assert_ended(two, rank, answer)
        else:
            assert answer == {"error": "", "default": True}
    assert_committed(how, modicum)


@pytest.mark.parametrize("background", (False, True), ids=("foreground", "background"))
def test_without_a_grace_sigterm_ends_the_process(
    one: Ranks, tmp_path: Path, background: bool
) -> None:
    where = {"directory": str(tmp_path / "model"), "root": str(tmp_path / "steps"), "cut": ONE}
    one.ask("write", directory=where["directory"], family="qwen3", dtype="float32")
    one.tell("save_signalled", **where, signals=1, kind={"step": 1, "background": background})
    assert_ended(one, 0, one.hear()[0])
    assert not [*tmp_path.glob("steps/step-*")]


def test_a_signal_at_the_call_of_one_rank_alone(one: Ranks, tmp_path: Path, modicum: Path) -> None:
    """A rank calls `save` three times. The first save gets no SIGTERM. The second one gets a
    SIGTERM and fails, since the checkpoint exists already: the process prints the error and ends.
    The third one, in a new process, gets a SIGTERM and succeeds: the process ends."""
    where = {"directory": str(tmp_path / "model"), "root": str(tmp_path / "steps"), "cut": ONE}
    one.ask("write", directory=where["directory"], family="qwen3", dtype="float32")
    how = where | {"signals": 0, "kind": {"step": 1, "grace": 60.0}}
    assert one.ask("save_signalled", **how) == [{"error": "", "default": True}]
    one.tell("save_signalled", **how | {"signals": 1})
    assert_ended(one, 0, one.hear()[0])
    assert "step-1" in one.logs() and "CONFLICT" in one.logs()
    one.tell("save_signalled", **where, signals=1, kind={"step": 2, "grace": 60.0})
    assert_ended(one, 0, one.hear()[0])
    assert sorted(p.name for p in (tmp_path / "steps").iterdir()) == ["latest", "step-1", "step-2"]
    verified = subprocess.run([modicum, "verify", where["root"]], capture_output=True, text=True)
    assert verified.returncode == 0, verified.stderr


def test_a_rank_does_not_wait_for_one_that_has_ended(two: Ranks, how: dict[str, Any]) -> None:
    """SIGTERM has ended rank 1 before it called `save`. Rank 0 waits for half of its grace."""
    kind = {"step": 1, "grace": 3.0}
    two.tell("save_signalled", {0: {"signals": 1}, 1: {"signals": None}}, kind=kind, **how)
    first, last = two.hear()
    assert_ended(two, 1, last)
    assert first["error"] == "PreemptedError" and "nothing is written yet" in first["message"]
    assert first["default"] and 1.0 < first["took_s"] < 30
    assert not Path(how["root"]).exists()


def test_two_signals_before_the_ranks_meet_end_the_save(two: Ranks, how: dict[str, Any]) -> None:
    each = {0: {"signals": 2}, 1: {"signals": 0}}
    two.tell("save_signalled", each, kind={"step": 1, "grace": 600.0}, **how)
    for answer in two.hear():
        assert answer["error"] == "PreemptedError" and "a second SIGTERM" in answer["message"]
        assert answer["default"]
    # If rank 1 came first, rank 0 does not wait for it, and the signals take effect later, when the
    # save may have made the root.
    assert not [*Path(how["root"]).glob("step-*")]


# ---- save_on_sigterm


@pytest.mark.parametrize(
    ("signals", "options", "number", "names"),
    [
        ((1, 1), {}, 3, ["latest", "step-3"]),
        ((0, 1), {}, 3, ["latest", "step-3"]),
        ((1, 0), {"every": 2}, 4, ["latest", "step-4"]),
        ((1, 1), {"repeats": 2}, 3, ["latest", "step-3"]),
        ((1, 0), {"in_save": (0, 1)}, 3, ["latest", "step-3"]),
        ((1, 1), {"in_flight": 2}, 3, ["latest", "step-2", "step-3"]),
        ((1, 0), {"in_flight": 2, "grace": 60.0}, 3, ["latest", "step-2", "step-3"]),
        ((1, 0), {"periodic": "save"}, 3, ["latest", "step-3"]),
        ((1, 1), {"periodic": "async_save"}, 3, ["latest", "step-3"]),
    ],
    ids=(
        "both", "one", "every second step", "repeated at once", "the other one during the save",
        "a save in flight", "a save in flight with a grace", "the loop saves the step",
        "the loop saves the step in the background",
    ),
)  # fmt: skip
def test_a_loop_saves_and_ends_on_all_ranks(
    two: Ranks,
    how: dict[str, Any],
    modicum: Path,
    signals: tuple[int, int],
    options: dict[str, Any],
    number: int,
    names: list[str],
) -> None:
    """Whichever rank has got SIGTERM, all save the same step and exit with 143."""
    each = {rank: {"signals": count} for rank, count in enumerate(signals)}
    two.tell("preempted_loop", each, how=options, **how)
    ended = {"code": 143, "number": number, "default": True}
    assert two.hear() == [ended, ended]
    assert sorted(path.name for path in Path(how["root"]).iterdir()) == names
    verified = subprocess.run([modicum, "verify", how["root"]], capture_output=True, text=True)
    assert verified.returncode == 0, verified.stderr
    saved = f"{how['root']}/step-{number} at step {number}"
    assert two.logs().count(f"modicum: SIGTERM: saved {saved}, exiting 143") == 1


def test_a_second_sigterm_ends_a_loop_at_once(two: Ranks, how: dict[str, Any]) -> None:
    two.tell("preempted_loop", signals=2, how={}, **how)
    heard = two.hear()
    for rank in range(2):
        assert_ended(two, rank, heard[rank])
    assert not Path(how["root"]).exists()


@pytest.mark.parametrize("grace", (None, 60.0))
def test_a_second_sigterm_during_the_save(
    two: Ranks, how: dict[str, Any], modicum: Path, grace: float | None
) -> None:
    """It ends the process: with a grace once the checkpoint is committed, without one at once."""
    options = {"grace": grace, "in_save": (1, 1), "after_s": 1.2}
    two.tell("preempted_loop", signals=1, how=options, **how)
    for rank, answer in enumerate(two.hear()):
        assert_ended(two, rank, answer)
    steps = [path.name for path in Path(how["root"]).glob("step-*")]
    assert steps == ([] if grace is None else ["step-3"])


def test_a_kill_in_a_step_leaves_the_previous_checkpoint(
    two: Ranks, how: dict[str, Any], modicum: Path
) -> None:
    """The grace of the scheduler is over before the step that got SIGTERM."""
    two.tell("preempted_loop", signals=1, how={"saved": True, "is_killed": True}, **how)
    assert two.hear() == [GONE, GONE]
    assert [path.name for path in Path(how["root"]).glob("step-*")] == ["step-2"]
    verified = subprocess.run([modicum, "verify", how["root"]], capture_output=True, text=True)
    assert verified.returncode == 0, verified.stderr


def test_a_loop_without_sigterm_is_as_before(two: Ranks, how: dict[str, Any]) -> None:
    two.tell("preempted_loop", signals=0, how={}, **how)
    assert two.hear() == [{"code": None, "number": 5, "default": True}] * 2
    assert not Path(how["root"]).exists()


def test_a_sigterm_after_the_last_agreement_ends_the_process(
    one: Ranks, how: dict[str, Any]
) -> None:
    one.tell("preempted_loop", signals=1, how={"every": 4, "at": 5}, **how | {"cut": ONE})
    assert_ended(one, 0, one.hear()[0])


def test_a_save_in_flight_at_the_end_of_the_context_is_committed(
    two: Ranks, how: dict[str, Any]
) -> None:
    """Both ranks get SIGTERM after the last agreement, while rank 1 is late to vote."""
    two.tell("preempted_loop", signals=1, how={"every": 4, "at": 5, "in_flight": 5}, **how)
    for rank, answer in enumerate(two.hear()):
        assert_ended(two, rank, answer)
    (saved,) = Path(how["root"]).glob("step-*")
    assert f"modicum: SIGTERM: saved {saved} at step 5, exiting 143\n" in two.logs()


LOADER = """
import os, signal, subprocess, sys, time, modicum.torch
from torch.utils.data import DataLoader
def batches(start=None):
    return iter(DataLoader([*range(40)], num_workers=1, multiprocessing_context=start))
def signal_all():  # as Slurm signals all processes of a job step
    for pid in (workers[0].pid, os.getpid()):
        subprocess.run(["kill", "-TERM", str(pid)])
    time.sleep(0.3)
"""


@pytest.mark.parametrize(
    ("start", "ended_by_parent"),
    (("fork", 0), ("forkserver", -15), pytest.param("spawn", 0, marks=pytest.mark.soak)),
)
def test_a_sigterm_to_the_workers_of_a_loader_does_not_end_the_training(
    start: str, ended_by_parent: int
) -> None:
    """They end by a SIGTERM of the process that has started them, with the code that torch gives
    it, and by that of anyone once this process has ended."""
    program = LOADER + (
        "with modicum.torch.save_on_sigterm(lambda: print('saved')) as preemption:\n"
        f"    loader, other = batches({start!r}), batches({start!r})\n"
        "    next(other)  # the worker has set its signal handlers\n"
        "    workers = other._workers\n"
        "    workers[0].terminate()\n"
        "    workers[0].join(10)\n"
        "    print(workers[0].exitcode, flush=True)\n"
        "    workers = loader._workers\n"
        "    for _ in loader:\n"
        "        signal_all()\n"
        "        assert workers[0].is_alive()\n"
        "        print(next(loader).tolist(), flush=True)\n"
        "        preemption.after_step()\n"
    )
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (ended.returncode, ended.stdout) == (
        143,
        f"{ended_by_parent}\n[1]\nsaved\n",
    ), ended.stderr


@pytest.mark.parametrize("start", ("fork", pytest.param("forkserver", marks=pytest.mark.soak)))
def test_a_worker_of_a_parent_that_was_killed_ends_by_sigterm(start: str) -> None:
    program = LOADER + (
        "with modicum.torch.save_on_sigterm(lambda: None):\n"
        f"    loader = batches({start!r})\n"
        "    next(loader)\n"
        "    print(loader._workers[0].pid, flush=True)\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    words = [sys.executable, "-c", program]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        worker = int(parent.stdout.readline())
        parent.wait()
    status = Path(f"/proc/{worker}/status")
    with suppress(ProcessLookupError):
        os.kill(worker, signal.SIGTERM)
    deadline = time.monotonic() + 2  # before the worker itself asks for its parent
    while status.exists() and "\nState:\tZ" not in status.read_text():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.soak
def test_a_sigterm_to_earlier_workers_of_a_loader_ends_the_training() -> None:
    program = LOADER + (
        "loader = batches()\n"
        "workers = loader._workers\n"
        "with modicum.torch.save_on_sigterm(lambda: print('saved')) as preemption:\n"
        "    for _ in loader:\n"
        "        signal_all()\n"
        "        preemption.after_step()\n"
    )
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert ended.stdout == "" and ended.returncode in (1, -signal.SIGTERM), ended.stderr
    assert "is killed by signal: Terminated" in ended.stderr


def test_an_error_of_the_save_is_printed_before_sigterm_ends_the_process() -> None:
    program = (
        "import signal, modicum.torch\n"
        "def save(): raise OSError('the disk is full')\n"
        "with modicum.torch.save_on_sigterm(save) as preemption:\n"
        "    signal.raise_signal(signal.SIGTERM)\n"
        "    preemption.after_step()\n"
    )
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert ended.returncode == -signal.SIGTERM and "the disk is full" in ended.stderr
    assert ended.stderr.endswith("modicum: SIGTERM: the loop has ended, exiting 143\n")


def test_a_save_of_the_program_is_not_called_a_checkpoint() -> None:
    program = (
        "import signal, modicum.torch\n"
        "with modicum.torch.save_on_sigterm(lambda: None) as preemption:\n"
        "    signal.raise_signal(signal.SIGTERM)\n"
        "    preemption.after_step()\n"
    )
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert ended.returncode == 143
    assert "modicum: SIGTERM: the loop's function has saved, exiting 143\n" in ended.stderr


def test_a_handler_of_the_program_is_kept() -> None:
    import modicum.torch

    def handler(*_: Any) -> None: ...

    signal.signal(signal.SIGTERM, handler)
    try:
        with pytest.raises(modicum.UsageError, match="handles SIGTERM itself"):
            with modicum.torch.save_on_sigterm(lambda: None):
                pytest.fail("the block ran")
        assert signal.getsignal(signal.SIGTERM) is handler
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
