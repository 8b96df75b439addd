"""How scripts/conformance.py judges and reports tests, and which it names.

Catches: a skipped test of an engine counts as right, or any failure of a test as its known
difference; a run of one environment loses what the page says of another.
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


def test_a_known_difference_has_its_name_and_its_failure(tmp_path: Path) -> None:
    cases = [("t[a]", "E  a.dtype == b.dtype"), ("t[b]", "E  a.dtype == b.dtype"), ("t[a]", "E  a")]
    text = "".join(
        f'<testcase classname="c" name="{name}"><failure message="">{how}</failure></testcase>'
        for name, how in cases
    )
    report = tmp_path / "report.xml"
    report.write_text(f"<testsuite>{text}</testsuite>")
    found = conformance.outcomes_in(report, {"[a]": r"\.dtype == "})
    assert found == {"that version differs": ["c::t[a]"], "failed": ["c::t[b]", "c::t[a]"]}


def test_a_section_names_versions_and_failed_tests() -> None:
    text = conformance.section("engines", releases(), {"engines": TESTED})
    assert all(f"| {name} | {of} |" in text for name, of in releases().items())
    assert "| 1 right, 1 skipped, 1 failed |" in text
    assert "engines, failed: `three`." in text
    assert set(releases()) == {"areal", "torchtitan", "twinkle_kit", "verl"}


def test_sections_that_are_not_run_again_stay() -> None:
    old = conformance.PAGE.read_text()
    new = conformance.section("engines", {"areal": "0"}, {"engines": TESTED})
    sections = conformance.sections_of(old)
    text = conformance.page(sections | {"engines": new})
    assert conformance.page(sections) == old
    assert conformance.sections_of(text) == sections | {"engines": new}


def test_each_environment_runs_tests_that_exist() -> None:
    for environment in conformance.ENVIRONMENTS:
        for what in environment.tests:
            files = [word for word in conformance.TESTS[what] if word.endswith(".py")]
            assert files and all((ROOT / file).is_file() for file in files)
            assert what in conformance.LABELS
