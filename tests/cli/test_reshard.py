"""The verb `reshard`: writes a step (a saved checkpoint directory) again, with its tensors in other
files or its optimizer state in another format. The result is a step: `verify` passes it, and
`resume` continues from it, with the bits of uninterrupted training if both formats hold the same
values. A killed reshard resumes after its finished files, and the same inputs give the same bytes.

Catches: a file without tensors is left out; values are not compared with the digests of the step;
weights keep the rounding of the old format; moments are rounded with the random bits of another
step, or in the blocks of other rows; the new step has a digest of the old values; a finished file
is removed; an output is visible before it is committed.
"""

import json
import random
import signal
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from program import (
    failure,
    flip_bit,
    offset_of,
    run_json,
    stored,
    write_checkpoint,
    write_recipe,
)

torch = pytest.importorskip("torch")
safetensors = pytest.importorskip("safetensors.torch")

SHAPES = {
    "embed.weight": (40, 128),
    "norm.weight": (131,),
    "q_proj.weight": (33, 256),
    "up_proj.weight": (6, 1100),  # rows that no block of 128 divides
    "down_proj.weight": (300, 129),
    "wide.weight": (3, 40000),  # converted in several windows
    "whole.weight": (17, 256),  # kept in fp32
}
FORMATS = ("fp32", "fp32-split", "bf16-moments", "int8-moments", "int8-moments-24")
# Pairs of an old and a new format, where the new one holds every value of the old one exactly.
EXACT = (
    ("fp32", "fp32-split"), ("fp32-split", "fp32"), ("bf16-moments", "fp32-split"),
    ("bf16-moments", "fp32"), ("int8-moments-24", "int8-moments"), ("int8-moments", "fp32"),
    ("int8-moments-24", "fp32"),
)  # fmt: skip
BEFORE, AFTER = 3, 2  # optimizer steps before and after the reshard
SEED = 5


@dataclass(frozen=True)
class Saved:
    """A model, and for each format a root with a step of it, made when first asked for."""

    modicum: Path
    directory: Path
    roots: Path

    def root(self, state_format: str) -> Path:
        root = self.roots / state_format
        if not root.exists():
            run_json(
                self.modicum, "save", self.directory, root, "--step", BEFORE, "--steps", BEFORE,
                "--seed", SEED, "--optimizer", f"adamw:{state_format}", "--ranks", 2,
                "--keep-fp32", "whole",
            )  # fmt: skip
        return root

    def step(self, state_format: str) -> Path:
        return self.root(state_format) / f"step-{BEFORE}"

    def resumed(self, root: Path, ranks: int = 2, steps: int = AFTER) -> tuple[str, str]:
        """Resumes the newest step of `root`, or `root` if it is a step, and makes `steps` optimizer
        steps. Returns the digests of model and state."""
        words = ("--ranks", ranks, "--steps", steps)
        done = run_json(self.modicum, "resume", root, *words)
        return done["digest"], done["state_digest"]


@pytest.fixture(scope="module")
def saved(modicum: Path, tmp_path_factory: pytest.TempPathFactory) -> Saved:
    folder = tmp_path_factory.mktemp("reshard")
    rng = torch.Generator().manual_seed(3)
    tensors = {
        name: torch.randn(shape, generator=rng).mul(0.05).to(torch.bfloat16)
        for name, shape in SHAPES.items()
    }
    directory = write_checkpoint(folder / "model", tensors | {"counts": torch.arange(9)}, files=3)
    (directory / "tokenizer.json").write_text('{"is": "a tokenizer"}')
    return Saved(modicum, directory, folder)


def tensors_of(directory: Path) -> dict[str, Any]:
    """All tensors of the safetensors files in a directory, by name."""
    files = sorted(directory.glob("*.safetensors"))
    return {name: value for file in files for name, value in safetensors.load_file(file).items()}


def assert_same_tensors(one: Path, other: Path) -> None:
    """Asserts that two directories have tensors of the same names and bytes."""
    of_one, of_other = tensors_of(one), tensors_of(other)
    assert of_one.keys() == of_other.keys() and of_one
    for name, tensor in of_one.items():
        assert torch.equal(tensor.view(torch.uint8), of_other[name].view(torch.uint8)), name


def assert_complete(modicum: Path, step: Path) -> None:
    """Asserts that `verify` passes the step, and lists all its files but COMMIT and
    manifest.json."""
    verified = run_json(modicum, "verify", step)
    assert verified["ok"]
    names = {str(path.relative_to(step)) for path in step.rglob("*") if path.is_file()}
    assert names == {file["name"] for file in verified["files"]} | {"COMMIT", "manifest.json"}


# ---- other files


@pytest.mark.parametrize("state_format", ("fp32", "int8-moments-24"))
def test_the_same_step_in_other_files(saved: Saved, tmp_path: Path, state_format: str) -> None:
    step, out = saved.step(state_format), tmp_path / "root" / f"step-{BEFORE}"
    out.parent.mkdir()
    done = run_json(saved.modicum, "reshard", step, out, "--shard-size", "30KB")
    assert (done["step"], done["path"], done["kept_files"]) == (BEFORE, str(out), 0)
    on_disk = {str(path.relative_to(out)): path.stat().st_size for path in out.rglob("*.*")}
    assert {file["name"]: file["bytes"] for file in done["files"]} == {
        name: size for name, size in on_disk.items() if name != "manifest.json"
    }
    assert done["written_bytes"] == sum(file["bytes"] for file in done["files"])
    for folder in ("", "optimizer"):
        assert len(list((out / folder).glob("*.safetensors"))) > 3
        assert_same_tensors(step / folder, out / folder)
    for name in ("tokenizer.json", "config.json", "optimizer/state.json"):
        if (step / name).exists():
            assert (out / name).read_bytes() == (step / name).read_bytes()
    assert_complete(saved.modicum, out)
    expected = saved.resumed(saved.root(state_format))
    assert saved.resumed(out.parent, ranks=3) == expected == saved.resumed(out)
    digest = run_json(saved.modicum, "load", out, "--digest")["digest"]
    assert done["digest"] == digest


def test_without_flags_the_output_is_a_copy(saved: Saved, tmp_path: Path) -> None:
    step, out = saved.step("fp32"), tmp_path / "copy"
    run_json(saved.modicum, "reshard", step, out)
    files = {str(path.relative_to(step)) for path in step.rglob("*") if path.is_file()}
    assert files == {str(path.relative_to(out)) for path in out.rglob("*") if path.is_file()}
    for name in files - {"COMMIT", "manifest.json"}:
        assert (out / name).read_bytes() == (step / name).read_bytes(), name


def test_a_step_without_state_has_no_state_to_convert(saved: Saved, tmp_path: Path) -> None:
    run_json(saved.modicum, "save", saved.directory, tmp_path / "root", "--step", 1)
    step, out = tmp_path / "root/step-1", tmp_path / "out"
    run_json(saved.modicum, "reshard", step, out, "--shard-size", "50KB")
    assert_complete(saved.modicum, out)
    assert_same_tensors(step, out)
    words = ("reshard", step, tmp_path / "other", "--state-format", "fp32")
    error = failure(saved.modicum, 2, *words)
    assert error["category"] == "MISMATCH" and "no optimizer state" in error["message"]
    assert not (tmp_path / "other").exists()


# ---- another format


@pytest.mark.parametrize(("before", "after"), EXACT)
def test_formats_that_hold_the_same_values_give_the_same_digest(
    saved: Saved, tmp_path: Path, before: str, after: str
) -> None:
    """The values of the state do not change, and neither does the digest over them. Weights may:
    the formats round ties between two bf16 differently."""
    root = tmp_path / "root"
    root.mkdir()
    out = root / f"step-{BEFORE}"
    run_json(saved.modicum, "reshard", saved.step(before), out, "--state-format", after)
    assert_complete(saved.modicum, out)
    facts = json.loads((out / "optimizer/state.json").read_text())
    was = json.loads((saved.step(before) / "optimizer/state.json").read_text())
    assert facts["state_format"] == after and "digest" not in facts
    assert all(facts[key] == was[key] for key in ("seed", "steps", "without_state"))
    of_old, of_new = (saved.resumed(of, ranks=1, steps=0) for of in (saved.root(before), root))
    assert of_new[1] == of_old[1]
    if {before, after} == {"fp32", "fp32-split"}:  # an optimizer step gives the same bits in both
        assert saved.resumed(root)[1] == saved.resumed(saved.root(before))[1]
        assert_same_tensors(saved.step(after), out)


def test_there_and_back_restores_every_byte(saved: Saved, tmp_path: Path) -> None:
    """From fp32-split to fp32, which hold the same values, and back."""
    there, back = tmp_path / "there", tmp_path / "back"
    words = ("--shard-size", "200KB", "--state-format")
    run_json(saved.modicum, "reshard", saved.step("fp32-split"), there, *words, "fp32")
    run_json(saved.modicum, "reshard", there, back, *words, "fp32-split")
    assert {"embed.weight.master"} <= tensors_of(there / "optimizer").keys()
    for folder in ("", "optimizer"):
        assert_same_tensors(saved.step("fp32-split") / folder, back / folder)


def test_ties_are_rounded_as_the_format_rounds(saved: Saved, tmp_path: Path) -> None:
    """`fp32` rounds a master that is halfway between two bf16 to even, the split formats round it
    away from zero."""
    step, out = saved.step("fp32-split"), tmp_path / "step"
    run_json(saved.modicum, "reshard", step, out, "--state-format", "fp32")
    master = tensors_of(out / "optimizer")["wide.weight.master"]
    assert torch.equal(tensors_of(out)["wide.weight"], master.bfloat16())
    halves = master.view(torch.int32)
    assert torch.equal(
        tensors_of(step)["wide.weight"].view(torch.int16), ((halves + 0x8000) >> 16).short()
    )


@pytest.mark.parametrize("after", FORMATS)
@pytest.mark.parametrize("before", ("fp32", "fp32-split"))
def test_values_are_those_of_the_optimizers_import(
    saved: Saved, tmp_path: Path, before: str, after: str
) -> None:
    """The oracle: an AdamW of the new format, with the same seed and number of steps, that imports
    the saved values."""
    core = pytest.importorskip("modicum._modicum")
    out = tmp_path / "step"
    run_json(
        saved.modicum, "reshard", saved.step(before), out, "--state-format", after,
        "--shard-size", "64KB",
    )  # fmt: skip
    assert_complete(saved.modicum, out)
    was = tensors_of(saved.step("fp32")) | tensors_of(saved.step("fp32") / "optimizer")
    made = tensors_of(out / "optimizer") | tensors_of(out)
    for name, shape in SHAPES.items():
        dtype = str(made[name].dtype).removeprefix("torch.")
        of = core.AdamW(
            [(name, list(shape), [(0, made[name].numel())], 0, None, None)],
            [core.AdamOptions()], format=core.state_format_of(dtype, shape, after),
            ledger=core.Ledger(), seed=SEED,
        )  # fmt: skip
        of.set_steps(0, BEFORE)
        master = was.get(f"{name}.master", was[name])
        for plane, values in (
            ("master", master), ("exp_avg", was[f"{name}.exp_avg"]),
            ("exp_avg_sq", was[f"{name}.exp_avg_sq"]),
        ):  # fmt: skip
            of.import_from(0, plane, values.float().reshape(-1).numpy())
        low = bytes(memoryview(of.plane(0, "master_low")))
        # A float32 parameter is its own master; with `low` it is the master's upper half.
        has_own = dtype == "float32" or len(low) > 0
        assert_bytes(made[name] if has_own else made[f"{name}.master"], of.plane(0, "master"))
        if len(low) > 0:
            assert_bytes(made[f"{name}.master_low"], low)
        for plane in ("exp_avg", "exp_avg_sq"):
            assert_bytes(made[f"{name}.{plane}"], of.plane(0, plane))
            scales = bytes(memoryview(of.scales(0, plane)))
            assert (f"{name}.{plane}_scale" in made) == (len(scales) > 0)
            if len(scales) > 0:
                assert_bytes(made[f"{name}.{plane}_scale"], scales)


def assert_bytes(tensor: Any, expected: Any) -> None:
    """Asserts that a tensor has the bytes of a buffer."""
    own = tensor.reshape(-1).view(torch.uint8)
    assert torch.equal(own, torch.frombuffer(bytearray(memoryview(expected)), dtype=torch.uint8))


def test_a_parameter_that_is_stored_as_two_tensors_keeps_its_master(
    saved: Saved, tmp_path: Path
) -> None:
    """The format of its moments may change, that of its master may not."""
    names = {"a": (20, 256), "b": (20, 256)}
    tensors = {name: torch.ones(shape, dtype=torch.bfloat16) for name, shape in names.items()}
    directory = write_checkpoint(tmp_path / "two", tensors)
    joined = {"op": "cat", "dim": 0, "in": [stored("a"), stored("b")]}
    recipe = write_recipe(tmp_path / "recipe.json", {"joined": joined})
    root = tmp_path / "root"
    run_json(
        saved.modicum, "save", directory, root, "--step", 1, "--steps", 1,
        "--optimizer", "adamw:fp32-split", "--recipe", recipe,
    )  # fmt: skip
    words = ("reshard", root / "step-1", tmp_path / "out", "--state-format")
    error = failure(saved.modicum, 2, *words, "fp32")
    assert (error["category"], error["tensor"]) == ("UNSUPPORTED", "joined")
    assert not (tmp_path / "out").exists()
    (tmp_path / "new").mkdir()
    out = tmp_path / "new/step-1"
    run_json(saved.modicum, "reshard", root / "step-1", out, "--state-format", "int8-moments")
    assert_complete(saved.modicum, out)
    assert {"joined.exp_avg_scale", "joined.master_low"} <= tensors_of(out / "optimizer").keys()
    run_json(saved.modicum, "resume", out.parent, "--steps", 1, "--ranks", 2)


# ---- refused


def test_invalid_inputs_and_outputs_are_refused(saved: Saved, tmp_path: Path) -> None:
    out = tmp_path / "out"
    # Of a checkpoint that is not a step, the file that a step would have is named.
    assert failure(saved.modicum, 19, "reshard", saved.directory, out)["file"] == "COMMIT"
    out.mkdir()
    assert failure(saved.modicum, 20, "reshard", saved.step("fp32"), out)["file"] == "out"
    assert list(tmp_path.iterdir()) == [out]
    error = failure(saved.modicum, 15, "reshard", saved.step("fp32"), out / "x", "--budget", "1MiB")
    assert error["category"] == "BUDGET" and list(out.iterdir()) == []
    error = failure(saved.modicum, 2, "reshard", saved.step("fp32"), out, "--state-format", "fp23")
    assert error["category"] == "USAGE"


@pytest.mark.parametrize("flags", [(), ("--state-format", "bf16-moments")], ids=str)
@pytest.mark.parametrize(
    ("file", "tensor"), [("model", "embed.weight"), ("optimizer/model", "embed.weight.exp_avg")]
)
def test_a_changed_value_is_found(
    saved: Saved, tmp_path: Path, file: str, tensor: str, flags: tuple[str, ...]
) -> None:
    step, out = tmp_path / "step", tmp_path / "out"
    run_json(saved.modicum, "reshard", saved.step("fp32"), step)
    (path,) = (p for p in step.glob(f"{file}*.safetensors") if tensor in safetensors.load_file(p))
    flip_bit(path, offset_of(path, tensor) + 77)
    error = failure(saved.modicum, 12, "reshard", step, out, *flags)
    assert error["tensor"] == tensor
    assert not out.exists()


# ---- killed


@pytest.mark.parametrize("flags", [(), ("--state-format", "int8-moments")], ids=str)
def test_killed_reshards_are_resumed(saved: Saved, tmp_path: Path, flags: tuple[str, ...]) -> None:
    """A reshard is killed at random moments and started again, until it succeeds. Before that no
    output is visible; no finished file is written again; the bytes are those of a reshard that was
    not killed."""
    step, out = saved.step("fp32"), tmp_path / "out"
    words = [str(w) for w in (saved.modicum, "reshard", step, out, *flags, "--shard-size", "40KB")]
    whole = tmp_path / "whole"
    run_json(saved.modicum, "reshard", step, whole, *flags, "--shard-size", "40KB")
    journal, rng, killed = tmp_path / ".out.journal", random.Random(7), 0
    inodes: dict[str, int] = {}
    for _ in range(10):
        process = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        aim = len(inodes) + rng.randrange(1, 4)
        while process.poll() is None and len(finished(journal)) < aim:
            time.sleep(0.001)
        process.send_signal(signal.SIGKILL)
        if process.wait(timeout=60) == 0:
            break
        killed += 1
        assert not out.exists()
        time.sleep(0.3)  # until the rank of the killed launcher has ended, too
        for name in finished(journal):
            inode = (tmp_path / ".out.partial" / name).stat().st_ino
            assert inodes.setdefault(name, inode) == inode
    # Enough was interrupted: two reshards of which one had finished a file of the state, or any
    # number that together had finished four files.
    assert (killed > 1 and any("/" in name for name in inodes)) or len(inodes) > 3
    if not out.exists():
        assert run_json(saved.modicum, *words[1:])["kept_files"] == len(inodes)
    assert all((out / name).stat().st_ino == inode for name, inode in inodes.items())
    names = {str(path.relative_to(whole)) for path in whole.rglob("*") if path.is_file()}
    assert names == {str(path.relative_to(out)) for path in out.rglob("*") if path.is_file()}
    for name in names - {"COMMIT", "manifest.json"}:
        assert (out / name).read_bytes() == (whole / name).read_bytes(), name
    assert_complete(saved.modicum, out)
    assert [p.name for p in tmp_path.iterdir() if p.name.startswith(".")] == []


@pytest.mark.parametrize("left", [0, 1], ids=["no digest", "one digest"])
def test_digests_that_a_journal_lacks_are_made_again(
    saved: Saved, tmp_path: Path, left: int
) -> None:
    """The digests of a finished file are read from the journal; a file with fewer of them than it
    has chunks counts as unfinished."""
    step, whole = saved.step("fp32"), tmp_path / "whole"
    run_json(saved.modicum, "reshard", step, whole, "--shard-size", "40KB")
    for number in range(50):  # the process may end before it is killed
        out, journal = tmp_path / f"out-{number}", tmp_path / f".out-{number}.journal"
        words = [str(w) for w in (saved.modicum, "reshard", step, out, "--shard-size", "40KB")]
        process = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        while process.poll() is None and not finished(journal):
            time.sleep(0.0005)
        process.send_signal(signal.SIGKILL)
        if process.wait(timeout=60) != 0 and finished(journal):
            break
    time.sleep(0.3)  # until the rank of the killed launcher has ended, too
    document = json.loads(journal.read_text())
    damaged = [file for file in document["files"] if len(file["chunks"]) > left]
    assert damaged
    for file in damaged:
        file["chunks"] = file["chunks"][:left]
        file["checksums"] = file["checksums"][:left]
    journal.write_text(json.dumps(document))
    made = run_json(saved.modicum, *words[1:])
    assert made["kept_files"] == len(document["files"]) - len(damaged)
    assert (out / "manifest.json").read_bytes() == (whole / "manifest.json").read_bytes()
    assert_complete(saved.modicum, out)


def finished(journal: Path) -> list[str]:
    """The names of the finished files in a journal; none before there is a journal."""
    try:
        return [file["name"] for file in json.loads(journal.read_text())["files"]]
    except FileNotFoundError:
        return []
