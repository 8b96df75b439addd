"""`modicum.torch.AdamW` over parameters on a device, whose state is on the host.

The oracle is the same optimizer over parameters on the CPU, whose bits test_adamw.py compares with
torch's. The device is `OnDevice`, a stand-in that counts the bytes of each copy. Catches: a
gradient that is not copied to the host; new parameters that are not all copied to the device, or
are copied from a staging slot that is already overwritten; host memory of the parameters' size in
addition to the state; a copy that casts on the device; a master that misses a write to its
parameter.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from on_device import OnDevice  # noqa: E402  (after torch is known to be there)
from torch import nn  # noqa: E402

import modicum  # noqa: E402
from modicum import _modicum  # noqa: E402
from modicum.torch import AdamW, MemoryPolicy  # noqa: E402
from modicum.torch.optim import lanes  # noqa: E402

BUCKET = 65536  # a step works on pieces of about this many elements
SHAPES = {"embed": (3, BUCKET + 77), "bias": (5,), "one": (), "none": (0, 4), "proj": (67, 129)}
# Combinations of a state format and the parameters' dtype.
CASES = [
    ("fp32", torch.float32),
    ("fp32", torch.bfloat16),
    ("fp32", torch.float16),
    ("fp32-split", torch.bfloat16),
    ("bf16-moments", torch.bfloat16),
    ("int8-moments", torch.bfloat16),
    ("int8-moments-24", torch.bfloat16),
    ("bf16-moments", torch.float32),
    ("int8-moments", torch.float32),
    ("int8-moments", torch.float16),
]
# Bytes of staging per thread: 4 slots. A slot holds a bucket and 128 more elements of bfloat16,
# rounded up to complete pages.
STAGING = 4 * (132 << 10)


@pytest.fixture(autouse=True)
def two_threads(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(_modicum, "granted_cpus", lambda: 2)
    OnDevice.forget()
    yield


class Pair:
    """The same parameters on the host and on the device, each with an optimizer."""

    def __init__(self, state_format: str, dtype: Any, **options: Any) -> None:
        generator = torch.Generator().manual_seed(4)
        self.generator = generator
        self.host, self.device = {}, {}
        for name, shape in SHAPES.items():
            values = torch.randn(shape, generator=generator).to(dtype)
            self.host[name] = nn.Parameter(values.clone())
            self.device[name] = nn.Parameter(OnDevice(values.clone()))
        OnDevice.forget()  # the copies that made the parameters
        options = {"lr": 0.01, "state_format": state_format, "seed": 7, **options}
        self.ledger = modicum.Ledger()
        self.on_host = AdamW(self.host.items(), **options)
        self.on_device = AdamW(
            self.device.items(), memory=MemoryPolicy(ledger=self.ledger), **options
        )

    def bring_gradients(self, but: tuple[str, ...] = ()) -> None:
        """Sets equal gradients on the host and on the device, except for the parameters `but`."""
        for name, parameter in self.host.items():
            self.host[name].grad = self.device[name].grad = None
            if name in but:
                continue
            values = torch.randn(parameter.shape, generator=self.generator)
            self.host[name].grad = values.to(parameter.dtype)
            self.device[name].grad = OnDevice(self.host[name].grad.clone())

    def assert_equal(self) -> None:
        for name, parameter in self.host.items():
            here, there = (t.detach().view(torch.uint8) if t.ndim else t.detach()
                           for t in (parameter, self.device[name].data.host))  # fmt: skip
            assert torch.equal(here, there), name
        assert self.on_device.digest() == self.on_host.digest()
        assert self.on_device.skipped_steps == self.on_host.skipped_steps

    def step(self, **how: Any) -> None:
        self.bring_gradients(**how)
        self.on_host.step()
        self.on_device.step()


def bytes_of(parameters: dict[str, Any], but: tuple[str, ...] = ()) -> int:
    """The bytes of all parameters except `but`."""
    return sum(p.numel() * p.element_size() for name, p in parameters.items() if name not in but)


@pytest.mark.parametrize(("state_format", "dtype"), CASES)
def test_a_device_gets_the_bits_that_the_host_has(state_format: str, dtype: Any) -> None:
    pair = Pair(state_format, dtype)
    pair.assert_equal()
    for step in range(4):
        OnDevice.forget()
        but = ("proj",) if step == 2 else ()
        pair.step(but=but)
        pair.assert_equal()
        assert sum(OnDevice.fetched) == bytes_of(pair.host, but), "expected each gradient once"
        # A parameter without a gradient is copied again, or left out.
        assert sum(OnDevice.copied) in (bytes_of(pair.host), bytes_of(pair.host, but))


@pytest.mark.parametrize(("state_format", "dtype"), CASES)
def test_the_host_holds_the_state_and_its_staging(state_format: str, dtype: Any) -> None:
    pair = Pair(state_format, dtype)
    states = pair.on_device.held.values()
    held, of_host = Counter(), Counter()
    for state in states:
        held.update(state)
    for state in pair.on_host.held.values():
        of_host.update(state)
    assert held.pop("parameters") == sum(p.numel() for p in pair.host.values())
    assert held == pair.ledger.held == pair.ledger.at_peak
    assert held["staging"] == len(states) * 2 * STAGING, "expected that of two threads"
    for purpose in ("grad", "moments"):
        assert held[purpose] == of_host[purpose]
    # Unlike for parameters on the host, the complete master is in the state.
    least = 4 if state_format in ("fp32", "fp32-split") else 3
    assert held["master"] >= least * sum(p.numel() for p in pair.host.values())
    pair.step()
    assert pair.ledger.held == pair.ledger.at_peak == held
    if dtype != torch.float32 and state_format == "fp32":
        assert max(OnDevice.copied + OnDevice.fetched) <= 2 * STAGING, (
            "a copy was larger than the staging"
        )


def test_over_the_budget_nothing_is_charged() -> None:
    pair = Pair("fp32", torch.bfloat16)
    held = pair.ledger.held
    parameters = [nn.Parameter(OnDevice(torch.zeros(s, dtype=torch.bfloat16)))
                  for s in SHAPES.values()]  # fmt: skip
    ledger = modicum.Ledger(sum(held.values()) - 1)
    with pytest.raises(modicum.BudgetError, match="short by"):
        AdamW(parameters, memory=MemoryPolicy(ledger=ledger))
    assert ledger.peak_bytes == 0
    AdamW(parameters, memory=MemoryPolicy(ledger=modicum.Ledger(sum(held.values()))))


@pytest.mark.parametrize("state_format", ["fp32", "fp32-split"])
def test_norm_and_skipped_steps_are_those_of_the_host(state_format: str) -> None:
    pair = Pair(state_format, torch.bfloat16)
    pair.bring_gradients()
    norms = [float(each.clip_grad_norm_(0.5)) for each in (pair.on_host, pair.on_device)]
    assert norms[0] == norms[1] > 1
    pair.on_host.step()
    pair.on_device.step()
    pair.assert_equal()
    pair.bring_gradients()
    for grad in (pair.host["proj"].grad, pair.device["proj"].grad.host):
        grad[3, 5] = float("inf")
    OnDevice.forget()
    pair.on_host.step()
    pair.on_device.step()
    pair.assert_equal()
    assert pair.on_device.skipped_steps == 1 and not OnDevice.copied


@pytest.mark.parametrize(("state_format", "dtype"), CASES)
def test_a_value_written_to_a_parameter_reaches_its_master(state_format: str, dtype: Any) -> None:
    """The master becomes equal to the written value: a split master's lower half is reset, too. All
    other masters are unchanged."""
    pair = Pair(state_format, dtype)
    pair.step()
    before = pair.on_device.state_dict()["state"]
    with torch.no_grad():
        pair.device["bias"][2:].copy_(torch.full((3,), 3.25, dtype=dtype))
    (group,) = pair.on_device.param_groups
    group["lr"] = group["weight_decay"] = 0.0
    pair.bring_gradients()
    pair.on_device.step()
    after = pair.on_device.state_dict()["state"]
    assert pair.device["bias"].data.host[2:].tolist() == [3.25] * 3
    for index, name in enumerate(SHAPES):
        if dtype == torch.float32:
            break  # a state dict has no master: the parameter has the same value
        expected = before[index]["master"].clone()
        if name == "bias":
            expected[2:] = 3.25
        assert torch.equal(after[index]["master"], expected), name


@pytest.mark.parametrize("state_format", ["fp32", "fp32-split"])
def test_a_write_that_changes_no_version_is_not_seen_on_a_device(state_format: str) -> None:
    """Such a write goes through `.data`. The step overwrites a parameter that was written in
    this way with its stepped master, and uses the gradients that the norm has read."""
    pair = Pair(state_format, torch.bfloat16)
    pair.step()
    pair.device["bias"].data.host.fill_(3.25)
    pair.bring_gradients()
    for each in (pair.on_host, pair.on_device):
        each.clip_grad_norm_(0.5)
    pair.device["proj"].grad.host.zero_()
    pair.on_host.step()
    pair.on_device.step()
    pair.assert_equal()


@pytest.mark.parametrize(("state_format", "dtype"), CASES)
def test_a_state_dict_of_the_host_loads_on_the_device_and_the_reverse(
    state_format: str, dtype: Any
) -> None:
    """Of two pairs, the second loads the first crosswise: its device loads from the host, and its
    host from the device. Then both pairs make the same step."""
    first, second = Pair(state_format, dtype), Pair(state_format, dtype)
    first.step()
    with torch.no_grad():
        for name in SHAPES:
            second.device[name].copy_(first.host[name].data)
            second.host[name].copy_(first.device[name].data.host)
    second.on_device.load_state_dict(first.on_host.state_dict())
    second.on_host.load_state_dict(first.on_device.state_dict())
    second.generator.set_state(first.generator.get_state())
    for pair in (first, second):
        pair.step()
        pair.assert_equal()
    if state_format in ("fp32", "fp32-split"):  # others lose bits when moments are loaded
        assert second.on_device.digest() == first.on_device.digest()


def failing(copy_: Callable[..., Any]) -> Callable[..., Any]:
    """`copy_`, but it raises for a copy to the device once two have been made."""

    def fail_or_copy(*args: Any, **kwargs: Any) -> Any:
        if args and isinstance(args[0], OnDevice) and len(OnDevice.copied) >= 2:
            raise RuntimeError("the device is gone")
        return copy_(*args, **kwargs)

    return fail_or_copy


@pytest.mark.parametrize("state_format", ["fp32", "fp32-split"])
def test_a_copy_that_fails_is_the_steps_error(
    state_format: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair = Pair(state_format, torch.bfloat16)
    pair.bring_gradients()
    OnDevice.forget()
    monkeypatch.setattr(OnDevice, "copy_", failing(torch.Tensor.copy_), raising=False)
    with pytest.raises(RuntimeError, match="the device is gone"):
        pair.on_device.step()
    # Two threads copy. After the error of one, the other at most ends the copy that it has begun.
    assert 2 <= len(OnDevice.copied) <= 3


class Stream:
    """A stand-in for a stream of a device, and for an event of the stream. Counts how often it was
    entered and waited for; copies themselves are synchronous."""

    def __init__(self) -> None:
        self.entered = self.waits = 0
        self.events: list[Stream] = []

    def __enter__(self) -> None:
        self.entered += 1

    def __exit__(self, *_: object) -> None:
        pass

    def record_event(self) -> "Stream":
        self.events.append(Stream())
        return self.events[-1]

    def synchronize(self) -> None:
        self.waits += 1


@pytest.mark.parametrize("state_format", ["fp32", "fp32-split"])
def test_copies_are_waited_for(state_format: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Copies from a slot of the staging are waited for before the slot is used again, or at the end
    of the step; copies of split masters, before the next step changes the masters. Gradients that
    are copied without the staging are waited for in the step."""
    stream = Stream()
    monkeypatch.setattr(lanes, "stream_of", lambda device: stream)
    pair = Pair(state_format, torch.bfloat16)
    pair.step()
    waited = [event.waits for event in stream.events]
    if state_format == "fp32":  # new parameters go through the staging: an event for each copy
        assert len(waited) == len(OnDevice.copied) == stream.entered and set(waited) == {1}
    else:  # all masters are copied to the device: one event after the copies
        assert waited == [0] and stream.waits == 1
        pair.step()
        assert stream.events[0].waits == 1
    pair.assert_equal()
