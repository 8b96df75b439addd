"""The pages of `load --report` and `rehearse --report` with each strategy: names of phases do not
overlap, and the text about the peak gives its cause.

Catches: a page without the window (buffers of whole tensors), or with it for a strategy that has
none; a phase without a name, or whose name overlaps the next; a peak without a cause, or with
another one than the document's.
"""

import itertools
import re
from pathlib import Path
from typing import Any

import pytest
from pages import MIB, NARROW, WIDE, drawn_on, shown, sizes
from program import STRATEGIES, run

LAYOUT = ("--ranks", 4, "--ranks-per-node", 2, "--layout", "hsdp", "--mesh", "2x2")
# These strategies hold whole tensors, the window, in addition to the shards.
WITH_WINDOW = {"full-per-rank", "rank0-broadcast"}


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_rehearsal(
    chromium: Any, modicum: Path, gpt2: Path, tmp_path: Path, strategy: str
) -> None:
    page = tmp_path / "run.html"
    words = (*LAYOUT, "--strategy", strategy, "--optimizer", "adamw:bf16-moments", "--steps", 2)
    done = run(modicum, "rehearse", gpt2, *words, "--budget", "none", "-q", "--report", page)
    assert done.code == 0, done.stderr
    (drawn,) = drawn_on(page)["runs"]
    document = drawn["document"]
    assert f"--strategy {strategy} " in drawn["label"]
    has_window = any("window" in track["owners"] for track in document["timeline"]["tracks"])
    assert has_window == (strategy in WITH_WINDOW)
    for width in (WIDE, NARROW):
        with shown(chromium, page, width) as view:
            assert view.errors == []
            boxes = [
                (span.inner_text(), span.bounding_box())
                for span in view.page.locator(".phases span:visible").all()
            ]
            # A narrow band has no name on the chart; the list of phases has all names.
            assert any(name in ("load", "step") for name, _ in boxes)
            assert set(view.page.locator("option").all_inner_texts()) >= {"load", "step"}
            for (_, left), (_, right) in itertools.pairwise(boxes):
                is_below = right["y"] >= left["y"] + left["height"]
                assert is_below or left["x"] + left["width"] <= right["x"] + 0.5
            text = view.page.inner_text(".peak")
            assert text.startswith(f"Peak {sizes(document['peak']['bytes'])} after")
            assert text.endswith(f": {document['peak']['cause']}")
            assert re.search(r": (during|after) `(load|step)`, rank [0-3] \(pid ", text), text
            assert " held " in text and ", of which " in text
    assert document["peak"]["bytes"] > 100 * MIB


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_load(chromium: Any, modicum: Path, gpt2: Path, tmp_path: Path, strategy: str) -> None:
    page = tmp_path / "load.html"
    words = (*LAYOUT, "--strategy", strategy, "--budget", "none", "-q")
    done = run(modicum, "load", gpt2, *words, "--report", page)
    assert done.code == 0, done.stderr
    (drawn,) = drawn_on(page)["runs"]
    document = drawn["document"]
    owners = set().union(*(track["owners"] for track in document["timeline"]["tracks"]))
    assert "shards" in owners and ("window" in owners) == (strategy in WITH_WINDOW)
    with shown(chromium, page) as view:
        assert view.errors == [] and view.violations() == []
        assert f"--strategy {strategy} " in view.page.inner_text("h2")
        legend = view.page.inner_text("#owners")
        assert ("window of whole tensors" in legend) == (strategy in WITH_WINDOW)
        assert "load" in view.page.locator("option").all_inner_texts()
        assert view.page.inner_text(".peak").endswith(f": {document['peak']['cause']}")
