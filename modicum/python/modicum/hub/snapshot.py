"""A directory of headers: sparse files with the true headers and sizes of a model's data files."""

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from io import BytesIO
from pathlib import Path
from typing import NamedTuple
from urllib.parse import quote

from modicum import _modicum
from modicum.errors import Error, failure
from modicum.hub.client import Answer, Client, Hub, Part
from modicum.hub.failures import changed, not_written
from modicum.hub.parallel import in_parallel

HEADERS_FILE = ".headers-only"
"""Has ORG/NAME@REVISION. Only `plan` and `inspect` open a directory with this file."""
_CONNECTIONS = 16
_MOST_FILES = 10_000
_LONGEST_LIST = 64 << 20
_CONFIG, _LONGEST_CONFIG = "config.json", 16 << 20
_DATA, _INDEX, _LONGEST_INDEX = ".safetensors", ".safetensors.index.json", 100_000_000
_USUAL_FILE = "model.safetensors"
_PREFIX_BYTES, _LONGEST_HEADER = 8, 100_000_000
# Of the first request for a header, by the names of the index: a tensor's dtype, shape and offsets
# take about 80 bytes. Without an index the number of tensors is unknown.
_BYTES_PER_TENSOR, _BYTES_PER_FILE, _BYTES_WITHOUT_INDEX = 96, 512, 1 << 17


class Snapshot(NamedTuple):
    directory: Path
    revision: str
    files: int
    """Data files of which the header is there."""
    received_bytes: int


def fetch(hub: Hub, name: str, folder: Path) -> Snapshot:
    """Makes the directory of headers of the model `name`, which is ORG/NAME, in `folder`, at the
    newest revision of its branch main. Raises `IoError` if the hub or the network fails, or the
    directory can't be written.

    The hub's texts and headers are not examined: the program refuses those that are malformed, as
    it does for local files. A file of which no part is read is empty in the directory.
    """
    clients = [Client(hub) for _ in range(_CONNECTIONS)]
    ((revision, files),) = in_parallel([partial(_listing, name)], hub, clients)
    directory = folder / name.rpartition("/")[2]
    _make(directory, f"{name}@{revision}\n", files)
    model = _Model(f"/{name}/resolve/{revision}/", revision, directory)
    indexes = [file for file in files if file.endswith(_INDEX)]
    limits = dict.fromkeys(indexes, _LONGEST_INDEX)
    if _CONFIG in files:
        limits[_CONFIG] = _LONGEST_CONFIG
    in_parallel([partial(model.read_text, *text) for text in limits.items()], hub, clients)
    guesses = _guesses(files, [directory / index for index in indexes])
    in_parallel([partial(model.read_header, *guess) for guess in guesses.items()], hub, clients)
    received_bytes = sum(client.received_bytes for client in clients)
    return Snapshot(directory, revision, len(guesses), received_bytes)


def _listing(name: str, client: Client) -> tuple[str, list[str]]:
    """The revision of the branch main, and the names of its files that are in no folder."""
    text = BytesIO()
    # One byte more than the limit, here and for texts: it shows that there is more.
    client.get(f"/api/models/{name}/revision/main", Part("", 0, _LONGEST_LIST + 1, False), text)
    try:
        document = json.loads(text.getvalue())
        revision = document["sha"]
        names = {entry["rfilename"] for entry in document["siblings"]}
    except (ValueError, LookupError, TypeError, RecursionError):
        revision, names = "", set()
    is_revision = isinstance(revision, str) and revision.isascii() and revision.isalnum()
    if not is_revision or len(revision) > 64 or len(text.getvalue()) > _LONGEST_LIST:
        what, expected = "the hub's list of the model's files is malformed", "sha and siblings"
        raise failure("IO", what, expected=expected)
    files = sorted(file for file in names if _is_plain(file))
    if len(files) > _MOST_FILES:
        expected, got = f"at most {_MOST_FILES} files", f"{len(files)} files"
        raise failure("UNSUPPORTED", "the model has too many files", expected=expected, got=got)
    return revision, files


def _is_plain(file: object) -> bool:
    """Whether a name of the hub's list is a file that the program may read, and no path out of the
    directory. Without COMMIT a saved checkpoint is a plain one."""
    return (
        isinstance(file, str)
        and file.isprintable()
        and not file.startswith(".")
        and not {"/", "\\"} & {*file}
        and file != "COMMIT"
        and 0 < len(file.encode()) < 256
    )


def _make(directory: Path, model: str, files: Iterable[str]) -> None:
    """Makes the directory with empty files."""
    _modicum.make_directory(directory)
    _modicum.write_file(directory / HEADERS_FILE, model.encode())
    for file in files:
        try:
            open(directory / file, "xb").close()
        except OSError as error:
            raise not_written(error, file) from None


# ---- texts and headers


class _Model(NamedTuple):
    path: str
    """Of its files, below the hub's endpoint."""
    revision: str
    directory: Path

    def read_text(self, file: str, most_bytes: int, client: Client) -> None:
        self._get(client, Part(file, 0, most_bytes + 1, False, self.revision))

    def read_header(self, file: str, guess_bytes: int, client: Client) -> None:
        """Reads the header, with a second request if it is longer than the guess. The file then has
        the size of the hub's file, and no other bytes."""
        part = Part(file, 0, guess_bytes, True, self.revision)
        answer = self._get(client, part)
        path, size_bytes = self.directory / file, answer.total or 0
        try:
            with open(path, "rb") as start:
                prefix = start.read(_PREFIX_BYTES)
        except OSError as error:
            raise not_written(error, file) from None
        header_bytes = int.from_bytes(prefix, "little")
        end = min(_PREFIX_BYTES + header_bytes, size_bytes)
        if header_bytes > _LONGEST_HEADER:  # the program refuses it by these bytes
            end = answer.end
        elif end > answer.end:
            rest = part._replace(begin=answer.end, end=end, etag=answer.etag)
            second = self._get(client, rest)
            if second.total != size_bytes:
                raise changed(file, f"{size_bytes} bytes", f"{second.total} bytes")
        try:
            with open(path, "r+b") as sparse:
                sparse.truncate(end)
                sparse.truncate(size_bytes)
        except (OSError, OverflowError) as error:
            raise not_written(error, file) from None

    def _get(self, client: Client, part: Part) -> Answer:
        try:
            with open(self.directory / part.file, "r+b", buffering=0) as file:
                return client.get(self.path + quote(part.file, safe=""), part, file)
        except Error:  # of the request
            raise
        except OSError as error:
            raise not_written(error, part.file) from None


def _guesses(files: Iterable[str], indexes: Sequence[Path]) -> dict[str, int]:
    """The data files that the program opens, with a guess of their headers' length. Without an
    index this is one file; of several the program says that they are ambiguous."""
    present = {file for file in files if file.endswith(_DATA)}
    named: Counter[str] = Counter()
    for index in indexes:
        for tensor, file in _weight_map(index).items():
            if isinstance(file, str) and file in present:
                named[file] += len(tensor) + _BYTES_PER_TENSOR
    if indexes:
        return {file: min(named[file] + _BYTES_PER_FILE, _LONGEST_HEADER) for file in named}
    if len(present) > 1:
        present &= {_USUAL_FILE}
    return dict.fromkeys(present, _BYTES_WITHOUT_INDEX)


def _weight_map(index: Path) -> Mapping[str, object]:
    """Empty for a malformed index, which the program refuses."""
    try:
        weight_map = json.loads(index.read_bytes())["weight_map"]
    except (ValueError, LookupError, TypeError, RecursionError):
        return {}
    return weight_map if isinstance(weight_map, dict) else {}
