#!/usr/bin/env python3
"""The grid of same_as.py: its cases, and the checkpoints that they read.

A case is a name and a list of commands. In a command `@NAME` is a checkpoint of `make_sources`; the
verbs `flip`, `write`, `cut`, `copy` and `remove` edit a file. Standard library only.
"""

import json
import math
import os
import re
import shutil
import struct
import subprocess
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

FIXTURES = Path(__file__).resolve().parent.parent / "tests/fixtures/formats-0.1/command-line"
TIMEOUT_S = 300

FORMATS = ("fp32", "fp32-split", "bf16-moments", "int8-moments", "int8-moments-24")
STRATEGIES = ("own-shard", "node-reader", "replica-striped", "rank0-broadcast", "full-per-rank")
LAYOUTS = {
    "one-rank": "--ranks 1",
    "fsdp2": "--ranks 2",
    "uneven": "--ranks 3",
    "two-nodes": "--ranks 4 --ranks-per-node 2",
    "dim-1": "--ranks 2 --shard-dim 1",
    "hsdp": "--ranks 4 --layout hsdp --mesh 2x2",
    "tp": "--ranks 4 --layout tp-fsdp --mesh 2x2 --tp-rowwise (o|down)_proj",
    "tp-replicate": "--ranks 2 --layout tp-fsdp --mesh 1x2 --tp-replicate norm",
    "ep": "--ranks 4 --expert-mesh 2x2",
    "zero1": "--ranks 2 --layout zero1",
    "zero2": "--ranks 2 --layout zero2",
    "round-robin": "--ranks 2 --layout zero2 --round-robin",
    "zero3": "--ranks 2 --layout zero3",
    "none": "--ranks 2 --layout none",
}
SOURCES = {
    "moe": "--arch tiny-moe",
    "moe32": "--arch tiny-moe --dtype float32",
    "split": "--arch tiny-moe --shard-size 800",
    "fp8": "--arch tiny-fp8",
}

Case = tuple[str, list[str]]

# ---- the grid


def inspections() -> Iterator[Case]:
    for source in (*SOURCES, "wide", "fp32/step-3", "int8-moments/step-3"):
        yield f"inspect {source}", [f"inspect @{source}"]
        yield f"verify {source}", [f"verify @{source}"]
    for name, flags in LAYOUTS.items():
        for form in (None, *FORMATS):
            state = f" --optimizer adamw:{form}" if form else ""
            yield f"plan {name} {form}", [f"plan @moe {flags}{state}"]
    for words in (
        "@fp8 --ranks 2 --dtype float32",
        "@moe --dtype float32 --keep-fp32 norm --ranks 2 --optimizer adamw:fp32 --frozen embed",
        "@moe --recipe @recipe.json --ranks 3 --optimizer adamw:fp32",
        "@split --ranks 2 --staging 3MiB --baseline 300MiB --destination discard",
        "@moe --ranks 8 --ranks-per-node 4 --layout hsdp --mesh 2x4 --optimizer adamw:bf16-moments",
        "@moe --ranks 4 --optimizer adamw:fp32 --budget 20MB",
        "@moe --ranks 4 --reference --engine-tp 2 --backup --optimizer adamw:fp32",
    ):
        yield f"plan {words}", [f"plan {words}"]


def loads() -> Iterator[Case]:
    for (name, flags), strategy in product(LAYOUTS.items(), STRATEGIES):
        words = f"load @moe {flags} --strategy {strategy} --digest --check values"
        yield f"load {name} {strategy}", [words]
    for words in (
        "@fp8 --ranks 2 --dtype bfloat16 --digest",
        "@fp8 --ranks 2 --digest --strategy node-reader",
        "@moe32 --ranks 2 --dtype bfloat16 --keep-fp32 norm --dump out",
        "@moe --recipe @recipe.json --ranks 3 --dump out",
        "@moe --recipe @recipe.json --ranks 4 --strategy node-reader --digest --ranks-per-node 2",
        "@split --ranks 2 --destination discard --staging 256KiB",
        "@split --ranks 2 --optimizer adamw:int8-moments --threads 2 --digest",
    ):
        yield f"load {words}", [f"load {words}"]


def saves() -> Iterator[Case]:
    for strategy, form in product(STRATEGIES, (None, *FORMATS)):
        state = f" --optimizer adamw:{form} --steps 2 --seed 5" if form else ""
        save = f"save @large root --step 7 --ranks 2 --strategy {strategy}{state}"
        resume = f"resume root --ranks 3 --strategy {strategy}{' --steps 1' if form else ''}"
        yield f"save {strategy} {form}", [save, "verify root", resume]
        if strategy == STRATEGIES[0]:
            refused = [f"{save} --budget 1MiB", save, f"{resume} --budget 1MiB"]
            yield f"budget of save {form}", refused
    for name, flags in LAYOUTS.items():
        save = f"save @moe root --step 1 {flags} --optimizer adamw:fp32 --steps 1"
        yield f"save {name}", [save, f"resume root {flags} --steps 1", "resume root --ranks 2"]
    first, two = "save @moe root --step 1 --ranks 2", "--ranks 2 --optimizer adamw:fp32"
    for words in (
        "@split root --step 1 --ranks 2 --shard-size 600",
        "@split root --step 1 --ranks 2 --dtype float32 --shard-size 2kB --optimizer adamw:fp32",
        "@moe root --step 1 --ranks 2 --recipe @recipe.json --optimizer adamw:int8-moments",
        "@moe root --step 1 --ranks 2 --recipe @unused.json",
        "@moe root --step 1 --ranks 2 --recipe @unused.json --unused drop",
        "@fp8 root --step 1 --ranks 2",
        "@fp8 root --step 1 --ranks 2 --dtype bfloat16 --optimizer adamw:fp32 --frozen norm",
        "@moe root --step 1 --ranks 3 --keep-fp32 norm --optimizer adamw:fp32-split --steps 3",
        "@moe root --step 1 --ranks 2 --threads 2 --grace 30 --staging 300KiB",
    ):
        yield f"save {words}", [f"save {words}", "verify root", "resume root --ranks 2"]
    steps = [f"save @moe root --step {step} {two} --seed {step}" for step in (1, 2, 3)]
    yield "save --keep", [*steps, f"save @moe root --step 4 {two} --keep 2", "verify root"]
    yield "save twice", [first, first]
    yield "save after damage", [first, "flip root/step-1/model.safetensors -1", first]
    yield (
        "save of a step",
        [first, "save root/step-1 other --step 2 --ranks 3", "diff root/step-1 other/step-2"],
    )
    weights, state = "model.safetensors", "optimizer/model.safetensors"
    for where, offset in {weights: -9, state: -9, "manifest.json": -9, "COMMIT": 8}.items():
        damage = f"flip root/step-2/{where} {offset}"
        after = ["resume root --ranks 2", "resume root/step-2 --ranks 2", "verify root"]
        yield f"resume, flipped {where}", [*steps[:2], damage, *after]
        removed = [*steps[:2], f"remove root/step-2/{where}", *after]
        yield f"resume, removed {where}", removed
    yield "resume, all damaged", [steps[0], "cut root/step-1/model.safetensors 99", "resume root"]


def conversions() -> Iterator[Case]:
    for old, new in product(FORMATS, FORMATS):
        save = f"save @large root --step 1 --ranks 2 --optimizer adamw:{old} --steps 2"
        resume = f"resume root --ranks 2 --optimizer adamw:{new} --steps 1"
        if old != new:
            yield f"resume {old} as {new}", [save, resume]
        if FORMATS[0] in (old, new):
            again = f"save root/step-1 new --step 1 --optimizer adamw:{new} --shard-size 4kB"
            yield f"save {old} as {new}", [save, again, "verify new", "resume new"]
    for words in (
        "@moe",
        "@moe32 --dtype bfloat16",
        "@moe32 --dtype float16 --keep-fp32 norm --shard-size 1kB",
        "@fp8 --dtype float32 --shard-size 1MB",
        "@fp8",
        "@moe --recipe @recipe.json --sparse",
        "@split --staging 300KiB --threads 2",
        "@moe --budget 1MiB",
    ):
        source, _, flags = words.partition(" ")
        convert = f"convert {source} out {flags}"
        yield f"convert {words}", [convert, "inspect out", f"diff {source} out", convert]
    others = ("fp32", "fp32-split", "int8-moments")
    yield "diff of steps", [f"diff @fp32/step-3 @{other}/step-3" for other in others]
    for name in (*FORMATS, "weights", "shards", "resharded"):
        yield f"recorded {name}", [f"verify @{name}", f"resume @{name} --ranks 2"]


def rehearsals() -> Iterator[Case]:
    for name, flags in LAYOUTS.items():
        yield f"rehearse {name}", [f"rehearse @moe {flags} --optimizer adamw:fp32 --save root"]
    for strategy, form in product(STRATEGIES, FORMATS):
        flags = f"--strategy {strategy} --optimizer adamw:{form} --resume-ranks 3"
        words = f"rehearse @large --ranks 2 {flags} --steps 2 --save root --seed 3 --clip 0.5"
        yield f"rehearse {strategy} {form}", [words]
    yield (
        "budget of rehearse",
        [
            "rehearse @moe --ranks 2 --optimizer adamw:fp32 --save root --budget 1MiB",
            "rehearse @moe --ranks 2 --optimizer adamw:fp32 --budget 1MiB",
            "rehearse @moe --ranks 2 --optimizer adamw:fp32 --save root --budget 17MB",
        ],
    )
    for form, ranks in product(FORMATS, (1, 2)):
        words = f"step --params 20K --ranks {ranks} --steps 3 --state-format {form} --no-compare"
        yield f"step {form} {ranks}", [words]
    for flags in (
        "--grad-dtype bfloat16 --clip 1",
        "--grad-dtype float16 --loss-scale --state-format int8-moments",
        "--fork-children 2 --ranks 2 --seed 9",
        "--budget 1MiB",
    ):
        yield f"step {flags}", [f"step --params 20K --steps 2 --no-compare {flags}"]


def refusals() -> Iterator[Case]:
    nothing = "--layout none --shard-dim 1; --layout fsdp2 --mesh 1x1; --round-robin; --frozen norm"
    nothing += "; --keep-fp32 nomatch --dtype bfloat16; --experts attn; --tp-rowwise norm"
    nothing += "; --optimizer adamw:fp32 --frozen nomatch; --layout zero1 --expert-mesh 1x1"
    for flags in nothing.split("; "):
        words = [f"{verb} @moe {flags}" for verb in ("plan", "load")]
        yield f"does nothing: {flags}", [*words, f"save @moe root --step 1 {flags}"]
    usage = "plan @moe --ranks 0x10; plan @moe --budget 1XB; lod @moe; load @moe --digset"
    usage += "; plan @moe --optimizer adamw:fp32-spilt; rehearse @moe; resume @moe; verify absent"
    usage += "; rehearse @moe --optimizer adamw:fp32 --resume-ranks 1; step --seed -1; plan ''"
    usage += "; load @moe --optimizer adamw:fp32 --destination discard; load @moe --ranks 4096"
    usage += "; load @moe --expect-digest 0000000000000000; load @moe --expect-digest xx"
    usage += "; plan organisation/no-such-model; synth out --arch gpt-2; save @moe root"
    usage += "; save @moe root --step -1; save @moe absent/root --step 1"
    usage += "; plan @moe --layout hsdp --mesh 3x3 --ranks 4; plan @moe --strategy own; inspect"
    usage += (
        "; load @moe --budget ''; load @moe --layout tp-fsdp --mesh 2x3 --ranks 4; step --isa x"
    )
    usage += "; plan @moe --from absent; load @moe --check all; convert @moe32 out --dtype fp8"
    for words in usage.split("; "):
        yield f"refused: {words}", [words]
    for text in (
        "[]",
        '{"x":',
        '{"x":1}',
        '{"x":{"dtype":"F99","shape":[1],"data_offsets":[0,4]}}',
        '{"x":{"dtype":"F32","shape":[3],"data_offsets":[0,4]}}',
        '{"x":{"dtype":"F32","shape":[1],"data_offsets":[4,0]}}',
        '{"x.weight":{"dtype":"F8_E4M3","shape":[2,2],"data_offsets":[0,4]}}',
    ):
        header = f"header d/model.safetensors '{text}'"
        yield f"header {text}", [header, "plan d", "load d --dtype bf16", "verify d"]
    for name, text in {
        "another tensor": '{"targets":{"new":{"op":"stored","name":"not.there"}}}',
        "another op": '{"targets":{"new":{"op":"invert","in":[]}}}',
        "an empty name": '{"targets":{"":{"op":"stored","name":"lm_head.weight"}}}',
        "an end of the text": '{"targets":',
    }.items():
        words = [f"{verb} --recipe r.json" for verb in ("plan @moe", "load @moe", "convert @moe o")]
        yield f"recipe with {name}", [f"write r.json '{text}'", *words]
    automatic = '{"train_batch_size":"auto","bf16":{"enabled":"auto"}}'
    quantized = '{"model_type":"llama","quantization_config":{"quant_method":"awq"}}'
    for name, words in {
        "config alone": [f"write d/config.json '{quantized}'", "plan d"],
        "quantized": ["copy @moe d", f"write d/config.json '{quantized}'", "load d"],
        "auto": [f"write ds.json '{automatic}'", "plan @moe --deepspeed ds.json"],
        "broken config": ["copy @fp8 d", "write d/config.json {", "load d --dtype fp32"],
        "config, codes": ["copy @fp8 d", "write d/config.json {", "load d --digest"],
        "pickles": ["write d/pytorch_model.bin x", "load d", "inspect d", "verify d"],
        "missing shard": ["copy @split d", "remove d/model-00001-of-00003.safetensors", "load d"],
        "index": ["copy @split d", "write d/model.safetensors.index.json {", "load d", "verify d"],
        "existing": ["write taken/x x", "load @moe --dump taken", "synth taken --arch tiny-moe"],
        "short": [
            "copy @moe d",
            "cut d/model.safetensors 5000",
            "load d",
            "convert d o",
            "diff d d",
        ],
        "overflow": ["convert @huge out --dtype float16", "convert @huge out2 --dtype bfloat16"],
        "overflow allowed": ["convert @huge out --dtype float16 --allow-overflow"],
        "tie": ["load @tied --digest", "load @tied --untie --digest", "load @untied --digest"],
        "untied": ["load @untied --untie --digest", "save @untied root --step 1", "inspect @tied"],
    }.items():
        yield f"refused: {name}", words


def commits() -> Iterator[Case]:
    """Each first command runs under strace."""
    for ranks in (1, 2):
        state = f"--ranks {ranks} --optimizer adamw:fp32"
        yield f"system calls of save {ranks}", [f"save @moe root --step 1 {state}"]
    yield "system calls of convert", ["convert @moe out --shard-size 1kB"]
    again = "save @fp32/step-3 root --step 3 --optimizer adamw:fp32"
    yield "system calls of a save of a step", [again]


def grid() -> list[Case]:
    parts = (inspections, loads, saves, conversions, rehearsals, refusals, commits)
    cases = [case for part in parts for case in part()]
    assert len({name for name, _ in cases}) == len(cases)
    return cases


# ---- sources


def stored(folder: Path, shapes: dict[str, list[int]], factor: float, config: object) -> None:
    """A checkpoint of float32 values, in one file."""
    folder.mkdir()
    header, data = {}, b""
    for name, shape in shapes.items():
        numel = math.prod(shape)
        values = [((7 * i + len(shapes)) % 17 - 8) * factor / 8 for i in range(numel)]
        places = [len(data), len(data) + 4 * numel]
        header[name] = {"dtype": "F32", "shape": shape, "data_offsets": places}
        data += struct.pack(f"<{numel}f", *values)
    text = json.dumps(header).encode()
    (folder / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + data)
    (folder / "config.json").write_text(json.dumps(config))


def recipe_of(names: list[str]) -> dict[str, Any]:
    """Experts are stacked, the embedding is cut in two; all else is as stored."""
    targets: dict[str, Any] = {}
    for name in names:
        node = {"op": "stored", "name": name}
        merged = re.sub(r"experts\.\d+\.", "experts.", name)
        if merged != name:
            targets.setdefault(merged, {"op": "stack", "dim": 0, "in": []})["in"].append(node)
        elif "embed" in name:
            for part, (start, stop) in {"low": (0, 5), "high": (5, 13)}.items():
                cut = {"op": "slice", "dim": 0, "start": start, "stop": stop, "in": [node]}
                targets[f"{part}.{name}"] = cut
        else:
            targets[name] = node
    return {"targets": targets}


def make_sources(program: Path, folder: Path) -> None:
    for name, flags in SOURCES.items():
        synth = [program, "synth", folder / name, *flags.split(), "-q"]
        subprocess.run(synth, check=True, timeout=TIMEOUT_S)
    for fixture in FIXTURES.iterdir():
        shutil.copytree(fixture, folder / fixture.name)
    shapes = {"up.weight": [64, 96], "down.weight": [40, 128], "norm.weight": [10]}
    stored(folder / "large", shapes, 1, {"model_type": "llama"})
    stored(folder / "huge", shapes, 1e30, {"model_type": "llama"})
    names = ("model.embed_tokens.weight", "lm_head.weight")
    tied = {"model_type": "llama", "tie_word_embeddings": True}
    stored(folder / "tied", {name: [17, 4] for name in names}, 1, tied)
    stored(folder / "untied", {name: [17, 4] for name in names}, 1, tied)
    with (folder / "untied/model.safetensors").open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"\x41")
    listed = subprocess.run(
        [program, "inspect", folder / "moe", "--json"], check=True, capture_output=True
    )
    tensors = [tensor["name"] for tensor in json.loads(listed.stdout)["tensors"]]
    (folder / "recipe.json").write_text(json.dumps(recipe_of(tensors)))
    unused = {"targets": recipe_of(tensors[2:])["targets"], "unused": tensors[:2]}
    (folder / "unused.json").write_text(json.dumps(unused))
