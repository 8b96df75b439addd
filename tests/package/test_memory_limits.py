"""`modicum.memory.phase`, the text of a phase, and the pytest marker `limit_memory`.

Catches: holders of another sample than the peak's; a child or a phase that is not named; memory
held before the block that counts as added; a limit that is not compared; a marker that hides the
test's own failure; a generator function that is tracked although its call runs none of its code;
the end of a short test described as its peak; a wrong marker that ends in a traceback.
"""

import asyncio
import mmap
import os
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

from modicum import memory
from modicum.errors import UsageError
from modicum.memory import recording
from modicum.memory.explaining import paragraph

pytestmark = pytest.mark.alone  # measures this process

GIB = 1 << 30
MIB = 1 << 20


@pytest.fixture(autouse=True)
def no_recording() -> None:
    """Each test begins without phases of earlier tests."""
    recording._recordings.clear()


def taken(size: int) -> mmap.mmap:
    """A new mapping, all pages written."""
    block = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    block[:: mmap.PAGESIZE] = b"x" * (size // mmap.PAGESIZE)
    return block


def await_samples(of: memory.Phase, count: int = 1) -> None:
    """Waits for samples that begin after this call, as late as a busy machine takes them."""
    wanted = of.samples + 1 + count  # the next one may have begun before
    deadline = time.monotonic() + 60
    while of.samples < wanted and time.monotonic() < deadline:
        time.sleep(0.01)
    assert of.samples >= wanted, "no sample in a minute"


def test_a_block_is_tracked() -> None:
    before = taken(32 * MIB)  # must not count as added
    with memory.phase("load") as load:
        block = taken(64 * MIB)
        await_samples(load)
        block.close()
    before.close()
    assert memory.phases() == [load]
    assert load.name == "load"
    assert abs(load.peak_bytes - load.begin_bytes - 64 * MIB) < 2 * MIB
    grown = load.holders_at_peak["private memory"] - load.holders_at_begin["private memory"]
    assert abs(grown - 64 * MIB) < 2 * MIB
    assert sum(load.holders_at_peak.values()) == load.sampled_peak_bytes


@pytest.mark.parametrize("limit", [1e9, b"2 GiB", True, "two"])
def test_a_limit_that_is_no_size_is_refused(limit: Any) -> None:
    with pytest.raises(UsageError, match="not a size"):
        memory.Phase("load").text(limit)


def test_each_call_of_a_function_is_tracked() -> None:
    @memory.phase()
    def add(one: int, *, other: int) -> int:  # by recursion: nested phases
        """Adds."""
        return one + other if one == 0 else add(one - 1, other=other + 1)

    assert add(2, other=5) == 7
    assert add.__doc__ == "Adds."
    told = [(one.name.rsplit(".", 1)[-1], one.depth) for one in memory.phases()]
    assert told == [("add", 0), ("add", 1), ("add", 2)]


def test_the_decorator_works_without_parentheses() -> None:
    @memory.phase
    def double(one: int) -> int:
        """Doubles."""
        return 2 * one

    class Model:
        @memory.phase
        async def forward(self, one: int) -> int:
            await asyncio.sleep(0.05)
            return one

        @staticmethod
        @memory.phase
        def build() -> int:
            return 5

    assert (double(3), asyncio.run(Model().forward(4)), Model.build()) == (6, 4, 5)
    assert double.__doc__ == "Doubles."
    calls = memory.phases()
    assert [one.name.rsplit(".", 1)[-1] for one in calls] == ["double", "forward", "build"]
    assert calls[1].end_s - calls[1].begin_s >= 0.05


def batches() -> Iterator[int]:
    yield 1


async def arriving_batches() -> AsyncIterator[int]:
    yield 1


class Dataset: ...


@pytest.mark.parametrize("decorator", [memory.phase, memory.phase(), memory.phase("load")])
@pytest.mark.parametrize(
    ("what", "named"),
    [
        (batches, "in its body (expected a function, got the generator function batches)"),
        (arriving_batches, "the generator function arriving_batches"),
        (Dataset, "the class Dataset"),
        (3, "got 3"),
        (classmethod(print), "classmethod"),
    ],
)
def test_only_functions_whose_calls_run_their_code_are_tracked(
    decorator: Any, what: Any, named: str
) -> None:
    with pytest.raises(UsageError, match="USAGE: .*memory.phase.*expected a") as refusal:
        decorator(what)
    assert named in str(refusal.value) and "\n" not in str(refusal.value)
    assert memory.phases() == []


def test_a_coroutine_is_tracked_until_it_ends() -> None:
    @memory.phase("wait")
    async def wait() -> int:
        await asyncio.sleep(0.05)
        return 3

    assert asyncio.run(wait()) == 3
    (waited,) = memory.phases()
    assert waited.end_s - waited.begin_s >= 0.05


def test_a_tracker_is_reusable_after_its_block_has_failed() -> None:
    tracker = memory.phase("failing")
    for _ in range(2):
        with pytest.raises(KeyError), tracker:
            raise KeyError
    assert [one.end_s >= one.begin_s for one in memory.phases()] == [True, True]


def test_the_peak_names_children_and_the_innermost_phase() -> None:
    # No samples but those at the begin and end of phases, which are taken in a known order.
    with memory.phase("outer", interval_s=3600) as outer:
        ready, done = os.pipe(), os.pipe()
        child = os.fork()
        if child == 0:
            block = taken(64 * MIB)
            os.write(ready[1], block[:1])
            os.read(done[0], 1)
            os._exit(0)
        os.read(ready[0], 1)
        with memory.phase("convert"):
            converted = taken(16 * MIB)
        converted.close()
        os.write(done[1], b"x")
        os.waitpid(child, 0)
    (holder,) = [name for name in outer.holders_at_peak if f"child {child}" in name]
    assert holder.startswith(f"child {child} (") and len(holder) > len(f"child {child} ()")
    assert outer.holders_at_peak[holder] >= 60 * MIB
    assert outer.peak_phase == "convert"
    assert holder in outer.text() and "in phase 'convert'" in outer.text()


def phase_of(**fields: object) -> memory.Phase:
    """A phase with these fields that began at 1 s with 1 GiB and had its peak at 3.5 s."""
    defaults = {"name": "load", "begin_s": 1.0, "begin_bytes": GIB, "peak_s": 3.5}
    return memory.Phase(**{**defaults, **fields})


def test_paragraph_of_a_peak() -> None:
    held = phase_of(
        peak_bytes=3 * GIB,
        sampled_peak_bytes=3 * GIB,
        holders_at_begin={"private memory": GIB - MIB, "page tables": MIB},
        holders_at_peak={"private memory": 3 * GIB - 4 * MIB, "page tables": 4 * MIB},
        peak_phase="convert",
    )
    assert held.text() == (
        "'load' added 2.00 GiB at its peak to the 1.00 GiB held when it began. "
        "At the peak, 2.50 s after the begin in phase 'convert': private memory 3.00 GiB, "
        "page tables 4.00 MiB. Since the begin: private memory +2.00 GiB, page tables +3.00 MiB."
    )
    assert "began, within the limit of 2.00 GiB. At" in held.text("2 GiB")
    over = held.text(GIB + 1)
    assert "began: 1024.00 MiB over the limit of 1.00 GiB; 2048 MiB would have fitted. At" in over


def test_paragraph_of_many_children_and_of_a_short_peak() -> None:
    children = {f"child {n} (worker)": n * MIB for n in range(1, 8)}
    held = phase_of(
        peak_bytes=2 * GIB,
        sampled_peak_bytes=GIB + GIB // 2,
        samples=2,
        holders_at_begin={"private memory": GIB},
        holders_at_peak={"this process (5)": GIB, **children},
    )
    text = paragraph(held, None)
    assert "this process (5) 1.00 GiB, child 7 (worker) 7.00 MiB, child 6" in text
    assert "child 5 (worker) 5.00 MiB, 4 others 10.00 MiB." in text
    assert "Since the begin" not in text
    assert "The kernel saw 512.00 MiB more between two samples" in text


def test_holders_that_have_not_grown_are_not_counted() -> None:
    held = phase_of(
        holders_at_begin={f"child {n} (worker)": 8 * MIB for n in range(1, 8)},
        # Child 1 shrinks by 1 MiB, child 2 keeps its size, children 3 to 7 grow by 1 to 5 MiB.
        holders_at_peak={f"child {n} (worker)": (6 + n) * MIB for n in range(1, 8)},
    )
    assert "child 4 (worker) +2.00 MiB, 1 other +1.00 MiB." in held.text()


TESTS = """
import mmap, pytest

def taken(size):
    block = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    block[:: mmap.PAGESIZE] = b"x" * (size // mmap.PAGESIZE)
    return block

before = taken(100 << 20)

@pytest.fixture
def large():
    block = taken(100 << 20)
    yield
    block.close()

@pytest.mark.limit_memory("32 MiB")
def test_fits(large):
    taken(8 << 20)

@pytest.mark.limit_memory("32 MiB")
def test_exceeds():
    global kept
    kept = taken(64 << 20)  # still held at the test's last sample

@pytest.mark.limit_memory(32 << 20)
def test_fails_otherwise():
    block = taken(64 << 20)
    raise KeyError("of the test")

def test_has_no_limit():
    taken(64 << 20)
"""


def test_the_marker_fails_a_test_that_holds_too_much(tmp_path: Path) -> None:
    """pytest finds the marker by the installed package's entry point."""
    (tmp_path / "test_limits.py").write_text(TESTS)
    words = ["-m", "pytest", "-q", "--strict-markers", "-p", "no:cacheprovider", "-rA"]
    done = subprocess.run(
        [sys.executable, *words, str(tmp_path)],
        capture_output=True, text=True, timeout=120, cwd=tmp_path,
    )  # fmt: skip
    assert "2 failed, 2 passed" in done.stdout, done.stdout + done.stderr
    for name in ("test_fits", "test_has_no_limit"):
        assert f"PASSED test_limits.py::{name}" in done.stdout
    assert "KeyError: 'of the test'" in done.stdout
    (line,) = [one for one in done.stdout.splitlines() if one.startswith("'test_exceeds' added 6")]
    assert "over the limit of 32.00 MiB" in line
    assert "private memory" in line and "would have fitted" in line


def test_paragraph_of_a_phase_too_short_for_samples() -> None:
    held = phase_of(
        end_s=1.0042,
        end_bytes=GIB + 2 * MIB,
        peak_bytes=2 * GIB,
        sampled_peak_bytes=GIB + 2 * MIB,
        samples=1,
        holders_at_begin={"private memory": GIB},
        holders_at_peak={"private memory": GIB + 2 * MIB},
    )
    assert held.text(GIB // 2) == (
        "'load' added 1.00 GiB at its peak to the 1.00 GiB held when it began: 512.00 MiB over "
        "the limit of 512.00 MiB; 1024 MiB would have fitted. The peak is the kernel's "
        "high-water mark (VmHWM) of this process, without its children: in the 4.2 ms that it "
        "lasted there was no time for a sample, which would name the holders. When it ended, "
        "1.00 GiB were held."
    )
    held.samples = 2
    assert "At the peak, 2.50 s after the begin: private memory 1.00 GiB" in held.text()
    assert "between two samples" in held.text()
    held.samples, held.peak_bytes = 1, held.sampled_peak_bytes
    assert "Since the begin: private memory +2.00 MiB." in held.text()


def test_samples_of_a_phase_are_counted() -> None:
    with memory.phase("short", interval_s=60) as short:
        taken(64 * MIB).close()
    assert short.samples == 1 and "no time for a sample" in short.text()
    with memory.phase("long") as long:
        await_samples(long, 3)
    assert "no time for a sample" not in long.text()


WRONG = """
import pytest

@pytest.fixture
def made():
    print("the fixture runs")

@pytest.mark.limit_memory
def test_none(made): ...

@pytest.mark.limit_memory()
def test_call(made): ...

@pytest.mark.limit_memory("1 GiB", "2 GiB")
def test_two(made): ...

@pytest.mark.limit_memory(size="1 GiB")
def test_keyword(made): ...

@pytest.mark.limit_memory("1 parsec")
def test_unit(made): ...

@pytest.mark.limit_memory("-1 GiB")
def test_negative(made): ...

@pytest.mark.limit_memory(-1)
def test_below_zero(made): ...

@pytest.mark.limit_memory(1 << 70)
def test_large(made): ...

@pytest.mark.limit_memory(1.5)
def test_fraction(made): ...

@pytest.mark.limit_memory(True)
def test_flag(made): ...
"""
NOT_ONE_SIZE = 'limit_memory: USAGE: not a size (expected one size, such as "2 GiB", got {})'


def test_a_wrong_marker_fails_its_test_with_one_line(tmp_path: Path) -> None:
    (tmp_path / "test_limits.py").write_text(WRONG)
    words = ["-m", "pytest", "-q", "--strict-markers", "-p", "no:cacheprovider", "--tb=native"]
    done = subprocess.run(
        [sys.executable, *words, str(tmp_path)],
        capture_output=True, text=True, timeout=120, cwd=tmp_path,
    )  # fmt: skip
    assert "10 errors" in done.stdout and done.returncode == 1, done.stdout + done.stderr
    assert "Traceback" not in done.stdout and "the fixture runs" not in done.stdout
    told = [line for line in done.stdout.splitlines() if line.startswith("limit_memory: ")]
    assert told[:4] == [
        NOT_ONE_SIZE.format("no argument"), NOT_ONE_SIZE.format("no argument"),
        NOT_ONE_SIZE.format("'1 GiB', '2 GiB'"), NOT_ONE_SIZE.format("size='1 GiB'"),
    ]  # fmt: skip
    assert told[4] == "limit_memory: USAGE: not a size: '1 parsec' (unknown unit 'parsec')"
    assert [line.split(" (")[0] for line in told[5:8]] == [
        "limit_memory: USAGE: not a size: '-1 GiB'",
        "limit_memory: USAGE: not a size: '-1'",
        f"limit_memory: USAGE: not a size: '{1 << 70}'",
    ]
    assert told[8:] == [NOT_ONE_SIZE.format("1.5"), NOT_ONE_SIZE.format("True")]
