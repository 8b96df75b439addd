"""Compares the tensors that several ranks hold whole or in equal shards (replicas) before a save.

The replicas of a tensor divide its writing, so replicas that differ would be mixed in the files.
Each rank reads its replicated tensors once; the digests of a rank go through the ranks' gather, one
for all tensors of the same sharding:

    rank    digest of the tensors on all ranks    of those on the ranks (0, 2) or (1, 3)
    0       5e                                    a1
    1       5e                                    07
    2       5e                                    a1
    3       5e                                    8c  <- differs from rank 1's
"""

import hashlib
import zlib
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import torch

from modicum import _modicum
from modicum.errors import failure
from modicum.torch.ranks.cpus import cpus_of_rank
from modicum.torch.ranks.group import Ranks
from modicum.torch.saving.weights import LocalTensor, Writing
from modicum.torch.shards.placements import Sharding
from modicum.torch.shards.tensors import as_bytes, await_streams

_PIECE_BYTES = 8 << 20
"""The largest part of a tensor on a device that a thread copies to the host at a time."""

Digests = dict[Sharding, list[tuple[str, str]]]
"""By sharding: (name, digest) of each replicated tensor, in the order of the files' tensors."""


def require_equal(writings: Sequence[Writing], ranks: Ranks) -> None:
    """Raises CONFLICT, which names a tensor, if replicas differ. Tensors that come from the first
    replica are not compared. Collective."""
    if ranks.world_size == 1:
        return
    replicated = [pair for writing in writings for pair in _replicated(writing, ranks.rank)]
    if not replicated:
        return
    await_streams(tensor.local for _, tensor in replicated)
    digests: Digests = {}
    with ThreadPoolExecutor(cpus_of_rank(ranks.ranks_per_node)) as threads:
        new_digests = threads.map(digest_of, [tensor.local for _, tensor in replicated])
    for (name, tensor), digest in zip(replicated, new_digests, strict=True):
        digests.setdefault(tensor.sharding, []).append((name, digest))
    shardings = [*digests]
    hashes = [hashlib.blake2b(repr(group).encode(), digest_size=8) for group in digests.values()]
    verdict = ranks.gather(
        [digest.hexdigest() for digest in hashes], lambda brought: _first_other(shardings, brought)
    )
    if verdict is None:
        return
    number, first, other = verdict
    pair = [digests[shardings[number]] if ranks.rank == rank else None for rank in (first, other)]
    brought = ranks.gather(pair)
    name, expected, got = next(
        (name, digest, another)
        for (name, digest), (_, another) in zip(brought[first][0], brought[other][1], strict=True)
        if digest != another
    )
    what = "replicas of this tensor differ: make them equal before the save, as by a broadcast, or "
    what += 'save those of the first rank that holds them by SaveOptions(replicas="first")'
    facts = {"expected": f"{expected} on rank {first}", "got": f"{got} on rank {other}"}
    raise failure("CONFLICT", what, tensor=name, **facts)


def _replicated(writing: Writing, rank: int) -> Iterator[tuple[str, LocalTensor]]:
    """(name, tensor) for each tensor that other ranks hold as well and help to write."""
    for target, tensor in zip(writing.recipe.targets, writing.local_tensors, strict=True):
        if target["alias_of"] is not None or tensor.comes_from_first:
            continue
        if len(_modicum.Shard(tensor.sharding, target["shape"], rank).replicas) > 1:
            yield target["name"], tensor


def _first_other(
    shardings: Sequence[Sharding], brought: Sequence[Sequence[str]]
) -> tuple[int, int, int] | None:
    """(the index of a sharding, the first replica, another replica with another digest), or None.
    `brought`: the digests of each rank by sharding."""
    for number, sharding in enumerate(shardings):
        for rank, digests in enumerate(brought):
            first = _modicum.Shard(sharding, (), rank).replicas[0]
            if digests[number] != brought[first][number]:
                return number, first, rank
    return None


def digest_of(local: torch.Tensor) -> str:
    """The CRC-32 of a tensor's bytes. A difference is missed with a probability of 2^-32."""
    line = as_bytes(local)
    digest = 0
    for at in range(0, line.numel(), _PIECE_BYTES):
        piece = line[at : at + _PIECE_BYTES].cpu()  # no copy if it is on the host
        digest = zlib.crc32(piece.numpy().data, digest)
    return f"{digest:08x}"
