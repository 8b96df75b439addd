"""torch's tensors, modules and optimizers: their private attributes, and accessors for them.

Only `not_compiled` and the checks import torch: `modicum.memory` and `modicum.recipes` apply the
other accessors to objects of their callers, and need no torch.
"""

import functools
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

from modicum.errors import refusal
from modicum.upstream.known import TORCH_TESTED, KnownFacts
from modicum.upstream.patching import replace

RESETS = ("reset_parameters", "_reset_parameters")
"""The methods that initialise torch's own modules. MultiheadAttention and Transformer have the
second one."""


# ---- tensors


def local_of(tensor: Any) -> Any:
    """A DTensor's local tensor, or the tensor itself."""
    return getattr(tensor, "_local_tensor", tensor)


# The methods of a sparse tensor that return its dense parts, by layout. Those of COO accept
# uncoalesced tensors.
_PARTS = {
    "torch.strided": None,
    "torch.jagged": None,
    "torch.sparse_coo": ("_indices", "_values"),
    "torch.sparse_csr": ("crow_indices", "col_indices", "values"),
    "torch.sparse_csc": ("ccol_indices", "row_indices", "values"),
    "torch.sparse_bsr": ("crow_indices", "col_indices", "values"),
    "torch.sparse_bsc": ("ccol_indices", "row_indices", "values"),
}


def dense_parts(tensor: Any) -> list[Any]:
    """The dense tensors that have a tensor's memory: itself; the indices and values of a sparse
    one; none for one of a lazy module that has no shape yet."""
    if hasattr(tensor, "materialize"):  # of UninitializedParameter and UninitializedBuffer
        return []
    layout = str(tensor.layout)
    if layout not in _PARTS:
        what = "a tensor of unknown layout"
        raise refusal("UNSUPPORTED", what, expected="dense or sparse", got=layout)
    names = _PARTS[layout]
    return [tensor] if names is None else [getattr(tensor, name)() for name in names]


def version_of(tensor: Any) -> int:
    """A counter that grows with each in-place write through torch. Raises RuntimeError for an
    inference tensor."""
    return tensor._version


def count_writes_through_data(stack: ExitStack) -> None:
    """Until `stack` ends, writes through `.data` to a plain tensor on meta grow its version
    counter, as writes through `detach()` do: those in place, and the assignment of another tensor
    of the same dtype, shape and strides (other ones convert). The assignment to a vector does not
    count: transformers assigns a copy of the head's bias whenever it ties weights."""
    import torch

    data: Any = torch.Tensor.data

    def is_plain(tensor: Any) -> bool:
        own_dispatch = type(tensor).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__
        return tensor.is_meta and not own_dispatch and not tensor.is_inference()

    def get(tensor: Any) -> Any:
        return tensor.detach() if is_plain(tensor) else data.__get__(tensor)

    def put(tensor: Any, value: Any) -> None:
        if is_plain(tensor) and tensor.dim() > 1 and _is_like(tensor, value):
            torch.autograd.graph.increment_version(tensor)
        data.__set__(tensor, value)

    replace(stack, torch.Tensor, "data", property(get, put))


def _is_like(tensor: Any, value: Any) -> bool:
    """Whether `value` is another tensor on meta with the same dtype, shape and strides."""
    return (
        value.is_meta
        and (value.dtype, value.shape) == (tensor.dtype, tensor.shape)
        and value.stride() == tensor.stride()
        and storage_id(value) != storage_id(tensor)
    )


def use_count(tensor: Any) -> int:
    """The number of C++ references to the tensor: 1 for its Python object, and more if an autograd
    graph refers to it."""
    return tensor._use_count()


def storage_id(tensor: Any) -> int:
    """A number that identifies a tensor's storage as long as the storage exists."""
    return tensor.untyped_storage()._cdata


def carry_hooks(source: Any, target: Any) -> None:
    """Gives `target` the gradient hooks of `source`: the same dictionaries, so that handles still
    remove them."""
    target._backward_hooks = source._backward_hooks
    target._post_accumulate_grad_hooks = source._post_accumulate_grad_hooks


def carry_grad_dtype(source: Any, target: Any) -> None:
    """Gives `target` the `grad_dtype` that a program has set on `source` (torch 2.10 or newer)."""
    if (dtype := getattr(source, "grad_dtype", source.dtype)) != source.dtype:
        target.grad_dtype = dtype


# ---- modules


def parameters_of(module: Any) -> dict[str, Any]:
    """A module's own parameters by attribute; None for one registered without a tensor. Returns the
    module's own dictionary: setting entries bypasses torch's registration hooks. Returns an empty
    one before the module's constructor has run."""
    return vars(module).get("_parameters", {})


def buffers_of(module: Any) -> dict[str, Any]:
    """A module's own buffers by attribute; the module's own dictionary."""
    return module._buffers


def children_of(module: Any) -> dict[str, Any]:
    """A module's own submodules by attribute, as `parameters_of` returns parameters. A submodule
    under several attributes has an entry for each."""
    return vars(module).get("_modules", {})


def is_persistent(module: Any, attribute: str) -> bool:
    """Whether a state dict has this parameter or buffer of the module."""
    return attribute not in module._non_persistent_buffers_set


def clone_of(module: Any, kind: type, **registered: dict[str, Any]) -> Any:
    """A module of class `kind` with the attributes of `module`, but with the given `parameters`,
    `buffers` and `modules`. Attributes set on the clone are not set on the module."""
    clone: Any = object.__new__(kind)
    vars(clone).update(vars(module))
    vars(clone).update({f"_{name}": members for name, members in registered.items()})
    return clone


def drop_hooks(module: Any, *hooks: Callable[..., Any]) -> None:
    """Removes forward pre-hooks and load_state_dict pre-hooks by their functions: a deep copy of a
    module has the original's hooks, but there are no handles to them."""
    for registered in (module._forward_pre_hooks, module._load_state_dict_pre_hooks):
        for key, callback in list(registered.items()):
            # torch wraps load_state_dict pre-hooks in an object with an attribute `hook`.
            if getattr(callback, "hook", callback) in hooks:
                del registered[key]


def not_compiled(function: Any) -> Any:
    """Wraps `function` so that torch.compile calls it instead of tracing it. Does not import the
    compiler."""
    import torch

    return torch._disable_dynamo(function)


# ---- optimizers


def load_hooks(optimizer: Any) -> tuple[list[Callable[..., Any]], list[Callable[..., Any]]]:
    """(load_state_dict pre-hooks, load_state_dict post-hooks), in the order of registration."""
    before = optimizer._optimizer_load_state_dict_pre_hooks
    after = optimizer._optimizer_load_state_dict_post_hooks
    return [*before.values()], [*after.values()]


# ---- known facts


def _plain() -> Iterator[Any]:
    """Two ordinary tensors on the CPU, whatever the default device, and in inference mode, too."""
    import torch

    with torch.inference_mode(False):
        yield from (torch.zeros(2, device="cpu") for _ in range(2))


def _writes_are_counted() -> bool:
    tensor, _ = _plain()
    before = version_of(tensor)
    tensor.add_(1)
    return version_of(tensor) > before


def _writes_through_data_are_counted() -> bool:
    import torch

    with ExitStack() as stack, torch.inference_mode(False):
        parameter = torch.nn.Parameter(torch.empty(2, 2, device="meta"))
        count_writes_through_data(stack)
        versions = [version_of(parameter)]
        parameter.data.zero_()
        versions.append(version_of(parameter))
        parameter.data = torch.empty(2, 2, device="meta")
        versions.append(version_of(parameter))
        parameter.data = parameter.data.to(torch.float64)
        versions.append(version_of(parameter))
    first, written, assigned, converted = versions
    return first < written < assigned == converted and "data" not in vars(torch.Tensor)


def _graphs_are_counted() -> bool:
    import torch

    parameter, _ = map(torch.nn.Parameter, _plain())
    alone = use_count(parameter)
    with torch.inference_mode(False), torch.enable_grad():
        product = parameter * 2
    return alone == 1 < use_count(parameter) and product.requires_grad


def _storages_are_told_apart() -> bool:
    tensor, other = _plain()
    return storage_id(tensor) == storage_id(tensor[1:]) != storage_id(other)


def _a_hook(*_: Any) -> None:
    pass


def _another_hook(*_: Any) -> None:
    pass


def _hooks_are_carried() -> bool:
    import torch

    parameter, other = map(torch.nn.Parameter, _plain())
    handles = [
        parameter.register_hook(_a_hook),
        parameter.register_post_accumulate_grad_hook(_a_hook),
    ]
    carry_hooks(parameter, other)
    hooks = other._backward_hooks or {}, other._post_accumulate_grad_hooks or {}
    had = [len(registered) for registered in hooks]
    for handle in handles:
        handle.remove()
    return had == [1, 1] and not any(hooks)


def _modules_keep_dictionaries() -> bool:
    import torch

    module = torch.nn.Module()
    module.register_parameter("parameter", None)
    module.register_buffer("kept", None)
    module.register_buffer("scratch", None, persistent=False)
    module.add_module("child", torch.nn.Module())
    return (
        [*parameters_of(module)] == ["parameter"]
        and [*buffers_of(module)] == ["kept", "scratch"]
        and [*children_of(module)] == ["child"]
        and is_persistent(module, "kept")
        and not is_persistent(module, "scratch")
    )


def _hooks_are_dropped() -> bool:
    import torch

    module = torch.nn.Module()
    module.register_forward_pre_hook(_a_hook)
    module.register_load_state_dict_pre_hook(_another_hook)
    hooks = module._forward_pre_hooks, module._load_state_dict_pre_hooks
    had = [len(registered) for registered in hooks]
    drop_hooks(module, _a_hook, _another_hook)
    return had == [1, 1] and not any(hooks)


def _compiler_is_kept_off() -> bool:
    return bool(not_compiled(lambda number: number + 1)(1) == 2)


def _optimizers_have_load_hooks() -> bool:
    import torch

    parameter, other = map(torch.nn.Parameter, _plain())
    optimizer = torch.optim.SGD([parameter, other])
    optimizer.register_load_state_dict_pre_hook(_a_hook)
    optimizer.register_load_state_dict_post_hook(_another_hook)
    return load_hooks(optimizer) == ([_a_hook], [_another_hook])


KNOWN = KnownFacts(
    "torch",
    TORCH_TESTED,
    {
        "Tensor._version grows with each write in place": _writes_are_counted,
        "Tensor._use_count() counts autograd graphs": _graphs_are_counted,
        "UntypedStorage._cdata tells storages apart": _storages_are_told_apart,
        "Tensor.data can be replaced by detach() and assignment": _writes_through_data_are_counted,
        "a Parameter's hooks stay when their dictionaries move": _hooks_are_carried,
        "a Module keeps _parameters, _buffers and _modules": _modules_keep_dictionaries,
        "a Module's pre-hooks are values of dictionaries": _hooks_are_dropped,
        "torch._disable_dynamo() returns a function that calls another": _compiler_is_kept_off,
        "an Optimizer keeps its load_state_dict hooks": _optimizers_have_load_hooks,
    },
)


@functools.cache
def require_known() -> None:
    """Raises `UsageError` if the installed torch contradicts `KNOWN` of this file, torch_dispatch
    or torch_storages. After a success later calls check nothing; the check takes milliseconds."""
    from modicum.upstream import torch_dispatch, torch_storages

    KNOWN.require()
    torch_dispatch.KNOWN.require()
    torch_storages.KNOWN.require()
