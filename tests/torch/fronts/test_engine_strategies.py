"""The two ways of using FSDP2 in examples/strategies.py, each with and without
`memory_efficient_init`: that option changes neither the loaded bits nor the training, and the
memory of all ranks is drawn on one page.

The oracles are `from_pretrained` and accelerate's own `prepare`. Catches: an optimizer that has
lost its parameters, or has mixed up its groups; a non-persistent buffer with the values of another
buffer; a phase that is not recorded; a run that is not drawn.
"""

import json
import runpy
import sys
from itertools import product
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")
pytest.importorskip("accelerate")

from ranks import ranks

from modicum import memory

MIB = 1 << 20
WAYS = [("native",), pytest.param(("native", "accelerate"), marks=pytest.mark.soak)]
PHASES = ["from_pretrained", "optimizer", "wrap"]


@pytest.fixture(scope="module", params=WAYS, ids="+".join)
def ran(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, dict[Any, list[dict[str, Any]]]]:
    """The folder of the recordings, and the ranks' answers by run. Every run has new processes, so
    that no memory of another run is counted."""
    folder = tmp_path_factory.mktemp("strategies")
    answers = {}
    for what, efficient in product(request.param, (False, True)):
        with ranks(2, folder / f"{what}-{efficient}") as two:
            if not answers:
                sizes = {"vocab_size": 100003, "hidden_size": 101}
                what_is = {"family": "qwen3", "config": sizes, "dtype": "bfloat16"}
                two.ask("write", directory=str(folder / "qwen3"), **what_is)
            how = {"directory": str(folder / "qwen3"), "record": str(folder)}
            answers[what, efficient] = two.ask(
                "strategy", what=what, memory_efficient_init=efficient, **how
            )
    return folder, answers


def test_same_bits_and_same_training(ran: Any) -> None:
    """Loaded parameters and buffers are the same in all runs. Losses are compared only within one
    strategy, since the strategies have different FSDP2 units and so sum gradients in different
    orders."""
    answers = ran[1]
    assert len({of["loaded"] for each in answers.values() for of in each}) == 1
    for what in {what for what, _ in answers}:
        for mine, theirs in zip(answers[what, True], answers[what, False], strict=True):
            assert mine["losses"] == theirs["losses"], what
            assert mine["trained"] == theirs["trained"], what
            assert mine["trained"] != mine["loaded"], "nothing was learnt"


def test_efficient_init_holds_half_a_model_instead_of_all(ran: Any) -> None:
    """Without `memory_efficient_init` every rank holds the whole model in float32. With it a rank
    holds no weights before it shards the model, and then one half of them."""
    answers = ran[1]
    model_bytes = 2 * 4 * 100003 * 101  # embedding and head; the layers are small
    for what, rank in product({what for what, _ in answers}, range(2)):
        off, on = answers[what, False][rank]["peaks"], answers[what, True][rank]["peaks"]
        assert list(off) == list(on) == PHASES
        assert max(off.values()) - max(on.values()) > 0.5 * model_bytes, f"rank {rank}"
        before = max(on["from_pretrained"], on["optimizer"])
        assert off["from_pretrained"] - before > 0.8 * model_bytes, f"rank {rank}"
        if what == "native":  # accelerate imports modules of 25 MiB while it wraps
            assert on["wrap"] - before < 0.5 * model_bytes + 16 * MIB, f"rank {rank}"


def test_all_recordings_are_drawn_on_one_page(
    ran: Any, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, answers = ran
    recordings = sorted(folder.glob("*.jsonl"))
    assert len(recordings) == 2 * len(answers)
    labels = set()
    for path in recordings:
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        labels.add(lines[0]["process"]["label"])
        assert [line["phase"]["name"] for line in lines if "phase" in line] == PHASES
    assert len(labels) == len(answers)
    drawn = memory.draw(folder / "all.html", recordings).read_text()
    assert all(f'"label":"{label}"' in drawn for label in labels), "a run has no chart"
    words = ["strategies.py", str(folder / "qwen3"), "draw", "--record", str(folder)]
    monkeypatch.setattr(sys, "argv", words)
    runpy.run_path(str(root / "examples/strategies.py"), run_name="__main__")
    assert (folder / "strategies.html").read_text().startswith("<!doctype html>")
