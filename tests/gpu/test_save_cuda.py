"""`modicum.torch.save` and `resume` of FSDP2 shards on a GPU, with optimizer state on the host or
on the device.

Catches: a copy from the device that is read before it is done; a background save that reads
parameters after a later step has changed them; a resume that leaves a parameter or a moment at its
former values.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
if not torch.cuda.is_available():
    pytest.skip("no CUDA", allow_module_level=True)

from safetensors.torch import load_file  # noqa: E402
from torch.distributed.device_mesh import init_device_mesh  # noqa: E402
from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy, fully_shard  # noqa: E402
from transformers import AutoConfig, AutoModelForCausalLM  # noqa: E402

import modicum.torch  # noqa: E402

pytestmark = pytest.mark.usefixtures("one_rank")

OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "fp32": lambda named: modicum.torch.AdamW(named, lr=1e-2),
    "fp32-split": lambda named: modicum.torch.AdamW(named, lr=1e-2, state_format="fp32-split"),
    "int8-moments": lambda named: modicum.torch.AdamW(named, lr=1e-2, state_format="int8-moments"),
    "pinned": lambda named: modicum.torch.AdamW(
        named, lr=1e-2, memory=modicum.torch.MemoryPolicy(pin=True)
    ),
    "torch": lambda named: torch.optim.AdamW([p for _, p in named], lr=1e-2),
    "torch-fused": lambda named: torch.optim.AdamW([p for _, p in named], lr=1e-2, fused=True),
}


class Run:
    """A model sharded over one rank, on meta until it is loaded or resumed, and its optimizer."""

    def __init__(self, checkpoint: Path, optimizer: str, *, offloads: bool = False) -> None:
        config = AutoConfig.from_pretrained(checkpoint)
        with modicum.torch.empty_parameters():
            self.model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        mesh = init_device_mesh("cuda", (1,))
        policy = CPUOffloadPolicy() if offloads else OffloadPolicy()
        for block in self.model.model.layers:
            fully_shard(block, mesh=mesh, offload_policy=policy)
        fully_shard(self.model, mesh=mesh, offload_policy=policy)
        self.optimizer = OPTIMIZERS[optimizer](list(self.model.named_parameters()))

    def step(self, steps: range) -> None:
        """Steps with gradients that depend only on the step and the parameter's position."""
        for step in steps:
            for position, parameter in enumerate(self.model.parameters()):
                generator = torch.Generator().manual_seed(1000 * step + position)
                values = torch.randn(parameter.shape, generator=generator).to(parameter.dtype)
                parameter.grad = torch.empty_like(parameter)
                parameter.grad.to_local().copy_(values)
            self.optimizer.step()
            self.optimizer.zero_grad()

    def values(self) -> dict[str, Any]:
        return {n: p.full_tensor().cpu().clone() for n, p in self.model.named_parameters()}

    def moments(self) -> list[Any]:
        """The tensors of the optimizer's state in their order, on the host."""
        found = []
        for _, entry in sorted(self.optimizer.state_dict()["state"].items()):
            tensors = [value for value in entry.values() if isinstance(value, torch.Tensor)]
            found += [getattr(t, "_local_tensor", t).detach().cpu().clone() for t in tensors]
        return found


def assert_same(one: Run, values: dict[str, Any], moments: list[Any]) -> None:
    for name, value in one.values().items():
        assert torch.equal(value, values[name]), name
    assert len(one.moments()) == len(moments)
    assert all(map(torch.equal, one.moments(), moments))


CASES = [(name, False) for name in OPTIMIZERS] + [("fp32", True), ("fp32-split", True)]


@pytest.mark.parametrize("background", [False, True])
@pytest.mark.parametrize(("optimizer", "offloads"), CASES)
def test_a_run_on_the_device_resumes_to_the_same_bits(
    checkpoint: Path, tmp_path: Path, optimizer: str, offloads: bool, background: bool
) -> None:
    run = Run(checkpoint, optimizer, offloads=offloads)
    modicum.torch.load(run.model, checkpoint, progress=False)
    run.step(range(2))
    values, moments = run.values(), run.moments()
    save = modicum.torch.async_save if background else modicum.torch.save
    saved: Any = save(
        run.model, tmp_path, step=2, optimizer=run.optimizer,
        options=modicum.torch.SaveOptions(source=checkpoint),
    )  # fmt: skip
    run.step(range(2, 5))
    report = saved.result() if background else saved
    assert report.held_bytes <= report.promised_bytes
    stored = load_file(Path(report.path) / "model.safetensors")
    tied = {"lm_head.weight"} - stored.keys()  # the second name of a tied tensor is not stored
    assert values.keys() - tied == stored.keys()
    for name, value in stored.items():
        assert torch.equal(value, values[name]), name

    again = Run(checkpoint, optimizer, offloads=offloads)
    assert modicum.torch.resume(
        again.model, tmp_path, optimizer=again.optimizer, progress=False
    ).step == 2  # fmt: skip
    assert_same(again, values, moments)
    again.step(range(2, 5))
    assert_same(again, run.values(), run.moments())


def test_a_save_waits_for_changes_that_the_device_has_yet_to_make(
    checkpoint: Path, tmp_path: Path
) -> None:
    """When the save begins, the device is busy, and the parameters' last change is still queued."""
    run = Run(checkpoint, "torch")
    modicum.torch.load(run.model, checkpoint, progress=False)
    torch.cuda._sleep(500_000_000)  # about 0.3 s of the device's clock
    with torch.no_grad():
        for parameter in run.model.parameters():
            parameter.to_local().mul_(2)
    report = modicum.torch.save(
        run.model, tmp_path, step=1, options=modicum.torch.SaveOptions(source=checkpoint)
    )
    stored = load_file(Path(report.path) / "model.safetensors")
    for name, value in run.values().items():
        if name in stored:
            assert torch.equal(stored[name], value), name
