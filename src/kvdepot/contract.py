"""Re-exports the contract's requests from client/contract.py."""

from kvdepot.client.contract import (
    IPCCacheEngineKey,
    KVCacheHandle,
    LoadStoreOp,
    RequestType,
    get_response_class,
    striding_block_hashes,
    wrap_kv_caches,
)

__all__ = [
    "IPCCacheEngineKey",
    "KVCacheHandle",
    "LoadStoreOp",
    "RequestType",
    "get_response_class",
    "striding_block_hashes",
    "wrap_kv_caches",
]
