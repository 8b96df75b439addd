"""A failure on one rank of a process group ends the load on all ranks within seconds. The error
names the rank that failed. The model is still on meta and can be loaded again.

Catches: ranks that wait for one that has failed or died; a parameter that is filled although
another rank has failed; ranks that go on with different plans; a slow rank treated as dead; Ctrl-C
that is ignored, or that the other ranks do not learn of.
"""

import os
import re
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from clocks import WaitingClock
from program import run_json

pytest.importorskip("torch")
pytest.importorskip("transformers")

from ranks import GONE, Failed, Pool, Ranks

MESH = [4]
CULPRIT = 2
SOON_S = 10.0  # the time in which all ranks must learn of a failure
SLOW_S = 15.0  # longer than the silence after which a rank counts as lost
FOREVER_S = 600.0  # longer than any test


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
    """A checkpoint of 2 GB in one sparse file. A load of it takes seconds."""
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
    """Asserts that all ranks failed within SOON_S with the same error, which names the rank
    `culprit` and its process, and that no model has changed. Returns rank 0's failure."""
    raised = [answer["failure"] for answer in answers]
    assert None not in raised, f"some ranks have loaded: {answers}"
    for answer, failure in zip(answers, raised, strict=True):
        began_s = failure.at_s - failure.after_s
        assert clock.seconds(began_s, failure.at_s) <= SOON_S, raised
        assert answer["on_meta"], f"a model has changed: {raised}"
        assert failure.facts["culprit_rank"] == culprit, raised
        assert failure.facts["culprit_pid"] == pid, raised
    alike = {(f.error, f.message, f.facts["category"], f.facts["code"]) for f in raised}
    assert len(alike) == 1, raised
    return raised[0]


# ---- one rank's files

# Each function damages a copy of the checkpoint, and returns the arguments of `tried` for the rank
# that loads the copy.


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
    """`tried` truncates the file after all headers were validated and all ranks have agreed."""
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
    culprit = 0 if strategy == "node-reader" else CULPRIT  # with node-reader only rank 0 reads
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
        ({"dtype": "float32"}, "IoError", "CONFLICT: .* dtype .expected None, got .*float32"),
        ({"strategy": "node-reader"}, "IoError", "CONFLICT: .* strategy .*got 'node-reader'"),
        (
            {"staging": "2MiB"},
            "IoError",
            "CONFLICT: .* argument staging .expected None, got '2MiB'",
        ),
        ({"keep_fp32": "."}, "IoError", "CONFLICT: .* argument keep_fp32 .expected None, got '.'"),
        ({"seed": 1}, "IoError", "CONFLICT: .* argument seed .expected 0, got 1"),
        (
            {"buffers": "keep"},
            "IoError",
            "CONFLICT: .* argument buffers .expected None, got 'keep'",
        ),
        ({"source": "other"}, "IoError", "CONFLICT: "),
        ({"budget": "1MiB"}, "BudgetError", "BUDGET: "),
        ({"budget": 1.5}, "UsageError", "USAGE: budget .expected bytes, .*got 1.5"),
        ({"recipe": "absent.json"}, "IoError", "IO: .*absent.json"),
        ({"resized": "bogus"}, "UsageError", "USAGE: resized"),
        ({"optimizer": ["sgd"]}, "UsageError", "USAGE: optimizer .expected "),
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
    """Rank 2 differs from the others. The error names that rank; if an argument differs, also the
    argument and its value."""
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
    "wrong",
    [{"missing": "("}, {"unexpected": "(?<=a)b"}, {"keep_fp32": "["}, {"dtype": "auto"}],
    ids=str,
)
def test_an_invalid_argument_is_the_same_error_on_all_ranks(
    four: Ranks, model: Path, wrong: dict[str, str]
) -> None:
    """Only rank 0 uses expressions, to make the recipe. All ranks must get its error."""
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
    """The error has the needed bytes and the shortfall, and only headers were read. A budget of
    16 MiB more than the needed bytes suffices. A budget of 200 MiB less than them does not."""
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
    # The 16 MiB are for pages that a rank shares with other processes: the part that is counted for
    # the rank grows when the others write to them.
    answers = four.ask("tried", budget=needed + (16 << 20), **how)
    assert [answer["failure"] for answer in answers] == [None] * 4


# ---- ranks that die


def forget_marks(four: Ranks) -> None:
    """Before `until_begun`."""
    for mark in four.folder.glob("begun-*"):
        mark.unlink()


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
    four: Ranks,
    model: Path,
    strategy: str,
    mesh: list[int],
    victim: int,
) -> None:
    """The rank is killed after all ranks have agreed and before it reads data. The others wait for
    it at the end of the load, or for its bytes."""
    how = {"directory": str(model), "source": str(model), "mesh": mesh, "again": False}
    forget_marks(four)
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
    clock: WaitingClock, four: Ranks, large: Path
) -> None:
    """The signal arrives soon after all ranks have agreed, while the rank runs the library's own
    loop, outside Python."""
    how = {"directory": str(large), "source": str(large), "mesh": MESH, "again": False}
    forget_marks(four)
    four.tell("tried", check=True, **how)
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
    pool: Pool, four: Ranks, model: Path, expected: list[dict[str, str]]
) -> None:
    """One rank sleeps for SLOW_S before it reads data. The other ranks wait for it at the end of
    the load, or for its bytes."""
    how = {"directory": str(model), "source": str(model), "mesh": MESH}
    with pool.lend(4) as others:
        waiting = [(four, CULPRIT, "own-shard"), (others, 0, "node-reader")]
        for group, slow, strategy in waiting:
            group.tell("tried", {slow: {"pause_s": SLOW_S}}, strategy=strategy, **how)
        for group, _, _ in waiting:
            answers = group.hear()
            assert [answer["failure"] for answer in answers] == [None] * 4, group.logs()
            assert [answer["state"] for answer in answers] == expected
            assert max(answer["took_s"] for answer in answers) >= SLOW_S


# ---- Ctrl-C


@pytest.mark.parametrize("where", ("in the library", "while it waits"))
def test_ctrl_c_on_one_rank_cancels_the_load_on_all(
    clock: WaitingClock, four: Ranks, model: Path, large: Path, where: str
) -> None:
    """The interrupted rank 0 raises KeyboardInterrupt, as from any other call. The other ranks
    raise an error of the category CANCELLED."""
    forget_marks(four)
    source, by_rank, check = large, {}, True
    if where == "while it waits":  # for rank 1
        source, by_rank, check = model, {1: {"pause_s": 2.0}}, False
    how = {"directory": str(source), "source": str(source), "check": check}
    four.tell("tried", by_rank, mesh=MESH, again=False, **how)
    until_begun(four)
    time.sleep(0.05)
    four.kill(0, signal.SIGINT)
    begin = time.monotonic()
    answers = four.hear()
    assert clock.seconds(begin) <= SOON_S
    assert all(answer["on_meta"] for answer in answers)
    if where == "in the library":
        # Without the interrupt, the load and the check would each read a quarter of the file.
        stored_bytes = (large / "model.safetensors").stat().st_size
        limit_bytes = 2 * stored_bytes / 4
        assert answers[0]["read_bytes"] < limit_bytes, "the signal was handled only at the end"
    first, *others = [answer["failure"] for answer in answers]
    assert first is not None and first.error == "KeyboardInterrupt", answers
    for failure in others:
        assert failure.error == "Error" and failure.facts["category"] == "CANCELLED", answers
        assert failure.facts["culprit_rank"] == 0 and failure.facts["code"] == 130
    again = four.ask("loaded", directory=str(model), mesh=MESH)
    assert again[0]["report"]["coverage"] == "proven"
