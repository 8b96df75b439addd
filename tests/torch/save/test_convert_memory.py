"""`modicum.torch.deepspeed.convert` and `modicum.torch.dcp.convert` hold what they promise, and are
refused, before they write, in a budget that lacks it.

Each conversion has a process of its own. Must fail for these mutants: elements that are converted
in memory other than the staging; threads whose stacks and heaps are not promised; memory that grows
with each box that has been read; a process that is measured before it has the names of all tensors.
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

pytestmark = [
    pytest.mark.alone,  # measures memory
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled"),
]

PROGRAM = Path(__file__).parents[2] / "support/convert_memory.py"
REPEATS = 3


def assert_holds_its_promise(directory: Path, folder: Path, kind: str, *words: str) -> None:
    """Asserts that conversions hold at most the promise, less the part of a MiB by which it rounds
    up the process's memory before, and are refused in a smaller budget."""
    environment = os.environ | {"OMP_NUM_THREADS": "2"}
    for repeat in range(REPEATS):
        command = [
            sys.executable,
            str(PROGRAM),
            kind,
            str(directory),
            str(folder / f"steps-{repeat}"),
        ]
        done = subprocess.run(
            command + [*words], capture_output=True, text=True, timeout=300, env=environment
        )
        assert done.returncode == 0, done.stderr[-4000:]
        told: dict[str, Any] = json.loads(done.stdout)
        assert told["refused"], told
        assert told["held"] <= told["promised"] - told["rounding"], (repeat, told)


@pytest.fixture(scope="module")
def wide(root: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory of ZeRO-2 with 2 million parameters."""
    pytest.importorskip("deepspeed")
    import zero_rank

    folder = tmp_path_factory.mktemp("zero")
    done = torchrun(root, 2, Path(zero_rank.__file__), folder, "wide")
    assert done.returncode == 0, done.stderr[-4000:]
    return folder / "wide"


@pytest.mark.parametrize("state_format", ["fp32", "fp32-split"])
def test_zero_holds_its_promise(wide: Path, tmp_path: Path, state_format: str) -> None:
    assert_holds_its_promise(wide, tmp_path, "deepspeed", state_format)


def test_dcp_with_many_tensors_holds_its_promise(tmp_path: Path) -> None:
    names = [f"layers.{number}.weight" for number in range(2000)]
    entry = {"step": torch.tensor(1.0), "exp_avg": torch.ones(1024), "exp_avg_sq": torch.ones(1024)}
    model = {name: torch.ones(1024) for name in names}
    state = {name: {key: of.clone() for key, of in entry.items()} for name in names}
    dcp.save(
        {"model": model, "optim": {"state": state}}, checkpoint_id=tmp_path / "saved", no_dist=True
    )
    assert_holds_its_promise(tmp_path / "saved", tmp_path, "dcp")


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
    assert_holds_its_promise(path, tmp_path, "dcp")
