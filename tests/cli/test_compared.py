"""Every reader of a saved checkpoint compares what it reads with the checkpoint's
record: a flipped bit in any file or tensor ends it with 12, or the tensor is reported as not
compared, and nothing is published.

Catches: the values of one reader are not compared; the state of a checkpoint that has no digest in
its state.json is not compared; a text is not compared; a conversion keeps a file with damaged
values for the next call; unused tensors are copied without being compared.
"""

import itertools
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from program import STRATEGIES, failure, flip_bit, header_of, run, run_json, stored, write_recipe

FRONTS = ("save", "int8-moments", "save of a step")
READERS = ("load", "resume", "save", "convert", "diff")
STATE_READERS = ("resume", "resume as another")


def step_of(modicum: Path, front: str, directory: Path) -> Path:
    """A checkpoint in ROOT `directory`, with AdamW's state if the front saves it."""
    model, first = directory / "model", directory / "first"
    run_json(modicum, "synth", model, "--arch", "tiny-moe", "--shard-size", 300)
    run_json(
        modicum, "save", model, first, "--step", 1, "--optimizer", "adamw:fp32-split", "--steps", 1
    )
    step = directory / "root/step-1"
    if front == "save":
        first.rename(step.parent)
    else:
        optimizer = ("--optimizer", f"adamw:{front}") if front == "int8-moments" else ()
        run_json(modicum, "save", first / "step-1", step.parent, "--step", 1, *optimizer)
    return step


def words_of(reader: str, step: Path, out: Path) -> tuple[object, ...]:
    """The command line of a reader. Ranks and layouts divide chunks in different ways."""
    return {
        "load": ("load", step, "--ranks", 3, "--strategy", "node-reader"),
        "resume": ("resume", step, "--ranks", 4, "--layout", "hsdp", "--mesh", "2x2"),
        "resume as another": ("resume", step, "--ranks", 3, "--optimizer", "adamw:bf16-moments"),
        "save": ("save", step, out, "--step", 2, "--ranks", 2, "--shard-dim", 1),
        "convert": ("convert", step, out, "--dtype", "fp32"),
        "diff": ("diff", step, step),
    }[reader]


def tensors_of(step: Path) -> Iterator[tuple[Path, str, int, int]]:
    """(file, name, begin and end in the file) of each tensor that has a value."""
    for file in sorted(step.rglob("*.safetensors")):
        header, data = header_of(file)
        for name, of in header.items():
            if name == "__metadata__":
                continue
            begin, end = of["data_offsets"]
            if end > begin:
                yield file, name, data + begin, data + end


def expect_found(modicum: Path, reader: str, step: Path, tensor: str, file: Path) -> None:
    """The reader names the changed tensor, and publishes nothing."""
    out = step.parent.parent / "out"
    error = failure(modicum, 12, *words_of(reader, step, out))
    assert error["category"] == "INTEGRITY"
    assert error["tensor"] == tensor, reader
    assert error["file"] == str(file.relative_to(step))
    assert not out.exists() or not [of for of in out.iterdir() if of.name.startswith("step")]
    shutil.rmtree(out, ignore_errors=True)


def compare(modicum: Path, step: Path, *, every: bool) -> None:
    """Flips a bit of each tensor, for one or every reader; only a resume reads the state."""
    cycles = itertools.cycle(READERS), itertools.cycle(STATE_READERS)
    for number, (file, name, begin, end) in enumerate(tensors_of(step)):
        is_state = file.parent.name == "optimizer"
        if is_state and not every and number % 4 > 0:
            continue
        at = begin + (end - begin) * (number % 7) // 7
        flip_bit(file, at, number % 8)
        readers = (READERS, STATE_READERS)[is_state]
        for reader in readers if every else (next(cycles[is_state]),):
            expect_found(modicum, reader, step, name, file)
        flip_bit(file, at, number % 8)


@pytest.mark.parametrize("front", FRONTS)
def test_a_flipped_bit_is_found(modicum: Path, tmp_path: Path, front: str) -> None:
    compare(modicum, step_of(modicum, front, tmp_path), every=False)


@pytest.mark.soak
@pytest.mark.parametrize("front", FRONTS)
def test_each_reader_finds_each_flipped_bit(modicum: Path, tmp_path: Path, front: str) -> None:
    compare(modicum, step_of(modicum, front, tmp_path), every=True)


def test_changed_texts_and_headers_are_found(modicum: Path, tmp_path: Path) -> None:
    step = step_of(modicum, "save", tmp_path)
    readers = itertools.cycle(READERS)
    for file in sorted(path for path in step.rglob("*") if path.is_file()):
        is_data = file.suffix == ".safetensors"
        flip_bit(file, 20 if is_data else file.stat().st_size // 2)
        reader = next(readers)
        error = failure(modicum, 12, *words_of(reader, step, tmp_path / "out"))
        assert error["category"] == "INTEGRITY"
        named = {file.relative_to(step).as_posix(), file.name}
        assert error["file"] in (named | {"manifest.json"} if file.name == "COMMIT" else named)
        flip_bit(file, 20 if is_data else file.stat().st_size // 2)
        assert not (tmp_path / "out").exists()


def test_reports_say_what_was_compared(modicum: Path, tmp_path: Path) -> None:
    step = step_of(modicum, "save", tmp_path)
    model = sum(end - begin for file, _, begin, end in tensors_of(step) if file.parent == step)
    whole = sum(end - begin for _, _, begin, end in tensors_of(step))
    for reader, expected in zip(READERS, (model, whole, model, model, 2 * model), strict=True):
        document = run_json(modicum, *words_of(reader, step, tmp_path / reader))
        assert document["compared_bytes"] == expected, reader
        assert document["not_compared"] == [], reader
    for strategy in STRATEGIES:
        words = ("load", step, "--ranks", 3, "--strategy", strategy, "--destination", "discard")
        assert run_json(modicum, *words)["compared_bytes"] == model, strategy
    plain = run_json(modicum, "load", tmp_path / "convert")
    assert (plain["compared_bytes"], plain["not_compared"]) == (0, [])
    text = run(modicum, "load", step).stdout
    assert "compared with the checkpoint's record: " in text


def test_unused_tensors_are_compared_when_they_are_copied(modicum: Path, tmp_path: Path) -> None:
    step = step_of(modicum, "save", tmp_path)
    tensors = {name: (file, begin) for file, name, begin, _ in tensors_of(step)}
    names = [name for name, (file, _) in tensors.items() if file.parent == step]
    unused = names[:2]
    targets: dict[str, Any] = {name: stored(name) for name in names[2:]}
    recipe = write_recipe(tmp_path / "r.json", targets, unused)
    words = (step, "--recipe", recipe, "--optimizer", "none")
    assert run_json(modicum, "load", *words)["not_compared"] == sorted(unused, key=names.index)
    saved = run_json(modicum, "save", step, tmp_path / "a", "--step", 1, "--recipe", recipe)
    assert saved["not_compared"] == []
    file, begin = tensors[unused[1]]
    flip_bit(file, begin)
    run_json(modicum, "load", *words)
    copying = ("save", step, tmp_path / "b", "--step", 1, "--recipe", recipe, "--ranks", 2)
    assert failure(modicum, 12, *copying)["tensor"] == unused[1]
    assert not list((tmp_path / "b").glob("step-*"))


def test_a_conversion_goes_on_with_whole_values_only(modicum: Path, tmp_path: Path) -> None:
    """One tensor goes in halves into two files; the damage is in the second half."""
    step = step_of(modicum, "save", tmp_path)
    weights = {name: (file, end) for file, name, _, end in tensors_of(step) if file.parent == step}
    shapes = {name: header_of(file)[0][name]["shape"] for name, (file, _) in weights.items()}
    name = next(name for name, shape in shapes.items() if len(shape) == 2 and shape[0] >= 2)
    cut = shapes[name][0] // 2
    targets: dict[str, Any] = {of: stored(of) for of in weights if of != name}
    for half, start, stop in (("a.half", 0, cut), ("z.half", cut, shapes[name][0])):
        part = {"op": "slice", "dim": 0, "start": start, "stop": stop, "in": [stored(name)]}
        targets[half] = part
    recipe = write_recipe(tmp_path / "r.json", targets)
    words = ("convert", step, tmp_path / "out", "--recipe", recipe, "--shard-size", 1000)
    file, end = weights[name]
    flip_bit(file, end - 1)
    for _ in range(3):  # a finished file is kept by the next call
        assert failure(modicum, 12, *words)["tensor"] == name
        assert not (tmp_path / "out").exists()
    flip_bit(file, end - 1)
    assert run_json(modicum, *words)["not_compared"] == []


def test_a_later_call_does_not_compare_kept_files(modicum: Path, tmp_path: Path) -> None:
    """They were compared by the call that has written them."""
    step = step_of(modicum, "save", tmp_path)
    weights = [(file, name, end) for file, name, _, end in tensors_of(step) if file.parent == step]
    words = ("convert", step, tmp_path / "out", "--shard-size", 1000)
    file, name, end = weights[-1]
    flip_bit(file, end - 1)
    mtime_ns = file.stat().st_mtime_ns
    assert failure(modicum, 12, *words)["tensor"] == name
    flip_bit(file, end - 1)
    os.utime(file, ns=(mtime_ns, mtime_ns))  # files of another time are converted from the start
    done = run_json(modicum, *words)
    assert done["kept_files"] > 0 and name not in done["not_compared"]
    assert done["compared_bytes"] < done["checkpoint"]["bytes"]
    assert set(done["not_compared"]) < {of for _, of, _ in weights}
