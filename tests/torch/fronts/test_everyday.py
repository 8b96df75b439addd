"""Calls that many scripts make have the same result within `modicum.torch.accelerate.loading` as
without it, or raise a typed error that names the remedy.

The oracle is transformers. Catches: a resized embedding that loses its stored rows, or gets removed
ones back; a copy of a model whose values are never loaded; an exempted model that is emptied; a
reference model that TRL's trainer leaves on meta; errors of torch about meta tensors; a model of
`from_config` that ignores a given source.
"""

import contextlib
import copy
import dataclasses
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
accelerate = pytest.importorskip("accelerate")
peft = pytest.importorskip("peft")

import accelerate_rank  # noqa: E402  (after torch is known to be there)
from accelerate_alone import build, prepare  # noqa: E402
from accelerate_rank import accelerator_of  # noqa: E402
from torch import nn  # noqa: E402
from torch.distributed.device_mesh import init_device_mesh  # noqa: E402
from torch.distributed.fsdp import fully_shard  # noqa: E402
from torch_front import (  # noqa: E402
    BY_NAME,
    alone,
    assert_same,
    checkpoint_of,
    config_of,
    from_pretrained,
    load,
)

import modicum.torch  # noqa: E402
from modicum.errors import BudgetError, UsageError  # noqa: E402
from modicum.torch import LoadRules  # noqa: E402
from modicum.torch.accelerate import loading  # noqa: E402

TOKENS = torch.arange(3, 14).reshape(1, 11)


@pytest.fixture(scope="module", autouse=True)
def written() -> None:
    """Writes the checkpoints before a process group is simulated."""
    for name in ("llama", "qwen3", "gpt2"):
        from_pretrained(name)


@pytest.fixture
def one_rank() -> Iterator[None]:
    """accelerate's FSDP2 over one rank."""
    with alone(), accelerate_rank.fsdp2_on_cpus():
        yield


def whole(parameter: Any) -> Any:
    """The parameter without gradient, gathered if it is sharded."""
    parameter = parameter.detach()
    return parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter


# ---- resize_token_embeddings


@pytest.mark.parametrize("name", ("llama", "qwen3", "gpt2"))
@pytest.mark.parametrize("mean", (True, False))
def test_resized_embeddings_keep_stored_rows(one_rank: None, name: str, mean: bool) -> None:
    """With `mean_resizing` new rows are close to the mean of the stored ones. Without it the model
    initialises them by its own rule."""
    theirs = from_pretrained(name)
    row_count = theirs.get_input_embeddings().num_embeddings
    with loading(progress=False):
        model = build(name)
        model.resize_token_embeddings(row_count + 5, mean_resizing=mean)
        model, _ = prepare(model)
    assert model.config.vocab_size == row_count + 5
    for mine, original in (
        (model.get_input_embeddings(), theirs.get_input_embeddings()),
        (model.get_output_embeddings(), theirs.get_output_embeddings()),
    ):
        weight, stored = whole(mine.weight), original.weight.detach()
        assert_same(weight[:row_count], stored, name)
        if mean:
            expected = stored.double().mean(0)
            assert torch.allclose(weight[row_count:].double(), expected, rtol=1e-2, atol=1e-3)
        else:
            assert 0 < weight[row_count:].float().std() < 0.1
    assert model(TOKENS).logits.shape[-1] == row_count + 5


def test_an_embedding_resized_to_fewer_rows_keeps_the_first(one_rank: None) -> None:
    theirs = from_pretrained("llama").get_input_embeddings().weight.detach()
    with loading(progress=False):
        model = build()
        model.resize_token_embeddings(len(theirs) - 7)
        model, _ = prepare(model)
    assert_same(whole(model.get_input_embeddings().weight), theirs[:-7], "embedding")


@pytest.mark.parametrize("more", (0, 5))
def test_rows_that_were_removed_are_new(one_rank: None, more: int) -> None:
    """An embedding that is resized to fewer rows and then to more has new rows, the mean of those
    that stayed, as transformers makes them."""
    theirs = from_pretrained("llama").get_input_embeddings().weight.detach()
    with loading(progress=False):
        model = build()
        model.resize_token_embeddings(len(theirs) - 7)
        model.resize_token_embeddings(len(theirs) + more)
        model, _ = prepare(model)
    weight = whole(model.get_input_embeddings().weight)
    assert_same(weight[: len(theirs) - 7], theirs[:-7], "embedding")
    mean = theirs[:-7].double().mean(0).expand(7 + more, -1)
    assert torch.allclose(weight[len(theirs) - 7 :].double(), mean, rtol=1e-2, atol=1e-3)


def test_a_model_resized_by_hand_needs_the_argument_resized() -> None:
    """Without the argument `resized` of `load`, a model with another vocabulary size is refused. If
    `missing` names the embeddings instead, a warning says that their stored rows are not used."""
    theirs = from_pretrained("llama").get_input_embeddings().weight.detach()

    def larger() -> Any:
        with modicum.torch.empty_parameters():
            config = config_of("llama")
            config.vocab_size += 3
            return BY_NAME["llama"].model_class._from_config(config, dtype=torch.float32)

    with alone():
        model, other = larger(), larger()
        with pytest.raises(UsageError, match="another shape"):
            load(model, checkpoint_of("llama"))
        load(model, checkpoint_of("llama"), rules=LoadRules(resized="mean"))
        with pytest.warns(
            UserWarning, match="2 stored tensors .*not used.* LoadRules.resized='mean'"
        ):
            load(
                other, checkpoint_of("llama"), rules=LoadRules(missing=["embed_tokens", "lm_head"])
            )
    got = model.get_input_embeddings().weight.detach()
    assert torch.equal(got[:-3], theirs.float())
    mean = theirs.double().mean(0).float()
    assert torch.allclose(got[-3:], mean, rtol=1e-6, atol=1e-9)


# ---- from_config, copies, exempted models, reference models


def test_prepare_initialises_a_model_from_a_config(one_rank: None) -> None:
    config = config_of("llama")
    with loading(progress=False) as inside:
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        assert all(parameter.is_meta for parameter in model.parameters())
        model, _ = prepare(model)
    assert inside.report is not None
    embedding = whole(model.get_input_embeddings().weight)
    assert embedding.std().item() == pytest.approx(config.initializer_range, rel=0.1)
    assert whole(model.model.norm.weight).unique().tolist() == [1.0]
    assert model(TOKENS).logits.isfinite().all()


def test_a_given_source_also_fills_a_model_from_a_config(one_rank: None) -> None:
    with loading(checkpoint_of("llama"), progress=False):
        config = config_of("llama")
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        model, _ = prepare(model)
    for name, parameter in model.named_parameters():
        assert_same(whole(parameter), from_pretrained("llama").get_parameter(name).float(), name)


@pytest.mark.parametrize("by", ["hand", "prepare"])
def test_a_model_filled_by_a_load_of_the_scripts_own_keeps_its_values(
    one_rank: None, by: str
) -> None:
    """A model of `from_config` that `modicum.torch.load` fills within loading() is sharded before
    the load by hand, or afterwards by prepare, which must not initialise it."""
    with loading(progress=False) as inside:
        config = config_of("llama")
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        if by == "hand":
            fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
        load(model, checkpoint_of("llama"))
        assert inside.unfilled() == []
        if by == "prepare":
            model, _ = prepare(model)
    for name, parameter in model.named_parameters():
        stored = from_pretrained("llama").get_parameter(name)
        assert_same(whole(parameter), stored.float(), name)
    assert model(TOKENS).logits.isfinite().all()


def test_a_deep_copy_is_loaded_as_well(one_rank: None) -> None:
    with loading(progress=False) as inside:
        model = build()
        reference = copy.deepcopy(model)
        model, _ = prepare(model)
        fully_shard(reference, mesh=init_device_mesh("cpu", (1,)))
        inside.fill(reference)
    for name, parameter in reference.named_parameters():
        assert_same(whole(parameter), from_pretrained("llama").get_parameter(name), name)
    # The hook by which loading() learns of copies is removed when the model has its values.
    assert "__deepcopy__" not in vars(model)


def test_a_model_that_is_built_in_inference_mode_is_loaded(one_rank: None) -> None:
    """Writes to it are counted. Its copy, made in this mode, would count none and is refused."""
    with loading(progress=False) as inside:
        model = build()
        with torch.inference_mode():
            reference = build()
            with pytest.raises(UsageError, match="inference_mode"):
                copy.deepcopy(reference)
        model, _ = prepare(model)
        inside.fill(reference)
    for name, parameter in reference.named_parameters():
        assert_same(parameter.detach(), from_pretrained("llama").get_parameter(name), name)


def test_a_save_without_fsdp2_says_that_modicum_takes_no_part(tmp_path: Path) -> None:
    """accelerate saves a model that FSDP2 does not shard. One warning names the reason."""
    with alone(), loading(progress=False) as inside:
        model = build()
        inside.fill(model)
        accelerator = accelerate.Accelerator(cpu=True)
        model = accelerator.prepare(model)
        with pytest.warns(UserWarning) as warned:
            for name in ("first", "second"):
                accelerator.save_state(tmp_path / name)
    (text,) = [str(warning.message) for warning in warned if "modicum" in str(warning.message)]
    assert "not Modicum: FSDP2 does not shard it (distributed_type NO). The " in text
    assert inside.saves == [] and not list(tmp_path.rglob("COMMIT"))
    assert (tmp_path / "second" / "model.safetensors").exists()


def test_an_exempted_model_is_read_as_usual(one_rank: None) -> None:
    with loading(progress=False) as inside:
        model = build()
        with inside.exempt():
            reward = build("qwen3")
        assert not any(parameter.is_meta for parameter in reward.parameters())
        prepare(model)
    for name, parameter in reward.named_parameters():
        assert_same(parameter, from_pretrained("qwen3").get_parameter(name), name)


def test_an_exempted_model_is_prepared_as_usual(one_rank: None) -> None:
    model = nn.Sequential(nn.Linear(4, 4))
    with loading(progress=False) as inside, inside.exempt(model):
        prepared, _ = prepare(model, auto_wrap_policy="no_wrap")
        assert prepared(torch.ones(1, 4)).isfinite().all()


def test_prepare_model_loads_a_reference_model(one_rank: None) -> None:
    with loading(progress=False):
        accelerator = accelerator_of()
        reference = accelerator.prepare_model(build(), evaluation_mode=True)
        assert reference(TOKENS).logits.isfinite().all()


def test_trls_prepare_fsdp_loads_a_reference_model(one_rank: None) -> None:
    utils = pytest.importorskip("trl.models.utils")
    with loading(progress=False):
        accelerator = accelerator_of()
        reference = utils.prepare_fsdp(build(), accelerator)
        assert reference(TOKENS).logits.isfinite().all()
    assert not hasattr(utils.prepare_fsdp, "__wrapped__")  # TRL's function is restored


# wrap_sharding is called twice, as by two calls of from_pretrained.
LATER = """
import sys, trl
from contextlib import ExitStack
from modicum.upstream.trl import wrap_sharding
assert "trl.trainer.dpo_trainer" not in sys.modules
def load(original, model, accelerator):
    return "loaded"
with ExitStack() as stack:
    for _ in range(2):
        wrap_sharding(stack, load)
    assert trl.DPOTrainer and trl.GRPOTrainer
    modules = [sys.modules["trl.trainer." + name] for name in ("dpo_trainer", "grpo_trainer")]
    assert all(module.prepare_fsdp(None, None) == "loaded" for module in modules)
assert not any(hasattr(module.prepare_fsdp, "__wrapped__") for module in modules)
"""


def test_trainers_that_trl_imports_later_load_their_reference_model() -> None:
    """TRL imports the module of `trl.DPOTrainer` when a script first uses that name, here after
    `prepare_fsdp` was replaced in the modules that were imported by then."""
    pytest.importorskip("trl")
    done = subprocess.run([sys.executable, "-c", LATER], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]


# ---- errors


# Uses of a model that need the values of its parameters.
READ: dict[str, Callable[[Any, Path], Any]] = {
    "item": lambda model, folder: model.get_input_embeddings().weight.mean().item(),
    "numpy": lambda model, folder: model.lm_head.weight.detach().numpy(),
    "tolist": lambda model, folder: model.lm_head.weight.tolist(),
    "if": lambda model, folder: bool((model.lm_head.weight > 0).any()),
    "to": lambda model, folder: model.to("cpu"),
    "data": lambda model, folder: setattr(model.lm_head.weight, "data", torch.ones(101, 39)),
    "equal": lambda model, folder: torch.equal(model.lm_head.weight, torch.ones(101, 39)),
    "copy": lambda model, folder: torch.ones(101, 39).copy_(model.lm_head.weight),
    "save_pretrained": lambda model, folder: model.save_pretrained(folder),
    "generate": lambda model, folder: model.generate(TOKENS, max_new_tokens=2),
}


@pytest.mark.parametrize("call", READ)
def test_uses_of_values_before_prepare_are_refused(
    one_rank: None, tmp_path: Path, call: str
) -> None:
    """The error names `prepare`. torch's own errors would speak of meta tensors or storages."""
    with pytest.raises(UsageError, match="values.*prepare") as refused, loading(progress=False):
        READ[call](build(), tmp_path)
    assert "\n" not in str(refused.value)


def test_only_device_maps_of_the_cpu_are_accepted(one_rank: None) -> None:
    for accepted in ("auto", "cpu", {"": "cpu"}):
        with loading(progress=False):
            model, _ = prepare(build(device_map=accepted))
        assert_same(whole(model.lm_head.weight), from_pretrained("llama").lm_head.weight, "head")
    for refused in ("meta", {"": "disk"}):
        with pytest.raises(UsageError) as error, loading(progress=False):
            build(device_map=refused, offload_folder=".")
        assert error.value.got == "device_map"


def test_magnitudes_of_weights_that_accelerate_casts_are_refused(
    one_rank: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """accelerate before 1.13 casts the sharded model, also the weights that are not trained."""
    shard = accelerate.accelerator.fsdp2_prepare_model
    monkeypatch.setattr(
        accelerate.accelerator,
        "fsdp2_prepare_model",
        lambda accelerator, model: shard(accelerator, model).to(torch.float64),
    )
    config = peft.LoraConfig(target_modules=["q_proj"], use_dora=True)
    with pytest.raises(UsageError, match="DoRA.*accelerate casts") as refused, loading():
        prepare(peft.get_peft_model(build(), config))
    assert refused.value.category == "UNSUPPORTED"
    assert "lora_magnitude_vector" in refused.value.tensor


def test_a_budget_error_is_readable(one_rank: None) -> None:
    """The traceback has only frames of the script, and ends with an error of one line."""
    lines: list[str] = []
    try:
        with loading(budget="1MiB", progress=False):
            prepare(build())
    except BudgetError as error:
        lines = traceback.format_exception(error)
    assert lines and lines[-1].count("\n") == 1
    assert "BudgetError" in lines[-1]
    frames = [line for line in lines if line.startswith("  File")]
    assert frames and all(__file__ in frame or "accelerate_alone" in frame for frame in frames)


SCRIPT = """
def call(act):
    return act()

def read(weight):
    return weight.mean().item()
"""


@pytest.mark.parametrize("folder", ("torch", "transformers", "modicum"))
def test_a_script_in_a_folder_named_like_a_package_keeps_its_frames(
    one_rank: None, folder: str
) -> None:
    script, names = f"/home/{folder}/functools.py", {}
    exec(compile(SCRIPT, script, "exec"), names)
    with pytest.raises(BudgetError) as refused, loading(budget="1MiB", progress=False):
        names["call"](lambda: prepare(build()))
    assert script in [frame.filename for frame in traceback.extract_tb(refused.tb)]
    with pytest.raises(UsageError, match="in read, line 6"), loading(progress=False):
        names["read"](build().lm_head.weight)


def test_a_budget_for_the_load_without_adamws_state_is_refused(
    one_rank: None, tmp_path: Path
) -> None:
    """The budget suffices for a load with torch's SGD, but not for a load with Modicum's AdamW,
    whose state counts towards it."""
    family = BY_NAME["llama"]
    larger = dataclasses.replace(family, config=family.config | {"vocab_size": 60000})
    directory = larger.write(larger.build(), tmp_path)
    needs = {}
    for name in ("SGD", "AdamW"):
        with pytest.raises(BudgetError) as refused, loading(budget="1MiB", progress=False):
            prepare_with(name, directory)
        needs[name] = int(refused.value.got)
    # Two moments of two matrices, embedding and head, in float32.
    moments_bytes = 2 * 2 * 4 * 60000 * family.config["hidden_size"]
    assert needs["AdamW"] - needs["SGD"] > moments_bytes > 16 << 20
    between = needs["SGD"] + moments_bytes // 2
    with pytest.raises(BudgetError) as refused, loading(budget=between, progress=False):
        prepare_with("AdamW", directory)
    assert refused.value.owners[1]["purpose"] == "moments"
    with loading(budget=between, progress=False) as inside:
        prepare_with("SGD", directory)
    assert inside.report is not None


def prepare_with(optimizer: str, directory: Path) -> None:
    model = BY_NAME["llama"].model_class.from_pretrained(directory)
    kinds = {"SGD": torch.optim.SGD, "AdamW": modicum.torch.AdamW}
    prepare(model, kinds[optimizer](model.parameters(), lr=0.1))


def test_a_load_over_budget_leaves_the_optimizer_without_state(one_rank: None) -> None:
    """The budget of `loading` applies, although the optimizer's own ledger has no limit."""
    with pytest.raises(BudgetError) as refused, loading(budget="1MiB", progress=False):
        model = build()
        optimizer = modicum.torch.AdamW(model.parameters())
        assert optimizer.held == {} and optimizer.state_dict()["state"] == {}
        prepare(model, optimizer)
    assert refused.value.shortfall_bytes
    assert optimizer.held == {} and all(p.is_meta for p in model.parameters())


def test_trainer_itself_refuses_two_ways_to_pass_an_optimizer(
    one_rank: None, tmp_path: Path
) -> None:
    """transformers raises both errors: `optim` takes only names that transformers knows, and
    `optimizers` is not allowed with FSDP (docs/guide/accelerate.md)."""
    with pytest.raises(ValueError, match="modicum.torch.AdamW"):
        transformers.TrainingArguments(str(tmp_path), optim="modicum.torch.AdamW")
    arguments = transformers.TrainingArguments(
        str(tmp_path), fsdp="full_shard", fsdp_config={"fsdp_version": 2}, use_cpu=True
    )
    optimizer = modicum.torch.AdamW([nn.Parameter(torch.ones(1))])
    with pytest.raises(RuntimeError, match="`optimizers` is not allowed if PyTorch FSDP"):
        transformers.Trainer(nn.Linear(1, 1), arguments, optimizers=(optimizer, None))


def test_a_step_on_parameters_without_values_is_refused(one_rank: None) -> None:
    with contextlib.suppress(ZeroDivisionError), loading(progress=False):
        optimizer = modicum.torch.AdamW(build().parameters())
        with pytest.raises(UsageError, match="is on meta.*optimizer="):
            optimizer.step()
        raise ZeroDivisionError  # ends the context, which otherwise refuses an unprepared model


def test_moments_are_not_rounded_twice() -> None:
    """accelerate's `prepare` passes an optimizer's state through `load_state_dict`, which must not
    change moments that are stored as int8."""
    torch.manual_seed(0)
    parameter = nn.Parameter(torch.randn(64, 256))
    optimizer = modicum.torch.AdamW([parameter], state_format="int8-moments")
    for _ in range(3):
        parameter.grad = torch.randn(64, 256)
        optimizer.step()
    before = optimizer.digest()
    optimizer.load_state_dict(optimizer.state_dict())
    assert optimizer.digest() == before


def test_torch_compile_does_not_trace_a_step() -> None:
    parameter = nn.Parameter(torch.ones(4))
    optimizer = modicum.torch.AdamW([parameter], lr=0.5)
    graphs: list[Any] = []

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    step = torch.compile(optimizer.step, backend=backend)
    for lr in (0.5, 0.25, 0.125):
        optimizer.param_groups[0]["lr"] = lr
        parameter.grad = torch.ones(4)
        step()
    assert optimizer.state[parameter]["step"].item() == 3 and not graphs
