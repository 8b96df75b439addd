"""One run: a zygote (zygote.py) forks ranks, which wait until all are ready, work while their
memory is sampled, and report."""

import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from harness.page import ROOT
from harness.watch import Watch, available_bytes, group_within, require_group

SAMPLE_PERIOD_S = 0.004
RESERVE_BYTES = 2 << 30  # left free for the rest of the machine
STARTING_S = 180  # how long the ranks may take until they are connected, and until they are ready
FOLLOWING_S = 0.5  # how long failures of other ranks, caused by the first one, are collected


class RunFailedError(Exception):
    """A run failed. The message is that of the rank that failed first."""


class Zygote:
    """A process that forks ranks (zygote.py), started with its own environment variables."""

    def __init__(self, module: str, argument: str, environment: dict[str, str]) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "harness.zygote", module, argument],
            cwd=ROOT / "benchmarks", env=os.environ | environment, text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        )  # fmt: skip
        self._hear()

    def _hear(self) -> dict[str, Any]:
        assert self._process.stdout
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"the process that forks the ranks has ended: {self._process.wait()}")
        return json.loads(line)

    def ask(self, job: dict[str, Any]) -> None:
        assert self._process.stdin
        self._process.stdin.write(json.dumps(job) + "\n")
        self._process.stdin.flush()

    def exit_codes(self) -> list[int]:
        """Exit codes of the ranks of the last job, once all have ended."""
        return self._hear()["codes"]

    def end(self) -> None:
        self._process.kill()
        self._process.wait()


class Ranks:
    """The ranks of one run, each connected by a socket."""

    def __init__(self, listener: socket.socket, world: int) -> None:
        listener.settimeout(STARTING_S)
        self._connections = [listener.accept()[0] for _ in range(world)]
        # Unbuffered: select does not see lines in a buffer.
        self._lines = [c.makefile("rb", buffering=0) for c in self._connections]
        # Ranks connect in any order.
        self.pids = [hello["pid"] for hello in self.hear("hello", STARTING_S)]

    def tell(self) -> None:
        """Lets all ranks continue."""
        for connection in self._connections:
            connection.sendall(b"\n")

    def hear(
        self, events: str, timeout_s: float, meanwhile: Callable[[], None] | None = None
    ) -> list[dict[str, Any]]:
        """Waits until every rank has reported the event, or one of several events separated by
        spaces. Calls `meanwhile` repeatedly. Returns the reports."""
        deadline = time.monotonic() + timeout_s
        heard: dict[int, dict[str, Any]] = {}
        while len(heard) < len(self._lines):
            waiting = {self._connections[i]: i for i in range(len(self._lines)) if i not in heard}
            period = SAMPLE_PERIOD_S if meanwhile else 1.0
            for connection in select.select(list(waiting), [], [], period)[0]:
                report = self._line(waiting[connection])
                if report["event"] not in events.split():
                    raise RunFailedError(self._cause(report, waiting[connection]))
                heard[waiting[connection]] = report
            if meanwhile:
                meanwhile()
            if time.monotonic() > deadline:
                raise RunFailedError(f"still not {events} after {timeout_s:.0f} s")
        return list(heard.values())

    def _cause(self, failure: dict[str, Any], index: int) -> str:
        """The message of the first error, which has caused the errors of other ranks."""
        others = {c: i for i, c in enumerate(self._connections) if i != index}
        failures = [failure]
        time.sleep(FOLLOWING_S)
        for connection in select.select(list(others), [], [], 0)[0]:
            failures.append(self._line(others[connection]))
        failures = [one for one in failures if one["event"] == "failed"] or [failure]
        return min(failures, key=lambda one: one.get("at", 0))["error"]

    def _line(self, index: int) -> dict[str, Any]:
        line = self._lines[index].readline()
        return json.loads(line) if line else {"event": "gone", "error": "a rank is gone"}

    def kill(self) -> None:
        for pid in self.pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def rank_environment(world: int) -> dict[str, str]:
    """The environment variables that torchrun sets for the ranks of one node."""
    return {
        "WORLD_SIZE": str(world),
        "LOCAL_WORLD_SIZE": str(world),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "GLOO_SOCKET_IFNAME": "lo",
    }


def measure(
    zygote: Zygote,
    job: dict[str, Any],
    scratch: Path,
    before_loading: Callable[[], None],
    patience_s: float,
    spare_bytes: int = 0,
    more_bytes: int | None = None,
) -> dict[str, Any]:
    """Runs a job once; returns the measurements and each rank's report.

    `before_loading` is called when all ranks are ready to begin; for a job with `builds_first`,
    between building the model and loading it. The ranks' memory is limited to the node's available
    memory plus `spare_bytes` minus RESERVE_BYTES; with `more_bytes`, to the bytes that they hold
    when they begin plus `more_bytes`. Raises `RunFailedError`, after every rank has ended.
    """
    where = scratch / "gate"
    where.unlink(missing_ok=True)
    limit = available_bytes() + spare_bytes - RESERVE_BYTES
    with socket.socket(socket.AF_UNIX) as listener, group_within(limit) as (group, procs):
        listener.bind(str(where))
        listener.listen(job["world"])
        environment = rank_environment(job["world"]) | job["environment"]
        zygote.ask(job | {"gate": str(where), "procs": procs, "environment": environment})
        ranks = Ranks(listener, job["world"])
        try:
            ranks.hear("ready", STARTING_S)
            if not job["builds_first"]:
                before_loading()
            if more_bytes is not None:
                limit = require_group(group).cage_in(more_bytes)
            with Watch(ranks.pids, group) as watch:
                ranks.tell()
                if job["builds_first"]:
                    ranks.hear("built", patience_s, watch.sample)
                    before_loading()
                    ranks.tell()
                loaded = ranks.hear("loaded", patience_s, watch.sample)
                seen = watch.end()
            ranks.tell()
            checked = ranks.hear("checked", patience_s)
        except BaseException as error:
            ranks.kill()
            if not isinstance(error, (RunFailedError, OSError)):
                raise
            limit_reached = group is not None and group.was_out_of_memory()
            what = f"killed: more than {limit >> 20} MiB" if limit_reached else str(error)
            raise RunFailedError(what) from error
        finally:
            zygote.exit_codes()
    return {"seen": seen, "loaded": loaded, "checked": checked}
