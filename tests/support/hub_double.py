"""A double of the Hugging Face Hub over TLS: a hub that lists a model's files and redirects to a
second host, which serves ranges of them. Each request is recorded; faults are set by a test."""

import contextlib
import json
import re
import ssl
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote

NAME, REVISION = "org/model", "0123456789abcdef0123456789abcdef01234567"
TOKEN = "hf_secretTokenOfTheTest"
SIGNATURE = "Signature=secretOfTheUrl"
RANGE = re.compile(r"bytes=(\d+)-(\d+)")


@dataclass
class Request:
    """A request that has arrived."""

    host: str
    """hub, or cdn."""
    path: str
    headers: dict[str, str]


# Answers a request in place of the double, if it returns True.
Fault = Callable[["Handler", Request], bool]


@dataclass
class HubDouble:
    folder: Path
    """The files of the model."""
    hub_port: int = 0
    cdn_port: int = 0
    scheme: str = "https"
    round_trip_s: float = 0.0
    files: list[str] | None = None
    """Names in the list of files; None: those of the folder."""
    fault: Fault | None = None
    requests: list[Request] = field(default_factory=list)
    tokens: set[str] = field(default_factory=set)
    """Hosts that have received an Authorization."""

    @property
    def endpoint(self) -> str:
        return f"{self.scheme}://localhost:{self.hub_port}"

    @property
    def cdn(self) -> str:
        return f"{self.scheme}://127.0.0.1:{self.cdn_port}"

    def listed(self) -> list[str]:
        if self.files is not None:
            return self.files
        return sorted(
            str(path.relative_to(self.folder)) for path in self.folder.rglob("*") if path.is_file()
        )

    def paths(self, host: str) -> list[str]:
        return [request.path for request in self.requests if request.host == host]


class Handler(BaseHTTPRequestHandler):
    """Answers the requests to one of the two hosts."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    double: HubDouble
    host: str

    def do_GET(self) -> None:
        self.path = re.sub("^http://[^/]*", "", self.path)  # a proxy sends the whole URL
        request = Request(self.host, self.path, dict(self.headers.items()))
        self.double.requests.append(request)
        if "Authorization" in request.headers:
            self.double.tokens.add(self.host)
        time.sleep(self.double.round_trip_s)
        if self.double.fault and self.double.fault(self, request):
            return
        if self.host == "cdn":
            self.send_range(self.path.partition("?")[0])
        elif self.path.startswith("/api/"):
            self.send_list()
        else:
            self.send_file()

    def send_list(self) -> None:
        siblings = [{"rfilename": name} for name in self.double.listed()]
        document = {"id": NAME, "sha": REVISION, "siblings": siblings, "private": False}
        self.answer(200, json.dumps(document).encode())

    def send_file(self) -> None:
        """Data files redirect to the CDN, as files in LFS do; the hub itself sends texts."""
        prefix = f"/{NAME}/resolve/{REVISION}/"
        if not self.path.startswith(prefix):
            return self.answer(404, b"", **{"X-Error-Code": "RepoNotFound"})
        file = self.path.removeprefix(prefix)
        if not (self.double.folder / unquote(file)).is_file():
            return self.answer(404, b"", **{"X-Error-Code": "EntryNotFound"})
        revision = {"X-Repo-Commit": REVISION}
        if file.endswith(".safetensors"):
            location = f"{self.double.cdn}/{file}?{SIGNATURE}"
            return self.answer(302, b"Found", **revision, Location=location)
        return self.answer(200, (self.double.folder / unquote(file)).read_bytes(), **revision)

    def send_range(self, path: str, etag: str = '"etag"') -> None:
        file = self.double.folder / unquote(path.removeprefix("/"))
        size = file.stat().st_size
        match = RANGE.fullmatch(self.headers.get("Range", ""))
        if not match or int(match[1]) >= size:
            return self.answer(416, b"", **{"Content-Range": f"bytes */{size}"})
        begin, end = int(match[1]), min(int(match[2]) + 1, size)
        if self.headers.get("If-Range", etag) != etag:
            return self.answer(200, file.read_bytes(), ETag=etag)
        with open(file, "rb") as data:
            data.seek(begin)
            body = data.read(end - begin)
        of_range = f"bytes {begin}-{end - 1}/{size}"
        return self.answer(206, body, **{"Content-Range": of_range}, ETag=etag)

    def answer(self, status: int, body: bytes, **headers: str) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_words: object) -> None:
        pass


class Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 64
    context: ssl.SSLContext | None = None
    handshake_s = 0.0

    def finish_request(self, request, address) -> None:
        """TLS is agreed on in the connection's own thread."""
        if self.context:
            request.settimeout(10)
            time.sleep(self.handshake_s)
            request = self.context.wrap_socket(request, server_side=True)
            request.settimeout(None)
        super().finish_request(request, address)

    def handle_error(self, *_request: object) -> None:
        """A client that leaves early is no error."""


def certificate(folder: Path) -> Path:
    """A certificate and its key for both hosts, in one file."""
    key, path = folder / "key.pem", folder / "certificate.pem"
    command = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2"
    command += " -subj /CN=localhost -addext subjectAltName=DNS:localhost,IP:127.0.0.1"
    words = [*command.split(), "-keyout", str(key), "-out", str(path)]
    subprocess.run(words, check=True, capture_output=True)
    path.write_bytes(path.read_bytes() + key.read_bytes())
    return path


@contextlib.contextmanager
def serving(double: HubDouble, pem: Path | None) -> Iterator[HubDouble]:
    """Serves the double until the end of the block; without a certificate by plain HTTP."""
    servers = {}
    for host in ("hub", "cdn"):
        handler = type(host, (Handler,), {"double": double, "host": host})
        server = servers[host] = Server(("127.0.0.1", 0), handler)
        if pem:
            server.context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            server.context.load_cert_chain(pem)
        server.handshake_s = 2 * double.round_trip_s
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    double.scheme = "https" if pem else "http"
    double.hub_port, double.cdn_port = (server.server_port for server in servers.values())
    try:
        yield double
    finally:
        for server in servers.values():
            server.shutdown()
            server.server_close()
