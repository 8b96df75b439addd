#!/usr/bin/env python3
"""What do the systems that users run hold, as they are and with Modicum's line in the same script?

Workload: the scripts of examples/ with the real packages, both ways: accelerate's FSDP2 with bf16
mixed precision, an engine in AReaL's order and a strategy in twinkle's, each with fp32 parameters
in 4 gloo ranks over the same made-up checkpoint; and DeepSpeed's ZeRO-2 with its optimizer in host
memory and two data-loader workers, in one process. A node's peak is the largest sum over all
processes of anonymous and shared memory and page tables, sampled: until the first step (a run
without steps), and training included. Of DeepSpeed, bytes per parameter by their holder, from the
kernel's page tables.

Both ways must print the same losses. Writes its table into README.md between its markers.
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
from pathlib import Path

from harness.page import GIB, ROOT, machine, write_between_markers
from harness.watch import Process, held

sys.path.append(str(ROOT / "tests"))
from program import tree_of

EVERY_S = 0.02
RANKS = 4
COMMAND = "python benchmarks/systems.py"
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    # Freed gathers go back to the kernel: what stays in glibc hides what is held.
    "MALLOC_MMAP_THRESHOLD_": str(1 << 18),
}
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node")
# System, the example's words, what switches Modicum on, and the lines that must be the same.
SCRIPTS = (
    ("accelerate (FSDP2), bf16 mixed precision", ("accelerate_fsdp2.py", "{}"),
     "--modicum", r"step \d+: .*"),
    ("engine in AReaL's order", ("engine_memory_efficient_load.py", "{}", "--dtype", "float32"),
     "--memory-efficient-load", r"step \d+: .*"),
    ("twinkle's order, native FSDP2", ("strategies.py", "{}", "native", "--record", "{}"),
     "--memory-efficient-init", r"(?:parameters|losses) .*"),
)  # fmt: skip
ZERO2 = (
    ("as it is, workers forked for each epoch", ("--workers", "default")),
    ("the same, `modicum.torch.protect(engine)`", ("--workers", "default", "--protect")),
    ("Modicum's AdamW, `fp32`", ("--workers", "default", "--protect", "--optimizer",
                                 "modicum:fp32")),
    ("Modicum's AdamW, `bf16-moments`", ("--workers", "default", "--protect", "--optimizer",
                                         "modicum:bf16-moments")),
)  # fmt: skip
HELD = ("master", "gradient", "moments", "staging")


def make_checkpoint(directory: Path) -> int:
    """Returns its parameters."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    config = Qwen3Config(
        hidden_size=1024,
        num_hidden_layers=12,
        num_attention_heads=16,
        num_key_value_heads=8,
        head_dim=64,
        intermediate_size=3072,
        vocab_size=20480,
    )
    model = Qwen3ForCausalLM(config).to(torch.bfloat16)
    model.save_pretrained(directory)
    return sum(p.numel() for p in model.parameters())


def run(words: list[str]) -> tuple[int, str]:
    """A command's peak over all its processes, in bytes, and what it has printed."""
    peak, known = 0, {}
    with tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen(
            [sys.executable, *words], cwd=ROOT / "examples", env=os.environ | ENVIRONMENT,
            stdout=log, stderr=subprocess.STDOUT,
        )  # fmt: skip
        try:
            while process.poll() is None:
                for pid in tree_of(process.pid):
                    if pid not in known:
                        with contextlib.suppress(FileNotFoundError):
                            known[pid] = Process(pid)
                peak = max(peak, sum(held(one.status()) for one in known.values()))
                time.sleep(EVERY_S)
        finally:
            process.kill()
        log.seek(0)
        printed = log.read()
    for one in known.values():
        one.close()
    if process.returncode != 0:
        sys.exit(printed)
    return peak, printed


def promised(said: str) -> str:
    """What a load says before it begins that the ranks hold at most, together, in GiB."""
    found = re.search(r"^modicum: .*, at most ([\d.]+) MiB in a rank", said, re.M)
    if not found:
        sys.exit(f"no load has begun:\n{said}")
    return f"{RANKS * float(found[1]) / 1024:.2f}"


def row_of(system: str, example: tuple[str, ...], switch: str, same: str, place: Path) -> str:
    name, *words = (word.format(place) for word in example)
    command = [*TORCHRUN, str(RANKS), name, *words]
    cells, printed, said = [], [], ""
    for ours in ([], [switch]):
        loaded_bytes, said = run([*command, *ours, "--steps", "0"])
        trained_bytes, text = run([*command, *ours])
        cells.append(f"{loaded_bytes / GIB:.2f}, {trained_bytes / GIB:.2f}")
        printed.append(re.findall(same, text))
    cells.append(promised(said))
    if not printed[0] or printed[0] != printed[1]:
        sys.exit(f"{name}: not the same:\n{printed[0]}\n{printed[1]}")
    return f"| {system} | `{name}` | {' | '.join(cells)} |"


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
    with tempfile.TemporaryDirectory() as place:
        parameters = make_checkpoint(Path(place))
        rows = [row_of(*script, Path(place)) for script in SCRIPTS]
    text = [
        f"{parameters / 1e6:.0f} M parameters, {4 * parameters / GIB:.2f} GiB in fp32; {RANKS} "
        "ranks on one node, whose peak in GiB is given until the first step and with 3 steps, the "
        "processes themselves included; the same losses to the last digit both ways:",
        "",
        "| system | script | as it is | with Modicum | promised of its load |",
        "|---|---|---|---|---|",
        *rows,
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
    write_between_markers(ROOT / "README.md", "systems", "\n".join(text))


if __name__ == "__main__":
    main()
