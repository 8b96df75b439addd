"""Reads pickles of torch.distributed.checkpoint and torch.save as data: no name in them is
imported, and nothing is called. A name that torch does not write into such files is refused.

A class or function becomes a `Global`. An instance, or the result of a call, becomes a `MadeObject`
with the arguments. A dict becomes a list of pairs (`Pairs`), so that no key is hashed or compared.

A pickle can refer to a value many times, so that a few bytes describe a tree of any size. A value
is refused whose tree is not in proportion to the pickle, or is nested deeply: whoever walks,
compares or prints it needs time and memory in proportion to the pickle.
"""

import codecs
import errno
import io
import os
import pickletools
import stat
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any, NoReturn

from modicum.errors import failure
from modicum.upstream.torch_checkpoint import GETATTR, ORDERED_DICT, PICKLED, STORAGES

DTYPES = frozenset((*STORAGES.values(), "complex64", "complex128", "float8_e4m3fn", "float8_e5m2"))
MOST_BYTES = 1 << 31
_MOST_DEPTH = 64
_MOST_VALUES_PER_BYTE = 4
"""How many values the tree of a pickle's value may have. Those that torch writes have one for each
two to four bytes."""
_LEAST_LIMIT = 1 << 12
_MOST_MEMBERS = 64
"""The most attributes of an instance. Those that torch writes have fewer than ten."""
for _name in ("ascii", "latin-1", "utf-8", "raw-unicode-escape", "cp437"):
    # imports the codecs of pickletools and zipfile now: nothing is imported while they read
    codecs.lookup(_name)


@dataclass(frozen=True, slots=True)
class Global:
    """A class or function."""

    name: str
    """Module and name, separated by a space."""


@dataclass(slots=True)
class MadeObject:
    """An instance, or the result of a call."""

    kind: str
    """The name of the class or function, as in `Global`."""
    args: Any
    """The tuple of the call's arguments. For an enum member: its value or, if Python 3.11.0 to
    3.11.2 has written it, its name."""
    state: Any = None
    """What `__setstate__` would get; None without it."""

    def member(self, name: str) -> Any:
        """The state's value of this name, or None."""
        state = self.state
        is_known = isinstance(state, Pairs) and len(state.items) <= _MOST_MEMBERS
        return state.by_name().get(name) if is_known else None


@dataclass(slots=True)
class Pairs:
    """A dict, ordered or not."""

    items: list[tuple[Any, Any]] = field(default_factory=list)

    def by_name(self) -> dict[str, Any]:
        """The values of str keys."""
        return {key: value for key, value in self.items if isinstance(key, str)}


@dataclass(slots=True)
class StorageReference:
    """A reference to a storage, by its persistent id."""

    id: Any


def malformed(what: str, file: str, category: str = "FORMAT.PICKLE", **facts: str) -> NoReturn:
    """Raises an error of `category` that names `file` and `facts`."""
    raise failure(category, what, file=file, **facts)


def open_regular(path: Path) -> int:
    """A descriptor of a regular file. Raises OSError for any other kind; opening a FIFO would wait
    for its other end."""
    file = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    if stat.S_ISREG(os.fstat(file).st_mode):
        return file
    os.close(file)
    raise OSError(errno.EINVAL, "not a regular file")


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """A context in which an OSError becomes an `IoError` that names `path`."""
    try:
        yield
    except OSError as error:
        malformed("it can't be read", path.name, "IO", got=str(error.strerror or error))


class _PickleRefusal(Exception):
    """A pickle that is refused; the argument is the reason."""


def read_pickle(data: bytes, file: str, names: frozenset[str] = PICKLED) -> Any:
    """The value of the pickle `data`. Raises `FormatError`, naming `file`, if `data` is no pickle,
    has names other than `names`, torch's dtypes and storages, and getattr of an enum, or refers to
    its values so often that their tree is not in proportion to it."""
    if len(data) > MOST_BYTES:
        malformed("the file is larger than any that torch writes", file, got=f"{len(data)} bytes")
    try:
        value = _Stack(names).value_of(data)
        _require_small(value, _MOST_VALUES_PER_BYTE * len(data) + _LEAST_LIMIT)
        return value
    except _PickleRefusal as refused:
        reason = str(refused)
    except (ValueError, IndexError, KeyError, TypeError, UnicodeError, OverflowError) as error:
        reason = f"the pickle is damaged: {error}"
    malformed(reason.splitlines()[0][:200], file)


_CONTAINERS = (list, tuple, Pairs, MadeObject, StorageReference)


_MARK = object()
_NUMBERS = ("BININT", "BININT1", "BININT2", "LONG1", "BINFLOAT")
_TEXTS = ("BINUNICODE", "SHORT_BINUNICODE")
_CONSTANTS = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False}


def _global_of(stream: io.BytesIO) -> str:
    """The two lines after GLOBAL. pickletools would decode escapes in them."""
    return " ".join(stream.readline().removesuffix(b"\n").decode("ascii") for _ in range(2))


_READERS: dict[str, Callable[[io.BytesIO], Any]] = {
    opcode.name: opcode.arg.reader for opcode in pickletools.opcodes if opcode.arg
} | {"GLOBAL": _global_of}
"""The functions that read the arguments of opcodes."""
_OPCODES = {opcode.code.encode("latin-1"): opcode.name for opcode in pickletools.opcodes}


def _parts(value: Any) -> Iterable[Any]:
    """The values of which `value` consists; none if it is no container."""
    if isinstance(value, (list, tuple)):
        return value
    if isinstance(value, Pairs):
        return chain.from_iterable(value.items)
    if isinstance(value, MadeObject):
        return (value.args, value.state)
    return (value.id,) if isinstance(value, StorageReference) else ()


def _require_small(value: Any, most: int) -> None:
    """Raises `_PickleRefusal` if `value` contains itself, is nested deeply, or its tree has more
    than `most` values. A string counts as one value for each 16 characters."""
    sizes: dict[int, int] = {}  # by id; 0: not complete
    path = [(value, iter(_parts(value)), 1)]
    while path:
        container, parts, size = path.pop()
        for part in parts:
            if not isinstance(part, _CONTAINERS):
                size += 1 + (len(part) >> 4 if isinstance(part, str) else 0)
            elif (known := sizes.get(id(part))) is None:
                sizes[id(part)] = 0
                path += (container, parts, size), (part, iter(_parts(part)), 1)
                break
            elif known == 0:
                raise _PickleRefusal("the pickle is damaged: a value contains itself")
            else:
                size += known
        else:
            sizes[id(container)] = size
            if path:
                outer, rest, before = path.pop()
                path.append((outer, rest, before + size))
        if size > most:
            raise _PickleRefusal("the pickle refers to its values too often")
        if len(path) > _MOST_DEPTH:
            raise _PickleRefusal("the pickle is nested too deeply")


class _Stack:
    """The stack machine that a pickle is a program of."""

    def __init__(self, names: frozenset[str]) -> None:
        self._names = names
        self._values: list[Any] = []
        self._memo: dict[int, Any] = {}
        self._by_name: dict[str, Callable[[Any], None]] = {
            "MARK": lambda _: self._push(_MARK),
            "EMPTY_DICT": lambda _: self._push(Pairs()),
            "EMPTY_LIST": lambda _: self._push([]),
            "EMPTY_TUPLE": lambda _: self._push(()),
            "TUPLE": lambda _: self._push(tuple(self._since_mark())),
            "TUPLE1": lambda _: self._push(tuple(self._taken(1))),
            "TUPLE2": lambda _: self._push(tuple(self._taken(2))),
            "TUPLE3": lambda _: self._push(tuple(self._taken(3))),
            "MEMOIZE": lambda _: self._remember(len(self._memo)),
            "BINPUT": self._remember,
            "LONG_BINPUT": self._remember,
            "BINGET": lambda at: self._push(self._memo[at]),
            "LONG_BINGET": lambda at: self._push(self._memo[at]),
            "GLOBAL": self._name,
            "STACK_GLOBAL": lambda _: self._name(" ".join(map(_text, self._taken(2)))),
            "NEWOBJ": lambda _: self._make(),
            "REDUCE": lambda _: self._make(),
            "BINPERSID": lambda _: self._push(StorageReference(self._pop())),
            "BUILD": lambda _: self._build(),
            "APPEND": lambda _: self._extend(self._taken(1)),
            "APPENDS": lambda _: self._extend(self._since_mark()),
            "SETITEM": lambda _: self._set(self._taken(2)),
            "SETITEMS": lambda _: self._set(self._since_mark()),
            "PROTO": lambda _: None,
            "FRAME": lambda _: None,
            **dict.fromkeys(_NUMBERS, self._push),
            **dict.fromkeys(_TEXTS, self._push_text),
        }

    def value_of(self, data: bytes) -> Any:
        stream = io.BytesIO(data)
        while code := stream.read(1):
            if code not in _OPCODES:
                raise _PickleRefusal(
                    f"the pickle is damaged: it has the byte {code[0]} for an opcode"
                )
            name = _OPCODES[code]
            if name == "STOP":
                value = self._pop()
                if self._values:
                    raise _PickleRefusal("the pickle is damaged: it has more than one value")
                return value
            if name in _CONSTANTS:
                self._push(_CONSTANTS[name])
            elif name in self._by_name:
                self._by_name[name](_READERS[name](stream) if name in _READERS else None)
            else:  # its argument is not decoded
                raise _PickleRefusal(f"torch writes no {name} into such a file")
        raise _PickleRefusal("the pickle is damaged: it has no end")

    def _push(self, value: Any) -> None:
        self._values.append(value)

    def _push_text(self, value: str) -> None:
        value.encode()  # raises UnicodeError for half of a surrogate pair
        self._push(value)

    def _pop(self) -> Any:
        value = self._values.pop()
        if value is _MARK:
            raise _PickleRefusal("the pickle is damaged: a mark instead of a value")
        return value

    def _taken(self, count: int) -> list[Any]:
        return [self._pop() for _ in range(count)][::-1]

    def _since_mark(self) -> list[Any]:
        values: list[Any] = []
        while (value := self._values.pop()) is not _MARK:
            values.append(value)
        return values[::-1]

    def _remember(self, at: int) -> None:
        value = self._values[-1]
        if value is _MARK:
            raise _PickleRefusal("the pickle is damaged: a mark instead of a value")
        self._memo[at] = value

    def _name(self, name: str) -> None:
        module, _, last = name.partition(" ")
        is_torch = module == "torch" and (last in DTYPES or last in STORAGES)
        if name not in self._names and name not in GETATTR and not is_torch:
            named = name.replace(" ", ".")
            raise _PickleRefusal(f"the pickle names {named!r}, no known name; nothing was executed")
        self._push(Global(name))

    def _make(self) -> None:
        kind, args = self._taken(2)
        if not isinstance(kind, Global) or not isinstance(args, tuple):
            raise _PickleRefusal("the pickle is damaged: a call of something other than a name")
        if kind.name in GETATTR:
            self._push(_member(args))
        else:
            is_dict = kind.name == ORDERED_DICT and not args
            self._push(Pairs() if is_dict else MadeObject(kind.name, args))

    def _build(self) -> None:
        state, target = self._pop(), self._values[-1]
        if isinstance(target, Pairs):
            return  # attributes of an ordered dict, such as a state dict's versions
        if not isinstance(target, MadeObject):
            raise _PickleRefusal(
                "the pickle is damaged: a state of something other than an instance"
            )
        target.state = state

    def _extend(self, values: list[Any]) -> None:
        target = self._values[-1]
        if not isinstance(target, list):
            raise _PickleRefusal("the pickle is damaged: an item of something other than a list")
        target.extend(values)

    def _set(self, values: list[Any]) -> None:
        target = self._values[-1]
        if not isinstance(target, Pairs) or len(values) % 2:
            raise _PickleRefusal("the pickle is damaged: an item of something other than a dict")
        target.items.extend(zip(values[::2], values[1::2], strict=True))


def _member(args: tuple[Any, ...]) -> MadeObject:
    """The enum member that `getattr(*args)` would return."""
    kind, name = args if len(args) == 2 else (None, None)
    if not isinstance(kind, Global) or not isinstance(name, str):
        raise _PickleRefusal("the pickle calls getattr on something other than a class")
    return MadeObject(kind.name, (name,))


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise _PickleRefusal("the pickle is damaged: a name that is no string")
    return value
