#!python
"""The command `modicum` of the wheel, which installers copy to the folder of commands. For verbs
with which `modicum.cli` does nothing it runs the program at once: importing the package would take
longer than `modicum --help` does."""

import os
import sys
from importlib.util import find_spec

if sys.argv[1:2] in (["convert"], ["inspect"], ["plan"]):
    from modicum.cli import main

    main()
else:
    (folder,) = find_spec("modicum").submodule_search_locations
    os.execv(os.path.join(folder, "modicum"), ["modicum", *sys.argv[1:]])
