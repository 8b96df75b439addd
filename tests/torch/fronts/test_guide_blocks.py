"""Runs the Python blocks of docs/guide and of skills/modicum/SKILL.md that fit into one process, as
they are on the page. Names that a page does not define, such as `model`, are defined here.
tests/package/test_page_blocks.py lists all blocks.

Catches: a block that no longer works, or that calls less than the page says.
"""

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from page_commands import blocks, with_places

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")

import torch_front  # noqa: E402

import modicum.torch  # noqa: E402
import modicum.torch.accelerate  # noqa: E402
from modicum import memory  # noqa: E402


@pytest.fixture
def directory() -> str:
    return str(torch_front.checkpoint_of("llama_tied"))


def run(page: Path, begin: str, names: dict[str, Any], places: dict[str, str]) -> dict[str, Any]:
    """Runs the only Python block of the page that contains the text `begin`, with `names`, which
    gets what the block defines."""
    found = [text for language, _, text in blocks(page) if language == "python" and begin in text]
    assert len(found) == 1, f"{page.name}: {len(found)} blocks contain {begin!r}"
    exec(compile(with_places(found[0], places), page.name, "exec"), names)
    return names


def names_of(directory: str, **more: Any) -> dict[str, Any]:
    """What blocks use without an import."""
    return {
        "AutoModelForCausalLM": transformers.AutoModelForCausalLM,
        "LoadRules": modicum.torch.LoadRules,
        "MemoryPolicy": modicum.torch.MemoryPolicy,
        "Path": Path,
        "config": transformers.AutoConfig.from_pretrained(directory),
        "directory": directory,
        "fully_shard": lambda model, mesh=None: model,
        "memory": memory,
        "mesh": None,
        "modicum": modicum,
        "os": os,
        "torch": torch,
        "transformers": transformers,
    } | more


def test_accelerates_block_resumes_if_there_is_a_checkpoint(root: Path, directory: str) -> None:
    resumed: list[Any] = []
    trainer = SimpleNamespace(
        train=lambda resume_from_checkpoint: resumed.append(resume_from_checkpoint)
    )
    names = names_of(directory, out="nowhere", trainer=trainer)
    run(root / "docs/guide/accelerate.md", "get_last_checkpoint", names, {})
    assert resumed == [None]


def test_accelerates_block_overrides_the_optimizer(root: Path, directory: str) -> None:
    names = names_of(directory, trl=SimpleNamespace(DPOTrainer=transformers.Trainer))
    run(root / "docs/guide/accelerate.md", "class MyTrainer", names, {})
    trainer = SimpleNamespace(model=torch.nn.Linear(4, 4))
    made = names["MyTrainer"].create_optimizer(trainer)
    assert isinstance(made, modicum.torch.AdamW) and trainer.optimizer is made
    assert issubclass(names["MyTrainer"], transformers.Trainer)


def test_adamws_first_block_steps(root: Path, directory: str) -> None:
    model, ledger = torch.nn.Linear(4, 4), modicum.Ledger("1GiB")
    before = model.weight.detach().clone()
    names = names_of(directory, model=model, ledger=ledger, loss=model(torch.ones(2, 4)).sum())
    run(root / "docs/guide/adamw.md", "loss.backward()", names, {})
    assert ledger.held and not torch.equal(model.weight, before)


def test_adamws_block_on_meta_has_state_after_the_load(root: Path, directory: str) -> None:
    names = names_of(directory)
    run(root / "docs/guide/adamw.md", "rebind_parameters", names, {"DIRECTORY": directory})
    assert names["optimizer"].held and not names["model"].lm_head.weight.is_meta


def test_loads_block_adds_a_head(root: Path) -> None:
    source = str(torch_front.checkpoint_of("llama"))
    config = transformers.AutoConfig.from_pretrained(source, num_labels=3)
    with modicum.torch.empty_parameters():
        model = transformers.AutoModelForSequenceClassification.from_config(config)
    names = names_of(source, load=modicum.torch.load, model=model, source=source)
    run(root / "docs/guide/load.md", "unexpected=", names, {})
    assert torch.isfinite(model.score.weight).all()


def test_workers_block_shares_the_parameters(root: Path, directory: str) -> None:
    with modicum.torch.empty_parameters():
        model = transformers.AutoModelForCausalLM.from_config(
            transformers.AutoConfig.from_pretrained(directory)
        )
    run(root / "docs/guide/workers.md", 'fork="shared"', names_of(directory, model=model), {})
    pid = os.fork()
    if pid == 0:
        os._exit(not torch.isfinite(model.lm_head.weight).all())  # a UsageError if it is excluded
    assert os.waitpid(pid, 0)[1] == 0


def test_plans_blocks(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run(root / "docs/guide/plan.md", "memory.held()", {}, {})
    assert int(capsys.readouterr().out) > 1 << 20


def test_measures_blocks(
    root: Path, directory: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    page = root / "docs/guide/measure.md"
    monkeypatch.chdir(tmp_path)
    run(page, "@memory.phase", names_of(directory, model=None), {})
    assert "from_pretrained" in capsys.readouterr().out
    assert "evaluate" in (tmp_path / "memory-0.jsonl").read_text()
    (tmp_path / "memory-1.jsonl").write_text((tmp_path / "memory-0.jsonl").read_text())
    run(page, "memory.draw", {"memory": memory}, {})
    assert "from_pretrained" in (tmp_path / "memory.html").read_text()


def test_measures_blocks_attribute(
    root: Path, directory: str, capsys: pytest.CaptureFixture[str]
) -> None:
    page = root / "docs/guide/measure.md"
    names = names_of(directory, tensors=[torch.ones(1 << 20)], more=[torch.ones(1 << 18)])
    run(page, "before = memory.held()", names, {})
    assert "moments" in capsys.readouterr().out
    run(page, "interval_s=0.1", names | {"train": lambda: None}, {})
    assert "peaks of" in capsys.readouterr().out


def test_measures_marker_is_known(root: Path, tmp_path: Path) -> None:
    text = [text for _, _, text in blocks(root / "docs/guide/measure.md") if "limit_memory" in text]
    (tmp_path / "test_load.py").write_text("import pytest\n\n\n" + text[0])
    command = [sys.executable, "-m", "pytest", "-q", "--strict-markers", "test_load.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0 and "1 passed" in done.stdout, done.stdout


def test_deepspeeds_callback_is_one_of_trainer(root: Path, directory: str, tmp_path: Path) -> None:
    arguments = transformers.TrainingArguments(str(tmp_path), use_cpu=True, report_to="none")
    model = transformers.AutoModelForCausalLM.from_pretrained(directory)
    names = names_of(directory, Trainer=transformers.Trainer, arguments=arguments, model=model)
    names["data"] = [{"input_ids": torch.arange(4)}]
    run(root / "docs/guide/deepspeed.md", "callbacks=[ProtectCallback()], train", names, {})
    callbacks = names["trainer"].callback_handler.callbacks
    assert any(isinstance(one, names["ProtectCallback"]) for one in callbacks)


def test_the_skills_block_resumes_if_there_is_a_checkpoint(
    root: Path, directory: str, tmp_path: Path
) -> None:
    page, places = (
        root / "skills/modicum/SKILL.md",
        {"DIR": directory, "RUN": str(tmp_path / "run")},
    )
    made: list[int] = []
    for steps in (2, 3):
        with modicum.torch.empty_parameters():
            model = transformers.AutoModelForCausalLM.from_config(
                transformers.AutoConfig.from_pretrained(directory)
            )
        optimizer = torch.optim.AdamW(model.parameters())
        names = names_of(directory, model=model, optimizer=optimizer, steps=steps)
        names["train_step"] = made.append
        run(page, "modicum.torch.resume", names, places)
    assert made == [0, 1, 2], "no step is lost or made twice"
    assert (tmp_path / "run/step-3/COMMIT").is_file()
