"""The releases of the engines for which integrations/ has patches and of torchtitan, and an
environment with them."""

import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TITAN = "torchtitan==0.3.0"


def releases() -> dict[str, str]:
    """The release of each engine, by name of its distribution."""
    named = (path.stem.rpartition("-") for path in ROOT.glob("integrations/*.patch"))
    return {name: of for name, _, of in named} | dict([TITAN.split("==")])


def make_environment(place: Path, base: Path) -> Path:
    """Makes an environment on top of that of the Python `base`, and returns its Python. The engines
    require older versions of the packages there. So they are installed without dependencies, and
    their other dependencies from a list."""
    python = place / "bin/python"
    code = "import site; print(site.getsitepackages()[0])"
    packages = subprocess.run([base, "-c", code], check=True, capture_output=True, text=True).stdout
    subprocess.run([base, "-m", "venv", place], check=True)
    (own,) = place.glob("lib/python*/site-packages")
    (own / "base.pth").write_text(packages)
    pip = [python, "-m", "pip", "--disable-pip-version-check", "install", "--quiet", "--no-deps"]
    engines = [f"{name}=={of}" for name, of in releases().items()]
    subprocess.run([*pip, "-r", ROOT / "scripts/requirements-engines.txt", *engines], check=True)
    return python
