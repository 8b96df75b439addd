"""Acts (functions that ranks run by name, see torch_rank.py): scripts of accelerate and Trainer
that get SIGTERM. Each ends by its exit code."""

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers
from checkpoint_rank import prepared, script_context, trained, trainer_of
from saving_rank import send_itself

import modicum.torch
from modicum.torch.trainer import SaveOnSigtermCallback


class Terminated(transformers.TrainerCallback):
    """Sends this process `signals` SIGTERMs at an event of Trainer, more than a second apart.

    Args:
        at: the number of a step.
        after: whether they come after the step's agreement; False: during the step.
        kills: whether SIGKILL follows, as after a grace.
    """

    def __init__(
        self, signals: int, *, at: int = 3, after: bool = False, kills: bool = False
    ) -> None:
        self._signals, self._at, self._is_after, self._kills = signals, at, after, kills

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if not self._is_after and state.global_step + 1 == self._at:
            self._send()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self._is_after and state.global_step == self._at:
            self._send()

    def _send(self) -> None:
        send_itself(self._signals)
        if self._kills:
            os.kill(os.getpid(), signal.SIGKILL)


class Background(transformers.TrainerCallback):
    """Begins a save in the background in step 2."""

    def __init__(self, run: str) -> None:
        self._run = run

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == 2:
            model, optimizer = kwargs["model"], kwargs["optimizer"]
            modicum.torch.async_save(model, self._run, step=2, optimizer=optimizer)


class Slow(transformers.TrainerCallback):
    """Writes this rank's pid to the file `mark-RANK`. Each step lasts 0.1 s longer."""

    def __init__(self, mark: str) -> None:
        self._mark = Path(f"{mark}-{dist.get_rank()}")

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._mark.write_text(str(os.getpid()))
        time.sleep(0.1)


def trains_preempted(
    directory: str, folder: str, signals: int = 0, *, terminated: dict[str, Any] | None = None,
    run: str | None = None, mark: str | None = None, **how: Any,
) -> None:  # fmt: skip
    """Trains by Trainer with `SaveOnSigtermCallback`.

    Args:
        terminated: arguments of `Terminated`.
        run: for `Background`.
        mark: for `Slow`.
        how: TrainingArguments.
    """
    with script_context("modicum"):
        callbacks: list[Any] = [SaveOnSigtermCallback(), Terminated(signals, **terminated or {})]
        callbacks += [Background(run)] if run else []
        callbacks += [Slow(mark)] if mark else []
        trainer_of(directory, folder, "modicum", callbacks, **how).train()


def accelerate_preempted(directory: str, folder: str, signals: int) -> None:
    """A loop of accelerate in `save_on_sigterm`, in whose third step this rank gets SIGTERM. As
    `accelerate_saves` of checkpoint_rank.py before its save."""
    with script_context("modicum"):
        script = prepared(directory, "modicum")
        torch.manual_seed(7 + dist.get_rank())
        accelerator = script[0]
        with modicum.torch.save_on_sigterm(lambda: accelerator.save_state(folder)) as preemption:
            for number in range(1, 6):
                send_itself(signals if number == 3 else 0)
                trained(script, 1)
                preemption.after_step()


ACTS: dict[str, Callable[..., Any]] = {
    "trains_preempted": trains_preempted,
    "accelerate_preempted": accelerate_preempted,
}
