"""Saves in which one system call after the other fails, and saves that are killed.

Must fail for these mutants: an error that is swallowed, or has another category; EINTR that is an
error; a short write that counts as complete; a step that is visible before it is complete; an old
step that is changed; files of dead saves that are kept, or of living ones that are removed.
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

TRAINED = ("--optimizer", "adamw:fp32-split", "--steps", 1, "--ranks", 2, "--shard-dim", 1)
"""Ranks that write divided rows together."""
FAULTS = {
    "EIO": (FAILS, errno.EIO),
    "ENOSPC": (FAILS, errno.ENOSPC),
    "EDQUOT": (FAILS, errno.EDQUOT),
    "EINTR": (FAILS, errno.EINTR),
    "short": (SHORT, 0),
}
CODES = {"EIO": (13, "IO"), "ENOSPC": (14, "NOSPACE"), "EDQUOT": (14, "NOSPACE")}
SAMPLE = 10  # calls for each fault


@pytest.fixture(scope="module")
def moe(modicum: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("save") / "moe"
    run_json(modicum, "synth", directory, "--arch", "tiny-moe", "--shard-size", 1500)
    return directory


@pytest.fixture(scope="module")
def faulty(tmp_path_factory: pytest.TempPathFactory) -> FaultyFiles:
    return FaultyFiles(tmp_path_factory.mktemp("faulty"))


def bytes_of(directory: Path) -> dict[str, bytes]:
    """The files below a directory."""
    files = [path for path in directory.rglob("*") if path.is_file()]
    return {str(path.relative_to(directory)): path.read_bytes() for path in files}


def calls_to_try(faulty: FaultyFiles, modicum: Path, moe: Path, root: Path, how: tuple[int, int]):
    """The number of calls of a save that can have the fault."""
    words = ("save", moe, root, "--step", 999_999, *TRAINED)
    done, hit = faulty.run(root, NEVER, how, modicum, *words)
    assert done.code == 0, done.stderr
    shutil.rmtree(root / "step-999999")
    return hit.calls


@pytest.mark.parametrize("sample", (SAMPLE, pytest.param(None, marks=pytest.mark.soak)))
@pytest.mark.parametrize("fault", FAULTS)
def test_failing_calls(
    modicum: Path, moe: Path, tmp_path: Path, faulty: FaultyFiles, fault: str, sample: int | None
) -> None:
    """The fault hits each call of a save in turn, or a sample of them."""
    root = tmp_path / "root"
    run_json(modicum, "save", moe, root, "--step", 1, *TRAINED)
    old = bytes_of(root / "step-1")
    total = calls_to_try(faulty, modicum, moe, root, FAULTS[fault])
    assert total > 5
    places = range(1, total + 1)
    if sample is not None:
        places = sorted(random.Random(fault).sample(places, min(sample, total)))
    hits = 0
    for step, at in enumerate(places, start=2):
        words = ("save", moe, root, "--step", step, *TRAINED, "--json")
        done, hit = faulty.run(root, at, FAULTS[fault], modicum, *words)
        told = (at, hit, done)
        hits += bool(hit.call)
        assert bytes_of(root / "step-1") == old, told
        saved = root / f"step-{step}"
        if done.code == 0:
            assert saved.exists(), told
        else:
            assert fault in CODES, told
            code, category = CODES[fault]
            assert (done.code, done.error["category"]) == (code, category), told
            assert fault in done.stderr and done.error["file"], told
            # Of a step that is visible only the name may not be durable.
            assert not saved.exists() or hit.call in ("open", "fsync"), told
        assert run(modicum, "verify", root, "-q").code == 0, told
        if saved.exists():
            shutil.rmtree(saved)
    assert hits > len(places) // 2  # how ranks share the work varies a little
    run_json(modicum, "save", moe, root, "--step", 10_000, *TRAINED)
    assert sorted(path.name for path in root.iterdir()) == ["latest", "step-1", "step-10000"]


# ---- kills


def assert_whole(step: Path, first: dict[str, bytes]) -> None:
    """Asserts that the first step is unchanged, and that COMMIT fits manifest.json by length and
    uuid."""
    found = bytes_of(step)
    commit = json.loads(found.pop("COMMIT"))
    manifest = found.pop("manifest.json")
    assert commit["manifest_bytes"] == len(manifest)
    assert commit["uuid"] == json.loads(manifest)["uuid"]
    assert found == first


def victim_of(process: subprocess.Popen[bytes], dice: random.Random) -> int:
    """The process to kill: the launcher or, in one of four cases, one of its ranks."""
    ranks = children_of(process.pid)
    return dice.choice(ranks) if ranks and dice.random() < 0.25 else process.pid


def batches(steps: Iterator[int], kills: int, at_once: int) -> Iterator[list[int]]:
    for _ in range(kills // at_once):
        yield list(itertools.islice(steps, at_once))


@pytest.mark.parametrize("kills", (300, pytest.param(1000, marks=pytest.mark.soak)))
def test_killed_saves_leave_an_intact_step(
    modicum: Path, moe: Path, tmp_path: Path, kills: int
) -> None:
    """Four saves run at a time into one root, two of them with divided rows. Each save, or one of
    its ranks, is killed at a random moment."""
    root = tmp_path / "root"
    begin = time.monotonic()
    run_json(modicum, "save", moe, root, "--step", 1, "--ranks", 2)
    whole_s = 2 * (time.monotonic() - begin)
    first = bytes_of(root / "step-1")
    del first["COMMIT"], first["manifest.json"]
    dice = random.Random(11)
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
        due = sorted((time.monotonic() + dice.uniform(0, whole_s), i) for i in range(4))
        for moment, i in due:
            time.sleep(max(0, moment - time.monotonic()))
            with contextlib.suppress(ProcessLookupError):
                os.kill(victim_of(running[i], dice), signal.SIGKILL)
        codes = dict(zip(steps, [process.wait(timeout=60) for process in running], strict=True))
        cut_short += sum(code != 0 for code in codes.values())
        assert set(codes.values()) <= {0, -signal.SIGKILL, 17}, codes
        visible = {int(path.name[5:]) for path in root.glob("step-*")}
        assert visible <= {1, *steps}
        assert visible >= {1, *(step for step, code in codes.items() if code == 0)}
        for step in visible:
            assert_whole(root / f"step-{step}", first)
        for step in visible - {1}:
            shutil.rmtree(root / f"step-{step}")
    assert cut_short > kills // 10, f"{cut_short} of {kills} saves were cut short"
    run_json(modicum, "save", moe, root, "--step", 100_000, "--ranks", 2)
    assert sorted(path.name for path in root.iterdir()) == ["latest", "step-1", "step-100000"]
    assert run_json(modicum, "verify", root)["ok"]
