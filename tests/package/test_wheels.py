"""The wheels of a release, as `make wheels` builds them, work on each Python and architecture that
they name, and on a Linux with an older glibc. What they compute is what Debian's build computes, to
the bit.

Catches: a symbol of a newer glibc; a module that only its builder's Python imports; a compiler or a
library with other roundings; two builds of a commit that differ.
"""

import hashlib
import os
import shutil
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest
from program import run, run_json

pytestmark = [pytest.mark.soak, pytest.mark.timeout(3 * 3600)]

LARGEST_BYTES = 6_000_000
LIBRARIES = {"cli11", "fmt", "hwy", "libcxx", "nanobind", "nettle", "re2", "simdjson", "xxhash"}
PYTHONS = ("3.10", "3.11", "3.12", "3.13")
STATE_FORMATS = ("fp32", "fp32-split", "bf16-moments", "int8-moments", "int8-moments-24")
# Instruction sets that the program has for each architecture. SVE is not among them: Highway 1.0.3
# leaves it out with Clang.
INSTRUCTION_SETS = {"x86_64": {"avx3", "avx2", "scalar"}, "aarch64": {"neon"}}
# Left out under an emulator. The first reads counters of the kernel, which are the emulator's. The
# others take many minutes there: they try all floats in bfloat16's range, and 4 million floats.
NOT_EMULATED = (
    "AdamW.StepsAllocateNothingNextToForkedChildren",
    "StateFormat.ASplitMasterIsExactForEveryFloatInTheRangeOfBf16",
    "Cast.ASweepOfFp32AgreesWithTheReference",
)
PROBE = Path(__file__).parents[1] / "support/wheel_alone.py"


def checked(*command: str | Path, **options) -> str:
    result = subprocess.run(
        [str(part) for part in command], capture_output=True, text=True, **options
    )
    assert result.returncode == 0, f"{command}\n{result.stdout}{result.stderr}"
    return result.stdout


@pytest.fixture(scope="module")
def wheels(root: Path) -> Path:
    """The folder with the wheels and the sdist of this commit; builds those that are not there."""
    checked(root / "scripts/wheels.sh")
    return root / "dist/wheels"


def wheel_of(wheels: Path, python: str, architecture: str = "x86_64") -> Path:
    tag = "cp312-abi3" if python >= "3.12" else f"cp{python.replace('.', '')}"
    (wheel,) = wheels.glob(f"modicum-*-{tag}-*_{architecture}.whl")
    return wheel


def unpacked(wheel: Path, folder: Path) -> Path:
    """Unpacks the wheel and returns its program."""
    shutil.unpack_archive(wheel, folder, "zip")
    program = folder / "modicum/modicum"
    program.chmod(0o755)  # unpack_archive leaves out modes
    return program


@pytest.fixture(scope="module")
def model(modicum: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("models") / "tiny"
    run_json(modicum, "synth", directory, "--arch", "tiny-fp8")
    return directory


def saved(program: Path, model: Path, root: Path) -> dict[str, str]:
    """The SHA-256 of each file with tensors of a step, for each state format, after three steps of
    AdamW. Parameters are bfloat16, so that all formats differ."""
    root.mkdir()
    found = {}
    for state in STATE_FORMATS:
        words = ("save", model, root / state, "--dtype", "bfloat16", "--ranks", 2, "--step", 1)
        run_json(program, *words, "--optimizer", f"adamw:{state}", "--steps", 3)
        for file in sorted((root / state).rglob("*.safetensors")):
            found[str(file.relative_to(root))] = hashlib.sha256(file.read_bytes()).hexdigest()
    return found


def test_there_is_a_small_wheel_for_each_python_and_architecture(wheels: Path) -> None:
    names = [wheel.name.split("-", 2)[2] for wheel in wheels.glob("*.whl")]
    tags = ("cp310-cp310", "cp311-cp311", "cp312-abi3")
    platforms = ("manylinux_2_28_x86_64", "manylinux_2_28_aarch64")
    assert sorted(names) == sorted(f"{tag}-{one}.whl" for tag in tags for one in platforms)
    assert max(wheel.stat().st_size for wheel in wheels.glob("*.whl")) <= LARGEST_BYTES
    assert len(list(wheels.glob("modicum-*.tar.gz"))) == 1


def test_a_wheel_has_the_licences_of_what_it_contains(wheels: Path) -> None:
    for wheel in wheels.glob("*.whl"):
        with zipfile.ZipFile(wheel) as archive:
            texts = [name for name in archive.namelist() if name.startswith("modicum/licenses/")]
        libraries = {Path(name).name.partition("-")[0] for name in texts}
        assert libraries == LIBRARIES and "modicum/licenses/nettle-COPYING.LESSERv3" in texts


@pytest.mark.parametrize("version", PYTHONS)
def test_each_python_loads_what_the_program_wrote(
    root: Path, wheels: Path, modicum: Path, model: Path, tmp_path: Path, version: str
) -> None:
    checked(
        "bash", "-c", f'. scripts/pythons.sh; "$(python_of {version})" -m venv {tmp_path}', cwd=root
    )
    pip = (tmp_path / "bin/python", "-m", "pip", "--disable-pip-version-check", "install")
    checked(*pip, "--no-index", f"--find-links={wheels}", "modicum")
    ours = checked(sys.executable, PROBE, model, cwd="/")
    assert checked(tmp_path / "bin/python", PROBE, model, cwd="/") == ours
    words = ("plan", model, "--ranks", 2)
    theirs, expected = (run_json(one, *words) for one in (tmp_path / "bin/modicum", modicum))
    assert theirs["checkpoint"] == expected["checkpoint"]


@pytest.fixture(params=sorted(INSTRUCTION_SETS))
def architecture(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def program(wheels: Path, architecture: str, tmp_path: Path) -> Path:
    """The program of the wheel for CPython 3.12, or one that emulates it."""
    found = unpacked(wheel_of(wheels, "3.12", architecture), tmp_path / "wheel")
    return emulated(found) if architecture == "aarch64" else found


def test_each_architecture_has_the_bits_of_debians_build(
    program: Path, modicum: Path, model: Path, tmp_path: Path
) -> None:
    assert saved(program, model, tmp_path / "wheels") == saved(modicum, model, tmp_path / "ours")


def test_each_architecture_has_the_digests_and_instruction_sets_that_are_named(
    program: Path, modicum: Path, architecture: str
) -> None:
    for state in STATE_FORMATS:
        words = ("step", "--params", 100_001, "--state-format", state, "--no-compare")
        theirs, ours = (run_json(one, *words) for one in (program, modicum))
        for digest in ("state_digest", "master_digest"):
            assert theirs[digest] == ours[digest], state
        assert theirs["isa"] in INSTRUCTION_SETS[architecture]
        assert {theirs["isa"], *theirs["isas_not_run"]} <= INSTRUCTION_SETS[architecture]


def test_each_architecture_has_the_exit_codes_of_debians_build(
    program: Path, modicum: Path, model: Path, tmp_path: Path
) -> None:
    cut = shutil.copytree(model, tmp_path / "cut")
    (file,) = cut.glob("*.safetensors")
    os.truncate(file, file.stat().st_size - 1)
    refused = (
        ("plan", model, "--rank", 2),
        ("plan", model, "--ranks", 2, "--budget", "1MiB"),
        ("load", model, "--ranks", 2, "--budget", "1MiB"),
        ("plan", tmp_path / "nothing"),
        ("inspect", cut),
        ("verify", cut),
        ("step", "--params", 1000, "--isa", "none"),
    )
    codes = [[run(one, *words, "--json").code for words in refused] for one in (program, modicum)]
    assert codes[0] == codes[1]
    assert 0 not in codes[0] and len(set(codes[0])) > 3


def emulated(program: Path) -> Path:
    """A program that runs this one of aarch64."""
    emulator, libraries = shutil.which("qemu-aarch64"), Path("/usr/aarch64-linux-gnu/lib")
    if not emulator or not libraries.exists():
        pytest.skip("needs the packages qemu-user and libc6-arm64-cross")
    # Not by qemu's option -L: with it the folder / that a program opens is another one.
    loader = f"{libraries}/ld-linux-aarch64.so.1 --library-path {libraries}"
    script = program.with_name(f"emulated-{program.name}")
    script.write_text(f'#!/bin/sh\nexec {emulator} {loader} {program} "$@"\n')
    script.chmod(0o755)
    return script


def test_the_kernels_pass_their_tests_in_the_wheels_build(
    root: Path, wheels: Path, architecture: str
) -> None:
    build = root / f"build/wheels/{architecture}/build"
    tests = ("modicum_kernels_test", "modicum_optim_test")
    later = "-DCMAKE_GTEST_DISCOVER_TESTS_DISCOVERY_MODE=PRE_TEST"
    checked("cmake", "-B", build, "-DMODICUM_TESTS=ON", "-DMODICUM_PYTHON=OFF", later)
    checked("cmake", "--build", build, "-j", str(os.cpu_count()), "--target", *tests)
    for test in tests:
        if architecture == "aarch64":
            checked(emulated(build / test), f"--gtest_filter=-{':'.join(NOT_EMULATED)}")
        else:
            checked(build / test)


@pytest.fixture(scope="module")
def older(root: Path) -> Path:
    """A folder with the userland of Debian 11, glibc 2.31, and a Python that is compiled there."""
    if os.geteuid() != 0 or not shutil.which("debootstrap"):
        pytest.skip("needs root and the package debootstrap")
    folder = root / "build/wheels/bullseye"
    checked(root / "scripts/bullseye.sh", folder)
    return folder


def test_an_older_glibc_runs_program_and_module(
    wheels: Path, older: Path, model: Path, tmp_path: Path
) -> None:
    place = older / "srv"
    shutil.rmtree(place)
    unpacked(wheel_of(wheels, "3.11"), place)
    shutil.copytree(model, place / "tiny")
    shutil.copy(PROBE, place)
    enter = f'mount -t proc proc {older}/proc && exec chroot {older} env PYTHONPATH=/srv "$@"'
    inside = ("unshare", "--mount", "sh", "-c", enter, "sh")
    ours = checked(sys.executable, PROBE, model, cwd="/")
    assert checked(*inside, "/opt/python/bin/python3", "/srv/wheel_alone.py", "/srv/tiny") == ours
    assert "own-shard" in checked(
        *inside, "/srv/modicum/modicum", "plan", "/srv/tiny", "--ranks", "2"
    )


def test_two_builds_are_equal(root: Path, wheels: Path, tmp_path: Path) -> None:
    """The second one in another folder, so that no path is in a wheel, and without ccache."""
    checked("git", "clone", "--quiet", root, tmp_path / "other")
    (tmp_path / "other/.venv").symlink_to(root / ".venv")
    uncached = os.environ | {"CCACHE_DISABLE": "1"}
    checked("scripts/wheels.sh", "x86_64", cwd=tmp_path / "other", env=uncached)
    for again in (tmp_path / "other/dist/wheels").glob("modicum-*"):
        assert again.read_bytes() == (wheels / again.name).read_bytes(), again.name


def test_the_sdist_builds_with_compiler_cmake_and_pip(
    wheels: Path, model: Path, tmp_path: Path
) -> None:
    venv.create(tmp_path, with_pip=True)
    (sdist,) = wheels.glob("modicum-*.tar.gz")
    checked(tmp_path / "bin/python", "-m", "pip", "install", sdist, cwd="/")
    ours = checked(sys.executable, PROBE, model, cwd="/")
    assert checked(tmp_path / "bin/python", PROBE, model, cwd="/") == ours
