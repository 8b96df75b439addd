"""Frames are told apart by where a package is installed, not by a name in a path.

Catches: a script in a folder that has the name of a package.
"""

import contextlib
import importlib
import json
from pathlib import Path

import pytest

from modicum.upstream.frames import is_part_of

NAMES = ("json", "contextlib")
JSON, CONTEXTLIB = Path(json.__file__).parent, Path(contextlib.__file__)


@pytest.mark.parametrize("file", (JSON / "decoder.py", JSON / "new/module.py", CONTEXTLIB))
def test_files_below_the_place_of_a_package_are_part_of_it(file: Path) -> None:
    assert is_part_of(str(file), NAMES)


@pytest.mark.parametrize(
    "file",
    (
        "/home/json/script.py",
        "/home/contextlib.py",
        JSON.with_name("jsonlines") / "reader.py",
        JSON.with_name("other.py"),
        "<string>",
    ),
)
def test_other_files_are_not(file: object) -> None:
    assert not is_part_of(str(file), NAMES)


def test_a_package_that_was_not_imported_has_no_files(tmp_path: Path) -> None:
    assert not is_part_of("absent/module.py", ("absent",))


def test_a_linked_package_has_two_spellings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "linked_package").mkdir()
    (tmp_path / "linked_package/__init__.py").touch()
    (tmp_path / "site").symlink_to(".")
    monkeypatch.syspath_prepend(tmp_path / "site")
    importlib.import_module("linked_package")
    for folder in (tmp_path, tmp_path / "site"):
        assert is_part_of(str(folder / "linked_package/module.py"), ("linked_package",))
    assert not is_part_of(str(tmp_path / "site/linked_package.py"), ("linked_package",))
