"""A failure on one rank of a process group ends the load on all ranks within seconds, with the same
error that names the culprit; the model is unchanged and can be loaded again.

Must fail for these mutants: ranks that wait for one that has failed or died; a parameter that is
filled although another rank has failed; ranks that go on with different plans; a slow rank treated
as dead; Ctrl-C that is ignored, or that the other ranks do not learn of.
"""

import os
import re
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from clocks import WaitingClock
from program import run_json

pytest.importorskip("torch")
pytest.importorskip("transformers")

from ranks import GONE, Failed, Ranks, ranks

MESH = [4]
CULPRIT = 2
SOON_S = 10.0  # in which all ranks learn of a failure
SLOW_S = 15.0  # longer than the silence after which a rank counts as lost
FOREVER_S = 600.0


@pytest.fixture(scope="module")
def four(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    with ranks(4, tmp_path_factory.mktemp("faults") / "ranks") as started:
        yield started


@pytest.fixture
def more(tmp_path: Path) -> Iterator[Callable[[], Ranks]]:
    """Starts ranks that may die."""
    with ExitStack() as stack:
        yield lambda: stack.enter_context(ranks(4, tmp_path / f"ranks-{time.monotonic_ns()}"))


@pytest.fixture(scope="module")
def model(four: Ranks, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("models") / "qwen3"
    four.ask("write", directory=str(directory), family="qwen3", dtype="bfloat16")
    return directory


@pytest.fixture(scope="module")
def other_model(four: Ranks, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with the same names and other shapes."""
    directory = tmp_path_factory.mktemp("models") / "other"
    four.ask("write", directory=str(directory), family="qwen3", config={"vocab_size": 103})
    return directory


@pytest.fixture(scope="module")
def large(modicum: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A sparse model of 2 GB in few tensors, which takes seconds to load."""
    directory = tmp_path_factory.mktemp("models") / "large"
    words = ("--arch", "llama-3.2-1b", "--layers", 4, "--dtype", "float32", "--sparse")
    run_json(modicum, "synth", directory, *words)
    return directory


@pytest.fixture(scope="module")
def expected(four: Ranks, model: Path) -> list[dict[str, str]]:
    """The shards that torch gives each rank."""
    return [a["state"] for a in four.ask("loaded", directory=str(model), mesh=MESH, by="torch")]


@pytest.fixture(scope="module", autouse=True)
def clock() -> Iterator[WaitingClock]:
    with WaitingClock() as started:
        yield started


def failures(clock: WaitingClock, answers: list[Any], culprit: int, pid: int) -> Failed:
    """Asserts that all ranks failed alike and left their model unchanged; returns one failure."""
    raised = [answer["failure"] for answer in answers if answer is not GONE]
    assert None not in raised, f"some ranks have loaded: {answers}"
    for answer, failure in zip(answers, raised, strict=False):
        began_s = failure.at_s - failure.after_s
        assert clock.seconds(began_s, failure.at_s) <= SOON_S, raised
        assert answer is GONE or answer["on_meta"], f"a model has changed: {raised}"
        assert failure.facts["culprit_rank"] == culprit, raised
        assert failure.facts["culprit_pid"] == pid, raised
    alike = {(f.error, f.message, f.facts["category"], f.facts["code"]) for f in raised}
    assert len(alike) == 1, raised
    return raised[0]


# ---- one rank's files


def lacks_a_shard(source: Path) -> dict[str, Any]:
    min(source.glob("*.safetensors")).unlink()
    return {"source": str(source)}


def is_not_there(source: Path) -> dict[str, Any]:
    shutil.rmtree(source)
    return {"source": str(source)}


def has_a_bad_header(source: Path) -> dict[str, Any]:
    with max(source.glob("*.safetensors")).open("r+b") as file:
        file.seek(8)
        file.write(b"]")
    return {"source": str(source)}


def is_short(source: Path) -> dict[str, Any]:
    file = max(source.glob("*.safetensors"))
    os.truncate(file, file.stat().st_size - 1)
    return {"source": str(source)}


def becomes_short(source: Path) -> dict[str, Any]:
    """The fault happens after all headers were validated and all ranks have agreed."""
    file = max(source.glob("*.safetensors"), key=lambda file: file.stat().st_size)
    return {"source": str(source), "truncate": str(file)}


@pytest.mark.parametrize("strategy", ("own-shard", "node-reader"))
@pytest.mark.parametrize(
    ("spoil", "error", "category"),
    [
        (lacks_a_shard, "FormatError", "INDEX.MISSING_SHARD"),
        (is_not_there, "IoError", "IO"),
        (has_a_bad_header, "FormatError", "FORMAT.HEADER"),
        (is_short, "FormatError", "FORMAT.TRUNC"),
        (becomes_short, "IoError", "CONFLICT"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_fault_in_one_ranks_files_ends_the_load_on_all(
    clock: WaitingClock,
    four: Ranks,
    model: Path,
    expected: list[dict[str, str]],
    tmp_path: Path,
    spoil: Callable[[Path], dict[str, Any]],
    error: str,
    category: str,
    strategy: str,
) -> None:
    culprit = 0 if strategy == "node-reader" else CULPRIT  # the rank that reads
    spoilt = spoil(Path(shutil.copytree(model, tmp_path / "copy")))
    how = {"directory": str(model), "source": str(model), "mesh": MESH, "strategy": strategy}
    answers = four.ask("tried", {culprit: spoilt}, **how)
    failure = failures(clock, answers, culprit, four.pids[culprit])
    assert failure.error == error and failure.facts["category"] == category, failure
    assert [answer["state"] for answer in answers] == expected


# ---- arguments


@pytest.mark.parametrize(
    ("differs", "error", "message"),
    [
        ({"dtype": "float32"}, "IoError", "CONFLICT: .* dtype .expected None, got torch.float32"),
        ({"strategy": "node-reader"}, "IoError", "CONFLICT: .* strategy .*got 'node-reader'"),
        (
            {"staging": "2MiB"},
            "IoError",
            "CONFLICT: .* argument staging .expected None, got '2MiB'",
        ),
        ({"keep_fp32": "."}, "IoError", "CONFLICT: .* argument keep_fp32 .expected None, got '.'"),
        ({"source": "other"}, "IoError", "CONFLICT: "),
        ({"budget": "1MiB"}, "BudgetError", "BUDGET: "),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_ranks_with_different_arguments_name_the_first_that_differs(
    clock: WaitingClock,
    four: Ranks,
    model: Path,
    other_model: Path,
    expected: list[dict[str, str]],
    differs: dict[str, Any],
    error: str,
    message: str,
) -> None:
    """The error names the differing rank, and its value."""
    if "source" in differs:
        differs = {"source": str(other_model)}
    how = {"directory": str(model), "source": str(model), "mesh": MESH}
    answers = four.ask("tried", {CULPRIT: differs}, **how)
    failure = failures(clock, answers, CULPRIT, four.pids[CULPRIT])
    assert failure.error == error
    assert re.match(message, failure.message), failure.message
    assert f"rank {CULPRIT}" in failure.message
    assert [answer["state"] for answer in answers] == expected


@pytest.mark.parametrize(
    "wrong", [{"missing": "("}, {"unexpected": "(?<=a)b"}, {"keep_fp32": "["}], ids=str
)
def test_an_invalid_expression_is_the_same_error_on_all_ranks(
    four: Ranks, model: Path, wrong: dict[str, str]
) -> None:
    """Rank 0 alone makes the recipe."""
    how = {"directory": str(model), "source": str(model), "mesh": MESH, "again": False}
    answers = four.ask("tried", **wrong, **how)
    for answer in answers:
        failure = answer["failure"]
        assert (failure.error, failure.facts["category"]) == ("UsageError", "USAGE"), failure
        assert failure.message == answers[0]["failure"].message
        assert answer["on_meta"]


def test_budget_is_refused_by_all_without_reading(
    four: Ranks, modicum: Path, tmp_path: Path
) -> None:
    """The error has the exact shortfall, only headers were read, and a budget of the named size
    suffices."""
    directory = tmp_path / "qwen3-0.6b"
    run_json(modicum, "synth", directory, "--arch", "qwen3-0.6b", "--layers", 2, "--sparse")
    how = {"directory": str(directory), "source": str(directory), "mesh": MESH, "again": False}
    answers = four.ask("tried", budget="600MiB", **how)
    header = int.from_bytes((directory / "model.safetensors").open("rb").read(8), "little")
    for answer in answers:
        failure, facts = answer["failure"], answer["failure"].facts
        assert failure.error == "BudgetError" and facts["category"] == "BUDGET"
        assert failure.message == answers[0]["failure"].message
        assert facts["expected"] == 600 << 20
        assert facts["shortfall_bytes"] == facts["got"] - facts["expected"] > 0
        assert answer["on_meta"]
        assert answer["read_bytes"] <= 8 + header + (64 << 10)
    needed = answers[0]["failure"].facts["got"]
    answers = four.ask("tried", budget=needed - (200 << 20), **how)
    assert answers[0]["failure"].error == "BudgetError"
    # When other processes write to pages shared with a rank, its share of them grows.
    answers = four.ask("tried", budget=needed + (16 << 20), **how)
    assert [answer["failure"] for answer in answers] == [None] * 4


# ---- ranks that die


def until_begun(four: Ranks) -> None:
    """Waits until all ranks have agreed on the plan."""
    deadline = time.monotonic() + 120
    while len(list(four.folder.glob("begun-*"))) < 4:
        assert time.monotonic() < deadline, four.logs()
        time.sleep(0.01)


@pytest.mark.parametrize(
    ("strategy", "mesh", "victim"),
    [
        ("own-shard", [4], 2),
        ("own-shard", [4], 0),  # has the store
        ("node-reader", [4], 0),
        ("rank0-broadcast", [4], 1),
        ("replica-striped", [2, 2], 3),
    ],
)
def test_a_killed_rank_is_named_by_all_others(
    clock: WaitingClock,
    more: Callable[[], Ranks],
    model: Path,
    strategy: str,
    mesh: list[int],
    victim: int,
) -> None:
    """The rank is killed while it reads; the others wait for it at the end, or for its bytes."""
    four = more()
    how = {"directory": str(model), "source": str(model), "mesh": mesh, "again": False}
    four.tell("tried", {victim: {"pause_s": FOREVER_S}}, strategy=strategy, **how)
    until_begun(four)
    time.sleep(0.3)
    four.kill(victim)
    begin = time.monotonic()
    answers = four.hear()
    assert clock.seconds(begin) <= SOON_S
    assert [rank for rank, answer in enumerate(answers) if answer is GONE] == [victim]
    for answer in filter(lambda a: a is not GONE, answers):
        failure = answer["failure"]
        assert (failure.error, failure.facts["category"]) == ("PeerError", "PEER"), answers
        assert failure.facts["culprit_rank"] == victim, answers
        assert failure.facts["culprit_pid"] == four.pids[victim], answers
        assert f"rank {victim}" in failure.message
        assert answer["on_meta"]


def test_a_rank_killed_in_the_librarys_loop_is_named(
    clock: WaitingClock, more: Callable[[], Ranks], large: Path
) -> None:
    """The signal arrives in the library's own loop, outside Python."""
    four = more()
    how = {"directory": str(large), "source": str(large), "mesh": MESH, "again": False}
    four.tell("tried", check="values", **how)
    until_begun(four)
    time.sleep(0.05)
    four.kill(CULPRIT)
    begin = time.monotonic()
    answers = four.hear()
    assert clock.seconds(begin) <= SOON_S
    left = [answer["failure"] for answer in answers if answer is not GONE]
    assert len(left) == 3
    for failure in left:
        assert failure is not None and failure.error == "PeerError", answers
        assert failure.facts["culprit_rank"] == CULPRIT


# ---- ranks that are slow


def test_slow_reading_is_no_failure(
    four: Ranks, more: Callable[[], Ranks], model: Path, expected: list[dict[str, str]]
) -> None:
    """One rank's read takes SLOW_S. The other ranks wait for it at the end, or for its bytes."""
    how = {"directory": str(model), "source": str(model), "mesh": MESH}
    waiting = [(four, CULPRIT, "own-shard"), (more(), 0, "node-reader")]
    for group, slow, strategy in waiting:
        group.tell("tried", {slow: {"pause_s": SLOW_S}}, strategy=strategy, **how)
    begin = time.monotonic()
    for group, _, _ in waiting:
        answers = group.hear()
        assert [answer["failure"] for answer in answers] == [None] * 4, group.logs()
        assert [answer["state"] for answer in answers] == expected
    assert time.monotonic() - begin >= SLOW_S - 1


# ---- Ctrl-C


@pytest.mark.parametrize("where", ("in the library", "while it waits"))
def test_ctrl_c_on_one_rank_cancels_the_load_on_all(
    clock: WaitingClock, four: Ranks, model: Path, large: Path, where: str
) -> None:
    """The interrupted rank raises KeyboardInterrupt, as from any other call; the others raise
    CANCELLED."""
    for mark in four.folder.glob("begun-*"):
        mark.unlink()
    of, each, check = (large, {}, "values")
    if where == "while it waits":
        of, each, check = (model, {1: {"pause_s": 2.0}}, None)
    four.tell("tried", each, directory=str(of), source=str(of), mesh=MESH, check=check, again=False)
    until_begun(four)
    time.sleep(0.05)
    four.kill(0, signal.SIGINT)
    begin = time.monotonic()
    answers = four.hear()
    assert clock.seconds(begin) <= SOON_S
    assert all(answer["on_meta"] for answer in answers)
    if where == "in the library":  # uninterrupted, load and check read its part twice
        stored = (large / "model.safetensors").stat().st_size
        assert answers[0]["read_bytes"] < 2 * stored / 4, "the signal was handled only at the end"
    first, *others = [answer["failure"] for answer in answers]
    assert first is not None and first.error == "KeyboardInterrupt", answers
    for failure in others:
        assert failure.error == "Error" and failure.facts["category"] == "CANCELLED", answers
        assert failure.facts["culprit_rank"] == 0 and failure.facts["code"] == 130
    again = four.ask("loaded", directory=str(model), mesh=MESH)
    assert again[0]["report"]["coverage"] == "proven"
