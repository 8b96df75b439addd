"""Draws the memory of processes over time. Needs matplotlib, which is imported here only."""

import json
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from modicum.errors import refusal
from modicum.memory.recording import Phase, Sample, recorded

_GIB = 1 << 30
_SHADES = ("#f1f3f6", "#e3e7ee")
_LINES = (("#b3261e", "--"), ("#202020", "-."), ("#7a5c00", ":"))
_PANEL_INCHES = 4.2
_POINTS = 8  # the font size of phase names


@dataclass
class _Curve:
    """The recording of one process."""

    label: str
    rank: int
    phases: list[Phase] = field(default_factory=list)
    samples: list[Sample] = field(default_factory=list)
    lines: dict[str, int] = field(default_factory=dict)


def draw(
    path: str | os.PathLike[str],
    sources: str | os.PathLike[str] | Iterable[str | os.PathLike[str]] | None = None,
    *,
    title: str = "",
) -> Path:
    """Draws one picture of host memory over time: a curve per process, phases shaded and named.

    Each label that recordings were saved with gets a panel; all panels share the scale, the colours
    and one legend. Dashed curves are device memory, if NVML reports any. Horizontal lines are those
    that the recordings were saved with, such as a promise, and the highest peak of the panel's
    phases, in GiB: it may lie above all samples, since the kernel tracks it. Tested with matplotlib
    3.11.

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
    width = max(7.0, _PANEL_INCHES * len(panels))
    figure: Any = Figure(figsize=(width, 4.4), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(1, len(panels), sharey=True, squeeze=False)[0]
    colors = _colors_by_rank(panels.values())
    names = list(dict.fromkeys(name for of in panels.values() for c in of for name in c.lines))
    styles = {name: _LINES[index % len(_LINES)] for index, name in enumerate(names)}
    points = 0.85 * 72 * width / len(panels)
    levels = [
        _draw_panel(at, curves, colors, styles, points)
        for at, curves in zip(axes, panels.values(), strict=True)
    ]
    for at, label in zip(axes, panels, strict=True):
        at.set_title(label, fontsize=10, pad=6 + 11 * max(levels))
    axes[0].set_ylim(0, axes[0].get_ylim()[1])  # of all panels
    axes[0].set_ylabel("host memory of a process, GiB")
    told: dict[str, Any] = {}
    for at in axes:
        handles, labels = at.get_legend_handles_labels()
        told |= dict(zip(labels, handles, strict=True))
    order = sorted(told, key=lambda label: (label in styles, label.startswith("device")))
    figure.legend(
        [told[label] for label in order], order, loc="outside lower center", ncols=8, fontsize=9,
        frameon=False,
    )  # fmt: skip
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
        raise refusal("USAGE", "the recordings have no samples; record a phase first")
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
            elif kind == "line":
                curves[-1].lines[value["name"]] = int(value["bytes"])
            else:
                raise KeyError(kind)
    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
        raise refusal("USAGE", f"{name} was not written by memory.save") from error
    return [curve for curve in curves if curve.samples]


def _colors_by_rank(panels: Iterable[list[_Curve]]) -> dict[int, Any]:
    """One scale for all panels, from dark to light."""
    from matplotlib import colormaps

    ranks = sorted({curve.rank for curves in panels for curve in curves})
    scale = colormaps["viridis"]
    return {rank: scale(0.75 * at / max(1, len(ranks) - 1)) for at, rank in enumerate(ranks)}


def _draw_panel(
    axes: Any,
    curves: list[_Curve],
    colors: Mapping[int, Any],
    styles: Mapping[str, tuple[str, str]],
    points: float,
) -> int:
    """`points`: the panel's width. Returns the number of levels of phase names."""
    curves.sort(key=lambda curve: curve.rank)
    for curve in curves:
        at = [sample.at_s for sample in curve.samples]
        held = [(sample.held + sample.children) / _GIB for sample in curve.samples]
        axes.plot(at, held, lw=1.4, label=f"rank {curve.rank}", color=colors[curve.rank])
    _draw_devices(axes, curves[0].samples)
    axes.margins(x=0)
    levels = _name_phases(axes, _innermost(curves[0].phases), points)
    for name, (color, style) in styles.items():
        if lines := [curve.lines[name] for curve in curves if name in curve.lines]:
            axes.axhline(max(lines) / _GIB, lw=1.2, ls=style, color=color, label=name)
    peaks = [phase.peak_bytes / _GIB for curve in curves for phase in curve.phases]
    if peaks:
        axes.axhline(max(peaks), lw=0.8, color="#808080")
        axes.annotate(
            f"peak {max(peaks):.2f}",
            (1.0, max(peaks)),
            xycoords=("axes fraction", "data"),
            xytext=(-3, 2),
            textcoords="offset points",
            ha="right",
            fontsize=_POINTS,
            color="#404040",
            bbox={"facecolor": "white", "alpha": 0.8, "lw": 0, "pad": 1},
        )
    axes.set_xlabel("seconds")
    return levels


def _name_phases(axes: Any, phases: list[Phase], points: float) -> int:
    """Shades the phases and writes their names above the axes, on as many levels as they need
    not to overlap. Returns the number of levels."""
    begin, end = axes.get_xlim()
    ends: list[float] = []  # of the last name on each level, as fractions of the axes
    for index, phase in enumerate(phases):
        axes.axvspan(phase.begin_s, phase.end_s, color=_SHADES[index % 2], lw=0)
        half = 0.3 * _POINTS * len(phase.name) / points
        middle = ((phase.begin_s + phase.end_s) / 2 - begin) / max(end - begin, 1e-9)
        middle = min(max(middle, half), 1 - half)
        level = next((at for at, last in enumerate(ends) if last < middle - half), len(ends))
        ends[level : level + 1] = [middle + half + 0.02]
        axes.annotate(
            phase.name,
            (middle, 1.0),
            xycoords="axes fraction",
            xytext=(0, 4 + 11 * level),
            textcoords="offset points",
            ha="center",
            fontsize=_POINTS,
            color="#404040",
        )
    axes.set_xlim(begin, end)
    return len(ends)


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
