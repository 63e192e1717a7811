"""Connects an engine to its server, however late that comes. Owned by connector.py.

A thread of its own waits for the server, learns its chunk size, and makes the objects that the half needs; for a
worker, it registers the KV. (Within the engine's own calls, a handshake would take several calls, and registering would
stall all requests.) The engine's thread connects the half with `advance`. From then on the thread only watches the
connection: it reads the client's socket now and then, because an idle engine does not, so that the client
(client/connection.py) finds a server that has come back; and it starts a server again that engines start and that has
crashed. Invariants: a half belongs to the engine's thread; after the start, nothing here waits on that thread or raises
into it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any, Protocol

from vllm.logger import init_logger

from kvdepot.client.calls import OwnClient
from kvdepot.client.socket import CONNECT_S, Client
from kvdepot.errors import ArenaError, KVDepotError, Unavailable
from kvdepot.integrations.vllm.settings import PASSING, REQUIRED_S, ServerPlace
from kvdepot.protocol import wire
from kvdepot.protocol.endpoints import is_taken

log = init_logger(__name__)

_LOOK_S = 0.05
_FIRST_LOOK_S, _LONGEST_LOOK_S = 0.001, 0.1
"""Pauses between looks for an answer, in seconds. They grow: a server that is there answers at once, and waiting for
one that is not must not waste the engine's time."""
_REGISTER_S = 30.0
"""A start waits this long for a server that has answered, and to which the KV is being registered."""
_PAUSE_S = 5.0
"""Pause in seconds after a failed attempt."""
_WATCH_S, _SEEK_S = 0.25, 0.1
"""Seconds between looks at the connection: while there is one, and while there is none."""
_LOST_S = 1.0
"""A server that is back within this time was not lost: requests wait that long for it (client/connection.py)."""
_END_S = 5.0


class _Half(Protocol):
    def connect(self, made: Any) -> None: ...

    def shutdown(self) -> None: ...


class ServerLink:
    """The connection of the half of one role."""

    def __init__(self, place: ServerPlace, half: _Half) -> None:
        """Raises ConfigError for a key file that cannot be used.

        An address that cannot be connected to, such as another user's socket, is that of a server that is away.
        """
        self._half = half
        self._place = place
        self._client: OwnClient | None = None
        self._make: Callable[[Client], object] | None = None
        self._made: object = None  # made by the thread, which does not touch it any more
        self._is_connected = False
        self._error: KVDepotError | None = None  # of the last attempt
        self._refusal: KVDepotError | None = None  # an error that no later attempt can cure
        self._logged: set[str] = set()
        self._settled = threading.Event()  # there is a half, or a refusal
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kvdepot-link", daemon=True)
        try:
            self._client = self._open()
        except (Unavailable, ArenaError) as exc:
            self._error = exc

    def __repr__(self) -> str:
        return f"<ServerLink to {self._place.url}, {self._half!r}>"

    def _open(self) -> OwnClient:
        return OwnClient(self._place.url, self._place.key, self._place.engine)

    # -- on the engine's thread

    def begin(self, make: Callable[[Client], object]) -> None:
        """Connect. make: makes the objects that the half needs, with the client.

        Waits 5 s at most for a server that is there or being started.
        Raises what a server refuses this engine for, and Unavailable without one if `kvdepot.required` is set.
        """
        self._make = make
        self._thread.start()
        began = time.monotonic()
        while not self._settled.wait(_LOOK_S) and self._is_worth_waiting(time.monotonic() - began):
            pass
        self.advance()
        if self._is_connected:
            return
        if self._refusal is not None or self._place.required:
            refusal = self._refusal or Unavailable(self._why())
            self.close()
            raise refusal
        if self._place.is_logged:
            log.warning("kvdepot: not connected, so nothing is cached; retrying in the background: %s", self._why())

    def _is_worth_waiting(self, waited_s: float) -> bool:
        if self._client is None:
            return False
        if self._client.is_welcomed:
            return waited_s < _REGISTER_S
        server, required = self._place.server, self._place.required
        if waited_s >= (REQUIRED_S if required else CONNECT_S):
            return False
        return server.is_running() if server is not None else required or is_taken(self._place.url)

    def _why(self) -> str:
        if fault := self._place.fault():
            return fault
        if self._client is None or self._error is not None:
            return str(self._error)
        try:
            self._client.learn_chunk_size(0.0)
        except KVDepotError as exc:
            return str(exc)
        return f"the server at {self._place.url} has not answered yet"

    def advance(self) -> None:
        """Connect the half, if there is a server now. A worker calls it between two steps."""
        if self._made is not None:
            made, self._made = self._made, None
            self._half.connect(made)
            self._is_connected = True

    def close(self) -> None:
        """Close the connection, and the engine's own server. Safe twice; blocks some seconds at most."""
        self._closing.set()
        if self._client is not None and self._thread.is_alive() and not self._settled.is_set():
            self._client.close()  # ends the requests that the thread waits for
        if self._thread.ident is not None:
            self._thread.join(_END_S)
        self.advance()
        if self._is_connected:
            self._half.shutdown()
        if self._client is not None:
            self._client.close()
        self._place.close()

    # -- on the thread

    def _run(self) -> None:
        try:
            while not self._closing.is_set() and not self._connect():
                self._closing.wait(_PAUSE_S)
            self._watch()
        except BaseException:  # the top of a thread: the engine goes on without a server
            log.exception(
                "kvdepot: internal error in the thread that connects; this engine may not find a server any more until "
                "it is restarted"
            )

    def _connect(self) -> bool:
        assert self._make is not None
        try:
            self._client = self._client or self._open()
            welcome = self._client.ask(wire.ChunkSize(), deadline_s=None)
            due, look_s = time.monotonic() + _LOST_S, _FIRST_LOOK_S
            while not welcome.query():
                if self._closing.wait(look_s):
                    return False
                look_s = min(1.5 * look_s, _LONGEST_LOOK_S)
                if time.monotonic() > due:
                    self._start_again()
                    due = time.monotonic() + _LOST_S
            welcome.result(0.0)
            self._made = self._make(self._client)
        except KVDepotError as exc:
            self._failed(exc)
            return False
        self._settled.set()
        return True

    def _watch(self) -> None:
        """Find out that the server is gone, or back, although the engine may be idle."""
        client, gone_at, is_lost = self._client, 0.0, False
        if client is None:
            return  # closed before it could connect
        while not self._closing.wait(_WATCH_S if client.is_welcomed else _SEEK_S):
            client.pump()
            if client.is_welcomed:
                if is_lost and self._place.is_logged:
                    log.info("kvdepot: the server at %s is back", self._place.url)
                gone_at, is_lost = 0.0, False
            elif not gone_at:
                gone_at = time.monotonic()
            elif not is_lost and time.monotonic() > gone_at + _LOST_S:
                is_lost = True
                if self._place.is_logged:
                    log.warning(
                        "kvdepot: the server at %s is lost, so nothing is cached until it is back; this engine "
                        "connects when it is", self._place.url,
                    )  # fmt: skip
            self._start_again()

    def _start_again(self) -> None:
        """Start the server again if it has crashed and engines start it. Called by one process of an engine."""
        if self._place.is_logged and self._place.start_again():
            log.info("kvdepot: the server at %s has crashed; started it again", self._place.url)

    def _failed(self, error: KVDepotError) -> None:
        if self._closing.is_set():
            return
        self._error = error
        is_passing = isinstance(error, PASSING)
        if str(error) not in self._logged:
            self._logged.add(str(error))
            if is_passing:
                log.info("kvdepot: cannot connect yet, retrying: %s", error)
            else:
                log.error("kvdepot: the server cannot be used, so nothing is cached: %s", error)
        if not is_passing:
            self._refusal = error
            self._settled.set()
