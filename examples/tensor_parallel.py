"""Fine-tunes a causal language model with tensor parallelism under FSDP2: loads it, or resumes the
newest checkpoint of a run, trains, and saves. Modicum's lines end in `# modicum`.

    torchrun --nproc-per-node 4 examples/tensor_parallel.py DIRECTORY --tp 2 --checkpoints RUN

DIRECTORY is a Hugging Face checkpoint of a dense model whose layers have the names of Llama's, such
as Llama, Mistral, Qwen2 or Qwen3; with --vision-language of a model that has such a language model,
as Qwen2.5-VL, which is divided, while the ranks of a "tp" group replicate the vision encoder. Runs
on CPUs and GPUs.
"""

import argparse
import fnmatch
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

import modicum.torch  # modicum

STYLES = {
    "model.embed_tokens": RowwiseParallel(input_layouts=Replicate()),
    "model.layers.*.self_attn.[qkv]_proj": ColwiseParallel(),
    "model.layers.*.self_attn.[qk]_norm": SequenceParallel(
        sequence_dim=2,  # the dim of heads: each rank normalises its own
        use_local_output=True,
    ),
    "model.layers.*.self_attn.o_proj": RowwiseParallel(),
    "model.layers.*.mlp.gate_proj": ColwiseParallel(),
    "model.layers.*.mlp.up_proj": ColwiseParallel(),
    "model.layers.*.mlp.down_proj": RowwiseParallel(),
    "lm_head": ColwiseParallel(output_layouts=Replicate()),
}
OPTIONAL = {"model.layers.*.self_attn.[qk]_norm", "lm_head"}  # not in all of these families


def sharded_model(
    directory: str, dtype: torch.dtype, mesh: DeviceMesh, vision_language: bool
) -> torch.nn.Module:
    config = AutoConfig.from_pretrained(directory)
    auto = AutoModelForImageTextToText if vision_language else AutoModelForCausalLM
    with modicum.torch.empty_parameters():  # modicum
        model = auto.from_config(config, dtype=dtype)
    language = "model.language_model" if vision_language else "model"
    names_of = {name: name.replace("model.", f"{language}.", 1) for name in STYLES}
    # torch matches a pattern level by level and shards nothing where it fits none; fnmatch's `*`
    # also spans dots, so give patterns with all levels.
    names = [name for name, _ in model.named_modules()]
    matched = {name for name in STYLES if fnmatch.filter(names, names_of[name])}
    if missing := sorted(names_of[name] for name in STYLES.keys() - matched - OPTIONAL):
        sys.exit(f"no module of {type(model).__name__} has the name {', '.join(missing)}")
    parallelize_module(model, mesh["tp"], {names_of[name]: STYLES[name] for name in matched})
    model.tie_weights()  # embedding and head, if the model ties them: they were sharded separately
    for block in model.get_submodule(language).layers:
        fully_shard(block, mesh=mesh["dp"])
    fully_shard(model, mesh=mesh["dp"])
    return model


def run(options: argparse.Namespace, device: str) -> list[float]:
    """Trains to `options.steps` and saves. Returns the mean loss of each step over all ranks."""
    mesh = init_device_mesh(
        device, (dist.get_world_size() // options.tp, options.tp), mesh_dim_names=("dp", "tp")
    )
    dtype = getattr(torch, options.dtype)
    model = sharded_model(options.directory, dtype, mesh, options.vision_language)
    optimizer = modicum.torch.AdamW(model.named_parameters(), lr=1e-3)  # modicum
    first = 0
    if options.run and any(Path(options.run).glob("step-*/COMMIT")):
        resumed = modicum.torch.resume(model, options.run, optimizer=optimizer)  # modicum
        first = resumed.step
    else:
        modicum.torch.load(  # modicum
            model,
            options.directory,
            optimizer=optimizer,
            budget=options.budget,  # modicum
        )  # modicum
    model.to(device)  # buffers
    losses = []
    for step in range(first, options.steps):
        # The ranks of one "tp" group get the same batch.
        generator = torch.Generator().manual_seed(1000 * step + mesh["dp"].get_local_rank())
        vocabulary = model.config.get_text_config().vocab_size
        tokens = torch.randint(vocabulary, (2, 32), generator=generator).to(device)
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.clip_grad_norm_(1.0)  # modicum
        optimizer.step()
        optimizer.zero_grad()
        mean = loss.detach()
        dist.all_reduce(mean)
        losses.append(mean.item() / dist.get_world_size())
        if dist.get_rank() == 0:
            print(f"step {step}: loss {losses[-1]:.6f}", flush=True)
    if options.run:
        modicum.torch.save(model, options.run, step=options.steps, optimizer=optimizer)  # modicum
    return losses


def options_of(words: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("directory")
    parser.add_argument(
        "--vision-language", action="store_true", help="as Qwen2.5-VL; trains on text"
    )
    parser.add_argument("--tp", type=int, default=2, help="ranks that divide each matrix")
    parser.add_argument("--checkpoints", dest="run", help="resume from this run, and save into it")
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"])
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--budget", help="host memory per node, as in 8GiB")
    return parser.parse_args(words)


def main() -> None:
    options = options_of()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dist.init_process_group()
    if device == "cuda":
        torch.cuda.set_device(dist.get_node_local_rank())
    run(options, device)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
    # A thread of Gloo may still hold a tensor, which would abort Python in its finalization.
    sys.stdout.flush()
    os._exit(0)
