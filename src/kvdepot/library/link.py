"""One program's connection to a depot, as its calls share it: until when it is used, and the arena behind it."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from kvdepot.client.calls import OwnClient
from kvdepot.client.socket import Client
from kvdepot.errors import ArenaError, BadRequest, Unavailable
from kvdepot.memory.arena_view import ArenaView


class Link:
    """A client that many threads use, and that is closed when none does."""

    def __init__(self, url: str, key: str) -> None:
        """Raises Unavailable or ConfigError, as Client."""
        self.is_closed = False
        self._client = OwnClient(url, key, "library")
        self._pid = os.getpid()
        self._idle = threading.Condition()
        self._calls = 0  # in progress
        self._view: ArenaView | None = None

    @contextmanager
    def call(self) -> Iterator[Client]:
        """Use the client. Raises BadRequest after `close`, and in a forked child."""
        if os.getpid() != self._pid:
            raise BadRequest("this depot was connected before a fork: call kvdepot.connect() in the child process")
        with self._idle:
            if self.is_closed:
                raise BadRequest("this depot is closed: call kvdepot.connect() again")
            self._calls += 1
        try:
            yield self._client
        finally:
            with self._idle:
                self._calls -= 1
                self._idle.notify_all()

    def arena(self, name: str, boot: bytes) -> ArenaView:
        """The arena of a placement. Raises ArenaError or Unavailable."""
        view = self._view
        if view is None or view.key != (name, boot):
            try:
                view = self._view = ArenaView(self._client.arena_dir, name, boot)
            except (ArenaError, OSError, ValueError) as exc:  # its file is gone, or address space is short
                raise Unavailable(f"the arena cannot be mapped: {exc}") from exc
        return view

    def close(self) -> bool:
        """Close the client once no call uses it: a client that has left must not copy any more. Blocks until then.

        Returns whether this was the first call in the process that connected.
        """
        if os.getpid() != self._pid:
            return False
        with self._idle:
            was_closed, self.is_closed = self.is_closed, True
            self._idle.wait_for(lambda: not self._calls)
        if not was_closed:
            self._client.close()
            self._view = None
        return not was_closed
