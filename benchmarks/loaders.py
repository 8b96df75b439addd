#!/usr/bin/env python3
"""Measures memory, bytes read and time of each loader, for the same checkpoint and end state.

There are five cases, each with a checkpoint. Every loader that supports a case runs in 4 gloo ranks
on this machine. Loaders take turns, in a new order each round, so that a slow minute or the
previous loader affects all alike; figures are medians with their range. Time begins with the empty
sharded model, or before it is built by a loader that builds and loads in one call. It ends after
the first write to every page of every shard, since a loader that maps files reads them only then.
The shards of each loader's first warm run and first cold run must equal those that torch.chunk
makes of a `from_pretrained` in a single process.

Every run is appended to build/loaders.jsonl. The newest runs of each row make the tables in
benchmarks/RESULTS.md between their markers, as soon as all rows of a case have a run; so cases and
rows can be measured one after the other. Without `--rows` the rows of README.md's table are
measured, by default in its cases; `--rows all` takes hours. The table of the read loops
(READ_LOOPS) contains only the cases in which these have cold runs.
"""

import argparse
import dataclasses
import json
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, TextIO

from harness.page import GIB, ROOT, write_between_markers
from harness.runs import RunFailedError, Zygote, measure
from harness.watch import PAGE, Ballast, available_bytes, await_report, cached_bytes, drop
from rivals.rows import ALLOCATORS, CASES, ROWS, Case, Row
from rivals.tables import Result, beside_cold, overview, table

RAW = ROOT / "build/loaders.jsonl"
LOGS = ROOT / "build/loaders"
RESULTS = ROOT / "benchmarks/RESULTS.md"
READMES = (ROOT / "README.md", ROOT / "README.zh.md")
# The rows of README.md: the usual loaders, the fastest hand-written read loop, and Modicum.
IN_README = "from_pretrained,accelerate,preadv+hugepages,modicum"
CASES_IN_README = ("dense", "moe")  # nothing is converted; experts are stacked
READ_LOOPS = "preadv,preadv+hugepages,modicum"
WORLD = 4
SLOW = 5  # a row this many times slower than the fastest gets only one warm and one cold run
PATIENCE_S = 300
SHARD_SIZE = "300MB"  # several files, as in large checkpoints
# One thread per rank, as torchrun sets it; no downloads.
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
STARTED_BYTES = 2 * GIB  # roughly the memory of all processes after their imports


class Stage:
    """A case's checkpoint, the expected digests, and the processes that fork its ranks."""

    def __init__(self, case: Case, scratch: Path) -> None:
        self.case = case
        self.scratch = scratch
        self._truth = scratch / f"truth-{case.name}.json"
        self._zygotes: dict[str, Zygote] = {}
        self._ballast = Ballast()

    def __enter__(self) -> "Stage":
        self._run(Row("truth", "truth", builds_first=False), lambda: None)
        truth = json.loads(self._truth.read_text())
        self.shards_bytes: int = truth["bytes"]
        self.stored = [path.stat().st_size for path in self.files()]
        return self

    def __exit__(self, *_: object) -> None:
        self._ballast.release()
        for zygote in self._zygotes.values():
            zygote.end()

    def files(self) -> list[Path]:
        return sorted(Path(self.case.directory).glob("*.safetensors"))

    def _zygote(self, allocator: str) -> Zygote:
        if allocator not in self._zygotes:
            environment = ENVIRONMENT | ALLOCATORS[allocator]
            self._zygotes[allocator] = Zygote("rivals.rank", self.case.directory, environment)
        return self._zygotes[allocator]

    def _run(
        self, row: Row, before_loading: Callable[[], None], compared: bool = False
    ) -> dict[str, Any]:
        log = LOGS / f"{self.case.name}-{row.name}.log"
        log.parent.mkdir(parents=True, exist_ok=True)
        log.unlink(missing_ok=True)
        job = {
            "case": dataclasses.asdict(self.case),
            "function": row.function,
            "options": dict(row.options),
            "environment": dict(row.environment),
            "builds_first": row.builds_first,
            "compared": compared,
            "truth": str(self._truth),
            "world": 1 if row.function == "truth" else self.case.world,
            "log": str(log),
        }
        zygote = self._zygote(row.allocator)
        spare = self._ballast.held_bytes
        return measure(zygote, job, self.scratch, before_loading, PATIENCE_S, spare)

    def _prepare(self, cold: bool) -> None:
        """Brings the checkpoint into the page cache, or, if `cold`, out of it."""
        if cold:
            drop(Path(self.case.directory))
        else:
            for path in self.files():
                with path.open("rb") as file:
                    while file.read(1 << 24):
                        pass

    def measure(self, row: Row, round_: int, cold: bool, compared: bool = True) -> Result:
        """The result of one run, which may be a failure. `compared`: whether the shards are
        compared with the expected ones."""
        result: Result = {"case": self.case.name, "row": row.name, "round": round_, "cold": cold}
        need = row.need_in(self.case) * self.shards_bytes
        free = available_bytes() + self._ballast.held_bytes
        if self.case.name in row.does_not_apply:
            return result | {"outcome": "n/a", "why": row.does_not_apply[self.case.name]}
        if need + STARTED_BYTES > free:
            why = f"needs about {need / GIB:.1f} GiB, {free / GIB:.1f} GiB are free"
            return result | {"outcome": "skipped", "why": why}
        cached = -1
        self._ballast.take(int(min(need + GIB, free / 2)) // PAGE * PAGE, row.huge_pages)

        def before_loading() -> None:
            nonlocal cached
            self._prepare(cold)
            cached = cached_bytes(Path(self.case.directory))
            if cold and cached > sum(self.stored) / 100:
                raise RunFailedError(f"{cached} bytes of the files stay in the page cache")
            await_report()
            self._ballast.release()

        try:
            raw = self._run(row, before_loading, compared)
        except RunFailedError as error:
            return result | {"outcome": "cannot", "why": str(error)}
        cached_after = cached_bytes(Path(self.case.directory))
        seen = {"cached_before_bytes": cached, "cached_after_bytes": cached_after} | raw["seen"]
        return result | seen | timed([rank["times"] for rank in raw["loaded"]]) | outcome(raw)


def outcome(raw: dict[str, Any]) -> Result:
    wrong = sorted({name for rank in raw["checked"] for name in rank["wrong"]})
    return {"outcome": "wrong" if wrong else "right", "why": ", ".join(wrong)}


def timed(ranks: list[dict[str, tuple[float, float]]]) -> Result:
    """Seconds from the first rank's start to the last rank's end, and CPU seconds of all ranks
    together. `ranks`: for each rank, `rivals.rank.now()` by the name of the moment."""
    begins = [marks.get("begin_load", marks["begin"]) for marks in ranks]
    begin_s = min(seconds for seconds, _ in begins)
    builds = [marks["built"][0] - marks["begin"][0] for marks in ranks if "built" in marks]
    return {
        "build_s": max(builds, default=None),
        "load_s": max(marks["loaded"][0] for marks in ranks) - begin_s,
        "seconds": max(marks["written"][0] for marks in ranks) - begin_s,
        "cpu_s": sum(marks["written"][1] for marks in ranks) - sum(cpu_s for _, cpu_s in begins),
    }


def synthesise(program: Path, case: Case, layers: int | None, scratch: Path) -> Case:
    """The case with its checkpoint; cases of the same architecture share one."""
    wanted = case.layers if layers is None else layers
    directory = scratch / f"{case.arch}-{wanted}"
    if not directory.exists():
        words = ["--arch", case.arch, "--shard-size", SHARD_SIZE]
        words += ["--layers", str(wanted)] if wanted else []
        subprocess.run([program, "synth", directory, *words, "--quiet"], check=True)
    return dataclasses.replace(case, layers=wanted, directory=str(directory))


def measure_case(
    stage: Stage, rows: list[Row], reps: int, cold: int, begun: float, raw: TextIO
) -> list[Result]:
    """Measures all rows in `reps` warm rounds and `cold` cold ones; a slow row only in the first
    round of each."""
    results: list[Result] = []
    given_up: set[str] = set()
    for round_ in range(reps + cold):
        first = [r for r in results if r["round"] in (0, reps) and "seconds" in r]
        seen = {(r["row"], r["cold"]): r["seconds"] for r in first}
        is_cold = round_ >= reps
        # A new order each round, since the previous loader affects how soon pages are free.
        for row in random.Random(round_).sample(rows, len(rows)):
            bar = SLOW * min((s for (_, cold_), s in seen.items() if cold_ == is_cold), default=0)
            if row.name in given_up or seen.get((row.name, is_cold), 0) > bar:
                continue
            result = stage.measure(row, round_, is_cold, (row.name, is_cold) not in seen)
            result |= {"begun": begun, "at": time.time(), "shards_bytes": stage.shards_bytes}
            results.append(result)
            print(json.dumps(result), file=raw, flush=True)
            tell(result, stage.shards_bytes)
            if result["outcome"] in ("cannot", "n/a"):
                given_up.add(row.name)
    return results


def newest(raw: Path, case: str) -> list[Result]:
    """The runs of each row's last measurement of a case. Runs with an older definition of the
    case's model are ignored."""
    results = [json.loads(line) for line in raw.read_text().splitlines()]
    results = [result for result in results if result["case"] == case]
    last: dict[tuple[str, bool], float] = {}
    for result in results:
        row = result["row"], result["cold"]
        last[row] = max(last.get(row, 0), result["begun"])
    return [
        result
        for result in results
        if result["begun"] == last[result["row"], result["cold"]]
        and result["shards_bytes"] == results[-1]["shards_bytes"]
    ]


def tell(result: Result, shards_bytes: int) -> None:
    """Prints the result as a line of progress on stderr."""
    what = result["outcome"]
    if "seconds" in result:
        peak = result["peak_sampled_bytes"] / shards_bytes
        what += f", {result['seconds']:.2f} s, {result['cpu_s']:.2f} s of CPU, {peak:.2f} shards"
    why = f": {result['why']}" if result["why"] else ""
    when = "cold" if result["cold"] else "warm"
    print(f"{result['case']} {when} {result['row']}: {what}{why}"[:400], file=sys.stderr)


def selected(names: str) -> list[Row]:
    if names == "all":
        return [row for row in ROWS if row.in_all]
    if names == "readme":
        names = IN_README
    by_name = {row.name: row for row in ROWS}
    unknown = set(names.split(",")) - by_name.keys()
    if unknown:
        raise SystemExit(f"no rows {', '.join(sorted(unknown))}; there are {', '.join(by_name)}")
    return [by_name[name] for name in names.split(",")]


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument(
        "--case",
        choices=["all", *(case.name for case in CASES)],
        help="default: the cases of README.md for its rows, otherwise all",
    )
    parser.add_argument(
        "--rows", default="readme", help="readme (the default), all, or names separated by commas"
    )
    parser.add_argument("--reps", type=int, default=3, help="rounds with a warm page cache")
    parser.add_argument("--cold", type=int, default=0, help="rounds with a cold page cache")
    parser.add_argument("--ranks", type=int, default=WORLD)
    parser.add_argument("--layers", type=int, help="only the first N layers (0: all)")
    parser.add_argument("--checkpoint", help="a directory to load instead of a synthesised one")
    parser.add_argument("--modicum", type=Path, default=ROOT / "build/release/modicum")
    parser.add_argument("--raw", type=Path, help="the file that runs are appended to")
    return parser.parse_args()


def measured_cases(case: str | None, rows: str) -> list[Case]:
    """The cases that the arguments `--case` and `--rows` select."""
    if case is None and rows == "readme":
        return [one for one in CASES if one.name in CASES_IN_README]
    return [one for one in CASES if case in (None, "all", one.name)]


def of_all(results: list[Result], rows: list[Row]) -> list[Row]:
    """The rows of the case's table: those with results, in the order of ROWS. A row that `--rows
    all` excludes is in the table only if it is measured now."""
    there = {result["row"] for result in results}
    return [row for row in ROWS if row.name in there and (row.in_all or row in rows)]


def is_whole(results: list[Result], names: str = "all") -> bool:
    """Whether all rows that `names` selects have a run."""
    return {row.name for row in selected(names)} <= {result["row"] for result in results}


def write_pages(by_case: dict[str, list[Result]]) -> None:
    """Writes the tables of several cases. A table is written only if all of its rows have runs; the
    table of read loops contains only cases with cold runs."""

    def of_rows(names: str, cases: Iterable[str] = by_case) -> dict[str, list[Result]]:
        rows = {row.name for row in selected(names)}
        return {
            case: [result for result in by_case[case] if result["row"] in rows] for case in cases
        }

    for pages, names, words, runs in (
        ([RESULTS], "all", " --rows all", of_rows("all")),
        (READMES, IN_README, "", of_rows(IN_README, CASES_IN_README)),
    ):
        if all(is_whole(results, names) for results in runs.values()):
            for page in pages:
                write_between_markers(page, "loaders", overview(selected(names), runs, words))
    with_cold = {
        case: results
        for case, results in of_rows(READ_LOOPS).items()
        if is_whole([result for result in results if result["cold"]], READ_LOOPS)
    }
    if with_cold:
        runs = sum(with_cold.values(), [])
        warm, cold = (len({r["round"] for r in runs if r["cold"] == is_}) for is_ in (False, True))
        words = f" --rows {READ_LOOPS} --reps {warm} --cold {cold}"
        text = beside_cold(selected(READ_LOOPS), with_cold, words)
        write_between_markers(RESULTS, "loaders-read-loops", text)


def main() -> int:
    options = parsed()
    # SIGTERM must clean up like a normal exit.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("terminated"))
    if not options.checkpoint and not options.modicum.is_file():
        raise SystemExit(f"{options.modicum} is not there; run `make build`")
    rows = selected(options.rows)
    scratch = Path(tempfile.mkdtemp(prefix="modicum-bench-"))
    # Runs of other models or with another number of ranks are not recorded for the pages.
    is_other = options.layers is not None or options.checkpoint or options.ranks != WORLD
    raw_path = options.raw or (scratch / "raw.jsonl" if is_other else RAW)
    raw_path.parent.mkdir(exist_ok=True)
    begun = time.time()
    try:
        for case in measured_cases(options.case, options.rows):
            case = dataclasses.replace(case, world=options.ranks)
            if options.checkpoint:
                case = dataclasses.replace(case, directory=options.checkpoint)
            else:
                case = synthesise(options.modicum, case, options.layers, scratch)
            with Stage(case, scratch) as stage, raw_path.open("a") as raw:
                measure_case(stage, rows, options.reps, options.cold, begun, raw)
            results = newest(raw_path, case.name)
            text = table(case, of_all(results, rows), results, stage.shards_bytes, stage.stored)
            print(text, flush=True)
            if not is_other and is_whole(results):
                write_between_markers(RESULTS, f"loaders-{case.name}", text)
        by_case = {case.name: newest(raw_path, case.name) for case in CASES}
    finally:
        shutil.rmtree(scratch)
    if not is_other:
        write_pages(by_case)
    return 0


if __name__ == "__main__":
    sys.exit(main())
