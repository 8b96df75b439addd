"""A memory cgroup, v1 or v2, that limits the processes started in it."""

import contextlib
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

# Enters the cgroup before exec, so that none of our memory is counted in it.
ENTER = 'echo $$ > "$0" && exec "$@"'


@dataclass(frozen=True)
class Cage:
    """A memory cgroup with a limit."""

    directory: Path
    version: int

    def start(self, *words: object, **options) -> subprocess.Popen[str]:
        """Starts a program in the cgroup. On return the process is in the cgroup or has ended."""
        arguments = [str(word) for word in words]
        procs = self.directory / "cgroup.procs"
        started = subprocess.Popen(
            ["/bin/sh", "-c", ENTER, str(procs), *arguments],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **options,
        )  # fmt: skip
        while started.poll() is None and str(started.pid) not in procs.read_text().split():
            time.sleep(0.001)
        return started

    def peak_bytes(self) -> int:
        """The peak of the memory charged to the cgroup, page cache included."""
        name = "memory.max_usage_in_bytes" if self.version == 1 else "memory.peak"
        return int((self.directory / name).read_text())

    def file_bytes(self) -> int:
        """The page cache charged to the cgroup, which the kernel reclaims at the limit; without
        shared memory."""
        lists = ("inactive_file", "active_file")
        names = {f"total_{of}" if self.version == 1 else of for of in lists}
        lines = (self.directory / "memory.stat").read_text().splitlines()
        return sum(int(line.split()[1]) for line in lines if line.split()[0] in names)

    def oom_kills(self) -> int:
        """The number of OOM kills in the cgroup."""
        name = "memory.oom_control" if self.version == 1 else "memory.events"
        for line in (self.directory / name).read_text().splitlines():
            word, _, count = line.partition(" ")
            if word == "oom_kill":
                return int(count)
        return 0


def own_cgroup() -> tuple[Path, int] | None:
    """The directory of our own memory cgroup and its version, or None."""
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if "memory" in controllers.split(","):
            root = "/sys/fs/cgroup/memory"
            for directory in (Path(root + path), Path(root)):
                if (directory / "memory.limit_in_bytes").exists():
                    return directory, 1
        elif not controllers and Path("/sys/fs/cgroup/cgroup.controllers").exists():
            directory = Path("/sys/fs/cgroup" + path)
            # In version 2 a cgroup whose children have controllers can't have processes. We are in
            # ours, so the new cgroup becomes a sibling.
            return (directory if path == "/" else directory.parent), 2
    return None


def why_no_cage() -> str | None:
    """Why no memory cgroup can be made here; None if one can."""
    if os.geteuid() != 0:
        return "a memory cgroup needs root"
    try:
        with cage(1 << 30):
            return None
    except OSError as error:
        return f"no memory cgroup can be made: {error}"


def set_limit(directory: Path, version: int, limit_bytes: int) -> None:
    """Sets the limit, without swap."""
    name, swap = ("memory.limit_in_bytes", "memory.memsw.limit_in_bytes")
    if version == 2:
        name, swap = ("memory.max", "memory.swap.max")
    (directory / name).write_text(str(limit_bytes))
    if (directory / swap).exists():
        (directory / swap).write_text(str(limit_bytes if version == 1 else 0))


@contextlib.contextmanager
def cage(limit_bytes: int) -> Iterator[Cage]:
    """A new memory cgroup with this limit, next to ours (v2) or in it (v1). At the end its
    processes are killed, and it is removed."""
    own = own_cgroup()
    if own is None:
        raise OSError("there is no memory controller")
    parent, version = own
    directory = parent / f"modicum-test-{os.getpid()}-{time.monotonic_ns()}"
    directory.mkdir()
    try:
        set_limit(directory, version, limit_bytes)
        yield Cage(directory, version)
    finally:
        remove(directory)


def remove(directory: Path) -> None:
    """Kills the processes in the cgroup and removes it. Tries repeatedly, since the kernel refuses
    while they are ending."""
    deadline = time.monotonic() + 10
    while directory.exists():
        for pid in (directory / "cgroup.procs").read_text().split():
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(pid), 9)
        with contextlib.suppress(OSError):
            directory.rmdir()
        if time.monotonic() > deadline:
            raise TimeoutError(f"{directory} can't be removed")
        if directory.exists():
            time.sleep(0.02)


def drop_page_cache(directory: Path) -> None:
    """Drops the files of a directory from the page cache, so that reads charge the reader."""
    for file in directory.iterdir():
        descriptor = os.open(file, os.O_RDONLY)
        try:
            os.fsync(descriptor)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)


def have(program: str) -> bool:
    return shutil.which(program) is not None
