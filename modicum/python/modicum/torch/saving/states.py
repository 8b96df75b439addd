"""The states of a save in the background, on one rank, and the events that change them.

    opening -> writing -> written -> voted -> committing (rank 0) -> committed
                                     voted -> unknown -> committed, or failed

A rank that has voted can't tell alone whether rank 0 commits the checkpoint. If it loses rank 0, or
has to end, its save is unknown until it has searched the root. While a save is opening or writing,
its thread reads the program's memory; in every other state it does not.
"""

import threading
from collections.abc import Callable
from enum import Enum


class State(Enum):
    """What this rank's save has reached."""

    OPENING = "opening"
    WRITING = "writing"
    WRITTEN = "written"
    VOTED = "voted"
    COMMITTING = "committing"
    """Rank 0 alone: it has the votes of all ranks."""
    COMMITTED = "committed"
    FAILED = "failed"
    UNKNOWN = "unknown"


class Event(Enum):
    """What happens to this rank's save."""

    OPENED = "opened"
    """The save's thread can be cancelled from now on."""
    PART_WRITTEN = "part-written"
    VOTE = "vote"
    """A vote point, at which no watched tensor has changed."""
    VETO = "veto"
    """A vote point, at which a watched tensor has changed or the process group is gone."""
    ALL_VOTED = "all-voted"
    PUBLISHED = "published"
    """On rank 0 the checkpoint is visible; another rank has rank 0's report."""
    OWN_ERROR = "own-error"
    PEER_ERROR = "peer-error"
    """Another rank has failed or is dead, or the store is lost."""
    PREEMPTED = "preempted"
    """After SIGTERM: the rest does not fit into the grace, the grace is over, or a second one."""
    SEEN = "seen"
    """The root has the checkpoint with this save's uuid."""
    ABSENT = "absent"


READS = (State.OPENING, State.WRITING)
"""The states in which the save's thread reads the program's memory."""

TABLE = """
event         opening  writing  written  voted       committing  committed  failed  unknown
opened        writing  -        -        -           -           -          -       -
part-written  -        written  -        -           -           -          -       -
vote          =        =        voted    =           =           =          =       =
veto          =        =        failed   -           -           -          =       -
all-voted     -        -        -        committing  -           -          -       -
published     -        -        -        committed   committed   -          -       -
own-error     failed   failed   failed   unknown     failed      =          =       -
peer-error    failed   failed   failed   unknown     =           =          =       -
preempted     failed   failed   failed   unknown     =           =          =       -
seen          -        -        -        -           -           -          -       committed
absent        -        -        -        -           -           -          -       failed
"""
"""The next state, by event and state. `=`: the state stays. `-`: can't happen."""


def _transitions() -> dict[tuple[State, Event], State]:
    (_, *names), *rows = [line.split() for line in TABLE.strip().splitlines()]
    return {
        (State(name), Event(event)): State(name if cell == "=" else cell)
        for event, *row in rows
        for name, cell in zip(names, row, strict=True)
        if cell != "-"
    }


_NEXT = _transitions()


def next_state(state: State, event: Event) -> State:
    """The state after `event`. Raises `ValueError` if the event can't happen in `state`."""
    if (state, event) not in _NEXT:
        raise ValueError(f"a save that is {state.value} gets the event '{event.value}'")
    return _NEXT[state, event]


class Course:
    """The state of one rank's save, which the program's thread and the save's thread change."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self.state = State.OPENING
        self.is_over = False
        """Whether the save's thread has released everything that the save used."""

    def apply(self, event: Event) -> State:
        """Changes the state, and returns the new one."""
        with self._changed:
            self.state = next_state(self.state, event)
            self._changed.notify_all()
            return self.state

    def end(self) -> None:
        with self._changed:
            self.is_over = True
            self._changed.notify_all()

    def await_leaving(self, *states: State, limit_s: float | None = None) -> bool:
        """Waits until the state is none of `states`. Returns False after `limit_s` seconds."""
        return self._await(lambda: self.state not in states, limit_s)

    def await_end(self, limit_s: float | None = None) -> bool:
        return self._await(lambda: self.is_over, limit_s)

    def _await(self, is_so: Callable[[], bool], limit_s: float | None) -> bool:
        with self._changed:
            return self._changed.wait_for(is_so, limit_s)
