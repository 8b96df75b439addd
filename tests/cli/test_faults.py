"""External faults while ranks load: killed, stopped and interrupted processes, failing reads.

Catches: the launcher waits for a dead rank; a stopped rank is reported as stalled, or not noticed;
ranks outlive their launcher; a rank is blamed for a signal to the whole process group; a launcher
ignores SIGINT and SIGTERM while it plans, forks or writes; EINTR is an error; EIO is retried; a
short read counts as complete.
"""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from clocks import WaitingClock
from program import STRATEGIES, Ended, children_of, run_json, tree_of

RANKS = 4
SOON_S = 5.0
DEADLINE_S = 60.0
STOP_S = 0.5  # how long a rank is stopped in the test of a short stop
TOLERATED_S = 1.5  # the launcher fails a rank that it has seen stopped for 2 s
TRIES = 4


@pytest.fixture(scope="module")
def clock() -> Iterator[WaitingClock]:
    with WaitingClock() as started:
        yield started


@pytest.fixture(scope="module")
def large(modicum: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A sparse model whose load takes long enough to be hit by a fault."""
    directory = tmp_path_factory.mktemp("faults") / "large"
    run_json(modicum, "synth", directory, "--arch", "qwen2.5-0.5b", "--sparse")
    return directory


@pytest.fixture(scope="module")
def small(modicum: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of several files whose reads can be made to fail one by one."""
    directory = tmp_path_factory.mktemp("faults") / "small"
    run_json(modicum, "synth", directory, "--arch", "tiny-moe", "--shard-size", 1000)
    return directory


def until(claim: Callable[[], bool], what: str, within_s: float = DEADLINE_S) -> None:
    """Waits until a condition holds; `what` says which, for the error."""
    begin = time.monotonic()
    while not claim():
        assert time.monotonic() - begin < within_s, f"not within {within_s} s: {what}"
        time.sleep(0.002)


def name_of(pid: int) -> str:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/comm").read_text().strip()
    return ""


def is_running(pid: int) -> bool:
    """Whether a process exists and is not a zombie."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return stat.rsplit(")", 1)[1].split()[0] not in ("Z", "X")


class Loading:
    """A running load of four ranks. `ranks` has their pids by rank, once `has_ranks` is true."""

    def __init__(self, clock: WaitingClock, modicum: Path, directory: Path, *flags: object) -> None:
        self.clock = clock
        words = (modicum, "load", directory, "--ranks", RANKS, "--json", *flags)
        self.process = subprocess.Popen(
            [str(word) for word in words],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        self.ranks: list[int] = []

    def has_ranks(self) -> bool:
        """Whether all rank processes exist and have their names."""
        assert self.process.poll() is None, f"ended too early: {self.process.communicate()}"
        named = {name_of(pid): pid for pid in children_of(self.process.pid)}
        wanted = [f"modicum-rank-{rank}" for rank in range(RANKS)]
        self.ranks = [named[name] for name in wanted if name in named]
        return len(self.ranks) == RANKS

    def end(self, within_s: float = DEADLINE_S) -> Ended:
        """Waits for the end. Asserts that it comes in time and that no rank process is left."""
        begin_s = time.monotonic()
        out, err = self.process.communicate(timeout=4 * DEADLINE_S)
        assert self.clock.seconds(begin_s) <= within_s
        left = [pid for pid in self.ranks if is_running(pid)]
        assert not left, f"left behind: {left}"
        return Ended(self.process.returncode, out, err)

    def clean_up(self) -> None:
        """Kills processes that a failed test left."""
        for pid in [self.process.pid, *self.ranks]:
            with contextlib.suppress(ProcessLookupError):
                if is_running(pid):
                    os.kill(pid, signal.SIGKILL)
        self.process.wait()


@pytest.fixture
def loading(clock: WaitingClock, modicum: Path, large: Path) -> Iterator[Callable[..., Loading]]:
    """Starts loads, and kills those that still run at the end."""
    begun: list[Loading] = []

    def start(*flags: object) -> Loading:
        one = Loading(clock, modicum, large, "--check", "values", *flags)
        begun.append(one)
        until(one.has_ranks, "four rank processes that have named themselves")
        return one

    yield start
    for one in begun:
        one.clean_up()


def end_after(
    loading: Callable[..., Loading], fault: Callable[[Loading], None], *flags: object
) -> tuple[Loading, Ended]:
    """Starts a load, causes the fault, and waits for the end. If the load has succeeded, because it
    ended before the fault, tries again, `TRIES` times in all."""
    for _ in range(TRIES):
        one = loading(*flags)
        with contextlib.suppress(ProcessLookupError):
            fault(one)
        done = one.end(SOON_S)
        if done.code != 0:
            break
    return one, done


def signal_to(rank: int, fault: signal.Signals) -> Callable[[Loading], None]:
    """A fault for `end_after`."""
    return lambda one: os.kill(one.ranks[rank], fault)


def assert_blames(done: Ended, rank: int, pid: int, *causes: str) -> None:
    """Asserts that JSON and stderr name this rank and its pid, and stderr one of the causes."""
    assert done.code == 17, (done.code, done.stderr)
    assert done.error["category"] == "PEER" and done.error["code"] == 17
    assert done.error["culprit_rank"] == rank
    assert done.error["culprit_pid"] == pid
    (line,) = [line for line in done.stderr.splitlines() if f"rank {rank}" in line]
    assert str(pid) in line
    assert any(cause in line for cause in causes), line


# ---- processes


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("rank", (0, 2))
def test_a_killed_rank_is_blamed(loading, strategy: str, rank: int) -> None:
    one, done = end_after(loading, signal_to(rank, signal.SIGKILL), "--strategy", strategy)
    assert_blames(done, rank, one.ranks[rank], "signal 9", "Killed", "SIGKILL")


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_stopped_rank_is_blamed(loading, strategy: str) -> None:
    one, done = end_after(loading, signal_to(1, signal.SIGSTOP), "--strategy", strategy)
    assert_blames(done, 1, one.ranks[1], "stopped")


def test_a_short_stop_is_tolerated(loading) -> None:
    """On a busy machine a stop may last longer than requested, so it is measured, and repeated if
    the launcher need not have tolerated it."""
    stops_s = []
    for _ in range(TRIES):
        one = loading()
        begin_s = time.monotonic()
        os.kill(one.ranks[3], signal.SIGSTOP)
        time.sleep(STOP_S)
        is_loading = one.process.poll() is None
        with contextlib.suppress(ProcessLookupError):
            os.kill(one.ranks[3], signal.SIGCONT)
        stops_s.append(time.monotonic() - begin_s)
        if stops_s[-1] < TOLERATED_S:
            assert is_loading
            done = one.end()
            assert done.code == 0, done.stderr
            assert done.json["check"] == "ok"
            return
        one.clean_up()
    pytest.fail(f"too busy a machine: stops of {STOP_S} s took {stops_s}, not < {TOLERATED_S} s")


@pytest.mark.parametrize("fault", [signal.SIGSEGV, signal.SIGTERM])
def test_a_rank_that_dies_of_another_signal_is_blamed(loading, fault: signal.Signals) -> None:
    one, done = end_after(loading, signal_to(0, fault))
    assert_blames(done, 0, one.ranks[0], f"signal {fault.value}")


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_ranks_of_a_killed_launcher_end(loading, strategy: str) -> None:
    one = loading("--strategy", strategy)
    os.kill(one.process.pid, signal.SIGKILL)
    begin_s = time.monotonic()
    until(lambda: not any(map(is_running, one.ranks)), "no rank left")
    assert one.clock.seconds(begin_s) <= SOON_S
    one.process.communicate()
    assert one.process.returncode == -signal.SIGKILL


@pytest.mark.parametrize(("sent", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 21)])
def test_a_signal_to_the_launcher_ends_the_load(loading, sent: signal.Signals, code: int) -> None:
    _, done = end_after(loading, lambda one: one.process.send_signal(sent))
    assert done.code == code, done.stderr
    assert done.error["code"] == code


@pytest.mark.parametrize(("sent", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 21)])
@pytest.mark.parametrize("times", (20, pytest.param(100, marks=pytest.mark.soak)))
def test_a_signal_to_the_process_group_blames_no_rank(
    loading, sent: signal.Signals, code: int, times: int
) -> None:
    """scancel, systemd and timeout send SIGTERM to every process of a job: a rank that dies of the
    signal is not the cause of the failure."""

    def all_at_once(one: Loading) -> None:
        os.killpg(one.process.pid, sent)

    def ranks_long_before_the_launcher(one: Loading) -> None:
        for pid in one.ranks:
            os.kill(pid, sent)
        time.sleep(0.05)
        one.process.send_signal(sent)

    for turn in range(times):
        fault = (all_at_once, ranks_long_before_the_launcher)[turn % 2]
        _, done = end_after(loading, fault)
        assert done.code == code, (turn, done.stderr)
        assert done.error["code"] == code
        assert "culprit_rank" not in done.error and "culprit_pid" not in done.error


@pytest.mark.parametrize(("sent", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 21)])
def test_a_signal_ends_a_launcher_without_ranks(
    modicum: Path, tmp_path: Path, sent: signal.Signals, code: int
) -> None:
    """The signal arrives while `plan` plans for very many ranks, and while `synth` writes."""
    directory = tmp_path / "model"
    run_json(modicum, "synth", directory, "--arch", "gpt2", "--sparse")
    out = tmp_path / "out"
    plan = ("plan", directory, "--ranks", 65536, "--layout", "tp-fsdp", "--mesh", "8192x8")
    for words in (plan, ("synth", out, "--arch", "qwen2.5-0.5b")):
        command = [modicum, *map(str, words), "--json"]
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        try:
            if words[0] == "synth":
                until(out.exists, "the output directory exists")
            else:
                stat = Path(f"/proc/{process.pid}/stat")
                # The 14th field, utime, counts ticks of 10 ms: by then `plan` is planning.
                until(
                    lambda: int(stat.read_text().rsplit(")", 1)[1].split()[11]) > 30,
                    "0.3 s of CPU time",
                )
            process.send_signal(sent)
            stdout, stderr = process.communicate(timeout=SOON_S)
        finally:
            process.kill()
        assert process.returncode == code, (words, stderr)
        assert json.loads(stdout)["error"]["code"] == code
        assert not out.exists()


def test_a_signal_ends_a_launcher_that_starts_very_many_ranks(modicum: Path, small: Path) -> None:
    """Ranks that are already started sleep until all are, which leaves the launcher CPU time to see
    the signal."""
    words = ("load", small, "--ranks", 5000, "--oversubscribe", "--budget", "none", "--json")
    process = subprocess.Popen(
        [modicum, *map(str, words)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        until(lambda: len(children_of(process.pid)) >= 40, "some ranks")
        process.terminate()
        stdout, stderr = process.communicate(timeout=SOON_S)
    finally:
        process.kill()
    assert process.returncode == 21, stderr
    assert json.loads(stdout)["error"]["category"] == "PREEMPTED"


def test_ranks_are_descendants_in_our_cgroup(loading) -> None:
    one = loading()
    own = Path("/proc/self/cgroup").read_text()
    assert set(one.ranks) <= set(tree_of(one.process.pid))
    assert {Path(f"/proc/{pid}/cgroup").read_text() for pid in one.ranks} == {own}
    assert one.end().code == 0


# ---- reads


@pytest.fixture(scope="module")
def can_inject() -> None:
    if shutil.which("strace") is None:
        pytest.skip("strace is not installed")
    probe = subprocess.run(["strace", "-e", "inject=none", "true"], capture_output=True, text=True)
    if "ptrace" in probe.stderr and probe.returncode != 0:
        pytest.skip(f"strace can't trace here: {probe.stderr.strip()}")


def inject(modicum: Path, directory: Path, file: str, fault: str, *flags: object) -> Ended:
    """Runs a load in which strace makes preads of one file fail. `fault` is strace's, such as
    "error=EIO:when=2": the second pread of each process. Asserts that a pread was hit."""
    trace = directory.parent / "trace"
    strace = ("strace", "-f", "-o", trace, "-P", directory / file)
    strace += ("-e", "trace=pread64", "-e", f"inject=pread64:{fault}")
    words = (*strace, modicum, "load", directory, "--json", *flags)
    done = subprocess.run(list(map(str, words)), capture_output=True, text=True, timeout=120)
    assert "INJECTED" in trace.read_text(), f"{fault} hit nothing of {file}"
    return Ended(done.returncode, done.stdout, done.stderr)


@pytest.mark.parametrize("when", (1, 3))
def test_a_failing_read_names_its_file(
    modicum: Path, small: Path, can_inject: None, when: int
) -> None:
    """The n-th read of a file by any process fails. The launcher reads a file twice, for its
    header: a later read is a rank's, for values. modicum/cli/faults_test.cc has every call and
    strategy."""
    file = sorted(file.name for file in small.glob("*.safetensors"))[-1]
    done = inject(modicum, small, file, f"error=EIO:when={when}", "--ranks", 2)
    assert done.code == 13, (done.code, done.stderr)
    assert done.error["category"] == "IO"
    assert done.error["file"] == file


def test_interrupted_reads_are_repeated(modicum: Path, small: Path, can_inject: None) -> None:
    right = run_json(modicum, "load", small, "--digest")["digest"]
    file = sorted(small.glob("*.safetensors"))[0].name
    for strategy in STRATEGIES:
        flags = ("--ranks", 3, "--strategy", strategy, "--digest", "--check", "values")
        done = inject(modicum, small, file, "error=EINTR:when=1+2", *flags)
        assert done.code == 0, done.stderr
        assert json.loads(done.stdout)["digest"] == right


def test_an_early_end_of_file_is_an_error(modicum: Path, small: Path, can_inject: None) -> None:
    """A read that returns 0 bytes means that the file was truncated, and is not retried."""
    file = sorted(small.glob("*.safetensors"))[0].name
    for when in (1, 3):
        done = inject(modicum, small, file, f"retval=0:when={when}", "--ranks", 2)
        assert done.code in (10, 13), (done.code, done.stderr)
        assert done.error["file"] == file
