"""`modicum.torch.save` and `resume` need a root that all ranks see. In the soak test they run on
two nodes of two ranks, under torchrun; the nodes are network namespaces of this machine.

Catches: a save whose second node writes to a directory that the first node does not see; a rank
that waits without a limit for a directory.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

import two_nodes
from ranks import Ranks

from modicum.errors import IoError
from modicum.torch.saving import shared

WHY_NOT = two_nodes.why_not()
PROGRAM = Path(two_nodes.__file__).with_name("node_rank.py")
SEEN_S = 10.0  # how long `save` and `resume` wait for a rank to see rank 0's directory


@pytest.fixture(scope="module")
def nodes() -> Iterator[two_nodes.Nodes]:
    with two_nodes.nodes() as made:
        yield made


@pytest.fixture(scope="module")
def model(one: Ranks, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The directory of a checkpoint."""
    folder = tmp_path_factory.mktemp("model")
    sizes = {"hidden_size": 128, "intermediate_size": 128}
    one.ask("write", directory=str(folder / "qwen3"), family="qwen3", config=sizes)
    return str(folder / "qwen3")


def asked(
    nodes: two_nodes.Nodes, acts: list[Any], folder: Path, hidden: Path | None = None
) -> list[list[dict[str, Any]]]:
    """Calls functions of tests/support/torch_rank.py on all ranks. `acts`: their names and
    arguments. `hidden`: a directory that is empty on the second node. Returns, for each function,
    the answers of the four ranks."""
    folder.mkdir()
    ended = nodes.torchrun(PROGRAM, [json.dumps(acts), str(folder)], hidden)
    files = [folder / f"{rank}.json" for rank in range(4)]
    assert all(file.exists() for file in files), "\n".join(run.stdout[-3000:] for run in ended)
    by_rank = [json.loads(file.read_text()) for file in files]
    per_node = {answer["per_node"] for answers in by_rank for answer in answers}
    assert per_node == {2}, "expected two nodes of two ranks"
    return [list(answers) for answers in zip(*by_rank, strict=True)]


def test_a_directory_that_a_rank_does_not_see_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While the rank waits, it checks whether another rank has failed."""
    monkeypatch.setattr(shared, "SEEN_S", 0.1)
    checks: list[int] = []
    rank: Any = SimpleNamespace(rank=3, check=lambda: checks.append(1))
    with pytest.raises(IoError, match="the run is not shared: rank 3") as refused:
        shared.require_seen(tmp_path / "hidden", rank)
    assert refused.value.file == "hidden" and checks
    (tmp_path / "seen").mkdir()
    shared.require_seen(tmp_path / "seen", rank)


@pytest.mark.soak
@pytest.mark.skipif(bool(WHY_NOT), reason=f"no two nodes here: {WHY_NOT}")
def test_checkpoints_over_two_nodes_need_a_shared_root(
    nodes: two_nodes.Nodes, model: str, tmp_path: Path
) -> None:
    """With a shared root, the training after a resume is that after the save, bit for bit. If the
    second node does not see the root, all ranks refuse the save and the resume."""
    disk = tmp_path / "disk"
    how = {"directory": model, "root": str(disk / "steps"), "cut": ["hsdp", [2, 2]]}
    disk.mkdir()
    acts = [["saves", how], ["resumes", how | {"cut": ["fsdp2", [4]]}]]
    saved, resumed = asked(nodes, acts, tmp_path / "shared")
    assert "error" not in saved[0], saved[0]
    for answer in resumed:
        assert answer["before"] == saved[0]["saved"] and answer["end"] == saved[0]["end"]

    acts = [["saves", how | {"root": str(disk / "new")}], ["resumes", how]]
    for answers in asked(nodes, acts, tmp_path / "hidden", hidden=disk):
        for answer in answers:
            assert answer["error"] == "IoError", answer
            assert "the run is not shared" in answer["message"] and answer["category"] == "IO"
            assert answer["culprit_rank"] in (2, 3)
            assert answer["took_s"] < SEEN_S + 5
    assert [*(disk / "new").iterdir()] == [], "the refused save has left files"
