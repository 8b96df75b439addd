"""Acts (functions that ranks run by name, see torch_rank.py) for the tests of engines."""

import ctypes
import gc
import os
import sys
from argparse import Namespace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from nested_options import nested
from ranks import EXAMPLES, example
from safetensors.torch import save_file
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard

import modicum.torch.dcp
from modicum.torch import empty_parameters, fsdp2_load_full_state_dict
from modicum.torch.loading import memory


class Experts(nn.Module):
    """A tensor of three dims, and one that `_cut` shards along dim 1."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(3, 5, 4))
        self.wide = nn.Parameter(torch.randn(4, 8))

    def forward(self) -> torch.Tensor:
        return self.up.sum(1).sum(0) + self.wide.sum(1)


class Toy(nn.Module):
    """A model with numbers of rows that 4 ranks do not divide, some smaller than 4, a tie, a frozen
    bias, and buffers: integer, boolean, floating-point, empty and non-persistent."""

    def __init__(self, tied: bool = True, buffers: bool = True) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 4)
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
        self.experts = Experts()
        self.head = nn.Linear(4, 7, bias=False)
        if tied:
            self.head.weight = self.embed.weight
        self.blocks[0].bias.requires_grad_(False)
        if buffers:
            self.register_buffer("seen", torch.tensor(41))
            self.register_buffer("mask", torch.tensor([True, False, True]))
            self.register_buffer("scale", torch.rand(5))
            self.register_buffer("nothing", torch.zeros(3, 0))
        self.register_buffer("inverse", torch.arange(1, 4) / 4, persistent=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = torch.tanh(block(x))
        x = x + self.experts() * self.inverse.sum()
        return self.head(x).float().logsumexp(-1).mean()


def _cut(model: Any, offload: bool = False) -> Any:
    """Shards the model with FSDP2 over all ranks."""
    how: dict[str, Any] = {"mesh": init_device_mesh("cpu", (dist.get_world_size(),))}
    if offload:
        how["offload_policy"] = CPUOffloadPolicy(pin_memory=False)
    for block in model.blocks:
        fully_shard(block, **how)
    sideways = model.experts.wide
    by = {"shard_placement_fn": lambda p: Shard(1) if p is sideways else Shard(0)}
    return fully_shard(model, **how, **by)


def _whole(dtype: torch.dtype, **kind: bool) -> Toy:
    torch.manual_seed(7)
    model = Toy(**kind)
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    return model


def _built(how: str, dtype: torch.dtype, **kind: bool) -> Any:
    """A model before sharding, built in one of the ways in which engines build it.

    Args:
        how: "alike": all ranks build the model by `empty_parameters`. "moved to meta": all ranks
            build it with values and then move it. "with values": all ranks build it with values.
            "others without parameters": rank 0 builds it with values, the other ranks in
            accelerate's context. Any other text: rank 0 builds it with values, the other ranks on
            meta.
    """
    if how == "alike":
        with empty_parameters():
            return _whole(dtype, **kind)
    if how == "moved to meta":  # SkyRL's order: rank 0 keeps the non-persistent buffers
        model = _whole(dtype, **kind)
        kept = model.inverse
        model.to("meta")
        if dist.get_rank() == 0:
            model.inverse = kept
        if kind.get("tied", True):
            model.head.weight = model.embed.weight
        return model
    if dist.get_rank() == 0 or how == "with values":
        return _whole(dtype, **kind)
    if how == "others without parameters":
        from accelerate import init_empty_weights

        with init_empty_weights(include_buffers=False):
            model = _whole(dtype, **kind)
        model.inverse = torch.full((3,), torch.nan)
    else:
        with torch.device("meta"):
            model = _whole(dtype, **kind)
    if kind.get("tied", True):  # accelerate's context and .to(dtype) on meta untie
        model.head.weight = model.embed.weight
    return model


def _garbage(model: Any) -> None:
    """Gives the model memory by `to_empty`, and fills it with NaN (integers and booleans with 1),
    in place of arbitrary values."""
    model.to_empty(device="cpu")
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            local = getattr(tensor, "_local_tensor", tensor)
            local.fill_(torch.nan if local.is_floating_point() else 1)


def _step(model: Any, optimizer: Any) -> str:
    loss = model((torch.arange(6).reshape(2, 3) + dist.get_rank()) % 7)
    loss.backward()
    optimizer.step()
    return loss.item().hex()


def _everything(model: Any) -> dict[str, str]:
    """For each name of a parameter or buffer, also of a non-persistent one: a digest of this rank's
    values, the first name of the same tensor, and `requires_grad`."""
    from torch_rank import told

    tensors = dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers())
    first: dict[int, str] = {}
    return {
        name: f"{told(t.to_local() if isinstance(t, DTensor) else t)} "
        f"{first.setdefault(id(t), name)} {t.requires_grad}"
        for name, t in tensors.items()
    }


def state_dict_loaded(
    form: str = "engine",
    built: str = "alike",
    dtype: str = "float32",
    stored: str | None = None,
    by: str = "modicum",
    offload: bool = False,
    omit: tuple[str, ...] = (),
    path: str | None = None,
    options: dict[str, Any] | None = None,
    **kind: bool,
) -> dict[str, Any]:
    """Loads a state dict of rank 0 into every rank's shards.

    Args:
        form: "accelerate", "engine" (verl's), "areal" or "skyrl".
        built: how the model is built before it is sharded; see `_built`.
        stored: the dict's floating-point dtype, if it differs from the model's.
        by: "modicum"; "torch": sharded with its values; "upstream": what Modicum replaces.
        omit: names that the dict lacks.
        path: a file, which rank 0 writes, in the place of the dict.
        options: further arguments of the function.
    """
    as_dtype = getattr(torch, dtype)
    full = _whole(getattr(torch, stored or dtype), **kind)
    state: Any = {n: t for n, t in full.state_dict().items() if n not in omit}
    if by == "torch":
        for parameter in full.parameters():
            parameter.data = parameter.data.to(as_dtype)
        return _after(_cut(full, offload))
    model = _cut(_built(built, as_dtype, **kind), offload)
    if built == "others from to_empty" and dist.get_rank() != 0:
        _garbage(model)
    if path is not None:
        if dist.get_rank() == 0:
            save_file({n: t for n, t in state.items() if n != "head.weight"}, path)
        dist.barrier()
        state = path
    elif dist.get_rank() != 0:
        state = {"engine": {}, "skyrl": {}, "areal": None}.get(
            form, {n: t.to("meta") for n, t in state.items()}
        )
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(trained, lr=0.1)
    if by == "upstream":
        _upstream(form, model, state)
        optimizer = None  # it refers to the parameters from before the load
    else:
        before = list(model.parameters())
        assert (
            _drop_in(form, model, state, offload, **nested(options or {}, "rules", "memory"))
            is model
        )
        assert all(now is then for now, then in zip(model.parameters(), before, strict=True))
    if form == "accelerate":  # which restores non-persistent buffers itself
        model.register_buffer("inverse", full.inverse, persistent=False)
    return _after(model, optimizer)


def _after(model: Any, optimizer: Any = None) -> dict[str, Any]:
    held = _everything(model)
    trained = [p for p in model.parameters() if p.requires_grad]
    loss = _step(model, optimizer or torch.optim.SGD(trained, lr=0.1))
    return {"held": held, "loss": loss, "after": _everything(model)}


def _drop_in(form: str, model: Any, state: Any, offload: bool, **options: Any) -> Any:
    if form == "accelerate":
        accelerator = SimpleNamespace(is_main_process=dist.get_rank() == 0)
        return fsdp2_load_full_state_dict(accelerator, model, state, offload, **options)
    policy = CPUOffloadPolicy(pin_memory=False) if offload else None
    if form == "skyrl":
        return fsdp2_load_full_state_dict(model, state, policy, **options)
    if form == "areal":
        how = {"tie_word_embeddings": True, **options}
        return fsdp2_load_full_state_dict(model, state, policy, **how)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    return fsdp2_load_full_state_dict(model, state, mesh, policy, **options)


def _upstream(form: str, model: Any, state: Any) -> None:
    """The upstream functions that ours replaces."""
    if form == "accelerate":
        from accelerate.utils.fsdp_utils import fsdp2_load_full_state_dict as of_accelerate

        of_accelerate(SimpleNamespace(is_main_process=dist.get_rank() == 0), model, state)
        return
    if dist.get_rank() != 0:
        model.to_empty(device="cpu")
    how = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(model, state, options=how)
    for buffer in model.buffers():
        dist.broadcast(buffer, src=0)


def drop_in_refused(case: str) -> str:
    """Makes a call that must fail on every rank. Returns its message."""
    model = _cut(_built("alike", torch.float32))
    state: Any = _whole(torch.float32).state_dict()
    if case == "missing":
        del state["experts.up"]
    elif case == "unknown":
        state["head.bias"] = torch.zeros(7)
    elif case == "shape":
        state["experts.up"] = state["experts.up"][:2]
    elif case == "meta":
        state["experts.up"] = state["experts.up"].to("meta")
    elif case == "kind":
        state["seen"] = torch.tensor(1.0)
    elif case == "tie":
        state["head.weight"] = state["head.weight"] + 1
    elif case == "moved to meta":  # as in SkyRL, on other ranks than 0
        model = _whole(torch.float32)
        model = _cut(model if dist.get_rank() == 0 else model.to("meta"))
    elif case == "path on one rank" and dist.get_rank() == 1:
        state = "/nowhere"
    elif case == "type":
        state = [1]
    elif case == "other model" and dist.get_rank() == 2:
        model = _cut(_built("alike", torch.float32, buffers=False))
    try:
        fsdp2_load_full_state_dict(model, state)
    except modicum.Error as error:
        assert all(p.is_meta for p in model.parameters()), "half a model"
        return str(error)
    return "none"


class Large(nn.Module):
    """Tensors larger than staging."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(6000, 1024)
        self.mix = nn.Linear(1024, 1536, bias=False)
        self.register_buffer("table", torch.arange(1 << 18), persistent=False)


def dict_measured(offers: str = "none", dtype: str = "float32") -> dict[str, Any]:
    """Loads rank 0's state dict, which has a transposed tensor, into a model that may have another
    dtype, with the budget `offers`. Returns the memory that this rank held meanwhile, and the
    report."""
    from torch_rank import held_bytes

    with empty_parameters():
        model: Any = Large().to(getattr(torch, dtype))
    fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    torch.manual_seed(3)
    # Each tensor's shape and seed. After the measurement every rank draws the values to compare.
    drawn = {n: [p.shape, torch.randint(1 << 30, ())] for n, p in model.named_parameters()}
    full = {n: _drawn(*of) for n, of in drawn.items()} if dist.get_rank() == 0 else {}
    if full:
        full["mix.weight"] = full["mix.weight"].t().contiguous().t()
    if dist.get_rank() != 0:
        model.table = torch.zeros_like(model.table)
    reports: list[Any] = []
    reads: list[int] = []
    copy_run = memory.copy_run
    memory.copy_run = lambda *run: (reads.append(run[2].nbytes), copy_run(*run))
    ledger = modicum.Ledger()
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")
    before = held_bytes("RssAnon", "RssShmem")
    try:
        how = {"budget": offers, "on_report": reports.append}
        policy = modicum.torch.MemoryPolicy(ledger=ledger)
        fsdp2_load_full_state_dict(model, full, memory=policy, **how)
    except modicum.BudgetError as error:
        assert all(p.is_meta for p in model.parameters())
        return {"refused": str(error), "reads": reads}
    finally:
        memory.copy_run = copy_run
    now, fallen = held_bytes("RssAnon", "RssShmem"), held_bytes("VmHWM") - held_bytes("VmRSS")
    for name, parameter in model.named_parameters():
        whole, local = _drawn(*drawn[name]).to(parameter.dtype), parameter.to_local()
        begin = dist.get_rank() * -(-len(whole) // dist.get_world_size())
        assert torch.equal(local, whole[begin : begin + len(local)]), name
    assert torch.equal(model.table, torch.arange(1 << 18))
    (report,) = reports
    return {
        "report": report.document,
        "largest_read": max(reads, default=0),
        "at_peak": ledger.at_peak,
        "grown_bytes": now + fallen - before,
        "local_bytes": sum(p.to_local().nbytes for p in model.parameters()),
        "buffer_bytes": model.table.nbytes,
    }


class Rows(nn.Module):
    """Sixteen tensors of 8 MiB, one of them with two tied names, and a tensor of a few bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(1024, 2048, bias=False) for _ in range(16))
        self.head = nn.Linear(1024, 2048, bias=False)
        self.head.weight = self.layers[0].weight
        self.small = nn.Parameter(torch.ones(4))


def dict_consumed(fails_at: int | None = None, consume: bool = True) -> dict[str, Any]:
    """Loads a state dict of rank 0 with `consume`. Returns the growth of this rank's anonymous and
    shared memory, at each read and at the end, and the names that are left in the dict.

    Args:
        fails_at: the read of the dict that raises.
    """
    from torch_rank import held_bytes

    # Freeing 31 MiB raises malloc's mmap threshold to that size. From then on malloc takes tensors
    # of 8 MiB from its heap, as in a process that has run for some time.
    del [torch.empty(31 << 20, dtype=torch.uint8)][:]
    with empty_parameters():
        model: Any = Rows()
    fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    full: dict[str, Any] = {n: torch.zeros(4, dtype=torch.bfloat16) for n in ("a", "b")}
    if dist.get_rank() == 0:
        shapes = {n: t.shape for n, t in model.state_dict().items()}
        full = {n: torch.full(shape, float(len(n))) for n, shape in shapes.items()}
        full["head.weight"] = full["layers.0.weight"]
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    before, grown, copy_run = held_bytes("RssAnon", "RssShmem"), [], memory.copy_run

    def copy(*run: Any) -> None:
        if len(grown) == fails_at:
            raise OSError("the dict can't be read")
        copy_run(*run)
        grown.append(held_bytes("RssAnon", "RssShmem") - before)

    memory.copy_run = copy
    said = ""
    try:
        fsdp2_load_full_state_dict(model, full, budget="none", consume=consume)
    except (modicum.Error, OSError) as error:
        assert all(p.is_meta for p in model.parameters())
        said = str(error)
    finally:
        memory.copy_run = copy_run
    if not said:
        for name, parameter in model.named_parameters():
            assert (parameter.to_local() == len(name)).all(), name
    grown.append(held_bytes("RssAnon", "RssShmem") - before)
    return {"said": said, "grown": grown, "left": [*full]}


def _drawn(shape: torch.Size, seed: torch.Tensor) -> torch.Tensor:
    generator = torch.Generator().manual_seed(int(seed))
    return torch.rand(shape, generator=generator)


# ---- the engine of the examples


def engine(directory: str, dtype: str = "bfloat16", **options: Any) -> dict[str, Any]:
    """The shards of the example's engine on this rank, the bytes that this rank read, and the
    memory that it held."""
    from torch_rank import held_bytes, local_state, read_bytes, whole_state

    module = example("engine_memory_efficient_load")
    torch.manual_seed(0)
    how = module.Options(directory=directory, dtype=getattr(torch, dtype), **options)
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # memory that an earlier engine left in the heap
    Path("/proc/self/clear_refs").write_text("5")  # the high-water mark begins here
    before, read = held_bytes("RssAnon", "RssShmem"), read_bytes()
    made = module.Engine(how, "cpu")
    read = read_bytes() - read
    now, fallen = held_bytes("RssAnon", "RssShmem"), held_bytes("VmHWM") - held_bytes("VmRSS")
    parameters = list(made.model.parameters())
    bound = {id(p) for group in made.optimizer.param_groups for p in group["params"]}
    assert bound == {id(p) for p in parameters if p.requires_grad}
    return {
        "state": local_state(made.model),
        "whole": whole_state(made.model),
        "buffers": {n: b.tolist() for n, b in made.model.named_buffers()},
        "read_bytes": read,
        "grown_bytes": now + fallen - before,
        "local_bytes": sum(p.to_local().nbytes for p in parameters),
    }


def dcp_loaded(directory: str, mesh: list[int]) -> dict[str, Any]:
    """A state dict on meta, filled by torch.distributed.checkpoint through Modicum's reader."""
    from torch_rank import built, local_state, read_bytes

    model = built(directory, None, mesh)
    read, state = read_bytes(), model.state_dict()
    reader = modicum.torch.dcp.ModicumReader(directory, model)
    dcp.load(state, storage_reader=reader)
    model.load_state_dict(state, assign=True)
    return {
        "state": local_state(model),
        "read_bytes": read_bytes() - read,
        "local_bytes": sum(p.to_local().nbytes for p in model.parameters()),
    }


def strategy(**options: Any) -> dict[str, Any]:
    """A run of examples/strategies.py, with a launcher's environment variables."""
    words = {"RANK": dist.get_rank(), "LOCAL_RANK": dist.get_rank()}
    words |= {"WORLD_SIZE": dist.get_world_size(), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": 0}
    os.environ.update({name: str(word) for name, word in words.items()})
    sys.path.insert(0, str(EXAMPLES))  # as for a script in that folder
    how = {"dtype": "float32", "budget": None, "steps": 2, "memory_efficient_init": False}
    return example("strategies").run(Namespace(**how | options), "cpu")


ACTS = {
    "strategy": strategy,
    "dcp_loaded": dcp_loaded,
    "state_dict_loaded": state_dict_loaded,
    "drop_in_refused": drop_in_refused,
    "dict_measured": dict_measured,
    "dict_consumed": dict_consumed,
    "engine": engine,
}
