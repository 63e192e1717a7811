"""Publishes the contents of memory to routers: vLLM's KV events over ZeroMQ, for prefix-aware routing.

A `Publisher` encodes and sends the changes of a feed on a thread of its own; engine_view.py decides which events go
under which topics. Invariant: a subscriber that reads every message, or asks for what it missed, believes in a removed
chunk only for as long as the messages take.

A message is `[topic, seq, payload]` as in vLLM's own publisher (vllm/distributed/kv_events.py, 0.32): seq is 8 bytes,
big-endian; payload is msgpack, `[seconds since 1970, [event ...], None]`. All topics share one sequence: a subscriber
counts what comes over one socket, from whatever topics.

Sequence numbers begin at the nanosecond of the server's start, so a subscriber of a restarted server sees a gap. After
each second without an event an empty batch reveals a gap at the end. The replay socket takes 8 bytes, the first number
wanted. It replies with everything sent since, or, if that is no longer kept, with `AllBlocksCleared` and a listing of
all chunks, under the latest numbers.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import TypeAlias

import msgspec
import zmq

from kvdepot.kv_events.engine_view import BATCH, EngineView, Event, Message
from kvdepot.kv_events.feed import Feed
from kvdepot.protocol.endpoints import listen
from kvdepot.protocol.monitor import Monitor, shut

log = logging.getLogger(__name__)

END = (-1).to_bytes(8, "big", signed=True)
"""The number of the message that ends a replay."""
_LAST = (b"", END, b"")
_KEPT_MESSAGES = 20_000
_KEPT_BYTES = 64 << 20
"""Limits of the messages kept for replays; as many as a full listing takes are always kept."""
_BEAT_S = 1.0
_GATHER_S = 0.01
_MARGIN = 64
"""Messages without events at the end of a full listing, for subscribers that stop reading a replay at the number before
the message that revealed the gap."""
_MOST_CONNECTIONS = 64
"""Subscribers and replays together; each takes a descriptor."""
_MOST_UNREAD = 1024
"""Messages queued for one subscriber; it must ask for those beyond. Subscribers share the memory of a message."""
_MOST_WAITING = 64
_REPLAY_S = 10.0
"""A replay ends if its reader takes nothing for this long."""
_AT_ONCE = 16
"""Messages of a replay that are sent before new changes are checked."""
_REST = 4.0
"""Replays pause this many times as long as they work, so that they do not keep the GIL from the deciding thread."""
_PAUSE_S = 0.1
"""The longest pause within a replay, because a reader would take a longer one for the end. The rest follows later."""
_RETRY_MS = 10


def replay_endpoint(endpoint: str) -> str:
    """The endpoint for replays: the next TCP port, or the unix socket with `.replay` appended to its name."""
    if endpoint.startswith("tcp://"):
        host, _, port = endpoint.rpartition(":")
        return f"{host}:{int(port) + 1}"
    return endpoint + ".replay"


_Sending: TypeAlias = "tuple[bytes, bytes]"


class _Sent:
    """The sequence numbers, and the latest messages, kept for replays."""

    def __init__(self, kept: int) -> None:
        self._most = kept
        self._messages: deque[_Sending] = deque()
        self._bytes = 0
        self.last = time.time_ns()

    @property
    def first(self) -> int:
        return self.last - len(self._messages) + 1

    def add(self, topic: bytes, payload: bytes, listing: int) -> int:
        """Keep a message; returns its number. listing: messages in a full listing; more than that many are kept."""
        messages = self._messages
        messages.append((topic, payload))
        self.last += 1
        self._bytes += len(payload)
        while len(messages) > listing + _MARGIN and (len(messages) > self._most or self._bytes > _KEPT_BYTES):
            self._bytes -= len(messages.popleft()[1])
        return self.last

    def since(self, start: int) -> list[_Sending]:
        """Messages from this number on; it must be that of a kept message, or the next."""
        return list(itertools.islice(self._messages, start - self.first, None))


class Publisher:
    """Publishes one feed at one endpoint until it is closed."""

    def __init__(
        self,
        feed: Feed,
        endpoint: str,
        context: zmq.Context[zmq.Socket[bytes]],
        guard: Callable[[zmq.Socket[bytes]], None] = lambda socket: None,
        kept_messages: int = _KEPT_MESSAGES,
    ) -> None:
        """Listen; `start` begins to publish. guard: sets up a socket's keys before it listens. The caller must hold the
        endpoint (endpoints.Claim) until the context has been terminated. Raises Unavailable."""
        self._feed = feed
        self._endpoint = endpoint
        self._view = EngineView()
        self._sent = _Sent(kept_messages)
        self._encode = msgspec.msgpack.Encoder().encode
        self._next_beat = 0.0
        self._waiting: dict[bytes, int] = {}  # replays: client -> first number wanted; oldest first
        self._replay: Iterator[tuple[bytes, ...]] | None = None  # of the first of them
        self._unsent: tuple[bytes, ...] | None = None
        self._give_up_at = 0.0
        self._rest_until = 0.0
        self._owed_s = 0.0  # pauses still to be made
        self._connections = 0
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="kvdepot-kv-events", daemon=True)
        self._pub = context.socket(zmq.PUB)
        self._router = context.socket(zmq.ROUTER)
        self._monitors: list[Monitor] = []
        self._router.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self._pub.setsockopt(zmq.SNDHWM, _MOST_UNREAD)
        self._router.setsockopt(zmq.SNDHWM, 4 * _AT_ONCE)
        self._router.setsockopt(zmq.RCVHWM, _MOST_WAITING)
        try:
            for socket, url in ((self._pub, endpoint), (self._router, replay_endpoint(endpoint))):
                socket.setsockopt(zmq.LINGER, 200)
                socket.setsockopt(zmq.MAXMSGSIZE, 1024)  # of incoming messages
                guard(socket)
                self._monitors.append(Monitor(socket, zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED))
                listen(socket, url)
        except BaseException:
            self._close_sockets()
            raise

    def start(self) -> None:
        self._thread.start()
        places = self._endpoint, replay_endpoint(self._endpoint)
        log.info("KV events at %s, replays at %s, by kvdepot.events_topic of engines", *places)

    def close(self) -> None:
        """Take everything back, end the thread and close the feed. Blocks for a second at most. Call it once."""
        self._stopping = True
        self._feed.rouse()
        if self._thread.ident is None:
            self._close_sockets()
        else:
            self._thread.join(1.0)
        if not self._thread.is_alive():
            self._feed.close()

    # -- the thread

    def _run(self) -> None:
        try:
            poller = zmq.Poller()
            for part in (self._router, *(monitor.socket for monitor in self._monitors)):
                poller.register(part, zmq.POLLIN)
            poller.register(self._feed.wake, zmq.POLLIN)
            while not self._stopping:
                self._drain()
                if time.monotonic() >= self._next_beat:
                    self._publish([self._view.beat_topic], [])
                self._answer()
                wait_s = self._next_beat - time.monotonic() if self._feed.may_sleep() else 0.0
                wait_ms = int(wait_s * 1000) + 1 if wait_s > 0 else 0
                if self._waiting:
                    rest_s = self._rest_until - time.monotonic()
                    wait_ms = min(wait_ms, max(_RETRY_MS if self._unsent else 0, int(rest_s * 1000) + 1))
                for ready, _ in poller.poll(wait_ms):
                    self._handle(ready)
            self._publish_all(self._view.apply([None]))
        except BaseException:  # the top of a thread: subscribers see no more heartbeats, and the depot keeps working
            log.exception("KV events are no longer published")
        finally:
            self._close_sockets()

    def _handle(self, ready: zmq.Socket[bytes] | int) -> None:
        if ready is self._router:
            self._read_requests()
        elif ready == self._feed.wake:
            with contextlib.suppress(BlockingIOError):
                os.eventfd_read(self._feed.wake)
            # Changes that closely follow the first one join its message, because a message for each would make the
            # deciding thread wait for the GIL all the time.
            time.sleep(0.0 if self._stopping else _GATHER_S)
        else:
            for event, value in itertools.chain.from_iterable(monitor.read() for monitor in self._monitors):
                self._connections += 1 if event == zmq.EVENT_ACCEPTED else -1
                if event == zmq.EVENT_ACCEPTED and self._connections > _MOST_CONNECTIONS:
                    log.debug("closed a connection beyond the limit of %d", _MOST_CONNECTIONS)
                    shut(value)

    def _drain(self) -> None:
        while not self._stopping and (changes := self._feed.take(BATCH)):
            self._publish_all(self._view.apply(changes))
            time.sleep(0)  # release the GIL, so that the deciding thread does not wait for us

    def _publish_all(self, messages: Iterable[Message]) -> None:
        for topics, events in messages:
            self._publish(topics, events)
            time.sleep(0)

    def _publish(self, topics: list[bytes], events: list[Event]) -> None:
        payload = self._pack(events)
        for topic in topics:
            seq = self._sent.add(topic, payload, self._view.messages)
            self._pub.send_multipart((topic, seq.to_bytes(8, "big"), payload))  # slow readers miss it, and see a gap
        self._next_beat = time.monotonic() + _BEAT_S

    def _pack(self, events: list[Event]) -> bytes:
        return self._encode((time.time(), events, None))

    # -- replays, one after the other

    def _read_requests(self) -> None:
        with contextlib.suppress(zmq.Again):
            while True:
                frames = self._router.recv_multipart(zmq.NOBLOCK)
                if len(frames) != 3 or frames[1] or len(frames[2]) != 8:
                    log.debug("not a replay request: %d frames", len(frames))
                elif len(self._waiting) < _MOST_WAITING:
                    self._waiting.setdefault(frames[0], int.from_bytes(frames[2], "big"))

    def _answer(self) -> None:
        """Send part of the current replay, then pause."""
        began = time.monotonic()
        if not self._waiting or began < self._rest_until:
            return
        self._send_some()
        ended = time.monotonic()
        self._owed_s += _REST * (ended - began)
        rest_s = self._owed_s if self._replay is None else min(self._owed_s, _PAUSE_S)
        self._owed_s -= rest_s
        self._rest_until = ended + rest_s

    def _send_some(self) -> None:
        for _ in range(_AT_ONCE):
            if not self._waiting:
                return
            now = time.monotonic()
            who, start = next(iter(self._waiting.items()))
            if self._replay is None:
                self._replay = self._messages(start)
                self._give_up_at = now + _REPLAY_S
            message = self._unsent or next(self._replay, None)
            self._unsent = None
            if message is not None:
                try:
                    self._router.send_multipart((who, b"", *message), zmq.NOBLOCK)
                    self._give_up_at = now + _REPLAY_S
                    continue
                except zmq.Again:
                    if now < self._give_up_at:
                        self._unsent = message
                        return
                except zmq.ZMQError as exc:  # the client is gone
                    log.debug("replay ended: %s", exc.strerror)
            self._replay = None
            del self._waiting[who]

    def _messages(self, start: int) -> Iterator[tuple[bytes, ...]]:
        """A replay's messages, as of now: everything sent from number `start` on, or a full listing."""
        sent, listed = self._sent, self._view.messages
        if sent.first <= start <= sent.last + 1:
            return itertools.chain(_numbered(start, sent.since(start)), iter([_LAST]))
        # The listing reuses recent numbers, which a client that asks for one has not seen. It has what the messages
        # after the numbers published, which must not be published twice: some routers count.
        last = max(sent.first + listed - 1, sent.last - _MARGIN)
        assert last <= sent.last, "fewer messages are kept than a full listing takes"
        listing = ((topic, self._pack(events)) for topic, events in self._view.listing())
        rest = itertools.repeat((self._view.beat_topic, self._pack([])), sent.last - last)
        return itertools.chain(_numbered(last - listed + 1, listing), _numbered(last + 1, rest), iter([_LAST]))

    def _close_sockets(self) -> None:
        for monitor in self._monitors:
            monitor.close()
        for socket in (self._pub, self._router):
            socket.close()


def _numbered(first: int, messages: Iterable[_Sending]) -> Iterator[tuple[bytes, ...]]:
    for seq, (topic, payload) in enumerate(messages, first):
        yield topic, seq.to_bytes(8, "big"), payload
