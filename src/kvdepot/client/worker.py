"""What one rank of an engine asks of the depot: to map its tensors, and to move blocks in and chunks back.

Used by the vLLM connector, and by client/lmcache.py under the contract's names. It takes hashes of chunks, never
tokens. The one law: a block that a retrieve did not fill is told (`take_failed_blocks`), never left to be decoded over;
and no call that an engine makes every step waits for the server.
"""

from __future__ import annotations

import logging
import secrets
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Generic, NamedTuple, TypeVar

from kvdepot.client.device_events import DeviceEvent, EventQueue, happened
from kvdepot.client.operation import Began, Operation
from kvdepot.client.socket import Client, MessagingFuture, check_type
from kvdepot.client.transfer import ShardSpec, Transfer
from kvdepot.errors import KVDepotError, ProtocolError
from kvdepot.protocol import wire
from kvdepot.protocol.layout import Layout

if TYPE_CHECKING:
    import torch

__all__ = ["Ended", "Submitted", "WorkerClient"]

log = logging.getLogger(__name__)

T = TypeVar("T")

_SHUTDOWN_S = 5.0


@dataclass(eq=False)
class Submitted(Generic[T]):
    """A store or retrieve under way, of one or several requests; T is what its future answers."""

    request_ids: list[str]
    transfers: list[Transfer]
    ticket: int
    future: MessagingFuture[T] | None = None  # None: it waits for its event
    error: KVDepotError | None = None  # why it is not sent
    began: Began = field(default_factory=Began.now)

    @property
    def chunks(self) -> int:
        """How many, over all its transfers."""
        return sum(transfer.chunks for transfer in self.transfers)

    def go(self, send: Callable[[Submitted[T]], MessagingFuture[T]]) -> None:
        """Its event has happened: send it, unless it was given up meanwhile."""
        if self.error is None:
            self.future = send(self)

    def fail(self, error: KVDepotError) -> None:
        """It will not be sent."""
        self.error = error

    def done(self) -> bool:
        """Whether it has ended. Never blocks."""
        return self.error is not None or (self.future is not None and self.future.query())

    def outcome(self) -> T | KVDepotError:
        """What it ended with, once it is done."""
        if self.error is not None:
            return self.error
        assert self.future is not None
        try:
            return self.future.result()
        except KVDepotError as exc:
            return exc


class Ended(NamedTuple):
    """Requests of which something has ended since the last poll."""

    stored: set[str]
    """That have ended, with all their stores."""
    retrieved: set[str]
    """That have no retrieve under way any more, whatever came of it."""


class WorkerClient:
    """Moves blocks of one rank's tensors into the depot, and chunks back. Used by one thread."""

    def __init__(self, client: Client, spec: ShardSpec, *, unpins: bool = True) -> None:
        """The client becomes its own.

        unpins: whether chunks are unpinned as they are retrieved; not where whoever looked them up ends its sessions.
        """
        self.client = client
        self.spec = spec
        self.instance_id = secrets.randbits(62)  # a process id would collide between containers
        self.kv_caches: dict[str, torch.Tensor] = {}
        # request id -> what is under way; a batch stands under each of its requests
        self.stores: dict[str, list[Submitted[bool]]] = {}
        self.retrieves: dict[str, list[Submitted[list[bool]]]] = {}
        self.ended: set[str] = set()  # told by the engine, with a store still under way
        self.repeated: set[str] = set()  # returned by `poll`, and told by the engine again ever since
        self.counters: Counter[str] = Counter()
        self.watch: Callable[[Operation], None] | None = None  # told of each store and retrieve when it has ended
        self._unpins = unpins
        self._block_bytes = 0
        self._failed_blocks: set[int] = set()
        self._last_ticket = 0
        self._device_events = EventQueue("kvdepot-events", self._choose_device)

    # -- registering

    def register_layout(self, layout: Layout, kv_caches: dict[str, torch.Tensor] | None = None) -> None:
        """Have the server map tensors that are shared already. Returns when it has; blocks up to 30 s.

        kv_caches: the tensors by layer, where there are any in this process. Raises what the server answers
        (LayoutError for a layout that it refuses), Unavailable without a server.
        """
        self.client.ask(self.spec.register(self.instance_id, layout)).result()
        self._block_bytes = layout.block_bytes
        if kv_caches is not None:
            self.kv_caches = kv_caches

    def _choose_device(self) -> None:
        """On the thread that asks events: else CUDA's runtime would make a context on the first GPU of the host."""
        device = next((tensor.device for tensor in self.kv_caches.values()), None)
        if device is not None and device.type == "cuda":
            import torch

            torch.cuda.set_device(device)

    # -- moving bytes

    def submit_store(
        self, request_ids: Sequence[str], transfers: Sequence[Transfer], event: DeviceEvent | None
    ) -> None:
        """Copy blocks into the depot, in one message. Never blocks.

        request_ids: whose it is for `poll`; all of them end together. event: what must have happened before the bytes
        may be read: a CUDA event, or None or any object with `query()`. Raises BadRequest for what is no event.
        """
        self._submit(self.stores, self._send_store, request_ids, transfers, event)

    def submit_retrieve(
        self, request_ids: Sequence[str], transfers: Sequence[Transfer], event: DeviceEvent | None
    ) -> None:
        """Copy chunks into blocks after `event`, in one message. Never blocks. Arguments as in `submit_store`."""
        self._submit(self.retrieves, self._send_retrieve, request_ids, transfers, event)

    def _submit(
        self,
        under_way: dict[str, list[Submitted[T]]],
        send: Callable[[Submitted[T]], MessagingFuture[T]],
        request_ids: Sequence[str],
        transfers: Sequence[Transfer],
        event: DeviceEvent | None,
    ) -> None:
        may_go = happened(event)
        self._last_ticket += 1
        submitted: Submitted[T] = Submitted(list(request_ids), list(transfers), self._last_ticket)
        self.repeated.difference_update(request_ids)
        for request_id in request_ids:
            under_way.setdefault(request_id, []).append(submitted)
        if may_go or not transfers:
            submitted.go(send)
        else:
            self._device_events.put(event, partial(submitted.go, send), submitted.fail)

    def _send_store(self, submitted: Submitted[bool]) -> MessagingFuture[bool]:
        if not submitted.transfers:
            return MessagingFuture.resolved(True)
        message = wire.Store(self.instance_id, submitted.ticket, self.spec.shards(submitted.transfers))
        return self.client.ask(message, _whole)

    def _send_retrieve(self, submitted: Submitted[list[bool]]) -> MessagingFuture[list[bool]]:
        if not submitted.transfers:
            return MessagingFuture.resolved([])
        message = wire.Retrieve(self.instance_id, self.spec.shards(submitted.transfers), self._unpins)
        return self.client.ask(message, partial(_per_chunk, submitted.chunks))

    # -- hearing what became of it

    def poll(self, ended: set[str]) -> Ended:
        """What has ended. Called every engine step; never blocks. ended: requests that the engine tells to be over.

        `stored` has each id that was told to be over (now or earlier) and has no store under way; each at most once.

        An id may be used again: what counts as a repeated report is one in the calls that directly follow the id's
        return. Once a call does not report the id, or a store or retrieve is submitted under it, it is a new request.
        """
        self._device_events.look()
        self.client.pump()
        _settle(self.stores, self._store_ended)
        retrieved = _settle(self.retrieves, self._retrieve_ended)
        # Asynchronous scheduling repeats a report in steps that it scheduled before it heard of the id's return. A new
        # request of the same id is scheduled after those, in a step that does not report it.
        repeated = self.repeated & ended
        self.ended |= ended - repeated
        stored = {request_id for request_id in self.ended if request_id not in self.stores}
        self.ended -= stored
        self.repeated = repeated | stored
        return Ended(stored, retrieved)

    def _store_ended(self, submitted: Submitted[bool]) -> None:
        outcome = submitted.outcome()
        is_whole = outcome is True
        if not is_whole:
            self.counters["stores_dropped"] += 1
            log.info("store for %s dropped: %s", submitted.request_ids[:4], outcome or "no space, or a copy failed")
        blocks = sum(transfer.blocks for transfer in submitted.transfers) if is_whole else 0
        keys = b"".join(transfer.hashes for transfer in submitted.transfers) if is_whole else b""
        self._tell("store", submitted, blocks // self.spec.blocks_in_chunk, blocks, keys)

    def _retrieve_ended(self, submitted: Submitted[list[bool]]) -> None:
        outcome, per_chunk = submitted.outcome(), self.spec.blocks_in_chunk
        if isinstance(outcome, KVDepotError):
            log.warning("retrieve for %s failed: %s", submitted.request_ids[:4], outcome)
            filled = [False] * submitted.chunks
        else:
            filled = outcome
        chunks, blocks = iter(filled), 0
        for transfer in submitted.transfers:
            skip = transfer.skip_blocks
            for first in range(0, transfer.chunks * per_chunk, per_chunk):
                if next(chunks):
                    blocks += per_chunk - skip
                else:
                    ids = transfer.block_ids[4 * (first + skip) : 4 * (first + per_chunk)]
                    self._failed_blocks.update(memoryview(ids).cast("I"))
                    self.counters["chunks_failed"] += 1
                skip = 0
        self._tell("retrieve", submitted, sum(filled), blocks)

    def _tell(self, kind: str, submitted: Submitted[T], done: int, blocks: int, stored: bytes = b"") -> None:
        """done, blocks: chunks and blocks that were moved."""
        if self.watch is None or not submitted.transfers:
            return
        outcome, began = submitted.outcome(), submitted.began
        error = outcome if isinstance(outcome, KVDepotError) else None
        took_s, size_bytes = time.monotonic() - began.at_s, blocks * self._block_bytes
        self.watch(
            Operation(kind, submitted.request_ids, began, took_s, submitted.chunks, done, size_bytes, error, stored)
        )

    def take_failed_blocks(self) -> set[int]:
        """Blocks whose retrieve failed since the last call; the engine must recompute them."""
        failed, self._failed_blocks = self._failed_blocks, set()
        return failed

    def give_up_stores(self, request_ids: set[str], timeout_s: float) -> None:
        """Make sure that nothing stores blocks of these requests any more: the engine is about to reuse them.

        Waits up to `timeout_s` for their stores; what is still under way then will never become visible (see
        memory/shm.py).
        """
        stores = [each for request_id in request_ids for each in self.stores.get(request_id, ())]
        if not stores:
            return
        if not self.client.wait(lambda: all(each.done() for each in stores), timeout_s):
            given_up = [each for each in stores if not each.done()]
            self.counters["stores_given_up"] += len(given_up)
            self.client.lease.raise_fence(self._last_ticket)
            for each in given_up:
                if each.future is None:
                    each.fail(KVDepotError("its blocks were taken away before its event happened"))

    def wait_any(self, timeout_s: float) -> None:
        """Wait up to `timeout_s` for a retrieve under way to end; for an engine with nothing else to do."""
        retrieves = [each for under_way in self.retrieves.values() for each in under_way]
        if retrieves:
            self.client.wait(lambda: any(each.done() for each in retrieves), timeout_s)

    def close(self) -> None:
        """Unregister and close. Safe twice and without a server; blocks 5 s at most."""
        self._device_events.stop()
        try:
            self.client.ask(wire.Unregister(self.instance_id)).result(_SHUTDOWN_S)
        except KVDepotError as exc:
            log.debug("not unregistered: %s", exc)
        self.client.close()


def _settle(under_way: dict[str, list[Submitted[T]]], tell: Callable[[Submitted[T]], None]) -> set[str]:
    """Take out what is done, and tell of each once; the ids that have nothing left."""
    done: set[str] = set()
    told: set[int] = set()
    # Asked once each: an answer that comes in meanwhile must not end a batch for some of its requests only.
    is_done = {id(each): each.done() for all_of_one in under_way.values() for each in all_of_one}
    for request_id, all_of_one in list(under_way.items()):
        left = []
        for each in all_of_one:
            if not is_done[id(each)]:
                left.append(each)
            elif id(each) not in told:
                told.add(id(each))
                tell(each)
        if left:
            under_way[request_id] = left
        else:
            del under_way[request_id]
            done.add(request_id)
    return done


def _whole(value: object) -> bool:
    """The answer to a store."""
    return check_type(value, bool)


def _per_chunk(chunks: int, value: object) -> list[bool]:
    """The answer to a retrieve of so many chunks. Raises ProtocolError for what is none."""
    filled: list[object] = check_type(value, list)
    if len(filled) != chunks:
        raise ProtocolError(f"the server answered for {len(filled)} chunks, not for {chunks}")
    return [each is True for each in filled]
