"""`modicum.torch.AdamW` when parameters, their memory, their gradients or `state` are replaced
after construction.

The oracle is torch.optim.AdamW, which reads all of these at each step. Modicum adopts a
replacement, or raises an error that names the parameter before it writes anything. Catches: a step
of parameters that are no longer in the model; a write into freed memory; a change of `state` that
has no effect; a value written through `.data` that is lost; a gradient with a graph that becomes a
constant.
"""

import copy
import gc
import math
import os
import subprocess
import sys
import warnings
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from rounding import nearest_sqrt  # noqa: E402  (after torch is known to be there)
from torch import nn  # noqa: E402

import modicum  # noqa: E402
from modicum.torch import AdamW, MemoryPolicy  # noqa: E402
from modicum.upstream import torch_core, torch_dispatch  # noqa: E402

FORMATS = ("fp32", "fp32-split", "bf16-moments", "int8-moments", "int8-moments-24")


class Pair:
    """The same model twice: one is stepped by Modicum's AdamW, one by torch's."""

    def __init__(self, dtype: torch.dtype = torch.float32, **options: Any) -> None:
        torch.manual_seed(3)
        self.mine = nn.Sequential(nn.Conv2d(3, 40, 3), nn.Flatten(), nn.Linear(160, 32)).to(dtype)
        self.theirs = copy.deepcopy(self.mine)
        self.dtype = dtype
        self.options = {"lr": 1e-2} | options
        self.ours = AdamW(self.mine.named_parameters(), **self.options)
        self.torchs = torch.optim.AdamW(self.theirs.parameters(), **self.options)

    def backward(self) -> None:
        x = torch.randn(5, 3, 4, 4).to(self.dtype)
        for model in (self.mine, self.theirs):
            model(x).square().sum().backward()

    def step(self, times: int = 1) -> None:
        with nearest_sqrt():
            for _ in range(times):
                self.backward()
                for optimizer in (self.ours, self.torchs):
                    optimizer.step()
                    optimizer.zero_grad()

    def on_both(self, change: Callable[[nn.Module, Any], None]) -> None:
        change(self.mine, self.ours)
        change(self.theirs, self.torchs)

    def assert_same(self) -> None:
        for (name, mine), theirs in zip(
            self.mine.named_parameters(), self.theirs.parameters(), strict=True
        ):
            assert torch.equal(mine, theirs), name


# ---- parameters


def replaced(model: nn.Module, optimizer: Any) -> None:
    """Replaces the parameters of the model and of the groups as accelerate's prepare does. In the
    groups each one is first replaced by a tensor of another size, then by the new parameter."""
    optimizer.load_state_dict(optimizer.state_dict())  # as AcceleratedOptimizer's constructor does
    for module in (model[0], model[2]):
        for name, parameter in list(module.named_parameters()):
            module.register_parameter(name, nn.Parameter(parameter.detach().clone()))
    for group in optimizer.param_groups:
        for at in range(len(group["params"])):
            group["params"][at] = torch.empty(1)
        group["params"] = list(model.parameters())


def moved(model: nn.Module, optimizer: Any) -> None:
    model[2].weight.data = model[2].weight.data.clone()


def shared(model: nn.Module, optimizer: Any) -> None:
    model.share_memory()


def swapped(model: nn.Module, optimizer: Any) -> None:
    torch.utils.swap_tensors(model[2].bias, nn.Parameter(torch.ones(32)))


def permuted(model: nn.Module, optimizer: Any) -> None:
    model.to(memory_format=torch.channels_last)


CHANGES = [replaced, moved, shared, swapped, permuted]


@pytest.mark.parametrize("with_gradients", (False, True), ids=("before backward", "after backward"))
@pytest.mark.parametrize("change", CHANGES)
def test_parameters_replaced_before_the_first_step_are_stepped(
    change: Callable[[nn.Module, Any], None], with_gradients: bool
) -> None:
    pair = Pair()
    # After `replaced` and `swapped` the new parameters have no gradients, so none are made before.
    if with_gradients and change not in (replaced, swapped):
        pair.backward()
    pair.on_both(change)
    pair.step(3)
    pair.assert_same()
    weight = pair.mine[2].weight
    pair.backward()
    grad = [*pair.ours._bound.slots.values()][2].grad
    assert weight.grad is grad, "the gradient is not in the plane"


@pytest.mark.parametrize("change", CHANGES)
def test_parameters_replaced_between_steps_are_refused_by_name(
    change: Callable[[nn.Module, Any], None],
) -> None:
    pair = Pair()
    pair.step()
    change(pair.mine, pair.ours)
    pair.mine.zero_grad()
    bits = [p.detach().clone() for p in pair.mine.parameters()]
    for call in (
        pair.ours.step,
        lambda: pair.ours.clip_grad_norm_(1.0),
        pair.ours.state_dict,
        pair.ours.digest,
        lambda: pair.ours.load_state_dict(pair.torchs.state_dict()),
    ):
        pair.mine(torch.randn(5, 3, 4, 4)).sum().backward()
        with pytest.raises(modicum.UsageError, match="parameter.*AdamW has state.*tensor [02]"):
            call()
        assert all(map(torch.equal, pair.mine.parameters(), bits))


def test_a_parameter_that_moves_after_load_state_dict_is_refused() -> None:
    pair = Pair()
    pair.step()
    saved = pair.ours.state_dict()
    again = AdamW(pair.mine.named_parameters())
    again.load_state_dict(copy.deepcopy(saved))
    moved(pair.mine, again)
    with pytest.raises(modicum.UsageError, match="was moved or replaced.*2.weight"):
        again.step()


def test_the_state_of_replaced_parameters_is_freed_first() -> None:
    """The ledger never holds both the state of the old parameters and that of the new ones."""
    model = nn.Linear(300, 300)
    ledger = modicum.Ledger()
    optimizer = AdamW(model.parameters(), memory=MemoryPolicy(ledger=ledger))
    ledger.limit_bytes = ledger.held_bytes
    model(torch.ones(300)).sum().backward()
    expected = model.weight.grad.clone()
    moved([None, None, model], optimizer)  # moves the weight of the module at index 2
    optimizer.step()
    assert ledger.peak_bytes <= ledger.limit_bytes
    assert torch.equal(optimizer.state[model.weight]["exp_avg"], expected * (1 - 0.9))
    ledger.limit_bytes = None
    del optimizer, expected
    model.zero_grad()
    gc.collect()
    assert ledger.held_bytes == 0


def test_a_refused_binding_is_tried_again() -> None:
    model = nn.Linear(30, 30)
    optimizer = AdamW(model.named_parameters())
    kept = model.weight.data
    model.weight.data = torch.ones(60, 30)[::2]
    for _ in range(2):
        with pytest.raises(modicum.UsageError, match="gaps between them.*weight"):
            optimizer.step()
    model.weight.data = kept
    model(torch.ones(30)).sum().backward()
    before = model.weight.detach().clone()
    optimizer.step()
    assert not torch.equal(model.weight, before)


def test_another_dtype_before_the_first_step_is_adopted() -> None:
    model = nn.Linear(30, 30)
    optimizer = AdamW(model.parameters(), state_format="fp32-split")
    model.bfloat16()
    model(torch.ones(30, dtype=torch.bfloat16)).sum().backward()
    optimizer.step()
    assert optimizer.held.keys() == {"fp32-split"}
    assert optimizer.state[model.weight]["step"] == 1


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.randn(4, 3, 5, 5).to(memory_format=torch.channels_last),
        lambda: torch.randn(2, 3, 4, 5, 5).to(memory_format=torch.channels_last_3d),
        lambda: torch.randn(7, 11).t(),
        lambda: torch.randn(3, 1, 7).permute(2, 1, 0),
        lambda: torch.randn(1, 5).as_strided((1, 5), (77, 1)),
        lambda: torch.tensor(3.0),
    ],
    ids=("channels_last", "channels_last_3d", "transposed", "permuted", "one row", "scalar"),
)
def test_any_dense_strides_are_stepped(make: Callable[[], Any]) -> None:
    values = make()
    mine, theirs = nn.Parameter(values), nn.Parameter(values.clone())
    ours, torchs = AdamW([mine], lr=0.1), torch.optim.AdamW([theirs], lr=0.1)
    target = torch.randn(values.shape)
    with nearest_sqrt():
        for step in range(4):
            for p in (mine, theirs):
                (p * target).sin().sum().backward()
                if step == 2:
                    p.grad = p.grad.clone(memory_format=torch.contiguous_format)
            ours.step()
            torchs.step()
            if step % 2:
                ours.zero_grad()
                torchs.zero_grad()
        saved = copy.deepcopy(torchs.state_dict())
    assert torch.equal(mine, theirs)
    for name, value in torchs.state[theirs].items():
        assert torch.equal(ours.state[mine][name], value), name
        assert ours.state[mine][name].shape == value.shape
    ours.load_state_dict(saved)
    assert torch.equal(ours.state[mine]["exp_avg"], torchs.state[theirs]["exp_avg"])


def test_overlaps_and_gaps_are_refused() -> None:
    """Parameters may share a storage but no element of it. The elements of one parameter must be
    dense and must not overlap."""
    storage = torch.zeros(100)
    first, second = nn.Parameter(storage[:60]), nn.Parameter(storage[59:].view(41, 1))
    with pytest.raises(modicum.UsageError, match="shares memory with 'param.0'.*param.1"):
        AdamW([first, second])
    AdamW([first, nn.Parameter(storage[60:])])
    for values in (torch.zeros(1).expand(5), torch.zeros(8)[::2], torch.zeros(9).unfold(0, 3, 1)):
        with pytest.raises(modicum.UsageError, match="elements overlap.*param.0"):
            AdamW([nn.Parameter(values)])


@pytest.mark.parametrize(
    ("groups", "name"),
    [
        (lambda p, q: [p, q, p], "param.2"),
        (lambda p, q: [{"params": [p]}, {"params": [q, p]}], "param.2"),
        (lambda p, q: [("a", p), ("b", q), ("c", p)], "c"),
        (lambda p, q: [{"params": p}, {"params": iter([q, p])}], "param.2"),
    ],
)
def test_a_parameter_given_twice_is_refused(groups: Callable[..., Any], name: str) -> None:
    p, q = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(4))
    with pytest.raises(modicum.UsageError, match=f"given twice.*tensor {name}"):
        AdamW(groups(p, q))


def test_a_first_step_without_gradients_warns_once() -> None:
    model = nn.Linear(3, 3)
    optimizer = AdamW(model.parameters())
    with pytest.warns(UserWarning, match="no gradient in any of its parameters") as warned:
        optimizer.step()
        optimizer.step()
    assert len(warned) == 1 and warned[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        other = AdamW(model.parameters())
        model(torch.ones(3)).sum().backward()
        other.step()
        other.zero_grad()
        other.step()


# ---- gradients and values that are written through .data, which changes no version counter


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16), ids=str)
def test_gradients_written_after_the_norm_are_those_that_are_stepped(dtype: torch.dtype) -> None:
    model, other = (nn.Linear(40, 40).to(dtype) for _ in range(2))
    other.load_state_dict(model.state_dict())
    optimizer, expected = AdamW(model.parameters()), AdamW(other.parameters())
    for written in (0.0, 8.0):
        for m in (model, other):
            m(torch.ones(40, dtype=dtype)).sum().backward()
        optimizer.clip_grad_norm_(1e-3)
        for m in (model, other):
            m.weight.grad.data.mul_(written)
        expected.clip_grad_norm_(1e-3)
        for one in (optimizer, expected):
            one.step()
            one.zero_grad()
        assert optimizer.digest() == expected.digest()
    model(torch.ones(40, dtype=dtype)).sum().backward()
    optimizer.clip_grad_norm_(1.0)
    model.weight.grad.data[3, 3] = math.nan
    optimizer.step()
    assert optimizer.digest() == expected.digest() and optimizer.skipped_steps == 1


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16), ids=str)
@pytest.mark.parametrize("then", ("step", "state_dict", "digest"))
def test_values_written_through_data_stay(dtype: torch.dtype, then: str) -> None:
    """The parameter is a rounded copy of its master. The master takes the written values; its other
    elements keep their bits."""
    model = nn.Linear(200, 200).to(dtype)
    optimizer = AdamW(model.parameters(), weight_decay=0.0)
    model(torch.ones(200, dtype=dtype)).sum().backward()
    optimizer.step()
    before = optimizer.state_dict()["state"][0]["master"].clone()
    assert not torch.equal(before, before.to(dtype).float()), (
        "each master is a value of the dtype, so a master that is rounded would not be noticed"
    )
    digest = optimizer.digest()
    model.weight.data[7].fill_(0.5)
    model.weight.data[8, 0] = -0.0
    if then == "step":
        optimizer.param_groups[0]["lr"] = 0.0
        optimizer.step()
    if then == "digest":
        assert optimizer.digest() != digest
    after = optimizer.state_dict()["state"][0]["master"]
    assert (model.weight[7] == 0.5).all() and (after[7] == 0.5).all()
    assert after[8, 0] == 0 and math.copysign(1, after[8, 0]) == -1
    rest = [row for row in range(200) if row not in (7, 8)]
    assert torch.equal(after[rest], before[rest]) and torch.equal(after[8, 1:], before[8, 1:])


def test_a_gradient_is_taken_after_its_copy_into_pinned_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Before torch 2.13 FSDP2 calls the hooks while the copy from the device is in flight. Here the
    copy ends when the stream is synchronized."""
    model = nn.Linear(3, 4, bias=False)
    in_flight: list[tuple[Any, Any]] = []

    def offload(parameter: Any) -> None:
        in_flight.append((parameter.grad, parameter.grad.clone()))
        parameter.grad.fill_(math.nan)

    class Stream:
        def synchronize(self) -> None:
            for grad, values in in_flight:
                grad.copy_(values)

    model.weight.register_post_accumulate_grad_hook(offload)
    optimizer = AdamW(model.parameters())
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "current_stream", lambda: Stream())
    monkeypatch.setattr(torch.Tensor, "is_pinned", lambda tensor: True)
    model(torch.ones(3)).sum().backward()
    assert in_flight and torch.equal(model.weight.grad, torch.ones(4, 3))
    optimizer.step()
    assert optimizer.skipped_steps == 0


# ---- changes of `state`


def cleared(model: nn.Module, optimizer: Any) -> None:
    optimizer.state.clear()


def made_anew(model: nn.Module, optimizer: Any) -> None:
    optimizer.state = defaultdict(dict)


def popped(model: nn.Module, optimizer: Any) -> None:
    optimizer.state.pop(model[0].weight)


def emptied(model: nn.Module, optimizer: Any) -> None:
    optimizer.state[model[0].weight] = {}


def step_zeroed(model: nn.Module, optimizer: Any) -> None:
    optimizer.state[model[2].weight]["step"].zero_()


def step_set(model: nn.Module, optimizer: Any) -> None:
    optimizer.state[model[2].weight]["step"] = torch.tensor(7.0)


def step_data(model: nn.Module, optimizer: Any) -> None:
    optimizer.state[model[2].weight]["step"].data = torch.tensor(9.0)


def moment_replaced(model: nn.Module, optimizer: Any) -> None:
    optimizer.state[model[2].weight]["exp_avg"] = torch.full((32, 160), 0.25)


def moment_zeroed(model: nn.Module, optimizer: Any) -> None:
    optimizer.state[model[2].weight]["exp_avg_sq"].zero_()


def moment_shared(model: nn.Module, optimizer: Any) -> None:
    optimizer.state[model[2].weight]["exp_avg"].share_memory_().mul_(0.5)


def entry_replaced(model: nn.Module, optimizer: Any) -> None:
    optimizer.state[model[2].weight] = {
        "step": torch.tensor(3.0),
        "exp_avg": torch.full((32, 160), 0.25),
        "exp_avg_sq": torch.full((32, 160), 0.5),
    }


STATES = [
    cleared, made_anew, popped, emptied, step_zeroed, step_set, step_data, moment_replaced,
    moment_zeroed, moment_shared, entry_replaced,
]  # fmt: skip


@pytest.mark.parametrize("change", STATES)
def test_steps_after_a_change_of_state_are_those_of_torch(
    change: Callable[[nn.Module, Any], None],
) -> None:
    pair = Pair()
    pair.step(3)
    pair.on_both(change)
    pair.step(2)
    pair.assert_same()
    for mine, theirs in zip(pair.mine.parameters(), pair.theirs.parameters(), strict=True):
        for name, value in pair.torchs.state[theirs].items():
            assert torch.equal(pair.ours.state[mine][name], value), name


@pytest.mark.parametrize("state_format", FORMATS)
def test_a_state_that_is_cleared_begins_anew(state_format: str) -> None:
    """After `state.clear()` the parameters are stepped as by a new optimizer, in every format."""

    def gradients(model: nn.Module, seed: int) -> None:
        torch.manual_seed(seed)
        for p in model.parameters():
            p.grad = torch.randn(p.shape).bfloat16()

    model = nn.Linear(40, 40).bfloat16()
    optimizer = AdamW(model.named_parameters(), state_format=state_format, amsgrad=True)
    for seed in range(3):
        gradients(model, seed)
        optimizer.step()
    # A new optimizer makes its masters from the parameters. Here both get the value 0.5, so that
    # no master has a lower half that the new optimizer could not know.
    with torch.no_grad():
        for p in model.parameters():
            p.fill_(0.5)
    saved = optimizer.state_dict()
    for entry in saved["state"].values():
        entry["master"] = torch.full_like(entry["master"], 0.5)
    optimizer.load_state_dict(saved)
    other = copy.deepcopy(model)
    optimizer.state.clear()
    anew = AdamW(other.named_parameters(), state_format=state_format, amsgrad=True)
    assert optimizer.digest() == anew.digest()
    for m, one in ((model, optimizer), (other, anew)):
        gradients(m, 9)
        one.step()
    assert optimizer.digest() == anew.digest()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda entry: entry.pop("exp_avg"), "lacks 'exp_avg'.*2.weight"),
        (lambda entry: entry.pop("step"), "lacks 'step'.*2.weight"),
        (lambda entry: entry.update(exp_avg=torch.zeros(3)), "its exp_avg.*2.weight"),
        (lambda entry: entry.update(exp_avg=None), "lacks 'exp_avg'.*2.weight"),
        (lambda entry: entry.update(exp_avg_sq=-torch.ones(32, 160)), "its exp_avg_sq.*2.weight"),
        (lambda entry: entry["step"].fill_(-1), "its step.*2.weight.*whole number"),
        (lambda entry: entry["step"].fill_(0.5), "its step.*2.weight.*whole number"),
        (lambda entry: entry["step"].fill_(math.nan), "its step.*2.weight.*whole number"),
    ],
)
def test_an_invalid_entry_of_state_is_refused(change: Callable[..., Any], words: str) -> None:
    pair = Pair()
    pair.step()
    bits = [p.detach().clone() for p in pair.mine.parameters()]
    change(pair.ours.state[pair.mine[2].weight])
    for _ in range(2):
        pair.backward()
        with pytest.raises(modicum.UsageError, match=words):
            pair.ours.step()
    assert all(map(torch.equal, pair.mine.parameters(), bits))
    pair.ours.state.pop(pair.mine[2].weight)
    pair.torchs.state.pop(pair.theirs[2].weight)
    pair.ours.zero_grad()
    pair.torchs.zero_grad()
    pair.step()
    pair.assert_same()


# ---- state dicts


def spoiled(saved: dict[str, Any], name: str, value: float) -> None:
    """Sets one element of the tensor `name` of the parameter 3, which is 2.bias."""
    saved["state"][3][name] = saved["state"][3][name].clone()
    saved["state"][3][name].view(-1)[2] = value


def recast(saved: dict[str, Any], to: torch.dtype | str) -> None:
    saved["state"][3]["exp_avg"] = saved["state"][3]["exp_avg"].to(to)


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda d: d["state"][3].pop("exp_avg"), "lacks 'exp_avg'.*2.bias"),
        (lambda d: d["state"][3].pop("exp_avg_sq"), "lacks 'exp_avg_sq'.*2.bias"),
        (lambda d: d["state"][3].pop("step"), "lacks 'step'.*2.bias"),
        (lambda d: d["state"][3].update(exp_avg=[0.0]), "exp_avg is not a tensor.*2.bias"),
        (lambda d: d["state"].update({3: None}), "its state.*2.bias"),
        (lambda d: spoiled(d, "exp_avg_sq", -1.0), "exp_avg_sq.*2.bias.*0 or more.*-1.0 at"),
        (lambda d: spoiled(d, "exp_avg_sq", math.inf), "exp_avg_sq.*2.bias.*finite.*inf at"),
        (lambda d: spoiled(d, "exp_avg", math.nan), "its exp_avg .*2.bias.*finite.*nan at"),
        (lambda d: recast(d, torch.complex64), "its exp_avg .*2.bias.*float32.*complex64"),
        (lambda d: recast(d, torch.float8_e4m3fn), "its exp_avg .*2.bias.*float32.*float8"),
        (lambda d: recast(d, torch.uint8), "its exp_avg .*2.bias.*float32.*uint8"),
        (lambda d: recast(d, "meta"), "its exp_avg .*2.bias.*in memory.*on meta"),
        (
            lambda d: d["state"][3].update(exp_avg=torch.full((32,), 1e300, dtype=torch.float64)),
            "its exp_avg .*2.bias.*finite.*inf at",
        ),
        (lambda d: d["state"][3].update(step=1e300), "its step.*2.bias.*below 2"),
        (lambda d: d["state"][3].update(step=-1), "its step.*2.bias"),
        (lambda d: d["state"][3].update(step="x"), "its step.*2.bias"),
        (lambda d: d.pop("state"), "'state' and 'param_groups'"),
        (lambda d: d.pop("param_groups"), "'state' and 'param_groups'"),
        (lambda d: d["param_groups"][0].pop("params"), "lacks 'params'"),
        (lambda d: d["param_groups"][0].update(lr=-1.0), "this lr"),
        (lambda d: d["param_groups"][0].update(lr="much"), "lr.*a number.*'much'"),
        (lambda d: d["param_groups"][0].update(betas=(0.9,)), "betas.*two numbers"),
        (lambda d: d["param_groups"][0].update(amsgrad=True), "amsgrad of .*expected False"),
        (lambda d: d["param_groups"].append(d["param_groups"][0]), "other parameter groups"),
    ],
)
def test_a_refused_state_dict_changes_nothing(spoil: Callable[..., Any], words: str) -> None:
    pair = Pair()
    pair.step(2)
    saved = copy.deepcopy(pair.ours.state_dict())
    saved["param_groups"][0].update(lr=0.5, betas=(0.1, 0.2))
    for entry in saved["state"].values():
        entry["exp_avg"] += 1
        entry["step"] += 5
    spoil(saved)
    before, digest = copy.deepcopy(pair.ours.state_dict()), pair.ours.digest()
    with pytest.raises(modicum.UsageError, match=words):
        pair.ours.load_state_dict(saved)
    assert pair.ours.digest() == digest
    after = pair.ours.state_dict()
    assert after["param_groups"] == before["param_groups"]
    for index, entry in before["state"].items():
        assert all(torch.equal(after["state"][index][name], entry[name]) for name in entry)
    pair.step(2)
    pair.assert_same()


# ---- options


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"betas": (0.9,)}, "betas.*two numbers"),
        ({"betas": 0.9}, "betas.*two numbers"),
        ({"betas": (0.9, "x")}, "betas.*a number"),
        ({"betas": (1.0, 0.9)}, "beta1"),
        ({"betas": (0.9, math.nan)}, "beta2"),
        ({"lr": math.nan}, "this lr"),
        ({"lr": torch.ones(2)}, "lr.*a number"),
        ({"eps": -1e-8}, "eps"),
        ({"weight_decay": -1.0}, "this weight_decay"),
        ({"seed": -1}, "seed.*integer.*-1"),
        ({"seed": 1.5}, "seed.*integer.*1.5"),
        ({"seed": 1 << 64}, "seed.*integer"),
        ({"seed": None}, "seed.*integer"),
        ({"state_format": None}, "state_format.*a string.*None"),
        ({"semantics": 3}, "semantics.*a string.*3"),
        ({"memory": MemoryPolicy(ledger=5)}, "ledger.*a modicum.Ledger.*5"),
        ({"capturable": True}, "capturable"),
        ({"differentiable": True}, "differentiable"),
    ],
)
def test_wrong_options_are_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(modicum.UsageError, match=words):
        AdamW([nn.Parameter(torch.ones(3))], **options)


@pytest.mark.parametrize(
    "options",
    [{"fused": True}, {"foreach": True}, {"fused": False, "foreach": False}, {"fused": None},
     {"capturable": False, "differentiable": False}],
)  # fmt: skip
def test_torchs_choices_of_an_implementation_are_accepted(options: dict[str, Any]) -> None:
    """They have no effect. `capturable` and `differentiable` must be False."""
    p, q = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3))
    one, other = AdamW([p], **options), AdamW([q])
    for parameter, optimizer in ((p, one), (q, other)):
        parameter.grad = torch.ones(3)
        optimizer.step()
    assert torch.equal(p, q)
    one.param_groups[0]["capturable"] = True
    with pytest.raises(modicum.UsageError, match="capturable"):
        one.step()


def test_maximize_eps_and_betas_may_be_set_between_steps() -> None:
    pair = Pair()
    for key, value in (("maximize", True), ("eps", 1e-3), ("maximize", False), ("betas", (0, 0.5))):
        for optimizer in (pair.ours, pair.torchs):
            optimizer.param_groups[0][key] = value
        pair.step(2)
        pair.assert_same()


@pytest.mark.parametrize("scale", (0.0, -1.0, math.inf, math.nan, 1e-45))
def test_a_scale_that_is_not_positive_or_has_no_inverse_is_refused(scale: float) -> None:
    """The inverse of 1e-45 is too large for a float32."""
    p = nn.Parameter(torch.ones(3))
    optimizer = AdamW([p])
    p.grad = torch.ones(3)
    optimizer.grad_scale = torch.tensor(scale)
    with pytest.raises(modicum.UsageError, match="GradScaler's scale"):
        optimizer.step()
    assert torch.equal(p, torch.ones(3))


# ---- torch's defaults


@pytest.mark.parametrize(
    ("dtype", "device"),
    [(torch.bfloat16, "cpu"), (torch.float64, "cpu"), (torch.float32, "meta")],
    ids=("bfloat16", "float64", "meta"),
)
@pytest.mark.parametrize("state_format", ("fp32-split", "int8-moments"))
def test_state_does_not_depend_on_torchs_defaults(
    state_format: str, dtype: torch.dtype, device: str
) -> None:
    """Neither on the default dtype nor on the default device (meta, in place of cuda). The step,
    301, is not a bfloat16."""
    start = torch.randn(32, 160).bfloat16()

    def run() -> tuple[Any, Any]:
        weight = nn.Parameter(start.clone())
        optimizer = AdamW([("weight", weight)], state_format=state_format)
        for _ in range(2):
            weight.grad = start.clone()
            optimizer.clip_grad_norm_(1.0)
            optimizer.step()
            saved = optimizer.state_dict()
            saved["state"][0]["step"] = 300.0
            optimizer.load_state_dict(saved)
        weight.grad = start.clone()
        optimizer.step()
        items = [item.clone() for *_, item in optimizer.state_items()]
        return optimizer.state_dict()["state"][0], items

    expected, expected_items = run()
    torch.set_default_dtype(dtype)
    torch.set_default_device(device)
    try:
        assert torch_dispatch.KNOWN.mismatch() == "" and torch_core.KNOWN.mismatch() == ""
        saved, items = run()
    finally:
        torch.set_default_dtype(torch.float32)
        torch.set_default_device(None)
    assert saved["step"].item() == 301
    for name, value in expected.items():
        assert saved[name].dtype == torch.float32 and torch.equal(saved[name], value), name
    assert all(map(torch.equal, items, expected_items))


def test_an_optimizer_that_is_made_in_inference_mode_steps() -> None:
    pair = Pair()
    with torch.inference_mode():
        pair.ours = AdamW(pair.mine.named_parameters(), **pair.options)
    pair.step(2)
    pair.assert_same()


# ---- gradients with a graph


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph")
def test_a_gradient_of_the_program_stays_where_it_is() -> None:
    """The gradients are parts of one tensor, as in data parallelism by hand, whose all-reduce here
    is a multiplication."""
    weights = []
    for kind in (AdamW, torch.optim.AdamW):
        torch.manual_seed(0)
        model = nn.Linear(8, 4)
        parameters = [*model.parameters()]
        optimizer = kind(parameters, lr=1e-2)
        flat = torch.zeros(sum(p.numel() for p in parameters))
        parts = flat.split([p.numel() for p in parameters])
        for parameter, part in zip(parameters, parts, strict=True):
            parameter.grad = part.view_as(parameter)
        for k in range(3):
            flat.zero_()
            model(torch.full((2, 8), 1.0 + k)).pow(2).mean().backward()
            flat.mul_(0.1)
            optimizer.step()
        assert parameters[0].grad.untyped_storage().data_ptr() == flat.data_ptr()
        weights.append(model.weight.detach())
    torch.testing.assert_close(weights[0], weights[1], rtol=0, atol=1e-6)


def test_a_gradient_with_a_graph_is_differentiated_as_in_torch() -> None:
    pair = Pair()

    def penalise(model: nn.Module, optimizer: Any) -> None:
        model(x).square().sum().backward(create_graph=True)
        penalty = sum(p.grad.square().sum() for p in model.parameters())
        optimizer.zero_grad()
        penalty.backward()
        optimizer.step()
        optimizer.zero_grad()
        model(x).square().sum().backward(create_graph=True)
        optimizer.step()
        optimizer.zero_grad()

    with nearest_sqrt():
        for _ in range(2):
            x = torch.randn(5, 3, 4, 4)
            pair.on_both(penalise)
    pair.assert_same()


# ---- freed memory, under the allocator's own checks


@pytest.mark.parametrize("memory", ("torch", "modicum"))
def test_freed_memory_is_never_written(memory: str, root: Path, tmp_path: Path) -> None:
    """Runs a process under glibc's heap checks: malloc and free abort the process when they find a
    damaged block. `memory`: the parameters are in torch's own memory, or in that of
    `modicum.torch.load`."""
    debug = "libc_malloc_debug.so.0"
    environment = os.environ | {
        "LD_PRELOAD": debug,
        "GLIBC_TUNABLES": "glibc.malloc.check=3:glibc.malloc.perturb=165",
    }
    script = root / "tests/support/adamw_moves.py"
    done = subprocess.run(
        [sys.executable, str(script), memory, str(tmp_path)],
        env=environment, capture_output=True, text=True, timeout=240,
    )  # fmt: skip
    assert "cannot be preloaded" not in done.stderr, f"no {debug}: install glibc"
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.splitlines()[-1] == "done"
