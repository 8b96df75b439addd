"""A load's own prefix in the process group's store.

A call of a store can block forever, for example if its host is stopped. Therefore a thread makes
the calls, and callers wait for the thread with a time limit.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from concurrent.futures import wait
from typing import Any

import torch.distributed as dist

from modicum.errors import Error
from modicum.torch.ranks.caller import Caller

SLICE_S = 0.1
SLICES, CONNECT_SLICES = 60, 600
"""Time limits in slices: 6 s for an answer, and a minute to connect, since all ranks may connect at
the same time. Slices are counted, not seconds: time in which this process is stopped does not
count."""
PIECE_BYTES = 4 << 20  # longer texts are split: a TCPStore refuses messages of more than 8 MiB
COMPRESSED_BYTES = 1 << 12
"""Longer texts are compressed: gathered values of all ranks are similar, and a recipe has many
similar names."""
KEYS_AT_ONCE = 256


class LoadStore:
    """A client of the store for any thread; it makes one call at a time.

    Args:
        store: the group's store. It is cloned, since a client serves one thread at a time, and
            other users of the group may block it.
        on_loss: makes the error that every call raises once the store is lost; called with how
            it was lost.
        prefix: of all keys; or this rank, whose calls are numbered in the store: all ranks make the
            same calls in the same order, so their prefixes are equal.
        connect_slices: the time limit to connect.
    """

    def __init__(
        self,
        store: Any,
        on_loss: Callable[[str], Error],
        prefix: str | int,
        connect_slices: int = CONNECT_SLICES,
    ) -> None:
        self._on_loss = on_loss
        self._lost: str | None = None
        self._put_here: list[str] = []  # keys that this rank has set with put()
        self._line = Caller("modicum-store")
        clone = self._ask(store.clone, slices=connect_slices)
        if isinstance(prefix, int):
            prefix = f"modicum/{self._ask(clone.add, f'modicum/calls/{prefix}', 1)}"
        self._store = dist.PrefixStore(prefix, clone)

    def part(self, name: str) -> Any:
        """A store with a prefix inside this one. The thread that uses that store must clone it."""
        return dist.PrefixStore(name, self._store)

    def has(self, key: str) -> bool:
        return self._ask(self._store.check, [key])

    def count(self, key: str, more: int = 0) -> int:
        """Adds `more` to the counter `key`. Returns the sum over all ranks."""
        return self._ask(self._store.add, key, more)

    def set_first(self, key: str, text: str) -> str:
        """Sets `key` to `text` unless it is set. Returns its value."""
        return self._ask(self._store.compare_set, key, "", text).decode()

    def get(self, key: str) -> str:
        """The value of a key, which must be set."""
        return self._ask(self._store.get, key).decode()

    def put(self, key: str, text: str) -> None:
        """Sets `key` to a text of any length, to be read by take()."""
        data = text.encode()
        encoding = "plain"
        if len(data) > COMPRESSED_BYTES:
            data, encoding = zlib.compress(data, 1), "zlib"
        places = range(PIECE_BYTES, len(data), PIECE_BYTES)
        for index, at in enumerate(places):
            self._set(f"{key}/{index}", data[at : at + PIECE_BYTES])
        self._set(key, f"{len(places)} {encoding} ".encode() + data[:PIECE_BYTES])

    def take(self, *keys: str) -> list[str]:
        """The texts of keys that put() has set."""
        texts = []
        for at in range(0, len(keys), KEYS_AT_ONCE):
            some = list(keys[at : at + KEYS_AT_ONCE])
            for key, value in zip(some, self._ask(self._store.multi_get, some), strict=True):
                pieces, encoding, first = value.split(b" ", 2)
                more = [self._ask(self._store.get, f"{key}/{i}") for i in range(int(pieces))]
                texts.append(_text_of(b"".join([first, *more]), encoding))
        return texts

    def forget(self, *more: str) -> None:
        """Deletes the keys that this rank has set with put(), and `more`."""
        for key in (*self._put_here, *more):
            self._ask(self._store.delete_key, key)

    def end(self) -> None:
        """Ends the thread; no calls may follow."""
        self._line.end()

    def _set(self, key: str, data: bytes) -> None:
        self._put_here.append(key)
        self._ask(self._store.set, key, data)

    def _ask(self, function: Callable[..., Any], *arguments: Any, slices: int = SLICES) -> Any:
        """Calls `function` on the thread; raises the error of `on_loss` if it fails or gives no
        answer within `slices`."""
        if self._lost is None:
            call = self._line.begin(function, *arguments)
            if any(wait([call], SLICE_S).done for _ in range(slices)):
                try:
                    return call.result()
                except RuntimeError as error:
                    first_line = str(error).partition("\n")[0]
                    self._lost = f"is lost: {first_line}"
            else:
                self._lost = "does not answer"
            self.end()
        raise self._on_loss(self._lost)


def _text_of(data: bytes, encoding: bytes) -> str:
    return (zlib.decompress(data) if encoding == b"zlib" else data).decode()
