"""A project of another name adds this repository as a subdirectory, or finds it installed, with the
lines of CMake, the command and the program of docs/reference/cpp.md. It is linked with the
libraries of the wheel's build, since compiling them takes minutes; `make soak` compiles all of them
in that project.

Catches: paths that begin at the other project's folder; our flags in its targets; a header,
a library or a dependency that is not installed; a saved directory that transformers or `modicum
verify` refuses, or values of other steps; a directory that is left after an error.
"""

import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from program import run_json

ROOT = Path(__file__).resolve().parent.parent.parent
# What a loader does not need: packages of the program and of the tests, and a launcher.
NOT_NEEDED = ("CLI11", "DYGRAPHS", "GTest", "CCACHE", "Python")
# A project with a language, a standard, warnings, tests and targets of its own.
OTHER_PROJECT = """\
cmake_minimum_required(VERSION 3.25)
project(other LANGUAGES C CXX)
set(CMAKE_CXX_STANDARD 17)
add_compile_options(-Wconversion)
include(CTest)
add_custom_target(modicum)
add_custom_target(check)
add_library(re2::re2 SHARED IMPORTED)
set_target_properties(re2::re2 PROPERTIES IMPORTED_LOCATION /usr/lib/re2.so)

include(FetchContent)
FetchContent_Declare(modicum SOURCE_DIR ${REPOSITORY})
FetchContent_MakeAvailable(modicum)

foreach(name CXX_STANDARD CXX_EXTENSIONS POSITION_INDEPENDENT_CODE EXPORT_COMPILE_COMMANDS)
  message(STATUS "${name}=${CMAKE_${name}}")
endforeach()
add_executable(loader shards.cc)
target_link_libraries(loader PRIVATE modicum::stream)
"""


def block(language: str, at: int = 0) -> str:
    """A block of this language on the page: the load; at 1 steps and a save; at 2 the list."""
    page = (ROOT / "docs/reference/cpp.md").read_text()
    return re.findall(rf"^```{language}\n(.*?)^```$", page, re.M | re.S)[at]


def checked(*command: str | Path) -> str:
    result = subprocess.run([str(part) for part in command], capture_output=True, text=True)
    assert result.returncode == 0, f"{command}\n{result.stdout}{result.stderr}"
    return result.stdout


def configured(project: Path, cmake_lists: str, *options: str, program: str = "") -> str:
    """Writes a project with the page's program and configures it, with Makefiles, in `build`."""
    (project / "CMakeLists.txt").write_text(cmake_lists)
    (project / "shards.cc").write_text(program or block("cpp"))
    makefiles = ("-G", "Unix Makefiles")
    return checked("cmake", "-S", project, "-B", project / "build", *makefiles, *options)


@pytest.fixture(scope="module")
def model(modicum: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("models") / "tiny"
    run_json(modicum, "synth", directory, "--arch", "tiny-moe")
    return directory


@pytest.fixture(scope="module")
def libraries(modicum: Path) -> list[Path]:
    """The rooms' libraries: those next to the program under test, or, if it is the wheel's, those
    of the wheel's build."""
    version = f"cp3{min(sys.version_info.minor, 12)}"  # the wheel of 3.12 is for later ones, too
    places = [modicum.parent, *ROOT.glob(f"build/wheel-{version}-*")]
    found = [sorted(place.glob("libmodicum_*.a")) for place in places]
    assert any(found), f"no libraries in {places}; run `scripts/wheel.sh build/python install`"
    return next(one for one in found if one)


@pytest.fixture
def subdirectory(tmp_path: Path) -> Path:
    """The page's project, with the repository in its folder `modicum`, configured."""
    (tmp_path / "modicum").symlink_to(ROOT)
    configured(tmp_path, block("cmake"), "-DCMAKE_CXX_FLAGS=-O0")
    return tmp_path


def assert_loads(program: Path, model: Path) -> None:
    lines = checked(program, model).splitlines()
    line = re.compile(r"rank (\d): (\d+) bytes of \S+; promised (\d+), held (\d+)")
    found = [line.fullmatch(one) for one in lines]
    assert all(found), lines
    assert sorted(one[1] for one in found) == ["0", "0", "1"]
    assert all(int(one[2]) > 0 and one[3] == one[4] for one in found), lines


def test_the_pages_project_links_and_runs(libraries, model, subdirectory):
    for library in libraries:
        shutil.copy(library, subdirectory / "build/modicum")
    # The target itself, without those that it depends on.
    checked("cmake", "--build", subdirectory / "build", "--target", "shards/fast")
    assert_loads(subdirectory / "build/shards", model)
    commands = checked("make", "-C", subdirectory / "build", "--dry-run", "--always-make", "all")
    built = set(re.findall(r"/modicum_(\w+)\.dir/build\b", commands))
    assert {"stream", "plan", "base"} <= built
    assert not built & {"synth", "optim", "watch"}, "rooms that no target links are built"
    cache = (subdirectory / "build/CMakeCache.txt").read_text()
    assert not [name for name in NOT_NEEDED if re.search(f"^{name}", cache, re.M)]


def installed(libraries: list[Path], place: Path, *options: str) -> Path:
    """The folder of an installation. The libraries have been built, so that CMake only copies."""
    build, prefix = place / "build", place / "prefix"
    libraries_only = ("-DMODICUM_PROGRAM=OFF", "-DMODICUM_TESTS=OFF", "-DCMAKE_BUILD_TYPE=Release")
    checked("cmake", "-S", ROOT, "-B", build, *libraries_only, *options)
    for library in libraries:
        shutil.copy(library, build)
    checked("cmake", "--install", build, "--component", "cpp", "--prefix", prefix)
    return prefix


@pytest.fixture(scope="module")
def prefix(libraries: list[Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return installed(libraries, tmp_path_factory.mktemp("installed"))


def found(prefix: Path, project: Path, *words: str, options: tuple[str, ...] = ()) -> str:
    """What CMake says of find_package(modicum) with these words, and whether it has found it."""
    (project / "CMakeLists.txt").write_text(f"""\
cmake_minimum_required(VERSION 3.25)
project(finds LANGUAGES CXX)
find_package(modicum {" ".join(words)})
message(STATUS "modicum_FOUND=${{modicum_FOUND}}")
""")
    place = f"-DCMAKE_PREFIX_PATH={prefix}"
    command = ["cmake", "-S", project, "-B", project / "build", place, *options]
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True)
    return " ".join((done.stdout + done.stderr).split())


def test_a_package_that_lacks_a_library_is_not_found(prefix: Path, tmp_path: Path) -> None:
    """A project that can do without it goes on."""
    for without in ("-DCMAKE_DISABLE_FIND_PACKAGE_simdjson=ON", "-DCMAKE_IGNORE_PATH=/usr/include"):
        shutil.rmtree(tmp_path / "build", ignore_errors=True)
        assert "modicum_FOUND=0" in found(prefix, tmp_path, "QUIET", options=(without,)), without
    said = found(prefix, tmp_path, "REQUIRED")
    assert "modicum needs the library and the headers of re2." in said


def test_components_are_rooms(prefix: Path, tmp_path: Path) -> None:
    rooms = ("COMPONENTS", "stream", "base", "OPTIONAL_COMPONENTS", "other")
    assert "modicum_FOUND=1" in found(prefix, tmp_path, "REQUIRED", *rooms)
    said = found(prefix, tmp_path, "REQUIRED", "COMPONENTS", "stream", "no_room")
    assert "expected a component of base, json, " in said and "got no_room." in said
    assert "modicum_FOUND=0" in found(prefix, tmp_path, "QUIET", "COMPONENTS", "no_room")


def test_headers_may_be_in_another_folder(libraries, model, tmp_path):
    (tmp_path / "place").mkdir()
    folder = "-DCMAKE_INSTALL_INCLUDEDIR=inc"
    prefix = installed(libraries, tmp_path / "place", folder)
    assert (prefix / "inc/modicum/stream/stream.h").is_file() and not (prefix / "include").exists()
    finds = block("cmake").replace("add_subdirectory(modicum)", "find_package(modicum REQUIRED)")
    lists = finds.replace("modicum::stream", "modicum::base")
    program = '#include "modicum/base/error.h"\nint main() {}\n'
    options = (f"-DCMAKE_PREFIX_PATH={prefix}", "-DCMAKE_CXX_FLAGS=-O0")
    configured(tmp_path, lists, *options, program=program)
    checked("cmake", "--build", tmp_path / "build")


def test_libraries_of_the_project_above_are_linked(tmp_path):
    """Also without the network, since no sources of these are downloaded."""
    names = "fmt simdjson hwy re2 nettle"
    lists = f"""\
cmake_minimum_required(VERSION 3.25)
project(other LANGUAGES C CXX)
foreach(name {names})
  add_library(${{name}} INTERFACE)
endforeach()
add_library(simdjson::simdjson ALIAS simdjson)
add_subdirectory({ROOT} modicum)
add_executable(loader shards.cc)
target_link_libraries(loader PRIVATE modicum::stream)
"""
    sources = ("-DMODICUM_FETCH=ON", "-DFETCHCONTENT_SOURCE_DIR_XXHASH=/usr/include")
    configured(tmp_path, lists, *sources)
    assert not (tmp_path / "build/_deps/fmt-src").exists()


def test_a_project_finds_the_installed_libraries(prefix, model, tmp_path):
    found = block("cmake").replace("add_subdirectory(modicum)", "find_package(modicum REQUIRED)")
    configured(tmp_path, found, f"-DCMAKE_PREFIX_PATH={prefix}", "-DCMAKE_CXX_FLAGS=-O0")
    checked("cmake", "--build", tmp_path / "build")
    assert_loads(tmp_path / "build/shards", model)

    missing = [tmp_path / "build/shards", tmp_path / "missing"]
    failed = subprocess.run(missing, capture_output=True, text=True)
    assert failed.returncode == 13
    assert re.fullmatch(r"IO: .+ \[exit code 13\]\n", failed.stderr), failed.stderr


def test_pkg_config_names_the_installed_libraries(prefix, model, tmp_path):
    (command,) = re.findall(r"^    (g\+\+ .*)$", (ROOT / "docs/reference/cpp.md").read_text(), re.M)
    (tmp_path / "shards.cc").write_text(block("cpp"))
    inside = f"cd {tmp_path} && export PKG_CONFIG_PATH={prefix}/lib/pkgconfig"
    checked("sh", "-c", f"{inside} && {command} -O0")
    assert_loads(tmp_path / "shards", model)


def tensors_of(directory: Path) -> dict[str, Any]:
    load_file = pytest.importorskip("safetensors.torch").load_file
    files = sorted(directory.glob("*.safetensors"))
    return {name: values for file in files for name, values in load_file(file).items()}


def test_the_page_steps_and_saves(modicum, prefix, tmp_path):
    torch, transformers = map(pytest.importorskip, ("torch", "transformers"))
    trains = block("cmake").replace("modicum::stream", "modicum::optim modicum::stream")
    trains = trains.replace("add_subdirectory(modicum)", "find_package(modicum REQUIRED)")
    options = (f"-DCMAKE_PREFIX_PATH={prefix}", "-DCMAKE_CXX_FLAGS=-O0")
    configured(tmp_path, trains, *options, program=block("cpp", at=1))
    checked("cmake", "--build", tmp_path / "build")
    model, saved = tmp_path / "model", tmp_path / "saved"
    run_json(modicum, "synth", model, "--arch", "tiny-moe", "--shard-size", 800)
    checked(tmp_path / "build/shards", model, saved)

    recorded = {file["name"] for file in run_json(modicum, "verify", saved)["files"]}
    assert {"config.json", "model.safetensors.index.json"} < recorded
    assert {path.name for path in saved.iterdir()} == {*recorded, "manifest.json", "COMMIT"}
    whole = transformers.AutoModelForCausalLM.from_pretrained(saved, dtype="auto")
    assert whole.dtype == torch.bfloat16
    stepped = tensors_of(saved)
    for name, values in tensors_of(model).items():
        parameter = torch.nn.Parameter(values.float())
        parameter.grad = torch.full_like(parameter, 1e-3)
        adamw = torch.optim.AdamW([parameter])
        adamw.step()
        adamw.step()
        expected, got = parameter.detach(), stepped.pop(name)
        margin = 1e-6 * expected.abs() + 1e-7  # before the values are rounded
        assert got.dtype == torch.bfloat16
        assert ((expected - margin).bfloat16() <= got).all(), name
        assert (got <= (expected + margin).bfloat16()).all(), name
    assert not stepped

    # A file of the checkpoint is longer than allowed: EFBIG.
    limited = 'ulimit -f 1; trap "" XFSZ; exec "$0" "$@"'
    command = ["sh", "-c", limited, tmp_path / "build/shards", model, tmp_path / "failed"]
    failed = subprocess.run(command, capture_output=True, text=True)
    assert failed.returncode == 13 and "safetensors" in failed.stderr, failed
    (tmp_path / "link").symlink_to(tmp_path / "model", target_is_directory=True)
    again = [tmp_path / "build/shards", model, tmp_path / "link/../saved"]
    assert subprocess.run(again, capture_output=True).returncode == 20, "it exists"
    assert {path.name for path in tmp_path.iterdir()} == {
        *("build", "CMakeLists.txt", "shards.cc", "model", "saved", "link")
    }


def test_the_lower_room_lists_the_tensors(modicum, prefix, model, tmp_path):
    """The room that the page names suffices: no other library of ours is linked."""
    (room,) = re.findall(
        r"link `modicum::(\w+)` instead", (ROOT / "docs/reference/cpp.md").read_text()
    )
    lists = block("cmake").replace("modicum::stream", f"modicum::{room}")
    lists = lists.replace("add_subdirectory(modicum)", "find_package(modicum REQUIRED)")
    options = (f"-DCMAKE_PREFIX_PATH={prefix}", "-DCMAKE_CXX_FLAGS=-O0")
    configured(tmp_path, lists, *options, program=block("cpp", at=2))
    checked("cmake", "--build", tmp_path / "build")
    lines = checked(tmp_path / "build/shards", model).splitlines()
    stored = run_json(modicum, "inspect", model)["tensors"]
    assert lines == [
        "{name}: {dtype} {shape}, bytes {begin} to {end} of {file}".format(**of) for of in stored
    ]
    used = (tmp_path / "build/CMakeFiles/shards.dir/link.txt").read_text()
    assert not re.search(r"libmodicum_(stream|plan|kernels|layout|recipe)\b", used), used


@pytest.mark.soak
def test_the_pages_project_builds_from_nothing(model, subdirectory):
    checked("cmake", "--build", subdirectory / "build", "--parallel", "2")
    assert_loads(subdirectory / "build/shards", model)


def test_another_project_keeps_its_settings(tmp_path):
    said = configured(tmp_path, OTHER_PROJECT, f"-DREPOSITORY={ROOT}")
    assert "-- CXX_STANDARD=17\n-- CXX_EXTENSIONS=\n" in said
    assert "-- POSITION_INDEPENDENT_CODE=\n-- EXPORT_COMPILE_COMMANDS=\n" in said
    assert not (tmp_path / "build/compile_commands.json").exists()

    flags = (tmp_path / "build/CMakeFiles/loader.dir/flags.make").read_text()
    (line,) = re.findall("^CXX_FLAGS = (.*)$", flags, re.M)
    assert set(line.split()) == {"-std=gnu++20", "-Wconversion"}
