"""Worlds of real processes: each rank runs a function in a process group of its own."""

import multiprocessing
import os
import signal
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

PATIENCE_S = 120  # of a machine that others use too
PRELOADED = ("torch", "torch.distributed", "modicum.torch.ranks.group")

# There is one such server; who says last what it imports first only makes ranks start faster.
_server = multiprocessing.get_context("forkserver")
_server.set_forkserver_preload(list(PRELOADED))

_running: set["World"] = set()


class Ended(NamedTuple):
    """How a rank ended."""

    value: Any = None
    """What its function returned."""
    error: str = ""
    """Name of the class of what it raised."""
    facts: dict[str, Any] = {}
    """The error's attributes, and its text as `message`."""
    at_s: float = 0.0
    """When, by the machine's monotonic clock."""


class World:
    """`size` processes, started at once. The group's store is in rank 0's process."""

    def __init__(
        self,
        body: Callable[..., Any],
        size: int,
        *arguments: Any,
        hosts: list[str] | None = None,
        file: os.PathLike | None = None,
    ) -> None:
        """
        Args:
            body: is called with a rank's `Told`, and `arguments`.
            hosts: names that the ranks take for their hosts'.
            file: where a file is the group's store.
        """
        method = f"file://{file}" if file else f"tcp://127.0.0.1:{_free_port()}"
        self._pipes = []
        self.processes = []
        _running.add(self)
        for rank in range(size):
            pipe, theirs = _server.Pipe()
            group = {"init_method": method, "rank": rank, "world_size": size}
            host = hosts[rank] if hosts else None
            process = _server.Process(
                target=_be_rank, args=(theirs, body, arguments, group, host), daemon=True
            )
            process.start()
            theirs.close()
            self._pipes.append(pipe)
            self.processes.append(process)

    def pid(self, rank: int) -> int:
        return self.processes[rank].pid

    def await_ready(self, *ranks: int) -> None:
        """Returns once each of `ranks`, or everybody, has called `ready`."""
        for rank in ranks or range(len(self._pipes)):
            assert self._receive(rank) == "ready"

    def signal(self, rank: int, number: int) -> float:
        """Returns when it was sent."""
        os.kill(self.pid(rank), number)
        return time.monotonic()

    def tell(self) -> None:
        """Lets every rank's `is_told` be true."""
        for pipe in self._pipes:
            with suppress(BrokenPipeError):  # it has failed, which end() tells
                pipe.send("go on")

    def end(self, without: tuple[int, ...] = ()) -> dict[int, Ended]:
        """How the ranks ended, but for those that were killed or are stopped."""
        try:
            ranks = [rank for rank in range(len(self._pipes)) if rank not in without]
            return {rank: self._ending(rank) for rank in ranks}
        finally:
            self.kill()

    def kill(self) -> None:
        """Ends every rank that still runs or is stopped, and waits for it."""
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.join()
        _running.discard(self)

    def _ending(self, rank: int) -> Ended:
        while (message := self._receive(rank)) == "ready":
            pass
        return message

    def _receive(self, rank: int) -> Any:
        assert self._pipes[rank].poll(PATIENCE_S), f"rank {rank} says nothing"
        return self._pipes[rank].recv()


@contextmanager
def killing() -> Iterator[None]:
    """Kills, at the end, the worlds that were started meanwhile. A rank that is left behind
    stopped would keep pytest from exiting: multiprocessing waits for its processes."""
    before = set(_running)
    try:
        yield
    finally:
        for world in _running - before:
            world.kill()


class Told(NamedTuple):
    """What a rank's function is told."""

    rank: int
    pipe: Connection

    def ready(self) -> None:
        """Lets the test go on."""
        self.pipe.send("ready")

    def is_told(self) -> bool:
        """True once the test has called `tell`."""
        return self.pipe.poll()


def _be_rank(
    pipe: Connection,
    body: Callable[..., Any],
    arguments: tuple[Any, ...],
    group: dict[str, Any],
    host: str | None,
) -> None:
    import torch
    import torch.distributed as dist

    signal.signal(signal.SIGINT, signal.default_int_handler)
    torch.set_num_threads(1)
    if host is not None:
        socket.gethostname = lambda: host
    dist.init_process_group("gloo", timeout=timedelta(seconds=PATIENCE_S), **group)
    try:
        ended = Ended(value=body(Told(group["rank"], pipe), *arguments))
    except BaseException as error:
        facts = {**vars(error), "message": str(error)}
        ended = Ended(error=type(error).__name__, facts=facts)
    pipe.send(ended._replace(at_s=time.monotonic()))
    os._exit(0)  # at once: who has the store takes it along


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
