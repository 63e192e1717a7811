"""The connector's half in a worker of vLLM: it shares the rank's KV with the server, and loads and stores as ordered.

connector.py says when vLLM calls each method.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from vllm.logger import init_logger

from kvdepot.client.transfer import Operation
from kvdepot.client.worker import Submitted, WorkerClient
from kvdepot.errors import KVDepotError
from kvdepot.integrations.vllm.messages import Orders, WorkerReport
from kvdepot.integrations.vllm.stats import OperationStats, moved_by
from kvdepot.protocol.layout import Layout

if TYPE_CHECKING:
    from vllm.config import VllmConfig

__all__ = ["WorkerHalf"]

log = init_logger(__name__)

_PREEMPTION_S = 0.05
"""Stores of preempted requests are waited for this long before they are voided."""
_SLEEP_S = 5.0
"""An engine that goes to sleep waits this long for the server to release its KV's memory."""
_IDLE_S = 0.002
"""A worker with nothing to compute waits this long for a load, rather than spin on a core that copies need."""


class WorkerHalf:
    """The worker's half, of one rank."""

    def __init__(self, vllm_config: VllmConfig, client: WorkerClient, rank: int, fails_whole: bool) -> None:
        """rank: among all workers, including replicas of a shard. fails_whole: see `take_failed_requests`."""
        events = vllm_config.kv_events_config
        self.stats = OperationStats()
        self._depot = client
        self._depot.watch = self._operation_ended
        self._fails_whole = fails_whole
        self._rank = rank
        self._reports_keys = events is not None and events.enable_kv_cache_events
        self._report = WorkerReport()  # of what was stored since the last step
        self._storing: dict[int, Submitted[bool]] = {}  # stores of blocks that the scheduler holds, by step
        self._gpu: torch.device | None = None  # that holds the KV, if one does

    def __repr__(self) -> str:
        return f"<WorkerHalf of rank {self._rank}>"

    def _operation_ended(self, operation: Operation) -> None:
        self.stats(operation)
        self._report.moved += moved_by(operation)
        if self._reports_keys:
            self._report.add(operation.stored, self._rank)

    # -- its tensors

    def register(self, layouts: Sequence[Layout], kv_caches: dict[str, torch.Tensor]) -> None:
        """Have the server map the paged KV that `share_kv` has shared. Blocks 30 s at most; raises KVDepotError."""
        if self._depot.spec.groups:
            self._depot.register_groups(layouts, kv_caches)
        else:
            self._depot.register_layout(layouts[0], kv_caches)
        self._gpu = next(cache.device for cache in kv_caches.values()) if layouts[0].device else None

    def unregister(self) -> None:
        """Have the server release the KV, whose memory vLLM is about to free. Blocks 10 s at most.

        If the server does not confirm it, the memory behind the KV stays allocated until the server releases it or
        ends: vLLM frees addresses, and memory only once no process maps it.
        """
        try:
            self._depot.unregister(_SLEEP_S)
        except KVDepotError as exc:
            log.warning("the server may still map this sleeping engine's KV, so its memory may stay allocated: %s", exc)

    # -- a step

    def give_up_preempted(self, orders: Orders) -> None:
        """Before blocks of preempted requests are overwritten: wait for their stores, or void them.

        After a reset, void all stores.
        """
        if orders.void:
            self._depot.give_up_stores(set(self._depot.stores), _PREEMPTION_S)
        if orders.preempted:
            self._depot.give_up_stores(orders.preempted, _PREEMPTION_S)

    def start_loads(self, orders: Orders) -> None:
        """Submit this step's loads. They begin once the work queued so far is done, which may read their blocks."""
        event = self._queued() if orders.loads else None
        for request_id, transfers in orders.loads.items():
            self._depot.submit_retrieve([request_id], transfers, event)

    def store(self, orders: Orders) -> None:
        """Submit stores of chunks that earlier steps completed. They begin once the work queued so far is done.

        Before this step computes: another engine may be waiting for these chunks, and a step takes long.
        """
        if orders.stores:
            requests = list(dict.fromkeys(store.request_id for store in orders.stores))
            submitted = self._depot.submit_store(requests, orders.stores, self._queued())
            if orders.holds:
                self._storing[orders.step] = submitted

    def _queued(self) -> torch.cuda.Event | None:
        """An event that happens once all work queued on vLLM's stream is done; None on the CPU, where it already is.

        vLLM calls the connector on the thread and the stream that run models, and never while it captures a graph.
        """
        if self._gpu is None:
            return None
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self._gpu))
        return event

    def get_finished(self, orders: Orders) -> tuple[set[str] | None, set[str] | None]:
        """Requests whose last store has ended, of those that vLLM waits for; and requests whose load has ended."""
        if orders.idle:
            self._depot.wait_any(_IDLE_S)
        # Not vLLM's ids: stores of a finished request may be ordered a step later, and vLLM asserts that it waits for
        # every id that is returned.
        ended = self._depot.poll(orders.ended)
        return ended.stored or None, ended.retrieved or None

    def take_failed_requests(self) -> set[str]:
        """Requests that vLLM must compute from their first token, because a load failed: where a failure is one of the
        whole load.

        vLLM takes ids of failed blocks only from models with one group. And of a bounded group it would take the blocks
        before the failed one for good, which were not loaded, as nothing but the window is.
        """
        return self._depot.take_failed_requests() if self._fails_whole else set()

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Ids of blocks that vLLM must recompute: where a load may fail in part."""
        return set() if self._fails_whole else self._depot.take_failed_blocks()

    def take_report(self, orders: Orders) -> WorkerReport:
        """The chunks stored since the last step, and the number of this step."""
        report, self._report = self._report, WorkerReport()
        report.step, report.measured = orders.step, orders.measured
        for step in [step for step, stores in self._storing.items() if stores.done()]:
            del self._storing[step]
            report.ended[step] = {self._rank}
        return report

    def shutdown(self) -> None:
        """Unregister and close the connection. Safe twice and without a server; blocks 5 s at most."""
        self._depot.close()
