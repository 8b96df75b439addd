"""A program that `test_adamw_binding.py` runs under glibc's heap checks: memory of parameters,
gradients and state is freed before a step and between steps. Prints `done`, or dies of a signal."""

import copy
import functools
import sys
from collections.abc import Callable
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing  # tells ForkingPickler of tensors
from rounding import nearest_sqrt
from safetensors.torch import save_file
from torch import nn

import modicum.torch

torch.set_num_threads(1)


class Model(nn.Module):
    """A model whose tensors have sizes of the heap's small and large blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.small = nn.Linear(5, 7)
        self.large = nn.Linear(7, 40_000)
        self.conv = nn.Conv2d(3, 5, 3)

    def loss(self) -> Any:
        image = torch.arange(75.0).view(1, 3, 5, 5) / 75
        return self.large(self.small(torch.ones(5))).sin().sum() + self.conv(image).sin().sum()


def made(memory: str, folder: Path) -> Model:
    """A model in torch's own memory, or in memory of `modicum.torch.load`."""
    torch.manual_seed(0)
    model = Model()
    if memory == "modicum":
        file = folder / "model.safetensors"
        if not file.exists():
            save_file({name: p.detach() for name, p in model.named_parameters()}, file)
        with torch.device("meta"):
            model = Model()
        modicum.torch.load(model, file, progress=False)
    return model


# ---- ways to free memory. After `free` or `shorten`, do not read the tensor.


def share(model: Model) -> None:
    model.share_memory()


def share_one(model: Model) -> None:
    model.large.weight.share_memory_()


def send(model: Model) -> None:
    """Pickles a tensor as the sender of a torch.multiprocessing queue does."""
    ForkingPickler.dumps(model.large.bias)


def take_data(model: Model) -> None:
    model.large.weight.data = model.large.weight.data.clone()


def set_other(model: Model) -> None:
    with torch.no_grad():
        model.small.weight.set_(model.small.weight.clone())


def swap(model: Model) -> None:
    torch.utils.swap_tensors(model.conv.bias, nn.Parameter(torch.ones(5)))


def channels_last(model: Model) -> None:
    model.conv.to(memory_format=torch.channels_last)


def resize_there_and_back(model: Model) -> None:
    for p in model.parameters():
        values, storage = p.detach().clone(), p.untyped_storage()
        size = storage.nbytes()
        storage.resize_(0)
        storage.resize_(size)
        p.data.copy_(values)


def free(model: Model) -> None:
    model.large.bias.untyped_storage().resize_(0)


def shorten(model: Model) -> None:
    model.large.weight.untyped_storage().resize_(64)


# Changes that an optimizer follows if it has made no step yet: it steps the new memory.
FOLLOWED = [
    share, share_one, send, take_data, set_other, swap, channels_last, resize_there_and_back,
]  # fmt: skip
FREED = [free, shorten]  # changes after which every call must be refused


def refused(call: Callable[[], Any], names: str, after: Any = None) -> None:
    """Asserts that the call raises UsageError with the text `names`. `after`: the change that was
    made before the call; the assertion's message names it."""
    try:
        call()
    except modicum.UsageError as error:
        assert names in str(error), error
        return
    raise AssertionError(f"{call} after {after} is not refused: {names}")


def steps(model: Model, optimizer: Any, count: int) -> None:
    with nearest_sqrt():
        for _ in range(count):
            model.loss().backward()
            optimizer.step()
            optimizer.zero_grad()


def parameters_move(memory: str, folder: Path) -> None:
    for change in FOLLOWED:
        if memory == "modicum" and change is resize_there_and_back:
            continue  # torch refuses to resize Modicum's memory
        mine, theirs = made(memory, folder), made("torch", folder)
        ours = modicum.torch.AdamW(mine.named_parameters(), lr=1e-2)
        torchs = torch.optim.AdamW(theirs.parameters(), lr=1e-2)
        for model in (mine, theirs):
            change(model)
        steps(mine, ours, 2)
        steps(theirs, torchs, 2)
        for name, p in mine.named_parameters():
            assert torch.equal(p, theirs.get_parameter(name)), (change.__name__, name)
        mine = made(memory, folder)
        ours = modicum.torch.AdamW(mine.named_parameters(), lr=1e-2)
        steps(mine, ours, 2)
        before = [p.data_ptr() for p in mine.parameters()]
        change(mine)
        if change is resize_there_and_back and before == [p.data_ptr() for p in mine.parameters()]:
            steps(mine, ours, 1)  # the allocator has returned the same addresses
            continue
        for call in (ours.step, ours.state_dict, ours.digest):
            refused(call, "for which AdamW has state", change)


def parameters_are_freed(memory: str, folder: Path) -> None:
    for change in FREED if memory == "torch" else ():
        for count in (0, 2):
            model = made(memory, folder)
            ours = modicum.torch.AdamW(model.named_parameters())
            steps(model, ours, count)
            model.loss().backward()
            change(model)
            clip = functools.partial(ours.clip_grad_norm_, 1.0)
            for call in (ours.step, ours.state_dict, ours.digest, clip):
                refused(call, "large.")
        refused(lambda: modicum.torch.AdamW(model.named_parameters()), "large.")


def gradients_go(memory: str, folder: Path) -> None:
    mine, theirs = made(memory, folder), made("torch", folder)
    ours = modicum.torch.AdamW(mine.named_parameters(), lr=1e-2)
    torchs = torch.optim.AdamW(theirs.parameters(), lr=1e-2)
    with nearest_sqrt():
        for model, optimizer in ((mine, ours), (theirs, torchs)):
            for _ in range(3):
                model.loss().backward()
                model.large.weight.grad.share_memory_().mul_(2)
                optimizer.step()
                optimizer.zero_grad()
    for name, p in mine.named_parameters():
        assert torch.equal(p, theirs.get_parameter(name)), name
    for p in mine.parameters():
        mine.loss().backward()
        p.grad = p.grad.clone()
        p.grad.untyped_storage().resize_(0)
        refused(ours.step, "gradient has lost its memory")
        p.grad = None
    steps(mine, ours, 2)


def state_moves(memory: str, folder: Path) -> None:
    mine, theirs = made(memory, folder), made("torch", folder)
    ours = modicum.torch.AdamW(mine.named_parameters(), lr=1e-2)
    torchs = torch.optim.AdamW(theirs.parameters(), lr=1e-2)
    for model, optimizer in ((mine, ours), (theirs, torchs)):
        steps(model, optimizer, 2)
        for entry in optimizer.state.values():
            for value in entry.values():
                value.share_memory_()
        steps(model, optimizer, 2)
    for name, p in mine.named_parameters():
        assert torch.equal(p, theirs.get_parameter(name)), name
    kept = copy.deepcopy(ours.state_dict())
    ours.state[mine.large.bias]["exp_avg"] = freed = torch.ones(40_000)
    freed.untyped_storage().resize_(0)
    refused(ours.step, "large.bias")
    ours.state.clear()
    ours.load_state_dict(kept)
    steps(mine, ours, 1)


if __name__ == "__main__":
    parameters_move(sys.argv[1], Path(sys.argv[2]))
    parameters_are_freed(sys.argv[1], Path(sys.argv[2]))
    gradients_go(sys.argv[1], Path(sys.argv[2]))
    state_moves(sys.argv[1], Path(sys.argv[2]))
    print("done")
