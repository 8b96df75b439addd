"""Fixtures of all Python tests, and a warning if a package that tests compare with is missing."""

import contextlib
import importlib.util
import os
import shutil
import signal
import sys
from pathlib import Path

import pytest
from pages import CHROMIUM
from program import run_json

ROOT = Path(__file__).resolve().parent.parent

# For torch in this process and its children. The tensors in tests are small, so that more threads
# would mostly spin and wait for each other; and a forked child lacks its parent's threads.
os.environ["OMP_NUM_THREADS"] = "1"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--modicum",
        default=str(ROOT / "build/dev/modicum"),
        help="the program that the tests run (default: the dev build)",
    )
    parser.addoption(
        "--wheels",
        default=str(ROOT / "build/python"),
        help="the folder of the wheel under test, which must be the installed one",
    )
    parser.addoption(
        "--full-size",
        action="store_true",
        help="soak tests in memory cgroups take 11 GB of state, not 5; 10 GB of FP8 codes, not 2; "
        "and all layers of deepseek-v3, not 8",
    )


# The packages that tests compare with; scripts/venv.sh installs them.
ORACLES = ("torch", "transformers", "accelerate", "peft", "deepspeed")
# What opens and checks our HTML pages; Debian's Chromium comes with scripts/packages.sh.
BROWSING = ("playwright", "axe_playwright_python")


def missing_oracles() -> str:
    names = [name for name in (*ORACLES, *BROWSING) if importlib.util.find_spec(name) is None]
    return ", ".join(names + [CHROMIUM] * (shutil.which(CHROMIUM) is None))


def use_extensions_of_our_own(is_controller: bool) -> None:
    """Sets the folder where torch compiles DeepSpeed's extensions, and the ninja that compiles
    them, since another ninja would compile all again. torch waits there, without a timeout, for a
    lock file even if the process that made it was killed. So lock files that no process has open
    are removed."""
    folder = ROOT / "build/torch-extensions"
    os.environ["TORCH_EXTENSIONS_DIR"] = str(folder)
    os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    for lock in folder.glob("**/lock") if is_controller else ():
        if not is_open(lock):
            lock.unlink()


def is_open(path: Path) -> bool:
    """Whether any process that we may inspect has the file open."""
    for descriptor in Path("/proc").glob("[0-9]*/fd/*"):
        with contextlib.suppress(OSError):
            if os.readlink(descriptor) == str(path):
                return True
    return False


def pytest_sessionstart(session: pytest.Session) -> None:
    use_extensions_of_our_own(is_controller=not hasattr(session.config, "workerinput"))
    # A shell starts its background processes with SIGINT ignored, and children inherit that.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    missing = missing_oracles()
    if missing and os.environ.get("CI") == "true":
        pytest.exit(f"missing: {missing}; a CI run proves nothing without", returncode=1)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    missing = missing_oracles()
    if missing:
        terminalreporter.write_sep("!", f"missing: {missing}; every test against it was SKIPPED")


@pytest.fixture(scope="session")
def root() -> Path:
    """The repository."""
    return ROOT


@pytest.fixture(scope="session")
def modicum(request: pytest.FixtureRequest) -> Path:
    """The program under test; fails where it has not been built."""
    program = Path(request.config.getoption("--modicum")).resolve()
    assert program.is_file(), f"no {program}; run `make build` or `make test-dev`"
    return program


@pytest.fixture(scope="session")
def is_full_size(request: pytest.FixtureRequest) -> bool:
    """Whether soak tests in memory cgroups use sizes like a large model's share of a node."""
    return request.config.getoption("--full-size")


@pytest.fixture(scope="session")
def wheel(request: pytest.FixtureRequest) -> Path:
    """The wheel under test; fails where it has not been built."""
    wheels = sorted(Path(request.config.getoption("--wheels")).resolve().glob("modicum-*.whl"))
    assert len(wheels) == 1, f"expected one wheel, got {wheels}; run `make test-python`"
    return wheels[0]


@pytest.fixture(scope="session")
def gpt2(modicum: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A sparse checkpoint with the names and shapes of one layer of gpt2."""
    directory = tmp_path_factory.mktemp("synth") / "gpt2"
    run_json(modicum, "synth", directory, "--arch", "gpt2", "--layers", 1, "--sparse")
    return directory


@pytest.fixture(scope="session")
def torch():
    """The torch module, for tests that compare with it."""
    return pytest.importorskip("torch")
