"""The server's loop, which connects socket, core and tiers. It decides nothing.

cli/serve.py creates it and runs it on the main thread. `Server.run` receives messages, passes them to the core, sends
the core's replies, submits its tasks to threads, and takes their outcomes from a queue, signalled by an eventfd. A
helper thread allocates memory that is not populated yet, and removes what dead clients left. No thread of the server
touches the bytes that engines copy. Invariant: nothing that a client sends, or fails to read, stops the loop.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import math
import os
import select
import time
from collections import Counter, deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import zmq

from kvdepot.config import Config, reported
from kvdepot.core.actions import Action, Prepare, Prepared, Reply, Stop
from kvdepot.core.admission import stored_salts
from kvdepot.core.connections import Connections
from kvdepot.core.depot import Depot
from kvdepot.core.index.index import Index
from kvdepot.core.index.recovery import InUse, restore
from kvdepot.core.report import ServerFacts
from kvdepot.errors import BadRequest, ConfigError
from kvdepot.eviction import POLICIES
from kvdepot.kv_events.feed import Feed
from kvdepot.kv_events.publisher import Publisher, replay_endpoint
from kvdepot.memory import shm
from kvdepot.memory.allocator import Allocator
from kvdepot.memory.arena import Arena
from kvdepot.memory.arena_header import HEADER_BYTES
from kvdepot.memory.records import Records
from kvdepot.protocol import wire
from kvdepot.protocol.curve import refuse_open
from kvdepot.protocol.endpoints import Claim, note_serving
from kvdepot.protocol.listener import Listener
from kvdepot.protocol.quotas import name_of
from kvdepot.tiers.worker import TierOutcome, TierWorker, start_workers
from kvdepot.values import plural, size
from kvdepot.web.child import Child, beside

log = logging.getLogger(__name__)

_TICK_S = 1.0
_SWEEP_TICKS = 3
_PAUSE_S = 0.005
"""Pause of receiving if only clients beyond `max_rate` send; any other client ends it."""
_TIER_STOP_S = 2.0
"""Time for tiers' threads to end their current task."""
_BATCH = 128


class Server:
    """One depot at one endpoint. Raises KVDepotError if an endpoint or the arena is taken, and then leaves nothing."""

    def __init__(self, config: Config) -> None:
        # A full garbage collection would stop the loop for 100 ms and more at a million chunks. Chunks are not tracked
        # and form no cycles. Objects that do are young, and `_tick` collects them.
        gc.disable()
        self._config = config
        self.boot = os.urandom(wire.BOOT_BYTES)
        self._withdrawals = 0  # that the arena's header says
        self.hangs = False
        """After `close`: a thread is still in a tier call, and may yet touch the arena."""
        self._serves = False
        self._stopping = False
        self._ticks = 0
        self._in_use: list[InUse] = []  # by clients of the earlier server
        self._is_closing = False
        self._outcomes: deque[tuple[Any, TierOutcome | Prepared]] = deque()
        self._tier_workers: list[TierWorker] = []
        self._feed: Feed | None = None
        with contextlib.ExitStack() as closing:  # closed in reverse order
            self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
            # Otherwise a thread that hangs might write to a later file with that number.
            closing.callback(lambda: None if self.hangs else os.close(self._wake))
            events = [config.kv_events, replay_endpoint(config.kv_events)] if config.kv_events else []
            for url, setting in [(config.url, "--url"), *((url, "--kv-events") for url in events)]:
                if not config.keys:
                    refuse_open(url)
                closing.callback(Claim(url, setting).close)
            self._folder = Path(config.arena_dir)
            self.arena = Arena(self._folder, config.arena, config.arena_bytes, self.boot)
            closing.callback(self._close_arena)
            context = zmq.Context()
            # `term` waits for the publisher's thread; a listener that failed in its constructor has left sockets open.
            closing.callback(lambda: context.term() if self._serves else context.destroy(linger=0))
            self._listener = Listener(context, config.url, config.keys, config.max_message_mib << 20)
            closing.callback(self._listener.close)
            closing.callback(self._stop_tier_workers)
            self._tier_workers += start_workers(config.tier_configs, config.rules, self.arena, self._report)
            self._feed = Feed() if config.kv_events else None
            self._facts = ServerFacts(self.boot, os.getpid(), os.uname().nodename)
            self.depot = Depot(
                config, self._restore(), config.tier_configs, self._facts,
                is_tenant=self._listener.keys.is_tenant, readers=[self._feed] if self._feed is not None else [],
            )  # fmt: skip
            self.connections = Connections(
                config, self.depot, self.boot, self.arena, partial(shm.LivenessView, self._folder),
                self._listener.keys.tenant,
            )  # fmt: skip
            closing.callback(self.connections.close)
            if self._feed is not None:
                self._publisher = Publisher(self._feed, config.kv_events, context, self._listener.guard)
                closing.callback(self._publisher.close)
            self._helper = ThreadPoolExecutor(1, "kvdepot-memory")
            closing.callback(self._stop_helper)
            self._web: Child | None = beside(config, self._listener.address, self._listener.keys.admit)
            if self._web is not None:
                closing.callback(self._web.close)
            self._closing = closing.pop_all()

    def _restore(self) -> Index:
        """An index with the chunks that an earlier server left in the arena."""
        arena, config = self.arena, self._config
        records = Records(arena.table(), lambda offset, size: arena.ensure(HEADER_BYTES + offset, size))
        allocator = Allocator(arena.header.chunks_start, arena.size)
        salts = stored_salts(config.salt_ttls, self._listener.keys.tenants)
        index = Index(allocator, POLICIES[config.policy], records, config.ttl_s, config.chunk_tokens, salts)
        self._set_quotas(index)
        if arena.taken_over:
            begun = time.monotonic()
            restored = restore(index, arena.read_table(), arena.whole, int(time.time()), arena.in_use)
            self._in_use = restored.in_use
            reasons = Counter(line.partition(": ")[2] for line in restored.dropped)
            for reason, number in reasons.items():
                log.warning(
                    "dropped %s during recovery: %s; the KV is computed again", plural(number, "record"), reason
                )
            log.info(
                "took over the arena %s with %d chunks in %.3f s; %d records and %d slots were invalid",
                arena.path, restored.chunks, time.monotonic() - begun, len(restored.dropped), len(restored.damaged),
            )  # fmt: skip
        arena.settle()
        return index

    def _set_quotas(self, index: Index) -> None:
        for (tenant, tag), quota in self._config.quotas.items():
            whose = f"quota of {name_of(tenant, tag)}" if tag else f"tenants.{tenant}"  # users may keep salts secret
            if not (self._listener.keys.is_tenant(tenant) or (tag and not tenant)):
                where = f"in {self._config.keys}" if self._config.keys else "because clients need no keys"
                raise ConfigError(f"{whose}: no client has this tenant, {where}")
            if quota.is_on_disk and not any(tier.is_local for tier in self._config.tier_configs):
                raise ConfigError(f"{whose}: a quota on disk needs a tier disk://")
            try:
                index.set_quota(tenant, quota, tag)
            except BadRequest as exc:
                raise ConfigError(f"{whose}: {exc}") from exc

    # -- the loop

    def run(self) -> None:
        """Serve until a signal or `stop`. Blocks; then drains, answers waiting requests and releases everything."""
        self._begin()
        socket, wake_up = self._listener.socket, self._wake
        # Not zmq.Poller, which rebuilds its lists for every message.
        waited_for: list[tuple[Any, int]] = [(part, zmq.POLLIN) for part in (socket, wake_up, *self._listener.sockets)]
        next_tick = time.monotonic() + _TICK_S
        try:
            while not self._stopping:
                due = min(next_tick, self.depot.next_deadline())
                wait_s = max(0.0, due - time.monotonic())
                for ready, _ in zmq.zmq_poll(waited_for, math.ceil(wait_s * 1000)):
                    if ready is socket:
                        self._receive(_BATCH)
                    elif ready is wake_up:
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
                self._facts.http = ""
                self._web.end()
            self._drain()
        finally:
            self.close()

    def _begin(self) -> None:
        """Start what runs beside the loop: populating, the publisher and the web process."""
        self._serves = True
        gc.freeze()
        self.depot.max_clients = self._listener.share_out(self._config.max_clients)
        self.arena.start_populating()
        log.info(
            "serving at %s: chunk size %s, arena %s of %s",
            self._config.url, "auto" if self._config.has_free_chunks else self._config.chunk_tokens, self.arena.path,
            size(self.arena.size),
        )  # fmt: skip
        self._facts.settings = reported(self._config)
        note_serving(self._config.url)
        self._act(self.connections.tick(time.monotonic(), time.time()))
        if self._feed is not None:
            self._feed.tick(self.depot.index.namespaces.all(), self.depot.topics())
            self._publisher.start()
        if self._web is not None:
            self._web.start()

    def stop(self, *_: object) -> None:
        """End the loop; safe in a signal handler."""
        self._stopping = True
        os.eventfd_write(self._wake, 1)

    def _receive(self, most: int) -> None:
        for _ in range(most):
            try:
                frames, user = self._listener.take()
            except zmq.Again:
                return
            self._act(self.connections.receive(frames, user, time.monotonic()))
            if self.connections.only_floods():
                # ZeroMQ's descriptor signals idle connections that become readable, hence not those that flood us.
                select.select([self._wake, self._listener.wake_up], [], [], _PAUSE_S)
                return

    def _act(self, actions: list[Action]) -> None:
        if self._withdrawals != (number := self.depot.withdrawals):
            self._withdrawals = number
            self.arena.note_withdrawals(number)  # before anyone hears of it
        for action in actions:
            match action:
                case Reply():
                    frame = self.connections.encode(action, time.monotonic())
                    self.depot.counters["replies_dropped"] += not self._listener.send(action.client, frame)
                case Prepare():
                    self._prepare(action)
                case Stop():
                    log.info("%s: stopping the server", action.reason)
                    self.stop()
                case wire.Describe():
                    assert self._feed is not None, "only with KV events, a server wants descriptions"
                    self._feed.described(action)
                case _:
                    self._tier_workers[action.tier].submit(action)

    def _prepare(self, task: Prepare) -> None:
        extents = [extent for each in task.extents for extent in each]
        if self.arena.is_populated(extents):
            self._act(self.depot.finished(task.token, Prepared(True), time.monotonic()))
        else:
            self._help(partial(self._allocate, task.token, extents))

    def _help(self, run: Callable[[], None]) -> None:
        """Run something slow on the helper thread, which logs what it raises."""

        def guarded() -> None:
            try:
                run()
            except Exception:  # the top of a thread
                log.exception("a task of the helper thread failed")

        self._helper.submit(guarded)

    def _allocate(self, token: object, extents: list[tuple[int, int]]) -> None:
        """On the helper thread."""
        is_allocated = False
        try:
            is_allocated = all(not self._is_closing and self.arena.ensure(*extent) for extent in extents)
        finally:
            self._report(token, Prepared(is_allocated))

    def _report(self, token: object, outcome: TierOutcome | Prepared) -> None:
        """Called on the helper thread and tiers' threads."""
        self._outcomes.append((token, outcome))
        os.eventfd_write(self._wake, 1)

    def _collect(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._wake)
        while self._outcomes:
            self._act(self.depot.finished(*self._outcomes.popleft(), time.monotonic()))

    def _tick(self) -> None:
        for use in [each for each in self._in_use if not self.arena.is_used(each.extents)]:
            use.end(self.depot.index)
            self._in_use.remove(use)
        if self._feed is not None:
            self._feed.tick(self.depot.index.namespaces.all(), self.depot.topics())
        self._act(self.connections.tick(time.monotonic(), time.time()))
        self._listener.tick()
        if self._web is not None:
            self._facts.http, self._facts.http_failure = self._web.address, self._web.failure
        why, where = self._listener.binding.obstacle, self._config.url
        if self.arena.is_lost():
            why, where = "the arena's file was removed or replaced", str(self.arena.path)
        self.depot.report.reach(why, where)
        self._ticks += 1
        if self._ticks % _SWEEP_TICKS == 0:  # for clients that died before they connected
            self._help(partial(shm.sweep_liveness_files, self._folder))
        gc.collect(1)

    # -- the end

    def _drain(self) -> None:
        """Answer received requests, finish removals, and let clients copy, for `drain_s` at most."""
        log.info("stopping: %d operations in flight", self.depot.operations)
        self._receive(_BATCH)
        self._act(self.depot.stop_waiting())
        deadline = time.monotonic() + self._config.drain_s
        while self.depot.is_busy and (now := time.monotonic()) < deadline:
            awaited: list[tuple[Any, int]] = [(self._wake, zmq.POLLIN)]
            if self.depot.operations:  # which end with a message
                awaited.append((self._listener.socket, zmq.POLLIN))
                self._receive(_BATCH)
            wait_s = max(0.0, min(deadline, self.depot.next_deadline()) - now)
            zmq.zmq_poll(awaited, math.ceil(wait_s * 1000))
            self._collect()
            if (now := time.monotonic()) >= self.depot.next_deadline():
                self._act(self.depot.expire(now))
        if self.depot.operations:
            log.warning("%d operations did not end within %g s", self.depot.operations, self._config.drain_s)

    def close(self) -> None:
        """Release threads, sockets and files. `run` calls it."""
        self._closing.close()
        gc.unfreeze()
        gc.enable()  # some libraries complain about objects that are left when the interpreter ends
        log.info("stopped")

    def _stop_helper(self) -> None:
        self._is_closing = True
        self._helper.shutdown(cancel_futures=True)  # after one extent at most

    def _stop_tier_workers(self) -> None:
        deadline = time.monotonic() + (_TIER_STOP_S if self._serves else 0.0)
        for tier_worker in self._tier_workers:
            tier_worker.stop(max(0.1, deadline - time.monotonic()))
        self.hangs |= any(tier_worker.is_busy() for tier_worker in self._tier_workers)

    def _close_arena(self) -> None:
        removes = self._config.on_stop == "remove" if self._serves else not self.arena.taken_over
        if not self.hangs or not self._serves:
            self.arena.close(remove=removes)
        elif removes:
            # A thread may yet touch the arena, so the arena's lock must last as long as this process.
            self.arena.remove()
