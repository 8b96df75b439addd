"""Clocks for time limits on a busy machine."""

import threading
import time
from bisect import bisect
from collections.abc import Callable

WAIT_S = 0.1
PAUSE_S = 0.0005
TRIES = 20


class WaitingClock:
    """Counts waits of 0.1 s, one after the other, in a thread of this process.

    The ranks' time limits consist of waits and a little work. A busy machine makes waits and work
    longer, in the ranks and in this thread. So this clock slows down as the ranks do. On an idle
    machine it agrees with `time.monotonic`.
    """

    def __init__(self) -> None:
        self._ends_s: list[float] = []
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._count, daemon=True)

    def __enter__(self) -> "WaitingClock":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def seconds(self, begin_s: float, end_s: float | None = None) -> float:
        """The seconds between two times of `time.monotonic()`; by default until now."""
        end_s = time.monotonic() if end_s is None else end_s
        return WAIT_S * (bisect(self._ends_s, end_s) - bisect(self._ends_s, begin_s))

    def _count(self) -> None:
        while not self._ended.wait(WAIT_S):
            self._ends_s.append(time.monotonic())


def lets_others_run(
    call: Callable[[], object], before: Callable[[], object] = lambda: None
) -> bool:
    """Whether another thread runs during `call`, in at least one of several tries. On a busy
    machine the thread may get no time during a short call. During a call that keeps the GIL it
    never gets any. Each try begins with `before`."""
    ticks_s: list[float] = []
    ended = threading.Event()

    def tick() -> None:
        while not ended.wait(PAUSE_S):
            ticks_s.append(time.monotonic())

    thread = threading.Thread(target=tick)
    thread.start()
    try:
        return any(_ticks_within(ticks_s, call, before) for _ in range(TRIES))
    finally:
        ended.set()
        thread.join()


def _ticks_within(
    ticks_s: list[float], call: Callable[[], object], before: Callable[[], object]
) -> bool:
    before()
    begin_s = time.monotonic()
    call()
    took_s = time.monotonic() - begin_s
    # At either end the interpreter may switch threads anyway.
    first_s, last_s = begin_s + 0.1 * took_s, begin_s + 0.5 * took_s
    return any(first_s < tick_s < last_s for tick_s in ticks_s)
