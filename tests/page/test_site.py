"""The site of the pages (mkdocs.yml) in Chromium, on wide and narrow screens, light and dark: each
page without serious findings of axe, not wider than the screen, without a request to another host.
Skips without mkdocs, which `scripts/venv.sh docs` installs.

Catches: text without contrast; a link or a table that a screen reader can't name; a table that
makes the page scroll sideways on a phone; a script or a font of another host; a search that does
not find a page.
"""

import importlib.util
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from pages import NARROW, WIDE, shown

pytestmark = [pytest.mark.soak, pytest.mark.timeout(1800)]


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None: ...


@pytest.fixture(scope="module")
def site(root: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    if importlib.util.find_spec("mkdocs") is None:
        pytest.skip("no mkdocs: `scripts/venv.sh docs` installs it")
    folder = tmp_path_factory.mktemp("site") / "site"
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)], cwd=root,
        env=os.environ | {"NO_MKDOCS_2_WARNING": "1"}, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return folder


@pytest.fixture(scope="module")
def address(site: Path) -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(site))) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [WIDE, NARROW])
def test_each_page_is_accessible(
    chromium: Any, site: Path, address: str, width: int, scheme: str
) -> None:
    found = []
    pages = sorted(path for path in site.rglob("*.html") if path.name != "404.html")
    assert len(pages) > 40
    for path in pages:
        name = str(path.relative_to(site))
        with shown(chromium, address + name, width, scheme) as view:
            view.page.wait_for_load_state("networkidle")
            found += [f"{name}: {one}" for one in view.violations() + view.errors]
            wide = view.page.evaluate("document.documentElement.scrollWidth")
            found += [f"{name}: {wide} px wide"] if wide > width else []
            elsewhere = [url for url in view.requests if not url.startswith(address)]
            found += [f"{name}: requests {url}" for url in elsewhere]
    assert found == []


def test_the_search_finds_a_page(chromium: Any, address: str) -> None:
    with shown(chromium, address + "index.html") as view:
        view.page.wait_for_load_state("networkidle")
        view.page.keyboard.press("/")
        view.page.keyboard.type("save_on_sigterm")
        view.page.wait_for_selector(".md-search-result__link[href*='guide/save.html']")
