"""Hostile, damaged and mixed files in directories of DCP and of DeepSpeed's ZeRO: each is refused
with its error, within a limit of memory and time, and nothing in it is executed.

The directories are small ones in the form of ZeRO-2, written without DeepSpeed, and of DCP's
writer. Catches: bytes of an archive that are not compared with their CRC-32. Must also fail if
these are accepted or read without end: two files of one rank; an optimizer at another step than the
model; a FIFO; values that refer to each other in a circle or very often.
"""

import os
import random
import resource
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import torch.distributed.checkpoint as dcp  # noqa: E402  (after torch is known to be there)
from audit import mutated, nothing_happens  # noqa: E402

from modicum.errors import Error, FormatError, IntegrityError, IoError, UsageError  # noqa: E402
from modicum.imports import import_checkpoint  # noqa: E402
from modicum.imports.archives import Archive  # noqa: E402
from modicum.imports.dcp import Directory  # noqa: E402
from modicum.imports.pickles import read_pickle  # noqa: E402
from modicum.imports.zero import ZeroDirectory  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

MODEL = "mp_rank_00_model_states.pt"
OPTIMIZER = "bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt"


def save_zero(directory: Path, steps: int = 3, skipped: int = 0, version: Any = "0.19.8") -> None:
    """Writes a directory of ZeRO-2 of one rank, whose optimizer has made 3 steps."""
    model = {
        "module": {"up": torch.ones(4).bfloat16()}, "buffer_names": [],
        "param_shapes": [{"up": torch.Size([4])}], "dp_world_size": 1, "mp_world_size": 1,
        "global_steps": steps, "skipped_steps": skipped, "ds_version": version,
    }  # fmt: skip
    moments = {key: torch.ones(4) for key in ("exp_avg", "exp_avg_sq")}
    base = {"state": {0: {"step": 3, **moments}}, "param_groups": [{"lr": 0.5, "params": [0]}]}
    of = {
        "zero_stage": 2, "partition_count": 1, "base_optimizer_state": base,
        "single_partition_of_fp32_groups": [torch.arange(4.0)],
    }  # fmt: skip
    directory.mkdir()
    torch.save(model, directory / MODEL)
    torch.save({"optimizer_state_dict": of, "ds_version": version}, directory / OPTIMIZER)


@pytest.fixture
def zero(tmp_path: Path) -> Path:
    save_zero(tmp_path / "zero")
    return tmp_path / "zero"


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """A directory of DCP."""
    dcp.save({"w": torch.arange(4.0)}, checkpoint_id=tmp_path / "dcp", no_dist=True)
    return tmp_path / "dcp"


# ---- mixed and damaged files


def test_two_files_of_one_rank_are_refused(zero: Path, tmp_path: Path) -> None:
    shutil.copyfile(zero / OPTIMIZER, zero / OPTIMIZER.removeprefix("bf16_"))
    with pytest.raises(IntegrityError, match=f"INTEGRITY: rank 0 has two files.*{OPTIMIZER}"):
        import_checkpoint(zero, tmp_path / "steps")
    (zero / OPTIMIZER).unlink()
    import_checkpoint(zero, tmp_path / "steps")


def test_an_optimizer_at_another_step_is_refused(tmp_path: Path) -> None:
    save_zero(tmp_path / "five", steps=5)
    with pytest.raises(IntegrityError, match=r"another step.*expected 5 steps.*got 3\)"):
        import_checkpoint(tmp_path / "five", tmp_path / "steps")
    save_zero(tmp_path / "skipped", steps=5, skipped=2)
    assert import_checkpoint(tmp_path / "skipped", tmp_path / "steps").step == 5


def test_the_state_of_bf16_optimizer_is_refused(zero: Path, tmp_path: Path) -> None:
    saved = torch.load(zero / OPTIMIZER, weights_only=False)
    del saved["optimizer_state_dict"]["zero_stage"]
    torch.save(saved, zero / OPTIMIZER)
    words = "UNSUPPORTED: .*BF16_Optimizer.*expected another data_types.grad_accum_dtype"
    with pytest.raises(UsageError, match=words):
        import_checkpoint(zero, tmp_path / "steps")


def flip(path: Path, data: bytes) -> None:
    """Flips a bit of the first byte of `data` in the file."""
    before = path.read_bytes()
    assert before.count(data) == 1
    path.write_bytes(before.replace(data, bytes([data[0] ^ 4]) + data[1:]))


def test_a_flipped_bit_differs_from_its_crc(zero: Path, saved: Path, tmp_path: Path) -> None:
    values = torch.arange(4.0).numpy().tobytes()
    for path, step in (
        (zero / OPTIMIZER, {}),
        (saved / "__0_0.distcp", {"step": 1}),
    ):
        flip(path, values)
        words = rf"record \S+/data/\d+ differ from its CRC-32 \(file {path.name}"
        with pytest.raises(IntegrityError, match=words):
            import_checkpoint(path.parent, tmp_path / "steps", **step)
    flip(zero / MODEL, b"param_shapes")
    with pytest.raises(IntegrityError, match=rf"data\.pkl differ from its CRC-32 \(file {MODEL}"):
        import_checkpoint(zero, tmp_path / "steps")
    assert not (tmp_path / "steps").exists()


def test_a_fifo_is_not_opened(zero: Path, saved: Path, tmp_path: Path) -> None:
    """No process opens its other end: an open that waits for one would not return."""
    for path, step in (
        (zero / OPTIMIZER, {}),
        (zero / MODEL, {}),
        (saved / "__0_0.distcp", {"step": 1}),
        (saved / ".metadata", {"step": 1}),
    ):
        path.unlink()
        os.mkfifo(path)
        with pytest.raises(IoError, match="IO: "):
            import_checkpoint(path.parent, tmp_path / "steps", **step)


# ---- values that a few bytes describe


def test_values_that_refer_to_each_other_are_bounded(tmp_path: Path) -> None:
    shared: Any = ()
    for _ in range(60):
        shared = (shared, shared)
    save_zero(tmp_path / "zero", version=shared)
    with pytest.raises(FormatError, match="refers to its values too often"):
        import_checkpoint(tmp_path / "zero", tmp_path / "steps")
    for data, words in (
        (b"\x80\x02]q\x00h\x00a.", "contains itself"),
        (b"\x80\x02N" + b"\x85" * 100_000 + b".", "nested too deeply"),
        (b"\x80\x02X\x03\x00\x00\x00\xed\xa0\x80.", "damaged"),  # half of a surrogate pair
        (b"\x80\x02(" + b"]" * 10 + b".", "damaged"),
    ):
        with pytest.raises(FormatError, match=words):
            read_pickle(data, "x")


# ---- mutants


@contextmanager
def limited(more: int) -> Iterator[None]:
    """A context in which the process may have `more` further bytes of address space."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    before = resource.getrlimit(resource.RLIMIT_AS)
    limit = pages * resource.getpagesize() + more
    resource.setrlimit(resource.RLIMIT_AS, (limit, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


def read_mutants(directory: Path, kind: Any, count: int) -> None:
    """Reads the directory `count` times, each time with another file of it damaged, as `kind` does
    before it writes. At least a quarter must be refused."""
    files = {path: path.read_bytes() for path in sorted(directory.iterdir())}
    chance, refused, longest = random.Random(count), 0, 0.0
    with limited(16 * sum(map(len, files.values())) + (16 << 20)):
        for number in range(count):
            path = chance.choice([*files])
            path.write_bytes(mutated(files[path], chance))
            start = time.process_time()
            with nothing_happens(number, opened=str(directory)):
                try:
                    read_whole(directory, kind)
                except Error as error:
                    refused += 1
                    found = error.category.partition(".")[0]
                    assert found in ("FORMAT", "INTEGRITY", "UNSUPPORTED", "IO"), number
            longest = max(longest, time.process_time() - start)
            path.write_bytes(files[path])
    assert refused > count // 4 and longest < 5, (refused, longest)


def read_whole(directory: Path, kind: Any) -> None:
    opened = kind.open(directory)
    _ = opened.compare(True) if kind is ZeroDirectory else opened.compare(opened.tensors)


def read_pickle_mutants(path: Path, count: int) -> None:
    """Reads damaged pickles of an archive, or `.metadata`, as CRC-32 would not refuse them."""
    data = path.read_bytes() if path.name == ".metadata" else Archive.open(path).pickle
    chance, longest = random.Random(count), 0.0
    with limited(16 * len(data) + (16 << 20)):
        for number in range(count):
            damaged, start = mutated(data, chance), time.process_time()
            with nothing_happens(number):
                try:
                    read_pickle(damaged, path.name)
                except Error as error:
                    assert error.category == "FORMAT.PICKLE", number
            longest = max(longest, time.process_time() - start)
    assert longest < 5


def read_all_mutants(zero: Path, saved: Path, count: int) -> None:
    """`count` in all: a sixteenth whole directories of each kind, the others pickles."""
    read_mutants(zero, ZeroDirectory, count // 16)
    read_mutants(saved, Directory, count // 16)
    for path in (zero / MODEL, zero / OPTIMIZER, saved / ".metadata"):
        read_pickle_mutants(path, count * 7 // 24)


def test_mutated_files_are_refused(zero: Path, saved: Path) -> None:
    read_all_mutants(zero, saved, 20_000)


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_a_million_mutated_files_are_refused(zero: Path, saved: Path) -> None:
    read_all_mutants(zero, saved, 1_000_000)
