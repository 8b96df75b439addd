#!/usr/bin/env python3
"""Measures `modicum plan ORG/NAME` of a model that is only on the hub.

Workload: deepseek-v3 in its true shapes, in as many files as on the Hub, from a double of the hub
over TLS on this machine. The double waits ROUND_TRIP_S before each answer, and twice that for each
connection. It runs in a process of its own, on the same CPUs as the command. Rival: `modicum plan`
of the same files on the local disk.

Writes its table into benchmarks/RESULTS.md between its markers.
"""

import multiprocessing
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from harness.page import ROOT, machine, write_between_markers

sys.path.append(str(ROOT / "tests/support"))
from hub_double import NAME, HubDouble, certificate, serving

COMMAND = "python benchmarks/hub.py"
ARCH, SHARD_SIZE, FILES = "deepseek-v3", "4.25GB", 163
ROUND_TRIP_S, ROUNDS = 0.02, 5
FLAGS = ("--ranks", "8", "--budget", "1TiB")


def serve(folder: Path, pem: Path, ends: Any) -> None:
    """The body of the double's process: sends its endpoint, then serves until it is asked to
    end."""
    with serving(HubDouble(folder, round_trip_s=ROUND_TRIP_S), pem) as double:
        ends.send(double.endpoint)
        ends.recv()


def seconds(words: list[str], environment: dict[str, str]) -> tuple[float, str]:
    """The duration of `modicum plan`, and its line about the hub on stderr."""
    command = [sys.executable, "-m", "modicum.cli", "plan", *words, *FLAGS]
    begin_s = time.perf_counter()
    done = subprocess.run(command, env=environment, check=True, capture_output=True, text=True)
    return time.perf_counter() - begin_s, done.stderr.partition("\n")[0]


def measure(folder: Path, endpoint: str, pem: Path) -> tuple[dict[str, list[float]], str]:
    environment = os.environ | {"HF_ENDPOINT": endpoint, "SSL_CERT_FILE": str(pem)}
    environment |= {"HF_HOME": str(folder.parent / "home"), "no_proxy": "*"}
    environment.pop("HF_HUB_CACHE", None)
    places = {"from the hub": NAME, "of local files": str(folder)}
    rounds: dict[str, list[float]] = {place: [] for place in (*places, "requests alone")}
    summary = ""
    for _ in range(ROUNDS):
        for place, word in places.items():
            took_s, line = seconds([word], environment)
            rounds[place].append(took_s)
            if line.endswith(" s"):
                summary, _, of_requests_s = line.removesuffix(" s").rpartition(" in ")
                rounds["requests alone"].append(float(of_requests_s))
    return rounds, summary


def table(rounds: dict[str, list[float]], summary: str, load: float) -> str:
    lines = ["| plan | median, s | range |", "|---|---|---|"]
    for place, took_s in rounds.items():
        span = f"{min(took_s):.1f} to {max(took_s):.1f}"
        lines.append(f"| {place} | {statistics.median(took_s):.1f} | {span} |")
    summary = summary.removeprefix("modicum: ").partition(", from ")[0]
    footer = f"`{COMMAND}`: {ARCH}, {summary}; round trip {ROUND_TRIP_S * 1000:.0f} ms; "
    footer += f"{ROUNDS} rounds, interleaved, {time.strftime('%Y-%m-%d')}; "
    footer += f"load average before it {load:.1f}; {machine()}."
    return "\n".join([*lines, "", footer])


def main() -> None:
    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary, "model")
        synth = [sys.executable, "-m", "modicum.cli", "synth", str(folder), "--arch", ARCH]
        subprocess.run([*synth, "--shard-size", SHARD_SIZE, "--sparse", "-q"], check=True)
        files = len([*folder.glob("*.safetensors")])
        assert files == FILES, f"{files} files"
        pem = certificate(Path(temporary))
        ours, ends = multiprocessing.Pipe()
        server = multiprocessing.Process(target=serve, args=(folder, pem, ends))
        server.start()
        try:
            rounds, summary = measure(folder, ours.recv(), pem)
        finally:
            ours.send(None)
            server.join()
    write_between_markers(ROOT / "benchmarks/RESULTS.md", "hub", table(rounds, summary, load))


if __name__ == "__main__":
    main()
