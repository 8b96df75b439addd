"""Threads of a save or a load copy tensors of a device on its default stream, which does not wait
for the stream on which a program trains. So the program's thread waits for its own stream before.

Here the CPU plays a device, and a tensor gets its values when the stream is synchronized. Catches:
values of before the last kernels, in files or in digests; a load that is overwritten by them.
"""

from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from sharding import playing_rank  # noqa: E402

from modicum.torch.ranks.group import Ranks  # noqa: E402  (after torch is known to be there)
from modicum.torch.saving import replicas  # noqa: E402
from modicum.torch.saving.weights import LocalTensor, Writing, fetching  # noqa: E402
from modicum.torch.shards.placements import Sharding  # noqa: E402
from modicum.torch.shards.tensors import copying_into  # noqa: E402

VALUES = torch.arange(12.0).view(3, 4)


@pytest.fixture
def pending(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A transposed tensor whose values are written once the stream is synchronized."""
    tensor = torch.zeros(4, 3).t()

    class Stream:
        def synchronize(self) -> None:
            tensor.copy_(VALUES)

    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("cpu"))
    monkeypatch.setattr(torch.accelerator, "current_stream", lambda device: Stream())
    return tensor


def test_a_save_reads_values_that_the_stream_has_written(pending: Any) -> None:
    fetch = fetching({0: pending})
    assert fetch is not None
    elements = bytearray(12 * 4)
    fetch(0, 0, memoryview(elements))
    assert torch.equal(torch.frombuffer(elements, dtype=torch.float32), VALUES.view(-1))


def test_a_load_writes_after_the_stream(pending: Any) -> None:
    copy = copying_into({0: pending})
    assert torch.equal(pending, VALUES)
    copy(0, 0, memoryview(bytearray(12 * 4)))
    assert not pending.any()


def test_replicas_are_compared_after_the_stream(
    pending: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe: Any = SimpleNamespace(targets=[{"name": "w", "shape": [3, 4], "alias_of": None}])
    plan: Any = None
    read: list[str] = []
    digest_of = replicas.digest_of
    monkeypatch.setattr(replicas, "digest_of", lambda t: read.append(digest_of(t)) or read[-1])
    with playing_rank(0, 2):
        writing = Writing(plan, recipe, [LocalTensor(pending, Sharding((2,), ()), pending)])
        replicas.require_equal([writing], Ranks.of_world())
    assert read == [digest_of(VALUES)]
