"""For transformers' Trainer, which it imports."""

from modicum.torch.trainer.preemption import SaveOnSigtermCallback as SaveOnSigtermCallback
