"""The verb `step`, optimizer steps on synthetic parameters: keys, exit codes, bytes per parameter
over the process tree, and digests that do not depend on ranks, threads or instruction sets.

Catches: forked children get copies of the state; state is not promised; the budget is checked too
late; a digest, random bits or the gradient norm depend on ranks, threads or the instruction set;
gradients are not scaled; the time of a step is not counted; children outlive a rank.
"""

import itertools
import os
import re
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
from cage import cage, why_no_cage
from program import Ended, failure, run, run_json, tree_of

MIB = 1 << 20
MAX_FIXED_BYTES = 96 * MIB  # `fixed_bytes` of two ranks: the process tree without state
# Bytes held per parameter: bf16 parameter, gradient and state.
FORMATS = {
    "fp32": 16.0,
    "fp32-split": 14.0,
    "bf16-moments": 10.0,
    "int8-moments": 8.0625,
    "int8-moments-24": 7.0625,
}
# Bytes moved per parameter and step, with bf16 gradients.
MOVED = {"fp32": 30.0, "fp32-split": 26.0, "bf16-moments": 18.0}
KEYS = {
    "state_format", "params", "ranks", "steps", "isa", "held_bytes_per_param", "fixed_bytes",
    "bytes_per_param_moved", "params_per_s", "bytes_per_s", "copy_bytes_per_s",
    "speedup_vs_unfused", "state_digest", "master_digest",
}  # fmt: skip


def step(modicum: Path, *words: object) -> dict[str, Any]:
    """Runs `step` without its speed comparisons, which change neither digests nor bytes."""
    return run_json(modicum, "step", "--no-compare", *words)


def digests(document: dict[str, Any]) -> tuple[str, str]:
    return document["state_digest"], document["master_digest"]


# ---- keys


def test_keys_and_figures_agree(modicum: Path) -> None:
    words = ("--params", "3M", "--ranks", 2, "--threads", 1, "--steps", 3)
    document = run_json(modicum, "step", *words, "--grad-dtype", "bfloat16")
    assert set(document) >= KEYS
    assert (document["params"], document["ranks"], document["steps"]) == (3_000_000, 2, 3)
    assert document["bytes_per_param_moved"] == MOVED["fp32"]
    bytes_per_s = document["params_per_s"] * document["bytes_per_param_moved"]
    assert document["bytes_per_s"] == pytest.approx(bytes_per_s)
    assert document["params_per_s"] > 0
    assert document["copy_bytes_per_s"] > 0 and document["speedup_vs_unfused"] > 0
    for name in ("state_digest", "master_digest"):
        assert re.fullmatch(r"[0-9a-f]{16,}", document[name])


def test_no_compare_omits_the_comparisons(modicum: Path) -> None:
    document = step(modicum, "--params", "1M", "--steps", 1)
    assert set(document) >= KEYS
    assert document["copy_bytes_per_s"] is None and document["speedup_vs_unfused"] is None
    assert document["params_per_s"] > 0, "one step is enough for a rate"


def test_text_fits_a_screen(modicum: Path) -> None:
    done = run(modicum, "step", "--params", "1M", "--clip", 1, "--loss-scale")
    assert done.code == 0, done.stderr
    assert max(map(len, done.stdout.splitlines())) <= 100
    assert "bytes per parameter" in done.stdout and "master digest" in done.stdout


def test_help_lists_formats_and_instruction_sets(modicum: Path) -> None:
    text = run(modicum, "step", "--help").stdout
    assert all(name in text for name in FORMATS)
    assert step(modicum, "--params", "1K", "--steps", 1)["isa"] in text


@pytest.mark.parametrize(
    "words",
    [
        ("--state-format", "fp32split"),
        ("--isa", "avx9"),
        ("--params", "0"),
        ("--clip", "0"),
        ("--clip", "nan"),
        ("--loss-scale", "x"),
        ("--grad-dtype", "float64"),
        ("--steps", "0"),
        ("--fork-child", "1"),
        ("--seed", "-1"),
        ("--seed", "18446744073709551616"),
        ("--seed", "1.5"),
    ],
)
def test_invalid_flags_are_usage_errors(modicum: Path, words: tuple[str, ...]) -> None:
    assert failure(modicum, 2, "step", *words)["category"] == "USAGE"


def test_a_loss_scale_that_is_no_number_is_named(modicum: Path) -> None:
    assert failure(modicum, 2, "step", "--loss-scale", "x")["got"] == "x"


# ---- bytes


@pytest.mark.parametrize("name", FORMATS)
def test_bytes_per_parameter_with_children(modicum: Path, name: str) -> None:
    """No page of the state is copied for the children of the two ranks: each forks two, which live
    until the last step, and two more during the middle step."""
    params = 12_000_000
    words = ("--params", params, "--state-format", name, "--ranks", 2, "--threads", 1)
    document = step(modicum, *words, "--steps", 5, "--fork-children", 2)
    held = document["held_bytes_per_param"]
    for when in ("step_1", "last_step"):
        assert held[when]["ledger"] == pytest.approx(FORMATS[name], rel=0.002)
        assert held[when]["kernel"] >= 0.99 * FORMATS[name], "the whole process tree is measured"
        # A copied plane (a moment, or half of the masters) would be 12 MB or more.
        assert held[when]["kernel"] * params <= FORMATS[name] * params * 1.005 + 4 * MIB
    assert held["last_step"]["ledger"] == held["step_1"]["ledger"]
    growth = (held["last_step"]["kernel"] - held["step_1"]["kernel"]) * params
    assert growth <= 2 * MIB, "later steps hold more than the first one"
    assert document["fixed_bytes"] <= MAX_FIXED_BYTES
    kernel = document["fixed_bytes"] + held["last_step"]["kernel"] * params
    assert kernel <= document["promised_bytes"]
    assert document["promised_bytes"] - kernel <= 0.03 * kernel + (2 * 2 + 8) * MIB


def test_the_fixed_part_does_not_grow(modicum: Path) -> None:
    fixed = [
        run_json(modicum, "step", "--params", params, "--ranks", 2, "--steps", 1)["fixed_bytes"]
        for params in ("1M", "16M")
    ]
    assert abs(fixed[1] - fixed[0]) <= MIB, "the speed comparisons still hold memory"


def test_the_memory_of_the_copy_is_limited_by_the_budget(modicum: Path) -> None:
    """The copy measures the machine's bandwidth; a smaller budget makes its blocks smaller."""
    words = ("step", "--params", "8M", "--ranks", 2, "--threads", 1, "--steps", 1)
    promised = run_json(modicum, *words)["promised_bytes"]
    assert promised > 2 * 2 * 256 * MIB, "each of two ranks copies 256 MiB to 256 MiB"
    for budget in (promised * 99 // 100, 400 * MIB):
        document = run_json(modicum, *words, "--budget", budget)
        assert budget * 0.99 < document["promised_bytes"] <= budget
        assert document["copy_bytes_per_s"] > 0


@pytest.mark.parametrize("flags", [(), ("--no-compare",)])
@pytest.mark.parametrize("name", ["fp32", "int8-moments-24"])
def test_one_percent_below_the_promise_is_refused(
    modicum: Path, name: str, flags: tuple[str, ...]
) -> None:
    words = ("step", "--params", "8M", "--state-format", name, "--ranks", 2, "--steps", 1, *flags)
    promised = failure(modicum, 15, *words, "--budget", MIB)["got"]
    assert run_json(modicum, *words, "--budget", promised)["promised_bytes"] == promised
    error = failure(modicum, 15, *words, "--budget", promised * 99 // 100)
    assert error["category"] == "BUDGET"
    assert error["got"] == promised
    assert error["shortfall_bytes"] == promised - promised * 99 // 100
    assert {owner["purpose"] for owner in error["owners"]} >= {"master", "grad", "moments"}


def in_cage(limit_bytes: int, modicum: Path, *words: object) -> tuple[Ended, int]:
    """Runs `step` in a memory cgroup. Returns its result and the cgroup's peak."""
    with cage(limit_bytes) as inside:
        process = inside.start(modicum, "step", "--json", *words)
        out, err = process.communicate(timeout=60)
        return Ended(process.returncode, out, err), inside.peak_bytes()


def test_steps_with_children_pass_in_a_cgroup_of_the_promise(modicum: Path) -> None:
    """The limit is the promise + 5 %. At 98 % of the promise the run is refused, and needs less
    than 32 MiB for that."""
    if reason := why_no_cage():
        pytest.skip(reason)
    words = ("--params", "20M", "--ranks", 2, "--steps", 4, "--fork-children", 2)
    promised = step(modicum, *words)["promised_bytes"]
    done, _ = in_cage(promised * 105 // 100, modicum, *words)
    assert done.code == 0, done.stderr
    assert done.json["budget"]["source"].startswith("cgroup")
    done, peak = in_cage(promised * 98 // 100, modicum, *words)
    assert done.code == 15, done.stderr
    assert peak <= 32 * MIB


# ---- a rank that dies


def named(pids: list[int], name: str) -> list[int]:
    """The processes of this name."""
    return [pid for pid in pids if Path(f"/proc/{pid}/comm").read_text().strip() == name]


def is_alive(pid: int) -> bool:
    """Whether a process exists and is not a zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def test_a_killed_rank_is_named_and_its_children_end(modicum: Path) -> None:
    words = ("step", "--params", "1M", "--ranks", 2, "--steps", 10**6, "--fork-children", 1)
    process = subprocess.Popen(
        [str(modicum), *map(str, words), "--no-compare", "--json"],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        deadline = time.monotonic() + 120
        while len(named(tree := tree_of(process.pid), "modicum-child")) < 2:
            assert time.monotonic() < deadline, "each of two ranks should have forked a child"
            time.sleep(0.02)
        (victim,) = named(tree, "modicum-rank-1")
        os.kill(victim, signal.SIGKILL)
        out, err = process.communicate(timeout=120)
    finally:
        process.kill()
    error = Ended(process.returncode, out, err).error
    assert process.returncode == 17, err
    assert (error["culprit_rank"], error["culprit_pid"]) == (1, victim)
    assert not any(map(is_alive, tree))


# ---- bits


@pytest.fixture(scope="module")
def instruction_sets(modicum: Path) -> list[str]:
    """The instruction sets that `--help` lists and this machine supports."""
    text = run(modicum, "step", "--help").stdout
    (line,) = [line for line in text.splitlines() if "--isa" in line]
    return line.split("NAME", 1)[1].split(";", 1)[0].replace(",", " ").split()


@pytest.mark.parametrize("name", FORMATS)
def test_digests_do_not_depend_on_ranks_threads_or_instruction_sets(
    modicum: Path, name: str, instruction_sets: list[str]
) -> None:
    words = ("--params", 600_001, "--state-format", name, "--steps", 3, "--clip", 1)
    first = step(modicum, *words, "--ranks", 1, "--threads", 1)
    for ranks, threads in ((2, 1), (3, 2), (1, 4)):
        other = step(modicum, *words, "--ranks", ranks, "--threads", threads)
        assert digests(other) == digests(first), (ranks, threads)
    for isa in instruction_sets:
        other = step(modicum, *words, "--isa", isa)
        assert other["isa"] == isa
        assert digests(other) == digests(first), isa
    assert digests(step(modicum, *words, "--seed", 6)) != digests(first)
    assert not set(first["isas_not_run"]) & set(instruction_sets)


def test_the_exact_formats_agree_on_bf16_gradients(modicum: Path) -> None:
    words = ("--params", "500K", "--steps", 20, "--grad-dtype", "bfloat16", "--clip", 1)
    whole = step(modicum, *words, "--state-format", "fp32")
    split = step(modicum, *words, "--state-format", "fp32-split", "--ranks", 2)
    assert digests(whole) == digests(split)
    # The default: fp32 gradients.
    unrounded = step(modicum, "--params", "500K", "--steps", 20, "--clip", 1)
    assert digests(unrounded) != digests(whole)


@pytest.mark.soak
def test_the_exact_formats_agree_over_a_thousand_steps(
    modicum: Path, instruction_sets: list[str]
) -> None:
    """The digests agree for every number of ranks and threads, on every instruction set."""
    words = ("--params", 50_001, "--steps", 1000, "--grad-dtype", "bfloat16", "--clip", 1)
    cases = itertools.product(("fp32", "fp32-split"), instruction_sets, (1, 2, 3), (1, 2, 4))
    seen = {
        digests(
            step(
                modicum, *words, "--state-format", name, "--isa", isa, "--ranks", ranks,
                "--threads", threads,
            )
        )
        for name, isa, ranks, threads in cases
    }  # fmt: skip
    assert len(seen) == 1


# ---- loss scale and clipping


def test_a_power_of_two_as_loss_scale_changes_no_bit(modicum: Path) -> None:
    words = ("--params", "200K", "--steps", 3, "--clip", 1)
    plain = step(modicum, *words)
    scaled = step(modicum, *words, "--loss-scale", 1024)
    assert digests(scaled) == digests(plain)
    assert scaled["grad_norm"] == pytest.approx(plain["grad_norm"], rel=1e-12)
    assert (scaled["loss_scale"], scaled["skipped_steps"]) == (1024, 0)


def test_an_overflow_is_skipped_and_halves_the_scale(modicum: Path) -> None:
    """In float16, 65536 times a gradient near 1 is infinite."""
    words = ("--params", "200K", "--grad-dtype", "float16", "--loss-scale")
    one = step(modicum, *words, "--steps", 1)
    assert (one["skipped_steps"], one["loss_scale"]) == (1, 32768)
    assert one["grad_norm"] is None and one["params_per_s"] == 0
    initial = digests(one)
    two = step(modicum, *words, "--steps", 2)
    assert (two["skipped_steps"], two["loss_scale"]) == (1, 32768)
    assert digests(two) != initial
    again = step(modicum, *words, 2.0**100, "--steps", 1)
    assert again["skipped_steps"] == 1
    assert digests(again) == initial, "a skipped step changed the parameters or the state"


def test_clipping_scales_to_the_given_norm(modicum: Path) -> None:
    words = ("--params", "200K", "--steps", 1)
    free = step(modicum, *words)
    assert digests(step(modicum, *words, "--clip", free["grad_norm"] * 2)) == digests(free)
    assert digests(step(modicum, *words, "--clip", free["grad_norm"] / 2)) != digests(free)
