"""`modicum.imports.import_checkpoint` converts directories of torch.distributed.checkpoint (DCP) to
checkpoints of Modicum. It executes no pickle.

A *box* is the rectangular part of a tensor that a rank has saved (DCP's chunk). The oracles are the
saved tensors, and Python's audit events, which show executions. Catches: a box at the wrong index
of its tensor; elements that are read from other indices of a box; optimizer state that is written
as a tensor of the model; step counts that are lost; a pickle that names a function which is not on
the list of allowed names; boxes that overlap or are outside their tensor; a file outside the
directory; an archive with another tensor than the metadata says; a printed report that does not
name the values that were left out.
"""

import json
import os
import pickle
import random
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import torch.distributed.checkpoint as dcp  # noqa: E402  (after torch is known to be there)
from audit import mutated, nothing_happens  # noqa: E402
from safetensors.torch import load_file  # noqa: E402
from sharding import playing_new_rank  # noqa: E402
from torch.distributed.checkpoint import metadata  # noqa: E402
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict  # noqa: E402
from torch.distributed.device_mesh import init_device_mesh  # noqa: E402
from torch.distributed.tensor import DTensor, Shard  # noqa: E402

import modicum.torch  # noqa: E402
from modicum.errors import Error, FormatError, IoError, UsageError  # noqa: E402
from modicum.imports import import_checkpoint  # noqa: E402
from modicum.imports.dcp import Directory, directory_of  # noqa: E402
from modicum.imports.pickles import MadeObject, read_pickle  # noqa: E402
from modicum.upstream.torch_optim import OPTIMIZERS  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


class Small(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = torch.nn.Linear(5, 7)
        self.norm = torch.nn.LayerNorm(7)
        self.register_buffer("counts", torch.arange(6))
        self.low = torch.nn.Parameter(torch.randn(6, 4, 2).bfloat16())


def trained() -> tuple[Any, Any]:
    torch.manual_seed(3)
    model = Small()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    return model, optimizer


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory of DCP with the model and the optimizer of `trained`, and a number."""
    model, optimizer = trained()
    optim = get_optimizer_state_dict(model, optimizer)
    state = {"model": model.state_dict(), "optim": optim, "epoch": 3}
    path = tmp_path_factory.mktemp("dcp") / "saved"
    dcp.save(state, checkpoint_id=path, no_dist=True)
    return path


# ---- values


def test_the_checkpoint_has_every_tensor(directory: Path, tmp_path: Path, capsys: Any) -> None:
    model, optimizer = trained()
    report = import_checkpoint(directory, tmp_path / "steps", step=4, optimizer="AdamW")
    step = tmp_path / "steps/step-4"
    assert report.path == str(step)
    assert report.left_out == ["epoch"]
    assert str(report).endswith("\nleft out 1: epoch")
    report.print()
    assert capsys.readouterr().out == f"{report}\n"
    many = replace(report, left_out=[f"key{i}" for i in range(20)])
    assert str(many).endswith(", key15 and 4 more")
    stored = {n: t for file in step.glob("*.safetensors") for n, t in load_file(file).items()}
    expected = model.state_dict()
    assert stored.keys() == expected.keys()
    assert all(torch.equal(stored[name], tensor) for name, tensor in expected.items())
    state = {
        n: t for file in step.glob("optimizer/*.safetensors") for n, t in load_file(file).items()
    }
    for name, parameter in model.named_parameters():
        for key in ("exp_avg", "exp_avg_sq"):
            assert torch.equal(state.pop(f"{name}.{key}"), optimizer.state[parameter][key])
    assert not state
    numbers = json.loads((step / "optimizer/state.json").read_text())["numbers"]
    # A number is stored as (dtype, value, shape).
    assert {name: entry["step"] for name, entry in numbers.items()} == {
        name: ["float32", 1.0, []] for name, _ in model.named_parameters()
    }


def test_modicum_resumes_the_checkpoint(directory: Path, tmp_path: Path) -> None:
    import_checkpoint(directory, tmp_path / "steps", step=4, optimizer="AdamW")
    (model, optimizer), (saved, saved_optimizer) = trained(), trained()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    optimizer.state.clear()
    modicum.torch.resume(model, tmp_path / "steps", optimizer=optimizer, progress=False)
    for p, expected in zip(model.parameters(), saved.parameters(), strict=True):
        assert torch.equal(p, expected)
        for key, value in saved_optimizer.state[expected].items():
            assert torch.equal(optimizer.state[p][key], value), key


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("AdamW", {"lr": torch.tensor(0.125), "betas": (0.5, 0.75), "foreach": False}),
        ("AdamW", {"lr": 0.125, "weight_decay": 0.0, "note": [1, "a"], "amsgrad": True}),
        ("SGD", {"lr": 0.125, "nesterov": False}),
    ],
    ids=("a tensor", "a list", "no state"),
)
def test_resume_gets_the_options_of_each_group(
    tmp_path: Path, kind: str, options: dict[str, Any]
) -> None:
    """Also if the optimizer has no state, or options that are tensors or the program's own. The
    parameters of the second group have other options."""

    def optimizer_of(model: Any, named: bool, **options: Any) -> Any:
        norm = [*model.norm.named_parameters("norm")] if named else [*model.norm.parameters()]
        entries = [*model.named_parameters()]
        rest = [entry if named else entry[1] for entry in entries if "norm." not in entry[0]]
        groups = [{"params": rest, **options}, {"params": norm, "weight_decay": 0.25}]
        return getattr(torch.optim, kind)(groups, lr=0.5)

    model, _ = trained()
    optimizer = optimizer_of(model, True, **options)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    optim = get_optimizer_state_dict(model, optimizer)
    state = {"model": model.state_dict(), "optim": optim}
    dcp.save(state, checkpoint_id=tmp_path / "dcp", no_dist=True)
    report = import_checkpoint(tmp_path / "dcp", tmp_path / "run", step=4, optimizer=kind)
    assert [key for key in report.left_out if "param_groups" in key] == []
    model, _ = trained()
    resumed = optimizer_of(model, False)
    modicum.torch.resume(model, tmp_path / "run", optimizer=resumed, progress=False)
    for saved, group in zip(optimizer.param_groups, resumed.param_groups, strict=True):
        for key in saved.keys() - {"params", "param_names"}:
            assert group[key] == saved[key] and type(group[key]) is type(
                saved[key].item() if isinstance(saved[key], torch.Tensor) else saved[key]
            ), key


def test_a_group_that_cannot_be_imported_is_left_out(tmp_path: Path) -> None:
    """It has no names, or an option is no plain value."""
    options = {"lr": 1.0, "fn": {"a": 1}, "mask": torch.ones(2)}
    groups = [{"params": ["weight"], **options}, {"params": [0], "lr": 2.0}]
    state = {"model": {"weight": torch.ones(2)}, "optim": {"state": {}, "param_groups": groups}}
    dcp.save(state, checkpoint_id=tmp_path / "dcp", no_dist=True)
    report = import_checkpoint(tmp_path / "dcp", tmp_path / "run", step=1, optimizer="SGD")
    names = {key.removeprefix("optim.param_groups.") for key in report.left_out}
    assert names == {"0.fn.a", "0.mask", "1.lr", "1.params"}
    (group,) = json.loads((tmp_path / "run/step-1/optimizer/groups.json").read_text())["groups"]
    assert group == {"params": ["weight"], "options": {"lr": 1.0}, "exact": {}}


@pytest.mark.parametrize("dims", [(0,), (1,), (2,), (0, 1), (1, 2)], ids=str)
def test_boxes_of_any_cut(tmp_path: Path, dims: tuple[int, ...]) -> None:
    """Ranks of a mesh shard a tensor of 60 elements along `dims` and save their boxes, of which
    some are uneven or empty. Random ranges of the tensor's elements must be read correctly."""
    whole = torch.arange(5 * 3 * 4, dtype=torch.int32).reshape(5, 3, 4)
    world = 2 ** len(dims)
    for rank in range(world):
        with playing_new_rank(rank, world):
            mesh = init_device_mesh("cpu", (2,) * len(dims))
            save_of_one_rank(distribute(whole, mesh, dims), tmp_path / f"of-{rank}")
    merged = merged_directory([tmp_path / f"of-{rank}" for rank in range(world)])
    generator = random.Random(5)
    for _ in range(60):
        first = generator.randrange(60)
        count = generator.randrange(1, 61 - first)
        data = bytearray(4 * count)
        merged.read("t", first, memoryview(data))
        assert torch.equal(
            torch.frombuffer(data, dtype=torch.int32), whole.reshape(-1)[first : first + count]
        )


def distribute(whole: Any, mesh: Any, dims: tuple[int, ...]) -> Any:
    """This rank's DTensor, sharded along one of `dims` by each mesh axis."""
    local = whole
    for axis, dim in enumerate(dims):
        at = mesh.get_coordinate()[axis]
        parts = [*local.chunk(2, dim)]
        local = parts[at] if at < len(parts) else local.narrow(dim, 0, 0)
    placements = [Shard(dim) for dim in dims]
    sizes = {"shape": whole.shape, "stride": whole.stride()}
    return DTensor.from_local(local.contiguous(), mesh, placements, run_check=False, **sizes)


def save_of_one_rank(tensor: Any, path: Path) -> None:
    dcp.save({"t": tensor}, checkpoint_id=path, no_dist=True)


def merged_directory(paths: list[Path]) -> Directory:
    """The directory that all ranks would have written in one save. `paths`: one directory for each
    rank, by rank. The merged files are in their parent directory."""
    metadata, boxes = None, {}
    for rank, path in enumerate(paths):
        own = pickle.loads((path / ".metadata").read_bytes())
        for index, info in own.storage_data.items():
            source = path / info.relative_path
            info.relative_path = f"__{rank}_0.distcp"
            (paths[0].parent / info.relative_path).write_bytes(source.read_bytes())
            boxes[index] = info
        chunks = own.state_dict_metadata["t"].chunks
        metadata = metadata or own
        if metadata is not own:
            metadata.state_dict_metadata["t"].chunks += chunks
    metadata.storage_data = boxes
    return directory_of(pickle.dumps(metadata), paths[0].parent)


# ---- damage


class Harmful:
    """An object whose pickle runs a command that makes the file `path`."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self.path}",)


def test_functions_that_a_pickle_calls_are_refused(directory: Path, tmp_path: Path) -> None:
    """In the metadata, and in an archive with tensors."""
    mark = tmp_path / "executed"
    original = pickle.loads((directory / ".metadata").read_bytes())
    original.planner_data = {"epoch": Harmful(mark)}
    with pytest.raises(FormatError, match="posix.system"):
        directory_of(pickle.dumps(original), directory)
    archive = tmp_path / "harmful"
    archive.mkdir()
    (archive / ".metadata").write_bytes((directory / ".metadata").read_bytes())
    torch.save(Harmful(mark), archive / "__0_0.distcp")
    data = (archive / "__0_0.distcp").read_bytes()
    # The file must be as long as the metadata says.
    (archive / "__0_0.distcp").write_bytes(data + b"\0" * 100_000)
    with pytest.raises(FormatError):
        import_checkpoint(archive, tmp_path / "steps", step=1)
    assert not mark.exists()


def changed(directory: Path, change: Callable[[Any], None]) -> bytes:
    """The directory's metadata after `change`, pickled."""
    metadata = pickle.loads((directory / ".metadata").read_bytes())
    change(metadata)
    return pickle.dumps(metadata)


def place_of(metadata: Any, fqn: str) -> Any:
    """The file and the bytes of a tensor's box."""
    return next(info for index, info in metadata.storage_data.items() if index.fqn == fqn)


def test_boxes_that_do_not_tile_their_tensor_are_refused(directory: Path) -> None:
    def outside(metadata: Any) -> None:
        place_of(metadata, "model.up.weight").relative_path = "../__0_0.distcp"

    def beyond(metadata: Any) -> None:
        metadata.state_dict_metadata["model.up.weight"].chunks[0].offsets = torch.Size([1, 0])

    def missing(metadata: Any) -> None:
        metadata.state_dict_metadata["model.up.weight"].chunks.clear()

    def twice(metadata: Any) -> None:
        chunks = metadata.state_dict_metadata["model.up.weight"].chunks
        chunks[0].sizes = torch.Size([5, 5])
        chunks.append(type(chunks[0])(torch.Size([0, 0]), torch.Size([2, 5])))

    for change, words in (
        (outside, "outside the directory"), (beyond, "not within its tensor"),
        (missing, "do not cover it"), (twice, "overlap"),
    ):  # fmt: skip
        with pytest.raises(FormatError, match=words):
            directory_of(changed(directory, change), directory)


def test_a_tensor_without_elements_is_read(tmp_path: Path) -> None:
    state = {"w": torch.arange(4.0), "none": torch.zeros(0, 4)}
    dcp.save(state, checkpoint_id=tmp_path / "dcp", no_dist=True)
    import_checkpoint(tmp_path / "dcp", tmp_path / "steps", step=1)
    (file,) = tmp_path.glob("steps/step-1/*.safetensors")
    assert torch.equal(load_file(file)["w"], state["w"])


def test_other_strides_are_refused_by_name(tmp_path: Path) -> None:
    image = torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last)
    dcp.save({"w": torch.ones(2), "image": image}, checkpoint_id=tmp_path / "dcp", no_dist=True)
    words = r"UNSUPPORTED: .*not row-major .*image.*expected row-major, got strides \["
    with pytest.raises(UsageError, match=words) as refused:
        import_checkpoint(tmp_path / "dcp", tmp_path / "steps", step=1)
    assert refused.value.tensor == "image" and not [*tmp_path.glob("steps/step-*")]


def test_an_archive_of_another_tensor_is_refused(directory: Path, tmp_path: Path) -> None:
    """The weight's box points to the archive of a moment of the bias."""

    def swapped(metadata: Any) -> None:
        place = place_of(metadata, "model.up.weight")
        vars(place).update(vars(place_of(metadata, "optim.state.up.bias.exp_avg")))

    opened = directory_of(changed(directory, swapped), directory)
    with pytest.raises(FormatError, match="another tensor"):
        opened.read("model.up.weight", 0, memoryview(bytearray(4)))


def test_a_directory_without_metadata_names_those_that_have_it(
    directory: Path, tmp_path: Path
) -> None:
    with pytest.raises(IoError, match=rf"no checkpoint .*, got \.metadata in {directory.name}\)"):
        import_checkpoint(directory.parent, tmp_path / "steps", step=1)
    with pytest.raises(IoError, match="No such file"):
        import_checkpoint(tmp_path / "none", tmp_path / "steps", step=1)


def test_a_missing_file_of_tensors_is_named(directory: Path, tmp_path: Path) -> None:
    shutil.copytree(directory, tmp_path / "copy")
    next((tmp_path / "copy").glob("*.distcp")).unlink()
    with pytest.raises(IoError, match="IO: .*file __0_0.distcp"):
        import_checkpoint(tmp_path / "copy", tmp_path / "steps", step=1)


def test_no_dtype_rounds_what_an_optimizer_goes_on_from(directory: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="UNSUPPORTED: dtype rounds"):
        import_checkpoint(directory, tmp_path / "steps", step=1, dtype=torch.bfloat16)


def test_an_optimizer_without_its_model_is_refused(directory: Path, tmp_path: Path) -> None:
    """accelerate writes the optimizer to `optimizer_0` and the model to `pytorch_model_fsdp_0`."""
    model, optimizer = trained()
    optim = get_optimizer_state_dict(model, optimizer)
    dcp.save({"optimizer": optim}, checkpoint_id=tmp_path / "optimizer_0", no_dist=True)
    with pytest.raises(UsageError, match="no model .*pytorch_model_fsdp_0"):
        import_checkpoint(tmp_path / "optimizer_0", tmp_path / "steps", step=1)


def test_a_directory_of_accelerate_has_model_and_state(tmp_path: Path) -> None:
    """accelerate's `save_state` under FSDP makes a directory of DCP for each."""
    model, optimizer = trained()
    optim = get_optimizer_state_dict(model, optimizer)
    state = {
        "pytorch_model_fsdp_0": {"model": model.state_dict()},
        "optimizer_0": {"optimizer": optim},
    }
    for name, part in state.items():
        dcp.save(part, checkpoint_id=tmp_path / "state" / name, no_dist=True)
    report = import_checkpoint(tmp_path / "state", tmp_path / "run", step=7, optimizer="AdamW")
    assert report.kind == "accelerate" and report.document["step"] == 7
    (copy, copied), saved = trained(), optimizer.state
    with torch.no_grad():
        for parameter in copy.parameters():
            parameter.zero_()
    copied.state.clear()
    modicum.torch.resume(copy, tmp_path / "run", optimizer=copied, progress=False)
    for p, expected in zip(copy.parameters(), model.parameters(), strict=True):
        assert torch.equal(p, expected)
        assert torch.equal(copied.state[p]["exp_avg"], saved[expected]["exp_avg"])
    dcp.save(state["pytorch_model_fsdp_0"], checkpoint_id=tmp_path / "state/pytorch_model_fsdp_1",
             no_dist=True)  # fmt: skip
    with pytest.raises(UsageError, match=r"several models.*_fsdp_0, pytorch_model_fsdp_1"):
        import_checkpoint(tmp_path / "state", tmp_path / "run", step=8)


def test_weights_alone(directory: Path, tmp_path: Path) -> None:
    report = import_checkpoint(
        directory, tmp_path, step=0, optimizer="none", dtype=torch.bfloat16, budget="1GiB"
    )
    assert {"optim.state.norm.bias.exp_avg", "epoch"} <= {*report.left_out}
    step = Path(report.path)
    assert not (step / "optimizer").exists()
    stored = {n: t for file in step.glob("*.safetensors") for n, t in load_file(file).items()}
    expected = trained()[0].state_dict()
    assert stored.keys() == expected.keys()
    for name, tensor in expected.items():
        cast = tensor.bfloat16() if tensor.is_floating_point() else tensor
        assert torch.equal(stored[name], cast), name


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ({}, "tells no number .expected the number of the training step"),
        ({"step": True}, "step .expected an integer"),
        ({"step": 1, "state_format": "fp32"}, "state_format .*keeps its form, got 'fp32'"),
        ({"step": 1, "dtype": "int8"}, "dtype .*got 'int8'"),
        ({"step": 1, "optimizer": "adamw"}, "optimizer .expected 'AdamW', got 'adamw'"),
        ({"step": 1, "optimizer": "None"}, "optimizer .expected 'none', got 'None'"),
        ({"step": 1, "optimizer": "torch.optim.AdamW"}, "the name of the optimizer's class"),
        ({"step": 1, "optimizer": torch.optim.AdamW}, "the name of the optimizer's class"),
    ],
    ids=str,
)
def test_what_does_not_apply_is_refused(
    directory: Path, tmp_path: Path, how: dict[str, Any], words: str
) -> None:
    with pytest.raises(UsageError, match=words):
        import_checkpoint(directory, tmp_path / "run", **how)
    assert not (tmp_path / "run").exists()


def test_the_names_of_optimizers_are_torchs() -> None:
    """A class of the program, which torch lacks, has the name that the program gives it."""
    classes = (value for value in vars(torch.optim).values() if isinstance(value, type))
    names = {cls.__name__ for cls in classes if issubclass(cls, torch.optim.Optimizer)}
    assert names - {"Optimizer"} == OPTIMIZERS


def test_a_directory_of_no_known_program_names_what_was_looked_for(tmp_path: Path) -> None:
    (tmp_path / "model.bin").touch()
    words = r"\.metadata .*pytorch_model_fsdp_0/.*latest.*got model.bin\)"
    with pytest.raises(IoError, match=words):
        import_checkpoint(tmp_path, tmp_path / "run", step=1)


def test_two_models_are_refused(tmp_path: Path) -> None:
    tensor = {"weight": torch.ones(2)}
    dcp.save({"model": tensor, "ema": tensor}, checkpoint_id=tmp_path / "two", no_dist=True)
    with pytest.raises(UsageError, match="ema, model"):
        import_checkpoint(tmp_path / "two", tmp_path / "steps", step=1)
    assert not (tmp_path / "steps").exists()


@pytest.mark.parametrize("protocol", (2, 4))
def test_getattr_in_a_pickle_is_a_member_of_an_enumeration(protocol: int) -> None:
    """Python 3.11.0 to 3.11.2 pickle a member of an enumeration as a call of getattr. It is read
    without a call, and only if the pickle may name the class."""
    kind = f"{metadata.__name__} _MEM_FORMAT_ENCODING"

    def read(*args: object) -> Any:
        class Written:
            def __reduce__(self) -> Any:
                return getattr, args

        return read_pickle(pickle.dumps(Written(), protocol), ".metadata")

    assert read(metadata._MEM_FORMAT_ENCODING, "TORCH_CHANNELS_LAST") == MadeObject(
        kind, ("TORCH_CHANNELS_LAST",)
    )
    allowed = metadata.Metadata  # a name that pickles may have
    for args in ((os.getcwd, "name"), ("os", "system"), (allowed, 3), (allowed,)):
        with pytest.raises(FormatError, match="the pickle (calls|names)"):
            read(*args)


def read_mutated(directory: Path, count: int) -> None:
    """Reads `count` randomly damaged copies of the metadata. Most must be refused, and none may
    execute anything."""
    data, generator, refused = (directory / ".metadata").read_bytes(), random.Random(count), 0
    for number in range(count):
        damaged = mutated(data, generator)
        with nothing_happens(number):
            try:
                directory_of(damaged, directory)
            except Error as error:
                refused += 1
                assert error.category == "FORMAT.PICKLE", number
    assert refused > count // 2


def test_mutated_metadata_executes_nothing(directory: Path) -> None:
    read_mutated(directory, 1500)


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_a_hundred_thousand_mutated_metadata_execute_nothing(directory: Path) -> None:
    read_mutated(directory, 100_000)
