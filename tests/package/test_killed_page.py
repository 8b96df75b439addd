"""Runs the commands of docs/guide/killed.md: that of `watch`, and (soak) all.

Catches: a command or a script of the page that no longer works; a line of output on the page that
the command does not print (numbers may differ); a kind of memory that grows is not named.
"""

import sys
from pathlib import Path

import pytest
from cage import why_no_cage
from page_commands import run_page

pytest.importorskip("torch")

pytestmark = pytest.mark.alone  # other tests' CPU use would delay the program


def run_killed_page(root: Path, directory: Path, left_out: tuple[str, ...]) -> int:
    """The number of commands that ran."""
    if reason := why_no_cage():
        pytest.skip(reason)
    page = root / "docs/guide/killed.md"
    return run_page(page, directory, Path(sys.executable).parent, left_out)


def test_the_command_of_watch_works_as_shown(root: Path, tmp_path: Path) -> None:
    assert run_killed_page(root, tmp_path, ("python train.py",)) == 1


@pytest.mark.soak
def test_every_command_works_as_shown(root: Path, tmp_path: Path) -> None:
    assert run_killed_page(root, tmp_path, ()) == 3
