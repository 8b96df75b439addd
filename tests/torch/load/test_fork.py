"""Parameters and optimizer state in forked children, for each value of `fork=`. With "excluded",
the default, a child does not have this memory: its address space has a hole there.

Catches: a hole that a later mapping of the child fills and that is read as the parameter; a child
that dies of a signal because it used a parameter; a value of `fork=` that has no effect on the
memory; copies that the plan does not count.
"""

import os
import pickle
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from nested_options import nested  # noqa: E402
from program import living_children  # noqa: E402
from ranks import Ranks, ranks  # noqa: E402
from safetensors.torch import save_file  # noqa: E402  (after torch is known to be there)
from sharding import playing_new_rank  # noqa: E402
from torch import nn  # noqa: E402
from torch.distributed.device_mesh import init_device_mesh  # noqa: E402
from torch.distributed.fsdp import fully_shard  # noqa: E402
from torch.utils.data import DataLoader, Dataset  # noqa: E402

import modicum.torch  # noqa: E402
from modicum.errors import BudgetError, Error, UsageError  # noqa: E402
from modicum.torch import MemoryPolicy  # noqa: E402
from modicum.torch.accelerate import loading  # noqa: E402

ROWS, COLUMNS = 4096, 64
LR = 1e-4
MIB = 1 << 20
WORDS = 'fork="excluded"'  # in the error of a child that uses excluded memory


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(ROWS, COLUMNS)
        self.head = nn.Linear(COLUMNS, 8, bias=False)


@pytest.fixture(scope="module")
def values() -> dict[str, Any]:
    """Values from 1 to 2: none is near 0, the value of untouched pages."""
    torch.manual_seed(1)
    shapes = {"embed.weight": (ROWS, COLUMNS), "head.weight": (8, COLUMNS)}
    return {name: torch.rand(shape) + 1 for name, shape in shapes.items()}


@pytest.fixture(scope="module")
def directory(values: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("forked")
    save_file(values, folder / "model.safetensors")
    return folder


def loaded(directory: Path, *, sharded: bool = False, **options: Any) -> Any:
    with modicum.torch.empty_parameters():
        model = Model()
    if sharded:
        fully_shard(model, mesh=init_device_mesh("cpu", (1,)), reshard_after_forward=False)
    modicum.torch.load(
        model, directory, progress=False, **nested({"budget": "none"} | options, "memory")
    )
    return model


class Trainer:
    """Each of its steps lowers every value of the model by about LR."""

    def __init__(self, model: Any, **options: Any) -> None:
        self.parameters = list(model.parameters())
        self.gradients = [torch.ones_like(parameter) for parameter in self.parameters]
        named = list(model.named_parameters())
        self.optimizer = modicum.torch.AdamW(
            named, lr=LR, weight_decay=0, **nested(options, "memory")
        )
        self.steps = 0

    def step(self) -> None:
        for parameter, gradient in zip(self.parameters, self.gradients, strict=True):
            parameter.grad = gradient.detach()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.steps += 1


# ---- children


def in_child(act: Callable[[], Any]) -> Callable[[], Any]:
    """Calls `act` in a forked child. The returned function waits for the child and returns the
    value of `act`, the error that it raised, or the signal that ended it."""
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            os.close(read)
            try:
                answer: Any = act()
            except Exception as error:
                answer = (type(error).__name__, str(error), isinstance(error, Error))
            os.write(write, pickle.dumps(answer))
            code = 0
        finally:
            os._exit(code)
    os.close(write)

    def wait() -> Any:
        with os.fdopen(read, "rb") as pipe:
            answer = pipe.read()
        status = os.waitpid(pid, 0)[1]
        if os.WIFSIGNALED(status):
            return signal.Signals(os.WTERMSIG(status))
        assert status == 0 and answer, "no answer from the child"
        return pickle.loads(answer)

    return wait


def map_memory() -> list[Any]:
    """New tensors with other values, of sizes that would fit into a hole."""
    sizes = [1024, ROWS * COLUMNS, ROWS * COLUMNS + 2048, 1 << 19]
    return [torch.full((size,), 1e6) for _ in range(25) for size in sizes]


def local_of(tensor: Any) -> Any:
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def reads_of(model: Any) -> dict[str, Callable[[], Any]]:
    """Ways to read all rows of embed.weight, also through tensors derived from it before the
    fork."""
    weight = model.embed.weight
    before = weight.detach(), weight.data, model.state_dict()["embed.weight"]
    rows = torch.arange(ROWS)
    reads = {
        "clone": lambda: local_of(weight).clone(),
        "detach": lambda: local_of(before[0]) + 0.0,
        "data": lambda: torch.cat([local_of(before[1])]),
        "state dict": lambda: local_of(before[2]).to(torch.float64).float(),
        "numpy": lambda: torch.from_numpy(local_of(weight).detach().numpy().copy()),
        "list": lambda: torch.tensor(local_of(weight).tolist()),
        "local": lambda: getattr(weight, "_local_tensor", weight).mul(1.0),
        "lookup": lambda: nn.functional.embedding(rows, local_of(weight)),
        "forward": lambda: model.embed(rows),
    }
    if hasattr(weight, "to_local"):
        del reads["forward"]  # FSDP2 gathers in it, which all ranks have to do together
    return reads


def is_right(got: Any, expected: Any, steps: int) -> bool:
    """Whether each value is the loaded one, `expected`, lowered by at most as much as `steps` steps
    of a Trainer lower it."""
    lowered_by = expected - got.detach()
    return bool((lowered_by >= -1e-6).all() and (lowered_by <= 1.01 * LR * steps + 1e-6).all())


def children_while_stepping(model: Any, trainer: Trainer, expected: Any, count: int) -> list[Any]:
    """Forks `count` children one after the other, and makes a step while each of them reads. Each
    way of `reads_of` is used by two children in a row, and the second of them allocates memory
    first. Returns the children's answers."""
    reads = list(reads_of(model).values())
    answers = []
    for index in range(count):
        read, maps = reads[index // 2 % len(reads)], index % 2 == 1
        # The child may see values of steps that its parent makes while it reads.
        most_steps = trainer.steps + 50

        def check(read: Any = read, maps: bool = maps, most_steps: int = most_steps) -> bool:
            own = map_memory() if maps else []
            is_as_expected = is_right(read(), expected, most_steps)
            del own  # until here the memory must stay mapped
            return is_as_expected

        wait = in_child(check)
        trainer.step()
        answers.append(wait())
    return answers


@contextmanager
def world(sharded: bool) -> Iterator[None]:
    """A process group of one rank if the model is sharded by FSDP2; else none."""
    if not sharded:
        yield
        return
    with playing_new_rank(0, 1):
        yield


@pytest.mark.parametrize("sharded", (False, True), ids=("plain", "FSDP2"))
@pytest.mark.parametrize(("fork", "count"), (("excluded", 20), ("shared", 20), ("inherited", 10)))
def test_children_read_right_values_or_get_an_error(
    directory: Path, values: dict[str, Any], fork: str, count: int, sharded: bool
) -> None:
    with world(sharded):
        model = loaded(directory, sharded=sharded, fork=fork)
        trainer = Trainer(model, fork=fork)
        answers = children_while_stepping(model, trainer, values["embed.weight"], count)
    if fork != "excluded":
        assert answers == [True] * count
        return
    for answer in answers:
        assert isinstance(answer, tuple), f"a child got no error: {answer!r}"
        name, words, is_ours = answer
        assert (name, is_ours) == ("UsageError", True) and WORDS in words, words
        assert 'fork="shared"' in words and f"[{ROWS}, {COLUMNS}]" in words, words


# ---- excluded


def test_metadata_can_be_read_in_a_child(directory: Path) -> None:
    model = loaded(directory)

    def act() -> Any:
        weight = model.embed.weight
        weight.requires_grad_(False)
        own = nn.Linear(3, 3)
        return (
            sum(parameter.numel() for parameter in model.parameters()),
            tuple(weight.shape), str(weight.dtype), weight.requires_grad, weight.grad is None,
            own(torch.ones(3)).shape[0], len({weight, own.weight}),
        )  # fmt: skip

    count = (ROWS + 8) * COLUMNS
    assert in_child(act)() == (count, (ROWS, COLUMNS), "torch.float32", False, True, 3, 2)
    assert model.embed.weight.requires_grad


def test_a_child_can_load_a_model(directory: Path, values: dict[str, Any]) -> None:
    model = loaded(directory)

    def act() -> bool:
        del model.head  # its memory is not in the child; the parent's must stay
        own = loaded(directory)
        return bool(torch.equal(own.embed.weight, values["embed.weight"]))

    assert in_child(act)() is True
    assert torch.equal(model.head.weight, values["head.weight"])


def test_a_grandchild_gets_the_error_too(directory: Path) -> None:
    model = loaded(directory)
    nested = in_child(lambda: in_child(lambda: model.head.weight.sum().item())())()
    assert isinstance(nested, tuple) and WORDS in nested[1]


def test_a_callers_context_that_ends_in_the_child_leaves_the_guard(directory: Path) -> None:
    """The guard is the function mode of torch that raises the error. When the context of
    `torch.device` ends, it removes the innermost mode, which must not be the guard."""
    model = loaded(directory)
    with torch.device("meta"):
        pid = os.fork()
    if pid == 0:
        code = 1
        try:
            on_cpu = torch.empty(1).device.type == "cpu"
            try:
                model.head.weight.sum()
            except UsageError:
                code = 0 if on_cpu else 2
        finally:
            os._exit(code)
    assert os.waitpid(pid, 0)[1] == 0


@pytest.mark.parametrize("act", ("step", "digest", "state_dict"))
def test_an_optimizer_without_its_state_is_refused_in_a_child(directory: Path, act: str) -> None:
    """The parameters are loaded with fork="shared". The optimizer's state has the default,
    "excluded"."""
    model = loaded(directory, fork="shared")
    trainer = Trainer(model, state_format="fp32")
    trainer.step()

    def call() -> str:
        if act == "step":
            return str(trainer.step())
        return str(getattr(trainer.optimizer, act)())

    answer = in_child(call)()
    assert isinstance(answer, tuple), answer
    assert answer[0] == "UsageError" and WORDS in answer[1], answer


def test_the_core_refuses_where_no_function_of_torch_is_called(directory: Path) -> None:
    """The guard sees only calls of torch's functions. Calls of Modicum's core (the C++ library)
    must raise an error, too, and not end in SIGSEGV."""
    trainer = Trainer(loaded(directory, fork="shared"), state_format="fp32")
    trainer.step()
    state = trainer.optimizer._bound.states[0]
    for act in (state.digest, state.refresh_masters):
        answer = in_child(act)()
        assert isinstance(answer, tuple), answer
        name, text, is_ours = answer
        assert (name, is_ours) == ("UsageError", True)
        assert "forked without the memory of the optimizer" in text


# ---- shared


class Lookups(Dataset):
    """A dataset of embedding rows."""

    def __init__(self, embed: nn.Embedding) -> None:
        self.embed = embed

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> Any:
        with torch.no_grad():
            return self.embed(torch.tensor(index))


def batches_of(model: Any, workers: int = 4) -> DataLoader:
    return DataLoader(
        Lookups(model.embed), batch_size=4, num_workers=workers, multiprocessing_context="fork"
    )


def test_a_loader_of_four_workers_runs_through_steps(
    directory: Path, values: dict[str, Any]
) -> None:
    model = loaded(directory, fork="shared")
    trainer = Trainer(model)
    seen = []
    for batch in batches_of(model):
        seen.append(batch)
        trainer.step()
    assert trainer.steps == 16
    assert is_right(torch.cat(seen), values["embed.weight"][:64], trainer.steps)


def test_a_data_loader_gets_the_error_by_default(directory: Path) -> None:
    model = loaded(directory)
    with pytest.raises(UsageError, match=WORDS):
        next(iter(batches_of(model, workers=1)))


def test_a_childs_writes_are_seen_with_shared_but_not_with_inherited(directory: Path) -> None:

    def write() -> float:
        with torch.no_grad():
            model.head.weight[0, 0] = 7.0
        return model.head.weight[0, 0].item()

    for fork, is_seen in (("shared", True), ("inherited", False)):
        model = loaded(directory, fork=fork)
        assert in_child(write)() == 7.0
        assert (model.head.weight[0, 0].item() == 7.0) is is_seen


def test_shared_memory_outlives_the_parents_tensors(
    directory: Path, values: dict[str, Any]
) -> None:
    """A child reads after its parent has freed all parameters. Until the parent frees the last one,
    the ledger charges the whole mapping, since parts of shared memory cannot be freed."""
    ledger = modicum.Ledger()
    model = loaded(directory, fork="shared", ledger=ledger)
    mapping_bytes = ledger.held["shards"]
    read, write = os.pipe()

    def act() -> bool:
        os.read(read, 1)
        own = torch.cat([model.embed.weight.reshape(-1), model.head.weight.reshape(-1)])
        expected = torch.cat([of.reshape(-1) for of in values.values()])
        return bool(torch.equal(own, expected))

    wait = in_child(act)
    del model.embed
    assert ledger.held["shards"] == mapping_bytes
    del model.head
    assert "shards" not in ledger.held
    os.write(write, b"x")
    assert wait() is True


# ---- memory


def figures(*pids: int) -> dict[str, int]:
    """The anonymous and the shared memory of these processes together, in bytes. A page that
    several of them have counts once (Pss)."""
    held = {"Pss_Anon": 0, "Pss_Shmem": 0}
    for pid in pids:
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            name = line.split(":")[0]
            if name in held:
                held[name] += int(line.split()[1]) * 1024
    return held


def held_by_a_node(directory: str, fork: str) -> dict[str, Any]:
    """An act. The entries of the ledger, and the memory before the load, with four children alive,
    and after the steps of the parent have written to all of it."""
    with modicum.torch.empty_parameters():
        model = nn.Linear(4096, 1024, bias=False)
    ledger = modicum.Ledger()
    before = figures(os.getpid())
    modicum.torch.load(
        model,
        directory,
        memory=modicum.torch.MemoryPolicy(ledger=ledger, fork=fork),
        budget="none",
        progress=False,
    )
    trainer = Trainer(model, ledger=ledger, fork=fork)
    held = dict(ledger.held)
    trainer.step()
    with living_children(4) as pids:
        time.sleep(0.2)
        idle = figures(os.getpid(), *pids)
        for _ in range(2):
            trainer.step()
        busy = figures(os.getpid(), *pids)
    return {"ledger": held, "before": before, "idle": idle, "busy": busy}


@pytest.fixture(scope="module")
def new_process(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    """A process that shares no page with others but its own children, and measures itself."""
    pytest.importorskip("transformers")  # which the ranks import
    with ranks(1, tmp_path_factory.mktemp("fork") / "rank", fresh=True) as started:
        yield started


@pytest.mark.parametrize("fork", ("excluded", "shared", "inherited"))
def test_the_node_holds_what_the_ledger_says(new_process: Ranks, tmp_path: Path, fork: str) -> None:
    """With "inherited" the parent's writes copy pages, for which the ledger has the entry
    "fork"."""
    save_file({"weight": torch.rand(1024, 4096)}, tmp_path / "model.safetensors")
    (answer,) = new_process.ask(held_by_a_node, directory=str(tmp_path), fork=fork)
    held = answer["ledger"]
    # What children may have: parameters and optimizer state, but not the staging.
    used_bytes = sum(n for p, n in held.items() if p not in ("fork", "staging"))
    copies_bytes = held.get("fork", 0)
    assert copies_bytes == (used_bytes if fork == "inherited" else 0)
    slack_bytes = 8 * MIB  # for pages of Python that are copied, and page tables of children
    grown = sum(answer["busy"].values()) - sum(answer["idle"].values())
    assert copies_bytes // 2 <= grown + slack_bytes and grown <= copies_bytes + slack_bytes
    shared_bytes = used_bytes if fork == "shared" else 0
    in_memory = answer["busy"]["Pss_Shmem"] - answer["before"]["Pss_Shmem"]
    assert abs(in_memory - shared_bytes) <= slack_bytes


def test_copies_are_in_promise_and_budget(directory: Path) -> None:
    recipe = modicum.walk.make_recipe(modicum.walk.open_checkpoint(directory))
    layout = modicum.walk.make_layout(recipe, ranks=1)
    promised, held = {}, {}
    for fork in ("excluded", "shared", "inherited"):
        plan = modicum.walk.make_plan(recipe, layout, staging="1MiB", fork=fork)
        loaded = modicum.walk.load(plan)
        promised[fork], held[fork] = plan.promised_bytes(0), loaded.ledger.held
        peak = loaded.ledger.peak_bytes
        assert peak == plan.ledger_limit_bytes(0), f"{fork}: {peak}"
    shards = held["excluded"]["shards"]
    assert promised["shared"] == promised["excluded"]
    assert shards <= promised["inherited"] - promised["excluded"] <= shards + 8192
    assert [of.get("fork", 0) for of in held.values()] == [0, 0, shards]
    budget = promised["inherited"] + (8 << 20)  # the launcher's process is assumed to have 8 MiB
    modicum.walk.make_plan(recipe, layout, staging="1MiB", budget=budget, fork="inherited")
    with pytest.raises(BudgetError) as met:
        modicum.walk.make_plan(recipe, layout, staging="1MiB", budget=budget - 1, fork="inherited")
    assert {"purpose": "fork", "bytes": shards} in met.value.owners
    # The state has 24 KiB, and with "inherited" 24 KiB more for its copies.
    small = modicum.Ledger(40 * 1024)
    with pytest.raises(BudgetError, match="AdamW"):
        modicum.torch.AdamW(
            [nn.Parameter(torch.ones(2048))],
            memory=modicum.torch.MemoryPolicy(ledger=small, fork="inherited"),
        )
    modicum.torch.AdamW(
        [nn.Parameter(torch.ones(2048))], memory=modicum.torch.MemoryPolicy(ledger=small)
    )


# ---- arguments


def test_unknown_values_of_fork_are_refused_with_the_choices(directory: Path) -> None:
    with modicum.torch.empty_parameters():
        model = Model()
    for call in (
        lambda fork: modicum.torch.load(
            model, directory, memory=modicum.torch.MemoryPolicy(fork=fork)
        ),
        lambda fork: modicum.torch.AdamW(
            [nn.Parameter(torch.ones(3))], memory=modicum.torch.MemoryPolicy(fork=fork)
        ),
        lambda fork: loading(memory=MemoryPolicy(fork=fork)).__enter__(),
        lambda fork: modicum.torch.fsdp2_load_full_state_dict(
            model, str(directory), memory=modicum.torch.MemoryPolicy(fork=fork)
        ),
    ):
        with pytest.raises(UsageError, match="excluded, shared or inherited.*share") as met:
            call("share")
        assert "nearest is 'shared'" in str(met.value)
        with pytest.raises(UsageError, match="excluded, shared or inherited"):
            call(3)
    assert model.head.weight.is_meta
