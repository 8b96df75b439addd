#!/usr/bin/env python3
"""Makes the tag of a release, vX.Y.Z, if the commit is ready for it.

release.py X.Y.Z [--check]: prints one line for each thing that is missing and exits 1, or makes the
signed tag; with --check it makes none. It requires a clean tree, this version in CMakeLists.txt, a
dated section of it in CHANGELOG.md, and of each part of `make soak` a newest run in SOAK.md that
passed, without uncommitted changes, on a commit since the last release. RELEASE.md has the steps
before and after. Standard library only.
"""

import argparse
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
import soak

ROOT = Path(__file__).resolve().parent.parent


def git(root: Path, *arguments: str) -> str:
    return subprocess.run(
        ["git", *arguments], cwd=root, text=True, capture_output=True, check=True
    ).stdout.strip()


def findings(root: Path, version: str) -> Iterator[str]:
    if not re.fullmatch(r"(0|[1-9]\d*)(\.(0|[1-9]\d*)){2}", version):
        yield f"expected a version X.Y.Z, got '{version}'"
        return
    if changes := git(root, "status", "--porcelain"):
        yield f"the tree has changes that are not committed: {changes.splitlines()[0].strip()}"
    found = re.search(
        r"(?m)^project\(modicum VERSION ([\d.]+)", (root / "CMakeLists.txt").read_text()
    )
    has = found[1] if found else "none"
    if has != version:
        yield f"CMakeLists.txt: expected version {version}, got {has}"
    yield from changelog_findings((root / "CHANGELOG.md").read_text(), version)
    yield from soak_findings(root, (root / soak.PAGE).read_text(), version)


def changelog_findings(text: str, version: str) -> Iterator[str]:
    heading = rf"(?m)^## \[{re.escape(version)}\] - \d{{4}}-\d\d-\d\d$"
    section = re.search(heading, text)
    if section is None:
        yield f"CHANGELOG.md: expected a section '## [{version}] - YYYY-MM-DD'"
    elif not re.split(r"(?m)^## ", text[section.end() :])[0].strip():
        yield f"CHANGELOG.md: the section [{version}] is empty"


def soak_findings(root: Path, page: str, version: str) -> Iterator[str]:
    newest: dict[str, list[str]] = {}
    for line in page.splitlines():
        cells = [cell.strip() for cell in line.split("|")[1:-1]]
        if len(cells) == 9 and cells[1] in soak.PARTS:
            newest[cells[1]] = cells
    last = last_release(root, version)
    for part in soak.PARTS:
        if part not in newest:
            yield f"{soak.PAGE}: part {part}: no run"
            continue
        commit, result = newest[part][2], newest[part][8]
        if result != "ok":
            yield f"{soak.PAGE}: part {part}: its newest run, at {commit}, {result}"
        elif commit.endswith("+"):
            yield f"{soak.PAGE}: part {part}: its newest run had uncommitted changes"
        elif not is_ancestor(root, commit, "HEAD"):
            yield f"{soak.PAGE}: part {part}: commit {commit} is not in the release"
        elif last and is_ancestor(root, commit, last):
            yield f"{soak.PAGE}: part {part}: expected a run since {last}, got one at {commit}"


def last_release(root: Path, version: str) -> str:
    """The newest tag of another version before HEAD; "" if there is none."""
    tags = git(root, "tag", "--merged", "HEAD", "--sort=-creatordate", "--list", "v*").split()
    return next((tag for tag in tags if tag != f"v{version}"), "")


def is_ancestor(root: Path, commit: str, of: str) -> bool:
    known = subprocess.run(
        ["git", "merge-base", "--is-ancestor", commit, of], cwd=root, capture_output=True
    )
    return known.returncode == 0


def main(root: Path, arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("version", metavar="X.Y.Z")
    parser.add_argument("--check", action="store_true", help="makes no tag")
    options = parser.parse_args(arguments)
    missing = list(findings(root, options.version))
    for line in missing:
        print(line)
    if missing:
        print(f"not ready for {options.version}: {len(missing)} findings", file=sys.stderr)
        return 1
    tag = f"v{options.version}"
    if options.check:
        print(f"ready for {tag}")
        return 0
    git(root, "tag", "-s", tag, "-m", f"modicum {options.version}")
    print(f"made {tag}: push it by `git push origin {tag}`")
    return 0


if __name__ == "__main__":
    sys.exit(main(ROOT, sys.argv[1:]))
