"""Directories of torch.distributed.checkpoint as the contents of a saved
checkpoint."""

import json
import warnings
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from modicum.errors import refusal
from modicum.imports.archives import number_of
from modicum.imports.dcp import Directory, DirectoryTensor, Place
from modicum.imports.groups import Group, options_in, text_of
from modicum.imports.streams import Contents, Read, Source, streams_of
from modicum.recipes.dtypes import require_exact
from modicum.walk.saving import GROUPS_FILE, NOT_OPTIONS, class_text, split_keys_error


class StoredValue(NamedTuple):
    """A value of one of the directories."""

    directory: Directory
    key: str

    @property
    def tensor(self) -> DirectoryTensor:
        return self.directory.tensors[self.key]

    @property
    def place(self) -> Place:
        return self.directory.places.get(self.key, (self.key,))

    @property
    def is_option(self) -> bool:
        """Whether it is an option of a parameter group, or the group's parameters."""
        place = self.place
        return len(place) > 2 and place[-3] == "param_groups" and isinstance(place[-2], int)

    def option(self) -> Any:
        """The option, as `read_pickle` returns it; a tensor of more than a number is not read."""
        if self.key in self.directory.others:
            return self.directory.value(self.key)
        self.directory.compare([self.key])
        return self.tensor if self.tensor.shape else self.number()

    def number(self) -> float | int:
        """The number in a tensor of one element. Raises `UsageError` for another dtype."""
        data = bytearray(self.tensor.item_bytes)
        self.directory.read(self.key, 0, memoryview(data))
        try:
            return number_of(self.tensor.dtype, data)
        except ValueError:
            what, expected = "the dtype of a number", "float32, float64, int32 or int64"
            got = self.tensor.dtype
            raise refusal(
                "UNSUPPORTED", what, tensor=self.key, expected=expected, got=got
            ) from None


_State = dict[tuple[str, str], StoredValue]
"""The optimizer's tensors by (parameter, key)."""


def contents_of(
    directories: Sequence[Directory],
    source: Source,
    with_state: bool,
    optimizer: str | None,
    dtype: str | None,
) -> Contents:
    """The contents of a checkpoint with the tensors of these directories.

    Args:
        with_state: whether the checkpoint gets the optimizer's state.
        optimizer: the name of the optimizer's class in torch.optim; None: unknown.
        dtype: the dtype of the model's tensors that can be cast; None: as saved.

    Raises:
        FormatError, IoError: see `Directory.read`.
        IntegrityError: bytes of a tensor that the checkpoint gets differ from the CRC-32 in their
            file. UsageError: the directories have the tensors of several models, or of none; or a
            number of
            the state has another dtype than float32, float64, int32 and int64.
    """
    model, state = _parts_of(directories)
    options = _options_of(directories)
    left_out = {key for directory in directories for key in directory.others} | options.keys()
    groups: list[Group] = []
    if with_state:
        groups, read = _groups_of(options)
        left_out -= read
    else:
        left_out |= {entry.key for entry in state.values()}
        state = {}
    trained = ((fqn, model[fqn].tensor.dtype) for fqn, _ in state if fqn in model)
    require_exact(dtype, trained)
    for directory in directories:
        used = (
            entry for entry in (*model.values(), *state.values()) if entry.directory is directory
        )
        directory.compare(entry.key for entry in used)
    weights = streams_of(_described(model), _reader(model), source=source, dtype=dtype)
    if not state and not groups:
        return Contents(weights, left_out=[*left_out])
    tensors = {f"{fqn}.{key}": entry for (fqn, key), entry in state.items() if entry.tensor.shape}
    numbers: dict[str, dict[str, Any]] = {}
    for (fqn, key), entry in state.items():
        entry_numbers = numbers.setdefault(fqn, {})
        if not entry.tensor.shape:
            entry_numbers[key] = [entry.tensor.dtype, entry.number(), []]
    if optimizer is None:
        what = "modicum: the state does not name the class of its optimizer, so resume will refuse "
        warnings.warn(what + 'it: import it with optimizer="AdamW", or another class', stacklevel=3)
    facts = json.dumps({"optimizer": class_text(optimizer), "numbers": numbers})
    written = streams_of(_described(tensors), _reader(tensors)) if tensors else None
    texts = [(GROUPS_FILE, text_of(optimizer or "", groups))] if groups else []
    return Contents(weights, written, facts, texts, [*left_out])


def _described(tensors: Mapping[str, StoredValue]) -> dict[str, tuple[str, tuple[int, ...]]]:
    return {name: (entry.tensor.dtype, entry.tensor.shape) for name, entry in tensors.items()}


def _reader(tensors: Mapping[str, StoredValue]) -> Read:
    def read(name: str, first: int, view: memoryview) -> None:
        entry = tensors[name]
        entry.directory.read(entry.key, first, view)

    return read


def _parts_of(directories: Sequence[Directory]) -> tuple[dict[str, StoredValue], _State]:
    """The model's tensors by name, and the optimizer's."""
    entries = [
        StoredValue(directory, key) for directory in directories for key in directory.tensors
    ]
    tensors = [(entry.place, entry) for entry in entries if not entry.is_option]
    # The path of an optimizer's tensor has "state" before the parameter's name and a key.
    state = [(place, entry) for place, entry in tensors if "state" in place[:-2]]
    model = [(place, entry) for place, entry in tensors if "state" not in place[:-2]]
    if state and not model:
        what = "the directory has no model"
        expected = "the directory above it, in which accelerate has pytorch_model_fsdp_0, too"
        raise refusal("UNSUPPORTED", what, expected=expected, got="optimizer state alone")
    # The last component of a path, or the last two, name the tensor; those before are the prefix.
    for what, of_kind, ending in (("model", model, 1), ("optimizer", state, 2)):
        prefixes = {".".join(map(str, place[:-ending])) for place, _ in of_kind}
        if len(prefixes) > 1 or (not prefixes and what == "model"):
            raise split_keys_error(what, prefixes)
    named = {str(place[-1]): entry for place, entry in model}
    return named, {(str(place[-2]), str(place[-1])): entry for place, entry in state}


def _options_of(directories: Iterable[Directory]) -> dict[str, StoredValue]:
    """The values of parameter groups by key."""
    entries = [
        StoredValue(directory, key)
        for directory in directories
        for key in directory.places
        if key in directory.others or key in directory.tensors
    ]
    return {entry.key: entry for entry in entries if entry.is_option}


def _groups_of(options: Mapping[str, StoredValue]) -> tuple[list[Group], set[str]]:
    """The parameter groups, in order, and the keys of the values in them. A group without the names
    of its parameters is left out."""
    by_group: dict[Place, dict[str, str]] = {}
    for key, option in options.items():
        by_group.setdefault(option.place[:-1], {})[str(option.place[-1])] = key
    groups: list[Group] = []
    read: set[str] = set()
    for _, keys in sorted(by_group.items(), key=lambda item: item[0][-1]):
        values = {name: options[key].option() for name, key in keys.items()}
        params = values.get("params")
        if isinstance(params, list) and all(isinstance(name, str) for name in params):
            groups.append(Group(params, options_in(values)))
            read |= {keys[name] for name in (*groups[-1].options, *NOT_OPTIONS) if name in keys}
    return groups, read
