"""`rebind_parameters` gives an optimizer the parameters that `fully_shard` has put in the place of
the old ones, by FQN.

Catches: parameters matched by address, which is 0 for all parameters on meta, or by order, which is
another one in custom groups and with tied parameters; an optimizer of which a part is rebound after
a failure.
"""

from collections.abc import Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from sharding import playing_new_rank  # noqa: E402
from torch import nn  # noqa: E402
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (  # noqa: E402
    checkpoint_wrapper,
)
from torch.distributed.fsdp import fully_shard  # noqa: E402

from modicum.errors import UsageError  # noqa: E402  (after torch is known to be there)
from modicum.torch import AdamW  # noqa: E402
from modicum.torch.shards.rebinding import parameter_names, rebind_parameters  # noqa: E402
from modicum.upstream.torch_fsdp import fsdp_params, hand_over  # noqa: E402
from modicum.upstream.wrappers import canonical  # noqa: E402


@pytest.fixture(autouse=True)
def alone() -> Iterator[None]:
    """A process group of one rank. `fully_shard` still replaces the parameters, and steps are those
    of an unsharded model."""
    with playing_new_rank(0, 1), torch.enable_grad():
        yield


class Tiny(nn.Module):
    """The head has the embedding's weight. The first block's bias is frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 4)
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.head = nn.Linear(4, 5, bias=False)
        self.head.weight = self.embed.weight
        self.blocks[0].bias.requires_grad_(False)

    def forward(self, tokens: Any) -> Any:
        x = self.embed(tokens)
        for block in self.blocks:
            x = torch.tanh(block(x))
        return self.head(x).logsumexp(-1).mean()


def tiny(device: str = "meta") -> Tiny:
    torch.manual_seed(3)
    with torch.device(device):
        return Tiny()


def names_in(model: nn.Module) -> list[list[str]]:
    """The FQNs in three groups of an optimizer, in another order than in the model. One parameter
    is frozen and one is tied."""
    blocks = [f"blocks.{n}" for n in range(3)]
    return [
        [f"{block}.bias" for block in reversed(blocks)],
        ["embed.weight"],
        [f"{block}.weight" for block in reversed(blocks)],
    ]


def optimizer_of(model: nn.Module) -> Any:
    groups = [
        {"params": [model.get_parameter(name) for name in names], "lr": 0.1 * (number + 1)}
        for number, names in enumerate(names_in(model))
    ]
    return torch.optim.SGD(groups, lr=0.1, momentum=0.9, weight_decay=0.01)


def shard(model: Tiny) -> Tiny:
    for block in model.blocks:
        fully_shard(block)
    return fully_shard(model)


def is_bound(optimizer: Any, model: nn.Module) -> bool:
    """Whether each entry of the optimizer is the model's parameter of that FQN."""
    named = {name: p for p, names in parameter_names(model).items() for name in names}
    return all(
        [id(p) for p in group["params"]] == [id(named[name]) for name in names]
        for group, names in zip(optimizer.param_groups, names_in(model), strict=True)
    )


def fill(model: Tiny, source: Tiny) -> None:
    """Gives the sharded model the values of `source`, as a load does."""
    managed = fsdp_params(model)
    for name, parameter in model.named_parameters():
        storage = source.get_parameter(name).detach().flatten().clone()
        hand_over(name, parameter, storage, managed[parameter])


def steps(model: Tiny, optimizer: Any) -> dict[str, Any]:
    """Makes three steps. Returns the local values of all parameters."""
    for number in range(3):
        model(torch.tensor([0, number + 1, 2])).backward()
        optimizer.step()
        optimizer.zero_grad()
    return {n: getattr(p, "_local_tensor", p).detach() for n, p in model.named_parameters()}


def follow_addresses(model: nn.Module, optimizer: Any) -> None:
    """A wrong rebind_parameters: by data_ptr, as accelerate's."""
    before = {p.data_ptr(): name for name, p in model.named_parameters()}
    shard(model)
    for group in optimizer.param_groups:
        group["params"] = [model.get_parameter(before[p.data_ptr()]) for p in group["params"]]


def follow_order(model: nn.Module, optimizer: Any) -> None:
    """A wrong rebind_parameters: by the order of parameters."""
    shard(model)
    parameters = model.parameters()
    for group in optimizer.param_groups:
        group["params"] = [next(parameters) for _ in group["params"]]


def test_steps_after_rebinding_equal_those_of_one_process() -> None:
    expected_model = tiny("cpu")
    expected = steps(expected_model, optimizer_of(expected_model))
    model = tiny()
    optimizer = optimizer_of(model)
    lists = [group["params"] for group in optimizer.param_groups]
    with rebind_parameters(model, optimizer):
        shard(model)
    assert is_bound(optimizer, model)
    assert [id(group["params"]) for group in optimizer.param_groups] == list(map(id, lists))
    fill(model, tiny("cpu"))
    assert is_bound(optimizer, model)  # a load keeps each Parameter object
    for name, value in steps(model, optimizer).items():
        torch.testing.assert_close(value, expected[name], msg=name)


@pytest.mark.parametrize("rebind", (follow_addresses, follow_order))
def test_rebinding_by_address_or_order_trains_other_values(rebind: Any) -> None:
    expected_model = tiny("cpu")
    expected = steps(expected_model, optimizer_of(expected_model))
    model = tiny()
    optimizer = optimizer_of(model)
    rebind(model, optimizer)
    assert not is_bound(optimizer, model)
    fill(model, tiny("cpu"))
    got = steps(model, optimizer)
    assert any(not torch.allclose(got[name], expected[name]) for name in expected)


def test_without_rebinding_the_optimizer_has_the_old_parameters() -> None:
    model = tiny()
    optimizer = optimizer_of(model)
    shard(model)
    assert not is_bound(optimizer, model)


def test_several_optimizers_are_rebound() -> None:
    model = tiny()
    blocks = torch.optim.AdamW(model.blocks.parameters())
    rest = torch.optim.SGD([model.head.weight])
    with rebind_parameters(model, [blocks, rest]):
        shard(model)
    assert blocks.param_groups[0]["params"] == list(model.blocks.parameters())
    assert rest.param_groups[0]["params"] == [model.embed.weight]


def test_wrappers_change_no_name() -> None:
    """Blocks are wrapped by activation checkpointing and torch.compile within the context."""
    model = tiny()
    optimizer = optimizer_of(model)
    with rebind_parameters(model, optimizer):
        model.blocks[0] = checkpoint_wrapper(fully_shard(model.blocks[0]))
        model.blocks[1] = torch.compile(checkpoint_wrapper(model.blocks[1]), backend="eager")
        fully_shard(model.blocks[1])
        fully_shard(model)
    assert "blocks.1._orig_mod._checkpoint_wrapped_module.weight" in dict(model.named_parameters())
    assert is_bound(optimizer, model)


@pytest.mark.parametrize(
    "fqn, name",
    (
        ("model.layers.0.weight", "model.layers.0.weight"),
        ("_orig_mod.model.layers.0._checkpoint_wrapped_module.weight", "model.layers.0.weight"),
        ("_fsdp_wrapped_module.layers._orig_mod", "layers"),
        ("my_orig_mod.weight", "my_orig_mod.weight"),
    ),
)
def test_canonical_names_have_no_wrappers(fqn: str, name: str) -> None:
    assert canonical(fqn) == name


def test_two_parameters_of_one_name_are_refused() -> None:
    model = nn.Module()
    model.inner = nn.Module()
    model.inner._orig_mod = nn.Linear(2, 2, bias=False)
    model.inner.weight = nn.Parameter(torch.zeros(2))
    with pytest.raises(UsageError, match=r"two parameters have one name \(tensor inner.weight\)"):
        parameter_names(model)


# ---- refusals


def ids_of(optimizer: Any) -> list[list[int]]:
    """The ids of the parameters in each group."""
    return [[id(p) for p in group["params"]] for group in optimizer.param_groups]


def refused(model: nn.Module, optimizer: Any, block: Any = shard, **arguments: Any) -> UsageError:
    """The error of the context around `block`. Asserts that the optimizers are unchanged."""
    optimizers = optimizer if isinstance(optimizer, list) else [optimizer]
    before = [ids_of(one) for one in optimizers]
    states = [dict(one.state) for one in optimizers]
    with pytest.raises(UsageError) as caught, rebind_parameters(model, optimizer, **arguments):
        block(model)
    assert [ids_of(one) for one in optimizers] == before
    assert [dict(one.state) for one in optimizers] == states
    return caught.value


def test_a_parameter_of_another_model_is_refused() -> None:
    model = tiny()
    stranger = nn.Parameter(torch.empty(3, 2))
    optimizer = torch.optim.SGD([{"params": [model.embed.weight]}, {"params": [stranger]}])
    error = refused(model, optimizer)
    assert error.got == "parameter 0 of group 1, [3, 2]"
    assert not model._parameters.get("weight") and not fsdp_params(model)  # not sharded yet


def test_a_failure_in_the_context_leaves_the_optimizer_unchanged() -> None:
    model = tiny()
    optimizer = optimizer_of(model)
    before = ids_of(optimizer)
    with pytest.raises(ZeroDivisionError), rebind_parameters(model, optimizer):
        shard(model)
        raise ZeroDivisionError
    assert ids_of(optimizer) == before


def untie(model: Tiny) -> None:
    model.head.weight = nn.Parameter(torch.empty(5, 4, device="meta"))


def tie(model: Tiny) -> None:
    model.blocks[0].weight = model.blocks[1].weight


def lose(model: Tiny) -> None:
    del model.blocks[2]


@pytest.mark.parametrize(
    "block, tensor, why",
    (
        (untie, "head.weight", "tied parameters are no longer tied"),
        (tie, "blocks.0.weight", "expected another parameter than blocks.1.weight"),
        (lose, "blocks.2.bias", "the model no longer has this parameter"),
    ),
)
def test_a_block_that_changes_the_model_is_refused(block: Any, tensor: str, why: str) -> None:
    """`block` is run within `rebind_parameters`."""

    def exchange(model: Tiny) -> None:
        model.blocks[1].bias = nn.Parameter(torch.empty(4))
        block(model)

    model = tiny()
    # The first optimizer alone could be rebound. It must not be, since the second one can't.
    possible = torch.optim.SGD([model.blocks[1].bias])
    error = refused(model, [possible, optimizer_of(model)], exchange)
    assert (error.category, error.tensor) == ("MISMATCH", tensor)
    assert why in str(error)


# ---- state


def stepped() -> tuple[Tiny, Any]:
    """A model, and an optimizer that has made a step."""
    model = tiny("cpu")
    optimizer = torch.optim.AdamW([model.blocks[0].weight, model.embed.weight])
    model(torch.tensor([1, 2])).backward()
    optimizer.step()
    optimizer.zero_grad()
    return model, optimizer


def test_state_is_refused_without_resuming() -> None:
    model, optimizer = stepped()
    error = refused(model, optimizer)
    assert "resuming=True" in str(error) and error.tensor == "blocks.0.weight"


def test_state_that_does_not_fit_is_refused() -> None:
    """Plain moments do not fit a parameter that is now a DTensor, although both have the shape
    [4, 4]."""
    model, optimizer = stepped()
    error = refused(model, optimizer, resuming=True)
    assert (error.category, error.tensor) == ("MISMATCH", "blocks.0.weight")
    assert "'exp_avg'" in str(error)


def test_fitting_state_is_kept() -> None:
    model, optimizer = stepped()
    entry = optimizer.state[model.blocks[0].weight]
    with rebind_parameters(model, optimizer, resuming=True):
        model.blocks[0].weight = nn.Parameter(model.blocks[0].weight.detach().clone())
    assert list(optimizer.state) == optimizer.param_groups[0]["params"]
    assert optimizer.state[model.blocks[0].weight] is entry
    assert optimizer.state[model.embed.weight]["step"] == 1


def test_the_state_of_our_adamw_is_refused_once_it_has_stepped() -> None:
    model = tiny("cpu")
    optimizer = AdamW(model.parameters())
    with rebind_parameters(model, optimizer, resuming=True):  # no step was made
        model.blocks[0].weight = nn.Parameter(model.blocks[0].weight.detach().clone())
    model(torch.tensor([1, 2])).backward()
    optimizer.step()
    error = refused(model, optimizer, resuming=True)
    assert "load_state_dict" in str(error) and error.tensor
    optimizer.step()


def test_state_of_another_shape_is_refused() -> None:
    model, optimizer = stepped()

    def widen(model: Tiny) -> None:
        model.blocks[0].weight = nn.Parameter(torch.zeros(4, 5))

    error = refused(model, optimizer, widen, resuming=True)
    assert error.tensor == "blocks.0.weight"


def test_state_on_meta_holds_nothing_of_a_step() -> None:
    """Adagrad makes its state when it is constructed."""
    model = tiny()
    with torch.device("meta"):
        optimizer = torch.optim.Adagrad(model.parameters())
    with rebind_parameters(model, optimizer):
        fully_shard(model)
    assert {*optimizer.param_groups[0]["params"]} == {*model.parameters()}
