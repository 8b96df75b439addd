"""The Python of docs/guide/save.md, as it is on the page."""

import re
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

import torch_front  # noqa: E402


def test_the_example_saves_and_resumes(root: Path, tmp_path: Path) -> None:
    page = (root / "docs/guide/save.md").read_text()
    (text,) = re.findall(r"^```python\n(.*?)^```$", page, re.DOTALL | re.MULTILINE)
    directory = str(torch_front.checkpoint_of("llama_tied"))
    text = text.replace('"DIR"', repr(directory)).replace('"ROOT"', repr(str(tmp_path / "steps")))
    begun = []

    def train(model: Any, optimizer: Any, first: int = 0) -> None:
        begun.append(first)
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()

    names = {
        "AutoModelForCausalLM": transformers.AutoModelForCausalLM,
        "config": transformers.AutoConfig.from_pretrained(directory),
        "fully_shard": lambda model: model,
        "torch": torch,
        "train": train,
    }
    exec(compile(text, "save.md", "exec"), names)
    assert begun == [0, 100]
    resumed = names["resumed"]
    assert resumed.extra == {"epoch": 3}
    assert torch.equal(resumed.extra_per_rank["rng"], torch.get_rng_state())
