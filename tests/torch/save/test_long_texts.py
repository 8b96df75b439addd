"""Texts of checkpoints, saved and of other programs, that are too long, or of another kind than a
regular file: an error with a category, before anything is read, and no wait.

Catches: a save begins although no reader accepts one of its texts; a text of a checkpoint with too
many levels is Python's own error.
"""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
safetensors = pytest.importorskip("safetensors.torch")

from modicum import _modicum  # noqa: E402  (after torch is known to be there)
from modicum.errors import Error  # noqa: E402
from modicum.imports.archives import Archive  # noqa: E402
from modicum.imports.dcp import Directory  # noqa: E402
from modicum.imports.zero import ZeroDirectory  # noqa: E402
from modicum.recipes.reading import read_recipe  # noqa: E402
from modicum.torch.saving.extra import COMMON, names_for  # noqa: E402
from modicum.torch.saving.texts import json_in, read_files  # noqa: E402

Read = Callable[[Path], object]

# For each reader the name of its file in a folder, and the category of one that is too long.
READERS: dict[str, tuple[str, str, Read]] = {
    "text": ("a.json", "INTEGRITY", lambda folder: _modicum.read_file(folder / "a.json")),
    "extra.json": (COMMON, "INTEGRITY", lambda at: read_files(at, names_for(at, 1, 0, 1))),
    "recipe.json": ("r.json", "MISMATCH", lambda folder: read_recipe(folder / "r.json")),
    ".metadata": (".metadata", "FORMAT.LIMIT", Directory.open),
    "latest": ("latest", "FORMAT.LIMIT", ZeroDirectory.open),
}


@pytest.mark.parametrize("reader", READERS)
def test_a_tebibyte_is_not_read(reader: str, tmp_path: Path) -> None:
    name, category, read = READERS[reader]
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
    path.touch()
    os.truncate(path, 1 << 40)
    with pytest.raises(Error) as raised:
        read(tmp_path)
    assert (raised.value.category, raised.value.file) == (category, path.name)


@pytest.mark.parametrize("reader", [*sorted(READERS.keys() - {"latest"}), "archive"])
def test_a_fifo_is_refused_at_once(reader: str, tmp_path: Path) -> None:
    name, _, read = READERS.get(reader, ("a.pt", "", lambda folder: Archive.open(folder / "a.pt")))
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
    os.mkfifo(path)
    with pytest.raises(Error) as raised:
        read(tmp_path)
    assert raised.value.category == "IO"


@pytest.mark.parametrize("text", [b"{", b"\xff", b"[" * 100_000], ids=["end", "utf8", "deep"])
def test_a_damaged_text_of_a_checkpoint_is_named(text: bytes) -> None:
    with pytest.raises(Error) as raised:
        json_in(text, "groups.json")
    assert (raised.value.category, raised.value.file) == ("INTEGRITY", "groups.json")


def test_a_save_writes_no_text_that_is_too_long(tmp_path: Path) -> None:
    from modicum.torch import SaveOptions, save

    model = torch.nn.Linear(2, 2)
    safetensors.save_file(model.state_dict(), tmp_path / "model.safetensors")
    extra = {"x": "y" * 100_000_000}
    with pytest.raises(Error) as raised:
        save(model, tmp_path / "root", step=1, options=SaveOptions(source=tmp_path), extra=extra)
    assert (raised.value.category, raised.value.file) == ("UNSUPPORTED", "extra/extra.json")
    assert not (tmp_path / "root").exists()


def test_removal_and_renaming_follow_no_link(tmp_path: Path) -> None:
    (tmp_path / "kept").mkdir()
    (tmp_path / "kept" / "file").touch()
    (tmp_path / "link").symlink_to(tmp_path / "kept")
    _modicum.rename(tmp_path / "link", tmp_path / "moved")
    _modicum.remove_tree(tmp_path / "moved")
    assert [path.name for path in tmp_path.rglob("*")] == ["kept", "file"]
