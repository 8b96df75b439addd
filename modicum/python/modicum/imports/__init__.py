"""Other programs' checkpoints as checkpoints of a run:

    report = modicum.imports.import_checkpoint("OTHER_DIR", "RUN", source="MODEL_DIR")

Needs no torch, runs in one process and streams through staging: no complete tensor is in memory. No
pickle is executed: pickles are read as data, and one that names a class or function which the other
program does not write is refused.
"""

from modicum.imports.importing import import_checkpoint as import_checkpoint
from modicum.imports.report import ImportReport as ImportReport
