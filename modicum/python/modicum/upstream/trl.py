"""TRL: the function with which its trainers shard a reference model. A module of TRL is imported
here only if the program has imported TRL."""

import importlib
import sys
from contextlib import ExitStack

from modicum.upstream.patching import Wrapper, wrap_everywhere

_NAME = "prepare_fsdp"


def wrap_sharding(stack: ExitStack, around: Wrapper) -> None:
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
        wrap_everywhere(stack, utils, {_NAME: around})
