"""DeepSpeed's extensions, which torch compiles when a program first uses them."""

import importlib.util

import pytest

_TORCH = importlib.util.find_spec("torch")
# Torch passes the path of its libraries to the linker without quotes.
needs_extensions = pytest.mark.skipif(
    _TORCH is not None and " " in str(_TORCH.origin),
    reason="torch can't link DeepSpeed's extensions if its own path has a space",
)
