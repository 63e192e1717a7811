"""The lane of a worker: one thread that copies between the engine's blocks and the arena, as the server places them.

So neither the engine's thread waits for a copy, nor a copy for the engine's next step. Used by client/worker.py and
client/contract.py. operations.py has the phases of an operation.

Invariants: every operation that a server has placed is completed, unless the client closes: whatever happens, the
server gets its memory back. Every future ends once, and not while its blocks are being copied. Loads go before stores
at every slice; among each other, operations of one direction are asked for and copied in the order in which their
events happen or, without events, were submitted. So a comparison reads the chunks as they were before the store behind
it.

The engine's thread may submit, give up and wait while the lane copies: a lock guards what both use, and the lane does
not hold it while it copies, waits or asks an event. The client's lock is taken within it, never around it: answers,
which come under the client's lock, are only queued.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Any, TypeVar

from kvdepot.client.connection import CHECK_S
from kvdepot.client.copies import BUSY_S, COMPLETE_TRIES, Arenas, give_back
from kvdepot.client.copy_speed import LoadSpeed
from kvdepot.client.device_events import EVENT_S, happened
from kvdepot.client.operations import AT_SERVER, NEEDS_SERVER, BlockIds, CopyPhase, LaneOperation
from kvdepot.client.socket import Client, MessagingFuture, hearing
from kvdepot.devices.blocks import BlockMemory, DeviceEvent
from kvdepot.errors import (
    BadRequest,
    Busy,
    DeadlineExceeded,
    KVDepotError,
    ProtocolError,
    Unavailable,
    UnknownInstance,
    UnknownRequest,
)
from kvdepot.protocol import wire

log = logging.getLogger(__name__)

T = TypeVar("T")

_MOST_AT_SERVER = 64
"""Limit of operations of one direction that are at the server: while one is copied, the server places the next."""
_MOST_WAITING = 4096
ANSWER_S = 60.0
"""An operation fails if the server does not answer it for this long, for example if the server's process is stopped."""
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.0001, 0.001
"""The pause between two looks at events doubles while nothing happens: each look takes the GIL from the engine."""
_IDLE_S = 0.5
"""Without device events to poll, the thread looks this often for overdue operations."""
_MAP_AGAIN_S = 0.5
"""An arena that could not be mapped is tried again after this long, or before a copy."""
_CLOSE_S = 5.0
_COMPLAIN_S = 30.0


class Lane:
    """Copies one worker's blocks. Any thread may call it. Its own thread starts with the first `add`."""

    def __init__(
        self, client: Client, called: str = "kvdepot-lane", clock: Callable[[], float] = time.monotonic
    ) -> None:
        """client: used by the lane while it is open; close the lane first. called: the thread's name; empty: there is
        no thread, and the caller calls `turn`."""
        self.arenas = Arenas(client.arena_dir)
        self.load_speed = LoadSpeed()
        self._client = client
        self._called = called
        self._clock = clock
        self._changed = threading.Condition(threading.Lock())  # an operation has ended, or a slice was copied
        # What follows is guarded by that lock, but for `_answers`.
        self._memories: dict[int, BlockMemory] = {}  # by instance
        self._live: dict[MessagingFuture[Any], LaneOperation] = {}
        self._waiting: list[LaneOperation] = []
        self._ready: dict[bool, deque[LaneOperation]] = {True: deque(), False: deque()}  # loads, and all others
        self._placed: dict[bool, deque[LaneOperation]] = {True: deque(), False: deque()}
        self._at_server: Counter[bool] = Counter()
        self._copying: LaneOperation | None = None  # the operation of which a slice is being copied
        self._refused: list[LaneOperation] = []  # operations whose completion the server was too busy to take
        self._closed: KVDepotError | None = None
        self._thread: threading.Thread | None = None
        self._answers: deque[tuple[LaneOperation, object]] = deque()
        self._wake_fd = -1
        self._ended = threading.Event()  # set by the thread: two threads must not join one in CPython 3.11
        self._unmapped: tuple[tuple[str, bytes], float] = ("", b""), 0.0  # an arena, and when it is tried again
        self._followed: dict[int, tuple[str, bytes]] = {}  # by instance: the arena that its blocks follow
        self._added: list[BlockMemory] = []  # blocks that the thread does not know yet
        self._next_check = 0.0
        self._pause_s = _FIRST_PAUSE_S
        hearing.add(self)

    def __repr__(self) -> str:
        return f"<Lane {self._called} of {len(self._memories)} instances, {len(self._live)} operations>"

    # -- whose blocks

    def add(self, instance: int, blocks: BlockMemory) -> None:
        """Copy these blocks, which are about to be registered as `instance`. Raises Unavailable if the lane is closed,
        or there can be no thread."""
        self.remove(instance)
        with self._changed:
            if self._closed is not None:
                raise self._closed
            if self._called and self._thread is None:
                self._start()
            self._memories[instance] = blocks
            self._added.append(blocks)
        self._wake()

    def memory(self, instance: int) -> BlockMemory | None:
        return self._memories.get(instance)

    def remove(self, instance: int, timeout_s: float = 0.0) -> None:
        """Copy these blocks no more, which may then be closed. Blocks as `give_up` does, for all operations with
        them."""
        with self._changed:
            blocks = self._memories.pop(instance, None)
            self._followed.pop(instance, None)
            if blocks is None:
                return
            futures = [future for future, each in self._live.items() if each.blocks is blocks]
        self.give_up(futures, timeout_s)

    # -- operations

    def submit(
        self,
        request: wire.Copying,
        block_ids: Sequence[BlockIds],
        event: DeviceEvent | None = None,
        convert: Callable[[object], T] | None = None,
    ) -> MessagingFuture[T]:
        """Copy the chunks that a request names once `event` has happened. Never blocks.

        block_ids: the blocks of each of `request.shards`. convert: makes the future's value from the server's last
        answer. That is the answer to `wire.Complete`, or to the request if there is nothing to copy. Errors come by the
        future: UnknownInstance without an `add`, BadRequest for blocks that do not fit, Busy if too many operations
        wait, DeadlineExceeded if the event does not happen or the server does not answer, Unavailable, DeviceError.
        """
        future: MessagingFuture[T] = MessagingFuture(self, convert)
        with self._changed:
            try:
                if self._closed is not None:
                    raise self._closed
                blocks = self._memories.get(request.instance)
                if blocks is None:
                    raise UnknownInstance(f"no KV tensors are registered as instance {request.instance}")
                if len(self._live) - self._at_server.total() >= _MOST_WAITING:
                    raise Busy(f"{_MOST_WAITING} copies already wait for their events or for the server")
                operation = LaneOperation(request, blocks, block_ids, event, future, self._clock())
                operation.check()
            except KVDepotError as exc:
                future._finish(exc)
                return future
            self._live[future] = operation
            if event is None:
                self._make_ready(operation)
                self._ask_ready()
                # Asked in this thread, which needs no switch of threads. An answer to another request, which may have
                # come meanwhile, would not be noticed by the lane.
                must_wake = len(self._live) > 1 or bool(self._answers)
            else:
                self._waiting.append(operation)
                self._pause_s = _FIRST_PAUSE_S
                must_wake = True
        if must_wake:
            self._wake()
        return future

    def give_up(self, futures: Collection[MessagingFuture[Any]], timeout_s: float) -> int:
        """Make sure that the lane touches no block of these operations any more. Returns how many were voided.

        Waits up to `timeout_s` until they have ended. Operations that have not ended by then are voided, and end with
        an error. None of their other bytes is copied any more, and a voided store becomes visible only if all its bytes
        had been copied. A slice that is being copied is waited for, whatever the timeout: if this returned, the caller
        would overwrite bytes that a device may still be reading. That takes milliseconds, or for ever if the device
        hangs; then this logs an error every 30 s.
        """
        if self.wait(lambda: all(future.query() for future in futures), timeout_s):
            return 0
        with self._changed:
            voided = [self._live[each] for each in dict.fromkeys(futures) if each in self._live and not each.query()]
            for operation in voided:
                self._void(operation, KVDepotError("its blocks were given up before they were copied"))
            self._prune()
            while not all(operation.future.query() for operation in voided):
                if not self._changed.wait(_COMPLAIN_S):
                    log.error("a copy of KV has not ended for %g s: does the device hang?", _COMPLAIN_S)
        self._wake()
        return len(voided)

    def pump(self) -> None:
        """Do nothing: the lane's thread hears the answers, and so asking a future waits for no lock."""

    def wait(self, done: Callable[[], bool], timeout_s: float) -> bool:
        """Wait until `done()`, which is asked whenever an operation has ended; it must not use the lane. Blocks for
        `timeout_s` at most."""
        if done():
            return True
        if not self._called:
            return self._client.wait(done, timeout_s)
        with self._changed:
            return self._changed.wait_for(done, timeout_s)

    def close(self) -> bool:
        """End all operations with Unavailable, and end the thread. Safe twice. Blocks 5 s at most, for a device that
        hangs.

        Returns whether no byte is copied any more. If not, do not close the client, whose server would give the memory
        to others; the blocks stay allocated.
        """
        with self._changed:
            self._end_all(Unavailable("this client is closed"))
            thread = self._thread
        self._wake()
        if thread is None:
            self._release()
            return True
        if thread is threading.current_thread():
            return self._copying is None
        if not self._ended.wait(_CLOSE_S):
            log.error("a copy of KV has not ended for %g s: does the device hang?", _CLOSE_S)
            return False
        return True

    def queued_bytes(self) -> int:
        """Bytes that loads have yet to copy. Stores do not count, as loads go before them."""
        with self._changed:
            return sum(each.left_bytes for each in self._live.values() if each.is_load and not each.is_void)

    # -- changes of an operation; the lock is held

    def _make_ready(self, operation: LaneOperation) -> None:
        operation.phase, operation.since = CopyPhase.READY, self._clock()
        self._ready[operation.is_load].append(operation)

    def _ask_ready(self) -> bool:
        """Ask the server to place READY operations, loads first, up to the limit. Returns whether any was asked for."""
        any_asked = False
        for is_load in (True, False):
            ready = self._ready[is_load]
            while ready and self._at_server[is_load] < _MOST_AT_SERVER:
                operation = ready.popleft()
                if operation.phase is CopyPhase.READY:
                    operation.phase, operation.since = CopyPhase.ASKED, self._clock()
                    self._at_server[is_load] += 1
                    self._client.ask_then(operation.request, partial(self._heard, operation), None)
                    any_asked = True
        return any_asked

    def _heard(self, operation: LaneOperation, value: object) -> None:
        """An answer has come; under the client's lock, on whichever thread has read it."""
        self._answers.append((operation, value))
        if threading.current_thread() is not self._thread:
            self._wake()

    def _take_answers(self) -> bool:
        any_taken = False
        while self._answers:
            operation, value = self._answers.popleft()
            any_taken = True
            operation.since = self._clock()
            if operation.phase is CopyPhase.ASKED:
                self._answered(operation, value)
            elif operation.phase is CopyPhase.COMPLETING:
                self._completed(operation, value)
        return any_taken

    def _answered(self, operation: LaneOperation, value: object) -> None:
        if not isinstance(value, wire.Placement):
            self._end(operation, value)
            return
        operation.placement, operation.phase = value, CopyPhase.PLACED
        if operation.is_void:
            self._complete(operation, give_back(value))
        else:
            self._placed[operation.is_load].append(operation)

    def _complete(self, operation: LaneOperation, message: wire.Complete) -> None:
        operation.phase, operation.since, operation.completion = CopyPhase.COMPLETING, self._clock(), message
        operation.tries += 1
        self._client.ask_then(message, partial(self._heard, operation), None)

    def _completed(self, operation: LaneOperation, value: object) -> None:
        if isinstance(value, Busy) and operation.tries < COMPLETE_TRIES:
            self._refused.append(operation)  # the server keeps what it has placed until it hears this
            return
        if isinstance(value, UnknownRequest):
            value = Unavailable("the server that had placed its chunks was replaced")
            if isinstance(operation.request, wire.Store) and not operation.is_void:
                log.info("not stored: %s", value)
                value = False
        self._end(operation, value)

    def _end(self, operation: LaneOperation, value: object) -> None:
        """End an operation. value: for its future, unless the future has ended before."""
        if operation.phase in AT_SERVER:
            self._at_server[operation.is_load] -= 1
        operation.phase = CopyPhase.ENDED
        self._live.pop(operation.future, None)
        try:
            operation.future._finish(value)
        except Exception as exc:
            log.exception("the outcome of a copy could not be converted")
            operation.future._finish(ProtocolError(f"the server's answer {value!r:.80} was not understood: {exc!r}"))
        self._changed.notify_all()

    def _void(self, operation: LaneOperation, error: KVDepotError) -> None:
        """Copy no more of an operation. Its future ends at once, or with the slice that is being copied."""
        operation.is_void = True
        if operation is self._copying:
            return
        if operation.phase not in AT_SERVER:
            self._end(operation, error)
            return
        operation.future._finish(error)
        if operation.phase is CopyPhase.PLACED and operation.placement is not None:
            self._complete(operation, give_back(operation.placement))
        self._changed.notify_all()

    def _prune(self) -> None:
        """Forget operations that ended while they waited."""
        self._waiting = [operation for operation in self._waiting if operation.phase is CopyPhase.WAITING]
        for is_load, ready in self._ready.items():
            self._ready[is_load] = deque(operation for operation in ready if operation.phase is CopyPhase.READY)

    def _end_all(self, error: KVDepotError) -> None:
        """End every operation, as the lane closes. The server releases what it has placed when the client closes."""
        self._closed = self._closed or error
        for operation in list(self._live.values()):
            operation.is_void = True
            if operation is not self._copying:
                self._end(operation, error)
        self._prune()

    # -- the thread

    def turn(self) -> float:
        """Take answers, poll events, ask the server for what is ready, and copy one slice at most. Returns the longest
        pause before the next turn, in seconds; 0: none. Blocks while it copies."""
        self._client.pump()
        if self._client.is_closed:
            with self._changed:
                self._take_answers()
                self._end_all(Unavailable("this client is closed"))
            return _IDLE_S
        self._use_devices()
        any_happened = self._poll_events()
        with self._changed:
            goes_on = self._take_answers() | any_happened
            self._drop_overdue()
            goes_on |= self._complete_refused() | self._ask_ready()
            operation = self._copying = self._next_placed()
            events = bool(self._waiting)
        self._follow()
        if operation is not None:
            self._copy_slice(operation)
            return 0.0
        if goes_on:  # sending may have consumed the signal of an answer
            self._pause_s = _FIRST_PAUSE_S
            return 0.0
        if events:
            pause_s, self._pause_s = self._pause_s, min(2 * self._pause_s, _LONGEST_PAUSE_S)
            return pause_s
        return _IDLE_S

    def _poll_events(self) -> bool:
        """Find the events that have happened. Each event is asked once, even if several operations wait for it."""
        with self._changed:
            waiting = list(self._waiting)
        if not waiting:
            return False
        answers: dict[int, bool | KVDepotError] = {}
        for operation in waiting:
            if id(operation.event) not in answers:
                try:
                    answers[id(operation.event)] = happened(operation.event)
                except KVDepotError as exc:
                    answers[id(operation.event)] = exc
        with self._changed:
            now = self._clock()
            for operation in waiting:
                answer = answers[id(operation.event)]
                if answer is False and now - operation.since > EVENT_S:
                    answer = DeadlineExceeded(f"the event did not happen within {EVENT_S:g} s")
                if operation.phase is not CopyPhase.WAITING or answer is False:
                    continue
                if isinstance(answer, KVDepotError):
                    self._end(operation, answer)
                else:
                    self._make_ready(operation)
            before = len(self._waiting)
            self._prune()
            return len(self._waiting) < before

    def _drop_overdue(self) -> None:
        """Void operations that the server has not answered in time; each is completed once the server does answer."""
        now = self._clock()
        if now < self._next_check:
            return
        self._next_check = now + CHECK_S
        for operation in list(self._live.values()):
            is_silent = operation.phase in NEEDS_SERVER and now - operation.since > ANSWER_S
            if is_silent and not operation.future.query():
                self._void(operation, DeadlineExceeded(f"the server did not answer within {ANSWER_S:g} s"))
        self._prune()

    def _complete_refused(self) -> bool:
        now = self._clock()
        due = [operation for operation in self._refused if now - operation.since >= BUSY_S]
        self._refused = [operation for operation in self._refused if operation not in due]
        for operation in due:
            assert operation.completion is not None
            self._complete(operation, operation.completion)
        return bool(due)

    def _next_placed(self) -> LaneOperation | None:
        for placed in (self._placed[True], self._placed[False]):
            while placed:
                if placed[0].phase is CopyPhase.PLACED:
                    return placed[0]
                placed.popleft()
        return None

    def _use_devices(self) -> None:
        """Select the device of new blocks on this thread: else events make a context on the host's first device."""
        with self._changed:
            added, self._added = self._added, []
        for device in {blocks.device for blocks in added if blocks.device is not None and blocks.device.type != "cpu"}:
            import torch

            try:
                torch.get_device_module(device).set_device(device)
            except Exception as exc:  # noqa: BLE001 - copies to it fail by themselves, with a reason
                log.warning("%s cannot be used by the thread that copies: %s", device, exc)

    def _follow(self) -> None:
        """Prepare for copies to and from the server's arena: blocks in the processor's memory at once, those of a
        device before the first copy. An engine that starts may be capturing graphs, which fails where another thread
        registers memory with the driver."""
        arena = self._client.arena
        with self._changed:
            is_copying = self._copying is not None
            memories = [each for each in self._memories.items() if is_copying or each[1].device is None]
            due = {instance: blocks for instance, blocks in memories if self._followed.get(instance) != arena}
        is_early = self._unmapped[0] == arena and not is_copying and self._clock() < self._unmapped[1]
        if not due or not arena[0] or is_early:
            return
        try:
            view = self.arenas.of(*arena)
        except KVDepotError as exc:
            log.debug("the arena is not mapped yet: %s", exc)
            self._unmapped = arena, self._clock() + _MAP_AGAIN_S
            return
        with self._changed:  # so that no block memory is closed meanwhile
            for instance, blocks in due.items():
                if self._memories.get(instance) is blocks:
                    blocks.follow(view)
                    self._followed[instance] = arena

    def _copy_slice(self, operation: LaneOperation) -> None:
        """Copy as much of an operation as one slice has, and complete it after the last."""
        error, placement = None, operation.placement
        assert placement is not None
        begun, before = self._clock(), operation.copied
        try:
            self._copy(operation)
            if operation.is_load:
                self.load_speed.add((operation.copied - before) * operation.chunk_bytes, self._clock() - begun)
        except KVDepotError as exc:
            error = exc
        except BaseException as exc:  # whatever the error, the operation must end
            log.exception("a copy of KV failed")
            error = KVDepotError(f"the blocks could not be copied: {exc!r}")
        with self._changed:
            self._copying = None
            if self._closed is not None:
                self._end(operation, self._closed)
            elif error is not None or operation.is_void:
                self._void(operation, error or KVDepotError("its blocks were given up while they were copied"))
            elif operation.copied == len(operation.pieces):
                number, sums, differences = placement.operation, operation.sums, operation.differences
                self._complete(operation, wire.Complete(number, placement.boot, True, sums, differences))
            self._changed.notify_all()

    def _copy(self, operation: LaneOperation) -> None:
        assert operation.placement is not None
        operation.copy_slice(self.arenas.of(operation.placement.arena, operation.placement.boot))

    def _start(self) -> None:
        try:
            self._wake_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
            thread = threading.Thread(target=self._run, name=self._called, daemon=True)
            thread.start()
            self._thread = thread
        except (OSError, RuntimeError) as exc:
            if self._wake_fd >= 0:
                os.close(self._wake_fd)
                self._wake_fd = -1
            raise Unavailable(f"this process can have no thread that copies: {exc}") from exc

    def _wake(self) -> None:
        with contextlib.suppress(OSError):  # the thread has ended
            if self._wake_fd >= 0:
                os.eventfd_write(self._wake_fd, 1)

    def _run(self) -> None:
        with contextlib.suppress(OSError):  # engines bind the thread that started this to one CPU
            os.sched_setaffinity(0, range(os.cpu_count() or 1))
        try:
            while self._closed is None:
                try:
                    pause_s = self.turn()
                except BaseException as exc:  # a bug of ours, or of a callback: no operation may wait for ever
                    log.exception("the thread that copies KV failed; what it had to do is dropped")
                    self._recover(KVDepotError(f"the thread that copies failed: {exc!r}"))
                    pause_s = _IDLE_S
                if pause_s < _LONGEST_PAUSE_S:  # the client waits for whole milliseconds
                    time.sleep(pause_s)
                else:
                    self._client.wait(self._is_woken, pause_s, self._wake_fd)
        finally:
            self._release()
            self._ended.set()

    def _is_woken(self) -> bool:
        try:
            return os.eventfd_read(self._wake_fd) > 0
        except BlockingIOError:
            return bool(self._answers)

    def _recover(self, error: KVDepotError) -> None:
        """Drop all operations; what was placed is given back."""
        with self._changed:
            self._copying = None
            for operation in list(self._live.values()):
                with contextlib.suppress(Exception):
                    self._void(operation, error)
            self._changed.notify_all()

    def _release(self) -> None:
        """Let go of blocks, arenas and the descriptor, as nothing will be copied any more."""
        with self._changed:
            self._memories.clear()
            fd, self._wake_fd = self._wake_fd, -1
        self.arenas = Arenas(self._client.arena_dir)
        if fd >= 0:
            os.close(fd)

    def leave_to_parent(self) -> None:
        self._changed = threading.Condition(threading.Lock())  # a thread of the parent may have held the old lock
        self._thread, self._copying, self._wake_fd, self._memories = None, None, -1, {}
        with self._changed:
            self._end_all(BadRequest("this client connected before a fork: connect again in the child process"))
