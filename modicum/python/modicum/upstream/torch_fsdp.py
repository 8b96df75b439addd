"""FSDP2's parameters: what its private fields say, and loaded storage put into them.

Every private field of torch that a load relies on is named here and looked for before anything is
read. FSDP2 keeps a parameter's shard twice: as the local tensor of a DTensor Parameter, and as the
flat, padded buffer that it gathers from. Both are made to be the loaded storage, so that nothing is
padded, copied or pinned again at the first forward.
"""

import dis
import inspect
import sys
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from importlib import import_module
from typing import Any

import torch
from torch import nn

from modicum.errors import BudgetError, refusal
from modicum.upstream.wrappers import canonical

__all__ = [
    "Managed",
    "check_pinning",
    "check_replaceable",
    "check_unit_dtypes",
    "fsdp_params",
    "hand_over",
    "pin",
    "probe",
    "register",
]


@dataclass(frozen=True)
class Managed:
    """What FSDP2 says of one of its parameters."""

    fsdp_param: Any
    unit: int
    """Number of the group that is gathered together; the model's groups are counted from 0."""
    ranks: tuple[int, ...]
    """The ranks among which it is cut, in their order; none where it is only replicated."""
    padded_numel: int
    """Elements of each rank's buffer."""
    device: torch.device
    """Where its storage must lie; the CPU where it is offloaded."""
    pins: bool
    """Whether the storage must be pinned."""


# ---- what is known


# By module and class below torch.distributed: methods, and fields that its methods set.
_KNOWN = {
    "fsdp.FSDPModule": {"_get_fsdp_state"},
    "fsdp._fully_shard._fsdp_state.FSDPState": {"_fsdp_param_groups"},
    "fsdp._fully_shard._fsdp_param_group.FSDPParamGroup": {"fsdp_params"},
    "fsdp._fully_shard._fsdp_common.FSDPMeshInfo": {"shard_process_group"},
    "fsdp._fully_shard._fsdp_param.ParamModuleInfo": {"module", "param_name"},
    "fsdp._fully_shard._fsdp_param.FSDPParam": {
        "_module_info",
        "_sharded_param_data",
        "device",
        "mesh_info",
        "offload_to_cpu",
        "padded_sharded_param_size",
        "pin_memory",
        "reset_sharded_param",
        "sharded_param",
    },
    "tensor.DTensor": {"_local_tensor", "_spec"},
}
_STORE_ATTR = dis.opmap["STORE_ATTR"]


def probe() -> str:
    """What is not as it is known in this torch's FSDP2, in one line; empty where all is."""
    torch_is = f"torch {torch.__version__}"
    for path, expected in _KNOWN.items():
        module, _, name = path.rpartition(".")
        try:
            cls = getattr(import_module(f"torch.distributed.{module}"), name)
        except (ImportError, AttributeError):
            return f"{torch_is} has no torch.distributed.{path}"
        if lacks := _lacks(cls, expected):
            return f"{name} of {torch_is} has no {lacks[0]}"
        # Whether a shard has to be padded anew is decided by whose storage it is.
        if name == "FSDPParam" and "untyped_storage" not in _code(cls.reset_sharded_param).co_names:
            return f"FSDPParam of {torch_is} pads its storage whoever has padded it"
    return ""


def _code(member: Any) -> Any:
    return getattr(inspect.unwrap(member), "__code__", None)


def _lacks(cls: type, members: set[str]) -> list[str]:
    """Those that the class neither has nor any method of it sets."""
    missing = members - set(vars(cls)) - set(getattr(cls, "__dataclass_fields__", ()))
    for code in filter(None, map(_code, vars(cls).values())):
        if missing.intersection(code.co_names):
            missing -= _set_by(code)
    return sorted(missing)


def _set_by(code: Any) -> set[str]:
    """The attributes that it sets. (`dis.get_instructions` takes 15 ms for these.)"""
    names, high = set(), 0
    for op, low in zip(code.co_code[::2], code.co_code[1::2], strict=True):
        if op == _STORE_ATTR:
            names.add(code.co_names[high | low])
        high = (high | low) << 8 if op == dis.EXTENDED_ARG else 0
    return names


def _fsdp_states(model: nn.Module) -> list[Any]:
    fsdp = sys.modules.get("torch.distributed.fsdp")  # not imported: nobody can have used it
    if fsdp is None or not hasattr(fsdp, "FSDPModule"):
        return []
    modules = [module for module in model.modules() if isinstance(module, fsdp.FSDPModule)]
    if modules and (reason := probe()):
        raise refusal("UNSUPPORTED", f"this FSDP2 is not known: {reason}")
    # Modules that were sharded together have one state.
    return list(dict.fromkeys(module._get_fsdp_state() for module in modules))


def fsdp_params(model: nn.Module) -> dict[nn.Parameter, Managed]:
    """Every parameter that FSDP2 manages, by its identity; empty for a model without FSDP2.

    `UsageError` where this torch's FSDP2 is not the one that is known, and for a model whose
    parameters are gathered now or were exchanged since `fully_shard`.
    """
    groups = [group for state in _fsdp_states(model) for group in state._fsdp_param_groups]
    managed: dict[nn.Parameter, Managed] = {}
    for unit, group in enumerate(groups):
        for fsdp_param in group.fsdp_params:
            info = fsdp_param._module_info
            if getattr(info.module, info.param_name) is not fsdp_param.sharded_param:
                name = next((n for n, m in model.named_modules() if m is info.module), "")
                name = canonical(f"{name}.{info.param_name}".removeprefix("."))
                raise refusal("USAGE", "a parameter is not the one that FSDP2 has cut", tensor=name)
            managed[fsdp_param.sharded_param] = _managed(fsdp_param, unit)
    return managed


def _managed(fsdp_param: Any, unit: int) -> Managed:
    among = getattr(fsdp_param.mesh_info, "shard_process_group", None)  # none where all replicate
    return Managed(
        fsdp_param=fsdp_param,
        unit=unit,
        ranks=tuple(torch.distributed.get_process_group_ranks(among)) if among else (),
        padded_numel=fsdp_param.padded_sharded_param_size.numel(),
        device=torch.device("cpu") if fsdp_param.offload_to_cpu else fsdp_param.device,
        pins=fsdp_param.pin_memory,
    )


def check_unit_dtypes(
    managed: Mapping[str, Managed], dtype_of: Callable[[str], torch.dtype]
) -> None:
    """Refuses what FSDP2 would refuse at the first forward: trainable parameters of one unit that
    have several dtypes. `dtype_of` says which dtype the parameter of an FQN will have."""
    first: dict[int, tuple[str, torch.dtype]] = {}
    for name, of in managed.items():
        if of.fsdp_param.sharded_param.requires_grad:
            dtype = dtype_of(name)
            other, expected = first.setdefault(of.unit, (name, dtype))
            if dtype != expected:
                raise refusal(
                    "UNSUPPORTED",
                    "FSDP2 wants the trainable parameters of a unit in one dtype: shard the module "
                    "of this one by itself",
                    tensor=name,
                    expected=f"{expected} as {other}",
                    got=str(dtype),
                )


# ---- handing over


def check_replaceable(name: str, parameter: nn.Parameter) -> None:
    """Refuses a parameter whose content can't be exchanged without somebody noticing."""
    from torch.utils._python_dispatch import is_traceable_wrapper_subclass

    local = getattr(parameter, "_local_tensor", parameter)
    if isinstance(parameter, nn.parameter.UninitializedTensorMixin):
        raise refusal("UNSUPPORTED", "a lazy parameter has no shape yet", tensor=name)
    if is_traceable_wrapper_subclass(local):
        got = type(local).__name__
        raise refusal("UNSUPPORTED", "a tensor subclass", tensor=name, got=got)
    if not parameter.is_contiguous() or not local.is_contiguous():
        got = str(list(parameter.stride()))
        raise refusal("UNSUPPORTED", "strides that are not row-major", tensor=name, got=got)
    if parameter.grad is not None:
        raise refusal("USAGE", "a parameter has a gradient already", tensor=name)
    if weakref.getweakrefs(parameter):
        raise refusal("UNSUPPORTED", "a weak reference to a parameter", tensor=name)
    if parameter._use_count() > 1:
        raise refusal("USAGE", "a parameter is part of an autograd graph", tensor=name)


def hand_over(
    name: str, parameter: nn.Parameter, storage: torch.Tensor, managed: Managed | None = None
) -> None:
    """Makes `storage` the memory of `parameter`, which stays the same object: in every module that
    has it and in an optimizer, with its attributes, hooks and `requires_grad`.

    Args:
        name: what to call the parameter in an error.
        parameter: on meta; plain or a DTensor.
        storage: one-dimensional, contiguous, on the right device and of the dtype that the
            parameter shall have: its local elements, row-major. FSDP2's are padded to
            `managed.padded_numel`.
        managed: what `fsdp_params` says of it, if it does.

    `UsageError` as from `check_replaceable`, and for a storage of another size.
    """
    check_replaceable(name, parameter)
    shape = getattr(parameter, "_local_tensor", parameter).shape
    numel = managed.padded_numel if managed else shape.numel()
    if storage.shape != (numel,):
        got = str(list(storage.shape))
        raise refusal("MISMATCH", "a storage", tensor=name, expected=f"[{numel}]", got=got)
    with torch.no_grad():
        # What is padded is padded at the end: FSDP2 pads along dim 0 only.
        made = _like(parameter, storage[: shape.numel()].view(shape))
    made.__class__ = type(parameter)
    made.__dict__.update(parameter.__dict__)
    made.requires_grad_(parameter.requires_grad)
    # The very dictionaries: handles that remove a hook have them.
    made._backward_hooks = parameter._backward_hooks
    made._post_accumulate_grad_hooks = parameter._post_accumulate_grad_hooks
    torch.utils.swap_tensors(parameter, made)
    if managed:
        managed.fsdp_param._sharded_param_data = storage
        managed.fsdp_param.reset_sharded_param()


def _like(parameter: Any, local: torch.Tensor) -> Any:
    """`local` as `parameter` is: plain, or a DTensor of the same mesh, placements and shape."""
    spec = getattr(parameter, "_spec", None)
    if spec is None:
        return nn.Parameter(local, requires_grad=False)
    from torch.distributed.tensor import DTensor

    if spec.tensor_meta.dtype != local.dtype:
        spec = replace(spec, tensor_meta=spec.tensor_meta._replace(dtype=local.dtype))
    # `DTensor.from_local` would move what is offloaded to the mesh's device.
    return DTensor(local, spec, requires_grad=False)


# ---- pinning


def check_pinning(managed: Mapping[str, Managed]) -> None:
    """Refuses `CPUOffloadPolicy(pin_memory=True)` where there is no CUDA that would pin."""
    if torch.cuda.is_available():
        return
    for name, of in managed.items():
        if of.pins:
            what = "without CUDA nothing is pinned: CPUOffloadPolicy(pin_memory=False)?"
            raise refusal("UNSUPPORTED", what, tensor=name)


def register(cudart: Any, address: int, nbytes: int) -> None:
    """Pins memory where it lies, until `cudaHostUnregister`. `BudgetError` where CUDA won't."""
    status = int(cudart.cudaHostRegister(address, nbytes, 0))
    if status != 0:
        error = BudgetError(f"NOMEM: {nbytes} bytes were not pinned (CUDA error {status})")
        error.category, error.code = "NOMEM", 16
        raise error


def pin(storage: torch.Tensor, cudart: Any = None) -> None:
    """Pins exactly the memory of `storage`, which is nobody else's, until it is given back.

    torch's own pinned allocator would make a copy, and round each size up to a power of two.
    `cudart` is what registers memory: CUDA's runtime unless said otherwise. `BudgetError` where it
    won't.
    """
    memory = storage.untyped_storage()
    address, nbytes = memory.data_ptr(), memory.nbytes()
    if nbytes == 0:
        return
    cudart = cudart or torch.cuda.cudart()
    register(cudart, address, nbytes)
    # Runs while the memory is still there. At the process's end the driver sees to it.
    weakref.finalize(memory, cudart.cudaHostUnregister, address).atexit = False
