"""The page that `report_page` writes, in Chromium: its charts, the text for the hovered sample,
zooming and use by keyboard, in the light and the dark scheme, on wide and narrow screens.

Catches: an area, a line or a band is not drawn; the text for the hovered sample is that of another
sample, or counts hidden processes; zooming has no effect; a name becomes HTML; the page uses the
network; a table has other numbers than the chart; two charts have different scales; names of phases
overlap; the page is wider than a phone's screen, or lacks names for screen readers.
"""

from pathlib import Path
from typing import Any

import pytest
from pages import (
    MIB,
    NARROW,
    WIDE,
    held_at,
    nearest,
    run_document,
    shown,
    sizes,
    write_page,
)

# A name that would run a script if it were inserted as HTML.
HOSTILE = "</script><img src=x onerror='window.injected = 1'><!--"
# Colours of owners in the light scheme.
COLORS = {"shards": "#0072b2", "moments": "#f0e514", "process": "#9aa0a8", "held": "#7ab4db"}

LIGHT_BAND, DARK_BAND = "#eef1f5", "#22262d"


@pytest.fixture(scope="module")
def run() -> dict[str, Any]:
    return run_document(name=HOSTILE)


@pytest.fixture(scope="module")
def one(run: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A page with one run."""
    return write_page(tmp_path_factory.mktemp("page") / "one.html", {f"run {HOSTILE}": run})


@pytest.fixture(scope="module")
def two(run: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A page that compares two runs. The second has one rank instead of two, and fewer bytes."""
    other = run_document(ranks=1, samples=60, grown=1)
    for phase in other["timeline"]["phases"]:
        phase["name"] += HOSTILE
    runs = {"A.json": run, "B.json": other}
    path = tmp_path_factory.mktemp("page") / "two.html"
    return write_page(path, runs, f"B holds less {HOSTILE}")


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [WIDE, NARROW])
@pytest.mark.parametrize("name", ["one", "two"])
def test_the_page_is_drawn_and_accessible(
    chromium: Any, name: str, width: int, scheme: str, request: pytest.FixtureRequest
) -> None:
    with shown(chromium, request.getfixturevalue(name), width, scheme) as view:
        painted = view.painted()
        for owner, color in COLORS.items():
            assert painted.get(color, 0) > 100, f"{owner}: {list(painted)[:8]}"
        for summary in view.page.locator("summary").all():
            summary.click()
        assert view.page.evaluate("document.documentElement.scrollWidth") <= width
        assert view.violations() == []
        assert view.errors == []
        assert view.requests == [request.getfixturevalue(name).as_uri()]


def test_names_are_shown_as_text_not_as_html(chromium: Any, one: Path, two: Path) -> None:
    for path in (one, two):
        with shown(chromium, path) as view:
            assert view.page.evaluate("window.injected") is None
            assert view.page.locator("img").count() == 0
            assert view.page.inner_text("body").count(HOSTILE) >= 3
            assert view.page.title() == view.page.inner_text("h1") == "a title & <b>more</b>"


def test_the_bytes_of_the_hovered_sample_are_shown(
    chromium: Any, one: Path, run: dict[str, Any]
) -> None:
    names = {"moments": "moments", "shards": "parameters", "held": "not attributed"}
    with shown(chromium, one) as view:
        for part in (0.02, 0.3, 0.61, 0.98):
            sample = nearest(run, view.hover(part))
            held = held_at(run, sample)
            text = view.reading()
            assert text.startswith(f"{run['timeline']['t_s'][sample]:.2f} s")
            assert f"{sizes(sum(held.values()))} held" in text
            for owner, name in names.items():
                assert (f"{name} {sizes(held[owner])}" in text) == (held[owner] > 0), owner
            assert f"page cache {sizes(run['timeline']['page_cache_bytes'][sample])}" in text
        # The last hovered sample.
        assert "phase step" in text
        promised = sum(track["promise_bytes"][-1] for track in run["timeline"]["tracks"][:2])
        assert f"predicted {sizes(promised)}" in text
        begin, end = view.window()
        half = len(run["timeline"]["t_s"]) // 2  # rank 0 is between two phases: no promise
        view.hover((run["timeline"]["t_s"][half] - begin) / (end - begin))
        assert "predicted" not in view.reading()
        assert view.page.get_attribute(".reading", "aria-live") == "polite"


def test_the_page_opens_at_the_peak(chromium: Any, one: Path, run: dict[str, Any]) -> None:
    with shown(chromium, one) as view:
        peak = run["peak"]
        assert view.reading().startswith(
            f"{peak['at_s']:.2f} s, phase step: {sizes(peak['bytes'])}"
        )
        assert f"Peak {sizes(peak['bytes'])} after" in view.page.inner_text(".peak")
        assert peak["cause"] in view.page.inner_text(".peak")
        assert view.page.inner_text(".lines") == f"limit {sizes(run['timeline']['limit_bytes'])}"


def test_the_chart_is_zoomed_and_reset(chromium: Any, one: Path, run: dict[str, Any]) -> None:
    with shown(chromium, one) as view:
        whole = view.window()
        x, y, width, height = view.area()
        view.page.mouse.move(x + 0.2 * width, y + height / 2)
        view.page.mouse.down()
        view.page.mouse.move(x + 0.4 * width, y + height / 2, steps=4)
        view.page.mouse.up()
        begin, end = view.window()
        # The complete window begins at 0 s.
        assert abs(begin - 0.2 * whole[1]) < 0.02 * whole[1]
        assert abs(end - 0.4 * whole[1]) < 0.02 * whole[1]
        assert view.page.inner_text(".window") == f"zoomed: {begin:.2f} to {end:.2f} s"
        sample = nearest(run, view.hover(0.5))
        assert f"{sizes(sum(held_at(run, sample).values()))} held" in view.reading()
        view.page.click("[name=reset]")
        assert view.window() == whole
        view.page.select_option("select", label="step")  # zooms to the phase
        phase = run["timeline"]["phases"][1]
        assert view.window() == pytest.approx((phase["begin_s"], phase["end_s"]))


def test_the_page_can_be_used_by_keyboard(chromium: Any, one: Path, run: dict[str, Any]) -> None:
    with shown(chromium, one) as view:
        whole = view.window()
        view.page.focus("[name=in]")
        view.page.keyboard.press("Enter")
        begin, end = view.window()
        assert end - begin == pytest.approx((whole[1] - whole[0]) / 2)
        view.page.keyboard.press("Tab")
        view.page.keyboard.press("Enter")
        assert view.window() == pytest.approx(whole)
        view.page.focus(".sample input")
        view.page.keyboard.press("Home")
        view.page.keyboard.press("ArrowRight")
        view.page.keyboard.press("ArrowRight")
        assert view.reading().startswith(f"{run['timeline']['t_s'][2]:.2f} s")
        assert view.page.get_attribute(".sample input", "aria-valuetext").startswith("0.10 s")


def test_a_hidden_process_does_not_count(chromium: Any, one: Path, run: dict[str, Any]) -> None:
    with shown(chromium, one) as view:
        before = view.painted()
        view.page.get_by_label("rank 1").uncheck()
        last = len(run["timeline"]["t_s"]) - 1
        assert f"{sizes(sum(held_at(run, last, {0, 2}).values()))} held" in view.reading()
        assert view.painted()[COLORS["shards"]] < 0.7 * before[COLORS["shards"]]
        assert not view.page.get_by_label("all of them").is_checked()
        view.page.get_by_label("all of them").check()
        assert view.painted()[COLORS["shards"]] == before[COLORS["shards"]]


def cells(view: Any, table: str) -> list[list[str]]:
    """The texts of a table's cells, by row."""
    return view.page.eval_on_selector_all(
        f"{table} tbody tr", "rows => rows.map(row => [...row.cells].map(cell => cell.innerText))"
    )


def test_tables_have_the_same_numbers(chromium: Any, one: Path, run: dict[str, Any]) -> None:
    """The tables have the numbers of the document from which the chart is drawn."""
    with shown(chromium, one) as view:
        for summary in view.page.locator(".run summary").all():
            summary.click()
        rows = cells(view, ".samples table")
        assert len(rows) == len(run["timeline"]["t_s"])
        for sample in (0, 41, len(rows) - 1):
            held = held_at(run, sample)
            owners = [held[name] for name in ("process", "shards", "moments", "held")]
            assert rows[sample][1:6] == [sizes(sum(owners)), *map(sizes, owners)]
        last = len(rows) - 1
        by_process = {row[0].strip(): row for row in cells(view, ".processes table")}
        assert by_process["rank 0"][1:3] == ["100", "0"]
        assert by_process["rank 0"][3] == sizes(sum(held_at(run, last, {0}).values()))
        by_owner = {row[0].strip(): row[1] for row in cells(view, "#owners table")}
        assert by_owner["moments"] == sizes(held_at(run, last)["moments"])
        assert [row[0] for row in cells(view, ".intervals table")] == ["load", "step"] * 2


def test_huge_pages_and_waits_are_shown_where_there_are_any(chromium: Any, tmp_path: Path) -> None:
    document = run_document()
    with shown(chromium, write_page(tmp_path / "none.html", {"a": document})) as view:
        assert "huge" not in view.page.inner_text(".processes table")
        assert "waited" not in view.page.inner_text(".lines")
    document["processes"] = [{"pid": 100, "huge_page_bytes": 3 * MIB}]
    document["pressure"] = {"source": "node", "some_s": 1.25, "full_s": 0.5}
    with shown(chromium, write_page(tmp_path / "some.html", {"a": document})) as view:
        view.page.locator("summary").first.click()
        by_process = {row[0].strip(): row[-1] for row in cells(view, ".processes table")}
        assert (by_process["rank 0"], by_process["rank 1"]) == ("3.00 MiB", "")
        waits = "waited for memory 1.25 s, all processes at once 0.50 s (node)"
        assert view.page.inner_text(".lines").endswith(waits)
        assert view.violations() == [] and view.errors == []


def test_names_of_phases_do_not_overlap(chromium: Any, one: Path) -> None:
    for width in (WIDE, NARROW):
        with shown(chromium, one, width) as view:
            boxes = [
                (span.inner_text(), span.bounding_box())
                for span in view.page.locator(".phases span:visible").all()
            ]
            assert [name for name, _ in boxes] == ["load", "step"], (
                "expected one band per phase, not per rank"
            )
            (_, left), (_, right) = boxes
            assert left["y"] == right["y"] and left["x"] + left["width"] <= right["x"] + 0.5


def test_two_runs_have_one_scale_and_one_legend(chromium: Any, two: Path) -> None:
    with shown(chromium, two) as view:
        ranges = view.page.evaluate("shown_runs.map(run => run.graph.yAxisRange())")
        assert ranges[0] == ranges[1]
        assert view.page.locator("#owners").count() == 1
        assert view.page.inner_text("#sentence").startswith("B holds less")
        titles = view.page.locator("h2").all_inner_texts()
        assert titles == ["A.json", "B.json"]
        commands = view.page.locator(".command").all_inner_texts()
        assert commands == [f"torchrun {HOSTILE}", "torchrun"]
        for part in (".chart", ".reading"):  # begin at the same height
            assert len({box.bounding_box()["y"] for box in view.page.locator(part).all()}) == 1
        areas = [view.painted(at)[COLORS["shards"]] for at in (0, 1)]
        # Each of the two ranks of A grows four times as fast as the one rank of B.
        assert areas[0] > 4 * areas[1] > 0


def test_the_scheme_may_change_while_it_is_open(chromium: Any, one: Path) -> None:
    with shown(chromium, one) as view:
        assert LIGHT_BAND in view.painted() and DARK_BAND not in view.painted()
        view.page.emulate_media(color_scheme="dark")
        for _ in range(100):  # the page paints again when the browser lets it
            view.page.wait_for_timeout(100)
            if DARK_BAND in view.painted():
                break
        assert DARK_BAND in view.painted() and LIGHT_BAND not in view.painted()
