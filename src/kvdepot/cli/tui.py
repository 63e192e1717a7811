"""The screen of `kvdepot top`: an overview of a server, and tables of what it holds, chosen by keys.

A Textual application on the main thread; a timer sends the requests and takes their answers, so that nothing blocks.
It uses the terminal's own colours. Invariant: text that may come from a client passes through `clean`.
"""

from __future__ import annotations

import asyncio
import signal
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, ClassVar, TypeAlias

import msgspec
from rich.console import Group
from rich.table import Table
from rich.text import Text
from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import VerticalScroll
from textual.widgets import ContentSwitcher, DataTable, Input, Static

from kvdepot.cli import view
from kvdepot.cli.output import clean, count, duration, share, size
from kvdepot.client.socket import Client, MessagingFuture
from kvdepot.errors import DeadlineExceeded, KVDepotError
from kvdepot.protocol import wire
from kvdepot.protocol.leases import LeaseStatus
from kvdepot.protocol.metrics import percentile
from kvdepot.protocol.prefixes import SORTS, Prefix
from kvdepot.protocol.status import NamespaceStatus, Status, read

__all__ = ["TABS", "Top"]

_TICK_S = 0.1
_ANSWER_S = 4.0
"""Time to wait for an answer; then the server is asked again."""
_LIST_S = 2.0
"""Least time between two lists of prefixes or leases, which cost the server more than a status."""
_MOST_LISTED = 200
_WINDOW_S = 60.0
"""Rates are those of the last minute, or since the first status."""
_SPARK_CELLS = 14
_SPARKS = "▁▂▃▄▅▆▇█"
_WIDE = 78
"""Columns that all tabs' names need; in narrower terminals, only the chosen one's is written out."""
_KEYS = (
    ("1-7, tab, left, right", "choose what to show"),
    ("up, down, k, j, page up, page down", "choose a row, or scroll"),
    ("enter", "show all that is known about the row; esc goes back"),
    ("s, r", "sort by the next column, in reverse order"),
    ("/", "show only rows with a text; esc shows all again"),
    ("p, space", "pause"),
    ("?, h", "show or hide this list"),
    ("q", "quit"),
)
_IDENTITY = ("tenant", "model", "name", "id", "kind", "world_size", "blocks_in_chunk", "chunk_tokens", "wall_s", "text")
"""Attributes that together identify a row of any table."""


Row: TypeAlias = Any
"""A struct of the status, or of a list."""


@dataclass(frozen=True)
class TopTab:
    """A tab with a table. rows: of a status; None if the server lists them on request. sorts: attributes of a row."""

    rows: Callable[[Status], Sequence[Row]] | None
    listing: Callable[[Sequence[Row]], view.Listing]
    sorts: tuple[str, ...] = ()


def _models(now: Status) -> Sequence[NamespaceStatus]:
    return [*now.namespaces, *([now.other_namespaces] if now.other_namespaces is not None else [])]


_TABLES = {
    "models": TopTab(_models, view.models, ("bytes", "chunks", "asked_tokens", "model")),
    "prefixes": TopTab(None, view.prefixes, SORTS),
    "engines": TopTab(lambda now: now.engines, view.engines, ("models", "sessions", "pinned_chunks", "idle_s")),
    "tiers": TopTab(lambda now: now.tiers, view.tiers, ("order", "bytes", "queued_bytes")),
    "leases": TopTab(None, view.leases, ("bytes", "ends_s", "name")),
    "events": TopTab(lambda now: now.events[::-1], view.events),
}
TABS = ("overview", *_TABLES)


class Top(App[None]):
    """Watches one server. Its return code is 0, 130 when interrupted, or 1 after an error, which it has printed."""

    ENABLE_COMMAND_PALETTE = False
    CSS = """
    Screen { overflow: hidden; }
    #tabs, #foot { height: 1; }
    #foot { text-style: reverse; }
    ContentSwitcher { height: 1fr; }
    #foot.warns { color: ansi_yellow; }
    VerticalScroll, DataTable { scrollbar-size: 1 1; height: 1fr; }
    DataTable > .datatable--header, DataTable:ansi > .datatable--header { background: ansi_default; }
    DataTable > .datatable--cursor, DataTable:focus > .datatable--cursor {
        background: ansi_default; color: ansi_default; text-style: reverse;
    }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        *(Binding(str(number), f"show({number - 1})") for number in range(1, len(TABS) + 1)),
        Binding("tab,right", "turn(1)", priority=True),
        Binding("shift+tab,left", "turn(-1)", priority=True),
        Binding("escape", "close", priority=True),
        Binding("ctrl+c", "interrupt", priority=True),
        Binding("k", "simulate_key('up')"),
        Binding("j", "simulate_key('down')"),
        Binding("s", "sort"),
        Binding("r", "reverse"),
        Binding("slash", "filter"),
        Binding("p,space", "pause"),
        Binding("question_mark,h", "keys"),
        Binding("q,Q", "quit"),
    ]

    def __init__(self, client: Client, interval: float | None) -> None:
        """interval: seconds between requests for a status; None: show only what `show_status` is given."""
        super().__init__(ansi_color=True)
        self._client = client
        self._interval = interval
        self._tab = TABS[0]
        self._sort = dict.fromkeys(TABS, 0)
        self._reversed = dict.fromkeys(TABS, False)
        self._is_paused = self._shows_keys = False
        self._opened: Row = None  # the row whose details are shown, as it was last listed
        self._shown: list[Row] = []  # the rows of the table
        self._statuses: deque[Status] = deque()  # of one boot and the last minute, the current one last
        self._lists: dict[str, list[Row]] = {}  # the server's latest lists, by tab
        self._clock = ""  # the time of the last status
        self._trouble = ""  # why the last answer is missing
        self._silent_since: float | None = None  # when the first request was sent that got no answer
        self._silent_s = 0  # as it was last drawn
        self._asked = self._listed = float("-inf")  # when the last status and list were asked for
        self._wanted = ("", "")  # the tab and order of that list
        self._future: MessagingFuture[object] | None = None
        self._list_future: MessagingFuture[object] | None = None

    def compose(self) -> ComposeResult:
        yield Static(id="tabs")
        with ContentSwitcher(initial="overview"):
            with VerticalScroll(id="overview"):
                yield Static(id="summary")
            yield DataTable(id="table", cursor_type="row")
            with VerticalScroll(id="details"):
                yield Static(id="text")
        yield Input(compact=True, placeholder="text in the rows to show; enter: apply, esc: clear")
        yield Static(id="foot")

    def on_mount(self) -> None:
        self.theme = "ansi-dark"
        self.query_one(Input).display = False
        asyncio.get_running_loop().add_signal_handler(signal.SIGINT, self.action_interrupt)
        if self._interval is not None:
            self.set_interval(_TICK_S, self._tick)
        self._draw()

    def on_resize(self) -> None:
        self._draw()

    # -- what comes from the server

    def _tick(self) -> None:
        """Send requests that are due, and show what has changed."""
        assert self._interval is not None
        now = time.monotonic()
        changed = False
        if self._future is not None and self._future.query():
            self._take_status(self._future)
            self._future, changed = None, True
        if self._list_future is not None and self._list_future.query():
            self._take_list(self._list_future)
            self._list_future, changed = None, True
        silent_s = 0 if self._silent_since is None or self._is_paused else int(now - self._silent_since)
        if changed or silent_s != self._silent_s:
            self._silent_s = silent_s
            self._draw()
        if self._is_paused:
            return
        if self._future is None and now - self._asked >= self._interval:
            self._asked, self._future = now, self._client.ask(wire.Status(), deadline_s=_ANSWER_S)
        wanted = self._tab, self._sorted_by()
        is_due = wanted != self._wanted or now - self._listed >= max(self._interval, _LIST_S)
        if self._list_future is None and is_due and self._tab in _TABLES and _TABLES[self._tab].rows is None:
            self._wanted, self._listed = wanted, now
            is_leases = self._tab == "leases"
            request: wire.Request = wire.Leases() if is_leases else wire.Prefixes("", wanted[1], _MOST_LISTED)
            self._list_future = self._client.ask(request)

    def _take_status(self, future: MessagingFuture[object]) -> None:
        try:
            self.show_status(read(future.result(0.0)))
        except DeadlineExceeded:
            self._silent_since, self._trouble = self._silent_since or self._asked, ""
        except KVDepotError as exc:
            self._trouble = str(exc)

    def show_status(self, status: Status) -> None:
        """Show a new status."""
        if self._statuses and self._statuses[-1].boot != status.boot:
            self._statuses.clear()
        self._statuses.append(status)
        while status.uptime_s - self._statuses[0].uptime_s > _WINDOW_S:
            self._statuses.popleft()
        self._trouble, self._silent_since, self._clock = "", None, time.strftime("%H:%M:%S")
        self._draw()

    def _take_list(self, future: MessagingFuture[object]) -> None:
        tab = self._wanted[0]
        kind: Any = LeaseStatus if tab == "leases" else Prefix
        try:
            self.show_list(tab, msgspec.convert(future.result(0.0), list[kind]))
        except (KVDepotError, msgspec.ValidationError) as exc:
            self._trouble = str(exc)

    def show_list(self, tab: str, rows: list[Row]) -> None:
        """Show what the server lists on request for a tab."""
        self._lists[tab] = rows
        self._draw()

    # -- keys

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool:
        """Whether a key does something now: while a filter is typed, it may be part of that."""
        return not isinstance(self.focused, Input) or action not in ("turn", "show")

    def action_show(self, number: int) -> None:
        """Show a tab."""
        self._tab, self._shows_keys, self._opened = TABS[number], False, None
        self.query_one(DataTable).move_cursor(row=0)
        self._end_filter("")

    def action_turn(self, step: int) -> None:
        """Show the next tab, or the one before."""
        self.action_show((TABS.index(self._tab) + step) % len(TABS))

    def action_sort(self) -> None:
        """Sort by the next column."""
        self._sort[self._tab] += 1
        self._draw()

    def action_reverse(self) -> None:
        """Reverse the order."""
        self._reversed[self._tab] ^= True
        self._draw()

    def action_filter(self) -> None:
        """Let a text be typed that the rows must contain."""
        if self._tab in _TABLES:
            self._opened, self._shows_keys = None, False
            box = self.query_one(Input)
            box.display, box.value = True, ""
            box.focus()
            self._draw()

    def action_close(self) -> None:
        """Close the keys, the details or the filter."""
        if self._shows_keys or self._opened is not None:
            self._shows_keys, self._opened = False, None
            self._draw()
        else:
            self._end_filter("")

    def action_pause(self) -> None:
        """Ask the server for nothing, or go on."""
        self._is_paused ^= True
        self._silent_since = None
        self._draw()

    def action_keys(self) -> None:
        """Show or hide the list of keys."""
        self._shows_keys ^= True
        self._draw()

    def action_interrupt(self) -> None:
        """End as an interrupted command does."""
        self.exit(return_code=130)

    def on_data_table_row_selected(self, event: Any) -> None:
        """Enter: open the details of a row."""
        if event.cursor_row < len(self._shown):
            self._opened = self._shown[event.cursor_row]
            self._draw()

    def on_input_changed(self) -> None:
        """Show the rows that match what was typed so far."""
        self._draw()

    def on_input_submitted(self, event: Any) -> None:
        """Enter: keep the filter."""
        self._end_filter(event.value)

    def _end_filter(self, pattern: str) -> None:
        box = self.query_one(Input)
        box.display, box.value = False, pattern
        self._draw()

    def _sorted_by(self) -> str:
        sorts = _TABLES[self._tab].sorts if self._tab in _TABLES else ()
        return sorts[self._sort[self._tab] % len(sorts)] if sorts else ""

    # -- drawing

    def _draw(self) -> None:
        """Show the current state: the tabs, what the chosen one shows, and a line of state and keys."""
        shown = "table" if self._tab in _TABLES else "overview"
        with self.batch_update():
            self.query_one("#tabs", Static).update(self._tabs())
            if text := self._text():
                self.query_one("#text", Static).update(text)
                shown = "details"
            elif shown == "overview":
                self.query_one("#summary", Static).update(self._overview(self._statuses[-1]))
            foot = self.query_one("#foot", Static)
            foot.update(self._foot())
            foot.set_class(bool(self._trouble or self._silent_s or self._is_paused), "warns")
            self.query_one(ContentSwitcher).current = shown
            if not self.query_one(Input).display:
                self.query_one(f"#{shown}").focus()

    def _text(self) -> Text | Table | None:
        """Fill the table; returns keys, details, or why there is no row, if they are shown instead."""
        if self._shows_keys:
            return _grid(_KEYS)
        if not self._statuses:
            return Text(clean(self._trouble) or "waiting for the server")
        if self._tab not in _TABLES:
            return None
        tab, now = _TABLES[self._tab], self._statuses[-1]
        rows = self._lists.get(self._tab) if tab.rows is None else tab.rows(now)
        if rows is None:
            return Text("waiting for the server's list", "dim")
        if self._opened is not None:
            return self._details(rows)
        pattern = self.query_one(Input).value.lower()
        rows = _in_order(rows, self._sorted_by(), self._reversed[self._tab])
        cells = tab.listing(rows).rows
        self._shown = [
            row for row, line in zip(rows, cells, strict=True) if pattern in " ".join(map(str, line)).lower()
        ]
        if not self._shown:
            return Text(f"no {self._tab}" + (f" match {clean(pattern)!r}" if rows else ""), "dim")
        self._fill(tab.listing(self._shown))
        return None

    def _fill(self, listing: view.Listing) -> None:
        """Fill the table, as far as its columns fit; the cursor stays in its line."""
        table = self.query_one(DataTable)
        row, top = table.cursor_row, table.scroll_y
        table.clear(columns=True)
        room = self.size.width - 2  # a cell's padding at the start, and the scroll bar
        widths = listing.widths(room)
        sides: list[Any] = ["right" if head.startswith(">") else "left" for head in listing.heads[: len(widths)]]
        for head, side, width in zip(listing.heads, sides, widths, strict=False):
            table.add_column(Text(head.lstrip(">"), justify=side), width=width)
        for line in listing.rows:
            cells = (Text(clean(each)) if isinstance(each, str) else each for each in line)
            table.add_row(*(
                Text.assemble(cell, justify=side, no_wrap=True, overflow="ellipsis")
                for cell, side in zip(cells, sides, strict=False)
            ))  # fmt: skip
        table.move_cursor(row=min(row, len(listing.rows) - 1), scroll=False)
        table.scroll_to(y=top, animate=False)

    def _tabs(self) -> Text:
        tabs = Text(no_wrap=True, overflow="ellipsis")
        for number, tab in enumerate(TABS, 1):
            name = tab if tab == self._tab or self.size.width >= _WIDE else tab[:3]
            tabs.append(f" {number} {name} ", "bold reverse" if tab == self._tab else "dim")
        return tabs

    def _foot(self) -> Text:
        pattern = clean(self.query_one(Input).value)
        if self._trouble or self._silent_s:
            why = clean(self._trouble) or f"no answer for {duration(self._silent_s)}"
            parts = ["q quits", self._clock and f"data from {self._clock}", why]
        else:
            parts = [f"paused at {self._clock}, p resumes" if self._is_paused else self._clock, "q quits", "? keys"]
            if self._opened is not None:
                parts.append("esc back")
            elif self._tab in _TABLES:
                order = ", reversed" if self._reversed[self._tab] else ""
                parts += [f"s sort: {self._sorted_by().replace('_', ' ')}{order}" if self._sorted_by() else ""]
                parts += [f"/ filter: {pattern}" if pattern else "/ filter", "enter details"]
            parts += ["tab 1-7", "" if self._is_paused else "p pause"]
        foot = Text("  ".join(filter(None, parts)))
        foot.truncate(self.size.width, overflow="ellipsis", pad=True)
        return foot

    def _overview(self, now: Status) -> Group:
        since = self._statuses[0] if self._statuses[0].uptime_s < now.uptime_s else None
        silence = f" for {duration(self._silent_s)}" if self._silent_s else ""
        old = f"No answer{silence}; figures of {self._clock}" if silence or self._trouble else ""
        parts: list[Any] = [view.summary(now, self._client.server_url, since, old), self._sparks()]
        for listing in view.listings(now):
            parts += ["", listing.table(self.size.width - 1)]
        return Group(*parts)

    def _sparks(self) -> Text:
        """Charts of reuse and throughput from status to status."""
        pairs = list(pairwise(list(self._statuses)[-_SPARK_CELLS - 1 :]))
        times = [max(now.uptime_s - before.uptime_s, _TICK_S) for before, now in pairs]
        tokens = [view.increase(before.tokens, now.tokens) for before, now in pairs]
        parts: list[Any] = [
            ("reused ", "bold"),
            (_spark([each.reused / max(each.asked, 1) for each in tokens], 1.0), "cyan"),
        ]
        for name, field in (("stores", "stored_bytes"), ("retrieves", "retrieved_bytes")):
            rates = [
                (getattr(now, field) - getattr(before, field)) / passed_s
                for (before, now), passed_s in zip(pairs, times, strict=True)
            ]
            parts += [(f"  {name} ", "bold"), (_spark(rates, max(rates, default=0.0)), "cyan")]
        return Text.assemble(*parts, no_wrap=True, overflow="ellipsis")

    def _details(self, rows: Sequence[Row]) -> Table:
        """All that is known about the row that was opened."""
        now = next((row for row in rows if _identity(row) == _identity(self._opened)), None)
        self._opened = self._opened if now is None else now
        grid = _grid(list(_fields(self._opened)))
        if now is None:
            grid.add_row("", Text("the server does not list it any more", "yellow"))
        return grid


def _fields(row: Row) -> Iterator[tuple[str, str]]:
    """Names and values of all fields of a row that have one."""
    for name, value in msgspec.structs.asdict(row).items():
        label = name.replace("_", " ").removesuffix(" s")
        match value:
            case None | "" | []:
                continue
            case dict():
                yield from ((key, count(number)) for key, number in sorted(value.items()) if number)
            case list() if name == "histograms":
                for each in value:
                    if each.name.endswith("_seconds") and (calls := sum(each.counts)):
                        half, most = (duration(percentile(each.counts, part)) for part in (0.5, 0.99))
                        yield each.name.removesuffix("_seconds"), f"{count(calls)} calls, p50 {half}, p99 {most}"
            case list() if name == "groups":
                for number, each in enumerate(value):
                    held = (
                        f"{count(each.chunks)} chunks, {size(each.bytes)}; needed to resume: {view.needs(each.reach)}"
                    )
                    yield f"KV cache group {number}", held
            case list():
                yield label, ", ".join(map(str, value))
            case _ if name == "wall_s":
                yield "time", time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(value))
            case int() | float() if name.endswith("_s"):
                yield label, duration(value)
            case int() | float() if name.endswith("bytes"):
                yield label, size(value)
            case int() if name != "pid":
                yield label, count(value)
            case _:
                yield label, str(value)
    if isinstance(row, NamespaceStatus) and row.asked_tokens:
        yield (
            "found, reused",
            f"{share(row.found_tokens / row.asked_tokens)}, {share(row.reused_tokens / row.asked_tokens)}",
        )


def _grid(fields: Sequence[tuple[str, str]]) -> Table:
    grid = Table.grid(padding=(0, 2, 0, 0))
    grid.add_column(style="bold", no_wrap=True)
    grid.add_column(overflow="fold")
    for name, value in fields:
        grid.add_row(name, Text(clean(value)))
    return grid


def _identity(row: Row) -> list[object]:
    return [getattr(row, name, None) for name in _IDENTITY]


def _in_order(rows: Sequence[Row], sort: str, is_reversed: bool) -> list[Row]:
    """The rows sorted by an attribute: the largest number first, the shortest time, or by the alphabet.

    The sum of the rows that the server does not list stays the last.
    """
    values = {id(row): getattr(row, sort, 0) for row in rows}
    if sort.endswith("_s"):
        values = {row: float("inf") if value is None else value for row, value in values.items()}
    is_descending = not sort.endswith("_s") and not any(isinstance(each, str | list) for each in values.values())
    ordered = sorted(
        rows, key=lambda row: values[id(row)] or 0 if is_descending else values[id(row)], reverse=is_descending
    )
    if is_reversed:
        ordered.reverse()
    return sorted(ordered, key=lambda row: isinstance(row, NamespaceStatus) and view.is_sum(row))


def _spark(values: Sequence[float], highest: float) -> str:
    """A chart in one line that begins at 0. highest: the value of the highest letter."""
    letters = (_SPARKS[round(min(max(each / (highest or 1.0), 0.0), 1.0) * (len(_SPARKS) - 1))] for each in values)
    return "".join(letters).ljust(_SPARK_CELLS)
