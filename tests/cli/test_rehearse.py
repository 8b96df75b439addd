"""The verb `rehearse` and the flag `--optimizer`: load and optimizer steps, and then a save and a
resume, in one budget. The memory of each phase is compared with its promise, and limited to it by a
cgroup. The digests of model and state do not depend on ranks, threads or layout.

Must fail for these mutants: optimizer state is not promised, or promised and not held; the budget
is checked too late, also for a resume; replicas count twice in the gradient norm; the step does not
write the parameters that training reads; the promise of `plan` differs from that of `load` or
`rehearse`; resumed ranks continue with other values; 8-bit moments depend on ranks, threads or
layout.
"""

import json
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
from cage import cage, drop_page_cache, why_no_cage
from program import Ended, failure, node_peak, run, run_json, strategy_of, write_checkpoint

MIB = 1 << 20
RANK_KEYS = {
    "rank", "pid", "node", "promised_bytes", "ledger_peak_bytes", "kernel_peak_bytes",
    "baseline_bytes", "unexplained_bytes", "page_cache_peak_bytes", "storage_read_bytes",
}  # fmt: skip


@pytest.fixture(scope="module")
def moe(modicum: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("rehearse") / "moe"
    run_json(modicum, "synth", directory, "--arch", "tiny-moe")
    return directory


@pytest.fixture(scope="module")
def gpt2(modicum: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """One layer of gpt2: 46 M parameters, most of them the embedding."""
    directory = tmp_path_factory.mktemp("rehearse") / "gpt2"
    words = ("--arch", "gpt2", "--layers", 1, "--dtype", "bfloat16")
    run_json(modicum, "synth", directory, *words)
    yield directory
    shutil.rmtree(directory)


def rehearse(modicum: Path, directory: Path, state_format: str, *flags: object) -> dict[str, Any]:
    return run_json(modicum, "rehearse", directory, "--optimizer", f"adamw:{state_format}", *flags)


def promised(modicum: Path, directory: Path, *flags: object) -> int:
    """What `plan` promises of the largest node, in bytes."""
    return node_peak(run_json(modicum, "plan", directory, *flags), "own-shard")


# ---- output


def test_keys_and_phases(modicum: Path, moe: Path) -> None:
    document = rehearse(modicum, moe, "fp32", "--ranks", 3, "--ranks-per-node", 2, "--steps", 3)
    assert [phase["phase"] for phase in document["phases"]] == ["load", "step_1", "step_3"]
    for phase in document["phases"]:
        assert [rank["rank"] for rank in phase["ranks"]] == [0, 1, 2]
        assert all(set(rank) >= RANK_KEYS for rank in phase["ranks"])
        assert [node["node"] for node in phase["nodes"]] == [0, 1]
    assert document["state_format"] == "fp32" and document["coverage"] == "proven"
    assert len(document["digest_uninterrupted"]) >= 16
    one = rehearse(modicum, moe, "fp32", "--steps", 1)
    assert [phase["phase"] for phase in one["phases"]] == ["load", "step_1"]


def test_an_invalid_optimizer_is_refused(modicum: Path, moe: Path) -> None:
    assert "adamw" in failure(modicum, 2, "rehearse", moe)["message"]
    error = failure(modicum, 2, "plan", moe, "--optimizer", "adamw:fp32-spilt")
    assert "fp32-split" in error["message"]
    failure(modicum, 2, "rehearse", moe, "--optimizer", "adamw:fp32", "--resume-ranks", 1)
    failure(modicum, 2, "rehearse", moe, "--save", "absent")
    words = ("--optimizer", "adamw:fp32", "--destination", "discard")
    error = failure(modicum, 2, "load", moe, *words)
    assert error["category"] == "UNSUPPORTED"


# ---- the same bits in every layout


def test_neither_layout_nor_replicas_change_a_bit(modicum: Path, moe: Path) -> None:
    flags: tuple[tuple[object, ...], ...] = (
        (),
        ("--ranks", 3, "--shard-dim", 1, "--strategy", "node-reader"),
        ("--ranks", 4, "--layout", "hsdp", "--mesh", "2x2", "--strategy", "replica-striped"),
        ("--ranks", 4, "--layout", "tp-fsdp", "--mesh", "2x2", "--threads", 3),
        ("--ranks", 2, "--layout", "none"),
        ("--ranks", 3, "--layout", "zero2"),
        ("--ranks", 3, "--layout", "zero3", "--strategy", "rank0-broadcast"),
    )
    for state_format in ("fp32", "bf16-moments"):
        assert_alike(rehearse(modicum, moe, state_format, "--clip", 0.5, *words) for words in flags)


def assert_alike(runs: Iterable[dict[str, Any]]) -> None:
    """Asserts that all rehearsals end with the same bits of state and model. Gradient norms may
    differ in the order of their sums."""
    runs = list(runs)
    assert len({run["digest_uninterrupted"] for run in runs}) == 1
    assert len({run["model_digest"] for run in runs}) == 1
    norms = [run["grad_norm"] for run in runs]
    assert norms == pytest.approx([norms[0]] * len(norms), rel=1e-12)


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Mostly matrices, whose 8-bit moments have a scale for each 128 elements of a row. Two or four
    ranks divide `o_proj` and `down_proj` along dim 1 at multiples of 128."""
    torch = pytest.importorskip("torch")
    rng = torch.Generator().manual_seed(3)
    shapes = {
        "embed.weight": (523, 128), "layers.0.norm.weight": (130,),
        "layers.0.q_proj.weight": (65, 300), "layers.0.o_proj.weight": (37, 512),
        "layers.0.experts": (5, 3, 256), "layers.0.down_proj.weight": (19, 1024),
    }  # fmt: skip
    tensors = {
        name: torch.randn(shape, generator=rng).mul(0.05).to(torch.bfloat16)
        for name, shape in shapes.items()
    }
    return write_checkpoint(tmp_path_factory.mktemp("rehearse") / "rows", tensors)


# By number of ranks that save: the number of ranks that resume.
RESUMED = {1: 8, 2: 3, 3: 4, 4: 1, 8: 2, 5: 7, 6: 5, 7: 6}


@pytest.mark.parametrize("state_format", ("int8-moments", "int8-moments-24"))
def test_codes_do_not_depend_on_cuts_between_rows(
    modicum: Path, rows: Path, tmp_path: Path, state_format: str
) -> None:
    """Neither the number of ranks that save or resume, nor threads, nor a layout changes a bit, as
    long as the layout divides no block of 128 elements, which have one scale."""
    rowwise = ("--tp-rowwise", r"o_proj|down_proj")
    layouts: tuple[tuple[object, ...], ...] = (
        ("--ranks", 4, "--layout", "hsdp", "--mesh", "2x2"),
        ("--ranks", 4, "--layout", "tp-fsdp", "--mesh", "2x2", *rowwise),
        ("--ranks", 8, "--layout", "tp-fsdp", "--mesh", "2x4", *rowwise),
        ("--ranks", 2, "--layout", "none"),
    )
    cases = [
        (*words, "--resume-ranks", resume_ranks, "--threads", 1 + words[1] % 3)
        for words, resume_ranks in [
            *((("--ranks", ranks), resumed) for ranks, resumed in RESUMED.items()),
            *((words, 3) for words in layouts),
        ]
    ]
    runs = []
    for number, words in enumerate(cases):
        saving = ("--save", tmp_path / str(number), "--steps", 3, "--clip", 0.5)
        runs.append(rehearse(modicum, rows, state_format, *saving, *words))
        assert runs[-1]["digest_resumed"] == runs[-1]["digest_uninterrupted"], words
    assert_alike(runs)
    whole = rehearse(modicum, rows, "bf16-moments", "--steps", 4, "--clip", 0.5)
    assert whole["digest_uninterrupted"] != runs[0]["digest_uninterrupted"]


def test_split_is_exact_and_training_reads_the_stepped_parameters(modicum: Path, moe: Path) -> None:
    """`fp32` and `fp32-split` end with the same bits, for they get the same gradients, which have
    the parameter's dtype. With any dtype the step changes the model from the loaded one."""
    whole = rehearse(modicum, moe, "fp32", "--ranks", 2)
    split = rehearse(modicum, moe, "fp32-split", "--ranks", 2)
    assert whole["digest_uninterrupted"] == split["digest_uninterrupted"]
    assert whole["model_digest"] == split["model_digest"]
    loaded = run_json(modicum, "load", moe, "--digest")["digest"]
    assert whole["model_digest"] != loaded
    for dtype in ("float32", "float16"):
        cast = run_json(modicum, "load", moe, "--dtype", dtype, "--digest")["digest"]
        stepped = rehearse(modicum, moe, "int8-moments", "--dtype", dtype)
        assert stepped["model_digest"] != cast


def test_clipping_and_seed_change_the_state(modicum: Path, moe: Path) -> None:
    free = rehearse(modicum, moe, "fp32")
    loose = rehearse(modicum, moe, "fp32", "--clip", 2 * free["grad_norm"])
    tight = rehearse(modicum, moe, "fp32", "--clip", free["grad_norm"] / 2)
    other = rehearse(modicum, moe, "fp32", "--seed", 1)
    digests = [run["digest_uninterrupted"] for run in (free, loose, tight, other)]
    assert digests[0] == digests[1] and len(set(digests)) == 3


# ---- the promise


@pytest.mark.parametrize("state_format", ("fp32", "int8-moments"))
def test_plan_load_and_rehearse_promise_the_same(
    modicum: Path, moe: Path, state_format: str
) -> None:
    """And the promise equals the ledger to the byte. One rank, so that the phases of the node are
    those of the rank."""
    words = ("--optimizer", f"adamw:{state_format}", "--staging", "300KiB")
    plan = run_json(modicum, "plan", moe, *words)
    phases = strategy_of(plan, "own-shard")["nodes"][0]["phases"]
    step = next(phase for phase in phases if phase["phase"] == "step")
    needed = node_peak(plan, "own-shard")
    not_in_the_ledger = step["by_purpose"]["process"] + step["by_purpose"]["page_tables"]
    loaded = run_json(modicum, "load", moe, *words, "--budget", needed)
    assert loaded["nodes"][0]["peak_bytes"] == needed
    assert loaded["ranks"][0]["ledger_peak_bytes"] == step["bytes"] - not_in_the_ledger
    rehearsed = run_json(modicum, "rehearse", moe, *words, "--budget", needed)
    for phase in rehearsed["phases"][1:]:
        assert phase["nodes"][0]["promised_bytes"] == step["bytes"]
        assert phase["ranks"][0]["ledger_peak_bytes"] == step["bytes"] - not_in_the_ledger
    for verb in ("load", "rehearse"):
        error = failure(modicum, 15, verb, moe, *words, "--budget", needed - 1)
        assert (error["got"], error["shortfall_bytes"]) == (needed, 1)


def assert_kept(phase: dict[str, Any]) -> None:
    """Asserts that the kernel's peaks are within the margins of docs/internals/memory.md."""
    for rank in phase["ranks"]:
        promised_bytes, held = rank["promised_bytes"], rank["kernel_peak_bytes"]
        assert held <= promised_bytes, (phase["phase"], rank)
        assert promised_bytes - held <= 0.03 * promised_bytes + 2 * MIB, (phase["phase"], rank)
        assert abs(rank["unexplained_bytes"]) <= max(0.02 * held, 4 * MIB), rank
    for node in phase["nodes"]:
        promised_bytes, held = node["promised_bytes"], node["kernel_peak_bytes"]
        margin = 0.03 * promised_bytes + (2 * len(phase["ranks"]) + 8) * MIB
        assert held <= promised_bytes
        assert promised_bytes - held <= margin


@pytest.mark.parametrize(
    "flags",
    [
        ("--optimizer", "adamw:int8-moments"),
        ("--optimizer", "adamw:fp32-split", "--shard-dim", 1, "--strategy", "node-reader"),
        ("--optimizer", "adamw:bf16-moments", "--layout", "zero2", "--strategy", "rank0-broadcast"),
    ],
    ids=lambda flags: " ".join(map(str, flags)),
)
def test_every_phase_keeps_its_promise(
    modicum: Path, gpt2: Path, flags: tuple[object, ...]
) -> None:
    rehearsed = run_json(modicum, "rehearse", gpt2, "--ranks", 2, "--steps", 2, *flags)
    for phase in rehearsed["phases"]:
        assert_kept(phase)


def test_a_rehearsal_passes_in_a_cgroup_of_its_promise(modicum: Path, gpt2: Path) -> None:
    """The limit is the promise + 5 %, page cache included. With a budget of 99 % of the promise the
    run is refused, and needs less than 32 MiB for that."""
    if reason := why_no_cage():
        pytest.skip(reason)
    flags = ("--ranks", 4, "--optimizer", "adamw:fp32")
    needed = promised(modicum, gpt2, *flags)
    drop_page_cache(gpt2)
    with cage(needed * 105 // 100) as inside:
        process = inside.start(modicum, "rehearse", gpt2, *flags, "--steps", 2, "--json")
        done = Ended(0, *process.communicate(timeout=120))
        assert process.returncode == 0, done.stderr
        assert inside.oom_kills() == 0
        assert inside.peak_bytes() <= needed * 105 // 100
    for phase in done.json["phases"]:
        assert_kept(phase)
    with cage(32 * MIB) as inside:
        words = (*flags, "--budget", needed * 99 // 100, "--json")
        process = inside.start(modicum, "rehearse", gpt2, *words)
        out, err = process.communicate(timeout=60)
        assert process.returncode == 15, err
    error = json.loads(out)["error"]
    assert error["shortfall_bytes"] == needed - needed * 99 // 100
    owners = [owner["purpose"] for owner in error["owners"]]
    assert owners[0] == "moments" and {"master", "grad", "shards"} <= set(owners)


# ---- save and resume


@pytest.mark.parametrize(
    ("flags", "resume_ranks"),
    [
        (("--ranks", 1), 4),
        (("--ranks", 3, "--clip", 0.5), 2),
        (("--ranks", 4, "--layout", "tp-fsdp", "--mesh", "2x2"), 3),
        (("--ranks", 4, "--layout", "hsdp", "--mesh", "2x2"), 4),
        (("--ranks", 2, "--ranks-per-node", 1, "--dtype", "float32"), 3),
    ],
)
def test_other_ranks_resume_the_save(
    modicum: Path, moe: Path, tmp_path: Path, flags: tuple[object, ...], resume_ranks: int
) -> None:
    root = tmp_path / "root"
    words = (*flags, "--steps", 2, "--seed", 5)
    saving = (*words, "--save", root, "--resume-ranks", resume_ranks)
    document = rehearse(modicum, moe, "int8-moments-24", *saving)
    # Both are digests after three steps: two, the save, and one more by old and by resumed ranks.
    assert document["digest_resumed"] == document["digest_uninterrupted"]
    longer = rehearse(modicum, moe, "int8-moments-24", *flags, "--seed", 5, "--steps", 3)
    assert document["digest_uninterrupted"] == longer["digest_uninterrupted"]
    assert document["model_digest"] == longer["model_digest"]
    names = [phase["phase"] for phase in document["phases"]]
    assert names == ["load", "step_1", "step_2", "save", "resume", "step_resumed"]
    ranks = [len(phase["ranks"]) for phase in document["phases"]]
    assert ranks == [flags[1]] * 4 + [resume_ranks] * 2
    pids = [{rank["pid"] for rank in phase["ranks"]} for phase in document["phases"]]
    assert pids[0] == pids[3] and not pids[3] & pids[4] and pids[4] == pids[5]
    assert document["saved"]["path"] == str(root / "step-2")
    assert run_json(modicum, "verify", root)["ok"]
    assert failure(modicum, 20, "rehearse", moe, "--optimizer", "adamw:fp32", *saving)


def test_save_and_resume_keep_their_promises(modicum: Path, gpt2: Path, tmp_path: Path) -> None:
    flags = ("--ranks", 3, "--steps", 1, "--save", tmp_path / "root", "--resume-ranks", 2)
    document = rehearse(modicum, gpt2, "int8-moments", *flags)
    names = [phase["phase"] for phase in document["phases"]]
    assert names == ["load", "step_1", "save", "resume", "step_resumed"]
    for phase in document["phases"]:
        assert_kept(phase)
    highest = max(phase["nodes"][0]["promised_bytes"] for phase in document["phases"])
    assert document["promised_bytes"] == [highest]
    shutil.rmtree(tmp_path / "root")


def test_a_resume_that_would_not_fit_is_refused_before_the_load(
    modicum: Path, gpt2: Path, tmp_path: Path
) -> None:
    """The resume by three ranks needs more than the one rank that saves: it has three processes."""
    root = tmp_path / "root"
    flags = ("--optimizer", "adamw:fp32", "--steps", 1, "--staging", "1MiB", "--save", root)
    (needed,) = run_json(modicum, "rehearse", gpt2, *flags, "--resume-ranks", 3)["promised_bytes"]
    shutil.rmtree(root)
    words = (*flags, "--budget", needed - 1, "--resume-ranks")
    run_json(modicum, "rehearse", gpt2, *words, 1)  # one rank that resumes fits
    shutil.rmtree(root)
    error = failure(modicum, 15, "rehearse", gpt2, *words, 3)
    assert error["shortfall_bytes"] == 1 and not root.exists()


# ---- DeepSpeed's own memory


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
        over = "does not fit, 1 B too little: DeepSpeed needs" in done.stdout
        assert over == ("DeepSpeed needs" in done.stderr) == (code > 0)
    assert forecast["params"] == run_json(modicum, "plan", gpt2)["checkpoint"]["bytes"] // 2
    assert "deepspeed" not in run_json(modicum, "plan", gpt2)
    config["zero_optimization"]["stage3_weird_cache"] = 5
    file.write_text(json.dumps(config))
    error = failure(modicum, 2, *words)
    assert error["category"] == "UNSUPPORTED" and "stage3_weird_cache" in error["message"]
