"""The states of a save in the background: each event in each state, and what happens to a save of
real ranks.

Catches: a step that is skipped or raises, after which the rank does not vote; a rank that raises
the error of a failed save before the ranks meet; `done` or `exception` that deliver an error; a
step of another optimizer that one rank makes and another refuses; a rank that has voted and reports
a failure although the checkpoint is visible.
"""

import os
import random
import signal
import subprocess
import time
from itertools import product
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

from ranks import GONE, Failed, Ranks
from sharding import Cut

from modicum.errors import PreemptedError
from modicum.torch.saving import sigterm as sigterm_module
from modicum.torch.saving.sigterm import Sigterm
from modicum.torch.saving.states import READS, TABLE, Event, State, next_state

TWO = Cut("fsdp2", (2,))
PAGE = Path(__file__).resolve().parents[3] / "docs/reference/checkpoints.md"
CALLS = ["save", "background", "load", "resume", "step", "wait", "other"]
CALLS += ["alone other", "alone save", "alone resume", "alone load"]
SOON_S = 15.0  # far less than the group's timeout
ROUNDS = range(15)
LAST = (State.COMMITTED, State.FAILED)


def moves() -> dict[tuple[State, Event], State | None]:
    """The state after each event in each state; None if it can't happen."""
    found: dict[tuple[State, Event], State | None] = {}
    for state, event in product(State, Event):
        try:
            found[state, event] = next_state(state, event)
        except ValueError:
            found[state, event] = None
    return found


def test_each_event_in_each_state_is_in_the_table() -> None:
    (_, *states), *rows = [line.split() for line in TABLE.strip().splitlines()]
    assert states == [state.value for state in State]
    assert [row[0] for row in rows] == [event.value for event in Event]
    for event, *row in rows:
        for name, cell in zip(states, row, strict=True):
            state = State(name)
            expected = None if cell == "-" else state if cell == "=" else State(cell)
            assert moves()[state, Event(event)] == expected, (name, event)


def test_the_page_has_the_table() -> None:
    lines = [line for line in PAGE.read_text().splitlines() if line.startswith("| ")]
    rows = [[cell.strip(" `") for cell in line.strip("|").split("|")] for line in lines]
    expected = [line.split() for line in TABLE.strip().splitlines()]
    begin = rows.index(expected[0])
    assert rows[begin : begin + len(expected)] == expected


def test_a_save_ends_in_one_of_two_states() -> None:
    """No event leaves them; from every other state there is a way to one of them."""
    after = moves()
    for (state, event), to in after.items():
        assert state not in LAST or to in (state, None), (state, event)
    ends = set(LAST)
    for _ in State:
        ends |= {state for (state, _), to in after.items() if to in ends}
    assert ends == set(State)


def test_a_vote_is_final() -> None:
    """Only a rank that has written its part votes. Then nothing but the root, or rank 0's word,
    decides; an error alone does not. What rank 0 commits can't be cancelled by other ranks."""
    after = moves()
    assert [state for (state, _), to in after.items() if to is State.VOTED and state != to] == [
        State.WRITTEN
    ]
    from_voted = {to for (state, _), to in after.items() if state is State.VOTED}
    assert State.FAILED not in from_voted
    from_commit = {to: event for (state, event), to in after.items() if state is State.COMMITTING}
    assert from_commit[State.FAILED] is Event.OWN_ERROR
    assert not any(to in READS for (state, _), to in after.items() if state not in READS)


@pytest.mark.parametrize(
    ("grace_s", "signals", "words"),
    ((60.0, 0, ""), (60.0, 1, ""), (60.0, 2, "a second SIGTERM"), (1e-9, 1, "SIGTERM ended")),
)
def test_a_vote_waits_until_the_grace_is_over(
    grace_s: float, signals: int, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sigterm_module, "REPEAT_S", 0.0)
    sigterm = Sigterm(grace_s)
    sigterm.during(100)
    sigterm.begin_vote()
    for _ in range(signals):
        sigterm.note(signal.SIGTERM, None)
    if words:
        with pytest.raises(PreemptedError, match=words):
            sigterm.while_waiting()
    sigterm.end_vote()
    sigterm.while_waiting()


@pytest.fixture
def how(two: Ranks, tmp_path: Path) -> dict[str, Any]:
    folder = str(tmp_path / "model")
    two.ask("write", directory=folder, family="qwen3", dtype="float32")
    return {"directory": folder, "root": str(tmp_path / "steps"), "cut": TWO}


def test_an_error_is_delivered_in_one_call_on_all_ranks(two: Ranks, how: dict[str, Any]) -> None:
    """By `done` and `exception` all ranks know of the error of rank 1, which neither delivers. The
    next collective call raises it on all of them, and no later one."""
    for answers in zip(*two.ask("background_delivers", calls=CALLS, **how), strict=True):
        for answer in answers:
            assert answer["seen"] == "IoError", answer
            assert answer["raised"]["error"] == "IoError", answer
            assert "the disk is full (rank 1)" in answer["raised"]["message"], answer
            assert answer["raised"]["took_s"] < SOON_S, answer
            assert answer["names"] == ["latest", "step-1"]
            assert answer["after"] == ""


def test_a_save_lasts(two: Ranks, how: dict[str, Any]) -> None:
    """A skipped step and one that raises vote at their end. Ctrl-C in `result`, a limit of it and a
    forked child change nothing. A rank that has voted and fails, or a root that is renamed, ends
    the save."""
    # The save whose root is renamed stays a failed one: the processes end after the act.
    for answer in two.ask("background_lasts", exits=True, **how):
        assert answer["skipped"] and answer["raising"]
        assert answer["error skipped"] == "" and answer["error raising"] == "RuntimeError"
        assert answer["child"] == 0
        assert answer["interrupted"] and answer["after"] == "step-2"
        assert answer["limits"] == ["TimeoutError"] * 3 and answer["last"] == "step-5"
        assert answer["called"] == [[], [("modicum-save", True), ("MainThread", True)]]
        assert "the vote is withdrawn" in answer["withdrawn"]["message"]
        assert answer["withdrawn"]["took_s"] < SOON_S
        assert answer["names"] == ["latest", "step-0", "step-1", "step-2", "step-5"]
        assert answer["renamed"]["error"] == answer["exception"] == "IoError", answer["renamed"]
        assert answer["renamed"]["took_s"] < SOON_S, "the store's host may have ended"
    assert not list(Path(how["root"] + "-moved").glob("step-4"))


def test_the_group_is_destroyed(two: Ranks, how: dict[str, Any]) -> None:
    for answer in two.ask("background_parted", exits=True, **how):
        assert answer["error"] in ("UsageError", "PeerError"), answer
        assert answer["took_s"] < SOON_S
    assert not list(Path(how["root"]).glob("step-1"))


def test_a_rank_searches_the_root(two: Ranks, how: dict[str, Any], modicum: Path) -> None:
    """Rank 0 dies after it has published the checkpoint, and before it reports it."""
    lose(two, how, modicum, "after", 0)


def lose(two: Ranks, how: dict[str, Any], modicum: Path, when: str, seed: int) -> None:
    two.tell("background_loses", when=when, seed=seed, **how)
    first, last = two.hear()
    dead, answer = (last, first) if when == "soon" else (first, last)
    assert dead is GONE and isinstance(answer, dict), (answer, two.logs())
    assert answer["took_s"] < SOON_S
    is_visible = Path(how["root"], "step-1/COMMIT").exists()
    assert answer["error"] == ("" if is_visible else "PeerError"), answer
    if when != "soon":
        assert is_visible == (when == "after")
    if is_visible:
        verify(how, modicum)


def verify(how: dict[str, Any], modicum: Path) -> None:
    done = subprocess.run([modicum, "verify", how["root"]], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.soak
@pytest.mark.parametrize("when", ("before", "after", "soon"))
@pytest.mark.parametrize("seed", ROUNDS)
def test_dead_peers(two: Ranks, how: dict[str, Any], modicum: Path, when: str, seed: int) -> None:
    lose(two, how, modicum, when, seed)


@pytest.mark.soak
@pytest.mark.parametrize("seed", ROUNDS)
def test_sigterm_at_random_during_steps(
    two: Ranks, how: dict[str, Any], tmp_path: Path, modicum: Path, seed: int
) -> None:
    """Some steps are skipped. SIGTERM ends the ranks after the checkpoint is visible. If it does
    not fit into the grace, ranks raise, which a later SIGTERM may end, and it is not visible.
    Gloo's RuntimeError is that of a step whose other rank has ended."""
    marks = tmp_path / "marks"
    marks.mkdir()
    two.tell("background_terminated", marks=str(marks), seed=seed, **how)
    while len(list(marks.iterdir())) < 2:
        time.sleep(0.01)
    chance = random.Random(1000 + seed)
    time.sleep(chance.uniform(0, 1))
    for pid in two.pids:
        os.kill(pid, signal.SIGTERM)
        time.sleep(chance.uniform(0, 0.2))
    heard = two.hear()
    is_visible = Path(how["root"], "step-1/COMMIT").exists()
    assert not any(isinstance(answer, Failed) for answer in heard), heard
    for answer in heard:
        errors = ["RuntimeError"] if is_visible else ["PreemptedError", "RuntimeError"]
        assert answer is GONE or answer["error"] in errors, (answer, two.logs())
    assert is_visible or heard != [GONE, GONE], two.logs()
    if is_visible:
        verify(how, modicum)


@pytest.mark.soak
@pytest.mark.parametrize("seed", ROUNDS)
def test_a_write_that_fails_on_a_rank(two: Ranks, how: dict[str, Any], seed: int) -> None:
    chosen = random.Random(seed).sample(CALLS, 2)
    for answers in zip(*two.ask("background_delivers", calls=chosen, **how), strict=True):
        for answer in answers:
            assert answer["raised"]["error"] == "IoError", answer
            assert answer["after"] == "" and answer["names"] == ["latest", "step-1"]
