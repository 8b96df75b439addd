import os


def version() -> str:
    """The version of the library, as in the wheel."""

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

def plan(path: str | os.PathLike, *, ranks: int = 1, ranks_per_node: int | None = None, strategy: str = 'own-shard', layout: str = 'fsdp2', mesh: str | None = None, shard_dim: int = 0, tp_rowwise: str | None = None, tp_packed: str | None = None, tp_replicate: str | None = None, expert_mesh: str | None = None, experts: str = '\\.experts\\.', round_robin: bool = False, dtype: str | None = None, keep_fp32: str | None = None, recipe: str | os.PathLike | None = None, untie: bool = False, destination: str = 'cpu', staging: int | str | None = None, budget: int | str | None = None, baseline: int | str | None = None) -> dict:
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

    Returns:
        The document of `modicum plan --json`: checkpoint, ranks, strategies, budget, fits. What
        does not fit is an answer (`fits` is False), not an error.

    Raises:
        FormatError: a header or the index is malformed.
        IoError: a file can't be read.
        UsageError: an argument makes no sense, or the recipe is not one for this checkpoint.
    """
