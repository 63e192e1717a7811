"""Screenshots of the web page for the documentation: `python scripts/page_pictures.py DIR`.

A browser shows the page with the figures of a modelled chat service (chat_service.py); its first sections are saved as
PNG.
"""

from __future__ import annotations

import io
import sys
import time
from pathlib import Path

import msgspec
from PIL import Image

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.web.browser import chromium
from tests.web.site import Site

from kvdepot.web.history import History
from scripts.chat_service import statuses

SECONDS = 3600
"""Of history, and the range of the charts; one of the page's own."""
COLOURS = 256
SCREEN = 1000
"""Pixels of height."""
MARGIN = 24
LOOKS = (("light", 1400, "light"), ("dark", 1400, "dark"), ("narrow", 400, "light"))
"""Name, width and colours. Of wide pages what ends with memory and tiers is saved, of narrow ones the whole."""


def main(folder: Path) -> int:
    """Write page-light.png, page-dark.png and page-narrow.png into a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    site = Site()
    try:
        load(site)
        look(site.url, folder)
    finally:
        site.close()
    return 0


def load(site: Site) -> None:
    """Give the site the service's status and history."""
    history = History()
    for status in statuses(time.time(), SECONDS):
        history.add(status.wall_s, status)
    site.status, site.history, site.ticks = status, msgspec.to_builtins(history.series()), False


def look(address: str, folder: Path) -> None:
    """Save what a browser shows, with few colours to keep the files small."""
    with chromium() as browser:
        for name, width, theme in LOOKS:
            page = browser.new_page(viewport={"width": width, "height": SCREEN}, color_scheme=theme)
            page.goto(address)
            page.check(f"input[value='{SECONDS}']")
            page.locator(".plot canvas").first.wait_for()
            box = page.locator("#stores" if width > SCREEN else "body").bounding_box()
            assert box is not None
            clip = {"x": 0.0, "y": 0.0, "width": float(width), "height": box["y"] + box["height"] + MARGIN}
            picture = Image.open(io.BytesIO(page.screenshot(full_page=True, clip=clip))).convert("RGB")
            few = picture.quantize(COLOURS, Image.Quantize.FASTOCTREE, dither=Image.Dither.NONE)
            few.save(folder / f"page-{name}.png", optimize=True)
            page.close()


if __name__ == "__main__":
    if len(sys.argv) != 2 or sys.argv[1].startswith("-"):
        sys.exit(__doc__)
    sys.exit(main(Path(sys.argv[1])))
