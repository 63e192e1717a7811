"""Engines that use kvdepot, one package per engine."""

from __future__ import annotations

import time

_loaded_since = time.time()


def loaded_since() -> float:
    """Unix time at which this process had not yet read any of a model's files: vLLM loads its plugins before."""
    return _loaded_since


def register_vllm() -> None:
    """vLLM's plugin entry point: make `KVDepotConnector` known by name, or what vLLM 0.15 to 0.17 imports of LMCache.

    Called in every vLLM process.
    """
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
    from vllm.version import __version__ as version

    from kvdepot.integrations import lmcache
    from kvdepot.integrations.vllm.start import check_early, log_with_vllm

    if lmcache.has_contract(version):  # KVDepotConnector is for later versions
        lmcache.provide(version, KVConnectorFactory)
        log_with_vllm()
        return
    if "KVDepotConnector" in KVConnectorFactory._registry:
        return
    KVConnectorFactory.register_connector("KVDepotConnector", "kvdepot.integrations.vllm.connector", "KVDepotConnector")
    log_with_vllm()
    check_early(KVConnectorFactory)
