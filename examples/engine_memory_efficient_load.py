"""A reinforcement-learning engine with the same steps as AReaL and verl: build, adapters,
parallelise, load, optimizer. Modicum's lines end in `# modicum`.

    torchrun --nproc-per-node 4 examples/engine_memory_efficient_load.py DIRECTORY \\
        --task value-head --memory-efficient-load

DIRECTORY is a Hugging Face checkpoint. Without `--memory-efficient-load` the engine runs without
Modicum: every rank loads the complete model and then shards it. Runs on CPUs and GPUs.
"""

import argparse
import os
import sys
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from peft import LoraConfig, get_peft_model
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForTokenClassification,
)

import modicum.torch  # modicum

CLASSES = {
    "causal-lm": AutoModelForCausalLM,
    "vision-language": AutoModelForImageTextToText,
    "value-head": AutoModelForTokenClassification,
}


def new_head(directory: str) -> modicum.torch.LoadRules:  # modicum
    """The rules by which a critic is made from a causal language model: the model's `score` is not
    in the files and is initialised; an `lm_head` in the files is not used."""
    stored = modicum.walk.open_checkpoint(directory).stored  # modicum
    dropped = ["^lm_head"] if "lm_head.weight" in stored else None  # modicum
    return modicum.torch.LoadRules(missing=["^score"], unexpected=dropped)  # modicum


@dataclass
class Options:
    directory: str
    task: str = "causal-lm"
    lora: bool = False
    init_from_scratch: bool = False
    memory_efficient_load: bool = False
    offload: bool = False
    dtype: torch.dtype = torch.bfloat16
    strategy: str = "own-shard"  # rank0-broadcast reads as AReaL and verl do
    budget: str | None = None  # host memory per node, as in 8GiB


class Engine:
    def __init__(self, options: Options, device: str) -> None:
        self.options, self.device = options, device
        self.model = self.build()
        # Each rank has initialised adapters of its own; `load` broadcasts those of rank 0.
        full_state: dict[str, Any] = {}
        if options.lora and not options.memory_efficient_load and dist.get_rank() == 0:
            full_state = self.model.state_dict()
        self.cpu_offload = CPUOffloadPolicy(device == "cuda") if options.offload else None
        self.parallelise()
        self.load(full_state)
        trained = [p for p in self.model.parameters() if p.requires_grad]
        self.optimizer = torch.optim.AdamW(trained, lr=1e-5)

    def build(self) -> torch.nn.Module:
        options, kind = self.options, CLASSES[self.options.task]
        value_head = {"num_labels": 1, "classifier_dropout": 0.0}
        changes = value_head if options.task == "value-head" else {}
        config = AutoConfig.from_pretrained(options.directory, **changes)
        if options.memory_efficient_load:
            with modicum.torch.empty_parameters():  # modicum
                return self.with_adapters(kind.from_config(config, dtype=options.dtype))
        if options.init_from_scratch:
            return self.with_adapters(kind.from_config(config, dtype=options.dtype))
        model = kind.from_pretrained(options.directory, config=config, dtype=options.dtype)
        return self.with_adapters(model)

    def with_adapters(self, model: torch.nn.Module) -> torch.nn.Module:
        if not self.options.lora:
            return model
        adapters = LoraConfig(r=8, target_modules="all-linear")
        return get_peft_model(model, adapters, autocast_adapter_dtype=False)

    def parallelise(self) -> None:
        how: dict[str, Any] = {"mesh": init_device_mesh(self.device, (dist.get_world_size(),))}
        if self.cpu_offload is not None:
            how["offload_policy"] = self.cpu_offload
        wrapped = set(self.model._no_split_modules)
        for module in [m for m in self.model.modules() if type(m).__name__ in wrapped]:
            fully_shard(module, **how)
        fully_shard(self.model, **how)

    def load(self, full_state: dict[str, Any]) -> None:
        options = self.options
        if not options.memory_efficient_load:
            if options.lora:
                how = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
                set_model_state_dict(self.model, full_state, options=how)
        elif options.init_from_scratch:
            modicum.torch.load(self.model, None, budget=options.budget)  # modicum
        else:
            modicum.torch.fsdp2_load_full_state_dict(  # modicum
                self.model,
                options.directory,  # modicum: a path instead of a state dict
                self.cpu_offload,
                memory=modicum.torch.MemoryPolicy(strategy=options.strategy),  # modicum
                budget=options.budget,  # modicum
                rules=new_head(options.directory) if options.task == "value-head" else None,
            )


def train(engine: Engine, steps: int) -> None:
    """Trains with the mean square of the outputs, in place of the loss of a policy or critic."""
    vocabulary = engine.model.config.get_text_config().vocab_size
    generator = torch.Generator().manual_seed(dist.get_rank())
    engine.model.train()
    for step in range(steps):
        tokens = torch.randint(vocabulary, (2, 32), generator=generator).to(engine.device)
        loss = engine.model(input_ids=tokens).logits.float().square().mean()
        loss.backward()
        engine.optimizer.step()
        engine.optimizer.zero_grad()
        mean = loss.detach()
        dist.all_reduce(mean)
        if dist.get_rank() == 0:
            print(f"step {step}: loss {mean.item() / dist.get_world_size():.6f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("directory")
    parser.add_argument("--task", default="causal-lm", choices=CLASSES)
    parser.add_argument("--lora", action="store_true")
    parser.add_argument("--init-from-scratch", action="store_true", help="load no weights")
    parser.add_argument("--memory-efficient-load", action="store_true")
    parser.add_argument("--offload", action="store_true", help="keep parameters on the CPU")
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"])
    parser.add_argument(
        "--strategy", default="own-shard", help="own-shard, node-reader, replica-striped, ..."
    )
    parser.add_argument("--budget", help="host memory per node, as in 8GiB")
    parser.add_argument("--steps", type=int, default=3)
    words = vars(parser.parse_args())
    steps, dtype = words.pop("steps"), getattr(torch, words.pop("dtype"))

    device = "cuda" if torch.cuda.is_available() else "cpu"
    dist.init_process_group()
    if device == "cuda":
        torch.cuda.set_device(dist.get_node_local_rank())
    torch.manual_seed(0)
    train(Engine(Options(dtype=dtype, **words), device), steps)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
    # A thread of Gloo may still hold a tensor, which would abort Python in its finalization.
    sys.stdout.flush()
    os._exit(0)
