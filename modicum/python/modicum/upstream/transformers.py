"""transformers: private names of its models, and how `from_pretrained` builds one.

Neither transformers nor torch is imported before a function needs it: `is_pretrained` is also
called for models without transformers.
"""

import json
from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from typing import Any, Protocol

from modicum.errors import refusal
from modicum.upstream.known import Known
from modicum.upstream.patching import replace

IDENTITY = "_IdentityOp"
"""The class of a conversion that changes nothing."""


def is_pretrained(module: Any) -> bool:
    """A model of transformers, by its class: wrappers forward attributes that they lack."""
    return hasattr(type(module), "base_model_prefix") and hasattr(type(module), "_init_weights")


def initialise(model: Any, module: Any) -> None:
    """Initialises the parameters of `module`, a part of `model` or the model itself."""
    model._init_weights(module)


def forget_initialised(module: Any) -> None:
    """Lets `initialize_weights` initialise the module again."""
    vars(module).pop("_is_hf_initialized", None)


def has_dtype_plan(module: Any) -> bool:
    """A model of transformers 5, which keeps some of its tensors in float32."""
    return hasattr(module, "_get_dtype_plan") and hasattr(module, "initialize_weights")


def dtype_plan(model: Any, dtype: Any) -> dict[str, Any]:
    """Patterns of names, each with the dtype of such tensors in a model of `dtype`."""
    return model._get_dtype_plan(dtype)


def may_be_missing(model: Any) -> list[str]:
    """Patterns of names that a checkpoint may lack."""
    return list(getattr(model, "_keys_to_ignore_on_load_missing", None) or ())


def may_be_unexpected(model: Any) -> list[str]:
    """Patterns of names that a checkpoint may have beyond the model's."""
    return list(getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ())


def renames_stored(model: Any) -> bool:
    """A model of transformers 4 that renames stored tensors."""
    return bool(getattr(model, "_checkpoint_conversion_mapping", None))


# ---- from_pretrained


class Builder(Protocol):
    """Replaces the part of `from_pretrained` that reads tensors."""

    def contexts(self) -> list[AbstractContextManager[Any]]:
        """The contexts to enter before those in which transformers builds a model."""

    def built(self, model: Any, files: Sequence[str] | None, *given: Any) -> None:
        """Called with a model without values. `given`: the arguments for `check_arguments`."""


def replace_loading(stack: ExitStack, cls: Any, by: Builder) -> None:
    """Until `stack` ends, `from_pretrained` of `cls`, a model class, reads no tensor."""
    contexts = cls.get_init_context.__func__

    def get_init_context(cls: Any, *args: Any, **kwargs: Any) -> list[Any]:
        return [*by.contexts(), *contexts(cls, *args, **kwargs)]

    def _load_pretrained_model(
        model: Any,
        state_dict: Any,
        checkpoint_files: Any,
        load_config: Any,
        expected_keys: Any = None,
    ) -> tuple[Any, None]:
        model.tie_weights(recompute_mapping=False)
        by.built(model, checkpoint_files, load_config, state_dict, expected_keys)
        return _nothing_loaded(), None

    def _finalize_model_loading(model: Any, load_config: Any, loading_info: Any) -> Any:
        """Leaves tensors on meta there; none is missing yet."""
        return loading_info

    _load_pretrained_model.__dict__["builder"] = by
    replace(stack, cls, "get_init_context", classmethod(get_init_context))
    replace(stack, cls, "_load_pretrained_model", staticmethod(_load_pretrained_model))
    replace(stack, cls, "_finalize_model_loading", staticmethod(_finalize_model_loading))


def builder(cls: Any) -> Any:
    """The builder that `replace_loading` has set for `cls`; None outside of it."""
    return getattr(getattr(cls, "_load_pretrained_model", None), "builder", None)


def _nothing_loaded() -> Any:
    """transformers' report of a load without missing or unexpected tensors."""
    from transformers.utils.loading_report import LoadStateDictInfo

    return LoadStateDictInfo(
        missing_keys=set(),
        unexpected_keys=set(),
        mismatched_keys=set(),
        error_msgs=[],
        conversion_errors={},
        skipped_pp_keys=set(),
    )


def check_arguments(model: Any, config: Any, state_dict: Any, expected_keys: Any) -> None:
    """Refuses arguments of `from_pretrained` that a load by Modicum would ignore."""
    if expected_keys is not None:
        what = "a directory of adapters: build the base model, then PeftModel.from_pretrained(base)"
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
            what = "from_pretrained within loading() does not support this argument"
            raise refusal("UNSUPPORTED", what, got=name)


def _has_key_mapping(model: Any, config: Any) -> bool:
    from transformers.conversion_mapping import get_model_conversion_mapping

    own = get_model_conversion_mapping(model, None, config.hf_quantizer) or ()
    return len(config.weight_mapping or ()) > len(own)


def source_of(files: Sequence[str] | None) -> Path:
    """The source for `modicum.torch.load` in place of these files of transformers."""
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
        what = "from_pretrained reads other files than the index lists"
        raise refusal("UNSUPPORTED", what, expected=min(stored), got=min(names - stored))
    return paths[0]


# ---- known facts


class _Noting:
    """A builder that records its calls."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def contexts(self) -> list[AbstractContextManager[Any]]:
        self.calls.append("contexts")
        return []

    def built(self, model: Any, files: Sequence[str] | None, *given: Any) -> None:
        config, _, expected_keys = given  # without a file from_pretrained needs a state dict
        check_arguments(model, config, None, expected_keys)
        self.calls.append("built")


def _builds_without_values() -> bool:
    """Checked on a model of one parameter without files, in some milliseconds."""
    import torch
    from transformers import PreTrainedConfig, PreTrainedModel

    class Tiny(PreTrainedModel):
        config_class = PreTrainedConfig

        def __init__(self, config: Any) -> None:
            super().__init__(config)
            self.weight = torch.nn.Parameter(torch.zeros(1))
            self.post_init()

        def _init_weights(self, module: Any) -> None:
            pass

    by = _Noting()
    with ExitStack() as stack:
        replace_loading(stack, Tiny, by)
        model = Tiny.from_pretrained(None, config=PreTrainedConfig(), state_dict={})
    return by.calls == ["contexts", "built"] and bool(model.weight.is_meta)


KNOWN = Known(
    "transformers",
    ("5.23.0",),
    {
        "from_pretrained leaves reading to _load_pretrained_model, and what follows to "
        "_finalize_model_loading": _builds_without_values
    },
)
