"""The screen of `kvdepot top`: what the keys choose of one status, fitted to the terminal's size."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.layout import Layout
from rich.table import Table as Grid
from rich.text import Text

from kvdepot.cli import view
from kvdepot.cli.output import clean, duration, share, size
from kvdepot.cli.tabs import TABLES, Table, fields, in_order
from kvdepot.cli.view import Listing
from kvdepot.protocol.prefixes import Prefix
from kvdepot.protocol.status import Status

__all__ = ["TABS", "Screen"]

TABS = ("overview", *TABLES)

_HISTORY = 60  # statuses
_SPARK_CELLS = 14
_SPARKS = "▁▂▃▄▅▆▇█"
_PLAIN_SPARKS = "_.-=+*#@"
_PAGE = 10
"""Lines that a page key moves."""
_KEYS = (
    ("1-7, tab, left, right", "choose what to show"),
    ("up, down, k, j, page up, page down", "choose a row"),
    ("enter", "show all that is known about the row; esc goes back"),
    ("s, r", "sort by the next column, in reverse order"),
    ("/", "show only rows with a text; esc shows all again"),
    ("p, space", "pause"),
    ("?, h", "show or hide this list"),
    ("q", "quit"),
)
_WIDE = 78
"""Columns that all tabs' names need; in narrower terminals, only the chosen one's is written out."""
_SHORT_TAB = 3


class Screen:
    """The last status, the rates since the one before, and what the keys have chosen."""

    def __init__(self, place: str) -> None:
        self.version = 0  # changes when the screen must be redrawn
        self.tab = TABS[0]
        self.is_paused = False
        self._place = place
        self._status: Status | None = None
        self._seen = 0.0
        self._clock = ""  # the time of the last status
        self._speeds = view.Speeds(0.0, 0.0, 0.0, 0.0)
        self._history: deque[tuple[float, float, float]] = deque(maxlen=_HISTORY)  # reuse, stores, retrieves
        self._prefixes: list[Prefix] | None = None
        self._trouble = ""  # why the last answer is missing
        self._is_old = False  # that answer was to be the status
        self._silent_s = 0  # how long the server has not answered
        self._sort = dict.fromkeys(TABLES, 0)
        self._reversed = dict.fromkeys(TABLES, False)
        self._shows_keys = False
        self._row = 0  # the chosen one
        self._top = 0  # rows that are scrolled away
        self._opens = False  # the details of that row, as soon as the rows are known
        self._opened: Any = None  # the row whose details are shown, as it was last listed
        self._filter = ""
        self._is_typing = False  # the filter

    # -- what comes from the server

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
            asked = status.tokens.asked - before.tokens.asked
            reused = min(1.0, (status.tokens.reused - before.tokens.reused) / asked) if asked > 0 else 0.0
            self._history.append((reused, self._speeds.stored_bytes, self._speeds.retrieved_bytes))
        elif before is not None and before.boot != status.boot:
            self._history.clear()
        self._status, self._seen, self._trouble, self._is_old, self._silent_s = status, now, "", False, 0
        self._clock = time.strftime("%H:%M:%S")
        self.version += 1

    def show_prefixes(self, prefixes: list[Prefix]) -> None:
        """Take the prefixes that `wanted_prefixes` asked for."""
        self._prefixes = prefixes
        self.version += 1

    def wanted_prefixes(self) -> str | None:
        """What prefixes to ask the server for, by their sort; None: none."""
        return self._sorted_by() if self.tab == "prefixes" and not self.is_paused else None

    def miss(self, why: str) -> None:
        """Take the reason why there is no new status; empty: no answer came."""
        self._is_old = bool(why)
        self.miss_prefixes(why)

    def miss_prefixes(self, why: str) -> None:
        """Take the reason why there is no new list of prefixes."""
        self._trouble = why
        self.version += 1

    def wait(self, silent_s: float) -> None:
        """Take for how many seconds the server has not answered; 0: it answers."""
        if int(silent_s) != self._silent_s:
            self._silent_s = int(silent_s)
            self.version += 1

    # -- keys

    def press(self, key: str) -> bool:
        """Take a key; returns whether it ends the command."""
        self.version += 1
        if self._is_typing:
            self._type(key)
            return False
        match key:
            case "q" | "Q":
                return True
            case "tab" | "right":
                self._turn_to(TABS[(TABS.index(self.tab) + 1) % len(TABS)])
            case "back tab" | "left":
                self._turn_to(TABS[TABS.index(self.tab) - 1])
            case "s" if self._sorts():
                self._sort[self.tab] = (self._sort[self.tab] + 1) % len(self._sorts())
                self._go_to(0)
            case "r" if self._sorts():
                self._reversed[self.tab] = not self._reversed[self.tab]
                self._go_to(0)
            case "?" | "h":
                self._shows_keys = not self._shows_keys
            case "escape" if self._shows_keys:
                self._shows_keys = False
            case "p" | " ":
                self.is_paused = not self.is_paused
            case "enter" if self.tab in TABLES:
                self._opens = True
            case "escape" if self._opens or self._opened is not None:
                self._close()
            case "/":
                self._close()
                self._is_typing, self._filter = True, ""
                self._go_to(0)
            case "escape":
                self._filter = ""
                self._go_to(0)
            case "up" | "k":
                self._go_to(self._row - 1)
            case "down" | "j":
                self._go_to(self._row + 1)
            case "page up":
                self._go_to(self._row - _PAGE)
            case "page down":
                self._go_to(self._row + _PAGE)
            case _ if key.isascii() and key.isdigit() and 1 <= int(key) <= len(TABS):
                self._turn_to(TABS[int(key) - 1])
        return False

    def _turn_to(self, tab: str) -> None:
        self.tab, self._shows_keys, self._filter = tab, False, ""
        self._close()
        self._go_to(0)

    def _close(self) -> None:
        self._opens, self._opened = False, None

    def _go_to(self, row: int) -> None:
        """Choose a row, unless details are shown; beyond the last one it is that, see `_one_table`."""
        if self._opened is None and not self._opens:
            self._row = max(0, row)

    def _type(self, key: str) -> None:
        match key:
            case "enter":
                self._is_typing = False
            case "escape":
                self._is_typing, self._filter = False, ""
            case "backspace":
                self._filter = self._filter[:-1]
            case _ if len(key) == 1 and key.isprintable():
                self._filter += key

    def _sorts(self) -> list[str]:
        """The names of the orders that the chosen tab's rows can have."""
        return list(TABLES[self.tab].sorts) if self.tab in TABLES else []

    def _sorted_by(self) -> str:
        sorts = self._sorts()
        return sorts[self._sort[self.tab]] if sorts else ""

    # -- drawing

    def draw(self, console: Console) -> Layout:
        """The whole screen: the tabs, what the chosen one shows, as far as it fits, and the keys."""
        width, height = console.size
        if self._shows_keys:
            keys = Grid.grid(padding=(0, 2, 0, 0))
            keys.add_column(style="bold")
            for key, what in _KEYS:
                keys.add_row(key, what)
            body: RenderableType = keys
        elif self._status is None:
            body = Group(Text(clean(self._trouble) or "waiting for the server"))
        elif self.tab == TABS[0]:
            head = Group(view.summary(self._status, self._place, self._speeds, self._old()), self._sparks(console))
            taken = len(console.render_lines(head, pad=False))
            body = Group(head, *self._overview(width, height - 2 - taken))
        else:
            body = Group(*self._one_table(self._status, width, height - 2))
        whole = Layout()
        whole.split_column(Layout(self._tabs(width), size=1), Layout(body, ratio=1), Layout(self._foot(width), size=1))
        return whole

    def _old(self) -> str:
        """Why the figures are old, and how old; empty if they are not."""
        if self._silent_s:
            return f"No answer for {duration(self._silent_s)}; figures of {self._clock}"
        return f"No answer; figures of {self._clock}" if self._is_old else ""

    def _tabs(self, width: int) -> Text:
        names = [
            (f" {number} {tab if tab == self.tab or width >= _WIDE else tab[:_SHORT_TAB]} ",
             "bold reverse" if tab == self.tab else "dim")
            for number, tab in enumerate(TABS, 1)
        ]  # fmt: skip
        tabs = Text.assemble(*names)
        tabs.truncate(width, overflow="ellipsis")
        return tabs

    def _foot(self, width: int) -> Text:
        if self._is_typing:
            text, style = f"filter: {self._filter}_  enter: apply, esc: clear", "reverse"
        elif self._trouble or self._silent_s:
            why = clean(self._trouble) or f"no answer for {duration(self._silent_s)}"
            data = [f"data from {self._clock}"] if self._clock else []
            text, style = "  ".join(["q quits", *data, why]), "yellow reverse"
        else:
            parts = [f"paused at {self._clock}, p resumes" if self.is_paused else self._clock, "q quits", "? keys"]
            if self._opened is not None:
                parts.append("esc back")
            else:
                if self._sorts():
                    order = ", reversed" if self._reversed[self.tab] else ""
                    parts.append(f"s sort: {self._sorted_by()}{order}")
                parts.append(f"/ filter{f': {self._filter}' if self._filter else ''}")
                parts += ["enter details"] * (self.tab in TABLES)
            parts += ["tab 1-7", *([] if self.is_paused else ["p pause"])]
            text, style = "  ".join(parts), "yellow reverse" if self.is_paused else "reverse"
        foot = Text(text, style)
        foot.truncate(width, overflow="ellipsis", pad=True)
        return foot

    def _sparks(self, console: Console) -> Text:
        """How reuse and throughput were in the last statuses."""
        is_plain = not console.encoding.lower().startswith("utf")
        parts: list[Any] = []
        for name, column, limit in (("reused", 0, 1.0), ("stores", 1, 0.0), ("retrieves", 2, 0.0)):
            values = [each[column] for each in self._history][-_SPARK_CELLS:]
            parts += [(f"{name} ", "bold"), (_spark(values, limit, is_plain).ljust(_SPARK_CELLS), "cyan"), "  "]
        line = Text.assemble(*parts)
        line.truncate(console.size.width, overflow="ellipsis")
        return line

    def _overview(self, width: int, room: int) -> list[RenderableType]:
        assert self._status is not None
        listings = [each for each in map(self._matching, view.listings(self._status)) if each.rows]
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

    def _one_table(self, now: Status, width: int, room: int) -> list[RenderableType]:
        """A line about the server, and the table of the chosen tab."""
        part = now.used_bytes / now.capacity_bytes if now.capacity_bytes else 0.0
        asked = now.tokens.asked
        old = self._old()
        line = Text.assemble(
            (old, "bold yellow") if old else view.headline(now),
            f"  memory {share(part)} of {size(now.capacity_bytes)}",
            f"  reused {share(min(1.0, now.tokens.reused / asked)) if asked else '-'}",
            f"  stores {size(self._speeds.stored_bytes)}/s  retrieves {size(self._speeds.retrieved_bytes)}/s",
        )
        line.truncate(width, overflow="ellipsis")
        table = TABLES[self.tab]
        if self.tab == "prefixes" and self._prefixes is None:
            return [line, "", Text("waiting for the server's list", "dim")]
        rows = in_order(table, table.rows(now, self._prefixes or []), self._sorted_by(), self._reversed[self.tab])
        if self._opened is None:
            shown = [
                row for row, cells in zip(rows, table.listing(rows, False).rows, strict=True) if self._matches(cells)
            ]
            self._row = max(0, min(self._row, len(shown) - 1))
            if not shown:
                self._opens = False
                hidden = f" match {clean(self._filter)!r}" if rows else ""
                return [line, "", Text(f"no {self.tab}{hidden}", "dim")]
            if not self._opens:
                return [line, "", self._rows(table, shown, width, room - 3)]  # and the head
            self._opens, self._opened = False, shown[self._row]
        return [line, "", self._details(table, rows)]

    def _rows(self, table: Table, shown: Sequence[Any], width: int, room: int) -> RenderableType:
        """As many rows as fit, among them the chosen one."""
        lines = max(2, room)
        last = max(0, len(shown) - lines)
        # If not all fit, the last line counts those below, so the chosen row must be above it.
        self._top = max(min(self._row - lines + 2, last), min(self._top, self._row, last))
        return table.listing(shown[self._top :], False).table(width, lines, self._row - self._top)

    def _details(self, table: Table, rows: Sequence[Any]) -> RenderableType:
        """All that is known about the row that was opened."""
        now = next((row for row in rows if table.key(row) == table.key(self._opened)), None)
        self._opened = self._opened if now is None else now
        grid = Grid.grid(padding=(0, 2, 0, 0))
        grid.add_column(style="bold", no_wrap=True)
        grid.add_column(overflow="fold")
        for name, value in fields(table, self._opened):
            grid.add_row(name, Text(clean(value)))
        if now is None:
            grid.add_row("", Text("the server does not list it any more", "yellow"))
        return grid

    def _matching(self, listing: Listing) -> Listing:
        return Listing(listing.heads, [row for row in listing.rows if self._matches(row)])

    def _matches(self, cells: Sequence[object]) -> bool:
        """Whether a row contains the filter's text, in either case."""
        return not self._filter or any(self._filter.lower() in str(cell).lower() for cell in cells)


def _spark(values: Sequence[float], limit: float, is_plain: bool) -> str:
    """A chart in one line. limit: the value of the highest letter; 0: the highest value."""
    letters = _PLAIN_SPARKS if is_plain else _SPARKS
    highest = limit or max(values, default=0.0)
    if highest <= 0:
        return letters[0] * len(values)
    return "".join(letters[round(min(max(each / highest, 0.0), 1.0) * (len(letters) - 1))] for each in values)
