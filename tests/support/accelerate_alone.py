"""Builds and prepares a model with accelerate on one rank, in the process of the test."""

from typing import Any

import torch
from accelerate_rank import accelerator_of
from torch_front import BY_NAME, checkpoint_of


def build(name: str = "llama", **arguments: Any) -> Any:
    return BY_NAME[name].model_class.from_pretrained(checkpoint_of(name), **arguments)


def prepare(model: Any, optimizer: Any = None, **how: Any) -> Any:
    optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=0.1)
    return accelerator_of(**how).prepare(model, optimizer)
