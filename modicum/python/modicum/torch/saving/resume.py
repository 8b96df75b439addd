"""`resume`: loads the newest complete checkpoint of a run."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import nn

from modicum import _modicum
from modicum.errors import (
    Error,
    FormatError,
    IntegrityError,
    IoError,
    is_damage,
    refusal,
)
from modicum.options import MemoryPolicy
from modicum.options.renamed import refuse_old_keywords
from modicum.recipes import LoadRules
from modicum.recipes.reading import IN_PLACE_OF_A_RECIPE
from modicum.torch.loading.around import taken
from modicum.torch.loading.compared import compared_by_all
from modicum.torch.loading.goal import Model
from modicum.torch.loading.load import arguments_in, load_by, outside_inference
from modicum.torch.loading.origin import inside_ddp, keeping_origin
from modicum.torch.loading.overwritten import fill_undefined, overwriting
from modicum.torch.loading.planning import Size, StateToRead
from modicum.torch.optim import in_flight
from modicum.torch.optim.adamw import AdamW
from modicum.torch.optim.promise import Needs
from modicum.torch.optim.state_dicts import IMPLEMENTATION
from modicum.torch.ranks.group import Ranks
from modicum.torch.saving import extra, groups
from modicum.torch.saving.adamw_state import AdamWState, facts_for, is_torchs, with_moments
from modicum.torch.saving.adapters import FILE, recipe_of_checkpoint
from modicum.torch.saving.choosing import ChosenCheckpoint, chosen_checkpoint, removed, skip
from modicum.torch.saving.report import ResumeReport
from modicum.torch.saving.shared import is_gone
from modicum.torch.saving.tensor_state import FILE as STATE
from modicum.torch.saving.tensor_state import (
    SavedState,
    load_tensors,
    needed_by_tensors,
    numbers_of,
    require_dtypes,
    require_kind,
)
from modicum.upstream.wrappers import unwrapped
from modicum.walk.arguments import root_of
from modicum.walk.saving import GROUPS_FILE


@refuse_old_keywords(LoadRules, MemoryPolicy)
def resume(
    model: nn.Module, run: str | Path, *,
    optimizer: torch.optim.Optimizer | None = None, budget: Size | None = None,
    dtype: torch.dtype | str | None = None, rules: LoadRules | None = None,
    memory: MemoryPolicy | None = None, progress: bool = True,
) -> ResumeReport:  # fmt: skip
    """Collectively loads the newest complete checkpoint of a run into a model and its optimizer.

    Called like `load`. World size and sharding may differ from those of the save. Weights and
    state get the saved bits: with equal world size and sharding training can go on as without the
    interruption, bit for bit. No full copy is made: they reach their final memory as in `load`. A
    model on meta gets memory, and a `modicum.torch.AdamW` of its parameters allocates its state. If
    the checkpoint has adapters only, load the base model first.

    What is read is compared with the checkpoint's digests, each byte once. If it is damaged, the
    next older checkpoint is loaded instead, unless `run` is one checkpoint. If none is left, or the
    load fails otherwise after its first byte, the floating-point values that it was to replace are
    NaN, and `save` refuses the model until a load into it succeeds.

    Args:
        model: as for `load`; sharded or not; on meta, or with values, which are overwritten.
        run: the directory of all checkpoints, or one checkpoint.
        optimizer: an optimizer of the model's parameters: `modicum.torch.AdamW` with the saved
            `seed`, or one of the saved class, whose `state` is replaced. State that was saved in
            another `state_format`, or by torch's Adam or AdamW, is converted with the bits of
            `load_state_dict`. Its groups get the saved options. None: only the model is loaded.
        budget, dtype, progress: as for `load`. The promised peak includes the optimizer's state.
        rules: `LoadRules` without `adapter`, `resized` and `seed`. The files have the names of the
            checkpoint that was first loaded: give its key_mapping, unexpected or recipe again.
        memory: `MemoryPolicy` without `pin`.

    Returns:
        The same report on every rank, except `extra_per_rank`. Rank 0 warns of each checkpoint that
        was skipped.

    Raises:
        IntegrityError: no checkpoint of the run is complete and intact, or none has been saved
            (both `UNCOMMITTED`; the message says which), or `run` is a damaged checkpoint.
        BudgetError: the load does not fit; nothing has been loaded.
        UsageError: model, optimizer and checkpoint do not fit together; nothing has been loaded.
        FormatError, IoError, PeerError: as for `load`; `IoError` also if there is no directory
            `run`. Every error is raised on every rank.
    """

    def arguments() -> dict[str, Any]:
        direct = {"budget": budget, "dtype": dtype, "progress": progress}
        return arguments_in("resume", rules, memory, _RULING, **direct)

    return resume_by(arguments, model, run, optimizer)


_RULING = ("keep_fp32", "missing", "unexpected", "key_mapping", "recipe", "buffers")
"""The fields of `LoadRules` that act in a resume."""
_DEFAULTS = arguments_in("resume")
_NOT_COMPARED: Mapping[str, Any] = {"compared_bytes": 0, "not_compared": []}
"""`compared_by_all` of no tensor."""


def resume_by(
    arguments: Callable[[], Mapping[str, Any]],
    model: nn.Module,
    run: str | Path,
    optimizer: torch.optim.Optimizer | None = None,
) -> ResumeReport:
    """As `resume`. Collective. `arguments`: returns those of `load_by`, without the optimizer, that
    differ from the defaults. It is called where all ranks raise its error."""
    begin = time.monotonic()
    model, optimizer = inside_ddp(model), unwrapped(optimizer)

    @cache
    def named_arguments() -> dict[str, Any]:
        named = _DEFAULTS | {**arguments()}
        named["ledger"], named["budget"] = taken(named["ledger"], named["budget"])
        return named

    try:
        return _newest(model, run, optimizer, named_arguments, begin)
    except BaseException as error:
        if fill_undefined(model) and isinstance(error, Error):
            error.args = (f"{error}; the model's values are undefined (NaN) now",)
        raise


def _newest(
    model: nn.Module,
    run: str | Path,
    optimizer: torch.optim.Optimizer | None,
    arguments: Callable[[], dict[str, Any]],
    begin: float,
) -> ResumeReport:
    """Loads the newest checkpoint that is intact. Collective. `arguments`: as for `find`."""
    skipped: list[dict[str, Any]] = []
    was_removed = False
    while True:
        found = find(run, optimizer, skipped, arguments)
        try:
            return _resume_from(found, model, optimizer, begin)
        except (FormatError, IntegrityError, IoError) as error:
            if _is_skipped(found, error, skipped):
                continue
            if not _is_removed(found.path):
                raise
            if was_removed:
                raise removed(found.path) from error
            was_removed = True
            skipped.clear()


def _is_removed(path: Path) -> bool:
    """Whether another process has removed the checkpoint. Collective."""
    with Ranks.of_world().together() as ranks:
        return any(ranks.gather(is_gone(path)))


def _is_skipped(found: ChosenCheckpoint, error: Error, skipped: list[dict[str, Any]]) -> bool:
    """Whether the checkpoint is damaged, and an older one of its root may take its place; adds it
    to `skipped` then. Collective."""
    if not is_damage(error) or not found.is_newest:
        return False
    with Ranks.of_world().together() as ranks:
        if any(ranks.gather(is_gone(found.path))):
            return False
        skip(skipped, {"step": found.facts["step"], "reason": str(error)}, ranks)
    return True


def _resume_from(
    found: ChosenCheckpoint,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    begin: float,
) -> ResumeReport:
    """Loads the model and the optimizer."""
    arguments = {**found.load_arguments}
    declared = _declared(model, optimizer, found)
    with _reading(model, found.path, arguments) as files:
        report = load_by(lambda: arguments | {"optimizer": declared}, model, files)
    read = sum(rank["storage_read_bytes"] for rank in report.ranks)
    with outside_inference(model), Ranks.of_world().together() as ranks:
        state_read, compared = 0, _NOT_COMPARED
        if optimizer is not None:
            state_read, compared = load_state(model, optimizer, found, arguments["ledger"], ranks)
            read += sum(ranks.gather(state_read))
        saved_by = found.facts["world_size"]
        common, by_rank = extra.values_of(found.files, saved_by, ranks.world_size)
        took_s = max(ranks.gather(time.monotonic() - begin))
    return ResumeReport(
        step=found.facts["step"], path=str(found.path), skipped=found.facts["skipped"],
        load=report, read_bytes=read, elapsed_s=took_s, extra=common, extra_per_rank=by_rank,
        compared_bytes=report.compared_bytes + compared["compared_bytes"],
        not_compared=[*report.not_compared, *compared["not_compared"]],
    )  # fmt: skip


@contextmanager
def _reading(model: nn.Module, path: Path, arguments: dict[str, Any]) -> Iterator[Path]:
    """The path to load the model from. For a checkpoint of adapters alone it sets their recipe in
    `arguments`, unless the caller has given one, and leaves the model's remembered source
    checkpoint unchanged. Collective."""
    with Ranks.of_world().together():
        adapters = recipe_of_checkpoint(model, path)
    if adapters is None:
        yield path
        return
    if arguments["recipe"] is None:
        arguments |= IN_PLACE_OF_A_RECIPE | {"recipe": adapters}
    with keeping_origin(model):
        yield path / FILE


def _declared(
    model: nn.Module, optimizer: torch.optim.Optimizer | None, found: ChosenCheckpoint
) -> list[AdamW | StateToRead]:
    """What the promise of the model's load includes for the optimizer's state, which that load
    requires to fit the optimizer. Collective."""
    if optimizer is None:
        return []
    is_torch = isinstance(optimizer, AdamW) and is_torchs(found.state)

    def require(whole: Model, dtypes: Mapping[int, torch.dtype], needs: Sequence[Needs]) -> None:
        if found.has_options:
            groups.matching(optimizer, found.options, whole.names)
        saved = saved_state(found)
        if not isinstance(optimizer, AdamW):
            require_dtypes(optimizer, whole.names, saved, dtypes)
        elif stored := needs[0].stored(whole.names):
            saved = saved._replace(facts=facts_for(optimizer, saved.facts))
            _require_trained(stored, saved, whole.names)
            if is_torch:
                stored = with_moments(stored, saved.tensors.stored)
            _modicum.require_state(saved.tensors, stored, not is_torch)

    if isinstance(optimizer, AdamW):
        facts = {} if is_torch else _modicum.state_facts(found.state)
        is_converted = facts.get("state_format") != optimizer.state_format
        needed = {"staging": _modicum.CONVERTED_STATE_BYTES} if is_converted else {}
        return [optimizer, StateToRead(needed, require)]
    with Ranks.of_world().together() as ranks:
        whole = Model.of(model)
        needed = needed_by_tensors(optimizer, whole, whole.names, saved_state(found), ranks)
    return [StateToRead(needed, require)]


def saved_state(found: ChosenCheckpoint) -> SavedState:
    """The optimizer's state in the checkpoint."""
    folder = found.path / "optimizer" if found.facts["has_state"] else None
    state = _modicum.open_checkpoint(folder)
    return SavedState(state, found.state, found.load_arguments["staging"], found.path)


def find(
    run: str | Path,
    optimizer: torch.optim.Optimizer | None,
    skipped: list[dict[str, Any]],
    arguments: Callable[[], dict[str, Any]] = lambda: _DEFAULTS,
) -> ChosenCheckpoint:
    """Waits for a save in the background. Then rank 0 finds the checkpoint, and all ranks check
    that it has what the optimizer needs. Collective.

    Args:
        skipped: as for `chosen_checkpoint`.
        arguments: returns the arguments of `load_by` by name, or raises an error of this rank.
    """
    in_flight.finish()
    with Ranks.of_world().together() as ranks:
        in_flight.deliver()
        named, root = arguments(), root_of(run)
        ranks.agree_on({"argument run": str(root)})

        def names_for(path: Path, facts: dict[str, Any]) -> list[str]:
            texts = [] if optimizer is None else [GROUPS_FILE, STATE]
            texts = [name for name in texts if (path / name).exists()]
            return texts + extra.names_for(path, facts["world_size"], ranks.rank, ranks.world_size)

        found = chosen_checkpoint(root, ranks, names_for, skipped)
        found = replace(found, load_arguments=named)
        if optimizer is not None:
            _require_same(optimizer, found.state)
    return found


def _require_same(optimizer: torch.optim.Optimizer, state: str) -> None:
    """Raises `UsageError` if the optimizer differs in class or seed from the saved one, or has
    parameters that can't be trained."""
    if any(
        parameter.is_inference()
        for group in optimizer.param_groups
        for parameter in group["params"]
    ):
        what = "the optimizer has a parameter that was made in inference mode and can't be trained"
        raise refusal("UNSUPPORTED", what, expected="a model built outside torch.inference_mode()")
    if not isinstance(optimizer, AdamW):
        return require_kind(optimizer, state)
    if is_torchs(state):
        return None
    seed = _modicum.state_facts(state)["seed"]
    if optimizer.seed != seed:
        what, got = "the state was saved with another seed", str(optimizer.seed)
        raise refusal("MISMATCH", what, expected=str(seed), got=got)
    return None


@torch.no_grad()
def load_state(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    found: ChosenCheckpoint,
    ledger: _modicum.Ledger,
    ranks: Ranks,
) -> tuple[int, Mapping[str, Any]]:
    """Reads this rank's part of the state in `found`, which was found for `optimizer`, and compares
    the state with the checkpoint's record. Collective. Returns the number of bytes that this rank
    has read, and `compared_by_all` of the state."""
    whole = Model.of(model)
    names = whole.names
    saved = saved_state(found)
    outcome: dict[str, Any] | None
    state = AdamWState(optimizer, names) if isinstance(optimizer, AdamW) else None
    if isinstance(optimizer, AdamW):
        saved = saved._replace(facts=facts_for(optimizer, saved.facts))
    if state is not None:
        _require_trained(state.parameters, saved, names)
    if found.has_options:
        left_out = IMPLEMENTATION if isinstance(optimizer, AdamW) else ()
        groups.restore(optimizer, found.options, names, left_out)
    with overwriting(whole, ranks.rank):
        if state is not None:
            outcome = _load_adamw(state, saved, ledger, ranks, found.state)
        else:
            outcome = load_tensors(optimizer, names, saved, ledger, ranks)
        if outcome is None:
            return 0, _NOT_COMPARED
        compared = compared_by_all(saved.tensors, outcome["compared"], ranks, "optimizer/")
    return outcome["storage_read_bytes"], compared


def _load_adamw(
    state: AdamWState, saved: SavedState, ledger: _modicum.Ledger, ranks: Ranks, text: str
) -> dict[str, Any]:
    """`text`: that of the saved state.json; `saved` has that of `facts_for`."""
    board = _modicum.Board(ranks)
    parameters, is_torch = state.parameters, is_torchs(text)
    if is_torch:
        parameters = with_moments(parameters, saved.tensors.stored)
        state.take_numbers(numbers_of(text), {parameter.fqn for parameter in parameters})
    shards = state.held({parameter.fqn for parameter in parameters}, to_save=False)
    with ranks.watching(board):
        outcome = _modicum.load_state(
            saved.tensors,
            saved.facts,
            parameters,
            ranks.rank,
            board,
            ledger,
            shards,
            not is_torch,
        )
    state.note_loaded()
    return outcome


def _require_trained(
    parameters: Sequence[_modicum.StoredState], saved: SavedState, names: Mapping[int, str]
) -> None:
    """Raises `UsageError` if a parameter was frozen at the save and has state now, or the other way
    round. `parameters`: those that have state."""
    trained = {stored.fqn for stored in parameters}
    for name in _modicum.state_facts(saved.facts)["without_state"]:
        if name in trained:
            what = "the parameter was frozen when the checkpoint was saved, and has state in this "
            what += "run: freeze it before AdamW is made, and unfreeze it after the resume"
            raise refusal("MISMATCH", what, tensor=name)
    frozen = {*names.values()} - trained
    for name in (stored.rpartition(".")[0] for stored in saved.tensors.stored):
        if name in frozen:
            what = "the checkpoint has state of a parameter that is frozen in this run: "
            what += "unfreeze it before the resume; afterwards it may be frozen again"
            raise refusal("MISMATCH", what, tensor=name)
