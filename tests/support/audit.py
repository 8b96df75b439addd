"""Damaged pickles, and Python's audit events while they are read."""

import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

EVENTS = {"exec", "compile", "import", "os.system", "os.exec", "os.posix_spawn", "subprocess.Popen",
          "pickle.find_class", "open", "socket.connect", "ctypes.dlopen"}  # fmt: skip
_LISTENING: list[list[str]] = []
_HOOKS: list[Any] = []


@contextmanager
def nothing_happens(number: int, opened: str = "no file") -> Iterator[None]:
    """Asserts that the body causes none of EVENTS, except that it may open descriptors, and files
    whose paths have `opened` in them. The assertion's message names `number`. All calls share one
    audit hook, since a hook cannot be removed."""

    def hook(event: str, arguments: Any) -> None:
        is_descriptor = event == "open" and isinstance(arguments[0], int)
        if _LISTENING and event in EVENTS and not is_descriptor:
            _LISTENING[-1].append(f"{event} {arguments[0]}" if event == "open" else event)

    if not _HOOKS:
        sys.addaudithook(hook)
        _HOOKS.append(hook)
    heard: list[str] = []
    _LISTENING.append(heard)
    try:
        yield
    finally:
        _LISTENING.pop()
    assert all(event.startswith("open ") and opened in event for event in heard), (
        number, heard,
    )  # fmt: skip


def mutated(data: bytes, chance: random.Random) -> bytes:
    """The data with 1, 2 or 4 random changes: a bit, a byte, a cut, a repetition, or opcodes that
    call os.system."""
    made = bytearray(data)
    for _ in range(chance.choice((1, 1, 2, 4))):
        at = chance.randrange(len(made) - 9)
        kind = chance.randrange(5)
        if kind == 0:
            made[at] ^= 1 << chance.randrange(8)
        elif kind == 1:
            made[at] = chance.randrange(256)
        elif kind == 2:
            del made[at : at + chance.randrange(1, 9)]
        elif kind == 3:
            made[at:at] = made[at + 4 : at + chance.randrange(5, 9)]
        else:
            made[at:at] = chance.choice(
                (b"cos\nsystem\n", b"\x8c\x02os\x8c\x06system\x93", b"(S'x'\ntR")
            )
    return bytes(made)
