"""One process of an engine as the depot knows it: its namespace, its rank and its KV cache groups.

connector.py makes one in the scheduler and one in each worker; from it, the thread of link.py makes the objects that
the half needs once there is a server.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from vllm.logger import init_logger

from kvdepot.client.scheduler import SchedulerClient
from kvdepot.client.socket import Client
from kvdepot.client.transfer import Origin, ShardSpec, free_chunk_tokens
from kvdepot.client.worker import WorkerClient
from kvdepot.errors import KVDepotError
from kvdepot.integrations.vllm.events import Descriptions
from kvdepot.integrations.vllm.groups import find_groups, fit_groups, hit_alignment, make_plan
from kvdepot.integrations.vllm.identity import identify, name_writer, read_note, refuse_unserved
from kvdepot.integrations.vllm.paged_kv import describe_paged_kv
from kvdepot.integrations.vllm.plan import PlanRules
from kvdepot.integrations.vllm.scheduler import ConnectedParts
from kvdepot.integrations.vllm.settings import ConnectorSettings
from kvdepot.integrations.vllm.trust import describe_facts
from kvdepot.integrations.vllm.versions import lookahead_tokens, tensor_replicas

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

    from kvdepot.devices.blocks import BlockMemory
    from kvdepot.protocol.layout import Layout

log = init_logger(__name__)


class EngineProcess:
    """The facts of one process. Raises ConfigError for an unsupported configuration."""

    def __init__(
        self, vllm_config: VllmConfig, kv_cache_config: KVCacheConfig, settings: ConnectorSettings, rank: int | None
    ) -> None:
        """rank: the worker's number among all workers; None: the scheduler."""
        refuse_unserved(vllm_config, kv_cache_config)
        parallel, transfer = vllm_config.parallel_config, vllm_config.kv_transfer_config
        self.rank = rank or 0
        self.model, files = identify(vllm_config, kv_cache_config, settings.weights_revision)
        self.engine_id = str(transfer.engine_id)  # equal in all processes of this engine
        # Weights that a trainer changes are not those of the files.
        self.writer = name_writer(vllm_config, "" if settings.weights_run else files)
        self._name = "scheduler" if rank is None else "worker"
        self._vllm_config, self._kv_cache_config, self._settings = vllm_config, kv_cache_config, settings
        self._is_consumer = transfer.is_kv_consumer
        self._ranks = parallel.tensor_parallel_size * parallel.pipeline_parallel_size
        self._groups = find_groups(kv_cache_config, parallel.decode_context_parallel_size)
        self._alignment = hit_alignment(kv_cache_config, parallel.decode_context_parallel_size)
        is_bounded = any(group.is_bounded for group in self._groups)
        self.fails_whole = is_bounded or len(kv_cache_config.kv_cache_groups) > 1  # see `take_failed_requests`

    def describe_kv(self, kv_caches: dict[str, torch.Tensor]) -> list[Layout]:
        """A worker's paged KV by KV cache group. Raises ConfigError, LayoutError."""
        return describe_paged_kv(self._vllm_config, self._groups, kv_caches, self._kv_cache_config.num_blocks)

    def connect_scheduler(self, client: Client) -> ConnectedParts:
        """The values that the scheduler's half needs. Raises KVDepotError."""
        rules = PlanRules(
            spacing=self._settings.boundary_chunks,
            lookahead=lookahead_tokens(self._vllm_config),
            has_all_states=self._kv_cache_config.prefix_cache_retention_interval is None,
            # Runner V2 zeroes and copies blocks of a step before it calls `handle_preemptions`. Blocks are copied only
            # of models with states, whose blocks are zeroed, too.
            holds_all=self._vllm_config.use_v2_model_runner and self._kv_cache_config.needs_kv_cache_zeroing,
            has_drafts=self._vllm_config.speculative_config is not None,
        )
        spec = self._fit(client)
        depot = SchedulerClient(client, spec, reports=True)
        is_described = self._settings.events_topic and client.welcome.wants_tokens
        if self._settings.events_topic and not is_described:
            told = "kvdepot.events_topic is set, but the server at %s publishes no KV events: start it with --kv-events"
            log.warning(told, client.server_url)
        events = Descriptions(depot) if is_described else None
        return ConnectedParts(depot, make_plan(self._groups, spec, rules), events)

    def connect_worker(
        self, layouts: Sequence[Layout], blocks: Sequence[BlockMemory], fault: str, client: Client
    ) -> WorkerClient:
        """A worker's client, with its KV registered. layouts, blocks: by KV cache group. fault: why this worker can
        neither store nor load, to be shown in the server's status; then there need be no blocks. Blocks 30 s at most;
        raises KVDepotError."""
        # The scheduler releases pins once a prompt is stored; and request ids of two engines may be equal. An engine
        # that loads nothing is credited with nothing.
        topic = self._settings.events_topic if self._is_consumer else ""
        origin = Origin(topic, self.writer, describe_facts(self._vllm_config))
        worker = WorkerClient(client, self._fit(client), unpins=False, origin=origin)
        try:
            worker.register(layouts, blocks, fault)
        except KVDepotError:
            worker.cancel_registration()  # the next attempt registers with another client
            raise
        whole = [(layout, group) for layout, group in zip(layouts, self._groups, strict=True) if not group.is_bounded]
        token_bytes = sum(layout.block_bytes / group.block_tokens for layout, group in whole)
        log.info("kvdepot: %.1f KiB of KV per token on this rank, without windows and states", token_bytes / 1024)
        return worker

    def _fit(self, client: Client) -> ShardSpec:
        """The shards that this process stores and loads; all of the engine choose one chunk size. Raises BadRequest."""
        replicas = tensor_replicas(self._kv_cache_config)
        ranks, rank = self._ranks // replicas, self.rank // replicas
        least = self._least_tokens(ranks) if client.welcome.has_free_chunks else client.chunk_size
        spec = ShardSpec.fit_blocks(self.model, ranks, rank, least, self._alignment)
        spec = fit_groups(self._groups, spec)
        log.info(
            "kvdepot: %s at %s as %s, chunks of %d tokens (%s; this engine's blocks: %d)",
            self._name, client.server_url, self.model, spec.chunk_tokens,
            "chunk size auto" if client.welcome.has_free_chunks else f"the server's chunk size: {client.chunk_size}",
            self._alignment,
        )  # fmt: skip
        for group, fitted in zip(self._groups, spec.groups, strict=False):
            needs = f"the last {fitted.reach} chunks" if fitted.reach else "all chunks"
            log.info(
                "kvdepot: KV cache group %d: %s, %d layers, of which a prompt needs %s", group.number, group.kind,
                len(group.layers), "the last state" if group.is_state else needs,
            )  # fmt: skip
        return spec

    def _least_tokens(self, ranks: int) -> int:
        """The least tokens per chunk where the engine chooses. ranks: number of ranks that store shards."""
        whole = sum(not group.is_bounded for group in self._groups)  # vLLM's groups have about as many layers each
        token_bytes = read_note(self._vllm_config).token_bytes * whole // len(self._kv_cache_config.kv_cache_groups)
        longest = self._vllm_config.model_config.max_model_len * ranks * len(self._groups)
        return free_chunk_tokens(token_bytes, longest)
