"""`save`: writes a model and its optimizer into a step (a saved checkpoint directory)."""

import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, overload

import torch
from torch import nn

from modicum import _modicum
from modicum.errors import UsageError, refusal
from modicum.torch.loading.around import taken
from modicum.torch.loading.goal import Model, Source
from modicum.torch.loading.origin import Origin, loaded_in, origin_of, remember
from modicum.torch.loading.overwritten import require_defined
from modicum.torch.loading.planning import Size
from modicum.torch.optim import in_flight
from modicum.torch.optim.adamw import AdamW
from modicum.torch.ranks.group import Ranks
from modicum.torch.saving.adapters import goal_of_adapters, only_adapters
from modicum.torch.saving.background import Saving
from modicum.torch.saving.planning import Ask, Planned, plan_of, root_of
from modicum.torch.saving.report import Saved
from modicum.torch.saving.running import Begun
from modicum.torch.saving.sigterm import Sigterm
from modicum.torch.saving.states import Event
from modicum.torch.saving.weights import Form, goal_of
from modicum.torch.saving.writing import Flight
from modicum.upstream.wrappers import unwrapped


@dataclass(frozen=True)
class Given:
    """The arguments `optimizer` and `source` of `save`."""

    optimizer: torch.optim.Optimizer | None
    source: Source


@overload
def save(
    model: nn.Module, root: str | Path, *,
    step: int, optimizer: torch.optim.Optimizer | None = None, source: Source = None,
    dtype: torch.dtype | None = None, keep: int | None = None, shard_size: Size | None = None,
    extra: dict[str, Any] | None = None, extra_per_rank: Any = None, unused: str = "copy",
    ledger: _modicum.Ledger | None = None, budget: Size | None = None, staging: Size | None = None,
    grace: float | None = None, adapters: bool | None = None, replicas: str = "equal",
    background: Literal[False] = False,
) -> Saved: ...  # fmt: skip


@overload
def save(
    model: nn.Module, root: str | Path, *,
    step: int, optimizer: torch.optim.Optimizer | None = None, source: Source = None,
    dtype: torch.dtype | None = None, keep: int | None = None, shard_size: Size | None = None,
    extra: dict[str, Any] | None = None, extra_per_rank: Any = None, unused: str = "copy",
    ledger: _modicum.Ledger | None = None, budget: Size | None = None, staging: Size | None = None,
    grace: float | None = None, adapters: bool | None = None, replicas: str = "equal",
    background: Literal[True],
) -> Saving: ...  # fmt: skip


def save(
    model: nn.Module, root: str | Path, *,
    step: int, optimizer: torch.optim.Optimizer | None = None, source: Source = None,
    dtype: torch.dtype | None = None, keep: int | None = None, shard_size: Size | None = None,
    extra: dict[str, Any] | None = None, extra_per_rank: Any = None, unused: str = "copy",
    ledger: _modicum.Ledger | None = None, budget: Size | None = None, staging: Size | None = None,
    grace: float | None = None, adapters: bool | None = None, replicas: str = "equal",
    background: bool = False,
) -> Saved | Saving:  # fmt: skip
    """Saves a step (a checkpoint directory): a Hugging Face checkpoint and the optimizer's state.

    Collective: every rank of torch's default process group calls it with the same arguments;
    without a process group there is one rank. Each rank writes its own elements at their final
    offsets, streamed through staging of a fixed size: tensors are not gathered. Names and shapes in
    the files are those of the checkpoint that was loaded, dtypes those of the model. The step
    becomes visible as `root/step-N` once all of it is durable.

    Args:
        model: loaded by `load` or `HuggingFaceReader`, or in a wrapper of it, or with `source`.
        root: the directory of all steps, on a file system that all ranks share; created if its
            parent exists.
        step: the step's number, 0 or more.
        optimizer: `modicum.torch.AdamW`, or one whose state has numbers and tensors of the
            parameters' shapes; also in accelerate's wrapper. Includes options. None: no state.
        source: a checkpoint with the model's names, whose names, division into files, config and
            tokenizer the step gets; None: the one that was loaded.
        dtype: of all tensors that can be cast; rounds none of `optimizer`; None: as in the model.
        keep: the number of complete steps to keep, including this one; None: all.
        shard_size: the largest size of a file, bytes or text ("5GB"); None: the source's division.
        extra: a dict of values that come back with their types (docs/guide/save.md), such as a
            scheduler's state; the same on every rank.
        extra_per_rank: this rank's own such value, also with large tensors; on all ranks or none.
        unused: "copy" or "drop" tensors of the source that the model does not use.
        adapters: True: only PEFT's adapters and what PEFT saves with them, in the files that
            `PeftModel` reads. False: all tensors. None: True if the model is a `PeftModel` that
            trains nothing else, and otherwise False.
        replicas: "equal": refuse parameters and state that differ between ranks, at the cost of a
            pass over replicated tensors. "first": save the first rank's, as buffers always are.
        ledger, budget: as for `load`; the promised peak includes what the processes hold already.
        staging: host memory that a rank streams through; None: 8 MiB.
        grace: seconds from SIGTERM to the kill, such as 25 for torchrun's 30. SIGTERM is held back
            until the step is committed, and then ends the process. All ranks raise `PreemptedError`
            if a rank gets a second SIGTERM, if at its rate of writing it would need longer than its
            grace, or if it has waited for the others for half of its grace before it writes. The
            program must not have its own handler of SIGTERM. None: SIGTERM is not handled.
        background: return while files are still written, from the memory of model and state: an
            optimizer step waits, or copies, before it overwrites them (docs/guide/save.md).

    Returns:
        The same report on every rank; rank 0 also issues its warnings as UserWarnings. With
        `background` a `Saving`, whose `wait` returns the report.

    Raises:
        BudgetError: the save does not fit; nothing has been written.
        IoError: a file can't be written (`NOSPACE`, `IO`), the step exists, replicas differ.
        UsageError: model, optimizer, source and arguments do not fit together.
        PreemptedError: after SIGTERM the rest of the save does not fit into `grace`.
        PeerError: another rank failed. Every error is raised on all ranks, and the step is not
            visible.
    """
    account, limit = taken(ledger, budget)

    def ask(sigterm: Sigterm) -> Ask:
        return Ask(
            root=root_of(root), step=step, keep=keep,
            form=Form(dtype, unused, shard_size, staging, adapters, background, replicas),
            ledger=account, budget=limit, extra=extra, per_rank=extra_per_rank, sigterm=sigterm,
        )  # fmt: skip

    return _save(model, Given(unwrapped(optimizer), source), ask, Sigterm(grace))


def _save(
    model: nn.Module, given: Given, ask: Callable[[Sigterm], Ask], sigterm: Sigterm
) -> Saved | Saving:
    called = time.monotonic()
    in_flight.finish()
    flight = Flight()
    with ExitStack() as stack:
        stack.push(sigterm.leave)
        stack.callback(flight.end)
        with suppress(UsageError):  # raised below, where the other ranks learn of it
            sigterm.hold()
        ranks = stack.enter_context(Ranks.of_world(sigterm.while_waiting).together())
        in_flight.deliver()
        sigterm.hold()
        if given.source is None:
            model = loaded_in(model)
        begun = _begun(model, given, ask(sigterm), ranks, flight)
        if begun.planned.snapshot is not None:
            saving = Saving(begun, partial(_finished, model, begun), sigterm)
            return saving.start(stack.pop_all(), time.monotonic() - called)
        saved = _finished(model, begun, begun.write())
        _warn(saved, ranks)
    return saved


def save_together(model: nn.Module, given: Given, ask: Ask, ranks: Ranks, flight: Flight) -> Saved:
    """Saves in the foreground, inside a context of `Ranks.together` that the caller has entered."""
    begun = _begun(model, given, ask, ranks, flight)
    saved = _finished(model, begun, begun.write())
    _warn(saved, ranks)
    return saved


def _begun(model: nn.Module, given: Given, ask: Ask, ranks: Ranks, flight: Flight) -> Begun:
    """Plans the save and makes its directory, before tensors are written. Collective."""
    whole = Model.of(model, reshards=True)
    require_defined(whole)
    flight.hold(_read(whole, given.optimizer))
    told = {"argument source": str(given.source), "argument optimizer": _kind(given.optimizer)}
    ranks.agree_on(ask.facts() | told | whole.facts())
    only = only_adapters(whole, ask.form.adapters)
    ask = replace(ask, form=replace(ask.form, adapters=only))
    if only:
        goal = goal_of_adapters(whole, ranks)
    else:
        goal = goal_of(whole, ranks, given.source, origin_of(model), ask.form.unused)
    return Begun(plan_of(ask, whole, goal, given.optimizer, ranks), ranks, flight)


def _read(model: Model, optimizer: torch.optim.Optimizer | None) -> Iterator[tuple[str, Any]]:
    """(name, value) for the tensors of torch that a save reads, among other values of the state.
    `modicum.torch.AdamW` keeps the memory of its state itself."""
    yield from ((name, of.tensor) for name, of in model.tensors.items())
    if isinstance(optimizer, torch.optim.Optimizer) and not isinstance(optimizer, AdamW):
        names = model.names
        for parameter, entry in optimizer.state.items():
            name = names.get(id(parameter), "")
            yield from ((f"{name}.{key}", value) for key, value in entry.items())


def _finished(
    model: nn.Module,
    begun: Begun,
    outcome: dict[str, Any],
    note: Callable[[Event], object] = lambda _: None,
) -> Saved:
    """Publishes the save after its last byte. Collective. On any thread. `note`: as for
    `Begun.finish`."""
    report = begun.finish(outcome, note)
    _follow(model, begun.planned, report)
    return report


def _warn(report: Saved, ranks: Ranks) -> None:
    if ranks.rank == 0:
        for warning in report.warnings:
            warnings.warn(f"modicum: {warning}", stacklevel=3)


def _kind(optimizer: Any) -> str:
    if optimizer is not None and not isinstance(optimizer, torch.optim.Optimizer):
        got = type(optimizer).__name__
        raise refusal("USAGE", "optimizer", expected="a torch.optim.Optimizer or None", got=got)
    return type(optimizer).__name__


def _follow(model: nn.Module, planned: Planned, report: Saved) -> None:
    """The new step becomes the model's origin if the old origin is a step next to it, which `keep`
    or Trainer's `save_total_limit` may remove; otherwise it serves once the old origin is gone."""
    origin = origin_of(model)
    if origin is None or origin.source is None or planned.ask.form.adapters:
        return
    old, new = Path(origin.source).resolve(), Path(report.path).resolve()
    is_in_root = old.parent == planned.ask.root.resolve()
    is_next_to = _is_next_to(old, new) and (old / "COMMIT").exists()
    saved = Origin(new, planned.model.plan.recipe_text)
    remember(model, origin.followed_by(saved, is_next_to=is_in_root or is_next_to))


def _is_next_to(old: Path, new: Path) -> bool:
    """Whether two checkpoints are in one directory. Those of accelerate's further models are in
    subdirectories of the same name."""
    if old.name == new.name:
        old, new = old.parent, new.parent
    return old.parent == new.parent
