"""Models whose tensors a program distributes itself, by `distribute_module` or
`distribute_tensor`, on real ranks: their gradients, their buffers, and their state in files.

The oracles are torch.optim.AdamW on the complete model, and a save's own error. Catches: a rank
with an empty shard that takes no part in the redistribution of a gradient, which the others wait
for; a gradient that is redistributed before the step; a buffer that is a plain tensor after a load;
a buffer in no state dict whose DTensor is compared with a plain tensor, or of which one rank's part
counts as the whole; a rank outside the mesh that reduces with it; 0-d state that is plain next to a
DTensor; a promise that is silent about a state that can't be saved.
"""

from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from ranks import Ranks  # noqa: E402  (after torch is known to be there)

import modicum.torch  # noqa: E402

# ---- gradients


@pytest.mark.parametrize("rows", (1, 2))
def test_gradients_with_other_placements_are_stepped(two: Ranks, rows: int) -> None:
    """Only all ranks together can redistribute a gradient: in the step, since autograd adds the
    next one to it. With one row rank 1's shard is empty."""
    for difference, are_as_made in two.ask("dtensor_autograd", rows=rows):
        assert difference < 1e-5 and are_as_made


@pytest.mark.parametrize(
    ("given", "expected"),
    [("partial", -0.1), ("none", 0.0), ("none on the empty shard", -0.1)],
)
def test_gradients_set_by_hand_are_stepped(two: Ranks, given: str, expected: float) -> None:
    for answer in two.ask("dtensor_by_hand", given=given):
        assert answer == pytest.approx([expected, -0.1])


def made_by_a_part() -> str:
    """The error of the constructor on this rank. The parameter is on ranks 0 and 1."""
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = DeviceMesh("cpu", [0, 1])
    parameter = torch.nn.Parameter(distribute_tensor(torch.ones(4, 8), mesh, [Shard(0)]))
    try:
        modicum.torch.AdamW([("w", parameter)])
    except modicum.UsageError as error:
        return str(error)
    return ""


def test_a_rank_outside_the_mesh_is_named(worlds: dict[int, Ranks]) -> None:
    *inside, outside = worlds[3].ask(made_by_a_part)
    assert "the tensor's mesh lacks this rank" in outside and "rank 2" in outside
    assert all("no regular grid of the world" in one for one in inside)


# ---- buffers

B, SCRATCH = [float(n) for n in range(8)], [float(n) for n in range(4)]
PLACED = {"replicated": "[Replicate()]", "sharded": "[Shard(dim=0)]"}


@pytest.mark.parametrize("placement", ("replicated", "sharded"))
@pytest.mark.parametrize("by", ("file", "dict"))
def test_a_buffer_on_meta_stays_a_dtensor(
    two: Ranks, tmp_path: Path, by: str, placement: str
) -> None:
    for answer in two.ask("dtensor_on_meta", folder=str(tmp_path), by=by, placement=placement):
        assert answer["b"] == (PLACED[placement], B)


@pytest.mark.parametrize("by", ("file", "dict"))
def test_a_replicated_buffer_of_no_file_is_filled(two: Ranks, tmp_path: Path, by: str) -> None:
    """From a file: by the model's own rule; from a dict: with rank 0's values."""
    how: dict[str, Any] = {"folder": str(tmp_path), "by": by, "placement": "replicated"}
    for answer in two.ask("dtensor_scratch", **how):
        assert answer["scratch"] == (PLACED["replicated"], SCRATCH)


@pytest.mark.parametrize("by", ("file", "dict"))
def test_a_sharded_buffer_of_no_file_is_refused(two: Ranks, tmp_path: Path, by: str) -> None:
    how: dict[str, Any] = {"folder": str(tmp_path), "by": by, "placement": "sharded"}
    for answer in two.ask("dtensor_scratch", **how):
        assert answer["tensor"] == "scratch" and answer["refused"].startswith("UNSUPPORTED")


# ---- state in files


@pytest.mark.parametrize("resumed", ("distributed", "plain"))
def test_the_state_of_a_scalar_is_saved_and_resumed(
    two: Ranks, tmp_path: Path, resumed: str
) -> None:
    assert two.ask("dtensor_scalars", folder=str(tmp_path), resumed=resumed) == [True] * 2


def test_a_promise_says_that_a_state_cannot_be_saved(two: Ranks, tmp_path: Path) -> None:
    """150 columns on each rank end within a block of 8-bit moments; 256 do not."""
    for rank, answer in enumerate(two.ask("dtensor_blocks", folder=str(tmp_path), columns=300)):
        (warning,) = answer["warnings"]
        assert answer["text"].endswith(f"\nwarning: {warning}\n")
        assert answer["issued"] == ([f"modicum: {warning}"] if rank == 0 else [])
        promise, why = warning.split(": ", 1)
        assert promise == "the memory of a save is not predicted" and "(tensor w, " in why
        # The error is that of the rank that refused first.
        assert answer["refused"].startswith(why.split(", got")[0])
    for answer in two.ask("dtensor_blocks", folder=str(tmp_path), columns=512):
        assert (answer["warnings"], answer["issued"], answer["refused"]) == ([], [], "")
