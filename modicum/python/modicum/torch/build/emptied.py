"""Finds and fills tensors that `to_empty` has allocated and that the checkpoint does not fill.

A model that was built on meta and got memory by `to_empty` looks like a model with values. The load
overwrites the tensors that the checkpoint has. All others would keep garbage that differs between
ranks: non-persistent buffers, such as those of rotary embeddings, and tensors that the checkpoint
lacks.
"""

import itertools
import warnings
from collections.abc import Callable, Container, Iterable, Iterator
from functools import partial
from typing import Any

import torch
from torch import nn

from modicum.errors import Error, refusal
from modicum.recipes.structure import Structure
from modicum.torch.build.initialiser import Initialiser
from modicum.torch.ranks.group import Ranks
from modicum.torch.shards.placements import whole_of
from modicum.torch.shards.tensors import ModelTensor, tensors_of
from modicum.upstream.torch_core import version_of
from modicum.upstream.torch_distributed import dtensor_like

_NAMES_SHOWN = 8

# (a buffer, whether no tensor of its module was ever written). Its module: the smallest module
# around the buffer that has parameters.
_Buffer = tuple[torch.Tensor, bool]
# Makes the tensors of the given names by the model's own rules.
_Makes = Callable[[Iterable[str]], Iterator[tuple[str, torch.Tensor]]]


def is_unwritten(tensor: torch.Tensor) -> bool:
    """Whether nothing, such as an initialiser, has ever written to this tensor in place: its values
    are those of `torch.empty`, or the result of one operation. For a DTensor its own version
    counts, not that of its local tensor, to which FSDP2 writes padding."""
    try:
        return version_of(tensor) == 0
    except RuntimeError:  # an inference tensor has no version
        return False


class EmptiedMemory:
    """The tensors of a model that `to_empty` has left without values, found before a load.

    A non-persistent buffer is compared with the result of the model's own rule. If they differ, the
    smallest module around the buffer that has parameters decides. If no tensor of that module was
    ever written, `to_empty` has allocated the buffer: it is restored after the load, and all
    parameters and persistent buffers of the model that were never written count as missing.
    Otherwise the buffer may be intended: it is unchanged, with a warning.
    """

    unwritten: set[str]
    """Names of parameters and persistent buffers that have memory but no values on some rank."""

    def __init__(
        self,
        model: nn.Module,
        structure: Structure,
        buffers: str | None,
        ranks: Ranks,
        seed: int,
    ) -> None:
        """
        Args:
            structure: the model's structure.
            buffers: "restore": restores every buffer that differs; "keep": examines and restores
                none; None: as described above.
            seed: the seed of rules that draw random numbers.
        """
        if buffers not in (None, "restore", "keep"):
            expected, got = "None, 'restore' or 'keep'", repr(buffers)
            raise refusal("USAGE", "buffers", expected=expected, got=got)
        self._values: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}  # (buffer, values)
        self._differ: list[str] = []  # differ, but are not restored
        self._unknown: list[str] = []  # never written, and not made by a rule
        unwritten: list[str] = []
        if buffers != "keep":
            makes = partial(_rule_values, model, structure, seed)
            tensors = tensors_of(model, structure, scratch=True)
            found = _examined(model, tensors, everything=buffers == "restore")
            is_emptied = self._compare(makes, found, everything=buffers == "restore")
            if not is_emptied and _has_no_values(model):
                self._unknown += _never_written(tensors)
            unwritten = _never_written(tensors) if is_emptied else []
        everyone = ranks.gather([unwritten, [*self._values], self._differ, self._unknown])
        names = [sorted({name for rank in everyone for name in rank[i]}) for i in range(4)]
        self.unwritten = set(names[0])
        self._named = names[1:] if ranks.rank == 0 else [[], [], []]  # only rank 0 warns

    def _compare(self, makes: _Makes, found: dict[str, _Buffer], *, everything: bool) -> bool:
        """Notes buffers that differ from their rule. Returns whether any of them shows that
        `to_empty` has allocated the model's memory."""
        is_emptied = False
        computed = set()
        for name, value in makes(found):
            buffer, never_written = found[name]
            computed.add(name)
            value = value.to(buffer.dtype)
            present = whole_of(buffer, name, ": buffers='keep' leaves it alone")
            if torch.equal(value, present.detach().cpu()):
                continue
            is_emptied |= never_written
            if everything or never_written:
                self._values[name] = buffer, dtensor_like(buffer, value.clone())
            else:
                self._differ.append(name)
        self._unknown = [n for n, (_, never) in found.items() if never and n not in computed]
        return is_emptied

    def restore(self, loaded: Container[str]) -> None:
        """Restores buffers and warns; called after a load of the names `loaded`."""
        with torch.no_grad():
            for buffer, value in self._values.values():
                buffer.copy_(value)
        restored, differ, unknown = self._named
        unknown = [name for name in unknown if name not in loaded]
        if restored:
            _warn(
                "were restored by the model's own rule: they did not have its values, as after "
                "to_empty() (buffers='keep' leaves them alone)",
                restored,
            )
        if differ:
            _warn(
                "were left alone and do not have the values of the model's own rule (buffers="
                "'restore' restores them, buffers='keep' accepts them)",
                differ,
            )
        if unknown:
            _warn(
                "were left alone: they and the tensors around them were never written, as "
                "after to_empty(). Compute them now, or build the model under empty_parameters() "
                "(buffers='keep' accepts them)",
                unknown,
            )


def _warn(what: str, names: list[str]) -> None:
    shown = ", ".join(names[:_NAMES_SHOWN])
    more = f" and {len(names) - _NAMES_SHOWN} more" if len(names) > _NAMES_SHOWN else ""
    warnings.warn(f"tensors that no file holds {what}: {shown}{more}", stacklevel=4)


def _examined(
    model: nn.Module, tensors: dict[str, ModelTensor], *, everything: bool
) -> dict[str, _Buffer]:
    """The non-persistent buffers that may be garbage, by name. A buffer is not garbage if it was
    written in place, or if a parameter of the smallest module with parameters around it is on meta:
    then `to_empty` was not called there. `everything`: returns all non-persistent buffers. Buffers
    on meta and empty buffers are never returned."""
    around = dict(_smallest_with_parameters(model))
    found = {}
    for name, entry in tensors.items():
        if (
            entry.is_parameter
            or entry.is_persistent
            or entry.tensor.is_meta
            or entry.tensor.numel() == 0
        ):
            continue
        module = around[id(entry.module)]
        parameters = [] if module is None else [*module.parameters()]
        is_real = not any(parameter.is_meta for parameter in parameters)
        if everything or (is_real and is_unwritten(entry.tensor)):
            found[name] = entry.tensor, module is not None and _has_no_values(module)
    return found


def _has_no_values(module: nn.Module) -> bool:
    """Whether all tensors of a module have memory and were never written, as after `to_empty`."""
    tensors = itertools.chain(module.parameters(), module.buffers())
    return all(is_unwritten(tensor) and not tensor.is_meta for tensor in tensors)


def _smallest_with_parameters(model: nn.Module) -> Iterator[tuple[int, nn.Module | None]]:
    """(id of a module, the smallest module with parameters that contains it or is it)."""

    def below(module: nn.Module, outer: nn.Module | None) -> Iterator[Any]:
        smallest = outer if next(module.parameters(), None) is None else module
        yield id(module), smallest
        for child in module.children():
            yield from below(child, smallest)

    return below(model, None)


def _rule_values(
    model: nn.Module, structure: Structure, seed: int, names: Iterable[str]
) -> Iterator[tuple[str, torch.Tensor]]:
    """(name, value) for those of `names` that a rule of the model makes."""
    names = [*names]
    if not names:
        return
    initialiser = Initialiser(model, names, seed=seed, buffers_only=True, structure=structure)
    for name in initialiser.order:
        try:
            yield name, initialiser.whole(name)
        except Error:  # its rule needs values that are not loaded yet
            continue


def _never_written(tensors: dict[str, ModelTensor]) -> list[str]:
    """The names of parameters and persistent buffers with memory that was never written."""
    return [
        name
        for name, entry in tensors.items()
        if (entry.is_parameter or entry.is_persistent)
        and not entry.tensor.is_meta
        and is_unwritten(entry.tensor)
    ]
