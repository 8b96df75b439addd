"""The commands of skills/modicum/SKILL.md run; the scripts of docs/guide/clusters.md are bash, and
its budget is Slurm's limit.

Catches: a flag that plan no longer has, or a pair that it refuses; a script that bash can't read; a
limit in another unit than Slurm's.
"""

import os
import re
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import modicum


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", page.read_text(), re.M | re.S)


def test_the_commands_of_the_skill_run(root: Path, modicum: Path, tmp_path: Path) -> None:
    (block,) = blocks(root / "skills/modicum/SKILL.md", "sh")
    commands = ["modicum synth DIR --arch qwen3-0.6b --sparse -q", *block.splitlines()]
    assert len(commands) == 5
    path = f"{modicum.parent}{os.pathsep}{os.environ['PATH']}"
    for command in commands:
        done = subprocess.run(
            ["bash", "-c", command], cwd=tmp_path, env=os.environ | {"PATH": path},
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert done.returncode == 0, f"{command}\n{done.stderr}"


def test_the_scripts_of_the_page_are_bash(root: Path) -> None:
    scripts = blocks(root / "docs/guide/clusters.md", "sh")
    assert len(scripts) == 2
    for script in scripts:
        inner = re.findall(r"bash -c '(.*?)'", script, re.S)
        for text in (script, *inner):
            done = subprocess.run(["bash", "-n"], input=text, capture_output=True, text=True)
            assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(("limit", "expected"), [(None, None), ("0", None), ("512000", 512000)])
def test_the_budget_is_slurms_limit(
    root: Path, monkeypatch: pytest.MonkeyPatch, limit: str | None, expected: int | None
) -> None:
    monkeypatch.delenv("SLURM_MEM_PER_NODE", raising=False)
    if limit is not None:
        monkeypatch.setenv("SLURM_MEM_PER_NODE", limit)
    budgets: list[Any] = []
    front = SimpleNamespace(load=lambda *_, budget, **__: budgets.append(budget))
    names = {"os": os, "modicum": SimpleNamespace(torch=front), "model": None, "optimizer": None}
    (text, *_) = blocks(root / "docs/guide/clusters.md", "python")
    exec(compile(text, "clusters.md", "exec"), names)
    (budget,) = budgets
    assert (budget and modicum.parse_size(budget)) == (expected and expected << 20)
