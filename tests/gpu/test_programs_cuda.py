"""The example programs on a GPU, one rank under torchrun."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
if not torch.cuda.is_available():
    pytest.skip("no CUDA", allow_module_level=True)
pytest.importorskip("accelerate")

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


def printed(*arguments: str) -> str:
    """The output of a program that torchrun starts with one rank."""
    run = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "1"]
    run += ["--master-port", "0", "--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0"]
    ended = subprocess.run([*run, *arguments], capture_output=True, text=True, timeout=240)
    assert ended.returncode == 0, ended.stderr[-3000:]
    return ended.stdout


def losses(text: str) -> list[str]:
    """The loss of each of the three steps, as printed."""
    found = re.findall(r"^step \d+: (loss .*)$", text, re.MULTILINE)
    assert len(found) == 3, text
    return found


def test_the_fsdp2_example_loads_and_trains(checkpoint: Path) -> None:
    program = str(EXAMPLES / "finetune_fsdp2.py")
    text = printed(program, str(checkpoint), "--check", "values", "--budget", "64GiB")
    assert "ok" in text, text
    losses(text)


@pytest.mark.parametrize("by", [[], ["--trainer"]], ids=["accelerate", "Trainer"])
def test_one_line_leaves_the_losses_unchanged(checkpoint: Path, by: list[str]) -> None:
    program = [str(EXAMPLES / "accelerate_fsdp2.py"), str(checkpoint), *by]
    assert losses(printed(*program, "--modicum")) == losses(printed(*program))
