"""Requests in parallel, on threads that never delay the end of the process."""

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from queue import Empty, SimpleQueue
from typing import TypeVar

from modicum.errors import failure
from modicum.hub.client import Client, Hub, Stop

T = TypeVar("T")
Task = Callable[[Client], T]


def in_parallel(tasks: Sequence[Task[T]], hub: Hub, clients: Sequence[Client]) -> list[T]:
    """The results of the tasks, each called with one of the clients. The first failure of a task is
    raised at once; it stops the others. So does the end of the hub's time, as `IoError`."""
    numbers = iter(range(len(tasks)))
    lock = threading.Lock()
    done: SimpleQueue[tuple[int, T | None, BaseException | None]] = SimpleQueue()

    def work(client: Client) -> None:
        for number in _taken(numbers, lock):
            try:
                done.put((number, tasks[number](client), None))
            except BaseException as error:
                done.put((number, None, error))
                return

    results: dict[int, T] = {}
    try:
        for client in clients[: len(tasks)]:
            # A daemon: a thread in a system call does not delay the answer to SIGTERM or Ctrl-C.
            threading.Thread(target=work, args=(client,), daemon=True).start()
        while len(results) < len(tasks):
            number, result, error = done.get(timeout=max(0, hub.deadline - time.monotonic()))
            if error is not None and not isinstance(error, Stop):
                raise error
            results[number] = result  # type: ignore[assignment]
    except Empty:
        got = f"no end after {hub.patience.longest_s:g} s"
        expected = "a faster network, or a checkpoint on this machine"
        what = f"the headers from {hub.origin} take too long"
        raise failure("IO", what, expected=expected, got=got) from None
    finally:
        if len(results) < len(tasks):
            hub.stop.set()
    return [results[number] for number in range(len(tasks))]


def _taken(numbers: Iterator[int], lock: threading.Lock) -> Iterator[int]:
    while True:
        with lock:
            number = next(numbers, None)
        if number is None:
            return
        yield number
