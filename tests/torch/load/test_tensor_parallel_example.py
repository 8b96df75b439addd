"""examples/tensor_parallel.py on a mesh of 2 x 2 ranks: it loads, trains, saves and resumes.

The oracle is one process with the complete model and torch's AdamW. Catches: replicated norms that
each rank of a "tp" group trains with the gradients of its own heads; a tie that tensor parallelism
has cut; a resume that goes on from other values.
"""

import re
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from families import QWEN_VISION  # noqa: E402
from ranks import Ranks, example  # noqa: E402
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText  # noqa: E402

STEPS = 3
TIE = "tie_word_embeddings"
# torch's tensor parallelism computes with even shards only.
EVEN = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 128,
}


VISION = QWEN_VISION | {
    "hidden_size": 24,
    "out_hidden_size": EVEN["hidden_size"],
    "intermediate_size": 29,
}


def trained(directory: str, run: str, steps: int, flags: tuple[str, ...] = ()) -> list[float]:
    """An act: the losses of the example."""
    program = example("tensor_parallel")
    words = [directory, "--dtype", "float32", "--checkpoints", run, "--steps", str(steps), *flags]
    return program.run(program.options_of(words), "cpu")


def by_one_process(directory: str, auto: Any = AutoModelForCausalLM) -> tuple[list[float], Any]:
    """(the mean loss of both batches of each step, the model after the last step)"""
    model = auto.from_pretrained(directory, dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for step in range(STEPS):
        for dp in range(2):
            generator = torch.Generator().manual_seed(1000 * step + dp)
            vocabulary = model.config.get_text_config().vocab_size
            tokens = torch.randint(vocabulary, (2, 32), generator=generator)
            loss = model(input_ids=tokens, labels=tokens).loss
            (loss / 2).backward()
            losses.append(loss.item())
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return [sum(losses[at : at + 2]) / 2 for at in range(0, len(losses), 2)], model


def assert_saved(run: str, model: Any, auto: Any) -> None:
    """The run's last checkpoint has the model's values."""
    saved = auto.from_pretrained(f"{run}/step-{STEPS}").state_dict()
    for name, value in model.state_dict().items():
        torch.testing.assert_close(saved[name], value, rtol=1e-3, atol=2e-5, msg=name)


@pytest.mark.parametrize("tied", [False, pytest.param(True, marks=pytest.mark.soak)])
def test_it_trains_as_one_process_does(four: Ranks, tmp_path: Path, tied: bool) -> None:
    directory, run = str(tmp_path / "model"), str(tmp_path / "run")
    four.ask("write", directory=directory, family="qwen3", config=EVEN | {TIE: tied})
    expected, model = by_one_process(directory)
    losses = four.ask(trained, directory=directory, run=run, steps=STEPS - 1)
    resumed = four.ask(trained, directory=directory, run=run, steps=STEPS)
    for before, after in zip(losses, resumed, strict=True):
        assert before + after == pytest.approx(expected, rel=1e-5)
    assert_saved(run, model, AutoModelForCausalLM)


def test_a_vision_language_model_trains_as_one_process_does(four: Ranks, tmp_path: Path) -> None:
    """The same, of a model whose layers have other names, and whose encoder is replicated."""
    directory, run = str(tmp_path / "model"), str(tmp_path / "run")
    rope = {"rope_type": "default", "mrope_section": [2, 3, 3], "rope_theta": 10000.0}
    config = {"text_config": EVEN | {"num_hidden_layers": 2, "rope_parameters": rope}, TIE: False}
    config["vision_config"] = VISION
    four.ask("write", directory=directory, family="qwen2_5_vl", config=config)
    expected, model = by_one_process(directory, AutoModelForImageTextToText)
    flags = ("--vision-language",)
    losses = four.ask(trained, directory=directory, run=run, steps=STEPS, flags=flags)
    for one in losses:
        assert one == pytest.approx(expected, rel=1e-5)
    assert_saved(run, model, AutoModelForImageTextToText)


IMPORTS = """
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import (
    ColwiseParallel, RowwiseParallel, parallelize_module)
world_size = torch.distributed.get_world_size()
"""


def test_the_block_of_the_page_loads(four: Ranks, root: Path, tmp_path: Path) -> None:
    directory, folder = str(tmp_path / "model"), tmp_path / "out"
    folder.mkdir()
    four.ask("write", directory=directory, family="qwen3", config=EVEN)
    page = (root / "docs/guide/tensor-parallel.md").read_text()
    (text,) = re.findall(r"^```python\n(.*?)^```$", page, re.M | re.S)
    text = IMPORTS + text.replace('"cuda"', '"cpu"')
    for answer in four.ask("page_block", text=text, directory=directory, folder=str(folder)):
        assert answer["state"]


def test_the_page_has_the_styles_of_the_example(root: Path) -> None:
    """But for the norms, which the page explains."""
    page = (root / "docs/guide/tensor-parallel.md").read_text()
    found = [
        re.findall(r'^    "([\w.*\[\]]+)": (.*),$', text, re.M)
        for text in (page, (root / "examples/tensor_parallel.py").read_text())
    ]
    assert len(found[0]) == 7 and found[0] == found[1]
