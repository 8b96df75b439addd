"""Each patch in integrations/ fits the files of the release that it names. Where an engine's
package is installed, the patched engine builds on meta, loads by path, steps, saves and recovers on
two CPU ranks. Where torchtitan is installed, the code block of docs/guide/engines.md about it
runs under torchtitan's own checkpoint manager.

Catches: a part of a patch that no longer fits; a model with values before its load; buffers of
another rank; a new value head that the load refuses; a checkpoint without the optimizer's state; a
resume without the random generators' states; a checkpoint that stays next to the one that replaces
it; an export in another dtype; a checkpoint that torchtitan's manager does not find.
"""

import ast
import importlib.util
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

ROOT = Path(__file__).resolve().parents[3]
PATCHES = {path.stem.partition("-")[0]: path for path in ROOT.glob("integrations/*.patch")}
MODULES = {"verl": "verl", "areal": "areal", "twinkle_kit": "twinkle"}
SCRIPTS = {
    "verl": "verl_engine.py",
    "areal": "areal_engine.py",
    "twinkle_kit": "twinkle_engine.py",
}
# The engines by their packages, with the arguments of their scripts in tests/support.
RUNS = [
    *(("verl", (case,)) for case in ("language-model", "lora", "value-head")),
    *(("areal", (case,)) for case in ("causal-lm", "lora", "value-head", "vision")),
    *(("twinkle_kit", (strategy,)) for strategy in ("native_fsdp", "accelerate")),
]


def installed(module: str) -> Path | None:
    """The folder of an installed package; None if it is not installed."""
    found = importlib.util.find_spec(module)
    if found is None or not found.submodule_search_locations:
        return None
    return Path(found.submodule_search_locations[0])


def downloaded(name: str, version: str, into: Path) -> Path:
    """Downloads the wheel of a package and unpacks it below `into`. Returns the package's folder.
    Skips the test if the download fails."""
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(into)]
    done = subprocess.run(
        [*pip, "--only-binary=:all:", f"{name}=={version}"], capture_output=True, text=True
    )
    if done.returncode != 0:
        pytest.skip(f"{name} {version} cannot be downloaded")
    (wheel,) = into.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(into)
    return into / MODULES[name]


def patched(name: str, package: Path, into: Path) -> list[Path]:
    """Applies the patch to a copy of the package below `into`. All context lines must match.
    Returns the changed files."""
    shutil.copytree(package, into / MODULES[name])
    command = ["patch", "-p1", "--fuzz=0", "-i", str(PATCHES[name])]
    done = subprocess.run(command, cwd=into, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
    lines = [line.split() for line in done.stdout.splitlines()]
    return [into / words[2] for words in lines if words[:2] == ["patching", "file"]]


@pytest.mark.parametrize("name", MODULES)
def test_the_patch_fits_the_release(name: str, tmp_path: Path) -> None:
    version = PATCHES[name].stem.partition("-")[2]
    changed = patched(name, downloaded(name, version, tmp_path / "release"), tmp_path)
    assert changed
    for path in changed:
        ast.parse(path.read_text())
    assert any("import modicum.torch" in path.read_text() for path in changed)


@pytest.mark.parametrize(("name", "words"), RUNS, ids=["-".join((of, *w)) for of, w in RUNS])
def test_the_patched_engine_trains(name: str, words: tuple[str, ...], tmp_path: Path) -> None:
    package = installed(MODULES[name])
    if package is None:
        pytest.skip(f"{MODULES[name]} is not installed")
    patched(name, package, tmp_path)
    assert_trains(SCRIPTS[name], tmp_path, *words)


def test_torchtitans_own_manager_runs_the_pages_block(tmp_path: Path) -> None:
    if installed("torchtitan") is None:
        pytest.skip("torchtitan is not installed")
    assert_trains("torchtitan_engine.py", tmp_path, str(ROOT / "docs/guide/engines.md"))


def assert_trains(name: str, tmp_path: Path, *words: str) -> None:
    """Runs a script of tests/support, with the packages in `tmp_path` before installed ones.
    Asserts that both of its ranks print "trained"."""
    folders = [tmp_path, ROOT / "tests/support", ROOT / "examples"]
    places = [*map(str, folders), os.environ.get("PYTHONPATH", "")]
    done = subprocess.run(
        [sys.executable, str(ROOT / "tests/support" / name), str(tmp_path), *words],
        # Buffered, the ranks write their lines whole.
        env=os.environ
        | {"PYTHONPATH": os.pathsep.join(places), "HF_HUB_OFFLINE": "1", "PYTHONUNBUFFERED": ""},
        capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    assert done.stdout.splitlines().count("trained") == 2, done.stdout
