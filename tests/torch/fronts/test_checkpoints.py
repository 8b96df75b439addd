"""Unchanged scripts of accelerate and Trainer save checkpoints and resume from them within
`modicum.torch.accelerate.loading`, on two ranks.

The model, the optimizer's state and the next losses after a resume are those of the uninterrupted
training, bit for bit; `from_pretrained` and `modicum verify` read the checkpoints. Catches:
functions of accelerate that stay replaced after an exception; a checkpoint that is committed before
the script's own files are written, or resumed although it was not committed; a rotation that
removes the newest whole checkpoint, or keeps those of an abandoned run; lost group options of an
optimizer whose state has no tensors, or a schedule that begins anew with one; a checkpoint that is
damaged once the script saves its tokenizer there, or whose copy has no config; checkpoints of
accelerate that cannot be read; a tensor that the checkpoint lacks, without an error; a progress bar
although no weights are saved; no warning about files of accelerate in a checkpoint of Modicum, or
about adapters saved without COMMIT; a base model that is saved with its adapters, or that
`save_model` leaves out; a resume that reads adapters as the model; a save that removes the files
from which it reads, replaces those of a Trainer with its own `_save`, or leaves another program's
weights next to its own; a rotation that fails; a Trainer,
PEFT or TRL that is imported within the context and not replaced.
"""

import errno
import json
import os
import shutil
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")

import torch_front  # noqa: E402  (after torch is known to be there)
from accelerate.utils import FullyShardedDataParallelPlugin, fsdp_utils  # noqa: E402
from program import run_json  # noqa: E402
from ranks import Failed, Pool, Ranks  # noqa: E402
from safetensors.torch import load_file  # noqa: E402

import modicum.torch as front  # noqa: E402
from modicum import _modicum  # noqa: E402
from modicum.torch.accelerate.checkpoints import _rotate_accelerates  # noqa: E402
from modicum.torch.ranks.group import Ranks as World  # noqa: E402
from modicum.torch.saving import inside  # noqa: E402
from modicum.torch.saving.inside import (  # noqa: E402
    CheckpointInDirectory,
    fault_of,
    rotate,
    save_inside,
)
from modicum.upstream.checkpoints import (  # noqa: E402
    loses_moments,
    own_names,
    save_companions,
    save_config,
)
from modicum.upstream.wrappers import canonical  # noqa: E402


@pytest.fixture(scope="module")
def model(two: Ranks, tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = str(tmp_path_factory.mktemp("models") / "qwen3")
    config = {"tie_word_embeddings": True}
    two.ask("write", directory=folder, family="qwen3", config=config, dtype="bfloat16")
    return folder


def assert_verifies(modicum: Path, directory: Path) -> None:
    done = subprocess.run([modicum, "verify", directory], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def assert_reads(directory: Path, saved: dict[str, str]) -> None:
    """Asserts that `from_pretrained` reads the saved weights."""
    from torch_rank import told as digest_of

    loaded = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    for name, parameter in loaded.named_parameters():
        assert digest_of(parameter) == saved[name], name


# Names in a checkpoint directory: files in PEFT's format, and what Modicum adds to every checkpoint
# with the tensors of an optimizer.
PEFTS = {"adapter_config.json", "adapter_model.safetensors"}
OWN = {"COMMIT", "manifest.json", "optimizer"}


def assert_peft_reads(directory: Path, base: str, saved: dict[str, str]) -> None:
    """Asserts that PEFT reads the saved adapters."""
    from peft import PeftModel
    from torch_rank import told as digest_of

    loaded = transformers.AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    expected = {canonical(name): value for name, value in saved.items()}
    read = PeftModel.from_pretrained(loaded, directory)
    assert sum("lora_" in name for name in expected) > 4
    for name, parameter in read.named_parameters():
        assert digest_of(parameter) == expected[name], name


def flip(path: Path) -> None:
    """Changes the last bit of a file."""
    data = path.read_bytes()
    path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))


def refused(heard: list[Any]) -> str:
    """Asserts that every rank has failed. Returns rank 0's message."""
    assert all(isinstance(one, Failed) for one in heard), heard
    return heard[0].message


# ---- accelerate


def saved_and_resumed(two: Ranks, pool: Pool, **how: Any) -> tuple[list[Any], list[Any]]:
    """Runs a script that saves, and then in other processes one that resumes. Asserts that the
    resumed state and the next losses are equal. Returns the answers of the ranks of both
    scripts."""
    saved = two.ask("accelerate_saves", **how)
    with pool.lend(2) as others:
        resumed = others.ask("accelerate_resumes", **how)
    for before, after in zip(saved, resumed, strict=True):
        assert after["loaded"] == before["saved"]
        assert after["then"] == before["then"]
    return saved, resumed


@pytest.mark.parametrize(
    "optimizer", ("torch", "modicum", pytest.param("sgd", marks=pytest.mark.soak))
)
def test_accelerate_resumes_bit_for_bit(
    two: Ranks, pool: Pool, tmp_path: Path, modicum: Path, model: str, optimizer: str
) -> None:
    """After `load_state` in new processes, the state and the next three losses equal those of the
    processes that called `save_state`."""
    folder = tmp_path / "state"
    how = {"directory": model, "folder": str(folder), "by": "modicum", "optimizer": optimizer}
    saved, resumed = saved_and_resumed(two, pool, **how)
    assert [one["path"] for one in saved[0]["reports"]] == [str(folder)]
    assert saved[0]["warned"] == resumed[0]["warned"] == []
    names = {path.name for path in folder.iterdir()}
    assert names >= {"model.safetensors.index.json", "config.json", "COMMIT", "scheduler.bin"}
    assert not [name for name in names if name.endswith(".bin") and "model" in name]
    assert not [name for name in names if name.startswith(".")]
    assert_verifies(modicum, folder)
    assert_reads(folder, saved[0]["saved"])


def test_accelerates_own_checkpoints_are_read(two: Ranks, tmp_path: Path, model: str) -> None:
    """A script within `loading()` resumes from a checkpoint that accelerate has saved without
    Modicum: its next losses are those of the saving script. With Modicum the saving script saves
    the same state and has the same losses."""
    how = {"directory": model, "folder": str(tmp_path / "state")}
    theirs = two.ask("accelerate_saves", by="accelerate", **how)
    ours = two.ask("accelerate_resumes", by="modicum", **how)
    assert [one["then"] for one in ours] == [one["then"] for one in theirs]
    own = two.ask("accelerate_saves", by="modicum", **how | {"folder": str(tmp_path / "own")})
    assert [one["then"] for one in own] == [one["then"] for one in theirs]
    assert [one["saved"] for one in own] == [one["saved"] for one in theirs]


def test_an_accelerate_that_loses_moments_is_known_by_its_code() -> None:
    """accelerate before 1.13 reads into `optimizer.state_dict()`, which of a new optimizer has no
    moments."""

    def former(fsdp_plugin: Any, optimizer: Any) -> Any:
        return optimizer.state_dict()

    model = torch.nn.Linear(2, 2)
    new, used = (torch.optim.AdamW(model.parameters()) for _ in range(2))
    model(torch.ones(2)).sum().backward()
    used.step()
    sharded, whole = (
        FullyShardedDataParallelPlugin(fsdp_version=2, state_dict_type=kind)
        for kind in ("SHARDED_STATE_DICT", "FULL_STATE_DICT")
    )
    assert loses_moments(former, sharded, new)
    assert not loses_moments(former, sharded, used)
    assert not loses_moments(former, whole, new)
    assert not loses_moments(fsdp_utils.load_fsdp_optimizer, sharded, new)


def test_a_script_may_replace_the_copied_files(tmp_path: Path, modicum: Path) -> None:
    """A checkpoint gets the tokenizer of the loaded model, but its record does not have the
    tokenizer: a script may write another one there. A save of that checkpoint copies the one that
    it finds."""
    source, directory, root = tmp_path / "model", tmp_path / "checkpoint-3", tmp_path / "out"
    shutil.copytree(torch_front.checkpoint_of("qwen3"), source)
    (source / "tokenizer.json").write_text("{}")
    model = torch_front.empty("qwen3")
    torch_front.load(model, source)
    flight = CheckpointInDirectory(directory)
    how = {"ledger": None, "budget": "none", "staging": None, "adapters": False}
    with World.of_world().together() as world:
        flight.open(world)
        save_inside(model, flight, None, how, world)
    flight.end()
    assert (directory / "tokenizer.json").read_text() == "{}"
    (directory / "tokenizer.json").write_text('{"added_tokens": []}')
    assert fault_of(directory) == ""
    assert_verifies(modicum, directory)
    run_json(modicum, "save", directory, root, "--step", 3)
    out = root / "step-3"
    for name in ("tokenizer.json", "config.json"):
        assert (out / name).read_bytes() == (directory / name).read_bytes()
    assert_verifies(modicum, out)
    (out / "tokenizer.json").unlink()
    assert "INTEGRITY: a file of the checkpoint is missing" in fault_of(out)


def test_weights_of_another_program_are_replaced(tmp_path: Path, modicum: Path) -> None:
    """`from_pretrained` would read model.safetensors of an earlier save, not the shards."""
    directory = tmp_path / "final"
    source = torch_front.checkpoint_of("qwen3")
    model = torch_front.empty("qwen3")
    torch_front.load(model, source)
    model.save_pretrained(directory)
    assert (directory / "model.safetensors").exists()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(2.0)
    flight = CheckpointInDirectory(directory)
    how = {"ledger": None, "budget": "none", "staging": None, "adapters": False}
    with World.of_world().together() as world:
        flight.open(world)
        save_inside(model, flight, None, how | {"shard_size": "20KB"}, world)
    flight.end()
    assert len([*directory.glob("model-*.safetensors")]) > 1
    assert_verifies(modicum, directory)
    read = transformers.AutoModelForCausalLM.from_pretrained(directory)
    assert all((parameter == 2).all() for parameter in read.parameters())


def test_what_the_model_does_not_have_is_not_saved(tmp_path: Path, modicum: Path) -> None:
    """The head of the base of a sequence classifier, which `save_pretrained` would not save."""
    source, directory = torch_front.checkpoint_of("qwen3"), tmp_path / "checkpoint-3"
    config = transformers.AutoConfig.from_pretrained(source, num_labels=3)
    with front.empty_parameters():
        model = transformers.AutoModelForSequenceClassification.from_config(config)
    rules = front.LoadRules(missing=["^score"], unexpected=["^lm_head"])
    front.load(model, source, rules=rules, progress=False)
    flight = CheckpointInDirectory(directory)
    how = {"ledger": None, "budget": "none", "staging": None, "adapters": False}
    with World.of_world().together() as world:
        flight.open(world)
        save_config(model, directory)
        report = save_inside(model, flight, None, how, world)
    flight.end()
    assert report.left_out == ["lm_head.weight"] and report.copied == []
    assert_verifies(modicum, directory)
    read, info = transformers.AutoModelForSequenceClassification.from_pretrained(
        directory, output_loading_info=True
    )
    assert not info["unexpected_keys"] and not info["missing_keys"]
    for name, parameter in model.named_parameters():
        assert torch.equal(read.get_parameter(name), parameter), name


def test_the_number_of_a_step_fits_or_is_0() -> None:
    """A name may end in a date to the microsecond, which has 20 digits."""
    for name, number in (("epoch", 0), ("state_7", 7), ("state_20261127133849123456", 0)):
        assert CheckpointInDirectory(Path(name)).number == number


def test_saving_beside_accelerates_own_files_warns(
    two: Ranks, tmp_path: Path, modicum: Path, model: str
) -> None:
    """Modicum saves twice into a directory with a checkpoint of accelerate. Only the first of these
    saves and the resume warn, each once and on rank 0. accelerate's files are not changed, and the
    resume reads Modicum's."""
    folder = tmp_path / "state"
    how = {"directory": model, "folder": str(folder), "by": "modicum"}
    two.ask("accelerate_saves", **how | {"by": "accelerate"})
    kept = {path: path.read_bytes() for path in folder.glob("*_0/*")}
    assert kept
    (saved, other) = two.ask("accelerate_saves", times=2, steps=1, **how)
    (resumed, _) = two.ask("accelerate_resumes", **how)
    assert resumed["then"] == saved["then"]
    assert saved["warned"] == resumed["warned"] and other["warned"] == []
    (text,) = saved["warned"]
    assert text.startswith(f"modicum: {folder} also has optimizer_0, pytorch_model_fsdp_0, which ")
    assert "save into a new directory" in text
    assert {path: path.read_bytes() for path in folder.glob("*_0/*")} == kept


def test_accelerates_own_files_are_recognised(tmp_path: Path) -> None:
    """Modicum, too, saves the second model in `pytorch_model_fsdp_1`. This directory counts as
    accelerate's only if it has the file `.metadata`, which torch writes."""
    for name in ("pytorch_model_fsdp_1", "optimizer", "optimizer_1", "pytorch_model_fsdp_0"):
        (tmp_path / name).mkdir()
    for name in ("optimizer.bin", "optimizer.safetensors", "pytorch_model_fsdp_rank1.bin"):
        (tmp_path / name).touch()
    first = ["optimizer.bin", "pytorch_model_fsdp_0", "pytorch_model_fsdp_rank1.bin"]
    assert own_names(tmp_path, 0) == first
    assert own_names(tmp_path, 1) == ["optimizer_1"]
    (tmp_path / "pytorch_model_fsdp_1" / ".metadata").touch()
    assert own_names(tmp_path, 1) == ["optimizer_1", "pytorch_model_fsdp_1"]


@pytest.mark.parametrize("optimizer", ("torch", "modicum"))
def test_adapters_are_saved_alone_and_resume_bit_for_bit(
    two: Ranks, pool: Pool, tmp_path: Path, modicum: Path, model: str, optimizer: str
) -> None:
    """Only the adapters of a PeftModel are saved, not its base. They are saved under activation
    checkpointing, too, where PEFT itself would save none."""
    pytest.importorskip("peft")
    folder = tmp_path / "state"
    how = {"directory": model, "folder": str(folder), "by": "modicum", "optimizer": optimizer}
    how |= {"adapters": True, "activation_checkpointing": True}
    saved, resumed = saved_and_resumed(two, pool, **how)
    assert saved[0]["warned"] == resumed[0]["warned"] == []
    names = {path.name for path in folder.iterdir()}
    assert names == PEFTS | OWN | {"scheduler.bin", "random_states_0.pkl", "random_states_1.pkl"}
    assert_verifies(modicum, folder)
    assert_peft_reads(folder, model, saved[0]["saved"])


def test_adapters_with_another_trained_tensor_are_left_to_accelerate(
    two: Ranks, pool: Pool, tmp_path: Path, modicum: Path, model: str
) -> None:
    """PEFT's file has no place for a trained tensor of the base. `save_state` then saves as without
    Modicum, and one warning says why. `modicum.torch.save` saves such a model with COMMIT, and a
    script of accelerate resumes from that."""
    pytest.importorskip("peft")
    folder, how = tmp_path / "state", {"directory": model, "root": str(tmp_path / "steps")}
    (saved, other) = two.ask("adapters_with_another", folder=str(folder), **how)
    assert (folder / "pytorch_model_fsdp_0").exists() and not list(folder.rglob("COMMIT"))
    (text,) = saved["warned"]
    assert other["warned"] == saved["reports"] == []
    assert "it trains base_model.model.model.norm.weight, which PEFT's file lacks. The" in text
    assert "has no COMMIT" in text
    assert_verifies(modicum, tmp_path / "steps")
    with pool.lend(2) as others:
        resumed = others.ask("adapters_with_another_resumed", **how)
    assert resumed == [saved["saved"], other["saved"]]


def test_save_model_has_the_base_of_adapters(two: Ranks, tmp_path: Path, model: str) -> None:
    """For a PeftModel `save_model` is left to accelerate, which writes all tensors."""
    pytest.importorskip("peft")
    how = {"directory": model, "folder": str(tmp_path / "model"), "size": "10GB"}
    (answer, _) = two.ask("accelerate_saves_model", adapters=True, **how)
    assert answer["reports"] == [] and not (tmp_path / "model" / "COMMIT").exists()
    stored = load_file(tmp_path / "model" / "model.safetensors")
    assert "base_model.model.model.norm.weight" in stored


def linked(folder: Path) -> Path:
    """A link to a directory, below which a script saves."""
    (folder / "disk").mkdir()
    (folder / "link").symlink_to("disk")
    return folder / "link"


def test_a_second_save_replaces_the_first_in_the_same_directory(
    two: Ranks, tmp_path: Path, modicum: Path, model: str
) -> None:
    folder = linked(tmp_path) / "state"
    how = {"directory": model, "folder": str(folder), "by": "modicum"}
    saved = two.ask("accelerate_saves", times=2, **how)
    resumed = two.ask("accelerate_resumes", **how)
    assert [one["then"] for one in resumed] == [one["then"] for one in saved]
    assert_verifies(modicum, folder)
    # A script may pass the checkpoint to from_pretrained (docs/guide/accelerate.md). Then it does
    # not read the original model, which is moved away here.
    base = Path(model).rename(tmp_path / "moved")
    try:
        again = two.ask("accelerate_resumes", **how | {"directory": str(folder)})
    finally:
        base.rename(model)
    assert [one["then"] for one in again] == [one["then"] for one in saved]


@pytest.mark.parametrize("saves", ("save_state", "save_model of Trainer"))
def test_a_model_is_saved_into_the_directory_that_it_was_loaded_from(
    two: Ranks, tmp_path: Path, modicum: Path, model: str, saves: str
) -> None:
    """`save_pretrained`, which writes the config, removes weights from its directory."""
    folder = str(shutil.copytree(model, tmp_path / "both"))
    how = {"directory": folder, "folder": folder, "by": "modicum"}
    if saves == "save_state":
        end = two.ask("accelerate_saves", **how)[0]["saved"]
    else:
        end = two.ask("trains", max_steps=1, save_strategy="no", final=True, **how)[0]["end"]
    assert_verifies(modicum, Path(folder))
    assert_reads(Path(folder), end)


def test_total_limit_and_load_state_use_the_newest_whole_checkpoint(
    two: Ranks, tmp_path: Path, model: str
) -> None:
    """accelerate itself names the checkpoints here. With a `total_limit` of one, the newest of
    three stays. `load_state()` skips newer ones: without COMMIT, with the record of a save that
    has failed, and with one changed bit. A new run begins with the number 0: its checkpoint stays,
    and all ranks refuse to save it again."""
    project = {"project": str(tmp_path), "limit": 1}
    how = {"directory": model, "folder": None, "by": "modicum"} | project
    saved = two.ask("accelerate_saves", times=3, **how)
    folder = tmp_path / "checkpoints"
    assert [path.name for path in folder.iterdir()] == ["checkpoint_2"]
    (folder / "checkpoint_3" / ".partial-3-host-1-1-0").mkdir(parents=True)
    for name in ("checkpoint_4", "checkpoint_5"):
        shutil.copytree(folder / "checkpoint_2", folder / name)
    (folder / "checkpoint_4" / "COMMIT").unlink()
    flip(max((folder / "checkpoint_5" / "optimizer").glob("model*.safetensors")))
    resumed = two.ask("accelerate_resumes", **how)
    assert [one["then"] for one in resumed] == [one["then"] for one in saved]
    reasons = [one.partition("is skipped: ")[2].partition(" (")[0] for one in resumed[0]["warned"]]
    assert reasons == [
        "INTEGRITY: the values are not those that were saved",
        *["UNCOMMITTED: the checkpoint was not committed"] * 2,
    ]
    two.ask("accelerate_saves", times=1, **how)
    assert [path.name for path in folder.iterdir()] == ["checkpoint_0"]
    two.tell("accelerate_saves", times=1, **how)
    assert "USAGE: the checkpoint exists already" in refused(two.hear())


def test_a_checkpoint_that_was_not_committed_is_refused(
    two: Ranks, tmp_path: Path, model: str
) -> None:
    folder = tmp_path / "state"
    how = {"directory": model, "folder": str(folder), "by": "modicum"}
    two.ask("accelerate_saves", **how)
    (folder / ".partial-0-host-1-1-0").mkdir()
    (folder / "COMMIT").unlink()
    two.tell("accelerate_resumes", **how)
    assert "UNCOMMITTED: the checkpoint was not committed" in refused(two.hear())


def test_a_model_with_more_tensors_is_refused(two: Ranks, tmp_path: Path, model: str) -> None:
    """The error names the tensor that the checkpoint lacks, and the remedy."""
    folder, larger = str(tmp_path / "state"), str(tmp_path / "larger")
    two.ask("accelerate_saves", directory=model, folder=folder, by="modicum")
    config = {"tie_word_embeddings": True, "num_hidden_layers": 3}
    two.ask("write", directory=larger, family="qwen3", config=config, dtype="bfloat16")
    two.tell("accelerate_resumes", directory=larger, folder=folder, by="modicum")
    message = refused(two.hear())
    assert "MISMATCH: the checkpoint lacks a tensor of the model: build the model that" in message
    assert "tensor model.layers.2." in message


def test_save_model_writes_weights_only(
    two: Ranks, tmp_path: Path, modicum: Path, model: str
) -> None:
    folder = tmp_path / "saved"
    how = {"directory": model, "folder": str(folder)}
    saved = two.ask("accelerate_saves_model", size="20KB", **how)
    assert len([*folder.glob("model-*.safetensors")]) > 2
    assert not (folder / "optimizer").exists()
    assert_verifies(modicum, folder)
    assert_reads(folder, saved[0]["saved"])
    two.ask("accelerate_saves_model", size="10GB", **how)
    assert [path.name for path in folder.glob("model*")] == ["model.safetensors"]
    assert_reads(folder, saved[0]["saved"])


def test_no_progress_bar_is_drawn_for_a_config(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    transformers.utils.logging.enable_progress_bar()
    with torch.device("meta"):
        model = transformers.GPT2Model(transformers.GPT2Config(n_embd=8, n_layer=1, n_head=1))
    save_config(model, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["config.json"]
    assert "model shards" not in capfd.readouterr().err
    # A later save of weights by transformers draws its bar again.
    model.to_empty(device="cpu").save_pretrained(tmp_path)
    assert "model shards" in capfd.readouterr().err


# ---- Trainer


@pytest.mark.parametrize(
    ("optimizer", "sharded", "limit"),
    [
        pytest.param("torch", False, 2, marks=pytest.mark.soak),
        ("modicum", False, 1),
        pytest.param("torch", True, 2, marks=pytest.mark.soak),
        pytest.param("sgd", False, 2, marks=pytest.mark.soak),
    ],
)
def test_trainer_resumes_bit_for_bit(
    two: Ranks,
    pool: Pool,
    tmp_path: Path,
    modicum: Path,
    model: str,
    optimizer: str,
    sharded: bool,
    limit: int,
) -> None:
    """A run with `save_steps` and `save_total_limit` stops, and is resumed in other processes by
    `resume_from_checkpoint`. Its losses are those of an uninterrupted run; in the first case that
    run is made without Modicum. With a limit of one, the checkpoint from which the run has resumed
    is removed at the next save. There the script passes the checkpoint to from_pretrained, so that
    it does not read the original model, which is moved away."""
    folder = linked(tmp_path) / "out"
    how = {"directory": model, "by": "modicum", "optimizer": optimizer, "sharded": sharded}
    how |= {"max_steps": 6, "save_steps": 2, "save_total_limit": limit}
    if optimizer == "torch" and not sharded:
        plain = how | {"by": "accelerate", "folder": str(tmp_path / "plain")}
        (expected, _) = two.ask("trains", **plain)
    else:
        (expected, _) = two.ask("trains", folder=str(tmp_path / "whole"), **how)
    assert len(expected["losses"]) == 6
    (first, _) = two.ask("trains", folder=str(folder), stop_at=4, **how)
    names = ["checkpoint-2", "checkpoint-4", "checkpoint-6"]
    # `saved` has the names of all checkpoints after each save.
    assert first["saved"] == [names[:1], names[2 - limit : 2]]
    with pool.lend(2) as others, ExitStack() as stack:
        if limit == 1:
            how["directory"] = str(folder / "checkpoint-4")
            base = Path(model).rename(tmp_path / "moved")
            stack.callback(base.rename, model)
        (second, _) = others.ask("trains", folder=str(folder), resume=True, final=True, **how)
    assert first["losses"] | second["losses"] == expected["losses"]
    assert set(second["losses"]) == {5, 6}
    assert second["end"] == expected["end"]
    assert second["saved"] == [names[3 - limit :]]
    # The number 0 is that of the final `save_model`, whose directory has no number in its name.
    assert [one["step"] for one in second["reports"]] == [6, 0]
    for directory in (folder / "checkpoint-6", folder):
        assert_verifies(modicum, directory)
        assert_reads(directory, second["end"])
    found = {path.name for path in (folder / "checkpoint-6").iterdir()}
    assert found >= {"COMMIT", "trainer_state.json", "scheduler.pt", "rng_state_1.pth"}
    assert found >= {"training_args.bin", "optimizer", "config.json"}
    assert not [name for name in found if name.startswith(("optimizer.", "pytorch_model", "."))]


@pytest.mark.soak
def test_trainer_with_adapters_resumes_bit_for_bit(
    two: Ranks, pool: Pool, tmp_path: Path, modicum: Path, model: str
) -> None:
    """The losses are those of an uninterrupted run. The checkpoint and the directory of the final
    `save_model` have files in PEFT's format."""
    pytest.importorskip("peft")
    folder = tmp_path / "out"
    how = {"directory": model, "by": "modicum", "optimizer": "modicum"}
    how |= {"adapters": "and norms", "max_steps": 4, "save_steps": 2, "save_total_limit": 1}
    (expected, _) = two.ask("trains", folder=str(tmp_path / "whole"), **how)
    (first, _) = two.ask("trains", folder=str(folder), stop_at=2, **how)
    with pool.lend(2) as others:
        (second, _) = others.ask("trains", folder=str(folder), resume=True, final=True, **how)
    assert first["losses"] | second["losses"] == expected["losses"]
    assert set(second["losses"]) == {3, 4} and second["end"] == expected["end"]
    assert first["warned"] == second["warned"] == []
    assert second["saved"] == [["checkpoint-4"]]
    for directory in (folder / "checkpoint-4", folder):
        assert_verifies(modicum, directory)
        assert_peft_reads(directory, model, second["end"])
    found = {path.name for path in (folder / "checkpoint-4").iterdir()}
    assert found == PEFTS | OWN | {
        "README.md", "rng_state_0.pth", "rng_state_1.pth", "scheduler.pt", "trainer_state.json",
        "training_args.bin",
    }  # fmt: skip


def test_a_trainer_with_its_own_save_saves_by_itself(
    two: Ranks, tmp_path: Path, model: str
) -> None:
    """The checkpoint has no part of Modicum's: neither weights nor a COMMIT, which would be written
    before the files that Trainer writes last. Trainer resumes from it by itself."""
    how = {"directory": model, "by": "modicum", "own_save": True, "max_steps": 3}
    (whole, _) = two.ask("trains", folder=str(tmp_path / "whole"), save_strategy="no", **how)
    how |= {"folder": str(tmp_path / "out"), "save_steps": 2}
    (first, _) = two.ask("trains", stop_at=2, **how)
    checkpoint = tmp_path / "out/checkpoint-2"
    found = {path.name for path in checkpoint.iterdir()}
    assert found >= {"own.txt", "model.safetensors", "optimizer.bin", "trainer_state.json"}
    assert not found & {"COMMIT", "manifest.json"} and first["reports"] == []
    (second, _) = two.ask("trains", resume=True, **how)
    assert first["losses"] | second["losses"] == whole["losses"]


@pytest.mark.parametrize("rank", (0, 1))
def test_rank_0_alone_writes_what_goes_with_a_model(tmp_path: Path, rank: int) -> None:
    """`Trainer._save` of some versions writes on every rank."""
    trainer = SimpleNamespace(
        model=torch.nn.Linear(2, 2),
        is_world_process_zero=lambda: rank == 0,
        _save=lambda folder, state_dict: Path(folder, "tokenizer.json").touch(),
    )
    save_companions(trainer, tmp_path)
    assert len([*tmp_path.iterdir()]) == (1 if rank == 0 else 0)


def test_the_best_checkpoint_is_kept_and_loaded(two: Ranks, tmp_path: Path, model: str) -> None:
    """The evaluation before each save leaves parameters gathered, so the save must reshard them."""
    how = {"directory": model, "by": "modicum", "max_steps": 4, "save_steps": 1}
    how |= {"save_total_limit": 2, "eval_strategy": "steps", "eval_steps": 1}
    how |= {"load_best_model_at_end": True, "metric_for_best_model": "loss"}
    (answer, _) = two.ask("trains", folder=str(tmp_path / "out"), **how)
    best = Path(answer["best"])
    assert best.is_dir() and not fault_of(best)
    assert_reads(best, answer["end"])


def test_save_only_model_saves_no_optimizer(two: Ranks, tmp_path: Path, model: str) -> None:
    folder = tmp_path / "out"
    how = {"directory": model, "by": "modicum", "max_steps": 2, "save_steps": 1}
    (answer, _) = two.ask("trains", folder=str(folder), save_only_model=True, **how)
    assert not (folder / "checkpoint-2" / "optimizer").exists()
    assert_reads(folder / "checkpoint-2", answer["end"])
    # Trainer would go on at step 1 with a new optimizer and a new scheduler.
    two.tell("trains", folder=str(folder), resume=str(folder / "checkpoint-1"), **how)
    error = refused(two.hear())
    assert "MISMATCH: the checkpoint has no optimizer state" in error and "checkpoint-1" in error


def test_resumes_from_the_newest_whole_checkpoint(two: Ranks, tmp_path: Path, model: str) -> None:
    """`get_last_checkpoint` skips checkpoints that are uncommitted, damaged or empty. An
    uncommitted or damaged one that the script names is refused. On several ranks it compares no
    values: it returns checkpoint 5, which has a changed one, and `train` takes checkpoint 2."""
    folder = tmp_path / "out"
    how = {"directory": model, "by": "modicum", "max_steps": 6, "save_steps": 2}
    how |= {"folder": str(folder)}
    (whole, _) = two.ask("trains", **how)
    for name in ("checkpoint-4", "checkpoint-6"):
        shutil.copytree(folder / name, tmp_path / name)
    # The checkpoint of step 6 is uncommitted, that of step 4 is damaged, and number 7 is empty.
    (folder / "checkpoint-6" / "COMMIT").unlink()
    (folder / "checkpoint-6" / ".partial-6-host-1-1-0").mkdir()
    weights = next((folder / "checkpoint-4").glob("model*.safetensors"))
    weights.write_bytes(weights.read_bytes()[:-1])
    (folder / "checkpoint-4" / "trainer_state.json").unlink()
    (folder / "checkpoint-7").mkdir()
    shutil.copytree(tmp_path / "checkpoint-4", folder / "checkpoint-5")
    flip(max((folder / "checkpoint-5").glob("model*.safetensors")))
    (folder / "checkpoint-2" / "pytorch_model_fsdp_0").mkdir()  # as accelerate would, for a warning
    two.tell("trains", resume=str(folder / "checkpoint-6"), **how)
    assert "UNCOMMITTED" in refused(two.hear())
    two.tell("trains", resume=str(folder / "checkpoint-4"), **how)
    assert "INTEGRITY: a file of the checkpoint has another length" in refused(two.hear())
    (again, other) = two.ask("trains", resume="last", **how)
    assert [one for one in again["warned"] if "checkpoint-5 is skipped: INTEGRITY: the val" in one]
    assert not [one for one in other["warned"] if "is skipped" in one]  # once, by rank 0
    assert set(again["losses"]) == {3, 4, 5, 6}
    assert [one for one in again["warned"] if "checkpoint-2 also has pytorch_model_fsdp_0" in one]
    assert again["end"] == whole["end"]
    for name in ("checkpoint-4", "checkpoint-6"):
        new, old = (
            json.loads((at / name / "manifest.json").read_text())["tensors"]
            for at in (folder, tmp_path)
        )
        assert new == old, name


# ---- functions


def test_functions_are_restored(two: Ranks) -> None:
    for answer in two.ask("patched"):
        assert answer["inside"] == answer["all"]
        assert answer["after"] == answer["after an error"] == []
        # A module that was imported within the context has the original functions again, too.
        assert answer["imported"] is False, "a module still has a replacement of loading()"


LATE_IMPORTS = """
import importlib, os, sys
import modicum.torch.accelerate
import transformers.trainer_utils

assert "transformers.trainer" not in sys.modules
with modicum.torch.accelerate.loading():
    import peft, transformers.trainer, trl
    import trl.models.utils

    replaced = (
        peft.tuners.tuners_utils.BaseTuner.inject_adapter,
        transformers.trainer.Trainer._save_checkpoint,
        trl.models.utils.prepare_fsdp,
    )
    for module in (transformers.trainer, transformers.trainer_utils):
        print(os.path.basename(module.get_last_checkpoint(sys.argv[1])))
assert all(hasattr(one, "__wrapped__") for one in replaced), replaced
assert not hasattr(transformers.trainer.Trainer._save_checkpoint, "__wrapped__")
assert not [one for one in sys.meta_path if type(one).__module__.startswith("modicum")]
importlib.reload(transformers.trainer)
assert not hasattr(transformers.trainer.Trainer._save_checkpoint, "__wrapped__")
"""


def test_packages_that_are_imported_within_the_context_are_replaced(tmp_path: Path) -> None:
    """TRL imports Trainer when one of its trainers is first used."""
    pytest.importorskip("peft")
    pytest.importorskip("trl")
    put(tmp_path, 2)
    put(tmp_path, 4, whole=False)
    command = [sys.executable, "-c", LATE_IMPORTS, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["checkpoint-2"] * 2
    assert "checkpoint-4 is skipped: UNCOMMITTED" in done.stderr


def put(folder: Path, *numbers: int, whole: bool = True) -> list[Path]:
    """Makes checkpoints with these numbers and returns their paths. `whole`: they are complete, as
    of another program; otherwise they are uncommitted ones of Modicum."""
    made = [folder / f"checkpoint-{number}" for number in numbers]
    for one in made:
        one.mkdir()
        (one / ("a" if whole else ".partial-1-host-1-1-0")).mkdir()
    return made


def test_rotation_keeps_the_newest_complete_checkpoint(tmp_path: Path) -> None:
    """Checkpoints newer than the newest complete one are kept, too, and do not count towards the
    limit: they may be incomplete because they are being saved."""
    one, two = put(tmp_path, 1, 2)
    (three,) = put(tmp_path, 3, whole=False)
    (four,) = put(tmp_path, 4)
    (five,) = put(tmp_path, 5, whole=False)
    rotate([one, two, three, four, five], 2, None, tmp_path)
    assert sorted(tmp_path.iterdir()) == [two, four, five]
    rotate([two, four, five], 1, None, tmp_path)
    assert sorted(tmp_path.iterdir()) == [four, five]
    rotate([four, five], 1, None, tmp_path)
    assert sorted(tmp_path.iterdir()) == [four, five]


def test_rotation_removes_an_abandoned_run(tmp_path: Path) -> None:
    """A run has resumed from checkpoint 2, and saves 4 and 5 under the checkpoints 6 and 8 of the
    run before it. Checkpoint 9, which is newer, is of a run at the same time."""
    two, four, six, eight, nine = found = put(tmp_path, 2, 4, 6, 8, 9)
    for at, one in enumerate((two, six, eight, four, nine)):
        (one / "COMMIT").touch()
        os.utime(one / "COMMIT", (at, at))
    with patch.object(inside, "fault_of", return_value=""):
        rotate(found, 2, None, tmp_path, four.name)
        assert sorted(tmp_path.iterdir()) == [two, four, nine]
        (five,) = put(tmp_path, 5)
        rotate([two, four, five], 2, None, tmp_path, five.name)
    assert sorted(tmp_path.iterdir()) == [four, five, nine]


def test_rotation_removes_a_link_and_not_what_it_names(tmp_path: Path) -> None:
    (tmp_path / "moved").mkdir()
    (one,) = put(tmp_path / "moved", 1)
    two, three = put(tmp_path, 2, 3)
    link = tmp_path / one.name
    link.symlink_to(one)
    rotate([link, two, three], 1, None, tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == [three.name, "moved"]
    assert (one / "a").is_dir()


def test_rotation_keeps_the_best(tmp_path: Path) -> None:
    one, two, three = put(tmp_path, 1, 2, 3)
    # An earlier rotation that was killed has left this directory, and the next one removes it.
    (tmp_path / ".trash-checkpoint-0" / "a").mkdir(parents=True)
    rotate([one, two, three], 1, one, tmp_path)
    assert sorted(tmp_path.iterdir()) == [one, three]


def test_rotation_behind_a_link(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """accelerate's folder of checkpoints may be a link to another file system."""
    project, folder = tmp_path / "project", tmp_path / "disk" / "checkpoints"
    folder.mkdir(parents=True)
    project.mkdir()
    (project / "checkpoints").symlink_to(folder)
    _, two = put(folder, 1, 2)
    rename = _modicum.rename

    def within_a_disk(old: Path, new: Path) -> None:
        if Path(new).resolve().is_relative_to(project):
            raise OSError(errno.EXDEV, "Invalid cross-device link")
        rename(old, new)

    monkeypatch.setattr(_modicum, "rename", within_a_disk)
    _rotate_accelerates(project / "checkpoints" / two.name, 1)
    assert [*folder.iterdir()] == [two] and [*folder.parent.iterdir()] == [folder]


def test_a_rotation_that_fails_is_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The new checkpoint is committed, and other ranks go on."""
    one, two, three = put(tmp_path, 1, 2, 3)
    rename = _modicum.rename

    def busy(old: Path, new: Path) -> None:
        if old == one:
            raise OSError(errno.EBUSY, "Device or resource busy")
        rename(old, new)

    monkeypatch.setattr(_modicum, "rename", busy)
    with pytest.warns(UserWarning, match="an old checkpoint could not be removed: .*busy"):
        rotate([one, two, three], 1, None, tmp_path)
    assert sorted(tmp_path.iterdir()) == [one, three]
