"""Barriers, failure propagation and liveness among the ranks of a load.

Everything except tensor bytes goes through the store of the caller's process group, so that no rank
is ever in a collective that another rank does not enter. A load has its own prefix in the store:

    failed      the first failure, {"error": {...}}; set once, read by each rank every TICK_S
    beat/R      heartbeat of rank R
    barrier/N   number of ranks that have arrived at meeting N, if it is a barrier
    gather/N    the same for a gather; gather/N/R is the value of rank R, gather/N/all the result
    over        number of ranks that know that the load is over, by success or failure
    exchange/N/R  Gloo's rendezvous of the group whose first rank is R, after N meetings

One thread calls the store (store.py), another one watches. Per second each rank makes four reads of
`failed`, one heartbeat, one read of `over`, and one read of the next rank's heartbeat; the first
rank of a host also reads the heartbeats of the next host. A meeting costs a rank a few calls.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import wait
from contextlib import contextmanager, suppress
from typing import Any

import torch.distributed as dist

from modicum._modicum import Board
from modicum.errors import Error, counted, from_json, refusal
from modicum.torch.ranks.absent import SAY_S, absent_ranks, counted_from, say_absent
from modicum.torch.ranks.documents import document_of, document_with, first_line
from modicum.torch.ranks.exchange import Exchange
from modicum.torch.ranks.liveness import LOOK_S, Neighbours, Process, ranks_per_node
from modicum.torch.ranks.store import LoadStore
from modicum.upstream.torch_distributed import default_store

TICK_S = 0.25
"""Seconds between two reads of `failed`."""
PART_LIMIT_S = 2.0  # the longest wait for all ranks to learn that the load is over
_ORDER = "the order of tensors"
POLL_GROWTH = 1.25  # the factor by which the pause between polls grows


class Ranks:
    """One rank of a load. The C++ library calls `barrier`, `agree`, `report` and `broadcast`. If
    ranks fail, the collectives of this class raise the first failure on all ranks."""

    rank: int
    world_size: int
    ranks_per_node: int | None
    """None if hosts have different numbers of ranks, or ranks that are not consecutive."""

    def __init__(self, rank: int, world_size: int) -> None:
        """A rank without a store: the only one, or one in a fake process group."""
        self.rank, self.world_size, self.ranks_per_node = rank, world_size, world_size
        self._store: LoadStore | None = None
        self._meetings = 0  # the number so far; every rank takes part in every one
        self._longest_pause_s = 0.004 + world_size / 5000  # at most 5000 polls a second in all
        self._pids: list[int] = []
        self._on_wait: Callable[[], object] = lambda: None
        self._exchange: Exchange | None = None
        self._members: Sequence[int] = (rank,)
        self._lock = threading.Lock()  # guards _failure, _failed, _board and _over_told
        self._failure: str | None = None
        self._failed = threading.Event()
        self._board: Board | None = None
        self._over_told = False
        self._neighbours: Neighbours | None = None
        self._ended = threading.Event()
        self._watcher = threading.Thread(target=self._watch, name="modicum-watch", daemon=True)

    @classmethod
    def of_world(cls, on_wait: Callable[[], object] = lambda: None) -> Ranks:
        """This rank of torch.distributed's default group. Collective. Without a group: rank 0 in a
        world of size 1. The backend "fake" can't communicate: with it, the rank takes its own
        values for those of all ranks.

        Args:
            on_wait: called again and again while this rank waits for others, here and in later
                collectives. An exception in it is a failure of this rank.

        Raises:
            UsageError: the group has no store that can be cloned.
            PeerError: a rank has died, or has not called this within the group's timeout.
        """
        if not dist.is_available() or not dist.is_initialized():
            return cls(0, 1)
        rank, world_size = dist.get_rank(), dist.get_world_size()
        if world_size == 1 or dist.get_backend() == "fake":
            return cls(rank, world_size)
        store = default_store()
        ranks = cls(rank, world_size)
        ranks._on_wait = on_wait
        try:
            ranks._meet(store)
        except BaseException as error:
            verdict = ranks._part_with(error)
            ranks._close()
            raise verdict from None
        return ranks

    # ---- collectives

    def gather(self, value: Any, judge: Callable[[list[Any]], Any] = list) -> Any:
        """The values of all ranks, in JSON, after `judge`, called on rank 0. Collective."""
        return self._settle(value, judge)

    def once(self, make: Callable[[], Any], local: Callable[[], Any]) -> tuple[Any, list[Any]]:
        """Calls `make` on rank 0, then `local` on every rank. Returns the result of `make`, and the
        results of `local` by rank. Collective. A rank without a store calls `make` itself."""
        result = make() if self.rank == 0 or self._store is None else None
        result, brought = self._settle(local(), lambda brought: [result, brought])
        return result, brought

    def agree(self, digest: str, facts: Sequence[Any] = ()) -> None:
        """Raises CONFLICT, naming the first rank whose digest differs from rank 0's, and, with the
        digested (name, value) pairs `facts`, the first difference. Collective."""
        if (verdict := self._settle(digest, _first_other)) is None:
            return
        other, more, expected, got = verdict
        who = f"rank {other} (and {more} more)" if more else f"rank {other}"
        what = f"{who} has other inputs than rank 0"
        if facts:
            name, expected, got = self._settle(
                facts if self.rank in (0, other) else None,
                lambda brought: _first_difference(brought[0], brought[other]),
            )
            what = f"{who} differs from rank 0 in {name}{_remedy(name, expected, got)}"
        raise from_json(self._blaming(other, "CONFLICT", what, expected=expected, got=got))

    def agree_on(self, facts: Mapping[str, str]) -> None:
        """Raises CONFLICT, as `agree` does, if ranks have different facts (values by name), or
        another order of them. Collective."""
        items = [*facts.items()]
        digest = hashlib.blake2b(json.dumps(items).encode(), digest_size=16)
        self.agree(digest.hexdigest(), items)

    def barrier(self) -> None:
        """Returns once every rank has called this as often as this rank. Collective."""
        if self._store is not None:
            key = f"barrier/{self._next_meeting()}"
            self._store.count(key, 1)
            self._until(lambda: self._shared.count(key) == self.world_size)

    def broadcast(self, root: int, view: memoryview, begin: int, end: int) -> None:
        """Sends `view` from one rank of the group of `exchange_among`, the one at index `root`, to
        the others. This rank needs at least the bytes [begin, end)."""
        if self._store is None:
            raise refusal("UNSUPPORTED", "ranks of a fake process group can't exchange bytes")
        self.check()
        if len(view) == 0:
            return
        assert self._exchange is not None, "broadcast() before exchange_among()"
        call = self._exchange.begin(root, view, begin, end)
        try:
            while not wait([call], TICK_S).done:
                self.check()
            self._received(call.result)
        except BaseException as error:
            # The others must see the reason before they see that connections end.
            self.report(document_of(error))
            self._exchange.close()
            raise

    def exchange_among(self, members: Sequence[int], *, whole: bool) -> None:
        """Sets the group of broadcast() to the ranks `members`. Each of them calls this, after a
        barrier if bytes were exchanged before.

        Args:
            whole: whether every member needs all bytes that are sent.
        """
        if self._store is None:
            return
        if self._exchange is not None:
            self._exchange.close()
        self._members = members
        store = self._store.part(f"exchange/{self._meetings}/{members[0]}")
        self._exchange = Exchange(store, members.index(self.rank), len(members), whole)

    @property
    def _shared(self) -> LoadStore:
        assert self._store is not None, "ranks of a fake process group share nothing"
        return self._store

    # ---- failures

    def report(self, document: str) -> str:
        """Reports to all ranks that this one has failed.

        Args:
            document: the error, as the command line prints it with `--json`.

        Returns:
            The first failure of any rank, which all ranks raise.
        """
        if self._store is None:
            return document
        document = self._naming_this_rank(document)
        if self._failure is None:
            with suppress(Error):  # the store is lost; the other ranks find that out themselves
                document = self._store.set_first("failed", document)
            self._fail(document)
        return self._failure or document

    def fail(self, error: BaseException) -> None:
        """Makes all ranks raise this error in their next collective or `check`. On any thread."""
        self.report(document_of(error))

    def check(self) -> None:
        """Raises the first failure of any rank, if this rank knows of one."""
        if self._failed.is_set():
            raise from_json(self._failure or "")

    @contextmanager
    def together(self) -> Iterator[Ranks]:
        """A context that all ranks leave without an error, or in which all raise the first failure
        of any rank, with the same class, message, `culprit_rank` and `culprit_pid`. An exception
        that is no `Error` is unchanged on its own rank. On the others it is CANCELLED for Ctrl-C,
        else INTERNAL. On exit, threads and connections end; the fields remain."""
        try:
            yield self
            self.barrier()
            if self._store is not None:
                self._store.forget(f"beat/{self.rank}")
                self._part()
        except BaseException as error:
            verdict = self._part_with(error)
            if verdict is error:
                raise
            cause = None if isinstance(error, Error) else error
            raise verdict.with_traceback(error.__traceback__) from cause
        finally:
            self._close()

    @contextmanager
    def watching(
        self, board: Board, progress: Callable[[int], object] | None = None
    ) -> Iterator[None]:
        """A context in which another rank's failure cancels the load of `board`.

        Args:
            board: the board of the load.
            progress: called with the number of bytes that this rank has loaded so far, every 0.25 s
                and at the end, on a separate thread. An exception in it ends the load.
        """
        with self._lock:
            self._board = board
        self.check()
        ended = threading.Event()
        teller = threading.Thread(target=self._tell, args=(board, progress, ended), daemon=True)
        if progress is not None:
            teller.start()
        try:
            yield
        except Error:  # C++ knows only that another rank failed: raise that rank's error
            self.check()
            raise
        finally:
            with self._lock:
                self._board = None
            ended.set()
            if progress is not None:
                teller.join()
        self.check()

    # ---- meetings

    def _meet(self, store: Any) -> None:
        self._store = LoadStore(store, self._losing_the_store, self.rank)
        self._watcher.start()
        me = Process.this()
        limit_s = store.timeout.total_seconds()
        hello = [me.boot, me.host, me.pid_space, me.pid, me.started]
        processes = [Process(*fields) for fields in self._settle(hello, list, limit_s)]
        self._pids = [process.pid for process in processes]
        self.ranks_per_node = ranks_per_node(processes)
        self._neighbours = Neighbours(processes, self.rank)

    def _next_meeting(self) -> int:
        self._meetings += 1
        return self._meetings

    def _settle(
        self, value: Any, judge: Callable[[list[Any]], Any], limit_s: float | None = None
    ) -> Any:
        """Gathers `value` of every rank on rank 0. Returns `judge(values)` on all ranks."""
        if (store := self._store) is None:
            return judge([value] * self.world_size)
        key = f"gather/{self._next_meeting()}"
        store.put(f"{key}/{self.rank}", json.dumps(value))
        store.count(key, 1)
        if self.rank == 0:
            self._until(lambda: store.count(key) == self.world_size, key, limit_s)
            brought = store.take(*(f"{key}/{rank}" for rank in range(self.world_size)))
            judged = json.dumps(judge([json.loads(text) for text in brought]))
            store.put(f"{key}/all", judged)
        else:
            self._until(lambda: store.has(f"{key}/all"), key, limit_s)
            [judged] = store.take(f"{key}/all")
        return json.loads(judged)

    def _until(
        self, is_so: Callable[[], bool], key: str = "", limit_s: float | None = None
    ) -> None:
        """Polls until `is_so()`; less often in a larger world. Raises the first failure of any
        rank, and PEER if a rank has set no value under `key` after `limit_s`."""
        waited_s = 0.0
        for pause_s in self._pauses():
            if is_so():
                return
            if self._failed.wait(pause_s):
                self.check()
            self._on_wait()
            waited_s += pause_s
            if limit_s is not None and waited_s > SAY_S >= waited_s - pause_s:
                say_absent(self._shared, key, self.rank, self.world_size)
            if limit_s is not None and waited_s > limit_s:
                self._refuse_absent(key, limit_s)

    def _pauses(self) -> Iterator[float]:
        """Pauses between polls; short at first, since ranks mostly arrive at the same time."""
        pause_s = self._longest_pause_s / 8
        while True:
            yield pause_s
            pause_s = min(pause_s * POLL_GROWTH, self._longest_pause_s)

    def _refuse_absent(self, key: str, limit_s: float) -> None:
        if absent := absent_ranks(self._shared, key, self.world_size):
            what = f"{counted_from(absent)} did not join the call within {limit_s:.0f} s"
            raise from_json(self._blaming(absent[0], "PEER", what))

    # ---- watching

    def _watch(self) -> None:
        try:
            for tick in itertools.count(1):
                if self._ended.wait(TICK_S):
                    return
                if self._shared.has("failed"):
                    self._fail(self._shared.get("failed"))
                    self._tell_over()
                    return
                if tick * TICK_S % LOOK_S == 0:
                    self._check_neighbours()
        except BaseException as error:  # the thread that waits for ranks must raise it
            self._fail(self._naming_this_rank(document_of(error)))

    def _check_neighbours(self) -> None:
        self._shared.count(f"beat/{self.rank}", 1)
        # Once any rank knows that the load is over, ranks may leave, and their heartbeats end.
        if self._neighbours is None or self._shared.count("over") > 0:
            return
        lost = self._neighbours.check(lambda rank: self._shared.count(f"beat/{rank}"))
        if lost is not None:
            rank, cause = lost
            self.report(
                self._blaming(rank, "PEER", f"rank {rank} (pid {self._pids[rank]}) {cause}")
            )

    def _tell(
        self, board: Board, progress: Callable[[int], object], ended: threading.Event
    ) -> None:
        try:
            while not ended.wait(TICK_S):
                progress(board.progress)
            progress(board.progress)
        except BaseException as error:  # ends the load, which runs on another thread
            self._fail(self.report(document_of(error)))

    def _fail(self, document: str) -> None:
        with self._lock:
            if self._failure is not None:
                return
            self._failure = document
            self._failed.set()
            if self._board is not None:
                facts = json.loads(document)["error"]
                self._board.fail(facts["message"], facts.get("culprit_rank", -1))

    # ---- the end

    def _part_with(self, error: BaseException) -> BaseException:
        """Reports `error` to the others. Returns the error that this rank raises."""
        if self._store is None:
            return error
        document = self._naming_this_rank(document_of(error))
        counts = self.report(document)
        self._part()
        if not isinstance(error, Exception) or (
            counts == document and not isinstance(error, Error)
        ):
            return error
        return from_json(counts)

    def _part(self) -> None:
        """Waits, at most PART_LIMIT_S, until all ranks know that the load is over. Afterwards the
        process that hosts the store may exit. A dead rank never adds itself to `over`."""
        is_dead = self._failure is not None and from_json(self._failure).category == "PEER"
        waited_s = 0.0
        try:
            self._tell_over()
            for pause_s in self._pauses():
                informed = self._shared.count("over")
                if waited_s >= PART_LIMIT_S or informed >= self.world_size - is_dead:
                    return
                self._ended.wait(pause_s)
                waited_s += pause_s
        except Error:  # the store is lost: the rank that hosts it has left
            return

    def _tell_over(self) -> None:
        with self._lock:
            was_told, self._over_told = self._over_told, True
        if not was_told:
            self._shared.count("over", 1)

    def _close(self) -> None:
        if self._store is None:
            return
        self._ended.set()
        self._watcher.join()
        if self._exchange is not None:
            self._exchange.close()
        self._store.end()

    # ---- documents

    def _losing_the_store(self, cause: str) -> Error:
        what = "the store of the process group, hosted by {}, " + cause
        if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
            self._fail(document_with("PEER", what.format("the launcher")))
        else:
            self._fail(self._blaming(0, "PEER", what.format("rank 0")))
        return from_json(self._failure or "")

    def _blaming(self, culprit: int, category: str, what: str, **facts: str) -> str:
        pid = {"culprit_pid": self._pids[culprit]} if self._pids else {}
        return document_with(category, what, rank=self.rank, culprit_rank=culprit, **pid, **facts)

    def _naming_this_rank(self, document: str) -> str:
        """`document`, with this rank as the culprit if none is set."""
        facts = json.loads(document)["error"]
        if "culprit_rank" not in facts:
            if "rank" not in facts:
                facts["message"] += f" (rank {self.rank})"
            facts |= {"rank": self.rank, "culprit_rank": self.rank, "culprit_pid": os.getpid()}
        return json.dumps({"error": facts})

    def _received(self, result: Callable[[], None]) -> None:
        """Calls `result`. If a connection ended, raises the failure of another rank, or PEER."""
        try:
            result()
        except RuntimeError as error:
            # A peer that failed has reported its error before it closed the connection.
            if self._failed.wait(4 * TICK_S):
                self.check()
            place = self._exchange.peer if self._exchange else None
            why = first_line(error)
            if place is None:
                others = f"{counted(len(self._members) - 1, 'rank')} of its exchange"
                what = f"rank {self.rank} could not connect to {others}: {why}"
                raise from_json(document_with("PEER", what, rank=self.rank)) from None
            peer = self._members[place]
            what = f"the connection to rank {peer} (pid {self._pids[peer]}) ended: {why}"
            raise from_json(self._blaming(peer, "PEER", what)) from None


def _first_other(digests: list[str]) -> tuple[int, int, str, str] | None:
    """(the first rank whose digest differs from rank 0's, the number of further such ranks, rank
    0's digest, that rank's digest), or None. Called on rank 0, whose result all ranks get."""
    others = [rank for rank, digest in enumerate(digests) if digest != digests[0]]
    return (others[0], len(others) - 1, digests[0], digests[others[0]]) if others else None


def _remedy(name: str, expected: str, got: str) -> str:
    """The end of the message: advice about models that differ by rank; empty for other facts."""
    if not name.startswith(("tensor ", _ORDER)):
        return ""
    if "none" in (expected, got):
        return (
            ": models that differ by rank are read by modicum.torch.dcp.ModicumReader, and "
            "saved by torch.distributed.checkpoint"
        )
    if (" on meta" in expected) != (" on meta" in got):
        return ": build the model under empty_parameters() on every rank"
    return ": build the same model, with the same dtypes and ties, on every rank"


def _first_difference(facts: list[Any], other: list[Any]) -> tuple[str, str, str]:
    """The first difference of two lists of (name, value) that differ: the name, and both values."""
    known, found = dict(facts), dict(other)
    for name in [*known, *found]:
        if known.get(name) != found.get(name):
            return name, known.get(name, "none"), found.get(name, "none")
    expected, got = next((a, b) for (a, _), (b, _) in zip(facts, other, strict=True) if a != b)
    return _ORDER, expected, got
