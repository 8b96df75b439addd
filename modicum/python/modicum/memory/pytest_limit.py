"""The pytest plugin of an installed Modicum: the marker `limit_memory`.

@pytest.mark.limit_memory("2 GiB")
def test_load(): ...

The test fails if the peak of the process and its children exceeds their memory at the test's begin
by more than this size. Fixtures are set up before the begin. The failure message names the holders
of the memory at the peak. Needs pytest 8.
"""

from collections.abc import Generator

import pytest

_USE = (
    "limit_memory(size): fails the test if it and its child processes add more than this size at "
    'their peak; size: "2 GiB" or a number of bytes'
)


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", _USE)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Reports a wrong marker in one line, before the test's fixtures are made."""
    from modicum.errors import UsageError

    try:
        _limit_of(item)
    except UsageError as error:
        pytest.fail(f"limit_memory: {error}", pytrace=False)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, object, object]:
    limit = _limit_of(item)
    if limit is None:
        return (yield)
    from modicum.memory.tracking import phase

    with phase(item.name) as record:
        result = yield
    if record.peak_bytes - record.begin_bytes > limit:
        pytest.fail(record.text(limit), pytrace=False)
    return result


def _limit_of(item: pytest.Item) -> int | None:
    """The bytes of the test's marker; None without one. Raises UsageError."""
    marker = item.get_closest_marker("limit_memory")
    if marker is None:
        return None
    from modicum import _modicum
    from modicum.errors import refusal

    arguments = [*map(repr, marker.args), *(f"{key}={it!r}" for key, it in marker.kwargs.items())]
    size = marker.args[0] if len(arguments) == 1 and marker.args else None
    if isinstance(size, bool) or not isinstance(size, int | str):
        got = ", ".join(arguments) or "no argument"
        raise refusal("USAGE", "not a size", expected='one size, such as "2 GiB"', got=got)
    return _modicum.parse_size(str(size))
