"""`loading`, one context in which scripts of accelerate and transformers' Trainer load by Modicum:

    import modicum.torch.accelerate

    with modicum.torch.accelerate.loading(budget="200GiB"):
        main()  # from_pretrained, an optimizer, Accelerator.prepare or Trainer.train

Inside the context:

    from_pretrained          builds the model on every rank: parameters on meta, buffers with
      |                      values; reads no tensor
    Accelerator.prepare      (Trainer calls it)
      | fsdp2_prepare_model  accelerate shards the model by its plugin (units, dtypes, offloading)
      | modicum.torch.load   each rank reads the bytes of its shards
      | rebinding            optimizers get the sharded parameters, by FQN
    training
      | save_state, load_state, save_model, Trainer's checkpoints: see checkpoints.py

`cpu_ram_efficient_loading` changes neither the loaded values nor the bytes that a rank reads. With
it, all ranks get rank 0's values of the parameters that the script made itself, as in accelerate.
When the context ends, with or without an exception, every patched function is restored. Importing
this module imports neither accelerate nor transformers.
"""

import gc
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from modicum.errors import refusal
from modicum.options import MemoryPolicy, require_flag
from modicum.options.renamed import refuse_old_keywords
from modicum.recipes import LoadRules
from modicum.torch.accelerate.loads import Loading
from modicum.torch.accelerate.scripts import scripts_until
from modicum.torch.accelerate.unfilled import told_to_users
from modicum.torch.loading.around import giving
from modicum.torch.loading.load import arguments_in
from modicum.torch.shards.forks import require_fork
from modicum.walk.arguments import path_of


@refuse_old_keywords(LoadRules, MemoryPolicy)
@contextmanager
def loading(
    source: str | Path | None = None,
    *,
    budget: int | str | None = None,
    rules: LoadRules | None = None,
    memory: MemoryPolicy | None = None,
    check: bool = False,
    progress: bool = True,
) -> Iterator[Loading]:
    """A collective context in which each rank of a script of accelerate or Trainer with FSDP2 reads
    only its own bytes (with the default strategy). The values have the same bits as those that
    accelerate would load. The script's checkpoints are saved and resumed through Modicum, too.

    accelerate shards by FSDP2 on devices only: on the CPU alone it takes DDP or shards nothing,
    which is refused. There a script shards by `fully_shard` itself and calls `modicum.torch.load`,
    `save` and `resume`; without an `Accelerator` (a `PartialState` is allowed) it may also build
    the model in the context, shard it and call `Loading.fill`, then `AdamW.allocate`; torchrun
    starts its ranks (accelerate starts one on CPUs).

    The context must enclose `from_pretrained`, `prepare` or `Trainer.train`, and `save_state` and
    `load_state`: outside of it accelerate saves and loads by itself. A directory of `save_state` is
    one checkpoint, complete if it has COMMIT; `load_state(DIR)` without it raises `IntegrityError`,
    and `load_state()` skips it. In the context `accelerator.save_model` and `Trainer.save_model`
    write Hugging Face files through Modicum (docs/guide/accelerate.md). Every rank enters it with
    the same arguments, on one thread. The innermost of nested contexts applies.

    Args:
        source: a directory, a safetensors file, or `org/name` in the local Hugging Face cache.
            None: the files that each `from_pretrained` would read. A given source is that of every
            model built in the context, also by `from_config`.
        budget: the limit of host memory per node while loading, saving and resuming, bytes or text
            ("200GiB"). It includes what the processes hold already, and applies to calls of
            `modicum.torch.load`, `save` and `resume`, too. "none": no limit. None: the ledger's
            limit, or the memory that the cgroup and the node have left.
        rules: `LoadRules` with missing, unexpected and seed. Unlike `from_pretrained`, which only
            warns, missing and unexpected names are errors by default.
        memory: `MemoryPolicy` without `pin`. To the `ledger` every parameter is charged until its
            last tensor is freed; None: a new one for each load.
        check: whether to read the source again after each load, and compare.
        progress: whether rank 0 prints the plan and a progress bar on stderr.

    Yields:
        A `Loading`, with a `report` after `prepare` and `saves` after checkpoints.

    Raises:
        UsageError: accelerate, transformers or PEFT does not behave as the tested version (1.15.0,
            5.23.0, 0.21.2); the plugin is not FSDP2; values would be lost; or parameters without
            values are used.
        BudgetError, FormatError, IntegrityError, IoError, PeerError: raised by `prepare`, for the
            reasons of `modicum.torch.load`.
    """
    arguments = arguments_in(
        "loading", rules, memory, ("missing", "unexpected", "seed"),
        budget=budget, check=require_flag("check", check),
        progress=require_flag("progress", progress),
    )  # fmt: skip
    ledger = arguments["ledger"]
    require_fork(arguments["fork"])
    with ExitStack() as stack:
        scripts = scripts_until(stack)
        path = None if source is None else path_of("source", source)
        context = Loading(path, arguments, scripts.models, scripts.fill)
        scripts.loadings.append(context)
        stack.callback(scripts.loadings.remove, context)
        with (
            giving(ledger, budget, scripts.loaded),
            told_to_users(lambda: bool(context.unfilled())),
        ):
            yield context
    _refuse_unfilled(context)


def _refuse_unfilled(opened: Loading) -> None:
    if opened.unfilled():
        gc.collect()  # a model that nothing but a cycle refers to is no error
    for model in opened.unfilled():
        what = "a model that was built within loading() has no values yet: call "
        what += "Accelerator.prepare or Trainer.train before the context ends"
        raise refusal("USAGE", what, got=type(model).__name__)
