"""A connector of vLLM that promises tokens of every prompt and brings garbage: it reports the blocks as failed.

It does so for requests with `{"fails": ...}` in their `kv_transfer_params`: "within" the step that needs the blocks, as
vLLM's ExampleConnector loads, or "between" steps, as ours does. It promises the first 640 tokens.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    SupportsHMA,
)

TOKENS = 640


@dataclass
class Orders(KVConnectorMetadata):
    loads: dict[str, list[int]] = field(default_factory=dict)
    between: set[str] = field(default_factory=set)


class FailingLoader(KVConnectorBase_V1, SupportsHMA):
    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self.block_tokens = kv_cache_config.kv_cache_groups[0].kv_cache_spec.block_size
        self.promised: dict[str, int] = {}
        self.loaded: set[str] = set()
        self.orders = Orders()
        self.failed: set[int] = set()
        self.ended: set[str] = set()
        self.caches: dict[str, Any] = {}

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        how = (request.kv_transfer_params or {}).get("fails")
        if how is None or request.request_id in self.loaded or num_computed_tokens >= TOKENS:
            return 0, False
        self.promised[request.request_id] = num_computed_tokens
        return TOKENS - num_computed_tokens, how == "between"

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        if num_external_tokens:
            self.loaded.add(request.request_id)
            (ids,) = blocks.get_block_ids()
            first = self.promised[request.request_id] // self.block_tokens
            self.orders.loads[request.request_id] = ids[first : TOKENS // self.block_tokens]
            if request.kv_transfer_params["fails"] == "between":
                self.orders.between.add(request.request_id)

    def build_connector_meta(self, scheduler_output: Any) -> Orders:
        orders, self.orders = self.orders, Orders()
        return orders

    def request_finished_all_groups(self, request: Any, block_ids: Any) -> tuple[bool, None]:
        return False, None

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        self.caches = kv_caches

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        orders = self._get_connector_metadata()
        assert isinstance(orders, Orders)
        self.ended |= orders.between
        for ids in orders.loads.values():
            for cache in self.caches.values():
                cache[ids] = 3.0
            self.failed.update(ids)

    def get_finished(self, finished_req_ids: set[str]) -> tuple[None, set[str] | None]:
        ended, self.ended = self.ended, set()
        return None, ended or None

    def get_block_ids_with_load_errors(self) -> set[int]:
        failed, self.failed = self.failed, set()
        return failed

    def wait_for_layer_load(self, layer_name: str) -> None: ...

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None: ...

    def wait_for_save(self) -> None: ...
