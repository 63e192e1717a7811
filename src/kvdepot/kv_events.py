"""What is in memory, told to routers: vLLM's KV events over ZeroMQ, so that requests go where their prefix lies.

A `Feed` is fed by index.py on the deciding thread, which appends to a bounded queue and does nothing else; a
`Publisher` encodes and sends on a thread of its own. The one law: a subscriber that reads every message, or asks for
what it missed, never believes of a chunk that it is there once that is no longer so, or that it is not, for longer
than the messages take. Where the feed loses count (its queue is full) it says that nothing is there, and then anew
what is.

A message is `[topic, seq, payload]` as vLLM's own publisher sends it (vllm/distributed/kv_events.py, 0.32): seq is 8
bytes, big-endian; payload is msgpack, `[seconds since 1970, [event ...]]`, each event a map with its `type`. A
`BlockStored` names chunks that follow each other by their keys; its `token_ids` are empty, for the depot does not know
them. A parent of None is a prompt's start, or not known. `ownership` is the namespace: the model as `kvdepot status`
lists it, behind `TENANT/` where there are tenants; chunks of one key and two namespaces are two. Only memory is told
of: what tiers have they remove without a word.

Numbers begin at the nanosecond of the server's start, so a restarted server's are above all before and a subscriber
sees a gap. Each second without an event an empty batch tells of a gap at the end. To what was missed the replay
socket answers: 8 bytes with the first number that is wanted, sent as vLLM's subscribers do; then comes what was sent
since, or, where that is not kept any more, `AllBlocksCleared` and all that is there, under the latest numbers.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import struct
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, TypeAlias

import msgspec
import zmq

from kvdepot import shm
from kvdepot.errors import Unavailable
from kvdepot.index import Chunk, Index, Namespace

__all__ = ["END", "TOPIC", "AllBlocksCleared", "BlockRemoved", "BlockStored", "Feed", "Publisher", "replay_endpoint"]

log = logging.getLogger(__name__)

TOPIC = b"kvdepot"
MEDIUM = "CPU"
END = (-1).to_bytes(8, "big", signed=True)
"""The number of the message that ends a replay."""
_LAST = (b"", END, b"")
_BATCH = 512
"""Chunks that one message tells of at most."""
_MOST_QUEUED = 1 << 17
_LISTED_A_TICK = 1 << 14
"""Chunks that the deciding thread tells of in one go, when all must be told anew: some milliseconds."""
_KEPT_MESSAGES = 20_000
_KEPT_BYTES = 64 << 20
"""Messages are kept for replays up to these limits, and beyond them as many as tell of all that is there."""
_BEAT_S = 1.0
_GATHER_S = 0.01
_MARGIN = 64
"""Messages that a replay of all that is there repeats at its end, for subscribers that stop reading a replay at the
number before the message that showed them the gap."""
_MOST_CONNECTIONS = 64
"""Subscribers and replays together: each takes a descriptor."""
_MOST_WAITING = 64
"""Replays that wait for their turn."""
_REPLAY_S = 10.0
"""A replay whose reader takes nothing for so long is over."""
_AT_ONCE = 16
"""Messages of a replay between two looks at what is new."""
_RETRY_MS = 10
_EVENT = struct.Struct("=Hi")


class BlockStored(msgspec.Struct, tag=True, omit_defaults=True, gc=False):
    """Chunks are there, each behind the one before it. Field by field as vLLM has it."""

    block_hashes: list[bytes]
    parent_block_hash: bytes | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    locality: str | None = None
    ownership: str | None = None


class BlockRemoved(msgspec.Struct, tag=True, omit_defaults=True, gc=False):
    """Chunks are there no more."""

    block_hashes: list[bytes]
    medium: str | None
    locality: str | None = None
    ownership: str | None = None


class AllBlocksCleared(msgspec.Struct, tag=True, gc=False):
    """Nothing is there."""


_Event: TypeAlias = BlockStored | BlockRemoved | AllBlocksCleared
_Change: TypeAlias = "tuple[bool, Namespace, bytes, bytes | None] | None"
"""Whether a chunk is there, its namespace, key and parent; None: forget all that was said."""


def replay_endpoint(endpoint: str) -> str:
    """Where replays are asked for: the next TCP port, or the unix socket of that name with `.replay` behind it."""
    if endpoint.startswith("tcp://"):
        host, _, port = endpoint.rpartition(":")
        return f"{host}:{int(port) + 1}"
    return endpoint + ".replay"


class Feed:
    """What changes in an index, queued. `changed` and `tick` are for the deciding thread, the rest for the reader's."""

    def __init__(self, index: Index, counters: Counter[str], most: int = _MOST_QUEUED) -> None:
        self._index = index
        self._counters = counters
        self._most = most
        self._queue: deque[_Change] = deque([None])
        self._full = False
        self._listing: Iterator[Chunk] | None = self._all()
        self._asleep = False  # set by the reader before it waits, cleared by whoever wakes it
        self.wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        index.watch = self.changed

    def __repr__(self) -> str:
        return f"<Feed of {len(self._queue)} changes{', full' * self._full}>"

    # -- the deciding thread

    def changed(self, chunk: Chunk, there: bool) -> None:
        """A chunk is visible now, or not any more. Saying so twice does no harm."""
        if self._full:
            return
        queue = self._queue
        if len(queue) >= self._most:
            # From here on nothing is known: whoever reads this believes in nothing, and hears it all anew later.
            self._full, self._listing = True, None
            self._counters["kv_event_overflows"] += 1
            queue.append(None)
        else:
            before = chunk.parent
            queue.append((there, chunk.namespace, chunk.key, None if before is None else before.key))
        if self._asleep:
            self.rouse()

    def rouse(self) -> None:
        """Wake the reader."""
        self._asleep = False
        os.eventfd_write(self.wake, 1)

    def tick(self) -> None:
        """Once a second: go on telling what was there before the feed was, or before its queue was full."""
        if len(self._queue) > self._most // 2:
            return
        if self._full:
            self._full, self._listing = False, self._all()
        room = min(_LISTED_A_TICK, self._most // 2)
        while self._listing is not None and room:
            chunk = next(self._listing, None)
            if chunk is None:
                self._listing = None
                return
            room -= 1
            if self._index.is_there(chunk):
                self.changed(chunk, True)

    def _all(self) -> Iterator[Chunk]:
        for space in self._index.namespaces():
            yield from list(space.chunks.values())

    # -- the reader's

    def take(self, most: int) -> list[_Change]:
        """The oldest changes."""
        taken: list[_Change] = []
        queue = self._queue
        while queue and len(taken) < most:
            taken.append(queue.popleft())
        return taken

    def may_sleep(self) -> bool:
        """Whether nothing is there to take; after that, `wake` becomes readable when something is."""
        self._asleep = True
        if self._queue:
            self._asleep = False
        return self._asleep

    def close(self) -> None:
        """When the reader is done with it."""
        self._index.watch = None
        os.close(self.wake)


class _Belief:
    """What a subscriber that has read everything believes to be there: parents by key, by namespace."""

    def __init__(self) -> None:
        self.there: dict[Namespace, dict[bytes, bytes | None]] = {}
        self.count = 0

    def apply(self, changes: list[_Change], chunk_tokens: int) -> list[_Event]:
        """Take changes in; the events that tell of them."""
        events: list[_Event] = []
        removed = False
        for change in changes:
            if change is None:
                self.there.clear()
                self.count = 0
                events = [AllBlocksCleared()]
                continue
            is_there, space, key, parent = change
            keys = self.there.get(space)
            if is_there == (keys is not None and key in keys):
                continue
            if is_there:
                self.there.setdefault(space, {})[key] = parent
                self.count += 1
                _add_stored(events, space, key, parent, chunk_tokens)
            else:
                assert keys is not None
                del keys[key]
                self.count -= 1
                removed = True
                if not keys:
                    del self.there[space]
                _add_removed(events, space, key)
        # What was removed last, of all there was: one word for it, however it was told.
        return [AllBlocksCleared()] if removed and not self.count else events

    def listing(self, chunk_tokens: int) -> Iterator[list[_Event]]:
        """All of it as of now, a message's events at a time; `messages` of them."""
        known = [(space, key, parent) for space, keys in self.there.items() for key, parent in keys.items()]

        def batches() -> Iterator[list[_Event]]:
            for first in range(0, max(1, len(known)), _BATCH):
                events: list[_Event] = [] if first else [AllBlocksCleared()]
                for space, key, parent in known[first : first + _BATCH]:
                    _add_stored(events, space, key, parent, chunk_tokens)
                yield events

        return batches()

    @property
    def messages(self) -> int:
        """How many messages tell of all of it."""
        return max(1, -(-self.count // _BATCH))


def _add_stored(events: list[_Event], space: Namespace, key: bytes, parent: bytes | None, chunk_tokens: int) -> None:
    last = events[-1] if events else None
    owner = _owner(space)
    if isinstance(last, BlockStored) and last.ownership == owner and parent == last.block_hashes[-1]:
        last.block_hashes.append(key)
    else:
        events.append(BlockStored([key], parent, [], chunk_tokens, None, MEDIUM, None, "LOCAL", owner))


def _add_removed(events: list[_Event], space: Namespace, key: bytes) -> None:
    last = events[-1] if events else None
    owner = _owner(space)
    if isinstance(last, BlockRemoved) and last.ownership == owner:
        last.block_hashes.append(key)
    else:
        events.append(BlockRemoved([key], MEDIUM, "LOCAL", owner))


def _owner(space: Namespace) -> str:
    return f"{space.tenant}/{space.model}" if space.tenant else space.model


class _Sent:
    """Numbers of messages, and the latest of them, kept for replays."""

    def __init__(self, kept_messages: int, kept_bytes: int) -> None:
        self._limits = kept_messages, kept_bytes
        self._messages: deque[bytes] = deque()
        self._bytes = 0
        self.last = time.time_ns()

    @property
    def first(self) -> int:
        """The number of the oldest that is kept."""
        return self.last - len(self._messages) + 1

    def add(self, payload: bytes, listing: int) -> int:
        """Keep a message; its number. listing: at least as many are kept as tell of all that is there."""
        messages = self._messages
        messages.append(payload)
        self.last += 1
        self._bytes += len(payload)
        most, most_bytes = self._limits
        while len(messages) > listing + _MARGIN and (len(messages) > most or self._bytes > most_bytes):
            self._bytes -= len(messages.popleft())
        return self.last

    def since(self, start: int) -> list[bytes]:
        """Messages from this number on, which is kept, or the next."""
        return list(itertools.islice(self._messages, start - self.first, None))


class Publisher:
    """Publishes one feed at one endpoint until it is closed."""

    def __init__(
        self,
        feed: Feed,
        endpoint: str,
        chunk_tokens: int,
        context: zmq.Context[Any],
        guard: Callable[[zmq.Socket[Any]], None] = lambda socket: None,
        kept_messages: int = _KEPT_MESSAGES,
        kept_bytes: int = _KEPT_BYTES,
    ) -> None:
        """Listen; `start` publishes. guard: sets a socket's keys before it listens. Raises Unavailable."""
        self._feed = feed
        self._endpoint = endpoint
        self._chunk_tokens = chunk_tokens
        self._belief = _Belief()
        self._sent = _Sent(kept_messages, kept_bytes)
        self._encode = msgspec.msgpack.Encoder().encode
        self._next_beat = 0.0
        self._waiting: dict[bytes, int] = {}  # who asks for a replay, from which number on; oldest first
        self._replay: Iterator[tuple[bytes, ...]] | None = None  # of the first that waits
        self._unsent: tuple[bytes, ...] | None = None
        self._give_up_at = 0.0
        self._connections = 0
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="kvdepot-kv-events", daemon=True)
        self._pub = context.socket(zmq.PUB)
        self._router = context.socket(zmq.ROUTER)
        self._monitors: list[zmq.Socket[Any]] = []
        self._router.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self._pub.setsockopt(zmq.SNDHWM, 4096)
        self._router.setsockopt(zmq.SNDHWM, 4 * _AT_ONCE)
        self._router.setsockopt(zmq.RCVHWM, _MOST_WAITING)
        self._router.setsockopt(zmq.MAXMSGSIZE, 1024)
        try:
            for socket, url in ((self._pub, endpoint), (self._router, replay_endpoint(endpoint))):
                socket.setsockopt(zmq.LINGER, 200)
                guard(socket)
                self._monitors.append(socket.get_monitor_socket(zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED))
                _bind(socket, url)
        except BaseException:
            self._close_sockets()
            raise

    def __repr__(self) -> str:
        return f"<Publisher at {self._endpoint}: {self._belief.count} chunks, message {self._sent.last}>"

    def start(self) -> None:
        """Publish from now on."""
        self._thread.start()
        log.info("KV events at %s, replays at %s", self._endpoint, replay_endpoint(self._endpoint))

    def close(self) -> None:
        """Say that nothing is there any more, and end, and the feed with it. Blocks a second at most. Once."""
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
            for part in (self._router, *self._monitors):
                poller.register(part, zmq.POLLIN)
            poller.register(self._feed.wake, zmq.POLLIN)
            while not self._stopping:
                self._drain()
                if time.monotonic() >= self._next_beat:
                    self._publish([])
                self._answer()
                wait_s = self._next_beat - time.monotonic() if self._feed.may_sleep() else 0.0
                wait_ms = max(0, int(wait_s * 1000) + 1) if wait_s > 0 else 0
                if self._waiting:
                    wait_ms = min(wait_ms, _RETRY_MS if self._unsent else 0)
                for ready, _ in poller.poll(wait_ms):
                    self._hear(ready)
            self._publish([AllBlocksCleared()])
        except Exception:  # the top of a thread: whoever listens hears no beat any more, and the depot goes on
            log.exception("KV events are not published any more")
        finally:
            self._close_sockets()

    def _hear(self, ready: Any) -> None:
        if ready is self._router:
            self._asked()
        elif ready == self._feed.wake:
            with contextlib.suppress(BlockingIOError):
                os.eventfd_read(self._feed.wake)
            # What comes with the first change is told with it: a message each would have the deciding thread fight
            # for the interpreter's lock all the time.
            time.sleep(0.0 if self._stopping else _GATHER_S)
        else:
            self._count(ready)

    def _drain(self) -> None:
        """Publish what is queued, in order."""
        while not self._stopping and (changes := self._feed.take(_BATCH)):
            events = self._belief.apply(changes, self._chunk_tokens)
            if events:
                self._publish(events)
            time.sleep(0)  # gives the interpreter's lock away: the deciding thread must not wait for us

    def _publish(self, events: list[_Event]) -> None:
        payload = self._encode((time.time(), events))
        seq = self._sent.add(payload, self._belief.messages)
        self._pub.send_multipart((TOPIC, seq.to_bytes(8, "big"), payload))  # drops for who does not read: a gap
        self._next_beat = time.monotonic() + _BEAT_S

    # -- replays, one after the other

    def _asked(self) -> None:
        with contextlib.suppress(zmq.Again):
            while True:
                frames = self._router.recv_multipart(zmq.NOBLOCK)
                if len(frames) != 3 or frames[1] or len(frames[2]) != 8:
                    log.debug("no question for a replay: %d frames", len(frames))
                elif len(self._waiting) < _MOST_WAITING:
                    self._waiting.setdefault(frames[0], int.from_bytes(frames[2], "big"))

    def _answer(self) -> None:
        """Send a little of the replay whose turn it is."""
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
                except zmq.ZMQError as exc:  # gone
                    log.debug("a replay ends: %s", exc.strerror)
            self._replay = None
            del self._waiting[who]

    def _messages(self, start: int) -> Iterator[tuple[bytes, ...]]:
        """A replay's messages, as of now: what was sent from number `start` on, or all that is there."""
        sent, belief = self._sent, self._belief
        if sent.first <= start <= sent.last + 1:
            return itertools.chain(_numbered(start, sent.since(start)), iter([_LAST]))
        # Numbers for the listing that nobody has who asks for one, and the messages behind them once more: they end in
        # what is there now, too.
        last = max(sent.first + belief.messages - 1, sent.last - _MARGIN)
        assert last <= sent.last, "fewer messages are kept than tell of all that is there"
        now = time.time()
        listing = (self._encode((now, events)) for events in belief.listing(self._chunk_tokens))
        again = sent.since(last + 1)
        return itertools.chain(
            _numbered(last - belief.messages + 1, listing), _numbered(last + 1, again), iter([_LAST])
        )

    # -- connections

    def _count(self, monitor: zmq.Socket[Any]) -> None:
        with contextlib.suppress(zmq.Again):
            while True:
                event, value = _EVENT.unpack(monitor.recv_multipart(zmq.NOBLOCK)[0])
                self._connections += 1 if event == zmq.EVENT_ACCEPTED else -1
                if event == zmq.EVENT_ACCEPTED and self._connections > _MOST_CONNECTIONS:
                    log.debug("a connection beyond %d is shut", _MOST_CONNECTIONS)
                    shm.shut(value)

    def _close_sockets(self) -> None:
        if self._monitors:
            self._pub.disable_monitor()
            self._router.disable_monitor()
        for socket in (*self._monitors, self._pub, self._router):
            socket.close()


def _numbered(first: int, payloads: Iterable[bytes]) -> Iterator[tuple[bytes, ...]]:
    for seq, payload in enumerate(payloads, first):
        yield TOPIC, seq.to_bytes(8, "big"), payload


def _bind(socket: zmq.Socket[Any], url: str) -> None:
    """Listen; a unix socket is for this user alone."""
    old = os.umask(0o177)
    try:
        if url.startswith("ipc://") and len(os.fsencode(Path(url[len("ipc://") :]))) > 107:
            raise Unavailable(f"cannot publish at {url}: a unix socket's path has at most 107 bytes")
        socket.bind(url)
    except zmq.ZMQError as exc:
        raise Unavailable(f"cannot publish at {url}: {exc.strerror}") from exc
    finally:
        os.umask(old)
