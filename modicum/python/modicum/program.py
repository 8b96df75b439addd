"""The program `modicum` as a child of the wheel's command: its refusals, its exit code, and errors
that are printed as it prints them."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any, TextIO

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
    """Runs a command, to which SIGTERM and SIGHUP are passed on; returns its exit code. Ctrl-C
    reaches it anyway."""
    early: list[int] = []  # signals before the child is known
    child: subprocess.Popen[bytes] | None = None

    def pass_on(number: int, _frame: FrameType | None) -> None:
        if child is None:
            early.append(number)
        else:
            child.send_signal(number)

    before: dict[int, Any] = {number: signal.signal(number, pass_on) for number in _ends()}
    try:
        with subprocess.Popen(command) as child:
            # Not before the child begins: it would inherit that the signal is ignored.
            before[signal.SIGINT] = signal.signal(signal.SIGINT, signal.SIG_IGN)
            for number in early:
                child.send_signal(number)
            code = child.wait()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    return code if code >= 0 else 128 - code


def _ends() -> list[signal.Signals]:
    """The signals that end the program, so that it removes temporary files. nohup ignores
    SIGHUP."""
    is_kept = signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    return [signal.SIGTERM] if is_kept else [signal.SIGTERM, signal.SIGHUP]


@contextmanager
def end_raises(what: str) -> Iterator[None]:
    """Within the block SIGTERM and SIGHUP raise PREEMPTED: the signal ended `what`."""

    def preempt(number: int, _frame: FrameType | None) -> Any:
        raise failure("PREEMPTED", f"{signal.Signals(number).name} ended {what}")

    before = {number: signal.signal(number, preempt) for number in _ends()}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def is_quiet(words: Sequence[str]) -> bool:
    return bool({"-q", "--quiet"} & {*words})


def report_error(error: Error, words: Sequence[str]) -> int:
    """Prints an error as the program does; returns its exit code."""
    print_line(f"modicum: {error}", sys.stderr)
    if "--json" in words:
        print_line(as_document(error), sys.stdout)
    return error.code


def print_line(text: str, stream: TextIO | None) -> None:
    """Prints a line. A stream that is closed or full changes no exit code, as in the program."""
    if stream is None:  # closed before Python began
        return
    try:
        print(text, file=stream, flush=True)
    except (OSError, ValueError):
        with suppress(OSError, ValueError):  # at its exit Python writes the rest
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
