"""For scripts of accelerate and transformers' Trainer: models that they build are loaded within a
budget, and their checkpoints are saved by Modicum. Imports neither of them."""

from modicum.torch.accelerate.context import loading as loading
from modicum.torch.accelerate.loads import Loading as Loading
