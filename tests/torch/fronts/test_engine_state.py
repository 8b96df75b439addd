"""`fsdp2_load_full_state_dict` in place of the upstream functions of this name: every rank holds
and trains the same shards as if FSDP2 had sharded the whole model, or upstream's function had
loaded it.

Must fail for these mutants: a chunk copied to the wrong place; a rank that needs no chunk and
blocks the others; a rank that keeps tensors it built in another way; buffers that are not loaded; a
tie that is lost; a second dtype; a consumed dict that keeps its tensors, or whose memory stays in
malloc's heap.
"""

import re
from collections.abc import Iterator
from pathlib import Path
from types import MappingProxyType, SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from ranks import Ranks, ranks  # noqa: E402  (after torch is known to be there)
from torch.distributed.fsdp import CPUOffloadPolicy  # noqa: E402

import modicum.torch  # noqa: E402
from modicum.torch import full_state_dict  # noqa: E402
from modicum.torch.loading import memory  # noqa: E402

STAGING_BYTES = 8 << 20
# Code and names that Python takes in at the first load.
PYTHON_BYTES = 4 << 20
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
    got = four.ask("state_dict_loaded", **how)
    for rank, (mine, theirs) in enumerate(zip(got, expected, strict=True)):
        assert mine["held"] == theirs["held"], f"rank {rank} holds something else"
        assert mine["loss"] == theirs["loss"], f"rank {rank}"
        assert mine["after"] == theirs["after"], f"rank {rank} trained otherwise"


@pytest.mark.parametrize("built", BUILT)
@pytest.mark.parametrize("form", ("accelerate", "engine", "areal"))
def test_every_rank_holds_its_part(four: Ranks, form: str, built: str) -> None:
    """Tries every way to build the model. `to_empty` unties, so there is no tie afterwards."""
    kind = {"tied": built != "others from to_empty"}
    expected = four.ask("state_dict_loaded", by="torch", **kind)
    assert_same(four, expected, form=form, built=built, **kind)


@pytest.mark.parametrize("built", BUILT[:3])
@pytest.mark.parametrize("form", ("accelerate", "areal"))
def test_a_path_in_the_place_of_the_dict(
    four: Ranks, tmp_path: Path, form: str, built: str
) -> None:
    how = {"path": str(tmp_path / "toy.safetensors"), "options": {"budget": "none"}}
    expected = four.ask("state_dict_loaded", by="torch")
    assert_same(four, expected, form=form, built=built, **how)


@pytest.mark.parametrize("strategy", ("rank0-broadcast", "node-reader"))
def test_buffers_of_rank_0_and_other_exchanges(four: Ranks, tmp_path: Path, strategy: str) -> None:
    """Two loads run with separate exchanges of bytes."""
    options = {"budget": "none", "strategy": strategy}
    how = {"path": str(tmp_path / "toy.safetensors"), "options": options}
    expected = four.ask("state_dict_loaded", by="torch")
    assert_same(four, expected, form="areal", built="others without parameters", **how)


def test_tensors_that_a_dict_lacks_keep_their_values(four: Ranks) -> None:
    """With strict=False tensors may be missing if they have values."""
    expected = four.ask("state_dict_loaded", by="torch")
    how = {"omit": ("experts.up", "seen"), "options": {"strict": False}}
    assert_same(four, expected, built="with values", **how)


@pytest.mark.parametrize("form", ("accelerate", "engine"))
def test_as_upstream(four: Ranks, form: str) -> None:
    """Compares with upstream's functions where they work: accelerate's loads no buffers, and both
    break ties."""
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
def test_offloaded_parameters(four: Ranks, form: str) -> None:
    expected = four.ask("state_dict_loaded", by="torch", offload=True)
    assert_same(four, expected, form=form, built="others on meta", offload=True)


@pytest.mark.parametrize("offload", (True, False), ids=("offloaded", "not offloaded"))
@pytest.mark.parametrize("tied", (True, False), ids=("tied", "untied"))
def test_skyrls_order(four: Ranks, tied: bool, offload: bool) -> None:
    """Rank 0 keeps its dict, then every rank moves the model to meta, which unties it."""
    how = {"tied": tied, "offload": offload}
    expected = four.ask("state_dict_loaded", by="torch", **how)
    assert_same(four, expected, form="skyrl", built="moved to meta", **how)


def test_offloading_that_contradicts_fully_shard_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each form of the call has its own argument. Parameters on a device are then refused by
    name."""
    policy, on_gpu = CPUOffloadPolicy(pin_memory=False), torch.device("cuda", 0)

    class Walk:
        managed = {"norm.weight": SimpleNamespace(device=on_gpu)}

    def fill(model: Any, full: Any, offload: bool, rules: Any, options: Any) -> Any:
        full_state_dict._check_offload(Walk, offload)
        return model

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


def test_words_that_are_none() -> None:
    model = torch.nn.Linear(1, 1)
    for full, word in (({}, "strategy"), ("/nowhere", "offload"), ({}, "missing")):
        with pytest.raises(TypeError, match=f"unknown argument '{word}'"):
            modicum.torch.fsdp2_load_full_state_dict(model, full, **{word: "1GiB"})


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
def test_any_run_of_any_tensor(tensor: Any) -> None:
    """Tests the runs that rank 0 reads from its tensors, for all kinds of strides."""
    whole = tensor.reshape(-1).to(torch.bfloat16 if tensor.is_floating_point() else tensor.dtype)
    for first in range(len(whole)):
        for end in range(first, len(whole) + 1):
            into = torch.full((end - first,), -1).to(whole.dtype)
            memory._copy_run(tensor, first, into)
            assert torch.equal(into, whole[first:end])


@pytest.mark.parametrize("dtype", ("float32", "bfloat16"))
def test_a_dict_is_sent_within_the_promise(four: Ranks, dtype: str) -> None:
    """Measured by the kernel's counters, and in the report: other ranks hold shards and staging,
    rank 0 also its dict. The sent bytes are counted, and are those that the ranks need."""
    answers = four.ask("dict_measured", dtype=dtype)
    ranks, itemsize = answers[0]["report"]["ranks"], getattr(torch, dtype).itemsize
    whole_bytes = (6000 + 1536) * 1024
    for rank, answer in enumerate(answers):
        of, table = ranks[rank], answer["buffer_bytes"]
        kept = answer["local_bytes"] + table
        assert answer["local_bytes"] * 4 == whole_bytes * itemsize
        assert answer["grown_bytes"] <= kept + STAGING_BYTES + PYTHON_BYTES, f"rank {rank}"
        assert 0 < answer["at_peak"]["staging"] <= STAGING_BYTES
        assert of["ledger_peak_bytes"] <= of["promised_bytes"] - of["baseline_bytes"]
        assert of["kernel_peak_bytes"] <= of["promised_bytes"]
        assert of["exchanged_bytes"] == (kept if rank > 0 else 0)
        assert of["storage_read_bytes"] == (0 if rank > 0 else whole_bytes * itemsize + table)
        assert answer["largest_read"] <= 1 << 20 and (answer["largest_read"] > 0) == (rank == 0)
    assert answers[0]["report"]["strategy"] == "node-reader"
    dict_bytes = ranks[0]["baseline_bytes"] - ranks[1]["baseline_bytes"]
    assert dict_bytes == pytest.approx(whole_bytes * 4, abs=2 * PYTHON_BYTES)
    assert ranks[0]["promised_bytes"] - ranks[1]["promised_bytes"] >= dict_bytes - (1 << 20)


def test_a_dict_obeys_its_budget(four: Ranks) -> None:
    """Rank 0's dict counts for its node. All ranks refuse before a tensor is read."""
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
    """Measured by the kernel's counters: rank 0 gets its shards while the dict shrinks; malloc
    returns memory after every fourth tensor."""
    tensor_bytes = 8 << 20
    kept = four.ask("dict_consumed", consume=False)[0]
    assert kept["grown"][-1] > 3 * tensor_bytes and len(kept["left"]) == 18
    answers = four.ask("dict_consumed")
    grown = answers[0]["grown"]
    for n, now in enumerate(grown):
        done = n * 16 // len(grown)  # tensors, and perhaps one more
        most = (done + 1) * tensor_bytes // 4 - max(done - 4, 0) * tensor_bytes
        assert now <= most + STAGING_BYTES + PYTHON_BYTES, f"read {n} of {len(grown)}"
    assert grown[-1] <= -10 * tensor_bytes
    assert all(answer["left"] == [] for answer in answers)


def test_a_consumed_dict_after_an_error(four: Ranks) -> None:
    """It lacks the tensors that had been sent, both names of a tie included. Other ranks' dicts are
    as before."""
    answers = four.ask("dict_consumed", fails_at=20)  # a tensor needs several reads
    (said,) = {answer["said"] for answer in answers}
    assert said.startswith("INTERNAL"), said
    assert answers[0]["left"] == [f"layers.{n}.weight" for n in range(2, 16)]
    assert answers[1]["left"] == ["a", "b"]


def test_a_dict_that_can_not_be_consumed() -> None:
    model, frozen = torch.nn.Linear(1, 1), MappingProxyType({})
    with pytest.raises(modicum.UsageError, match="consume=True .*mappingproxy"):
        modicum.torch.fsdp2_load_full_state_dict(model, frozen, consume=True)
    with pytest.raises(TypeError, match="unknown argument 'consume'"):
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
        ("type", "USAGE: a state dict .*list"),
        (
            "other model",
            "CONFLICT: rank 2 differs from rank 0 in tensor .*expected in the model, got none",
        ),
    ],
)
def test_refused_on_every_rank(four: Ranks, case: str, message: str) -> None:
    """Every rank gets the same message, and no model is partly loaded."""
    (said,) = set(four.ask("drop_in_refused", case=case))
    assert re.match(message, said), said
