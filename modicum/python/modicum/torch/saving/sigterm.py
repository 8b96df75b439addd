"""SIGTERM during a save: held back as long as the rest of the save fits into the grace time.

    first write              SIGTERM                                committed      end of grace
    |--- bytes / time: rate -|--- 1.25 * rest / rate + 1 s ----------|              |
                             |------------------- grace ----------------------------|

Each rank repeatedly estimates how long the rest of its writes will take. The first rank that would
exceed its grace fails, and with it all ranks: the saved checkpoint does not
become visible. A rank that has written its part no longer estimates. In the background it then
waits for the votes of the others until the grace ends or a second SIGTERM arrives. After rank 0 has
begun to commit, no rank fails for this reason.

SIGTERM is held from the call on, before the ranks meet. A rank that has received it waits half of
its grace for the others to come, since they may have ended by SIGTERM before they called `save`.
"""

import os
import signal
import threading
import time
import traceback
from collections.abc import Callable
from types import FrameType

from modicum.errors import PreemptedError, from_json, refusal
from modicum.torch.ranks.documents import document_with

COMMIT_S = 1.0
"""Time for the commit: a handful of syncs of the record, COMMIT and directories."""
MARGIN = 1.25
"""Factor on the estimated time, since the rate of a disk varies."""
MEASURED_S = 2.0
"""How long a rank must have written before its rate counts, since its first pieces may be small. In
the second half of the grace the rate counts from the first piece on."""


def require_default_sigterm(argument: str) -> None:
    """Raises `UsageError`, which begins with `argument`, if the program has a handler of SIGTERM,
    or if this is not the main thread."""
    if threading.current_thread() is not threading.main_thread():
        raise refusal("USAGE", f"{argument}: only the main thread can hold SIGTERM")
    if signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        what = f"{argument}: the program handles SIGTERM itself, and its handler is not replaced"
        raise refusal("USAGE", what, expected="signal.SIG_DFL")


class Sigterm:
    """SIGTERM of this process during one save.

    Args:
        grace_s: seconds from SIGTERM to the kill; None: SIGTERM is not held.
    """

    def __init__(self, grace_s: float | None = None) -> None:
        self.grace_s = grace_s
        self._holds = self._writes = self._votes = self._is_over = False
        self._is_visible = False  # the checkpoint
        self._pid = os.getpid()
        self._arrived: list[float] = []
        self.on_arrival: Callable[[], object] = lambda: None
        """Called by the handler, on the main thread."""

    @property
    def has_arrived(self) -> bool:
        """Whether a SIGTERM has been held back."""
        return bool(self._arrived)

    @property
    def left_s(self) -> float:
        """Seconds until the kill, at least 0, after a SIGTERM has arrived."""
        assert self.grace_s is not None
        return max(self._arrived[0] + self.grace_s - time.monotonic(), 0.0)

    def hold(self) -> None:
        """From now on SIGTERM is only noted; may be called again. Raises `UsageError` if the grace
        is invalid, if the program has a handler, or if this is not the main thread."""
        if self.grace_s is None or self._holds:
            return
        is_number = isinstance(self.grace_s, (int, float)) and not isinstance(self.grace_s, bool)
        if not is_number or not self.grace_s > 0:
            expected = "seconds, more than 0, or None"
            raise refusal("USAGE", "grace", expected=expected, got=repr(self.grace_s))
        require_default_sigterm("grace")
        self._holds = True
        signal.signal(signal.SIGTERM, self._note)

    def leave(self, kind: object, error: BaseException | None, trace: object) -> None:
        """The end of a save, for `ExitStack.push`. SIGTERM acts again as before, and one that was
        held back is sent again, except after `PreemptedError`, which the program handles. May be
        called on any thread."""
        self._is_over = True
        self.restore()
        if self._arrived and (self._is_visible or not isinstance(error, PreemptedError)):
            if error is not None and not self._is_visible:
                traceback.print_exception(error)  # the process ends before its caller sees it
            os.kill(os.getpid(), signal.SIGTERM)

    def restore(self) -> None:
        """Removes the handler, which `leave` on another thread has left installed but without
        effect. Does nothing except on the main thread."""
        if self._holds and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            self._holds = False

    def while_waiting(self) -> None:
        """Called again and again while this rank waits for others. Raises PREEMPTED if they have
        not come within half of the grace. Does nothing once this rank writes; after `begin_vote`
        raises PREEMPTED if the grace is over, or after a second SIGTERM."""
        if not self._writes:
            self._check(float("inf"), is_measured=False)
        elif self._votes and self._arrived and (len(self._arrived) > 1 or self.left_s == 0.0):
            what = "a second SIGTERM" if len(self._arrived) > 1 else "SIGTERM"
            raise _preempted(what, COMMIT_S, self.left_s)

    def begin_vote(self) -> None:
        """This rank's part is written, in the background."""
        self._votes = True

    def end_vote(self) -> None:
        """The checkpoint is visible: SIGTERM no longer ends the save, but only the process after
        it."""
        self._votes, self._is_visible = False, True

    def during(self, own_bytes: int) -> Callable[[int], None]:
        """Begins to measure this rank's writes, `own_bytes` in total. Returns a function that takes
        the bytes written so far and raises PREEMPTED if the rest does not fit into the grace."""
        self._writes = True
        begin = time.monotonic()

        def check(written: int) -> None:
            passed_s = time.monotonic() - begin
            rest_s = _rest_s(own_bytes - written, written, passed_s)
            self._check(rest_s, is_measured=passed_s >= MEASURED_S)

        return check

    def _check(self, rest_s: float, *, is_measured: bool) -> None:
        if self.grace_s is None or not self._arrived:
            return
        left_s = self.left_s
        if len(self._arrived) > 1:
            raise _preempted("a second SIGTERM", rest_s, left_s)
        if (is_measured or left_s < self.grace_s / 2) and rest_s > left_s:
            raise _preempted("SIGTERM", rest_s, left_s)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self._is_over or os.getpid() != self._pid:  # over, or in a forked child
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            signal.raise_signal(signal.SIGTERM)
        self._arrived.append(time.monotonic())
        self.on_arrival()


def _rest_s(left_bytes: int, written: int, passed_s: float) -> float:
    """The estimated duration of the rest of the save; infinite before the first write."""
    if left_bytes <= 0:
        return COMMIT_S
    return COMMIT_S + MARGIN * left_bytes * passed_s / written if written else float("inf")


def _preempted(cause: str, rest_s: float, left_s: float) -> Exception:
    rest = "nothing is written yet" if rest_s == float("inf") else f"the rest takes {rest_s:.1f} s"
    what = f"{cause} ended the save ({rest}, the grace has {left_s:.1f} s left)"
    return from_json(document_with("PREEMPTED", what))
