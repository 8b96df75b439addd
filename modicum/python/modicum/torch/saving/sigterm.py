"""SIGTERM is noted instead of ending the process. During a save (`Sigterm`) it is held back as long
as the rest of the save fits into the grace time:

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

REPEAT_S = 1.0
"""SIGTERMs within this time after the first one count as it: a scheduler may signal torchrun and
its ranks, and torchrun then signals the ranks again; `timeout` sends two in a row."""


class SigtermHandler:
    """Notes SIGTERM of this process instead of ending it, from `install` to `end`."""

    def __init__(self) -> None:
        self.arrived: list[float] = []
        """The times of SIGTERMs, repetitions excepted."""
        self.on_arrival: Callable[[], object] = lambda: None
        """Called by the handler, on the main thread."""
        self._outer: SigtermHandler | None = None
        self._is_installed = self._is_over = False
        self._pid = os.getpid()

    def install(self, argument: str, *, inside: bool = False) -> None:
        """From now on SIGTERM is only noted.

        Args:
            argument: what installs it, with which the error begins.
            inside: whether `save_on_sigterm` may hold SIGTERM already. Its handler then gets the
                times, too, and acts again after `end`.

        Raises:
            UsageError: the program has a handler of SIGTERM, or this is not the main thread.
        """
        if threading.current_thread() is not threading.main_thread():
            raise refusal("USAGE", f"{argument}: only the main thread can hold SIGTERM")
        self._outer = _installed() if inside else None
        if self._outer is None and signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
            what = "the program handles SIGTERM itself, and its handler is not replaced"
            raise refusal("USAGE", f"{argument}: {what}", expected="signal.SIG_DFL")
        signal.signal(signal.SIGTERM, self.note)
        self._is_installed = True

    def end(self) -> None:
        """SIGTERM acts again as before. May be called on any thread, and repeatedly: elsewhere than
        on the main thread the handler stays installed, but without effect."""
        self._is_over = True
        if self._is_installed and threading.current_thread() is threading.main_thread():
            if _installed() is self:  # and no inner one
                self._hand_back()
            self._is_installed = False

    def note(self, number: int, frame: FrameType | None) -> None:
        """The handler."""
        if self._is_over or os.getpid() != self._pid:  # over, or in a forked child
            self._hand_back()
            signal.raise_signal(signal.SIGTERM)
            return
        now = time.monotonic()
        arrived = [self.arrived] if self.outer is None else [self.arrived, self.outer.arrived]
        if not any(times and now - times[0] < REPEAT_S for times in arrived):
            for times in arrived:
                times.append(now)
            self.on_arrival()

    @property
    def outer(self) -> "SigtermHandler | None":
        """The handler of `save_on_sigterm`, as long as it is not over."""
        return None if self._outer is None or self._outer._is_over else self._outer

    def _hand_back(self) -> None:
        signal.signal(signal.SIGTERM, self.outer.note if self.outer else signal.SIG_DFL)


def _installed() -> SigtermHandler | None:
    """The handler that gets SIGTERM now; None if it is of another kind."""
    handler = getattr(signal.getsignal(signal.SIGTERM), "__self__", None)
    return handler if isinstance(handler, SigtermHandler) else None


def is_held() -> bool:
    """Whether a handler has noted a SIGTERM and is not over."""
    handler = _installed()
    return handler is not None and bool(handler.arrived) and not handler._is_over


class Sigterm(SigtermHandler):
    """SIGTERM of this process during one save.

    Args:
        grace_s: seconds from SIGTERM to the kill; None: SIGTERM is not held.
    """

    def __init__(self, grace_s: float | None = None) -> None:
        super().__init__()
        self.grace_s = grace_s
        self._writes = self._votes = False
        self._is_visible = False  # the checkpoint

    @property
    def has_arrived(self) -> bool:
        """Whether a SIGTERM has been held back."""
        return bool(self.arrived)

    @property
    def left_s(self) -> float:
        """Seconds until the kill, at least 0, after a SIGTERM has arrived."""
        assert self.grace_s is not None
        return max(self.arrived[0] + self.grace_s - time.monotonic(), 0.0)

    def hold(self) -> None:
        """From now on SIGTERM is only noted; may be called again. Raises `UsageError` if the grace
        is invalid, if the program has a handler, or if this is not the main thread."""
        if self.grace_s is None or self._is_installed:
            return
        is_number = isinstance(self.grace_s, (int, float)) and not isinstance(self.grace_s, bool)
        if not is_number or not self.grace_s > 0:
            expected = "seconds, more than 0, or None"
            raise refusal("USAGE", "grace", expected=expected, got=repr(self.grace_s))
        self.install("grace", inside=True)

    def leave(self, kind: object, error: BaseException | None, trace: object) -> None:
        """The end of a save, for `ExitStack.push`. SIGTERM acts again as before, and one that was
        held back is sent again, except after `PreemptedError`, which the program handles, and
        except if `save_on_sigterm` answers it. May be called on any thread."""
        self.end()
        if self.outer is not None and len(self.outer.arrived) == 1:
            return
        if self.arrived and (self._is_visible or not isinstance(error, PreemptedError)):
            if error is not None and not self._is_visible:
                traceback.print_exception(error)  # the process ends before its caller sees it
            os.kill(os.getpid(), signal.SIGTERM)

    def while_waiting(self) -> None:
        """Called again and again while this rank waits for others. Raises PREEMPTED if they have
        not come within half of the grace. Does nothing once this rank writes; after `begin_vote`
        raises PREEMPTED if the grace is over, or after a second SIGTERM."""
        if not self._writes:
            self._check(float("inf"), is_measured=False)
        elif self._votes and self.arrived and (len(self.arrived) > 1 or self.left_s == 0.0):
            what = "a second SIGTERM" if len(self.arrived) > 1 else "SIGTERM"
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
        if self.grace_s is None or not self.arrived:
            return
        left_s = self.left_s
        if len(self.arrived) > 1:
            raise _preempted("a second SIGTERM", rest_s, left_s)
        if (is_measured or left_s < self.grace_s / 2) and rest_s > left_s:
            raise _preempted("SIGTERM", rest_s, left_s)


def _rest_s(left_bytes: int, written: int, passed_s: float) -> float:
    """The estimated duration of the rest of the save; infinite before the first write."""
    if left_bytes <= 0:
        return COMMIT_S
    return COMMIT_S + MARGIN * left_bytes * passed_s / written if written else float("inf")


def _preempted(cause: str, rest_s: float, left_s: float) -> Exception:
    rest = "nothing is written yet" if rest_s == float("inf") else f"the rest takes {rest_s:.1f} s"
    what = f"{cause} ended the save ({rest}, the grace has {left_s:.1f} s left)"
    return from_json(document_with("PREEMPTED", what))
