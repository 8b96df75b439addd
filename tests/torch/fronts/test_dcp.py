"""`ModicumReader` under torch.distributed.checkpoint (DCP): each rank gets its shards of the
model that `from_pretrained` loads.

The oracles are the model of `from_pretrained`, sharded by torch.chunk, and torch's own reader. Must
fail for these mutants: a shard that is read from the beginning of its tensor; a strided shard that
is read as one block; stored names that are converted while values are not; a reinterpretation of
bits instead of a cast; tied names that are read twice; a tensor that every rank reads as a whole;
buffers that stay uninitialised after `to_empty`; a recipe or renamings that are ignored; an origin
that a save does not know, or that a partial read sets.
"""

import gc
import os
import re
import shutil
import time
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

import torch.distributed.checkpoint as dcp  # noqa: E402  (after torch is known to be there)
from program import write_checkpoint  # noqa: E402
from ranks import Ranks  # noqa: E402
from sharding import Cut, assert_same, playing_new_rank  # noqa: E402
from torch import nn  # noqa: E402
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader  # noqa: E402
from torch.distributed.device_mesh import init_device_mesh  # noqa: E402
from torch.distributed.fsdp import fully_shard  # noqa: E402
from torch.distributed.tensor import DTensor  # noqa: E402
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module  # noqa: E402
from torch.distributed.tensor.placement_types import _StridedShard  # noqa: E402
from torch_front import (  # noqa: E402
    checkpoint_of,
    chunk,
    empty,
    from_pretrained,
    left_whole,
    local,
    local_part,
    shard,
    stored_in,
)

import modicum.torch  # noqa: E402
from modicum import _modicum  # noqa: E402
from modicum.errors import UsageError  # noqa: E402
from modicum.recipes import Recipe, recipe_for  # noqa: E402
from modicum.torch import LoadRules, MemoryPolicy, SaveOptions  # noqa: E402
from modicum.torch.dcp import ModicumReader, ModicumWriter  # noqa: E402
from modicum.torch.saving.running import OpenSave  # noqa: E402

FSDP2, SIDEWAYS = Cut("fsdp2", (3,)), Cut("fsdp2", (3,), dim=1)
HSDP, AFTER_TP = Cut("hsdp", (2, 2)), Cut("tp-fsdp", (3, 2))
# The conversions of these models, in this order: none; a tie; experts that are stacked and joined
# (in two layouts); tensors joined along dim 0; transposed experts; renamed tensors; FP8.
CASES = (
    ("llama", AFTER_TP),
    ("llama_tied", HSDP),
    ("qwen3_moe", FSDP2),
    ("qwen3_moe", SIDEWAYS),
    ("olmo_hybrid", FSDP2),
    ("qwen3_vl_moe", SIDEWAYS),
    ("bert", FSDP2),
    ("qwen3_fp8", AFTER_TP),
)


@pytest.fixture(scope="module", autouse=True)
def whole_models() -> None:
    """Writes the checkpoints before a process group is simulated."""
    for name, _ in CASES:
        from_pretrained(name)


def read(model: Any, reader: Any) -> dict[str, Any]:
    """Reads into the model's state dict. Returns the dict."""
    state = model.state_dict()
    dcp.load(state, storage_reader=reader, no_dist=True)
    return state


def assert_parts(state: dict[str, Any], name: str, cut: Cut, rank: int) -> None:
    """Asserts that the state dict holds the rank's parts of the parameters, and the whole buffers
    of the model."""
    whole = from_pretrained(name)
    uncut, parameters = left_whole(whole), dict(whole.named_parameters(remove_duplicate=False))
    expected = whole.state_dict()
    assert state.keys() == expected.keys()
    for key, tensor in expected.items():
        is_cut = key in parameters and key not in uncut
        part = local_part(key, tensor, cut, rank) if is_cut else tensor
        assert_same(local(state[key]), part, f"{key} of rank {rank}, {cut}")


# DCP warns about `no_dist=True`, with which the simulated ranks read.
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


@pytest.mark.parametrize(("name", "cut"), CASES, ids=str)
def test_every_rank_gets_its_part(name: str, cut: Cut) -> None:
    for rank in range(cut.world):
        with playing_new_rank(rank, cut.world):
            model = shard(empty(name), cut)
            state = read(model, ModicumReader(checkpoint_of(name), model))
            assert_parts(state, name, cut, rank)


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    """A checkpoint with two matrices in which row i has the values 2i and 2i + 1."""
    row_counts = {"packed": 6, "up.weight": 7}
    made = {name: torch.arange(2.0 * n).reshape(n, 2) for name, n in row_counts.items()}
    return write_checkpoint(tmp_path / "rows", made | {"up.bias": torch.arange(7.0)})


def test_packed_parts_are_sharded_separately(rows: Path) -> None:
    """The packed parts are the rows [0, 1, 2] and [3, 4, 5]. Rank 0 has two rows of each part, and
    rank 1 has one row of each. torch's reader reads the right number of rows, but consecutive
    ones."""
    for rank, expected in enumerate(([0, 1, 3, 4], [2, 5])):
        with playing_new_rank(rank, 2):
            part, mesh = torch.empty(len(expected), 2), init_device_mesh("cpu", (2,))
            by = [_StridedShard(0, split_factor=2)]
            packed = DTensor.from_local(
                part, mesh, by, shape=torch.Size((6, 2)), stride=(2, 1), run_check=False
            )
            dcp.load({"packed": packed}, storage_reader=ModicumReader(rows), no_dist=True)
            assert [row // 2 for row in part[:, 0].tolist()] == expected
            theirs = HuggingFaceStorageReader(str(rows))
            dcp.load({"packed": packed}, storage_reader=theirs, no_dist=True)
            assert [row // 2 for row in part[:, 0].tolist()] != expected


class Seven(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(2, 7)


def test_rows_that_dcps_plan_gives_to_the_wrong_rank_are_read(rows: Path) -> None:
    """Tensor parallelism shards seven rows over two ranks, and FSDP2 shards the result over three.
    DCP's plan assigns the last row to a rank that does not hold it, and no row to the rank that
    does."""
    whole = torch.arange(14.0).reshape(7, 2)
    for rank in range(6):
        with playing_new_rank(rank, 6):
            mesh = init_device_mesh("cpu", (3, 2), mesh_dim_names=("dp", "tp"))
            with torch.device("meta"):
                model = Seven()
            parallelize_module(model, mesh["tp"], {"up": ColwiseParallel()})
            fully_shard(model, mesh=mesh["dp"])
            state = read(model, ModicumReader(rows, model, rules=LoadRules(unexpected=["packed"])))
            expected = chunk(chunk(whole, 2, rank % 2), 3, rank // 2)
            assert local(state["up.weight"]).flatten().tolist() == expected.flatten().tolist()


def test_values_equal_those_of_torchs_reader() -> None:
    """The model is one that torch's reader can load: it has the stored names and shapes, and no
    strided shard."""
    for rank in range(3):
        with playing_new_rank(rank, 3):
            model = shard(empty("llama"), FSDP2)
            theirs = read(model, HuggingFaceStorageReader(str(checkpoint_of("llama"))))
            mine = read(model, ModicumReader(checkpoint_of("llama")))
            assert mine.keys() == theirs.keys()
            for name, tensor in theirs.items():
                assert_same(local(mine[name]), local(tensor), f"{name} of rank {rank}")


def test_torchs_reader_cannot_convert() -> None:
    with pytest.raises(dcp.api.CheckpointException, match="Missing key"):
        model = empty("qwen3_moe").to_empty(device="cpu")
        read(model, HuggingFaceStorageReader(str(checkpoint_of("qwen3_moe"))))


@pytest.mark.parametrize("dtype", ("float32", "float16"))
def test_values_are_rounded_as_torch_rounds(dtype: str) -> None:
    to, whole = getattr(torch, dtype), dict(from_pretrained("llama").named_parameters())
    state = {name: torch.empty_like(tensor, dtype=to) for name, tensor in whole.items()}
    dcp.load(state, storage_reader=ModicumReader(checkpoint_of("llama")), no_dist=True)
    for name, tensor in whole.items():
        assert_same(state[name], tensor.detach().to(to), name)


def test_a_recipe_may_replace_the_model(tmp_path: Path) -> None:
    """The recipe is given as an object and as the path of a recipe.json."""
    made = recipe_for(empty("qwen3_moe"), checkpoint_of("qwen3_moe"))
    (tmp_path / "recipe.json").write_text(made.text())
    whole = from_pretrained("qwen3_moe").state_dict()
    for recipe in (made, tmp_path / "recipe.json"):
        reader = ModicumReader(checkpoint_of("qwen3_moe"), rules=LoadRules(recipe=recipe))
        state = {name: torch.empty_like(tensor) for name, tensor in whole.items()}
        dcp.load(state, storage_reader=reader, no_dist=True)
        for name, tensor in whole.items():
            assert_same(state[name], tensor, name)


class Renamed(nn.Module):
    """The embedding and the head of a llama, under other names."""

    def __init__(self, rows: int, width: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(rows, width)
        self.output = nn.Linear(width, rows, bias=False)


NAMES = {"tokens.weight": "model.embed_tokens.weight", "output.weight": "lm_head.weight"}


def named_by(way: str, stored: Mapping[str, Any]) -> dict[str, Any]:
    """The reader's arguments for `Renamed`."""
    if way == "recipe":
        targets = {new: {"op": "stored", "name": old} for new, old in NAMES.items()}
        return {way: Recipe(targets, sorted(stored.keys() - {*NAMES.values()}))}
    renamings = {r"^model\.embed_(tokens)": r"\1", "^lm_head": "output"}
    return {way: renamings, "unexpected": ["layers", "norm"]}


@pytest.mark.parametrize("way", ("recipe", "key_mapping"))
def test_a_model_with_names_of_its_own_is_read(way: str) -> None:
    stored = stored_in(checkpoint_of("llama"))
    how = named_by(way, stored)
    model = torch.compile(Renamed(*stored["lm_head.weight"].shape))  # its names have a prefix
    state = read(model, ModicumReader(checkpoint_of("llama"), model, rules=LoadRules(**how)))
    for new, old in NAMES.items():
        assert_same(state[f"_orig_mod.{new}"], stored[old].float(), new)


@pytest.mark.parametrize("way", ("recipe", "key_mapping"))
def test_a_model_that_was_read_is_saved_under_the_sources_names(way: str, tmp_path: Path) -> None:
    """Without `source=`. A read of some tensors does not make the checkpoint the model's source."""
    stored = stored_in(checkpoint_of("llama"))
    model = Renamed(*stored["lm_head.weight"].shape)
    reader = ModicumReader(checkpoint_of("llama"), model, rules=LoadRules(**named_by(way, stored)))
    state = model.state_dict()
    dcp.load({"output.weight": state["output.weight"]}, storage_reader=reader, no_dist=True)
    with pytest.raises(UsageError, match=r"give SaveOptions\(source="):
        modicum.torch.save(model, tmp_path, step=1)
    read(model, reader)
    with torch.no_grad():
        model.tokens.weight += 1
    report = modicum.torch.save(model, tmp_path, step=1)
    saved = stored_in(Path(report.path))
    assert saved.keys() == stored.keys()
    for new, old in NAMES.items():
        assert_same(saved[old], state[new], new)


def test_tied_names_are_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    # Each entry of `given` has the tensors that the C++ library fills in one load.
    load, given = _modicum.load, []
    monkeypatch.setattr(_modicum, "load", lambda *a, **o: given.append(o["given"]) or load(*a, **o))
    model = empty("llama_tied").to_empty(device="cpu")
    model.tie_weights()
    state = read(model, ModicumReader(checkpoint_of("llama_tied"), model))
    assert len(given[0]) == len(state) - 1
    assert state["lm_head.weight"].data_ptr() == state["model.embed_tokens.weight"].data_ptr()
    assert_parts(state, "llama_tied", Cut("none", (1,)), 0)


def test_buffers_after_to_empty_are_restored_unless_kept() -> None:
    """No state dict has non-persistent buffers. A reader that is given the model restores them,
    also if a recipe replaces the model's."""
    expected = from_pretrained("llama").model.rotary_emb.inv_freq
    source = checkpoint_of("llama")
    torch.use_deterministic_algorithms(True)  # then to_empty fills the memory with NaN
    try:
        restored, kept = (empty("llama").to_empty(device="cpu") for _ in range(2))
    finally:
        torch.use_deterministic_algorithms(False)
    with pytest.warns(UserWarning, match=r"restored by the model's own rule.*inv_freq"):
        read(
            restored,
            ModicumReader(source, restored, rules=LoadRules(recipe=recipe_for(restored, source))),
        )
    assert_same(restored.model.rotary_emb.inv_freq, expected, "inv_freq")
    read(kept, ModicumReader(source, kept, rules=LoadRules(buffers="keep")))
    assert kept.model.rotary_emb.inv_freq.isnan().all()


def test_buffers_of_a_saved_checkpoint_are_restored_on_demand(tmp_path: Path) -> None:
    """`get_state_dict` with an optimizer writes to the parameters, so nothing shows which buffers
    are empty. `rules` with `buffers` alone still reads the saved state dict."""
    whole = from_pretrained("llama")
    options = SaveOptions(source=checkpoint_of("llama"))
    writer = ModicumWriter(tmp_path / "run", step=1, model=whole, options=options)
    dcp.save({"model": whole.state_dict(), "epoch": 7}, storage_writer=writer, no_dist=True)
    emptied = empty("llama").to_empty(device="cpu")
    with torch.no_grad():
        for tensor in (*emptied.parameters(), *emptied.buffers()):
            tensor.zero_()
    state = {"model": emptied.state_dict(), "epoch": 0}
    reader = ModicumReader(tmp_path / "run", emptied, rules=LoadRules(buffers="restore"))
    with pytest.warns(UserWarning, match=r"restored by the model's own rule.*inv_freq"):
        dcp.load(state, storage_reader=reader, no_dist=True)
    buffer, expected = emptied.model.rotary_emb.inv_freq, whole.model.rotary_emb.inv_freq
    assert state["epoch"] == 7 and torch.equal(buffer, expected)


def test_a_writer_keeps_no_tensor_after_its_save(tmp_path: Path) -> None:
    state = {"w": torch.ones(1000)}
    memory = weakref.ref(state["w"].untyped_storage())
    writer = ModicumWriter(tmp_path, step=1)
    dcp.save(state, storage_writer=writer, no_dist=True)
    del state
    gc.collect()
    assert memory() is None and writer.path == str(tmp_path / "step-1")


def test_a_writer_waits_for_a_save_in_the_background(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both replace functions of torch, which must be torch's own again after the last of them."""
    before, write = torch.Tensor.resize_, OpenSave.write

    def write_slowly(begun: OpenSave, on_begin: Any) -> Any:
        return write(begun, lambda: (on_begin(), time.sleep(1)))

    model = from_pretrained("llama")
    with monkeypatch.context() as patched:
        patched.setattr(OpenSave, "write", write_slowly)
        options = SaveOptions(source=checkpoint_of("llama"))
        saving = modicum.torch.async_save(model, tmp_path, step=1, options=options)
    dcp.save(model.state_dict(), storage_writer=ModicumWriter(tmp_path, step=2), no_dist=True)
    assert saving.result().step == 1 and torch.Tensor.resize_ is before


def test_no_more_than_staging_is_held() -> None:
    ledger = modicum.Ledger()
    model, source = empty("qwen3_moe").to_empty(device="cpu"), checkpoint_of("qwen3_moe")
    read(model, ModicumReader(source, model, memory=MemoryPolicy(staging="256KiB", ledger=ledger)))
    assert 0 < ledger.at_peak["staging"] <= 256 << 10 and "shards" not in ledger.at_peak
    assert ledger.held_bytes == 0


# ---- refused


def refused(state: dict[str, Any], reader: Any) -> modicum.Error:
    """The error of a load that must fail, without DCP's exception around it."""
    with pytest.raises(dcp.api.CheckpointException) as caught:
        dcp.load(state, storage_reader=reader, no_dist=True)
    ((error, _),) = caught.value.failures.values()
    return error


@pytest.mark.parametrize(
    ("tensor", "message"),
    [
        (torch.empty(39, dtype=torch.int64), "MISMATCH: the dtype differs .*model.norm.weight"),
        (torch.empty(78)[::2], "UNSUPPORTED: strides that are not row-major .*model.norm.weight"),
    ],
)
def test_what_does_not_fit_is_refused(tensor: Any, message: str) -> None:
    error = refused({"model.norm.weight": tensor}, ModicumReader(checkpoint_of("llama")))
    assert isinstance(error, modicum.UsageError) and error.tensor == "model.norm.weight"
    assert re.match(message, str(error))


def test_damaged_files_and_wrong_arguments_raise_typed_errors(tmp_path: Path) -> None:
    copy = shutil.copytree(checkpoint_of("llama"), tmp_path / "llama")
    reader = ModicumReader(copy)
    for file in copy.glob("*.safetensors"):
        os.truncate(file, file.stat().st_size - 8)
    model = empty("llama").to_empty(device="cpu")
    # This reader has opened the files before they were cut off.
    assert isinstance(refused(model.state_dict(), reader), modicum.IoError)
    with pytest.raises(modicum.FormatError):
        ModicumReader(copy)
    with pytest.raises(modicum.UsageError, match="not in the model"):
        ModicumReader(checkpoint_of("llama"), empty("bert"))


# ---- real ranks


def test_real_ranks_read_their_own_bytes(four: Ranks, tmp_path: Path) -> None:
    directory = str(tmp_path / "qwen3_moe")
    sizes = {"vocab_size": 30001, "hidden_size": 101, "moe_intermediate_size": 509}
    four.ask("write", directory=directory, family="qwen3_moe", config=sizes)
    got = four.ask("dcp_loaded", directory=directory, mesh=[4])
    expected = four.ask("loaded", directory=directory, mesh=[4], by="torch")
    for rank, (mine, theirs) in enumerate(zip(got, expected, strict=True)):
        assert mine["state"] == theirs["state"], f"rank {rank}"
        # The margin is for headers, config, index and /proc files.
        assert mine["read_bytes"] <= 1.02 * mine["local_bytes"] + (256 << 10), f"rank {rank}"
