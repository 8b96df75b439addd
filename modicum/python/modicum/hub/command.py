"""`modicum plan ORG/NAME` and `modicum inspect ORG/NAME` of a model that is not in the cache: reads
its headers from the hub, and runs the program on them."""

import os
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from modicum.errors import Error, failure
from modicum.hub.client import Hub, Patience
from modicum.hub.settings import settings_of
from modicum.hub.snapshot import Snapshot, fetch
from modicum.program import end_raises, is_quiet, print_line, refusal, report_error, run

_NAMES_COMMAND = "`uvx modicum plan`"
"""What the program's refusal of an uncached name contains."""


def run_on_headers(program: Path, verb: str, words: Sequence[str]) -> int | None:
    """Runs `plan` or `inspect` with these words if they name a model that is not in the cache.

    Returns:
        The exit code; None: there is no such name, or the program refuses another word. Then the
        caller runs the program.
    """
    error = refusal(program, verb, words)
    name = error.get("got", "")
    if _NAMES_COMMAND not in error.get("expected", "") or words.count(name) != 1:
        return None
    try:
        with end_raises(f"`modicum {verb}`"):
            return _run(program, verb, words, name)
    except Error as failed:
        return report_error(failed, words)
    except KeyboardInterrupt:
        return report_error(failure("CANCELLED", "interrupted"), words)


def _run(program: Path, verb: str, words: Sequence[str], name: str) -> int:
    settings = settings_of(os.environ)
    if settings.is_offline:
        what = "the cache lacks the model, or a part of it, and HF_HUB_OFFLINE is set"
        expected = f"a directory, a file, or the files that `hf download {name}` gets"
        raise failure("IO", what, expected=expected, got=name)
    with _temporary_directory() as folder:
        begin_s = time.monotonic()
        hub = Hub(settings, Patience())
        snapshot = fetch(hub, name, Path(folder).resolve())
        if not is_quiet(words):
            print_line(f"modicum: {_summary(hub, snapshot, begin_s)}", sys.stderr)
        at = words.index(name)
        return run([str(program), verb, *words[:at], str(snapshot.directory), *words[at + 1 :]])


def _temporary_directory() -> tempfile.TemporaryDirectory[str]:
    """A directory of this call, in TMPDIR: never in the cache, where others would load it."""
    try:
        return tempfile.TemporaryDirectory(prefix="modicum-headers-")
    except OSError as error:
        what = "no temporary directory for the headers can be made"
        got = error.strerror or ""
        raise failure("IO", what, expected="a TMPDIR that can be written", got=got) from None


def _summary(hub: Hub, snapshot: Snapshot, begin_s: float) -> str:
    files = f"{snapshot.files} file{'' if snapshot.files == 1 else 's'}"
    what = f"{files}, {snapshot.received_bytes / 1e6:.1f} MB"
    return f"headers of {what}, from {hub.origin} in {time.monotonic() - begin_s:.1f} s"
