"""A rank's share of the CPUs of its node."""

import os

import torch.distributed as dist

from modicum import _modicum


def cpus_of_rank(ranks_per_node: int | None = None) -> int:
    """The CPUs that this process may use (affinity, cgroup quota), divided by the node's ranks; at
    least 1. All ranks of a node are assumed to share one affinity mask and quota: a rank that is
    bound to CPUs of its own gets too few.

    Args:
        ranks_per_node: None means LOCAL_WORLD_SIZE, which launchers set, or else the world size.
    """
    if ranks_per_node is None:
        world_size = dist.get_world_size() if dist.is_initialized() else 1
        ranks_per_node = int(os.environ.get("LOCAL_WORLD_SIZE", world_size))
    return max(1, _modicum.granted_cpus() // ranks_per_node)
