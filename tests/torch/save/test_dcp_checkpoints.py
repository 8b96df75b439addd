"""`ModicumWriter` and `ModicumReader` under torch.distributed.checkpoint (DCP) save a
checkpoint (checkpoint directory) that transformers can read, and load it bit for bit in another
world.

The oracles are the uninterrupted training and `from_pretrained`. Catches: the state of another
parameter; step counts and group options that are lost; tensors of the state under the model's keys;
a failed save that leaves its files; a checkpoint that is visible before all of DCP's ranks have
written; an optimizer whose class is not recorded; an `async_save` that is accepted and copies the
state; values of other ranks that are lost; a save of Modicum's AdamW without its stored 8-bit codes
or masters; ranks that read different checkpoints, or values that differ from the record.
"""

import shutil
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

import torch.distributed.checkpoint as dcp  # noqa: E402  (after torch is known to be there)
from ranks import Ranks  # noqa: E402
from safetensors.torch import save_file  # noqa: E402
from sharding import Cut  # noqa: E402
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict  # noqa: E402

import modicum.torch  # noqa: E402
from modicum.torch.dcp import ModicumWriter  # noqa: E402

ONE, TWO = Cut("none", (1,)), Cut("fsdp2", (2,))


@pytest.fixture(scope="module")
def model(worlds: dict[int, Ranks], tmp_path_factory: pytest.TempPathFactory) -> str:
    """The directory of a checkpoint with a tensor for each expert; the model stacks the experts."""
    folder = str(tmp_path_factory.mktemp("model") / "qwen3_moe")
    worlds[1].ask("write", directory=folder, family="qwen3_moe", dtype="float32")
    return folder


@pytest.fixture(scope="module")
def saved(
    worlds: dict[int, Ranks], model: str, tmp_path_factory: pytest.TempPathFactory
) -> tuple[dict[str, Any], str]:
    """(rank 0's answer to a save on two ranks, the root of the saved checkpoint)."""
    root = str(tmp_path_factory.mktemp("root") / "steps")
    first, other = worlds[2].ask("dcp_saves", directory=model, root=root, cut=TWO)
    assert first["path"] == f"{root}/step-2" and other["path"] is None
    return first, root


def test_the_checkpoint_is_a_model_of_transformers(
    saved: tuple[dict[str, Any], str], modicum: Path
) -> None:
    import transformers
    from torch_rank import told as digest_of

    first, root = saved
    step = Path(root, "step-2")
    verified = subprocess.run([modicum, "verify", step], capture_output=True, text=True)
    assert verified.returncode == 0, verified.stderr
    read = transformers.AutoModelForCausalLM.from_pretrained(step, dtype="auto")
    for name, tensor in read.named_parameters():
        assert first["saved"][name] == digest_of(tensor), name
    assert (step / "config.json").is_file()
    assert {path.name for path in step.parent.iterdir()} == {"latest", "step-2"}


@pytest.mark.parametrize("cut", (TWO, ONE), ids=str)
def test_comes_back_bit_for_bit(
    worlds: dict[int, Ranks], saved: tuple[dict[str, Any], str], model: str, cut: Cut
) -> None:
    first, root = saved
    for answer in worlds[cut.world].ask("dcp_loads", directory=model, root=root, cut=cut):
        assert answer["before"] == first["saved"]
        assert answer["end"] == first["end"]
        assert answer["values"] == {"epoch": 3, "seen": {"tokens": 1.5, "names": ["a", "b"]}}


def test_modicum_resumes_the_checkpoint(
    worlds: dict[int, Ranks], saved: tuple[dict[str, Any], str], model: str
) -> None:
    first, root = saved
    for answer in worlds[2].ask("dcp_resumes", directory=model, root=root, cut=TWO):
        assert answer["step"] == 2
        assert answer["before"] == first["saved"] and answer["end"] == first["end"]


def test_without_a_model_names_are_those_of_the_state_dict(
    worlds: dict[int, Ranks], model: str, tmp_path: Path
) -> None:
    """The writer and the reader do not get the model ("plain"), so that they cannot translate names
    to those of the checkpoint."""
    from safetensors.torch import load_file

    root = str(tmp_path / "steps")
    how = {"directory": model, "root": root, "cut": TWO, "plain": True}
    saved = worlds[2].ask("dcp_saves", **how)[0]
    files = [*Path(root, "step-2").glob("*.safetensors")]
    names = {name for file in files for name in load_file(file)}
    assert names == {n for n in saved["saved"] if " " not in n}  # names with a space: the state
    for answer in worlds[2].ask("dcp_loads", **how):
        assert answer["before"] == saved["saved"] and answer["end"] == saved["end"]


def test_a_flattened_state_of_torchtitan_comes_back(
    worlds: dict[int, Ranks], model: str, tmp_path: Path
) -> None:
    """The state dict has tensors at the top level, and bytes under a different key on each rank."""
    how = {"directory": model, "root": str(tmp_path / "steps"), "cut": TWO}
    saved = worlds[2].ask("dcp_saves_flat", **how)[0]
    for rank, answer in enumerate(worlds[2].ask("dcp_loads_flat", **how)):
        assert answer["before"] == saved["saved"] and answer["end"] == saved["end"]
        assert answer["loader"] == {f"dp_rank_{rank}": b"\0 of %d" % rank, "world": 2}
        assert answer["step"] == 2


FIRST = """
import sys, torch, torch.distributed.checkpoint as dcp
from modicum.torch import SaveOptions
from modicum.torch.dcp import ModicumReader, ModicumWriter
from safetensors.torch import save_file

model, root = torch.nn.Linear(4, 4), sys.argv[1]
save_file(model.state_dict(), root + "/model.safetensors")
writer = ModicumWriter(root + "/steps", step=1, model=model, options=SaveOptions(source=root))
dcp.save({"model": model.state_dict()}, storage_writer=writer)
state = {"model": torch.nn.Linear(4, 4).state_dict()}
dcp.load(state, storage_reader=ModicumReader(root + "/steps"))
assert all(torch.equal(state["model"][name], of) for name, of in model.state_dict().items())
"""


def test_a_writer_may_be_the_first_that_a_program_uses(tmp_path: Path) -> None:
    """What Modicum knows of torch is examined before the writer replaces functions of torch."""
    command = [sys.executable, "-c", FIRST, tmp_path]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("cut", (TWO, ONE), ids=str)
def test_readers_compare_values(
    worlds: dict[int, Ranks],
    saved: tuple[dict[str, Any], str],
    model: str,
    tmp_path: Path,
    cut: Cut,
) -> None:
    """Also those of chunks that ranks divide."""
    step = shutil.copytree(Path(saved[1]) / "step-2", tmp_path / "step-2")
    for folder, readers in ((".", ("saved", "files")), ("optimizer", ("saved",))):
        file = max((step / folder).glob("*.safetensors"))
        for flipped in (False, True):
            data = bytearray(file.read_bytes())
            data[-1] ^= flipped
            file.write_bytes(data)
            for reader in readers:
                how = {"directory": model, "step": str(step), "cut": cut, "reader": reader}
                for error in worlds[cut.world].ask("dcp_error", **how):
                    assert ("are not those that were saved" in error) == flipped
                    assert (file.name in error) == flipped
        data[-1] ^= 1
        file.write_bytes(data)


def test_all_ranks_read_the_checkpoint_of_rank_0(
    worlds: dict[int, Ranks], model: str, tmp_path: Path
) -> None:
    """A checkpoint may appear between the constructors of two readers. If it has the keys of rank
    0's, its rank reads rank 0's checkpoint, else all ranks raise."""
    how = {"directory": model, "root": str(tmp_path / "steps"), "cut": TWO}
    for answer in worlds[2].ask("dcp_loads_apart", **how):
        assert answer["epoch"] == 1 and answer["loaded"] == answer["saved"]
        assert "CONFLICT: rank 1 has planned the load of another checkpoint" in answer["error"]


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("disk", "no disk here"),
        ("async", "UNSUPPORTED: async_save copies the whole state"),
        ("thread", "on another thread than the main one, while training may go on (expected"),
        ("value", "value of rng.state can't be saved"),
        ("ranks", "value of epoch differs on rank 1 (expected 0, got 1)"),
        (
            "models",
            "tensors of one model are under several keys (expected one key, got ema, model)",
        ),
        ("adamw", "lacks the state tensors of modicum.torch.AdamW"),
    ],
)
def test_a_save_that_fails_leaves_nothing(
    worlds: dict[int, Ranks], model: str, tmp_path: Path, how: str, words: str
) -> None:
    """Every rank raises an error with the reason."""
    root = tmp_path / "steps"
    for answer in worlds[2].ask("dcp_fails", directory=model, root=str(root), cut=TWO, how=how):
        assert words in answer, answer
    assert not root.exists() or [*root.iterdir()] == []


def test_a_tensor_beside_the_model_is_named(tmp_path: Path) -> None:
    """Its array is a value."""
    model, rng = torch.nn.Linear(2, 3), torch.get_rng_state()
    save = partial(dcp.save, storage_writer=ModicumWriter(tmp_path / "steps", step=1))
    with pytest.raises(dcp.api.CheckpointException, match="'rng' at its top level.* its .numpy"):
        save({"model": model.state_dict(), "rng": rng})
    assert not (tmp_path / "steps").exists()
    save({"model": model.state_dict(), "rng": rng.numpy()})


def test_small_moments_are_float32_in_dcps_files(tmp_path: Path) -> None:
    """DCP's files have moments and masters as float32 values. A checkpoint of `modicum.torch.save`
    has the stored codes. The bytes per parameter are those in docs/guide/save.md."""
    numel = 512 * 512
    model = torch.nn.Linear(512, 512, bias=False, dtype=torch.bfloat16)
    save_file({"weight": model.weight.detach()}, tmp_path / "model.safetensors")
    modicum.torch.load(model, tmp_path / "model.safetensors", progress=False, budget="none")
    options = {"lr": 1e-3, "state_format": "int8-moments"}
    optimizer = modicum.torch.AdamW(model.named_parameters(), **options)
    model.weight.grad = torch.ones_like(model.weight)
    optimizer.step()
    state = {"model": model.state_dict(), "optim": get_optimizer_state_dict(model, optimizer)}
    dcp.save(state, checkpoint_id=tmp_path / "dcp")
    modicum.torch.save(model, tmp_path / "steps", step=1, optimizer=optimizer)
    # Bytes per parameter with DCP: 2 + 4 + 2 * 4 for the weight, the master and two moments. With
    # `save`: 2 + 2 + 2 * 1 for the weight, the master's lower half and two codes; 8 / 128 for
    # scales.
    for folder, expected in {"dcp": 14, "steps/step-1": 6.0625}.items():
        files = [path for path in (tmp_path / folder).rglob("*") if path.is_file()]
        size = sum(path.stat().st_size for path in files) / numel
        assert size == pytest.approx(expected, rel=0.02)
