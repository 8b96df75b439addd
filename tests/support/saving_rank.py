"""Acts (functions that ranks run by name, see torch_rank.py) that save checkpoints and resume from
them."""

import gc
import os
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import Mock, patch

import torch
import torch.distributed as dist
import torch_front
import transformers
from nested_options import nested
from sharding import Cut
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch_rank import told

import modicum.torch
from modicum import _modicum
from modicum.torch.ranks.group import Ranks
from modicum.torch.saving import weights
from modicum.torch.saving.sigterm import REPEAT_S
from modicum.torch.shards import tensors

STEPS_AFTER = 3
OPTIMIZERS: dict[str, Callable[..., Any]] = {
    "adam": torch.optim.Adam,
    "adamw": torch.optim.AdamW,
    "sgd": lambda params, **how: torch.optim.SGD(params, momentum=0.9, **how),
    "sgd-plain": torch.optim.SGD,
}


def made(directory: str, cut: Cut, optimizer: str, dtype: str) -> tuple[Any, Any]:
    """A sharded model on meta with a frozen norm, and an optimizer that has no state yet.
    `optimizer`: a state format of Modicum's, or a name of OPTIMIZERS."""
    config = transformers.AutoConfig.from_pretrained(directory, experts_implementation="eager")
    with modicum.torch.empty_parameters():
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype))
    torch_front.shard(model, cut)
    model.get_parameter("model.norm.weight").requires_grad_(False)
    named = {n: p for n, p in model.named_parameters() if p.requires_grad}
    flat = {n: p for n, p in named.items() if p.dim() == 1}
    both = [{"params": [p for n, p in named.items() if n not in flat]}]
    both += [{"params": [*flat.values()], "lr": 3e-3, "weight_decay": 0.0}]
    if optimizer in OPTIMIZERS:
        return model, OPTIMIZERS[optimizer](both, lr=1e-2)
    for group in both:
        group["params"] = [(n, p) for n, p in named.items() if any(p is q for q in group["params"])]
    return model, modicum.torch.AdamW(both, lr=1e-2, state_format=optimizer)


def steps(model: Any, optimizer: Any, cut: Cut, numbers: range) -> None:
    """Makes steps with gradients that depend on step, name and global index."""
    for step in numbers:
        for name, parameter in model.named_parameters():
            if not parameter.requires_grad:
                continue
            whole = torch_front.whole_gradient(name, parameter.shape, step).to(parameter.dtype)
            local = torch_front.local_part(name, whole, cut, dist.get_rank()).contiguous()
            is_cut = isinstance(parameter, DTensor)
            spec = getattr(parameter, "_spec", None)
            parameter.grad = DTensor(local, spec, requires_grad=False) if is_cut else local
        optimizer.step()
        optimizer.zero_grad()


def whole(model: Any, optimizer: Any) -> dict[str, str]:
    """Digests of the gathered parameters and of the gathered tensors of the optimizer's state; the
    state's scalars and the groups' learning rates, as text."""
    held = dict(model.named_parameters())
    names = {id(p): n for n, p in held.items()}
    flat = [names[id(p)] for group in optimizer.param_groups for p in group["params"]]
    numbers: dict[str, str] = {}
    for at, entry in optimizer.state_dict()["state"].items():
        for key, value in entry.items():
            name = f"{flat[at]} {key}"
            if isinstance(value, torch.Tensor) and value.dim() > 0:
                held[name] = value
            else:
                numbers[name] = str(float(value or 0))
    lrs = {f"group {at}": str(of["lr"]) for at, of in enumerate(optimizer.param_groups)}
    gathered = {n: told(t.full_tensor() if isinstance(t, DTensor) else t) for n, t in held.items()}
    return gathered | numbers | lrs


def saves(
    directory: str,
    root: str,
    cut: Cut,
    *,
    optimizer: str = "fp32",
    dtype: str = "float32",
    shares: bool = True,
) -> dict[str, Any]:
    """Two steps, a save, and further steps: the state at the save and at the end.

    Args:
        shares: whether ranks can map each other's memory.
    """
    model, stepping = made(directory, cut, optimizer, dtype)
    ours = [stepping] if isinstance(stepping, modicum.torch.AdamW) else []
    modicum.torch.load(model, directory, optimizer=ours, progress=False)
    steps(model, stepping, cut, range(2))
    stepping.param_groups[0]["lr"] = 5e-3
    own = {"rank": dist.get_rank(), "rng": torch.full((3,), dist.get_rank())}
    refused = Mock(side_effect=_modicum.SharedGather, open=lambda *_: None)
    with nullcontext() if shares else patch.object(_modicum, "SharedGather", refused):
        report = modicum.torch.save(
            model, root, step=2, optimizer=stepping, extra={"epoch": 1}, extra_per_rank=own
        )
    saved = whole(model, stepping)
    steps(model, stepping, cut, range(2, 2 + STEPS_AFTER))
    return {"report": vars(report), "saved": saved, "end": whole(model, stepping)}


def resumes(
    directory: str,
    root: str,
    cut: Cut,
    *,
    optimizer: str = "fp32",
    dtype: str = "float32",
    again: bool = False,
) -> dict[str, Any]:
    """The state after a resume, and after further steps. Without `again` the model is on meta
    before the resume; with `again` it has been resumed and trained before, and has other values."""
    model, stepping = made(directory, cut, optimizer, dtype)
    if again:
        modicum.torch.resume(model, root, optimizer=stepping, progress=False)
        steps(model, stepping, cut, range(7, 9))
    # In inference mode a resume makes ordinary tensors, too.
    with torch.inference_mode(optimizer in ("adamw", "bf16-moments")):
        report = modicum.torch.resume(model, root, optimizer=stepping, progress=False)
    before = whole(model, stepping)
    steps(model, stepping, cut, range(2, 2 + STEPS_AFTER))
    extra = [report.extra, str(report.extra_per_rank)]
    told_of = {"step": report.step, "skipped": report.skipped, "read_bytes": report.read_bytes}
    return {"before": before, "end": whole(model, stepping), "extra": extra, "report": told_of}


def compares(directory: str, root: str, cut: Cut, *, optimizer: str = "fp32") -> dict[str, Any]:
    """What a resume reports of its comparison with the checkpoint's record, or its error."""
    model, stepping = made(directory, cut, optimizer, "float32")
    try:
        report = modicum.torch.resume(model, root, optimizer=stepping, progress=False)
    except modicum.Error as error:
        return {"error": type(error).__name__, "message": str(error)}
    return {"compared_bytes": report.compared_bytes, "not_compared": report.not_compared}


def fails(directory: str, root: str, cut: Cut, how: str) -> dict[str, Any]:
    """Saves a checkpoint, and then one more that must fail. Returns the error's facts."""
    model, stepping = made(directory, cut, "fp32", "float32")
    modicum.torch.load(model, directory, optimizer=stepping, progress=False)
    modicum.torch.save(model, root, step=1, optimizer=stepping)
    kind: dict[str, Any] = {"step": 2, "optimizer": stepping}
    write = _modicum.SaveParts.write
    if how == "disk" and dist.get_rank() == 1:

        def full(*arguments: Any, **more: Any) -> Any:
            raise OSError("no disk here")

        _modicum.SaveParts.write = full
    if how == "step":
        kind["step"] += dist.get_rank()
    if how == "budget":
        kind["budget"] = "1MiB"
    if how == "again":
        kind["step"] = 1
    try:
        modicum.torch.save(model, root, **kind)
    except Exception as error:
        facts: Mapping[str, Any] = vars(error)
        return {"error": type(error).__name__, "message": str(error), "facts": dict(facts)}
    finally:
        _modicum.SaveParts.write = write
    return {"error": ""}


def diverges(directory: str, root: str, cut: Cut) -> list[dict[str, Any]]:
    """Saves step 1 with buffers that differ by rank. Then the last rank changes its replica of a
    large and of a small parameter, or of a moment: returns the errors of saves of step 2. Saves the
    first rank's replicas as step 3, also in the background, as step 4."""
    model, stepping = made(directory, cut, "adamw", "float32")
    modicum.torch.load(model, directory, progress=False)
    steps(model, stepping, cut, range(1))
    for name in ("mean", "var"):
        model.register_buffer(name, torch.full((3,), float(dist.get_rank())))
    how: dict[str, Any] = {"optimizer": stepping}
    modicum.torch.save(model, root, step=1, **how)
    large = model.get_parameter("model.embed_tokens.weight")
    small = model.get_parameter("model.layers.0.input_layernorm.weight")
    errors = []
    for tensor in (stepping.state[large]["exp_avg"], small, large):
        if dist.get_rank() == dist.get_world_size() - 1:
            tensor.detach().to_local().add_(1)
        try:
            modicum.torch.save(model, root, step=2, **how)
        except modicum.Error as error:
            errors.append(vars(error) | {"message": str(error)})
    modicum.torch.save(
        model, root, step=3, options=modicum.torch.SaveOptions(replicas="first"), **how
    )
    modicum.torch.async_save(
        model, root, step=4, options=modicum.torch.SaveOptions(replicas="first"), **how
    ).result()
    return errors


def into(directory: str, root: str, cut: Cut, optimizer: str) -> str:
    """Makes a resume that must be refused. Returns the message."""
    model, stepping = made(directory, cut, optimizer, "float32")
    try:
        modicum.torch.resume(model, root, optimizer=stepping, progress=False)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def with_adapters(directory: str, cut: Cut) -> tuple[Any, Any]:
    """A loaded model with new adapters, which are sharded with it, and their optimizer."""
    import peft

    config = transformers.AutoConfig.from_pretrained(directory, experts_implementation="eager")
    with modicum.torch.empty_parameters():
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    modicum.torch.load(model, directory, progress=False)
    torch.manual_seed(dist.get_rank())
    lora = peft.LoraConfig(r=3, target_modules=["q_proj", "down_proj"], modules_to_save=["lm_head"])
    wrapped = peft.get_peft_model(model, lora)
    if cut.layout != "none":
        mesh = torch_front.mesh_of(cut)
        for layer in model.model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(wrapped, mesh=mesh)
    named = [(n, p) for n, p in wrapped.named_parameters() if p.requires_grad]
    return wrapped, modicum.torch.AdamW(named, lr=1e-2)


def saves_adapters(directory: str, root: str, cut: Cut) -> dict[str, Any]:
    """Does what `saves` does, for adapters."""
    model, stepping = with_adapters(directory, cut)
    steps(model, stepping, cut, range(2))
    report = modicum.torch.save(model, root, step=2, optimizer=stepping)
    saved = whole(model, stepping)
    steps(model, stepping, cut, range(2, 2 + STEPS_AFTER))
    return {"report": vars(report), "saved": saved, "end": whole(model, stepping)}


def resumes_adapters(directory: str, root: str, cut: Cut) -> dict[str, Any]:
    """Does what `resumes` does, for adapters."""
    model, stepping = with_adapters(directory, cut)
    modicum.torch.resume(model, root, optimizer=stepping, progress=False)
    before = whole(model, stepping)
    steps(model, stepping, cut, range(2, 2 + STEPS_AFTER))
    return {"before": before, "end": whole(model, stepping)}


def slowly(
    directory: str, root: str, cut: Cut, grace: float, slow: tuple[float, str]
) -> dict[str, Any]:
    """Saves from a slow device. Returns the error, and whether SIGTERM has its default handler.

    Args:
        slow: the seconds that each piece takes, and a directory with a file of this rank that gets
            a byte when a piece begins, the first excepted.
    """
    model, _ = made(directory, cut, "fp32", "float32")
    modicum.torch.load(model, directory, progress=False)
    fetching, pieces = weights.fetching, []
    pause_s, marks = slow
    mark = Path(marks, f"rank-{dist.get_rank()}")

    def paused(lines: Any) -> Any:
        fetch = fetching(lines)
        assert fetch is not None

        def fetch_slowly(*place: Any) -> None:
            pieces.append(place)
            if len(pieces) > 1:
                mark.write_bytes(bytes(len(pieces) - 1))
            time.sleep(pause_s)
            fetch(*place)

        return fetch_slowly

    copied: dict[str, Any] = {"destination_of": lambda local: "copy"}
    try:
        with patch.multiple(weights, fetching=paused, **copied), patch.multiple(tensors, **copied):
            modicum.torch.save(
                model,
                root,
                step=1,
                options=modicum.torch.SaveOptions(grace=grace),
                memory=modicum.torch.MemoryPolicy(staging="256KiB"),
            )
    except Exception as error:
        default = signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
        return {"error": type(error).__name__, "message": str(error), "default": default}
    return {"error": ""}


def send_itself(signals: int) -> None:
    """Sends SIGTERM to this process, `signals` times: none counts as a repetition of another."""
    for number in range(signals):
        time.sleep(REPEAT_S if number else 0)
        signal.raise_signal(signal.SIGTERM)


@contextmanager
def signalled(signals: int, after_s: float = 0.0) -> Iterator[None]:
    """Within it this rank sends SIGTERM to itself, `signals` times, before a save's first
    collective: after `after_s` seconds."""
    meet = Ranks.of_world

    def send_and_meet(*how: Any) -> Ranks:
        time.sleep(after_s)
        send_itself(signals)
        return meet(*how)

    with patch.object(Ranks, "of_world", send_and_meet):
        yield


def at_the_call(
    directory: str, root: str, cut: Cut, kind: dict[str, Any], signals: int | None
) -> dict[str, Any]:
    """Saves. Before the save's first collective this rank sends SIGTERM to itself, `signals` times.
    If `signals` is None, it sends one SIGTERM before it calls `save`. Returns the error, and
    whether SIGTERM has its default handler."""
    model, _ = made(directory, cut, "fp32", "float32")
    modicum.torch.load(model, directory, progress=False)
    if signals is None:
        signal.raise_signal(signal.SIGTERM)
    is_async = kind.pop("background", False)
    begin = time.monotonic()
    try:
        with signalled(signals or 0):
            save = modicum.torch.async_save if is_async else modicum.torch.save
            saving: Any = save(model, root, **nested(kind, "options", "memory"))
        if is_async:
            saving.result()
    except Exception as error:
        default = signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
        message, took_s = str(error), time.monotonic() - begin
        name = type(error).__name__
        return {"error": name, "message": message, "default": default, "took_s": took_s}
    return {"error": "", "default": signal.getsignal(signal.SIGTERM) is signal.SIG_DFL}


def preempted_loop(
    directory: str, root: str, cut: Cut, signals: int, how: dict[str, Any]
) -> dict[str, Any]:
    """A loop of five steps in `save_on_sigterm`. In step 3 this rank gets `signals` SIGTERMs.
    `how`: `every` of the context; `at`: another step than 3; `repeats`: how many follow at once;
    `is_killed`: whether SIGKILL follows; `saved`: whether the loop saves step 2; `periodic`:
    whether it saves step 3 by itself, "save" or "async_save"; `in_flight`: the step in which a save
    in the background begins, after which rank 1 is a second late; `grace` of all saves; `in_save`:
    for each rank, how many it gets in the save, `after_s` seconds after the beginning. Returns the
    exit code, the step after which the loop ended, and whether SIGTERM has its default handler
    again."""
    model, optimizer = made(directory, cut, "fp32", "float32")
    modicum.torch.load(model, directory, optimizer=optimizer, progress=False)
    number = 0

    kind: dict[str, Any] = {"optimizer": optimizer}
    kind["options"] = modicum.torch.SaveOptions(grace=how.get("grace"))

    def save() -> None:
        with signalled(how.get("in_save", (0, 0))[dist.get_rank()], how.get("after_s", 0.0)):
            modicum.torch.save(model, root, step=number, **kind)

    code = None
    try:
        with modicum.torch.save_on_sigterm(save, every=how.get("every", 1)) as preemption:
            for number in range(1, 6):
                steps(model, optimizer, cut, range(number, number + 1))
                if number == how.get("in_flight"):
                    modicum.torch.async_save(model, root, step=number, **kind)
                    time.sleep(dist.get_rank())
                if how.get("saved") and number == 2:
                    save()
                if number == how.get("at", 3):
                    send_itself(signals)
                    if how.get("is_killed"):
                        os.kill(os.getpid(), signal.SIGKILL)
                    for _ in range(how.get("repeats", 0)):
                        signal.raise_signal(signal.SIGTERM)
                if how.get("periodic") and number == 3:
                    getattr(modicum.torch, how["periodic"])(model, root, step=3, **kind)
                preemption.after_step()
    except SystemExit as ended:
        code = ended.code
    is_default = signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    return {"code": code, "number": number, "default": is_default}


def handles(directory: str, root: str, cut: Cut) -> dict[str, Any]:
    """Saves with a grace in a program whose rank 1 handles SIGTERM itself."""
    model, _ = made(directory, cut, "fp32", "float32")
    modicum.torch.load(model, directory, progress=False)

    def own(*_: Any) -> None:
        pass

    if dist.get_rank() == 1:
        signal.signal(signal.SIGTERM, own)
    try:
        modicum.torch.save(model, root, step=1, options=modicum.torch.SaveOptions(grace=25.0))
    except Exception as error:
        kept = signal.getsignal(signal.SIGTERM) is (own if dist.get_rank() == 1 else signal.SIG_DFL)
        return {"error": type(error).__name__, "message": str(error), "kept": kept}
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
    return {"error": ""}


def promised(directory: str, root: str, cut: Cut, optimizer: str) -> dict[str, Any]:
    """Makes three resumes: one without a budget, whose report has the promise; one that is refused,
    since its budget is half of the promise; and one that is measured. Returns the refusal, the
    promise, the kernel's peak, and the bytes of the state."""
    model, stepping = made(directory, cut, optimizer, "float32")
    resumed = modicum.torch.resume(model, root, optimizer=stepping, budget="none", progress=False)
    node = resumed.load.document["nodes"][0]
    del resumed
    short, stepping_short = made(directory, cut, optimizer, "float32")
    try:
        modicum.torch.resume(
            short, root, optimizer=stepping_short, budget=node["promised_bytes"] // 2,
            progress=False,
        )  # fmt: skip
        refused = {}
    except Exception as error:
        refused = {"error": type(error).__name__, "owners": vars(error).get("owners")}
    refused["on_meta"] = all(p.is_meta for p in short.parameters())
    del model, stepping, short, stepping_short
    gc.collect()
    model, stepping = made(directory, cut, optimizer, "float32")
    resumed = modicum.torch.resume(model, root, optimizer=stepping, progress=False)
    own = resumed.load.document["ranks"][dist.get_rank()]
    peak = _modicum.process_memory()["peak_bytes"]  # since the load of the weights
    local = sum(v.to_local().nbytes for e in stepping.state.values() for v in e.values()
                if isinstance(v, DTensor))  # fmt: skip
    return {"refused": refused, "promised": own["promised_bytes"], "peak": peak, "state": local}


ACTS: dict[str, Callable[..., Any]] = {
    "saves": saves,
    "resumes": resumes,
    "compares": compares,
    "save_fails": fails,
    "resume_into": into,
    "save_diverged": diverges,
    "save_slowly": slowly,
    "resume_promised": promised,
    "saves_adapters": saves_adapters,
    "resumes_adapters": resumes_adapters,
    "save_handling": handles,
    "save_signalled": at_the_call,
    "preempted_loop": preempted_loop,
}
