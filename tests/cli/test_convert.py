"""The verbs `convert` and `diff`: the output has the source's values in other dtypes, names or
files; a killed conversion resumes after its finished files; every difference is named.

Soak tests kill conversions of deepseek-v3 in a memory cgroup of 1 GiB, and compare the speed with
that of cp:

    pytest tests/cli/test_convert.py -m soak -s [--full-size]

Catches: a finished file is kept although it was made from other inputs; an output is visible before
it is complete; a tie loses its second name; zeros are written into a sparse file; a difference is
not counted; the scales of dequantised codes are listed as unused; an overflow is not an error; an
overflow in a finished file is not one; a finished file whose losses were not counted is kept; a NaN
differs from a NaN of another dtype.
"""

import json
import os
import random
import shutil
import signal
import statistics
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
from cage import cage, drop_page_cache, why_no_cage
from program import failure, header_of, run, run_json, write_index

KEYS = {
    "path", "written_bytes", "kept_files", "elapsed_s", "durable", "digest", "files", "left_out",
    "nodes", "compared_bytes", "not_compared", "ranks", "warnings", "checkpoint", "overflowed",
    "underflowed", "overflowed_tensors", "underflowed_tensors",
}  # fmt: skip
MIB, GIB, GB = 1 << 20, 1 << 30, 10**9
KILLS = 20
ROUNDS = 3  # for the median of the speeds


@pytest.fixture(scope="module")
def moe(modicum: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small MoE in several files, with a tokenizer's file."""
    directory = tmp_path_factory.mktemp("convert") / "moe"
    run_json(modicum, "synth", directory, "--arch", "tiny-moe", "--shard-size", 800)
    assert len(list(directory.glob("*.safetensors"))) > 2
    (directory / "tokenizer.json").write_text("{}")
    return directory


def tensors_of(directory: Path) -> dict[str, Any]:
    """All tensors of a checkpoint as torch tensors, by name."""
    safetensors = pytest.importorskip("safetensors.torch")
    files = sorted(directory.glob("*.safetensors"))
    return {name: value for file in files for name, value in safetensors.load_file(file).items()}


def hidden_beside(out: Path) -> list[str]:
    """The names of unfinished outputs and journals, which begin with a dot."""
    return [path.name for path in out.parent.iterdir() if path.name.startswith(".")]


# ---- convert


def test_output_equals_the_loaded_model(modicum: Path, moe: Path, tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    out = tmp_path / "out"
    converted = run_json(modicum, "convert", moe, out, "--dtype", "float32")
    assert set(converted) >= KEYS
    for words in ((out,), (moe, "--dtype", "fp32")):
        assert converted["digest"] == run_json(modicum, "load", *words, "--digest")["digest"]
    assert converted["written_bytes"] == sum(path.stat().st_size for path in out.iterdir())
    source, result = tensors_of(moe), tensors_of(out)
    assert set(result) == set(source)
    for name, tensor in source.items():
        expected = tensor.float() if tensor.is_floating_point() else tensor
        assert torch.equal(result[name], expected), name
    assert json.loads((out / "config.json").read_text())["torch_dtype"] == "float32"
    assert (out / "tokenizer.json").read_text() == "{}"
    assert len(list(out.glob("*.safetensors"))) == len(list(moe.glob("*.safetensors")))
    assert hidden_beside(out) == []


def test_codes_are_dequantised(modicum: Path, tmp_path: Path) -> None:
    safetensors = pytest.importorskip("safetensors.torch")
    torch = pytest.importorskip("torch")
    fp8, out = tmp_path / "fp8", tmp_path / "out"
    run_json(modicum, "synth", fp8, "--arch", "tiny-fp8")
    run_json(modicum, "convert", fp8, out, "--dtype", "bfloat16", "--shard-size", "20KB")
    source, result = tensors_of(fp8), tensors_of(out)
    config = json.loads((out / "config.json").read_text())
    assert "quantization_config" not in config
    rows, columns = json.loads((fp8 / "config.json").read_text())["quantization_config"][
        "weight_block_size"
    ]
    scales = {name for name in source if name.endswith("_scale_inv")}
    assert scales and set(result) == set(source) - scales
    for name, tensor in source.items():
        if name + "_scale_inv" not in source:
            continue
        scale = source[name + "_scale_inv"].float()
        wide = scale.repeat_interleave(rows, 0).repeat_interleave(columns, 1)
        expected = tensor.float() * wide[: tensor.shape[0], : tensor.shape[1]]
        assert torch.equal(result[name], expected.bfloat16()), name
    files = [safetensors.load_file(path) for path in out.glob("*.safetensors")]
    assert len(files) > 1
    for tensors in files:  # a tensor larger than --shard-size has a file of its own
        assert len(tensors) == 1 or sum(t.nbytes for t in tensors.values()) <= 20_000


def test_codes_are_dequantised_into_one_file(modicum: Path, tmp_path: Path) -> None:
    """The values equal those of a conversion into several files."""
    fp8, parts, whole = tmp_path / "fp8", tmp_path / "parts", tmp_path / "whole"
    run_json(modicum, "synth", fp8, "--arch", "tiny-fp8")
    run_json(modicum, "convert", fp8, parts, "--dtype", "bfloat16", "--shard-size", "20KB")
    done = run_json(modicum, "convert", fp8, whole, "--dtype", "bfloat16")
    assert len(done["files"]) == 1
    assert run(modicum, "diff", parts, whole).code == 0


def test_a_tie_that_is_stored_twice_is_written_twice(modicum: Path, tmp_path: Path) -> None:
    safetensors = pytest.importorskip("safetensors.numpy")
    numpy = pytest.importorskip("numpy")
    tied = tmp_path / "tied"
    tied.mkdir()
    rows = numpy.arange(12, dtype=numpy.float32).reshape(4, 3)
    stored = {"model.embed_tokens.weight": rows, "lm_head.weight": rows, "norm": rows[0]}
    safetensors.save_file(stored, tied / "model.safetensors")
    (tied / "config.json").write_text('{"tie_word_embeddings": true}')
    run_json(modicum, "convert", tied, tmp_path / "out")
    result = safetensors.load_file(tmp_path / "out/model.safetensors")
    assert {name: value.tolist() for name, value in result.items()} == {
        name: value.tolist() for name, value in stored.items()
    }
    assert run(modicum, "diff", tied, tmp_path / "out").code == 0


def test_targets_of_a_recipe_are_written(modicum: Path, moe: Path, tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    source = tensors_of(moe)
    experts = sorted(name for name in source if ".experts." in name and "gate_proj" in name)
    first, *others = (name for name in source if name not in experts)
    targets: dict[str, object] = {name: {"op": "stored", "name": name} for name in others}
    inputs = [{"op": "stored", "name": name} for name in experts]
    targets["stacked"] = {"op": "stack", "dim": 0, "in": inputs}
    recipe = tmp_path / "r.json"
    recipe.write_text(json.dumps({"targets": targets, "unused": [first]}))
    converted = run_json(modicum, "convert", moe, tmp_path / "out", "--recipe", recipe)
    assert converted["left_out"] == [first]
    result = tensors_of(tmp_path / "out")
    assert set(result) == {*others, "stacked"}
    assert torch.equal(result["stacked"], torch.stack([source[name] for name in experts]))


def test_a_saved_checkpoint_becomes_a_plain_one(modicum: Path, moe: Path, tmp_path: Path) -> None:
    run_json(modicum, "save", moe, tmp_path / "root", "--step", 1, "--ranks", 2)
    run_json(modicum, "convert", tmp_path / "root/step-1", tmp_path / "out")
    assert run(modicum, "diff", moe, tmp_path / "out").code == 0
    assert not {"COMMIT", "manifest.json"} & {path.name for path in (tmp_path / "out").iterdir()}


def test_holes_are_kept_with_sparse_only(modicum: Path, tmp_path: Path) -> None:
    sparse = tmp_path / "sparse"
    run_json(modicum, "synth", sparse, "--arch", "qwen3-0.6b", "--layers", 2, "--sparse")
    for flag, least, most in (("--sparse", 0, MIB), (None, 100 * MIB, 2000 * MIB)):
        out = tmp_path / f"out{least}"
        run_json(modicum, "convert", sparse, out, flag)
        assert least <= allocated_bytes(out) < most
        assert run(modicum, "diff", sparse, out).code == 0


def test_an_existing_output_is_refused(modicum: Path, moe: Path, tmp_path: Path) -> None:
    directory, dangling = tmp_path / "directory", tmp_path / "dangling"
    directory.mkdir()
    dangling.symlink_to("nowhere")
    for out in (directory, dangling):
        error = failure(modicum, 20, "convert", moe, out)
        assert error["category"] == "CONFLICT" and error["file"] == out.name
    assert list(directory.iterdir()) == [] and hidden_beside(directory) == []


def test_too_small_a_budget_is_refused(modicum: Path, moe: Path, tmp_path: Path) -> None:
    error = failure(modicum, 15, "convert", moe, tmp_path / "out", "--budget", "1MiB")
    assert error["category"] == "BUDGET"
    assert list(tmp_path.iterdir()) == []


def test_a_missing_parent_of_the_output_is_made(modicum: Path, moe: Path, tmp_path: Path) -> None:
    """One missing directory is made; two are an error."""
    out = tmp_path / "new" / "out"
    run_json(modicum, "convert", moe, out)
    assert (out / "model.safetensors.index.json").is_file()
    error = failure(modicum, 13, "convert", moe, tmp_path / "no" / "such" / "out")
    assert error["category"] == "IO"


def write_twelve_files(directory: Path) -> None:
    """A checkpoint of twelve files, each with one tensor of 8 MiB."""
    safetensors = pytest.importorskip("safetensors.numpy")
    numpy = pytest.importorskip("numpy")
    directory.mkdir()
    names = [f"model-{f:05}-of-00012.safetensors" for f in range(1, 13)]
    rng = numpy.random.default_rng(0)
    for name in names:
        values = rng.standard_normal((1024, 2048), dtype=numpy.float32)
        safetensors.save_file({name[:11]: values}, directory / name)
    index = {"metadata": {}, "weight_map": {name[:11]: name for name in names}}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))


def finished_files(journal: Path) -> list[str]:
    """The names of the finished files in a conversion's journal; none before there is a journal.
    Each update replaces the journal by a rename, so it is never read half written."""
    try:
        return [file["name"] for file in json.loads(journal.read_text())["files"]]
    except FileNotFoundError:
        return []


def wait_for_files(process: subprocess.Popen[bytes], journal: Path, count: int) -> None:
    """Waits until `count` files are finished or the process has ended."""
    while process.poll() is None and len(finished_files(journal)) < count:
        time.sleep(0.001)


def test_killed_conversions_are_resumed(modicum: Path, tmp_path: Path) -> None:
    """A conversion is killed at random moments and started again, until it succeeds. Before that no
    output is visible; no finished file is written again."""
    source, out = tmp_path / "source", tmp_path / "out"
    write_twelve_files(source)
    whole = run_json(modicum, "convert", source, tmp_path / "whole", "--dtype", "bf16")
    journal = tmp_path / ".out.journal"
    words = [str(word) for word in (modicum, "convert", source, out, "--dtype", "bf16")]
    inodes: dict[str, int] = {}
    rng, killed = random.Random(5), 0
    for _ in range(8):
        process = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        wait_for_files(process, journal, len(inodes) + rng.randrange(2))
        time.sleep(rng.uniform(0, 0.02))
        process.send_signal(signal.SIGKILL)
        if process.wait(timeout=60) == 0:
            break
        killed += 1
        assert not out.exists()
        time.sleep(0.3)  # until the rank of the killed launcher has ended, too
        for name in finished_files(journal):
            inode = (tmp_path / ".out.partial" / name).stat().st_ino
            assert inodes.setdefault(name, inode) == inode
    assert killed > 1 and inodes
    if not out.exists():
        converted = run_json(modicum, *words[1:])
        assert converted["kept_files"] == len(inodes)
        assert converted["digest"] == whole["digest"]
    assert all((out / name).stat().st_ino == inode for name, inode in inodes.items())
    assert run(modicum, "diff", tmp_path / "whole", out).code == 0
    assert hidden_beside(out) == []


def test_finished_files_of_other_inputs_are_dropped(modicum: Path, tmp_path: Path) -> None:
    source, out, journal = tmp_path / "source", tmp_path / "out", tmp_path / ".out.journal"
    write_twelve_files(source)
    words = [str(word) for word in (modicum, "convert", source, out, "--dtype", "fp16")]
    process = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 60
    while not (journal.exists() and json.loads(journal.read_text())["files"]):
        assert time.monotonic() < deadline and process.poll() is None
    error = failure(modicum, 20, "convert", source, out)  # the other process is alive
    assert ".out.journal" in error["message"] and str(process.pid) in error["got"]
    process.kill()
    process.wait()
    time.sleep(0.3)  # until the rank of the killed launcher has ended, too
    assert run_json(modicum, "convert", source, out, "--dtype", "bf16")["kept_files"] == 0
    run_json(modicum, "convert", source, tmp_path / "whole", "--dtype", "bf16")
    assert run(modicum, "diff", tmp_path / "whole", out).code == 0


def test_a_journal_with_a_damaged_digest_is_not_used(modicum: Path, tmp_path: Path) -> None:
    """The output has the digests of its files in COMMIT; those of a damaged journal would be wrong.
    All files are converted again."""
    source, out, journal = tmp_path / "source", tmp_path / "out", tmp_path / ".out.journal"
    write_twelve_files(source)
    words = [str(word) for word in (modicum, "convert", source, out, "--dtype", "bf16")]
    process = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    wait_for_files(process, journal, 1)
    process.kill()
    process.wait()
    time.sleep(0.3)  # until the rank of the killed launcher has ended, too
    document = json.loads(journal.read_text())
    document["files"][0]["digest"] = "x" + document["files"][0]["digest"][1:]
    journal.write_text(json.dumps(document))
    assert run_json(modicum, *words[1:])["kept_files"] == 0
    assert run(modicum, "verify", out).code == 0


# ---- the range of the new dtype


def write_wide_values(directory: Path) -> dict[str, Any]:
    """A checkpoint of three files with values on both sides of float16's bounds. The last file has
    the values that become infinite."""
    safetensors = pytest.importorskip("safetensors.numpy")
    numpy = pytest.importorskip("numpy")
    rng = numpy.random.default_rng(7)
    mixed = (rng.standard_normal((40, 300)) * 10.0 ** rng.integers(-12, 9, (40, 300))).astype("f4")
    mixed[:2] = 1
    tensors = {
        "norm": numpy.ones(4, dtype="f4"),
        "small": numpy.array([2.0**-24, 2.0**-25, 1e-12, -1e-12, 0, -0.0], dtype="f4"),
        "edge": numpy.array([[65504, 65519], [-65520, 65520]], dtype="f4"),
        "mixed": mixed,
        "infinite": numpy.array([numpy.inf, numpy.nan, -numpy.inf], dtype="f4"),
    }
    directory.mkdir()
    files = {"norm": 1, "small": 2, "edge": 3, "mixed": 3, "infinite": 3}
    names = {name: f"model-{f:05}-of-00003.safetensors" for name, f in files.items()}
    for file in set(names.values()):
        held = {name: value for name, value in tensors.items() if names[name] == file}
        safetensors.save_file(held, directory / file)
    index = {"metadata": {}, "weight_map": names}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    return tensors


def losses_as_numpy(tensors: dict[str, Any]) -> dict[str, Any]:
    """What a cast to float16 loses: the keys of a conversion's report, by numpy."""
    numpy = pytest.importorskip("numpy")
    overflowed: list[dict[str, Any]] = []
    underflowed: list[dict[str, Any]] = []
    for name, value in sorted(tensors.items()):
        with numpy.errstate(all="ignore"):
            half = value.astype("f2")
        over = numpy.isfinite(value) & numpy.isinf(half)
        under = (value != 0) & (half == 0)
        zeros = {"tensor": name, "underflowed": int(under.sum())}
        if over.any():
            values = value[over].astype(float)
            overflowed.append({
                **zeros, "overflowed": int(over.sum()), "first_value": values[0],
                "first_index": int(over.ravel().argmax()), "largest": abs(values).max(),
            })  # fmt: skip
        if under.any():
            underflowed.append(zeros)
    return {
        "overflowed": sum(of["overflowed"] for of in overflowed),
        "underflowed": sum(of["underflowed"] for of in underflowed),
        "overflowed_tensors": overflowed,
        "underflowed_tensors": underflowed,
    }


def losses_in(report: dict[str, Any]) -> dict[str, Any]:
    lists = {key: report[key] for key in ("overflowed_tensors", "underflowed_tensors")}
    by_name = {key: sorted(of, key=lambda row: row["tensor"]) for key, of in lists.items()}
    return {"overflowed": report["overflowed"], "underflowed": report["underflowed"], **by_name}


def test_overflow_is_an_error_unless_it_is_allowed(modicum: Path, tmp_path: Path) -> None:
    """The error names the first value. A repetition with --allow-overflow keeps the finished files
    and their counts."""
    numpy = pytest.importorskip("numpy")
    source, out = tmp_path / "source", tmp_path / "out"
    tensors = write_wide_values(source)
    words = ("convert", source, out, "--dtype", "float16")
    error = failure(modicum, 2, *words)
    assert error["category"] == "MISMATCH" and error["tensor"] == "edge"
    assert error["file"] == "model-00003-of-00003.safetensors"
    assert error["expected"] == "magnitudes of at most 65504" and error["got"] == "-65520"
    assert "2 finite values" in error["message"] and "element 2;" in error["message"]
    assert not out.exists()

    report = run_json(modicum, *words, "--allow-overflow")
    assert report["kept_files"] == 2 and hidden_beside(out) == []
    expected = losses_as_numpy(tensors)
    assert losses_in(report) == expected
    assert len(expected["overflowed_tensors"]) == len(expected["underflowed_tensors"]) == 2
    overflow, underflow = report["warnings"]
    assert f"{expected['overflowed']} values of 2 tensors became infinite" in overflow
    assert f"{expected['underflowed']} values of 2 tensors became zero" in underflow
    assert overflow.endswith("in mixed") and underflow.endswith("in mixed")
    for name, value in tensors_of(out).items():
        with numpy.errstate(all="ignore"):
            half = tensors[name].astype("f2")
        assert numpy.array_equal(value.numpy(), half, equal_nan=True), name
    text = run(modicum, *words[:2], tmp_path / "again", *words[3:], "--allow-overflow").stdout
    assert overflow in text and underflow in text


def test_losses_of_dequantised_codes_are_counted(modicum: Path, tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    safetensors = pytest.importorskip("safetensors.torch")
    source, out = tmp_path / "source", tmp_path / "out"
    source.mkdir()
    codes = (torch.arange(256, dtype=torch.int32) % 127).to(torch.uint8).view(torch.float8_e4m3fn)
    scales = torch.tensor([[1.0], [1e3], [1e-6], [0.0]])
    tensors = {"w.weight": codes.reshape(4, 64), "w.weight_scale_inv": scales}
    safetensors.save_file(tensors, source / "model.safetensors")
    quantization = {"quant_method": "fp8", "weight_block_size": [1, 64]}
    (source / "config.json").write_text(json.dumps({"quantization_config": quantization}))
    report = run_json(modicum, "convert", source, out, "--dtype", "fp16", "--allow-overflow")
    wide = tensors["w.weight"].float() * scales
    half = wide.half()
    assert torch.equal(tensors_of(out)["w.weight"], half)
    (overflow,) = report["overflowed_tensors"]
    assert overflow["largest"] == wide.max().item() > 65504
    assert report["overflowed"] == (half.isinf() & wide.isfinite()).sum().item() > 0
    assert report["underflowed"] == ((half == 0) & (wide != 0)).sum().item() > 0


def killed_after_a_file(words: list[str], journal: Path) -> dict[str, Any]:
    """The journal of a conversion that was killed after its first file or a later one."""
    process = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    wait_for_files(process, journal, 1)
    process.kill()
    assert process.wait() != 0
    time.sleep(0.3)  # until the rank of the killed launcher has ended, too
    return json.loads(journal.read_text())


def test_losses_of_finished_files_are_kept(modicum: Path, tmp_path: Path) -> None:
    """In the journal of a killed conversion: without --allow-overflow they are an error, too. Files
    of a journal without them, as older versions have written, are converted again; unless no cast
    can lose anything."""
    numpy = pytest.importorskip("numpy")
    safetensors = pytest.importorskip("safetensors.numpy")
    source, out, journal = tmp_path / "source", tmp_path / "out", tmp_path / ".out.journal"
    write_twelve_files(source)
    values = numpy.ones((1024, 2048), dtype="f4")
    values[1, 5:8] = 1e6, 1e-9, -1e5
    safetensors.save_file({"model-00001": values}, source / "model-00001-of-00012.safetensors")
    words = [str(word) for word in (modicum, "convert", source, out, "--dtype", "fp16")]
    kept = killed_after_a_file([*words, "--allow-overflow"], journal)
    error = failure(modicum, 2, *words[1:])
    assert (error["tensor"], error["got"]) == ("model-00001", "1000000")
    assert error["file"] == "model-00001-of-00012.safetensors"
    report = run_json(modicum, *words[1:], "--allow-overflow")
    assert report["kept_files"] == len(kept["files"]) and report["overflowed"] == 2
    (row,) = report["overflowed_tensors"]
    assert (row["tensor"], row["first_index"], row["largest"]) == ("model-00001", 2053, 1e6)

    for dtype, keeps in (("fp16", False), ("fp32", True)):
        shutil.rmtree(out)
        words[-1] = dtype
        older = killed_after_a_file([*words, "--allow-overflow"], journal)
        for file in older["files"]:
            del file["losses"]
        journal.write_text(json.dumps(older))
        again = run_json(modicum, *words[1:], "--allow-overflow")
        assert again["kept_files"] == (len(older["files"]) if keeps else 0)
        assert again["overflowed"] == (0 if keeps else 2)


# ---- convert in a memory cgroup


# Shapes of the weights of one of deepseek-v3's experts.
EXPERT = {"gate": (2048, 7168), "up": (2048, 7168), "down": (7168, 2048)}
BLOCK = 128
EXPERTS_PER_FILE = 2


def fp8_experts(modicum: Path, directory: Path, size_bytes: int) -> Path:
    """A checkpoint of deepseek-v3's config.json and about `size_bytes` of experts in FP8: random
    codes, none of them NaN (0x7F), and their scales."""
    safetensors = pytest.importorskip("safetensors.torch")
    torch = pytest.importorskip("torch")
    shapes = directory.with_name("shapes")
    run_json(modicum, "synth", shapes, "--arch", "deepseek-v3", "--layers", 1, "--sparse")
    directory.mkdir()
    (directory / "config.json").write_bytes((shapes / "config.json").read_bytes())
    one = sum(rows * columns for rows, columns in EXPERT.values())
    files = size_bytes // (EXPERTS_PER_FILE * one)
    rng = torch.Generator().manual_seed(0)
    weight_map: dict[str, str] = {}
    for file in range(files):
        tensors = {}
        for expert in range(EXPERTS_PER_FILE * file, EXPERTS_PER_FILE * (file + 1)):
            for kind, (rows, columns) in EXPERT.items():
                name = f"model.layers.3.mlp.experts.{expert}.{kind}_proj.weight"
                codes = torch.randint(0, 0x7F, (rows, columns), generator=rng, dtype=torch.uint8)
                tensors[name] = codes.view(torch.float8_e4m3fn)
                tensors[f"{name}_scale_inv"] = torch.rand(
                    rows // BLOCK, columns // BLOCK, generator=rng
                )
        of_file = f"model-{file + 1:05}-of-{files:05}.safetensors"
        safetensors.save_file(tensors, directory / of_file)
        weight_map |= dict.fromkeys(tensors, of_file)
    write_index(directory, weight_map, files * EXPERTS_PER_FILE * one)
    return directory


def in_1_gib(words: list[str], kill_after_s: float | None = None) -> dict[str, Any] | None:
    """Runs a conversion in a memory cgroup of 1 GiB. Returns its JSON, or None if it was killed
    after `kill_after_s`."""
    with cage(GIB) as inside:
        process = inside.start(*words)
        try:
            output = process.communicate(timeout=kill_after_s)
        except subprocess.TimeoutExpired:
            output = None
        kills = inside.oom_kills()
    # The end of `with cage` has killed a process that still ran.
    stdout, stderr = output or process.communicate()
    if process.returncode == -signal.SIGKILL and kill_after_s is not None and kills == 0:
        return None
    assert process.returncode == 0 and kills == 0, f"{kills} OOM kills\n{stderr}"
    return json.loads(stdout)


def finished_inodes(out: Path) -> dict[str, tuple[int, int]]:
    """The inode and mtime of each finished file: one of them changes if it is written again."""
    partial, found = out.parent / f".{out.name}.partial", {}
    for name in finished_files(out.parent / f".{out.name}.journal"):
        status = (partial / name).stat()
        found[name] = (status.st_ino, status.st_mtime_ns)
    return found


def kills_until_done(words: list[str], out: Path, whole: dict[str, Any], rng: random.Random) -> int:
    """Kills a conversion at random moments, up to `KILLS` times, and then lets it end. Asserts that
    no finished file is written again. `whole` is the JSON of a conversion that was not killed.
    Returns the number of kills."""
    finished: dict[str, tuple[int, int]] = {}
    killed, most_s = 0, 2 * whole["elapsed_s"] / KILLS
    while (done := in_1_gib(words, rng.uniform(0, most_s) if killed < KILLS else None)) is None:
        killed += 1
        assert not out.exists(), "visible before it is whole"
        found = finished_inodes(out)
        assert found.items() >= finished.items(), "a finished file was written again"
        finished = found
    print(f"{killed} kills: {len(finished)} of {len(done['files'])} files were kept")
    assert done["kept_files"] == len(finished) and done["digest"] == whole["digest"]
    for name, (inode, mtime_ns) in finished.items():
        status = (out / name).stat()
        assert (status.st_ino, status.st_mtime_ns) == (inode, mtime_ns), name
    return killed


@pytest.fixture(scope="module")
def fp8(modicum: Path, tmp_path_factory: pytest.TempPathFactory, is_full_size: bool) -> Path:
    folder = tmp_path_factory.mktemp("fp8") / "experts"
    return fp8_experts(modicum, folder, (10 if is_full_size else 2) * GB)


@pytest.fixture(scope="module")
def sparse(modicum: Path, tmp_path_factory: pytest.TempPathFactory, is_full_size: bool) -> Path:
    """deepseek-v3 as sparse files: 8 of its 61 layers, or all of them at full size."""
    folder = tmp_path_factory.mktemp("sparse") / "deepseek-v3"
    layers = () if is_full_size else ("--layers", 8)
    run_json(modicum, "synth", folder, "--arch", "deepseek-v3", "--sparse", *layers)
    make_scales_positive(folder)
    return folder


def make_scales_positive(directory: Path) -> None:
    """Clears the signs of the scales in a sparse checkpoint. A code of zero times a negative scale
    is -0, whose bytes are not all zero, so that the output would have no holes."""
    for path in directory.glob("*.safetensors"):
        header, data = header_of(path)
        extents = [of["data_offsets"] for name, of in header.items() if name.endswith("_scale_inv")]
        with path.open("r+b") as file:
            for begin, end in extents:
                file.seek(data + begin)
                values = bytearray(file.read(min(end - begin, 4096)))  # the rest is a hole
                values[3::4] = bytes(byte & 0x7F for byte in values[3::4])
                file.seek(data + begin)
                file.write(values)


def allocated_bytes(directory: Path) -> int:
    return 512 * sum(path.stat().st_blocks for path in directory.iterdir())


patient = pytest.mark.timeout(7200)
caged = pytest.mark.skipif(why_no_cage() is not None, reason=str(why_no_cage()))


@pytest.mark.soak
@patient
@caged
@pytest.mark.parametrize("kind", ("fp8", "sparse"))
def test_conversions_killed_within_1_gib_are_resumed(
    modicum: Path, tmp_path: Path, kind: str, request: pytest.FixtureRequest
) -> None:
    """Conversions of FP8 to bfloat16 are killed 20 times at random moments. pytest's `-s` shows the
    sizes and speeds."""
    source, out = request.getfixturevalue(kind), tmp_path / "out"
    words = [str(modicum), "convert", str(source), "--dtype", "bf16", "--json"]
    words += ["--sparse"] if kind == "sparse" else []
    whole = in_1_gib([*words, str(tmp_path / "whole")])
    assert whole is not None
    if kind == "sparse":
        assert allocated_bytes(tmp_path / "whole") < 2 * allocated_bytes(source) + GB
    size = sum(file["bytes"] for file in whole["files"])
    print(f"\n{kind}: {size / GB:.2f} GB in {whole['elapsed_s']:.1f} s")
    killed, rng = 0, random.Random(11)
    while killed < KILLS:
        shutil.rmtree(out, ignore_errors=True)
        killed += kills_until_done([*words, str(out)], out, whole, rng)
    assert hidden_beside(out) == []
    if kind == "fp8":  # in the sparse ones `diff` would read 100 GB of zeros or more
        assert run(modicum, "diff", tmp_path / "whole", out, timeout_s=1800).code == 0
    shutil.rmtree(tmp_path)  # at full size 40 GB on disk, which the next test needs


@pytest.mark.soak
@patient
@caged
def test_a_conversion_is_nearly_as_fast_as_cp(modicum: Path, fp8: Path, tmp_path: Path) -> None:
    """A conversion of FP8 writes at least 0.8 times the bytes per second of `cp` of its output,
    which reads twice as many bytes. Both begin with an empty page cache, and end when the files are
    durable. pytest's `-s` shows the figures."""
    out, copy = tmp_path / "out", tmp_path / "copy"
    convert = [str(modicum), "convert", str(fp8), str(out), "--dtype", "bf16", "--json"]
    seconds: dict[str, list[float]] = {"convert": [], "cp": []}
    written = 0
    for _ in range(ROUNDS):
        shutil.rmtree(out, ignore_errors=True)
        os.sync()
        drop_page_cache(fp8)
        begin = time.monotonic()
        done = in_1_gib(convert)
        seconds["convert"].append(time.monotonic() - begin)
        assert done is not None
        written = done["written_bytes"]
        drop_page_cache(out)
        begin = time.monotonic()
        subprocess.run(["cp", "-r", out, copy], check=True)
        os.sync()
        seconds["cp"].append(time.monotonic() - begin)
        shutil.rmtree(copy)
    rates = {name: written / 1e6 / statistics.median(of) for name, of in seconds.items()}
    shutil.rmtree(out)
    print(f"\n{written / GB:.2f} GB; MB/s: {rates}; seconds: {seconds}")
    assert rates["convert"] >= 0.8 * rates["cp"]


# ---- diff


def test_differences_are_named(modicum: Path, tmp_path: Path) -> None:
    safetensors = pytest.importorskip("safetensors.numpy")
    numpy = pytest.importorskip("numpy")
    a = {
        "same": numpy.arange(8, dtype=numpy.float32),
        "values": numpy.zeros((3, 4), dtype=numpy.float32),
        "dtype": numpy.zeros(2, dtype=numpy.float32),
        "shape": numpy.zeros((2, 3), dtype=numpy.float32),
        "gone": numpy.zeros(5, dtype=numpy.float32),
    }
    b = {**a, "dtype": numpy.zeros(2, dtype=numpy.float16), "shape": numpy.zeros((3, 2), "f4")}
    b["new"] = b.pop("gone")
    b["values"] = a["values"].copy()
    b["values"][1, 1] = -0.0  # another bit pattern
    b["values"][2, 3] = 1
    for name, tensors in (("a", a), ("b", b)):
        (tmp_path / name).mkdir()
        safetensors.save_file(tensors, tmp_path / name / "model.safetensors")
    done = run(modicum, "diff", tmp_path / "a", tmp_path / "b", "--json")
    assert done.code == 12 and "differ" in done.stderr
    found = {row["tensor"]: row for row in done.json["differences"]}
    assert {name: row["kind"] for name, row in found.items()} == {
        "values": "values", "dtype": "dtype", "shape": "shape", "gone": "only_in_a",
        "new": "only_in_b",
    }  # fmt: skip
    assert (found["values"]["first_index"], found["values"]["count"]) == (5, 2)
    assert (found["values"]["largest_index"], found["values"]["largest_difference"]) == (11, 1)
    text = run(modicum, "diff", tmp_path / "a", tmp_path / "b").stdout
    assert "2 elements, the first at [1, 1], the largest difference is 1 at [2, 3]" in text
    assert found["gone"]["count"] == 5
    assert run_json(modicum, "diff", tmp_path / "a", tmp_path / "a")["differences"] == []


def test_values_of_two_dtypes_are_compared_after_rounding(modicum: Path, tmp_path: Path) -> None:
    """A mutant must fail here: a NaN is equal to a NaN of another dtype."""
    torch = pytest.importorskip("torch")
    safetensors = pytest.importorskip("safetensors.torch")
    torch.manual_seed(0)
    wide = torch.randn(6, 50) * 100
    wide[0, :4] = torch.tensor([float("nan"), 1e6, 1e-12, -0.0])
    a = {name: wide.clone() for name in ("equal", "brain", "differs", "infinite")}
    a["ids"] = torch.arange(4)
    b = {name: value.half() for name, value in a.items()}
    b["brain"] = wide.bfloat16()
    b["differs"][2, 7] += 0.5
    b["differs"][5, 9] += 8
    b["infinite"][4, 1] = float("inf")
    a["halves"], b["halves"] = wide.bfloat16(), wide.bfloat16().half()
    for name, tensors in (("a", a), ("b", b)):
        (tmp_path / name).mkdir()
        safetensors.save_file(tensors, tmp_path / name / "model.safetensors")
    for first, second in (("a", "b"), ("b", "a")):
        done = run(modicum, "diff", tmp_path / first, tmp_path / second, "--json")
        assert done.code == 12
        found = {row.pop("tensor"): row for row in done.json["differences"]}
        assert {row["kind"] for row in found.values()} == {"dtype"}
        for name in ("equal", "brain", "halves"):
            assert found[name]["equal_after_rounding"] and found[name]["count"] == 0, name
            narrow = "bfloat16" if name == "brain" else "float16"
            assert found[name]["rounded_to"] == narrow and "largest_difference" not in found[name]
            assert found[name]["overflowed"] == (name != "brain"), name  # 1e6
        differs = found["differs"]
        assert not differs["equal_after_rounding"]
        assert (differs["count"], differs["first_index"], differs["largest_index"]) == (2, 107, 259)
        by = abs(wide[5, 9].double() - b["differs"][5, 9].double()).item()
        assert differs["largest_difference"] == by
        assert found["infinite"]["largest_difference"] is None and found["infinite"]["count"] == 1
        assert not found["ids"]["compared"] and found["ids"]["count"] == 4
        compared = (a if first == "a" else b).items()
        sizes = [value.nbytes for name, value in compared if name != "ids"]
        assert done.json["bytes_compared"] == sum(sizes)
    lines = run(modicum, "diff", tmp_path / "a", tmp_path / "b").stdout.splitlines()
    lost = "equal after rounding to float16, 1 finite value became infinite"
    assert f"equal: dtype float32 vs float16; {lost}" in lines
    assert "ids: dtype int64 vs float16; values not compared" in lines
    (line,) = [line for line in lines if line.startswith("differs:")]
    assert "; 2 values differ after rounding to float16, 1 finite value became infinite, " in line
    assert line.endswith(f"the largest difference is {by:.6g} at [5, 9]")
    end = ": 6 differences, 3 of dtype only: values are equal after rounding"
    assert lines[-1].endswith(end) and not done.json["equal_after_rounding"]
    for name in ("differs", "infinite", "ids"):
        for path, tensors in (("a", a), ("b", b)):
            tensors.pop(name)
            safetensors.save_file(tensors, tmp_path / path / "model.safetensors")
    text = run(modicum, "diff", tmp_path / "a", tmp_path / "b")
    end = "; all values are equal after rounding, 2 finite values became infinite\n"
    assert text.code == 12 and text.stderr.endswith(f"(dtype){end}")
    assert text.stdout.endswith(f" compared: 3 dtypes differ{end}")
    done = run(modicum, "diff", tmp_path / "a", tmp_path / "b", "--json")
    assert (done.code, done.json["equal"], done.json["equal_after_rounding"]) == (12, False, True)


def test_every_flipped_bit_is_a_difference(modicum: Path, moe: Path, tmp_path: Path) -> None:
    run_json(modicum, "convert", moe, tmp_path / "out")
    files = sorted((tmp_path / "out").glob("*.safetensors"))
    rng = random.Random(3)
    for _ in range(20):
        file = rng.choice(files)
        before = file.read_bytes()
        data = 8 + int.from_bytes(before[:8], "little")
        at = rng.randrange(data, len(before))
        changed = bytearray(before)
        changed[at] ^= 1 << rng.randrange(8)
        file.write_bytes(changed)
        report = run(modicum, "diff", moe, tmp_path / "out", "--json")
        assert report.code == 12
        (difference,) = report.json["differences"]
        assert difference["kind"] == "values" and difference["count"] == 1
        file.write_bytes(before)
    assert run(modicum, "diff", moe, tmp_path / "out").code == 0
