"""The command `modicum`: runs the program that the wheel contains."""

import os
import sys
from pathlib import Path


def main() -> None:
    """Replaces this process by the program (execv), which gets signals and sets the exit code."""
    program = Path(__file__).with_name("modicum")
    os.execv(program, ["modicum", *sys.argv[1:]])
