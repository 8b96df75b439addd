"""modicum.upstream.torch_fsdp reads FSDP2's private fields, and makes loaded memory the storage of
FSDP2's parameters. FSDP2 must not pad, copy or pin this memory again, and each parameter must stay
the same object.

Catches: a new parameter object (an optimizer, a tie or a hook would keep the old one); a storage
without padding, which FSDP2 copies to a padded one; memory that is pinned with its size rounded up
to a power of two; a torch that behaves differently and is accepted.
"""

import gc
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from ranks import Ranks  # noqa: E402  (after torch is known to be there)
from sharding import bits, placed, playing_new_rank  # noqa: E402
from torch import nn  # noqa: E402
from torch.distributed import _composable_state  # noqa: E402
from torch.distributed.device_mesh import init_device_mesh  # noqa: E402
from torch.distributed.fsdp import (  # noqa: E402
    CPUOffloadPolicy,
    FSDPModule,
    FullyShardedDataParallel,
    fully_shard,
)
from torch.distributed.fsdp._fully_shard import _fsdp_param  # noqa: E402
from torch.distributed.tensor import DTensor, Shard  # noqa: E402

from modicum.errors import BudgetError, UsageError  # noqa: E402
from modicum.upstream import torch_core, torch_dispatch  # noqa: E402
from modicum.upstream.torch_fsdp import (  # noqa: E402
    ManagedParameter,
    check_pinning,
    check_replaceable,
    check_unit_dtypes,
    cut_by_fsdp,
    fsdp_params,
    hand_over,
    known,
    pin,
    shard_ranks,
)

# Shapes of weights: with one row, with two rows, with a multiple of 3 and 5, and with a number of
# rows that no world size but 1 divides. `sideways` is sharded along dim 1.
LAYERS = {"one": (1, 6), "few": (2, 6), "even": (15, 6), "odd": (7, 6), "sideways": (3, 30)}
WORLDS = (1, 2, 3, 5)


class Model(nn.Module):
    """The layers of LAYERS, and `tied`, which has the weight of `odd`."""

    def __init__(self) -> None:
        super().__init__()
        for name, (rows, columns) in LAYERS.items():
            layer = nn.Linear(columns, rows, bias=name == "odd")
            setattr(self, name, layer)
        self.tied = nn.Linear(6, 7, bias=False)
        self.tied.weight = self.odd.weight
        self.even.weight.requires_grad_(False)

    def forward(self) -> Any:
        layers = [getattr(self, name) for name in (*LAYERS, "tied")]
        return sum(layer(torch.ones(layer.in_features)).sum() for layer in layers)


def by_name(model: nn.Module) -> dict[str, ManagedParameter]:
    """FSDP2's facts about the model's parameters, by FQN."""
    managed = fsdp_params(model)
    return {fqn: managed[p] for fqn, p in model.named_parameters() if p in managed}


def sharded(**arguments: Any) -> Model:
    """The model on meta; `sideways` is sharded along dim 1."""
    with torch.device("meta"):
        model = Model()
    sideways = model.sideways.weight
    fully_shard(
        model,
        shard_placement_fn=lambda p: Shard(1) if p is sideways else None,
        **{"mesh": init_device_mesh("cpu", (torch.distributed.get_world_size(),)), **arguments},
    )
    return model


def storage_for(
    parameter: Any, managed: ManagedParameter | None, dtype: Any = torch.float32
) -> Any:
    """New memory of the parameter's local size: the numbers 1, 2, ..., and zeros in the padding."""
    numel = parameter._local_tensor.numel() if managed else parameter.numel()
    storage = torch.zeros(managed.padded_numel if managed else numel, dtype=dtype)
    storage[:numel] = torch.arange(1, numel + 1)
    return storage


def filled(model: Any, give: Callable[..., None] = hand_over) -> dict[str, Any]:
    """Gives each parameter a new storage by calling `give`. Returns the storages by FQN."""
    managed = fsdp_params(model)
    storages = {}
    for name, parameter in model.named_parameters():
        storages[name] = storage_for(parameter, managed[parameter])
        give(name, parameter, storages[name], managed[parameter])
    return storages


def kept(model: Any, storages: dict[str, Any]) -> dict[str, bool]:
    """By FQN, whether FSDP2's flat buffer and the parameter both still use the given storage."""
    managed = fsdp_params(model)
    found = {}
    for name, parameter in model.named_parameters():
        flat = managed[parameter].fsdp_param._sharded_param_data
        memory = {t.untyped_storage().data_ptr() for t in (flat, parameter._local_tensor)}
        found[name] = memory == {storages[name].untyped_storage().data_ptr()}
    return found


@pytest.fixture
def rank() -> Iterator[None]:
    """The process is rank 1 of two."""
    with playing_new_rank(1, 2):
        yield


# ---- FSDP2's fields


@pytest.mark.parametrize("world", WORLDS)
def test_fsdp_params_has_the_facts_of_fsdp2(world: int) -> None:
    for rank in range(world):
        with playing_new_rank(rank, world):
            model = sharded()
            managed = fsdp_params(model)
            assert set(managed) == set(model.parameters())
            for name, (rows, columns) in LAYERS.items():
                facts = managed[getattr(model, name).weight]
                # FSDP2 pads rows; columns must be divisible.
                padded_rows = -(-rows // world)
                expected = rows * columns // world if name == "sideways" else columns * padded_rows
                assert facts.padded_numel == expected
                assert shard_ranks(facts.fsdp_param) == tuple(range(world))
                assert (facts.unit, facts.device, facts.pins) == (0, torch.device("cpu"), False)


def test_units_and_pinning_are_those_of_fully_shard(rank: None) -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 3))
    fully_shard(model[0], offload_policy=CPUOffloadPolicy())
    fully_shard([model[1], model[2]], offload_policy=CPUOffloadPolicy(pin_memory=False))
    fully_shard(model, ignored_params={model[3].bias})
    managed = fsdp_params(model)
    assert model[3].bias not in managed
    units = [managed[layer.weight].unit for layer in model]
    assert len(set(units)) == 3 and units[1] == units[2]
    assert [managed[layer.weight].pins for layer in model] == [True, False, False, False]


def test_offloaded_storage_is_on_the_cpu(rank: None) -> None:
    model = sharded(offload_policy=CPUOffloadPolicy(pin_memory=False))
    for facts in fsdp_params(model).values():
        facts.fsdp_param.device = torch.device("cuda:0")
    assert {facts.device.type for facts in fsdp_params(model).values()} == {"cpu"}
    for facts in fsdp_params(model).values():
        facts.fsdp_param.offload_to_cpu = False
    assert {str(facts.device) for facts in fsdp_params(model).values()} == {"cuda:0"}


def test_a_parameter_replaced_after_fully_shard_is_refused(rank: None) -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    fully_shard(model)
    model[1].weight = nn.Parameter(torch.zeros(3, 3))
    with pytest.raises(UsageError, match=r"was replaced after fully_shard \(tensor 1.weight\)"):
        fsdp_params(model)


def test_a_gathered_parameter_is_refused_with_the_remedy() -> None:
    with playing_new_rank(0, 1):
        model = fully_shard(nn.Linear(3, 3), mesh=init_device_mesh("cpu", (1,)))
        model(torch.ones(3))
        with pytest.raises(UsageError, match=r"call reshard\(\) on each .*\(tensor weight\)"):
            fsdp_params(model)
        model.reshard()
        assert len(fsdp_params(model)) == 2


def test_fsdp1_is_refused_by_name(rank: None) -> None:
    wrapped = FullyShardedDataParallel.__new__(FullyShardedDataParallel)
    nn.Module.__init__(wrapped)
    with pytest.raises(UsageError, match="FSDP1, FullyShardedDataParallel, is not supported"):
        fsdp_params(nn.Sequential(wrapped))


# ---- another torch


def test_this_torch_is_known(rank: None) -> None:
    assert known(init_device_mesh("cpu", (2,))).mismatch() == ""


@pytest.mark.parametrize("world", WORLDS)
def test_every_rank_sees_that_shards_are_padded_again(world: int, monkeypatch) -> None:
    """FSDP2 is patched to copy a storage whose shard needs padding. The check must fail on every
    rank, also on one whose shard of the check's parameter needs none."""

    def pads(self: Any) -> None:
        reset(self)
        if self.sharded_param._local_tensor.size() != self.padded_sharded_param_size:
            self._sharded_param_data = self._sharded_param_data.clone()

    reset = _fsdp_param.FSDPParam.reset_sharded_param
    monkeypatch.setattr(_fsdp_param.FSDPParam, "reset_sharded_param", pads)
    for rank in range(world):
        with playing_new_rank(rank, world):
            why = known(init_device_mesh("cpu", (world,))).mismatch()
            assert "takes a storage that is padded, without a copy" in why
            assert why.startswith(f"torch {torch.__version__}")


def test_an_fsdp2_without_a_known_attribute_is_refused(rank: None, monkeypatch) -> None:
    """A model without FSDP2 is still accepted."""

    def unpinned(self: Any, *args: Any, **kwargs: Any) -> None:
        made(self, *args, **kwargs)
        del self.pin_memory

    made = _fsdp_param.FSDPParam.__init__
    model = sharded()
    monkeypatch.setattr(_fsdp_param.FSDPParam, "__init__", unpinned)
    with pytest.raises(UsageError, match="no attribute 'pin_memory'") as caught:
        fsdp_params(model)
    assert caught.value.category == "UNSUPPORTED"
    assert caught.value.expected == "torch 2.11.0 or 2.13.0 or 2.15.0"
    assert fsdp_params(nn.Linear(3, 3)) == {}


def test_an_fsdp2_without_its_private_state_is_refused(rank: None, monkeypatch) -> None:
    model = sharded()
    monkeypatch.delattr(FSDPModule, "_get_fsdp_state")
    with pytest.raises(UsageError, match="_get_fsdp_state") as caught:
        fsdp_params(model)
    assert caught.value.category == "UNSUPPORTED"


def test_sharded_parameters_are_found_without_their_model(rank: None, monkeypatch) -> None:
    """They are found in torch's private table of modules. A torch whose table cannot be iterated
    over, or that has none, is refused."""

    class Closed(dict[Any, Any]):
        def __iter__(self) -> Any:
            return iter(())

    model, mesh = sharded(), init_device_mesh("cpu", (2,))
    assert fsdp_params(model).keys() <= cut_by_fsdp().keys()
    monkeypatch.setattr(_composable_state, "_module_state_mapping", Closed())
    assert "registers the modules" in known(mesh).mismatch()
    monkeypatch.delattr(_composable_state, "_module_state_mapping")
    with pytest.raises(UsageError, match="_module_state_mapping") as caught:
        cut_by_fsdp()
    assert caught.value.category == "UNSUPPORTED"


# By a part of the error message: a module, a function in it that relies on a fact about torch, and
# a replacement with which the fact does not hold.
FACTS = {
    "_version grows": (torch_core, "version_of", lambda tensor: 0),
    "Tensor.data": (torch_core, "_is_like", lambda tensor, value: False),
    "_use_count": (torch_core, "use_count", lambda tensor: 1),
    "_cdata": (torch_core, "storage_id", lambda tensor: 0),
    "dictionaries move": (torch_core, "carry_hooks", lambda source, target: None),
    "_parameters": (torch_core, "parameters_of", lambda module: {}),
    "pre-hooks": (torch_core, "drop_hooks", lambda module, *hooks: None),
    "load_state_dict hooks": (torch_core, "load_hooks", lambda optimizer: ([], [])),
    "aten._to_copy": (torch_dispatch, "TO_COPY", torch.ops.aten.clone),
    "function modes": (torch_dispatch, "push_lowest", lambda mode: None),
}


@pytest.mark.parametrize("fact", FACTS)
def test_an_unknown_torch_is_refused(fact: str, monkeypatch) -> None:
    """`require_known` checks each fact, also under a default device of meta."""
    torch_core.require_known.cache_clear()
    with torch.device("meta"), torch.inference_mode():
        torch_core.require_known()
    assert torch.tensor(1).device.type == "cpu"
    torch_core.require_known.cache_clear()
    monkeypatch.setattr(*FACTS[fact])
    with pytest.raises(UsageError) as caught:
        torch_core.require_known()
    assert fact in caught.value.got and caught.value.got.startswith(f"torch {torch.__version__}")
    assert caught.value.category == "UNSUPPORTED"


# ---- dtypes of a unit


def typed(dtypes: dict[str, Any], frozen: str = "", units: int = 1) -> tuple[Any, dict[str, Any]]:
    """(two layers in one or two FSDP2 units, filled with these dtypes by FQN; `dtypes`)."""
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False))
    if frozen:
        model.get_parameter(frozen).requires_grad_(False)
    if units == 2:
        fully_shard(model[1])
    fully_shard(model)
    managed = fsdp_params(model)
    for name, parameter in model.named_parameters():
        storage = storage_for(parameter, managed[parameter], dtypes[name])
        hand_over(name, parameter, storage, managed[parameter])
    return model, dtypes


MIXED = {"0.weight": torch.float32, "1.weight": torch.bfloat16}


def test_two_dtypes_in_a_unit_are_refused(rank: None) -> None:
    model, dtypes = typed(MIXED)
    with pytest.raises(UsageError) as caught:
        check_unit_dtypes(by_name(model), dtypes.__getitem__)
    assert caught.value.tensor == "1.weight"
    assert caught.value.got == "torch.bfloat16"
    assert caught.value.expected == "torch.float32 as 0.weight"
    with pytest.raises(AssertionError, match="uniform original parameter dtype"):
        model(torch.ones(1, 3))


def test_dtypes_that_fsdp2_accepts_are_accepted(rank: None) -> None:
    """In one unit: two dtypes if one of the two parameters is frozen; or one dtype."""
    model, dtypes = typed(MIXED, frozen="1.weight")
    check_unit_dtypes(by_name(model), dtypes.__getitem__)
    model._get_fsdp_state()._lazy_init()
    model, dtypes = typed(dict.fromkeys(MIXED, torch.bfloat16))
    check_unit_dtypes(by_name(model), dtypes.__getitem__)
    model._get_fsdp_state()._lazy_init()
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}


def test_two_dtypes_in_two_units_are_accepted(rank: None) -> None:
    """FSDP2 accepts them in its initialisation before the first forward, and so does the check."""
    model, dtypes = typed(MIXED, units=2)
    check_unit_dtypes(by_name(model), dtypes.__getitem__)
    model._get_fsdp_state()._lazy_init()
    assert {name: p.dtype for name, p in model.named_parameters()} == MIXED


# ---- giving parameters their storage: hand_over


@pytest.mark.parametrize("world", WORLDS)
def test_nothing_is_copied_again(world: int) -> None:
    """Neither FSDP2's own hook nor the first forward copies anything."""
    for rank in range(world):
        with playing_new_rank(rank, world), torch.enable_grad():
            model = sharded()
            storages = filled(model)
            assert all(kept(model, storages).values())
            for _name, parameter in model.named_parameters():
                numel = parameter._local_tensor.numel()
                assert parameter._local_tensor.is_contiguous()
                assert parameter._local_tensor.flatten().tolist() == list(range(1, numel + 1))
            model()
            model.reshard()
            assert all(kept(model, storages).values())


def test_fsdp2_copies_the_storage_of_simpler_loaders() -> None:
    """Two such loaders: one gives a storage without padding to the parameter alone, one assigns it
    by load_state_dict."""

    def exchanged(name: str, parameter: Any, storage: Any, managed: ManagedParameter) -> None:
        hand_over(name, parameter, storage[: parameter._local_tensor.numel()])

    def assigned(name: str, parameter: Any, storage: Any, managed: ManagedParameter) -> None:
        shape = parameter._local_tensor.shape
        made = DTensor(storage[: shape.numel()].view(shape), parameter._spec, requires_grad=False)
        info = managed.fsdp_param._module_info
        info.module.load_state_dict({info.param_name: made}, assign=True, strict=False)

    for simpler in (exchanged, assigned):
        with playing_new_rank(2, 3), torch.enable_grad():
            model = sharded()
            storages = filled(model, simpler)
            model()
            model.reshard()
            assert not kept(model, storages)["odd.weight"]


def test_a_parameter_stays_the_same_object(rank: None) -> None:
    with torch.enable_grad():
        model = sharded()
        before = dict(model.named_parameters(remove_duplicate=False))
        facts = {n: (p.requires_grad, p.placements, p.shape, p.stride()) for n, p in before.items()}
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        model.odd.weight.tag = "mine"
        filled(model)
        after = dict(model.named_parameters(remove_duplicate=False))
        assert all(after[name] is before[name] for name in before)
        assert model.tied.weight is model.odd.weight
        assert optimizer.param_groups[0]["params"] == list(model.parameters())
        assert model.odd.weight.tag == "mine"
        for name, p in after.items():
            assert (p.requires_grad, p.placements, p.shape, p.stride()) == facts[name]
            assert isinstance(p, nn.Parameter) and p.is_leaf and p.device.type == "cpu"


def test_tensor_parallel_parameters_use_the_storage() -> None:
    """The parameters are sharded by TP and FSDP2, by TP alone, or not at all."""
    for rank in range(6):
        with playing_new_rank(rank, 6):
            mesh = init_device_mesh("cpu", (3, 2), mesh_dim_names=("dp", "tp"))
            model = nn.Module()
            for name in ("both", "alone"):
                value = placed(torch.empty(7, 4, device="meta"), mesh["tp"], Shard(0))
                model.register_parameter(name, nn.Parameter(value))
            model.scale = nn.Parameter(torch.empty((), device="meta"))
            fully_shard(model, mesh=mesh["dp"], ignored_params={model.alone, model.scale})
            managed = fsdp_params(model)
            assert list(managed) == [model.both]
            before = [p.shape for p in model.parameters()]
            for name, parameter in model.named_parameters():
                local = getattr(parameter, "_local_tensor", parameter)
                facts = managed.get(parameter)
                storage = torch.ones(facts.padded_numel if facts else local.numel())
                hand_over(name, parameter, storage, facts)
                local = getattr(parameter, "_local_tensor", parameter)
                assert local.untyped_storage().data_ptr() == storage.untyped_storage().data_ptr()
            assert [p.shape for p in model.parameters()] == before
            assert model.both.placements == managed[model.both].fsdp_param._spmd_placements


def test_a_parameter_takes_the_dtype_of_its_storage() -> None:
    parameter = nn.Parameter(torch.empty(2, 3, device="meta"))
    hand_over("p", parameter, torch.ones(6, dtype=torch.bfloat16))
    assert (parameter.dtype, parameter.device.type) == (torch.bfloat16, "cpu")


@pytest.mark.skipif(not hasattr(torch.Tensor, "grad_dtype"), reason="torch before 2.10")
@pytest.mark.parametrize("dtype", (torch.float32, None))
def test_the_dtype_of_gradients_stays(dtype: Any) -> None:
    """One that the program has set. Without one the gradient has the storage's dtype."""
    parameter, plain = (
        nn.Parameter(torch.empty(3, device="meta", dtype=torch.bfloat16)) for _ in range(2)
    )
    parameter.grad_dtype = dtype
    hand_over("p", parameter, torch.ones(3, dtype=torch.bfloat16))
    hand_over("q", plain, torch.ones(3))
    assert parameter.grad_dtype == dtype and plain.grad_dtype == torch.float32
    parameter.float().sum().backward()
    assert parameter.grad is not None


def test_hooks_stay() -> None:
    """They are still called, and their handles still remove them."""
    calls: list[str] = []
    parameter = nn.Parameter(torch.empty(3, device="meta"))
    first = parameter.register_hook(lambda grad: calls.append("grad"))
    parameter.register_post_accumulate_grad_hook(lambda p: calls.append("accumulated"))
    hand_over("p", parameter, torch.ones(3))
    (parameter * 2).sum().backward()
    assert calls == ["grad", "accumulated"]
    first.remove()
    (parameter * 2).sum().backward()
    assert calls == ["grad", "accumulated", "accumulated"]


def test_the_subclass_of_a_parameter_stays() -> None:
    class Named(nn.Parameter):
        pass

    parameter = Named(torch.empty(3, device="meta"), requires_grad=False)
    hand_over("p", parameter, torch.ones(3))
    assert type(parameter) is Named and not parameter.requires_grad
    assert bits(parameter) == bits(torch.ones(3))


def on_meta() -> nn.Parameter:
    return nn.Parameter(torch.empty(2, 3, device="meta"))


# Each of these returns a parameter that can't be filled, and the object that is the reason or None.


def referred() -> tuple[nn.Parameter, Any]:
    parameter = on_meta()
    return parameter, weakref.WeakKeyDictionary({parameter: 1})


def in_a_graph() -> tuple[nn.Parameter, Any]:
    parameter = on_meta()
    return parameter, parameter * parameter


def accumulator() -> tuple[nn.Parameter, Any]:
    """A parameter's gradient accumulator, which its hooks keep alive."""
    parameter = on_meta()
    return parameter, parameter.expand_as(parameter).grad_fn.next_functions[0][0]


def with_gradient() -> tuple[nn.Parameter, Any]:
    parameter = on_meta()
    (parameter * 2).sum().backward()
    return parameter, None


def transposed() -> tuple[nn.Parameter, Any]:
    return nn.Parameter(torch.empty(2, 3, device="meta").t()), None


def of_a_subclass() -> tuple[nn.Parameter, Any]:
    from torch.testing._internal.two_tensor import TwoTensor

    return nn.Parameter(TwoTensor(*[torch.empty(2, 3, device="meta")] * 2)), None


# By the error message.
UNFIT = {
    "a weak reference to a parameter": referred,
    "a parameter is part of an autograd graph": in_a_graph,
    "a parameter has a gradient already": with_gradient,
    "strides that are not row-major": transposed,
    "a tensor subclass": of_a_subclass,
}


@pytest.mark.parametrize("why", UNFIT)
def test_parameters_that_cannot_be_filled_are_refused(why: str) -> None:
    parameter, _held = UNFIT[why]()
    with pytest.raises(UsageError, match=why) as caught:
        check_replaceable("p", parameter)
    assert caught.value.tensor == "p"


def test_a_parameter_whose_accumulator_is_alive_is_refused() -> None:
    parameter, _held = accumulator()
    with pytest.raises(UsageError, match="a parameter is part of an autograd graph"):
        hand_over("p", parameter, torch.ones(6))
    assert parameter.is_meta


def test_a_parameter_can_be_filled_after_a_forward_on_meta() -> None:
    """After a backward it can be filled only once its gradient is removed."""
    with torch.device("meta"):
        model = nn.Linear(3, 3)
        torch.compile(model, backend="eager")(torch.empty(2, 3))
        model(torch.empty(2, 3)).sum().backward()
    for name, parameter in model.named_parameters():
        with pytest.raises(UsageError, match="a parameter has a gradient already"):
            check_replaceable(name, parameter)
    model.zero_grad()
    for name, parameter in model.named_parameters():
        hand_over(name, parameter, torch.ones(parameter.numel()))
        assert parameter.device.type == "cpu" and (parameter == 1).all(), name


def test_a_storage_of_another_size_is_refused(rank: None) -> None:
    model = sharded()
    facts = fsdp_params(model)[model.odd.weight]
    numel = model.odd.weight._local_tensor.numel()
    assert numel != facts.padded_numel
    for wrong in (torch.ones(numel), torch.ones(4, 6)):
        with pytest.raises(UsageError, match=rf"expected \[{facts.padded_numel}\]"):
            hand_over("odd.weight", model.odd.weight, wrong, facts)
    assert model.odd.weight.is_meta


# ---- pinning


class Runtime:
    """A stand-in for CUDA's runtime that notes registered ranges. It refuses a range that overlaps
    another one, and one with which more than `full` bytes would be registered."""

    def __init__(self, full: int = 1 << 40) -> None:
        self.ranges: dict[int, int] = {}
        self.full = full
        self.most_pinned = 0

    def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> int:
        overlaps = any(a < address + nbytes and address < a + n for a, n in self.ranges.items())
        if overlaps or flags or self.pinned + nbytes > self.full:
            return 712 if overlaps else 2
        self.ranges[address] = nbytes
        self.most_pinned = max(self.most_pinned, self.pinned)
        return 0

    def cudaHostUnregister(self, address: int) -> int:
        del self.ranges[address]
        return 0

    @property
    def pinned(self) -> int:
        return sum(self.ranges.values())

    def has(self, tensor: Any) -> bool:
        return tensor.untyped_storage().data_ptr() in self.ranges


class PowersOfTwo(Runtime):
    """Notes sizes rounded up to powers of two, as torch's own allocator of pinned memory does."""

    def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> int:
        self.ranges[address] = 1 << (nbytes - 1).bit_length()
        self.most_pinned = max(self.most_pinned, self.pinned)
        return 0


class Offloaded(nn.Module):
    """A model with shards of 2^k + 1 elements on each of two ranks."""

    def __init__(self) -> None:
        super().__init__()
        for k in range(1, 12):
            self.register_parameter(f"p{k}", nn.Parameter(torch.empty(2 * (2**k + 1))))


def test_exactly_the_bytes_are_pinned(rank: None, monkeypatch) -> None:
    """FSDP2 finds the storages pinned and does not copy them. Once the model is deleted no memory
    is pinned."""
    exact = sum(4 * (2**k + 1) for k in range(1, 12))
    for runtime in (Runtime(), PowersOfTwo()):
        monkeypatch.setattr(torch.Tensor, "is_pinned", lambda t: runtime.has(t))
        with torch.device("meta"):
            model = Offloaded()
        fully_shard(model, offload_policy=CPUOffloadPolicy())

        def give(name: str, parameter: Any, storage: Any, managed: ManagedParameter) -> None:
            assert managed.pins
            pin(storage, runtime)
            hand_over(name, parameter, storage, managed)

        storages = filled(model, give)
        model._get_fsdp_state()._lazy_init()
        assert all(kept(model, storages).values())
        # With sizes rounded up the comparison must fail.
        assert (runtime.most_pinned == exact) == (type(runtime) is Runtime)
        storages.clear()
        gc.collect()
        assert len(runtime.ranges) == 11  # the parameters keep the memory alive
        del model
        gc.collect()
        assert runtime.ranges == {}


def test_memory_is_unpinned_after_its_last_view_and_before_it_is_freed() -> None:
    runtime = Runtime()
    pinned_when_freed: list[int] = []

    class Memory(bytearray):
        def __del__(self) -> None:
            pinned_when_freed.append(runtime.pinned)

    storage = torch.frombuffer(Memory(36), dtype=torch.float32)
    pin(storage, runtime)
    view = storage[3:5]
    del storage
    gc.collect()
    assert (runtime.pinned, pinned_when_freed) == (36, [])
    del view
    gc.collect()
    assert (runtime.pinned, pinned_when_freed) == (0, [0])


def test_an_empty_storage_is_not_pinned() -> None:
    runtime = Runtime(full=0)
    pin(torch.zeros(0), runtime)
    assert runtime.ranges == {}


def test_memory_that_cannot_be_pinned_raises_nomem() -> None:
    with pytest.raises(BudgetError, match="NOMEM: 36 bytes were not pinned") as caught:
        pin(torch.zeros(9), Runtime(full=35))
    assert (caught.value.category, caught.value.code) == ("NOMEM", 16)


@pytest.mark.skipif(torch.cuda.is_available(), reason="CUDA is there")
def test_pinning_without_cuda_is_refused(rank: None) -> None:
    check_pinning(by_name(sharded(offload_policy=CPUOffloadPolicy(pin_memory=False))))
    with pytest.raises(UsageError, match="pinning needs CUDA") as caught:
        check_pinning(by_name(sharded(offload_policy=CPUOffloadPolicy())))
    assert caught.value.tensor == "one.weight"


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA")
def test_cuda_reports_the_memory_as_pinned() -> None:
    storages = [torch.ones(2**k + 1) for k in range(1, 12)]
    for storage in storages:
        assert not storage.is_pinned()
        pin(storage)
        assert storage.is_pinned() and storage[:0].is_pinned()


# ---- training


def test_two_ranks_train_as_fsdp2_would(two: Ranks) -> None:
    """On real ranks, since a fake process group moves no data."""
    two.ask("hand_over")
