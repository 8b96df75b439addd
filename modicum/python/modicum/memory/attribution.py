"""Attributes the memory of a process tree to owners: named tensors, their copies caused by forks,
and memory without a tensor. The rest is the baseline, or unexplained."""

from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from modicum import _modicum
from modicum.errors import counted
from modicum.memory import arguments
from modicum.memory.holders import (
    DEVICE_GRADIENTS,
    GRADIENT,
    MASTER,
    MOMENTS,
    PARTITION,
    STAGING,
    WEIGHTS,
    holdings,
)

_MIB = 1 << 20
_ORDER = (MASTER, GRADIENT, MOMENTS, STAGING, PARTITION, WEIGHTS, DEVICE_GRADIENTS)
_NOT_TENSORS = ("process, otherwise", "children's own", "shared memory", "page tables")


@dataclass(frozen=True)
class Owner:
    """The bytes of one owner (a purpose)."""

    name: str
    held_bytes: int
    """Resident bytes; pages that several processes map count once."""
    copied_bytes: int = 0
    """Additional bytes: second versions of pages, which exist because a process wrote to them after
    a fork (copy-on-write)."""


@dataclass(frozen=True)
class Attribution:
    """The owners of the memory that a process and its children hold."""

    params: int
    """The number of this rank's parameters: the divisor of bytes per parameter; 0 if no source has
    parameters."""
    owners: tuple[Owner, ...]
    """In this order: master, gradient, moments, staging, offloaded weights, weights; other tensors;
    ledgers; memory without a tensor ("process, otherwise": copies; "children's own"; "shared
    memory"; "page tables")."""
    baseline_bytes: int
    """The argument of `attribute`."""
    unexplained_bytes: int
    """`total_bytes` minus the baseline and the bytes of all owners. Negative if a part of the
    baseline was freed since."""
    total_bytes: int
    """The kernel's Pss_Anon + Pss_Shmem + VmPTE, summed over all processes."""
    processes: int
    forked: int
    """The number of these processes that were forked from the first one without an exec."""
    kinds: Mapping[str, int] = field(default_factory=dict)
    """The resident bytes of this process by kind, of tensors and of all else: `malloc_heap`,
    `malloc_arenas`, `stacks`, `file_copies`, `anonymous` and `shared_memory`, as `modicum watch`
    reports them."""

    def __getitem__(self, name: str) -> Owner:
        """The owner of this name; an owner of 0 bytes if there is none."""
        return next((owner for owner in self.owners if owner.name == name), Owner(name, 0))

    @property
    def copied_bytes(self) -> int:
        """The copied bytes of all owners: memory that exists only because of forks."""
        return sum(owner.copied_bytes for owner in self.owners)

    def per_param(self, size: int) -> float:
        """`size` divided by the number of parameters; 0.0 without parameters."""
        return size / self.params if self.params else 0.0

    @property
    def document(self) -> dict[str, Any]:
        """A dict for JSON. Sizes are in bytes."""
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
            "kinds": dict(self.kinds),
        }

    def text(self) -> str:
        """A table in MiB, held and copied; with parameters also in bytes per parameter. Rows of
        0.0 are left out if they are of no tensor. Then the kinds of memory of this process."""
        processes = counted(self.processes, "process")
        if self.processes > 1:
            processes += f", {self.forked} of them forked"
        if self.params:
            lines = [f"{self.params:,} parameters, {processes}"]
            lines += [f"{'':24}{'held':>21}{'copied by forks':>21}"]
            lines.append(f"{'':24}{'MiB':>11}{'B/param':>10}{'MiB':>11}{'B/param':>10}")
        else:
            lines = [processes, f"{'in MiB':24}{'held':>17}{'copied by forks':>17}"]
        rows = [(owner.name, owner.held_bytes, owner.copied_bytes) for owner in self.owners]
        rows += [("before", self.baseline_bytes, 0), ("unexplained", self.unexplained_bytes, 0)]
        rows.append(("total", self.total_bytes - self.copied_bytes, self.copied_bytes))
        for name, *sizes in rows:
            if name in (*_NOT_TENSORS, "before") and max(sizes) < _MIB / 20:
                continue
            lines.append(f"{name:24}{''.join(map(self._figures, sizes))}")
        if self.kinds:
            largest = sorted(self.kinds.items(), key=lambda kind: -kind[1])
            kinds = (f"{name} {size / _MIB:.1f}" for name, size in largest if size >= _MIB)
            lines.append(f"this process by kind: {', '.join(kinds)}")
        return "\n".join(lines)

    def _figures(self, size: int) -> str:
        """The cells of one size in the table."""
        if not self.params:
            return f"{size / _MIB:>17.1f}"
        return f"{size / _MIB:>11.1f}{self.per_param(size):>10.3f}"

    __str__ = text


Ranges = list[tuple[int, int, str]]
"""Disjoint address ranges [begin, end) with their owners, ascending."""


def _claim(ranges: Ranges, begin: int, end: int, owner: str) -> bool:
    """Gives the owner those addresses in [begin, end) that no earlier claim has; returns whether
    there are any."""
    at = bisect_left(ranges, (begin,))
    if at > 0 and ranges[at - 1][1] > begin:
        at -= 1
    free = []
    for other_begin, other_end, _ in ranges[at:]:
        if other_begin >= end:
            break
        if begin < other_begin:
            free.append((begin, other_begin, owner))
        begin = max(begin, other_end)
    if begin < end:
        free.append((begin, end, owner))
    for part in free:
        insort(ranges, part)
    return bool(free)


def held() -> int:
    """The bytes that this process and its children hold now, by the kernel's count: private memory,
    shared memory divided among the processes that map it, and page tables, but no page cache. Give
    them to `attribute` as its `baseline`.

    Raises:
        IoError: /proc can't be read.
    """
    return sum(map(_total_of, _modicum.tree_memory([])["processes"]))


def _total_of(process: dict[str, int]) -> int:
    return process["anon_bytes"] + process["shmem_bytes"] + process["page_table_bytes"]


@dataclass(frozen=True)
class Places:
    """Where the sources' tensors are."""

    ranges: Ranges
    ledgers: list[_modicum.Ledger]
    params: int
    """The number of elements of the master, or of the weights if there is no master."""


def places_of(sources: Sequence[Any]) -> Places:
    """Looks up the sources' tensors. No other thread may change them meanwhile."""
    ledgers = [source for source in sources if isinstance(source, _modicum.Ledger)]
    ranges: Ranges = []
    numel = {MASTER: 0, WEIGHTS: 0}
    for source in sources:
        if isinstance(source, _modicum.Ledger):
            continue
        for holding in holdings(source):
            is_new = _claim(ranges, holding.begin, holding.end, holding.owner)
            # An overlap with earlier claims adds no parameters, and neither do the tensors of
            # modicum.torch.AdamW, which are uint8.
            is_counted = is_new and holding.tensor.is_floating_point()
            if is_counted and holding.owner in numel:
                numel[holding.owner] += holding.tensor.numel()
    return Places(ranges, ledgers, numel[MASTER] or numel[WEIGHTS])


def attributed(at: Places, params: int | None, baseline: int) -> Attribution:
    """As `attribute`, now, with the tensors' addresses `at`."""
    arguments.number("params", 0 if params is None else params, arguments.MOST_BYTES)
    arguments.number("baseline", baseline, arguments.MOST_BYTES)
    tree = _modicum.tree_memory([part[:2] for part in at.ranges])
    owners = _by_owner(at.ranges, tree["ranges"])
    for ledger in at.ledgers:
        owners += [Owner(f"ledger: {purpose}", size) for purpose, size in ledger.held.items()]
    owners += _not_tensors(tree)
    total = sum(map(_total_of, tree["processes"]))
    known = sum(owner.held_bytes + owner.copied_bytes for owner in owners)
    return Attribution(
        params=params or at.params,
        owners=tuple(owners),
        baseline_bytes=baseline,
        unexplained_bytes=total - baseline - known,
        total_bytes=total,
        processes=len(tree["processes"]),
        forked=sum(process["forked"] for process in tree["processes"]),
        kinds=_modicum.memory_kinds(),
    )


def _by_owner(
    parts: Iterable[tuple[int, int, str]], ranges: Iterable[tuple[int, int]]
) -> list[Owner]:
    held_bytes, copied = Counter[str](), Counter[str]()
    for (_, _, owner), (own_bytes, copied_bytes) in zip(parts, ranges, strict=True):
        held_bytes[owner] += own_bytes
        copied[owner] += copied_bytes
    names = sorted(
        held_bytes, key=lambda name: _ORDER.index(name) if name in _ORDER else len(_ORDER)
    )
    return [Owner(name, held_bytes[name], copied[name]) for name in names]


def _not_tensors(tree: dict[str, Any]) -> list[Owner]:
    """Owners of memory without a tensor. "process, otherwise" has only the copies of such memory;
    what this process itself holds of it is a part of the baseline, or unexplained. "children's
    own": the private pages of all processes, minus those at addresses that the first process has
    mapped."""
    processes = tree["processes"]
    rest_own, rest_copied = tree["rest"]
    counted = (
        sum(own_bytes + copied for own_bytes, copied in tree["ranges"]) + rest_own + rest_copied
    )
    anon = sum(process["anon_bytes"] for process in processes)
    sizes = [
        (0, rest_copied),
        (max(0, anon - counted) if len(processes) > 1 else 0,),
        (sum(process["shmem_bytes"] for process in processes),),
        (sum(process["page_table_bytes"] for process in processes),),
    ]
    return [Owner(name, *size) for name, size in zip(_NOT_TENSORS, sizes, strict=True)]
