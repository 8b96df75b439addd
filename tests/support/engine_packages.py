"""The releases of torchtitan and of the engines for which integrations/ has patches, and an
environment in which they are installed."""

import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TITAN = "torchtitan==0.3.0"


def releases() -> dict[str, str]:
    """The release of each engine, by name of its distribution."""
    named = (path.stem.rpartition("-") for path in ROOT.glob("integrations/*.patch"))
    return {name: release for name, _, release in named} | dict([TITAN.split("==")])


def make_environment(place: Path, base: Path) -> Path:
    """Makes an environment on top of that of the interpreter `base`, and returns its interpreter.
    The engines require older versions of the packages in that environment. So they are installed
    without dependencies, and the dependencies that `base` lacks from requirements-engines.txt."""
    python = place / "bin/python"
    code = "import site; print(site.getsitepackages()[0])"
    packages = subprocess.run([base, "-c", code], check=True, capture_output=True, text=True).stdout
    subprocess.run([base, "-m", "venv", place], check=True)
    (own,) = place.glob("lib/python*/site-packages")
    (own / "base.pth").write_text(packages)
    pip = [python, "-m", "pip", "--disable-pip-version-check", "install", "--quiet", "--no-deps"]
    engines = [f"{name}=={release}" for name, release in releases().items()]
    subprocess.run([*pip, "-r", ROOT / "scripts/requirements-engines.txt", *engines], check=True)
    return python
