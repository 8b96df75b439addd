"""A job that is restarted where its newest saved checkpoint is damaged: `resume`
goes back to an older one, the job saves the damaged number again, and retention keeps intact
checkpoints.

Catches: a checkpoint whose values are wrong ends `resume ROOT`; an intact checkpoint is set aside;
a damaged one ends the save of its number; a checkpoint that can't be read counts as damaged.
"""

import os
import shutil
from pathlib import Path
from typing import Any

import pytest
from program import failure, run, run_json

TRAINED = ("--optimizer", "adamw:fp32", "--ranks", 2)


@pytest.fixture(scope="module")
def model(modicum: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("steps") / "model"
    run_json(modicum, "synth", directory, "--arch", "tiny-moe")
    return directory


def flip(path: Path) -> None:
    """Flips a bit of the last byte: in a data file it belongs to a value."""
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def names_in(root: Path) -> list[str]:
    return sorted(path.name for path in root.iterdir())


@pytest.mark.parametrize(
    "file", ["model.safetensors", "optimizer/model.safetensors", "config.json"]
)
def test_a_restarted_job_goes_on(modicum: Path, model: Path, tmp_path: Path, file: str) -> None:
    root = tmp_path / "root"
    step = root / "step-200"

    def resume() -> dict[str, Any]:
        document: dict[str, Any] = run_json(modicum, "resume", root, "--ranks", 2)
        return document

    def save(number: int) -> dict[str, Any]:
        words = ("--step", number, "--steps", 1, *TRAINED)
        document: dict[str, Any] = run_json(modicum, "save", model, root, *words)
        return document

    saved = [save(number) for number in (100, 200)]
    assert all(one["damaged"] == [] for one in saved)
    flip(step / file)
    error = failure(modicum, 12, "resume", step, "--ranks", 2)
    assert error["category"] == "INTEGRITY" and error["file"] == file
    resumed = resume()
    assert resumed["resumed"]["step"] == 100
    assert resumed["state_digest"] == saved[0]["state_digest"]
    (skipped,) = resumed["skipped"]
    assert skipped["step"] == 200 and Path(file).name in skipped["reason"]
    again = save(200)
    (damaged,) = again["damaged"]
    path = Path(damaged["path"])
    assert path.parent == root and path.name.startswith(".damaged-200-")
    assert damaged["step"] == 200 and Path(file).name in damaged["reason"]
    assert damaged["bytes"] == sum(of.stat().st_size for of in path.rglob("*") if of.is_file())
    assert any(path.name in warning for warning in again["warnings"])
    assert names_in(root) == [path.name, "latest", "step-100", "step-200"]
    verified = run_json(modicum, "verify", root)
    assert verified["ok"] and verified["damaged"] == again["damaged"]
    assert f"{path}: a save has set it aside; INTEGRITY" in run(modicum, "verify", root).stdout
    resumed = resume()
    assert (resumed["resumed"]["step"], resumed["skipped"]) == (200, [])


def test_no_checkpoint_of_a_root_passes(modicum: Path, model: Path, tmp_path: Path) -> None:
    root = tmp_path / "root"
    for number in (1, 2):
        run_json(modicum, "save", model, root, "--step", number)
        flip(root / f"step-{number}/model.safetensors")
    error = failure(modicum, 19, "resume", root)
    assert error["category"] == "UNCOMMITTED"
    assert "none of 2 checkpoints is intact; step-2: INTEGRITY" in error["message"]


def test_files_with_the_sums_of_ranks_are_an_unfinished_save(
    modicum: Path, model: Path, tmp_path: Path
) -> None:
    """A program of C++ was killed between hand_over_sums and complete_files."""
    saved = shutil.copytree(model, tmp_path / "saved")
    assert run_json(modicum, "verify", saved)["ok"]
    (saved / ".sums-00001").write_bytes(b"")
    error = failure(modicum, 19, "verify", saved)
    assert (error["category"], error["file"]) == ("UNCOMMITTED", "COMMIT")


def test_what_is_no_damaged_checkpoint_is_left_alone(
    modicum: Path, model: Path, tmp_path: Path
) -> None:
    """An intact checkpoint, a link to a damaged one, and a file."""
    root, other = tmp_path / "root", tmp_path / "other"
    run_json(modicum, "save", model, root, "--step", 1)
    run_json(modicum, "save", model, other, "--step", 2)
    flip(other / "step-2/model.safetensors")
    (root / "step-2").symlink_to(other / "step-2")
    (root / "step-3").write_text("a file")
    before = names_in(root)
    for number in (1, 2, 3):
        error = failure(modicum, 20, "save", model, root, "--step", number)
        assert error["category"] == "CONFLICT" and "saved already" in error["message"]
    assert names_in(root) == before


@pytest.mark.parametrize("file", ["model.safetensors", "config.json", "COMMIT"])
def test_a_checkpoint_that_cannot_be_read_is_not_damaged(
    modicum: Path, model: Path, tmp_path: Path, file: str
) -> None:
    """The first read of a file fails once, with EIO."""
    if shutil.which("strace") is None or run(Path("strace"), "-qq", "true").code:
        pytest.skip("strace can't trace here")
    root = tmp_path / "root"
    for number in (1, 2):
        run_json(modicum, "save", model, root, "--step", number)
    before = names_in(root)
    strace = ["-f", "-qq", "-o", os.devnull, "-P", root / "step-2" / file, "-e", "trace=pread64"]
    strace += ["-e", "inject=pread64:error=EIO:when=1", modicum]
    for words in (
        ("resume", root),
        ("save", model, root, "--step", 2),
    ):
        done = run(Path("strace"), *strace, *words)
        assert done.code == 13 and "IO: read failed: EIO" in done.stderr, (words, done)
    done = run(Path("strace"), *strace, "save", model, root, "--step", 3, "--keep", 2)
    assert done.code == 0, done
    if file == "COMMIT":  # at the beginning; when the new checkpoint is there, it can be read
        assert names_in(root) == [*(name for name in before if name != "step-1"), "step-3"]
    else:
        assert "old checkpoints could not be removed: IO" in done.stdout, done
        assert names_in(root)[:3] == before


def test_other_weights_in_a_checkpoint_damage_it(
    modicum: Path, model: Path, tmp_path: Path
) -> None:
    """With them no reader can tell which weights are the checkpoint's."""
    root = tmp_path / "root"
    for number in (1, 2):
        run_json(modicum, "save", model, root, "--step", number, "--shard-size", 300)
    shutil.copyfile(model / "model.safetensors", root / "step-2/model.safetensors")
    resumed = run_json(modicum, "resume", root)
    assert resumed["resumed"]["step"] == 1
    assert "INDEX.AMBIGUOUS" in resumed["skipped"][0]["reason"]


def test_retention_keeps_an_intact_checkpoint_instead_of_a_damaged_one(
    modicum: Path, model: Path, tmp_path: Path
) -> None:
    root = tmp_path / "root"
    for number in (1, 2):
        run_json(modicum, "save", model, root, "--step", number)
    flip(root / "step-2/config.json")
    run_json(modicum, "save", model, root, "--step", 3, "--keep", 2)
    assert names_in(root) == ["latest", "step-1", "step-2", "step-3"]
