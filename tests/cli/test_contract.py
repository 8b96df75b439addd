"""What scripts rely on: help, exit codes, error objects, JSON keys, and that `plan` predicts
exactly the run that `load` makes with the same flags.

Must fail for these mutants: a budget is compared with `<` instead of `<=`; `plan` assumes another
staging size than `load`; an error lacks its file or its shortfall; an existing output is
overwritten.
"""

import itertools
import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from program import (
    STRATEGIES,
    failure,
    header_of,
    node_peak,
    offset_of,
    run,
    run_json,
    strategy_of,
    write_index,
)

VERBS = (
    "inspect", "synth", "plan", "load", "rehearse", "save", "resume", "verify", "convert",
    "reshard", "diff", "step", "doctor", "watch",
)  # fmt: skip
NUMBER = (int, float)


@pytest.fixture(scope="module")
def moe(modicum: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small MoE in one file."""
    directory = tmp_path_factory.mktemp("contract") / "moe"
    run_json(modicum, "synth", directory, "--arch", "tiny-moe")
    return directory


@pytest.fixture
def broken(modicum: Path, tmp_path: Path) -> Path:
    """A small MoE in several files, which a test may damage."""
    directory = tmp_path / "broken"
    run_json(modicum, "synth", directory, "--arch", "tiny-moe", "--shard-size", 800)
    assert len(shards_of(directory)) > 2
    return directory


def shards_of(directory: Path) -> list[Path]:
    return sorted(directory.glob("*.safetensors"))


# ---- help and usage


def test_help_lists_verbs_first(modicum: Path) -> None:
    done = run(modicum, "--help")
    first_words = [line.split()[0] for line in done.stdout.splitlines() if line.strip()]
    assert done.code == 0
    assert set(VERBS) <= set(first_words)


@pytest.mark.parametrize("verb", VERBS)
def test_verb_help_lists_flags(modicum: Path, verb: str) -> None:
    flags = {"--json", "--quiet", "--verbose", "--threads", "--budget", "--progress"}
    if verb in ("plan", "load", "rehearse", "save", "resume"):
        flags |= {"--ranks", "--ranks-per-node", "--strategy", "--layout", "--shard-dim"}
        flags |= {"--dtype", "--keep-fp32", "--recipe", "--destination", "--staging", "--baseline"}
        flags |= {"--untie", "--optimizer", "--oversubscribe", "--mesh", "--round-robin"}
        flags |= {"--tp-rowwise", "--tp-packed", "--tp-replicate", "--expert-mesh", "--experts"}
    flags |= {
        "plan": {"--deepspeed", "--workers", "--persistent-workers"},
        "rehearse": {"--steps", "--seed", "--clip", "--save", "--resume-ranks"},
        "save": {"--step", "--steps", "--seed", "--shard-size", "--keep", "--grace", "--unused"},
        "resume": {"--steps"},
        "convert": {"--dtype", "--recipe", "--shard-size", "--sparse"},
        "reshard": {"--state-format", "--shard-size"},
        "doctor": {"--pid"},
        "watch": {"--report", "--trace", "--limit", "--compare"},
    }.get(verb, set())
    if verb == "load":
        flags |= {"--check", "--digest", "--expect-digest", "--dump"}
    if verb == "synth":
        flags |= {"--arch", "--layers", "--shard-size", "--dtype", "--sparse", "--edges"}
    if verb == "step":
        flags |= {"--params", "--state-format", "--ranks", "--steps", "--seed", "--clip", "--isa"}
        flags |= {"--loss-scale", "--grad-dtype", "--fork-children", "--no-compare", "--threads"}
    done = run(modicum, verb, "--help")
    assert done.code == 0
    assert {flag for flag in flags if flag not in done.stdout} == set()


COLUMNS = 100


@pytest.mark.parametrize("verb", VERBS)
def test_help_fits_a_terminal(modicum: Path, verb: str) -> None:
    text = run(modicum, verb, "--help").stdout
    assert [line for line in text.splitlines() if len(line) > COLUMNS] == []
    assert "--progress" in text and "this list" in text


@pytest.mark.parametrize(
    ("words", "nearest"),
    [
        (("lod", "DIR"), "load"),
        (("plan", "DIR", "--rank", "2"), "--ranks"),
        (("load", "DIR", "--digset"), "--digest"),
        (("load", "DIR", "--strategy", "own-shards"), "own-shard"),
        (("plan", "DIR", "--layout", "fsdp"), "fsdp2"),
        (("plan", "DIR", "--staging", "4MiBs"), "MiB"),
        (("load", "DIR", "--dtype", "b16"), "bfloat16"),
        (("synth", "OUT", "--arch", "qwen3-0.6"), "qwen3-0.6b"),
    ],
)
def test_unknown_words_name_the_nearest(
    modicum: Path, moe: Path, tmp_path: Path, words: tuple[str, ...], nearest: str
) -> None:
    paths = {"DIR": str(moe), "OUT": str(tmp_path / "out")}
    words = tuple(paths.get(word, word) for word in words)
    done = run(modicum, *words)
    assert done.code == 2, done.stderr
    assert nearest in done.stderr
    assert done.stdout == ""
    error = failure(modicum, 2, *words)
    assert error["category"] == "USAGE"


def test_plan_has_a_row_for_each_strategy_of_load(modicum: Path, moe: Path) -> None:
    rows = [row["name"] for row in run_json(modicum, "plan", moe)["strategies"]]
    assert sorted(rows) == sorted(STRATEGIES)
    error = failure(modicum, 2, "load", moe, "--strategy", "rank1-broadcast")
    assert all(name in error["message"] for name in STRATEGIES)


# ---- broken checkpoints


def test_a_missing_directory_is_an_io_error(modicum: Path, tmp_path: Path) -> None:
    for verb in ("plan", "load", "inspect"):
        assert failure(modicum, 13, verb, tmp_path / "nowhere")["category"] == "IO"


def test_a_truncated_file_is_named(modicum: Path, broken: Path) -> None:
    shard = shards_of(broken)[1]
    shard.write_bytes(shard.read_bytes()[:-5])
    error = failure(modicum, 10, "load", broken, "--ranks", 2)
    assert error["category"].startswith("FORMAT.")
    assert error["file"] == shard.name


@pytest.mark.parametrize(
    ("header", "category"),
    [
        (b"[]", "FORMAT.HEADER"),
        (b'{"x":', "FORMAT.JSON"),
        (b'{"x":1}', "FORMAT.SCHEMA"),
        (b'{"x":{"dtype":"F99","shape":[1],"data_offsets":[0,4]}}', "FORMAT.DTYPE"),
        (b'{"x":{"dtype":"F32","shape":[3],"data_offsets":[0,4]}}', "FORMAT.SIZE"),
        (b'{"x":{"dtype":"F32","shape":[1],"data_offsets":[4,0]}}', "FORMAT.OFFSETS"),
    ],
)
def test_each_fault_of_a_header_has_its_category(
    modicum: Path, tmp_path: Path, header: bytes, category: str
) -> None:
    file = tmp_path / "model.safetensors"
    file.write_bytes(struct.pack("<Q", len(header)) + header + bytes(4))
    error = failure(modicum, 10, "plan", tmp_path)
    assert error["category"] == category
    assert error["file"] == file.name


def test_a_header_longer_than_its_file_is_refused(modicum: Path, tmp_path: Path) -> None:
    for length in (1 << 20, (1 << 63) + 1, (1 << 64) - 1):
        (tmp_path / "model.safetensors").write_bytes(struct.pack("<Q", length) + b"{}")
        assert failure(modicum, 10, "plan", tmp_path)["category"].startswith("FORMAT.")


def test_a_missing_file_is_named(modicum: Path, broken: Path) -> None:
    shard = shards_of(broken)[-1]
    shard.unlink()
    error = failure(modicum, 11, "load", broken)
    assert error["category"] == "INDEX.MISSING_SHARD"
    assert error["file"] == shard.name


def test_a_tensor_that_is_not_in_its_file_is_refused(modicum: Path, broken: Path) -> None:
    weight_map = {n: file.name for file in shards_of(broken) for n in header_of(file)[0]}
    weight_map.pop("__metadata__", None)
    name = next(iter(weight_map))
    weight_map["not.there"] = weight_map[name]
    write_index(broken, weight_map, 0)
    assert failure(modicum, 11, "plan", broken)["category"] == "INDEX.MISSING_TENSOR"


def test_an_index_that_is_not_json_is_refused(modicum: Path, broken: Path) -> None:
    (broken / "model.safetensors.index.json").write_text('{"weight_map": ')
    assert failure(modicum, 11, "plan", broken)["category"] == "INDEX.JSON"


@pytest.mark.parametrize(
    ("change", "category"),
    [
        (lambda nodes: nodes.pop("lm_head.weight"), "MISMATCH"),
        (lambda nodes: nodes.update(new={"op": "stored", "name": "not.there"}), "MISMATCH"),
        (lambda nodes: nodes.update(new={"op": "invert", "in": []}), "UNSUPPORTED"),
    ],
)
def test_invalid_recipes_are_refused(
    modicum: Path, moe: Path, tmp_path: Path, change: Any, category: str
) -> None:
    names = [n for n in header_of(moe / "model.safetensors")[0] if n != "__metadata__"]
    nodes = {name: {"op": "stored", "name": name} for name in names}
    recipe = tmp_path / "recipe.json"
    recipe.write_text(json.dumps({"targets": nodes}))
    run_json(modicum, "load", moe, "--recipe", recipe)
    change(nodes)
    recipe.write_text(json.dumps({"targets": nodes}))
    assert failure(modicum, 2, "load", moe, "--recipe", recipe)["category"] == category


def test_existing_outputs_are_refused(modicum: Path, moe: Path, tmp_path: Path) -> None:
    before = (moe / "model.safetensors").read_bytes()
    assert failure(modicum, 20, "synth", moe, "--arch", "gpt2")["category"] == "CONFLICT"
    assert (moe / "model.safetensors").read_bytes() == before
    error = failure(modicum, 20, "load", moe, "--dump", tmp_path)
    assert error["category"] == "CONFLICT"
    assert list(tmp_path.iterdir()) == []


# ---- the budget


def test_the_budget_is_exact_to_the_byte(modicum: Path, moe: Path) -> None:
    """A budget of the predicted peak is accepted. One byte less is refused, and the error has the
    bytes of each purpose."""
    for strategy, staging in itertools.product(STRATEGIES, ("1MiB", "3MiB")):
        flags = (moe, "--ranks", 3, "--strategy", strategy, "--staging", staging)
        needed = node_peak(run_json(modicum, "plan", *flags), strategy)
        exact = run_json(modicum, "load", *flags, "--budget", needed)
        assert exact["nodes"][0]["peak_bytes"] == needed
        assert exact["budget"] == {"bytes": needed, "source": "flag"}
        error = failure(modicum, 15, "load", *flags, "--budget", needed - 1)
        assert_over_budget(error, needed, needed - 1)
        assert_over_budget(failure(modicum, 15, "load", *flags, "--budget", 5), needed, 5)


def assert_over_budget(error: dict[str, Any], needed: int, allowed: int) -> None:
    """Asserts that the error has both figures in bytes, and owners that add up to `needed`."""
    assert error["category"] == "BUDGET"
    assert error["got"] == needed and error["expected"] == allowed
    assert error["shortfall_bytes"] == needed - allowed
    owners = [owner["bytes"] for owner in error["owners"]]
    assert owners == sorted(owners, reverse=True)
    assert sum(owners) == needed
    assert all(isinstance(owner["purpose"], str) for owner in error["owners"])


def test_default_staging_shrinks_to_fit(modicum: Path, moe: Path) -> None:
    """A budget below the need of the default staging, but not below that of 1 MiB, makes `plan` and
    `load` shrink staging to the same size."""
    flags = (moe, "--ranks", 3)
    needed = node_peak(run_json(modicum, "plan", *flags), "own-shard")
    least = node_peak(run_json(modicum, "plan", *flags, "--staging", "1MiB"), "own-shard")
    for budget in (needed - 1, needed - (5 << 20), least):
        planned = run_json(modicum, "plan", *flags, "--budget", budget)
        loaded = run_json(modicum, "load", *flags, "--budget", budget)
        assert planned["fits"] is True
        promised = node_peak(planned, "own-shard")
        assert promised == loaded["nodes"][0]["peak_bytes"] <= budget
    assert refused_plan(modicum, *flags, "--budget", least - 1)["shortfall_bytes"] == 1
    assert failure(modicum, 15, "load", *flags, "--budget", least - 1)["shortfall_bytes"] == 1


def refused_plan(modicum: Path, *words: object) -> dict[str, Any]:
    """The JSON of a plan that does not fit (exit code 15)."""
    done = run(modicum, "plan", *words, "--json")
    assert done.code == 15, done.stderr
    assert done.json["fits"] is False and done.json["would_fit"] is not None
    return done.json


def test_fits_is_about_the_requested_strategy(modicum: Path, moe: Path) -> None:
    flags = (moe, "--ranks", 4, "--staging", "8MiB")
    planned = run_json(modicum, "plan", *flags)
    assert planned["fits"] is None and planned["budget"] is None
    for strategy in STRATEGIES:
        needed = node_peak(planned, strategy)
        asked = (*flags, "--strategy", strategy, "--budget")
        assert run_json(modicum, "plan", *asked, needed)["fits"] is True
        assert refused_plan(modicum, *asked, needed - 1)["shortfall_bytes"] == 1


def test_sizes_are_parsed(modicum: Path, moe: Path) -> None:
    sizes = {"1000": 1000, "7B": 7, "2KB": 2000, "1.5MB": 1_500_000, "3GB": 3 * 10**9}
    sizes |= {"1TB": 10**12, "2KiB": 2048, "0.5MiB": 1 << 19, "1.5GiB": 3 << 29, "1TiB": 1 << 40}
    sizes |= {"16G": 16 << 30, "1 GiB": 1 << 30, "16gb": 16 * 10**9, "2k": 2048, "010": 10}
    sizes |= {"1.5g": 3 << 29, "3m": 3 << 20, "1T": 1 << 40, "5 mib": 5 << 20}
    for written, meant in sizes.items():
        planned = run(modicum, "plan", moe, "--budget", written, "--json").json
        assert planned["budget"] == {"bytes": meant, "source": "flag"}
    for wrong in ("-1", "GiB", "1 XB", "", " ", "1 ", "1e3", "99999999TiB", "0x10"):
        assert run(modicum, "plan", moe, f"--budget={wrong}").code == 2, wrong


# ---- keys


def assert_keys(value: dict[str, Any], **types: type | tuple[type, ...]) -> None:
    """Asserts that each key exists and has a value of the given type. A bool is not a number."""
    for key, expected in types.items():
        assert key in value, f"no key {key} in {sorted(value)}"
        found = value[key]
        accepted = isinstance(found, expected)
        assert accepted and (expected is bool or not isinstance(found, bool)), f"{key}: {found!r}"


def test_keys_of_synth_and_inspect(modicum: Path, tmp_path: Path) -> None:
    directory = tmp_path / "moe"
    made = run_json(modicum, "synth", directory, "--arch", "tiny-moe", "--shard-size", 800)
    assert_keys(made, files=int, tensors=int, data_bytes=int, written_bytes=int)
    listed = run_json(modicum, "inspect", directory)
    assert_keys(listed, checkpoint=dict, dtypes=dict, files=list, tensors=list, warnings=list)
    assert_keys(listed, model_type=str, tie_word_embeddings=bool)
    assert_keys(
        listed["checkpoint"], bytes=int, tensors=int, files=int, parameters=int, identity=str
    )
    assert listed["checkpoint"]["files"] == len(listed["files"]) == made["files"] > 2
    assert listed["checkpoint"]["bytes"] == made["data_bytes"]


def test_keys_of_plan(modicum: Path, moe: Path) -> None:
    flags = ("--ranks", 4, "--ranks-per-node", 2, "--budget", "auto")
    planned = run_json(modicum, "plan", moe, *flags)
    assert_keys(planned, checkpoint=dict, ranks=int, strategies=list, budget=dict, fits=bool)
    assert_keys(planned["checkpoint"], bytes=int, tensors=int, files=int)
    assert_keys(planned["budget"], bytes=int, source=str)
    assert planned["budget"]["source"].startswith(("cgroup v1 /", "cgroup v2 /", "MemAvailable"))
    for row in planned["strategies"]:
        assert_keys(
            row, name=str, storage_read_bytes=int, exchanged_bytes=int, nodes=list, ranks=list
        )
        assert_keys(row, overread_ratio=NUMBER)
        assert [node["node"] for node in row["nodes"]] == [0, 1]
        assert [rank["node"] for rank in row["ranks"]] == [0, 0, 1, 1]
        for node in row["nodes"]:
            assert_node(node)
        for number, rank in enumerate(row["ranks"]):
            assert_keys(rank, rank=int, node=int, peak_bytes=int)
            assert rank["rank"] == number


def assert_node(node: dict[str, Any]) -> None:
    """Asserts that a phase is the sum of its purposes, and that `peak_phase` is the largest phase.
    The node's peak may be larger, since its ranks may have their own peaks in other phases."""
    assert_keys(node, node=int, peak_bytes=int, peak_phase=str, peak_cause=str, phases=list)
    phases = {phase["phase"]: phase["bytes"] for phase in node["phases"]}
    assert phases[node["peak_phase"]] == max(phases.values())
    assert node["peak_bytes"] >= max(phases.values())
    for phase in node["phases"]:
        assert_keys(phase, phase=str, bytes=int, by_purpose=dict)
        assert sum(phase["by_purpose"].values()) == phase["bytes"]


def test_keys_of_load(modicum: Path, moe: Path) -> None:
    loaded = run_json(modicum, "load", moe, "--ranks", 4, "--ranks-per-node", 2)
    assert_keys(loaded, strategy=str, elapsed_s=NUMBER, check_s=NUMBER, bytes_loaded=int)
    assert_keys(loaded, storage_read_bytes=int, coverage=str, check=str, nodes=list, ranks=list)
    assert_keys(loaded, compared_bytes=int, not_compared=list)
    assert loaded["coverage"] == "proven" and loaded["check"] == "off"
    assert loaded["digest"] is None
    assert [node["node"] for node in loaded["nodes"]] == [0, 1]
    for node in loaded["nodes"]:
        assert_keys(node, peak_bytes=int, kernel_peak_bytes=int)
    figures = ("rank", "pid", "promised_bytes", "ledger_peak_bytes", "kernel_peak_bytes")
    figures += ("baseline_bytes", "unexplained_bytes", "page_cache_peak_bytes")
    for number, rank in enumerate(loaded["ranks"]):
        assert_keys(rank, **dict.fromkeys((*figures, "storage_read_bytes"), int))
        assert rank["rank"] == number
        explained = rank["ledger_peak_bytes"] + rank["baseline_bytes"]
        assert rank["unexplained_bytes"] == rank["kernel_peak_bytes"] - explained
    assert len({rank["pid"] for rank in loaded["ranks"]}) == 4
    with_digest = run_json(modicum, "load", moe, "--digest", "--check", "values")
    assert_keys(with_digest, digest=str, check_s=NUMBER)
    assert with_digest["check"] == "ok"


def test_quiet_prints_nothing(modicum: Path, moe: Path) -> None:
    for verb in ("plan", "load"):
        done = run(modicum, verb, moe, "-q", "--progress", "none")
        assert (done.code, done.stdout, done.stderr) == (0, "", "")


def test_progress_goes_to_stderr(modicum: Path, moe: Path) -> None:
    done = run(modicum, "load", moe, "--json", "--progress", "plain")
    assert done.code == 0
    assert json.loads(done.stdout)["coverage"] == "proven"
    assert done.stderr


# ---- plan == load


def flag_grid() -> Iterator[tuple[object, ...]]:
    """Worlds on one and several nodes, each with several dtypes, layouts and destinations."""
    worlds = ((1, 1), (3, 3), (5, 2), (8, 4))  # ranks, and ranks per node
    ways = (
        (),
        ("--dtype", "float32"),
        ("--layout", "none", "--dtype", "float16"),
        ("--destination", "discard"),
        ("--destination", "discard", "--dtype", "float32", "--staging", "1MiB"),
        ("--staging", "2MiB", "--baseline", "5MiB"),
    )
    for (ranks, per_node), way in itertools.product(worlds, ways):
        yield ("--ranks", ranks, "--ranks-per-node", per_node, *way)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_plan_promises_the_run_that_load_makes(modicum: Path, moe: Path, strategy: str) -> None:
    for flags in flag_grid():
        row = strategy_of(run_json(modicum, "plan", moe, *flags), strategy)
        loaded = run_json(modicum, "load", moe, *flags, "--strategy", strategy)
        assert loaded["strategy"] == strategy
        assert loaded["storage_read_bytes"] == row["storage_read_bytes"], flags
        assert loaded["exchanged_bytes"] == row["exchanged_bytes"], flags
        promised = [rank["promised_bytes"] for rank in loaded["ranks"]]
        assert promised == [rank["peak_bytes"] for rank in row["ranks"]], flags
        nodes = [node["peak_bytes"] for node in loaded["nodes"]]
        assert nodes == [node["peak_bytes"] for node in row["nodes"]], flags
        for rank in loaded["ranks"]:
            assert rank["kernel_peak_bytes"] <= rank["promised_bytes"], flags
            assert rank["ledger_peak_bytes"] <= rank["promised_bytes"], flags


def test_strategies_plan_to_read_what_they_are_named_for(modicum: Path, moe: Path) -> None:
    """own-shard reads each stored byte once over all ranks, rank0-broadcast once on rank 0,
    full-per-rank once on each rank."""
    planned = run_json(modicum, "plan", moe, "--ranks", 4)
    stored = planned["checkpoint"]["bytes"]
    reads = {row["name"]: row["storage_read_bytes"] for row in planned["strategies"]}
    assert stored <= reads["own-shard"] <= 1.02 * stored
    assert reads["rank0-broadcast"] == stored
    assert reads["full-per-rank"] == 4 * stored


def test_inspect_shows_the_offsets_of_the_header(modicum: Path, moe: Path) -> None:
    file = moe / "model.safetensors"
    for tensor in run_json(modicum, "inspect", moe)["tensors"]:
        assert tensor["begin"] == offset_of(file, tensor["name"])
