"""`fsdp2_load_full_state_dict` in place of the frameworks' functions of this name. Every rank must
hold and train the expected shards: those that `fully_shard` makes of a model with values or, in one
test, those that the framework's own function loads.

Catches: a chunk copied to the wrong place; a tensor that stays on the one rank that built it with
values; non-persistent buffers that are not compared or not loaded; two names of a tie with
different values, or a tie lost on some ranks, that are accepted; a cast between integers and
floats; a dict whose memory is not part of the budget; a consumed dict that keeps its tensors, or
whose memory stays in malloc's heap; an argument of `load` that has no effect.
"""

import re
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import MappingProxyType, SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

import safetensors.torch  # noqa: E402  (after torch is known to be there)
from nested_options import nested  # noqa: E402
from ranks import Ranks, ranks  # noqa: E402
from torch.distributed.fsdp import CPUOffloadPolicy  # noqa: E402

import modicum.torch  # noqa: E402
from modicum.recipes import Recipe  # noqa: E402
from modicum.torch.loading import full_state_dict, memory  # noqa: E402

STAGING_BYTES = 8 << 20
# Memory of the modules and other objects that Python makes during the first load.
PYTHON_BYTES = 4 << 20
# How the ranks build the model. "alike": every rank builds it on meta. "others ...": rank 0 builds
# it with values, and the other ranks as named. "with values": every rank builds it with values.
BUILT = (
    "alike",
    "others without parameters",
    "others on meta",
    "others from to_empty",
    "with values",
)


@pytest.fixture(scope="module")
def four(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    with ranks(4, tmp_path_factory.mktemp("engine") / "ranks") as started:
        yield started


def assert_same(four: Ranks, expected: list[Any], **how: Any) -> None:
    """Loads a state dict by Modicum, and compares shards, loss and trained model with `expected`.
    Of the arguments `how`, `form` names the framework whose signature is used: "engine" is that of
    verl."""
    got = four.ask("state_dict_loaded", **how)
    for rank, (mine, theirs) in enumerate(zip(got, expected, strict=True)):
        assert mine["held"] == theirs["held"], f"rank {rank}: other shards, buffers or ties"
        assert mine["loss"] == theirs["loss"], f"rank {rank}: another loss"
        assert mine["after"] == theirs["after"], f"rank {rank}: another model after the step"


@pytest.mark.parametrize("built", BUILT)
@pytest.mark.parametrize("form", ("accelerate", "engine", "areal"))
def test_every_rank_holds_its_part(four: Ranks, form: str, built: str) -> None:
    """`to_empty` breaks ties on the ranks that call it, so in that case the model has no tie."""
    kind = {"tied": built != "others from to_empty"}
    expected = four.ask("state_dict_loaded", by="torch", **kind)
    assert_same(four, expected, form=form, built=built, **kind)


@pytest.mark.parametrize("built", BUILT[:3])
@pytest.mark.parametrize("form", ("accelerate", "areal"))
def test_a_path_gives_the_shards_of_a_dict(
    four: Ranks, tmp_path: Path, form: str, built: str
) -> None:
    how = {"path": str(tmp_path / "toy.safetensors"), "options": {"budget": "none"}}
    expected = four.ask("state_dict_loaded", by="torch")
    assert_same(four, expected, form=form, built=built, **how)


@pytest.mark.parametrize("strategy", ("rank0-broadcast", "node-reader"))
def test_rank_0s_buffers_are_loaded_before_a_path(
    four: Ranks, tmp_path: Path, strategy: str
) -> None:
    """Non-persistent buffers differ between the ranks, so a first load sends rank 0's buffers. The
    second load reads the file. With these strategies both exchange bytes between ranks."""
    options = {"budget": "none", "strategy": strategy}
    how = {"path": str(tmp_path / "toy.safetensors"), "options": options}
    expected = four.ask("state_dict_loaded", by="torch")
    assert_same(four, expected, form="areal", built="others without parameters", **how)


def test_tensors_that_a_dict_lacks_keep_their_values(four: Ranks) -> None:
    """With `strict=False` the dict may lack tensors that have values in the model."""
    expected = four.ask("state_dict_loaded", by="torch")
    how = {"omit": ("experts.up", "seen"), "options": {"strict": False}}
    assert_same(four, expected, built="with values", **how)


@pytest.mark.parametrize("form", ("accelerate", "engine"))
def test_the_result_is_that_of_the_frameworks_function(four: Ranks, form: str) -> None:
    """The model has no tie, because the functions of both frameworks break ties. For accelerate it
    has no persistent buffer, because accelerate's function fails on them."""
    kind = {"form": form, "tied": False, "buffers": form == "engine", "built": "others on meta"}
    kind |= {"dtype": "bfloat16", "stored": "bfloat16"}
    assert_same(four, four.ask("state_dict_loaded", by="upstream", **kind), **kind)


@pytest.mark.parametrize(
    ("dtype", "stored"), [("bfloat16", "float32"), ("float32", "bfloat16"), ("float16", "float64")]
)
def test_parameters_have_the_models_dtype(four: Ranks, dtype: str, stored: str) -> None:
    how = {"dtype": dtype, "stored": stored, "buffers": False}
    expected = four.ask("state_dict_loaded", by="torch", **how)
    assert_same(four, expected, built="others on meta", **how)


@pytest.mark.parametrize("omit", ("head.weight", "embed.weight"))
def test_one_of_two_tied_names_in_the_dict_suffices(four: Ranks, omit: str) -> None:
    expected = four.ask("state_dict_loaded", by="torch")
    assert_same(four, expected, built="others on meta", omit=(omit,))


@pytest.mark.parametrize("form", ("accelerate", "engine", "areal"))
def test_offloaded_parameters_are_loaded(four: Ranks, form: str) -> None:
    expected = four.ask("state_dict_loaded", by="torch", offload=True)
    assert_same(four, expected, form=form, built="others on meta", offload=True)


@pytest.mark.parametrize("offload", (True, False), ids=("offloaded", "not offloaded"))
@pytest.mark.parametrize("tied", (True, False), ids=("tied", "untied"))
def test_a_model_that_skyrl_moves_to_meta_is_loaded(four: Ranks, tied: bool, offload: bool) -> None:
    """As in SkyRL, rank 0 takes the state dict, and then every rank moves the model to meta, which
    breaks the tie. Every rank ties the names again before it shards the model."""
    how = {"tied": tied, "offload": offload}
    expected = four.ask("state_dict_loaded", by="torch", **how)
    assert_same(four, expected, form="skyrl", built="moved to meta", **how)


def test_offloading_that_contradicts_fully_shard_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each framework has its own argument for offloading. If it is set although `fully_shard` keeps
    a parameter on a device, the error names that parameter."""
    policy, on_gpu = CPUOffloadPolicy(pin_memory=False), torch.device("cuda", 0)

    class Walk:
        managed = {"norm.weight": SimpleNamespace(device=on_gpu)}

    def fill(model: Any, full: Any, how: Any, arguments: Any) -> Any:
        full_state_dict._check_offload(Walk, how.offload)
        return []

    monkeypatch.setattr(full_state_dict, "_fill", fill)
    model, load = torch.nn.Linear(1, 1), modicum.torch.fsdp2_load_full_state_dict
    calls: list[tuple[Any, dict[str, Any]]] = [
        ((model, {}, policy), {}),  # AReaL
        ((model, {}, None, policy), {}),  # verl
        ((object(), model, {}, True), {}),  # accelerate
        ((object(), model, {}), {"offload_to_cpu": True}),  # axolotl
        ((), {"accelerator": None, "model": model, "full_sd": {}, "cpu_offload": True}),
    ]
    for arguments, named in calls:
        with pytest.raises(modicum.UsageError, match="cpu_offload .*norm.weight.* cuda:0"):
            load(*arguments, **named)
    for arguments in ((model, {}, None), (model, {}, None, None), (object(), model, {}, False)):
        assert load(*arguments) is model


def test_unknown_keyword_arguments_are_refused() -> None:
    model = torch.nn.Linear(1, 1)
    for full in ({}, "/nowhere"):
        with pytest.raises(TypeError, match="unknown argument 'offload'"):
            modicum.torch.fsdp2_load_full_state_dict(model, full, offload=True)


def test_arguments_of_load_apply_to_a_path(tmp_path: Path) -> None:
    """Names, a recipe, resized rows and the state of an optimizer, as by `load`."""
    stored = torch.arange(6.0).view(2, 3)
    safetensors.torch.save_file({"old": stored}, tmp_path / "model.safetensors")

    def filled(rows: int, columns: int, **how: Any) -> Any:
        with modicum.torch.empty_parameters():
            model = torch.nn.Linear(columns, rows, bias=False)
        if "optimizer" in how:
            how["optimizer"] = modicum.torch.AdamW(model.parameters())
        how = nested(how, "rules", "memory")
        modicum.torch.fsdp2_load_full_state_dict(model, tmp_path, progress=False, **how)
        return model.weight.detach(), how.get("optimizer")

    assert torch.equal(filled(2, 3, key_mapping={"old": "weight"})[0], stored)
    turned = {"op": "permute", "dims": [1, 0], "in": [{"op": "stored", "name": "old"}]}
    recipe = Recipe({"weight": turned})
    assert torch.equal(filled(3, 2, recipe=recipe)[0], stored.t())
    _, optimizer = filled(3, 2, recipe=recipe, optimizer=True)
    assert len(optimizer.state) == 1
    for wrong in ({"recipe": tmp_path / "none.json"}, {"resized": "bogus"}, {"adapter": "none"}):
        with pytest.raises(modicum.errors.Error, match="IO: |USAGE: "):
            filled(2, 3, **wrong)


def test_check_applies_to_a_path_and_not_to_a_dict(tmp_path: Path) -> None:
    model, reports = torch.nn.Linear(3, 2, bias=False), []
    safetensors.torch.save_file({"weight": torch.ones(2, 3)}, tmp_path / "model.safetensors")
    load = partial(modicum.torch.fsdp2_load_full_state_dict, model, progress=False)
    load(tmp_path, check=True, on_report=reports.append)
    load(tmp_path, on_report=reports.append)
    assert [report.check for report in reports] == ["ok", "off"]
    with pytest.raises(modicum.UsageError, match="check has no effect .* with a dict"):
        load({"weight": torch.ones(2, 3)}, check=True)


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(24),
        torch.arange(24).view(2, 3, 4).permute(2, 0, 1),
        torch.arange(60).view(3, 4, 5)[:, 1:3, ::2],
        torch.arange(6).expand(4, 6),
        torch.tensor(5),
        torch.arange(24.0).view(4, 6).t(),
    ],
    ids=("contiguous", "permuted", "strided", "expanded", "scalar", "cast"),
)
def test_any_run_of_elements_is_copied(tensor: Any) -> None:
    """Rank 0 copies runs [first, end) of a tensor's elements, in row-major order, whatever its
    strides. This test copies every such run."""
    whole = tensor.reshape(-1).to(torch.bfloat16 if tensor.is_floating_point() else tensor.dtype)
    for first in range(len(whole)):
        for end in range(first, len(whole) + 1):
            into = torch.full((end - first,), -1).to(whole.dtype)
            memory.copy_run(tensor, first, into)
            assert torch.equal(into, whole[first:end])


@pytest.mark.parametrize("dtype", ("float32", "bfloat16"))
def test_a_dict_is_sent_within_the_promise(four: Ranks, dtype: str) -> None:
    """By the kernel's counters and the report, each rank's memory grows by at most its shards, the
    buffer and the staging. Rank 0's dict is part of its baseline. Each other rank receives exactly
    the bytes of its shards and of the buffer."""
    answers = four.ask("dict_measured", dtype=dtype)
    reported, itemsize = answers[0]["report"]["ranks"], getattr(torch, dtype).itemsize
    numel = (6000 + 1536) * 1024  # of the two matrices of the class Large
    for rank, answer in enumerate(answers):
        of, buffer_bytes = reported[rank], answer["buffer_bytes"]
        kept = answer["local_bytes"] + buffer_bytes
        assert answer["local_bytes"] * 4 == numel * itemsize  # four ranks
        assert answer["grown_bytes"] <= kept + STAGING_BYTES + PYTHON_BYTES, f"rank {rank}"
        assert 0 < answer["at_peak"]["staging"] <= STAGING_BYTES
        assert of["ledger_peak_bytes"] <= of["promised_bytes"] - of["baseline_bytes"]
        assert of["kernel_peak_bytes"] <= of["promised_bytes"]
        assert of["exchanged_bytes"] == (kept if rank > 0 else 0)
        assert of["storage_read_bytes"] == (0 if rank > 0 else numel * itemsize + buffer_bytes)
        # Rank 0 alone reads the dict, in runs of at most 1 MiB.
        assert answer["largest_read"] <= 1 << 20 and (answer["largest_read"] > 0) == (rank == 0)
    assert answers[0]["report"]["strategy"] == "node-reader"
    dict_bytes = reported[0]["baseline_bytes"] - reported[1]["baseline_bytes"]
    assert dict_bytes == pytest.approx(numel * 4, abs=2 * PYTHON_BYTES)  # the dict is float32
    assert reported[0]["promised_bytes"] - reported[1]["promised_bytes"] >= dict_bytes - (1 << 20)


def test_a_dict_obeys_its_budget(four: Ranks) -> None:
    """Rank 0's dict counts towards its node's budget. All ranks refuse before a tensor is read."""
    report = four.ask("dict_measured")[0]["report"]
    promised = sum(of["promised_bytes"] for of in report["ranks"])
    assert report["budget"] is None
    for answer in four.ask("dict_measured", offers=str(promised - (64 << 20))):
        assert answer["reads"] == []
        assert re.match("BUDGET: .*node 0", answer["refused"]), answer["refused"]
    offers = promised + (64 << 20)
    report = four.ask("dict_measured", offers=str(offers))[0]["report"]
    assert report["budget"] == {"bytes": offers, "source": "argument"}


def test_a_consumed_dict_is_freed_as_it_goes(four: Ranks) -> None:
    """By the kernel's counters, rank 0's shards grow while the dict shrinks. Modicum calls
    malloc_trim after every 32 MiB, so the memory of up to four tensors of 8 MiB that were removed
    from the dict may not have been freed yet."""
    tensor_bytes = 8 << 20
    kept = four.ask("dict_consumed", consume=False)[0]
    # The shards are a quarter of 16 tensors. The dict has 18 names: the 16 layers, the head, which
    # is tied to layer 0, and `small`.
    assert kept["grown"][-1] > 3 * tensor_bytes and len(kept["left"]) == 18
    answers = four.ask("dict_consumed")
    grown = answers[0]["grown"]
    for n, now in enumerate(grown):
        done = n * 16 // len(grown)  # the number of tensors read, or one less
        most = (done + 1) * tensor_bytes // 4 - max(done - 4, 0) * tensor_bytes
        assert now <= most + STAGING_BYTES + PYTHON_BYTES, f"read {n} of {len(grown)}"
    # The shards add 4 tensors, the dict has lost 16, and the margin is 2.
    assert grown[-1] <= -10 * tensor_bytes
    assert all(answer["left"] == [] for answer in answers)


def test_a_consumed_dict_after_an_error_has_the_tensors_not_sent(four: Ranks) -> None:
    """Both names of a tie are removed with their tensor. The dicts of other ranks are unchanged."""
    # One read copies at most 1 MiB. `small` takes one read and each layer takes eight, so layer 2
    # begins at read 17.
    answers = four.ask("dict_consumed", fails_at=20)
    (message,) = {answer["said"] for answer in answers}
    assert message.startswith("INTERNAL"), message
    assert answers[0]["left"] == [f"layers.{n}.weight" for n in range(2, 16)]
    assert answers[1]["left"] == ["a", "b"]


def test_consume_is_refused_for_an_immutable_dict_and_a_path() -> None:
    model, frozen = torch.nn.Linear(1, 1), MappingProxyType({})
    with pytest.raises(modicum.UsageError, match="consume=True .*mappingproxy"):
        modicum.torch.fsdp2_load_full_state_dict(model, frozen, consume=True)
    with pytest.raises(modicum.UsageError, match="consume=True .*a dict"):
        modicum.torch.fsdp2_load_full_state_dict(model, "/nowhere", consume=True)


@pytest.mark.parametrize(
    ("case", "message"),
    [
        ("missing", "MISMATCH: .* lacks a tensor: pass the model's whole .*experts"),
        ("unknown", "MISMATCH: 1 tensor is .* not in the model: strict=False .*head.bias"),
        ("shape", r"MISMATCH: .*experts.* float32 \[3, 5, 4\].* float32 \[2, 5, 4\]"),
        ("meta", "UNSUPPORTED: this tensor is on meta on rank 0 .*experts"),
        ("kind", "MISMATCH: .*seen.* int64 .* float32"),
        ("tie", "MISMATCH: two tied names .*head.weight"),
        (
            "moved to meta",
            r"CONFLICT: .*tensor head.weight: build the same .*as by tie_weights\(\)",
        ),
        (
            "path on one rank",
            "CONFLICT: rank 1 differs .* in the form of the state .*dict, got path",
        ),
        ("type", "USAGE: the full state has an unsupported type .*list"),
        (
            "other model",
            "CONFLICT: rank 2 differs from rank 0 in tensor .*expected in the model, got none",
        ),
    ],
)
def test_refused_on_every_rank(four: Ranks, case: str, message: str) -> None:
    """Every rank gets the same message, and all parameters are still on meta."""
    (got,) = set(four.ask("drop_in_refused", case=case))
    assert re.match(message, got), got
