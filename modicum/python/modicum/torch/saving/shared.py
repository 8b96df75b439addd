"""Whether all ranks see the same directories."""

import json
import time
from pathlib import Path

from modicum._modicum import exit_codes
from modicum.errors import Error, from_json
from modicum.torch.ranks.group import Ranks

SEEN_S = 10.0
"""A network file system may tell of a new directory so much later: nodes cache what they know."""
_POLL_S = 0.05


def require_seen(directory: Path, ranks: Ranks) -> None:
    """`IoError` unless this rank sees the directory of rank 0 within SEEN_S. Its name is new or has
    a UUID, so another one is not mistaken for it."""
    deadline = time.monotonic() + SEEN_S
    while not directory.is_dir():
        ranks.check()
        if time.monotonic() > deadline:
            raise _not_shared(directory, ranks.rank)
        time.sleep(_POLL_S)


def _not_shared(directory: Path, rank: int) -> Error:
    what = f"IO: the root is not shared: rank {rank} does not see the directory of rank 0 after "
    what += f"{SEEN_S:.0f} s (file {directory})"
    told = {"category": "IO", "code": exit_codes()["IO"], "message": what}
    return from_json(json.dumps({"error": told | {"file": directory.name}}))
