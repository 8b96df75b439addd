"""`save` and `async_save`: write a model and its optimizer into a checkpoint of the run."""

import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from modicum.errors import UsageError, refusal
from modicum.options import MemoryPolicy, SaveOptions, read_options
from modicum.options.renamed import refuse_old_keywords
from modicum.torch.loading.around import taken
from modicum.torch.loading.goal import Model
from modicum.torch.loading.origin import Origin, inside_ddp, loaded_in, origin_of, remember
from modicum.torch.loading.overwritten import require_defined
from modicum.torch.loading.planning import Size
from modicum.torch.optim import in_flight
from modicum.torch.optim.adamw import AdamW
from modicum.torch.ranks.group import Ranks
from modicum.torch.saving.adapters import adapter_names, goal_of_adapters
from modicum.torch.saving.background import AsyncSave
from modicum.torch.saving.planning import PlannedSave, SaveRequest, plan_of
from modicum.torch.saving.report import SaveReport
from modicum.torch.saving.running import OpenSave
from modicum.torch.saving.sigterm import Sigterm
from modicum.torch.saving.states import Event
from modicum.torch.saving.weights import Form, goal_of
from modicum.torch.saving.writing import CheckpointInFlight
from modicum.upstream.wrappers import unwrapped
from modicum.walk.arguments import root_of


@refuse_old_keywords(SaveOptions, MemoryPolicy)
def save(
    model: nn.Module, run: str | Path, *,
    step: int, optimizer: torch.optim.Optimizer | None = None, extra: dict[str, Any] | None = None,
    extra_per_rank: Any = None, keep: int | None = None, budget: Size | None = None,
    options: SaveOptions | None = None, memory: MemoryPolicy | None = None,
) -> SaveReport:  # fmt: skip
    """Collectively saves a checkpoint: Hugging Face files of the model, and the optimizer's state.

    Every rank of torch's default process group calls it with the same arguments;
    without a process group there is one rank. Each rank writes its own elements at their final
    offsets, streamed through staging of a fixed size: tensors are not gathered. Names and shapes in
    the files are those of the checkpoint that was loaded, dtypes those of the model. The checkpoint
    becomes visible as `run/step-N` once all of it is durable.

    Args:
        model: a model that `load` or `ModicumReader` has loaded, also inside a wrapper. For any
            other model give a `source` in `options`.
        run: the directory of all checkpoints, on a file system that all ranks share; created if
            its parent exists.
        step: the number of training steps that are done, 0 or more: N of `run/step-N`. With it
            `range(resume(...).step, steps)` goes on where the run ended.
        optimizer: `modicum.torch.AdamW`, or one whose state has numbers and tensors of the
            parameters' shapes; also in accelerate's wrapper. Includes options. None: no state.
        extra: a dict of values such as a scheduler's state: None, numbers, str, bytes, lists,
            tuples, dicts, dtypes, and tensors and arrays of up to 64 KiB; the same on every rank.
            They come back with their types, but a scalar of numpy as a number, an OrderedDict or
            defaultdict as a dict, and keys of dicts sorted (docs/reference/checkpoints.md).
        extra_per_rank: this rank's own such value, also with large tensors; on all ranks or none.
        keep: the number of complete checkpoints to keep, including this one; None: all.
        budget: as for `load`; the promised peak includes what the processes hold already.
        options: what the files hold, and how the save ends: `SaveOptions`.
        memory: `MemoryPolicy` with `staging` and `ledger`.

    Returns:
        The same report on every rank; rank 0 also issues its warnings as UserWarnings.

    Raises:
        BudgetError: the save does not fit; nothing has been written.
        FormatError, IntegrityError: the source checkpoint is malformed or damaged.
        IoError: a file can't be written (`NOSPACE`, `IO`), the checkpoint exists, replicas differ.
        UsageError: model, optimizer and arguments do not fit together.
        PreemptedError: after SIGTERM the rest of the save does not fit into `grace`.
        PeerError: another rank failed. Every error is raised on all ranks, and the checkpoint is
            not visible. Only if a rank dies while rank 0 publishes, the others may raise this error
            although it is: `resume` finds it.
    """

    def ask(sigterm: Sigterm) -> SaveRequest:
        return _request(
            "save", options, memory, root=run, step=step, keep=keep, budget=budget, extra=extra,
            per_rank=extra_per_rank, sigterm=sigterm,
        )  # fmt: skip

    saved = _save(model, optimizer, _grace(options), ask)
    assert isinstance(saved, SaveReport)
    return saved


@refuse_old_keywords(SaveOptions, MemoryPolicy)
def async_save(
    model: nn.Module, run: str | Path, *,
    step: int, optimizer: torch.optim.Optimizer | None = None, extra: dict[str, Any] | None = None,
    extra_per_rank: Any = None, keep: int | None = None, budget: Size | None = None,
    options: SaveOptions | None = None, memory: MemoryPolicy | None = None,
) -> AsyncSave:  # fmt: skip
    """Collective, as `save`, but returns while files are still written, from the memory of model
    and state: an optimizer step waits, or copies, before it overwrites them (docs/guide/save.md).

    The errors of the agreement, the plan and the budget are raised by this call, later
    ones by `AsyncSave.result` and by the next collective call.

    Args:
        model, run, step, optimizer, extra, extra_per_rank, keep, budget, options, memory: as for
            `save`.

    Returns:
        The save. Call its `result` on the thread that called this, before the program ends.

    Raises:
        BudgetError, FormatError, IntegrityError, IoError, UsageError, PeerError, PreemptedError: as
            for `save`, for errors before the files are written; also the error of an earlier save
            in the background which has failed.
    """

    def ask(sigterm: Sigterm) -> SaveRequest:
        return _request(
            "async_save", options, memory, root=run, step=step, keep=keep, budget=budget,
            extra=extra, per_rank=extra_per_rank, sigterm=sigterm,
        )  # fmt: skip

    saving = _save(model, optimizer, _grace(options), ask)
    assert isinstance(saving, AsyncSave)
    return saving


def _grace(options: Any) -> float | None:
    return options.grace if isinstance(options, SaveOptions) else None


def _request(
    function: str, options: SaveOptions | None, memory: MemoryPolicy | None, **values: Any
) -> SaveRequest:
    """The arguments of a save. `values`: fields of `SaveRequest`. Raises `UsageError` for a wrong
    argument, on the ranks that have it."""
    files = read_options(function, SaveOptions, options)
    holding = read_options(function, MemoryPolicy, memory, ("staging", "ledger"))
    ledger, values["budget"] = taken(holding["ledger"], values["budget"])
    names = ("source", "dtype", "shard_size", "unused", "adapters", "replicas")
    form = Form(
        **{name: files[name] for name in names}, staging=holding["staging"],
        background=function == "async_save",
    )  # fmt: skip
    values["root"] = root_of(values["root"])
    return SaveRequest(form=form, ledger=ledger, **values)


def _save(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    grace: float | None,
    ask_of: Callable[[Sigterm], SaveRequest],
) -> SaveReport | AsyncSave:
    """`ask_of`: returns the arguments. It is called where all ranks raise its error."""
    called = time.monotonic()
    in_flight.finish()
    flight, sigterm = CheckpointInFlight(), Sigterm(grace)
    with ExitStack() as stack:
        stack.push(sigterm.leave)
        stack.callback(flight.end)
        with suppress(UsageError):  # raised below, where the other ranks learn of it
            sigterm.hold()
        ranks = stack.enter_context(Ranks.of_world(sigterm.while_waiting).together())
        in_flight.deliver()
        sigterm.hold()
        ask = ask_of(sigterm)
        model, optimizer = inside_ddp(model), unwrapped(optimizer)
        if ask.form.source is None:
            model = loaded_in(model)
        if not ask.form.background:
            return save_together(model, optimizer, ask, ranks, flight)
        begun = _begun(model, optimizer, ask, ranks, flight)
        saving = AsyncSave(begun, partial(_finished, model, begun), sigterm)
        return saving._start(stack.pop_all(), time.monotonic() - called)


def save_together(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    ask: SaveRequest,
    ranks: Ranks,
    flight: CheckpointInFlight,
) -> SaveReport:
    """Saves in the foreground, inside a context of `Ranks.together` that the caller has entered."""
    begun = _begun(model, optimizer, ask, ranks, flight)
    saved = _finished(model, begun, begun.write())
    _warn(saved, ranks)
    return saved


def _begun(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    ask: SaveRequest,
    ranks: Ranks,
    flight: CheckpointInFlight,
) -> OpenSave:
    """Plans the save and makes its directory, before tensors are written. Collective."""
    whole = Model.of(model, reshards=True)
    require_defined(whole)
    flight.hold(_read(whole, optimizer))
    ranks.agree_on(ask.facts() | {"argument optimizer": _kind(optimizer)} | whole.facts())
    names = adapter_names(whole, ask.form.adapters)
    form = replace(ask.form, adapters=names is not None)
    ask = replace(ask, form=form, adapter_names=names)
    if names is not None:
        goal = goal_of_adapters(whole, names, ranks)
    else:
        goal = goal_of(whole, ranks, ask.form.source, origin_of(model), ask.form.unused)
    return OpenSave(plan_of(ask, whole, goal, optimizer, ranks), ranks, flight)


def _read(model: Model, optimizer: torch.optim.Optimizer | None) -> Iterator[tuple[str, Any]]:
    """(name, value) for the tensors of torch that a save reads, among other values of the state.
    `modicum.torch.AdamW` keeps the memory of its state itself."""
    yield from ((name, entry.tensor) for name, entry in model.tensors.items())
    if isinstance(optimizer, torch.optim.Optimizer) and not isinstance(optimizer, AdamW):
        names = model.names
        for parameter, entry in optimizer.state.items():
            name = names.get(id(parameter), "")
            yield from ((f"{name}.{key}", value) for key, value in entry.items())


def _finished(
    model: nn.Module,
    begun: OpenSave,
    outcome: dict[str, Any],
    note: Callable[[Event], object] = lambda _: None,
) -> SaveReport:
    """Publishes the save after its last byte. Collective. On any thread. `note`: as for
    `OpenSave.finish`."""
    report = begun.finish(outcome, note)
    _follow(model, begun.planned, report)
    return report


def _warn(report: SaveReport, ranks: Ranks) -> None:
    if ranks.rank == 0:
        for warning in report.warnings:
            warnings.warn(f"modicum: {warning}", stacklevel=3)


def _kind(optimizer: Any) -> str:
    if optimizer is not None and not isinstance(optimizer, torch.optim.Optimizer):
        got = type(optimizer).__name__
        raise refusal("USAGE", "optimizer", expected="a torch.optim.Optimizer or None", got=got)
    return type(optimizer).__name__


def _follow(model: nn.Module, planned: PlannedSave, report: SaveReport) -> None:
    """The new checkpoint becomes the model's origin if the old origin is a checkpoint next to it,
    which `keep` or Trainer's `save_total_limit` may remove; otherwise it serves once the old origin
    is gone."""
    origin = origin_of(model)
    if origin is None or origin.source is None or planned.ask.form.adapters:
        return
    old, new = Path(origin.source).resolve(), Path(report.path).resolve()
    is_in_root = old.parent == planned.ask.root.resolve()
    is_next_to = _is_next_to(old, new) and (old / "COMMIT").exists()
    saved = Origin(new, planned.parts.model.plan.recipe_text)
    remember(model, origin.followed_by(saved, is_next_to=is_in_root or is_next_to))


def _is_next_to(old: Path, new: Path) -> bool:
    """Whether two checkpoints are in one directory. Those of accelerate's further models are in
    subdirectories of the same name."""
    if old.name == new.name:
        old, new = old.parent, new.parent
    return old.parent == new.parent
