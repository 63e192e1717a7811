"""A client's connection: one socket, requests out, futures back.

Used by adapters.py and by anyone's own adapter. No thread of its own: the socket is read by whoever asks a
future, under a lock, so an answer is seen without a hand-over between threads. The one law: every future gets
a value or an error. Lookups and the like have deadlines; a store or retrieve ends when the server answered, or
when the server provably touches no memory any more (its lock on the arena is free, see shm.py).

A server that restarted answers `UnknownClient`. The connection then **recovers**: it says hello, takes its
registrations back and makes them anew, and repeats the refused requests; callers notice nothing. A copy whose
answer got lost ends there too: the server answers `Unregister` only when no copy touches the tensors.
"""

from __future__ import annotations

import itertools
import logging
import os
import select
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar, cast

import msgspec
import zmq

from kvdepot import contract, wire
from kvdepot.arena import Watch
from kvdepot.errors import (
    Busy,
    DeadlineExceeded,
    KVDepotError,
    LayoutError,
    ProtocolError,
    Unavailable,
    UnknownClient,
    UnknownInstance,
)
from kvdepot.shm import Card

__all__ = ["MessageQueueClient", "MessagingFuture"]

log = logging.getLogger(__name__)

T = TypeVar("T")

CONNECT_S = 5.0
"""How long requests wait for the first connection to a server."""
DEADLINE_S = 30.0
"""For requests that are neither lookups nor copies: registering maps gigabytes."""
MAX_IN_FLIGHT = 65536
_HELLO_S = 1.0
_GONE_CHECK_S = 0.2
_STALE_S = 10.0
"""After this long, a copy's answer is suspected lost."""
_MAX_REPEATS = 3
_SLICE_S = 0.01


class MessagingFuture(Generic[T]):
    """The answer to one request, now or later."""

    __slots__ = ("_client", "_convert", "_done", "_error", "_value")

    def __init__(self, client: MessageQueueClient | None, convert: Callable[[Any], T] | None = None) -> None:
        self._client = client
        self._convert = convert
        self._done = False
        self._value: T | None = None
        self._error: KVDepotError | None = None

    @classmethod
    def resolved(cls, value: T) -> MessagingFuture[T]:
        """A future that has its value already."""
        future: MessagingFuture[T] = cls(None)
        future._finish(value)
        return future

    def query(self) -> bool:
        """Whether it is done, with a value or an error. Never blocks."""
        if not self._done and self._client is not None:
            self._client.pump()
        return self._done

    def result(self, timeout: float | None = None) -> T:
        """The value; blocks for `timeout` seconds at most (None: until it is done, at most 60 s).

        Raises what the server answered; Unavailable when it is gone; DeadlineExceeded after `timeout` (the request
        is still under way then).
        """
        if not self.query():
            assert self._client is not None
            self._client.wait(self.query, 60.0 if timeout is None else timeout)
        if not self._done:
            raise DeadlineExceeded(f"no answer within {60.0 if timeout is None else timeout:g} s")
        if self._error is not None:
            raise self._error
        return cast(T, self._value)

    def to_cuda_future(self) -> MessagingFuture[T]:
        """Itself: a store or retrieve is answered only when its bytes have moved."""
        return self

    def _finish(self, value: Any) -> None:
        if self._done:
            return
        if isinstance(value, KVDepotError):
            self._error = value
        else:
            try:
                self._value = self._convert(value) if self._convert is not None else value
            except (TypeError, ValueError, LookupError) as exc:
                self._error = ProtocolError(f"the server's answer {value!r:.80} is not of the expected kind: {exc}")
        self._done = True
        self._client = None


@dataclass(slots=True)
class _Pending:
    request: wire.Request
    frame: bytes
    future: MessagingFuture[Any]
    deadline: float
    born: float
    repeats: int = 0


class MessageQueueClient:
    """A connection to one server. Safe to use from several threads; `close` it.

    Construction does not block and does not fail when no server is there: the first requests wait up
    to 5 s for it. Raises Unavailable for an address that ZeroMQ does not understand.
    """

    def __init__(self, server_url: str, context: zmq.Context[Any]) -> None:
        self.server_url = server_url
        self.boot = b""
        self.chunk_size = 0  # tokens; known once welcomed
        self.card = Card()
        self._lock = threading.RLock()
        self._numbers = itertools.count(1)
        self._pending: dict[int, _Pending] = {}
        self._parked: deque[int] = deque()  # pending numbers that wait for the welcome
        self._registered: dict[int, wire.Register] = {}
        self._recovering: set[int] = set()  # numbers of our own hello and registrations
        self._lost: list[int] = []  # sent before the connection was made anew, unanswered
        self._watch: Watch | None = None
        self._welcomed = False
        self._met = False  # a server has welcomed us at least once
        self._closed = False
        self._last_reply = 0.0
        self._next_check = 0.0
        self.chains = contract.Chains()
        self._socket = context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.ROUTING_ID, b"k" + os.urandom(15))
        self._socket.setsockopt(zmq.LINGER, 200)
        self._socket.setsockopt(zmq.IMMEDIATE, 1)  # no queue towards a server that is not there
        self._socket.setsockopt(zmq.RECONNECT_IVL, 20)
        self._socket.setsockopt(zmq.SNDHWM, MAX_IN_FLIGHT)
        try:
            self._socket.connect(server_url)
        except zmq.ZMQError as exc:
            self._socket.close()
            self.card.close()
            raise Unavailable(f"{server_url!r} is no address of a server: {exc.strerror}") from exc
        self._fd: int = self._socket.getsockopt(zmq.FD)

    def __repr__(self) -> str:
        state = "closed" if self._closed else "welcomed" if self._welcomed else "not connected"
        return f"<MessageQueueClient {self.server_url} {state}, {len(self._pending)} in flight>"

    # -- asking

    def submit_request(
        self, request_type: contract.RequestType, payloads: list[Any], response_cls: type[Any] | None = None
    ) -> MessagingFuture[Any]:
        """Send a request of the contract; see contract.py for its payloads. Raises BadRequest for wrong ones."""
        expected = contract.get_response_class(request_type) if response_cls is None else response_cls
        if request_type in contract.NEEDS_CHUNK_SIZE and not self.chunk_size:
            self.learn_chunk_size(CONNECT_S)
        call = contract.translate(request_type, payloads, self.chunk_size, self.chains)
        if call is None:
            return MessagingFuture.resolved(contract.nothing_to_do(request_type, payloads))
        return self.ask(call.request, lambda value: contract.check_type(call.convert(value), expected))

    def learn_chunk_size(self, timeout_s: float) -> int:
        """The server's tokens a chunk. Blocks until the first welcome; raises Unavailable without one."""
        if not self.chunk_size:
            try:
                self.chunk_size = contract.check_type(self.ask(wire.ChunkSize()).result(timeout_s), int)
            except DeadlineExceeded as exc:
                raise self._no_server() from exc
        return self.chunk_size

    def ask(
        self,
        request: wire.Request,
        convert: Callable[[Any], Any] | None = None,
        deadline_s: float | None = DEADLINE_S,
    ) -> MessagingFuture[Any]:
        """Send a message of the wire; never blocks. deadline_s None: until answered or the server is gone."""
        future: MessagingFuture[Any] = MessagingFuture(self, convert)
        with self._lock:
            if self._closed:
                future._finish(Unavailable("this client is closed"))
            elif len(self._pending) >= MAX_IN_FLIGHT:
                future._finish(Busy(f"{len(self._pending)} requests are in flight"))
            else:
                if isinstance(request, wire.Store | wire.Retrieve):
                    deadline_s = None
                deadline = time.monotonic() + deadline_s if deadline_s is not None else float("inf")
                number = next(self._numbers)
                try:
                    frame = wire.encode_request(number, request)
                except KVDepotError as exc:
                    future._finish(exc)
                    return future
                self._pending[number] = _Pending(request, frame, future, deadline, time.monotonic())
                self._dispatch(number)
        return future

    def _dispatch(self, number: int) -> None:
        if self._welcomed:
            if not self._transmit(number):
                self._lose(self._cut_off())
            return
        self._parked.append(number)
        if not self._recovering and not self._greet() and self._met:
            self._fail_all(self._no_server())

    def _transmit(self, number: int) -> bool:
        try:
            self._socket.send(self._pending[number].frame, zmq.NOBLOCK)
        except zmq.ZMQError:  # no connection; or the engine has ended its ZeroMQ context before us
            return False
        return True

    def _cut_off(self) -> Unavailable:
        return Unavailable(f"the connection to {self.server_url} is down")

    def _no_server(self) -> Unavailable:
        return Unavailable(f"no kvdepot server answers at {self.server_url}; start one with `kvdepot serve`")

    # -- hello, and again after a restart

    def _greet(self) -> bool:
        return self._ask_own(wire.Hello(wire.VERSION, self.card.name), self._on_welcome, _HELLO_S)

    def _ask_own(self, request: wire.Request, then: Callable[[Any], None], deadline_s: float = DEADLINE_S) -> bool:
        """One of our own requests; `then` gets the value or the error."""
        number = next(self._numbers)
        future: MessagingFuture[Any] = _Hook(then)
        now = time.monotonic()
        frame = wire.encode_request(number, request)
        self._pending[number] = _Pending(request, frame, future, now + deadline_s, now)
        self._recovering.add(number)
        if self._transmit(number):
            return True
        del self._pending[number]
        self._recovering.discard(number)
        return False

    def _on_welcome(self, value: Any) -> None:
        if isinstance(value, KVDepotError):
            self._lose(value)
            return
        welcome = msgspec.convert(value, wire.Welcome)
        self._forget_server()
        self.chunk_size = welcome.chunk_size
        try:
            self._watch = Watch(welcome.arena, self.boot)
        except LayoutError as exc:
            log.warning("cannot see the server's shared memory (%s): do both share /dev/shm?", exc)
        if self._met and self._registered:
            log.info("connected to %s again: registering again", self.server_url)
        self._met = True
        # Asked before the parked requests are: what is unanswered when these are answered never will be.
        waiting = {*self._parked, *self._recovering}
        self._lost = [number for number in self._pending if number not in waiting]
        for instance, register in self._registered.items():
            self._ask_own(wire.Unregister(instance), self._on_recovered)
            self._ask_own(register, self._on_recovered)
        self._on_recovered(None)

    def _on_recovered(self, value: Any) -> None:
        if isinstance(value, Unavailable | DeadlineExceeded):
            self._recovering.clear()  # `_expire` begins anew
        elif not self._recovering:
            for number in self._lost:
                if number in self._pending:
                    self._pending.pop(number).future._finish(Unavailable("the connection broke; the answer is lost"))
            self._lost.clear()
            self._welcomed = True
            while self._parked and self._welcomed:
                number = self._parked.popleft()
                if number in self._pending and not self._transmit(number):
                    self._lose(self._cut_off())

    def _forget_server(self) -> None:
        if self._watch is not None:
            self._watch.close()
            self._watch = None

    def _lose(self, error: KVDepotError) -> None:
        """Nothing new reaches the server: it is gone, or only the connection is."""
        self._welcomed = False
        if self._watch is None or self._watch.is_gone():
            self._fail_all(error)
            return
        # It lives, so it may still touch blocks: only requests that touch none end here.
        for number, pending in list(self._pending.items()):
            if not isinstance(pending.request, wire.Store | wire.Retrieve) or number in self._parked:
                del self._pending[number]
                pending.future._finish(error)
        self._parked.clear()
        self._recovering.clear()

    def _fail_all(self, error: KVDepotError) -> None:
        self._parked.clear()
        self._recovering.clear()
        pending, self._pending = self._pending, {}
        for item in pending.values():
            item.future._finish(error)

    # -- hearing

    def pump(self) -> None:
        """Take in what has arrived and end what is overdue. Never blocks."""
        if not self._lock.acquire(blocking=False):
            return  # another thread is at it
        try:
            if not self._closed:
                self._receive()
                self._expire()
        finally:
            self._lock.release()

    def wait(self, done: Callable[[], bool], timeout_s: float) -> bool:
        """Pump until `done()`; blocks for `timeout_s` at most."""
        deadline = time.monotonic() + timeout_s
        poller = select.poll()
        poller.register(self._fd, select.POLLIN)
        while not done():
            left = deadline - time.monotonic()
            if left <= 0 or self._closed:
                return done()
            # Slices: the descriptor is edge-triggered, and another thread may take our answer in.
            poller.poll(max(1, min(left, _SLICE_S) * 1000))
        return True

    def _receive(self) -> None:
        while True:
            try:
                frame = cast(bytes, self._socket.recv(zmq.NOBLOCK))
            except zmq.Again:
                return
            except zmq.ZMQError as exc:
                self._lose(Unavailable(f"the ZeroMQ context of this client has ended: {exc.strerror}"))
                return
            try:
                number, boot, value = wire.decode_reply(frame)
            except ProtocolError:
                log.warning("dropped %d bytes that are no reply", len(frame))
                continue
            self._last_reply = time.monotonic()
            pending = self._pending.get(number)
            if pending is None:
                continue  # answered after its deadline
            if isinstance(value, UnknownClient | UnknownInstance) and self._repeat(number, pending, value):
                continue
            del self._pending[number]
            if number in self._recovering:
                self._recovering.discard(number)
                self.boot = boot
            elif isinstance(pending.request, wire.Register) and not isinstance(value, KVDepotError):
                self._registered[pending.request.instance] = pending.request
            elif isinstance(pending.request, wire.Unregister):
                self._registered.pop(pending.request.instance, None)
            pending.future._finish(value)

    def _repeat(self, number: int, pending: _Pending, value: KVDepotError) -> bool:
        """The server has forgotten us: introduce ourselves again, then send this once more."""
        known = not isinstance(value, UnknownInstance) or (
            isinstance(pending.request, wire.Store | wire.Retrieve) and pending.request.instance in self._registered
        )
        if not known or number in self._recovering or pending.repeats >= _MAX_REPEATS:
            return False
        pending.repeats += 1
        self._welcomed = False
        self._parked.append(number)
        if not self._recovering and not self._greet():
            self._lose(self._cut_off())
        return True

    def _expire(self) -> None:
        now = time.monotonic()
        if now < self._next_check:
            return
        self._next_check = now + _SLICE_S
        for number in [n for n, item in self._pending.items() if item.deadline <= now]:
            request = self._pending[number].request
            pending = self._pending.pop(number)
            self._recovering.discard(number)
            pending.future._finish(DeadlineExceeded(f"no answer to {type(request).__name__} in time"))
        if self._parked:
            self._parked = deque(n for n in self._parked if n in self._pending)
        if self._pending and now - self._last_reply > _GONE_CHECK_S and self._watch is not None:
            self._last_reply = now
            if self._watch.is_gone():
                # Whoever is there now does not know us: what was sent to the old one ends with the next welcome.
                self._welcomed = False
                self._forget_server()
        if self._pending and self._welcomed and now - next(iter(self._pending.values())).born > _STALE_S:
            self._welcomed = False  # its answer may be lost: recovering tells
            next(iter(self._pending.values())).born = now
        if self._pending and not self._welcomed and not self._recovering:
            reached = self._greet()
            if not reached and self._met and self._watch is None:
                self._fail_all(self._no_server())

    def close(self) -> None:
        """End the connection; what is in flight fails with Unavailable. Safe twice; blocks 0.2 s at most."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            self._fail_all(Unavailable("this client is closed"))
            self._forget_server()
            self._socket.close()
            self.card.close()


class _Hook(MessagingFuture[Any]):
    """The future of our own hello and registrations: hands its outcome on."""

    __slots__ = ("_then",)

    def __init__(self, then: Callable[[Any], None]) -> None:
        super().__init__(None)
        self._then = then

    def _finish(self, value: Any) -> None:
        if not self._done:
            self._done = True
            self._then(value)
