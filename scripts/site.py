"""Hooks of mkdocs (mkdocs.yml): the site has README as its first page, and every file of the
repository to which a page links. Links and fences get the forms that mkdocs knows; a link that is
called by its file, such as plan.md, is called by the page's title in the site."""

import posixpath
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

ROOT = Path(__file__).resolve().parent.parent
FIRST = {"README.md": "index.md"}
FENCE = re.compile(r"^```.*?^```", re.M | re.S)
INFO = re.compile(r"^```(\w+) .*$", re.M)  # "python file=checkpoint.py"
COMMENT = re.compile(r"^(<!--.*-->)$", re.M)
LINK = re.compile(r"""(\]\(|(?:href|src|srcset)=")([^)"\s]+)""")
BY_FILE = re.compile(r"\[([\w-]+\.md)(?=\]\(([^)#\s]*\1)[)#])")


def on_files(files: Any, config: Any) -> Any:
    """Adds the files outside docs/ that pages link to."""
    pages = ["README.md", *(f"docs/{file.src_uri}" for file in files.documentation_pages())]
    known = {*pages}
    for page in pages:  # grows
        for path in {*links(page, (ROOT / page).read_text())} - known:
            if (ROOT / path).is_file():  # otherwise mkdocs reports the link
                known.add(path)
                pages += [path] if path.endswith(".md") else []
    for path in sorted(known):
        if not path.startswith("docs/"):
            files.append(File.generated(config, uri_of(path), abs_src_path=str(ROOT / path)))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, **_: Any) -> str:
    here = page.file.src_uri
    path = next((path for path, uri in FIRST.items() if uri == here), here)
    path = path if (ROOT / path).is_file() else f"docs/{path}"
    titles = {uri: title for part in config["nav"] for of in part.values()
              for one in of for title, uri in one.items()}  # fmt: skip

    def called(match: re.Match[str]) -> str:
        uri = uri_of(posixpath.normpath(posixpath.join(posixpath.dirname(path), match[2])))
        return "[" + titles.get(uri, match[1])

    def moved(match: re.Match[str]) -> str:
        target, hash_sign, anchor = match[2].partition("#")
        if not target or is_elsewhere(target):
            return match[0]
        uri = uri_of(posixpath.normpath(posixpath.join(posixpath.dirname(path), target)))
        return (
            match[1] + posixpath.relpath(uri, posixpath.dirname(here) or ".") + hash_sign + anchor
        )

    fences = [INFO.sub(r"```\1", fence) for fence in FENCE.findall(markdown)]
    # A table right below a comment would be a part of it.
    texts = [
        COMMENT.sub(r"\1\n", LINK.sub(moved, BY_FILE.sub(called, text)))
        for text in FENCE.split(markdown)
    ]
    return "".join(text + fence for text, fence in zip(texts, [*fences, ""], strict=True))


def links(page: str, text: str) -> Iterator[str]:
    """The path in the repository to which each relative link leads."""
    for match in LINK.finditer(FENCE.sub("", text)):
        target = match[2].partition("#")[0]
        if target and not is_elsewhere(target):
            yield posixpath.normpath(posixpath.join(posixpath.dirname(page), target))


def is_elsewhere(target: str) -> bool:
    return re.match(r"[a-z]+:", target) is not None


def uri_of(path: str) -> str:
    """The place in the site of a path in the repository."""
    return FIRST.get(path, path.removeprefix("docs/"))
