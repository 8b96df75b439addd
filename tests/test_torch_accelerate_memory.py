"""The example, an unchanged script of accelerate or Trainer, in a memory cgroup: as it is it is
killed there, with Modicum's one line it passes, and trains to the same bits.

House test. It catches these mutations: weights that come to every rank whole, be it for a moment;
upcasts of a whole model; pages of the files that stay.
"""

import os
import re
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
from cage import cage, drop_page_cache, why_no_cage

pytest.importorskip("torch")
pytest.importorskip("transformers")
pytest.importorskip("accelerate")

from families import Family  # noqa: E402  (after torch is known to be there)
from ranks import importable, ranks  # noqa: E402

MIB = 1 << 20
WORLD = 4
EXAMPLE = "examples/accelerate_fsdp2.py"
SIZES = {
    "vocab_size": 8192,
    "hidden_size": 512,
    "intermediate_size": 1536,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "tie_word_embeddings": False,
}
EXPERTS = {"num_experts": 16, "num_experts_per_tok": 2, "moe_intermediate_size": 256}
FAMILIES = (
    Family("dense", "Qwen3ForCausalLM", "qwen3", SIZES | {"num_hidden_layers": 16}, "bfloat16"),
    Family(
        "experts", "Qwen3MoeForCausalLM", "qwen3_moe",
        SIZES | EXPERTS | {"num_hidden_layers": 6}, "bfloat16",
    ),
)  # fmt: skip


@dataclass(frozen=True)
class Ran:
    """A run in a cage."""

    stdout: str
    peak_bytes: int
    kills: int
    passed: bool

    @property
    def numbers(self) -> list[str]:
        """Losses and norms as Python prints them: in all bits."""
        return re.findall(r"step \d+: .*", self.stdout)

    @property
    def promised(self) -> str:
        """Of the load, by the report; the node's promise and what the kernel counted."""
        (line,) = re.findall(r"node 0 +(\S+ \S+) +(\S+ \S+)", self.stdout)
        return f"promised {line[0]}, counted {line[1]}"


Run = Callable[..., Ran]


@pytest.fixture(scope="module", autouse=True)
def can_cage() -> None:
    if reason := why_no_cage():
        pytest.skip(reason)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("models")
    return {one.name: one.write(one.build(), folder / one.name) for one in FAMILIES}


def by_torchrun(root: Path, folder: Path, limit_bytes: int, *words: object) -> Ran:
    """As users start it."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", str(WORLD), EXAMPLE, *map(str, words)]
    with importable(), cage(limit_bytes) as inside:
        # Freed gathers go back to the kernel: what stays in glibc hides what is held.
        env = os.environ | {"MALLOC_MMAP_THRESHOLD_": str(1 << 18)}
        process = inside.start(*command, cwd=root, env=env)
        stdout, stderr = process.communicate(timeout=300)
        assert process.returncode == 0 or inside.oom_kills(), stderr
        return Ran(stdout, inside.peak_bytes(), inside.oom_kills(), process.returncode == 0)


def by_fork(root: Path, folder: Path, limit_bytes: int, *words: object) -> Ran:
    """In processes that have imported all before they are in the cage: what counts is the rest."""
    with cage(limit_bytes) as inside, ranks(WORLD, folder) as started:
        procs = str(inside.directory / "cgroup.procs")
        started.tell("accelerate_script", cage=procs, words=list(map(str, words)))
        # Who waits for one that was killed may wait for long.
        while not inside.oom_kills() and not all(line.poll() for line in started.lines):
            time.sleep(0.05)
        passed = not inside.oom_kills()
        if passed:
            assert started.hear() == [None] * WORLD, started.logs()
        log = (folder / "rank-0.log").read_text()
        return Ran(log, inside.peak_bytes(), inside.oom_kills(), passed)


@pytest.mark.parametrize(
    ("run", "model", "words", "share"),
    [
        pytest.param(by_torchrun, "dense", (), 0.68, id="Accelerator, dense, by torchrun"),
        pytest.param(by_fork, "experts", (), 0.6, id="Accelerator, experts"),
        pytest.param(by_fork, "dense", ("--trainer",), 0.6, id="Trainer, dense"),
    ],
)
def test_passes_where_it_is_killed(
    root: Path,
    tmp_path: Path,
    models: dict[str, Path],
    run: Run,
    model: str,
    words: tuple[str, ...],
    share: float,
) -> None:
    """`share` of what the script needs without the line."""
    script = (models[model], "--steps", 2, *words)
    roomy = run(root, tmp_path / "roomy", 16 << 30, *script)
    assert roomy.passed and len(roomy.numbers) == 2
    limit = int(roomy.peak_bytes * share)
    drop_page_cache(models[model])
    killed = run(root, tmp_path / "killed", limit, *script)
    assert killed.kills > 0 and not killed.passed, "the cage holds it"
    drop_page_cache(models[model])
    ours = run(root, tmp_path / "ours", limit, *script, "--modicum")
    print(
        f"{model}: node peak {roomy.peak_bytes / MIB:.0f} MiB as it is; with the line, in "
        f"{limit / MIB:.0f} MiB: {ours.peak_bytes / MIB:.0f} MiB; the load {ours.promised}"
    )
    assert ours.passed and ours.kills == 0
    assert ours.numbers == roomy.numbers
