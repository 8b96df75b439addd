"""File systems in files, mounted through a loop device, whose power can be cut."""

import contextlib
import ctypes
import errno
import fcntl
import os
import shutil
import subprocess
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

SHUTDOWN = 0x8004587D  # EXT4_IOC_SHUTDOWN, XFS_IOC_GOINGDOWN
# Flags of the ioctl. They say what reaches the disk before the power fails: all data and the file
# system's log; the log only; neither.
FLAGS = {"flush": 0, "log-flush": 1, "no-log-flush": 2}
SIZES = {"ext4": 48 << 20, "xfs": 320 << 20}  # bytes of the images, which are sparse files
_libc = ctypes.CDLL(None, use_errno=True)


def _checked(result: int, doing: str) -> None:
    if result != 0:
        error = ctypes.get_errno()
        raise OSError(error, f"{doing}: {os.strerror(error)}")


class Disk:
    """A new file system, mounted at `directory` between `mount` and `unmount`."""

    def __init__(self, kind: str, scratch: Path) -> None:
        self.kind = kind
        self.image = scratch / f"{kind}-{uuid.uuid4().hex}"
        self.directory = self.image.with_suffix(".d")
        self.directory.mkdir()
        with self.image.open("wb") as file:
            file.truncate(SIZES[kind])
        subprocess.run([f"mkfs.{kind}", "-q", self.image], check=True, capture_output=True)
        attach = ["losetup", "--find", "--show", self.image]
        done = subprocess.run(attach, check=True, capture_output=True, text=True)
        self.device = done.stdout.strip()

    def mount(self) -> None:
        """Mounts the file system, which also replays its log."""
        words = [os.fsencode(word) for word in (self.device, self.directory, self.kind)]
        _checked(_libc.mount(*words, 0, None), "mount")

    def unmount(self) -> None:
        """Waits for the kernel to close the files of processes that have just been killed, and for
        the end of other mount namespaces, such as those of containers in tests that run meanwhile:
        a mount of a device that is still in use would give the old state, without a recovery."""
        deadline = time.monotonic() + 30
        while _libc.umount2(os.fsencode(self.directory), 0) != 0:
            busy = ctypes.get_errno() == errno.EBUSY
            _checked(0 if busy and time.monotonic() < deadline else -1, "umount")
            time.sleep(0.05)
        while True:
            try:
                return os.close(os.open(self.device, os.O_RDONLY | os.O_EXCL))
            except OSError as error:
                if error.errno != errno.EBUSY or time.monotonic() > deadline:
                    raise
                time.sleep(0.05)

    def cut_power(self, flags: int) -> None:
        """Cuts the power of the mounted file system, with one of FLAGS: no later call reaches the
        disk."""
        opened = os.open(self.directory, os.O_RDONLY)
        try:
            fcntl.ioctl(opened, SHUTDOWN, flags.to_bytes(4, "little"))
        finally:
            os.close(opened)

    def remove(self) -> None:
        _libc.umount2(os.fsencode(self.directory), 2)
        subprocess.run(["losetup", "--detach", self.device], check=False)
        self.image.unlink(missing_ok=True)
        self.directory.rmdir()


@contextlib.contextmanager
def disk(kind: str, scratch: Path) -> Iterator[Disk]:
    made = Disk(kind, scratch)
    try:
        yield made
    finally:
        made.remove()


def why_no_disk(kind: str, scratch: Path) -> str:
    """The reason why no file system of this kind can be mounted and have its power cut here; "" if
    one can."""
    if os.getuid() != 0:
        return "only root can mount file systems"
    for tool in (f"mkfs.{kind}", "losetup"):
        if shutil.which(tool) is None:
            return f"{tool} is not installed (scripts/packages.sh python)"
    try:
        with disk(kind, scratch) as made:
            made.mount()
            made.cut_power(0)
            made.unmount()
    except (OSError, subprocess.CalledProcessError) as error:
        return f"no {kind} through a loop device here: {error}"
    return ""
