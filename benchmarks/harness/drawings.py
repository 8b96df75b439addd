"""Draws what benchmarks/picture.py has recorded: a load as it is and with Modicum, and bars."""

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from harness.page import GIB
from harness.svg import Picture, Scheme

Data = dict[str, Any]
Point = tuple[float, float]
WIDTH, LEFT, RIGHT = 900, 84, 194
TOP, FLOOR = 92, 440  # of the chart of a load
HEIGHT, GAP = 32, 16  # of bars
NAMES, BEHIND = 320, 204  # the width before the bars and behind the longest
OURS = "own-shard"
# What a strategy does, in words.
STRATEGIES = {
    "own-shard": "each rank reads its shards",
    "node-reader": "one rank per node reads",
    "replica-striped": "replicas share the reads",
    "rank0-broadcast": "rank 0 reads and broadcasts",
    "full-per-rank": "each rank reads the whole model",
}


def gib(count: float) -> str:
    value = count / GIB
    return f"{value:.0f} GiB" if value >= 20 or value == int(value) else f"{value:.1f} GiB"


def load_title(load: Data) -> str:
    return f"Host memory of a node while {load['ranks']} ranks load a model"


def load_picture(data: Data, scheme: Scheme) -> str:
    """Memory over the time of a load as it is and with Modicum; below it, bars of a plan."""
    load, plan = data["load"], data["plan"]
    height = FLOOR + 120 + len(plan["peaks"]) * (HEIGHT + GAP)
    picture = Picture(scheme, WIDTH, height, load_title(load))
    picture.text(24, 38, picture.title, size=24, weight=600)
    picture.text(24, 66, load["words"], color=scheme.muted, size=16)
    Chart(picture, load).draw()
    words = f"The same for {plan['model']} on {plan['ranks']} ranks, predicted by `modicum plan`"
    picture.text(24, FLOOR + 84, words, size=20, weight=600)
    bars = [
        Bar("with Modicum" if name == OURS else STRATEGIES[name], "", peak)
        for name, peak in plan["peaks"].items()
    ]
    draw_bars(picture, FLOOR + 106, bars, bars[-1].name)
    return picture.svg()


def strategies_picture(data: Data, scheme: Scheme) -> str:
    """Bars: the measured memory of each strategy, and what of it the shards are."""
    recorded = data["strategies"]
    strategies = recorded["strategies"]
    height = 122 + len(strategies) * (HEIGHT + GAP) + 14
    picture = Picture(scheme, WIDTH, height, "Peak host memory of all ranks, by strategy")
    picture.text(24, 38, picture.title, size=24, weight=600)
    picture.text(24, 66, recorded["words"], color=scheme.muted, size=16)
    x = 24.0
    for color, words in (
        (scheme.blue, "shards"),
        (scheme.red, "more, during the load"),
        (scheme.text, "predicted"),
    ):
        picture.bar(x, 84, 4 if words == "predicted" else 18, 14, color)
        picture.text(x + 26, 96, words, color=scheme.muted, size=16)
        x += 62 + 8 * len(words)
    bars = []
    for name, figures in strategies.items():
        moved = f"reads {gib(figures['read_bytes'])}"
        if figures["sent_bytes"]:
            moved += f", sends {gib(figures['sent_bytes'])}"
        measured, shards = figures["measured_bytes"], figures["shards_bytes"]
        parts = (shards, figures["predicted_bytes"])
        bars.append(Bar(name, STRATEGIES[name], measured, moved, *parts))
    draw_bars(picture, 116, bars)
    return picture.svg()


class Chart:
    """The chart of two loads on one axis."""

    def __init__(self, picture: Picture, load: Data) -> None:
        self.picture, self.load, self.scheme = picture, load, picture.scheme
        self.before, self.after = load["as_it_is"], load["with_modicum"]
        self.seconds = max(self.before["t_s"][-1], self.after["t_s"][-1])
        self.top = 1.15 * max(self.before["bytes"])
        self.budget = self.place(0, load["budget_bytes"])[1]

    def place(self, at_s: float, count: float) -> Point:
        x = LEFT + (WIDTH - LEFT - RIGHT) * at_s / self.seconds
        return x, FLOOR - (FLOOR - TOP) * count / self.top

    def line(self, run: Data) -> list[Point]:
        return [self.place(*sample) for sample in zip(run["t_s"], run["bytes"], strict=True)]

    def draw(self) -> None:
        self.draw_axes()
        before, after = self.line(self.before), self.line(self.after)
        killed = above(before, self.budget)
        for part in killed:
            self.picture.area(part, self.scheme.red, 0.25)
        self.draw_levels()
        end = killed[0][0] if killed else before[-1]  # where a process is killed
        self.picture.line([*(p for p in before if p[0] < end[0]), end], self.scheme.red, width=3)
        if killed:
            rest = [end, *(p for p in before if p[0] > end[0])]
            self.picture.line(rest, self.scheme.red, width=2, dash="5 4")
            self.label_kill(*end)
        self.picture.line(after, self.scheme.blue, width=3)
        self.label(before, after)

    def draw_axes(self) -> None:
        step = 2 if self.top > 5 * GIB else 1
        for tick in range(0, int(self.top / GIB) + 1, step):
            x, y = self.place(0, tick * GIB)
            self.picture.line([(x, y), (WIDTH - RIGHT, y)], self.scheme.edge, width=1)
            words = f"{tick} GiB" if tick else "0"
            self.picture.text(x - 10, y + 5, words, color=self.scheme.muted, anchor="end")
        step = next(step for step in (1, 2, 5, 10, 20, 50, 100) if self.seconds / step <= 12)
        for tick in range(0, int(self.seconds) + 1, step):
            x, y = self.place(tick, 0)
            words = f"{tick} s"
            self.picture.text(x, y + 24, words, color=self.scheme.muted, anchor="middle")

    def draw_levels(self) -> None:
        """The budget, the prediction and the model's size."""
        budget, predicted, model = (
            self.load[f"{name}_bytes"] for name in ("budget", "predicted", "model")
        )
        for count, words, color, dash in (
            (model, f"the model: {gib(model)}", self.scheme.muted, "2 4"),
            (predicted, f"predicted: {gib(predicted)}", self.scheme.blue, "2 5"),
            (budget, f"budget: {gib(budget)}", self.scheme.amber, "10 5"),
        ):
            (x, y), (right, _) = self.place(0, count), self.place(self.seconds, count)
            self.picture.line([(x, y), (right, y)], color, dash=dash)
            self.picture.text(right + 10, y + 5, words, color=color, size=16, weight=600)

    def label_kill(self, x: float, y: float) -> None:
        picture, red = self.picture, self.scheme.red
        for slope in (-8, 8):
            picture.line([(x - 8, y - slope), (x + 8, y + slope)], red, width=4)
        picture.text(x - 8, y - 18, "killed here", color=red, size=24, weight=700, anchor="end")
        picture.text(WIDTH - RIGHT - 12, y - 14, "(dashed: without the limit)", color=red, size=16,
                     anchor="end")  # fmt: skip

    def label(self, before: list[Point], after: list[Point]) -> None:
        picture, scheme = self.picture, self.scheme
        x, y = min(before, key=lambda point: point[1])
        picture.dot(x, y, scheme.red)
        words = f"as it is: {gib(max(self.before['bytes']))}; every rank builds the whole model"
        picture.text(min(x + 12, WIDTH - RIGHT), y - 24, words, color=scheme.red, size=18,
                     weight=600, anchor="end")  # fmt: skip
        x, y = after[-1]
        picture.dot(x, y, scheme.blue)
        words = f"with one line of Modicum: {gib(max(self.after['bytes']))}, loaded"
        picture.text(x + 12, y + 24, words, color=scheme.blue, size=18, weight=600)


def above(line: list[Point], edge: float) -> list[list[Point]]:
    """The areas between a line and an edge where the line is higher, so that its y is smaller."""
    areas: list[list[Point]] = [[]]
    for (x0, y0), (x1, y1) in pairwise([*line, (line[-1][0], edge)]):
        if y0 < edge:
            areas[-1].append((x0, y0))
        if (y0 < edge) != (y1 < edge):
            areas[-1].append((x0 + (x1 - x0) * (edge - y0) / (y1 - y0), edge))
            if y1 >= edge:
                areas.append([])
    return [area for area in areas if len(area) > 2]


@dataclass(frozen=True)
class Bar:
    name: str
    note: str  # below the name
    bytes: float
    behind: str = ""  # below the bytes, behind the bar
    shards_bytes: float = 0  # the part from the left that has another colour
    predicted_bytes: float = 0  # a mark


def draw_bars(picture: Picture, top: float, bars: list[Bar], best: str = "") -> None:
    """Bars of one scale, one below the other. `best`: the name of the bar to emphasise."""
    scheme = picture.scheme
    most = max(bar.bytes for bar in bars)
    for number, bar in enumerate(bars):
        y = top + number * (HEIGHT + GAP)
        width, shards, mark = (
            (WIDTH - NAMES - BEHIND) * count / most
            for count in (bar.bytes, bar.shards_bytes, bar.predicted_bytes)
        )
        picture.bar(NAMES, y, width, HEIGHT, scheme.blue if bar.name == best else scheme.red)
        if shards:
            picture.bar(NAMES, y, shards, HEIGHT, scheme.blue)
        if mark:
            x = NAMES + mark
            picture.line([(x, y - 5), (x, y + HEIGHT + 5)], scheme.text, width=3)
        weight = 600 if bar.name == best else 400
        end = NAMES + max(width, mark) + 12
        for x, words, below, anchor, bold in (
            (NAMES - 14, bar.name, bar.note, "end", weight),
            (end, gib(bar.bytes), bar.behind, "start", 600),
        ):
            baseline = y + (13 if below else 22)
            picture.text(x, baseline, words, size=17, weight=bold, anchor=anchor)
            picture.text(x, y + 31, below, size=14, color=scheme.muted, anchor=anchor)
