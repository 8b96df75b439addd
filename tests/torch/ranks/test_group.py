"""`Ranks`: barriers, gathers, failure propagation, liveness and byte transfers among the ranks of a
load, with real processes and signals.

Catches: a rank that leaves an exchange and keeps its connections; a failed rank 0 whose process,
which hosts the store, exits before the other ranks have read the error; a host that counts as lost
because one of its ranks is silent, or because of a short stop; a collective that returns while a
Gloo thread still holds the reduced tensor; an error about differing models without advice.
"""

import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from contextlib import ExitStack
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

pytest.importorskip("torch")

import torch
import torch.distributed as dist
from clocks import WaitingClock
from ranks import GONE, Failed, Pool, is_told, ready
from ranks import Ranks as World

import modicum
from modicum import _modicum
from modicum.errors import Error, IoError, PeerError, UsageError
from modicum.torch.ranks import collectives, exchange, group, liveness
from modicum.torch.ranks.group import Ranks
from modicum.torch.ranks.liveness import LOOK_S, SILENT_LOOKS, Neighbours, Process, ranks_per_node
from modicum.upstream.torch_distributed import default_store

ALL_KNOW_S = 10  # seconds within which every rank must have raised after a failure


class FakeBoard:
    """A stand-in for `_modicum.Board`, which has the progress and the failures of a load."""

    def __init__(self) -> None:
        self.progress = 0
        self.failures: list[tuple[str, int]] = []

    def fail(self, what: str, rank: int = -1) -> None:
        self.failures.append((what, rank))

    def load(self, seconds: float = 60, until: Callable[[], bool] = lambda: False) -> None:
        """Loads 1000 bytes every 0.01 s. Raises a failure that is reported to the board."""
        for _ in range(int(seconds * 100)):
            if until():
                return
            time.sleep(0.01)
            self.progress += 1000
            if self.failures:
                what, rank = self.failures[0]
                raise PeerError(f"PEER: rank {rank} failed: {what}")


def io_error() -> IoError:
    where = {"file": "a.safetensors", "offset": 8}
    document = {"category": "IO", "code": 13, "message": "IO: EIO (file a.safetensors)"} | where
    return modicum.errors.from_json(json.dumps({"error": document}))


def all_raise(heard: list[Any], error: str, culprit: int, **facts: Any) -> Failed:
    """Asserts that all ranks raised the same error with this culprit; returns rank 0's."""
    first = heard[0]
    for rank, one in enumerate(heard):
        assert isinstance(one, Failed), f"rank {rank}: {one}"
        assert (one.error, one.message, one.facts) == (error, first.message, first.facts), rank
    assert first.facts["culprit_rank"] == culprit
    assert {name: first.facts[name] for name in facts} == facts
    return first


@pytest.fixture(scope="module", autouse=True)
def clock() -> Iterator[WaitingClock]:
    with WaitingClock() as started:
        yield started


def slowest_s(clock: WaitingClock, failures: list[Failed], since_s: float) -> float:
    """Seconds until the last rank failed, on a clock that slows down with the machine."""
    return clock.seconds(since_s, max(one.at_s for one in failures))


# ---- a rank alone


def test_without_a_group_a_rank_is_alone() -> None:
    with Ranks.of_world().together() as ranks:
        assert (ranks.rank, ranks.world_size, ranks.ranks_per_node) == (0, 1, 1)
        ranks.agree("any")
        ranks.barrier()
        assert ranks.gather({"a": 1}) == [{"a": 1}]
        assert ranks.report("what it says") == "what it says"
    with pytest.raises(KeyError), Ranks.of_world().together():
        raise KeyError


def test_in_a_fake_group_every_rank_answers_like_this_one() -> None:
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=3, world_size=8)
    try:
        with Ranks.of_world().together() as ranks:
            assert (ranks.rank, ranks.world_size, ranks.ranks_per_node) == (3, 8, 8)
            ranks.agree("any")
            ranks.barrier()
            assert ranks.gather(5) == [5] * 8
            with pytest.raises(UsageError, match="fake"):
                ranks.broadcast(0, memoryview(bytearray(8)), 0, 8)
    finally:
        dist.destroy_process_group()


def test_a_group_without_a_store_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(dist.distributed_c10d, "_get_default_store")
    monkeypatch.setattr(dist, "get_backend", lambda: "mpi")
    with pytest.raises(UsageError, match=r"UNSUPPORTED: PyTorch \S+ shows no store.*mpi"):
        default_store()


def test_progress_is_reported_during_and_at_the_end_of_a_load() -> None:
    reported: list[int] = []
    board = FakeBoard()
    with Ranks.of_world().watching(board, reported.append):
        board.load(0.6)
    assert len(reported) >= 2
    assert reported == sorted(reported)
    assert reported[-1] == board.progress == 60_000


def test_an_exception_of_progress_ends_the_load() -> None:
    board = FakeBoard()
    with pytest.raises(Error, match="INTERNAL: ZeroDivisionError") as caught:
        with Ranks.of_world().watching(board, lambda done: 1 // (done - done)):
            board.load()
    assert caught.value.category == "INTERNAL"


# ---- hosts


def processes_on(*hosts: str) -> list[Process]:
    """The processes of ranks on these hosts, by rank."""
    return [Process("boot", host, 1, 100 + rank, "0") for rank, host in enumerate(hosts)]


@pytest.mark.parametrize(
    ("hosts", "per_node"),
    [("aabb", 2), ("abc", 1), ("aaa", 3), ("aab", None), ("abab", None), ("abba", None)],
)
def test_ranks_of_one_host_are_one_node(hosts: str, per_node: int | None) -> None:
    """Each letter is the host of a rank. None: the hosts have different numbers of ranks, or ranks
    that are not consecutive."""
    assert ranks_per_node(processes_on(*hosts)) == per_node


class Beats:
    """The heartbeats of all ranks; those of `silent` ranks do not advance. `read` counts reads."""

    def __init__(self, silent: set[int]) -> None:
        self.silent, self.now, self.read = silent, 0, 0

    def of(self, rank: int) -> int:
        self.read += 1
        return 0 if rank in self.silent else self.now


def first_lost(processes: list[Process], rank: int, beats: Beats, polls: int) -> tuple | None:
    """(a lost rank, the reason) that `rank` finds first in this number of polls, or None."""
    neighbours = Neighbours(processes, rank)
    for beats.now in range(polls):
        if lost := neighbours.check(beats.of):
            return lost
    return None


@pytest.mark.parametrize("hosts", ["abcd", "aabb", "aaab", "abab", "ab", "aaaabbbbccccdddd"])
def test_one_rank_of_another_host_notices_a_silent_host(hosts: str) -> None:
    """It names the first rank of the silent host. Each letter is the host of a rank."""
    processes = processes_on(*hosts)
    for host in set(hosts):
        silent = {rank for rank, name in enumerate(hosts) if name == host}
        lost = [
            first_lost(processes, rank, Beats(silent), 9)
            for rank in range(len(hosts))
            if rank not in silent
        ]
        assert [one[0] for one in lost if one] == [min(silent)]


def test_for_another_host_one_sign_of_life_suffices() -> None:
    """One silent rank is no loss: a rank increments no heartbeat while the kernel commits its
    memory. If all ranks of the other host are silent, it is lost."""
    assert first_lost(processes_on(*"aabb"), 0, Beats({2}), 30) is None
    assert first_lost(processes_on(*"aabb"), 0, Beats({2, 3}), SILENT_LOOKS) is None
    assert first_lost(processes_on(*"aabb"), 0, Beats({2, 3}), SILENT_LOOKS + 1) is not None


@pytest.mark.parametrize("hosts", ["a" * 5, "a" * 1000, "abc" * 300])
def test_no_rank_polls_all_ranks(hosts: str) -> None:
    """Each rank is polled by at most two others. If all ranks poll once, they read at most two
    heartbeats per rank. Here each rank polls twice."""
    processes = processes_on(*hosts)
    beats = Beats(set())
    for rank in range(len(hosts)):
        assert first_lost(processes, rank, beats, 2) is None
    assert beats.read <= 2 * 2 * len(hosts)


def test_ranks_of_this_host_are_checked_through_proc() -> None:
    """A silent process that runs is not lost. One that is stopped is lost once it is silent, and
    one that has ended is lost at once."""
    this = Process.this()
    sleeper = subprocess.Popen(["sleep", "60"])
    started = liveness._state_of(sleeper.pid)[1]
    both = [this, replace(this, pid=sleeper.pid, started=started)]
    try:
        assert first_lost(both, 0, Beats({1}), 30) is None
        neighbours = Neighbours(both, 0)
        sleeper.send_signal(signal.SIGSTOP)
        os.waitpid(sleeper.pid, os.WUNTRACED)
        polls = [neighbours.check(Beats({1}).of) for _ in range(SILENT_LOOKS + 1)]
        assert polls == [None] * SILENT_LOOKS + [(1, "is stopped")]
    finally:
        sleeper.kill()
    os.waitid(os.P_PID, sleeper.pid, os.WEXITED | os.WNOWAIT)
    assert neighbours.check(Beats(set()).of) == (1, "is gone")  # not reaped yet
    sleeper.wait()
    assert neighbours.check(Beats(set()).of) == (1, "is gone")
    # A process with the same pid and another start time is another process.
    assert replace(this, started="1").condition() == "is gone"


def test_a_rank_of_a_large_world_polls_less_often() -> None:
    """In a world of 1000 the pauses between polls grow to 0.2 s. The wait ends with a failure after
    1 s."""
    polls = []
    ranks = Ranks(1, 1000)
    threading.Timer(
        1,
        lambda: ranks._fail(
            json.dumps({"error": {"category": "IO", "code": 13, "message": "m", "culprit_rank": 0}})
        ),
    ).start()
    with pytest.raises(IoError):
        ranks._until(lambda: polls.append(1))
    assert len(polls) < 25


# ---- agreement


def agreeing(digests: str) -> Any:
    """Each letter is the digest of a rank."""
    rank = dist.get_rank()
    with Ranks.of_world().together() as ranks:
        ranks.agree(digests[rank])
        return ranks.gather([rank, "x" * rank]), ranks.ranks_per_node


def test_ranks_that_agree_continue(three: World) -> None:
    everything = [[0, ""], [1, "x"], [2, "xx"]]
    assert three.ask(agreeing, digests="ddd") == [(everything, 3)] * 3


def agreeing_by_a_file(store: str) -> Any:
    """In a new group, whose store is a file."""
    rank, world = dist.get_rank(), dist.get_world_size()
    dist.destroy_process_group()
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
    return agreeing("d" * world)


def test_a_file_may_be_the_store(two: World, tmp_path: Path) -> None:
    two.tell(agreeing_by_a_file, store=str(tmp_path / "store"), exits=True)
    assert two.hear()[1] == ([[0, ""], [1, "x"]], 2)


def test_ranks_that_disagree_all_name_the_culprit(four: World) -> None:
    four.tell(agreeing, digests="ddef")
    facts = {"category": "CONFLICT", "code": 20, "expected": "d", "got": "e"}
    error = all_raise(four.hear(), "IoError", 2, **facts)
    what = "rank 2 (and 1 more) has other inputs than rank 0"
    assert error.message == f"CONFLICT: {what} (expected d, got e)"


def agreeing_on(facts: list[dict[str, str]]) -> str:
    """The error."""
    with pytest.raises(IoError) as caught, Ranks.of_world().together() as ranks:
        ranks.agree_on(facts[dist.get_rank()])
    assert (caught.value.category, caught.value.culprit_rank) == ("CONFLICT", 1)
    return str(caught.value)


@pytest.mark.parametrize(
    ("second", "words"),
    [
        ({"tensor a": "f32 [2]"}, "tensor b: models that differ by rank are read by modicum."),
        ({"tensor a": "f32 [2] on meta", "tensor b": "f32 [1]"}, "tensor a: build the model under"),
        ({"tensor a": "f16 [2]", "tensor b": "f32 [1]"}, "tensor a: build the same model, with"),
        ({"tensor b": "f32 [1]", "tensor a": "f32 [2]"}, "the order of tensors: build the same"),
        ({"argument a": "1"}, "argument a (expected none, got 1)"),
    ],
    ids=("lacks", "meta", "dtype", "order", "argument"),
)
def test_the_error_says_what_to_do_about_models_that_differ(
    two: World, second: dict[str, str], words: str
) -> None:
    """Rank 1 has the facts `second`. An argument that differs gets no advice."""
    first = {"tensor a": "f32 [2]", "tensor b": "f32 [1]"}
    if "argument a" in second:
        second = second | first
    for error in two.ask(agreeing_on, facts=[first, second]):
        assert error.startswith(f"CONFLICT: rank 1 differs from rank 0 in {words}")


def reducing() -> Any:
    """Returns how often, in 300 tries, a Gloo thread held the tensor after the collective."""
    held = 0
    # On a busy machine a thread may need long to drop its reference.
    with patch.object(collectives, "LIMIT_S", 60):
        for _ in range(300):
            tensor = torch.ones(4)
            before = sys.getrefcount(tensor)
            collectives.settled(dist.all_reduce, tensor)
            held += sys.getrefcount(tensor) > before
            assert tensor.tolist() == [2.0] * 4
    return held


def test_a_reduced_tensor_is_not_left_to_a_thread_of_gloo(two: World) -> None:
    """A process that exits while such a thread still holds a tensor may abort."""
    assert two.ask(reducing) == [0, 0]


def brought(rank: int) -> str:
    """A text of 16 MiB, which the store compresses to a little more than 8 MiB."""
    return random.Random(rank).randbytes(8 << 20).hex()


def bringing_much() -> Any:
    with Ranks.of_world().together() as ranks:
        return [ranks.gather(brought(ranks.rank)) == [brought(0), brought(1)], ranks.gather("y")]


def test_gathered_values_may_exceed_the_stores_message_limit(two: World) -> None:
    """A TCPStore closes the connection on a message of more than 8 MiB."""
    assert two.ask(bringing_much)[1] == [True, ["y", "y"]]


# ---- failures


def one_fails(culprit: int, raised: BaseException) -> Any:
    """The rank `culprit` raises. Each of the other ranks waits in a way of its own."""
    with Ranks.of_world().together() as ranks:
        ranks.exchange_among(range(ranks.world_size), whole=True)
        if ranks.rank == culprit:
            ready()
            time.sleep(0.5)
            raise raised
        board = FakeBoard()
        waits = [
            ranks.barrier,
            lambda: ranks.gather(1),
            board.load,
            lambda: ranks.broadcast(culprit, memoryview(bytearray(64)), 0, 64),
        ]
        with ranks.watching(board):
            waits[ranks.rank]()


@pytest.mark.parametrize("culprit", [0, 1, 2])
def test_a_failure_reaches_all_as_the_same_error(
    clock: WaitingClock, four: World, culprit: int
) -> None:
    """Even if rank 0 fails, whose process hosts the store and exits."""
    four.tell(one_fails, culprit=culprit, raised=io_error(), exits=True)
    pid = four.pids[culprit]
    four.await_ready(culprit)
    since_s = time.monotonic()
    heard = four.hear()
    facts = {"category": "IO", "code": 13, "file": "a.safetensors", "offset": 8}
    error = all_raise(heard, "IoError", culprit, culprit_pid=pid, rank=culprit, **facts)
    assert error.message == f"IO: EIO (file a.safetensors) (rank {culprit})"
    assert slowest_s(clock, heard, since_s) < ALL_KNOW_S


def test_an_exception_that_is_no_modicum_error_keeps_its_type_on_its_own_rank(
    three: World,
) -> None:
    """The other ranks raise an `Error` with the exception's first line."""
    three.tell(one_fails, culprit=1, raised=ValueError("no such\nthing"), exits=True)
    first, own, last = three.hear()
    assert (own.error, own.message, own.facts) == ("ValueError", "no such\nthing", {})
    error = all_raise([first, last], "Error", 1, category="INTERNAL")
    assert error.message == "INTERNAL: ValueError: no such (rank 1)"


def all_fail() -> Any:
    """Rank 0 raises ValueError, the others IoError."""
    with Ranks.of_world().together() as ranks:
        ranks.barrier()
        raise io_error() if ranks.rank else ValueError("rank 0's")


def test_of_several_failures_all_ranks_raise_the_first(three: World) -> None:
    three.tell(all_fail, exits=True)
    heard = three.hear()
    if heard[1].facts["culprit_rank"] == 0:
        assert heard[0].error == "ValueError"  # on its own rank an exception is unchanged
        all_raise(heard[1:], "Error", 0)
    else:
        all_raise(heard, "IoError", heard[1].facts["culprit_rank"])


def failing_then_not() -> Any:
    """Three loads, of which rank 1 fails in the second. Returns ((index of the failed load, the
    error's culprit), number of new threads)."""
    before = threading.active_count()
    for turn in range(3):
        try:
            with Ranks.of_world().together() as ranks:
                if turn == 1 and ranks.rank == 1:
                    raise io_error()
                ranks.agree(str(turn))
        except IoError as error:
            failed = turn, error.culprit_rank
    return failed, threading.active_count() - before


def test_a_failed_load_does_not_affect_the_next(two: World) -> None:
    for failed, threads in two.ask(failing_then_not):
        assert failed == (1, 1)
        assert threads < 3, "threads are left"


def waiting(how: str) -> Any:
    """Ranks that wait until a signal ends one of them. "whole" or "parts": for bytes of rank 0 that
    never come. "": in a barrier, and rank 0 in a gather."""
    with Ranks.of_world().together() as ranks:
        ranks.exchange_among(range(ranks.world_size), whole=how == "whole")
        ranks.barrier()
        ready()
        if how in ("whole", "parts"):
            if ranks.rank == 0:
                time.sleep(60)
            ranks.broadcast(0, memoryview(bytearray(64)), 0, 64)
        elif ranks.rank == 0:
            ranks.gather(1)
        ranks.barrier()
        time.sleep(60)


@pytest.mark.parametrize("how", ["", "whole", "parts"])
def test_ctrl_c_on_a_waiting_rank_ends_the_load_on_all(
    clock: WaitingClock, three: World, how: str
) -> None:
    three.tell(waiting, how=how)
    three.await_ready()
    time.sleep(0.5)
    three.kill(1, signal.SIGINT)
    since_s = time.monotonic()
    first, own, last = three.hear(without=(0,) if how else ())
    assert own.error == "KeyboardInterrupt"
    others = [last] if how else [first, last]
    error = all_raise(others, "Error", 1, category="CANCELLED", code=130)
    assert error.message == "CANCELLED: interrupted (rank 1)"
    assert slowest_s(clock, others, since_s) < ALL_KNOW_S


# ---- ranks that die or stop


def test_a_killed_rank_is_named(clock: WaitingClock, four: World) -> None:
    four.tell(waiting, how="")
    four.await_ready()
    pid = four.pids[2]
    four.kill(2)
    since_s = time.monotonic()
    heard = four.hear()
    assert heard.pop(2) == GONE
    error = all_raise(heard, "PeerError", 2, category="PEER", culprit_pid=pid)
    assert error.message == f"PEER: rank 2 (pid {pid}) is gone"
    assert slowest_s(clock, heard, since_s) < 5


ELSEWHERE = ["a", "b", "c"]
# By the text of the error: the lost rank, and the ranks' host names. With host names the rank is
# killed; without, on one host, it is stopped. Rank 0 has the store.
LOST = {
    "is stopped": (2, None),
    "has given no sign of life": (2, ELSEWHERE),
    "hosted by rank 0, does not answer": (0, None),
    "hosted by rank 0, is lost": (0, ELSEWHERE),
}
STOP_S = 2.5  # a neighbour polls at least twice meanwhile
# A rank is lost after SILENT_LOOKS polls, one a second, with the same heartbeat. The last heartbeat
# may be 1 s older than the stop.
TOLERATED_S = 4
TRIES = 4


def loading_until_told() -> Any:
    with Ranks.of_world().together() as ranks:
        board = FakeBoard()
        ready()
        with ranks.watching(board):
            board.load(until=is_told)
        return "fine"


@pytest.fixture(scope="module")
def lost(pool: Pool) -> Iterator[dict[str, tuple[World, float]]]:
    """By the text of the error: a world, and when one of its ranks was killed or stopped. These
    tests take long, so all worlds start at once, and other tests run meanwhile."""
    with ExitStack() as stack:
        done = {}
        for name, (rank, hosts) in LOST.items():
            world = stack.enter_context(pool.lend(3))
            world.tell(loading_until_told, hosts=hosts)
            world.await_ready()
            world.kill(rank, signal.SIGKILL if hosts else signal.SIGSTOP)
            done[name] = world, time.monotonic()
        yield done


def stopped_for_s(world: World, rank: int) -> float:
    """Stops a rank for about STOP_S. Returns the real time that passed."""
    world.kill(rank, signal.SIGSTOP)
    begin_s = time.monotonic()
    time.sleep(STOP_S)
    world.kill(rank, signal.SIGCONT)
    return time.monotonic() - begin_s


@pytest.mark.usefixtures("lost")  # starts the worlds of the slow tests, which then run meanwhile
@pytest.mark.parametrize(
    ("rank", "hosts"), [(1, None), (0, ELSEWHERE)], ids=["a rank", "with the store"]
)
def test_a_short_stop_is_tolerated(three: World, rank: int, hosts: list[str] | None) -> None:
    """On a busy machine a stop may last longer than requested. Therefore its real time is measured,
    and a try with a longer stop does not count."""
    stops_s = []
    for _ in range(TRIES):
        three.tell(loading_until_told, hosts=hosts)
        three.await_ready()
        stops_s.append(stopped_for_s(three, rank))
        if stops_s[-1] < TOLERATED_S:
            time.sleep(LOOK_S)
            three.let_go_on()
            assert three.hear() == ["fine"] * 3, stops_s
            return
    pytest.fail(f"the machine is too busy: stops took {stops_s} s, expected < {TOLERATED_S} s")


@pytest.mark.parametrize("name", LOST)
def test_a_killed_or_stopped_rank_is_reported(
    clock: WaitingClock, lost: dict[str, tuple[World, float]], name: str
) -> None:
    world, since_s = lost[name]
    culprit = LOST[name][0]
    heard = world.hear(without=(culprit,))
    assert heard.pop(culprit) == GONE
    for one in heard:
        assert isinstance(one, Failed), one
        assert (one.error, one.facts["category"]) == ("PeerError", "PEER")
        assert one.facts["culprit_rank"] == culprit
        assert one.facts["culprit_pid"] == world.pids[culprit]
        assert name in one.message
    assert slowest_s(clock, heard, since_s) < ALL_KNOW_S


def test_under_torchrun_no_rank_has_the_store(monkeypatch: pytest.MonkeyPatch) -> None:
    """torchrun's agent has it, so that no rank is to blame for its loss."""
    assert Ranks(1, 2)._losing_the_store("is lost").culprit_rank == 0
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    assert Ranks(1, 2)._losing_the_store("is lost").culprit_rank is None


def coming_or_not() -> Any:
    dist.barrier()
    dist.distributed_c10d._get_default_store().set_timeout(timedelta(seconds=3))
    if dist.get_rank() == 1:
        time.sleep(60)
    with patch.object(group, "SAY_S", 1.0), Ranks.of_world().together():
        return None


def test_an_absent_rank_is_named_after_the_groups_timeout(three: World) -> None:
    three.tell(coming_or_not)
    first, _, last = three.hear(without=(1,))
    error = all_raise([first, last], "PeerError", 1, category="PEER")
    assert error.message == "PEER: rank 1 did not join the call within 3 s"
    assert three.logs().count("modicum: rank 0 waits for rank 1 to make the same call") == 1


# ---- bytes

PIECE_BYTES, PIECES_AHEAD = 4096, 3  # small, so that some of SIZES are sent in several pieces
SIZES = (1, 7, 4095, 4096, 4097, 12288, 100_001)


def pattern(size: int, seed: int) -> torch.Tensor:
    return torch.arange(seed, seed + size, dtype=torch.int64).mul_(2654435761).to(torch.uint8)


def part_of(size: int, places: int, place: int) -> tuple[int, int]:
    """The bytes [begin, end) that the rank at index `place` of `places` needs. Neighbouring parts
    overlap; the last rank needs no bytes."""
    if place == places - 1:
        return 0, 0
    return size * place // places, min(size, size * (place + 1) // places + 5)


def exchanging(members: list[int], whole: bool) -> Any:
    """Each member sends bytes of all SIZES. Returns the number of broadcasts that were checked."""
    with (
        patch.multiple(exchange, PIECE_BYTES=PIECE_BYTES, PIECES_AHEAD=PIECES_AHEAD),
        Ranks.of_world().together() as ranks,
    ):
        if ranks.rank not in members:
            return 0
        ranks.exchange_among(members, whole=whole)
        place, places = members.index(ranks.rank), len(members)
        for size in SIZES:
            for root in range(places):
                sent = pattern(size, root)
                buffer = bytearray(sent.numpy() if place == root else size)
                begin, end = (0, 1 << 64) if whole else part_of(size, places, place)
                ranks.broadcast(root, memoryview(buffer), begin, end)
                got = torch.frombuffer(buffer, dtype=torch.uint8)[begin : min(end, size)]
                assert torch.equal(got, sent[begin : min(end, size)]), (size, root)
        ranks.broadcast(0, memoryview(bytearray()), 0, 0)
        return len(SIZES) * places


@pytest.mark.parametrize("whole", [True, False])
@pytest.mark.parametrize("members", [[0, 1], [1, 2, 3], [0, 1, 2, 3]])
def test_bytes_arrive_from_every_root(
    worlds: dict[int, World], members: list[int], whole: bool
) -> None:
    checked = worlds[max(members) + 1].ask(exchanging, members=members, whole=whole)
    assert [checked[rank] for rank in members] == [len(SIZES) * len(members)] * len(members)


def failing_midway(culprit: int, whole: bool) -> Any:
    with Ranks.of_world().together() as ranks:
        ranks.exchange_among(range(ranks.world_size), whole=whole)
        board = FakeBoard()
        view = memoryview(bytearray(1 << 20))
        with ranks.watching(board):
            for turn in range(50):
                if turn == 20 and ranks.rank == culprit:
                    ready()
                    raise io_error()
                ranks.broadcast(0, view, 0, len(view))


@pytest.mark.parametrize("whole", [True, False])
@pytest.mark.parametrize("culprit", [0, 1, 2])
def test_a_rank_that_fails_midway_ends_the_exchange_for_all(
    clock: WaitingClock, three: World, culprit: int, whole: bool
) -> None:
    three.tell(failing_midway, culprit=culprit, whole=whole, exits=True)
    three.await_ready(culprit)
    since_s = time.monotonic()
    heard = three.hear()
    all_raise(heard, "IoError", culprit)
    assert slowest_s(clock, heard, since_s) < ALL_KNOW_S


def is_done(call: Future, within_s: float) -> bool:
    return not wait([call], within_s).not_done


def leaving_while_it_waits(whole: bool) -> Any:
    """Rank 1 closes its exchange while it waits for bytes. Rank 0 sends them afterwards, and they
    must not be written to rank 1's buffer. Rank 0 returns the error that it gets."""
    rank, store = dist.get_rank(), dist.distributed_c10d._get_default_store()
    group = dist.PrefixStore(f"leaving {whole}", store)
    between = exchange.Exchange(dist.PrefixStore("x", group), rank, 2, whole)
    buffer = bytearray(b"\1" if rank == 0 else b"\0") * (8 << 20)
    first = between.begin(0, memoryview(bytearray(8)), 0, 8)
    assert is_done(first, 20)
    if rank == 0:
        group.wait(["left"])
        late = between.begin(0, memoryview(buffer), 0, len(buffer))
        assert is_done(late, 20)
        group.set("sent", "")
        group.wait(["seen"])
        between.close()
        return str(pytest.raises(RuntimeError, late.result).value)
    waits = between.begin(0, memoryview(buffer), 0, len(buffer))
    assert not is_done(waits, 0.2)
    between.close()
    assert is_done(waits, 0), "a thread still waits"
    group.set("left", "")
    group.wait(["sent"])
    group.set("seen", "")
    assert not any(buffer)


@pytest.mark.parametrize("whole", [True, False])
def test_nothing_is_written_after_the_receiver_has_left(two: World, whole: bool) -> None:
    assert "closed" in two.ask(leaving_while_it_waits, whole=whole)[0]


def loading(checkpoint: Path, strategy: str) -> list[bytes]:
    """Loads through the C++ library, together with the other ranks. Returns this rank's shards."""
    opened = modicum.walk.open_checkpoint(checkpoint)
    recipe = modicum.walk.make_recipe(opened)
    layout = modicum.walk.make_layout(recipe, ranks=4, layout="hsdp", mesh="2x2")
    with Ranks.of_world().together() as ranks:
        plan = modicum.walk.make_plan(
            recipe, layout, strategy=strategy, ranks_per_node=ranks.ranks_per_node, staging="1MiB"
        )
        group = plan.exchange_group(ranks.rank)
        if len(group) > 1:
            ranks.exchange_among(group, whole=strategy != "node-reader")
        board, ledger = _modicum.Board(ranks), modicum.Ledger()
        with ranks.watching(board):
            loaded = _modicum.load(plan, ranks.rank, board, ledger, broadcast=ranks.broadcast)
        assert board.progress > 0
        return [bytes(memoryview(loaded.storage(t))) for t in range(len(recipe.targets))]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    save_file = pytest.importorskip("safetensors.torch").save_file
    path = tmp_path_factory.mktemp("checkpoint") / "model.safetensors"
    torch.manual_seed(0)
    shapes = {"large": (1031, 1021), "small": (3,), "bias": (64, 7), "scalar": ()}
    save_file({name: torch.randn(shape) for name, shape in shapes.items()}, path)
    return path


def test_a_failure_on_the_board_ends_the_librarys_load(checkpoint: Path) -> None:
    recipe = modicum.walk.make_recipe(modicum.walk.open_checkpoint(checkpoint))
    plan = modicum.walk.make_plan(
        recipe, modicum.walk.make_layout(recipe, ranks=2), strategy="own-shard"
    )
    board = _modicum.Board(Ranks.of_world())
    assert board.progress == 0
    board.fail("no space left", 1)
    with pytest.raises(PeerError, match="no space left") as caught:
        _modicum.load(plan, 0, board, modicum.Ledger())
    assert caught.value.culprit_rank == 1


@pytest.fixture(scope="module")
def own_shards(four: World, checkpoint: Path) -> list[list[bytes]]:
    """The shards that each rank reads by itself."""
    return four.ask(loading, checkpoint=checkpoint, strategy="own-shard")


@pytest.mark.parametrize("strategy", ["node-reader", "rank0-broadcast", "replica-striped"])
def test_shards_that_other_ranks_have_read_and_sent_are_equal(
    four: World, checkpoint: Path, own_shards: list[list[bytes]], strategy: str
) -> None:
    """Equal to those of a load in which each rank reads its own shards."""
    how: dict[str, Any] = {"checkpoint": checkpoint, "strategy": strategy}
    assert four.ask(loading, hosts=["a", "a", "b", "b"], **how) == own_shards


def test_a_truncated_file_ends_the_load_on_all_ranks(
    four: World, tmp_path: Path, checkpoint: Path
) -> None:
    """Rank 0 truncates the file after all ranks have opened it, and before it makes its plan."""
    copy = tmp_path / "model.safetensors"
    copy.write_bytes(checkpoint.read_bytes())
    four.tell(loading_a_file_that_shrinks, checkpoint=copy)
    error = all_raise(four.hear(), "IoError", 0, category="CONFLICT", file=copy.name)
    assert error.facts["tensor"]


def loading_a_file_that_shrinks(checkpoint: Path) -> Any:
    make_plan = modicum.walk.make_plan

    def shrinking(*arguments: Any, **options: Any) -> Any:
        if dist.get_rank() == 0:
            os.truncate(checkpoint, checkpoint.stat().st_size // 2)
        return make_plan(*arguments, **options)

    with patch.object(modicum.walk, "make_plan", shrinking):
        return loading(checkpoint, "rank0-broadcast")
