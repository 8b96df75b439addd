"""`modicum.torch.AdamW` makes the same steps as torch's optimizers and has their interface.

The oracles are torch.optim.AdamW and Adam, and recorded digests of DeepSpeed's CPU Adam. Catches: a
gradient that is added twice, or not at all, to the gradient buffer (the state's array of all
gradients); a parameter without a gradient that is stepped; a parameter that is stepped with the
options of another group; a clip factor that also applies to the next step; a step although a
gradient is not finite; a state dict that torch.optim.AdamW can't continue from.

MKL's square root, which torch calls, misses the nearest float in 17 % of the cases. The tests that
compare bits with torch therefore make torch call a square root that rounds to nearest.
"""

import copy
import functools
import gc
import json
import math
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from rounding import nearest_sqrt  # noqa: E402
from torch import nn  # noqa: E402
from torch.distributed import checkpoint as dcp  # noqa: E402
from torch.distributed.checkpoint.state_dict import (  # noqa: E402
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

import modicum  # noqa: E402
from modicum.torch import AdamW, MemoryPolicy  # noqa: E402
from tests.fixtures import record_deepspeed  # noqa: E402  (after torch is known to be there)

STEPS = 100
FORMATS = ("fp32", "fp32-split", "bf16-moments", "int8-moments", "int8-moments-24")
SPLIT = FORMATS[1:]
TWICE = 4  # the index of Net.twice's weight


class Net(nn.Module):
    """A model with sizes that no SIMD width divides. `forward` uses the matrix `twice` two times.
    Only this matrix is large enough for 8-bit moments. A row of it has 131 elements: a block of
    128, which share a scale, and a block of three."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.first = nn.Linear(13, 131)
        self.norm = nn.LayerNorm(131)
        self.twice = nn.Linear(131, 131, bias=False)
        self.unused = nn.Linear(131, 3)
        self.last = nn.Linear(131, 5)
        self.to(dtype)

    def forward(self, x: Any, with_unused: bool = False) -> Any:
        x = self.norm(self.first(x).tanh())
        x = self.twice(self.twice(x).tanh())
        return self.last(x) + (self.unused(x).sum() if with_unused else 0)


def net(dtype: torch.dtype = torch.float32, seed: int = 0) -> Net:
    torch.manual_seed(seed)
    return Net(dtype)


def batches(count: int, dtype: torch.dtype = torch.float32) -> Iterator[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    for _ in range(count):
        yield torch.randn(8, 13, generator=generator).to(dtype)


def train(model: Net, optimizer: Any, steps: int = STEPS) -> list[float]:
    """Trains and returns the losses. `model.unused` is used in every third step, from the second
    on."""
    losses = []
    for i, x in enumerate(batches(steps, model.last.weight.dtype)):
        loss = (model(x, i % 3 == 1) - x[:, :5]).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def assert_same(model: nn.Module, other: nn.Module) -> None:
    for (name, mine), theirs in zip(model.named_parameters(), other.parameters(), strict=True):
        assert torch.equal(mine, theirs), name


def groups_of(model: Net) -> list[dict[str, Any]]:
    return [
        {"params": [*model.first.parameters()], "lr": 3e-2, "weight_decay": 0.0},
        {"params": [*model.norm.parameters()], "betas": (0.5, 0.9), "eps": 1e-5, "amsgrad": True},
        {"params": [*model.twice.parameters(), *model.last.parameters()], "maximize": True},
        {"params": [*model.unused.parameters()]},
    ]


# ---- the same bits as torch and DeepSpeed


@pytest.mark.parametrize("foreach", (False, True), ids=("single-tensor", "foreach"))
@pytest.mark.parametrize(
    ("options", "ours"),
    [
        pytest.param({}, {}, id="default"),
        pytest.param({"amsgrad": True}, {}, id="amsgrad"),
        pytest.param({"maximize": True, "weight_decay": 0.0}, {}, id="maximize"),
        pytest.param({"betas": (0.3, 0.7), "eps": 1e-4, "weight_decay": 0.3}, {}, id="betas"),
        pytest.param({"betas": (0.0, 0.0)}, {}, id="betas of 0"),
        pytest.param({"weight_decay": 0.1}, {"decoupled_weight_decay": False}, id="L2"),
    ],
)
def test_bits_are_those_of_torch(
    options: dict[str, Any], ours: dict[str, Any], foreach: bool
) -> None:
    # With `decoupled_weight_decay=False` the decay is added to the gradient, as torch's Adam does.
    cls = torch.optim.Adam if "decoupled_weight_decay" in ours else torch.optim.AdamW
    options = {"lr": 1e-2} | options
    model, other = net(), net()
    with nearest_sqrt():
        expected = train(other, cls(other.parameters(), foreach=foreach, **options))
    assert train(model, AdamW(model.parameters(), **options, **ours)) == expected
    assert_same(model, other)
    assert not torch.equal(model.unused.weight, net().unused.weight), "`unused` was never stepped"


def test_groups_learn_by_their_own_options() -> None:
    model, other = net(), net()
    with nearest_sqrt():
        expected = train(other, torch.optim.AdamW(groups_of(other), lr=1e-2))
    assert train(model, AdamW(groups_of(model), lr=1e-2)) == expected
    assert_same(model, other)


def test_lr_may_be_a_tensor() -> None:
    """The tensor belongs to the caller, who may change it between steps."""
    lr = torch.tensor(0.25)
    model, other = net(), net()
    optimizer, expected = AdamW(model.parameters(), lr=lr), AdamW(other.parameters(), lr=0.25)
    train(model, optimizer, 2)
    train(other, expected, 2)
    lr.fill_(0.125)
    expected.param_groups[0]["lr"] = 0.125
    assert train(model, optimizer, 2) == train(other, expected, 2)
    assert_same(model, other)


def test_parameters_stay_near_those_of_torch_with_mkls_square_root() -> None:
    """After 1,000 steps with the same gradients, the norm of the difference is at most 1e-6 of the
    parameters' norm."""
    torch.manual_seed(0)
    mine = nn.Parameter(torch.randn(4099))
    theirs = nn.Parameter(mine.detach().clone())
    ours, torchs = AdamW([mine], lr=1e-2), torch.optim.AdamW([theirs], lr=1e-2)
    for _ in range(1000):
        before = theirs.detach().clone()
        mine.grad = theirs.grad = torch.randn(4099)
        ours.step()
        torchs.step()
    assert (mine - theirs).norm() <= 1e-6 * theirs.norm()
    # A wrong last bit of the root changes an update by one or two units in the last place: by at
    # most 2^-22 of the update. The last update serves as the size of each of the 1,000.
    largest_update = (theirs - before).abs().max().item()
    assert (mine - theirs).abs().max() <= 1000 * largest_update * 2**-22
    # The moments do not depend on the root.
    assert torch.equal(ours.state[mine]["exp_avg_sq"], torchs.state[theirs]["exp_avg_sq"])


@pytest.mark.parametrize("run", range(len(record_deepspeed.RUNS)))
def test_bits_are_those_of_deepspeed(run: int, root: Path) -> None:
    """Compares with digests that tests/fixtures/record_deepspeed.py has recorded of DeepSpeed."""
    fixture = json.loads((root / "tests/fixtures/deepspeed_adam.json").read_text())
    make = functools.partial(AdamW, semantics="deepspeed")
    got = record_deepspeed.recorded(make, record_deepspeed.RUNS[run][1])
    assert got == fixture["runs"][run]


@pytest.mark.parametrize("how", ("accumulated", "replaced", "not contiguous", "model.zero_grad"))
def test_gradients_of_any_origin_are_stepped_as_by_torch(how: str) -> None:
    model, other = net(), net()

    def run(model: Net, optimizer: Any) -> None:
        for i, x in enumerate(batches(20)):
            model(x, i % 3 == 1).square().mean().backward()
            if how == "accumulated":
                for scale in (0.5, -2.0):
                    (scale * model(x).square().mean()).backward()
            if how == "replaced":
                for p in model.parameters():
                    p.grad = None if p.grad is None else p.grad.double().float() * 2
            if how == "not contiguous":
                model.twice.weight.grad = (model.twice.weight.grad.clone() + 1).t()
            optimizer.step()
            zero = model.zero_grad if how == "model.zero_grad" else optimizer.zero_grad
            zero(set_to_none=i % 2 == 0)

    with nearest_sqrt():
        run(other, torch.optim.AdamW(other.parameters(), lr=1e-2))
    run(model, AdamW(model.parameters(), lr=1e-2))
    assert_same(model, other)


def test_a_gradient_is_a_view_of_the_plane() -> None:
    model = net()
    optimizer = AdamW(model.parameters())
    weight = model.first.weight
    for x in batches(3):
        model(x).sum().backward()
        address = weight.grad.data_ptr()
        plane = optimizer._bound.states[0].plane(0, "grad")
        assert address == torch.from_dlpack(plane).data_ptr()
        model(x).sum().backward()
        assert weight.grad.data_ptr() == address
        assert model.unused.weight.grad is None
        optimizer.step()
        optimizer.zero_grad()
        assert weight.grad is None
    assert optimizer.held["fp32"]["grad"] >= 4 * sum(p.numel() for p in model.parameters())


# ---- formats


@pytest.mark.parametrize("state_format", FORMATS)
def test_every_format_trains(state_format: str) -> None:
    """The model is bfloat16, except for its norm: the norm's float32 parameters are their own
    masters in every format. Only the matrix `twice` is large enough for 8-bit codes."""
    model = net(torch.bfloat16)
    model.norm.float()
    model.norm.forward = lambda x: nn.functional.layer_norm(
        x.float(), (131,), model.norm.weight, model.norm.bias
    ).to(x.dtype)
    optimizer = AdamW(model.named_parameters(), lr=3e-3, state_format=state_format)
    losses = train(model, optimizer, 150)
    assert sum(losses[-20:]) < 0.6 * sum(losses[:20])
    norm, matrix = 2 * 131, 131 * 131
    rest = sum(p.numel() for p in model.parameters()) - norm - matrix
    expected = {
        "fp32": {"fp32": rest + norm + matrix},
        "fp32-split": {"fp32-split": rest + matrix, "fp32": norm},
        "bf16-moments": {"bf16-moments": rest + matrix, "bf16-moments-fp32": norm},
    }.get(state_format, {state_format: matrix, "fp32-split": rest, "fp32": norm})
    assert {name: held["parameters"] for name, held in optimizer.held.items()} == expected


def test_fp32_split_has_the_masters_and_moments_of_fp32_to_the_bit() -> None:
    """Both formats get the same bfloat16 gradients. A parameter is the upper half of its master in
    fp32-split, and its rounded master in fp32. The two differ only at ties."""
    one, other = net(torch.bfloat16), net(torch.bfloat16)
    first, second = AdamW(one.parameters()), AdamW(other.parameters(), state_format="fp32-split")
    for x in batches(STEPS, torch.bfloat16):
        one(x, True).square().mean().backward()
        for p, q in zip(one.parameters(), other.parameters(), strict=True):
            q.grad = p.grad.clone()
        for optimizer in (first, second):
            optimizer.step()
            optimizer.zero_grad()
    assert first.digest() == second.digest()
    pairs = [*zip(one.parameters(), other.parameters(), strict=True)]
    ties = sum(int((p != q).sum()) for p, q in pairs)
    assert ties < 1e-3 * sum(p.numel() for p, _ in pairs)
    # At a tie the upper half `q` is the one of the two neighbours that is farther from zero.
    for p, q in pairs:
        off = p.view(torch.int16).int() - q.view(torch.int16).int()
        assert off[p != q].eq(-1).all()


@pytest.mark.parametrize("state_format", SPLIT)
def test_random_bits_depend_on_the_seed_and_not_on_torch_compiles_prefix(state_format: str) -> None:
    def trained(seed: int, rename: Callable[[str], str]) -> dict[str, int]:
        model = net(torch.bfloat16)
        named = [(rename(name), p) for name, p in model.named_parameters()]
        optimizer = AdamW(named, state_format=state_format, seed=seed)
        train(model, optimizer, 5)
        return optimizer.digest()

    before = trained(1, str)
    assert trained(1, str) == before
    assert trained(1, lambda name: f"_orig_mod.{name}") == before, "torch.compile's prefix counts"
    rounds_by_random_bits = state_format != "fp32-split"
    assert (trained(2, str) != before) == rounds_by_random_bits


def test_values_written_to_a_parameter_reach_its_master() -> None:
    """The program writes one row of a parameter. The row's masters get the written values; all
    other masters keep their bits."""
    for state_format in ("fp32", "fp32-split"):
        model = net(torch.bfloat16)
        optimizer = AdamW(model.parameters(), weight_decay=0.0, state_format=state_format)
        train(model, optimizer, 3)
        optimizer.param_groups[0]["lr"] = 0.0
        before = optimizer.state_dict()["state"][0]["master"]
        with torch.no_grad():
            model.first.weight[5] = 0.75
        train(model, optimizer, 1)
        after = optimizer.state_dict()["state"][0]["master"]
        assert (model.first.weight[5] == 0.75).all()
        assert torch.equal(after[5].bfloat16(), model.first.weight[5])
        rest = [row for row in range(131) if row != 5]
        assert not torch.equal(before[rest], before[rest].bfloat16().float()), (
            "each master is a bfloat16 value, so a master that is rounded would not be noticed"
        )
        assert torch.equal(after[rest], before[rest])


# ---- clipping, scaling, skipping


@pytest.mark.parametrize("max_norm", (1e-3, 0.3, 1e3, math.inf))
def test_clips_as_torch(max_norm: float) -> None:
    """`AdamW.clip_grad_norm_` leaves `grad` unchanged. The parameters are near torch's and not
    equal, since the norm is computed in float64. With torch's own clipping function instead, all
    bits are those of torch."""
    model, other, third = net(), net(), net()
    with nearest_sqrt():
        theirs = torch.optim.AdamW(other.parameters(), lr=1e-2)
        ours, by_torch = (AdamW(m.parameters(), lr=1e-2) for m in (model, third))
        for x in batches(20):
            for m in (model, other, third):
                m(x).square().mean().backward()
            before = model.first.weight.grad.clone()
            norm = ours.clip_grad_norm_(max_norm)
            assert ours.clip_grad_norm_(math.inf).item() == norm.item()  # lifts no limit
            assert torch.equal(model.first.weight.grad, before)
            expected = torch.nn.utils.clip_grad_norm_(other.parameters(), max_norm)
            torch.nn.utils.clip_grad_norm_(third.parameters(), max_norm)
            assert norm.item() == pytest.approx(expected.item(), rel=1e-5)
            for optimizer in (ours, theirs, by_torch):
                optimizer.step()
                optimizer.zero_grad()
    assert_same(third, other)
    for p, q in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-4, atol=1e-5)


def test_the_factor_is_that_of_fp64() -> None:
    """With lr 1, betas of 0 and eps 1 a step changes a parameter by -g / (|g| + 1), where g is the
    clipped gradient. The norm of (3, 4, 0) is 5: clipped to 1, the factor is 1 / (5 + 1e-6)."""
    p = nn.Parameter(torch.zeros(3))
    optimizer = AdamW([p], lr=1.0, betas=(0.0, 0.0), eps=1.0, weight_decay=0.0)
    for max_norm, factor in ((1.0, 0.2 / (1 + 1e-6 / 5)), (None, 1.0)):
        p.grad = torch.tensor([3.0, 4.0, 0.0])
        if max_norm is not None:
            assert optimizer.clip_grad_norm_(max_norm) == 5
        before = p.detach().clone()
        optimizer.step()
        clipped = torch.tensor([3.0, 4.0, 0.0], dtype=torch.float64) * factor
        expected = -clipped / (clipped.abs() + 1)
        torch.testing.assert_close((p - before).double(), expected, rtol=1e-6, atol=0)


@pytest.mark.parametrize("bad", (math.nan, math.inf, -math.inf))
@pytest.mark.parametrize("state_format", FORMATS)
def test_a_gradient_that_is_not_finite_changes_no_byte(state_format: str, bad: float) -> None:
    model = net(torch.bfloat16)
    optimizer = AdamW(model.parameters(), state_format=state_format)
    train(model, optimizer, 2)
    before = optimizer.digest()
    bits = [p.detach().clone() for p in model.parameters()]
    model(next(batches(1, torch.bfloat16))).sum().backward()
    model.norm.weight.grad[66] = bad
    assert math.isnan(optimizer.clip_grad_norm_(1.0))
    optimizer.step()
    assert optimizer.digest() == before
    assert optimizer.skipped_steps == 1
    assert all(map(torch.equal, model.parameters(), bits))
    # Of the two steps only the second used `unused`.
    assert {entry["step"].item() for entry in optimizer.state.values()} == {1.0, 2.0}
    optimizer.zero_grad()
    train(model, optimizer, 1)
    assert optimizer.digest() != before


def test_a_gradient_that_changes_after_the_norm_is_read_again() -> None:
    """Between clip_grad_norm_ and step a gradient is multiplied, and in a second try gets a NaN.
    The expected step comes from an optimizer that computes the norm of the changed gradient."""
    model, other = net(), net()
    optimizer, expected = AdamW(model.parameters()), AdamW(other.parameters())
    x = next(batches(1))
    for m in (model, other):
        m(x).square().mean().backward()
    optimizer.clip_grad_norm_(1e-3)
    model.norm.bias.grad.mul_(64)
    other.norm.bias.grad.mul_(64)
    expected.clip_grad_norm_(1e-3)
    optimizer.step()
    expected.step()
    assert optimizer.digest() == expected.digest()
    optimizer.clip_grad_norm_(1e-3)
    model.norm.bias.grad[0] = math.nan
    optimizer.step()
    assert optimizer.digest() == expected.digest() and optimizer.skipped_steps == 1


@pytest.mark.parametrize("unscale_first", (False, True))
def test_a_grad_scaler_works_as_with_torch(unscale_first: bool) -> None:
    """Skips the same steps, and so ends with the same scale, as torch's AdamW: also if the
    gradients are unscaled and clipped before the step."""
    results = []
    for make in (torch.optim.AdamW, AdamW):
        model = net()
        optimizer = make(model.parameters(), lr=1e-2)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**127, growth_interval=3)
        with nearest_sqrt():
            for x in batches(30):
                scaler.scale(1000 * model(x).square().mean()).backward()
                if unscale_first:
                    scaler.unscale_(optimizer)
                    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad()
        results.append((scaler.get_scale(), model))
    assert results[0][0] == results[1][0] != 2.0**127
    assert_same(results[1][1], results[0][1])
    assert optimizer.skipped_steps > 0


def test_clipping_before_a_scaler_unscales() -> None:
    """The limit holds for the norm of the unscaled gradients, so the scale has no effect."""
    clipped = []
    for scale in (1.0, 2.0**10):
        model = net()
        optimizer = AdamW(model.parameters(), lr=1e-2)
        scaler = torch.amp.GradScaler("cpu", init_scale=scale)
        for x in batches(3):
            scaler.scale(model(x).square().mean()).backward()
            optimizer.clip_grad_norm_(0.01)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        clipped.append(model)
    assert_same(*clipped)


# ---- the interface of an optimizer


@pytest.mark.parametrize(
    "schedule",
    [
        lambda o: torch.optim.lr_scheduler.OneCycleLR(o, 0.05, total_steps=40),
        lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, 10),
        lambda o: torch.optim.lr_scheduler.LambdaLR(o, [lambda i: 0.9**i] * len(o.param_groups)),
    ],
    ids=("OneCycle", "cosine", "lambda"),
)
def test_schedulers_change_lr_and_betas(schedule: Callable[[Any], Any]) -> None:
    models, groups = [], []
    with nearest_sqrt():
        for make in (torch.optim.AdamW, AdamW):
            model = net()
            optimizer = make(groups_of(model), lr=1e-2)
            scheduler = schedule(optimizer)
            optimizer.zero_grad()
            for x in batches(40):
                model(x).square().mean().backward()
                optimizer.step()
                scheduler.step() if scheduler.last_epoch < 39 else None
                optimizer.zero_grad()
            models.append(model)
            groups.append([(g["lr"], g["betas"]) for g in optimizer.param_groups])
    assert groups[0] == groups[1]
    assert_same(*models)


def test_hooks_and_closures_are_called() -> None:
    model, called = net(), []
    optimizer = AdamW(model.parameters())
    optimizer.register_step_pre_hook(lambda *_: called.append("before"))
    optimizer.register_step_post_hook(lambda *_: called.append("after"))
    optimizer.register_state_dict_post_hook(lambda o, d: called.append("state") or d | {"own": 1})
    x = next(batches(1))

    def closure() -> Any:
        optimizer.zero_grad()
        loss = model(x).sum()
        loss.backward()
        called.append("closure")
        return loss

    assert optimizer.step(closure).requires_grad
    assert optimizer.state_dict()["own"] == 1
    assert called == ["before", "closure", "after", "state"]
    assert optimizer.state[model.first.weight]["step"] == 1


def test_a_step_is_a_write_for_autograd() -> None:
    """A backward through a graph from before the step raises, as with torch's optimizers."""
    model = net()
    optimizer = AdamW(model.parameters())
    loss = model(next(batches(1))).sum()
    loss.backward(retain_graph=True)
    optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


# ---- state dicts


@pytest.mark.parametrize("amsgrad", (False, True))
@pytest.mark.parametrize("to_torch", (False, True), ids=("from torch", "to torch"))
def test_state_dicts_continue_a_run_from_and_to_torch(to_torch: bool, amsgrad: bool) -> None:
    """One of the two optimizers makes the first ten steps. The other one loads its state dict and
    makes ten more. All bits are those of torch's optimizer that makes all twenty."""
    makes = (AdamW, torch.optim.AdamW) if to_torch else (torch.optim.AdamW, AdamW)
    options = {"lr": 1e-2, "amsgrad": amsgrad}
    other, model = net(), net()
    with nearest_sqrt():
        reference = torch.optim.AdamW(other.parameters(), **options)
        train(other, reference, 10)
        first = makes[0](model.parameters(), **options)
        train(model, first, 10)
        second = makes[1](model.parameters(), lr=5.0, amsgrad=amsgrad)
        second.load_state_dict(copy.deepcopy(first.state_dict()))
        train(model, second, 10)
        train(other, reference, 10)
    assert second.param_groups[0]["lr"] == 1e-2
    assert_same(model, other)
    mine, theirs = second.state_dict()["state"], reference.state_dict()["state"]
    for index, entry in theirs.items():
        for name, value in entry.items():
            assert torch.equal(mine[index][name], value), (index, name)
            assert mine[index][name].shape == value.shape


@pytest.mark.parametrize("state_format", FORMATS)
def test_a_run_goes_on_after_save_and_load(state_format: str) -> None:
    """In fp32, fp32-split and bf16-moments nothing is lost: the run goes on as if it had not been
    interrupted. In the int8 formats the loaded masters are within 2^-14 of the saved ones."""
    model = net(torch.bfloat16)
    optimizer = AdamW(model.parameters(), lr=1e-2, state_format=state_format)
    train(model, optimizer, 7)
    saved = pickle.loads(pickle.dumps((model.state_dict(), optimizer.state_dict())))
    other = net(torch.bfloat16, seed=9)
    again = AdamW(other.parameters(), lr=1.0, state_format=state_format)
    train(other, again, 2)
    other.load_state_dict(saved[0])
    again.load_state_dict(saved[1])
    assert_same(other, model)
    if state_format in ("fp32", "fp32-split", "bf16-moments"):
        assert again.digest() == optimizer.digest()
        assert train(other, again, 7) == train(model, optimizer, 7)
        assert again.digest() == optimizer.digest()
    entry = saved[1]["state"][TWICE]
    for name in ("exp_avg", "exp_avg_sq", "master"):
        assert entry[name].dtype == torch.float32, name
        assert entry[name].shape == model.twice.weight.shape, name
    if state_format.startswith("int8"):
        master = again.state_dict()["state"][TWICE]["master"]
        torch.testing.assert_close(master, entry["master"], rtol=2**-14, atol=0)


def test_every_format_loads_the_state_dict_of_every_format() -> None:
    dicts = {}
    for state_format in FORMATS:
        model = net(torch.bfloat16)
        optimizer = AdamW(model.parameters(), lr=1e-3, state_format=state_format)
        train(model, optimizer, 5)
        dicts[state_format] = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    for name, (weights, saved) in dicts.items():
        for state_format in FORMATS:
            model = net(torch.bfloat16)
            optimizer = AdamW(model.parameters(), state_format=state_format)
            model.load_state_dict(weights)
            optimizer.load_state_dict(saved)
            now = optimizer.state_dict()["state"][TWICE]
            for part in ("exp_avg", "master"):
                was = saved["state"][TWICE][part]
                # An 8-bit code of exp_avg is off by less than 1/60 of the largest value.
                atol = was.abs().max().item() / 60 if part == "exp_avg" else 1e-30
                torch.testing.assert_close(
                    now[part], was, rtol=2**-7, atol=atol,
                    msg=lambda text, to=state_format, source=name: f"{source} into {to}: {text}",
                )  # fmt: skip
            assert now["step"] == 5


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16), ids=str)
@pytest.mark.parametrize("state_format", FORMATS)
def test_dcps_flat_state_dict_has_every_value(state_format: str, dtype: torch.dtype) -> None:
    """torch reads from a flat dict the values that have names in `state`. A dict of torch's AdamW
    has no masters."""
    flat = StateDictOptions(flatten_optimizer_state_dict=True)
    model, other = net(dtype), net(dtype)
    optimizer = AdamW(model.named_parameters(), state_format=state_format)
    train(model, optimizer, 3)
    other.load_state_dict(model.state_dict())
    resumed = AdamW(other.named_parameters(), state_format=state_format)
    saved = get_optimizer_state_dict(model, optimizer, options=flat)
    set_optimizer_state_dict(other, resumed, saved, options=flat)
    assert resumed.digest() == optimizer.digest()

    torchs = torch.optim.AdamW(other.named_parameters())
    train(other, torchs, 3)
    saved = get_optimizer_state_dict(other, torchs, options=flat)
    set_optimizer_state_dict(other, resumed, saved, options=flat)
    resumed.load_state_dict(own := resumed.state_dict())
    assert own["state"][TWICE]["step"] == 3
    if dtype == torch.bfloat16:
        assert torch.equal(own["state"][TWICE]["master"], other.twice.weight.float())


@pytest.mark.filterwarnings("ignore")  # of dcp, about the single process
def test_torchs_dcp_checkpoint_of_bfloat16_parameters_is_loaded(tmp_path: Path) -> None:
    """As the guide says. The masters are the saved parameters, not those of the template."""
    model, other = net(torch.bfloat16), net(torch.bfloat16, seed=1)
    torchs = torch.optim.AdamW(model.named_parameters())
    train(model, torchs, 3)
    saved = {"model": model.state_dict(), "optim": get_optimizer_state_dict(model, torchs)}
    dcp.save(saved, checkpoint_id=tmp_path)
    optimizer = AdamW(other.named_parameters(), state_format="fp32-split")
    train(other, optimizer, 2)
    state = {"model": other.state_dict(), "optim": get_optimizer_state_dict(other, optimizer)}
    for entry in state["optim"]["state"].values():
        entry.pop("master", None)
    dcp.load(state, checkpoint_id=tmp_path)
    other.load_state_dict(state["model"])
    set_optimizer_state_dict(other, optimizer, state["optim"])
    assert_same(other, model)
    entries = optimizer.state_dict()["state"]
    for index, p in enumerate(model.parameters()):
        assert torch.equal(entries[index]["master"], p.float())
        for name, value in torchs.state[p].items():
            assert torch.equal(entries[index][name], value.float()), name


def test_moments_of_a_state_dict_are_views_that_outlive_the_optimizer() -> None:
    model = net()
    optimizer = AdamW(model.parameters())
    train(model, optimizer, 1)
    entry = optimizer.state_dict()["state"][0]
    assert entry["exp_avg"].data_ptr() == optimizer.state[model.first.weight]["exp_avg"].data_ptr()
    kept = entry["exp_avg"].clone()
    ledger = optimizer.ledger
    del optimizer
    gc.collect()
    assert torch.equal(entry["exp_avg"], kept) and ledger.held_bytes > 0
    del entry
    model.zero_grad()
    gc.collect()
    assert ledger.held_bytes == 0, "the model refers to memory of the optimizer"


def test_an_optimizer_to_which_its_parameter_refers_is_collected() -> None:
    model = net()
    optimizer = AdamW(model.parameters())
    train(model, optimizer, 1)
    model.first.weight.optimizer = optimizer
    ledger = optimizer.ledger
    del optimizer, model
    gc.collect()
    assert ledger.held_bytes == 0


# ---- memory and refusals


def test_refused_when_over_budget() -> None:
    model = net(torch.bfloat16)
    model.norm.float()
    for state_format in ("fp32", "int8-moments"):
        ledger = modicum.Ledger()
        made = AdamW(
            model.parameters(), state_format=state_format, memory=MemoryPolicy(ledger=ledger)
        )
        needed = ledger.held_bytes
        assert needed == sum(
            size
            for held in made.held.values()
            for purpose, size in held.items()
            if purpose != "parameters"
        )
        del made
        gc.collect()
        assert ledger.held_bytes == 0
        small = modicum.Ledger(needed - 1)
        with pytest.raises(modicum.BudgetError, match="short by") as refused:
            AdamW(model.parameters(), state_format=state_format, memory=MemoryPolicy(ledger=small))
        assert (refused.value.shortfall_bytes, refused.value.category) == (1, "BUDGET")
        assert small.peak_bytes == 0, "memory was charged before the refusal"
        ledger.limit_bytes = needed
        AdamW(model.parameters(), state_format=state_format, memory=MemoryPolicy(ledger=ledger))


class Registrar:
    """A stand-in for CUDA's runtime. Its cudaHostRegister returns `status`; 0 is success."""

    def __init__(self) -> None:
        self.pinned: dict[int, int] = {}
        self.status = 0

    def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> int:
        if self.status == 0:
            self.pinned[address] = nbytes
        return self.status

    def cudaHostUnregister(self, address: int) -> int:
        del self.pinned[address]
        return 0


def test_only_memory_that_a_device_reads_or_writes_is_pinned(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """For parameters on the host this is the gradient buffer."""
    registrar, model = Registrar(), net(torch.bfloat16)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: registrar)
    optimizer = AdamW(
        model.parameters(), state_format="int8-moments", memory=MemoryPolicy(pin=True)
    )
    assert sum(registrar.pinned.values()) == sum(h["grad"] for h in optimizer.held.values())
    del optimizer
    gc.collect()
    assert registrar.pinned == {}
    ledger, registrar.status = modicum.Ledger(), 2
    with pytest.raises(modicum.BudgetError, match="CUDA error 2"):
        AdamW(model.parameters(), memory=MemoryPolicy(pin=True, ledger=ledger))
    assert ledger.held_bytes == 0


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda m: AdamW(m.parameters(), state_format="fp16"), "'fp16'.* or int8-moments-24, got"),
        (lambda m: AdamW(m.parameters(), semantics="tf"), "unknown semantics 'tf'"),
        (lambda m: AdamW(m.parameters(), lr=-1.0), "this lr"),
        (lambda m: AdamW(m.parameters(), betas=(0.9, 1.0)), "beta2"),
        (lambda m: AdamW(m.parameters(), amsgrad=True, semantics="deepspeed"), "lack amsgrad"),
        (lambda m: AdamW(m.to("meta").parameters()).step(), "on meta"),
        (lambda m: AdamW(m.double().parameters()), "its dtype .*float32, bfloat16 or float16"),
        (lambda m: AdamW([nn.Parameter(torch.ones(4, 6)[:, ::2])]), "gaps between them"),
        (lambda m: AdamW([("a", m.first.weight), ("a", m.first.bias)]), "the same name"),
        (lambda m: AdamW(m.parameters(), memory=MemoryPolicy(pin=True)), "needs CUDA"),
        (lambda m: copy.deepcopy(AdamW(m.parameters())), "not copied or pickled"),
        (lambda m: pickle.dumps(AdamW(m.parameters())), "not copied or pickled"),
        (lambda m: AdamW(m.parameters()).clip_grad_norm_(-1.0), "0 or more"),
        (lambda m: AdamW(m.parameters()).clip_grad_norm_("1"), "max_norm .*a number"),
        (lambda m: AdamW(m.parameters()).state_items(codes="x"), "codes .*True or False"),
        (lambda m: AdamW(m.parameters(), lr="0.001"), "lr .*a number"),
        (lambda m: AdamW(m.parameters(), memory=MemoryPolicy(pin="yes")), "pin .*True or False"),
    ],
)
def test_wrong_uses_are_refused(make: Callable[[Any], Any], words: str) -> None:
    if "CUDA" in words and torch.cuda.is_available():
        pytest.skip("with CUDA, pin=True is valid")
    with pytest.raises(modicum.UsageError, match=words):
        make(net())


def test_wrong_steps_change_nothing() -> None:
    """The refusal of a step or of a state dict names the parameter or the option. The next steps
    are those of `reference`, an optimizer that has refused nothing."""
    model, reference_model = net(), net()
    optimizer = AdamW(model.named_parameters(), lr=1e-2)
    reference = AdamW(reference_model.named_parameters(), lr=1e-2)
    train(model, optimizer, 2)
    train(reference_model, reference, 2)
    before = optimizer.digest()
    weight = model.first.weight

    def refused(words: str) -> None:
        with pytest.raises(modicum.UsageError, match=words):
            optimizer.step()
        assert optimizer.digest() == before
        model.zero_grad()

    weight.grad = torch.sparse_coo_tensor([[0], [0]], [1.0], weight.shape, check_invariants=True)
    refused("gradient is sparse.*first.weight")
    optimizer.param_groups[0]["lr"] = -1.0
    refused("this lr")
    optimizer.param_groups[0]["lr"] = 1e-2
    optimizer.param_groups[0]["amsgrad"] = True
    refused("amsgrad can't change")
    optimizer.param_groups[0]["amsgrad"] = False
    kept = weight.data
    weight.data = kept.clone()
    with pytest.raises(modicum.UsageError, match="AdamW has state was moved.*first.weight"):
        optimizer.step()
    weight.data = kept
    assert optimizer.digest() == before
    with pytest.raises(modicum.UsageError, match="other parameter groups"):
        optimizer.load_state_dict(AdamW(groups_of(net())).state_dict())
    other = reference.state_dict()
    other["state"][0]["exp_avg"] = torch.zeros(3)
    with pytest.raises(modicum.UsageError, match="its exp_avg.*first.weight"):
        optimizer.load_state_dict(other)
    assert train(model, optimizer, 2) == train(reference_model, reference, 2)
    assert optimizer.digest() == reference.digest()
