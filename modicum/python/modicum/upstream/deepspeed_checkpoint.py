"""Checkpoint directories of DeepSpeed's ZeRO, version 0.19.8: names of files, and the names that
their pickles may contain."""

import re

from modicum.upstream.torch_checkpoint import ORDERED_DICT, REBUILD_TENSOR, REBUILD_TYPED

LATEST = "latest"
OPTIMIZER_FILE = re.compile(r"(?:bf16_|fp16_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_optim_states\.pt")
MODEL_FILE = re.compile(r"(?:zero_pp_rank_(\d+)_)?mp_rank_(\d+)_model_states\.pt")
EXPERT_FILE = re.compile(r"(?:layer_\d+_)?expert_\d+_.*\.pt|expp_rank_\d+_.*\.pt")

STAGE = "deepspeed.runtime.zero.config ZeroStageEnum"
STAGES = {"optimizer_states": 1, "gradients": 2, "weights": 3}
"""The stages by the names of the enum's members. Python 3.11.0 to 3.11.2 pickle the name instead of
the number."""
PICKLED = frozenset(
    (
        STAGE,
        "deepspeed.runtime.fp16.loss_scaler LossScaler",
        "deepspeed.runtime.fp16.loss_scaler DynamicLossScaler",
        "deepspeed.utils.tensor_fragment fragment_address",
        REBUILD_TENSOR, REBUILD_TYPED, ORDERED_DICT, "torch Size", "torch Tensor",
        "torch.nn.parameter Parameter",
    )
)  # fmt: skip

MASTERS = {
    1: "single_partition_of_fp32_groups", 2: "single_partition_of_fp32_groups",
    3: "fp32_flat_groups",
}  # fmt: skip
"""The key of a rank's float32 masters in its optimizer file, by stage."""

BASE_STATE = {1: "base_optimizer_state", 2: "base_optimizer_state", 3: "optimizer_state_dict"}
"""The key of the state of the optimizer that ZeRO wraps, by stage."""

MODEL_KEYS = frozenset(
    (
        "module", "buffer_names", "param_shapes", "frozen_param_shapes", "frozen_param_fragments",
        "shared_params", "dp_world_size", "mp_world_size", "global_steps", "ds_config",
        "ds_version", "optimizer",
    )
)  # fmt: skip
"""The keys of a model file that a conversion uses, or that describe only DeepSpeed's run. All other
keys, such as `lr_scheduler` or a program's own, are reported as not converted."""
