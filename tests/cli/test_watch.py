"""`modicum watch` measures the tree of any command from outside and changes nothing about it.

Must fail for these mutants: copies that are not found, or are attributed to the parent; another
process named as killed; an exit code of our own; output of the command that is lost.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from cage import why_no_cage
from program import failure, run

FORKED = """
import os, sys, time
highest = bytearray(int(sys.argv[2]))
del highest
block = bytearray(int(sys.argv[1]))
for at in range(0, len(block), 4096): block[at] = 1
children = []
for _ in range(2):
    child = os.fork()
    if child == 0:
        time.sleep(30)
        os._exit(0)
    children.append(child)
time.sleep(0.3)
for at in range(0, len(block), 4096): block[at] = 2
time.sleep(2.5)
held = 0
for pid in (os.getpid(), *children):
    for line in open(f"/proc/{pid}/smaps_rollup"):
        if line.startswith(("Pss_Anon", "Pss_Shmem")): held += int(line.split()[1]) * 1024
print(os.getpid(), *children, held, flush=True)
for child in children:
    os.kill(child, 9)
    os.waitpid(child, 0)
"""

KILLED = """
import subprocess, sys
others = [subprocess.Popen(["sleep", "30"]) for _ in range(2)]
grown = subprocess.Popen([sys.executable, "-c", "block = bytearray(600 << 20)"])
print(grown.pid, file=sys.stderr, flush=True)
grown.wait()
for other in others: other.kill()
sys.exit(3)
"""


@pytest.mark.alone
@pytest.mark.parametrize(("size", "highest"), ((256 << 20, 0), (1 << 30, 3 << 30)))
def test_copies_since_a_fork(modicum: Path, size: int, highest: int) -> None:
    """In the second case the copies are made after the tree's peak, and cost more CPU time to read
    than is left."""
    done = run(modicum, "watch", "--json", "--", sys.executable, "-c", FORKED, size, highest)
    assert done.code == 0, done.stderr
    parent, *children, held = map(int, done.stderr.split())
    told = done.json
    assert abs(told["cow_duplicate_bytes"] - size) < 0.02 * held + (4 << 20)
    assert abs(told["peak_bytes"] - max(held, highest)) < 0.02 * max(held, highest)
    by_pid = {one["pid"]: one for one in told["processes"]}
    assert by_pid[parent]["cow_duplicate_bytes"] == 0
    for child in children:
        assert by_pid[child]["forked_from"] == by_pid[child]["ppid"] == parent
        assert by_pid[child]["cow_duplicate_bytes"] > 0.47 * size


HEAP = "block = bytearray(600 << 20)"
SHARED_MEMORY = """
import mmap
block = mmap.mmap(-1, 600 << 20)
for at in range(0, len(block), 4096): block[at] = 1
"""
# Ranks 0 and 2 hold 60 MiB each; rank 1 runs the script of the argument, and grows.
RANKS = """
import os, subprocess, sys, time
def start(rank, script):
    environment = os.environ | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
    return subprocess.Popen([sys.executable, "-c", script], env=environment)
holding = "import time; held = bytearray(60 << 20); time.sleep(30)"
others = [start(rank, holding) for rank in (0, 2)]
time.sleep(0.3)
grown = start(1, sys.argv[1])
print(grown.pid, file=sys.stderr, flush=True)
grown.wait()
for other in others: other.kill()
sys.exit(3)
"""

# A trainer holds 60 MiB, and so does each of two forked workers; a child of the second one, forked
# too and of the same name, grows.
FORKED_WORKERS = """
import os, sys, time
held = bytearray(60 << 20)
def forked(work):
    pid = os.fork()
    if pid == 0:
        work()
        os._exit(0)
    return pid
def idle():
    own = bytearray(60 << 20)
    time.sleep(30)
def grow():
    os.write(2, f"{os.getpid()}\\n".encode())
    block = bytearray(600 << 20)
def trouble():
    own = bytearray(60 << 20)
    os.waitpid(forked(grow), 0)
idler = forked(idle)
time.sleep(0.3)
os.waitpid(forked(trouble), 0)
os.kill(idler, 9)
os.waitpid(idler, 0)
sys.exit(3)
"""


@pytest.mark.parametrize(("script", "code"), [("exit 7", 7), ("kill -9 $$", 137), ("true", 0)])
def test_exits_as_the_command_does(modicum: Path, script: str, code: int) -> None:
    done = run(modicum, "watch", "--", "sh", "-c", f"echo out; echo err >&2; {script}")
    assert (done.code, done.stdout) == (code, "out\n")
    assert done.stderr.startswith("err\n")
    told = run(modicum, "watch", "--json", "--", "sh", "-c", f"echo out; {script}")
    assert told.json["exit_code"] == told.code == code
    assert told.stderr == "out\n"


def test_signals_reach_the_command(modicum: Path) -> None:
    script = "trap 'echo caught; exit 5' TERM; echo ready; while :; do sleep 0.05; done"
    words = [str(modicum), "watch", "--", "sh", "-c", script]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as ran:
        assert ran.stdout is not None
        assert ran.stdout.readline() == "ready\n"
        ran.terminate()
        out, _ = ran.communicate(timeout=20)
    assert (ran.returncode, out) == (5, "caught\n")


def test_descendants_of_ended_parents_count(modicum: Path) -> None:
    """The inner shell ends at once; the process that it has started holds the memory."""
    grown = "import time; block = bytearray(b'1') * (64 << 20); time.sleep(1.5)"
    script = f'sh -c \'"{sys.executable}" -c "{grown}" & echo $!\'; sleep 2'
    script = script.replace("b'1'", "[49]")
    done = run(modicum, "watch", "--json", "--", "sh", "-c", script)
    assert done.code == 0, done.stderr
    orphan = int(done.stderr.split()[0])
    by_pid = {one["pid"]: one for one in done.json["processes"]}
    assert by_pid[orphan]["peak_bytes"] > 64 << 20


def test_ranks_are_those_of_the_environment(modicum: Path) -> None:
    script = "for r in 0 1; do RANK=$r sleep 0.5 & done; wait"
    done = run(modicum, "watch", "--json", "--", "sh", "-c", script)
    ranks = [one["rank"] for one in done.json["processes"] if one["name"] == "sleep"]
    assert sorted(ranks) == [0, 1]


def test_commands_that_cannot_start(modicum: Path, tmp_path: Path) -> None:
    done = run(modicum, "watch", "--json", "--", tmp_path / "nothing-here")
    assert (done.code, done.error["category"]) == (13, "IO")
    assert "nothing-here" in done.error["message"]
    assert failure(modicum, 2, "watch")["category"] == "USAGE"


def node_waits_s() -> float | None:
    """How long some process of the node has waited for memory so far; None: the kernel has no
    pressure figures."""
    try:
        lines = Path("/proc/pressure/memory").read_text().splitlines()
    except OSError:
        return None
    return int(lines[0].rsplit("total=", 1)[1]) / 1e6


def test_pressure_is_that_of_the_run(modicum: Path) -> None:
    before = node_waits_s()
    told = run(modicum, "watch", "--json", "--", "sleep", "0.1").json["pressure"]
    after = node_waits_s()
    if before is None or after is None:
        assert told is None
        return
    assert 0 <= told["full_s"] <= told["some_s"]
    if told["source"] == "node":
        assert told["some_s"] <= after - before
    else:
        assert told["source"].startswith("cgroup v2 ")


def test_huge_pages_are_read_where_memory_is_steady(modicum: Path) -> None:
    script = f"""
import mmap, time
block = mmap.mmap(-1, {64 << 20}, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
block.madvise(mmap.MADV_HUGEPAGE)
for at in range(0, len(block), 4096): block[at] = 1
time.sleep(0.5)
lines = open("/proc/self/smaps_rollup").read().splitlines()
print(next((line.split()[1] for line in lines if line.startswith("AnonHugePages")), "0"))
"""
    done = run(modicum, "watch", "--json", "--", sys.executable, "-c", script)
    assert done.code == 0, done.stderr
    most = max(one["huge_page_bytes"] or 0 for one in done.json["processes"])
    assert most == int(done.stderr) * 1024


def why_no_log() -> str:
    try:
        os.close(os.open("/dev/kmsg", os.O_RDONLY | os.O_NONBLOCK))
    except OSError as error:
        return f"the kernel's log can't be read: {error}"
    return ""


def killed_at(limit: int, modicum: Path, *script: str) -> tuple[int, dict[str, Any], str]:
    """A script at a limit: the pid of the process that grows, `killed`, and the paragraph."""
    if reason := why_no_cage():
        pytest.skip(reason)
    words = [modicum, "watch", "--json", "--limit", limit, "--", sys.executable, "-c", *script]
    done = subprocess.run(list(map(str, words)), capture_output=True, text=True, timeout=60)
    grown, paragraph = done.stderr.split("\n", 1)
    assert done.returncode == 3, done.stderr
    return int(grown), json.loads(done.stdout)["killed"], paragraph


@pytest.mark.alone
def test_a_kill_of_a_short_process(modicum: Path) -> None:
    """The killed process may end before it is sampled; the kernel's log names it."""
    if reason := why_no_log():
        pytest.skip(reason)
    limit = 100 << 20
    for _ in range(5):
        grown, killed, paragraph = killed_at(limit, modicum, KILLED)
        assert (killed["pid"], killed["name"][:6]) == (grown, "python")
        assert 0.7 * limit < killed["held_bytes"] <= limit
        assert killed["grew"]["pid"] == grown
        assert f"pid {grown}" in paragraph


@pytest.mark.alone
def test_a_kill_names_the_process(modicum: Path) -> None:
    limit = 200 << 20
    grown, killed, paragraph = killed_at(limit, modicum, KILLED)
    assert (killed["pid"], killed["signal"]) == (grown, 9)
    assert killed["limit_bytes"] == limit
    assert 0 < killed["held_bytes"] <= limit
    assert f"pid {grown}" in paragraph


@pytest.mark.alone
@pytest.mark.parametrize("script", (HEAP, SHARED_MEMORY), ids=("heap", "shared memory"))
@pytest.mark.parametrize("times", (1, pytest.param(10, marks=pytest.mark.soak)))
def test_kills_among_ranks(modicum: Path, script: str, times: int) -> None:
    """The rank that grows is killed and named, not the others, which hold memory too."""
    for _ in range(times):
        grown, killed, paragraph = killed_at(400 << 20, modicum, RANKS, script)
        assert (killed["pid"], killed["rank"]) == (grown, 1), killed
        assert killed["grew"]["pid"] == grown and killed["grew"]["bytes"] > 0, killed
        assert 200 << 20 < killed["held_bytes"] < 400 << 20, killed
        assert killed["tree_held_bytes"] > killed["held_bytes"] + (100 << 20), killed
        assert f"pid {grown}" in paragraph and "would need a limit of" in paragraph, paragraph


@pytest.mark.alone
@pytest.mark.parametrize("times", (1, pytest.param(20, marks=pytest.mark.soak)))
def test_kills_among_forked_workers(modicum: Path, times: int) -> None:
    """A child of a worker grows; its parents, siblings and cousins have the same name."""
    for _ in range(times):
        grown, killed, paragraph = killed_at(400 << 20, modicum, FORKED_WORKERS)
        assert (killed["pid"], killed["rank"]) == (grown, None), killed
        assert killed["grew"]["pid"] == grown and killed["grew"]["bytes"] > 0, killed
        assert killed["grew"]["owner"] is None, killed
        assert f"pid {grown}" in paragraph, paragraph
