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
from typing import Any, ClassVar, TypeAlias

import msgspec
from rich.table import Table
from rich.text import Text
from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import VerticalScroll
from textual.widgets import ContentSwitcher, DataTable, Footer, Static

from kvdepot.cli import view
from kvdepot.cli.output import clean, count, duration, size
from kvdepot.client.socket import Client, MessagingFuture
from kvdepot.errors import DeadlineExceeded, KVDepotError
from kvdepot.protocol import wire
from kvdepot.protocol.leases import LeaseStatus
from kvdepot.protocol.status import NamespaceStatus, Status, read

_TICK_S = 0.1
_ANSWER_S = 4.0
"""Time to wait for an answer; then the server is asked again."""
_SILENT_S = 2.0
"""A server that answers this much later than it should is reported as silent."""
_LIST_S = 2.0
"""Least time between two lists of leases, which cost the server more than a status."""
_WINDOW_S = 60.0
"""Rates are those of the last minute, or since the first status."""
_NOT_SHOWN = ("histograms", "wall_s")
"""Attributes that the details of a row leave out."""

Row: TypeAlias = Any
"""A struct of the status, or of a list."""


@dataclass(frozen=True)
class TopTab:
    """A tab with a table. rows: of a status, or the type of what the server lists on request. sorts: attributes."""

    rows: Callable[[Status], Sequence[Row]] | type[msgspec.Struct]
    listing: Callable[[Sequence[Row]], view.Listing]
    sorts: tuple[str, ...] = ("",)


def _models(now: Status) -> Sequence[NamespaceStatus]:
    return [*now.namespaces, *([now.other_namespaces] if now.other_namespaces is not None else [])]


_TABLES = {
    "models": TopTab(_models, view.models, ("bytes", "chunks", "asked_tokens", "model")),
    "engines": TopTab(lambda now: now.engines, view.engines, ("models", "sessions", "pinned_chunks", "idle_s")),
    "tiers": TopTab(lambda now: now.tiers, view.tiers, ("order", "bytes", "queued_bytes")),
    "leases": TopTab(LeaseStatus, view.leases, ("bytes", "ends_s", "name")),
    "events": TopTab(lambda now: now.events[::-1], view.events),
}
TABS = ("overview", *_TABLES)


class Top(App[None]):
    """Watches one server. Its return code is 0, 130 when interrupted, or 1 after an error, which it has printed."""

    ENABLE_COMMAND_PALETTE = False
    CSS = """
    Screen { overflow: hidden; }
    #tabs, #state { height: 1; }
    #state { color: ansi_yellow; text-style: reverse; }
    ContentSwitcher { height: 1fr; }
    VerticalScroll, DataTable { scrollbar-size: 1 1; height: 1fr; }
    DataTable > .datatable--header, DataTable:ansi > .datatable--header { background: ansi_default; }
    DataTable > .datatable--cursor, DataTable:focus > .datatable--cursor {
        background: ansi_default; color: ansi_default; text-style: reverse;
    }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        *(Binding(str(number), f"show({number - 1})", show=False) for number in range(1, len(TABS) + 1)),
        Binding("tab,right", "turn(1)", "next", priority=True),
        Binding("shift+tab,left", "turn(-1)", show=False, priority=True),
        Binding("k", "simulate_key('up')", show=False),
        Binding("j", "simulate_key('down')", show=False),
        Binding("escape", "close", "back"),
        Binding("s", "sort", "sort"),
        Binding("p,space", "pause", "pause"),
        Binding("ctrl+c", "interrupt", show=False, priority=True),
        Binding("q,Q", "quit", "quit"),
    ]

    def __init__(self, client: Client, interval: float | None) -> None:
        """interval: seconds between requests for a status; None: show only what `show_status` is given."""
        super().__init__(ansi_color=True)
        self._client = client
        self._interval = interval
        self._tab = TABS[0]
        self._sort = dict.fromkeys(TABS, 0)
        self._is_paused = False
        self._opened: Row = None  # the row whose details are shown
        self._shown: list[Row] = []  # the rows of the table
        self._statuses: deque[Status] = deque()  # of one boot and the last minute, the current one last
        self._lists: dict[str, list[Row]] = {}  # the server's latest lists, by tab
        self._trouble = ""  # why the last answer is missing
        self._answered = time.monotonic()  # when the last status came
        self._clock = ""  # the same as a time of day
        self._old = ""  # why the figures are old, as it was last drawn
        self._futures: dict[str, MessagingFuture[object]] = {}  # requests in flight, by tab
        self._due: dict[str, float] = {}  # the time of the next request, by tab

    def compose(self) -> ComposeResult:
        yield Static(id="tabs")
        with ContentSwitcher(initial="overview"):
            with VerticalScroll(id="overview"):
                yield Static(id="summary")
            yield DataTable(id="table", cursor_type="row")
            with VerticalScroll(id="details"):
                yield Static(id="text")
        yield Static(id="state")
        yield Footer(compact=True)

    def on_mount(self) -> None:
        self.theme = "ansi-dark"
        asyncio.get_running_loop().add_signal_handler(signal.SIGINT, self.action_interrupt)
        if self._interval is not None:
            self.set_interval(_TICK_S, self._tick)
        self._draw()

    def on_resize(self) -> None:
        self._draw()

    # -- what comes from the server

    def _tick(self) -> None:
        answered = [tab for tab, future in self._futures.items() if future.query()]
        for tab in answered:
            self._take(tab, self._futures.pop(tab))
        if answered or self._old != self._why_old():
            self._draw()
        if self._is_paused:
            return
        self._ask("overview", wire.Status(), 0.0)
        if self._tab == "leases":
            self._ask(self._tab, wire.Leases(), _LIST_S)

    def _ask(self, tab: str, request: wire.Request, least_s: float) -> None:
        assert self._interval is not None
        now = time.monotonic()
        if tab not in self._futures and now >= self._due.get(tab, 0.0):
            self._due[tab] = now + max(self._interval, least_s)
            self._futures[tab] = self._client.ask(request, deadline_s=_ANSWER_S)

    def _take(self, tab: str, future: MessagingFuture[object]) -> None:
        try:
            answer = future.result(0.0)
            if tab == "overview":
                self.show_status(read(answer))
            else:
                kind: Any = _TABLES[tab].rows
                self._lists[tab] = msgspec.convert(answer, list[kind])
        except DeadlineExceeded:
            self._trouble = ""
        except (KVDepotError, msgspec.ValidationError) as exc:
            self._trouble = str(exc)

    def show_status(self, status: Status) -> None:
        if self._statuses and self._statuses[-1].boot != status.boot:
            self._statuses.clear()
        self._statuses.append(status)
        while status.uptime_s - self._statuses[0].uptime_s > _WINDOW_S:
            self._statuses.popleft()
        self._trouble, self._answered, self._clock = "", time.monotonic(), time.strftime("%H:%M:%S")
        self._draw()

    def _why_old(self) -> str:
        """Why the figures are old; empty if they are not."""
        silent_s = time.monotonic() - self._answered
        if self._is_paused:
            return f"paused at {self._clock}"
        if self._trouble:
            return clean(self._trouble)
        is_silent = self._interval is not None and silent_s > self._interval + _SILENT_S
        return f"no answer for {duration(int(silent_s))}" if is_silent else ""

    # -- keys

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool:
        """Whether a key does something now, and the footer shows it."""
        if action == "close":
            return self._opened is not None
        return action != "sort" or (self._opened is None and bool(self._sorted_by()))

    def action_show(self, number: int) -> None:
        """Show a tab."""
        self._tab, self._opened = TABS[number], None
        self.query_one(DataTable).move_cursor(row=0)
        self._draw()

    def action_turn(self, step: int) -> None:
        self.action_show((TABS.index(self._tab) + step) % len(TABS))

    def action_sort(self) -> None:
        self._sort[self._tab] += 1
        self._draw()

    def action_close(self) -> None:
        self._opened = None
        self._draw()

    def action_pause(self) -> None:
        """Ask the server for nothing, or go on."""
        self._is_paused ^= True
        self._answered = time.monotonic()
        self._draw()

    def action_interrupt(self) -> None:
        """End as an interrupted command does."""
        self.exit(return_code=130)

    def on_data_table_row_selected(self, event: Any) -> None:
        """Enter: open the details of a row."""
        if event.cursor_row < len(self._shown):
            self._opened = self._shown[event.cursor_row]
            self._draw()

    def _sorted_by(self) -> str:
        sorts = _TABLES[self._tab].sorts if self._tab in _TABLES else ("",)
        return sorts[self._sort[self._tab] % len(sorts)]

    # -- drawing

    def _draw(self) -> None:
        """Show the current state: the tabs, what the chosen one shows, and why that is old."""
        self._old = self._why_old()
        shown = "table" if self._tab in _TABLES else "overview"
        with self.batch_update():
            tabs = Text(no_wrap=True, overflow="ellipsis")
            for number, tab in enumerate(TABS, 1):
                tabs.append(f" {number} {tab} ", "bold reverse" if tab == self._tab else "dim")
            self.query_one("#tabs", Static).update(tabs)
            if text := self._text():
                self.query_one("#text", Static).update(text)
                shown = "details"
            state = self.query_one("#state", Static)
            since = f"data from {self._clock}: " if self._clock and not self._is_paused else ""
            state.update(Text(f"{since}{self._old}", no_wrap=True, overflow="ellipsis"))
            state.display = bool(self._old)
            self.query_one(ContentSwitcher).current = shown
            self.query_one(f"#{shown}").focus()
            self.refresh_bindings()

    def _text(self) -> Text | Table | None:
        """Fill the overview or the table; returns details, or why there is no row, if they are shown instead."""
        if not self._statuses:
            return Text(self._old or "waiting for the server")
        now = self._statuses[-1]
        if self._tab not in _TABLES:
            since = self._statuses[0] if self._statuses[0].uptime_s < now.uptime_s else None
            summary = view.summary(now, self._client.server_url, since, self._old)
            for listing in view.listings(now):
                summary.renderables.extend(["", listing.table(self.size.width - 1)])
            self.query_one("#summary", Static).update(summary)
            return None
        if self._opened is not None:
            return view.grid([(name, Text(clean(text))) for name, text in _fields(self._opened)])
        tab = _TABLES[self._tab]
        rows = self._lists.get(self._tab) if isinstance(tab.rows, type) else tab.rows(now)
        if rows is None:
            return Text("waiting for the server's list", "dim")
        if not rows:
            return Text(f"no {self._tab}", "dim")
        self._shown = sorted(rows, key=lambda row: (view.is_sum(row), _rank(row, self._sorted_by())))
        self._fill(tab.listing(self._shown))
        return None

    def _fill(self, listing: view.Listing) -> None:
        """Fill the table, as far as its columns fit; the cursor stays in its line."""
        table = self.query_one(DataTable)
        row, top = table.cursor_row, table.scroll_y
        table.clear(columns=True)
        widths = listing.widths(self.size.width - 2)  # without a cell's padding at the start, and the scroll bar
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


def _rank(row: Row, sort: str) -> Any:
    """The place of a row by an attribute: the largest number first, the shortest time, or by the alphabet."""
    value = getattr(row, sort, 0)
    if value is None:
        return float("inf")
    return value if isinstance(value, str | list) or sort.endswith("_s") else -value


def _fields(row: Row) -> Iterator[tuple[str, str]]:
    for name, value in msgspec.to_builtins(row).items():
        if name not in _NOT_SHOWN and value not in (None, "", [], {}):
            yield name.replace("_", " ").removesuffix(" s"), _in_words(name, value)


def _in_words(name: str, value: Any) -> str:
    match value:
        case dict():
            return ", ".join(f"{key.replace('_', ' ')} {_in_words(key, each)}" for key, each in value.items() if each)
        case list():
            return "; ".join(_in_words(name, each) for each in value)
        case int() | float() if name.endswith("_s"):
            return duration(value)
        case int() | float() if name.endswith("bytes"):
            return size(value)
        case int() if name != "pid":
            return count(value)
    return str(value)
