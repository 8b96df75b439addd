"""Owners of work in flight: saves in one root, and conversions to one output, by processes that
run at the same time, in containers with one host name, or have been killed.

The stress tests run 5 rounds here, and 200 rounds as soak tests:

    pytest tests/cli/test_owners.py -m soak [--modicum build/release/modicum]

Catches: an owner is judged by its pid or by its host's name; an owner's lock is not asked; an
output is searched before the lock is taken; a lock or an owner's file stays.
"""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from program import PATIENCE_S, Ended, failure, run, run_json, tree_of

LONG = ("--optimizer", "adamw:fp32", "--steps", 1_000_000)
"""Flags of a save that is in flight until it is killed."""
DELAY_MS = 150
ROUNDS = [5, pytest.param(200, marks=pytest.mark.soak)]


@pytest.fixture(scope="module")
def moe(modicum: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small MoE in several files."""
    directory = tmp_path_factory.mktemp("owners") / "moe"
    run_json(modicum, "synth", directory, "--arch", "tiny-moe", "--shard-size", 800)
    return directory


def names_in(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def start(program: Path, *words: object, inside: tuple[str, ...] = ()) -> subprocess.Popen[str]:
    """Starts the program, perhaps `inside` another one."""
    command = [*inside, str(program), *map(str, words), "--json"]
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )


def end_of(process: subprocess.Popen[str]) -> Ended:
    stdout, stderr = process.communicate(timeout=PATIENCE_S)
    return Ended(process.returncode, stdout, stderr)


@contextlib.contextmanager
def living(
    root: Path, program: Path, *words: object, inside: tuple[str, ...] = (), owner: str
) -> Iterator[subprocess.Popen[str]]:
    """The program while it owns something: the pattern `owner` is found below `root`. It is killed
    at the end of the block, with its ranks and the container in which it runs."""
    process = start(program, *words, inside=inside)
    try:
        deadline = time.monotonic() + PATIENCE_S
        while not list(root.glob(owner)):
            assert process.poll() is None, process.communicate()
            assert time.monotonic() < deadline
            time.sleep(0.001)
        yield process
    finally:
        for pid in reversed(tree_of(process.pid)):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        process.communicate()
        time.sleep(0.3)  # until the ranks of a killed launcher have ended, too


@pytest.fixture(scope="module")
def container() -> tuple[str, ...]:
    """A command that runs a program in a container with this host's name: with namespaces of pids
    and of users, or at least of pids."""
    for flags in ("-rpfu", "-pfu"):
        inside = ("unshare", flags, "--mount-proc", "--kill-child")
        with contextlib.suppress(FileNotFoundError):
            if subprocess.run([*inside, "true"], capture_output=True).returncode == 0:
                return inside
    pytest.skip("unshare is not there, or is refused: no test with two containers on this machine")


# ---- saves


def test_a_living_save_of_another_container_stays(
    modicum: Path, moe: Path, tmp_path: Path, container: tuple[str, ...]
) -> None:
    """Host name and boot id are equal, and its pid means nothing here. Once killed it is removed by
    a third container."""
    root = tmp_path / "root"
    words = ("save", moe, root, "--step")
    with living(
        root, modicum, *words, 1, *LONG, inside=container, owner=".partial-*/optimizer"
    ) as other:
        (partial,) = root.glob(".partial-*")
        before = names_in(partial)
        saved = end_of(start(modicum, *words, 2, inside=container)).json
        assert saved["warnings"] == [f"{partial.name} of another save is left over or in flight"]
        saved = run_json(modicum, *words, 3, "--keep", 1)  # from outside of all containers
        assert saved["warnings"] == [f"{partial.name} of another save is left over or in flight"]
        assert other.poll() is None and names_in(partial) == before
    assert partial.exists()
    assert end_of(start(modicum, *words, 4, inside=container)).json["warnings"] == []
    assert names_in(root) == ["latest", "step-3", "step-4"]


def test_a_save_whose_owner_cannot_be_asked_stays(modicum: Path, moe: Path, tmp_path: Path) -> None:
    """As when another user's file can't be read."""
    root = tmp_path / "root"
    with living(root, modicum, "save", moe, root, "--step", 1, *LONG, owner=".partial-*/optimizer"):
        (partial,) = root.glob(".partial-*")
    (partial / ".owner").unlink()
    (partial / ".owner").mkdir()  # root can't read it as a file either
    saved = run_json(modicum, "save", moe, root, "--step", 2)
    assert saved["warnings"] == [f"{partial.name} of another save is left over or in flight"]
    assert partial.exists()


def test_what_a_reboot_left_over_is_removed(modicum: Path, moe: Path, tmp_path: Path) -> None:
    """With another boot id: a checkpoint in flight with its owner's file, one that modicum 0.1
    left, and a new `latest`."""
    root = tmp_path / "root"
    words = ("save", moe, root, "--step")
    with living(root, modicum, *words, 1, *LONG, owner=".partial-*/optimizer"):
        (partial,) = root.glob(".partial-*")
    record = json.loads((partial / ".owner").read_text())
    host, boot, began = record["host"].rsplit(".", 2)
    record["host"] = f"{host}.{boot[::-1]}.{began}"
    (partial / ".owner").write_text(json.dumps(record))
    tail = f"{record['host']}-{os.getpid()}-1-{'0' * 32}"
    (root / f".partial-5-{tail}").mkdir()
    (root / f".latest-5-{tail}").write_text("step-5\n")
    assert run_json(modicum, *words, 2)["warnings"] == []
    assert names_in(root) == ["latest", "step-2"]
    assert not list((root / "step-2").glob(".*"))


def test_a_taken_over_save_publishes_nothing(modicum: Path, moe: Path, tmp_path: Path) -> None:
    """strace holds the save just before it asks for the root's lock; meanwhile another process
    takes its directory for left over."""
    root = tmp_path / "root"
    strace = delayed("openat", str(root / ".lock"), 3000)
    with living(
        root, modicum, "save", moe, root, "--step", 1, inside=strace, owner=".partial-*/model*"
    ) as process:
        (partial,) = root.glob(".partial-*")
        deadline = time.monotonic() + PATIENCE_S
        while not (partial / "config.json").exists():
            assert time.monotonic() < deadline
            time.sleep(0.001)
        time.sleep(0.5)
        (partial / ".owner").write_text('{"uuid":"another"}')
        done = end_of(process)
    assert (done.code, done.error["category"]) == (20, "CONFLICT"), done.stderr
    assert not list(root.glob("step-*"))


def delayed(call: str, path: str, delay_ms: int, calls: str = "1+") -> tuple[str, ...]:
    """A command that runs a program and delays its calls that name this file in its directory."""
    if shutil.which("strace") is None:
        pytest.skip("strace is not installed")
    inject = f"inject={call}:delay_enter={delay_ms * 1000}:when={calls}"
    strace = ("strace", "-f", "-o", "/dev/null", "-P", Path(path).name)
    return (*strace, "-e", f"trace={call}", "-e", inject)


@pytest.mark.parametrize("count", [2, 6])
@pytest.mark.parametrize("rounds", ROUNDS)
def test_saves_at_once_in_one_root(
    modicum: Path, moe: Path, tmp_path: Path, rounds: int, count: int
) -> None:
    """Of different numbers, with --keep 1: all succeed, and the one that was committed last stays.
    Of one number: one succeeds, and the others end with CONFLICT."""
    for number in range(rounds):
        root = tmp_path / f"root-{number}"
        run_json(modicum, "save", moe, root, "--step", 1)
        numbers = range(2, 2 + count)
        saves = [start(modicum, "save", moe, root, "--step", n, "--keep", 1) for n in numbers]
        done = [end_of(save) for save in saves]
        assert [of.code for of in done] == [0] * count, [of.stderr for of in done]
        names = names_in(root)
        assert (root / "latest").read_text().strip() in names
        assert all(name == "latest" or name.startswith("step-") for name in names), names
        run_json(modicum, "verify", root)
        shutil.rmtree(root)

        run_json(modicum, "save", moe, root, "--step", 1)
        saves = [start(modicum, "save", moe, root, "--step", 2) for _ in numbers]
        done = [end_of(save) for save in saves]
        assert sorted(of.code for of in done) == [0] + [20] * (count - 1)
        assert all(of.error["category"] == "CONFLICT" for of in done if of.code)
        assert names_in(root) == ["latest", "step-1", "step-2"]
        run_json(modicum, "verify", root)
        shutil.rmtree(root)


# ---- conversions


@pytest.mark.parametrize("count", [2, 6])
@pytest.mark.parametrize("rounds", ROUNDS)
def test_conversions_at_once_to_one_output(
    modicum: Path, moe: Path, tmp_path: Path, rounds: int, count: int
) -> None:
    """One succeeds, and the others end with CONFLICT. In every second round the first is delayed
    between its directory and its first journal."""
    whole, out = tmp_path / "whole", tmp_path / "to/out"
    run_json(modicum, "convert", moe, whole, "--dtype", "float32")
    out.parent.mkdir()
    slow = delayed("openat", str(out.parent / ".out.journal.new"), DELAY_MS)
    for number in range(rounds):
        insides = [slow if number % 2 == 1 and n == 0 else () for n in range(count)]
        words = ("convert", moe, out, "--dtype", "float32")
        done = [end_of(one) for one in [start(modicum, *words, inside=of) for of in insides]]
        codes = sorted(of.code for of in done)
        assert codes == [0] + [20] * (count - 1), [of.stderr for of in done]
        assert all(of.error["category"] == "CONFLICT" for of in done if of.code)
        assert names_in(out.parent) == ["out"]
        assert run(modicum, "diff", whole, out).code == 0
        shutil.rmtree(out)


def test_a_living_conversion_is_not_disturbed(
    modicum: Path, moe: Path, tmp_path: Path, container: tuple[str, ...]
) -> None:
    """By the same command in another container, also with --adopt. Once it is killed the command
    goes on with its files."""
    out, partial = tmp_path / "to/out", tmp_path / "to/.out.partial"
    slow = delayed("openat", str(tmp_path / "to/.out.journal.new"), 20_000, "2+")
    words = ("convert", moe, out, "--dtype", "float32")
    (tmp_path / "to").mkdir()
    with living(
        tmp_path / "to",
        modicum,
        *words,
        inside=(*container, *slow),
        owner=".out.partial/model-*2-*",
    ):
        before = names_in(out.parent), names_in(partial)
        for flags in ((), ("--adopt",)):
            done = end_of(start(modicum, *words, *flags, inside=container))
            assert (done.code, done.error["category"]) == (20, "CONFLICT")
            assert "--adopt" in done.error["message"]
        assert (names_in(out.parent), names_in(partial)) == before
    assert end_of(start(modicum, *words, inside=container)).json["kept_files"] > 0
    assert names_in(out.parent) == ["out"]


def test_a_journal_whose_owner_cannot_be_asked_is_adopted(
    modicum: Path, moe: Path, tmp_path: Path
) -> None:
    """A journal of modicum 0.1 by another container, and the same after a reboot: that goes on
    without --adopt."""
    to = tmp_path / "to"
    out, journal = to / "out", to / ".out.journal"
    words = ("convert", moe, out)
    to.mkdir()
    slow = delayed("openat", f"{journal}.new", 20_000, "2+")
    for is_after_reboot in (False, True):
        with living(to, modicum, *words, inside=slow, owner=".out.partial/model-*2-*"):
            pass
        document = json.loads(journal.read_text())
        assert document.pop("uuid") and len(document["files"]) > 0
        host, boot, _ = document["host"].rsplit(".", 2)
        document["host"] = f"{host}.{boot[::-1] if is_after_reboot else boot}.1"
        journal.write_text(json.dumps(document))
        (to / ".out.owner").unlink()
        if not is_after_reboot:
            before = names_in(to)
            assert "--adopt" in failure(modicum, 20, *words)["message"]
            assert names_in(to) == before
        flags = () if is_after_reboot else ("--adopt",)
        report = run_json(modicum, *words, *flags)
        assert report["kept_files"] == len(document["files"])
        assert names_in(to) == ["out"]
        shutil.rmtree(out)
