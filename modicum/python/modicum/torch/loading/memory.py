"""Tensors in rank 0's memory as the source of a load.

The C++ library sees them as a checkpoint of one file. Every rank has the file's header, but only
rank 0 can read data: piece by piece from the tensors, cast to the model's dtypes. Rank 0 reads for
all ranks and sends each rank the bytes that it needs, through the staging.
"""

import ctypes
import hashlib
from collections.abc import Callable, Mapping, MutableMapping
from typing import Any

import torch

from modicum import _modicum
from modicum.errors import counted, refusal
from modicum.recipes import Recipe
from modicum.recipes.dtypes import dtype_name
from modicum.recipes.nodes import Node
from modicum.recipes.structure import ties_of
from modicum.torch.loading.goal import Goal, Model, memory_before
from modicum.torch.ranks.group import Ranks
from modicum.torch.shards.placements import whole_of
from modicum.torch.shards.tensors import ModelTensor, as_bytes, copy_run
from modicum.upstream.torch_distributed import dtensor_like
from modicum.upstream.torch_fsdp import hand_over
from modicum.upstream.torch_rnn import without_weak_references
from modicum.upstream.wrappers import canonical

State = Mapping[str, Any]
Tensors = dict[str, torch.Tensor]

_ON_META = "meta"
# After this many freed bytes malloc_trim is called: free() alone does not return memory that lies
# below other allocations.
_TRIM_BYTES = 32 << 20


# ---- differences between ranks


def level(model: Model, ranks: Ranks) -> Tensors:
    """Makes the model equal on all ranks, which may have built it in different ways: moves a tensor
    to meta on every rank if it is on meta on any of them, or is a non-persistent buffer whose
    values differ. Returns this rank's original tensors for the non-persistent buffers that differ
    or are on meta everywhere; they are to be filled with rank 0's values. Collective."""
    everyone = ranks.gather([_fingerprint(entry) for entry in model.tensors.values()])
    uneven = {}
    with without_weak_references(model.module):
        for entry, prints in zip(model.tensors.values(), zip(*everyone, strict=True), strict=True):
            is_same = len(set(prints)) == 1
            if not entry.is_persistent and (not is_same or prints[0] == _ON_META):
                uneven[entry.name] = entry.local
            if not is_same:
                _empty(entry)
    return uneven


def _fingerprint(entry: ModelTensor) -> str:
    """A text that is equal on ranks whose tensors are both on meta or both not; for non-persistent
    buffers the values must be equal, too."""
    if entry.tensor.is_meta:
        return _ON_META
    if entry.is_persistent:
        return ""
    whole = whole_of(entry.tensor, entry.name)
    digest = hashlib.blake2b(f"{whole.dtype} {whole.shape}".encode(), digest_size=16)
    digest.update(as_bytes(whole.cpu().contiguous()).numpy().data)
    return digest.hexdigest()


def _empty(entry: ModelTensor) -> None:
    """Moves a tensor to meta and so frees its memory."""
    if entry.tensor.is_meta:
        return
    if not isinstance(entry.tensor, torch.nn.Parameter):
        entry.put(dtensor_like(entry.tensor, torch.empty_like(entry.local, device="meta")))
        return
    numel = entry.managed.padded_numel if entry.managed else entry.local.numel()
    storage = torch.empty(numel, dtype=entry.local.dtype, device="meta")
    hand_over(entry.name, entry.tensor, storage, entry.managed)


# ---- the tensors to send


def chosen_from(
    model: Model, state: State, uneven: Tensors, *, strict: bool, drops: bool
) -> tuple[Tensors, dict[str, str]]:
    """Returns the tensors of a full state dict that the model needs, by name; and, for each other
    name of a tied tensor, the name under which the tensor is among these.

    Args:
        uneven: from `level`.
        strict: whether to refuse a dict that lacks a persistent tensor of the model, even if the
            model's tensor has values.
        drops: whether to drop names that are not in the model instead of refusing them.
    """
    values = uneven | {canonical(name): tensor for name, tensor in state.items()}
    unknown = [name for name in values if name not in model.tensors]
    if unknown and not drops:
        what = f"{counted(len(unknown), 'tensor', verb=True)} in the state dict and not in the "
        what += "model: strict=False drops what the model lacks"
        raise refusal("MISMATCH", what, tensor=unknown[0])
    alias_of: dict[str, str] = {}
    for names in ties_of(model.structure):
        there = [name for name in names if name in values]
        for name in there[1:]:
            if not _same_bits(values[there[0]], values[name]):
                what = "two tied names have different values in the state dict"
                raise refusal("MISMATCH", what, tensor=name, expected=f"the values of {there[0]}")
        alias_of |= {name: there[0] for name in names if there and name != there[0]}
    for name, entry in model.tensors.items():
        is_there = name in values or name in alias_of
        if not is_there and entry.is_persistent and (strict or entry.tensor.is_meta):
            what = "the state dict of rank 0 lacks a tensor: pass the model's whole state dict"
            raise refusal("MISMATCH", what, tensor=name)
    names = [name for name in model.tensors if name in values and name not in alias_of]
    return {name: values[name] for name in names}, alias_of


class _ConsumedDict:
    """A state dict from which each tensor is removed after it has been read, to free it."""

    def __init__(self, state: MutableMapping[str, Any]) -> None:
        self._state = state
        self._names: dict[str, list[str]] = {}
        self._freed_bytes = 0

    def note(self, alias_of: Mapping[str, str]) -> None:
        """Notes for each of the model's names the names in the dict under which its tensor is, ties
        included. `alias_of`: from `chosen_from`."""
        for name in self._state:
            target = canonical(name)
            self._names.setdefault(alias_of.get(target, target), []).append(name)

    def free(self, target: str, nbytes: int) -> None:
        """Removes a tensor of `nbytes` bytes; it is freed unless something else refers to it."""
        for name in self._names.get(target, ()):
            self._state.pop(name, None)
        self._freed_bytes += nbytes
        if self._freed_bytes >= _TRIM_BYTES:
            self._freed_bytes = 0
            ctypes.CDLL(None).malloc_trim(0)


def goal_of_memory(
    model: Model,
    ranks: Ranks,
    choose: Callable[[], tuple[Tensors, dict[str, str]]],
    consumed: MutableMapping[str, Any] | None = None,
) -> Goal:
    """The goal of loading tensors of rank 0 into the model. Collective.

    Args:
        choose: called on rank 0 only; returns the same as `chosen_from`.
        consumed: on rank 0 the dict that holds the tensors; each is removed after its last byte is
            read. None: nothing is removed.
    """
    chosen: list[tuple[str, torch.Tensor, torch.dtype]] = []
    state = None if consumed is None else _ConsumedDict(consumed)
    ranks.agree_on(model.facts())

    def make() -> list[Any]:
        tensors, alias_of = choose()
        if state is not None:
            state.note(alias_of)
        targets: dict[str, Node] = {
            name: {"op": "alias", "of": original} for name, original in alias_of.items()
        }
        described = []
        for name, tensor in tensors.items():
            target = model.tensors[name].tensor
            _check_source(name, tensor, target)
            chosen.append((name, tensor.detach(), target.dtype))
            described.append((name, dtype_name(target.dtype), list(tensor.shape)))
            targets[name] = {"op": "stored", "name": name}
        ordered = {name: targets[name] for name in model.tensors if name in targets}
        return [Recipe(ordered).text(), described]

    def read(index: int, offset: int, view: memoryview) -> None:
        """Fills `view` from byte `offset` of a tensor on, cast to the target's dtype."""
        name, tensor, dtype = chosen[index]
        first = offset // dtype.itemsize
        target = torch.frombuffer(view, dtype=torch.uint8).view(dtype)
        copy_run(tensor, first, target)
        if state is not None and first + target.numel() == tensor.numel():
            nbytes = tensor.nbytes
            chosen[index] = name, torch.empty(0), dtype
            del tensor
            state.free(name, nbytes)

    (text, described), memories = ranks.once(make, memory_before)
    checkpoint = _modicum.open_tensors(described, read if chosen else None)
    recipe = _modicum.make_recipe(checkpoint, text)
    return Goal(checkpoint, recipe, memories, [], only_rank_0=True)


def _check_source(name: str, source: torch.Tensor, target: torch.Tensor) -> None:
    if type(source) not in (torch.Tensor, torch.nn.Parameter):
        got = type(source).__name__
        what, expected = "the state dict of rank 0", "a plain tensor"
        raise refusal("UNSUPPORTED", what, tensor=name, expected=expected, got=got)
    if source.is_meta:
        what = "this tensor is on meta on rank 0 and has no values"
        raise refusal("UNSUPPORTED", what, tensor=name)
    facts = [f"{dtype_name(t.dtype)} {list(t.shape)}" for t in (target, source)]
    if source.shape != target.shape or not _casts(source.dtype, target.dtype):
        what = "the tensor of rank 0 does not fit the model"
        raise refusal("MISMATCH", what, tensor=name, expected=facts[0], got=facts[1])


def _same_bits(tensor: torch.Tensor, other: torch.Tensor) -> bool:
    if tensor.data_ptr() == other.data_ptr() and tensor.stride() == other.stride():
        return tensor.shape == other.shape
    alike = (tensor.dtype, tensor.shape, tensor.device) == (other.dtype, other.shape, other.device)
    return alike and torch.equal(as_bytes(tensor), as_bytes(other))


def _casts(source: torch.dtype, target: torch.dtype) -> bool:
    """Whether values of one dtype can be loaded as the other. FP8 codes can't be cast to another
    dtype, since their scales are missing."""
    wide = [d.is_floating_point and d.itemsize > 1 for d in (source, target)]
    return source == target or all(wide)
