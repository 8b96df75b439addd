"""Saves and resumes over two nodes, with two ranks each, under torchrun.

Must fail for these mutants: a save whose second node writes to a directory of its own; a rank that
waits for a directory without an end.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

import two_nodes
from ranks import ranks

WHY_NOT = two_nodes.why_not()
pytestmark = pytest.mark.skipif(bool(WHY_NOT), reason=f"no two nodes here: {WHY_NOT}")
PROGRAM = Path(two_nodes.__file__).with_name("node_rank.py")
SEEN_S = 10.0  # in which a rank must find the directory that another rank has made


@pytest.fixture(scope="module")
def nodes() -> Iterator[two_nodes.Nodes]:
    with two_nodes.nodes() as made:
        yield made


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("model")
    sizes = {"hidden_size": 128, "intermediate_size": 128}
    with ranks(1, folder / "rank") as one:
        one.ask("write", directory=str(folder / "qwen3"), family="qwen3", config=sizes)
    return str(folder / "qwen3")


def asked(
    nodes: two_nodes.Nodes, acts: list[Any], folder: Path, hidden: Path | None = None
) -> list[list[dict[str, Any]]]:
    """The answers of the four ranks to each act."""
    folder.mkdir()
    ended = nodes.torchrun(PROGRAM, [json.dumps(acts), str(folder)], hidden)
    files = [folder / f"{rank}.json" for rank in range(4)]
    assert all(file.exists() for file in files), "\n".join(of.stdout[-3000:] for of in ended)
    answers = [json.loads(file.read_text()) for file in files]
    assert {of["per_node"] for own in answers for of in own} == {2}, "both nodes count as one"
    return [list(of_act) for of_act in zip(*answers, strict=True)]


def test_steps_over_two_nodes_need_a_shared_root(
    nodes: two_nodes.Nodes, model: str, tmp_path: Path
) -> None:
    """Training goes on bit for bit. If one node does not see the root, all ranks refuse the save,
    and the resume."""
    disk = tmp_path / "disk"
    said = {"directory": model, "root": str(disk / "steps"), "cut": ["hsdp", [2, 2]]}
    disk.mkdir()
    acts = [["saves", said], ["resumes", said | {"cut": ["fsdp2", [4]]}]]
    saved, resumed = asked(nodes, acts, tmp_path / "shared")
    assert "error" not in saved[0], saved[0]
    for answer in resumed:
        assert answer["before"] == saved[0]["saved"] and answer["end"] == saved[0]["end"]

    acts = [["saves", said | {"root": str(disk / "new")}], ["resumes", said]]
    for answers in asked(nodes, acts, tmp_path / "hidden", hidden=disk):
        for answer in answers:
            assert answer["error"] == "IoError", answer
            assert "the root is not shared" in answer["message"] and answer["category"] == "IO"
            assert answer["culprit_rank"] in (2, 3)
            assert answer["took_s"] < SEEN_S + 5
    assert [*(disk / "new").iterdir()] == [], "something is left behind"
