"""Other programs' checkpoints as checkpoints of a run:

    report = modicum.imports.import_checkpoint("output", "RUN", source="DIR")

Needs no torch, runs in one process and streams through staging: no complete tensor is in memory. No
pickle is executed: pickles are read as data, and a name that the other program does not write there
is refused.
"""

from modicum.imports.importing import import_checkpoint as import_checkpoint
from modicum.imports.report import ImportReport as ImportReport
