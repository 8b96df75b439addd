"""`SaveOnSigtermCallback`, which does for Trainer what `save_on_sigterm` does for a loop."""

import threading
from typing import Any, ClassVar

from transformers import TrainerCallback

from modicum.torch.saving.preemption import SigtermRequest


class SaveOnSigtermCallback(TrainerCallback):
    """Makes transformers' Trainer save and end when a scheduler preempts the training:

        trainer = Trainer(model, args, callbacks=[SaveOnSigtermCallback()], ...)
        trainer.train(resume_from_checkpoint=last)

    SIGTERM is only noted while Trainer trains, and ignored by workers of its data loaders.
    After the next step all ranks agree, whichever of them have got it, and Trainer saves a
    checkpoint with all that it resumes from: model, optimizer, scheduler, random number generators
    and its own state. It does so whatever `save_strategy` is, and leaves out an evaluation of that
    step. After the `on_save` of all callbacks, in `on_epoch_end`, all ranks exit, with the exit
    code 143 of a process that SIGTERM has ended. Rank 0 prints this, with the checkpoint's name.
    Within `modicum.torch.accelerate.loading` the checkpoint is saved by Modicum, otherwise by
    Trainer.

    A second SIGTERM, more than a second later, ends the process at once, and the previous
    checkpoint stays. One that comes after the last step ends the process when the training ends. If
    `train` raises, SIGTERM is only noted until the next `train`, which then ends the process.

    Args:
        every: the number of steps between two agreements. One is an all-reduce of a single number,
            which waits for the device's work.

    Raises:
        UsageError: `every` is no integer from 1. `train` raises it if the program, or Trainer with
            `enable_jit_checkpoint`, handles SIGTERM itself, and on other threads than the main one.
    """

    _newest: ClassVar[SigtermRequest | None] = None
    """Of the newest training in this process; an exception may have ended it."""

    def __init__(self, *, every: int = 1) -> None:
        self._every, self._request = every, SigtermRequest(every)
        self._is_agreed = False

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        newest = SaveOnSigtermCallback._newest
        if newest is not None and threading.current_thread() is threading.main_thread():
            newest.leave()  # on another thread `install` raises, and `newest` may still train
        self._request, self._is_agreed = SigtermRequest(self._every), False
        self._request.install(type(self).__name__)
        SaveOnSigtermCallback._newest = self._request

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._is_agreed = self._request.is_agreed()
        if self._is_agreed:
            control.should_save = control.should_training_stop = True
            control.should_evaluate = False

    def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self._is_agreed:
            self._request.exit(f"Trainer has saved checkpoint-{state.global_step}")

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._request.leave()
