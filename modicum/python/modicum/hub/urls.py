"""URLs and proxies of requests. No text that is made here for a message has a query, a user or a
password."""

import base64
import urllib.request
from typing import NamedTuple
from urllib.parse import unquote, urljoin, urlsplit

from modicum.errors import Error, failure

_PORTS = {"http": 80, "https": 443}


class Origin(NamedTuple):
    """The server of a URL. A token is for one of them."""

    scheme: str
    host: str
    port: int

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return host if self.port == _PORTS[self.scheme] else f"{host}:{self.port}"


class Url(NamedTuple):
    origin: Origin
    target: str
    """Path and query."""


class Proxy(NamedTuple):
    host: str
    port: int
    authorization: str | None
    """The header's value, from a user and password in the proxy's URL."""


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


def proxy_of(origin: Origin) -> Proxy | None:
    """The proxy by http_proxy, https_proxy, all_proxy and no_proxy."""
    proxies = urllib.request.getproxies()
    text = proxies.get(origin.scheme) or proxies.get("all")
    if not text or urllib.request.proxy_bypass(f"{origin.host}:{origin.port}"):
        return None
    try:
        parts = urlsplit(text if "://" in text else f"http://{text}")
        host, port = parts.hostname, parts.port or _PORTS["http"]
    except ValueError:
        host = None
    if not host or parts.scheme != "http":
        expected = "http://[USER:PASSWORD@]HOST[:PORT]"
        what = f"the proxy for {origin.scheme} is of another kind"
        raise failure("UNSUPPORTED", what, expected=expected)
    if parts.username is None:
        return Proxy(host, port, None)
    user = f"{unquote(parts.username)}:{unquote(parts.password or '')}"
    return Proxy(host, port, "Basic " + base64.b64encode(user.encode()).decode())
