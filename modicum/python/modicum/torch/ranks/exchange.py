"""Sends bytes from one rank of a load to the others, over Gloo.

Uses only point-to-point sends, no collectives: a rank waits only for one peer at a time, for as
long as that peer reads from storage, and can leave at any time. The *root* is the rank that has the
bytes and sends them. There are two patterns:

- *whole*: every rank needs all bytes. The ranks form a ring, and each forwards pieces of 2 MiB to
  the next one as they arrive; the last rank before the root forwards none. Each rank receives and
  sends every byte at most once, whatever the number of ranks, and has at most two connections:

      root 1 -> 2 -> 3 -> 0

- *scatter*: each other rank tells the root the range of bytes that it needs, and receives that
  range.

The network interface is the one that PyTorch's own Gloo groups use.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from concurrent.futures import Future, wait
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from modicum.torch.ranks.caller import Caller
from modicum.upstream.torch_distributed import break_connections, require_gloo

PIECE_BYTES = 2 << 20
PIECES_AHEAD = 8  # receives posted in advance
CONNECT_LIMIT = timedelta(minutes=5)
NO_LIMIT = timedelta(days=365)  # a root may read for hours; if it fails, the connection ends
BREAK_WAIT_S = 2.0  # how long close() waits for the call whose connections it has ended
TAG = 0


class Exchange:
    """One rank's end of the exchange. Used by one thread at a time; every rank makes the same calls
    in the same order.

    Args:
        store: used by this exchange only, to set up connections; it is cloned.
        place: index of this rank among the ranks that exchange bytes.
        size: the number of these ranks.
        whole: whether every rank needs all bytes.
    """

    def __init__(self, store: Any, place: int, size: int, whole: bool) -> None:
        require_gloo()
        self._store, self._place, self._size, self._whole = store, place, size, whole
        self._groups: list[Any] = []
        # For each peer's place: the group that connects it to this rank, and its rank there.
        self._links: dict[int, tuple[Any, int]] = {}
        self._caller = Caller("modicum-exchange")
        self._call: Future[None] | None = None
        self._is_connected = self._is_closed = False
        self.peer: int | None = None
        """The place of the peer for which the current call waits, or was waiting when it failed;
        None before the connections are made."""

    def begin(self, root: int, view: memoryview, begin: int, end: int) -> Future[None]:
        """Begins to send `view` from the place `root` to all others. This rank needs at least the
        bytes [begin, end). The future raises RuntimeError if a connection ends. `view` must live
        until the future is done or close() has returned."""
        whole = torch.frombuffer(view, dtype=torch.uint8)
        send = self._forward if self._whole else self._scatter
        self._call = self._caller.begin(send, whole, root, begin, min(end, len(view)))
        return self._call

    def close(self) -> None:
        """Ends this rank's connections, even during a call; peers get an error. No memory is
        accessed afterwards."""
        self._is_closed = True  # ends a call that is still connecting
        if self._is_connected and self._call is not None and not self._call.done():
            for group in self._groups:
                break_connections(group)
            wait([self._call], BREAK_WAIT_S)
        self._caller.end()
        self._links.clear()
        self._groups.clear()

    # ---- on the thread of `_caller`

    def _connect(self, store: Any, name: str, members: Sequence[int]) -> None:
        """Connects the places `members`, which include this one."""
        mine = members.index(self._place)
        store = dist.PrefixStore(name, store)
        group = dist.ProcessGroupGloo(store, mine, len(members), CONNECT_LIMIT)
        self._groups.append(group)
        for at, place in enumerate(members):
            if place != self._place:
                self._links[place] = group, at

    def _connect_all(self) -> None:
        store = self._store.clone()
        if not self._whole or self._size == 2:
            self._connect(store, "all", range(self._size))
        else:
            # Link k connects the places k and k + 1. Every rank makes its even link first: if each
            # began with the link to the next rank, all could wait for one another.
            mine = (self._place - 1) % self._size, self._place
            for link in sorted(mine, key=lambda at: (at % 2, at)):
                self._connect(store, f"link/{link}", (link, (link + 1) % self._size))
        self._is_connected = True
        if self._is_closed:
            raise RuntimeError("closed before it was connected")

    def _send(self, place: int, part: torch.Tensor) -> dist.Work:
        group, at = self._links[place]
        return group.send([part], at, TAG)

    def _receive(self, place: int, part: torch.Tensor) -> dist.Work:
        group, at = self._links[place]
        return group.recv([part], at, TAG)

    def _await(self, place: int, work: dist.Work) -> None:
        self.peer = place
        work.wait(NO_LIMIT)

    def _forward(self, whole: torch.Tensor, root: int, _begin: int, _end: int) -> None:
        if not self._is_connected:
            self._connect_all()
        before, after = (self._place - 1) % self._size, (self._place + 1) % self._size
        # All receives of a stretch are posted at once, so that the previous rank need not wait.
        for stretch in whole.split(PIECE_BYTES * PIECES_AHEAD):
            pieces = stretch.split(PIECE_BYTES)
            arriving = [] if self._place == root else [self._receive(before, p) for p in pieces]
            leaving = []
            for piece, work in itertools.zip_longest(pieces, arriving):
                if work is not None:
                    self._await(before, work)
                if after != root:
                    leaving.append(self._send(after, piece))
            for work in leaving:
                self._await(after, work)

    def _scatter(self, whole: torch.Tensor, root: int, begin: int, end: int) -> None:
        if not self._is_connected:
            self._connect_all()
        if self._place != root:
            request = self._send(root, torch.tensor([begin, end], device="cpu"))
            if begin < end:
                self._await(root, self._receive(root, whole[begin:end]))
            self._await(root, request)
            return
        ranges = {place: torch.empty(2, dtype=torch.int64, device="cpu") for place in self._links}
        requests = {place: self._receive(place, ranges[place]) for place in self._links}
        leaving = {}
        for place, work in requests.items():
            self._await(place, work)
            begin, end = ranges[place].tolist()
            if begin < end:
                leaving[place] = self._send(place, whole[begin:end])
        for place, work in leaving.items():
            self._await(place, work)
