"""A forked rank: waits for the measuring process, loads a model, writes to its shards, and compares
them with the expected ones."""

import gc
import importlib
import json
import os
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rivals.model import touch
from rivals.rows import Case
from rivals.truth import differences, make_truth
from transformers import AutoConfig, AutoModelForCausalLM


def preload(directory: str) -> None:
    """Imports the modules that this model needs, by building it on meta."""
    with torch.device("meta"):
        AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(directory))


class Gate:
    """A rank's connection to the measuring process."""

    def __init__(self, path: str) -> None:
        connection = socket.socket(socket.AF_UNIX)
        connection.connect(path)
        self._stream = connection.makefile("rw")

    def say(self, event: str, **facts: object) -> None:
        self._stream.write(json.dumps({"event": event, "pid": os.getpid(), **facts}) + "\n")
        self._stream.flush()

    def wait(self) -> None:
        if not self._stream.readline():
            raise EOFError("the measuring process has ended")


def rank(rank: int, job: dict[str, Any]) -> None:
    """The body of a rank; the zygote calls this function in the forked process."""
    report(run, rank, job)


def report(
    run: Callable[[int, dict[str, Any], Gate], None], rank: int, job: dict[str, Any]
) -> None:
    """Runs a job in the cgroup that it names, if any, and reports a failure through the gate."""
    if job["procs"]:
        Path(job["procs"]).write_text(str(os.getpid()))
    gate = Gate(job["gate"])
    gate.say("hello")
    try:
        run(rank, job, gate)
    except BaseException as error:  # DCP's error is a BaseException
        gate.say("failed", error=message_of(error), at=time.monotonic())
        raise


def message_of(error: BaseException) -> str:
    """The message of an error; if it contains tracebacks of other ranks, its last line."""
    words = str(error).strip()
    return words.splitlines()[-1] if "Traceback" in words else f"{type(error).__name__}: {words}"


def now() -> tuple[float, float]:
    """(seconds of a clock that all ranks share, CPU seconds of this rank's threads)."""
    return time.monotonic(), time.process_time()


def run(rank: int, job: dict[str, Any], gate: Gate) -> None:
    case = Case(**job["case"])
    truth = Path(job["truth"])
    if job["function"] == "truth":
        for event in ("ready", "loaded"):
            gate.say(event)
            gate.wait()
        make_truth(case, truth)
        gate.say("checked")
        return
    module, _, function = job["function"].partition(":")
    load = getattr(importlib.import_module(f"rivals.{module}"), function)
    # A garbage collection writes to pages that the ranks share since the fork. Collecting now
    # copies these pages before the measurement begins.
    gc.unfreeze()
    gc.collect()
    dist.init_process_group("gloo")
    gate.say("ready")
    gate.wait()
    dist.barrier()
    times = {"begin": now()}

    def built() -> None:
        times["built"] = now()
        gate.say("built")
        gate.wait()
        dist.barrier()
        times["begin_load"] = now()

    model = load(case, built, **job["options"])
    times["loaded"] = now()
    with torch.no_grad():
        touch(model)
    times["written"] = now()
    gate.say("loaded", times=times)
    gate.wait()
    gate.say("checked", wrong=differences(model, rank, truth) if job["compared"] else [])
