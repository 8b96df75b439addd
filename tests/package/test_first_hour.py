"""Runs the commands of docs/guide/first-hour.md outside the repository: those of one process in the
environment of the tests, and (soak) all in a fresh virtual environment, as a new user would.

Catches: a command or a file of the page that no longer works; a line of output on the page that the
command does not print (numbers may differ).
"""

import os
import re
import shutil
import subprocess
import sys
import venv
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")
pytest.importorskip("accelerate")

FENCE = re.compile(r"^```(\w+)(?: file=(\S+))?\n(.*?)^```$", re.M | re.S)
NUMBER = re.compile(r"\d+(?:\.\d+)?(?:e[-+]\d+)?")
# The page's first commands create and enter the environment and install torch. The fixture has done
# this.
ALREADY_DONE = ("python3 -m venv", ". first-hour/bin/activate", "pip install torch")


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


@pytest.fixture(scope="module")
def environment(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with the wheel and a virtual environment, `first-hour`. The environment has all
    packages of the one in which the tests run, except Modicum."""
    place = tmp_path_factory.mktemp("newcomer")
    directory = place / "first-hour"
    venv.create(directory, with_pip=True, symlinks=True)
    (packages,) = directory.glob("lib/python*/site-packages")
    (own,) = Path(sys.prefix).glob("lib/python*/site-packages")
    for entry in own.iterdir():
        if not entry.name.startswith(("modicum", "_modicum", "pip")):
            target = packages / entry.name
            if not target.exists():
                target.symlink_to(entry)
    launcher = directory / "bin/torchrun"  # only packages are linked, not their programs
    launcher.write_text(f'#!/bin/sh\nexec "{directory}/bin/python" -m torch.distributed.run "$@"\n')
    launcher.chmod(0o755)
    shutil.copy(wheel, place)
    return place


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


def test_the_commands_of_one_process_work_as_shown(root: Path, tmp_path: Path) -> None:
    """In the environment of the tests."""
    left_out = (*ALREADY_DONE, "pip install modicum", "torchrun")
    page = root / "docs/guide/first-hour.md"
    assert run_page(page, tmp_path, Path(sys.executable).parent, left_out) == 4


@pytest.mark.soak
def test_every_command_of_the_page_works_as_shown(environment: Path, root: Path) -> None:
    shutil.copy(root / "examples/accelerate_fsdp2.py", environment)
    page, programs = root / "docs/guide/first-hour.md", environment / "first-hour/bin"
    assert run_page(page, environment, programs, ALREADY_DONE) > 6
