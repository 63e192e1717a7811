"""The server process: wires socket, deciding part, arena and copy threads together.

Made by cli/serve.py. One thread runs `Server.run`: it receives, lets the depot decide, sends replies, and
never touches KV bytes. Copy threads report through a queue and an eventfd. The one law: nothing
that a client sends, or fails to read, stops the loop.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import math
import os
import select
import signal
import time
from collections import deque
from typing import Any, cast

import msgspec
import zmq

from kvdepot.config import Config
from kvdepot.core.depot import Action, Depot, Reply
from kvdepot.core.index.index import Index
from kvdepot.core.index.recovery import restore
from kvdepot.core.rates import Rates
from kvdepot.devices import Devices
from kvdepot.errors import (
    ArenaError,
    BadRequest,
    Busy,
    KVDepotError,
    ProtocolError,
    UnknownClient,
    VersionMismatch,
)
from kvdepot.eviction import POLICIES
from kvdepot.kv_events.feed import Feed
from kvdepot.kv_events.publisher import Publisher, replay_endpoint
from kvdepot.memory import shm
from kvdepot.memory.allocator import Allocator
from kvdepot.memory.arena import Arena, smallest_arena
from kvdepot.memory.copier import Call, Copier, Copy
from kvdepot.memory.records import Records
from kvdepot.protocol import wire
from kvdepot.protocol.endpoints import Claim
from kvdepot.protocol.handshake import Challenge, Seal, is_open_to_all, is_sealed
from kvdepot.server.listener import Listener
from kvdepot.tiers.codec import make_codec
from kvdepot.tiers.worker import TierWorker
from kvdepot.web.child import Child

__all__ = ["STOP_SIGNALS", "Server"]

log = logging.getLogger(__name__)

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
_TICK_S = 1.0
_SWEEP_TICKS = 3
_LINES = 20
"""Dropped records that are logged one by one."""
_PAUSE_S = 0.005
"""How long to leave those alone who send more than they may, unless somebody else has something to say."""
_COPIER_STOP_S = 2.0
"""For what copy threads are at besides copies, which have `drain_s`: a driver may hang while tensors are mapped."""
_TIER_STOP_S = 2.0
"""For tiers' threads to end what they are at."""
_WEB = ".web"
"""What the web process is called where clients have keys."""
_STATUS_COST = 4
"""A status, which tells of all models, engines and tiers there are, counts as so many requests against `max_rate`."""
_MOST_CHALLENGES = 1024
"""Clients between Hello and Prove; beyond that the oldest must begin again."""
_BATCH = 128
"""Messages taken before outcomes of copies get their turn."""


class Server:
    """One depot at one endpoint. Raises ArenaError or Unavailable when its places are taken."""

    def __init__(self, config: Config) -> None:
        # Collecting the whole heap stops the loop for 100 ms and more at a million chunks. Those are
        # not tracked and form no cycles; what does is young, and is collected when nothing waits.
        gc.disable()
        self._config = config
        self.boot = os.urandom(wire.BOOT_BYTES)
        size = config.arena_bytes
        if size < smallest_arena():
            raise ArenaError(f"an arena of {size} bytes cannot hold a chunk; raise --arena-gib")
        self._claims = _claim(config)
        try:
            self.arena = Arena(config.arena, size, self.boot)
        except BaseException:
            self._claims.close()
            raise
        self._stopping = False
        self.hangs = False  # at its end: a thread is still in a driver or a tier
        self._ticks = 0
        self._corrupt = 0  # chunks found damaged when last logged
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        try:
            self._listener = Listener(self._context, self._socket, config)
        except BaseException:
            self._context.destroy(linger=0)
            self.arena.close(remove=not self.arena.taken_over)
            self._claims.close()
            raise
        self._heard = cast(int, self._socket.getsockopt(zmq.FD))
        self._leases: dict[bytes, shm.LeaseView] = {}
        self._users: dict[bytes, str] = {}  # with keys: who said hello, as ZeroMQ proved it
        self._challenges: dict[bytes, Challenge] = {}  # of clients that have said hello and not proved themselves yet
        self._seals: dict[bytes, Seal] = {}  # of clients whose messages are sealed
        self._must_seal = self._listener.keys is None and is_open_to_all(config.url)
        self._rates = Rates(config.max_rate)
        self._outcomes: deque[tuple[Any, Any]] = deque()
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._tier_workers: list[TierWorker] = []
        self._devices = Devices(self.arena, config.gpu_staging_mib << 20)
        self._feed: Feed | None = None
        self._publisher: Publisher | None = None
        try:
            self._open_tiers()
            devices = self._devices
            self.depot = Depot(config, self._restore(), devices.map, config.tier_configs, devices.status, self.boot)
            self._web = self._make_web()
            self._open_kv_events()
        except BaseException:
            self._listener.close()
            self._socket.close()
            self._stop_tier_workers(0.0)
            self._context.destroy(linger=0)
            self.arena.close(remove=not self.arena.taken_over)
            self._claims.close()
            raise
        self._copier = Copier(self.arena, config.copy_threads, self._report)

    def _make_web(self) -> Child | None:
        """What keeps the web process, where there is to be one. Raises ConfigError."""
        endpoint = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)
        if self._config.http == "off" or not endpoint.startswith(("ipc://", "tcp://")):
            return None
        # What listens on all addresses is found at this host's own.
        url = endpoint.replace("//0.0.0.0:", "//127.0.0.1:").replace("//[::]:", "//[::1]:")
        keys = self._listener.keys
        return Child(self._config, url, keys.admit(_WEB) if keys is not None else None)

    def _open_tiers(self) -> None:
        """Raises ConfigError. A store that cannot be had now may be had later."""
        for config in self._config.tier_configs:
            options = config.options
            ages = [age for age in (options.ttl_s, self._config.ttl_s) if age]
            config = msgspec.structs.replace(
                config, options=msgspec.structs.replace(options, ttl_s=min(ages, default=0))
            )
            self._tier_workers.append(TierWorker(config, self.arena, self._report, make_codec(options)))
            log.info("tier %s: write %s", config.name, options.write, extra={"tier": config.name})

    def _open_kv_events(self) -> None:
        """Raises Unavailable."""
        config = self._config
        if config.kv_events:
            assert self._feed is not None
            self._publisher = Publisher(
                self._feed, config.kv_events, config.chunk_size, self._context, self._listener.guard
            )

    def _stop_tier_workers(self, timeout_s: float) -> bool:
        """End the tiers' threads; False where one hangs, and may yet write into the arena."""
        deadline = time.monotonic() + timeout_s
        for tier_worker in self._tier_workers:
            tier_worker.stop(max(0.1, deadline - time.monotonic()))
        return not any(tier_worker.is_busy() for tier_worker in self._tier_workers)

    def _restore(self) -> Index:
        """An index of the chunks that are in the arena already, if another server left them."""
        arena = self.arena
        records = Records(arena.table(), arena.ensure_table)
        allocator = Allocator(arena.header.chunks_start, arena.size)
        self._feed = Feed() if self._config.kv_events else None
        watch = self._feed.changed if self._feed is not None else None
        index = Index(allocator, POLICIES[self._config.policy](), records, self._config.ttl_s, watch)
        if arena.taken_over:
            begun = time.monotonic()
            restored = restore(index, arena.read_table(), arena.whole)
            for line in restored.dropped[:_LINES]:
                log.warning("record dropped during recovery: %s", line)
            log.info(
                "took over the arena %s with %d chunks in %.3f s; %d records and %d slots made no sense",
                arena.path, restored.chunks, time.monotonic() - begun, len(restored.dropped), len(restored.damaged),
            )  # fmt: skip
        arena.settle()
        return index

    # -- the loop

    def run(self) -> None:
        """Serve until a signal or `stop`. Blocks; then drains, answers what waits and removes its files."""
        # Not zmq.Poller: it builds its lists anew for every message.
        waited_for: list[tuple[Any, int]] = [
            (part, zmq.POLLIN) for part in (self._socket, self._wake, *self._listener.sockets)
        ]
        gc.freeze()
        self.depot.max_clients, self.depot.registrations.max_files = self._listener.share_out(self._config.max_clients)
        self.arena.start_populating()
        log.info(
            "serving at %s: chunks of %d tokens, arena %s of %.2f GiB, %d copy threads",
            self._config.url, self._config.chunk_size, self.arena.path, self.arena.size / 2**30,
            self._copier.threads,
        )  # fmt: skip
        self._act(self.depot.tick(time.monotonic(), time.time()))
        if self._feed is not None and self._publisher is not None:
            self._feed.tick(self.depot.index)
            self._publisher.start()
        next_tick = time.monotonic() + _TICK_S
        if self._web is not None:
            self._web.start()
        try:
            while not self._stopping:
                due = min(next_tick, self.depot.next_deadline())
                wait_s = max(0.0, due - time.monotonic())
                for ready, _ in zmq.zmq_poll(waited_for, math.ceil(wait_s * 1000)):
                    if ready is self._socket:
                        self._receive(_BATCH)
                    elif ready is self._wake:
                        self._collect()
                    else:
                        self._listener.turn(ready, self.depot.counters)
                now = time.monotonic()
                if now >= self.depot.next_deadline():
                    self._act(self.depot.expire(now))
                if now >= next_tick:
                    self._tick()
                    next_tick = time.monotonic() + _TICK_S
            if self._web is not None:
                self.depot.report.http = ""
                self._web.end()
            self._drain()
        finally:
            self.close()

    def stop(self, *_: object) -> None:
        """End the loop; safe in a signal handler."""
        self._stopping = True
        os.eventfd_write(self._wake, 1)

    def catch_signals(self) -> None:
        """Let SIGTERM, SIGINT and, unless it is ignored (nohup), SIGHUP stop the server. Main thread only."""
        for number in STOP_SIGNALS:
            if number is not signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN:
                signal.signal(number, self.stop)

    def _receive(self, most: int) -> None:
        limit = self._config.max_message_mib << 20
        for _ in range(most):
            try:
                frames, user = self._take()
            except zmq.Again:
                return
            identity, frame = frames[0], frames[-1]
            number: bytes = frame[: wire.ID_BYTES].ljust(wire.ID_BYTES, b"\0")
            try:
                self._refuse_unless(self._rates.count(identity, len(frame)))
                if len(frames) != 2:
                    raise ProtocolError(f"a message of {len(frames) - 1} frames, not 1")
                if len(frame) > limit:
                    raise ProtocolError(f"a message of {len(frame)} bytes is longer than {limit}")
                number, request = self._open(identity, number, frame)
                if isinstance(request, KVDepotError):
                    raise request
                if isinstance(request, wire.Status):
                    self._refuse_unless(self._rates.charge(identity, _STATUS_COST - 1))
                self.depot.report.latencies.begin(identity, number, type(request).__name__, time.monotonic())
                self._serve(identity, user, number, request)
            except KVDepotError as exc:
                self.depot.counters["bad_messages" if isinstance(exc, ProtocolError) else "errors"] += 1
                self._send(identity, number, exc)
            if self._rates.only_floods():
                # ZeroMQ's descriptor tells of connections that had been silent: of the others, not of the floods.
                select.select([self._wake, self._heard], [], [], _PAUSE_S)
                return

    def _refuse_unless(self, within_rate: bool) -> None:
        if not within_rate:
            self.depot.counters["requests_refused"] += 1
            raise Busy(f"more than {self._config.max_rate} requests a second, the most that max_rate allows")

    def _take(self) -> tuple[list[bytes], str]:
        """The next message, and the name of the client that sent it (empty without keys). Raises zmq.Again."""
        if self._listener.keys is None:
            return self._socket.recv_multipart(zmq.NOBLOCK), ""
        frames = self._socket.recv_multipart(zmq.NOBLOCK, copy=False)
        return [frame.bytes for frame in frames], str(frames[-1].get("User-Id"))

    def _serve(self, identity: bytes, user: str, number: bytes, request: wire.Request) -> None:
        if user and user != self._users.get(identity, user):
            # ROUTER_HANDOVER gives an identity to whoever names it last, for a client that connects again.
            self.depot.counters["users_refused"] += 1
            raise BadRequest("another client has introduced itself under this identity")
        if isinstance(request, wire.Hello):
            self._send(identity, number, self._hello(identity, request))
        elif isinstance(request, wire.Prove):
            self._send(identity, number, self._welcome(identity, user, request))
        else:
            self._act(self.depot.handle(identity, number, request, time.monotonic()))

    def _open(self, identity: bytes, number: bytes, frame: bytes) -> tuple[bytes, wire.Request | ProtocolError]:
        """Decode a message, and take its seal off. Raises UnknownClient where the seal is not what it must be."""
        seal = self._seals.get(identity)
        if seal is None and not is_sealed(frame):
            return wire.decode_request(frame)
        plain = seal.open(frame) if seal is not None else None
        if plain is not None:
            return wire.decode_request(plain)
        if not is_sealed(frame):
            number, request = wire.decode_request(frame)
            if isinstance(request, wire.Hello | wire.Prove | ProtocolError):
                return number, request
        raise UnknownClient("say hello first: this message is not sealed as was agreed with this server")

    def _hello(self, identity: bytes, hello: wire.Hello) -> wire.Proof:
        if hello.version != wire.VERSION:
            raise VersionMismatch(
                f"the client speaks protocol {hello.version}, this server {wire.VERSION}: "
                "install the same kvdepot on both sides"
            )
        if self.arena.is_lost():
            raise ArenaError(
                f"the server's arena {self.arena.path} was removed or replaced while it ran, so no client can check "
                "whom it talks to: restart the server"
            )
        known = self._leases.get(identity)
        if known is not None and hello.lease != known.name:
            raise BadRequest("this client has introduced itself with another lease")
        if self._must_seal and not hello.sealed:
            raise BadRequest("messages must be sealed where every user of this host can connect")
        challenge = Challenge(hello, self.boot, self.arena.name, self.arena.secret)
        self._challenges.pop(identity, None)
        if len(self._challenges) >= _MOST_CHALLENGES:
            del self._challenges[next(iter(self._challenges))]
        self._challenges[identity] = challenge
        return challenge.proof

    def _welcome(self, identity: bytes, user: str, prove: wire.Prove) -> wire.Welcome:
        challenge = self._challenges.pop(identity, None)
        if challenge is None:
            raise UnknownClient("say hello first: this server has not been asked to prove itself")
        known = self._leases.get(identity)
        if known is None:
            self._leases[identity], seal = self._meet(identity, user, challenge, prove)
        else:
            seal = challenge.check(prove, known.secret)
        self._seals.pop(identity, None)
        if seal is not None:
            self._seals[identity] = seal
        lookup_s = self._config.lookup_s if self._tier_workers else 0.0
        return wire.Welcome(wire.VERSION, self._config.chunk_size, lookup_s)

    def _meet(
        self, identity: bytes, user: str, challenge: Challenge, prove: wire.Prove
    ) -> tuple[shm.LeaseView, Seal | None]:
        """Take a new client in: its lease, once it has proved that it owns it; and what seals its messages."""
        if any(lease.name == challenge.lease for lease in self._leases.values()):
            raise BadRequest(f"lease {challenge.lease} belongs to another client")
        lease = shm.LeaseView(challenge.lease)
        try:
            if not lease.is_alive():
                raise BadRequest(f"nobody holds the lock of lease {challenge.lease[:64]!r}")
            seal = challenge.check(prove, lease.secret)
            keys = self._listener.keys
            self.depot.hello(identity, lease, keys.tenant(user) if keys is not None else "")
        except KVDepotError:
            self.depot.counters["hellos_refused"] += 1
            lease.close(remove=False)
            raise
        if user:
            self._users[identity] = user
        return lease, seal

    def _act(self, actions: list[Action]) -> None:
        for action in actions:
            match action:
                case Reply():
                    self._send(action.client, action.number, action.value)
                case Copy() | Call():
                    self._copier.submit(action)
                case _:
                    self._tier_workers[action.tier].submit(action)

    def _send(self, identity: bytes, number: bytes, value: Any) -> None:
        failed = isinstance(value, KVDepotError)
        self.depot.report.latencies.end(identity, number, failed, time.monotonic())
        encode = wire.encode_failure if failed else wire.encode_answer
        frame = encode(number, self.boot, value)
        seal = self._seals.get(identity)
        if seal is not None and not isinstance(value, wire.Proof | UnknownClient):  # to who may have lost the key
            frame = seal.close(frame)
        try:
            self._socket.send_multipart((identity, frame), zmq.NOBLOCK)
        except zmq.ZMQError:
            self.depot.counters["replies_dropped"] += 1  # gone, or does not read

    def _report(self, token: Any, outcome: Any) -> None:
        """On a copy thread."""
        self._outcomes.append((token, outcome))
        os.eventfd_write(self._wake, 1)

    def _collect(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._wake)
        while self._outcomes:
            token, outcome = self._outcomes.popleft()
            if token is not None:
                self._act(self.depot.finished(token, outcome, time.monotonic()))

    def _tick(self) -> None:
        self._act(self.depot.tick(time.monotonic(), time.time()))
        if self._feed is not None:
            self._feed.tick(self.depot.index)
            self.depot.counters["kv_event_overflows"] = self._feed.overflows
        if self._web is not None:
            self.depot.report.http = self._web.address
        self._rates.tick()
        self._listener.tick()
        self._look_for_files()
        for identity, lease in list(self._leases.items()):
            if not lease.is_alive():
                level = logging.INFO if self.depot.is_engine(identity) else logging.DEBUG  # a probe each few seconds
                log.log(level, "client %s is gone", identity.hex()[:8], extra={"client": identity.hex()[:8]})
                self._act(self.depot.died(identity, lease.has_left()))
                self.depot.report.latencies.gone(identity)
                del self._leases[identity]
                self._users.pop(identity, None)
                self._seals.pop(identity, None)
                self._challenges.pop(identity, None)
                lease.close(remove=True)
        corrupt = self.depot.counters["corrupt_chunks"]
        if corrupt > self._corrupt:
            log.error("%d chunks failed their checksum; suspect faulty RAM", corrupt)
            self._corrupt = corrupt
        self._ticks += 1
        if self._ticks % _SWEEP_TICKS == 0:  # clients that died before they were met
            self._copier.submit(Call(None, shm.sweep_leases))
        gc.collect(1)

    def _look_for_files(self) -> None:
        """See whether new clients still find us: others may have removed our files, or put theirs in their place."""
        report = self.depot.report
        was, report.unreachable = report.unreachable, ""
        if self.arena.is_lost():
            report.unreachable = "the arena's file in /dev/shm was removed or replaced"
            if not was:
                log.error("%s was removed or replaced: no new engine can connect; restart the server", self.arena.path)
        elif self._listener.lost:
            report.unreachable = "another file lies where the unix socket was"
            if not was:
                log.error(
                    "another file has replaced the socket %s: no new engine can connect; restart the server",
                    self._config.url,
                )
        if report.unreachable and not was:
            report.note("unreachable", report.unreachable)

    # -- the end

    def _drain(self) -> None:
        """Answer what has arrived, remove what is to be removed, and let copies end, for `drain_s` at most."""
        log.info("stopping: %d operations in flight", self.depot.operations)
        self._receive(_BATCH)
        self._act(self.depot.stop_waiting())
        deadline = time.monotonic() + self._config.drain_s
        while (self.depot.operations or self.depot.tiering.busy) and (left := deadline - time.monotonic()) > 0:
            poller = zmq.Poller()
            poller.register(self._wake, zmq.POLLIN)
            poller.poll(int(left * 1000) + 1)
            self._collect()
        if self.depot.operations:
            log.warning("%d operations did not end within %g s", self.depot.operations, self._config.drain_s)

    def close(self) -> None:
        """Give everything back: threads, sockets, files. Called by `run`. Sets `hangs` where a thread did not end."""
        if self._web is not None:
            self._web.close()
        idle = not self.depot.operations and self._copier.stop(_COPIER_STOP_S)
        if idle:
            self._devices.close()  # the arena is registered with their drivers: it must still be there
        idle = self._stop_tier_workers(_TIER_STOP_S) and idle
        if self._publisher is not None:
            self._publisher.close()
        self._listener.close()
        self._socket.close()
        self._context.term()
        for lease in self._leases.values():
            lease.close(remove=False)
        if idle:
            self.arena.close(remove=self._config.on_stop == "remove")
        elif self._config.on_stop == "remove":
            # A thread hangs and may yet touch the arena or blocks: the arena's lock goes with this process, not before.
            self.arena.remove()
        self._claims.close()
        if idle:
            os.close(self._wake)  # else a thread that hangs may yet write to whatever has that number then
        self.hangs = not idle
        gc.unfreeze()
        gc.enable()  # libraries complain of what is still there when the interpreter ends
        log.info("stopped")


def _claim(config: Config) -> contextlib.ExitStack:
    """Take the places of all sockets, before anything else is taken. Raises Unavailable."""
    events = [config.kv_events, replay_endpoint(config.kv_events)] if config.kv_events else []
    with contextlib.ExitStack() as taken:
        for url, setting in [(config.url, "--url"), *((url, "--kv-events") for url in events)]:
            taken.callback(Claim(url, setting).close)
        return taken.pop_all()
