"""The verbs `save`, `resume` and `verify`. A saved checkpoint has the names,
dtypes and bits of the loaded model, whatever ranks and layouts write and read it. A save keeps its
promise of memory. If it is killed, the checkpoint is complete or absent. An error names a damaged
file.

Catches: a checkpoint is visible before it is complete; files of a dead save are kept, or those of a
living one removed; no digest covers some byte; the newest checkpoint is resumed without a check;
the promise does not include the save; a SHA-256 is not compared; a directory with an unfinished
save passes as a checkpoint; `resume` makes steps without a loaded optimizer; `keep` removes the
checkpoint just saved; a dangling link fails the save; an adapter gets a model's file name; another
program's manifest.json makes a directory a checkpoint; the error of a damaged file lacks its
checkpoint; an optimizer's state that a save leaves out without a word.
"""

import hashlib
import json
import math
import os
import random
import shutil
import signal
import struct
import subprocess
import sys
import time
from pathlib import Path

import pytest
from program import failure, run, run_json

MIB = 1 << 20
KEYS = {
    "checkpoint", "step", "path", "written_bytes", "read_bytes", "gathered_bytes", "elapsed_s",
    "durable_s", "durable", "digest", "state_digest", "files", "nodes", "ranks", "copied",
    "left_out", "compared_bytes", "not_compared", "warnings",
}  # fmt: skip
KILLS = 12
# From a process as small as this: what a fork held before its exec counts as a peak, too.
PEAK_OF_A_COMMAND = """
import resource, subprocess, sys
subprocess.run(sys.argv[1:], check=True)
print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)
"""


@pytest.fixture(scope="module")
def moe(modicum: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small MoE in several files, with the files that models have besides their weights."""
    directory = tmp_path_factory.mktemp("save") / "moe"
    run_json(modicum, "synth", directory, "--arch", "tiny-moe", "--shard-size", 800)
    assert len(list(directory.glob("*.safetensors"))) > 2
    for name in ("generation_config.json", "tokenizer.json", "modeling_tiny.py"):
        (directory / name).write_text(json.dumps({"is": name}))
    return directory


@pytest.fixture(scope="module")
def gpt2(modicum: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("save") / "gpt2"
    run_json(modicum, "synth", directory, "--arch", "gpt2", "--layers", 1, "--dtype", "bfloat16")
    return directory


def tensors_of(directory: Path) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    """Every tensor of a checkpoint, read by the safetensors package: dtype, shape and bytes."""
    safetensors = pytest.importorskip("safetensors")
    found = {}
    for file in sorted(directory.glob("*.safetensors")):
        for name, entry in safetensors.deserialize(file.read_bytes()):
            found[name] = (entry["dtype"], tuple(entry["shape"]), bytes(entry["data"]))
    return found


# ---- the files


def test_keys_and_sizes_of_the_files(modicum: Path, moe: Path, tmp_path: Path) -> None:
    saved = run_json(modicum, "save", moe, tmp_path / "root", "--step", 5, "--ranks", 2)
    assert set(saved) >= KEYS
    assert (saved["step"], saved["path"]) == (5, str(tmp_path / "root/step-5"))
    assert (saved["read_bytes"], saved["gathered_bytes"]) == (0, 0)
    on_disk = sum(file["bytes"] for file in saved["files"])
    assert saved["written_bytes"] == on_disk
    for file in saved["files"]:
        assert (tmp_path / "root/step-5" / file["name"]).stat().st_size == file["bytes"]
    assert 0 < saved["elapsed_s"] <= saved["durable_s"] and saved["durable"] is True
    assert [rank["rank"] for rank in saved["ranks"]] == [0, 1]


@pytest.mark.parametrize(
    "flags",
    [
        ("--ranks", 1),
        ("--ranks", 3),
        ("--ranks", 4, "--layout", "hsdp", "--mesh", "2x2"),
        ("--ranks", 4, "--layout", "tp-fsdp", "--mesh", "2x2", "--tp-rowwise", "down|o_proj"),
        ("--ranks", 4, "--layout", "zero2"),
        ("--ranks", 3, "--layout", "zero3", "--strategy", "node-reader"),
        ("--ranks", 2, "--layout", "none", "--strategy", "full-per-rank"),
        ("--ranks", 2, "--shard-dim", 1, "--shard-size", 1500),
        ("--ranks", 5, "--ranks-per-node", 2, "--shard-dim", 1),
    ],
)
def test_step_equals_the_loaded_model(
    modicum: Path, moe: Path, tmp_path: Path, flags: tuple[object, ...]
) -> None:
    root = tmp_path / "root"
    saved = run_json(modicum, "save", moe, root, "--step", 1, *flags)
    assert tensors_of(root / "step-1") == tensors_of(moe)
    assert saved["digest"] == run_json(modicum, "load", moe, "--digest")["digest"]
    for name in ("config.json", "generation_config.json", "tokenizer.json", "modeling_tiny.py"):
        assert (root / "step-1" / name).read_bytes() == (moe / name).read_bytes()
    resumed = run_json(modicum, "resume", root, "--ranks", 5)
    assert (resumed["digest"], resumed["resumed"]["step"]) == (saved["digest"], 1)
    assert run_json(modicum, "verify", root)["ok"]


def test_another_dtype_is_written_to_the_config(modicum: Path, gpt2: Path, tmp_path: Path) -> None:
    run_json(modicum, "save", gpt2, tmp_path / "root", "--step", 1, "--dtype", "float32")
    step = tmp_path / "root/step-1"
    before = json.loads((gpt2 / "config.json").read_text())
    after = json.loads((step / "config.json").read_text())
    names = [name for name in ("dtype", "torch_dtype") if name in before]
    assert names
    assert {after.pop(name) for name in names} == {"float32"}
    assert after == {name: value for name, value in before.items() if name not in names}
    assert {dtype for dtype, _, _ in tensors_of(step).values()} == {"F32"}
    digest = run_json(modicum, "load", gpt2, "--dtype", "float32", "--digest")["digest"]
    assert run_json(modicum, "resume", tmp_path / "root", "--ranks", 2)["digest"] == digest


def test_codes_keep_their_config(modicum: Path, tmp_path: Path) -> None:
    """FP8 codes that are saved as codes keep `quantization_config`, even if other tensors are cast.
    If they are dequantised, it is removed."""
    fp8, root = tmp_path / "fp8", tmp_path / "root"
    run_json(modicum, "synth", fp8, "--arch", "tiny-fp8")
    before = json.loads((fp8 / "config.json").read_text())
    run_json(modicum, "save", fp8, root, "--step", 1, "--keep-fp32", "norm", "--ranks", 2)
    assert json.loads((root / "step-1/config.json").read_text()) == before
    assert not run_json(modicum, "inspect", root / "step-1")["warnings"]
    run_json(modicum, "save", fp8, root, "--step", 2, "--dtype", "bfloat16")
    before.pop("quantization_config")
    assert json.loads((root / "step-2/config.json").read_text()) == before


def test_unused_tensors_are_copied_or_dropped(modicum: Path, moe: Path, tmp_path: Path) -> None:
    names = list(tensors_of(moe))
    recipe = tmp_path / "r.json"
    targets = {name: {"op": "stored", "name": name} for name in names[1:]}
    recipe.write_text(json.dumps({"targets": targets, "unused": names[:1]}))
    words = ("save", moe, tmp_path / "root", "--recipe", recipe, "--ranks", 2)
    copied = run_json(modicum, *words, "--step", 1)
    assert copied["copied"] == names[:1]
    assert copied["read_bytes"] == len(tensors_of(moe)[names[0]][2])
    assert tensors_of(tmp_path / "root/step-1") == tensors_of(moe)
    dropped = run_json(modicum, *words, "--step", 2, "--unused", "drop")
    assert dropped["left_out"] == names[:1]
    assert set(tensors_of(tmp_path / "root/step-2")) == set(names[1:])


def test_stacked_experts_are_saved_separately(modicum: Path, moe: Path, tmp_path: Path) -> None:
    """A recipe stacks the experts; they are saved as they were stored, one tensor each."""
    tensors = tensors_of(moe)
    experts = [name for name in tensors if ".experts." in name and "gate_proj" in name]
    assert len(experts) > 1
    targets: dict[str, object] = {
        name: {"op": "stored", "name": name} for name in tensors if name not in experts
    }
    inputs = [{"op": "stored", "name": name} for name in experts]
    targets["stacked"] = {"op": "stack", "dim": 0, "in": inputs}
    recipe = tmp_path / "r.json"
    recipe.write_text(json.dumps({"targets": targets, "unused": []}))
    run_json(modicum, "save", moe, tmp_path / "root", "--step", 1, "--recipe", recipe, "--ranks", 3)
    assert tensors_of(tmp_path / "root/step-1") == tensors


# ---- training goes on


TP = ("--ranks", 4, "--layout", "tp-fsdp", "--mesh", "2x2", "--tp-rowwise", "down|o_proj")
HSDP = ("--ranks", 4, "--layout", "hsdp", "--mesh", "2x2")
ZERO = ("--ranks", 3, "--layout", "zero2")
# Flags of the ranks that save, and of those that resume.
PAIRS = [
    (("--ranks", 1), ("--ranks", 8)),
    (("--ranks", 5), ("--ranks", 2)),
    (HSDP, ("--ranks", 3)),
    (("--ranks", 2), HSDP),
    (TP, ZERO),
    (ZERO, TP),
    (("--ranks", 3, "--dtype", "float32"), ("--ranks", 2)),
]


@pytest.mark.parametrize("state_format", ["fp32", "fp32-split", "bf16-moments", "int8-moments-24"])
def test_resumed_training_equals_the_uninterrupted(
    modicum: Path, moe: Path, tmp_path: Path, state_format: str
) -> None:
    """Three optimizer steps, a save, and three steps by other ranks in another layout give the bits
    of six uninterrupted steps."""
    optimizer = ("--optimizer", f"adamw:{state_format}", "--seed", 9)
    for number, (before, after) in enumerate(PAIRS):
        dtype = before[-2:] if "--dtype" in before else ()
        whole = run_json(modicum, "rehearse", moe, *optimizer, *dtype, "--steps", 6)
        root = tmp_path / str(number)
        saved = run_json(modicum, "save", moe, root, "--step", 3, "--steps", 3, *optimizer, *before)
        same = run_json(modicum, "resume", root, *after)
        assert (same["digest"], same["state_digest"]) == (saved["digest"], saved["state_digest"])
        resumed = run_json(modicum, "resume", root, "--steps", 3, *after)
        assert resumed["state_digest"] == whole["digest_uninterrupted"], (before, after)
        assert resumed["digest"] == whole["model_digest"]
        assert run_json(modicum, "verify", root)["ok"]


def test_eight_bit_moments_are_saved_unchanged(modicum: Path, gpt2: Path, tmp_path: Path) -> None:
    """8-bit moments are saved as codes with scales, and resumed by another number of ranks."""
    optimizer = ("--optimizer", "adamw:int8-moments")
    whole = run_json(modicum, "rehearse", gpt2, *optimizer, "--steps", 2)
    root = tmp_path / "root"
    saved = run_json(
        modicum, "save", gpt2, root, "--step", 1, "--steps", 1, *optimizer, "--ranks", 3
    )
    parameters = sum(math.prod(shape) for _, shape, _ in tensors_of(root / "step-1").values())
    state = sum(len(data) for _, _, data in tensors_of(root / "step-1/optimizer").values())
    # The lower halves of the masters (2 bytes), two moments (1 each), and 1/16 for the scales.
    assert 4.06 * parameters < state < 4.08 * parameters
    assert saved["written_bytes"] < 1.002 * (2 * parameters + state) + 4 * MIB
    resumed = run_json(modicum, "resume", root, "--steps", 1, "--ranks", 2)
    assert resumed["state_digest"] == whole["digest_uninterrupted"]
    for rank in (*saved["ranks"], *resumed["ranks"]):
        promised, kernel = rank["promised_bytes"], rank["kernel_peak_bytes"]
        assert kernel <= promised
        assert promised - kernel <= 0.03 * promised + 2 * MIB


def test_states_that_do_not_fit_are_refused(modicum: Path, gpt2: Path, tmp_path: Path) -> None:
    """A format that the layout cannot save; flags that contradict the saved state; no state."""
    cut = ("save", gpt2, tmp_path / "cut", "--step", 1, "--optimizer", "adamw:int8-moments")
    error = failure(modicum, 2, *cut, "--ranks", 3, "--layout", "zero2")
    assert error["category"] == "UNSUPPORTED" and error["tensor"]
    assert not (tmp_path / "cut").exists()
    root = tmp_path / "root"
    run_json(modicum, "save", gpt2, root, "--step", 1, "--optimizer", "adamw:fp32-split")
    other = failure(modicum, 2, "resume", root, "--dtype", "float16")
    assert other["category"] == "MISMATCH" and other["tensor"].endswith(".master")
    without = failure(modicum, 2, "resume", root, "--optimizer", "none", "--steps", 1)
    assert without["category"] == "USAGE" and without["got"] == "--optimizer none"
    run_json(modicum, "save", gpt2, root, "--step", 2)
    assert failure(modicum, 2, "resume", root, "--steps", 1)["category"] == "MISMATCH"
    assert run_json(modicum, "resume", root)["state_digest"] is None


@pytest.mark.parametrize("how", ["stacked", "unused", "renamed"])
def test_a_state_is_resumed_with_its_recipe(
    modicum: Path, moe: Path, tmp_path: Path, how: str
) -> None:
    """The checkpoint has a recipe, since its parameters are not all stored under their own
    names."""
    names = list(tensors_of(moe))
    targets: dict[str, object] = {name: {"op": "stored", "name": name} for name in names}
    experts = [name for name in names if ".experts." in name and "gate_proj" in name]
    unused: list[str] = []
    if how == "stacked":
        inputs = [targets.pop(name) for name in experts]
        targets["stacked"] = {"op": "stack", "dim": 0, "in": inputs}
    elif how == "unused":
        unused = experts[:1]
        del targets[experts[0]]
    else:
        targets["renamed"] = targets.pop(experts[0])
    recipe = tmp_path / "r.json"
    recipe.write_text(json.dumps({"targets": targets, "unused": unused}))
    words = ("--optimizer", "adamw:fp32-split", "--recipe", recipe)
    whole = run_json(modicum, "rehearse", moe, *words, "--steps", 3)
    root = tmp_path / "root"
    run_json(modicum, "save", moe, root, "--step", 2, "--steps", 2, *words, "--ranks", 3)
    resumed = run_json(modicum, "resume", root, "--steps", 1, "--ranks", 2)
    assert resumed["state_digest"] == whole["digest_uninterrupted"]
    assert run_json(modicum, "verify", root)["ok"]
    (root / "step-2/optimizer/recipe.json").unlink()
    failure(modicum, 19, "resume", root)


def test_a_state_with_the_stored_names_has_no_recipe(
    modicum: Path, moe: Path, tmp_path: Path
) -> None:
    words = ("save", moe, tmp_path / "root", "--step", 1, "--optimizer", "adamw:fp32")
    names = [file["name"] for file in run_json(modicum, *words)["files"]]
    assert "optimizer/state.json" in names and "optimizer/recipe.json" not in names


# ---- refusals


def test_refusals_leave_no_files(modicum: Path, moe: Path, tmp_path: Path) -> None:
    root = tmp_path / "root"
    words = ("save", moe, root, "--step", 1)
    for code, flags in (
        (2, ("--unused", "keep")),
        (2, ("--destination", "discard")),
        (2, ("--steps", 1)),
        (2, ("--optimizer", "adam:fp32")),
        (2, ("--keep", 0)),
        (15, ("--budget", "1MiB")),
        (13, ("--recipe", tmp_path / "absent")),
    ):
        failure(modicum, code, *words, *flags)
        assert not root.exists(), flags
    assert failure(modicum, 13, "save", moe, tmp_path / "a/b", "--step", 1)["category"] == "IO"
    run_json(modicum, *words)
    before = {path: path.stat().st_mtime_ns for path in (root / "step-1").iterdir()}
    assert failure(modicum, 20, *words)["category"] == "CONFLICT"
    assert before == {path: path.stat().st_mtime_ns for path in (root / "step-1").iterdir()}
    resumed = failure(modicum, 2, "resume", root, "--destination", "discard")
    assert resumed["category"] == "UNSUPPORTED"
    (root / "step-2").symlink_to("nowhere")
    assert failure(modicum, 20, "save", moe, root, "--step", 2)["category"] == "CONFLICT"


@pytest.mark.parametrize(("dim", "optimizer"), [(0, "none"), (1, "none"), (1, "adamw:fp32-split")])
def test_promise_covers_the_save(
    modicum: Path, gpt2: Path, tmp_path: Path, dim: int, optimizer: str
) -> None:
    """Shards of dim 1 are short runs of the file, so that one rank gathers and writes them."""
    words = ("save", gpt2, tmp_path / "root", "--ranks", 3, "--shard-dim", dim)
    words += ("--optimizer", optimizer)
    saved = run_json(modicum, *words, "--step", 1)
    assert (saved["gathered_bytes"] > 0.9 * saved["written_bytes"]) == (dim == 1)
    for rank in saved["ranks"]:
        promised, kernel = rank["promised_bytes"], rank["kernel_peak_bytes"]
        assert kernel <= promised
        assert promised - kernel <= 0.03 * promised + 2 * MIB
        assert abs(rank["unexplained_bytes"]) <= max(0.02 * kernel, 4 * MIB)
    needed = saved["nodes"][0]["promised_bytes"]
    staging = ("--staging", "8MiB")
    run_json(modicum, *words, "--step", 2, "--budget", needed, *staging)
    error = failure(modicum, 15, *words, "--step", 3, "--budget", needed - 1, *staging)
    assert error["shortfall_bytes"] == 1
    assert not (tmp_path / "root/step-3").exists()


@pytest.mark.parametrize("ranks", [1, 2])
def test_promise_covers_the_texts_of_many_tensors(
    modicum: Path, tmp_path: Path, ranks: int
) -> None:
    """Headers, the sums that ranks hand over, and the record, which the launcher writes alone."""
    offsets = {f"model.layers.{i // 300}.experts.{i % 300}.weight": 32 * i for i in range(30_000)}
    header = json.dumps(
        {
            name: {"dtype": "BF16", "shape": [4, 4], "data_offsets": [at, at + 32]}
            for name, at in offsets.items()
        }
    ).encode()
    values = bytes(32 * len(offsets))
    (tmp_path / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + values)
    words = ("save", tmp_path, tmp_path / "root", "--step", 1, "--optimizer", "adamw:fp32")
    saved = run_json(modicum, *words, "--ranks", ranks)
    for held in (*saved["nodes"], *saved["ranks"]):
        assert held["kernel_peak_bytes"] <= held["promised_bytes"], held


@pytest.mark.parametrize("strategy", ["own-shard", "rank0-broadcast", "full-per-rank"])
def test_default_staging_shrinks_to_fit(
    modicum: Path, gpt2: Path, tmp_path: Path, strategy: str
) -> None:
    words = ("save", gpt2, tmp_path / "root", "--ranks", 3, "--strategy", strategy)
    words += ("--optimizer", "adamw:fp32")
    needed = run_json(modicum, *words, "--step", 1)["nodes"][0]["promised_bytes"]
    # Three ranks have 8 MiB of staging each by default, and need 1 MiB.
    budget = ("--budget", needed - 9 * MIB)
    error = failure(modicum, 15, *words, "--step", 2, *budget, "--staging", "8MiB")
    assert error["shortfall_bytes"] == 9 * MIB
    saved = run_json(modicum, *words, "--step", 2, *budget)
    assert needed - 10 * MIB < saved["nodes"][0]["promised_bytes"] <= needed - 9 * MIB
    for rank in saved["ranks"]:
        assert rank["kernel_peak_bytes"] <= rank["promised_bytes"]


def test_keep_counts_intact_checkpoints_only(modicum: Path, moe: Path, tmp_path: Path) -> None:
    root = tmp_path / "root"
    for step in (1, 2, 3):
        run_json(modicum, "save", moe, root, "--step", step)
    (root / "step-3/config.json").unlink()  # a damaged checkpoint is neither counted nor removed
    run_json(modicum, "save", moe, root, "--step", 4, "--keep", 2)
    assert sorted(path.name for path in root.iterdir()) == ["latest", "step-2", "step-3", "step-4"]


def test_keep_counts_the_checkpoint_just_saved(modicum: Path, moe: Path, tmp_path: Path) -> None:
    """After a rollback later checkpoints exist: the new checkpoint stays, and so do the last ones
    of them."""
    root = tmp_path / "root"
    for step in (10, 20, 30):
        run_json(modicum, "save", moe, root, "--step", step)
    for keep, others in ((2, ["step-30"]), (1, [])):
        step = f"step-{keep}"
        run_json(modicum, "save", moe, root, "--step", keep, "--keep", keep)
        assert sorted(path.name for path in root.iterdir()) == ["latest", step, *others]
        assert (root / "latest").read_text().strip() == step
        shutil.rmtree(root / step)


# ---- files next to the weights


def test_files_that_cannot_be_copied_are_left_out(modicum: Path, moe: Path, tmp_path: Path) -> None:
    source, root = tmp_path / "source", tmp_path / "root"
    shutil.copytree(moe, source)
    (source / "tokenizer.model").symlink_to(tmp_path / "gone")
    latin = os.fsencode(source) + b"/caf\xe9.txt"
    Path(os.fsdecode(latin)).write_text("x")
    for verb, out in (("save", root), ("convert", root / "step-2-hf")):
        words = (verb, source, out, *(("--step", 1) if verb == "save" else ()))
        warnings = "\n".join(run_json(modicum, *words)["warnings"])
        assert "tokenizer.model was not copied: it is a link to a file that does not" in warnings
        assert "txt was not copied: its name is not UTF-8" in warnings
    assert run_json(modicum, "resume", root)["resumed"]["step"] == 1
    assert run_json(modicum, "verify", root)["ok"]
    (source / "config.json").unlink()
    (source / "config.json").symlink_to(tmp_path / "gone")
    failure(modicum, 13, "save", source, root, "--step", 2)
    assert not (root / "step-2").exists()


def test_long_files_are_copied_in_small_memory(modicum: Path, moe: Path, tmp_path: Path) -> None:
    """A file of 64 MiB next to the weights, which no promise counts."""
    source, root = tmp_path / "source", tmp_path / "root"
    shutil.copytree(moe, source)
    with (source / "vocab.txt").open("wb") as file:
        file.truncate(64 * MIB)
    for words in (
        ("save", source, root, "--step", 1),
        ("resume", root),
        ("save", root / "step-1", tmp_path / "again", "--step", 1),
        ("convert", source, tmp_path / "converted"),
    ):
        peak = [sys.executable, "-S", "-c", PEAK_OF_A_COMMAND, modicum, *map(str, words)]
        done = subprocess.run(peak, check=True, capture_output=True, text=True)
        assert int(done.stdout.split()[-1]) << 10 < 64 * MIB, words


def test_an_adapter_keeps_its_file_name(modicum: Path, gpt2: Path, tmp_path: Path) -> None:
    """PEFT reads adapters only from one file of a fixed name."""
    source, root = tmp_path / "source", tmp_path / "root"
    source.mkdir()
    shutil.copy(gpt2 / "model.safetensors", source / "adapter_model.safetensors")
    (source / "adapter_config.json").write_text('{"peft_type": "LORA"}')
    run_json(modicum, "save", source, root, "--step", 1)
    run_json(modicum, "convert", root / "step-1", tmp_path / "converted", "--dtype", "float32")
    for directory in (root / "step-1", tmp_path / "converted"):
        files = sorted(path.name for path in directory.glob("adapter*"))
        assert files == ["adapter_config.json", "adapter_model.safetensors"]
        assert not [*directory.glob("model*")]
    for words in (
        ("save", source, root, "--step", 2),
        ("convert", source, tmp_path / "small"),
    ):
        assert failure(modicum, 2, *words, "--shard-size", 800)["category"] == "UNSUPPORTED"
    assert not (root / "step-2").exists()


# ---- faults of files


def test_every_damaged_file_is_named(modicum: Path, moe: Path, tmp_path: Path) -> None:
    root = tmp_path / "root"
    for step in (1, 2):
        run_json(modicum, "save", moe, root, "--step", step, "--ranks", 2)
    other = root / "step-1"
    whole = tmp_path / "whole"
    shutil.copytree(root / "step-2", whole)
    for path in sorted(whole.iterdir()):
        for fault in ("missing", "short", "replaced"):
            shutil.rmtree(root / "step-2")
            shutil.copytree(whole, root / "step-2")
            file = root / "step-2" / path.name
            if fault == "missing":
                file.unlink()
            elif fault == "short":
                file.write_bytes(file.read_bytes()[:-1])
            elif path.name in ("manifest.json", "COMMIT"):
                file.write_bytes((other / path.name).read_bytes())
            else:  # other bytes of the same length
                size = path.stat().st_size
                file.write_bytes((b"{" + bytes(size))[:size])
            done = run(modicum, "verify", root / "step-2", "--json")
            is_commit_missing = (path.name, fault) == ("COMMIT", "missing")
            assert done.code in ((19,) if is_commit_missing else (12, 13)), (path, fault)
            # COMMIT has the digest of manifest.json: another checkpoint's does not fit.
            named = "manifest.json" if (path.name, fault) == ("COMMIT", "replaced") else path.name
            assert named in done.stderr, (path.name, fault, done.stderr)
            assert not done.json["ok"]
            if fault == "replaced" and path.name not in ("manifest.json", "COMMIT"):
                continue  # `resume` chooses by the lengths, and compares values afterwards
            resumed = run_json(modicum, "resume", root, "--ranks", 2)
            assert resumed["resumed"]["step"] == 1
            (skipped,) = resumed["skipped"]
            assert skipped["step"] == 2 and named in skipped["reason"]


def test_a_damaged_value_is_named_with_its_checkpoint(
    modicum: Path, moe: Path, tmp_path: Path
) -> None:
    root = tmp_path / "root"
    for step in (1, 2):
        run_json(modicum, "save", moe, root, "--step", step, "--optimizer", "adamw:fp32")
    file = root / "step-2/optimizer/model.safetensors"
    values = bytearray(file.read_bytes())
    values[-1] ^= 1
    file.write_bytes(values)
    done = run(modicum, "verify", root, "--json")
    assert done.code == 12 and done.stderr.count(file.relative_to(root).as_posix()) == 1
    error = done.json["error"]
    assert error["file"] == "step-2/optimizer/model.safetensors"
    assert (error["category"], error["code"]) == ("INTEGRITY", 12) and error["tensor"]


def test_verify_names_a_checkpoint_with_another_number(
    modicum: Path, moe: Path, tmp_path: Path
) -> None:
    run_json(modicum, "save", moe, tmp_path, "--step", 1)
    shutil.copytree(tmp_path / "step-1", tmp_path / "step-2")
    error = failure(modicum, 12, "verify", tmp_path)
    assert error["file"] == "step-2/manifest.json"
    assert (error["expected"], error["got"]) == ("step-2", "step 1")


def test_a_plain_checkpoint_may_be_called_as_a_saved_one(
    modicum: Path, moe: Path, tmp_path: Path
) -> None:
    shutil.copytree(moe, tmp_path / "step-9")
    words = ("--step", 1, "--optimizer", "adamw:fp32")
    run_json(modicum, "save", tmp_path / "step-9", tmp_path / "root", *words)
    (tmp_path / "step-9/manifest.json").write_text("{}")
    refused = failure(modicum, 19, "save", tmp_path / "step-9", tmp_path / "other", *words)
    assert refused["category"] == "UNCOMMITTED"


def test_a_save_of_a_checkpoint_with_state_warns(modicum: Path, moe: Path, tmp_path: Path) -> None:
    """Only the weights of the checkpoint are loaded."""
    words = ("--step", 1, "--optimizer", "adamw:fp32")
    assert run_json(modicum, "save", moe, tmp_path / "root", *words)["warnings"] == []
    step = tmp_path / "root/step-1"
    assert run_json(modicum, "save", step, tmp_path / "two", *words)["warnings"] == []
    (warning,) = run_json(modicum, "save", step, tmp_path / "three", *words[:2])["warnings"]
    assert "not saved again without --optimizer" in warning


def test_the_caches_digests_are_checked(modicum: Path, moe: Path, tmp_path: Path) -> None:
    """The Hugging Face cache names large files by their SHA-256."""
    blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshots/abc"
    blobs.mkdir()
    snapshot.mkdir(parents=True)
    for path in moe.iterdir():
        data = path.read_bytes()
        name = hashlib.sha256(data).hexdigest()
        (blobs / name).write_bytes(data)
        (snapshot / path.name).symlink_to(Path("../../blobs") / name)
    assert run_json(modicum, "verify", snapshot)["ok"]
    file = min(snapshot.glob("*.safetensors"))
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.resolve().write_bytes(data)
    done = run(modicum, "verify", snapshot, "--json")
    assert done.code == 12 and not done.json["ok"]
    wrong = [of["name"] for of in done.json["files"] if of["result"] != "ok"]
    assert wrong == [file.name]
    assert file.resolve().name in done.stderr


# ---- kills


@pytest.mark.parametrize("holds_files", [False, True])
def test_an_unfinished_save_is_not_committed(
    modicum: Path, moe: Path, tmp_path: Path, holds_files: bool
) -> None:
    """`verify` does not take the directory for a checkpoint, even if a model's files are in it."""
    directory = tmp_path / "checkpoint-7"
    if holds_files:
        shutil.copytree(moe, directory)
    (directory / ".partial-7-host-1-1-0").mkdir(parents=True)
    done = run(modicum, "verify", directory, "--json")
    assert done.code == 19 and not done.json["ok"]
    assert "UNCOMMITTED" in done.stderr


def test_only_saved_checkpoints_are_verified_as_such(
    modicum: Path, moe: Path, tmp_path: Path
) -> None:
    """A converted checkpoint next to the saved ones, and another program's manifest.json next
    to a model."""
    root = tmp_path / "root"
    run_json(modicum, "save", moe, root, "--step", 1)
    run_json(modicum, "convert", root / "step-1", root / "step-1-hf")
    for manifest in (None, '{"version": 1, "files": []}'):
        if manifest:
            (root / "step-1-hf/manifest.json").write_text(manifest)
        assert run_json(modicum, "verify", root / "step-1-hf")["ok"]
        files = run_json(modicum, "verify", root)["files"]
        assert {file["name"].split("/")[0] for file in files} == {"step-1"}
    (root / "step-1/COMMIT").unlink()
    (root / "step-1").rename(root / "model")  # the record alone: a checkpoint that is not committed
    assert run(modicum, "verify", root / "model", "--json").code == 19


def test_killed_saves_leave_an_intact_checkpoint(modicum: Path, gpt2: Path, tmp_path: Path) -> None:
    """A save is killed at a random moment. Then `resume` loads its checkpoint, if committed, or
    the checkpoint before; at the end the next save has removed the files of all killed ones."""
    root = tmp_path / "root"
    first = run_json(modicum, "save", gpt2, root, "--step", 1, "--ranks", 2)
    begin = time.monotonic()
    run_json(modicum, "save", gpt2, root, "--step", 2, "--ranks", 2)
    whole_s = time.monotonic() - begin
    rng = random.Random(11)
    newest, cut_short = 2, 0
    for step in range(3, 3 + KILLS):
        words = (modicum, "save", gpt2, root, "--step", step, "--ranks", 2, "--keep", 2)
        process = subprocess.Popen(
            list(map(str, words)), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        pause_s = rng.uniform(0, 1.2 * whole_s)
        time.sleep(pause_s)
        process.send_signal(signal.SIGKILL)
        is_saved = process.wait(timeout=60) == 0
        cut_short += not is_saved
        if is_saved:  # the machine may have been busy when the time was taken
            whole_s = min(whole_s, pause_s)
        resumed = run_json(modicum, "resume", root, "--ranks", 1)
        assert resumed["digest"] == first["digest"]
        assert resumed["resumed"]["step"] in ((step,) if is_saved else (newest, step))
        assert resumed["skipped"] == []
        newest = resumed["resumed"]["step"]
    assert cut_short > KILLS // 4
    time.sleep(1)  # until the ranks of the killed launchers have ended, too
    run_json(modicum, "save", gpt2, root, "--step", 1000, "--ranks", 2, "--keep", 1)
    assert sorted(path.name for path in root.iterdir()) == ["latest", "step-1000"]


def test_sigterm_leaves_no_files_of_a_save(modicum: Path, gpt2: Path, tmp_path: Path) -> None:
    for delay in (0.1, 0.3):
        words = (modicum, "save", gpt2, tmp_path / "root", "--step", int(1000 * delay))
        process = subprocess.Popen(list(map(str, words)), stderr=subprocess.PIPE, text=True)
        time.sleep(delay)
        process.terminate()
        code = process.wait(timeout=10)
        assert code in (0, 21), process.communicate()
        if code == 21 and (tmp_path / "root").exists():
            names = [path.name for path in (tmp_path / "root").iterdir()]
            assert not [name for name in names if name.startswith(".")], names
