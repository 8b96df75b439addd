"""A model's digest does not depend on layout, world size, ranks per node or strategy.

Catches: every replica counts in the digest; a flat partition is one element off; some stripe is
read by no rank.
"""

import itertools
from pathlib import Path

import pytest
from program import STRATEGIES, run_json

# The numbers of ranks for each layout.
LAYOUTS = {
    "none": (1, 3),
    "fsdp2": (1, 2, 5),
    "fsdp2 --shard-dim 1": (3,),
    "fsdp2 --expert-mesh 2x2 --shard-dim 1": (4,),
    "hsdp --mesh 2x2": (4,),
    "hsdp --mesh 1x2x2": (4,),
    "tp-fsdp --mesh 2x2": (4,),
    "tp-fsdp --mesh 3x2 --tp-rowwise (o|down)_proj --tp-replicate norm": (6,),
    "tp-fsdp --mesh 1x2x2 --tp-packed gate": (4,),
    "zero1": (3,),
    "zero2 --round-robin": (4,),
    "zero3": (2, 5),
}
# Of LAYOUTS these run always. `LoadExact.OtherLayoutsAndThreads` in modicum/stream/load_test.cc has
# all strategies in eleven layouts.
QUICK = ("none", "zero1", "fsdp2 --expert-mesh 2x2 --shard-dim 1", "hsdp --mesh 2x2")
# Strategy, layout and number of ranks. Few, since a load of the real widths takes seconds.
DEEP = [
    ("own-shard", "none", 1),
    ("own-shard", "fsdp2", 4),
    ("own-shard", "fsdp2 --shard-dim 1", 3),
    ("own-shard", "zero3", 5),
    ("node-reader --ranks-per-node 2", "tp-fsdp --mesh 2x2", 4),
    ("replica-striped", "hsdp --mesh 2x2", 4),
    ("rank0-broadcast", "zero2", 2),
]


def digest(modicum: Path, directory: Path, strategy: str, layout: str, ranks: int) -> str:
    """The digest of a load to bfloat16. `strategy` and `layout` may bring further flags."""
    words = ("load", directory, "--digest", "--dtype", "bfloat16", "--destination", "discard")
    flags = ("--strategy", *strategy.split(), "--layout", *layout.split(), "--ranks", ranks)
    return run_json(modicum, *words, *flags)["digest"]


@pytest.mark.parametrize(
    "layout",
    [pytest.param(one, marks=() if one in QUICK else pytest.mark.soak) for one in LAYOUTS],
)
def test_the_digest_of_a_small_model_with_codes_and_experts_is_the_same(
    modicum: Path, tmp_path: Path, layout: str
) -> None:
    directory = tmp_path / "model"
    run_json(modicum, "synth", directory, "--arch", "tiny-fp8")
    expected = digest(modicum, directory, "own-shard", "fsdp2", 1)
    for strategy, ranks in itertools.product(STRATEGIES, LAYOUTS[layout]):
        for nodes in ("", " --ranks-per-node 2"):
            case = (strategy + nodes, layout, ranks)
            assert digest(modicum, directory, *case) == expected, case


@pytest.mark.soak
def test_the_digest_of_two_layers_of_deepseek_v3_is_the_same(modicum: Path, tmp_path: Path) -> None:
    directory = tmp_path / "model"
    flags = ("--arch", "deepseek-v3", "--layers", 2, "--sparse")
    run_json(modicum, "synth", directory, *flags)
    found = {how: digest(modicum, directory, *how) for how in DEEP}
    assert len(set(found.values())) == 1, found
