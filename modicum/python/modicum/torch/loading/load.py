"""`load`: loads a checkpoint into a model on meta or with values."""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from modicum.options import MemoryPolicy, read_options, require_seed
from modicum.options.renamed import refuse_old_keywords
from modicum.recipes import LoadRules
from modicum.recipes.reading import given_recipe
from modicum.torch.build.emptied import EmptiedMemory
from modicum.torch.loading.around import note_loaded, taken
from modicum.torch.loading.goal import Model, Source, goal_of_source, refuse_gaps
from modicum.torch.loading.origin import Origin, inside_ddp, remember
from modicum.torch.loading.planning import Options, Size, later_of, optimizers_of, plan_of
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
from modicum.walk.load_report import LoadReport


@refuse_old_keywords(LoadRules, MemoryPolicy)
def load(
    model: nn.Module, source: Source, *,
    optimizer: AdamW | Sequence[AdamW] | None = None, budget: Size | None = None,
    dtype: torch.dtype | str | None = None, rules: LoadRules | None = None,
    memory: MemoryPolicy | None = None, check: bool = False, progress: bool = True,
) -> LoadReport:  # fmt: skip
    """Collectively loads a checkpoint into a model, sharded or not, normally one that was built
    under `empty_parameters()`.

    Only one thread of a process at a time may be in a collective call of Modicum. Every rank of
    torch's default process group calls it with the same arguments, after
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
        optimizer: one or several `modicum.torch.AdamW` of parameters on meta. The budget covers
            their state, which is allocated after the load. With a single one it also covers a save
            of model and state; if this state can't be saved, a warning says why.
        budget: host memory per node, bytes or text ("200GiB"). It includes what the rank
            processes hold already, but not what the program and torch allocate in them later:
            activations, and on the CPU the `grad` of bfloat16 parameters that an AdamW with
            `state_format="fp32"` steps (2 bytes per element).
            "none": no limit. None: the budget of `loading()` or the ledger's limit, or what the
            cgroup and the node have left.
        dtype: the dtype of tensors that `from_pretrained` would cast, a torch.dtype or its name
            ("bfloat16" or "bf16"); None: each parameter's own.
        rules: what may differ between the source and the model: `LoadRules`.
        memory: how bytes are held and moved: `MemoryPolicy` without `pin`.
        check: whether to read the source again after the load, and compare every value.
        progress: whether rank 0 prints plan and progress.

    Returns:
        The same report on every rank; rank 0 also issues its warnings as UserWarnings.

    Raises:
        BudgetError: the load does not fit; only headers have been read.
        UsageError: model, source and arguments do not fit together.
        FormatError, IntegrityError, IoError, PeerError: raised on every rank, naming the rank that
            caused it. Tensors on meta stay there; those with values may be partly overwritten.
        Error: another rank raised an error that is not Modicum's, or got Ctrl-C (`CANCELLED`).
    """

    def arguments() -> dict[str, Any]:
        return arguments_in(
            "load", rules, memory,
            optimizer=optimizer, budget=budget, dtype=dtype, check=check, progress=progress,
        )  # fmt: skip

    return load_by(arguments, model, source)


_LOAD_FIELDS = ("strategy", "staging", "ledger", "fork")
"""The fields of `MemoryPolicy` that act in a load."""


_KEYWORDS = {"optimizer": None, "budget": None, "dtype": None, "check": False, "progress": True}
"""The keywords of `load` besides its options, with their defaults."""


def arguments_in(
    function: str,
    rules: Any = None,
    memory: Any = None,
    allowed_rules: Collection[str] | None = None,
    **keywords: Any,
) -> dict[str, Any]:
    """The dict that `arguments` of `load_by` returns: `keywords`, the fields of `rules` and
    `memory`, and defaults for the rest. Raises `UsageError`, naming `function`, if a field of
    `rules` is set that is not in `allowed_rules` (None: all are allowed), or a field of `memory`
    that does not act in a load."""
    named = _KEYWORDS | keywords | read_options(function, LoadRules, None)
    named |= read_options(function, LoadRules, rules, allowed_rules)
    return named | read_options(function, MemoryPolicy, memory, _LOAD_FIELDS)


def load_by(
    arguments: Callable[[], dict[str, Any]], model: nn.Module, source: Source
) -> LoadReport:
    """As `load`. Collective. `arguments`: is called once the ranks have met, so that its error is
    raised on all of them; returns the keywords of `load` and the fields of its options by name."""
    return _load(inside_ddp(model), source, arguments)


@contextmanager
def collective_load(model: nn.Module) -> Iterator[Ranks]:
    """The context of a load into `model` by all ranks. Waits for a save in the background, raises
    its error, and suspends inference mode. Collective."""
    in_flight.finish()
    with outside_inference(model), Ranks.of_world().together() as ranks:
        in_flight.deliver()
        yield ranks


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


def options_of(arguments: Mapping[str, Any]) -> Options:
    """The options of a load. `arguments`: what that of `load_by` returns."""
    names = ("strategy", "staging", "fork", "seed", "check", "progress")
    named = {name: arguments[name] for name in names} | {"seed": require_seed(arguments["seed"])}
    ledger, budget = taken(arguments["ledger"], arguments["budget"])
    optimizers, later = optimizers_of(arguments["optimizer"]), later_of(arguments["optimizer"])
    rules = {name: arguments[name] for name in ("resized", "buffers")}
    return Options(ledger, budget, **named, optimizers=optimizers, later=later, rules=rules)


def recipe_arguments(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """The `arguments` of `goal_of_source`, from what that of `load_by` returns."""
    names = ("dtype", "keep_fp32", "missing", "unexpected", "adapter", "key_mapping")
    is_resized = require_rule(arguments["resized"]) is not None
    recipe = given_recipe(arguments["recipe"], arguments)
    return {name: arguments[name] for name in names} | {"resized": is_resized, "recipe": recipe}


def _load(model: nn.Module, source: Source, arguments: Callable[[], dict[str, Any]]) -> LoadReport:
    """Reads the arguments once the ranks have met: those of one rank may be wrong, or name a file
    that it does not see, and then all ranks raise its error."""
    with collective_load(model) as ranks:
        named = arguments()
        options, recipe_options = options_of(named), recipe_arguments(named)
        whole = Model.of(model, adapter=recipe_options["adapter"], originals=True)
        require_tokens(whole)
        emptied = EmptiedMemory(model, whole.structure, named["buffers"], ranks, options.seed)
        goal = goal_of_source(whole, ranks, source, recipe_options, emptied.unwritten)
        refuse_gaps(whole, goal.dtypes)
        require_rows(whole, goal.grown, goal.norms)
        report = run(plan_of(whole, ranks, goal, options), whole, ranks)
        fill_rows(whole, goal.grown, named["resized"] or "", options.seed)
        fill_norms(whole, goal.norms)
        emptied.restore(loaded=goal.dtypes)
        # PEFT's tensors whose first values came from the base model: the origin's recipe leaves
        # them out, so that a save writes their own values.
        initialised_from_base = goal.norms.keys() | whole.structure.rows.keys()
        remember(model, Origin(source, goal.text_without(initialised_from_base)))
        note_loaded(model)
        return report
