"""Real ranks: processes that form a process group over gloo, and run acts until they are closed.

An act is a function: one of `torch_rank.py`, by its name, or one of a test module. Ranks are
forked, within a second, from a server that has imported torch and transformers; *fresh* ones are
new interpreters, as torchrun starts them, and share no memory with another process.

Tests borrow a world from the `Pool` of their pytest process (see tests/torch/conftest.py). `ranks`
starts a world of the test's own, for what other tests' acts would disturb: measured memory, memory
cgroups, a library that all processes preload.
"""

import contextlib
import faulthandler
import gc
import importlib.util
import multiprocessing
import os
import shlex
import signal
import socket
import subprocess
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing import forkserver, resource_tracker
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

SUPPORT = Path(__file__).resolve().parent
EXAMPLES = SUPPORT.parents[1] / "examples"
PATIENCE_S = 240.0  # on a machine that runs other things too
LEFT_ALONE_S = 45.0
"""How long ranks may go on after another rank has failed; longer is a hang."""

CLEAN_S = 60.0
"""How long ranks may clean up after an act, which takes them much less than a second."""

GONE = "the process has ended"
"""The answer of a rank that has ended, or that the test does not wait for."""

READY = "the act is ready"
GO_ON = "the act may go on"
SETTLE = "clean up"
LEND = "begin anew"

# Each process has one fork server with one list of modules to preload: the last list set counts.
forked = multiprocessing.get_context("forkserver")
forked.set_forkserver_preload(["torch_rank"])
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


@contextlib.contextmanager
def own_fork_server() -> Iterator[None]:
    """Within the context, ranks are forked from another server, which starts with the environment
    that this process then has. They must have ended before the end of the context."""
    server = forkserver.ForkServer()
    server.set_forkserver_preload(["torch_rank"])
    shared = forkserver.connect_to_new_process
    forkserver.connect_to_new_process = server.connect_to_new_process
    try:
        yield
    finally:
        forkserver.connect_to_new_process = shared
        server._stop()


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


# ---- a world, as tests see it


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
    trace: str = field(default="", compare=False)
    """The traceback."""


@dataclass
class Ranks:
    """The ranks of one process group. After an act that fails, or that leaves behind what cannot be
    undone, the next one runs in new processes. `close` ends the processes that still run."""

    size: int
    folder: Path
    fresh: bool = False
    cages: Sequence[Path] | None = None
    processes: list[Any] = field(default_factory=list)
    lines: list[Connection] = field(default_factory=list)
    spent: str = ""
    """Why these processes run no further act."""
    _exits: bool = False
    _unsettled: bool = False

    @property
    def pids(self) -> list[int]:
        return [process.pid for process in self.processes]

    def start(self) -> None:
        """Starts the processes, and waits until they have joined the group."""
        self.folder.mkdir(parents=True, exist_ok=True)
        (self.folder / "port").unlink(missing_ok=True)
        self.processes, self.lines, self.spent, self._unsettled = [], [], "", False
        context = _fresh if self.fresh else forked
        for rank in range(self.size):
            cage = self.cages[rank] if self.cages else None
            with entering(cage, self.folder / f"enter-{rank}"):
                process, line = start(context, serve, rank, self.size, str(self.folder))
            self.processes.append(process)
            self.lines.append(line)
        self.ask("greet")
        self.settle()

    def tell(
        self,
        act: str | Callable[..., Any],
        each: Mapping[int, dict[str, Any]] | None = None,
        *,
        hosts: Sequence[str] | None = None,
        exits: bool = False,
        **said: Any,
    ) -> None:
        """Starts an act on every rank; does not wait.

        Args:
            act: its name in `torch_rank.ACTS`, or a function of a module.
            each: arguments of single ranks, by rank.
            hosts: the host name that each rank reports during the act instead of the machine's.
            exits: whether each process exits as soon as it has answered.
            said: arguments of all ranks.
        """
        self.settle()
        if self.spent:
            self.close()
            self.start()
        for rank, line in enumerate(self.lines):
            host = hosts[rank] if hosts else None
            line.send((act, said | (each or {}).get(rank, {}), host, exits))
        self.spent, self._exits = "an act was not heard", exits

    def await_ready(self, *ranks: int) -> None:
        """Returns once each of `ranks`, by default every rank, has called `ready` in its act."""
        for rank in ranks or range(self.size):
            assert self.lines[rank].poll(PATIENCE_S), f"rank {rank} is not ready\n{self.logs()}"
            message = self.lines[rank].recv()
            assert message == READY, f"rank {rank}: {message}"

    def let_go_on(self) -> None:
        """Makes `is_told` true on every rank."""
        for line in self.lines:
            with contextlib.suppress(BrokenPipeError):  # a rank that has ended: `hear` reports it
                line.send(GO_ON)

    def hear(self, within_s: float = PATIENCE_S, without: Sequence[int] = ()) -> list[Any]:
        """The ranks' answers, by rank: a value, `Failed` or `GONE`. Once a rank has failed, the
        others have LEFT_ALONE_S. `without`: ranks that do not answer, which are killed."""
        heard: list[Any] = [GONE] * self.size
        waiting = {rank: line for rank, line in enumerate(self.lines) if rank not in without}
        deadline = time.monotonic() + within_s
        while waiting:
            if not wait(list(waiting.values()), max(deadline - time.monotonic(), 0)):
                self._give_up(sorted(waiting), heard)
            for rank, line in list(waiting.items()):
                if line.poll():
                    answer = GONE
                    with contextlib.suppress(EOFError, ConnectionResetError):
                        answer = line.recv()
                    if isinstance(answer, str) and answer == READY:
                        continue
                    del waiting[rank]
                    heard[rank] = answer
                    if is_failure(answer):
                        deadline = min(deadline, time.monotonic() + LEFT_ALONE_S)
        for rank in without:
            with contextlib.suppress(ProcessLookupError):
                self.kill(rank)
        if any(map(is_failure, heard)):
            self.spent = "an act has failed"
        elif not self._exits:
            self.spent, self._unsettled = "", True
            for line in self.lines:
                line.send(SETTLE)
        return heard

    def _give_up(self, silent: list[int], heard: list[Any]) -> None:
        """Raises an error with the stacks of the ranks that are silent, after killing all ranks."""
        for rank in silent:
            with contextlib.suppress(ProcessLookupError):
                self.kill(rank, signal.SIGUSR2)  # prints the stack
        time.sleep(0.5)
        self.spent = "an act has not ended"
        self.close()
        told = [f"rank {rank}: {described(one)}" for rank, one in enumerate(heard)]
        words = "\n".join(one for rank, one in enumerate(told) if rank not in silent)
        raise AssertionError(f"no answer from ranks {silent}; the others:\n{words}\n{self.logs()}")

    def ask(
        self,
        act: str | Callable[..., Any],
        each: Mapping[int, dict[str, Any]] | None = None,
        **said: Any,
    ) -> Any:
        """Starts an act that must not fail, as `tell` does. Returns the answers, by rank."""
        self.tell(act, each, **said)
        heard = self.hear()
        bad = [f"rank {r}: {described(h)}" for r, h in enumerate(heard) if is_failure(h)]
        assert not bad, "\n".join([*bad, self.logs()])
        return heard

    def settle(self) -> None:
        """Waits until all ranks have cleaned up after the last act. What an act has left behind and
        should have undone itself is a warning, and spends the world."""
        if not self._unsettled:
            return
        self._unsettled = False
        left: list[str] = []
        deadline = time.monotonic() + CLEAN_S
        for rank, line in enumerate(self.lines):
            try:
                assert line.poll(max(deadline - time.monotonic(), 0)), "does not end"
                left += [f"rank {rank}: {what}" for what in line.recv()]
            except (AssertionError, EOFError, ConnectionResetError) as error:
                left.append(f"rank {rank} does not clean up: {error or GONE}")
        if left:
            self.spent = "an act has left something behind"
            warnings.warn(f"an act has left behind {'; '.join(left)}", stacklevel=2)

    def kill(self, rank: int, how: signal.Signals = signal.SIGKILL) -> None:
        os.kill(self.pids[rank], how)
        if how is signal.SIGKILL:
            self.spent = "a rank was killed"

    def logs(self) -> str:
        """The end of each rank's output."""
        return "\n".join(
            f"---- {log.name}\n{log.read_text(errors='replace')[-3000:]}"
            for log in sorted(self.folder.glob("rank-*.log"))
        )

    def begin_anew(self, folder: Path) -> None:
        """Gives the ranks another folder. They forget the modules of tests."""
        folder.mkdir(parents=True)
        self.folder = folder
        for line in self.lines:
            line.send((LEND, str(folder)))

    def close(self) -> None:
        for line in self.lines:
            line.close()  # an idle rank ends
        deadline = time.monotonic() + (0 if self.spent else 5)
        for process in self.processes:
            process.join(max(deadline - time.monotonic(), 0))
            process.kill()
            process.join()
        self.lines = []


def is_failure(answer: Any) -> bool:
    return isinstance(answer, Failed) or (isinstance(answer, str) and answer == GONE)


def described(answer: Any) -> str:
    if isinstance(answer, Failed):
        return f"{answer.error}: {answer.message}\n{answer.trace}"
    return str(answer)


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
    group = Ranks(world, folder, fresh, cages)
    try:
        group.start()
        yield group
        group.settle()
    finally:
        group.close()


class Pool:
    """Worlds of forked ranks that one test borrows after another. `close` ends the idle ones."""

    KEPT = {1: 2, 2: 2, 3: 1, 4: 1}
    """How many idle worlds of a size are kept; a larger world is not kept."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._idle: list[Ranks] = []
        self._loans = 0

    @contextlib.contextmanager
    def lend(self, size: int) -> Iterator[Ranks]:
        """A world that no other test uses within the context. Its folder and its logs are new."""
        self._loans += 1
        folder = self._folder / f"loan-{self._loans}"
        group = next((one for one in reversed(self._idle) if one.size == size), None)
        if group is None:
            group = Ranks(size, folder)
            group.start()
        else:
            self._idle.remove(group)
            group.begin_anew(folder)
        try:
            yield group
            group.settle()
        finally:
            alike = sum(one.size == size for one in self._idle)
            if group.spent or group._unsettled or alike >= self.KEPT.get(size, 0):
                group.close()
            else:
                self._idle.append(group)

    def close(self) -> None:
        for group in self._idle:
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


# ---- a rank's process

_line: Connection | None = None


def ready() -> None:
    """In an act: ends one `await_ready` of the test."""
    assert _line is not None
    _line.send(READY)


def is_told() -> bool:
    """In an act: true once after the test has called `let_go_on`."""
    assert _line is not None
    return _line.poll() and _line.recv() == GO_ON


def serve(line: Connection, rank: int, world: int, folder: str) -> None:
    """A rank's process: runs acts until the line is closed."""
    global _line
    _line = line
    write_to(Path(folder) / f"rank-{rank}.log")
    faulthandler.register(signal.SIGUSR2, all_threads=True)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    import settling
    import torch_rank

    torch_rank.join(rank, world, Path(folder))
    gc.freeze()  # the modules' objects, which are many, so that later collections are quick
    before = settling.Process()
    with contextlib.suppress(EOFError):
        while True:
            message = line.recv()
            if message == GO_ON:  # of an act that has ended
                continue
            if message == SETTLE:
                line.send(before.restore())
            elif message[0] == LEND:
                torch_rank.folder = Path(message[1])
                write_to(torch_rank.folder / f"rank-{rank}.log")
                settling.forget_test_modules()
            else:
                act, said, host, exits = message
                if host is not None:
                    socket.gethostname = lambda name=host: name
                begin = time.monotonic()
                try:
                    run = torch_rank.ACTS[act] if isinstance(act, str) else act
                    with warnings.catch_warnings():
                        answer = run(**said)
                except (Exception, KeyboardInterrupt) as error:
                    answer = failed(error, time.monotonic() - begin)
                line.send(answer)
                if exits:
                    break
                del answer, message, said
    # Skips the shutdown of torch's threads and of connections to ranks that have ended.
    os._exit(0)


def write_to(log: Path) -> None:
    """Makes `log` this process's output."""
    opened = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    sys.stdout.flush()
    for stream in (1, 2):
        os.dup2(opened, stream)
    os.close(opened)
    sys.stderr = sys.stdout = open(1, "w", buffering=1, closefd=False)  # noqa: SIM115


def failed(error: BaseException, after_s: float) -> Failed:
    trace = "".join(traceback.format_exception(error))
    facts = dict(vars(error))
    return Failed(type(error).__name__, str(error), facts, after_s, time.monotonic(), trace)
