"""transformers' Trainer with DeepSpeed's ZeRO-2, optimizer on the host, on DeepSpeed's CPU
accelerator, with two persistent forked workers. Prints a line of JSON.

deepspeed_trainer.py FOLDER [--protect]
"""

import json
import os
import sys
from typing import Any

os.environ |= {"DS_ACCELERATOR": "cpu", "RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}
os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}

import deepspeed
import torch
import transformers

from modicum import memory
from modicum.torch.deepspeed import ProtectCallback, config_of

STEPS = 4
STOCK = {  # as in the documentation of transformers
    "bf16": {"enabled": "auto"},
    "zero_optimization": {
        "stage": 2,
        "offload_optimizer": {"device": "cpu", "pin_memory": False},
        "allgather_partitions": True,
        "overlap_comm": False,
        "reduce_scatter": True,
        "reduce_bucket_size": "auto",
        "contiguous_gradients": True,
    },
    "zero_force_ds_cpu_optimizer": False,  # torch's AdamW, whose kernel needs no compiler
    "zero_allow_untested_optimizer": True,
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
}


class Measures(transformers.TrainerCallback):
    """Measures the copies in the workers after the last step, and notes losses."""

    def __init__(self) -> None:
        self.told: dict[str, Any] = {"losses": []}

    def on_log(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.told["losses"] += [kwargs["logs"]["loss"]] if "loss" in kwargs["logs"] else []

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == STEPS:
            self.told["attribution"] = memory.attribute(kwargs["optimizer"].optimizer).document


def main() -> None:
    folder, *words = sys.argv[1:]
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # would be compiled
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(
        "llama", vocab_size=4000, hidden_size=64, intermediate_size=96, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=2,
    )  # fmt: skip
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    arguments = transformers.TrainingArguments(
        folder, use_cpu=True, bf16=True, deepspeed=STOCK, max_steps=STEPS, optim="adamw_torch",
        per_device_train_batch_size=1, gradient_accumulation_steps=2, report_to="none",
        save_strategy="no", logging_steps=1, disable_tqdm=True, dataloader_num_workers=2,
        dataloader_persistent_workers=True,
    )  # fmt: skip
    rows = torch.randint(4000, (2 * STEPS, 8))
    measures, protect = Measures(), ProtectCallback()
    transformers.Trainer(
        model, arguments, train_dataset=[{"input_ids": row, "labels": row} for row in rows],
        callbacks=[measures, *([protect] if "--protect" in words else [])],
    ).train()  # fmt: skip
    measures.told |= {"config": config_of(arguments), "ended": protect.protection is None}
    print(json.dumps(measures.told), flush=True)
    os._exit(0)


if __name__ == "__main__":
    main()
