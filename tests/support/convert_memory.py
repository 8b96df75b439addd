"""Imports a directory in this process, which has done nothing else, and prints what the import
promised and held.

convert_memory.py DIRECTORY ROOT [STATE_FORMAT]

JSON on stdout: `promised` and `held` in bytes; `rounding`, by how much the promise has rounded up
the memory of the process; `refused`, whether 1 MiB less is refused before anything is written.
"""

import json
import sys
from pathlib import Path
from typing import Any

from modicum.errors import BudgetError
from modicum.imports import import_checkpoint, streams

MIB = 1 << 20


def main(directory: str, root: Path, *words: str) -> None:
    memories: list[list[Any]] = []
    measure = streams.memory_before

    def noted() -> list[Any]:
        memories.append(measure())
        return memories[-1]

    streams.memory_before = noted
    how = {"state_format": words[0]} if words else {}
    report = import_checkpoint(directory, root, step=1, **how)
    rounding, budget = -memories[-1][0] % MIB, report.promised_bytes - MIB
    # The process may hold less memory now than before the import, and so may be promised less.
    again = iter(memories)
    streams.memory_before = lambda: next(again)
    other = root.with_name(f"{root.name}-refused")
    try:
        import_checkpoint(directory, other, step=1, budget=budget, **how)
        refused = False
    except BudgetError:
        refused = not other.exists()
    told = {"promised": report.promised_bytes, "held": report.held_bytes}
    print(json.dumps(told | {"rounding": rounding, "refused": refused}))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), *sys.argv[3:])
