"""The command `modicum`: runs the program that the wheel contains."""

import os
import sys
from pathlib import Path


def main() -> None:
    """Replaces this process by the program with execv. Signals then reach the program directly, and
    its exit code is that of the command."""
    program = Path(__file__).with_name("modicum")
    os.execv(program, ["modicum", *sys.argv[1:]])
