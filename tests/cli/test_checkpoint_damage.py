"""Damage of every file of a saved checkpoint: the file is missing, one byte
shorter, replaced by that of an older checkpoint (stale), exchanged with a file of equal length, or
has one flipped bit. `verify` finds each damage and names the file. `resume` skips such a
checkpoint, also if only values of tensors are damaged, which it compares while it loads them.

Catches: no digest covers some byte; a header, a configuration or the number of optimizer steps is
resumed without a check; the newest checkpoint is chosen by the lengths of its files alone.
"""

import json
import os
import random
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from program import failure, run, run_json

from modicum import _modicum
from modicum.errors import IntegrityError

TRAINED = ("--optimizer", "adamw:int8-moments-24", "--ranks", 2)
CODES = {("COMMIT", "missing"): 19}  # of `verify`; else 12
SAMPLE = 200  # flipped bits, each of which is checked by a `verify` process of its own
MANY, MOST = 500, 10_000  # flipped bits, all of which are checked in the test's process


@dataclass(frozen=True)
class Saved:
    """A root with steps 1 and 2, which have files of the same names, and an intact copy of step
    2."""

    root: Path
    intact: Path

    @property
    def step(self) -> Path:
        return self.root / "step-2"

    def names(self) -> list[str]:
        """The relative paths of the checkpoint's files."""
        files = [path for path in self.intact.rglob("*") if path.is_file()]
        return sorted(str(path.relative_to(self.intact)) for path in files)

    def restore(self, *names: str) -> None:
        """Makes these files of step 2 intact again."""
        for name in names:
            shutil.copyfile(self.intact / name, self.step / name)


@pytest.fixture(scope="module")
def saved(modicum: Path, tmp_path_factory: pytest.TempPathFactory) -> Saved:
    folder = tmp_path_factory.mktemp("damage")
    model = folder / "model"
    run_json(modicum, "synth", model, "--arch", "tiny-moe", "--shard-size", 300)
    for name in ("generation_config.json", "tokenizer.json", "modeling_tiny.py"):
        (model / name).write_text(json.dumps({"is": name.ljust(30)}))
    # A renamed tensor, so that the checkpoint has a recipe for its state.
    names = json.loads((model / "model.safetensors.index.json").read_text())["weight_map"]
    targets = {name: {"op": "stored", "name": name} for name in names}
    targets["renamed"] = targets.pop(min(names))
    (folder / "r.json").write_text(json.dumps({"targets": targets, "unused": []}))
    for step in (1, 2):
        words = ("save", model, folder / "root", "--step", step, "--steps", step, *TRAINED)
        run_json(modicum, *words, "--recipe", folder / "r.json")
    shutil.copytree(folder / "root/step-2", folder / "intact")
    return Saved(folder / "root", folder / "intact")


def header_end(data: bytes) -> int:
    """The offset of the first byte after a safetensors header."""
    return 8 + int.from_bytes(data[:8], "little")


def same_length(saved: Saved, name: str) -> str | None:
    """Another file of the checkpoint with the same length and other bytes; None if there is
    none."""
    data = (saved.intact / name).read_bytes()
    for other in saved.names():
        found = (saved.intact / other).read_bytes()
        if len(found) == len(data) and found != data:
            return other
    return None


def faults(saved: Saved, rng: random.Random) -> Iterator[tuple[str, str, list[str]]]:
    """Damages step 2 in one way at a time. Yields the file, the name of the fault, and all changed
    files: two if they are exchanged."""
    older = saved.root / "step-1"
    for name in saved.names():
        file, data = saved.step / name, (saved.intact / name).read_bytes()
        file.unlink()
        yield name, "missing", [name]
        file.write_bytes(data[:-1])
        yield name, "short", [name]
        if (older / name).read_bytes() != data:
            file.write_bytes((older / name).read_bytes())
            yield name, "stale", [name]
            saved.restore(name)
        if other := same_length(saved, name):
            file.write_bytes((saved.intact / other).read_bytes())
            (saved.step / other).write_bytes(data)
            yield name, "exchanged", [name, other]
            saved.restore(other)
        file.write_bytes(flipped(data, rng.randrange(8 * len(data))))
        yield name, "flipped", [name]
        saved.restore(name)


def flipped(data: bytes, bit: int) -> bytes:
    """The bytes with one bit flipped, counted from the lowest bit of the first byte."""
    changed = bytearray(data)
    changed[bit // 8] ^= 1 << bit % 8
    return bytes(changed)


def names_one(text: str, changed: list[str]) -> bool:
    """Whether a message names one of the changed files. COMMIT has the digest of manifest.json, so
    if one of these two is damaged, the message may name the other."""
    pair = {"manifest.json", "COMMIT"}
    allowed = {*changed, *(pair if pair & set(changed) else ())}
    return any(Path(name).name in text for name in allowed)


def has_other_values_only(saved: Saved, changed: list[str]) -> bool:
    """Whether all damaged files are safetensors files with the right length and header."""
    for name in changed:
        file, data = saved.step / name, (saved.intact / name).read_bytes()
        if not name.endswith(".safetensors") or not file.exists():
            return False
        now, end = file.read_bytes(), header_end(data)
        if len(now) != len(data) or now[:end] != data[:end]:
            return False
    return True


def test_every_damaged_file_is_found(modicum: Path, saved: Saved) -> None:
    seen: dict[str, set[str]] = {}
    assert run(modicum, "verify", saved.root).code == 0
    for name, fault, changed in faults(saved, random.Random(5)):
        seen.setdefault(fault, set()).add(name)
        verified = run(modicum, "verify", saved.step, "--json")
        case = (name, fault, verified)
        assert verified.code == CODES.get((name, fault), 12), case
        assert not verified.json["ok"] and names_one(verified.stderr, changed), case
        resumed = run_json(modicum, "resume", saved.root, "--ranks", 3)
        assert resumed["resumed"]["step"] == 1, case
        (skipped,) = resumed["skipped"]
        assert skipped["step"] == 2 and names_one(skipped["reason"], changed), (case, skipped)
        if has_other_values_only(saved, changed):
            assert "INTEGRITY" in skipped["reason"] and "tensor " in skipped["reason"], case
    assert seen["missing"] == seen["short"] == seen["flipped"] == set(saved.names())
    data = {name for name in saved.names() if name.endswith(".safetensors")}
    assert seen["stale"] >= {*data, "manifest.json", "COMMIT", "optimizer/state.json"}
    assert {"tokenizer.json", "modeling_tiny.py"} <= seen["exchanged"]
    assert data & seen["exchanged"], "no two data files have the same length"
    assert run(modicum, "verify", saved.root).code == 0


def flips(saved: Saved, count: int) -> Iterator[tuple[str, int, str]]:
    """Flips one bit of step 2 at a time. Yields the file, the bit, and where it is, in turn: in a
    header, in values, in another file ("text"), in manifest.json, in COMMIT."""
    rng = random.Random(count)
    data = [name for name in saved.names() if name.endswith(".safetensors")]
    records = ["manifest.json", "COMMIT"]
    texts = [name for name in saved.names() if name not in {*data, *records}]
    for number in range(count):
        kind = ("header", "values", "text", *records)[number % 5]
        file = rng.choice({"header": data, "values": data, "text": texts}.get(kind, [kind]))
        before = (saved.intact / file).read_bytes()
        begin = header_end(before) if kind == "values" else 0
        end = header_end(before) if kind == "header" else len(before)
        bit = rng.randrange(8 * begin, 8 * end)
        (saved.step / file).write_bytes(flipped(before, bit))
        yield file, bit, kind
        saved.restore(file)


def test_the_program_finds_flipped_bits(modicum: Path, saved: Saved) -> None:
    for file, bit, _ in flips(saved, SAMPLE):
        done = run(modicum, "verify", saved.step, "-q")
        assert done.code == 12, (file, bit, done)
        assert names_one(done.stderr, [file]), (file, bit, done.stderr)
    assert run(modicum, "verify", saved.root).code == 0


def test_values_are_read_next_to_a_damaged_index(
    modicum: Path, saved: Saved, tmp_path: Path
) -> None:
    """Their files can't be opened together then."""
    step = tmp_path / "step-2"
    shutil.copytree(saved.step, step)
    last = sorted(step.glob("model-*.safetensors"))[-1]
    for file, at in ((step / "model.safetensors.index.json", 10), (last, -1)):
        data = bytearray(file.read_bytes())
        data[at] ^= 1
        file.write_bytes(data)
    report = json.loads(run(modicum, "verify", step, "--json").stdout)
    damaged = {file["name"] for file in report["files"] if file["result"] != "ok"}
    assert damaged == {last.name, "model.safetensors.index.json"}
    assert report["tensors_checked"] > len(report["files"])


def fault_of(step: Path) -> str:
    """The first fault that `verify` would find, computed in this process; empty if there is
    none."""
    try:
        return _modicum.checkpoint_fault(str(step), 0, 1, _modicum.Board())
    except IntegrityError as error:
        return str(error)


@pytest.mark.parametrize("count", (MANY, pytest.param(MOST, marks=pytest.mark.soak)))
def test_every_flipped_bit_is_found(saved: Saved, count: int) -> None:
    """Without a process for each bit, so that many can be tested."""
    seen: dict[str, set[str]] = {}
    assert not fault_of(saved.step)
    for file, bit, kind in flips(saved, count):
        found = fault_of(saved.step)
        assert names_one(found, [file]), (file, bit, found)
        seen.setdefault(kind, set()).add(file)
    assert set().union(*seen.values()) == set(saved.names())
    assert seen["header"] == seen["values"], (
        "a data file lacks a flip in its header or in its values"
    )
    assert not fault_of(saved.step)


def test_a_commit_of_a_tebibyte_is_damage(modicum: Path, saved: Saved, tmp_path: Path) -> None:
    """It is not read: `resume` skips its checkpoint, `verify` names it, and a save with retention
    does not count it."""
    root = tmp_path / "root"
    shutil.copytree(saved.root, root)
    (root / "step-9").mkdir()
    (root / "step-9/COMMIT").touch()
    os.truncate(root / "step-9/COMMIT", 1 << 40)
    resumed = run_json(modicum, "resume", root, "--steps", 0)
    assert resumed["resumed"]["step"] == 2
    assert [one["step"] for one in resumed["skipped"]] == [9]
    error = failure(modicum, 12, "verify", root / "step-9")
    assert (error["category"], error["file"]) == ("INTEGRITY", "COMMIT")
    run_json(modicum, "save", root / "step-2", root, "--step", 3, "--keep", 2)
    assert sorted(one.name for one in root.glob("step-*")) == ["step-2", "step-3", "step-9"]
