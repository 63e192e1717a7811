"""vLLM's own LMCacheMPConnector and adapter, corrected where they would store, load or lose the wrong bytes.

Their files run as they are. The faults of vLLM 0.15 to 0.17 there, and their effects:

    tokens of a chunked prompt are counted twice                  -> blocks are stored before they are computed
    a request's blocks are listed again after its load            -> later chunks are stored from the wrong blocks
    failed loads are not reported                                 -> the engine decodes over blocks that nobody filled
    a request whose load failed is not loaded again               -> it waits for ever
    token keys (0.17) leave out salt, LoRA adapter and images     -> another request's KV
    stores of one request, or of a batch, are forgotten           -> blocks are reused while they are read
    a request that is aborted during its load is freed twice      -> blocks are reused while they are written
    a prompt shorter than a chunk is an assertion (0.17)          -> the engine ends
    the beginning of a chunk that vLLM has itself is loaded, too  -> blocks are written that others read
    kv_role is ignored
    keys name a model by its path alone                           -> KV of another configuration or other weights

Used by vLLM's scheduler and workers, each on one thread. Nothing here decides what is cached: each method calls vLLM's.
"""

from __future__ import annotations

import contextlib
import json
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import vllm
from blake3 import blake3
from vllm.distributed.kv_transfer.kv_connector.v1 import lmcache_mp_connector as own
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.v1.request import RequestStatus

from kvdepot.config import default_url
from kvdepot.integrations.loaded import loaded_since
from kvdepot.integrations.vllm.environment import platform_facts
from kvdepot.integrations.vllm.fields import describe_config
from kvdepot.integrations.weight_files import SETTLED_S, find_weights, kinds_read

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.forward_context import ForwardContext
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

    from kvdepot.integrations.lmcache.client import GuardedClient

_STORES_S = 1.0
"""A step waits this long for the stores of the step before."""


class LMCacheMPConnector(own.LMCacheMPConnector):
    """One half of vLLM's connector: the scheduler's or a worker's."""

    def __init__(
        self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig | None = None
    ) -> None:
        """Connect to the server that the settings name, or else to the default one. Blocks 5 s at most.

        Raises Unavailable without a server.
        """
        settings = vllm_config.kv_transfer_config
        settings.kv_load_failure_policy = "recompute"
        if not {"lmcache.mp.host", "lmcache.mp.port"} & settings.kv_connector_extra_config.keys():
            settings.kv_connector_extra_config["lmcache.mp.host"] = default_url()
        super().__init__(vllm_config, role, kv_cache_config)
        adapter = self.scheduler_adapter if role == KVConnectorRole.SCHEDULER else self.worker_adapter
        adapter.model_name = f"{adapter.model_name}@{identity(vllm_config)}"  # for all keys that the adapter makes
        self._private: set[str] = set()  # requests with KV that token ids do not determine
        self._loading: set[str] = set()  # requests whose load was ordered and has not ended on all ranks
        self._aborted: set[str] = set()  # requests that ended during their load
        self._held: set[str] = set()  # requests whose blocks vLLM would have freed by now
        self._may_load: bool = settings.is_kv_consumer
        self._may_store: bool = settings.is_kv_producer

    @property
    def _depot(self) -> GuardedClient:
        adapter = self.scheduler_adapter if self.role == KVConnectorRole.SCHEDULER else self.worker_adapter
        client: GuardedClient = adapter.mq_client
        return client

    # -- a worker's half

    def start_load_kv(self, forward_context: ForwardContext, **kwargs: Any) -> None:
        """Before a step writes to any block: end the stores of earlier ones, then start this step's loads."""
        self._depot.end_stores(_STORES_S)
        self._depot.skip_blocks = self._get_connector_metadata().skip_blocks
        super().start_load_kv(forward_context, **kwargs)

    def get_block_ids_with_load_errors(self) -> set[int]:
        return self._depot.take_failed_blocks()

    def shutdown(self) -> None:
        """Unregister and close the connection. Blocks 5 s at most."""
        super().shutdown()
        self._depot.close()

    # -- the scheduler's half

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int | None, bool]:
        """Tokens of a prompt that can be loaded beyond those that vLLM has; None while that is not known."""
        tracker = self.request_trackers.get(request.request_id)
        has_failed = (
            tracker is not None
            and tracker.state is not own.LMCacheMPRequestState.PREFETCHING
            and request.status != RequestStatus.PREEMPTED
        )
        if has_failed:
            del self.request_trackers[request.request_id]
        if tracker is not None:
            tracker.num_stored_blocks = 0  # vLLM asks again while it has no free blocks, and adds them up each time
        if not _is_known_by_tokens(request):
            self._private.add(request.request_id)
        if has_failed or not self._may_be_loaded(request, num_computed_tokens):
            self._get_or_create_request_tracker(request)
            return 0, False
        found: tuple[int | None, bool] = super().get_num_new_matched_tokens(request, num_computed_tokens)
        return found

    def _may_be_loaded(self, request: Request, num_computed_tokens: int) -> bool:
        chunk_tokens: int = self.scheduler_adapter.chunk_size
        if not self._may_load or request.num_tokens < chunk_tokens or request.request_id in self._private:
            return False
        # Without token keys, all chunks of a step go in one run of hashes, and no block of it can be left out.
        return _has_token_keys() or num_computed_tokens % chunk_tokens == 0

    def update_state_after_alloc(self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int) -> None:
        """`blocks` are all of the request's, also when this is called again after its load."""
        tracker = self._get_request_tracker(request.request_id)
        tracker.allocated_block_ids.clear()
        if tracker.state is not own.LMCacheMPRequestState.PREFETCHING:
            adapter = self.scheduler_adapter  # blocks that a load failed to fill are stored again
            tracker.num_stored_blocks = request.num_computed_tokens // adapter.chunk_size * adapter.blocks_in_chunk
        super().update_state_after_alloc(request, blocks, num_external_tokens)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> own.LMCacheMPConnectorMetadata:
        # vLLM adds a new request's scheduled tokens, and for one under way those computed before, to what is here.
        for new in scheduler_output.scheduled_new_reqs:
            self._get_request_tracker(new.req_id).num_scheduled_tokens = new.num_computed_tokens
        for request_id in scheduler_output.scheduled_cached_reqs.req_ids:
            scheduled = scheduler_output.num_scheduled_tokens[request_id]
            self._get_request_tracker(request_id).num_scheduled_tokens = scheduled
        metadata = super().build_connector_meta(scheduler_output)
        loads = [each for each in metadata.requests if each.direction == "RETRIEVE"]
        stores = [each for each in metadata.requests if each.direction == "STORE"] if self._may_store else []
        metadata.requests = [*loads, *(each for each in stores if each.request_id not in self._private)]
        metadata.skip_blocks = [self._local_blocks(each.request_id) for each in loads] if _has_token_keys() else []
        self._loading.update(each.request_id for each in loads)
        return metadata

    def _local_blocks(self, request_id: str) -> int:
        """Blocks of the first chunk to load that vLLM's own cache has: running requests may be reading them."""
        local: int = self._get_request_tracker(request_id).num_vllm_hit_blocks
        return local % int(self.scheduler_adapter.blocks_in_chunk)

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        """vLLM is about to free the blocks of requests that have ended: keep those that a load still writes to."""
        super().update_connector_output(connector_output)
        loaded = connector_output.finished_recving or set()
        self._loading -= loaded
        self._held |= connector_output.finished_sending or set()
        freed = self._held - self._loading
        connector_output.finished_sending = freed
        connector_output.finished_recving = loaded - self._aborted  # vLLM would free those here, and once more
        self._held -= freed
        self._aborted -= freed

    def request_finished(self, request: Request, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        """Whether vLLM must keep the blocks until `get_finished` names the request: always."""
        if request.request_id in self._loading:
            self._aborted.add(request.request_id)
        self._private.discard(request.request_id)
        self.scheduler_adapter.cleanup_lookup_result(request.request_id)
        kept: tuple[bool, dict[str, Any] | None] = super().request_finished(request, block_ids)
        return kept


def identity(vllm_config: VllmConfig) -> str:
    """A hash of all that is fixed for an engine and may change KV bytes, equal in all of its processes.

    The contract's keys name KV by the model's path, and the server adds shapes and dtypes. As with `KVDepotConnector`
    (vllm/identity.py), everything else of the configuration counts unless it is known to be harmless. Weights of a hub
    name that is not in the local cache are known by their name alone.
    """
    model = vllm_config.model_config
    found = find_weights(model.model, model.revision, vllm_config.load_config.download_dir, kinds_read(model))
    facts: list[object] = [vllm.__version__, platform_facts(), describe_config(vllm_config, "any")]
    if found is not None:
        facts.append(found.digest)
        if found.changed_at > loaded_since() - SETTLED_S:  # it is unknown which version was loaded
            facts.append(vllm_config.instance_id)
    return blake3(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:32]


def _has_token_keys() -> bool:
    """Whether this version names chunks by tokens (0.17), not by vLLM's own block hashes (0.15, 0.16)."""
    return "token_ids" in own.LoadStoreOp.__annotations__


def _is_known_by_tokens(request: Request) -> bool:
    """Whether a prompt's tokens determine its KV, and vLLM's output does not need all of it computed."""
    return not (
        request.lora_request
        or request.mm_features
        or request.cache_salt
        or request.prompt_embeds is not None
        or request.skip_reading_prefix_cache
    )


class _Event:
    """An event of a processor, whose work has always ended when the event is recorded."""

    def record(self) -> None:
        """Nothing is queued."""

    def query(self) -> bool:
        return True

    def ipc_handle(self) -> bytes:
        """Empty: there is nothing to wait for."""
        return b""


def without_cuda_events() -> None:
    """Where vLLM runs on the processor, give its connector events that need no CUDA. torch itself stays as it is."""
    from vllm.platforms import current_platform

    if current_platform.is_cpu():
        own.torch = SimpleNamespace(
            cuda=SimpleNamespace(
                Event=lambda interprocess: _Event(), current_stream=lambda: None, stream=contextlib.nullcontext
            )
        )
