"""The child of the wheel's command. Catches: a signal that comes before the child is known and is
not passed on; a child that ignores Ctrl-C."""

import os
import signal
import subprocess
import sys
from typing import Any

import pytest

from modicum import program


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_while_the_child_begins_is_passed_on(
    monkeypatch: pytest.MonkeyPatch, number: signal.Signals
) -> None:
    popen = subprocess.Popen

    def begin(command: list[str]) -> Any:
        child = popen(command)
        os.kill(os.getpid(), number)
        return child

    monkeypatch.setattr(subprocess, "Popen", begin)
    before = signal.signal(number, signal.SIG_DFL)
    try:
        handlers = [signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)]
        assert program.run(["sleep", "60"]) == 128 + number
        assert handlers == [signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)]
    finally:
        signal.signal(number, before)


def test_the_child_heeds_ctrl_c() -> None:
    ask = "import signal, sys; sys.exit(signal.getsignal(signal.SIGINT) == signal.SIG_IGN)"
    assert program.run([sys.executable, "-c", ask]) == 0
