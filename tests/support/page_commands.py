"""Runs the commands of a page, and compares what they print with what the page shows."""

import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

FENCE = re.compile(r"^```(\w*)(?: file=(\S+)| cpu)?\n(.*?)^```$", re.M | re.S)
NUMBER = re.compile(r"\d+(?:\.\d+)?(?:e[-+]\d+)?")


def blocks(page: Path) -> Iterator[tuple[str, str, str]]:
    """(language, name of the file to write or "", text) of each fenced block."""
    yield from FENCE.findall(page.read_text())


def commands(text: str) -> Iterator[tuple[str, list[str]]]:
    """Each command of a console block, with its lines of output on the page."""
    command, shown = "", []
    for line in text.splitlines():
        if line.startswith("$ "):
            if command:
                yield command, shown
            command, shown = line[2:], []
        elif line.strip():
            shown.append(line.strip())
    yield command, shown


def pattern_of(line: str) -> str:
    """A regular expression for the line: any text without spaces in place of an unsigned number,
    and any width of spaces."""
    words = NUMBER.split(line)
    return r"\S*".join(re.sub(r"(\\\s)+", r"\\s+", re.escape(word)) for word in words)


def run_page(page: Path, directory: Path, programs: Path, left_out: tuple[str, ...]) -> int:
    """Runs the page's commands in `directory`, except those that begin with a text of `left_out`,
    and compares what they print with the page. `programs`: the folder of python and modicum.
    Returns the number of commands."""
    paths = [str(programs), os.environ["PATH"]]
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    around = kept | {"PATH": os.pathsep.join(paths), "HF_HUB_OFFLINE": "1"}
    ran = 0
    for language, file, text in blocks(page):
        if file:
            (directory / file).write_text(text)
        if language != "console":
            continue
        for command, shown in commands(text):
            if command.startswith(left_out):
                continue
            command, _, exit_code = command.partition("  # exit ")
            done = subprocess.run(
                ["bash", "-c", command], cwd=directory, env=around, text=True, timeout=240,
                stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            )  # fmt: skip
            assert done.returncode == int(exit_code or 0), f"{command}\n{done.stdout}"
            for line in shown:
                assert re.search(pattern_of(line), done.stdout), f"{line}\n{done.stdout}"
            ran += 1
    return ran


def with_places(text: str, places: dict[str, str]) -> str:
    """A block with real paths for the strings that are keys of `places`."""
    for name, place in places.items():
        text = text.replace(f'"{name}"', repr(place))
    return text
