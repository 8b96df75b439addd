"""Draws the memory of processes over time. Needs matplotlib, which is imported here only."""

import json
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from modicum.errors import refusal
from modicum.memory.recording import Phase, Sample, recorded

_GIB = 1 << 30
_SHADES = ("#e8eef7", "#f6efe2")


@dataclass
class _Curve:
    """The recording of one process."""

    label: str
    rank: int
    phases: list[Phase] = field(default_factory=list)
    samples: list[Sample] = field(default_factory=list)


def draw(
    path: str | os.PathLike[str],
    sources: str | os.PathLike[str] | Iterable[str | os.PathLike[str]] | None = None,
    *,
    title: str = "",
) -> Path:
    """Draws one picture of host memory over time: a curve per process, phases shaded and named.

    Each label that recordings were saved with gets a panel; all panels share one scale. Dashed
    lines are device memory, if NVML reports any. A thin horizontal line is the peak of a phase: it
    may lie above all samples, since the kernel tracks it. Tested with matplotlib 3.11.

    Args:
        path: of the picture; PNG, SVG or PDF by its suffix.
        sources: files that `save` has written, of any number of ranks; None: the recording of this
            process.
        title: above the panels.

    Returns:
        The path that was written.

    Raises:
        UsageError: matplotlib is not installed, or `save` has not written a source.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise refusal(
            "UNSUPPORTED", "a picture needs the package matplotlib: pip install matplotlib"
        ) from error
    panels: dict[str, list[_Curve]] = {}
    for curve in _curves(sources):
        panels.setdefault(curve.label, []).append(curve)
    figure = Figure(figsize=(max(7.0, 4.2 * len(panels)), 4.2), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(1, len(panels), sharey=True, squeeze=False)[0]
    for at, (label, curves) in zip(axes, panels.items(), strict=True):
        _draw_panel(at, label, curves)
    axes[0].set_ylim(0, axes[0].get_ylim()[1] * 1.3)  # of all panels; leaves room for the names
    axes[0].set_ylabel("host memory, GiB")
    if title:
        figure.suptitle(title)
    figure.savefig(path)
    return Path(path)


def _curves(sources: Any) -> list[_Curve]:
    if isinstance(sources, (str, os.PathLike)):
        sources = [sources]
    curves = _read(recorded(), "this process") if sources is None else []
    for source in sources or ():
        curves += _read(_lines(Path(source)), Path(source).name)
    if not curves:
        raise refusal("USAGE", "the recordings have no samples: record a phase first")
    return curves


def _lines(path: Path) -> Iterator[Any]:
    yield from map(json.loads, path.read_text().splitlines())


def _read(lines: Iterable[Any], name: str) -> list[_Curve]:
    curves: list[_Curve] = []
    try:
        for line in lines:
            ((kind, value),) = line.items()
            if kind == "process":
                curves.append(_Curve(value["label"], value["rank"]))
            elif kind == "phase":
                curves[-1].phases.append(Phase(**value))
            elif kind == "sample":
                curves[-1].samples.append(Sample(**value))
            else:
                raise KeyError(kind)
    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
        raise refusal("USAGE", f"{name} was not written by memory.save") from error
    return [curve for curve in curves if curve.samples]


def _draw_panel(axes: Any, label: str, curves: list[_Curve]) -> None:
    curves.sort(key=lambda curve: curve.rank)
    for index, phase in enumerate(_innermost(curves[0].phases)):
        axes.axvspan(phase.begin_s, phase.end_s, color=_SHADES[index % 2], lw=0)
        axes.annotate(
            phase.name,
            ((phase.begin_s + phase.end_s) / 2, 1.0),
            xycoords=("data", "axes fraction"),
            xytext=(0, -4),
            textcoords="offset points",
            rotation=90,
            ha="center",
            va="top",
            fontsize=8,
            color="#606060",
        )
    for curve in curves:
        at = [sample.at_s for sample in curve.samples]
        held = [(sample.held + sample.children) / _GIB for sample in curve.samples]
        (line,) = axes.plot(at, held, lw=1.3, label=f"rank {curve.rank}")
        for phase in _innermost(curve.phases):
            axes.hlines(
                phase.peak_bytes / _GIB, phase.begin_s, phase.end_s, lw=0.8, color=line.get_color()
            )
    _draw_devices(axes, curves[0].samples)
    axes.set_xlabel("seconds")
    axes.set_title(label, fontsize=10)
    axes.legend(fontsize=8, loc="center left")


def _innermost(phases: list[Phase]) -> list[Phase]:
    """Phases that contain no other phase."""
    return [
        phase
        for phase in phases
        if not any(
            phase.begin_s <= other.begin_s and other.end_s <= phase.end_s
            for other in phases
            if other.depth > phase.depth
        )
    ]


def _draw_devices(axes: Any, samples: list[Sample]) -> None:
    for device in range(min(len(sample.devices) for sample in samples)):
        at = [sample.at_s for sample in samples]
        used = [sample.devices[device] / _GIB for sample in samples]
        axes.plot(at, used, lw=1.0, ls="--", label=f"device {device}")
