#!/usr/bin/env python3
"""Each rule of check_python.py reports a tree that breaks it, and accepts a tree that does not."""

import sys
import tempfile
import unittest
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
import check_python

PAGE = """\
| Python room | floor | may import | charter |
|---|---|---|---|
| `errors` | 1 | - | failures |
| `upstream` | 2 | - | other packages |
| `torch/optim` | 3 | `upstream` | steps |
| `torch` | 4 | `torch/optim` | fronts |
| `modicum` | 4 | - | the front page |
"""
GOOD = {
    "docs/ARCHITECTURE.md": PAGE,
    "__init__.py": "from modicum.errors import Error\n",
    "errors.py": "",
    "_modicum.pyi": "",
    "upstream/__init__.py": "",
    "upstream/peft.py": "from modicum import _modicum\nimport peft\n",
    "torch/__init__.py": "from modicum.torch.optim.adamw import AdamW\n",
    "torch/optim/__init__.py": "",
    "torch/optim/adamw.py": "def f():\n    from modicum.upstream import peft\n",
}


class CheckPython(unittest.TestCase):
    def findings(self, changed: dict[str, str]) -> list[str]:
        with tempfile.TemporaryDirectory() as folder:
            root = Path(folder)
            for name, text in (GOOD | changed).items():
                path = root / (name if name.endswith(".md") else f"{check_python.PACKAGE}/{name}")
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(text)
            return check_python.findings(root)

    def assert_finds(self, changed: dict[str, str], expected: str) -> None:
        found = self.findings(changed)
        self.assertEqual(len(found), 1, found)
        self.assertIn(expected, found[0])

    def test_a_good_tree_has_no_findings(self) -> None:
        self.assertEqual(self.findings({}), [])

    def test_an_import_that_the_table_lacks(self) -> None:
        upward = {"errors.py": "import sys\nfrom modicum.upstream.peft import peft\n"}
        self.assert_finds(upward, "errors.py:2: `errors` may not import `upstream`")
        plain = {"upstream/peft.py": "import modicum.torch.optim.adamw\n"}
        self.assert_finds(plain, "`upstream` may not import `torch/optim`")
        late = {"torch/optim/adamw.py": "def f():\n    from modicum import torch, upstream\n"}
        self.assert_finds(late, "adamw.py:2: `torch/optim` may not import `torch`")

    def test_a_room_that_the_table_lacks(self) -> None:
        self.assert_finds({"torch/extra/x.py": ""}, "`torch/extra` is no Python room")

    def test_an_allowed_import_that_no_file_makes(self) -> None:
        unused = {"torch/optim/adamw.py": ""}
        self.assert_finds(unused, "`torch/optim` may import `upstream`, and no file does")

    def test_a_table_that_allows_a_room_on_a_higher_floor(self) -> None:
        page = PAGE.replace("| `upstream` | 2 | - |", "| `upstream` | 2 | `torch` |")
        found = self.findings({"docs/ARCHITECTURE.md": page})
        self.assertTrue(any("above it" in line for line in found), found)

    def test_a_private_name_of_another_package(self) -> None:
        own = "class Sizes:\n    _count = 0\n\n    def _get(self):\n        self._sum = self._get\n"
        self.assertEqual(self.findings({"errors.py": own + "Sizes()._count._sum._asdict()\n"}), [])
        private = "`_version` is private to another package"
        for text in (
            "def f(tensor):\n    return tensor._version\n",
            "def f(tensor):\n    tensor._version = 0\n",
            'def f(tensor):\n    return getattr(tensor, "_version", 0)\n',
            "def f():\n    from torch import _version\n",
            "def f():\n    from torch._version import number\n",
            "def f():\n    import torch._version\n",
        ):
            self.assert_finds({"errors.py": text}, f"errors.py:2: {private}")
        upstream = {"upstream/peft.py": "def _version(tensor):\n    return tensor._version\n"}
        self.assertEqual(self.findings(upstream), [])
        self.assert_finds(upstream | {"errors.py": "Error._version\n"}, private)

    def test_a_private_name_of_another_room(self) -> None:
        private = "`_size` is private to the room `torch/optim`"
        optim = GOOD["torch/optim/adamw.py"] + "def _size():\n    pass\n"
        front = GOOD["torch/__init__.py"]
        for text in (
            "from modicum.torch.optim.adamw import _size\n",
            "AdamW._size\n",
            'getattr(AdamW, "_size")\n',
        ):
            tree = {"torch/optim/adamw.py": optim, "torch/__init__.py": front + text}
            self.assert_finds(tree, f"torch/__init__.py:2: {private}")
            own = tree | {"torch/__init__.py": front + text + "def _size():\n    pass\n"}
            self.assertEqual(self.findings(own), [])
        text = {"torch/__init__.py": front + 'print("_size")\n', "torch/optim/adamw.py": optim}
        self.assertEqual(self.findings(text), [])

    def test_a_name_that_hides_a_module(self) -> None:
        hides = "torch/optim/__init__.py:1: `adamw` hides the module"
        for text in ("def adamw():\n    pass\n", "from modicum.errors import Error as adamw\n"):
            self.assert_finds({"torch/optim/__init__.py": text}, hides)

    def test_a_word_that_is_no_identifier(self) -> None:
        for word in ("of", "one", "own", "made", "given", "held", "told", "how", "into", "_own"):
            fault = f"errors.py:2: '{word}' is no identifier: name what it is"
            for text in (
                f"def f(tensors):\n    for {word} in tensors: pass\n",
                f"def f(\n    *, {word}): pass\n",
                f"def f(tensors): return [\n    {word} for {word} in tensors]\n",
                f"def f(tensors): return [\n    0 for name, {word} in tensors]\n",
                f"class Tensor:\n    {word}: int\n",
                f"class Tensor:\n    def f(self): self.{word} = 0\n",
            ):
                self.assert_finds({"errors.py": text}, fault)
        keyword = {"errors.py": 'def f(g): return g.held(g, given=1)["of"]  # one of its own\n'}
        self.assertEqual(self.findings(keyword), [])

    def test_a_word_of_callers(self) -> None:
        page = PAGE + "| `walk` | 4 | - | loads |\n"
        text = "def load(plan, into=None): pass\n"
        tree = {"docs/ARCHITECTURE.md": page, "walk/calls.py": text}
        self.assertEqual(self.findings(tree), [])
        self.assert_finds(tree | {"walk/report.py": text}, "walk/report.py:1: 'into' is no")

    def test_a_class_that_is_no_noun(self) -> None:
        for word in ("Begun", "Held", "_Where", "Later", "InPlace"):
            fault = f"errors.py:1: '{word}' is no class name: use a noun"
            self.assert_finds({"errors.py": f"class {word}: pass\n"}, fault)
            self.assert_finds({"errors.py": f"{word} = list[int]\n"}, fault)
        nouns = {"errors.py": "class LaterMemory: pass\nStoredTensors = list[str]\n"}
        self.assertEqual(self.findings(nouns), [])


if __name__ == "__main__":
    unittest.main()
