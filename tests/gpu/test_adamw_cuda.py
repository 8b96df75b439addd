"""`modicum.torch.AdamW` over parameters on a GPU."""

import pytest

torch = pytest.importorskip("torch")
if not torch.cuda.is_available():
    pytest.skip("no CUDA", allow_module_level=True)

from torch import nn  # noqa: E402

import modicum  # noqa: E402
from modicum.torch import AdamW  # noqa: E402

EVERY = [
    ("fp32", torch.float32),
    ("fp32", torch.bfloat16),
    ("fp32-split", torch.bfloat16),
    ("int8-moments", torch.bfloat16),
    ("int8-moments", torch.float32),
]


@pytest.mark.parametrize("pin", [False, True])
@pytest.mark.parametrize(("state_format", "dtype"), EVERY)
def test_the_same_bits_as_on_the_host(state_format: str, dtype: torch.dtype, pin: bool) -> None:
    """Steps on a stream of the caller's, with a backward before and a forward after each step."""
    torch.manual_seed(2)
    host = nn.Linear(1000, 3001, bias=False, dtype=dtype)
    device = nn.Linear(1000, 3001, bias=False, dtype=dtype, device="cuda")
    device.load_state_dict(host.state_dict())
    options = {"lr": 0.01, "state_format": state_format}
    ledger = modicum.Ledger()
    on_host = AdamW(host.named_parameters(), **options)
    on_device = AdamW(device.named_parameters(), ledger=ledger, pin=pin, **options)
    held = ledger.held
    with torch.cuda.stream(torch.cuda.Stream()):
        for _ in range(5):
            on_device.zero_grad()
            device(torch.randn(64, 1000, dtype=dtype, device="cuda")).square().mean().backward()
            host.weight.grad = device.weight.grad.cpu()
            on_host.step()
            on_device.step()
            after = device.weight.detach().clone()  # in order behind the copies
            assert torch.equal(after.cpu(), host.weight.detach())
    assert on_device.digest() == on_host.digest()
    assert ledger.held == held
