"""`attribute`: whom memory belongs to, now or at its peak over time, including memory of children
that have ended since."""

import threading
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, overload

from modicum import _modicum
from modicum.errors import counted
from modicum.memory import arguments
from modicum.memory.attribution import Attribution, Owner, attributed, places_of

_CORE_SHARE = 0.04  # the largest part of a core that sampling may use
_WAIT_S = 0.05  # for the main thread to pause, before the last places of the tensors count
_PAUSE_S = 10.0  # the longest pause, should a source wait for a lock of the main thread


class Peaks:
    """The largest values of several attributions (results of `attribute`). Thread-safe."""

    def __init__(self, sources: tuple[Any, ...], params: int | None, baseline: int) -> None:
        self._sources, self._params, self._baseline = sources, params, baseline
        self._lock = threading.Lock()
        self._owners: dict[str, Owner] = {}
        self.samples = 0
        """The number of attributions so far."""
        self.copied_bytes = 0
        """The largest sum of all owners' copied bytes."""
        self.largest = self.sample()
        """The attribution with the most total bytes."""

    def sample(self) -> Attribution:
        """Makes and returns an attribution now, for example before the workers of an epoch end. To
        be called on the thread that trains.

        Raises:
            IoError, UsageError: as for `attribute`.
        """
        self._look_up()
        return self._measure()

    def _look_up(self) -> None:
        self._places = places_of(self._sources)

    def _measure(self) -> Attribution:
        got = attributed(self._places, self._params, self._baseline)
        with self._lock:
            for owner in got.owners:
                known = self._owners.get(owner.name, owner)
                self._owners[owner.name] = Owner(
                    owner.name,
                    max(known.held_bytes, owner.held_bytes),
                    max(known.copied_bytes, owner.copied_bytes),
                )
            self.copied_bytes = max(self.copied_bytes, got.copied_bytes)
            if self.samples == 0 or got.total_bytes > self.largest.total_bytes:
                self.largest = got
            self.samples += 1
        return got

    @property
    def owners(self) -> tuple[Owner, ...]:
        """A tuple with an `Owner` for each owner: the most bytes that it held, and the most of them
        that were copied, possibly at different times."""
        return tuple(self._owners.values())

    def __getitem__(self, name: str) -> Owner:
        """The owner of this name; an owner of 0 bytes if there is none."""
        return self._owners.get(name, Owner(name, 0))

    @property
    def document(self) -> dict[str, Any]:
        """A dict for JSON, in bytes: samples, owners, copied_bytes, and largest, the document of
        the attribution with the most bytes."""
        return {
            "samples": self.samples,
            "owners": [vars(owner) for owner in self.owners],
            "copied_bytes": self.copied_bytes,
            "largest": self.largest.document,
        }

    def text(self) -> str:
        """The table of the attribution with the most bytes, then the peak of each owner in MiB;
        their peaks are not simultaneous, so only the copies have a sum, the largest one."""
        lines = [self.largest.text(), "", f"peaks of {counted(self.samples, 'sample')}, in MiB"]
        lines.append(f"{'':24}{'held':>11}{'copied by forks':>21}")
        for owner in self.owners:
            held_mib, copied_mib = owner.held_bytes / (1 << 20), owner.copied_bytes / (1 << 20)
            lines.append(f"{owner.name:24}{held_mib:>11.1f}{copied_mib:>21.1f}")
        lines.append(f"{'together':24}{'':>11}{self.copied_bytes / (1 << 20):>21.1f}")
        return "\n".join(lines)

    __str__ = text


@overload
def attribute(*sources: Any, params: int | None = None, baseline: int = 0) -> Attribution: ...
@overload
def attribute(
    *sources: Any, params: int | None = None, baseline: int = 0, interval_s: float
) -> AbstractContextManager[Peaks]: ...
def attribute(
    *sources: Any, params: int | None = None, baseline: int = 0, interval_s: float | None = None
) -> Attribution | AbstractContextManager[Peaks]:
    """Attributes the memory of this process and its children to owners, including memory of other
    libraries. Memory without an owner is part of the baseline, or unexplained.

        before = modicum.memory.held()
        engine, *_ = deepspeed.initialize(...)
        ...
        print(modicum.memory.attribute(engine, baseline=before))

        with modicum.memory.attribute(engine, baseline=before, interval_s=0.1) as peaks:
            train()
        print(peaks["moments"].copied_bytes, peaks)

    Looks up the pages of the sources' tensors in every process of the tree (/proc/PID/pagemap,
    without privileges). If one process writes to a page after a fork, the page exists twice, and
    the version in the other process (a data loader's worker, for example) counts as a copy. RSS
    does not distinguish copies from shared pages. Several copies of a page, made by forks at
    different times, are distinguished only with CAP_SYS_ADMIN (by page frame numbers); otherwise
    they count once. Takes about 0.1 s per GiB. Needs Linux 4.2 or later.

    Call it on the thread that trains: no other may change the tensors meanwhile.

    Args:
        sources: DeepSpeed engines or ZeRO optimizers (without NVMe; tested with 0.19.8), optimizers
            or modules of torch or Modicum, tensors, mappings of owners to tensors, or a
            `modicum.Ledger` in place of the tensors charged to it. With DeepSpeed's CPU accelerator
            weights and gradients of the device are host memory, too; their owners are "weights" and
            "device gradients".
        params: the divisor of bytes per parameter; None: the number of elements of the master, or
            of the weights if there is no master. If there are none, the text has bytes only.
        baseline: bytes that were held before the sources existed, from `held()`.
        interval_s: makes the result a context that attributes again and again, with at least so
            many seconds between two samples, and keeps the peak of each owner, including the copies
            of workers that have ended since. Its thread uses at most 4 % of a core: it pauses at
            least 25 times as long as a sample takes, and can miss a shorter peak (of Modicum's own
            memory `Ledger.at_peak` misses none). `Peaks.sample()` takes a sample at once; the last
            one is taken at the end of the block, unless the block raises. The main thread is
            paused while the tensors are looked up; while it is in a backward, their last places are
            used.

    Returns:
        An `Attribution`; with `interval_s` a context that yields a `Peaks` with a first sample.

    Raises:
        UsageError: a source is of an unknown kind, an engine lacks an expected attribute, or
            `params`, `baseline` or `interval_s` is not a number from 0.
        IoError: /proc can't be read.
    """
    if interval_s is None:
        return attributed(places_of(sources), params, baseline)
    return _peaks(sources, params, baseline, interval_s)


@contextmanager
def _peaks(
    sources: tuple[Any, ...], params: int | None, baseline: int, interval_s: float
) -> Iterator[Peaks]:
    arguments.number("interval_s", interval_s, arguments.MOST_SECONDS)
    kept = Peaks(sources, params, baseline)
    sampling = _Sampling(kept, interval_s)
    sampling.start()
    try:
        yield kept
    finally:
        sampling.stop()
    if sampling.failure is not None:
        raise sampling.failure
    kept.sample()


class _Sampling:
    """A thread that samples. It looks up the tensors while the main thread is paused: a backward
    replaces gradients without the GIL. If another thread has entered the context, the tensors are
    those of its own samples."""

    def __init__(self, kept: Peaks, interval_s: float) -> None:
        self.failure: Exception | None = None
        self._kept, self._interval_s = kept, interval_s
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="modicum-peaks", daemon=True)
        is_main = threading.current_thread() is threading.main_thread()
        self._main_thread = _modicum.MainThreadPause(_PAUSE_S) if is_main else None

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        pause_s = self._interval_s
        while not self._stop.wait(pause_s):
            begin = time.thread_time()
            try:
                self._look_up()
                self._kept._measure()
            except Exception as error:  # raised at the end of the block
                self.failure = error
                return
            pause_s = max(self._interval_s, (time.thread_time() - begin) / _CORE_SHARE)

    def _look_up(self) -> None:
        if self._main_thread is None or not self._main_thread.begin(_WAIT_S):
            return
        try:
            self._kept._look_up()
        except RuntimeError:  # a third thread has changed a dict: the last places are used
            pass
        finally:
            self._main_thread.end()
