"""`load`: loads a checkpoint into a model whose parameters are on meta."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from modicum import _modicum
from modicum.recipes import Recipe
from modicum.recipes.patterns import Rule
from modicum.recipes.reading import given_recipe
from modicum.torch.build.emptied import Emptied
from modicum.torch.loading.around import note_loaded, taken
from modicum.torch.loading.goal import Model, Source, goal_of_source, refuse_gaps
from modicum.torch.loading.origin import Origin, inside_ddp, remember
from modicum.torch.loading.planning import Later, Options, Size, later_of, optimizers_of, plan_of
from modicum.torch.loading.rows import (
    fill_norms,
    fill_rows,
    require_rows,
    require_rule,
    require_tokens,
)
from modicum.torch.loading.running import run
from modicum.torch.optim import in_flight
from modicum.torch.optim.adamw import AdamW
from modicum.torch.ranks.group import Ranks
from modicum.walk.report import Report


def load(
    model: nn.Module, source: Source, *,
    ledger: _modicum.Ledger | None = None, budget: Size | None = None,
    strategy: str = "own-shard", dtype: torch.dtype | None = None, keep_fp32: str | None = None,
    missing: str | Collection[str] | Mapping[str, Rule] = "error",
    unexpected: str | Collection[str] = "error", check: str | None = None, progress: bool = True,
    seed: int = 0, staging: Size | None = None, buffers: str | None = None, fork: str = "excluded",
    optimizer: AdamW | Sequence[AdamW | Later] | None = None, resized: str | None = None,
    recipe: Recipe | str | Path | None = None, adapter: str | None = None,
    key_mapping: Mapping[str, str] | None = None,
) -> Report:  # fmt: skip
    """Loads a checkpoint into a model built under `empty_parameters()`, sharded or not.

    Collective: every rank of torch's default process group calls it with the same arguments, after
    `fully_shard` (or `parallelize_module`, or neither) and before the first forward; without a
    process group there is one rank. With the default strategy each rank reads only its own
    bytes, into memory that FSDP2 then uses directly. Parameter objects and `requires_grad` are
    unchanged, and tied tensors share one storage. A tensor on meta is loaded or initialised; one
    with values is overwritten if the source has it, and otherwise unchanged.

    Args:
        model: any module. A transformers model, also in a wrapper such as PEFT's, is loaded with
            the conversions of the installed transformers.
        source: a directory, a safetensors file, or `org/name` in the local Hugging Face cache;
            None: everything on meta is initialised.
        ledger: the account to which every parameter is charged; None: a new one, or loading()'s.
        budget: host memory per node, bytes or text ("200GiB"), including what processes hold now;
            "none": no limit; None: loading()'s, the ledger's limit, or what cgroup and node have.
        strategy: own-shard, node-reader, replica-striped, rank0-broadcast or full-per-rank.
        dtype: the dtype of tensors that `from_pretrained` would cast; None: each parameter's own.
        keep_fp32: a regular expression (RE2, matches anywhere in a name): matching names are loaded
            as float32. Here and in missing and unexpected a pattern must match some name.
        missing: for names that are not in the source though the model needs them: "error"; "init":
            initialise them by the model's own rule, with the same bits at any world size; patterns
            of names to initialise; or rules by pattern ("zeros", "ones", ("normal", std), "model").
        unexpected: for stored names that the model lacks: "error", "ignore", or patterns to drop.
        check: None, or "values": read the source again after the load, and compare every value.
        progress, seed: whether rank 0 prints plan and progress; the seed of initialised tensors.
        staging: host memory that a rank streams through; None: 8 MiB, less if the budget needs it.
        buffers: for non-persistent buffers that differ from the model's own rule: "restore"; "keep"
            them; None: restore those whose modules were never written to, as after `to_empty()`.
        fork: "excluded", "shared" or "inherited" memory in forked children (docs/guide/workers.md).
        optimizer: one or several `modicum.torch.AdamW` of parameters on meta. The budget covers
            their state, allocated after the load; for a single one also a save of model and state,
            unless that state can't be saved, of which a warning tells.
        resized: for token embeddings and heads with another number of rows than stored: "mean": new
            rows are the mean of the stored ones; "model": made by the model's rule; None: an error.
        recipe: how tensors are made of stored ones, from `modicum.recipes` or a recipe.json, for a
            model with other names. Not with missing, unexpected, dtype, keep_fp32 or key_mapping.
        key_mapping: new names of stored tensors by regular expression; \\1 is its first group.
        adapter: the adapter into which an adapter's directory is loaded, if the model has several.

    Returns:
        The same report on every rank; rank 0 also issues its warnings as UserWarnings.

    Raises:
        BudgetError: the load does not fit; only headers have been read.
        UsageError: model, source and arguments do not fit together.
        FormatError, IntegrityError, IoError, PeerError: raised on every rank, naming the rank that
            caused it. Tensors on meta stay there; those with values may be partly overwritten.
    """
    given = {
        "strategy": strategy, "dtype": dtype, "keep_fp32": keep_fp32, "missing": missing,
        "unexpected": unexpected, "check": check, "progress": progress, "seed": seed,
        "staging": staging, "buffers": buffers, "fork": fork, "optimizer": optimizer,
        "resized": resized, "recipe": recipe, "adapter": adapter, "key_mapping": key_mapping,
    }  # fmt: skip
    model = inside_ddp(model)
    with outside_inference(model):
        return _load(model, source, given, *taken(ledger, budget))


@contextmanager
def outside_inference(model: nn.Module) -> Iterator[None]:
    """Suspends inference mode, whose tensors can't be trained, unless the model was built in it:
    then its tensors can only be written there."""
    if not torch.is_inference_mode_enabled() or _is_inference(model):
        yield
        return
    with torch.inference_mode(False), torch.no_grad():
        yield


def _is_inference(model: nn.Module) -> bool:
    return any(tensor.is_inference() for tensor in (*model.parameters(), *model.buffers()))


def options_of(given: Mapping[str, Any], ledger: _modicum.Ledger, budget: Size | None) -> Options:
    """The options of a load. `given`: the arguments of `load` by name."""
    names = ("strategy", "staging", "fork", "seed", "check", "progress")
    own = {name: given[name] for name in names}
    optimizers, later = optimizers_of(given["optimizer"]), later_of(given["optimizer"])
    return Options(ledger, budget, **own, optimizers=optimizers, later=later)


def recipe_arguments(given: Mapping[str, Any]) -> dict[str, Any]:
    """The argument `how` of `goal_of_source`. `given`: the arguments of `load` by name."""
    names = ("dtype", "keep_fp32", "missing", "unexpected", "adapter", "key_mapping")
    is_resized = require_rule(given["resized"]) is not None
    recipe = given_recipe(given["recipe"], given)
    return {name: given[name] for name in names} | {"resized": is_resized, "recipe": recipe}


def _load(
    model: nn.Module,
    source: Source,
    given: dict[str, Any],
    ledger: _modicum.Ledger,
    budget: Size | None,
) -> Report:
    """`given`: the other arguments of `load`, by name. Those of one rank may be wrong, or name a
    file that it does not see: they are read where all ranks raise its error."""
    in_flight.finish()
    with Ranks.of_world().together() as ranks:
        in_flight.deliver()
        options, how = options_of(given, ledger, budget), recipe_arguments(given)
        whole = Model.of(model, adapter=how["adapter"], originals=True)
        require_tokens(whole)
        emptied = Emptied(model, whole.structure, given["buffers"], ranks, options.seed)
        goal = goal_of_source(whole, ranks, source, how, emptied.unwritten)
        refuse_gaps(whole, goal.dtypes)
        require_rows(whole, goal.grown, goal.norms)
        report = run(plan_of(whole, ranks, goal, options), whole, ranks)
        fill_rows(whole, goal.grown, given["resized"] or "", options.seed)
        fill_norms(whole, goal.norms)
        emptied.restore(loaded=goal.dtypes)
        # PEFT's tensors whose first values came from the base model: the origin's recipe leaves
        # them out, so that a save writes their own values.
        begun = goal.norms.keys() | whole.structure.rows.keys()
        remember(model, Origin(source, goal.text_without(begun)))
        note_loaded(model)
        return report
