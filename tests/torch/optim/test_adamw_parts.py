"""`part_of`: the indices, in the complete parameter, of the elements that a rank steps.

The oracle is torch.chunk. Indices are given as runs: (first index, number of elements). Catches:
runs that are numbered from the start of the local tensor; a shard of a shard treated as a shard of
the complete parameter; the order of two cuts derived from the placements alone; a parameter that
all of its replicas count in the gradient norm.
"""

import copy
from math import prod

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from sharding import Cut, playing_new_rank  # noqa: E402  (after torch is known to be there)
from torch_front import from_pretrained, local_part, shard  # noqa: E402

import modicum.memory  # noqa: E402
from modicum.torch.optim.names import ListedParameter, listed_in  # noqa: E402
from modicum.torch.optim.parts import Memory, part_of  # noqa: E402
from modicum.torch.shards.placements import Shardings  # noqa: E402

CUTS = [
    Cut("none", (2,)),
    Cut("fsdp2", (3,)),
    Cut("fsdp2", (4,), dim=1),
    Cut("hsdp", (2, 3)),
    Cut("tp-fsdp", (2, 2)),
    Cut("tp-fsdp", (2, 2), dim=1),
]


def listed(name: str, parameter: torch.nn.Parameter) -> ListedParameter:
    (only,) = listed_in([{"params": [(name, parameter)]}])
    return only


@pytest.mark.parametrize(
    ("name", "cut"),
    [(name, cut) for name in ("llama", "mixtral") for cut in CUTS],
    ids=str,
)
def test_runs_are_the_elements_that_a_rank_holds(name: str, cut: Cut) -> None:
    """Every element gets its index in the complete parameter as its value, so that the local values
    must be the indices in `part_of(...).runs`."""
    whole = copy.deepcopy(from_pretrained(name)).float()
    with torch.no_grad():
        for parameter in whole.parameters():
            parameter.copy_(torch.arange(float(parameter.numel())).view(parameter.shape))
    counted = {n: 0 for n, _ in whole.named_parameters()}  # elements that ranks count in a norm
    world = prod(cut.mesh)
    for rank in range(world):
        with playing_new_rank(rank, world):
            model = shard(copy.deepcopy(whole), cut)
            shardings = Shardings()
            for n, parameter in model.named_parameters():
                part = part_of(listed(n, parameter), "fp32", shardings)
                runs = [torch.arange(float(first), float(first + k)) for first, k in part.runs]
                got = torch.cat(runs) if runs else torch.empty(0)
                held = local_part(n, whole.get_parameter(n).detach(), cut, rank)
                assert torch.equal(got, held.reshape(-1)), f"{n} of rank {rank}"
                ends = [first + k for first, k in part.runs[:-1]]
                assert all(a < b[0] for a, b in zip(ends, part.runs[1:], strict=True)), n
                counted[n] += got.numel() if part.is_counted else 0
    if cut.layout == "none":
        return  # a plain parameter has no mesh: its elements are not summed over ranks
    for n, parameter in whole.named_parameters():
        # Under "tp-fsdp" a parameter may be on one mesh axis only. It is then counted once for each
        # coordinate of the other axis.
        assert counted[n] % parameter.numel() == 0 and counted[n] > 0, n
        if cut.layout != "tp-fsdp":
            assert counted[n] == parameter.numel(), n


def test_an_alias_of_an_uneven_cut_is_refused() -> None:
    """Both tensor parallelism and FSDP2 cut dim 0 of this weight, which has 53 rows. Which elements
    a rank holds depends on the order of the cuts. The placements of an alias do not show it."""
    whole = copy.deepcopy(from_pretrained("llama"))
    with playing_new_rank(0, 4):
        model = shard(whole, Cut("tp-fsdp", (2, 2)))
        parameter = model.get_parameter("model.layers.0.mlp.up_proj.weight")
        alias = torch.nn.Parameter(parameter.detach())
        with pytest.raises(modicum.UsageError, match=r"cuts of unknown order.*up_proj"):
            part_of(listed("up_proj", alias), "fp32", Shardings())


def test_a_placeholder_takes_no_memory_in_torchs_deterministic_mode() -> None:
    """That mode writes to new memory, so that it is committed."""
    on_meta = torch.empty(64 << 20, device="meta")
    torch.use_deterministic_algorithms(True)
    try:
        before = modicum.memory.held()
        placeholder = Memory(torch.float32, torch.device("cpu")).in_place_of(on_meta)
        assert modicum.memory.held() - before < 16 << 20
    finally:
        torch.use_deterministic_algorithms(False)
    assert (
        placeholder.shape == on_meta.shape and torch.utils.deterministic.fill_uninitialized_memory
    )
