"""Records the memory of this process and its children by phase: samples and kernel peaks."""

import json
import os
import socket
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from modicum import _modicum
from modicum.errors import refusal
from modicum.memory import arguments
from modicum.memory.explaining import paragraph
from modicum.memory.nvml import Devices
from modicum.memory.processes import held_by, name_of, own_status

_CHILDREN_S = 0.1  # least time between scans for children, which read a file per process
# The share of a core that the samples of a process without children may use. Scans for children may
# use the same share in addition.
_SHARE = 0.01
# The share for the samples of a process with children, which take milliseconds.
_SHARE_OF_TREE = 0.04
_MOST_SAMPLES = 1 << 14  # that a recording keeps, 3 MiB; even


class Sample(NamedTuple):
    """Bytes held `at_s` seconds after the recording began."""

    at_s: float
    held: int
    """Bytes of this process: RssAnon + RssShmem + VmPTE. If it has children, Pss takes the place of
    Rss: shared pages are divided among the processes that map them."""
    children: int
    """Bytes of all its descendants."""
    devices: tuple[int, ...]
    """Bytes in use by any process, on each device that NVML reports."""


@dataclass
class Phase:
    """One phase of one process. Bytes are sums over this process and its children, without device
    memory, unless an attribute says otherwise. Seconds count from the begin of the process's
    recording: its first use of this module."""

    name: str
    depth: int = 0
    """The number of phases around this one."""
    begin_s: float = 0.0
    end_s: float = 0.0
    begin_bytes: int = 0
    end_bytes: int = 0
    peak_bytes: int = 0
    """The larger of `sampled_peak_bytes` and `kernel_peak_bytes`: the best value for the peak."""
    sampled_peak_bytes: int = 0
    """The peak of the samples. It misses higher peaks between two samples."""
    samples: int = 0
    """The number of samples after the one at the begin. The last one is taken at the end."""
    kernel_peak_bytes: int | None = None
    """The peak of this process alone, from its high-water mark (VmHWM). Misses no peak, but may be
    too high by mapped file pages. None if the kernel can't reset the mark and the phase did not
    raise it."""
    device_peak_bytes: list[int] = field(default_factory=list)
    """The most bytes in use on each device, over the samples."""
    holders_at_begin: dict[str, int] = field(default_factory=dict)
    """`begin_bytes` by holder: this process and each child; or, if there are no children, this
    process's kinds of memory."""
    holders_at_peak: dict[str, int] = field(default_factory=dict)
    """`sampled_peak_bytes` by holder, as in `holders_at_begin`."""
    peak_s: float = 0.0
    """The time of the sample with `sampled_peak_bytes`."""
    peak_phase: str = ""
    """The innermost phase that was open at `peak_s`; empty: this one."""

    def text(self, limit: int | str | None = None) -> str:
        """One paragraph: the holders of the memory at the peak, what has grown and, if the phase
        adds more than `limit`, which limit would suffice.

        Args:
            limit: the most bytes that the phase may add to those at its begin, such as "2 GiB".
        """
        return paragraph(self, None if limit is None else arguments.size(limit))


class _Recording:
    """All phases of one process. Thread-safe. A forked child starts its own recording."""

    def __init__(self) -> None:
        self.pid = os.getpid()
        self.began = time.time()
        self.phases: list[Phase] = []
        self.samples: list[Sample] = []
        self._width = 1  # samples of each group, of which the one with the most bytes is kept
        self._in_last = 0  # samples of the last group so far
        self._zero = time.monotonic()
        self._lock = threading.RLock()
        self._open: list[Phase] = []
        # The reports of the open phases to `modicum watch`, in the order of `_open`.
        self._reported: list[_modicum.ReportedPhase] = []
        self._devices: Devices | None = None
        self._children: dict[int, str] = {}  # names by pid
        self._holders: dict[str, int] = {}  # in the last sample
        self._next_scan_s = 0.0
        self._peak_rss = 0  # high-water mark at the last boundary
        self._is_reset = False
        self._stop = threading.Event()  # ends the thread
        self._thread: threading.Thread | None = None

    def enter(self, name: str, interval_s: float) -> Phase:
        with self._lock:
            if self._devices is None:
                self._devices = Devices()
            sample = self._boundary()
            if self._thread is None:
                self._thread = self._started(interval_s)
            reported = _modicum.ReportedPhase(name)
            # From here on nothing fails: a phase is listed everywhere or nowhere.
            begun = Phase(name, len(self._open), begin_s=sample.at_s)
            begun.begin_bytes = _total(sample)
            begun.holders_at_begin = self._holders
            self.phases.append(begun)
            self._open.append(begun)
            self._reported.append(reported)
            self._fold(begun, sample)
            return begun

    def leave(self, ended: Phase) -> None:
        thread = None
        try:
            with self._lock:
                try:
                    ended.end_s = self._now_s()  # also if the sample fails
                    sample = self._boundary()
                    ended.end_s = sample.at_s
                    ended.end_bytes = _total(sample)
                finally:
                    self._reported.pop(self._open.index(ended)).end()
                    self._open.remove(ended)
                    if not self._open:
                        thread, self._thread = self._thread, None
                        self._stop.set()
        finally:
            if thread is not None:
                thread.join()

    def _started(self, interval_s: float) -> threading.Thread:
        self._stop = threading.Event()
        passed = (interval_s, self._stop)
        thread = threading.Thread(
            target=self._sample, args=passed, name="modicum-memory", daemon=True
        )
        thread.start()
        return thread

    def _now_s(self) -> float:
        return time.monotonic() - self._zero

    def reset_peak(self) -> bool:
        """Adds the high-water mark to the peaks of open phases, then resets it."""
        with self._lock:
            if self._open:
                self._boundary()
                return self._is_reset
        return _modicum.reset_peak()

    def _boundary(self) -> Sample:
        """Takes a sample at the begin or end of a phase. Adds it, and the high-water mark since the
        last boundary, to the peaks of open phases."""
        self._scan_children()
        sample = self._take()
        status = own_status()
        # If the mark could not be reset at the last boundary, it is a peak of the time since then
        # only if it has risen.
        if self._is_reset or status.peak_rss > self._peak_rss:
            peak = sample.held + max(0, status.peak_rss - status.rss)
            for phase in self._open:
                phase.kernel_peak_bytes = max(phase.kernel_peak_bytes or 0, peak)
                phase.peak_bytes = max(phase.peak_bytes, peak)
        self._is_reset = _modicum.reset_peak()
        self._peak_rss = status.peak_rss
        self._note(sample)
        return sample

    def _scan_children(self) -> None:
        began = time.thread_time()
        pids = _modicum.descendants()
        self._children = {pid: self._children.get(pid) or name_of(pid) for pid in pids}
        pause_s = max(_CHILDREN_S, (time.thread_time() - began) / _SHARE)
        self._next_scan_s = time.monotonic() + pause_s

    def _take(self) -> Sample:
        at_s = self._now_s()
        devices = tuple(self._devices.used_bytes()) if self._devices is not None else ()
        if not self._children:
            status = own_status()
            self._holders = status.parts
            return Sample(at_s, status.held_bytes, 0, devices)
        own_bytes, children = _modicum.process_memory()["held_bytes"], held_by([*self._children])
        self._holders = {f"this process ({self.pid})": own_bytes}
        for (pid, name), size in zip(self._children.items(), children, strict=True):
            self._holders[f"child {pid} ({name})"] = size
        return Sample(at_s, own_bytes, sum(children), devices)

    def _note(self, sample: Sample) -> None:
        self._keep(sample)
        for phase in self._open:
            phase.samples += 1
            self._fold(phase, sample)

    def _keep(self, sample: Sample) -> None:
        """Adds a sample to `samples`. When they are full, keeps of each two neighbours the one with
        more bytes; from then on, of twice as many samples."""
        if 0 < self._in_last < self._width:
            self._in_last += 1
            self.samples[-1] = max(self.samples[-1], sample, key=_total)
            return
        if len(self.samples) == _MOST_SAMPLES:
            pairs = zip(self.samples[::2], self.samples[1::2], strict=True)
            self.samples = [max(pair, key=_total) for pair in pairs]
            self._width *= 2
        self.samples.append(sample)
        self._in_last = 1

    def _fold(self, phase: Phase, sample: Sample) -> None:
        """Adds a sample to a phase's peaks."""
        total = _total(sample)
        if total > phase.sampled_peak_bytes:
            phase.sampled_peak_bytes = total
            phase.holders_at_peak = self._holders
            phase.peak_s = sample.at_s
            innermost = self._open[-1]
            phase.peak_phase = "" if innermost is phase else innermost.name
        phase.peak_bytes = max(phase.peak_bytes, total)
        known = phase.device_peak_bytes or [0] * len(sample.devices)
        phase.device_peak_bytes = list(map(max, known, sample.devices))

    def _sample(self, interval_s: float, stop: threading.Event) -> None:
        pause_s = interval_s
        while not stop.wait(pause_s):
            with self._lock:
                began = time.thread_time()
                try:
                    if self._open and time.monotonic() >= self._next_scan_s:
                        self._scan_children()
                        began = time.thread_time()  # scans have a share of their own
                    if self._open:
                        self._note(self._take())
                except OSError:  # no free file descriptor, for example: the next sample may succeed
                    pass
            share = _SHARE_OF_TREE if self._children else _SHARE
            pause_s = max(interval_s, (time.thread_time() - began) / share)


def _total(sample: Sample) -> int:
    return sample.held + sample.children


_recordings: list[_Recording] = []


def _recording() -> _Recording:
    """The recording of this process; replaces one that a fork has inherited."""
    if not _recordings or _recordings[0].pid != os.getpid():
        _recordings[:] = [_Recording()]
    return _recordings[0]


@contextmanager
def recorded_phase(name: str, interval_s: float) -> Iterator[Phase]:
    """The context of `phase`."""
    arguments.text("the name of a phase", name)
    arguments.number("interval_s", interval_s, arguments.MOST_SECONDS)
    recording = _recording()
    begun = recording.enter(name, interval_s)
    try:
        yield begun
    finally:
        if recording.pid == os.getpid():  # a child that was forked in the block has no phase to end
            recording.leave(begun)


def phases() -> list[Phase]:
    """The phases of this process so far, in the order in which they began; open ones still change.
    May be called on any thread."""
    return list(_recording().phases)


def reset_peak() -> bool:
    """Resets the kernel's high-water mark (VmHWM) of this process, after its value was added to the
    peaks of open phases. Returns False if the kernel refuses."""
    return _recording().reset_peak()


def recorded(label: str = "", lines: Mapping[str, int] | None = None) -> list[dict[str, Any]]:
    """The lines that `write` writes, as dicts: the process, its phases, its samples, and the
    horizontal lines of its chart."""
    recording = _recording()
    process = {
        "label": arguments.text("the label", label),
        "rank": _rank(),
        "pid": recording.pid,
        "host": socket.gethostname(),
        "began": recording.began,
        "version": _modicum.version(),
    }
    records: list[dict[str, Any]] = [{"process": process}]
    records += [{"phase": asdict(phase)} for phase in recording.phases]
    records += [{"sample": sample._asdict()} for sample in recording.samples]
    records += [{"line": _line(name, size)} for name, size in (lines or {}).items()]
    return records


def _line(name: str, size: float) -> dict[str, Any]:
    arguments.text("the name of a line", name)
    arguments.number(f"the line '{name}'", size, arguments.MOST_BYTES)
    return {"name": name, "bytes": int(size)}


def _rank() -> int:
    text = os.environ.get("RANK") or "0"
    try:
        return int(text)
    except ValueError as error:
        what = "the environment's RANK is not a number"
        raise refusal("USAGE", what, expected="a rank, such as 0", got=ascii(text)) from error


def write(
    path: str | os.PathLike[str], *, label: str = "", lines: Mapping[str, int] | None = None
) -> Path:
    """Writes this process's phases and samples as JSON lines, for `draw`.

    Args:
        path: the file, which is overwritten; "{rank}" in it is replaced by this process's RANK (0
            if unset or empty), so that each rank writes its own file.
        label: the label of the run; `draw` makes a chart for each label.
        lines: numbers of bytes by name, such as {"promise": ...} or {"budget": ...}, which `draw`
            sums over the processes of the run and draws as horizontal lines in its chart.

    Returns:
        The path that was written.

    Raises:
        UsageError: the label or a line's name is not a str or not UTF-8, a line is not a number of
            bytes, or RANK is not a number.
        OSError: the file can't be written.
    """
    target = Path(os.fspath(path).replace("{rank}", str(_rank())))
    written = [json.dumps(line, separators=(",", ":")) for line in recorded(label, lines)]
    target.write_text("\n".join(written) + "\n", "utf-8")
    return target
