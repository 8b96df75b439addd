"""A load's own part of the process group's store.

A call of a store can block without bound: its host may be stopped. So a thread makes the calls, and
whoever asks waits for the thread with a limit.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from concurrent.futures import wait
from typing import Any

import torch.distributed as dist

from modicum.errors import Error
from modicum.torch.ranks.caller import Caller

SLICE_S = 0.1
SLICES, CONNECT_SLICES = 60, 600
"""Of waiting for one answer: 6 s; a minute to connect, where all ranks may do so at once. They are
counted, not seconds, because this process may have been stopped meanwhile."""
PIECE_CHARACTERS = 4 << 20  # a TCPStore breaks off at a message of more than 8 MiB
KEYS_AT_ONCE = 256

# Every rank makes its loads in the same order, so that this is the same number on all.
_loads = itertools.count()


class LoadStore:
    """Any thread; one call is made after the other.

    Args:
        store: of the group, which others may block: a client lets in one thread at a time.
        on_loss: makes the error of what has happened to the store; every call raises it then.
    """

    def __init__(self, store: Any, on_loss: Callable[[str], Error]) -> None:
        self._on_loss = on_loss
        self._lost: str | None = None
        self._put_here: list[str] = []
        self._line = Caller("modicum-store")
        own = self._ask(store.clone, slices=CONNECT_SLICES)
        self._store = dist.PrefixStore(f"modicum/{next(_loads)}", own)

    def part(self, name: str) -> Any:
        """A part of this part, to be cloned by the thread that uses it."""
        return dist.PrefixStore(name, self._store)

    def has(self, key: str) -> bool:
        return self._ask(self._store.check, [key])

    def count(self, key: str, more: int = 0) -> int:
        """What all ranks together have counted under `key`, `more` included."""
        return self._ask(self._store.add, key, more)

    def set_first(self, key: str, text: str) -> str:
        """What stands under `key`: `text` if nothing did."""
        return self._ask(self._store.compare_set, key, "", text).decode()

    def get(self, key: str) -> str:
        """What was set first under a key that is there."""
        return self._ask(self._store.get, key).decode()

    def put(self, key: str, text: str) -> None:
        """Any length; for take()."""
        places = range(PIECE_CHARACTERS, len(text), PIECE_CHARACTERS)
        for index, at in enumerate(places):
            self._set(f"{key}/{index}", text[at : at + PIECE_CHARACTERS])
        self._set(key, f"{len(places)} {text[:PIECE_CHARACTERS]}")

    def take(self, *keys: str) -> list[str]:
        """What was put under each of these keys, which are there."""
        texts = []
        for at in range(0, len(keys), KEYS_AT_ONCE):
            some = list(keys[at : at + KEYS_AT_ONCE])
            for key, value in zip(some, self._ask(self._store.multi_get, some), strict=True):
                pieces, _, text = value.decode().partition(" ")
                more = [self.get(f"{key}/{index}") for index in range(int(pieces))]
                texts.append("".join([text, *more]))
        return texts

    def forget(self, *more: str) -> None:
        """Takes out what was put from here, and `more`."""
        for key in (*self._put_here, *more):
            self._ask(self._store.delete_key, key)

    def end(self) -> None:
        """No more calls."""
        self._line.end()

    def _set(self, key: str, text: str) -> None:
        self._put_here.append(key)
        self._ask(self._store.set, key, text)

    def _ask(self, function: Callable[..., Any], *arguments: Any, slices: int = SLICES) -> Any:
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
