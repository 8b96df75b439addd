"""`plan --reference --engine-tp N --backup`, for reinforcement learning: what the trainer, the
reference model, the inference engine and the backup of the weights hold on a node in each phase,
and which weights a node holds twice.

Catches: an engine's weights are not divided by its ranks; a holder is counted before its phase.
"""

from pathlib import Path
from typing import Any

import pytest
from pages import drawn_on
from program import failure, run, run_json, strategy_of

TRAINER = ("--ranks", 4, "--ranks-per-node", 2, "--optimizer", "adamw:fp32")
ALL = ("--reference", "--engine-tp", 2, "--backup")


@pytest.fixture(scope="module")
def moe(modicum: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("rl") / "moe"
    run_json(modicum, "synth", directory, "--arch", "tiny-moe")
    return directory


def with_tables(held: int) -> int:
    """Bytes with their page tables: 8 bytes per 4 KiB, in whole pages, and one page per GiB."""
    return held + -(-(held // 512) // 4096) * 4096 + -(-held // (1 << 30)) * 4096


def nodes_of(plan: dict[str, Any]) -> list[dict[str, Any]]:
    nodes: list[dict[str, Any]] = strategy_of(plan, "own-shard")["nodes"]
    return nodes


def test_holders_by_phase(modicum: Path, moe: Path) -> None:
    plan = run_json(modicum, "plan", moe, *TRAINER, *ALL)
    model = plan["checkpoint"]["bytes"]
    for node in nodes_of(plan):
        job = {of["phase"]: of for of in node["job"]["phases"]}
        shards = with_tables(job["load"]["by_purpose"]["shards"])
        engine = with_tables(-(-model // 2) * 2)  # half of the model on each of two ranks
        # By phase: which holders begin, or change their bytes.
        expected = [
            ("load", {"trainer": job["load"]["bytes"]}),
            ("load_reference", {"trainer": job["load"]["bytes"], "reference": shards}),
            ("start_engine", {"engine": engine}),
            ("step", {"trainer": job["step"]["bytes"]}),
            ("refit", {"trainer": job["step"]["bytes"], "backup": shards}),
            ("save", {"trainer": job["save"]["bytes"]}),
        ]
        held: dict[str, int] = {}
        for phase, (name, changes) in zip(node["rl"]["phases"], expected, strict=True):
            held |= changes
            assert (phase["phase"], phase["by_holder"]) == (name, held)
            assert phase["bytes"] == sum(held.values())
        twice = {of["holder"]: of["bytes"] for of in node["rl"]["held_twice"]}
        assert twice == {"engine": engine, "backup": shards}


def test_the_budget_is_that_of_all_holders(modicum: Path, moe: Path) -> None:
    plan = run_json(modicum, "plan", moe, *TRAINER, *ALL)
    peak = max(node["rl"]["peak_bytes"] for node in nodes_of(plan))
    for budget, fits in ((peak, True), (peak - 1, False)):
        words = (*TRAINER, *ALL, "--budget", budget)
        done = run(modicum, "plan", moe, *words, "--json")
        assert (done.code, done.json["fits"], done.json["rl_fits"]) == (15 * (not fits), True, fits)
        assert ("; largest: trainer " in done.stderr) is not fits
        shown = run(modicum, "plan", moe, *words).stdout
        assert max(map(len, shown.splitlines())) <= 120
    assert run(modicum, "plan", moe, *TRAINER, *ALL, "--budget", "1MiB").code == 15
    alone = run_json(modicum, "plan", moe, *TRAINER)
    assert all("rl" not in node for node in nodes_of(alone)) and "rl_fits" not in alone


def test_wrong_flags_are_refused(modicum: Path, moe: Path) -> None:
    assert "adamw:FORMAT" in failure(modicum, 2, "plan", moe, "--reference")["expected"]
    refused = failure(modicum, 2, "plan", moe, *TRAINER, "--engine-tp", 3)
    assert (refused["expected"], refused["got"]) == ("1, 2, 4", "3")
    refused = failure(modicum, 2, "plan", moe, *TRAINER, "--device", "--backup")
    assert refused["category"] == "UNSUPPORTED" and refused["got"] == "--device"


def test_the_page_has_the_timeline(modicum: Path, moe: Path, tmp_path: Path) -> None:
    page = tmp_path / "plan.html"
    plan = run_json(modicum, "plan", moe, *TRAINER, *ALL, "--report", page)
    node = max((node["rl"] for node in nodes_of(plan)), key=lambda of: of["peak_bytes"])
    (drawn,) = drawn_on(page)["runs"]
    tracks = drawn["document"]["timeline"]["tracks"]
    for index, phase in enumerate(node["phases"]):
        total = sum(values[index] for track in tracks for values in track["owners"].values())
        assert total == phase["bytes"], phase["phase"]
    assert {"reference", "engine", "backup"} <= {track["label"] for track in tracks}
