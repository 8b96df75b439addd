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

import functools
import gc
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from modicum.errors import UsageError, refusal
from modicum.options import MemoryPolicy
from modicum.options.renamed import refuse_old_keywords
from modicum.recipes import LoadRules
from modicum.torch.accelerate.checkpoints import Checkpoints
from modicum.torch.accelerate.filling import examined, load_rounded, shard_and_load
from modicum.torch.accelerate.unfilled import (
    BuiltModel,
    note,
    note_resized,
    release,
    told_to_users,
)
from modicum.torch.build.empty import empty_parameters
from modicum.torch.loading.around import giving
from modicum.torch.loading.load import arguments_in
from modicum.torch.saving.report import ResumeReport, SaveReport
from modicum.torch.shards.forks import require_fork
from modicum.torch.shards.rebinding import Bindings
from modicum.upstream import accelerate, peft, transformers, trl
from modicum.upstream.checkpoints import TRAINER
from modicum.upstream.patching import after_imports
from modicum.upstream.torch_core import count_writes_through_data
from modicum.upstream.torch_fsdp import is_sharded
from modicum.upstream.wrappers import unwrapped
from modicum.walk.calls import require_check
from modicum.walk.load_report import LoadReport


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
) -> Iterator["Loading"]:
    """A context in which each rank of a script of accelerate or Trainer with FSDP2 reads only its
    own bytes (with the default strategy). The values have the same bits as those that accelerate
    would load. The script's checkpoints are saved and resumed through Modicum, too.

    accelerate shards by FSDP2 on devices only: with the CPU alone it takes DDP, which is refused.
    It must enclose `from_pretrained` and `prepare` or `Trainer.train`. Every rank enters it with
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
    require_check(check)
    arguments = arguments_in(
        "loading", rules, memory, ("missing", "unexpected", "seed"),
        budget=budget, check=check, progress=progress,
    )  # fmt: skip
    ledger = arguments["ledger"]
    require_fork(arguments["fork"])
    context = Loading(None if source is None else Path(source), arguments)
    with ExitStack() as stack:
        scripts = transformers.builder(_pretrained_model()) or _Scripts(stack)
        scripts.loadings.append(context)
        stack.callback(scripts.loadings.remove, context)
        with (
            giving(ledger, budget, scripts.loaded),
            told_to_users(lambda: bool(context.unfilled())),
        ):
            yield context
    _refuse_unfilled(context)


@dataclass(eq=False)
class Loading:
    """The loads of one `loading` context."""

    _source: Path | None
    _arguments: dict[str, Any]
    reports: list[LoadReport] = field(default_factory=list)
    """The report of each load, in order, including loads of resumes."""
    saves: list[SaveReport] = field(default_factory=list)
    """The report of each saved model, in order; a checkpoint may have several."""
    _built: weakref.WeakKeyDictionary[nn.Module, BuiltModel] = field(
        default_factory=weakref.WeakKeyDictionary, repr=False
    )

    _exempt: weakref.WeakSet[nn.Module] = field(default_factory=weakref.WeakSet, repr=False)
    _is_exempt: bool = field(default=False, repr=False)

    @property
    def report(self) -> LoadReport | None:
        """The report of the last load; None before the first one."""
        return self.reports[-1] if self.reports else None

    def fill(self, model: nn.Module) -> None:
        """Loads a model that was built in the context and is not passed to `Accelerator.prepare`,
        with its present sharding. Does nothing if the model has values. Collective."""
        transformers.builder(_pretrained_model()).fill(model)

    def unfilled(self) -> list[nn.Module]:
        """The models that were built in the context and have no values yet."""
        return [model for model, built in self._built.items() if not built.filled]

    @contextmanager
    def exempt(self, *models: nn.Module) -> Iterator[None]:
        """A context that leaves `models`, and all models built in it, to transformers and
        accelerate: each rank reads and holds them as without Modicum."""
        self._exempt.update(models)
        before, self._is_exempt = self._is_exempt, True
        try:
            yield
        finally:
            self._is_exempt = before


def _refuse_unfilled(opened: Loading) -> None:
    if opened.unfilled():
        gc.collect()  # a model that nothing but a cycle refers to is no error
    for model in opened.unfilled():
        what = "a model that was built within loading() has no values yet: call "
        what += "Accelerator.prepare or Trainer.train before the context ends"
        raise refusal("USAGE", what, got=type(model).__name__)


# ---- patched functions


def _pretrained_model() -> Any:
    from transformers import PreTrainedModel

    return PreTrainedModel


class _Scripts:
    """The replacements for functions of accelerate, transformers, PEFT and TRL. Nested `loading()`
    contexts share one object; a model belongs to the innermost context in which it is built."""

    def __init__(self, stack: ExitStack) -> None:
        accelerate.KNOWN.require()
        transformers.KNOWN.require()
        self.loadings: list[Loading] = []
        self.is_building = False
        self._bindings: Bindings | None = None
        self._stack = stack
        self._counting = stack.enter_context(ExitStack())
        self._has_peft = False
        transformers.replace_loading(stack, _pretrained_model(), self)
        accelerate.replace_prepare(stack, self._preparing, self._sharding, self._placing)
        self._checkpoints = Checkpoints(self._arguments, self._note_save, self._note_resume)
        self._checkpoints.replace_accelerate(stack)
        self._replace_imported()
        after_imports(stack, ("peft", "trl", TRAINER), self._imported)

    def _replace_imported(self) -> None:
        """Replaces functions of PEFT, TRL and Trainer, if the script has imported them. May be
        called repeatedly."""
        self._has_peft = self._has_peft or peft.with_real_adapters(self._stack)
        trl.replace_sharding(self._stack, self._sharding_reference)
        self._checkpoints.replace(self._stack)

    def _imported(self) -> None:
        """Is called after an import of PEFT, TRL or Trainer within the context."""
        with suppress(UsageError):  # an untested version: the next use raises the error again
            self._replace_imported()

    def _arguments(self) -> dict[str, Any]:
        return self.loadings[-1]._arguments

    def _note_save(self, saved: SaveReport) -> None:
        self.loadings[-1].saves.append(saved)

    def _note_resume(self, resumed: ResumeReport) -> None:
        self.loadings[-1].reports.append(resumed.load)

    def contexts(self) -> list[AbstractContextManager[Any]]:
        """The contexts in which `from_pretrained` builds a model."""
        self._replace_imported()
        accelerate.require_fsdp2_if_set()
        outside: list[AbstractContextManager[Any]] = []
        if torch.is_inference_mode_enabled():  # whose tensors do not count writes
            outside = [torch.inference_mode(False), torch.no_grad()]
        # from_pretrained draws no random numbers, so the generator must stay unchanged here, too.
        return [
            *outside, torch.random.fork_rng(devices=[]), self._constructing(), empty_parameters(),
        ]  # fmt: skip

    @contextmanager
    def _constructing(self) -> Iterator[None]:
        before, self.is_building = self.is_building, True
        try:
            yield
        finally:
            self.is_building = before

    def built(self, model: Any, files: Sequence[str] | None, *arguments: Any) -> None:
        """Called in place of reading: records the source, and guards the model until the load."""
        transformers.check_arguments(model, *arguments)
        innermost = self.loadings[-1]
        self._note(model, BuiltModel(innermost, innermost._source or transformers.source_of(files)))

    def made(self, model: Any) -> None:
        """Called when `from_config` has built a model. Without a source its own rules make its
        values."""
        innermost = self.loadings[-1]
        self._note(model, BuiltModel(innermost, innermost._source))

    def _note(self, model: nn.Module, built: BuiltModel) -> None:
        note(model, built, built.loading._built.__setitem__)
        self._count_writes()

    def _count_writes(self) -> None:
        """Counts writes through `.data` as long as a model has no values: there are no other traces
        of them."""
        if not any(context.unfilled() for context in self.loadings):
            self._counting.close()
        elif "data" not in vars(torch.Tensor):
            count_writes_through_data(self._counting)

    def resized(self, model: Any, rule: str) -> None:
        """Called when embeddings or heads of a model were resized. `rule`: how the load makes new
        rows, "mean" or "model", as `resized` of `modicum.torch.load`."""
        for context in self.loadings:
            for whole, built in context._built.items():
                if model in [*whole.modules()]:
                    note_resized(whole, built, transformers.embeddings_of(model), rule)

    @property
    def is_exempt(self) -> bool:
        """Whether models are now built without Modicum."""
        return self.loadings[-1]._is_exempt

    def exempted(self, model: Any) -> None:
        """Called when a model was built without Modicum."""
        self.loadings[-1]._exempt.add(model)

    def _record(self, module: nn.Module) -> BuiltModel | None:
        """The facts about a module that was built without values; None for other modules."""
        return next(
            (record for context in self.loadings if (record := context._built.get(module))), None
        )

    def _roots(self, model: nn.Module) -> dict[nn.Module, BuiltModel]:
        """The outermost models inside `model` that were built without values."""
        if built := self._record(model):
            return {model: built}
        return {m: record for child in model.children() for m, record in self._roots(child).items()}

    def _filled(self, model: nn.Module) -> None:
        """Notes that a model has its values: removes its guards."""
        for module in model.modules():
            release(module)
            if built := self._record(module):
                built.filled = True
                built.parameters.clear()
                built.buffers.clear()
        self._count_writes()

    def loaded(self, model: nn.Module) -> None:
        """Called after a script's own `modicum.torch.load`. A load of adapters alone may leave the
        base model on meta."""
        if not any(parameter.is_meta for parameter in model.parameters()):
            self._filled(model)

    def _is_filled(self, model: nn.Module) -> bool:
        """Whether all parts of a model given to prepare have values. Raises `UsageError` for a
        model that is neither built here, nor sharded, nor exempt."""
        roots = self._roots(model)
        is_exempt = any(model in context._exempt for context in self.loadings)
        if not roots and not is_sharded(model) and not is_exempt:
            what = "from_pretrained did not build this model within loading(): prepare it outside, "
            what += "or within `with loading.exempt(model)`"
            raise refusal("USAGE", what, got=type(model).__name__)
        return all(built.filled for built in roots.values())

    # ---- prepare

    @contextmanager
    def _binding(self, model: nn.Module, optimizers: Sequence[Any]) -> Iterator[None]:
        """A context at whose end optimizers get the sharded parameters, matched by name. accelerate
        matches them by address, which is 0 for all tensors on meta."""
        bindings, outer = Bindings(model, optimizers), self._bindings
        self._bindings = bindings
        try:
            yield
            bindings.exchange()
        except BaseException:
            bindings.restore()
            raise
        finally:
            self._bindings = outer

    def _preparing(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def prepare(accelerator: Any, *args: Any, **kwargs: Any) -> Any:
            self._replace_imported()
            models = [argument for argument in args if isinstance(argument, nn.Module)]
            empty = [model for model in models if not self._is_filled(model)]
            if not empty:
                return original(accelerator, *args, **kwargs)
            accelerate.require_fsdp2(accelerator.state)
            optimizers = [
                unwrapped(argument)
                for argument in args
                if isinstance(argument, torch.optim.Optimizer)
            ]
            with self._binding(empty[0], optimizers):
                prepared = original(accelerator, *args, **kwargs)
            if not all(map(self._is_filled, empty)):
                what = "Accelerator.prepare of this accelerate does not call fsdp2_prepare_model"
                expected = f"accelerate {' or '.join(accelerate.KNOWN.tested)}"
                raise refusal("UNSUPPORTED", what, expected=expected)
            return prepared

        return prepare

    def _sharding(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def fsdp2_prepare_model(accelerator: Any, model: nn.Module) -> Any:
            found = self._unfilled_in(model)
            if found is None:
                return original(accelerator, model)
            model = shard_and_load(accelerator, original, self._bindings, model, found)
            self._filled(model)
            return model

        return fsdp2_prepare_model

    def _placing(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def prepare_model(accelerator: Any, model: nn.Module, *args: Any, **kwargs: Any) -> Any:
            prepared = original(accelerator, model, *args, **kwargs)
            self.fill(model)  # one that accelerate has not sharded, such as a reference model
            return prepared

        return prepare_model

    def _sharding_reference(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def prepare_fsdp(model: nn.Module, accelerator: Any) -> Any:
            prepared = original(model, accelerator)
            self.fill(prepared)
            return prepared

        return prepare_fsdp

    def _unfilled_in(self, model: nn.Module) -> tuple[nn.Module, BuiltModel] | None:
        """The model in `model` that was built without values and has none yet; None if there is no
        such model."""
        roots = self._roots(model)
        if all(built.filled for built in roots.values()):
            return None
        if len(roots) > 1:
            names = " and ".join(type(root).__name__ for root in [*roots][:2])
            what = "a module with several models inside that were built within loading()"
            raise refusal("UNSUPPORTED", what, expected="one", got=names)
        return next(iter(roots.items()))

    def fill(self, model: nn.Module) -> None:
        """Loads a model with its present sharding, unless it has values."""
        if (found := self._unfilled_in(model)) is None:
            return
        root, built = found
        load_rounded(model, built, examined(model, root, built), None)
        self._filled(model)
