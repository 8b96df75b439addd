"""Settings of the environment, by the names and rules of huggingface_hub."""

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

from modicum.errors import failure

_ENDPOINT = "https://huggingface.co"
_TIMEOUT_S = 10


@dataclass(frozen=True)
class Settings:
    endpoint: str = _ENDPOINT
    """The hub's URL, without a slash at its end."""
    token: str | None = field(default=None, repr=False)
    is_offline: bool = False
    timeout_s: float = _TIMEOUT_S
    """For a connection, and for each wait for bytes."""


def settings_of(variables: Mapping[str, str]) -> Settings:
    """The settings of these environment variables. Raises `UsageError` for a value that can't be
    used, `IoError` if the file of the token can't be read. No message has a token."""
    return Settings(
        endpoint=_endpoint(variables),
        token=_token(variables),
        is_offline=_is_true(variables, "HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"),
        timeout_s=_timeout_s(variables),
    )


def _first(variables: Mapping[str, str], *names: str) -> str:
    """The first of these variables that is not empty."""
    return next((variables[name] for name in names if variables.get(name)), "")


def _is_true(variables: Mapping[str, str], *names: str) -> bool:
    return _first(variables, *names).upper() in {"1", "ON", "YES", "TRUE"}


def _endpoint(variables: Mapping[str, str]) -> str:
    text = _first(variables, "HF_ENDPOINT").rstrip("/") or _ENDPOINT
    try:
        parts = urlsplit(text)
        is_plain = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
    except ValueError:
        is_plain = False
    if not is_plain or "@" in parts.netloc or parts.query or parts.fragment or not _is_header(text):
        expected = "https://HOST[:PORT][/PATH], without a user, a query and a fragment"
        raise failure("USAGE", "HF_ENDPOINT is no URL of a hub", expected=expected)
    return text


def _timeout_s(variables: Mapping[str, str]) -> float:
    text = _first(variables, "HF_HUB_DOWNLOAD_TIMEOUT")
    if not text:
        return _TIMEOUT_S
    if not (text.isascii() and text.isdigit() and len(text) < 9):
        expected, got = "a number of seconds", ascii(text[:20])
        raise failure("USAGE", "HF_HUB_DOWNLOAD_TIMEOUT", expected=expected, got=got)
    return int(text) or _TIMEOUT_S


def _token(variables: Mapping[str, str]) -> str | None:
    if _is_true(variables, "HF_HUB_DISABLE_IMPLICIT_TOKEN"):
        return None
    names = ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN")
    token = _cleaned(_first(variables, *names)) or _cleaned(_token_in_file(variables))
    if not _is_header(token):
        raise failure(
            "USAGE",
            "the hub's token has characters that an HTTP header can't have",
            expected="hf_...",
        )
    return token or None


def _cleaned(token: str) -> str:
    return token.replace("\r", "").replace("\n", "").strip()


def _token_in_file(variables: Mapping[str, str]) -> str:
    path = _path(_first(variables, "HF_TOKEN_PATH") or os.path.join(_home(variables), "token"))
    try:
        return path.read_text("utf-8")
    except FileNotFoundError:
        return ""
    except (OSError, UnicodeDecodeError) as error:
        got = getattr(error, "strerror", None) or "not UTF-8"
        what = "the token of the hub can't be read"
        raise failure(
            "IO", what, file=path.name, expected=f"HF_TOKEN, or {path}", got=got
        ) from None


def _home(variables: Mapping[str, str]) -> str:
    """The directory of huggingface_hub."""
    caches = _first(variables, "XDG_CACHE_HOME") or os.path.join("~", ".cache")
    return _first(variables, "HF_HOME") or os.path.join(caches, "huggingface")


def _path(text: str) -> Path:
    return Path(os.path.expandvars(os.path.expanduser(text)))


def _is_header(text: str) -> bool:
    """Whether the text can be a part of a header: printable ASCII without spaces."""
    return text.isascii() and all("!" <= character <= "~" for character in text)
