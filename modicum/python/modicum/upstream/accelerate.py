"""What is known of accelerate, transformers and PEFT, and how parts of them are replaced for a
while.

Every name of theirs that `modicum.torch.accelerate` goes by is in this file, and looked for before
anything is built.
"""

import dataclasses
import functools
import inspect
import json
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from importlib import import_module
from importlib.metadata import version
from operator import attrgetter
from pathlib import Path
from typing import Any

import torch
from torch import nn

from modicum.errors import refusal

__all__ = [
    "check_built_empty",
    "nothing_loaded",
    "probe",
    "replace",
    "require_fsdp2",
    "source_of",
    "with_real_adapters",
]

# ---- what is known

# By module and member: the parameters it begins with, and the names that its code uses.
_CALLED: dict[tuple[str, str], tuple[tuple[str, ...], set[str]]] = {
    ("accelerate.accelerator", "Accelerator.prepare"): (
        ("self",),
        {"_prepare_fsdp2", "_prepare_tp", "is_fsdp2"},
    ),
    ("accelerate.accelerator", "Accelerator._prepare_fsdp2"): (
        ("self",),
        {"fsdp2_prepare_model", "fsdp2_switch_optimizer_parameters", "param_groups"},
    ),
    ("accelerate.accelerator", "fsdp2_prepare_model"): (
        ("accelerator", "model"),
        {"cpu_ram_efficient_loading", "fsdp2_load_full_state_dict", "ignored_modules", "float32"},
    ),
    ("transformers", "PreTrainedModel.from_pretrained"): (
        ("cls", "pretrained_model_name_or_path"),
        {"get_init_context", "_load_pretrained_model", "_finalize_model_loading"},
    ),
    ("transformers", "PreTrainedModel.get_init_context"): (("cls", "dtype"), set()),
    ("transformers", "PreTrainedModel.tie_weights"): (("self", "missing_keys"), set()),
    ("transformers", "PreTrainedModel._load_pretrained_model"): (
        ("model", "state_dict", "checkpoint_files", "load_config", "expected_keys"),
        {"convert_and_load_state_dict_in_model"},
    ),
    ("transformers", "PreTrainedModel._finalize_model_loading"): (
        ("model", "load_config", "loading_info"),
        {"_move_missing_keys_from_meta_to_device", "_initialize_missing_keys", "tie_weights"},
    ),
    ("transformers.conversion_mapping", "get_model_conversion_mapping"): (
        ("model", "key_mapping", "hf_quantizer"),
        set(),
    ),
}

_INFO = {
    "missing_keys": set,
    "unexpected_keys": set,
    "mismatched_keys": set,
    "error_msgs": list,
    "conversion_errors": dict,
    "skipped_pp_keys": set,
}

# By module and dataclass.
_FIELDS: dict[tuple[str, str], set[str]] = {
    ("accelerate", "FullyShardedDataParallelPlugin"): {
        "cpu_ram_efficient_loading",
        "fsdp_version",
        "ignored_modules",
    },
    ("transformers.utils.loading_report", "LoadStateDictInfo"): set(_INFO),
    ("transformers.modeling_utils", "LoadStateDictConfig"): {
        "device_map",
        "device_mesh",
        "hf_quantizer",
        "ignore_mismatched_sizes",
        "weight_mapping",
    },
}


def probe() -> str:
    """What the installed accelerate or transformers lacks of what is known, in one line; empty
    where it lacks nothing."""
    try:
        for (module, path), (parameters, uses) in _CALLED.items():
            code = _code(_member(module, path))
            first = code.co_varnames[: code.co_argcount][: len(parameters)]
            if first != parameters:
                got = ", ".join(first)
                return f"{_package(module)}: {path}({got}) instead of ({', '.join(parameters)})"
            if lacks := sorted(uses - set(code.co_names)):
                return f"{_package(module)}: {path} knows no {lacks[0]}"
        for (module, path), fields in _FIELDS.items():
            known = {field.name for field in dataclasses.fields(_member(module, path))}
            if lacks := sorted(fields - known):
                return f"{_package(module)}: {path} has no field {lacks[0]}"
        if unknown := _fields_of_info() - set(_INFO):
            return f"{_package('transformers')}: LoadStateDictInfo has a field {min(unknown)}"
        _member("accelerate.state", "AcceleratorState.is_fsdp2")
    except (ImportError, AttributeError, TypeError) as error:
        return str(error)
    return ""


def _fields_of_info() -> set[str]:
    info = _member("transformers.utils.loading_report", "LoadStateDictInfo")
    return {field.name for field in dataclasses.fields(info)}


def _package(module: str) -> str:
    name = module.partition(".")[0]
    return f"{name} {version(name)}"


def _member(module: str, path: str) -> Any:
    try:
        return attrgetter(path)(import_module(module))
    except AttributeError:
        raise AttributeError(f"{_package(module)} has no {module}.{path}") from None


def _code(member: Any) -> Any:
    return inspect.unwrap(getattr(member, "__func__", member)).__code__


# ---- replacing

_ABSENT = object()


def replace(stack: ExitStack, owner: Any, name: str, value: Any) -> None:
    """Until `stack` ends, `owner` has `value` under this name."""
    before = vars(owner).get(name, _ABSENT)
    setattr(owner, name, value)
    stack.callback(_put_back, owner, name, before)


def _put_back(owner: Any, name: str, before: Any) -> None:
    if before is _ABSENT:
        delattr(owner, name)
    else:
        setattr(owner, name, before)


# ---- accelerate


def require_fsdp2(state: Any) -> None:
    """Refuses whatever is not FSDP2: nothing else would get values into an empty model."""
    if state.is_fsdp2:
        return
    kind = getattr(state.distributed_type, "value", str(state.distributed_type))
    if kind == "FSDP":
        kind = f"FSDP with fsdp_version={state.fsdp_plugin.fsdp_version}"
    what = "loading() goes with FSDP2 only, and this is not what accelerate runs here"
    if kind == "MULTI_CPU":
        what += " (on CPUs it takes DDP, whatever the plugin says)"
    expected = "FullyShardedDataParallelPlugin(fsdp_version=2)"
    raise refusal("UNSUPPORTED", what, expected=expected, got=f"distributed_type {kind}")


# ---- transformers


def nothing_loaded() -> Any:
    """What transformers says of a load that found nothing amiss."""
    info = _member("transformers.utils.loading_report", "LoadStateDictInfo")
    return info(**{name: make() for name, make in _INFO.items()})


def check_built_empty(model: Any, state_dict: Any, config: Any, expected_keys: Any) -> None:
    """Refuses arguments of `from_pretrained` that a load by Modicum would leave out."""
    if expected_keys is not None:
        what = "a directory of adapters: build the base, and put PeftModel.from_pretrained round it"
        raise refusal("UNSUPPORTED", what)
    quantizer = config.hf_quantizer
    kept = quantizer is not None and not getattr(quantizer.quantization_config, "dequantize", False)
    devices = {str(device) for device in (config.device_map or {}).values()}
    given = {
        "state_dict": state_dict is not None,
        "ignore_mismatched_sizes": config.ignore_mismatched_sizes,
        "distributed_config, tp_plan or tp_size": config.device_mesh is not None,
        "device_map": bool(devices - {"cpu"}),
        "quantization_config": kept,
        "key_mapping": _has_key_mapping(model, config),
    }
    for name, is_given in given.items():
        if is_given:
            what = "from_pretrained within loading() can't take this argument"
            raise refusal("UNSUPPORTED", what, got=name)


def _has_key_mapping(model: Any, config: Any) -> bool:
    ask = _member("transformers.conversion_mapping", "get_model_conversion_mapping")
    own = ask(model, None, config.hf_quantizer) or ()
    return len(config.weight_mapping or ()) > len(own)


def source_of(files: Sequence[str] | None) -> Path:
    """What `modicum.torch.load` reads where transformers would read these files."""
    paths = [Path(file) for file in files or ()]
    odd = next((path.name for path in paths if path.suffix != ".safetensors"), None)
    if odd or not paths:
        raise refusal("UNSUPPORTED", "no safetensors file to load from", got=odd or "")
    folder, names = paths[0].parent, {path.name for path in paths}
    index = folder / "model.safetensors.index.json"
    if index.exists():
        stored = set(json.loads(index.read_text())["weight_map"].values())
    else:
        stored = {"model.safetensors"}
    if names == stored and all(path.parent == folder for path in paths):
        return folder
    if len(paths) > 1:
        what = "from_pretrained takes other files than those of the index"
        raise refusal("UNSUPPORTED", what, expected=min(stored), got=min(names - stored))
    return paths[0]


# ---- PEFT


def with_real_adapters(stack: ExitStack) -> bool:
    """Until `stack` ends, PEFT leaves adapters of an empty layer their values, which otherwise go
    to meta as the layer's. Whether PEFT is there: what nobody has imported is not imported here."""
    tuners = sys.modules.get("peft.tuners.tuners_utils")
    if tuners is None:
        return False
    try:
        layer, tuner = tuners.BaseTunerLayer, tuners.BaseTuner
        device_and_dtype = layer._get_base_layer_device_and_dtype
        inject = tuner.inject_adapter
    except AttributeError as error:
        raise refusal("UNSUPPORTED", f"{_package('peft')} is not known: {error}") from None

    @functools.wraps(device_and_dtype)
    def _get_base_layer_device_and_dtype(self: Any, base_layer: Any) -> Any:
        device, dtype = device_and_dtype(self, base_layer)
        return (torch.device("cpu") if _is_meta(device) else device), dtype

    @functools.wraps(inject)
    def inject_adapter(self: Any, *args: Any, **kwargs: Any) -> Any:
        with ExitStack() as meanwhile:
            replace(meanwhile, nn.Module, "to", _never_to_meta(nn.Module.to))
            return inject(self, *args, **kwargs)

    replace(stack, layer, "_get_base_layer_device_and_dtype", _get_base_layer_device_and_dtype)
    replace(stack, tuner, "inject_adapter", inject_adapter)
    return True


def _is_meta(device: Any) -> bool:
    return isinstance(device, torch.device) and device.type == "meta"


def _never_to_meta(move: Any) -> Any:
    @functools.wraps(move)
    def to(self: nn.Module, *args: Any, **kwargs: Any) -> nn.Module:
        args = tuple(value for value in args if not _is_meta(value))
        kwargs = {name: value for name, value in kwargs.items() if not _is_meta(value)}
        return move(self, *args, **kwargs) if args or kwargs else self

    return to
