from collections.abc import Iterator
from typing import Any

import pytest
from pages import WIDE, browser

# Always runs. The other tests that open the browser run in the soak run.
SMOKE = f"test_the_page_is_drawn_and_accessible[one-{WIDE}-light]"


@pytest.hookimpl(tryfirst=True)  # before pytest deselects by marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "chromium" in getattr(item, "fixturenames", ()) and item.name != SMOKE:
            item.add_marker(pytest.mark.soak)


@pytest.fixture(scope="module")
def chromium() -> Iterator[Any]:
    """Debian's Chromium; skips the test if it is missing."""
    with browser() as opened:
        yield opened
