"""`save_on_sigterm`: a loop that saves and ends once any rank has got SIGTERM."""

import os
import signal
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

import torch
import torch.distributed as dist

from modicum.errors import refusal
from modicum.torch.optim import in_flight
from modicum.torch.saving.sigterm import require_default_sigterm

EXIT_CODE = 128 + signal.SIGTERM


class Preemption:
    """A loop that may be preempted, from `save_on_sigterm`."""

    def __init__(self, save: Callable[[], object], every: int) -> None:
        self._save, self._every = save, every
        self._steps, self._pid = 0, os.getpid()
        self.is_requested = False
        """Whether this rank has got SIGTERM."""

    def after_step(self) -> None:
        """Call it on every rank after each step of the training. Collective at every `every`-th
        call: if any rank has got SIGTERM by then, all ranks save and raise `SystemExit`, with the
        exit code 143 of a process that SIGTERM has ended."""
        self._steps += 1
        if self._steps % self._every != 0 or not _on_any_rank(self.is_requested):
            return
        self._restore()
        self._save()
        in_flight.finish()
        in_flight.deliver()
        self.is_requested = False
        raise SystemExit(EXIT_CODE)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.is_requested or os.getpid() != self._pid:  # a second SIGTERM, or a forked child
            self._restore()
            signal.raise_signal(signal.SIGTERM)
        self.is_requested = True

    def _restore(self) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


@contextmanager
def save_on_sigterm(save: Callable[[], object], *, every: int = 1) -> Iterator[Preemption]:
    """A context for the loop of a training that a scheduler may preempt:

        def save():
            modicum.torch.save(model, "run", step=step, optimizer=optimizer)

        with modicum.torch.save_on_sigterm(save) as preemption:
            for step, batch in enumerate(loader, start=1):
                train(batch)
                preemption.after_step()

    SIGTERM is only noted in the context. After the next step all ranks agree, save and exit,
    whichever of them have got it, and whether at the same time or not. A second SIGTERM ends the
    process at once, as one does outside the context; so does the kill if a step and the save take
    longer than the scheduler's grace: the previous checkpoint stays. A SIGTERM that comes after the
    last `after_step` ends the process when the context ends.

    Args:
        save: saves, on every rank: a call of `save` or `async_save`, or of accelerate's
            `save_state`. A save in the background that is in flight ends before. SIGTERM has its
            default action again, so that `SaveOptions.grace` may hold a second one.
        every: the number of steps between two agreements. One is an all-reduce of a single number,
            which waits for the device's work.

    Yields:
        A `Preemption`.

    Raises:
        UsageError: the program handles SIGTERM itself, or this is not the main thread.
    """
    require_default_sigterm("save_on_sigterm")
    if isinstance(every, bool) or not isinstance(every, int) or every < 1:
        raise refusal("USAGE", "every", expected="an integer from 1", got=repr(every))
    preemption = Preemption(save, every)
    signal.signal(signal.SIGTERM, preemption._note)
    try:
        yield preemption
    except Exception as error:
        if preemption.is_requested:
            traceback.print_exception(error)  # the process ends before its caller sees it
        raise
    finally:
        preemption._restore()
        if preemption.is_requested:
            signal.raise_signal(signal.SIGTERM)


def _on_any_rank(is_requested: bool) -> bool:
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return is_requested
    device = "cuda" if dist.get_backend() == "nccl" else "cpu"
    requested = torch.tensor(int(is_requested), device=device)
    dist.all_reduce(requested, op=dist.ReduceOp.MAX)
    return bool(requested)
