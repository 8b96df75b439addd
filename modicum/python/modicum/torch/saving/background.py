"""A save in the background, while the program trains on.

    the program's thread              the save's thread              other ranks
    --------------------              -----------------              -----------
    save(background=True)
      agree, plan, budget             -                              the same, together
      make the files, meet            -                              the same, together
    optimizer steps                   write this rank's part         -
      wait for a block, or copy it    ...
      .                               synced
    next step, done(), wait(), exit,
    or SIGTERM that is held
      vote, unless a tensor was
      written in place                gather all votes        <->    vote
      .                               commit, on rank 0
    wait() returns                    the step is visible     <->    the step is visible

While a save writes, its ranks do not meet, and it needs the GIL only for tensors on a device. An
optimizer step may wait for this rank's save, but never for another rank's. The ranks meet through a
prefix of the process group's store (ranks/group.py), not in collectives, whose order on all ranks
the program alone determines.

A vote says that this rank's part is written and that no tensor was written to meanwhile. The
program's thread votes, since it runs no operation that writes to a tensor while it does. That also
holds in a handler of SIGTERM, which Python runs on the program's thread between two operations: it
waits until the part is written, and votes, so that a long step of the training does not use up the
grace. A call of this module or a step of AdamW that it interrupts votes at its own end. If a rank's
part fails, all ranks drop the saved step, and each raises the error in its next optimizer
step, save or `wait`.
"""

import multiprocessing.util
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from modicum import _modicum
from modicum.errors import Error, refusal
from modicum.torch.optim import in_flight
from modicum.torch.optim.adamw import AdamW
from modicum.torch.optim.parts import versions_of
from modicum.torch.saving.report import Saved
from modicum.torch.saving.running import Begun
from modicum.torch.saving.sigterm import Sigterm

CRASH_LIMIT_S = 30.0
"""How long a program that ends by an exception waits for other ranks, which may wait for it."""
_EXPLAIN_S = 2.0
"""How long the handling of another error waits for the save to end."""
_POLL_S = 0.1


class Watched:
    """The tensors that only Modicum may write to during a save, and their version counters."""

    def __init__(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        self._noted = {id(of): (name, of, versions_of(of)) for name, of in tensors}

    def changed(self) -> str | None:
        """The name of the first tensor that was written to since it was noted, or None."""
        noted = self._noted.values()
        return next((name for name, of, version in noted if versions_of(of) != version), None)

    def renote(self, tensors: Iterable[torch.Tensor]) -> None:
        """Notes the version counters of `tensors` again, after Modicum has written to them."""
        for of in tensors:
            if id(of) in self._noted:
                self._noted[id(of)] = (self._noted[id(of)][0], of, versions_of(of))


class Saving:
    """A save in the background, returned by `save(background=True)`.

    The saved step becomes visible when every rank has written its part and then has called an
    optimizer's step, `done`, `wait` or another save, exits, or handles a SIGTERM that `grace`
    holds. Use it from the training thread.
    """

    def __init__(
        self,
        begun: Begun,
        finish: Callable[[dict[str, Any]], Saved],
        sigterm: Sigterm,
    ) -> None:
        """`finish`: commits the step, given this rank's outcome. `start` must follow."""
        assert begun.planned.snapshot is not None
        self._begun, self._finish, self._sigterm = begun, finish, sigterm
        self._is_leader = begun.ranks.rank == 0
        self._snapshot = begun.planned.snapshot
        self._watched = Watched(begun.watched())
        self._is_on_device = begun.planned.model.is_on_device
        self._blocked_s = 0.0
        self._began, self._written, self._voted, self._finished = (
            threading.Event() for _ in range(4)
        )
        self._refusal: Exception | None = None
        self._error: BaseException | None = None
        self._is_told = self._is_collected = False
        self._is_called = True  # in a call of this object, or in a step of AdamW; `start` ends it
        self._report: Saved | None = None

    def start(self, rest: ExitStack, called_s: float) -> "Saving":
        """Starts the save's thread.

        Args:
            rest: closed at the end: leaves the ranks, removes uncommitted files and sends a SIGTERM
                again that was held back.
            called_s: how long the program has been in the call of `save`, in seconds.
        """
        self._blocked_s = called_s
        _install()
        in_flight.begin(self)
        thread = threading.Thread(target=self._run, args=(rest,), name="modicum-save", daemon=True)
        try:
            thread.start()
        except BaseException:
            in_flight.end(self)
            with rest:
                raise
        # The save's thread starts other threads, which Python refuses once the process exits.
        self._began.wait()
        self._sigterm.on_arrival = self._vote_after_sigterm
        self._end_call(is_inner=False)
        return self

    # ---- what the program calls

    def done(self) -> bool:
        """Whether the saved step is visible. Raises the same errors as `wait`."""
        with self._call():
            self._vote()
        self._collect()
        if self._error is not None and self._finished.is_set():
            raise self._error
        return self._finished.is_set()

    def wait(self) -> Saved:
        """Waits until the saved step is visible; returns the report, the same on every rank.
        Collective.

        Raises:
            UsageError: the program wrote to a tensor in place during the save; names the tensor.
            IoError, IntegrityError, PreemptedError, PeerError: as from `save`. Any error is raised
                on every rank, and nothing of the step is visible.
        """
        with self._call():
            self._settle()
            self._vote()
        self._finished.wait()
        self._is_told = True
        self._collect()
        if self._error is not None:
            raise self._error
        assert self._report is not None
        return self._report

    # ---- what optimizers and loads call: the methods of in_flight.Save

    def before_step(self) -> _modicum.Snapshot | None:
        with self._call():
            if self._is_on_device:
                self._settle()
            self._vote()
        if self._refusal is not None:
            self._finished.wait()
        self._collect()
        self._is_called = True  # until after_step: the step changes the version counters
        return None if self._written.is_set() else self._snapshot

    def after_step(self, parameters: Iterable[torch.Tensor]) -> None:
        if not self._voted.is_set():
            self._watched.renote(parameters)
            self._vote()
        self._end_call(is_inner=False)

    def settle(self) -> None:
        with self._call():
            self._settle()

    def explain(self) -> None:
        self._finished.wait(_EXPLAIN_S)
        self._collect()

    def leave(self) -> None:
        """At the process's exit: waits for the save, and prints its error."""
        try:
            # True if the program ends by an exception. A child of multiprocessing does not set
            # last_value, so here it always counts as ended by one.
            if hasattr(sys, "last_value") or multiprocessing.parent_process() is not None:
                with self._call():
                    self._settle()
                    self._vote()
                if not self._finished.wait(CRASH_LIMIT_S):
                    what = "this rank's process ends, and other ranks have not voted within "
                    self._begun.ranks.fail(refusal("USAGE", f"{what}{CRASH_LIMIT_S:.0f} s"))
            self.wait()
        except BaseException as error:
            traceback.print_exception(error)

    # ---- the program's thread

    @contextmanager
    def _call(self) -> Iterator[None]:
        """A call that uses locks or votes, which a handler of SIGTERM must not do meanwhile."""
        is_inner, self._is_called = self._is_called, True
        try:
            yield
        finally:
            self._end_call(is_inner=is_inner)

    def _end_call(self, *, is_inner: bool) -> None:
        self._is_called = is_inner
        if self._sigterm.has_arrived:
            self._vote_after_sigterm()

    def _vote_after_sigterm(self) -> None:
        """Waits for this rank's part and votes; in a call or a step, leaves that to its end."""
        if self._is_called:
            return
        self._is_called = True
        try:
            self._settle(self._sigterm.left_s)
            self._vote()
        finally:
            self._is_called = False

    def _settle(self, limit_s: float | None = None) -> None:
        """Waits until this rank's part is written, for `limit_s` seconds at most."""
        begin = time.monotonic()
        self._written.wait(limit_s)
        if not self._voted.is_set():
            self._blocked_s += time.monotonic() - begin

    def _vote(self) -> None:
        """Fails the save if a tensor was changed; otherwise, once this rank's part is written, lets
        it be committed."""
        if self._voted.is_set():
            return
        is_written = self._written.is_set()
        changed = self._watched.changed()
        if changed is not None:
            what = "a tensor was written in place while a save in the background read it: wait() "
            what += "for the save before"
            self._refuse(what, changed)
        elif is_written:
            self._voted.set()

    def _refuse(self, what: str, tensor: str = "") -> None:
        self._refusal = refusal("USAGE", what, tensor=tensor)
        self._begun.board.fail(what, -1)
        self._voted.set()

    def _collect(self) -> None:
        """Once the save is over: frees what it holds, and raises its error if not yet raised."""
        if not self._finished.is_set():
            return
        in_flight.end(self)
        is_first, self._is_collected = not self._is_collected, True
        if is_first:
            del self._begun, self._watched, self._finish  # they hold the state's memory
            self._sigterm.restore()
            for warning in self._report.warnings if self._report and self._is_leader else ():
                warnings.warn(f"modicum: {warning}", stacklevel=4)
        if self._error is not None and not self._is_told:
            self._is_told = True
            raise self._error

    # ---- the save's thread

    def _run(self, rest: ExitStack) -> None:
        try:
            with rest:
                outcome = self._write()
                while not self._voted.wait(_POLL_S):
                    self._begun.ranks.check()
                if self._refusal is not None:
                    raise self._refusal
                blocked_s = self._blocked_s + self._snapshot.waited_s
                of_steps = {"blocked_s": blocked_s, "kept_bytes": self._snapshot.copied_bytes}
                self._report = self._finish(outcome | of_steps)
        except BaseException as error:
            self._error = error
        finally:
            self._began.set()
            self._voted.set()
            self._finished.set()

    def _write(self) -> dict[str, Any]:
        try:
            return self._begun.write(self._began.set)
        except Error as error:
            raise (self._refusal or error) from None
        finally:
            self._snapshot.end()
            self._written.set()


# ---- the process

_is_installed = False


def _install() -> None:
    """Once per process: makes other optimizers' steps and the exit wait for saves."""
    global _is_installed
    if not _is_installed:
        _is_installed = True
        register_optimizer_step_pre_hook(_before_step)
        # Unlike atexit, a Finalize also runs in children of multiprocessing.
        multiprocessing.util.Finalize(None, in_flight.leave, exitpriority=100)


def _before_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    if not isinstance(optimizer, AdamW):
        in_flight.wait()
