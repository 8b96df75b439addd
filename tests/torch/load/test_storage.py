"""A loaded model uses the memory that the load has allocated. FSDP2 does not copy this memory,
which lives as long as the last tensor in it. A model on a device gets copies from staging on the
host.

Catches: a parameter that is replaced by another object; a shard that FSDP2 pads into a copy; an
entry of the ledger that is released too early, or never; device memory that is written other than
by copies, or only in part.
"""

import gc
import warnings
from collections.abc import Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from on_device import OnDevice  # noqa: E402  (after torch is known to be there)
from sharding import Cut, bits, playing_new_rank  # noqa: E402
from torch import nn  # noqa: E402
from torch.distributed.tensor import DTensor  # noqa: E402
from torch.overrides import TorchFunctionMode  # noqa: E402
from torch_front import (  # noqa: E402
    BY_NAME,
    alone,
    assert_holds,
    checkpoint_of,
    chunk,
    empty,
    from_pretrained,
    load,
    local,
    parameters_of,
    shard,
)

import modicum  # noqa: E402
from modicum import _modicum  # noqa: E402
from modicum.torch import MemoryPolicy  # noqa: E402
from modicum.torch.loading import planning, running  # noqa: E402
from modicum.upstream.torch_fsdp import fsdp_params  # noqa: E402

ONE, THREE = Cut("fsdp2", (1,)), Cut("fsdp2", (3,))
TOKENS = torch.arange(3, 14).reshape(1, 11)
META = torch.device("meta")


@pytest.fixture(scope="module", autouse=True)
def whole_models() -> None:
    """Builds the models before a process group is simulated."""
    for name in ("llama", "llama_tied"):
        from_pretrained(name)


# ---- the load's own memory


class Noted:
    """The result of a load by the C++ library. When memory is taken from it, adds the memory's
    address to `places`."""

    def __init__(self, loaded: Any, places: set[int]) -> None:
        self.loaded, self.places = loaded, places

    def storage(self, target: int) -> Any:
        array = self.loaded.storage(target)
        self.places.add(torch.from_dlpack(array).data_ptr())
        return array

    def __getattr__(self, name: str) -> Any:
        return getattr(self.loaded, name)


@pytest.fixture
def given_away(monkeypatch: pytest.MonkeyPatch) -> Iterator[set[int]]:
    """The addresses of the memory that loads return during the test."""
    places: set[int] = set()
    load_in_core = _modicum.load
    monkeypatch.setattr(_modicum, "load", lambda *a, **o: Noted(load_in_core(*a, **o), places))
    yield places


def addresses(model: nn.Module) -> dict[str, tuple[int, int]]:
    """The addresses of each parameter's local tensor, and of the buffer that FSDP2 gathers from."""
    managed = fsdp_params(model)
    return {
        name: (local(p).data_ptr(), managed[p].fsdp_param._sharded_param_data.data_ptr())
        for name, p in model.named_parameters()
    }


def lazily_initialised(model: nn.Module) -> None:
    """Runs FSDP2's initialisation, which is usually done by the first forward."""
    for module in model.modules():
        if hasattr(module, "_get_fsdp_state"):
            module._get_fsdp_state()._lazy_init()


@pytest.mark.parametrize("rank", range(3))
def test_fsdp2_uses_the_memory_without_a_copy(rank: int, given_away: set[int]) -> None:
    """Some shards are shorter than the longest one, and some are empty."""
    with playing_new_rank(rank, 3):
        model = shard(empty("llama_tied"), THREE)
        load(model, checkpoint_of("llama_tied"))
        before = addresses(model)
        lazily_initialised(model)
        assert addresses(model) == before
    flat = {place for _, place in before.values()}
    assert flat == given_away and len(flat) == len(before)
    # A local tensor without elements has the address 0.
    assert all(shown in (0, place) for shown, place in before.values())


def test_assigned_shards_are_padded_into_a_copy() -> None:
    """Shows that the test above fails for a loader that assigns each rank's rows."""
    whole = parameters_of(from_pretrained("llama"))
    with playing_new_rank(2, 3):
        model = shard(empty("llama"), THREE)
        assigned = {
            name: DTensor.from_local(
                chunk(whole[name].detach(), 3, 2).clone(), p.device_mesh, p.placements,
                shape=p.shape, stride=p.stride(), run_check=False)
            for name, p in model.named_parameters()
        }  # fmt: skip
        model.load_state_dict(assigned, assign=True)
        lazily_initialised(model)
        places = addresses(model)
    moved = [n for n, tensor in assigned.items() if places[n][1] != tensor.to_local().data_ptr()]
    # Three ranks divide the 39 elements of the norm evenly, but not the 101 rows of the head.
    assert "lm_head.weight" in moved and "model.norm.weight" not in moved


def test_no_parameter_moves_in_a_step(given_away: set[int]) -> None:
    with alone():
        model = shard(empty("llama_tied"), ONE)
        load(model, checkpoint_of("llama_tied"))
        before = addresses(model)
        logits = model(TOKENS).logits
        logits.float().sum().backward()
        torch.optim.SGD(model.parameters(), lr=0.1).step()
        model(TOKENS)
        model.reshard()
        assert addresses(model) == before
        assert {place for pair in before.values() for place in pair} == given_away


def make_steps(model: nn.Module, optimizer: Any) -> None:
    """Makes two steps."""
    model.train()
    for _ in range(2):
        model(input_ids=TOKENS, labels=TOKENS).loss.backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("layout", ["none", "fsdp2"])
def test_an_optimizer_made_before_the_load_stays_bound(layout: str) -> None:
    whole = BY_NAME["qwen2"].model_class.from_pretrained(checkpoint_of("qwen2"))
    make_steps(whole, torch.optim.AdamW(whole.parameters(), lr=0.1))
    with alone():
        model = shard(empty("qwen2"), Cut(layout, (1,)))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        parameters = list(model.parameters())
        load(model, checkpoint_of("qwen2"))
        assert all(new is old for new, old in zip(model.parameters(), parameters, strict=True))
        make_steps(model, optimizer)
        assert_holds(model, whole, Cut(layout, (1,)), 0)


# ---- lifetime


@pytest.mark.parametrize("layout", ["none", "fsdp2"])
def test_the_ledger_shows_each_parameter_until_it_dies(layout: str) -> None:
    ledger, cut = modicum.Ledger("1GiB"), Cut(layout, (3,))
    with playing_new_rank(1, 3):
        model = shard(empty("llama_tied"), cut)
        report = load(
            model, checkpoint_of("llama_tied"), memory=MemoryPolicy(ledger=ledger), check=True
        )
    assert ledger.limit_bytes == 1 << 30
    assert report.ranks[1]["promised_bytes"] >= report.ranks[1]["ledger_peak_bytes"] > 0
    sizes = {n: local(p).untyped_storage().nbytes() for n, p in model.named_parameters()}
    ((purpose, held),) = ledger.held.items()
    # Each tensor begins at a cache line, and the whole memory ends at a page.
    padding_bytes = held - sum(sizes.values())
    assert purpose == "shards" and 0 <= padding_bytes < 4096 + 64 * len(sizes)

    name = "model.layers.1.mlp.up_proj.weight"
    kept = local(model.get_parameter(name))
    values = bits(kept)
    del model
    gc.collect()
    assert ledger.held == {"shards": sizes[name] + padding_bytes}
    assert bits(kept) == values
    view = kept[1:]
    del kept
    gc.collect()
    assert ledger.held_bytes == sizes[name] + padding_bytes
    del view
    gc.collect()
    assert ledger.held_bytes == 0


def test_tensors_outlive_everything_else() -> None:
    whole = from_pretrained("llama")
    model = empty("llama")
    load(model, checkpoint_of("llama"), memory=MemoryPolicy(ledger=modicum.Ledger()))
    kept = {name: local(p) for name, p in model.named_parameters()}
    del model
    gc.collect()
    # If the memory of the parameters had been freed, these tensors would reuse it.
    taken = [torch.full((1 << 16,), 7.0) for _ in range(64)]
    for name, tensor in kept.items():
        assert bits(tensor) == bits(whole.get_parameter(name)), name
    del taken


# ---- on a device


class Device(TorchFunctionMode):
    """A context in which meta plays a device: `torch.empty` and `torch.zeros` on meta return
    stand-ins for tensors on a device. Those of `torch.empty` are filled with 0xFF."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func not in (torch.empty, torch.zeros) or kwargs.get("device") != META:
            return func(*args, **kwargs)
        host = func(*args, **{**kwargs, "device": "cpu"})
        if func is torch.empty:
            host.view(torch.uint8).fill_(0xFF)
        return OnDevice(host)


@pytest.mark.parametrize("layout", ["none", "fsdp2"])
@pytest.mark.parametrize("name", ["llama_tied", "olmo_hybrid", "mixtral"])
def test_a_device_gets_copies(name: str, layout: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Exactly the bytes of the rank's parameters are copied to the device. The host holds the
    staging, but no shards."""
    ledger, cut, whole = modicum.Ledger(), Cut(layout, (3,)), from_pretrained(name)
    hand_over = running._hand_over

    def from_stand_ins(planned: Any, model: Any, loaded: Any, storages: Any) -> None:
        assert all(type(storage) is OnDevice for storage in storages.values())
        hand_over(planned, model, loaded, {t: s.host for t, s in storages.items()})

    monkeypatch.setattr(running, "_hand_over", from_stand_ins)
    monkeypatch.setattr(planning, "device_of", lambda model, of: META)
    for rank in range(3):
        with playing_new_rank(rank, 3):
            model = shard(empty(name), cut)
            OnDevice.forget()
            with Device():
                load(
                    model, checkpoint_of(name), memory=MemoryPolicy(ledger=ledger, staging="256KiB")
                )
            assert_holds(model, whole, cut, rank)
            for parameter, managed in fsdp_params(model).items():
                flat = managed.fsdp_param._sharded_param_data
                assert not flat[local(parameter).numel() :].any(), "uninitialised padding"
        sizes = [local(p).untyped_storage().nbytes() for p in model.parameters()]
        assert sum(OnDevice.copied) == sum(sizes)
        assert "staging" in ledger.at_peak and "shards" not in ledger.at_peak
        assert ledger.held_bytes == 0


def test_copies_to_a_device_raise_no_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planning, "device_of", lambda model, of: META)
    torch.set_warn_always(True)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            load(empty("llama"), checkpoint_of("llama"))
    finally:
        torch.set_warn_always(False)
