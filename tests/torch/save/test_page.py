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
    """`train`, which the page does not define, notes its first step."""
    text = examples(root)[0]
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


def test_the_examples_of_a_restart(root: Path, tmp_path: Path) -> None:
    """The same block three times: SIGTERM comes in step 101, in step 200, which is saved anyway,
    and never. No batch is lost or trained twice, and the last save is complete at the end."""
    loop = examples(root)[1]
    directory = str(torch_front.checkpoint_of("llama_tied"))
    run, trained = tmp_path / "run", []

    def build() -> tuple[Any, Any]:
        with modicum.torch.empty_parameters():
            config = transformers.AutoConfig.from_pretrained(directory)
            model = transformers.AutoModelForCausalLM.from_config(config)
        return model, modicum.torch.AdamW(model.named_parameters())

    for terminated, newest in ((100, 101), (199, 200), (None, 203)):

        def train(batch: int, terminated: int | None = terminated) -> None:
            trained.append(batch)
            if batch == terminated:
                os.kill(os.getpid(), signal.SIGTERM)

        names = {"modicum": modicum, "build": build, "loader": range(300), "steps": 203}
        names["train"] = train
        code = compile(with_places(loop, {"DIR": directory, "ROOT": str(run)}), "save.md", "exec")
        if terminated is None:
            exec(code, names)
        else:
            with pytest.raises(SystemExit) as ended:
                exec(code, names)
            assert ended.value.code == 143
        steps = sorted(int(path.parent.name[5:]) for path in run.glob("step-*/COMMIT"))
        assert steps[-1] == newest and len(steps) == 2
    assert trained == [*range(203)]


def test_the_examples_of_preemption(root: Path, tmp_path: Path) -> None:
    """The last block gets SIGTERM in its second step."""
    by_trainer = examples(root)[2]
    directory = str(torch_front.checkpoint_of("llama_tied"))
    model = transformers.AutoModelForCausalLM.from_pretrained(directory)
    modicum.torch.load(model, directory, progress=False)

    class Trainer(transformers.Trainer):
        def training_step(self, *args: Any) -> Any:
            os.kill(os.getpid(), self.state.global_step and signal.SIGTERM)
            return super().training_step(*args)

    row = torch.arange(4)
    names: dict[str, Any] = {"model": model, "Trainer": Trainer, "last": None}
    names["data"] = [{"input_ids": row, "labels": row}] * 24
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
