"""How scripts/conformance.py judges and reports the tests of the engines in integrations/.

Catches: a skipped test of an engine counts as right.
"""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "scripts"))
import conformance  # noqa: E402
from engine_packages import releases  # noqa: E402

# Names of tests by outcome, as `conformance.outcomes` returns them.
TESTED = {"right": ["a::one"], "skipped": ["a::two"], "failed": ["a::three"]}


def test_each_test_of_the_engines_must_be_right() -> None:
    assert conformance.lost({"right": ["a::one"]}) == []
    assert conformance.lost(TESTED) == ["a::two", "a::three"]
    assert all((ROOT / test).is_file() for test in conformance.ENGINES)


def test_the_page_names_versions_and_failed_tests_of_the_engines() -> None:
    text = conformance.page({}, TESTED)
    assert all(f"{name} {of}" in text for name, of in releases().items())
    assert ": 1 right, 1 skipped, 1 failed." in text
    assert "Engines, not right: `a::two`, `a::three`." in text
    assert set(releases()) == {"areal", "torchtitan", "twinkle_kit", "verl"}
