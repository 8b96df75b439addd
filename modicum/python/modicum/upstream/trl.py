"""TRL: the function with which its trainers shard a reference model. A module of TRL is imported
here only if the program has imported TRL."""

import importlib
import sys
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

from modicum.upstream.patching import replace_everywhere

_NAME = "prepare_fsdp"


def replace_sharding(
    stack: ExitStack, wrap: Callable[[Callable[..., Any]], Callable[..., Any]]
) -> None:
    """Until `stack` ends, wraps `prepare_fsdp(model, accelerator)` in all modules of TRL, including
    those that are imported later. Does nothing if the program has not imported TRL. May be called
    repeatedly."""
    if "trl" not in sys.modules:
        return
    try:
        # TRL imports its modules at their first use: the trainer's module may come later.
        utils = importlib.import_module("trl.models.utils")
    except ImportError:
        return
    original = vars(utils).get(_NAME)
    if original is not None and not hasattr(original, "__wrapped__"):
        replace_everywhere(stack, _NAME, original, wrap(original))
