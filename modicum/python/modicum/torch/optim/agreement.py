"""Agreement between the ranks of an optimizer's meshes: a sum over all ranks, whether any rank has
set a flag, and whether any rank refuses a call."""

from collections.abc import Callable, Sequence
from typing import Any

from modicum.errors import refusal
from modicum.torch.optim import in_flight
from modicum.torch.optim.parts import global_sum, largest

Answer = tuple[list[tuple[Any, float]], bool]
"""(mesh, value) pairs to sum, and a flag."""


def agreed(
    prepare: Callable[[], Answer | None], meshes: Callable[[], Sequence[Any]], names: Sequence[str]
) -> tuple[float, bool]:
    """Calls `prepare` on every rank of the parameters' meshes. Collective. Returns the sum of all
    ranks' values, and whether any rank has set the flag.

    If `prepare` raises on a rank, all ranks raise, since otherwise the others would wait for that
    rank in this or the next collective. That rank raises its own error. The others raise a
    `UsageError` with the rank's number and the tensor's name; or, if a save in the background has
    failed, the save's error.

    Args:
        meshes: called after `prepare`; the same meshes in the same order on every rank.
        names: the names of all parameters, the same on every rank.
    """
    terms: list[tuple[Any, float]] = []
    flag, problem = False, None
    try:
        terms, flag = prepare() or ([], False)
    except Exception as error:
        problem = error
    # Every mesh takes part with at least the value 0: a rank whose `prepare` raised has no terms.
    over = list(meshes())
    summed = [*over, *(mesh for mesh, _ in terms)]
    values = [0.0] * len(over) + [value for _, value in terms]
    total, (flag, refused) = global_sum(summed, values, (flag, problem is not None))
    if not refused:
        return total, flag
    known = ["", *names]
    named = getattr(problem, "tensor", None)
    at = known.index(named) if named in known else 0
    rank = next((mesh.get_rank() for mesh in over if mesh is not None), 0)
    # The rank and the name of its tensor as one number: all ranks get the largest. 0: no error.
    code = 0 if problem is None else 1 + rank * len(known) + at
    rank, at = divmod(largest(over, code) - 1, len(known))
    if problem is None:
        in_flight.explain()  # after the last collective
    what = f"rank {rank} refused this call, and its error says why"
    raise problem or refusal("USAGE", what, tensor=known[at])
