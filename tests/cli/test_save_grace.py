"""`save --grace SECONDS`: after SIGTERM a save is finished if it can be in this time, else given up
without a trace. A preloaded library holds a write until the test has sent its signal, so that no
test depends on the speed of the disk.

Catches: a rank dies of the SIGTERM although its launcher finishes the save; a save goes on although
it cannot finish in time, or before its rate is known; the grace does not end; a later signal is
ignored; files of a save that was given up remain.
"""

import os
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest
from faulty_files import HELD, NEVER, FaultyFiles
from program import PATIENCE_S, Ended, failure, run_json

TRAINED = ("--optimizer", "adamw:fp32-split", "--steps", 1, "--ranks", 2)
AMPLE_S = 10_000  # more than any save of the small model takes


@pytest.fixture(scope="module")
def moe(modicum: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("grace") / "moe"
    run_json(modicum, "synth", directory, "--arch", "tiny-moe")
    return directory


@pytest.fixture(scope="module")
def faulty(tmp_path_factory: pytest.TempPathFactory) -> FaultyFiles:
    return FaultyFiles(tmp_path_factory.mktemp("faulty"))


@pytest.fixture(scope="module")
def writes(
    modicum: Path, moe: Path, faulty: FaultyFiles, tmp_path_factory: pytest.TempPathFactory
) -> int:
    """The number of write calls of a save."""
    root = tmp_path_factory.mktemp("counted") / "root"
    root.mkdir()
    done, hit = faulty.run(
        root, NEVER, (HELD, 0), modicum, "save", moe, root, "--step", 2, *TRAINED
    )
    assert done.code == 0, done.stderr
    return hit.calls


class Saving:
    """Saves step 2 into a root that has step 1. `before` has the files of the root, by path."""

    def __init__(self, modicum: Path, moe: Path, faulty: FaultyFiles, root: Path) -> None:
        self.modicum, self.moe, self.faulty, self.root = modicum, moe, faulty, root
        run_json(modicum, "save", moe, root, "--step", 1, *TRAINED)
        self.before = self.files()

    def files(self) -> dict[str, bytes]:
        found = [path for path in self.root.rglob("*") if path.is_file()]
        return {str(path.relative_to(self.root)): path.read_bytes() for path in found}

    def hold(self, at: int, *flags: object) -> subprocess.Popen[str]:
        """Starts the save. Returns when its `at`-th write is held."""
        words = ("save", self.moe, self.root, "--step", 2, *TRAINED, *flags, "--json")
        return self.faulty.hold(self.root, at, self.modicum, *words)

    def end(self, process: subprocess.Popen[str]) -> Ended:
        stdout, stderr = process.communicate(timeout=PATIENCE_S)
        return Ended(process.returncode, stdout, stderr)

    def assert_finished(self, done: Ended) -> None:
        assert done.code == 0, done
        assert done.json["preempted"] is True
        assert run_json(self.modicum, "verify", self.root)["ok"]
        assert sorted(path.name for path in self.root.iterdir()) == ["latest", "step-1", "step-2"]
        assert run_json(self.modicum, "resume", self.root)["resumed"]["step"] == 2

    def assert_given_up(self, done: Ended, code: int = 21) -> None:
        assert done.code == code, done
        assert done.error["category"] == {21: "PREEMPTED", 130: "CANCELLED"}[code]
        assert self.files() == self.before
        assert not [path.name for path in self.root.iterdir() if path.name.startswith(".")]


@pytest.fixture
def saving(modicum: Path, moe: Path, faulty: FaultyFiles, tmp_path: Path) -> Saving:
    return Saving(modicum, moe, faulty, tmp_path / "root")


def test_a_save_that_fits_into_the_grace_is_finished(saving: Saving, writes: int) -> None:
    for send in (os.kill, os.killpg):
        process = saving.hold(writes // 2, "--grace", AMPLE_S)
        send(process.pid, signal.SIGTERM)
        saving.faulty.release()
        saving.assert_finished(saving.end(process))
        shutil.rmtree(saving.root / "step-2")


def test_a_save_that_does_not_fit_is_given_up(saving: Saving, writes: int) -> None:
    """One second of the grace is reserved for the commit, so 0.9 s are too short for any save."""
    process = saving.hold(writes // 2, "--grace", 0.9)
    os.killpg(process.pid, signal.SIGTERM)
    saving.faulty.release()
    saving.assert_given_up(saving.end(process))


def test_a_save_without_a_known_rate_is_given_up(saving: Saving) -> None:
    """At the ranks' first write, of a header, no rate of writing is known. The launcher has written
    the owner's file before."""
    process = saving.hold(2, "--grace", AMPLE_S)
    os.killpg(process.pid, signal.SIGTERM)
    saving.assert_given_up(saving.end(process))


def test_without_a_grace_a_save_is_given_up(saving: Saving, writes: int) -> None:
    process = saving.hold(writes // 2)
    os.kill(process.pid, signal.SIGTERM)
    saving.assert_given_up(saving.end(process))


def test_a_save_is_given_up_when_its_grace_ends(saving: Saving, writes: int) -> None:
    """The held write is never released: the save is given up when its grace of 2 s ends."""
    process = saving.hold(writes // 2, "--grace", 2)
    os.kill(process.pid, signal.SIGTERM)
    saving.assert_given_up(saving.end(process))


def test_a_later_signal_ends_the_grace(saving: Saving, writes: int) -> None:
    """SIGTERMs of the first second count as one, so the later signal is repeated until the end."""
    for later, code in ((signal.SIGTERM, 21), (signal.SIGINT, 130)):
        process = saving.hold(writes // 2, "--grace", AMPLE_S)
        os.kill(process.pid, signal.SIGTERM)
        end = time.monotonic() + PATIENCE_S
        while process.poll() is None and time.monotonic() < end:
            time.sleep(0.1)
            os.kill(process.pid, later)
        saving.assert_given_up(saving.end(process), code)


def test_a_commit_is_finished_without_a_grace(saving: Saving, writes: int) -> None:
    """The signal arrives during the last write but one, that of COMMIT."""
    process = saving.hold(writes - 1)
    assert not (saving.root / "step-2").exists()
    os.kill(process.pid, signal.SIGTERM)
    saving.faulty.release()
    saving.assert_finished(saving.end(process))


def test_a_save_without_a_signal_is_not_preempted(modicum: Path, moe: Path, tmp_path: Path) -> None:
    words = ("save", moe, tmp_path / "root", "--step", 1)
    assert run_json(modicum, *words, "--grace", 1)["preempted"] is False
    for grace in ("0", "-1", "nan", "inf"):
        assert failure(modicum, 2, *words, "--grace", grace)["category"] == "USAGE"
