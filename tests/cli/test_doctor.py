"""`modicum doctor` on this machine, and on running programs whose memory is known.

Catches: `doctor --pid` shows its own limits and its own cgroup, or the launcher's instead of the
growing program's; a page counts as shared with a
child although one of the two has written it since the fork; children of a fork server are shown as
forks; malloc's arenas are not found.
"""

import contextlib
import os
import resource
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from cage import cage, why_no_cage
from program import failure, run, run_json

MIB = 1 << 20
SEVERITIES = ("info", "warning", "danger")

# Of 64 MiB that two children inherit, the parent writes 16 MiB again after the forks.
FORKS = """
import mmap, os, signal, sys
block = mmap.mmap(-1, 64 << 20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
block.write(b"x" * len(block))
children = []
for _ in range(2):
    child = os.fork()
    if child == 0:
        signal.pause()
    children.append(child)
block.seek(0)
block.write(b"y" * (16 << 20))
print(*children, flush=True)
sys.stdin.read()
for child in children:
    os.kill(child, signal.SIGKILL)
"""

# Starts three workers by the start method in argv[1].
WORKERS = """
import multiprocessing, sys, time
if __name__ == "__main__":
    context = multiprocessing.get_context(sys.argv[1])
    event = context.Event()
    workers = [context.Process(target=event.wait) for _ in range(3)]
    for worker in workers:
        worker.start()
    print(*(worker.pid for worker in workers), flush=True)
    sys.stdin.read()
    event.set()
    for worker in workers:
        worker.join()
"""

# Four threads hold 32 MiB each, in small blocks: glibc gives each thread its own arena.
ARENAS = """
import ctypes, sys, threading
libc = ctypes.CDLL(None)
libc.malloc.restype = ctypes.c_void_p
libc.malloc.argtypes = [ctypes.c_size_t]
done = threading.Barrier(5)
def hold():
    for _ in range(512):  # blocks below malloc's threshold for mmap
        ctypes.memset(libc.malloc(65536), 1, 65536)
    done.wait()
    end.wait()
end = threading.Event()
for _ in range(4):
    threading.Thread(target=hold, daemon=True).start()
done.wait()
print("ready", flush=True)
sys.stdin.read()
"""


@contextlib.contextmanager
def running(
    directory: Path, program: str, *words: str, **options: Any
) -> Iterator[tuple[int, list[str]]]:
    """Starts a Python program, and ends it by closing its stdin. Yields its pid, and the words of
    its first line once that is printed."""
    script = directory / "program.py"
    script.write_text(program)
    process = subprocess.Popen(
        [sys.executable, script, *words],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        **options,
    )
    assert process.stdin is not None and process.stdout is not None
    try:
        yield process.pid, process.stdout.readline().split()
    finally:
        process.stdin.close()
        process.wait(timeout=60)
        process.stdout.close()


def findings_of(document: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {finding["id"]: finding for finding in document["findings"]}


def limit_open_files() -> None:
    """Called in the child: at most 1000 open files, a limit that it could raise to 2000."""
    resource.setrlimit(resource.RLIMIT_NOFILE, (1000, 2000))


def number(path: str) -> int:
    return int(Path(path).read_text())


def test_findings_are_the_kernels_figures(modicum: Path) -> None:
    document = run_json(modicum, "doctor")
    assert set(document) == {"findings"}
    for finding in document["findings"]:
        assert finding["severity"] in SEVERITIES
        assert finding["summary"] and finding["advice"]
        assert "\n" not in finding["summary"] + finding["advice"]
    found = findings_of(document)
    assert found["max_map_count"]["value"] == number("/proc/sys/vm/max_map_count")
    assert found["overcommit"]["value"] == number("/proc/sys/vm/overcommit_memory")
    assert found["nofile"]["value"] == resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    soft = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    expected = "unlimited" if soft == resource.RLIM_INFINITY else soft
    assert found["memlock"]["value"] == expected
    shm = os.statvfs("/dev/shm")
    assert found["shm_size"]["limit_bytes"] == shm.f_blocks * shm.f_frsize
    setting = Path("/sys/kernel/mm/transparent_hugepage/enabled").read_text()
    assert f"[{found['transparent_huge_pages']['value']}]" in setting
    kib = dict(line.split()[:2] for line in Path("/proc/meminfo").read_text().splitlines())
    assert found["node_memory"]["limit_bytes"] == int(kib["MemTotal:"]) * 1024
    assert found["swap"]["limit_bytes"] == int(kib["SwapTotal:"]) * 1024


def test_the_text_gives_advice(modicum: Path) -> None:
    done = subprocess.run(
        [modicum, "doctor"], capture_output=True, text=True, timeout=60, preexec_fn=limit_open_files
    )
    assert done.returncode == 0
    head, _, *lines = done.stdout.splitlines()
    assert head.startswith("this machine: ") and "warning" in head
    at = lines.index("WARNING  nofile: at most 1000 open files per process")
    assert lines[at + 1].startswith("         -> ") and "ulimit -n 2000" in lines[at + 1]
    assert all(len(line) < 250 for line in lines)
    assert run(modicum, "doctor", "-q").stdout == ""
    assert run(modicum, "doctor", "-v").stdout.count(" -> ") == len(
        findings_of(run_json(modicum, "doctor"))
    )


def test_a_budget_above_the_free_memory_is_a_danger(modicum: Path) -> None:
    found = findings_of(run_json(modicum, "doctor", "--budget", "1MiB"))["budget"]
    assert found["severity"] == "info"
    found = findings_of(run_json(modicum, "doctor", "--budget", "1000TB"))["budget"]
    assert found["severity"] == "danger" and found["value"] == 10**15
    assert found["limit_bytes"] < 10**15


def shared_dirty(pid: int) -> int:
    """The dirty bytes of private mappings that another process maps, too, as the kernel counts
    them: pages that a fork shared and that no side has written since."""
    total, is_private = 0, False
    for line in Path(f"/proc/{pid}/smaps").read_text().splitlines():
        words = line.split()
        if not words[0].endswith(":"):
            is_private = words[1].endswith("p")
        elif is_private and words[0] == "Shared_Dirty:":
            total += int(words[1]) * 1024
    return total


def test_fork_exposure_is_what_children_may_still_copy(modicum: Path, tmp_path: Path) -> None:
    with running(tmp_path, FORKS) as (pid, children):
        document = run_json(modicum, "doctor", "--pid", pid, "--interval", 0)
        in_kernel = shared_dirty(pid)
    found = findings_of(document)
    exposed = document["fork_exposure_bytes"]
    assert document["pid"] == pid
    assert found["fork_exposure"]["value"] == exposed
    # 48 MiB that the parent has not written again, and pages of the interpreter.
    assert 48 * MIB <= exposed <= 64 * MIB
    assert abs(exposed - in_kernel) <= MIB
    assert 16 * MIB <= found["fork_copies"]["value"] <= 24 * MIB
    assert found["start_method"]["value"] == "fork"
    assert sorted(sharer["pid"] for sharer in document["sharers"]) == sorted(map(int, children))
    for sharer in document["sharers"]:
        assert sharer["ppid"] == pid
        assert 48 * MIB <= sharer["shared_bytes"] <= exposed


@pytest.mark.parametrize("method", ("fork", "spawn", "forkserver"))
def test_the_start_method_of_workers_is_found(modicum: Path, tmp_path: Path, method: str) -> None:
    with running(tmp_path, WORKERS, method) as (pid, workers):
        document = run_json(modicum, "doctor", "--pid", pid, "--interval", 0)
    assert findings_of(document)["start_method"]["value"] == method
    assert f"3 by {method}" in findings_of(document)["start_method"]["summary"]
    sharers = {sharer["pid"]: sharer["ppid"] for sharer in document["sharers"]}
    assert set(sharers) == (set() if method == "spawn" else set(map(int, workers)))
    assert (set(sharers.values()) == {pid}) is (method == "fork")


def test_arenas_of_malloc_are_found(modicum: Path, tmp_path: Path) -> None:
    clean = {name: value for name, value in os.environ.items() if "MALLOC" not in name}
    with running(tmp_path, ARENAS, env=clean) as (pid, _):
        many = findings_of(run_json(modicum, "doctor", "--pid", pid, "--interval", 0))
    with running(tmp_path, ARENAS, env={**clean, "MALLOC_ARENA_MAX": "1"}) as (pid, _):
        one = findings_of(run_json(modicum, "doctor", "--pid", pid, "--interval", 0))
    assert 128 * MIB <= many["malloc_arenas"]["value"] <= 140 * MIB
    assert "MALLOC_ARENA_MAX not set" in many["malloc_arenas"]["summary"]
    assert one["malloc_arenas"]["value"] == 0
    assert "at most 1 arena" in one["malloc_arenas"]["summary"]
    assert one["malloc_heap"]["value"] - many["malloc_heap"]["value"] >= 100 * MIB


GROWS = """
import select, sys
print(flush=True)
held = []
while not select.select([sys.stdin], [], [], 0.05)[0]:
    held.append(bytearray(b"x") * (4 << 20))
"""


def test_what_grows_is_found_between_two_readings(modicum: Path, tmp_path: Path) -> None:
    with running(tmp_path, GROWS) as (pid, _):
        document = run_json(modicum, "doctor", "--pid", pid, "--interval", 1)
    growth = document["growth"]
    assert growth["seconds"] >= 1
    assert growth["bytes_per_s"] == pytest.approx(growth["kinds"]["anonymous"], rel=0.1)
    assert 8 * MIB < growth["bytes_per_s"] < 90 * MIB
    found = findings_of(document)["growth"]
    assert found["value"] == pytest.approx(growth["bytes_per_s"], abs=2)
    assert f"(pid {pid}) grows: " in found["summary"] and "anonymous mappings" in found["summary"]
    (process,) = document["memory"]
    assert process["pid"] == pid and process["kinds"]["anonymous"] > 4 * MIB


def test_limits_are_those_of_the_process(modicum: Path, tmp_path: Path) -> None:
    with running(tmp_path, WORKERS, "fork", preexec_fn=limit_open_files) as (pid, _):
        found = findings_of(run_json(modicum, "doctor", "--pid", pid, "--interval", 0))
    assert found["nofile"]["limit_count"] == 1000
    assert 3 <= found["nofile"]["value"] < 100
    assert found["max_map_count"]["value"] > 20


def test_the_limit_is_that_of_the_cgroup_of_the_process(modicum: Path) -> None:
    if reason := why_no_cage():
        pytest.skip(reason)
    with cage(400 * MIB) as group:
        inside = group.start(modicum, "doctor", "--json")
        out, _ = inside.communicate(timeout=60)
        other = group.start("sleep", "60")
        try:
            outside = run(modicum, "doctor", "--pid", other.pid, "--interval", 0, "--json").stdout
        finally:
            other.kill()
            other.communicate(timeout=60)
    for text in (out, outside):
        assert f'"limit_bytes":{400 * MIB}' in text
        assert '"id":"cgroup_memory","value":"none"' not in text


def test_the_memory_left_is_that_of_the_process_that_grows(modicum: Path, tmp_path: Path) -> None:
    """`watch` itself is outside of the cgroup that it makes for --limit."""
    if reason := why_no_cage():
        pytest.skip(reason)
    launcher = f"""
import subprocess, sys
command = [{str(modicum)!r}, "watch", "-q", "--limit", "2GiB", "--"]
sys.exit(subprocess.run([*command, sys.executable, "-c", {GROWS!r}]).returncode)
"""
    with running(tmp_path, launcher) as (pid, _):
        found = findings_of(run_json(modicum, "doctor", "--pid", pid, "--interval", 1))
        resting = findings_of(run_json(modicum, "doctor", "--pid", pid, "--interval", 0))
    assert 1 << 30 < found["growth"]["limit_bytes"] < 2 << 30
    assert found["growth"]["severity"] == "danger"
    for findings in (found, resting):
        assert findings["cgroup_memory"]["limit_bytes"] == 2 << 30


def test_a_process_that_does_not_exist_is_an_error(modicum: Path) -> None:
    gone = subprocess.Popen(["true"])
    gone.wait()
    error = failure(modicum, 13, "doctor", "--pid", gone.pid)
    assert error["category"] == "IO"
    assert error["culprit_pid"] == gone.pid
    assert f"no process {gone.pid}" in error["message"]
    for wrong in ("0", "0x10", "3000000000", "python"):
        assert "--pid" in failure(modicum, 2, "doctor", "--pid", wrong)["message"]
