"""The bar that rank 0 draws."""

import contextlib
import sys
from collections.abc import Callable, Iterator


@contextlib.contextmanager
def progress_bar(total: int, *, shown: bool) -> Iterator[Callable[[int], None] | None]:
    """What to tell how many bytes there are so far; None where nothing is shown.

    Args:
        total: bytes that will have been read in the end.
        shown: whether there is a bar, on stderr.
    """
    try:
        from tqdm import tqdm
    except ImportError:  # torch does not depend on it
        shown = False
    if not shown:
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
