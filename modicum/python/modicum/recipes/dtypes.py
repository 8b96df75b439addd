"""Names of dtypes, and the dtype in which each target of a recipe is loaded. Without torch."""

import re
from collections.abc import Iterable
from typing import Any

from modicum.errors import refusal
from modicum.recipes.nodes import Array, Node
from modicum.recipes.patterns import Patterns
from modicum.recipes.structure import Structure
from modicum.recipes.translation import DescribedTensors
from modicum.upstream.transformers import dtype_plan, is_pretrained

FLOATS = frozenset({"float32", "bfloat16", "float16"})
# The dtypes to which a recipe may cast, by stored dtype. FP8 codes are multiplied by their scales.
_CASTS = dict.fromkeys((*FLOATS, "float8_e4m3fn", "float8_e5m2"), FLOATS)
_SAFETENSORS_DTYPES = {
    "F64": "float64",
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "F8_E8M0": "float8_e8m0fnu",
    "I64": "int64",
    "I32": "int32",
    "I16": "int16",
    "I8": "int8",
    "U8": "uint8",
    "BOOL": "bool",
}


def dtype_name(dtype: Any) -> str:
    """torch's name of a dtype, without "torch.". `dtype`: a torch.dtype, or the name in
    safetensors."""
    name = str(dtype).removeprefix("torch.")
    return _SAFETENSORS_DTYPES.get(name, name)


def require_exact(asked: str | None, parameters: Iterable[tuple[str, str]]) -> None:
    """Raises `UsageError` if the dtype `asked` of a save rounds one of the parameters, each as
    (name, dtype), of an optimizer whose state is saved: a resume would go on from the rounded
    values."""
    for name, dtype in parameters:
        if asked not in (None, dtype, "float32") and dtype in FLOATS:
            what = "dtype rounds a parameter from which the saved optimizer would go on: leave out "
            what += "dtype, and convert the checkpoint with `modicum convert`"
            raise refusal("UNSUPPORTED", what, tensor=name, expected=dtype, got=asked or "")


def any_of(patterns: Iterable[str]) -> re.Pattern[str] | None:
    """An expression that matches if one of `patterns` does; None without patterns. For the lists in
    transformers' models, which are in Python's syntax; users' expressions are in RE2's, see
    `Patterns`."""
    body = "|".join(f"(?:{pattern})" for pattern in patterns)
    return re.compile(body) if body else None


def described(structure: Structure) -> DescribedTensors:
    """(dtype, shape) of each member, by name."""
    return {
        name: (dtype_name(member.tensor.dtype), tuple(member.tensor.shape))
        for name, member in structure.members.items()
    }


class Dtypes:
    """The dtypes in which targets are loaded."""

    def __init__(
        self,
        structure: Structure,
        targets: DescribedTensors,
        dtype: str | None,
        keep_fp32: str | None,
    ) -> None:
        self._targets = targets
        self._wanted = dtype
        self._keep = None
        if keep_fp32 is not None:
            self._keep = Patterns("keep_fp32", [keep_fp32])
            floats = (name for name, (target_dtype, _) in targets.items() if target_dtype in FLOATS)
            self._keep.require_match(floats, "floating-point targets")
        # By target: the dtype with which its part was built, known from the part's first
        # floating-point parameter.
        self._part_dtypes: dict[str, str] = {}
        self._float32: set[str] = set()  # targets that the model's class keeps in float32
        if dtype is None:
            return
        for part in structure.parts:
            # The last part has no module; its tensors count as built with the first part's dtype.
            module = structure.parts[0].module if part.module is None else part.module
            floats = (p.dtype for p in module.parameters() if p.is_floating_point())
            self._part_dtypes |= dict.fromkeys(part.keys, dtype_name(next(floats, None)))
            if is_pretrained(part.module):
                import torch

                listed = dtype_plan(part.module, getattr(torch, dtype))
                kept = any_of(pattern.replace("*", ".*") for pattern in listed)
                self._float32 |= {n for n, key in part.keys.items() if kept and kept.search(key)}

    def of(self, target: str, first: str) -> str:
        """The dtype of `target`. `first`: the first target of the conversion that makes `target`.
        If a dtype is wanted, all targets of a conversion get the dtype of its first one, except
        those that match `keep_fp32`."""
        dtype = self._targets[target][0]
        if self._keep is not None and dtype in FLOATS and self._keep.finds(target):
            return "float32"
        if self._wanted is None:
            return dtype
        dtype = self._targets[first][0]
        if first in self._float32 and dtype in FLOATS:
            return "float32"
        return self._wanted if dtype == self._part_dtypes.get(first) else dtype


def cast(target: str, array: Array, dtype: str) -> Node:
    """The node of a target, with a cast to `dtype` where its dtype is another."""
    if dtype == array.dtype:
        return array.node
    if dtype not in _CASTS.get(array.dtype, ()):
        raise refusal(
            "UNSUPPORTED",
            "a recipe can't cast between these dtypes",
            tensor=target,
            expected=dtype,
            got=array.dtype,
        )
    return {**array.node, "dtype": dtype}
