"""Real ranks: processes with a process group over gloo, each of which does what it is asked.

What can be asked for is the table of `torch_rank.py`. Two ways to start: *forked* ranks come, in a
second, from a server that has imported torch and transformers; *fresh* ones are interpreters of
their own, as torchrun starts them, which share no memory with anybody.
"""

import contextlib
import multiprocessing
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

SUPPORT = Path(__file__).resolve().parent
PATIENCE_S = 240.0  # of a machine that others use too
LEFT_ALONE_S = 45.0
"""How long ranks may go on once another one has failed: longer is a hang."""

GONE = "the process has ended"
"""What a rank answers that does no more."""

_forked = multiprocessing.get_context("forkserver")
_forked.set_forkserver_preload(["torch_rank"])
_fresh = multiprocessing.get_context("spawn")


@dataclass(frozen=True)
class Failed:
    """What a rank raised, and how long after it was asked."""

    error: str
    """Name of the class."""
    message: str
    facts: dict[str, Any]
    """The attributes: category, culprit_rank, ..."""
    after_s: float
    at_s: float
    """When, by the machine's monotonic clock."""


@dataclass
class Ranks:
    """The ranks of one world. To be closed, which ends whoever is left."""

    folder: Path
    processes: list[Any] = field(default_factory=list)
    lines: list[Connection] = field(default_factory=list)

    @property
    def pids(self) -> list[int]:
        return [process.pid for process in self.processes]

    def tell(self, act: str, each: Mapping[int, dict[str, Any]] | None = None, **said: Any) -> None:
        """Asks every rank for an act and waits for nothing.

        Args:
            act: of the table.
            each: what only some ranks are told, by rank.
            said: what all are told.
        """
        for rank, line in enumerate(self.lines):
            line.send((act, said | (each or {}).get(rank, {})))

    def hear(self, within_s: float = PATIENCE_S) -> list[Any]:
        """What the ranks answer, by rank: a value, `Failed` or `GONE`."""
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
        """An act that must end well: what each rank answers."""
        self.tell(act, each, **said)
        heard = self.hear()
        bad = [f"rank {r}: {h}" for r, h in enumerate(heard) if h is GONE or isinstance(h, Failed)]
        assert not bad, "\n".join([*bad, self.logs()])
        return heard

    def kill(self, rank: int, how: signal.Signals = signal.SIGKILL) -> None:
        os.kill(self.pids[rank], how)

    def logs(self) -> str:
        """What the ranks have printed: the end of it."""
        return "\n".join(
            f"---- {log.name}\n{log.read_text(errors='replace')[-3000:]}"
            for log in sorted(self.folder.glob("rank-*.log"))
        )

    def close(self) -> None:
        for line in self.lines:
            line.close()  # a rank that waits to be asked ends
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
        world: how many.
        folder: a new one, for what they print and for finding each other.
        fresh: new interpreters, not forked ones.
        cages: for each rank the `cgroup.procs` of its cgroup, which it enters before it becomes the
            interpreter; fresh ones only.
    """
    folder.mkdir(parents=True)
    started = Ranks(folder)
    context = _fresh if fresh else _forked
    try:
        with importable():
            for rank in range(world):
                ours, theirs = context.Pipe()
                arguments = (theirs, rank, world, str(folder))
                process = context.Process(target=serve, args=arguments, daemon=True)
                with entering(cages[rank] if cages else None, folder / f"enter-{rank}"):
                    process.start()
                theirs.close()
                started.processes.append(process)
                started.lines.append(ours)
        started.ask("greet")
        yield started
    finally:
        started.close()


@contextlib.contextmanager
def entering(cage: Path | None, script: Path) -> Iterator[None]:
    """What is started meanwhile is in this cgroup from its first page on."""
    if cage is None:
        yield
        return
    resource_tracker.ensure_running()  # multiprocessing's own, which would be in there too
    python = sys.executable
    cgroup, interpreter = shlex.quote(str(cage)), shlex.quote(python)
    script.write_text(f'#!/bin/sh\necho $$ > {cgroup} && exec {interpreter} "$@"\n')
    script.chmod(0o755)
    _fresh.set_executable(str(script))
    try:
        yield
    finally:
        _fresh.set_executable(python)


@contextlib.contextmanager
def importable() -> Iterator[None]:
    """What is started meanwhile finds these modules, and uses one thread to compute."""
    before = dict(os.environ)
    path = [str(SUPPORT), *filter(None, [before.get("PYTHONPATH")])]
    os.environ |= {"PYTHONPATH": os.pathsep.join(path), "OMP_NUM_THREADS": "1"}
    os.environ |= {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def torchrun(root: Path, processes: int, *words: object) -> subprocess.CompletedProcess[str]:
    """Processes as users start them, in the repository."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", str(processes), *map(str, words)]
    with importable():
        return subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=root)


# ---- in a rank's process


def serve(line: Connection, rank: int, world: int, folder: str) -> None:
    """Answers until nobody asks any more."""
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
    # Threads of torch and connections to ranks that have gone: nothing of it needs an orderly end.
    os._exit(0)


def failed(error: BaseException, after_s: float) -> Failed:
    facts = dict(vars(error))
    return Failed(type(error).__name__, str(error), facts, after_s, time.monotonic())
