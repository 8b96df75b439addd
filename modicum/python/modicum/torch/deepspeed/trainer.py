"""For DeepSpeed under transformers' Trainer. Imports transformers,
but not DeepSpeed.

    from modicum.torch.deepspeed import ProtectCallback

    trainer = Trainer(model, args, callbacks=[ProtectCallback()], ...)
"""

import copy
import math
from typing import Any

from transformers import TrainerCallback, TrainingArguments

from modicum.errors import refusal
from modicum.torch.optim.protection import Protection, protect


class ProtectCallback(TrainerCallback):
    """Calls `modicum.torch.protect` when training begins: after DeepSpeed's initialisation, and
    before the data loader forks its workers.

    Works for DeepSpeed's ZeRO with `offload_optimizer` and for torch's optimizers.
    `modicum.torch.AdamW` needs no protection and is ignored. State that does not exist yet is
    protected at the end of the step that allocates it. Children forked after training inherit the
    memory again.

    Raises:
        UsageError: from `on_train_begin`, as by `protect`.
    """

    def __init__(self) -> None:
        self.protection: Protection | None = None
        """The protection during training; None before and after."""

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.on_train_end(args, state, control)  # of a training that an exception has ended
        self.protection = protect(kwargs["optimizer"])

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.protection is not None:
            self.protection.undo()
        self.protection = None


def config_of(arguments: TrainingArguments) -> dict[str, Any]:
    """The ds_config of `TrainingArguments(deepspeed=...)`, for `modicum plan --deepspeed` and
    `modicum.plan`. transformers has replaced most of its "auto" values by numbers:

        Path("resolved.json").write_text(json.dumps(config_of(arguments)))
        modicum.plan("DIRECTORY", ranks=8, deepspeed="resolved.json")

    Infinities and NaN at its top level are left out, since JSON lacks them. These stay "auto":
    sizes that depend on the model and, before training, the scheduler's numbers of steps, none of
    which change host memory; and `train_batch_size`, which follows from the plan's ranks.

    Args:
        arguments: transformers' TrainingArguments; for resolved values those of a Trainer that
            exists.

    Returns:
        A copy, which `json.dump` accepts.

    Raises:
        UsageError: the arguments have no DeepSpeed configuration.
    """
    resolved = getattr(arguments, "hf_deepspeed_config", None)
    if resolved is None:
        got = type(arguments).__name__
        expected = "TrainingArguments with deepspeed="
        raise refusal("USAGE", "no DeepSpeed configuration", expected=expected, got=got)
    config = copy.deepcopy(resolved.config)
    if isinstance(config.get("train_micro_batch_size_per_gpu"), int):
        config["train_batch_size"] = "auto"  # it follows from the plan's ranks
    return {key: value for key, value in config.items() if not _is_not_finite(value)}


def _is_not_finite(value: Any) -> bool:
    return isinstance(value, float) and not math.isfinite(value)
