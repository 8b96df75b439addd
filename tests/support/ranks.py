"""Real ranks: processes that form a process group over gloo.

`ranks` starts ranks that run acts of `torch_rank.py` by name until they are closed. `World` starts
ranks that each run one function of a test and end. Ranks are forked, within a second, from a server
that has imported torch and transformers; *fresh* ones are new interpreters, as torchrun starts
them, and share no memory with another process.
"""

import contextlib
import importlib.util
import multiprocessing
import os
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, NamedTuple

SUPPORT = Path(__file__).resolve().parent
EXAMPLES = SUPPORT.parents[1] / "examples"
PATIENCE_S = 240.0  # on a machine that runs other things too
LEFT_ALONE_S = 45.0
"""How long ranks may go on after another rank has failed; longer is a hang."""

GONE = "the process has ended"
"""The answer of a rank that has ended."""

# Each process has one fork server with one list of modules to preload: the last list set counts.
_forked = multiprocessing.get_context("forkserver")
_forked.set_forkserver_preload(["torch_rank"])
_fresh = multiprocessing.get_context("spawn")


def start(context: Any, target: Callable[..., None], *arguments: Any) -> tuple[Any, Connection]:
    """Starts `target(pipe, *arguments)` in a new process; returns the process and our end."""
    ours, theirs = context.Pipe()
    process = context.Process(target=target, args=(theirs, *arguments), daemon=True)
    with importable():
        process.start()
    theirs.close()
    return process, ours


@contextlib.contextmanager
def importable() -> Iterator[None]:
    """Within the context, new processes can import the modules of this folder."""
    before = dict(os.environ)
    path = [str(SUPPORT), *filter(None, [before.get("PYTHONPATH")])]
    os.environ |= {"PYTHONPATH": os.pathsep.join(path)}
    os.environ |= {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def torchrun(root: Path, processes: int, *words: object) -> subprocess.CompletedProcess[str]:
    """Runs torchrun as users do, in the repository."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", str(processes), *map(str, words)]
    with importable():
        return subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=root)


def example(name: str) -> Any:
    """A new module of `examples/NAME.py`, executed as if imported."""
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


# ---- ranks that run acts by name


@dataclass(frozen=True)
class Failed:
    """An exception that an act has raised."""

    error: str
    """Name of the class."""
    message: str
    facts: dict[str, Any]
    """The attributes: category, culprit_rank, ..."""
    after_s: float
    """Seconds since the act began."""
    at_s: float
    """On the machine's monotonic clock."""


@dataclass
class Ranks:
    """The ranks of one process group. `close` ends those that still run."""

    folder: Path
    processes: list[Any] = field(default_factory=list)
    lines: list[Connection] = field(default_factory=list)

    @property
    def pids(self) -> list[int]:
        return [process.pid for process in self.processes]

    def tell(self, act: str, each: Mapping[int, dict[str, Any]] | None = None, **said: Any) -> None:
        """Starts an act on every rank; does not wait.

        Args:
            act: its name in `torch_rank.ACTS`.
            each: arguments of single ranks, by rank.
            said: arguments of all ranks.
        """
        for rank, line in enumerate(self.lines):
            line.send((act, said | (each or {}).get(rank, {})))

    def hear(self, within_s: float = PATIENCE_S) -> list[Any]:
        """The ranks' answers, by rank: a value, `Failed` or `GONE`."""
        heard: list[Any] = [GONE] * len(self.lines)
        waiting = dict(enumerate(self.lines))
        deadline = time.monotonic() + within_s
        while waiting:
            if not wait(list(waiting.values()), max(deadline - time.monotonic(), 0)):
                self.close()
                silent = f"no answer from ranks {sorted(waiting)}"
                raise AssertionError(f"{silent}; the others: {heard}\n{self.logs()}")
            for rank, line in list(waiting.items()):
                if line.poll():
                    del waiting[rank]
                    with contextlib.suppress(EOFError, ConnectionResetError):
                        heard[rank] = line.recv()
                    if heard[rank] is GONE or isinstance(heard[rank], Failed):
                        deadline = min(deadline, time.monotonic() + LEFT_ALONE_S)
        return heard

    def ask(self, act: str, each: Mapping[int, dict[str, Any]] | None = None, **said: Any) -> Any:
        """Starts an act that must not fail. Returns the answers, by rank."""
        self.tell(act, each, **said)
        heard = self.hear()
        bad = [f"rank {r}: {h}" for r, h in enumerate(heard) if h is GONE or isinstance(h, Failed)]
        assert not bad, "\n".join([*bad, self.logs()])
        return heard

    def kill(self, rank: int, how: signal.Signals = signal.SIGKILL) -> None:
        os.kill(self.pids[rank], how)

    def logs(self) -> str:
        """The end of each rank's output."""
        return "\n".join(
            f"---- {log.name}\n{log.read_text(errors='replace')[-3000:]}"
            for log in sorted(self.folder.glob("rank-*.log"))
        )

    def close(self) -> None:
        for line in self.lines:
            line.close()  # an idle rank ends
        deadline = time.monotonic() + 5
        for process in self.processes:
            process.join(max(deadline - time.monotonic(), 0))
            process.kill()
            process.join()


@contextlib.contextmanager
def ranks(
    world: int, folder: Path, *, fresh: bool = False, cages: list[Path] | None = None
) -> Iterator[Ranks]:
    """Starts ranks that have a process group.

    Args:
        world: number of ranks.
        folder: a new one, for their output and for their rendezvous.
        fresh: new interpreters instead of forked ranks.
        cages: for each rank the `cgroup.procs` of its memory cgroup, which it enters before it
            executes the interpreter; for fresh ranks only.
    """
    folder.mkdir(parents=True)
    group = Ranks(folder)
    context = _fresh if fresh else _forked
    try:
        for rank in range(world):
            with entering(cages[rank] if cages else None, folder / f"enter-{rank}"):
                process, line = start(context, serve, rank, world, str(folder))
            group.processes.append(process)
            group.lines.append(line)
        group.ask("greet")
        yield group
    finally:
        group.close()


@contextlib.contextmanager
def entering(cage: Path | None, script: Path) -> Iterator[None]:
    """Within the context, fresh processes are in this cgroup from their first page on."""
    if cage is None:
        yield
        return
    resource_tracker.ensure_running()  # multiprocessing's own process, which stays outside
    python = sys.executable
    cgroup, interpreter = shlex.quote(str(cage)), shlex.quote(python)
    script.write_text(f'#!/bin/sh\necho $$ > {cgroup} && exec {interpreter} "$@"\n')
    script.chmod(0o755)
    _fresh.set_executable(str(script))
    try:
        yield
    finally:
        _fresh.set_executable(python)


def serve(line: Connection, rank: int, world: int, folder: str) -> None:
    """A rank's process: runs acts until the line is closed."""
    log = os.open(Path(folder) / f"rank-{rank}.log", os.O_WRONLY | os.O_CREAT, 0o644)
    for stream in (1, 2):
        os.dup2(log, stream)
    sys.stderr = sys.stdout = open(1, "w", buffering=1, closefd=False)  # noqa: SIM115
    import torch_rank

    torch_rank.join(rank, world, Path(folder))
    with contextlib.suppress(EOFError):
        while True:
            act, said = line.recv()
            begin = time.monotonic()
            try:
                answer = torch_rank.ACTS[act](**said)
            except (Exception, KeyboardInterrupt) as error:
                answer = failed(error, time.monotonic() - begin)
            line.send(answer)
    # Skips the shutdown of torch's threads and of connections to ranks that have ended.
    os._exit(0)


def failed(error: BaseException, after_s: float) -> Failed:
    facts = dict(vars(error))
    return Failed(type(error).__name__, str(error), facts, after_s, time.monotonic())


# ---- ranks that run one function


class Ended(NamedTuple):
    """The end of a rank's process."""

    value: Any = None
    """What its function returned."""
    error: str = ""
    """Name of the class of its exception."""
    facts: dict[str, Any] = {}
    """The exception's attributes, and its text as `message`."""
    at_s: float = 0.0
    """On the machine's monotonic clock."""


class Told(NamedTuple):
    """The first argument of a rank's function."""

    rank: int
    pipe: Connection

    def ready(self) -> None:
        """Ends one `await_ready` of the test."""
        self.pipe.send("ready")

    def is_told(self) -> bool:
        """True once the test has called `tell`."""
        return self.pipe.poll()


class World:
    """`size` processes in a process group. Without `file`, rank 0's process has the store."""

    _running: set["World"] = set()

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
            body: a rank's function, called with its `Told` and `arguments`.
            hosts: the host name that each rank reports instead of the machine's.
            file: the file that is the group's store.
        """
        self._port = _held_port()
        port = self._port.getsockname()[1]
        method = f"file://{file}" if file else f"tcp://127.0.0.1:{port}"
        self.processes: list[Any] = []
        self._lines: list[Connection] = []
        self._running.add(self)
        for rank in range(size):
            group = {"init_method": method, "rank": rank, "world_size": size}
            host = hosts[rank] if hosts else None
            process, line = start(_forked, _run_body, body, arguments, group, host)
            self.processes.append(process)
            self._lines.append(line)

    def pid(self, rank: int) -> int:
        return self.processes[rank].pid

    def await_ready(self, *ranks: int) -> None:
        """Returns once each of `ranks`, by default every rank, has called `ready`."""
        for rank in ranks or range(len(self._lines)):
            assert self._receive(rank) == "ready"

    def signal(self, rank: int, number: int) -> float:
        """Sends a signal to a rank, and returns once it is sent."""
        os.kill(self.pid(rank), number)
        return time.monotonic()

    def tell(self) -> None:
        """Makes every rank's `is_told` true."""
        for line in self._lines:
            with contextlib.suppress(BrokenPipeError):  # a rank that has failed: `end` reports it
                line.send("go on")

    def end(self, without: tuple[int, ...] = ()) -> dict[int, Ended]:
        """Waits for every rank and returns how it ended. `without`: ranks that were killed or are
        stopped."""
        try:
            ranks = [rank for rank in range(len(self._lines)) if rank not in without]
            return {rank: self._ending(rank) for rank in ranks}
        finally:
            self.kill()

    def kill(self) -> None:
        """Ends every rank that still runs or is stopped, and waits for it."""
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.join()
        self._port.close()
        self._running.discard(self)

    @classmethod
    @contextlib.contextmanager
    def killing(cls) -> Iterator[None]:
        """Kills, at the end of the context, the worlds that were started in it. A stopped rank that
        remained would keep pytest from exiting, since multiprocessing waits for its processes."""
        before = set(cls._running)
        try:
            yield
        finally:
            for world in cls._running - before:
                world.kill()

    def _ending(self, rank: int) -> Ended:
        while (message := self._receive(rank)) == "ready":
            pass
        return message

    def _receive(self, rank: int) -> Any:
        assert self._lines[rank].poll(PATIENCE_S), f"no message from rank {rank}"
        return self._lines[rank].recv()


def _run_body(
    pipe: Connection,
    body: Callable[..., Any],
    arguments: tuple[Any, ...],
    group: dict[str, Any],
    host: str | None,
) -> None:
    import torch.distributed as dist

    signal.signal(signal.SIGINT, signal.default_int_handler)
    if host is not None:
        socket.gethostname = lambda: host
    dist.init_process_group("gloo", timeout=timedelta(seconds=PATIENCE_S), **group)
    try:
        ended = Ended(value=body(Told(group["rank"], pipe), *arguments))
    except BaseException as error:
        facts = {**vars(error), "message": str(error)}
        ended = Ended(error=type(error).__name__, facts=facts)
    pipe.send(ended._replace(at_s=time.monotonic()))
    os._exit(0)  # without a shutdown; on rank 0 this also ends the store


def _held_port() -> socket.socket:
    """Binds a free port, which no other process gets until the socket is closed. With SO_REUSEADDR
    the store, which sets it too, can bind the port as well."""
    held = socket.socket()
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    held.bind(("127.0.0.1", 0))
    return held
