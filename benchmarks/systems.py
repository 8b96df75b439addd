#!/usr/bin/env python3
"""Measures the memory of users' systems, with unchanged scripts and with Modicum's line added.

Workload: the scripts of examples/ with the real packages, each without and with Modicum:
accelerate's FSDP2 with bf16 mixed precision (dense and experts), an engine that makes the calls of
AReaL's engine in the same order (causal LM, value head, vision-language, LoRA), and twinkle's two
strategies. They have fp32 parameters in 4 gloo ranks, from a made-up checkpoint. DeepSpeed's ZeRO-2
runs in one process, with its optimizer in host memory and two data-loader workers.

A peak is the largest sampled sum over all ranks of anonymous memory, shared memory and page tables.
There are two: of a run without steps, and of a run with training. For DeepSpeed: bytes per
parameter by owner, from the kernel's page tables.

The losses without and with Modicum must be equal; with LoRA only that of the first step. Writes its
table into benchmarks/RESULTS.md between its markers.
"""

import argparse
import contextlib
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from harness.page import GIB, ROOT, machine, write_between_markers
from harness.watch import Process, held

sys.path.append(str(ROOT / "tests/support"))
from families import MROPE
from program import tree_of

SAMPLE_PERIOD_S = 0.02
RANKS = 4
COMMAND = "python benchmarks/systems.py"
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    # glibc returns the memory of freed all-gathers to the kernel immediately.
    "MALLOC_MMAP_THRESHOLD_": str(1 << 18),
}
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node")
ENGINE = "engine_memory_efficient_load.py"
STEPS, LOSSES = r"step \d+: .*", r"(?:parameters|losses) .*"
EFFICIENT = "--memory-efficient-load"
# System; checkpoint, script and its arguments; the argument that switches Modicum on; the printed
# lines that must be equal without and with Modicum. With LoRA only the first line is compared:
# Modicum gives the adapters other random values, but they add 0 before the first update.
SCRIPTS = (
    ("accelerate (FSDP2), bf16 mixed precision: dense",
     "causal-lm", "accelerate_fsdp2.py", (), "--modicum", STEPS),
    ("accelerate (FSDP2), bf16 mixed precision: experts",
     "experts", "accelerate_fsdp2.py", (), "--modicum", STEPS),
    ("AReaL's order: causal LM", "causal-lm", ENGINE, ("--dtype", "float32"), EFFICIENT, STEPS),
    ("AReaL's order: value head", "value-head", ENGINE,
     ("--task", "value-head", "--dtype", "float32"), EFFICIENT, STEPS),
    ("AReaL's order: vision-language", "vision-language", ENGINE,
     ("--task", "vision-language", "--dtype", "float32"), EFFICIENT, STEPS),
    ("AReaL's order: LoRA", "causal-lm", ENGINE,
     ("--lora", "--dtype", "float32"), EFFICIENT, r"step 0: .*"),
    ("twinkle's order: native FSDP2",
     "causal-lm", "strategies.py", ("native", "--record", "{}"), "--memory-efficient-init", LOSSES),
    ("twinkle's order: accelerate", "causal-lm", "strategies.py",
     ("accelerate", "--record", "{}"), "--memory-efficient-init", LOSSES),
)  # fmt: skip
ZERO2 = (
    ("as it is, persistent workers", ("--workers", "persistent")),
    ("as it is, workers forked for each epoch", ("--workers", "default")),
    ("the same, `modicum.torch.protect(engine)`", ("--workers", "default", "--protect")),
    ("Modicum's AdamW, `fp32`", ("--workers", "default", "--protect", "--optimizer",
                                 "modicum:fp32")),
    ("Modicum's AdamW, `bf16-moments`", ("--workers", "default", "--protect", "--optimizer",
                                         "modicum:bf16-moments")),
)  # fmt: skip
HELD = ("master", "gradient", "moments", "staging")  # owners whose bytes a row sums


def make_checkpoints(folder: Path, names: Iterable[str] = ()) -> dict[str, int]:
    """Writes the checkpoints in `names` (none: all) to folders of these names. Returns the number
    of parameters of each."""
    import torch
    import transformers as hub

    text = {
        "hidden_size": 1024,
        "num_hidden_layers": 12,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "intermediate_size": 3072,
        "vocab_size": 20480,
    }
    tower = {
        "depth": 4,
        "hidden_size": 640,
        "intermediate_size": 1728,
        "num_heads": 8,
        "out_hidden_size": text["hidden_size"],
    }
    seeing = text | {"rope_parameters": MROPE | {"mrope_section": [8, 12, 12]}}
    mixture = {"num_hidden_layers": 4, "num_experts": 16, "num_experts_per_tok": 2}
    makers = {
        "causal-lm": lambda: hub.Qwen3ForCausalLM(hub.Qwen3Config(**text)),
        "llama": lambda: hub.LlamaForCausalLM(hub.LlamaConfig(**text)),
        "experts": lambda: hub.Qwen3MoeForCausalLM(
            hub.Qwen3MoeConfig(**text | mixture, moe_intermediate_size=768)
        ),
        "value-head": lambda: hub.Qwen3ForTokenClassification(
            hub.Qwen3Config(**text, num_labels=1)
        ),
        "vision-language": lambda: hub.Qwen2_5_VLForConditionalGeneration(
            hub.Qwen2_5_VLConfig(text_config=seeing, vision_config=tower)
        ),
    }
    sizes = {}
    for name in names or makers:
        torch.manual_seed(0)
        model = makers[name]().to(torch.bfloat16)
        model.save_pretrained(folder / name)
        sizes[name] = sum(p.numel() for p in model.parameters())
    return sizes


def run(words: list[str], python: str = sys.executable) -> tuple[int, str]:
    """Runs a command. Returns the peak in bytes of all its descendants together, without the
    process itself (torchrun), and its output."""
    peak, known = 0, {}
    with tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen(
            [python, *words], cwd=ROOT / "examples", env=os.environ | ENVIRONMENT,
            stdout=log, stderr=subprocess.STDOUT,
        )  # fmt: skip
        try:
            while process.poll() is None:
                for pid in tree_of(process.pid):
                    if pid != process.pid and pid not in known:
                        with contextlib.suppress(FileNotFoundError):
                            known[pid] = Process(pid)
                peak = max(peak, sum(held(one.status()) for one in known.values()))
                time.sleep(SAMPLE_PERIOD_S)
        finally:
            process.kill()
        log.seek(0)
        printed = log.read()
    for one in known.values():
        one.close()
    if process.returncode != 0:
        sys.exit(printed)
    return peak, printed


def promised(printed: str) -> str:
    """The promise that a load prints before it begins: the sum over ranks, in GiB."""
    found = re.search(r"^modicum: .*, at most ([\d.]+) MiB in a rank", printed, re.M)
    if not found:
        sys.exit(f"no load has begun:\n{printed}")
    return f"{RANKS * float(found[1]) / 1024:.2f}"


def row_of(script: tuple[Any, ...], place: Path, sizes: dict[str, int]) -> str:
    system, checkpoint, name, words, switch, same = script
    words = [str(place / checkpoint), *(word.format(place) for word in words)]
    command = [*TORCHRUN, str(RANKS), name, *words]
    cells, compared, of_load = [], [], ""
    for ours in ([], [switch]):
        loaded_bytes, of_load = run([*command, *ours, "--steps", "0"])
        trained_bytes, text = run([*command, *ours])
        cells.append(f"{loaded_bytes / GIB:.2f}, {trained_bytes / GIB:.2f}")
        compared.append(re.findall(same, text))
    if not compared[0] or compared[0] != compared[1]:
        sys.exit(
            f"{name} {words}: the output without Modicum and with it differs:\n"
            f"{compared[0]}\n{compared[1]}"
        )
    shown = [name, *(word for word in words[1:] if word not in ("--record", str(place)))]
    model, promise = f"{4 * sizes[checkpoint] / GIB:.2f}", promised(of_load)
    return f"| {system} | `{' '.join(shown)}` | {model} | {' | '.join(cells)} | {promise} |"


def zero2_row(what: str, words: tuple[str, ...]) -> str:
    _, printed = run(["zero2_offload.py", "--json", *words])
    epochs = [json.loads(line) for line in printed.splitlines() if line.startswith('{"epoch"')]
    owners = [of for of in epochs[-1]["attribution"]["owners"] if of["name"] in HELD]
    held_, copied = (sum(of[f"{kind}_per_param"] for of in owners) for kind in ("held", "copied"))
    return f"| {what} | {held_:.2f} | {copied:.2f} | {epochs[-1]['losses'][-1]:.6f} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.parse_args()
    import accelerate
    import deepspeed
    import torch
    import transformers

    versions = f"torch {torch.__version__}, transformers {transformers.__version__}, "
    versions += f"accelerate {accelerate.__version__}, deepspeed {deepspeed.__version__}"
    with tempfile.TemporaryDirectory() as name:
        place = Path(name)
        sizes = make_checkpoints(place, {script[1] for script in SCRIPTS})
        rows = [row_of(script, place, sizes) for script in SCRIPTS]
    text = [
        f"{RANKS} ranks on one node, fp32 parameters of a bf16 checkpoint. `as it is` and "
        "`with Modicum`: the peak of all ranks together in GiB, of a run without steps and of a "
        "run with 3 steps, interpreters and libraries included. The losses are the same to the "
        "last digit without and with Modicum. With LoRA this holds for the first step only, since "
        "the adapters have other random values. `model`: GiB of its parameters:",
        "",
        "| system | script | model | as it is | with Modicum | promised for its load, GiB |",
        "|---|---|---|---|---|---|",
        *rows,
        "",
        "In twinkle's order the script itself gathers whole tensors after the load, to compute a "
        "digest. The promise does not cover these tensors.",
        "",
        "DeepSpeed's ZeRO-2, optimizer in host memory, two data-loader workers, second epoch, by "
        "`examples/zero2_offload.py`:",
        "",
        "| | held, B/param | copied by workers | last loss |",
        "|---|---|---|---|",
        *(zero2_row(*run_) for run_ in ZERO2),
        "",
        f"`{COMMAND}`: {versions}; {machine()}.",
    ]
    print("\n".join(text))
    write_between_markers(ROOT / "benchmarks/RESULTS.md", "systems", "\n".join(text))


if __name__ == "__main__":
    main()
