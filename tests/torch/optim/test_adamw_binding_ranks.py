"""`modicum.torch.AdamW` under accelerate and `fully_shard`, which replace a model's parameters:
AdamW trains like torch's, or a call raises on every rank.

The oracle is torch.optim.AdamW on real ranks. Catches: an optimizer that goes on stepping the
parameters that were replaced; a rank that raises while the others wait for it in the reduction of
the gradient norm.

In the tests of refusals the last rank is the odd one: the only one that has a reason to refuse.
"""

from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")
pytest.importorskip("accelerate")

from ranks import Ranks


@pytest.fixture(scope="module", params=(2, pytest.param(4, marks=pytest.mark.soak)))
def world(request: pytest.FixtureRequest, worlds: dict[int, Ranks]) -> Ranks:
    return worlds[request.param]


@pytest.fixture(scope="module")
def model(world: Ranks, tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = str(tmp_path_factory.mktemp("model") / "qwen3")
    world.ask("write", family="qwen3", directory=folder, config={"tie_word_embeddings": True})
    return folder


def assert_trains(got: list[dict[str, Any]], expected: list[dict[str, Any]], still: Any) -> None:
    """Asserts that every rank has the losses of `expected`. After the first loss, which comes
    before any step, they must differ from the losses of `still`, a run that trains nothing."""
    for rank, (mine, theirs, zero) in enumerate(zip(got, expected, still, strict=True)):
        assert mine["refused"] == "", f"rank {rank}"
        assert mine["losses"] == pytest.approx(theirs["losses"], rel=1e-4), f"rank {rank}"
        assert zero["losses"][1:] != pytest.approx(theirs["losses"][1:], rel=1e-4)
        assert mine["losses"][1:] != pytest.approx(zero["losses"][1:], rel=1e-4), "trains nothing"


def test_trains_after_accelerates_prepare(world: Ranks, model: str) -> None:
    """Without and within `loading()`. "zero" is torch with lr 0. "named lines": AdamW is made
    after `prepare`, as the error about replaced parameters recommends."""
    # With four ranks accelerate also sends rank 0's weights to the others.
    how = {"directory": model, "sent": len(world.processes) > 2}
    got = {way: world.ask("binding_prepared", way=way, **how)
           for way in ("torch", "zero", "modicum", "loading", "loading, named lines")}  # fmt: skip
    for way in ("modicum", "loading", "loading, named lines"):
        assert_trains(got[way], got["torch"], got["zero"])


def test_trains_after_fully_shard_or_says_why_not(world: Ranks, model: str) -> None:
    """An optimizer that was made before `fully_shard` has the old parameters, and its step is
    refused, unless the program puts the new ones into its groups ("before, told")."""
    expected = world.ask("binding_by_hand", directory=model, when="after", by="torch")
    still = world.ask("binding_by_hand", directory=model, when="before", by="torch")
    for when in ("after", "before, told"):
        assert_trains(world.ask("binding_by_hand", directory=model, when=when), expected, still)
    for answer in world.ask("binding_by_hand", directory=model, when="before"):
        assert answer["losses"] == [] and "in no module any more" in answer["refused"]


@pytest.mark.parametrize("what", ("memory", "options", "state", "load_state_dict"))
def test_all_ranks_refuse_what_one_refuses(world: Ranks, model: str, what: str) -> None:
    *others, odd = world.ask("binding_one_refuses", directory=model, what=what)
    assert odd["refused"] and "refused this call" not in odd["refused"]
    for answer in others:
        assert f"rank {len(others)} refused this call" in answer["refused"]
        assert answer["same"], "this rank has stepped alone"
        if what in ("memory", "state"):
            assert answer["name"] in answer["refused"] and answer["name"] in odd["refused"]


def test_no_rank_makes_an_optimizer_that_one_cannot_make(world: Ranks, model: str) -> None:
    """Otherwise the first step would wait for the rank whose constructor raised."""
    *others, odd = world.ask("binding_one_lacks_memory", directory=model)
    assert odd["refused"].startswith("BUDGET")
    for answer in others:
        assert f"rank {len(others)} refused this call" in answer["refused"]
        assert answer["held"] == 0


@pytest.mark.parametrize("how", ("unfreeze", "add_param_group"))
def test_no_rank_allocates_state_that_one_has_no_room_for(
    world: Ranks, model: str, how: str
) -> None:
    """Once the odd rank has room, all ranks make five steps with the new parameters."""
    *others, odd = world.ask("binding_one_cannot_unfreeze", directory=model, how=how)
    assert odd["refused"].startswith("BUDGET") and f"'{odd['name']}'" in odd["refused"]
    for answer in others:
        assert f"rank {len(others)} refused this call" in answer["refused"]
        assert answer["name"] in answer["refused"]
    for answer in (*others, odd):
        assert answer["same"], "this rank has kept new state after the refusal"
        assert answer["grew"] and answer["steps"] == [5.0]
