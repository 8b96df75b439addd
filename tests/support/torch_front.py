"""Models loaded through `modicum.torch` in one process that plays each rank in turn (see
`sharding.playing_rank`), and their expected contents.

The oracle is `from_pretrained` in one process, sharded here by `torch.chunk`.
"""

import re
import sys
import tempfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from math import prod
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers
from families import FAMILIES, TEXT, Family, Tensors
from nested_options import nested
from safetensors.torch import load_file
from sharding import AXES, Cut, assert_same, bits, mesh_of
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import modicum.torch
from modicum.torch import LoadReport

# More than ten experts: as text, expert 10 sorts before expert 2.
MIXTRAL_16 = Family("mixtral_16", "MixtralForCausalLM", "mixtral", TEXT | {"num_local_experts": 16})
BY_NAME = {family.name: family for family in (*FAMILIES, MIXTRAL_16)}
WORLDS = (1, 2, 3)

transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()


# ---- families


@cache
def _places() -> tempfile.TemporaryDirectory[str]:
    """A temporary directory, made only when something is written: ranks that import this module end
    without cleaning up."""
    return tempfile.TemporaryDirectory(prefix="modicum-torch-")


@cache
def checkpoint_of(name: str) -> Path:
    """The path of a family's checkpoint in the hub's form. It must be written before a process
    group exists, in which only rank 0 would write it."""
    assert not dist.is_initialized(), f"{name} has to be there before a rank is played"
    family = BY_NAME[name]
    return family.write(family.build(), Path(_places().name) / name)


@cache
def from_pretrained(name: str, dtype: Any = "auto") -> Any:
    model = BY_NAME[name].model_class.from_pretrained(checkpoint_of(name), dtype=dtype)
    hollow = [name for name, parameter in model.named_parameters() if parameter.is_meta]
    assert not hollow, f"the oracle leaves {hollow[0]} on meta"  # transformers 4.57 does
    return model


def stored_in(directory: Path) -> Tensors:
    """The tensors in a checkpoint's files."""
    files = sorted(directory.glob("*.safetensors"))
    return {name: tensor for file in files for name, tensor in load_file(file).items()}


def config_of(name: str) -> Any:
    return transformers.AutoConfig.from_pretrained(checkpoint_of(name))


def empty(name: str, dtype: Any = None, cls: Any = None, **changes: Any) -> Any:
    """A family's model whose parameters are on meta. `changes`: members of its configuration."""
    config = config_of(name)
    for field, value in changes.items():
        setattr(config, field, value)
    dtype = dtype or getattr(torch, BY_NAME[name].dtype)
    with modicum.torch.empty_parameters():
        return (cls or BY_NAME[name].model_class)._from_config(config, dtype=dtype)


def load(model: nn.Module, source: Any, **options: Any) -> LoadReport:
    return modicum.torch.load(
        model, source, **nested({"progress": False, "budget": "none", **options}, "rules", "memory")
    )


# ---- sharding

_COLUMNWISE, _ROWWISE = r"\.(q|k|v|gate|up)_proj$", r"\.(o|down)_proj$"


def layers_of(model: nn.Module) -> Iterator[nn.Module]:
    """The members of the outermost lists of modules: the layers of every tower."""
    for module in model.children():
        yield from module if isinstance(module, nn.ModuleList) else layers_of(module)


def _shard_dim(shape: Any, parts: int, dim: int) -> int:
    """The dim to shard: FSDP2 supports uneven shards along dim 0 only."""
    return dim if dim < len(shape) and shape[dim] % parts == 0 else 0


def _parallelize(model: nn.Module, mesh: Any) -> None:
    for name, module in model.named_modules():
        for pattern, style in ((_COLUMNWISE, ColwiseParallel), (_ROWWISE, RowwiseParallel)):
            if re.search(pattern, name):
                parallelize_module(module, mesh, style())


def left_whole(model: nn.Module) -> set[str]:
    """The parameters that FSDP2 can't shard: those without dims, and those of another dtype than
    other parameters of their module, since a unit of FSDP2 is at least a module and has one
    dtype."""
    names = set()
    for path, module in model.named_modules():
        own = dict(module.named_parameters(path, recurse=False))
        odd = {n for n, p in own.items() if p.dtype != model.dtype}
        names |= {n for n, p in own.items() if p.dim() == 0}
        names |= odd if len(odd) < len(own) else set()
    return names


def shard(model: nn.Module, cut: Cut) -> nn.Module:
    """Shards by FSDP2: each module of another dtype than the model's, each layer, and the rest.
    With the layout "tp-fsdp" tensor parallelism shards before."""
    if cut.layout == "none":
        return model
    mesh = mesh_of(cut)
    if cut.layout == "tp-fsdp":
        _parallelize(model, mesh["tp"])
        mesh = mesh["dp"]
    parts = cut.mesh[AXES[cut.layout].index("dp")]
    options = {
        "mesh": mesh,
        "ignored_params": {model.get_parameter(name) for name in left_whole(model)},
        "shard_placement_fn": lambda p: Shard(
            _shard_dim(getattr(p, "_local_tensor", p).shape, parts, cut.dim)
        ),
    }
    for module in reversed([*model.modules()]):  # a unit within another comes first
        own = set(module.parameters(recurse=False)) - options["ignored_params"]
        if any(p.dtype != model.dtype for p in own):
            fully_shard(module, **options)
    for layer in layers_of(model):
        if any(True for _ in layer.parameters()):
            fully_shard(layer, **options)
    return fully_shard(model, **options)


def chunk(whole: Any, parts: int, part: int, dim: int = 0) -> Any:
    """One of `parts` chunks; the last chunks may be empty."""
    chunks = torch.chunk(whole, parts, dim)
    return chunks[part] if part < len(chunks) else whole.narrow(dim, 0, 0)


def local_part(name: str, whole: Any, cut: Cut, rank: int) -> Any:
    """A rank's shard of the parameter with this name."""
    if cut.layout == "none":
        return whole
    at = {
        axis: rank // prod(cut.mesh[i + 1 :]) % cut.mesh[i]
        for i, axis in enumerate(AXES[cut.layout])
    }
    size = dict(zip(AXES[cut.layout], cut.mesh, strict=True))
    module, _, leaf = name.rpartition(".")
    if cut.layout == "tp-fsdp" and re.search(_COLUMNWISE, module):
        whole = chunk(whole, size["tp"], at["tp"])
    if cut.layout == "tp-fsdp" and re.search(_ROWWISE, module) and leaf == "weight":
        whole = chunk(whole, size["tp"], at["tp"], 1)
    return chunk(whole, size["dp"], at["dp"], _shard_dim(whole.shape, size["dp"], cut.dim))


def whole_gradient(name: str, shape: Any, step: int) -> Any:
    """A gradient that depends only on the parameter's name, the step and global indices, and so is
    the same in every world."""
    generator = torch.Generator().manual_seed(zlib.crc32(f"{name} {step}".encode()))
    return torch.randn(shape, generator=generator)


# ---- contents of a model


def local(tensor: Any) -> Any:
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach()


def parameters_of(model: nn.Module) -> Tensors:
    """The parameters by name; a tied one under each of its names."""
    return dict(model.named_parameters(remove_duplicate=False))


def ties_of(tensors: Tensors) -> set[frozenset[str]]:
    """The set of each tensor's names."""
    names: dict[int, list[str]] = {}
    for name, tensor in tensors.items():
        names.setdefault(id(tensor), []).append(name)
    return set(map(frozenset, names.values()))


def assert_holds(model: nn.Module, whole: nn.Module, cut: Cut, rank: int) -> None:
    """Asserts that `model` has its shard of every parameter of `whole`, every buffer, bit for bit,
    and the same ties."""
    mine, theirs = parameters_of(model), parameters_of(whole)
    assert mine.keys() == theirs.keys()
    assert ties_of(mine) == ties_of(theirs), "other ties"
    uncut = left_whole(whole)
    for name, parameter in mine.items():
        part = theirs[name].detach()
        part = part if name in uncut else local_part(name, part, cut, rank)
        assert not parameter.is_meta, f"{name} is on meta"
        assert parameter.shape == theirs[name].shape, name
        assert parameter.dtype == theirs[name].dtype, name
        assert_same(local(parameter), part, f"{name} of rank {rank}, {cut}")
    buffers, computed = dict(model.named_buffers()), dict(whole.named_buffers())
    assert buffers.keys() == computed.keys()
    for name, buffer in buffers.items():
        assert not buffer.is_meta, f"{name} is on meta"
        assert_same(buffer, computed[name], f"{name} of rank {rank}")


def differs(got: Any, expected: Any) -> bool:
    """Whether dtype, shape or bits differ."""
    try:
        assert_same(got, expected, "")
    except AssertionError:
        return True
    return False


def buffer_bits(model: nn.Module) -> dict[str, bytes]:
    return {name: bits(buffer) for name, buffer in model.named_buffers()}


def assert_empty(model: nn.Module) -> None:
    """Asserts that a failed load has left the model empty."""
    assert all(parameter.is_meta for parameter in model.parameters())


def assert_trains_as_built(model: nn.Module, name: str) -> None:
    """Asserts that `requires_grad` is the constructor's, although `from_pretrained` unfreezes
    frozen parameters."""
    with torch.device("meta"):
        built = BY_NAME[name].model_class(config_of(name))
    trained = {n: p.requires_grad for n, p in parameters_of(model).items()}
    assert trained == {n: p.requires_grad for n, p in parameters_of(built).items()}


# ---- process groups


@contextmanager
def alone() -> Iterator[None]:
    """A real process group of one rank."""
    hook = sys.excepthook
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    try:
        yield
    finally:
        dist.destroy_process_group()
        sys.excepthook = hook
