"""vLLM's side of kvdepot: `KVDepotConnector`. versions.py says for which versions of vLLM.

vLLM makes one in its scheduler and one in each worker, of the same class. Like vLLM's own connectors, each has one half
and delegates to it: the scheduler's half (scheduler.py) decides what is looked up, loaded and stored; the worker's half
(worker.py) does it. Invariants: vLLM never reads a block that was not loaded completely; a step waits for the depot for
50 ms at most, after a preemption (the times at the top of both files).

    request arrives       on_new_request              hash, send the lookup
    request is scheduled  get_num_new_matched_tokens  its answer (awaited 0.5 ms at most, else asked again next step)
    blocks are allocated  update_state_after_alloc    note which chunks go into which blocks
    step is built         build_connector_meta        loads; stores of chunks that earlier steps completed; preemptions
    worker, before        handle_preemptions          stores of preempted requests end or are voided
    worker, after         start_load_kv, wait_for_save, get_finished
                          (on a GPU the step may still run: both go behind an event on vLLM's own stream)
    step has ended        update_connector_output     how long it took; its chunks may be stored (stores.py);
                                                      loads that failed: vLLM recomputes, nothing is loaded twice
    request ends          request_finished_all_groups blocks stay alive until its stores are done

Settings in `kv_connector_extra_config`: `kvdepot.url`, `kvdepot.key` (this client's key file, if the server requires
one; default `KVDEPOT_KEY`), `kvdepot.save_decode` (store decoded chunks, too; default false),
`kvdepot.weights_revision` (names weights that their path does not identify), `kvdepot.boundary_chunks` (for models with
sliding windows or states: how far apart prompts can be resumed; plan.py).
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import zmq

from kvdepot.integrations.vllm.versions import (  # refuses other versions
    HOST_HITS,
    SAVES_EVERY_STEP,
    hash_block_tokens,
    tensor_replicas,
)

# isort: split
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    SupportsHMA,
)
from vllm.distributed.parallel_state import get_pp_group, get_tp_group
from vllm.logger import init_logger

from kvdepot.client.scheduler import SchedulerClient
from kvdepot.client.socket import CONNECT_S, Client
from kvdepot.client.transfer import ShardSpec, learn_spec
from kvdepot.client.worker import WorkerClient
from kvdepot.integrations.vllm.events import Known
from kvdepot.integrations.vllm.groups import Group, event_group, find_groups, fit_groups, hit_alignment, make_plan
from kvdepot.integrations.vllm.identity import namespace, read_settings, refuse_unserved
from kvdepot.integrations.vllm.messages import Orders, WorkerReport
from kvdepot.integrations.vllm.scheduler import SchedulerHalf
from kvdepot.integrations.vllm.stats import KVDepotMetrics, KVDepotStats
from kvdepot.integrations.vllm.worker import WorkerHalf

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.distributed.kv_events import KVCacheEvent
    from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
        KVConnectorPromMetrics,
        KVConnectorStats,
        PromMetric,
        PromMetricT,
    )
    from vllm.forward_context import ForwardContext
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

__all__ = ["KVDepotConnector"]

log = init_logger(__name__)


class KVDepotConnector(KVConnectorBase_V1, SupportsHMA):
    """Stores prompts' KV in a kvdepot server and loads it instead of recomputing it.

    Raises ConfigError for an unsupported configuration, Unavailable when no server answers within 5 s.
    """

    _cache_hit_source = HOST_HITS

    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        settings = read_settings(self._kv_transfer_config.kv_connector_extra_config)
        refuse_unserved(vllm_config, kv_cache_config)
        parallel = vllm_config.parallel_config
        ranks = parallel.tensor_parallel_size * parallel.pipeline_parallel_size
        replicas = tensor_replicas(kv_cache_config)
        model = namespace(vllm_config, kv_cache_config, settings.weights_revision)
        groups = find_groups(kv_cache_config)
        alignment = hit_alignment(kv_cache_config)
        rank = 0
        if role is KVConnectorRole.WORKER:
            rank = get_pp_group().rank_in_group * parallel.tensor_parallel_size + get_tp_group().rank_in_group
        self._context: zmq.Context[Any] = zmq.Context()
        client = Client(settings.url, self._context, key=settings.key)
        spec = learn_spec(
            client, model, ranks // replicas, rank // replicas, alignment, CONNECT_S, partial(fit_groups, groups)
        )
        self.connector_scheduler: SchedulerHalf | None = None
        self.connector_worker: WorkerHalf | None = None
        if role is KVConnectorRole.SCHEDULER:
            # A failed load must cost a recomputation, never a request; vLLM's default is to fail it.
            self._kv_transfer_config.kv_load_failure_policy = "recompute"
            depot = SchedulerClient(client, spec)
            is_dense = kv_cache_config.prefix_cache_retention_interval is None
            plan = make_plan(groups, spec, settings.boundary_chunks, is_dense)
            known = self._make_known(groups, spec, ranks)
            self.connector_scheduler = SchedulerHalf(vllm_config, depot, plan, ranks, settings.save_decode, known)
        else:
            # The scheduler releases pins once a prompt is stored; and request ids of two engines may be equal.
            worker = WorkerClient(client, spec, unpins=False)
            fails_whole = bool(spec.groups) or len(kv_cache_config.kv_cache_groups) > 1
            self.connector_worker = WorkerHalf(vllm_config, worker, groups, rank, fails_whole)
        log.info(
            "kvdepot: %s at %s as %s, chunks of %d tokens (the server's default: %d; this engine's blocks: %d)",
            role.name.lower(),
            settings.url,
            model,
            spec.chunk_tokens,
            client.chunk_size,
            alignment,
        )
        for group, fitted in zip(groups, spec.groups, strict=False):
            log.info("kvdepot: KV cache group %d: %s, %d layers, %s", *group.tell(fitted))

    def _make_known(self, groups: list[Group], spec: ShardSpec, ranks: int) -> Known | None:
        """Chunks to publish, if vLLM publishes KV events."""
        told = self._vllm_config.kv_events_config
        if told is None or not told.enable_kv_cache_events:
            return None
        hashed = hash_block_tokens(self._vllm_config, self._kv_cache_config) or groups[0].block_tokens
        return Known(ranks, spec.chunk_tokens, hashed, event_group(groups, spec))

    @property
    def _scheduler(self) -> SchedulerHalf:
        assert self.connector_scheduler is not None, "this connector was made for a worker"
        return self.connector_scheduler

    @property
    def _worker(self) -> WorkerHalf:
        assert self.connector_worker is not None, "this connector was made for the scheduler"
        return self.connector_worker

    @property
    def _half(self) -> SchedulerHalf | WorkerHalf:
        return self.connector_scheduler or self._worker

    # -- both halves

    @property
    def requires_kv_delivery(self) -> bool:
        """No: a store that is dropped only costs a later miss."""
        return False

    def get_kv_connector_stats(self) -> KVConnectorStats | None:
        """Operations that ended since the last step; None if none did."""
        return self._half.figures.take()

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> KVConnectorStats | None:
        """Stats from another process."""
        return KVDepotStats(data=data or {})

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: VllmConfig,
        metric_types: dict[type[PromMetric], type[PromMetricT]],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> KVConnectorPromMetrics | None:
        """The metrics `vllm:kvdepot_*`."""
        return KVDepotMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    def shutdown(self) -> None:
        """Close the connection. Safe twice and without a server; blocks 5 s at most."""
        self._half.shutdown()
        self._context.term()

    # -- the scheduler's half

    def bind_gpu_block_pool(self, gpu_block_pool: BlockPool) -> None:
        self._scheduler.bind_block_pool(gpu_block_pool)

    def has_pending_block_frees(self) -> bool:
        """Whether vLLM should try again rather than preempt a request: blocks that are being stored will be free."""
        return self._scheduler.has_pending_block_frees()

    def on_new_request(self, request: Request) -> None:
        self._scheduler.on_new_request(request)

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int | None, bool]:
        """Tokens that the depot has beyond the engine's own `num_computed_tokens`; None: ask again next step."""
        return self._scheduler.get_num_new_matched_tokens(request, num_computed_tokens)

    def update_state_after_alloc(self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int) -> None:
        self._scheduler.update_state_after_alloc(request, blocks, num_external_tokens)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> Orders:
        return self._scheduler.build_connector_meta(scheduler_output)

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        self._scheduler.update_connector_output(connector_output)

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """True if a worker may still be storing the request's blocks; it reports the id when it is done."""
        return self._scheduler.request_finished(request), None

    def request_finished(self, request: Request, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        """As `request_finished_all_groups`; MultiConnector may call this one."""
        return self._scheduler.request_finished(request), None

    def reset_cache(self) -> bool | None:
        """Forget all chunks of this model, in memory and tiers, for example because its weights changed.

        The weights may differ from those on disk now, so from here on this engine shares KV with no other. False if
        chunks may remain. Blocks 30 s at most.
        """
        return self._scheduler.reset_cache()

    def take_events(self) -> Iterable[KVCacheEvent]:
        """Events of the depot's chunks that the scheduler has learned of since the last step."""
        return self._scheduler.take_events()

    # -- the worker's half

    @property
    def _orders(self) -> Orders:
        """The orders of the current step."""
        orders = self._get_connector_metadata()
        assert isinstance(orders, Orders)
        return orders

    def get_mem_pool_context(self) -> AbstractContextManager[None] | None:
        """A context in which vLLM allocates KV that can be shared; None if it does so anyway."""
        return self._worker.get_mem_pool_context()

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        self._worker.register_kv_caches(kv_caches, self._kv_cache_config.num_blocks)

    def handle_preemptions(self, kv_connector_metadata: KVConnectorMetadata) -> None:
        assert isinstance(kv_connector_metadata, Orders)
        self._worker.give_up_preempted(kv_connector_metadata)

    def start_load_kv(self, forward_context: ForwardContext, **kwargs: Any) -> None:
        self._worker.start_loads(self._orders)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing to do: a request runs only once all its layers are loaded."""

    def save_kv_layer(self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any) -> None:
        """Nothing to do: chunks are stored with all their layers after the step."""

    def wait_for_save(self) -> None:
        self._worker.store(self._orders)

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        orders = self._orders
        if orders.idle and not SAVES_EVERY_STEP:
            self._worker.store(orders)
        return self._worker.get_finished(orders)

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        """What has ended, and the loads that failed as a whole."""
        stored, loaded = self.get_finished(finished_req_ids)
        return KVConnectorTransferResults(stored or set(), loaded or set(), self._worker.take_failed_requests())

    def get_block_ids_with_load_errors(self) -> set[int]:
        return self._worker.get_block_ids_with_load_errors()

    def build_connector_worker_meta(self) -> WorkerReport | None:
        return self._worker.take_report(self._orders)
