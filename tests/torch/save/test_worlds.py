"""`modicum.torch.save` in one world, `modicum.torch.resume` in another.

Compared with the uninterrupted training: for several worlds and layouts of the two programs, which
use one state format, the resumed model and state equal the saved ones, and the next three steps
equal those of the first program, bit for bit. `from_pretrained` and `modicum verify` read the step
(the saved checkpoint directory). Must fail for these mutants: each replica writes the state; step
counts, of Modicum's AdamW or of torch's, that begin at 0 after a resume; a resume that keeps the
new program's options of groups; divided rows that each rank writes itself without a warning; a
state that is written and never read; extras of another rank; ranks that do not agree on the step; a
state of another format that is accepted; a state that is not promised.
"""

import subprocess
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

from ranks import Ranks, ranks
from sharding import Cut

MIB = 1 << 20
ONE = Cut("none", (1,))
TWO, THREE, FOUR = Cut("fsdp2", (2,)), Cut("fsdp2", (3,)), Cut("fsdp2", (4,))
HSDP = Cut("hsdp", (2, 2))
TP = Cut("tp-fsdp", (2, 2))


@pytest.fixture(scope="module")
def worlds(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[int, Ranks]]:
    """Process groups by the number of their ranks."""
    folder = tmp_path_factory.mktemp("worlds")
    with ExitStack() as stack:
        yield {n: stack.enter_context(ranks(n, folder / f"of-{n}")) for n in (1, 2, 3, 4)}


@pytest.fixture(scope="module")
def model(worlds: dict[int, Ranks], tmp_path_factory: pytest.TempPathFactory) -> str:
    """A checkpoint in three files, with tied embeddings, and rows of 128 elements, whose moments
    have scales."""
    folder = str(tmp_path_factory.mktemp("model") / "qwen3")
    sizes = {"hidden_size": 128, "intermediate_size": 128, "tie_word_embeddings": True}
    worlds[1].ask("write", directory=folder, family="qwen3", config=sizes, dtype="bfloat16")
    return folder


def moved(
    worlds: dict[int, Ranks], how: dict[str, Any], cuts: tuple[Cut, Cut], program: Path
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Saves in one world, resumes in the other, and asserts that they agree. Returns rank 0's
    answer to the save, and all answers to the resume."""
    before, after = cuts
    saved = worlds[before.world].ask("saves", cut=before, **how)
    verified = subprocess.run([program, "verify", how["root"]], capture_output=True, text=True)
    assert verified.returncode == 0, verified.stderr
    resumed = worlds[after.world].ask("resumes", cut=after, **how)
    for rank, answer in enumerate(resumed):
        for at, of in (("before", "saved"), ("end", "end")):
            differ = [n for n, text in answer[at].items() if saved[0][of].get(n) != text]
            assert not differ, f"{at}: {differ[0]} on rank {rank}"
            assert answer[at].keys() == saved[0][of].keys()
    assert len({str(answer["report"]) for answer in saved}) == 1, "ranks report differently"
    return saved[0], resumed


@pytest.mark.parametrize(
    ("before", "after", "state_format", "dtype"),
    [
        (FOUR, TWO, "fp32", "float32"),
        (TWO, THREE, "fp32-split", "bfloat16"),
        (ONE, FOUR, "int8-moments", "bfloat16"),
        (HSDP, TWO, "bf16-moments", "float32"),
        (TP, THREE, "fp32", "bfloat16"),
        (THREE, ONE, "int8-moments", "float32"),
        (TWO, THREE, "int8-moments-24", "bfloat16"),
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
    saved, resumed = moved(worlds, how, (before, after), modicum)
    report = saved["report"]
    files = [f for f in (tmp_path / "steps/step-2").rglob("*") if f.is_file()]
    written = sum(f.stat().st_size for f in files if f.name not in ("manifest.json", "COMMIT"))
    assert report["written_bytes"] == written, "bytes are written twice, or not counted"
    assert report["read_bytes"] == 0
    assert (report["gathered_bytes"] > 0) == (before == TP), "divided rows are not written together"
    # Python's own objects are not promised.
    assert report["held_bytes"] <= report["promised_bytes"] + MIB
    assert [answer["extra"][0] for answer in resumed] == [{"epoch": 1}] * after.world


@pytest.mark.parametrize("optimizer", ("fp32-split", "bf16-moments", "adam"))
def test_ranks_that_cannot_share_memory_write_alone(
    worlds: dict[int, Ranks], model: str, tmp_path: Path, optimizer: str
) -> None:
    """The files equal those that ranks write together, and the report names the ranks that can't
    map memory."""
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


@pytest.mark.parametrize("optimizer", ("adam", "adamw", "sgd"))
def test_optimizers_of_torch_resume_in_another_world(
    worlds: dict[int, Ranks], model: str, tmp_path: Path, modicum: Path, optimizer: str
) -> None:
    how = {"directory": model, "root": str(tmp_path / "steps"), "optimizer": optimizer}
    moved(worlds, how, (FOUR, TWO) if optimizer == "adamw" else (TWO, ONE), modicum)


def test_the_state_of_torch_is_promised(worlds: dict[int, Ranks], tmp_path: Path) -> None:
    """The kernel's peak of a resume is within the promise. If the budget is too small, the error
    names the state, and no tensor is read."""
    folder = str(tmp_path / "model")
    sizes = {"hidden_size": 512, "vocab_size": 40000, "tie_word_embeddings": True}
    worlds[1].ask("write", directory=folder, family="qwen3", config=sizes, dtype="float32")
    how = {"directory": folder, "root": str(tmp_path / "steps"), "optimizer": "adamw"}
    worlds[2].ask("saves", cut=TWO, **how)
    for answer in worlds[2].ask("resume_promised", cut=TWO, **how):
        assert answer["refused"]["error"] == "BudgetError", answer
        purposes = {of["purpose"]: of["bytes"] for of in answer["refused"]["owners"]}
        assert purposes["moments"] >= answer["state"] > 64 * MIB
        assert answer["refused"]["on_meta"], "something was read"
        assert answer["peak"] <= answer["promised"] + MIB


def test_the_step_is_a_model_of_transformers(
    worlds: dict[int, Ranks], model: str, tmp_path: Path, torch: Any
) -> None:
    """Compares every tensor, with its name, dtype and bits."""
    import transformers
    from torch_rank import told

    how = {"directory": model, "root": str(tmp_path / "steps"), "dtype": "bfloat16"}
    (saved, *_) = worlds[2].ask("saves", cut=TWO, **how)
    step = tmp_path / "steps/step-2"
    read = transformers.AutoModelForCausalLM.from_pretrained(step, dtype="auto")
    for name, tensor in read.named_parameters():
        assert saved["saved"][name] == told(tensor), name
    config = transformers.AutoConfig.from_pretrained(step)
    assert config.dtype == torch.bfloat16


def test_resumes_into_memory_with_other_values(
    worlds: dict[int, Ranks], model: str, tmp_path: Path
) -> None:
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
    own = [str({"rank": rank, "rng": f"tensor([{rank}, {rank}, {rank}])"}) for rank in range(2)]
    own = [text.replace("'tensor", "tensor").replace("])'", "])") for text in own]
    assert [of["extra"][1] for of in worlds[2].ask("resumes", cut=TWO, **how)] == own
    (alone,) = worlds[1].ask("resumes", cut=ONE, **how)
    assert alone["extra"][1] == f"[{own[0]}, {own[1]}]"


def test_goes_on_from_the_step_before_a_damaged_one(
    worlds: dict[int, Ranks], model: str, tmp_path: Path
) -> None:
    how = {"directory": model, "root": str(tmp_path / "steps")}
    worlds[1].ask("saves", cut=ONE, **how)
    (tmp_path / "steps/step-9").mkdir()
    (answer,) = worlds[1].ask("resumes", cut=ONE, **how)
    assert answer["report"]["step"] == 2
    assert [of["step"] for of in answer["report"]["skipped"]] == [9]


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
def test_a_rank_that_fails_leaves_the_old_step(
    worlds: dict[int, Ranks], model: str, tmp_path: Path, how: str, error: str, words: str
) -> None:
    """All ranks raise the error, with the failed rank; the root is unchanged."""
    root = tmp_path / "steps"
    answers = worlds[3].ask("save_fails", directory=model, root=str(root), cut=THREE, how=how)
    for answer in answers:
        assert answer["error"] in error.split("|"), answer
        assert words in answer["message"]
    if how in ("disk", "step"):
        assert {a["facts"].get("culprit_rank", 1) for a in answers} == {1}
    names = sorted(path.name for path in root.iterdir())
    assert names == ["latest", "step-1"], "something is left behind"


def test_refuses_a_state_that_does_not_fit(
    worlds: dict[int, Ranks], model: str, tmp_path: Path
) -> None:
    root = str(tmp_path / "steps")
    worlds[1].ask("saves", directory=model, root=root, cut=ONE)
    for optimizer, words in (
        ("bf16-moments", "another state_format"),
        ("sgd", "an optimizer of another class"),
    ):
        (message,) = worlds[1].ask(
            "resume_into", directory=model, root=root, cut=ONE, optimizer=optimizer
        )
        assert "MISMATCH" in message and words in message
    (message,) = worlds[1].ask(
        "resume_into", directory=model, root=str(tmp_path), cut=ONE, optimizer="fp32"
    )
    assert "UNCOMMITTED" in message
