"""`modicum.torch.save(background=True)` saves the state of the time of the call, while the program
makes further optimizer steps.

Before a step overwrites a block that is not written yet, it copies the block to the *window*, a
buffer of limited size; if the window is full, the step waits until the block is written. The
oracles are a save of the same state in the foreground, which writes equal files, and a training
without a save. Catches: a block that a step overwrites before it is read, in any state format; a
step of another optimizer, a load, another save or an exit that does not wait for the save; a tensor
that the program changes without an error; a saved checkpoint that is committed before all ranks
have written; a window that is not in the promise, or is larger than promised; a rank that goes on
after another one has failed; a SIGTERM that waits for the program's next call, or is handled in the
middle of an optimizer step.
"""

import os
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

from faulty_files import SLOW, FaultyFiles
from ranks import GONE, Ranks, own_fork_server, ranks, torchrun
from sharding import Cut

MIB = 1 << 20
ONE, TWO, HSDP = Cut("none", (1,)), Cut("fsdp2", (2,)), Cut("hsdp", (2, 1))
TWO_ALONG_DIM_1 = Cut("fsdp2", (2,), 1)
ROOT = Path(__file__).resolve().parents[3]
WAIT_S = 60.0


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory below which the fault library delays writes."""
    return tmp_path_factory.mktemp("background")


@pytest.fixture(scope="module")
def faulty(place: Path) -> Iterator[FaultyFiles]:
    """The fault library. All processes that are started within the fixture preload it."""
    made = FaultyFiles(place)
    made.be((SLOW, 0))  # each write is delayed by 0 microseconds, until a test sets more
    before = dict(os.environ)
    os.environ |= made.environment(place)
    with own_fork_server():
        yield made
    os.environ.clear()
    os.environ.update(before)


class Worlds(dict[int, Ranks]):
    """Process groups by the number of their ranks. A group starts when it is first requested."""

    def __init__(self, place: Path, stack: ExitStack) -> None:
        super().__init__()
        self._place, self._stack = place, stack

    def __missing__(self, size: int) -> Ranks:
        started = ranks(size, self._place / f"of-{size}")
        self[size] = self._stack.enter_context(started)
        return self[size]


@pytest.fixture(scope="module")
def worlds(faulty: FaultyFiles, place: Path) -> Iterator[Worlds]:
    with ExitStack() as stack:
        yield Worlds(place, stack)


@pytest.fixture(scope="module")
def model(worlds: Worlds, place: Path) -> str:
    folder = str(place / "model")
    sizes = {"hidden_size": 256, "intermediate_size": 512, "vocab_size": 4000}
    worlds[2].ask("write", directory=folder, family="qwen3", config=sizes, dtype="float32")
    return folder


@pytest.fixture
def root(place: Path, faulty: FaultyFiles, request: pytest.FixtureRequest) -> Iterator[Path]:
    """A new directory below `place` for the checkpoints of one test."""
    made = place / f"root-{abs(hash(request.node.name))}"
    made.mkdir()
    yield made
    faulty.be((SLOW, 0))  # ranks that were killed have not ended the delay


def files_of(step: Path) -> dict[str, bytes]:
    """All files except manifest.json and COMMIT, which differ between two saves."""
    paths = [path for path in step.rglob("*") if path.is_file()]
    return {
        str(path.relative_to(step)): path.read_bytes()
        for path in paths
        if path.name not in ("manifest.json", "COMMIT")
    }


def assert_same_step(root: Path, program: Path) -> None:
    """Asserts that the checkpoints saved in the foreground and in the background have equal files,
    and that `modicum verify` accepts the latter."""
    fore, back = files_of(root / "fore/step-2"), files_of(root / "back/step-2")
    assert fore.keys() == back.keys()
    differ = [name for name, data in fore.items() if back[name] != data]
    assert not differ, f"{differ} differ from those of the foreground"
    verified = subprocess.run([program, "verify", root / "back"], capture_output=True, text=True)
    assert verified.returncode == 0, verified.stderr


@pytest.mark.parametrize(
    ("cut", "optimizer", "dtype", "size", "cpus"),
    [
        (ONE, "fp32", "float32", 0, 2),
        (ONE, "fp32-split", "bfloat16", None, 1),
        (ONE, "int8-moments-24", "bfloat16", MIB, 2),
        (TWO, "int8-moments", "bfloat16", MIB, 2),
        (TWO, "bf16-moments", "float16", None, 2),
        (HSDP, "int8-moments", "float32", None, 1),
        (TWO_ALONG_DIM_1, "fp32", "float32", MIB, 2),
    ],
    ids=str,
)
def test_the_checkpoint_is_that_of_the_foreground(
    worlds: Worlds, model: str, root: Path, modicum: Path,
    cut: Cut, optimizer: str, dtype: str, size: int | None, cpus: int,
) -> None:  # fmt: skip
    """`size`: the bytes of the window, which has room for no block (0), for some blocks (MIB), or
    for all (None: the default). `cpus`: the number of CPUs of each process."""
    how = {"directory": model, "cut": cut, "kind": (optimizer, dtype)}
    link = root.with_name(f"{root.name}-link")  # as a root may be
    link.symlink_to(root)
    answers = worlds[cut.world].ask("background_both", root=str(link), room=(size, cpus), **how)
    assert_same_step(root, modicum)
    ends = worlds[cut.world].ask("background_alone", **how)
    for answer, end in zip(answers, ends, strict=True):
        assert not answer["was_done"], "the save was over when the call returned"
        assert answer["end"] == end, "the training differs from that without a save"
        # The model's buffer, which the program adds 1 to during a save with a window.
        assert answer["seen"] == [2.0 if size == 0 else 3.0] * 5
    reports = [answer["report"] for answer in answers]
    assert len({str(report) for report in reports}) == 1, "ranks return different reports"
    if size == 0:
        assert reports[0]["kept_bytes"] == 0 and reports[0]["blocked_s"] > 0.05
    else:
        assert reports[0]["kept_bytes"] > 0, "all blocks were written before the steps"


@pytest.mark.parametrize("optimizer", ("adamw", "sgd"))
def test_other_optimizers_wait(
    worlds: Worlds, model: str, root: Path, modicum: Path, optimizer: str
) -> None:
    """The first step of torch's optimizer after the call waits until the saved checkpoint is
    visible."""
    how = {"directory": model, "cut": TWO, "kind": (optimizer, "float32")}
    answers = worlds[2].ask("background_both", root=str(root), room=(None, 2), **how)
    assert_same_step(root, modicum)
    for answer, end in zip(answers, worlds[2].ask("background_alone", **how), strict=True):
        assert not answer["was_done"] and answer["is_visible"]
        assert answer["end"] == end


@pytest.mark.parametrize(
    ("what", "steps"),
    [("save", 2), ("load", 1), ("resume", 1), ("load_state_dict", 1), ("state", 1)]
    + [("share", 1), ("queue", 1)],
)
def test_waits_for_the_save_in_flight(
    worlds: Worlds, model: str, root: Path, modicum: Path, what: str, steps: int
) -> None:
    for answer in worlds[2].ask(
        "background_waits", directory=model, root=str(root), cut=TWO, what=what
    ):
        assert answer["took_s"] > 0.05, "the call did not wait, or the save was already over"
    assert_same_step(root, modicum)
    assert len(list((root / "back").glob("step-*"))) == steps


@pytest.mark.soak
@pytest.mark.parametrize(
    "what",
    ("share", "queue", "resize", "tensor resize", "set", "swap", "data", "to_empty", "del"),
)
def test_memory_that_is_read_stays(
    faulty: FaultyFiles, model: str, root: Path, modicum: Path, what: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """20 saves, during which a call moves or frees the model's memory: each writes the right bytes,
    or is refused by name. malloc overwrites freed memory."""
    monkeypatch.setenv("MALLOC_PERTURB_", "165")
    with ranks(1, root.parent / f"{root.name}-ranks", fresh=True) as alone:
        (ends,) = alone.ask(
            "background_moves", directory=model, root=str(root), times=20, what=what
        )
    for number, end in enumerate(ends):
        assert end == "saved" or end.startswith("USAGE"), end
        if end == "saved":
            assert_same_step(root / str(number), modicum)
    assert len(ends) == 20


@pytest.mark.parametrize(
    ("how", "error", "words"),
    [
        ("disk", "IoError", "Input/output error"),
        ("weight", "UsageError", "model.embed_tokens.weight"),
        ("moment", "UsageError", "model.embed_tokens.weight.exp_avg"),
    ],
)
def test_a_rank_that_fails_leaves_the_old_checkpoint(
    worlds: Worlds, model: str, root: Path, how: str, error: str, words: str
) -> None:
    """All ranks raise the error twice: in the same optimizer step, and in `wait`. Afterwards the
    program can save again."""
    answers = worlds[2].ask("background_fails", directory=model, root=str(root), cut=TWO, how=how)
    for answer in answers:
        (in_step, in_wait) = answer["raised"]
        assert in_wait["step"] == "wait"
        for raised in (in_step, in_wait):
            assert raised["error"] == error and words in raised["message"], answer
        assert in_step["step"] == answers[0]["raised"][0]["step"], "ranks raise in different steps"
        assert answer["names"] == ["latest", "step-1"], "expected only the checkpoint saved before"
        assert answer["after"] == str(root / "step-3")


def test_the_window_is_promised(worlds: Worlds, model: str, root: Path) -> None:
    """The promise has exactly the window's bytes that the ledger has at the peak. A save with half
    of the needed budget is refused before it writes."""
    size = 2 * MIB
    for answer in worlds[2].ask(
        "background_promised", directory=model, root=str(root), cut=TWO, size=size
    ):
        window = answer["asked"]["snapshot"]
        # A rank's part of the promise: half of the node's window, and tables of blocks.
        assert size / 2 <= window <= size / 2 + MIB / 8
        assert answer["at_peak"]["snapshot"] == window
        assert answer["peak"] <= answer["limit"]
        assert answer["left"] == 0, "the window was not freed"
        refused = answer["refused"]
        assert refused["error"] == "BudgetError", refused
        assert {"purpose": "snapshot", "bytes": 2 * window} in refused["owners"]
        assert not answer["is_there"], "the refused save has made its directory"


def test_a_kill_leaves_the_old_checkpoint(
    faulty: FaultyFiles, worlds: Worlds, model: str, root: Path
) -> None:
    """Both ranks are killed during a save in the background of step 1. A resume then finds only
    step 2, which was saved before."""
    worlds[1].ask("saves", directory=model, root=str(root), cut=ONE)
    marks = root.parent / f"{root.name}-marks"
    marks.mkdir()
    with ranks(2, root.parent / f"{root.name}-ranks") as two:
        begin(two, model, root, marks, (None, 100_000, "polls"))
        time.sleep(1)
        for rank in range(2):
            two.kill(rank)
        assert two.hear() == [GONE, GONE]
    assert list(root.glob(".partial-*")), "the save was over before the kill"
    (answer,) = worlds[1].ask("resumes", directory=model, root=str(root), cut=ONE)
    assert answer["report"]["step"] == 2
    assert not list(root.glob("step-1"))


def begin(
    two: Ranks, model: str, root: Path, marks: Path, how: tuple[float | None, int, str]
) -> None:
    """Begins a save in the background; returns once `save` has returned on both ranks. `how`: see
    `preempted` in background_rank.py."""
    where = {"directory": model, "root": str(root), "marks": str(marks)}
    two.tell("background_preempted", cut=TWO, how=how, **where)
    deadline = time.monotonic() + WAIT_S
    while len(list(marks.iterdir())) < 2:
        assert time.monotonic() < deadline, two.logs()
        time.sleep(0.01)


@pytest.mark.parametrize(
    ("grace", "does", "committed"),
    (
        pytest.param(25.0, "polls", True, marks=pytest.mark.soak),
        (25.0, "computes", True),
        (25.0, "steps", True),
        (1.5, "polls", False),
    ),
    ids=str,
)
def test_sigterm_ends_the_process_after_the_checkpoint(
    faulty: FaultyFiles, model: str, root: Path, tmp_path: Path,
    grace: float, does: str, committed: bool,
) -> None:  # fmt: skip
    """If the save can end within the grace (seconds), SIGTERM ends the process after the saved
    checkpoint is committed, whatever the program does meanwhile. Otherwise the save raises
    PreemptedError, and nothing of it is left."""
    marks = tmp_path / "marks"
    marks.mkdir()
    with ranks(2, tmp_path / "ranks") as two:
        begin(two, model, root, marks, (grace, 5_000 if committed else 60_000, does))
        for pid in two.pids:
            if does != "steps":
                os.kill(pid, signal.SIGTERM)
        answers = two.hear()
    if committed:
        assert answers == [GONE, GONE] and (root / "step-1/COMMIT").exists(), answers
    else:
        assert [answer["error"] for answer in answers] == ["PreemptedError"] * 2
        assert not list(root.iterdir())


SCRIPT = """
import sys, torch, torch.distributed as dist, modicum.torch
sys.path.insert(0, {support!r})
import torch_rank, background_rank
from sharding import Cut

dist.init_process_group("gloo")
model, optimizer = background_rank.loaded({model!r}, Cut("fsdp2", (2,)), "fp32", "float32")
saving = modicum.torch.async_save(model, {root!r}, step=7, optimizer=optimizer)
assert not saving.done()
{end}
"""


@pytest.mark.parametrize(
    "end",
    (
        pytest.param("", id="exit"),
        pytest.param("raise ValueError('the end')", id="crash", marks=pytest.mark.soak),
    ),
)
def test_the_exit_waits_for_the_save(
    faulty: FaultyFiles, model: str, root: Path, tmp_path: Path, end: str
) -> None:
    """Also if an exception ends the program."""
    script = tmp_path / "train.py"
    support = str(ROOT / "tests/support")
    script.write_text(SCRIPT.format(support=support, model=model, root=str(root), end=end))
    faulty.be((SLOW, 1000))
    done = torchrun(ROOT, 2, script)
    assert (done.returncode == 0) == (end == ""), done.stderr
    assert (root / "step-7/COMMIT").exists(), done.stderr
