"""The package works in any locale, and next to processes of any name."""

import os
import subprocess
import sys
from pathlib import Path

from modicum.memory.processes import name_of

RECIPE = '{"targets": {"权重": {"op": "read", "name": "权重"}}}'
READS = "import sys; from modicum.recipes.reading import read_recipe; "
READS += "print(ascii(read_recipe(sys.argv[1]).targets['\\u6743\\u91cd']['name']))"


def test_files_are_utf8_in_a_locale_of_another_encoding(tmp_path: Path) -> None:
    path = tmp_path / "recipe.json"
    path.write_text(RECIPE, "utf-8")
    ascii_only = {"LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"}
    done = subprocess.run(
        [sys.executable, "-c", READS, path], env=os.environ | ascii_only, capture_output=True
    )
    assert done.stdout.strip() == rb"'\u6743\u91cd'", done.stderr


def test_the_name_of_a_process_may_have_half_a_character() -> None:
    """The kernel cuts names after 15 bytes."""
    comm = Path("/proc/self/comm")
    before = comm.read_bytes()
    comm.write_bytes("five 权重权重".encode())
    try:
        assert name_of(os.getpid()) == "five 权重权\ufffd"
    finally:
        comm.write_bytes(before)
