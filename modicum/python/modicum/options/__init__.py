"""The options that several functions share: frozen dataclasses, in which a field that is None has
its default. A field that does not act in a function is refused there, never ignored."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from modicum._modicum import Ledger
from modicum.errors import refusal

if TYPE_CHECKING:
    import torch

Size = int | str
_DTYPES = {name: name for name in ("float32", "bfloat16", "float16")}
_SHORT_DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}


def dtype_text(dtype: Any) -> str | None:
    """torch's name of an argument `dtype`, which is a torch.dtype, a name as in `--dtype`, or None.
    Raises `UsageError` for any other."""
    known = {None: None} | _DTYPES | _SHORT_DTYPES
    name = None if dtype is None else str(dtype).removeprefix("torch.")
    if name not in known:
        expected = f"{', '.join(_DTYPES)} ({', '.join(_SHORT_DTYPES)}) or None"
        raise refusal("USAGE", "dtype", expected=expected, got=repr(dtype))
    return known[name]


def require_ledger(ledger: Any) -> Ledger | None:
    """Returns `ledger`. Raises `UsageError` unless it is one or None."""
    if ledger is not None and not isinstance(ledger, Ledger):
        raise refusal("USAGE", "ledger", expected="a modicum.Ledger", got=repr(ledger))
    return ledger


def require_seed(seed: Any) -> int:
    """Returns `seed`. Raises `UsageError` unless it is an unsigned 64-bit integer."""
    if isinstance(seed, bool) or not isinstance(seed, int) or not 0 <= seed < 1 << 64:
        raise refusal("USAGE", "seed", expected="an integer from 0 to 2**64 - 1", got=repr(seed))
    return seed


def require_flag(name: str, value: Any) -> bool:
    """Returns `value`. Raises `UsageError` unless it is a bool."""
    if not isinstance(value, bool):
        raise refusal("USAGE", name, expected="True or False", got=repr(value))
    return value


class Options:
    """The base of such a dataclass."""

    _argument: ClassVar[str]
    """The argument by which functions take it."""
    _defaults: ClassVar[Mapping[str, Any]]
    """The defaults that are not None."""


@dataclass(frozen=True, kw_only=True)
class MemoryPolicy(Options):
    """How bytes are held and moved."""

    _argument = "memory"
    _defaults = {"strategy": "own-shard", "fork": "excluded", "pin": False}

    strategy: str | None = None
    """Which ranks read the files: "own-shard" (the default), "node-reader", "replica-striped",
    "rank0-broadcast" or "full-per-rank". All give the same bits."""
    staging: Size | None = None
    """Host memory that a rank streams through, bytes or text ("8MiB", the default; less if the
    budget of a load needs it)."""
    ledger: Ledger | None = None
    """The account to which memory is charged; None: a new one, or that of `loading()`. Its limit is
    the budget of a load or save that has none: of the node, processes included. With a budget it is
    the limit of what this rank allocates. Both refuse before anything is allocated."""
    fork: Literal["excluded", "shared", "inherited"] | None = None
    """How forked children see the memory: "excluded" (the default; not mapped), "shared", or
    "inherited" (copies, which the budget includes); docs/guide/workers.md."""
    pin: bool | None = None
    """For `AdamW`: True pins the memory that a device reads or writes, at its exact size."""


@dataclass(frozen=True, kw_only=True)
class SaveOptions(Options):
    """What the files of a saved checkpoint hold, and how a save ends."""

    _argument = "options"
    _defaults = {"unused": "copy", "replicas": "equal"}

    source: str | Path | None = None
    """A checkpoint with the model's names, whose names, division into files, config and tokenizer
    the saved one gets; None: the checkpoint that was loaded."""
    dtype: "torch.dtype | str | None" = None
    """The dtype of all tensors that can be cast, a torch.dtype or its name ("bfloat16" or "bf16");
    refused if it would round a parameter that is saved as its own master (convert the checkpoint
    afterwards); None: as in the model."""
    shard_size: Size | None = None
    """The largest size of a file's data, bytes or text ("5GB"); None: the source's division."""
    unused: Literal["copy", "drop"] | None = None
    """Either "copy" (the default) or "drop" tensors of the source that the model does not use."""
    adapters: bool | None = None
    """True: only PEFT's adapters and what PEFT saves with them, in the files that `PeftModel`
    reads. False: all tensors; `resume` reads the adapters then, `from_pretrained` does not: for it
    save what `merge_and_unload()` returns. None: True if the model is a `PeftModel` that trains
    nothing else, and otherwise False."""
    grace: float | None = None
    """Seconds from SIGTERM to the kill, such as 25 for torchrun's 30. SIGTERM is held back until
    the checkpoint is committed, and then ends the process. All ranks raise `PreemptedError` if a
    rank gets a second SIGTERM, if at its rate of writing it would need longer than its grace, or if
    it has waited for the others for half of its grace before it writes. The program must not have
    its own handler of SIGTERM. None: SIGTERM is not handled."""
    replicas: Literal["equal", "first"] | None = None
    """With "equal" (the default) refuse parameters and state that differ between ranks, at the cost
    of a pass over replicated tensors. With "first" save the first rank's, as buffers always are."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "dtype", dtype_text(self.dtype))


def read_options(
    function: str, kind: type[Options], options: Any, acting: Collection[str] | None = None, *,
    expected: str = "None",
) -> dict[str, Any]:  # fmt: skip
    """The fields `acting` of `options`, by name; one that is None has its default.

    Args:
        function: the name of the function that was called, for errors.
        kind: the class of options that the function takes.
        options: the caller's argument: an object of this class, or None.
        acting: the fields that act in the function; None: all.
        expected: for errors, what to give in place of fields that do not act.

    Raises:
        UsageError: `options` is of another class, or has fields that do not act.
    """
    if options is not None and not isinstance(options, kind):
        wanted, got = f"a modicum.torch.{kind.__name__}, or None", type(options).__name__
        raise refusal("USAGE", kind._argument, expected=wanted, got=got)
    values = {name: getattr(options, name, None) for name in names_in(kind)}
    acting = values if acting is None else acting
    idle = [name for name in values if name not in acting and values[name] is not None]
    if idle:
        names = " and ".join(f"{kind.__name__}.{name}" for name in idle)
        what = f"{names} {'have' if idle[1:] else 'has'} no effect in {function}"
        got = ", ".join(repr(values[name]) for name in idle)
        raise refusal("USAGE", what, expected=expected, got=got)
    return {
        name: kind._defaults.get(name) if values[name] is None else values[name] for name in acting
    }


def names_in(kind: type[Options]) -> list[str]:
    """The names of the fields of a class of options."""
    return [field.name for field in fields(kind)]  # type: ignore[arg-type]
