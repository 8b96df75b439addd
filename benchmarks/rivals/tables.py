"""Tables of results, as Markdown."""

import platform
import statistics
import time
from collections.abc import Callable, Iterable
from importlib import metadata
from typing import Any

from harness.page import GIB, machine
from rivals.rows import Case, Row

Result = dict[str, Any]
PACKAGES = (
    "modicum",
    "torch",
    "transformers",
    "accelerate",
    "safetensors",
    "runai-model-streamer",
    "fastsafetensors",
)
MEASURED = ("right", "wrong")
HEADER = (
    "loader | bits | peak, sampled | peak, kernel | worst rank | kept | from disk, warm / cold "
    "| page cache left | build, s | load and first write, s | CPU, s | cold, s"
)


def versions() -> str:
    found = []
    for package in PACKAGES:
        try:
            found.append(f"{package} {metadata.version(package)}")
        except metadata.PackageNotFoundError:
            found.append(f"no {package}")
    return ", ".join([*found, f"Python {platform.python_version()}"])


def spread(values: Iterable[float | None]) -> str:
    """The median, and the range if it differs from the median."""
    known = sorted(value for value in values if value is not None)
    if not known:
        return "-"
    middle, low, high = (f"{v:.2f}" for v in (statistics.median(known), known[0], known[-1]))
    return middle if low == high else f"{middle} ({low}-{high})"


def kernel_peak(result: Result) -> float:
    return result.get("peak_group_bytes", result["peak_high_water_bytes"])


def of_row(results: list[Result], row: Row) -> list[Result]:
    return [result for result in results if result["row"] == row.name]


def outcome_of(results: list[Result]) -> str:
    """The worst outcome of a row's runs; "skipped" only if all of them were skipped."""
    order = ("wrong", "cannot", "right", "skipped", "n/a")
    return min((result["outcome"] for result in results), key=order.index)


def measured(results: list[Result], cold: bool) -> list[Result]:
    return [r for r in results if r["outcome"] in MEASURED and r["cold"] == cold]


def line(row: Row, results: list[Result], shards_bytes: int, stored_bytes: int) -> str:
    outcome = outcome_of(results)
    bits = outcome if outcome == "right" else f"**{outcome}**"
    warm, cold = measured(results, cold=False), measured(results, cold=True)

    def ratios(runs: list[Result], value: Callable[[Result], float], whole: int) -> str:
        return spread(value(run) / whole for run in runs)

    cells = [
        f"`{row.name}`",
        bits,
        ratios(warm, lambda run: run["peak_sampled_bytes"], shards_bytes),
        ratios(warm, kernel_peak, shards_bytes),
        ratios(warm, lambda run: run["peak_rank_bytes"], shards_bytes),
        ratios(warm, lambda run: run["kept_bytes"], shards_bytes),
        " / ".join(ratios(r, lambda run: run["read_bytes"], stored_bytes) for r in (warm, cold)),
        ratios(cold, lambda run: run["cached_after_bytes"], stored_bytes),
        spread(run["build_s"] for run in warm),
        spread(run["seconds"] for run in warm),
        spread(run["cpu_s"] for run in warm),
        spread(run["seconds"] for run in cold),
    ]
    return f"| {' | '.join(cells)} |"


def reasons(results: list[Result]) -> list[str]:
    """The distinct reasons why rows have no figures or wrong values."""
    rows: dict[tuple[str, str], list[str]] = {}
    for result in results:
        if result["outcome"] != "right":
            why = " ".join(result["why"].split())
            short = why if len(why) <= 300 else f"{why[:300]}..."
            names = rows.setdefault((result["outcome"], short), [])
            if f"`{result['row']}`" not in names:
                names.append(f"`{result['row']}`")
    return [f"- {outcome}: {', '.join(n)}: `{why}`" for (outcome, why), n in rows.items()]


def foreign_load(results: list[Result]) -> str:
    """The CPU load of other processes on the machine during the runs."""
    cores = [r["foreign_cpu_s"] / r["watched_s"] for r in results if "watched_s" in r]
    if not cores:
        return "nothing was run"
    return f"other load {statistics.median(cores):.1f} CPUs, at most {max(cores):.1f}"


def title(case: Case, stored_bytes: int, shards_bytes: int, files: int) -> str:
    layers = f"{case.layers} layers" if case.layers else "all layers"
    return (
        f"{case.what}: {case.arch}, {layers}, {stored_bytes / GIB:.2f} GiB in {files} files, into "
        f"{shards_bytes / GIB:.2f} GiB of shards in {case.world} ranks. Memory is a multiple of "
        "these shards; reads and page cache are multiples of the files:"
    )


def table(
    case: Case, rows: list[Row], results: list[Result], shards_bytes: int, stored: list[int]
) -> str:
    """The table of one case. `stored`: the sizes of the checkpoint's files."""
    lines = [line(row, of_row(results, row), shards_bytes, sum(stored)) for row in rows]
    why = reasons(results)
    return "\n".join(
        [
            title(case, sum(stored), shards_bytes, len(stored)),
            "",
            f"| {HEADER} |",
            f"|{'---|' * len(HEADER.split('|'))}",
            *lines,
            "",
            *([*why, ""] if why else []),
            f"`python benchmarks/loaders.py --rows all --case {case.name}`: {rounds(results)}, "
            f"interleaved in a new order each, {when(results)}; {foreign_load(results)}; "
            f"{versions()}; {machine()}.",
        ]
    )


def rounds(results: list[Result]) -> str:
    warm = {result["round"] for result in results if not result["cold"]}
    cold = {result["round"] for result in results if result["cold"]}
    return f"{len(warm)} warm and {len(cold)} cold rounds"


def when(results: list[Result]) -> str:
    """The days of the measurements."""
    days = sorted({time.strftime("%Y-%m-%d", time.gmtime(r["begun"])) for r in results})
    measurements = len({result["begun"] for result in results})
    number = f"{measurements} measurements, " if measurements > 1 else ""
    return number + " to ".join(dict.fromkeys([days[0], days[-1]]))


def overview(rows: list[Row], cases: dict[str, list[Result]], words: str = "") -> str:
    """All cases in one table: peak memory as a multiple of the shards, and time, page cache warm.
    `words`: arguments of the printed command."""
    cases = {
        case: [result for result in results if not result["cold"]]
        for case, results in cases.items()
    }

    def cell(row: Row, results: list[Result]) -> str:
        runs = of_row(results, row)
        outcome = outcome_of(runs)
        warm = measured(runs, cold=False)
        if not warm:
            return outcome
        peak = statistics.median(kernel_peak(run) / run["shards_bytes"] for run in warm)
        seconds = statistics.median(run["seconds"] for run in warm)
        return f"{'' if outcome == 'right' else f'**{outcome}**, '}{peak:.2f}, {seconds:.2f} s"

    lines = [
        f"| `{row.name}` | {' | '.join(cell(row, of_case) for of_case in cases.values())} |"
        for row in rows
    ]
    return "\n".join(
        [
            f"| loader | {' | '.join(cases)} |",
            f"|{'---|' * (len(cases) + 1)}",
            *lines,
            "",
            origin(cases, words),
        ]
    )


def beside_cold(rows: list[Row], cases: dict[str, list[Result]], words: str) -> str:
    """Seconds of each row by case, warm next to cold. `words`: arguments of the printed command."""
    sizes = [
        f"{case}, {results[0]['shards_bytes'] / GIB:.2f} GiB, {cache}"
        for case, results in cases.items()
        for cache in ("warm", "cold")
    ]
    lines = [
        [
            spread(run["seconds"] for run in measured(of_row(results, row), cold))
            for results in cases.values()
            for cold in (False, True)
        ]
        for row in rows
    ]
    return "\n".join(
        [
            f"| loader, s | {' | '.join(sizes)} |",
            f"|{'---|' * (len(sizes) + 1)}",
            *(f"| `{row.name}` | {' | '.join(o)} |" for row, o in zip(rows, lines, strict=True)),
            "",
            origin(cases, words),
        ]
    )


def origin(cases: dict[str, list[Result]], words: str = "") -> str:
    """The footer of a table of several cases: command with arguments `words`, dates, versions and
    machine."""
    results = sum(cases.values(), [])
    return (
        f"`python benchmarks/loaders.py{words}`: {rounds(results)}, interleaved in a new order "
        f"each, {when(results)}; {foreign_load(results)}; {versions()}; {machine()}."
    )
