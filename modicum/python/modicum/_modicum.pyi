from collections.abc import Mapping, Sequence
import os
from typing import overload


def version() -> str:
    """The version of the library, as in the wheel."""

def exit_codes() -> dict[str, int]:
    """The exit code of each category of errors."""

def inspect(path: str | os.PathLike) -> dict:
    """
    What is in a checkpoint; reads headers, index and config only.

    Args:
        path: a directory, a safetensors file, or `org/name` in the local Hugging Face cache.

    Returns:
        The document of `modicum inspect --json`: checkpoint, model_type, tie_word_embeddings,
        dtypes, files, tensors, warnings. Bytes are integers.

    Raises:
        FormatError: a header or the index is malformed.
        IoError: a file can't be read.
    """

def plan(path: str | os.PathLike, *, ranks: int = 1, ranks_per_node: int | None = None, strategy: str = 'own-shard', layout: str = 'fsdp2', mesh: str | None = None, shard_dim: int = 0, tp_rowwise: str | None = None, tp_packed: str | None = None, tp_replicate: str | None = None, expert_mesh: str | None = None, experts: str = '\\.experts\\.', round_robin: bool = False, dtype: str | None = None, keep_fp32: str | None = None, recipe: str | os.PathLike | None = None, untie: bool = False, destination: str = 'cpu', staging: int | str | None = None, budget: int | str | None = None, baseline: int | str | None = None, optimizer: str = 'none', deepspeed: str | os.PathLike | None = None, workers: int = 0, persistent_workers: bool = False) -> dict:
    """
    Who reads what, and what each rank and node will hold, by strategy.

    Reads headers, index and config only; no rank is started. Sizes are bytes, or text as on
    the command line ("512MB", "1.5GiB").

    Args:
        path: a directory, a safetensors file, or `org/name` in the local Hugging Face cache.
        ranks: rank processes, 1 to 65536.
        ranks_per_node: None: all on one node.
        strategy: whose verdict `fits` is: own-shard, node-reader, replica-striped,
            rank0-broadcast or full-per-rank.
        layout: fsdp2, hsdp, tp-fsdp, zero1, zero2, zero3, or none (every rank holds everything).
        mesh: "AxB": of hsdp replicas x shards, of tp-fsdp dp x tp; "AxBxC": shards or dp of two axes.
        shard_dim: the tensor dim that is cut.
        tp_rowwise: names (a regular expression) that TP cuts along dim 1; the rest along dim 0.
        tp_packed: names of two packed halves (gate and up), each cut by itself along dim 0.
        tp_replicate: names that TP does not cut.
        expert_mesh: "AxB": experts are dealt to B ranks along dim 0, then FSDP cuts them A times.
        experts: names of the experts, a regular expression.
        round_robin: of zero1 and zero2: as DeepSpeed's round_robin_gradients.
        dtype: float32, bfloat16 or float16; None: as stored.
        keep_fp32: a regular expression; tensors whose names it matches are loaded as float32.
        recipe: a recipe.json; None: every tensor as it is.
        untie: whether what is stored under both names of a tie is loaded as two tensors; else a load
            compares them.
        destination: cpu, or discard (digest and drop).
        staging: per rank, committed whole; None: 8 MiB, less where a budget needs it.
        budget: host memory per node; "auto": what the cgroup and the node leave; None: no verdict.
        baseline: what a rank process holds before Modicum; None: 2 MiB, as the rank processes of
            `modicum load` do. One that has imported torch holds more: "256MiB" is a fair guess.
        optimizer: "none", or "adamw:FORMAT": what is loaded will be trained.
        deepspeed: a ds_config.json; None: no forecast of what DeepSpeed itself would hold.
        workers: of `deepspeed`: forked data-loader workers of a rank, 0 to 1024.
        persistent_workers: of `deepspeed`: whether they live for all epochs.

    Returns:
        The document of `modicum plan --json`: checkpoint, ranks, strategies, budget, fits. What
        does not fit is an answer (`fits` is False), not an error.

    Raises:
        FormatError: a header or the index is malformed.
        IoError: a file can't be read.
        UsageError: an argument makes no sense, or the recipe is not one for this checkpoint.
    """

def open_tensors(tensors: Sequence[tuple[str, str, Sequence[int]]], read: object | None) -> Checkpoint:
    """
    Tensors in rank 0's memory as a checkpoint, whose bytes rank 0 alone can read.

    Args:
        tensors: (name, dtype, shape) each, the same on every rank.
        read: of rank 0: fills a view with the bytes of a tensor, read(index, offset, view). Called on
            the thread that calls load().

    Raises:
        FormatError, UsageError.
    """

class Checkpoint:
    """A checkpoint whose headers have been read and proven."""

    @property
    def bytes(self) -> int:
        """Bytes of tensor data."""

    @property
    def stored(self) -> dict:
        """
        Dtype and shape of each stored tensor by name, in the order of the files.
        """

    @property
    def warnings(self) -> list:
        """What is optional and broken, unused or odd: a line of text for each."""

class Recipe:
    """How each target is made of stored tensors."""

    @property
    def targets(self) -> list:
        """A dict for each target: name, dtype, shape, alias_of (a name or None)."""

    @property
    def text(self) -> str:
        """recipe.json."""

class Layout:
    """Which elements of each target each rank holds, and where."""

    @property
    def ranks(self) -> int:
        """World size."""

class Plan:
    """What will be read, put where and held, for every rank."""

    @property
    def ranks(self) -> int:
        """World size."""

    @property
    def strategy(self) -> str:
        """The strategy's name."""

    @property
    def recipe(self) -> Recipe:
        """What was planned."""

    @property
    def digest(self) -> str:
        """Of everything that decides what happens, as hex."""

    @property
    def document(self) -> dict:
        """As `modicum plan --json`, for this one strategy."""

    def buffers(self, rank: int) -> list:
        """
        A dict for each target: holder (the target whose memory it is), numel, padded_numel, bytes, shape (this rank's part without padding).
        """

    def promised_bytes(self, rank: int) -> int:
        """The most that the rank's process will hold, in bytes."""

    def ledger_limit_bytes(self, rank: int) -> int:
        """The same without the process itself and page tables."""

    def exchange_group(self, rank: int) -> list[int]:
        """The ranks that hand bytes on to each other, `rank` among them."""

class NamePattern:
    """
    Names by a regular expression in RE2's syntax.

    Args:
        argument: what the user gave it to.
        expression: without look-around and back-references.

    Raises:
        UsageError: USAGE, with RE2's reason.
    """

    def __init__(self, argument: str, expression: str) -> None: ...

    def finds(self, name: str) -> bool:
        """Whether it matches somewhere in `name`."""

def open_checkpoint(path: str | os.PathLike | None) -> Checkpoint:
    """
    Opens headers, index and config of a checkpoint and proves its layout.

    Args:
        path: a directory, a safetensors file, or `org/name` in the local Hugging Face cache; None: a
            checkpoint without tensors.

    Raises:
        FormatError, IoError.
    """

def make_recipe(checkpoint: Checkpoint, text: str | None = None, *, dtype: str | None = None, keep_fp32: str | None = None, untie: bool = False) -> Recipe:
    """
    How each target is made of the checkpoint's tensors.

    Args:
        checkpoint: of open_checkpoint.
        text: recipe.json (docs/reference/recipes.md); None: every tensor as it is.
        dtype: float32, bfloat16 or float16; None: as stored.
        keep_fp32: a regular expression; tensors whose names it matches are loaded as float32.
        untie: whether what is stored under both names of a tie is loaded as two tensors.

    Raises:
        UsageError: the recipe is not one for this checkpoint.
    """

@overload
def make_layout(recipe: Recipe, ranks: int, layout: str = 'fsdp2', *, mesh: str | None = None, shard_dim: int = 0, tp_rowwise: str | None = None) -> Layout:
    """
    The targets cut for a mesh, as `--layout` of the command line.

    Args:
        recipe: of make_recipe.
        ranks: world size.
        layout: none, fsdp2, hsdp, tp-fsdp, zero1, zero2 or zero3.
        mesh: "AxB": of hsdp replicas x shards, of tp-fsdp dp x tp.
        shard_dim: the tensor dim that is cut.
        tp_rowwise: names (a regular expression) that TP cuts along dim 1; the rest along dim 0.
    """

@overload
def make_layout(recipe: Recipe, *, shardings: Sequence[tuple[Sequence[int], Sequence[tuple[Sequence[int], int, int, bool]]]], sharding_of: Sequence[int]) -> Layout:
    """
    The targets cut as they say each for itself.

    Args:
        recipe: of make_recipe.
        shardings: (mesh, cuts) each: sizes of the mesh axes over the whole world, outermost first, and
            the cuts in the order in which they are made, (mesh axes, tensor dim, packed parts, pads).
        sharding_of: for each target the index of its sharding.
    """

class Shard:
    """
    A rank's shard of one tensor; needs no recipe.

    Args:
        sharding: (mesh, cuts) as for make_layout.
        shape: of the whole tensor.
        rank: of the world.
    """

    def __init__(self, sharding: tuple[Sequence[int], Sequence[tuple[Sequence[int], int, int, bool]]], shape: Sequence[int], rank: int) -> None: ...

    @property
    def shape(self) -> tuple:
        """Without padding."""

    def runs(self, order: Sequence[int]) -> list[tuple[int, int]]:
        """
        Its elements of the tensor, as runs (first, n), in memory order.

        Args:
            order: the dims by which the shard is contiguous, slowest first; elements are counted by it,
                too: [0, 1, ...] is row-major.
        """

    @property
    def replicas(self) -> list[int]:
        """The ranks, its own among them, that hold the same elements; ascending."""

def make_plan(recipe: Recipe, layout: Layout, *, strategy: str = 'own-shard', ranks_per_node: int | None = None, destinations: Sequence[str] = [], staging: int | str | None = None, baseline: int | str | Sequence[int] | None = None, init_bytes: int = 0, caller_sends: bool = False, budget: int | str | None = None, budget_source: str = 'argument', fork: str = 'excluded') -> Plan:
    """
    Who reads what and what every rank will hold.

    Args:
        recipe: of make_recipe.
        layout: of make_layout.
        strategy: own-shard, node-reader, replica-striped, rank0-broadcast or full-per-rank.
        ranks_per_node: None: all on one node.
        destinations: for each target cpu, copy (only copies are taken, as by a device) or given (memory
            that the caller has); empty: all cpu.
        staging: per rank, committed whole; None: 8 MiB, less where a budget needs it.
        baseline: what a rank process holds before Modicum, or a list of that by rank; None: 2 MiB.
        init_bytes: the most that tensors made by the caller take at once.
        caller_sends: whether bytes are exchanged by the caller's own means.
        budget: host memory per node; None: no verdict.
        budget_source: what to call the budget where it is too small.
        fork: what forked children find of the shards: excluded, shared or inherited
            (docs/guide/workers.md).

    Raises:
        BudgetError: it does not fit; says by how much and who holds most.
    """

class RecipeBuilder:
    """
    What index maps make of stored tensors.

    Each call adds a node (docs/reference/recipes.md) and returns its number. No element is touched.

    Args:
        stored: dtype and shape by name.

    Raises:
        UsageError: MISMATCH where shapes or dtypes do not go together, UNSUPPORTED for a dtype that is
            not known and for more than eight dims; the constructor and every call.
    """

    def __init__(self, stored: Mapping[str, tuple[str, Sequence[int]]]) -> None: ...

    def stored(self, name: str) -> int:
        """A tensor of the checkpoint."""

    def cat(self, dim: int, inputs: Sequence[int]) -> int:
        """The inputs one after the other along `dim`."""

    def stack(self, dim: int, inputs: Sequence[int]) -> int:
        """The inputs along a new dim."""

    def slice(self, dim: int, start: int, stop: int, input: int) -> int:
        """`[start, stop)` of `dim`."""

    def permute(self, dims: Sequence[int], input: int) -> int:
        """Dim k of the node is dim `dims[k]` of the input."""

    def reshape(self, shape: Sequence[int], input: int) -> int:
        """The same row-major elements under another shape."""

    def described(self, node: int) -> tuple[str, list[int]]:
        """Dtype and shape of a node."""

class Ledger:
    """
    Where model-sized memory comes from, and what it is for.

    Args:
        limit: what may be held, bytes or text ("200GiB"); None: no limit.
    """

    def __init__(self, limit: int | str | None = None) -> None: ...

    @property
    def held_bytes(self) -> int:
        """Bytes held now."""

    @property
    def peak_bytes(self) -> int:
        """The most bytes held at once so far."""

    @property
    def held(self) -> dict:
        """Bytes held now, by purpose; largest first."""

    @property
    def at_peak(self) -> dict:
        """What was held when it was most, by purpose."""

    @property
    def limit_bytes(self) -> int | None:
        """What may be held, in bytes; None: no limit."""

    @limit_bytes.setter
    def limit_bytes(self, bytes: int | None) -> None: ...

    def require_room(self, needed: Mapping[str, int], what: str) -> None:
        """
        BudgetError where so much, in bytes by purpose, has no room beside what is held.
        """

def charge_init(ledger: Ledger, bytes: int) -> object:
    """
    Zeroed memory for tensors that a model makes itself; given back when it dies.
    """

class Exclusion:
    """
    Keeps whole pages of somebody else's memory out of forks.

    Args:
        address, bytes: of the pages; they stay mapped until `undo`.

    Raises:
        BudgetError: the kernel refuses, as for a driver's memory.
    """

    def __init__(self, address: int, bytes: int) -> None: ...

    def undo(self) -> None:
        """
        Children inherit the pages again. Where this process is a child that lacks them, zero pages take their place.
        """

def is_excluded_here(address: int) -> bool:
    """
    Whether this process lacks the memory there because it was forked without it.
    """

def has_exclusions_here() -> bool:
    """Whether there is any memory that this process was forked without."""

def require_fork(fork: str) -> None:
    """UsageError where it is not excluded, shared or inherited."""

class Board:
    """
    A rank among the others of a load.

    Args:
        peers: has barrier(), agree(digest) and report(document), which reach the others; None:
            alone.
    """

    def __init__(self, peers: object | None = None) -> None: ...

    def fail(self, what: str, rank: int = -1) -> None:
        """Cancels the load that runs, when it next checks. Any thread."""

    @property
    def progress(self) -> int:
        """Bytes read or received so far."""

class Loaded:
    """What a load has put into host memory."""

    def storage(self, target: int) -> object:
        """
        The bytes of a target's local buffer with its padding, and its charge: once each.
        """

    def whole(self) -> object:
        """
        All bytes as one, to be kept by `keep` only: from then on they are given back as one.
        """

    def keep(self, kept: object) -> None:
        """Keeps an object until just before the memory is given back."""

    @property
    def outcome(self) -> dict:
        """What this rank read and held."""

def load(plan: Plan, rank: int, board: Board, ledger: Ledger, *, given: dict = {}, copy: object | None = None, caller: object | None = None, broadcast: object | None = None, threads: int = 0, check: bool = False, seed: int = 0) -> Loaded:
    """Carries out one rank's part of a plan; see modicum.load."""

def load_report(plan: Plan, outcomes: Sequence[dict], checked: bool, budget: int | None = None, budget_source: str = '') -> tuple:
    """The document of `modicum load --json` and the text of `modicum load`."""

def parse_size(size: int | str) -> int:
    """Bytes of a size as the command line takes it."""

class AdamOptions:
    """What a user says of one parameter group."""

    def __init__(self, *, semantics: str = 'torch', lr: float = 0.001, betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-08, weight_decay: float = 0.01, decoupled: bool = True, amsgrad: bool = False, maximize: bool = False, bias_correction: bool = True) -> None: ...

class AdamW:
    """
    AdamW's state over the shards of a rank, taken whole when it is made.

    Args:
        shards: for each (fqn, runs, group, master, out): runs of neighbouring elements of the
            parameter as (first, n), ascending; an index into `groups`; the caller's array that is the
            master (float32, or the bfloat16 half of a split one) or None; the caller's bfloat16 or
            float16 array that gets the new parameters, or None. Arrays are kept alive.
        groups: options by group.
        format: of state_formats.
        ledger: what is taken is charged to it.
        seed: of the random bits; the same on every rank.
        threads: of construction and steps; 0: as many as the process may use CPUs.
        slots: of 128 KiB for each thread, through which new parameters can leave: `staging`.
        pin, unpin: called with address and bytes of each arena that a device touches; None: nothing
            is pinned.
        pin_limit: bytes that the process may still lock; None: no limit.
        fork: what forked children find of the state: excluded, shared or inherited.

    Raises:
        BudgetError: ledger or pin_limit don't suffice; before a page is touched.
        UsageError: shards, options and format don't go together.
    """

    def __init__(self, shards: Sequence[tuple[str, Sequence[tuple[int, int]], int, object, object]], groups: Sequence[AdamOptions], *, format: str, ledger: Ledger, seed: int = 0, threads: int = 0, slots: int = 0, pin: object | None = None, unpin: object | None = None, pin_limit: int | None = None, fork: str = 'excluded') -> None: ...

    def set_options(self, group: int, options: AdamOptions) -> None:
        """For the steps to come."""

    def arrive(self, shard: int, elements: object, at: int = 0) -> None:
        """A part of a shard's gradient, from local element `at` on."""

    def arrived_in_place(self, shards: Sequence[int]) -> None:
        """
        The same for whole shards whose gradients lie in the plane already; on all threads.
        """

    def leave_out(self, shard: int) -> None:
        """This step has no gradient for it."""

    def norms(self) -> tuple:
        """
        (sum of squares by shard, whether all are finite) of gradients as they arrived.
        """

    def step(self, unscale: float = 1.0, clip: float = 1.0, *, send: object | None = None, wait: object | None = None, dtype: str = 'bfloat16', refresh_masters: bool = False) -> None:
        """
        One step with all that has arrived. `send(shard, at, n, slot)`: n new values of `dtype`, of a shard from local element `at` on, lie at the beginning of a slot of `staging` until `wait(slot)` has returned; called on several threads. Not for split masters. An error of theirs is raised when the step has ended, which has stepped the state. `refresh_masters`: the method of this name first, in the same pass.
        """

    def refresh_masters(self) -> None:
        """
        Values of the arrays `out` that are not their masters rounded, as somebody has written them, become the masters.
        """

    def skip(self) -> None:
        """Forgets the gradients; no other byte changes."""

    @property
    def steps(self) -> list[int]:
        """Steps that each shard's parameter has made."""

    def set_steps(self, shard: int, steps: int) -> None:
        """Sets a parameter's count."""

    def plane(self, shard: int, plane: str) -> object:
        """
        The bytes of master, master_low, grad, exp_avg, exp_avg_sq or max_exp_avg_sq as they lie; they keep the state alive.
        """

    @property
    def staging(self) -> object:
        """The slots, as bytes that keep the state alive."""

    def scales(self, shard: int, plane: str) -> object:
        """The float32 scales of 8-bit moments, as bytes."""

    def export_to(self, shard: int, plane: str, to: object, at: int = 0) -> None:
        """Elements from `at` on as float32 values, exactly."""

    def import_from(self, shard: int, plane: str, values: object, at: int = 0) -> None:
        """
        From float32 values: exactly into fp32 and fp32-split, else rounded as a step rounds.
        """

    @property
    def footprint(self) -> dict:
        """What was charged, in bytes by purpose."""

    def digest(self) -> dict:
        """
        state and master: of values with their global indices, to be added up over ranks modulo 2^64.
        """

def adamw_footprint(shards: Sequence[tuple[str, Sequence[tuple[int, int]], int, object, object]], groups: Sequence[AdamOptions], *, format: str, slots: int = 0, threads: int = 1, fork: str = 'excluded') -> dict:
    """What AdamW of these will charge, in bytes by purpose."""

def clip_factor(norm: float, max_norm: float) -> float:
    """min(1, max_norm / (norm + 1e-6)), rounded once to float32."""

def state_formats() -> list:
    """A dict for each format: name, and the dtypes of its planes."""

def state_format_of(dtype: str, asked: str) -> str:
    """
    The format that steps a parameter of `dtype` when `asked` is asked for: a bfloat16 parameter takes any, the others fp32.
    """

def process_memory(pid: int = 0) -> dict:
    """
    held_bytes and peak_bytes (since reset_peak) of a process, by the kernel; 0: this one.
    """

def reset_peak() -> bool:
    """Starts peak_bytes anew; False where the kernel won't."""

def available_memory() -> tuple:
    """What the cgroup chain and the node leave, in bytes, and who says so."""

def granted_cpus() -> int:
    """CPUs that affinity and the cgroup chain's quota leave to this process."""

def descendants(pid: int = 0) -> list[int]:
    """The processes that a process has started, and theirs; 0: this one."""

def tree_memory(ranges: Sequence[tuple[int, int]], pid: int = 0) -> dict:
    """
    What a process and its descendants hold, and whose it is.

    Args:
        ranges: (begin, end) addresses of the process, ascending, without overlap.
        pid: the process; 0: this one.

    Returns:
        processes: by process, the first being `pid`: pid, forked (from the first one), anon_bytes,
        shmem_bytes (shared pages in equal parts), page_table_bytes. ranges: for each (own bytes, bytes
        that forked descendants hold in their place). rest: the same for the other addresses.

    Raises:
        IoError: the kernel doesn't say.
    """
