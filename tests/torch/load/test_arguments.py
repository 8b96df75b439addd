"""The arguments of `modicum.torch.load`: which tensors may be missing or unexpected, dtypes, and a
load without a source. A load that is refused or fails leaves a model on meta as it was.

Catches: random values that each rank draws for itself; a tensor that stays on meta without an
error; a model that keeps half of a load that failed; a stored tensor that is initialised because
`missing` names it.
"""

import os
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from program import write_checkpoint  # noqa: E402  (after torch is known to be there)
from sharding import Cut, assert_same, playing_new_rank  # noqa: E402
from torch import nn  # noqa: E402
from torch.distributed.fsdp import fully_shard  # noqa: E402
from torch_front import (  # noqa: E402
    BY_NAME,
    WORLDS,
    assert_empty,
    assert_holds,
    buffer_bits,
    checkpoint_of,
    chunk,
    config_of,
    empty,
    from_pretrained,
    load,
    local,
    parameters_of,
    shard,
    stored_in,
)

import modicum  # noqa: E402
import modicum.torch  # noqa: E402
from modicum.torch import AdamW, LoadRules, MemoryPolicy, empty_parameters  # noqa: E402
from modicum.torch.build.initialiser import Initialiser  # noqa: E402

TWO = Cut("fsdp2", (2,))
HEAD, NORM = "lm_head.weight", "model.norm.weight"


@pytest.fixture(scope="module", autouse=True)
def whole_models() -> None:
    """Builds the models before a process group is simulated."""
    for name in ("llama", "llama_tied"):
        from_pretrained(name)


def copy_without(directory: Path, name: str, *left_out: str, **more: Any) -> Path:
    """A copy of a family's checkpoint without some tensors, and with others added."""
    stored = {n: t for n, t in stored_in(checkpoint_of(name)).items() if n not in left_out}
    return write_checkpoint(directory / "model", stored | more)


def same_at_every_world(make: Any, *arguments: Any, **options: Any) -> dict[str, Any]:
    """Loads in worlds of one, two and three ranks and asserts that the shards have the same bits.
    `make` makes each model. Returns the parameters of the single rank."""
    whole: dict[str, Any] = {}
    for world in WORLDS:
        for rank in range(world):
            with playing_new_rank(rank, world):
                model = fully_shard(make())
                load(model, *arguments, **options)
            assert not any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))
            held = {name: local(p) for name, p in parameters_of(model).items()}
            whole = whole or held
            for name, tensor in held.items():
                assert_same(tensor, chunk(whole[name], world, rank), f"{name} of {rank}/{world}")
    return whole


def refused(directory: Any, error: Any = modicum.UsageError, *, says: str, **options: Any) -> Any:
    """Makes a load into a sharded llama that must fail and leave the model unchanged. Returns the
    error."""
    with playing_new_rank(1, 2):
        model = shard(empty("llama"), TWO)
        before = buffer_bits(model)
        with pytest.raises(error, match=says) as raised:
            load(model, directory, **options)
        assert_empty(model)
        assert buffer_bits(model) == before
        # A second attempt succeeds.
        load(model, checkpoint_of("llama"))
        assert_holds(model, from_pretrained("llama"), TWO, 1)
    return raised.value


def test_an_optimizer_of_other_parameters_is_refused() -> None:
    """As one that was made before `fully_shard`: its state would neither be promised nor made."""
    model = empty("llama")
    optimizer = AdamW(model.named_parameters())
    with playing_new_rank(0, 2):
        model = shard(model, TWO)
        with pytest.raises(modicum.UsageError, match="rebind_parameters") as raised:
            load(model, checkpoint_of("llama"), optimizer=optimizer)
        assert raised.value.tensor == "model.embed_tokens.weight"
        assert_empty(model)


def test_a_name_that_an_inner_model_has_in_the_file_is_announced() -> None:
    """A tied model whose file has both names is none of these."""
    wrapper = nn.Module()
    wrapper.lm, wrapper.model = empty("llama"), nn.ModuleDict({"norm": nn.LayerNorm(8)})
    with pytest.warns(UserWarning, match=r"'model.norm.weight' .*into 'lm.model.norm.weight'"):
        load(wrapper, checkpoint_of("llama"))
    assert_same(wrapper.lm.model.norm.weight, from_pretrained("llama").model.norm.weight, "norm")
    assert wrapper.model["norm"].weight.eq(1).all()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        load(empty("llama_tied_head_stored"), checkpoint_of("llama_tied_head_stored"))


# ---- heads


class WithValueHead(nn.Module):
    """A language model with a head for one value, as trainers of reward models wrap it."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.pretrained_model = transformers.LlamaForCausalLM(config)
        self.v_head = nn.Linear(config.hidden_size, 1)


def token_classifier(config: Any) -> Any:
    config.num_labels = 4
    return transformers.LlamaForTokenClassification(config)


def sequence_classifier(config: Any) -> Any:
    config.num_labels = 4
    return transformers.LlamaForSequenceClassification(config)


@pytest.mark.parametrize(
    ("cls", "head", "left_over"),
    [
        (token_classifier, "score", HEAD),
        (sequence_classifier, "score", HEAD),
        (WithValueHead, "v_head", None),
    ],
)
def test_a_head_that_no_file_holds_is_made_if_missing_names_it(
    cls: Any, head: str, left_over: str | None
) -> None:
    directory = checkpoint_of("llama")

    def make() -> Any:
        config = config_of("llama")
        with empty_parameters():
            return cls(config)

    with playing_new_rank(0, 1):
        if left_over:
            with pytest.raises(modicum.UsageError, match="not in the model") as raised:
                load(make(), directory)
            assert raised.value.tensor == left_over
        with pytest.raises(modicum.UsageError, match="lacks") as raised:
            load(make(), directory, rules=LoadRules(unexpected="ignore"))
        assert raised.value.tensor == f"{head}.weight"
    options = {"missing": f"^{head}", "unexpected": left_over or "error"}
    whole = same_at_every_world(make, directory, **options)
    made = whole.pop(f"{head}.weight")
    bias = whole.pop(f"{head}.bias", torch.zeros(1))
    assert made.std() > 0 and len(made.unique()) == made.numel()
    # transformers' rule sets a bias to zero; WithValueHead has torch's rule, which draws it.
    assert not bias.any() or cls is WithValueHead
    stored = {n: p.detach() for n, p in parameters_of(from_pretrained("llama")).items()}
    for name, tensor in whole.items():
        assert_same(tensor, stored[name.removeprefix("pretrained_model.")], name)


# ---- missing


@pytest.fixture(scope="module")
def lacking(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return copy_without(tmp_path_factory.mktemp("lacking"), "llama", HEAD, NORM)


def test_missing_tensors_are_an_error(lacking: Path) -> None:
    assert refused(lacking, says="lacks 2 tensors").tensor == NORM
    assert refused(lacking, says="lacks 1 tensor of", missing="^lm_head").tensor == NORM
    assert (
        refused(lacking, says="lacks 1 tensor of", missing=[NORM, "no.such|embed"]).tensor == HEAD
    )
    assert refused(lacking, says="unknown init.* rule", missing={"": "twos"}).category == "USAGE"


def test_the_report_names_what_was_initialised_and_what_was_not_read(tmp_path: Path) -> None:
    lacking = copy_without(tmp_path, "llama", HEAD, NORM, **{"ema.decay": torch.ones(3)})
    model = empty("llama")
    report = load(model, lacking, missing={HEAD: "model", NORM: "zeros"}, unexpected="ignore")
    whole = load(empty("llama"), checkpoint_of("llama"))
    assert not whole.initialised and "initialised" not in str(whole)
    assert sorted(report.initialised) == [HEAD, NORM]
    assert report.unused == ["ema.decay", *whole.unused]
    assert f"initialised 2: {', '.join(report.initialised)}\nnot read 2: ema.decay" in str(report)


def test_a_ledger_without_room_names_the_purposes() -> None:
    """The load would fit the budget, but not the caller's ledger."""
    ledger = modicum.Ledger("1KiB")
    source, options = checkpoint_of("llama"), {"budget": "none", "ledger": ledger}
    error = refused(source, modicum.BudgetError, says="1.00 KiB", **options)
    needed = {owner["purpose"]: owner["bytes"] for owner in error.owners}
    assert {"shards", "staging", "plan", "header"} <= needed.keys()
    assert sum(needed.values()) == error.got


@pytest.mark.parametrize(
    "missing",
    [
        "init",
        r"lm_head|^model\.norm",
        [r"^lm_head", NORM],
        {HEAD: "model", NORM: "model"},
        {HEAD: "zeros", NORM: "ones"},
        {HEAD: ("normal", 0.5), NORM: "zeros"},
    ],
    ids=str,
)
def test_missing_tensors_get_the_values_of_their_rule(missing: Any, lacking: Path) -> None:
    whole = same_at_every_world(lambda: empty("llama"), lacking, missing=missing)
    rules = missing if isinstance(missing, dict) else {}
    head, norm = rules.get(HEAD, "model"), rules.get(NORM, "model")
    constants = {"zeros": 0.0, "ones": 1.0, "model": 1.0}
    assert_same(whole[NORM], torch.full((39,), constants[norm]), NORM)
    if head == "zeros":
        assert not whole[HEAD].any()
    else:
        std = 0.02 if head == "model" else head[1]
        assert whole[HEAD].std() == pytest.approx(std, rel=0.05)
        assert whole[HEAD].mean().abs() < std / 10
    for name, tensor in stored_in(lacking).items():
        if name in whole:
            assert_same(whole[name], tensor, name)


def test_a_rule_for_a_stored_tensor_is_ignored() -> None:
    rules = {HEAD: "zeros", "": "zeros"}
    with playing_new_rank(1, 2):
        model = shard(empty("llama"), TWO)
        load(model, checkpoint_of("llama"), rules=LoadRules(missing=rules))
        assert_holds(model, from_pretrained("llama"), TWO, 1)


def test_another_seed_gives_other_values(lacking: Path) -> None:
    heads = []
    for seed in (0, 0, 1):
        model = empty("llama")
        load(model, lacking, rules=LoadRules(missing="init", seed=seed))
        heads.append(local(model.lm_head.weight))
    assert torch.equal(heads[0], heads[1]) and not torch.equal(heads[0], heads[2])


def test_the_copy_of_an_initialised_tensor_in_another_dtype_is_charged() -> None:
    with empty_parameters():
        model = torch.nn.Linear(512, 512, bias=False)
    ledger = modicum.Ledger()
    report = load(model, None, dtype=torch.float16, memory=MemoryPolicy(ledger=ledger))
    assert model.weight.dtype == torch.float16
    assert ledger.at_peak["init"] >= (4 + 2) * 512 * 512
    assert report.ranks[0]["promised_bytes"] >= ledger.peak_bytes


@pytest.mark.parametrize(("name", "tables"), [("marian", 2), ("bart", 0)])
def test_tensors_that_the_model_lists_may_be_missing(
    name: str, tables: int, tmp_path: Path
) -> None:
    """Marian has two sinusoidal tables, which are parameters that no file holds. Both models have a
    bias that is a buffer, and the file of this test lacks it."""
    cut, whole, bias = Cut("fsdp2", (3,)), from_pretrained(name), "final_logits_bias"
    directory = copy_without(tmp_path, name, bias)
    absent = parameters_of(whole).keys() - stored_in(directory) - whole.all_tied_weights_keys.keys()
    assert len(absent) == tables
    with playing_new_rank(1, 3):
        model = shard(empty(name), cut)
        load(model, directory)
        assert_same(model.get_buffer(bias), torch.zeros(1, 101), bias)
        model.get_buffer(bias).copy_(whole.get_buffer(bias))
        assert_holds(model, whole, cut, 1)


# ---- unexpected


@pytest.fixture(scope="module")
def left_over(tmp_path_factory: pytest.TempPathFactory) -> Path:
    more = {"model.extra.weight": torch.ones(3), "other.bias": torch.ones(2)}
    return copy_without(tmp_path_factory.mktemp("left_over"), "llama", **more)


def test_unexpected_tensors_are_an_error(left_over: Path) -> None:
    refused(left_over, says="2 stored tensors are not in")
    assert refused(left_over, says="1 stored", unexpected="^other").tensor == "model.extra.weight"
    assert refused(left_over, says="1 stored", unexpected=["extra"]).tensor == "other.bias"


@pytest.mark.parametrize("unexpected", ["ignore", "extra|other", ["^other", "extra"]], ids=str)
def test_unexpected_tensors_that_are_named_are_ignored(unexpected: Any, left_over: Path) -> None:
    with playing_new_rank(1, 2):
        model = shard(empty("llama"), TWO)
        load(model, left_over, rules=LoadRules(unexpected=unexpected))
        assert_holds(model, from_pretrained("llama"), TWO, 1)


# ---- no source


@pytest.mark.parametrize("name", ["qwen2", "gpt2", "marian", "bart", "mixtral", "t5"])
def test_without_a_source_the_model_makes_everything(name: str) -> None:
    """Tensors with one constant value, and Marian's tables, equal those of the constructor bit for
    bit. Random tensors have about the same standard deviation, and as many different rows."""
    plain = BY_NAME[name].model_class(config_of(name))
    whole = same_at_every_world(lambda: empty(name), None)
    for path, parameter in parameters_of(plain).items():
        got, expected = whole[path], parameter.detach()
        if len(expected.unique()) == 1 or (name == "marian" and "embed_positions" in path):
            assert_same(got, expected, path)
        else:
            assert got.std() == pytest.approx(expected.std(), rel=0.5), path
            assert len(got.unique(dim=0)) == len(expected.unique(dim=0)), path


def test_without_a_source_modules_reset_their_parameters() -> None:
    def make() -> Any:
        with empty_parameters():
            layers = nn.Linear(7, 5), nn.LayerNorm(5), nn.Embedding(9, 5), nn.BatchNorm1d(5)
            return nn.Sequential(*layers)

    whole = same_at_every_world(make, None)
    assert torch.equal(whole["1.weight"], torch.ones(5)) and not whole["1.bias"].any()
    assert whole["0.weight"].abs().max() <= 7**-0.5 and whole["2.weight"].std() > 0.5


# ---- dtypes


def test_two_dtypes_in_one_fsdp2_unit_are_refused_by_name() -> None:
    options = {"keep_fp32": "norm", "dtype": torch.half}
    error = refused(checkpoint_of("llama"), says="expects one dtype", **options)
    assert error.category == "UNSUPPORTED"
    assert error.tensor == "model.norm.weight"
    # The one that is to be sharded by itself is in the minority, and not the first of its unit.
    options |= {"keep_fp32": "mlp|self_attn"}
    error = refused(checkpoint_of("llama"), says="expected torch.float32 as ", **options)
    assert error.tensor == "model.layers.0.input_layernorm.weight"


# ---- models with values


@pytest.mark.parametrize("cut", [Cut("none", (2,)), Cut("fsdp2", (3,), dim=1), TWO], ids=str)
def test_a_second_load_overwrites_the_tensors_of_its_source(cut: Cut, tmp_path: Path) -> None:
    """Tensors are overwritten in place, cast to their dtype; other tensors are unchanged."""
    whole, directory = from_pretrained("llama_tied"), checkpoint_of("llama_tied")
    partly = {
        NORM: torch.arange(39) / 3,
        "model.embed_tokens.weight": torch.arange(101 * 39).reshape(101, 39) / 7,
    }
    second = write_checkpoint(tmp_path / "model", partly)
    for rank in range(cut.world):
        with playing_new_rank(rank, cut.world):
            model = shard(empty("llama_tied"), cut)
            load(model, directory)
            before = {n: (id(p), local(p).data_ptr()) for n, p in parameters_of(model).items()}
            load(model, second, check=True)
            after = {n: (id(p), local(p).data_ptr()) for n, p in parameters_of(model).items()}
            assert before == after
            load(model, directory)
            assert_holds(model, whole, cut, rank)
            load(model, second, rules=LoadRules(missing="init"))
            for name, tensor in partly.items():
                got = local(model.get_parameter(name))
                assert_same(got, part_of(tensor.bfloat16(), cut, rank), name)
                # Restores the first values, for the comparison of all tensors below.
                got.copy_(part_of(whole.get_parameter(name), cut, rank))
            assert_holds(model, whole, cut, rank)


def test_without_tensors_on_meta_none_is_initialised() -> None:
    with playing_new_rank(1, 2):
        model = shard(empty("llama"), TWO)
        load(model, checkpoint_of("llama"))
        load(model, None)
        assert_holds(model, from_pretrained("llama"), TWO, 1)


def part_of(tensor: Any, cut: Cut, rank: int) -> Any:
    if cut.layout == "none":
        return tensor
    return chunk(tensor, cut.world, rank, cut.dim if cut.dim < tensor.dim() else 0)


def test_tensors_with_values_keep_their_dtype() -> None:
    with playing_new_rank(0, 2):
        model = shard(empty("llama"), TWO)
        load(model, checkpoint_of("llama"))
        with pytest.raises(modicum.UsageError, match="in another dtype") as raised:
            load(model, checkpoint_of("llama"), dtype=torch.bfloat16)
        assert raised.value.category == "MISMATCH"
        assert_holds(model, from_pretrained("llama"), TWO, 0)


# ---- sources and destinations


@pytest.mark.parametrize("form", [str, Path, lambda place: place / "model.safetensors"])
def test_a_source_is_a_directory_or_a_file(form: Any, tmp_path: Path) -> None:
    directory = copy_without(tmp_path, "llama")
    with playing_new_rank(1, 2):
        model = shard(empty("llama"), TWO)
        load(model, form(directory))
        assert_holds(model, from_pretrained("llama"), TWO, 1)


@pytest.mark.parametrize("layout", ["none", "fsdp2"])
def test_a_load_ignores_the_default_device(layout: str) -> None:
    cut = Cut(layout, (2,))
    with playing_new_rank(1, 2):
        model = shard(empty("llama"), cut)
        with torch.device("meta"):
            load(model, checkpoint_of("llama"))
        assert_holds(model, from_pretrained("llama"), cut, 1)


# ---- output


@pytest.mark.parametrize("rank", range(2))
def test_rank_0_shows_the_plan_and_a_bar(rank: int, capfd: pytest.CaptureFixture[str]) -> None:
    with playing_new_rank(rank, 2):
        model = shard(empty("llama"), TWO)
        load(model, checkpoint_of("llama"), progress=True)
    printed = capfd.readouterr().err
    assert ("own-shard, 2 ranks on 1 node" in printed) == (rank == 0)
    assert ("Loading weights: 100%" in printed) == (rank == 0)


def test_without_tqdm_there_is_no_bar(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "tqdm", None)
    with playing_new_rank(0, 1):
        model = shard(empty("llama"), Cut("fsdp2", (1,)))
        load(model, checkpoint_of("llama"), progress=True)
    assert not any(parameter.is_meta for parameter in model.parameters())
    printed = capfd.readouterr().err
    assert "own-shard, 1 rank on 1 node" in printed
    assert "Loading weights" not in printed


def test_without_progress_nothing_is_printed(capfd: pytest.CaptureFixture[str]) -> None:
    with playing_new_rank(0, 2):
        load(shard(empty("llama"), TWO), checkpoint_of("llama"), progress=False)
    assert capfd.readouterr().err == ""


# ---- refusals


@pytest.mark.parametrize(
    ("options", "error", "says"),
    [
        ({"check": "values"}, modicum.UsageError, "check .expected True or False"),
        ({"progress": "none"}, modicum.UsageError, "progress .expected True or False"),
        ({"budget": True}, modicum.UsageError, "budget .expected bytes"),
        ({"strategy": "own_shard"}, modicum.UsageError, "own-shard"),
        ({"strategy": "rank0-broadcast"}, modicum.UsageError, "can't exchange bytes"),
        ({"budget": "1KiB"}, modicum.BudgetError, "node 0"),
        ({"budget": None, "ledger": modicum.Ledger("1KiB")}, modicum.BudgetError, "node 0"),
        ({"budget": "none", "ledger": modicum.Ledger("1KiB")}, modicum.BudgetError, "1.00 KiB"),
        ({"staging": 1}, modicum.Error, "staging"),
        ({"dtype": torch.int8}, modicum.UsageError, "int8"),
    ],
    ids=lambda value: next(iter(value.items())) if isinstance(value, dict) else None,
)
def test_invalid_arguments_are_refused(options: Any, error: Any, says: str) -> None:
    refused(checkpoint_of("llama"), error, says=says, **options)


def test_the_process_itself_is_part_of_a_budget() -> None:
    held = modicum._modicum.process_memory()["held_bytes"]
    error = refused(checkpoint_of("llama"), modicum.BudgetError, says="node 0", budget=held)
    owners = {owner["purpose"]: owner["bytes"] for owner in error.owners}
    # Each of the two simulated ranks counts this process, which may have freed some memory since.
    assert owners["process"] >= 1.8 * held
    assert error.shortfall_bytes == error.got - held == sum(owners.values()) - held


def test_a_source_other_than_a_checkpoint_is_refused(tmp_path: Path) -> None:
    assert refused(tmp_path / "none", modicum.IoError, says="none").category == "IO"
    directory = copy_without(tmp_path, "llama")
    file = directory / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    refused(directory, modicum.FormatError, says="model.safetensors")


def test_a_failure_while_loading_leaves_the_model_as_it_was(
    lacking: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ledger = modicum.Ledger()
    with monkeypatch.context() as patch:

        def fail(self: Any, name: str, dtype: Any) -> Any:
            raise RuntimeError(f"no values for {name}")

        patch.setattr(Initialiser, "whole", fail)
        with playing_new_rank(1, 2):
            model = shard(empty("llama"), TWO)
            with pytest.raises(Exception, match=f"no values for {NORM}|no values for {HEAD}"):
                load(
                    model,
                    lacking,
                    rules=LoadRules(missing="init"),
                    memory=MemoryPolicy(ledger=ledger),
                )
            assert_empty(model)
            assert ledger.held_bytes == 0 and ledger.limit_bytes is None
            patch.undo()
            load(
                model, lacking, rules=LoadRules(missing="init"), memory=MemoryPolicy(ledger=ledger)
            )
            assert not any(parameter.is_meta for parameter in model.parameters())


@pytest.mark.parametrize("cls", (nn.LazyLinear, nn.LazyBatchNorm1d))
def test_a_lazy_module_is_refused_by_name(cls: Any) -> None:
    model = cls(2) if cls is nn.LazyLinear else cls()
    with pytest.raises(modicum.UsageError, match="UNSUPPORTED: a lazy tensor .*weight"):
        load(model, None)


def test_a_buffer_on_meta_that_no_file_holds_is_refused() -> None:
    config = config_of("llama")
    with torch.device("meta"):
        model = BY_NAME["llama"].model_class(config)
    with pytest.raises(modicum.UsageError, match="empty_parameters") as raised:
        load(model, checkpoint_of("llama"))
    assert raised.value.tensor == "model.rotary_emb.inv_freq"
    assert_empty(model)


# ---- imports

IMPORT = """
import sys
import warnings
import torch, torch.nn, torch.distributed, torch.utils
import torch._dynamo  # patches torch; without this line torch could import it during the test
places = [torch, torch.nn, torch.nn.Module, torch.nn.Parameter, torch.nn.init, torch.nn.functional,
          torch.Tensor, torch.distributed, torch.utils, torch._C, torch.nn.modules.module]
before = [(place, dict(vars(place))) for place in places]
modules = set(sys.modules)
import modicum.torch
above = {"transformers", "accelerate", "peft", "deepspeed", "torchvision"}

def imported():
    return above.intersection(name.partition(".")[0] for name in set(sys.modules) - modules)

assert not imported(), imported()

def patched():
    return [f"{place.__name__}.{name}" for place, was in before for name, value in was.items()
            if vars(place).get(name) is not value]

assert patched() == [], patched()
with modicum.torch.empty_parameters():
    model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.LayerNorm(2))
try:
    modicum.torch.load(model, sys.argv[1], progress=False, budget="none")
except modicum.UsageError:
    pass
else:
    raise AssertionError("loaded")
modicum.torch.load(model, None, progress=False, budget="none")
assert model[0].weight.std() > 0
assert not imported(), imported()
assert patched() == [], patched()
"""


def test_an_import_imports_nothing_above_torch_and_patches_nothing() -> None:
    """The same holds for loads, whether they fail or succeed."""
    command = [sys.executable, "-c", IMPORT, checkpoint_of("llama")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


LINEAR = torch.nn.Linear(1, 1)


@pytest.mark.parametrize(
    ("model", "how", "message"),
    [
        ({}, {}, "USAGE: model .expected a torch.nn.Module, got dict"),
        (LINEAR, {"dtype": "auto"}, "USAGE: dtype .expected float32, bfloat16, .* got 'auto'"),
        (LINEAR, {"dtype": torch.int8}, "USAGE: dtype .expected float32, .* got torch.int8"),
        (LINEAR, {"optimizer": 5}, "USAGE: optimizer .expected modicum.torch.AdamW, got .*int"),
        (LINEAR, {"optimizer": "adam"}, "USAGE: optimizer .expected .*AdamW, got builtins.str"),
    ],
)
def test_an_argument_of_the_wrong_type_is_named(model: Any, how: Any, message: str) -> None:
    with pytest.raises(modicum.UsageError, match=message):
        modicum.torch.load(model, None, progress=False, **how)


def test_sets_of_names_are_sorted_on_every_rank() -> None:
    """Ranks compare the texts of their arguments. Each process hashes strings differently, so the
    order of a set differs between ranks."""
    program = (
        "from modicum.torch.loading.goal import _repr_of\n"
        "print(_repr_of({f'layer.{i}' for i in range(20)}))"
    )
    printed = {
        subprocess.run(
            [sys.executable, "-c", program],
            env=os.environ | {"PYTHONHASHSEED": str(seed)},
            check=True, capture_output=True, text=True,
        ).stdout
        for seed in range(2)
    }  # fmt: skip
    assert len(printed) == 1 and "layer.19" in printed.pop()
