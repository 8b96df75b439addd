"""Acts (functions that ranks run by name, see torch_rank.py): scripts that save checkpoints and
resume by accelerate's and Trainer's own calls, within `modicum.torch.accelerate.loading` or without
it."""

import contextlib
import ctypes
import gc
import os
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import accelerate_rank
import saving_rank
import torch
import torch.distributed as dist
import transformers
from nested_options import nested

import modicum.torch
import modicum.torch.accelerate

STEPS_AFTER = 3
OPTIMIZERS: dict[str, Callable[..., Any]] = {
    "torch": torch.optim.AdamW,
    "modicum": modicum.torch.AdamW,
    "sgd": torch.optim.SGD,
}


@contextlib.contextmanager
def script_context(by: str, **options: Any) -> Iterator[Any]:
    """FSDP2 on CPUs with seed 1 and, if `by` is "modicum", within `loading(**options)`. Yields the
    result of `loading`, else None."""
    around: Any = contextlib.nullcontext()
    if by == "modicum":
        around = modicum.torch.accelerate.loading(
            progress=False, **nested(options, "rules", "memory")
        )
    torch.manual_seed(1)
    with accelerate_rank.fsdp2_on_cpus(), around as loading:
        yield loading


@contextlib.contextmanager
def warned() -> Iterator[list[str]]:
    """Collects the texts of Modicum's warnings. The list is filled when the context ends."""
    texts: list[str] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield texts
    texts += [str(one.message) for one in caught if str(one.message).startswith("modicum:")]


def reports(loading: Any) -> list[dict[str, Any]]:
    """The reports of all saves within `loading`."""
    return [vars(saved) for saved in loading.saves] if loading is not None else []


# ---- accelerate


def read_model(directory: str, adapters: bool | str) -> Any:
    """A model of `from_pretrained` in float32.

    Args:
        adapters: False: none. True: the model is within a PeftModel, which trains the adapters.
            "and a norm": it also trains one norm of the base model. "and norms": it also trains
            copies of all norms, which PEFT saves with the adapters.
    """
    if adapters:
        import peft  # noqa: F401  (loading() checks for it when the model is built)
    model = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    copied = {"modules_to_save": ["norm"]} if adapters == "and norms" else {}
    made = accelerate_rank.with_adapters(model, **copied) if adapters else model
    if adapters == "and a norm":
        model.model.norm.weight.requires_grad_(True)
    return made


def prepared(
    directory: str, optimizer: str, adapters: bool | str = False, **plugin: Any
) -> tuple[Any, ...]:
    """The accelerator, and the prepared model, optimizer and scheduler.

    Args:
        plugin: arguments of `accelerator_of`; `project`, a directory for automatically named
            checkpoints; `limit`, how many of these accelerate keeps.
    """
    project = {name: plugin.pop(name) for name in ("project", "limit") if name in plugin}
    accelerator = accelerate_rank.accelerator_of(**plugin)
    if project:
        config = accelerator.project_configuration
        config.project_dir, config.total_limit = project["project"], project["limit"]
        config.automatic_checkpoint_naming = True
    model = read_model(directory, adapters)
    model.train()
    stepping = OPTIMIZERS[optimizer](model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.LinearLR(stepping, 0.5, total_iters=8)
    return accelerator, *accelerator.prepare(model, stepping, scheduler)


def trained(made: tuple[Any, ...], count: int) -> list[tuple[str, str]]:
    """Makes `count` steps. Returns the loss and the learning rate of each, in hexadecimal, which
    shows all bits. The tokens come from torch's default generator, whose state accelerate saves:
    after a resume they are those of an uninterrupted run."""
    accelerator, model, optimizer, scheduler = made
    vocabulary = model.get_input_embeddings().num_embeddings
    numbers = []
    for _ in range(count):
        tokens = torch.randint(vocabulary, (1, 12))
        loss = model(input_ids=tokens, labels=tokens).loss
        accelerator.backward(loss)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        numbers.append((loss.item().hex(), float(optimizer.param_groups[0]["lr"]).hex()))
    return numbers


def whole(made: tuple[Any, ...]) -> dict[str, str]:
    """`saving_rank.whole` of the result of `prepared`."""
    _, model, optimizer, _ = made
    return saving_rank.whole(model, optimizer.optimizer)


def accelerate_saves(
    directory: str, folder: str | None, by: str, optimizer: str = "torch", *,
    steps: int = 2, times: int = 1, **plugin: Any,
) -> dict[str, Any]:  # fmt: skip
    """Makes `steps` steps and calls `save_state`, `times` times, then makes STEPS_AFTER more steps.
    Returns the state at the last save, and the results of the steps after it."""
    with script_context(by) as loading:
        made = prepared(directory, optimizer, **plugin)
        torch.manual_seed(7 + dist.get_rank())
        with warned() as texts:
            for _ in range(times):
                trained(made, steps)
                made[0].save_state(folder)
        told = {"saved": whole(made), "then": trained(made, STEPS_AFTER)}
        return told | {"reports": reports(loading), "warned": texts}


def accelerate_resumes(
    directory: str, folder: str | None, by: str, optimizer: str = "torch", **plugin: Any
) -> dict[str, Any]:
    with script_context(by) as loading:
        made = prepared(directory, optimizer, **plugin)
        with warned() as texts:
            made[0].load_state(folder)
        told = {"loaded": whole(made), "then": trained(made, STEPS_AFTER), "warned": texts}
        return told | {"loads": len(loading.reports) if loading else 0}


def accelerate_saves_model(
    directory: str, folder: str, size: str, adapters: bool = False
) -> dict[str, Any]:
    """Makes one step, and calls `save_model` with files of at most `size`."""
    with script_context("modicum") as loading:
        made = prepared(directory, "torch", adapters)
        trained(made, 1)
        made[0].save_model(made[1], folder, max_shard_size=size)
        return {"saved": whole(made), "reports": reports(loading)}


def adapters_with_another(directory: str, folder: str, root: str) -> dict[str, Any]:
    """Saves a PeftModel that also trains a norm of the base, twice by `save_state`, and then by
    `modicum.torch.save`, as docs/guide/accelerate.md advises."""
    with script_context("modicum") as loading:
        made = prepared(directory, "modicum", adapters="and a norm")
        trained(made, 1)
        with warned() as texts:
            made[0].save_state(folder)
            made[0].save_state(f"{folder}-again")
        _, model, optimizer, _ = made
        modicum.torch.save(
            model,
            root,
            step=1,
            optimizer=optimizer.optimizer,
            options=modicum.torch.SaveOptions(adapters=False),
        )
        return {"saved": whole(made), "warned": texts, "reports": reports(loading)}


def adapters_with_another_resumed(directory: str, root: str) -> dict[str, str]:
    with script_context("modicum"):
        _, model, optimizer, _ = made = prepared(directory, "modicum", adapters="and a norm")
        modicum.torch.resume(model, root, optimizer=optimizer.optimizer, progress=False)
        return whole(made)


# ---- Trainer


class Recorder(transformers.TrainerCallback):
    """Records the loss of each step, in hexadecimal, and the names of the checkpoints after each
    save. Ends the training after step `stop_at`."""

    def __init__(self, stop_at: int | None) -> None:
        self.losses: dict[int, str] = {}
        self.saved: list[list[str]] = []
        self.stop_at = stop_at

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        if logs and "loss" in logs:
            self.losses[state.global_step] = float(logs["loss"]).hex()

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.saved.append(sorted(one for one in os.listdir(args.output_dir) if "check" in one))

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self.stop_at is not None and state.global_step >= self.stop_at:
            control.should_training_stop = True


class WithOwnSave(transformers.Trainer):
    """Writes the weights by a method of its own."""

    def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
        super()._save(output_dir, state_dict)
        if self.args.should_save:  # the other ranks call this too, and make no directory
            Path(output_dir, "own.txt").touch()


def trainer_of(directory: str, folder: str, optimizer: str, callbacks: Any, **how: Any) -> Any:
    sharded, adapters = how.pop("sharded", False), how.pop("adapters", False)
    kind = WithOwnSave if how.pop("own_save", False) else transformers.Trainer
    how = {"save_strategy": "steps"} | how
    arguments = transformers.TrainingArguments(
        folder, use_cpu=True, fsdp=True, learning_rate=1e-2, lr_scheduler_type="linear",
        fsdp_config={
            "version": 2,
            "auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
            "cpu_ram_efficient_loading": False,
            "activation_checkpointing": bool(adapters),
            "state_dict_type": "SHARDED_STATE_DICT" if sharded else "FULL_STATE_DICT",
        },
        per_device_train_batch_size=1, logging_steps=1, logging_nan_inf_filter=False,
        report_to="none", disable_tqdm=True, **how,
    )  # fmt: skip
    model = read_model(directory, adapters)
    rows = torch.randint(model.config.vocab_size, (24, 12), generator=torch.manual_seed(0))
    data = [{"input_ids": row, "labels": row} for row in rows]
    cls, options = OPTIMIZERS[optimizer], {"lr": 1e-2, "weight_decay": 0.01}
    return kind(
        model, arguments, train_dataset=data, callbacks=callbacks,
        eval_dataset=data[:4], optimizer_cls_and_kwargs=(cls, options),
    )  # fmt: skip


def trains(
    directory: str, folder: str, by: str, optimizer: str = "torch", *,
    stop_at: int | None = None, resume: bool | str = False, final: bool = False, **how: Any,
) -> dict[str, Any]:  # fmt: skip
    """Trains by Trainer. `resume`: as for `train`, or "last" for the result of
    `get_last_checkpoint`. `final`: ends with `trainer.save_model()`. `how`: TrainingArguments, and
    `sharded`, `adapters` and `own_save` of `trainer_of`."""
    with script_context(by) as loading:
        recorder = Recorder(stop_at)
        trainer = trainer_of(directory, folder, optimizer, [recorder], **how)
        with warned() as texts:
            if resume == "last":
                resume = transformers.trainer_utils.get_last_checkpoint(folder)
            trainer.train(resume_from_checkpoint=resume or None)
        if final:
            trainer.save_model()
        stepping = trainer.optimizer.optimizer
        return {
            "losses": recorder.losses,
            "saved": recorder.saved,
            "end": saving_rank.whole(trainer.model, stepping),
            "best": trainer.state.best_model_checkpoint,
            "reports": reports(loading),
            "warned": texts,
        }


def trains_in(cage: str, **arguments: Any) -> None:
    """Runs `trains` with these arguments in a memory cgroup. `cage` is the path of the cgroup's
    cgroup.procs."""
    Path(cage).write_text(str(os.getpid()))
    # For both lines see accelerate_rank.script.
    ctypes.CDLL(None).mallopt(accelerate_rank.M_MMAP_THRESHOLD, 1 << 18)
    gc.freeze()
    trains(**arguments)


def patched() -> dict[str, Any]:
    """The functions that `loading` replaces: all of them; those that differ within the context;
    and those that differ after it has ended, normally and by an exception."""
    import accelerate
    import accelerate.accelerator
    import accelerate.utils
    import accelerate.utils.fsdp_utils
    import transformers.trainer
    import transformers.trainer_utils

    owners = {
        accelerate.utils.fsdp_utils: ["save_fsdp_model", "load_fsdp_optimizer"],
        accelerate.utils: ["save_fsdp_model", "save_fsdp_optimizer", "load_fsdp_model"],
        accelerate.accelerator: ["save_fsdp_model", "save_fsdp_optimizer", "load_fsdp_model"],
        transformers.trainer: [
            "save_fsdp_model", "save_fsdp_optimizer", "load_fsdp_model", "load_fsdp_optimizer",
            "rotate_checkpoints", "get_last_checkpoint",
        ],
        transformers.trainer_utils: ["rotate_checkpoints", "get_last_checkpoint"],
        accelerate.Accelerator: ["save_state", "load_state", "save_model"],
        transformers.Trainer: ["_save_checkpoint", "save_model", "_load_from_checkpoint", "train"],
        transformers.trainer.TrainerState: ["load_from_json"],
    }  # fmt: skip

    def now() -> dict[str, Any]:
        return {f"{o.__name__}.{n}": vars(o)[n] for o, names in owners.items() for n in names}

    def differing(before: dict[str, Any]) -> list[str]:
        return [name for name, of in now().items() if before[name] is not of]

    before = now()
    with modicum.torch.accelerate.loading():
        inside = differing(before)
        imported = transformers.trainer.save_fsdp_model
        # As in a module that is imported within the context: it gets the replacement.
        globals()["save_fsdp_model"] = imported
    told = {"all": [*before], "inside": inside, "after": differing(before)}
    told["imported"] = globals().pop("save_fsdp_model") is imported
    with contextlib.suppress(ZeroDivisionError), modicum.torch.accelerate.loading():
        raise ZeroDivisionError
    return told | {"after an error": differing(before)}


ACTS: dict[str, Callable[..., Any]] = {
    "accelerate_saves": accelerate_saves,
    "accelerate_resumes": accelerate_resumes,
    "accelerate_saves_model": accelerate_saves_model,
    "adapters_with_another": adapters_with_another,
    "adapters_with_another_resumed": adapters_with_another_resumed,
    "trains": trains,
    "trains_in": trains_in,
    "patched": patched,
}
