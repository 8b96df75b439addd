"""`modicum.verify`, `convert` and `diff`: verbs of the program as functions.

Catches: an error of the program that is lost or has another class, flags that the program does not
know, a document that is not the program's.
"""

import inspect
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

import modicum


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    (tmp_path / "a").mkdir()
    tensors = {name: np.ones((16, 16), np.float32) for name in ("a.weight", "b.weight")}
    save_file(tensors, tmp_path / "a" / "model.safetensors")
    return tmp_path / "a"


def test_the_documents_are_those_of_the_program(checkpoint: Path, tmp_path: Path) -> None:
    assert modicum.verify(checkpoint)["ok"] is True
    written = modicum.convert(checkpoint, tmp_path / "b", dtype="bfloat16", shard_size="1KiB")
    assert {*modicum.inspect(tmp_path / "b")["dtypes"]} == {"bfloat16"}
    assert written["files"] and modicum.diff(checkpoint, checkpoint)["differences"] == []
    kinds = {found["kind"] for found in modicum.diff(checkpoint, tmp_path / "b")["differences"]}
    assert kinds == {"dtype"}


def test_errors_of_the_program_are_raised(checkpoint: Path, tmp_path: Path) -> None:
    with pytest.raises(modicum.IoError) as exists:
        modicum.convert(checkpoint, checkpoint)
    assert exists.value.category == "CONFLICT"
    with pytest.raises(modicum.IoError):
        modicum.verify(tmp_path / "none")
    with pytest.raises(modicum.UsageError, match="dtype"):
        modicum.convert(checkpoint, tmp_path / "c", dtype="float3")
    file = next(checkpoint.glob("*.safetensors"))
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(modicum.FormatError) as short:
        modicum.verify(checkpoint)
    assert (short.value.category, short.value.file) == ("FORMAT.TRUNC", file.name)


def test_a_name_that_begins_with_a_dash_is_no_flag(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    shutil.copytree(checkpoint, tmp_path / "-q")
    assert modicum.verify("-q")["ok"] is True


def test_each_keyword_of_convert_is_a_flag() -> None:
    command = [sys.executable, "-m", "modicum.cli", "convert", "--help-all"]
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    for name, parameter in inspect.signature(modicum.convert).parameters.items():
        if parameter.kind is parameter.KEYWORD_ONLY:
            assert f"--{name.replace('_', '-')} " in text, name
