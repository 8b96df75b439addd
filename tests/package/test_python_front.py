"""`modicum.inspect` and `modicum.plan` return the documents of the command line's `--json`, and
raise its errors."""

import json
import pickle
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from clocks import lets_others_run
from program import run, stored, write_recipe

import modicum as front
from modicum._modicum import exit_codes


def cli(program: Path, *words: object) -> dict[str, Any]:
    """The document that a command prints with `--json`: its result or its error."""
    return run(program, *words, "--json").json


def flags_of(arguments: dict[str, Any]) -> list[str]:
    """Arguments of `modicum.plan` as flags of the command line."""
    return [f"--{name.replace('_', '-')}={value}" for name, value in arguments.items()]


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory, gpt2: Path) -> Path:
    """A recipe with one target, the first stored tensor; the others are unused."""
    names = [tensor["name"] for tensor in front.inspect(gpt2)["tensors"]]
    path = tmp_path_factory.mktemp("recipe") / "recipe.json"
    return write_recipe(path, {"first": stored(names[0])}, names[1:])


# ---- documents


def test_inspect_equals_the_command_lines(modicum: Path, gpt2: Path) -> None:
    assert front.inspect(gpt2) == cli(modicum, "inspect", gpt2)


def test_a_path_may_be_text_and_a_single_file(gpt2: Path) -> None:
    (file,) = gpt2.glob("*.safetensors")
    of_file = front.inspect(str(file))
    assert of_file["checkpoint"]["bytes"] == front.inspect(gpt2)["checkpoint"]["bytes"]


@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"ranks": 3},
        {"ranks": 5, "ranks_per_node": 2, "strategy": "rank0-broadcast", "budget": "1GiB"},
        {"ranks": 4, "layout": "none", "budget": 1 << 20},
        {"ranks": 4, "shard_dim": 1, "dtype": "bfloat16", "keep_fp32": r"ln_.*"},
        {"ranks": 2, "destination": "discard", "staging": 3 << 20, "baseline": "256MiB"},
        {"ranks": 2, "dtype": "bfloat16", "optimizer": "adamw:bf16-moments"},
        {"ranks": 2, "device": True, "optimizer": "adamw:fp32"},
        {"ranks": 2, "budget": "none"},
        {"ranks": 2, "untie": True},
        {"ranks": 2, "staging": "2.5MB", "budget": 200_000_000, "strategy": "full-per-rank"},
    ],
)
def test_plan_equals_the_command_lines(
    modicum: Path, gpt2: Path, arguments: dict[str, Any]
) -> None:
    printed = cli(modicum, "plan", gpt2, *flags_of(arguments))
    assert front.plan(gpt2, **arguments) == printed


def test_the_forecast_for_deepspeed_equals_the_command_lines(
    modicum: Path, gpt2: Path, tmp_path: Path
) -> None:
    config = tmp_path / "ds_config.json"
    offload = {"stage": 2, "offload_optimizer": {"device": "cpu"}}
    config.write_text(json.dumps({"bf16": {"enabled": True}, "zero_optimization": offload}))
    how = {"ranks": 2, "deepspeed": config, "workers": 2, "persistent_workers": True}
    flags = ("--ranks=2", "--workers=2", "--persistent-workers", "--deepspeed", config)
    planned = front.plan(gpt2, **how)
    assert planned == cli(modicum, "plan", gpt2, *flags)
    # Workers that do not persist are forked again for each epoch, which copies more memory.
    again = front.plan(gpt2, **{**how, "persistent_workers": False})
    assert again["deepspeed"] != planned["deepspeed"]
    assert front.plan(gpt2, **how, protect=True) == cli(modicum, "plan", gpt2, *flags, "--protect")


def test_a_recipe_is_read_from_its_path(modicum: Path, gpt2: Path, recipe: Path) -> None:
    planned = front.plan(gpt2, ranks=2, recipe=recipe)
    assert planned == cli(modicum, "plan", gpt2, "--ranks=2", "--recipe", recipe)
    assert planned != front.plan(gpt2, ranks=2)


def test_a_plan_that_does_not_fit_is_no_error(gpt2: Path) -> None:
    planned = front.plan(gpt2, ranks=2, budget="1MiB")
    assert planned["fits"] is False
    assert front.plan(gpt2, ranks=2)["fits"] is None
    assert front.plan(gpt2, ranks=2, budget="auto")["budget"]["source"] != "flag"


# ---- errors


def truncated(directory: Path) -> Path:
    """A file whose header is shorter than its length field states."""
    path = directory / "model.safetensors"
    path.write_bytes((1000).to_bytes(8, "little") + b'{"a":')
    return path


def attributes(error: Exception) -> dict[str, Any]:
    """The error's attributes, in the form of the command line's `error` object."""
    return {"message": str(error), **vars(error)}


def test_an_error_has_the_command_lines_facts(modicum: Path, tmp_path: Path) -> None:
    path = truncated(tmp_path)
    with pytest.raises(front.FormatError) as caught:
        front.inspect(path)
    assert isinstance(caught.value, ValueError)
    assert attributes(caught.value) == cli(modicum, "inspect", path)["error"]
    assert caught.value.category == "FORMAT.TRUNC"
    assert caught.value.file == path.name
    assert caught.value.rank is None


def test_a_missing_file_is_an_os_error(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="ENOENT") as caught:
        front.inspect(tmp_path / "absent")
    assert (type(caught.value), caught.value.code) == (front.IoError, 13)


@pytest.mark.parametrize(
    "arguments",
    [
        {"ranks": 0},
        {"ranks": 2, "ranks_per_node": 0},
        {"shard_dim": -1},
        {"strategy": "own-shards"},
        {"layout": "fsdp3"},
        {"dtype": "int8"},
        {"keep_fp32": "("},
        {"destination": "gpu"},
        {"staging": -1},
        {"budget": "much"},
        {"optimizer": "adam"},
        {"workers": -1},
    ],
)
def test_invalid_arguments_are_usage_errors_in_both_fronts(
    modicum: Path, gpt2: Path, arguments: dict[str, Any]
) -> None:
    with pytest.raises(front.UsageError) as caught:
        front.plan(gpt2, **arguments)
    assert isinstance(caught.value, ValueError)
    assert attributes(caught.value) == cli(modicum, "plan", gpt2, *flags_of(arguments))["error"]


def test_an_invalid_recipe_is_a_usage_error(gpt2: Path, tmp_path: Path) -> None:
    path = write_recipe(tmp_path / "recipe.json", {})
    with pytest.raises(front.UsageError) as caught:
        front.plan(gpt2, recipe=path)
    assert caught.value.category == "MISMATCH"


def test_an_argument_of_the_wrong_type_is_a_type_error(gpt2: Path) -> None:
    with pytest.raises(TypeError):
        front.plan(gpt2, 4)
    with pytest.raises(TypeError):
        front.plan(gpt2, ranks="4")


def test_a_budget_error_has_the_bytes_and_their_owners(modicum: Path, gpt2: Path) -> None:
    document = cli(modicum, "load", gpt2, "--ranks=2", "--budget=1MiB")
    error = front.errors.from_json(json.dumps(document))
    assert isinstance(error, front.BudgetError) and isinstance(error, MemoryError)
    assert attributes(error) == document["error"]
    assert error.shortfall_bytes == error.got - error.expected > 0
    sizes = [owner["bytes"] for owner in error.owners]
    assert sizes == sorted(sizes, reverse=True) and sizes


def test_each_category_has_a_code_a_class_and_a_row_on_the_page(root: Path) -> None:
    page = (root / "docs/reference/errors.md").read_text()
    rows = re.findall(r"^\| `([A-Z0-9_.]+)` \| (\d+) \| (\w+) \|", page, re.MULTILINE)
    assert {category: int(code) for category, code, _ in rows} == exit_codes()
    for category, code, class_name in rows:
        facts = {"category": category, "code": int(code), "message": "m"}
        error = front.errors.from_json(json.dumps({"error": facts}))
        assert type(error).__name__ == class_name
        assert (str(error), error.category, error.code) == ("m", category, int(code))


def test_an_error_survives_pickling(tmp_path: Path) -> None:
    with pytest.raises(front.Error) as caught:
        front.inspect(truncated(tmp_path))
    again = pickle.loads(pickle.dumps(caught.value))
    assert (type(again), attributes(again)) == (type(caught.value), attributes(caught.value))


# ---- threads and imports


def test_a_long_plan_lets_other_threads_run(gpt2: Path) -> None:
    assert lets_others_run(lambda: front.plan(gpt2, ranks=60_000))


def test_importing_needs_neither_torch_nor_numpy(tmp_path: Path) -> None:
    script = "import sys, modicum; print(*sorted(sys.modules))"
    command = [sys.executable, "-c", script]
    result = subprocess.run(command, cwd=tmp_path, check=True, capture_output=True, text=True)
    loaded = {name.partition(".")[0] for name in result.stdout.split()}
    assert "modicum" in loaded
    assert not loaded & {"torch", "numpy", "nanobind"}
