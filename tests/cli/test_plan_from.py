"""`plan --from run.json`: plans within the memory limit that an earlier run had, and names the
cheapest change of flags that fits. run.json is a document of `watch --json`, or the error of a
refused run.

Catches: another figure of the document counts as what the run held, or as its limit; a suggested
change does not fit when it is planned; another node comes before a change on one node; a run fits
although its save does not; a document of another kind is accepted; `--budget` is ignored.
"""

import json
import shlex
from pathlib import Path
from typing import Any

import pytest
from pages import MIB, run_document, sizes
from program import failure, node_peak, run, run_json, strategy_of


def written(tmp_path: Path, document: dict[str, Any]) -> Path:
    path = tmp_path / "run.json"
    path.write_text(json.dumps(document))
    return path


def watched(limit_bytes: int | None, **more: Any) -> dict[str, Any]:
    """The document of a run whose peak was 90 MiB under this limit, with further members `more`."""
    held = {"peak_bytes": 90 * MIB, "limit_bytes": limit_bytes, "killed": None}
    return run_document() | held | more


@pytest.fixture(scope="module")
def flags(gpt2: Path) -> tuple[object, ...]:
    return (gpt2, "--ranks", 4, "--optimizer", "adamw:fp32", "--staging", "1MiB")


def changed(flags: tuple[object, ...], words: list[str]) -> list[object]:
    """The directory and flags of a plan, with the flags in `words` replaced or added."""
    directory, *given = flags
    pairs = dict(zip(given[::2], given[1::2], strict=True)) | dict(
        zip(words[::2], words[1::2], strict=True)
    )
    return [directory, *(word for pair in pairs.items() for word in pair)]


def test_the_cheapest_change_fits(modicum: Path, flags: tuple[object, ...], tmp_path: Path) -> None:
    needed = node_peak(run_json(modicum, "plan", *flags), "own-shard")
    for limit in (needed - 1, needed - needed // 5, needed // 2):
        done = run(modicum, "plan", *flags, "--from", written(tmp_path, watched(limit)), "--json")
        assert done.code == 15, done.stderr
        past = done.json["from"]
        assert (past["held_bytes"], past["limit_bytes"]) == (90 * MIB, limit)
        change = past["change"]
        assert change == done.json["would_fit"][0]
        words = shlex.split(change["flags"])  # flag, value, flag, value, ...
        again = run_json(modicum, "plan", *changed(flags, words), "--budget", limit)
        assert again["fits"] and node_peak(again, change["strategy"]) == change["peak_bytes"]
        nodes = ["--ranks-per-node" in of["flags"] for of in done.json["would_fit"]]
        assert nodes == sorted(nodes), "one node comes before several"
        assert (change["lossless"] is None) != (change["lossy"] is None)
        over = f" ({sizes(90 * MIB - limit)} over)" if limit < 90 * MIB else ""
        assert past["over_bytes"] == max(0, 90 * MIB - limit)
        begin = f"this run held 90.00 MiB, the limit was {sizes(limit)}{over}; "
        assert past["sentence"].startswith(f"{begin}the cheapest change that fits is {words[0]}")
        assert f": at most {sizes(change['peak_bytes'])} on a node" in past["sentence"]
        text = run(modicum, "plan", *flags, "--from", tmp_path / "run.json").stdout
        assert past["sentence"] in text.splitlines()


def test_more_nodes_are_a_change(modicum: Path, gpt2: Path, tmp_path: Path) -> None:
    """The limit is what two of the eight ranks need, so that four nodes fit and one does not."""
    flags = (gpt2, "--ranks", 8, "--layout", "none")
    limit = node_peak(run_json(modicum, "plan", *flags, "--ranks-per-node", 2), "own-shard")
    path = written(tmp_path, watched(limit))
    done = run(modicum, "plan", *flags, "--from", path, "--json")
    assert done.json["from"]["change"]["flags"] == "--ranks-per-node 2"
    assert "--ranks-per-node 2 (4 nodes): at most" in done.json["from"]["sentence"]


def test_a_refused_run_would_have_held_its_need(
    modicum: Path, flags: tuple[object, ...], tmp_path: Path
) -> None:
    refused = run(modicum, "load", *flags, "--budget", "40MiB", "--json")
    assert refused.code == 15
    error = refused.error
    planned = run(modicum, "plan", *flags, "--from", written(tmp_path, refused.json), "--json").json
    past = planned["from"]
    assert past["refused"] and past["over_bytes"] == error["shortfall_bytes"]
    assert (past["held_bytes"], past["limit_bytes"]) == (error["got"], 40 * MIB)
    assert past["sentence"].startswith(f"this run would have held {sizes(error['got'])}")
    assert planned["shortfall_bytes"] == error["shortfall_bytes"]


def test_a_killed_run_has_the_limit_of_its_kill(
    modicum: Path, flags: tuple[object, ...], tmp_path: Path
) -> None:
    kill = {"name": "python3", "limit_bytes": 85 * MIB, "held_bytes": 3, "phase": None}
    path = written(tmp_path, watched(None, killed=kill))
    past = run(modicum, "plan", *flags, "--from", path, "--json").json["from"]
    assert past["killed"] and past["limit_bytes"] == 85 * MIB
    assert (
        "the limit was 85.00 MiB (5.00 MiB over) and the kernel killed python3" in past["sentence"]
    )


def test_a_run_that_fits_needs_no_change(
    modicum: Path, flags: tuple[object, ...], tmp_path: Path
) -> None:
    path = written(tmp_path, watched(64 << 30))
    planned = run_json(modicum, "plan", *flags, "--from", path)
    assert planned["fits"] and planned["from"]["change"] is None
    assert planned["from"]["sentence"].endswith("; the planned run fits without a change")
    assert planned["budget"] == {"bytes": 64 << 30, "source": "run.json"}


def test_a_job_that_does_not_fit_is_named(
    modicum: Path, flags: tuple[object, ...], tmp_path: Path
) -> None:
    """The load and its steps fit, but not the save, or not all that the node holds."""
    flags = (*flags[:-1], "8MiB")
    (node,) = strategy_of(run_json(modicum, "plan", *flags), "own-shard")["nodes"]
    needed = node["job"]["peak_bytes"]
    path = written(tmp_path, watched(needed - 1))
    planned = run_json(modicum, "plan", *flags, "--from", path)
    assert (planned["fits"], planned["job_fits"]) == (True, False)
    sentence = planned["from"]["sentence"]
    assert (
        "; the planned load fits, but the save, or a resume by the same number of ranks: needed "
        f"{sizes(needed)}, short by 1 B; the cheapest change that fits is "
    ) in sentence
    assert planned["from"]["change"] == planned["would_fit"][0]
    done = run(modicum, "plan", *flags, "--from", path, "--reference", "--json")
    assert done.code == 15 and done.json["rl_fits"] is False
    assert (
        "; the planned load fits, but node 0 in phase 'save': budget "
        in done.json["from"]["sentence"]
    )


def test_a_budget_takes_the_place_of_the_limit(
    modicum: Path, flags: tuple[object, ...], tmp_path: Path
) -> None:
    """A run without any limit needs `--budget`. The budget that a run has reported counts as its
    limit, and `--budget` replaces that."""
    document = watched(None)
    document["timeline"]["limit_bytes"] = None
    path = written(tmp_path, document)
    for none in ((), ("--budget", "none")):
        error = failure(modicum, 2, "plan", *flags, "--from", path, *none)
        assert "no limit" in error["message"]
    past = run_json(modicum, "plan", *flags, "--from", path, "--budget", "64GiB")["from"]
    assert past["limit_bytes"] == 64 << 30
    document["timeline"]["budget_bytes"] = 63 << 30
    past = run_json(modicum, "plan", *flags, "--from", written(tmp_path, document))["from"]
    assert past["limit_bytes"] == 63 << 30
    past = run_json(modicum, "plan", *flags, "--from", path, "--budget", "64GiB")["from"]
    assert "the budget is 64.00 GiB" in past["sentence"]


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"peak_bytes": -1}', '{"error": {"category": "IO", "got": 3}}']
)
def test_documents_of_another_kind_are_refused(
    modicum: Path, flags: tuple[object, ...], tmp_path: Path, text: str
) -> None:
    path = tmp_path / "other.json"
    path.write_text(text)
    error = failure(modicum, 2, "plan", *flags, "--from", path)
    assert error["file"] == "other.json" and "--from" in error["message"]
