"""What processes hold: by phase, drawn, and byte by byte by owner. Needs no torch.

from modicum import memory

before = memory.held()
with memory.phase("wrap"):
    fully_shard(model)
print(memory.attribute(model, optimizer, baseline=before))
memory.save("memory-{rank}.jsonl")
memory.draw("memory.png", ["memory-0.jsonl", "memory-1.jsonl"])
"""

from modicum.memory.attribution import Attribution, Owner, attribute, held
from modicum.memory.drawing import draw
from modicum.memory.recording import Phase, phase, phases, save

__all__ = [
    "Attribution",
    "Owner",
    "Phase",
    "attribute",
    "draw",
    "held",
    "phase",
    "phases",
    "save",
]
