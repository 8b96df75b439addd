"""The progress bar of rank 0."""

import contextlib
import sys
from collections.abc import Callable, Iterator


@contextlib.contextmanager
def progress_bar(total: int, *, shown: bool) -> Iterator[Callable[[int], None] | None]:
    """A context with a progress bar on stderr. Yields a function to call with the bytes loaded so
    far, or None without a bar.

    Args:
        total: bytes to load.
        shown: whether to draw the bar; without tqdm it is never drawn.
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
