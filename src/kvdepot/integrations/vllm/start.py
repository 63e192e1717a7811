"""What kvdepot does in each vLLM process before there is a connector: its log, and a look at what is configured.

Called by the plugin entry point (`register_vllm`).
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm.config import KVTransferConfig

__all__ = ["check_early", "log_with_vllm"]

_ABSENT_S = 1.0
"""For a server that is being started beside the engine."""
_found: set[str] = set()
"""Servers that have answered this process."""


def log_with_vllm() -> None:
    """Show kvdepot's log lines where vLLM shows its own, from the same level on.

    vLLM sets up its logger after this and perhaps again, with handlers and a level, or leaves it to whoever runs it
    (VLLM_CONFIGURE_LOGGING=0). Below that logger, whatever it does then holds for our lines, too, and each comes once.
    """
    logging.getLogger("kvdepot").parent = logging.getLogger("vllm")


def check_early(factory: Any) -> None:
    """Have vLLM's KVConnectorFactory look for the server when the engine is configured, before a model is loaded.

    vLLM makes connectors after it has loaded the model, a minute later perhaps. When it checks its configuration, it
    asks the factory for the connector's class: the first time that anybody tells us of the settings. It asks for each
    connector below MultiConnector, too, and for MultiConnector itself with the settings that hold for all.
    """
    get_class = factory.get_connector_class

    def get_connector_class(kv_transfer_config: KVTransferConfig) -> Any:
        if kv_transfer_config.kv_connector == "KVDepotConnector":
            _find_server(kv_transfer_config)
        elif kv_transfer_config.has_connector("KVDepotConnector"):
            _refuse_failing(kv_transfer_config)
        return get_class(kv_transfer_config)

    factory.get_connector_class = get_connector_class


def _refuse_failing(kv_transfer_config: KVTransferConfig) -> None:
    """Raise ConfigError where a failed load would end its request; below MultiConnector our own setting is a copy."""
    from kvdepot.errors import ConfigError

    if kv_transfer_config.kv_load_failure_policy != "recompute":
        raise ConfigError(
            "kvdepot below MultiConnector: a load that fails would end its request. Set "
            '"kv_load_failure_policy": "recompute" in --kv-transfer-config, beside "kv_connector": "MultiConnector"'
        )


def _find_server(kv_transfer_config: KVTransferConfig) -> None:
    """Blocks 5 s at most, 1 s where there is no socket. Raises ConfigError, Unavailable."""
    from kvdepot.client import admin
    from kvdepot.client.socket import CONNECT_S
    from kvdepot.integrations.vllm.identity import read_settings

    settings = read_settings(kv_transfer_config.kv_connector_extra_config)
    url = settings.url
    if url not in _found:
        socket = Path(url.removeprefix("ipc://"))
        is_absent = url.startswith("ipc:///") and not socket.exists()
        with admin.connect(url, settings.key, _ABSENT_S if is_absent else CONNECT_S):
            _found.add(url)
