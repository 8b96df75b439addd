"""Directories of accelerate's `save_state` under FSDP, accelerate 1.15: names of files."""

import re

MODELS = re.compile(r"pytorch_model_fsdp_\d+")
"""Directories of torch.distributed.checkpoint, each with a model's tensors."""
OPTIMIZERS = re.compile(r"optimizer_\d+")
"""Directories of torch.distributed.checkpoint, each with an optimizer's state."""
