"""The program prints each error of docs/reference/errors.md exactly as the page shows it.

Catches: a message is changed in the code but not on the page; a fault of a file gets another
category.
"""

import json
import os
import re
import subprocess
from pathlib import Path

import pytest

MODEL = "model.safetensors"
INDEX = f"{MODEL}.index.json"
CACHE = "/home/me/.cache/huggingface/hub"  # the path in the page's example
# A row's category, exit code and message.
ROW = re.compile(r"^\| `([A-Z0-9_.]+)` \| (\d+) \| \w+ \| `(.+?)` \|", re.M)


def file_of(header: str, data_bytes: int = 0, length: int | None = None) -> bytes:
    """A safetensors file of zeros; `length` is the header length that it claims, by default the
    true one."""
    text = header.encode()
    return (length or len(text)).to_bytes(8, "little") + text + bytes(data_bytes)


def entry(name: str, begin: int, end: int, shape: object = (2,), dtype: str = "F32") -> str:
    """A tensor's member of a header."""
    fields = {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}
    return f"{json.dumps(name)}:{json.dumps(fields, separators=(',', ':'))}"


def single(*entries: str, data_bytes: int = 8) -> dict[str, bytes]:
    """A checkpoint of one file with these tensors, as content by file name."""
    return {MODEL: file_of("{" + ",".join(entries) + "}", data_bytes)}


def indexed(text: str, *shards: str) -> dict[str, bytes]:
    """A checkpoint with this index, in which each file holds a tensor w."""
    return {INDEX: text.encode(), **files_of_w(*shards)}


def files_of_w(*names: str) -> dict[str, bytes]:
    return {name: single(entry("w", 0, 8))[MODEL] for name in names}


SHARDS = [f"model-0000{n}-of-00002.safetensors" for n in (1, 2)]
MAP = {"weight_map": {"w": SHARDS[0], "v": SHARDS[1]}}
# By category: the files of directory `m` on which `inspect m`, or the command of WORDS, fails.
FILES: dict[str, dict[str, bytes]] = {
    "FORMAT.TRUNC": single(entry("w", 0, 8), data_bytes=4),
    "FORMAT.LIMIT": {MODEL: file_of("{", 200_000_001, length=200_000_001)},
    "FORMAT.HEADER": {MODEL: file_of("[]")},
    "FORMAT.UTF8": {MODEL: (4).to_bytes(8, "little") + b'{"\xff"'},
    "FORMAT.JSON": {MODEL: file_of('{"w":')},
    "FORMAT.SCHEMA": {MODEL: file_of('{"w":{"dtype":"F32","shape":[2]}}')},
    "FORMAT.DUP": single(entry("w", 0, 8), entry("w", 8, 16), data_bytes=16),
    "FORMAT.NAME": single(entry("", 0, 8)),
    "FORMAT.DTYPE": single(entry("w", 0, 8, dtype="F99")),
    "FORMAT.OVERFLOW": single(entry("w", 0, 8, [1 << 40, 1 << 40])),
    "FORMAT.ALIGN": single(entry("w", 0, 2, [3], "F4")),
    "FORMAT.OFFSETS": single(entry("w", 8, 0)),
    "FORMAT.SIZE": single(entry("w", 0, 8, [3])),
    "FORMAT.OVERLAP": single(entry("a", 0, 8), entry("b", 4, 12), data_bytes=12),
    "FORMAT.HOLE": single(entry("a", 0, 8), entry("b", 12, 20), data_bytes=20),
    "FORMAT.TRAILING": single(entry("w", 0, 8), data_bytes=9),
    "FORMAT.PICKLE": {"pytorch_model.bin": b"x"},
    "INDEX.JSON": indexed("{"),
    "INDEX.SCHEMA": indexed('{"weight_map":{}}'),
    "INDEX.DUP": indexed(f'{{"weight_map":{{"w":"{SHARDS[0]}","w":"{SHARDS[1]}"}}}}', *SHARDS),
    "INDEX.PATH": indexed('{"weight_map":{"w":"../x.safetensors"}}'),
    "INDEX.MISSING_SHARD": indexed(json.dumps(MAP), SHARDS[0]),
    "INDEX.MISSING_TENSOR": indexed(json.dumps({"weight_map": {"v": SHARDS[0]}}), SHARDS[0]),
    "INDEX.AMBIGUOUS": files_of_w("a.safetensors", "b.safetensors"),
    "IO": {},
    "BUDGET": single(entry("w", 0, 8)),
    "CONFLICT": {},
    "UNSUPPORTED": single(entry("w", 0, 8)) | {"r.json": b'{"targets":{"x":{"op":"rotate"}}}'},
    "MISMATCH": single(entry("w", 0, 8))
    | {"r.json": b'{"targets":{"x":{"op":"stored","name":"nope"}},"unused":["w"]}'},
    "UNCOMMITTED": {},
    "USAGE": single(entry("w", 0, 8)),
}
WORDS = {
    "UNCOMMITTED": "resume m",
    "IO": "inspect m/nowhere",
    "BUDGET": "load m --ranks 2 --budget 1MiB",
    "CONFLICT": "synth m --arch tiny-moe",
    "UNSUPPORTED": "plan m --recipe m/r.json",
    "MISMATCH": "plan m --recipe m/r.json",
    "USAGE": "plan m --layout fsdp9",
}
# Errors for which FILES has no checkpoint: other tests cause them.
ELSEWHERE = {
    "INTEGRITY", "NOSPACE", "NOMEM", "PEER", "STALL", "PREEMPTED", "INTERNAL", "CANCELLED",
}  # fmt: skip


def failure_in(directory: Path, modicum: Path, category: str) -> tuple[int, str]:
    """The exit code and the error line of the command that fails on this category's files."""
    (directory / "m").mkdir()
    for name, content in FILES[category].items():
        (directory / "m" / name).write_bytes(content)
    words = WORDS.get(category, "inspect m").split()
    done = subprocess.run(
        [modicum, *words], cwd=directory, env=os.environ | {"HF_HUB_CACHE": CACHE},
        capture_output=True, text=True,
    )  # fmt: skip
    return done.returncode, done.stderr.strip().removeprefix("modicum: ")


def test_every_category_of_the_page_is_tested(root: Path) -> None:
    page = (root / "docs/reference/errors.md").read_text()
    assert {category for category, _, _ in ROW.findall(page)} == FILES.keys() | ELSEWHERE


@pytest.mark.parametrize("category", FILES)
def test_the_message_of_the_page_is_printed(
    root: Path, modicum: Path, tmp_path: Path, category: str
) -> None:
    page = (root / "docs/reference/errors.md").read_text()
    shown = {name: (int(code), text) for name, code, text in ROW.findall(page)}
    code, text = shown[category]
    assert failure_in(tmp_path, modicum, category) == (code, f"{category}: {text}")
