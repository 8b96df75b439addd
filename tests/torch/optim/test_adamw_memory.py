"""The memory of `modicum.torch.AdamW` by the kernel's counters: the constructor allocates all of
it, in the bytes per parameter that the format declares, and forked children add none.

Must fail for these mutants: state allocated at the first step; a gradient held in addition to its
plane; a master held in addition to the parameter; planes that children inherit; a guide without the
bytes that children add.
"""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")

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
FIXED = 1 << 19  # memory of Python and torch
COPIED = 6 << 20  # pages that Python writes, e.g. reference counts; a plane of codes has 8 MiB


@pytest.fixture(scope="module")
def held() -> dict[str, dict[str, int]]:
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
def test_bytes_per_parameter(held: dict[str, dict[str, int]], state_format: str) -> None:
    """The declared bytes include the parameter's own memory, which is allocated before."""
    of = held[state_format]
    state = DECLARED[state_format] * of["parameters"] - of["parameter_bytes"]
    assert of["ledger"] == pytest.approx(state, rel=0.001)
    for when in ("made", "stepped"):
        assert state * 0.995 <= of[when] <= state * 1.005 + FIXED, f"{when}: {of[when]} of {state}"


@pytest.mark.parametrize("state_format", DECLARED)
def test_children_add_no_memory(held: dict[str, dict[str, int]], state_format: str) -> None:
    """Two children live while all memory is written again."""
    assert held[state_format]["written_with_children"] <= COPIED


@pytest.mark.parametrize("name", INHERITED)
def test_children_keep_the_parameters_of_torchs_own_memory(
    held: dict[str, dict[str, int]], name: str
) -> None:
    """As docs/guide/adamw.md says, the first step after a fork copies them: 4 or 2 bytes per
    parameter."""
    of = held[name]
    assert of["parameter_bytes"] <= of["written_with_children"] <= of["parameter_bytes"] + COPIED


def test_the_page_has_the_bytes_with_children(held: dict[str, dict[str, int]], root: Path) -> None:
    """Bytes per parameter in torch's own memory, after a step with two children."""
    page = " ".join((root / "docs/guide/adamw.md").read_text().split())
    (said,) = re.findall(
        r"the table's 16 becomes ([\d.]+) bytes per float32 parameter, "
        r"and its 14, 10 and 8\.0625 become ([\d.]+), [\d.]+ and ([\d.]+) per bfloat16",
        page,
    )
    for name, figure in zip(INHERITED, said, strict=True):
        of = held[name]
        made = DECLARED[name.removeprefix("torch:")]
        copied = of["written_with_children"] / of["parameters"]
        assert made + copied == pytest.approx(float(figure), abs=0.5), name
