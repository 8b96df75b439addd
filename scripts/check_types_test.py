#!/usr/bin/env python3
"""check_types.py reports a public name whose type mypy does not know, and mentions every name."""

import sys
import unittest
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
import check_types

LINES = ["import m", "reveal_type(m.a)", "reveal_type(m.b)"]
NOTE = 'build/user.py:{}: note: Revealed type is "{}"\n'


class CheckTypes(unittest.TestCase):
    def found(self, *types: str) -> list[str]:
        output = "".join(NOTE.format(at, shown) for at, shown in enumerate(types, 2))
        return list(check_types.findings(LINES, output))

    def test_known_types_are_accepted(self) -> None:
        result = "def (x: Any =, **more: Any) -> dict[str, Any]"
        bound = "Overload(def [F <: def (*Any, **Any) -> Any] (name: F) -> F, def () -> m.T)"
        self.assertEqual([], self.found(result, bound))

    def test_unknown_types_are_reported(self) -> None:
        for shown in ("Any", "def (*Any, **Any) -> Any", "Overload(def () -> int, def () -> Any)"):
            with self.subTest(shown):
                self.assertEqual([f"m.b: mypy knows only {shown}"], self.found("int", shown))

    def test_a_name_of_which_mypy_says_nothing_is_reported(self) -> None:
        self.assertEqual(["m.b: mypy does not reveal its type"], self.found("int"))
        error = 'build/user.py:3: error: Module "m" does not export "b"  [attr-defined]'
        self.assertIn(error, check_types.findings(LINES, error))

    def test_the_program_mentions_every_public_name(self) -> None:
        lines = check_types.program(Path(__file__).resolve().parent.parent)
        for name in ("modicum.plan", "modicum.torch.load", "modicum.errors.BudgetError",
                     "modicum.memory.phase", "modicum.imports.import_checkpoint",
                     "modicum.recipes.recipe_for", "modicum.torch.accelerate.loading"):  # fmt: skip
            self.assertIn(f"reveal_type({name})", lines)


if __name__ == "__main__":
    unittest.main()
