"""URLs of requests. No text that is made here for a message has a query, a user or a password."""

from typing import NamedTuple
from urllib.parse import urljoin, urlsplit

from modicum.errors import Error, failure

_PORTS = {"http": 80, "https": 443}


class Origin(NamedTuple):
    """The server of a URL. A token is for one of them."""

    scheme: str
    host: str
    port: int

    def __str__(self) -> str:
        is_usual = self.port == _PORTS[self.scheme]
        return self.authority.rpartition(":")[0] if is_usual else self.authority

    @property
    def authority(self) -> str:
        """Host and port."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


class Url(NamedTuple):
    origin: Origin
    target: str
    """Path and query."""


def parsed(text: str) -> Url:
    """Raises ValueError for a text that is no URL of HTTP."""
    parts = urlsplit(text)
    if parts.scheme not in _PORTS or not parts.hostname:
        raise ValueError("no URL of HTTP")
    port = _PORTS[parts.scheme] if parts.port is None else parts.port
    target = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
    return Url(Origin(parts.scheme, parts.hostname, port), target)


def redirected(text: str, location: str | None) -> str:
    """The URL to which a server redirects. Raises `IoError` for a URL that is not followed: of
    another scheme, or without TLS after one with TLS."""
    before = parsed(text).origin
    try:
        url = urljoin(text, location or "")
        after = parsed(url).origin
    except ValueError:
        raise _refused(before, "no URL of HTTP") from None
    if not location:
        raise _refused(before, "no Location")
    if (before.scheme, after.scheme) == ("https", "http"):
        raise _refused(before, f"http, to {after}")
    return url


def _refused(before: Origin, got: str) -> Error:
    what = f"{before} redirects to a URL that is not followed"
    return failure("IO", what, expected=f"a URL with {before.scheme}", got=got)
