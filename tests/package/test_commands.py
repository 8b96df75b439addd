"""`modicum.verify`, `convert` and `diff`: verbs of the program as functions.

Catches: an error of the program that is lost or has another class, flags that the program does not
know, a document that is not the program's.
"""

import inspect
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file

import modicum
from modicum.recipes import recipe_for
from modicum.torch import SaveOptions


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
    for wrong in ({"allow_overflow": "no"}, {"keep_fp32": 5}, {"shard_size": 5.5}):
        with pytest.raises(modicum.UsageError, match=next(iter(wrong))):
            modicum.convert(checkpoint, tmp_path / "c", **wrong)
    file = next(checkpoint.glob("*.safetensors"))
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(modicum.FormatError) as short:
        modicum.verify(checkpoint)
    assert (short.value.category, short.value.file) == ("FORMAT.TRUNC", file.name)


def test_the_error_of_verify_has_the_results_of_all_files(checkpoint: Path, tmp_path: Path) -> None:
    for step in ("1", "2"):
        command = [sys.executable, "-m", "modicum.cli", "save", checkpoint, tmp_path / "run", "-q"]
        subprocess.run([*command, "--step", step], check=True, capture_output=True)
    names = [f"step-{step}/model.safetensors" for step in (1, 2)]
    for name in names:
        data = bytearray((tmp_path / "run" / name).read_bytes())
        data[-1] ^= 1
        (tmp_path / "run" / name).write_bytes(data)
    with pytest.raises(modicum.IntegrityError) as damaged:
        modicum.verify(tmp_path / "run")
    assert damaged.value.file == names[0]
    document = damaged.value.document
    assert document is not None and document["ok"] is False and "error" not in document
    results = {file["name"]: file["result"] for file in document["files"]}
    assert [name for name, result in results.items() if result != "ok"] == names
    assert all(results[name].startswith("INTEGRITY: ") for name in names)
    with pytest.raises(modicum.IoError) as missing:
        modicum.diff(checkpoint, tmp_path / "none")
    assert missing.value.document is None


def test_a_dtype_is_a_text_or_of_torch(checkpoint: Path, tmp_path: Path) -> None:
    """A wrong one is refused at once, with the names that are allowed."""
    named = ("bf16", "bfloat16", torch.bfloat16)
    for index, dtype in enumerate(named):
        modicum.convert(checkpoint, tmp_path / str(index), dtype=dtype)
        assert {*modicum.inspect(tmp_path / str(index))["dtypes"]} == {"bfloat16"}
        assert SaveOptions(dtype=dtype) == SaveOptions(dtype="bfloat16")
    planned = [modicum.plan(checkpoint, dtype=dtype) for dtype in named]
    assert planned == [modicum.plan(checkpoint, dtype="bfloat16")] * 3
    wrong: list[Callable[[], object]] = [
        lambda: SaveOptions(dtype="fp8"),
        lambda: SaveOptions(dtype=torch.float64),
        lambda: modicum.convert(checkpoint, tmp_path / "c", dtype=torch.int8),
        lambda: modicum.plan(checkpoint, dtype=torch.int8),
        lambda: recipe_for(torch.nn.Linear(1, 1), {}, dtype="half"),
    ]
    for call in wrong:
        with pytest.raises(modicum.UsageError, match="float32, bfloat16,? .*float16 .fp32, "):
            call()


def test_convert_warns_of_values_that_became_zero(tmp_path: Path) -> None:
    save_file({"weight": np.array([1.0, 1e-30], np.float32)}, tmp_path / "model.safetensors")
    with pytest.warns(UserWarning, match="modicum: 1 value of 1 tensor became zero"):
        modicum.convert(tmp_path, tmp_path / "out", dtype="float16")


def test_what_is_allowed_stands_in_errors(checkpoint: Path) -> None:
    with pytest.raises(modicum.UsageError, match="expected .*adamw:FORMAT.* int8-moments"):
        modicum.plan(checkpoint, optimizer="adam")
    with pytest.raises(modicum.UsageError, match="expected fp32, fp32-split, .*got fp33"):
        modicum.plan(checkpoint, optimizer="adamw:fp33")
    with pytest.raises(modicum.UsageError, match="expected one of .*shards.*got weights"):
        modicum.Ledger(1).require_room({"weights": 1}, "a test")


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
