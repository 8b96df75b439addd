"""What no test runs uses names and keywords of the package that exist: tests/gpu, benchmarks,
examples, the code of pages, and the patches of integrations. Its rules are tested in
scripts/check_names_test.py.

Catches: a function or keyword is renamed, and a page, an example or a patch keeps the old one; a
class of the bindings whose signatures can't be read.
"""

import inspect
import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).resolve().parents[2] / "scripts"))
import check_names

pytest.importorskip("torch")


def test_names_and_keywords_exist(root: Path) -> None:
    found = list(check_names.findings(root))
    assert not found, "\n".join(found)


def test_wrong_uses_of_the_installed_package_are_found() -> None:
    uses = """\
import modicum.torch
from modicum import _modicum, plan
modicum.torch.load(model, "path", no_such_keyword=1)
modicum.torch.no_such_name()
plan("path", no_such_keyword=1)
_modicum.Ledger(no_such_keyword=1)
_modicum.make_layout(recipe, 2, no_such_keyword=1)
"""
    lines = [line for line, _ in check_names.of_source(uses)]
    assert lines == [3, 4, 5, 6, 7]


def test_functions_of_the_bindings_have_signatures() -> None:
    from modicum import _modicum

    functions = [one for one in vars(_modicum).values() if hasattr(one, "__nb_signature__")]
    assert len(functions) > 20
    for one in functions:
        assert all(isinstance(of, inspect.Signature) for of in check_names.signatures(one))
        assert check_names.signatures(one), one
