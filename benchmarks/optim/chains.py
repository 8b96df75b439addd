"""One process of benchmarks/step.py: in each round times the machine's copy and one step of every
optimizer in turn. Prints JSON."""

import argparse
import importlib.util
import json
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from torchao.optim import AdamW8bit

from modicum import Ledger, _modicum

TENSORS = 16
LR, BETAS, EPS, DECAY = 1e-4, (0.9, 0.999), 1e-8, 0.1
MAX_NORM, UNSCALE = 1.0, 1.0 / 1024


# Bytes per parameter, by state format. MOVED: the least that a step must read and write: the
# gradients for the norm, then all arrays of parameters, gradients and state for the update. HELD:
# the parameters, gradients and state.
MOVED = {"fp32": 34, "fp32-split": 28, "bf16-moments": 20, "int8-moments": 16.125,
         "int8-moments-24": 14.125}  # fmt: skip
HELD = {"fp32": 16, "fp32-split": 14, "bf16-moments": 10, "int8-moments": 8.0625,
        "int8-moments-24": 7.0625}  # fmt: skip
FORMATS = tuple(MOVED)
VERSIONS = ("modicum", "torch", "deepspeed", "torchao")
# torchao: codes of one byte, and a scale per 256 of them.
MOVED["torchao"], HELD["torchao"] = 22, 10.03


@dataclass
class Chain:
    """The work of a step with one optimizer: `step`, which is timed, and `refill`, which restores
    the gradients that a step changes."""

    what: str  # the label in the table
    step: Callable[[], None]
    refill: Callable[[], None] = lambda: None
    state_format: str = "fp32"


def gradients(params: int, dtype: torch.dtype) -> list[torch.Tensor]:
    """A new copy of the gradients; every chain gets the same values."""
    made = torch.Generator().manual_seed(0)
    scale = 1e-3 / UNSCALE
    return [(torch.randn(n, generator=made) * scale).to(dtype) for n in sizes(params)]


def sizes(params: int) -> list[int]:
    return [params // TENSORS] * TENSORS


def clip_factor(norm: float) -> float:
    """The factor that unscales and clips gradients with this norm."""
    return min(1.0, MAX_NORM / (norm * UNSCALE + 1e-6)) * UNSCALE


class Torch:
    """An AdamW with torch's interface, with torch.amp's unscale and torch's clip_grad_norm_."""

    def __init__(self, params: int, cls: Any = torch.optim.AdamW, **options: bool) -> None:
        self.grads = gradients(params, torch.float32)
        self.params = [torch.nn.Parameter(torch.zeros(n)) for n in sizes(params)]
        self.low = [torch.zeros(n, dtype=torch.bfloat16) for n in sizes(params)]
        for parameter in self.params:
            parameter.grad = torch.zeros_like(parameter)
        self.optimizer = cls(
            self.params, lr=LR, betas=BETAS, eps=EPS, weight_decay=DECAY, **options
        )

    def refill(self) -> None:
        for parameter, grad in zip(self.params, self.grads, strict=True):
            parameter.grad.copy_(grad)

    def step(self) -> None:
        found_inf = torch.zeros(1)
        torch._amp_foreach_non_finite_check_and_unscale_(
            [p.grad for p in self.params], found_inf, torch.tensor([UNSCALE])
        )
        torch.nn.utils.clip_grad_norm_(self.params, MAX_NORM, foreach=True)
        self.optimizer.step()
        with torch.no_grad():
            torch._foreach_copy_(self.low, self.params)


class DeepSpeed:
    """DeepSpeed's ZeRO-2, one flat partition: fp32 gradients, unscale and clip in one `mul_`."""

    def __init__(self, params: int) -> None:
        from deepspeed.ops.adam import DeepSpeedCPUAdam

        self.grads = torch.cat(gradients(params, torch.float32))
        self.flat = torch.nn.Parameter(torch.zeros(params))
        self.flat.grad = torch.zeros(params)
        self.low = torch.zeros(params, dtype=torch.bfloat16)
        self.optimizer = DeepSpeedCPUAdam(
            [self.flat], lr=LR, betas=BETAS, eps=EPS, weight_decay=DECAY, adamw_mode=True
        )
        # The norm that another device would compute: its time does not count.
        self.norm_elsewhere = float(torch.linalg.vector_norm(self.grads))

    def refill(self) -> None:
        self.flat.grad.copy_(self.grads)

    def step(self) -> None:
        self.step_with(float(torch.linalg.vector_norm(self.flat.grad)))

    def step_without_norm(self) -> None:
        self.step_with(self.norm_elsewhere)

    def step_with(self, norm: float) -> None:
        self.flat.grad.mul_(clip_factor(norm))
        self.optimizer.step()
        with torch.no_grad():
            self.low.copy_(self.flat)


class PrimeRl:
    """prime-rl: the norm by torch, then one pass for scale, AdamW and bf16 copy."""

    def __init__(self, params: int, sources: Path) -> None:
        path = sources / "src/prime_rl/trainer/optim/cpu_adam/__init__.py"
        spec = importlib.util.spec_from_file_location("cpu_adam", path)
        self.kernel = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(self.kernel)
        self.grads = gradients(params, torch.float32)
        self.params, self.m, self.v = ([torch.zeros(n) for n in sizes(params)] for _ in range(3))
        self.low = [torch.zeros(n, dtype=torch.bfloat16) for n in sizes(params)]
        self.steps = [torch.zeros(()) for _ in self.params]

    def step(self) -> None:
        norms = torch._foreach_norm(self.grads)
        norm = float(torch.linalg.vector_norm(torch.stack(norms)))
        self.kernel.adamw_step(
            self.params, self.grads, self.m, self.v, self.steps, self.low,
            lr=LR, beta1=BETAS[0], beta2=BETAS[1], weight_decay=DECAY, eps=EPS,
            gradient_scale=clip_factor(norm),
        )  # fmt: skip


class Modicum:
    """Modicum: `arrived_in_place` declares the gradients complete and computes their norm; then one
    pass for scale, AdamW and bf16 copy."""

    def __init__(self, params: int, form: str, threads: int) -> None:
        self.low = [torch.zeros(n, dtype=torch.bfloat16) for n in sizes(params)]
        # The upper half of a split master is the bf16 copy, so only `fp32` needs a separate one.
        out = self.low if form == "fp32" else [None] * TENSORS
        shards = [
            _modicum.AdamWShard(f"param.{i}", [n], [(0, n)], out=out[i])
            for i, n in enumerate(sizes(params))
        ]
        options = _modicum.AdamOptions(lr=LR, betas=BETAS, eps=EPS, weight_decay=DECAY)
        ledger = Ledger()
        self.adamw = _modicum.AdamW(shards, [options], format=form, ledger=ledger, threads=threads)
        dtype = torch.float32 if form == "fp32" else torch.bfloat16
        for i, grad in enumerate(gradients(params, dtype)):
            torch.from_dlpack(self.adamw.plane(i, "grad")).view(dtype).copy_(grad)

    def step(self) -> None:
        self.adamw.arrived_in_place(range(TENSORS))
        squares, finite = self.adamw.norms()
        assert finite
        self.adamw.step(UNSCALE, clip_factor(sum(squares) ** 0.5) / UNSCALE)


def chains(options: argparse.Namespace) -> dict[str, Chain]:
    params = options.params
    made: dict[str, Chain] = {}
    for form in FORMATS:
        ours = Modicum(params, form, options.threads)
        grad = "fp32" if form == "fp32" else "bf16"
        made[form] = Chain(f"Modicum `{form}`, {grad} gradients", ours.step, state_format=form)
    for kind in ("fused", "foreach"):
        of = Torch(params, **{kind: True})
        made[kind] = Chain(f"torch {kind}", of.step, of.refill)
    deepspeed = DeepSpeed(params)
    steps = {"norm here": deepspeed.step, "norm elsewhere": deepspeed.step_without_norm}
    for where, step in steps.items():
        made[f"deepspeed, {where}"] = Chain(f"DeepSpeedCPUAdam, {where}", step, deepspeed.refill)
    torchao = Torch(params, AdamW8bit)
    made["torchao"] = Chain(
        "torchao AdamW8bit, compiled", torchao.step, torchao.refill, state_format="torchao"
    )
    if options.prime_rl:
        made["prime-rl"] = Chain("prime-rl", PrimeRl(params, options.prime_rl).step)
    return made


def copy_bytes_per_s(threads: int) -> float:
    """Bytes read plus bytes written per second by the machine's fastest copy, in a new process."""
    command = [str(Path(sys.executable).with_name("modicum")), "step", "--params", "1M"]
    command += ["--steps", "1", "--threads", str(threads), "--json"]
    done = subprocess.run(command, stdout=subprocess.PIPE, check=True, text=True)
    return json.loads(done.stdout)["copy_bytes_per_s"]


def found(options: argparse.Namespace) -> dict[str, Any]:
    rows = chains(options)
    speeds: list[float] = []
    seconds: dict[str, list[float]] = {name: [] for name in rows}
    for round_ in range(options.rounds + 1):
        speeds.append(copy_bytes_per_s(options.threads))
        for name, chain in rows.items():
            chain.refill()
            begin = time.perf_counter()
            chain.step()
            seconds[name].append(time.perf_counter() - begin)
        if round_ == 0:  # the first step of each chain allocates its state
            speeds.clear()
            for each in seconds.values():
                each.clear()
    return {
        "params": options.params,
        "tensors": TENSORS,
        "copy_bytes_per_s": speeds,
        "versions": [f"{of} {metadata.version(of)}" for of in VERSIONS],
        "rows": {
            name: {
                "what": chain.what,
                "state_bytes": HELD[chain.state_format],
                "bytes_per_param": MOVED[chain.state_format],
                "seconds": seconds[name],
            }
            for name, chain in rows.items()
        },
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--params", type=int, required=True)
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--rounds", type=int, required=True)
    parser.add_argument("--prime-rl", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    print(json.dumps(found(options)))


if __name__ == "__main__":
    main()
