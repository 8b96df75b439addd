"""A library that is preloaded into the program under test: the n-th system call on files below a
directory fails, is cut short, waits, or finds that the power has failed; or all writes are slow
(fixtures/faulty_files.c)."""

import os
import struct
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path

from program import PATIENCE_S, Ended

SOURCE = Path(__file__).parents[1] / "fixtures/faulty_files.c"
FAILS, SHORT, CUT, HELD, SLOW = 1, 2, 3, 4, 5  # `enum how` of faulty_files.c
NEVER = 1 << 62
_PAGE = struct.Struct("=qqii32s224s")  # `struct page` of faulty_files.c
_DETAIL_AT = 20  # the offset of its member `detail`


@dataclass(frozen=True)
class Hit:
    """The system call that was hit in a run, its path, and the number of counted calls so far.
    `call` is empty if no call was hit."""

    calls: int
    call: str
    path: str


def be(page: Path, how: tuple[int, int], at: int = NEVER) -> None:
    """Sets the fault of the programs that have mapped this page; see `FaultyFiles.be`."""
    # Programs have mapped the page, so it must stay the same file.
    with page.open("r+b" if page.exists() else "w+b") as file:
        file.write(_PAGE.pack(0, at, *how, b"", b""))


class FaultyFiles:
    """Compiles the library into `directory`."""

    def __init__(self, directory: Path) -> None:
        self.library = directory / "faulty_files.so"
        self.page = directory / "page"
        command = ["cc", "-O1", "-Wall", "-shared", "-fPIC", "-o", self.library, SOURCE, "-ldl"]
        subprocess.run(command, check=True)
        self._opened = self.library.open("rb")

    def run(
        self, root: Path, at: int, how: tuple[int, int], program: Path, *words: object
    ) -> tuple[Ended, Hit]:
        """Runs the program; `how` is FAILS with an errno, SHORT, or CUT with the shutdown's
        flags."""
        process = self._start(root, at, how, [program, *words])
        stdout, stderr = process.communicate(timeout=PATIENCE_S)
        return Ended(process.returncode, stdout, stderr), self.hit()

    def hold(self, root: Path, at: int, program: Path, *words: object) -> subprocess.Popen[str]:
        """Starts the program in a new process group. Returns when the `at`-th write to the files is
        held, or when the program has ended."""
        process = self._start(root, at, (HELD, 0), [program, *words])
        end = time.monotonic() + PATIENCE_S
        while not self.hit().call and process.poll() is None:
            assert time.monotonic() < end, "no write was held"
            time.sleep(0.002)
        return process

    def release(self) -> None:
        """Lets the held write go on."""
        with self.page.open("r+b") as file:
            file.seek(_DETAIL_AT)
            file.write(struct.pack("=i", 1))

    def hit(self) -> Hit:
        """The hit of the last run, which may still be running."""
        calls, _, _, _, call, path = _PAGE.unpack(self.page.read_bytes()[: _PAGE.size])
        return Hit(calls, *(part.rstrip(b"\0").decode() for part in (call, path)))

    def be(self, how: tuple[int, int], at: int = NEVER) -> None:
        """Sets the fault of all programs from now on. `how`: as for `run`, or SLOW with
        microseconds."""
        be(self.page, how, at)

    def environment(self, root: Path) -> dict[str, str]:
        """The environment of a program, for the files below `root`. Call `be` before the program
        starts."""
        return {
            # The loader splits LD_PRELOAD at spaces, which the library's path may have.
            "LD_PRELOAD": f"/proc/{os.getpid()}/fd/{self._opened.fileno()}",
            "FAULTY_ROOT": str(root),
            "FAULTY_PAGE": str(self.page),
        }

    def _start(
        self, root: Path, at: int, how: tuple[int, int], words: list[object]
    ) -> subprocess.Popen[str]:
        self.be(how, at)
        environment = os.environ | self.environment(root)
        return subprocess.Popen(
            list(map(str, words)),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
            start_new_session=True,
        )
