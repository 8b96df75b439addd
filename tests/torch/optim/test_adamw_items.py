"""`AdamW.state_items`: yields the state one tensor at a time, as float32 values or, with
`codes=True`, as views of the stored memory.

Catches: a value that differs from the state dict's; yielded tensors that the iterator keeps in
memory; stored tensors that are copied, incomplete or of another dtype; a run that goes on from
stored tensors and differs in a bit from the uninterrupted run.
"""

import copy
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from nested_options import nested  # noqa: E402
from torch import nn  # noqa: E402  (after torch is known to be there)

import modicum  # noqa: E402
from modicum.torch import AdamW  # noqa: E402

FORMATS = ("fp32", "fp32-split", "bf16-moments", "int8-moments", "int8-moments-24")
WIDTH = 131  # large enough for 8-bit moments; a row has a block of 128 and a block of 3 elements
INT8_DTYPES = {"exp_avg": torch.int8, "exp_avg_sq": torch.uint8, "max_exp_avg_sq": torch.uint8}


def made(dtype: torch.dtype, state_format: str, **options: Any) -> tuple[nn.Module, AdamW]:
    torch.manual_seed(1)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(2))).to(dtype)
    named = model.named_parameters()
    return model, AdamW(
        named, lr=1e-2, state_format=state_format, seed=3, **nested(options, "memory")
    )


def train(model: nn.Module, optimizer: AdamW, steps: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        x = torch.randn(5, WIDTH, generator=generator).to(model[0].weight.dtype)
        model(x).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16), ids=str)
@pytest.mark.parametrize("state_format", FORMATS)
def test_items_are_the_values_of_the_state_dict(dtype: torch.dtype, state_format: str) -> None:
    model, optimizer = made(dtype, state_format, amsgrad=True)
    train(model, optimizer, 3, seed=2)
    names = [name for name, _ in model.named_parameters()]
    wanted = {
        (names[index], key): value
        for index, entry in optimizer.state_dict()["state"].items()
        for key, value in entry.items()
    }
    got = {(name, key): value for name, key, value in optimizer.state_items()}
    assert got.keys() == wanted.keys()
    for item, value in wanted.items():
        assert got[item].shape == value.shape and got[item].dtype == value.dtype
        assert torch.equal(got[item], value), item


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16, torch.float16), ids=str)
@pytest.mark.parametrize("state_format", FORMATS)
def test_a_run_goes_on_from_its_codes_to_the_bit(dtype: torch.dtype, state_format: str) -> None:
    model, optimizer = made(dtype, state_format, amsgrad=True)
    train(model, optimizer, 4, seed=2)
    saved = {(name, key): t.clone() for name, key, t in optimizer.state_items(codes=True)}
    weights = copy.deepcopy(model.state_dict())
    train(model, optimizer, 4, seed=4)
    other, again = made(dtype, state_format, amsgrad=True)
    train(other, again, 1, seed=9)
    other.load_state_dict(weights)
    for name, key, tensor in again.state_items(codes=True):
        tensor.copy_(saved.pop((name, key)))
    assert not saved
    train(other, again, 4, seed=4)
    assert again.digest() == optimizer.digest()
    for p, q in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(p, q)


@pytest.mark.parametrize("state_format", FORMATS)
def test_codes_are_the_memory_itself(state_format: str) -> None:
    """Two iterations yield the same addresses, and allocate no memory."""
    ledger = modicum.Ledger()
    model, optimizer = made(torch.bfloat16, state_format, ledger=ledger)
    train(model, optimizer, 2, seed=2)
    held = ledger.held_bytes
    items = {(name, key): t for name, key, t in optimizer.state_items(codes=True)}
    assert ledger.held_bytes == held
    again = {(name, key): t for name, key, t in optimizer.state_items(codes=True)}
    for item, tensor in items.items():
        assert tensor.data_ptr() == again[item].data_ptr(), item
    keys = {key for name, key in items if name == "0.weight"}
    is_int8 = state_format.startswith("int8")
    scale_keys = {"exp_avg_scale", "exp_avg_sq_scale"} if is_int8 else set()
    masters = {"master"} if state_format == "fp32" else {"master_low"}
    assert keys == {"step", "exp_avg", "exp_avg_sq"} | scale_keys | masters
    for key in ("exp_avg", "exp_avg_sq"):
        other = torch.bfloat16 if state_format.startswith("bf16") else torch.float32
        expected = INT8_DTYPES[key] if is_int8 else other
        assert items["0.weight", key].dtype == expected
    scales = sum(t.numel() for (_, key), t in items.items() if key == "exp_avg_scale")
    # Each row of the two matrices has two blocks, and each block has a scale.
    assert scales == (2 * WIDTH * 2 if is_int8 else 0)


def peak_kib() -> int:
    """The peak RSS of this process since `clear_refs` was last written."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM"))


def test_few_tensors_are_held_at_a_time() -> None:
    """All exported tensors together take 12 bytes per parameter: 96 MiB for the eight matrices
    here. The peak must grow by much less."""
    named = [(str(i), nn.Parameter(torch.ones(1024, 1024).bfloat16())) for i in range(8)]
    optimizer = AdamW(named, state_format="int8-moments")
    list(optimizer.state_items(codes=True))  # a first call also allocates memory that stays
    # An exported matrix has 4 MiB; the allocator keeps some freed ones.
    for codes, most_mib in ((False, 24), (True, 2)):
        Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
        before = peak_kib()
        total = 0
        for _, _, tensor in optimizer.state_items(codes=codes):
            total += tensor.nbytes
            del tensor
        assert (peak_kib() - before) / 1024 < most_mib
        assert total > (8 if codes else 96) * 2**20
