"""`modicum.torch.save` writes the adapters of a PeftModel alone, without the base model.

The oracle is PEFT: the saved checkpoint has the same tensors and settings as the
directory of `save_pretrained`, and `PeftModel.from_pretrained` makes the saved model of it. Must
fail for these mutants: a base model that is saved, too; a trained tensor that is in no file;
tensors under Modicum's names instead of PEFT's; a config that differs by rank in the order of its
sets; a resume after which the model still has the adapters of before; a file of adapters that
counts as the source of the base model; adapters inside wrappers of torch that are not saved; a
tensor with two names in PEFT's file, which can't be resumed.
"""

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
peft = pytest.importorskip("peft")

import torch_front  # noqa: E402
from ranks import Ranks  # noqa: E402
from sharding import Cut, playing_new_rank  # noqa: E402
from torch import nn  # noqa: E402
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (  # noqa: E402
    checkpoint_wrapper,
)

import modicum.torch as front  # noqa: E402
from modicum.errors import UsageError  # noqa: E402
from modicum.torch.saving.adapters import why_not_alone  # noqa: E402

TARGETS = ["q_proj", "down_proj"]
# Kinds of adapters.
CONFIGS: dict[str, Callable[[], Any]] = {
    "lora": lambda: peft.LoraConfig(r=2, target_modules=TARGETS, task_type="CAUSAL_LM"),
    "dora": lambda: peft.LoraConfig(r=2, target_modules=TARGETS, use_dora=True, bias="lora_only"),
    "modules_to_save": lambda: peft.LoraConfig(
        r=2, target_modules=TARGETS, modules_to_save=["lm_head", "embed_tokens"]
    ),
    "token_indices": lambda: peft.LoraConfig(
        r=2, target_modules=TARGETS, trainable_token_indices=[1, 3]
    ),
    "ia3": lambda: peft.IA3Config(target_modules=TARGETS, feedforward_modules=["down_proj"]),
    "vera": lambda: peft.VeraConfig(r=2, target_modules=["q_proj"]),
}


def wrapped(how: str, seed: int) -> Any:
    """A loaded model with the adapters CONFIGS[how]. All tensors that train have random values."""
    model = torch_front.empty("qwen3")
    front.load(model, torch_front.checkpoint_of("qwen3"), progress=False)
    made = peft.get_peft_model(model, CONFIGS[how]())
    torch.manual_seed(seed)
    for parameter in made.parameters():
        if parameter.requires_grad:
            parameter.data.normal_()
    return made


@pytest.mark.parametrize("how", CONFIGS)
def test_the_files_are_those_of_peft(tmp_path: Path, how: str) -> None:
    model = wrapped(how, 1)
    report = front.save(model, tmp_path / "steps", step=5)
    step = Path(report.path)
    model.save_pretrained(tmp_path / "peft", save_embedding_layers=False)
    expected, stored = torch_front.stored_in(tmp_path / "peft"), torch_front.stored_in(step)
    assert stored.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(stored[name], tensor) and stored[name].dtype == tensor.dtype, name
    files = sorted(path.name for path in step.iterdir())
    assert files == ["COMMIT", "adapter_config.json", "adapter_model.safetensors", "manifest.json"]
    folders = (step, tmp_path / "peft")
    configs = [json.loads((folder / "adapter_config.json").read_text()) for folder in folders]
    for config in configs:  # PEFT writes these sets in any order
        for name in ("target_modules", "modules_to_save", "feedforward_modules"):
            config[name] = sorted(config.get(name) or [])
    assert configs[0] == configs[1]
    base = torch_front.BY_NAME["qwen3"].model_class.from_pretrained(
        torch_front.checkpoint_of("qwen3"), dtype="auto"
    )
    read = peft.PeftModel.from_pretrained(base, step).state_dict()
    for name, tensor in model.state_dict().items():
        assert torch.equal(read[name], tensor), name


@pytest.mark.parametrize("how", CONFIGS)
def test_wrappers_of_torch_change_nothing(tmp_path: Path, how: str) -> None:
    """Activation checkpointing and torch.compile change the names of modules, by which PEFT alone
    would not find the adapters. The saved tensors and the config must be those without wrappers."""
    model, inside = wrapped(how, 1), wrapped(how, 1)
    layers = inside.get_base_model().model.layers
    layers[0] = checkpoint_wrapper(layers[0])
    layers[1] = torch.compile(layers[1])
    steps = {
        "plain": Path(front.save(model, tmp_path / "plain", step=5).path),
        "wrapped": Path(front.save(torch.compile(inside), tmp_path / "wrapped", step=5).path),
    }
    expected = torch_front.stored_in(steps["plain"])
    stored = torch_front.stored_in(steps["wrapped"])
    assert stored.keys() == expected.keys()
    assert all(torch.equal(stored[name], tensor) for name, tensor in expected.items())
    configs = [(step / "adapter_config.json").read_text() for step in steps.values()]
    assert configs[0] == configs[1]
    again = wrapped(how, 2)
    front.resume(torch.compile(again), steps["wrapped"], progress=False)
    for name, tensor in model.state_dict().items():
        assert torch.equal(again.state_dict()[name], tensor), name


def test_adapters_in_ddp_are_saved_alone(tmp_path: Path) -> None:
    """They resume with the optimizer's state, in DistributedDataParallel."""
    with playing_new_rank(0, 1), torch.enable_grad():
        models = [nn.parallel.DistributedDataParallel(wrapped("lora", seed)) for seed in (1, 2)]
        optimizers = []
        for model in models:
            trained = [p for p in model.parameters() if p.requires_grad]
            optimizers.append(torch.optim.AdamW(trained))
        for parameter in optimizers[0].param_groups[0]["params"]:
            parameter.grad = torch.ones_like(parameter)
        optimizers[0].step()
        saved = front.save(models[0], tmp_path, step=1, optimizer=optimizers[0])
        assert (Path(saved.path) / "adapter_config.json").exists()
        front.resume(models[1], tmp_path, optimizer=optimizers[1], progress=False)
        expected = models[0].state_dict()
        for name, tensor in models[1].state_dict().items():
            assert torch.equal(tensor, expected[name]), name
        one, other = (optimizer.state_dict()["state"] for optimizer in optimizers)
        assert one.keys() == other.keys()
        assert all(torch.equal(one[at]["exp_avg"], other[at]["exp_avg"]) for at in one)


@pytest.mark.parametrize("how", CONFIGS)
def test_resumes_adapters_alone(tmp_path: Path, how: str) -> None:
    """A resumed checkpoint of adapters has no base model, so a later save of all tensors needs
    `source=`."""
    model = wrapped(how, 1)
    front.save(model, tmp_path / "steps", step=5)
    again = wrapped(how, 2)
    report = front.resume(again, tmp_path / "steps", progress=False)
    assert report.step == 5
    for name, tensor in model.state_dict().items():
        assert torch.equal(again.state_dict()[name], tensor), name
    with pytest.raises(UsageError, match=r"give SaveOptions\(source="):
        front.save(again, tmp_path / "steps", step=6, options=front.SaveOptions(adapters=False))


def test_a_resume_of_adapters_needs_the_base_model(tmp_path: Path) -> None:
    front.save(wrapped("lora", 1), tmp_path, step=5)
    model = peft.get_peft_model(torch_front.empty("qwen3"), CONFIGS["lora"]())
    with pytest.raises(UsageError, match="load the base model first"):
        front.resume(model, tmp_path, progress=False)


def test_the_base_model_is_saved_where_it_trains(tmp_path: Path) -> None:
    """If a tensor of the base model trains, a save has all tensors, and adapters alone are refused.
    `adapters=False` saves all tensors in any case; a model with two adapters needs it."""
    model = wrapped("lora", 1)
    source = torch_front.checkpoint_of("qwen3")
    model.get_base_model().model.norm.weight.requires_grad_(True)
    report = front.save(model, tmp_path / "steps", step=1, options=front.SaveOptions(source=source))
    norm = model.get_base_model().model.norm.weight
    assert torch.equal(torch_front.stored_in(Path(report.path))["model.norm.weight"], norm)
    with pytest.raises(UsageError, match=r"PEFT's file lacks it.*model\.norm\.weight"):
        front.save(model, tmp_path / "steps", step=2, options=front.SaveOptions(adapters=True))
    with pytest.raises(UsageError, match="a PeftModel"):
        front.save(
            model.get_base_model(),
            tmp_path / "steps",
            step=2,
            options=front.SaveOptions(adapters=True),
        )
    plain = wrapped("lora", 1)
    options = front.SaveOptions(adapters=False, source=source)
    with pytest.warns(UserWarning, match="from_pretrained would drop them") as warned:
        whole = front.save(plain, tmp_path / "steps", step=2, options=options)
    assert [f"modicum: {text}" for text in whole.warnings] == [str(warned[0].message)]
    assert "model.norm.weight" in torch_front.stored_in(Path(whole.path))
    merged = wrapped("lora", 1).merge_and_unload()
    options = front.SaveOptions(source=source)
    assert not front.save(merged, tmp_path / "merged", step=2, options=options).warnings
    plain.add_adapter("other", CONFIGS["lora"]())
    with pytest.raises(UsageError, match="default, other"):
        front.save(plain, tmp_path / "steps", step=3)


def test_why_adapters_are_not_saved_alone() -> None:
    """`why_not_alone` returns the reason, which becomes a warning when accelerate saves a model."""
    model = wrapped("lora", 1)
    assert why_not_alone(model) is None
    model.add_adapter("other", CONFIGS["lora"]())
    assert "default, other" in str(why_not_alone(model))
    bare = peft.inject_adapter_in_model(CONFIGS["lora"](), torch_front.empty("qwen3"))
    assert "no PeftModel is around it" in str(why_not_alone(bare))


def test_a_checkpoint_of_adapters_needs_a_model_with_adapters(tmp_path: Path) -> None:
    front.save(wrapped("lora", 1), tmp_path / "steps", step=5)
    with pytest.raises(UsageError, match="holds adapters only"):
        front.resume(torch_front.empty("qwen3"), tmp_path / "steps", progress=False)


def test_a_tensor_with_two_names_in_the_file_resumes(tmp_path: Path) -> None:
    """PEFT trains one copy of the embedding, which is the head, too, and stores it twice."""
    config = peft.LoraConfig(
        r=2, target_modules=["q_proj"], modules_to_save=["embed_tokens"], ensure_weight_tying=True
    )

    def made(seed: int) -> Any:
        model = torch_front.empty("llama_tied")
        front.load(model, torch_front.checkpoint_of("llama_tied"), progress=False)
        model = peft.get_peft_model(model, copy.deepcopy(config))
        torch.manual_seed(seed)
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.data.normal_()
        return model

    model, again = made(1), made(2)
    step = Path(front.save(model, tmp_path / "steps", step=5).path)
    stored = torch_front.stored_in(step)
    assert sum("lm_head" in name or "embed_tokens" in name for name in stored) == 2
    front.resume(again, tmp_path / "steps", progress=False)
    base = copy.deepcopy(torch_front.from_pretrained("llama_tied"))  # PEFT changes it
    by_peft = peft.PeftModel.from_pretrained(base, step)
    for name, tensor in model.state_dict().items():
        assert torch.equal(again.state_dict()[name], tensor), name
        assert torch.equal(by_peft.state_dict()[name], tensor), name


# ---- sharded


@pytest.mark.parametrize(("before", "after"), [(2, 3), (3, 1)])
def test_training_goes_on_in_another_world(
    worlds: dict[int, Ranks], tmp_path: Path, before: int, after: int
) -> None:
    """After a resume on another number of ranks, the next steps of the adapters are equal in all
    bits. The files have the adapters and their optimizer state only."""
    folder = str(tmp_path / "model")
    worlds[1].ask("write", directory=folder, family="qwen3", dtype="float32")
    cuts = {1: Cut("none", (1,))} | {n: Cut("fsdp2", (n,)) for n in (2, 3)}
    how = {"directory": folder, "root": str(tmp_path / "steps")}
    saved = worlds[before].ask("saves_adapters", cut=cuts[before], **how)[0]
    for answer in worlds[after].ask("resumes_adapters", cut=cuts[after], **how):
        assert answer["before"] == saved["saved"] and answer["end"] == saved["end"]
    step = tmp_path / "steps/step-2"
    adapters, state = torch_front.stored_in(step), torch_front.stored_in(step / "optimizer")
    assert adapters and all("lora_" in name or "lm_head" in name for name in adapters)
    assert len(state) == 2 * len(adapters)  # exp_avg and exp_avg_sq
