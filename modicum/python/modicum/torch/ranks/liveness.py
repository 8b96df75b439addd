"""Liveness: every rank increments a heartbeat, which other ranks check.

Each rank checks the next rank of its host, in a ring, and the first rank of a host checks all ranks
of the next host:

    host A: 0 -> 1 -> 2 -> 0        host B: 3 -> 4 -> 5 -> 3
            0 -> {3, 4, 5}                  3 -> {0, 1, 2}

So a rank is checked by at most two others. If a rank is found dead the load ends on all ranks.

A missing heartbeat alone does not prove that a process is dead: it makes none while the kernel
commits its memory, which may take tens of seconds, or while an extension holds the GIL. Therefore
/proc decides about a rank of the same host and pid namespace, and a rank of another host counts as
dead only if all ranks of that host are silent. About a rank of the same host in another pid
namespace its silence alone decides.
"""

import os
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

LOOK_S = 1.0
"""Seconds between two heartbeats, and between two checks."""
SILENT_LOOKS = 5
"""A rank is silent after this number of consecutive checks with the same heartbeat. Checks are
counted, not seconds: while the checking rank is stopped or waits for the store, it makes none."""


@dataclass(frozen=True)
class Process:
    """A rank's process, as other ranks identify it."""

    boot: str
    """The id of the host's boot; empty: unknown."""
    host: str
    pid_space: int
    """The pid namespace of `pid`; 0: unknown."""
    pid: int
    started: str
    """Start time by the kernel's clock; it differs for a later process with the same pid."""

    @classmethod
    def this(cls) -> "Process":
        pid = os.getpid()
        _, started = _state_of(pid) or ("", "")
        try:
            boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
            pid_space = os.stat("/proc/self/ns/pid").st_ino
        except OSError:  # as in some sandboxes: only the host name identifies the node
            boot, pid_space = "", 0
        return cls(boot, socket.gethostname(), pid_space, pid, started)

    @property
    def node(self) -> tuple[str, str]:
        return self.boot, self.host

    def sees(self, other: "Process") -> bool:
        """Whether the other process is in this process's `/proc`, and runs."""
        same = (self.boot, self.pid_space) == (other.boot, other.pid_space)
        return same and self.pid_space != 0 and other.condition() == ""

    def condition(self) -> str:
        """The state of a process on the same host: "is gone", "is stopped", or "" if it runs."""
        state, started = _state_of(self.pid) or ("X", "")
        if state in "ZX" or started != self.started:  # a zombie, dead, or another process
            return "is gone"
        return "is stopped" if state == "T" else ""


def _state_of(pid: int) -> tuple[str, str] | None:
    """State and start time of a process; None if it does not exist."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(") ")[2].split()
    except OSError:
        return None
    return fields[0], fields[19]


def ranks_per_node(processes: Sequence[Process]) -> int | None:
    """The number of ranks on every node; None if nodes have different numbers of ranks, or ranks
    that are not consecutive."""
    nodes = list(dict.fromkeys(process.node for process in processes))
    per_node, left = divmod(len(processes), len(nodes))
    even = left == 0 and all(
        process.node == nodes[r // per_node] for r, process in enumerate(processes)
    )
    return per_node if even else None


@dataclass
class _RankGroup:
    """Ranks that are checked together: they count as alive if any of them is."""

    ranks: list[int]
    seen: bool
    """Whether they are in this process's `/proc`."""
    beats: list[int] = field(default_factory=list)
    still: int = 0
    """The number of consecutive checks in which no heartbeat has changed."""

    def read(self, beat_of: Callable[[int], int]) -> bool:
        """Reads the heartbeats once more. Returns whether all of the ranks are silent."""
        beats = [beat_of(rank) for rank in self.ranks]
        self.still = self.still + 1 if beats == self.beats else 0
        self.beats = beats
        return self.still >= SILENT_LOOKS


class Neighbours:
    """The ranks that one rank checks."""

    def __init__(self, processes: Sequence[Process], rank: int) -> None:
        self._processes = processes
        nodes: dict[tuple[str, str], list[int]] = {}
        for other, process in enumerate(processes):
            nodes.setdefault(process.node, []).append(other)
        here = nodes[processes[rank].node]
        following = here[(here.index(rank) + 1) % len(here)]
        self._watched = []
        if following != rank:
            sees = processes[rank].sees(processes[following])
            self._watched.append(_RankGroup([following], sees))
        if rank == here[0] and len(nodes) > 1:
            order = list(nodes.values())
            self._watched.append(_RankGroup(order[(order.index(here) + 1) % len(order)], False))

    def check(self, beat_of: Callable[[int], int]) -> tuple[int, str] | None:
        """A rank that counts as dead, and the reason ("is gone", ...); or None. Call it every
        LOOK_S. `beat_of`: returns a rank's heartbeat."""
        for watched in self._watched:
            silent = watched.read(beat_of)
            condition = self._processes[watched.ranks[0]].condition() if watched.seen else ""
            if condition == "is gone" or (silent and condition):
                return watched.ranks[0], condition
            if silent and not watched.seen:
                return watched.ranks[0], f"has given no sign of life for {SILENT_LOOKS} s"
        return None
