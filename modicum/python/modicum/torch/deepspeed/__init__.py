"""For DeepSpeed under transformers' Trainer. Imports transformers, but not DeepSpeed."""

from modicum.torch.deepspeed.trainer import ProtectCallback as ProtectCallback
from modicum.torch.deepspeed.trainer import config_of as config_of
