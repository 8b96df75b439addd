"""`modicum.torch.AdamW` with the optimizer inputs that torch.testing lists, and in the uses that
torch's test_optim.py tests.

The oracle is torch.optim.AdamW. REFUSED lists options that torch accepts and Modicum refuses.
MESSAGES has Modicum's answer to inputs that torch refuses; Modicum accepts some. Catches: an option
that is read only once; a hook that is not called; a refused input that is accepted.
"""

import copy
import functools
import pickle
import re
import warnings
from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("expecttest", reason="torch.testing's table of optimizers imports it")

from rounding import nearest_sqrt  # noqa: E402  (after torch is known to be there)
from torch import nn  # noqa: E402
from torch.optim.optimizer import register_optimizer_step_pre_hook  # noqa: E402
from torch.testing._internal import common_optimizers as tables  # noqa: E402

import modicum  # noqa: E402
from modicum.torch import AdamW  # noqa: E402

INFO = next(info for info in tables.optim_db if info.optim_cls is torch.optim.AdamW)
INPUTS = tables._get_optim_inputs_including_global_cliquey_kwargs("cpu", torch.float32, INFO)
ERRORS = INFO.optim_error_inputs_func("cpu", torch.float32)

# By name: an option that is refused if it is set, and the error message.
REFUSED = {"differentiable": r"UNSUPPORTED: differentiable: .*expected False, got True"}

# By torch's description of the input: the error message, or None if Modicum's AdamW accepts it.
MESSAGES: dict[str, str | None] = {
    "invalid param type": "iterable of Tensors or dicts",
    "a param group cannot have duplicate parameters": "a parameter is given twice .*param.1",
    "warn on a bare unordered set of params": "ordered collections",  # from torch 2.15 on
    "duplicate parameters should not occur across param groups either": "given twice .*param.1",
    "Tensor lr must be 1-element": "lr .expected a number",
    "all optimizer params should be with/without names": "Some param names are missing",
    "all optimizer param groups should be with/without names.": "with/without names",
    "beta1 should be between 0 and 1": "beta1",
    "weight_decay should > 0": "this weight_decay",
    "lr as Tensor doesn't work with foreach & not capturable": None,
    "betas must be either both floats or both Tensors": None,
    r"betas\[0\] as a Tensor is not supported for capturable=False and foreach=True": None,
}


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 13), nn.Tanh(), nn.Linear(13, 3))


def train(model: nn.Module, optimizer: Any, steps: int = 4, scheduler: Any = None) -> None:
    generator = torch.Generator().manual_seed(1)
    with nearest_sqrt():
        for _ in range(steps):
            optimizer.zero_grad()
            loss = model(torch.randn(4, 5, generator=generator)).square().sum()
            loss.backward()
            optimizer.step()
            if isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau):
                scheduler.step(loss)
            elif scheduler is not None:
                scheduler.step()


def assert_same(mine: nn.Module, theirs: nn.Module, ours: Any, torchs: Any) -> None:
    for p, q in zip(mine.parameters(), theirs.parameters(), strict=True):
        assert torch.equal(p, q)
        for name, value in torchs.state[q].items():
            assert torch.equal(ours.state[p][name], value), name


# ---- the tables


@pytest.mark.parametrize("made", INPUTS, ids=[one.desc for one in INPUTS])
def test_inputs_of_torchs_table(made: Any) -> None:
    """Whichever of torch's implementations the input requests, the bits are those of the
    single-tensor one."""
    mine, theirs = net(), net()
    refused = [words for name, words in REFUSED.items() if made.kwargs.get(name)]
    if refused:
        with pytest.raises(modicum.UsageError, match=refused[0]):
            AdamW(mine.parameters(), **made.kwargs)
        return
    ours = AdamW(mine.parameters(), **made.kwargs)
    single_tensor = made.kwargs | dict.fromkeys(("foreach", "fused", "differentiable"), False)
    torchs = torch.optim.AdamW(theirs.parameters(), **single_tensor)
    # These options have their requested values in `defaults`, or torch's default values.
    unset = {"foreach": None, "fused": None, "differentiable": False}
    assert ours.defaults == torchs.defaults | unset | made.kwargs
    train(mine, ours)
    train(theirs, torchs)
    assert_same(mine, theirs, ours, torchs)
    assert "Parameter Group 0" in repr(ours)


@pytest.mark.parametrize("made", ERRORS, ids=[one.optimizer_error_input.desc for one in ERRORS])
def test_error_inputs_of_torchs_table(made: Any) -> None:
    given = made.optimizer_error_input
    params = net().parameters() if given.params is None else given.params
    words = MESSAGES[given.desc]
    if words is None:
        AdamW(params, **given.kwargs).step()
        return
    with pytest.raises((modicum.UsageError, made.error_type), match=words):
        with warnings.catch_warnings():
            warnings.simplefilter("error", FutureWarning)
            AdamW(params, **given.kwargs)


@pytest.mark.parametrize("which", range(len(INFO.scheduler_inputs)))
def test_schedulers_of_torchs_table(which: int) -> None:
    mine, theirs = net(), net()
    ours, torchs = (o(m.parameters(), lr=0.02)
                    for o, m in ((AdamW, mine), (torch.optim.AdamW, theirs)))  # fmt: skip
    for make in INFO.scheduler_inputs[which]:
        for model, optimizer in ((mine, ours), (theirs, torchs)):
            train(model, optimizer, 12, make(optimizer))
    assert ours.param_groups[0]["lr"] == torchs.param_groups[0]["lr"]
    assert_same(mine, theirs, ours, torchs)


# ---- uses that torch's test_optim.py tests


def test_groups_train_by_their_own_options() -> None:
    mine, theirs = net(), net()
    made = []
    for model, make in ((mine, AdamW), (theirs, torch.optim.AdamW)):
        groups = [
            {"params": model[0].parameters(), "lr": 0.1, "weight_decay": 0.0},
            {"params": model[2].weight, "maximize": True},
            {"params": [model[2].bias], "betas": (0.5, 0.75)},
        ]
        made.append(make(groups, lr=0.01))
        train(model, made[-1])
    assert_same(mine, theirs, *made)


def test_steps_without_gradients_and_with_zeros() -> None:
    """If a parameter's gradient is None, the parameter is unchanged and its step is not counted. If
    the gradient is zero, the step is counted and weight decay is applied."""
    mine, theirs = net(), net()
    ours, torchs = AdamW(mine.parameters()), torch.optim.AdamW(theirs.parameters())
    bits = [p.detach().clone() for p in mine.parameters()]
    with pytest.warns(UserWarning, match="no gradient"):
        ours.step()
    torchs.step()
    assert all(map(torch.equal, mine.parameters(), bits))
    assert all(entry["step"] == 0 for entry in ours.state.values()) and not torchs.state
    for model, optimizer in ((mine, ours), (theirs, torchs)):
        for p in model.parameters():
            p.grad = torch.zeros_like(p)
        optimizer.step()
    assert_same(mine, theirs, ours, torchs)


def test_state_dicts_of_older_versions_of_torch_load() -> None:
    """Such a dict lacks newer options and parameter names, and its steps are numbers. Later steps
    do not change the loaded dict. A dict without names does not remove the optimizer's names."""
    mine, theirs = net(), net()
    ours = AdamW(mine.named_parameters(), lr=0.01)
    torchs = torch.optim.AdamW(theirs.parameters(), lr=0.01)
    train(mine, ours)
    train(theirs, torchs)
    saved = pickle.loads(pickle.dumps(ours.state_dict()))
    for name in ("maximize", "foreach", "fused", "capturable", "differentiable", "param_names"):
        saved["param_groups"][0].pop(name)
    for entry in saved["state"].values():
        entry["step"] = entry["step"].item()
    before = copy.deepcopy(saved)
    ours.load_state_dict(saved)
    torchs.load_state_dict(copy.deepcopy(saved))
    train(mine, ours)
    train(theirs, torchs)
    assert_same(mine, theirs, ours, torchs)
    for index, entry in before["state"].items():
        for name in ("exp_avg", "exp_avg_sq"):
            assert torch.equal(saved["state"][index][name], entry[name]), (index, name)
    ours.load_state_dict(torchs.state_dict())
    assert ours.param_groups[0]["param_names"] == [name for name, _ in mine.named_parameters()]


def test_hooks_are_called_in_torchs_order() -> None:
    """The hook `other_lr` replaces the dict that is loaded."""
    calls: dict[Any, list[Any]] = {}
    for make in (AdamW, torch.optim.AdamW):
        model, called = net(), []
        optimizer = make(model.parameters())

        def note(word: str, *_: Any, to: list[Any] = called) -> None:
            to.append(word)

        def other_lr(_: Any, saved: dict[str, Any]) -> dict[str, Any]:
            groups = [group | {"lr": 0.5} for group in saved["param_groups"]]
            return saved | {"param_groups": groups}

        register: list[tuple[str, Callable[..., Any]]] = [
            (name, getattr(optimizer, f"register_{name}_hook"))
            for name in ("step_pre", "step_post", "state_dict_pre", "state_dict_post",
                         "load_state_dict_pre", "load_state_dict_post")
        ]  # fmt: skip
        handles = [add(functools.partial(note, name)) for name, add in register]
        for name, add in register[2:]:
            handles.append(add(functools.partial(note, f"first {name}"), prepend=True))
        global_handle = register_optimizer_step_pre_hook(functools.partial(note, "global"))
        optimizer.register_load_state_dict_pre_hook(other_lr)
        train(model, optimizer, 1)
        optimizer.load_state_dict(optimizer.state_dict())
        assert optimizer.param_groups[0]["lr"] == 0.5
        global_handle.remove()
        for handle in handles:
            handle.remove()
        train(model, optimizer, 1)
        calls[make] = called
    # While the hooks are registered: 3 calls in a step, 2 before and 2 after each of state_dict and
    # load_state_dict. Without them: none.
    assert calls[AdamW] == calls[torch.optim.AdamW] and len(calls[AdamW]) == 11


def test_options_set_in_a_group_after_a_step_apply_or_are_refused() -> None:
    """`maximize` applies. `capturable` and `differentiable` are refused. `foreach` and `fused` have
    no effect."""
    model = net()
    optimizer = AdamW(model.parameters())
    train(model, optimizer, 1)
    group = optimizer.param_groups[0]
    group["foreach"] = group["fused"] = True
    train(model, optimizer, 1)
    for name in ("capturable", "differentiable"):
        group[name] = True
        with pytest.raises(modicum.UsageError, match=f"{name}: "):
            optimizer.step()
        group[name] = False
    bits = model[2].bias.detach().clone()
    group["maximize"], group["weight_decay"] = True, 0.0
    optimizer.state.clear()  # without momentum a step has the sign of the gradient
    model(torch.ones(5)).sum().backward()
    moved = model[2].bias.grad.sign()
    optimizer.step()
    assert torch.equal((model[2].bias - bits).sign(), moved)


@pytest.mark.parametrize(
    ("use", "words"),
    [
        (lambda o, m: copy.deepcopy(o), "not copied or pickled: use its state_dict"),
        (lambda o, m: pickle.dumps(o), "not copied or pickled"),
        (lambda o, m: AdamW([nn.Parameter(torch.ones(2) + 0j)]), "got torch.complex64"),
        (lambda o, m: AdamW([nn.Parameter(torch.ones(2).double())]), "its dtype"),
        (lambda o, m: setattr(m[0].bias, "grad", torch.ones(13).to_sparse()) or o.step(), "sparse"),
    ],
    ids=("deepcopy", "pickle", "complex", "float64", "sparse"),
)
def test_unsupported_uses_are_refused(use: Callable[..., Any], words: str) -> None:
    model = net()
    with pytest.raises(modicum.UsageError, match=re.compile(words)):
        use(AdamW(model.parameters()), model)
