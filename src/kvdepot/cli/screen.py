"""The screen of `kvdepot top`: one status, fitted to the terminal's size."""

from __future__ import annotations

import time

from rich.console import Console, Group, RenderableType
from rich.layout import Layout
from rich.text import Text

from kvdepot.cli import view
from kvdepot.cli.output import clean
from kvdepot.protocol.status import Status

__all__ = ["Screen"]


class Screen:
    """The last status, and the rates since the one before."""

    def __init__(self, place: str) -> None:
        self.version = 0  # changes when the screen must be redrawn
        self._place = place
        self._status: Status | None = None
        self._seen = 0.0
        self._speeds = view.Speeds(0.0, 0.0, 0.0, 0.0)
        self._trouble = ""

    def show(self, status: Status, now: float) -> None:
        """Take a new status."""
        before, passed = self._status, now - self._seen
        if before is not None and before.boot == status.boot and passed > 0:
            self._speeds = view.Speeds(
                (status.stored_bytes - before.stored_bytes) / passed,
                (status.retrieved_bytes - before.retrieved_bytes) / passed,
                (status.counters.get("lookups", 0) - before.counters.get("lookups", 0)) / passed,
                (status.evicted_chunks - before.evicted_chunks) / passed,
            )
        self._status, self._seen, self._trouble = status, now, ""
        self.version += 1

    def miss(self, why: str) -> None:
        """Take the reason why there is no new status."""
        self._trouble = why
        self.version += 1

    def draw(self, console: Console) -> Layout:
        """The whole screen: the summary, as much of each table as fits, and the keys."""
        if self._status is None:
            body = Group(Text(clean(self._trouble) or "waiting for the server"))
        else:
            summary = view.summary(self._status, self._place, self._speeds)
            taken = len(console.render_lines(summary, pad=False))
            body = Group(summary, *self._tables(console.size.width, console.size.height - 1 - taken))
        foot = Text(time.strftime("%H:%M:%S  q quits"), "reverse")
        if self._trouble:
            foot = Text(f"{clean(self._trouble)}  q quits", "yellow reverse")
        foot.truncate(console.size.width, overflow="ellipsis", pad=True)
        whole = Layout()
        whole.split_column(Layout(body, ratio=1), Layout(foot, size=1))
        return whole

    def _tables(self, width: int, room: int) -> list[RenderableType]:
        assert self._status is not None
        listings = view.listings(self._status)
        while listings and 3 * len(listings) > room:  # each needs at least a head and two lines
            listings.pop()
        lines = [min(len(listing.rows), 2) for listing in listings]
        room -= sum(lines) + len(lines)
        while room > 0 and any(len(listing.rows) > most for listing, most in zip(listings, lines, strict=True)):
            for number, listing in enumerate(listings):
                if room > 0 and len(listing.rows) > lines[number]:
                    lines[number] += 1
                    room -= 1
        tables = [listing.table(width, most) for listing, most in zip(listings, lines, strict=True)]
        if room < len(tables):
            return [*tables]
        return [part for table in tables for part in ("", table)]
