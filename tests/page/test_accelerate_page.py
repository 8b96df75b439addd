"""Compares two runs of examples/accelerate_fsdp2.py under `modicum watch`: without Modicum, and
with the example's one line of Modicum. `modicum watch --compare` and its page name the phase and
the owner whose bytes differ most.

Catches: phases of the program that are not reported; a comparison that names another phase or
owner.
"""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from pages import MIB, NARROW, WIDE, shown
from program import run, run_json

pytest.importorskip("torch")
pytest.importorskip("accelerate")

from families import LARGE_TEXT, Family
from ranks import importable

EXAMPLE = "examples/accelerate_fsdp2.py"
SIZES = LARGE_TEXT | {"num_hidden_layers": 16, "tie_word_embeddings": True}


def watched(modicum: Path, root: Path, *words: object) -> dict[str, Any]:
    """Runs the example on two ranks under `modicum watch --json`; returns the output."""
    launcher = (sys.executable, "-m", "torch.distributed.run", "--standalone")
    with importable():
        command = (*launcher, "--nproc-per-node", 2, root / EXAMPLE, *words, "--steps", 2)
        done = run(modicum, "watch", "--json", "--", *command)
    assert done.code == 0, done.stderr
    return done.json


def most_different(rows: list[dict[str, Any]], in_both: bool) -> str:
    """The name of the row whose bytes differ most. `in_both`: of the rows that both runs have."""
    compared = [row for row in rows if not in_both or None not in row.values()]
    most = max(compared, key=lambda row: abs((row["a_bytes"] or 0) - (row["b_bytes"] or 0)))
    return most["name"]


@pytest.mark.timeout(300)
def test_a_comparison_names_the_phase_and_the_owner_that_differ_most(
    chromium: Any, modicum: Path, root: Path, tmp_path: Path
) -> None:
    family = Family("dense", "Qwen3ForCausalLM", "qwen3", SIZES, "bfloat16")
    model = family.write(family.build(), tmp_path / "model")
    files = []
    for name, words in (("as-it-is", ()), ("with-modicum", ("--modicum",))):
        files.append(tmp_path / f"{name}.json")
        files[-1].write_text(json.dumps(watched(modicum, root, model, *words)))
    page = tmp_path / "both.html"
    comparison = run_json(modicum, "watch", "--compare", *files, "--report", page)
    assert comparison["phase"] == "prepare" == most_different(comparison["phases"], in_both=True)
    assert comparison["owner"] == most_different(comparison["owners"], in_both=False)
    (prepare,) = [row for row in comparison["phases"] if row["name"] == "prepare"]
    # Without Modicum `prepare` holds at least 113 MiB more. The whole model has 104 MiB.
    assert prepare["a_bytes"] > prepare["b_bytes"] + 113 * MIB
    assert comparison["a"]["peak_bytes"] > comparison["b"]["peak_bytes"]
    begin = f"the peak of {files[0].stem} is "
    assert (
        comparison["sentence"].startswith(begin)
        and "`prepare` differs most" in comparison["sentence"]
    )
    for width in (WIDE, NARROW):
        with shown(chromium, page, width) as view:
            assert view.page.inner_text("#sentence") == comparison["sentence"]
            assert view.page.locator("h2").all_inner_texts() == [file.stem for file in files]
            assert {"prepare", "steps"} <= set(view.page.locator("option").all_inner_texts())
            assert view.violations() == [] and view.errors == []
            assert view.page.evaluate("document.documentElement.scrollWidth") <= width
