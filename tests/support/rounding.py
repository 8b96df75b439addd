"""Square roots rounded to nearest, for torch's optimizers: MKL's are off by one ulp at times."""

import contextlib
from collections.abc import Iterator
from unittest import mock

import torch

__all__ = ["nearest_sqrt"]


def _sqrt(tensor: torch.Tensor) -> torch.Tensor:
    return torch.sqrt(tensor.double()).float()


@contextlib.contextmanager
def nearest_sqrt() -> Iterator[None]:
    """Computes in float64, which has more than twice float32's bits, so that rounding twice gives
    the same result as rounding once."""
    with (
        mock.patch.object(torch.Tensor, "sqrt", _sqrt),
        mock.patch.object(torch, "_foreach_sqrt", lambda all_of: [_sqrt(of) for of in all_of]),
    ):
        yield
