"""Measures the host memory of processes: by phase, as a picture, and by owner. Needs no torch.

    from modicum import memory

    before = memory.held()
    with memory.phase("wrap"):
        fully_shard(model)
    print(memory.attribute(model, optimizer, baseline=before))
    memory.write("memory-{rank}.jsonl")
    memory.draw("memory.html", ["memory-0.jsonl", "memory-1.jsonl"])

docs/guide/measure.md has the tasks.
"""

from modicum.memory.attribution import Attribution as Attribution
from modicum.memory.attribution import Owner as Owner
from modicum.memory.attribution import held as held
from modicum.memory.drawing import draw as draw
from modicum.memory.peaking import Peaks as Peaks
from modicum.memory.peaking import attribute as attribute
from modicum.memory.recording import Phase as Phase
from modicum.memory.recording import phases as phases
from modicum.memory.recording import write as write
from modicum.memory.tracking import phase as phase
from modicum.options.renamed import getattr_of

__getattr__ = getattr_of("modicum.memory")
