"""Memory that `to_empty` has made and nobody has written, where no file brings values.

A model that was built on meta and given memory by `to_empty` looks like one that has values. What
the file holds is loaded over it. The rest would stay garbage, different on each rank: buffers that
no state dict has, as rotary embeddings keep them, and tensors that the file lacks.
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
from modicum.torch.shards.tensors import ModelTensor, tensors_of
from modicum.upstream.torch_core import version_of

_NAMES_SHOWN = 8

# A buffer, and whether neither it nor any other tensor around it was ever written.
_Buffer = tuple[torch.Tensor, bool]
# What the model's own rules make of tensors with these names.
_Makes = Callable[[Iterable[str]], Iterator[tuple[str, torch.Tensor]]]


def is_unwritten(tensor: torch.Tensor) -> bool:
    """Nothing was ever written into this tensor in place, as an initialiser would. So it is what
    `torch.empty` gave, or what one operation returned. Of a DTensor the outer one counts: FSDP2
    itself copies a local tensor that it pads."""
    try:
        return version_of(tensor) == 0
    except RuntimeError:  # an inference tensor does not count
        return False


class Emptied:
    """What `to_empty` has left of a model, seen before a load.

    A buffer is compared with what the model's own rule makes of it. Where the two differ and nobody
    has ever written any tensor of the smallest module around it that has parameters, `to_empty` has
    made it: it is restored once the load is done, and a tensor of the model that was never written
    either counts as missing. Where something was written the buffer may be meant so: it is left
    alone, with a warning.
    """

    unwritten: set[str]
    """Names of parameters and persistent buffers that have memory and no values, on any rank."""

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
            structure: of the model.
            buffers: "restore": every buffer that differs is restored; "keep": none is, and nothing
                is examined; None: as said above.
            seed: of rules that draw random numbers.
        """
        if buffers not in (None, "restore", "keep"):
            raise refusal("USAGE", "buffers is None, 'restore' or 'keep'", got=repr(buffers))
        self._values: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}  # the buffer, and what for
        self._differ: list[str] = []  # left alone
        self._unknown: list[str] = []  # never written, and no rule makes them
        unwritten: list[str] = []
        if buffers != "keep":
            makes = partial(_made, model, structure, seed)
            tensors = tensors_of(model, structure, scratch=True)
            found = _examined(model, tensors, everything=buffers == "restore")
            is_emptied = self._compare(makes, found, everything=buffers == "restore")
            if not is_emptied and _has_no_values(model):
                self._unknown += _never_written(tensors)
            unwritten = _never_written(tensors) if is_emptied else []
        everyone = ranks.gather([unwritten, [*self._values], self._differ, self._unknown])
        names = [sorted({name for rank in everyone for name in rank[i]}) for i in range(4)]
        self.unwritten = set(names[0])
        self._named = names[1:] if ranks.rank == 0 else [[], [], []]

    def _compare(self, makes: _Makes, found: dict[str, _Buffer], *, everything: bool) -> bool:
        """Whether a buffer shows that `to_empty` has made the model's memory."""
        is_emptied = False
        made = set()
        for name, value in makes(found):
            buffer, never_written = found[name]
            made.add(name)
            value = value.to(buffer.dtype)
            if torch.equal(value, buffer.detach().cpu()):
                continue
            is_emptied |= never_written
            if everything or never_written:
                self._values[name] = buffer, value.clone()
            else:
                self._differ.append(name)
        self._unknown = [n for n, (_, never) in found.items() if never and n not in made]
        return is_emptied

    def restore(self, loaded: Container[str]) -> None:
        """Once everything else, which has these names, is loaded."""
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
                "'restore' restores them, buffers='keep' says that they are meant so)",
                differ,
            )
        if unknown:
            _warn(
                "were left alone: nobody has written into them or the tensors around them, as "
                "after to_empty(). Compute them now, or build the model under empty_parameters() "
                "(buffers='keep' says that they have their values)",
                unknown,
            )


def _warn(what: str, names: list[str]) -> None:
    shown = ", ".join(names[:_NAMES_SHOWN])
    more = f" and {len(names) - _NAMES_SHOWN} more" if len(names) > _NAMES_SHOWN else ""
    warnings.warn(f"tensors that no file holds {what}: {shown}{more}", stacklevel=4)


def _examined(
    model: nn.Module, tensors: dict[str, ModelTensor], *, everything: bool
) -> dict[str, _Buffer]:
    """By name, buffers that no state dict has and that may be garbage. Where a parameter is still
    on meta, `to_empty` was not called; what somebody has written in place is values."""
    around = dict(_smallest_with_parameters(model))
    found = {}
    for name, of in tensors.items():
        if of.is_parameter or of.is_persistent or of.tensor.is_meta or of.tensor.numel() == 0:
            continue
        module = around[id(of.module)]
        parameters = [] if module is None else [*module.parameters()]
        is_real = not any(parameter.is_meta for parameter in parameters)
        if everything or (is_real and is_unwritten(of.tensor)):
            found[name] = of.tensor, module is not None and _has_no_values(module)
    return found


def _has_no_values(module: nn.Module) -> bool:
    """`to_empty` gives everything in a module new memory."""
    tensors = itertools.chain(module.parameters(), module.buffers())
    return all(is_unwritten(tensor) and not tensor.is_meta for tensor in tensors)


def _smallest_with_parameters(model: nn.Module) -> Iterator[tuple[int, nn.Module | None]]:
    """By identity of a module: itself, or the smallest around it, that has parameters."""

    def below(module: nn.Module, outer: nn.Module | None) -> Iterator[Any]:
        own = outer if next(module.parameters(), None) is None else module
        yield id(module), own
        for child in module.children():
            yield from below(child, own)

    return below(model, None)


def _made(
    model: nn.Module, structure: Structure, seed: int, names: Iterable[str]
) -> Iterator[tuple[str, torch.Tensor]]:
    """Those that a rule of the model makes, and what it makes."""
    names = [*names]
    if not names:
        return
    initialiser = Initialiser(model, names, seed=seed, buffers_only=True, structure=structure)
    for name in initialiser.order:
        try:
            yield name, initialiser.whole(name)
        except Error:  # a rule that needs what is not there is none for this buffer
            continue


def _never_written(tensors: dict[str, ModelTensor]) -> list[str]:
    """Of parameters and persistent buffers."""
    return [
        name
        for name, of in tensors.items()
        if (of.is_parameter or of.is_persistent)
        and not of.tensor.is_meta
        and is_unwritten(of.tensor)
    ]
