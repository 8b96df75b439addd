#!/usr/bin/env python3
"""Records loads in benchmarks/pictures.json, and draws the pictures in docs:

load-light.svg, load-dark.svg: the memory of a node over the time of an accelerate script's load, as
it is and with Modicum, and bars of `modicum plan`.
strategies-light.svg, strategies-dark.svg: bars of five `modicum load`, one for each strategy.
watch.png: the page of `modicum watch --compare --report` of an accelerate script (FSDP2 with bf16
mixed precision, 4 ranks), without and with Modicum.

picture.py [load] [strategies] [watch] [--modicum PROGRAM]: records and draws all by default.
PROGRAM is by default build/release/modicum. `picture.py --draw` draws the recorded ones again and
runs nothing. A load needs less than 8 GiB of memory and the right to make a memory cgroup.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from harness.drawings import Data, gib, load_picture, strategies_picture
from harness.page import ROOT, machine, write_between_markers
from harness.svg import DARK, LIGHT

RECORDED = ROOT / "benchmarks/pictures.json"
READMES = (ROOT / "README.md", ROOT / "README.zh.md")
SCRIPT = "accelerate_fsdp2.py"
BUDGET, RANKS = "4GiB", 4
SYNTH = ("--arch", "qwen3-0.6b", "--layers", "6")
PLANNED = ("full-per-rank", "rank0-broadcast", "own-shard")
LAYOUT = ("--ranks", "4", "--ranks-per-node", "2", "--layout", "hsdp", "--mesh", "2x2")
DRAWN = {"load": load_picture, "strategies": strategies_picture}


def answer(program: Path, *words: Any) -> Data:
    """The JSON document that a verb prints."""
    command = [str(word) for word in (program, *words, "--json")]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE)
    return json.loads(done.stdout)


def watched(program: Path, words: list[str], *flags: str) -> Data:
    """The document of the script under `modicum watch`."""
    from systems import ENVIRONMENT, TORCHRUN

    command = [sys.executable, *TORCHRUN, str(RANKS), SCRIPT, *words]
    done = subprocess.run(
        [program, "watch", "--json", *flags, "--", *command], stdout=subprocess.PIPE,
        cwd=ROOT / "examples", env=os.environ | ENVIRONMENT,
    )  # fmt: skip
    document = json.loads(done.stdout)
    if document["exit_code"] != 0 and document["killed"] is None:
        sys.exit(f"{SCRIPT} {' '.join(words)}: exit code {document['exit_code']}")
    return document


def line_of(document: Data) -> Data:
    """The memory of all ranks at each sample of the load, from the begin of the script's phase
    `prepare` until the first rank has ended it."""
    timeline = document["timeline"]
    phases = [phase for phase in timeline["phases"] if phase["name"] == "prepare"]
    begin = min(phase["begin_s"] for phase in phases)
    end = min(phase["end_s"] for phase in phases)
    ranks = [track for track in timeline["tracks"] if track["rank"] is not None]
    owners = [values for track in ranks for values in track["owners"].values()]
    samples = [
        (round(at_s - begin, 2), sum(values[i] or 0 for values in owners))
        for i, at_s in enumerate(timeline["t_s"])
        if begin <= at_s <= end
    ]
    return dict(zip(("t_s", "bytes"), map(list, zip(*samples, strict=True)), strict=True))


def predicted(document: Data) -> int:
    """What all ranks together have predicted for their load."""
    tracks = document["timeline"]["tracks"]
    return sum(max(filter(None, track["promise_bytes"] or ()), default=0) for track in tracks)


def record_load(program: Path, place: Path) -> Data:
    """The script's load without a limit, killed at a limit, and with Modicum within that limit."""
    model = place / "model"
    parameters = answer(program, "synth", model, *SYNTH)["data_bytes"] // 2  # of bf16
    words = [str(model), "--steps", "0"]
    before = line_of(watched(program, words))
    killed = watched(program, words, "--limit", BUDGET)["killed"]
    after = watched(program, [*words, "--modicum", "--budget", BUDGET], "--limit", BUDGET)
    if killed is None or after["killed"] is not None:
        sys.exit(f"expected a kill of {SCRIPT} as it is only, at {BUDGET}")
    return {
        "command": f"modicum watch --json -- torchrun --standalone --nproc-per-node {RANKS} "
                   f"{SCRIPT} DIR --steps 0 [--modicum --budget {BUDGET}]",
        "checkpoint": f"modicum synth DIR {' '.join(SYNTH)}",
        "words": f"measured: {RANKS} ranks (Python and torch: {gib(before['bytes'][0])}), "
                 "Qwen3-0.6B cut to 6 of 28 layers, fp32, FSDP2 by accelerate",
        "ranks": RANKS,
        "model_bytes": 4 * parameters,
        "budget_bytes": after["timeline"]["budget_bytes"],
        "predicted_bytes": predicted(after),
        "as_it_is": before,
        "with_modicum": line_of(after),
        "killed": {key: killed[key] for key in ("name", "rank", "signal", "phase", "limit_bytes")},
    }  # fmt: skip


def record_plan(program: Path, place: Path) -> Data:
    """The peak of the fullest node by strategy."""
    arch, ranks = "qwen3-30b-a3b", 8
    answer(program, "synth", place / arch, "--arch", arch, "--sparse")
    plan = answer(program, "plan", place / arch, "--ranks", ranks, "--compare")
    peaks = {
        row["name"]: max(node["peak_bytes"] for node in row["nodes"]) for row in plan["strategies"]
    }
    return {
        "command": f"modicum plan DIR --ranks {ranks} --compare",
        "checkpoint": f"modicum synth DIR --arch {arch} --sparse",
        "model": "Qwen3-30B-A3B",
        "ranks": ranks,
        "peaks": {name: peaks[name] for name in PLANNED},
    }


def record_strategies(program: Path, place: Path) -> Data:
    """A load by each strategy: the measured memory of all ranks, and what they read and send."""
    sys.path.append(str(ROOT / "tests/support"))
    from program import STRATEGIES

    model = place / "qwen3-0.6b"
    answer(program, "synth", model, "--arch", "qwen3-0.6b")
    strategies = {}
    for name in STRATEGIES:
        words = (*LAYOUT, "--strategy", name, "--budget", "none")
        report = answer(program, "load", model, *words)
        strategies[name] = {
            "predicted_bytes": sum(rank["promised_bytes"] for rank in report["ranks"]),
            "measured_bytes": sum(rank["kernel_peak_bytes"] for rank in report["ranks"]),
            "shards_bytes": report["bytes_loaded"],
            "read_bytes": report["storage_read_bytes"],
            "sent_bytes": report["exchanged_bytes"],
        }
    return {
        "command": f"modicum load DIR {' '.join(LAYOUT)} --strategy NAME --budget none --json",
        "checkpoint": "modicum synth DIR --arch qwen3-0.6b",
        "words": "measured: Qwen3-0.6B in bf16 into HSDP, two nodes of two ranks",
        "strategies": strategies,
    }


def record(program: Path, names: list[str]) -> None:
    """Replaces the runs of these pictures in benchmarks/pictures.json."""
    recorders = {"load": (record_load, record_plan), "strategies": (record_strategies,)}
    data = json.loads(RECORDED.read_text()) if RECORDED.is_file() else {}
    for name in names:
        for recorder in recorders[name]:
            with tempfile.TemporaryDirectory() as place:
                about = {"versions": versions(program), "machine": machine(),
                         "date": time.strftime("%Y-%m-%d", time.gmtime())}  # fmt: skip
                data[recorder.__name__.removeprefix("record_")] = about | recorder(
                    program, Path(place)
                )
    text = json.dumps(data, indent=1)
    text = re.sub(r"\[[^][{}]*\]", lambda numbers: " ".join(numbers[0].split()), text)
    RECORDED.write_text(text + "\n")


def versions(program: Path) -> str:
    from importlib.metadata import version

    done = subprocess.run([program, "--version"], check=True, capture_output=True, text=True)
    packages = ", ".join(
        f"{name} {version(name)}" for name in ("torch", "transformers", "accelerate")
    )
    return f"{done.stdout.strip()}, {packages}"


def element(name: str, folder: str, alt: str) -> str:
    """The HTML of a picture, in the reader's scheme. `folder`: the path of docs, with a slash."""
    return (
        f'<picture>\n<source media="(prefers-color-scheme: dark)" '
        f'srcset="{folder}{name}-dark.svg">\n<img src="{folder}{name}-light.svg" alt="{alt}">\n'
        "</picture>"
    )


def strategies_block(data: Data) -> str:
    """The bars of strategies as RESULTS.md shows them, with their command."""
    recorded = data["strategies"]
    peaks = [
        f"{name} {gib(figures['measured_bytes'])}"
        for name, figures in recorded["strategies"].items()
    ]
    alt = f"Peak memory of a load's ranks by strategy: {', '.join(peaks)}."
    return "\n".join([
        element("strategies", "../docs/", alt),
        "",
        f"`python benchmarks/picture.py strategies`: `{recorded['command']}`. {about(recorded)}",
    ])  # fmt: skip


def about(recorded: Data) -> str:
    return f"{recorded['date']}; {recorded['versions']}; {recorded['machine']}."


def load_block(data: Data) -> str:
    """The picture of a load as READMEs show it."""
    load, plan = data["load"], data["plan"]
    peaks = [gib(max(load[run]["bytes"])) for run in ("as_it_is", "with_modicum")]
    alt = (
        f"Host memory while {load['ranks']} ranks load a model: as it is {peaks[0]}, above the "
        f"budget of {gib(load['budget_bytes'])} and killed there; with one line of Modicum "
        f"{peaks[1]}. Below, {plan['model']} on {plan['ranks']} ranks, predicted: "
        f"{', '.join(gib(peak) for peak in plan['peaks'].values())}."
    )
    return element("load", "docs/", alt)


def draw(data: Data) -> dict[Path, str]:
    """The drawn pictures by path."""
    return {
        ROOT / f"docs/{name}-{scheme.name}.svg": drawn(data, scheme)
        for name, drawn in DRAWN.items()
        for scheme in (LIGHT, DARK)
    }


def blocks(data: Data) -> dict[Path, str]:
    """The text between the markers `picture` of each page."""
    load = load_block(data)
    return dict.fromkeys(READMES, load) | {ROOT / "benchmarks/RESULTS.md": strategies_block(data)}


def take_watch(program: Path) -> None:
    """The picture of the page that compares the script without and with Modicum."""
    from harness.picture import take_picture
    from systems import make_checkpoints

    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        make_checkpoints(place, ["causal-lm"])
        runs, modicum = [], ["--modicum", "--budget", BUDGET]
        for label, words in (("unchanged", []), ("with-Modicum", modicum)):
            runs.append(place / f"{label}.json")
            document = watched(program, [str(place / "causal-lm"), *words])
            document["command"] = [word.removeprefix(f"{place}/") for word in document["command"]]
            runs[-1].write_text(json.dumps(document))
        page = place / "watch.html"
        subprocess.run([program, "watch", "--compare", *runs, "--report", page], check=True)
        take_picture(page, ROOT / "docs/watch.png")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("pictures", nargs="*", help="load, strategies or watch; all by default")
    parser.add_argument("--draw", action="store_true", help="draw the recorded ones, run nothing")
    parser.add_argument("--modicum", type=Path, default=ROOT / "build/release/modicum")
    options = parser.parse_args()
    names = options.pictures or [*DRAWN, "watch"]
    if unknown := set(names) - {*DRAWN, "watch"}:
        parser.error(f"expected load, strategies or watch, got {' '.join(sorted(unknown))}")
    program = options.modicum.resolve()
    if not options.draw:
        if drawn := [name for name in names if name in DRAWN]:
            record(program, drawn)
        if "watch" in names:
            take_watch(program)
    data = json.loads(RECORDED.read_text())
    for path, svg in draw(data).items():
        path.write_text(svg)
        print(path)
    for page, text in blocks(data).items():
        write_between_markers(page, "picture", text)


if __name__ == "__main__":
    main()
