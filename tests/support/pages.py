"""HTML pages in Debian's Chromium, and documents of runs to draw on them."""

import contextlib
import json
import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

MIB = 1 << 20
CHROMIUM = "chromium"
WIDE, NARROW = 1280, 390


@contextlib.contextmanager
def browser() -> Iterator[Any]:
    """Chromium without a window. Skips the test if Chromium or playwright is missing."""
    driver = pytest.importorskip("playwright.sync_api")
    program = shutil.which(CHROMIUM)
    if program is None:
        pytest.skip(f"no {CHROMIUM}")
    with driver.sync_playwright() as started:
        # Without its sandbox Chromium runs as root, too. It opens only our own files.
        opened = started.chromium.launch(executable_path=program, args=["--no-sandbox"])
        try:
            yield opened
        finally:
            opened.close()


def drawn_on(path: Path) -> dict[str, Any]:
    """The data that a page shows: its runs, and a sentence."""
    text = re.search(r'id="document">(.*?)</script>', path.read_text(), re.S)
    assert text
    found: dict[str, Any] = json.loads(text[1])
    return found


@dataclass
class Shown:
    """An open page. `errors`: the errors of its scripts, and all that it has printed on the
    console; `requests`: the addresses that it has requested."""

    page: Any
    errors: list[str] = field(default_factory=list)
    requests: list[str] = field(default_factory=list)

    def violations(self) -> list[str]:
        """The violations of accessibility that axe rates serious or critical."""
        axe = pytest.importorskip("axe_playwright_python.sync_playwright")
        found = axe.Axe().run(self.page).response["violations"]
        return [
            f"{violation['id']}: {violation['nodes'][0]['html']}"
            for violation in found
            if violation["impact"] in ("serious", "critical")
        ]

    def reading(self, run: int = 0) -> str:
        return self.page.locator(".reading").nth(run).inner_text()

    def hover(self, part: float, run: int = 0) -> float:
        """Moves the mouse to this part of the chart's width; returns the time there."""
        x, y, width, height = self.area(run)
        self.page.mouse.move(x + part * width, y + height / 2)
        begin, end = self.window(run)
        return begin + part * (end - begin)

    def area(self, run: int = 0) -> tuple[float, float, float, float]:
        """x, y, width and height of the chart without its axes, on the page."""
        chart = self.page.locator(".chart").nth(run)
        chart.scroll_into_view_if_needed()
        box = chart.bounding_box()
        area = self.page.evaluate("run => shown_runs[run].graph.getArea()", run)
        return box["x"] + area["x"], box["y"] + area["y"], area["w"], area["h"]

    def window(self, run: int = 0) -> tuple[float, float]:
        begin, end = self.page.evaluate("run => shown_runs[run].graph.xAxisRange()", run)
        return begin, end

    def painted(self, run: int = 0) -> dict[str, int]:
        """The numbers of pixels of the chart by colour, the commonest first."""
        found = self.page.evaluate(
            """run => {
              const canvas = document.querySelectorAll('.chart')[run].querySelector('canvas');
              const { width, height } = canvas;
              const { data } = canvas.getContext('2d').getImageData(0, 0, width, height);
              const counts = {};
              for (let at = 0; at < data.length; at += 4) {
                if (data[at + 3] !== 255) continue;
                const hex = [data[at], data[at + 1], data[at + 2]]
                  .map(of => of.toString(16).padStart(2, '0')).join('');
                counts['#' + hex] = (counts['#' + hex] ?? 0) + 1;
              }
              return counts;
            }""",
            run,
        )
        return dict(sorted(found.items(), key=lambda one: -one[1]))


@contextlib.contextmanager
def shown(
    opened: Any, path: Path | str, width: int = WIDE, scheme: str = "light"
) -> Iterator[Shown]:
    """Opens the file, or the address, in a new page of the browser. Records its errors and
    requests; see `Shown`."""
    page = opened.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme)
    opened_page = Shown(page)
    page.on("console", lambda message: opened_page.errors.append(message.text))
    page.on("pageerror", lambda error: opened_page.errors.append(str(error)))
    page.on("request", lambda request: opened_page.requests.append(request.url))
    page.goto(path if isinstance(path, str) else path.as_uri())
    try:
        yield opened_page
    finally:
        page.close()


def sizes(count: int) -> str:
    """Sizes in the form that the program prints."""
    if count < 1024:
        return f"{count} B"
    value, unit = count / 1024, 0
    while value >= 1024:
        value, unit = value / 1024, unit + 1
    return f"{value:.2f} {('KiB', 'MiB', 'GiB', 'TiB', 'PiB')[unit]}"


def run_document(
    ranks: int = 2, samples: int = 100, grown: int = 4, name: str = ""
) -> dict[str, Any]:
    """A run as `watch --json` describes it: each rank fills its shards, then its moments, `grown`
    MiB a sample; another process named `name` holds 30 MiB throughout."""
    half = samples // 2
    tracks: list[dict[str, Any]] = []
    for rank in range(ranks):
        begins = 2 + rank  # a sample before which it does not live
        alive = [None if i < begins else i for i in range(samples)]
        owners = {
            "process": [None if i is None else 24 * MIB for i in alive],
            "shards": [i and grown * MIB * min(i, half) for i in alive],
            "moments": [i and grown * MIB * max(0, i - half) + 1000 * i for i in alive],
        }
        promise = 2 * grown * MIB * half
        tracks.append({
            "label": f"rank {rank}", "pid": 100 + rank, "rank": rank, "node": 0, "owners": owners,
            "promise_bytes": [None if i == half + rank else i and promise for i in alive],
        })  # fmt: skip
    tracks.append({
        "label": name or "torchrun", "pid": 99, "rank": None, "node": 0,
        "owners": {"held": [30 * MIB] * samples}, "promise_bytes": None,
    })  # fmt: skip
    times = [round(0.05 * i, 2) for i in range(samples)]
    phases = [
        {"pid": 100 + rank, "rank": rank, "name": phase, "begin_s": begin, "end_s": end}
        for rank in range(ranks)
        for phase, begin, end in (
            ("load", times[2 + rank], times[half + rank]),
            ("step", times[half + 1 + rank], times[-1]),
        )
    ]
    total = sum(owner[-1] for track in tracks for owner in track["owners"].values())
    return {
        "command": ["torchrun", name],
        "peak_bytes": total,
        "peak": {"at_s": times[-1], "bytes": total, "cause": f"moments of rank 0 {name}"},
        "timeline": {
            "t_s": times,
            "limit_bytes": 3 * total // 2,
            "budget_bytes": None,
            "page_cache_bytes": [50 * MIB + i for i in range(samples)],
            "tracks": tracks,
            "phases": phases,
        },
    }


def held_at(
    document: dict[str, Any], sample: int, tracks: set[int] | None = None
) -> dict[str, int]:
    """Bytes by owner at a sample, of some or all tracks."""
    held: dict[str, int] = {}
    for at, track in enumerate(document["timeline"]["tracks"]):
        if tracks is None or at in tracks:
            for owner, values in track["owners"].items():
                held[owner] = held.get(owner, 0) + (values[sample] or 0)
    return held


def nearest(document: dict[str, Any], time: float) -> int:
    """The sample nearest to a time."""
    times = document["timeline"]["t_s"]
    return min(range(len(times)), key=lambda i: abs(times[i] - time))


def write_page(path: Path, runs: dict[str, dict[str, Any]], sentence: str = "") -> Path:
    """Writes the page of documents by label."""
    from modicum import _modicum

    labelled = [(label, json.dumps(document)) for label, document in runs.items()]
    path.write_text(_modicum.report_page("a title & <b>more</b>", labelled, sentence))
    return path
