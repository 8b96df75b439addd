"""The example script for accelerate and Trainer runs in a memory cgroup. Without Modicum the kernel
kills it there. With `--modicum`, which adds one context manager, it passes and prints the losses
and gradient norms of a run without a limit.

Catches: whole weights on every rank, even briefly; a whole model in float32 on any rank.
"""

import re
import time
from dataclasses import dataclass
from pathlib import Path

import pytest
from cage import cage, drop_page_cache, why_no_cage

pytest.importorskip("torch")
pytest.importorskip("transformers")
pytest.importorskip("accelerate")

from families import FAMILIES, LARGE_TEXT, Family
from ranks import PATIENCE_S, ranks, torchrun

MIB = 1 << 20
WORLD = 4
EXAMPLE = "examples/accelerate_fsdp2.py"
EXPERTS = {"num_experts": 16, "num_experts_per_tok": 2, "moe_intermediate_size": 256}
LARGE_MODELS = (
    Family(
        "dense", "Qwen3ForCausalLM", "qwen3",
        LARGE_TEXT | {"num_hidden_layers": 16}, "bfloat16",
    ),
    Family(
        "experts", "Qwen3MoeForCausalLM", "qwen3_moe",
        LARGE_TEXT | EXPERTS | {"num_hidden_layers": 8}, "bfloat16",
    ),
)  # fmt: skip


@dataclass(frozen=True)
class Ran:
    """A run of the example in a memory cgroup."""

    stdout: str  # of rank 0
    peak_bytes: int  # of the cgroup
    kills: int  # processes that the kernel has killed
    passed: bool

    @property
    def numbers(self) -> list[str]:
        """The lines with losses and gradient norms. Python prints floats that have different bits
        differently, so equal lines mean equal bits."""
        return re.findall(r"step \d+: .*", self.stdout)

    @property
    def promised(self) -> str:
        """The node's promised peak and the peak that the kernel counted, both from the report of
        the load."""
        ((promised, counted),) = re.findall(r"node 0 +(\S+ \S+) +(\S+ \S+)", self.stdout)
        return f"promised {promised}, counted {counted}"


# test_job_memory.py compares a job with its promise always, by the kernel's counters.
pytestmark = pytest.mark.soak


@pytest.fixture(scope="module", autouse=True)
def can_cage() -> None:
    if reason := why_no_cage():
        pytest.skip(reason)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("models")
    return {one.name: one.write(one.build(), folder / one.name) for one in LARGE_MODELS}


def run(folder: Path, limit_bytes: int, *words: object, world: int = WORLD) -> Ran:
    """Runs the example with the arguments `words`. Its processes enter the cgroup after their
    imports, so that the memory of the imports is not counted."""
    with cage(limit_bytes) as inside, ranks(world, folder) as started:
        procs = str(inside.directory / "cgroup.procs")
        started.tell("accelerate_script", cage=procs, words=list(map(str, words)))
        deadline = time.monotonic() + PATIENCE_S
        # After a kill the other ranks could wait long for the killed rank, so the loop ends.
        while not inside.oom_kills() and not all(line.poll() for line in started.lines):
            assert time.monotonic() < deadline, started.logs()
            time.sleep(0.05)
        passed = not inside.oom_kills()
        if passed:
            assert started.hear() == [None] * world, started.logs()
        log = (folder / "rank-0.log").read_text()
        return Ran(log, inside.peak_bytes(), inside.oom_kills(), passed)


@pytest.mark.parametrize(
    ("model", "words", "ratio"),
    [
        pytest.param("dense", (), 0.8, id="Accelerator, dense"),
        # With and without Modicum a training step needs up to 0.75 of the peak without Modicum, for
        # the CPU kernels in bf16.
        pytest.param("experts", (), 0.85, id="Accelerator, experts"),
        pytest.param("dense", ("--trainer",), 0.8, id="Trainer, dense"),
    ],
)
def test_passes_in_a_cgroup_in_which_accelerate_is_killed(
    tmp_path: Path, models: dict[str, Path], model: str, words: tuple[str, ...], ratio: float
) -> None:
    """The limit is `ratio` times the script's peak without Modicum."""
    script = (models[model], "--steps", 2, *words)
    roomy = run(tmp_path / "roomy", 16 << 30, *script)
    assert roomy.passed and len(roomy.numbers) == 2
    limit = int(roomy.peak_bytes * ratio)
    drop_page_cache(models[model])
    killed = run(tmp_path / "killed", limit, *script)
    assert killed.kills > 0 and not killed.passed, "the limit suffices without Modicum"
    drop_page_cache(models[model])
    ours = run(tmp_path / "ours", limit, *script, "--modicum")
    assert ours.passed and ours.kills == 0
    print(
        f"{model}: node peak without Modicum {roomy.peak_bytes / MIB:.0f} MiB; with Modicum, limit "
        f"{limit / MIB:.0f} MiB: {ours.peak_bytes / MIB:.0f} MiB; the load {ours.promised}"
    )
    assert ours.numbers == roomy.numbers


def test_the_example_prints_the_same_losses_under_torchrun(
    root: Path, tmp_path: Path, models: dict[str, Path]
) -> None:
    """The expected losses are those of the example without `--modicum` and without torchrun."""
    (tiny,) = [one for one in FAMILIES if one.name == "qwen3"]
    directory = tiny.write(tiny.build(), tmp_path / "tiny")
    expected = run(tmp_path / "ranks", 16 << 30, directory, "--steps", 2, world=2)
    done = torchrun(root, 2, EXAMPLE, directory, "--steps", 2, "--modicum")
    assert done.returncode == 0, done.stderr
    assert re.findall(r"step \d+: .*", done.stdout) == expected.numbers
    assert "modicum: own-shard, 2 ranks on 1 node" in done.stderr
