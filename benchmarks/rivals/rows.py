"""The loaders of each case. Imports nothing heavy."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

# Settings of glibc's malloc, which a user of any loader can choose before the process starts. With
# `malloc`, freed blocks of 256 KiB or more are returned to the kernel immediately; with
# `hugepages`, malloc also requests huge pages.
GIVING_BACK = {"MALLOC_MMAP_THRESHOLD_": "262144", "MALLOC_TRIM_THRESHOLD_": "262144"}
ALLOCATORS: Mapping[str, Mapping[str, str]] = {
    "": {},
    "malloc": GIVING_BACK,
    "hugepages": GIVING_BACK | {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"},
}


@dataclass(frozen=True)
class Case:
    """A checkpoint, and the end state of its load."""

    name: str
    what: str
    arch: str
    layers: int  # 0: all
    dtype: str  # torch's name of the dtype of the loaded parameters
    tp: int = 1  # size of the mesh's tensor-parallel axis; the other axis is FSDP's
    world: int = 4
    directory: str = ""


CASES = (
    Case("dense", "bf16 as stored", "qwen3-8b", 4, "bfloat16"),
    Case("masters", "bf16 to fp32 masters", "qwen3-0.6b", 0, "float32"),
    Case("moe", "experts stacked, gate and up fused", "qwen3-30b-a3b", 1, "bfloat16"),
    Case("tp", "TP 2 x FSDP", "qwen3-8b", 4, "bfloat16", tp=2),
    # A small model: here the overhead that does not depend on bytes dominates.
    Case("tp-small", "TP 2 x FSDP, a small model", "qwen3-0.6b", 0, "bfloat16", tp=2),
)


@dataclass(frozen=True)
class Row:
    """A loader and its settings.

    `function` is `module:name` in this package and takes the options. `need` is roughly the peak of
    all ranks together, by case, as a multiple of the bytes of their shards (`""`: every other
    case); a run that would not fit into memory is skipped. `environment` is set in the ranks;
    variables of the allocator are set in the zygote, before the fork. `builds_first`: the function
    pauses between building the model and loading it. `takes_huge_pages`: the loader itself requests
    huge pages. `does_not_apply`: the cases in which the row is not run, with the reason. `in_all`:
    whether `--rows all` includes the row.
    """

    name: str
    function: str
    options: Mapping[str, object] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)
    allocator: str = ""
    need: Mapping[str, float] = field(default_factory=lambda: {"": 1.2})
    does_not_apply: Mapping[str, str] = field(default_factory=dict)
    in_all: bool = True
    builds_first: bool = True
    takes_huge_pages: bool = False

    @property
    def huge_pages(self) -> bool:
        return self.takes_huge_pages or self.allocator == "hugepages"

    def need_in(self, case: Case) -> float:
        return self.need.get(case.name, self.need[""])


EFFICIENT = {"ACCELERATE_USE_FSDP": "true", "FSDP_CPU_RAM_EFFICIENT_LOADING": "true"}
MAKES_MASTERS = "makes fp32 masters"
ONLY_MASTERS = dict.fromkeys(("dense", "moe", "tp", "tp-small"), MAKES_MASTERS)
LEAN = {"RUNAI_STREAMER_MEMORY_LIMIT": "0"}
DISTRIBUTED = {"RUNAI_STREAMER_DIST": "1"}
# Values of `need`, each named for the work of its loaders: they read whole models, prepare them,
# send tensors to other ranks, or stream them.
WHOLE = {"": 2.5, "masters": 4.5, "moe": 4.5, "tp-small": 4.0}
PREPARED = {"": 3.5, "masters": 8.0, "moe": 7.0}
SENT = {"": 3.5}
STREAMED = {"": 4.2}
SENT_TWICE = {"": 8.0}


def tuned(row: Row, *allocators: str) -> tuple[Row, ...]:
    """A row, and the same row under other allocators."""
    others = (replace(row, name=f"{row.name}+{one}", allocator=one) for one in allocators)
    return row, *others


ROWS = (
    *tuned(
        Row("from_pretrained", "whole:from_pretrained", need=WHOLE, builds_first=False), "malloc"
    ),
    *tuned(
        Row("accelerate", "whole:accelerate", environment=EFFICIENT, need=PREPARED,
            builds_first=False),
        "malloc",
    ),
    *tuned(
        Row(
            "accelerate-bf16",
            "whole:accelerate",
            options={"mixed_precision": "bf16"},
            environment=EFFICIENT,
            need=PREPARED,
            does_not_apply=ONLY_MASTERS,
            builds_first=False,
        ),
        "malloc",
    ),
    *tuned(Row("torch-broadcast", "whole:torch_broadcast", need=SENT), "malloc"),
    *tuned(Row("dcp", "slices:distributed_checkpoint"), "malloc", "hugepages"),
    Row("transformers", "slices:shard_on_read", builds_first=False),
    *tuned(Row("get_slice", "slices:get_slice"), "malloc", "hugepages"),
    *tuned(Row("preadv", "slices:preadv"), "malloc", "hugepages"),
    Row("runai", "streamers:runai", need=STREAMED),
    Row("runai-lean", "streamers:runai", {"lean": True}, LEAN, "malloc", STREAMED),
    Row("runai-distributed", "streamers:runai", {"distributed": True}, DISTRIBUTED,
        need=SENT_TWICE),
    Row("fastsafetensors", "streamers:fastsafetensors", need=STREAMED),
    Row("fastsafetensors-local", "streamers:fastsafetensors_local", allocator="malloc",
        need=STREAMED),
    Row("modicum", "own:modicum", takes_huge_pages=True),
    # The result of this row must be wrong: it proves that the comparison detects a wrong bit.
    Row("flipped-bit", "slices:flipped_bit", in_all=False),
)  # fmt: skip
