"""Screenshots of the web page for the documentation: `python scripts/page_pictures.py DIR [SECONDS]`.

Starts a server with a disk tier and three toy engines that reuse each other's prompts, and after some minutes of
traffic saves what a browser shows, as PNG.
"""

from __future__ import annotations

import io
import re
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import zmq
from PIL import Image

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.conftest import Depot, eventually
from tests.faults.engine import Request, ToyEngine
from tests.web.browser import chromium

from kvdepot.client import admin

SECONDS = 330.0
RANGE_S = 300
"""The range of the charts; one of the page's own."""
FAMILIES, CHUNKS = 300, 6
NEW_FAMILIES_S = 8
"""Prompts start and end, like conversations."""
WIDTH = 512
"""A block has 64 times as many bytes: half a MiB per chunk."""
PACE_S = 0.004
COLOURS = 256
SCREEN = 1000
"""Pixels of height; narrower pages are saved as a whole."""
LOOKS = (("light", 1400, "light"), ("dark", 1400, "dark"), ("narrow", 400, "light"))
"""Of narrow pages the whole; of wide ones what most screens show first."""


class Engine(ToyEngine):
    """Reports the prefill time that its retrieves saved, by its own speed so far."""

    def __init__(self, url: str, model: str, seed: int, context: zmq.Context[Any]) -> None:
        super().__init__(url, model, blocks=384, width=WIDTH, seed=seed, context=context)
        self.computed_blocks, self.computed_s = 0, 0.0

    def _compute(self, request: Request, failed: set[int]) -> None:
        began = time.monotonic()
        super()._compute(request, failed)
        self.computed_s += time.monotonic() - began
        saved = request.cached * self.per_chunk - len(failed)
        self.computed_blocks += len(request.blocks) - saved
        if saved and self.computed_blocks:
            self.scheduler.end_session(request.id, 0, saved * self.computed_s / self.computed_blocks)


def main(folder: Path, seconds: float) -> int:
    """Write page-light.png, page-dark.png and page-narrow.png into a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="kvdepot-pictures-") as disk:
        tier = f"disk://{disk}/kv?capacity_gib=1"
        depot = Depot("--http", "127.0.0.1:0", "--tiers", tier, arena_mib=256).wait_ready()
        try:
            port = eventually(lambda: re.search(r"API: http://\S+:(\d+)", depot.logged()), 20.0)[1]
            drive(depot, f"http://127.0.0.1:{port}/", folder, seconds)
        finally:
            depot.close()
    return 0


def drive(depot: Depot, address: str, folder: Path, seconds: float) -> None:
    """Two engines on one model and one on another; screenshots at the end, while they work."""
    models = ["meta-llama/Llama-3.1-8B-Instruct"] * 2 + ["Qwen/Qwen3-14B"]
    engines = [Engine(depot.url, model, seed, depot.context) for seed, model in enumerate(models)]
    engines[0].store(family=0, chunks=CHUNKS)
    with admin.connect(depot.url) as client:
        prompt = admin.make_prompt(client, engines[0].prompt(0, CHUNKS).tokens, b"", models[0], "")
        admin.pin(client, "system-prompt", prompt)
        admin.lease(client, "handbook", prompt, "prefetch", ttl_s=3600)

    is_over = threading.Event()

    def work() -> None:
        began = time.monotonic()
        while not is_over.wait(PACE_S):
            oldest = int(NEW_FAMILIES_S * (time.monotonic() - began))
            for engine in engines:
                engine.step(families=FAMILIES, chunks=CHUNKS, first_family=oldest, preempt=0.0, abort=0.0)
        for engine in engines:
            engine.close()

    worker = threading.Thread(target=work)
    worker.start()
    try:
        time.sleep(seconds)
        look(address, folder)
    finally:
        is_over.set()
        worker.join()


def look(address: str, folder: Path) -> None:
    """Save what a browser shows, with few colours to keep the files small."""
    with chromium() as browser:
        for name, width, theme in LOOKS:
            page = browser.new_page(viewport={"width": width, "height": SCREEN}, color_scheme=theme)
            page.goto(address)
            page.check(f"input[value='{RANGE_S}']")
            page.locator(".plot canvas").first.wait_for()
            page.wait_for_timeout(2000)  # until the page has some points of its own
            picture = Image.open(io.BytesIO(page.screenshot(full_page=width < SCREEN))).convert("RGB")
            few = picture.quantize(COLOURS, Image.Quantize.FASTOCTREE, dither=Image.Dither.NONE)
            few.save(folder / f"page-{name}.png", optimize=True)
            page.close()


if __name__ == "__main__":
    if not 2 <= len(sys.argv) <= 3:
        sys.exit(__doc__)
    sys.exit(main(Path(sys.argv[1]), float(sys.argv[2]) if len(sys.argv) > 2 else SECONDS))
