#!/usr/bin/env python3
"""check_names.py reports a name or a keyword that a package lacks, in each kind of file that it
reads, and accepts what the package has. The package is made here, so none has to be installed."""

import sys
import unittest
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parent))
import check_names


def load(model: object, source: str, *, budget: str = "auto", rules: object = None) -> None: ...


def resume(model: object, run: str, **more: object) -> None: ...


@dataclass(frozen=True)
class Rules:
    missing: str
    dtype: str | None = None

    def merged(self) -> "Rules":
        return self


class Ledger:
    """As a class of nanobind, whose functions have signatures as text."""

    __nb_signature__ = (
        ("def __init__(limit: A[shape=(*), of=A[()]] | None = \\0, *, name: str = \\1)", "", ()),
    )


def made() -> dict[str, ModuleType]:
    package, torch, hidden = (
        ModuleType(name) for name in ("modicum", "modicum.torch", "modicum.hidden")
    )
    package.__path__ = []  # type: ignore[attr-defined]
    vars(package).update(torch=torch, Ledger=Ledger)  # `hidden` is found by its import
    vars(torch).update(load=load, resume=resume, Rules=Rules)
    return {one.__name__: one for one in (package, torch, hidden)}


class CheckNames(unittest.TestCase):
    def setUp(self) -> None:
        patch = mock.patch.dict(sys.modules, made())
        patch.start()
        self.addCleanup(patch.stop)

    def source(self, *lines: str) -> list[str]:
        return [f"{at}: {fault}" for at, fault in check_names.of_source("\n".join(lines))]

    def test_names_of_the_package_are_accepted(self) -> None:
        self.assertEqual([], self.source(
            "import os, modicum.hidden",
            "import modicum.torch as mt",
            "from modicum.torch import Rules as R, load",
            "from modicum import torch as front",
            "load(None, 'path', budget='1G', rules=R('own', dtype=None))",
            "mt.load(*rest, budget=1), mt.resume(1, 'run', any=1), front.Rules(missing='a')",
            "modicum.Ledger(1, name='a'), modicum.Ledger(), R.merged, R.missing, R.dtype",
            "os.no_such_name, os.path.join(wrong=1), load",
        ))  # fmt: skip

    def test_a_missing_name_is_reported_with_its_line(self) -> None:
        self.assertEqual(["1: modicum.torch.lode does not exist"],
                         self.source("from modicum.torch import lode"))  # fmt: skip
        self.assertEqual(["1: modicum.touch does not exist"], self.source("import modicum.touch"))
        self.assertEqual(
            ["2: modicum.torch.lode does not exist", "3: modicum.torch.Rules.miss does not exist"],
            self.source("import modicum.torch as mt", "mt.lode(1)", "print(mt.Rules.miss)"),
        )

    def test_a_wrong_keyword_is_reported(self) -> None:
        for call in ("mt.load(m, 's', foo=1)", "mt.load(m, 's',\n rules=mt.Rules('', foo=1))",
                     "modicum.Ledger(foo=1)", "f(mt.load(m, **rest, foo=1))"):  # fmt: skip
            with self.subTest(call):
                (fault,) = self.source("import modicum, modicum.torch as mt; m = 1;" + call)
                self.assertRegex(
                    fault, r"^[12]: modicum\.(torch\.\w+|Ledger) has no keyword 'foo'$"
                )

    def test_a_wrong_number_of_arguments_is_reported(self) -> None:
        begin = "from modicum.torch import load; "
        (fault,) = self.source(begin + "load(1)")
        self.assertEqual(
            "1: modicum.torch.load is called wrongly: missing a required argument: 'source'", fault
        )
        self.assertEqual(1, len(self.source(begin + "load(1, 2, 3)")))
        self.assertEqual([], self.source(begin + "load(1, ...); load(**rest); load(*rest)"))

    def test_a_name_that_is_bound_again_is_another_thing(self) -> None:
        for other in ("def f(load): load(foo=1)", "load = 1; load(foo=1)",
                      "def load(foo): pass\nload(foo=1)", "g = lambda load: load(foo=1)",
                      "def f():\n  from json import load\n  load(foo=1)"):  # fmt: skip
            with self.subTest(other):
                self.assertEqual([], self.source("from modicum.torch import load", other))
        self.assertEqual(1, len(self.source("def f():", " from modicum.torch import load",
                                            " def g(): load(1, 2, foo=1)")))  # fmt: skip

    def test_files_are_not_executed(self) -> None:
        self.assertEqual([], self.source("raise SystemExit(3)"))

    def test_pages_have_code_and_calls_in_prose(self) -> None:
        page = """\
`load(rules=1)` is right, `load(foo=1)` is wrong, `load.py`, `--load` and `modicum.torch` are no
calls; `modicum.torch.lode` is wrong.

```python
from modicum.torch import Rules
load(model, "path", foo=1)
```
```bash
modicum.torch.lode
```
```python
Rules(missing="a", foo=1)
with open(:
```
"""
        self.assertEqual(
            [
                (1, "modicum.torch.load has no keyword 'foo'"),
                (2, "modicum.torch.lode does not exist"),
                (6, "modicum.torch.load has no keyword 'foo'"),
                (13, "the code is not Python"),
            ],
            [(line, fault.split(":")[0]) for line, fault in check_names.of_page(page)],
        )
        page = page.replace("with open(:\n", "")
        self.assertIn((12, "modicum.torch.Rules has no keyword 'foo'"), check_names.of_page(page))

    def test_only_added_lines_of_a_patch_are_checked(self) -> None:
        patch = """\
--- a/modicum.torch.lode
+++ b/modicum.torch.lode
@@ -1,9 +1,9 @@
 import modicum.lode
-modicum.torch.lode()
+from modicum.torch import (
+    load, lode)
+        with modicum.torch.load(
+                model,
             source, foo=(1, 2)
         ): pass
+        first, second = modicum.lode, modicum.torch.load(model, 's')  # modicum.lode
"""
        self.assertEqual(
            [
                (6, "modicum.torch.lode does not exist"),
                (8, "modicum.torch.load has no keyword 'foo'"),
                (12, "modicum.lode does not exist"),
            ],
            list(check_names.of_patch(patch)),
        )


if __name__ == "__main__":
    unittest.main()
