"""Headers from the hub: their requests, and each way in which a hub, a network or a file can fail.

A double of the hub serves over TLS, with its data files on a second host. Catches: a token that
reaches another host, or a message; a name of the hub's list or of an index that is a path; an
answer that is not the part asked for; a request that is repeated without end, or not at all.
"""

import dataclasses
import email.utils
import errno
import io
import json
import os
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hub_double import (
    NAME,
    REVISION,
    SIGNATURE,
    TOKEN,
    Fault,
    Handler,
    HubDouble,
    Request,
    certificate,
    serving,
)
from program import run_json

from modicum import errors
from modicum.hub import client
from modicum.hub.client import Hub, Patience
from modicum.hub.settings import Settings, settings_of
from modicum.hub.snapshot import HEADERS_FILE, Snapshot, fetch

QUICK = Patience(first_wait_s=0.005, longest_wait_s=1, longest_s=20)
PROXIES = [f"{name}_proxy" for name in ("http", "https", "all", "no")]


@pytest.fixture(scope="module")
def pem(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return certificate(tmp_path_factory.mktemp("certificate"))


@pytest.fixture(scope="module")
def model(modicum: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small MoE in several files."""
    folder = tmp_path_factory.mktemp("hub") / "model"
    run_json(modicum, "synth", folder, "--arch", "tiny-moe", "--shard-size", 800)
    assert len([*folder.glob("*.safetensors")]) > 2
    return folder


@pytest.fixture(autouse=True)
def no_surroundings(monkeypatch: pytest.MonkeyPatch, pem: Path) -> None:
    for name in (*PROXIES, *map(str.upper, PROXIES)):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("SSL_CERT_FILE", str(pem))


@pytest.fixture
def double(model: Path, pem: Path) -> Iterator[HubDouble]:
    with serving(HubDouble(model), pem) as double:
        yield double


@pytest.fixture
def edited(double: HubDouble, tmp_path: Path) -> HubDouble:
    """A double whose files a test may change."""
    double.folder = tmp_path / "edited"
    double.folder.mkdir()
    return double


def fetched(
    double: HubDouble, tmp_path: Path, patience: Patience = QUICK, **settings: Any
) -> Snapshot:
    folder = tmp_path / "fetched"
    folder.mkdir()
    known = Settings(**{"endpoint": double.endpoint, "token": TOKEN, "timeout_s": 5, **settings})
    return fetch(Hub(known, patience), NAME, folder)


def failed(double: HubDouble, tmp_path: Path, category: str = "IO", **more: Any) -> errors.Error:
    """The error of a fetch, which has no secret in it and sends none to another host."""
    with pytest.raises(errors.Error) as caught:
        fetched(double, tmp_path, **more)
    assert caught.value.category == category, caught.value
    text = f"{caught.value} {vars(caught.value)} {caught.value.__cause__}"
    assert TOKEN not in text and SIGNATURE not in text and "Bearer" not in text
    assert double.tokens <= {"hub"}
    return caught.value


def on(host: str, part: str, answer: Callable[[Handler], object], times: int = -1) -> Fault:
    """A fault: the first `times` requests to `host` with `part` in their path get this answer."""
    count = [times]

    def fault(handler: Handler, request: Request) -> bool:
        if request.host != host or part not in request.path or count[0] == 0:
            return False
        count[0] -= 1
        answer(handler)
        return True

    return fault


def status(code: int, **headers: str) -> Callable[[Handler], object]:
    fields = {name.replace("_", "-"): value for name, value in headers.items()}
    return lambda handler: handler.answer(code, b"a text with hf_secret", **fields)


def cut(handler: Handler) -> None:
    """Resets the connection."""
    linger = struct.pack("ii", 1, 0)
    handler.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
    handler.close_connection = True
    handler.connection.close()


def to(url: str) -> Callable[[Handler], object]:
    return status(302, Location=url)


# ---- requests and files


def test_the_snapshot_has_true_headers_sizes_and_texts(double: HubDouble, tmp_path: Path) -> None:
    snapshot = fetched(double, tmp_path)
    files = {path.name for path in double.folder.iterdir()}
    assert {path.name for path in snapshot.directory.iterdir()} == {*files, HEADERS_FILE}
    assert (snapshot.directory / HEADERS_FILE).read_text() == f"{NAME}@{REVISION}\n"
    assert snapshot.files == len([*double.folder.glob("*.safetensors")])
    for name in files:
        theirs, ours = (double.folder / name).read_bytes(), (snapshot.directory / name).read_bytes()
        end = 8 + int.from_bytes(theirs[:8], "little")
        assert len(ours) == len(theirs), name
        if name.endswith(".safetensors"):
            assert ours[:end] == theirs[:end] and not any(ours[end:]) and any(theirs[end:]), name
        elif name in ("config.json", "model.safetensors.index.json"):
            assert ours == theirs, name
    assert double.tokens == {"hub"}
    resolved = [path for path in double.paths("hub") if "/resolve/" in path]
    assert resolved and all(f"/resolve/{REVISION}/" in path for path in resolved)


def test_a_header_that_is_longer_than_the_guess_is_read_by_a_second_request(
    edited: HubDouble, tmp_path: Path
) -> None:
    names = [f"{'n' * 100}{number}" for number in range(2000)]
    header = json.dumps({
        name: {"dtype": "U8", "shape": [1], "data_offsets": [at, at + 1]}
        for at, name in enumerate(names)
    }).encode()  # fmt: skip
    data = len(header).to_bytes(8, "little") + header + bytes(len(names))
    (edited.folder / "model.safetensors").write_bytes(data)
    snapshot = fetched(edited, tmp_path)
    assert (snapshot.directory / "model.safetensors").read_bytes() == data
    ranges = [request.headers.get("Range") for request in edited.requests if request.host == "cdn"]
    assert ranges == ["bytes=0-131071", f"bytes=131072-{len(header) + 7}"]
    assert edited.requests[-1].headers["If-Range"] == '"etag"'


@pytest.mark.parametrize("size", [0, 1, 7, 8, 100])
def test_a_file_that_is_shorter_than_the_guess_is_read_as_it_is(
    edited: HubDouble, tmp_path: Path, size: int
) -> None:
    data = bytes([255]) * size  # from 8 bytes on, a header of 2^64 - 1 bytes
    (edited.folder / "model.safetensors").write_bytes(data)
    snapshot = fetched(edited, tmp_path)
    assert (snapshot.directory / "model.safetensors").read_bytes() == data


def test_a_name_that_is_a_path_is_neither_read_nor_written(
    edited: HubDouble, tmp_path: Path
) -> None:
    outside = tmp_path / "outside.safetensors"
    names = ["../outside.safetensors", str(outside), "..", ".", "", "a/b.safetensors", ".x", "\0",
             "a\\b.safetensors", "\ud800.safetensors", "n" * 300, "COMMIT", HEADERS_FILE,
             "\n"]  # fmt: skip
    weights = {"w": "../outside.safetensors", "v": str(outside), "u": "absent.safetensors", "t": 1}
    index = json.dumps({"weight_map": weights})
    (edited.folder / "model.safetensors.index.json").write_text(index)
    edited.files = [*names, "model.safetensors.index.json"]
    snapshot = fetched(edited, tmp_path)
    found = {str(path.relative_to(tmp_path / "fetched")) for path in tmp_path.rglob("fetched/**/*")}
    expected = {"model", f"model/{HEADERS_FILE}", "model/model.safetensors.index.json"}
    assert found == expected and not outside.exists() and snapshot.files == 0
    assert edited.paths("cdn") == []


@pytest.mark.parametrize(
    "text", ["{", "[]", '{"weight_map": 1}', "[" * 100_000, "9" * 5000, "\xff"]
)
def test_a_malformed_index_is_left_to_the_program(
    edited: HubDouble, tmp_path: Path, text: str
) -> None:
    index = edited.folder / "model.safetensors.index.json"
    index.write_bytes(text.encode("latin-1"))
    snapshot = fetched(edited, tmp_path)
    assert (snapshot.directory / index.name).read_bytes() == index.read_bytes()


@pytest.mark.parametrize(
    "answer",
    [b"", b"[]", b'"x"', b'{"sha": 1, "siblings": []}', b'{"sha": "../x", "siblings": []}',
     b'{"sha": "", "siblings": []}', b'{"sha": "a", "siblings": [1]}', b'{"siblings": []}',
     b'{"sha": "a", "siblings": [{"rfilename": []}]}', b"[" * 100_000],
)  # fmt: skip
def test_a_malformed_list_is_refused(double: HubDouble, tmp_path: Path, answer: bytes) -> None:
    double.fault = on("hub", "/api/", lambda handler: handler.answer(200, answer))
    assert "list" in str(failed(double, tmp_path))


def test_a_model_of_too_many_files_is_refused(double: HubDouble, tmp_path: Path) -> None:
    double.files = [f"{number}.safetensors" for number in range(10_001)]
    assert failed(double, tmp_path, "UNSUPPORTED").got == "10001 files"


def test_headers_that_are_too_long_together_are_refused(
    double: HubDouble, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client, "MOST_BYTES", 1000)
    assert "too long" in str(failed(double, tmp_path, "UNSUPPORTED"))


# ---- refusals of the hub


@pytest.mark.parametrize(
    ("code", "headers", "token", "what", "expected"),
    [
        (401, {"X_Error_Code": "RepoNotFound"}, None, "no such model, or it is pri", "HF_TOKEN"),
        (401, {}, TOKEN, "no such model, or it is private", "an account that has access"),
        (401, {"X_Error_Message": "Invalid credentials in Authorization header"}, TOKEN,
         "does not accept the token", "a valid HF_TOKEN"),
        (401, {"X_Error_Code": "GatedRepo"}, None, "is gated", "HF_TOKEN"),
        (403, {"X_Error_Code": "GatedRepo"}, TOKEN, "is gated", "asked for on its page"),
        (403, {}, TOKEN, "denies access", "an account that has access"),
        (404, {"X_Error_Code": "RepoNotFound"}, None, "no such model", "ORG/NAME"),
        (418, {}, None, "does not answer the request", ""),
    ],
)  # fmt: skip
@pytest.mark.parametrize("part", ["/api/", "/resolve/"])
def test_a_refusal_is_named_and_not_repeated(
    double: HubDouble, tmp_path: Path, part: str, code: int, headers: dict[str, str],
    token: str | None, what: str, expected: str,
) -> None:  # fmt: skip
    double.fault = on("hub", part, status(code, **headers))
    error = failed(double, tmp_path, token=token)
    if code != 404 or part == "/api/":
        assert what in str(error) and expected in (error.expected or "")
    assert error.got == f"{code} from localhost:{double.hub_port}" and error.code == 13
    assert len(double.paths("hub")) <= (1 if part == "/api/" else 3)


def test_a_refusal_of_the_other_host_is_named(double: HubDouble, tmp_path: Path) -> None:
    double.fault = on("cdn", "", status(403))
    error = failed(double, tmp_path)
    assert "does not send the file" in str(error) and error.file
    assert error.got == f"403 from 127.0.0.1:{double.cdn_port}"


# ---- failures that pass, and that do not


@pytest.mark.parametrize("code", [408, 429, 500, 502, 503, 504])
@pytest.mark.parametrize(("host", "part"), [("hub", "/api/"), ("cdn", "")])
def test_a_failure_that_passes_is_repeated(
    double: HubDouble, tmp_path: Path, host: str, part: str, code: int
) -> None:
    double.fault = on(host, part, status(code), times=3)
    assert fetched(double, tmp_path).files > 2


@pytest.mark.parametrize("code", [429, 503])
def test_a_failure_that_does_not_pass_ends(double: HubDouble, tmp_path: Path, code: int) -> None:
    double.fault = on("hub", "/api/", status(code))
    assert failed(double, tmp_path).got == f"{code} from localhost:{double.hub_port}"
    assert len(double.requests) == QUICK.attempts


def test_a_hub_that_limits_requests_is_asked_again_when_it_says(
    double: HubDouble, tmp_path: Path
) -> None:
    double.fault = on("hub", "/api/", status(429, Retry_After="1"), times=1)
    begin_s = time.monotonic()
    assert fetched(double, tmp_path).files > 2
    assert time.monotonic() - begin_s >= 1


@pytest.mark.parametrize("name", ["Retry_After", "date", "RateLimit"])
def test_a_hub_that_asks_for_a_long_wait_is_not_asked_again(
    double: HubDouble, tmp_path: Path, name: str
) -> None:
    until = email.utils.formatdate(time.time() + 3601, usegmt=True)
    value = {"Retry_After": "3600", "date": until, "RateLimit": '"api";r=0;t=3600'}[name]
    headers = {"Retry_After" if name == "date" else name: value}
    double.fault = on("hub", "/api/", status(429, **headers))
    error = failed(double, tmp_path)
    assert error.expected in ("a command after 3600 s", "a command after 3601 s")
    assert "limits the rate" in str(error) and len(double.requests) == 1


@pytest.mark.parametrize(("host", "part"), [("hub", "/api/"), ("hub", "/resolve/"), ("cdn", "")])
def test_a_connection_that_is_cut_is_opened_again(
    double: HubDouble, tmp_path: Path, host: str, part: str
) -> None:
    double.fault = on(host, part, cut, times=2)
    assert fetched(double, tmp_path).files > 2


def test_a_connection_that_is_always_cut_is_named(double: HubDouble, tmp_path: Path) -> None:
    double.fault = on("hub", "", cut)
    error = failed(double, tmp_path)
    assert "can't be reached" in str(error) and "in the cache" in str(error.expected)
    assert len(double.requests) == QUICK.attempts


def test_an_answer_that_ends_early_is_repeated_and_named(double: HubDouble, tmp_path: Path) -> None:
    def short(handler: Handler) -> None:
        last = int(handler.headers["Range"].partition("-")[2])
        handler.send_response(206)
        handler.send_header("Content-Range", f"bytes 0-{last}/1000000")
        handler.send_header("Content-Length", f"{last + 1}")
        handler.end_headers()
        handler.wfile.write(bytes(10))
        handler.close_connection = True

    double.fault = on("cdn", "", short)
    error = failed(double, tmp_path)
    assert "ends early" in str(error) and str(error.got).startswith("10 bytes, then ")
    assert len(double.paths("cdn")) >= QUICK.attempts


@pytest.mark.parametrize("name", ["config.json", "model.safetensors.index.json"])
def test_an_attempt_that_fails_leaves_no_bytes(
    double: HubDouble, tmp_path: Path, name: str
) -> None:
    """Of a page in place of the file, say, that is longer than the file and is cut."""

    def page(handler: Handler) -> None:
        handler.send_response(200)
        handler.send_header("Content-Length", "200000")
        handler.end_headers()
        handler.wfile.write(b"<html>" + bytes(100_000))
        handler.close_connection = True

    double.fault = on("hub", f"/{name}", page, times=2)
    directory = fetched(double, tmp_path).directory
    assert (directory / name).read_bytes() == (double.folder / name).read_bytes()


def test_more_header_lines_than_python_reads_are_named(double: HubDouble, tmp_path: Path) -> None:
    double.fault = on("hub", "/api/", status(200, **{f"X_{number}": "1" for number in range(200)}))
    error = failed(double, tmp_path)
    assert "sends no usable answer" in str(error) and error.got == "more than 100 header lines"


def test_a_hub_that_never_answers_is_asked_twice(double: HubDouble, tmp_path: Path) -> None:
    released = threading.Event()
    double.fault = on("hub", "/api/", lambda _handler: released.wait(20))
    begin_s = time.monotonic()
    error = failed(double, tmp_path, timeout_s=0.2)
    released.set()
    assert error.got == "no answer for 0.2 s" and time.monotonic() - begin_s < 10
    assert len(double.requests) == QUICK.slow_attempts


def test_an_answer_that_drips_ends(double: HubDouble, tmp_path: Path) -> None:
    def drip(handler: Handler) -> None:
        handler.send_response(200)
        handler.send_header("Content-Length", "100000")
        handler.end_headers()
        for _byte in range(200):
            handler.wfile.write(b"x")
            time.sleep(0.05)

    double.fault = on("hub", "/api/", drip)
    patience = dataclasses.replace(QUICK, longest_s=1)
    error = failed(double, tmp_path, patience=patience)
    assert "take too long" in str(error) and error.got == "no end after 1 s"


def test_an_unknown_host_and_a_closed_port_are_named(double: HubDouble, tmp_path: Path) -> None:
    error = failed(double, tmp_path, endpoint="https://127.0.0.1:9")
    assert "127.0.0.1:9 can't be reached" in str(error)
    (tmp_path / "fetched").rmdir()
    error = failed(double, tmp_path, endpoint="https://no-such-host.invalid")
    assert "no-such-host.invalid" in str(error)


def test_a_certificate_that_is_not_trusted_is_named(
    double: HubDouble, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "absent.pem"))
    error = failed(double, tmp_path)
    assert "is not trusted" in str(error) and "SSL_CERT_FILE" in str(error.expected)
    assert not double.requests


# ---- answers that are not those asked for


def test_a_server_that_ignores_ranges_is_refused(double: HubDouble, tmp_path: Path) -> None:
    double.fault = on("cdn", "", lambda handler: handler.answer(200, bytes(1 << 20)))
    error = failed(double, tmp_path)
    assert error.got == "all 1048576 bytes: it ignores ranges" and error.file


def test_a_short_file_may_come_as_a_whole(edited: HubDouble, tmp_path: Path) -> None:
    header = b'{"w":{"dtype":"U8","shape":[2],"data_offsets":[0,2]}}'
    data = len(header).to_bytes(8, "little") + header + b"\1\2"
    (edited.folder / "model.safetensors").write_bytes(data)
    edited.fault = on("cdn", "", lambda handler: handler.answer(200, data))
    snapshot = fetched(edited, tmp_path)
    assert (snapshot.directory / "model.safetensors").read_bytes() == data[:-2] + b"\0\0"


@pytest.mark.parametrize(
    "of_range",
    ["bytes 0--1/9", "bytes -5-9/9", "bytes 1-9/100", "bytes 0-9/0", "bytes 0-99999999/999999999",
     "bytes 0-9/*", "bytes 9-0/100", "bytes 0-" + "9" * 30 + "/" + "9" * 30, "items 0-9/10", ""],
)  # fmt: skip
def test_another_range_is_refused(double: HubDouble, tmp_path: Path, of_range: str) -> None:
    answer = status(206, Content_Range=of_range)
    double.fault = on("cdn", "", answer)
    assert "does not send the part" in str(failed(double, tmp_path))


def test_a_compressed_file_is_refused(double: HubDouble, tmp_path: Path) -> None:
    double.fault = on("hub", "/api/", status(200, Content_Encoding="gzip"))
    assert failed(double, tmp_path).got == "a compressed file"


def test_a_size_that_no_file_can_have_is_named(double: HubDouble, tmp_path: Path) -> None:
    def huge(handler: Handler) -> None:
        last = int(handler.headers["Range"].partition("-")[2])
        body = (8).to_bytes(8, "little") + bytes(last - 7)
        handler.answer(206, body, **{"Content-Range": f"bytes 0-{last}/{10**18 * 9 - 1}"})

    double.fault = on("cdn", "", huge)
    assert failed(double, tmp_path).file


@pytest.mark.parametrize("change", ["etag", "size"])
def test_a_file_that_changes_between_requests_is_a_conflict(
    edited: HubDouble, tmp_path: Path, change: str
) -> None:
    path = edited.folder / "model.safetensors"
    path.write_bytes((200_000).to_bytes(8, "little") + bytes(400_000))
    second = [False]

    def fault(handler: Handler, request: Request) -> bool:
        if request.host != "cdn":
            return False
        if not second[0]:
            second[0] = True
            return False
        if change == "size":
            path.write_bytes(bytes(500_000))
        handler.send_range("model.safetensors", '"etag"' if change == "size" else '"other"')
        return True

    edited.fault = fault
    error = failed(edited, tmp_path, "CONFLICT")
    assert error.code == 20 and error.file == "model.safetensors"
    assert "changed between two requests" in str(error)


@pytest.mark.parametrize("tags", [('"a"', 'W/"a"'), ('W/"a"', '"a"'), ('W/"a"', 'W/"a"')])
def test_weak_and_strong_etags_of_one_file_are_equal(
    edited: HubDouble, tmp_path: Path, tags: tuple[str, str]
) -> None:
    (edited.folder / "model.safetensors").write_bytes((200_000).to_bytes(8, "little") + bytes(9**6))
    rest = iter(tags)

    def answer(handler: Handler) -> None:
        del handler.headers["If-Range"]
        handler.send_range("model.safetensors", next(rest))

    edited.fault = on("cdn", "", answer)
    assert fetched(edited, tmp_path).files == 1


def test_another_revision_is_a_conflict(double: HubDouble, tmp_path: Path) -> None:
    double.fault = on("hub", "/resolve/", status(200, X_Repo_Commit="f" * 40))
    error = failed(double, tmp_path, "CONFLICT")
    assert (error.expected, error.got) == (REVISION, "f" * 40)


# ---- redirects


def test_redirects_of_the_hub_are_followed(double: HubDouble, tmp_path: Path) -> None:
    """A model that has another name now."""
    moved = f"/api/models/{NAME}/revision/main?moved"
    double.fault = on("hub", "/revision/main", status(307, Location=moved), times=1)
    assert fetched(double, tmp_path).files > 2
    assert double.paths("hub")[1] == moved


@pytest.mark.parametrize(
    "location",
    ["http://127.0.0.1:9/x?" + SIGNATURE, "ftp://127.0.0.1/x", "file:///etc/passwd", "https://[x",
     "https://127.0.0.1:99999999/", ""],
)  # fmt: skip
def test_a_redirect_that_is_not_followed_is_named(
    double: HubDouble, tmp_path: Path, location: str
) -> None:
    double.fault = on("hub", "/resolve/", to(location))
    assert "redirects to a URL that is not followed" in str(failed(double, tmp_path))


def test_a_loop_of_redirects_ends(double: HubDouble, tmp_path: Path) -> None:
    double.fault = on("hub", "/api/", to("/api/again?" + SIGNATURE))
    assert "redirects more than 5 times" in str(failed(double, tmp_path))
    assert len(double.requests) == 6


@pytest.mark.parametrize("location", ["/\x7f?" + SIGNATURE, "/a b?" + SIGNATURE])
def test_a_malformed_location_is_named_without_its_text(
    double: HubDouble, tmp_path: Path, location: str
) -> None:
    double.fault = on("hub", "/api/", to(location))
    assert "malformed" in str(failed(double, tmp_path)) and len(double.requests) == 1


def test_a_user_in_a_redirect_is_not_sent(double: HubDouble, tmp_path: Path) -> None:
    host = f"127.0.0.1:{double.cdn_port}"
    user = to(f"https://user:{SIGNATURE}@{host}/absent")
    double.fault = on("cdn", "/absent", status(404))
    before = double.fault
    redirect = on("hub", "/resolve/", user)
    double.fault = lambda handler, request: before(handler, request) or redirect(handler, request)
    failed(double, tmp_path)
    sent = [request for request in double.requests if request.path == "/absent"]
    assert sent and all(request.headers["Host"] == host for request in sent)


# ---- the temporary directory


def test_a_directory_that_can_not_be_written_is_named(double: HubDouble, tmp_path: Path) -> None:
    (tmp_path / "fetched").mkdir()
    with pytest.raises(errors.IoError, match="IO: "):
        fetch(Hub(Settings(endpoint=double.endpoint), QUICK), NAME, tmp_path / "fetched/absent")


class Disk(io.BytesIO):
    """A file that takes at most `most` bytes at a time, and at most `size` in all."""

    def __init__(self, size: int, most: int) -> None:
        super().__init__()
        self.size, self.most = size, most

    def write(self, data: Any) -> int:
        if not (room := min(self.most, self.size - self.tell())):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return super().write(data[:room])


def test_a_write_that_takes_a_part_is_continued() -> None:
    disk = Disk(size=100, most=7)
    client._write(disk, 0, b"x" * 100, "file")
    client._write(disk, 90, b"y" * 10, "file")
    assert disk.getvalue() == b"x" * 90 + b"y" * 10
    with pytest.raises(errors.IoError) as caught:
        client._write(disk, 95, b"z" * 10, "file")
    assert caught.value.category == "NOSPACE" and caught.value.file == "file"


def test_a_full_disk_is_named(
    double: HubDouble, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = client._write
    monkeypatch.setattr(client, "_write", lambda _file, *rest: write(Disk(3, 9), *rest))
    error = failed(double, tmp_path, "NOSPACE")
    assert error.code == 14 and "TMPDIR" in str(error.expected)


# ---- settings


def test_settings_are_those_of_huggingface_hub(tmp_path: Path) -> None:
    home = tmp_path / "home"
    (home / "huggingface").mkdir(parents=True)
    (home / "huggingface/token").write_text("hf_of_file\n")
    cache = {"XDG_CACHE_HOME": str(home)}
    assert settings_of(cache).token == "hf_of_file"
    assert settings_of({"HF_HOME": str(home / "huggingface")}).token == "hf_of_file"
    assert settings_of({"HF_TOKEN_PATH": str(home / "huggingface/token")}).token == "hf_of_file"
    assert settings_of({"HF_HOME": str(home)}).token is None
    assert settings_of(cache | {"HF_TOKEN": " hf_a\n"}).token == "hf_a"
    for blank in (" ", "\n"):
        assert settings_of(cache | {"HF_TOKEN": blank}).token == "hf_of_file"
    assert settings_of(cache | {"HUGGING_FACE_HUB_TOKEN": "hf_b"}).token == "hf_b"
    assert settings_of(cache | {"HF_HUB_DISABLE_IMPLICIT_TOKEN": "1"}).token is None
    none = {"HF_HOME": str(home)}
    assert settings_of(none).endpoint == "https://huggingface.co"
    assert settings_of(none | {"HF_ENDPOINT": "https://mirror/hf/"}).endpoint == "https://mirror/hf"
    assert not settings_of(none | {"HF_HUB_OFFLINE": "0"}).is_offline
    for name, value in {"HF_HUB_OFFLINE": "yes", "TRANSFORMERS_OFFLINE": "ON"}.items():
        assert settings_of(none | {name: value}).is_offline
    assert settings_of(none | {"HF_HUB_DOWNLOAD_TIMEOUT": "30"}).timeout_s == 30
    assert settings_of(none | {"HF_HUB_DOWNLOAD_TIMEOUT": "0"}).timeout_s == 10
    assert TOKEN not in repr(settings_of(none | {"HF_TOKEN": TOKEN}))


@pytest.mark.parametrize(
    ("name", "value"),
    [("HF_ENDPOINT", value) for value in ("huggingface.co", "ftp://x", "https://u:hf_secret@x",
     "https://", "https://x?hf_secret", "https://[x", "https://x:y", "https://x y")]
    + [("HF_TOKEN", value) for value in ("hf_secret\x01", "hf_secret\u00e9", "hf_ secret")]
    + [("HF_HUB_DOWNLOAD_TIMEOUT", value) for value in ("-1", "x", "1.5", "9" * 20)],
)  # fmt: skip
def test_a_setting_that_can_not_be_used_is_refused(tmp_path: Path, name: str, value: str) -> None:
    with pytest.raises(errors.UsageError) as caught:
        settings_of({"HF_HOME": str(tmp_path), name: value})
    assert "secret" not in str(caught.value)


def test_a_token_file_that_can_not_be_read_is_named(tmp_path: Path) -> None:
    (tmp_path / "token").mkdir()
    with pytest.raises(errors.IoError, match="token"):
        settings_of({"HF_HOME": str(tmp_path)})
    (tmp_path / "latin").write_bytes(b"\xff")
    with pytest.raises(errors.IoError, match="not UTF-8"):
        settings_of({"HF_TOKEN_PATH": str(tmp_path / "latin")})


def test_without_tls_the_token_goes_to_the_hub_of_the_setting(model: Path, tmp_path: Path) -> None:
    with serving(HubDouble(model), None) as double:
        assert fetched(double, tmp_path).files > 2
        assert double.tokens == {"hub"}


# ---- proxies


@pytest.mark.parametrize("is_tls", [True, False])
def test_requests_go_through_a_proxy(
    model: Path, pem: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_tls: bool
) -> None:
    """The proxy sees no token of a request with TLS, and the hosts do not see the proxy's user."""
    with serving(HubDouble(model), pem if is_tls else None) as double:
        with tunnels() as (port, seen):
            monkeypatch.setenv("all_proxy", f"http://user:word@127.0.0.1:{port}")
            assert fetched(double, tmp_path).files > 2
        hosts = {b"localhost:%d" % double.hub_port, b"127.0.0.1:%d" % double.cdn_port}
        assert {
            line.split()[1].removeprefix(b"http://").partition(b"/")[0] for line in seen
        } == hosts
        assert all(line.startswith(b"CONNECT" if is_tls else b"GET") for line in seen)
        assert all(b"Proxy-Authorization: Basic dXNlcjp3b3Jk" in line for line in seen)
        assert not is_tls or TOKEN.encode() not in b"".join(seen)
        if is_tls:
            assert not any("Proxy-Authorization" in one.headers for one in double.requests)


@pytest.mark.parametrize(("code", "times"), [(407, 1), (403, 1), (502, QUICK.attempts)])
def test_a_refusal_of_the_proxy_is_named(
    double: HubDouble, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int, times: int
) -> None:
    refusal = b"HTTP/1.1 %d hf_secret\r\nContent-Length: 0\r\n\r\n" % code
    with tunnels(refusal) as (port, seen):
        monkeypatch.setenv("https_proxy", f"http://user:word@127.0.0.1:{port}")
        error = failed(double, tmp_path)
    assert error.got == f"status {code} from the proxy" and "secret" not in str(error)
    assert f"the proxy 127.0.0.1:{port}" in str(error) and "word" not in str(error)
    assert len(seen) == times


def test_a_proxy_that_wants_a_user_is_named_without_tls(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    refusal = b"HTTP/1.1 407 no\r\nContent-Length: 0\r\n\r\n"
    with serving(HubDouble(model), None) as double, tunnels(refusal) as (port, seen):
        monkeypatch.setenv("http_proxy", f"http://127.0.0.1:{port}")
        error = failed(double, tmp_path)
    assert f"the proxy 127.0.0.1:{port} does not accept the user" in str(error)
    assert "http_proxy=http://USER:PASSWORD@" in str(error.expected) and len(seen) == 1


def test_a_proxy_is_asked_for_an_address_of_ipv6_in_brackets(
    double: HubDouble, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with tunnels(b"HTTP/1.1 403 no\r\n\r\n") as (port, seen):
        monkeypatch.setenv("https_proxy", f"http://127.0.0.1:{port}")
        failed(double, tmp_path, endpoint="https://[2001:db8::1]:8443")
    assert seen[0].startswith(b"CONNECT [2001:db8::1]:8443 HTTP/1.1\r\n")
    assert b"\r\nHost: [2001:db8::1]:8443\r\n" in seen[0]


class tunnels:
    """A proxy, for CONNECT and for requests without TLS. Its value: its port, and the heads of the
    requests that it has read."""

    def __init__(self, refusal: bytes = b"") -> None:
        self.refusal, self.seen = refusal, []

    def __enter__(self) -> tuple[int, list[bytes]]:
        self.server = socket.create_server(("127.0.0.1", 0))
        threading.Thread(target=self.accept, daemon=True).start()
        return self.server.getsockname()[1], self.seen

    def __exit__(self, *_error: object) -> None:
        self.server.close()

    def accept(self) -> None:
        while True:
            try:
                client = self.server.accept()[0]
            except OSError:
                return
            threading.Thread(target=self.serve, args=(client,), daemon=True).start()

    def serve(self, client: socket.socket) -> None:
        head = b""
        while b"\r\n\r\n" not in head:
            piece = client.recv(65536)
            if not piece:
                return client.close()
            head += piece
        self.seen.append(head)
        if self.refusal:
            client.sendall(self.refusal)
            return client.close()
        target = head.split()[1].removeprefix(b"http://").partition(b"/")[0].decode()
        host, _, port = target.partition(":")
        server = socket.create_connection((host, int(port)))
        if head.startswith(b"CONNECT"):
            client.sendall(b"HTTP/1.1 200 yes\r\n\r\n")
        else:
            server.sendall(head)
        threading.Thread(target=self.copy, args=(client, server), daemon=True).start()
        self.copy(server, client)

    def copy(self, source: socket.socket, target: socket.socket) -> None:
        try:
            while piece := source.recv(65536):
                target.sendall(piece)
        except OSError:
            pass
        for end in (source, target):
            end.close()
