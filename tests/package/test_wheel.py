"""The wheel works on a machine that has only glibc and the C++ runtime. The tests run it in a fresh
virtual environment, and hide the machine's own copies of all other libraries that the wheel needs.

Catches: a build of the wheel that fails and goes on, or shows no progress.
"""

import ast
import os
import re
import shlex
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest

# Libraries that every Linux with a C++ runtime has: the wheel need not contain them.
SYSTEM_LIBRARIES = re.compile(
    r"^(linux-vdso|ld-linux-x86-64|ld-linux-aarch64|libc|libm|libdl|librt|libpthread|libgcc_s"
    r"|libstdc\+\+)\.so(\.\d+)*$"
)


def run(*command: str | Path, **options) -> subprocess.CompletedProcess[str]:
    """Runs a command; the caller passes `cwd="/"` for programs that must not import from the
    repository."""
    arguments = [str(part) for part in command]
    return subprocess.run(arguments, capture_output=True, text=True, **options)


def checked(*command: str | Path, **options) -> str:
    result = run(*command, **options)
    assert result.returncode == 0, f"{shlex.join(result.args)}\n{result.stdout}{result.stderr}"
    return result.stdout


@pytest.fixture(scope="module")
def environment(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A fresh virtual environment that holds the wheel and nothing else."""
    directory = tmp_path_factory.mktemp("venv")
    venv.create(directory, symlinks=True)
    python = directory / "bin/python"
    pip = (sys.executable, "-m", "pip", "--python", python, "--disable-pip-version-check")
    checked(*pip, "install", "--no-deps", "--no-index", wheel)
    return directory


@pytest.fixture(scope="module")
def package(environment: Path) -> Path:
    (directory,) = environment.glob("lib/python*/site-packages/modicum")
    return directory


def binaries(package: Path) -> list[Path]:
    return [package / "modicum", *sorted(package.glob("*.so")), *sorted(package.glob("*.so.*"))]


def loaded_libraries(binary: Path) -> dict[str, Path | None]:
    """For each shared library that the binary needs, the path that the dynamic loader finds; None
    for libraries without one, such as the vDSO, and for missing libraries."""
    found: dict[str, Path | None] = {}
    for line in checked("ldd", binary, cwd="/").splitlines():
        name, _, rest = line.strip().partition(" => ")
        name = Path(name.split(" (")[0]).name
        place = rest.split(" (")[0]
        found[name] = Path(place) if place.startswith("/") else None
    return found


def system_copies(package: Path) -> list[Path]:
    """The machine's own copies of the libraries that the wheel must contain."""
    needed = {name for binary in binaries(package) for name in loaded_libraries(binary)}
    names = {name for name in needed if not SYSTEM_LIBRARIES.match(name)}
    folders = [Path("/usr/lib"), Path("/usr/local/lib"), *Path("/usr/lib").glob("*-linux-gnu")]
    return sorted({f / name for f in folders for name in names if (f / name).exists()})


def can_hide_files() -> bool:
    return os.geteuid() == 0 and run("unshare", "--mount", "true").returncode == 0


def hidden(paths: list[Path], command: list[str | Path]) -> list[str]:
    """The command in a mount namespace in which /dev/null hides each path. The loader skips such
    files."""
    if not paths:
        return [str(part) for part in command]
    mounts = [f"mount --bind /dev/null {shlex.quote(str(path))}" for path in paths]
    script = " && ".join([*mounts, "exec " + shlex.join(str(part) for part in command)])
    return ["unshare", "--mount", "sh", "-c", script]


def commands(environment: Path, checkpoint: Path) -> dict[str, list[str | Path]]:
    python = environment / "bin/python"
    plan = f"import modicum; print(modicum.plan({str(checkpoint)!r}, ranks=3)['ranks'])"
    return {
        "version": [python, "-c", "import modicum; print(modicum.__version__)"],
        "plan": [python, "-c", plan],
        "command": [environment / "bin/modicum", "plan", checkpoint, "--ranks", "3"],
    }


def test_the_tag_names_the_oldest_python_and_plain_linux(wheel: Path) -> None:
    python = f"cp3{min(sys.version_info.minor, 12)}"
    abi = python if sys.version_info < (3, 12) else "abi3"
    assert re.fullmatch(rf"modicum-[0-9.]+-{python}-{abi}-linux_\w+\.whl", wheel.name)


def test_the_wheel_contains_one_copy_of_each_file(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    assert len(names) == len(set(names))
    stems = [name.split(".so")[0] for name in names if ".so" in name]
    assert len(stems) == len(set(stems)), names
    assert "modicum/modicum" in names
    assert not [name for name in names if name.endswith((".cc", ".h", ".a", ".cmake"))]


def test_types_are_included(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    assert {"modicum/py.typed", "modicum/_modicum.pyi"} <= set(names)


def declared(wheel: Path) -> dict[str, set[str]]:
    """The packages that the wheel requires, by extra; under "" those required without an extra."""
    archive = zipfile.ZipFile(wheel)
    (name,) = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
    required: dict[str, set[str]] = {"": set()}
    for line in archive.read(name).decode().splitlines():
        if match := re.match(r"Requires-Dist: ([\w-]+).*?(?:extra == ['\"](\w+)['\"])?$", line):
            required.setdefault(match[2] or "", set()).add(match[1])
    return required


def imported(wheel: Path) -> set[str]:
    """The packages outside the standard library that the wheel's modules import."""
    archive, found = zipfile.ZipFile(wheel), set()
    for name in archive.namelist():
        if not name.endswith(".py"):
            continue
        text = archive.read(name).decode()
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Import):
                found |= {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.level == 0:
                found.add((node.module or "").partition(".")[0])
        if ".numpy()" in text:  # torch needs numpy for Tensor.numpy(), but does not require it
            found.add("numpy")
    return found - sys.stdlib_module_names - {"modicum"}


def test_every_import_is_a_requirement_of_an_extra(wheel: Path) -> None:
    """And every requirement is imported. No package is required without an extra."""
    required = declared(wheel)
    assert required.pop("") == set()
    assert set.union(*required.values()) - {"modicum"} == imported(wheel)
    assert {"torch", "numpy"} <= required["torch"]


# A stand-in for .venv/bin/python, which scripts/wheel.sh calls as `python -m pip wheel`: prints
# Ninja's lines of 25 steps, then writes the wheel, or fails if there is a file named `fails`.
BUILDS = """#!/bin/sh
echo "[0/2] Re-checking globbed directories..."
i=0
while [ $i -lt 25 ]; do
  i=$((i + 1))
  [ $i -eq 20 ] && path=CMakeFiles/rooms_a.dir/Unity/unity_0_cxx.cxx.o || path=modicum/a/f$i.cc.o
  echo "  [$i/25] Building CXX object $path"
done
[ -e fails ] && { echo "error: no such type"; exit 3; }
touch "$(echo "$@" | sed 's/.*--wheel-dir //')/modicum-9-any.whl"
"""


@pytest.mark.parametrize("fails", [False, True])
def test_a_build_shows_its_progress(root: Path, tmp_path: Path, fails: bool) -> None:
    for name, text in {
        "scripts/wheel.sh": (root / "scripts/wheel.sh").read_text(),
        "scripts/progress.sh": (root / "scripts/progress.sh").read_text(),
        "scripts/venv.sh": "#!/bin/sh\n",
        ".venv/bin/python": BUILDS,
    }.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    if fails:
        (tmp_path / "fails").touch()
    done = run(tmp_path / "scripts/wheel.sh", "out", cwd=tmp_path)
    shown = ["[10/25] f10.cc.o", "[20/25] rooms_a", "[25/25] f25.cc.o"]
    assert done.stdout.splitlines() == shown + ["out/modicum-9-any.whl"] * (not fails)
    assert (done.returncode != 0) == ("error: no such type" in done.stderr) == fails


def test_version_is_the_wheels(environment: Path, wheel: Path, gpt2: Path) -> None:
    printed = checked(*commands(environment, gpt2)["version"], cwd="/")
    assert printed.strip() == wheel.name.split("-")[1]


def test_only_system_libraries_are_loaded_from_outside_the_wheel(package: Path) -> None:
    for binary in binaries(package):
        for name, place in loaded_libraries(binary).items():
            from_wheel = place is not None and package in place.parents
            assert from_wheel or SYSTEM_LIBRARIES.match(name), f"{binary.name}: {name} at {place}"


@pytest.mark.parametrize("what", ["version", "plan", "command"])
def test_the_wheel_runs_without_the_machines_own_copies(
    environment: Path, package: Path, gpt2: Path, what: str
) -> None:
    copies = system_copies(package)
    if copies and not can_hide_files():
        pytest.skip("only root can hide a library, in a mount namespace")
    checked(*hidden(copies, commands(environment, gpt2)[what]), cwd="/")


def test_the_command_is_the_built_program(environment: Path, modicum: Path) -> None:
    ours = run(modicum, "--help", cwd="/")
    installed = run(environment / "bin/modicum", "--help", cwd="/")
    assert (installed.returncode, installed.stdout) == (ours.returncode, ours.stdout)


def test_the_command_imports_the_package_for_the_verbs_of_the_wheel_only(
    environment: Path, gpt2: Path
) -> None:
    """The variable makes Python print what it imports: `modicum --help` must not take so long."""
    watched = os.environ | {"PYTHONPROFILEIMPORTTIME": "1"}
    imported = {}
    for words in (("--help",), ("verify", gpt2), ("plan", gpt2)):
        done = run(environment / "bin/modicum", *words, cwd="/", env=watched)
        assert done.returncode == 0, done.stderr
        imported[words[0]] = "modicum.cli" in done.stderr
    assert imported == {"--help": False, "verify": False, "plan": True}
