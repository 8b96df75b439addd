"""Finds the rules that initialise a model's tensors, and which tensors each rule writes.

A rule is code of the model: transformers' `_init_weights` for a module, PEFT's reset of a layer's
adapter, a module's own `reset_parameters`. Running it on tensors without memory shows which tensors
it writes. Rules run on copies of the modules, so that the model is not changed.
"""

import contextlib
import inspect
import math
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from modicum.recipes.structure import (
    Member,
    adapter_config,
    class_before_sharding,
    unwrapped,
    wrapped_by,
)
from modicum.upstream.torch_core import (
    RESETS,
    buffers_of,
    children_of,
    clone_of,
    parameters_of,
    storage_id,
)
from modicum.upstream.torch_dispatch import (
    LOCAL_SCALAR,
    NO_TORCH_FUNCTION,
    arguments_of,
    operator_name,
    return_and_correct_aliasing,
    tree_map,
    without_memory,
)
from modicum.upstream.transformers import initialise, is_pretrained

Slot = tuple[int, str]  # (id of a module, name of its attribute)
Region = tuple[Sequence[int], Sequence[int], int | torch.SymInt]  # (size, strides, offset)
TensorFor = Callable[[nn.Module, str, torch.Tensor], Any]  # for an attribute of a module

# Operators that overwrite every element of their first argument.
_MAKES = frozenset(
    {"bernoulli_", "cauchy_", "copy_", "exponential_", "fill_", "geometric_", "log_normal_"}
    | {"normal_", "random_", "uniform_", "zero_"}
)


# ---- tensors without memory


class Outline(torch.Tensor):
    """A tensor without memory that claims to be on the CPU, and records writes to it.

    Code that branches on its values sees zero and False. A meta tensor does not work here: torch's
    own initialisers skip it.
    """

    inner: torch.Tensor  # type: ignore[assignment]  # the same tensor on meta
    regions: list[Region]  # the regions that were written; the same list for all views

    __torch_function__ = NO_TORCH_FUNCTION  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, inner: torch.Tensor, regions: list[Region] | None = None) -> "Outline":
        outline: Outline = without_memory(cls, inner, "cpu")
        outline.inner, outline.regions = inner, [] if regions is None else regions
        return outline

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is LOCAL_SCALAR:
            return False if args[0].dtype is torch.bool else 0
        _note_writes(func, args, kwargs)
        if operator_name(func) in _MAKES:
            return args[0]
        outlines: list[Outline] = []

        def inner_of(value: Any) -> Any:
            if isinstance(value, Outline):
                outlines.append(value)
                return value.inner
            return value.to("meta") if isinstance(value, torch.Tensor) else value

        def outline_of(value: Any) -> Any:
            if not isinstance(value, torch.Tensor):
                return value
            storage = storage_id(value)
            views = (o.regions for o in outlines if storage_id(o.inner) == storage)
            return Outline(value, next(views, None))

        on_meta = {"device": torch.device("meta")} if "device" in kwargs else {}
        result = func(*tree_map(inner_of, args), **(tree_map(inner_of, kwargs) | on_meta))
        return return_and_correct_aliasing(func, args, kwargs, tree_map(outline_of, result))


def _note_writes(func: Any, args: Any, kwargs: Any) -> None:
    arguments = arguments_of(func)
    values = {a.name: value for a, value in zip(arguments, args, strict=False)} | kwargs
    for argument in arguments:
        value = values.get(argument.name)
        if argument.alias_info is None or not argument.alias_info.is_write:
            continue
        if isinstance(value, Outline):
            if argument.is_out or operator_name(func) in _MAKES:
                value.regions.append((value.size(), value.stride(), value.storage_offset()))
        elif isinstance(value, torch.Tensor):
            raise ValueError("it depends on the values of a tensor that it does not initialise")


def is_whole(numel: int, regions: Sequence[Region]) -> bool:
    """Whether the regions cover a tensor of `numel` elements."""
    if numel == 0 or any(math.prod(size) == numel for size, _, _ in regions):
        return True
    if not regions:
        return False
    is_made = torch.zeros(numel, dtype=torch.bool, device="cpu")
    for size, strides, offset in regions:
        is_made.as_strided(size, strides, offset).fill_(True)
    return bool(is_made.all())


# ---- running a rule


def tensor_of(module: nn.Module, name: str) -> torch.Tensor | None:
    """The module's own parameter or buffer of this name, or None."""
    return parameters_of(module).get(name, buffers_of(module).get(name))


@dataclass(frozen=True, eq=False)
class Rule:
    """Code that initialises tensors of a module and its submodules."""

    module: nn.Module
    run: Callable[[Any], Any]  # called with the module or a copy of it
    is_bare: bool  # whether it runs on the module without wrappers


@contextlib.contextmanager
def running(seed: int) -> Iterator[None]:
    """The context in which rules run: on the CPU, without gradients, with seeded random numbers."""
    guard = getattr(
        sys.modules.get("transformers.initialization"),
        "guard_torch_init_functions",
        contextlib.nullcontext,
    )
    with torch.random.fork_rng(devices=[]), torch.no_grad(), torch.device("cpu"), guard():
        torch.default_generator.manual_seed(seed)
        yield


def stand_ins(rule: Rule, tensor_for: TensorFor) -> dict[int, nn.Module]:
    """Copies of the rule's module and its submodules, by id of the originals. They have the tensors
    of `tensor_for`, their classes from before `fully_shard` and, if the rule is bare, no wrappers.
    An attribute that a rule sets on a copy is not set on the original."""
    copies: dict[int, nn.Module] = {}
    ahead = [rule.module]
    while ahead:
        module = ahead.pop()
        if id(module) in copies:
            continue
        parameters, buffers = (
            {
                name: None if tensor is None else tensor_for(module, name, tensor)
                for name, tensor in tensors.items()
            }
            for tensors in (parameters_of(module), buffers_of(module))
        )
        children = {
            name: unwrapped(child) if rule.is_bare and child is not None else child
            for name, child in children_of(module).items()
        }
        copies[id(module)] = clone_of(
            module,
            class_before_sharding(module),
            parameters=parameters,
            buffers=buffers,
            modules=children,
        )
        ahead += [child for child in children.values() if child is not None]
    for copy in copies.values():
        inner = children_of(copy)
        inner.update({name: copies.get(id(child)) for name, child in inner.items()})
    return copies


# ---- finding the rules


class Rules:
    """The rules of a model, and what each of them writes; both are found when first asked for."""

    def __init__(self) -> None:
        self._rules: dict[tuple[int, str], Rule | None] = {}
        self._outlines: dict[Slot, torch.Tensor] = {}
        self._regions_by_rule: dict[Rule, dict[Slot, list[Region]]] = {}

    def of(self, member: Member) -> tuple[list[Rule], list[Rule]]:
        """The rules that may make a tensor, innermost first, in the order in which the frameworks
        run them: (constructors' rules of modules, initialisers of the model or adapter)."""
        later: list[Rule | None]
        if member.adapter is None:
            inner = [module for module in member.chain if unwrapped(module) is module]
            later = [self._of_weights(inner[:depth]) for depth in range(len(inner), 0, -1)]
        else:
            depths = [i for i, m in enumerate(member.chain) if wrapped_by(m) is not None]
            if not depths:
                return [], []
            inner = [*member.chain[depths[-1] + 1 :]]
            later = [self._of_adapter(member.chain[: depths[-1] + 1], member.adapter)]
        constructors = [self._of_constructor(module) for module in reversed(inner)]
        return [*filter(None, constructors)], [*filter(None, later)]

    def made_by(self, rule: Rule) -> dict[Slot, list[Region]]:
        """The regions that a rule writes, by slot."""
        if rule not in self._regions_by_rule:
            seen: dict[Slot, tuple[nn.Module, Any]] = {}

            def outline_for(module: nn.Module, name: str, tensor: torch.Tensor) -> torch.Tensor:
                outline = self.outline_for(module, name, tensor)
                outline.regions.clear()
                seen[id(module), name] = module, outline
                return outline

            with running(0):
                copies = stand_ins(rule, outline_for)
                rule.run(copies[id(rule.module)])
            for (_, name), (module, outline) in seen.items():
                now = tensor_of(copies[id(module)], name)
                if now is not None and now is not outline:  # replaced
                    outline.regions.append((outline.size(), outline.stride(), 0))
            self._regions_by_rule[rule] = {
                slot: [*o.regions] for slot, (_, o) in seen.items() if o.regions
            }
        return self._regions_by_rule[rule]

    def outline_for(self, module: nn.Module, name: str, tensor: torch.Tensor) -> Any:
        """The outline of a tensor; the same object for all rules, since some set a marker on it
        that others read."""
        slot = id(module), name
        if slot not in self._outlines:
            inner = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
            self._outlines[slot] = like(tensor, Outline(inner))
        return self._outlines[slot]

    def _once(self, module: nn.Module, kind: str, make: Callable[[], Rule | None]) -> Rule | None:
        """The result of `make`, from a cache by module and kind."""
        if (id(module), kind) not in self._rules:
            self._rules[id(module), kind] = make()
        return self._rules[id(module), kind]

    def _of_weights(self, chain: Sequence[nn.Module]) -> Rule | None:
        """The rule by which the innermost model of transformers in `chain` initialises the last
        module; None without such a model."""
        module = chain[-1]
        model: Any = next((m for m in reversed(chain) if is_pretrained(m)), None)
        if model is None:
            return None

        def run(stand_in: nn.Module) -> None:
            initialise(stand_in if model is module else model, stand_in)

        return self._once(module, "weights", lambda: Rule(module, run, is_bare=True))

    def _of_constructor(self, module: nn.Module) -> Rule | None:
        """The module's own method of RESETS; None without one that can be called without
        arguments."""

        def make() -> Rule | None:
            for name in RESETS:
                if hasattr(type(module), name):
                    needs_arguments = any(
                        p.default is p.empty and p.kind is not p.VAR_POSITIONAL
                        for p in inspect.signature(getattr(module, name)).parameters.values()
                        if p.kind is not p.VAR_KEYWORD
                    )
                    run = partial(_call, name)
                    return None if needs_arguments else Rule(module, run, is_bare=True)
            return None

        return self._once(module, "constructor", make)

    def _of_adapter(self, chain: Sequence[nn.Module], adapter: str) -> Rule | None:
        """PEFT's reset of the adapter in the last module of `chain`; None without one."""

        def make() -> Rule | None:
            run = _reset_of(chain[-1], adapter, adapter_config(chain, adapter))
            return None if run is None else Rule(chain[-1], run, is_bare=False)

        return self._once(chain[-1], f"adapter {adapter}", make)


def like(tensor: torch.Tensor, replacement: torch.Tensor) -> torch.Tensor:
    """`replacement` as a parameter if `tensor` is one, with its `requires_grad`."""
    if not isinstance(tensor, nn.Parameter):
        return replacement
    return nn.Parameter(replacement, requires_grad=tensor.requires_grad)


def _call(name: str, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Calls a method of the module's class: a method set on the instance, which a copy of the
    module also has, would be bound to the original."""
    return getattr(type(module), name)(module, *args, **kwargs)


def _reset_of(layer: nn.Module, adapter: str, config: Any) -> Callable[[Any], Any] | None:
    """PEFT's own reset of an adapter in a layer, `reset_..._parameters(adapter_name)`, with
    arguments from the adapter's configuration. None if there is no such method or several, or if
    the configuration selects an initialisation that the method does not do."""
    names = [n for n in dir(type(layer)) if re.fullmatch(r"reset_(\w+_)?parameters", n)]
    if len(names) != 1 or config is None:
        return None
    parameters = inspect.signature(getattr(layer, names[0])).parameters
    arguments = {name: getattr(config, name) for name in parameters if hasattr(config, name)}
    starts = {n: v for n, v in vars(config).items() if re.fullmatch(r"init_(\w+_)?weights", n)}
    if any(value is not True for name, value in starts.items() if name not in parameters):
        return None
    return lambda stand_in: _call(names[0], stand_in, adapter, **arguments)
