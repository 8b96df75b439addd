"""A program that trains and saves in the background, within a cage.

    background_memory.py modicum|dcp MODEL ROOT

Says "held BYTES" when it has all its state, and waits for a line on stdin. Then prints a line of
JSON: seconds of steps without a save and during one, of saves, and what the report says.
"""

import gc
import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import transformers
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict

import modicum.torch
from modicum import _modicum

STEPS = 4


def step_s(model: Any, optimizer: Any) -> float:
    for parameter in model.parameters():
        if parameter.grad is None:
            parameter.grad = torch.full_like(parameter, 1e-3)
    begin = time.monotonic()
    optimizer.step()
    return time.monotonic() - begin


def main() -> None:
    by, source, root = sys.argv[1], sys.argv[2], Path(sys.argv[3])
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    config = transformers.AutoConfig.from_pretrained(source)
    with modicum.torch.empty_parameters():
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    optimizer = modicum.torch.AdamW(model.named_parameters())
    modicum.torch.load(
        model, source, dtype=torch.float32, optimizer=optimizer, progress=False, budget="none"
    )
    step_s(model, optimizer)
    gc.collect()
    print("held", _modicum.process_memory()["held_bytes"], flush=True)
    sys.stdin.readline()
    if by == "dcp":
        state = {"model": get_model_state_dict(model)}
        state["optimizer"] = get_optimizer_state_dict(model, optimizer)
        dcp.async_save(state, checkpoint_id=root).result()
        print(json.dumps({}), flush=True)
        return
    how: dict[str, Any] = {"optimizer": optimizer, "budget": "none"}
    blocking = modicum.torch.save(model, root, step=1, **how)
    pause_s = blocking.durable_s
    plain = []
    for _ in range(STEPS):
        time.sleep(pause_s)
        plain.append(step_s(model, optimizer))
    during, reports = [], []
    for number in range(STEPS):
        saving = modicum.torch.save(model, root, step=2 + number, keep=1, background=True, **how)
        time.sleep(pause_s)
        during.append(step_s(model, optimizer))
        reports.append(vars(saving.wait()))
    saving = modicum.torch.save(model, root, step=9, keep=1, background=True, **how)
    without_pause = step_s(model, optimizer)
    told = {"plain": plain, "during": during, "blocking_s": blocking.durable_s}
    told |= {"reports": reports, "without_pause": without_pause, "last": vars(saving.wait())}
    print(json.dumps(told), flush=True)


if __name__ == "__main__":
    main()
