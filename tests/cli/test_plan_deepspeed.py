"""`plan --deepspeed`: the forecast of DeepSpeed's own memory, its verdict, and the changes after
which it fits.

Catches: DeepSpeed's memory is not compared with the budget; a named change has another forecast
than the plan that makes it, or does not fit; Modicum in place of DeepSpeed has another figure than
its plan; a change that would do nothing is named; without offload_optimizer the load by Modicum
reads as DeepSpeed's verdict.
"""

import json
from pathlib import Path
from typing import Any

import pytest
from program import failure, node_peak, run, run_json

OFFLOAD = {"device": "cpu"}
CONFIGS = {
    "pinned": {"stage": 2, "offload_optimizer": OFFLOAD},
    "pageable": {"stage": 1, "offload_optimizer": OFFLOAD | {"pin_memory": False}},
    "with parameters": {"stage": 3, "offload_optimizer": OFFLOAD, "offload_param": OFFLOAD},
}


def written(tmp_path: Path, zero: dict[str, Any]) -> Path:
    path = tmp_path / "ds_config.json"
    config = {"bf16": {"enabled": True}, "gradient_accumulation_steps": 2}
    path.write_text(json.dumps(config | {"zero_optimization": zero}))
    return path


def merged(target: Any, patch: Any) -> Any:
    """The document `target` after a JSON merge patch without nulls."""
    if not isinstance(patch, dict):
        return patch
    return target | {key: merged(target.get(key, {}), value) for key, value in patch.items()}


def forecast_bytes(document: dict[str, Any]) -> int:
    return document["deepspeed"]["totals"]["epoch_2"]["node_bytes"]


def test_plan_also_forecasts_deepspeeds_memory(modicum: Path, gpt2: Path, tmp_path: Path) -> None:
    config = {
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}},
    }
    file = tmp_path / "ds_config.json"
    file.write_text(json.dumps(config))
    words = ("plan", gpt2, "--ranks", 2, "--deepspeed", file)
    forecast = run_json(modicum, *words, "--workers", 2)["deepspeed"]
    assert {"version", "stage", "lines", "totals", "ours"} <= set(forecast)
    assert forecast["stage"] == 2
    lines = forecast["lines"]
    assert {line["owner"] for line in lines} == {"deepspeed", "fork", "pinned rounding"}
    assert all({"name", "phase", "bytes_per_param", "bytes"} <= set(line) for line in lines)
    total = sum(line["bytes"] for line in lines)
    assert forecast["totals"]["epoch_2"]["rank_bytes"] == total
    assert forecast["totals"]["epoch_2"]["node_bytes"] == 2 * total
    for budget, code in ((2 * total, 0), (2 * total - 1, 15)):
        done = run(modicum, *words, "--workers", 2, "--budget", budget)
        assert done.code == code
        verdict = done.stdout.splitlines()[0]
        over = verdict.startswith("does not fit: ") and verdict.endswith("DeepSpeed, short by 1 B")
        assert over == ("DeepSpeed on a node by epoch_2: budget " in done.stderr) == (code > 0)
    assert forecast["params"] == run_json(modicum, "plan", gpt2)["checkpoint"]["bytes"] // 4
    assert "deepspeed" not in run_json(modicum, "plan", gpt2)
    config["zero_optimization"]["stage3_weird_cache"] = 5
    file.write_text(json.dumps(config))
    error = failure(modicum, 2, *words)
    assert error["category"] == "UNSUPPORTED" and "stage3_weird_cache" in error["message"]


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("workers", [0, 2])
def test_each_change_fits_when_it_is_made(
    modicum: Path, gpt2: Path, tmp_path: Path, name: str, workers: int
) -> None:
    file = written(tmp_path, CONFIGS[name])
    ours = ("plan", gpt2, "--ranks", 4)
    workers_of = ("--workers", workers)
    words = (*ours, *workers_of, "--deepspeed", file)
    needed = forecast_bytes(run_json(modicum, *words))
    seen = set()
    for budget in (needed - 1, needed * 3 // 4, needed // 3):
        done = run(modicum, *words, "--budget", budget, "--json")
        assert (done.code, done.json["deepspeed_fits"]) == (15, False), done.stderr
        assert done.json["shortfall_bytes"] == needed - budget
        for change in done.json["would_fit"]:
            flags = change["flags"].split()
            seen |= {word for word in flags if word.startswith("--")}
            within = ("--budget", budget)
            if change["who"] == "DeepSpeed":
                patch = change.get("config", {})
                seen |= set(patch.get("zero_optimization", {}))
                changed = tmp_path / "changed.json"
                changed.write_text(json.dumps(merged(json.loads(file.read_text()), patch)))
                again = run_json(
                    modicum, *ours, *workers_of, *within, *flags, "--deepspeed", changed
                )
                assert again["deepspeed_fits"], change
                assert forecast_bytes(again) == change["peak_bytes"]
                assert change["lossless"].startswith("same weights, master and moments")
            else:
                again = run_json(modicum, *ours, *within, *flags)
                assert again["fits"], change
                assert node_peak(again, change["strategy"]) == change["peak_bytes"]
        who = {change["who"] for change in done.json["would_fit"]}
        assert who >= {"Modicum's AdamW in place of DeepSpeed's"}
        text = run(modicum, *words, "--budget", budget).stdout
        assert "\nModicum's AdamW in place of DeepSpeed's would fit: --" in text
    assert ("--protect" in seen) == (workers > 0)
    assert ("offload_param" in seen) == (name == "with parameters")
    assert "--ranks-per-node" in seen and "--optimizer" in seen


def test_protection_alone_can_be_enough(modicum: Path, gpt2: Path, tmp_path: Path) -> None:
    words = ("plan", gpt2, "--deepspeed", written(tmp_path, CONFIGS["pageable"]), "--workers", 2)
    budget = forecast_bytes(run_json(modicum, *words, "--protect"))
    done = run(modicum, *words, "--budget", budget)
    assert done.stdout.splitlines()[1].startswith("DeepSpeed would fit: --protect: "), done.stdout
    first = run(modicum, *words, "--budget", budget, "--json").json["would_fit"][0]
    assert (first["flags"], first["peak_bytes"]) == ("--protect", budget)
    assert run(modicum, *words, "--protect", "--budget", budget).code == 0


def test_a_past_run_names_the_change_of_deepspeed(
    modicum: Path, gpt2: Path, tmp_path: Path
) -> None:
    words = ("plan", gpt2, "--deepspeed", written(tmp_path, CONFIGS["pageable"]), "--workers", 2)
    budget = forecast_bytes(run_json(modicum, *words, "--protect"))
    error = run(modicum, "load", gpt2, "--budget", "1MiB", "--json").stdout
    (tmp_path / "run.json").write_text(error)
    done = run(modicum, *words, "--from", tmp_path / "run.json", "--budget", budget, "--json")
    past = done.json["from"]
    assert past["change"] == done.json["would_fit"][0]
    assert "; DeepSpeed would fit: --protect: at most " in past["sentence"]


def test_without_offload_there_is_no_verdict_about_deepspeed(
    modicum: Path, gpt2: Path, tmp_path: Path
) -> None:
    words = ("plan", gpt2, "--ranks", 2, "--deepspeed", written(tmp_path, {"stage": 2}))
    document = run_json(modicum, *words, "--budget", "1GiB")
    assert document["fits"] and "deepspeed_fits" not in document
    assert document["deepspeed"]["lines"] == []
    first, verdict, *rest = run(modicum, *words, "--budget", "1GiB").stdout.splitlines()
    assert first.startswith("without offload_optimizer DeepSpeed holds no optimizer state")
    assert verdict.startswith("fits: ") and " for the load by Modicum, " in verdict
    (sentence,) = document["deepspeed"]["not_counted"]
    assert sentence.startswith("not counted: what from_pretrained holds before ")
    assert any(sentence.startswith(line) for line in rest if line.startswith("not counted"))
