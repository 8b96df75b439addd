"""Output that cannot be written is an error, and no file takes the number of a closed descriptor.
Refusals, help and exit codes are tested in modicum/cli/command_line_test.cc.

Catches: lost output ends with exit code 0; output goes into a file that was opened under the number
of a closed descriptor.
"""

import json
import os
import resource
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from program import run_json


@pytest.fixture(scope="module")
def moe(modicum: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("command") / "moe"
    run_json(modicum, "synth", directory, "--arch", "tiny-moe")
    return directory


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


# ---- ranks


def test_more_ranks_than_usual_start_if_asked(modicum: Path, moe: Path) -> None:
    ranks = 16 * len(os.sched_getaffinity(0)) + 1
    loaded = run_json(modicum, "load", moe, "--ranks", ranks, "--oversubscribe")
    assert len({rank["pid"] for rank in loaded["ranks"]}) == ranks
