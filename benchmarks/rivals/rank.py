"""What a forked rank does: wait, load, write, be compared."""

import gc
import importlib
import json
import os
import socket
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rivals.model import touch
from rivals.rows import Case
from rivals.truth import differences, make_truth
from transformers import AutoConfig, AutoModelForCausalLM


def preload(directory: str) -> None:
    """Imports what building this model imports."""
    with torch.device("meta"):
        AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(directory))


class Gate:
    """The way out of a rank to who watches it."""

    def __init__(self, path: str) -> None:
        connection = socket.socket(socket.AF_UNIX)
        connection.connect(path)
        self._stream = connection.makefile("rw")

    def say(self, event: str, **facts: object) -> None:
        self._stream.write(json.dumps({"event": event, "pid": os.getpid(), **facts}) + "\n")
        self._stream.flush()

    def wait(self) -> None:
        if not self._stream.readline():
            raise EOFError("nobody is watching any more")


def rank(rank: int, job: dict[str, Any]) -> None:
    """Entered from the zygote, in the forked process."""
    if job["procs"]:
        Path(job["procs"]).write_text(str(os.getpid()))
    gate = Gate(job["gate"])
    gate.say("hello")
    try:
        run(rank, job, gate)
    except BaseException as error:  # DCP's is no Exception
        gate.say("failed", error=told(error), at=time.monotonic())
        raise


def told(error: BaseException) -> str:
    """An error in its own words; of one that holds tracebacks of other ranks, their last line."""
    words = str(error).strip()
    return words.splitlines()[-1] if "Traceback" in words else f"{type(error).__name__}: {words}"


def now() -> tuple[float, float]:
    """Seconds of one clock for all ranks, and of CPU time of this one, all its threads together."""
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
    # Writes to what is shared with the other ranks, which is theirs alone from then on.
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
    gate.say("checked", wrong=differences(model, rank, truth))
