"""`modicum.memory.phase`: the memory that a block held, by samples and by the kernel's high-water
mark; and the picture of phases.

Unit and house tests. They catch these mutations: a mark that is not reset or never read, or that an
inner phase or a load resets without telling outer phases; children that are not found; a child that
continues its parent's recording; a device library that is required; names of phases that overlap.
"""

import json
import mmap
import os
import subprocess
import sys
import threading
import time
from itertools import combinations, pairwise
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import modicum
from modicum import memory
from modicum.memory import drawing, recording
from modicum.memory.nvml import Devices

pytestmark = pytest.mark.alone  # the mark is per process, and earlier tests raise it

MIB = 1 << 20
SPIKE = 64 * MIB
INEXACT = MIB  # each CPU batches its share of the kernel's counters
NEVER = 100.0  # seconds between samples: only the mark records a peak


@pytest.fixture(autouse=True)
def no_recording() -> None:
    recording._recordings.clear()


def taken(size: int = SPIKE) -> mmap.mmap:
    """Newly mapped memory, touched."""
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory[:: mmap.PAGESIZE] = b"x" * (size // mmap.PAGESIZE)
    return memory


def spike(size: int = SPIKE) -> None:
    """Allocates and frees `size` bytes between two samples."""
    taken(size).close()


def test_the_high_water_mark_has_peaks_between_samples() -> None:
    spike(2 * SPIKE)
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
    checkpoint = modicum.open_checkpoint(None)
    recipe = modicum.make_recipe(checkpoint)
    plan = modicum.make_plan(recipe, modicum.make_layout(recipe, ranks=1))
    with memory.phase("load", interval_s=NEVER) as held:
        spike()
        modicum.load(plan, rank=0)
    assert held.peak_bytes - held.begin_bytes >= SPIKE - INEXACT


def test_samples_record_longer_peaks() -> None:
    with memory.phase("hold") as held:
        block = taken()
        time.sleep(0.3)
        block.close()
    assert abs(held.sampled_peak_bytes - held.begin_bytes - SPIKE) < 4 * MIB
    recorded = recording.recorded()
    assert sum("sample" in line for line in recorded) >= 5


def test_sampling_is_cheap() -> None:
    """The documentation states 2 % of a core; the rest is for a busy machine."""
    with memory.phase("warm", interval_s=NEVER):
        pass
    began = time.process_time()
    with memory.phase("idle"):
        time.sleep(1.5)
    assert time.process_time() - began < 0.15


def test_children_count() -> None:
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


# ---- files and pictures


def saved(directory: Path, name: str, label: str) -> Path:
    with memory.phase("wrap"):
        spike(MIB)
    return memory.save(directory / name, label=label, lines={"budget": 64 * MIB})


def test_saved_recordings_are_drawn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "3")
    first = saved(tmp_path, "memory-{rank}.jsonl", "native")
    assert first.name == "memory-3.jsonl"
    kinds = [next(iter(json.loads(line))) for line in first.read_text().splitlines()]
    assert kinds[:2] == ["process", "phase"]
    assert set(kinds[2:-1]) == {"sample"} and kinds[-1] == "line"
    second = saved(tmp_path, "other.jsonl", "accelerate")
    picture = memory.draw(tmp_path / "memory.svg", [first, second], title="both")
    text = picture.read_text()
    for word in ("native", "accelerate", "both", "rank 3", "budget"):
        assert text.count(f"<!-- {word} -->") == 1, "panels share one legend"
    assert text.count("<!-- wrap -->") == 3, "one and, in the later recording, both"
    assert memory.draw(tmp_path / "own.png").read_bytes().startswith(b"\x89PNG")


class Axes:
    """Holds the place of each text, in points from the panel's left edge and above its top."""

    def __init__(self, points: float) -> None:
        self.points, self.texts = points, list[tuple[str, float, int]]()

    def get_xlim(self) -> tuple[float, float]:
        return 0.0, 10.0

    def annotate(self, text: str, at: tuple[float, float], **how: Any) -> None:
        self.texts.append((text, at[0] * self.points, how["xytext"][1]))

    def axvspan(self, *_: Any, **__: Any) -> None: ...

    def set_xlim(self, *_: Any) -> None: ...


def test_names_of_short_phases_do_not_overlap() -> None:
    ends = [0.0, 0.1, 4.9, 5.0, 5.1, 9.9, 10.0]
    phases = [
        memory.Phase(name=f"from_pretrained {n}", begin_s=begin, end_s=end)
        for n, (begin, end) in enumerate(pairwise(ends))
    ]
    axes = Axes(points=250.0)
    levels = drawing._name_phases(axes, phases, axes.points)
    assert len(axes.texts) == len(phases) and levels == len({above for *_, above in axes.texts})
    for (one, x, above), (other, y, level) in combinations(axes.texts, 2):
        needed = 0.3 * 8 * (len(one) + len(other))
        assert above != level or abs(x - y) >= needed, f"{one} over {other}"
    for name, x, _ in axes.texts:
        assert x - 0.3 * 8 * len(name) >= 0 and x + 0.3 * 8 * len(name) <= axes.points


@pytest.mark.parametrize("text", ["", "{", '{"sample": {}}', '{"other": {}}', "[]"])
def test_other_files_are_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "other.jsonl").write_text(text + "\n" if text else "")
    with pytest.raises(modicum.UsageError):
        memory.draw(tmp_path / "memory.png", tmp_path / "other.jsonl")


def test_missing_matplotlib_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", ModuleType("matplotlib.figure"))
    with pytest.raises(modicum.UsageError, match="pip install matplotlib") as refused:
        memory.draw(tmp_path / "memory.png")
    assert refused.value.category == "UNSUPPORTED"


def test_recording_needs_neither_torch_nor_matplotlib() -> None:
    code = "import sys, modicum.memory as m\nwith m.phase('x'): pass\nm.attribute({'x': []})\n"
    code += "assert not {'torch', 'matplotlib', 'numpy'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


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
    assert "<!-- device 1 -->" in memory.draw(tmp_path / "device.svg").read_text()


def test_another_library_counts_as_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    libc: Any = "libc.so.6"
    assert Devices(libc).used_bytes() == []
