"""Power cuts on real ext4 and xfs file systems: the power fails before a system call of a save (a
sample of the calls, or each in turn), with 2 and 4 ranks, and with the file system's log written or
lost. After the recovery every visible checkpoint is intact, and no checkpoint is
lost that was visible before the save or that the save has acknowledged by exit code 0.

Catches: a checkpoint is visible while its files are written.
"""

import random
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest
from disks import FLAGS, Disk, disk, why_no_disk
from faulty_files import CUT, NEVER, FaultyFiles
from program import run, run_json

CUTS = 8  # of the quick test
SOAK_CUTS = 1000  # of the soak test, for each file system, at least


@pytest.fixture(scope="module")
def moe(modicum: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("cuts") / "moe"
    run_json(modicum, "synth", directory, "--arch", "tiny-moe", "--shard-size", 1500)
    return directory


@pytest.fixture(scope="module")
def faulty(tmp_path_factory: pytest.TempPathFactory) -> FaultyFiles:
    return FaultyFiles(tmp_path_factory.mktemp("faulty"))


@dataclass
class Saving:
    """Saves checkpoints of one model to one file system. `step` is the number of the last save."""

    modicum: Path
    moe: Path
    faulty: FaultyFiles
    disk: Disk
    ranks: int
    step: int = 1

    @property
    def root(self) -> Path:
        return self.disk.directory / "root"

    def begin(self) -> int:
        """Saves two steps. Returns how many of the second save's system calls can be hit."""
        self.disk.mount()
        self.root.mkdir()
        self.save(NEVER, 0)
        self.step += 1
        calls = self.save(NEVER, 0)[1]
        subprocess.run(["sync"], check=True)
        self.disk.unmount()
        return calls

    def save(self, at: int, flags: int) -> tuple[int, int]:
        """Saves `step`. The power is cut before call `at`, in the way of `flags`, one of FLAGS.
        Returns the exit code and the number of calls."""
        words = ("save", self.moe, self.root, "--step", self.step, "--ranks", self.ranks)
        words += ("--optimizer", "adamw:fp32-split", "--steps", 1, "-q")
        done, hit = self.faulty.run(self.root, at, (CUT, flags), self.modicum, *words)
        assert hit.call != "no shutdown"  # the library's report that it could not cut the power
        return done.code, hit.calls

    def cut(self, at: int, flags: int) -> None:
        """Saves the next checkpoint, cuts the power before call `at` (after the save if it makes
        fewer calls), and checks the steps after the recovery."""
        self.disk.mount()
        for old in sorted(self.root.glob("step-*"))[:-2]:
            shutil.rmtree(old)
        subprocess.run(["sync", "-f", self.root], check=True)
        before = self.visible()
        self.step += 1
        code, calls = self.save(at, flags)
        if calls < at:
            assert code == 0
            self.disk.cut_power(flags)
        self.disk.unmount()
        self.disk.mount()
        after, case = self.visible(), (self.disk.kind, self.ranks, at, flags, code)
        verified = run(self.modicum, "verify", self.root, "--json")
        assert verified.code == 0, (case, verified.stdout)  # every visible checkpoint is intact
        assert after >= before, case  # no older checkpoint is lost
        assert code != 0 or self.step in after, case  # nor the new one, if it was acknowledged
        assert after <= before | {self.step}, case
        self.disk.unmount()

    def visible(self) -> set[int]:
        """The numbers of the steps."""
        return {int(path.name[5:]) for path in self.root.glob("step-*")}


def cut_all(saving: Saving, flags: list[int], most: int | None) -> int:
    """Cuts the power at every call, in each way of `flags`, or at a random sample of exactly `most`
    of these. Returns the number of cuts."""
    calls = saving.begin()
    cuts = [(at, flag) for flag in flags for at in range(1, calls + 2)]
    if most is not None:
        cuts = random.Random(calls).sample(cuts, most)
    for at, flag in cuts:
        saving.cut(at, flag)
    return len(cuts)


@pytest.mark.parametrize("kind", ("ext4", pytest.param("xfs", marks=pytest.mark.soak)))
def test_checkpoints_survive_power_cuts(
    modicum: Path, moe: Path, faulty: FaultyFiles, tmp_path: Path, kind: str
) -> None:
    if reason := why_no_disk(kind, tmp_path):
        pytest.skip(f"NO POWER WAS CUT: {reason}")
    with disk(kind, tmp_path) as mounted:
        saving = Saving(modicum, moe, faulty, mounted, ranks=2)
        assert cut_all(saving, list(FLAGS.values()), CUTS) == CUTS


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("kind", ("ext4", "xfs"))
def test_checkpoints_survive_a_power_cut_at_every_call(
    modicum: Path, moe: Path, faulty: FaultyFiles, tmp_path: Path, kind: str
) -> None:
    if reason := why_no_disk(kind, tmp_path):
        pytest.skip(f"NO POWER WAS CUT: {reason}")
    made = 0
    while made < SOAK_CUTS:
        for ranks in (2, 4):
            for flag in FLAGS.values():
                with disk(kind, tmp_path) as of:
                    made += cut_all(Saving(modicum, moe, faulty, of, ranks), [flag], None)
                print(f"{made} cuts after {kind}, {ranks} ranks, flag {flag}", flush=True)
