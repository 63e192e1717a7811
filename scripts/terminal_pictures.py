"""Pictures of `kvdepot status` and `kvdepot top` for the documentation: `python scripts/terminal_pictures.py DIR`.

Saves what the commands show of a modelled chat service (chat_service.py) as SVG.
"""

from __future__ import annotations

import asyncio
import re
import sys
import time
from pathlib import Path

import zmq
from rich.console import Console

sys.path.insert(0, str(Path(__file__).parents[1]))

from kvdepot.cli import view
from kvdepot.cli.tui import Top
from kvdepot.client.socket import Client
from kvdepot.protocol.status import Status
from scripts.chat_service import statuses

SECONDS = 60
PLACE = "ipc:///run/user/1000/kvdepot-1000/depot.sock"


def main(folder: Path) -> int:
    """Write status.svg and top.svg into a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    seen = list(statuses(time.time(), SECONDS))
    save(folder / "status.svg", status(seen[-1]))
    save(folder / "top.svg", asyncio.run(top(seen)))
    return 0


def status(now: Status) -> str:
    """The output of `kvdepot status`, as SVG."""
    with Path("/dev/null").open("w") as nowhere:
        console = Console(record=True, width=96, height=30, highlight=False, markup=False, file=nowhere)
        console.print(view.summary(now, PLACE))
        for listing in view.listings(now):
            console.print("", listing.table(console.width), sep="\n")
    return console.export_svg(title="kvdepot status")


async def top(seen: list[Status], columns: int = 80, lines: int = 24) -> str:
    """The screen of `kvdepot top` after a minute, as SVG."""
    with zmq.Context() as context:
        client = Client(PLACE, context)  # nobody answers it
        try:
            screen = Top(client, None)
            async with screen.run_test(size=(columns, lines)) as pilot:
                for each in seen:
                    screen.show_status(each)
                await pilot.pause()
                return screen.export_screenshot(title="kvdepot top")
        finally:
            client.close()


def save(path: Path, picture: str) -> None:
    """Save a picture without fonts, which would be fetched from elsewhere."""
    text = re.sub(r"@font-face \{[^}]*\}", "", picture)
    path.write_text("\n".join(line.rstrip() for line in text.splitlines()) + "\n")


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    sys.exit(main(Path(sys.argv[1])))
