"""Running the program under test: its exit code, its JSON, and checkpoints to run it on."""

import contextlib
import json
import os
import signal
import subprocess
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

STRATEGIES = ("own-shard", "node-reader", "replica-striped", "rank0-broadcast", "full-per-rank")
PATIENCE_S = 120


@dataclass(frozen=True)
class Ended:
    """The result of a run."""

    code: int
    stdout: str
    stderr: str

    @property
    def json(self) -> dict[str, Any]:
        """The JSON document on stdout."""
        return json.loads(self.stdout)

    @property
    def error(self) -> dict[str, Any]:
        """The `error` object of the JSON document."""
        return self.json["error"]


def run(program: Path, *words: object, timeout_s: float = PATIENCE_S) -> Ended:
    """Runs the program. Words that are None or False are dropped, so that flags can be
    conditional."""
    arguments = [str(word) for word in words if word is not None and word is not False]
    done = subprocess.run(
        [str(program), *arguments], capture_output=True, text=True, timeout=timeout_s
    )
    return Ended(done.returncode, done.stdout, done.stderr)


def run_json(program: Path, *words: object, timeout_s: float = PATIENCE_S) -> dict[str, Any]:
    """The JSON of a run that must succeed."""
    done = run(program, *words, "--json", timeout_s=timeout_s)
    assert done.code == 0, f"{words}\nexit {done.code}\n{done.stdout}{done.stderr}"
    return done.json


def failure(program: Path, code: int, *words: object) -> dict[str, Any]:
    """The error object of a run that must fail with this exit code."""
    done = run(program, *words, "--json")
    assert done.code == code, f"{words}\nexit {done.code}\n{done.stdout}{done.stderr}"
    error = done.error
    assert error["code"] == code
    assert error["category"] and error["message"]
    assert done.stderr.startswith("modicum: "), done.stderr
    return error


def strategy_of(plan: dict[str, Any], name: str) -> dict[str, Any]:
    """A plan's row of one strategy."""
    (row,) = [row for row in plan["strategies"] if row["name"] == name]
    return row


def node_peak(plan: dict[str, Any], name: str) -> int:
    """The predicted peak of the largest node under one strategy."""
    return max(node["peak_bytes"] for node in strategy_of(plan, name)["nodes"])


def children_of(pid: int) -> list[int]:
    """The child processes of a process."""
    found: list[int] = []
    with contextlib.suppress(FileNotFoundError):  # the process has ended
        for task in Path(f"/proc/{pid}/task").iterdir():
            with contextlib.suppress(OSError):
                found += map(int, (task / "children").read_text().split())
    return found


def tree_of(pid: int) -> list[int]:
    """A process and all its descendants."""
    found = [pid]
    for child in children_of(pid):
        found += tree_of(child)
    return found


@contextlib.contextmanager
def living_children(count: int) -> Iterator[list[int]]:
    """Starts forked children of this process, which live until the end of the block. Yields their
    pids."""
    pids: list[int] = []
    try:
        for _ in range(count):
            pid = os.fork()
            if pid == 0:
                signal.pause()
                os._exit(0)
            pids.append(pid)
        yield pids
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


# ---- checkpoints written by the safetensors package


def split(tensors: dict[str, Any], files: int) -> Iterator[dict[str, Any]]:
    """The tensors of each of `files` files, assigned in turn."""
    names = list(tensors)
    for file in range(files):
        yield {name: tensors[name] for name in names[file::files]}


def write_checkpoint(directory: Path, tensors: dict[str, Any], files: int = 1) -> Path:
    """A Hugging Face directory of torch tensors: one file, or several with an index."""
    from safetensors.torch import save_file

    directory.mkdir(parents=True)
    if files > 1:
        return write_shards(directory, tensors, files)
    save_file(tensors, directory / "model.safetensors")
    return directory


def write_shards(directory: Path, tensors: dict[str, Any], files: int) -> Path:
    """Writes several files and their index into an existing directory."""
    from safetensors.torch import save_file

    weight_map: dict[str, str] = {}
    for number, part in enumerate(split(tensors, files), start=1):
        name = f"model-{number:05d}-of-{files:05d}.safetensors"
        save_file(part, directory / name)
        weight_map |= dict.fromkeys(part, name)
    write_index(directory, weight_map, sum(t.numel() * t.itemsize for t in tensors.values()))
    return directory


def write_index(directory: Path, weight_map: dict[str, str], total_bytes: int) -> None:
    """The index of a directory of several files."""
    index = {"metadata": {"total_size": total_bytes}, "weight_map": weight_map}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))


def write_recipe(path: Path, targets: dict[str, Any], unused: Iterable[str] = ()) -> Path:
    """A recipe.json."""
    path.write_text(json.dumps({"targets": targets, "unused": list(unused)}))
    return path


# ---- nodes of a recipe


def stored(name: str) -> dict[str, Any]:
    return {"op": "stored", "name": name}


def joined(op: str, dim: int, inputs: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """`cat` or `stack`."""
    return {"op": op, "dim": dim, "in": list(inputs)}


# ---- contents of a safetensors file


def header_of(file: Path) -> tuple[dict[str, Any], int]:
    """A safetensors header and where the data begins."""
    with file.open("rb") as opened:
        size = int.from_bytes(opened.read(8), "little")
        return json.loads(opened.read(size)), 8 + size


def offset_of(file: Path, tensor: str) -> int:
    """The offset of a tensor's first byte in its file."""
    header, begin = header_of(file)
    return begin + header[tensor]["data_offsets"][0]


def flip_bit(file: Path, offset: int, bit: int = 0) -> None:
    """Changes one bit of a file in place."""
    with file.open("r+b") as opened:
        opened.seek(offset)
        byte = opened.read(1)[0]
        opened.seek(offset)
        opened.write(bytes([byte ^ (1 << bit)]))
