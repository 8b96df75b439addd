"""One rank of an engine with fp32 parameters, on CPUs. Rank 0 prints its losses.

    engine_rank.py ENGINE DIRECTORY FOLDER [--steps=N] [--modicum]

With --modicum, verl, AReaL and twinkle are expected on PYTHONPATH with Modicum's patches, and
torchtitan gets the classes of docs/guide/engines.md. With --steps=0 (in this form) no optimizer
allocates memory: torch's AdamW would allocate in its first step, and Modicum's in its constructor,
which is then not called.
"""

import argparse
import os
import sys
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path += [str(ROOT / "tests/support"), str(ROOT / "examples")]

import torch.distributed as dist  # noqa: E402

SEED = 3  # of the tokens of every step
NO_STEPS = "--steps=0"
Step = Callable[[int], float]


def verl(directory: str, _folder: str, is_ours: bool) -> Step:
    import torch
    from verl_engine import engine_of

    engine = engine_of(directory, "modicum.torch" if is_ours else "torch.optim")
    module = engine._build_fsdp_module(engine._build_module())
    if NO_STEPS in sys.argv:
        return lambda _seed: 0.0
    optimizer = engine._build_optimizer(module)

    def step(seed: int) -> float:
        tokens = torch.randint(2, 60, (2, 11), generator=torch.Generator().manual_seed(seed))
        loss = module(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    return step


def areal(directory: str, _folder: str, _is_ours: bool) -> Step:
    from areal.engine.fsdp_engine import FSDPEngine
    from areal_engine import Engine

    if NO_STEPS in sys.argv:
        FSDPEngine._create_optimizer = lambda *_: None
    return Engine(directory, {}).step


def twinkle(directory: str, strategy: str) -> Step:
    from accelerate_fsdp2 import fsdp2_on_cpus
    from twinkle_engine import built, step, wrap

    fsdp2_on_cpus()
    model = built(directory, strategy)
    wrap(model)
    return lambda seed: step(model, seed)


def torchtitan(directory: str, folder: str, is_ours: bool) -> Step:
    import torchtitan_engine

    page = ROOT / "docs/guide/engines.md"
    classes = torchtitan_engine.block_of(page) if is_ours else torchtitan_engine.own()
    made = torchtitan_engine.Trainer(directory, folder, classes)
    if not made.manager.load():
        sys.exit("nothing was loaded")
    return made.step


ENGINES: dict[str, Callable[[str, str, bool], Step]] = {
    "verl": verl,
    "areal": areal,
    "twinkle-native": lambda directory, *_: twinkle(directory, "native_fsdp"),
    "twinkle-accelerate": lambda directory, *_: twinkle(directory, "accelerate"),
    "torchtitan": torchtitan,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("engine", choices=ENGINES)
    parser.add_argument("directory")
    parser.add_argument("folder", help="for the files that the engine writes")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--modicum", action="store_true", help="the engine loads by Modicum")
    options = parser.parse_args()
    dist.init_process_group("gloo")
    step = ENGINES[options.engine](options.directory, options.folder, options.modicum)
    for number in range(options.steps):
        loss = step(SEED)
        if dist.get_rank() == 0:
            print(f"step {number}: loss {loss:.6f}", flush=True)
    dist.barrier()
    os._exit(0)  # a normal exit would wait for threads of the engines that do not end


if __name__ == "__main__":
    main()
