"""Worlds that tests borrow one after another (tests/support/ranks.py): a failure in one act is
reported, and neither a failure nor what an act leaves behind reaches the next act."""

import os
import random
import signal
import socket
import sys
import threading
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

import ranks
import torch
import torch.distributed as dist
from ranks import GONE, Failed, Pool, Ranks, forked, start
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from modicum.torch.optim import in_flight
from modicum.torch.ranks import exchange

seen: list[int] = []


def sees() -> list[int]:
    """Counts the calls, in a variable of this module."""
    seen.append(len(seen))
    return seen


def preloaded(line: Any) -> None:
    line.send("torch_rank" in sys.modules)


def test_forked_ranks_start_with_their_imports() -> None:
    """Otherwise each rank would spend seconds to import torch and transformers."""
    process, line = start(forked, preloaded)
    assert line.recv()
    process.join()


def where() -> int:
    print(f"rank {dist.get_rank()} is here")
    return os.getpid()


def test_the_next_borrower_gets_the_same_processes(pool: Pool) -> None:
    """With new logs, and without the variables of test modules."""
    with pool.lend(2) as first:
        pids = first.ask(where)
        assert first.ask(sees) == [[0]] * 2 and first.ask(sees) == [[0, 1]] * 2
    with pool.lend(2) as second:
        assert second is first and second.ask(where) == pids
        assert second.ask(sees) == [[0]] * 2
        log = (second.folder / "rank-1.log").read_text()
        assert log == "rank 1 is here\n"
        with pool.lend(2) as other:
            assert not set(other.ask(where)) & set(pids)


# ---- acts that fail


def fails_or_hangs() -> None:
    if dist.get_rank() == 0:
        raise ZeroDivisionError("by this rank")
    hangs()


def hangs() -> None:
    time.sleep(600)


def test_a_hang_after_a_failure_ends_and_is_reported(
    two: Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the traceback of the rank that failed and the stack of the one that hangs."""
    monkeypatch.setattr(ranks, "LEFT_ALONE_S", 1.0)
    pids = two.ask(where)
    with pytest.raises(AssertionError, match=r"no answer from ranks \[1\]") as met:
        two.ask(fails_or_hangs)
    text = str(met.value)
    assert 'raise ZeroDivisionError("by this rank")' in text and "in hangs" in text
    assert all(not process.is_alive() for process in two.processes)
    assert not set(two.ask(where)) & set(pids)


@pytest.mark.parametrize("within_s", (0.5,))
def test_a_hang_of_all_ranks_ends(two: Ranks, within_s: float) -> None:
    two.tell(hangs)
    with pytest.raises(AssertionError, match=r"no answer from ranks \[0, 1\]"):
        two.hear(within_s)
    assert len(two.ask(where)) == 2


def fails() -> None:
    raise ZeroDivisionError


def test_after_a_failure_the_processes_are_others(two: Ranks) -> None:
    pids = two.ask(where)
    two.tell(fails)
    assert all(isinstance(answer, Failed) for answer in two.hear())
    assert not set(two.ask(where)) & set(pids)


def test_after_a_kill_the_processes_are_others(two: Ranks) -> None:
    pids = two.ask(where)
    two.tell(hangs)
    two.kill(0)
    two.kill(1)
    assert two.hear() == [GONE, GONE]
    assert not set(two.ask(where)) & set(pids)


def test_an_act_whose_end_no_test_has_heard_does_not_go_on(two: Ranks) -> None:
    """As if an assertion before `hear` has failed."""
    pids = two.ask(where)
    two.tell(hangs)
    assert not set(two.ask(where)) & set(pids)


# ---- what acts leave behind


def leaves_much(folder: str) -> int:
    os.environ["LEFT"] = "behind"
    os.chdir(folder)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    warnings.simplefilter("error")
    torch.set_num_threads(torch.get_num_threads() + 1)
    torch.use_deterministic_algorithms(True)
    torch.set_grad_enabled(False)
    socket.gethostname = lambda: "elsewhere"
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("one", "other"))
    placed = distribute_tensor(torch.arange(4.0), mesh["one"], [Shard(0)])
    assert (placed + placed).full_tensor().sum() == 12
    return len(dist.distributed_c10d._world.pg_map)


def state() -> dict[str, Any]:
    mesh = init_device_mesh("cpu", (2,))
    placed = distribute_tensor(torch.arange(4.0), mesh, [Shard(0)])
    return {
        "environment": dict(os.environ),
        "folder": os.getcwd(),
        "SIGTERM": signal.getsignal(signal.SIGTERM),
        "warnings": repr(warnings.filters),
        "threads": torch.get_num_threads(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "grad": torch.is_grad_enabled(),
        "host": socket.gethostname(),
        "random": (random.random(), torch.rand(1).item()),
        "sum": (placed + placed).full_tensor().sum().item(),
        "groups": len(dist.distributed_c10d._world.pg_map),
        "pid": os.getpid(),
    }


def test_an_act_begins_as_the_first_one_did(two: Ranks, tmp_path: Path) -> None:
    before = two.ask(state)
    assert two.ask(leaves_much, folder=str(tmp_path))[0] > before[0]["groups"]
    assert two.ask(state) == before


def leaves_a_dtype() -> None:
    torch.set_default_dtype(torch.float64)


def leaves_a_device() -> None:
    torch.set_default_device("meta")


def leaves_a_constant() -> None:
    exchange.PIECE_BYTES = 1


def leaves_a_method() -> None:
    exchange.Exchange.close = lambda self: None


def leaves_a_thread() -> None:
    threading.Thread(target=hangs, name="left").start()


def leaves_a_save() -> None:
    in_flight._now = object()  # type: ignore[assignment]


@pytest.mark.parametrize(
    ("act", "named"),
    [
        (leaves_a_dtype, "the default dtype torch.float64"),
        (leaves_a_device, "the default device meta"),
        (leaves_a_constant, "PIECE_BYTES of modicum.torch.ranks.exchange"),
        (leaves_a_method, "close of modicum.torch.ranks.exchange.Exchange"),
        (leaves_a_thread, "a thread left"),
        (leaves_a_save, "a save in the background"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_what_an_act_should_undo_is_named_and_ends_the_processes(
    two: Ranks, act: Callable[[], None], named: str
) -> None:
    pids = two.ask(where)
    two.ask(act)
    with pytest.warns(UserWarning, match=f"left behind rank 0: .*{named}.*rank 1: "):
        others = two.ask(where)
    assert not set(others) & set(pids)
