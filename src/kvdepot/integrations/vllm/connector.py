"""vLLM's side of kvdepot: `KVDepotConnector`, for vLLM 0.32.

vLLM makes one in its scheduler and one in each worker. The scheduler's decides: it hashes a request's tokens, looks its
prefix up when it arrives, and says in each step's metadata what is to be loaded and stored. The worker's acts. The one
law: vLLM never decodes over a block that is not whole, and neither side ever waits for the depot in a step.

    request arrives       on_new_request              hash, send the lookup
    request is scheduled  get_num_new_matched_tokens  its answer (awaited 0.5 ms at most, else asked again next step)
    blocks are allocated  update_state_after_alloc    note which chunks go into which blocks
    step is built         build_connector_meta        loads; stores that earlier steps completed; preempted requests
    worker, before        handle_preemptions          stores of preempted requests end or are made void
    worker, after         start_load_kv, wait_for_save, get_finished
                          (on a GPU the step may still run: both go behind an event on vLLM's own stream)
    step has ended        update_connector_output     how long it took; its chunks may be stored (stores.py);
                                                      of loads, failed blocks: vLLM recomputes, and no second try
    request ends          request_finished_all_groups blocks stay alive until its stores are done

Settings in `kv_connector_extra_config`: `kvdepot.url`, `kvdepot.key` (this client's key file, where the server wants
one; default `KVDEPOT_KEY`), `kvdepot.save_decode` (store decoded chunks too, default false), `kvdepot.weights_revision`
(a name for weights that their path does not tell apart).
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
import zmq
from vllm.device_allocator import alloc_conf
from vllm.distributed.kv_transfer.kv_connector.utils import get_current_attn_backends
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    SupportsHMA,
)
from vllm.distributed.parallel_state import get_pp_group, get_tp_group
from vllm.logger import init_logger
from vllm.platforms import current_platform
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from kvdepot.client import admin
from kvdepot.client.contract import pack_block_ids
from kvdepot.client.operation import Operation
from kvdepot.client.scheduler import Cached, Pending, SchedulerClient
from kvdepot.client.socket import CONNECT_S, MessageQueueClient
from kvdepot.client.transfer import Transfer, learn_spec
from kvdepot.client.worker import WorkerClient
from kvdepot.devices import share
from kvdepot.errors import ConfigError
from kvdepot.integrations.vllm.events import Known, WorkerReport
from kvdepot.integrations.vllm.identity import namespace, read_settings, refuse_unserved
from kvdepot.integrations.vllm.lora import Adapters
from kvdepot.integrations.vllm.prefill_speed import PrefillSpeed
from kvdepot.integrations.vllm.requests import Prompt, names_are_contents, root
from kvdepot.integrations.vllm.stats import KVDepotMetrics, KVDepotStats
from kvdepot.integrations.vllm.stores import WaitingStores
from kvdepot.protocol import wire
from kvdepot.protocol.keys import salt_tag
from kvdepot.protocol.layout import Layout, build_layout

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
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import KVConnectorBlockState, SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

__all__ = ["KVDepotConnector"]

log = init_logger(__name__)

_ANSWER_S = 0.0005
"""How long the scheduler awaits a lookup that is under way, once per scheduling attempt."""
_PREEMPTION_S = 0.05
"""How long a worker awaits the stores of preempted requests before it makes them void."""
_IDLE_S = 0.002
"""How long a worker with nothing to compute awaits a load, rather than spin on a core that copies need."""


@dataclass
class _Metadata(KVConnectorMetadata):
    """One step's orders, scheduler to workers."""

    model: str = ""
    """The namespace in which the scheduler looks up."""
    loads: list[Transfer] = field(default_factory=list)
    stores: list[Transfer] = field(default_factory=list)
    preempted: set[str] = field(default_factory=set)
    ended: set[str] = field(default_factory=set)
    """Finished requests whose blocks vLLM keeps until a worker reports them."""
    void: bool = False
    """Whether no store that is under way may become visible any more."""
    idle: bool = False
    step: int = 0
    """Its number, which its output brings back."""
    measured: int = 0
    """Its number among those of prefill; 0 for others."""


@dataclass
class _Tracked:
    """What the scheduler knows of one request."""

    request: Request
    prompt: Prompt
    is_cached: bool = True  # else it is neither looked up nor stored any more
    preemptions: int = 0
    local_tokens: int = 0  # in the engine's own cache when it was last asked for
    saved_chunks: int = 0  # from the start, in the depot or on their way
    read_tokens: int | None = None  # that it did not compute itself since its blocks were allocated
    load: Transfer | None = None
    load_blocks: frozenset[int] = frozenset()
    load_tokens: int = 0
    has_load_failed: bool = False  # on some rank, which may end it steps before the last one does
    has_pins: bool = False  # a lookup may have pinned chunks for it
    saved_tokens: int = 0  # that loads spared it, and nobody has been told
    saved_s: float = 0.0
    may_load: bool = True
    stores_open: bool = False  # a worker may be storing its blocks, or will


class KVDepotConnector(KVConnectorBase_V1, SupportsHMA):
    """Stores prompts' KV in a kvdepot server and takes it back instead of recomputing.

    Raises ConfigError for a configuration it can't serve, Unavailable when no server answers within 5 s.
    """

    _cache_hit_source = CacheHitSource.HOST

    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        settings = read_settings(self._kv_transfer_config.kv_connector_extra_config)
        refuse_unserved(vllm_config, kv_cache_config)
        self._save_decode = settings["save_decode"]
        self._stores = self._kv_transfer_config.is_kv_producer
        self._loads = self._kv_transfer_config.is_kv_consumer
        parallel = vllm_config.parallel_config
        ranks = parallel.tensor_parallel_size * parallel.pipeline_parallel_size
        replicas = kv_cache_config.kv_tp_replicas
        self._ranks = ranks
        model = namespace(vllm_config, kv_cache_config, settings["weights_revision"])
        block_tokens = kv_cache_config.kv_cache_groups[0].kv_cache_spec.block_size
        context: zmq.Context[Any] = zmq.Context()
        client = MessageQueueClient(settings["url"], context, key=settings["key"])
        self._scheduler: SchedulerClient | None = None
        self._worker: WorkerClient | None = None
        self._rank = 0  # a worker's, among all
        if role is KVConnectorRole.SCHEDULER:
            # A failed load must cost a recomputation, never a request; vLLM's default is to fail it.
            self._kv_transfer_config.kv_load_failure_policy = "recompute"
            spec = learn_spec(client, model, ranks // replicas, 0, block_tokens, CONNECT_S)
            self._scheduler = SchedulerClient(client, spec)
        else:
            self._rank = get_pp_group().rank_in_group * parallel.tensor_parallel_size + get_tp_group().rank_in_group
            spec = learn_spec(client, model, ranks // replicas, self._rank // replicas, block_tokens, CONNECT_S)
            # The scheduler ends pins once a prompt is stored; and two engines may well number their requests alike.
            self._worker = WorkerClient(client, spec, unpins=False)
        self._stats = KVDepotStats()
        self._spans: Callable[[Operation], None] | None = None
        self._traces: dict[str, Mapping[str, str]] = {}  # a worker's: headers of what it loads and stores
        if vllm_config.observability_config.otlp_traces_endpoint:
            from kvdepot.client.tracing import Spans  # vLLM has OpenTelemetry then

            self._spans = Spans(headers=self._trace_headers)
        told = vllm_config.kv_events_config
        self._tells = told is not None and told.enable_kv_cache_events
        self._known: Known | None = None  # the scheduler's
        self._report = WorkerReport()  # a worker's, since the last step
        if self._tells and self._scheduler is not None:
            self._known = Known(ranks, self._scheduler.spec.chunk_tokens, block_tokens)
        (self._scheduler or self._moves).watch = self._ended_operation
        self._context = context
        self._gpu: torch.device | None = None  # where the KV is, if on one
        self._adapters = Adapters()
        self._named = names_are_contents(vllm_config)
        self._epoch = ""  # of weights that only this engine has
        self._tracked: dict[str, _Tracked] = {}
        self._uncached: set[str] = set()  # requests that are not tracked, and why was told
        self._told: set[str] = set()  # reasons
        self._step = self._ended_step = 0
        self._stores_waiting = WaitingStores()
        self._void = False
        self._forget_after = 0  # the step after whose output nothing from before a reset can come any more
        self._boot = b""  # the run of a server that `saved_chunks` is about
        self._new_loads: list[Transfer] = []
        self._prefill = PrefillSpeed()
        self._ended: set[str] = set()
        self._ending: set[str] = set()  # finished requests with a store that waits for its step
        self._closing: set[str] = set()  # finished requests that no worker has reported yet
        log.info("kvdepot: %s at %s as %s", role.name.lower(), settings["url"], model)

    @property
    def requires_kv_delivery(self) -> bool:
        """A dropped store is a future miss, nothing worse."""
        return False

    # -- both sides: figures

    def _ended_operation(self, operation: Operation) -> None:
        self._stats.count(operation)
        if self._tells:
            self._report.add(operation.stored, self._rank)
        if self._spans is not None:
            self._spans(operation)

    def _note_trace(self, transfer: Transfer) -> None:
        if transfer.trace_headers:
            self._traces[transfer.request_id] = transfer.trace_headers

    def _trace_headers(self, request_id: str) -> Mapping[str, str] | None:
        tracked = self._tracked.get(request_id)
        return self._traces.get(request_id) if tracked is None else tracked.request.trace_headers

    def get_kv_connector_stats(self) -> KVConnectorStats | None:
        """What has ended since the last step; None where nothing has."""
        if self._stats.is_empty():
            return None
        stats, self._stats = self._stats, KVDepotStats()
        return stats

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> KVConnectorStats | None:
        """Stats as they came out of another process."""
        return KVDepotStats(data=data or {})

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: VllmConfig,
        metric_types: dict[type[PromMetric], type[PromMetricT]],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> KVConnectorPromMetrics | None:
        """`vllm:kvdepot_*` among vLLM's metrics."""
        return KVDepotMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    def build_connector_worker_meta(self) -> WorkerReport | None:
        """What this worker has stored since the last step, and which step this was."""
        report = self._report
        report.step, report.measured = self._orders.step, self._orders.measured
        self._report = WorkerReport()
        return report

    def take_events(self) -> Iterable[KVCacheEvent]:
        """What the scheduler has learned of the depot's chunks since the last step."""
        return self._known.take() if self._known is not None else ()

    # -- scheduler: what is cached

    @property
    def _asks(self) -> SchedulerClient:
        assert self._scheduler is not None, "this connector was made for a worker"
        return self._scheduler

    def on_new_request(self, request: Request) -> None:
        """Hash the prompt and send the lookup, so that the answer is there when the request is scheduled."""
        request_id = request.request_id
        if request.prompt_embeds is not None or request_id in self._tracked or request_id in self._uncached:
            return  # embeddings are not named by tokens: neither stored nor looked up
        try:
            request_id.encode()  # an id that is no text cannot be sent
            parent = root(request, self._adapters, self._epoch)
            if parent is None:
                self._uncached.add(request_id)
                return
            tracked = _Tracked(request, Prompt(request, self._asks.spec.chunk_tokens, parent, self._named))
            self._tracked[request_id] = tracked
            self._look_up(tracked)
        except Exception as exc:  # noqa: BLE001 - see `_spare`
            self._spare(request_id, exc)

    def _spare(self, request_id: str, exc: Exception) -> None:
        """What is wrong with one request's id, salt, adapter, items or tokens costs its caching, never the engine.

        Not for what a load that was promised depends on, nor for what concerns all requests.
        """
        self._uncache(request_id)
        if request_id not in self._tracked:
            self._uncached.add(request_id)
        self._stats.count_uncached()
        reason = type(exc).__name__
        if reason not in self._told:
            self._told.add(reason)
            log.warning("request %r is not cached, nor others with a %s: %s", request_id[:64], reason, exc)

    def _uncache(self, request_id: str) -> None:
        """Neither look the request up nor store it any more. What a worker is storing goes on."""
        self._stores_waiting.drop(request_id)
        tracked = self._tracked.get(request_id)
        if tracked is not None:
            tracked.is_cached = tracked.may_load = False
            self._asks.forget_lookup(request_id)

    def _look_up(self, tracked: _Tracked) -> None:
        request = tracked.request
        chain = tracked.prompt.hash()
        self._asks.forget_lookup(request.request_id)
        if self._loads and not request.skip_reading_prefix_cache:
            salt = salt_tag(request.cache_salt or "")
            tracked.has_pins = True
            self._asks.submit_lookup(request.request_id, bytes(chain.hashes), self._ranks, salt=salt)

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int | None, bool]:
        """Tokens the depot has beyond the engine's own `num_computed_tokens`; None: ask again next step."""
        self.on_new_request(request)  # vLLM announces requests; an engine that does not is served all the same
        tracked = self._tracked.get(request.request_id)
        if tracked is None or not self._loads or request.skip_reading_prefix_cache:
            return 0, False
        if request.num_preemptions > tracked.preemptions and tracked.is_cached:
            tracked.preemptions = request.num_preemptions
            tracked.may_load = True
            try:
                self._look_up(tracked)
            except Exception as exc:  # noqa: BLE001 - see `_spare`
                self._spare(request.request_id, exc)
        if not tracked.may_load or len(tracked.prompt.chain) * self._asks.spec.chunk_tokens <= num_computed_tokens:
            return 0, False  # the depot could not add anything: no need to await its answer
        outcome = self._asks.wait_lookup(request.request_id, _ANSWER_S)
        if isinstance(outcome, Pending):
            return None, False
        cached = outcome.tokens if isinstance(outcome, Cached) else 0
        tracked.saved_chunks = cached // self._asks.spec.chunk_tokens
        if self._known is not None and isinstance(outcome, Cached):
            self._known.looked_up(request, tracked.prompt.chain, tracked.saved_chunks)
        tracked.local_tokens = num_computed_tokens
        new_tokens = min(cached, request.num_tokens) - num_computed_tokens
        return (new_tokens, True) if new_tokens > 0 else (0, False)

    def update_state_after_alloc(self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int) -> None:
        """Note which chunks go into which of the blocks that were just allocated."""
        tracked = self._tracked.get(request.request_id)
        if tracked is None:
            return
        tracked.read_tokens = None
        if num_external_tokens == 0:
            return
        chunk_size, per_chunk = self._asks.spec.chunk_tokens, self._asks.spec.blocks_in_chunk
        first = tracked.local_tokens // chunk_size
        end = (tracked.local_tokens + num_external_tokens) // chunk_size
        (block_ids,) = blocks.get_block_ids()
        targets = block_ids[first * per_chunk : end * per_chunk]
        skip = tracked.local_tokens % chunk_size * per_chunk // chunk_size
        tracked.load = self._transfer(tracked, first, end, targets, skip)
        tracked.load_blocks = frozenset(targets[skip:])
        tracked.has_load_failed = False
        self._stores_waiting.overwritten(targets[skip:])
        tracked.load_tokens = num_external_tokens
        tracked.may_load = False  # whatever becomes of it, this request is not loaded twice
        self._new_loads.append(tracked.load)

    def _transfer(
        self, tracked: _Tracked, first: int, end: int, block_ids: list[int], skip_blocks: int = 0
    ) -> Transfer:
        chain = tracked.prompt.chain
        return Transfer(
            tracked.request.request_id, chain.parent(first), first, chain.slice(first, end),
            pack_block_ids(block_ids), skip_blocks, salt_tag(tracked.request.cache_salt or ""),
            dict(tracked.request.trace_headers) if self._spans is not None and tracked.request.trace_headers else None,
        )  # fmt: skip

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> _Metadata:
        """This step's orders to the workers."""
        self._hear_of_restarts()
        self._step += 1
        preempted = set(scheduler_output.preempted_req_ids or ())
        for request_id in preempted:
            self._stores_waiting.drop(request_id)
            if request_id in self._tracked:
                self._tracked[request_id].stores_open = False
                self._tracked[request_id].saved_chunks = 0  # its last stores may have been made void
        meta = _Metadata(
            model=self._asks.spec.model,
            loads=self._new_loads,
            stores=self._stores_waiting.take(),
            preempted=preempted,
            ended=self._ended,
            void=self._void,
            idle=scheduler_output.total_num_scheduled_tokens == 0,
            step=self._step,
            measured=self._prefill.built(scheduler_output.num_scheduled_tokens.values(), time.monotonic()),
        )
        self._new_loads, self._ended, self._void = [], set(), False
        state, going = scheduler_output.kv_connector_block_state, {store.request_id for store in meta.stores}
        for request_id, new_tokens in scheduler_output.num_scheduled_tokens.items():
            tracked = self._tracked.get(request_id)
            if tracked is None:
                continue
            if self._stores:
                assert state is not None
                try:
                    self._prepare_store(state, tracked, new_tokens)
                except Exception as exc:  # noqa: BLE001 - see `_spare`
                    self._spare(request_id, exc)
            if tracked.has_pins and request_id not in going:
                self._end_pins(tracked)
        return meta

    def _end_pins(self, tracked: _Tracked) -> None:
        """Once its prompt is stored, nothing of a request depends on its pins any more: what has a chunk behind it is
        not evicted, and decoding must not keep others' stores from finding room."""
        request = tracked.request
        if request.num_computed_tokens >= request.num_prompt_tokens and not self._stores_waiting.waits(
            request.request_id
        ):
            self._asks.end_session(request.request_id, tracked.saved_tokens, tracked.saved_s)
            tracked.has_pins, tracked.saved_tokens, tracked.saved_s = False, 0, 0.0

    def _hear_of_restarts(self) -> None:
        """A server that was started anew may have nothing: offer it all again. It takes what it does not have."""
        client = self._asks.client
        client.pump()
        if client.incarnation != self._boot:
            self._boot = client.incarnation
            for tracked in self._tracked.values():
                tracked.saved_chunks = 0

    def _prepare_store(self, state: KVConnectorBlockState, tracked: _Tracked, new_tokens: int) -> None:
        """Store the chunks that are complete once this step has come back, and that the depot does not have."""
        request, chunk_size, waiting = tracked.request, self._asks.spec.chunk_tokens, self._stores_waiting
        if tracked.read_tokens is None:
            tracked.read_tokens = request.num_computed_tokens
        read = -(-tracked.read_tokens * self._asks.spec.blocks_in_chunk // chunk_size)
        if waiting.has_suspects:
            (block_ids,) = state.resolve_block_ids(request.request_id)
            if not waiting.check(block_ids, read):
                self._uncache(request.request_id)
        # Decoded tokens count up to the last one known: behind it there may be drafts or placeholders.
        known = request.num_tokens if self._save_decode else request.num_prompt_tokens
        end = min(request.num_computed_tokens + new_tokens, known) // chunk_size
        if end <= tracked.saved_chunks or not tracked.is_cached:
            return
        if tracked.saved_chunks == 0:
            tracked.saved_chunks = self._asks.known_tokens(request.request_id) // chunk_size
        chain = tracked.prompt.chain
        if end > len(chain) or request.streaming_queue is not None:
            before = chain.parent(tracked.saved_chunks)
            chain = tracked.prompt.hash()
            if chain.parent(tracked.saved_chunks) != before:
                tracked.saved_chunks = 0  # an update of its session replaced tokens
        first, end = tracked.saved_chunks, min(end, len(chain))
        if end <= first:
            return
        (block_ids,) = state.resolve_block_ids(request.request_id)
        per_chunk = self._asks.spec.blocks_in_chunk
        store = self._transfer(tracked, first, end, block_ids[first * per_chunk : end * per_chunk])
        waiting.add(self._step, store, block_ids[: end * per_chunk], read, request.lora_request)
        if self._known is not None:
            self._known.ordered(request, chain, first, end)
        tracked.saved_chunks = end
        tracked.stores_open = True

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        """A step has ended, and with it loads perhaps: note what they saved, and what failed.

        vLLM calls it for each step that computed something, and for others where a worker has something to say.

        A load's pins stay until the rest of the prompt is stored (`_end_pins`): were these chunks evicted before, what
        is stored behind them could never be found.
        """
        failed = connector_output.invalid_block_ids or set()
        told = connector_output.kv_connector_worker_meta
        report = told if isinstance(told, WorkerReport) else WorkerReport()
        self._prefill.output(report.measured, time.monotonic())
        if self._known is not None:
            self._known.stored(report)
        self._closing.difference_update(connector_output.finished_sending or ())
        self._step_ended(report.step, failed)
        for each in self._tracked.values() if failed else ():
            each.has_load_failed |= not failed.isdisjoint(each.load_blocks)
        for request_id in connector_output.finished_recving or ():
            tracked = self._tracked.get(request_id)
            if tracked is None:
                continue
            if not tracked.has_load_failed:
                tracked.saved_tokens += tracked.load_tokens
                tracked.saved_s += tracked.load_tokens / self._prefill.speed if self._prefill.speed else 0.0
            else:
                self._asks.end_session(request_id)  # a corrupt chunk can be stored again only when nobody holds it
                if self._known is not None and tracked.load is not None:
                    self._known.lost(tracked.load.hashes)
                # What is recomputed is stored again; the server skips what it has after all.
                tracked.saved_chunks = 0
                self._asks.forget_lookup(request_id)
            tracked.load_tokens = 0
            tracked.load = None
            tracked.load_blocks = frozenset()

    def _step_ended(self, step: int, failed: set[int]) -> None:
        """A step is back: what it completed may be stored, except what a failed load or a changed adapter spoilt."""
        waiting, self._ended_step = self._stores_waiting, max(step, self._ended_step)
        # Blocks of our own loads are given to nobody else and computed again before anybody reads them.
        others = failed.difference(*(tracked.load_blocks for tracked in self._tracked.values())) if failed else failed
        if others:
            for request_id in waiting.failed(others):
                self._uncache(request_id)
        for request_id, adapter in list(waiting.adapters(step)):
            if not self._adapters.is_unchanged(adapter):
                waiting.drop(request_id)
                self._uncache(request_id)
        waiting.ended(step)
        done = {request_id for request_id in self._ending if not waiting.waits(request_id)}
        self._ending -= done
        self._ended |= done
        if 0 < self._forget_after <= step:
            self._forget_after = 0
            self._asks.client.ask(wire.Forget(self._asks.spec.model))

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """True where a worker may still be storing the request's blocks; it reports the id when it is done."""
        request_id = request.request_id
        self._uncached.discard(request_id)
        tracked = self._tracked.pop(request_id, None)
        if tracked is None:
            return False, None
        self._asks.forget_lookup(request_id)
        self._asks.end_session(request_id, tracked.saved_tokens, tracked.saved_s)
        self._new_loads = [load for load in self._new_loads if load.request_id != request_id]
        if not tracked.stores_open:
            return False, None
        self._closing.add(request_id)
        (self._ending if self._stores_waiting.waits(request_id) else self._ended).add(request_id)
        return True, None

    def request_finished(self, request: Request, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        """As `request_finished_all_groups`, for the one group there is."""
        return self.request_finished_all_groups(request, (block_ids,))

    def reset_cache(self) -> bool | None:
        """Forget what is stored for this model, in memory and tiers: its weights changed, say.

        Nobody can tell whether they are those on disk any more, so from now on this engine shares KV with none but
        itself. False where something may be left. Blocks 30 s at most.
        """
        is_forgotten = admin.reset(self._asks.client, self._asks.spec.model)
        self._epoch = secrets.token_hex(16)
        log.info("the cache was reset: until this engine is started again, it shares KV with no other engine")
        for request_id in self._tracked:
            self._uncache(request_id)  # its blocks may be of both
        self._stores_waiting.clear()
        if self._tracked or self._closing or self._ended_step < self._step:
            self._void, self._forget_after = True, self._step + 1  # what is under way may be stored after all
        if self._known is not None:
            self._known.clear()
        return is_forgotten

    # -- worker: moving bytes

    @property
    def _moves(self) -> WorkerClient:
        assert self._worker is not None, "this connector was made for the scheduler"
        return self._worker

    def get_mem_pool_context(self) -> AbstractContextManager[None] | None:
        """Plain memory for the KV: PyTorch's expandable segments are thousands of allocations to share, not one."""
        conf = alloc_conf.current_alloc_conf() if current_platform.is_cuda_alike() else ""
        pooled = self._vllm_config.model_config.enable_cumem_allocator  # which turns them off itself
        if pooled or not alloc_conf.conf_flag_enabled(conf, alloc_conf.EXPANDABLE_SEGMENTS):
            return None
        return _without_expandable_segments(conf)

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Share the paged KV with the server."""
        backends = ",".join(sorted(b.get_name() for b in get_current_attn_backends(self._vllm_config)))
        layout = _layout(kv_caches, self._kv_cache_config.num_blocks, backends)
        self._moves.register_layout(layout, kv_caches)
        self._gpu = next(cache.device for cache in kv_caches.values()) if layout.device else None

    def handle_preemptions(self, kv_connector_metadata: KVConnectorMetadata) -> None:
        """Before blocks of preempted requests are overwritten: their stores end, or never become visible."""
        assert isinstance(kv_connector_metadata, _Metadata)
        if kv_connector_metadata.preempted:
            self._moves.give_up_stores(kv_connector_metadata.preempted, _PREEMPTION_S)

    def start_load_kv(self, forward_context: ForwardContext, **kwargs: Any) -> None:
        """Submit this step's loads: they begin when nothing that was queued so far reads their blocks any more."""
        if self._orders.model != self._moves.spec.model and not self._told:
            self._told.add("model")
            log.error(
                "scheduler and worker disagree on this engine's identity (%s, %s), so nothing is reused. Report it "
                "with the log of VLLM_LOGGING_LEVEL=DEBUG",
                self._orders.model,
                self._moves.spec.model,
            )
        if self._orders.void:
            self._moves.give_up_stores(set(self._moves.stores), _PREEMPTION_S)
        loads = self._orders.loads
        event = self._queued() if loads else None
        for load in loads:
            self._note_trace(load)
            self._moves.submit_retrieve([load.request_id], [load], event)

    def wait_for_save(self) -> None:
        """Submit stores of chunks that earlier steps completed: they begin when what is queued so far is done."""
        stores = self._orders.stores
        if stores:
            ids = [store.request_id for store in stores]
            for store in stores:
                self._note_trace(store)
            self._moves.submit_store(ids, stores, self._queued())

    def _queued(self) -> torch.cuda.Event | None:
        """An event that happens when all that vLLM has queued on its stream is done; None on the CPU, where it is.

        vLLM calls in the thread and on the stream that it runs models on, and never while it captures a graph.
        """
        if self._gpu is None:
            return None
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self._gpu))
        return event

    @property
    def _orders(self) -> _Metadata:
        orders = self._get_connector_metadata()
        assert isinstance(orders, _Metadata)
        return orders

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        """Requests whose last store is done, among those vLLM waits for; and requests whose load has ended."""
        orders = self._orders
        if orders.idle:
            self._moves.wait_any(_IDLE_S)
        # Not vLLM's ids: stores of a finished request may come a step later, and vLLM asserts that it awaits each.
        stored, loaded = self._moves.poll(orders.ended)
        for request_id in self._traces.keys() - self._moves.stores.keys() - self._moves.retrieves.keys():
            del self._traces[request_id]
        return stored or None, loaded or None

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Blocks that vLLM must recompute."""
        return self._moves.take_failed_blocks()

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing: a request runs only once all its layers are there."""

    def save_kv_layer(self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any) -> None:
        """Nothing: chunks are stored with all their layers after the step."""

    def shutdown(self) -> None:
        """Close the connection. Safe twice and without a server; blocks 5 s at most."""
        for adapter in (self._scheduler, self._worker):
            if adapter is not None:
                adapter.close()
        self._context.term()


@contextmanager
def _without_expandable_segments(conf: str) -> Iterator[None]:
    """PyTorch takes memory with cudaMalloc meanwhile, from no segment that it has. conf: its settings before."""
    alloc_conf.set_alloc_conf(alloc_conf.with_conf_flag(conf, alloc_conf.EXPANDABLE_SEGMENTS, False))
    try:
        yield
    finally:
        alloc_conf.set_alloc_conf(conf)


def _layout(kv_caches: dict[str, torch.Tensor], num_blocks: int, backends: str) -> Layout:
    """Share vLLM's paged KV and describe it. Its views are [blocks, heads, tokens, content], whatever lies outermost in
    memory; where kernels want smaller blocks, several of them stand for one. Raises ConfigError, LayoutError.
    """
    views, seen = [], set()
    for name, cache in kv_caches.items():
        if cache.shape[0] % num_blocks:
            raise ConfigError(f"kvdepot: {name} has shape {list(cache.shape)}, which {num_blocks} blocks do not divide")
        if cache.shape[0] != num_blocks:
            cache = cache.unflatten(0, (num_blocks, -1))
        view = share(cache, name)  # which may move its bytes: where they lie is known afterwards
        place = (view.mapping, view.offset, view.shape, view.strides)
        if place in seen:
            continue  # a layer that shares another's KV
        seen.add(place)
        views.append(view._replace(dtype=f"{view.dtype} {backends}"))
    return build_layout(views, [0] * len(views))
