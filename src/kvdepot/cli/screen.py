"""The screen of `kvdepot top`: what the keys choose of one status, fitted to the terminal's size."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

from rich.console import Console, Group, RenderableType
from rich.layout import Layout
from rich.text import Text

from kvdepot.cli import view
from kvdepot.cli.output import clean, duration, share, size
from kvdepot.cli.view import Listing
from kvdepot.protocol.prefixes import SORTS, Prefix
from kvdepot.protocol.status import Status

__all__ = ["TABS", "Screen"]

TABS = ("overview", "models", "prefixes", "engines", "tiers", "leases", "events")

_Row = TypeVar("_Row")
_Sorts = dict[str, Callable[[Any], Any]]
"""Keys of rows by name; the lowest comes first."""

_SORTS: dict[str, _Sorts] = {
    "models": {
        "bytes": lambda each: -each.bytes,
        "chunks": lambda each: -each.chunks,
        "found": lambda each: -each.found_tokens / each.asked_tokens if each.asked_tokens else 1,
        "name": lambda each: (each.tenant, each.model),
    },
    "prefixes": {name: lambda each: 0 for name in SORTS},  # the server sorts them
    "engines": {
        "name": lambda each: (each.models, each.ranks, each.id),
        "requests": lambda each: -each.sessions,
        "pinned": lambda each: -each.pinned_chunks,
        "last seen": lambda each: each.idle_s,
    },
    "tiers": {
        "order": lambda each: 0,
        "bytes": lambda each: -(each.bytes or 0),
        "queued": lambda each: -each.queued_bytes,
    },
    "leases": {
        "saved": lambda each: 0,  # as the server lists them
        "bytes": lambda each: -each.bytes,
        "end": lambda each: each.ends_s if each.ends_s is not None else float("inf"),
        "name": lambda each: each.name,
    },
}
_HISTORY = 60  # statuses
_SPARK_CELLS = 14
_SPARKS = "▁▂▃▄▅▆▇█"
_PLAIN_SPARKS = "_.-=+*#@"
_PAGE = 10
"""Lines that a page key moves."""
_KEYS = (
    ("1-7, tab, left, right", "choose what to show"),
    ("up, down, k, j, page up, page down", "scroll"),
    ("s, r", "sort by the next column, in reverse order"),
    ("/", "show only rows with a text; esc shows all"),
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
        self._trouble = ""
        self._silent_s = 0  # how long the server has not answered
        self._sort = dict.fromkeys(_SORTS, 0)
        self._reversed = dict.fromkeys(_SORTS, False)
        self._shows_keys = False
        self._top = 0  # rows that are scrolled away
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
            asked = status.asked_tokens - before.asked_tokens
            reused = min(1.0, (status.saved.tokens - before.saved.tokens) / asked) if asked > 0 else 0.0
            self._history.append((reused, self._speeds.stored_bytes, self._speeds.retrieved_bytes))
        elif before is not None and before.boot != status.boot:
            self._history.clear()
        self._status, self._seen, self._trouble, self._silent_s = status, now, "", 0
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
            case "s" if self.tab in _SORTS:
                self._sort[self.tab] = (self._sort[self.tab] + 1) % len(_SORTS[self.tab])
                self._top = 0
            case "r" if self.tab in _SORTS:
                self._reversed[self.tab] = not self._reversed[self.tab]
                self._top = 0
            case "?" | "h":
                self._shows_keys = not self._shows_keys
            case "p" | " ":
                self.is_paused = not self.is_paused
            case "/":
                self._is_typing, self._filter, self._top = True, "", 0
            case "escape":
                self._filter, self._top = "", 0
            case "up" | "k":
                self._top = max(0, self._top - 1)
            case "down" | "j":
                self._top += 1  # no further than the last row; see _fitted
            case "page up":
                self._top = max(0, self._top - _PAGE)
            case "page down":
                self._top += _PAGE
            case _ if key.isascii() and key.isdigit() and 1 <= int(key) <= len(TABS):
                self._turn_to(TABS[int(key) - 1])
        return False

    def _turn_to(self, tab: str) -> None:
        self.tab, self._top, self._shows_keys = tab, 0, False

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

    def _sorted_by(self) -> str:
        return list(_SORTS[self.tab])[self._sort[self.tab]]

    # -- drawing

    def draw(self, console: Console) -> Layout:
        """The whole screen: the tabs, what the chosen one shows, as far as it fits, and the keys."""
        width, height = console.size
        if self._shows_keys:
            body: RenderableType = Listing(("keys", ""), [*_KEYS]).table(width, height - 2)
        elif self._status is None:
            body = Group(Text(clean(self._trouble) or "waiting for the server"))
        elif self.tab == TABS[0]:
            head = Group(view.summary(self._status, self._place, self._speeds), self._sparks(console))
            taken = len(console.render_lines(head, pad=False))
            body = Group(head, *self._overview(width, height - 2 - taken))
        else:
            body = Group(*self._one_table(self._status, width, height - 2))
        whole = Layout()
        whole.split_column(Layout(self._tabs(width), size=1), Layout(body, ratio=1), Layout(self._foot(width), size=1))
        return whole

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
            text, style = "  ".join([*data, why, "q quits"]), "yellow reverse"
        else:
            parts = [f"paused at {self._clock}, p resumes" if self.is_paused else self._clock, "q quits"]
            if self.tab in _SORTS:
                order = ", reversed" if self._reversed[self.tab] else ""
                parts.append(f"s sort: {self._sorted_by()}{order}")
            parts.append(f"/ filter{f': {self._filter}' if self._filter else ''}")
            parts += ["tab 1-7", *([] if self.is_paused else ["p pause"]), "? keys"]
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
        listings = [each for each in map(self._filtered, view.listings(self._status)) if each.rows]
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
        asked = now.asked_tokens
        line = Text.assemble(
            (f"kvdepot {clean(now.version)}", "bold"),
            f"  memory {share(part)} of {size(now.capacity_bytes)}",
            f"  reused {share(min(1.0, now.saved.tokens / asked)) if asked else '-'}",
            f"  stores {size(self._speeds.stored_bytes)}/s  retrieves {size(self._speeds.retrieved_bytes)}/s",
        )
        line.truncate(width, overflow="ellipsis")
        if self.tab == "prefixes" and self._prefixes is None:
            return [line, "", Text("waiting for the server's list", "dim")]
        whole = self._listing(now)
        listing = self._filtered(whole)
        if not listing.rows:
            hidden = f" match {clean(self._filter)!r}" if whole.rows else ""
            return [line, "", Text(f"no {self.tab}{hidden}", "dim")]
        lines = max(2, room - 3)  # without the line above, a blank one, and the head
        self._top = min(self._top, max(0, len(listing.rows) - lines))
        shown = Listing(listing.heads, listing.rows[self._top :])
        return [line, "", shown.table(width, lines)]

    def _listing(self, now: Status) -> Listing:
        """The chosen tab's table, sorted."""
        match self.tab:
            case "models":
                return view.models(self._in_order(now.namespaces), now.other_namespaces)
            case "prefixes":
                return view.prefixes(self._in_order(self._prefixes or []))
            case "engines":
                return view.engines(self._in_order(now.engines))
            case "tiers":
                return view.tiers(self._in_order(now.tiers))
            case "leases":
                return view.leases(self._in_order(now.leases))
        return view.events(now.events, len(now.events))

    def _in_order(self, rows: Iterable[_Row]) -> Sequence[_Row]:
        ordered = sorted(rows, key=_SORTS[self.tab][self._sorted_by()])
        return ordered[::-1] if self._reversed[self.tab] else ordered

    def _filtered(self, listing: Listing) -> Listing:
        """The rows that contain the filter's text, in either case."""
        if not self._filter:
            return listing
        text = self._filter.lower()
        return Listing(listing.heads, [row for row in listing.rows if any(text in str(cell).lower() for cell in row)])


def _spark(values: Sequence[float], limit: float, is_plain: bool) -> str:
    """A chart in one line. limit: the value of the highest letter; 0: the highest value."""
    letters = _PLAIN_SPARKS if is_plain else _SPARKS
    highest = limit or max(values, default=0.0)
    if highest <= 0:
        return letters[0] * len(values)
    return "".join(letters[round(min(max(each / highest, 0.0), 1.0) * (len(letters) - 1))] for each in values)
