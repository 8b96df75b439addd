"""benchmarks/picture.py: the pictures in docs and their captions are those that the program draws
from the recorded runs.

Catches: a picture, or a number on a page, of other runs than the recorded ones; memory below the
budget that is shaded as killed; a line that lacks its label.
"""

import json
import re
import signal
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "benchmarks"))

import picture  # noqa: E402
from harness import drawings  # noqa: E402
from harness.svg import DARK, LIGHT, Scheme  # noqa: E402

GIB = 1 << 30


@pytest.fixture(scope="module")
def data() -> dict[str, Any]:
    recorded: dict[str, Any] = json.loads(picture.RECORDED.read_text())
    return recorded


def test_the_pages_have_the_recorded_pictures(data: dict[str, Any]) -> None:
    for path, svg in picture.draw(data).items():
        assert path.read_text() == svg, f"{path}: run benchmarks/picture.py --draw"
    for path, text in picture.blocks(data).items():
        assert f"<!-- bench:picture -->\n{text}\n<!-- /bench:picture -->" in path.read_text()


def test_a_recording_has_its_commands_and_versions(data: dict[str, Any]) -> None:
    for recorded in data.values():
        assert recorded["command"].startswith("modicum ")
        assert recorded["checkpoint"].startswith("modicum synth DIR --arch ")
        assert re.search(r"modicum [\d.]+, torch [\d.]+", recorded["versions"])
        assert "CPUs" in recorded["machine"] and re.match(r"\d{4}-\d\d-\d\d", recorded["date"])
    load = data["load"]
    assert load["killed"]["signal"] == signal.SIGKILL
    assert (
        load["killed"]["limit_bytes"] == load["budget_bytes"] > max(load["with_modicum"]["bytes"])
    )


def test_the_bars_of_the_plan_are_those_of_the_readme(data: dict[str, Any]) -> None:
    """A test runs that `modicum plan`, with a budget that shrinks staging."""
    readme = (ROOT / "README.md").read_text()
    for name, peak in data["plan"]["peaks"].items():
        found = re.search(rf"^{name} +([\d.]+) GiB", readme, re.M)
        assert found and float(found[1]) == pytest.approx(peak / GIB, rel=1e-3)


@pytest.mark.parametrize("scheme", [LIGHT, DARK], ids=["light", "dark"])
def test_the_load_that_exceeds_the_budget_is_shaded_and_labelled(scheme: Scheme) -> None:
    data = {
        "load": {
            "ranks": 2, "words": "a <model>", "budget_bytes": 4 * GIB, "model_bytes": GIB,
            "predicted_bytes": 2 * GIB,
            "as_it_is": {"t_s": [0, 2, 4, 6], "bytes": [GIB, 3 * GIB, 8 * GIB, 2 * GIB]},
            "with_modicum": {"t_s": [0, 3], "bytes": [GIB, 2 * GIB]},
        },
        "plan": {"model": "M", "ranks": 8, "peaks": {"full-per-rank": 90 * GIB, "own-shard": GIB}},
    }  # fmt: skip
    root = ElementTree.fromstring(drawings.load_picture(data, scheme))
    words = [text.text or "" for text in root.iter("{http://www.w3.org/2000/svg}text")]
    for label in ("killed here", "budget: 4 GiB", "predicted: 2 GiB", "the model: 1 GiB"):
        assert label in words
    assert {"a <model>", "90 GiB", "1 GiB", "with Modicum"} <= {*words}
    assert any(text.startswith("as it is: 8 GiB") for text in words)
    (area,) = root.iter("{http://www.w3.org/2000/svg}polygon")
    ys = [float(pair.split(",")[1]) for pair in area.attrib["points"].split()]
    assert len(ys) == 3 and ys[0] == ys[2] > ys[1]
    # With a budget above both loads nothing is killed.
    data["load"] |= {"budget_bytes": 8.5 * GIB}
    drawn = drawings.load_picture(data, scheme)
    assert "killed here" not in drawn and "<polygon" not in drawn


def test_each_part_above_an_edge_is_an_area_of_its_own() -> None:
    line = [(0.0, 9.0), (1.0, 5.0), (2.0, 9.0), (3.0, 9.0), (4.0, 5.0)]
    assert drawings.above(line, 7) == [
        [(0.5, 7), (1.0, 5.0), (1.5, 7)],
        [(3.5, 7), (4.0, 5.0), (4.0, 7)],
    ]
