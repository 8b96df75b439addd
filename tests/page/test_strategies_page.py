"""The pages of `load --report` and `rehearse --report` with each strategy: phases are named and do
not overlap, and the peak has its cause. (docs/strategies.png shows pages of `load --report`.)

Must fail for these mutants: the window is missing, or drawn for a strategy without one; a phase has
no name, or overlaps the next; the peak has no cause, or another one than the document.
"""

import itertools
import re
from pathlib import Path
from typing import Any

import pytest
from pages import MIB, NARROW, WIDE, drawn_on, shown, sizes
from program import STRATEGIES, run

LAYOUT = ("--ranks", 4, "--ranks-per-node", 2, "--layout", "hsdp", "--mesh", "2x2")
# These strategies hold whole tensors in addition to the shards.
WITH_WINDOW = {"full-per-rank", "rank0-broadcast"}


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_strategy(
    chromium: Any, modicum: Path, gpt2: Path, tmp_path: Path, strategy: str
) -> None:
    page = tmp_path / "run.html"
    words = (*LAYOUT, "--strategy", strategy, "--optimizer", "adamw:bf16-moments", "--steps", 2)
    done = run(modicum, "rehearse", gpt2, *words, "--budget", "none", "-q", "--report", page)
    assert done.code == 0, done.stderr
    (of_page,) = drawn_on(page)["runs"]
    document = of_page["document"]
    assert f"--strategy {strategy} " in of_page["label"]
    has_window = any("window" in track["owners"] for track in document["timeline"]["tracks"])
    assert has_window == (strategy in WITH_WINDOW)
    for width in (WIDE, NARROW):
        with shown(chromium, page, width) as of:
            assert of.errors == []
            boxes = [
                (span.inner_text(), span.bounding_box())
                for span in of.page.locator(".phases span:visible").all()
            ]
            # A narrow band has no name on the chart; the list of phases has all names.
            assert any(name in ("load", "step") for name, _ in boxes)
            assert set(of.page.locator("option").all_inner_texts()) >= {"load", "step"}
            for (_, left), (_, right) in itertools.pairwise(boxes):
                is_below = right["y"] >= left["y"] + left["height"]
                assert is_below or left["x"] + left["width"] <= right["x"] + 0.5
            told = of.page.inner_text(".peak")
            assert told.startswith(f"Peak {sizes(document['peak']['bytes'])} after")
            assert told.endswith(f": {document['peak']['cause']}")
            assert re.search(r": (during|after) `(load|step)`, rank [0-3] \(pid ", told), told
            assert " held " in told and ", of which " in told
    assert document["peak"]["bytes"] > 100 * MIB


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_load(chromium: Any, modicum: Path, gpt2: Path, tmp_path: Path, strategy: str) -> None:
    page = tmp_path / "load.html"
    words = (*LAYOUT, "--strategy", strategy, "--budget", "none", "-q")
    done = run(modicum, "load", gpt2, *words, "--report", page)
    assert done.code == 0, done.stderr
    (of_page,) = drawn_on(page)["runs"]
    document = of_page["document"]
    owners = set().union(*(track["owners"] for track in document["timeline"]["tracks"]))
    assert "shards" in owners and ("window" in owners) == (strategy in WITH_WINDOW)
    with shown(chromium, page) as of:
        assert of.errors == [] and of.violations() == []
        assert f"--strategy {strategy} " in of.page.inner_text("h2")
        told = of.page.inner_text("#owners")
        assert ("window of whole tensors" in told) == (strategy in WITH_WINDOW)
        assert "load" in of.page.locator("option").all_inner_texts()
        assert of.page.inner_text(".peak").endswith(f": {document['peak']['cause']}")
