"""The command `modicum`: runs the program that the wheel contains. It imports directories of other
programs for `convert`, since the program reads no pickles."""

import os
import sys
from pathlib import Path


def main() -> None:
    """Replaces this process by the program with execv. Signals then reach the program directly, and
    its exit code is that of the command. A `convert` whose directory must be imported first runs
    the program as a child instead, with the same output and exit code."""
    program, words = Path(__file__).with_name("modicum"), sys.argv[1:]
    if words[:1] == ["convert"]:
        from modicum.imports.converting import convert

        code = convert(program, words[1:])
        if code is not None:
            sys.exit(code)
    os.execv(program, ["modicum", *words])


if __name__ == "__main__":
    main()
