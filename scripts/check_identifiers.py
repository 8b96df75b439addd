"""Words that are no identifiers in C++: a rule of check.py."""

import re
from collections.abc import Iterator

# Function words and participles. As an identifier they do not tell what a value is.
NO_IDENTIFIERS = frozenset({"given", "held", "how", "into", "made", "of", "one", "own", "told"})
# Participles and adjectives alone; `HeldShard` and `StoredTensor` have a noun.
NO_TYPE_NAMES = frozenset((
    "Arrived", "Arriving", "Asked", "Bad", "Begun", "Chosen", "Compared", "Contiguous",
    "Converted", "Copied", "Described", "Distinct", "Done", "Dropped", "Ended", "Fetched",
    "Forked", "Found", "Frozen", "Given", "Held", "Kept", "Known", "Late", "Loaded", "Lost",
    "Made", "Missing", "Moved", "Named", "Noted", "Old", "Open", "Opened", "Ours", "Own",
    "Planned", "Promised", "Published", "Publishing", "Raw", "Rebuilt", "Recorded", "Rehearsed",
    "Removed", "Sampled", "Saved", "Sending", "Sent", "Shared", "Shown", "Simulated", "Skipped",
    "Staged", "Stepped", "Stopped", "Stored", "Supervised", "Taken", "Told", "Tracked",
    "Trained", "Unfused", "Unsure", "Used", "Verified", "Wanted", "Watched", "Whole", "Written",
    "Wrong",
))  # fmt: skip
TYPE_KEYWORDS = frozenset({"class", "concept", "enum", "struct", "typename", "union", "using"})
# Literals and comments are skipped: they come first, and contain no names.
TOKEN = re.compile(
    r"""R"([^ ()\\]*)\(.*?\)\1"|//[^\n]*|/\*.*?\*/|"(?:\\.|[^"\\\n])*"|'(?:\\.|[^'\\\n])*'"""
    r"""|\d(?:'?[\w.])*|(?P<name>[A-Za-z_]\w*)""",
    re.DOTALL,
)


def line_of(text: str, offset: int) -> int:
    return text.count("\n", 0, offset) + 1


def check_identifiers(path: str, text: str) -> Iterator[str]:
    """No word of NO_IDENTIFIERS is a token outside literals and comments, with or without the
    underscore of a member; no word of NO_TYPE_NAMES is declared as a type."""
    before = ""
    for match in TOKEN.finditer(text):
        name = match["name"]
        if not name:
            continue
        fault = ""
        if name.rstrip("_") in NO_IDENTIFIERS:
            fault = f"'{name}' is no identifier: name what it is"
        elif name in NO_TYPE_NAMES and before in TYPE_KEYWORDS:
            fault = f"'{name}' is no type name: use a noun"
        if fault:
            yield f"{path}:{line_of(text, match.start())}: {fault}"
        before = name
