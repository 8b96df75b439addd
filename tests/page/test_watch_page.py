"""`--report` of `watch`, `watch --compare`, `load` and `rehearse`: the page has the document that
`--json` prints, and the run is otherwise unchanged.

Must fail for these mutants: the page has another document; a command starts although its page can't
be written; `--report` changes the output, errors or exit code of a load; the page of a command that
ended before the first sample has a script error.
"""

import json
import re
import sys
from pathlib import Path
from typing import Any

from pages import MIB, drawn_on, nearest, run_document, shown, sizes
from program import failure, run, run_json

HOLDER = """
import sys, time
block = bytearray(80 << 20)
for at in range(0, len(block), 4096): block[at] = 1
time.sleep(0.5)
"""
NAME = "</script><img src=x onerror='window.injected = 1'>"


def test_a_watched_command(chromium: Any, modicum: Path, tmp_path: Path) -> None:
    page = tmp_path / "run.html"
    command = (sys.executable, "-c", HOLDER, NAME)
    told = run_json(modicum, "watch", "--report", page, "--json", "--", *command)
    (of_page,) = drawn_on(page)["runs"]
    assert of_page["document"] == told and NAME in of_page["label"]
    with shown(chromium, page) as of:
        assert of.errors == [] and of.page.evaluate("window.injected") is None
        assert told["peak"]["cause"] in of.page.inner_text(".peak")
        begin, end = of.window()
        sample = nearest(told, of.hover((told["peak_at_s"] - begin) / (end - begin)))
        tracks = told["timeline"]["tracks"]
        held = sum(values[sample] or 0 for track in tracks for values in track["owners"].values())
        assert held > 80 * MIB and f"{sizes(held)} held" in of.reading()


def test_a_page_that_cant_be_written_fails_before_the_command(
    modicum: Path, tmp_path: Path
) -> None:
    ran = tmp_path / "ran"
    page = tmp_path / "none" / "run.html"
    error = failure(modicum, 13, "watch", "--report", page, "--json", "--", "touch", ran)
    assert "run.html" in error["file"] and not ran.exists()


def test_a_command_without_a_sample(chromium: Any, modicum: Path, tmp_path: Path) -> None:
    page = tmp_path / "run.html"
    assert run(modicum, "watch", "-q", "--report", page, "--", "true").code == 0
    document = drawn_on(page)
    for list_of in ("t_s", "page_cache_bytes", "tracks", "phases"):
        document["runs"][0]["document"]["timeline"][list_of] = []
    text = re.sub(
        r'(id="document">).*?(</script>)',
        lambda found: found[1] + json.dumps(document) + found[2],
        page.read_text(),
        flags=re.S,
    )
    page.write_text(text)
    with shown(chromium, page) as of:
        assert of.errors == [] and "no sample" in of.page.inner_text(".run")


def test_two_runs(chromium: Any, modicum: Path, tmp_path: Path) -> None:
    runs = []
    for name, grown in (("a.json", 1), ("b.json", 3)):
        runs.append(tmp_path / name)
        runs[-1].write_text(json.dumps(run_document(grown=grown)))
    page = tmp_path / "both.html"
    told = run_json(modicum, "watch", "--compare", *runs, "--report", page)
    assert drawn_on(page)["sentence"] == told["sentence"]
    with shown(chromium, page) as of:
        assert of.errors == []
        assert of.page.inner_text("#sentence") == told["sentence"]
        assert of.page.locator("h2").all_inner_texts() == ["a.json", "b.json"]


def test_a_load(chromium: Any, modicum: Path, gpt2: Path, tmp_path: Path) -> None:
    page = tmp_path / "load.html"
    words = ("load", gpt2, "--ranks", 2, "--digest")
    plain = run(modicum, *words, "--json")
    done = run(modicum, *words, f"--report={page}", "--json")
    assert (done.code, done.stderr) == (plain.code, plain.stderr) == (0, "")
    assert done.json["digest"] == plain.json["digest"]
    (of_page,) = drawn_on(page)["runs"]
    line = of_page["document"]["timeline"]
    assert f"load {gpt2} --ranks 2 --digest --json" in of_page["label"]
    assert {track["rank"] for track in line["tracks"]} >= {0, 1}
    with shown(chromium, page) as of:
        assert of.errors == []
        assert "parameters" in of.page.inner_text("#owners")
        assert "load" in of.page.locator(".phases span").all_inner_texts()


def test_a_load_that_fails(modicum: Path, gpt2: Path, tmp_path: Path) -> None:
    page = tmp_path / "load.html"
    error = failure(modicum, 15, "load", gpt2, "--budget", "2MiB", "--report", page)
    assert error["shortfall_bytes"] > 0 and page.is_file()
    assert failure(modicum, 2, "load", gpt2, "--check", "x", "--report", tmp_path / "no.html")
    assert not (tmp_path / "no.html").exists(), "flags are checked first"
    folder = tmp_path / "none" / "page.html"
    assert failure(modicum, 13, "load", gpt2, "--report", folder)["file"]


def test_a_rehearsal(modicum: Path, gpt2: Path, tmp_path: Path) -> None:
    page = tmp_path / "rehearse.html"
    words = ("rehearse", gpt2, "--ranks", 2, "--optimizer", "adamw:fp32", "--steps", 2)
    told = run_json(modicum, *words, "--report", page)
    assert told["steps"] == 2
    line = drawn_on(page)["runs"][0]["document"]["timeline"]
    assert {"load", "step"} <= {phase["name"].partition("_")[0] for phase in line["phases"]}
    assert any("moments" in track["owners"] for track in line["tracks"])
