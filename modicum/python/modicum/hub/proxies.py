"""Proxies of requests: which one is for a server, and a connection with TLS through it. No text
that is made here for a message has a user or a password."""

import base64
import ipaddress
import socket
import ssl
import urllib.request
from http.client import HTTPResponse, HTTPSConnection
from typing import NamedTuple
from urllib.parse import unquote, urlsplit

from modicum.errors import failure
from modicum.hub.urls import Origin

_USUAL_PORT = 80


class Proxy(NamedTuple):
    host: str
    port: int
    authorization: str | None
    """The header's value, from a user and password in the proxy's URL."""

    def __str__(self) -> str:
        return Origin("http", self.host, self.port).authority


class RefusedByProxy(Exception):
    """A proxy does not connect to a server."""

    def __init__(self, proxy: Proxy, status: int) -> None:
        super().__init__()
        self.proxy, self.status = proxy, status


def proxy_of(origin: Origin) -> Proxy | None:
    """The proxy by http_proxy, https_proxy, all_proxy and no_proxy."""
    proxies = urllib.request.getproxies()
    text = proxies.get(origin.scheme) or proxies.get("all")
    entries = proxies.get("no", "").lower().split(",")
    if not text or any(_is_origin(entry.strip(), origin) for entry in entries):
        return None
    try:
        parts = urlsplit(text if "://" in text else f"http://{text}")
        host, port = parts.hostname, parts.port or _USUAL_PORT
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


# ---- no_proxy, by the rules of huggingface_hub's client


def _is_origin(entry: str, origin: Origin) -> bool:
    """Whether an entry of no_proxy is for this server: `*`, or HOST, .DOMAIN, *.DOMAIN, an address
    or ADDRESS/BITS, with or without a port, and with or without a scheme, as in http://HOST. HOST
    without a scheme is also for the hosts below it. An entry of another form is for none."""
    scheme, has_scheme, place = entry.rpartition("://")
    if not entry or scheme not in ("", "all", origin.scheme):
        return False
    first = place.partition("/")[0]
    if ":" in first and _address(first):  # of IPv6, without its brackets
        place = place.replace(first, f"[{first}]", 1)
    try:
        parts = urlsplit(f"//{place}")
        host, port, bits = parts.hostname or "", parts.port, parts.path[1:]
    except ValueError:
        return False
    if port not in (None, origin.port):
        return False
    if address := _address(host):
        return _is_in_network(origin.host, address, bits)
    if bits and not has_scheme:
        return False
    return _is_host(origin.host, host, bool(has_scheme))


def _address(text: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(text)
    except ValueError:
        return None


def _is_in_network(
    host: str, begin: ipaddress.IPv4Address | ipaddress.IPv6Address, bits: str
) -> bool:
    address = _address(host)
    if address is None or not bits:
        return address == begin
    try:
        return bits.isdigit() and address in ipaddress.ip_network(f"{begin}/{bits}", strict=False)
    except ValueError:
        return False


def _is_host(host: str, pattern: str, has_scheme: bool) -> bool:
    if pattern == "*" or (has_scheme and not pattern):
        return True
    if pattern.startswith((".", "*.")):
        return host.endswith(pattern.removeprefix("*"))
    if has_scheme and pattern.startswith("*"):
        pattern, has_scheme = pattern[1:], False
    is_exact = has_scheme or pattern == "localhost"
    return host == pattern or (not is_exact and bool(pattern) and host.endswith(f".{pattern}"))


# ---- connections


class Tunnel(HTTPSConnection):
    """A connection with TLS through a proxy. It asks the proxy itself, since http.client of some
    Pythons asks for an address of IPv6 without brackets."""

    def __init__(
        self, origin: Origin, proxy: Proxy, timeout_s: float, context: ssl.SSLContext
    ) -> None:
        super().__init__(origin.host, origin.port, timeout=timeout_s, context=context)
        self._origin, self._proxy, self._tls = origin, proxy, context

    def connect(self) -> None:
        """Raises `RefusedByProxy`."""
        place = (self._proxy.host, self._proxy.port)
        self.sock = socket.create_connection(place, self.timeout)
        self.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        authority, user = self._origin.authority, self._proxy.authorization
        lines = [f"CONNECT {authority} HTTP/1.1", f"Host: {authority}"]
        lines += [f"Proxy-Authorization: {user}"] if user else []
        self.sock.sendall("\r\n".join([*lines, "", ""]).encode("ascii"))
        answer = HTTPResponse(self.sock, method="CONNECT")
        try:
            answer.begin()
        finally:
            answer.close()
        if not 200 <= answer.status < 300:
            raise RefusedByProxy(self._proxy, answer.status)
        self.sock = self._tls.wrap_socket(self.sock, server_hostname=self._origin.host)
