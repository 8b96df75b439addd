"""How many threads a rank may start."""

import os

import torch.distributed as dist

from modicum import _modicum


def cpus_of_rank(ranks_per_node: int | None = None) -> int:
    """The rank's share of the CPUs that its process may use; at least one.

    Args:
        ranks_per_node: None: LOCAL_WORLD_SIZE, which launchers set, else the world size.
    """
    if ranks_per_node is None:
        world_size = dist.get_world_size() if dist.is_initialized() else 1
        ranks_per_node = int(os.environ.get("LOCAL_WORLD_SIZE", world_size))
    return max(1, _modicum.granted_cpus() // ranks_per_node)
