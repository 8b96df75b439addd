"""`modicum.torch.save` in one world, `modicum.torch.resume` in another.

The oracle is the uninterrupted training. The two programs have different numbers of ranks or
layouts, and the same state format. The resumed model and state must equal the saved ones, and the
next three steps those of the program that saved, bit for bit. `from_pretrained` and `modicum
verify` must read the saved checkpoint. Catches: a state that each replica
writes; step counts, of Modicum's AdamW or of torch's, that begin at 0 after a resume; groups that
have the options of the new program after a resume; ranks that write their parts of divided rows
alone, without a warning; a state that a resume does not read; a rank that gets the extras of
another rank; ranks that save different checkpoints; a state of another format that is accepted; a
state that is not in the promise; replicas that differ and are mixed.
"""

import subprocess
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

import torch
from ranks import Ranks
from safetensors.torch import load_file
from sharding import Cut

MIB = 1 << 20
ONE = Cut("none", (1,))
TWO, THREE, FOUR = Cut("fsdp2", (2,)), Cut("fsdp2", (3,)), Cut("fsdp2", (4,))
HSDP = Cut("hsdp", (2, 2))
TP = Cut("tp-fsdp", (2, 2))
SOAK = pytest.mark.soak


@pytest.fixture(scope="module")
def model(worlds: dict[int, Ranks], tmp_path_factory: pytest.TempPathFactory) -> str:
    """The directory of a checkpoint in several files, with tied embeddings. Rows have 128 elements,
    so that the int8 formats hold 8-bit moments with scales."""
    folder = str(tmp_path_factory.mktemp("model") / "qwen3")
    sizes = {"hidden_size": 128, "intermediate_size": 128, "tie_word_embeddings": True}
    worlds[1].ask("write", directory=folder, family="qwen3", config=sizes, dtype="bfloat16")
    return folder


def save_and_resume(
    worlds: dict[int, Ranks], how: dict[str, Any], cuts: tuple[Cut, Cut], program: Path
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Saves with the first of `cuts`, resumes with the second, and asserts that every rank has the
    saved values, at the resume ("before") and after three more steps ("end"). Returns rank 0's
    answer to the save, and all ranks' answers to the resume."""
    before, after = cuts
    saved = worlds[before.world].ask("saves", cut=before, **how)
    verified = subprocess.run([program, "verify", how["root"]], capture_output=True, text=True)
    assert verified.returncode == 0, verified.stderr
    resumed = worlds[after.world].ask("resumes", cut=after, **how)
    for rank, answer in enumerate(resumed):
        for when, expected in (("before", saved[0]["saved"]), ("end", saved[0]["end"])):
            differ = [n for n, text in answer[when].items() if expected.get(n) != text]
            assert not differ, f"{when}: {differ[0]} on rank {rank}"
            assert answer[when].keys() == expected.keys()
    reports = {str(answer["report"]) for answer in saved}
    assert len(reports) == 1, "ranks return different reports"
    return saved[0], resumed


@pytest.mark.parametrize(
    ("before", "after", "state_format", "dtype"),
    [
        pytest.param(FOUR, TWO, "fp32", "float32", marks=SOAK),
        (TWO, THREE, "fp32-split", "bfloat16"),
        pytest.param(ONE, FOUR, "int8-moments", "bfloat16", marks=SOAK),
        (HSDP, TWO, "bf16-moments", "float32"),
        (TP, THREE, "fp32", "bfloat16"),
        (THREE, ONE, "int8-moments", "float32"),
        pytest.param(TWO, THREE, "int8-moments-24", "bfloat16", marks=SOAK),
        (HSDP, THREE, "int8-moments", "bfloat16"),
    ],
    ids=str,
)
def test_training_goes_on_in_another_world(
    worlds: dict[int, Ranks], model: str, tmp_path: Path, modicum: Path,
    before: Cut, after: Cut, state_format: str, dtype: str,
) -> None:  # fmt: skip
    how = {
        "directory": model, "root": str(tmp_path / "steps"), "optimizer": state_format,
        "dtype": dtype,
    }  # fmt: skip
    saved, resumed = save_and_resume(worlds, how, (before, after), modicum)
    report = saved["report"]
    files = [f for f in (tmp_path / "steps/step-2").rglob("*") if f.is_file()]
    written = sum(f.stat().st_size for f in files if f.name not in ("manifest.json", "COMMIT"))
    assert report["written_bytes"] == written, "bytes are written twice, or not counted"
    assert report["read_bytes"] == 0
    # Of these layouts only tensor parallelism divides rows. The parts of a row are gathered before
    # they are written.
    assert (report["gathered_bytes"] > 0) == (before == TP)
    # The promise does not include Python's own objects: at most 1 MiB.
    assert report["held_bytes"] <= report["promised_bytes"] + MIB
    assert [answer["extra"][0] for answer in resumed] == [{"epoch": 1}] * after.world


@pytest.mark.parametrize(
    ("saved", "to"), [("int8-moments", "bf16-moments"), ("adamw", "fp32-split")]
)
def test_a_state_is_converted_in_every_world(
    worlds: dict[int, Ranks], model: str, tmp_path: Path, saved: str, to: str
) -> None:
    """Also the state of torch's AdamW. Every world gets the bits of one rank, whose conversion
    test_state_formats.py compares with `load_state_dict`."""
    how = {"directory": model, "root": str(tmp_path / "steps"), "dtype": "bfloat16"}
    worlds[2].ask("saves", cut=TWO, optimizer=saved, **how)
    answers = [
        answer
        for cut in (ONE, THREE, TP)
        for answer in worlds[cut.world].ask("resumes", cut=cut, optimizer=to, **how)
    ]
    for answer in answers:
        assert (answer["before"], answer["end"]) == (answers[0]["before"], answers[0]["end"])


@pytest.mark.parametrize(
    "optimizer", ("fp32-split", *(pytest.param(o, marks=SOAK) for o in ("bf16-moments", "adam")))
)
def test_ranks_that_cannot_share_memory_write_alone(
    worlds: dict[int, Ranks], model: str, tmp_path: Path, optimizer: str
) -> None:
    """If ranks cannot map each other's memory, divided rows are not gathered. The files are equal,
    and the report warns of each such rank."""
    found, warnings = [], []
    for shares in (True, False):
        root = tmp_path / str(shares)
        how = {"directory": model, "root": str(root), "dtype": "bfloat16", "shares": shares}
        answers = worlds[4].ask("saves", cut=TP, optimizer=optimizer, **how)
        reports = [answer["report"] for answer in answers]
        assert (reports[0]["gathered_bytes"] > 0) == shares
        assert all(report["warnings"] == reports[0]["warnings"] for report in reports)
        warnings.append(reports[0]["warnings"])
        files = sorted((root / "step-2").rglob("*.safetensors"))
        found.append({f.relative_to(root): f.read_bytes() for f in files})
    assert found[0] == found[1]
    assert len(found[0]) > 1
    assert warnings[0] == []
    assert [text[:18] for text in warnings[1]] == [f"rank {n} can't map m" for n in (1, 2, 3)]


def test_replicas_that_differ_are_not_mixed(
    worlds: dict[int, Ranks], model: str, tmp_path: Path
) -> None:
    """Buffers come from rank 0. Parameters and moments that differ are refused, or, if asked for,
    come from the first rank that holds them."""
    root = tmp_path / "steps"
    answers = worlds[4].ask("save_diverged", directory=model, root=str(root), cut=HSDP)
    names = ("model.embed_tokens.weight.exp_avg", "model.layers.0.input_layernorm.weight")
    for errors in answers:
        assert [error["category"] for error in errors] == ["CONFLICT"] * 3
        assert "on rank 1" in errors[0]["message"] and "on rank 3" in errors[0]["message"]
        assert [error["tensor"] for error in errors[:2]] == [*names]
        assert errors[2]["tensor"] == "model.embed_tokens.weight"
    assert not (root / "step-2").exists()
    values = {n: load_file(root / f"step-{n}/optimizer/model.safetensors") for n in (1, 3, 4)}
    for n in (1, 3, 4):
        for path in (root / f"step-{n}").glob("model*.safetensors"):
            values[n] |= load_file(path)
        assert values[n]["mean"].tolist() == values[n]["var"].tolist() == [0.0] * 3
        assert values[n].keys() == values[1].keys()
        for name, value in values[1].items():
            assert torch.equal(values[n][name], value), f"{name} of step {n}"


@pytest.mark.parametrize(
    "optimizer", ("adamw", "sgd", *(pytest.param(o, marks=SOAK) for o in ("adam", "sgd-plain")))
)
def test_optimizers_of_torch_resume_in_another_world(
    worlds: dict[int, Ranks], model: str, tmp_path: Path, modicum: Path, optimizer: str
) -> None:
    how = {"directory": model, "root": str(tmp_path / "steps"), "optimizer": optimizer}
    save_and_resume(worlds, how, (FOUR, TWO) if optimizer == "adamw" else (TWO, ONE), modicum)


@SOAK
def test_the_state_of_torch_is_promised(worlds: dict[int, Ranks], tmp_path: Path) -> None:
    """The peak RSS of a resume is within the promise, plus 1 MiB for Python's own objects. If the
    budget is too small, the error has the state's bytes, and no tensor is read."""
    folder = str(tmp_path / "model")
    sizes = {"hidden_size": 512, "vocab_size": 40000, "tie_word_embeddings": True}
    worlds[1].ask("write", directory=folder, family="qwen3", config=sizes, dtype="float32")
    how = {"directory": folder, "root": str(tmp_path / "steps"), "optimizer": "adamw"}
    worlds[2].ask("saves", cut=TWO, **how)
    for answer in worlds[2].ask("resume_promised", cut=TWO, **how):
        assert answer["refused"]["error"] == "BudgetError", answer
        owners = answer["refused"]["owners"]
        bytes_by_purpose = {owner["purpose"]: owner["bytes"] for owner in owners}
        assert bytes_by_purpose["moments"] >= answer["state"] > 64 * MIB
        assert answer["refused"]["on_meta"], "the refused resume has filled parameters"
        assert answer["peak"] <= answer["promised"] + MIB


def test_the_checkpoint_is_a_model_of_transformers(
    worlds: dict[int, Ranks], model: str, tmp_path: Path, torch: Any
) -> None:
    """Compares the names, dtypes and bits of all parameters with those that were saved."""
    import transformers
    from torch_rank import told as digest_of

    how = {"directory": model, "root": str(tmp_path / "steps"), "dtype": "bfloat16"}
    (saved, *_) = worlds[2].ask("saves", cut=TWO, **how)
    step = tmp_path / "steps/step-2"
    read = transformers.AutoModelForCausalLM.from_pretrained(step, dtype="auto")
    for name, tensor in read.named_parameters():
        assert saved["saved"][name] == digest_of(tensor), name
    config = transformers.AutoConfig.from_pretrained(step)
    assert config.dtype == torch.bfloat16


def test_resumes_into_memory_with_other_values(
    worlds: dict[int, Ranks], model: str, tmp_path: Path
) -> None:
    """The program resumes, makes other steps, and resumes again."""
    how = {"directory": model, "root": str(tmp_path / "steps"), "optimizer": "int8-moments"}
    saved = worlds[2].ask("saves", cut=TWO, **how)
    (answer, _) = worlds[2].ask("resumes", cut=TWO, again=True, **how)
    assert answer["before"] == saved[0]["saved"] and answer["end"] == saved[0]["end"]


def test_extras_of_each_rank_come_back(
    worlds: dict[int, Ranks], model: str, tmp_path: Path
) -> None:
    """In a world of the same size each rank gets its own extras; otherwise it gets those of all
    ranks."""
    how = {"directory": model, "root": str(tmp_path / "steps")}
    worlds[2].ask("saves", cut=TWO, **how)
    own = [f"{{'rank': {rank}, 'rng': tensor([{rank}, {rank}, {rank}])}}" for rank in range(2)]
    answers = worlds[2].ask("resumes", cut=TWO, **how)
    assert [answer["extra"][1] for answer in answers] == own
    (alone,) = worlds[1].ask("resumes", cut=ONE, **how)
    assert alone["extra"][1] == f"[{own[0]}, {own[1]}]"


def test_resumes_from_the_checkpoint_before_a_damaged_one(
    worlds: dict[int, Ranks], model: str, tmp_path: Path
) -> None:
    """The damaged checkpoint is an empty directory."""
    how = {"directory": model, "root": str(tmp_path / "steps")}
    worlds[1].ask("saves", cut=ONE, **how)
    (tmp_path / "steps/step-9").mkdir()
    (answer,) = worlds[1].ask("resumes", cut=ONE, **how)
    assert answer["report"]["step"] == 2
    assert [skipped["step"] for skipped in answer["report"]["skipped"]] == [9]


def test_a_save_sets_a_damaged_checkpoint_of_its_number_aside(
    worlds: dict[int, Ranks], model: str, tmp_path: Path
) -> None:
    """The ranks share the reading of the checkpoint. Its last byte belongs to one rank's part."""
    root = tmp_path / "steps"
    how: dict[str, Any] = {"directory": model, "root": str(root), "cut": THREE}
    worlds[3].ask("saves", **how)
    file = max((root / "step-2").glob("*.safetensors"))
    data = file.read_bytes()
    file.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    reports = [answer["report"] for answer in worlds[3].ask("saves", **how)]
    ((damaged,), *others) = (report["damaged"] for report in reports)
    assert others == [[damaged]] * 2
    assert Path(damaged["path"]).is_dir() and file.name in damaged["reason"]
    resumed = worlds[3].ask("resumes", **how)[0]["report"]
    assert (resumed["step"], resumed["skipped"]) == (2, [])


# ---- failures


@pytest.mark.parametrize(
    ("how", "error", "words"),
    [
        ("disk", "PeerError|Error|OSError", "no disk here"),
        ("step", "IoError", "argument step"),
        ("budget", "BudgetError", "1.00 MiB"),
        ("again", "IoError", "saved already"),
    ],
)
def test_a_rank_that_fails_leaves_the_old_checkpoint(
    worlds: dict[int, Ranks], model: str, tmp_path: Path, how: str, error: str, words: str
) -> None:
    """All ranks raise an error. In the cases "disk" and "step" it names rank 1, except for rank 1's
    own exception in "disk". The root is unchanged."""
    root = tmp_path / "steps"
    answers = worlds[3].ask("save_fails", directory=model, root=str(root), cut=THREE, how=how)
    for answer in answers:
        assert answer["error"] in error.split("|"), answer
        assert words in answer["message"]
    if how in ("disk", "step"):
        assert {a["facts"].get("culprit_rank", 1) for a in answers} == {1}
    names = sorted(path.name for path in root.iterdir())
    assert names == ["latest", "step-1"], "the failed save has left files"


def test_refuses_a_state_that_does_not_fit(
    worlds: dict[int, Ranks], model: str, tmp_path: Path
) -> None:
    root = str(tmp_path / "steps")
    worlds[1].ask("saves", directory=model, root=root, cut=ONE)
    (message,) = worlds[1].ask("resume_into", directory=model, root=root, cut=ONE, optimizer="sgd")
    assert "MISMATCH" in message and "an optimizer of another class" in message
    (message,) = worlds[1].ask(
        "resume_into", directory=model, root=str(tmp_path), cut=ONE, optimizer="fp32"
    )
    assert "UNCOMMITTED" in message
