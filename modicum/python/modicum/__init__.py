"""Model state of sharded training, in little memory."""

from modicum._modicum import version

__all__ = ["version"]
__version__ = version()
