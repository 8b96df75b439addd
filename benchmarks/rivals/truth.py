"""The expected shards: `from_pretrained` in a single process, sharded by torch.chunk."""

import hashlib
import json
from pathlib import Path
from typing import Any

import torch
from rivals.model import cuts, dtype_of, local_of
from rivals.rows import Case
from transformers import AutoModelForCausalLM


def digest(tensor: torch.Tensor) -> str:
    """Dtype, shape and digest of the bits."""
    bits = tensor.contiguous().reshape(-1).view(torch.uint8).numpy()
    what = f"{tensor.dtype} {list(tensor.shape)}".removeprefix("torch.")
    return f"{what} {hashlib.blake2b(bits, digest_size=16).hexdigest()}"


def shard_of(case: Case, name: str, tensor: torch.Tensor, rank: int) -> torch.Tensor:
    for dim, parts, index in cuts(case, name, rank):
        pieces = tensor.chunk(parts, dim)
        tensor = pieces[index] if index < len(pieces) else tensor.narrow(dim, 0, 0)
    return tensor


def ties(model: torch.nn.Module) -> list[list[str]]:
    """Groups of names that share one parameter."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return sorted(sorted(group) for group in names.values() if len(group) > 1)


def make_truth(case: Case, path: Path) -> None:
    """Writes the digests of all shards of all ranks and of the buffers, the ties, and the bytes of
    all shards."""
    model = AutoModelForCausalLM.from_pretrained(case.directory, dtype=dtype_of(case))
    shards: dict[str, list[str]] = {}
    shards_bytes = 0
    counted = {name for name, _ in model.named_parameters()}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        parts = [shard_of(case, name, parameter.detach(), rank) for rank in range(case.world)]
        shards[name] = [digest(part) for part in parts]
        shards_bytes += sum(part.nbytes for part in parts) if name in counted else 0
    buffers = {name: digest(buffer) for name, buffer in model.named_buffers()}
    truth = {"shards": shards, "buffers": buffers, "ties": ties(model), "bytes": shards_bytes}
    path.write_text(json.dumps(truth))


def differences(model: torch.nn.Module, rank: int, path: Path) -> list[str]:
    """The names of a loaded model whose dtype, shape or bits differ from the expected ones or that
    are missing on one side, and a message if the ties differ."""
    truth: dict[str, Any] = json.loads(path.read_text())
    expected = {name: ranks[rank] for name, ranks in truth["shards"].items()} | truth["buffers"]
    tensors = dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers())
    found = {name: digest(local_of(tensor)) for name, tensor in tensors.items()}
    wrong = [name for name in expected | found if expected.get(name) != found.get(name)]
    if ties(model) != truth["ties"]:
        wrong.append(f"tied: {ties(model)} instead of {truth['ties']}")
    return wrong
