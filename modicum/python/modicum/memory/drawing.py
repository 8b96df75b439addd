"""Draws the memory of processes over time as an HTML page like that of `modicum watch --report`.

Each process has its own clock. `zero` is the time.time() at which the first recording of a chart
began; times in the chart are seconds since then.
"""

import json
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from modicum import _modicum
from modicum.errors import refusal
from modicum.memory import arguments
from modicum.memory.explaining import size_text
from modicum.memory.recording import Phase, Sample, recorded

_MOST_SAMPLES = 600
_PROMISE = "promise"


@dataclass
class _Curve:
    """The recording of one process."""

    label: str
    rank: int
    pid: int
    began: float
    phases: list[Phase] = field(default_factory=list)
    samples: list[Sample] = field(default_factory=list)
    lines: dict[str, int] = field(default_factory=dict)

    def at(self, times: list[float], zero: float) -> list[Sample | None]:
        """The latest sample at each of `times`; None outside the recording."""
        found: list[Sample | None] = []
        at, delay = 0, self.began - zero
        for time in times:
            while at + 1 < len(self.samples) and self.samples[at + 1].at_s + delay <= time:
                at += 1
            inside = self.samples[0].at_s + delay <= time <= self.samples[-1].at_s + delay
            found.append(self.samples[at] if inside else None)
        return found


def draw(
    path: str | os.PathLike[str],
    sources: str | os.PathLike[str] | Iterable[str | os.PathLike[str]] | None = None,
    *,
    title: str = "",
) -> Path:
    """Draws host memory over time: one HTML page that needs no network and no other package.

    Each label of the recordings gets a chart with its processes, stacked, and their phases; all
    charts share one scale and one legend. The lines given to `write` are summed over the processes
    of a chart by name. The line "promise" is dashed, and is drawn only while a process is recorded;
    other lines cross the chart. Owners are those of ledgers, not those of `attribute`. If NVML
    reports device memory, it is a separate curve.

    Args:
        path: the path of the page; it must end in .html.
        sources: files that `write` has written, of any number of ranks; None: the recording of this
            process.
        title: the title above the charts.

    Returns:
        The path that was written.

    Raises:
        UsageError: the path does not end in .html, `write` has not written a source, there is no
            sample, or the title is not a str or not UTF-8.
        OSError: a source can't be read, or the page can't be written.
    """
    target = Path(path)
    heading = arguments.text("the title", title) or "Host memory"
    if target.suffix != ".html":
        what = "the path of the page does not end in .html"
        raise refusal("USAGE", what, expected="NAME.html", got=target.name)
    charts: dict[str, list[_Curve]] = {}
    for curve in _curves(sources):
        charts.setdefault(curve.label, []).append(curve)
    runs = [
        (
            label or "host memory",
            json.dumps(_document(sorted(curves, key=lambda curve: curve.rank))),
        )
        for label, curves in charts.items()
    ]
    target.write_text(_modicum.report_page(heading, runs), encoding="utf-8")
    return target


def _curves(sources: Any) -> list[_Curve]:
    curves: list[_Curve] = []
    if sources is None:
        curves, sources = _read(recorded(), "this process"), []
    elif isinstance(sources, (str, os.PathLike)) or not isinstance(sources, Iterable):
        sources = [sources]
    for source in sources:
        if not isinstance(source, (str, os.PathLike)):
            what = "a source of a drawing is not a path"
            raise refusal("USAGE", what, expected="a path", got=type(source).__name__)
        curves += _read(_lines(Path(source)), Path(source).name)
    if not curves:
        raise refusal("USAGE", "the recordings have no samples; record a phase first")
    return curves


def _lines(path: Path) -> Iterator[Any]:
    yield from map(json.loads, path.read_text("utf-8").splitlines())


def _read(lines: Iterable[Any], name: str) -> list[_Curve]:
    curves: list[_Curve] = []
    try:
        for line in lines:
            ((kind, value),) = line.items()
            if kind == "process":
                names = ("label", "rank", "pid", "began")
                curves.append(_Curve(*(value[name] for name in names)))
                arguments.text("the label", curves[-1].label)
            elif kind == "phase":
                curves[-1].phases.append(Phase(**value))
            elif kind == "sample":
                curves[-1].samples.append(Sample(**value))
            elif kind == "line":
                curves[-1].lines[value["name"]] = int(value["bytes"])
            else:
                raise KeyError(kind)
    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
        raise refusal("USAGE", f"{name} was not written by memory.write") from error
    return [curve for curve in curves if curve.samples]


def _document(curves: list[_Curve]) -> dict[str, Any]:
    """A run in the form of `modicum watch --json`: `timeline` and `peak`."""
    zero = min(curve.began for curve in curves)
    # Summed in the same order as in `_Curve.at`, which compares these floats.
    times = sorted(
        {sample.at_s + (curve.began - zero) for curve in curves for sample in curve.samples}
    )
    totals = _totals(curves, times, zero)
    times = _thinned(times, totals)
    samples = [curve.at(times, zero) for curve in curves]
    names = dict.fromkeys(name for curve in curves for name in curve.lines if name != _PROMISE)
    levels = [
        {"name": name, "bytes": sum(curve.lines.get(name, 0) for curve in curves)} for name in names
    ]
    return {
        "timeline": {
            "t_s": times,
            "limit_bytes": None,
            "budget_bytes": None,
            "page_cache_bytes": None,
            "levels": levels,
            "curves": _devices(samples),
            "tracks": [_track(*both) for both in zip(curves, samples, strict=True)],
            "phases": [_phase(phase, curve, zero) for curve in curves for phase in curve.phases],
        },
        "peak": _peak(curves, times, zero),
    }


def _held_bytes(sample: Sample | None) -> int:
    return 0 if sample is None else sample.held + sample.children


def _totals(curves: list[_Curve], times: list[float], zero: float) -> list[int]:
    columns = zip(*(curve.at(times, zero) for curve in curves), strict=True)
    return [sum(map(_held_bytes, column)) for column in columns]


def _thinned(times: list[float], totals: list[int]) -> list[float]:
    """At most _MOST_SAMPLES of `times`: of each bucket of consecutive times the one with the most
    bytes, so that the peak stays."""
    width = -(-len(times) // _MOST_SAMPLES)
    buckets = [range(at, min(at + width, len(times))) for at in range(0, len(times), width)]
    return [times[max(bucket, key=totals.__getitem__)] for bucket in buckets]


def _track(curve: _Curve, samples: list[Sample | None]) -> dict[str, Any]:
    owners: dict[str, list[int | None]] = {"held": [sample and sample.held for sample in samples]}
    if any(sample and sample.children for sample in samples):
        owners["children"] = [sample and sample.children for sample in samples]
    promise = curve.lines.get(_PROMISE)
    return {
        "label": f"rank {curve.rank}",
        "pid": curve.pid,
        "rank": curve.rank,
        "node": 0,
        "owners": owners,
        "promise_bytes": promise and [sample and promise for sample in samples],
    }


def _phase(phase: Phase, curve: _Curve, zero: float) -> dict[str, Any]:
    delay = curve.began - zero
    times = {"begin_s": phase.begin_s + delay, "end_s": phase.end_s + delay}
    return {"pid": curve.pid, "rank": curve.rank, "name": phase.name} | times


def _devices(samples: list[list[Sample | None]]) -> list[dict[str, Any]]:
    """Bytes in use on each device, by any process. Taken from the first recording, since all
    recordings show the same devices."""
    counts = [len(sample.devices) for sample in samples[0] if sample]
    return [
        {
            "name": f"device {device}",
            "bytes": [sample and sample.devices[device] for sample in samples[0]],
        }
        for device in range(min(counts, default=0))
    ]


def _peak(curves: list[_Curve], times: list[float], zero: float) -> dict[str, Any]:
    totals = _totals(curves, times, zero)
    at = max(range(len(times)), key=totals.__getitem__)
    curve = max(curves, key=lambda candidate: _held_bytes(candidate.at([times[at]], zero)[0]))
    held_bytes = _held_bytes(curve.at([times[at]], zero)[0])
    moment = times[at] - curve.began + zero
    inside = [entry for entry in curve.phases if entry.begin_s <= moment <= entry.end_s]
    phase = f", in phase '{max(inside, key=lambda entry: entry.depth).name}'" if inside else ""
    highest = max(
        (entry.peak_bytes for other in curves for entry in other.phases), default=held_bytes
    )
    cause = f"rank {curve.rank} held most, {size_text(held_bytes)}{phase}"
    if highest > held_bytes:
        cause += f"; the kernel saw up to {size_text(highest)} in one process"
    return {"at_s": times[at], "bytes": totals[at], "cause": cause}
