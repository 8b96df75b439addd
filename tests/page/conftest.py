from collections.abc import Iterator
from typing import Any

import pytest
from pages import browser


@pytest.fixture(scope="module")
def chromium() -> Iterator[Any]:
    """Debian's Chromium; skips the test if it is missing."""
    with browser() as opened:
        yield opened
