"""A save in the background within the memory of the state: in a cgroup that has half a GiB more
than the program holds, DCP's async save is killed.

It catches these mutations: a second copy of the state; a step that waits although the pause before
it sufficed to write; a report that does not say how long a step waited.
"""

import json
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

from cage import cage, set_limit, why_no_cage
from ranks import SUPPORT, importable

MIB, GIB = 1 << 20, 1 << 30
ROOM = GIB // 2
AT_FIRST = 16 * GIB

pytestmark = [pytest.mark.soak, pytest.mark.alone]


@pytest.fixture(scope="module")
def model(modicum: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """1 GB as float32, whose state and gradients are 3 GB more."""
    folder = tmp_path_factory.mktemp("model") / "qwen3-0.6b"
    words = ["--arch", "qwen3-0.6b", "--layers", "6", "-q"]
    subprocess.run([modicum, "synth", folder, *words], check=True)
    return folder


def run(by: str, model: Path, root: Path) -> tuple[dict[str, Any] | None, int]:
    """What the program has printed, None if it was killed; and the kills."""
    with cage(AT_FIRST) as inside, importable():
        program = SUPPORT / "background_memory.py"
        process = inside.start(sys.executable, program, by, model, root, stdin=subprocess.PIPE)
        assert process.stdin is not None and process.stdout is not None
        held = process.stdout.readline().split()
        assert held[:1] == ["held"], process.communicate()[1]
        set_limit(inside.directory, inside.version, int(held[1]) + ROOM)
        stdout, stderr = process.communicate("go\n", timeout=500)
        kills = inside.oom_kills()
    if process.returncode != 0:
        assert kills > 0, stderr
        return None, kills
    return json.loads(stdout), kills


@pytest.mark.skipif(why_no_cage() is not None, reason=str(why_no_cage()))
def test_saves_where_a_copy_does_not_fit(model: Path, tmp_path: Path) -> None:
    told, kills = run("modicum", model, tmp_path / "steps")
    assert told is not None and kills == 0
    print(json.dumps({name: told[name] for name in ("plain", "during", "blocking_s")}))
    print(json.dumps([told["reports"], told["without_pause"], told["last"]]))
    plain, during = statistics.median(told["plain"]), statistics.median(told["during"])
    assert during <= 1.1 * plain, "steps wait although there was time to write"
    durable = statistics.median(report["durable_s"] for report in told["reports"])
    pause_and_step = told["blocking_s"] + during  # the vote is in the step
    assert durable <= max(1.5 * told["blocking_s"], pause_and_step) + 0.5
    waited = told["without_pause"] - plain
    assert waited > 0.2 and told["last"]["blocked_s"] >= 0.8 * waited
    assert told["last"]["kept_bytes"] <= 256 * MIB
    copied, kills = run("dcp", model, tmp_path / "dcp")
    assert copied is None and kills > 0, "DCP holds no copy: the cage proves nothing"
