"""Damaged saved checkpoints in Python: which errors are damage, what `save`,
`resume` and the checkpoints of accelerate and Trainer do with a damaged checkpoint, and with one
that can't be read.

Catches: an error of the disk counts as damage; texts are trusted; a damaged checkpoint ends the
save of its number, or the resume; a model whose resume failed is saved; a checkpoint with a changed
text is resumed, or rotated as a whole one; a checkpoint that is removed loses its extra.
"""

import functools
import importlib
import itertools
import json
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

import torch_front  # noqa: E402
from ranks import Ranks  # noqa: E402
from safetensors.torch import save_file  # noqa: E402
from torch.distributed.fsdp import fully_shard  # noqa: E402

import modicum.torch as front  # noqa: E402
from modicum import _modicum, errors  # noqa: E402
from modicum.errors import BudgetError, IntegrityError, IoError, UsageError  # noqa: E402
from modicum.torch.accelerate.choice import checkpoint_to_resume, last_checkpoint  # noqa: E402
from modicum.torch.saving import choosing, inside  # noqa: E402
from modicum.walk.saving import GROUPS_FILE  # noqa: E402

resume_module = importlib.import_module("modicum.torch.saving.resume")


def flip(path: Path, at: int = -1) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


@pytest.fixture
def model() -> Any:
    made = torch_front.empty("llama")
    front.load(made, torch_front.checkpoint_of("llama"), progress=False)
    return made


def test_damage_is_what_the_library_calls_damage() -> None:
    for category, code in _modicum.exit_codes().items():
        found = errors.is_damage(errors.failure(category, "x"))
        assert found == (code in (10, 11, 12, 19)), category
    assert not errors.is_damage(OSError())


@pytest.mark.filterwarnings("ignore:modicum")
@pytest.mark.parametrize("pattern", ["model*.safetensors", "config.json"])
def test_a_damaged_checkpoint_is_set_aside(tmp_path: Path, model: Any, pattern: str) -> None:
    for step in (1, 2):
        assert front.save(model, tmp_path, step=step).damaged == []
    with pytest.raises(IoError, match="CONFLICT: the checkpoint has been saved already"):
        front.save(model, tmp_path, step=2)
    file = max((tmp_path / "step-2").glob(pattern)).name
    flip(tmp_path / "step-2" / file)
    resumed = front.resume(model, tmp_path, progress=False)
    assert resumed.step == 1 and [one["step"] for one in resumed.skipped] == [2]
    saved = front.save(model, tmp_path, step=2)
    (damaged,) = saved.damaged
    path = Path(damaged["path"])
    assert path.name.startswith(".damaged-2-") and (path / "COMMIT").exists()
    assert damaged.keys() == {"step", "path", "reason", "bytes"} and file in damaged["reason"]
    assert any(path.name in warning for warning in saved.warnings)
    assert front.resume(model, tmp_path, progress=False).step == 2


def test_a_checkpoint_that_cannot_be_read_stays(tmp_path: Path, model: Any) -> None:
    for step in (1, 2):
        front.save(model, tmp_path, step=step)
    fault = errors.failure("IO", "read failed: EIO")
    with (
        patch.object(_modicum, "checkpoint_fault", side_effect=fault),
        pytest.raises(IoError, match="read failed"),
    ):
        front.save(model, tmp_path, step=2)
    with (
        patch.object(resume_module, "load_by", side_effect=fault),
        pytest.raises(IoError, match="read failed"),
    ):
        front.resume(model, tmp_path, progress=False)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "step-1", "step-2"]


def test_a_checkpoint_that_is_removed_meanwhile_is_chosen_again(tmp_path: Path, model: Any) -> None:
    for step in (1, 2):
        front.save(model, tmp_path, step=step)
    load = resume_module.load_by

    def removes(how: Any, model: Any, step: Path) -> Any:
        if step.name == "step-2":
            step.rename(tmp_path / ".trash-x")
        return load(how, model, step)

    with patch.object(resume_module, "load_by", removes):
        resumed = front.resume(model, tmp_path, progress=False)
    assert (resumed.step, resumed.skipped) == (1, [])


def test_a_removed_checkpoint_loses_no_part(tmp_path: Path, model: Any) -> None:
    """Another process removes step 3 before its tensors are read, step 2 before its other files
    are, and step 1 after its tensors were. The resume has each part of step 1."""
    for step in (1, 2, 3):
        front.save(model, tmp_path, step=step, extra={"at": step}, extra_per_rank=[step])
    load, read_files = resume_module.load_by, choosing.read_files

    def removing(step: int) -> None:
        (tmp_path / f"step-{step}").rename(tmp_path / f".trash-{step}")

    def removed_before(path: Path, names: Any) -> Any:
        if path.name == "step-2":
            removing(2)
        return read_files(path, names)

    def removed_around(how: Any, model: Any, step: Path) -> Any:
        if step.name == "step-3":
            removing(3)
        report = load(how, model, step)
        removing(1)
        return report

    with (
        patch.object(choosing, "read_files", removed_before),
        patch.object(resume_module, "load_by", removed_around),
    ):
        resumed = front.resume(model, tmp_path, progress=False)
    assert (resumed.step, resumed.extra, resumed.extra_per_rank) == (1, {"at": 1}, [1])


@pytest.mark.parametrize("times", [3, pytest.param(1000, marks=pytest.mark.soak)])
def test_resumes_next_to_a_job_that_keeps_one_checkpoint(tmp_path: Path, times: int) -> None:
    """Each resume has all parts of one step, or is an error of a checkpoint that was removed."""
    file, root = tmp_path / "model.safetensors", tmp_path / "root"
    saved, resumed = (torch.nn.Linear(8, 8) for _ in range(2))
    save_file(saved.state_dict(), file)
    front.load(saved, file, progress=False)

    def save(step: int) -> None:
        with torch.no_grad():
            for parameter in saved.parameters():
                parameter.fill_(step)
        front.save(saved, root, step=step, keep=1, extra={"at": step}, extra_per_rank=[step])

    def save_until(over: threading.Event) -> None:
        for step in itertools.takewhile(lambda _: not over.is_set(), itertools.count(2)):
            save(step)

    save(1)
    over, whole = threading.Event(), 0
    with ThreadPoolExecutor() as threads:
        saving = threads.submit(save_until, over)
        try:
            for _ in range(times):
                with suppress(IoError):
                    found = front.resume(resumed, root, progress=False)
                    whole += 1
                    assert (found.extra, found.extra_per_rank) == ({"at": found.step}, [found.step])
                    assert all((one == found.step).all() for one in resumed.parameters())
        finally:
            over.set()
        saving.result()
    assert whole > times // 2


def test_texts_and_headers_of_a_named_checkpoint_are_compared(tmp_path: Path, model: Any) -> None:
    front.save(model, tmp_path, step=1)
    step = tmp_path / "step-1"
    weights = max(step.glob("model*.safetensors")).name
    for file, at in (("config.json", -2), (weights, 9)):
        whole = (step / file).read_bytes()
        flip(step / file, at)
        with pytest.raises(IntegrityError, match=f"not the one that was saved .file {file}"):
            front.resume(model, step, progress=False)
        (step / file).write_bytes(whole)
    assert front.resume(model, step, progress=False).step == 1


# ---- damaged values, which are found while they are read


def flip_value(directory: Path, name: str) -> None:
    """Flips a bit of a stored tensor."""
    for file in directory.glob("*.safetensors"):
        header_bytes = int.from_bytes(file.read_bytes()[:8], "little")
        header = json.loads(file.read_bytes()[8 : 8 + header_bytes])
        if name in header:
            return flip(file, 8 + header_bytes + header[name]["data_offsets"][0])
    raise KeyError(name)


NAME = "model.layers.0.mlp.up_proj.weight"
PLACES = {"weights": (".", NAME), "state": ("optimizer", f"{NAME}.exp_avg")}


def optimizer_of(model: Any, kind: str) -> Any:
    if kind == "torch":
        return torch.optim.AdamW(model.parameters())
    return front.AdamW(model.named_parameters(), state_format=kind)


def saved_twice(root: Path, kind: str) -> tuple[list[Any], Any]:
    """Saves steps 1 and 2 of a training. Returns the values and the state of step 1."""
    model = torch_front.empty("llama")
    optimizer = optimizer_of(model, kind) if kind != "torch" else None
    front.load(model, torch_front.checkpoint_of("llama"), optimizer=optimizer, progress=False)
    optimizer = optimizer or optimizer_of(model, kind)
    first = None
    for step in (1, 2):
        for parameter in model.parameters():
            parameter.grad = torch.full_like(parameter, step)
        optimizer.step()
        front.save(model, root, step=step, optimizer=optimizer, extra={"at": step})
        first = first or ([one.detach().clone() for one in model.parameters()], state_of(optimizer))
    assert first is not None
    return first


def state_of(optimizer: Any) -> Any:
    if isinstance(optimizer, front.AdamW):
        return optimizer.digest()
    return [entry["exp_avg"].tolist() for entry in optimizer.state.values()]


@pytest.mark.filterwarnings("ignore:modicum")
@pytest.mark.parametrize(
    ("kind", "place", "is_empty"),
    [
        ("fp32-split", "weights", True),
        ("fp32-split", "state", True),
        ("bf16-moments", "state", False),
        ("torch", "weights", False),
        ("torch", "state", True),
    ],
)
def test_an_older_checkpoint_takes_the_place_of_a_damaged_one(
    tmp_path: Path, kind: str, place: str, is_empty: bool
) -> None:
    values, state = saved_twice(tmp_path, kind)
    folder, name = PLACES[place]
    flip_value(tmp_path / "step-2" / folder, name)
    model = torch_front.empty("llama")
    if not is_empty:
        front.load(model, torch_front.checkpoint_of("llama"), progress=False)
    optimizer = optimizer_of(model, kind)
    resumed = front.resume(model, tmp_path, optimizer=optimizer, progress=False)
    assert (resumed.step, resumed.extra) == (1, {"at": 1})
    (skipped,) = resumed.skipped
    assert skipped["step"] == 2 and f"tensor {name}" in skipped["reason"]
    assert all(map(torch.equal, model.parameters(), values)) and state_of(optimizer) == state
    assert front.save(model, tmp_path, step=3, optimizer=optimizer).step == 3


def sharded_twice(root: str) -> list[Any]:
    """An act: saves steps 1 and 2 of an FSDP2 model. Returns weights and state of step 1."""
    model, optimizer = sharded()
    front.load(model, f"{root}/model.safetensors", optimizer=optimizer, progress=False)
    first: list[Any] = []
    for step in (1, 2):
        model(torch.full((2, 64), float(step))).sum().backward()
        optimizer.step()
        front.save(model, f"{root}/steps", step=step, optimizer=optimizer)
        first = first or weights_and_state(model, optimizer)
    return first


def sharded_again(root: str) -> tuple[int, list[Any], int]:
    """An act: resumes, and asserts that no thread of it remains. Returns the step, its weights and
    state, and the bytes read."""
    model, optimizer = sharded()
    before = threading.active_count()
    resumed = front.resume(model, f"{root}/steps", optimizer=optimizer, progress=False)
    deadline = time.monotonic() + 60
    while threading.active_count() > before and time.monotonic() < deadline:
        time.sleep(0.01)
    assert threading.active_count() == before, threading.enumerate()
    return resumed.step, weights_and_state(model, optimizer), resumed.read_bytes


def sharded() -> tuple[Any, Any]:
    with torch.device("meta"):
        model = torch.nn.Linear(64, 64)
    fully_shard(model)
    return model, front.AdamW(model.named_parameters(), lr=1e-2)


def weights_and_state(model: Any, optimizer: Any) -> list[Any]:
    weights = [one.full_tensor().tolist() for one in model.parameters()]
    return [*weights, optimizer.digest()]


@pytest.mark.filterwarnings("ignore:modicum")
def test_all_ranks_go_on_from_the_older_checkpoint(two: Ranks, tmp_path: Path) -> None:
    """The damaged chunk is divided between the ranks."""
    save_file(torch.nn.Linear(64, 64).state_dict(), tmp_path / "model.safetensors")
    first = two.ask(sharded_twice, root=str(tmp_path))
    intact = two.ask(sharded_again, root=str(tmp_path))
    flip_value(tmp_path / "steps/step-2/optimizer", "weight.exp_avg")
    damaged = two.ask(sharded_again, root=str(tmp_path))
    for rank in range(2):
        assert intact[rank][0] == 2 and intact[rank][1] != first[rank]
        assert damaged[rank][:2] == (1, first[rank])
        assert intact[rank][2] < 3 * 4 * 65 * 64 + 1024  # weights and two moments, once


@pytest.mark.filterwarnings("ignore:modicum")
@pytest.mark.parametrize("place", PLACES)
def test_without_an_intact_checkpoint_the_values_are_nan(tmp_path: Path, place: str) -> None:
    saved_twice(tmp_path, "fp32-split")
    folder, name = PLACES[place]
    for step in (1, 2):
        flip_value(tmp_path / f"step-{step}" / folder, name)
    model = torch_front.empty("llama")
    front.load(model, torch_front.checkpoint_of("llama"), progress=False)
    optimizer = optimizer_of(model, "fp32-split")
    with pytest.raises(IntegrityError, match="UNCOMMITTED: .*values are undefined .NaN. now"):
        front.resume(model, tmp_path, optimizer=optimizer, progress=False)
    assert all(one.isnan().all() for one in model.parameters())
    assert all(buffer.isfinite().all() for buffer in model.buffers())
    with pytest.raises(UsageError, match="undefined since a load into it has failed"):
        front.save(model, tmp_path, step=3)
    front.load(model, torch_front.checkpoint_of("llama"), progress=False)
    assert front.save(model, tmp_path, step=3).step == 3


def test_values_that_torch_has_written_are_defined(tmp_path: Path, model: Any) -> None:
    values = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    front.save(model, tmp_path, step=1)
    flip_value(tmp_path / "step-1", NAME)
    with pytest.raises(IntegrityError, match="the values are not those that were saved"):
        front.resume(model, tmp_path / "step-1", progress=False)
    for left_out in ([NAME], []):
        with pytest.raises(UsageError, match="undefined"):
            front.save(model, tmp_path, step=2)
        model.load_state_dict({n: v for n, v in values.items() if n not in left_out}, strict=False)
    assert front.save(model, tmp_path, step=2).step == 2


def test_a_load_must_fill_what_is_undefined(tmp_path: Path, model: Any) -> None:
    front.save(model, tmp_path, step=1)
    flip_value(tmp_path / "step-1", NAME)
    with pytest.raises(IntegrityError):
        front.load(model, tmp_path / "step-1", progress=False)
    lacking = tmp_path / "model.safetensors"
    values = {n: t for n, t in model.state_dict().items() if n != NAME}
    save_file(values, lacking)
    with pytest.raises(UsageError, match=f"source lacks it.*tensor {NAME}"):
        front.load(model, lacking, progress=False)


def test_options_that_are_null_are_damage(tmp_path: Path) -> None:
    """Not the options of a checkpoint that has none."""
    found = choosing.ChosenCheckpoint(tmp_path, {}, {GROUPS_FILE: b"null"}, is_newest=True)
    assert found.has_options
    with pytest.raises(IntegrityError, match="not what Modicum writes"):
        _ = found.state


def test_a_resume_that_is_refused_changes_no_value(tmp_path: Path, model: Any) -> None:
    front.save(model, tmp_path, step=1)
    before = [one.clone() for one in model.parameters()]
    with pytest.raises(BudgetError):
        front.resume(model, tmp_path, budget="1MiB", progress=False)
    assert all(map(torch.equal, before, model.parameters()))
    assert front.save(model, tmp_path, step=2).step == 2


# ---- checkpoints of accelerate and Trainer


def test_a_changed_text_is_a_fault_of_a_checkpoint(tmp_path: Path, model: Any) -> None:
    front.save(model, tmp_path, step=1)
    step = tmp_path / "step-1"
    assert inside.fault_of(step) == ""
    flip(step / "config.json", -2)
    assert "INTEGRITY: the file is not the one that was saved" in inside.fault_of(step)
    for fault in (errors.failure("IO", "read failed"), errors.failure("UNSUPPORTED", "later")):
        # A default argument holds the function itself.
        with (
            patch.object(inside, "require_whole", side_effect=fault),
            pytest.raises((IoError, UsageError)),
        ):
            inside.fault_of(step)


def test_a_checkpoint_with_a_changed_value_is_not_chosen(tmp_path: Path, model: Any) -> None:
    for number in (1, 2):
        step = Path(front.save(model, tmp_path, step=number).path)
        step.rename(tmp_path / f"checkpoint-{number}")
    one, two = (str(tmp_path / f"checkpoint-{number}") for number in (1, 2))
    flip(max(Path(two).glob("model*.safetensors")))
    original = transformers.trainer_utils.get_last_checkpoint
    last = functools.partial(last_checkpoint, set(), original)
    for choose in (last, lambda folder: checkpoint_to_resume(True, folder, False)):
        with pytest.warns(UserWarning, match="checkpoint-2 is skipped: INTEGRITY: the values are"):
            assert choose(str(tmp_path)) == one
    assert checkpoint_to_resume(two, "", False) == two


def test_rotation_keeps_an_intact_checkpoint(tmp_path: Path, model: Any) -> None:
    """Of three checkpoints the second has a changed text: it goes, although the first is older. If
    one can't be read, all stay."""
    trash = tmp_path / "trash"
    trash.mkdir()
    steps = [Path(front.save(model, tmp_path, step=step).path) for step in (1, 2, 3)]
    flip(steps[1] / "config.json", -2)
    fault = errors.failure("IO", "read failed")
    with (
        patch.object(inside, "require_whole", side_effect=fault),
        pytest.warns(UserWarning, match="read failed"),
    ):
        inside.rotate(steps, 1, None, trash)
    assert all(step.is_dir() for step in steps)
    inside.rotate(steps, 2, None, trash)
    assert [step.name for step in steps if step.is_dir()] == ["step-1", "step-3"]
