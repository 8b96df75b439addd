"""Translates transformers' conversion operations to nodes of recipe.json.

An operation is not run: the translation reads its class name, its settings and the shapes of its
inputs. Inputs and outputs are keyed by the patterns of the converter (transformers'
WeightConverter), which passes them along a chain of operations. A value is a list of the stored
tensors that match one pattern, until an operation joins them to one array:

    {"experts.*.up": [up0, up1, ...]}   stored tensors that match the pattern
      MergeModulelist(dim=0)
    {"experts.up": stack(up0, up1, ...)}
"""

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from modicum.errors import refusal
from modicum.recipes.nodes import Array, Shape, cat, cut, reshape, stack, transpose
from modicum.upstream.transformers import IDENTITY

Value: TypeAlias = list[Array] | Array
Values: TypeAlias = dict[str, Value]


@dataclass
class Chain:
    """The converter to which a chain of operations belongs, and what the operations may read."""

    sources: list[str]  # the converter's source patterns
    targets: list[str]  # its target patterns
    first_target: str  # the name in the model for `targets[0]`
    shapes: Mapping[str, Shape]  # shapes of the model's tensors
    config: Any
    # Inputs that an operation consumes without using an element.
    dropped: list[Array] = field(default_factory=list)
    # Scales of FP8 codes: no node names them, since a load reads codes with their scales.
    scales: list[Array] = field(default_factory=list)

    def only_target(self, op: str) -> str:
        """The converter's only target pattern, for an operation that has one output."""
        if len(self.targets) != 1:
            raise _senseless(op, f"has one output, and its chain {len(self.targets)} targets")
        return self.targets[0]

    def shape_of(self, target: str) -> Shape:
        """The model's shape of the target with the pattern `target`."""
        name = self.first_target.replace(self.targets[0], target)
        if name not in self.shapes:
            raise refusal("MISMATCH", "the model lacks a target of a conversion", tensor=name)
        return self.shapes[name]


def _senseless(op: str, why: str) -> Exception:
    """The error about an operation that does not fit its inputs or its converter."""
    return refusal("MISMATCH", f"the conversion operation '{op}' {why}")


def _single(value: Value, op: str) -> Array:
    if isinstance(value, Array):
        return value
    if len(value) != 1:
        raise _senseless(op, f"takes one tensor, got {len(value)}")
    return value[0]


def _only_input(inputs: Values, op: str) -> Array:
    if len(inputs) != 1:
        raise _senseless(op, f"takes one tensor, got {len(inputs)} patterns")
    return _single(next(iter(inputs.values())), op)


def _chunks(array: Array, count: int, dim: int) -> list[Array]:
    """The result of `torch.chunk`: parts of size / count, rounded up. The last may be shorter, and
    there may be fewer than `count`."""
    dim %= len(array.shape)
    size = array.shape[dim]
    step = math.ceil(size / count)
    if step == 0:
        return [array] * count
    return [cut(dim, at, min(at + step, size), array) for at in range(0, size, step)]


def _chunk(op: Any, inputs: Values, chain: Chain) -> Values:
    array = _only_input(inputs, "Chunk")
    targets = chain.targets
    attribute = getattr(op, "num_shards_attribute", None)  # transformers 5.3 has none
    if attribute is not None:
        count = getattr(chain.config.get_text_config(), attribute)
        pattern = chain.only_target("Chunk")
        targets = [pattern.replace("*", str(i)) for i in range(count)]
    return dict(zip(targets, _chunks(array, len(targets), op.dim), strict=False))


def _split(op: Any, inputs: Values, chain: Chain) -> Values:
    array = _only_input(inputs, "Split")
    sizes = [chain.shape_of(target)[op.dim] for target in chain.targets]
    if sum(sizes) != array.shape[op.dim]:
        raise _senseless("Split", f"cuts {array.shape[op.dim]} into {sizes}")
    ends = [sum(sizes[: i + 1]) for i in range(len(sizes))]
    cuts = [cut(op.dim, end - size, end, array) for end, size in zip(ends, sizes, strict=True)]
    return dict(zip(chain.targets, cuts, strict=True))


def _concatenate(op: Any, inputs: Values, chain: Chain) -> Values:
    """Concatenates in the order of the converter's patterns, without patterns that an earlier
    operation has consumed."""
    arrays: list[Array] = []
    for pattern in chain.sources:
        value = inputs.get(pattern, [])
        arrays += [value] if isinstance(value, Array) else value
    if not arrays:
        raise _senseless("Concatenate", "has no input")
    return {chain.only_target("Concatenate"): cat(op.dim, arrays)}


def _interleave(op: Any, inputs: Values, chain: Chain) -> Values:
    array = _single(next(iter(inputs.values())), "Interleave")
    before, size, after = array.shape[: op.dim], array.shape[op.dim], array.shape[op.dim + 1 :]
    return {chain.targets[0]: _regrouped(array, before, size, after, op.inverse)}


def _regrouped(
    array: Array, before: Sequence[int], size: int, after: Sequence[int], inverse: bool
) -> Array:
    """Reorders a dim of `size` elements between the dims `before` and `after`: pairs (a0 b0 a1 b1
    a2 b2) become halves (a0 a1 a2 b0 b1 b2); with `inverse` halves become pairs."""
    pair = [2, size // 2] if inverse else [size // 2, 2]
    apart = reshape([*before, *pair, *after], array)
    return reshape(array.shape, transpose(len(before), len(before) + 1, apart))


def _merge_modulelist(op: Any, inputs: Values, chain: Chain) -> Values:
    result: Values = {}
    for pattern, value in inputs.items():
        target = chain.only_target("MergeModulelist") if len(inputs) == 1 else pattern
        result[target] = value if isinstance(value, Array) else stack(op.dim, value)
    return result


def _split_modulelist(op: Any, inputs: Values, chain: Chain) -> Values:
    result: Values = {}
    for pattern, value in inputs.items():
        array = _single(value, "SplitModulelist")
        name = chain.only_target("SplitModulelist") if len(inputs) == 1 else pattern
        result |= {name.replace("*", str(i)): a for i, a in enumerate(_unbind(array, op.dim))}
    return result


def _unbind(array: Array, dim: int) -> list[Array]:
    dim %= len(array.shape)
    rest = [*array.shape[:dim], *array.shape[dim + 1 :]]
    return [reshape(rest, cut(dim, i, i + 1, array)) for i in range(array.shape[dim])]


def _only_one(inputs: Values, chain: Chain, op: str) -> tuple[str, Array]:
    """(name of the output, the only input). The name is the converter's target pattern if it has
    only one; else its only source pattern, since a later operation makes the several targets."""
    array = _only_input(inputs, op)
    for names in (chain.targets, chain.sources):
        if len(names) == 1:
            return names[0], array
    raise _senseless(op, "is in a chain of several sources and several targets")


def _transpose(op: Any, inputs: Values, chain: Chain) -> Values:
    name, array = _only_one(inputs, chain, "Transpose")
    # Checkpoints have either orientation; the model's shape shows which.
    if op.check_dims and array.shape == chain.shapes[chain.first_target]:
        return {name: array}
    return {name: transpose(op.dim0, op.dim1, array)}


def _conv3d_to_linear(_: Any, inputs: Values, chain: Chain) -> Values:
    name, array = _only_one(inputs, chain, "Conv3dToLinear")
    if len(array.shape) not in (2, 5):
        raise _senseless("Conv3dToLinear", f"takes 5 or 2 dims, got shape {list(array.shape)}")
    return {name: reshape([array.shape[0], math.prod(array.shape[1:])], array)}


def _linear_to_conv3d(op: Any, inputs: Values, chain: Chain) -> Values:
    name, array = _only_one(inputs, chain, "LinearToConv3d")
    return {name: reshape([array.shape[0], op.in_channels, *op.kernel_size], array)}


def _rope_rows(op: Any, array: Array, config: Any) -> Array:
    """Reorders the rows of each head from pairs (real, imaginary) to halves, or back."""
    if len(array.shape) not in (1, 2):
        return array
    if op.subconfig_key is not None:
        config = getattr(config, op.subconfig_key, config)
    heads = getattr(config, "num_attention_heads", 1)
    return _regrouped(array, [heads], array.shape[0] // heads, array.shape[1:], op.inverse)


def _permute_for_rope(op: Any, inputs: Values, chain: Chain) -> Values:
    result: Values = {}
    for pattern, value in inputs.items():
        if len(chain.sources) > 1 and len(chain.targets) > 1:
            raise _senseless(
                "PermuteForRope", "is in a chain of several sources and several targets"
            )
        alone = len(chain.sources) == len(chain.targets) == 1
        names = op.permute_layer_names
        if names is None or any(name in pattern for name in names):
            value = _rope_rows(op, _single(value, "PermuteForRope"), chain.config)
        result[chain.targets[0] if alone else pattern] = value
    return result


def _fuse_and_permute(op: Any, inputs: Values, chain: Chain) -> Values:
    return _concatenate(op.concat_op, _permute_for_rope(op.permute_op, inputs, chain), chain)


def _unfuse_and_permute(op: Any, inputs: Values, chain: Chain) -> Values:
    return _permute_for_rope(op.permute_op, _chunk(op.chunk_op, inputs, chain), chain)


def _listed(inputs: Values, pattern: str, op: str) -> list[Array]:
    value = inputs.get(pattern)
    if not isinstance(value, list):
        raise _senseless(op, f"lacks the tensors of '{pattern}'")
    return value


def _fuse_and_split(op: Any, inputs: Values, chain: Chain) -> Values:
    """Divides each source's experts among the targets in parts of equal size, rounded up; stacks
    each part, and concatenates the sources."""
    fused: dict[str, list[Array]] = {target: [] for target in chain.targets}
    for pattern in chain.sources:
        experts = _listed(inputs, pattern, "ErnieFuseAndSplitTextVisionExperts")
        step = math.ceil(len(experts) / len(chain.targets))
        for i, target in enumerate(chain.targets):
            part = experts[i * step : (i + 1) * step]
            if not part:
                raise _senseless("ErnieFuseAndSplitTextVisionExperts", f"leaves '{target}' empty")
            fused[target].append(stack(op.stack_dim, part))
    return {target: cat(op.concat_dim, parts) for target, parts in fused.items()}


def _split_and_decouple(op: Any, inputs: Values, chain: Chain) -> Values:
    name = "ErnieSplitAndDecoupleTextVisionExperts"
    parts = [
        _chunks(_listed(inputs, pattern, name)[0], len(chain.targets), op.concat_dim)
        for pattern in chain.sources
    ]
    result: Values = {}
    for i, target in enumerate(chain.targets):
        experts = [expert for part in parts for expert in _unbind(part[i], op.stack_dim)]
        result |= {target.replace("*", str(e)): expert for e, expert in enumerate(experts)}
    return result


def _identity(_: Any, inputs: Values, __: Chain) -> Values:
    return inputs


def _aligned(_: Any, inputs: Values, chain: Chain) -> Values:
    """Moves a tensor in memory, as transformers 5.3 does for its kernels: no value changes."""
    array = _only_input(inputs, "Force16BytesAlignment")
    return {(chain.sources if len(chain.targets) > 1 else chain.targets)[0]: array}


def _fp8_dequantize(_: Any, inputs: Values, chain: Chain) -> Values:
    """Removes scales from the chain, and passes codes on: a load reads them with their scales."""
    result: Values = {}
    for pattern, value in inputs.items():
        values = [value] if isinstance(value, Array) else value
        if "activation_scale" in pattern or "weight_scale_inv" in pattern:
            is_of_weights = "weight_scale_inv" in pattern
            (chain.scales if is_of_weights else chain.dropped).extend(values)
            continue
        weight = pattern.removesuffix("$")  # "weight$" is transformers 5.3's pattern of any weight
        # Scales of experts end with "$", too, in transformers 5.12.
        scales = inputs.get(f"{weight}_scale_inv", inputs.get(f"{weight}_scale_inv$"))
        count = 1 if isinstance(scales, Array) else len(scales or [])
        if scales is not None and count != len(values):
            raise _senseless("Fp8Dequantize", f"has {len(values)} weights and {count} scales")
        for array in values:
            if array.dtype.startswith("float8") != (scales is not None):
                got = "without" if scales is None else "with"
                raise refusal("UNSUPPORTED", f"Fp8Dequantize of {array.dtype} {got} a scale")
        result[chain.first_target if weight == "weight" else pattern] = value
    return result


_ROPE = ("subconfig_key", "inverse", "permute_layer_names")
_CONV = ("in_channels", "kernel_size")

OPERATIONS: dict[str, tuple[Callable[[Any, Values, Chain], Values], Collection[str]]] = {
    "Chunk": (_chunk, {"dim", "num_shards_attribute"}),
    "Concatenate": (_concatenate, {"dim", "num_shards_attribute"}),
    "Conv3dToLinear": (_conv3d_to_linear, _CONV),
    "ErnieFuseAndSplitTextVisionExperts": (_fuse_and_split, {"stack_dim", "concat_dim"}),
    "ErnieSplitAndDecoupleTextVisionExperts": (_split_and_decouple, {"stack_dim", "concat_dim"}),
    "Force16BytesAlignment": (_aligned, ()),
    "Fp8Dequantize": (_fp8_dequantize, {"hf_quantizer"}),
    "Interleave": (_interleave, {"dim", "inverse"}),
    "LinearToConv3d": (_linear_to_conv3d, _CONV),
    "MergeModulelist": (_merge_modulelist, {"dim"}),
    "PermuteForRope": (_permute_for_rope, _ROPE),
    "Split": (_split, {"dim"}),
    "SplitModulelist": (_split_modulelist, {"dim"}),
    "Transpose": (_transpose, {"dim0", "dim1", "check_dims"}),
    "VisionFuseAndPermuteForRope": (
        _fuse_and_permute,
        {"dim", "permute_layer_names", "inverse", "concat_op", "permute_op"},
    ),
    "VisionUnfuseAndPermuteForRope": (
        _unfuse_and_permute,
        {"dim", "permute_layer_names", "inverse", "chunk_op", "permute_op"},
    ),
    IDENTITY: (_identity, ()),
}
"""By the name of the class in transformers: the translation of an operation, and its settings. An
operation with another setting is refused."""


def nodes_of(op: Any, inputs: Values, chain: Chain) -> Values:
    """The outputs of one operation. Raises UNSUPPORTED, naming the operation, if it or one of its
    settings is not in `OPERATIONS`."""
    cls = type(op)
    translate, settings = OPERATIONS.get(cls.__name__, (None, ()))
    if translate is None or cls.__module__.partition(".")[0] != "transformers":
        raise refusal(
            "UNSUPPORTED",
            f"the conversion operation '{cls.__module__}.{cls.__name__}' is not known",
            tensor=chain.first_target,
        )
    strange = sorted(vars(op).keys() - settings)
    if strange:
        raise refusal(
            "UNSUPPORTED",
            f"the conversion operation '{cls.__name__}' has an unknown setting '{strange[0]}'",
            tensor=chain.first_target,
        )
    return translate(op, inputs, chain)
