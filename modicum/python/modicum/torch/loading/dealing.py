"""A load that takes some tensors from rank 0's memory.

Rank 0 deals them out in pieces, always in the same order: whoever needs elements of a piece gets it
whole, the others say that they don't want it. So each rank holds its shards and one piece, and a
state dict goes through the same plan, ledger and hand-over as a checkpoint.
"""

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from modicum import _modicum
from modicum.errors import refusal
from modicum.recipes import Recipe
from modicum.recipes.dtypes import dtype_name
from modicum.recipes.nodes import Node, caller
from modicum.recipes.structure import structure_of, ties_of
from modicum.torch.loading.load import _PAGE_BYTES, _Walk
from modicum.torch.ranks.group import Ranks
from modicum.torch.shards.tensors import ModelTensor, as_bytes
from modicum.upstream.torch_fsdp import hand_over
from modicum.upstream.wrappers import canonical

__all__ = ["Dealing"]

PIECE_BYTES = 8 << 20

State = Mapping[str, Any]
Index = tuple[int | slice, ...]

_ON_META = "meta"


# ---- pieces


@dataclass(frozen=True)
class _Piece:
    """A part of a tensor that fits into the room there is for one."""

    name: str
    at: Index  # in the tensor
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def _cut(dtype: torch.dtype, shape: tuple[int, ...], at: Index = ()) -> tuple[Node, list[Any]]:
    """A tensor put together from pieces, and (place, shape) of each: rows of the outermost dim that
    has rows which are small enough."""
    name = dtype_name(dtype)
    if not shape or math.prod(shape) * dtype.itemsize <= PIECE_BYTES:
        return caller(name, shape), [(at, shape)]
    row_bytes = math.prod(shape[1:]) * dtype.itemsize
    if row_bytes > PIECE_BYTES:
        rows = [_cut(dtype, shape[1:], (*at, row)) for row in range(shape[0])]
        node = {"op": "stack", "dim": 0, "in": [made for made, _ in rows]}
        return node, [one for _, cuts in rows for one in cuts]
    step = PIECE_BYTES // row_bytes
    cuts: list[Any] = []
    for begin in range(0, shape[0], step):
        end = min(begin + step, shape[0])
        cuts.append(((*at, slice(begin, end)), (end - begin, *shape[1:])))
    return {"op": "cat", "dim": 0, "in": [caller(name, part) for _, part in cuts]}, cuts


def _node(dtype: torch.dtype, shape: tuple[int, ...]) -> Node:
    """A node `caller` at the root would be left to the model's own rules."""
    return {"op": "reshape", "shape": list(shape), "in": [_cut(dtype, shape)[0]]}


# ---- the load


class Dealing(_Walk):
    """A load in which rank 0 deals: a whole state dict, or beside a checkpoint the buffers that no
    file holds."""

    def __init__(
        self,
        model: nn.Module,
        ranks: Ranks,
        seed: int,
        *,
        state: State | None,
        strict: bool,
        drops: bool,
        scratch: bool,
    ) -> None:
        """
        Args:
            state: by name, on rank 0; the others' is not looked at. None: there is a checkpoint.
            strict: whether tensors are refused that the dict lacks and that have values.
            drops: whether names are dropped that the model has not; else they are refused.
            scratch: whether buffers that no state dict has become rank 0's on every rank; else they
                are left alone.
        """
        super().__init__(model, ranks, seed, scratch=scratch)
        self.state, self.strict, self.drops, self.scratch = state, strict, drops, scratch
        self.sources: dict[str, torch.Tensor] = {}  # what is dealt; of rank 0
        self.uneven: list[str] = []  # names of buffers that rank 0 deals beside what is loaded
        self.pieces: list[_Piece] = []
        self.dealt = 0
        self.room: torch.Tensor | None = None

    # ---- what is meant

    def level(self) -> None:
        """What is on meta in one rank is from now on in all, as ranks may have built the model in
        different ways. Buffers of no state dict that are not the same everywhere are dealt."""
        kind = "path" if self.state is None else "dict"
        rules = [self.strict, self.drops, self.scratch]
        words = json.dumps([kind, rules, *self.tensors])
        self.ranks.agree(hashlib.blake2b(words.encode(), digest_size=16).hexdigest())
        everyone = self.ranks.gather([_looks(of) for of in self.tensors.values()])
        for of, looks in zip(self.tensors.values(), zip(*everyone, strict=True), strict=True):
            is_same = len(set(looks)) == 1
            if not of.is_persistent and (not is_same or looks[0] == _ON_META):
                self.uneven.append(of.name)
                self.sources[of.name] = of.tensor
            if not is_same:
                _empty(of)

    def recipe_of(self, **how: Any) -> Recipe:
        made = super().recipe_of(**how) if self.state is None else self._recipe_of_state()
        for name in self.uneven:
            self._check_source(name, self.tensors[name].tensor)
            made.targets[name] = _node(self.sources[name].dtype, tuple(self.sources[name].shape))
        return made

    def _recipe_of_state(self) -> Recipe:
        self.sources |= {canonical(name): tensor for name, tensor in self.state.items()}
        unknown = [name for name in self.sources if name not in self.tensors]
        if unknown and not self.drops:
            what = f"{len(unknown)} tensors of the state dict are no part of the model"
            raise refusal("MISMATCH", what, tensor=unknown[0])
        made, alias_of = Recipe(), self._aliases()
        for name, of in self.tensors.items():
            if name in alias_of:
                made.targets[name] = {"op": "alias", "of": alias_of[name]}
            elif name in self.sources and name not in self.uneven:
                self._check_source(name, of.tensor)
                made.targets[name] = _node(of.tensor.dtype, tuple(of.tensor.shape))
            elif of.is_persistent and (self.strict or of.tensor.is_meta):
                raise refusal("MISMATCH", "the state dict of rank 0 lacks a tensor", tensor=name)
        return made

    def _aliases(self) -> dict[str, str]:
        """Of each tied name but one, that one, which the state dict has."""
        alias_of: dict[str, str] = {}
        for names in ties_of(structure_of(self.model)):
            there = [name for name in names if name in self.sources]
            for name in there[1:]:
                if not _same_bits(self.sources[there[0]], self.sources[name]):
                    what = "two tied names have different values in the state dict"
                    raise refusal("MISMATCH", what, tensor=name, expected=f"that of {there[0]}")
            alias_of |= {name: there[0] for name in names if there and name != there[0]}
        return alias_of

    def _check_source(self, name: str, target: torch.Tensor) -> None:
        source = self.sources[name]
        if type(source) not in (torch.Tensor, nn.Parameter):
            got = type(source).__name__
            raise refusal("UNSUPPORTED", "rank 0 has no plain tensor", tensor=name, got=got)
        if source.is_meta:
            what = "nothing has computed this tensor: rank 0 has it on meta"
            raise refusal("UNSUPPORTED", what, tensor=name)
        facts = [f"{dtype_name(t.dtype)} {list(t.shape)}" for t in (target, source)]
        if source.shape != target.shape or not _casts(source.dtype, target.dtype):
            what = "rank 0 has another tensor than the model"
            raise refusal("MISMATCH", what, tensor=name, expected=facts[0], got=facts[1])

    def _refuse_empty_buffers(self) -> None:
        if self.scratch:
            super()._refuse_empty_buffers()

    # ---- what will be done

    def make_plan(
        self,
        strategy: str,
        staging: int | str | None,
        ledger: _modicum.Ledger | None,
        budget: int | str | None,
        fork: str,
    ) -> None:
        for target in self.targets:
            name = target["name"]
            if target["alias_of"] is None and (self.state is not None or name in self.uneven):
                dtype, shape = self.dtypes[name], tuple(target["shape"])
                cuts = _cut(dtype, shape)[1]
                self.pieces += [_Piece(name, at, part, dtype) for at, part in cuts]
        super().make_plan(strategy, staging, ledger, budget, fork)
        if not self.pieces:
            return
        if len(self.plan.exchange_group(0)) > 1:
            what = f"{self.plan.strategy} where ranks have other buffers than rank 0: build the "
            raise refusal("UNSUPPORTED", f"{what}model alike, under empty_parameters()")
        self.ranks.exchange_among(range(self.ranks.world_size), whole=False)

    def _init_bytes(self) -> int:
        return super()._init_bytes() + self._room_bytes() + _PAGE_BYTES

    def _room_bytes(self) -> int:
        return max((piece.nbytes for piece in self.pieces), default=0)

    def _device_of(self, of: ModelTensor) -> torch.device:
        """Buffers lie where FSDP2 computes, also where its parameters are offloaded."""
        if of.is_parameter or not self.managed:
            return super()._device_of(of)
        return next(iter(self.managed.values())).fsdp_param.device

    def headline(self) -> str:
        if self.state is None:
            return super().headline()
        return f"{len(self.targets)} tensors of rank 0's, {self.ranks.world_size} ranks"

    # ---- doing it

    def _made(self, ordinal: int) -> torch.Tensor:
        wanted = ordinal - len(self.callers)
        if wanted < 0:
            return super()._made(ordinal)
        if wanted < self.dealt - 1:
            what = "a cut that goes back in a tensor which rank 0 deals out"
            raise refusal("UNSUPPORTED", what, tensor=self.pieces[wanted].name)
        while self.dealt <= wanted:
            self._deal(is_wanted=self.dealt == wanted)
        return self._staged(self.pieces[wanted])

    def _deal(self, is_wanted: bool) -> None:
        """The next piece, which this rank wants or not."""
        piece = self.pieces[self.dealt]
        self.dealt += 1
        if piece.nbytes == 0:
            return
        staged = self._staged(piece)
        if self.ranks.rank == 0:
            part = self.sources[piece.name].detach()[piece.at]
            staged.view(piece.dtype).view(piece.shape).copy_(part)
        if self.ranks.world_size > 1:
            view = memoryview(staged.numpy())
            self.ranks.broadcast(0, view, 0, piece.nbytes if is_wanted else 0)

    def _staged(self, piece: _Piece) -> torch.Tensor:
        if self.room is None:
            room = _modicum.charge_init(self.ledger, max(self._room_bytes(), 1))
            self.room = torch.from_dlpack(room)
        return self.room[: piece.nbytes]

    def _end_making(self) -> None:
        super()._end_making()
        while self.dealt < len(self.pieces):
            self._deal(is_wanted=False)
        self.room = None
        self.sources.clear()


def _looks(of: ModelTensor) -> str:
    """What ranks compare: of buffers that no state dict has, the values too."""
    if of.tensor.is_meta:
        return _ON_META
    if of.is_persistent:
        return ""
    digest = hashlib.blake2b(f"{of.tensor.dtype} {of.tensor.shape}".encode(), digest_size=16)
    digest.update(as_bytes(of.tensor.cpu().contiguous()).numpy())
    return digest.hexdigest()


def _empty(of: ModelTensor) -> None:
    """Lets go of its memory; it is then as if it had been built on meta."""
    if of.tensor.is_meta:
        return
    if not of.is_parameter:
        of.put(torch.empty_like(of.tensor, device="meta"))
        return
    numel = of.managed.padded_numel if of.managed else of.local.numel()
    storage = torch.empty(numel, dtype=of.local.dtype, device="meta")
    hand_over(of.name, of.tensor, storage, of.managed)


def _same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    if one.data_ptr() == other.data_ptr() and one.stride() == other.stride():
        return one.shape == other.shape
    alike = (one.dtype, one.shape, one.device) == (other.dtype, other.shape, other.device)
    return alike and torch.equal(as_bytes(one), as_bytes(other))


def _casts(source: torch.dtype, target: torch.dtype) -> bool:
    """FP8 codes mean nothing without their scales."""
    wide = [d.is_floating_point and d.itemsize > 1 for d in (source, target)]
    return source == target or all(wide)
