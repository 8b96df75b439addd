"""Modicum for PyTorch programs:

    with modicum.torch.empty_parameters():
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    for block in model.model.layers:
        fully_shard(block)
    fully_shard(model)
    optimizer = modicum.torch.AdamW(model.named_parameters(), lr=1e-4)
    if any(Path("run").glob("step-*/COMMIT")):  # a checkpoint of the run, saved in any world
        resumed = modicum.torch.resume(model, "run", optimizer=optimizer)
        first, epoch = resumed.step, resumed.extra["epoch"]
    else:
        report = modicum.torch.load(model, "base", optimizer=optimizer, budget="200GiB")
        report.print()
        first, epoch = 0, 0
    train(model, optimizer, first, epoch)
    modicum.torch.save(model, "run", step=100, optimizer=optimizer, extra={"epoch": 3})

A *checkpoint* is a directory of Hugging Face files, or one that `save` has written; a *run* is the
directory of all saved checkpoints, `run/step-N` (its file `latest` is for people). If all
checkpoints of a run are damaged, `resume` raises an error, so that training does not start from
`base` again unnoticed. Make a scheduler before `resume`, and load its state from `resumed.extra`
after it: one that is made afterwards overwrites the resumed `lr`. Importing this package imports
torch, but not transformers or accelerate, and patches nothing.
"""

from modicum.options import MemoryPolicy as MemoryPolicy
from modicum.options import SaveOptions as SaveOptions
from modicum.options.renamed import getattr_of
from modicum.recipes import LoadRules as LoadRules
from modicum.torch.build.empty import empty_parameters as empty_parameters
from modicum.torch.loading.full_state_dict import (
    fsdp2_load_full_state_dict as fsdp2_load_full_state_dict,
)
from modicum.torch.loading.full_state_dict import load_full_state_dict as load_full_state_dict
from modicum.torch.loading.load import load as load
from modicum.torch.optim.adamw import AdamW as AdamW
from modicum.torch.optim.protection import protect as protect
from modicum.torch.saving.background import AsyncSave as AsyncSave
from modicum.torch.saving.preemption import Preemption as Preemption
from modicum.torch.saving.preemption import save_on_sigterm as save_on_sigterm
from modicum.torch.saving.report import ResumeReport as ResumeReport
from modicum.torch.saving.report import SaveReport as SaveReport
from modicum.torch.saving.resume import resume as resume
from modicum.torch.saving.save import async_save as async_save
from modicum.torch.saving.save import save as save
from modicum.torch.shards.rebinding import rebind_parameters as rebind_parameters
from modicum.walk.load_report import LoadReport as LoadReport

__getattr__ = getattr_of("modicum.torch", "accelerate", "dcp", "deepspeed", "trainer")
