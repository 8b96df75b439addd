"""Writes tables into pages; describes the machine for their footers."""

import os
import platform
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
GIB = 1 << 30


def cpu() -> str:
    text = Path("/proc/cpuinfo").read_text()
    name = re.search(r"model name\s*: (.*)", text)
    flags = re.search(r"^flags\s*: (.*)$", text, re.M)
    present = set(flags.group(1).split()) if flags else set()
    isa = next((i for i in ("avx512f", "avx2", "sse4_2") if i in present), platform.machine())
    return f"{name.group(1) if name else platform.machine()}, {os.cpu_count()} CPUs, {isa}"


def machine() -> str:
    """The line about this machine in a table's footer."""
    return f"{cpu()}, Linux {platform.release()}"


def write_between_markers(page: Path, name: str, text: str) -> None:
    """Replaces the text between `<!-- bench:NAME -->` and `<!-- /bench:NAME -->`."""
    begin, end = f"<!-- bench:{name} -->", f"<!-- /bench:{name} -->"
    head, found, rest = page.read_text().partition(begin)
    _, closed, tail = rest.partition(end)
    if not (found and closed):
        raise SystemExit(f"{page.relative_to(ROOT)} lacks the markers {begin} ... {end}")
    page.write_text(f"{head}{begin}\n{text}\n{end}{tail}")
