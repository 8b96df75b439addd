"""The memory of `modicum.torch.AdamW`, measured by the kernel's counters. The constructor allocates
all of it, as many bytes per parameter as the state format declares. Forked children copy none of
it.

Catches: state that is allocated at the first step; a gradient held in addition to the gradient
plane; a master held in addition to a parameter that is its own master; state that children inherit;
docs/reference/adamw.md with other bytes per parameter in a job with workers.
"""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")

# Bytes per parameter, with the parameter and its gradient. A parameter is float32 if the name ends
# in "fp32", else bfloat16.
DECLARED = {
    "fp32": 16,
    "fp32-split": 14,
    "bf16-moments": 10,
    "int8-moments": 8.0625,
    "int8-moments-24": 7.0625,
    "bf16-moments-fp32": 12,
    "int8-moments-fp32": 10.0625,
}
# Formats with parameters in torch's own memory, which children inherit.
INHERITED = ("torch:fp32", "torch:fp32-split", "torch:int8-moments")
FIXED = 1 << 19  # bytes that Python and torch may allocate in addition
# Bytes of pages that Python writes after a fork, such as those of reference counts. The smallest
# array of the state has 8 MiB, and so would be noticed.
COPIED = 6 << 20


@pytest.fixture(scope="module")
def measured() -> dict[str, dict[str, int]]:
    """The output of tests/support/adamw_memory.py: by format, the bytes at several moments."""
    program = Path(__file__).parents[2] / "support/adamw_memory.py"
    # malloc returns freed memory to the kernel, so that only memory in use is counted.
    environment = os.environ | {"MALLOC_MMAP_THRESHOLD_": "65536"}
    done = subprocess.run(
        [sys.executable, str(program), *DECLARED, *INHERITED],
        capture_output=True, text=True, timeout=300, env=environment,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize("state_format", DECLARED)
def test_bytes_per_parameter(measured: dict[str, dict[str, int]], state_format: str) -> None:
    """The declared bytes include the parameter, which is allocated before the optimizer."""
    bytes_of = measured[state_format]
    state = DECLARED[state_format] * bytes_of["parameters"] - bytes_of["parameter_bytes"]
    assert bytes_of["ledger"] == pytest.approx(state, rel=0.001)
    for when in ("made", "stepped"):
        got = bytes_of[when]
        assert state * 0.995 <= got <= state * 1.005 + FIXED, f"{when}: got {got}, expected {state}"


@pytest.mark.parametrize("state_format", DECLARED)
def test_children_add_no_memory(measured: dict[str, dict[str, int]], state_format: str) -> None:
    """While two forked children live, steps write to all parameters and state. `modicum.torch.load`
    has allocated the parameters, so that children do not inherit them either."""
    assert measured[state_format]["written_with_children"] <= COPIED


@pytest.mark.parametrize("name", INHERITED)
def test_children_keep_the_parameters_in_torchs_own_memory(
    measured: dict[str, dict[str, int]], name: str
) -> None:
    """As docs/reference/adamw.md says, the first step after a fork copies them: 4 bytes of a
    float32 parameter, 2 of a bfloat16 one."""
    bytes_of = measured[name]
    copied = bytes_of["written_with_children"] - bytes_of["parameter_bytes"]
    assert 0 <= copied <= COPIED


def test_the_guide_has_the_bytes_with_children(
    measured: dict[str, dict[str, int]], root: Path
) -> None:
    """Compares the bytes per parameter that docs/reference/adamw.md gives for a step after a fork
    with the measured ones. The parameters are in torch's own memory."""
    page = " ".join((root / "docs/reference/adamw.md").read_text().split())
    (figures,) = re.findall(
        r"of a float32 parameter from 16 to (\d+\.\d+), "
        r"of a bfloat16 one from 14, 10 and 8\.0625 to (\d+\.\d+), [\d.]+ and (\d+\.\d+)",
        page,
    )
    for name, figure in zip(INHERITED, figures, strict=True):
        bytes_of = measured[name]
        declared = DECLARED[name.removeprefix("torch:")]
        copied = bytes_of["written_with_children"] / bytes_of["parameters"]
        assert declared + copied == pytest.approx(float(figure), abs=0.5), name
