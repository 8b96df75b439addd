"""Options and fixtures of all Python tests. Reports packages that tests compare with and that are
not installed: such tests are skipped, but in CI the run fails."""

import contextlib
import gc
import importlib.util
import os
import shutil
import signal
import sys
import zlib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

# For torch in this process and its children. The tests' tensors are small: more threads would
# mostly wait for each other. And a forked child does not have its parent's OpenMP threads.
os.environ["OMP_NUM_THREADS"] = "1"


def installed_program() -> str:
    """The program in the installed package. The command `modicum` of the environment is a Python
    script that starts it; most tests need the program itself, and hundreds start it."""
    package = importlib.util.find_spec("modicum")
    found = package is not None and package.origin  # none if this folder `modicum` is all there is
    return str(Path(found).with_name("modicum")) if found else "modicum"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--modicum",
        default=installed_program(),
        help="the program that the tests run (default: that of the installed wheel); as one word, "
        "since pytest takes its root from other words that are paths",
    )
    parser.addoption(
        "--wheels",
        default=str(ROOT / "build/python"),
        help="the folder of the wheel under test, which must be the installed one",
    )
    parser.addoption(
        "--full-size",
        action="store_true",
        help="larger models for the soak tests in memory cgroups: 11 GB of optimizer state, not 5; "
        "10 GB of FP8 codes, not 2; all layers of deepseek-v3, not 8",
    )


def pytest_configure(config: pytest.Config) -> None:
    settings = ROOT / "pyproject.toml"
    if config.inipath is None or not config.inipath.samefile(settings):
        what = f"expected the settings of {settings}, got {config.inipath}: run pytest in {ROOT}, "
        raise pytest.UsageError(what + "with --modicum=PROGRAM as one word")


# The packages that tests compare with. scripts/venv.sh installs them and BROWSING.
ORACLES = ("torch", "transformers", "accelerate", "peft", "deepspeed")
# Open and check our HTML pages in Debian's Chromium, which scripts/packages.sh installs.
BROWSING = ("playwright", "axe_playwright_python")


def missing_oracles() -> str:
    """The names of ORACLES, BROWSING and Chromium that are not installed, comma-separated."""
    from pages import CHROMIUM  # not before the settings are known to be found, with their paths

    names = [name for name in (*ORACLES, *BROWSING) if importlib.util.find_spec(name) is None]
    return ", ".join(names + [CHROMIUM] * (shutil.which(CHROMIUM) is None))


def use_extensions_of_our_own(is_controller: bool) -> None:
    """Makes torch compile DeepSpeed's extensions in build/torch-extensions, always with the virtual
    environment's ninja: another version of ninja would compile all of them again. torch waits
    without a timeout while a lock file exists, even if the process that created it was killed, so
    pytest's controlling process removes the lock files that no process has open."""
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
    # A shell starts background processes with SIGINT ignored, and their children inherit this.
    # Tests of Ctrl-C need the default.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    missing = missing_oracles()
    if missing and os.environ.get("CI") == "true":
        pytest.exit(f"missing: {missing}; in CI no test may be skipped for this", returncode=1)


# Tests with a parameter `strategy` run all cases of these two always. Of the other strategies
# together one case runs always, of a strategy that depends on the test's name; soak has the rest.
WHOLE_STRATEGIES = ("own-shard", "node-reader")


@pytest.hookimpl(tryfirst=True)  # before pytest deselects by marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    from program import STRATEGIES  # not before pytest has found its settings, with their paths

    others = [strategy for strategy in STRATEGIES if strategy not in WHOLE_STRATEGIES]
    cases: dict[str, list[pytest.Item]] = {}
    for item in items:
        if strategy_of(item) in others:
            cases.setdefault(item.nodeid.partition("[")[0], []).append(item)
    for test, candidates in cases.items():
        preferred = others[zlib.crc32(test.encode()) % len(others)]
        kept = min(candidates, key=lambda item: strategy_of(item) != preferred)
        for item in candidates:
            if item is not kept:
                item.add_marker(pytest.mark.soak)


def pytest_collection_finish() -> None:
    """The million objects of imported modules are not listed or collected again: each collection,
    and each first step of an AdamW, takes a third of a second less. (Ranks do the same.)"""
    gc.collect()
    gc.freeze()


def strategy_of(item: pytest.Item) -> str | None:
    """The test's parameter `strategy`."""
    return item.callspec.params.get("strategy") if hasattr(item, "callspec") else None


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    missing = missing_oracles()
    if missing:
        terminalreporter.write_sep("!", f"missing: {missing}; tests that need them were SKIPPED")


@pytest.fixture(scope="session")
def root() -> Path:
    """The repository."""
    return ROOT


@pytest.fixture(scope="session")
def modicum(request: pytest.FixtureRequest) -> Path:
    """The command-line program under test; fails if it has not been built."""
    program = Path(request.config.getoption("--modicum")).resolve()
    assert program.is_file(), f"no {program}; run `scripts/wheel.sh build/python install`"
    return program


@pytest.fixture(scope="session")
def is_full_size(request: pytest.FixtureRequest) -> bool:
    """Whether soak tests in memory cgroups use the sizes of `--full-size`."""
    return request.config.getoption("--full-size")


@pytest.fixture(scope="session")
def wheel(request: pytest.FixtureRequest) -> Path:
    """The wheel under test; fails if it has not been built."""
    wheels = sorted(Path(request.config.getoption("--wheels")).resolve().glob("modicum-*.whl"))
    assert len(wheels) == 1, f"expected one wheel, got {wheels}; run `make test-python`"
    return wheels[0]


@pytest.fixture(scope="session")
def gpt2(modicum: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A sparse checkpoint with the names and shapes of one layer of gpt2."""
    from program import run_json

    directory = tmp_path_factory.mktemp("synth") / "gpt2"
    run_json(modicum, "synth", directory, "--arch", "gpt2", "--layers", 1, "--sparse")
    return directory


@pytest.fixture(scope="session")
def torch():
    """The torch module; skips the test if torch is not installed."""
    return pytest.importorskip("torch")
