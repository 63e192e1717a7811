"""Engines that use kvdepot, one package per engine."""

from __future__ import annotations

from kvdepot.integrations.loaded import loaded_since

__all__ = ["loaded_since", "register_vllm"]


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
