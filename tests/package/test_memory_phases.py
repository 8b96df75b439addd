"""`modicum.memory.phase`: the peak of a block, from samples and from the kernel's high-water mark
(VmHWM); the files that `save` writes, and the HTML pages that `draw` makes of them.

Catches: a high-water mark that is not reset; one that is never read; an inner phase, or a load,
that resets it and does not add it to outer phases; children that are not found; a forked child that
continues its parent's recording; a recording that needs NVML; ranks on a page that are shifted in
time, or whose peak is thinned away; a phase that stays open because its begin or end failed; one
failed sample that ends the sampling; samples without a limit, or whose peak is lost at the limit.
"""

import json
import mmap
import os
import resource
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from pages import drawn_on

import modicum
from modicum import memory
from modicum.memory import recording
from modicum.memory.nvml import Devices

pytestmark = pytest.mark.alone  # measures this process

MIB = 1 << 20
SPIKE = 64 * MIB
INEXACT = MIB  # the kernel's counters lag: each CPU adds its changes in batches
NEVER = 100.0  # seconds between samples: only the high-water mark can record a peak


@pytest.fixture(autouse=True)
def no_recording() -> None:
    """Each test begins without phases of earlier tests."""
    recording._recordings.clear()


def taken(size: int = SPIKE) -> mmap.mmap:
    """A new mapping, all pages written."""
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory[:: mmap.PAGESIZE] = b"x" * (size // mmap.PAGESIZE)
    return memory


def spike(size: int = SPIKE) -> None:
    """Allocates `size` bytes, writes them and frees them. No sample is taken meanwhile if samples
    are NEVER seconds apart."""
    taken(size).close()


def test_the_high_water_mark_has_peaks_between_samples() -> None:
    spike(2 * SPIKE)  # an earlier and higher peak, which must not count
    with memory.phase("spike", interval_s=NEVER) as held:
        spike()
    assert held.kernel_peak_bytes is not None, "this kernel can't reset the high-water mark"
    assert abs(held.peak_bytes - held.begin_bytes - SPIKE) < INEXACT
    assert held.sampled_peak_bytes < held.begin_bytes + SPIKE // 2
    assert abs(held.end_bytes - held.begin_bytes) < 4 * MIB


def test_outer_phases_keep_the_peaks_of_inner_ones() -> None:
    with memory.phase("outer", interval_s=NEVER) as outer:
        with memory.phase("high", interval_s=NEVER):
            spike()
        with memory.phase("low", interval_s=NEVER) as low:
            spike(8 * MIB)
    assert outer.peak_bytes - outer.begin_bytes >= SPIKE - INEXACT
    assert low.peak_bytes - low.begin_bytes < SPIKE // 2
    assert [(one.name, one.depth) for one in memory.phases()] == [
        ("outer", 0),
        ("high", 1),
        ("low", 1),
    ]


def test_a_load_in_a_phase_keeps_the_phases_peak() -> None:
    checkpoint = modicum.walk.open_checkpoint(None)
    recipe = modicum.walk.make_recipe(checkpoint)
    plan = modicum.walk.make_plan(recipe, modicum.walk.make_layout(recipe, ranks=1))
    with memory.phase("load", interval_s=NEVER) as held:
        spike()
        modicum.walk.load(plan, rank=0)
    assert held.peak_bytes - held.begin_bytes >= SPIKE - INEXACT


def test_samples_record_longer_peaks() -> None:
    with memory.phase("hold") as held:
        block = taken()
        deadline = time.monotonic() + 60
        while held.samples < 5 and time.monotonic() < deadline:
            time.sleep(0.01)
        block.close()
    assert abs(held.sampled_peak_bytes - held.begin_bytes - SPIKE) < 4 * MIB
    recorded = recording.recorded()
    assert sum("sample" in line for line in recorded) >= 5


def test_sampling_uses_less_than_a_tenth_of_a_core() -> None:
    """The documentation states 2 %; the limit here allows for a busy machine."""
    with memory.phase("warm", interval_s=NEVER):  # the first phase also loads NVML
        pass
    began = time.process_time()
    with memory.phase("idle"):
        time.sleep(1.5)
    assert time.process_time() - began < 0.15


def test_the_memory_of_children_counts() -> None:
    ready, done = os.pipe(), os.pipe()
    child = os.fork()
    if child == 0:
        block = taken()
        os.write(ready[1], block[:1])
        os.read(done[0], 1)
        os._exit(0)
    try:
        os.read(ready[0], 1)
        with memory.phase("child", interval_s=NEVER) as held:
            pass
    finally:
        os.write(done[1], b"x")
        os.waitpid(child, 0)
    # `kernel_peak_bytes` is of this process alone, `peak_bytes` includes children.
    assert held.peak_bytes - (held.kernel_peak_bytes or 0) >= SPIKE
    with memory.phase("alone", interval_s=NEVER) as alone:
        pass
    assert alone.peak_bytes < held.peak_bytes - SPIKE // 2


def test_a_forked_child_records_for_itself() -> None:
    with memory.phase("parent"):
        child = os.fork()
        if child == 0:
            with memory.phase("own"):
                names = [one.name for one in memory.phases()]
            os._exit(0 if names == ["own"] else 1)
        assert os.waitpid(child, 0)[1] == 0
    assert [one.name for one in memory.phases()] == ["parent"]


def test_a_phase_that_fails_is_complete() -> None:
    with pytest.raises(KeyError), memory.phase("failing"):
        raise KeyError
    (held,) = memory.phases()
    assert held.end_s >= held.begin_s
    assert held.end_bytes > 0
    assert not any(thread.name == "modicum-memory" for thread in threading.enumerate())


# ---- failures


SURROGATE = os.fsdecode(b"caf\xe9")  # of a file name that is not UTF-8


@contextmanager
def no_descriptors() -> Iterator[None]:
    """A context in which this process can't open files."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def is_sampling() -> bool:
    return any(thread.name == "modicum-memory" for thread in threading.enumerate())


def test_a_wrong_name_is_refused_and_later_phases_are_not_affected() -> None:
    for name, says in ((3, "a name or a function"), (SURROGATE, "the name of a phase")):
        with pytest.raises(modicum.UsageError, match=says), memory.phase(name):  # type: ignore
            pytest.fail("the block ran")
    with memory.phase("later") as later:
        pass
    assert memory.phases() == [later] and later.depth == 0
    assert not is_sampling()


@pytest.mark.parametrize("interval_s", [None, "1", -1.0, float("nan"), float("inf"), 1e30])
def test_a_wrong_interval_is_refused(interval_s: Any) -> None:
    contexts = [memory.phase("one", interval_s=interval_s)]
    if interval_s is not None:  # None: one attribution
        contexts.append(memory.attribute(interval_s=interval_s))
    for context in contexts:
        with pytest.raises(modicum.UsageError, match="interval_s"), context:
            pytest.fail("the block ran")
    assert memory.phases() == []


def test_a_phase_that_cannot_begin_is_no_phase(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patched, pytest.raises(RuntimeError):
        patched.setattr(threading.Thread, "start", refuse)
        with memory.phase("none"):
            pytest.fail("the block ran")
    with no_descriptors(), pytest.raises(modicum.IoError), memory.phase("none"):
        pytest.fail("the block ran")
    with memory.phase("later") as later:
        pass
    assert memory.phases() == [later] and later.depth == 0


def test_a_phase_whose_last_sample_fails_has_ended() -> None:
    with ExitStack() as after, pytest.raises(modicum.IoError), memory.phase("failing") as held:
        after.enter_context(no_descriptors())
    assert held.end_s >= held.begin_s
    assert not is_sampling()
    with memory.phase("later") as later:
        pass
    assert memory.phases() == [held, later] and later.depth == 0


def test_samples_go_on_after_some_have_failed() -> None:
    with memory.phase("hold") as held:
        with no_descriptors():
            time.sleep(0.2)
        block, before = taken(), held.samples
        while held.samples < before + 5 and is_sampling():
            time.sleep(0.01)
        block.close()
    assert abs(held.sampled_peak_bytes - held.begin_bytes - SPIKE) < 4 * MIB


def test_samples_are_merged_at_the_limit_and_the_peak_remains(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(recording, "_MOST_SAMPLES", 8)
    for peak in range(100):
        kept = recording._Recording()
        for at in range(100):
            kept._keep(recording.Sample(float(at), 7 if at == peak else 1, 0, ()))
        times = [of.at_s for of in kept.samples]
        assert 4 <= len(times) <= 8
        assert [of.at_s for of in kept.samples if of.held == 7] == [peak]
        # Each kept sample is one of 16 that were taken, however old it is.
        assert all(0 < later - one < 32 for one, later in pairwise(times))


# ---- files and pages


def saved(directory: Path, name: str, label: str) -> Path:
    """Records one more phase, and saves the recording of this process so far."""
    with memory.phase("wrap"):
        spike(MIB)
    return memory.write(directory / name, label=label, lines={"budget": 64 * MIB})


def test_saved_recordings_are_drawn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "3")
    first = saved(tmp_path, "memory-{rank}.jsonl", "native")
    assert first.name == "memory-3.jsonl"
    kinds = [next(iter(json.loads(line))) for line in first.read_text().splitlines()]
    assert kinds[:2] == ["process", "phase"]
    assert set(kinds[2:-1]) == {"sample"} and kinds[-1] == "line"
    second = saved(tmp_path, "other.jsonl", "accelerate")
    page = memory.draw(tmp_path / "memory.html", [first, second], title="both")
    runs = drawn_on(page)["runs"]
    assert [run["label"] for run in runs] == ["native", "accelerate"]
    for run, phases in zip(runs, (1, 2), strict=True):
        (track,) = run["document"]["timeline"]["tracks"]
        assert (track["label"], track["rank"], track["pid"]) == ("rank 3", 3, os.getpid())
        assert run["document"]["timeline"]["levels"] == [{"name": "budget", "bytes": 64 * MIB}]
        names = [phase["name"] for phase in run["document"]["timeline"]["phases"]]
        assert names == ["wrap"] * phases, "the second file has the phases of both calls"
    assert "<title>both</title>" in page.read_text()
    assert drawn_on(memory.draw(tmp_path / "own.html"))["runs"][0]["label"] == "host memory"


def recording_of(rank: int, began: float, samples: list[tuple[float, int, int]]) -> str:
    """The text of a file of `memory.write`, for a rank whose recording began at `began` seconds.
    A sample is (seconds since the recording began, bytes of the process, bytes of its children)."""
    process = {"label": "two", "rank": rank, "pid": 10 + rank, "host": "", "began": began}
    last = samples[-1][0]
    lines = [{"process": process}, {"phase": {"name": "load", "begin_s": 0.0, "end_s": last}}]
    keys = ("at_s", "held", "children")
    lines += [{"sample": dict(zip(keys, of, strict=True)) | {"devices": []}} for of in samples]
    lines += [{"line": {"name": "promise", "bytes": 1000}}]
    return "\n".join(map(json.dumps, lines)) + "\n"


def test_ranks_that_began_apart_are_drawn_on_one_time(tmp_path: Path) -> None:
    (tmp_path / "0").write_text(recording_of(0, 50.0, [(0.0, 10, 0), (2.0, 300, 0), (3.0, 20, 0)]))
    (tmp_path / "1").write_text(recording_of(1, 51.5, [(0.0, 5, 1), (1.0, 400, 30)]))
    page = memory.draw(tmp_path / "page.html", [tmp_path / "1", tmp_path / "0"])
    ((_, document),) = (run.values() for run in drawn_on(page)["runs"])
    line = document["timeline"]
    assert line["t_s"] == [0.0, 1.5, 2.0, 2.5, 3.0]
    zero, one = line["tracks"]
    assert zero["owners"] == {"held": [10, 10, 300, 300, 20]}
    assert one["owners"]["held"] == [None, 5, 5, 400, None]
    assert one["owners"]["children"] == [None, 1, 1, 30, None]
    assert one["promise_bytes"] == [None, 1000, 1000, 1000, None]
    assert [phase["begin_s"] for phase in line["phases"]] == [0.0, 1.5]
    assert (document["peak"]["at_s"], document["peak"]["bytes"]) == (2.5, 730)
    assert document["peak"]["cause"].startswith("rank 1 held most, 430 B, in phase 'load'")


def test_many_samples_are_thinned_and_the_peak_remains(tmp_path: Path) -> None:
    samples = [(i / 100, 1000 + (777 if i == 4321 else i % 7), 0) for i in range(10000)]
    (tmp_path / "0").write_text(recording_of(0, 0.0, samples))
    (run,) = drawn_on(memory.draw(tmp_path / "page.html", tmp_path / "0"))["runs"]
    line = run["document"]["timeline"]
    assert 300 < len(line["t_s"]) <= 600 and line["t_s"] == sorted(line["t_s"])
    assert max(line["tracks"][0]["owners"]["held"]) == 1777
    assert run["document"]["peak"]["at_s"] == 43.21


@pytest.mark.parametrize("text", ["", "{", '{"sample": {}}', '{"other": {}}', "[]"])
def test_files_not_written_by_save_are_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "other.jsonl").write_text(text + "\n" if text else "")
    with pytest.raises(modicum.UsageError):
        memory.draw(tmp_path / "memory.html", tmp_path / "other.jsonl")


def test_paths_alone_are_sources_of_drawings(tmp_path: Path) -> None:
    with memory.phase("wrap"):
        pass
    for source in (3, memory.phases()):
        with pytest.raises(modicum.UsageError, match="expected a path"):
            memory.draw(tmp_path / "memory.html", source)  # type: ignore[arg-type]
    for title in (3, SURROGATE):
        with pytest.raises(modicum.UsageError, match="the title"):
            memory.draw(tmp_path / "memory.html", title=title)  # type: ignore[arg-type]


def test_only_what_can_be_drawn_is_saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "{rank}.jsonl"
    for label in (3, SURROGATE):
        with pytest.raises(modicum.UsageError, match="the label"):
            memory.write(path, label=label)  # type: ignore[arg-type]
    for lines in ({SURROGATE: 1}, {"budget": "2 GiB"}, {"budget": None}, {"budget": float("nan")}):
        with pytest.raises(modicum.UsageError, match="line"):
            memory.write(path, lines=lines)  # type: ignore[arg-type]
    monkeypatch.setenv("RANK", "")
    assert memory.write(path, lines={"budget": 1.5}).name == "0.jsonl"
    monkeypatch.setenv("RANK", "first")
    with pytest.raises(modicum.UsageError, match="RANK"):
        memory.write(path)


def test_only_html_pages_are_drawn(tmp_path: Path) -> None:
    with memory.phase("wrap"):
        pass
    with pytest.raises(modicum.UsageError, match=r"\.html, got memory\.png"):
        memory.draw(tmp_path / "memory.png")


def test_recording_and_drawing_need_no_package(tmp_path: Path) -> None:
    code = "import sys, modicum.memory as m\nwith m.phase('x'): pass\nm.attribute({'x': []})\n"
    code += "m.draw('page.html')\nassert not {'torch', 'matplotlib', 'numpy'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=tmp_path)


# ---- devices


@pytest.fixture(scope="module")
def fake_nvml(tmp_path_factory: pytest.TempPathFactory) -> Path:
    library = tmp_path_factory.mktemp("nvml") / "libnvidia-ml.so.1"
    source = Path(__file__).parents[1] / "fixtures/fake_nvml.c"
    subprocess.run(["cc", "-shared", "-fPIC", "-o", library, source], check=True)
    return library


def test_devices_report_used_bytes(fake_nvml: Path) -> None:
    assert Devices(str(fake_nvml)).used_bytes() == [100, 200, 0]
    assert Devices("no-such-library.so").used_bytes() == []


def test_a_phase_has_the_peak_of_each_device(
    fake_nvml: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(recording, "Devices", lambda: Devices(str(fake_nvml)))
    with memory.phase("device") as held:
        pass
    assert held.device_peak_bytes == [100, 200, 0]
    (run,) = drawn_on(memory.draw(tmp_path / "device.html"))["runs"]
    curves = {of["name"]: of["bytes"] for of in run["document"]["timeline"]["curves"]}
    assert set(curves["device 1"]) == {200} and list(curves) == [f"device {n}" for n in range(3)]


def test_a_library_without_nvml_functions_counts_as_missing() -> None:
    assert Devices("libc.so.6").used_bytes() == []
