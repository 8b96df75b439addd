"""Builds models whose parameters are on meta, while their buffers have values.

Constructors and initialisers run unchanged. Only allocation differs: a parameter moves to meta when
its module registers it; until then a large one has mapped pages that were never touched, which the
kernel does not commit. All memory starts as zeros, so no tensor is garbage. A tensor of
`torch.empty` that was never written is remembered; if it becomes a non-persistent buffer, which no
checkpoint has, it is refused.
"""

import contextlib
import functools
import gc
import mmap
import re
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.modules import module as nn_module
from torch.nn.parameter import is_lazy
from torch.overrides import TorchFunctionMode
from torch.utils import swap_tensors

from modicum.errors import refusal
from modicum.recipes.structure import TOKENS_BEFORE
from modicum.upstream.torch_core import (
    buffers_of,
    carry_grad_dtype,
    children_of,
    is_persistent,
    parameters_of,
    require_known,
    storage_id,
)
from modicum.upstream.torch_dispatch import (
    TO_COPY,
    TorchDispatchMode,
    arguments_of,
    is_dispatching,
    is_mutable,
    tree_map_only,
)
from modicum.upstream.transformers import (
    dtype_plan,
    forget_initialised,
    has_dtype_plan,
    keep_initialised,
)

_aten = torch.ops.aten
_META, _CPU = torch.device("meta"), torch.device("cpu")

# Tensors of at least this size are mapped instead of cleared, and get no random numbers.
_LARGE_BYTES = 1 << 20

_EMPTY = {_aten.empty, _aten.empty_like, _aten.empty_permuted, _aten.empty_strided}
_EMPTY |= {_aten.new_empty, _aten.new_empty_strided}
_ZEROS = frozenset({_aten.zeros, _aten.zeros_like, _aten.new_zeros})
_COPIES = frozenset({_aten.clone, _aten.copy_, TO_COPY})
_FROM_DATA = frozenset({torch.tensor, torch.as_tensor, torch.asarray, torch.Tensor.new_tensor})


def _zeros(like: torch.Tensor, device: torch.device = _CPU) -> torch.Tensor:
    """Zeros with dtype, shape and strides of `like`; large ones are committed when written."""
    nbytes = like.untyped_storage().nbytes()
    if device.type != "cpu" or nbytes < _LARGE_BYTES:
        zeros = torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device=device)
        return zeros.zero_()
    pages = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    storage = torch.frombuffer(pages, dtype=torch.uint8).untyped_storage()
    return torch.empty(0, dtype=like.dtype, device=_CPU).set_(storage, 0, like.shape, like.stride())


# ---- tensors


@functools.cache
def _is_factory(func: Any) -> bool:
    names = {argument.name for argument in arguments_of(func)}
    return {"dtype", "layout", "device"} <= names and func.overloadpacket not in _COPIES


@functools.cache
def _is_random(func: Any) -> bool:
    return torch.Tag.nondeterministic_seeded in func.tags


def _draws(func: Any, kwargs: dict[str, Any]) -> bool:
    """Whether `func` draws from the global generator, whose state may differ between ranks."""
    return _is_random(func) and kwargs.get("generator") is None


@functools.cache
def _written(func: Any) -> tuple[tuple[int, str], ...]:
    """(position, name) of the arguments to which `func` writes elements."""
    if torch.Tag.inplace_view in func.tags:
        return ()
    infos = ((i, a.name, a.alias_info) for i, a in enumerate(arguments_of(func)))
    return tuple((i, name) for i, name, info in infos if info is not None and info.is_write)


def _tensors(*arguments: Any) -> Iterator[torch.Tensor]:
    for argument in arguments:
        if isinstance(argument, torch.Tensor):
            yield argument
        elif isinstance(argument, (tuple, list)):
            yield from _tensors(*argument)


class _Memory(TorchDispatchMode):
    """Decides where the memory of each new tensor comes from; tracks which tensors have no values
    yet."""

    def __init__(self) -> None:
        super().__init__()
        # By id of the storage, which is unique as long as the weak reference exists: the storages
        # that have no values, and functions that make tensors on meta again, on the CPU.
        self._uncomputed: dict[int, StorageWeakRef] = {}
        self._makers: dict[int, tuple[StorageWeakRef, Callable[[], torch.Tensor]]] = {}
        self._may_use_meta = False

    def is_uncomputed(self, tensor: torch.Tensor) -> bool:
        """Whether nothing has computed the tensor's values: it is on meta, or `torch.empty` has
        made it and nothing has written to it."""
        known = tensor.is_meta or storage_id(tensor) in self._uncomputed
        return known and tensor.numel() > 0

    def _note(self, tensor: torch.Tensor, *, computed: bool) -> None:
        """Notes that the tensor's memory now has values, or that it has none."""
        key = storage_id(tensor)
        self._makers.pop(key, None)
        if computed or tensor.is_meta:
            self._uncomputed.pop(key, None)
        else:
            self._uncomputed[key] = StorageWeakRef(tensor.untyped_storage())

    def real(self, buffer: torch.Tensor) -> torch.Tensor:
        """A buffer on the CPU in place of one on meta, with its values if its maker is known."""
        _, maker = self._makers.get(storage_id(buffer), (None, None))
        if maker is not None:
            tensor = maker()
            if tensor.shape == buffer.shape and tensor.stride() == buffer.stride():
                return tensor
        zeros = _zeros(buffer)
        self._note(zeros, computed=False)
        return zeros

    def move_to_meta(self, parameter: torch.Tensor, dtype: torch.dtype | None = None) -> None:
        """Moves a parameter to meta. It stays the same object, so ties and references are kept."""
        self._may_use_meta = True
        try:
            there = nn.Parameter(
                torch.empty_like(parameter, device=_META, dtype=dtype),
                requires_grad=parameter.requires_grad,
            )
            there.__class__ = type(parameter)  # type: ignore[assignment]
            vars(there).update(vars(parameter))
            carry_grad_dtype(parameter, there)
            swap_tensors(parameter, there)
        finally:
            self._may_use_meta = False

    def on_meta(self, buffer: torch.Tensor) -> torch.Tensor:
        """A tensor like `buffer` without memory."""
        self._may_use_meta = True
        try:
            return torch.empty_like(buffer, device=_META)
        finally:
            self._may_use_meta = False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        # A subclass of Tensor dispatches itself.
        if self._may_use_meta or any(cls is not torch.Tensor for cls in types):
            return func(*args, **kwargs)
        packet = func.overloadpacket
        if _is_factory(func) and kwargs.get("layout") in (None, torch.strided):
            return self._make(func, args, kwargs)
        if packet is _aten.resize_ and not args[0].is_meta:
            return self._resize(func, args, kwargs)
        if packet is TO_COPY and kwargs.get("device") == _META:
            kwargs = {**kwargs, "device": args[0].device}
        return self._compute(func, args, kwargs)

    def _make(self, func: Any, args: Any, kwargs: dict[str, Any]) -> torch.Tensor:
        """Makes the tensor of a factory on a real device, even if the default device or the
        argument `device` is meta. Only three kinds of tensors are made on meta: large random
        tensors, tensors that exceed memory, and tensors made like a tensor on meta."""
        device = kwargs.get("device")
        if device is None:
            device = args[0].device if args and isinstance(args[0], torch.Tensor) else _CPU
            if device.type == "meta":
                return self._make_like_meta(func, args, kwargs)
        if device.type == "meta":
            device = _CPU
        kwargs = {**kwargs, "device": device}
        packet, draws = func.overloadpacket, _draws(func, kwargs)
        if packet not in _EMPTY and packet not in _ZEROS and not draws:
            return func(*args, **kwargs)
        like = func(*args, **{**kwargs, "device": _META, "pin_memory": False})
        if draws:
            is_large = like.untyped_storage().nbytes() >= _LARGE_BYTES
            return like if is_large else func(*args, **kwargs)
        try:
            zeros = _zeros(like, device)
        except OSError:
            return like
        self._note(zeros, computed=packet in _ZEROS)
        return zeros

    def _make_like_meta(self, func: Any, args: Any, kwargs: dict[str, Any]) -> torch.Tensor:
        """Makes a tensor like one on meta: on meta, since the two will be combined. Keeps a
        function that makes it on the CPU, in case it becomes a buffer."""
        tensor = func(*args, **kwargs)
        if func.overloadpacket not in _EMPTY and not _draws(func, kwargs):
            maker = functools.partial(func, *args, **{**kwargs, "device": _CPU})
            self._makers[storage_id(tensor)] = StorageWeakRef(tensor.untyped_storage()), maker
        return tensor

    def _resize(self, func: Any, args: Any, kwargs: dict[str, Any]) -> torch.Tensor:
        storage = args[0].untyped_storage()
        old_bytes = storage.nbytes()
        tensor = func(*args, **kwargs)
        if storage.nbytes() > old_bytes:
            whole = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage)
            whole[old_bytes:].zero_()
            self._note(tensor, computed=False)
        return tensor

    def _compute(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Runs any other operator. Its result is on meta if an input is; a copy counts as computed
        if its source does."""
        places = _written(func)
        written = [*_tensors([args[i] if i < len(args) else kwargs[n] for i, n in places])]
        tensors = [*_tensors(args, *kwargs.values())]
        computed = not any(tensor.is_meta for tensor in tensors)
        if not computed and not is_mutable(func):
            args, kwargs = tree_map_only(torch.Tensor, lambda t: t.to(_META), (args, kwargs))
        is_copy = func.overloadpacket in _COPIES
        if is_copy and self.is_uncomputed(tensors[-1]):  # the source: copy_ has it second
            computed = False
        if written and written[0].is_meta and _is_random(func):
            result = written[0]  # the kernel for meta would take a millisecond
        else:
            result = func(*args, **kwargs)
        for tensor in [result] if is_copy else written:
            self._note(tensor, computed=computed)
        return result


class _Data(TorchFunctionMode):
    """Keeps tensors of Python numbers on a real device: `_Memory` sees no factory call for them."""

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _FROM_DATA and not (args and isinstance(args[-1], torch.Tensor)):
            is_method = func is torch.Tensor.new_tensor
            device = kwargs.get("device") or (args[0].device if is_method else None)
            if torch.device(device or torch.get_default_device()).type == "meta":
                kwargs = {**kwargs, "device": _CPU}
        return func(*args, **kwargs)


# ---- modules


def _existing() -> dict[int, weakref.ref[Any]]:
    """Weak references to all tensors and modules of the program, by id."""
    objects = gc.get_objects()
    types = {cls for cls in {*map(type, objects)} if issubclass(cls, (torch.Tensor, nn.Module))}
    return {id(each): weakref.ref(each) for each in objects if type(each) in types}


class _Modules:
    """The modules that are built in the context."""

    def __init__(self, memory: _Memory) -> None:
        self._memory = memory
        self._existed = _existing()
        # In the order of construction, so that every rank names the same tensor in an error.
        self._born: weakref.WeakKeyDictionary[nn.Module, None] = weakref.WeakKeyDictionary()

    def forget_existing(self) -> None:
        self._existed.clear()

    def _see(self, module: nn.Module) -> None:
        """Notes a new module. One that already has members existed before the context."""
        if not (parameters_of(module) or buffers_of(module) or children_of(module)):
            self._born[module] = None

    def _is_from_before(self, member: torch.Tensor | nn.Module) -> bool:
        """Whether the tensor or module existed before the context."""
        return member is self._existed.get(id(member), lambda: None)()

    def on_module(self, module: nn.Module, name: str, child: nn.Module | None) -> None:
        self._see(module)

    def on_parameter(self, module: nn.Module, name: str, parameter: torch.Tensor) -> None:
        self._see(module)
        if not (is_lazy(parameter) or parameter.is_meta or self._is_from_before(parameter)):
            self._memory.move_to_meta(parameter)

    def on_buffer(
        self, module: nn.Module, name: str, buffer: torch.Tensor | None
    ) -> torch.Tensor | None:
        self._see(module)
        if buffer is None or is_lazy(buffer) or not buffer.is_meta:
            return None
        return self._memory.real(buffer)

    def finish(self) -> None:
        """Does what `from_pretrained` does after a model's construction, and checks the buffers."""
        children = {id(child) for module in self._born for child in module.children()}
        roots = [module for module in self._born if id(module) not in children]
        for model in [model for root in roots for model in self._pretrained_models(root)]:
            self._refuse_sharded(model)
            self._initialise(model)
            self._keep_dtypes(model)
        for root in roots:
            self._refuse_uncomputed(root)

    def _pretrained_models(self, module: nn.Module) -> Iterator[Any]:
        """The outermost models of transformers, whose methods also handle inner ones."""
        if has_dtype_plan(module):
            if module in self._born:
                yield module
            return
        for child in module.children():
            yield from self._pretrained_models(child)

    @staticmethod
    def _refuse_sharded(model: Any) -> None:
        for name, parameter in model.named_parameters():
            if hasattr(parameter, "device_mesh"):
                what = "this parameter was sharded within empty_parameters(): shard the model "
                what += "after the context"
                raise refusal("UNSUPPORTED", what, tensor=name)

    def _initialise(self, model: Any) -> None:
        """Initialises the model again, as `from_pretrained` does, with torch's default dtype and
        not the model's: the default dtype affects the bits of computed values."""
        for module in model.modules():
            if module in self._born:
                forget_initialised(module)
        with keep_initialised([*self._from_before(model)]):
            model.initialize_weights()

    def _from_before(self, model: Any) -> Iterator[torch.Tensor | nn.Module]:
        """The modules and tensors in a model that existed before the context or are copies."""
        for module in model.modules():
            parameters = [*module.parameters(recurse=False)]
            tensors = [*parameters, *module.buffers(recurse=False)]
            is_copy = any(not is_lazy(each) and not each.is_meta for each in parameters)
            if self._is_from_before(module) or (is_copy and module not in self._born):
                yield from (module, *tensors)
            else:
                yield from (each for each in tensors if self._is_from_before(each))

    def _keep_dtypes(self, model: Any) -> None:
        """Converts the tensors that `from_pretrained` keeps in float32: constructors make them in
        the model's dtype."""
        plan = dtype_plan(model, model.dtype)

        def other_dtype(name: str, tensor: torch.Tensor) -> torch.dtype | None:
            found = (dtype for p, dtype in plan.items() if re.search(p.replace("*", ".*"), name))
            dtype = next(found, tensor.dtype) if tensor.is_floating_point() else tensor.dtype
            return None if dtype == tensor.dtype else dtype

        for name, parameter in model.named_parameters() if plan else ():
            is_new = parameter.is_meta and not self._is_from_before(parameter)
            if is_new and (dtype := other_dtype(name, parameter)):
                self._memory.move_to_meta(parameter, dtype)
        for name, buffer in [*model.named_buffers()] if plan else ():
            path, _, leaf = name.rpartition(".")
            module = model.get_submodule(path)
            if not is_persistent(module, leaf) or self._is_from_before(buffer):
                continue
            if dtype := other_dtype(name, buffer):
                setattr(module, leaf, buffer.to(dtype))

    def _refuse_uncomputed(self, root: nn.Module) -> None:
        for path, module in root.named_modules():
            for leaf, buffer in buffers_of(module).items():
                if buffer is None or is_persistent(module, leaf):
                    continue
                if not self._memory.is_uncomputed(buffer):
                    continue
                if path.endswith(f".{TOKENS_BEFORE}"):  # a load fills it with embedding rows
                    buffers_of(module)[leaf] = self._memory.on_meta(buffer)
                else:
                    what = "neither the constructor nor the initialiser computes this buffer, and "
                    name = f"{path}.{leaf}" if path else leaf
                    raise refusal("UNSUPPORTED", what + "no checkpoint has it", tensor=name)


@contextlib.contextmanager
def empty_parameters() -> Iterator[None]:
    """A context in which models are built with parameters on meta and buffers with values.

        with modicum.torch.empty_parameters():
            model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)

    A model is any `torch.nn.Module`, built in the same way on every rank. Ties, and the
    `requires_grad`, strides and attributes of parameters, are the constructor's. Buffers,
    persistent or not, have the values and dtypes of a normal construction, even in
    `torch.device("meta")`; a persistent buffer from `torch.empty` is zero until it is loaded.

    A transformers model gets the dtypes of `from_pretrained`, including float32 for tensors that
    transformers keeps in float32. On exit transformers' initialiser runs again, as in
    `from_pretrained`, and sets buffers: change buffers only after the context.

    The cost is the memory of the buffers, milliseconds per layer and a pass over the program's
    objects (0.1 s for 350,000): parameters are neither committed nor initialised. A constructor
    that reads a parameter's values fails with torch's own error. Modules and parameters from before
    the context are not changed, not even as parts of the model. A nested context has no effect.
    Only one thread at a time may be in the context.

    Raises:
        UsageError: on exit (UNSUPPORTED, naming the `tensor`): a non-persistent buffer was never
            computed, or a parameter of a transformers model was sharded within the context.
    """
    if is_dispatching(_Memory):
        yield
        return
    require_known()
    memory = _Memory()
    modules = _Modules(memory)
    with contextlib.ExitStack() as stack:
        # A traceback may keep this frame, and torch swaps no tensor that has weak references.
        stack.callback(modules.forget_existing)
        hooks: tuple[tuple[Any, Any], ...] = (
            (nn_module.register_module_module_registration_hook, modules.on_module),
            (nn_module.register_module_parameter_registration_hook, modules.on_parameter),
            (nn_module.register_module_buffer_registration_hook, modules.on_buffer),
        )
        for register, hook in hooks:
            stack.callback(register(hook).remove)
        stack.enter_context(_Data())
        stack.enter_context(memory)
        yield
        modules.finish()
