"""Recipes with dims up to 2^63-1: `plan` refuses the recipe, or promises at least as many bytes as
Python's integers give; `load` refuses a model that does not fit.

Attack test. Catches: a product of dims overflows; a sum over ranks overflows; a plan iterates over
elements that no file holds.
"""

import json
import math
import random
from pathlib import Path
from typing import Any

import pytest
from program import STRATEGIES, failure, run, run_json, strategy_of, write_recipe

ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
MAX_MODEL_BYTES = 2**60  # the program's limit for all targets together
LAYOUTS = ["none", "fsdp2", "zero1", "zero2", "zero3"]


def init(shape: list[int], dtype: str = "float32") -> dict[str, Any]:
    return {"op": "init", "rule": "zeros", "shape": shape, "dtype": dtype}


def bytes_of(node: dict[str, Any]) -> int:
    return math.prod(node["shape"]) * ITEM_BYTES[node["dtype"]]


def random_shape(rng: random.Random) -> list[int]:
    large = [2**62 + 1, 2**63 - 1, 2**40, 2**59, 2**32, 2**20 - 1, rng.getrandbits(63)]
    return [rng.choice([*large, 0, 1, 2, 3, 1000]) for _ in range(rng.randrange(1, 4))]


def is_within_limits(nodes: list[dict[str, Any]]) -> bool:
    """Whether a recipe of these targets must be accepted: the product of the non-zero dims of each
    is below 2^63, so that no stride overflows, and all are small enough together."""
    strides = (math.prod(size for size in node["shape"] if size) for node in nodes)
    return all(n < 2**63 for n in strides) and sum(map(bytes_of, nodes)) <= MAX_MODEL_BYTES


def test_plan_promises_the_true_size_or_refuses(modicum: Path, gpt2: Path, tmp_path: Path) -> None:
    rng = random.Random(7)
    unused = [tensor["name"] for tensor in run_json(modicum, "inspect", gpt2)["tensors"]]
    planned = 0
    for i in range(40):
        dtypes = [rng.choice([*ITEM_BYTES]) for _ in range(rng.randrange(1, 4))]
        nodes = [init(random_shape(rng), dtype) for dtype in dtypes]
        targets = {f"t.{n}": node for n, node in enumerate(nodes)}
        recipe = write_recipe(tmp_path / f"{i}.json", targets, unused)
        flags = ["--recipe", recipe, "--ranks", 2, "--layout", rng.choice(LAYOUTS)]
        if not is_within_limits(nodes):
            error = failure(modicum, 2, "plan", gpt2, *flags)
            assert error["category"] == "MISMATCH"
            assert error["tensor"] in targets
            assert error["expected"] and error["got"]
            continue
        plan = run_json(modicum, "plan", gpt2, *flags)
        planned += 1
        for name in STRATEGIES:
            held = strategy_of(plan, name)["nodes"][0]["peak_bytes"]
            assert held >= sum(map(bytes_of, nodes)), (name, targets)
    assert 5 < planned < 35, "of 40 recipes some must be accepted and some refused"


@pytest.mark.parametrize("shape", [[2**40], [2**20, 2**20], [2**58]])
def test_a_huge_valid_model_is_over_the_budget(
    modicum: Path, gpt2: Path, tmp_path: Path, shape: list[int]
) -> None:
    unused = [tensor["name"] for tensor in run_json(modicum, "inspect", gpt2)["tensors"]]
    recipe = write_recipe(tmp_path / "large.json", {"large": init(shape)}, unused)
    flags = [gpt2, "--recipe", recipe, "--ranks", 2, "--budget", "1GiB"]
    error = failure(modicum, 15, "load", *flags)
    assert error["category"] == "BUDGET"
    assert int(error["got"]) >= bytes_of(init(shape))
    ended = run(modicum, "plan", *flags, "--json")
    assert json.loads(ended.stdout)["fits"] is False


def test_numbers_on_the_command_line_do_not_wrap(modicum: Path, gpt2: Path) -> None:
    most = 2**63 - 1
    flags = [gpt2, "--ranks", 2, "--baseline", most, "--staging", most]
    assert failure(modicum, 2, "plan", *flags)["expected"] == f"at most {most} bytes"
    assert failure(modicum, 2, "load", *flags, "--budget", most)["category"] == "MISMATCH"
    assert failure(modicum, 2, "step", "--params", most)["category"] == "USAGE"
    refused = failure(modicum, 15, "step", "--params", 2**50, "--ranks", 4, "--budget", "1TiB")
    assert int(refused["got"]) > 2**53
