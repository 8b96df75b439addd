"""Models and sources that `modicum.torch.save` accepts, and those that it refuses before anything
is written or loaded: models after an evaluation, wrappers and copies of the loaded module, tensors
with other strides than row-major ones, sources of another architecture, and states of another
dtype.

Catches: a model that FSDP2 has gathered in an evaluation, and is refused; one that is resharded in
the middle of a forward; a wrapper that is refused although its module was loaded; strided memory
that is read as row-major; an expanded parameter to which a load writes; a module's extra state that
is lost without a word; a source of another architecture, whose config and values are copied;
weights that are loaded although the optimizer's state has another dtype.
"""

import copy
import gc
import pickle
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

import torch_front  # noqa: E402
from safetensors.torch import load_file, save_file  # noqa: E402
from sharding import playing_new_rank  # noqa: E402
from torch import nn  # noqa: E402
from torch.distributed.device_mesh import init_device_mesh  # noqa: E402
from torch.distributed.fsdp import fully_shard  # noqa: E402
from torch.optim.swa_utils import AveragedModel  # noqa: E402

import modicum  # noqa: E402
import modicum.torch as front  # noqa: E402
from modicum.errors import IoError, UsageError  # noqa: E402
from modicum.torch.dcp import ModicumWriter  # noqa: E402
from modicum.torch.saving.running import OpenSave  # noqa: E402


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 5, 3)
        self.norm = nn.BatchNorm2d(5)
        self.out = nn.Linear(5, 700)

    def forward(self, images: Any) -> Any:
        return self.out(self.norm(self.conv(images)).mean((2, 3))).square().sum()


IMAGES = torch.linspace(-1, 1, 2 * 3 * 16).view(2, 3, 4, 4)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("source") / "model.safetensors"
    save_file(Net().state_dict(), path)
    return path


def loaded(source: Path) -> Net:
    with front.empty_parameters():
        model = Net()
    front.load(model, source, progress=False)
    return model


def assert_same(values: dict[str, Any], expected: dict[str, Any]) -> None:
    assert values.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(values[name], value), name


# ---- FSDP2


@pytest.fixture
def sharded(source: Path) -> Iterator[Net]:
    """Loaded, with two units, on one rank."""
    with playing_new_rank(0, 1), torch.enable_grad():
        mesh = init_device_mesh("cpu", (1,))
        with front.empty_parameters():
            model = Net()
        fully_shard(model.conv, mesh=mesh)
        fully_shard(model, mesh=mesh)
        front.load(model, source, progress=False)
        model.eval()
        yield model


def saved_by(background: bool, model: Any, run: Path, **how: Any) -> Any:
    """The report of a save, in the foreground or in the background."""
    if background:
        return front.async_save(model, run, **how).result()
    return front.save(model, run, **how)


def evaluate(model: Net) -> None:
    with torch.no_grad():
        model(IMAGES)


def unshard(model: Net) -> None:
    model.unshard()
    model.conv.unshard()


@pytest.mark.parametrize("gather", (evaluate, unshard))
def test_an_evaluated_model_is_saved(
    tmp_path: Path, source: Path, sharded: Net, gather: Any
) -> None:
    """FSDP2 keeps the root's parameters after a forward without a backward."""
    for step, background in enumerate((False, True)):
        gather(sharded)
        assert type(sharded.out.weight) is nn.Parameter
        saved = saved_by(background, sharded, tmp_path, step=step)
        assert_same(load_file(Path(saved.path) / "model.safetensors"), load_file(source))
    state = {name: tensor.detach().clone() for name, tensor in sharded.state_dict().items()}
    gather(sharded)
    writer = ModicumWriter(tmp_path, step=2, model=sharded)
    torch.distributed.checkpoint.save(state, storage_writer=writer)
    loss = sharded(IMAGES)
    front.save(sharded, tmp_path, step=3)
    loss.backward()
    assert all(parameter.grad is not None for parameter in sharded.parameters())


def test_a_model_in_a_forward_is_refused(tmp_path: Path, sharded: Net) -> None:
    def save(*_: Any) -> None:
        front.save(sharded, tmp_path, step=1)

    def fail(*_: Any) -> None:
        raise ArithmeticError

    for hook, error in ((save, UsageError), (fail, ArithmeticError)):
        handle = sharded.out.register_forward_hook(hook)
        with pytest.raises(error):
            sharded(IMAGES)
        handle.remove()
        with pytest.raises(UsageError, match=r"USAGE: .*not ended: .*reset_iter_state\(\)"):
            front.save(sharded, tmp_path, step=1)
        assert not any(tmp_path.iterdir())
        sharded.reset_iter_state()
    front.save(sharded, tmp_path, step=1)


# ---- wrappers


class Outer(nn.Module):
    def __init__(self, inner: nn.Module, head: nn.Module | None = None) -> None:
        super().__init__()
        self.inner, self.head = inner, head


def test_a_wrapper_counts_as_the_loaded_module(tmp_path: Path, source: Path) -> None:
    """So does a copy. The checkpoint has the names of the module that was loaded."""
    model = loaded(source)
    with playing_new_rank(0, 1):
        wrapped = [
            torch.compile(model),
            nn.parallel.DistributedDataParallel(model),
            Outer(torch.compile(model)),
            copy.deepcopy(model),
            AveragedModel(model).module,
        ]
        for step, one in enumerate(wrapped):
            saved = front.save(one, tmp_path, step=step, keep=1)
            assert_same(load_file(Path(saved.path) / "model.safetensors"), load_file(source))
    compiled = torch.compile(Net())
    front.resume(compiled, tmp_path, progress=False)
    front.save(compiled._orig_mod, tmp_path, step=9)
    with playing_new_rank(0, 1):
        for resume in (front.resume, front.load):
            parallel = nn.parallel.DistributedDataParallel(Net())
            resume(torch.compile(parallel), tmp_path / f"step-{step}", progress=False)
            assert_same(parallel.module.state_dict(), load_file(source))
    other = pickle.loads(pickle.dumps(model))
    with pytest.raises(UsageError, match="not loaded .*or pass the module that was loaded"):
        front.save(other, tmp_path, step=10)


@pytest.mark.parametrize("make", (front.AdamW, torch.optim.AdamW))
@pytest.mark.parametrize("has_source", (False, True))
def test_a_model_in_ddp_resumes_with_its_optimizer(
    tmp_path: Path, source: Path, make: Any, has_source: bool
) -> None:
    """With a `source` of the save or without, the files have the names of the module in it."""
    options = front.SaveOptions(source=source if has_source else None)
    with playing_new_rank(0, 1), torch.enable_grad():
        model = nn.parallel.DistributedDataParallel(loaded(source))
        optimizer = make(model.parameters())
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        front.save(model, tmp_path, step=1, optimizer=optimizer, options=options)
        again = nn.parallel.DistributedDataParallel(Net())
        resumed = make(again.parameters())
        front.resume(again, tmp_path, optimizer=resumed, progress=False)
        assert_same(again.state_dict(), model.state_dict())
        for one, other in zip(model.parameters(), again.parameters(), strict=True):
            assert torch.equal(resumed.state[other]["exp_avg"], optimizer.state[one]["exp_avg"])
        front.save(again, tmp_path, step=2, optimizer=resumed, options=options)


def test_a_wrapper_with_more_tensors_names_the_loaded_module(tmp_path: Path, source: Path) -> None:
    model = loaded(source)
    cases = {
        "head.weight, expected model.inner": Outer(model, nn.Linear(2, 2)),
        "n_averaged, expected model.module": AveragedModel(model),
    }
    for words, one in cases.items():
        with pytest.raises(UsageError, match=f"USAGE: only a part .* was loaded.*tensor {words}"):
            front.save(one, tmp_path, step=1)
    front.save(cases["n_averaged, expected model.module"].module, tmp_path, step=1)


# ---- strides


def strided(model: Net) -> Net:
    """The model in channels_last, with a transposed matrix."""
    model.to(memory_format=torch.channels_last)
    model.out.weight = nn.Parameter(model.out.weight.detach().t().contiguous().t())
    assert not model.conv.weight.is_contiguous() and not model.out.weight.is_contiguous()
    return model


def trained(model: Net, make: Any) -> Any:
    optimizer = make(model.parameters())
    for _ in range(2):
        model(IMAGES).backward()
        optimizer.step()
        optimizer.zero_grad()
    return optimizer


@pytest.mark.parametrize("background", (False, True))
def test_strided_tensors_are_loaded_and_saved_in_logical_order(
    tmp_path: Path, source: Path, background: bool
) -> None:
    """With the state of torch's AdamW, whose moments have the parameters' strides."""
    model = strided(Net())
    front.load(model, source, progress=False, check=True)
    assert_same(model.state_dict(), load_file(source))
    optimizer = trained(model, torch.optim.AdamW)
    memory = front.MemoryPolicy(staging="256KiB")
    saved = saved_by(background, model, tmp_path, step=1, optimizer=optimizer, memory=memory)
    assert_same(load_file(Path(saved.path) / "model.safetensors"), model.state_dict())
    for again in (loaded(source), strided(Net())):
        resumed = torch.optim.AdamW(again.parameters())
        front.resume(again, tmp_path, optimizer=resumed, progress=False)
        assert_same(again.state_dict(), model.state_dict())
        for one, other in zip(model.parameters(), again.parameters(), strict=True):
            assert_same(resumed.state[other], optimizer.state[one])


def test_a_buffer_that_is_not_row_major_is_copied_when_a_background_save_begins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So is a buffer on a device. A forward may write to it before the save has read it. The copy
    is in the promise."""
    model = nn.Linear(3, 4)
    model.register_buffer("counts", torch.arange(12.0).view(4, 3).t())
    model.register_buffer("again", model.counts)
    expected = {name: tensor.contiguous() for name, tensor in model.state_dict().items()}
    source, ledger = tmp_path / "source.safetensors", modicum.Ledger()
    save_file({name: tensor.clone() for name, tensor in expected.items()}, source)
    is_changed, write = threading.Event(), OpenSave.write

    def write_later(begun: OpenSave, on_begin: Any) -> Any:
        return write(begun, lambda: (on_begin(), is_changed.wait(60)))

    monkeypatch.setattr(OpenSave, "write", write_later)
    saving = front.async_save(
        model, tmp_path, step=1, options=front.SaveOptions(source=source),
        memory=front.MemoryPolicy(ledger=ledger),
    )  # fmt: skip
    assert ledger.held["init"] == 4096
    model.counts += 1
    is_changed.set()
    saved = saving.result()
    assert_same(load_file(Path(saved.path) / "model.safetensors"), expected)
    del saving
    gc.collect()
    assert ledger.held_bytes == 0


def test_other_strides_are_refused_by_name(tmp_path: Path, source: Path) -> None:
    """Expanded tensors, tensors on meta, and AdamW's own state."""
    model = loaded(source)
    model.out.bias = nn.Parameter(torch.zeros(1).expand(700))
    for call in (
        lambda: front.load(model, source, progress=False),
        lambda: front.save(model, tmp_path, step=1),
    ):
        with pytest.raises(UsageError, match=r"UNSUPPORTED: .*overlap.*tensor out\.bias"):
            call()
    with front.empty_parameters():
        model = Net().to(memory_format=torch.channels_last)
    with pytest.raises(UsageError, match=r"the memory format after the load .*conv\.weight"):
        front.load(model, source, progress=False)
    model = strided(loaded(source))
    optimizer = trained(model, front.AdamW)
    with pytest.raises(UsageError, match=r"UNSUPPORTED: the state has the strides .*conv\.weight"):
        front.save(model, tmp_path, step=1, optimizer=optimizer)
    assert not any(tmp_path.iterdir())


# ---- sources and states


def test_a_source_of_another_architecture_is_refused(tmp_path: Path, source: Path) -> None:
    """It has some of the model's names. If the model has no config, that of the loaded checkpoint
    counts."""
    other = torch_front.checkpoint_of("qwen3_moe")
    with pytest.raises(UsageError, match=r"MISMATCH: .*expected llama, got qwen3_moe"):
        front.save(
            torch_front.from_pretrained("llama"),
            tmp_path,
            step=1,
            options=front.SaveOptions(source=other),
        )
    first = tmp_path / "first"
    first.mkdir()
    shutil.copy(source, first / "model.safetensors")
    (first / "config.json").write_text('{"model_type": "net"}')
    with pytest.raises(UsageError, match=r"MISMATCH: .*expected net, got qwen3_moe"):
        front.save(
            loaded(first), tmp_path / "steps", step=1, options=front.SaveOptions(source=other)
        )
    front.save(loaded(first), tmp_path / "steps", step=1, options=front.SaveOptions(source=source))


def test_a_source_with_another_number_of_layers_is_refused(tmp_path: Path) -> None:
    """The checkpoint would have its untrained layers, or its config would lack trained ones."""
    for layers in (1, 3):
        config, other = torch_front.config_of("llama"), tmp_path / f"{layers}"
        config.num_hidden_layers = layers
        type(torch_front.from_pretrained("llama"))(config).save_pretrained(other)
        with pytest.raises(
            UsageError, match=rf"another number of layers .*expected 2, got {layers}"
        ):
            front.save(
                torch_front.from_pretrained("llama"),
                tmp_path,
                step=1,
                options=front.SaveOptions(source=other),
            )


class Scaled(nn.Linear):
    """A module with a state that is no tensor."""

    factor = 1.0

    def get_extra_state(self) -> dict[str, float]:
        return {"factor": self.factor}

    def set_extra_state(self, state: dict[str, float]) -> None:
        self.factor = state["factor"]


def test_an_extra_state_of_modules_is_named_and_goes_on_by_extra(tmp_path: Path) -> None:
    model, again = (nn.Sequential(Scaled(2, 2), torch.compile(Scaled(2, 2))) for _ in range(2))
    plain = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    save_file(plain.state_dict(), tmp_path / "model.safetensors")
    front.load(model, tmp_path / "model.safetensors", progress=False)
    model[0].factor, root = 3.0, tmp_path / "steps"
    words = r"get_extra_state returns for 2 modules \(0, 1\): save it by extra="
    with pytest.warns(UserWarning, match=words):
        in_background = front.async_save(model, root, step=1).result()
    with pytest.warns(UserWarning, match=words):
        report = front.save(model, root, step=2, extra={"0": model[0].get_extra_state()})
    assert len(report.warnings) == 1 and report.warnings == in_background.warnings
    extra = front.resume(again, root, progress=False).extra
    again[0].set_extra_state(extra["0"])
    assert again[0].factor == 3.0


def test_a_removed_source_names_the_argument(tmp_path: Path, source: Path) -> None:
    base = shutil.copytree(source.parent, tmp_path / "base")
    model = loaded(base)
    shutil.rmtree(base)
    with pytest.raises(
        IoError, match=r"IO: .*can't be opened: give SaveOptions\(source=.*file .*base"
    ):
        front.save(model, tmp_path / "steps", step=1)
    front.save(model, tmp_path / "steps", step=1, options=front.SaveOptions(source=source))


def test_a_state_of_another_dtype_is_refused_before_the_weights(
    tmp_path: Path, source: Path
) -> None:
    """torch's AdamW would fail at its next step. Moments that had another dtype than their
    parameter at the save are accepted."""
    model = loaded(source)
    optimizer = trained(model, torch.optim.AdamW)
    front.save(model, tmp_path, step=1, optimizer=optimizer)
    with front.empty_parameters():
        again = Net().bfloat16()
    resumed = torch.optim.AdamW(again.parameters())
    refused = r"MISMATCH: .*another dtype.*conv.*expected float32, got bfloat16"
    with pytest.raises(UsageError, match=refused):
        front.resume(again, tmp_path, optimizer=resumed, progress=False)
    assert all(parameter.is_meta for parameter in again.parameters()) and not resumed.state
    with front.empty_parameters():
        again = Net()
    again.norm.bfloat16()  # buffers have values
    resumed = torch.optim.AdamW(again.parameters())
    with pytest.raises(UsageError, match=refused):
        front.resume(again, tmp_path, optimizer=resumed, dtype="bfloat16", progress=False)
    assert all(parameter.is_meta for parameter in again.parameters()) and not resumed.state
    model.bfloat16()
    front.save(model, tmp_path, step=2, optimizer=optimizer)
    with front.empty_parameters():
        again = Net().bfloat16()
    front.resume(again, tmp_path, optimizer=torch.optim.AdamW(again.parameters()), progress=False)
