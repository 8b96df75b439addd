"""SIGTERM to scripts of accelerate and Trainer within `modicum.torch.accelerate.loading`, on two
ranks: by `save_on_sigterm` around a loop, and by `SaveOnSigtermCallback` in Trainer.

The resumed run has the losses and the state of one that SIGTERM has not ended, bit for bit.
Catches: a rank without SIGTERM that goes on alone; a checkpoint without the scheduler, the random
number generators or Trainer's state; an exit before the checkpoint is committed, or with another
code than 143; a SIGTERM that is lost after the last step, or when a training raises; a second one
that does not end the process; a handler of the program that is replaced; ranks that die since
torchrun signals them again.
"""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")
pytest.importorskip("accelerate")

import torch.distributed as dist
from ranks import GONE, Pool, Ranks
from transformers.trainer_jit_checkpoint import CheckpointManager

from modicum.errors import UsageError
from modicum.torch.saving.preemption import _on_any_rank
from modicum.torch.trainer import SaveOnSigtermCallback

STEPS = 6
SUPPORT = Path(__file__).parents[2] / "support"
TERMINATED = -signal.SIGTERM


@pytest.fixture(scope="module")
def model(two: Ranks, tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = str(tmp_path_factory.mktemp("models") / "qwen3")
    two.ask("write", directory=folder, family="qwen3", dtype="bfloat16")
    return folder


@pytest.fixture
def how(model: str, tmp_path: Path) -> dict[str, Any]:
    """Arguments of a Trainer that saves no checkpoint by itself."""
    folder = str(tmp_path / "out")
    return {"directory": model, "folder": folder, "max_steps": STEPS, "save_strategy": "no"}


def assert_ended(group: Ranks, *codes: int) -> None:
    """Asserts that each rank ends by its exit code."""
    assert group.hear() == [GONE] * group.size, group.logs()
    for process in group.processes:
        process.join(30)
    assert [process.exitcode for process in group.processes] == [*codes], group.logs()


def checkpoints(how: dict[str, Any]) -> list[str]:
    """The names of the committed checkpoints."""
    return sorted(path.parent.name for path in Path(how["folder"]).glob("checkpoint-*/COMMIT"))


@pytest.fixture(scope="module")
def expected(two: Ranks, model: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The answer of a run that nothing has ended."""
    folder = str(tmp_path_factory.mktemp("whole"))
    whole = {"directory": model, "folder": folder, "max_steps": STEPS, "save_strategy": "no"}
    answer: dict[str, Any] = two.ask("trains", by="modicum", optimizer="modicum", **whole)[0]
    return answer


def assert_resumes(
    pool: Pool, how: dict[str, Any], expected: dict[str, Any], first: int = 4
) -> None:
    """Asserts that `resume_from_checkpoint=True` goes on with step `first`, with the same bits."""
    with pool.lend(2) as others:
        (answer, _) = others.ask("trains", by="modicum", optimizer="modicum", resume=True, **how)
    losses = {step: loss for step, loss in expected["losses"].items() if step >= first}
    assert answer["losses"] == losses
    assert answer["end"] == expected["end"]


@pytest.mark.parametrize(
    "signals", (pytest.param((1, 1), marks=pytest.mark.soak), (0, 1)), ids=("both", "one")
)
def test_trainer_saves_and_ends_on_all_ranks(
    two: Ranks,
    pool: Pool,
    modicum: Path,
    how: dict[str, Any],
    expected: dict[str, Any],
    signals: tuple[int, int],
) -> None:
    """Whichever rank has got SIGTERM, during step 3: the checkpoint has all that Trainer saves, and
    the resumed run goes on with the same bits."""
    two.tell("trains_preempted", {rank: {"signals": n} for rank, n in enumerate(signals)}, **how)
    assert_ended(two, 143, 143)
    assert checkpoints(how) == ["checkpoint-3"]
    directory = Path(how["folder"], "checkpoint-3")
    assert f"modicum: SIGTERM: saved {directory} at step 3, exiting 143" in two.logs()
    names = {path.name for path in directory.iterdir()}
    assert names >= {"trainer_state.json", "scheduler.pt", "rng_state_0.pth", "rng_state_1.pth"}
    verified = subprocess.run([modicum, "verify", directory], capture_output=True, text=True)
    assert verified.returncode == 0, verified.stderr
    assert_resumes(pool, how, expected)


@pytest.mark.soak
def test_a_sigterm_after_the_agreement_is_answered_after_the_next_step(
    two: Ranks, how: dict[str, Any]
) -> None:
    """So is one during a checkpoint of Trainer."""
    two.tell("trains_preempted", signals=1, terminated={"after": True}, **how)
    assert_ended(two, 143, 143)
    assert checkpoints(how) == ["checkpoint-4"]


@pytest.mark.soak
def test_a_second_sigterm_ends_trainer_at_once(
    two: Ranks, pool: Pool, how: dict[str, Any], expected: dict[str, Any]
) -> None:
    """The previous checkpoint stays, and the run resumes from it."""
    how |= {"save_strategy": "steps", "save_steps": 2}
    two.tell("trains_preempted", signals=2, **how)
    assert_ended(two, TERMINATED, TERMINATED)
    assert checkpoints(how) == ["checkpoint-2"]
    assert_resumes(pool, how, expected, first=3)


@pytest.mark.soak
def test_a_step_longer_than_the_grace_leaves_the_previous_checkpoint(
    two: Ranks, pool: Pool, how: dict[str, Any], expected: dict[str, Any]
) -> None:
    """The scheduler's SIGKILL comes before the end of the step."""
    how |= {"save_strategy": "steps", "save_steps": 2}
    two.tell("trains_preempted", signals=1, terminated={"kills": True}, **how)
    assert_ended(two, -signal.SIGKILL, -signal.SIGKILL)
    assert checkpoints(how) == ["checkpoint-2"]
    assert_resumes(pool, how, expected, first=3)


@pytest.mark.soak
def test_a_save_in_the_background_is_committed_before(
    two: Ranks, tmp_path: Path, how: dict[str, Any]
) -> None:
    two.tell("trains_preempted", signals=1, run=str(tmp_path / "run"), **how)
    assert_ended(two, 143, 143)
    assert checkpoints(how) == ["checkpoint-3"]
    assert (tmp_path / "run/step-2/COMMIT").is_file()


@pytest.mark.soak
def test_a_sigterm_after_the_last_step_ends_the_process(two: Ranks, how: dict[str, Any]) -> None:
    """Trainer saves its last checkpoint before."""
    how |= {"save_strategy": "steps", "save_steps": 100}
    two.tell("trains_preempted", signals=1, terminated={"at": STEPS, "after": True}, **how)
    assert_ended(two, TERMINATED, TERMINATED)
    assert checkpoints(how) == [f"checkpoint-{STEPS}"]


def test_a_loop_of_accelerate_saves_and_ends_on_all_ranks(
    two: Ranks, pool: Pool, model: str, tmp_path: Path
) -> None:
    """Rank 0 gets SIGTERM in step 3. `load_state` then has the state and the next losses of a run
    that has saved after step 3 and went on."""
    script = {"directory": model, "by": "modicum", "optimizer": "modicum"}
    (whole, _) = two.ask("accelerate_saves", folder=str(tmp_path / "whole"), steps=3, **script)
    folder = str(tmp_path / "state")
    each = {0: {"signals": 1}, 1: {"signals": 0}}
    two.tell("accelerate_preempted", each, directory=model, folder=folder)
    assert_ended(two, 143, 143)
    with pool.lend(2) as others:
        (resumed, _) = others.ask("accelerate_resumes", folder=folder, **script)
    assert resumed["loaded"] == whole["saved"]
    assert resumed["then"] == whole["then"]


# ---- without ranks


@pytest.fixture
def default_sigterm() -> Iterator[None]:
    before = signal.signal(signal.SIGTERM, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGTERM, before)


def test_the_callback_holds_sigterm_during_the_training(default_sigterm: None) -> None:
    callback = SaveOnSigtermCallback()
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    for _ in range(2):  # an exception ends the first training
        callback.on_train_begin(None, None, None)
        assert signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL
    callback = SaveOnSigtermCallback()  # of another Trainer, after an exception
    callback.on_train_begin(None, None, None)
    callback.on_train_end(None, None, None)
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    with pytest.raises(UsageError, match="every .*an integer from 1"):
        SaveOnSigtermCallback(every=0)


@pytest.mark.parametrize("by", ("the program", "Trainer"))
def test_the_callback_keeps_a_handler_of_the_program(default_sigterm: None, by: str) -> None:
    """Trainer installs one with `enable_jit_checkpoint`."""
    if by == "Trainer":
        CheckpointManager(trainer=None).setup_signal_handler()
    else:
        signal.signal(signal.SIGTERM, lambda number, frame: None)
    handler = signal.getsignal(signal.SIGTERM)
    with pytest.raises(UsageError, match="SaveOnSigtermCallback: the program handles SIGTERM its"):
        SaveOnSigtermCallback().on_train_begin(None, None, None)
    assert signal.getsignal(signal.SIGTERM) == handler


@pytest.mark.parametrize("following", ("callback", "SaveOnSigtermCallback()"))
def test_a_sigterm_of_a_training_that_raises_ends_the_next_one(following: str) -> None:
    program = (
        "import signal\n"
        "from modicum.torch.trainer import SaveOnSigtermCallback\n"
        "callback = SaveOnSigtermCallback()\n"
        "callback.on_train_begin(None, None, None)\n"
        "signal.raise_signal(signal.SIGTERM)\n"
        "print('noted', flush=True)\n"
        f"{following}.on_train_begin(None, None, None)\n"
        "print('trains', flush=True)\n"
    )
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (ended.returncode, ended.stdout) == (TERMINATED, "noted\n"), ended.stderr


def test_the_agreement_waits_for_the_threads_of_gloo(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that ends while one of them holds the tensor would abort."""
    held: list[Any] = []

    def all_reduce(tensor: Any, op: Any) -> None:
        held.append(tensor)
        tensor.fill_(1)
        threading.Timer(0.05, held.clear).start()

    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    monkeypatch.setattr(dist, "get_backend_config", lambda: "cpu:gloo")
    monkeypatch.setattr(dist, "all_reduce", all_reduce)
    assert _on_any_rank(False) and not held


# ---- torchrun

SCRIPT = """
import sys
sys.path.insert(0, {support!r})
import torch.distributed as dist
import torch_rank  # imports the modules of the acts
import preemption_rank

dist.init_process_group("gloo")
preemption_rank.trains_preempted({model!r}, {folder!r}, mark={mark!r}, max_steps=10_000,
                                 save_strategy="no")
"""


@pytest.mark.soak
@pytest.mark.parametrize("to", ("torchrun", "all"))
def test_torchrun_passes_sigterm_on(
    pool: Pool, model: str, root: Path, tmp_path: Path, how: dict[str, Any], to: str
) -> None:
    """A scheduler signals torchrun alone, or torchrun and its ranks, which torchrun then signals
    again. torchrun raises a SignalException, whose traceback is expected."""
    script, mark = tmp_path / "train.py", tmp_path / "mark"
    names = {"support": str(SUPPORT), "model": model, "folder": how["folder"], "mark": str(mark)}
    script.write_text(SCRIPT.format(**names))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    with subprocess.Popen(
        [*command, script], cwd=root, stderr=subprocess.PIPE, text=True
    ) as launcher:
        deadline, pids = time.monotonic() + 120, [""]
        while len(pids) < 2 or not all(pids):
            assert launcher.poll() is None and time.monotonic() < deadline
            time.sleep(0.1)
            pids = [path.read_text() for path in tmp_path.glob("mark-*")]
        for pid in (launcher.pid, *map(int, pids if to == "all" else ())):
            os.kill(pid, signal.SIGTERM)
        _, errors = launcher.communicate(timeout=120)
    assert "SignalException" in errors and "got signal: 15" in errors, errors
    (name,) = checkpoints(how)
    assert name != "checkpoint-10000"
    step = int(name.removeprefix("checkpoint-"))
    with pool.lend(2) as others:
        kind = how | {"by": "modicum", "optimizer": "modicum", "max_steps": step + 1}
        (answer, _) = others.ask("trains", resume=True, **kind)
    assert [*answer["losses"]] == [step + 1]
