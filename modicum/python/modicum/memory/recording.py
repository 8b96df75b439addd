"""What this process and its children held, by phase: samples, and the kernel's own peaks."""

import json
import os
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from modicum import _modicum
from modicum.memory.nvml import Devices
from modicum.memory.processes import held_by_tree, status_of

_CHILDREN_S = 0.1  # between two looks for new children, which read a file per process, at least
_SHARE = 0.01  # of a core, for samples; and as much for the looks
_SHARE_OF_TREE = 0.04  # for samples of several processes, each of which takes milliseconds


class Sample(NamedTuple):
    """Bytes at one time, in seconds since the recording began."""

    at_s: float
    held: int
    """By this process: RssAnon + RssShmem + VmPTE; Pss in place of Rss where it has children."""
    children: int
    """By its descendants together."""
    devices: tuple[int, ...]
    """By anyone, on each device that NVML shows."""


@dataclass
class Phase:
    """One phase of one process. Bytes are of this process and its children together, device
    memory apart; seconds are since the recording began, which is when the first phase did."""

    name: str
    depth: int = 0
    """0: not within another phase."""
    begin_s: float = 0.0
    end_s: float = 0.0
    begin_bytes: int = 0
    end_bytes: int = 0
    peak_bytes: int = 0
    """The larger of the two that follow: the figure to quote."""
    sampled_peak_bytes: int = 0
    """Of the samples. Never too high; misses what is held for less than their distance."""
    kernel_peak_bytes: int | None = None
    """Of this process alone, from its high-water mark: misses nothing, and file pages that came
    and went can only add. None where the kernel does not let the mark start anew."""
    device_peak_bytes: list[int] = field(default_factory=list)
    """By device, sampled."""


class _Recording:
    """All phases of one process. Several threads may record; a forked child starts its own."""

    def __init__(self) -> None:
        self.pid = os.getpid()
        self.began = time.time()
        self.phases: list[Phase] = []
        self.samples: list[Sample] = []
        self._zero = time.monotonic()
        self._lock = threading.RLock()
        self._open: list[Phase] = []
        self._devices: Devices | None = None
        self._children: list[int] = []
        self._look_at_s = 0.0  # the next time
        self._peak_rss = 0  # when the mark was last looked at
        self._is_reset = False
        self._stop = threading.Event()  # of the thread
        self._thread: threading.Thread | None = None

    def enter(self, name: str, interval_s: float) -> Phase:
        with self._lock:
            if self._devices is None:
                self._devices = Devices()
            sample = self._boundary()
            begun = Phase(name, len(self._open), begin_s=sample.at_s)
            begun.begin_bytes = sample.held + sample.children
            self.phases.append(begun)
            self._open.append(begun)
            _fold(begun, sample)
            if self._thread is None:
                self._stop = threading.Event()
                self._thread = threading.Thread(
                    target=self._sample,
                    args=(interval_s, self._stop),
                    name="modicum-memory",
                    daemon=True,
                )
                self._thread.start()
            return begun

    def leave(self, ended: Phase) -> None:
        with self._lock:
            sample = self._boundary()
            ended.end_s = sample.at_s
            ended.end_bytes = sample.held + sample.children
            self._open.remove(ended)
            thread = None if self._open else self._thread
            if thread is not None:
                self._thread = None
                self._stop.set()
        if thread is not None:
            thread.join()

    def reset_peak(self) -> bool:
        """Folds the mark into the open phases, then starts it anew."""
        with self._lock:
            if self._open:
                self._boundary()
                return self._is_reset
        return _modicum.reset_peak()

    def _boundary(self) -> Sample:
        """A sample, and the high-water mark since the last boundary, for all that are open."""
        self._look_for_children()
        sample = self._take()
        own = status_of()
        # Unless it started anew the mark says something only if it has moved.
        if self._is_reset or own.peak_rss > self._peak_rss:
            peak = sample.held + max(0, own.peak_rss - own.rss)
            for phase in self._open:
                phase.kernel_peak_bytes = max(phase.kernel_peak_bytes or 0, peak)
                phase.peak_bytes = max(phase.peak_bytes, peak)
        self._is_reset = _modicum.reset_peak()
        self._peak_rss = own.peak_rss
        self._note(sample)
        return sample

    def _look_for_children(self) -> None:
        began = time.thread_time()
        self._children = _modicum.descendants()
        pause_s = max(_CHILDREN_S, (time.thread_time() - began) / _SHARE)
        self._look_at_s = time.monotonic() + pause_s

    def _take(self) -> Sample:
        at_s = time.monotonic() - self._zero
        devices = tuple(self._devices.used_bytes()) if self._devices is not None else ()
        if not self._children:
            return Sample(at_s, status_of().held, 0, devices)
        own, *children = held_by_tree([self.pid, *self._children])
        return Sample(at_s, own, sum(children), devices)

    def _note(self, sample: Sample) -> None:
        self.samples.append(sample)
        for phase in self._open:
            _fold(phase, sample)

    def _sample(self, interval_s: float, stop: threading.Event) -> None:
        pause_s = interval_s
        while not stop.wait(pause_s):
            with self._lock:
                if self._open and time.monotonic() >= self._look_at_s:
                    self._look_for_children()
                began = time.thread_time()
                if self._open:
                    self._note(self._take())
            share = _SHARE_OF_TREE if self._children else _SHARE
            pause_s = max(interval_s, (time.thread_time() - began) / share)


def _fold(phase: Phase, sample: Sample) -> None:
    """Takes a sample into a phase's peaks."""
    total = sample.held + sample.children
    phase.sampled_peak_bytes = max(phase.sampled_peak_bytes, total)
    phase.peak_bytes = max(phase.peak_bytes, total)
    known = phase.device_peak_bytes or [0] * len(sample.devices)
    phase.device_peak_bytes = list(map(max, known, sample.devices))


_recordings: list[_Recording] = []


def _recording() -> _Recording:
    """Of this process: what a fork brought along is the parent's."""
    if not _recordings or _recordings[0].pid != os.getpid():
        _recordings[:] = [_Recording()]
    return _recordings[0]


@contextmanager
def phase(name: str, *, interval_s: float = 0.01) -> Iterator[Phase]:
    """Samples the memory of this process and its children while the block runs.

        with modicum.memory.phase("wrap") as wrap:
            fully_shard(model)
        print(wrap.peak_bytes)

    Phases may lie within each other, and nothing else of Modicum is needed. A sample reads one
    file of /proc: 0.1 ms, or where there are children, whose shared pages have to be looked at,
    up to 50 ms per GiB. A thread takes them, and takes fewer rather than more than 2 % of a core
    (5 % while there are children). Where the block does not let other threads run, the kernel's
    own mark still knows the peak. Works on Linux.

    Args:
        name: what it is called in tables and pictures.
        interval_s: seconds between samples, at least; of the outermost phase.

    Yields:
        The `Phase`, complete when the block has ended, also by an exception.
    """
    recording = _recording()
    begun = recording.enter(name, interval_s)
    try:
        yield begun
    finally:
        if recording.pid == os.getpid():
            recording.leave(begun)


def phases() -> list[Phase]:
    """Of this process so far, in the order in which they began."""
    return list(_recording().phases)


def reset_peak() -> bool:
    """Starts the kernel's high-water mark anew without taking it from phases that are open. False
    where the kernel won't."""
    return _recording().reset_peak()


def recorded(label: str = "") -> list[dict[str, Any]]:
    """What `save` writes, a dict for each line: the process, its phases, its samples."""
    recording = _recording()
    process = {
        "label": label,
        "rank": int(os.environ.get("RANK", "0")),
        "pid": recording.pid,
        "host": socket.gethostname(),
        "began": recording.began,
        "version": _modicum.version(),
    }
    lines: list[dict[str, Any]] = [{"process": process}]
    lines += [{"phase": asdict(one)} for one in recording.phases]
    lines += [{"sample": one._asdict()} for one in recording.samples]
    return lines


def save(path: str | os.PathLike[str], *, label: str = "") -> Path:
    """Writes this process's phases and samples as JSON lines, for `draw`.

    Args:
        path: of the file, which is replaced; "{rank}" in it becomes this process's RANK (0 where
            no launcher has set it), so that each rank writes its own.
        label: of the run; runs with different labels get a panel each in one picture.

    Returns:
        The path that was written.
    """
    target = Path(str(path).replace("{rank}", os.environ.get("RANK", "0")))
    lines = [json.dumps(line, separators=(",", ":")) for line in recorded(label)]
    target.write_text("\n".join(lines) + "\n")
    return target
