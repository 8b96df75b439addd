"""`modicum.torch.AdamW` replaces torch's AdamW in unchanged scripts of accelerate, Trainer and TRL.
The losses are close to torch's. Except under TRL they are those of a program that shards and loads
without these frameworks, bit for bit. The state has the promised bytes.

The oracle is torch.optim.AdamW in the same scripts. Catches: state that is allocated for parameters
on meta or for the whole model; an optimizer that keeps the parameters from before `prepare`.
"""

from itertools import product
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")
pytest.importorskip("accelerate")
pytest.importorskip("peft")

from ranks import Ranks

STEPS = 20


@pytest.fixture(scope="module")
def world(request: pytest.FixtureRequest, worlds: dict[int, Ranks]) -> Ranks:
    return worlds[request.param]


@pytest.fixture(scope="module")
def models(world: Ranks, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("models")
    for family in ("qwen3", "qwen3_moe"):
        world.ask("write", family=family, directory=str(folder / family))
    return {"dense": str(folder / "qwen3"), "experts": str(folder / "qwen3_moe")}


def losses(answers: list[dict[str, Any]]) -> list[list[float]]:
    """The losses of each rank's steps. Asserts that Modicum has refused nothing."""
    for rank, answer in enumerate(answers):
        assert answer["refused"] == "", f"rank {rank}"
    return [[float.fromhex(loss) for loss in answer["losses"]] for answer in answers]


def assert_as_promised(answer: dict[str, Any]) -> None:
    """Asserts that each float32 element of the shards has 12 bytes of state (gradient, exp_avg and
    exp_avg_sq), and that the load's promise contains the state."""
    held = answer["held"]["fp32"]
    # The entry "parameters" is a number of elements, and the other entries are bytes.
    elements = held["parameters"]
    state_bytes = sum(size for purpose, size in held.items() if purpose != "parameters")
    assert elements == answer["trained"] > 0
    assert 12 * elements <= state_bytes <= 12 * elements + (1 << 18)
    # The kernel counts whole pages, so the first and last page of each array add to the bytes.
    pages = {owner["name"]: owner["held_bytes"] for owner in answer["attribution"]["owners"]}
    kernel = sum(pages[name] for name in ("gradient", "moments"))
    assert kernel == pytest.approx(12 * elements, abs=1 << 16)
    for rank in answer["report"]["ranks"]:
        assert rank["ledger_peak_bytes"] >= state_bytes
        assert rank["promised_bytes"] >= rank["baseline_bytes"] + state_bytes
        assert rank["unexplained_bytes"] < 4 << 20


# The kind of the script, and when it makes the optimizer ("before" or "after" prepare) or how
# Trainer gets it ("class": its class and options; "overridden": by an overridden method).
WAYS = {
    "accelerate": ("accelerate", "before"),
    "accelerate, after": ("accelerate", "after"),
    "trainer": ("trainer", "class"),
    "trainer, overridden": ("trainer", "overridden"),
    "sft": ("sft", "class"),
}
MODELS = ("dense", "experts", "adapters")
# The soak run has all combinations of world size, way and model. This one runs always.
QUICK = {(2, "accelerate", "dense")}
CASES = [
    pytest.param(*case, marks=() if case in QUICK else pytest.mark.soak)
    for case in product((2, 4), WAYS, MODELS)
]


@pytest.mark.parametrize(("world", "way", "model"), CASES, indirect=["world"])
def test_trains_as_torch_does(world: Ranks, models: dict[str, str], model: str, way: str) -> None:
    """The losses differ from torch's by at most a ratio of 1e-4. Except under TRL, which computes
    the loss in another way, they are bit for bit those of a program with FSDP2 alone that gets the
    same inputs."""
    kind, made = WAYS[way]
    if kind == "sft":
        pytest.importorskip("trl")
    how: dict[str, Any] = {"directory": models.get(model, models["dense"])}
    how |= {"adapters": model == "adapters", "steps": STEPS}
    script = how | {"kind": kind, "made": made}
    expected = losses(world.ask("optimized", by="torch", **script))
    answers = world.ask("optimized", by="modicum", **script)
    inputs = [answer["inputs"] for answer in answers]
    by_hand = world.ask("optimized", by="modicum", kind="hand", inputs=inputs, **how)
    if kind == "sft":  # TRL sums the loss in another order, and adds the experts' balance to it
        for mine, theirs in zip(losses(answers), losses(by_hand), strict=True):
            assert model == "experts" or mine == pytest.approx(theirs, rel=1e-6)
    else:
        assert losses(answers) == losses(by_hand)
    for rank, (mine, theirs) in enumerate(zip(losses(answers), expected, strict=True)):
        assert mine == pytest.approx(theirs, rel=1e-4), f"rank {rank}"
        assert len(mine) == STEPS
    if made != "after":  # the load then knows the optimizer, and promises its state
        for answer in answers:
            assert_as_promised(answer)


@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.soak)], indirect=True)
@pytest.mark.parametrize(
    "made",
    ("before", *(pytest.param(when, marks=pytest.mark.soak) for when in ("sharded", "after"))),
)
def test_losses_do_not_depend_on_when_the_optimizer_is_made(
    world: Ranks, models: dict[str, str], made: str
) -> None:
    """A program with FSDP2 alone makes the optimizer before sharding, between sharding and the
    load, or after the load. Its losses equal those of accelerate's script bit for bit. If the
    optimizer is not an argument of the load, its first step allocates the state."""
    how = {"directory": models["dense"], "by": "modicum", "steps": 4}
    expected = losses(world.ask("optimized", kind="accelerate", made="before", **how))
    for told in (True, False):
        assert losses(world.ask("optimized", kind="hand", made=made, told=told, **how)) == expected
