"""Who is alive: every rank beats, and a few others look at it.

Nobody looks at everybody: a rank looks at the next one of its host, in a ring, and the first of a
host looks at the whole next host. That is one or two looks a second and rank, however many there
are, and one who is found to be gone ends the load for all.

Silence alone proves little. A process can't beat while the kernel commits its memory (tens of
seconds are real), or while some extension holds the interpreter's lock. So on the same host the
kernel is asked; between hosts all ranks of the other one must be silent.
"""

import os
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

LOOK_S = 1.0
"""Seconds between two beats, and between two looks."""
SILENT_LOOKS = 5
"""As many looks in a row at a beat that stands still are silence. They are counted, not seconds:
whoever was stopped himself, or waited for the store, has not looked."""


@dataclass(frozen=True)
class Process:
    """A rank's process, as others find it."""

    boot: str
    host: str
    pid_space: int
    """The pid namespace, outside of which a pid says nothing; 0: not known."""
    pid: int
    started: str
    """By the kernel's clock: a pid may be given to somebody else."""

    @classmethod
    def this(cls) -> "Process":
        pid = os.getpid()
        _, started = _state_of(pid) or ("", "")
        try:
            boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
            pid_space = os.stat("/proc/self/ns/pid").st_ino
        except OSError:  # some sandboxes have neither: the host's name has to do
            boot, pid_space = "", 0
        return cls(boot, socket.gethostname(), pid_space, pid, started)

    @property
    def node(self) -> tuple[str, str]:
        return self.boot, self.host

    def sees(self, other: "Process") -> bool:
        """True where `/proc` tells this process about the other one."""
        same = (self.boot, self.pid_space) == (other.boot, other.pid_space)
        return same and self.pid_space != 0 and other.condition() == ""

    def condition(self) -> str:
        """ "is gone", "is stopped", or nothing where it runs; of one on the same host."""
        state, started = _state_of(self.pid) or ("X", "")
        if state in "ZX" or started != self.started:
            return "is gone"
        return "is stopped" if state == "T" else ""


def _state_of(pid: int) -> tuple[str, str] | None:
    """State and start time of a process; None where there is none."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()
    except OSError:
        return None
    return fields[0], fields[19]


def ranks_per_node(processes: Sequence[Process]) -> int | None:
    """How many ranks every node has; None where nodes differ in size or have ranks that don't
    follow each other."""
    nodes = list(dict.fromkeys(process.node for process in processes))
    per_node, left = divmod(len(processes), len(nodes))
    even = left == 0 and all(
        process.node == nodes[r // per_node] for r, process in enumerate(processes)
    )
    return per_node if even else None


@dataclass
class _Watched:
    """Ranks of which one sign of life is enough."""

    ranks: list[int]
    seen: bool
    """`/proc` tells."""
    beats: list[int] = field(default_factory=list)
    still: int = 0
    """Looks at which no beat had moved."""

    def is_silent(self, beat_of: Callable[[int], int]) -> bool:
        beats = [beat_of(rank) for rank in self.ranks]
        self.still = self.still + 1 if beats == self.beats else 0
        self.beats = beats
        return self.still >= SILENT_LOOKS


class Neighbours:
    """Those whom one rank looks at."""

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
            self._watched.append(_Watched([following], sees))
        if rank == here[0] and len(nodes) > 1:
            order = list(nodes.values())
            self._watched.append(_Watched(order[(order.index(here) + 1) % len(order)], False))

    def look(self, beat_of: Callable[[int], int]) -> tuple[int, str] | None:
        """A rank that is lost, and how; `beat_of` reads a rank's count of beats. Every LOOK_S."""
        for watched in self._watched:
            silent = watched.is_silent(beat_of)
            condition = self._processes[watched.ranks[0]].condition() if watched.seen else ""
            if condition == "is gone" or (silent and condition):
                return watched.ranks[0], condition
            if silent and not watched.seen:
                return watched.ranks[0], f"has given no sign of life for {SILENT_LOOKS} s"
        return None
