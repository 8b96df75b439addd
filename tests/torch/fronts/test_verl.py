"""verl's FSDP engine with integrations/verl-0.9.1.patch, where verl 0.9.1 is installed: it builds,
shards and loads a model whose shards are those of `from_pretrained`, and steps Modicum's AdamW.

House test. It catches these mutations: a part of the patch that no longer fits.
"""

import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")
VERL = importlib.util.find_spec("verl")
if VERL is None:
    pytest.skip("verl is not installed", allow_module_level=True)


def test_the_patched_engine_loads_and_trains(root: Path, tmp_path: Path) -> None:
    assert VERL is not None and VERL.submodule_search_locations
    shutil.copytree(VERL.submodule_search_locations[0], tmp_path / "verl")
    patch = ["patch", "-p1", "-i", str(root / "integrations/verl-0.9.1.patch")]
    subprocess.run(patch, cwd=tmp_path, check=True)
    places = [str(tmp_path), str(root / "tests/support"), os.environ.get("PYTHONPATH", "")]
    done = subprocess.run(
        [sys.executable, str(root / "tests/support/verl_engine.py"), str(tmp_path)],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(places), "HF_HUB_OFFLINE": "1"},
        capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    assert done.stdout.splitlines().count("trained") == 2  # verl prints, too
