"""`modicum.torch.AdamW` holds no state for a frozen parameter. It allocates the state when the
parameter is unfrozen or gets a gradient, when its group is added, or when a program sets or loads
an entry of `state` for it.

The oracle is torch.optim.AdamW. Catches: a frozen parameter whose state is charged; an unfrozen
parameter that is never stepped; a parameter that keeps a part of its state after a refusal, or
changes the state of other parameters; an entry of a state dict that goes to another parameter; a
gradient that stays outside the plane (the state's array of gradients), or that keeps the memory of
an optimizer that was freed.
"""

import copy
import gc
import weakref
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from rounding import nearest_sqrt  # noqa: E402  (after torch is known to be there)
from torch import nn  # noqa: E402

import modicum  # noqa: E402
from modicum.torch import AdamW, MemoryPolicy  # noqa: E402

WIDTH = 131  # large enough for 8-bit moments; a row has a block of 128 and a block of 3 elements


def layers(dtype: torch.dtype = torch.float32) -> nn.Sequential:
    torch.manual_seed(5)
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(3))).to(dtype)


def train(model: nn.Module, optimizer: Any, steps: int = 2) -> None:
    generator = torch.Generator().manual_seed(6)
    with nearest_sqrt():
        for _ in range(steps):
            x = torch.randn(5, WIDTH, generator=generator).to(model[2].weight.dtype)
            model(x).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()


def assert_same(mine: nn.Module, theirs: nn.Module, ours: Any, torchs: Any) -> None:
    """Asserts equal parameters, and equal values of all entries that torch's `state` has."""
    for (name, p), q in zip(mine.named_parameters(), theirs.parameters(), strict=True):
        assert torch.equal(p, q), name
        for key, value in torchs.state.get(q, {}).items():
            assert torch.equal(ours.state[p][key], value), (name, key)


def test_a_frozen_parameter_holds_nothing_until_it_trains() -> None:
    """When it begins to train its step count begins at 0, as in torch. The state of the other
    parameters stays at its addresses. Frozen again, the parameter keeps its state."""
    mine, theirs = layers(), layers()
    for model in (mine, theirs):
        model[:2].requires_grad_(False)
    ledger = modicum.Ledger()
    ours = AdamW(mine.named_parameters(), lr=1e-2, memory=MemoryPolicy(ledger=ledger))
    ledger_of_one_layer = modicum.Ledger()
    other = AdamW(mine[2].named_parameters(), memory=MemoryPolicy(ledger=ledger_of_one_layer))
    assert ledger.held_bytes == ledger_of_one_layer.held_bytes > 0
    assert ours.held["fp32"]["parameters"] == WIDTH * (WIDTH + 1)
    del other
    torchs = torch.optim.AdamW(theirs.named_parameters(), lr=1e-2)
    train(mine, ours)
    train(theirs, torchs)
    assert ours.state_dict()["state"].keys() == torchs.state_dict()["state"].keys() == {4, 5}
    before, entry = ledger.held_bytes, ours.state[mine[2].weight]
    kept_step, address = entry["step"], entry["exp_avg"].data_ptr()
    for model in (mine, theirs):
        model[0].requires_grad_(True)
    train(mine, ours)
    train(theirs, torchs)
    assert ledger.held_bytes == 2 * before
    assert ours.state[mine[2].weight]["step"] is kept_step
    assert entry["exp_avg"].data_ptr() == address
    assert ours.state[mine[0].weight]["step"] == 2 and kept_step == 4
    assert_same(mine, theirs, ours, torchs)
    for model in (mine, theirs):
        model[0].requires_grad_(False)
    train(mine, ours)
    train(theirs, torchs)
    assert ours.state[mine[0].weight]["step"] == 2
    for model in (mine, theirs):
        model.requires_grad_(True)
    train(mine, ours, 3)
    train(theirs, torchs, 3)
    assert_same(mine, theirs, ours, torchs)
    assert mine[0].weight.grad is None
    mine(torch.ones(WIDTH)).sum().backward()
    grads = [(part.parameter.grad, slot.grad) for part, slot in ours._bound.slots.items()]
    assert all(grad is view for grad, view in grads), "not in the plane"
    del grads
    mine.zero_grad()
    gone = weakref.ref(ours)
    del ours, entry, kept_step
    gc.collect()
    assert gone() is None and ledger.held_bytes == 0


@pytest.mark.parametrize("state_format", ("fp32", "int8-moments"))
def test_a_parameter_that_does_not_fit_is_refused_by_name(state_format: str) -> None:
    """The refusal changes nothing. With a larger limit the next step allocates the state."""
    mine = layers(torch.bfloat16)
    mine[1].requires_grad_(False)
    ledger = modicum.Ledger()
    ours = AdamW(mine.parameters(), state_format=state_format, memory=MemoryPolicy(ledger=ledger))
    train(mine, ours)
    ledger.limit_bytes = ledger.held_bytes
    digest, state, held = ours.digest(), dict(ours.state), ledger.held_bytes
    mine[1].requires_grad_(True)
    for call in (ours.step, lambda: ours.clip_grad_norm_(1.0), ours.state_dict, ours.digest):
        mine(torch.ones(WIDTH, dtype=torch.bfloat16)).sum().backward()
        with pytest.raises(modicum.BudgetError, match=r"'1\.weight' and 1 more") as refused:
            call()
        assert refused.value.tensor == "1.weight"
        assert ledger.held_bytes == held and dict(ours.state) == state
    mine[1].requires_grad_(False)
    ours.zero_grad()
    assert ours.digest() == digest
    ledger.limit_bytes = None
    mine[1].requires_grad_(True)
    train(mine, ours, 1)
    assert ours.state[mine[1].weight]["step"] == 1 and ledger.held_bytes > held


def test_an_added_group_trains_as_in_torch() -> None:
    """The group gets the optimizer's defaults. A state dict includes it, and torch's AdamW can load
    the dict."""
    mine, theirs = layers(), layers()
    make = {"lr": 1e-2, "weight_decay": 0.1}
    ours = AdamW(mine[2].parameters(), **make)
    torchs = torch.optim.AdamW(theirs[2].parameters(), **make)
    train(mine, ours)
    train(theirs, torchs)
    mine.zero_grad()
    theirs.zero_grad()
    for optimizer, model in ((ours, mine), (torchs, theirs)):
        optimizer.add_param_group({"params": model[0].parameters(), "lr": 3e-2, "amsgrad": True})
        optimizer.add_param_group({"params": model[1].weight})
    for group, expected in zip(ours.param_groups, torchs.param_groups, strict=True):
        assert {name: group[name] for name in expected if name != "params"} == {
            name: value for name, value in expected.items() if name != "params"
        }
    train(mine, ours)
    train(theirs, torchs)
    assert_same(mine, theirs, ours, torchs)
    saved, digest = copy.deepcopy(ours.state_dict()), ours.digest()
    theirs.zero_grad()
    torchs.load_state_dict(copy.deepcopy(saved))
    train(mine, ours)
    train(theirs, torchs)
    assert_same(mine, theirs, ours, torchs)
    ours.load_state_dict(saved)
    # Loading restores the moments. The parameters, which are their own masters, keep their values.
    assert ours.digest() != digest
    assert ours.state[mine[1].weight]["step"] == 2


@pytest.mark.parametrize(
    ("group", "error", "words"),
    [
        (lambda m: {"params": m[2].weight}, modicum.UsageError, "given twice.*2.weight"),
        (lambda m: {"params": [m[0].weight] * 2}, modicum.UsageError, "given twice.*0.weight"),
        (lambda m: {"params": m[0].weight, "lr": -1.0}, modicum.UsageError, "this lr"),
        (lambda m: {"params": m[0].weight}, modicum.BudgetError, "'0.weight'"),
        (lambda m: {"params": {m[0].weight}}, TypeError, "ordered collections"),
        (lambda m: {"params": [torch.ones(2) * m[0].bias[:2]]}, ValueError, "non-leaf"),
        (lambda m: [m[0].weight], TypeError, "must be a dict"),
        (lambda m: {"params": m[0].double().weight}, modicum.UsageError, "its dtype.*0.weight"),
    ],
)
def test_a_group_that_is_refused_is_not_added(group: Any, error: Any, words: str) -> None:
    mine = layers()
    ledger = modicum.Ledger()
    ours = AdamW(mine[2].parameters(), memory=MemoryPolicy(ledger=ledger))
    train(mine, ours)
    mine.zero_grad()
    if error is modicum.BudgetError:
        ledger.limit_bytes = ledger.held_bytes
    held, digest = ledger.held_bytes, ours.digest()
    with pytest.raises(error, match=words):
        ours.add_param_group(group(mine))
    assert len(ours.param_groups) == 1 and ledger.held_bytes == held and ours.digest() == digest
    ledger.limit_bytes = None
    ours.add_param_group({"params": mine[1].parameters()})
    assert len(ours.state) == 4


def test_a_loaded_entry_of_a_frozen_parameter_is_allocated() -> None:
    """As in torch, the entry is kept until the parameter trains."""
    source, theirs, mine = layers(), layers(), layers()
    first = torch.optim.AdamW(source.parameters(), lr=1e-2)
    train(source, first)
    saved = copy.deepcopy(first.state_dict())
    for model in (mine, theirs):
        model.load_state_dict(source.state_dict())
        model[0].requires_grad_(False)
    ledger = modicum.Ledger()
    ours, torchs = (
        AdamW(mine.parameters(), memory=MemoryPolicy(ledger=ledger)),
        torch.optim.AdamW(theirs.parameters()),
    )
    held = ledger.limit_bytes = ledger.held_bytes
    with pytest.raises(modicum.BudgetError, match=r"'0\.weight' and 1 more"):
        ours.load_state_dict(saved)
    assert ledger.held_bytes == held and ours.param_groups[0]["lr"] == 1e-3
    ledger.limit_bytes = None
    ours.load_state_dict(saved)
    torchs.load_state_dict(copy.deepcopy(saved))
    assert ours.state[mine[0].weight]["step"] == 2
    for _ in range(2):
        train(mine, ours)
        train(theirs, torchs)
        assert_same(mine, theirs, ours, torchs)
        for model in (mine, theirs):
            model.requires_grad_(True)
    # Without entries for the frozen layer nothing is allocated for it.
    del saved["state"][0], saved["state"][1]
    mine[0].requires_grad_(False)
    again = AdamW(mine.parameters())
    again.load_state_dict(saved)
    assert again.held["fp32"]["parameters"] == 2 * WIDTH * (WIDTH + 1)
    assert again.state[mine[1].weight]["step"] == 2


def test_a_frozen_parameter_with_a_gradient_is_stepped() -> None:
    """As in torch, the step begins from the entry of `state` that the program has set, if there is
    one. All parameters are frozen. Two have gradients; one of these also has an entry."""
    mine, theirs = layers(), layers()
    for model in (mine, theirs):
        model.requires_grad_(False)
    ours, torchs = AdamW(mine.parameters(), lr=0.1), torch.optim.AdamW(theirs.parameters(), lr=0.1)
    assert ours.held == {} and ours.state_dict()["state"] == {}
    with nearest_sqrt():
        for optimizer, model in ((ours, mine), (torchs, theirs)):
            bias = model[1].bias
            optimizer.state[bias] = {
                "step": torch.tensor(3.0),
                "exp_avg": torch.full((WIDTH,), 0.25),
                "exp_avg_sq": torch.full((WIDTH,), 0.5),
            }
            for p in (bias, model[2].weight):
                p.grad = torch.ones_like(p)
            optimizer.step()
            optimizer.zero_grad()
    assert_same(mine, theirs, ours, torchs)
    assert ours.held["fp32"]["parameters"] == WIDTH + WIDTH**2


# ---- messages


def test_messages_name_the_fqn_of_a_parameter_without_a_name() -> None:
    model = nn.ModuleDict({"block": layers()})
    optimizer = AdamW(model.parameters())
    weight = model["block"][1].weight
    weight.grad = torch.sparse_coo_tensor([[0], [0]], [1.0], weight.shape, check_invariants=True)
    with pytest.raises(modicum.UsageError, match=r"sparse \(tensor block\.1\.weight\)") as refused:
        optimizer.step()
    assert refused.value.tensor == "block.1.weight"
    weight.grad = None
    other = nn.ModuleList([model["block"][1]])  # the weight now has two names: no FQN is its own
    weight.grad = torch.sparse_coo_tensor([[0], [0]], [1.0], weight.shape, check_invariants=True)
    with pytest.raises(modicum.UsageError, match=r"tensor param\.2"):
        optimizer.step()
    del other


def test_a_skipped_step_warns_once() -> None:
    """The warning names the parameter whose gradient is not finite and the caller's line."""
    model = layers()
    optimizer = AdamW(model.named_parameters())
    with pytest.warns(UserWarning, match=r"skipped a step.*'1\.bias'.*skipped_steps") as warned:
        for _ in range(3):
            model(torch.ones(WIDTH)).sum().backward()
            model[1].bias.grad[3] = torch.nan
            optimizer.step()
            optimizer.zero_grad()
    assert len(warned) == 1 and warned[0].filename == __file__
    assert optimizer.skipped_steps == 3


# ---- gradients in the plane, and those that the caller keeps


def in_plane(optimizer: AdamW, parameter: nn.Parameter) -> bool:
    slots = optimizer._bound.slots.items()
    (buffer,) = (slot.grad_buffer for part, slot in slots if part.parameter is parameter)
    return parameter.grad.data_ptr() == buffer.data_ptr()


def test_gradients_of_an_unfrozen_parameter_with_a_loaded_entry_are_in_the_plane() -> None:
    """From the second backward on: the first step hooks the parameter."""
    model = layers()
    optimizer = AdamW(model.parameters())
    train(model, optimizer)
    saved = copy.deepcopy(optimizer.state_dict())
    model[0].requires_grad_(False)
    optimizer = AdamW(model.parameters())
    optimizer.load_state_dict(saved)
    model[0].requires_grad_(True)
    train(model, optimizer, 1)
    model(torch.ones(WIDTH)).sum().backward()
    assert in_plane(optimizer, model[0].weight)


def test_a_gradient_whose_data_was_set_is_followed_by_one_in_the_plane() -> None:
    model = layers()
    optimizer = AdamW(model.parameters())
    weight = model[2].weight
    model(torch.ones(WIDTH)).sum().backward()
    weight.grad.data = 2 * weight.grad.data
    assert not in_plane(optimizer, weight)
    optimizer.step()
    optimizer.zero_grad()
    model(torch.ones(WIDTH)).sum().backward()
    assert in_plane(optimizer, weight)


def test_a_freed_optimizer_frees_its_memory_and_leaves_the_gradients() -> None:
    model, ledger = layers(), modicum.Ledger()
    optimizer = AdamW(model.parameters(), memory=MemoryPolicy(ledger=ledger))
    model(torch.ones(WIDTH)).sum().backward()
    expected = [p.grad.clone() for p in model.parameters()]
    with torch.inference_mode():
        del optimizer
    assert ledger.held_bytes == 0
    assert all(torch.equal(p.grad, of) for p, of in zip(model.parameters(), expected, strict=True))
    model(torch.ones(WIDTH)).sum().backward()
    assert torch.equal(model[2].weight.grad, 2 * expected[4])


@pytest.mark.parametrize("how", ("accumulated", "assigned"))
def test_a_gradient_that_the_caller_keeps_is_not_overwritten(how: str) -> None:
    """After zero_grad and another backward the kept tensor has its old values, and the new gradient
    has the old one's address in the gradient buffer. "assigned": the program sets `grad` itself."""
    model = layers()
    optimizer = AdamW(model.parameters())
    weight = model[2].weight
    address = 0  # of the gradient in the plane
    for step in range(3):
        model((1.0 + step) * torch.ones(WIDTH)).sum().backward()
        if how == "assigned":
            weight.grad = weight.grad.clone() if step else weight.grad
        address = address or weight.grad.data_ptr()
        kept, values = weight.grad, weight.grad.clone()
        optimizer.step()
        optimizer.zero_grad()
        model(torch.full((WIDTH,), 9.0)).sum().backward()
        optimizer.clip_grad_norm_(1.0)
        assert torch.equal(kept, values) and not torch.equal(weight.grad, values)
        assert weight.grad.data_ptr() == address, "not in the plane"
        optimizer.zero_grad()
