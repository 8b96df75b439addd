"""Facts about other packages on which Modicum relies, each with a check of the behaviour."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module

from modicum.errors import refusal

TORCH_TESTED = ("2.11.0", "2.13.0", "2.15.0")
"""The versions of torch with which the tests have run, for the files of `upstream` about torch
without versions of their own."""


@dataclass(frozen=True)
class KnownFacts:
    """The facts about one package of others on which a file of `modicum.upstream` relies."""

    package: str
    tested: tuple[str, ...]
    """The versions with which the tests have run. Another version is accepted if every fact holds
    for it."""
    facts: Mapping[str, Callable[[], bool]]
    """For each statement about the package a function that returns whether the installed version
    satisfies it. The function may raise any error."""

    def mismatch(self) -> str:
        """One line with the installed version, the first fact that does not hold, and why; empty if
        every fact holds."""
        for fact, holds in self.facts.items():
            try:
                why = "" if holds() else "this does not hold"
            except Exception as error:  # another version may raise anything
                why = f"{error}".partition("\n")[0] or type(error).__name__
            if why:
                version = import_module(self.package).__version__
                return f"{self.package} {version}: expected that {fact}: {why}"
        return ""

    def require(self) -> None:
        """Raises UNSUPPORTED if a fact does not hold."""
        if reason := self.mismatch():
            expected = f"{self.package} {' or '.join(self.tested)}"
            what = "this version behaves differently from those that are supported"
            raise refusal("UNSUPPORTED", what, expected=expected, got=reason)
