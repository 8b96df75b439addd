"""`save_on_sigterm`: a loop that saves and ends once any rank has got SIGTERM."""

import signal
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import NoReturn

import torch
import torch.distributed as dist

from modicum.errors import IoError, refusal
from modicum.torch.optim import in_flight
from modicum.torch.ranks.collectives import settled
from modicum.torch.saving import running
from modicum.torch.saving.report import SaveReport
from modicum.torch.saving.sigterm import SigtermHandler, is_held
from modicum.upstream.torch_data import keep_workers_at_sigterm

EXIT_CODE = 128 + signal.SIGTERM


class SigtermRequest(SigtermHandler):
    """A SIGTERM that asks all ranks to save and to end after a step. A second one ends the process.

    Args:
        every: the number of steps between two agreements.
    """

    def __init__(self, every: int) -> None:
        super().__init__()
        if isinstance(every, bool) or not isinstance(every, int) or every < 1:
            raise refusal("USAGE", "every", expected="an integer from 1", got=repr(every))
        self._every, self._steps = every, 0
        self._saved_before: SaveReport | None = running.newest()
        self.on_arrival = self._end_process_at_the_second
        self._patches = ExitStack()

    def install(self, argument: str, *, inside: bool = False) -> None:
        super().install(argument, inside=inside)
        keep_workers_at_sigterm(self._patches)

    def end(self) -> None:
        self._patches.close()
        super().end()

    def is_agreed(self) -> bool:
        """Counts a step; returns whether any rank has got SIGTERM. Collective at every `every`-th
        call; others return False."""
        self._steps += 1
        is_agreed = self._steps % self._every == 0 and _on_any_rank(bool(self.arrived))
        if not is_agreed:
            self._saved_before = running.newest()
        return is_agreed

    def exit(self, otherwise: str) -> NoReturn:
        """Ends the process once all ranks have saved. Rank 0 prints what they have saved since the
        step before: a checkpoint of Modicum, or `otherwise`."""
        _print_exit(otherwise, None if running.newest() is self._saved_before else running.newest())
        self.end()
        self.arrived.clear()
        raise SystemExit(EXIT_CODE)

    def leave(self) -> None:
        """The end of the training. A SIGTERM that no agreement has answered ends the process, after
        a save in the background that holds it, too. Rank 0 prints the newest saved checkpoint."""
        if self._is_unanswered():
            _print_exit("the loop has ended", running.newest())
            signal.raise_signal(signal.SIGTERM)

    def _end_process_at_the_second(self) -> None:
        if len(self.arrived) > 1 and self._is_unanswered():
            signal.raise_signal(signal.SIGTERM)

    def _is_unanswered(self) -> bool:
        """Whether SIGTERM has arrived; from now on it acts. False if a save holds it, too."""
        self.end()
        return bool(self.arrived) and not is_held()


class Preemption:
    """A loop that may be preempted, from `save_on_sigterm`. For the main thread."""

    def __init__(self, save: Callable[[], object], request: SigtermRequest) -> None:
        self._save, self._request = save, request

    @property
    def is_requested(self) -> bool:
        """Whether this rank has got SIGTERM."""
        return bool(self._request.arrived)

    def after_step(self) -> None:
        """Call it on every rank after each step of the training. Collective at every `every`-th
        call: if any rank has got SIGTERM by then, all ranks save and exit.

        Raises:
            SystemExit: all ranks have saved. The exit code is 143, that of a process which SIGTERM
                has ended.
            Error: the save has failed.
        """
        if self._request.is_agreed():
            try:
                self._save()
            except IoError as error:
                if not _has_saved(error):
                    raise
            in_flight.wait()
            self._request.exit("the loop's function has saved")


@contextmanager
def save_on_sigterm(save: Callable[[], object], *, every: int = 1) -> Iterator[Preemption]:
    """A context for the loop of a training that a scheduler may preempt:

        def save():
            modicum.torch.save(model, "run", step=step, optimizer=optimizer)

        with modicum.torch.save_on_sigterm(save) as preemption:
            for step, batch in enumerate(loader, start=1):
                train(batch)
                preemption.after_step()

    SIGTERM is only noted in the context, and ignored by workers of data loaders that start
    in it: Slurm signals them, too. After the next step all ranks agree, save and exit,
    whichever of them have got it, and whether at the same time or not. A second SIGTERM, more than
    a second later, ends the process at once, as one does outside the context; so does the kill if a
    step and the save take longer than the scheduler's grace: the previous checkpoint stays. At its
    end the context waits for a save in the background, as `AsyncSave.result` does; a SIGTERM that
    comes after the last `after_step` ends the process then, with that checkpoint committed. Rank 0
    prints the exit to stderr: "modicum: SIGTERM: saved PATH at step N, exiting 143". torchrun
    itself then ends with its own code, 1.

    Args:
        save: saves, on every rank: a call of `save` or `async_save`, or of accelerate's
            `save_state`. A save that is in flight in the background is committed before
            it is called. In a step that the loop has saved by itself, its refusal to save the same
            step again is no error. `SaveOptions.grace` may hold a second SIGTERM.
        every: the number of steps between two agreements. One is an all-reduce of a single number,
            which waits for the device's work.

    Yields:
        A `Preemption`.

    Raises:
        UsageError: `save` is no function, `every` is no integer from 1, the program handles
            SIGTERM itself, or this is not the main thread.
    """
    if not callable(save):
        raise refusal("USAGE", "save", expected="a function without arguments", got=repr(save))
    request = SigtermRequest(every)
    request.install("save_on_sigterm")
    try:
        yield Preemption(save, request)
        in_flight.wait()
    except Exception as error:
        if request.arrived:
            traceback.print_exception(error)  # the process ends before its caller sees it
        raise
    finally:
        request.leave()


def _print_exit(otherwise: str, saved: SaveReport | None) -> None:
    """Rank 0 prints to stderr that SIGTERM ends the process, and the checkpoint that was saved."""
    if saved is not None:
        otherwise = f"saved {saved.path}" + (f" at step {saved.step}" if saved.step else "")
    if not dist.is_initialized() or dist.get_rank() == 0:
        print(f"modicum: SIGTERM: {otherwise}, exiting {EXIT_CODE}", file=sys.stderr)


def _has_saved(error: IoError) -> bool:
    """Whether a save was refused because this process has saved the same step before, as by a save
    of every tenth step."""
    saved = running.newest()
    name = None if saved is None else Path(saved.path).name
    return error.category == "CONFLICT" and error.file == name


def _on_any_rank(is_requested: bool) -> bool:
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return is_requested
    # As "cpu:gloo,cuda:nccl".
    devices = [pair.partition(":")[0] for pair in dist.get_backend_config().split(",")]
    device = "cpu" if "cpu" in devices else devices[0]
    requested = torch.tensor(int(is_requested), device=device)
    settled(dist.all_reduce, requested, dist.ReduceOp.MAX)
    return bool(requested)
