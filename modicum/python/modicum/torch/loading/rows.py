"""Values that a load computes after its reads: new rows of token embeddings and heads that were
resized (the mean of the stored rows, or the model's initialisation); and DoRA's magnitudes, which
are norms of rows.

A rank holds a run of complete rows. For the mean, the stored rows are summed in integers, so that
its bits do not depend on the division of rows among ranks:

    largest absolute value of each column, over all ranks     max is exact in any order
    value / 2^exponent -> int64 with 40 bits, summed          integer sums are exact in any order
    sum / rows * 2^exponent -> the tensor's dtype

The exponent is that of the column's largest absolute value.
"""

import hashlib
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from modicum import _modicum
from modicum.errors import refusal
from modicum.recipes.structure import adapter_config
from modicum.torch.loading.goal import Model
from modicum.torch.ranks.collectives import reduce_over
from modicum.torch.shards.placements import Sharding, Shardings
from modicum.torch.shards.tensors import ModelTensor
from modicum.upstream.peft import begins_at_zero
from modicum.upstream.torch_fsdp import is_unit, stays_cut
from modicum.upstream.transformers import initialise, is_pretrained

_BITS = 40  # bits of a value in the sum: int64 has room for 2^23 rows
_CHUNK_ROWS = 1024
_LATER = "pass `missing` with a rule for the magnitude and load a saved adapter afterwards"


def require_rule(resized: str | None) -> str | None:
    """Returns `resized`. Raises `UsageError` unless it is a rule or None."""
    if resized not in (None, "mean", "model"):
        expected = "'mean', 'model' or None"
        raise refusal("USAGE", "resized", expected=expected, got=repr(resized))
    return resized


@torch.no_grad()
def fill_rows(model: Model, grown: Mapping[str, int], rule: str, seed: int) -> None:
    """Fills the rows beyond the stored ones. Collective over the meshes of these tensors.

    Args:
        grown: the number of stored rows, by name of the tensor; the same on every rank.
        rule: "mean": the mean of the stored rows; "model": the model's own initialisation of a
            module with only the new rows.
    """
    shardings = Shardings()
    done: set[int] = set()  # tied names have one tensor
    for name, stored in grown.items():
        entry = model.tensors[name]
        if id(entry.tensor) in done or entry.tensor.shape[0] <= stored:
            continue
        done.add(id(entry.tensor))
        rows = _Rows(entry, shardings.of(entry.tensor, name), shardings)
        if rule == "mean":
            rows.fill(stored, rows.mean(stored)[None])
        else:
            rows.fill(stored, _made_by_model(model.module, entry, stored, seed))


def require_rows(model: Model, grown: Mapping[str, int], norms: Mapping[str, str]) -> None:
    """Raises `UsageError` if this rank's part of a tensor in `grown` or `norms` begins or ends
    within a row; if this rank holds other rows of a magnitude than of its weight; or if a magnitude
    is not the norm of the weight alone."""
    shardings = Shardings()
    for name, stored in grown.items():
        entry = model.tensors[name]
        if entry.tensor.shape[0] > stored:
            _rows_of(entry, shardings.of(entry.tensor, name), shardings)
    for name, weight in norms.items():
        _require_zero(model, name)
        norm_rows, rows = (
            _rows_of(entry, shardings.of(entry.tensor, entry.name), shardings)
            for entry in (model.tensors[name], model.tensors[weight])
        )
        if norm_rows != rows:
            what = "a rank holds other rows of a weight than of its magnitude (DoRA): load the "
            what += f"model unsharded, or {_LATER}"
            expected, got = (f"rows {a} to {a + n}" for a, n in (rows, norm_rows))
            raise refusal("UNSUPPORTED", what, tensor=name, expected=expected, got=got)


def _require_zero(model: Model, name: str) -> None:
    """Raises `UsageError` if the adapter of this magnitude does not begin with B = 0: the magnitude
    would be the norm of the weight together with the adapter's part."""
    member = model.structure.members[name]
    config = adapter_config(member.chain, member.adapter)
    if not begins_at_zero(config):
        what = "a magnitude of DoRA whose adapter does not begin with B = 0: begin with "
        what += f"init_lora_weights=True, or {_LATER}"
        got = f"init_lora_weights={config.init_lora_weights!r}"
        raise refusal("UNSUPPORTED", what, tensor=name, got=got)


def require_tokens(model: Model) -> None:
    """Raises `UsageError` if a forward can't use PEFT's trainable tokens. PEFT reads the weight of
    the embedding without calling the embedding, so FSDP2 does not gather it if the embedding is a
    unit of its own. PEFT's plain tensors can't be combined with a weight that tensor parallelism
    divides."""
    for name, (weight, _) in model.structure.rows.items():
        entry = model.tensors[weight]
        if is_unit(entry.module):
            what = "trainable_token_indices: a forward of PEFT reads this embedding's weight "
            what += "without calling the embedding, so FSDP2 does not gather it"
            expected = "fully_shard on a module around PEFT's wrapper of the embedding"
            got = f"fully_shard on '{weight.rpartition('.')[0]}'"
            raise refusal("UNSUPPORTED", what, tensor=name, expected=expected, got=got)
        if stays_cut(entry.tensor, entry.managed):
            what = "trainable_token_indices: PEFT does not support tensor parallelism of the "
            what += "embedding"
            expected = "an embedding that parallelize_module leaves whole"
            raise refusal("UNSUPPORTED", what, tensor=name, expected=expected)


@torch.no_grad()
def fill_norms(model: Model, norms: Mapping[str, str]) -> None:
    """Computes DoRA's magnitudes from the loaded weights by PEFT's own function. Its argument for
    the adapter's part of the weight is 0, since `require_rows` refuses an adapter that does not
    begin with B = 0.

    Args:
        norms: the name of the weight, by name of its magnitude.
    """
    shardings = Shardings()
    for name, weight in norms.items():
        entry, base = model.tensors[name], model.tensors[weight]
        magnitudes = _Rows(entry, shardings.of(entry.tensor, name), shardings)
        rows = _Rows(base, shardings.of(base.tensor, weight), shardings)
        layer: Any = entry.module
        zero = torch.zeros((), dtype=base.tensor.dtype, device=rows.local.device)
        for mine, chunk in zip(
            magnitudes.local.split(_CHUNK_ROWS), rows.local.split(_CHUNK_ROWS), strict=True
        ):
            mine.copy_(layer.get_weight_norm(chunk, zero, 1.0)[:, None])
        torch.autograd.graph.increment_version(entry.tensor)


def _rows_of(entry: ModelTensor, sharding: Sharding, shardings: Shardings) -> tuple[int, int]:
    """This rank's first row, and its number of rows."""
    shape = entry.tensor.shape
    width = shape[1:].numel()
    runs = _modicum.Shard(sharding, shape, shardings.rank).runs([*range(len(shape))])
    first, count = runs[0] if runs else (0, 0)
    if len(runs) > 1 or first % width or count % width:
        what = "a tensor whose rows are filled after the load is cut within a row"
        raise refusal("UNSUPPORTED", what, tensor=entry.name, expected="Shard(0) or Replicate()")
    return first // width, count // width


class _Rows:
    """This rank's rows of a tensor."""

    def __init__(self, entry: ModelTensor, sharding: Sharding, shardings: Shardings) -> None:
        self._entry = entry
        # Of the ranks that hold the same rows, only one adds them to a sum.
        self._is_counted = shardings.counts(entry.tensor, sharding)
        self._first, count = _rows_of(entry, sharding, shardings)
        width = entry.tensor.shape[1:].numel()
        self.local = entry.local.detach().view(-1)[: count * width].view(count, width)

    def _below(self, row: int) -> torch.Tensor:
        """The local rows before the tensor's row `row`."""
        return self.local[: max(0, row - self._first)]

    def mean(self, stored: int) -> torch.Tensor:
        """The mean of the tensor's first `stored` rows, in float64. Collective."""
        rows = self._below(stored)
        width = self.local.shape[1]
        largest = torch.zeros(width, dtype=torch.float64, device=rows.device)
        for chunk in rows.split(_CHUNK_ROWS) if len(rows) else ():
            torch.maximum(largest, chunk.abs().amax(0).double(), out=largest)
        self._reduce(largest, "MAX")
        _, exponent = torch.frexp(largest)
        total = torch.zeros(width, dtype=torch.int64, device=rows.device)
        for chunk in rows.split(_CHUNK_ROWS) if self._is_counted and len(rows) else ():
            total += torch.ldexp(chunk.double(), _BITS - exponent).round().long().sum(0)
        self._reduce(total, "SUM")
        return torch.ldexp(total.double() / stored, exponent - _BITS)

    def fill(self, stored: int, values: torch.Tensor) -> None:
        """Fills this rank's part of the tensor's rows from `stored` on. `values`: one row for all
        of the tensor's new rows, or one row for each."""
        begin = max(0, stored - self._first)
        mine = self.local[begin:]
        if len(values) > 1 and len(mine) > 0:
            at = self._first + begin - stored
            values = values[at : at + len(mine)]
        if len(mine) > 0:
            mine.copy_(values.to(mine.dtype).expand_as(mine))
        torch.autograd.graph.increment_version(self._entry.tensor)

    def _reduce(self, values: torch.Tensor, operation: str) -> None:
        """Reduces `values` in place over all ranks of the tensor's mesh, on the mesh's device: the
        values are on the CPU with FSDP2's offload. `operation`: "MAX" or "SUM"."""
        mesh: Any = getattr(self._entry.tensor, "device_mesh", None)
        if mesh is not None:
            reduced = values.to(mesh.device_type)
            reduce_over(mesh, reduced, operation)
            values.copy_(reduced)


def _made_by_model(module: nn.Module, entry: ModelTensor, stored: int, seed: int) -> torch.Tensor:
    """The new rows, the same on every rank: those of a module with only these rows, initialised by
    the rule of the transformers model, with random numbers seeded by `seed` and the tensor's name.
    """
    root = next((m for m in module.modules() if is_pretrained(m)), None)
    count, width = entry.tensor.shape[0] - stored, entry.tensor.shape[1:].numel()
    if root is None:
        what = "resized='model' needs a model of transformers"
        raise refusal("UNSUPPORTED", what, tensor=entry.name)
    digest = hashlib.blake2b(f"{seed} {entry.name}".encode(), digest_size=7).digest()
    with torch.random.fork_rng(devices=[]), torch.device("cpu"):
        torch.manual_seed(int.from_bytes(digest, "little"))
        layer: nn.Module
        if isinstance(entry.module, nn.Embedding):
            layer = nn.Embedding(count, width)
        else:
            layer = nn.Linear(width if entry.tensor.dim() > 1 else 1, count)
        initialise(root, layer)
        return layer.get_parameter(entry.attribute).detach().reshape(count, width)
