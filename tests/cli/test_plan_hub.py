"""`modicum plan ORG/NAME` and `inspect` of a model that is only on the hub: the answers are those
for the local files to the byte, but for the name and the revision.

A double of the hub serves over TLS. Catches: a header that is cut; a file or a warning that the
local directory has and the snapshot lacks; a directory of holes that is left behind, or loaded.
"""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from hub_double import NAME, REVISION, TOKEN, HubDouble, certificate, serving
from program import Ended, run, run_json

# Real shapes, with few layers, and files of a size that gives several of them.
SHAPES = [
    ("gpt2", None), ("llama-3.2-1b", None), ("qwen2.5-0.5b", None), ("qwen2.5-vl-7b", 2),
    ("qwen3-0.6b", None), ("qwen3-30b-a3b", 1), ("qwen3-next-80b-a3b", 1), ("mixtral-8x7b", 1),
    ("gpt-oss-20b", 1), ("deepseek-v3", 1),
]  # fmt: skip
FLAGS = ("--ranks", 4, "--ranks-per-node", 2, "--optimizer", "adamw:fp32-split",
         "--dtype", "bf16", "--budget", "4GiB")  # fmt: skip


@pytest.fixture(scope="module")
def double(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HubDouble]:
    folder = tmp_path_factory.mktemp("hub")
    pem = certificate(folder)
    with serving(HubDouble(folder), pem) as double:
        os.environ["SSL_CERT_FILE"] = str(pem)
        yield double
        del os.environ["SSL_CERT_FILE"]


@pytest.fixture
def model(modicum: Path, double: HubDouble, tmp_path: Path) -> Path:
    """A small MoE in several files, on the hub."""
    double.folder = tmp_path / "model"
    run_json(modicum, "synth", double.folder, "--arch", "tiny-moe", "--shard-size", 800)
    return double.folder


def environment(double: HubDouble, home: Path) -> dict[str, str]:
    (home / "tmp").mkdir(exist_ok=True)
    kept = {
        name: value for name, value in os.environ.items() if not name.lower().endswith("_proxy")
    }
    hub = {"HF_ENDPOINT": double.endpoint, "HF_TOKEN": TOKEN, "HF_HOME": str(home)}
    return kept | hub | {"TMPDIR": str(home / "tmp"), "HF_HUB_CACHE": str(home / "hub")}


def start(double: HubDouble, home: Path, *words: object, **more: str) -> subprocess.Popen[str]:
    """Starts the wheel's command."""
    double.requests.clear()
    command = [sys.executable, "-m", "modicum.cli", *map(str, words)]
    around = environment(double, home) | more
    return subprocess.Popen(
        command, cwd=home, env=around, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        text=True, errors="replace",
    )  # fmt: skip


def command(double: HubDouble, home: Path, *words: object, **more: str) -> Ended:
    """Runs the wheel's command, which leaves no file and tells no other host the token."""
    process = start(double, home, *words, **more)
    stdout, stderr = process.communicate(timeout=120)
    assert [*(home / "tmp").iterdir()] == [] and TOKEN not in stdout + stderr
    assert double.tokens <= {"hub"}
    return Ended(process.returncode, stdout, stderr)


# ---- equal answers


@pytest.mark.parametrize(("arch", "layers"), SHAPES)
def test_the_plan_is_that_of_the_local_files(
    modicum: Path, double: HubDouble, tmp_path: Path, arch: str, layers: int | None
) -> None:
    double.folder = tmp_path / "model"
    words = ("--layers", layers) if layers else ()
    size = ("--shard-size", "500MB", "--sparse")
    run_json(modicum, "synth", double.folder, "--arch", arch, *words, *size)
    local = run(modicum, "plan", double.folder, *FLAGS, "--json")
    remote = command(double, tmp_path, "plan", NAME, *FLAGS, "--json")
    assert (remote.code, local.code) in ((0, 0), (15, 15)), remote.stdout + remote.stderr
    assert remote.stdout.count(REVISION) == 1 and remote.json["revision"] == REVISION
    assert remote.stdout.replace(f'"revision":"{REVISION}",', "") == local.stdout
    files = len([*double.folder.glob("*.safetensors")])
    assert re.search(rf"modicum: headers of {files} files?, ", remote.stderr)
    assert len(double.paths("cdn")) == files  # one request for each header


def test_texts_are_those_of_the_local_files(
    modicum: Path, double: HubDouble, model: Path, tmp_path: Path
) -> None:
    """With warnings, which name files that are not read."""
    for name in ("adapter_config.json", "pytorch_model.bin", "spare.safetensors", "README.md"):
        (model / name).write_text("{}")
    local = run(modicum, "plan", model, *FLAGS)
    remote = command(double, tmp_path, "plan", *FLAGS, NAME, "-q")
    assert "spare.safetensors" in local.stderr + local.stdout
    assert remote.stdout == ""
    remote = command(double, tmp_path, "plan", *FLAGS, NAME)
    assert remote.stdout.replace(f"\n{NAME}@{REVISION}: ", "\n") == local.stdout != remote.stdout
    local = run(modicum, "inspect", model, "-v")
    remote = command(double, tmp_path, "inspect", "-v", NAME)
    assert remote.stdout == local.stdout.replace(str(model), f"{NAME}@{REVISION}", 1)
    listed = run_json(modicum, "inspect", model)
    remote = command(double, tmp_path, "inspect", NAME, "--json")
    assert remote.json == listed | {"revision": REVISION}


@pytest.mark.parametrize("page", ["README.md", "docs/guide/plan.md"])
def test_the_command_of_a_page_plans(
    root: Path, double: HubDouble, modicum: Path, tmp_path: Path, page: str
) -> None:
    """Of a model with the page's shapes, of which two layers are on the hub."""
    (text,) = re.findall(r"^uvx modicum (plan Qwen/\S+ .*)$", (root / page).read_text(), re.M)
    verb, _, *flags = text.split()
    double.folder = tmp_path / "model"
    words = ("--arch", "qwen3-30b-a3b", "--layers", 2, "--sparse")
    run_json(modicum, "synth", double.folder, *words)
    done = command(double, tmp_path, verb, NAME, *flags)
    assert done.code == 0 and done.stdout.startswith("fits: budget 256.00 GiB"), done.stderr


def test_the_page_names_the_model(double: HubDouble, model: Path, tmp_path: Path) -> None:
    done = command(double, tmp_path, "plan", NAME, "--report", tmp_path / "page.html")
    assert done.code == 0
    page = (tmp_path / "page.html").read_text()
    assert f"modicum plan {NAME}" in page and "modicum-headers-" not in page


def test_a_cached_model_is_not_asked_for(
    modicum: Path, double: HubDouble, model: Path, tmp_path: Path
) -> None:
    """Its answer has the revision, too."""
    snapshot = tmp_path / "hub/models--org--model/snapshots/abc"
    snapshot.parent.mkdir(parents=True)
    snapshot.symlink_to(model)
    (snapshot.parents[1] / "refs").mkdir()
    (snapshot.parents[1] / "refs/main").write_text("abc")
    done = command(double, tmp_path, "plan", NAME, "--json")
    assert done.json["revision"] == "abc" and not double.requests
    assert "revision" not in command(double, tmp_path, "plan", model, "--json").json


def test_a_model_of_which_the_cache_has_no_weights_is_asked_for(
    double: HubDouble, model: Path, tmp_path: Path
) -> None:
    """As after AutoTokenizer.from_pretrained, or a download that has ended early."""
    snapshot = tmp_path / "hub/models--org--model/snapshots/abc"
    snapshot.mkdir(parents=True)
    for name in ("tokenizer.json", "model.safetensors.index.json"):
        (snapshot / name).write_text("{}")
    (snapshot.parents[1] / "refs").mkdir()
    (snapshot.parents[1] / "refs/main").write_text("abc")
    assert command(double, tmp_path, "plan", NAME, "--json").json["revision"] == REVISION
    (snapshot / "model.safetensors.index.json").unlink()
    assert command(double, tmp_path, "inspect", NAME, "--json").json["revision"] == REVISION


@pytest.mark.parametrize("damage", ["absent", "dangling"])
def test_a_model_of_which_the_cache_has_a_part_is_asked_for(
    double: HubDouble, model: Path, tmp_path: Path, damage: str
) -> None:
    """A download that has ended early, or whose blobs were removed."""
    snapshot = tmp_path / "hub/models--org--model/snapshots/abc"
    shutil.copytree(model, snapshot)
    (snapshot.parents[1] / "refs").mkdir()
    (snapshot.parents[1] / "refs/main").write_text("abc")
    assert command(double, tmp_path, "plan", NAME, "--json").json["revision"] == "abc"
    shard = max(snapshot.glob("*.safetensors"))
    shard.unlink()
    if damage == "dangling":
        shard.symlink_to("../../blobs/absent")
    assert command(double, tmp_path, "plan", NAME, "--json").json["revision"] == REVISION
    for verb, more in (("load", {}), ("plan", {"HF_HUB_OFFLINE": "1"})):
        done = command(double, tmp_path, verb, NAME, "--json", **more)
        assert done.code == 13 and "`hf download" in done.error["expected"], verb


# ---- refusals


@pytest.mark.parametrize(
    ("files", "category"),
    [
        (["pytorch_model.bin", "config.json"], "FORMAT.PICKLE"),
        (["README.md"], "IO"),
        ([], "IO"),
        (["a.safetensors", "b.safetensors"], "INDEX.AMBIGUOUS"),
        (["model.safetensors.index.json", "b.safetensors.index.json"], "INDEX.AMBIGUOUS"),
        (["model.safetensors.index.json"], "INDEX.MISSING_SHARD"),
        (["model.safetensors.index.json", "model-1.safetensors"], "INDEX.MISSING_TENSOR"),
        (["../model-1.safetensors.index.json", "x"], "IO"),
    ],
)
def test_a_checkpoint_is_refused_as_the_local_one(
    modicum: Path, double: HubDouble, tmp_path: Path, files: list[str], category: str
) -> None:
    double.folder = tmp_path / "model"
    double.folder.mkdir()
    header = b'{"v":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}'
    data = len(header).to_bytes(8, "little") + header + b"\0"
    index = json.dumps({"weight_map": {"w": "model-1.safetensors"}})
    for name in files:
        if "/" not in name:
            content = data if name.endswith(".safetensors") else index.encode()
            (double.folder / name).write_bytes(content)
    double.files = files
    local = run(modicum, "inspect", double.folder, "--json")
    remote = command(double, tmp_path, "inspect", NAME, "--json")
    double.files = None
    assert local.error["category"] == category
    if category == "INDEX.AMBIGUOUS":  # the user has no path of one of them
        assert f"`hf download {NAME}`" in remote.error["expected"]
        assert (remote.code, remote.error["file"]) == (local.code, local.error["file"])
        return
    assert (remote.code, remote.stdout) == (local.code, local.stdout)


@pytest.mark.parametrize("prefix", [b"\0" * 8, (10**8 + 1).to_bytes(8, "little"), b"\xff" * 8,
                                    (100).to_bytes(8, "little"), b"<!DOCTYPE html>"])  # fmt: skip
def test_a_header_is_refused_as_the_local_one(
    modicum: Path, double: HubDouble, tmp_path: Path, prefix: bytes
) -> None:
    double.folder = tmp_path / "model"
    double.folder.mkdir()
    with open(double.folder / "model.safetensors", "wb") as file:
        file.write(prefix)
        file.truncate(2 * 10**8)
    local = run(modicum, "plan", double.folder, "--json")
    remote = command(double, tmp_path, "plan", NAME, "--json")
    assert local.error["category"].startswith("FORMAT.")
    assert (remote.code, remote.stdout) == (local.code, local.stdout)


def test_a_model_that_the_hub_lacks_is_named(
    double: HubDouble, model: Path, tmp_path: Path
) -> None:
    double.fault = lambda handler, _request: handler.answer(404, b"") or True
    done = command(double, tmp_path, "plan", "other/model", "--json")
    double.fault = None
    assert done.code == 13 and "the hub has no such model" in done.error["message"]
    assert done.stderr.startswith("modicum: IO: ")


def test_offline_no_hub_is_asked(double: HubDouble, model: Path, tmp_path: Path) -> None:
    for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"):
        done = command(double, tmp_path, "plan", NAME, "--json", **{name: "1"})
        assert done.code == 13 and "HF_HUB_OFFLINE" in done.error["message"]
    assert not double.requests


def test_a_temporary_directory_that_can_not_be_made_is_named(
    double: HubDouble, model: Path, tmp_path: Path
) -> None:
    launcher = "import sys, tempfile; tempfile.tempdir = '/nowhere'; sys.argv = sys.argv[1:];"
    launcher += "from modicum.cli import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", launcher, "modicum", "plan", NAME, "--json"],
        env=environment(double, tmp_path), capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 13, done.stderr
    assert "no temporary directory" in json.loads(done.stdout)["error"]["message"]


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 21), (signal.SIGINT, 130)])
def test_a_signal_ends_the_command_and_leaves_no_file(
    double: HubDouble, model: Path, tmp_path: Path, number: signal.Signals, code: int
) -> None:
    arrived, released = threading.Event(), threading.Event()

    def wait(*_request: object) -> bool:
        arrived.set()
        return not released.wait(30)

    double.fault = wait
    process = start(double, tmp_path, "plan", NAME, "--json")
    assert arrived.wait(60)
    process.send_signal(number)
    stdout, _stderr = process.communicate(timeout=5)
    released.set()
    double.fault = None
    assert process.returncode == code and json.loads(stdout)["error"]["code"] == code
    assert [*(tmp_path / "tmp").iterdir()] == []


def test_other_words_ask_no_hub(double: HubDouble, model: Path, tmp_path: Path) -> None:
    done = command(double, tmp_path, "plan", NAME, "--no-flag", "--json")
    assert done.code == 2 and "--no-flag" in done.error["message"]
    done = command(double, tmp_path, "plan", model, "--recipe", "org/recipe", "--json")
    assert done.code == 13 and "recipe" in done.error["message"]
    for verb in ("load", "convert", "verify"):
        out = ["out"] if verb == "convert" else []
        done = command(double, tmp_path, verb, NAME, *out, "--json")
        assert done.code == 13 and "`uvx modicum plan`" in done.error["expected"]
    assert command(double, tmp_path, "plan", "--help", NAME).code == 0
    assert command(double, tmp_path, "plan", NAME, "--report", NAME).code == 13  # which of the two?
    for words in ((os.fsdecode(b"\xff/x"),), (NAME, "--recipe", os.fsdecode(b"\xff"), "--no-flag")):
        assert command(double, tmp_path, "plan", *words).code in (2, 13)
    assert not double.requests


def test_the_program_alone_names_the_command(modicum: Path, tmp_path: Path) -> None:
    for verb in ("plan", "inspect"):
        done = run(modicum, verb, NAME, "--json")
        assert done.code == 13 and done.error["category"] == "IO"
        assert "`uvx modicum plan`" in done.error["expected"]


def test_a_directory_of_headers_is_never_loaded(
    modicum: Path, double: HubDouble, model: Path, tmp_path: Path
) -> None:
    from modicum.hub.client import Hub, Patience
    from modicum.hub.settings import Settings
    from modicum.hub.snapshot import fetch

    (tmp_path / "fetched").mkdir()
    hub = Hub(Settings(endpoint=double.endpoint), Patience())
    directory = fetch(hub, NAME, tmp_path / "fetched").directory
    assert run(modicum, "plan", directory).code == 0
    for words in (["load"], ["save", tmp_path / "run", "--step", 1],
                  ["convert", tmp_path / "out"], ["diff", model], ["verify"]):  # fmt: skip
        done = run(modicum, words[0], directory, *words[1:], "--json")
        assert done.code == 2 and done.error["category"] == "UNSUPPORTED", words
        assert "only the headers" in done.error["message"]
    assert not (tmp_path / "run").exists() and not (tmp_path / "out").exists()
