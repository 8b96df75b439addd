"""FSDP2's parameters: their private fields, and the hand-over of loaded storage to them.

FSDP2 refers to a parameter's shard twice: by the local tensor of a DTensor Parameter, and by the
flat, padded buffer that is its all-gather input. The hand-over makes both of them views of the
loaded storage, so that the first forward does not pad, copy or pin.

    storage          | 0 1 2 3 4 5 | pad |
    local tensor     | 0 1 2 3 4 5 |
    all-gather input | 0 1 2 3 4 5 | pad |
"""

import sys
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import nn

from modicum.errors import BudgetError, UsageError, refusal
from modicum.upstream.known import TORCH_TESTED, KnownFacts
from modicum.upstream.torch_core import carry_grad_dtype, carry_hooks, local_of, use_count
from modicum.upstream.torch_dispatch import is_traceable_wrapper_subclass
from modicum.upstream.torch_distributed import dtensor_like
from modicum.upstream.wrappers import canonical


@dataclass(frozen=True)
class ManagedParameter:
    """A parameter that FSDP2 manages."""

    fsdp_param: Any
    unit: int
    """Index of its parameter group in the model. FSDP2 gathers a group together."""
    padded_numel: int
    """Number of elements of each rank's buffer, padding included."""
    device: torch.device
    """The device of its storage: the CPU if it is offloaded."""
    pins: bool
    """Whether the storage must be pinned."""


# ---- FSDP2's records


def _groups(modules: Iterable[nn.Module]) -> list[Any]:
    """FSDP2's parameter groups, each of which is gathered together."""
    fsdp = sys.modules.get("torch.distributed.fsdp")  # if it is not imported, it is not used
    if fsdp is None or not hasattr(fsdp, "FSDPModule"):
        return []
    sharded = [module for module in modules if isinstance(module, fsdp.FSDPModule)]
    # Modules that were sharded together share a state.
    states = dict.fromkeys(module._get_fsdp_state() for module in sharded)
    return [group for state in states for group in _groups_of(state)]


def _groups_of(state: Any) -> list[Any]:
    """The parameter groups of one state. In older versions (torch 2.11) it has at most one."""
    if hasattr(state, "_fsdp_param_groups"):
        return list(state._fsdp_param_groups)
    group = state._fsdp_param_group
    return [] if group is None else [group]


def _known_groups(modules: Iterable[nn.Module]) -> list[Any]:
    """The result of `_groups`. Raises `UsageError` if FSDP2 differs from the tested versions."""
    try:
        groups = _groups(modules)
        # What `known` checks does not depend on the mesh: the first group's mesh suffices.
        meshes = [group.fsdp_params[0].mesh_info.mesh for group in groups[:1]]
    except AttributeError as error:
        raise _not_known(error) from None
    for mesh in meshes:
        known(mesh).require()
    return groups


def _not_known(error: Exception) -> UsageError:
    what, expected = (
        f"this FSDP2 differs from the tested ones: {error}",
        f"torch {' or '.join(TORCH_TESTED)}",
    )
    return refusal("UNSUPPORTED", what, expected=expected, got=torch.__version__)


def cut_by_fsdp() -> dict[torch.Tensor, Any]:
    """For each parameter that FSDP2 manages in this process, in any model, FSDP2's record of it:
    the argument for `shard_ranks`. Raises `UsageError` if this torch does not expose them."""
    try:
        # All live modules on which `fully_shard` was called.
        from torch.distributed._composable_state import _module_state_mapping

        groups = _groups(list(_module_state_mapping))
        return {param.sharded_param: param for group in groups for param in group.fsdp_params}
    except (ImportError, AttributeError) as error:
        raise _not_known(error) from None


def shard_ranks(fsdp_param: Any) -> tuple[int, ...]:
    """The ranks among which FSDP2 divides a parameter, in their order; () if it only replicates it.
    Raises `UsageError` if this torch does not expose them."""
    try:
        if fsdp_param.mesh_info.shard_mesh_dim is None:
            return ()
        among = fsdp_param.mesh_info.shard_process_group
    except AttributeError as error:
        raise _not_known(error) from None
    return tuple(torch.distributed.get_process_group_ranks(among))


def is_sharded(model: nn.Module) -> bool:
    """Whether FSDP2 manages parameters of the model."""
    return bool(_known_groups(model.modules()))


def is_unit(module: nn.Module) -> bool:
    """Whether `fully_shard` was called on the module itself."""
    return bool(_groups([module]))


def stays_cut(parameter: torch.Tensor, managed: ManagedParameter | None) -> bool:
    """Whether a parameter is a DTensor even while FSDP2 has gathered it, as with tensor
    parallelism. `managed`: its entry in `fsdp_params`, if there is one."""
    return managed.fsdp_param.is_dtensor if managed else hasattr(parameter, "placements")


def reshard(model: nn.Module) -> None:
    """Frees the gathered parameters that FSDP2 keeps after a forward without a backward, or after
    `unshard()`, as `state_dict()` does. Does not communicate. Raises `UsageError`, and frees none,
    in a forward or a backward that needs them."""
    gathered = [group for group in _known_groups(model.modules()) if not group.is_sharded]
    for group in gathered:
        if group._training_state.name != "IDLE":
            what = "FSDP2 has gathered this parameter for a forward or backward that has not ended:"
            what += " call this after it, or after an exception reset_iter_state() on the root"
            raise refusal("USAGE", what, tensor=_name_of(model, group.fsdp_params[0]))
    for group in gathered:
        group.reshard()


def fsdp_params(model: nn.Module) -> dict[nn.Parameter, ManagedParameter]:
    """All parameters of the model that FSDP2 manages.

    Raises `UsageError` for FSDP1, if FSDP2 differs from the tested versions, or if a parameter is
    gathered now or was replaced since `fully_shard`.
    """
    fsdp1 = getattr(sys.modules.get("torch.distributed.fsdp"), "FullyShardedDataParallel", ())
    for name, module in model.named_modules():
        if isinstance(module, fsdp1):
            what = "FSDP1, FullyShardedDataParallel, is not supported: shard by fully_shard (FSDP2)"
            raise refusal("UNSUPPORTED", what, got=f"module '{canonical(name)}'")
    return _managed_in(model, _known_groups(model.modules()))


def _managed_in(model: nn.Module, groups: Sequence[Any]) -> dict[nn.Parameter, ManagedParameter]:
    managed: dict[nn.Parameter, ManagedParameter] = {}
    for unit, group in enumerate(groups):
        for fsdp_param in group.fsdp_params:
            info = fsdp_param._module_info
            if getattr(info.module, info.param_name) is not fsdp_param.sharded_param:
                what = "this parameter was replaced after fully_shard"
                if fsdp_param.sharded_state.name != "SHARDED":
                    what = "FSDP2 has gathered this parameter, as after a forward without a "
                    what += "backward: call reshard() on each FSDPModule first"
                raise refusal("USAGE", what, tensor=_name_of(model, fsdp_param))
            managed[fsdp_param.sharded_param] = ManagedParameter(
                fsdp_param=fsdp_param,
                unit=unit,
                padded_numel=fsdp_param.padded_sharded_param_size.numel(),
                device=torch.device("cpu") if fsdp_param.offload_to_cpu else fsdp_param.device,
                pins=fsdp_param.pin_memory,
            )
    return managed


def _name_of(model: nn.Module, fsdp_param: Any) -> str:
    info = fsdp_param._module_info
    name = next((n for n, m in model.named_modules() if m is info.module), "")
    return canonical(f"{name}.{info.param_name}".removeprefix("."))


def check_unit_dtypes(
    managed: Mapping[str, ManagedParameter], dtype_of: Callable[[str], torch.dtype]
) -> None:
    """Raises `UsageError` if the trainable parameters of a unit will have several dtypes, which
    FSDP2 refuses at the first forward. `dtype_of`: returns the dtype that the parameter with a
    given FQN will have."""
    units: dict[int, dict[torch.dtype, list[str]]] = {}
    for name, record in managed.items():
        if record.fsdp_param.sharded_param.requires_grad:
            units.setdefault(record.unit, {}).setdefault(dtype_of(name), []).append(name)
    for unit in units.values():
        if len(unit) > 1:
            (usual, others), *_, (rare, (name, *_)) = sorted(
                unit.items(), key=lambda item: len(item[1]), reverse=True
            )
            what = "FSDP2 expects one dtype for the trainable parameters of a unit: shard the "
            what += "module of this parameter by itself"
            wanted = f"{usual} as {others[0]}"
            raise refusal("UNSUPPORTED", what, tensor=name, expected=wanted, got=str(rare))


# ---- handing over


def check_replaceable(name: str, parameter: nn.Parameter) -> None:
    """Raises `UsageError` if a parameter's memory can't be replaced: its local tensor is a
    subclass, its strides are not row-major, it has a gradient, or a weak reference or an autograd
    graph refers to it."""
    local = local_of(parameter)
    if is_traceable_wrapper_subclass(local):
        got = type(local).__name__
        raise refusal("UNSUPPORTED", "a tensor subclass", tensor=name, got=got)
    if not parameter.is_contiguous() or not local.is_contiguous():
        got = str(list(parameter.stride()))
        what = "strides that are not row-major: change the memory format after the load"
        raise refusal("UNSUPPORTED", what, tensor=name, got=got)
    if parameter.grad is not None:
        raise refusal("USAGE", "a parameter has a gradient already", tensor=name)
    if weakref.getweakrefs(parameter):
        raise refusal("UNSUPPORTED", "a weak reference to a parameter", tensor=name)
    if use_count(parameter) > 1:
        what = "a parameter is part of an autograd graph: delete what a forward has returned; with "
        what += "torch.nn.utils.weight_norm build this module with values"
        raise refusal("USAGE", what, tensor=name)


def hand_over(
    name: str,
    parameter: nn.Parameter,
    storage: torch.Tensor,
    managed: ManagedParameter | None = None,
) -> None:
    """Makes `storage` the memory of `parameter`, which stays the same object in modules and
    optimizers, with its attributes, hooks, `requires_grad` and `grad_dtype`.

    Args:
        name: its name in errors.
        parameter: on meta; plain or a DTensor.
        storage: the parameter's local elements, row-major, as a one-dimensional contiguous tensor;
            the parameter gets its device and dtype. For FSDP2 padded to `managed.padded_numel`.
        managed: its entry in `fsdp_params`, if there is one.

    Raises `UsageError` as `check_replaceable` does, or if the storage has another shape.
    """
    check_replaceable(name, parameter)
    shape = local_of(parameter).shape
    numel = managed.padded_numel if managed else shape.numel()
    if storage.shape != (numel,):
        got = str(list(storage.shape))
        what = "the storage has another shape than the shard"
        raise refusal("MISMATCH", what, tensor=name, expected=f"[{numel}]", got=got)
    with torch.no_grad():
        # FSDP2 pads only along dim 0, so the padding is at the end.
        local = storage[: shape.numel()].view(shape)
        replacement = dtensor_like(parameter, local)
        if replacement is local:  # the parameter is no DTensor
            replacement = nn.Parameter(local, requires_grad=False)
    replacement.__class__ = type(parameter)
    replacement.__dict__.update(parameter.__dict__)
    replacement.requires_grad_(parameter.requires_grad)
    carry_hooks(parameter, replacement)
    carry_grad_dtype(parameter, replacement)
    torch.utils.swap_tensors(parameter, replacement)
    if managed:
        managed.fsdp_param._sharded_param_data = storage
        managed.fsdp_param.reset_sharded_param()


# ---- known facts


def known(mesh: Any) -> KnownFacts:
    """Facts about FSDP2, checked on a module of one element that is sharded over `mesh`. FSDP2 must
    have sharded a model over it already: then the check takes about a millisecond and does not
    communicate."""
    facts = {
        "FSDPParam takes a storage that is padded, without a copy": partial(_takes_storage, mesh),
        "a process registers the modules that it shards": partial(_is_registered, mesh),
        "a parameter group tells whether it is gathered and in use": partial(_tells_use, mesh),
    }
    return KnownFacts("torch", TORCH_TESTED, facts)


def _tiny_unit(mesh: Any) -> nn.Module:
    from torch.distributed.fsdp import fully_shard

    layer = nn.Linear(1, 1, bias=False, device="meta")
    fully_shard(layer, mesh=mesh)
    return layer


def _is_registered(mesh: Any) -> bool:
    layer = _tiny_unit(mesh)
    return layer.weight in cut_by_fsdp()


def _tells_use(mesh: Any) -> bool:
    (group,) = _groups([_tiny_unit(mesh)])
    return bool(group.is_sharded) and group._training_state.name == "IDLE"


def _takes_storage(mesh: Any) -> bool:
    layer = _tiny_unit(mesh)
    ((parameter, record),) = _managed_in(layer, _groups(layer.modules())).items()
    inner, storage = record.fsdp_param, torch.zeros(2, device="cpu")
    # More elements than any rank has, so that every rank's shard is padded.
    inner.padded_sharded_param_size = torch.Size((2, 1))
    hand_over("weight", parameter, storage, replace(record, padded_numel=2))
    both = inner._sharded_param_data, local_of(inner.sharded_param)
    memory = {tensor.untyped_storage().data_ptr() for tensor in both}
    return layer.weight is parameter is inner.sharded_param and memory == {storage.data_ptr()}


# ---- pinning


def await_copies(tensor: torch.Tensor) -> None:
    """Waits for a copy into pinned memory on the current stream: before torch 2.13 FSDP2 calls the
    hooks of an offloaded gradient while its copy from the device is in flight."""
    local = local_of(tensor)
    accelerator = getattr(torch, "accelerator", None)
    if accelerator is None or local.device.type != "cpu" or not accelerator.is_available():
        return
    if local.is_pinned():
        accelerator.current_stream().synchronize()


def check_pinning(managed: Mapping[str, ManagedParameter]) -> None:
    """Raises `UsageError` for `CPUOffloadPolicy(pin_memory=True)` without CUDA."""
    if torch.cuda.is_available():
        return
    for name, record in managed.items():
        if record.pins:
            what = "pinning needs CUDA: use CPUOffloadPolicy(pin_memory=False)"
            raise refusal("UNSUPPORTED", what, tensor=name)


def register(cudart: Any, address: int, nbytes: int) -> None:
    """Pins memory in place, until `cudaHostUnregister`. Raises `BudgetError` if CUDA refuses."""
    status = int(cudart.cudaHostRegister(address, nbytes, 0))
    if status != 0:
        error = BudgetError(f"NOMEM: {nbytes} bytes were not pinned (CUDA error {status})")
        error.category, error.code = "NOMEM", 16  # the exit code of NOMEM
        raise error


def pin(storage: torch.Tensor, cudart: Any = None) -> None:
    """Pins exactly the memory of `storage` until it is freed. No other storage may share it.

    torch's own pinned allocator would make a copy, and round each size up to a power of two.
    `cudart`: by default CUDA's runtime. Raises `BudgetError` if it refuses.
    """
    memory = storage.untyped_storage()
    address, nbytes = memory.data_ptr(), memory.nbytes()
    if nbytes == 0:
        return
    cudart = cudart or torch.cuda.cudart()
    register(cudart, address, nbytes)
    # torch keeps the Python object of a storage as long as the storage exists: although `memory` is
    # a local variable, this runs only when no tensor has the storage, and before the memory is
    # freed. At the process's exit the driver unpins it.
    weakref.finalize(memory, cudart.cudaHostUnregister, address).atexit = False
