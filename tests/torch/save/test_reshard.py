"""`modicum reshard` of steps (checkpoint directories) that Python has saved, with adapters, the
state of torch's optimizers, and a program's own data (extras).

The oracles are the model and the optimizer that were saved. Catches: a file of adapters with a name
that PEFT does not read; stacked experts whose recipe is lost; extras of a rank that are left out.
"""

import copy
import json
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
peft = pytest.importorskip("peft")

import torch_front  # noqa: E402
from program import failure, run_json  # noqa: E402

import modicum.torch as front  # noqa: E402


def loaded(family: str) -> Any:
    model = torch_front.empty(family)
    front.load(model, torch_front.checkpoint_of(family), progress=False)
    return model


def step(model: Any, optimizer: Any, steps: int = 1) -> None:
    """Makes steps with gradients that depend only on the step, the name and the element."""
    for number in range(steps):
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                grad = torch_front.whole_gradient(name, parameter.shape, number)
                parameter.grad = grad.to(parameter.dtype)
        optimizer.step()
        optimizer.zero_grad()


def values(model: Any, optimizer: Any) -> dict[str, Any]:
    """All parameters and all values of the optimizer's state, by name."""
    state = optimizer.state_dict()["state"]
    flat = {f"{i} {key}": value for i, entry in state.items() for key, value in entry.items()}
    return flat | dict(model.named_parameters())


def assert_same(one: dict[str, Any], other: dict[str, Any]) -> None:
    assert one.keys() == other.keys()
    for name, value in one.items():
        is_tensor = isinstance(value, torch.Tensor)
        assert torch.equal(value, other[name]) if is_tensor else value == other[name], name


def test_adapters_keep_their_names(modicum: Path, tmp_path: Path) -> None:
    """PEFT reads adapters only from one file of a fixed name, so flags for several files are
    refused."""
    lora = peft.LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM")
    model = peft.get_peft_model(loaded("qwen3"), lora)
    trained = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
    optimizer = front.AdamW(trained, lr=1e-2, state_format="fp32")
    step(model, optimizer)
    front.save(model, tmp_path / "steps", step=1, optimizer=optimizer)
    out = tmp_path / "out"
    run_json(modicum, "reshard", tmp_path / "steps/step-1", out)
    assert run_json(modicum, "verify", out)["ok"]
    assert [path.name for path in out.glob("*.safetensors")] == ["adapter_model.safetensors"]
    base = copy.deepcopy(torch_front.from_pretrained("qwen3"))  # PEFT changes it
    assert peft.PeftModel.from_pretrained(base, out).peft_config
    words = ("reshard", tmp_path / "steps/step-1", tmp_path / "small", "--shard-size", 64)
    assert failure(modicum, 2, *words)["category"] == "UNSUPPORTED"


@pytest.mark.parametrize("family", ("llama_tied", "qwen3_moe"))
def test_torchs_state_in_other_files_is_resumed(modicum: Path, tmp_path: Path, family: str) -> None:
    """After a reshard to smaller files the program resumes with the same state and extras, and
    makes the same steps. `--state-format` is refused: it is for the state of Modicum's AdamW."""
    model = loaded(family)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    step(model, optimizer)
    own = {"rng": torch.get_rng_state()}
    (tmp_path / "disk").mkdir()
    (tmp_path / "link").symlink_to("disk")  # as a root may be below one
    root = tmp_path / "link/steps"
    saved = front.save(
        model, root, step=1, optimizer=optimizer, extra={"epoch": 2}, extra_per_rank=own
    )
    assert Path(saved.path) == root / "step-1"
    out = tmp_path / "new/step-1"
    out.parent.mkdir()
    run_json(modicum, "reshard", root / "step-1", out, "--shard-size", "20KB")
    assert run_json(modicum, "verify", out)["ok"]
    again = loaded(family)
    other = torch.optim.AdamW(again.parameters(), lr=1.0)
    report = front.resume(again, out, optimizer=other, progress=False)
    assert report.extra == {"epoch": 2}
    assert torch.equal(report.extra_per_rank["rng"], own["rng"])
    step(model, optimizer, 2)
    step(again, other, 2)
    assert_same(values(model, optimizer), values(again, other))
    words = ("reshard", root / "step-1", tmp_path / "x", "--state-format", "fp32-split")
    error = failure(modicum, 2, *words)
    assert error["category"] == "UNSUPPORTED" and error["got"] == "torch.AdamW"


@pytest.mark.parametrize("family", ("llama_tied", "qwen3_moe"))
def test_a_state_in_another_format_is_resumed(modicum: Path, tmp_path: Path, family: str) -> None:
    """The oracle is an optimizer of the new format that loads the saved optimizer's state dict."""
    model = loaded(family).bfloat16()
    optimizer = front.AdamW(model.named_parameters(), lr=1e-2, state_format="fp32-split")
    step(model, optimizer)
    root = tmp_path / "steps"
    source = torch_front.checkpoint_of(family)
    front.save(model, root, step=1, optimizer=optimizer, source=source)
    out = tmp_path / "out"
    words = ("reshard", root / "step-1", out, "--state-format", "bf16-moments")
    run_json(modicum, *words)
    facts = json.loads((out / "optimizer/state.json").read_text())
    assert facts["state_format"] == "bf16-moments"
    again = loaded(family).bfloat16()
    other = front.AdamW(again.named_parameters(), lr=1e-2, state_format="bf16-moments")
    front.resume(again, out, optimizer=other, progress=False)
    expected = front.AdamW(model.named_parameters(), lr=1e-2, state_format="bf16-moments")
    expected.load_state_dict(optimizer.state_dict())
    assert_same(values(model, expected), values(again, other))
    step(model, expected, 2)
    step(again, other, 2)
    assert_same(values(model, expected), values(again, other))
