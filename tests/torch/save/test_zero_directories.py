"""`modicum.imports.import_checkpoint` converts checkpoint directories of DeepSpeed's ZeRO to those
of Modicum, which are Modicum's checkpoint directories. It executes no pickle.

The oracles are the tensors of DeepSpeed's engines on two ranks, DeepSpeed's own conversion
(zero_to_fp32), and Python's audit events, which show executions. Catches: an element that is read
from another rank's piece or from the padding; the state of another parameter; a lower half that
belongs to an upper half of another rounding; step counts that are lost; a frozen or tied parameter
without values. Must also fail if these are accepted: files of two steps; the files of one rank too
few or too many; an unknown layout; a pickle with a name that is not on the list of allowed names; a
tensor that an unknown function would rebuild; a frozen parameter whose dtype differs by rank.
"""

import json
import random
import shutil
import zipfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("deepspeed")
pytest.importorskip("transformers")

import zero_rank  # noqa: E402  (after torch is known to be there)
from audit import mutated, nothing_happens  # noqa: E402
from extensions import needs_extensions  # noqa: E402
from program import run_json  # noqa: E402
from ranks import torchrun  # noqa: E402
from safetensors.torch import load_file  # noqa: E402

import modicum.torch  # noqa: E402
from modicum import _modicum  # noqa: E402
from modicum.errors import Error, FormatError, IntegrityError, IoError, UsageError  # noqa: E402
from modicum.imports import import_checkpoint  # noqa: E402
from modicum.imports.archives import Archive, Record  # noqa: E402
from modicum.imports.pickles import Global, MadeObject, Pairs, StorageReference  # noqa: E402
from modicum.imports.zero import directory_of  # noqa: E402
from modicum.torch.shards.tensors import as_bytes  # noqa: E402
from modicum.upstream.torch_checkpoint import REBUILD_TENSOR, REBUILD_TYPED  # noqa: E402

pytestmark = needs_extensions

# Configurations of DeepSpeed in tests/support/zero_rank.py.
CASES = ("zero2", "zero3", "float32", "offloaded")
# The last one has DeepSpeed's own optimizer, which is compiled: a minute or more.
PARAMETERS = (*CASES[:-1], pytest.param(CASES[-1], marks=pytest.mark.soak))
TAG = f"global_step{zero_rank.STEPS}"
TRAINED = ("embed.weight", "up.weight", "norm.weight", "gain.weight", "deep.weight")


@pytest.fixture(scope="module")
def folder(
    root: Path, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """For each of CASES (the last one if a soak test needs it) a directory that DeepSpeed has
    saved, and a file with the tensors that its engines held."""
    folder = tmp_path_factory.mktemp("zero")
    here = [item for item in request.session.items if item.path == request.path]
    is_soak = any(item.get_closest_marker("soak") for item in here)
    cases = CASES if is_soak else CASES[:-1]
    done = torchrun(root, 2, Path(zero_rank.__file__), folder, *cases)
    assert done.returncode == 0, done.stderr[-4000:]
    return folder


def tensors_of(files: Iterator[Path]) -> dict[str, Any]:
    return {name: tensor for file in files for name, tensor in load_file(file).items()}


def bits(tensor: Any) -> Any:
    """The bits of a tensor as integers of the same size."""
    return tensor.contiguous().view({2: torch.int16, 4: torch.int32}[tensor.itemsize])


def same(one: Any, other: Any) -> bool:
    """Whether two tensors have the same dtype and bits."""
    return one.dtype == other.dtype and torch.equal(bits(one), bits(other))


# ---- values


@pytest.mark.parametrize("state_format", ["fp32", "fp32-split"])
@pytest.mark.parametrize("case", PARAMETERS)
def test_the_checkpoint_has_what_the_engine_held(
    folder: Path, tmp_path: Path, case: str, state_format: str
) -> None:
    report = import_checkpoint(folder / case, tmp_path, state_format=state_format)
    assert report.step == zero_rank.STEPS and "epoch" in report.left_out
    assert "epoch" in str(report).partition("left out ")[2]
    step, saved = Path(report.path), load_file(folder / f"{case}-saved.safetensors")
    weights = tensors_of(step.glob("*.safetensors"))
    assert weights.keys() == zero_rank.small().state_dict().keys() - {"head.weight"}
    state = tensors_of(step.glob("optimizer/*.safetensors"))
    for name in TRAINED:
        weight, master = weights[name], saved[f"master/{name}"]
        if case == "float32":
            assert same(weight, master)
        elif state_format == "fp32":
            assert same(weight, master.bfloat16()), name
            assert same(state.pop(f"{name}.master"), master), name
        else:
            # The weight is the upper half of the master.
            upper = bits(weight).int() << 16
            assert torch.equal(upper + state.pop(f"{name}.master_low").int(), bits(master)), name
        for key in ("exp_avg", "exp_avg_sq"):
            assert same(state.pop(f"{name}.{key}"), saved[f"{key}/{name}"]), (name, key)
    assert not state
    initial = zero_rank.small().state_dict()
    assert same(weights["frozen.weight"], initial["frozen.weight"].to(weights["up.weight"].dtype))
    assert same(weights["scale"], initial["scale"])  # DeepSpeed casts parameters only
    assert torch.equal(weights["counts"], torch.arange(6))
    facts = json.loads((step / "optimizer/state.json").read_text())
    assert facts["steps"] == zero_rank.STEPS
    groups = json.loads((step / "optimizer/groups.json").read_text())["groups"]
    assert [group["options"]["lr"] for group in groups] == [1e-2, 3e-3]


@pytest.mark.parametrize("case", PARAMETERS)
def test_the_weights_alone_are_those_of_zero_to_fp32(
    folder: Path, tmp_path: Path, case: str
) -> None:
    report = import_checkpoint(
        folder / case / TAG, tmp_path, step=8, dtype=torch.float32, optimizer="none"
    )
    weights = tensors_of(Path(report.path).glob("*.safetensors"))
    saved = load_file(folder / f"{case}-saved.safetensors")
    full = {n.removeprefix("full/"): tensor for n, tensor in saved.items() if "full/" in n}
    if case == "float32":  # in stage 1 zero_to_fp32 leaves out frozen parameters
        full["frozen.weight"] = zero_rank.small().get_parameter("frozen.weight").detach()
    assert weights.keys() == full.keys() - {"head.weight"}
    assert all(torch.equal(t.float(), full[name].float()) for name, t in weights.items())
    assert not (Path(report.path) / "optimizer").exists()


@pytest.mark.soak
@pytest.mark.parametrize("state_format", ["fp32", "fp32-split"])
def test_modicum_goes_on_as_deepspeed_does(folder: Path, tmp_path: Path, state_format: str) -> None:
    """After the same further steps the masters are within two ulps of DeepSpeed's, which rounds the
    elements after its last full SIMD vector differently."""
    import_checkpoint(folder / "offloaded", tmp_path, state_format=state_format)
    model = zero_rank.small().bfloat16()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    optimizer = modicum.torch.AdamW(
        zero_rank.groups_of(model), betas=(0.5, 0.5), state_format=state_format,
        semantics="deepspeed",
    )  # fmt: skip
    modicum.torch.resume(model, tmp_path, optimizer=optimizer, progress=False)
    assert optimizer.param_groups[0]["betas"] == zero_rank.BETAS
    for number in range(zero_rank.STEPS, zero_rank.STEPS + zero_rank.LATER):
        for name in TRAINED:
            parameter = model.get_parameter(name)
            parameter.grad = zero_rank.coefficients(parameter.shape, number).bfloat16()
        optimizer.step()
    saved = load_file(folder / "offloaded-saved.safetensors")
    state = optimizer.state_dict()["state"]
    named = [name for group in zero_rank.groups_of(model) for name, _ in group["params"]]
    for index, name in enumerate(named):
        ulps = bits(state[index]["master"]) - bits(saved[f"later/{name}"])
        assert ulps.abs().max() <= 2, name


def test_tensors_of_several_windows_are_whole(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Elements are converted in windows, here of at most seven elements, and at the end of a tensor
    in a small buffer, here of two elements."""
    monkeypatch.setattr("modicum.imports.zero_step._WINDOW", 7)
    monkeypatch.setattr("modicum.imports.zero_step._REST", 2)
    report = import_checkpoint(folder / "zero3", tmp_path, state_format="fp32-split")
    saved = load_file(folder / "zero3-saved.safetensors")
    weights = tensors_of(Path(report.path).glob("*.safetensors"))
    for name in TRAINED:
        assert torch.equal(bits(weights[name]), bits(halves(saved[f"master/{name}"])[0]))


def halves(master: Any) -> tuple[Any, Any]:
    """The upper and lower halves that docs/internals/numerics.md defines, computed in 64 bits."""
    wide = bits(master).long() & 0xFFFFFFFF
    upper = (wide + 0x8000) >> 16
    lower = wide - (upper << 16)
    return upper.to(torch.int16).view(torch.bfloat16), lower.to(torch.int16)


def test_the_halves_of_a_tie_are_rounded_up() -> None:
    """At a tie the upper half is rounded up in magnitude, never to even."""
    values = torch.tensor([0x3F808000, 0x3F818000, -0x407F8000, 0x3F807FFF, 0]).int()
    values = values.view(torch.float32)
    upper, lower = torch.empty(5, dtype=torch.bfloat16), torch.empty(5, dtype=torch.int16)
    for form, into in (("upper", upper), ("lower", lower)):
        _modicum.cast_masters(as_bytes(values).numpy(), as_bytes(into).numpy(), form)
    expected_upper, expected_lower = halves(values)
    assert torch.equal(bits(upper), bits(expected_upper))
    assert torch.equal(bits(lower), bits(expected_lower))
    assert not torch.equal(upper, values.bfloat16())


def test_a_source_gives_files_and_config(folder: Path, tmp_path: Path, modicum: Path) -> None:
    """With `source=` the checkpoint has the source's file names with the same tensors in each, and
    its config.json with the new dtype."""
    plain = import_checkpoint(folder / "zero3", tmp_path / "plain", optimizer="none")
    source = tmp_path / "source"
    run_json(modicum, "convert", plain.path, source, "--shard-size", 200)
    (source / "config.json").write_text('{"dtype": "bfloat16"}')
    report = import_checkpoint(
        folder / "zero3", tmp_path / "root", source=source, optimizer="none", dtype="float32"
    )
    assert json.loads((Path(report.path) / "config.json").read_text()) == {"dtype": "float32"}
    files = [
        {file.name: load_file(file).keys() for file in step.glob("*.safetensors")}
        for step in (source, Path(report.path))
    ]
    assert files[0] == files[1] and len(files[0]) > 1


# ---- refusals


@pytest.fixture
def copied(folder: Path, tmp_path: Path) -> Path:
    """A copy of ZeRO-3's directory."""
    shutil.copytree(folder / "zero3", tmp_path / "copied")
    return tmp_path / "copied"


def refused(directory: Path, kind: type[Error], words: str) -> None:
    """Asserts that a conversion raises this error, and writes nothing."""
    with pytest.raises(kind, match=words):
        import_checkpoint(directory, directory.parent / "steps", step=1)
    assert not (directory.parent / "steps").exists()


def test_a_missing_rank_is_named(copied: Path) -> None:
    for file in ("optim", "model"):
        path = next((copied / TAG).glob(f"*pp_rank_1_*{file}_states.pt"))
        path.rename(copied / "away")
        refused(copied, IntegrityError, f"missing .file {path.name}")
        (copied / "away").rename(path)


def test_what_cannot_be_read_is_named(copied: Path) -> None:
    refused(copied / "none", IoError, "IO: .*file none")
    (copied / "latest").write_text("global_step9")
    refused(copied, IoError, "IO: .*file global_step9")
    (copied / "latest").write_bytes(b"\xff")
    refused(copied, FormatError, r"FORMAT.*file latest, got b'\\xff'")


def test_files_of_two_checkpoints_are_refused(copied: Path) -> None:
    other = copied / f"global_step{zero_rank.STEPS + zero_rank.LATER}"
    for file, words in (("optim", "other steps"), ("model", "another global_steps")):
        path = next((copied / TAG).glob(f"*pp_rank_1_*{file}_states.pt"))
        before = path.read_bytes()
        shutil.copyfile(other / path.name, path)
        refused(copied, IntegrityError, words)
        path.write_bytes(before)


def test_a_rank_too_many_is_refused(copied: Path) -> None:
    path = next((copied / TAG).glob("*pp_rank_1_*optim_states.pt"))
    shutil.copyfile(path, path.with_name(path.name.replace("rank_1", "rank_2")))
    refused(copied, IntegrityError, "more ranks .*expected 2 ranks.*got 3")


def test_a_torn_file_is_refused(copied: Path) -> None:
    path = next((copied / TAG).glob("*pp_rank_1_*optim_states.pt"))
    path.write_bytes(path.read_bytes()[:-100])
    refused(copied, FormatError, f"no archive of torch.save.*{path.name}")


@pytest.mark.parametrize("key", [b"zero_stage", b"fp32_flat_groups", b"param_shapes"])
def test_an_unknown_layout_is_refused(copied: Path, key: bytes) -> None:
    for path in (copied / TAG).glob("*.pt"):
        rewrite(path, lambda pickle: pickle.replace(key, key[:-1] + b"_"))
    refused(copied, FormatError, f"'{key.decode()}' is missing.*DeepSpeed 0")


def test_frozen_parameters_without_values_are_refused(copied: Path) -> None:
    """The directory is changed to look like one of
    `save_checkpoint(exclude_frozen_parameters=True)`. The model in it has a frozen parameter."""
    for path in (copied / TAG).glob("*model_states.pt"):
        rewrite(path, lambda pickle: pickle.replace(b"frozen_param_shapes", b"frozen_param_shape_"))
    refused(copied, IntegrityError, "frozen parameter were not saved.*frozen.weight")


def test_a_frozen_parameter_of_another_dtype_is_refused(copied: Path) -> None:
    path = next((copied / TAG).glob("*pp_rank_1_*model_states.pt"))
    rewrite(path, lambda pickle: pickle.replace(b"BFloat16Storage", b"HalfStorage"))
    refused(copied, IntegrityError, "dtype.*frozen.weight.*expected bfloat16, got float16")


def test_a_tensor_with_attributes_is_rebuilt_by_no_other_function(tmp_path: Path) -> None:
    """torch.Size is a name that a pickle may have, but it is not a function that makes a tensor."""
    stored = StorageReference(("storage", Global("torch FloatStorage"), "0", "cpu", 4))
    arguments = (stored, 0, (4,), (1,), False, Pairs())  # offset, shape, strides, ...
    path = tmp_path / "saved.pt"
    archive = Archive(path, b"", {"0": Record(path, "saved/data/0", 64, 4 * 4, crc=0)})

    def typed(function: str) -> MadeObject:
        cls = Global("torch Tensor")
        return MadeObject(REBUILD_TYPED, (Global(function), cls, arguments, Pairs()))

    assert archive.line(typed(REBUILD_TENSOR)).begin == 64
    with pytest.raises(ValueError, match="no plain tensor"):
        archive.line(typed("torch Size"))


def rewrite(path: Path, change: Any) -> None:
    """Replaces the pickle in an archive of torch.save by `change(pickle)`."""
    with zipfile.ZipFile(path) as archive:
        members = [(info.filename, archive.read(info)) for info in archive.infolist()]
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in members:
            archive.writestr(name, change(data) if name.endswith("data.pkl") else data)


def test_ranks_of_other_kinds_are_refused(copied: Path) -> None:
    for name, words in (
        ("layer_0_expert_1_mp_rank_00_model_states.pt", "experts"),
        ("zero_pp_rank_0_mp_rank_01_model_states.pt", "tensor-parallel"),
    ):
        (copied / TAG / name).touch()
        refused(copied, UsageError, words)
        (copied / TAG / name).unlink()
    (copied / "empty").mkdir()
    refused(copied / "empty", IoError, "no checkpoint directory of a known program")


# ---- pickles


def read_mutated(step: Path, count: int) -> None:
    """`count` times: damages the pickle of one of the files, reads all files, and asserts that
    nothing is executed."""
    archives = [Archive.open(path) for path in sorted(step.glob("*.pt"))]
    generator, refused = random.Random(count), 0
    for number in range(count):
        at = generator.randrange(len(archives))
        damaged = replace(archives[at], pickle=mutated(archives[at].pickle, generator))
        files = [*archives[:at], damaged, *archives[at + 1 :]]
        with nothing_happens(number, opened=".pt"):
            try:
                # Sorted by name, the two files of the optimizer come before those of the model.
                directory_of(files[2:], files[:2])
            except Error as error:
                refused += 1
                kind = error.category.partition(".")[0]
                assert kind in ("FORMAT", "INTEGRITY", "UNSUPPORTED"), number
    assert len(archives) == 4 and refused > count // 4


def test_a_command_in_a_pickle_is_refused(copied: Path) -> None:
    """The number 3 in the pickle is replaced by the name os.system."""
    path = next((copied / TAG).glob("*pp_rank_0_*model_states.pt"))
    rewrite(path, lambda pickle: pickle.replace(b"K\x03", b"cos\nsystem\n", 1))
    refused(copied, FormatError, "the pickle names 'os.system'")


def test_mutated_pickles_execute_nothing(folder: Path) -> None:
    read_mutated(folder / "zero3" / TAG, 400)


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_a_hundred_thousand_mutated_pickles_execute_nothing(folder: Path) -> None:
    read_mutated(folder / "zero3" / TAG, 100_000)
