"""Whether all ranks see the same directories."""

import errno
import json
import time
from pathlib import Path

from modicum import _modicum
from modicum._modicum import exit_codes
from modicum.errors import Error, from_json, refusal
from modicum.torch.ranks.group import Ranks

SEEN_S = 10.0
"""How much later a node may see a new directory of a network file system, due to its cache."""
_POLL_S = 0.05


def require_seen(directory: Path, ranks: Ranks) -> None:
    """Raises `IoError` unless this rank sees the directory of rank 0 within SEEN_S. The name is new
    or has a UUID, so that no other directory is mistaken for it."""
    deadline = time.monotonic() + SEEN_S
    while not directory.is_dir():
        ranks.check()
        if time.monotonic() > deadline:
            raise _not_shared(directory, ranks.rank)
        time.sleep(_POLL_S)


def is_gone(path: Path) -> bool:
    """Whether another process has removed a file or directory, perhaps on another node."""
    try:
        path.stat()
    except OSError as error:
        return error.errno in (errno.ENOENT, errno.ENOTDIR, errno.ESTALE)
    return False


def seen_by_all(directory: Path, ranks: Ranks) -> bool:
    """Whether the directory exists. Collective. Raises `IoError` if some of the ranks see it and
    others do not, not even within SEEN_S."""
    is_seen = any(ranks.gather(directory.is_dir()))
    if is_seen:
        require_seen(directory, ranks)
    return is_seen


def require_same(path: Path, uuid: str, ranks: Ranks) -> None:
    """Raises `UsageError` unless this rank sees the checkpoint that rank 0 sees, with this uuid.
    Raises the error of a checkpoint that this rank can't open."""
    seen = _modicum.open_run_checkpoint(str(path))["uuid"]
    if seen != uuid:
        what = f"rank {ranks.rank} sees another checkpoint than rank 0"
        raise refusal("UNSUPPORTED", what, expected=uuid, got=seen)


def _not_shared(directory: Path, rank: int) -> Error:
    what = f"IO: the run is not shared: rank {rank} does not see the directory of rank 0 after "
    what += f"{SEEN_S:.0f} s (file {directory})"
    failure = {"category": "IO", "code": exit_codes()["IO"], "message": what}
    return from_json(json.dumps({"error": failure | {"file": directory.name}}))
