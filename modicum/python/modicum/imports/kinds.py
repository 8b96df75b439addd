"""Recognises other programs' checkpoint directories by the files in them."""

import os
from pathlib import Path

from modicum.errors import failure, refusal
from modicum.imports.dcp import FILE as METADATA
from modicum.imports.pickles import reading
from modicum.upstream.accelerate_checkpoint import MODELS, OPTIMIZERS
from modicum.upstream.deepspeed_checkpoint import LATEST, MODEL_FILE, OPTIMIZER_FILE

DCP, ACCELERATE, ZERO = "torch.distributed.checkpoint", "accelerate", "DeepSpeed"
_NAMES_SHOWN = 5


def recognised(path: Path) -> tuple[str, list[Path]] | None:
    """What `path` is, DCP, ACCELERATE or ZERO, and its directories: those with `.metadata`, of
    which one has the model; with ZERO `path` itself. None if it is of no program that is known.
    Raises `IoError` if it is no directory that can be listed, `UsageError` if it has several models
    or optimizers."""
    with reading(path):
        names = sorted(entry.name for entry in path.iterdir())
    if METADATA in names:
        return DCP, [path]
    inside = [name for name in names if os.path.exists(path / name / METADATA)]
    models = [name for name in inside if MODELS.fullmatch(name)]
    if models:
        optimizers = [name for name in inside if OPTIMIZERS.fullmatch(name)]
        for folders in (models, optimizers):
            if len(folders) > 1:
                what, got = "a directory of several models or optimizers", ", ".join(folders)
                raise refusal("UNSUPPORTED", what, file=path.name, expected="one", got=got)
        return ACCELERATE, [path / name for name in (*models, *optimizers)]
    if LATEST in names or any(
        pattern.fullmatch(name) for name in names for pattern in (MODEL_FILE, OPTIMIZER_FILE)
    ):
        return ZERO, [path]
    return None


def required(path: Path) -> tuple[str, list[Path]]:
    """As `recognised`; also raises `IoError` for a directory of no program that is known."""
    found = recognised(path)
    if found is not None:
        return found
    with reading(path):
        inside = sorted(file.parent.name for file in path.glob(f"*/{METADATA}"))
        names = sorted(entry.name for entry in path.iterdir())
    got = f"{METADATA} in {', '.join(inside)}" if inside else ", ".join(names[:_NAMES_SHOWN])
    more = ", ..." if not inside and len(names) > _NAMES_SHOWN else ""
    expected = f"{METADATA} (torch.distributed.checkpoint), pytorch_model_fsdp_0/{METADATA} "
    expected += f"(accelerate), or {LATEST} or *_optim_states.pt (DeepSpeed's ZeRO)"
    what = "no checkpoint directory of a known program"
    raise failure("IO", what, file=path.name, expected=expected, got=f"{got}{more}" or "no file")
