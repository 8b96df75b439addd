"""A flag that would do nothing is refused, output that cannot be written is an error, and the
refusal of a plan that does not fit names alternatives that do.

Must fail for these mutants: an empty value counts as an absent flag; a regular expression that
matches no tensor is accepted; a number is parsed as octal; a plan that does not fit, or lost
output, ends with exit code 0; a suggested alternative does not fit; output goes into a file that
was opened under the number of a closed descriptor; more ranks than the machine can start are
accepted, or a target without a name; a table is wider than a terminal; synth shows no progress.
"""

import json
import os
import re
import resource
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from program import (
    STRATEGIES,
    failure,
    node_peak,
    run,
    run_json,
    stored,
    strategy_of,
    write_recipe,
)


@pytest.fixture(scope="module")
def moe(modicum: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("command") / "moe"
    run_json(modicum, "synth", directory, "--arch", "tiny-moe")
    return directory


@pytest.fixture(scope="module")
def dense(modicum: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("command") / "dense"
    run_json(modicum, "synth", directory, "--arch", "gpt2", "--layers", 1, "--sparse")
    return directory


def flags_with_values(modicum: Path, verb: str) -> Iterator[str]:
    """The flags of a verb that take a value, parsed from its help."""
    for line in run(modicum, verb, "--help").stdout.splitlines():
        words = line.replace(",", " ").split()
        flags = [word for word in words if word.startswith("--")]
        takes = {"TEXT", "INT", "UINT", "FLOAT"} & {word.split(":")[0] for word in words}
        if line.startswith("  -") and flags and takes:
            yield flags[0]


@pytest.mark.parametrize(
    "verb",
    (
        "inspect",
        "synth",
        "plan",
        "load",
        "rehearse",
        "save",
        "resume",
        "verify",
        "convert",
        "step",
        "doctor",
    ),
)
def test_empty_values_are_refused(modicum: Path, moe: Path, verb: str) -> None:
    flags = list(flags_with_values(modicum, verb))
    assert {"--budget", "--progress", "--threads"} <= set(flags)
    directory = () if verb in ("step", "doctor") else (moe,)
    for flag in flags:
        for words in ((flag, ""), (f"{flag}=",)):
            error = failure(modicum, 2, verb, *directory, *words)
            assert error["category"] == "USAGE"
            assert flag in error["message"], error["message"]
    if directory:
        assert failure(modicum, 2, verb, "")["category"] == "USAGE"


TP = ("--layout", "tp-fsdp", "--mesh", "1x2", "--ranks", 2)


@pytest.mark.parametrize(
    "words",
    [
        (*TP, "--tp-rowwise", "nomatch"),
        (*TP, "--tp-packed", "nomatch"),
        (*TP, "--tp-replicate", "nomatch"),
        (*TP, "--tp-rowwise", "attn", "--tp-replicate", "nomatch"),
        ("--keep-fp32", "nomatch"),
        ("--keep-fp32", "nomatch", "--dtype", "bfloat16"),
        ("--ranks", 2, "--expert-mesh", "1x2"),
        ("--ranks", 2, "--expert-mesh", "1x2", "--experts", "nomatch"),
        ("--experts", "attn"),
        ("--layout", "none", "--shard-dim", 1),
        ("--layout", "zero1", "--shard-dim", 1),
        ("--layout", "zero3", "--shard-dim", 1),
        ("--layout", "fsdp2", "--mesh", "1x1"),
        ("--layout", "fsdp2", "--tp-rowwise", "attn"),
        ("--layout", "fsdp2", "--round-robin"),
        ("--optimizer", "adamw:fp32", "--frozen", "nomatch"),
        ("--frozen", "attn"),
        ("--layout", "zero3", "--round-robin"),
        ("--layout", "zero1", "--expert-mesh", "1x1"),
    ],
)
def test_flags_that_would_do_nothing_are_refused(
    modicum: Path, dense: Path, words: tuple[object, ...]
) -> None:
    flags = [str(word) for word in words if str(word).startswith("--")]
    for verb in ("plan", "load"):
        message = failure(modicum, 2, verb, dense, *words)["message"]
        assert any(flag in message for flag in flags), message
        assert "nomatch" in message or "nomatch" not in words


def test_flags_of_deepspeeds_forecast_need_its_config(modicum: Path, dense: Path) -> None:
    for words in (("--workers", 2), ("--persistent-workers",)):
        assert words[0] in failure(modicum, 2, "plan", dense, *words)["message"]


def test_regular_expressions_that_match_are_accepted(modicum: Path, dense: Path, moe: Path) -> None:
    run_json(modicum, "plan", dense, *TP, "--tp-rowwise", "c_proj", "--keep-fp32", "ln_f")
    run_json(modicum, "plan", moe, "--ranks", 2, "--expert-mesh", "1x2")


def test_numbers_are_decimal(modicum: Path, moe: Path) -> None:
    assert run_json(modicum, "plan", moe, "--ranks", "010")["ranks"] == 10
    for flag in ("--ranks", "--ranks-per-node", "--threads", "--shard-dim"):
        for value in ("0x10", "1e1", "2.0", "two", "1_0"):
            assert flag in failure(modicum, 2, "plan", moe, flag, value)["message"]
    for words in (("--clip", "0x10"), ("--seed", "0x10"), ("--seed", "-1"), ("--params", "0x10")):
        failure(modicum, 2, "step", *words)
    for value in ("12abc", "0x10", "nan", "-1"):
        failure(modicum, 2, "step", f"--loss-scale={value}")


def test_short_names_of_dtypes_mean_torchs_names(modicum: Path, moe: Path) -> None:
    for short, name in (("fp32", "float32"), ("bf16", "bfloat16"), ("fp16", "float16")):
        as_short = run_json(modicum, "plan", moe, "--dtype", short)
        assert as_short == run_json(modicum, "plan", moe, "--dtype", name)


# ---- a plan that does not fit


def refused(modicum: Path, *words: object) -> dict[str, Any]:
    """The JSON of a plan that does not fit (exit code 15)."""
    done = run(modicum, "plan", *words, "--json")
    assert done.code == 15, (words, done.code, done.stderr)
    assert "BUDGET" in done.stderr
    return done.json


ALTERNATIVE_KEYS = {
    "strategy",
    "staging_bytes",
    "state_format",
    "ranks_per_node",
    "peak_bytes",
    "flags",
}
# Flags of plans that are then refused for their budget.
ASKED = [
    ("--strategy", "full-per-rank"),
    ("--strategy", "rank0-broadcast", "--staging", "8MiB"),
    ("--optimizer", "adamw:fp32"),
    ("--ranks-per-node", 2, "--dtype", "float32"),
    ("--layout", "hsdp", "--mesh", "2x2", "--optimizer", "adamw:bf16-moments"),
]


@pytest.mark.parametrize("asked", ASKED)
def test_suggested_alternatives_fit(modicum: Path, dense: Path, asked: tuple[object, ...]) -> None:
    """With the flags of an alternative `plan` fits and promises its bytes (tested for the first
    six), and `load` promises the same (tested for the first)."""
    words = (dense, "--ranks", 4, *asked)
    strategy = asked[asked.index("--strategy") + 1] if "--strategy" in asked else "own-shard"
    # Default staging shrinks to 1 MiB before a plan is refused.
    smallest = () if "--staging" in asked else ("--staging", "1MiB")
    least = node_peak(run_json(modicum, "plan", *words, *smallest), strategy)
    seen = 0
    for budget in (least - 1, least * 3 // 4):
        document = refused(modicum, *words, "--budget", budget)
        assert document["fits"] is False
        assert document["shortfall_bytes"] == least - budget
        assert node_peak(document, strategy) == least
        error = failure(modicum, 15, "load", *words, "--budget", budget)
        assert error["shortfall_bytes"] == least - budget
        for one in document["would_fit"][:6]:
            assert set(one) >= ALTERNATIVE_KEYS
            assert one["peak_bytes"] <= budget
            given = ("--ranks", 4, *asked)
            for flags in (flags_of_values(asked, one), changed(given, one["flags"])):
                planned = run_json(modicum, "plan", dense, *flags, "--budget", budget)
                assert planned["fits"] is True
                assert node_peak(planned, str(one["strategy"])) == one["peak_bytes"]
            seen += 1
        if document["would_fit"]:
            flags = flags_of_values(asked, document["would_fit"][0])
            loaded = run_json(modicum, "load", dense, *flags, "--budget", budget)
            promised = max(node["peak_bytes"] for node in loaded["nodes"])
            assert promised == document["would_fit"][0]["peak_bytes"]
    assert seen > 0


def changed(asked: tuple[object, ...], flags: str) -> list[object]:
    """`asked` with the values of `flags` replaced or added."""
    words = flags.split()
    result = list(asked)
    for flag, value in zip(words[::2], words[1::2], strict=True):
        if flag in result:
            result[result.index(flag) + 1] = value
        else:
            result += [flag, value]
    return result


def flags_of_values(asked: tuple[object, ...], one: dict[str, Any]) -> list[object]:
    """The requested flags, changed to the values of an alternative: its `strategy`,
    `staging_bytes`, `ranks_per_node` and `state_format`, but not its `flags`."""
    flags = f"--strategy {one['strategy']} --staging {one['staging_bytes']}"
    flags += f" --ranks-per-node {one['ranks_per_node']}"
    if one["state_format"] is not None:
        flags += f" --optimizer adamw:{one['state_format']}"
    return changed(("--ranks", 4, *asked), flags)


def test_alternatives_change_as_little_as_possible(modicum: Path, dense: Path) -> None:
    words = (dense, "--ranks", 4, "--strategy", "full-per-rank")
    planned = run_json(modicum, "plan", *words)
    budget = node_peak(planned, "own-shard")
    found = refused(modicum, *words, "--budget", budget)["would_fit"]
    assert "own-shard" in {one["strategy"] for one in found}
    for one in found:  # changes the strategy or the ranks per node, not both
        differs = (one["strategy"] != "full-per-rank") + (one["ranks_per_node"] != 4)
        assert differs == 1, one


def test_a_budget_that_nothing_fits_has_no_alternatives(modicum: Path, moe: Path) -> None:
    document = refused(modicum, moe, "--ranks", 2, "--optimizer", "adamw:fp32", "--budget", 5)
    assert document["would_fit"] == []
    assert {row["name"] for row in document["strategies"]} == set(STRATEGIES)
    assert strategy_of(document, "own-shard")["nodes"]


def test_the_text_of_a_plan_that_does_not_fit_names_an_alternative(
    modicum: Path, moe: Path
) -> None:
    words = ("plan", moe, "--ranks", 2, "--strategy", "own-shard", "--staging", "32MiB")
    done = run(modicum, *words, "--budget", "24MiB")
    assert done.code == 15
    assert "does not fit" in done.stdout and "too little" in done.stdout
    assert "would fit: --staging " in done.stdout
    quiet = run(modicum, *words, "--budget", "24MiB", "-q")
    assert (quiet.code, quiet.stdout) == (15, "")
    assert quiet.stderr.startswith("modicum: BUDGET")
    assert run(modicum, *words, "--budget", "none").code == 0


# ---- output


def commands_that_succeed(moe: Path, tmp_path: Path) -> Iterator[tuple[object, ...]]:
    yield ("--help",)
    yield ("--version",)
    yield ("plan", "--help")
    for how in ((), ("--json",)):
        yield ("inspect", moe, *how)
        yield ("plan", moe, *how)
        yield ("load", moe, "--ranks", 2, *how)
        yield ("rehearse", moe, "--optimizer", "adamw:fp32", "--steps", 1, *how)
        yield ("save", moe, tmp_path / f"root{len(how)}", "--step", 1, *how)
        yield ("step", "--params", "10K", "--steps", 1, "--no-compare", *how)
        yield ("doctor", *how)
        yield ("synth", tmp_path / f"out{len(how)}", "--arch", "tiny-moe", *how)


def shell(modicum: Path, redirection: str, *words: object) -> int:
    """Runs the program in a shell with a redirection, such as ">/dev/full". Returns its exit
    code."""
    command = f'exec "$0" "$@" {redirection}'
    return subprocess.run(["bash", "-c", command, modicum, *map(str, words)], timeout=60).returncode


def test_lost_output_is_an_error(modicum: Path, moe: Path, tmp_path: Path) -> None:
    for n, redirection in enumerate((">/dev/full 2>/dev/null", ">&- 2>/dev/null")):
        (tmp_path / str(n)).mkdir()
        for words in commands_that_succeed(moe, tmp_path / str(n)):
            assert shell(modicum, redirection, *words) == 13, (redirection, words)
    # A refusal keeps its exit code (2), even if its output is lost.
    assert shell(modicum, ">/dev/full 2>/dev/null", "plan", moe, "--rank") == 2


def test_a_pipe_without_a_reader_is_an_error(modicum: Path, moe: Path) -> None:
    read, write = os.pipe()
    os.close(read)
    words = [modicum, "inspect", moe, "--json"]
    done = subprocess.run(words, stdout=write, stderr=subprocess.PIPE, timeout=60)
    assert done.returncode == 13, done.stderr
    # The exit code of the missing directory, although the error has no reader.
    done = subprocess.run([modicum, "plan", "nowhere"], stderr=write, timeout=60)
    assert done.returncode == 13
    os.close(write)


def test_lost_stderr_does_not_change_the_exit_code(
    modicum: Path, moe: Path, tmp_path: Path
) -> None:
    for redirection in ("2>/dev/full", "2>&-"):
        quiet = f"{redirection} >/dev/null"
        load = ("load", moe, "--ranks", 2, "--progress", "plain")
        assert shell(modicum, quiet, *load) == 0
        assert shell(modicum, quiet, "load", moe, "--progress", "plain", "--budget", 5) == 15
        assert shell(modicum, quiet, "plan", tmp_path / "nowhere") == 13
        assert shell(modicum, quiet, "lod") == 2


def test_a_plan_from_config_json_alone_is_refused(modicum: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    error = failure(modicum, 13, "plan", tmp_path)
    assert "config.json does not" in error["expected"]
    assert "modicum synth" in error["expected"]


def test_a_name_that_is_not_cached_is_refused(modicum: Path) -> None:
    error = failure(modicum, 13, "plan", "organisation/no-such-model")
    assert "ORG/NAME that hf download has put into " in error["expected"]
    assert error["got"] == "organisation/no-such-model"


def test_a_target_without_a_name_is_refused(modicum: Path, dense: Path, tmp_path: Path) -> None:
    names = [t["name"] for t in run_json(modicum, "inspect", dense)["tensors"]]
    recipe = write_recipe(tmp_path / "r.json", {"": stored(names[0])}, names[1:])
    for verb in ("plan", "load"):
        error = failure(modicum, 2, verb, dense, "--recipe", recipe)
        assert error["category"] == "MISMATCH" and error["file"] == "r.json"


def test_auto_in_a_ds_config_names_what_resolves_it(
    modicum: Path, dense: Path, tmp_path: Path
) -> None:
    config = tmp_path / "ds_config.json"
    config.write_text('{"train_batch_size": "auto", "bf16": {"enabled": "auto"}}')
    error = failure(modicum, 2, "plan", dense, "--deepspeed", config)
    assert "'gradient_accumulation_steps'" in error["message"]
    assert error["got"].startswith('bf16.enabled: "auto", gradient_accumulation_steps: none')
    assert "modicum.torch.deepspeed.config_of(arguments)" in error["expected"]


TABLE_COLUMNS = 120


@pytest.mark.parametrize(
    "words",
    [
        ("plan", "--ranks", 64, "--ranks-per-node", 8, "--optimizer", "adamw:int8-moments-24"),
        ("plan", "--ranks", 256, "--baseline", "1000GiB", "--staging", "1000GiB"),
        ("plan", "--baseline", "1000MiB", "--staging", "1000MiB"),
        ("plan", "--ranks", 8, "--budget", 5),
        ("load", "--ranks", 2, "--strategy", "replica-striped", "--check", "values", "--digest"),
        ("load", "--optimizer", "adamw:int8-moments-24", "--strategy", "rank0-broadcast"),
    ],
    ids=lambda words: " ".join(map(str, words)),
)
def test_text_fits_a_terminal(modicum: Path, moe: Path, words: tuple[Any, ...]) -> None:
    """No line of a table is longer than 120 columns, even with the longest names and figures."""
    verb, *flags = words
    text = run(modicum, verb, moe, *flags).stdout
    assert len(text.splitlines()) > 5
    assert [line for line in text.splitlines() if len(line) > TABLE_COLUMNS] == []


def test_synth_shows_its_progress(modicum: Path, tmp_path: Path) -> None:
    words = ("synth", tmp_path / "m", "--arch", "gpt2", "--layers", 1, "--threads", 1)
    done = run(modicum, *words, "--progress", "plain", "--shard-size", "50MB")
    assert done.code == 0 and len(list((tmp_path / "m").glob("*.safetensors"))) > 1
    shown = re.findall(r"^(.*) of (.*), .*/s, \d+ s left$", done.stderr, re.M)
    assert shown, done.stderr
    ((first, total), *_) = shown
    assert first == "4.00 MiB"
    assert f"{total} in " in done.stdout
    assert run(modicum, *words[:1], tmp_path / "n", *words[2:]).stderr == ""


def test_progress_has_a_rate_only_after_the_first_bytes(modicum: Path, moe: Path) -> None:
    words = [modicum, "load", moe, "--ranks", "2", "--check", "values", "--progress", "plain"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    amount = r"[\d.]+ [KMGT]?i?B"
    form = rf"{amount} of {amount}(, finishing|, {amount}/s, \d+ s left)?"
    lines = done.stderr.splitlines()
    assert lines
    assert all(re.fullmatch(form, line) and " 0 B/s" not in line for line in lines), lines


def test_closed_descriptors_are_not_reused_by_files(
    modicum: Path, moe: Path, tmp_path: Path
) -> None:
    """A file that is opened while descriptor 1 is closed would become descriptor 1, and the
    program's output would go into it."""
    right = tmp_path / "right"
    run_json(modicum, "load", moe, "--ranks", 2, "--dump", right, "--progress", "plain")
    words = ("load", moe, "--ranks", 2, "--progress", "plain")
    for n, closed in enumerate(("<&-", ">&-", "2>&-", "<&- >&- 2>&-")):
        out = tmp_path / f"dump{n}"
        shell(modicum, closed, *words, "--dump", out)
        if out.exists():
            for file in sorted(right.iterdir()):
                assert (out / file.name).read_bytes() == file.read_bytes(), closed
        made = tmp_path / f"synth{n}"
        shell(modicum, closed, "synth", made, "--arch", "tiny-moe", "--json")
        for file in moe.iterdir():
            assert (made / file.name).read_bytes() == file.read_bytes(), closed


def limit_file_sizes() -> None:
    """Called in the child: no file may grow over 4 KiB."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))


def test_a_file_that_may_not_grow_is_removed(modicum: Path, moe: Path, tmp_path: Path) -> None:
    """The kernel sends SIGXFSZ, which must not kill the program."""
    out = tmp_path / "out"
    for words in (("load", moe, "--ranks", 2, "--dump", out), ("synth", out, "--arch", "tiny-moe")):
        done = subprocess.run(
            [modicum, *map(str, words), "--json"],
            capture_output=True,
            text=True,
            timeout=60,
            preexec_fn=limit_file_sizes,
        )
        assert done.returncode == 13, (words, done.returncode, done.stderr)
        assert "EFBIG" in json.loads(done.stdout)["error"]["message"]
        assert not out.exists(), list(out.iterdir())


# ---- ranks and digests


def test_too_many_ranks_for_the_machine_are_refused(modicum: Path, moe: Path) -> None:
    most = 16 * len(os.sched_getaffinity(0))
    rehearse = ("rehearse", moe, "--optimizer", "adamw:fp32")
    step = ("step", "--params", "10K", "--no-compare")
    for words in (("load", moe), ("save", moe, "root", "--step", 1), rehearse, step):
        error = failure(modicum, 2, *words, "--ranks", most + 1)
        assert error["category"] == "USAGE" and "--oversubscribe" in error["message"]
    assert run_json(modicum, "plan", moe, "--ranks", most + 1)["ranks"] == most + 1
    over = ("--ranks", most + 1, "--oversubscribe")
    assert len(run_json(modicum, "load", moe, *over)["ranks"]) == most + 1


def test_only_the_expected_digest_passes(modicum: Path, moe: Path) -> None:
    digest = run_json(modicum, "load", moe, "--digest")["digest"]
    assert run_json(modicum, "load", moe, "--expect-digest", digest)["digest"] == digest
    other = f"{int(digest, 16) ^ 1:016x}"
    error = failure(modicum, 12, "load", moe, "--ranks", 2, "--expect-digest", other)
    assert error["category"] == "INTEGRITY"
    assert (error["expected"], error["got"]) == (other, digest)
    for wrong in (digest[1:], "x" * 16):
        failure(modicum, 2, "load", moe, "--expect-digest", wrong)
