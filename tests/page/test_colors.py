"""The colours of the owners in the charts of a page differ, also for the colour-blind.

Catches: two owners whose areas are next to each other have the same colour.
"""

import re
from itertools import combinations
from pathlib import Path

import pytest

# Matrices from linear RGB to the linear RGB that a colour-blind person sees: Machado, Oliveira and
# Fernandes 2009, at severity 1.
VISIONS = {
    "all cones": ((1, 0, 0), (0, 1, 0), (0, 0, 1)),
    "protanopia": (
        (0.152286, 1.052583, -0.204868),
        (0.114503, 0.786281, 0.099216),
        (-0.003882, -0.048116, 1.051998),
    ),
    "deuteranopia": (
        (0.367322, 0.860646, -0.227968),
        (0.280085, 0.672501, 0.047413),
        (-0.011820, 0.042940, 0.968881),
    ),
    "tritanopia": (
        (1.255528, -0.076749, -0.178779),
        (-0.078411, 0.930809, 0.147602),
        (0.004733, 0.691367, 0.303900),
    ),
}
# From the bottom of the stacked chart to its top, without owners whose areas are always thin.
OWNERS = (
    "process", "shards", "window", "master", "grad", "moments", "staging", "snapshot",
    "copies_since_fork", "retained_heap", "unexplained", "held", "malloc_heap", "malloc_arenas",
    "file_copies", "anonymous", "shared_memory",
)  # fmt: skip
# The same of DeepSpeed's forecast on a plan's page.
OWNERS_OF_DEEPSPEED = (
    "process", "shards", "master", "grad", "moments", "staging", "pinned_rounding", "fork",
)  # fmt: skip
# The least distances, in CIELAB, of two adjacent owners and of any two. 2.3 is just visible.
NEXT_TO_EACH_OTHER, ANYWHERE = 20, 11

Triple = tuple[float, float, float]


def linear(color: str) -> Triple:
    """Linear RGB, from 0 to 1, of a colour "#rrggbb" in sRGB."""
    r, g, b = (int(color[at : at + 2], 16) / 255 for at in (1, 3, 5))
    light = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in (r, g, b)]
    return light[0], light[1], light[2]


def lab(rgb: list[float]) -> Triple:
    """CIELAB of linear RGB."""
    r, g, b = (min(1.0, max(0.0, c)) for c in rgb)
    x, y, z = (
        t ** (1 / 3) if t > 0.008856 else 7.787 * t + 16 / 116
        for t in (
            (0.4124 * r + 0.3576 * g + 0.1805 * b) / 0.9505,
            0.2126 * r + 0.7152 * g + 0.0722 * b,
            (0.0193 * r + 0.1192 * g + 0.9505 * b) / 1.089,
        )
    )
    return 116 * y - 16, 500 * (x - y), 200 * (y - z)


def palettes(root: Path) -> dict[str, dict[str, str]]:
    """The colours by scheme and owner."""
    css = (root / "modicum/report/page/page.css").read_text()
    light, dark = (
        dict(re.findall(r"--owner-(\w+): (#\w{6});", part))
        for part in css.split("@media (prefers-color-scheme: dark)", 1)
    )
    return {"light": light, "dark": light | dark}


@pytest.mark.parametrize("owners", [OWNERS, OWNERS_OF_DEEPSPEED], ids=["all", "deepspeed"])
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("vision", VISIONS)
def test_colours_of_owners_are_far_apart(
    root: Path, vision: str, scheme: str, owners: tuple[str, ...]
) -> None:
    colors = palettes(root)[scheme]
    seen = {}
    for owner in owners:
        rgb = linear(colors[owner])
        seen[owner] = lab([sum(m * c for m, c in zip(row, rgb, strict=True))
                           for row in VISIONS[vision]])  # fmt: skip
    for one, other in combinations(owners, 2):
        apart = sum((a - b) ** 2 for a, b in zip(seen[one], seen[other], strict=True)) ** 0.5
        are_next = owners.index(other) - owners.index(one) == 1
        assert apart >= (NEXT_TO_EACH_OTHER if are_next else ANYWHERE), f"{one}, {other}"
