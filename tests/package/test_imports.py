"""Other programs' checkpoints are read and imported where torch is not installed. The oracle of
values is torch's own reader. Catches: an import of torch by a reader or by the import."""

import json
import subprocess
import sys
import zlib
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
from torch.distributed import checkpoint  # noqa: E402
from torch.distributed.checkpoint.metadata import TensorStorageMetadata  # noqa: E402

RECORDED = Path(__file__).parents[1] / "fixtures/formats-0.1"
READER = """
import json, sys, zlib
sys.modules["torch"] = None  # its import raises ImportError
from math import prod
from pathlib import Path
from modicum.imports import import_checkpoint
from modicum.imports.dcp import Directory

for arguments in json.loads(sys.argv[2]):
    import_checkpoint(**arguments)
sums = {}
opened = Directory.open(Path(sys.argv[1]))
for key, tensor in opened.tensors.items():
    values = bytearray(prod(tensor.shape) * tensor.item_bytes)
    opened.read(key, 0, memoryview(values))
    sums[key] = zlib.crc32(values)
print(json.dumps(sums))
"""


def test_directories_are_imported_without_torch(tmp_path: Path) -> None:
    directory = RECORDED / "dcp/directory"
    imports = [
        {"directory": str(directory), "run": str(tmp_path), "step": 1, "optimizer": "AdamW"},
        {"directory": str(RECORDED / "zero/directory"), "run": str(tmp_path), "step": 2},
    ]
    command = [sys.executable, "-c", READER, str(directory), json.dumps(imports)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    metadata = checkpoint.FileSystemReader(directory).read_metadata().state_dict_metadata
    values = {
        key: torch.empty(tensor.size, dtype=tensor.properties.dtype)
        for key, tensor in metadata.items()
        if isinstance(tensor, TensorStorageMetadata)
    }
    checkpoint.load(values, checkpoint_id=directory, no_dist=True)
    sums = {
        key: zlib.crc32(value.reshape(-1).view(torch.uint8).numpy())
        for key, value in values.items()
    }
    assert json.loads(done.stdout) == sums and len(sums) > 10
    assert all((tmp_path / f"step-{step}/COMMIT").is_file() for step in (1, 2))
