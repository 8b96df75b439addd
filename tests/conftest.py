"""What the Python tests share: the program under test, and a loud word where torch is missing."""

import importlib.util
import os
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--modicum",
        default=str(ROOT / "build/dev/modicum"),
        help="the program that the tests run (default: the dev build)",
    )


def torch_is_missing() -> bool:
    return importlib.util.find_spec("torch") is None


def pytest_sessionstart(session: pytest.Session) -> None:
    if torch_is_missing() and os.environ.get("CI") == "true":
        pytest.exit("torch is missing, and a CI run proves nothing without it", returncode=1)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if torch_is_missing():
        terminalreporter.write_sep("!", "torch is missing: every test against it was SKIPPED")


@pytest.fixture(scope="session")
def root() -> Path:
    """The repository."""
    return ROOT


@pytest.fixture(scope="session")
def modicum(request: pytest.FixtureRequest) -> Path:
    """The program under test; fails where it has not been built."""
    program = Path(request.config.getoption("--modicum")).resolve()
    assert program.is_file(), f"{program} is not there; run `make build` or `make test-dev`"
    return program


@pytest.fixture(scope="session")
def torch():
    """The torch module, for tests that compare with it."""
    return pytest.importorskip("torch")
