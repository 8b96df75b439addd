"""What replaces the functions by which scripts of accelerate, transformers' Trainer, PEFT and TRL
build, shard and load models in `loading()`. context.py shows the calls in order."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from typing import Any

import torch
from torch import nn

from modicum.errors import UsageError, refusal
from modicum.torch.accelerate.checkpoints import Checkpoints
from modicum.torch.accelerate.filling import examined, load_rounded, shard_and_load
from modicum.torch.accelerate.loads import Loading, Models
from modicum.torch.accelerate.unfilled import BuiltModel, note, note_resized, release
from modicum.torch.build.empty import empty_parameters
from modicum.torch.shards.rebinding import Bindings
from modicum.upstream import accelerate, peft, transformers, trl
from modicum.upstream.checkpoints import TRAINER
from modicum.upstream.patching import after_imports
from modicum.upstream.torch_core import count_writes_through_data
from modicum.upstream.torch_fsdp import is_sharded
from modicum.upstream.wrappers import unwrapped


def scripts_until(stack: ExitStack) -> "Scripts":
    """The replacements of the context around this one, or new ones until `stack` ends."""
    return transformers.builder(_pretrained_model()) or Scripts(stack)


def _pretrained_model() -> Any:
    from transformers import PreTrainedModel

    return PreTrainedModel


class Scripts:
    """The replacements for functions of accelerate, transformers, PEFT and TRL. Nested `loading()`
    contexts share one object, and `stack` is the outermost one's. A model belongs to the innermost
    context in which it is built."""

    def __init__(self, stack: ExitStack) -> None:
        accelerate.KNOWN.require()
        transformers.KNOWN.require()
        self.loadings: list[Loading] = []
        self.models: Models = Models()
        self.is_building = False
        self._bindings: Bindings | None = None
        self._stack = stack
        self._counting = stack.enter_context(ExitStack())
        self._has_peft = False
        transformers.replace_loading(stack, _pretrained_model(), self)
        accelerate.wrap_prepare(
            stack, prepare=self._prepare, prepare_model=self._prepare_model, shard=self._shard
        )
        self._checkpoints = Checkpoints(self.loadings)
        self._checkpoints.wrap_accelerate(stack)
        self._replace_imported()
        after_imports(stack, ("peft", "trl", TRAINER), self._after_import)

    def _replace_imported(self) -> None:
        """Replaces functions of PEFT, TRL and Trainer, if the script has imported them. May be
        called repeatedly."""
        self._has_peft = self._has_peft or peft.with_real_adapters(self._stack)
        trl.wrap_sharding(self._stack, self._shard_reference)
        self._checkpoints.wrap_trainer(self._stack)

    def _after_import(self) -> None:
        """Is called after an import of PEFT, TRL or Trainer within the context."""
        with suppress(UsageError):  # an untested version: the next use raises the error again
            self._replace_imported()

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
        note(model, built, self.models.__setitem__)
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
        for whole, built in self.models.items():
            if built is not None and model in [*whole.modules()]:
                note_resized(whole, built, transformers.embeddings_of(model), rule)

    @property
    def is_exempt(self) -> bool:
        """Whether models are now built without Modicum."""
        return self.loadings[-1]._is_exempt

    def exempted(self, model: Any) -> None:
        """Called when a model was built without Modicum."""
        self.models[model] = None

    def _roots(self, model: nn.Module) -> dict[nn.Module, BuiltModel]:
        """The outermost models inside `model` that were built without values."""
        if built := self.models.get(model):
            return {model: built}
        return {m: record for child in model.children() for m, record in self._roots(child).items()}

    def _filled(self, model: nn.Module) -> None:
        """Notes that a model has its values: removes its guards."""
        for module in model.modules():
            release(module)
            if built := self.models.get(module):
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
        if not roots and not is_sharded(model) and model not in self.models:
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

    def _prepare(
        self, original: Callable[..., Any], accelerator: Any, *args: Any, **kwargs: Any
    ) -> Any:
        self._replace_imported()
        models = [argument for argument in args if isinstance(argument, nn.Module)]
        empty = [model for model in models if not self._is_filled(model)]
        if not empty:
            return original(accelerator, *args, **kwargs)
        accelerate.require_fsdp2(accelerator.state)
        optimizers = [
            unwrapped(argument) for argument in args if isinstance(argument, torch.optim.Optimizer)
        ]
        with self._binding(empty[0], optimizers):
            prepared = original(accelerator, *args, **kwargs)
        if not all(map(self._is_filled, empty)):
            what = "Accelerator.prepare of this accelerate does not call fsdp2_prepare_model"
            expected = f"accelerate {' or '.join(accelerate.KNOWN.tested)}"
            raise refusal("UNSUPPORTED", what, expected=expected)
        return prepared

    def _shard(self, original: Callable[..., Any], accelerator: Any, model: nn.Module) -> Any:
        found = self._unfilled_in(model)
        if found is None:
            return original(accelerator, model)
        model = shard_and_load(accelerator, original, self._bindings, model, found)
        self._filled(model)
        return model

    def _prepare_model(
        self,
        original: Callable[..., Any],
        accelerator: Any,
        model: nn.Module,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        prepared = original(accelerator, model, *args, **kwargs)
        self.fill(model)  # one that accelerate has not sharded, such as a reference model
        return prepared

    def _shard_reference(
        self, original: Callable[..., Any], model: nn.Module, accelerator: Any
    ) -> Any:
        prepared = original(model, accelerator)
        self.fill(prepared)
        return prepared

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
