"""The budget and the ledger of `modicum.torch.accelerate.loading` apply to calls of `load`, `save`
and `resume` in the context, as they apply to `prepare`.

Catches: a call that ignores the context; a budget or ledger that applies after the context's end; a
context whose arguments replace the call's own.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
pytest.importorskip("accelerate")

import accelerate_rank  # noqa: E402  (after torch is known to be there)
from accelerate_alone import build, prepare  # noqa: E402
from nested_options import nested  # noqa: E402
from torch_front import alone, checkpoint_of, empty  # noqa: E402

import modicum.torch  # noqa: E402
from modicum.errors import BudgetError  # noqa: E402
from modicum.torch import MemoryPolicy  # noqa: E402
from modicum.torch.accelerate import loading  # noqa: E402

CALLS = ("load", "save", "resume")


@pytest.fixture(scope="module", autouse=True)
def written() -> None:
    """Writes the checkpoint before a process group is simulated."""
    checkpoint_of("llama")


@pytest.fixture
def model(tmp_path: Path) -> Iterator[Any]:
    """A loaded model that is saved as step 1 in `tmp_path`."""
    with alone(), accelerate_rank.fsdp2_on_cpus():
        with loading(progress=False):
            model, _ = prepare(build())
        modicum.torch.save(model, tmp_path, step=1)
        yield model


def call(which: str, model: Any, root: Path, **how: Any) -> Any:
    if which == "save":
        return modicum.torch.save(model, root, step=2, **nested(how, "memory"))
    source = root if which == "resume" else checkpoint_of("llama")
    return getattr(modicum.torch, which)(model, source, progress=False, **nested(how, "memory"))


@pytest.mark.parametrize("which", CALLS)
def test_the_budget_of_the_context_applies(model: Any, tmp_path: Path, which: str) -> None:
    with loading(budget="1MiB"):
        with pytest.raises(BudgetError, match="budget 1.00 MiB"):
            call(which, model, tmp_path)
        with loading(budget="none"):
            call(which, model, tmp_path)
    # After the context its budget, which this load would exceed, applies no more.
    assert call("load", model, tmp_path) is not None


@pytest.mark.parametrize("how", ("budget", "ledger"))
@pytest.mark.parametrize("which", CALLS)
def test_arguments_of_the_call_take_precedence(
    model: Any, tmp_path: Path, which: str, how: str
) -> None:
    own = {"budget": "none"} if how == "budget" else {"ledger": modicum.Ledger()}
    with loading(budget="1MiB"):
        call(which, model, tmp_path, **own)


def test_the_ledger_of_the_context_is_charged() -> None:
    ledger, models = modicum.Ledger(), [empty("llama"), empty("llama")]
    with alone():
        with loading(memory=MemoryPolicy(ledger=ledger)):
            modicum.torch.load(models[0], checkpoint_of("llama"), progress=False)
        model_bytes = sum(p.numel() * p.element_size() for p in models[0].parameters())
        assert ledger.held["shards"] >= model_bytes
        before = ledger.peak_bytes
        modicum.torch.load(models[1], checkpoint_of("llama"), progress=False)
    assert ledger.peak_bytes == before, "a load after the context was charged to its ledger"
