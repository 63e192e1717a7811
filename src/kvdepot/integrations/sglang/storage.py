"""The class that SGLang's `dynamic` backend loads: its interface, on PageStore.

SGLang calls it on its own threads: queries and reads on two that prefetch, writes on one that backs up, the rest on the
scheduler's. A method that raised would end such a thread, or return None to it. Invariant: after the start, no method
raises; a call that fails is a miss.
"""

from __future__ import annotations

import logging
import os
import secrets
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, TypeVar

from sglang.srt.mem_cache.hicache_storage import (
    HiCacheStorage,
    HiCacheStorageConfig,
    HiCacheStorageExtraInfo,
    PoolHitPolicy,
    PoolName,
    PoolTransfer,
    PoolTransferResult,
)
from sglang.srt.runtime_context import get_server_args
from sglang.version import __version__

from kvdepot.client.calls import OwnClient
from kvdepot.errors import ConfigError, DeadlineExceeded, Unavailable
from kvdepot.integrations.sglang.identity import are_updated, forget_updates, identify, watch_updates
from kvdepot.integrations.sglang.pages import KV, HostPool, PagePool, PageStore
from kvdepot.integrations.sglang.settings import ServerStarter, read_settings

if TYPE_CHECKING:
    import torch
    from sglang.srt.observability.metrics_collector import StorageMetrics

log = logging.getLogger(__name__)

T = TypeVar("T")

_MOST_MOVED = 4096
"""Reads and writes of the KV pool that wait for `get_stats`, each with its pages and seconds; older ones are lost."""


class KVDepotHiCache(HiCacheStorage):
    """kvdepot as SGLang's third tier. One per rank."""

    def __init__(self, storage_config: HiCacheStorageConfig, kwargs: object = None) -> None:
        """kwargs: the factory's, unused. Raises ConfigError for settings and engines that are not supported."""
        self._settings = read_settings(storage_config.extra_config)
        self._config = storage_config
        identity = identify(storage_config.model_name or "", _arguments(), self._settings.weights_revision, __version__)
        engine = f"sglang {identity.label} {os.getppid()}"
        starter = ServerStarter(self._settings, engine)
        starter.start()
        client = OwnClient(starter.url, self._settings.key, engine)
        alone = secrets.token_hex(16)

        def name(pool: PagePool, epoch: int) -> str:
            # Ranks with whole pages read each other's, and one may have noticed an update that another has not.
            facts = f"{pool.facts} {alone}" if epoch and pool.world_size == 1 else pool.facts
            return identity.name(pool.name, facts, epoch)

        self._store = PageStore(client, name, starter.start_again)
        self._cleared: list[tuple[HostPool, Callable[[], None]]] = []  # pools, and their own `clear`
        self._moved = {kind: deque[tuple[int, float]](maxlen=_MOST_MOVED) for kind in ("get", "set")}
        watch_updates(self._store.suspend)
        if are_updated():  # weights have changed under an earlier backend or since: they are those of no file
            self._store.suspend()
            self._store.flushed()

    # -- pools, on the scheduler's thread; these may raise

    def register_mem_pool_host(self, mem_pool_host: HostPool) -> None:
        """Keep the KV pool's pages. Raises LayoutError or ConfigError for a pool that cannot be kept."""
        super().register_mem_pool_host(mem_pool_host)
        self._add(KV, mem_pool_host)

    def register_mem_host_pool_v2(self, host_pool: HostPool, host_pool_name: str) -> None:
        """Keep a hybrid model's further pool. Raises as `register_mem_pool_host`."""
        super().register_mem_host_pool_v2(host_pool, host_pool_name)
        self._add(str(host_pool_name), host_pool)

    def _add(self, name: str, pool: HostPool) -> None:
        if name in self._store:
            return  # SGLang registers the KV pool both ways
        config = self._config
        is_replicated = config.is_mla_model and not _is_per_rank(name, pool)
        if config.is_mla_model and not is_replicated and config.tp_size > 1 and name != PoolName.MAMBA:
            raise ConfigError(
                f"kvdepot does not support pool {name} beside MLA with tensor parallelism: each rank has a part of it, "
                "but SGLang stores one rank's only. Start without that draft model"
            )
        tp_rank, tp_size = (0, 1) if is_replicated else (config.tp_rank, config.tp_size)
        rank = (config.pp_rank * config.attn_cp_size + config.attn_cp_rank) * tp_size + tp_rank
        ranks = config.pp_size * config.attn_cp_size * tp_size, rank
        try:
            self._store.add(PagePool(pool, name, ranks))
        except (Unavailable, DeadlineExceeded) as exc:
            if self._settings.required:
                raise
            log.warning("kvdepot: nothing is kept until there is a server: %s", exc)
        if name == KV:
            self._watch_flushes(pool)

    def _watch_flushes(self, pool: HostPool) -> None:
        """Notice when SGLang flushes its caches, of which it notifies no backend: it then clears its pools."""
        clear = pool.clear

        def clear_and_notice() -> None:
            clear()
            self._guard(self._store.flushed, None)

        self._cleared.append((pool, clear))
        pool.clear = clear_and_notice  # type: ignore[method-assign]

    # -- v1: the KV pool

    def batch_exists(self, keys: list[str], extra_info: HiCacheStorageExtraInfo | None = None) -> int:
        return self._guard(lambda: self._store.exists(KV, keys, _prefix(extra_info)), 0)

    def batch_get_v1(
        self, keys: list[str], host_indices: torch.Tensor, extra_info: HiCacheStorageExtraInfo | None = None
    ) -> list[bool]:
        return self._get(KV, keys, host_indices)

    def batch_set_v1(
        self, keys: list[str], host_indices: torch.Tensor, extra_info: HiCacheStorageExtraInfo | None = None
    ) -> list[bool]:
        return self._set(KV, keys, host_indices, _prefix(extra_info))

    # -- v2: pools of hybrid models

    def batch_exists_v2(
        self,
        keys: list[str],
        pool_transfers: list[PoolTransfer] | None = None,
        extra_info: HiCacheStorageExtraInfo | None = None,
    ) -> PoolTransferResult:
        """The prefixes of `keys` that all pools can restore; on all ranks that share a pool's KV."""
        return self._guard(
            lambda: self._find(keys, pool_transfers or [], _prefix(extra_info)), PoolTransferResult.empty()
        )

    def _find(self, keys: list[str], transfers: Sequence[PoolTransfer], prefix: list[str] | None) -> PoolTransferResult:
        found = self._store.exists(KV, keys, prefix)
        hits: dict[str, int] = {PoolName.KV: found} if found else {}
        lengths = set(range(1, found + 1))
        for transfer in transfers:
            if transfer.hit_policy == PoolHitPolicy.ALL_PAGES:
                restorable = set(range(1, self._store.exists(str(transfer.name), keys[:found], prefix) + 1))
            elif transfer.hit_policy == PoolHitPolicy.TRAILING_PAGES:
                restorable = self._find_ends(str(transfer.name), keys[:found], max(1, len(transfer.keys or ())))
            else:
                continue  # BLOCK_GROUPS never shortens the prefix; without an answer, SGLang computes such a pool
            if restorable:
                hits[transfer.name] = max(restorable)
            lengths &= restorable
        return PoolTransferResult(max(lengths, default=0), hits, sorted(lengths))

    def _find_ends(self, pool: str, keys: list[str], trailing: int) -> set[int]:
        """The lengths of prefixes whose last `trailing` pages a pool has."""
        there, window = self._store.present(pool, keys), keys[-trailing:]
        # Tiers may have what ends the longest prefix.
        if not all(there[-trailing:]) and self._store.exists(pool, window) == len(window):
            there[-trailing:] = [True] * len(window)
        return {end for end in range(1, len(keys) + 1) if all(there[max(0, end - trailing) : end])}

    def batch_get_v2(
        self, transfers: list[PoolTransfer], extra_info: HiCacheStorageExtraInfo | None = None
    ) -> dict[str, list[bool]]:
        return {each.name: self._get(str(each.name), each.keys or [], each.host_indices) for each in transfers}

    def batch_set_v2(
        self, transfers: list[PoolTransfer], extra_info: HiCacheStorageExtraInfo | None = None
    ) -> dict[str, list[bool]]:
        def prefix(transfer: PoolTransfer) -> list[str] | None:
            return _prefix(extra_info) if transfer.hit_policy == PoolHitPolicy.ALL_PAGES else None

        return {
            each.name: self._set(str(each.name), each.keys or [], each.host_indices, prefix(each)) for each in transfers
        }

    # -- v0, which SGLang calls without `interface_v1` only, and its settings require that

    def get(self, key: str, target_location: object = None, target_sizes: object = None) -> None:
        return None

    def batch_get(self, keys: list[str], target_locations: object = None, target_sizes: object = None) -> list[None]:
        return [None] * len(keys)

    def set(self, key: str, value: object = None, target_location: object = None, target_sizes: object = None) -> bool:
        return False

    def batch_set(
        self, keys: list[str], values: object = None, target_locations: object = None, target_sizes: object = None
    ) -> bool:
        return False

    def exists(self, key: str) -> bool:
        return self.batch_exists([key]) == 1

    # -- the rest

    def clear(self) -> bool:
        """Remove this engine's KV from the depot, and with it that of other engines with the same model."""
        return self._guard(self._store.clear, False)

    def get_stats(self) -> StorageMetrics | None:
        """The pages and GB/s of each move since the last call; None if SGLang collects no such metrics."""
        if not self._config.enable_storage_metrics:
            return None
        from sglang.srt.observability.metrics_collector import StorageMetrics

        return self._guard(lambda: self._take_stats(StorageMetrics()), StorageMetrics())

    def _take_stats(self, stats: StorageMetrics) -> StorageMetrics:
        page_gb = self._store.page_bytes / 1e9
        into = {
            "get": (stats.prefetch_pgs, stats.prefetch_bandwidth),
            "set": (stats.backup_pgs, stats.backup_bandwidth),
        }
        for kind, (pages, speeds) in into.items():
            moved = self._moved[kind]
            for count, took_s in [moved.popleft() for _ in range(len(moved))]:
                pages.append(count)
                speeds.append(count * page_gb / took_s)
        return stats

    def close(self) -> None:
        """End the connection; SGLang calls it when the backend is detached. Blocks some seconds at most."""
        forget_updates(self._store.suspend)
        for pool, clear in self._cleared:
            pool.clear = clear  # type: ignore[method-assign]
        self._guard(self._store.close, None)

    # -- failures

    def _get(self, pool: str, keys: list[str], indices: torch.Tensor) -> list[bool]:
        return self._move("get", pool, keys, lambda: self._store.get(pool, keys, indices))

    def _set(self, pool: str, keys: list[str], indices: torch.Tensor, prefix: list[str] | None) -> list[bool]:
        return self._move("set", pool, keys, lambda: self._store.set(pool, keys, indices, prefix))

    def _move(self, kind: str, pool: str, keys: list[str], call: Callable[[], list[bool]]) -> list[bool]:
        """Read or write pages; those of the KV pool are counted for `get_stats`."""
        began = time.perf_counter()
        done = self._guard(call, [False] * len(keys))
        if pool == KV and any(done):
            self._moved[kind].append((sum(done), time.perf_counter() - began))
        return done

    def _guard(self, call: Callable[[], T], missed: T) -> T:
        """Return the result of `call`, or `missed` if it raises: no error may reach SGLang's threads."""
        try:
            return call()
        except Exception as exc:  # noqa: BLE001 - the top of what SGLang's threads call
            self._store.failed(exc)
            return missed


def _prefix(extra_info: HiCacheStorageExtraInfo | None) -> list[str] | None:
    """The keys before a call's, if SGLang passes them (`hicache_storage_pass_prefix_keys`)."""
    return extra_info.prefix_keys if extra_info is not None else None


def _is_per_rank(name: str, pool: HostPool) -> bool:
    """Whether each tensor-parallel rank has KV of its own in a pool, although the model's is replicated."""
    return name == PoolName.MAMBA or any(each.__name__ == "MHATokenToKVPoolHost" for each in type(pool).__mro__)


def _arguments() -> dict[str, object]:
    """SGLang's server arguments. Raises ConfigError outside its processes."""
    try:
        found = get_server_args()
    except ValueError as exc:
        raise ConfigError(f"kvdepot works within SGLang's processes only: {exc}") from exc
    names = getattr(found, "__struct_fields__", ()) or vars(found)  # by version, a struct or a plain object
    return {name: getattr(found, name) for name in names}
