"""The program gives every example of docs/internals/layout.md, and torch.chunk the table of
chunks."""

import re
import shlex
from pathlib import Path

import pytest
from program import run_json

torch = pytest.importorskip("torch")
from safetensors.torch import load_file, save_file  # noqa: E402

EXAMPLE = re.compile(r"^```layout (.*?)\n(.*?)^```", re.MULTILINE | re.DOTALL)
SHAPE = re.compile(r"^\[([\d, ]*)\] ")


def examples(page: str) -> list[tuple[list[list[int]], list[str], list[str]]]:
    """The (shapes, flags, lines) of each example: the shapes of the tensors, the flags of `load`,
    and a line per rank with the rank, its local shape and the numbers of its elements."""
    found = []
    for head, body in EXAMPLE.findall(page):
        shapes = []
        while match := SHAPE.match(head):
            shapes.append([int(n) for n in match[1].split(",")])
            head = head[match.end() :]
        found.append((shapes, shlex.split(head), body.splitlines()))
    return found


def text_of(ids: list[int]) -> str:
    """Numbers as text with runs of consecutive ones: [0, 1, 2, 7] gives "0-2 7"."""
    runs: list[list[int]] = []
    for i in ids:
        if runs and runs[-1][1] == i - 1:
            runs[-1][1] = i
        else:
            runs.append([i, i])
    return " ".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)


def write(directory: Path, shapes: list[list[int]]) -> None:
    """Writes tensors whose elements are numbered consecutively, across tensors."""
    tensors, first = {}, 0
    for number, shape in enumerate(shapes):
        numel = int(torch.tensor(shape).prod())
        ids = torch.arange(first, first + numel, dtype=torch.float32)
        tensors[f"t{number}"] = ids.reshape(shape)
        first += numel
    directory.mkdir()
    save_file(tensors, directory / "model.safetensors")


def test_the_program_gives_the_examples(modicum: Path, root: Path, tmp_path: Path) -> None:
    blocks = examples((root / "docs/internals/layout.md").read_text())
    assert len(blocks) >= 10
    for number, (shapes, flags, lines) in enumerate(blocks):
        directory, dump = tmp_path / f"m{number}", tmp_path / f"d{number}"
        write(directory, shapes)
        run_json(modicum, "load", directory, *flags, "--dump", dump)
        for rank, line in enumerate(lines):
            (local,) = load_file(dump / f"rank-{rank:05d}.safetensors").values()
            computed = f"{rank} {list(local.shape)} {text_of(local.flatten().int().tolist())}"
            assert computed.strip() == line, (flags, rank)
        assert not (dump / f"rank-{len(lines):05d}.safetensors").exists()


def test_the_table_of_chunks_equals_torch_and_the_program(
    modicum: Path, root: Path, tmp_path: Path
) -> None:
    rows = re.findall(
        r"^\| (\d+) \| (\d+) \| (\d+) \| ([\d, ]+) \| ([\d, ]+) \|$",
        (root / "docs/internals/layout.md").read_text(),
        re.MULTILINE,
    )
    assert len(rows) >= 5
    # A dim's size, the number of ranks, the size of a chunk, and each rank's size and first index.
    for number, (size, world, chunk, sizes, firsts) in enumerate(rows):
        chunks = list(torch.arange(int(size)).chunk(int(world)))
        chunks += [torch.arange(0)] * (int(world) - len(chunks))  # torch leaves empty ones out
        assert int(chunk) == max(len(c) for c in chunks)
        assert sizes == ", ".join(str(len(c)) for c in chunks)
        assert firsts == ", ".join(str(int(c[0]) if len(c) else int(size)) for c in chunks)
        directory, dump = tmp_path / f"m{number}", tmp_path / f"d{number}"
        write(directory, [[int(size)]])
        run_json(modicum, "load", directory, "--ranks", world, "--dump", dump)
        for rank, expected in enumerate(chunks):
            (local,) = load_file(dump / f"rank-{rank:05d}.safetensors").values()
            assert local.tolist() == expected.tolist(), (size, world, rank)
