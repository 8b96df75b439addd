"""Lists the tensors that an engine, an optimizer or a model holds in host memory, by purpose.

Imports neither torch nor DeepSpeed: it recognises sources by their attributes.
"""

import sys
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from modicum.errors import refusal
from modicum.upstream.torch_core import dense_parts, local_of
from modicum.upstream.wrappers import unwrapped

MASTER, GRADIENT, MOMENTS, STAGING, WEIGHTS = "master", "gradient", "moments", "staging", "weights"
DEVICE_GRADIENTS = "device gradients"  # in host memory with DeepSpeed's CPU accelerator
PARTITION = "offloaded weights"  # ZeRO-3's partitions; data-loader workers do not use them
OTHER = "tensors"
KNOWN_DEEPSPEED = "0.19"


class Holding(NamedTuple):
    """A tensor in host memory, at the addresses [begin, end)."""

    owner: str
    """master, gradient, moments, staging, offloaded weights, weights, device gradients, or a name
    from the caller."""
    name: str
    tensor: Any
    begin: int
    end: int


def holdings(source: Any) -> Iterator[Holding]:
    """The tensors of a source: a DeepSpeed engine or ZeRO optimizer, a torch optimizer or module, a
    tensor, a mapping of owners to sources, or an iterable of sources. Skips empty and uninitialised
    tensors, and tensors that are not in host memory. A sparse tensor is several: its indices and
    values."""
    for owner, name, tensor in _tensors(source):
        for part in dense_parts(local_of(tensor)):
            if part.device.type != "cpu" or part.numel() == 0:
                continue
            begin, end = _range_of(part)
            if begin != 0:
                yield Holding(owner, name, part, begin, end)


def _range_of(tensor: Any) -> tuple[int, int]:
    if not tensor.is_contiguous():  # its elements do not fill a range: takes all of the storage
        storage = tensor.untyped_storage()
        return storage.data_ptr(), storage.data_ptr() + storage.nbytes()
    begin = tensor.data_ptr()
    return begin, begin + tensor.numel() * tensor.element_size()


def stepping(source: Any) -> Any:
    """The torch optimizer that allocates the source's missing state in its first step; None if
    `source` is neither an optimizer nor of DeepSpeed."""
    source = unwrapped(source)
    if _is_of_deepspeed(source):
        return _zero_of(source)[0].optimizer
    return source if hasattr(source, "register_step_post_hook") else None


def _tensors(source: Any) -> Iterator[tuple[str, str, Any]]:
    source = unwrapped(source)
    if isinstance(source, type):
        raise refusal("USAGE", "a class instead of a source", got=source.__name__)
    if hasattr(source, "data_ptr") and hasattr(source, "untyped_storage"):
        yield OTHER, "tensor", source
    elif hasattr(source, "holdings"):  # modicum.torch.AdamW
        yield from source.holdings()
    elif _is_of_deepspeed(source):
        yield from _of_zero(source)
    elif hasattr(source, "param_groups") and hasattr(source, "state"):
        yield from _of_optimizer(source)
    elif hasattr(source, "named_parameters"):
        yield from _of_module(source)
    elif isinstance(source, Mapping):
        for owner, members in source.items():
            for _, name, tensor in _tensors(members):
                yield str(owner), name, tensor
    elif isinstance(source, Iterable) and not isinstance(source, (str, bytes)):
        for member in source:
            yield from _tensors(member)
    else:
        raise refusal("USAGE", "a source of unknown kind", got=type(source).__name__)


def _of_module(module: Any) -> Iterator[tuple[str, str, Any]]:
    for name, parameter in module.named_parameters():
        yield WEIGHTS, name, parameter
        if parameter.grad is not None:
            yield GRADIENT, name, parameter.grad
    for name, buffer in module.named_buffers():
        yield WEIGHTS, name, buffer


def _of_optimizer(optimizer: Any) -> Iterator[tuple[str, str, Any]]:
    for group, options in enumerate(optimizer.param_groups):
        for index, parameter in enumerate(options["params"]):
            name = f"{group}.{index}"
            yield WEIGHTS, name, parameter
            if parameter.grad is not None:
                yield GRADIENT, name, parameter.grad
            yield from _state_of(optimizer, parameter, name)


def _state_of(optimizer: Any, parameter: Any, name: str) -> Iterator[tuple[str, str, Any]]:
    for key, value in optimizer.state.get(parameter, {}).items():
        if hasattr(value, "data_ptr") and value.numel() > 1:
            yield (MASTER if key == "master" else MOMENTS), f"{name}.{key}", value


# ---- DeepSpeed

# Attributes of ZeRO-1 and -2 with offloaded optimizer state, and their owners. The values are
# tensors, or lists or dicts of tensors.
_OFFLOADED = {
    "param_buffer_of_bit16_for_cpu_offload_groups": STAGING,
    "temp_grad_buffer_for_cpu_offload": STAGING,
    "accumulated_grads_in_cpu": GRADIENT,
}
# As `ipg_buckets` of ZeRO-3: device buffers, which are host memory with the CPU accelerator.
_ON_DEVICES = {
    "bit16_groups_flat": WEIGHTS,
    "temp_grad_buffer_for_gpu_offload": DEVICE_GRADIENTS,
}


def _is_of_deepspeed(source: Any) -> bool:
    return any(kind.__module__.split(".")[0] == "deepspeed" for kind in type(source).__mro__) and (
        hasattr(source, "optimizer")
    )


def _zero_of(source: Any) -> tuple[Any, bool]:
    """(the ZeRO optimizer: `source` itself, or that of an engine; whether it is of stage 3)."""
    for zero in (source, source.optimizer):
        names = [kind.__name__ for kind in type(zero).__mro__]
        if "DeepSpeedZeroOptimizer_Stage3" in names:
            return zero, True
        if "DeepSpeedZeroOptimizer" in names:
            return zero, False
    what = "an engine of DeepSpeed without ZeRO: give its tensors by name"
    other = source.optimizer if hasattr(source, "module") else source
    raise refusal("UNSUPPORTED", what, got=type(other).__name__)


def _of_zero(source: Any) -> Iterator[tuple[str, str, Any]]:
    zero, is_stage_3 = _zero_of(source)
    yield from _of_stage_3(zero) if is_stage_3 else _of_stage_1_or_2(zero)
    if source is not zero:
        for owner, name, tensor in _of_module(source.module):
            yield DEVICE_GRADIENTS if owner == GRADIENT else owner, name, tensor


def _of_masters(zero: Any, attribute: str) -> Iterator[tuple[str, str, Any]]:
    inner = _attribute(zero, "optimizer")
    for index, master in enumerate(_attribute(zero, attribute)):
        name = f"{attribute}.{index}"
        yield MASTER, name, master
        if master.grad is not None:
            yield GRADIENT, f"{name}.grad", master.grad
        yield from _state_of(inner, master, name)


def _of_stage_1_or_2(zero: Any) -> Iterator[tuple[str, str, Any]]:
    yield from _of_masters(zero, "single_partition_of_fp32_groups")
    if _attribute(zero, "cpu_offload"):
        for attribute, owner in _OFFLOADED.items():
            for name, tensor in _flat(_attribute(zero, attribute), attribute):
                yield owner, name, tensor
    for attribute, owner in _ON_DEVICES.items():
        for name, tensor in _flat(getattr(zero, attribute, ()), attribute):
            yield owner, name, tensor


def _of_stage_3(zero: Any) -> Iterator[tuple[str, str, Any]]:
    if _attribute(zero, "swap_optimizer") or _attribute(zero, "params_in_nvme_and_cpu"):
        what = "ZeRO-3 with tensors on NVMe: give those in memory by name"
        raise refusal("UNSUPPORTED", what, expected="offload to the CPU, or none", got="nvme")
    yield from _of_masters(zero, "fp32_partitioned_groups_flat")
    flat = "grad_partitions_flat_buffer"
    yield GRADIENT, flat, _attribute(zero, flat)
    owner = PARTITION if _attribute(zero, "offload_param") else WEIGHTS
    attribute = "fp16_partitioned_groups_flat"
    for name, tensor in _flat(_attribute(zero, attribute), attribute):
        yield owner, name, tensor
    for name, parameter in _attribute(zero, "module").named_parameters():
        # Frozen parameters have partitions outside the flat groups.
        yield owner, f"{name}.ds_tensor", _attribute(parameter, "ds_tensor")
    for dtype, bucket in _attribute(zero, "ipg_buckets").items():
        if bucket.buffer is not None:
            yield DEVICE_GRADIENTS, f"ipg_buckets.{dtype}", bucket.buffer


def _attribute(zero: Any, name: str) -> Any:
    if hasattr(zero, name):
        return getattr(zero, name)
    deepspeed = sys.modules.get("deepspeed")
    raise refusal(
        "UNSUPPORTED",
        f"DeepSpeed's {type(zero).__name__} has no '{name}'",
        expected=f"DeepSpeed {KNOWN_DEEPSPEED}",
        got=getattr(deepspeed, "__version__", "another"),
    )


def _flat(value: Any, name: str) -> Iterator[tuple[str, Any]]:
    if hasattr(value, "data_ptr"):
        yield name, value
        return
    members = value.items() if isinstance(value, Mapping) else enumerate(value)
    for key, member in members:
        yield from _flat(member, f"{name}.{key}")
