"""What `modicum watch` records of a program that uses Modicum, without a flag of that program: the
memory of each process over time, divided by its purpose (the owner), the phases, and the promise.
`--trace` and `--compare` use these records.

Catches: the owners do not add up to the peak; a kind of memory counts as another; a rank reports
nothing, or the promise of another rank; a kill has no phase or no owner; a trace has no counters; a
comparison blames an owner that is equal in both runs; `watch` costs much CPU time or memory.
"""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from cage import why_no_cage
from program import Ended, failure, run, run_json

pytestmark = pytest.mark.alone  # other tests' CPU use would delay samples

MIB = 1 << 20
# The digest is computed while the shards are held, which gives several samples of them.
HOLD_SHARDS = ["--digest", "--budget", "6GiB"]


@pytest.fixture(scope="module")
def model(modicum: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of about 1 GiB, so that several samples are taken during a load."""
    directory = tmp_path_factory.mktemp("watched") / "qwen"
    run_json(modicum, "synth", directory, "--arch", "qwen2.5-0.5b", "--sparse")
    return directory


def watched(modicum: Path, *words: object) -> tuple[dict[str, Any], Ended]:
    """Runs `modicum WORDS` under `watch`. Returns the document of `watch` and the whole result."""
    done = run(modicum, "watch", "--json", "--", modicum, *words)
    assert done.code == 0, done.stderr
    return done.json, done


def totals(timeline: dict[str, Any]) -> list[int]:
    """The memory that all processes held together, for each sample."""
    lists = [bytes for track in timeline["tracks"] for bytes in track["owners"].values()]
    return [sum(value or 0 for value in sample) for sample in zip(*lists, strict=True)]


def track_of(timeline: dict[str, Any], rank: int) -> dict[str, Any]:
    """A rank's series of the timeline."""
    (track,) = [track for track in timeline["tracks"] if track["rank"] == rank]
    return track


def test_a_load_reports_its_ledger(modicum: Path, model: Path) -> None:
    document, done = watched(modicum, "load", model, "--ranks", 2, *HOLD_SHARDS, "--json")
    loaded = json.loads(done.stderr)
    timeline = document["timeline"]
    assert max(totals(timeline)) == document["peak"]["bytes"] == document["peak_bytes"]
    assert (
        totals(timeline)[timeline["t_s"].index(document["peak"]["at_s"])] == document["peak_bytes"]
    )
    assert timeline["t_s"] == sorted(timeline["t_s"])
    assert timeline["budget_bytes"] == 6 << 30
    for rank in loaded["ranks"]:
        track = track_of(timeline, rank["rank"])
        assert track["pid"] == rank["pid"]
        shards = max(value or 0 for value in track["owners"]["shards"])
        assert 0.9 * rank["ledger_peak_bytes"] < shards <= rank["ledger_peak_bytes"]
        (process,) = [one for one in document["processes"] if one["pid"] == rank["pid"]]
        for at_s, value in zip(timeline["t_s"], track["owners"]["shards"], strict=True):
            lives = process["begin_s"] - 1e-4 <= at_s <= process["end_s"] + 1e-4
            assert (value is not None) == lives, "a value exactly while the process lives"
        unexplained = max(value or 0 for value in track["owners"].get("unexplained", [0]))
        assert unexplained < 0.03 * shards + 4 * MIB
    assert "of which parameters" in document["peak"]["cause"]


@pytest.mark.soak
def test_a_load_reports_its_phase_and_promise(modicum: Path, model: Path) -> None:
    plan = run_json(modicum, "plan", model, "--ranks", 2)
    (strategy,) = [one for one in plan["strategies"] if one["name"] == "own-shard"]
    (promised,) = [one for one in strategy["nodes"][0]["phases"] if one["phase"] == "load"]
    # Ranks report promises without page tables; the plan's node includes the launcher.
    launcher = 8 * MIB
    of_ranks = promised["bytes"] - promised["by_purpose"]["page_tables"] - launcher
    document, _ = watched(modicum, "load", model, "--ranks", 2, "-q")
    timeline = document["timeline"]
    total = 0
    for rank in range(2):
        (phase,) = [one for one in timeline["phases"] if one["rank"] == rank]
        assert (phase["name"], phase["pid"]) == ("load", track_of(timeline, rank)["pid"])
        assert 0 < phase["begin_s"] < phase["end_s"] <= document["elapsed_s"]
        promise = track_of(timeline, rank)["promise_bytes"]
        inside = [phase["begin_s"] < at < phase["end_s"] for at in timeline["t_s"]]
        (value,) = {bytes for bytes in promise if bytes is not None}
        assert all(bytes == value for bytes, is_in in zip(promise, inside, strict=True) if is_in)
        assert promise[0] is None
        total += value
    assert total == of_ranks


@pytest.mark.soak
def test_a_rehearsal_has_phases_of_each_kind(modicum: Path, gpt2: Path, tmp_path: Path) -> None:
    words = ["--optimizer", "adamw:fp32-split", "--steps", 3, "--save", tmp_path / "steps"]
    document, _ = watched(modicum, "rehearse", gpt2, "--ranks", 2, *words, "-q")
    phases = document["timeline"]["phases"]
    names = {rank: [one["name"] for one in phases if one["rank"] == rank] for rank in range(2)}
    assert names[0] == names[1]
    # After the save the old ranks make one more step, to be compared with the resumed ones.
    assert names[0] == ["load", "step", "step", "step", "save", "step", "load", "resume", "step"]
    ends = [one["end_s"] for one in phases if one["rank"] == 0]
    begins = [one["begin_s"] for one in phases if one["rank"] == 0]
    assert all(end <= begin for end, begin in zip(ends, begins[1:], strict=False)), phases
    assert any("moments" in track["owners"] for track in document["timeline"]["tracks"])


# Holds 60 MiB of each kind: small blocks in malloc's main heap and in that of a thread, a large
# block, shared memory, and pages of the file in argv[1] that it writes.
KINDS = """
import ctypes, mmap, sys, threading, time
SIZE = 60 << 20
malloc = ctypes.CDLL(None).malloc
malloc.restype = ctypes.c_void_p
def blocks():
    for _ in range(SIZE // 65536): ctypes.memset(malloc(65536), 1, 65536)
blocks()
thread = threading.Thread(target=blocks)
thread.start()
thread.join()
def written(*where, flags):
    mapped = mmap.mmap(*where, SIZE, flags=flags)
    for at in range(0, len(mapped), 4096): mapped[at] = 1
    return mapped
file = open(sys.argv[1], "r+b")
held = [
    written(-1, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS),
    written(-1, flags=mmap.MAP_SHARED | mmap.MAP_ANONYMOUS),
    written(file.fileno(), flags=mmap.MAP_PRIVATE),
]
time.sleep(1)
held.append(bytearray(2 << 20))  # the peak comes after a sample of the kinds
time.sleep(1)
"""
KIND_NAMES = ("malloc_heap", "malloc_arenas", "file_copies", "anonymous", "shared_memory")


def test_a_program_that_reports_nothing_is_divided_by_kind(modicum: Path, tmp_path: Path) -> None:
    file = tmp_path / "mapped"
    with file.open("wb") as opened:
        opened.truncate(60 * MIB)
    done = run(modicum, "watch", "--json", "--", sys.executable, "-c", KINDS, file)
    assert done.code == 0, done.stderr
    timeline = done.json["timeline"]
    assert timeline["phases"] == []
    assert max(totals(timeline)) == done.json["peak_bytes"]
    (track,) = timeline["tracks"]
    assert {"stacks", *KIND_NAMES} <= track["owners"].keys() <= {"held", "stacks", *KIND_NAMES}
    last = max(at for at, total in enumerate(totals(timeline)) if total > 300 * MIB)
    for kind in KIND_NAMES:
        assert 56 * MIB <= track["owners"][kind][last] < 80 * MIB, kind
    text = run(modicum, "watch", "--", sys.executable, "-c", KINDS, file).stderr
    for words in ("malloc's main heap ", "anonymous mappings ", "written pages of files "):
        assert words in text


GROWS = """
import time
held = []
for _ in range(40):
    held.append(bytearray(b"x") * (4 << 20))
    time.sleep(0.05)
"""


def test_what_grows_is_named_with_its_rate(modicum: Path) -> None:
    done = run(modicum, "watch", "--json", "--", sys.executable, "-c", GROWS)
    growth = done.json["growth"]
    assert growth["pid"] == done.json["processes"][0]["pid"]
    assert growth["owner"] == "anonymous"
    assert 0.3 * (4 * MIB / 0.05) < growth["bytes_per_s"] < 1.1 * (4 * MIB / 0.05)
    assert "modicum.memory.attribute" in done.json["next"]
    still = run(
        modicum, "watch", "--json", "--", sys.executable, "-c", "import time; time.sleep(2)"
    )
    assert (still.json["growth"], still.json["next"]) == (None, None)


@pytest.mark.parametrize("times", (1, pytest.param(20, marks=pytest.mark.soak)))
def test_a_killed_load_has_its_phase_and_owner(modicum: Path, model: Path, times: int) -> None:
    if reason := why_no_cage():
        pytest.skip(reason)
    words = ["load", model, "--ranks", 2, "--budget", "none", "-q"]
    for _ in range(times):
        done = run(modicum, "watch", "--json", "--limit", "300MiB", "--", modicum, *words)
        assert done.code != 0
        killed = done.json["killed"]
        assert killed["name"].startswith("modicum-rank-")
        (process,) = [one for one in done.json["processes"] if one["pid"] == killed["pid"]]
        assert killed["rank"] == process["rank"] and killed["rank"] in (0, 1)
        assert killed["phase"] == "load"
        assert killed["grew"]["owner"] == "shards"
        for part in ("during `load`", "mostly parameters", "would have fitted"):
            assert part in killed["explanation"], killed["explanation"]


@pytest.mark.soak
def test_a_trace_has_phases_and_counters(modicum: Path, model: Path, tmp_path: Path) -> None:
    file = tmp_path / "run.trace.json"
    file.write_text("an older and longer one" * 100_000)
    words = ["load", model, "--ranks", 2, *HOLD_SHARDS, "-q"]
    done = run(modicum, "watch", "--json", "--trace", file, "--", modicum, *words)
    assert done.code == 0, done.stderr
    tracks = {track["pid"]: track["owners"] for track in done.json["timeline"]["tracks"]}
    events = json.loads(file.read_text())["traceEvents"]
    required = {"C": {"ts", "args"}, "X": {"ts", "dur"}, "M": {"args"}, "i": {"ts", "s"}}
    for event in events:
        assert {"name", "pid", "tid"} | required[event["ph"]] <= event.keys()
    assert sorted(one["args"]["name"] for one in events if one["ph"] == "M") == [
        "all processes", "modicum", "rank 0", "rank 1",
    ]  # fmt: skip
    loads = [one for one in events if one["ph"] == "X"]
    assert [one["name"] for one in loads] == ["load", "load"]
    for load in loads:
        counters = [one for one in events if one["ph"] == "C" and one["pid"] == load["pid"]]
        shards = [bytes_ for bytes_ in tracks[load["pid"]]["shards"] if bytes_ is not None]
        assert max(one["args"]["shards"] for one in counters) == max(shards) > 0
        assert not any(counters[-1]["args"].values())  # zero at the end of the process


def test_a_trace_that_cannot_be_written_is_an_error(modicum: Path, tmp_path: Path) -> None:
    """It is found before the command runs."""
    mark = tmp_path / "ran"
    words = ["watch", "--trace", tmp_path / "no" / "x.json", "--json", "--", "touch", mark]
    done = run(modicum, *words)
    assert (done.code, done.error["category"]) == (13, "IO")
    assert not mark.exists()


@pytest.mark.soak
def test_a_comparison_names_the_owner_that_differs_most(
    modicum: Path, model: Path, tmp_path: Path
) -> None:
    files = []
    for strategy in ("own-shard", "full-per-rank"):
        document, _ = watched(modicum, "load", model, "--ranks", 2, "--strategy", strategy, "-q")
        files.append(tmp_path / f"{strategy}.json")
        files[-1].write_text(json.dumps(document))
    compared = run_json(modicum, "watch", "--compare", *files)
    assert (compared["owner"], compared["phase"]) == ("window", "load")
    assert compared["difference_bytes"] == (
        compared["b"]["peak_bytes"] - compared["a"]["peak_bytes"]
    )
    assert compared["difference_bytes"] > 800 * MIB
    text = run(modicum, "watch", "--compare", *files)
    assert text.code == 0
    assert text.stdout.startswith(compared["sentence"] + "\n")
    assert "full-per-rank" in compared["sentence"] and "`load`" in compared["sentence"]
    assert '"window of whole tensors" differs most' in compared["sentence"]
    assert "  window of whole tensors " in text.stdout and "during load " in text.stdout


def test_invalid_comparisons_are_refused(modicum: Path, tmp_path: Path) -> None:
    good = tmp_path / "good.json"
    good.write_text('{"peak": {"bytes": 1, "cause": ""}, "timeline": {}}')
    for text, category in (("{", "FORMAT.JSON"), ("{}", "FORMAT.SCHEMA"), ("", "FORMAT.JSON")):
        bad = tmp_path / "bad.json"
        bad.write_text(text)
        error = failure(modicum, 10, "watch", "--compare", good, bad)
        assert (error["category"], error["file"]) == (category, "bad.json")
    assert failure(modicum, 13, "watch", "--compare", good, tmp_path / "none")["category"] == "IO"
    assert failure(modicum, 2, "watch", "--compare", good)["category"] == "USAGE"
    done = run(modicum, "watch", "--json", "--compare", good, good, "--", "true")
    assert (done.code, done.error["category"]) == (2, "USAGE")
    assert run(modicum, "watch", "--compare", good, good).code == 0


def test_runs_whose_files_have_one_name_are_called_by_their_paths(
    modicum: Path, tmp_path: Path
) -> None:
    files = []
    for folder, size in (("a", 100 * MIB), ("b", 300 * MIB)):
        files.append(tmp_path / folder / "run.json")
        files[-1].parent.mkdir()
        files[-1].write_text(f'{{"peak": {{"bytes": {size}, "cause": ""}}, "timeline": {{}}}}')
    compared = run_json(modicum, "watch", "--compare", *files)
    first, second = (str(file.with_suffix("")) for file in files)
    assert first in compared["sentence"] and second in compared["sentence"]


@pytest.mark.soak
def test_watching_a_load_costs_little(modicum: Path, model: Path) -> None:
    document, _ = watched(modicum, "load", model, "--ranks", 4, "-q")
    cost = document["watch"]
    # `watch` may use 0.5 % of a core, and 200 ms more at the beginning. This test allows 1 % of a
    # core, those 200 ms, and 100 ms for the start of the program.
    assert cost["cpu_s"] < 0.01 * document["elapsed_s"] + 0.3
    assert cost["peak_bytes"] < 16 * MIB


@pytest.mark.soak
def test_a_long_record_stays_small(modicum: Path) -> None:
    """Of hundreds of processes, the largest have their own series, and the others one together."""
    script = "for i in $(seq 300); do sleep 2 & done; wait"
    done = run(modicum, "watch", "--json", "--", "sh", "-c", script)
    assert done.json["watch"]["peak_bytes"] < 16 * MIB
    tracks = done.json["timeline"]["tracks"]
    assert len(tracks) <= 33
    assert (tracks[-1]["label"], tracks[-1]["pid"]) == ("others", 0)
    assert max(totals(done.json["timeline"])) == done.json["peak_bytes"]
