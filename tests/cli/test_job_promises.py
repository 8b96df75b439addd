"""`plan --optimizer` promises the memory of a whole job: load, step, save, resume and a resumed
step. Its figures equal those of `save`, `resume` and `rehearse --save` to the byte, and these equal
the ledgers of their ranks, for layouts, state formats and worlds.

Must fail for these mutants: a save or a resume is promised without its optimizer state; a phase is
promised the memory of another phase; a save promises memory that its ledger does not hold; the
resumed run is planned with the recipe of the saved one; a resumed step is promised without the
headers of the step that was read; a run without state has no plan.
"""

import shutil
from pathlib import Path
from typing import Any

import pytest
from program import failure, header_of, run, run_json, stored, strategy_of, write_recipe

MIB = 1 << 20
BASELINE_BYTES = 2 * MIB  # the default of --baseline: a rank process before the load
FORMATS = ("fp32", "fp32-split", "bf16-moments", "int8-moments", "int8-moments-24")
# The flags of a layout, and the numbers of ranks for which it is tested.
LAYOUTS: tuple[tuple[tuple[object, ...], tuple[int, ...]], ...] = (
    (("--layout", "none"), (1, 3)),
    (("--layout", "fsdp2"), (1, 2, 5)),
    (("--layout", "fsdp2", "--shard-dim", 1), (3,)),
    (("--layout", "hsdp", "--mesh", "2x2"), (4,)),
    (("--layout", "hsdp", "--mesh", "3x2"), (6,)),
    (("--layout", "tp-fsdp", "--mesh", "2x2", "--tp-rowwise", "down|o_proj"), (4,)),
    (("--layout", "tp-fsdp", "--mesh", "1x3"), (3,)),
    (("--layout", "zero1"), (2,)),
    (("--layout", "zero2"), (3,)),
    (("--layout", "zero3"), (4,)),
)
WORLDS = [(*layout, "--ranks", ranks) for layout, worlds in LAYOUTS for ranks in worlds]
JOBS = [
    (*WORLDS[0], "--strategy", "full-per-rank"),
    (*WORLDS[3], "--strategy", "node-reader", "--ranks-per-node", 2),
    (*WORLDS[4], "--dtype", "float32", "--frozen", "norm"),
    (*WORLDS[5], "--strategy", "own-shard"),
    (*WORLDS[6], "--strategy", "replica-striped", "--ranks-per-node", 3),
    (*WORLDS[7], "--staging", "300KiB"),
    (*WORLDS[9], "--strategy", "rank0-broadcast", "--ranks-per-node", 1),
    (*WORLDS[10], "--strategy", "own-shard"),
]
# Layouts that divide no block of 8-bit moments between ranks.
WHOLE_BLOCKS = (("--ranks", 3), ("--ranks", 4, "--layout", "hsdp", "--mesh", "2x2"))


def text(flags: tuple[object, ...]) -> str:
    return " ".join(map(str, flags))


@pytest.fixture(scope="module")
def moe(modicum: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("promises") / "moe"
    run_json(modicum, "synth", directory, "--arch", "tiny-moe", "--shard-size", 1500)
    return directory


@pytest.fixture(scope="module")
def gpt2(modicum: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One layer of gpt2, whose 8-bit moments have scales."""
    directory = tmp_path_factory.mktemp("promises") / "gpt2"
    words = ("--arch", "gpt2", "--layers", 1, "--dtype", "bfloat16")
    run_json(modicum, "synth", directory, *words)
    return directory


def with_process(ledger_bytes: int) -> int:
    """The promise of a rank whose ledger's peak is `ledger_bytes`: these, the process, and page
    tables of 8 bytes per 4 KiB, in whole pages, and one page per GiB."""
    pages = -(-(ledger_bytes // 512) // 4096) * 4096
    return ledger_bytes + BASELINE_BYTES + pages + -(-ledger_bytes // (1 << 30)) * 4096


def assert_exact(document: dict[str, Any]) -> None:
    """Each rank's promise is exactly its ledger's peak plus process and page tables."""
    for rank in document["ranks"]:
        assert rank["promised_bytes"] == with_process(rank["ledger_peak_bytes"]), rank


# ---- save and resume


@pytest.mark.parametrize("state_format", (None, *FORMATS))
def test_save_and_resume_hold_exactly_what_they_promise(
    modicum: Path, moe: Path, tmp_path: Path, state_format: str | None
) -> None:
    optimizer = ("--optimizer", f"adamw:{state_format}") if state_format else ()
    for number, flags in enumerate(WORLDS):
        root = tmp_path / str(number)
        saved = run_json(modicum, "save", moe, root, "--step", 1, *flags, *optimizer)
        assert_exact(saved)
        assert_exact(run_json(modicum, "resume", root, *flags))


@pytest.mark.parametrize("flags", WHOLE_BLOCKS, ids=text)
def test_a_state_with_scales_is_held_as_promised(
    modicum: Path, gpt2: Path, tmp_path: Path, flags: tuple[object, ...]
) -> None:
    words = (*flags, "--optimizer", "adamw:int8-moments")
    (job,) = job_of(modicum, gpt2, *words)
    saved = run_json(modicum, "save", gpt2, tmp_path / "root", "--step", 1, *words)
    assert_exact(saved)
    resumed = run_json(modicum, "resume", tmp_path / "root", *flags)
    assert_exact(resumed)
    assert [job["save_peak_bytes"], job["resume_peak_bytes"]] == promised(saved) + promised(resumed)
    shutil.rmtree(tmp_path / "root")


# ---- plan


def job_of(modicum: Path, moe: Path, *flags: object) -> list[dict[str, Any]]:
    """What `plan` promises of the job, for each node, with the strategy in the flags."""
    plan = run_json(modicum, "plan", moe, *flags)
    name = flags[flags.index("--strategy") + 1] if "--strategy" in flags else "own-shard"
    return [node["job"] for node in strategy_of(plan, str(name))["nodes"]]


def promised(document: dict[str, Any]) -> list[int]:
    """The promised bytes of each node in a document of `save` or `resume`, or in one phase of
    `rehearse`."""
    return [node["promised_bytes"] for node in document["nodes"]]


def assert_promised_job(
    modicum: Path, directory: Path, tmp_path: Path, flags: tuple[object, ...], optimizer: str
) -> None:
    """`save`, `resume` and `rehearse --save` promise what `plan` promises of the job."""
    words = (*flags, "--optimizer", optimizer)
    jobs = job_of(modicum, directory, *words)
    saved = run_json(modicum, "save", directory, tmp_path / "s", "--step", 1, *words)
    assert [job["save_peak_bytes"] for job in jobs] == promised(saved)
    # The step knows its recipe, and which parameters are frozen: they have no saved state.
    known = [flag for flag in ("--frozen", "--recipe") if flag in flags]
    known += [flags[flags.index(flag) + 1] for flag in known]
    resume_flags = [word for word in flags if word not in known]
    resumed = run_json(modicum, "resume", tmp_path / "s", *resume_flags)
    assert [job["resume_peak_bytes"] for job in jobs] == promised(resumed)
    rehearse_flags = (*words, "--steps", 1, "--save", tmp_path / "r")
    rehearsed = run_json(modicum, "rehearse", directory, *rehearse_flags)
    assert [job["peak_bytes"] for job in jobs] == rehearsed["promised_bytes"]
    names = ["load", "step", "save", "resume", "step_resumed"]
    for phase, name in zip(rehearsed["phases"], names, strict=True):
        assert phase["phase"].removesuffix("_1") == name
        planned = [of for job in jobs for of in job["phases"] if of["phase"] == name]
        assert [of["bytes"] for of in planned] == promised(phase), name
        for of in planned:
            assert sum(of["by_purpose"].values()) == of["bytes"]


@pytest.mark.parametrize("state_format", ("fp32", "int8-moments-24"))
@pytest.mark.parametrize("flags", JOBS, ids=text)
def test_plan_promises_the_job(
    modicum: Path, moe: Path, tmp_path: Path, flags: tuple[object, ...], state_format: str
) -> None:
    assert_promised_job(modicum, moe, tmp_path, flags, f"adamw:{state_format}")


def test_plan_promises_the_job_of_a_recipe(modicum: Path, moe: Path, tmp_path: Path) -> None:
    """The recipe renames a tensor and leaves one unused. The step has a recipe of its own."""
    files = moe.glob("*.safetensors")
    names = sorted({name for file in files for name in header_of(file)[0]} - {"__metadata__"})
    targets = {name: stored(name) for name in names[1:-1]} | {"renamed": stored(names[-1])}
    recipe = write_recipe(tmp_path / "r.json", targets, unused=names[:1])
    assert_promised_job(modicum, moe, tmp_path, ("--recipe", recipe), "adamw:fp32")


def test_a_state_that_cannot_be_saved_is_reported(
    modicum: Path, gpt2: Path, tmp_path: Path
) -> None:
    """Flat groups (ZeRO) divide blocks of 8-bit moments between ranks, so that the state cannot be
    saved. The plan then has no job, and a warning names the parameter."""
    words = ("--ranks", 3, "--layout", "zero2", "--optimizer", "adamw:int8-moments")
    refused = failure(modicum, 2, "save", gpt2, tmp_path / "root", "--step", 1, *words)
    plan = run_json(modicum, "plan", gpt2, *words, "--budget", "1TiB")
    assert not [node for row in plan["strategies"] for node in row["nodes"] if "job" in node]
    assert plan["fits"] and "job_fits" not in plan
    (warning,) = [one for one in plan["warnings"] if "a save is not promised" in one]
    assert refused["tensor"] in warning
    assert "step_resumed" not in run(modicum, "plan", gpt2, *words).stdout


def test_a_run_that_trains_nothing_is_reported(modicum: Path, moe: Path, tmp_path: Path) -> None:
    """The run loads, but it has no state that could be saved."""
    words = ("--optimizer", "adamw:fp32", "--frozen", ".")
    run_json(modicum, "load", moe, *words)
    refused = failure(modicum, 2, "save", moe, tmp_path / "root", "--step", 1, *words)
    assert refused["category"] == "UNSUPPORTED" and not (tmp_path / "root").exists()
    plan = run_json(modicum, "plan", moe, *words)
    assert "job" not in strategy_of(plan, "own-shard")["nodes"][0]
    assert any("a save is not promised: UNSUPPORTED" in warning for warning in plan["warnings"])


def test_the_load_keeps_its_own_peak(modicum: Path, moe: Path) -> None:
    """`peak_bytes` and `fits` describe the run of `load`; `job_fits` describes the whole job."""
    flags = ("--staging", "1MiB", "--optimizer", "adamw:fp32")
    (node,) = strategy_of(run_json(modicum, "plan", moe, *flags), "own-shard")["nodes"]
    assert (
        run_json(modicum, "load", moe, *flags)["nodes"][0]["promised_bytes"] == node["peak_bytes"]
    )
    job = node["job"]
    assert node["peak_bytes"] < job["peak_bytes"]
    assert job["peak_bytes"] == max(job["save_peak_bytes"], job["resume_peak_bytes"])
    alone, parts = ({of["phase"]: of["bytes"] for of in at["phases"]} for at in (node, job))
    assert parts["load"] == max(bytes for phase, bytes in alone.items() if phase != "step")
    assert parts["step"] == alone["step"]
    # A resumed run holds the headers and digests of its step until it ends.
    of_step = parts["step_resumed"] - parts["step"]
    assert of_step == parts["resume"] - parts["step"] > 0
    assert parts["save"] == job["save_peak_bytes"]
    for budget, fits in ((job["peak_bytes"], True), (job["peak_bytes"] - 1, False)):
        plan = run_json(modicum, "plan", moe, *flags, "--budget", budget)
        assert (plan["fits"], plan["job_fits"]) == (True, fits)
        shown = run(modicum, "plan", moe, *flags, "--budget", budget).stdout
        assert "step_resumed" in shown and ("too little" in shown) is not fits
    without = run_json(modicum, "plan", moe, "--budget", "1GiB")
    assert "job_fits" not in without and "job" not in strategy_of(without, "own-shard")["nodes"][0]
