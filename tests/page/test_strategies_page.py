"""The page of a run by each strategy, as docs/strategies.png shows them: its phases are named, none
over another, and the peak has its cause.

House test. It catches these mutations: a strategy that is drawn as another; a phase without its
name, or over the next; a peak without its cause, or with that of another strategy.
"""

import itertools
from pathlib import Path
from typing import Any

import pytest
from pages import MIB, NARROW, WIDE, drawn_on, shown, sizes
from program import STRATEGIES, run

LAYOUT = ("--ranks", 4, "--ranks-per-node", 2, "--layout", "hsdp", "--mesh", "2x2")
# Two hold whole tensors besides the shards; the checkpoint of one, which is also the largest.
WINDOWS = {"full-per-rank": 4, "rank0-broadcast": 1}


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
    with_window = [track for track in document["timeline"]["tracks"] if "window" in track["owners"]]
    assert len(with_window) == WINDOWS.get(strategy, 0)
    for width in (WIDE, NARROW):
        with shown(chromium, page, width) as of:
            assert of.errors == []
            boxes = [
                (span.inner_text(), span.bounding_box())
                for span in of.page.locator(".phases span:visible").all()
            ]
            assert {name for name, _ in boxes} >= {"load", "step"}
            for (_, left), (_, right) in itertools.pairwise(boxes):
                is_below = right["y"] >= left["y"] + left["height"]
                assert is_below or left["x"] + left["width"] <= right["x"] + 0.5
            told = of.page.inner_text(".peak")
            assert told.startswith(f"Peak {sizes(document['peak']['bytes'])} after")
            assert "during `" in told and " held " in told and ", of which " in told
    assert document["peak"]["bytes"] > 100 * MIB
