"""Symbolic links in paths. One in a path that the user gives leads to where the files are written,
and reports have the path as given. One that takes the place of a directory during a save or a
conversion is not followed: nothing is written, renamed or removed where it leads.
"""

import shutil
import subprocess
from pathlib import Path

import pytest
from faulty_files import FaultyFiles
from program import PATIENCE_S, Ended, run, run_json

TRAINED = ("--optimizer", "adamw:fp32", "--steps", 1)


@pytest.fixture(scope="module")
def moe(modicum: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("links") / "moe"
    run_json(modicum, "synth", directory, "--arch", "tiny-moe", "--shard-size", 1500)
    return directory


@pytest.fixture(scope="module")
def faulty(tmp_path_factory: pytest.TempPathFactory) -> FaultyFiles:
    return FaultyFiles(tmp_path_factory.mktemp("faulty"))


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """A link to a directory, as of a disk that is mounted elsewhere."""
    (tmp_path / "mnt").mkdir()
    (tmp_path / "data").symlink_to("mnt")
    return tmp_path / "data"


def names_in(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


@pytest.mark.parametrize("is_link", [False, True], ids=["below a link", "a link"])
def test_a_root_of_saves(modicum: Path, moe: Path, data: Path, is_link: bool) -> None:
    """Saves, retention, a damaged checkpoint and a resume; the root is made by the first save or,
    if it is itself a link, exists."""
    root = data / "root"
    if is_link:
        (data / "elsewhere").mkdir()
        root.symlink_to("elsewhere")
    for step in (1, 2):
        saved = run_json(modicum, "save", moe, root, "--step", step, "--keep", 1, *TRAINED)
        assert saved["path"] == str(root / f"step-{step}") and saved["warnings"] == []
    assert names_in(data / "root") == ["latest", "step-2"]
    resumed = run_json(modicum, "resume", root, *TRAINED)
    assert (resumed["resumed"]["step"], resumed["skipped"]) == (2, [])
    (root / "step-2/COMMIT").write_text("{}")
    again = run_json(modicum, "save", moe, root, "--step", 2, *TRAINED)
    (aside,) = again["damaged"]
    assert Path(aside["path"]).parent == root and Path(aside["path"]).is_dir()
    assert run(modicum, "verify", root, "-q").code == 0


def test_outputs_below_a_link(modicum: Path, moe: Path, data: Path) -> None:
    run_json(modicum, "synth", data / "synth", "--arch", "tiny-moe")
    for out in (data / "out", data / "new/out"):  # the second's parent is made
        converted = run_json(modicum, "convert", moe, out, "--dtype", "float32")
        assert converted["path"] == str(out)
    run_json(modicum, "save", moe, data / "root", "--step", 1, *TRAINED)
    run_json(modicum, "load", moe, "--ranks", 2, "--dump", data / "dump")
    assert names_in(data / "dump") == ["rank-00000.safetensors", "rank-00001.safetensors"]
    run_json(modicum, "plan", moe, "--ranks", 2, "--report", data / "page.html")
    assert names_in(data / "new") == ["out"]
    expected = ["dump", "new", "out", "page.html", "root", "synth"]
    assert names_in(data.parent / "mnt") == expected


def swapped(
    faulty: FaultyFiles, process: subprocess.Popen[str], directory: Path, outside: Path
) -> Ended:
    """The end of a program that `faulty` holds at a write. Meanwhile the directory, whose path may
    have a wildcard, is replaced by a link to `outside`."""
    assert faulty.hit().call, process.communicate()
    (found,) = outside.parent.glob(str(directory.relative_to(outside.parent)))
    found.rename(outside.parent / "away")
    found.symlink_to(outside)
    faulty.release()
    stdout, stderr = process.communicate(timeout=PATIENCE_S)
    return Ended(process.returncode, stdout, stderr)


@pytest.mark.parametrize("directory", [".partial-*", ".partial-*/optimizer"])
def test_a_directory_of_a_save_that_becomes_a_link(
    modicum: Path, moe: Path, tmp_path: Path, faulty: FaultyFiles, directory: str
) -> None:
    """The second write is that of the first file's header; the first is that of `.owner`."""
    root, outside = tmp_path / "root", tmp_path / "outside"
    root.mkdir()
    shutil.copytree(moe, outside / "optimizer")
    shutil.copytree(moe, outside, dirs_exist_ok=True)
    before = {path: path.read_bytes() for path in outside.rglob("*") if path.is_file()}
    words = ("save", moe, root, "--step", 1, *TRAINED, "--json")
    held = faulty.hold(root, 2, modicum, *words)
    done = swapped(faulty, held, root / directory, outside)
    assert (done.code, done.error["category"]) == (20, "CONFLICT"), done.stderr
    assert "a directory of its path is a symbolic link" in done.error["message"]
    assert (directory == ".partial-*/optimizer") == (done.error["file"] == "optimizer")
    after = {path: path.read_bytes() for path in outside.rglob("*") if path.is_file()}
    assert after == before and not list(root.glob("step-*"))


def test_a_directory_of_a_conversion_that_becomes_a_link(
    modicum: Path, moe: Path, tmp_path: Path, faulty: FaultyFiles
) -> None:
    """Writes: `.out.owner`, the journal, the first file."""
    to, outside = tmp_path / "to", tmp_path / "outside"
    to.mkdir()
    outside.mkdir()
    words = ("convert", moe, to / "out", "--dtype", "float32", "--json")
    held = faulty.hold(to, 3, modicum, *words)
    done = swapped(faulty, held, to / ".out.partial", outside)
    assert (done.code, done.error["category"]) == (20, "CONFLICT"), done.stderr
    assert done.error["file"] == ".out.partial"
    assert names_in(outside) == [] and not (to / "out").exists()
