"""Checkpoints, saved and converted, journals and names in flight of Modicum 0.1.0 (commit
fc075f6b), as each of its fronts has written them, are read with the recorded values, or refused by
name; and what this version writes is read by that commit, or refused by it by name.

The oracles are what fc075f6b itself read (fixtures/formats-0.1/digests.json), its answers to
records of a later version (newer.json), and its reading rules (support/format_1.py), which must
give these answers, too. fixtures/record_formats.py has made the fixtures; they are not recorded
again. Catches: a checkpoint of a later version that is refused as damaged; a journal of a later
version whose files are removed; a key of manifest.json with another name.
"""

import json
import os
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import format_1  # noqa: E402  (after torch is known to be there)
import recorded_formats as formats  # noqa: E402
from faulty_files import FaultyFiles  # noqa: E402
from program import failure, run_json  # noqa: E402

RECORDED = json.loads((formats.FOLDER / "digests.json").read_text())
NEWER = json.loads((formats.FOLDER / "newer.json").read_text())
MOST_BYTES = 1_000_000
# Packages that a fixture's reading needs.
NEEDED = {"torch/adapters": ("peft",), "accelerate/state": ("accelerate", "transformers"),
          "trainer/checkpoint-2": ("accelerate", "transformers")}  # fmt: skip
# fc075f6b takes these for damage, since it compares the version last. A format of a later version
# must not be like them.
UNNAMED = {"version-tensors", "version-dtype", "version-folder"}


def test_the_recorded_files_are_as_they_were() -> None:
    fixtures = RECORDED["fixtures"]
    expected = {name: of["files"] for name, of in fixtures.items()} | RECORDED["others"]
    listed = {"digests.json", "newer.json"}
    for name, files in expected.items():
        assert formats.files_of(formats.FOLDER / name) == files, name
        listed |= {f"{name}/{file}" for file in files}
    assert formats.files_of(formats.FOLDER).keys() == listed
    sizes = [file.stat().st_size for file in formats.FOLDER.rglob("*") if file.is_file()]
    assert sum(sizes) <= MOST_BYTES


@pytest.mark.parametrize("name", RECORDED["fixtures"])
def test_a_fixture_is_read_with_the_recorded_values(
    modicum: Path, tmp_path: Path, name: str
) -> None:
    for package in NEEDED.get(name, ()):
        pytest.importorskip(package)
    read = formats.FIXTURES[name].read(modicum, formats.FOLDER / name, tmp_path)
    assert json.loads(json.dumps(read)) == RECORDED["fixtures"][name]["read"]


# ---- later versions


def changed(record: dict[str, Any], folder: Path) -> Path:
    """The checkpoint with the changed files of an entry of newer.json."""
    step = folder / "step"
    shutil.copytree(formats.FOLDER / record["base"], step)
    for name, text in record["files"].items():
        (step / name).write_text(text)
    return step


@pytest.mark.parametrize("record", NEWER, ids=lambda record: record["name"])
def test_a_record_of_a_later_version(modicum: Path, tmp_path: Path, record: dict[str, Any]) -> None:
    """The answer is that of fc075f6b, but that a later version is named in any case."""
    step = changed(record, tmp_path)
    answer = formats.answer(modicum, "verify", step)
    if answer == "read":
        answer = formats.answer(modicum, "resume", step)
    if record["name"] in UNNAMED:
        (later,) = (one["answer"] for one in NEWER if one["name"] == "version")
        assert answer == later
    else:
        assert answer == record["answer"]


@pytest.mark.parametrize("record", NEWER, ids=lambda record: record["name"])
def test_the_rules_give_the_recorded_answers(tmp_path: Path, record: dict[str, Any]) -> None:
    """support/format_1.py, the oracle of the next tests, against fc075f6b itself."""
    expected = record["answer"]
    category = expected if expected == "read" else expected["category"]
    assert format_1.answer_of(changed(record, tmp_path)) == category


def test_the_rules_read_the_recorded_checkpoints() -> None:
    steps = [path.parent for path in formats.FOLDER.rglob("COMMIT") if ".trash-" not in str(path)]
    assert len(steps) > 15
    assert {format_1.answer_of(step) for step in steps} == {"read"}


def test_a_journal_of_a_later_version_is_refused(modicum: Path, tmp_path: Path) -> None:
    """Whoever owns it, and whatever else it has. Nothing is removed."""
    work = tmp_path / "convert"
    shutil.copytree(formats.FOLDER / "in-flight/convert", work)
    (work / ".out.journal").write_text('{"version":2,"host":{"boot":"later"},"files":{"a":[1]}}')
    before = formats.files_of(work)
    error = failure(modicum, 2, "convert", formats.FOLDER / "command-line/model", work / "out")
    assert (error["category"], error["file"]) == ("UNSUPPORTED", ".out.journal")
    assert (error["expected"], error["got"]) == ("version 1", "version 2")
    assert formats.files_of(work) == before


# ---- what this version writes


def assert_known(step: Path) -> None:
    """Asserts that fc075f6b reads the checkpoint, or refuses it as a later version's."""
    version = json.loads((step / "manifest.json").read_text())["version"]
    assert format_1.answer_of(step) == ("read" if version == 1 else "UNSUPPORTED")


@pytest.mark.parametrize("state_format", format_1.FORMATS)
def test_the_program_writes_what_version_1_reads(
    modicum: Path, tmp_path: Path, state_format: str
) -> None:
    wide, root = formats.FOLDER / "command-line/wide", tmp_path / "root"
    run_json(modicum, "save", wide, root, "--step", 1, "--steps", 1,
             "--optimizer", f"adamw:{state_format}", "--ranks", 2)  # fmt: skip
    assert_known(root / "step-1")
    words = ("--step", 1, "--optimizer", "adamw:fp32-split")
    run_json(modicum, "save", root / "step-1", tmp_path / "again", *words)
    assert_known(tmp_path / "again/step-1")


@pytest.mark.parametrize("kind", ["modicum:fp32-split", "AdamW", "SGD"])
def test_torchs_front_writes_what_version_1_reads(tmp_path: Path, kind: str) -> None:
    import modicum.torch

    model = formats.Small()
    source = formats.FOLDER / "command-line/model"
    modicum.torch.load(model, source, progress=False, budget="none")
    optimizer = formats.optimizer_of(kind, model)
    formats.train(model, optimizer, range(1))
    own = {"rng": torch.arange(3)}
    made = modicum.torch.save(model, tmp_path / "root", step=1, optimizer=optimizer,
                              budget="none", extra={"epoch": 1}, extra_per_rank=own)  # fmt: skip
    assert_known(Path(made.path))


def test_a_journal_is_one_that_version_1_reads(modicum: Path, tmp_path: Path) -> None:
    """The journal of a conversion whose second file is being written."""
    work = tmp_path / "work"
    work.mkdir()
    faulty, words = FaultyFiles(tmp_path), ("convert", formats.FOLDER / "command-line/model")
    for at in range(1, 100):
        process = faulty.hold(work, at, modicum, *words, work / "out")
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        path = work / ".out.journal"
        journal = json.loads(path.read_text()) if path.exists() else {"files": []}
        if journal["files"]:
            break
    assert journal["files"] and journal.get("version", 1) == 1
    assert format_1.fits(journal, format_1.JOURNAL)
