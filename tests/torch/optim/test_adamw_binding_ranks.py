"""`modicum.torch.AdamW` under accelerate and `fully_shard`, which replace a model's parameters: it
trains like torch's, or a call raises on every rank.

The oracle is torch.optim.AdamW on real ranks. Must fail for these mutants: an optimizer that keeps
stepping the replaced parameters; a rank that raises while the others wait for its norm.
"""

from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")
pytest.importorskip("accelerate")

from ranks import Ranks, ranks


@pytest.fixture(scope="module", params=(2, 4))
def world(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Ranks]:
    with ranks(request.param, tmp_path_factory.mktemp("binding") / "ranks") as started:
        yield started


@pytest.fixture(scope="module")
def model(world: Ranks, tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = str(tmp_path_factory.mktemp("model") / "qwen3")
    world.ask("write", family="qwen3", directory=folder, config={"tie_word_embeddings": True})
    return folder


def assert_trains(got: list[dict[str, Any]], expected: list[dict[str, Any]], still: Any) -> None:
    """`still`: the answers of a run that trains nothing."""
    for rank, (mine, theirs, zero) in enumerate(zip(got, expected, still, strict=True)):
        assert mine["refused"] == "", f"rank {rank}"
        assert mine["losses"] == pytest.approx(theirs["losses"], rel=1e-4), f"rank {rank}"
        assert zero["losses"][1:] != pytest.approx(theirs["losses"][1:], rel=1e-4)
        assert mine["losses"][1:] != pytest.approx(zero["losses"][1:], rel=1e-4), "trains nothing"


def test_trains_after_accelerates_prepare(world: Ranks, model: str) -> None:
    how = {"directory": model, "sent": len(world.processes) > 2}
    ask = {way: world.ask("binding_prepared", way=way, **how)
           for way in ("torch", "zero", "modicum", "loading", "loading, named lines")}  # fmt: skip
    assert_trains(ask["modicum"], ask["torch"], ask["zero"])
    assert_trains(ask["loading, named lines"], ask["torch"], ask["zero"])
    assert_trains(ask["loading"], ask["torch"], ask["zero"])


def test_trains_after_fully_shard_or_says_why_not(world: Ranks, model: str) -> None:
    """An optimizer made before `fully_shard` has the old parameters until its groups get the new
    ones."""
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
        assert answer["same"], "has stepped alone"
        if what in ("memory", "state"):
            assert answer["name"] in answer["refused"] and answer["name"] in odd["refused"]


def test_no_rank_makes_what_one_cannot_make(world: Ranks, model: str) -> None:
    """Otherwise a step would wait for the rank whose constructor raised."""
    *others, odd = world.ask("binding_one_lacks_memory", directory=model)
    assert odd["refused"].startswith("BUDGET")
    for answer in others:
        assert f"rank {len(others)} refused this call" in answer["refused"]
        assert answer["held"] == 0


@pytest.mark.parametrize("how", ("unfreeze", "add_param_group"))
def test_no_rank_takes_what_one_has_no_room_for(world: Ranks, model: str, how: str) -> None:
    """With room on all ranks the same call succeeds, and all train on together."""
    *others, odd = world.ask("binding_one_cannot_unfreeze", directory=model, how=how)
    assert odd["refused"].startswith("BUDGET") and f"'{odd['name']}'" in odd["refused"]
    for answer in others:
        assert f"rank {len(others)} refused this call" in answer["refused"]
        assert answer["name"] in answer["refused"]
    for answer in (*others, odd):
        assert answer["same"], "has kept new state after the refusal"
        assert answer["grew"] and answer["steps"] == [5.0]
