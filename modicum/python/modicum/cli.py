"""The command `modicum`: runs the program that the wheel contains. It imports directories of other
programs for `convert`, since the program reads no pickles, and reads headers from the hub for
`plan` and `inspect`, since the program has no network."""

import os
import sys
from pathlib import Path

from modicum import _modicum


def main() -> None:
    """Replaces this process by the program with execv. Signals then reach the program directly, and
    its exit code is that of the command. A `convert` whose directory must be imported first, and a
    `plan` or `inspect` of a model that is only on the hub, run the program as a child instead, with
    the same output and exit code."""
    program, words = Path(__file__).with_name("modicum"), sys.argv[1:]
    if words[:1] == ["convert"]:
        from modicum.imports.converting import convert

        code = convert(program, words[1:])
        if code is not None:
            sys.exit(code)
    if words[:1] in (["plan"], ["inspect"]) and any(map(_is_uncached_name, words[1:])):
        from modicum.hub.command import run_on_headers

        code = run_on_headers(program, words[0], words[1:])
        if code is not None:
            sys.exit(code)
    os.execv(program, ["modicum", *words])


def _is_uncached_name(word: str) -> bool:
    return word.isascii() and _modicum.is_uncached_name(word)


if __name__ == "__main__":
    main()
