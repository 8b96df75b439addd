#!/usr/bin/env python3
"""Records what a build of modicum does over a grid of cases, and compares two builds.

    same_as.py record FILE --modicum PROGRAM     writes the record of a build to FILE
    same_as.py compare FILE --modicum PROGRAM    prints each difference from it; exits 1 if any

For a change that must not change behaviour: record the commit before it, compare after it. A case
is a name and a list of commands, which run in a folder of its own. Of each command the record has
the exit code, the JSON (promises by purpose, digests, bytes read, facts of errors), and the size
and digest of each file that it wrote; where `strace` is installed, also the system calls of some
commits. It omits what differs between runs of one build: times, speeds, pids, uuids, and memory
that the kernel measured. --torch PYTHON records the calls of modicum.torch as well, with the
package of that interpreter (same_as_torch.py). Files of a record are compared on one machine.
"""

import argparse
import hashlib
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))
import same_as_cases
from same_as_cases import TIMEOUT_S, Case

Record = dict[str, Any]

# ---- a run of a case


EDITS = ("flip", "cut", "remove", "copy", "write", "header")


def edit(folder: Path, verb: str, name: str, value: str = "") -> None:
    """Flips a byte of a file, cuts, removes, copies or writes it."""
    path = folder / name
    if verb == "copy":
        shutil.copytree(path, folder / value)
    elif verb == "remove":
        path.unlink()
    elif verb == "cut":
        os.truncate(path, int(value))
    elif verb in ("write", "header"):
        path.parent.mkdir(parents=True, exist_ok=True)
        data = value.encode()
        is_header = verb == "header"
        path.write_bytes(len(data).to_bytes(8, "little") + data + bytes(4) if is_header else data)
    else:
        data = bytearray(path.read_bytes())
        data[int(value)] ^= 1
        path.write_bytes(data)


VARIES = re.compile(
    r"pid|.*_per_s|(elapsed|durable|check|load|step|blocked)_s|kernel.*|baseline_bytes"
    r"|(unexplained|launcher|page_cache_peak|cgroup_peak|fixed)_bytes|speedup.*|isas?(_not_run)?"
)
OWNERS = re.compile(  # names and texts with the host, pid, time and uuid of a process
    r"(?<=\d-)[\w.-]+-\d+-\d+-[0-9a-f]{32}|(?<=uuid )[0-9a-f]{32}|(?<=\.damaged-1-)[0-9a-f]{32}"
    r"|(?<=bytes, )[0-9a-f]{32}"  # digests of manifests, which have uuids
    r'|(?<="uuid":")[0-9a-f]{32}|(?<="manifest_digest":")[0-9a-f]{32}'
    r'|(?<="inputs":")[0-9a-f]{32}|(?<=\.owner>, )\d+'
    r'|(?<="host":)"[^"]*","pid":\d+,"started":\d+'
)


def owned(text: str) -> str:
    return OWNERS.sub("OWNER", text)


def steady(value: Any) -> Any:
    """A JSON document without the members that vary."""
    if isinstance(value, list):
        return [steady(one) for one in value]
    if not isinstance(value, dict):
        return owned(value) if isinstance(value, str) else value
    kept = {key: steady(one) for key, one in value.items() if not VARIES.fullmatch(key)}
    if kept.get("source") in ("MemAvailable", "cgroup"):
        kept.pop("bytes", None)
    return kept


def files_of(folder: Path) -> dict[str, str]:
    """Size and digest of each file, without uuids; `->` for links, `/` for empty folders."""
    files = {}
    for path in sorted(folder.rglob("*")):
        name = owned(str(path.relative_to(folder)))
        if path.is_symlink():
            files[name] = f"-> {os.readlink(path)}"
        elif path.is_file():
            data = owned(path.read_bytes().decode("latin-1")).encode("latin-1")
            files[name] = f"{len(data)} {hashlib.sha256(data).hexdigest()[:16]}"
        elif not any(path.iterdir()):
            files[name] = "/"
    return files


TRACED_CASES = "system calls"
TRACED = "mkdirat,renameat,renameat2,linkat,symlinkat,unlinkat,fsync,fdatasync,openat,ftruncate"


def calls_of(trace: Path, folder: Path) -> list[list[str]]:
    """The system calls that change names, or sync, of each process; the longest lists first."""
    calls: dict[str, list[str]] = {}
    for line in trace.read_text().splitlines():
        pid, _, call = line.partition(" ")
        if str(folder) not in call or ("openat" in call and "O_CREAT" not in call):
            continue
        call = owned(call.strip().replace(str(folder), ""))
        call = re.sub(r"\b\d+<", "<", re.sub(r"\)? +(= \d+.*|<unfinished .*)", ")", call))
        calls.setdefault(pid, []).append(call)
    return sorted(calls.values(), key=lambda of: (-len(of), of))


ENVIRONMENT = os.environ | {"HF_HOME": "/no-cache", "HF_HUB_CACHE": "/no-cache/hub"}


def execute(program: Path, words: list[str], folder: Path, trace: Path | None) -> Record:
    command = [str(program), *words, "--json"]
    if "--threads" not in words and words[0] not in ("inspect", "verify", "doctor", "watch"):
        command += ["--threads", "1"]
    if trace:
        command = ["strace", "-f", "-y", "-e", f"trace={TRACED}", "-o", str(trace), *command]
    ended = subprocess.run(
        command, cwd=folder, env=ENVIRONMENT, capture_output=True, text=True, timeout=TIMEOUT_S
    )
    try:
        out = steady(json.loads(ended.stdout))
    except ValueError:
        out = ended.stdout
    record = {"exit": ended.returncode, "out": out}
    return record | ({"calls": calls_of(trace, folder)} if trace else {})


def run_case(program: Path, case: Case, folder: Path) -> list[Record]:
    folder.mkdir()
    records: list[Record] = []
    before: dict[str, str] = {}
    traced = case[0].startswith(TRACED_CASES)
    for line in case[1]:
        words = [re.sub("^@", "../../s/", word) for word in shlex.split(line)]
        if words[0] in EDITS:
            try:
                edit(folder, *words)
            except OSError as error:  # a command before it has failed
                records.append({"command": line, "exit": error.errno})
            before = files_of(folder)
            continue
        trace = folder.parent / f"{folder.name}.trace" if traced else None
        record = execute(program, words, folder, trace)
        after = files_of(folder)
        names = {name for name in before | after if before.get(name) != after.get(name)}
        record["files"] = {name: after.get(name, "is gone") for name in sorted(names)}
        records.append({"command": line} | record)
        before = after
    shutil.rmtree(folder)
    return records


def record_of(
    program: Path, jobs: int, omitted: tuple[str, ...] = (), torch_python: str | None = None
) -> Record:
    """A list of records for each case, by its name; without cases whose name begins `omitted`."""
    with tempfile.TemporaryDirectory(prefix="same_as-") as temp:
        folder = Path(temp).resolve()
        for name in ("s", "c"):
            (folder / name).mkdir()
        same_as_cases.make_sources(program, folder / "s")
        cases = [case for case in same_as_cases.grid() if not case[0].startswith(omitted)]

        def run(number: int) -> list[Record]:
            return run_case(program, cases[number], folder / f"c/{number}")

        with ThreadPoolExecutor(jobs) as pool:
            records = list(pool.map(run, range(len(cases))))
        record = {case[0]: one for case, one in zip(cases, records, strict=True)}
        if torch_python:
            child = Path(__file__).with_name("same_as_torch.py")
            subprocess.run([torch_python, child, folder / "torch"], check=True, stdout=sys.stderr)
            text = (folder / "torch/record.json").read_text().replace(str(folder), "")
            record |= steady(json.loads(text))
            for root in sorted(folder.glob("torch/root-*")):
                record[f"torch files of {root.name}"] = [files_of(root)]
    return record


# ---- comparison


def flat(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Each number, text or bool of a document, by its path."""
    pairs = value.items() if isinstance(value, dict) else enumerate(value)
    for key, one in pairs:
        below = f"{path}.{key}" if path else str(key)
        if isinstance(one, dict | list) and one:
            yield from flat(one, below)
        else:
            yield below, one


def differences(old: Record, new: Record) -> Iterator[str]:
    for name in old | new:
        if name not in old or name not in new:
            yield f"{name}: only in the {'new' if name in new else 'old'} record"
            continue
        before, after = dict(flat(old[name])), dict(flat(new[name]))
        for key in before | after:
            pair = [of.get(key, "(absent)") for of in (before, after)]
            if pair[0] != pair[1]:
                yield f"{name}: {key}: {pair[0]} -> {pair[1]}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("verb", choices=["record", "compare"])
    parser.add_argument("file", type=Path)
    parser.add_argument("--modicum", type=Path, required=True, metavar="PROGRAM")
    parser.add_argument("--torch", metavar="PYTHON", help="an interpreter with modicum and torch")
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    options = parser.parse_args()
    omitted = () if options.torch else ("torch ",)
    if not shutil.which("strace"):
        print("same_as.py: WARNING: no strace: system calls are LEFT OUT", file=sys.stderr)
        omitted += (TRACED_CASES,)
    record = record_of(options.modicum.resolve(), options.jobs, omitted, options.torch)
    if options.verb == "record":
        options.file.write_text(json.dumps(record, indent=0))
        print(f"{len(record)} cases, {sum(map(len, record.values()))} commands")
        return 0
    old = json.loads(options.file.read_text())
    old = {name: old[name] for name in old if not name.startswith(omitted)}
    found = list(differences(old, record))
    print(*found, f"{len(found)} differences in {len(record)} cases", sep="\n")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
