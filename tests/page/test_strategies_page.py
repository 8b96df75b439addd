"""The page of a run by each strategy, as docs/strategies.png shows them: its phases are named, none
over another, and the peak has its cause.

Must fail for these mutants: a strategy that is drawn as another; a phase without its name, or over
the next; a peak without its cause, or with that of another strategy.
"""

import itertools
import re
from pathlib import Path
from typing import Any

import pytest
from pages import MIB, NARROW, WIDE, drawn_on, shown, sizes
from program import STRATEGIES, run

LAYOUT = ("--ranks", 4, "--ranks-per-node", 2, "--layout", "hsdp", "--mesh", "2x2")
# Two hold whole tensors besides the shards.
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
            # A band that is too narrow for its name has it in the list.
            assert any(name in ("load", "step") for name, _ in boxes)
            assert set(of.page.locator("option").all_inner_texts()) >= {"load", "step"}
            for (_, left), (_, right) in itertools.pairwise(boxes):
                is_below = right["y"] >= left["y"] + left["height"]
                assert is_below or left["x"] + left["width"] <= right["x"] + 0.5
            told = of.page.inner_text(".peak")
            assert told.startswith(f"Peak {sizes(document['peak']['bytes'])} after")
            assert re.search(r": (during|after) `(load|step)`, rank [0-3] \(pid ", told), told
            assert " held " in told and ", of which " in told
    assert document["peak"]["bytes"] > 100 * MIB
