#!/usr/bin/env python3
"""The part of same_as.py that calls modicum.torch: a tiny llama is loaded, trained, saved and
resumed by one rank and by two.

    same_as_torch.py FOLDER             makes FOLDER, with record.json and the saved checkpoints
    same_as_torch.py FOLDER RANK WORLD  is a rank of it

Each call is first refused by a budget of 1 MiB: the error has the promised bytes by purpose. The
record omits measured memory (`process`), memory that depends on addresses (`snapshot`), promises
that include them, and the calls of the store of a rank that fails.
"""

import hashlib
import json
import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

TIMEOUT_S = 900
STATES = ("fp32", "fp32-split", "bf16-moments", "int8-moments", "int8-moments-24", "AdamW", "SGD")
STRATEGIES = ("own-shard", "node-reader", "replica-striped", "rank0-broadcast", "full-per-rank")
WORLDS = (2, 1)
MEASURED = ("process", "snapshot", "promised_bytes", "peak_bytes", "held_bytes", "budget")
STORE = ("set", "get", "add", "compare_set", "delete_key", "multi_get", "multi_set")


def checkpoint(folder: Path) -> None:
    """A llama of two layers, whose matrices have 6144 elements."""
    import torch
    import transformers

    config = transformers.LlamaConfig(
        hidden_size=48, intermediate_size=128, num_hidden_layers=2, vocab_size=128,
        num_attention_heads=4, num_key_value_heads=4, tie_word_embeddings=False,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config).to(torch.bfloat16)
    with torch.no_grad():
        for number, value in enumerate(model.parameters()):
            value.copy_(pattern(value, number))
    model.save_pretrained(folder, max_shard_size="100KB")


def pattern(value: Any, number: int) -> Any:
    """Values that are exact in bfloat16."""
    import torch

    return ((torch.arange(value.numel()) * 37 + number * 11) % 17 - 8).div(64).reshape(value.shape)


def made(folder: Path, kind: str | None, dtype: Any = None) -> tuple[Any, Any]:
    """A model on meta, sharded over the ranks, and an optimizer of it."""
    import torch
    import torch.distributed as dist
    import transformers
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    import modicum.torch

    config = transformers.AutoConfig.from_pretrained(folder / "model")
    with modicum.torch.empty_parameters():
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype or torch.float32)
    if dist.get_world_size() > 1:
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        for unit in (*model.model.layers, model):
            fully_shard(unit, mesh=mesh)
    if kind in STATES[:5]:
        return model, modicum.torch.AdamW(model.parameters(), lr=1e-2, state_format=kind)
    if kind == "AdamW":
        return model, torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False)
    return model, torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.5) if kind else None


def train(model: Any, optimizer: Any) -> None:
    import torch
    from torch.distributed.tensor import DTensor

    for number, parameter in enumerate(model.parameters()):
        whole = pattern(parameter, number + 5).to(parameter.dtype)
        if isinstance(parameter, DTensor):
            size, rank = parameter.device_mesh.size(), parameter.device_mesh.get_local_rank()
            part = [*whole.chunk(size), *[whole[:0]] * size][rank].contiguous()
            whole = DTensor.from_local(
                part, parameter.device_mesh, parameter.placements, run_check=False,
                shape=parameter.shape, stride=parameter.stride(),
            )  # fmt: skip
        parameter.grad = whole
    optimizer.step()
    optimizer.zero_grad()
    assert torch.isfinite(next(model.parameters()).sum())


def digest(model: Any, optimizer: Any) -> str:
    """Of this rank's shards of model and state."""
    import torch
    from torch.distributed.tensor import DTensor

    tensors = dict(model.state_dict())
    if optimizer is not None:
        for number, state in optimizer.state_dict()["state"].items():
            tensors |= {f"{number} {key}": value for key, value in state.items()}
    hashed = hashlib.sha256()
    for name in sorted(tensors):
        value = tensors[name]
        value = value.to_local() if isinstance(value, DTensor) else torch.as_tensor(value)
        hashed.update(f"{name} {value.dtype} {list(value.shape)}".encode())
        hashed.update(bytes(value.contiguous().reshape(-1).view(torch.uint8).numpy()))
    return hashed.hexdigest()[:16]


def facts_of(error: Exception) -> dict[str, Any]:
    text = re.sub(r" ?\(rank \d+\)", "", str(error))
    facts = vars(error) | {"error": type(error).__name__, "message": text}
    for fact in ("rank", "culprit_rank", "culprit_pid"):  # the first of several with the same error
        facts.pop(fact, None)
    if "owners" in facts:  # the rest has the memory of the process
        owners = {
            of["purpose"]: of["bytes"] for of in facts["owners"] if of["purpose"] not in MEASURED
        }
        facts = {"error": facts["error"], "category": facts["category"], "owners": owners}
    return facts


class Cases:
    """Cases of one rank; `records` has a list of a case's calls, by the name of the case."""

    def __init__(self, folder: Path, world: int) -> None:
        self.folder, self.world = folder, world
        self.records: dict[str, list[Any]] = {}
        self.stores = Counter[str]()

    def call(self, case: str, act: Callable[..., Any], *values: Any, **named: Any) -> Any:
        """Notes the facts of a call: its report, or its error; and its calls of the store."""
        self.stores.clear()
        record: dict[str, Any] = {"call": act.__name__}
        result = None
        try:
            result = act(*values, **named)
            record |= {"report": told(result), "store": dict(self.stores)}
        except Exception as error:
            record["report"] = facts_of(error)
        self.records.setdefault(f"torch {self.world} {case}", []).append(record)
        return result

    def bounded(self, case: str, act: Callable[..., Any], *values: Any, **named: Any) -> Any:
        """Calls it with a budget that refuses it, and then without one."""
        import modicum.torch

        policy = dict(named.pop("memory", {}))
        given = {"memory": modicum.torch.MemoryPolicy(**policy)} if policy else {}
        self.call(case, act, *values, **named, **given, budget="1MiB")
        ledger = modicum.Ledger()
        memory = modicum.torch.MemoryPolicy(**policy, ledger=ledger)
        result = self.call(case, act, *values, **named, memory=memory)
        if act is not modicum.torch.async_save:  # whose peak is after the call
            self.records[f"torch {self.world} {case}"][-1]["peak"] = dict(ledger.at_peak)
        return result


def told(report: Any) -> Any:
    """The members of a report, and of the reports in it, without the measured ones."""
    if isinstance(report, list):
        return [told(one) for one in report]
    if isinstance(report, str | int | float | bool | None):
        return report
    if not isinstance(report, dict):
        report = getattr(report, "document", None) or getattr(report, "__dict__", {})
    kept = {key: told(one) for key, one in report.items() if key not in MEASURED}
    return {key: one for key, one in kept.items() if not key.startswith("_")}


def saves(cases: Cases, kind: str | None, **how: Any) -> None:
    """Loads, trains, saves and resumes."""
    import modicum.torch

    root = cases.folder / f"root-{cases.world}-{kind}-{'-'.join(how)}"
    case = f"save {kind} {' '.join(how)}"
    model, optimizer = made(cases.folder, kind)
    later = {"optimizer": optimizer} if kind in STATES[:5] else {}
    model_of = {"progress": False, **later}
    cases.bounded(case, modicum.torch.load, model, str(cases.folder / "model"), **model_of)
    if optimizer is not None:
        train(model, optimizer)
    named = {"step": 3, "optimizer": optimizer, "extra": {"epoch": 1}, **how}
    is_async = named.pop("background", False)
    options = {name: named.pop(name) for name in ("replicas", "shard_size") if name in named}
    if options:
        named["options"] = modicum.torch.SaveOptions(**options)
    save = modicum.torch.async_save if is_async else modicum.torch.save
    report = cases.bounded(case, save, model, str(root), **named)
    if is_async:
        cases.call(case, report.result)
    model, optimizer = made(cases.folder, kind)
    resumed = {"optimizer": optimizer, "progress": False}
    cases.bounded(case, modicum.torch.resume, model, str(root), **resumed)
    cases.call(case, digest, model, optimizer)


def others(cases: Cases) -> None:
    """Loads by each strategy, resumes in another world or with another state, and refusals."""
    import torch

    import modicum.torch

    source = str(cases.folder / "model")
    for strategy in STRATEGIES if cases.world > 1 else STRATEGIES[:2]:
        model, _ = made(cases.folder, None, torch.bfloat16)
        named = {"memory": {"strategy": strategy}, "progress": False, "check": True}
        cases.bounded(f"load {strategy}", modicum.torch.load, model, source, **named)
        cases.call(f"load {strategy}", digest, model, None)
    for old, new in (("fp32", "int8-moments"), ("int8-moments", "fp32"), ("AdamW", "fp32")):
        model, optimizer = made(cases.folder, new)
        root = str(cases.folder / f"root-{cases.world}-{old}-")
        case = f"resume {old} as {new}"
        named = {"optimizer": optimizer, "progress": False}
        cases.bounded(case, modicum.torch.resume, model, root, **named)
    if cases.world == 1:
        for kind in ("fp32", "int8-moments", "AdamW"):
            model, optimizer = made(cases.folder, kind)
            root, case = str(cases.folder / f"root-2-{kind}-"), f"resume {kind} of 2 ranks"
            named = {"optimizer": optimizer, "progress": False}
            cases.bounded(case, modicum.torch.resume, model, root, **named)
            cases.call(case, digest, model, optimizer)
    model, _ = made(cases.folder, None)
    cases.call("refused: missing", modicum.torch.load, model.model, source)
    cases.call("refused: uncommitted", modicum.torch.resume, model, source)
    cases.call("refused: no values", modicum.torch.save, model, source + "-root", step=1)


def rank(folder: Path, number: int, world: int) -> None:
    import torch.distributed as dist

    cases = Cases(folder, world)
    for name in STORE:
        original = getattr(dist.Store, name)

        def counted(*words: Any, _name: str = name, _original: Any = original, **more: Any) -> Any:
            cases.stores[_name] += words[2:] != (0,)  # without the polls of a counter
            return _original(*words, **more)

        setattr(dist.Store, name, counted)
    where = f"file://{folder}/store-{world}"
    dist.init_process_group("gloo", init_method=where, rank=number, world_size=world)
    for kind in (*STATES, None):
        saves(cases, kind)
    saves(cases, "fp32", background=True)
    saves(cases, "AdamW", replicas="first", shard_size="50KB")
    others(cases)
    dist.destroy_process_group()
    (folder / f"record-{world}-{number}.json").write_text(json.dumps(cases.records, default=str))


def main() -> None:
    folder = Path(sys.argv[1])
    if len(sys.argv) > 2:
        return rank(folder, int(sys.argv[2]), int(sys.argv[3]))
    folder.mkdir()
    checkpoint(folder / "model")
    record: dict[str, list[Any]] = {}
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    for world in WORLDS:
        command = [sys.executable, __file__, str(folder)]
        ranks = [
            subprocess.Popen(
                [*command, str(number), str(world)], env=environment, stdout=sys.stderr
            )
            for number in range(world)
        ]
        ended = [process.wait(TIMEOUT_S) for process in ranks]
        if any(ended):
            sys.exit(f"a rank of {world} has failed")
        for number in range(world):
            calls = json.loads((folder / f"record-{world}-{number}.json").read_text())
            for case, told in calls.items():
                record[f"{case}, rank {number}"] = told
    (folder / "record.json").write_text(json.dumps(record))


if __name__ == "__main__":
    main()
