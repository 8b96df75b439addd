"""TRL: the function by which its trainers shard a reference model. TRL is not imported here."""

import sys
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

from modicum.upstream.patching import replace

_NAME = "prepare_fsdp"


def replace_sharding(
    stack: ExitStack, wrap: Callable[[Callable[..., Any]], Callable[..., Any]]
) -> None:
    """Until `stack` ends, wraps `prepare_fsdp(model, accelerator)` in all modules of TRL that the
    program has imported. May be called again, when more are imported."""
    utils = sys.modules.get("trl.models.utils")
    original = vars(utils).get(_NAME) if utils else None
    if original is None:
        return
    wrapped = original
    if not hasattr(original, "__wrapped__"):
        wrapped = wrap(original)
    else:
        original = original.__wrapped__
    for name, module in list(sys.modules.items()):
        if name.startswith("trl.") and vars(module).get(_NAME) is original:
            replace(stack, module, _NAME, wrapped)
