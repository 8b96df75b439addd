#!/usr/bin/env python3
"""Tests Modicum with other versions of Python and of the packages that it works with, and with the
engines of integrations/.

conformance.py [--wheels] [NAME...]: names of ENVIRONMENTS, or `engines`. Those with a `python` have
the release's wheel of dist/wheels (make wheels), installed with its extra `accelerate` where no
compiler is on PATH; they are the default with --wheels. The others, by default with `engines`, are
on top of .venv, whose torch and wheel they use; the first is .venv itself. Makes them one at a time
in build/conformance/, and removes each unless --keep is given. Runs in each its `tests`, and in
those on top of .venv RECORDER, which records the shards of torch and DeepSpeed again and compares
them with the recorded ones, and benchmarks/loaders.py for LOADERS, which measures bits and memory
of loads. Writes their sections of benchmarks/CONFORMANCE.md. Takes half an hour or more and needs a
package index; `make soak` runs it. Exit 1 if a test of STRICT fails, if the recorded shards differ,
or if a test of the engines does not pass.
"""

import argparse
import collections
import datetime
import json
import os
import re
import shutil
import subprocess
import sys
import xml.etree.ElementTree as ET
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.append(str(ROOT / "tests/support"))
from engine_packages import make_environment, releases  # noqa: E402
from soak import commit_of  # noqa: E402

PAGE = ROOT / "benchmarks/CONFORMANCE.md"
PLACE = ROOT / "build/conformance"
WHEELS = ROOT / "dist/wheels"
PACKAGES = ("torch", "transformers", "accelerate", "peft", "trl", "deepspeed")
FRONTS_FOLDER = "tests/torch/fronts"
TESTS = {
    # Every model of tests/support/families.py, compared with that version's `from_pretrained`.
    "families": ("tests/torch/load/test_values.py", "-k", "test_every_family"),
    "fronts": (
        f"{FRONTS_FOLDER}/test_accelerate.py",
        f"{FRONTS_FOLDER}/test_accelerate_refusals.py",
        f"{FRONTS_FOLDER}/test_everyday.py",
        f"{FRONTS_FOLDER}/test_optimizers.py",
        f"{FRONTS_FOLDER}/test_preemption.py",
        "tests/torch/optim/test_deepspeed.py",
        f"{FRONTS_FOLDER}/test_dcp.py",
        f"{FRONTS_FOLDER}/test_engines.py",
        f"{FRONTS_FOLDER}/test_engine_state.py",
        "tests/torch/build/test_empty.py",
        "tests/recipes/test_recipe_oracle.py",
        "tests/recipes/test_recipes_wrapped.py",
    ),
    "first hour": ("tests/package/test_first_hour.py",),
    "training": (
        f"{FRONTS_FOLDER}/test_accelerate.py",
        f"{FRONTS_FOLDER}/test_accelerate_refusals.py",
        f"{FRONTS_FOLDER}/test_checkpoints.py",
        f"{FRONTS_FOLDER}/test_everyday.py",
        f"{FRONTS_FOLDER}/test_optimizers.py",
        "-m",
        "not soak",
    ),
}
OF_RELEASE = ("families", "first hour", "training")
STRICT = OF_RELEASE
LABELS = {
    "families": "models of `tests/support/families.py` through `modicum.torch.load`",
    "fronts": "tests of accelerate, Trainer, TRL, DeepSpeed, engines, DCP and recipes",
    "first hour": "commands of [first-hour.md](../docs/guide/first-hour.md)",
    "training": "tests of accelerate, Trainer, TRL, save and resume, without soak tests",
    "engines": f"`{FRONTS_FOLDER}/test_integrations.py`",
}
RECORDER = "tests/fixtures/record_cuts.py"
ENGINES = ("tests/torch/fronts/test_integrations.py",)
LOADERS = "from_pretrained,accelerate,transformers,dcp,modicum"
CASES = {"dense": "2", "moe": "1"}  # case of loaders.py -> number of layers
WORLD = 4
SURROUNDINGS = {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "DS_BUILD_OPS": "0"}
# What tests import besides the packages under test.
TOOLS = ("pytest", "pytest-timeout", "expecttest", "peft", "trl", "setuptools")


# Where transformers 5.12 does not do what newer versions do (docs/reference/patches.md): ends of
# the names of tests, each with a pattern of how the test fails.
TRANSFORMERS_5_12 = {
    "test_adapters_are_saved_alone_and_resume_bit_for_bit[torch]": "CheckpointError: torch.utils",
    "test_adapters_are_saved_alone_and_resume_bit_for_bit[modicum]": "CheckpointError: torch.utils",
}
TRANSFORMERS_5_3 = TRANSFORMERS_5_12 | {
    "[llama_tied_both_stored]": r"other ties|Extra items.*\n.*lm_head.weight",
    "[deepseek_v3_fp8]": r"\.dtype == |torch.bfloat16, .* != .*torch.float32",
    "[qwen3_fp8]": r"\.dtype == |torch.bfloat16, .* != .*torch.float32",
    "test_trains_as_accelerate_does[GPT-2]": "'numbers' differs from accelerate's",
    "test_a_directory_of_adapters_is_refused": "got key_mapping",
    "test_a_trainer_with_its_own_save_saves_by_itself": r"Extra items.*(\n.*)+model.safetensors",
    "test_save_only_model_saves_no_optimizer": "save_only_model option is not compatible with FSDP",
}
# The same for accelerate 1.10.
ACCELERATE_1_10 = {
    "test_trains_as_accelerate_does[replicas]": "Found the DeviceMesh have 2 dimensions",
    "[with DoRA's magnitudes]": "UNSUPPORTED: a magnitude of DoRA",
    "test_an_accelerate_that_loses_moments_is_known_by_its_code": "loses_moments.fsdp_utils",
    "test_accelerates_own_checkpoints_are_read": "UNSUPPORTED: this accelerate reads no moments",
} | {
    f"test_tokens_that_accelerate_cannot_shard_are_refused[{where}-{sent}]": "DID NOT RAISE"
    for where in ("own unit", "tied", "tied, whole")
    for sent in (False, True)
}


@dataclass(frozen=True)
class Environment:
    name: str
    wanted: tuple[str, ...]  # requirements for pip
    tests: tuple[str, ...]  # keys of TESTS
    python: str = ""  # the version of Python of an environment with nothing of .venv
    differs: Mapping[str, str] = field(default_factory=dict)  # as TRANSFORMERS_5_3

    @property
    def directory(self) -> Path:
        return PLACE / self.name.replace(" ", "-")

    @property
    def is_new(self) -> bool:
        return bool(self.wanted or self.python)

    @property
    def interpreter(self) -> Path:
        return self.directory / "bin/python" if self.is_new else ROOT / ".venv/bin/python"


ENVIRONMENTS = (
    Environment("pinned", (), ("families", "fronts")),
    Environment("newest", PACKAGES[1:], ("families", "fronts")),
    # The last version that converts no weights while it loads, so that recipes are the identity.
    # The tests of fronts need version 5.
    Environment("transformers 4.57", ("transformers==4.57.*",), ("families",)),
    # The floors of pyproject.toml.
    Environment(
        "Python 3.10",
        ("torch==2.11.*", "transformers==5.3.*", "accelerate==1.10.*"),
        OF_RELEASE,
        "3.10",
        differs=TRANSFORMERS_5_3 | ACCELERATE_1_10,
    ),
    Environment(
        "Python 3.11",
        ("torch==2.13.*", "transformers==5.12.*"),
        OF_RELEASE,
        "3.11",
        differs=TRANSFORMERS_5_12,
    ),
    Environment("Python 3.13", (), OF_RELEASE, "3.13"),
)
BY_NAME = {environment.name: environment for environment in ENVIRONMENTS}
NAMES = (*BY_NAME, "engines")


def run(
    words: list[str | Path], *, may_fail: bool = False, path: str = os.environ["PATH"]
) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        [str(word) for word in words], cwd=ROOT, env=os.environ | SURROUNDINGS | {"PATH": path},
        text=True, capture_output=True, check=False,
    )  # fmt: skip
    if done.returncode and not may_fail:
        sys.exit(f"{' '.join(map(str, words))}: {done.returncode}\n{done.stdout}{done.stderr}")
    return done


def make(environment: Environment) -> None:
    if environment.python:
        make_alone(environment)
    elif environment.wanted:
        make_on_top(environment)


def make_on_top(environment: Environment) -> None:
    """Makes an environment on top of .venv; its own packages take precedence."""
    base = run([ROOT / ".venv/bin/python", "-c", "import site; print(site.getsitepackages()[0])"])
    run([ROOT / ".venv/bin/python", "-m", "venv", environment.directory])
    (own,) = environment.directory.glob("lib/python*/site-packages")
    (own / "base.pth").write_text(base.stdout)
    constraints = environment.directory / "constraints.txt"
    constraints.write_text(f"torch=={version_of('torch', ROOT / '.venv/bin/python')}\n")
    pip = [environment.interpreter, "-m", "pip", "--disable-pip-version-check", "install"]
    run([*pip, "--upgrade", "--no-build-isolation", "-c", constraints, *environment.wanted])


def make_alone(environment: Environment) -> None:
    """Makes an environment with the release's wheel, as its users do: what they have comes first,
    and no compiler is on PATH."""
    find = f". scripts/pythons.sh; python_of {environment.python}"
    run([run(["bash", "-c", find]).stdout.strip(), "-m", "venv", environment.directory])

    def pip(*words: str | Path) -> None:
        python = environment.interpreter
        run([python, "-m", "pip", "--disable-pip-version-check", *words], path=str(python.parent))

    if environment.wanted:
        pip("install", *environment.wanted)
    folder = wheel_folder(environment)
    pip("download", "--no-index", "--no-deps", f"--find-links={WHEELS}", "-d", folder, "modicum")
    (wheel,) = folder.glob("modicum-*.whl")
    pip("install", f"{wheel}[accelerate]")
    pip("install", *environment.wanted, *TOOLS)


def wheel_folder(environment: Environment) -> Path:
    """The folder of the wheel that is installed, for the tests' option --wheels."""
    return environment.directory / "wheel" if environment.python else ROOT / "build/python"


def version_of(package: str, python: Path) -> str:
    """The version that is installed, or `-`."""
    code = f"from importlib.metadata import version; print(version({package!r}))"
    return run([python, "-c", code], may_fail=True).stdout.strip() or "-"


def program_of(python: Path) -> str:
    """The program in the wheel that is installed."""
    code = "import modicum; print(modicum.__path__[0] + '/modicum')"
    return run([python, "-c", code]).stdout.strip()


# ---- tests


def outcomes(
    python: Path, report: Path, words: Iterable[str | Path], differs: Mapping[str, str]
) -> dict[str, list[str]]:
    """The names of the tests that were run, by outcome. `report`: the file for pytest's report."""
    report.unlink(missing_ok=True)
    pytest = [python, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--junitxml"]
    done = run([*pytest, report, *words], may_fail=True)
    report.with_suffix(".log").write_text(done.stdout + done.stderr)
    if not report.exists():
        sys.exit(f"no tests were run:\n{done.stdout}{done.stderr}")
    return outcomes_in(report, differs)


def outcomes_in(report: Path, differs: Mapping[str, str]) -> dict[str, list[str]]:
    found: dict[str, list[str]] = collections.defaultdict(list)
    for case in ET.parse(report).iter("testcase"):
        name, text = f"{case.get('classname')}::{case.get('name')}", case.findtext("failure", "")
        kind = outcome_of(case)
        known = (name.endswith(end) and re.search(how, text) for end, how in differs.items())
        if kind == "failed" and any(known):
            kind = "that version differs"
        found[kind].append(name)
    return found


def outcome_of(case: ET.Element) -> str:
    """The outcome of a test: a key of the page's counts; FOOTER explains them."""
    if case.find("skipped") is not None:
        return "skipped"
    failure = case.find("failure")
    if failure is None:
        return "right" if case.find("error") is None else "failed"
    message, where = failure.get("message") or "", failure.text or ""
    # The model could not be built, before Modicum was called.
    if "tests/support/families.py" in where and "modicum/torch" not in where:
        return "not there"
    if message.startswith("modicum.errors."):
        return "refused"
    if "the oracle leaves" in message or "A GPU or XPU is needed" in message:
        return "not by them either"
    return "failed"


def lost(tested: dict[str, list[str]]) -> list[str]:
    """The tests of ENGINES that did not pass. A skipped one is a failure, too: the environment has
    all engines."""
    return [test for kind, tests in tested.items() if kind != "right" for test in tests]


# ---- recorded shards


def recorded(python: Path) -> str:
    """`equal` if torch and DeepSpeed shard as recorded. Prints lines that differ."""
    done = run([python, RECORDER, "--check"], may_fail=True)
    if not done.returncode:
        return "equal"
    print(done.stdout + done.stderr)
    return "different"


# ---- loaders


def held(environment: Environment, case: str) -> dict[str, str]:
    """For each loader whether the bits are right, and the peak of all ranks together as a multiple
    of their shards."""
    raw = PLACE / f"{environment.directory.name}.{case}.jsonl"
    raw.unlink(missing_ok=True)
    run(
        [environment.interpreter, "benchmarks/loaders.py", "--case", case, "--layers", CASES[case]]
        + ["--rows", LOADERS, "--reps", "1", "--cold", "0", "--raw", raw]
        + ["--modicum", program_of(environment.interpreter)]
    )
    rows = {}
    for line in raw.read_text().splitlines():
        result = json.loads(line)
        what = result["outcome"]
        if "peak_sampled_bytes" in result and result["kept_bytes"]:
            what += f", {result['peak_sampled_bytes'] / result['shards_bytes']:.2f}"
        rows[result["row"]] = what
    return rows


# ---- the page

HEADER = f"""# Conformance

Loads with other versions of the packages: whether the bits are right, and the host memory. Written
by `python scripts/conformance.py`, which `make soak` runs. Environments "Python ..." have the
release's wheel, installed with `pip install WHEEL[accelerate]` where no compiler is on PATH; the
others have the wheel of `make wheel`.

Rows of loaders: the bits are compared with those of `from_pretrained` in a single process. The
number is the peak of {WORLD} ranks together, as a multiple of the bytes of their shards. Refused:
an error that names the reason, before anything is loaded. That version differs: not Modicum, but
the version does something else than newer ones, as [patches.md](../docs/reference/patches.md) says.
Not there: the version has no such model, or not with this configuration. Not by them either:
`from_pretrained` of that version leaves tensors empty, or needs a GPU.
"""


KINDS = (
    "right",
    "that version differs",
    "refused",
    "not there",
    "not by them either",
    "skipped",
    "failed",
)


def sections_of(text: str) -> dict[str, str]:
    """The sections of the page, by heading."""
    return {part.partition("\n")[0]: part for part in text.split("\n## ")[1:]}


def page(sections: dict[str, str]) -> str:
    return "\n## ".join([HEADER, *(sections[name] for name in NAMES if name in sections)])


def section(name: str, rows: dict[str, str], tested: dict[str, dict[str, list[str]]]) -> str:
    """A section of the page: a table, then the tests that were refused or failed. `tested`: the
    outcomes by key of LABELS."""
    rows = {"date, commit": f"{datetime.date.today().isoformat()}, {commit_of(ROOT)}"} | rows
    rows |= {LABELS[what]: counts_of(of) for what, of in tested.items()}
    lines = [name, "", "| | |", "|---|---|", *(f"| {row} | {rows[row]} |" for row in rows)]
    for what, of in tested.items():
        for kind in ("that version differs", "refused", "failed"):
            named = ", ".join(f"`{test.rpartition('::')[2]}`" for test in of.get(kind, []))
            lines += ["", f"{what}, {kind}: {named}."] if named else []
    return "\n".join(lines) + "\n"


def counts_of(of: dict[str, list[str]]) -> str:
    """The number of tests with each outcome, as text."""
    return ", ".join(f"{len(of[kind])} {kind}" for kind in KINDS if of.get(kind))


# ---- environments


def test_environment(environment: Environment) -> tuple[str, bool]:
    """Makes the environment and runs everything in it. Returns its section of the page, and whether
    nothing that must be right is wrong."""
    make(environment)
    python = environment.interpreter
    versions = {name: version_of(name, python) for name in PACKAGES}
    rows = {"Python": run([python, "-V"]).stdout.removeprefix("Python ").strip()} | versions
    tested = {}
    for what in environment.tests:
        report = PLACE / f"{environment.directory.name}-{what.replace(' ', '-')}.xml"
        words = (*TESTS[what], f"--wheels={wheel_folder(environment)}")
        tested[what] = outcomes(python, report, words, environment.differs)
        print(f"{environment.name}, {what}: {counts_of(tested[what])}", flush=True)
    is_right = not any(tested[what].get("failed") for what in STRICT if what in tested)
    if not environment.python:
        rows[f"shards of torch and DeepSpeed, recorded by `{RECORDER}`"] = recorded(python)
        is_right &= "different" not in rows.values()
        for case, layers in CASES.items():
            for loader, what in held(environment, case).items():
                rows[f"`{loader}`, {case}, {layers} layer{'s' * (layers != '1')}"] = what
    return section(environment.name, rows, tested), is_right


def test_engines() -> tuple[str, bool]:
    python = make_environment(PLACE / "engines", ROOT / ".venv/bin/python")
    tested = outcomes(python, PLACE / "engines.xml", ENGINES, {})
    return section("engines", releases(), {"engines": tested}), not lost(tested)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("--wheels", action="store_true", help="those with the release's wheel")
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(NAMES))
    parser.add_argument("--keep", action="store_true", help="keep the environments")
    options = parser.parse_args()
    if unknown := {*options.names} - {*NAMES}:
        parser.error(f"expected names of {', '.join(NAMES)}; got {', '.join(sorted(unknown))}")
    PLACE.mkdir(parents=True, exist_ok=True)
    wrong = []
    alone = [name for name in BY_NAME if BY_NAME[name].python]
    default = alone if options.wheels else [name for name in NAMES if name not in alone]
    for name in options.names or default:
        print(f"{name} ...", flush=True)
        text, is_right = test_environment(BY_NAME[name]) if name in BY_NAME else test_engines()
        sections = sections_of(PAGE.read_text()) | {name: text}
        PAGE.write_text(page(sections))
        print(text)
        wrong += [] if is_right else [name]
        if not options.keep:
            shutil.rmtree(PLACE / name.replace(" ", "-"), ignore_errors=True)
    print(f"wrong: {', '.join(wrong)}" if wrong else "nothing is wrong")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
