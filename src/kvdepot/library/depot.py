"""The connection of a Python program to a depot: `kvdepot.connect`."""

from __future__ import annotations

import os
import secrets
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import TracebackType

import zmq

from kvdepot.client.launch import Embedded, Shared
from kvdepot.client.socket import CONNECT_S, Client
from kvdepot.config import default_url, home_url, url_in_environment
from kvdepot.errors import BadRequest, Unavailable
from kvdepot.library.namespace import Facts, Namespace
from kvdepot.library.shapes import Shape, State
from kvdepot.memory.arena_view import ArenaView
from kvdepot.protocol import wire
from kvdepot.protocol.status import Status, read

__all__ = ["Depot", "connect"]

_START_S = 30.0
_ANSWER_S = 30.0


def connect(url: str = "", key: str = "") -> Depot:
    """Connect to a depot; close it, or use it as a context manager.

    url: a server's address; empty: that in `KVDEPOT_URL`, or else the server that this user's engines share, which is
    started if it does not run; "embedded": a server of this process alone, which ends with it. key: as KVDEPOT_KEY, for
    a server that requires one. Blocks until the server answers, 30 s at most. Raises Unavailable without one.
    """
    server: Shared | Embedded | None = None
    if url == "embedded":
        name = f"library-{os.getpid()}-{secrets.token_hex(4)}"
        url = f"{home_url().rpartition('/')[0]}/{name}.sock"
        server = Embedded(url, name)
    elif not url:
        url = default_url()
        if not url_in_environment():
            server = Shared(url)
            server.start()
    depot = Depot(url, key, server)
    try:
        depot._client.learn_chunk_size(CONNECT_S if server is None else _START_S)
    except BaseException as exc:
        depot.close()
        if server is not None and not server.is_running():
            raise Unavailable(server.failure()) from exc
        raise
    return depot


class Depot:
    """A connected depot. Any thread may use it; a forked child may not, and connects itself."""

    def __init__(self, url: str, key: str = "", server: Shared | Embedded | None = None) -> None:
        """Use `connect`. server: started for this depot."""
        self.url = url
        self._server = server
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._pid = os.getpid()
        self._idle = threading.Condition()
        self._calls = 0  # in progress
        self._is_closed = False
        self._view: ArenaView | None = None
        try:
            self._client = Client(url, self._context, key=key, engine="library")
        except BaseException:
            self._context.term()
            if isinstance(server, Embedded):
                server.close()
            raise

    def __repr__(self) -> str:
        return f"<kvdepot.Depot {self.url}{' closed' if self._is_closed else ''}>"

    def __enter__(self) -> Depot:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def namespace(
        self,
        *,
        model: str,
        revision: str,
        dtype: str,
        shape: Shape | State | Sequence[Shape | State],
        adapter: str = "",
        chunk_tokens: int = 0,
    ) -> Namespace:
        """The KV of one model. Two programs share it exactly if they give the same facts.

        model: its name. revision: names its weights: a commit, or a digest of them. dtype: of the KV, such as
        "bfloat16". shape: of its layers' KV; several for layers of several kinds. adapter: names a LoRA adapter and its
        weights. chunk_tokens: tokens per chunk; 0: chosen by the size of a token's KV. Raises BadRequest for missing or
        impossible facts. Does not block.
        """
        with self._call() as client:
            shapes = [shape] if isinstance(shape, Shape | State) else list(shape)
            least = 0 if client.has_free_chunks else client.chunk_size
            return Namespace(self, Facts.checked(model, revision, dtype, adapter, shapes, chunk_tokens, least))

    def status(self) -> Status:
        """What `kvdepot status --json` prints. Blocks 30 s at most. Raises Unavailable without a server."""
        with self._call() as client:
            return read(client.ask(wire.Status()).result(_ANSWER_S))

    def close(self) -> None:
        """Close the connection once calls in other threads have ended; they are bounded in time. An embedded server
        ends. Safe twice."""
        if os.getpid() != self._pid:
            return
        with self._idle:
            was_closed, self._is_closed = self._is_closed, True
            self._idle.wait_for(lambda: not self._calls)
        if was_closed:
            return
        self._client.close()
        self._context.term()
        self._view = None
        if isinstance(self._server, Embedded):
            self._server.close()

    @contextmanager
    def _call(self) -> Iterator[Client]:
        """One call that uses the connection. Raises BadRequest after `close` or a fork."""
        if os.getpid() != self._pid:
            raise BadRequest("this depot was connected before a fork: call kvdepot.connect() in the child process")
        with self._idle:
            if self._is_closed:
                raise BadRequest("this depot is closed: call kvdepot.connect() again")
            self._calls += 1
        try:
            yield self._client
        finally:
            with self._idle:
                self._calls -= 1
                self._idle.notify_all()

    def _arena(self, name: str, boot: bytes) -> ArenaView:
        """The arena of a placement. Raises LayoutError, ArenaError or Unavailable."""
        view = self._view
        if view is None or view.key != (name, boot):
            view = self._view = ArenaView(name, boot)
        return view
