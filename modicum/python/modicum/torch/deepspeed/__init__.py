"""For DeepSpeed under transformers' Trainer. Imports transformers, but not DeepSpeed."""

from modicum.options.renamed import getattr_of
from modicum.torch.deepspeed.trainer import ProtectCallback as ProtectCallback
from modicum.torch.deepspeed.trainer import config_of as config_of

__getattr__ = getattr_of("modicum.torch.deepspeed")
