"""torch's dispatcher: modes, schemas of operators, and tensors without memory.

The import of this file fails with a torch that lacks one of the private names imported below.
"""

import threading
from typing import Any

import torch
from torch._C import _len_torch_function_stack
from torch.overrides import (
    TorchFunctionMode,
    _get_current_function_mode_stack,
    _pop_mode,
    _push_mode,
)
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    _get_current_dispatch_mode_stack,
)
from torch.utils._python_dispatch import (
    is_traceable_wrapper_subclass as is_traceable_wrapper_subclass,
)
from torch.utils._python_dispatch import (
    return_and_correct_aliasing as return_and_correct_aliasing,
)
from torch.utils._pytree import tree_map as tree_map
from torch.utils._pytree import tree_map_only as tree_map_only

from modicum.upstream.known import TORCH_TESTED, KnownFacts

TO_COPY = torch.ops.aten._to_copy
"""The operator behind `Tensor.to`."""
LOCAL_SCALAR = torch.ops.aten._local_scalar_dense.default
"""The operator behind `Tensor.item`."""
NO_TORCH_FUNCTION = torch._C._disabled_torch_function_impl
"""The `__torch_function__` of a subclass that has only `__torch_dispatch__`."""

# fmt: off
METADATA = frozenset([
    "__hash__", "__len__", "_backward_hooks", "_base", "_grad", "_is_view", "_version", "device",
    "dim", "dtype", "element_size", "get_device", "grad", "grad_fn", "has_names", "is_complex",
    "is_contiguous", "is_conj", "is_cpu", "is_cuda", "is_floating_point", "is_inference",
    "is_leaf", "is_meta", "is_mkldnn", "is_neg", "is_nested", "is_quantized", "is_signed",
    "is_sparse", "is_sparse_csr", "is_xla", "itemsize", "layout", "name", "names", "nbytes",
    "ndim", "ndimension", "nelement", "numel", "output_nr", "register_hook",
    "register_post_accumulate_grad_hook", "requires_grad", "requires_grad_", "retains_grad",
    "shape", "size", "storage_offset", "stride",
])
# fmt: on
"""Functions and properties of a tensor that do not read its memory."""


def arguments_of(operator: Any) -> Any:
    """The arguments in an operator's schema, with attributes `name`, `alias_info` and `is_out`."""
    return operator._schema.arguments


def operator_name(operator: Any) -> str:
    """The operator's name without the namespace aten."""
    return operator._schema.name.removeprefix("aten::")


def is_mutable(operator: Any) -> bool:
    """Whether an operator writes to one of its arguments."""
    return operator._schema.is_mutable


def without_memory(cls: type, inner: torch.Tensor, device: str) -> Any:
    """A tensor of the subclass `cls` that claims to be on `device`, with the size and strides of
    `inner`."""
    return torch.Tensor._make_wrapper_subclass(
        cls,
        inner.size(),
        strides=inner.stride(),
        storage_offset=inner.storage_offset(),
        dtype=inner.dtype,
        device=torch.device(device),
    )


# ---- modes


def is_dispatching(kind: type[TorchDispatchMode]) -> bool:
    """Whether a dispatch mode of this class is active on this thread."""
    return any(isinstance(mode, kind) for mode in _get_current_dispatch_mode_stack())


def push_lowest(mode: TorchFunctionMode) -> None:
    """Activates a function mode on this thread below the active modes, so that the contexts of
    these can still pop their own mode. Does nothing if a mode of the same class is active."""
    if any(isinstance(active, type(mode)) for active in _get_current_function_mode_stack()):
        return
    modes = [_pop_mode() for _ in range(_len_torch_function_stack())]
    for each in [mode, *reversed(modes)]:
        _push_mode(each)


# ---- known facts


class _RecordingMode(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Any] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(func)
        return func(*args, **(kwargs or {}))


def _operators_are_seen() -> bool:
    with torch.inference_mode(False), _RecordingMode() as mode:
        is_active = is_dispatching(_RecordingMode)
        torch.zeros(1, dtype=torch.float32, device="cpu").to(torch.float64)
    (copy,) = (func for func in mode.seen if func.overloadpacket is TO_COPY)
    names = [argument.name for argument in arguments_of(copy)]
    return is_active and operator_name(copy) == "_to_copy" and "device" in names


class _PassingMode(TorchFunctionMode):
    pass


class _UpperMode(TorchFunctionMode):
    pass


def _modes_are_a_stack() -> bool:
    kinds: list[type] = []

    def push() -> None:
        with _UpperMode():
            push_lowest(_PassingMode())
            kinds.extend(map(type, _get_current_function_mode_stack()))

    thread = threading.Thread(target=push)  # each thread has its own stack
    thread.start()
    thread.join()
    return kinds == [_PassingMode, _UpperMode]


KNOWN = KnownFacts(
    "torch",
    TORCH_TESTED,
    {
        "a dispatch mode sees Tensor.to as aten._to_copy": _operators_are_seen,
        "function modes are a stack that is popped and pushed": _modes_are_a_stack,
    },
)
