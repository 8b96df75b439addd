"""`modicum.torch.AdamW` in the unchanged scripts of accelerate, Trainer and TRL, in place of
torch's AdamW: torch's losses, those of a program that loads and shards by hand to the bit, and the
promised bytes.

House test against torch.optim.AdamW in the real frameworks. It catches these mutations: state that
is allocated for parameters on meta or for the whole model; state outside of the load's promise; an
optimizer that is bound to the parameters before `prepare`; moments that are rounded twice.
"""

from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")
pytest.importorskip("accelerate")
pytest.importorskip("peft")

from ranks import Ranks, ranks

STEPS = 20


@pytest.fixture(scope="module", params=[2, pytest.param(4, marks=pytest.mark.soak)])
def world(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Ranks]:
    with ranks(request.param, tmp_path_factory.mktemp("optimizers") / "ranks") as started:
        yield started


@pytest.fixture(scope="module")
def models(world: Ranks, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("models")
    for family in ("qwen3", "qwen3_moe"):
        world.ask("write", family=family, directory=str(folder / family))
    return {"dense": str(folder / "qwen3"), "experts": str(folder / "qwen3_moe")}


def losses(answers: list[dict[str, Any]]) -> list[list[float]]:
    for rank, answer in enumerate(answers):
        assert answer["refused"] == "", f"rank {rank}"
    return [[float.fromhex(loss) for loss in answer["losses"]] for answer in answers]


def assert_as_promised(answer: dict[str, Any]) -> None:
    """12 bytes of state per float32 parameter of the shards, which the load's promise holds."""
    held = answer["held"]["fp32"]
    state = sum(size for purpose, size in held.items() if purpose != "parameters")
    elements = held["parameters"]
    assert elements == answer["trained"] > 0
    assert 12 * elements <= state <= 12 * elements + (1 << 18)
    for rank in answer["report"]["ranks"]:
        assert rank["ledger_peak_bytes"] >= state
        assert rank["promised_bytes"] >= rank["baseline_bytes"] + state
        assert rank["unexplained_bytes"] < 4 << 20


@pytest.mark.parametrize("model", ("dense", "experts", "adapters"))
@pytest.mark.parametrize(
    ("kind", "made"),
    [
        ("accelerate", "before"),
        ("accelerate", "after"),
        ("trainer", "class"),
        pytest.param("trainer", "overridden", marks=pytest.mark.soak),
        pytest.param("sft", "class", marks=pytest.mark.soak),
    ],
)
def test_trains_as_torch_does(
    world: Ranks, models: dict[str, str], model: str, kind: str, made: str
) -> None:
    if kind == "sft":
        pytest.importorskip("trl")
    how: dict[str, Any] = {"directory": models.get(model, models["dense"]), "kind": kind}
    how |= {"adapters": model == "adapters", "steps": STEPS, "made": made}
    expected = losses(world.ask("optimized", by="torch", **how))
    answers = world.ask("optimized", by="modicum", **how)
    for rank, (mine, theirs) in enumerate(zip(losses(answers), expected, strict=True)):
        assert mine == pytest.approx(theirs, rel=1e-4), f"rank {rank}"
        assert len(mine) == STEPS
    if made != "after":
        for answer in answers:
            assert_as_promised(answer)


@pytest.mark.parametrize("made", ("before", "sharded", "after"))
def test_by_hand_in_either_order_and_in_a_script(
    world: Ranks, models: dict[str, str], made: str
) -> None:
    """The values are equal to the bit, also if the first step allocates the state."""
    how = {"directory": models["dense"], "by": "modicum", "steps": 4}
    expected = losses(world.ask("optimized", kind="accelerate", made="before", **how))
    for told in (True, False):
        assert losses(world.ask("optimized", kind="hand", made=made, told=told, **how)) == expected
