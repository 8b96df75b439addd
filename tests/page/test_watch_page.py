"""The pages of `watch`, `watch --compare`, `load` and `rehearse` with `--report`. The page of
`watch` has the document that `--json` prints. A load with `--report` has the same digest, errors
and exit code as without it.

Catches: a page with another document; a command that starts although its page can't be written;
`--report` that changes the digest, the errors or the exit code of a load; a script error in the
page of a command that ended before the first sample; a launcher that goes on after the started
process was killed.
"""

import json
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from pages import MIB, drawn_on, nearest, run_document, shown, sizes
from program import children_of, failure, run, run_json

# A program that holds 80 MiB for half a second.
HOLDER = """
import sys, time
block = bytearray(80 << 20)
for at in range(0, len(block), 4096): block[at] = 1
time.sleep(0.5)
"""
NAME = "</script><img src=x onerror='window.injected = 1'>"


def test_the_page_of_a_watched_command_has_its_document(
    chromium: Any, modicum: Path, tmp_path: Path
) -> None:
    page = tmp_path / "run.html"
    command = (sys.executable, "-c", HOLDER, NAME)
    document = run_json(modicum, "watch", "--report", page, "--json", "--", *command)
    (drawn,) = drawn_on(page)["runs"]
    assert drawn["document"] == document and NAME in drawn["label"]
    with shown(chromium, page) as view:
        assert view.errors == [] and view.page.evaluate("window.injected") is None
        assert document["peak"]["cause"] in view.page.inner_text(".peak")
        begin, end = view.window()
        sample = nearest(document, view.hover((document["peak_at_s"] - begin) / (end - begin)))
        tracks = document["timeline"]["tracks"]
        held = sum(values[sample] or 0 for track in tracks for values in track["owners"].values())
        assert held > 80 * MIB and f"{sizes(held)} held" in view.reading()


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
    # The command may have got a sample: removes all samples from the page.
    source = drawn_on(page)
    for name in ("t_s", "page_cache_bytes", "tracks", "phases"):
        source["runs"][0]["document"]["timeline"][name] = []
    text = re.sub(
        r'(id="document">).*?(</script>)',
        lambda found: found[1] + json.dumps(source) + found[2],
        page.read_text(),
        flags=re.S,
    )
    page.write_text(text)
    with shown(chromium, page) as view:
        assert view.errors == [] and "no sample" in view.page.inner_text(".run")


def test_the_page_compares_two_runs(chromium: Any, modicum: Path, tmp_path: Path) -> None:
    runs = []
    for name, grown in (("a.json", 1), ("b.json", 3)):
        runs.append(tmp_path / name)
        runs[-1].write_text(json.dumps(run_document(grown=grown)))
    page = tmp_path / "both.html"
    comparison = run_json(modicum, "watch", "--compare", *runs, "--report", page)
    assert drawn_on(page)["sentence"] == comparison["sentence"]
    with shown(chromium, page) as view:
        assert view.errors == []
        assert view.page.inner_text("#sentence") == comparison["sentence"]
        titles = view.page.locator("h2").all_inner_texts()
        assert titles == ["a", "b"]


def test_a_page_changes_nothing_of_a_load(
    chromium: Any, modicum: Path, gpt2: Path, tmp_path: Path
) -> None:
    page = tmp_path / "load.html"
    words = ("load", gpt2, "--ranks", 2, "--digest")
    plain = run(modicum, *words, "--json")
    done = run(modicum, *words, f"--report={page}", "--json")
    assert (done.code, done.stderr) == (plain.code, plain.stderr) == (0, "")
    assert done.json["digest"] == plain.json["digest"]
    (drawn,) = drawn_on(page)["runs"]
    assert f"load {gpt2} --ranks 2 --digest --json" in drawn["label"]
    assert {track["rank"] for track in drawn["document"]["timeline"]["tracks"]} >= {0, 1}
    with shown(chromium, page) as view:
        assert view.errors == []
        assert "parameters" in view.page.inner_text("#owners")
        assert "load" in view.page.locator(".phases span").all_inner_texts()


def test_a_load_that_fails(modicum: Path, gpt2: Path, tmp_path: Path) -> None:
    """A load over its budget writes the page. With wrong flags, or if the page can't be written,
    the load is refused."""
    page = tmp_path / "load.html"
    error = failure(modicum, 15, "load", gpt2, "--budget", "2MiB", "--report", page)
    assert error["shortfall_bytes"] > 0 and page.is_file()
    assert failure(modicum, 2, "load", gpt2, "--check", "x", "--report", tmp_path / "no.html")
    assert not (tmp_path / "no.html").exists(), "the page was made before the flags were checked"
    folder = tmp_path / "none" / "page.html"
    assert failure(modicum, 13, "load", gpt2, "--report", folder)["file"]


def test_a_killed_rehearsal_leaves_no_process(modicum: Path, gpt2: Path, tmp_path: Path) -> None:
    words = ("rehearse", gpt2, "--ranks", 2, "--optimizer", "adamw:fp32", "--steps", 100_000)
    started = subprocess.Popen(
        [str(word) for word in (modicum, *words, "--report", tmp_path / "x.html")],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    assert started.stdout is not None
    until = time.monotonic() + 20
    while not (launcher := children_of(started.pid)) or len(children_of(launcher[0])) < 2:
        assert time.monotonic() < until and started.poll() is None
        time.sleep(0.02)
    started.kill()
    begin = time.monotonic()
    started.stdout.read()  # ends when the last process that has inherited it ends
    assert time.monotonic() - begin < 5
    started.wait()


def test_the_page_of_a_rehearsal_has_its_steps(modicum: Path, gpt2: Path, tmp_path: Path) -> None:
    """Doubles the steps until they take long enough for a sample with the moments."""
    page = tmp_path / "rehearse.html"
    words = ("rehearse", gpt2, "--ranks", 2, "--optimizer", "adamw:fp32", "--report", page)
    for steps in (2**power for power in range(1, 9)):
        assert run_json(modicum, *words, "--steps", steps)["steps"] == steps
        timeline = drawn_on(page)["runs"][0]["document"]["timeline"]
        if any(
            sum(filter(None, track["owners"].get("moments", ()))) for track in timeline["tracks"]
        ):
            break
    else:
        raise AssertionError(f"no sample of {steps} steps has moments: {timeline}")
    assert {"load", "step"} <= {phase["name"].partition("_")[0] for phase in timeline["phases"]}
