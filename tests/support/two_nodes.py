"""Two nodes on one machine: network namespaces, connected by a veth pair, each with a separate host
name, in which torchrun starts ranks. Requires root, and Debian's iproute2 and util-linux."""

import contextlib
import os
import shlex
import shutil
import subprocess
import sys
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path

PORT = 29517
LIMIT_S = 120.0


def why_not() -> str:
    """The reason why there can't be two nodes here; empty if there can."""
    if os.geteuid() != 0:
        return "network namespaces require root"
    missing = [name for name in ("ip", "unshare", "mount") if shutil.which(name) is None]
    if missing:
        return f"no {missing[0]} here"
    name = f"probe-{uuid.uuid4().hex[:8]}"
    made = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True)
    if made.returncode != 0:
        return made.stderr.strip()
    subprocess.run(["ip", "netns", "delete", name], check=True)
    return ""


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True)


class Nodes:
    """The namespaces `a` and `b`."""

    def __init__(self, name: str) -> None:
        self.names = [f"{name}-a", f"{name}-b"]

    def torchrun(
        self, script: Path, words: Sequence[str], hidden: Path | None = None
    ) -> list[subprocess.CompletedProcess[str]]:
        """Runs a program on two ranks of each node. `hidden`: a directory that is empty on node
        b."""
        started = [self._start(node, script, words, hidden) for node in range(2)]
        ended = []
        for process in started:
            try:
                out, _ = process.communicate(timeout=LIMIT_S)
            finally:
                process.kill()
            ended.append(subprocess.CompletedProcess(process.args, process.returncode, out))
        return ended

    def _start(
        self, node: int, script: Path, words: Sequence[str], hidden: Path | None
    ) -> subprocess.Popen[str]:
        launch = [sys.executable, "-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=2"]
        launch += [f"--node-rank={node}", "--master-addr=10.77.0.1", f"--master-port={PORT}"]
        launch += [str(script), *words]
        hide = f"mount -t tmpfs none {shlex.quote(str(hidden))} && " if hidden and node else ""
        line = f"hostname node-{node} && {hide}exec {shlex.join(launch)}"
        inside = ["ip", "netns", "exec", self.names[node], "unshare", "--mount", "--uts"]
        environment = os.environ | {"GLOO_SOCKET_IFNAME": "eth0", "OMP_NUM_THREADS": "1"}
        return subprocess.Popen(
            [*inside, "sh", "-c", line],
            env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip


@contextlib.contextmanager
def nodes() -> Iterator[Nodes]:
    """Two namespaces with the addresses 10.77.0.1 and 10.77.0.2. The end of the context removes
    them."""
    made = Nodes(f"modicum-{uuid.uuid4().hex[:6]}")
    cables = [f"mo{uuid.uuid4().hex[:8]}" for _ in range(2)]
    try:
        for name in made.names:
            _ip("netns", "add", name)
        _ip("link", "add", cables[0], "type", "veth", "peer", "name", cables[1])
        for at, (name, cable) in enumerate(zip(made.names, cables, strict=True)):
            _ip("link", "set", cable, "netns", name, "name", "eth0")
            _ip("-n", name, "address", "add", f"10.77.0.{at + 1}/24", "dev", "eth0")
            _ip("-n", name, "link", "set", "eth0", "up")
            _ip("-n", name, "link", "set", "lo", "up")
        yield made
    finally:
        for name in made.names:
            subprocess.run(["ip", "netns", "delete", name], capture_output=True)
