"""Which proxy a request to the hub takes: that of huggingface_hub, by the same variables.

Catches: a host of `no_proxy` that is reached through the proxy; a network's addresses that are not
recognised; a password in an error.
"""

import pytest

from modicum import errors
from modicum.hub.proxies import proxy_of
from modicum.hub.urls import Origin, parsed

PROXIES = [f"{name}_proxy" for name in ("http", "https", "all", "no")]


@pytest.fixture(autouse=True)
def no_surroundings(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*PROXIES, *map(str.upper, PROXIES)):
        monkeypatch.delenv(name, raising=False)


def test_variables_of_proxies_are_those_of_other_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    hub, plain = Origin("https", "hub.example.com", 443), Origin("http", "hub.example.com", 80)
    assert proxy_of(hub) is None
    monkeypatch.setenv("all_proxy", "http://all:1")
    assert proxy_of(plain) == ("all", 1, None)
    monkeypatch.setenv("https_proxy", "http://us%40er:pa%3Ass@proxy:3128")
    assert proxy_of(hub) == ("proxy", 3128, "Basic dXNAZXI6cGE6c3M=")
    monkeypatch.setenv("https_proxy", "proxy")
    assert proxy_of(hub) == ("proxy", 80, None)
    for without in ("example.com", ".example.com", "hub.example.com:443", "*", "x, example.com"):
        monkeypatch.setenv("no_proxy", without)
        assert proxy_of(hub) is None, without
    monkeypatch.setenv("no_proxy", "other.example.com, hub.example.com:444")
    assert proxy_of(hub) is not None
    for kind in ("socks5://u:hf_secret@x:1", "https://x", "http://", "http://x:y"):
        monkeypatch.setenv("https_proxy", kind)
        with pytest.raises(errors.UsageError) as caught:
            proxy_of(hub)
        assert "secret" not in str(caught.value)


@pytest.mark.parametrize(
    ("entries", "direct", "proxied"),
    [
        ("example.com", "http://example.com http://a.example.com", "http://xexample.com"),
        (".example.com", "http://a.example.com:8", "http://example.com http://xexample.com"),
        ("*.Example.com", "http://a.b.example.com", "http://example.com http://10.1.2.3"),
        ("localhost", "http://localhost:5", "http://a.localhost http://127.0.0.1"),
        ("http://a.b", "http://a.b:8", "https://a.b http://c.a.b"),
        ("https://*.a.b, all://c", "https://x.a.b http://c", "http://x.a.b https://a.b http://x.c"),
        ("http://*a.b:8,", "http://a.b:8 http://x.a.b:8", "http://a.b http://xa.b:8"),
        ("http://", "http://a.b", "https://a.b"),
        ("10.1.2.3", "http://10.1.2.3:8", "http://10.1.2.30 http://x.10.1.2.3"),
        ("10.1.2.3:8", "http://10.1.2.3:8", "http://10.1.2.3"),
        ("10.0.0.0/8", "https://10.255.2.3:8", "http://11.1.2.3 http://a.b http://[::1]"),
        ("10.1.2.3/8", "http://10.9.9.9", "http://11.1.2.3"),
        ("::1", "http://[::1]:8 http://[0:0::1]", "http://[::2]"),
        ("[::1]", "https://[::1]:8", "http://[::2] http://localhost"),
        ("[::1]:8", "http://[::1]:8", "http://[::1]"),
        ("2001:db8::/32, [fd00::]/8", "http://[2001:db8:1::2] http://[fd01::1]", "http://[::1]"),
        ("10.0.0.0/99, 10.0.0.0/x, a.b/8, [x, :::, a.b:x, /, //, ::1/x", "", "http://a.b http://x"),
    ],
)
def test_no_proxy_is_that_of_huggingface_hub(
    monkeypatch: pytest.MonkeyPatch, entries: str, direct: str, proxied: str
) -> None:
    monkeypatch.setenv("all_proxy", "http://proxy:1")
    monkeypatch.setenv("no_proxy", entries)
    for url in direct.split():
        assert proxy_of(parsed(url).origin) is None, url
    for url in proxied.split():
        assert proxy_of(parsed(url).origin) is not None, url
