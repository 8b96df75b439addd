"""`modicum convert` of another program's directory: imports its weights as a saved
checkpoint next to OUT, which the program then converts."""

import hashlib
import os
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path

from modicum import _modicum
from modicum.errors import Error, failure
from modicum.imports.importing import NO_OPTIMIZER, import_checkpoint
from modicum.imports.kinds import recognised
from modicum.imports.pickles import reading
from modicum.imports.report import remainder_text
from modicum.program import end_raises, is_quiet, print_line, refusal, report_error, run

SWITCHES = frozenset(
    ("--sparse", "--allow-overflow", "--adopt", "--json", "-q", "--quiet", "-v", "--verbose",
     "--help", "-h", "--help-all")
)  # fmt: skip
"""The flags of `modicum convert` without a value."""
_NAMES_IMPORTER = "modicum.imports.import_checkpoint"
"""What the program's refusal of a directory names."""


def convert(program: Path, words: Sequence[str]) -> int | None:
    """Runs `modicum convert` with these words if they name a directory that has to be imported.

    Returns:
        The exit code; None: there is no such directory, or the program refuses another word. Then
        the caller runs the program, which has written nothing.
    """
    at = next((at for at, word in enumerate(words) if _is_foreign(word)), None)
    if at is None or _NAMES_IMPORTER not in refusal(program, "convert", words).get("message", ""):
        return None  # the program reads the flags first, so no other word is refused
    try:
        with end_raises("the conversion"):
            root, checkpoint = _imported(Path(words[at]), words, at)
    except Error as error:
        return report_error(error, words)
    except KeyboardInterrupt:
        return report_error(failure("CANCELLED", "interrupted"), words)
    code = run([str(program), "convert", *words[:at], checkpoint, *words[at + 1 :]])
    if code == 0:
        _modicum.remove_tree(root)
    else:
        print_line(f"modicum: {root} keeps the imported weights for the same command", sys.stderr)
    return code


def _is_foreign(word: str) -> bool:
    """Whether a word is a directory of another program. One with safetensors files is a checkpoint
    of its own."""
    path = Path(word)
    if word.startswith("-") or not os.path.isdir(word) or any(path.glob("*.safetensors")):
        return False
    try:
        return recognised(path) is not None
    except Error:
        return True  # the import raises it


def _imported(directory: Path, words: Sequence[str], at: int) -> tuple[Path, str]:
    """Imports the weights. Returns the directory to remove, and the checkpoint in it, which is kept
    if an earlier call with the same directory has made it."""
    out = _out(words[at + 1 :])
    if os.path.lexists(out):
        raise failure("CONFLICT", "the output exists already", file=out.name, expected="a new path")
    root = out.absolute().parent / f".{out.name}.import-{_identity(directory, _dtype(words))}"
    checkpoint = root / "step-0"
    if not (checkpoint / "COMMIT").is_file():
        try:
            _import(directory, out, root, words)
        finally:
            if root.is_dir() and not any(root.iterdir()):  # the import has failed
                _modicum.remove_tree(root)
    return root, str(checkpoint)


def _import(directory: Path, out: Path, root: Path, words: Sequence[str]) -> None:
    """Imports the weights as step 0 of `root`, and reports it on stderr with the user's paths,
    since `root` is removed after the conversion."""
    budget = _values(words).get("--budget")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # they are in the report
        report = import_checkpoint(
            directory, root, step=0, optimizer=NO_OPTIMIZER, dtype=_dtype(words), budget=budget
        )
    for warning in report.warnings:
        print_line(f"modicum: {warning}", sys.stderr)
    if not is_quiet(words):
        what = f"weights of {report.kind} imported for {out} in {report.elapsed_s:.2f} s"
        print_line(f"modicum: {directory}: {what}; {remainder_text(report)}", sys.stderr)


def _dtype(words: Sequence[str]) -> str | None:
    """The dtype of the imported checkpoint: float32 if the program casts it, so that it counts
    values that the new dtype cannot hold."""
    return "float32" if "--dtype" in _values(words) else None


def _identity(directory: Path, dtype: str | None) -> str:
    """A digest of what the import reads: the files are identified by size, inode and mtime."""
    digest = hashlib.blake2b(digest_size=8)
    facts = f"{_modicum.version()}\0{dtype}\0{directory.resolve()}"
    with reading(directory):
        for path in sorted(directory.rglob("*")):
            status = path.stat(follow_symlinks=False)
            facts += f"\0{path.relative_to(directory)}\0{status.st_size}\0{status.st_ino}"
            facts += f"\0{status.st_mtime_ns}"
    digest.update(os.fsencode(facts))
    return digest.hexdigest()


# ---- words


def _values(words: Sequence[str]) -> dict[str, str]:
    """The values of flags, by flag."""
    values = {}
    for word, after in zip(words, (*words[1:], ""), strict=True):
        if word.startswith("-") and word not in SWITCHES:
            name, equals, value = word.partition("=")
            values[name] = value if equals else after
    return values


def _out(words: Sequence[str]) -> Path:
    """The first word after DIR that is neither a flag nor a flag's value."""
    is_value = False
    for word in words:
        if not is_value and not word.startswith("-"):
            return Path(word)
        is_value = word.startswith("-") and "=" not in word and word not in SWITCHES
    raise failure("USAGE", "OUT is missing after DIR", expected="the new directory")
