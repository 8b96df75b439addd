"""A save in the background fits into a memory cgroup with room for the training state and 2 GiB.
DCP's `async_save` is killed in it.

How long steps and saves take depends on what else the machine does. This prints the figures:

    pytest tests/torch/save/test_background_memory.py -m soak -s [--full-size]
"""

import time
from pathlib import Path
from statistics import median
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

from cage import Cage, cage, drop_page_cache, why_no_cage
from program import run_json
from ranks import ranks

MIB, GIB, GB = 1 << 20, 1 << 30, 10**9
WORLD = 2
ROOM = 2 * GIB
PATIENCE_S = 1200.0
STATE_BYTES_PER_PARAMETER = 16  # master, gradient and two moments
# The numbers of parameters of qwen3-0.6b: in its embeddings and its last norm, and in one layer.
FIXED, PER_LAYER = 151_936 * 1024 + 1024, 15_730_944

pytestmark = [
    pytest.mark.soak,
    pytest.mark.timeout(3600),
    pytest.mark.skipif(why_no_cage() is not None, reason=str(why_no_cage())),
]


@pytest.fixture(scope="module")
def layers(is_full_size: bool) -> int:
    """The number of layers of a model whose training state has about 5 GB, or 11 GB."""
    parameters = (11 if is_full_size else 5) * GB / STATE_BYTES_PER_PARAMETER
    return round((parameters - FIXED) / PER_LAYER)


@pytest.fixture(scope="module")
def state_bytes(layers: int) -> int:
    return STATE_BYTES_PER_PARAMETER * (FIXED + layers * PER_LAYER)


@pytest.fixture(scope="module")
def model(modicum: Path, tmp_path_factory: pytest.TempPathFactory, layers: int) -> Path:
    folder = tmp_path_factory.mktemp("model") / "qwen3"
    made = run_json(modicum, "synth", folder, "--arch", "qwen3-0.6b", "--layers", layers)
    assert made["data_bytes"] == 2 * (FIXED + layers * PER_LAYER)
    drop_page_cache(folder)
    return folder


def run(act: str, folder: Path, inside: Cage, **arguments: str) -> dict[str, Any] | None:
    """Runs the function `act` of tests/support/background_memory.py on ranks in the memory cgroup.
    Returns rank 0's answer, or None if the kernel has killed a rank."""
    cages = [inside.directory / "cgroup.procs"] * WORLD
    with ranks(WORLD, folder, fresh=True, cages=cages) as started:
        started.tell(act, **arguments)
        deadline = time.monotonic() + PATIENCE_S
        while not inside.oom_kills() and not all(line.poll() for line in started.lines):
            assert time.monotonic() < deadline, started.logs()
            time.sleep(0.05)
        if inside.oom_kills():
            return None
        answer = started.hear()[0]
        assert isinstance(answer, dict), f"{answer}\n{started.logs()}"
        return answer


def test_steps_go_on_within_the_state_and_2_gib(
    model: Path, state_bytes: int, tmp_path: Path
) -> None:
    with cage(state_bytes + ROOM) as inside:
        arguments = {"directory": str(model), "root": str(tmp_path / "steps")}
        figures = run("background_by_modicum", tmp_path / "ranks", inside, **arguments)
        assert figures is not None, "a rank was killed for its memory"
        peak = inside.peak_bytes()
    plain, during = median(figures["plain"]), median(figures["during"])
    blocking = median(figures["blocking"])
    durable = median([report["durable_s"] for report in figures["reports"]])
    waited, last = figures["first"] - median(figures["alone"]), figures["last"]
    print(
        f"\nstate {state_bytes / GB:.2f} GB, limit {(state_bytes + ROOM) / GB:.2f} GB, peak "
        f"{peak / GB:.2f} GB; a save writes {last['written_bytes'] / GB:.2f} GB"
        f"\nin the foreground {blocking:.2f} s; pause {figures['pause_s']:.2f} s"
        f"\nwith the pause: steps {plain:.2f} s, during a save {during:.2f} s "
        f"({during / plain - 1:+.1%}); visible after {durable:.2f} s ({durable / blocking:.2f} x)"
        f"\nwithout: steps {median(figures['alone']):.2f} s, the first of a save {waited:.2f} s "
        f"more; reported {last['blocked_s']:.2f} s, {last['kept_bytes'] / MIB:.0f} MiB kept; "
        f"visible after {last['durable_s']:.2f} s ({last['durable_s'] / blocking:.2f} x)"
    )
    # Without a pause the first step of a save overwrites blocks that are not yet written.
    assert last["blocked_s"] > 0 and last["kept_bytes"] > 0, "the save was over before the step"


def test_async_save_of_dcp_is_killed(
    model: Path, state_bytes: int, tmp_path: Path, is_full_size: bool
) -> None:
    """It needs memory for another copy of the state: with a limit that has room for this copy, it
    succeeds. The latter is not tested in full size."""
    root = tmp_path / "dcp"
    arguments = {"directory": str(model), "root": str(root)}
    with cage(state_bytes + ROOM) as inside:
        figures = run("background_by_dcp", tmp_path / "killed", inside, **arguments)
    assert figures is None, "DCP's save fits into the limit, so the test of Modicum proves nothing"
    assert root.exists(), "a rank was killed before the save"
    if not is_full_size:
        with cage(2 * state_bytes + ROOM) as inside:
            figures = run("background_by_dcp", tmp_path / "roomy", inside, **arguments)
            assert figures is not None, "a rank was killed for its memory"
            print(f"\nDCP under a high limit: peak {inside.peak_bytes() / GB:.2f} GB, {figures}")
