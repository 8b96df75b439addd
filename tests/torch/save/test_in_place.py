"""Memory that a save reads stays where it is: the calls of torch that move or free it wait.

Catches: a call that does not wait.
"""

import os
import threading
from collections.abc import Callable

import pytest

pytest.importorskip("torch")

import torch

from modicum.upstream.torch_storages import KNOWN, StoragesInPlace

MOVES: dict[str, Callable] = {
    "Tensor.share_memory_": lambda tensor: tensor.share_memory_(),
    "UntypedStorage.share_memory_": lambda tensor: tensor.untyped_storage().share_memory_(),
    "a queue": lambda tensor: torch.multiprocessing.reductions.reduce_storage(
        tensor.untyped_storage()
    ),
    "Tensor.resize_": lambda tensor: tensor.resize_(1000),
    "Tensor.resize_as_": lambda tensor: tensor.resize_as_(torch.zeros(1000)),
    "torch.resize_as_": lambda tensor: torch.resize_as_(tensor, torch.zeros(1000)),
    "UntypedStorage.resize_": lambda tensor: tensor.untyped_storage().resize_(0),
    "TypedStorage.resize_": lambda tensor: tensor.storage().resize_(0),
    "set_ of another tensor": lambda tensor: torch.zeros(0).set_(
        tensor.untyped_storage(), 0, (1000,)
    ),
}


@pytest.mark.parametrize("name", MOVES)
def test_another_thread_waits(name: str) -> None:
    tensor = torch.arange(100.0)
    begin = tensor.untyped_storage().data_ptr()
    before = [vars(owner).copy() for owner in (torch.Tensor, torch.UntypedStorage, torch)]
    in_place = StoragesInPlace([("weight", tensor[:50]), ("step", 3)], lambda: None)
    thread = threading.Thread(target=MOVES[name], args=(tensor,))
    try:
        thread.start()
        thread.join(0.1)
        assert thread.is_alive(), "the call did not wait"
        assert tensor.untyped_storage().data_ptr() == begin and in_place.moved() is None
    finally:
        in_place.release()
    thread.join()
    assert tensor.untyped_storage().data_ptr() != begin
    after = [vars(owner).copy() for owner in (torch.Tensor, torch.UntypedStorage, torch)]
    assert before == after, "a replaced function stays"


@pytest.mark.parametrize("name", MOVES)
def test_the_own_thread_settles(name: str) -> None:
    """It does not wait for another thread: it may be the one that releases the memory."""
    tensor, other = torch.zeros(100), torch.zeros(100)
    settled: list[str] = []
    in_place = StoragesInPlace([("weight", tensor)], lambda: settled.append("settled"))
    try:
        MOVES[name](other)
        assert settled == [], "a call for other memory was delayed"
        MOVES[name](tensor)
        assert settled
    finally:
        in_place.release()


def test_moves_past_the_functions_are_noticed() -> None:
    tensor = torch.zeros(100)
    in_place = StoragesInPlace([("weight", tensor)], lambda: None)
    try:
        torch.ops.aten.resize_(tensor, [100_000])
        assert in_place.moved() == "weight"
    finally:
        in_place.release()


def test_a_forked_child_does_not_wait() -> None:
    tensor = torch.zeros(100)
    in_place = StoragesInPlace([("weight", tensor)], lambda: os._exit(1))
    try:
        child = os.fork()
        if child == 0:
            tensor.resize_(1000)
            os._exit(0)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    finally:
        in_place.release()


def test_torch_behaves_as_expected() -> None:
    assert KNOWN.mismatch() == ""
