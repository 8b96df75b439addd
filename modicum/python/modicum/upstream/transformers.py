"""transformers: private names of its models, and how `from_pretrained` builds one.

Only functions import transformers and torch: `is_pretrained` is also called if transformers is not
installed.
"""

import dataclasses
import functools
import json
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import Any, Protocol, get_origin

from modicum import _modicum
from modicum.errors import counted, refusal
from modicum.upstream.known import KnownFacts
from modicum.upstream.patching import replace

_ROWS_OF_THE_MEAN = (
    "_init_added_embeddings_weights_with_mean",
    "_init_added_lm_head_weights_with_mean",
    "_init_added_lm_head_bias_with_mean",
)
_UNSUPPORTED_ARGUMENT = "from_pretrained within loading() does not support this argument"
_INITIALISED = "_is_hf_initialized"
IDENTITY = "_IdentityOp"
"""The class of a conversion that changes nothing."""


def is_pretrained(module: Any) -> bool:
    """Whether a module is a model of transformers. Checks the class, since instances of wrappers
    forward unknown attributes."""
    return hasattr(type(module), "base_model_prefix") and hasattr(type(module), "_init_weights")


def initialise(model: Any, module: Any) -> None:
    """Initialises the parameters of `module`, which is `model` or one of its submodules, by the
    model's own rule."""
    model._init_weights(module)


def embeddings_of(model: Any) -> list[Any]:
    """The modules with a row for each token: the embedding, and the head if there is one. Raises
    `UsageError` (UNSUPPORTED) if the model does not name them."""
    if not hasattr(model, "get_input_embeddings"):
        expected, got = "a model with get_input_embeddings(), as of transformers", type(model)
        raise refusal("UNSUPPORTED", "resized", expected=expected, got=got.__name__)
    found = [model.get_input_embeddings(), model.get_output_embeddings()]
    return [module for module in found if module is not None]


def vocabulary_in(config: Any) -> tuple[str, int, str, str] | None:
    """(key, tokens, model_type, outer model_type) of a model's config: the member of config.json
    with the number of tokens, in the config of the text model. None if the model has none."""
    if not hasattr(config, "get_text_config"):
        return None
    text = config.get_text_config()
    tokens = getattr(text, "vocab_size", None)
    if not isinstance(tokens, int):
        return None
    key = text.attribute_map.get("vocab_size", "vocab_size")
    return key, tokens, text.model_type, config.model_type


def forget_initialised(member: Any) -> None:
    """Removes the mark that transformers sets on initialised modules and tensors, so that
    `initialize_weights` initialises this one again."""
    vars(member).pop(_INITIALISED, None)


@contextmanager
def keep_initialised(members: Sequence[Any]) -> Iterator[None]:
    """Within the block `initialize_weights` leaves these modules and tensors as they are."""
    marked = [member for member in members if not getattr(member, _INITIALISED, False)]
    try:
        for member in marked:
            setattr(member, _INITIALISED, True)
        yield
    finally:
        for member in marked:
            forget_initialised(member)


def has_dtype_plan(module: Any) -> bool:
    """Whether a module is a model of transformers 5, which keeps some of its tensors in float32."""
    return hasattr(module, "_get_dtype_plan") and hasattr(module, "initialize_weights")


def dtype_plan(model: Any, dtype: Any) -> dict[str, Any]:
    """The dtypes of the tensors that do not get the model's `dtype`, by pattern of their names."""
    if has_dtype_plan(model):
        return model._get_dtype_plan(dtype)
    kept = ("_keep_in_fp32_modules", "_keep_in_fp32_modules_strict")
    if any(getattr(model, name, None) for name in kept):
        what = "this transformers does not say which tensors a model keeps in float32: load it "
        what += "without dtype="
        raise refusal("UNSUPPORTED", what, expected="transformers 5", got=type(model).__name__)
    return {}


def may_be_missing(model: Any) -> list[str]:
    """Patterns of names that a checkpoint may lack."""
    return list(getattr(model, "_keys_to_ignore_on_load_missing", None) or ())


def may_be_unexpected(model: Any) -> list[str]:
    """Patterns of names that a checkpoint may have and the model lacks."""
    return list(getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ())


def renames_stored(model: Any) -> bool:
    """Whether a module is a model of transformers 4 that renames stored tensors."""
    return bool(getattr(model, "_checkpoint_conversion_mapping", None))


# ---- from_pretrained


class Builder(Protocol):
    """The callbacks of `replace_loading`, called in place of the parts of transformers that read or
    initialise values."""

    @property
    def is_exempt(self) -> bool:
        """Whether models that are built now are left to transformers."""

    is_building: bool
    """Whether a model is under construction; it may build other models as parts."""

    def contexts(self) -> list[AbstractContextManager[Any]]:
        """The contexts to enter before those in which transformers builds a model."""

    def built(self, model: Any, files: Sequence[str] | None, *arguments: Any) -> None:
        """Called with a model without values and the files to read. `arguments`: the arguments of
        `check_arguments`."""

    def made(self, model: Any) -> None:
        """Called with a model without values that `from_config` has built."""

    def exempted(self, model: Any) -> None:
        """Called with a model that was built without this builder."""

    def resized(self, model: Any, rule: str) -> None:
        """Called when `resize_token_embeddings` has resized a model without values. `rule`: "mean":
        new rows get the mean of the others; "model": the model initialises them."""


def replace_loading(stack: ExitStack, cls: Any, by: Builder) -> None:
    """Until `stack` ends, `from_pretrained` of `cls`, a model class, reads no tensor and calls the
    methods of `by` instead, unless `by.is_exempt`."""
    contexts, from_config = cls.get_init_context.__func__, cls._from_config.__func__
    read, finish = cls._load_pretrained_model, cls._finalize_model_loading

    def get_init_context(cls: Any, *args: Any, **kwargs: Any) -> list[Any]:
        builder_contexts = [] if by.is_exempt else by.contexts()
        return [*builder_contexts, *contexts(cls, *args, **kwargs)]

    def _from_config(cls: Any, /, config: Any, **kwargs: Any) -> Any:
        if by.is_exempt or by.is_building:
            model = from_config(cls, config, **kwargs)
            if not by.is_building:
                by.exempted(model)
            return model
        with ExitStack() as building:
            for context in by.contexts():
                building.enter_context(context)
            model = from_config(cls, config, **kwargs)
        by.made(model)
        return model

    def _load_pretrained_model(
        model: Any, state_dict: Any, checkpoint_files: Any, load_config: Any, **expected: Any
    ) -> tuple[Any, Any]:
        """`expected`: `expected_keys`, if the caller passes them; transformers 5.3 has none."""
        if by.is_exempt:
            loaded = read(model, state_dict, checkpoint_files, load_config, **expected)
            by.exempted(model)
            return loaded
        model.tie_weights(recompute_mapping=False)
        by.built(model, checkpoint_files, load_config, state_dict, expected.get("expected_keys"))
        return _nothing_loaded(), None

    def _finalize_model_loading(model: Any, load_config: Any, loading_info: Any) -> Any:
        """Leaves tensors on meta, and does not report them as missing."""
        return finish(model, load_config, loading_info) if by.is_exempt else loading_info

    _load_pretrained_model.__dict__["builder"] = by
    replace(stack, cls, "get_init_context", classmethod(get_init_context))
    replace(stack, cls, "_load_pretrained_model", staticmethod(_load_pretrained_model))
    replace(stack, cls, "_finalize_model_loading", staticmethod(_finalize_model_loading))
    replace(stack, cls, "_from_config", classmethod(_from_config))
    _replace_resizing(stack, cls, by)


def _replace_resizing(stack: ExitStack, cls: Any, by: Builder) -> None:
    """Replaces `resize_token_embeddings` for tensors on meta, from which new rows can't be computed
    yet."""
    resize = cls.resize_token_embeddings

    @functools.wraps(resize)
    def resize_token_embeddings(
        model: Any,
        new_num_tokens: int | None = None,
        pad_to_multiple_of: int | None = None,
        mean_resizing: bool = True,
    ) -> Any:
        before = [module.weight.shape for module in embeddings_of(model)]
        embedding = resize(model, new_num_tokens, pad_to_multiple_of, mean_resizing)
        is_same = before == [module.weight.shape for module in embeddings_of(model)]
        if embedding.weight.is_meta and not is_same:
            by.resized(model, "mean" if mean_resizing else "model")
        return embedding

    replace(stack, cls, "resize_token_embeddings", resize_token_embeddings)
    for name in _ROWS_OF_THE_MEAN:
        original_method = getattr(cls, name)

        # The default binds this iteration's function.
        @functools.wraps(original_method)
        def fill(model: Any, old: Any, *args: Any, original: Any = original_method) -> Any:
            return None if old.weight.is_meta else original(model, old, *args)

        replace(stack, cls, name, fill)


def builder(cls: Any) -> Any:
    """The builder that `replace_loading` has set for `cls`, or None."""
    return getattr(getattr(cls, "_load_pretrained_model", None), "builder", None)


def _nothing_loaded() -> Any:
    """transformers' report of a load without missing or unexpected tensors. Refuses
    `output_loading_info=True`, with which `from_pretrained` returns the report as a dict: nothing
    is known before the load."""
    from transformers.utils.loading_report import LoadStateDictInfo

    class Info(LoadStateDictInfo):
        def to_dict(self) -> Any:
            raise refusal("UNSUPPORTED", _UNSUPPORTED_ARGUMENT, got="output_loading_info")

    # Each field is an empty collection; transformers 5.23 has one more than 5.3.
    types: dict[str, Any] = {f.name: get_origin(f.type) for f in dataclasses.fields(Info)}
    return Info(**{name: cls() for name, cls in types.items()})


def check_arguments(model: Any, config: Any, state_dict: Any, expected_keys: Any) -> None:
    """Raises `UsageError` for arguments of `from_pretrained` that Modicum's load would ignore."""
    if expected_keys is not None:  # transformers passes them only for adapters
        what = "a directory of adapters: build the base model, then PeftModel.from_pretrained(base)"
        raise refusal("UNSUPPORTED", what)
    quantizer = config.hf_quantizer
    kept = quantizer is not None and not getattr(quantizer.quantization_config, "dequantize", False)
    devices = {str(device) for device in (config.device_map or {}).values()}
    arguments = {
        "state_dict": state_dict is not None,
        "ignore_mismatched_sizes": config.ignore_mismatched_sizes,
        "distributed_config, tp_plan or tp_size": config.device_mesh is not None,
        "device_map": bool(devices - {"cpu"}),
        "quantization_config": kept,
        "key_mapping": _has_key_mapping(model, config),
    }
    for name, is_given in arguments.items():
        if is_given:
            raise refusal("UNSUPPORTED", _UNSUPPORTED_ARGUMENT, got=name)


def _has_key_mapping(model: Any, config: Any) -> bool:
    from transformers.conversion_mapping import get_model_conversion_mapping

    # The mapping in use is the model's own and, with `key_mapping`, further renamings.
    conversions = get_model_conversion_mapping(model, None, config.hf_quantizer) or ()
    return len(config.weight_mapping or ()) > len(conversions)


def source_of(files: Sequence[str] | None) -> Path:
    """The source for `modicum.torch.load` that consists of exactly these files, which transformers
    would read: their folder, or the only file. Raises `UsageError` if there is none."""
    paths = [Path(file) for file in files or ()]
    other = next((path.name for path in paths if path.suffix != ".safetensors"), "")
    if other or not paths:
        raise refusal("UNSUPPORTED", "no safetensors file to load from", got=other)
    folder, names = paths[0].parent, {path.name for path in paths}
    index = folder / "model.safetensors.index.json"
    if index.exists():
        stored = set(
            json.loads(_modicum.read_file(index, too_long="INDEX.JSON"))["weight_map"].values()
        )
    else:
        stored = {"model.safetensors"}
    if names == stored and all(path.parent == folder for path in paths):
        return folder
    if len(paths) > 1 and not names & stored and [*folder.glob("model.safetensors.index.*.json")]:
        what = "from_pretrained within loading() does not support `variant` if it has several files"
        expected = "one file, or files without a variant"
        raise refusal("UNSUPPORTED", what, expected=expected, got=min(names))
    if len(paths) > 1:
        what = "from_pretrained reads other files than the index lists"
        different = min(names ^ stored, default="")
        got = f"a difference in {different}" if different else "files of several folders"
        raise refusal("UNSUPPORTED", what, expected=counted(len(stored), "file"), got=got)
    return paths[0]


# ---- known facts


class _RecordingBuilder:
    """A builder that records its calls."""

    is_exempt = is_building = False

    def __init__(self) -> None:
        self.calls: list[str] = []

    def contexts(self) -> list[AbstractContextManager[Any]]:
        self.calls.append("contexts")
        return []

    def built(self, model: Any, files: Sequence[str] | None, *arguments: Any) -> None:
        config, _, expected_keys = arguments  # without a file from_pretrained needs a state dict
        check_arguments(model, config, None, expected_keys)
        self.calls.append("built")

    def made(self, model: Any) -> None:
        self.calls.append("made")

    def exempted(self, model: Any) -> None:
        pass

    def resized(self, model: Any, rule: str) -> None:
        self.calls.append(rule)


def _builds_without_values() -> bool:
    """Builds a model of one parameter without files, in some milliseconds."""
    import torch
    from transformers import PreTrainedConfig, PreTrainedModel

    class TinyModel(PreTrainedModel):
        config_class = PreTrainedConfig

        def __init__(self, config: Any) -> None:
            super().__init__(config)
            self.weight = torch.nn.Parameter(torch.zeros(1))
            self.post_init()

        def _init_weights(self, module: Any) -> None:
            pass

    by = _RecordingBuilder()
    with ExitStack() as stack:
        replace_loading(stack, TinyModel, by)
        model = TinyModel.from_pretrained(None, config=PreTrainedConfig(), state_dict={})
    return by.calls == ["contexts", "built"] and bool(model.weight.is_meta)


KNOWN = KnownFacts(
    "transformers",
    ("5.3.0", "5.23.0"),
    {
        "from_pretrained leaves reading to _load_pretrained_model, and what follows to "
        "_finalize_model_loading": _builds_without_values
    },
)
