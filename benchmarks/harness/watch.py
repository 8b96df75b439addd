"""Measures memory and reads of a group of processes while it runs, from the kernel's counters.

Memory has two figures. One is sampled: the sum of anonymous memory, shared memory and page tables
over the processes; it misses a peak between two samples. The other is the peak of their memory
cgroup, which misses none, but includes the page cache that the processes fill. If no cgroup can be
made, the sum of the processes' high-water marks replaces it. This sum is an upper bound, since it
includes files that are mapped later, and since processes may peak at different times.
"""

import contextlib
import ctypes
import mmap
import os
import re
import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import TracebackType

from harness.page import ROOT

sys.path.append(str(ROOT / "tests/support"))
from cage import Cage, cage, drop_page_cache, set_limit, why_no_cage

PAGE = mmap.PAGESIZE
TICKS = os.sysconf("SC_CLK_TCK")
REPORTS = Path("/sys/module/page_reporting/parameters/passes")
REPORTED_EVERY_S = 2.2  # the kernel reports free blocks every two seconds
STATUS = re.compile(rb"^(RssAnon|RssFile|RssShmem|VmPTE|VmHWM):\s+(\d+) kB", re.M)


def available_bytes() -> int:
    """MemAvailable of the node."""
    text = Path("/proc/meminfo").read_text()
    return int(re.search(r"MemAvailable:\s+(\d+) kB", text)[1]) << 10


def cached_bytes(directory: Path) -> int:
    """Bytes of a checkpoint in the page cache."""
    mincore = ctypes.CDLL(None, use_errno=True).mincore
    total = 0
    for path in directory.glob("*.safetensors"):
        size = path.stat().st_size
        with path.open("rb") as file, mmap.mmap(file.fileno(), size, mmap.MAP_PRIVATE) as mapped:
            pages = (ctypes.c_ubyte * -(-size // PAGE))()
            view = (ctypes.c_char * size).from_buffer(mapped)
            if mincore(ctypes.byref(view), ctypes.c_size_t(size), pages) != 0:
                raise OSError(ctypes.get_errno(), f"mincore of {path}")
            del view
            total += sum(page & 1 for page in pages) * PAGE
    return total


def drop(directory: Path) -> None:
    """Drops a directory's files from the page cache, so that they are read from storage."""
    drop_page_cache(directory)


class Ballast:
    """Holds memory until just before a run, in pages of the size that the run will allocate.

    A virtual machine returns unused blocks to its host. The next process that touches them waits
    for the host, up to a second for 64 MiB, which must not count as a loader's time.
    """

    def __init__(self) -> None:
        self._memory: mmap.mmap | None = None

    @property
    def held_bytes(self) -> int:
        return len(self._memory) if self._memory else 0

    def take(self, size: int, huge_pages: bool) -> None:
        """Allocates `size` bytes and touches all pages; fast if memory was freed just before."""
        self.release()
        self._memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self._memory.madvise(mmap.MADV_HUGEPAGE if huge_pages else mmap.MADV_NOHUGEPAGE)
        for at in range(0, size, mmap.PAGESIZE):
            self._memory[at] = 1

    def release(self) -> None:
        if self._memory:
            self._memory.close()
        self._memory = None


def await_report() -> None:
    """Waits until the kernel has reported its free blocks to the host, at most REPORTED_EVERY_S
    seconds, since it may have none to report. Returns at once if the kernel lacks the counter."""
    begin, passes = time.monotonic(), None
    while REPORTS.exists() and time.monotonic() - begin < REPORTED_EVERY_S:
        now = REPORTS.read_text()
        if now != (passes or now):  # the first reading is only compared with later ones
            return
        passes = now
        time.sleep(0.005)


def busy_seconds() -> float:
    """CPU time of the whole machine so far."""
    fields = [int(word) for word in Path("/proc/stat").read_text().split()[1:9]]
    return (sum(fields) - fields[3] - fields[4]) / TICKS


def cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS


def io_of(pid: int) -> dict[str, int]:
    """The counters of /proc/PID/io: rchar is bytes of read() calls, read_bytes bytes from
    storage."""
    lines = Path(f"/proc/{pid}/io").read_text().splitlines()
    return {name: int(count) for name, count in (line.split(": ") for line in lines)}


class Process:
    """The memory of one process; its file in /proc is kept open, so that sampling is cheap."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._status = os.open(f"/proc/{pid}/status", os.O_RDONLY)

    def status(self) -> dict[str, int]:
        """Bytes by field of /proc/PID/status; empty after the process has exited."""
        try:
            text = os.pread(self._status, 8192, 0)
        except ProcessLookupError:
            return {}
        return {name.decode(): int(kib) << 10 for name, kib in STATUS.findall(text)}

    def reset_high_water(self) -> None:
        Path(f"/proc/{self.pid}/clear_refs").write_text("5")

    def close(self) -> None:
        os.close(self._status)


def held(status: dict[str, int]) -> int:
    """Memory that can't be reclaimed: anonymous and shared memory, and page tables."""
    return sum(status.get(name, 0) for name in ("RssAnon", "RssShmem", "VmPTE"))


class Group:
    """The memory cgroup of a run's processes."""

    def __init__(self, cage: Cage) -> None:
        self._cage = cage
        self._v1 = cage.version == 1

    def _read(self, v1: str, v2: str) -> str:
        return (self._cage.directory / (v1 if self._v1 else v2)).read_text()

    def usage(self) -> int:
        return int(self._read("memory.usage_in_bytes", "memory.current"))

    def cache(self) -> int:
        """Page cache that is charged to the cgroup."""
        pattern = r"^total_cache (\d+)" if self._v1 else r"^file (\d+)"
        return int(re.search(pattern, self._read("memory.stat", "memory.stat"), re.M)[1])

    def shared(self) -> int:
        """Shared memory, which `cache` includes."""
        pattern = r"^total_shmem (\d+)" if self._v1 else r"^shmem (\d+)"
        return int(re.search(pattern, self._read("memory.stat", "memory.stat"), re.M)[1])

    def cage_in(self, more_bytes: int) -> int:
        """Limits the cgroup to the memory that it holds now, without page cache, plus `more_bytes`.
        Returns the limit."""
        limit = self.usage() - (self.cache() - self.shared()) + more_bytes
        set_limit(self._cage.directory, self._cage.version, limit)
        return limit

    def reset_peak(self) -> None:
        # With cgroup v2 the peak counts from the ranks' start, whose peak is lower than a load's.
        if self._v1:
            (self._cage.directory / "memory.max_usage_in_bytes").write_text("0")

    def peak(self) -> int:
        return self._cage.peak_bytes()

    def was_out_of_memory(self) -> bool:
        return self._cage.oom_kills() > 0


def require_group(group: Group | None) -> Group:
    """Returns the group. Raises `SystemExit` if it is None."""
    if group is None:
        raise SystemExit(f"the run needs a memory cgroup: {why_no_cage()}")
    return group


@contextlib.contextmanager
def group_within(limit_bytes: int) -> Iterator[tuple[Group | None, str]]:
    """Yields a cgroup with this limit and the path of its file that adds a process; (None, "") if
    no cgroup can be made."""
    if why_no_cage():
        yield None, ""
        return
    with cage(limit_bytes) as made:
        yield Group(made), str(made.directory / "cgroup.procs")


class Watch:
    """Measures processes from its construction to `end`; `sample` must be called often between."""

    def __init__(self, pids: Iterable[int], group: Group | None) -> None:
        self._processes = [Process(pid) for pid in pids]
        self._group = group
        self._samples = 0
        for process in self._processes:
            process.reset_high_water()
        if group:
            group.reset_peak()
        self._first = [process.status() for process in self._processes]
        self._usage = group.usage() if group else 0
        self._io = [io_of(process.pid) for process in self._processes]
        self._began = time.monotonic()
        self._busy = busy_seconds()
        self._cpu = self._cpu_seconds()
        self._peak_bytes = 0
        self._peak_rank_bytes = 0

    def __enter__(self) -> "Watch":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for process in self._processes:
            process.close()

    def _cpu_seconds(self) -> float:
        return sum(cpu_seconds(pid) for pid in [*(p.pid for p in self._processes), os.getpid()])

    def _grown(self) -> list[int]:
        now = (held(process.status()) for process in self._processes)
        return [held_now - held(first) for held_now, first in zip(now, self._first, strict=True)]

    def sample(self) -> None:
        grown = self._grown()
        self._samples += 1
        self._peak_bytes = max(self._peak_bytes, sum(grown))
        self._peak_rank_bytes = max(self._peak_rank_bytes, *grown)

    def end(self) -> dict[str, float]:
        """The measurements, in bytes above the start. The processes must still exist."""
        self.sample()
        last = [process.status() for process in self._processes]
        io = [io_of(process.pid) for process in self._processes]
        seen = {
            "samples": self._samples,
            "peak_sampled_bytes": self._peak_bytes,
            "peak_rank_bytes": self._peak_rank_bytes,
            "kept_bytes": sum(self._grown()),
            # An upper bound: pages of files that were mapped after the start are not subtracted.
            "peak_high_water_bytes": sum(
                now["VmHWM"] - first["RssFile"] - first["RssAnon"] - first["RssShmem"]
                for now, first in zip(last, self._first, strict=True)
            ),
            "baseline_bytes": sum(map(held, self._first)),
            "watched_s": time.monotonic() - self._began,
            "foreign_cpu_s": busy_seconds() - self._busy - self._cpu_seconds() + self._cpu,
        }
        for name in ("rchar", "read_bytes"):
            seen[name] = sum(b[name] - a[name] for a, b in zip(self._io, io, strict=True))
        if self._group:
            seen["peak_group_bytes"] = self._group.peak() - self._usage
            seen["group_cache_bytes"] = self._group.cache()
        return seen
