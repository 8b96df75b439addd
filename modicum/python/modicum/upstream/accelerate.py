"""accelerate: how `Accelerator.prepare` shards a model by FSDP2. Only functions here import it."""

import dataclasses
import inspect
from contextlib import ExitStack
from typing import Any

from modicum.errors import refusal
from modicum.upstream.known import KnownFacts
from modicum.upstream.patching import Wrapper, wrap


def wrap_prepare(
    stack: ExitStack, *, prepare: Wrapper, prepare_model: Wrapper, shard: Wrapper
) -> None:
    """Until `stack` ends, wraps `Accelerator.prepare`, `Accelerator.prepare_model` and
    `fsdp2_prepare_model(accelerator, model)`, which shards a model."""
    from accelerate import accelerator

    wrap(stack, accelerator.Accelerator, {"prepare": prepare, "prepare_model": prepare_model})
    wrap(stack, accelerator, {"fsdp2_prepare_model": shard})


def require_fsdp2_if_set() -> None:
    """Calls `require_fsdp2` if accelerate is configured already."""
    from accelerate.state import AcceleratorState

    if AcceleratorState._shared_state:
        require_fsdp2(AcceleratorState())


def require_fsdp2(state: Any) -> None:
    """Raises `UsageError` unless accelerate runs FSDP2: Modicum fills a model without values only
    when accelerate shards it by FSDP2."""
    if state.is_fsdp2:
        return
    kind = getattr(state.distributed_type, "value", str(state.distributed_type))
    if kind == "FSDP":
        kind = f"FSDP with fsdp_version={state.fsdp_plugin.fsdp_version}"
    what = "loading() supports FSDP2 only"
    if kind in ("MULTI_CPU", "NO") and state.device.type == "cpu":
        what += " (on CPUs accelerate takes DDP or shards nothing, whatever the plugin; there use "
        what += "fully_shard, then modicum.torch.load or, without an Accelerator, Loading.fill)"
    expected = "FullyShardedDataParallelPlugin(fsdp_version=2)"
    raise refusal("UNSUPPORTED", what, expected=expected, got=f"distributed_type {kind}")


# ---- known facts. That prepare calls fsdp2_prepare_model is checked after each call of prepare.


def _shards_by_function() -> bool:
    from accelerate import accelerator

    parameters = inspect.signature(accelerator.fsdp2_prepare_model).parameters
    return [*parameters] == ["accelerator", "model"]


def _says_what_it_runs() -> bool:
    from accelerate import FullyShardedDataParallelPlugin, state

    fields = {field.name for field in dataclasses.fields(FullyShardedDataParallelPlugin)}
    return (
        fields >= {"cpu_ram_efficient_loading", "fsdp_version", "ignored_modules"}
        and isinstance(state.AcceleratorState._shared_state, dict)
        and hasattr(state.AcceleratorState, "is_fsdp2")
    )


KNOWN = KnownFacts(
    "accelerate",
    ("1.10.1", "1.15.0"),
    {
        "accelerate.accelerator has fsdp2_prepare_model(accelerator, model)": _shards_by_function,
        "AcceleratorState and its plugin say how FSDP2 is run": _says_what_it_runs,
    },
)
