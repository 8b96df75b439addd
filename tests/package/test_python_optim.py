"""`modicum._modicum.AdamW`, the optimizer's state without the torch optimizer that
`modicum.torch.AdamW` adds: planes, errors, lifetimes.

Catches: planes that do not keep the state alive; a long call that keeps the GIL; a caller's arrays
that are freed while a state uses them; an error that names the wrong shard.
"""

import gc
from typing import Any

import pytest
from clocks import lets_others_run

torch = pytest.importorskip("torch")

import modicum  # noqa: E402  (after torch is known to be there)
from modicum import _modicum  # noqa: E402

GROUPS = [_modicum.AdamOptions(lr=0.5, weight_decay=0.0), _modicum.AdamOptions(amsgrad=True)]
Shard = _modicum.AdamWShard
A, B = ("a", [300], [(0, 300)], 0), ("b", [1007], [(128, 100), (1000, 7)], 1)
SHARDS = [Shard(*A), Shard(*B)]


def state(shards: Any = SHARDS, format: str = "fp32", **more: Any) -> Any:
    more.setdefault("ledger", modicum.Ledger())
    return _modicum.AdamW(shards, GROUPS, format=format, threads=2, **more)


def plane(of: Any, shard: int, name: str, dtype: Any = torch.float32) -> torch.Tensor:
    """A view of a plane."""
    return torch.from_dlpack(of.plane(shard, name)).view(dtype)


def bring(of: Any, *gradients: torch.Tensor) -> None:
    """Passes the gradients of all shards to the state, in the order of the shards."""
    for shard, gradient in enumerate(gradients):
        of.arrive(shard, gradient)


def _shared(memory: torch.Tensor) -> Any:
    """A state of two shards whose masters, given by the caller, overlap."""
    return state([Shard(*A, master=memory), Shard("b", [9], [(0, 9)], master=memory[100:109])])


def test_formats_are_listed_with_their_dtypes() -> None:
    rows = {row["name"]: row for row in _modicum.state_formats()}
    asked = ["fp32", "fp32-split", "bf16-moments", "int8-moments", "int8-moments-24"]
    assert list(rows) == [*asked, "bf16-moments-fp32", "int8-moments-fp32"]
    assert rows["fp32"] == {
        "name": "fp32", "master": "float32", "master_low": None, "grad": "float32",
        "moment": "float32",
    }  # fmt: skip
    assert rows["int8-moments-24"]["master_low"] == "int8"


def test_the_format_follows_dtype_and_shape() -> None:
    of, matrix = _modicum.state_format_of, [4096, 512]
    for asked in ("fp32", "fp32-split", "bf16-moments", "int8-moments", "int8-moments-24"):
        assert of("bfloat16", matrix, asked) == asked
    for dtype in ("float32", "float16"):
        assert of(dtype, matrix, "fp32-split") == "fp32"
        assert of(dtype, matrix, "bf16-moments") == "bf16-moments-fp32"
        assert of(dtype, matrix, "int8-moments-24") == "int8-moments-fp32"
    assert of("bfloat16", [1 << 20], "int8-moments") == "fp32-split"
    assert of("float32", [1 << 20], "int8-moments") == "fp32"
    with pytest.raises(modicum.UsageError, match="unknown dtype"):
        of("half a bit", matrix, "fp32")
    for name in ("fp32-spilt", "int8-moments-fp32"):
        with pytest.raises(modicum.UsageError, match="fp32-split"):
            of("bfloat16", matrix, name)


@pytest.mark.parametrize("format", [row["name"] for row in _modicum.state_formats()])
def test_the_first_step_moves_each_element_by_lr(format: str) -> None:
    """In the first step the moments' bias correction leaves lr times the gradient's sign."""
    ledger = modicum.Ledger()
    of = state(format=format, ledger=ledger)
    assert ledger.held == of.footprint == _modicum.adamw_footprint(SHARDS, GROUPS, format=format)
    gradient = torch.linspace(-3, 3, 300)
    bring(of, gradient, torch.ones(107, dtype=torch.bfloat16))
    sums, finite = of.norms()
    assert finite and sums[1] == 107
    assert sums[0] == pytest.approx(gradient.double().square().sum().item(), rel=0.01)
    of.step(clip=0.5)
    assert of.steps == [1, 1]
    values = torch.empty(300)
    of.export_to(0, "master", values)
    torch.testing.assert_close(values, -0.5 * gradient.sign(), rtol=0.01, atol=0)
    assert torch.from_dlpack(of.plane(0, "max_exp_avg_sq")).numel() == 0
    assert torch.from_dlpack(of.plane(1, "max_exp_avg_sq")).numel() >= 107
    # A fp32 scale for each block of 128 elements of the whole parameter: the shard's elements 128
    # to 227 are in one block, 1000 to 1006 in another.
    scales = 2 * 4 if format.startswith("int8") else 0
    assert torch.from_dlpack(of.scales(1, "exp_avg")).numel() == scales
    of.leave_out(0)
    of.arrive(1, torch.zeros(50), at=57)
    of.arrive(1, torch.zeros(57))
    of.skip()
    assert of.steps == [1, 1]


def test_planes_are_views_that_keep_the_state_alive() -> None:
    ledger = modicum.Ledger()
    of = state(ledger=ledger)
    master, grad = plane(of, 1, "master"), plane(of, 1, "grad")
    of.import_from(1, "master", torch.arange(107.0))
    assert torch.equal(master, torch.arange(107.0))
    part = torch.empty(7)
    of.export_to(1, "master", part, at=100)
    assert torch.equal(part, master[100:])
    grad.fill_(2.0)
    of.leave_out(0)
    of.arrived_in_place([1])
    assert of.norms() == ([0.0, 4 * 107], True)
    held = ledger.held_bytes
    del of, grad
    gc.collect()
    assert ledger.held_bytes == held and torch.equal(master, torch.arange(107.0))
    del master
    gc.collect()
    assert ledger.held_bytes == 0


def test_a_callers_arrays_are_used_and_kept() -> None:
    master, out = torch.zeros(300), torch.zeros(107, dtype=torch.float16)
    shards = [Shard(*A, master=master), Shard(*B, out=out)]
    of = state(shards)
    assert of.footprint["master"] == 4096, "one page: only shard 1 has a master of its own"
    bring(of, torch.ones(300), torch.ones(107))
    of.step()
    torch.testing.assert_close(master, torch.full((300,), -0.5))
    assert torch.equal(out, plane(of, 1, "master").half())
    again = master.clone()
    taken = plane(of, 0, "master")
    del master, shards
    gc.collect()
    assert torch.equal(taken, again)


def test_arrived_in_place_takes_the_norm_of_all() -> None:
    """The norm is that of gradients which arrive by `arrive`, for shards large enough to be
    divided among two threads."""
    shards = [
        Shard("large", [5_000_077], [(77, 5_000_000)]),
        Shard("small", [14], [(5, 9)]),
    ]
    one, other = state(shards), state(shards)
    torch.manual_seed(0)
    gradient = torch.randn(5_000_000)
    bring(one, gradient, torch.ones(9))
    plane(other, 0, "grad").copy_(gradient)
    plane(other, 1, "grad").fill_(1)
    other.arrived_in_place([0, 1])
    assert one.norms() == other.norms()
    plane(other, 0, "grad")[4_999_999] = float("nan")
    other.skip()
    other.arrived_in_place([0, 1])
    assert other.norms() == ([0.0, 9.0], False)


def test_long_calls_release_the_gil() -> None:
    of, gradient = (
        state([Shard("large", [8_000_000], [(0, 8_000_000)])]),
        torch.ones(8_000_000),
    )

    def arrive() -> None:
        of.arrive(0, gradient)

    assert lets_others_run(arrive, before=of.skip)
    of.skip()
    assert lets_others_run(of.step, before=arrive)
    assert lets_others_run(of.digest)


def test_each_arena_is_pinned_once() -> None:
    pinned: dict[int, int] = {}

    def pin(address: int, nbytes: int) -> None:
        pinned[address] = nbytes

    def unpin(address: int, nbytes: int) -> None:
        assert pinned.pop(address) == nbytes

    of = state(format="fp32-split", pin=pin, unpin=unpin)
    assert sorted(pinned.values()) == [4096, 4096], (
        "address and size of two arenas: masters and gradients"
    )
    del of
    assert pinned == {}
    ledger = modicum.Ledger()
    with pytest.raises(modicum.BudgetError, match="RLIMIT_MEMLOCK"):
        state(format="fp32-split", pin=pin, unpin=unpin, pin_limit=4096, ledger=ledger)

    def refuse(address: int, nbytes: int) -> None:
        raise RuntimeError(f"{nbytes} bytes were not pinned")

    with pytest.raises(RuntimeError, match="4096 bytes were not pinned"):
        state(pin=refuse, unpin=unpin, ledger=ledger)
    assert ledger.held_bytes == 0 and ledger.peak_bytes < 20 * 4096


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (lambda of: of.arrive(2, torch.ones(3)), "no shard 2 of 2"),
        (lambda of: of.plane(9, "grad"), "no shard 9 of 2"),
        (lambda of: of.plane(0, "momentum"), "unknown plane 'momentum'"),
        (lambda of: of.export_to(0, "grad", torch.ones(1)), "unknown plane 'grad'"),
        (lambda of: of.export_to(0, "max_exp_avg_sq", torch.ones(1)), "has no max_exp_avg_sq"),
        (lambda of: of.export_to(0, "master", torch.ones(3).double()), "float32 array"),
        (lambda of: of.import_from(0, "master", torch.ones(6)[::2]), "float32 array"),
        (lambda of: of.arrive(0, torch.ones(6)[::2]), "a contiguous array"),
        (
            lambda of: of.export_to(0, "master", torch.ones(301)),
            r"within \[0, 300\), got 301 elements from 0",
        ),
        (lambda of: of.arrive(0, torch.ones(3, dtype=torch.float64)), "must be float32, bfloat16"),
        (lambda of: of.arrive(0, torch.ones(301)), r"within \[0, 300\), got 301 elements from 0"),
        (lambda of: of.step(), "its gradient has not arrived"),
        (lambda of: of.set_options(0, GROUPS[1]), "amsgrad can't change"),
        (lambda of: of.set_steps(0, -1), "0 or more"),
        (lambda of: state(format="fp64"), "unknown state format"),
        (lambda of: state([Shard("a", [2], [(5, 3), (0, 2)])]), "ascending"),
        (lambda of: state([Shard("a", [2], [(0, 2)], 7)]), "group index is out of range"),
        (
            lambda of: state([Shard("a", [2], [(0, 2)], master=torch.ones(3))]),
            "differs from its shard",
        ),
        (
            lambda of: state([Shard("a", [2], [(0, 2)], master=torch.ones(2).half())]),
            "dtype differs",
        ),
        (lambda of: state([Shard("a", [2], [(0, 2)], out=torch.ones(2))]), "must be bfloat16"),
        (
            lambda of: state([Shard("a", [2], [(0, 2)], master=torch.ones(4)[::2])]),
            "no contiguous host",
        ),
        (lambda of: state(pin=print), "must be given together"),
        (lambda of: state(seed=-1), "got -1"),
        (lambda of: state(seed=1 << 64), "got 18446744073709551616"),
        (lambda of: of.step(unscale=float("nan")), "unscale .*got nan"),
        (lambda of: _shared(torch.ones(300)), "'b' shares memory with parameter 'a'"),
        (lambda of: _modicum.AdamOptions(semantics="adam"), "unknown semantics"),
    ],
)
def test_invalid_calls_have_typed_errors(wrong: Any, words: str) -> None:
    of = state()
    with pytest.raises(modicum.UsageError, match=words):
        wrong(of)


def test_the_clip_factor_is_computed_in_fp64_and_rounded_once() -> None:
    assert _modicum.clip_factor(5.0, 1.0) == torch.tensor(1 / (5 + 1e-6)).float().item()
    assert _modicum.clip_factor(5.0, float("inf")) == 1
    assert _modicum.clip_factor(0.0, 0.0) == 0
