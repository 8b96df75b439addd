"""`LoadRules`, `MemoryPolicy` and `SaveOptions`, and the names of 0.1.

Catches: a field that is ignored where it does not act, a default that differs between functions, an
old name or keyword whose error does not name the new one.
"""

import dataclasses
import inspect
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
from torch import nn  # noqa: E402

import modicum.torch as front  # noqa: E402
import modicum.torch.dcp  # noqa: E402
from modicum.errors import UsageError  # noqa: E402
from modicum.options import names_in  # noqa: E402
from modicum.recipes import recipe_for  # noqa: E402
from modicum.torch.accelerate import loading  # noqa: E402

RULES = {*names_in(front.LoadRules)}
HOLDING = {"strategy", "staging", "ledger", "fork"}
FILES = {*names_in(front.SaveOptions)}


def model() -> nn.Module:
    return nn.Linear(2, 2)


def entered(**how: Any) -> None:
    with loading(progress=False, **how):
        pass


Call = Callable[..., Any]
# For each function: the call, and the fields that act in it by argument.
ACTING: dict[str, tuple[Call, dict[str, set[str]]]] = {
    "load": (
        lambda **how: front.load(model(), None, progress=False, **how),
        {"rules": RULES, "memory": HOLDING},
    ),
    "resume": (
        lambda **how: front.resume(model(), "none", progress=False, **how),
        {"rules": RULES - {"adapter", "resized", "seed"}, "memory": HOLDING},
    ),
    "load_full_state_dict": (
        lambda **how: front.load_full_state_dict(model(), "none", progress=False, **how),
        {"rules": RULES - {"buffers"}, "memory": HOLDING},
    ),
    "load_full_state_dict with a dict": (
        lambda **how: front.load_full_state_dict(model(), {}, progress=False, **how),
        {"rules": set(), "memory": HOLDING - {"strategy"}},
    ),
    "save": (
        lambda **how: front.save(model(), "none/run", step=1, **how),
        {"options": FILES, "memory": {"staging", "ledger"}},
    ),
    "async_save": (
        lambda **how: front.async_save(model(), "none/run", step=1, **how),
        {"options": FILES, "memory": {"staging", "ledger"}},
    ),
    "AdamW": (lambda **how: front.AdamW([], **how), {"memory": {"ledger", "fork", "pin"}}),
    "loading": (entered, {"rules": {"missing", "unexpected", "seed"}, "memory": HOLDING}),
    "ModicumReader": (
        lambda **how: modicum.torch.dcp.ModicumReader("none", model(), **how),
        {
            "rules": {"missing", "unexpected", "key_mapping", "recipe", "buffers"},
            "memory": {"staging", "ledger"},
        },
    ),
    "ModicumWriter": (
        lambda **how: modicum.torch.dcp.ModicumWriter("none", step=1, **how),
        {
            "options": {"source", "dtype", "shard_size", "replicas"},
            "memory": {"staging", "ledger"},
        },
    ),
    "recipe_for": (
        lambda **how: recipe_for(model(), {}, **how),
        {"rules": RULES - {"recipe", "buffers", "seed"}},
    ),
}
KINDS: dict[str, Any] = {
    "rules": front.LoadRules,
    "memory": front.MemoryPolicy,
    "options": front.SaveOptions,
}
CASES = [
    (function, argument, field)
    for function, (_, arguments) in ACTING.items()
    for argument in arguments
    for field in names_in(KINDS[argument])
]


@pytest.mark.parametrize(("function", "argument", "field"), CASES)
def test_a_field_acts_or_is_refused(
    function: str, argument: str, field: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    call, arguments = ACTING[function]
    value = torch.float16 if field == "dtype" else object()
    options = KINDS[argument](**{field: value})
    says = f"USAGE: {type(options).__name__}.{field} has no effect in {function} "
    try:
        call(**{argument: options})
        error = ""
    except Exception as raised:
        error = str(raised)
    assert error.startswith(says) == (field not in arguments[argument]), error


def test_all_rules_that_do_not_act_are_named_at_once() -> None:
    rules = front.LoadRules(keep_fp32="norm", missing="init")
    says = "LoadRules.keep_fp32 and LoadRules.missing have no effect in load_full_state_dict with "
    with pytest.raises(UsageError, match=says + "a dict .*pass its path, got 'norm', 'init'"):
        front.load_full_state_dict(model(), {}, rules=rules)


@pytest.mark.parametrize("function", ACTING)
def test_options_of_another_class_are_refused(function: str) -> None:
    call, arguments = ACTING[function]
    for argument in arguments:
        kind = KINDS[argument].__name__
        with pytest.raises(UsageError, match=f"USAGE: {argument} .*a modicum.torch.{kind}, or"):
            call(**{argument: {}})


def test_options_are_frozen_and_have_no_positions() -> None:
    for kind in KINDS.values():
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(kind(), names_in(kind)[0], 1)
        with pytest.raises(TypeError):
            kind(None)


@pytest.mark.parametrize(
    ("call", "new"),
    [
        (lambda: front.load(model(), None, ledger=1), "memory=modicum.torch.MemoryPolicy(ledger="),
        (lambda: front.load(model(), None, missing=1), "rules=modicum.torch.LoadRules(missing="),
        (lambda: front.save(model(), "run", step=1, background=True), "modicum.torch.async_save"),
        (lambda: front.save(model(), "run", step=1, grace=1), "modicum.torch.SaveOptions(grace="),
        (lambda: front.resume(model(), root="run"), "run=, the second argument"),
        (lambda: front.AdamW([], decoupled=False), "decoupled_weight_decay"),
        (lambda: front.AdamW([], pin=True), "memory=modicum.torch.MemoryPolicy(pin="),
        (lambda: front.resume(model(), "run", check=True), "modicum.verify"),
        (lambda: recipe_for(model(), {}, missing="init"), "modicum.torch.LoadRules(missing="),
        (lambda: recipe_for(model(), {}, quantizer=1), "that of the model's config"),
        (lambda: front.load(model(), None, check="values"), "True or False"),
        (lambda: front.Saved, "SaveReport"),
        (lambda: front.rebinding, "rebind_parameters"),
        (lambda: modicum.torch.dcp.HuggingFaceReader, "ModicumReader"),
        (lambda: modicum.torch.dcp.Writer, "ModicumWriter"),
        (lambda: modicum.make_plan, "modicum.walk.make_plan"),
        (lambda: modicum.Report, "modicum.walk.LoadReport"),
        (lambda: modicum.memory.track, "phase, which is also a decorator"),
        (lambda: modicum.memory.peaks, "attribute(..., interval_s=0.1)"),
    ],
)
def test_names_of_before_are_refused_with_the_new_ones(call: Call, new: str) -> None:
    with pytest.raises(UsageError) as refused:
        call()
    assert new in str(refused.value)


def test_public_modules_are_imported_at_their_first_use() -> None:
    lines = ["import sys, modicum", "modicum.recipes.recipe_for, modicum.imports.import_checkpoint"]
    lines += ["assert 'torch' not in sys.modules", "modicum.torch.dcp.ModicumReader, modicum.torch"]
    subprocess.run([sys.executable, "-c", "\n".join(lines)], check=True)


@pytest.mark.parametrize("function", (front.load, front.save, front.async_save, front.resume))
def test_calls_have_at_most_eight_keywords(function: Any) -> None:
    parameters = inspect.signature(function).parameters.values()
    assert len([p for p in parameters if p.kind is p.KEYWORD_ONLY]) <= 8


def test_other_unknown_names_are_errors_of_python() -> None:
    with pytest.raises(TypeError, match="unexpected keyword"):
        front.load(model(), None, lr=1)  # type: ignore[call-arg]
    with pytest.raises(AttributeError):
        front.nothing  # type: ignore[attr-defined]  # noqa: B018
