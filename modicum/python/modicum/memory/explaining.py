"""Describes in one paragraph which processes held the memory of a phase."""

from __future__ import annotations

from typing import TYPE_CHECKING

from modicum.errors import counted

if TYPE_CHECKING:
    from modicum.memory.recording import Phase

_SHOWN = 4  # the most holders that are named; the rest is one sum
_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


def size_text(size: float) -> str:
    """A number of bytes in the form of the command line: "1.50 GiB", "17 B"."""
    unit = 0
    while abs(size) >= 1024 and unit + 1 < len(_UNITS):
        size, unit = size / 1024, unit + 1
    return f"{size:.2f} {_UNITS[unit]}" if unit else f"{size:.0f} B"


def paragraph(phase: Phase, limit: int | None) -> str:
    """The text of `Phase.text`."""
    added = phase.peak_bytes - phase.begin_bytes
    first = (
        f"'{phase.name}' added {size_text(added)} at its peak to the "
        f"{size_text(phase.begin_bytes)} held when it began{_verdict(added, limit)}."
    )
    missed = phase.peak_bytes - phase.sampled_peak_bytes
    # A difference of at most 2 % of the added bytes, or of at most 1 MiB, is not worth a sentence.
    is_missed = missed > max(added // 50, 1 << 20)
    if is_missed and phase.samples <= 1:
        return f"{first} {_too_short(phase)}"
    sentences = [
        first,
        f"At the peak{_moment(phase)}: {_listed(phase.holders_at_peak)}.",
    ]
    if grown := _growth(phase):
        sentences.append(f"Since the begin: {_listed(grown, sign='+')}.")
    if is_missed:
        sentences.append(
            f"The kernel saw {size_text(missed)} more between two samples, in this process."
        )
    return " ".join(sentences)


def _too_short(phase: Phase) -> str:
    return (
        "The peak is the kernel's high-water mark (VmHWM) of this process, without its children: "
        f"in the {1000 * (phase.end_s - phase.begin_s):.1f} ms that it lasted there was no time "
        "for a sample, which would name the holders. "
        f"When it ended, {size_text(phase.end_bytes)} were held."
    )


def _verdict(added: int, limit: int | None) -> str:
    if limit is None:
        return ""
    if added <= limit:
        return f", within the limit of {size_text(limit)}"
    over = size_text(added - limit)
    return f": {over} over the limit of {size_text(limit)}; {_fitting(added)} would have fitted"


def _fitting(size: int) -> str:
    """The size rounded up to MiB."""
    return f"{-(-size >> 20)} MiB"


def _moment(phase: Phase) -> str:
    where = f" in phase '{phase.peak_phase}'" if phase.peak_phase else ""
    return f", {phase.peak_s - phase.begin_s:.2f} s after the begin{where}"


def _growth(phase: Phase) -> dict[str, int]:
    """The bytes that each holder has gained from the begin to the peak. Empty if no holder has the
    same name at both times. So it is if the process had no children at the begin but has some at
    the peak: without children the holders are kinds of memory."""
    before, after = phase.holders_at_begin, phase.holders_at_peak
    common = before.keys() & after.keys()
    if not common:
        return {}
    return {name: size - before.get(name, 0) for name, size in after.items()}


def _listed(holders: dict[str, int], sign: str = "") -> str:
    positive = [(name, size) for name, size in holders.items() if size > 0]
    ordered = sorted(positive, key=lambda item: -item[1])
    shown = [f"{name} {sign}{size_text(size)}" for name, size in ordered[:_SHOWN]]
    if rest := [size for _, size in ordered[_SHOWN:]]:
        shown.append(f"{counted(len(rest), 'other')} {sign}{size_text(sum(rest))}")
    return ", ".join(shown) or "nothing"
