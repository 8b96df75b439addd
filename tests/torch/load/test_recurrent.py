"""Modules that keep references to their own parameters: LSTM, GRU and RNN keep weak ones, and
`torch.nn.utils.weight_norm` an autograd graph.

The oracle is the module with values. Catches: a recurrent module on meta that is refused; one whose
forward uses other tensors than its parameters after a load, a step or a resume, or that has no
references after a load that fails; weak references of the program that no longer prevent a load; a
torch whose modules keep their references elsewhere; an error without a remedy for `weight_norm`.
"""

import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from ranks import Ranks  # noqa: E402
from safetensors.torch import save_file  # noqa: E402
from torch import nn  # noqa: E402
from torch.distributed.device_mesh import init_device_mesh  # noqa: E402
from torch.distributed.fsdp import fully_shard  # noqa: E402

import modicum.torch as front  # noqa: E402
from modicum.errors import UsageError  # noqa: E402
from modicum.upstream import torch_rnn  # noqa: E402

INPUTS = torch.linspace(-1, 1, 3 * 5 * 8).view(3, 5, 8)
KINDS: dict[str, Callable[[], Any]] = {
    "LSTM": lambda: nn.LSTM(8, 8, 2, bidirectional=True, batch_first=True),
    "projected": lambda: nn.LSTM(8, 8, proj_size=4),
    "GRU": lambda: nn.GRU(8, 8, bias=False),
    "RNN": lambda: nn.RNN(8, 8),
}


class Net(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.inner = KINDS[kind]()

    def forward(self, inputs: Any) -> Any:
        return self.inner(inputs)[0] * 2


def with_values(kind: str, directory: Path) -> Net:
    """A model with values, which are also in a file of the directory."""
    torch.manual_seed(5)
    model = Net(kind)
    save_file(model.state_dict(), directory / "model.safetensors")
    return model


def on_meta(kind: str) -> Net:
    with front.empty_parameters():
        return Net(kind)


def step(model: nn.Module, optimizer: Any) -> None:
    model(INPUTS).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def assert_refers(model: Net) -> None:
    """Asserts that a forward uses the parameters, and that it would see if one was replaced."""
    inner = model.inner
    parameters = [*inner.parameters()]
    for found in (inner._flat_weights, [ref() for ref in inner._flat_weight_refs]):
        assert [*map(id, found)] == [*map(id, parameters)]


@pytest.mark.parametrize("kind", KINDS)
def test_a_recurrent_module_on_meta_is_loaded_and_resumed(kind: str, tmp_path: Path) -> None:
    expected, model, again = with_values(kind, tmp_path), on_meta(kind), on_meta(kind)
    optimizer, other = (front.AdamW(m.named_parameters(), lr=1e-2) for m in (model, again))
    front.load(model, tmp_path, optimizer=optimizer, progress=False)
    assert_refers(model)
    assert torch.equal(model(INPUTS), expected(INPUTS))
    step(model, optimizer)
    assert not torch.equal(model(INPUTS), expected(INPUTS))
    front.save(model, tmp_path / "steps", step=1, optimizer=optimizer)
    front.resume(again, tmp_path / "steps", optimizer=other, progress=False)
    for trained, by in ((model, optimizer), (again, other)):
        step(trained, by)
    assert torch.equal(model(INPUTS), again(INPUTS))
    front.load(model, tmp_path, progress=False)  # in place
    assert_refers(model)
    assert torch.equal(model(INPUTS), expected(INPUTS))


def test_a_recurrent_module_without_a_source_is_initialised() -> None:
    model = on_meta("LSTM")
    front.load(model, None, progress=False)
    assert_refers(model)
    assert model(INPUTS).isfinite().all()


def test_a_full_state_dict_fills_a_recurrent_module(tmp_path: Path) -> None:
    expected, model = with_values("LSTM", tmp_path), on_meta("LSTM")
    full = expected.state_dict()
    front.fsdp2_load_full_state_dict(model, full, budget="none", progress=False)
    assert_refers(model)
    assert torch.equal(model(INPUTS), expected(INPUTS))


def test_a_load_that_is_refused_leaves_the_references(tmp_path: Path) -> None:
    """Among them one of the program: its parameter would be another object for it."""
    expected, model = with_values("LSTM", tmp_path), on_meta("LSTM")
    mine = weakref.WeakKeyDictionary({model.inner.bias_hh_l1: 1})
    with pytest.raises(UsageError, match="UNSUPPORTED: a weak reference to a parameter") as caught:
        front.load(model, tmp_path, progress=False)
    assert caught.value.tensor == "inner.bias_hh_l1"
    assert_refers(model)
    mine.clear()
    front.load(model, tmp_path, progress=False)
    assert torch.equal(model(INPUTS), expected(INPUTS))


@pytest.mark.parametrize("name", ("_drop", "_restore"))
def test_a_torch_that_keeps_its_references_elsewhere_is_refused(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_values("GRU", tmp_path)
    assert torch_rnn.KNOWN.mismatch() == ""
    monkeypatch.setattr(torch_rnn, name, lambda module, moved=None: None)
    with pytest.raises(UsageError, match=r"UNSUPPORTED: this version .*RNNBase"):
        front.load(on_meta("GRU"), tmp_path, progress=False)


def sharded(directory: str) -> list[bool]:
    """Whether a sharded LSTM gives the outputs of one with values, after its load and a step."""
    own_copy, same = Path(directory, str(torch.distributed.get_rank())), []
    expected, model = with_values("LSTM", own_copy), on_meta("LSTM")
    fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    optimizer = front.AdamW(model.named_parameters(), lr=1e-2)
    plain = front.AdamW(expected.named_parameters(), lr=1e-2)
    front.load(model, directory, optimizer=optimizer, progress=False)
    for _ in range(2):
        same.append(torch.equal(model(INPUTS), expected(INPUTS)))
        for trained, by in ((model, optimizer), (expected, plain)):
            step(trained, by)
    return same


def test_a_sharded_recurrent_module_is_loaded(two: Ranks, tmp_path: Path) -> None:
    with_values("LSTM", tmp_path)
    for rank in range(2):
        (tmp_path / str(rank)).mkdir()
    assert two.ask(sharded, directory=str(tmp_path)) == [[True, True]] * 2


def test_a_weight_norm_of_hooks_must_be_built_with_values(tmp_path: Path) -> None:
    def normed() -> nn.Module:
        with pytest.warns(FutureWarning, match="weight_norm"):
            return nn.utils.weight_norm(nn.Linear(8, 8))

    expected, model = normed(), normed()
    save_file(expected.state_dict(), tmp_path / "model.safetensors")
    with front.empty_parameters():
        empty = normed()
    with pytest.raises(UsageError, match="autograd graph.*weight_norm.*build .* with values"):
        front.load(empty, tmp_path, progress=False)
    front.load(model, tmp_path, progress=False)
    assert torch.equal(model(INPUTS), expected(INPUTS))
