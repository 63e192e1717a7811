"""Pictures of `kvdepot status` and `kvdepot top` for the documentation: `python scripts/terminal_pictures.py DIR`.

Starts a server with a disk tier and two toy engines that reuse each other's prompts, and saves the output of the
commands as SVG.
"""

from __future__ import annotations

import re
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from msgspec.structs import replace
from rich.console import Console, RenderableType

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.conftest import Depot
from tests.faults.engine import ToyEngine

from kvdepot.cli import view
from kvdepot.cli.screen import Screen
from kvdepot.client import admin
from kvdepot.protocol import wire
from kvdepot.status import Status, read

SECONDS = 25.0  # the status of a tier is refreshed every ten seconds
FAMILIES = 400
WIDTH = 128  # of the toy engines' KV: 128 KiB per chunk
PLACE = "ipc:///run/user/1000/kvdepot-1000/depot.sock"


def main(folder: Path) -> int:
    """Write status.svg and top.svg into a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="kvdepot-pictures-") as disk:
        depot = Depot("--tiers", f"disk://{disk}/kv?capacity_gib=1", arena_mib=128).wait_ready()
        try:
            seen = drive(depot)
        finally:
            depot.close()
    seen = [shown_elsewhere(status) for status in seen]
    parts: list[RenderableType] = [view.summary(seen[-1], PLACE)]
    for listing in view.listings(seen[-1]):
        parts += ["", listing.table(96)]
    draw(folder / "status.svg", "kvdepot status", 96, lambda console: parts)
    screen = Screen(PLACE)
    for number, status in enumerate(seen):
        screen.show(status, float(number))
    draw(folder / "top.svg", "kvdepot top", 80, lambda console: [screen.draw(console)])
    return 0


def drive(depot: Depot) -> list[Status]:
    """Two engines on one model; polls the server's status each second."""
    engines = [ToyEngine(depot.url, "toy-llama", width=WIDTH, seed=seed, context=depot.context) for seed in (0, 1)]
    seen: list[Status] = []
    end = time.monotonic() + SECONDS
    with admin.connect(depot.url) as client:
        while time.monotonic() < end:
            look = time.monotonic() + 1.0
            while time.monotonic() < look:
                for engine in engines:
                    engine.step(families=FAMILIES)
            seen.append(read(client.ask(wire.Status()).result(5.0)))
    for engine in engines:
        engine.close()
    return seen


def shown_elsewhere(status: Status) -> Status:
    """A status without the temporary folder of this run."""
    return replace(status, tiers=[replace(tier, name="disk:///var/lib/kvdepot") for tier in status.tiers])


def draw(path: Path, title: str, columns: int, parts: Callable[[Console], list[RenderableType]]) -> None:
    """Save one picture."""
    with Path("/dev/null").open("w") as nowhere:
        console = Console(record=True, width=columns, height=30, highlight=False, markup=False, file=nowhere)
        console.print(*parts(console), sep="\n")
    text = re.sub(r"@font-face \{[^}]*\}", "", console.export_svg(title=title))  # they would be fetched from elsewhere
    path.write_text("\n".join(line.rstrip() for line in text.splitlines()) + "\n")


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    sys.exit(main(Path(sys.argv[1])))
