"""The bar that rank 0 draws."""

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import Any


def _tqdm() -> Any:
    """torch doesn't bring it; a load without a bar is a load."""
    try:
        from tqdm import tqdm
    except ImportError:
        return None
    return tqdm


@contextlib.contextmanager
def progress_bar(total: int, *, shown: bool) -> Iterator[Callable[[int], None] | None]:
    """What to tell how many bytes there are so far; None where nothing is shown.

    Args:
        total: bytes that will have been read in the end.
        shown: whether there is a bar, on stderr.
    """
    tqdm = _tqdm() if shown else None
    if tqdm is None:
        yield None
        return

    with tqdm(
        total=total,
        desc="Loading weights",
        unit="B",
        unit_scale=True,
        unit_divisor=1024,
        file=sys.stderr,
    ) as bar:

        def show(done: int) -> None:
            bar.update(min(done, total) - bar.n)

        yield show
        show(total)
