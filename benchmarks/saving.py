#!/usr/bin/env python3
"""Measures memory, bytes written and seconds of each way to save, for the same model and state.

Workload: a synthesised qwen3-0.6b of 6 layers as float32 masters in 4 gloo ranks under FSDP2,
without and with the state of AdamW after one step. Every way is timed until its files are durable:
if a way does not sync them itself, each file and directory is synced after its call has returned.
Ways take turns, in a new order each round; figures are medians, seconds with their range. Files
that `from_pretrained` can read are compared with the ranks' shards, bit by bit. `blocked` is the
time until the call returns; a save in the background returns before its files are written.
`save_state` and `Trainer` are scripts of accelerate and transformers; `with the line` they run
within `modicum.torch.accelerate.loading`. At the end Modicum saves in a memory cgroup. The limit of
this cgroup is the sum of the bytes that the ranks hold before the save, the bytes that the save
promises to add, and 5 % of the whole promise.

Writes its table into benchmarks/RESULTS.md between its markers.
"""

import argparse
import dataclasses
import random
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from harness.page import GIB, ROOT, machine, write_between_markers
from harness.runs import RunFailedError, Zygote, measure
from rivals.rows import ALLOCATORS, Case

MODICUM = ROOT / "build/release/modicum"
COMMAND = "python benchmarks/saving.py"
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
PATIENCE_S = 300
CAGE_MARGIN = 0.05
WARMED = ("modicum", "dcp-hf+consolidate", "modicum, with state", "dcp, with state")
LAYERS = 6  # few, since some rivals hold the gathered state more than once on rank 0
NAMES = (
    "modicum", "dcp-hf+consolidate", "dcp-hf, shards only", "torchtitan's last_save_in_hf",
    "full state dict",
    "modicum, with state", "dcp, with state", "full state dict, with state",
    "modicum, background, with state", "dcp, async, with state",
    "accelerate, SHARDED, with state", "accelerate, FULL, with state",
    "torch_checkpointing, with state",
    "save_state, with state", "save_state with the line, with state",
    "Trainer, with state", "Trainer with the line, with state",
)  # fmt: skip
# The kind of files, unless they are safetensors files in Hugging Face's layout.
OTHER_FILES = {
    "dcp-hf, shards only": "a file per rank",
    "dcp, with state": "DCP's own",
    "dcp, async, with state": "DCP's own",
    "accelerate, SHARDED, with state": "DCP's own",
    "accelerate, FULL, with state": "pickles",
    "torch_checkpointing, with state": "its own",
    "save_state, with state": "pickles",
    "Trainer, with state": "pickles",
}


def one_run(
    zygote: Zygote, case: Case, name: str, scratch: Path, more_bytes: int | None = None
) -> dict[str, Any]:
    """Runs one save. With `more_bytes` the ranks save in a memory cgroup, whose limit is the bytes
    that they hold before the save plus `more_bytes`."""
    job = {
        "case": dataclasses.asdict(case),
        "function": name,
        "environment": {},
        "builds_first": False,
        "world": case.world,
        "out": str(scratch / "out"),
        "log": str(scratch / "log"),
    }
    (scratch / "out").mkdir()
    subprocess.run(["sync"], check=True)
    try:
        done = measure(zygote, job, scratch, lambda: None, PATIENCE_S, more_bytes=more_bytes)
    except RunFailedError as error:
        sys.exit(f"{name}: {error}\n{(scratch / 'log').read_text()[-2000:]}")
    wrong = [text for rank in done["checked"] for text in rank["wrong"]]
    if wrong:
        sys.exit(f"{name}: {len(wrong)} parameters differ, {wrong[0]} first")
    seen, loaded = done["seen"], done["loaded"]
    return {
        # What Modicum promises for one rank, less the memory that the rank holds before the save.
        "added": max(rank.get("promised", 0) for rank in loaded)
        - max(rank.get("before", 0) for rank in loaded),
        "promised": max(rank.get("promised", 0) for rank in loaded) * case.world,
        "tensors_read": max(rank.get("tensors_read", 0) for rank in loaded),
        # float32 parameters, and with the state two float32 moments each.
        "data": loaded[0]["elements"] * (12 if name.endswith("with state") else 4),
        "seconds": max(rank["seconds"] for rank in done["loaded"]),
        "blocked": max(rank.get("blocked", rank["seconds"]) for rank in done["loaded"]),
        "written": sum(rank["written"] for rank in done["loaded"]),
        "size": done["checked"][0]["size"],
        "extra": seen["peak_sampled_bytes"],
        "read": seen["rchar"],
        "foreign": seen["foreign_cpu_s"] / seen["watched_s"],
    }


def row_of(name: str, runs: list[dict[str, Any]]) -> str:
    def median(key: str) -> float:
        return statistics.median(run[key] for run in runs)

    seconds, size = sorted(run["seconds"] for run in runs), median("size")
    time = f"{median('seconds'):.2f} ({seconds[0]:.2f}-{seconds[-1]:.2f})"
    written, held = (f"{median(key) / GIB:.2f}" for key in ("written", "extra"))
    kind = OTHER_FILES.get(name, "Hugging Face")
    blocked = f"{median('blocked'):.2f}"
    return f"| {name} | {kind} | {size / GIB:.2f} | {written} | {held} | {time} | {blocked} |"


def in_a_cage(zygote: Zygote, case: Case, run: dict[str, Any], scratch: Path) -> str:
    """The sentence about a save in a memory cgroup with a limit. `run`: the figures of the same
    save without a limit."""
    more = run["added"] * case.world + int(CAGE_MARGIN * run["promised"])
    caged = one_run(zygote, case, "modicum, with state", scratch, more)
    return (
        f"In a memory cgroup the save succeeds in {caged['seconds']:.2f} s. The limit of this "
        f"cgroup is {more / GIB:.2f} GiB above the memory that the ranks hold before the save: "
        f"what the save promises to add to them, and {CAGE_MARGIN:.0%} of the whole promise of "
        f"{run['promised'] / GIB:.2f} GiB."
    )


def judged(runs: dict[str, list[dict[str, Any]]]) -> str:
    """The sentence with Modicum's speed relative to DCP, and the bytes that it writes and reads."""

    def seconds(name: str) -> float:
        return statistics.median(run["seconds"] for run in runs[name])

    own = [*runs["modicum"], *runs["modicum, with state"]]
    files = seconds("dcp-hf+consolidate") / seconds("modicum")
    plain = seconds("dcp, with state") / seconds("modicum, with state")
    written = max(run["written"] / run["data"] for run in own)
    read = max(run["tensors_read"] for run in own)
    return (
        f"Modicum is {files:.2f} times as fast as DCP's writer with consolidation and {plain:.2f} "
        f"times as fast as plain DCP with the state; it writes {written:.4f} x the bytes of model "
        f"and state, and reads {read} bytes of tensors."
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--layers", type=int, default=LAYERS, help="with another number the page is not written"
    )
    options = parser.parse_args()
    import torch

    runs: dict[str, list[dict[str, Any]]] = {name: [] for name in NAMES}
    with tempfile.TemporaryDirectory(dir=ROOT / "build") as place:
        scratch = Path(place)
        model = scratch / "qwen3-0.6b"
        words = ["--arch", "qwen3-0.6b", "--layers", str(options.layers)]
        words += ["--shard-size", "300MB", "-q"]
        subprocess.run([MODICUM, "synth", model, *words], check=True)
        case = Case("saving", "", "qwen3-0.6b", options.layers, "float32", directory=str(model))
        zygote = Zygote("rivals.saving", str(model), ENVIRONMENT | ALLOCATORS["malloc"])
        try:
            order = random.Random(0)
            for number in range(options.rounds + 1):  # round 0 is a warm-up, of WARMED only
                for name in order.sample(NAMES, len(NAMES)):
                    if number == 0 and name not in WARMED:
                        continue
                    done = one_run(zygote, case, name, scratch)
                    print(number, name, done, file=sys.stderr, flush=True)
                    if number > 0:
                        runs[name].append(done)
            caged = in_a_cage(zygote, case, runs["modicum, with state"][-1], scratch)
        finally:
            zygote.end()
    foreign = [run["foreign"] for runs_of_way in runs.values() for run in runs_of_way]
    text = [
        f"qwen3-0.6b of {options.layers} layers, float32 masters, {case.world} ranks on one node, "
        "FSDP2; to durable files:",
        "",
        "| saver | files | on disk, GiB | written, GiB | held beyond model and state, GiB "
        "| seconds, median (range) | blocked, s |",
        "|---|---|---|---|---|---|---|",
        *(row_of(name, runs_of_way) for name, runs_of_way in runs.items()),
        "",
        judged(runs) + " " + caged,
        "",
        f"`{COMMAND}`: {options.rounds} interleaved rounds; other load at most "
        f"{max(foreign):.1f} CPUs; torch {torch.__version__}; {machine()}.",
    ]
    print("\n".join(text))
    if options.layers == LAYERS:
        write_between_markers(ROOT / "benchmarks/RESULTS.md", "saving", "\n".join(text))


if __name__ == "__main__":
    main()
