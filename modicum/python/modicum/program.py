"""The program `modicum` as a child of the wheel's command: its refusals, its exit code, and errors
that are printed as it prints them."""

import json
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

from modicum.errors import Error, as_document, failure


def refusal(program: Path, verb: str, words: Sequence[str]) -> dict[str, Any]:
    """The fields of the error with which the program refuses these words. Empty if it does not, or
    prints no document."""
    command = [str(program), verb, *words, *({"--json"} - {*words})]
    done = subprocess.run(command, capture_output=True, check=False)
    try:
        fields = json.loads(done.stdout)["error"]
    except (ValueError, LookupError, TypeError):
        return {}
    return fields if isinstance(fields, dict) else {}


def run(command: list[str]) -> int:
    """Runs a command, to which SIGTERM is passed on; returns its exit code. Ctrl-C reaches it
    anyway."""
    with subprocess.Popen(command) as child:
        pass_on: dict[int, Any] = {
            signal.SIGTERM: lambda number, _frame: child.send_signal(number),
            signal.SIGINT: signal.SIG_IGN,
        }
        before = {number: signal.signal(number, handler) for number, handler in pass_on.items()}
        try:
            code = child.wait()
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
    return code if code >= 0 else 128 - code


@contextmanager
def sigterm_raises(what: str) -> Iterator[None]:
    """Within the block SIGTERM raises PREEMPTED with this message."""

    def preempt(_number: int, _frame: FrameType | None) -> Any:
        raise failure("PREEMPTED", what)

    before = signal.signal(signal.SIGTERM, preempt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def is_quiet(words: Sequence[str]) -> bool:
    return bool({"-q", "--quiet"} & {*words})


def report_error(error: Error, words: Sequence[str]) -> int:
    """Prints an error as the program does; returns its exit code."""
    print(f"modicum: {error}", file=sys.stderr)
    if "--json" in words:
        print(as_document(error))
    return error.code
