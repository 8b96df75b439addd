"""Acts (functions that ranks run by name, see torch_rank.py) in which something happens to a save
in the background. Its writes wait, or fail, at the first tensor."""

import contextlib
import os
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from background_rank import loaded, skip, told_of
from saving_rank import steps
from sharding import Cut

import modicum.torch
from modicum import _modicum
from modicum.errors import failure
from modicum.torch.saving import running
from modicum.torch.saving.states import READS

VISIBLE_S = 20.0


@contextlib.contextmanager
def paused(error: Exception | None = None) -> Iterator[threading.Event]:
    """Within the context, saves wait for the event before they write this rank's part. Then they
    raise `error`, if any."""
    go = threading.Event()
    write = _modicum.SaveParts.write

    def write_later(*arguments: Any, **more: Any) -> Any:
        go.wait()
        if error is not None:
            raise error
        return write(*arguments, **more)

    with patch.object(_modicum.SaveParts, "write", write_later):
        try:
            yield go
        finally:
            go.set()


def visible(path: Path, within_s: float = VISIBLE_S) -> bool:
    """Whether a file appears, while this thread calls nothing of Modicum."""
    deadline = time.monotonic() + within_s
    while not path.exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    return path.exists()


def raised(call: Callable[[], Any]) -> dict[str, Any]:
    begin = time.monotonic()
    try:
        call()
    except Exception as error:
        return told_of(error) | {"took_s": time.monotonic() - begin}
    return {"error": "", "took_s": time.monotonic() - begin}


def delivers(directory: str, root: str, cut: Cut, calls: list[str]) -> list[dict[str, Any]]:
    """For each of `calls`: rank 1 fails to write, and all ranks know it, before they make the call.
    If the call is "alone ...", rank 0 has got the error from `result` before.
    Returns what the first call raised, and what a further step of another optimizer did."""
    model, ours = loaded(directory, cut, "fp32", "float32")
    modicum.torch.save(model, root, step=1, optimizer=ours)
    other = torch.optim.SGD([torch.nn.Parameter(torch.ones(3))], lr=0.1)
    save = {"step": 3, "optimizer": ours}
    makes: dict[str, Callable[[], Any]] = {
        "save": lambda: modicum.torch.save(model, root, **save),
        "background": lambda: modicum.torch.async_save(model, root, **save),
        "load": lambda: modicum.torch.load(model, directory, optimizer=ours, progress=False),
        "resume": lambda: modicum.torch.resume(model, root, optimizer=ours, progress=False),
        "step": lambda: steps(model, ours, cut, range(2, 3)),
        "other": other.step,
    }
    answers = []
    for call in calls:
        fault = failure("NOSPACE", "the disk is full") if dist.get_rank() == 1 else None
        with paused(fault) as go:
            saving = modicum.torch.async_save(model, root, step=2, optimizer=ours)
            go.set()
            while not saving.done():
                time.sleep(0.02)
        seen = saving.exception()
        if call.startswith("alone") and dist.get_rank() == 0:
            raised(saving.result)
        dist.barrier()
        answer = raised(makes.get(call.removeprefix("alone "), saving.result))
        names = sorted(path.name for path in Path(root).iterdir())
        dist.barrier()
        after = raised(other.step)
        answers.append({
            "call": call, "seen": type(seen).__name__, "raised": answer, "after": after["error"],
            "names": names,
        })  # fmt: skip
    return answers


def lasts(directory: str, root: str, cut: Cut) -> dict[str, Any]:
    """A save in the background during events that must not end it, and one whose root is renamed.
    Whether a checkpoint became visible without any other call of the program, by event."""
    model, ours = loaded(directory, cut, "fp32", "float32")
    found: dict[str, Any] = {}

    def begun(step: int) -> Any:
        return modicum.torch.async_save(model, root, step=step, optimizer=ours)

    for step, event in enumerate(("skipped", "raising")):
        with paused() as go:
            saving = begun(step)

            def in_step(event: str = event, saving: Any = saving, go: Any = go) -> None:
                go.set()
                saving._course.await_leaving(*READS)
                if event == "raising":
                    raise RuntimeError("in the step")

            with patch.object(ours, "_check_gradients", in_step):
                found[f"error {event}"] = raised(lambda: skip(ours))["error"]
        found[event] = visible(Path(root, f"step-{step}", "COMMIT"))
        dist.barrier()
        saving.result()
    with paused() as go:
        saving = begun(2)
        child = os.fork()
        if child == 0:
            errors = [raised(call)["error"] for call in (saving.done, saving.result)]
            other = torch.optim.SGD([torch.nn.Parameter(torch.ones(3))], lr=0.1)
            os._exit(0 if errors == ["UsageError"] * 2 and raised(other.step)["error"] == "" else 1)
        found["child"] = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        signal.signal(signal.SIGALRM, signal.default_int_handler)
        signal.setitimer(signal.ITIMER_REAL, 0.2)
        try:
            saving.result()
        except KeyboardInterrupt:
            go.set()
        found["interrupted"] = go.is_set()
    found["after"] = Path(saving.result().path).name
    found |= tells(begun)
    with paused() as go:
        saving = begun(3)
        if dist.get_rank() == 1:  # has voted, and then has to end
            go.set()
            saving.settle()
            saving._begun.ranks.fail(failure("NOSPACE", "the vote is withdrawn"))
        while raised(saving._begun.ranks.check)["error"] == "":
            time.sleep(0.02)
        go.set()
        found["withdrawn"] = raised(saving.result)
    dist.barrier()
    found["names"] = sorted(path.name for path in Path(root).iterdir())
    with paused() as go:
        saving = begun(4)
        dist.barrier()
        if dist.get_rank() == 0:
            Path(root).rename(f"{root}-moved")
        dist.barrier()
        go.set()
        found["renamed"] = raised(saving.result)
        found["exception"] = type(saving.exception()).__name__
    return found


def tells(begun: Callable[[int], Any]) -> dict[str, Any]:
    """Waits with a limit for a save that is not over, and callbacks before and after its end."""
    called: list[tuple[str, Any]] = []

    def note(saving: Any) -> None:
        called.append((threading.current_thread().name, saving.done()))

    def fails(saving: Any) -> None:
        raise RuntimeError("in a callback")

    with paused() as go:
        saving = begun(5)
        saving.add_done_callback(fails)
        saving.add_done_callback(note)
        limits = [raised(partial(call, 0.05)) for call in (saving.result, saving.exception)]
        limits.append(raised(partial(saving.result, timeout=0.0)))
        before = [*called]
        go.set()
        last = Path(saving.result(timeout=60.0).path).name
    deadline = time.monotonic() + 10
    while not called and time.monotonic() < deadline:
        time.sleep(0.01)
    saving.add_done_callback(note)
    errors = [limit["error"] for limit in limits]
    return {"limits": errors, "called": [before, called], "last": last}


def parted(directory: str, root: str, cut: Cut) -> dict[str, Any]:
    """The process group is destroyed during a save."""
    model, ours = loaded(directory, cut, "fp32", "float32")
    with paused() as go:
        saving = modicum.torch.async_save(model, root, step=1, optimizer=ours)
        dist.barrier()
        dist.destroy_process_group()
        go.set()
        while not saving.done():
            time.sleep(0.02)
    return raised(saving.result)


def loses(directory: str, root: str, cut: Cut, when: str, seed: int) -> dict[str, Any]:
    """A rank dies during a save. `when`: rank 0 dies "before" or "after" it publishes the
    checkpoint; or rank 1 dies "soon", at a random time. Returns the other rank's outcome. An odd
    `seed` ends the process by `_exit`, an even one by SIGKILL."""
    model, ours = loaded(directory, cut, "fp32", "float32")
    publish, rank = running.publish, dist.get_rank()

    def publish_and_die(*arguments: Any) -> Any:
        if when == "after":
            publish(*arguments)
        os._exit(1) if seed % 2 else os.kill(os.getpid(), signal.SIGKILL)

    dies = when in ("before", "after")
    with patch.object(running, "publish", publish_and_die if dies else publish):
        saving = modicum.torch.async_save(model, root, step=1, optimizer=ours)
        if when == "soon" and rank == 1:
            threading.Timer(random.Random(seed).uniform(0, 0.5), os._exit, (1,)).start()
        time.sleep(random.Random(seed + rank).uniform(0, 0.3))
        answer = raised(saving.result)
        if when == "soon" and rank == 1:
            time.sleep(1)  # dies within this time
    report = saving._report
    return answer | {"warnings": report.warnings if report else []}


def terminated(directory: str, root: str, cut: Cut, marks: str, seed: int) -> dict[str, Any]:
    """The test sends SIGTERM at a random time of a save in the background, during steps of
    which some are skipped."""
    model, ours = loaded(directory, cut, "fp32", "float32")
    chance = random.Random(seed)
    with paused() as go:
        how: dict[str, Any] = {"step": 1, "optimizer": ours}
        saving: Any = modicum.torch.async_save(
            model, root, options=modicum.torch.SaveOptions(grace=chance.choice((10.0, 0.3))), **how
        )
        Path(marks, f"rank-{dist.get_rank()}").touch()
        threading.Timer(chance.uniform(0, 0.5), go.set).start()
        deadline = time.monotonic() + VISIBLE_S
        while time.monotonic() < deadline:
            try:
                if chance.random() < 0.5:
                    skip(ours)
                else:
                    steps(model, ours, cut, range(2, 3))
            except Exception as error:
                return told_of(error)
            if chance.random() < 0.1:
                time.sleep(1)
        return raised(saving.result)


ACTS: dict[str, Callable[..., Any]] = {
    "background_delivers": delivers,
    "background_lasts": lasts,
    "background_parted": parted,
    "background_loses": loses,
    "background_terminated": terminated,
}
