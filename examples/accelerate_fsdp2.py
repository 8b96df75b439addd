"""Fine-tunes a causal language model with accelerate's FSDP2 or with Trainer; `--modicum` runs one
additional line.

    torchrun --nproc-per-node 4 examples/accelerate_fsdp2.py DIRECTORY
    torchrun --nproc-per-node 4 examples/accelerate_fsdp2.py DIRECTORY --modicum --budget 8GiB

DIRECTORY is a Hugging Face checkpoint (config.json and safetensors). Runs on CPUs and GPUs.
`benchmarks/systems.py` runs it with and without Modicum and measures the memory of its ranks.
"""

import argparse
import contextlib
import os
import sys
import tempfile

import torch
import torch.distributed as dist
from accelerate import Accelerator, FullyShardedDataParallelPlugin
from accelerate.state import AcceleratorState, DistributedType, PartialState
from transformers import AutoModelForCausalLM, Trainer, TrainerCallback, TrainingArguments

import modicum.torch.accelerate
from modicum.memory import phase  # names a part of the run for `modicum watch`


def fsdp2_on_cpus() -> None:
    """Makes accelerate use FSDP2 on CPUs, where it would otherwise silently use DDP."""
    init = AcceleratorState.__init__

    def init_as_on_gpus(state, *args, fsdp_plugin=None, **kwargs):
        is_new = not AcceleratorState._shared_state
        init(state, *args, fsdp_plugin=fsdp_plugin, **kwargs)
        if is_new and fsdp_plugin is not None and state.distributed_type == "MULTI_CPU":
            if state._mixed_precision != "no":
                fsdp_plugin.set_mixed_precision(state._mixed_precision)
            state.fsdp_plugin = fsdp_plugin
            state.distributed_type = DistributedType.FSDP
            PartialState._shared_state["distributed_type"] = DistributedType.FSDP

    AcceleratorState.__init__ = init_as_on_gpus
    os.environ["ACCELERATE_USE_CPU"] = "true"


def batches(vocabulary: int, count: int) -> list[torch.Tensor]:
    """This rank's batches of random tokens."""
    generator = torch.Generator().manual_seed(dist.get_rank())
    return [torch.randint(vocabulary, (1, 16), generator=generator) for _ in range(count)]


def train(options: argparse.Namespace) -> None:
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        auto_wrap_policy="transformer_based_wrap",
        cpu_ram_efficient_loading=options.ram_efficient,
    )
    accelerator = Accelerator(mixed_precision="bf16", fsdp_plugin=plugin)
    with phase("prepare"):
        model = AutoModelForCausalLM.from_pretrained(options.directory, dtype=torch.bfloat16)
        model.train()
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
        model, optimizer = accelerator.prepare(model, optimizer)
    with phase("steps"):
        train_steps(accelerator, model, optimizer, options.steps)


def train_steps(
    accelerator: Accelerator, model: torch.nn.Module, optimizer: torch.optim.Optimizer, steps: int
) -> None:
    for step, tokens in enumerate(batches(model.config.vocab_size, steps)):
        tokens = tokens.to(accelerator.device)
        loss = model(input_ids=tokens, labels=tokens).loss
        accelerator.backward(loss)
        norm = accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        mean = accelerator.reduce(loss.detach(), reduction="mean").item()
        norm = norm.full_tensor().item() if hasattr(norm, "full_tensor") else norm.item()
        accelerator.print(f"step {step}: loss {mean}, gradients' norm {norm}", flush=True)


class PrintLosses(TrainerCallback):
    def on_log(self, args, state, control, logs=None, **kwargs):
        if state.is_world_process_zero and "loss" in logs:
            norm = f"gradients' norm {logs['grad_norm']}"
            print(f"step {state.global_step - 1}: loss {logs['loss']}, {norm}", flush=True)


def train_by_trainer(options: argparse.Namespace, folder: str) -> None:
    arguments = TrainingArguments(
        folder,
        use_cpu=not torch.cuda.is_available(),
        bf16=True,
        fsdp=True,
        fsdp_config={
            "version": 2,
            "auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
            "cpu_ram_efficient_loading": options.ram_efficient,
        },
        optim="sgd",
        learning_rate=1e-2,
        max_steps=options.steps,
        per_device_train_batch_size=1,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )
    model = AutoModelForCausalLM.from_pretrained(options.directory, dtype=torch.bfloat16)
    count = options.steps * dist.get_world_size()
    rows = torch.randint(model.config.vocab_size, (count, 16), generator=torch.manual_seed(0))
    data = [{"input_ids": row, "labels": row} for row in rows]
    Trainer(model, arguments, train_dataset=data, callbacks=[PrintLosses()]).train()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("directory")
    parser.add_argument("--modicum", action="store_true", help="load through Modicum")
    parser.add_argument("--budget", help="host memory per node while loading, as in 8GiB")
    parser.add_argument("--trainer", action="store_true", help="train with Trainer")
    parser.add_argument(
        "--no-ram-efficient", dest="ram_efficient", action="store_false",
        help="without accelerate's cpu_ram_efficient_loading",
    )  # fmt: skip
    parser.add_argument("--steps", type=int, default=3)
    options = parser.parse_args()

    if not torch.cuda.is_available():
        fsdp2_on_cpus()
    around = contextlib.nullcontext()
    if options.modicum:
        around = modicum.torch.accelerate.loading(budget=options.budget)  # the one line
    with around as loading, tempfile.TemporaryDirectory() as folder:
        if options.trainer:
            train_by_trainer(options, folder)
        else:
            train(options)
    if loading is not None:
        loading.report.print()  # on rank 0
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
    # A thread of Gloo may still hold a tensor, which would abort Python in its finalization.
    sys.stdout.flush()
    os._exit(0)
