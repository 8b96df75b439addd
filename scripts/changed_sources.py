#!/usr/bin/env python3
"""The C++ sources that clang-tidy has to check: those that changed since a commit.

changed_sources.py [COMMIT]: prints a line for each source, except tests and bindings, that differs
from COMMIT or includes, through other headers too, a header that does. Without COMMIT, if this
clone has no such commit, or if .clang-tidy differs, it prints all sources. Standard library only.
"""

import re
import subprocess
import sys
from pathlib import Path

INCLUDE = re.compile(r'^\s*#\s*include\s*"([^"]+)"', re.M)
SETTINGS = ".clang-tidy"


def git(root: Path, *words: str) -> list[str] | None:
    """The lines that git prints; None if it fails."""
    done = subprocess.run(["git", *words], cwd=root, capture_output=True, text=True, check=False)
    return done.stdout.splitlines() if done.returncode == 0 else None


def is_checked(path: str) -> bool:
    is_own = path.startswith("modicum/") and not path.startswith("modicum/python/")
    return is_own and path.endswith(".cc") and not path.endswith("_test.cc")


def affected(changed: set[str], texts: dict[str, str]) -> set[str]:
    """The files of `texts` that changed, or include one that is affected."""
    includes = {path: set(INCLUDE.findall(text)) for path, text in texts.items()}
    found = changed & set(texts)
    while more := {path for path, names in includes.items() if names & found} - found:
        found |= more
    return found


def sources(root: Path, commit: str) -> list[str]:
    listed = git(root, "ls-files", "-co", "--exclude-standard", "*.h", "*.cc") or []
    texts = {path: (root / path).read_text() for path in listed if (root / path).is_file()}
    known = bool(commit) and git(root, "cat-file", "-e", f"{commit}^{{commit}}") is not None
    differs = git(root, "diff", "--name-only", "--no-renames", commit) if known else None
    found = set(texts)
    if differs is not None and SETTINGS not in differs:
        unknown = git(root, "ls-files", "-o", "--exclude-standard") or []
        found = affected({*differs, *unknown}, texts)
    return sorted(filter(is_checked, found))


def main() -> int:
    root = Path(__file__).resolve().parent.parent
    for path in sources(root, sys.argv[1] if len(sys.argv) > 1 else ""):
        print(path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
