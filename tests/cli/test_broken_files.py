"""Directories whose optional files are broken, and files that change while they are loaded.

Catches: an unreadable config.json counts as an empty one; the program blocks on a config.json that
is a FIFO; one verb omits its warnings, or warns of no tensor that stays as stored; a load succeeds
although a file was overwritten while it ran.
"""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from program import failure, run, run_json, write_checkpoint
from safetensors.torch import save_file

import modicum as library
from modicum import _modicum

# By name: a function that makes a file unreadable, and the exit code of a verb that must read it.
BREAKAGES: dict[str, tuple[Callable[[Path], Any], int]] = {
    "empty": (lambda path: path.write_text(""), 10),
    "cut off": (lambda path: path.write_text('{"model_type": "x"'), 10),
    "not UTF-8": (lambda path: path.write_bytes(b'{"a": "\xff"}'), 10),
    "a key twice": (lambda path: path.write_text('{"a": 1, "a": 2}'), 10),
    "too large": (lambda path: path.write_bytes(b" " * ((16 << 20) + 1)), 10),
    "a directory": (lambda path: path.mkdir(), 13),
    "a FIFO": (os.mkfifo, 13),
    "a loop of links": (lambda path: path.symlink_to(path.name), 13),
    "a link to nothing": (lambda path: path.symlink_to("nowhere"), 13),
}


def fp8_checkpoint(directory: Path) -> Path:
    """FP8 codes [192, 128] with scales [2, 1]: only weight_block_size in config.json can tell
    whether a scale belongs to 128 rows or to 96."""
    directory.mkdir()
    tensors = {
        "w.weight": torch.ones(192, 128).to(torch.float8_e4m3fn),
        "w.weight_scale_inv": torch.tensor([[1.0], [2.0]]),
    }
    save_file(tensors, directory / "model.safetensors")
    return directory


def tied_checkpoint(directory: Path) -> Path:
    """An embedding without lm_head.weight: only config.json can tell whether the two are tied."""
    directory.mkdir()
    save_file({"model.embed_tokens.weight": torch.ones(8, 4)}, directory / "model.safetensors")
    return directory


@pytest.mark.parametrize("how", BREAKAGES)
def test_a_broken_config_is_an_error_if_values_depend_on_it(
    modicum: Path, tmp_path: Path, how: str
) -> None:
    do_break, code = BREAKAGES[how]
    codes, tied = fp8_checkpoint(tmp_path / "codes"), tied_checkpoint(tmp_path / "tied")
    for directory in (codes, tied):
        do_break(directory / "config.json")
    for verb in ("plan", "load"):
        # Codes are dequantised with --dtype. Without it they are loaded as stored: a warning.
        error = failure(modicum, code, verb, codes, "--dtype", "bfloat16")
        assert (error["file"], error["tensor"]) == ("config.json", "w.weight")
        error = failure(modicum, code, verb, tied)
        assert (error["file"], error["tensor"]) == ("config.json", "lm_head.weight")
        (warning, *_) = run_json(modicum, verb, codes)["warnings"]
        assert warning.startswith("config.json: ")
    assert run_json(modicum, "inspect", tied)["warnings"]


def test_every_verb_shows_its_warnings(modicum: Path, tmp_path: Path) -> None:
    directory = tmp_path / "model"
    directory.mkdir()
    save_file({"w": torch.ones(8, 4, dtype=torch.bfloat16)}, directory / "model.safetensors")
    verbs = [("inspect",), ("plan",), ("load",), ("rehearse", "--optimizer", "adamw:fp32")]
    for verb, *flags in verbs:
        assert run_json(modicum, verb, directory, *flags)["warnings"] == []
    (directory / "config.json").write_text("{")
    (directory / "adapter_config.json").write_text("{}")
    for verb, *flags in verbs:
        warnings = run_json(modicum, verb, directory, *flags)["warnings"]
        assert len(warnings) == 2
        text = run(modicum, verb, directory, *flags).stdout
        assert all(f"warning: {warning}\n" in text for warning in warnings)


def test_warns_of_tensors_that_are_neither_cast_nor_trained(modicum: Path, tmp_path: Path) -> None:
    """`--dtype` casts no float64, and nothing dequantises GPTQ's codes: both load as stored."""
    tensors = {
        "a": torch.ones(8, 4, dtype=torch.bfloat16),
        "positions": torch.arange(4, dtype=torch.int32),
        "q.qweight": torch.ones(2, 4, dtype=torch.int32),
        "wide": torch.ones(8, dtype=torch.float64),
    }
    directory = write_checkpoint(tmp_path / "model", tensors)
    cast, adamw = ("--dtype", "fp32"), ("--optimizer", "adamw:fp32", "--frozen", "wide")
    wide = "kept as stored: 1 tensor (--dtype casts only float32, bfloat16, float16, and FP8 "
    wide += "with scales); the first is wide (float64)"
    for verb in ("plan", "load"):
        assert run_json(modicum, verb, directory, *adamw)["warnings"] == []
        assert run_json(modicum, verb, directory, *cast)["warnings"] == [wide]
    (directory / "config.json").write_text('{"quantization_config": {"quant_method": "gptq"}}')
    assert run_json(modicum, "plan", directory)["warnings"] == []
    for flags in (cast, adamw):
        warning = run_json(modicum, "plan", directory, *flags)["warnings"][-1]
        assert warning.startswith("kept as stored: 1 tensor (codes of quantization method 'gptq'")
        assert warning.endswith("the first is q.qweight (int32)")
    error = failure(modicum, 2, "plan", directory, *cast, *adamw[:2])
    assert (error["tensor"], error["got"]) == ("wide", "float64") and "--frozen" in error["message"]


def test_an_empty_recipe_file_is_refused(modicum: Path, tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.json"
    recipe.touch()
    error = failure(modicum, 2, "plan", tied_checkpoint(tmp_path / "m"), "--recipe", recipe)
    assert (error["category"], error["file"]) == ("MISMATCH", "recipe.json")


@pytest.mark.parametrize("value", ["true", "1", '"x"', "[]", "{}"])
def test_an_unknown_key_of_a_ds_config_is_refused(
    modicum: Path, tmp_path: Path, value: str
) -> None:
    config = tmp_path / "ds_config.json"
    config.write_text(f'{{"bf16": {{"enabled": true}}, "unknown": {value}}}')
    error = failure(modicum, 2, "plan", tied_checkpoint(tmp_path / "m"), "--deepspeed", config)
    assert (error["category"], error["file"]) == ("UNSUPPORTED", "ds_config.json")


def test_the_error_of_a_ds_config_that_is_not_json_names_it(modicum: Path, tmp_path: Path) -> None:
    config = tmp_path / "ds_config.json"
    config.write_text('{"bf16": ')
    error = failure(modicum, 2, "plan", tied_checkpoint(tmp_path / "m"), "--deepspeed", config)
    assert (error["category"], error["file"], error["offset"]) == ("USAGE", "ds_config.json", 9)


@pytest.mark.parametrize("strategy", ["own-shard", "node-reader", "replica-striped"])
def test_a_file_that_changes_between_two_reads_is_a_conflict(tmp_path: Path, strategy: str) -> None:
    """The file's mtime changes while the n-th piece is copied to its destination, for each n. The
    other strategies have read all of the file, and compared its identity, before the first copy."""
    directory = tmp_path / "model"
    directory.mkdir()
    path = directory / "model.safetensors"
    save_file({"w": torch.ones(1 << 20), "v": torch.ones(3, 5)}, path)

    def load(touched_at: int) -> int:
        """Loads, and changes the mtime during the copy with this number, counted from 1; never if
        it is 0. Returns the number of copies."""
        os.utime(path, ns=(1, 1))
        recipe = library.walk.make_recipe(library.walk.open_checkpoint(directory))
        layout = library.walk.make_layout(recipe, 1)
        plan = _modicum.make_plan(
            recipe, layout, strategy=strategy, destinations=["copy", "copy"], staging="1MiB"
        )
        pieces = 0

        def copy(target: int, at: int, elements: memoryview) -> None:
            nonlocal pieces
            pieces += 1
            if pieces == touched_at:
                os.utime(path, ns=(2, 2))

        _modicum.load(plan, 0, _modicum.Board(), library.Ledger(), copy=copy, threads=1)
        return pieces

    pieces = load(0)
    assert pieces > 2
    for touched_at in range(1, pieces + 1):
        with pytest.raises(library.IoError) as caught:
            load(touched_at)
        assert caught.value.category == "CONFLICT"
        assert caught.value.file == path.name
        assert "mtime 1 ns" in caught.value.expected
        assert "mtime 2 ns" in caught.value.got


def test_open_checkpoint_has_the_warnings(tmp_path: Path) -> None:
    directory = tied_checkpoint(tmp_path / "model")
    assert library.walk.open_checkpoint(directory).warnings == []
    (directory / "adapter_config.json").write_text(json.dumps({}))
    (warning,) = library.walk.open_checkpoint(directory).warnings
    assert "adapter" in warning


def test_make_recipe_refuses_an_empty_path(tmp_path: Path) -> None:
    checkpoint = library.walk.open_checkpoint(tied_checkpoint(tmp_path / "model"))
    with pytest.raises(library.UsageError):
        library.walk.make_recipe(checkpoint, "")
