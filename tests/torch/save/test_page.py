"""The Python blocks of docs/guide/save.md, and that of DCP's writer in engines.md, run as they are
on the page; docs/reference/preemption.md names a test for each case."""

import os
import re
import signal
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

import torch_front  # noqa: E402
from page_commands import with_places  # noqa: E402

import modicum.torch  # noqa: E402


def examples(root: Path, name: str = "save") -> list[str]:
    """The Python blocks, in the order of the page."""
    page = (root / f"docs/guide/{name}.md").read_text()
    return re.findall(r"^```python\n(.*?)^```$", page, re.DOTALL | re.MULTILINE)


def test_the_examples_save_and_resume(root: Path, tmp_path: Path) -> None:
    """Runs the first three blocks. `train`, which the page does not define, notes its first
    step."""
    text, restarted, background, *_ = examples(root)
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
    places["ROOT"] = str(tmp_path / "background")
    exec(compile(with_places(background, places), "save.md", "exec"), names)
    assert (tmp_path / "background/step-100/COMMIT").is_file()
    resumed = names["resumed"]
    assert resumed.extra == {"epoch": 3}
    assert torch.equal(resumed.extra_per_rank["rng"], torch.get_rng_state())


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_the_example_of_distributed_checkpoints(root: Path, tmp_path: Path) -> None:
    """DCP saves and loads a checkpoint."""
    by_writer = examples(root, "engines")[-1]
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


def test_the_examples_of_preemption(root: Path, tmp_path: Path) -> None:
    """Runs the last two blocks. Each gets SIGTERM in its second step."""
    loop, by_trainer = examples(root)[3:]
    directory = str(torch_front.checkpoint_of("llama_tied"))
    model = transformers.AutoModelForCausalLM.from_pretrained(directory)
    modicum.torch.load(model, directory, progress=False)
    names: dict[str, Any] = {
        "modicum": modicum, "model": model, "optimizer": None,
        "loader": [0, signal.SIGTERM, 0], "train": lambda batch: os.kill(os.getpid(), batch),
    }  # fmt: skip
    with pytest.raises(SystemExit) as ended:
        exec(compile(with_places(loop, {"ROOT": str(tmp_path / "run")}), "save.md", "exec"), names)
    assert ended.value.code == 143 and (tmp_path / "run/step-2/COMMIT").is_file()

    class Trainer(transformers.Trainer):
        def training_step(self, *args: Any) -> Any:
            os.kill(os.getpid(), self.state.global_step and signal.SIGTERM)
            return super().training_step(*args)

    row = torch.arange(4)
    names |= {"Trainer": Trainer, "data": [{"input_ids": row, "labels": row}] * 24, "last": None}
    folder = str(tmp_path / "out")
    names["args"] = transformers.TrainingArguments(folder, use_cpu=True, report_to="none")
    with pytest.raises(SystemExit) as ended:
        exec(compile(by_trainer, "save.md", "exec"), names)
    assert ended.value.code == 143
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["checkpoint-2"]


def test_each_row_of_preemption_has_its_test(root: Path) -> None:
    page = (root / "docs/reference/preemption.md").read_text()
    rows = re.findall(r"^\|.*`test_\w+` *\|$", page, re.M)
    folders = ("cli", "torch/save", "torch/fronts")
    files = [path for folder in folders for path in (root / "tests" / folder).glob("test_*.py")]
    known = {name for path in files for name in re.findall(r"^def (\w+)", path.read_text(), re.M)}
    assert len(rows) > 20
    for row in rows:
        tests = re.findall(r"`(test_\w+)`", row)
        assert tests and known.issuperset(tests), row
