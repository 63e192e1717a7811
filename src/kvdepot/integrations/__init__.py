"""Engines that kvdepot plugs into, one module an engine."""

from __future__ import annotations

import time

__all__ = ["loaded_since", "register_vllm"]

_loaded_since = time.time()


def loaded_since() -> float:
    """Unix time at which this process had not read any of a model's files yet: vLLM loads its plugins first."""
    return _loaded_since


def register_vllm() -> None:
    """vLLM's plugin entry point: make `KVDepotConnector` known by name. Called in every vLLM process."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    from kvdepot.integrations.vllm_start import check_early, log_with_vllm

    if "KVDepotConnector" in KVConnectorFactory._registry:
        return
    KVConnectorFactory.register_connector("KVDepotConnector", "kvdepot.integrations.vllm", "KVDepotConnector")
    log_with_vllm()
    check_early(KVConnectorFactory)
