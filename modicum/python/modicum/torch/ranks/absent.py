"""Ranks that have not joined a call."""

import sys

from modicum.torch.ranks.store import LoadStore

SAY_S = 10.0
"""How long a rank waits for others before it names them."""


def absent_ranks(store: LoadStore, key: str, world_size: int) -> list[int]:
    """The ranks that have set no value under `key`."""
    return [rank for rank in range(world_size) if not store.has(f"{key}/{rank}")]


def counted_from(ranks: list[int]) -> str:
    """The first of the ranks, and how many more there are."""
    return f"rank {ranks[0]}" + (f" (and {len(ranks) - 1} more)" if ranks[1:] else "")


def say_absent(store: LoadStore, key: str, rank: int, world_size: int) -> None:
    """Prints on stderr, on the first rank that has come, for which ranks it waits."""
    if any(store.has(f"{key}/{lower}") for lower in range(rank)):
        return
    if absent := absent_ranks(store, key, world_size):
        what = "to make the same call of Modicum, which all ranks make together"
        print(f"modicum: rank {rank} waits for {counted_from(absent)} {what}", file=sys.stderr)
