"""What processes hold: by phase, drawn, and byte by byte by owner. Needs no torch.

    from modicum import memory

    with memory.phase("wrap"):
        fully_shard(model)
    memory.save("memory-{rank}.jsonl")
    memory.draw("memory.png")
"""

from modicum._drawing import draw
from modicum._phases import Phase, phase, phases, save

__all__ = ["Phase", "draw", "phase", "phases", "save"]
