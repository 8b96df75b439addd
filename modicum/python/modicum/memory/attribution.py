"""Who holds each byte of a process tree: named tensors, their copies in forks, and the rest."""

from bisect import bisect_left, insort
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from modicum import _modicum
from modicum.memory.holders import GRADIENT, MASTER, MOMENTS, STAGING, WEIGHTS, holdings

_ORDER = (MASTER, GRADIENT, MOMENTS, STAGING, WEIGHTS)


@dataclass(frozen=True)
class Owner:
    """What is held for one purpose, in bytes."""

    name: str
    held_bytes: int
    """In memory, once however many processes see it."""
    copied_bytes: int = 0
    """Besides: what forked children keep of it from before it was written again."""


@dataclass(frozen=True)
class Attribution:
    """Every byte that a process and its children hold, by owner."""

    params: int
    """Parameters of this rank: what bytes per parameter are per."""
    owners: tuple[Owner, ...]
    """Largest purposes of training first; then page tables, shared memory, and what children hold
    of their own."""
    baseline_bytes: int
    """As it was given."""
    unexplained_bytes: int
    """The rest. Below 0: more has been given back since the baseline than was taken unnamed."""
    total_bytes: int
    """By the kernel: Pss_Anon + Pss_Shmem + VmPTE over the tree."""
    processes: int
    forked: int
    """How many of these are forks of the first one."""

    def __getitem__(self, name: str) -> Owner:
        """The owner of that name; holding nothing where there is none."""
        return next((owner for owner in self.owners if owner.name == name), Owner(name, 0))

    @property
    def copied_bytes(self) -> int:
        """Of all owners: what a tree without forks would not hold."""
        return sum(owner.copied_bytes for owner in self.owners)

    def per_param(self, size: int) -> float:
        """Bytes per parameter of so many bytes."""
        return size / self.params if self.params else 0.0

    @property
    def document(self) -> dict[str, Any]:
        """For JSON. Sizes are bytes."""
        return {
            "params": self.params,
            "processes": self.processes,
            "forked": self.forked,
            "owners": [
                {
                    "name": owner.name,
                    "held_bytes": owner.held_bytes,
                    "held_per_param": round(self.per_param(owner.held_bytes), 4),
                    "copied_bytes": owner.copied_bytes,
                    "copied_per_param": round(self.per_param(owner.copied_bytes), 4),
                }
                for owner in self.owners
            ],
            "baseline_bytes": self.baseline_bytes,
            "unexplained_bytes": self.unexplained_bytes,
            "total_bytes": self.total_bytes,
        }

    def text(self) -> str:
        """A table: MiB and bytes per parameter, held and copied."""
        processes = f"{self.processes} processes, {self.forked} of them forked"
        lines = [f"{self.params:,} parameters, {processes}"]
        lines += [f"{'':24}{'held':>21}{'copied by forks':>21}"]
        lines.append(f"{'':24}{'MiB':>11}{'B/param':>10}{'MiB':>11}{'B/param':>10}")
        rows = [(owner.name, owner.held_bytes, owner.copied_bytes) for owner in self.owners]
        rows += [("before", self.baseline_bytes, 0), ("unexplained", self.unexplained_bytes, 0)]
        rows.append(("total", self.total_bytes - self.copied_bytes, self.copied_bytes))
        for name, *sizes in rows:
            figures = (f"{size / (1 << 20):>11.1f}{self.per_param(size):>10.3f}" for size in sizes)
            lines.append(f"{name:24}{''.join(figures)}")
        return "\n".join(lines)

    __str__ = text


class _Claims:
    """Ranges of addresses, each its first claimant's."""

    def __init__(self) -> None:
        self.parts: list[tuple[int, int, str]] = []  # ascending, without overlap

    def claim(self, begin: int, end: int, owner: str) -> None:
        at = bisect_left(self.parts, (begin,))
        if at > 0 and self.parts[at - 1][1] > begin:
            at -= 1
        free = []
        for other_begin, other_end, _ in self.parts[at:]:
            if other_begin >= end:
                break
            if begin < other_begin:
                free.append((begin, other_begin, owner))
            begin = max(begin, other_end)
        if begin < end:
            free.append((begin, end, owner))
        for part in free:
            insort(self.parts, part)


def held() -> int:
    """What this process and its children hold now, in bytes by the kernel: private and shared
    memory, shared pages in equal parts, and page tables; no page cache. For `baseline`."""
    return sum(map(_total_of, _modicum.tree_memory([])["processes"]))


def _total_of(process: dict[str, int]) -> int:
    return process["anon_bytes"] + process["shmem_bytes"] + process["page_table_bytes"]


def attribute(*sources: Any, params: int | None = None, baseline: int = 0) -> Attribution:
    """Says who holds each byte of this process and its children, also of memory that others took.

        before = modicum.memory.held()
        engine, *_ = deepspeed.initialize(...)
        ...
        print(modicum.memory.attribute(engine, baseline=before))

    Pages of the sources' tensors are looked up in every process of the tree (/proc/PID/pagemap, no
    privilege needed): what a forked child, such as a data loader's worker, keeps of a page that has
    been written since is a copy, which no process's RSS shows. Where several forks of different
    times are alive and the process may not see page frames (CAP_SYS_ADMIN), copies that they do not
    share are counted once. Takes about 0.1 s per GiB. Works on Linux, 4.2 or later.

    Args:
        sources: an engine or ZeRO optimizer of DeepSpeed's (ZeRO-1 and -2; tested with 0.19.8), an
            optimizer or module of torch's or Modicum's, tensors, a mapping of owners to tensors, or
            a `modicum.Ledger` (in place of what lies in it). With DeepSpeed's CPU accelerator the
            weights that a device would hold are host memory and have their own line.
        params: what bytes per parameter are per; None: the elements of the master, or of the
            weights where there is none.
        baseline: bytes that were held before, by `held()`.

    Raises:
        UsageError: a source that is not known, or an engine whose attributes are not.
        IoError: the kernel does not say.
    """
    ledgers = [source for source in sources if isinstance(source, _modicum.Ledger)]
    claims = _Claims()
    numel = {MASTER: 0, WEIGHTS: 0}
    for source in sources:
        if isinstance(source, _modicum.Ledger):
            continue
        for of in holdings(source):
            before = len(claims.parts)
            claims.claim(of.begin, of.end, of.owner)
            # A plane of ours comes as bytes; its parameter says how many elements there are.
            counts = len(claims.parts) > before and of.tensor.is_floating_point()
            if counts and of.owner in numel:
                numel[of.owner] += of.tensor.numel()
    tree = _modicum.tree_memory([part[:2] for part in claims.parts])
    owners = _by_owner(claims.parts, tree["ranges"])
    for ledger in ledgers:
        owners += [Owner(f"ledger: {purpose}", size) for purpose, size in ledger.held.items()]
    owners += _besides(tree)
    total = sum(map(_total_of, tree["processes"]))
    known = sum(owner.held_bytes + owner.copied_bytes for owner in owners)
    return Attribution(
        params=params or numel[MASTER] or numel[WEIGHTS],
        owners=tuple(owners),
        baseline_bytes=baseline,
        unexplained_bytes=total - baseline - known,
        total_bytes=total,
        processes=len(tree["processes"]),
        forked=sum(process["forked"] for process in tree["processes"]),
    )


def _by_owner(
    parts: Iterable[tuple[int, int, str]], ranges: Iterable[tuple[int, int]]
) -> list[Owner]:
    sums: dict[str, list[int]] = {}
    for (_, _, owner), (own, copied) in zip(parts, ranges, strict=True):
        of = sums.setdefault(owner, [0, 0])
        of[0] += own
        of[1] += copied
    names = [name for name in _ORDER if name in sums]
    names += [name for name in sums if name not in _ORDER]
    return [Owner(name, *sums[name]) for name in names]


def _besides(tree: dict[str, Any]) -> list[Owner]:
    """What is no tensor's: of these only the sum of private pages is known to be complete."""
    processes = tree["processes"]
    rest_own, rest_copied = tree["rest"]
    counted = sum(own + copied for own, copied in tree["ranges"]) + rest_own + rest_copied
    anon = sum(process["anon_bytes"] for process in processes)
    return [
        Owner("process, otherwise", 0, rest_copied),
        Owner("children's own", max(0, anon - counted) if len(processes) > 1 else 0),
        Owner("shared memory", sum(process["shmem_bytes"] for process in processes)),
        Owner("page tables", sum(process["page_table_bytes"] for process in processes)),
    ]
