"""GET requests to the hub and to the hosts that it redirects to: ranges, redirects, retries, and
limits of time, with the standard library. The token goes to the hub's own origin only."""

import errno
import os
import re
import socket
import ssl
import threading
import time
from dataclasses import dataclass
from http.client import HTTPConnection, HTTPException, HTTPResponse, HTTPSConnection
from typing import IO, NamedTuple

from modicum import _modicum
from modicum.errors import Error, failure
from modicum.hub import failures
from modicum.hub.proxies import RefusedByProxy, Tunnel, proxy_of
from modicum.hub.settings import Settings
from modicum.hub.urls import Origin, Url, parsed, redirected

_MOST_REDIRECTS = 5
_REDIRECTS = frozenset((301, 302, 303, 307, 308))
_PIECE_BYTES = 1 << 16
MOST_BYTES = 1 << 28
"""Of all answers to one client: a hub can't fill the disk."""
_SLOWEST_BYTES_PER_S = 10_000
_RANGE = re.compile(r"bytes ([0-9]{1,18})-([0-9]{1,18})/([0-9]{1,18})")
_EMPTY_FILE = "bytes */0"
# Where systems have their certificates, if OpenSSL's own file has none, as that of uv's Pythons.
_BUNDLES = (
    "/etc/ssl/certs/ca-certificates.crt",
    "/etc/pki/tls/certs/ca-bundle.crt",
    "/etc/ssl/ca-bundle.pem",
    "/etc/ssl/cert.pem",
)


@dataclass(frozen=True)
class Patience:
    attempts: int = 4
    slow_attempts: int = 2
    """If no answer has come in time."""
    first_wait_s: float = 0.5
    """Before the second attempt; each further wait takes twice as long."""
    longest_wait_s: float = 60
    """A server that asks for more is not asked again."""
    longest_s: float = 600
    """Of all requests together."""


class Part(NamedTuple):
    """The bytes of a file that a request is for."""

    file: str
    """Its name, for messages; empty for the list of a model's files."""
    begin: int
    end: int
    is_range: bool
    """Otherwise the whole file, of which at most `end` bytes are read."""
    revision: str | None = None
    """An answer of the hub from another one is refused."""
    etag: str | None = None
    """If the file has another one, it has changed."""


class Answer(NamedTuple):
    end: int
    """Of the bytes that have arrived."""
    total: int | None
    """The size of the file."""
    etag: str | None


class Stop(Exception):
    """Another request has failed."""


class _Failure(Exception):
    """A failure after which the request is repeated."""

    def __init__(self, error: Error, wait_s: float = 0, is_slow: bool = False) -> None:
        super().__init__()
        self.error, self.is_slow = error, is_slow
        self.wait_s = wait_s
        """For which the server asks."""


class Hub:
    """What all requests share. Any thread may use it."""

    def __init__(self, settings: Settings, patience: Patience) -> None:
        self.settings = settings
        self.patience = patience
        self.origin = parsed(settings.endpoint).origin
        self.deadline = time.monotonic() + patience.longest_s
        self.stop = threading.Event()
        self.context = _trusting_context()

    def wait(self, seconds: float) -> None:
        if self.stop.wait(seconds):
            raise Stop


class Client:
    """The connections of one thread, which are kept open between requests."""

    def __init__(self, hub: Hub) -> None:
        self.received_bytes = 0
        self._hub = hub
        self._connections: dict[Origin, HTTPConnection] = {}

    def get(self, path: str, part: Part, file: IO[bytes]) -> Answer:
        """Writes a part of the file at `path`, below the hub's endpoint, to the same place in
        `file`, which then ends with it. Raises `IoError`: `CONFLICT` if the file has changed,
        `NOSPACE`, or `IO`."""
        patience = self._hub.patience
        attempt = 0
        while True:
            attempt += 1
            _truncate(file, part)  # a failed attempt may have written more than this one will
            try:
                return self._get(self._hub.settings.endpoint + path, part, file)
            except _Failure as failed:
                most = patience.slow_attempts if failed.is_slow else patience.attempts
                if attempt >= most or failed.wait_s > patience.longest_wait_s:
                    raise failed.error from None
                wait_s = max(failed.wait_s, patience.first_wait_s * 2 ** (attempt - 1))
            self._hub.wait(wait_s)

    def _get(self, url: str, part: Part, file: IO[bytes]) -> Answer:
        for _redirect in range(_MOST_REDIRECTS + 1):
            place = parsed(url)
            response = self._response(place, part)
            try:
                if place.origin == self._hub.origin:
                    _check_revision(response, part)
                if response.status not in _REDIRECTS:
                    return self._answer(response, place.origin, part, file)
                url = redirected(url, response.getheader("Location"))
                _read_rest(response)
            finally:
                if not response.isclosed():  # the rest would begin the next answer
                    self._close(place.origin)
        what = f"{place.origin} redirects more than {_MOST_REDIRECTS} times"
        raise failure("IO", what, file=part.file)

    # ---- connections

    def _response(self, url: Url, part: Part) -> HTTPResponse:
        if self._hub.stop.is_set():
            raise Stop
        was_open = False
        try:
            connection, target, headers = self._connection(url, part)
            was_open = connection.sock is not None
            connection.request("GET", target, headers=headers)
            return connection.getresponse()
        except Error:
            raise
        except RefusedByProxy as refusal:
            self._close(url.origin)
            refused = failures.by_proxy(refusal, url.origin, part.file)
            raise (_Failure(refused) if refusal.status in failures.RETRIED else refused) from None
        except (OSError, HTTPException, ValueError) as error:
            self._close(url.origin)
            is_slow = isinstance(error, TimeoutError)
            if was_open and not is_slow:
                return self._response(url, part)  # the server has closed an idle connection
            timeout_s = self._hub.settings.timeout_s
            unreachable = failures.unreachable(error, url.origin, part.file, timeout_s)
            raise (
                unreachable if _is_final(error) else _Failure(unreachable, is_slow=is_slow)
            ) from None

    def _connection(self, url: Url, part: Part) -> tuple[HTTPConnection, str, dict[str, str]]:
        """A connection, the target of a request on it, and the headers."""
        origin, target = url
        proxy = proxy_of(origin)
        headers = self._headers(origin, part)
        if proxy and origin.scheme == "http":
            target = f"http://{origin}{target}"
            if proxy.authorization:
                headers["Proxy-Authorization"] = proxy.authorization
        connection = self._connections.get(origin)
        if connection is not None:
            return connection, target, headers
        timeout_s, context = self._hub.settings.timeout_s, self._hub.context
        if origin.scheme == "http":
            host, port = (proxy.host, proxy.port) if proxy else (origin.host, origin.port)
            connection = HTTPConnection(host, port, timeout=timeout_s)
        elif proxy:
            connection = Tunnel(origin, proxy, timeout_s, context)
        else:
            connection = HTTPSConnection(
                origin.host, origin.port, timeout=timeout_s, context=context
            )
        self._connections[origin] = connection
        return connection, target, headers

    def _headers(self, origin: Origin, part: Part) -> dict[str, str]:
        headers = {
            "User-Agent": f"modicum/{_modicum.version()}",
            "Accept": "*/*",
            "Accept-Encoding": "identity",
        }
        if self._hub.settings.token and origin == self._hub.origin:
            headers["Authorization"] = f"Bearer {self._hub.settings.token}"
        if part.is_range:
            headers["Range"] = f"bytes={part.begin}-{part.end - 1}"
            if part.etag and not part.etag.startswith("W/"):  # If-Range takes no weak one
                headers["If-Range"] = part.etag
        return headers

    def _close(self, origin: Origin) -> None:
        connection = self._connections.pop(origin, None)
        if connection is not None:
            connection.close()

    # ---- answers

    def _answer(
        self, response: HTTPResponse, origin: Origin, part: Part, file: IO[bytes]
    ) -> Answer:
        """Writes the body of an answer that is no redirect."""
        status, etag = response.status, response.getheader("ETag")
        if status not in (200, 206, 416):
            raise self._refusal(response, origin, part)
        if response.getheader("Content-Encoding", "identity").lower() != "identity":
            raise failures.unusable(origin, part.file, "no Content-Encoding", "a compressed file")
        if part.etag and etag and _opaque(etag) != _opaque(part.etag):
            raise failures.changed(part.file, "one ETag", "another ETag")
        content_range = response.getheader("Content-Range", "").strip()
        if status == 416 and part.begin == 0 and content_range == _EMPTY_FILE:
            return Answer(0, 0, etag)
        total = response.length if status == 200 else None
        end = part.end if total is None else min(total, part.end)
        if part.is_range:
            begin, end, total, got = _sent_range(status, total, content_range)
            if (begin, end) != (part.begin, min(part.end, total)):
                expected = f"bytes {part.begin}-{part.end - 1}"
                raise failures.unusable(origin, part.file, expected, got)
        elif status != 200:
            raise failures.unusable(origin, part.file, "200", f"{status}")
        is_exact = total is not None
        return Answer(
            self._receive(response, origin, part._replace(end=end), file, is_exact), total, etag
        )

    def _receive(
        self,
        response: HTTPResponse,
        origin: Origin,
        part: Part,
        file: IO[bytes],
        is_exact: bool,
    ) -> int:
        """Writes the bytes of a part; fewer of a body that ends before, unless `is_exact`.
        Returns the end in `file`."""
        at, end = part.begin, part.end
        deadline = time.monotonic() + self._hub.settings.timeout_s
        deadline += (end - at) / _SLOWEST_BYTES_PER_S
        cut = ""
        while at < end and not cut:
            try:
                piece = response.read1(min(end - at, _PIECE_BYTES))
            except (OSError, HTTPException) as error:
                piece, cut = b"", failures.reason(error)
            if not piece and not is_exact and not cut:
                return at
            if not piece:
                cut = cut or "the end of the answer"
            _write(file, at, piece, part.file)
            at += len(piece)
            self.received_bytes += len(piece)
            if self._hub.stop.is_set():
                raise Stop
            if self.received_bytes > MOST_BYTES:
                expected = f"at most {MOST_BYTES} bytes on a connection"
                raise failure("UNSUPPORTED", "the model's headers are too long", expected=expected)
            if time.monotonic() > deadline and at < end:
                cut = f"fewer than {_SLOWEST_BYTES_PER_S} bytes in a second"
        if cut:
            expected, got = f"{end - part.begin} bytes", f"{at - part.begin} bytes, then {cut}"
            what = f"the answer of {origin} ends early"
            raise _Failure(failure("IO", what, file=part.file, expected=expected, got=got))
        _read_rest(response)
        return end

    def _refusal(self, response: HTTPResponse, origin: Origin, part: Part) -> Exception:
        """The failure of an answer with the status of an error."""
        status, headers = response.status, response.headers
        proxy = proxy_of(origin)
        if status == failures.PROXY_USER and proxy and origin.scheme == "http":
            return failures.by_proxy(RefusedByProxy(proxy, status), origin, part.file)
        is_hub, has_token = origin == self._hub.origin, bool(self._hub.settings.token)
        error = failures.refused(
            status, headers, origin, part.file, is_hub=is_hub, has_token=has_token
        )
        if status not in failures.RETRIED:
            return error
        return _Failure(error, failures.asked_wait_s(status, headers))


def _sent_range(status: int, length: int | None, content_range: str) -> tuple[int, int, int, str]:
    """Begin, end and the file's size of an answer to a request for a range, and these in words. A
    short file may come as a whole. Begin and end are -1 if the answer has none."""
    if status == 200 and length is not None:
        return 0, length, length, f"all {length} bytes: it ignores ranges"
    match = _RANGE.fullmatch(content_range) if status == 206 else None
    if not match:
        return -1, -1, 0, f"{status} without such a range"
    begin, last, total = map(int, match.groups())
    return begin, last + 1, total, f"bytes {begin}-{last} of {total}"


def _opaque(etag: str) -> str:
    """What is equal in a weak and a strong ETag of one file."""
    return etag.strip().removeprefix("W/")


def _check_revision(response: HTTPResponse, part: Part) -> None:
    got = response.getheader("X-Repo-Commit")
    if part.revision and got and got != part.revision:
        raise failures.other_revision(part.file, part.revision, got)


def _is_final(error: Exception) -> bool:
    """Whether a request that has no answer is not repeated."""
    if isinstance(error, socket.gaierror):
        return error.errno == socket.EAI_NONAME
    return isinstance(error, (ssl.SSLCertVerificationError, *failures.MALFORMED))


def _read_rest(response: HTTPResponse) -> None:
    """Reads the short rest of a body, so that the connection can be kept."""
    if response.length is None or response.length > _PIECE_BYTES:
        return
    try:
        response.read()
    except (OSError, HTTPException):
        response.close()  # the next request opens a connection


def _write(file: IO[bytes], at: int, piece: bytes, name: str) -> None:
    """Writes the whole piece. A file without a buffer may take less of it at a time; where no more
    fits, the next write says why."""
    rest = memoryview(piece)
    try:
        file.seek(at)
        while rest:
            written = file.write(rest)
            if not written:
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            rest = rest[written:]
    except OSError as error:
        raise failures.not_written(error, name) from None


def _truncate(file: IO[bytes], part: Part) -> None:
    try:
        file.truncate(part.begin)
    except OSError as error:
        raise failures.not_written(error, part.file) from None


def _trusting_context() -> ssl.SSLContext:
    context = ssl.create_default_context()  # with SSL_CERT_FILE and SSL_CERT_DIR
    is_set = os.environ.get("SSL_CERT_FILE") or os.environ.get("SSL_CERT_DIR")
    bundle = next(filter(os.path.isfile, _BUNDLES), None)
    if bundle and not is_set and not context.get_ca_certs():
        context.load_verify_locations(bundle)
    return context
