"""A state that was saved in one format goes on in every other: `resume` converts it while it reads,
and `modicum save STEP NEW --optimizer adamw:FORMAT` writes it, with what else the checkpoint has.

The oracle is an optimizer of the new format that loads the saved optimizer's state dict. Catches:
moments rounded with the random bits of another step; a parameter that keeps the rounding of the old
format; scales of blocks that a shard begins within; stacked experts whose recipe is lost; options
of groups or a program's own values that a save of the checkpoint leaves out.
"""

from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

import torch_front  # noqa: E402
from program import failure, run_json  # noqa: E402
from safetensors.torch import save_file  # noqa: E402
from sharding import playing_new_rank  # noqa: E402
from torch import nn  # noqa: E402
from torch.distributed.device_mesh import init_device_mesh  # noqa: E402
from torch.distributed.tensor import Shard, distribute_tensor  # noqa: E402

import modicum.torch as front  # noqa: E402
from modicum.errors import UsageError  # noqa: E402

FORMATS = ("fp32", "fp32-split", "bf16-moments", "int8-moments", "int8-moments-24")


class Net(nn.Module):
    """Shapes with and without 8-bit moments, and a parameter in float32."""

    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.Parameter(torch.linspace(-1, 1, 3 * 40000).view(3, 40000).bfloat16())
        self.rows = nn.Parameter(torch.linspace(-2, 1, 40 * 129).view(40, 129).bfloat16())
        self.norm = nn.Parameter(torch.linspace(0, 3, 131).bfloat16())
        self.whole = nn.Parameter(torch.linspace(-1, 2, 33 * 256).view(33, 256))


def step(model: Any, optimizer: Any, steps: int = 1) -> None:
    """Makes steps with gradients that depend only on the step, the name and the element."""
    for number in range(steps):
        for name, parameter in model.named_parameters():
            grad = torch_front.whole_gradient(name, parameter.shape, number)
            parameter.grad = grad.to(parameter.dtype)
        optimizer.step()
        optimizer.zero_grad()


def values(model: Any, optimizer: Any) -> dict[str, Any]:
    """All parameters and all values of the optimizer's state, by name."""
    state = optimizer.state_dict()["state"]
    flat = {f"{i} {key}": value for i, entry in state.items() for key, value in entry.items()}
    return flat | dict(model.named_parameters())


def assert_same(one: dict[str, Any], other: dict[str, Any]) -> None:
    assert one.keys() == other.keys()
    for name, value in one.items():
        is_tensor = isinstance(value, torch.Tensor)
        assert torch.equal(value, other[name]) if is_tensor else value == other[name], name


def save_after(steps: int, model: Any, optimizer: Any, directory: Path, **named: Any) -> None:
    """Makes steps and saves them in `directory`/run. The source is a file of the stepped values."""
    step(model, optimizer, steps)
    source = directory / "model.safetensors"
    save_file(model.state_dict(), source)
    options = front.SaveOptions(source=source)
    run = directory / "run"
    front.save(model, run, step=steps, optimizer=optimizer, options=options, **named)


def adamw(model: Any, state_format: str) -> Any:
    return front.AdamW(model.named_parameters(), lr=1e-2, state_format=state_format, seed=5)


@pytest.mark.parametrize("before", FORMATS)
def test_each_format_goes_on_in_every_other(modicum: Path, tmp_path: Path, before: str) -> None:
    model = Net()
    optimizer = adamw(model, before)
    save_after(3, model, optimizer, tmp_path, extra={"epoch": 2})
    saved = {name: value.clone() for name, value in model.state_dict().items()}
    for after in FORMATS:
        model.load_state_dict(saved)
        expected = adamw(model, after)
        expected.load_state_dict(optimizer.state_dict())
        new = tmp_path / f"new-{after}"
        words = ("--step", 3, "--optimizer", f"adamw:{after}", "--ranks", 2)
        run_json(modicum, "save", tmp_path / "run/step-3", new, *words)
        for root in (tmp_path / "run", new):
            again = Net()
            other = adamw(again, after)
            other.param_groups[0]["lr"] = 1.0
            report = front.resume(again, root, optimizer=other, progress=False)
            assert report.extra == {"epoch": 2} and other.param_groups[0]["lr"] == 1e-2
            assert report.not_compared == []
            assert_same(values(model, expected), values(again, other))
            if root != new:
                continue
            step(model, expected, 2)
            step(again, other, 2)
            assert_same(values(model, expected), values(again, other))


@pytest.mark.parametrize(
    "before, after",
    (
        (torch.bfloat16, torch.float16),
        (torch.float16, torch.bfloat16),
        (torch.bfloat16, torch.float32),
    ),
)
def test_masters_go_on_in_a_model_of_another_dtype(
    tmp_path: Path, before: torch.dtype, after: torch.dtype
) -> None:
    """The weights in the files are rounded, and are rounded again for the new dtype."""
    model, again = Net().to(before), Net().to(after)
    optimizer, other = adamw(model, "fp32"), adamw(again, "fp32")
    save_after(3, model, optimizer, tmp_path)
    saved = {i: entry["master"] for i, entry in optimizer.state_dict()["state"].items()}
    front.resume(again, tmp_path / "run", optimizer=other, progress=False)
    entries = other.state_dict()["state"]
    for (i, master), parameter in zip(saved.items(), again.parameters(), strict=True):
        assert torch.equal(entries[i].get("master", parameter), master)
        assert torch.equal(parameter, master.to(after))


@pytest.mark.parametrize("family", ("llama_tied", "qwen3_moe"))
def test_a_family_goes_on_in_another_format(modicum: Path, tmp_path: Path, family: str) -> None:
    """Tied heads, and experts that are one parameter in the model and many tensors in the files."""
    model = loaded(family)
    optimizer = front.AdamW(model.named_parameters(), lr=1e-2, state_format="fp32-split")
    step(model, optimizer)
    root, source = tmp_path / "steps", torch_front.checkpoint_of(family)
    own = {"rng": torch.get_rng_state()}
    front.save(
        model,
        root,
        step=1,
        optimizer=optimizer,
        options=front.SaveOptions(source=source),
        extra_per_rank=own,
    )
    new = tmp_path / "new"
    words = ("--step", 1, "--optimizer", "adamw:bf16-moments", "--ranks", 3)
    run_json(modicum, "save", root / "step-1", new, *words)
    assert run_json(modicum, "verify", new / "step-1")["ok"]
    expected = front.AdamW(model.named_parameters(), lr=1e-2, state_format="bf16-moments")
    expected.load_state_dict(optimizer.state_dict())
    for of in (root, new):
        again = loaded(family)
        other = front.AdamW(again.named_parameters(), lr=1e-2, state_format="bf16-moments")
        report = front.resume(again, of, optimizer=other, progress=False)
        assert torch.equal(report.extra_per_rank["rng"], own["rng"])
        assert_same(values(model, expected), values(again, other))


def loaded(family: str) -> Any:
    model = torch_front.empty(family)
    front.load(model, torch_front.checkpoint_of(family), progress=False)
    return model.bfloat16()


@pytest.mark.parametrize("cls", (torch.optim.AdamW, torch.optim.Adam))
def test_torchs_state_goes_on_in_every_format(tmp_path: Path, cls: Any) -> None:
    """Moments in the parameters' dtypes, and no masters."""
    model = Net()
    optimizer = cls(model.parameters(), lr=1e-2, weight_decay=0.1, foreach=True)
    save_after(3, model, optimizer, tmp_path)
    saved = {name: value.clone() for name, value in model.state_dict().items()}
    for after in FORMATS:
        model.load_state_dict(saved)
        expected = adamw(model, after)
        expected.load_state_dict(optimizer.state_dict())
        again = Net()
        other = adamw(again, after)
        report = front.resume(again, tmp_path / "run", optimizer=other, progress=False)
        assert report.not_compared == []
        keys = ("lr", "weight_decay", "decoupled_weight_decay", "foreach")
        groups = [{key: of.param_groups[0][key] for key in keys} for of in (expected, other)]
        assert groups[0] == groups[1]
        assert_same(values(model, expected), values(again, other))
        step(model, expected, 2)
        step(again, other, 2)
        assert_same(values(model, expected), values(again, other))


def test_torchs_state_is_not_converted_by_the_program(modicum: Path, tmp_path: Path) -> None:
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    save_after(1, model, optimizer, tmp_path)
    words = ("save", tmp_path / "run/step-1", tmp_path / "x", "--step", 1)
    error = failure(modicum, 2, *words, "--optimizer", "adamw:fp32-split")
    assert error["category"] == "UNSUPPORTED" and error["got"] == "torch.AdamW"
    assert not (tmp_path / "x").exists()


def test_shards_that_divide_a_block_of_moments_are_refused(tmp_path: Path) -> None:
    """Rows of 8-bit moments have at least 128 elements. The last dim alone, 100, would not show
    that the shards divide a block of the row of 96 * 100. Nothing is written."""
    source, whole = tmp_path / "model.safetensors", torch.ones(8, 96, 100).bfloat16()
    save_file({"weight": whole}, source)
    with playing_new_rank(0, 2), torch.enable_grad():
        model = nn.Module()
        mesh = init_device_mesh("cpu", (2,))
        model.weight = nn.Parameter(distribute_tensor(whole, mesh, [Shard(1)]))
        optimizer = adamw(model, "int8-moments")
        optimizer.allocate()
        with pytest.raises(UsageError, match=r"divides blocks .*weight.*got elements 0 to 4800"):
            front.save(
                model,
                tmp_path / "run",
                step=1,
                optimizer=optimizer,
                options=front.SaveOptions(source=source),
            )
    assert not (tmp_path / "run").exists()


class Odd(nn.Module):
    """Parameters of which torch's Adam has no tensors, or tensors without elements."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(-1, 1, 12).view(3, 4))
        self.scale = nn.Parameter(torch.tensor(2.5))
        self.empty = nn.Parameter(torch.empty(0, 4))
        self.unused = nn.Parameter(torch.ones(3))

    def forward(self) -> Any:
        return self.weight.pow(2).sum() * self.scale + self.empty.sum()


@pytest.mark.parametrize("steps", (0, 2))
@pytest.mark.parametrize("kind", (torch.optim.AdamW, front.AdamW))
def test_the_state_of_torchs_adamw_is_resumed_as_a_state_dict_is_loaded(
    tmp_path: Path, kind: Any, steps: int
) -> None:
    """A moment of no dims is a number in state.json; a parameter without a gradient has none."""
    model = Odd()
    saved = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(steps):
        model().backward()
        saved.step()
        saved.zero_grad()
    save_file(model.state_dict(), tmp_path / "model.safetensors")
    options = front.SaveOptions(source=tmp_path / "model.safetensors")
    front.save(model, tmp_path / "run", step=steps, optimizer=saved, options=options)
    other = Odd()
    other.load_state_dict(model.state_dict())
    loaded = kind(other.parameters(), lr=1e-2)
    loaded.load_state_dict(saved.state_dict())
    again = Odd()
    resumed = kind(again.parameters(), lr=1e-2)
    front.resume(again, tmp_path / "run", optimizer=resumed, progress=False)
    assert_same(values(again, resumed), values(other, loaded))
    for net, optimizer in ((again, resumed), (other, loaded)):
        net().backward()
        optimizer.step()
    assert_same(dict(again.named_parameters()), dict(other.named_parameters()))


@pytest.mark.parametrize("state_format", FORMATS)
def test_a_state_that_torchs_adamw_has_stepped_since_keeps_the_parameters(
    tmp_path: Path, state_format: str
) -> None:
    """torch keeps the masters of a state dict of Modicum, rounded, and does not step them. A load
    of its state dict and a resume leave them out."""
    model = Net()
    first = adamw(model, state_format)
    step(model, first, 2)
    torchs = torch.optim.AdamW(model.parameters(), lr=1e-2)
    torchs.load_state_dict(first.state_dict())
    del first
    save_after(3, model, torchs, tmp_path)
    trained = {name: value.clone() for name, value in model.state_dict().items()}
    loaded = adamw(model, state_format)
    loaded.load_state_dict(torchs.state_dict())
    again = Net()
    resumed = adamw(again, state_format)
    front.resume(again, tmp_path / "run", optimizer=resumed, progress=False)
    assert_same(values(again, resumed), values(model, loaded))
    assert_same(trained, dict(again.named_parameters()))
