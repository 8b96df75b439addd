"""Saves and resumes checkpoints in `loading()`, for unchanged scripts of accelerate and Trainer:

    Accelerator.save_state, Trainer._save_checkpoint, Accelerator.save_model, Trainer.save_model
      | Inside.open          marks the directory as an incomplete checkpoint
      | the original method  accelerate and Trainer write their own files: schedulers, states of
      |                      random number generators, config, tokenizer; our replacements of
      |                      save_fsdp_model and save_fsdp_optimizer only note what to save
      | save_inside          each rank writes its own elements; rank 0 makes COMMIT last
      | rotation, upload

    load_state, resume_from_checkpoint, load_best_model_at_end
      | load_fsdp_model, load_fsdp_optimizer: Modicum reads the directories that it has written;
      |                      accelerate reads all others

Of a PeftModel only the adapters are saved. Three kinds of models are left to accelerate or Trainer:
those that Modicum did not load, those that FSDP2 does not shard, and those with adapters that can't
be saved alone, such as a PeftModel that trains other tensors, too. A warning names the reason.
"""

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from modicum.errors import refusal
from modicum.torch.accelerate.choice import choose, last_checkpoint, require_all_see, train
from modicum.torch.accelerate.loads import Loading
from modicum.torch.loading.origin import origin_of
from modicum.torch.optim.names import warn_script
from modicum.torch.ranks.group import Ranks
from modicum.torch.saving.adapters import why_not_alone
from modicum.torch.saving.inside import (
    CheckpointInDirectory,
    is_checkpoint,
    load_inside,
    load_state_inside,
    require_whole,
    rotate,
    save_inside,
)
from modicum.upstream import checkpoints as upstream
from modicum.upstream.patching import Wrapper
from modicum.upstream.torch_fsdp import reshard
from modicum.upstream.transformers import is_pretrained
from modicum.upstream.wrappers import unwrapped
from modicum.walk.saving import GROUPS_FILE

_LEFT = (
    "modicum: accelerate and Trainer save this model, not Modicum: {}. The checkpoint has no "
    "COMMIT, so a resume does not notice that a save was cut short (docs/guide/accelerate.md)"
)


@dataclass
class _ModelToSave:
    """A model to save, its optimizer if there is one, and the begun save of its directory."""

    flight: CheckpointInDirectory
    model: nn.Module | None = None
    optimizer: torch.optim.Optimizer | None = None


@dataclass
class _OpenCheckpoint:
    """A checkpoint that a script is saving."""

    directory: Path
    kept: dict[int, _ModelToSave]
    """The models to save, by accelerate's index."""
    has_config: bool = False
    """Whether `save_companions` writes the model's config."""
    shard_size: int | str | None = None
    after: list[Callable[[], Any]] = field(default_factory=list)
    """Functions to call once the checkpoint is committed."""


class Checkpoints:
    """Replaces the functions by which a script saves and resumes. The last of `loadings` is the
    innermost context: it gives the arguments and gets the reports."""

    def __init__(self, loadings: Sequence[Loading]) -> None:
        self._loadings = loadings
        self._open: _OpenCheckpoint | None = None
        self._is_left = False  # whether a Trainer is saving whose model is left to it
        self._has_trainer = False
        self._warned: set[str] = set()
        self._found: set[str] = set()  # what get_last_checkpoint has returned

    def wrap_trainer(self, stack: ExitStack) -> None:
        """Wraps Trainer's functions until `stack` ends, once Trainer is imported. May be called
        repeatedly."""
        if not upstream.has_trainer() or self._has_trainer:
            return
        methods: dict[str, Wrapper] = {
            "_save_checkpoint": self._save_checkpoint,
            "save_model": self._save_trained,
            "_load_from_checkpoint": self._load_from_checkpoint,
            "train": partial(train, self._found),
        }
        functions: dict[str, Wrapper] = {
            "rotate_checkpoints": self._rotate,
            "get_last_checkpoint": partial(last_checkpoint, self._found),
        }
        upstream.wrap_trainer(stack, methods, functions)
        upstream.replace_reading_of_state(stack, require_whole)
        self._has_trainer = True

    def wrap_accelerate(self, stack: ExitStack) -> None:
        """Wraps accelerate's functions until `stack` ends."""
        methods: dict[str, Wrapper] = {
            "save_state": self._save_state,
            "load_state": self._load_state,
            "save_model": self._save_model,
        }
        functions: dict[str, Wrapper] = {
            "save_fsdp_model": self._note_model,
            "save_fsdp_optimizer": self._note_optimizer,
            "load_fsdp_model": self._load_model,
            "load_fsdp_optimizer": self._load_optimizer,
        }
        upstream.wrap_accelerate(stack, methods, functions)

    # ---- a checkpoint

    @contextmanager
    def _opened(self, directory: Path, *indices: int) -> Iterator[_OpenCheckpoint]:
        """A context in which the models of these indices, and their optimizers, are noted. On exit
        they are saved: model 0 into `directory`, the others into subdirectories. The checkpoint is
        then committed, on all ranks or on none. Collective."""
        folders = {i: directory / upstream.folder_of(i) if i else directory for i in indices}
        checkpoint = _OpenCheckpoint(
            directory,
            {i: _ModelToSave(CheckpointInDirectory(folder)) for i, folder in folders.items()},
        )
        outer, self._open = self._open, checkpoint
        try:
            with Ranks.of_world().together() as ranks:
                for kept in checkpoint.kept.values():
                    kept.flight.open(ranks)
                for index in indices:
                    self._warn_of_other_files(directory, index, is_first=ranks.rank == 0)
            error: Exception | None = None
            try:
                yield checkpoint
            except Exception as raised:  # raised again below, where all ranks learn of it
                error = raised
            with Ranks.of_world().together() as ranks:
                if error is not None:
                    raise error
                self._save(checkpoint, ranks)
        finally:
            self._open = outer
            for kept in checkpoint.kept.values():
                kept.flight.end()
        for call in checkpoint.after:
            call()

    def _save(self, checkpoint: _OpenCheckpoint, ranks: Ranks) -> None:
        """Saves the models. The first one is saved last: its COMMIT commits the whole directory."""
        options = {**self._loadings[-1]._arguments, "shard_size": checkpoint.shard_size}
        for kept in reversed([*checkpoint.kept.values()]):
            if kept.model is None:
                what = "save_state() or Trainer left out the model of this checkpoint"
                raise refusal("UNSUPPORTED", what, file=kept.flight.directory.name)
            if ranks.rank == 0 and not checkpoint.has_config and is_pretrained(kept.model):
                upstream.save_config(kept.model, kept.flight.directory)
            options["adapters"] = upstream.has_adapters(kept.model)
            report = save_inside(kept.model, kept.flight, kept.optimizer, options, ranks)
            self._loadings[-1].saves.append(report)

    def _decide(self, accelerator: Any, model: Any) -> bool:
        """Decides whether Modicum saves the model, and warns if it does not."""
        reason = "" if self._is_left else _why_left(accelerator, upstream.bare(model))
        if reason:
            self._warn_once(_LEFT.format(reason), is_first=accelerator.is_main_process)
        return reason is None

    def _warn_once(self, what: str, *, is_first: bool) -> None:
        """`is_first`: whether this is the rank that warns."""
        if is_first and what not in self._warned:
            self._warned.add(what)
            warn_script(what)

    def _warn_of_other_files(self, directory: Path, index: int, *, is_first: bool) -> None:
        """Warns if a checkpoint that Modicum writes or reads also has files in which accelerate
        itself has saved the model."""
        found = upstream.own_names(directory, index) if is_first else []
        if found:
            what = f"modicum: {directory} also has {', '.join(found)}, which accelerate wrote. "
            what += "They are neither read nor replaced here, but accelerate reads them outside of "
            what += "loading(): remove them, or save into a new directory"
            self._warn_once(what, is_first=is_first)

    # ---- functions of accelerate

    def _note_model(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        arguments = upstream.arguments(original, args, kwargs)
        if not self._decide(arguments["accelerator"], arguments["model"]):
            return original(*args, **kwargs)
        with self._noted(Path(arguments["output_dir"]), arguments["model_index"]) as kept:
            kept.model = upstream.bare(arguments["model"])

    def _note_optimizer(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        arguments = upstream.arguments(original, args, kwargs)
        if not self._decide(arguments["accelerator"], arguments["model"]):
            return original(*args, **kwargs)
        with self._noted(Path(arguments["output_dir"]), arguments["optimizer_index"]) as kept:
            kept.model = upstream.bare(arguments["model"])
            kept.optimizer = unwrapped(arguments["optimizer"])

    @contextmanager
    def _noted(self, directory: Path, index: int) -> Iterator[_ModelToSave]:
        """The entry of a model in the open checkpoint, if this checkpoint is in `directory`.
        Otherwise opens a checkpoint in `directory`, which is saved when the context ends."""
        if self._open is not None and self._open.directory == directory:
            yield self._open.kept[index]
            return
        with self._opened(directory, index) as checkpoint:
            yield checkpoint.kept[index]

    def _load_model(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        arguments = upstream.arguments(original, args, kwargs)
        directory = _checkpoint_of(Path(arguments["input_dir"]), arguments["model_index"])
        if directory is None:
            return original(*args, **kwargs)
        self._load(
            arguments["accelerator"], arguments["model"], directory, arguments["model_index"]
        )
        return upstream.nothing_amiss()

    def _load(self, accelerator: Any, model: Any, folder: Path, index: int = 0) -> None:
        _require_fsdp2(accelerator, folder)
        directory, is_first = folder.parent if index else folder, accelerator.is_main_process
        self._warn_of_other_files(directory, index, is_first=is_first)
        resumed = load_inside(upstream.bare(model), folder, self._resume_arguments())
        self._loadings[-1].reports.append(resumed.load)

    def _resume_arguments(self) -> dict[str, Any]:
        names = ("ledger", "budget", "strategy", "staging", "fork", "progress", "check")
        return {name: self._loadings[-1]._arguments[name] for name in names}

    def _load_optimizer(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        arguments = upstream.arguments(original, args, kwargs)
        directory = _checkpoint_of(Path(arguments["input_dir"]), arguments["optimizer_index"])
        if directory is None:
            if upstream.loses_moments(original, arguments["fsdp_plugin"], arguments["optimizer"]):
                what = "this accelerate reads no moments of its checkpoint into a new optimizer"
                expected = "accelerate>=1.13, or a checkpoint that was saved within loading()"
                got = str(arguments["input_dir"])
                raise refusal("UNSUPPORTED", what, expected=expected, got=got)
            return original(*args, **kwargs)
        _require_fsdp2(arguments["accelerator"], directory)
        model, optimizer = upstream.bare(arguments["model"]), unwrapped(arguments["optimizer"])
        return load_state_inside(model, optimizer, directory, self._resume_arguments())

    # ---- methods of Accelerator

    def _save_state(
        self,
        original: Callable[..., Any],
        accelerator: Any,
        output_dir: Any = None,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        models = upstream.models_of(accelerator)
        indices = [i for i, model in enumerate(models) if self._decide(accelerator, model)]
        chosen = upstream.next_directory(accelerator)
        directory = chosen or (Path(output_dir) if output_dir is not None else None)
        if not indices or directory is None:
            return original(accelerator, output_dir, *args, **kwargs)
        if chosen:
            _require_new(chosen)
        with self._opened(directory, *indices) as checkpoint:
            with upstream.named_by_caller(accelerator):
                result = original(accelerator, str(directory), *args, **kwargs)
            limit = accelerator.project_configuration.total_limit
            if chosen and limit is not None and accelerator.is_main_process:
                checkpoint.after.append(lambda: _rotate_accelerates(directory, limit))
        return result

    def _load_state(
        self,
        original: Callable[..., Any],
        accelerator: Any,
        input_dir: Any = None,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        next_one = upstream.next_directory(accelerator)
        if input_dir is not None:
            require_all_see(Path(input_dir).expanduser())
        elif next_one is not None:
            folder = next_one.parent
            input_dir = choose(lambda: upstream.numbered_directories(folder)[::-1])
        return original(accelerator, input_dir, *args, **kwargs)

    def _save_model(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        arguments = upstream.arguments(original, args, kwargs)
        model, directory = arguments["model"], arguments["save_directory"]
        # Of a model with adapters accelerate writes the base model, too; Modicum would not.
        is_left = upstream.has_adapters(model) or not arguments["safe_serialization"]
        is_left |= os.path.isfile(directory)  # accelerate reports it
        if is_left or not self._decide(arguments["self"], model):
            return original(*args, **kwargs)
        with self._opened(Path(directory), 0) as checkpoint:
            checkpoint.kept[0].model = upstream.bare(model)
            checkpoint.shard_size = arguments["max_shard_size"]
        return None

    # ---- methods and functions of Trainer

    def _save_checkpoint(
        self, original: Callable[..., Any], trainer: Any, model: Any, trial: Any, *args: Any
    ) -> Any:
        if not self._decide_for(trainer):
            self._is_left, outer = True, self._is_left
            try:
                return original(trainer, model, trial, *args)
            finally:
                self._is_left = outer
        with self._opened(upstream.checkpoint_of(trainer, trial), 0) as checkpoint:
            with ExitStack() as stack:
                upstream.replace_push(stack, trainer, checkpoint.after.append)
                return original(trainer, model, trial, *args)

    def _save_trained(
        self,
        original: Callable[..., Any],
        trainer: Any,
        output_dir: Any = None,
        _internal_call: bool = False,
    ) -> Any:
        if not self._decide_for(trainer):
            return original(trainer, output_dir, _internal_call)
        directory = Path(trainer.args.output_dir if output_dir is None else output_dir)
        with self._noted(directory, 0) as kept:
            assert self._open is not None
            self._open.has_config = True
            kept.model = upstream.bare(trainer.model)
            upstream.save_companions(trainer, directory)
        if trainer.args.push_to_hub and not _internal_call:
            upstream.push_model(trainer)
        return None

    def _decide_for(self, trainer: Any) -> bool:
        """Decides whether Modicum saves the trainer's model, as `_decide`."""
        if not self._decide(trainer.accelerator, trainer.model):
            return False
        is_usual = upstream.saves_as_usual(trainer)
        if not is_usual:
            what = _LEFT.format(f"{type(trainer).__name__} has its own `_save`")
            self._warn_once(what, is_first=trainer.accelerator.is_main_process)
        return is_usual

    def _load_from_checkpoint(
        self,
        original: Callable[..., Any],
        trainer: Any,
        resume_from_checkpoint: Any,
        model: Any = None,
    ) -> Any:
        directory = _checkpoint_of(Path(resume_from_checkpoint), 0)
        if directory is None or not trainer.is_fsdp_enabled:
            return original(trainer, resume_from_checkpoint, model)
        _require_state(directory)
        resumed = trainer.model if model is None else model
        return self._load(trainer.accelerator, resumed, directory)

    def _rotate(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        arguments = upstream.arguments(original, args, kwargs)
        folder, limit = arguments["output_dir"], arguments["save_total_limit"]
        best = arguments["best_model_checkpoint"]
        saved = "" if self._open is None else self._open.directory.name

        def remove_oldest() -> None:
            found = upstream.sorted_checkpoints(folder, arguments["checkpoint_prefix"])
            if limit is None or limit <= 0 or not any(map(is_checkpoint, found)):
                original(*args, **kwargs)
            else:
                rotate(found, limit, Path(best) if best else None, Path(folder), saved)

        if self._open is not None:
            self._open.after.append(remove_oldest)
        else:
            remove_oldest()


def _why_left(accelerator: Any, model: Any) -> str | None:
    """Why Modicum does not save the model; None if it does. It saves a model that it has loaded, if
    FSDP2 shards it and, if it has adapters, if a save of these alone is complete."""
    if not isinstance(model, nn.Module) or origin_of(model) is None:
        return "Modicum has not loaded it"
    if not accelerator.is_fsdp2:
        return f"FSDP2 does not shard it (distributed_type {accelerator.distributed_type.value})"
    if not upstream.has_adapters(model):
        return None
    reshard(model)
    return why_not_alone(model)


def _checkpoint_of(directory: Path, index: int) -> Path | None:
    """The directory in which Modicum has saved the model `index` of a checkpoint; None if Modicum
    did not write the checkpoint. Collective: rank 0 decides. Raises UNCOMMITTED or INTEGRITY if the
    checkpoint is incomplete."""

    def find() -> str | None:
        if not is_checkpoint(directory):
            return None
        require_whole(directory)
        return str(directory / upstream.folder_of(index) if index else directory)

    with Ranks.of_world().together() as ranks:
        found, _ = ranks.once(find, lambda: None)
    return None if found is None else Path(found)


def _require_fsdp2(accelerator: Any, directory: Path) -> None:
    if not accelerator.is_fsdp2:
        what, got = "a resume from Modicum's checkpoint", str(accelerator.distributed_type)
        raise refusal("UNSUPPORTED", what, file=directory.name, expected="FSDP2", got=got)


def _require_state(directory: Path) -> None:
    """Raises `UsageError` on all ranks if a checkpoint of Modicum has no optimizer state: Trainer
    would begin optimizer and scheduler anew, at the step of the checkpoint. Collective."""
    with Ranks.of_world().together() as ranks:
        has_state, _ = ranks.once((directory / GROUPS_FILE).exists, lambda: None)
        if not has_state:
            what = "the checkpoint has no optimizer state to resume from, as with "
            what += "save_only_model=True"
            expected = "a checkpoint saved without save_only_model; or, to begin a new run, its "
            expected += "path in from_pretrained() and train() without resume_from_checkpoint"
            raise refusal("MISMATCH", what, file=directory.name, expected=expected)


def _require_new(directory: Path) -> None:
    """Raises `UsageError` on all ranks if the directory exists, as accelerate does on those that
    see it. Collective."""
    with Ranks.of_world().together() as ranks:
        exists, _ = ranks.once(directory.exists, lambda: None)
        if exists:
            what = "the checkpoint exists already: set project_configuration.iteration to the next "
            what += "number, or remove it"
            raise refusal("USAGE", what, file=directory.name)


def _rotate_accelerates(saved: Path, limit: int) -> None:
    # `rotate` first moves a checkpoint to the last argument, which is outside of the folder, since
    # accelerate takes every directory there for a checkpoint. The folder may be a link to a
    # directory of another file system.
    folder = saved.parent.resolve()
    rotate(upstream.numbered_directories(folder), limit, None, folder.parent, saved.name)
