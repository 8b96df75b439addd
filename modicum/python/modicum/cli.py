"""The command `modicum`: the program that the wheel carries."""

import os
import sys
from pathlib import Path


def main() -> None:
    """Becomes the program, so that its signals, its exit code and its children are its own."""
    program = Path(__file__).with_name("modicum")
    os.execv(program, ["modicum", *sys.argv[1:]])
