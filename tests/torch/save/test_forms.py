"""Which tensors `modicum.torch.save` writes to the files of a checkpoint, under
which names, and what `resume` reads back.

Catches: a tensor of the model that is not saved because no source file has it; a resumed model that
cannot be saved again once the checkpoint that it was resumed from is removed, or a model once its
source is, or a copy of it once the model's saves have removed its source; tensors of the source
that the model does not use and that `unused="copy"` drops; a save without a budget; one step count
for all parameters; elements on a device that are read from another address; a resume that does not
compare values; a removal by `keep` that fails without a word; a reported peak that leaves out the
publication; extras that no resume can read; a tensor that was untied after the load and is left
out; a model cast after the load that is saved in the dtype of the load, or not at all; a weight
whose shape has changed since and that is written under its old shape; a dtype that rounds the
weights from which a saved optimizer goes on; an error without a remedy for other frozen parameters
than at the save; parameters of another optimizer, numbers that no checkpoint can have and keys with
a dot, all without a typed error; accelerate's optimizer or any other wrapper around Modicum's AdamW
that is saved by the state that it shows; a source that lacks the model's tensors, or some of them,
and is copied without a word; a config.json with another number of tokens than the saved rows.
"""

import os
import re
import shutil
from copy import deepcopy
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

import torch.distributed.checkpoint as dcp  # noqa: E402
import torch_front  # noqa: E402
from nested_options import nested  # noqa: E402
from program import run_json  # noqa: E402
from safetensors.torch import save_file  # noqa: E402

import modicum.torch as front  # noqa: E402
from modicum import _modicum, convert  # noqa: E402
from modicum.errors import (  # noqa: E402
    BudgetError,
    FormatError,
    IoError,
    UsageError,
)
from modicum.torch.dcp import ModicumWriter  # noqa: E402
from modicum.torch.saving import extra as extras  # noqa: E402
from modicum.torch.saving import running, tensor_state, weights  # noqa: E402
from modicum.torch.shards import tensors  # noqa: E402


def loaded(name: str, source: Path | None = None, **how: Any) -> Any:
    model = torch_front.empty(name)
    directory = source or torch_front.checkpoint_of(name)
    front.load(model, directory, progress=False, **nested(how, "rules", "memory"))
    return model


def assert_holds(directory: Path, model: Any) -> None:
    """Asserts that `from_pretrained` gives the model's tensors."""
    read = type(model).from_pretrained(directory, dtype="auto").state_dict()
    for name, tensor in model.state_dict().items():
        assert read[name].dtype == tensor.dtype and torch.equal(read[name], tensor), name


@pytest.mark.parametrize("name", ("llama", "llama_tied_head_stored", "qwen3_moe", "gpt2"))
def test_the_files_are_those_of_the_source(tmp_path: Path, name: str) -> None:
    """The models rename, stack and tie tensors of the source. Two do not use all of them: by
    default a save copies the unused ones."""
    model = loaded(name)
    before = torch_front.stored_in(torch_front.checkpoint_of(name))
    report = front.save(model, tmp_path / "steps", step=1)
    after = torch_front.stored_in(Path(report.path))
    assert after.keys() == before.keys()
    assert all(torch.equal(after[n], t) and after[n].dtype == t.dtype for n, t in before.items())
    copied = sum(before[n].nbytes for n in report.copied)
    assert report.read_bytes == copied and bool(copied) == (name in ("llama", "gpt2"))
    dropped = front.save(
        model, tmp_path / "steps", step=2, options=front.SaveOptions(unused="drop", dtype=None)
    )
    assert sorted(dropped.left_out) == sorted(report.copied) and dropped.read_bytes == 0
    assert_holds(Path(dropped.path), model)


@pytest.mark.parametrize("name", ("llama_tied", "llava"))
@pytest.mark.parametrize("by", ("save", "async_save", "writer"))
def test_a_resized_model_is_saved_with_its_number_of_tokens(
    tmp_path: Path, name: str, by: str
) -> None:
    """Of config.json only this number changes, in llava's text_config."""
    model, root = torch_front.empty(name), tmp_path / "steps"
    tokens = model.get_input_embeddings().num_embeddings + 9
    model.resize_token_embeddings(tokens, mean_resizing=False)
    source = torch_front.checkpoint_of(name)
    front.load(model, source, rules=front.LoadRules(resized="mean"), progress=False)
    if by == "save":
        assert front.save(model, root, step=1).warnings == []
    elif by == "async_save":
        assert front.async_save(model, root, step=1).result().warnings == []
    else:
        dcp.save(model.state_dict(), storage_writer=ModicumWriter(root, step=1, model=model))
    before, after = ((path / "config.json").read_text() for path in (source, root / "step-1"))
    key = '"vocab_size": '
    assert after == before.replace(f"{key}{tokens - 9}", f"{key}{tokens}") != before
    assert_holds(root / "step-1", model)
    convert(root / "step-1", tmp_path / "converted")
    assert_holds(tmp_path / "converted", model)


def test_rows_that_no_config_counts_are_warned_of(tmp_path: Path) -> None:
    """A model with another number of tokens than its config, and one that is none of
    transformers."""
    model, source = torch_front.empty("llama_tied"), torch_front.checkpoint_of("llama_tied")
    tokens = model.config.vocab_size
    embedding = model.resize_token_embeddings(tokens + 9, mean_resizing=False)
    model.config.vocab_size = tokens
    front.load(model, source, rules=front.LoadRules(resized="mean"), progress=False)
    with pytest.warns(UserWarning, match=f"its config has vocab_size {tokens}"):
        report = front.save(model, tmp_path / "steps", step=1)
    assert f"model.embed_tokens.weight has {tokens + 9} rows" in report.warnings[0]
    plain = torch.nn.Module()
    plain.model = torch.nn.Module()
    plain.model.embed_tokens = embedding
    rules = front.LoadRules(missing=["embed_tokens"], unexpected="ignore")
    front.load(plain, source, rules=rules, progress=False)
    with pytest.warns(UserWarning, match="it has no config of transformers"):
        front.save(plain, tmp_path / "steps", step=2, options=front.SaveOptions(unused="drop"))


@pytest.mark.parametrize("staging", ("256KiB", None))
def test_tensors_on_a_device_come_through_staging(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, staging: str | None
) -> None:
    """The parameters of a dense model, and stacked experts, are treated as on a device, whose
    memory the C++ library cannot read."""
    for module in (weights, tensors):
        monkeypatch.setattr(module, "destination_of", lambda local: "copy")
    for name in ("gpt2", "qwen3_moe"):
        report = front.save(
            loaded(name), tmp_path / name, step=1, memory=front.MemoryPolicy(staging=staging)
        )
        after = torch_front.stored_in(Path(report.path))
        for fqn, tensor in torch_front.stored_in(torch_front.checkpoint_of(name)).items():
            assert torch.equal(after[fqn], tensor), fqn


def test_tensors_that_no_file_had_are_saved(tmp_path: Path) -> None:
    """The load initialises `head`, and leaves the buffer `scale` unchanged."""
    model = torch_front.empty("qwen3")
    model.head = torch.nn.Linear(3, 2, device="meta")
    model.register_buffer("scale", torch.tensor([2.0, 3.0]))
    source = torch_front.checkpoint_of("qwen3")
    front.load(model, source, rules=front.LoadRules(missing=["head"]), progress=False)
    report = front.save(model, tmp_path / "steps", step=1)
    stored = torch_front.stored_in(Path(report.path))
    for name in ("head.weight", "head.bias", "scale"):
        assert torch.equal(stored[name], model.state_dict()[name]), name


@pytest.mark.parametrize("name", ("llama_tied", "llama_tied_both_stored"))
@pytest.mark.parametrize("by_source", (False, True))
def test_a_head_untied_after_the_load_is_saved(tmp_path: Path, name: str, by_source: bool) -> None:
    """transformers' list of tied names still has the head. A later tie, which the load did not
    know, is no fault."""
    model = loaded(name)
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach() + 1)
    model.model.norm.weight = model.model.layers[0].input_layernorm.weight
    source = torch_front.checkpoint_of(name) if by_source else None
    report = front.save(model, tmp_path / "steps", step=1, options=front.SaveOptions(source=source))
    stored = torch_front.stored_in(Path(report.path))
    assert {*stored} >= {"lm_head.weight", "model.norm.weight"}
    for fqn, tensor in model.state_dict().items():
        assert torch.equal(stored[fqn], tensor), fqn
    assert_holds(Path(report.path), model)
    again = loaded(name)
    with pytest.raises(UsageError, match="lm_head.weight. is tied to"):
        front.resume(again, tmp_path / "steps", progress=False)


def test_names_tied_to_another_tensor_after_the_load_share_it(tmp_path: Path) -> None:
    """Three names were tied. Two of them now share a new tensor."""
    model = torch_front.empty("llama_tied")
    model.third = torch.nn.Linear(1, 1, bias=False, device="meta")
    model.third.weight = model.lm_head.weight
    front.load(model, torch_front.checkpoint_of("llama_tied"), progress=False)
    new = torch.nn.Parameter(model.lm_head.weight.detach() + 1)
    model.third.weight = model.lm_head.weight = new
    report = front.save(model, tmp_path / "steps", step=1)
    stored = torch_front.stored_in(Path(report.path))
    assert torch.equal(stored["lm_head.weight"], new) and "third.weight" not in stored
    assert torch.equal(stored["model.embed_tokens.weight"], model.model.embed_tokens.weight)


@pytest.mark.parametrize(
    ("name", "dtype"),
    (("llama_tied", "float32"), ("qwen3_moe", "float32"), ("gpt2", "bfloat16")),
)
def test_a_model_cast_after_the_load_is_saved_as_it_is(
    tmp_path: Path, name: str, dtype: str
) -> None:
    """With a value that bfloat16 cannot represent, if the new dtype can. The resume's model was
    cast in the same way."""

    def cast() -> Any:
        model = loaded(name)
        assert model.dtype != getattr(torch, dtype)
        return model.to(getattr(torch, dtype))

    model, again = cast(), cast()
    with torch.no_grad():
        next(model.parameters()).view(-1)[0] = 1 + 2**-10
    report = front.save(
        model, tmp_path / "steps", step=1, optimizer=front.AdamW(model.parameters())
    )
    assert_holds(Path(report.path), model)
    how = {"optimizer": front.AdamW(again.parameters()), "progress": False}
    assert front.resume(again, tmp_path / "steps", **how).step == 1
    for fqn, tensor in model.state_dict().items():
        assert torch.equal(again.state_dict()[fqn], tensor), fqn
    if dtype == "float32":
        uncast = loaded(name)
        how["optimizer"] = front.AdamW(uncast.parameters())
        with pytest.raises(UsageError, match="the parameter was float32 when it was saved"):
            front.resume(uncast, tmp_path / "steps", **how)


def test_a_shape_that_changed_after_the_load_is_refused(tmp_path: Path) -> None:
    model = loaded("llama")
    layer = model.model.layers[0].mlp.up_proj
    layer.weight = torch.nn.Parameter(layer.weight.detach().t().contiguous())
    shape = re.escape(str([*layer.weight.shape]))
    with pytest.raises(UsageError, match=rf"MISMATCH: .*layers\.0\.mlp\.up_proj.*got {shape}"):
        front.save(model, tmp_path / "steps", step=1)
    assert not (tmp_path / "steps").exists()


def test_no_dtype_rounds_what_an_optimizer_goes_on_from(tmp_path: Path) -> None:
    model = loaded("llama")
    kinds = (
        lambda: front.AdamW(model.named_parameters()),
        lambda: torch.optim.AdamW(model.parameters()),
    )
    for step, make in enumerate(kinds, 1):
        optimizer = make()
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        for dtype in {torch.bfloat16, torch.float16} - {model.dtype}:
            with pytest.raises(UsageError, match="UNSUPPORTED: dtype rounds"):
                front.save(
                    model,
                    tmp_path,
                    step=step,
                    optimizer=optimizer,
                    options=front.SaveOptions(dtype=dtype),
                )
        front.save(
            model,
            tmp_path,
            step=step,
            optimizer=optimizer,
            options=front.SaveOptions(dtype=torch.float32),
        )
        again = torch_front.empty("llama")
        new = type(optimizer)(again.parameters())
        front.resume(again, tmp_path / f"step-{step}", optimizer=new, progress=False)
        for one, other in zip(model.parameters(), again.parameters(), strict=True):
            assert torch.equal(one, other) and one.dtype == other.dtype


def test_a_model_of_another_loader_needs_its_source(tmp_path: Path) -> None:
    source = torch_front.checkpoint_of("qwen3_moe")
    model = torch_front.from_pretrained("qwen3_moe")
    with pytest.raises(UsageError, match=r"give SaveOptions\(source="):
        front.save(model, tmp_path / "steps", step=1)
    report = front.save(model, tmp_path / "steps", step=1, options=front.SaveOptions(source=source))
    assert torch_front.stored_in(Path(report.path)).keys() == torch_front.stored_in(source).keys()
    half = front.save(
        model,
        tmp_path / "steps",
        step=2,
        options=front.SaveOptions(source=source, dtype=torch.float16, shard_size="16KiB"),
    )
    read = type(model).from_pretrained(half.path, dtype="auto")
    assert read.dtype == torch.float16
    weight, read_weight = model.model.norm.weight, read.model.norm.weight
    assert torch.equal(read_weight, weight.to(torch.float16))


def test_a_source_without_the_models_tensors_is_refused(tmp_path: Path) -> None:
    """The checkpoint would hold the source's values under the names that from_pretrained reads. So
    it may be with the names that only one of both has."""
    source = torch_front.checkpoint_of("llama")
    stored = torch_front.stored_in(source)
    model = torch.nn.ModuleDict({"tokens": torch.nn.Embedding(*stored["lm_head.weight"].shape)})
    with pytest.raises(UsageError, match=r"MISMATCH: the source has no .*tokens\.weight"):
        front.save(model, tmp_path, step=1, options=front.SaveOptions(source=source))
    model["model"] = inner = torch.nn.Module()
    inner.norm = torch.nn.RMSNorm(*stored["model.norm.weight"].shape)
    words = r"MISMATCH: the source lacks .*'lm_head\.weight'.*unused='drop'.*tokens\.weight"
    with pytest.raises(UsageError, match=words):
        front.save(model, tmp_path, step=1, options=front.SaveOptions(source=source))
    report = front.save(
        model, tmp_path, step=1, options=front.SaveOptions(source=source, unused="drop")
    )
    assert torch_front.stored_in(Path(report.path)).keys() == {"model.norm.weight", "tokens.weight"}


class Matrices(torch.nn.Module):
    """A bfloat16 matrix, whose moments can be 8-bit ones, and a vector."""

    def __init__(self) -> None:
        super().__init__()
        self.matrix = torch.nn.Parameter(torch.linspace(-1, 1, 64 * 128).bfloat16().view(64, 128))
        self.vector = torch.nn.Parameter(torch.ones(128).bfloat16())

    def train_by(self, optimizer: torch.optim.Optimizer, steps: int) -> None:
        for _ in range(steps):
            (self.matrix * self.vector).float().square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()


class Around(torch.optim.Optimizer):
    """A wrapper that Modicum does not know. It shows the inner optimizer's `state`."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self.inner, self.state, self.param_groups = inner, inner.state, inner.param_groups


@pytest.mark.parametrize("state_format", ("fp32", "int8-moments"))
def test_accelerates_optimizer_is_the_one_inside(tmp_path: Path, state_format: str) -> None:
    """Trainer's callbacks get this wrapper."""
    accelerate = pytest.importorskip("accelerate")

    def made() -> tuple[Matrices, Any]:
        model = Matrices()
        inner = front.AdamW(model.named_parameters(), lr=1e-2, state_format=state_format)
        return model, accelerate.Accelerator(cpu=True).prepare_optimizer(inner)

    source = tmp_path / "model.safetensors"
    save_file({name: of.detach() for name, of in Matrices().named_parameters()}, source)
    (model, optimizer), (again, new) = made(), made()
    front.load(model, source, optimizer=optimizer, progress=False)
    model.train_by(optimizer, 3)
    front.save(model, tmp_path / "steps", step=1, optimizer=optimizer)
    front.resume(again, tmp_path / "steps", optimizer=new, progress=False)
    for of, by in ((model, optimizer), (again, new)):
        of.train_by(by, 5)
    assert torch.equal(model.matrix, again.matrix) and torch.equal(model.vector, again.vector)
    with pytest.raises(UsageError, match="UNSUPPORTED: a state dict lacks the state tensors"):
        ModicumWriter(tmp_path / "steps", step=2, model=model, optimizer=optimizer)
    other = Around(optimizer.optimizer)
    # The vector's moments are tensors in every format.
    other.state = {model.matrix: other.state[model.matrix]}
    with pytest.raises(UsageError, match="UNSUPPORTED: an unknown wrapper .* got Around"):
        front.save(model, tmp_path / "steps", step=2, optimizer=other)


def test_torchs_optimizer_that_has_loaded_a_living_optimizers_state_is_saved(
    tmp_path: Path,
) -> None:
    """torch's `load_state_dict` passes tensors on: both optimizers have the same step counts."""
    (model, again), source = (Matrices(), Matrices()), tmp_path / "model.safetensors"
    save_file({name: tensor.detach() for name, tensor in model.named_parameters()}, source)
    before = front.AdamW(model.named_parameters(), lr=1e-2)
    front.load(model, source, optimizer=before, progress=False)
    model.train_by(before, 3)
    optimizer, other = (torch.optim.AdamW(m.parameters(), lr=1e-2) for m in (model, again))
    optimizer.load_state_dict(before.state_dict())
    front.save(model, tmp_path / "steps", step=3, optimizer=optimizer)
    front.resume(again, tmp_path / "steps", optimizer=other, progress=False)
    for parameter, loaded_one in zip(model.parameters(), again.parameters(), strict=True):
        entry, read = optimizer.state[parameter], other.state[loaded_one]
        assert entry.keys() == read.keys() >= {"step", "exp_avg", "exp_avg_sq"}
        assert all(torch.equal(value, read[key]) for key, value in entry.items())


def test_keeps_the_newest_while_a_resumed_model_goes_on(tmp_path: Path) -> None:
    """The model can be saved again after `keep` has removed the checkpoint that it was resumed
    from."""
    root = tmp_path / "steps"
    front.save(loaded("llama"), root, step=1)
    model = torch_front.empty("llama")
    assert front.resume(model, root, progress=False).step == 1
    for step in (2, 3, 4):
        report = front.save(model, root, step=step, keep=1)
        assert sorted(path.name for path in root.iterdir()) == ["latest", f"step-{step}"]
    assert len(report.copied) == 1  # the unused tensor of the first source
    assert_holds(Path(report.path), model)


def test_the_last_checkpoint_serves_once_the_source_is_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The source was given as a relative path, and the program changes its directory later."""
    base = shutil.copytree(torch_front.checkpoint_of("llama"), tmp_path / "base")
    monkeypatch.chdir(tmp_path)
    model = loaded("llama", Path("base"))
    monkeypatch.chdir("/")
    first = front.save(model, tmp_path / "steps", step=1)
    shutil.rmtree(base)
    second = front.save(model, tmp_path / "steps", step=2)
    assert second.copied == first.copied and len(first.copied) == 1
    shutil.rmtree(first.path)
    third = front.save(model, tmp_path / "others", step=3)
    assert_holds(Path(third.path), model)


def test_a_source_elsewhere_serves_once_the_saved_checkpoint_is_removed(tmp_path: Path) -> None:
    root = tmp_path / "steps"
    front.save(loaded("llama"), root, step=1)
    model = loaded("llama", root / "step-1")
    shutil.rmtree(front.save(model, root, step=2).path)
    assert_holds(Path(front.save(model, root, step=3).path), model)


@pytest.mark.parametrize("is_resumed", (True, False))
def test_a_copy_goes_on_after_the_models_saves_have_removed_its_source(
    tmp_path: Path, is_resumed: bool
) -> None:
    """The copy is that of an EMA: it has a run of its own, and its first save comes late."""
    root = tmp_path / "steps"
    model = loaded("llama", shutil.copytree(torch_front.checkpoint_of("llama"), tmp_path / "base"))
    front.save(model, root, step=1)
    if is_resumed:
        model = torch_front.empty("llama")
        front.resume(model, root, progress=False)
    average = deepcopy(model)
    for step in (2, 3):
        front.save(model, root, step=step, keep=1)
    shutil.rmtree(tmp_path / "base")
    with torch.no_grad():
        average.model.norm.weight.add_(1)
    for step in (3, 4):
        report = front.save(average, tmp_path / "average", step=step, keep=1)
        assert len(report.copied) == 1  # the unused tensor of the first source
        assert_holds(Path(report.path), average)
    shutil.rmtree(root)
    assert_holds(Path(front.save(average, tmp_path / "average", step=5).path), average)


def test_a_checkpoint_that_cannot_be_removed_is_a_warning(tmp_path: Path) -> None:
    """The save has succeeded: raised as an error, a failed removal would be retried, and the
    checkpoint would then exist. A save does not remove another user's checkpoint."""
    if os.geteuid() != 0:
        pytest.skip("only root can give a checkpoint to another user")
    root, model = tmp_path / "steps", loaded("llama")
    front.save(model, root, step=1)
    os.chown(root / "step-1", 12345, -1)
    with pytest.warns(UserWarning, match="not be removed: step-1: user 12345 owns it"):
        report = front.save(model, root, step=2, keep=1)
    assert any("could not be removed" in warning for warning in report.warnings)
    assert front.resume(torch_front.empty("llama"), root, progress=False).step == 2


def test_the_peak_includes_the_publication(tmp_path: Path) -> None:
    """Rank 0 copies the tokenizer and the like after the weights."""
    with patch.object(running, "_peak_bytes", side_effect=[10, 20]):
        assert front.save(loaded("llama"), tmp_path / "steps", step=1).held_bytes == 20


def test_extras_are_refused_where_no_resume_would_read_them(tmp_path: Path) -> None:
    """The limit is that of the reader; the header of these extras has 96 bytes."""
    path = tmp_path / "rank.safetensors"
    for length, fault in ((0, "TRUNC"), (1, "LIMIT")):
        path.write_bytes((extras.LARGEST_HEADER + length).to_bytes(8, "little") + b"{}")
        with pytest.raises(FormatError, match=fault):
            _modicum.open_checkpoint(path)
    model, own = loaded("llama"), {"x": "a" * 50}
    assert len(extras.bytes_of(own)) == 8 + 96
    with patch.object(extras, "LARGEST_HEADER", 95):
        with pytest.raises(UsageError, match="extra_per_rank: too much JSON"):
            front.save(model, tmp_path / "steps", step=1, extra_per_rank=own)
    assert not (tmp_path / "steps").exists()
    with patch.object(extras, "LARGEST_HEADER", 96):
        front.save(model, tmp_path / "steps", step=1, extra_per_rank=own)


def test_what_a_resume_does_not_read_is_reported(tmp_path: Path) -> None:
    """The last value of the weights is in a buffer that the model computes."""
    front.save(loaded("llama"), tmp_path, step=1)
    file = min((tmp_path / "step-1").glob("*.safetensors"))
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    report = front.resume(torch_front.empty("llama"), tmp_path, progress=False)
    assert report.step == 1 and report.not_compared[-1].endswith("inv_freq")


def test_checkpoints_cross_between_python_and_the_command_line(
    tmp_path: Path, modicum: Path
) -> None:
    """Python resumes a checkpoint of `modicum save` and saves it again. `modicum resume` from the
    second checkpoint ends with the same state as `modicum resume` from the first."""
    root, again = tmp_path / "steps", tmp_path / "again"
    flags = ["--ranks", 2, "--optimizer", "adamw:fp32", "--steps", 2]
    first = run_json(modicum, "save", torch_front.checkpoint_of("qwen3"), root, "--step", 2, *flags)
    model = torch_front.empty("qwen3")
    optimizer = front.AdamW(model.named_parameters())
    front.resume(model, root, optimizer=optimizer, progress=False)
    assert {int(entry["step"]) for entry in optimizer.state.values()} == {2}
    assert f"{optimizer.digest()['state']:016x}" == first["state_digest"]
    front.save(model, again, step=2, optimizer=optimizer)
    flags = ["--steps", 1, "--ranks", 2]
    ends = [run_json(modicum, "resume", steps, *flags) for steps in (root, again)]
    assert ends[0]["state_digest"] == ends[1]["state_digest"]


@pytest.mark.parametrize("name", ("qwen3_moe", "gpt2"))
def test_the_command_line_resumes_parameters_with_other_names(
    tmp_path: Path, modicum: Path, name: str
) -> None:
    """In "qwen3_moe" parameters are stacked experts, in "gpt2" they have a prefix that the files
    lack."""
    model = loaded(name)
    optimizer = front.AdamW(model.named_parameters())
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    front.save(model, tmp_path / "steps", step=1, optimizer=optimizer)
    resumed = run_json(modicum, "resume", tmp_path / "steps", "--ranks", 2)
    assert resumed["state_digest"] == f"{optimizer.digest()['state']:016x}"
    again = torch_front.empty(name)
    new = front.AdamW(again.named_parameters())
    front.resume(again, tmp_path / "steps", optimizer=new, progress=False)
    assert new.digest() == optimizer.digest()


def test_step_counts_that_differ_are_restored(tmp_path: Path) -> None:
    """In the first of two steps only norms have gradients. The other parameters count one step."""
    model = loaded("qwen3")
    optimizer = front.AdamW(model.named_parameters(), state_format="bf16-moments")
    for has_gradient in (lambda name: "norm" in name, lambda name: True):
        for name, parameter in model.named_parameters():
            parameter.grad = torch.ones_like(parameter) if has_gradient(name) else None
        optimizer.step()
    front.save(model, tmp_path / "steps", step=1, optimizer=optimizer)
    again = torch_front.empty("qwen3")
    new = front.AdamW(again.named_parameters(), state_format="bf16-moments")
    front.resume(again, tmp_path / "steps", optimizer=new, progress=False)
    made = [
        {n: int(o.state[p]["step"]) for n, p in m.named_parameters()}
        for m, o in ((model, optimizer), (again, new))
    ]
    assert made[0] == made[1] and set(made[0].values()) == {1, 2}
    assert new.digest() == optimizer.digest()


def stepped(model: Any, optimizer: Any) -> dict[str, int]:
    """Makes a step with gradients of one for the parameters that train; returns the digests."""
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter) if parameter.requires_grad else None
    optimizer.step()
    return optimizer.digest()


@pytest.mark.parametrize("was_frozen", (True, False))
def test_a_resume_with_other_frozen_parameters_names_the_remedy(
    tmp_path: Path, was_frozen: bool
) -> None:
    """The embedding is frozen either at the save or at the resume, which is refused. With the
    remedy of the error the next step, with the embedding, is that of the program that saved."""
    model, again = loaded("qwen3"), torch_front.empty("qwen3")
    model.model.embed_tokens.requires_grad_(False)
    again.model.embed_tokens.requires_grad_(was_frozen)
    optimizer = front.AdamW(model.parameters())
    new = front.AdamW(again.parameters())
    stepped(model, optimizer)
    if not was_frozen:
        model.model.embed_tokens.requires_grad_(True)
        stepped(model, optimizer)
    front.save(model, tmp_path, step=1, optimizer=optimizer)
    remedy = "before AdamW is made" if was_frozen else "unfreeze it before the resume"
    with pytest.raises(UsageError, match=f"MISMATCH: .*{remedy}.*tensor model.embed_tokens.weight"):
        front.resume(again, tmp_path, optimizer=new, progress=False)
    assert all(parameter.is_meta for parameter in again.parameters())
    again.model.embed_tokens.requires_grad_(not was_frozen)
    if was_frozen:
        new = front.AdamW(again.parameters())
    front.resume(again, tmp_path, optimizer=new, progress=False)
    assert new.digest() == optimizer.digest()
    for one in (model, again):
        one.model.embed_tokens.requires_grad_(True)
    assert stepped(again, new) == stepped(model, optimizer)


@pytest.mark.parametrize("kind", (torch.optim.AdamW, front.AdamW))
def test_a_resume_whose_groups_do_not_fit_changes_nothing(tmp_path: Path, kind: Any) -> None:
    """The optimizer has one group for the saved two. The model keeps its values, and is saved."""
    model, again = loaded("qwen3"), loaded("qwen3")
    first, *others = model.parameters()
    optimizer = kind([{"params": [first]}, {"params": others}])
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    front.save(model, tmp_path, step=1, optimizer=optimizer)
    with torch.no_grad():
        again.lm_head.weight.fill_(2.0)
    values = {name: tensor.clone() for name, tensor in again.state_dict().items()}
    with pytest.raises(UsageError, match="MISMATCH: the checkpoint has no parameter group"):
        front.resume(again, tmp_path, optimizer=kind(again.parameters()), progress=False)
    assert all(torch.equal(values[name], now) for name, now in again.state_dict().items())
    front.save(again, tmp_path, step=2)


@pytest.mark.parametrize("flag", ["fused", "capturable", "foreach"])
def test_step_counts_of_a_resumed_state_are_on_the_device_that_torch_expects(flag: str) -> None:
    """With `fused` or `capturable` this is the parameter's device, here meta; else the CPU."""
    parameter = torch.nn.Parameter(torch.empty(2, device="meta"))
    optimizer = torch.optim.AdamW([parameter])
    optimizer.param_groups[0][flag] = True
    device = tensor_state.devices_of_numbers(optimizer)[parameter]
    assert device.type == ("cpu" if flag == "foreach" else "meta")


def test_a_fused_optimizer_resumes_in_one_made_without(tmp_path: Path) -> None:
    """The resume takes the saved option `fused`, and moves the step counts to the device on which
    torch's fused kernel reads them. Here this is meta, in place of a real device."""
    model = loaded("qwen3")
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    front.save(model, tmp_path / "steps", step=1, optimizer=optimizer)
    again = torch_front.empty("qwen3")
    resumed = torch.optim.AdamW(again.parameters())

    def on_meta_if_fused(optimizer: torch.optim.Optimizer) -> dict[Any, Any]:
        groups = optimizer.param_groups
        fused_of = {p: group["fused"] for group in groups for p in group["params"]}
        return {p: torch.device("meta" if fused else "cpu") for p, fused in fused_of.items()}

    with patch.object(tensor_state, "devices_of_numbers", on_meta_if_fused):
        front.resume(again, tmp_path / "steps", optimizer=resumed, progress=False)
    steps = [entry["step"] for entry in resumed.state.values()]
    assert steps and all(step.device.type == "meta" for step in steps)


def test_wrong_saves_and_resumes_are_refused(tmp_path: Path) -> None:
    model = loaded("qwen3")
    root = tmp_path / "steps"
    with pytest.raises(BudgetError, match=r"1\.00 MiB"):
        front.save(model, root, step=1, budget="1MiB")
    assert not root.exists(), "the refused save has made its directory"
    for name, value in (("step", -1), ("step", 1 << 63), ("keep", 0), ("keep", 1 << 63)):
        with pytest.raises(UsageError, match=f"USAGE: {name} .*to 9223372036854775807"):
            front.save(model, root, **{"step": 1, name: value})
    with pytest.raises(UsageError, match="unused"):
        front.save(model, root, step=1, options=front.SaveOptions(unused="burn"))
    for extra in ([1], {"a": {1}}):
        with pytest.raises(UsageError, match="extra"):
            front.save(model, root, step=1, extra=extra)
    with pytest.raises(UsageError, match="model lacks"):
        other = torch.nn.Parameter(torch.zeros(2))
        front.save(model, root, step=1, optimizer=torch.optim.SGD([other]))
    optimizer = torch.optim.SGD(model.parameters())
    weight = model.lm_head.weight
    for key, value, words in (
        ("a.b", torch.zeros_like(weight), "a key with a dot"),
        ("c", torch.tensor(1j), "or a number"),
    ):
        optimizer.state[weight] = {"m": torch.zeros_like(weight), key: value}
        with pytest.raises(UsageError, match=f"UNSUPPORTED: state of an optimizer.*{words}"):
            front.save(model, root, step=1, optimizer=optimizer)
    with pytest.raises(UsageError, match="on meta"):
        front.save(torch_front.empty("qwen3"), root, step=1)
    front.save(model, root, step=1)
    with pytest.raises(IoError, match="saved already"):
        front.save(model, root, step=1)
    with pytest.raises(UsageError, match="no optimizer state"):
        front.resume(model, root, optimizer=torch.optim.SGD(model.parameters()))
    optimizer = torch.optim.AdamW(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    front.save(model, root, step=2, optimizer=optimizer)
    with pytest.raises(UsageError, match="MISMATCH: the optimizer has a parameter that the model"):
        front.resume(model, root, optimizer=torch.optim.AdamW(loaded("qwen3").parameters()))
