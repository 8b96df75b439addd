"""Runs the code blocks of docs/guide/{accelerate,load,deepspeed,engines}.md that train or load:
DeepSpeed's in one process, the others on two real ranks. Those of engines, of which other tests run
the patches, are soak tests. tests/package/test_page_blocks.py lists the blocks.

Catches: a line of the page that no longer works; a block that loads other values than the other
blocks.
"""

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")
pytest.importorskip("accelerate")

from extensions import needs_extensions
from ranks import Ranks

TRAINED = ("accelerate", "Trainer", "TRL")
SOAK = pytest.mark.soak


@pytest.fixture(scope="module")
def directory(two: Ranks, tmp_path_factory: pytest.TempPathFactory) -> str:
    directory = str(tmp_path_factory.mktemp("ways") / "model")
    two.ask("write", family="qwen3", directory=directory)
    return directory


@pytest.fixture(scope="module")
def blocks(root: Path) -> dict[str, str]:
    """The first code block of each section, by the section's heading."""
    found = {}
    for name in ("accelerate", "load", "deepspeed", "engines"):
        page = (root / f"docs/guide/{name}.md").read_text()
        for heading, text in re.findall(r"^## (.*?)\n(.*?)(?=^## |\Z)", page, re.M | re.S):
            for code in re.findall(r"^```python\n(.*?)^```$", text, re.M | re.S)[:1]:
                found[heading] = code
    return found


def ask(two: Ranks, heading: str, text: str, directory: str, folder: Path) -> list[dict[str, Any]]:
    """Runs the block `text` on both ranks with the checkpoint `directory`; it saves into `folder`.
    Returns the answers of the ranks: losses, names in `folder`, and the state of the model."""
    folder.mkdir(exist_ok=True)
    how = {"text": text, "directory": directory, "folder": str(folder), "family": heading}
    return two.ask("page_block", **how)


@pytest.mark.parametrize(
    "heading", [TRAINED[0], *(pytest.param(heading, marks=SOAK) for heading in TRAINED[1:])]
)
def test_scripts_train(
    two: Ranks, blocks: dict[str, str], directory: str, tmp_path: Path, heading: str
) -> None:
    if heading == "TRL":
        pytest.importorskip("trl")
    for answer in ask(two, heading, blocks[heading], directory, tmp_path / "steps"):
        assert len(answer["losses"]) == 2
        assert 0 < answer["losses"][1] != answer["losses"][0]
        # Of these blocks only accelerate's saves a checkpoint into the folder.
        assert ("COMMIT" in answer["files"]) == (heading == "accelerate")


@SOAK
def test_loaders_of_engines_and_dcp_load_the_same(
    two: Ranks, blocks: dict[str, str], directory: str, tmp_path: Path
) -> None:
    """The oracle is torch. These are the blocks that load in float32."""
    expected = two.ask("loaded", directory=directory, mesh=[2], by="torch", dtype="float32")
    for heading in ("verl", "AReaL", "SkyRL", "torch.distributed.checkpoint"):
        got = ask(two, heading, blocks[heading], directory, tmp_path / heading)
        for rank, (mine, theirs) in enumerate(zip(got, expected, strict=True)):
            assert mine["state"] == theirs["state"], f"{heading}: rank {rank}"


@SOAK
def test_torchtitans_reader_reads_stored_names(
    two: Ranks, blocks: dict[str, str], directory: str, tmp_path: Path
) -> None:
    read = f"""
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
stored = {{}}
for file in __import__("pathlib").Path({directory!r}).glob("*.safetensors"):
    stored |= load_file(file)
got = {{name: torch.full_like(tensor, 7) for name, tensor in stored.items()}}
dcp.load(got, storage_reader=Adapter().get_hf_storage_reader({directory!r}))
assert len(got) > 10 and all(torch.equal(got[name], stored[name]) for name in stored)
"""
    ask(two, "torchtitan", blocks["torchtitan"] + read, directory, tmp_path)


# Runs after the page's block about torchtitan, which defines Adapter and Checkpoints. Saves step 3,
# changes the model, the optimizer and the loader, and loads the checkpoint again; exports step 4 as
# a Hugging Face checkpoint; asks for a save in the background, which is refused.
TITAN = """
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions, get_optimizer_state_dict, set_optimizer_state_dict)
from torch.distributed.tensor import distribute_tensor, Shard

FLAT = StateDictOptions(flatten_optimizer_state_dict=True)

class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = torch.nn.Linear(6, 5, bias=False), torch.nn.Linear(5, 3)

class Optimizers:  # a Stateful of torch.distributed.checkpoint, as is Loader
    def state_dict(self):
        return get_optimizer_state_dict(model, optimizer, options=FLAT)
    def load_state_dict(self, state):
        set_optimizer_state_dict(model, optimizer, state, options=FLAT)

class Loader:
    at = b"0"
    def state_dict(self):
        return {f"dp_rank_{torch.distributed.get_rank()}": self.at, "world_size": 2}
    def load_state_dict(self, state):
        self.at = state[f"dp_rank_{torch.distributed.get_rank()}"]

class Names(Adapter):
    def to_hf(self, state):
        return {f"model.{name}": tensor for name, tensor in state.items()}

torch.manual_seed(1)
model = Model()
fully_shard(model, mesh=mesh)
optimizer = torch.optim.AdamW(model.named_parameters(), lr=1e-2)
for parameter in model.parameters():
    parameter.grad = torch.ones_like(parameter)
optimizer.step()
loader, config = Loader(), Checkpoints.Config(folder=FOLDER, last_save_in_hf=True)
states = {"model": model, "optimizer": Optimizers(), "dataloader": loader}
manager = Checkpoints(config, states, Names())
loader.at = b"%d" % torch.distributed.get_rank()
manager.save(3)

def held():
    moments = [optimizer.state[of]["exp_avg"] for of in model.parameters()]
    return [of.full_tensor().clone() for of in [*model.parameters(), *moments]]

before = held()
optimizer.step()
loader.at = b"lost"
assert manager.load() == 3
assert loader.at == b"%d" % torch.distributed.get_rank()
assert all(torch.equal(one, other) for one, other in zip(held(), before))
manager.save(4, last_step=True)
from safetensors.torch import load_file
stored = load_file(FOLDER + "/step-4/model.safetensors")
assert {name: tensor.tolist() for name, tensor in stored.items()} == {
    f"model.{name}": of.full_tensor().tolist() for name, of in model.named_parameters()}
try:
    manager.dcp_save({}, f"{FOLDER}/step-5", async_mode="async")
except ValueError as error:
    assert "async_mode" in str(error)
else:
    raise AssertionError("async_mode was accepted")
del model  # else `page_block` would compute digests of it
"""


@SOAK
def test_torchtitans_manager_saves_and_loads_checkpoints(
    two: Ranks, blocks: dict[str, str], directory: str, tmp_path: Path
) -> None:
    script = TITAN.replace("FOLDER", repr(str(tmp_path / "titan")))
    for answer in ask(two, "torchtitan", blocks["torchtitan"] + script, directory, tmp_path):
        assert answer["files"] == ["titan"]
    assert (tmp_path / "titan/step-3/COMMIT").is_file()
    assert not [*(tmp_path / "titan").glob("step-*/sharded")]


@pytest.mark.parametrize(
    "page",
    [
        "README.md",
        "docs/guide/accelerate.md",
        pytest.param("docs/guide/first-hour.md", marks=SOAK),
        pytest.param("skills/modicum/SKILL.md", marks=SOAK),
    ],
)
def test_one_context_is_around_a_script(
    two: Ranks, root: Path, directory: str, tmp_path: Path, page: str
) -> None:
    """README shows it as a diff. `main` of the act loads a model by accelerate."""
    fences = re.findall(r"^```(?:python|diff)\n(.*?)^```$", (root / page).read_text(), re.M | re.S)
    (text,) = [text for text in fences if re.search(r"^. *main\(\)|^ *main\(\)", text, re.M)]
    if text.startswith("+"):
        text = re.sub(r"^[+ ]", "", re.sub(r"^-.*\n", "", text, flags=re.M), flags=re.M)
    for answer in ask(two, "main", text, directory, tmp_path / "out"):
        assert answer["state"]


@pytest.mark.parametrize("page", ["README.md", "skills/modicum/SKILL.md"])
def test_the_lines_by_hand_of_other_pages_load(
    two: Ranks, root: Path, directory: str, tmp_path: Path, page: str
) -> None:
    fences = re.findall(r"^```python\n(.*?)^```$", (root / page).read_text(), re.M | re.S)
    (text,) = [text for text in fences if "empty_parameters" in text]
    answers = ask(two, "By hand", text, directory, tmp_path / "out")
    expected = two.ask("loaded", directory=directory, mesh=[2], by="torch", dtype="bfloat16")
    assert [answer["state"] for answer in answers] == [of["state"] for of in expected]
    assert (tmp_path / "out/root/step-1/COMMIT").is_file() == page.startswith("README")


def test_the_block_for_gpus_loads_on_cpus(
    two: Ranks, root: Path, directory: str, tmp_path: Path
) -> None:
    """With the CPU in place of "cuda", and without pinning, which needs a driver. `tests/gpu` has
    the same calls on a device."""
    page = (root / "docs/guide/gpus.md").read_text()
    (text,) = re.findall(r"^```python\n(.*?)^```$", page, re.M | re.S)
    text = text.replace('"cuda"', '"cpu"').replace("pin=True", "pin=False")
    for answer in ask(two, "By hand", text, directory, tmp_path / "out"):
        assert answer["state"]


def test_the_block_by_hand_trains_and_saves(
    two: Ranks, blocks: dict[str, str], directory: str, tmp_path: Path
) -> None:
    for answer in ask(two, "By hand", blocks["By hand"], directory, tmp_path):
        assert len(answer["losses"]) == 2 and answer["losses"][1] != answer["losses"][0]
        assert answer["files"] == ["root"]
    assert (tmp_path / "root/step-1/COMMIT").is_file()


DEEPSPEED = """
import os, sys
sys.path.insert(0, {support!r})
import zero2_memory
from torch.nn.functional import mse_loss
import modicum.torch
program = zero2_memory.example()
program.join_group()
options = program.parsed("--stage 3 --offload-param --width 512 --workers persistent".split())
engine, forward, step = program.with_deepspeed(program.model_of(512), options)
initialize = lambda: engine
def train(engine):
    for inputs, targets in program.loader_of(options):
        step(mse_loss(forward(inputs).float(), targets.float()))
{block}
numel = 6 * 512 * 512  # six matrices
# The bytes of each element: master 4, gradients in float32 and bfloat16 4 + 2, moments 8, offloaded
# weight 2.
assert protection.bytes > 0.99 * (4 + (4 + 2) + 8 + 2) * numel, protection
assert peaks["moments"].held_bytes > 0.99 * 8 * numel, peaks
assert peaks["moments"].copied_bytes < 0.02 * numel, peaks
sys.stdout.flush()
os._exit(0)
"""


@SOAK  # compiles DeepSpeed's optimizer
@needs_extensions
def test_the_deepspeed_block_protects_and_measures(root: Path, blocks: dict[str, str]) -> None:
    """Runs the block with ZeRO-3 offload, in a separate process."""
    pytest.importorskip("deepspeed")
    text = DEEPSPEED.format(
        support=str(root / "tests/support"), block=blocks["Protect and attribute"]
    )
    done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-4000:]
    assert "peaks of" in done.stdout


def test_the_helper_for_cpus_is_that_of_the_example(root: Path) -> None:
    """The page shows the example's `fsdp2_on_cpus` without docstring and return annotation."""
    page = (root / "docs/reference/accelerate.md").read_text()
    (shown,) = re.findall(r"^```python cpu\n(.*?)^```$", page, re.M | re.S)
    example = (root / "examples/accelerate_fsdp2.py").read_text()
    (theirs,) = re.findall(r"^def fsdp2_on_cpus.*?(?=^def )", example, re.M | re.S)
    bare = re.sub(r' -> None:\n    """.*?"""\n', ":\n", theirs, flags=re.S)
    assert shown.strip() == bare.strip()
