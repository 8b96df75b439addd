"""A job of accelerate loads, makes three steps and saves. In each phase the memory for which
Modicum's plan has a promise is at most that promise and at least 97 % of it. The memory of torch
and of accelerate is counted separately.

The memory comes from the kernel's counters: high-water marks, and the pages of the model and of the
optimizer. Catches: a gradient or moments that are held and not promised, or promised and never
held; a save that gathers whole tensors; peaks that are read at the end.
"""

from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")
pytest.importorskip("accelerate")

from families import LARGE_TEXT, Family
from jobs import held_by_phase, job_of
from ranks import ranks

WORLD = 2
STEPS = 3
SIZES = LARGE_TEXT | {"num_hidden_layers": 16}
# The root unit of FSDP2 has the embedding and the head in float32. A step gathers it on each rank.
ROOT_BYTES = 2 * 8192 * 512 * 4


def test_each_phase_holds_what_was_promised(modicum: Path, tmp_path: Path) -> None:
    family = Family("dense", "Qwen3ForCausalLM", "qwen3", SIZES, "bfloat16")
    model = family.write(family.build(), tmp_path / "model")
    how = {"directory": str(model), "folder": str(tmp_path / "saved"), "steps": STEPS}
    with ranks(WORLD, tmp_path / "ranks") as started:
        answers = started.ask("job", **how)
    held = held_by_phase(job_of(modicum, model, WORLD), answers)
    for phase, of in held.items():
        assert of.ours <= of.promised, f"{phase}: more than promised, {of}"
        assert of.promised - of.ours <= 0.03 * of.promised, f"{phase}: promised and not held, {of}"
    # What a step gathers is counted, but not as memory that Modicum has promised.
    assert held["step"].passing >= WORLD * ROOT_BYTES, held["step"]
    (saved,) = answers[0]["saves"]
    assert 0.97 * saved["promised_bytes"] <= saved["held_bytes"] <= saved["promised_bytes"]
