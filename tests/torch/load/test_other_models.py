"""Models that differ from the checkpoint: names of their own, other numbers of rows, other tensors
on each rank, or a tie that tensor parallelism has cut.

The oracle is `from_pretrained`. Catches: an argument of `load` that has no effect; new rows that
depend on the world size; ranks whose models differ and that wait for each other, load other values,
or get an error that does not name the difference; a tie that is lost; a `key_mapping` whose
reference to a group remains in a name; a recipe that makes another shape, or two values for a tied
tensor; a malformed recipe or `key_mapping` whose error is Python's own; an argument that `recipe=`
replaces and that is ignored without a word.
"""

import contextlib
import json
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

import safetensors.torch  # noqa: E402  (after torch is known to be there)
import torch.distributed as dist  # noqa: E402
import torch.distributed.checkpoint as dcp  # noqa: E402
from ranks import Ranks  # noqa: E402
from sharding import assert_same, bits, playing_new_rank  # noqa: E402
from torch import nn  # noqa: E402
from torch.distributed.device_mesh import init_device_mesh  # noqa: E402
from torch.distributed.fsdp import fully_shard  # noqa: E402
from torch.distributed.tensor import Shard  # noqa: E402
from torch.distributed.tensor.parallel import (  # noqa: E402
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch_front import (  # noqa: E402
    alone,
    checkpoint_of,
    empty,
    from_pretrained,
    load,
    stored_in,
)

import modicum  # noqa: E402
from modicum.errors import IoError, UsageError  # noqa: E402
from modicum.recipes import Recipe, recipe_for  # noqa: E402
from modicum.torch import (  # noqa: E402
    LoadRules,
    empty_parameters,
    fsdp2_load_full_state_dict,
    resume,
    save,
)
from modicum.torch.dcp import ModicumReader  # noqa: E402


@pytest.fixture(scope="module", autouse=True)
def written() -> None:
    """Writes the checkpoints before a process group is simulated."""
    for name in ("llama", "llama_tied"):
        from_pretrained(name)


# ---- names of their own


class Renamed(nn.Module):
    """The embedding and some rows of the head of a llama, under other names."""

    def __init__(self, rows: int, width: int, outputs: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(rows, width)
        self.output = nn.Linear(width, outputs, bias=False)


def renamed(outputs: int | None = None) -> Any:
    rows, width = from_pretrained("llama").lm_head.weight.shape
    with empty_parameters():
        return Renamed(rows, width, outputs or rows)


def test_a_recipe_for_a_model_with_names_of_its_own_is_followed(tmp_path: Path) -> None:
    """The recipe is a file. A recipe object with targets of another model is refused."""
    stored = stored_in(checkpoint_of("llama"))
    head, tokens = stored["lm_head.weight"], stored["model.embed_tokens.weight"]
    half = len(head) // 2
    cut = {"op": "slice", "dim": 0, "start": 1, "stop": 1 + half}
    targets = {
        "tokens.weight": {"op": "stored", "name": "model.embed_tokens.weight"},
        "output.weight": cut | {"in": [{"op": "stored", "name": "lm_head.weight"}]},
    }
    unused = sorted(stored.keys() - {"lm_head.weight", "model.embed_tokens.weight"})
    path = tmp_path / "recipe.json"
    path.write_text(json.dumps({"targets": targets, "unused": unused}))
    for world in (1, 2):
        for rank in range(world):
            with playing_new_rank(rank, world):
                model = fully_shard(renamed(half), mesh=init_device_mesh("cpu", (world,)))
                load(model, checkpoint_of("llama"), rules=LoadRules(recipe=path))
                got = [model.tokens.weight.to_local(), model.output.weight.to_local()]
                for mine, whole in zip(got, (tokens, head[1 : 1 + half]), strict=True):
                    assert_same(mine, whole.chunk(world)[rank], f"rank {rank} of {world}")
    with pytest.raises(UsageError, match="a target that the model lacks") as refused:
        load(
            renamed(),
            checkpoint_of("llama"),
            rules=LoadRules(recipe=recipe_for(empty("llama"), stored)),
        )
    assert refused.value.tensor == "model.embed_tokens.weight"


def test_renamings_for_a_model_with_names_of_its_own_are_applied(tmp_path: Path) -> None:
    """A saved checkpoint has the stored names, too, so a resume needs the same renamings."""
    stored = stored_in(checkpoint_of("llama"))
    names = {r"^model\.embed_(tokens)": r"\1", "^lm_head": "output"}
    with pytest.raises(UsageError, match="not in the model.*`key_mapping` renames them"):
        load(renamed(), checkpoint_of("llama"))
    model = renamed()
    rules = LoadRules(key_mapping=names, unexpected=["layers", "norm"])
    load(model, checkpoint_of("llama"), rules=rules)
    save(model, tmp_path, step=1)
    with pytest.raises(UsageError, match="`key_mapping` renames them"):
        resume(renamed(), tmp_path)
    resumed = renamed()
    resume(resumed, tmp_path, rules=rules)
    for one in (model, resumed):
        assert_same(one.tokens.weight.detach(), stored["model.embed_tokens.weight"], "tokens")
        assert_same(one.output.weight.detach(), stored["lm_head.weight"], "output")


@pytest.mark.parametrize("replacement", (r"\2s", r"\12", r"\g<1>s", r"a.\1.\3"))
def test_a_reference_that_transformers_does_not_replace_is_refused(replacement: str) -> None:
    names = {r"^model\.(embed)_(token)s": replacement}
    with pytest.raises(UsageError, match="UNSUPPORTED: .* no reference but .*, got") as refused:
        load(renamed(), checkpoint_of("llama"), rules=LoadRules(key_mapping=names))
    assert replacement in str(refused.value)


@pytest.mark.parametrize("wrong", ({"(": "x"}, {"a": 5}, ["a"], "a"), ids=str)
def test_a_malformed_key_mapping_is_refused(wrong: Any) -> None:
    with pytest.raises(UsageError, match="USAGE: key_mapping.*got ") as refused:
        load(renamed(), checkpoint_of("llama"), rules=LoadRules(key_mapping=wrong))
    assert refused.value.category == "USAGE"


# ---- recipes that do not fit


class Tied(nn.Module):
    """One parameter under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.zeros(4))
        self.b = self.a


def stored_as(name: str) -> dict[str, Any]:
    return {"op": "stored", "name": name}


@pytest.mark.parametrize("on_meta", (True, False))
def test_a_recipe_that_makes_another_shape_is_refused(tmp_path: Path, on_meta: bool) -> None:
    """The stored tensor is the transpose: it has as many elements."""
    safetensors.torch.save_file({"w": torch.ones(3, 4)}, tmp_path / "model.safetensors")
    with empty_parameters() if on_meta else contextlib.nullcontext():
        model = nn.Linear(3, 4, bias=False)
    recipe = Recipe({"weight": stored_as("w")})
    with pytest.raises(UsageError, match=r"MISMATCH: .*\[4, 3\], got \[3, 4\]") as refused:
        load(model, tmp_path, rules=LoadRules(recipe=recipe))
    assert refused.value.tensor == "weight"
    transpose = {"op": "permute", "dims": [1, 0], "in": [stored_as("w")]}
    load(model, tmp_path, rules=LoadRules(recipe=Recipe({"weight": transpose})))
    assert bool((model.weight == 1).all())


@pytest.mark.parametrize("on_meta", (True, False))
def test_two_targets_for_one_tensor_are_refused(tmp_path: Path, on_meta: bool) -> None:
    values = {"a": torch.ones(4), "b": torch.full((4,), 2.0)}
    safetensors.torch.save_file(values, tmp_path / "model.safetensors")
    with empty_parameters() if on_meta else contextlib.nullcontext():
        model = Tied()
    recipe = Recipe({"a": stored_as("a"), "b": stored_as("b")})
    with pytest.raises(UsageError, match="MISMATCH: two targets .*an alias of a") as refused:
        load(model, tmp_path, rules=LoadRules(recipe=recipe))
    assert refused.value.tensor == "b"
    load(
        model,
        tmp_path,
        rules=LoadRules(
            recipe=Recipe({"a": stored_as("a"), "b": {"op": "alias", "of": "a"}}, ["b"])
        ),
    )
    assert model.a is model.b and bool((model.a == 1).all())


@pytest.mark.parametrize("op", ("reshape", "alias"))
def test_a_tensor_of_the_caller_within_another_node_is_refused(tmp_path: Path, op: str) -> None:
    safetensors.torch.save_file({"w": torch.ones(3, 4)}, tmp_path / "model.safetensors")
    inner = {"op": "caller", "dtype": "float32", "shape": [12]}
    node = {"op": op, "in": [{"op": "permute", "dims": [0], "in": [inner]}], "shape": [3, 4]}
    path = tmp_path / "recipe.json"
    path.write_text(json.dumps({"targets": {"weight": node}, "unused": ["w"]}))
    with pytest.raises(UsageError, match="UNSUPPORTED: .*`caller` as an input .*weight") as refused:
        load(nn.Linear(4, 3, bias=False), tmp_path, rules=LoadRules(recipe=path))
    assert refused.value.tensor == "weight"


@pytest.mark.parametrize(
    "node", (5, "x", None, {"name": "w"}, {"op": 5}, {"op": "caller"}, {"op": "stored"}), ids=str
)
def test_a_malformed_node_of_a_recipe_is_named(tmp_path: Path, node: Any) -> None:
    path = tmp_path / "recipe.json"
    path.write_text(json.dumps({"targets": {"tokens.weight": node}}))
    with pytest.raises(UsageError, match="MISMATCH: .*tokens.weight") as refused:
        load(renamed(), checkpoint_of("llama"), rules=LoadRules(recipe=path))
    assert refused.value.tensor == "tokens.weight"


def test_a_recipe_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    with pytest.raises(IoError, match="IO: cannot open: ENOENT .*none.json") as refused:
        load(renamed(), checkpoint_of("llama"), rules=LoadRules(recipe=tmp_path / "none.json"))
    assert (refused.value.category, refused.value.file) == ("IO", "none.json")
    with pytest.raises(UsageError, match="USAGE: recipe .*got dict"):
        load(renamed(), checkpoint_of("llama"), rules=LoadRules(recipe={"targets": {}}))
    opened = modicum.walk.open_checkpoint(checkpoint_of("llama"))
    unused = json.dumps({"targets": {}, "unused": sorted(opened.stored)})
    of_package = modicum.walk.make_recipe(opened, unused)
    with pytest.raises(UsageError, match="USAGE: recipe .*got modicum.*Recipe"):
        load(renamed(), checkpoint_of("llama"), rules=LoadRules(recipe=of_package))


@pytest.mark.parametrize(
    "given",
    (
        {"dtype": torch.bfloat16}, {"keep_fp32": "norm"}, {"missing": "init"},
        {"unexpected": "ignore"}, {"key_mapping": {"^lm_head": "output"}},
    ),
    ids=lambda given: next(iter(given)),
)  # fmt: skip
def test_arguments_that_a_recipe_replaces_are_refused(given: dict[str, Any]) -> None:
    recipe = recipe_for(empty("llama"), checkpoint_of("llama"))
    (name,) = given
    with pytest.raises(UsageError, match=f"USAGE: {name}= has no effect with recipe="):
        load(empty("llama"), checkpoint_of("llama"), recipe=recipe, **given)
    if name in ("dtype", "keep_fp32"):  # a state dict has its dtypes
        return
    with pytest.raises(UsageError, match=f"USAGE: {name}= has no effect with recipe="):
        ModicumReader(checkpoint_of("llama"), rules=LoadRules(recipe=recipe, **given))


def test_a_recipe_without_a_tied_name_is_refused_with_the_other_name() -> None:
    model = empty("llama_tied")
    recipe = recipe_for(model, checkpoint_of("llama_tied"))
    (alias,) = (name for name, node in recipe.targets.items() if node["op"] == "alias")
    other = recipe.targets.pop(alias)["of"]
    with pytest.raises(UsageError, match=f"tied to '{other}'.* an alias .*{alias}"):
        load(model, checkpoint_of("llama_tied"), rules=LoadRules(recipe=recipe))


# ---- resized


def resized(directory: str) -> dict[str, bytes]:
    """The bytes of the whole embedding and of the whole head, which have more rows than the stored
    ones, after a load for each value of `resized`."""
    config = transformers.AutoConfig.from_pretrained(directory)
    config.vocab_size += config.vocab_size + 5  # more than one rank of three holds new rows
    with empty_parameters():
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    made = {}
    for rule in ("mean", "model"):
        load(model, directory, rules=LoadRules(resized=rule))
        for name in ("model.embed_tokens.weight", "lm_head.weight"):
            made[f"{rule} {name}"] = bits(model.get_parameter(name).full_tensor())
    return made


def test_new_rows_are_the_same_in_any_world(worlds: dict[int, Ranks]) -> None:
    directory = str(checkpoint_of("llama"))
    with alone():
        expected = resized(directory)
    assert len(set(expected.values())) == 4
    for world in (2, 3):
        for rank, rows in enumerate(worlds[world].ask(resized, directory=directory)):
            assert rows == expected, f"rank {rank} of {world}"


def test_new_rows_that_are_cut_within_a_row_are_refused() -> None:
    with playing_new_rank(0, 3), pytest.raises(UsageError, match="cut within a row") as refused:
        model = empty("llama", vocab_size=from_pretrained("llama").config.vocab_size + 6)
        rows = model.model.embed_tokens.num_embeddings
        by = {"shard_placement_fn": lambda p: Shard(1) if len(p) == rows else Shard(0)}
        fully_shard(model, mesh=init_device_mesh("cpu", (3,)), **by)
        load(model, checkpoint_of("llama"), rules=LoadRules(resized="mean"))
    assert refused.value.category == "UNSUPPORTED"
    assert refused.value.tensor == "lm_head.weight"
    assert all(parameter.is_meta for parameter in model.parameters())


# ---- ranks whose models differ


def staged(directory: str) -> dict[str, Any]:
    """Two pipeline stages, each on two ranks: a rank has the layers of its stage only."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
    stage = mesh.get_local_rank("pp")
    config = transformers.AutoConfig.from_pretrained(directory)
    with empty_parameters():
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    for i in range(len(model.model.layers)):
        if i % 2 != stage:
            model.model.layers[i] = nn.Identity()
    if stage == 0:
        model.lm_head = nn.Identity()
    else:
        model.model.embed_tokens = nn.Identity()
    fully_shard(model, mesh=mesh["dp"])
    refused = ""
    try:
        load(model, directory)
    except OSError as error:
        refused = str(error)
    assert all(parameter.is_meta for parameter in model.parameters())
    state = {
        name: torch.empty_like(tensor, device="cpu") for name, tensor in model.state_dict().items()
    }
    dcp.load(
        state, storage_reader=ModicumReader(directory, model, rules=LoadRules(unexpected="ignore"))
    )
    model.load_state_dict(state, assign=True)
    return {
        "refused": refused,
        "state": {n: bits(p.full_tensor()) for n, p in model.named_parameters()},
    }


def test_a_pipeline_stage_reads_what_it_has_through_dcp(four: Ranks) -> None:
    """`load` refuses the model on all ranks, and the error names the DCP reader, which succeeds."""
    whole = {n: bits(p) for n, p in from_pretrained("llama").named_parameters()}
    seen: set[str] = set()
    for rank, answer in enumerate(four.ask(staged, directory=str(checkpoint_of("llama")))):
        assert "rank 2 (and 1 more) differs from rank 0 in tensor" in answer["refused"]
        assert "modicum.torch.dcp" in answer["refused"]
        for name, value in answer["state"].items():
            assert value == whole[name], f"{name} of rank {rank}"
        seen |= answer["state"].keys()
    assert seen == whole.keys()


def test_parameters_that_were_loaded_in_inference_mode_train() -> None:
    model = empty("llama")
    with torch.inference_mode():
        fsdp2_load_full_state_dict(model, checkpoint_of("llama"), budget="none", progress=False)
    model(torch.arange(3, 14).reshape(1, 11)).logits.sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


def built_on_rank_0(directory: str) -> dict[str, Any]:
    """Rank 0 has a model with values, and rank 1 has it on meta, as with accelerate's option
    `cpu_ram_efficient_loading`. Loads it by `load`, which must fail, and then by
    `fsdp2_load_full_state_dict`."""
    config = transformers.AutoConfig.from_pretrained(directory)
    with torch.device("cpu" if dist.get_rank() == 0 else "meta"):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    before = {n: p.is_meta for n, p in model.named_parameters()}
    refused = ""
    try:
        load(model, directory)
    except OSError as error:
        refused = str(error)
    assert before == {n: p.is_meta for n, p in model.named_parameters()}
    fsdp2_load_full_state_dict(model, directory, budget="none", progress=False)
    return {
        "refused": refused,
        "state": {n: bits(p.full_tensor()) for n, p in model.named_parameters()},
    }


def test_a_model_with_values_on_rank_0_only_is_refused_by_load(two: Ranks) -> None:
    """The error names what differs. `fsdp2_load_full_state_dict` accepts the model."""
    whole = {n: bits(p) for n, p in from_pretrained("llama").named_parameters()}
    for rank, answer in enumerate(two.ask(built_on_rank_0, directory=str(checkpoint_of("llama")))):
        message = answer["refused"]
        assert "CONFLICT: rank 1 differs from rank 0 in tensor model.embed_tokens.weight" in message
        assert "empty_parameters() on every rank" in message
        assert "] with values, got torch.float32 [" in message and "] on meta)" in message
        assert answer["state"] == whole, f"rank {rank}"


# ---- ties


def parallel() -> Any:
    """A model with a tie, and the mesh for FSDP2, on 2 x 2 ranks. Tensor parallelism has sharded
    embedding and head separately, which unties them."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    plan = {"model.embed_tokens": RowwiseParallel(), "lm_head": ColwiseParallel()}
    return parallelize_module(empty("llama_tied"), mesh["tp"], plan), mesh["dp"]


@pytest.mark.parametrize("rank", range(4))
def test_a_tie_that_tensor_parallelism_has_cut_must_be_restored(rank: int) -> None:
    with playing_new_rank(rank, 4):
        model, mesh = parallel()
        assert model.lm_head.weight is not model.model.embed_tokens.weight
        fully_shard(model, mesh=mesh)
        with pytest.raises(UsageError, match="tie_weights") as refused:
            load(model, checkpoint_of("llama_tied"))
        assert refused.value.tensor == "lm_head.weight"
    with playing_new_rank(rank, 4):
        model, mesh = parallel()
        model.tie_weights()
        fully_shard(model, mesh=mesh)
        load(model, checkpoint_of("llama_tied"))
    assert model.lm_head.weight is model.model.embed_tokens.weight
    whole = from_pretrained("llama_tied").lm_head.weight.detach()
    part = whole.chunk(2)[rank % 2].chunk(2)[rank // 2]
    assert_same(model.lm_head.weight.to_local().detach(), part, f"rank {rank}")
