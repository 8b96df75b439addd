"""Pages that must agree with the code: command-line.md and python.md of docs/reference equal the
output of scripts/reference.py; plans shown in README and docs/guide equal the program's output;
the figures in README's first lines equal this output and RESULTS.md;
each row of refusals.md names a category of errors.md and an existing test.

Catches: a flag or a docstring changes without its page; the page omits a verb, the fields of a
class or an overload; the output of a plan changes; a refusal without its test.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[2] / "scripts"))
import pytest
import reference

HINT = "the page is stale: run scripts/reference.py PROGRAM"


def test_the_python_page_has_the_docstrings(root: Path) -> None:
    assert (root / reference.PYTHON_PAGE).read_text() == reference.python_page(root), HINT


def test_the_command_line_page_has_every_flag(root: Path, modicum: Path) -> None:
    assert (root / reference.COMMAND_PAGE).read_text() == reference.command_page(modicum), HINT


@pytest.mark.parametrize(
    "page",
    [
        "README.md",
        "README.zh.md",
        *(f"docs/guide/{n}.md" for n in ("plan", "gpus", "tensor-parallel", "deepspeed")),
    ],
)
def test_a_plan_on_a_page_equals_the_programs_output(
    root: Path, modicum: Path, tmp_path: Path, page: str
) -> None:
    blocks = re.findall(r"^```console\n(.*?)^```", (root / page).read_text(), re.M | re.S)
    assert blocks
    path = {"PATH": f"{modicum.parent}{os.pathsep}{os.environ['PATH']}"}
    for block in blocks:
        commands = [line[2:] for line in block.splitlines() if line.startswith("$ ")]
        shown = [line for line in block.splitlines() if not line.startswith("$ ")]
        done = subprocess.run(
            ["bash", "-c", "; ".join(commands)], cwd=tmp_path, env=os.environ | path,
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        # The page may omit lines of the output.
        assert commands and set(shown) <= {"", *done.stdout.splitlines()}, done.stdout


@pytest.mark.parametrize("page", ["README.md", "README.zh.md"])
def test_the_first_figures_of_a_page_are_those_below_and_of_results(root: Path, page: str) -> None:
    text = (root / page).read_text()
    results = (root / "benchmarks/RESULTS.md").read_text()
    (row,) = re.findall(r"^\| accelerate \(FSDP2\), .*: dense \|.*$", results, re.M)
    model, load, run, our_load, our_run = re.findall(r"\d\.\d\d", row)[:5]
    gain = re.search(r"^- \*\*(?:Gain|收益)\*\*(?s:.*?)\n\n", text, re.M)
    assert gain and re.findall(r"\d\.\d\d", gain[0]) == [model, load, our_load, run, our_run]
    whole = re.search(r"^full-per-rank +([\d.]+) GiB", text, re.M)
    assert whole and f" {float(whole[1]):.0f} GiB" in text[: gain.start()]


def test_a_signature_keeps_its_parameters_in_order() -> None:
    source = "def f(a, b=1, *rest, c, d='x', **more) -> int: ..."
    (node,) = reference.ast.parse(source).body
    assert reference.signature(node) == "f(a, b = 1, *rest, c, d = 'x', **more) -> int"


def test_a_class_has_its_fields_with_the_text_below_them() -> None:
    source = 'class A:\n    a: int\n    b: str = ""\n    """Of\n    b."""\n    _c: int\n    d = 1'
    (node,) = reference.ast.parse(source).body
    assert [*reference.fields(node)] == ["- `a: int`", "- `b: str`: Of b."]
    assert "**Fields**" in reference.entry("m", [node])


def test_a_function_of_overloads_has_all_of_them(tmp_path: Path) -> None:
    """As `attribute`. In Python the function itself follows them, with the docstring."""
    package = tmp_path / reference.PACKAGE
    package.mkdir(parents=True)
    stub = "".join(f'@overload\ndef f({a}):\n    """By {a}."""\n' for a in ("x", "y"))
    (package / "stub.pyi").write_text(stub)
    (package / "full.py").write_text(stub + 'def f(z):\n    """By z."""\n')
    names = [
        [node.args.args[0].arg for node in reference.definitions(tmp_path, f"modicum.{one}", "f")]
        for one in ("stub", "full")
    ]
    assert names == [["x", "y"], ["x", "y", "z"]]
    shown = "\n".join(reference.entry("m", reference.definitions(tmp_path, "modicum.stub", "f")))
    assert shown.count("### ") == 1 and "f(x)" in shown and "By x." in shown and "By y." in shown


def test_each_refusal_has_its_error_and_its_test(root: Path) -> None:
    page = (root / "docs/reference/refusals.md").read_text()
    lines = [line for line in page.splitlines() if line.startswith("| ")]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    rows = [row for row in rows if row[0] != "asked for"]
    assert len(rows) > 40
    errors = (root / "docs/reference/errors.md").read_text()
    for _, categories, _, test in rows:
        for category in categories.replace(", ...", "").split(", "):
            assert f"| `{category}` |" in errors, category
        file, name = re.fullmatch(r"`(\S+)::([\w.]+)`", test).groups()
        head = f"\ndef {name}(" if file.endswith(".py") else f"({name.replace('.', ', ')}) {{"
        assert head in (root / file).read_text(), test
