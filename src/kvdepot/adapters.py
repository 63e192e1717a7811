"""Re-exports the client contract from client/lmcache.py."""

from kvdepot.client.lmcache import (
    IPCCacheEngineKey,
    KVCacheHandle,
    LMCacheMPSchedulerAdapter,
    LMCacheMPWorkerAdapter,
    LoadStoreOp,
    MessageQueueClient,
    MessagingFuture,
    RequestType,
    get_lmcache_chunk_size,
    get_response_class,
    send_lmcache_request,
    striding_block_hashes,
    wrap_kv_caches,
)

__all__ = [
    "IPCCacheEngineKey",
    "KVCacheHandle",
    "LMCacheMPSchedulerAdapter",
    "LMCacheMPWorkerAdapter",
    "LoadStoreOp",
    "MessageQueueClient",
    "MessagingFuture",
    "RequestType",
    "get_lmcache_chunk_size",
    "get_response_class",
    "send_lmcache_request",
    "striding_block_hashes",
    "wrap_kv_caches",
]
