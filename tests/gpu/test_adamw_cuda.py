"""`modicum.torch.AdamW` over parameters on a GPU."""

import pytest

torch = pytest.importorskip("torch")
if not torch.cuda.is_available():
    pytest.skip("no CUDA", allow_module_level=True)

from torch import nn  # noqa: E402
from torch.distributed.device_mesh import init_device_mesh  # noqa: E402
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard  # noqa: E402

import modicum  # noqa: E402
import modicum.torch  # noqa: E402
from modicum.torch import AdamW, MemoryPolicy  # noqa: E402

CASES = [
    ("fp32", torch.float32),
    ("fp32", torch.bfloat16),
    ("fp32-split", torch.bfloat16),
    ("int8-moments", torch.bfloat16),
    ("int8-moments", torch.float32),
]


@pytest.mark.parametrize("pin", [False, True])
@pytest.mark.parametrize(("state_format", "dtype"), CASES)
def test_parameters_on_the_device_step_with_the_bits_of_parameters_on_the_host(
    state_format: str, dtype: torch.dtype, pin: bool
) -> None:
    """All work is queued on a stream that the test has made: the backward before each step, and a
    read of the weights after it."""
    torch.manual_seed(2)
    host = nn.Linear(1000, 3001, bias=False, dtype=dtype)
    device = nn.Linear(1000, 3001, bias=False, dtype=dtype, device="cuda")
    device.load_state_dict(host.state_dict())
    options = {"lr": 0.01, "state_format": state_format}
    ledger = modicum.Ledger()
    on_host = AdamW(host.named_parameters(), **options)
    on_device = AdamW(
        device.named_parameters(), memory=MemoryPolicy(ledger=ledger, pin=pin), **options
    )
    held = ledger.held
    with torch.cuda.stream(torch.cuda.Stream()):
        for _ in range(5):
            on_device.zero_grad()
            device(torch.randn(64, 1000, dtype=dtype, device="cuda")).square().mean().backward()
            host.weight.grad = device.weight.grad.cpu()
            on_host.step()
            on_device.step()
            after = device.weight.detach().clone()  # queued behind the step's copies
            assert torch.equal(after.cpu(), host.weight.detach())
    assert on_device.digest() == on_host.digest()
    assert ledger.held == held


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("state_format", ["fp32", "fp32-split", "bf16-moments", "int8-moments"])
def test_offloaded_shards_step_with_the_bits_of_a_model_on_the_host(state_format: str) -> None:
    """FSDP2 copies the gradients of a backward on the device into host memory. Each step has the
    bits of a model that was never on the device, with the gradients of a twin without Modicum's
    hooks, which are read once all copies have ended."""
    torch.manual_seed(5)

    def layers() -> nn.Sequential:
        made = [nn.Linear(96, 200), nn.GELU(), nn.Linear(200, 96, bias=False)]
        return nn.Sequential(*made).bfloat16()

    host, offloaded, twin = layers(), layers(), layers()
    mesh = init_device_mesh("cuda", (1,))
    for model in (offloaded, twin):
        model.load_state_dict(host.state_dict())
        fully_shard(model, mesh=mesh, offload_policy=CPUOffloadPolicy())
    options = {"lr": 0.01, "state_format": state_format}
    on_host = AdamW(host.named_parameters(), **options)
    stepping = AdamW(offloaded.named_parameters(), **options)
    for _ in range(6):
        inputs = torch.randn(32, 96, dtype=torch.bfloat16, device="cuda")
        for model in (offloaded, twin):
            model(inputs).square().mean().backward()
        torch.cuda.synchronize()  # before torch 2.13 FSDP2's copies may be in flight
        for name, parameter in host.named_parameters():
            taken, copied = (model.get_parameter(name).grad for model in (offloaded, twin))
            assert taken.to_local().device.type == "cpu", name
            assert torch.equal(taken.to_local(), copied.to_local()), name
            parameter.grad = copied.to_local().clone()
        norms = [float(each.clip_grad_norm_(0.5)) for each in (on_host, stepping)]
        assert norms[0] == norms[1]
        for each in (on_host, stepping):
            each.step()
            each.zero_grad()
        twin.zero_grad()
        for name, parameter in offloaded.named_parameters():
            local = parameter.to_local()
            assert torch.equal(local, host.get_parameter(name).detach()), name
            with torch.no_grad():
                twin.get_parameter(name).to_local().copy_(local)
    assert stepping.digest() == on_host.digest()


def test_a_compiled_model_learns_under_autocast() -> None:
    torch.manual_seed(6)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1)).cuda()
    optimizer = AdamW(model.named_parameters(), lr=0.02)
    compiled = torch.compile(model)
    inputs = torch.randn(256, 64, device="cuda")
    expected = inputs[:, :1] * 2
    losses = []
    for _ in range(60):
        with torch.autocast("cuda", dtype=torch.bfloat16):
            loss = (compiled(inputs).float() - expected).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < 0.1 * losses[0]
