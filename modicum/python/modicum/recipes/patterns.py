"""Matches names against users' regular expressions, in RE2's syntax like the command line."""

from collections.abc import Iterable, Mapping

from modicum import _modicum
from modicum.errors import refusal

Rule = str | tuple[str, float]
"""How a tensor is made: "zeros", "ones", ("normal", standard deviation) or "model"."""


class Patterns:
    """The regular expressions of one argument; each may match anywhere in a name."""

    def __init__(self, argument: str, expressions: Iterable[str]) -> None:
        """Raises USAGE if a regular expression is invalid."""
        self._argument = argument
        self._patterns = {e: _modicum.NamePattern(argument, e) for e in expressions}

    def found(self, name: str) -> str | None:
        """The first expression that matches in `name`, or None."""
        return next((e for e, pattern in self._patterns.items() if pattern.finds(name)), None)

    def finds(self, name: str) -> bool:
        return self.found(name) is not None

    def require_match(self, names: Iterable[str], what: str) -> None:
        """Raises USAGE if an expression matches none of `names`, which is usually a typo."""
        known = [*names]
        for expression, pattern in self._patterns.items():
            if expression and not any(pattern.finds(name) for name in known):
                raise refusal(
                    "USAGE",
                    f"{self._argument}: a regular expression matches no name",
                    expected=f"one that matches one of {len(known)} {what}",
                    got=repr(expression),
                )


class Rules:
    """The rules for tensors that are not stored, by name or regular expression: the argument
    `missing` of a load."""

    def __init__(
        self, missing: str | Iterable[str] | Mapping[str, Rule], names: Iterable[str]
    ) -> None:
        self._rules = self._by_name(missing)
        self._patterns = Patterns("missing", self._rules)
        self._patterns.require_match(names, "targets")

    @staticmethod
    def _by_name(missing: str | Iterable[str] | Mapping[str, Rule]) -> Mapping[str, Rule]:
        """Rules by expression. The empty expression matches every name."""
        if isinstance(missing, Mapping):
            return missing
        if missing == "error":
            return {}
        patterns = [missing] if isinstance(missing, str) else missing
        if not isinstance(patterns, Iterable):
            expected, got = '"error", "init", patterns, or rules by pattern', repr(missing)
            raise refusal("USAGE", "missing", expected=expected, got=got)
        return {"" if p in ("ignore", "init") else p: "model" for p in patterns}

    @property
    def take_all(self) -> bool:
        """Whether there is a rule for every name, as with "init"."""
        return "" in self._rules

    def of(self, name: str) -> Rule | None:
        """The rule for `name`, or None. An exact name precedes regular expressions."""
        by = name if name in self._rules else self._patterns.found(name)
        return None if by is None else self._rules[by]
