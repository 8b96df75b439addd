"""What a rank cleans up after an act, so that the next act begins as in a new process."""

import contextlib
import gc
import os
import random
import signal
import socket
import sys
import threading
from types import ModuleType
from typing import Any

import numpy
import torch
import torch.distributed as dist
from torch.distributed.tensor.debug import _clear_sharding_prop_cache

from modicum.torch.optim import in_flight

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGALRM)
UPSTREAM = ("torch.nn", "torch.optim", "torch.distributed.checkpoint", "accelerate", "peft")
UPSTREAM += ("accelerate.accelerator", "accelerate.utils", "accelerate.utils.fsdp_utils")
UPSTREAM += ("transformers.modeling_utils", "transformers.trainer", "transformers.trainer_utils")


class Process:
    """The state of this process, for `restore`."""

    def __init__(self) -> None:
        self._environment, self._folder = dict(os.environ), os.getcwd()
        self._path, self._words = [*sys.path], [*sys.argv]
        self._cpus, self._host = os.sched_getaffinity(0), socket.gethostname
        self._handlers = {number: signal.getsignal(number) for number in SIGNALS}
        self._threads = set(threading.enumerate())
        self._dtype, self._device = torch.get_default_dtype(), torch.get_default_device()
        self._cpu_threads = torch.get_num_threads()
        self._is_deterministic = torch.are_deterministic_algorithms_enabled()
        self._random = (random.getstate(), numpy.random.get_state(), torch.get_rng_state())
        self._attributes = attributes()

    def restore(self) -> list[str]:
        """Together with all other ranks: restores the state, and ends process groups. Returns what
        an act has left behind and should have undone itself."""
        now = attributes()
        left = self._left(now)
        os.environ.clear()
        os.environ.update(self._environment)
        os.chdir(self._folder)
        sys.path[:], sys.argv[:] = self._path, self._words
        os.sched_setaffinity(0, self._cpus)
        socket.gethostname = self._host
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        torch.set_num_threads(self._cpu_threads)
        torch.use_deterministic_algorithms(self._is_deterministic)
        torch.set_grad_enabled(True)
        python, of_numpy, of_torch = self._random
        random.setstate(python)
        numpy.random.set_state(of_numpy)
        torch.set_rng_state(of_torch)
        gc.collect()
        end_groups()
        self._attributes = now | self._attributes  # with those of modules imported since
        return left

    def _left(self, attributes: dict[tuple[str, str], Any]) -> list[str]:
        left = []
        if in_flight._now is not None:
            left.append("a save in the background")
        if torch.get_default_dtype() != self._dtype:
            left.append(f"the default dtype {torch.get_default_dtype()}")
        if torch.get_default_device() != self._device:
            left.append(f"the default device {torch.get_default_device()}")
        threads = [one for one in threading.enumerate() if one not in self._threads]
        left += [f"a thread {one.name}" for one in threads if not one.daemon]
        for (owner, name), now in attributes.items():
            # The first optimizer of a class wraps the class's `step`, and marks it as "hooked".
            is_torchs = getattr(now, "hooked", False)
            if now is not self._attributes.get((owner, name), now) and not is_torchs:
                left.append(f"another {name} of {owner}")
        return left


def end_groups() -> None:
    """Ends all process groups but the world's, once no rank uses them."""
    dist.barrier()
    for group in list(dist.distributed_c10d._world.pg_map):
        if group is not dist.group.WORLD:
            with contextlib.suppress(ValueError):  # already ended
                dist.destroy_process_group(group)
    _clear_sharding_prop_cache()  # it has meshes of these groups


def attributes() -> dict[tuple[str, str], Any]:
    """The functions, classes and constants of Modicum and of what it builds on, by the names of the
    owner (a module or a class) and of the attribute."""
    found: dict[tuple[str, str], Any] = {}
    for name, module in list(sys.modules.items()):
        is_ours = name.partition(".")[0] == "modicum"
        if not isinstance(module, ModuleType) or not (is_ours or name in UPSTREAM):
            continue
        for key, value in list(vars(module).items()):
            if callable(value) or key.isupper():
                found[name, key] = value
            if isinstance(value, type) and value.__module__ == name:
                methods = {n: of for n, of in vars(value).items() if callable(of)}
                found |= {(f"{name}.{key}", n): of for n, of in methods.items()}
    return found


def forget_test_modules() -> None:
    """Forgets modules of tests, whose variables would last from one test file to the next."""
    for name in [name for name in sys.modules if name.startswith("tests.")]:
        del sys.modules[name]
