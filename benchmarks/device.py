#!/usr/bin/env python3
"""Measures loads onto one GPU, and steps of an optimizer whose state is on the host.

Loads: a synthesised checkpoint (--arch) becomes the parameters of a transformers model
on the GPU. Rivals: transformers' `from_pretrained(device_map="cuda")`, and safetensors' `load_file`
of each file, which makes tensors but no model. Each load runs in a new process; loaders take turns,
--rounds times each, page cache warm. The time runs from before the files are opened until the end
of `torch.cuda.synchronize()`. Before that, CUDA is initialised and the model is built on meta,
which imports its class; for Modicum it is also sharded. `from_pretrained` builds its own model
within the measured time. Memory of the host is the largest sampled growth of anonymous
memory, shared memory and page tables; the page cache is not counted.

Steps: `modicum.torch.AdamW` updates bfloat16 parameters on the GPU (--parameters: their number of
elements). The gradients are on the GPU; the optimizer's state is on the host, in pageable or pinned
memory.

Prints its tables; --write also writes them into benchmarks/RESULTS.md between their markers.
"""

import argparse
import json
import os
import shlex
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from harness.page import GIB, ROOT, machine, write_between_markers

LOADERS = ("modicum", "transformers", "safetensors")
NAMES = {
    "modicum": "`modicum.torch.load`, FSDP2 on one rank",
    "transformers": '`from_pretrained(device_map="cuda")`',
    "safetensors": "`load_file` of each file (tensors, no model)",
}
FORMATS = ("fp32", "fp32-split", "bf16-moments", "int8-moments")
SAMPLE_PERIOD_S = 0.005


class Sampler:
    """Samples this process's anonymous memory, shared memory and page tables in a thread."""

    def __init__(self) -> None:
        self._begin = self._peak = self._held()
        self._ends = threading.Event()
        self._thread = threading.Thread(target=self._sample)
        self._thread.start()

    @staticmethod
    def _held() -> int:
        lines = Path("/proc/self/status").read_text().splitlines()
        names = ("RssAnon:", "RssShmem:", "VmPTE:")
        return sum(int(line.split()[1]) << 10 for line in lines if line.startswith(names))

    def _sample(self) -> None:
        while not self._ends.wait(SAMPLE_PERIOD_S):
            self._peak = max(self._peak, self._held())

    def end(self) -> int:
        """The largest growth since the construction, in bytes."""
        self._ends.set()
        self._thread.join()
        return self._peak - self._begin


# ---- the bodies of the new processes


def load(loader: str, directory: str) -> dict[str, Any]:
    """Loads once. Returns the seconds and bytes; `promised` is 0 for the rivals."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    import modicum.torch

    torch.zeros(1, device="cuda")  # initialises CUDA
    config = AutoConfig.from_pretrained(directory)
    with modicum.torch.empty_parameters():  # imports the model's module
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    if loader == "modicum":
        shard(model)
    torch.cuda.synchronize()
    sampler, begin = Sampler(), time.monotonic()
    kept: Any = None
    promised = 0
    if loader == "modicum":
        report = modicum.torch.load(model, directory, progress=False)
        promised = report.ranks[0]["promised_bytes"] - report.ranks[0]["baseline_bytes"]
        kept = model
    elif loader == "transformers":
        kept = AutoModelForCausalLM.from_pretrained(
            directory, dtype=torch.bfloat16, device_map="cuda"
        )
    else:
        from safetensors.torch import load_file

        files = sorted(Path(directory).glob("*.safetensors"))
        kept = [load_file(file, device="cuda") for file in files]
    torch.cuda.synchronize()
    seconds, held = time.monotonic() - begin, sampler.end()
    device_bytes = torch.cuda.memory_allocated()
    del kept
    return {
        "seconds": seconds,
        "held": held,
        "promised": promised,
        "device_bytes": device_bytes,
    }


def shard(model: Any) -> None:
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    torch.cuda.set_device(0)
    dist.init_process_group("cpu:gloo,cuda:nccl", store=dist.HashStore(), rank=0, world_size=1)
    mesh = init_device_mesh("cuda", (1,))
    for block in model.model.layers:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)


def step(parameters: int) -> dict[str, Any]:
    """Median seconds of a step, by format: with pageable state, then with pinned state."""
    import torch

    from modicum.torch import AdamW, MemoryPolicy

    layers = [
        torch.nn.Parameter(torch.randn(256, 4096, device="cuda", dtype=torch.bfloat16))
        for _ in range(parameters >> 20)  # each has 2^20 elements
    ]
    medians: dict[str, Any] = {}
    for state_format in FORMATS:
        medians[state_format] = []
        for pin in (False, True):
            named = [(f"layer.{n}", layer) for n, layer in enumerate(layers)]
            optimizer = AdamW(named, state_format=state_format, memory=MemoryPolicy(pin=pin))
            seconds = []
            for _ in range(6):
                for layer in layers:
                    layer.grad = torch.randn_like(layer)
                torch.cuda.synchronize()
                begin = time.monotonic()
                optimizer.step()
                torch.cuda.synchronize()
                seconds.append(time.monotonic() - begin)
            medians[state_format].append(statistics.median(seconds[1:]))  # the first is a warm-up
            del optimizer
    return medians


# ---- the measurement


def run(*arguments: str) -> dict[str, Any]:
    """The result of `load` or `step` in a new process."""
    done = subprocess.run(
        [sys.executable, __file__, *arguments], stdout=subprocess.PIPE, text=True, check=True
    )
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    print(*arguments, result, file=sys.stderr, flush=True)
    return result


def loads(directory: str, rounds: int) -> list[str]:
    run("--load", "safetensors", directory)  # warms the page cache; not measured
    results: dict[str, list[dict[str, Any]]] = {name: [] for name in LOADERS}
    for _ in range(rounds):
        for name in LOADERS:
            results[name].append(run("--load", name, directory))
    total = sum(file.stat().st_size for file in Path(directory).glob("*.safetensors"))
    lines = [
        "| loader | seconds, median (range) | GB/s | host memory held, MiB | promised, MiB |",
        "|---|---|---|---|---|",
    ]
    for name, runs in results.items():
        seconds = sorted(run_["seconds"] for run_ in runs)
        median = statistics.median(seconds)
        held = statistics.median(run_["held"] for run_ in runs) / (1 << 20)
        promised = f"{runs[0]['promised'] / (1 << 20):.0f}" if runs[0]["promised"] else "-"
        spread = f"{median:.2f} ({seconds[0]:.2f}-{seconds[-1]:.2f})"
        speed = total / median / 1e9
        lines.append(f"| {NAMES[name]} | {spread} | {speed:.2f} | {held:.0f} | {promised} |")
    return lines


def steps(parameters: int) -> list[str]:
    lines = ["| format | pageable, s | pinned, s |", "|---|---|---|"]
    for state_format, medians in run("--step", str(parameters)).items():
        cells = " | ".join(f"{median:.3f}" for median in medians)
        lines.append(f"| `{state_format}` | {cells} |")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--arch", default="qwen3-8b", help="shapes of the synthesised checkpoint")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--parameters",
        type=int,
        default=512 << 20,
        help="elements to step, a multiple of 2^20",
    )
    parser.add_argument(
        "--modicum", default="modicum", help="the program that synthesises the checkpoint"
    )
    parser.add_argument("--write", action="store_true", help="write into benchmarks/RESULTS.md")
    parser.add_argument("--load", nargs=2, help=argparse.SUPPRESS)
    parser.add_argument("--step", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.load:
        print(json.dumps(load(*options.load)), flush=True)
        os._exit(0)  # threads of Gloo may still run
    if options.step:
        print(json.dumps(step(options.step)), flush=True)
        return
    with tempfile.TemporaryDirectory() as folder:
        directory = f"{folder}/{options.arch}"
        subprocess.run([options.modicum, "synth", "--arch", options.arch, directory], check=True)
        lines_of_loads = loads(directory, options.rounds)
        stored = sum(file.stat().st_size for file in Path(directory).glob("*.safetensors"))
    import torch

    device = torch.cuda.get_device_name()
    command = shlex.join(["python", "benchmarks/device.py", *sys.argv[1:]])
    footer = f"`{command}`: {options.rounds} interleaved rounds, torch {torch.__version__}; "
    footer += f"{device}; {machine()}"
    text = "\n".join([
        f"{options.arch}, {stored / GIB:.2f} GiB stored, warm page cache:", "",
        *lines_of_loads, "",
        f"A step of {options.parameters >> 20} Mi bfloat16 parameters on the GPU, median of 5:", "",
        *steps(options.parameters), "", footer,
    ])  # fmt: skip
    print(text)
    if options.write:
        write_between_markers(ROOT / "benchmarks/RESULTS.md", "device", text)


if __name__ == "__main__":
    main()
