"""The type stub in the sources, _modicum.pyi, equals the one that nanobind generates from the
installed module."""

import subprocess
import sys
from pathlib import Path

STUB = "modicum/python/modicum/_modicum.pyi"


def test_the_stub_matches_the_module(root: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "nanobind.stubgen", "--quiet", "--module", "modicum._modicum"]
    written = tmp_path / "stub.pyi"
    subprocess.run([*command, "--output-file", str(written)], check=True, cwd=tmp_path)
    kept = (root / STUB).read_text()
    hint = " ".join(["python", *command[1:], "--output-file", STUB])
    assert written.read_text() == kept, f"{STUB} is stale; if the change is intended, run {hint}"
