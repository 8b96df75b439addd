"""The page of `plan --report` shows the phases of a run one after another, with the bytes that
`plan --json` promises.

Catches: a phase has the memory of another phase; a rank is left out or counts twice; a strategy
other than the plan's is drawn, or a node other than the one with the largest peak; an older page is
lost if the plan fails.
"""

import json
import re
from pathlib import Path
from typing import Any

from pages import drawn_on, shown, sizes
from program import failure, run, run_json, strategy_of

FLAGS = ("--ranks", 6, "--ranks-per-node", 4, "--strategy", "node-reader")


def document_of(page: Path) -> dict[str, Any]:
    """The document of the page's only run."""
    (drawn,) = drawn_on(page)["runs"]
    return drawn["document"]


def by_phase(document: dict[str, Any]) -> dict[str, int]:
    """The drawn bytes of each phase: sums over all tracks and owners. A phase has one sample."""
    timeline = document["timeline"]
    sums = [
        sum(values[at] for track in timeline["tracks"] for values in track["owners"].values())
        for at in range(len(timeline["t_s"]))
    ]
    return dict(zip((phase["name"] for phase in timeline["phases"]), sums, strict=True))


def test_phases_are_those_of_the_plan(modicum: Path, gpt2: Path, tmp_path: Path) -> None:
    page = tmp_path / "plan.html"
    plan = run_json(modicum, "plan", gpt2, *FLAGS, "--report", page)
    nodes = strategy_of(plan, "node-reader")["nodes"]
    node = max(nodes, key=lambda node: node["peak_bytes"])
    document = document_of(page)
    assert by_phase(document) == {phase["phase"]: phase["bytes"] for phase in node["phases"]}
    assert document["peak"]["bytes"] == max(phase["bytes"] for phase in node["phases"])
    assert "node 0 of 2, predicted" in page.read_text()


def test_the_title_is_the_users(modicum: Path, gpt2: Path, tmp_path: Path) -> None:
    """Without JavaScript the page has the promised bytes of each phase, too."""
    page = tmp_path / "plan.html"
    plan = run_json(modicum, "plan", gpt2, "--report", page)
    assert "<title>Predicted host memory of " in page.read_text()
    run_json(modicum, "plan", gpt2, "--report", page, "--title", "GPT-2 <ours>")
    text = page.read_text()
    assert "<title>GPT-2 &lt;ours></title>" in text and "<h1>GPT-2 &lt;ours></h1>" in text
    (static,) = re.findall(r"<noscript>(.*?)</noscript>", text, re.S)
    for phase in strategy_of(plan, "own-shard")["nodes"][0]["phases"]:
        assert f"<th>{phase['phase']}</th><td>{sizes(phase['bytes'])}</td>" in static
    config = gpt2 / "config.json"
    run_json(modicum, "plan", config, "--report", page)
    assert f"<title>Predicted host memory of gpt2 ({config})</title>" in page.read_text()
    assert failure(modicum, 2, "plan", gpt2, "--title", "x")["category"] == "USAGE"


def test_a_job_has_its_save_and_its_resume(modicum: Path, gpt2: Path, tmp_path: Path) -> None:
    page = tmp_path / "plan.html"
    plan = run_json(modicum, "plan", gpt2, *FLAGS, "--optimizer", "adamw:fp32", "--report", page)
    nodes = strategy_of(plan, "node-reader")["nodes"]
    job = max((node["job"] for node in nodes), key=lambda job: job["peak_bytes"])
    promised = {phase["phase"]: phase["bytes"] for phase in job["phases"]}
    drawn = by_phase(document_of(page))
    assert list(drawn) == [
        "open", "load", "hold", "step", "save",
        "resume: open", "resume: load", "resume: hold", "resume", "step_resumed",
    ]  # fmt: skip
    for name in ("step", "save", "step_resumed"):
        assert drawn[name] == promised[name]
    assert max(size for name, size in drawn.items() if "resume" in name) >= promised["resume"]


def test_ranks_with_different_memory_have_separate_tracks(modicum: Path, tmp_path: Path) -> None:
    run_json(modicum, "synth", tmp_path / "moe", "--arch", "tiny-moe")
    page = tmp_path / "plan.html"
    plan = run_json(modicum, "plan", tmp_path / "moe", "--ranks", 40, "--report", page)
    tracks = document_of(page)["timeline"]["tracks"]
    # At most 16 tracks of ranks, and the launcher's.
    assert 2 <= len(tracks) <= 17 and tracks[-1]["label"] == "launcher"
    for label in (track["label"] for track in tracks):
        if match := re.fullmatch(r"ranks (\d+) to (\d+) \((\d+) ranks\)", label):
            first, last, count = map(int, match.groups())
            assert last - first + 1 == count
        else:
            assert re.fullmatch(r"launcher|rank \d+( and \d+ more)?", label), label
    node = strategy_of(plan, "own-shard")["nodes"][0]
    drawn = by_phase(document_of(page))
    assert drawn == {phase["phase"]: phase["bytes"] for phase in node["phases"]}


def test_an_older_page_survives_a_failure(modicum: Path, gpt2: Path, tmp_path: Path) -> None:
    page = tmp_path / "plan.html"
    page.write_text("old")
    failure(modicum, 13, "plan", tmp_path / "none", "--report", page)
    assert page.read_text() == "old"
    run_json(modicum, "plan", gpt2, "--report", page)
    assert page.read_text().startswith("<!doctype html>")
    assert [path.name for path in tmp_path.iterdir()] == ["plan.html"]
    (tmp_path / "link.html").symlink_to(page)
    for path in (tmp_path, tmp_path / "none" / "plan.html", tmp_path / "link.html"):
        assert failure(modicum, 13, "plan", gpt2, "--report", path)["file"]
    # A device is written to, and not replaced by a new file.
    done = run(modicum, "plan", gpt2, "--report", "/dev/stderr")
    assert done.code == 0 and done.stderr.startswith("<!doctype html>")


def test_deepspeed_is_drawn_with_its_verdict(
    chromium: Any, modicum: Path, gpt2: Path, tmp_path: Path
) -> None:
    config = tmp_path / "ds.json"
    zero = {"stage": 2, "offload_optimizer": {"device": "cpu"}}
    config.write_text(json.dumps({"bf16": {"enabled": True}, "zero_optimization": zero}))
    page = tmp_path / "plan.html"
    words = ("--ranks", 8, "--deepspeed", config, "--workers", 2, "--budget", "1GiB")
    done = run(modicum, "plan", gpt2, *words, "--json", "--report", page)
    assert done.code == 15 and (done.json["fits"], done.json["deepspeed_fits"]) == (True, False)
    totals = done.json["deepspeed"]["totals"]
    assert by_phase(document_of(page)) == {
        phase: total["node_bytes"] for phase, total in totals.items()
    }
    with shown(chromium, page) as view:
        assert view.errors == view.violations() == []
        sentence = view.page.inner_text("#sentence")
        assert "does not fit" in sentence and "for DeepSpeed, short by" in sentence
        assert f"Peak {sizes(totals['epoch_2']['node_bytes'])}" in view.page.inner_text(".peak")
        facts = view.page.inner_text("#facts")
        for part in ("modicum plan", "--workers 2", "gpt2", "float32", "8 on 1 node", "fsdp2"):
            assert part in facts
        assert "fp32 master" in view.page.inner_text("#tables")
        assert view.painted()["#541ea8"] > 1000


def test_a_plan_that_does_not_fit_is_drawn(
    chromium: Any, modicum: Path, gpt2: Path, tmp_path: Path
) -> None:
    page = tmp_path / "plan.html"
    budget = 120 << 20
    done = run(modicum, "plan", gpt2, *FLAGS, "--budget", budget, "--report", page)
    assert done.code == 15
    with shown(chromium, page) as view:
        assert view.errors == []
        assert view.page.locator(".phases span").all_inner_texts() == ["open", "load", "hold"]
        for at, name in enumerate(("open", "load", "hold")):
            view.hover((at + 0.5) / 3)
            held = by_phase(document_of(page))[name]
            assert view.reading().startswith(f"{name}: {sizes(held)} held")
        assert f"budget {sizes(budget)}" in view.page.inner_text(".lines")
        sentence = view.page.inner_text("#sentence")
        assert "does not fit" in sentence and "would fit: --" in sentence
        assert view.painted()["#0072b2"] > 1000
