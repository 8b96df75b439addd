#!/usr/bin/env python3
"""Measures the communication of load, save and resume in worlds of up to 4,096 ranks.

Communication: four real ranks load, save and resume a model with the tensors of a 70B model (80
layers, but narrow), and every collective call is recorded with its values. Then worlds of several
sizes repeat the calls. A few processes simulate each world: they run a thread for each rank, with
the code of modicum.torch.ranks and one real TCPStore. Calls and bytes are exact except for the
number of polls; seconds are those of all ranks on this machine's CPUs. If all ranks of a process
receive the same text, it is decoded only once: decoding it for each rank would take time that grows
with the square of the world size. The threads that watch for failed ranks are left out; how many
calls they make does not depend on the world size.

Plan: one rank's plan of a save of deepseek-v3 in its true size, from sparse files.

Writes its tables into benchmarks/RESULTS.md between its markers.
"""

import argparse
import json
import multiprocessing
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from functools import lru_cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from harness.page import ROOT, machine, write_between_markers

MODICUM = ROOT / "build/release/modicum"
COMMAND = "python benchmarks/scale.py"
RECORDED = 4  # ranks
LAYERS = 80
PHASES = ("load", "save", "resume")
WORLDS = (4, 64, 1024, 4096)
PROCESSES = 4
CONNECTIONS = 8  # connections of each process to the store
PATIENCE = timedelta(seconds=300)
PLANNED_RANKS = 64
MIB = 1 << 20

Meeting = tuple[str, Any, Any]
"""A call of Ranks, this rank's value, and the value that rank 0 makes; JSON values."""


# ---- recording


def record(rank: int, port: int, folder: str, lines: Any) -> None:
    """The body of a real rank: records its meetings and sends them by phase."""
    import torch
    import torch.distributed as dist
    import transformers
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    import modicum.torch

    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, RECORDED, rank == 0, PATIENCE)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=RECORDED)
    meetings: list[Meeting] = []
    watch_meetings(meetings)
    config = transformers.AutoConfig.from_pretrained(folder)

    def built() -> tuple[Any, Any]:
        with modicum.torch.empty_parameters():
            model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        mesh = init_device_mesh("cpu", (RECORDED,))
        for layer in model.model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        return model, modicum.torch.AdamW(model.named_parameters())

    found: dict[str, list[Meeting]] = {}
    model, optimizer = built()
    modicum.torch.load(model, folder, optimizer=optimizer, progress=False)
    found["load"] = [*meetings]
    meetings.clear()
    root = str(Path(folder).parent / "steps")
    modicum.torch.save(model, root, step=1, optimizer=optimizer)
    found["save"] = [*meetings]
    meetings.clear()
    model, optimizer = built()
    modicum.torch.resume(model, root, optimizer=optimizer, progress=False)
    found["resume"] = [*meetings]
    lines.put((rank, found))
    dist.barrier()


def watch_meetings(meetings: list[Meeting]) -> None:
    """Adds the outermost calls of Ranks to `meetings` from now on."""
    from modicum.torch.ranks.group import Ranks
    from modicum.torch.ranks.liveness import Process

    depth = threading.local()

    def noted(name: str, note: Callable[..., Meeting]) -> None:
        call = getattr(Ranks, name)

        def wrapper(self: Any, *given: Any, **named: Any) -> Any:
            depth.now = getattr(depth, "now", 0) + 1
            try:
                result = call(self, *given, **named)
            finally:
                depth.now -= 1
            if depth.now == 0:
                meetings.append(note(result, *given, **named))
            return result

        setattr(Ranks, name, wrapper)

    meet, part = Ranks._meet, Ranks._part

    def met(self: Any, store: Any) -> None:
        meet(self, store)
        me = Process.this()
        hello = [me.boot, me.host, me.pid_space, me.pid, me.started]
        meetings.append(("meet", hello, None))

    def parted(self: Any) -> None:
        meetings.append(("part", None, None))
        part(self)

    Ranks._meet, Ranks._part = met, parted  # type: ignore[method-assign]
    noted("gather", lambda result, value: ("gather", value, None))
    noted("barrier", lambda result: ("barrier", None, None))
    noted("agree", lambda result, digest, facts=(): ("agree", digest, None))
    # agree_on compares a digest of `facts`; any text of its length repeats the call.
    noted("agree_on", lambda result, facts: ("agree", "0" * 32, None))
    noted("once", lambda result, make, local: ("once", result[1], result[0]))


# ---- repeating


def counted_store(client: Any, prefix: str) -> Any:
    """A LoadStore that counts its calls and makes them in the caller's thread, instead of a thread
    of its own."""
    import torch.distributed as dist

    from modicum.torch.ranks.store import LoadStore

    class Counted(LoadStore):
        def __init__(self) -> None:
            self._lost, self._put_here = None, []
            self._store = dist.PrefixStore(prefix, client)
            self.calls = self.bytes = 0

        def _ask(self, function: Callable[..., Any], *arguments: Any, slices: int = 0) -> Any:
            result = function(*arguments)
            self.calls += 1
            self.bytes += sum(map(size_of, (*arguments, result)))
            return result

        def end(self) -> None:
            pass

    return Counted()


def size_of(value: Any) -> int:
    """The bytes of a value that passes through the store; keys and counters are not counted."""
    if isinstance(value, list):
        return sum(len(of) for of in value if isinstance(of, bytes))
    return len(value) if isinstance(value, bytes) else 0


def repeat(rank: int, world: int, meetings: Sequence[Meeting], client: Any) -> tuple[int, int]:
    """Repeats the calls of one simulated rank; returns their number and their bytes."""
    from modicum.torch.ranks.group import Ranks

    calls = size = contexts = 0
    ranks: Any = None
    for kind, value, made in meetings:
        if kind == "meet":
            contexts += 1
            ranks = Ranks(rank, world)
            ranks._store = counted_store(client, f"{world}/{contexts}")
            ranks._pids = [0] * world
            ranks.gather(value)
        elif kind == "gather":
            ranks.gather(value)
        elif kind == "barrier":
            ranks.barrier()
        elif kind == "agree":
            ranks.agree(value)
        elif kind == "once":
            ranks.once(lambda made=made: made, lambda value=value: value[rank % RECORDED])
        else:
            ranks._store.forget(f"beat/{rank}")
            ranks._part()
            calls, size = calls + ranks._store.calls, size + ranks._store.bytes
    return calls, size


def simulate(first: int, world: int, port: int, traces: Any, lines: Any) -> None:
    """The body of a process that simulates every PROCESSES-th rank, from `first` on."""
    import torch.distributed as dist

    from modicum.torch.ranks import group, store

    # The cached values are shared by all ranks of the process, which only read them.
    store._text_of = lru_cache(store._text_of)
    group.json = SimpleNamespace(dumps=json.dumps, loads=lru_cache(json.loads))
    threading.stack_size(256 << 10)
    # Each of a thousand threads that waits for the GIL wakes up once per interval.
    sys.setswitchinterval(1.0)
    clients = [dist.TCPStore("127.0.0.1", port, None, False, PATIENCE) for _ in range(CONNECTIONS)]
    ranks = range(first, world, PROCESSES)
    lines.put("ready")
    with ThreadPoolExecutor(max(1, len(ranks))) as threads:
        jobs = [
            threads.submit(
                repeat,
                rank,
                world,
                # Rank 0 repeats rank 0; the others repeat the other recorded ranks in turn.
                traces[0 if rank == 0 else 1 + (rank - 1) % (RECORDED - 1)],
                clients[rank // PROCESSES % CONNECTIONS],
            )
            for rank in ranks
        ]
        lines.put(dict(zip(ranks, (job.result() for job in jobs), strict=True)))


def host(port: Any) -> None:
    """The body of the process that hosts the store."""
    import torch.distributed as dist

    store = dist.TCPStore("127.0.0.1", 0, None, True, PATIENCE, wait_for_workers=False)
    port.put(store.port)
    time.sleep(1e6)


def measure(world: int, traces: Any, context: Any) -> dict[str, float]:
    """Measures one phase in one world, with a new store."""
    ports, lines = context.Queue(), context.Queue()
    server = context.Process(target=host, args=(ports,), daemon=True)
    server.start()
    port = ports.get()
    some = [
        context.Process(target=simulate, args=(first, world, port, traces, lines), daemon=True)
        for first in range(min(PROCESSES, world))
    ]
    for process in some:
        process.start()
    for _ in some:
        assert lines.get() == "ready"
    begin = time.monotonic()
    counts: dict[int, tuple[int, int]] = {}
    for _ in some:
        counts |= lines.get()
    seconds = time.monotonic() - begin
    server.kill()
    others = [calls for rank, (calls, _bytes) in counts.items() if rank > 0]
    return {
        "rank": statistics.median(others),
        "leader": counts[0][0],
        "bytes": sum(size for _, size in counts.values()),
        "seconds": seconds,
    }


# ---- the plan of a save


def planned(folder: Path) -> dict[str, float]:
    """Seconds of one rank's plan of a save, from a checkpoint of the true size in sparse files."""
    from modicum import _modicum
    from modicum.torch.shards.placements import Cut, Sharding, layout_of

    words = ["--arch", "deepseek-v3", "--sparse", "-q"]
    subprocess.run([MODICUM, "synth", folder, *words], check=True)
    checkpoint = _modicum.open_checkpoint(folder)
    recipe = _modicum.make_recipe(checkpoint, dtype="bfloat16")
    own = Sharding((PLANNED_RANKS,), (Cut((0,), 0, 1, True),))
    whole = Sharding((PLANNED_RANKS,), ())
    shardings = [own if target["shape"] else whole for target in recipe.targets]
    begin = time.monotonic()
    layout = layout_of(recipe, shardings, PLANNED_RANKS)
    loaded = _modicum.make_plan(
        recipe, layout, ranks_per_node=8, destinations=["given"] * len(recipe.targets)
    )
    save = _modicum.SaveParts(_modicum.TensorsToSave(_modicum.make_save_plan(loaded)))
    return {
        "seconds": time.monotonic() - begin,
        "bytes": checkpoint.bytes,
        "tensors": len(checkpoint.stored),
        "held": sum(save.held().values()),
    }


# ---- the page


def recorded(context: Any, folder: Path) -> dict[str, list[list[Meeting]]]:
    """The recorded meetings, by phase and rank."""
    import torch
    import transformers

    model = folder / "model"
    config = transformers.LlamaConfig(
        hidden_size=64, intermediate_size=128, num_hidden_layers=LAYERS, num_attention_heads=4,
        num_key_value_heads=2, vocab_size=256,
    )  # fmt: skip
    transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(
        model
    )
    from harness.runs import free_port

    lines, port = context.Queue(), free_port()
    some = [
        context.Process(target=record, args=(rank, port, str(model), lines), daemon=True)
        for rank in range(RECORDED)
    ]
    for process in some:
        process.start()
    found = dict(lines.get(timeout=PATIENCE.seconds) for _ in some)
    for process in some:
        process.join()
    return {phase: [found[rank][phase] for rank in range(RECORDED)] for phase in PHASES}


def row_of(world: int, of: dict[str, dict[str, float]]) -> str:
    cells = [f"{world:,}"]
    for phase in PHASES:
        one = of[phase]
        cells += [f"{one['rank']:.0f}, {one['leader']:.0f}", f"{one['bytes'] / MIB:.1f}"]
        cells.append(f"{one['seconds']:.1f}")
    return "| " + " | ".join(cells) + " |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("--worlds", type=int, nargs="+", default=WORLDS)
    options = parser.parse_args()
    context = multiprocessing.get_context("spawn")
    rows = []
    with tempfile.TemporaryDirectory(dir=ROOT / "build") as place:
        folder = Path(place)
        traces = recorded(context, folder)
        kinds = {phase: Counter(kind for kind, _, _ in traces[phase][0]) for phase in PHASES}
        print({phase: dict(of) for phase, of in kinds.items()}, file=sys.stderr)
        for world in options.worlds:
            of = {phase: measure(world, traces[phase], context) for phase in PHASES}
            print(world, json.dumps(of), file=sys.stderr, flush=True)
            rows.append(row_of(world, of))
        plan = planned(folder / "deepseek-v3")
    columns = [f"{phase}: {of}" for phase in PHASES for of in ("calls", "MiB", "s")]
    text = [
        f"The protocol of a model of {LAYERS} layers, simulated by {PROCESSES} processes against "
        "one TCPStore; `calls`: calls of the store, as the median of the ranks above 0, and of "
        "rank 0; `MiB`: of all values put and taken; `s`: seconds until the last rank has "
        "finished:",
        "",
        f"| ranks | {' | '.join(columns)} |",
        "|---" * (len(columns) + 1) + "|",
        *rows,
        "",
        f"The plan of a save of deepseek-v3, {plan['bytes'] / 1e9:.0f} GB in {plan['tensors']:,} "
        f"tensors on {PLANNED_RANKS} ranks: {plan['seconds']:.2f} s on one rank, "
        f"{plan['held'] / MIB:.0f} MiB held.",
        "",
        f"`{COMMAND}`: {machine()}.",
    ]
    print("\n".join(text))
    write_between_markers(ROOT / "benchmarks/RESULTS.md", "scale", "\n".join(text))


if __name__ == "__main__":
    main()
