"""The records of version 1 as commit fc075f6b (Modicum 0.1.0) reads them, written from its code. It
answers for a checkpoint of any later commit what that program would answer, so that a test sees a
change that old programs take for damage. Digests of 128 bits are not computed."""

import json
import re
from math import prod
from pathlib import Path
from typing import Any

CHUNK_BYTES = 4 << 20
BITS = {
    "BOOL": 8, "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6, "U8": 8, "I8": 8, "F8_E5M2": 8, "F8_E4M3": 8,
    "F8_E8M0": 8, "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8, "I16": 16, "U16": 16, "F16": 16, "BF16": 16,
    "I32": 32, "U32": 32, "F32": 32, "C64": 64, "F64": 64, "I64": 64, "U64": 64,
}  # fmt: skip
FORMATS = ("fp32", "fp32-split", "bf16-moments", "int8-moments", "int8-moments-24")
NAME = re.compile(r"((optimizer|extra)/)?[^./\0][^/\0]*")
HEX_16, HEX_32 = re.compile("[0-9a-f]{16}"), re.compile("[0-9a-f]{32}")

Types = dict[str, Any]
"""For each key that is read: a type, a pattern of a string, or a list with the type of an array's
items, which are objects if it is a dict. Other keys are ignored. The objects in arrays have all
keys."""

COMMIT: Types = {"step": int, "uuid": str, "manifest_bytes": int, "manifest_digest": str}
FILE: Types = {"name": NAME, "bytes": int, "digested_bytes": int, "digest": HEX_32}
TENSOR: Types = {"name": str, "dtype": str, "shape": [int], "chunks": [HEX_16]}
MANIFEST: Types = {
    "version": int, "step": int, "uuid": str, "world_size": int, "tool": str, "files": [FILE],
    "tensors": [TENSOR], "state": [TENSOR],
}  # fmt: skip
STATE: Types = {
    "optimizer": str, "state_format": str, "codes": str, "seed": re.compile("[0-9]+"),
    "steps": int, "digest": HEX_16, "without_state": [str],
}  # fmt: skip
GROUPS: Types = {"optimizer": str, "groups": [{"params": [str]}]}
JOURNAL: Types = {
    "host": str, "pid": int, "started": int, "inputs": str,
    "files": [{"name": str, "bytes": int, "digest": HEX_16, "chunks": [HEX_16]}],
}  # fmt: skip


def fits(value: Any, kind: Any) -> bool:
    """Whether a JSON value has the type."""
    if isinstance(kind, dict):
        is_object = isinstance(value, dict)
        return is_object and all(fits(value[key], of) for key, of in kind.items() if key in value)
    if isinstance(kind, list):
        (item,) = kind
        is_list = isinstance(value, list) and all(fits(of, item) for of in value)
        return is_list and not (isinstance(item, dict) and any(item.keys() - of for of in value))
    if isinstance(kind, re.Pattern):
        return isinstance(value, str) and kind.fullmatch(value) is not None
    return type(value) is kind


def answer_of(step: Path) -> str:
    """The answer of fc075f6b to a checkpoint whose files are intact: "read", or the error's
    category, "UNSUPPORTED" or "INTEGRITY"."""
    commit = json.loads((step / "COMMIT").read_text())
    text = (step / "manifest.json").read_text()
    manifest = json.loads(text)
    if not fits(commit, COMMIT) or commit["manifest_bytes"] != len(text.encode()):
        return "INTEGRITY"
    if not HEX_32.fullmatch(commit["manifest_digest"]):
        return "INTEGRITY"
    if not fits(manifest, MANIFEST) or not all(map(has_dtype, tensors_of(manifest))):
        return "INTEGRITY"
    if manifest["version"] > 1:
        return "UNSUPPORTED"
    is_whole = all(map(has_chunks, tensors_of(manifest))) and commit["uuid"] == manifest["uuid"]
    for file in manifest["files"]:
        is_whole &= file["digested_bytes"] <= file["bytes"]
        is_whole &= (step / file["name"]).stat().st_size == file["bytes"]
    if not is_whole or commit["step"] != manifest["step"]:
        return "INTEGRITY"
    return answer_to_state(step) if manifest["state"] else "read"


def answer_to_state(step: Path) -> str:
    """The answer to optimizer/, to a program that resumes with the optimizer that it names."""
    groups = step / "optimizer/groups.json"
    if groups.exists() and not fits(json.loads(groups.read_text()), GROUPS):
        return "INTEGRITY"
    state = json.loads((step / "optimizer/state.json").read_text())
    if str(state["optimizer"]).startswith("torch"):
        return "read" if isinstance(state["numbers"], dict) else "INTEGRITY"
    if not fits(state, STATE):
        return "INTEGRITY"
    has_codes = not state["state_format"].startswith("int8") or state.get("codes") == "mu-law"
    is_known = state["optimizer"] == "adamw" and state["state_format"] in FORMATS and has_codes
    return "read" if is_known else "UNSUPPORTED"


def tensors_of(manifest: dict[str, Any]) -> list[dict[str, Any]]:
    return [*manifest["tensors"], *manifest["state"]]


def has_dtype(tensor: dict[str, Any]) -> bool:
    return tensor["dtype"] in BITS


def has_chunks(tensor: dict[str, Any]) -> bool:
    size = prod(tensor["shape"]) * BITS[tensor["dtype"]] // 8
    return len(tensor["chunks"]) == -(-size // CHUNK_BYTES)
