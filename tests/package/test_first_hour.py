"""Runs the commands of docs/guide/first-hour.md outside the repository: those of one process in the
environment of the tests, and (soak) all in a fresh virtual environment, as a new user would.

Catches: a command or a file of the page that no longer works; a line of output on the page that the
command does not print (numbers may differ).
"""

import shutil
import sys
import venv
from pathlib import Path

import pytest
from page_commands import run_page

pytest.importorskip("torch")
pytest.importorskip("transformers")
pytest.importorskip("accelerate")

# The page's first commands create and enter the environment and install torch. The fixture has done
# this.
ALREADY_DONE = ("python3 -m venv", ". first-hour/bin/activate", "pip install torch")


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
