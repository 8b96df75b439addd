"""`load`: a checkpoint into a model whose parameters are on meta."""

from collections.abc import Collection, Mapping

import torch
from torch import nn

from modicum import _modicum
from modicum.recipes.patterns import Rule
from modicum.torch.build.emptied import Emptied
from modicum.torch.loading.goal import Model, Source, goal_of_source, refuse_gaps
from modicum.torch.loading.planning import Options, Size, plan_of
from modicum.torch.loading.running import run
from modicum.torch.ranks.group import Ranks
from modicum.walk.report import Report


def load(
    model: nn.Module,
    source: Source,
    *,
    ledger: _modicum.Ledger | None = None,
    budget: Size | None = None,
    strategy: str = "own-shard",
    dtype: torch.dtype | None = None,
    keep_fp32: str | None = None,
    missing: str | Collection[str] | Mapping[str, Rule] = "error",
    unexpected: str | Collection[str] = "error",
    check: str | None = None,
    progress: bool = True,
    seed: int = 0,
    staging: Size | None = None,
    buffers: str | None = None,
    fork: str = "excluded",
) -> Report:
    """Loads a checkpoint into a model built under `empty_parameters()`, sharded or not.

    Collective: every rank of torch's default process group calls it with the same arguments, after
    `fully_shard` (or `parallelize_module`, or neither) and before the first forward; without a
    process group there is one rank. Each rank reads its own bytes only (`own-shard`) into memory
    that becomes FSDP2's own. Parameter objects stay the same, ties stay one storage, and
    `requires_grad` is not changed. A tensor on meta is loaded or initialised; one with values is
    overwritten if the source has it, and else left alone.

    Args:
        model: any module; a transformers model, or one in a wrapper such as PEFT's, is loaded by
            its own conversion mapping.
        source: a directory, a safetensors file, or `org/name` in the local Hugging Face cache;
            None: everything on meta is initialised.
        ledger: its limit is the node's; charged for every parameter; None: a new one.
        budget: host memory per node, bytes or text ("200GiB"), the processes themselves included;
            "none": no limit; None: the ledger's limit, or what the cgroup and the node leave.
        strategy: own-shard, node-reader, replica-striped, rank0-broadcast or full-per-rank.
        dtype: of the tensors that `from_pretrained` would load in it; None: each parameter's own.
        keep_fp32: a regular expression (RE2, searched; here and below one without a match is
            refused): matching names are loaded as float32.
        missing: for names that the source lacks, beyond those that the model itself lists: "error";
            "init": made by the model's own rule, the same bits at any world size; patterns of names
            to initialise so; or rules by pattern ("zeros", "ones", ("normal", std), "model").
        unexpected: for stored names not in the model: "error", "ignore", or patterns to drop.
        check: None, or "values": poison first, then compare every value with a second reading.
        progress, seed: whether rank 0 draws a bar on stderr; seed of initialised tensors.
        staging: host memory that a rank streams through; None: 8 MiB, less if the budget needs it.
        buffers: for real buffers that no state dict has, and that differ from the result of the
            model's rule: "restore", "keep", or None: restore those unwritten since `to_empty()`.
        fork: "excluded", "shared" or "inherited" memory in forked children (docs/guide/workers.md).

    Returns:
        The same report on every rank. Its warnings are UserWarnings on rank 0, too.

    Raises:
        BudgetError: it does not fit; before anything but headers is read.
        UsageError: model, source and arguments do not fit together.
        FormatError, IntegrityError, IoError, PeerError: on every rank alike, naming the rank that
            failed first. After an error the model's parameters are on meta, as before.
    """
    how = {"dtype": dtype, "keep_fp32": keep_fp32, "missing": missing, "unexpected": unexpected}
    ledger = ledger or _modicum.Ledger()
    options = Options(ledger, budget, strategy, staging, fork, seed, check, progress)
    with Ranks.of_world().together() as ranks:
        whole = Model.of(model)
        emptied = Emptied(model, whole.structure, buffers, ranks, seed)
        goal = goal_of_source(whole, ranks, source, how, emptied.unwritten)
        refuse_gaps(whole, goal.dtypes)
        report = run(plan_of(whole, ranks, goal, options), whole, ranks)
        emptied.restore(loaded=goal.dtypes)
        return report
