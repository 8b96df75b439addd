"""Worlds of real ranks, which tests borrow. A world lives from one test file to the next, until an
act fails."""

from collections.abc import Iterator
from contextlib import ExitStack

import pytest
from ranks import Pool, Ranks


class Borrowed(dict[int, Ranks]):
    """Worlds by the number of their ranks, each borrowed when it is first requested."""

    def __init__(self, pool: Pool, stack: ExitStack) -> None:
        super().__init__()
        self._pool, self._stack = pool, stack

    def __missing__(self, size: int) -> Ranks:
        self[size] = self._stack.enter_context(self._pool.lend(size))
        return self[size]


@pytest.fixture(scope="session")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pool]:
    made = Pool(tmp_path_factory.mktemp("worlds"))
    yield made
    made.close()


@pytest.fixture(scope="module")
def worlds(pool: Pool) -> Iterator[dict[int, Ranks]]:
    """The file's worlds."""
    with ExitStack() as stack:
        yield Borrowed(pool, stack)


@pytest.fixture(scope="module")
def one(worlds: dict[int, Ranks]) -> Ranks:
    return worlds[1]


@pytest.fixture(scope="module")
def two(worlds: dict[int, Ranks]) -> Ranks:
    return worlds[2]


@pytest.fixture(scope="module")
def three(worlds: dict[int, Ranks]) -> Ranks:
    return worlds[3]


@pytest.fixture(scope="module")
def four(worlds: dict[int, Ranks]) -> Ranks:
    return worlds[4]
