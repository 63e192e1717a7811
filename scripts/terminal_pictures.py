"""Pictures of `kvdepot status` and `kvdepot top` for the documentation: `python scripts/terminal_pictures.py DIR`.

Saves what the commands show of a modelled chat service (chat_service.py) as SVG.
"""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Callable
from pathlib import Path

from rich.console import Console, RenderableType

sys.path.insert(0, str(Path(__file__).parents[1]))

from kvdepot.cli import view
from kvdepot.cli.screen import Screen
from scripts.chat_service import statuses

SECONDS = 60
PLACE = "ipc:///run/user/1000/kvdepot-1000/depot.sock"


def main(folder: Path) -> int:
    """Write status.svg and top.svg into a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    seen = list(statuses(time.time(), SECONDS))
    parts: list[RenderableType] = [view.summary(seen[-1], PLACE)]
    for listing in view.listings(seen[-1]):
        parts += ["", listing.table(96)]
    draw(folder / "status.svg", "kvdepot status", 96, lambda console: parts)
    screen = Screen(PLACE)
    for number, status in enumerate(seen):
        screen.show(status, float(number))
    draw(folder / "top.svg", "kvdepot top", 80, lambda console: [screen.draw(console)])
    return 0


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
