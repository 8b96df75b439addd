"""Writes the Unicode tables of RE2, which Debian's sources of it lack, with RE2's own generators.

re2_tables.py GENERATOR FOLDER UNICODE: runs GENERATOR.py of FOLDER with the files of
UNICODE, those of Debian's unicode-data. Prints C++.
"""

import functools
import importlib
import sys
import types
import urllib.request


def main(generator: str, folder: str, data: str) -> None:
    sys.modules["six.moves"] = types.ModuleType("six.moves")  # RE2 asks for Python 2's urllib, too
    sys.modules["six.moves"].urllib = urllib
    sys.modules["six"] = types.ModuleType("six")
    sys.path.insert(0, folder)
    unicode = importlib.import_module("unicode")
    for name in ("CaseGroups", "Categories", "Scripts"):
        setattr(unicode, name, functools.partial(getattr(unicode, name), data))
    importlib.import_module(generator).main()


if __name__ == "__main__":
    main(*sys.argv[1:])
