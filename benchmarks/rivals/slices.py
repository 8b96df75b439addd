"""Loaders in which each rank reads its own part of the files."""

import json
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from rivals.model import dtype_of, empty_sharded, local_of, materialize, region
from rivals.rows import Case
from safetensors import safe_open
from torch.distributed.checkpoint import HuggingFaceStorageReader
from transformers import AutoModelForCausalLM
from transformers.distributed import DistributedConfig

STAGING_BYTES = 1 << 20


def distributed_checkpoint(case: Case, built: Callable[[], None]) -> torch.nn.Module:
    """torch's distributed checkpoint with its reader of Hugging Face files."""
    model = empty_sharded(case)
    built()
    materialize(model)
    # Unlike state_dict(), named_parameters() omits the second name of a tied tensor. The files lack
    # that name, too, and DCP fails for a name that the files lack.
    state = dict(model.named_parameters())
    dcp.load(state, storage_reader=HuggingFaceStorageReader(case.directory))
    return model


def shard_on_read(case: Case, built: Callable[[], None]) -> torch.nn.Module:
    """transformers' sharding: builds, shards and reads in one call."""
    config = DistributedConfig(tp_size=case.tp, fsdp_size=case.world // case.tp)
    return AutoModelForCausalLM.from_pretrained(
        case.directory, dtype=dtype_of(case), distributed_config=config
    )


# ---- hand-written loops for these models


@dataclass(frozen=True)
class Piece:
    """A region of a stored tensor, and the memory of this rank's shard that it is read into."""

    destination: torch.Tensor
    region: tuple[slice, ...]


def wanted(case: Case, model: torch.nn.Module) -> dict[str, Piece]:
    """The pieces that this rank needs, by the names of the stored tensors."""
    pieces = {}
    for name, parameter in model.named_parameters():
        local = local_of(parameter)
        part = region(case, name, parameter.shape)
        stem, is_stacked, projection = name.partition(".experts.")
        if is_stacked:
            # Dim 0 of a stacked parameter numbers the experts, and FSDP2 shards dim 0: so this rank
            # holds whole experts, which the files store one by one.
            first_expert = part[0].start
            for expert, matrix in enumerate(local, start=first_expert):
                for stored, view in stored_parts(projection, matrix):
                    complete = tuple(slice(0, size) for size in view.shape)
                    pieces[f"{stem}.experts.{expert}.{stored}.weight"] = Piece(view, complete)
        else:
            pieces[name] = Piece(local, part)
    return {name: piece for name, piece in pieces.items() if piece.destination.numel()}


def stored_parts(projection: str, matrix: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields the stored tensors that together make one expert's `matrix` of `projection`: their
    short names, and the views of `matrix` that they are read into."""
    if projection == "gate_up_proj":
        yield from zip(("gate_proj", "up_proj"), matrix.chunk(2), strict=True)
    else:
        yield projection, matrix


def files_of(case: Case) -> list[str]:
    return sorted(str(path) for path in Path(case.directory).glob("*.safetensors"))


def get_slice(case: Case, built: Callable[[], None]) -> torch.nn.Module:
    """Copies safetensors' lazy slices into the shards."""
    model = empty_sharded(case)
    built()
    materialize(model)
    pieces = wanted(case, model)
    for path in files_of(case):
        with safe_open(path, framework="pt") as file:
            for name in pieces.keys() & file.keys():
                piece = pieces[name]
                piece.destination.copy_(file.get_slice(name)[piece.region])
    return model


@dataclass(frozen=True)
class Stored:
    """A stored tensor, and where its bytes are: the open file and the offset in it."""

    descriptor: int
    offset: int
    dtype: torch.dtype
    shape: list[int]


def stored_tensors(case: Case) -> dict[str, Stored]:
    dtypes = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}
    found = {}
    for path in files_of(case):
        descriptor = os.open(path, os.O_RDONLY)
        size = int.from_bytes(os.pread(descriptor, 8, 0), "little")
        for name, entry in json.loads(os.pread(descriptor, size, 8)).items():
            if name != "__metadata__":
                begin = 8 + size + entry["data_offsets"][0]
                found[name] = Stored(descriptor, begin, dtypes[entry["dtype"]], entry["shape"])
    return found


def read_into(descriptor: int, offset: int, tensor: torch.Tensor) -> None:
    """Fills a contiguous tensor from a file."""
    memory = memoryview(tensor.view(-1).view(torch.uint8).numpy())
    while memory:
        count = os.preadv(descriptor, [memory], offset)
        if count == 0:
            raise EOFError(f"the file ends {len(memory)} bytes early")
        memory, offset = memory[count:], offset + count


def preadv(case: Case, built: Callable[[], None]) -> torch.nn.Module:
    """Reads whole rows directly into the shards. If a shard needs a cast or has only some columns,
    the rows are read in blocks into a buffer of STAGING_BYTES, or of one row if that is longer."""
    model = empty_sharded(case)
    built()
    materialize(model)
    pieces, stored = wanted(case, model), stored_tensors(case)
    for name in sorted(pieces, key=lambda name: (stored[name].descriptor, stored[name].offset)):
        piece, source = pieces[name], stored[name]
        first, last = piece.region[0].start, piece.region[0].stop
        row = torch.empty(source.shape[1:], dtype=source.dtype)  # for its shape and size in bytes
        begin = source.offset + first * row.nbytes
        if piece.destination.dtype == source.dtype and piece.destination[0].shape == row.shape:
            read_into(source.descriptor, begin, piece.destination)
            continue
        rows = max(1, min(last - first, STAGING_BYTES // row.nbytes))
        staging = row.new_empty(rows, *row.shape)
        for done in range(0, last - first, rows):
            block = staging[: min(rows, last - first - done)]
            read_into(source.descriptor, begin + done * row.nbytes, block)
            piece.destination[done : done + rows].copy_(block[(slice(None), *piece.region[1:])])
    for descriptor in {source.descriptor for source in stored.values()}:
        os.close(descriptor)
    return model


def flipped_bit(case: Case, built: Callable[[], None]) -> torch.nn.Module:
    """The loader `preadv`, with one wrong bit in a shard of the last rank."""
    model = preadv(case, built)
    if dist.get_rank() == case.world - 1:
        locals_ = (local_of(parameter) for parameter in model.parameters())
        local = next(local for local in locals_ if local.numel())
        local.view(-1).view(torch.uint8)[:1].bitwise_xor_(1)
    return model
