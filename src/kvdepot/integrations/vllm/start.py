"""What kvdepot sets up in each vLLM process before there is a connector: logging, and an early check for the server.

Called by the plugin entry point (`register_vllm`).
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.config import KVTransferConfig
    from vllm.distributed.kv_transfer.kv_connector.base import KVConnectorBase
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

__all__ = ["check_early", "log_with_vllm"]

_ABSENT_S = 1.0
"""How long to wait for a server that is being started beside the engine."""
_found: set[str] = set()
"""URLs of servers that have answered this process."""


def log_with_vllm() -> None:
    """Show kvdepot's log lines where vLLM shows its own, from the same level up.

    vLLM configures its logger after this, perhaps several times, or leaves it alone (VLLM_CONFIGURE_LOGGING=0). As a
    child of that logger, ours follows whatever it does, and each line appears once.
    """
    logging.getLogger("kvdepot").parent = logging.getLogger("vllm")


def check_early(factory: type[KVConnectorFactory]) -> None:
    """Make vLLM's KVConnectorFactory look for the server when the engine is configured, before a model is loaded.

    vLLM makes connectors only after it has loaded the model, perhaps a minute later. When it checks its configuration,
    it asks the factory for the connector's class, which is the first time that we see the settings. It asks for each
    connector below MultiConnector, too, and for MultiConnector itself with the settings common to all.
    """
    get_class = factory.get_connector_class

    def get_connector_class(kv_transfer_config: KVTransferConfig) -> type[KVConnectorBase]:
        if kv_transfer_config.has_connector("KVDepotConnector"):
            _refuse_other_versions()
        if kv_transfer_config.kv_connector == "KVDepotConnector":
            _find_server(kv_transfer_config)
        elif kv_transfer_config.has_connector("KVDepotConnector"):
            _refuse_failing(kv_transfer_config)
        connector: type[KVConnectorBase] = get_class(kv_transfer_config)
        return connector

    factory.get_connector_class = get_connector_class


def _refuse_other_versions() -> None:
    """Raise ConfigError where vLLM is of a version that is not served."""
    from kvdepot.integrations.vllm.versions import refuse_other_versions

    refuse_other_versions()


def _refuse_failing(kv_transfer_config: KVTransferConfig) -> None:
    """Raise ConfigError if a failed load would end its request: below MultiConnector we cannot change that setting."""
    from kvdepot.errors import ConfigError

    if kv_transfer_config.kv_load_failure_policy != "recompute":
        raise ConfigError(
            "kvdepot below MultiConnector: a load that fails would end its request. Set "
            '"kv_load_failure_policy": "recompute" in --kv-transfer-config, beside "kv_connector": "MultiConnector"'
        )


def _find_server(kv_transfer_config: KVTransferConfig) -> None:
    """Connect to the server once. Blocks 5 s at most, 1 s without a socket file. Raises ConfigError, Unavailable."""
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
