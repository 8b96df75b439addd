from collections.abc import Mapping, Sequence
import os
from typing import Annotated, Any, overload


def version() -> str:
    """The version of the library and the wheel."""

def exit_codes() -> dict[str, int]:
    """The exit code of each category of errors."""

def inspect(path: str | os.PathLike) -> dict:
    """
    The contents of a checkpoint. Reads headers, index and config only.

    Args:
        path: a directory, a safetensors file, or `org/name` in the local Hugging Face cache.

    Returns:
        The document of `modicum inspect --json`: checkpoint, model_type, tie_word_embeddings,
        dtypes, files, tensors, warnings. Numbers of bytes are integers.

    Raises:
        FormatError: a header or the index is malformed.
        IoError: a file can't be read.
    """

def plan(path: str | os.PathLike, *, ranks: int = 1, ranks_per_node: int | None = None, strategy: str = 'own-shard', layout: str = 'fsdp2', mesh: str | None = None, shard_dim: int = 0, tp_rowwise: str | None = None, tp_packed: str | None = None, tp_replicate: str | None = None, expert_mesh: str | None = None, experts: str = '\\.experts\\.', round_robin: bool = False, dtype: object | None = None, keep_fp32: str | None = None, recipe: str | os.PathLike | None = None, untie: bool = False, destination: str = 'cpu', device: bool = False, staging: int | str | None = None, budget: int | str | None = None, baseline: int | str | None = None, optimizer: str = 'none', frozen: str | None = None, deepspeed: str | os.PathLike | None = None, workers: int = 0, persistent_workers: bool = False, protect: bool = False) -> dict:
    """
    Which rank reads which bytes, and what each rank and node holds, by strategy.

    Reads headers, index and config only; starts no rank. Sizes are bytes, or text as on the command
    line ("512MB", "1.5GiB").

    Args:
        path: a directory, a safetensors file, or `org/name` in the local Hugging Face cache; of known
            models config.json is enough.
        ranks: number of rank processes, 1 to 65536.
        ranks_per_node: number of ranks on a node; None: all ranks are on one node.
        strategy: the strategy to which the result's `fits` refers: own-shard, node-reader,
            replica-striped, rank0-broadcast or full-per-rank.
        layout: fsdp2, hsdp, tp-fsdp, zero1, zero2, zero3, or none (every rank holds all tensors).
        mesh: "AxB": for hsdp A replicas of B shards, for tp-fsdp dp A and tp B. "AxBxC" has one mesh
            axis more: for hsdp it shards over B x C, for tp-fsdp dp is A x B.
        shard_dim: the tensor dim to shard.
        tp_rowwise: a regular expression; TP shards tensors with matching names on dim 1 instead of 0.
        tp_packed: a regular expression; tensors with matching names have two packed halves (gate and
            up), each of which TP shards on dim 0.
        tp_replicate: a regular expression; TP replicates tensors with matching names.
        expert_mesh: "AxB": EP shards experts on dim 0 over B ranks, then FSDP shards them over A.
        experts: a regular expression that matches the names of experts.
        round_robin: for zero1 and zero2: DeepSpeed's round_robin_gradients.
        dtype: float32, bfloat16 or float16, a torch.dtype or its name; None: as stored.
        keep_fp32: a regular expression; tensors with matching names are loaded as float32.
        recipe: a recipe.json; None: tensors as stored.
        untie: if both names of a tie are stored, load both tensors. By default a load compares them.
        destination: cpu, or discard: the elements are digested and dropped.
        device: whether parameters are on devices, and gradients and optimizer state on the host.
        staging: bytes per rank, committed before the load; None: 8 MiB, less if the budget requires it.
        budget: host memory per node; "auto": what the cgroup and the node have left; None: not checked.
        baseline: bytes that a rank process holds before the load; None: 2 MiB, as in `modicum load`. A
            process that has imported torch holds 0.3 to 1.5 GiB: `modicum.memory.held()` in a rank,
            after the model was built.
        optimizer: "none", or "adamw:FORMAT" to include the state of `AdamW(state_format=FORMAT)`. Never
            included: activations, and where parameters are on the CPU torch's own `grad` of bfloat16
            ones with fp32 (2 bytes per parameter).
        frozen: a regular expression; no state is included for parameters with matching names.
        deepspeed: a ds_config.json, to forecast DeepSpeed's own memory; None: no forecast.
        workers: for the forecast: forked data-loader workers per rank, 0 to 1024.
        persistent_workers: for the forecast: whether the workers live for all epochs.
        protect: for the forecast: whether the program calls `modicum.torch.protect`.

    Returns:
        The document of `modicum plan --json` (docs/reference/plan.md): checkpoint, ranks, strategies,
        budget, fits. A plan that exceeds the budget is no error: `fits` is False then, and there is
        `shortfall_bytes`. Without a budget `fits` is None. Nodes are in `strategies[i]["nodes"]`, a
        strategy for each `name`: `peak_bytes`, and `phases` of open, load, hold and step, each with
        `phase` and `bytes`. With `optimizer`, and without `device`, each node also has `job` of the
        whole job, a save and a resume on the same number of ranks included: `peak_bytes` and `phases`
        of load, step, save, resume and step_resumed. `job_fits` is about that save and resume, `fits`
        about load and steps; it is there with a budget, and `job_shortfall_bytes` if it is False. If
        either is False, `would_fit` has changes with which all fit, those on as many nodes first: dicts
        of `flags` (one text), all values with the changes (strategy, staging_bytes, state_format,
        dtype, ranks_per_node), `peak_bytes` of load and steps, and `lossless` or `lossy`, a text that
        says which values stay or get lost. A node's sum includes 8 MiB of the process that starts its
        ranks; torchrun holds about 150 MiB. `strategies[i]["ranks"]` has each rank's `peak_bytes` of
        load and steps.

        Not included: what torch allocates for activations, for units that FSDP2 has gathered and for
        communication. A process keeps much of it after its first steps (160 MiB and more), and a later
        `save(budget=)` counts it.

    Raises:
        FormatError: a header or the index is malformed.
        IoError: a file can't be read.
        UsageError: an argument is invalid, or the recipe is for another checkpoint.
    """

def report_page(title: str, runs: Sequence[tuple[str, str]], sentence: str = '') -> str:
    """
    The text of an HTML page about runs. `runs`: (label, text of a JSON document with `timeline` and `peak`) each. `sentence` is shown above the charts.
    """

def read_file(path: str | os.PathLike, *, too_long: str = 'INTEGRITY', most_bytes: int = 100000000) -> bytes:
    """
    The bytes of a regular file. Raises IoError, also for a FIFO, without waiting for its other end; an error of category `too_long` for a file of more than `most_bytes`, of which nothing is read.
    """

def is_uncached_name(path: str) -> bool:
    """
    Whether `path` is `org/name` of a model that is not in the local Hugging Face cache, and nothing has this path.
    """

def make_directory(path: str | os.PathLike) -> None:
    """
    Makes a directory. Raises IoError, also if a directory of the path is a symbolic link.
    """

def write_file(path: str | os.PathLike, data: bytes) -> None:
    """
    Writes and syncs a new file. Raises IoError, also if a directory of the path is a symbolic link.
    """

def rename(from_path: str | os.PathLike, to_path: str | os.PathLike) -> None:
    """Renames a file, a link or a directory. Raises IoError."""

def remove_tree(path: str | os.PathLike) -> None:
    """
    Removes a file, or a directory with everything in it. Removes links, and follows none. After a failure removes the rest, then raises IoError.
    """

def open_tensors(tensors: Sequence[tuple[str, str, Sequence[int]]], read: object | None) -> Checkpoint:
    """
    A checkpoint of tensors in rank 0's memory. Only rank 0 can read their bytes.

    Args:
        tensors: (name, dtype, shape) each; equal on every rank.
        read: on rank 0, read(index, offset, view) fills `view` with a tensor's bytes from `offset` on;
            it is called on the thread of load(). None on other ranks.

    Raises:
        FormatError: the tensors make no valid checkpoint.
        UsageError: a dtype is unknown.
    """

class Checkpoint:
    """A checkpoint, its headers read and validated."""

    @property
    def bytes(self) -> int:
        """Bytes of tensor data."""

    @property
    def stored(self) -> dict:
        """
        (dtype, shape) of each stored tensor by name, in the order of the files.
        """

    @property
    def warnings(self) -> list:
        """
        Warnings about optional parts of the checkpoint that are broken, unused or unusual; one line each.
        """

class Recipe:
    """
    A recipe that belongs to an opened checkpoint, from make_recipe.

    make_layout and make_plan take it. modicum.recipes.Recipe is another class: plain data that
    belongs to no checkpoint. From that class to this one: make_recipe(checkpoint, recipe.text()).
    From this class to that one: write `text` to a file, and modicum.recipes.read_recipe reads it.
    """

    @property
    def targets(self) -> list:
        """
        A dict for each target: name, dtype, shape, alias_of (a name or None), op (of its last node).
        """

    @property
    def unused(self) -> list[str]:
        """Names of the stored tensors that are not read."""

    @property
    def text(self) -> str:
        """The text of the recipe as a recipe.json."""

class Layout:
    """Which elements of each target each rank holds, and in which order."""

    @property
    def ranks(self) -> int:
        """World size."""

class Plan:
    """
    Which bytes each rank reads, where it puts them, and how much it holds.
    """

    @property
    def ranks(self) -> int:
        """World size."""

    @property
    def strategy(self) -> str:
        """The strategy's name."""

    @property
    def recipe(self) -> Recipe:
        """The recipe of the plan."""

    @property
    def checkpoint(self) -> Checkpoint:
        """The checkpoint of the plan."""

    @property
    def digest(self) -> str:
        """
        Digest of all inputs, in hex: ranks with equal digests have equal plans.
        """

    @property
    def document(self) -> dict:
        """The document of `modicum plan --json`, for this strategy only."""

    def buffers(self, rank: int) -> list:
        """
        A dict for each target: holder (the index of the target that owns the memory: for an alias, of the target that it names), numel, padded_numel, bytes, shape (of this rank's part, without padding).
        """

    def promised_bytes(self, rank: int) -> int:
        """The most bytes that the rank's process will hold."""

    def ledger_limit_bytes(self, rank: int) -> int:
        """promised_bytes without the process's baseline and page tables."""

    def ledger_peak(self, rank: int) -> dict:
        """ledger_limit_bytes by purpose."""

    def exchange_group(self, rank: int) -> list[int]:
        """The ranks with which `rank` exchanges bytes, itself included."""

class NamePattern:
    """
    A regular expression in RE2's syntax.

    Args:
        argument: name of the argument in an error.
        expression: without lookaround and back-references, which RE2 lacks.

    Raises:
        UsageError: the expression is invalid; the message has RE2's reason.
    """

    def __init__(self, argument: str, expression: str) -> None: ...

    def finds(self, name: str) -> bool:
        """Whether the expression matches somewhere in `name`."""

def open_checkpoint(path: str | os.PathLike | None, *, in_save: bool = False) -> Checkpoint:
    """
    Opens a checkpoint: reads and validates headers, index and config.

    Args:
        path: a directory, a safetensors file, or `org/name` in the local Hugging Face cache; None: a
            checkpoint without tensors.
        in_save: a save, which may itself be in flight in the directory, opens it.

    Raises:
        FormatError: a header or the index is malformed.
        IntegrityError: a file differs from its record (INTEGRITY); a save into the directory is in
            flight or was interrupted (UNCOMMITTED).
        IoError: a file can't be read.
    """

def make_recipe(checkpoint: Checkpoint, text: str | None = None, *, dtype: str | None = None, keep_fp32: str | None = None, untie: bool = False) -> Recipe:
    """
    Makes the recipe: how each target is made of the checkpoint's tensors.

    Args:
        checkpoint: from open_checkpoint.
        text: recipe.json (docs/reference/recipes.md); None: tensors as stored.
        dtype, keep_fp32, untie: as for modicum.plan.

    Raises:
        UsageError: the recipe is for another checkpoint.
    """

@overload
def make_layout(recipe: Recipe, ranks: int, layout: str = 'fsdp2', *, mesh: str | None = None, shard_dim: int = 0, tp_rowwise: str | None = None) -> Layout:
    """
    Shards the targets by a named layout: make_layout(recipe, 8) for FSDP2 on 8 ranks.

    Args:
        recipe: from make_recipe.
        ranks: world size.
        layout, mesh, shard_dim, tp_rowwise: as for modicum.plan.
    """

@overload
def make_layout(recipe: Recipe, *, shardings: Sequence[tuple[Sequence[int], Sequence[tuple[Sequence[int], int, int, bool]]]], sharding_of: Sequence[int]) -> Layout:
    """
    Shards each target by its own sharding, for programs that read them from a model.

    Args:
        recipe: from make_recipe.
        shardings: (mesh, cuts) each. mesh: the sizes of the mesh axes over all ranks, outermost first.
            cuts: (mesh axes, tensor dim, packed parts, pads) each, in order.
        sharding_of: for each target the index of its sharding.
    """

class Shard:
    """
    A rank's shard of one tensor.

    Args:
        sharding: (mesh, cuts) like those of make_layout.
        shape: shape of the complete tensor.
        rank: global rank.
    """

    def __init__(self, sharding: tuple[Sequence[int], Sequence[tuple[Sequence[int], int, int, bool]]], shape: Sequence[int], rank: int) -> None: ...

    @property
    def shape(self) -> tuple:
        """The shard's shape without padding."""

    def runs(self, order: Sequence[int]) -> list[tuple[int, int]]:
        """
        The shard's elements as runs (first, n) of the tensor's elements, in memory order.

        Args:
            order: dims from slowest to fastest; [0, 1, ...] is row-major. The shard is contiguous in this
                order, and the tensor's elements are counted in it.
        """

    @property
    def replicas(self) -> list[int]:
        """The ranks that hold the same elements, `rank` included; ascending."""

def make_plan(recipe: Recipe, layout: Layout, *, strategy: str = 'own-shard', ranks_per_node: int | None = None, destinations: Sequence[str] = [], staging: int | str | None = None, baseline: int | str | Sequence[int] | None = None, init_bytes: int = 0, caller_sends: bool = False, budget: int | str | None = None, budget_source: str = 'argument', fork: str = 'excluded', after: Sequence[Mapping[str, int]] = [], save: StateFiles | None = None) -> Plan:
    """
    Makes the plan of a load. modicum.make_plan documents the other arguments.

    Args:
        destinations: for each target cpu, copy (load calls `copy` with the elements, for example for a
            device) or given (the caller's memory); empty: cpu for all.
        baseline: bytes, or a list of bytes by rank.
        init_bytes: bytes of the largest tensor that load's `caller` makes.
        caller_sends: whether the caller's transport sends bytes between ranks.
        budget_source: name of the budget's source in an error.
        after: by rank, the bytes by purpose that an optimizer takes after the load; empty: nothing.
        save: StateFiles of that optimizer. Then the promise covers a save of model and state, if they
            can be saved.
    """

class RecipeBuilder:
    """
    Builds index maps of stored tensors (docs/reference/recipes.md).

    Every method except `described` adds a node and returns its number. No element is read.

    Args:
        stored: (dtype, shape) of each stored tensor, by name.

    Raises:
        UsageError: MISMATCH if an operation does not fit the shapes or dtypes of its inputs, or if a
            name is unknown; UNSUPPORTED for an unknown dtype, or for more than eight dims. Every method
            may raise it.
    """

    def __init__(self, stored: Mapping[str, tuple[str, Sequence[int]]]) -> None: ...

    def stored(self, name: str) -> int:
        """The stored tensor `name`."""

    def cat(self, dim: int, inputs: Sequence[int]) -> int:
        """The inputs, concatenated along `dim`."""

    def stack(self, dim: int, inputs: Sequence[int]) -> int:
        """The inputs, stacked along a new dim."""

    def slice(self, dim: int, start: int, stop: int, input: int) -> int:
        """Indices `[start, stop)` of the input along `dim`."""

    def permute(self, dims: Sequence[int], input: int) -> int:
        """Dim k of the node is dim `dims[k]` of the input."""

    def reshape(self, shape: Sequence[int], input: int) -> int:
        """The input's elements in row-major order, with another shape."""

    def described(self, node: int) -> tuple[str, list[int]]:
        """Dtype and shape of a node."""

class Ledger:
    """
    Accounts for model-sized memory, by purpose, within a limit.

    Args:
        limit: bytes, or text ("200GiB"); None: no limit.
    """

    def __init__(self, limit: int | str | None = None) -> None: ...

    @property
    def held_bytes(self) -> int:
        """Bytes held now."""

    @property
    def peak_bytes(self) -> int:
        """The highest held_bytes so far."""

    @property
    def held(self) -> dict:
        """Bytes held now, by purpose; largest first."""

    @property
    def at_peak(self) -> dict:
        """Bytes held at the peak, by purpose; largest first."""

    @property
    def limit_bytes(self) -> int | None:
        """The limit in bytes; None: no limit."""

    @limit_bytes.setter
    def limit_bytes(self, bytes: int | None) -> None: ...

    def require_room(self, needed: Mapping[str, int], what: str) -> None:
        """
        Raises BudgetError if the bytes held and `needed`, bytes by purpose, together exceed the limit. Purposes are those of `held`: process, page_tables, header, plan, shards, window, master, grad, moments, staging, init, snapshot and fork; another is a UsageError. What the ledger is not charged with, such as the process itself or copies of forked workers, is to be added as `process` or `fork`. `what` says in the error what needs them.
        """

def charge_init(ledger: Ledger, bytes: int) -> object:
    """
    An array of zeroed memory for a tensor that the model initialises. The memory is freed with the array.
    """

class Exclusion:
    """
    Excludes whole pages of the caller's memory from forked children.

    Args:
        address, bytes: the pages, which must stay mapped until `undo`.

    Raises:
        BudgetError: the kernel refuses, for example for memory of a driver.
    """

    def __init__(self, address: int, bytes: int) -> None: ...

    def undo(self) -> None:
        """
        Lets later children inherit the pages again. In a child without them, maps zero pages there.
        """

def is_excluded_here(address: int) -> bool:
    """
    Whether the memory at this address was excluded from the fork that made this process.
    """

def has_exclusions_here() -> bool:
    """Whether any memory was excluded from the fork that made this process."""

def require_fork(fork: str) -> None:
    """Raises UsageError unless `fork` is excluded, shared or inherited."""

class Board:
    """
    Connects a rank to the other ranks of a load, save or resume.

    Args:
        peers: an object with the methods barrier(), agree(digest) and report(document); None: there is
            one rank.
    """

    def __init__(self, peers: object | None = None) -> None: ...

    def fail(self, what: str, rank: int = -1) -> None:
        """
        Cancels the running load or save at its next check. Any thread may call it. `what`: the reason; `rank`: the rank that has failed, or -1.
        """

    @property
    def progress(self) -> int:
        """Bytes read, received or written so far."""

class Loaded:
    """The host memory that a load has filled."""

    def storage(self, target: int) -> object:
        """
        The bytes of a target's local buffer, with padding, as an array that owns them. At most one call per target.
        """

    def whole(self) -> object:
        """
        All bytes as one array, for pinning. From now on they are freed together. The array does not own them; pass it to `keep`.
        """

    def keep(self, kept: object) -> None:
        """Keeps `kept` alive until just before the memory is freed."""

    @property
    def outcome(self) -> dict:
        """Rank, pid, bytes and seconds of this load."""

def load(plan: Plan, rank: int, board: Board, ledger: Ledger, *, given: dict = {}, copy: object | None = None, caller: object | None = None, broadcast: object | None = None, threads: int = 0, check: bool = False, seed: int = 0) -> Loaded:
    """
    Executes one rank's part of a plan. `given`: host memory by target, for destination `given`. `copy(target, at, view)` receives elements for destination `copy`, of which the first is element `at`. `caller(ordinal)` returns a tensor that the model makes. `broadcast(root, view, begin, end)` sends `view` from the rank number `root` of the exchange group to the others, which need its bytes [begin, end). modicum.load documents the other arguments.
    """

def compared_values(checkpoint: Checkpoint, of_ranks: Sequence[str], folder: str = '') -> dict:
    """
    The values of a checkpoint that all ranks together have compared with its record: a dict with compared_bytes and not_compared. `of_ranks`: the outcome's `compared` of each rank. Raises IntegrityError if a value differs. `folder`: for an error, the place of the files in the saved checkpoint.
    """

def load_report(plan: Plan, outcomes: Sequence[dict], checked: bool, budget: int | None = None, budget_source: str = '', compared: dict | None = None) -> tuple:
    """The document of `modicum load --json` and the text of `modicum load`."""

def parse_size(size: int | str) -> int:
    """
    The bytes of a size: an integer, or text with a unit of 1000 ("5GB") or of 1024 ("5GiB", "5G").
    """

def cast_masters(masters: Annotated[Any, dict(dtype='uint8', shape=(None,), order='C', device='cpu')], to: Annotated[Any, dict(dtype='uint8', shape=(None,), order='C', device='cpu')], form: str) -> None:
    """
    Fills `to` from the bytes of float32 `masters`. `form`: a dtype, to which they are rounded to nearest even; or "upper" or "lower", the bfloat16 or int16 half of a split master.
    """

class AdamOptions:
    """The options of one parameter group."""

    def __init__(self, *, semantics: str = 'torch', lr: float = 0.001, betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-08, weight_decay: float = 0.01, decoupled: bool = True, amsgrad: bool = False, maximize: bool = False, bias_correction: bool = True) -> None: ...

class AdamWShard:
    """
    A rank's elements of a parameter, to make an AdamW.

    Args:
        fqn: the parameter's name.
        shape: of the complete parameter.
        runs: (first, number) of the elements, ascending.
        group: an index into the groups of the AdamW.
        master: an array to use as the master (float32, or the bfloat16 half of a split master); None:
            the AdamW has memory for it.
        out: a bfloat16 or float16 array that receives new parameters, or None.
    """

    def __init__(self, fqn: str, shape: Sequence[int], runs: Sequence[tuple[int, int]], group: int = 0, master: object | None = None, out: object | None = None) -> None: ...

class AdamW:
    """
    AdamW's state over the shards of a rank. All memory is allocated here.

    Args:
        shards: the shards; the state keeps their arrays alive.
        groups: options by group.
        format: the name of a state format, see state_formats.
        ledger: is charged for all memory.
        seed: for stochastic rounding; equal on every rank.
        threads: for construction and steps; 0: one per usable CPU.
        slots: number of slots of SLOT_BYTES per thread, for `send` of a step; see `staging`.
        pin, unpin: called with address and bytes of each block of memory that a device accesses; None:
            not pinned.
        pin_limit: bytes that the process may still lock; None: no limit.
        fork: how forked children see the state: excluded, shared or inherited.

    Raises:
        BudgetError: BUDGET if the state needs more than the ledger's limit or pin_limit, before a page
            is touched; NOMEM if the kernel refuses memory.
        UsageError: shards, options and format do not match.
    """

    def __init__(self, shards: Sequence[AdamWShard], groups: Sequence[AdamOptions], *, format: str, ledger: Ledger, seed: int = 0, threads: int = 0, slots: int = 0, pin: object | None = None, unpin: object | None = None, pin_limit: int | None = None, fork: str = 'excluded') -> None: ...

    def set_options(self, group: int, options: AdamOptions) -> None:
        """Sets the options of a group, from the next step on."""

    def arrive(self, shard: int, elements: object, at: int = 0) -> None:
        """
        Stores part of a shard's gradient, from local element `at` on. In each step every element must arrive once.
        """

    def arrived_in_place(self, shards: Sequence[int]) -> None:
        """
        Like arrive, for complete shards whose gradients are in the plane `grad`. Uses all threads.
        """

    def leave_out(self, shard: int) -> None:
        """Declares that a shard has no gradient in this step."""

    def norms(self) -> tuple:
        """
        (sums, finite): the sum of squares of the gradients of each shard that have arrived, and whether all gradients are finite.
        """

    def step(self, unscale: float = 1.0, clip: float = 1.0, *, send: object | None = None, wait: object | None = None, dtype: str = 'bfloat16', refresh_masters: bool = False) -> None:
        """
        Makes one step with the gradients that have arrived. Calls `send(shard, at, n, slot)` when `n` new values in `dtype`, of a shard from local element `at` on, are at the beginning of a slot of `staging`. They stay there until `wait(slot)` has returned. For a split master, `slot` is -1: the values are in the plane `master`, and `wait` is not called. Both are called on several threads. Their first error is raised after the step, which is complete nevertheless. `refresh_masters`: whether to call refresh_masters first.
        """

    def refresh_masters(self) -> None:
        """
        Copies the values that the caller has written to the arrays `out` into the masters. A value that equals the rounded master is not copied.
        """

    def skip(self) -> None:
        """Discards the gradients; changes nothing else."""

    @property
    def steps(self) -> list[int]:
        """The step count of each shard's parameter."""

    def set_steps(self, shard: int, steps: int) -> None:
        """Sets the step count of a shard's parameter."""

    def plane(self, shard: int, plane: str) -> object:
        """
        The bytes of master, master_low, grad, exp_avg, exp_avg_sq or max_exp_avg_sq; the array keeps the state alive.
        """

    @property
    def staging(self) -> object:
        """The bytes of the slots; the array keeps the state alive."""

    def scales(self, shard: int, plane: str) -> object:
        """The float32 scales of 8-bit moments, as bytes."""

    def export_to(self, shard: int, plane: str, to: object, at: int = 0) -> None:
        """
        Fills `to`, a float32 array, with the values of a plane from element `at` on.
        """

    def import_from(self, shard: int, plane: str, values: object, at: int = 0) -> None:
        """
        Stores float32 values in a plane, from element `at` on. They are exact in float32 planes and in split masters of 32 bits, the nearest codes in 8-bit moments, and rounded as in a step otherwise.
        """

    @property
    def footprint(self) -> dict:
        """The bytes charged to the ledger, by purpose."""

    def digest(self) -> dict:
        """
        A dict of `state` and `master`, digests of this rank's values. Their sums over all ranks, modulo 2^64, are the digests of all values.
        """

def adamw_footprint(shards: Sequence[AdamWShard], groups: Sequence[AdamOptions], *, format: str, slots: int = 0, threads: int = 1, fork: str = 'excluded') -> dict:
    """The memory of an AdamW with these arguments, in bytes by purpose."""

class StateStep:
    """The step of one state, with arguments as for AdamW.step."""

    def __init__(self, state: AdamW, send: object | None = None, wait: object | None = None, dtype: str = 'bfloat16', refresh_masters: bool = False) -> None: ...

def step_all(steps: Sequence[StateStep], unscale: float = 1.0, clip: float = 1.0, snapshot: Snapshot | None = None) -> None:
    """
    AdamW.step for several states together: if it raises before anything is sent, none has been stepped. `snapshot`: the snapshot of a save that reads their memory meanwhile.
    """

def clip_factor(norm: float, max_norm: float) -> float:
    """min(1, max_norm / (norm + 1e-6)), rounded once to float32."""

def state_formats() -> list:
    """A dict for each format: name, and the dtypes of its planes."""

def state_format_of(dtype: str, shape: Sequence[int], asked: str) -> str:
    """
    The format of a parameter of `dtype` and `shape` when the user asks for `asked`.
    """

SLOT_BYTES: int = 135168

class SharedGather:
    """
    Shared memory in which the ranks of a node collect the short runs of a save.

    Runs of several ranks that are neighbours in a file, such as the parts of a tensor's row, are
    written together.

    Args:
        ranks: number of ranks of the node.
        part_bytes: bytes of each rank's part, `SaveParts.gather_bytes`.

    Raises:
        IoError: the kernel refuses.
    """

    def __init__(self, ranks: int, part_bytes: int) -> None: ...

    @staticmethod
    def open(address: str, ranks: int, part_bytes: int) -> SharedGather | None:
        """
        Maps the memory that another rank has made. None if it can't be mapped, or if the address leads to other memory.
        """

    @property
    def address(self) -> str:
        """For `open`; valid while the maker keeps the object alive."""

class Gather:
    """
    One rank's endpoint of a SharedGather, for one save.

    Args:
        place: number of the rank on its node, from 0.
        ledger: is charged for the rank's part.
    """

    def __init__(self, shared: SharedGather, board: Board, rank: int, place: int, ledger: Ledger) -> None: ...

class SavePlan:
    """The inverse of a load's plan: which bytes each rank writes where."""

    @property
    def copied(self) -> list[str]:
        """Names of the stored tensors that are copied from the source."""

    @property
    def copied_bytes(self) -> int:
        """Bytes of all copied tensors."""

    @property
    def left_out(self) -> list[str]:
        """Names of the stored tensors that are neither saved nor copied."""

    @property
    def digest(self) -> str:
        """Digest of all inputs: ranks with equal digests write one checkpoint."""

    @property
    def recipe_text(self) -> str:
        """A recipe.json that makes the same targets from the saved tensors."""

def make_save_plan(plan: Plan, *, dtype: str | None = None, copies_unused: bool = True, shard_size: int | str | None = None, adapters: bool = False, gathers: bool = False, from_first: Sequence[int] = []) -> SavePlan:
    """
    Inverts the plan of a load.

    Args:
        plan: from make_plan, with destinations `given` or `copy`.
        dtype: dtype of the saved tensors that can be cast; None: as loaded.
        copies_unused: whether stored tensors that no target reads are copied.
        shard_size: largest size of a file; None: files as in the source.
        adapters: whether all tensors go into one file, PEFT's adapter_model.safetensors.
        gathers: whether the ranks of a node collect their short runs with a Gather.
        from_first: targets of which the first replica writes all elements; of others the replicas
            divide them.

    Raises:
        UsageError: two saved tensors would have the same name, or there is no tensor to save.
    """

def save_promise(held: Mapping[str, int], baselines: Sequence[int], *, ranks_per_node: int, budget: int | None = None, budget_source: str = 'argument') -> list[tuple[int, int]]:
    """
    (promised bytes, limit of the ledger) of each rank. `held`: bytes by purpose that a save holds on each rank; `baselines`: bytes of each rank's process before it. Raises BudgetError if the ranks of a node need more than `budget`.
    """

class StoredState:
    """
    A parameter whose state is in files.

    Args:
        fqn, dtype, shape: of the complete parameter.
        format: of its state.
        is_own_master: whether its memory is the master.
    """

    def __init__(self, fqn: str, dtype: str, shape: Sequence[int], format: str, is_own_master: bool) -> None: ...

    @property
    def fqn(self) -> str: ...

    @property
    def dtype(self) -> str: ...

    @property
    def shape(self) -> list[int]: ...

    @property
    def format(self) -> str: ...

    @property
    def is_own_master(self) -> bool: ...

class HeldShard:
    """A shard of an AdamW, by its index, and its name in files."""

    def __init__(self, state: AdamW, shard: int, fqn: str) -> None: ...

class StateFiles:
    """
    The tensors of AdamW's state in a checkpoint.

    Args:
        parameters: those that have state.
    """

    def __init__(self, parameters: Sequence[StoredState]) -> None: ...

def require_state(checkpoint: Checkpoint, parameters: Sequence[StoredState], has_masters: bool = True) -> None:
    """
    Raises UsageError, which names a tensor, unless the checkpoint has the state of exactly these parameters, in any format. `has_masters`: as for `load_state`.
    """

def load_state(checkpoint: Checkpoint, facts: str, parameters: Sequence[StoredState], rank: int, board: Board, ledger: Ledger, held: Sequence[HeldShard], has_masters: bool = True) -> dict:
    """
    Reads one rank's shards of a state that was saved in any format, and sets their step counts. `facts`: the text of its state.json; `has_masters`: false for the state of torch's optimizers, which step parameters of 16 bits themselves. The masters must hold the parameters' loaded values. Returns a dict with storage_read_bytes and compared (see compared_values). Raises UsageError, which names a tensor, unless the saved state is that of these parameters.
    """

CONVERTED_STATE_BYTES: int = 524288

def state_text(state_format: str, seed: int, steps: Sequence[tuple[str, int]], without_state: Sequence[str]) -> str:
    """The text of AdamW's state.json. `steps`: (fqn, number of steps) each."""

def state_facts(text: str) -> dict:
    """state_format, seed, steps, steps_of and without_state of a state.json."""

class Snapshot:
    """
    The values that one rank's save in the background reads; see SaveParts.snapshot.
    """

    @property
    def bytes(self) -> int:
        """The bytes that `charge` charges, with purpose `snapshot`."""

    def charge(self, ledger: Ledger) -> None:
        """
        Charges the window and its tables. Raises BudgetError if the ledger's limit is too low.
        """

    def keep(self, memory: object) -> bool:
        """
        Immediately copies the values in `memory` that the save has yet to read. Returns False if the window is too small.
        """

    def end(self) -> None:
        """Declares that nothing more is read, and gives the window back."""

    @property
    def waited_s(self) -> float:
        """
        Seconds in which at least one thread of a step waited for the save to read.
        """

    @property
    def copied_bytes(self) -> int:
        """Bytes copied to the window."""

class TensorsToSave:
    """
    The tensors of a SavePlan on one rank.

    Args:
        plan: the plan.
        given: host memory by target, which the caller must keep alive until the save has ended.
        fetch: `fetch(target, at, view)` fills `view` with the elements of any other target, from `at`
            on; on any thread.
    """

    def __init__(self, plan: SavePlan, given: dict = {}, fetch: object | None = None) -> None: ...

    @property
    def plan(self) -> SavePlan: ...

class StateToSave:
    """
    The state of AdamW on one rank.

    Args:
        files: the files of all ranks.
        held: the shards of which this rank holds the first replica.
    """

    def __init__(self, files: StateFiles, held: Sequence[HeldShard]) -> None: ...

class PartialCheckpoint:
    """
    Where the ranks write: `directory` and `point` of rank 0's CheckpointSave, the directory with its links resolved.
    """

    def __init__(self, directory: str, point: int) -> None: ...

    @property
    def directory(self) -> str: ...

class SaveParts:
    """
    What one rank writes in a save.

    Args:
        model: the model's tensors.
        state: those of the optimizer's state; None: it has none.
        facts: the text of state.json.
    """

    def __init__(self, model: TensorsToSave, state: StateToSave | TensorsToSave | None = None, facts: str = '') -> None: ...

    @property
    def facts(self) -> str: ...

    def held(self, threads: int = 1, background: bool = False, own_bytes: int = 0) -> dict:
        """
        The bytes by purpose that the save holds on this rank, without the tensors. `threads`: as for `write`; `background`: whether it reads through a Snapshot; `own_bytes`: of the rank's file of a program's own values.
        """

    @property
    def gather_bytes(self) -> int:
        """Bytes of each rank's part of a SharedGather; 0: the save has none."""

    def require_recordable(self, texts: Sequence[tuple[str, str]], others: Sequence[str]) -> None:
        """
        Raises UsageError (UNSUPPORTED) if a file of the checkpoint would be too long to be read again. `texts`: (name, text) of further files; `others`: names of the files that ranks write.
        """

    def create_files(self, rank_of: tuple[int, int], board: Board, partial: PartialCheckpoint) -> int:
        """
        Creates one rank's share of the files; returns the bytes written. `rank_of`: (rank, number of ranks).
        """

    def snapshot(self, window: int, rank: int) -> Snapshot:
        """
        The Snapshot for a save in the background. `window`: the most bytes of copied blocks. A block is copied if a step overwrites it before the save has read it.
        """

    def write(self, rank: int, board: Board, ledger: Ledger, partial: PartialCheckpoint, *, threads: int = 1, snapshot: Snapshot | None = None, gather: Gather | None = None) -> dict:
        """
        Writes the tensors, first the model's; returns a dict with written_bytes, read_bytes and gathered_bytes. With a `snapshot` it may run on any thread, takes the GIL only for tensors that are fetched, and does not wait for other ranks: all must have called `create_files`, then waited in a barrier. `gather`: see Gather.
        """

class CheckpointSave:
    """
    A checkpoint that is written and not published yet.

    Only the rank that leads the save has one.

    Args:
        root: the directory of the run's checkpoints.
        step: the number of the training step: S of ROOT/step-S.
        directories: subdirectories to make: "optimizer", "extra".
        inside: whether `root`, a directory to which others write as well, becomes the checkpoint
            itself. It is not committed until `publish`.
        keep: the number of intact checkpoints to keep, including this one; None: all.

    Raises:
        IoError: CONFLICT if the checkpoint exists.
    """

    def __init__(self, root: str, step: int, directories: Sequence[str] = [], inside: bool = False, keep: int | None = None) -> None: ...

    @property
    def directory(self) -> str:
        """
        The directory to which the ranks write. Each rank resolves the links of its path, once: files are created only at a path without links.
        """

    @property
    def point(self) -> int:
        """
        The random number with which the ranks prove that each element was written once; see PartialCheckpoint.
        """

    def publish(self, parts: SaveParts, *, more: Sequence[tuple[str, str | None]] = [], lock_limit_s: float = 60, vocabulary: tuple[str, int, str, str] | None = None) -> dict:
        """
        Makes the checkpoint durable and visible, then removes old ones. All ranks must have written. `parts`: this rank's; `more`: (name, text) of further files, text None if a rank has written the file; `lock_limit_s`: how long it waits for another save that publishes in the same root; `vocabulary`: (key, tokens, model_type, outer_type) for config.json if the model's tokens are not those of the source, where `model_type` and `outer_type` name the config to change.
        """

    def discard(self) -> None:
        """Removes the files, unless the checkpoint was published."""

def newest_checkpoint(root: str, skipped: Sequence[tuple[int, str]] = []) -> dict:
    """
    The newest checkpoint whose headers and other files have the recorded digests, older than those in `skipped`, (step, reason) each: a dict of step, path, uuid, world_size and has_state, with `skipped`, the damaged checkpoints that were found now. Raises IntegrityError (UNCOMMITTED) if there is none.
    """

def checkpoint_fault(path: str, rank: int, ranks: int, board: Board) -> str:
    """
    Compares one rank's part of a checkpoint with the recorded digests; all ranks together compare every byte. Returns the text of the first damage, or an empty text. Raises IoError if a file can't be read.
    """

def open_run_checkpoint(path: str) -> dict:
    """
    The dict of newest_checkpoint, without `skipped`, for one checkpoint. Raises an error unless COMMIT, manifest.json and the lengths of its files are right.
    """

def check_run_checkpoint(path: str) -> dict:
    """
    As open_run_checkpoint, but also compares the digests of headers and other files.
    """

def examine_checkpoint(root: str, step: int) -> dict | None:
    """
    As check_run_checkpoint, for the checkpoint of a root. A dict of path, uuid (None without a valid COMMIT) and reason, the damage or an empty text; None if the root has no such directory.
    """

def set_aside(root: str, step: int, reason: str, uuid: str | None) -> dict:
    """
    Renames a damaged checkpoint, so that a new one can have its number. Returns a dict of step, path, reason, bytes and the text of a warning. `uuid`: from examine_checkpoint.
    """

def process_memory(pid: int = 0) -> dict:
    """
    held_bytes and peak_bytes (since reset_peak) of a process. `pid` 0: this process.
    """

def reset_peak() -> bool:
    """Resets peak_bytes; False if the kernel refuses."""

def available_memory() -> tuple:
    """
    (bytes, source): the memory that the node and the cgroups of this process have left, and which of them has the least left.
    """

def granted_cpus() -> int:
    """
    The number of CPUs that this process may use, by its affinity and the quotas of its cgroups.
    """

def descendants(pid: int = 0) -> list[int]:
    """The pids of all descendants of a process. `pid` 0: this process."""

def memory_kinds() -> dict:
    """
    The resident bytes of this process by kind; shared pages count in full. Empty where /proc/self/pagemap can't be read.
    """

def tree_memory(ranges: Sequence[tuple[int, int]], pid: int = 0) -> dict:
    """
    The memory of a process and its descendants, by ranges of its addresses.

    Args:
        ranges: (begin, end) addresses in the process, ascending, disjoint.
        pid: 0: this process.

    Returns:
        A dict. `processes`: a dict per process, that of `pid` first, with pid, forked (whether it was
        forked from the first without an exec), anon_bytes, shmem_bytes (shared pages are divided among
        their users) and page_table_bytes. `ranges`: a pair per range: bytes in the process itself, and
        bytes of copy-on-write copies in its forked descendants. `rest`: the same pair for all other
        addresses.

    Raises:
        IoError: /proc can't be read.
    """

class MainThreadPause:
    """
    Pauses the main thread between two of its bytecodes, for another thread that reads what a backward replaces without the GIL. Signal handlers run after the pause.
    """

    def __init__(self, most_s: float) -> None:
        """
        `most_s`: the longest pause, should the other thread wait for a lock of the main thread.
        """

    def begin(self, timeout_s: float) -> bool:
        """
        Waits until the main thread is paused; False if it is not within `timeout_s`, as while it is in a call of C, or if the interpreter's queue of calls is full.
        """

    def end(self) -> None:
        """Lets the main thread go on."""

def heed_sigterm_of(trainer: int) -> None:
    """
    From now on this process ignores SIGTERM, unless the process `trainer`, which has started it, sends it or has ended.
    """

class ReportedPhase:
    """
    A phase of this process, shown by the `modicum watch` that runs it.

    Args:
        name: a phase of a plan's promise, or any other name.
    """

    def __init__(self, name: str) -> None: ...

    def end(self) -> None:
        """Ends the phase; a second call does nothing."""

def report_budget(bytes: int) -> None:
    """
    The host budget of the node, shown by the `modicum watch` that runs this process; 0: none.
    """
