"""The connector's half in a worker of vLLM: it copies between the rank's KV and the arena, as ordered.

connector.py says when vLLM calls each method. Invariant: a worker that is not connected reports every load as failed
and every store as ended, once, in the step that orders it, like a connected worker that has lost its server.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, TypeAlias

from vllm.logger import init_logger

from kvdepot.client.worker import Submitted, WorkerClient
from kvdepot.devices import record_event
from kvdepot.errors import KVDepotError
from kvdepot.integrations.vllm.in_step import MappedArena, StepCopies
from kvdepot.integrations.vllm.messages import Compared, LaneTimes, Orders, WorkerReport
from kvdepot.integrations.vllm.stats import KVDepotStats
from kvdepot.protocol import wire

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig

    from kvdepot.devices.blocks import BlockMemory, DeviceEvent
    from kvdepot.devices.self_test import CopySpeed

log = init_logger(__name__)

_Reading: TypeAlias = Submitted[bool] | Submitted[wire.Comparison]
"""A store or a comparison under way."""

_PREEMPTION_S = 0.05
"""Stores of preempted requests are waited for this long before they are voided."""
_SLEEP_S = 5.0
"""An engine that goes to sleep waits this long for its copies to end before they are voided."""
_COMPARISON_S = 1.0
"""A step waits this long for the comparison of what it has computed on top of a load that nothing has proved yet."""
_TESTED_BYTES = 8 << 20
"""The speed that the self-test has measured has the weight of loads of this many bytes."""
_IDLE_S = 0.002
"""A worker with nothing to compute waits this long for a load, rather than spin on a core that copies need."""


class WorkerHalf:
    """The worker's half, of one rank; until it is connected, nothing is loaded or stored."""

    _depot: WorkerClient

    def __init__(self, vllm_config: VllmConfig, rank: int, fails_whole: bool) -> None:
        """rank: number among all workers, including replicas of a shard. fails_whole: see `take_failed_requests`."""
        self.stats = KVDepotStats()
        self.is_connected = False
        """Whether this worker loads and stores; may be set to False between two steps."""
        self.fault = ""
        """Why this worker can neither store nor load, so that it will never be connected; empty: it can."""
        self._fails_whole = fails_whole
        self._rank = rank
        self._failed = Orders()  # orders whose loads have failed without a connection
        self._storing: dict[int, list[_Reading]] = {}  # copies that read blocks which the scheduler holds, by step
        self._comparing: dict[int, Submitted[wire.Comparison]] = {}  # by number of the check
        self._compared: dict[int, Compared] = {}  # results that are not reported yet
        self._unproven: set[int] = set()  # blocks that a comparison has not proved, not reported yet
        self.blocks: Sequence[BlockMemory] = ()
        """The paged KV by KV cache group; none of a worker with a fault."""
        self._device: torch.device | None = None  # where the KV is; None: the processor's memory
        self._copies: StepCopies | None = None
        self._reported = MappedArena()  # the mapped arena, as last reported

    def __repr__(self) -> str:
        return f"<WorkerHalf of rank {self._rank}{'' if self.is_connected else ', not connected'}>"

    # -- its tensors

    def connect(self, made: WorkerClient) -> None:
        """Load and store from the next step on, unless this worker has a fault. made: a client that has registered the
        KV."""
        self._depot = made
        self._depot.watch = self.stats.count
        self.is_connected = not self.fault
        if self.is_connected:  # until loads have measured the speed
            made.lane.load_speed.add(_TESTED_BYTES, _TESTED_BYTES / self._tested.load_bytes_s)

    def use_blocks(self, blocks: Sequence[BlockMemory], tested: CopySpeed) -> None:
        """Use this paged KV, by KV cache group. tested: the speed of its copies in the self-test."""
        self._tested = tested
        self.blocks = blocks
        self._device = blocks[0].device if blocks else None

    def register(self) -> None:
        """Register the KV again. Blocks 30 s at most; raises KVDepotError."""
        self._depot.register([each.layout for each in self.blocks], self.blocks)

    def unregister(self) -> None:
        """End all copies of the KV, whose memory vLLM is about to free. Blocks 10 s at most, or as long as a copy that
        has begun takes."""
        self._copies = None
        try:
            self._depot.unregister(_SLEEP_S)
        except KVDepotError as exc:
            log.warning("the server has not heard that this engine sleeps: %s", exc)
        for each in self.blocks:
            each.close()

    # -- a step

    def give_up_preempted(self, orders: Orders) -> None:
        """Before blocks of preempted requests are overwritten: wait for their stores, or void them.

        After a reset, void all stores.
        """
        if not self.is_connected:
            return
        if orders.void:
            self._depot.give_up_stores({*self._depot.store_futures, *self._depot.comparisons}, _PREEMPTION_S)
        if orders.preempted:
            self._depot.give_up_stores(orders.preempted, _PREEMPTION_S)

    def map_arena(self) -> None:
        """Map the server's arena if `copy_loads` can use it. Tried once for each server."""
        if not self.is_connected:
            return
        if self._copies is None and len(self.blocks) == 1 and not self._depot.spec.groups:
            self._copies = StepCopies(self.blocks[0], self._depot.lane.arenas)
        if self._copies is not None:
            self._copies.follow(self._depot.client.arena)

    def copy_loads(self, orders: Orders) -> None:
        """Copy the chunks that this step loads within itself (in_step.py), without the server. Blocks until they are
        there; on an accelerator, this step's own work waits for them."""
        for load in orders.step_loads:
            assert self._copies is not None, "this rank has mapped no arena"
            self.stats.count(self._copies.copy(load, self._depot.spec.rank))

    def start_loads(self, orders: Orders) -> None:
        """Submit this step's loads. They begin once the work queued so far is done, which may read their blocks."""
        if not self.is_connected:
            self._failed = orders
            return
        event = self._queued() if orders.loads else None
        for request_id, transfers in orders.loads.items():
            writers = orders.writers.get(request_id, ())
            self._depot.submit_retrieve([request_id], transfers, event, writers)

    def store(self, orders: Orders) -> None:
        """Submit comparisons, and stores, of chunks that earlier steps completed. They begin once the work queued so
        far is done.

        Before this step computes: another engine may be waiting for these chunks, and a step takes long.
        """
        if not self.is_connected:
            self._compared |= dict.fromkeys(orders.checks, Compared())
            return
        event = self._queued() if orders.stores or orders.checks else None
        submitted: list[_Reading] = []
        for number, check in orders.checks.items():
            self._comparing[number] = self._depot.submit_compare(check.transfers, event, check.terms)
            submitted.append(self._comparing[number])
        if orders.stores:
            requests = list(dict.fromkeys(store.request_id for store in orders.stores))
            submitted.append(self._depot.submit_store(requests, orders.stores, event))
        if orders.holds:
            self._storing[orders.step] = submitted

    def prove(self, orders: Orders) -> None:
        """Compare what this step has computed on top of loads that nothing has proved. Blocks for `_COMPARISON_S` at
        most, once the step has computed it; call it before its failed blocks are taken."""
        asked: dict[int, Submitted[wire.Comparison]] = {}
        if any(check.transfers for check in orders.proofs.values()) and self.is_connected:
            event = self._queued()
            for number, check in orders.proofs.items():
                asked[number] = self._depot.submit_compare(check.transfers, event, check.terms)
            self._depot.give_up_stores({each for one in asked.values() for each in one.request_ids}, _COMPARISON_S)
        for number, check in orders.proofs.items():
            found = self._compared[number] = _found(asked[number]) if number in asked else Compared()
            if not found.proves(check.terms.limit):
                self._unproven |= check.blocks

    def _queued(self) -> DeviceEvent | None:
        """An event that happens once all work queued on vLLM's stream is done; None on the CPU, where it already is.

        vLLM calls the connector on the thread and the stream that run models, and never while it captures a graph.
        """
        return record_event(self._device)

    def get_finished(self, orders: Orders) -> tuple[set[str] | None, set[str] | None]:
        """Requests whose last store has ended, of those that vLLM waits for; and requests whose load has ended."""
        if not self.is_connected:
            return set(orders.ended) or None, set(orders.loads) or None
        if orders.idle:
            self._depot.wait_any(_IDLE_S)
        # Not vLLM's ids: stores of a finished request may be ordered a step later, and vLLM asserts that it waits for
        # every id that is returned.
        ended = self._depot.poll(orders.ended)
        return ended.stored or None, ended.retrieved or None

    def take_failed_requests(self) -> set[str]:
        """Requests that vLLM must compute from their first token, because a load failed and such failures concern the
        whole load.

        vLLM takes ids of failed blocks only from models with one group. And in a bounded group, vLLM would take the
        blocks before the failed one as good, although only the window is loaded.
        """
        if not self._fails_whole:
            return set()
        return self._depot.take_failed_requests() if self.is_connected else set(self._failed.loads)

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Ids of blocks that vLLM must recompute, for models whose loads may fail in part."""
        if self._fails_whole:
            return set()
        unproven, self._unproven = self._unproven, set()
        if self.is_connected:
            return self._depot.take_failed_blocks() | unproven
        return unproven | {
            block
            for transfers in self._failed.loads.values()
            for transfer in transfers
            for block in memoryview(transfer.block_ids[4 * transfer.skip_blocks :]).cast("I")
        }

    def take_report(self, orders: Orders) -> WorkerReport:
        """The stores that have ended since the last step, and the number of this step."""
        report = WorkerReport(step=orders.step, fault=self.fault)
        mapped = self._copies.mapped if self._copies is not None else MappedArena()
        if mapped != self._reported:
            self._reported = report.mapped[self._rank] = mapped
        if orders.holds and not self.is_connected:
            report.ended[orders.step] = {self._rank}
        if self.is_connected:
            lane = self._depot.lane
            speed = lane.load_speed.bytes_s
            block_s = tuple(each.layout.block_bytes / speed for each in self.blocks)
            report.lanes[self._rank] = LaneTimes(lane.queued_bytes() / speed, block_s)
        for step in [step for step, stores in self._storing.items() if all(each.done() for each in stores)]:
            del self._storing[step]
            report.ended[step] = {self._rank}
        for number in [number for number, each in self._comparing.items() if each.done()]:
            self._compared[number] = _found(self._comparing.pop(number))
        report.compared = {number: [found] for number, found in self._compared.items()}
        self._compared = {}
        return report

    def shutdown(self) -> None:
        """Unregister and close the connection. Safe twice and without a server; blocks 5 s at most."""
        self.is_connected = False
        self._depot.close()
        if self._depot.client.is_closed:  # if the client is still open, a copy hangs
            for each in self.blocks:
                each.close()


def _found(submitted: Submitted[wire.Comparison]) -> Compared:
    """The result of a comparison; nothing, if it has not ended, or failed."""
    outcome = submitted.outcome() if submitted.done() else KVDepotError("it took too long")
    of_groups = [] if isinstance(outcome, KVDepotError) else outcome
    chunks, unknown = sum(each.chunks for each in of_groups), sum(each.unknown for each in of_groups)
    runs = tuple(run for each in of_groups for run in each.writers)
    return Compared(chunks, max((each.worst for each in of_groups), default=0.0), unknown, runs)
