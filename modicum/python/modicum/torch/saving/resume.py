"""`resume`: loads the newest complete step (a saved checkpoint directory)."""

import json
import time
import warnings
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from modicum import _modicum
from modicum._modicum import exit_codes
from modicum.errors import failure, from_json, refusal
from modicum.recipes import Recipe
from modicum.recipes.patterns import Rule
from modicum.recipes.reading import IN_PLACE_OF_A_RECIPE
from modicum.torch.loading.around import taken
from modicum.torch.loading.compared import compared_by_all
from modicum.torch.loading.goal import Model
from modicum.torch.loading.load import load
from modicum.torch.loading.origin import keeping_origin
from modicum.torch.loading.planning import Later, Size
from modicum.torch.optim import in_flight
from modicum.torch.optim.adamw import AdamW
from modicum.torch.ranks.group import Ranks
from modicum.torch.saving import extra, groups
from modicum.torch.saving.adamw_state import AdamWState
from modicum.torch.saving.adapters import FILE, recipe_of_step
from modicum.torch.saving.examining import damage_of
from modicum.torch.saving.report import Resumed
from modicum.torch.saving.shared import require_same, require_seen
from modicum.torch.saving.tensor_state import (
    SavedState,
    load_tensors,
    needed_by_tensors,
    require_kind,
)
from modicum.torch.saving.texts import read_json, read_text
from modicum.upstream.wrappers import unwrapped


def resume(
    model: nn.Module, root: str | Path, *,
    optimizer: torch.optim.Optimizer | None = None, ledger: _modicum.Ledger | None = None,
    budget: Size | None = None, strategy: str = "own-shard", dtype: torch.dtype | None = None,
    keep_fp32: str | None = None,
    missing: str | Collection[str] | Mapping[str, Rule] = "error",
    unexpected: str | Collection[str] = "error", check: str | None = None, progress: bool = True,
    staging: Size | None = None, buffers: str | None = None, fork: str = "excluded",
    recipe: Recipe | str | Path | None = None, key_mapping: Mapping[str, str] | None = None,
    verify: bool = True,
) -> Resumed:  # fmt: skip
    """Loads the newest complete step (saved checkpoint) of `root` into a model and its optimizer.

    Collective, like `load`. World size and sharding may differ from those of the save. Weights and
    state get the saved bits: with equal world size and sharding training can go on as without the
    interruption, bit for bit. No full copy is made: they reach their final memory as in `load`. A
    model on meta gets memory, and a `modicum.torch.AdamW` of its parameters allocates its state.

    Args:
        model: as for `load`; sharded or not; on meta, or with values, which are overwritten.
        root: the directory of all steps, or one step.
        optimizer: an optimizer of the model's parameters: `modicum.torch.AdamW` with the saved
            `state_format` and `seed`, or one of the saved class, whose `state` is replaced. Its
            groups get the saved options. None: only the model is loaded.
        verify: first compares every byte of the step with its digests, a part on each rank, and
            skips a damaged step (raises, if `root` is one step); this reads the step twice. False:
            values are compared while they are loaded, and a wrong one raises.
        ledger, budget, strategy, dtype, keep_fp32, missing, unexpected, check, progress, staging,
        buffers, fork, recipe, key_mapping: as for `load`. The promised peak includes the
            optimizer's state.

    Returns:
        The same report on every rank, except `extra_per_rank`. Rank 0 warns of each skipped step.

    Raises:
        IntegrityError: there is no complete step (`UNCOMMITTED`), or a file is damaged.
        BudgetError: the load does not fit; nothing has been loaded.
        UsageError: model, optimizer and step do not fit together. The weights may be loaded
            already if only the optimizer's state does not fit.
        FormatError, IoError, PeerError: as for `load`; every error is raised on every rank.
    """
    begin = time.monotonic()
    optimizer = unwrapped(optimizer)
    found = replace(find(Path(root), optimizer, verify=verify), staging=staging)
    ledger, budget = taken(ledger, budget)
    how: dict[str, Any] = {
        "ledger": ledger, "budget": budget, "strategy": strategy,
        "dtype": dtype, "keep_fp32": keep_fp32, "missing": missing, "unexpected": unexpected,
        "check": check, "progress": progress, "staging": staging, "buffers": buffers, "fork": fork,
        "recipe": recipe, "key_mapping": key_mapping,
    }  # fmt: skip
    declared = _declared(model, optimizer, found, is_cast=dtype is not None)
    with _reading(model, found.path, how) as files:
        report = load(model, files, optimizer=declared, **how)
    read = sum(rank["storage_read_bytes"] for rank in report.ranks)
    with Ranks.of_world().together() as ranks:
        state = LoadedState(0, 0, [])
        if optimizer is not None:
            state = load_state(model, optimizer, found, ledger, ranks)
            read += sum(ranks.gather(state.read_bytes))
        saved_by, rank = found.facts["world_size"], ranks.rank
        common, own = extra.read_all(found.path, saved_by, rank, ranks.world_size)
        took_s = max(ranks.gather(time.monotonic() - begin))
    return Resumed(
        step=found.facts["step"], path=str(found.path), skipped=found.facts.get("skipped", []),
        load=report, read_bytes=read, elapsed_s=took_s, extra=common, extra_per_rank=own,
        compared_bytes=report.compared_bytes + state.compared_bytes,
        not_compared=[*report.not_compared, *state.not_compared],
    )  # fmt: skip


@contextmanager
def _reading(model: nn.Module, step: Path, how: dict[str, Any]) -> Iterator[Path]:
    """The path to load the model from. For a step of adapters alone it sets their recipe in `how`,
    unless the caller has given one, and leaves the model's remembered source checkpoint unchanged.
    Collective."""
    with Ranks.of_world().together():
        adapters = recipe_of_step(model, step)
    if adapters is None:
        yield step
        return
    if how["recipe"] is None:
        how |= IN_PLACE_OF_A_RECIPE | {"recipe": adapters}
    with keeping_origin(model):
        yield step / FILE


@dataclass(frozen=True)
class Found:
    """The step to resume from."""

    path: Path
    facts: dict[str, Any]
    """The dict that `_modicum.newest_step` returns."""
    state: str | None
    """The text of state.json, if the optimizer needs it."""
    staging: Size | None = None
    """Host memory to stream a torch optimizer's state through; None: the default."""


def _declared(
    model: nn.Module, optimizer: torch.optim.Optimizer | None, found: Found, *, is_cast: bool
) -> list[AdamW | Later]:
    """What the promise of the model's load includes for the optimizer's state. Collective.
    `is_cast`: whether the load may change dtypes."""
    if optimizer is None or isinstance(optimizer, AdamW):
        return [] if optimizer is None else [optimizer]
    with Ranks.of_world().together() as ranks:
        whole = Model.of(model)
        saved = _saved_state(found)._replace(step=None if is_cast else found.path)
        return [Later(needed_by_tensors(optimizer, whole, whole.names, saved, ranks))]


def _saved_state(found: Found) -> SavedState:
    assert found.state is not None
    return SavedState(
        _modicum.open_checkpoint(found.path / "optimizer"), found.state, found.staging, found.path
    )


def _whole_step(root: Path, ranks: Ranks, *, verify: bool) -> dict[str, Any]:
    """The newest step without damage, as the dict of `_modicum.newest_step`. Collective. If another
    process removes the step while it is read, chooses once more."""
    skipped: list[dict[str, Any]] = []
    is_again = False

    def find() -> dict[str, Any]:
        if (root / "COMMIT").exists():
            return _modicum.check_step(str(root))
        return _modicum.newest_step(str(root), [(one["step"], one["reason"]) for one in skipped])

    def skip(one: dict[str, Any]) -> None:
        skipped.append(one)
        if ranks.rank == 0:
            warnings.warn(f"modicum: step {one['step']} is skipped: {one['reason']}", stacklevel=6)

    while True:
        facts, _ = ranks.once(find, lambda: None)
        require_seen(Path(facts["path"]), ranks)
        for one in facts.get("skipped", []):
            skip(one)
        damage = damage_of(Path(facts["path"]), ranks) if verify else ""
        if damage == "":
            return facts | {"skipped": skipped}
        if damage is None:
            if is_again or "skipped" not in facts:
                what = "the step was removed while it was read"
                raise failure("IO", what, file=Path(facts["path"]).name)
            is_again = True
            skipped.clear()
        elif "skipped" not in facts:  # from check_step: `root` is the step itself
            told = {"category": "INTEGRITY", "code": exit_codes()["INTEGRITY"], "message": damage}
            raise from_json(json.dumps({"error": told}))
        else:
            skip({"step": facts["step"], "reason": damage})


def find(root: Path, optimizer: torch.optim.Optimizer | None, *, verify: bool) -> Found:
    """Waits for a save in the background. Then rank 0 finds the step, and all ranks check that it
    has what the optimizer needs. Collective."""
    in_flight.wait()
    with Ranks.of_world().together() as ranks:
        ranks.agree_on({"argument root": str(root.absolute()), "argument verify": str(verify)})
        facts = _whole_step(root, ranks, verify=verify)
        path = Path(facts["path"])
        require_same(path, facts["uuid"], ranks)
        state = None
        if optimizer is not None:
            if not facts["has_state"]:
                what = "the step holds no optimizer state to go on from"
                raise refusal("MISMATCH", what, file=path.name)
            state = read_text(path / "optimizer" / "state.json")
            _require_same(optimizer, state)
    return Found(path, facts, state)


def _require_same(optimizer: torch.optim.Optimizer, state: str) -> None:
    """Raises `UsageError` if the optimizer differs in class, format or seed from the saved one."""
    if not isinstance(optimizer, AdamW):
        return require_kind(optimizer, state)
    facts = _modicum.state_facts(state)
    for name in ("state_format", "seed"):
        if getattr(optimizer, name) != facts[name]:
            what = f"the state was saved with another {name}"
            expected, got = str(facts[name]), str(getattr(optimizer, name))
            raise refusal("MISMATCH", what, expected=expected, got=got)
    return None


@dataclass(frozen=True)
class LoadedState:
    """The outcome of loading an optimizer's state."""

    read_bytes: int
    """Bytes read by this rank."""
    compared_bytes: int
    not_compared: list[str]
    """Of all ranks, as in `Resumed`."""


@torch.no_grad()
def load_state(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    found: Found,
    ledger: _modicum.Ledger,
    ranks: Ranks,
) -> LoadedState:
    """Reads this rank's part of the state in `found`, which was found for `optimizer`, and compares
    the state with the step's record. Collective."""
    whole = Model.of(model)
    names = whole.names
    options = read_json(found.path / groups.FILE) if _has_groups(found) else None
    saved = _saved_state(found)
    if isinstance(optimizer, AdamW):
        state = AdamWState(optimizer, names)
        _require_trained(state, saved, names)
        if options is not None:
            groups.restore(optimizer, options, names)
        board = _modicum.Board(ranks)
        with ranks.watching(board):
            outcome = _modicum.load_state(
                saved.tensors,
                state.parameters,
                ranks.rank,
                board,
                ledger,
                state.held(to_save=False),
            )
        state.set_steps(_modicum.state_facts(saved.facts))
    else:
        if options is not None:
            groups.restore(optimizer, options, names)
        outcome = load_tensors(optimizer, names, saved, ledger, ranks)
    compared = compared_by_all(saved.tensors, outcome["compared"], ranks, "optimizer/")
    return LoadedState(outcome["storage_read_bytes"], **compared)


def _require_trained(state: AdamWState, saved: SavedState, names: Mapping[int, str]) -> None:
    """Raises `UsageError` if a parameter was frozen at the save and has state now, or the other way
    round."""
    own = {name for name, *_ in state.parameters}
    for name in _modicum.state_facts(saved.facts)["without_state"]:
        if name in own:
            what = "the parameter was frozen when the step was saved, and has state in this run: "
            what += "freeze it before AdamW is made, and unfreeze it after the resume"
            raise refusal("MISMATCH", what, tensor=name)
    frozen = {*names.values()} - own
    for name in (of.rpartition(".")[0] for of in saved.tensors.stored):
        if name in frozen:
            what = "the step has state of a parameter that is frozen in this run: "
            what += "unfreeze it before the resume; afterwards it may be frozen again"
            raise refusal("MISMATCH", what, tensor=name)


def _has_groups(found: Found) -> bool:
    """Whether the step has options of parameter groups. A run of the command line saves none."""
    return (found.path / groups.FILE).exists()
