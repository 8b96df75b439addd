"""PEFT: how it wraps the layers of a model in adapters."""

import functools
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn

from modicum.errors import refusal
from modicum.upstream.known import KnownFacts
from modicum.upstream.patching import replace
from modicum.upstream.torch_core import parameters_of

_FROM_BASE = ("pissa", "olora", "corda", "loftq", "mica", "lora_ga")
"""A setting `init_lora_weights` that begins with one of these computes adapters from the base
model's weights."""


def with_real_adapters(stack: ExitStack) -> bool:
    """Until `stack` ends, adapters of layers on meta keep their values, which PEFT would move to
    meta. Returns False, and changes nothing, if the program has not imported PEFT. Raises
    `UsageError` if PEFT differs from the tested versions."""
    if "peft.tuners.tuners_utils" not in sys.modules:
        return False
    KNOWN.require()
    _replace(stack)
    return True


def _replace(stack: ExitStack) -> None:
    tuners, dora = (sys.modules[f"peft.tuners.{name}"] for name in ("tuners_utils", "lora.dora"))
    layer, tuner = tuners.BaseTunerLayer, tuners.BaseTuner
    update = dora.DoraLinearLayer.update_layer
    device_and_dtype = layer._get_base_layer_device_and_dtype
    move, inject = layer._move_adapter_to_device_of_base_layer, tuner.inject_adapter

    @functools.wraps(device_and_dtype)
    def _get_base_layer_device_and_dtype(self: Any, base_layer: Any) -> Any:
        device, dtype = device_and_dtype(self, base_layer)
        return (torch.device("cpu") if _is_meta(device) else device), dtype

    @functools.wraps(move)
    def _move_adapter_to_device_of_base_layer(self: Any, *args: Any, **kwargs: Any) -> None:
        with ExitStack() as meanwhile:
            # The buffers on meta are original rows of the embedding: they stay there.
            if any(buffer.is_meta for buffer in self.buffers()):
                replace(meanwhile, self, "other_param_names", ())
            move(self, *args, **kwargs)

    @functools.wraps(inject)
    def inject_adapter(self: Any, model: Any, adapter_name: str, *args: Any, **kwargs: Any) -> Any:
        put = getattr(self, "_replace_module", None)
        if put is None:  # a tuner that wraps no layer
            return inject(self, model, adapter_name, *args, **kwargs)
        _refuse_from_base(model, self.peft_config[adapter_name])
        before = {id(module) for module in model.modules()}

        def _replace_module(parent: Any, child_name: str, new_module: Any, child: Any) -> Any:
            with _staying(new_module):
                return put(parent, child_name, new_module, child)

        with ExitStack() as meanwhile:
            replace(meanwhile, self, "_replace_module", _replace_module)
            inject(self, model, adapter_name, *args, **kwargs)
        for module in model.modules():
            parameters = [p for p in parameters_of(module).values() if p is not None]
            if id(module) not in before and any(p.is_meta for p in parameters):
                module.register_load_state_dict_pre_hook(_take_values)

    @functools.wraps(update)
    def update_layer(
        self: Any, *, base_layer: Any, lora_A: Any, lora_B: Any, **options: Any
    ) -> None:
        """Puts the magnitude on meta if the weight is: the load computes it from the weight."""
        if base_layer.weight.is_meta:
            lora_A, lora_B = lora_A.to("meta"), lora_B.to("meta")
        update(self, base_layer=base_layer, lora_A=lora_A, lora_B=lora_B, **options)

    replace(stack, dora.DoraLinearLayer, "update_layer", update_layer)
    replace(stack, layer, "_get_base_layer_device_and_dtype", _get_base_layer_device_and_dtype)
    name = "_move_adapter_to_device_of_base_layer"
    replace(stack, layer, name, _move_adapter_to_device_of_base_layer)
    replace(stack, tuner, "inject_adapter", inject_adapter)


def _refuse_from_base(model: nn.Module, config: Any) -> None:
    """Raises `UsageError` if the initialisation needs the base's values, which are on meta."""
    scheme = getattr(config, "init_lora_weights", None)
    if not (isinstance(scheme, str) and scheme.lower().startswith(_FROM_BASE)):
        return
    if any(parameter.is_meta for parameter in model.parameters()):
        what = "this initialisation of adapters needs the base's values, which are loaded later: "
        what += "do it in one process without loading(), save base and adapter, and load both"
        raise refusal("UNSUPPORTED", what, got=f"init_lora_weights={scheme!r}")


def begins_at_zero(config: Any) -> bool:
    """Whether LoRA's B is 0 at first in an adapter with this configuration. It is not with
    init_lora_weights=False, and not with "orthogonal"."""
    scheme = getattr(config, "init_lora_weights", True)
    return scheme is not False and str(scheme).lower() != "orthogonal"


def _take_values(
    module: nn.Module, state_dict: Any, prefix: str, local_metadata: Any, *rest: Any
) -> None:
    """A load_state_dict pre-hook: gives memory to adapters on meta for which the state dict has
    values."""
    if local_metadata.get("assign_to_params_buffers", False):
        return
    parameters = parameters_of(module)
    for name, parameter in parameters.items():
        if parameter is not None and parameter.is_meta and prefix + name in state_dict:
            memory = torch.empty_like(parameter, device="cpu")
            parameters[name] = nn.Parameter(memory, requires_grad=parameter.requires_grad)


def _is_meta(device: Any) -> bool:
    return isinstance(device, torch.device) and device.type == "meta"


@contextmanager
def _staying(module: nn.Module) -> Iterator[None]:
    """A context in which `to` does not move `module` and its submodules to meta."""
    with ExitStack() as stack:
        for submodule in module.modules():
            replace(stack, submodule, "to", _never_to_meta(submodule))
        yield


def _never_to_meta(module: nn.Module) -> Any:
    move = module.to

    def to(*args: Any, **kwargs: Any) -> nn.Module:
        args = tuple(value for value in args if not _is_meta(value))
        kwargs = {name: value for name, value in kwargs.items() if not _is_meta(value)}
        return move(*args, **kwargs) if args or kwargs else module

    return to


# ---- known facts


def _adapters_stay_real() -> bool:
    """Adds an adapter to a model of one layer on meta."""
    import peft

    model = nn.Sequential(nn.Linear(1, 1, device="meta"))
    with ExitStack() as stack, torch.random.fork_rng(devices=[]):
        _replace(stack)
        peft.inject_adapter_in_model(peft.LoraConfig(r=1, target_modules=["0"]), model)
    adapters = [p for name, p in model.named_parameters() if "lora_" in name]
    return len(adapters) == 2 and not any(adapter.is_meta for adapter in adapters)


KNOWN = KnownFacts(
    "peft",
    ("0.21.2",),
    {"adapters move by _get_base_layer_device_and_dtype and _replace_module": _adapters_stay_real},
)
