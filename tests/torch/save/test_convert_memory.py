"""`modicum.imports.import_checkpoint` holds no more memory than it promises. In a smaller budget it
is refused before it writes. Soak has all of the conversions.

Each conversion runs in a new process, which measures itself. Catches: elements that are converted
in other memory than the staging; stacks and heaps of threads that are not in the promise; memory
that grows with each box (rectangular part of a tensor) that is read; a promise that is made before
the names of all tensors are in memory.
"""

import json
import os
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import torch.distributed.checkpoint as dcp  # noqa: E402  (after torch is known to be there)
from ranks import torchrun  # noqa: E402
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

PROGRAM = Path(__file__).parents[2] / "support/convert_memory.py"


def assert_holds_its_promise(directory: Path, folder: Path, *words: str, repeats: int = 3) -> None:
    """Asserts that conversions hold at most the promised memory, and are refused in a budget that
    is 1 MiB smaller. The promise includes the memory that the process has before, rounded up. The
    bytes that this rounding adds may not be held."""
    environment = os.environ | {"OMP_NUM_THREADS": "2"}
    for repeat in range(repeats):
        root = folder / f"steps-{repeat}"
        command = [sys.executable, str(PROGRAM), str(directory), str(root), *words]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment)
        assert done.returncode == 0, done.stderr[-4000:]
        answer: dict[str, Any] = json.loads(done.stdout)
        assert answer["refused"], answer
        assert answer["held"] <= answer["promised"] - answer["rounding"], (repeat, answer)


@pytest.fixture(scope="module")
def wide(root: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory of ZeRO-2 with 2 million parameters."""
    pytest.importorskip("deepspeed")
    import zero_rank

    folder = tmp_path_factory.mktemp("zero")
    done = torchrun(root, 2, Path(zero_rank.__file__), folder, "wide")
    assert done.returncode == 0, done.stderr[-4000:]
    return folder / "wide"


@pytest.mark.soak
@pytest.mark.parametrize("state_format", ["fp32", "fp32-split"])
def test_zero_holds_its_promise(wide: Path, tmp_path: Path, state_format: str) -> None:
    assert_holds_its_promise(wide, tmp_path, state_format)


@pytest.mark.soak
def test_dcp_with_many_tensors_holds_its_promise(tmp_path: Path) -> None:
    names = [f"layers.{number}.weight" for number in range(2000)]
    entry = {"step": torch.tensor(1.0), "exp_avg": torch.ones(1024), "exp_avg_sq": torch.ones(1024)}
    model = {name: torch.ones(1024) for name in names}
    state = {name: {key: tensor.clone() for key, tensor in entry.items()} for name in names}
    dcp.save(
        {"model": model, "optim": {"state": state}}, checkpoint_id=tmp_path / "saved", no_dist=True
    )
    assert_holds_its_promise(tmp_path / "saved", tmp_path)


def test_dcp_with_many_boxes_holds_its_promise(tmp_path: Path) -> None:
    """The directory has one tensor in 4,000 boxes, as if so many ranks had saved it."""
    path, boxes, numel = tmp_path / "saved", 4000, 16
    dcp.save({"weight": torch.zeros(numel)}, checkpoint_id=path, no_dist=True)
    metadata = pickle.loads((path / ".metadata").read_bytes())
    (info,) = metadata.storage_data.values()
    metadata.storage_data.clear()
    tensor = metadata.state_dict_metadata["weight"]
    tensor.size, chunks = torch.Size([boxes * numel]), tensor.chunks
    chunks.clear()
    with (path / info.relative_path).open("wb") as file:
        for number in range(boxes):
            begin, offset = file.tell(), torch.Size([numel * number])
            torch.save(torch.full((numel,), float(number)), file)
            chunks.append(ChunkStorageMetadata(offset, torch.Size([numel])))
            place = type(info)(info.relative_path, begin, file.tell() - begin)
            metadata.storage_data[MetadataIndex("weight", offset)] = place
    (path / ".metadata").write_bytes(pickle.dumps(metadata))
    assert_holds_its_promise(path, tmp_path, repeats=1)
