"""Acts (functions that ranks run by name, see torch_rank.py): complete scripts with accelerate,
Trainer, TRL or FSDP2 alone that train with torch's AdamW or with `modicum.torch.AdamW`."""

import contextlib
import tempfile
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import accelerate_rank
import torch
import torch.distributed as dist
import torch_rank
import transformers
from nested_options import nested
from rounding import nearest_sqrt

import modicum.memory
import modicum.torch
import modicum.torch.accelerate

LR = 1e-2


def script(
    directory: str, kind: str, by: str, adapters: bool = False, steps: int = 4, **how: Any
) -> dict[str, Any]:
    """Trains in float32. Returns each step's loss and inputs on this rank, `facts`, and the text of
    a refusal or "".

    Args:
        kind: "accelerate", "trainer", "sft" or "hand".
        by: "torch": torch's AdamW without Modicum; "modicum": ours within `loading()`; "outside":
            ours without it.
        how: further arguments of the function in KINDS, and `options` of `loading`.
    """
    if adapters:
        import peft  # noqa: F401  (loading() checks for it when the model is built)
    torch.manual_seed(1)
    options = how.pop("options", {})
    around: Any = contextlib.nullcontext()
    if by == "modicum" and kind != "hand":
        around = modicum.torch.accelerate.loading(
            progress=False, **nested(options, "rules", "memory")
        )
    losses: list[float] = []
    inputs: list[dict[str, Any]] = []
    told: dict[str, Any] = {"losses": losses, "refused": "", "inputs": inputs}
    with nearest_sqrt(), accelerate_rank.fsdp2_on_cpus():
        try:
            with around as loading:
                optimizer = KINDS[kind](
                    Script(directory, by, adapters, steps, losses, inputs), **how
                )
                told |= facts(optimizer, loading)
        except modicum.Error as error:
            told["refused"] = f"{type(error).__name__} {error}"
    told["losses"] = [loss.hex() for loss in losses]
    return told


def facts(optimizer: Any, loading: Any) -> dict[str, Any]:
    """The elements with state on this rank, and the reports of Modicum's optimizer and load."""
    optimizer = getattr(optimizer, "optimizer", optimizer)
    told: dict[str, Any] = {"trained": 0}
    for p in optimizer.state:
        told["trained"] += (p.to_local() if hasattr(p, "to_local") else p).numel()
    if isinstance(optimizer, modicum.torch.AdamW):
        told["held"] = optimizer.held
        told["attribution"] = modicum.memory.attribute(optimizer).document
    if loading is not None:
        told["report"] = loading.report.document
    return told


def model_of(directory: str, adapters: bool) -> Any:
    config = transformers.AutoConfig.from_pretrained(directory)
    kind = transformers.AutoModelForCausalLM
    model = kind.from_pretrained(directory, dtype=torch.float32, **experts_of(config))
    if adapters:
        model = accelerate_rank.with_adapters(model, seed=5, lora_dropout=0.0)
    return model.train()


def experts_of(config: Any) -> dict[str, str]:
    """An argument of `from_pretrained` for mixtures. On CPUs the default implementation of experts
    supports only even sizes."""
    is_mixture = hasattr(config, "num_experts_per_tok")
    return {"experts_implementation": "eager"} if is_mixture else {}


def saved_adapters(directory: str) -> str:
    """A new folder with the adapters of `model_of`, the same on all ranks."""
    folders = [tempfile.mkdtemp()]
    dist.broadcast_object_list(folders)
    if dist.get_rank() == 0:
        model_of(directory, adapters=True).save_pretrained(folders[0])
    dist.barrier()
    return folders[0]


def optimizer_of(by: str, params: Any, **options: Any) -> Any:
    cls = torch.optim.AdamW if by == "torch" else modicum.torch.AdamW
    return cls(params, **nested({"lr": LR, "weight_decay": 0.0} | options, "memory"))


def rows(vocabulary: int, count: int) -> torch.Tensor:
    """`count` rows of 12 random tokens."""
    return torch.randint(vocabulary, (count, 12), generator=torch.Generator().manual_seed(3))


def trained_steps(model: Any, script: "Script") -> Iterator[torch.Tensor]:
    """The loss for each of the script's inputs. If it has none yet, it gets random rows."""
    if not script.inputs:
        vocabulary = model.get_input_embeddings().num_embeddings
        world, rank = dist.get_world_size(), dist.get_rank()
        data = rows(vocabulary, script.steps * world).view(script.steps, world, -1)
        tokens = [row[None].tolist() for row in data[:, rank]]
        script.inputs.extend({"input_ids": row, "labels": row} for row in tokens)
    for inputs in script.inputs:
        loss = model(**{name: torch.tensor(value) for name, value in inputs.items()}).loss
        script.losses.append(loss.item())
        yield loss


class Script(NamedTuple):
    directory: str
    by: str
    adapters: bool
    steps: int
    losses: list[float]
    inputs: list[dict[str, Any]]
    """`losses` and `inputs` are filled during the run: the loss and the model's arguments of each
    step."""


def by_accelerate(
    script: Script,
    made: str = "before",
    sent: bool = False,
    **options: Any,
) -> Any:
    """Trains by accelerate.

    Args:
        made: whether the optimizer is made "before" or "after" prepare.
        sent: accelerate's `cpu_ram_efficient_loading`.
    """
    directory, by, adapters = script[:3]
    accelerator = accelerate_rank.accelerator_of(cpu_ram_efficient_loading=sent)
    model = model_of(directory, adapters)
    if made == "before":
        model, optimizer = accelerator.prepare(
            model, optimizer_of(by, model.named_parameters(), **options)
        )
    else:
        # With FSDP2 accelerate prepares a model only together with an optimizer. This one is thrown
        # away.
        model, _ = accelerator.prepare(model, torch.optim.SGD(model.parameters()))
        optimizer = accelerator.prepare_optimizer(
            optimizer_of(by, model.named_parameters(), **options)
        )
    for loss in trained_steps(model, script):
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return optimizer


def by_hand(
    script: Script,
    made: str = "after",
    told: bool = True,
    inputs: list[list[dict[str, Any]]] | None = None,
    **options: Any,
) -> Any:
    """Trains with FSDP2 alone.

    Args:
        made: when the optimizer is made: "before": before sharding, within `rebind_parameters`;
            "sharded":
            between sharding and the load; "after": after the load.
        told: whether the load gets the optimizer as an argument.
        inputs: by rank, the model's arguments in each step.
    """
    directory, by, adapters = script[:3]
    script.inputs.extend(inputs[dist.get_rank()] if inputs else [])
    with modicum.torch.empty_parameters():
        config = transformers.AutoConfig.from_pretrained(directory)
        kind, experts = transformers.AutoModelForCausalLM, experts_of(config)
        model = kind.from_config(config, dtype=torch.float32, **experts)
        if adapters:
            model = accelerate_rank.with_adapters(model, lora_dropout=0.0)
    optimizer: Any = None
    around: Any = contextlib.nullcontext()
    if made == "before":
        optimizer = optimizer_of(by, model.named_parameters(), **options)
        around = modicum.torch.rebind_parameters(model, optimizer)
    with around:
        torch_rank.sharded(model.get_base_model() if adapters else model, [dist.get_world_size()])
    if made == "sharded":
        optimizer = optimizer_of(by, model.named_parameters(), **options)
    declared = [] if optimizer is None or not told else [optimizer]
    modicum.torch.load(model, directory, progress=False, optimizer=declared)
    if adapters:
        modicum.torch.load(model, saved_adapters(directory), progress=False)
    if optimizer is None:
        optimizer = optimizer_of(by, model.named_parameters(), **options)
    for loss in trained_steps(model.train(), script):
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return optimizer


def arguments(kind: Any, folder: str, steps: int, **more: Any) -> Any:
    return kind(
        folder, use_cpu=True, fsdp=True,
        fsdp_config={"version": 2, "auto_wrap_policy": "TRANSFORMER_BASED_WRAP"},
        learning_rate=LR, lr_scheduler_type="constant", max_steps=steps,
        per_device_train_batch_size=1, logging_steps=1, save_strategy="no", report_to="none",
        disable_tqdm=True, **more,
    )  # fmt: skip


def noting(kind: Any, script: "Script", made: str) -> Any:
    """A subclass of the Trainer class `kind` that records its losses and the arguments of the
    model's calls in `script`. If `made` is "overridden", it makes the optimizer itself."""
    by, losses = script.by, script.losses

    class Noting(kind):  # type: ignore[misc]
        def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            script.inputs.append({name: value.tolist() for name, value in inputs.items()})
            got = super().compute_loss(model, inputs, *args, **kwargs)
            losses.append((got[0] if isinstance(got, tuple) else got).item())
            return got

        def create_optimizer(self, model: Any = None) -> Any:
            if made != "overridden":
                return super().create_optimizer(model)
            if self.optimizer is None:
                self.optimizer = optimizer_of(by, self.model.parameters())
            return self.optimizer

    return Noting


def optimizer_arguments(by: str, model: Any, made: str) -> dict[str, Any]:
    if made == "optimizers":
        return {"optimizers": (optimizer_of(by, model.parameters()), None)}
    if made == "class":
        cls = torch.optim.AdamW if by == "torch" else modicum.torch.AdamW
        return {"optimizer_cls_and_kwargs": (cls, {"lr": LR})}
    return {}


def by_trainer(
    script: Script,
    made: str = "optimizers",
) -> Any:
    """Trains by Trainer. `made`: the optimizer is passed as "optimizers", made from the "class", or
    by an "overridden" create_optimizer."""
    directory, by, adapters, steps = script[:4]
    with tempfile.TemporaryDirectory() as folder:
        how = arguments(transformers.TrainingArguments, folder, steps)
        model = model_of(directory, adapters)
        data = rows(model.get_input_embeddings().num_embeddings, steps * dist.get_world_size())
        trainer = noting(transformers.Trainer, script, made)(
            model, how, train_dataset=[{"input_ids": row, "labels": row} for row in data],
            **optimizer_arguments(by, model, made),
        )  # fmt: skip
        trainer.train()
        return trainer.optimizer


def tokenizer_of(count: int) -> Any:
    from tokenizers import Tokenizer, models

    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(count)}, unk_token="w0"))
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=words, eos_token="w1", pad_token="w2"
    )


def by_sft(
    script: Script,
    made: str = "optimizers",
) -> Any:
    """Trains by TRL's SFTTrainer on tokenised rows."""
    directory, by, adapters, steps = script[:4]
    import datasets
    import trl

    with tempfile.TemporaryDirectory() as folder:
        how = arguments(trl.SFTConfig, folder, steps, max_length=12, bf16=False)
        model = model_of(directory, adapters)
        count = model.get_input_embeddings().num_embeddings
        data = rows(count, steps * dist.get_world_size()).tolist()
        trainer = noting(trl.SFTTrainer, script, made)(
            model, args=how, processing_class=tokenizer_of(count),
            train_dataset=datasets.Dataset.from_dict({"input_ids": data}),
            **optimizer_arguments(by, model, made),
        )  # fmt: skip
        trainer.train()
        return trainer.optimizer


KINDS: dict[str, Callable[..., Any]] = {
    "accelerate": by_accelerate,
    "hand": by_hand,
    "trainer": by_trainer,
    "sft": by_sft,
}

ACTS: dict[str, Callable[..., Any]] = {"optimized": script}
