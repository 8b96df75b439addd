"""docs/reference/command-line.md and python.md are what scripts/reference.py writes.

House test. It catches these mutations: a flag or a docstring that changes and its page that does
not; a verb that the page leaves out.
"""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[2] / "scripts"))
import reference

HINT = "stale: run scripts/reference.py build/dev/modicum"


def test_the_python_page_has_the_docstrings(root: Path) -> None:
    assert (root / reference.PYTHON_PAGE).read_text() == reference.python_page(root), HINT


def test_the_command_line_page_has_every_flag(root: Path, modicum: Path) -> None:
    assert (root / reference.COMMAND_PAGE).read_text() == reference.command_page(modicum), HINT


def test_a_signature_keeps_its_parameters_in_order() -> None:
    source = "def f(a, b=1, *rest, c, d='x', **more) -> int: ..."
    (node,) = reference.ast.parse(source).body
    assert reference.signature(node) == "f(a, b = 1, *rest, c, d = 'x', **more) -> int"
