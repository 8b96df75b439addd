"""The pytest plugin of an installed Modicum: the marker `limit_memory`.

@pytest.mark.limit_memory("2 GiB")
def test_load(): ...

The test fails if its peak exceeds the memory held at its begin, after its fixtures, by more than
this size. The failure message says who held what at the peak. Needs pytest 8.
"""

from collections.abc import Generator

import pytest

_USE = (
    'limit_memory(size): "2 GiB" or bytes that the test, with its children, may add; else it fails'
)


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", _USE)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, object, object]:
    marker = item.get_closest_marker("limit_memory")
    if marker is None:
        return (yield)
    if len(marker.args) != 1 or marker.kwargs:
        raise pytest.UsageError(f"{item.nodeid}: use {_USE}")
    from modicum import _modicum
    from modicum.memory.recording import phase

    limit = _modicum.parse_size(marker.args[0])
    with phase(item.name) as held:
        result = yield
    if held.peak_bytes - held.begin_bytes > limit:
        pytest.fail(held.text(limit), pytrace=False)
    return result
