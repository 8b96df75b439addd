"""`modicum watch` measures the process tree of any command from outside and does not change its
output or its exit code.

Catches: copy-on-write copies are not found, or are attributed to the parent; another process is
named as killed; the exit code is not that of the command; output of the command is lost; the memory
of a process counts twice while it starts a program; the record is lost if a file can't be written
at the end.
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

# Holds argv[2] bytes for a moment. Then two forked children inherit a block of argv[1] bytes, and
# the parent writes all of it, which copies it. Prints all pids, and the memory of the tree.
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

# Starts two idle processes and one that grows to 600 MiB, and prints the pid of that one.
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
def test_copies_since_a_fork_are_attributed_to_the_children(
    modicum: Path, size: int, highest: int
) -> None:
    """In the second case the copies are made after the tree's peak, and reading a tree of this size
    costs more than `watch` has left of the CPU time that it allows itself."""
    done = run(modicum, "watch", "--json", "--", sys.executable, "-c", FORKED, size, highest)
    assert done.code == 0, done.stderr
    parent, *children, held = map(int, done.stderr.split())
    watched = done.json
    assert abs(watched["cow_duplicate_bytes"] - size) < 0.02 * held + (4 << 20)
    assert abs(watched["peak_bytes"] - max(held, highest)) < 0.02 * max(held, highest)
    by_pid = {one["pid"]: one for one in watched["processes"]}
    assert by_pid[parent]["cow_duplicate_bytes"] == 0
    for child in children:
        assert by_pid[child]["forked_from"] == by_pid[child]["ppid"] == parent
        assert by_pid[child]["cow_duplicate_bytes"] > 0.47 * size


# Two ways to grow to 600 MiB.
HEAP = "block = bytearray(600 << 20)"
SHARED_MEMORY = """
import mmap
block = mmap.mmap(-1, 600 << 20)
for at in range(0, len(block), 4096): block[at] = 1
"""
# Ranks 0 and 2 hold 60 MiB each; rank 1 runs the script in argv[1], which grows. Prints its pid.
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

# A trainer and two workers that it has forked hold 60 MiB each. The second worker forks a child,
# which prints its pid and grows. All four processes have the same name.
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
    blocks = []
    for _ in range(30):  # slowly enough for a sample of its kinds
        blocks.append(bytearray(20 << 20))
        time.sleep(0.03)
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
    with_json = run(modicum, "watch", "--json", "--", "sh", "-c", f"echo out; {script}")
    assert with_json.json["exit_code"] == with_json.code == code
    assert with_json.stderr == "out\n"


def test_signals_reach_the_command(modicum: Path) -> None:
    script = "trap 'echo caught; exit 5' TERM; echo ready; while :; do sleep 0.05; done"
    words = [str(modicum), "watch", "--", "sh", "-c", script]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as ran:
        assert ran.stdout is not None
        assert ran.stdout.readline() == "ready\n"
        ran.terminate()
        out, _ = ran.communicate(timeout=20)
    assert (ran.returncode, out) == (5, "caught\n")


def test_the_end_is_seen_where_sigchld_is_ignored(modicum: Path) -> None:
    """The kernel then discards ended children. The command inherits the disposition."""
    ignore = "import os, signal, sys; signal.signal(signal.SIGCHLD, signal.SIG_IGN)"
    words = [sys.executable, "-c", f"{ignore}; os.execv(sys.argv[1], sys.argv[1:])"]
    command = "import signal, sys; sys.exit(3 + (signal.getsignal(signal.SIGCHLD) == 1))"
    watched = [modicum, "watch", "--", sys.executable, "-c", command]
    done = subprocess.run([*words, *watched], capture_output=True, timeout=60, check=False)
    assert done.returncode == 4, done.stderr


def test_descendants_of_ended_parents_count(modicum: Path) -> None:
    """The inner shell starts a process that holds the memory, and ends at once."""
    grown = "import time; block = bytearray([49]) * (64 << 20); time.sleep(1.5)"
    script = f'sh -c \'"{sys.executable}" -c "{grown}" & echo $!\'; sleep 2'
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


def test_a_command_that_cannot_start_is_an_error(modicum: Path, tmp_path: Path) -> None:
    done = run(modicum, "watch", "--json", "--", tmp_path / "nothing-here")
    assert (done.code, done.error["category"]) == (13, "IO")
    assert "nothing-here" in done.error["message"]
    assert failure(modicum, 2, "watch")["category"] == "USAGE"


def test_a_process_that_starts_a_program_counts_once(modicum: Path, tmp_path: Path) -> None:
    """Until its exec a child of posix_spawn runs in its parent's memory. Here it opens a FIFO
    before, which waits for a writer."""
    script = """
import os, subprocess, sys, time
block = bytearray(200 << 20)
time.sleep(0.3)
os.mkfifo(sys.argv[1])
subprocess.Popen(["sh", "-c", 'sleep 0.5; : >"$0"', sys.argv[1]])
opened = (os.POSIX_SPAWN_OPEN, 0, sys.argv[1], os.O_RDONLY, 0)
child = os.posix_spawn("/bin/true", ["true"], os.environ, file_actions=[opened])
os.waitpid(child, 0)
"""
    fifo = tmp_path / "fifo"
    done = run(modicum, "watch", "--json", "--", sys.executable, "-c", script, fifo)
    assert done.code == 0, done.stderr
    assert 200 << 20 < done.json["peak_bytes"] < 300 << 20
    assert done.json["cow_duplicate_bytes"] < 50 << 20


def test_a_file_that_cannot_be_written_at_the_end_costs_only_itself(
    modicum: Path, tmp_path: Path
) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    trace = tmp_path / "run.trace.json"
    words = ["watch", "--json", "--trace", trace, "--report", gone / "run.html", "--"]
    done = run(modicum, *words, "sh", "-c", f"rmdir {gone}; exit 3")
    assert (done.code, done.json["exit_code"]) == (13, 3)
    assert done.stderr.startswith("modicum: IO: ") and "run.html" in done.stderr
    assert json.loads(trace.read_text())["traceEvents"]
    gone.mkdir()
    words = ["watch", "--trace", gone / "run.json", "--report", gone / "run.html", "--"]
    done = run(modicum, *words, "rmdir", gone)
    assert done.code == 13 and "peak" in done.stderr
    assert "run.json" in done.stderr and "run.html" in done.stderr


def node_waits_s() -> float | None:
    """The seconds in which some process of the node waited for memory, since the boot; None if the
    kernel has no pressure figures."""
    try:
        lines = Path("/proc/pressure/memory").read_text().splitlines()
    except OSError:
        return None
    return int(lines[0].rsplit("total=", 1)[1]) / 1e6


def test_pressure_is_that_of_the_run(modicum: Path) -> None:
    before_s = node_waits_s()
    pressure = run(modicum, "watch", "--json", "--", "sleep", "0.1").json["pressure"]
    after_s = node_waits_s()
    if before_s is None or after_s is None:
        assert pressure is None
        return
    assert 0 <= pressure["full_s"] <= pressure["some_s"]
    if pressure["source"] == "node":
        assert pressure["some_s"] <= after_s - before_s
    else:
        assert pressure["source"].startswith("cgroup v2 ")


def test_huge_pages_are_those_of_the_process(modicum: Path) -> None:
    """`watch` reads them when memory has grown and is steady, so the script sleeps."""
    script = f"""
import mmap, time
block = mmap.mmap(-1, {64 << 20}, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
block.madvise(mmap.MADV_HUGEPAGE)
for at in range(0, len(block), 4096): block[at] = 1
time.sleep(1.5)
lines = open("/proc/self/smaps_rollup").read().splitlines()
print(next((line.split()[1] for line in lines if line.startswith("AnonHugePages")), "0"))
"""
    done = run(modicum, "watch", "--json", "--", sys.executable, "-c", script)
    assert done.code == 0, done.stderr
    most = max(one["huge_page_bytes"] or 0 for one in done.json["processes"])
    assert most == int(done.stderr) * 1024


def why_no_log() -> str:
    """Why the kernel's log cannot be read; empty if it can."""
    try:
        os.close(os.open("/dev/kmsg", os.O_RDONLY | os.O_NONBLOCK))
    except OSError as error:
        return f"/dev/kmsg can't be read: {error}"
    return ""


def killed_at(limit: int, modicum: Path, *script: str) -> tuple[int, dict[str, Any], str]:
    """Runs a script under `watch --limit`. Returns the pid of the process that grows, `killed` of
    the document, and the paragraph on stderr that explains the kill."""
    if reason := why_no_cage():
        pytest.skip(reason)
    words = [modicum, "watch", "--json", "--limit", limit, "--", sys.executable, "-c", *script]
    done = subprocess.run(list(map(str, words)), capture_output=True, text=True, timeout=60)
    grown, paragraph = done.stderr.split("\n", 1)
    assert done.returncode == 3, done.stderr
    return int(grown), json.loads(done.stdout)["killed"], paragraph


@pytest.mark.alone
def test_a_kill_of_a_short_process_is_named(modicum: Path) -> None:
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
def test_the_killed_one_of_several_ranks_is_named(modicum: Path, script: str, times: int) -> None:
    """The other ranks hold memory, too, but do not grow."""
    for _ in range(times):
        grown, killed, paragraph = killed_at(400 << 20, modicum, RANKS, script)
        assert (killed["pid"], killed["rank"]) == (grown, 1), killed
        assert killed["grew"]["pid"] == grown and killed["grew"]["bytes"] > 0, killed
        assert 200 << 20 < killed["held_bytes"] < 400 << 20, killed
        assert killed["tree_held_bytes"] > killed["held_bytes"] + (100 << 20), killed
        assert f"pid {grown}" in paragraph and "would need a limit of" in paragraph, paragraph


@pytest.mark.alone
@pytest.mark.parametrize("times", (1, pytest.param(20, marks=pytest.mark.soak)))
def test_the_killed_one_of_forked_workers_is_named(modicum: Path, times: int) -> None:
    """A child of a worker grows. The trainer and both workers have the same name."""
    for _ in range(times):
        grown, killed, paragraph = killed_at(400 << 20, modicum, FORKED_WORKERS)
        assert (killed["pid"], killed["rank"]) == (grown, None), killed
        assert killed["grew"]["pid"] == grown and killed["grew"]["bytes"] > 0, killed
        assert killed["grew"]["owner"] == "anonymous", killed
        assert f"pid {grown}" in paragraph, paragraph
