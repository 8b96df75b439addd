"""The accelerate example under `modicum watch`, as it is and with its one line of Modicum, and the
page that compares the two: both name the phase and the owner that differ.

Must fail for these mutants: phases of the program are not reported; the comparison names another
phase or owner than the one that differs most.
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
    launcher = (sys.executable, "-m", "torch.distributed.run", "--standalone")
    with importable():
        command = (*launcher, "--nproc-per-node", 2, root / EXAMPLE, *words, "--steps", 2)
        done = run(modicum, "watch", "--json", "--", *command)
    assert done.code == 0, done.stderr
    return done.json


def most_different(rows: list[dict[str, Any]], in_both: bool) -> str:
    """The name of the row whose bytes differ most."""
    compared = [row for row in rows if not in_both or None not in row.values()]
    both = {row["name"]: (row["a_bytes"] or 0, row["b_bytes"] or 0) for row in compared}
    return max(both, key=lambda name: abs(both[name][0] - both[name][1]))


@pytest.mark.timeout(300)
def test_the_phase_and_the_owner_that_differ(
    chromium: Any, modicum: Path, root: Path, tmp_path: Path
) -> None:
    family = Family("dense", "Qwen3ForCausalLM", "qwen3", SIZES, "bfloat16")
    model = family.write(family.build(), tmp_path / "model")
    files = []
    for name, words in (("as-it-is", ()), ("with-modicum", ("--modicum",))):
        files.append(tmp_path / f"{name}.json")
        files[-1].write_text(json.dumps(watched(modicum, root, model, *words)))
    page = tmp_path / "both.html"
    told = run_json(modicum, "watch", "--compare", *files, "--report", page)
    assert told["phase"] == "prepare" == most_different(told["phases"], in_both=True)
    assert told["owner"] == most_different(told["owners"], in_both=False)
    (prepare,) = [row for row in told["phases"] if row["name"] == "prepare"]
    # Without Modicum each rank holds at least one whole model of 113 MiB.
    assert prepare["a_bytes"] > prepare["b_bytes"] + 113 * MIB
    assert told["a"]["peak_bytes"] > told["b"]["peak_bytes"]
    begin = f"the peak of {files[0].name} is "
    assert told["sentence"].startswith(begin) and "`prepare` differs most" in told["sentence"]
    for width in (WIDE, NARROW):
        with shown(chromium, page, width) as of:
            assert of.page.inner_text("#sentence") == told["sentence"]
            assert of.page.locator("h2").all_inner_texts() == [file.name for file in files]
            assert {"prepare", "steps"} <= set(of.page.locator("option").all_inner_texts())
            assert of.violations() == [] and of.errors == []
            assert of.page.evaluate("document.documentElement.scrollWidth") <= width
