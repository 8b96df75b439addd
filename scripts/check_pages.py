"""Rules of check.py about pages: links, paths of this repository, and flags that they name."""

import ast
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

# `[text](target)`, also with a title; `[name]: target`; and the attributes of HTML.
LINK = re.compile(
    r"""\]\(\s*<?([^()\s<>]+)>?(?:\s+["'(][^\n]*?)?\s*\)"""
    r"""|^ {0,3}\[[^\]\n]+\]:\s*<?([^\s<>]+)>?|\b(?:href|src|srcset)=["']([^"'\s]+)""",
    re.M,
)
INLINE_CODE = re.compile(r"`[^`\n]*`")
FENCE = re.compile(r"^```.*?^```", re.M | re.S)
CODE = re.compile(r"(?:^```[^\n]*\n(.*?)^```)|`([^`\n]+)`|^ {4}(\S[^\n]*)$", re.M | re.S)
# Paths begin with a folder of the tree: `docs/a.md`, `tests/fixtures`, `mutants/*.toml`.
FOLDERS = (
    "benchmarks", "cmake", "docs", "examples", "modicum", "mutants", "scripts", "skills", "tests",
    ".ci", ".github",
)  # fmt: skip
PATH = re.compile(rf"(?<![\w./-])(?:{'|'.join(map(re.escape, FOLDERS))})/[\w./*-]*[\w*]")
PAGE_PATH = re.compile(r"(?<![\w./-])docs/[\w./-]+\.md\b")
BARE_FILE = re.compile(r"`([\w-]+\.(?:cc|py|sh|cmake|toml))`")
FLAG = re.compile(r"(?<![\w-])--[a-z][a-z0-9]*(?:-[a-z0-9]+)*(?![\w-])")
# Programs of other projects, whose flags are not checked.
FOREIGN = re.compile(
    r"\b(pip|torchrun|srun|sbatch|ray|git|make|cmake|apt-get|venv|gh|python3? -m build)\b|#SBATCH"
    r"|g\+\+"
)
# Flags that are accepted everywhere: those of every program here, and of torchrun and pip in prose.
KNOWN_FLAGS = {"--help", "--version", "--nproc-per-node", "--no-deps"}
CITING = {".py", ".pyi", ".cc", ".h", ".sh", ".cmake", ".toml", ".txt"}
VERBS_HEADING = re.compile(r"^## (.*`.*|Every verb)$", re.M)


@dataclass(frozen=True)
class Programs:
    verbs: dict[str, set[str]]  # verb of modicum -> its flags
    scripts: dict[str, set[str]]  # name of a Python program -> its flags

    def all_flags(self) -> set[str]:
        return KNOWN_FLAGS.union(*self.verbs.values(), *self.scripts.values())


def place(text: str, at: int) -> int:
    """The number of the line that contains the character at this index."""
    return text.count("\n", 0, at) + 1


# ---- links


def anchors(text: str) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them: the second heading `A` is `a-1`."""
    text = FENCE.sub("", text)
    found = set(re.findall(r"""<a\s[^>]*\b(?:id|name)=["']([^"']+)""", text))
    seen: dict[str, int] = {}
    for heading in re.findall(r"^#{1,6} (.*)$", text, re.M):
        shown = re.sub(r"\]\([^)]*\)", "", heading)  # of a link GitHub takes the text
        anchor = re.sub(r"[^\w\- ]", "", shown.strip().lower()).replace(" ", "-")
        seen[anchor] = seen.get(anchor, -1) + 1
        found.add(f"{anchor}-{seen[anchor]}" if seen[anchor] else anchor)
    return found


def check_links(root: Path, page: str, text: str, files: set[str]) -> Iterator[str]:
    """Relative links that lead to no file or folder of the repository, or to no heading of a page.
    A file outside the repository, or one that git ignores, is on no other machine."""
    text = FENCE.sub(lambda fence: "\n" * fence[0].count("\n"), text)
    text = INLINE_CODE.sub(lambda code: " " * len(code[0]), text)
    for match in LINK.finditer(text):
        link = next(one for one in match.groups() if one is not None)
        if re.match(r"[a-z]+:", link):
            continue
        where = f"{page}:{place(text, match.start())}"
        target, _, anchor = link.partition("#")
        path = os.path.normpath(os.path.join(os.path.dirname(page), target)) if target else page
        is_folder = path == "." or any(one.startswith(f"{path}/") for one in files)
        if path not in files and not is_folder:
            yield f"{where}: the link {link} leads nowhere"
        elif anchor and (is_folder or anchor not in anchors((root / path).read_text())):
            yield f"{where}: {link}: no such heading"


# ---- paths


def exists(root: Path, name: str) -> bool:
    # A path with a placeholder, such as modicum/ROOM/ROOM.h, counts as existing.
    if any(re.fullmatch(r"[A-Z]+", part) for part in name.split("/")):
        return True
    return any(root.glob(name)) if "*" in name else (root / name).exists()


def check_paths(root: Path, page: str, text: str, names: set[str]) -> Iterator[str]:
    """Paths on a page that do not exist. `names`: the names of all files, without folders."""
    for match in PATH.finditer(text):
        if not exists(root, match[0]):
            yield f"{page}:{place(text, match.start())}: {match[0]} does not exist"
    for match in BARE_FILE.finditer(text):
        if match[1] not in names:
            yield f"{page}:{place(text, match.start())}: no file is called {match[1]}"


def check_mentions(root: Path, path: str, text: str) -> Iterator[str]:
    """Pages that sources cite and that do not exist."""
    for match in PAGE_PATH.finditer(text):
        if not (root / match[0]).exists():
            yield f"{path}:{place(text, match.start())}: {match[0]} does not exist"


# ---- flags


def flags_of_verbs(sources: str, page: str) -> dict[str, set[str]]:
    """The flags of each verb: those that the page of the command line lists and a source of
    modicum/cli contains."""
    known = set(re.findall(r'"(?:-\w,)?(--[a-z][a-z0-9-]*)"', sources)) | {"--help"}
    flags: dict[str, set[str]] = {}
    parts = VERBS_HEADING.split(page)
    sections = [(parts[i], set(FLAG.findall(parts[i + 1]))) for i in range(1, len(parts), 2)]
    for heading, _ in sections:
        for verb in re.findall(r"`(\w+)`", heading):
            flags.setdefault(verb, set())
    for heading, found in sections:
        for verb in re.findall(r"`(\w+)`", heading) or list(flags):
            flags[verb] |= found & known
    return flags


def flags_of_script(tree: ast.AST) -> set[str]:
    """The strings of a program that have the form of a flag."""
    strings = (node.value for node in ast.walk(tree) if isinstance(node, ast.Constant))
    return {one for one in strings if isinstance(one, str) and FLAG.fullmatch(one)}


def flags_here(words: str, programs: Programs) -> Iterator[tuple[str, set[str] | None]]:
    """Yields each flag in a line of code, with the flags that are accepted at that place: those of
    the program that the line has named last, or of every program if it has named none. None: any
    flag is accepted, since the program is another project's."""
    current: set[str] | None = programs.all_flags()
    previous = ""
    for word in words.split():
        name = word.rsplit("/", 1)[-1]
        if FOREIGN.fullmatch(name):
            current = None
        elif previous == "modicum" and name in programs.verbs:
            current = programs.verbs[name] | KNOWN_FLAGS
        elif name in programs.scripts:
            current = programs.scripts[name] | KNOWN_FLAGS
        for flag in FLAG.findall(word):
            yield flag, current
        previous = name


def check_flags(page: str, text: str, programs: Programs) -> Iterator[str]:
    for match in CODE.finditer(text):
        code = next(part for part in match.groups() if part is not None).replace("\\\n", " ")
        for line in code.splitlines():
            for flag, flags in flags_here(line, programs):
                if flags is not None and flag not in flags:
                    where = f"{page}:{place(text, match.start())}"
                    yield f"{where}: no flag {flag} in `{line.strip()}`"


# ---- all pages


def released(page: str, text: str) -> str:
    """The text to check. In the changelog that is the unreleased part: released ones may name files
    that no longer exist."""
    return "## [".join(text.split("## [")[:2]) if page == "CHANGELOG.md" else text


def check_pages(root: Path, paths: list[str], trees: dict[str, ast.AST]) -> Iterator[str]:
    command_line = root / "docs/reference/command-line.md"
    sources = "".join((root / one).read_text() for one in paths if one.startswith("modicum/cli/"))
    page = command_line.read_text() if command_line.is_file() else ""
    scripts = {one.rsplit("/", 1)[-1]: flags_of_script(tree) for one, tree in trees.items()}
    scripts["modicum.recipes"] = scripts.pop("__main__.py", set())  # python -m modicum.recipes
    programs = Programs(flags_of_verbs(sources, page), scripts)
    names = {one.rsplit("/", 1)[-1] for one in paths}
    for path in paths:
        if path.endswith(".md") or path == "docs/llms.txt":
            text = released(path, (root / path).read_text())
            yield from check_links(root, path, text, {*paths})
            yield from check_paths(root, path, text, names)
            yield from check_flags(path, text, programs)
        elif Path(path).suffix in CITING and not path.startswith("scripts/check"):
            yield from check_mentions(root, path, (root / path).read_text())
