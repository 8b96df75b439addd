"""Takes a picture of the charts of an HTML page, in Debian's Chromium."""

import shutil
from pathlib import Path

# Hides everything but the charts, and aligns the charts of several runs at the bottom.
STYLE = """
h1, .tools, .sample, .reading, .tables > .processes, details, footer { display: none }
#runs.several { align-items: end }
main { padding: 0.75rem }
"""


def take_picture(page: Path, picture: Path, width: int = 1280) -> None:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as started:
        opened = started.chromium.launch(
            executable_path=shutil.which("chromium"), args=["--no-sandbox"]
        )
        window = opened.new_page(viewport={"width": width, "height": 100}, device_scale_factor=1.5)
        window.goto(page.resolve().as_uri())
        window.add_style_tag(content=STYLE)
        window.locator("main").screenshot(path=picture)
        opened.close()
