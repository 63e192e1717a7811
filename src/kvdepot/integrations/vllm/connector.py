"""vLLM's side of kvdepot: `KVDepotConnector`. versions.py says for which versions of vLLM.

vLLM makes one in its scheduler and one in each worker, of the same class. Like vLLM's own connectors, each has one half
and delegates to it: the scheduler's half (scheduler.py) decides what is looked up, loaded and stored; the worker's half
(worker.py) does it. Invariants: vLLM never reads a block that was not loaded completely; a step waits for the depot for
50 ms at most, after a preemption or a reset, or for a comparison within it (the times at the top of both files), and
copies small loads by itself.

    request arrives       on_new_request              hash, send the lookup
    request is scheduled  get_num_new_matched_tokens  its answer (awaited 2 ms at most the first time, then 0.5 ms
                                                      each step)
    blocks are allocated  update_state_after_alloc    note which chunks go into which blocks
    step is built         build_connector_meta        loads; stores of chunks that earlier steps completed; preemptions
    worker, before        handle_preemptions          stores of preempted requests end or are voided; others are sent,
                                                      then loads, so that small ones end within this step
    worker, before        start_load_kv               copies of small loads (in_step.py)
    worker, after         start_load_kv, get_finished loads of models with windows or states (on a GPU the step may
                                                      still run: they wait for an event on vLLM's own stream, as
                                                      stores do)
    step has ended        update_connector_output     how long it took; its chunks may be stored (stores.py);
                                                      loads that failed: vLLM recomputes, nothing is loaded twice
    request ends          request_finished_all_groups blocks stay alive until its stores are done

Until there is a server (link.py), the halves cache nothing. settings.py has the connector's settings.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from kvdepot.integrations.vllm.versions import HOST_HITS  # refuses other versions

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

from kvdepot.devices import open_blocks
from kvdepot.devices.self_test import test_blocks
from kvdepot.errors import DeadlineExceeded, DeviceError, KVDepotError, LayoutError, Unavailable
from kvdepot.integrations.vllm.link import ServerLink
from kvdepot.integrations.vllm.messages import Orders, WorkerReport
from kvdepot.integrations.vllm.process import EngineProcess
from kvdepot.integrations.vllm.scheduler import SchedulerHalf
from kvdepot.integrations.vllm.settings import find_place, foreign_settings, read_settings
from kvdepot.integrations.vllm.stats import KVDepotMetrics, KVDepotStats
from kvdepot.integrations.vllm.worker import WorkerHalf

if TYPE_CHECKING:
    from vllm.config import KVTransferConfig, VllmConfig
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

    from kvdepot.protocol.layout import Layout

log = init_logger(__name__)


class KVDepotConnector(KVConnectorBase_V1, SupportsHMA):
    """Stores prompts' KV in a kvdepot server and loads it instead of recomputing it.

    Raises ConfigError for an unsupported configuration, the error with which a server refuses this engine, and with
    `kvdepot.required` Unavailable if no server answers within 8 s.
    """

    _cache_hit_source = HOST_HITS

    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._settings = read_settings(self._kv_transfer_config.kv_connector_extra_config)
        self._block_tokens = vllm_config.cache_config.block_size  # fitted to KV cache groups
        self._kv_caches: dict[str, torch.Tensor] = {}
        self._is_asleep = False  # while the engine sleeps, its KV has no memory
        if role is KVConnectorRole.SCHEDULER:
            self._process = EngineProcess(vllm_config, kv_cache_config, self._settings, rank=None)
            self._begin_scheduler()
            place = find_place(self._settings, self._process.engine_id)
            place.is_logged = not self._settings.is_embedded
            self._half: SchedulerHalf | WorkerHalf = SchedulerHalf(
                vllm_config, self._process.model, self._settings, self._process.writer
            )
            self._link = ServerLink(place, self._half)
            self._link.begin(self._process.connect_scheduler)
        else:
            ranks = vllm_config.parallel_config.tensor_parallel_size
            rank = get_pp_group().rank_in_group * ranks + get_tp_group().rank_in_group
            self._process = EngineProcess(vllm_config, kv_cache_config, self._settings, rank)
            self._half = WorkerHalf(vllm_config, self._process.rank, self._process.fails_whole)
            self._link = self._link_worker()

    def _begin_scheduler(self) -> None:
        """Set vLLM's policy for failed loads, and log which settings have no effect."""
        transfer, policy = self._kv_transfer_config, self._settings.load_failure_policy
        if transfer.kv_load_failure_policy != policy:
            # vLLM's default is to fail the request, and nothing tells a default from what an operator has set.
            log.info(
                "kvdepot: kv_load_failure_policy is %s; kvdepot.load_failure_policy in kv_connector_extra_config "
                "sets it", policy,
            )  # fmt: skip
            transfer.kv_load_failure_policy = policy
        if foreign := foreign_settings(transfer.kv_connector_extra_config):
            log.warning(
                "kvdepot: KVDepotConnector ignores %s: these are another connector's settings; remove them from "
                "kv_connector_extra_config", ", ".join(foreign),
            )  # fmt: skip

    def _link_worker(self) -> ServerLink:
        process = self._process
        place = find_place(self._settings, process.engine_id)
        place.is_logged = self._settings.is_embedded
        if self._settings.is_embedded and process.rank == 0:
            place.start_own()
        return ServerLink(place, self._half)

    @property
    def _scheduler(self) -> SchedulerHalf:
        assert isinstance(self._half, SchedulerHalf), "this connector was made for a worker"
        self._link.advance()  # the scheduler's half may be connected at any time, as it takes requests as they come
        return self._half

    @property
    def _worker(self) -> WorkerHalf:
        assert isinstance(self._half, WorkerHalf), "this connector was made for the scheduler"
        return self._half

    # -- both halves

    @property
    def requires_kv_delivery(self) -> bool:
        """False: a store that is dropped only costs a later miss."""
        return False

    def get_kv_connector_stats(self) -> KVConnectorStats | None:
        """Operations that ended since the last step; None if none did."""
        return self._half.stats.take()

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> KVConnectorStats | None:
        return KVDepotStats(data=data or {})

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: VllmConfig,
        metric_types: dict[type[PromMetric], type[PromMetricT]],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> KVConnectorPromMetrics | None:
        return KVDepotMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    def shutdown(self) -> None:
        """Close the connection, and end the engine's own server. Safe twice and without a server; blocks some seconds
        at most."""
        self._link.close()

    # -- the scheduler's half

    def bind_gpu_block_pool(self, gpu_block_pool: BlockPool) -> None:
        self._scheduler.bind_block_pool(gpu_block_pool)

    def has_pending_block_frees(self) -> bool:
        """Whether vLLM should try again rather than preempt a request: blocks that are being stored will be free."""
        return self._scheduler.holds.will_end_soon()

    def has_pending_push_work(self) -> bool:
        """Whether vLLM should go on with steps that compute nothing: only then do stores that hold blocks end, without
        which a paused engine cannot reset its caches."""
        return self._scheduler.holds.is_any_held

    def on_new_request(self, request: Request) -> None:
        # vLLM's scheduler ends prefill steps at this size. An engine core in a process of its own completes its
        # configuration a second time when it has started (EngineCoreProc._perform_handshakes), which on CPUs resets
        # the size to the platform's default: vLLM itself would cache states for other positions than their blocks'.
        self._vllm_config.cache_config.block_size = self._block_tokens
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
        """True if a worker may still be storing the request's blocks; it reports the id when it is done. Also returns
        what the request got from the depot, for its response (hints.py)."""
        return self._scheduler.request_finished(request, block_ids)

    def request_finished(self, request: Request, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        """The same as `request_finished_all_groups`, under the name that MultiConnector may call."""
        return self._scheduler.request_finished(request, (block_ids,))

    def reset_cache(self) -> bool | None:
        """Forget all chunks of this model, whose weights may now differ from the files; store under a private name.

        False if chunks may remain. Blocks 30 s at most.
        """
        return self._scheduler.reset_cache()

    # -- the worker's half

    @property
    def _orders(self) -> Orders:
        orders = self._get_connector_metadata()
        assert isinstance(orders, Orders)
        return orders

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Describe the paged KV, test this worker's copies on it, and connect to the server, if it is there; waits 5 s
        for it at most.

        Random bytes go both ways first (devices/self_test.py), so that code which was never tested on this device
        cannot serve a wrong byte. If they come back changed, or the KV cannot be described, this engine runs uncached.
        """
        self._kv_caches = kv_caches
        layouts: list[Layout] = []
        try:
            layouts = self._process.describe_kv(kv_caches)
            self._open(layouts)
        except (DeviceError, LayoutError) as exc:
            self._run_uncached(exc)
        if layouts:
            worker = self._worker
            self._link.begin(partial(self._process.connect_worker, layouts, worker.blocks, worker.fault))

    def _open(self, layouts: Sequence[Layout]) -> None:
        """Give the worker the paged KV by KV cache group, once random bytes have gone both ways. Raises DeviceError,
        LayoutError."""
        blocks = [open_blocks(layout, self._kv_caches.values()) for layout in layouts]
        try:
            speed = test_blocks(blocks)
        except DeviceError:
            for each in blocks:
                each.close()
            raise
        log.info(
            "kvdepot: this worker's copies were tested: it stores %.1f GB/s and loads %.1f GB/s",
            speed.store_bytes_s / 1e9, speed.load_bytes_s / 1e9,
        )  # fmt: skip
        self._worker.use_blocks(blocks, speed)

    def _run_uncached(self, why: KVDepotError) -> None:
        """Go on without a cache. Raises `why` if the settings require a server."""
        if self._settings.required:
            raise why
        self._worker.fault = str(why)
        log.warning("kvdepot: this engine runs without a cache: %s", why)

    @classmethod
    def supports_sleep_mode(cls, kv_transfer_config: KVTransferConfig) -> bool:
        """True: vLLM 0.33 asks, and says when the KV's memory goes. For other versions see identity.py."""
        return True

    def unregister_kv_caches(self) -> None:
        """vLLM 0.33, before it frees the KV's memory: end this worker's copies. Safe twice; blocks 10 s at most."""
        if self._is_asleep or not self._kv_caches:
            return
        self._is_asleep = True
        self._link.advance()
        if self._worker.is_connected:
            self._worker.unregister()
        else:
            self._link.close()  # or its thread would register KV without memory

    def restore_kv_caches(self) -> None:
        """vLLM 0.33, once there is memory again behind the KV's addresses. Safe twice; blocks 30 s at most.

        The engine wakes in any case: until its KV is registered, it stores nothing, and loads are recomputed.
        """
        if not self._is_asleep:
            return
        self._is_asleep = False
        try:
            if self._worker.is_connected:
                self._open(self._process.describe_kv(self._kv_caches))
                self._worker.register()
            else:
                self._settings = replace(self._settings, required=False)  # or its link would stop trying
                self._link = self._link_worker()
                self.register_kv_caches(self._kv_caches)
        except (Unavailable, DeadlineExceeded) as exc:
            log.warning("woke up without a server; the KV is registered once one is available: %s", exc)
        except KVDepotError as exc:
            self._worker.fault, self._worker.is_connected = str(exc), False
            log.error("woke up, but the KV cannot be registered again, so nothing is cached: %s", exc)

    def handle_preemptions(self, kv_connector_metadata: KVConnectorMetadata) -> None:
        """vLLM calls it before each step computes, with or without preemptions."""
        assert isinstance(kv_connector_metadata, Orders)
        self._link.advance()  # only here, so that a worker is connected for a whole step or not at all
        if kv_connector_metadata.model != self._process.model and self._worker.is_connected:
            self._disagree(kv_connector_metadata.model)
        self._worker.give_up_preempted(kv_connector_metadata)
        self._worker.map_arena()
        self._worker.store(kv_connector_metadata)
        if kv_connector_metadata.loads_early:  # so that most loads end within this step
            self._worker.start_loads(kv_connector_metadata)

    def _disagree(self, scheduler: str) -> None:
        """Store and load nothing from here on: the scheduler has another name for this engine's KV.

        This worker stays registered, so the server sees an engine whose processes name two models (core/report.py).
        """
        self._worker.is_connected = False
        log.error(
            "kvdepot: this engine's scheduler and this worker (rank %d) disagree on the identity of its KV (%s, %s), "
            "so the worker stores and loads nothing. Report it with the log of VLLM_LOGGING_LEVEL=DEBUG, which has "
            "what each of them was told", self._process.rank, scheduler, self._process.model,
        )  # fmt: skip

    def start_load_kv(self, forward_context: ForwardContext, **kwargs: Any) -> None:
        """Copy the step's small loads. vLLM calls it before a step computes that has any; otherwise at any time."""
        self._worker.copy_loads(self._orders)
        if not self._orders.loads_early:
            self._worker.start_loads(self._orders)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing to do: a request runs only once all its layers are loaded."""

    def save_kv_layer(self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any) -> None:
        """Nothing to do: chunks are stored with all their layers, before the next step."""

    def wait_for_save(self) -> None:
        """Nothing to do: stores of earlier steps were submitted before this step, which waits for none of them."""

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        """The stores and loads that have ended. vLLM calls it after the step has computed, before it asks for blocks
        that have failed to load, without exception (`wait_for_save` comes later where there is a drafter)."""
        self._worker.prove(self._orders)
        return self._worker.get_finished(self._orders)

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        """The stores and loads that have ended, and the loads that failed as a whole."""
        stored, loaded = self.get_finished(finished_req_ids)
        return KVConnectorTransferResults(stored or set(), loaded or set(), self._worker.take_failed_requests())

    def get_block_ids_with_load_errors(self) -> set[int]:
        return self._worker.get_block_ids_with_load_errors()

    def build_connector_worker_meta(self) -> WorkerReport | None:
        return self._worker.take_report(self._orders)
