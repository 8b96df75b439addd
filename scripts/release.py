#!/usr/bin/env python3
"""Makes the tag of a release, vX.Y.Z, if the commit is ready for it.

release.py X.Y.Z [--check]: prints one line for each thing that is missing and exits 1, or makes the
signed tag; with --check it makes none. It requires a clean tree, this version in CMakeLists.txt, a
dated section of it in CHANGELOG.md with nothing left in [Unreleased], and of each part of `make
soak` a newest run in SOAK.md that passed tests, without uncommitted changes, on a commit since the
last release after which only pages, tests and benchmarks have changed. RELEASE.md has the steps
before and after. Standard library only.
"""

import argparse
import datetime
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
import soak

ROOT = Path(__file__).resolve().parent.parent
VERSIONED = "CMakeLists.txt"
VERSION = re.compile(r"(?m)^project\(modicum VERSION ([\d.]+)")
UNTESTED = re.compile(r"(docs|tests|benchmarks|\.github)/|(.*/)?[^/]*\.md$|mkdocs\.yml$"
                      r"|scripts/(release|soak|site)(_test)?\.py$")  # fmt: skip
"""Names of files that are in no release, and whose change leaves what a run has shown."""


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
    found = VERSION.search((root / VERSIONED).read_text())
    has = found[1] if found else "none"
    if has != version:
        yield f"CMakeLists.txt: expected version {version}, got {has}"
    yield from changelog_findings((root / "CHANGELOG.md").read_text(), version)
    yield from soak_findings(root, (root / soak.PAGE).read_text(), version)


def changelog_findings(text: str, version: str) -> Iterator[str]:
    sections = re.split(r"(?m)^## ", text)[1:]
    if any(has_content(part) for part in sections if part.startswith("[Unreleased]")):
        yield f"CHANGELOG.md: expected an empty [Unreleased], whose text belongs to [{version}]"
    section = next((part for part in sections if part.startswith(f"[{version}]")), "")
    heading = section.partition("\n")[0]
    date = re.fullmatch(r"\[[^]]*\] - (\d{4}-\d\d-\d\d)", heading)
    if date is None:
        yield f"CHANGELOG.md: expected a section '## [{version}] - YYYY-MM-DD'"
    elif not is_date(date[1]):
        yield f"CHANGELOG.md: expected a date in '## {heading}', got {date[1]}"
    if section and not has_content(section):
        yield f"CHANGELOG.md: the section [{version}] is empty"


def has_content(section: str) -> bool:
    """Whether a section has more than headings."""
    return any(line.strip() and not line.startswith("#") for line in section.splitlines()[1:])


def is_date(text: str) -> bool:
    try:
        datetime.date.fromisoformat(text)
    except ValueError:
        return False
    return True


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
        commit, passed, result = (newest[part][column] for column in (2, 4, 8))
        if result != "ok":
            yield f"{soak.PAGE}: part {part}: its newest run, at {commit}, {result}"
        elif int("0" + re.sub(r"\D", "", passed)) == 0:
            yield f"{soak.PAGE}: part {part}: its newest run, at {commit}, passed no test"
        elif commit.endswith("+"):
            yield f"{soak.PAGE}: part {part}: its newest run had uncommitted changes"
        elif not is_ancestor(root, commit, "HEAD"):
            yield f"{soak.PAGE}: part {part}: commit {commit} is not in the release"
        elif last and is_ancestor(root, commit, last):
            yield f"{soak.PAGE}: part {part}: expected a run since {last}, got one at {commit}"
        elif changed := changed_since(root, commit):
            more = f" and {len(changed) - 1} other files" if changed[1:] else ""
            since = f"expected a run since {changed[0]}{more} changed, got one at {commit}"
            yield f"{soak.PAGE}: part {part}: {since}"


def changed_since(root: Path, commit: str) -> list[str]:
    """Files that have changed since a commit and that a run of soak tests: all but pages, tests,
    benchmarks, and the version in CMakeLists.txt."""
    names = git(root, "diff", "--name-only", "--no-renames", commit, "HEAD").splitlines()
    changed = [name for name in names if not UNTESTED.match(name)]
    if VERSIONED in changed:
        before, after = (git(root, "show", f"{at}:{VERSIONED}") for at in (commit, "HEAD"))
        if VERSION.sub("", before) == VERSION.sub("", after):
            changed.remove(VERSIONED)
    return changed


def last_release(root: Path, version: str) -> str:
    """The newest tag of another version before HEAD; "" if there is none."""
    tags = git(root, "tag", "--merged", "HEAD", "--sort=-creatordate", "--list", "v*").split()
    return next((tag for tag in tags if tag != f"v{version}"), "")


def is_ancestor(root: Path, commit: str, of: str) -> bool:
    known = subprocess.run(
        ["git", "merge-base", "--is-ancestor", commit, of], cwd=root, capture_output=True
    )
    return known.returncode == 0


def tag_findings(root: Path, tag: str, is_check: bool) -> Iterator[str]:
    """An existing tag. To a check it may be there: the workflow of a release runs at its tag."""
    if not git(root, "tag", "--list", tag):
        return
    at, head = (git(root, "rev-parse", f"{name}^{{commit}}") for name in (tag, "HEAD"))
    if at != head:
        yield f"the tag {tag} is at another commit, {at[:10]}"
    elif not is_check:
        yield f"the tag {tag} exists"


def main(root: Path, arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("version", metavar="X.Y.Z")
    parser.add_argument("--check", action="store_true", help="makes no tag")
    options = parser.parse_args(arguments)
    tag = f"v{options.version}"
    missing = list(findings(root, options.version))
    missing += tag_findings(root, tag, options.check)
    for line in missing:
        print(line)
    if missing:
        print(f"not ready for {options.version}: {len(missing)} findings", file=sys.stderr)
        return 1
    if options.check:
        print(f"ready for {tag}")
        return 0
    try:
        git(root, "tag", "-s", tag, "-m", f"modicum {options.version}")
    except subprocess.CalledProcessError as failed:
        reason = (failed.stderr.strip().splitlines() or ["no reason"])[0]
        print(f"git can't sign the tag; expected a key in user.signingkey, got: {reason}")
        return 1
    print(f"made {tag}: push it by `git push origin {tag}`")
    return 0


if __name__ == "__main__":
    sys.exit(main(ROOT, sys.argv[1:]))
