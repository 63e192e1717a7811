"""One rank of an engine as a client: registers its KV tensors, stores blocks, and retrieves chunks into blocks.

Used by the vLLM connector, and by client/lmcache.py under the contract's names. It takes hashes of chunks, never
tokens. The lane (lane.py) copies. Invariants: every block that a retrieve did not fill is reported
(`take_failed_blocks`); submitting and polling wait neither for the server nor for a copy.
"""

from __future__ import annotations

import itertools
import logging
import secrets
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from operator import attrgetter
from typing import Any, Generic, NamedTuple, TypeAlias, TypeVar

from kvdepot.client.calls import convert
from kvdepot.client.device_events import happened
from kvdepot.client.lane import Lane
from kvdepot.client.operations import BlockIds
from kvdepot.client.socket import Client, MessagingFuture, check_type
from kvdepot.client.transfer import Operation, Origin, ShardSpec, Transfer
from kvdepot.devices.blocks import BlockMemory, DeviceEvent
from kvdepot.errors import KVDepotError, ProtocolError
from kvdepot.protocol import wire
from kvdepot.protocol.layout import Layout

__all__ = ["CompareTerms", "Ended", "Submitted", "WorkerClient"]

log = logging.getLogger(__name__)

T = TypeVar("T")

_Asking: TypeAlias = tuple[wire.Copying, Callable[[object], T]]
"""A message, and the function that converts its answer."""

_whole = partial(check_type, expected=bool)
_SHUTDOWN_S = 5.0


@dataclass(eq=False)
class Submitted(Generic[T]):
    """A store or retrieve under way, of one or several requests. T: the type of its answer."""

    request_ids: list[str]
    transfers: list[Transfer]  # by KV cache group
    futures: list[MessagingFuture[T]] = field(default_factory=list)  # one per KV cache group
    error: KVDepotError | None = None  # why it was not submitted
    began_s: float = field(default_factory=time.monotonic)

    @property
    def chunks(self) -> int:
        return sum(transfer.chunks for transfer in self.transfers)

    def done(self) -> bool:
        """Whether it has ended, for all groups. Never blocks."""
        return all(each.query() for each in self.futures)

    def outcome(self) -> list[T] | KVDepotError:
        """The answers, one per KV cache group, or the first error; call it once `done`."""
        if self.error is not None:
            return self.error
        try:
            return [future.result(0.0) for future in self.futures]
        except KVDepotError as exc:
            return exc


class CompareTerms(NamedTuple):
    """The terms of a comparison; the fields are those of wire.Compare."""

    limit: float
    is_sample: bool = False
    has_experts: bool = False


class Ended(NamedTuple):
    """Requests since the last poll. stored: those that the engine has ended and that have no store under way any more.
    retrieved: those whose retrieves have completed, successfully or not."""

    stored: set[str]
    retrieved: set[str]


class WorkerClient:
    """Stores blocks of one rank's tensors, and retrieves chunks into them. Used by one thread."""

    def __init__(self, client: Client, spec: ShardSpec, *, unpins: bool = True, origin: Origin | None = None) -> None:
        """client: closed with this one. unpins: whether a retrieve releases the pins of its chunks; False where the
        scheduler's side ends sessions. origin: what the server is told of the engine."""
        self.client = client
        self.spec = spec
        self.instance_id = secrets.randbits(62)  # a process id would collide between containers
        # By request id; a batch is listed under each of its requests. The names are the contract's.
        self.store_futures: dict[str, list[Submitted[bool]]] = {}
        self.retrieve_futures: dict[str, list[Submitted[list[bool]]]] = {}
        self.comparisons: dict[str, list[Submitted[wire.Comparison]]] = {}
        self.finished_stores: set[str] = set()  # ended by the engine, with a store under way
        self.previously_finished: set[str] = set()  # returned by `poll`, and reported by the engine in every call since
        self.counters: Counter[str] = Counter()
        self.watch: Callable[[Operation], None] | None = None  # called for each store and retrieve that has ended
        self._unpins = unpins
        self.origin = origin or Origin()
        self.layouts: Sequence[Layout] = ()  # of the registered tensors, by KV cache group
        self._failed_blocks: set[int] = set()
        self._failed_requests: set[str] = set()
        self._warned: set[type[KVDepotError]] = set()  # errors of stores that were logged
        self._lane: Lane | None = None  # of the client at the first registration

    # -- registering

    @property
    def lane(self) -> Lane:
        if self._lane is None:
            self._lane = Lane(self.client)
        return self._lane

    def register(self, layouts: Sequence[Layout], blocks: Sequence[BlockMemory], fault: str = "") -> None:
        """Name the tensors to the server, and copy them from now on. Returns once it knows them; blocks 30 s at most.

        layouts: one per KV cache group. blocks: their memory, which must stay open until this client has unregistered
        it or is closed. fault: why this worker can neither store nor load, so that it has no `blocks`. Raises the
        server's error (LayoutError for a layout that it refuses), or Unavailable without a server, which gets the
        registration once it is there.
        """
        messages = self.spec.register(self.instance_id, [layout.format for layout in layouts], self.origin, fault)
        self.layouts = list(layouts)
        for group, memory in enumerate(blocks):
            self.lane.add(self.instance_id + group, memory)
        for answer in [self.client.ask(message) for message in messages]:
            answer.result()

    def cancel_registration(self) -> None:
        """Have no server know the tensors, after a registration that has failed, and copy nothing any more. The client
        stays open. Blocks 5 s at most, for a device that hangs."""
        self.lane.close()
        for group in range(len(self.layouts)):
            self.client.ask(wire.Unregister(self.instance_id + group))

    def unregister(self, timeout_s: float) -> None:
        """Copy the tensors no more, as their memory is about to be freed. Blocks 2 * `timeout_s` at most, or as long as
        a device hangs in a copy.

        Stores end or are voided, retrieves end as failed; until the tensors are registered again, so does all that is
        submitted. No server gets the registration again by itself. Raises Unavailable or DeadlineExceeded if it is not
        known whether the server has forgotten the tensors, which nobody touches any more in any case.
        """
        self.give_up_stores({*self.store_futures, *self.comparisons}, timeout_s)
        instance, self.instance_id = self.instance_id, secrets.randbits(62)  # no message may reach both
        for group in range(len(self.layouts)):
            self.lane.remove(instance + group)
        self._withdraw(instance, timeout_s)

    def _withdraw(self, instance: int, timeout_s: float) -> None:
        groups = range(max(1, len(self.layouts)))
        answers = [self.client.ask(wire.Unregister(instance + group), deadline_s=timeout_s) for group in groups]
        self.client.wait(lambda: all(answer.query() for answer in answers), timeout_s)
        for answer in answers:
            answer.result(0)

    # -- moving bytes

    def submit_store(
        self, request_ids: Sequence[str], transfers: Sequence[Transfer], event: DeviceEvent | None
    ) -> Submitted[bool]:
        """Copy blocks into the depot, in one message for each KV cache group. Never blocks.

        request_ids: requests that `poll` reports, all together. event: must happen before the bytes may be read: a CUDA
        event, None, or any object with `query()`. Raises BadRequest for anything else.
        """

        def make(instance: int, shards: list[wire.Shards], chunks: int) -> _Asking[bool]:
            return wire.Store(instance, shards), _whole

        return self._submit(self.store_futures, make, request_ids, transfers, event)

    def submit_compare(
        self, transfers: Sequence[Transfer], event: DeviceEvent | None, terms: CompareTerms
    ) -> Submitted[wire.Comparison]:
        """Have blocks compared with the chunks that are stored, in one message for each KV cache group. Never blocks.

        Submit a comparison before the store of the same blocks. Until it has ended, the blocks are in use as by a
        store: `poll` does not report their requests, and `give_up_stores` voids the comparison. Arguments: see
        `submit_store`.
        """
        requests = list(dict.fromkeys(transfer.request_id for transfer in transfers))

        def make(instance: int, shards: list[wire.Shards], chunks: int) -> _Asking[wire.Comparison]:
            request = wire.Compare(instance, shards, *terms)
            return request, partial(convert, request, wire.Comparison)

        return self._submit(self.comparisons, make, requests, transfers, event)

    def submit_retrieve(
        self,
        request_ids: Sequence[str],
        transfers: Sequence[Transfer],
        event: DeviceEvent | None,
        writers: tuple[str, ...] = (),
    ) -> None:
        """Copy chunks into blocks after `event`, in one message for each KV cache group. Never blocks. writers: as in
        wire.Retrieve. Other arguments: see `submit_store`."""

        def make(instance: int, shards: list[wire.Shards], chunks: int) -> _Asking[list[bool]]:
            return wire.Retrieve(instance, shards, self._unpins, writers), partial(_per_chunk, chunks)

        self._submit(self.retrieve_futures, make, request_ids, transfers, event)

    def _submit(
        self,
        under_way: dict[str, list[Submitted[T]]],
        make: Callable[[int, list[wire.Shards], int], _Asking[T]],
        request_ids: Sequence[str],
        transfers: Sequence[Transfer],
        event: DeviceEvent | None,
    ) -> Submitted[T]:
        """make: from an instance, shards and their number of chunks, the message and the function for its answer."""
        event = None if happened(event) else event
        submitted: Submitted[T] = Submitted(list(request_ids), sorted(transfers, key=attrgetter("group")))
        self.previously_finished.difference_update(request_ids)
        for request_id in request_ids:
            under_way.setdefault(request_id, []).append(submitted)
        parts_of = {group: list(parts) for group, parts in itertools.groupby(submitted.transfers, attrgetter("group"))}
        try:
            shards = {group: self.spec.shards(parts) for group, parts in parts_of.items()}
        except KVDepotError as exc:
            submitted.error = exc
            return submitted
        for group, parts in parts_of.items():
            request, read = make(self.instance_id + group, shards[group], sum(part.chunks for part in parts))
            block_ids = [BlockIds.unpack(part.block_ids, part.skip_blocks) for part in parts]
            submitted.futures.append(self.lane.submit(request, block_ids, event, read))
        return submitted

    # -- outcomes

    def poll(self, ended: set[str]) -> Ended:
        """Requests whose transfers have ended. Called every engine step; never blocks.

        ended: ids of requests that the engine reports as ended. `stored` has each id that was reported (now or
        earlier) and has no store under way, at most once.

        An id may be reused: only reports in the calls that directly follow the id's return count as repeated. Once a
        call does not report the id, or a store or retrieve is submitted under it, it names a new request.
        """
        _settle(self.store_futures, self._store_ended)
        _settle(self.comparisons, lambda comparison: None)  # whoever submitted a comparison has its outcome
        retrieved = _settle(self.retrieve_futures, self._retrieve_ended)
        # Asynchronous scheduling repeats a report in steps that it scheduled before it learned of the id's return. A
        # new request of the same id is scheduled after those, in a step that does not report it.
        repeated = self.previously_finished & ended
        self.finished_stores |= ended - repeated
        stored = self.finished_stores.difference(self.store_futures, self.comparisons)
        self.finished_stores -= stored
        self.previously_finished = repeated | stored
        return Ended(stored, retrieved)

    def _store_ended(self, submitted: Submitted[bool]) -> None:
        outcome = submitted.outcome()
        is_whole = not isinstance(outcome, KVDepotError) and all(outcome)
        if not is_whole:
            self._store_failed(submitted, outcome if isinstance(outcome, KVDepotError) else None)
        stored = submitted.transfers if is_whole else []
        size = sum(transfer.blocks * self._bytes_of(transfer) for transfer in stored)
        self._report("store", submitted, sum(transfer.chunks for transfer in stored), size)

    def _store_failed(self, submitted: Submitted[bool], error: KVDepotError | None) -> None:
        """Log why a store has failed; error: None if the server had no space, or was replaced."""
        self.counters["stores_dropped"] += 1
        why = str(error) if error is not None else "the server had no space for it, or was replaced"
        if error is None or type(error) in self._warned:
            log.info("not stored for %s: %s", submitted.request_ids[:4], why)
        else:
            self._warned.add(type(error))
            log.warning(
                "not stored for %s: %s (further stores that fail with %s are counted, not logged)",
                submitted.request_ids[:4], why, type(error).__name__,
            )  # fmt: skip

    def _retrieve_ended(self, submitted: Submitted[list[bool]]) -> None:
        outcome = submitted.outcome()
        if isinstance(outcome, KVDepotError):
            log.warning("retrieve for %s failed: %s", submitted.request_ids[:4], outcome)
            filled = [False] * submitted.chunks
        else:
            filled = [is_filled for of_group in outcome for is_filled in of_group]
        chunks, size = iter(filled), 0
        for transfer in submitted.transfers:
            skip, per_chunk = transfer.skip_blocks, transfer.blocks // max(1, transfer.chunks)
            for first in range(0, transfer.chunks * per_chunk, per_chunk):
                if next(chunks):
                    size += (per_chunk - skip) * self._bytes_of(transfer)
                else:
                    ids = transfer.block_ids[4 * (first + skip) : 4 * (first + per_chunk)]
                    self._failed_blocks.update(memoryview(ids).cast("I"))
                    self.counters["chunks_failed"] += 1
                skip = 0
        if not all(filled):
            self._failed_requests.update(submitted.request_ids)
        self._report("retrieve", submitted, sum(filled), size)

    def _bytes_of(self, transfer: Transfer) -> int:
        """Bytes of one block of the transfer's KV cache group."""
        return self.layouts[transfer.group].block_bytes if self.layouts else 0

    def _report(self, kind: str, submitted: Submitted[T], done: int, size_bytes: int) -> None:
        """done: chunks that were copied."""
        if self.watch is None or not submitted.transfers:
            return
        outcome, took_s = submitted.outcome(), time.monotonic() - submitted.began_s
        error = outcome if isinstance(outcome, KVDepotError) else None
        self.watch(Operation(kind, submitted.request_ids, took_s, submitted.chunks, done, size_bytes, error))

    def take_failed_requests(self) -> set[str]:
        """Ids of requests with a retrieve that failed, in part or as a whole, since the last call; the engine must
        recompute what they were to load. Each failure is returned once: here, or by `take_failed_blocks`."""
        failed, self._failed_requests = self._failed_requests, set()
        self._failed_blocks.clear()
        return failed

    def take_failed_blocks(self) -> set[int]:
        """Ids of blocks that a retrieve failed to fill since the last call; the engine must recompute them."""
        failed, self._failed_blocks = self._failed_blocks, set()
        self._failed_requests.clear()
        return failed

    def give_up_stores(self, request_ids: set[str], timeout_s: float) -> None:
        """Make sure that no store under way reads blocks of these requests: the engine is about to reuse them.

        Waits up to `timeout_s` for their stores, then voids the others (see `Lane.give_up`).
        """
        futures: list[MessagingFuture[Any]] = [
            future
            for request_id in request_ids
            for each in (*self.store_futures.get(request_id, ()), *self.comparisons.get(request_id, ()))
            for future in each.futures
        ]
        if futures:
            self.counters["stores_given_up"] += self.lane.give_up(futures, timeout_s)

    def wait_any(self, timeout_s: float) -> None:
        """Wait up to `timeout_s` for any retrieve to end; for an engine with nothing else to do."""
        if retrieves := {each for under_way in self.retrieve_futures.values() for each in under_way}:
            self.lane.wait(lambda: any(each.done() for each in retrieves), timeout_s)

    def close(self) -> None:
        """End all copies, unregister and close the connection. Safe twice and without a server; blocks 10 s at most."""
        if not self.lane.close():
            return  # the device still copies, and a server gives a closed client's memory to others
        try:
            self._withdraw(self.instance_id, _SHUTDOWN_S)
        except KVDepotError as exc:
            log.debug("not unregistered: %s", exc)
        self.client.close()


def _settle(under_way: dict[str, list[Submitted[T]]], end: Callable[[Submitted[T]], None]) -> set[str]:
    """Remove what is done, calling `end` once for each. Returns the ids that have nothing left."""
    # Queried once each: an answer that arrives meanwhile must not end a batch for only some of its requests.
    done = {each for of_one in under_way.values() for each in of_one if each.done()}
    for each in dict.fromkeys(each for of_one in under_way.values() for each in of_one if each in done):
        end(each)
    ended = {request_id for request_id, of_one in under_way.items() if done.issuperset(of_one)}
    for request_id, of_one in list(under_way.items()):
        under_way[request_id] = [each for each in of_one if each not in done]
        if request_id in ended:
            del under_way[request_id]
    return ended


def _per_chunk(chunks: int, value: object) -> list[bool]:
    """The answer to a retrieve. Raises ProtocolError for one that is not about this many chunks."""
    filled: list[object] = check_type(value, list)
    if len(filled) != chunks:
        raise ProtocolError(f"the server answered for {len(filled)} chunks, not for {chunks}")
    return [each is True for each in filled]
