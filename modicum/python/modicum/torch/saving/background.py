"""A save in the background, while the program trains on.

    the program's thread              the save's thread              other ranks
    --------------------              -----------------              -----------
    async_save()
      agree, plan, budget             -                              the same, together
      make the files, meet            -                              the same, together
    optimizer steps                   write this rank's part         -
      wait for a block, or copy it    ...
      .                               synced
    next step, done(), result(), exit,
    or SIGTERM that is held
      vote, unless a tensor was
      written in place                gather all votes        <->    vote
      .                               commit, on rank 0
    result() returns                  the checkpoint is visible     <->    the checkpoint is visible

While a save writes, its ranks do not meet, and it needs the GIL only for tensors on a device. An
optimizer step may wait for this rank's save, but never for another rank's. The ranks meet through a
prefix of the process group's store (ranks/group.py), not in collectives, whose order on all ranks
the program alone determines.

A vote says that this rank's part is written and that no tensor was written to meanwhile. The
program's thread votes, since it runs no operation that writes to a tensor while it does. That also
holds in a handler of SIGTERM, which Python runs on the program's thread between two operations: it
waits until the part is written, and votes, so that a long step of the training does not use up the
grace. A call of this module or a step of AdamW that it interrupts votes at its own end, also if the
step is skipped or raises.

states.py has the states and what changes them. If a rank's part fails, all ranks drop the new
checkpoint, and each raises the error, once, in its next call in which the ranks learn of errors:
`result`, a save, a load, a resume, an optimizer's step. Other calls deliver no error.
"""

import multiprocessing.util
import os
import sys
import threading
import time
import traceback
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch.optim.optimizer import register_optimizer_step_pre_hook

from modicum import _modicum
from modicum.errors import Error, PeerError, PreemptedError, refusal
from modicum.torch.optim import in_flight
from modicum.torch.optim.adamw import AdamW
from modicum.torch.optim.parts import versions_of
from modicum.torch.ranks.refusals import is_refused, note_delivery
from modicum.torch.saving.report import SaveReport
from modicum.torch.saving.running import LOCK_LIMIT_S, OpenSave
from modicum.torch.saving.sigterm import Sigterm
from modicum.torch.saving.states import READS, Course, Event, State

CRASH_LIMIT_S = 30.0
"""How long a program that ends by an exception waits for other ranks, which may wait for it."""
_EXPLAIN_S = 2.0
"""How long the handling of another error waits for the save to end."""
_LOOK_LIMIT_S, _LAST_LOOK_S = LOCK_LIMIT_S + 10.0, 5.0
"""How long a rank that has voted and lost others waits for rank 0 to publish the checkpoint or drop
it; and if it has lost rank 0, for the root to show what rank 0 did."""
_REFUSE_LIMIT_S = 30.0
"""How long a rank that refuses a step of another optimizer waits for the others to come to it."""
_POLL_S = 0.1


class WatchedTensors:
    """The tensors that only Modicum may write to during a save, and their version counters."""

    def __init__(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        self._noted = {id(tensor): (name, tensor, versions_of(tensor)) for name, tensor in tensors}

    def changed(self) -> str | None:
        """The name of the first tensor that was written to since it was noted, or None."""
        noted = self._noted.values()
        return next(
            (name for name, tensor, version in noted if versions_of(tensor) != version), None
        )

    def renote(self, tensors: Iterable[torch.Tensor]) -> None:
        """Notes the version counters of `tensors` again, after Modicum has written to them."""
        for tensor in tensors:
            if id(tensor) in self._noted:
                self._noted[id(tensor)] = (self._noted[id(tensor)][0], tensor, versions_of(tensor))


class AsyncSave:
    """A save in the background, returned by `async_save`. Use it from the training thread.

    The checkpoint becomes visible when every rank has written its part and then has called an
    optimizer's step, a method of this object or another save, exits (`destroy_process_group()` and
    `os._exit()` do not wait), or handles a SIGTERM that `grace` holds. It is no
    `concurrent.futures.Future`: `futures.wait`, `as_completed` and `asyncio.wrap_future` block the
    training thread without calling any of these, and would wait for ever.
    """

    def __init__(
        self, begun: OpenSave, finish: Callable[[dict[str, Any], Any], SaveReport], sigterm: Sigterm
    ) -> None:
        """`finish`: as `OpenSave.finish`. `_start` must follow."""
        assert begun.planned.snapshot is not None
        self._begun, self._finish, self._sigterm = begun, finish, sigterm
        self._rank, self._world_size = begun.ranks.rank, begun.ranks.world_size
        self._name = begun.name
        self._snapshot = begun.planned.snapshot
        self._watched = WatchedTensors(begun.watched())
        self._is_on_device = begun.planned.parts.model.is_on_device
        self._blocked_s = 0.0
        self._course = Course()
        self._pid, self._thread = os.getpid(), threading.current_thread()
        has_others = self._world_size > 1 and dist.get_backend() != "fake"
        self._group = weakref.ref(dist.group.WORLD) if has_others else None
        self._veto: Exception | None = None
        self._error: BaseException | None = None
        self._is_delivered = self._is_freed = self._is_in_step = False
        self._is_called = True  # in a call of this object, or in a step of AdamW; `_start` ends it
        self._report: SaveReport | None = None
        self._callbacks: list[Callable[[AsyncSave], object]] = []
        self._callbacks_lock = threading.Lock()

    def _start(self, rest: ExitStack, called_s: float) -> "AsyncSave":
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
        self._course.await_leaving(State.OPENING)
        self._sigterm.on_arrival = self._vote_after_sigterm
        self._end_call(is_inner=False)
        return self

    # ---- what the program calls

    def done(self) -> bool:
        """Whether the save is over: the checkpoint is visible, or the save has failed. On the
        training thread the call also lets the checkpoint be committed; on any other, as in a
        callback, it only reports. Raises no error of the save.

        Raises:
            UsageError: this is a forked child.
        """
        if not self._is_on_thread():  # in a callback
            return self._course.is_over
        with self._call():
            self._vote()
        self._free()
        return self._course.is_over

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Waits until the save is over; returns its error, or None if the checkpoint is visible.
        Does not count as raising it: the next collective call still does.

        Raises:
            TimeoutError: the save is not over after `timeout` seconds, and goes on.
            UsageError: this is a forked child, or not the thread that called `async_save`.
        """
        self._require_thread()
        self._finish_within(timeout)
        return self._error

    def result(self, timeout: float | None = None) -> SaveReport:
        """Collectively waits until the checkpoint is visible; returns the report, the same on
        every rank. After Ctrl-C the save goes on.

        Args:
            timeout: seconds; None: no limit.

        Raises:
            TimeoutError: the save is not over, and goes on. Ranks may differ in this.
            UsageError: the program wrote to a tensor in place during the save, which is named, or
                destroyed the process group; or this is not the thread that called `async_save`.
            IoError, IntegrityError, PreemptedError, PeerError: as from `save`. Any error is raised
                on every rank, and nothing of the checkpoint is visible.
        """
        self._require_thread()
        self._finish_within(timeout)
        self.deliver()
        if self._error is not None:
            raise self._error
        assert self._report is not None
        return self._report

    def add_done_callback(self, callback: Callable[["AsyncSave"], object]) -> None:
        """Calls `callback(self)` once the save is over, on the save's thread; at once if it is over
        already. Of this object the callback may call only `done`. An exception of the callback is
        printed and ignored."""
        if not callable(callback):
            raise refusal("USAGE", "callback", expected="a function", got=repr(callback))
        with self._callbacks_lock:
            if not self._course.is_over:
                self._callbacks.append(callback)
                return
        self._call_back(callback)

    def _is_on_thread(self) -> bool:
        return threading.current_thread() is self._thread

    def _require_thread(self) -> None:
        """Raises `UsageError` on another thread than that of the save's caller, which may write."""
        if not self._is_on_thread() and self._thread.is_alive():
            what, got = "this is not the thread that called async_save", threading.current_thread()
            raise refusal("USAGE", what, expected=self._thread.name, got=got.name)

    # ---- what optimizers and loads call: the methods of in_flight.Save

    def before_step(self) -> _modicum.Snapshot | None:
        with self._call():
            if self._is_on_device:
                self._settle()
            self._vote()
        if self._veto is not None or self._course.state is State.FAILED:
            self._course.await_end()
        self.deliver()
        if self._is_freed:
            return None
        self._is_called = self._is_in_step = True  # until after_step: version counters change
        return self._snapshot if self._course.state in READS else None

    def after_step(self, parameters: Iterable[torch.Tensor]) -> None:
        if not self._is_in_step:
            return
        self._is_in_step = False
        if self._is_before_vote():
            self._watched.renote(parameters)
        self._vote()
        self._end_call(is_inner=False)

    def before_other_step(self) -> None:
        self.finish()
        in_flight.end(self)
        if self._error is None or self._is_refused_by_none():
            return
        self._is_delivered = True
        raise self._error

    def settle(self) -> None:
        if not self._is_on_thread():  # which alone votes
            self._settle()
            return
        with self._call():
            self._settle()
            self._vote()

    def finish(self) -> None:
        self._finish_within(None)

    def deliver(self) -> None:
        self._free()
        if self._course.is_over and self._error is not None and not self._is_delivered:
            self._is_delivered = True
            if self._group is not None and not isinstance(self._error, PeerError):
                note_delivery(self._name)
            raise self._error

    def explain(self) -> None:
        self._course.await_end(_EXPLAIN_S)
        self.deliver()

    def leave(self) -> None:
        # At the process's exit: waits for the save, and prints its error.
        if self._is_delivered:
            return
        try:
            # True if the program ends by an exception. A child of multiprocessing does not set
            # last_value, so here it always counts as ended by one.
            if hasattr(sys, "last_value") or multiprocessing.parent_process() is not None:
                with self._call():
                    self._settle()
                    self._vote()
                if not self._course.await_end(CRASH_LIMIT_S - _EXPLAIN_S):
                    what = "this rank's process ends, and other ranks have not voted within "
                    error = refusal("USAGE", f"{what}{CRASH_LIMIT_S - _EXPLAIN_S:.0f} s")
                    self._begun.ranks.fail(error)
                    if not self._course.await_end(_EXPLAIN_S):
                        raise error
            self.finish()
            if self._error is not None:
                raise self._error
        except BaseException as error:
            traceback.print_exception(error)

    # ---- the program's thread

    @contextmanager
    def _call(self) -> Iterator[None]:
        """A call that uses locks or votes, which a handler of SIGTERM must not do meanwhile."""
        if os.getpid() != self._pid:
            raise refusal("USAGE", "a save in the background: a forked child has none")
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
        self._course.await_leaving(*READS, limit_s=limit_s)
        self._blocked_s += time.monotonic() - begin

    def _finish_within(self, limit_s: float | None) -> None:
        """Returns when the save is over. Raises `TimeoutError` after `limit_s` seconds."""
        begin = time.monotonic()
        with self._call():
            self._settle(limit_s)
            self._vote()
        left_s = None if limit_s is None else max(0.0, limit_s - (time.monotonic() - begin))
        if not self._course.await_end(left_s):
            raise TimeoutError(f"the save in the background is not over after {limit_s} s")
        self._free()

    def _is_before_vote(self) -> bool:
        return self._course.state in (*READS, State.WRITTEN)

    def _vote(self) -> None:
        """Fails the save if a tensor was changed; otherwise, once this rank's part is written, lets
        it be committed."""
        if not self._is_before_vote():
            return
        if self._veto is None:
            self._veto = self._objection()
        if self._veto is None:
            self._course.apply(Event.VOTE)
        else:  # a part that is being written ends by this error
            self._begun.board.fail(str(self._veto), -1)
            self._course.apply(Event.VETO)

    def _objection(self) -> Exception | None:
        """The error of a save that must not be committed."""
        changed = self._watched.changed()
        if changed is not None:
            what = "a tensor was written in place while a save in the background read it: call "
            return refusal("USAGE", what + "result() of the save before", tensor=changed)
        group = dist.group.WORLD if self._group is not None else None
        if self._group is not None and (group is None or self._group() is not group):
            what = "the process group was destroyed during a save in the background: call "
            return refusal("USAGE", what + "result() of the save before")
        return None

    def _is_refused_by_none(self) -> bool:
        """Whether all ranks have raised the error before, in other calls. Collective."""
        if self._group is None or isinstance(self._error, PeerError):
            return self._is_delivered
        refuses = not self._is_delivered
        return not is_refused(self._name, self._world_size, _REFUSE_LIMIT_S, refuses=refuses)

    def _free(self) -> None:
        """Once the save is over: frees what it holds, and issues its warnings."""
        if self._is_freed or not self._course.is_over:
            return
        self._is_freed = True
        if self._error is None:
            in_flight.end(self)  # otherwise until all ranks have raised the error
        del self._begun, self._watched, self._finish  # they hold the state's memory
        self._sigterm.end()
        for warning in self._report.warnings if self._report and self._rank == 0 else ():
            warnings.warn(f"modicum: {warning}", stacklevel=4)

    # ---- the save's thread

    def _run(self, rest: ExitStack) -> None:
        try:
            with rest:
                self._report = self._save()
        except BaseException as error:
            if self._course.state is not State.COMMITTED:
                self._error = error
            elif not isinstance(error, Error):  # a rank that is gone, after the commit
                traceback.print_exception(error)
        finally:
            with self._callbacks_lock:
                self._course.end()
                callbacks, self._callbacks = self._callbacks, []
            for callback in callbacks:
                self._call_back(callback)

    def _call_back(self, callback: Callable[["AsyncSave"], object]) -> None:
        try:
            callback(self)
        except Exception as error:
            traceback.print_exception(error)

    def _save(self) -> SaveReport:
        """Writes this rank's part and commits the checkpoint. Collective."""
        outcome: dict[str, Any] = {}
        try:
            outcome |= self._write()
            self._await_vote()
            outcome["blocked_s"] = self._blocked_s + self._snapshot.waited_s
            outcome["kept_bytes"] = self._snapshot.copied_bytes
            return self._finish(outcome, self._note)
        except BaseException as error:
            if not self._is_committed_despite(error):
                raise
            if not isinstance(error, Error):
                traceback.print_exception(error)
            return self._begun.report_alone(outcome)

    def _write(self) -> dict[str, Any]:
        try:
            return self._begun.write(lambda: self._course.apply(Event.OPENED))
        except Error as error:
            raise (self._veto or error) from None
        finally:
            self._snapshot.end()

    def _await_vote(self) -> None:
        self._sigterm.begin_vote()
        self._course.apply(Event.PART_WRITTEN)
        if self._veto is not None:
            self._course.apply(Event.VETO)
        while not self._course.await_leaving(State.WRITTEN, limit_s=_POLL_S):
            self._begun.ranks.check()
            self._sigterm.while_waiting()
        if self._veto is not None:
            raise self._veto

    def _note(self, event: Event) -> None:
        if self._course.apply(event) is State.COMMITTED:
            self._sigterm.end_vote()

    def _is_committed_despite(self, error: BaseException) -> bool:
        """Applies an error of the save. A rank that has voted searches the run."""
        event = self._event_of(error)
        if self._course.apply(event) is State.UNKNOWN:
            self._begun.ranks.fail(error)
            culprit = getattr(error, "culprit_rank", None)
            limit_s = _LAST_LOOK_S if culprit == 0 else _LOOK_LIMIT_S
            # Rank 0 knows that it has not published the checkpoint.
            is_visible = self._rank != 0 and self._begun.is_visible(limit_s)
            self._note(Event.SEEN if is_visible else Event.ABSENT)
        return self._course.state is State.COMMITTED

    def _event_of(self, error: BaseException) -> Event:
        if self._course.state is State.COMMITTING:
            return Event.OWN_ERROR  # rank 0 asks no other rank while it commits
        if isinstance(error, PreemptedError):
            return Event.PREEMPTED
        culprit = getattr(error, "culprit_rank", None)
        is_of_peer = isinstance(error, PeerError) or culprit not in (None, self._rank)
        return Event.PEER_ERROR if is_of_peer else Event.OWN_ERROR


# ---- the process

_has_hook = False
_exits_in = 0  # the process that waits for saves when it exits; forked children inherit the number


def _install() -> None:
    """Once per process: makes other optimizers' steps and the exit wait for saves."""
    global _has_hook, _exits_in
    if not _has_hook:
        _has_hook = True
        register_optimizer_step_pre_hook(_before_step)
    if _exits_in != os.getpid():
        _exits_in = os.getpid()
        # Unlike atexit, a Finalize also runs in children of multiprocessing.
        multiprocessing.util.Finalize(None, in_flight.leave, exitpriority=100)


def _before_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    if not isinstance(optimizer, AdamW):
        in_flight.before_other_step()
