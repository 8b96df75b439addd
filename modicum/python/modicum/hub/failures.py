"""Errors of requests. No message has a token, a query of a URL, or a text that a server has sent
but for its status."""

import email.utils
import errno
import re
import ssl
import time
from email.message import Message
from http.client import BadStatusLine, HTTPException, IncompleteRead, InvalidURL, LineTooLong

from modicum.errors import Error, failure
from modicum.hub.proxies import RefusedByProxy
from modicum.hub.urls import Origin

RETRIED = frozenset((408, 429, 500, 502, 503, 504))
"""A server that answers with such a status is asked again."""
MALFORMED = (ValueError, InvalidURL)
"""What http.client raises for a URL."""
PROXY_USER = 407
"""The status of a proxy that wants another user, or one at all."""
_KINDS: dict[type[Exception], str] = {
    IncompleteRead: "the end of the answer",
    LineTooLong: "a header line of more than 65536 bytes",
    BadStatusLine: "a first line that is not of HTTP",
    HTTPException: "more than 100 header lines",
}
"""What http.client raises for an answer that it can't read."""


def refused(
    status: int, headers: Message, origin: Origin, file: str, *,
    is_hub: bool, has_token: bool,
) -> Error:  # fmt: skip
    """The error of a status that is no success."""
    access = (
        "a token of an account that has access" if has_token else "HF_TOKEN, or `hf auth login`"
    )
    what, expected = "the hub does not answer the request", ""
    if status in RETRIED:
        wait_s = asked_wait_s(status, headers)
        what = f"{origin} limits the rate of requests" if status == 429 else f"{origin} fails"
        expected = f"a command after {wait_s:.0f} s" if wait_s else ""
    elif not is_hub:
        what = f"{origin} does not send the file"
    elif headers.get("X-Error-Code") == "GatedRepo":
        what, expected = "access to the model is gated", f"access, asked for on its page; {access}"
    elif headers.get("X-Error-Message", "").startswith("Invalid credentials"):
        what, expected = "the hub does not accept the token", "a valid HF_TOKEN, or none"
    elif status == 401:
        what, expected = "the hub has no such model, or it is private", access
    elif status == 403:
        what, expected = "the hub denies access to the model", access
    elif status == 404 and file:
        what = "the hub has no such file"
    elif status == 404:
        what, expected = "the hub has no such model", "a directory, a file, or ORG/NAME"
    return failure("IO", what, file=file, expected=expected, got=f"{status} from {origin}")


def asked_wait_s(status: int, headers: Message) -> float:
    """The seconds until the next request by Retry-After, a number or a date, or by RateLimit."""
    if status not in (429, 503):
        return 0
    text = headers.get("Retry-After", "").strip()
    if text.isascii() and text.isdigit():
        return float(text[:9])
    if text:
        try:
            return max(0, email.utils.parsedate_to_datetime(text).timestamp() - time.time())
        except (ValueError, TypeError, OverflowError):
            return 0
    limit = re.search(r";\s*t=([0-9]{1,9})", headers.get("RateLimit", ""))
    return float(limit[1]) if limit else 0


def by_proxy(refusal: RefusedByProxy, origin: Origin, file: str) -> Error:
    """The error of a request that a proxy refuses."""
    what = f"the proxy {refusal.proxy} refuses the connection to {origin}"
    expected = f"a proxy that allows it, or {origin.host} in no_proxy"
    if refusal.status == PROXY_USER:
        what = f"the proxy {refusal.proxy} does not accept the user"
        expected = f"{origin.scheme}_proxy=http://USER:PASSWORD@HOST[:PORT]"
    got = f"status {refusal.status} from the proxy"
    return failure("IO", what, file=file, expected=expected, got=got)


def unreachable(error: Exception, origin: Origin, file: str, timeout_s: float) -> Error:
    """The error of a request that has no answer."""
    if isinstance(error, ssl.SSLCertVerificationError):
        what = f"the certificate of {origin} is not trusted"
        expected = "SSL_CERT_FILE with the certificate of its authority"
        return failure("IO", what, expected=expected, got=plain(error.verify_message))
    if isinstance(error, MALFORMED):
        return failure("IO", f"a URL of {origin} is malformed", file=file)
    if isinstance(error, HTTPException) and not isinstance(error, OSError):
        what, expected = f"{origin} sends no usable answer", "the headers of a hub"
        return failure("IO", what, file=file, expected=expected, got=reason(error))
    got = f"no answer for {timeout_s:g} s" if isinstance(error, TimeoutError) else reason(error)
    expected = "a network, or a model in the cache"
    return failure("IO", f"{origin} can't be reached", file=file, expected=expected, got=got)


def unusable(origin: Origin, file: str, expected: str, got: str) -> Error:
    what = f"{origin} does not send the part of the file that is asked for"
    return failure("IO", what, file=file, expected=expected, got=got)


def changed(file: str, expected: str, got: str) -> Error:
    what = "the file has changed between two requests"
    return failure("CONFLICT", what, file=file, expected=expected, got=got)


def other_revision(file: str, expected: str, got: str) -> Error:
    what = "the hub sends another revision"
    return failure("CONFLICT", what, file=file, expected=expected, got=plain(got))


def not_written(error: Exception, file: str) -> Error:
    """The error of a write to the temporary directory."""
    number = getattr(error, "errno", None)
    category, expected = "IO", "a TMPDIR for large sparse files"
    if number in (errno.ENOSPC, errno.EDQUOT):
        category, expected = "NOSPACE", "space in TMPDIR"
    what = "the headers can't be written to the temporary directory"
    return failure(category, what, file=file, expected=expected, got=reason(error))


def reason(error: Exception) -> str:
    """The kind of a failure, without texts of the server and of the URL."""
    if isinstance(error, TimeoutError):
        return "no more bytes in time"
    if isinstance(error, OSError) and error.strerror:
        return plain(error.strerror)
    return _KINDS.get(type(error), type(error).__name__)


def plain(text: str) -> str:
    """A short text without control characters."""
    return "".join(character if character.isprintable() else "?" for character in text)[:200]
