"""A client's socket: requests out, futures back.

client/connection.py decides what is sent again and when a request has failed. No thread is dedicated to the socket:
polling a future reads it, under a lock, so no answer waits for a switch of threads. Invariant: every future gets a
value or an error.

ZeroMQ's descriptors are edge-triggered: sending or receiving may consume the signal of an answer that has arrived. So
whoever waits at them has read the socket empty since it last sent, and looks again every CHECK_S, because another
thread may read the answer.
"""

from __future__ import annotations

import errno
import logging
import os
import select
import stat
import threading
import time
import weakref
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar, cast

import zmq

from kvdepot.client.connection import CHECK_S, DEADLINE_S, MAX_IN_FLIGHT, Connection
from kvdepot.client.phases import Phase
from kvdepot.client.servers import Introduction
from kvdepot.config import arena_folder, default_key
from kvdepot.errors import BadRequest, DeadlineExceeded, KVDepotError, ProtocolError, Unavailable
from kvdepot.memory.arena_header import Watch
from kvdepot.memory.shm import LivenessFile
from kvdepot.protocol import wire
from kvdepot.protocol.addresses import MOST_PATH, fault_of_endpoint, is_ipv6, socket_path
from kvdepot.protocol.curve import Key, read_client_key
from kvdepot.protocol.endpoints import holder, is_coming
from kvdepot.protocol.monitor import Monitor

log = logging.getLogger(__name__)

T = TypeVar("T")

_MADE = zmq.EVENT_HANDSHAKE_SUCCEEDED
_NOW = int(zmq.NOBLOCK)  # an enum costs each call a microsecond
_QUIET_S = 0.5
"""A thread that is woken by a descriptor of its own looks this often while nothing is under way."""
CONNECT_S = 5.0
"""Requests wait this long for the first connection to a server."""
RETURN_S = 5.0
"""Lookups wait this long for the successor of a lost server: on a busy machine, its start takes seconds."""


def _check_owner(url: str) -> None:
    """Raise Unavailable for another user's unix socket: its server could not prove itself (protocol/handshake.py)."""
    path = socket_path(url)
    try:
        owners = {path.lstat().st_uid, path.stat().st_uid} if path is not None else set()  # of the link and its target
    except OSError:
        return  # nobody listens there yet
    for owner in owners - {os.geteuid()}:
        raise Unavailable(f"{path} belongs to user {owner}, not to this user ({os.geteuid()}): not connecting")


def _others_between(url: str) -> bool:
    """Whether another user could ever listen at this endpoint. At a unix socket, those can who may change a folder
    above it; a sticky folder (/tmp) is harmless above one of our own."""
    path = socket_path(url)
    if path is None:
        return True
    child = Path(os.path.realpath(path))
    for folder in child.parents:
        try:
            info = folder.stat()
        except OSError:
            return True  # anybody may create it
        shared = info.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
        if info.st_uid not in (0, os.geteuid()) or (
            shared and not (info.st_mode & stat.S_ISVTX and folder != child.parent)
        ):
            return True
    return False


def check_type(value: object, expected: type[T]) -> T:
    """Return an answer if it is of this type (a bool is no int); raise ProtocolError otherwise."""
    if not isinstance(value, expected) or (isinstance(value, bool) and expected is int):
        raise ProtocolError(f"the server answered {value!r:.80}, not {expected.__name__}")
    return value


class Hearing(Protocol):
    """A Client or a Lane (client/lane.py), which hears the answers that end futures."""

    def pump(self) -> None: ...

    def wait(self, done: Callable[[], bool], timeout_s: float) -> bool: ...

    def leave_to_parent(self) -> None:
        """Called in a forked child, where no other thread runs: end everything with an error."""


class MessagingFuture(Generic[T]):
    """The answer to one request, once it is there."""

    __slots__ = ("_client", "_convert", "_done", "_error", "_value")

    def __init__(self, client: Hearing | None, convert: Callable[[object], T] | None = None) -> None:
        self._client = client
        self._convert = convert
        self._done = False
        self._value: T | None = None
        self._error: KVDepotError | None = None

    @classmethod
    def resolved(cls, value: T) -> MessagingFuture[T]:
        future: MessagingFuture[T] = cls(None)
        future._finish(value)
        return future

    def is_done(self) -> bool:
        """Whether what its client has heard so far has ended it; unlike `query`, does not make it listen."""
        return self._done

    def query(self) -> bool:
        """Whether it is done, with a value or an error. Never blocks."""
        client = self._client  # read once: a thread that finishes this future clears it
        if not self._done and client is not None:
            client.pump()
        return self._done

    def result(self, timeout: float | None = None) -> T:
        """The value; blocks for `timeout` seconds at most (None: 60 s). Raises the server's error; Unavailable when the
        server is gone; DeadlineExceeded after `timeout`, with the request still under way."""
        timeout = 60.0 if timeout is None else timeout
        client = self._client  # read once: a thread that finishes this future clears it
        if not self._done and client is not None:
            client.wait(self.is_done, timeout)
        if not self._done:
            raise DeadlineExceeded(f"no answer within {timeout:g} s")
        if self._error is not None:
            raise self._error
        return cast(T, self._value)

    def to_cuda_future(self) -> MessagingFuture[T]:
        """Itself: the value is there only when the bytes have moved."""
        return self

    def _finish(self, value: object) -> None:
        if self._done:
            return
        if isinstance(value, KVDepotError):
            self._error = value
        else:
            try:
                self._value = self._convert(value) if self._convert is not None else cast(T, value)
            except KVDepotError as exc:
                self._error = exc
            except (TypeError, ValueError, LookupError) as exc:
                self._error = ProtocolError(f"the server's answer {value!r:.80} is not of the expected kind: {exc}")
        self._done = True
        self._client = None


class Client:
    """A connection to one server. Any thread may use it, several at once; `close` it. The constructor neither blocks
    nor fails without a server: the first requests wait up to 5 s for one. In a forked child it is closed, and requests
    fail with BadRequest: ZeroMQ's threads do not survive a fork."""

    def __init__(
        self, server_url: str, context: zmq.Context[zmq.Socket[bytes]], *, key: str | Key = "", engine: str = "",
        arena_dir: str = "",
    ) -> None:  # fmt: skip
        """key: this client's key or its file, for a server that requires one; empty: the file that KVDEPOT_KEY names,
        if any. engine: names the engine that this client belongs to, equally in all its processes, for the server's
        log. arena_dir: the folder where the server's arena is, as this process sees it; empty: that in
        KVDEPOT_ARENA_DIR, or else /dev/shm.

        Raises Unavailable for an address that ZeroMQ does not understand, and for another user's socket; ConfigError
        for a key file that cannot be used; ArenaError for a folder that cannot.
        """
        self.server_url = server_url
        if fault := fault_of_endpoint(server_url):
            raise Unavailable(f"invalid server address: {fault}")
        _check_owner(server_url)
        key = key or default_key()
        keys = key if isinstance(key, Key) else read_client_key(key) if key else None
        self.arena_dir = arena_folder(arena_dir)
        self.liveness = LivenessFile(self.arena_dir)
        self._lock = threading.RLock()
        self._socket = context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.ROUTING_ID, b"k" + os.urandom(15))
        self._socket.setsockopt(zmq.LINGER, 200)
        self._socket.setsockopt(zmq.IMMEDIATE, 1)  # queue nothing for a server that is not connected
        self._socket.setsockopt(zmq.RECONNECT_IVL, 20)
        self._socket.setsockopt(zmq.SNDHWM, MAX_IN_FLIGHT)
        self._socket.setsockopt(zmq.RCVHWM, MAX_IN_FLIGHT)  # answers queue here: the server queues few per client
        self._has_sent = False  # since the socket was last read empty
        self._has_key = keys is not None
        if keys is not None:
            keys.use(self._socket)
        try:
            self._monitor = Monitor(self._socket, _MADE | zmq.EVENT_DISCONNECTED)
        except zmq.ZMQError as exc:
            self._socket.close()
            self.liveness.close()
            raise Unavailable(f"ZeroMQ cannot make a socket: {exc.strerror}") from exc
        self._fds = [cast(int, each.getsockopt(zmq.FD)) for each in (self._socket, self._monitor.socket)]
        self._has_events = select.poll()
        self._has_events.register(self._fds[1], select.POLLIN)
        self._read_events()  # the descriptor signals events only after the socket was read empty
        try:
            self._socket.setsockopt(zmq.IPV6, is_ipv6(server_url))
            self._socket.connect(server_url)
        except zmq.ZMQError as exc:
            self._close_sockets()
            self.liveness.close()
            most = f": a unix socket's path has at most {MOST_PATH} bytes" if exc.errno == errno.ENAMETOOLONG else ""
            raise Unavailable(f"cannot connect to {server_url!r}: {exc.strerror}{most}") from exc
        # CURVE authenticates each message itself.
        between = partial(_others_between, server_url) if keys is None else bool
        introduction = Introduction(self.liveness.name, self.liveness.secret, engine, between)
        watch = partial(Watch, self.arena_dir)
        self._connection = Connection(server_url, introduction, self._send, watch, time.monotonic)
        hearing.add(self)

    def __repr__(self) -> str:
        return f"<Client {self.server_url} {self._connection.phase.name.lower()}, {len(self._connection)} in flight>"

    @property
    def is_closed(self) -> bool:
        return self._connection.phase is Phase.CLOSED

    def _send(self, frame: bytes) -> bool:
        try:
            if not self._connection.welcomed:  # another user may have made the socket meanwhile
                _check_owner(self.server_url)
            self._has_sent = True
            self._socket.send(frame, _NOW)
        except zmq.ZMQError:  # no connection, or the engine has already ended its ZeroMQ context
            return False
        except Unavailable as exc:
            log.debug("%s", exc)
            return False
        return True

    # -- asking

    @property
    def is_welcomed(self) -> bool:
        """Whether a server knows this client and is connected, as far as this client knows."""
        return self._connection.welcomed

    @property
    def incarnation(self) -> bytes:
        """The run of the server that last welcomed this client."""
        return self._connection.incarnation

    @property
    def arena(self) -> tuple[str, bytes]:
        """The arena's name and the run of the server that last welcomed this client; empty before the first welcome."""
        return self._connection.arena

    @property
    def welcomes(self) -> int:
        return self._connection.welcomes

    @property
    def heard(self) -> int:
        return self._connection.heard

    @property
    def chunk_size(self) -> int:
        """The server's tokens per chunk; 0 before the first welcome."""
        return self.welcome.chunk_size

    @property
    def welcome(self) -> wire.Welcome:
        """The last welcome of a server, with its settings."""
        return self._connection.welcome

    def is_returning(self) -> bool:
        """Whether the server was lost a moment ago, and another holds its unix socket already, or is being started."""
        lost_s = self._connection.lost_s
        return 0 < lost_s < RETURN_S and is_coming(self.server_url)

    def learn_chunk_size(self, timeout_s: float) -> int:
        """The server's tokens per chunk. Blocks until the first welcome; raises Unavailable after `timeout_s`."""
        if not self.chunk_size:
            try:
                self.ask(wire.ChunkSize()).result(timeout_s)
            except DeadlineExceeded as exc:
                raise self._silent() from exc
        return self.chunk_size

    def _silent(self) -> Unavailable:
        who = holder(self.server_url)
        if not who:
            return self._connection.no_server()
        key = "does not accept this client's key" if self._has_key else "requires a key (--key, KVDEPOT_KEY)"
        return Unavailable(
            f"the kvdepot server at {self.server_url} ({who}) does not answer: it is starting, stopped (SIGSTOP) or "
            f"hanging, has reached its limit of open files, or {key}; its log says more"
        )

    def ask(
        self, request: wire.Request, convert: Callable[[object], object] | None = None,
        deadline_s: float | None = DEADLINE_S,
    ) -> MessagingFuture[Any]:  # fmt: skip
        """Send a message; never blocks. deadline_s None: wait until it is answered or the server is gone. convert:
        makes the future's value from the answer; what it raises (KVDepotError, ValueError and the like) the future
        raises."""
        future: MessagingFuture[Any] = MessagingFuture(self, convert)
        self.ask_then(request, future._finish, deadline_s)
        return future

    def ask_then(
        self, request: wire.Request, done: Callable[[object], None], deadline_s: float | None = DEADLINE_S
    ) -> None:
        """Send a message; never blocks. done: called once with the answer or the error, on the thread that hears it,
        which holds this client's lock. deadline_s: as in `ask`."""
        with self._lock:
            self._take_events()  # on a new connection, hello must come first
            self._connection.ask(request, done, deadline_s)

    # -- hearing

    def pump(self) -> None:
        """Handle what has arrived, and fail what is overdue. Never blocks."""
        if not self._lock.acquire(blocking=False):
            return  # another thread does it now
        try:
            if not self.is_closed:
                self._receive()
                self._take_events()
                self._connection.expire()
                if self._has_sent:  # an answer may be there, whose signal is consumed
                    self._receive()
        finally:
            self._lock.release()

    def wait(self, done: Callable[[], bool], timeout_s: float, also: int | None = None) -> bool:
        """Pump until `done()`; blocks for `timeout_s` at most. Returns whether it is done.

        also: another descriptor, such as an eventfd, that wakes this thread while it is readable; `done` or the caller
        clears the descriptor. A thread that alone uses this client is woken at once by an answer.
        """
        deadline = time.monotonic() + timeout_s
        poller = select.poll()
        for fd in self._fds if also is None else (*self._fds, also):
            poller.register(fd, select.POLLIN)
        while True:
            self.pump()
            if done():
                return True
            left = deadline - time.monotonic()
            if left <= 0 or self.is_closed:
                return False
            is_quiet = also is not None and self._connection.welcomed and not len(self._connection)
            poller.poll(max(1, min(left, _QUIET_S if is_quiet else CHECK_S) * 1000))

    def _receive(self) -> None:
        while True:
            self._has_sent = False
            try:
                if not int(self._socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN:  # half the cost of an exception
                    return
                frame = self._socket.recv(_NOW)
            except zmq.Again:
                return
            except zmq.ZMQError as exc:
                error = Unavailable(f"the ZeroMQ context of this client has ended: {exc.strerror}")
                self._connection.lose_for_good(error)
                return
            self._connection.take(frame)

    def _take_events(self) -> None:
        """Handle connections made and broken; messages that had arrived by a broken one come first."""
        if not self._has_events.poll(0):  # a third of the cost of asking ZeroMQ
            return
        made = self._read_events()
        if made:
            self._receive()
        for is_made in made:
            self._connection.connected() if is_made else self._connection.disconnected()

    def _read_events(self) -> list[bool]:
        """Events since the last call: True for a connection made, False for one that broke."""
        return [event == _MADE for event, _ in self._monitor.read()]

    def close(self) -> None:
        """Close the connection; requests under way fail with Unavailable. Safe twice. Blocks 0.2 s at most."""
        with self._lock:
            if self.is_closed:
                return
            self._connection.close()
            self._close_sockets()
            self.liveness.close()

    def _close_sockets(self) -> None:
        self._monitor.close()
        self._socket.close()

    def leave_to_parent(self) -> None:
        self._lock = threading.RLock()  # a thread of the parent may have held the old lock
        self._connection.close(BadRequest("this client connected before a fork: connect again in the child process"))


hearing: weakref.WeakSet[Hearing] = weakref.WeakSet()
"""All clients and lanes of this process."""


def _leave_to_parent() -> None:
    for each in list(hearing):
        each.leave_to_parent()


os.register_at_fork(after_in_child=_leave_to_parent)
