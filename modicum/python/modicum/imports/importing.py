"""`import_checkpoint`: another program's checkpoint directory as a checkpoint of a
run."""

import os
from typing import Any

from modicum.errors import refusal
from modicum.imports import dcp_step, zero_step
from modicum.imports.dcp import Directory
from modicum.imports.kinds import ZERO, required
from modicum.imports.report import ImportReport
from modicum.imports.streams import Size, write_step
from modicum.imports.zero import ZeroDirectory
from modicum.options import dtype_text
from modicum.upstream.torch_optim import OPTIMIZERS
from modicum.walk.arguments import integer, path_of, root_of

Place = str | os.PathLike[str]
NO_OPTIMIZER = "none"


def import_checkpoint(
    directory: Place, run: Place, *,
    step: int | None = None, source: Place | None = None, optimizer: str | None = None,
    state_format: str | None = None, dtype: Any = None, budget: Size | None = None,
) -> ImportReport:  # fmt: skip
    """Writes another program's checkpoint as one of `run`: the model as Hugging Face files under
    the names of its state dict, and the state of its optimizer. The directory is recognised by what
    is there:

    - `.metadata`: torch.distributed.checkpoint (DCP)
    - `pytorch_model_fsdp_0/.metadata`, and `optimizer_0/.metadata` if there is one: accelerate's
      `save_state` under FSDP
    - `latest`, which names the newest checkpoint's folder, or `*_optim_states.pt` in such a folder:
      DeepSpeed's ZeRO-1, -2 or -3

    Needs neither torch nor the other program. Runs in one process and streams through staging: no
    complete tensor is in memory. No pickle is executed: names, shapes and places are read as data,
    and a name that the other program does not write there is refused. The options of an optimizer's
    groups (`lr`, ...) are imported. Other values that are no tensors, such as a scheduler's state,
    are left out and reported.

    Args:
        directory: the other program's directory.
        run: the directory of the run's checkpoints.
        step: the number of the training step, N of `run/step-N`; None: DeepSpeed's
            `global_steps`. Other directories have none.
        source: a checkpoint of the model, whose division into files, config and tokenizer the new
            one gets.
        optimizer: "none": only weights. The files of DCP and accelerate do not name the optimizer's
            class, so give its name in torch.optim, such as "AdamW": `modicum.torch.resume` refuses
            a state without one.
        state_format: for DeepSpeed "fp32" (also None) or "fp32-split": the format of the
            `modicum.torch.AdamW`, with seed 0, that will resume the checkpoint. DeepSpeed's masters
            become its state, and trained weights are made from them.
        dtype: the dtype of all tensors that can be cast, a torch.dtype or its name; None: as
            saved, and for DeepSpeed as trained.
        budget: host memory of this process, bytes or "1.5GiB"; None: what the kernel still grants;
            "none": not checked.

    Raises:
        IoError: the directory is of no known program, or a file can't be read or written; or
            CONFLICT: an intact checkpoint has this number.
        FormatError: a file was not written by the other program, is damaged, or for DeepSpeed
            differs in form from those of version 0.19.
        IntegrityError: bytes that are read differ from the CRC-32 in their file; or a rank's file
            is missing, doubled or of another checkpoint.
        UsageError: an argument does not apply to this directory; or it has the tensors of several
            models or of none, experts or tensor-parallel ranks, masters that are not float32, or,
            without `optimizer="none"`, state of DeepSpeed that is not Adam's.
        BudgetError: the import does not fit; nothing was written.
    """
    root, cast = root_of(run), dtype_text(dtype)
    number = None if step is None else integer("step", step, 0)
    path = path_of("directory", directory)
    kind, paths = required(path)
    _require_applies(kind, optimizer, state_format)
    with_state = optimizer != NO_OPTIMIZER
    if kind == ZERO:
        opened = ZeroDirectory.open(path)
        number = opened.global_steps if number is None else number
        form = (state_format or zero_step.FORMATS[0]) if with_state else None
        contents = zero_step.contents_of(opened, source, form, cast)
    elif number is None:
        what = f"step: a directory of {kind} tells no number"
        raise refusal("USAGE", what, expected="the number of the training step", got="None")
    else:
        directories = [Directory.open(directory) for directory in paths]
        cls = optimizer if with_state else None
        contents = dcp_step.contents_of(directories, source, with_state, cls, cast)
    return write_step(root, number, contents, budget, kind)


def _require_applies(kind: str, optimizer: str | None, state_format: str | None) -> None:
    """Raises `UsageError` for an argument that does not apply to a directory of `kind`."""
    if kind == ZERO and optimizer not in (None, NO_OPTIMIZER):
        expected = f"None or {NO_OPTIMIZER!r}: the state of {kind} becomes modicum.torch.AdamW's"
        raise refusal("USAGE", "optimizer", expected=expected, got=repr(optimizer))
    _require_class_name(optimizer)
    if state_format is None:
        return
    expected = " or ".join(map(repr, zero_step.FORMATS))
    if kind != ZERO:
        expected = f"None: the state of {kind} keeps its form"
    elif optimizer == NO_OPTIMIZER:
        expected = f"None, since optimizer={NO_OPTIMIZER!r} leaves the state out"
    elif state_format in zero_step.FORMATS:
        return
    raise refusal("USAGE", "state_format", expected=expected, got=repr(state_format))


def _require_class_name(optimizer: Any) -> None:
    """Raises `UsageError` for a name that no optimizer's class has, such as "adamw"."""
    if optimizer in (None, NO_OPTIMIZER):
        return
    expected = f"None, {NO_OPTIMIZER!r} or the name of the optimizer's class, such as 'AdamW'"
    if isinstance(optimizer, str) and optimizer.isidentifier():
        named = {name.lower(): name for name in (*OPTIMIZERS, NO_OPTIMIZER)}
        known = named.get(optimizer.lower(), optimizer)  # others may be of the program
        if known == optimizer:
            return
        expected = repr(known)
    raise refusal("USAGE", "optimizer", expected=expected, got=repr(optimizer))
