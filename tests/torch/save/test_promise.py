"""`modicum.torch.load` with an optimizer promises the peak of the complete job, as `modicum plan`
does: of the load, the optimizer steps, and a save of model and optimizer. A budget without room for
the save is refused before a weight is read.

Catches: a load whose promise does not include the save; a promise for the save with the staging of
the load, which a small budget shrinks; a report of a resume that does not name the checkpoints that
were skipped; stacks and heaps of threads that are not in the promise.
"""

import threading
from pathlib import Path
from typing import Any

import pytest
from program import run_json

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from on_device import OnDevice  # noqa: E402  (after torch is known to be there)
from safetensors.torch import load_file  # noqa: E402
from torch import nn  # noqa: E402

import modicum.torch  # noqa: E402
from modicum import _modicum  # noqa: E402
from modicum.errors import BudgetError  # noqa: E402
from modicum.torch import AdamW  # noqa: E402
from modicum.torch.ranks.group import Ranks  # noqa: E402
from modicum.torch.saving import planning, weights  # noqa: E402
from modicum.torch.saving.inside import (  # noqa: E402
    CheckpointInDirectory,
    load_state_inside,
    save_inside,
)

MIB = 1 << 20
THREAD_BYTES = (24 + 132) << 10  # a thread's stack, and its heap in malloc


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("promise") / "model"
    config = transformers.LlamaConfig(
        hidden_size=256, num_hidden_layers=2, num_attention_heads=4, intermediate_size=512,
        vocab_size=4096,
    )  # fmt: skip
    transformers.LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(directory)
    return directory


def built(directory: Path, **options: Any) -> tuple[Any, AdamW]:
    """A model on meta, and its optimizer."""
    config = transformers.AutoConfig.from_pretrained(directory)
    with modicum.torch.empty_parameters():
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    return model, AdamW(model.named_parameters(), lr=1e-3, **options)


def loaded(directory: Path, **options: Any) -> tuple[Any, AdamW, dict[str, Any]]:
    """A loaded model, its optimizer, and the load's report of the only rank."""
    model, optimizer = built(directory)
    report = modicum.torch.load(model, directory, optimizer=optimizer, progress=False, **options)
    return model, optimizer, report.ranks[0]


def without_the_process(rank: dict[str, Any]) -> int:
    """The promised bytes, less those that the process held before, which the promise rounds up to
    MiB."""
    promised: int = rank["promised_bytes"]
    return promised - -(-rank["baseline_bytes"] // MIB) * MIB


def phases_of(modicum: Path, directory: Path) -> dict[str, dict[str, int]]:
    """For each phase of a job of one rank, the bytes by purpose."""
    words = ("plan", directory, "--ranks", 1, "--optimizer", "adamw:fp32")
    planned = run_json(modicum, *words)
    own = next(strategy for strategy in planned["strategies"] if strategy["name"] == "own-shard")
    return {phase["phase"]: phase["by_purpose"] for phase in own["nodes"][0]["job"]["phases"]}


def test_the_promise_is_that_of_plan(modicum: Path, directory: Path) -> None:
    """The purposes `staging` and `plan` of `modicum plan` include memory in which the command line
    makes gradients for its own steps. Python has none, so the comparison leaves this memory out."""
    phases = phases_of(modicum, directory)
    saves, steps = phases["save"], phases["step"]
    assert saves["header"] > steps["header"]
    own = {"process", "plan", "staging"}
    expected = sum(size for purpose, size in saves.items() if purpose not in own)
    expected += saves["staging"] - steps["staging"]
    _, _, rank = loaded(directory)
    assert 0 < without_the_process(rank) - expected < saves["plan"]


def test_a_budget_without_room_for_the_save_is_refused(directory: Path) -> None:
    """A small budget shrinks the staging of a load, but not that of a save. Only the last norm
    trains, so that the state is small and the job's peak is in the save."""
    model, optimizer = built(directory)
    model.requires_grad_(False)
    model.model.norm.requires_grad_(True)

    def load(budget: int) -> None:
        modicum.torch.load(model, directory, optimizer=optimizer, budget=budget, progress=False)

    with pytest.raises(BudgetError) as refused:
        load(1)
    needed = 1 + refused.value.shortfall_bytes
    with pytest.raises(BudgetError, match="short by"):
        load(needed - 4 * MIB)  # the load alone would fit, with half of its staging
    assert all(p.is_meta for p in model.parameters()) and not optimizer.held
    load(needed + 4 * MIB)


def test_the_save_promises_no_more_than_the_load_did(directory: Path, tmp_path: Path) -> None:
    model, optimizer, rank = loaded(directory)
    saved = modicum.torch.save(model, tmp_path / "root", step=1, optimizer=optimizer)
    # Python itself may hold up to 16 MiB more than at the load.
    assert saved.promised_bytes <= rank["promised_bytes"] + 16 * MIB
    assert str(saved).startswith(f"{saved.path}: ") and "visible after" in str(saved)


def test_a_budget_without_room_for_the_state_refuses_a_resume_in_a_directory(
    directory: Path, tmp_path: Path
) -> None:
    """As of accelerate and Trainer, whose optimizer's state is read after the model. Nothing of it
    is allocated."""
    model, _, _ = loaded(directory)
    optimizer = torch.optim.AdamW(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    flight = CheckpointInDirectory(tmp_path / "checkpoint-1")
    how = {"ledger": None, "budget": "none", "staging": None, "adapters": False}
    with Ranks.of_world().together() as ranks:
        flight.open(ranks)
        save_inside(model, flight, optimizer, how, ranks)
    flight.end()
    again = torch.optim.AdamW(model.parameters())

    def resume(budget: int | None, ledger: Any = None) -> None:
        arguments = {"ledger": ledger, "budget": budget, "staging": None}
        load_state_inside(model, again, tmp_path / "checkpoint-1", arguments)

    for limits in ((1, None), (None, modicum.Ledger(1))):
        with pytest.raises(BudgetError) as refused:
            resume(*limits)
        owners = {owner["purpose"]: owner["bytes"] for owner in refused.value.owners}
        assert owners["moments"] >= 2 * sum(p.nbytes for p in model.parameters())
        assert not again.state
    resume(1 + refused.value.shortfall_bytes + 4 * MIB)
    for parameter in model.parameters():
        assert torch.equal(again.state[parameter]["exp_avg"], optimizer.state[parameter]["exp_avg"])


@pytest.mark.parametrize("cpus", (1, 3))
def test_threads_that_copy_from_a_device_are_promised(
    directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cpus: int
) -> None:
    """The promise has a stack and a heap for each thread that may copy: one per CPU. Saves the
    model from host memory, where no thread copies, and then from a device."""
    model, _, _ = loaded(directory)
    plans: list[weights.Writing] = []
    threads: set[int] = set()  # those that have copied
    make, fetching = planning.writing_of_model, weights.fetching

    def keeping(*how: Any) -> weights.Writing:
        plans.append(make(*how))
        return plans[-1]

    def noting(lines: Any) -> weights.Fetch | None:
        fetch = fetching(lines)

        def fetch_noted(*place: Any) -> None:
            threads.add(threading.get_ident())
            assert fetch is not None
            fetch(*place)

        return fetch and fetch_noted

    monkeypatch.setattr(weights, "cpus_of_rank", lambda _: cpus)
    monkeypatch.setattr(planning, "writing_of_model", keeping)
    monkeypatch.setattr(weights, "fetching", noting)
    steps = [modicum.torch.save(model, tmp_path, step=1)]
    assert not threads
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                module._parameters[name] = nn.Parameter(OnDevice(parameter.detach()))
    steps.append(modicum.torch.save(model, tmp_path, step=2))
    assert 1 <= len(threads) <= cpus
    host, device = plans
    for writing, copying in ((host, 0), (device, cpus)):
        parts = [
            _modicum.SaveParts(part)
            for part in (writing.part, _modicum.TensorsToSave(writing.plan))
        ]
        held_bytes, without = (part.held(threads=cpus)["staging"] for part in parts)
        assert held_bytes - without == copying * THREAD_BYTES
    first, second = (load_file(Path(step.path) / "model.safetensors") for step in steps)
    assert all(torch.equal(second[name], tensor) for name, tensor in first.items())


def test_the_report_of_a_resume_as_text_names_skipped_checkpoints(
    directory: Path, tmp_path: Path
) -> None:
    model, optimizer, _ = loaded(directory)
    modicum.torch.save(model, tmp_path, step=1, optimizer=optimizer)
    (tmp_path / "step-9").mkdir()
    with pytest.warns(UserWarning, match="step 9"):
        resumed = modicum.torch.resume(model, tmp_path, optimizer=optimizer, progress=False)
    assert isinstance(resumed, modicum.torch.ResumeReport)
    skipped, read, *loads = str(resumed).splitlines()
    assert skipped == f"skipped the checkpoint of step 9: {resumed.skipped[0]['reason']}"
    assert resumed.path == str(tmp_path / "step-1") and resumed.read_bytes > MIB
    size, took = f"{resumed.read_bytes / MIB:.2f} MiB", f"{resumed.elapsed_s:.2f} s"
    assert read == f"{resumed.path}: step 1, {size} read in {took}"
    assert loads == str(resumed.load).splitlines()
