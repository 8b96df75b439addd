#!/usr/bin/env python3
"""Finds phrases in comments, messages and pages that engineers of this field do not use.

check_words.py [PATH...]: prints one line per finding, `file:line: phrase: write ...`, and exits 1
if there is any. Without paths: every tracked text file. Standard library only.
"""

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

# Pattern -> advice what to write instead. Every line of every file is searched, code included.
PHRASES = {
    r"\bwhat (is|are|was|were)\b(?! it\?)": "name the thing",
    r"\blook(s|ed|ing)?\b(?! up\b|[- ]?ahead\b| like\b)": "read, check, inspect, search, ignored",
    r"\b(stand|stands|standing|stood)\b(?!-in)": "is, holds, remains, names the place",
    r"\bbeside\b": "next to, alongside, as well as",
    r"\b(is|are|was|were) due\b|\bwhat\b.{0,20}\bdue\b": "expected X, got Y",
    r"\bdeal(s|t|ing)?\b(?! with\b)": "scatter, send",
    r"\b(has|have) not\b(?! \w+(ed|en|un|ad|ut|it|ost|one|ome|eft|ept)\b| yet\b)": (
        "lacks, not in X"
    ),
    r"\b[Ww]hat nobody\b|\bnobody\b": "no rank, no process, no reader",
    r"\b[Oo]f nothing\b": "an empty tensor",
    r"\b[Ww]ho (reads|asks|wants|needs|gives|makes|calls|says|holds|has|is|was)\b(?!.*\?)": (
        "name the role"
    ),
    r"\bsays so\b|\bsaid so\b": "reports it",
    r"\bfor good\b": "permanently",
    r"\bin its own good time\b": "asynchronously",
    r"\btaken for\b(?! granted)": "mistaken for, counts as",
    # A step is the optimizer's; a directory with weights is a checkpoint.
    r"\b([Ss]aved|intact|newest|[Dd]amaged|(un)?committed|unfinished|[Vv]isible|old|older) steps?\b"
    r"(?! (counts?|numbers?)\b)": "checkpoint",
    r"\bsteps? (is|are|was|were|becomes?|be|stays) (not )?"
    r"(visible|committed|intact|damaged|durable|incomplete|published)\b": "the checkpoint is ...",
    r"\bstep('s)? (director(y|ies)|files?|record)\b": "checkpoint, the checkpoint's files",
    r"\bsteps? (of|in) (a|the|one|its|this) (root|run|ROOT)\b|\bdirectory of all steps\b": (
        "checkpoints of the run"
    ),
    r"\b([Gg]radients?'?) planes?\b": "gradient buffer; for the state: state tensors",
    r"\b[Pp]romised and measured\b|\((the )?kernel\) *\|": "predicted, charged, measured",
}
SUFFIXES = {".cc", ".h", ".py", ".pyi", ".md", ".toml", ".sh", ".txt", ".cmake", ".yml", ".in"}
SKIPPED = {"scripts/check_words.py", "scripts/check_words_test.py", "LICENSE", "README.zh.md"}


def findings(path: str, text: str) -> Iterator[str]:
    for number, line in enumerate(text.splitlines(), 1):
        for pattern, instead in PHRASES.items():
            for match in re.finditer(pattern, line):
                yield f"{path}:{number}: `{match[0]}`: write {instead}"


def tracked(root: Path, paths: list[str]) -> list[str]:
    listed = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard", "--", *paths],
        cwd=root,
        check=True,
        capture_output=True,
        text=True,
    ).stdout.splitlines()
    return [name for name in listed if Path(name).suffix in SUFFIXES and name not in SKIPPED]


def main() -> int:
    root = Path(__file__).resolve().parent.parent
    found = [
        line
        for name in tracked(root, sys.argv[1:])
        if (root / name).is_file()
        for line in findings(name, (root / name).read_text())
    ]
    for line in found:
        print(line)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
