"""`modicum convert` of directories of DCP and DeepSpeed's ZeRO: the wheel's command converts them,
the program alone refuses them and names the function.

The directories are recorded ones of the other programs. The oracles are torch's own reader of DCP,
and DeepSpeed's float32 masters. Catches: a dtype that is rounded twice; weights that are imported
again, or left behind; a flag's value that counts as OUT. Must also fail if words that the
program refuses start an import.
"""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from program import Ended, failure

torch = pytest.importorskip("torch")
safetensors = pytest.importorskip("safetensors.torch")

from torch.distributed import checkpoint  # noqa: E402  (after torch is known to be there)
from torch.distributed.checkpoint.metadata import TensorStorageMetadata  # noqa: E402

RECORDED = Path(__file__).parents[1] / "fixtures/formats-0.1"
DCP, ZERO = RECORDED / "dcp/directory", RECORDED / "zero/directory"
COMMAND = "import sys; from modicum.cli import main; sys.argv[0] = 'modicum'; main()"

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def command(*words: object) -> Ended:
    """Runs the wheel's command `modicum`."""
    run = [sys.executable, "-c", COMMAND, *map(str, words)]
    done = subprocess.run(run, capture_output=True, text=True, timeout=120)
    return Ended(done.returncode, done.stdout, done.stderr)


def tensors_of(folder: Path) -> dict[str, Any]:
    files = folder.glob("*.safetensors")
    return {name: of for file in files for name, of in safetensors.load_file(file).items()}


def test_weights_of_dcp_are_those_that_torch_reads(tmp_path: Path) -> None:
    out = tmp_path / "out"
    done = command("convert", DCP, "--shard-size", "100", out, "--json")
    assert done.code == 0, done.stderr
    assert done.json["path"] == str(out) and len(done.json["files"]) > 1
    metadata = checkpoint.FileSystemReader(DCP).read_metadata().state_dict_metadata
    expected = {
        key: torch.empty(of.size, dtype=of.properties.dtype)
        for key, of in metadata.items()
        if isinstance(of, TensorStorageMetadata) and key.startswith("model.")
    }
    checkpoint.load(expected, checkpoint_id=DCP, no_dist=True)
    found = tensors_of(out)
    assert {f"model.{name}" for name in found} == expected.keys()
    assert all(torch.equal(of, expected[f"model.{name}"]) for name, of in found.items())
    assert "left out" in done.stderr and [*tmp_path.iterdir()] == [out]
    begin = f"modicum: {DCP}: weights of torch.distributed.checkpoint imported for {out} in "
    assert done.stderr.startswith(begin)
    assert ".import-" not in done.stdout + done.stderr, "a directory that is gone"


def test_float32_of_zero_are_the_masters(tmp_path: Path) -> None:
    done = command("convert", ZERO, tmp_path / "out", "--dtype=float32", "-q")
    assert (done.code, done.stderr) == (0, "")
    step = ZERO / "global_step3"
    parts = [
        torch.load(path, weights_only=False)["optimizer_state_dict"]
        for path in sorted(step.glob("*_optim_states.pt"))
    ]
    masters = {
        bits
        for part in parts
        for flat in part.get("single_partition_of_fp32_groups", part.get("fp32_flat_groups"))
        for bits in flat.view(torch.int32).tolist()
    }
    found = tensors_of(tmp_path / "out")
    trained = torch.load(next(step.glob("*model_states.pt")), weights_only=False)["param_shapes"]
    names = [name for group in trained for name in group]
    assert names
    for name in names:
        assert found[name].dtype == torch.float32
        assert {*found[name].reshape(-1).view(torch.int32).tolist()} <= masters, name


def test_a_failed_conversion_continues(tmp_path: Path) -> None:
    """The program refuses the recipe after the import. The same command with a recipe that is right
    takes the imported weights."""
    recipe, out = tmp_path / "recipe.json", tmp_path / "out"
    recipe.write_text('{"targets": {}, "unused": []}')
    words = ("convert", "--recipe", recipe, ZERO, out)
    assert command(*words, "--json").error["category"] == "MISMATCH"
    (kept,) = tmp_path.glob(".out.import-*")
    commit = kept / "step-0/COMMIT"
    made = commit.stat().st_mtime_ns
    assert "keeps the imported weights" in command(*words).stderr
    assert commit.stat().st_mtime_ns == made
    done = command("convert", ZERO, out)
    assert done.code == 0 and "imported for" not in done.stderr
    assert not kept.exists()


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGTERM, 21), (signal.SIGHUP, 21), (signal.SIGINT, 130)]
)
def test_an_interrupted_import_leaves_nothing(
    tmp_path: Path, number: signal.Signals, code: int
) -> None:
    """The signal arrives when the directory of the import appears next to OUT."""
    large = {"w": torch.zeros(1 << 26)}
    checkpoint.save({"model": large}, checkpoint_id=tmp_path / "large", no_dist=True)
    run = [sys.executable, "-c", COMMAND, "convert", "large", "out", "--json"]
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)  # nohup ignores it
    with subprocess.Popen(run, cwd=tmp_path, stdout=subprocess.PIPE, text=True) as process:
        signal.signal(signal.SIGHUP, before)
        while process.poll() is None and not [*tmp_path.glob(".out.import-*")]:
            pass
        process.send_signal(number)
        answer = process.communicate(timeout=60)[0]
    assert process.returncode == code, answer
    assert json.loads(answer)["error"]["code"] == code
    assert [one.name for one in tmp_path.iterdir()] == ["large"]


def test_names_that_are_no_text_are_names(tmp_path: Path) -> None:
    folder = tmp_path / os.fsdecode(b"m\xff")
    shutil.copytree(DCP, folder)
    (folder / os.fsdecode(b"a\xfe")).write_text("x")
    assert command("convert", folder, tmp_path / "out").code == 0
    assert tensors_of(tmp_path / "out")


def test_words_that_are_no_paths_are_words(tmp_path: Path) -> None:
    done = command("convert", "--keep-fp32", "x" * 5000, DCP, tmp_path / "out", "--json")
    assert done.code == 2 and "--keep-fp32" in done.stderr and "Traceback" not in done.stderr


def test_a_full_stdout_changes_no_exit_code(tmp_path: Path) -> None:
    run = [sys.executable, "-c", COMMAND, "convert", str(DCP), str(tmp_path), "--json"]
    with open("/dev/full", "w") as full:
        done = subprocess.run(run, stdout=full, stderr=subprocess.PIPE, text=True, timeout=120)
    assert done.returncode == 20 and "CONFLICT" in done.stderr and "Traceback" not in done.stderr


def test_refusals_import_nothing(tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    done = command("convert", ZERO, out, "--json")
    assert done.code == 20 and done.error["category"] == "CONFLICT"
    done = command("convert", ZERO, tmp_path / "new", "--no-flag", "--json")
    assert done.code == 2 and "--no-flag" in done.error["message"]
    (tmp_path / "torn").mkdir()
    (tmp_path / "torn/.metadata").write_bytes(b"\x80\x04.")
    done = command("convert", tmp_path / "torn", tmp_path / "new", "--json")
    assert done.code == 10 and done.error["file"] == ".metadata"
    assert sorted(one.name for one in tmp_path.iterdir()) == ["out", "torn"]


@pytest.mark.parametrize("directory", [DCP, ZERO, ZERO / "global_step3"], ids=lambda of: of.name)
def test_the_program_alone_names_the_function(modicum: Path, directory: Path) -> None:
    for verb in ("convert", "inspect"):
        words = (verb, directory, "OUT") if verb == "convert" else (verb, directory)
        error = failure(modicum, 2, *words)
        assert error["category"] == "UNSUPPORTED"
        assert "modicum.imports.import_checkpoint" in error["message"]


def test_every_flag_without_a_value_is_known(modicum: Path) -> None:
    """Where a flag's value ends decides which word is OUT."""
    from modicum.imports.converting import SWITCHES

    done = subprocess.run([modicum, "convert", "--help-all"], capture_output=True, text=True)
    flags = re.findall(r"^  (-\S+)(?: (\S+))?(?:  |$)", done.stdout, re.M)
    without = {name for names, value in flags if not value for name in names.split(",")}
    assert {"--sparse", "-q", "--quiet"} <= without <= SWITCHES
    assert "--dtype" not in without | SWITCHES
