"""Acts (functions that ranks run by name, see torch_rank.py) that save in the background and make
steps meanwhile. The ranks run with fixtures/faulty_files.c, by which `slow` delays their writes."""

import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from faulty_files import FAILS, SLOW, be
from saving_rank import made, steps, whole
from sharding import Cut

import modicum.torch
from modicum import _modicum
from modicum.torch import MemoryPolicy, SaveOptions
from modicum.torch.saving import planning

STEPS = 3
OLD = 1


@contextlib.contextmanager
def slow(pause_us: int) -> Iterator[None]:
    """Slows every write down by this time, on all ranks."""
    page = Path(os.environ["FAULTY_PAGE"])
    dist.barrier()
    if dist.get_rank() == 0:
        be(page, (SLOW, pause_us))
    dist.barrier()
    try:
        yield
    finally:
        dist.barrier()
        if dist.get_rank() == 0:
            be(page, (SLOW, 0))


@contextlib.contextmanager
def window(size: int | None, cpus: int) -> Iterator[None]:
    """Sets the size of a node's window, and the CPUs that this process may use."""
    before, allowed = planning.WINDOW_BYTES, os.sched_getaffinity(0)
    if size is not None:
        planning.WINDOW_BYTES = size
    os.sched_setaffinity(0, sorted(allowed)[:cpus])
    try:
        yield
    finally:
        planning.WINDOW_BYTES = before
        os.sched_setaffinity(0, allowed)


def loaded(directory: str, cut: Cut, optimizer: str, dtype: str) -> tuple[Any, Any]:
    model, stepping = made(directory, cut, optimizer, dtype)
    ours = [stepping] if isinstance(stepping, modicum.torch.AdamW) else []
    modicum.torch.load(model, directory, optimizer=ours, progress=False)
    model.register_buffer("seen", torch.full((5,), 2.0))
    steps(model, stepping, cut, range(2))
    return model, stepping


def both(
    directory: str, root: str, cut: Cut, kind: tuple[str, str], room: tuple[int | None, int]
) -> dict[str, Any]:
    """Saves a checkpoint in the foreground, and in the background during further steps. `kind`:
    optimizer and dtype; `room`: as for `window`."""
    pause_us = 20 if cut.dim == 1 else 4000  # along dim 1 each row is a separate write
    with window(*room):
        model, stepping = loaded(directory, cut, *kind)
        own = {"rank": dist.get_rank()}
        how: dict[str, Any] = {
            "step": 2, "optimizer": stepping, "extra": {"epoch": 1}, "extra_per_rank": own,
            "memory": MemoryPolicy(staging="1MiB"),
        }  # fmt: skip
        modicum.torch.save(model, f"{root}/fore", **how)
        with slow(pause_us):
            saving = modicum.torch.async_save(model, f"{root}/back", **how)
            was_done = saving.done()
            if room[0] != 0:  # without a window the buffer's values are not copied at the save
                model.seen.add_(1)  # as a forward does
            steps(model, stepping, cut, range(2, 3))
            is_visible = Path(root, "back/step-2").exists()
            report = saving.result()
        assert saving.done()
        steps(model, stepping, cut, range(3, 2 + STEPS))
    return {
        "report": vars(report), "was_done": was_done, "is_visible": is_visible,
        "end": whole(model, stepping), "seen": model.seen.tolist(),
    }  # fmt: skip


def alone(directory: str, cut: Cut, kind: tuple[str, str]) -> dict[str, str]:
    """The state that `both` returns as "end", of the same training without a save."""
    model, stepping = loaded(directory, cut, *kind)
    steps(model, stepping, cut, range(2, 2 + STEPS))
    return whole(model, stepping)


def told_of(error: Exception) -> dict[str, Any]:
    facts = {n: f for n, f in vars(error).items() if isinstance(f, (str, int))}
    return {"error": type(error).__name__, "message": str(error), **facts}


def fails(directory: str, root: str, cut: Cut, how: str) -> dict[str, Any]:
    """Saves a checkpoint, then a second one in the background, which must fail, and then a third
    one, which must succeed.

    Args:
        how: the fault of the second save. "disk": a write fails. "weight" or "moment": rank 1
            changes a weight or a moment during the save.
    """
    model, stepping = loaded(directory, cut, "fp32", "float32")
    modicum.torch.save(model, root, step=OLD, optimizer=stepping)
    page = Path(os.environ["FAULTY_PAGE"])
    raised: list[dict[str, Any]] = []
    with slow(4000):
        saving = modicum.torch.async_save(model, root, step=2, optimizer=stepping)
        if how == "disk":
            dist.barrier()
            if dist.get_rank() == 0:
                be(page, (FAILS, 5), at=20)
            dist.barrier()
        weight = next(p for p in model.parameters() if p.requires_grad)
        if how == "weight" and dist.get_rank() == 1:
            with torch.no_grad():
                weight.add_(1)
        if how == "moment" and dist.get_rank() == 1:
            stepping.state[weight]["exp_avg"].zero_()
        for number in range(2, 6):
            try:
                steps(model, stepping, cut, range(number, number + 1))
            except Exception as error:
                raised.append({"step": number, **told_of(error)})
            time.sleep(0.2)
    try:
        saving.result()
    except Exception as error:
        raised.append({"step": "wait", **told_of(error)})
    dist.barrier()  # rank 0 has removed the files
    names = sorted(path.name for path in Path(root).iterdir())
    dist.barrier()
    saved = modicum.torch.async_save(model, root, step=3, optimizer=stepping).result()
    return {"raised": raised, "names": names, "after": saved.path}


def waits(directory: str, root: str, cut: Cut, what: str) -> dict[str, Any]:
    """Saves the same checkpoint in the foreground and in the background. Meanwhile makes the call
    `what`, which must wait for the save. Returns the save's report, and the seconds that the call
    took. The root is relative, and the process goes to another directory during the save."""
    model, stepping = loaded(directory, cut, "fp32", "float32")
    how: dict[str, Any] = {"step": 2, "optimizer": stepping, "memory": MemoryPolicy(staging="1MiB")}
    modicum.torch.save(model, f"{root}/fore", **how)
    other = stepping.state_dict()
    with slow(4000):
        before = os.getcwd()
        os.chdir(root)
        saving = modicum.torch.async_save(model, "back", **how)
        os.chdir(before)
        begin = time.monotonic()
        if what == "save":
            modicum.torch.save(model, f"{root}/back", step=3, optimizer=stepping)
        if what == "load":
            modicum.torch.load(model, directory, optimizer=stepping, progress=False)
        if what == "resume":
            modicum.torch.resume(model, f"{root}/fore", optimizer=stepping, progress=False)
        if what == "load_state_dict":
            stepping.load_state_dict(other)
        if what == "state":
            stepping.state.clear()
            steps(model, stepping, cut, range(2, 3))
        if what == "share":
            for local in map(local_of, model.parameters()):
                local.share_memory_()
        if what == "queue":
            queued([*map(local_of, model.parameters())])
        took_s = time.monotonic() - begin
    return {"report": vars(saving.result()), "took_s": took_s}


def queued(tensors: list[torch.Tensor]) -> None:
    """Passes tensors through a queue, whose thread moves them to shared memory."""
    queue = torch.multiprocessing.get_context("spawn").Queue()
    queue.put([tensor.detach() for tensor in tensors])
    queue.get()
    queue.close()


def local_of(tensor: Any) -> torch.Tensor:
    """A DTensor's local tensor, or the tensor itself."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def moves(directory: str, root: str, times: int, what: str) -> list[str]:
    """Saves a model in the foreground and in the background again and again, and meanwhile moves or
    frees its memory by the call `what`. Returns how each save ended: "saved", or its error."""
    cut, ends = Cut("none", (1,)), []
    for number in range(times):
        model, _ = loaded(directory, cut, "fp32", "float32")
        Path(root, str(number)).mkdir()
        modicum.torch.save(model, f"{root}/{number}/fore", step=2)
        with slow(4000):
            saving = modicum.torch.async_save(model, f"{root}/{number}/back", step=2)
            with contextlib.suppress(RuntimeError):  # torch resizes only memory of its own
                move(model, what)
            churn = [torch.full((1 << 18,), 7.0) for _ in range(64)]  # fills freed memory
            try:
                saving.result()
                ends.append("saved")
            except modicum.Error as error:
                ends.append(f"{error.category}: {error}")
            del churn
    return ends


def move(model: Any, what: str) -> None:
    own = [p.data for p in model.parameters()]
    if what == "share":
        model.share_memory()
    if what == "queue":
        queued(own)
    if what == "resize":
        for tensor in own:
            tensor.untyped_storage().resize_(0)
    if what == "tensor resize":
        for tensor in own:
            tensor.resize_(2 * tensor.numel())
    if what == "set":
        for tensor in own:
            tensor.set_(torch.full((4,), 7.0))
    if what == "swap":
        for parameter in list(model.parameters()):
            other = torch.nn.Parameter(torch.full_like(parameter, 7.0))
            torch.utils.swap_tensors(parameter, other)
    if what == "data":
        for parameter in model.parameters():
            parameter.data = torch.full_like(parameter, 7.0)
    if what == "to_empty":
        model.to_empty(device="cpu")
    if what == "del":
        for module in model.modules():
            module._parameters.clear()


def promised(directory: str, root: str, cut: Cut, size: int) -> dict[str, Any]:
    """The memory that a save in the background holds, and the message of one that does not fit."""
    with window(size, 2):
        model, stepping = loaded(directory, cut, "fp32", "float32")
        limits: list[list[tuple[int, int]]] = []
        asked: list[dict[str, int]] = []
        promise = _modicum.save_promise

        def noting(held: Any, *rest: Any, **more: Any) -> Any:
            asked.append(dict(held))
            limits.append(promise(held, *rest, **more))
            return limits[-1]

        _modicum.save_promise = noting
        ledger = modicum.Ledger()
        how: dict[str, Any] = {"step": 2, "optimizer": stepping}
        try:
            with slow(2000):
                saving = modicum.torch.async_save(
                    model, root, memory=MemoryPolicy(ledger=ledger), **how
                )
                steps(model, stepping, cut, range(2, 3))
                report = saving.result()
            most = sum(of for of, _ in limits[0])
            try:
                modicum.torch.async_save(model, f"{root}/none", budget=most // 2, **how)
                refused = {}
            except Exception as error:
                refused = told_of(error) | {"owners": vars(error).get("owners")}
        finally:
            _modicum.save_promise = promise
    return {
        "report": vars(report), "limit": limits[0][dist.get_rank()][1], "asked": asked[0],
        "at_peak": ledger.at_peak, "peak": ledger.peak_bytes, "left": ledger.held_bytes,
        "refused": refused, "is_there": Path(root, "none").exists(),
    }  # fmt: skip


def preempted(
    directory: str, root: str, cut: Cut, marks: str, how: tuple[float | None, int, str]
) -> dict[str, Any]:
    """Waits for a save during which the test sends SIGTERM. Then either SIGTERM ends the process,
    or the save raises.
    `how`: the grace in seconds; the pause of each write in microseconds; and what the program does
    meanwhile: "polls"; "computes", without a call of Modicum after a step that is skipped; or
    "steps", and gets SIGTERM in the middle of a step."""
    model, stepping = loaded(directory, cut, "fp32", "float32")
    grace, pause_us, does = how
    with slow(pause_us):
        saving = modicum.torch.async_save(
            model, root, step=1, optimizer=stepping,
            options=SaveOptions(grace=grace), memory=MemoryPolicy(staging="256KiB"),
        )  # fmt: skip
        try:
            if does == "computes":
                skip(stepping)
            Path(marks, f"rank-{dist.get_rank()}").touch()  # from now on SIGTERM may arrive
            if does == "steps":
                torch.autograd.graph.increment_version = increment_and_terminate
                steps(model, stepping, cut, range(2, 3))
            while does == "polls" and not saving.done():
                time.sleep(0.05)
            if does == "polls":
                saving.result()
            time.sleep(15)  # SIGTERM ends the process within this time
        except Exception as error:
            return told_of(error)
    return {"error": ""}


def skip(optimizer: modicum.torch.AdamW) -> None:
    """Makes a step that is skipped, since its gradients are not finite."""
    before = optimizer.skipped_steps
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = torch.full_like(parameter, float("nan"))
    optimizer.step()
    optimizer.zero_grad()
    assert optimizer.skipped_steps == before + 1


INCREMENT_VERSION = torch.autograd.graph.increment_version


def increment_and_terminate(tensors: Any) -> None:
    INCREMENT_VERSION(tensors)
    os.kill(os.getpid(), signal.SIGTERM)


ACTS: dict[str, Callable[..., Any]] = {
    "background_both": both,
    "background_alone": alone,
    "background_fails": fails,
    "background_waits": waits,
    "background_moves": moves,
    "background_promised": promised,
    "background_preempted": preempted,
}
