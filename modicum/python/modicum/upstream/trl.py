"""TRL: the function by which its trainers shard a reference model. TRL is not imported here."""

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
    """Until `stack` ends, wraps `prepare_fsdp(model, accelerator)` in the modules of TRL, also in
    those that it imports later. Nothing happens before the program has imported TRL; may be called
    again."""
    if "trl" not in sys.modules:
        return
    try:
        # TRL imports its modules when they are first used: the trainer's may be yet to come.
        utils = importlib.import_module("trl.models.utils")
    except ImportError:
        return
    original = vars(utils).get(_NAME)
    if original is not None and not hasattr(original, "__wrapped__"):
        replace_everywhere(stack, _NAME, original, wrap(original))
