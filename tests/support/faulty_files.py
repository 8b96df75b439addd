"""A library that is preloaded into the program under test: the n-th system call on files below a
directory fails, is cut short, or finds that the power has failed (fixtures/faulty_files.c)."""

import os
import struct
import subprocess
from dataclasses import dataclass
from pathlib import Path

from program import PATIENCE_S, Ended

SOURCE = Path(__file__).parents[1] / "fixtures/faulty_files.c"
FAILS, SHORT, CUT = 1, 2, 3
NEVER = 1 << 62
_PAGE = struct.Struct("=qqii32s224s")


@dataclass(frozen=True)
class Hit:
    """The call that a run was hit at. `call` is empty if no call was hit."""

    calls: int
    call: str
    path: str


class FaultyFiles:
    """Compiles the library into `directory`."""

    def __init__(self, directory: Path) -> None:
        self.library = directory / "faulty_files.so"
        self.page = directory / "page"
        command = ["cc", "-O1", "-Wall", "-shared", "-fPIC", "-o", self.library, SOURCE, "-ldl"]
        subprocess.run(command, check=True)

    def run(
        self, root: Path, at: int, how: tuple[int, int], program: Path, *words: object
    ) -> tuple[Ended, Hit]:
        """Runs the program; `how` is FAILS with an errno, SHORT, or CUT with the shutdown's
        flags."""
        self.page.write_bytes(_PAGE.pack(0, at, *how, b"", b""))
        environment = os.environ | {
            "LD_PRELOAD": str(self.library),
            "FAULTY_ROOT": str(root),
            "FAULTY_PAGE": str(self.page),
        }
        command = [str(program), *map(str, words)]
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=PATIENCE_S, env=environment
        )
        calls, _, _, _, call, path = _PAGE.unpack(self.page.read_bytes()[: _PAGE.size])
        text = [part.rstrip(b"\0").decode() for part in (call, path)]
        return Ended(done.returncode, done.stdout, done.stderr), Hit(calls, *text)
