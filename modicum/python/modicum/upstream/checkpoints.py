"""accelerate and Trainer: how a script saves its checkpoints and finds them again. Only functions
import accelerate; Trainer is never imported here."""

import functools
import inspect
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from modicum import _modicum
from modicum.upstream.known import KnownFacts
from modicum.upstream.patching import Wrapper, replace, wrap, wrap_everywhere

TRAINER = "transformers.trainer"
_NUMBERED = re.compile(r"checkpoint-\d+")
_DUMMY = "model.safetensors"
"""The file without tensors that transformers writes for an empty state dict."""


def wrap_accelerate(
    stack: ExitStack, methods: Mapping[str, Wrapper], functions: Mapping[str, Wrapper]
) -> None:
    """Until `stack` ends, wraps `methods` of `Accelerator` and `functions` of accelerate's FSDP
    checkpoints by name; these also where other modules, such as transformers' trainer, have
    imported them."""
    from accelerate import Accelerator
    from accelerate.utils import fsdp_utils

    KNOWN.require()
    wrap(stack, Accelerator, methods)
    wrap_everywhere(stack, fsdp_utils, functions)


def has_trainer() -> bool:
    """Whether the program has imported Trainer."""
    return hasattr(sys.modules.get(TRAINER), "Trainer")


def wrap_trainer(
    stack: ExitStack, methods: Mapping[str, Wrapper], functions: Mapping[str, Wrapper]
) -> None:
    """Until `stack` ends, wraps `methods` of Trainer, and `functions` of its module such as those
    that find and remove checkpoints, all by name. Trainer must have been imported."""
    KNOWN_TRAINER.require()
    trainer = sys.modules[TRAINER]
    wrap(stack, trainer.Trainer, methods)
    wrap_everywhere(stack, trainer, functions)


def replace_reading_of_state(stack: ExitStack, check: Callable[[Path], None]) -> None:
    """Until `stack` ends, calls `check` with a checkpoint's directory before Trainer reads its
    state there."""
    cls = sys.modules[TRAINER].TrainerState
    load = cls.load_from_json.__func__

    @functools.wraps(load)
    def load_from_json(cls: Any, json_path: str) -> Any:
        check(Path(json_path).parent)
        return load(cls, json_path)

    replace(stack, cls, "load_from_json", classmethod(load_from_json))


def arguments(function: Callable[..., Any], args: Any, kwargs: Any) -> dict[str, Any]:
    """The arguments of a call by name, including the function's defaults."""
    bound = inspect.signature(function).bind(*args, **kwargs)
    bound.apply_defaults()
    return bound.arguments


# ---- accelerate


def models_of(accelerator: Any) -> list[Any]:
    """The models that `save_state` saves, in order."""
    return list(accelerator._models)


def folder_of(model_index: int) -> str:
    """The subdirectory of a model after the first one, as Trainer and accelerate name it."""
    return f"pytorch_model_fsdp_{model_index}"


def folders_in(directory: Path) -> list[Path]:
    """The subdirectories in which models after the first one may be saved."""
    return sorted(directory.glob(folder_of(0).replace("0", "*")))


def own_names(directory: Path, model_index: int) -> list[str]:
    """The entries of a checkpoint in which accelerate itself saves a model and its optimizer."""
    number = f"_{model_index}" if model_index else "(_0)?"
    name = re.compile(rf"(pytorch_model_fsdp|optimizer){number}(_rank\d+)?(\.bin)?")
    # "optimizer" is the directory to which Modicum writes the state of the first model's optimizer.
    found = {entry for entry in os.listdir(directory) if name.fullmatch(entry)} - {"optimizer"}
    # Modicum and accelerate write a model after the first one to a directory of the same name, but
    # only accelerate's has the file .metadata.
    shared = folder_of(model_index) if model_index else ""
    if shared in found and not (directory / shared / ".metadata").exists():
        found.remove(shared)
    return sorted(found)


def bare(model: Any) -> Any:
    """The module without `torch.compile`'s wrapper."""
    while hasattr(model, "_orig_mod"):
        model = model._orig_mod
    return model


def has_adapters(model: Any) -> bool:
    """Whether the model has adapters of PEFT, with or without PEFT's wrapper."""
    modules = sys.modules.get("peft.tuners.tuners_utils")
    if modules is None:
        return False
    return any(isinstance(module, modules.BaseTunerLayer) for module in model.modules())


def next_directory(accelerator: Any) -> Path | None:
    """The directory that `save_state` would choose itself; None if the caller passes one."""
    if not accelerator.project_configuration.automatic_checkpoint_naming:
        return None
    return Path(accelerator.project_dir, "checkpoints", f"checkpoint_{accelerator.save_iteration}")


@contextmanager
def named_by_caller(accelerator: Any) -> Iterator[None]:
    """A context in which `save_state` writes to the directory that is passed to it, and removes no
    checkpoints."""
    project = accelerator.project_configuration
    with ExitStack() as stack:
        replace(stack, project, "automatic_checkpoint_naming", False)
        yield


def numbered_directories(folder: Path) -> list[Path]:
    """accelerate's checkpoints in a folder: sorted, as by accelerate, by the first number in their
    names."""
    found = [
        (int(number.group()), path)
        for path in (folder.iterdir() if folder.is_dir() else ())
        if (number := re.search(r"[0-9]+(?=[^/]*$)", path.name)) and path.is_dir()
    ]
    return [path for _, path in sorted(found)]


def loses_moments(load: Callable[..., Any], plugin: Any, optimizer: Any) -> bool:
    """Whether accelerate's `load_fsdp_optimizer` would read no moments from sharded files, as that
    of accelerate before 1.13 into an optimizer that has none."""
    is_sharded = plugin.fsdp_version == 2 and "SHARDED" in str(plugin.state_dict_type)
    reads = "get_optimizer_state_dict" in load.__code__.co_names
    return is_sharded and not reads and not optimizer.state


def nothing_amiss() -> Any:
    """What `load_fsdp_model` returns if all tensors were loaded."""
    from torch.nn.modules.module import _IncompatibleKeys

    return _IncompatibleKeys([], [])


def save_config(model: Any, directory: Path) -> None:
    """Writes config, generation config and custom code as `save_pretrained` does, but no
    weights."""
    with _written_aside(directory) as aside, _without_bars():
        model.save_pretrained(aside, state_dict={}, is_main_process=True)


@contextmanager
def _written_aside(directory: Path) -> Iterator[Path]:
    """A directory whose files, without weights, are moved to `directory` at the end of the context:
    `save_pretrained` removes the weights of an earlier save, which may be the model's source."""
    with TemporaryDirectory(prefix=".config-", dir=directory) as folder:
        yield Path(folder)
        for path in Path(folder).iterdir():
            if path.name != _DUMMY:
                _move(path, directory / path.name)


def _move(path: Path, to: Path) -> None:
    """Moves a file or a directory; if there is a directory at `to`, moves its entries into it."""
    if path.is_dir() and to.is_dir() and not to.is_symlink():
        for entry in path.iterdir():
            _move(entry, to / entry.name)
    else:
        _modicum.rename(path, to)


@contextmanager
def _without_bars() -> Iterator[None]:
    """A context without the progress bars of transformers, which appear even if no weights are
    written."""
    from transformers.utils import logging

    # transformers 5.3 has no hook for its bars; it imports them as `logging.tqdm`.
    with ExitStack() as stack:
        if hasattr(logging, "set_tqdm_hook"):
            before = logging.set_tqdm_hook(
                lambda bar, args, options: bar(*args, **options | {"disable": True})
            )
            stack.callback(logging.set_tqdm_hook, before)
        elif logging.is_progress_bar_enabled():
            stack.callback(logging.enable_progress_bar)
            logging.disable_progress_bar()
        yield


# ---- Trainer


def checkpoint_of(trainer: Any, trial: Any) -> Path:
    """The directory of the checkpoint that the trainer would save now."""
    prefix = sys.modules[TRAINER].PREFIX_CHECKPOINT_DIR
    return Path(trainer._get_output_dir(trial=trial), f"{prefix}-{trainer.state.global_step}")


def saves_as_usual(trainer: Any) -> bool:
    """Whether the trainer's class saves models by Trainer's own method."""
    return type(trainer)._save is sys.modules[TRAINER].Trainer._save


def save_companions(trainer: Any, directory: Path) -> None:
    """Writes config, tokenizer and training arguments on rank 0, without weights; not collective.
    Of PEFT's own files it writes only the model card of a PeftModel, since PEFT would write the
    others with weights."""
    # Trainer's `_save` writes on every rank of some versions, and with save_on_each_node on each
    # node. It communicates only for models that transformers has sharded itself.
    if not trainer.is_world_process_zero():
        return
    model = bare(trainer.model)
    with ExitStack() as stack:
        stack.enter_context(_without_bars())
        if hasattr(type(model), "create_or_update_model_card"):

            def save_card(_: str, **options: Any) -> None:
                model.create_or_update_model_card(str(directory))

            replace(stack, model, "save_pretrained", save_card)
        aside = stack.enter_context(_written_aside(directory))
        trainer._save(str(aside), state_dict={})


def replace_push(
    stack: ExitStack, trainer: Any, defer: Callable[[Callable[[], Any]], None]
) -> None:
    """Until `stack` ends, an upload of a checkpoint is not run, but passed to `defer`."""
    push = trainer._push_from_checkpoint
    replace(stack, trainer, "_push_from_checkpoint", lambda folder: defer(lambda: push(folder)))


def push_model(trainer: Any) -> None:
    """Uploads the model, as `save_model` does if the user calls it."""
    trainer.push_to_hub(commit_message="Model save", revision=trainer.args.hub_revision)


def sorted_checkpoints(folder: str, prefix: str = "checkpoint") -> list[Path]:
    """Trainer's checkpoints in a folder, by their numbers, oldest first."""
    from transformers.trainer_utils import sort_checkpoints

    return [Path(path) for path in sort_checkpoints(folder, prefix)]


def newest_first(folder: str) -> list[str]:
    """The checkpoints from which `get_last_checkpoint` chooses: those with the highest numbers
    first."""
    found = reversed(sorted_checkpoints(folder))
    return [os.path.join(folder, path.name) for path in found if _NUMBERED.fullmatch(path.name)]


# ---- known facts


def _begins_with(function: Callable[..., Any], names: str) -> bool:
    return [*inspect.signature(function).parameters][: len(names.split())] == names.split()


def _saves_by_functions() -> bool:
    from accelerate import accelerator
    from accelerate.utils import fsdp_utils

    expected = {
        "save_fsdp_model": "fsdp_plugin accelerator model output_dir model_index",
        "save_fsdp_optimizer": "fsdp_plugin accelerator optimizer model output_dir optimizer_index",
        "load_fsdp_model": "fsdp_plugin accelerator model input_dir model_index",
        "load_fsdp_optimizer": "fsdp_plugin accelerator optimizer model input_dir optimizer_index",
    }
    return all(
        _begins_with(vars(fsdp_utils)[name], names) and hasattr(accelerator, name)
        for name, names in expected.items()
    )


def _saves_by_methods() -> bool:
    from accelerate import Accelerator
    from accelerate.utils import ProjectConfiguration

    names = {"automatic_checkpoint_naming", "total_limit", "iteration"}
    return (
        _begins_with(Accelerator.save_state, "self output_dir")
        and _begins_with(Accelerator.load_state, "self input_dir")
        and _begins_with(Accelerator.save_model, "self model save_directory max_shard_size")
        and names <= {*vars(ProjectConfiguration())}
    )


def _trainer_saves_by_methods() -> bool:
    cls = sys.modules[TRAINER].Trainer
    return (
        _begins_with(cls.train, "self resume_from_checkpoint")
        and _begins_with(cls._save_checkpoint, "self model trial")
        and _begins_with(cls.save_model, "self output_dir _internal_call")
        and _begins_with(cls._save, "self output_dir state_dict")
        and _begins_with(cls._load_from_checkpoint, "self resume_from_checkpoint model")
        and _begins_with(cls._get_output_dir, "self trial")
        and _begins_with(cls._push_from_checkpoint, "self checkpoint_folder")
    )


def _trainer_finds_by_number() -> bool:
    trainer = sys.modules[TRAINER]
    with TemporaryDirectory() as folder:
        for number in (3, 20):
            _modicum.make_directory(Path(folder, f"checkpoint-{number}"))
        found = [path.name for path in sorted_checkpoints(folder)]
        newest: str = trainer.get_last_checkpoint(folder)
        trainer.rotate_checkpoints(output_dir=folder, save_total_limit=1)
        left = os.listdir(folder)
    return (
        found == ["checkpoint-3", "checkpoint-20"]
        and Path(newest).name == "checkpoint-20"
        and left == ["checkpoint-20"]
    )


KNOWN = KnownFacts(
    "accelerate",
    ("1.10.1", "1.15.0"),
    {
        "accelerate.utils saves and loads by save_fsdp_model and three more": _saves_by_functions,
        "Accelerator has save_state, load_state and save_model": _saves_by_methods,
    },
)
KNOWN_TRAINER = KnownFacts(
    "transformers",
    ("5.3.0", "5.23.0"),
    {
        "Trainer saves by _save_checkpoint, save_model and _save": _trainer_saves_by_methods,
        "Trainer finds its checkpoints by their numbers": _trainer_finds_by_number,
    },
)
