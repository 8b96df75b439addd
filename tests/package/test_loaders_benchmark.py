"""benchmarks/loaders.py: the comparison of the loaded bits, the memory measured, and the tables.

Catches: bits that are not compared; a peak between two samples that is missed; a table that mixes
measurements of one row; a table of README.md that the program would not write.
"""

import calendar
import json
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from cage import why_no_cage
from program import run_json

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "benchmarks"))

import loaders  # noqa: E402
from harness.watch import Watch, group_within  # noqa: E402
from rivals import tables  # noqa: E402
from rivals.rows import CASES, ROWS, Row  # noqa: E402

MIB = 1 << 20

# A program that, for each line of input, allocates 64 MiB, writes all pages and frees them. Its
# argument: the file that adds a process to a cgroup, or "".
BRIEF = """
import mmap, os, sys
if sys.argv[1]:
    open(sys.argv[1], "w").write(str(os.getpid()))
print("ready", flush=True)
for _ in sys.stdin:
    with mmap.mmap(-1, 64 << 20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as memory:
        for page in range(0, len(memory), mmap.PAGESIZE):
            memory[page] = 1
    print("gone", flush=True)
"""


def start_brief(procs: str) -> subprocess.Popen[str]:
    child = subprocess.Popen(
        [sys.executable, "-c", BRIEF, procs],
        text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
    )  # fmt: skip
    assert child.stdout and child.stdout.readline() == "ready\n"
    return child


def use_memory_briefly(child: subprocess.Popen[str]) -> None:
    assert child.stdin and child.stdout
    print("go", file=child.stdin, flush=True)
    assert child.stdout.readline() == "gone\n"


def test_a_peak_between_two_samples_is_not_missed() -> None:
    with group_within(1 << 30) as (group, procs):
        child = start_brief(procs)
        try:
            use_memory_briefly(child)  # must not count: no Watch has been started
            with Watch([child.pid], group) as watch:
                quiet = watch.end()
            with Watch([child.pid], group) as watch:
                use_memory_briefly(child)
                seen = watch.end()
        finally:
            child.kill()
            child.communicate()
    assert quiet["peak_high_water_bytes"] < 32 * MIB
    assert seen["peak_sampled_bytes"] < 32 * MIB
    assert 60 * MIB < seen["peak_high_water_bytes"] < 96 * MIB
    if why_no_cage():
        pytest.skip("passed with high-water marks; the peak of a cgroup needs a cgroup")
    assert quiet["peak_group_bytes"] < 32 * MIB
    assert 60 * MIB < seen["peak_group_bytes"] < 96 * MIB


def test_a_run_that_would_not_fit_is_skipped(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    stage = loaders.Stage(CASES[0], tmp_path)
    stage.shards_bytes = 1 << 30
    row = next(row for row in ROWS if row.name == "accelerate")
    monkeypatch.setattr(loaders, "available_bytes", lambda: 5 << 30)
    result = stage.measure(row, 0, cold=False)
    assert result["outcome"] == "skipped"
    assert result["why"] == "needs about 3.5 GiB, 5.0 GiB are free"


def outcome(row: str, outcome: str, why: str = "") -> dict[str, Any]:
    """A run as it is written to the raw file, without measurements."""
    return {"row": row, "round": 0, "cold": False, "begun": 0, "outcome": outcome, "why": why}


def test_a_table_has_the_reason_for_a_missing_figure() -> None:
    rows = [Row("one", ""), Row("two", "")]
    results = [outcome("one", "cannot", "no |\nsuch key"), outcome("two", "n/a", "not its end")]
    text = tables.table(CASES[0], rows, results, shards_bytes=1, stored=[1])
    assert "| `one` | **cannot** | - |" in text
    assert "- cannot: `one`: `no | such key`" in text
    assert "- n/a: `two`: `not its end`" in text


def test_one_wrong_run_among_right_ones_is_reported() -> None:
    runs = [outcome("one", "right"), outcome("one", "wrong", "a.weight"), outcome("one", "right")]
    assert tables.outcome_of(runs) == "wrong"
    assert tables.outcome_of([outcome("one", "skipped", "no room"), runs[0]]) == "right"
    assert tables.spread([3.0, 1.0, 2.0]) == "2.00 (1.00-3.00)"
    assert tables.spread([1.001, 1.002]) == "1.00"


def test_tables_show_each_rows_last_measurement(tmp_path: Path) -> None:
    """A measurement consists of the runs with one `begun`. Measurements whose shards have another
    size than the newest are ignored: the case had another model."""
    raw = tmp_path / "raw.jsonl"
    runs = [  # case, row, cold, begun, bytes of the shards
        ("dense", "one", False, 1, 8),
        ("dense", "one", False, 2, 9),
        ("dense", "one", True, 2, 9),
        ("dense", "two", False, 2, 9),
        ("moe", "one", False, 4, 5),
        ("dense", "three", False, 1, 8),
        ("dense", "one", False, 3, 9),
        ("dense", "one", False, 3, 9),
    ]
    names = ("case", "row", "cold", "begun", "shards_bytes")
    lines = [json.dumps(dict(zip(names, run, strict=True))) for run in runs]
    raw.write_text("\n".join(lines))
    left = [tuple(result.values()) for result in loaders.newest(raw, "dense")]
    assert left == [runs[2], runs[3], runs[6], runs[7]]
    assert loaders.newest(raw, "tp") == []
    day = 86400
    assert tables.when([{"begun": 0}]) == "1970-01-01"
    assert tables.when([{"begun": 2 * day}, {"begun": 9}]) == (
        "2 measurements, 1970-01-01 to 1970-01-03"
    )


README_ORIGIN = re.compile(
    r"`python benchmarks/loaders.py`: (\d+) warm and 0 cold rounds, .*, (\d+)-(\d+)-(\d+); "
    r"other load (\S+) CPUs, at most (\S+); (modicum .*, Python \S+); (.* CPUs, .*)\."
)


def test_readmes_table_is_what_the_program_writes(
    root: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """From runs with the figures of README.md the program writes the same README.md, and its table
    into README.zh.md. Its cases are enough for that; RESULTS.md needs all rows in all cases."""
    empty = "<!-- bench:loaders -->\n<!-- /bench:loaders -->\n"
    pages = [tmp_path / name for name in ("README.md", "README.zh.md", "RESULTS.md")]
    texts = [(root / page.name).read_text() for page in pages[:2]] + [empty]
    for page, text in zip(pages, texts, strict=True):
        page.write_text(re.sub(r"(?s)(?<=bench:loaders -->).*(?=<!-- /bench)", "\n", text))
    text = texts[0]
    origin = README_ORIGIN.search(text)
    assert origin
    rounds, *day, load, most, versions, machine = origin.groups()
    begun = calendar.timegm((*map(int, day), 0, 0, 0))
    by_case: dict[str, list[dict[str, Any]]] = {case.name: [] for case in CASES}
    for name, *cells in re.findall(r"^\| `(\S+)` \| ([\d.]+, .* s) \| (.*) \|$", text, re.M):
        for case, cell in zip(loaders.CASES_IN_README, cells, strict=True):
            peak, seconds = (float(one) for one in cell.removesuffix(" s").split(", "))
            figures = {"peak_high_water_bytes": peak, "seconds": seconds, "shards_bytes": 1}
            for round_ in range(int(rounds)):
                run = outcome(name, "right") | figures | {"round": round_, "begun": begun}
                by_case[case].append(run | {"watched_s": 1, "foreign_cpu_s": float(load)})
    by_case[loaders.CASES_IN_README[0]][0]["foreign_cpu_s"] = float(most)
    monkeypatch.setattr(loaders, "READMES", pages[:2])
    monkeypatch.setattr(loaders, "RESULTS", pages[2])
    monkeypatch.setattr(tables, "versions", lambda: versions)
    monkeypatch.setattr(tables, "machine", lambda: machine)
    loaders.write_pages(by_case)
    assert [page.read_text() for page in pages] == texts


def test_readmes_cases_are_the_default() -> None:
    def names(*words: str | None) -> list[str]:
        return [case.name for case in loaders.measured_cases(*words)]

    assert names(None, "readme") == [*loaders.CASES_IN_README]
    assert names(None, "all") == names("all", "readme") == [case.name for case in CASES]
    assert names("tp", "all") == ["tp"]


@pytest.mark.soak
def test_loaders_are_measured_and_a_wrong_one_is_caught(
    modicum: Path, torch: SimpleNamespace, tmp_path: Path
) -> None:
    pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    model = tmp_path / "tiny"
    # Two layers; rows that three ranks share unevenly; no experts for the last rank.
    run_json(modicum, "synth", model, "--arch", "tiny-moe")
    raw = tmp_path / "raw.jsonl"
    # The row flipped-bit loads one wrong bit, to show that the comparison finds it.
    words = ["--case", "moe", "--checkpoint", model, "--rows", "preadv,get_slice,flipped-bit"]
    words += ["--reps", "1", "--cold", "0", "--ranks", "3", "--raw", raw]
    done = subprocess.run(
        [sys.executable, ROOT / "benchmarks/loaders.py", *words],
        capture_output=True, text=True, timeout=180,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    results = {r["row"]: r for r in map(json.loads, raw.read_text().splitlines())}
    assert results["preadv"]["outcome"] == "right", results["preadv"]
    assert results["get_slice"]["outcome"] == "right", results["get_slice"]
    assert results["flipped-bit"]["outcome"] == "wrong"
    assert results["flipped-bit"]["why"] == "model.embed_tokens.weight"
    assert "| `flipped-bit` | **wrong** |" in done.stdout
    for result in results.values():
        assert 0 < result["load_s"] <= result["seconds"]
        assert result["peak_sampled_bytes"] >= result["kept_bytes"] > 0
