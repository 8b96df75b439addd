"""Saves and conversions on a disk that fails for a while: a file system in a sparse file on a tmpfs
that is full, in which the test makes room again. Linux reports such a write-back error once.

Catches: the result of fsync is ignored.
"""

import json
import os
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from disks import SIZES, Disk, disk, why_no_disk
from program import run

MIB = 1 << 20
ROUNDS = 4

pytestmark = pytest.mark.soak


@pytest.fixture
def memory(tmp_path: Path) -> Iterator[Path]:
    """A tmpfs, which holds the disk's image."""
    directory = tmp_path / "memory"
    directory.mkdir()
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=512m", "tmpfs", directory],
        capture_output=True, text=True,
    )  # fmt: skip
    if done.returncode != 0:
        pytest.skip(f"no tmpfs can be mounted: {done.stderr.strip()}")
    yield directory
    subprocess.run(["umount", "-l", directory], check=True)


def free_bytes(directory: Path) -> int:
    status = os.statvfs(directory)
    return status.f_bavail * status.f_frsize


def write_model(directory: Path) -> None:
    """A checkpoint of one tensor of 20 MiB."""
    size = 20 * MIB
    entry = {"dtype": "U8", "shape": [size], "data_offsets": [0, size]}
    header = json.dumps({"w": entry}).encode()
    directory.mkdir()
    with (directory / "model.safetensors").open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header + os.urandom(size))


class Filler:
    """Leaves `left` bytes free in the tmpfs. Makes room again soon after they are used up."""

    def __init__(self, memory: Path, left: int) -> None:
        self.memory, self.file, self.was_full = memory, memory / "filler", False
        with self.file.open("wb") as file:
            os.posix_fallocate(file.fileno(), 0, free_bytes(memory) - left)
        self.thread = threading.Thread(target=self._watch)
        self.thread.start()

    def _watch(self) -> None:
        while self.file.exists():
            if free_bytes(self.memory) < 64 << 10:
                self.was_full = True
                time.sleep(0.05)
                self.file.unlink(missing_ok=True)
            time.sleep(0.002)

    def end(self) -> None:
        self.file.unlink(missing_ok=True)
        self.thread.join()


@pytest.mark.parametrize("verb", ("save", "convert"))
@pytest.mark.parametrize("kind", SIZES)
def test_a_disk_that_fails_for_a_while_is_an_error(
    modicum: Path, memory: Path, tmp_path: Path, kind: str, verb: str
) -> None:
    if reason := why_no_disk(kind, memory):
        pytest.skip(reason)
    source = tmp_path / "source"
    write_model(source)
    failed = 0
    for left in range(8 * MIB, (8 + 4 * ROUNDS) * MIB, 4 * MIB):
        with disk(kind, memory) as made:
            made.mount()
            filler = Filler(memory, left)
            try:
                failed += is_refused(modicum, made, source, verb)
            finally:
                filler.end()
            assert filler.was_full
    assert failed > 0


def is_refused(modicum: Path, made: Disk, source: Path, verb: str) -> bool:
    """Runs the verb. Whether it failed; otherwise its result is right."""
    root = made.directory
    out = root / ("step-1" if verb == "save" else "OUT")
    words = ("save", source, root, "--step", 1) if verb == "save" else ("convert", source, out)
    done = run(modicum, *words, "--json")
    if done.code == 0:
        made.unmount()  # so that diff reads from the disk
        made.mount()
        assert run(modicum, "diff", source, out).code == 0
        return False
    assert (done.code, done.error["category"]) in ((13, "IO"), (14, "NOSPACE")), done
    assert not out.exists()
    return True
