"""A grid of strategies, layouts and verbs with ranks that are processes. The kernel's counters of
each process, page tables included, keep the promise, and a budget is refused with its exit code.
That promises are close to the counters is tested with larger models, in test_memory.py and
test_rehearse.py. Ledgers are compared with promises, with ranks that are threads, in
modicum/cli/promises_test.cc.

Catches: memory of the launcher or of a rank is not counted; a rank's promise is one page short.
"""

from pathlib import Path
from typing import Any

import pytest
from program import STRATEGIES, failure, run_json

MIB = 1 << 20
OPTIMIZER = ("--optimizer", "adamw:fp32")
LAYOUTS: tuple[tuple[object, ...], ...] = (
    ("--ranks", 3),
    ("--ranks", 4, "--layout", "hsdp", "--mesh", "2x2", "--ranks-per-node", 2),
    ("--ranks", 4, "--layout", "tp-fsdp", "--mesh", "2x2"),
    ("--ranks", 2, "--layout", "none"),
    ("--ranks", 3, "--layout", "zero3"),
)
VERBS = ("load", "save", "resume", "rehearse")
# Each strategy with each verb; the layout depends on both.
CASES = [
    (verb, strategy, LAYOUTS[(s + v) % len(LAYOUTS)])
    for s, strategy in enumerate(STRATEGIES)
    for v, verb in enumerate(VERBS)
]


@pytest.fixture(scope="module")
def model(modicum: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("forked") / "moe"
    run_json(modicum, "synth", directory, "--arch", "tiny-moe")
    return directory


def assert_kept(of: dict[str, Any], ranks: int) -> None:
    """Of a document, or of one phase of a rehearsal."""
    assert len({rank["pid"] for rank in of["ranks"]}) == ranks
    for rank in of["ranks"]:
        held, promised = rank["kernel_peak_bytes"], rank["promised_bytes"]
        assert held <= promised, rank
        assert abs(rank["unexplained_bytes"]) <= max(0.02 * held, 4 * MIB), rank
    for node in of["nodes"]:
        assert node["kernel_peak_bytes"] <= node["promised_bytes"], node


@pytest.mark.parametrize(
    ("verb", "strategy", "layout"),
    CASES,
    ids=lambda part: " ".join(map(str, part)) if isinstance(part, tuple) else part,
)
def test_the_kernel_keeps_the_promise(
    modicum: Path, model: Path, tmp_path: Path, verb: str, strategy: str, layout: tuple[object, ...]
) -> None:
    root = tmp_path / "root"
    flags = (*layout, "--strategy", strategy)
    ranks = int(str(layout[1]))
    if verb == "load":
        documents = [run_json(modicum, "load", model, *flags, "--check", "values")]
    elif verb == "rehearse":
        words = (model, *flags, *OPTIMIZER, "--steps", 1, "--save", root)
        documents = run_json(modicum, "rehearse", *words)["phases"]
    else:
        documents = [run_json(modicum, "save", model, root, "--step", 1, *flags, *OPTIMIZER)]
        if verb == "resume":
            documents = [run_json(modicum, "resume", root, "--steps", 1, *flags)]
    for document in documents:
        assert_kept(document, ranks)
    source = root if verb == "resume" else model
    words = ("--budget", 5, *flags, *(OPTIMIZER if verb in ("save", "rehearse") else ()))
    more = (tmp_path / "other", "--step", 2) if verb == "save" else ()
    failure(modicum, 15, verb, source, *more, *words)
