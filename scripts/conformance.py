#!/usr/bin/env python3
"""Tests Modicum with other versions of the packages that it works with, and with the engines of
integrations/.

The first of ENVIRONMENTS is .venv. Makes the others in build/conformance/, on top of .venv, whose
torch and wheel they use. Runs in each: the tests of FAMILIES (every model of
tests/support/families.py through `modicum.torch.load`, compared with that version's
`from_pretrained`); RECORDER, which records the shards of torch and DeepSpeed again and compares
them with the recorded ones; the tests of FRONTS, if the environment's `fronts` is set; and
benchmarks/loaders.py for LOADERS, which measures bits and memory of loads. Runs the tests of
ENGINES in an environment that has the engines. Writes benchmarks/CONFORMANCE.md. Takes half an
hour and needs a package index; `make soak` runs it. Exit 1 if a test of FAMILIES fails, if the
recorded shards differ, or if a test of ENGINES does not pass.
"""

import argparse
import collections
import json
import os
import subprocess
import sys
import xml.etree.ElementTree as ET
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.append(str(ROOT / "tests/support"))
from engine_packages import make_environment, releases  # noqa: E402

PAGE = ROOT / "benchmarks/CONFORMANCE.md"
PLACE = ROOT / "build/conformance"
PACKAGES = ("transformers", "accelerate", "peft", "deepspeed")
FAMILIES = ("tests/torch/load/test_values.py", "-k", "test_every_family")
FRONTS = (
    "tests/torch/fronts/test_accelerate.py",
    "tests/torch/fronts/test_accelerate_refusals.py",
    "tests/torch/fronts/test_everyday.py",
    "tests/torch/fronts/test_optimizers.py",
    "tests/torch/fronts/test_preemption.py",
    "tests/torch/optim/test_deepspeed.py",
    "tests/torch/fronts/test_dcp.py",
    "tests/torch/fronts/test_engines.py",
    "tests/torch/fronts/test_engine_state.py",
    "tests/torch/build/test_empty.py",
    "tests/recipes/test_recipe_oracle.py",
    "tests/recipes/test_recipes_wrapped.py",
)
RECORDER = "tests/fixtures/record_cuts.py"
ENGINES = ("tests/torch/fronts/test_integrations.py",)
LOADERS = "from_pretrained,accelerate,transformers,dcp,modicum"
CASES = {"dense": "2", "moe": "1"}  # case of loaders.py -> number of layers
WORLD = 4
SURROUNDINGS = {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "DS_BUILD_OPS": "0"}


@dataclass(frozen=True)
class Environment:
    name: str
    wanted: tuple[str, ...]  # requirements for pip; all other packages are those of .venv
    fronts: bool  # whether the tests of FRONTS are run

    @property
    def directory(self) -> Path:
        return PLACE / self.name.replace(" ", "-")

    @property
    def python(self) -> Path:
        return self.directory / "bin/python" if self.wanted else ROOT / ".venv/bin/python"


ENVIRONMENTS = (
    Environment("pinned", (), fronts=True),
    Environment("newest", PACKAGES, fronts=True),
    # The floors of pyproject.toml. The tests of FRONTS name conversions that 5.3 does not have.
    Environment("oldest", ("torch==2.11.*", "transformers==5.3.*"), fronts=False),
    # The last version that converts no weights while it loads, so that recipes are the identity.
    # The tests of FRONTS need version 5.
    Environment("transformers 4.57", ("transformers==4.57.*",), fronts=False),
)


def run(words: list[str | Path], *, may_fail: bool = False) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        [str(word) for word in words], cwd=ROOT, env=os.environ | SURROUNDINGS, text=True,
        capture_output=True, check=False,
    )  # fmt: skip
    if done.returncode and not may_fail:
        sys.exit(f"{' '.join(map(str, words))}: {done.returncode}\n{done.stdout}{done.stderr}")
    return done


def make(environment: Environment) -> None:
    """Makes an environment on top of .venv; its own packages take precedence."""
    if not environment.wanted:
        return
    base = run([ROOT / ".venv/bin/python", "-c", "import site; print(site.getsitepackages()[0])"])
    run([ROOT / ".venv/bin/python", "-m", "venv", environment.directory])
    (own,) = environment.directory.glob("lib/python*/site-packages")
    (own / "base.pth").write_text(base.stdout)
    constraints = environment.directory / "constraints.txt"
    pinned = f"torch=={version_of('torch', ROOT / '.venv/bin/python')}\n"
    constraints.write_text("" if "torch==" in str(environment.wanted) else pinned)
    pip = [environment.python, "-m", "pip", "--disable-pip-version-check", "install", "--quiet"]
    run([*pip, "--upgrade", "--no-build-isolation", "-c", constraints, *environment.wanted])


def version_of(package: str, python: Path) -> str:
    code = f"from importlib.metadata import version; print(version({package!r}))"
    return run([python, "-c", code]).stdout.strip()


def program_of(python: Path) -> str:
    """The program in the wheel that is installed."""
    code = "import modicum; print(modicum.__path__[0] + '/modicum')"
    return run([python, "-c", code]).stdout.strip()


# ---- tests


def outcomes(name: str, python: Path, words: tuple[str, ...]) -> dict[str, list[str]]:
    """The names of the tests that were run, by outcome. `name`: the name of the environment."""
    report = PLACE / f"{name.replace(' ', '-')}.xml"
    report.unlink(missing_ok=True)
    pytest = [python, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--junitxml"]
    done = run([*pytest, report, *words], may_fail=True)
    if not report.exists():
        sys.exit(f"no tests were run by {name}:\n{done.stdout}{done.stderr}")
    found: dict[str, list[str]] = collections.defaultdict(list)
    for case in ET.parse(report).iter("testcase"):
        found[outcome_of(case)].append(f"{case.get('classname')}::{case.get('name')}")
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
        [environment.python, "benchmarks/loaders.py", "--case", case, "--layers", CASES[case]]
        + ["--rows", LOADERS, "--reps", "1", "--cold", "0", "--raw", raw]
        + ["--modicum", program_of(environment.python)]
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


def page(found: dict[str, dict], engines: dict[str, list[str]]) -> str:
    names = list(found)
    lines = [
        "# Conformance",
        "",
        "Loads with other versions of the packages: whether the bits are right, and the host "
        "memory. Written by `python scripts/conformance.py`, which `make soak` runs.",
        "",
        "| | " + " | ".join(names) + " |",
        "|---" * (len(names) + 1) + "|",
    ]
    for package in ("torch", *PACKAGES):
        versions = [found[name]["versions"][package] for name in names]
        lines.append(f"| {package} | " + " | ".join(versions) + " |")
    for what in ("families", "fronts"):
        cells = [counts_of(found[name].get(what)) for name in names]
        lines.append(f"| {TESTS[what]} | " + " | ".join(cells) + " |")
    cells = [found[name]["recorded"] for name in names]
    lines.append(
        f"| shards of torch and DeepSpeed, recorded by `{RECORDER}` | {' | '.join(cells)} |"
    )
    for case, layers in CASES.items():
        for row in LOADERS.split(","):
            cells = [found[name][case].get(row, "-") for name in names]
            label = f"`{row}`, {case}, {layers} layer{'s' * (layers != '1')}"
            lines.append(f"| {label} | " + " | ".join(cells) + " |")
    named = ", ".join(f"{name} {of}" for name, of in sorted(releases().items()))
    lines += ["", f"`{ENGINES[0]}` with {named}: {counts_of(engines)}.", "", *FOOTER]
    if lost(engines):
        lines += ["", f"Engines, not right: {', '.join(f'`{name}`' for name in lost(engines))}."]
    for name in names:
        for kind in ("failed", "refused"):
            for what in ("families", "fronts"):
                tests = (found[name].get(what) or {}).get(kind, [])
                short = ", ".join(f"`{test.partition('::')[2]}`" for test in tests)
                if short:
                    lines += ["", f"{name}, {what}, {kind}: {short}."]
    return "\n".join(lines) + "\n"


TESTS = {
    "families": "models of `tests/support/families.py` through `modicum.torch.load`",
    "fronts": "tests of accelerate, Trainer, TRL, DeepSpeed, engines, DCP and recipes",
}
FOOTER = (
    f"Rows of loaders: the bits are compared with those of `from_pretrained` in a single process. "
    f"The number is the peak of {WORLD} ranks together, as a multiple of the bytes of their "
    "shards. Refused: an error that names the reason, before anything is loaded. Not there: the "
    "version has no such model, or not with this configuration. Not by them either: "
    "`from_pretrained` of that version leaves tensors empty, or needs a GPU.",
)


def counts_of(of: dict[str, list[str]] | None) -> str:
    """The number of tests with each outcome, as text; `-` if none were run."""
    if of is None:
        return "-"
    kinds = ("right", "refused", "not there", "not by them either", "skipped", "failed")
    return ", ".join(f"{len(of[kind])} {kind}" for kind in kinds if of.get(kind))


def main() -> int:
    argparse.ArgumentParser(description=__doc__.partition("\n\n")[0]).parse_args()
    PLACE.mkdir(parents=True, exist_ok=True)
    found: dict[str, dict] = {}
    for environment in ENVIRONMENTS:
        print(f"{environment.name} ...", flush=True)
        make(environment)
        versions = {name: version_of(name, environment.python) for name in ("torch", *PACKAGES)}
        families = outcomes(environment.name, environment.python, FAMILIES)
        of = found[environment.name] = {"versions": versions, "families": families}
        of["recorded"] = recorded(environment.python)
        if environment.fronts:
            of["fronts"] = outcomes(environment.name, environment.python, FRONTS)
        for case in CASES:
            of[case] = held(environment, case)
    print("engines ...", flush=True)
    python = make_environment(PLACE / "engines", ROOT / ".venv/bin/python")
    engines = outcomes("engines", python, ENGINES)
    PAGE.write_text(page(found, engines))
    print(PAGE.read_text())
    wrong = [
        name
        for name, of in found.items()
        if of["families"].get("failed") or of["recorded"] != "equal"
    ]
    return 1 if lost(engines) or wrong else 0


if __name__ == "__main__":
    sys.exit(main())
