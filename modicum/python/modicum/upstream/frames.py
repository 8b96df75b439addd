"""Lines of code by the package that they are part of, wherever that package is installed."""

import os
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path


def is_part_of(file: str, packages: Iterable[str]) -> bool:
    """Whether a source file, the `co_filename` of a frame, is installed as part of one of these
    imported packages or modules. A script in a folder with the name of a package is not. Links are
    compared as they are and followed, since a package may be a link or consist of links."""
    spellings = _spellings(file)
    return any(
        spelling.is_relative_to(place)
        for name in packages
        for root in _places(name)
        for place in _spellings(root)
        for spelling in spellings
    )


def _places(name: str) -> Iterator[str]:
    """The folders of an imported package, or the file of an imported module; none if it was not
    imported or is built in."""
    module = sys.modules.get(name)
    folders = [*getattr(module, "__path__", ())]
    yield from folders or filter(None, [getattr(module, "__file__", None)])


def _spellings(path: str) -> set[Path]:
    return {Path(os.path.abspath(path)), Path(os.path.realpath(path))}
