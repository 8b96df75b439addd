"""Which checkpoint a script of accelerate or Trainer resumes from: all ranks take the same one, of
which they have compared every byte, and skip damaged ones."""

import functools
import os
from collections.abc import Callable, Iterable
from itertools import dropwhile
from pathlib import Path
from typing import Any

import torch.distributed as dist

from modicum.torch.optim.names import warn_script
from modicum.torch.ranks.group import Ranks
from modicum.torch.saving.inside import fault_for_all, fault_of
from modicum.torch.saving.shared import seen_by_all
from modicum.upstream import checkpoints as upstream


def last_checkpoint(returned: set[str], original: Callable[..., Any], folder: Any) -> Any:
    """In place of Trainer's `get_last_checkpoint`. What it returns on several ranks is added to
    `returned`."""
    if original(folder) is None:
        return None
    found = functools.partial(upstream.newest_first, folder)
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return choose(found)
    # A script may call this on one rank alone. `train` compares the values.
    last = next(filter(_usable_or_warn, found()), None)
    if last:
        returned.add(last)
    return last


def train(
    returned: set[str],
    original: Callable[..., Any],
    trainer: Any,
    resume_from_checkpoint: Any = None,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Around `Trainer.train`. `returned`: by `last_checkpoint`."""
    is_found = str(resume_from_checkpoint) in returned
    chosen = checkpoint_to_resume(resume_from_checkpoint, trainer.args.output_dir, is_found)
    return original(trainer, chosen, *args, **kwargs)


def checkpoint_to_resume(asked: Any, folder: str, is_found: bool) -> Any:
    """The checkpoint that all ranks resume from. Instead of True, and of a damaged one that
    `last_checkpoint` has returned on rank 0, it is the newest whole one; if there is none, `asked`.
    Collective. `is_found`: whether `last_checkpoint` has returned `asked`."""
    with Ranks.of_world().together() as ranks:
        ranks.agree_on({"bool of argument resume_from_checkpoint": str(bool(asked))})
        is_choice, _ = ranks.once(lambda: asked is True or is_found, lambda: None)
    if not asked:
        return asked
    if not is_choice:
        require_all_see(Path(asked))
        return asked

    def find() -> Iterable[str]:
        if not is_found:
            return upstream.newest_first(folder)
        found = upstream.newest_first(os.path.dirname(asked))
        return dropwhile(lambda path: path != str(asked), found)

    return choose(find) or asked


def choose(find: Callable[[], Iterable[str | Path]]) -> str | None:
    """The first of the checkpoints that rank 0 finds from which a run can resume. Compares every
    byte, a part on each rank. Rank 0 warns of those that are skipped. Collective."""
    with Ranks.of_world().together() as ranks:
        found, _ = ranks.once(lambda: [str(folder) for folder in find()], lambda: None)
        for folder in found:
            reason = fault_for_all(Path(folder), ranks)
            if not reason:
                return str(folder)
            if ranks.rank == 0:
                _warn_of_skipped(folder, reason)
    return None


def require_all_see(directory: Path) -> None:
    """Raises `IoError` on all ranks if only some of them see the directory. Collective."""
    with Ranks.of_world().together() as ranks:
        seen_by_all(directory, ranks)


def _usable_or_warn(directory: str) -> bool:
    """Returns whether a script can resume from the checkpoint; if not, rank 0 warns."""
    reason = fault_of(Path(directory))
    if reason and dist.get_rank() == 0:
        _warn_of_skipped(directory, reason)
    return not reason


def _warn_of_skipped(directory: str, reason: str) -> None:
    warn_script(f"modicum: {os.path.basename(directory)} is skipped: {reason}")
