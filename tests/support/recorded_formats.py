"""What fixtures/record_formats.py and the tests of the recorded formats share: the models, and for
each kind of fixture a function that reads it as a program would and returns facts to compare."""

import hashlib
import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from program import run, run_json
from torch import nn

FOLDER = Path(__file__).parents[1] / "fixtures/formats-0.1"
SHAPES = {"embed.weight": (12, 8), "up.weight": (10, 8), "norm.weight": (10,)}
WIDE = {"wide.weight": (32, 128), "norm.weight": (10,)}  # 4096 elements: moments of 8 bits
RATES = (1e-2, 3e-3)  # of matrices and of vectors

Facts = dict[str, Any]


class Small(nn.Module):
    """A model of SHAPES, and a buffer of integers."""

    def __init__(self, dtype: torch.dtype = torch.bfloat16) -> None:
        super().__init__()
        self.embed = nn.Embedding(12, 8, dtype=dtype)
        self.up = nn.Linear(8, 10, bias=False, dtype=dtype)
        self.norm = nn.Module()
        self.norm.weight = nn.Parameter(torch.zeros(10, dtype=dtype))
        self.register_buffer("counts", torch.zeros(5, dtype=torch.int64))


class Tied(Small):
    """The head is the embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(8, 12, bias=False, dtype=torch.bfloat16)
        self.head.weight = self.embed.weight


def values(name: str, shape: Any, step: int = 0) -> torch.Tensor:
    """Float32 values that are exact in bfloat16: initial ones, or the gradient of a step."""
    count = torch.Size(shape).numel()
    start = len(name) * 31 + step * 11
    return ((torch.arange(count) * 37 + start) % 17 - 8).div(8).reshape(shape)


def groups_of(model: nn.Module) -> list[dict[str, Any]]:
    named = [(name, of) for name, of in model.named_parameters() if of.requires_grad]
    matrices = [of for of in named if of[1].dim() > 1]
    vectors = [of for of in named if of[1].dim() == 1]
    return [
        {"params": of, "lr": rate}
        for of, rate in zip((matrices, vectors), RATES, strict=True)
        if of
    ]


def optimizer_of(kind: str, model: nn.Module) -> torch.optim.Optimizer:
    """`kind`: "modicum:FORMAT", "AdamW" or "SGD"."""
    import modicum.torch

    if kind.startswith("modicum:"):
        form = kind.partition(":")[2]
        return modicum.torch.AdamW(groups_of(model), weight_decay=0.1, state_format=form)
    groups = [group | {"params": [of for _, of in group["params"]]} for group in groups_of(model)]
    if kind == "SGD":
        return torch.optim.SGD(groups, momentum=0.5)
    return torch.optim.AdamW(groups, weight_decay=0.1, foreach=False)


# ---- readings


def bits(tensor: Any) -> str:
    """A digest of dtype, shape and elements."""
    whole = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    data = whole.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    told = f"{whole.dtype} {[*whole.shape]}".encode() + data.numpy().tobytes()
    return hashlib.sha256(told).hexdigest()[:16]


def contents(model: nn.Module, optimizer: Any = None) -> Facts:
    """Digests of a model, and of the tensors, numbers and options of its optimizer."""
    facts: Facts = {"model": {name: bits(of) for name, of in model.state_dict().items()}}
    if optimizer is not None:
        state = optimizer.state_dict()
        facts["state"] = {
            f"{at}.{key}": bits(value) if isinstance(value, torch.Tensor) else value
            for at, entry in state["state"].items()
            for key, value in entry.items()
        }
        options = ("lr", "betas", "weight_decay", "momentum")
        facts["groups"] = [
            {key: group[key] for key in options if key in group} for group in state["param_groups"]
        ]
    return json.loads(json.dumps(facts))


def verified(program: Path, path: Path) -> int:
    """The number of tensors that `verify` checks."""
    checked: int = run_json(program, "verify", path)["tensors_checked"]
    return checked


def converted(program: Path, path: Path, scratch: Path) -> str:
    """The digest of what `convert` makes of a checkpoint, after a `diff` of the two."""
    out = scratch / "converted"
    run_json(program, "convert", path, out)
    run_json(program, "diff", path, out)
    digest: str = run_json(program, "load", out, "--digest")["digest"]
    shutil.rmtree(out)
    return digest


def read_checkpoint(program: Path, path: Path, scratch: Path) -> Facts:
    """A checkpoint without COMMIT."""
    return {
        "tensors": verified(program, path),
        "digest": run_json(program, "load", path, "--digest", "--ranks", 2)["digest"],
        "converted": converted(program, path, scratch),
    }


def read_step(program: Path, path: Path, scratch: Path, *, trains: bool = False) -> Facts:
    """A checkpoint, or the newest of a root. `trains`: it has the state of AdamW, with which it
    also makes a step."""
    none = () if trains else ("--optimizer", "none")
    resumed = run_json(program, "resume", path, "--ranks", 1, *none)
    step = Path(resumed["resumed"]["path"])
    facts = {
        "tensors": verified(program, path),
        "step": resumed["resumed"]["step"],
        "digest": resumed["digest"],
        "converted": converted(program, step, scratch),
    }
    if trains:
        facts["state_digest"] = resumed["state_digest"]
        then = run_json(program, "resume", path, "--ranks", 2, "--steps", 1)
        facts["then"] = [then["digest"], then["state_digest"]]
        out = scratch / "again"
        saved = json.loads((step / "optimizer/state.json").read_text())["state_format"]
        words = ("--step", 1, "--shard-size", 300, "--optimizer", f"adamw:{saved}")
        run_json(program, "save", step, out, *words)
        again = run_json(program, "resume", out)
        facts["again"] = [again["digest"], again["state_digest"]]
        shutil.rmtree(out)
    return facts


def read_trained(program: Path, path: Path, scratch: Path) -> Facts:
    return read_step(program, path, scratch, trains=True)


def read_torch(kind: str, path: Path, cls: type[nn.Module] = Small) -> Facts:
    """A checkpoint of `modicum.torch.save`. `kind`: as for `optimizer_of`, or "" for none."""
    import modicum.torch

    model = cls()
    optimizer = optimizer_of(kind, model) if kind else None
    report = modicum.torch.resume(model, path, optimizer=optimizer, progress=False, budget="none")
    per_rank = report.extra_per_rank
    for one in per_rank or ():
        one["rng"] = bits(one["rng"])
    facts = {"step": report.step, "extra": report.extra, "per_rank": per_rank}
    return facts | contents(model, optimizer)


def read_adapters(path: Path, base: Path) -> Facts:
    import modicum.torch

    model = with_adapters(base)
    report = modicum.torch.resume(model, path, progress=False, budget="none")
    return {"step": report.step} | contents(model)


def with_adapters(base: Path) -> Any:
    import peft

    import modicum.torch

    model = Small()
    modicum.torch.load(model, base, progress=False, budget="none")
    return peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=["up"]))


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """A state dict for torch.distributed.checkpoint."""
    from torch.distributed.checkpoint.state_dict import (
        get_model_state_dict,
        get_optimizer_state_dict,
    )

    return {
        "model": get_model_state_dict(model),
        "optim": get_optimizer_state_dict(model, optimizer),
        "epoch": 3,
        "seen": {"tokens": 1.5, "names": ["a", "b"], "place": (1, b"\0x")},
    }


def read_dcp(path: Path) -> Facts:
    """A checkpoint of `modicum.torch.dcp.Writer`."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import (
        set_model_state_dict,
        set_optimizer_state_dict,
    )

    from modicum.torch.dcp import ModicumReader

    with alone():
        model = Small()
        optimizer = optimizer_of("AdamW", model)
        train(model, optimizer, range(5, 6))
        state = state_of(model, optimizer)
        state |= {"epoch": 0, "seen": {"tokens": 0.0, "names": [], "place": ()}}
        dcp.load(state, storage_reader=ModicumReader(path, model))
        set_model_state_dict(model, state["model"])
        set_optimizer_state_dict(model, optimizer, state["optim"])
        seen = {key: repr(state[key]) for key in ("epoch", "seen")}
        return seen | contents(model, optimizer)


def read_dcp_directory(program: Path, path: Path, scratch: Path) -> Facts:
    """A directory of torch: converted to a checkpoint."""
    from modicum.imports import import_checkpoint

    made = import_checkpoint(path, scratch / "steps", step=2, optimizer="AdamW", budget="none")
    facts = read_step(program, Path(made.path), scratch) | {"left_out": made.left_out}
    facts |= read_torch("AdamW", Path(made.path))
    shutil.rmtree(scratch / "steps")
    return facts


def read_zero(program: Path, path: Path, scratch: Path) -> Facts:
    """A directory of DeepSpeed: converted to a checkpoint."""
    from modicum.imports import import_checkpoint

    made = import_checkpoint(path, scratch / "steps", budget="none")
    facts = read_trained(program, Path(made.path), scratch) | {"left_out": made.left_out}
    shutil.rmtree(scratch / "steps")
    return facts


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
    """Steps with the gradients of `values`, rounded to the parameters' dtype."""
    for step in steps:
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                whole = values(name, parameter.shape, step + 1).to(parameter.dtype)
                parameter.grad = like(parameter, whole)
        optimizer.step()


def like(parameter: Any, whole: torch.Tensor) -> Any:
    """`whole` sharded as the parameter is."""
    if not hasattr(parameter, "device_mesh"):
        return whole
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(whole, parameter.device_mesh, parameter.placements)


@contextmanager
def alone() -> Iterator[None]:
    """A process group of one rank."""
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


# ---- scripts of accelerate and Trainer


@contextmanager
def script() -> Iterator[None]:
    """One rank with FSDP2 on the CPU, within `loading()`."""
    from accelerate_rank import fsdp2_on_cpus

    import modicum.torch.accelerate

    loading = modicum.torch.accelerate.loading
    with alone(), fsdp2_on_cpus(), loading(progress=False, budget="none"):
        yield


def prepared(model_directory: Path) -> tuple[Any, Any, Any, Any]:
    """accelerate's accelerator, model, optimizer and scheduler."""
    import transformers
    from accelerate import Accelerator, FullyShardedDataParallelPlugin

    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2, auto_wrap_policy="transformer_based_wrap"
    )
    accelerator = Accelerator(mixed_precision="no", fsdp_plugin=plugin)
    cls = transformers.AutoModelForCausalLM
    model = cls.from_pretrained(model_directory, dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 0.5, total_iters=8)
    return accelerator, *accelerator.prepare(model, optimizer, scheduler)


def read_accelerate(path: Path, model_directory: Path) -> Facts:
    with script():
        accelerator, model, optimizer, scheduler = prepared(model_directory)
        accelerator.load_state(str(path))
        facts = contents(model, optimizer.optimizer)
        return facts | {"scheduler": scheduler.scheduler.last_epoch}


def trainer_of(model_directory: Path, output: Path, **how: Any) -> Any:
    import transformers

    arguments = transformers.TrainingArguments(
        str(output), use_cpu=True, fsdp=True, learning_rate=1e-2, lr_scheduler_type="linear",
        fsdp_config={"version": 2, "auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
                     "cpu_ram_efficient_loading": False},
        per_device_train_batch_size=1, report_to="none", disable_tqdm=True, save_strategy="steps",
        save_steps=2, logging_steps=1, **how,
    )  # fmt: skip
    cls = transformers.AutoModelForCausalLM
    model = cls.from_pretrained(model_directory, dtype=torch.float32)
    rows = torch.randint(model.config.vocab_size, (8, 6), generator=torch.manual_seed(0))
    data = [{"input_ids": row, "labels": row} for row in rows]
    return transformers.Trainer(model, arguments, train_dataset=data)


def read_trainer(program: Path, path: Path, model_directory: Path, scratch: Path) -> Facts:
    """What a resumed Trainer has before its first step."""
    import transformers

    facts: Facts = {"command-line": read_step(program, path, scratch)}

    class Beginning(transformers.TrainerCallback):
        def on_train_begin(self, args: Any, state: Any, control: Any, **how: Any) -> None:
            facts.update(contents(how["model"], how["optimizer"].optimizer))
            facts["step"] = state.global_step

    with script():
        trainer = trainer_of(model_directory, scratch / "trainer", max_steps=2)
        trainer.add_callback(Beginning())
        trainer.train(resume_from_checkpoint=str(path))
    return facts


# ---- what killed programs have left


def read_conversion(program: Path, path: Path, scratch: Path) -> Facts:
    """A conversion whose program was killed, in a copy: the answer to the same call. Either it goes
    on and finishes, or it is refused because of the owner, changes nothing, and finishes once the
    journal is removed, as its message says. The facts of both are equal. The verb `reshard` is
    gone: a convert to the same directory replaces what it has left."""
    work = scratch / path.name
    shutil.copytree(path, work)
    words = json.loads((work / "call.json").read_text())
    call = [word.replace("$FIXTURES", str(FOLDER)).replace("$HERE", str(work)) for word in words]
    is_gone = call[0] == "reshard"
    call = ["convert", *call[1:]] if is_gone else call
    before = files_of(work)
    done = run(program, *call, "--json")
    refused: Facts | None = None
    if done.code != 0:
        refused = done.error
        assert files_of(work) == before, "a refused conversion changed files"
        assert refused["category"] == "CONFLICT" and ".out.journal" in refused["message"], refused
        (work / ".out.journal").unlink()
        run_json(program, *call)
    assert {one.name for one in work.iterdir()} == {"call.json", "out"}
    facts: Facts = {}
    if not is_gone:
        facts["files"] = sorted(files_of(work / "out").keys())
        facts["tensors"] = verified(program, work / "out")
    facts["digest"] = run_json(program, "load", work / "out", "--digest")["digest"]
    shutil.rmtree(work)
    return facts


def read_killed_save(program: Path, path: Path, scratch: Path) -> Facts:
    """A root in which a program was killed, in a copy: its newest checkpoint is resumed, and a
    further save succeeds. That save names in a warning what it does not remove."""
    work = scratch / path.name
    shutil.copytree(path, work)
    facts = {"resumed": run_json(program, "resume", work)["resumed"]["step"]}
    facts["tensors"] = verified(program, work)
    saved = run_json(program, "save", FOLDER / "command-line/model", work, "--step", 9)
    left = {one.name for one in work.iterdir() if one.name.startswith(".partial-")}
    assert all(any(name in warning for warning in saved["warnings"]) for name in left), saved
    assert not [*work.glob(".trash-*")]
    facts["newest"] = run_json(program, "resume", work)["resumed"]["step"]
    shutil.rmtree(work)
    return facts


def read_uncommitted(program: Path, path: Path, scratch: Path) -> Facts:
    """The directory of another program in which a save of Modicum was killed."""
    done = run(program, "verify", path, "--json")
    return {"code": done.code, "file": done.json["files"][0]["name"]}


@dataclass(frozen=True)
class Fixture:
    front: str
    read: Callable[[Path, Path, Path], Facts]
    """Called with the program, the fixture's path and a directory for copies."""


def _torch(kind: str, cls: type[nn.Module] = Small) -> Fixture:
    is_ours = kind.startswith("modicum:")

    def read(program: Path, path: Path, scratch: Path) -> Facts:
        facts = read_step(program, path, scratch, trains=is_ours)
        return {"command-line": facts} | read_torch(kind, path, cls)

    return Fixture("modicum.torch.save", read)


def _and_step(front: str, read: Callable[[Path], Facts]) -> Fixture:
    """A checkpoint that the command line reads, too, but without its optimizer's state."""
    return Fixture(front, lambda program, path, scratch: {
        "command-line": read_step(program, path, scratch)} | read(path))  # fmt: skip


FIXTURES = {
    "command-line/model": Fixture("safetensors", read_checkpoint),
    **{
        f"command-line/{name}": Fixture("modicum save", read_trained)
        for name in ("fp32", "fp32-split", "bf16-moments", "int8-moments", "int8-moments-24")
    },
    "command-line/shards": Fixture("modicum save", read_trained),
    "command-line/weights": Fixture("modicum save", read_step),
    "command-line/converted": Fixture("modicum convert", read_checkpoint),
    "command-line/resharded": Fixture("modicum reshard", read_trained),
    "torch/adamw": _torch("modicum:fp32-split"),
    "torch/background": _torch("modicum:fp32"),
    "torch/torch-adamw": _torch("AdamW"),
    "torch/torch-sgd": _torch("SGD"),
    "torch/tied": _torch("", Tied),
    "torch/adapters": _and_step(
        "modicum.torch.save", lambda path: read_adapters(path, FOLDER / "command-line/model")
    ),
    "dcp/written": _and_step("modicum.torch.dcp.Writer", read_dcp),
    "dcp/imported": _and_step("modicum.torch.dcp.convert", lambda path: read_torch("AdamW", path)),
    "dcp/directory": Fixture("torch.distributed.checkpoint", read_dcp_directory),
    "accelerate/state": _and_step(
        "accelerate in loading()", lambda path: read_accelerate(path, FOLDER / "accelerate/model")
    ),
    "trainer/checkpoint-2": Fixture(
        "Trainer in loading()",
        lambda program, path, scratch: read_trainer(
            program, path, FOLDER / "accelerate/model", scratch
        ),
    ),
    "zero/directory": Fixture("DeepSpeed", read_zero),
    "zero/imported": Fixture("modicum.torch.deepspeed.convert", read_trained),
    "in-flight/convert": Fixture("modicum convert", read_conversion),
    "in-flight/reshard": Fixture("modicum reshard", read_conversion),
    "in-flight/writing": Fixture("modicum save", read_killed_save),
    "in-flight/latest": Fixture("modicum save", read_killed_save),
    "in-flight/removing": Fixture("modicum save", read_killed_save),
    "in-flight/checkpoint-7": Fixture("modicum save", read_uncommitted),
}
OTHERS = ("command-line/wide", "accelerate/model")
"""Models of the fixtures."""


def answer(program: Path, *words: object) -> Facts | str:
    """ "read", or the code, category and facts of the program's error."""
    done = run(program, *words, "--json")
    if done.code == 0:
        return "read"
    error = done.error
    names = ("code", "category", "file", "expected", "got")
    return {"code": done.code} | {name: error[name] for name in names if error.get(name)}


def texts_of(folder: Path) -> dict[str, str]:
    """The texts of the JSON files and COMMIT of a checkpoint."""
    files = [*folder.rglob("*.json"), *folder.glob("COMMIT")]
    return {str(file.relative_to(folder)): file.read_text() for file in sorted(files)}


def files_of(folder: Path) -> dict[str, str]:
    """The SHA-256 of each file below a folder, by its path there."""
    return {
        str(file.relative_to(folder)): hashlib.sha256(file.read_bytes()).hexdigest()
        for file in sorted(folder.rglob("*"))
        if file.is_file()
    }
