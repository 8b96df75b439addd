"""Saves in each of which one system call fails, and saves that are killed.

Catches: an error is swallowed, or has another category; EINTR is an error; a short write counts as
complete; a checkpoint is visible before it is complete; an old checkpoint is changed; files of dead
saves are kept, or those of living ones removed.
"""

import contextlib
import errno
import itertools
import json
import os
import random
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from faulty_files import FAILS, NEVER, SHORT, FaultyFiles
from program import children_of, run, run_json

# With shards of dim 1 both ranks have parts of each row, which one rank gathers and writes.
TRAINED = ("--optimizer", "adamw:fp32-split", "--steps", 1, "--ranks", 2, "--shard-dim", 1)
# By name: what happens to a call, and the errno if it fails.
FAULTS = {
    "EIO": (FAILS, errno.EIO),
    "ENOSPC": (FAILS, errno.ENOSPC),
    "EDQUOT": (FAILS, errno.EDQUOT),
    "EINTR": (FAILS, errno.EINTR),
    "short": (SHORT, 0),
}
# The exit code and the category of the faults that a save does not survive.
CODES = {"EIO": (13, "IO"), "ENOSPC": (14, "NOSPACE"), "EDQUOT": (14, "NOSPACE")}
SAMPLE = 10  # calls that are hit, for each fault
# modicum/cli/faults_test.cc has EIO and ENOSPC at every call of the FileSystem.
SAMPLED = ("EDQUOT", "EINTR", "short")


@pytest.fixture(scope="module")
def moe(modicum: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("save") / "moe"
    run_json(modicum, "synth", directory, "--arch", "tiny-moe", "--shard-size", 1500)
    return directory


@pytest.fixture(scope="module")
def faulty(tmp_path_factory: pytest.TempPathFactory) -> FaultyFiles:
    return FaultyFiles(tmp_path_factory.mktemp("faulty"))


def bytes_of(directory: Path) -> dict[str, bytes]:
    """The content of all files below a directory, by relative path."""
    files = [path for path in directory.rglob("*") if path.is_file()]
    return {str(path.relative_to(directory)): path.read_bytes() for path in files}


def calls_of_a_save(
    faulty: FaultyFiles, modicum: Path, moe: Path, root: Path, how: tuple[int, int]
) -> int:
    """The number of a save's system calls that can have the fault `how`, one of FAULTS."""
    words = ("save", moe, root, "--step", 999_999, *TRAINED)
    done, hit = faulty.run(root, NEVER, how, modicum, *words)
    assert done.code == 0, done.stderr
    shutil.rmtree(root / "step-999999")
    return hit.calls


@pytest.mark.parametrize(
    ("fault", "sample"),
    [
        *((fault, SAMPLE) for fault in SAMPLED),
        *(pytest.param(fault, None, marks=pytest.mark.soak) for fault in FAULTS),
    ],
)
def test_a_failing_call_never_damages_a_checkpoint(
    modicum: Path, moe: Path, tmp_path: Path, faulty: FaultyFiles, fault: str, sample: int | None
) -> None:
    """The fault hits each call of a save in turn, or a sample of them. The save succeeds, or fails
    with the right error; an older checkpoint is unchanged, and no visible checkpoint is damaged."""
    root = tmp_path / "root"
    run_json(modicum, "save", moe, root, "--step", 1, *TRAINED)
    old = bytes_of(root / "step-1")
    total = calls_of_a_save(faulty, modicum, moe, root, FAULTS[fault])
    assert total > 5
    calls = range(1, total + 1)
    if sample is not None:
        calls = sorted(random.Random(fault).sample(calls, min(sample, total)))
    hits = 0
    for step, at in enumerate(calls, start=2):
        words = ("save", moe, root, "--step", step, *TRAINED, "--json")
        done, hit = faulty.run(root, at, FAULTS[fault], modicum, *words)
        case = (at, hit, done)
        hits += bool(hit.call)
        assert bytes_of(root / "step-1") == old, case
        saved = root / f"step-{step}"
        if done.code == 0:
            assert saved.exists() and json.loads(done.stdout)["durable"], case
        else:
            assert fault in CODES, case
            code, category = CODES[fault]
            assert (done.code, done.error["category"]) == (code, category), case
            assert fault in done.stderr and done.error["file"], case
            assert not saved.exists(), case
        assert run(modicum, "verify", root, "-q").code == 0, case
        if saved.exists():
            shutil.rmtree(saved)
    assert hits > len(calls) // 2  # how ranks share the work varies, so a save may make fewer calls
    run_json(modicum, "save", moe, root, "--step", 10_000, *TRAINED)
    assert sorted(path.name for path in root.iterdir()) == ["latest", "step-1", "step-10000"]


def test_a_failed_write_back_is_not_swallowed(modicum: Path, tmp_path: Path) -> None:
    """Linux reports a failed write-back once: a later fsync succeeds. strace makes the first call
    fail that waits for one, which is early in a file of 40 MB."""
    if shutil.which("strace") is None:
        pytest.skip("strace is not installed")
    source, root, trace = tmp_path / "source", tmp_path / "root", tmp_path / "trace"
    run_json(modicum, "synth", source, "--arch", "qwen3-0.6b", "--layers", 1, "--sparse")
    wait = "sync_file_range:error=ENOSPC:when=3"
    strace = ("strace", "-f", "-o", trace, "-e", "trace=sync_file_range", "-e", f"inject={wait}")
    for words in (("save", source, root, "--step", 1), ("convert", source, root / "OUT")):
        done = run(Path("strace"), *strace[1:], modicum, *words, "--json")
        assert "INJECTED" in trace.read_text(), done.stderr
        assert (done.code, done.error["category"]) == (14, "NOSPACE"), done.stderr
        assert done.error["file"] == "model.safetensors"
        assert not list(root.glob("step-*")) and not (root / "OUT").exists()


# ---- kills


def assert_complete(step: Path, first: dict[str, bytes]) -> None:
    """Asserts that a checkpoint has the files of the first one, and that its COMMIT has the length
    and the uuid of its manifest.json."""
    found = bytes_of(step)
    commit = json.loads(found.pop("COMMIT"))
    manifest = found.pop("manifest.json")
    assert commit["manifest_bytes"] == len(manifest)
    assert commit["uuid"] == json.loads(manifest)["uuid"]
    assert found == first


def victim_of(process: subprocess.Popen[bytes], rng: random.Random) -> int:
    """The pid to kill: that of the launcher or, in a quarter of all cases, of one of its ranks."""
    ranks = children_of(process.pid)
    return rng.choice(ranks) if ranks and rng.random() < 0.25 else process.pid


def batches(steps: Iterator[int], kills: int, at_once: int) -> Iterator[list[int]]:
    """The numbers of `at_once` steps at a time, for `kills` saves in all."""
    for _ in range(kills // at_once):
        yield list(itertools.islice(steps, at_once))


@pytest.mark.parametrize("kills", (60, pytest.param(1000, marks=pytest.mark.soak)))
def test_killed_saves_leave_an_intact_checkpoint(
    modicum: Path, moe: Path, tmp_path: Path, kills: int
) -> None:
    """Four saves at a time write to one root, two of them with shards of dim 1. Each of them, or
    one of its ranks, is killed at a random moment."""
    root = tmp_path / "root"
    begin = time.monotonic()
    run_json(modicum, "save", moe, root, "--step", 1, "--ranks", 2)
    whole_s = 2 * (time.monotonic() - begin)  # four at a time take longer
    first = bytes_of(root / "step-1")
    del first["COMMIT"], first["manifest.json"]  # which have uuids
    rng = random.Random(11)
    cut_short = 0
    for steps in batches(itertools.count(2), kills, 4):
        words = ["save", moe, root, "--ranks", 2, "--shard-dim"]
        running = [
            subprocess.Popen(
                list(map(str, (modicum, *words, step % 2, "--step", step))),
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )
            for step in steps
        ]
        kill_times_s = sorted((time.monotonic() + rng.uniform(0, whole_s), i) for i in range(4))
        for at_s, i in kill_times_s:
            time.sleep(max(0, at_s - time.monotonic()))
            with contextlib.suppress(ProcessLookupError):
                os.kill(victim_of(running[i], rng), signal.SIGKILL)
        codes = dict(zip(steps, [process.wait(timeout=60) for process in running], strict=True))
        cut_short += sum(code != 0 for code in codes.values())
        assert set(codes.values()) <= {0, -signal.SIGKILL, 17}, codes
        visible = {int(path.name[5:]) for path in root.glob("step-*")}
        assert visible <= {1, *steps}
        assert visible >= {1, *(step for step, code in codes.items() if code == 0)}
        for step in visible:
            assert_complete(root / f"step-{step}", first)
        for step in visible - {1}:
            shutil.rmtree(root / f"step-{step}")
    assert cut_short > kills // 10, f"{cut_short} of {kills} saves were cut short"
    run_json(modicum, "save", moe, root, "--step", 100_000, "--ranks", 2)
    assert sorted(path.name for path in root.iterdir()) == ["latest", "step-1", "step-100000"]
    assert run_json(modicum, "verify", root)["ok"]
