"""The screen of `kvdepot top`: what `kvdepot status` prints, with rates of the last minute, redrawn as time passes.

A Textual application on the main thread; a timer sends the requests and takes their answers, so that nothing blocks.
It uses the terminal's own colours. Invariant: text that may come from a client passes through `clean`.
"""

from __future__ import annotations

import asyncio
import signal
import time
from collections import deque
from typing import ClassVar

from rich.text import Text
from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import VerticalScroll
from textual.widgets import Footer, Static

from kvdepot.cli import view
from kvdepot.cli.output import clean, duration
from kvdepot.client.socket import Client, MessagingFuture
from kvdepot.errors import DeadlineExceeded, KVDepotError
from kvdepot.protocol import wire
from kvdepot.protocol.status import Status, read

_TICK_S = 0.1
_ANSWER_S = 4.0
"""Time to wait for an answer; then the server is asked again."""
_SILENT_S = 2.0
"""A server that answers this much later than it should is reported as silent."""
_WINDOW_S = 60.0
"""Rates are those of the last minute, or since the first status."""


class Top(App[None]):
    """Watches one server. Its return code is 0, 130 when interrupted, or 1 after an error, which it has printed."""

    ENABLE_COMMAND_PALETTE = False
    CSS = """
    Screen { overflow: hidden; }
    #state { height: 1; color: ansi_yellow; text-style: reverse; }
    VerticalScroll { scrollbar-size: 1 1; height: 1fr; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("k", "simulate_key('up')", show=False),
        Binding("j", "simulate_key('down')", show=False),
        Binding("p,space", "pause", "pause"),
        Binding("ctrl+c", "interrupt", show=False, priority=True),
        Binding("q,Q", "quit", "quit"),
    ]

    def __init__(self, client: Client, interval: float | None) -> None:
        """interval: seconds between requests for a status; None: show only what `show_status` is given."""
        super().__init__(ansi_color=True)
        self._client = client
        self._interval = interval
        self._is_paused = False
        self._statuses: deque[Status] = deque()  # of one boot and the last minute, the current one last
        self._trouble = ""  # why the last answer is missing
        self._answered = time.monotonic()  # when the last status came
        self._clock = ""  # the same as a time of day
        self._old = ""  # why the figures are old, as it was last drawn
        self._future: MessagingFuture[object] | None = None  # the request in flight
        self._due = 0.0  # the time of the next request

    def compose(self) -> ComposeResult:
        with VerticalScroll():
            yield Static(id="summary")
        yield Static(id="state")
        yield Footer(compact=True)

    def on_mount(self) -> None:
        self.theme = "ansi-dark"
        asyncio.get_running_loop().add_signal_handler(signal.SIGINT, self.action_interrupt)
        if self._interval is not None:
            self.set_interval(_TICK_S, self._tick)
        self.query_one(VerticalScroll).focus()
        self._draw()

    def on_resize(self) -> None:
        self._draw()

    def _tick(self) -> None:
        assert self._interval is not None
        if self._future is not None and self._future.query():
            future, self._future = self._future, None
            self._take(future)
        elif self._old != self._why_old():
            self._draw()
        now = time.monotonic()
        if not self._is_paused and self._future is None and now >= self._due:
            self._due = now + self._interval
            self._future = self._client.ask(wire.GetStatus(), deadline_s=_ANSWER_S)

    def _take(self, future: MessagingFuture[object]) -> None:
        try:
            self.show_status(read(future.result(0.0)))
            return
        except DeadlineExceeded:
            self._trouble = ""
        except KVDepotError as exc:
            self._trouble = str(exc)
        self._draw()

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

    def action_pause(self) -> None:
        self._is_paused ^= True
        self._answered = time.monotonic()
        self._draw()

    def action_interrupt(self) -> None:
        self.exit(return_code=130)

    def _draw(self) -> None:
        self._old = self._why_old()
        with self.batch_update():
            summary = self.query_one("#summary", Static)
            if self._statuses:
                now = self._statuses[-1]
                since = self._statuses[0] if self._statuses[0].uptime_s < now.uptime_s else None
                shown = view.summary(now, self._client.server_url, since, self._old)
                for listing in view.listings(now):
                    shown.renderables.extend(["", listing.table(self.size.width - 1)])
                summary.update(shown)
            else:
                summary.update(Text(self._old or "waiting for the server"))
            state = self.query_one("#state", Static)
            since_when = f"data from {self._clock}: " if self._clock and not self._is_paused else ""
            state.update(Text(f"{since_when}{self._old}", no_wrap=True, overflow="ellipsis"))
            state.display = bool(self._old)
