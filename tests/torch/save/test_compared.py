"""`modicum.torch.load` and `resume` compare what they read of a saved checkpoint
with the checkpoint's record, and so does `modicum resume` of a checkpoint that Python has saved.

Catches: values of the weights, or of the state, are not compared; a part that two ranks divide is
not compared; the report counts no bytes; an error names the weights' file for the state's.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

import torch_front  # noqa: E402
from program import failure, flip_bit, header_of, run_json  # noqa: E402
from ranks import Ranks  # noqa: E402
from sharding import Cut  # noqa: E402

import modicum.torch as front  # noqa: E402
from modicum.errors import IntegrityError  # noqa: E402

OPTIMIZERS = ("fp32-split", pytest.param("int8-moments", marks=pytest.mark.soak), "torch")


def trained(name: str, optimizer: str) -> tuple[Any, Any]:
    model = torch_front.empty(name)
    front.load(model, torch_front.checkpoint_of(name), progress=False)
    made = optimizer_of(model, optimizer)
    for of, parameter in model.named_parameters():
        grad = torch_front.whole_gradient(of, parameter.shape, 0)
        parameter.grad = grad.to(parameter.dtype)
    made.step()
    return model, made


def optimizer_of(model: Any, optimizer: str) -> Any:
    if optimizer == "torch":
        return torch.optim.AdamW(model.parameters())
    return front.AdamW(model.named_parameters(), state_format=optimizer)


def tensors_of(step: Path) -> Iterator[tuple[Path, str, int, int]]:
    """(file, name, begin and end in the file) of each tensor."""
    for file in sorted(step.rglob("*.safetensors")):
        header, data = header_of(file)
        for name, of in header.items():
            if name != "__metadata__" and file.parent.name != "extra":
                begin, end = of["data_offsets"]
                yield file, name, data + begin, data + end


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_flipped_bit_is_found(tmp_path: Path, modicum: Path, optimizer: str) -> None:
    model, made = trained("llama", optimizer)
    front.save(model, tmp_path, step=1, optimizer=made)
    step = tmp_path / "step-1"
    model = torch_front.empty("llama")
    made = optimizer_of(model, optimizer)
    report = front.resume(model, step, optimizer=made, progress=False)
    # Stored buffers that the model computes are not read.
    assert all(name.endswith("inv_freq") for name in report.not_compared)
    tensors = [of for of in tensors_of(step) if of[1] not in report.not_compared]
    assert {file.parent.name for file, *_ in tensors} == {"step-1", "optimizer"}
    weights = sum(end - begin for file, _, begin, end in tensors if file.parent == step)
    assert report.load.compared_bytes == weights
    assert report.compared_bytes == sum(end - begin for _, _, begin, end in tensors)
    for number, (file, name, begin, end) in enumerate(tensors):
        at = begin + (end - begin) * (number % 7) // 7
        flip_bit(file, at, number % 8)
        model = torch_front.empty("llama")
        with pytest.raises(IntegrityError) as raised:
            if file.parent == step and number % 2 == 0:
                front.load(model, step, progress=False)
            else:
                made = optimizer_of(model, optimizer)
                front.resume(model, step, optimizer=made, progress=False)
        assert raised.value.tensor == name
        assert raised.value.file == str(file.relative_to(step))
        if optimizer != "torch" and number % 4 == 0:
            error = failure(modicum, 12, "resume", step, "--ranks", 2)
            assert (error["tensor"], error["file"]) == (name, raised.value.file)
        flip_bit(file, at, number % 8)


def test_texts_are_compared_by_load(tmp_path: Path) -> None:
    model, made = trained("llama", "torch")
    front.save(model, tmp_path, step=1, optimizer=made)
    step = tmp_path / "step-1"
    for name in ("config.json", "optimizer/state.json", "manifest.json"):
        flip_bit(step / name, 5)
        with pytest.raises(IntegrityError) as raised:
            front.load(torch_front.empty("llama"), step, progress=False)
        assert raised.value.file == name
        flip_bit(step / name, 5)


def test_a_chunk_that_ranks_divide_is_compared(two: Ranks, tmp_path: Path, modicum: Path) -> None:
    """Each tensor is one chunk, of which every rank reads a part."""
    directory, root = str(tmp_path / "model"), tmp_path / "root"
    two.ask("write", directory=directory, family="llama", config={}, dtype="float32")
    how = {"directory": directory, "root": str(root), "cut": Cut("fsdp2", (2,))}
    two.ask("saves", **how)
    step = root / "step-2"
    for answer in two.ask("compares", **how):
        tensors = [of for of in tensors_of(step) if of[1] not in answer["not_compared"]]
        assert answer["compared_bytes"] == sum(end - begin for _, _, begin, end in tensors)
        assert all(name.endswith("inv_freq") for name in answer["not_compared"])
    for folder in ("step-2", "optimizer"):
        of = [one for one in tensors if one[0].parent.name == folder]
        file, name, begin, _ = max(of, key=lambda one: one[3] - one[2])
        flip_bit(file, begin + 1)
        for answer in two.ask("compares", **how):
            assert answer["error"] == "IntegrityError"
            assert name in answer["message"] and file.name in answer["message"]
        flip_bit(file, begin + 1)
    assert run_json(modicum, "verify", root)["ok"]
