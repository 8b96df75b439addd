"""Verbs of the program `modicum` as functions. Each runs the program that the wheel contains, in a
process of its own, and returns its JSON document."""

import json
import os
import subprocess
import sys
import warnings
from typing import TYPE_CHECKING, Any

from modicum.errors import failure, from_json, refusal
from modicum.options import dtype_text, require_flag

if TYPE_CHECKING:
    import torch

Place = str | os.PathLike[str]
_DIFFERENT = 12
"""The exit code of `diff` for checkpoints that differ."""


def verify(path: Place) -> dict[str, Any]:
    """Compares the files of a checkpoint with what its headers, index and records say, and the
    values of a saved one with its digests. Runs a process and waits for it, on any thread.

    Args:
        path: a checkpoint, or a run, of which all checkpoints are verified.

    Returns:
        The document of `modicum verify --json`: ok; files, each with name, bytes and result;
        tensors_checked; damaged, the checkpoints that a save has found damaged and renamed;
        warnings.

    Raises:
        FormatError, IntegrityError, IoError: a file is malformed, damaged, missing or unreadable.
            The error is that of the first such file. Its attribute `document` is the document,
            whose `files` have the results of all: "ok", or the file's error.
    """
    return _run("verify", [], path)


def convert(
    source: Place, out: Place, *,
    dtype: "torch.dtype | str | None" = None, keep_fp32: str | None = None,
    recipe: Place | None = None, shard_size: int | str | None = None,
    budget: int | str | None = None, allow_overflow: bool = False, adopt: bool = False,
    sparse: bool = False,
) -> dict[str, Any]:  # fmt: skip
    """Writes plain Hugging Face files. Resumable: after a kill a second call keeps complete files.
    Runs a process and waits for it, on any thread.

    Args:
        source: a checkpoint, whose values are compared with its digests if it is a saved one; or a
            directory of DCP, accelerate or DeepSpeed's ZeRO.
        out: a new directory.
        dtype: float32, bfloat16 or float16, a torch.dtype or its name, to which the stored weights
            are cast (never from an optimizer's masters); None: as stored.
        keep_fp32: a regular expression (RE2) of tensors that are written as float32.
        recipe: a recipe.json; None: tensors as stored.
        shard_size: the largest size of a file's data, bytes or text ("5GB").
        budget: host memory of the program, bytes or text ("1GiB"); None: what cgroup and node have
            left.
        allow_overflow: whether finite values may become infinite in `dtype`.
        adopt: whether to take over a journal whose owner can't be asked.
        sparse: whether runs of zeros are left as holes in the files.

    Returns:
        The document of `modicum convert --json`, whose warnings are also issued as UserWarnings.

    Raises:
        IoError: `out` exists (`CONFLICT`), or a file can't be read or written.
        FormatError, IntegrityError: `source` is malformed or damaged.
        UsageError: an argument is invalid, or a finite value would become infinite (`MISMATCH`)
            without `allow_overflow`.
        BudgetError: the conversion does not fit; no tensor has been read.
        PreemptedError: SIGTERM ended the program.
        Error: the program ended without a document (`INTERNAL`), as when the kernel kills it.
    """
    if keep_fp32 is not None and not isinstance(keep_fp32, str):
        raise refusal("USAGE", "keep_fp32", expected="a regular expression", got=repr(keep_fp32))
    for name, size in {"shard_size": shard_size, "budget": budget}.items():
        if isinstance(size, bool) or not isinstance(size, (int, str, type(None))):
            raise refusal("USAGE", name, expected='a size, such as "5GB"', got=repr(size))
    flags = _flags(
        dtype=dtype_text(dtype), keep_fp32=keep_fp32, recipe=recipe, shard_size=shard_size,
        budget=budget,
    )  # fmt: skip
    switches = {"allow_overflow": allow_overflow, "adopt": adopt, "sparse": sparse}
    flags += [_flag(name) for name, value in switches.items() if require_flag(name, value)]
    document = _run("convert", flags, source, out)
    for warning in document["warnings"]:
        warnings.warn(f"modicum: {warning}", stacklevel=2)
    return document


def diff(a: Place, b: Place) -> dict[str, Any]:
    """Compares names, dtypes, shapes and values of two checkpoints. Runs a process and waits for
    it, on any thread.

    Args:
        a: a checkpoint: a directory, a file, or `org/name` in the local Hugging Face cache.
        b: another one.

    Returns:
        The document of `modicum diff --json` (docs/reference/convert.md); `differences` is empty if
        they are equal. An optimizer's state is not compared.

    Raises:
        FormatError, IntegrityError, IoError: a checkpoint can't be read, or a saved one differs
            from its record.
        BudgetError: the buffers do not fit in what the cgroup has left.
    """
    return _run("diff", [], a, b, accepted=_DIFFERENT)


def _flags(**values: Any) -> list[str]:
    arguments = {name: value for name, value in values.items() if value is not None}
    return [f"{_flag(name)}={value}" for name, value in arguments.items()]


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _run(verb: str, flags: list[str], *places: Place, accepted: int = 0) -> dict[str, Any]:
    """Runs a verb, and returns its document. Raises the error in it, unless the exit code is
    `accepted` and there is none."""
    paths = [os.fspath(place) for place in places]
    paths = [f"./{path}" if path.startswith("-") else path for path in paths]  # no flags
    command = [sys.executable, "-m", "modicum.cli", verb, "--json", "-q", *flags, *paths]
    done = subprocess.run(command, capture_output=True, check=False)
    try:
        document: dict[str, Any] = json.loads(done.stdout)
    except ValueError as error:
        said = done.stderr.decode(errors="replace").strip()
        raise failure("INTERNAL", f"modicum {verb} printed no document", got=said) from error
    if "error" in document:
        failed = from_json(done.stdout.decode())
        del document["error"]
        failed.document = document or None
        raise failed
    assert done.returncode in (0, accepted), done.returncode
    return document
