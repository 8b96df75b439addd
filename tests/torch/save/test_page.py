"""The Python blocks of docs/guide/save.md run as they are on the page."""

import os
import re
import signal
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

import torch_front  # noqa: E402


def examples(root: Path) -> list[str]:
    """The Python blocks, in the order of the page."""
    page = (root / "docs/guide/save.md").read_text()
    return re.findall(r"^```python\n(.*?)^```$", page, re.DOTALL | re.MULTILINE)


def test_the_examples_save_and_resume(root: Path, tmp_path: Path) -> None:
    """Runs the first four blocks. `train`, which the page does not define, notes its first step; in
    the loop, it gets SIGTERM with its second batch."""
    text, restarted, preempted, background, *_ = examples(root)
    directory = str(torch_front.checkpoint_of("llama_tied"))
    places = {"DIR": directory, "ROOT": str(tmp_path / "steps")}
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
        "Path": Path,
        "torch": torch,
        "train": train,
    }
    exec(compile(with_places(text, places), "save.md", "exec"), names)
    assert begun == [0, 100]
    exec(compile(with_places(restarted, places), "save.md", "exec"), names)
    exec(compile(with_places(restarted, places | {"ROOT": "nowhere"}), "save.md", "exec"), names)
    assert begun[2:] == [100, 0]
    places["ROOT"] = str(tmp_path / "preempted")
    loop = names | {
        "loader": [0, signal.SIGTERM, 0],
        "train": lambda batch: os.kill(os.getpid(), batch),
    }
    with pytest.raises(SystemExit) as ended:
        exec(compile(with_places(preempted, places), "save.md", "exec"), loop)
    assert ended.value.code == 143 and (tmp_path / "preempted/step-2/COMMIT").is_file()
    places["ROOT"] = str(tmp_path / "background")
    exec(compile(with_places(background, places), "save.md", "exec"), names)
    assert (tmp_path / "background/step-100/COMMIT").is_file()
    resumed = names["resumed"]
    assert resumed.extra == {"epoch": 3}
    assert torch.equal(resumed.extra_per_rank["rng"], torch.get_rng_state())


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_the_examples_of_distributed_checkpoints(root: Path, tmp_path: Path) -> None:
    """Runs the last two blocks. In the first one DCP saves and loads a checkpoint; the second one
    converts a directory that torch's own writer has saved."""
    import torch.distributed.checkpoint as dcp

    import modicum.torch

    *_, by_writer, converting = examples(root)
    directory = str(torch_front.checkpoint_of("llama_tied"))
    model = transformers.AutoModelForCausalLM.from_pretrained(directory)
    modicum.torch.load(model, directory, progress=False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    places = {"DIR": directory, "ROOT": str(tmp_path / "steps")}
    names: dict[str, Any] = {"model": model, "optimizer": optimizer}
    exec(compile(with_places(by_writer, places), "save.md", "exec"), names)
    assert names["loaded"]["epoch"] == 3

    theirs = str(tmp_path / "theirs")
    dcp.save({"model": model.state_dict()}, checkpoint_id=theirs, no_dist=True)
    places |= {"ROOT": str(tmp_path / "converted"), "output": theirs}
    exec(compile(with_places(converting, places), "save.md", "exec"), {})
    read = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "converted/step-100")
    for name, parameter in model.named_parameters():
        assert torch.equal(read.get_parameter(name), parameter), name


def with_places(text: str, places: dict[str, str]) -> str:
    """The block with real paths for the strings that are keys of `places`."""
    for name, place in places.items():
        text = text.replace(f'"{name}"', repr(place))
    return text
