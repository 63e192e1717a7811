"""Setup in each vLLM process before there is a connector: logging, the server, the engine's description.

Called by the plugin entry point (`register_vllm`).
"""

from __future__ import annotations

import copy
import functools
import logging
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from multiprocessing.process import BaseProcess

    from vllm.config import KVTransferConfig, VllmConfig
    from vllm.distributed.kv_transfer.kv_connector.base import KVConnectorBase
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

_LOOK_S = 1.0
_found: set[str] = set()
"""URLs of servers that have answered this process."""
_EXECUTORS = "vllm.v1.executor.abstract"
_noting: set[type] = set()
"""vLLM's class of executors, once it has been extended."""


class _PrefixingHandler(logging.Handler):
    """Passes lines on to vLLM's handlers, with the product's name: vLLM shows a line's file, not its logger."""

    def emit(self, record: logging.LogRecord) -> None:
        line = copy.copy(record)
        if not str(line.msg).startswith("kvdepot: "):
            line.msg = f"kvdepot: {line.msg}"
        logging.getLogger("vllm").callHandlers(line)


def log_with_vllm() -> None:
    """Show kvdepot's log lines where vLLM shows its own, from the same level up, each beginning with `kvdepot:`.

    vLLM configures its logger after this, perhaps several times, or leaves it alone (VLLM_CONFIGURE_LOGGING=0). As a
    child of vLLM's logger, ours always has the same level, and each line appears once.
    """
    ours = logging.getLogger("kvdepot")
    ours.parent, ours.propagate = logging.getLogger("vllm"), False
    if not any(isinstance(handler, _PrefixingHandler) for handler in ours.handlers):
        ours.addHandler(_PrefixingHandler())


def check_early(factory: type[KVConnectorFactory]) -> None:
    """Make vLLM's KVConnectorFactory start or find the server when the engine is configured, before a model is loaded.

    vLLM makes connectors only after it has loaded the model, perhaps a minute later. When it checks its configuration,
    it asks the factory for the connector's class, which is the first time that we see the settings. It asks for each
    connector below MultiConnector, too, and for MultiConnector itself with the settings common to all.
    """
    get_class = factory.get_connector_class
    if _EXECUTORS in sys.modules:  # an engine's process; in others, importing the executors would cost half a second
        _describe_before_workers()

    def get_connector_class(kv_transfer_config: KVTransferConfig) -> type[KVConnectorBase]:
        if kv_transfer_config.has_connector("KVDepotConnector"):
            from kvdepot.integrations.vllm.versions import refuse_other_versions

            refuse_other_versions()
            _describe_before_workers()
            _leave_in_order()
        if kv_transfer_config.kv_connector == "KVDepotConnector":
            _prepare(kv_transfer_config)
        elif kv_transfer_config.has_connector("KVDepotConnector"):
            _refuse_failing(kv_transfer_config)
        connector: type[KVConnectorBase] = get_class(kv_transfer_config)
        return connector

    factory.get_connector_class = get_connector_class


def _describe_before_workers() -> None:
    """Make vLLM's executors note what the engine is (identity.py) before they start a worker. Safe twice.

    An executor is made in the scheduler's process, whichever way the engine was made, and starts all workers.
    """
    from vllm.v1.executor.abstract import Executor

    if Executor in _noting:
        return
    _noting.add(Executor)
    make = Executor.__init__

    @functools.wraps(make)
    def noting(self: Executor, vllm_config: VllmConfig, *args: Any, **options: Any) -> None:
        transfer = vllm_config.kv_transfer_config
        if transfer is not None and transfer.has_connector("KVDepotConnector"):
            from kvdepot.integrations.vllm.identity import note_facts

            note_facts(vllm_config)
        make(self, vllm_config, *args, **options)

    Executor.__init__ = noting


def _leave_in_order() -> None:
    """Make vLLM's front end mark an engine's clients as having left before it ends the engine's processes.

    It sends them SIGTERM and, with vLLM's default settings, SIGKILL right afterwards: they cannot close their
    connections, and every orderly stop would look like a crash.
    """
    from vllm.v1.engine import utils

    from kvdepot.memory.shm import leave_for

    end = utils.shutdown
    if end.__module__ == __name__:
        return

    @functools.wraps(end)
    def shutdown(procs: list[BaseProcess], timeout: float | None = None) -> None:
        for process in procs:
            if process.is_alive() and process.pid is not None:
                leave_for(process.pid)
        end(procs, timeout)

    shutdown.__module__ = __name__
    utils.shutdown = shutdown


def _refuse_failing(kv_transfer_config: KVTransferConfig) -> None:
    """Raise ConfigError if a failed load would end its request, and our settings do not ask for that: below
    MultiConnector we cannot change the policy."""
    from kvdepot.errors import ConfigError
    from kvdepot.integrations.vllm.settings import read_settings

    below = kv_transfer_config.kv_connector_extra_config.get("connectors", ())
    ours = [each.get("kv_connector_extra_config", {}) for each in below if each["kv_connector"] == "KVDepotConnector"]
    fails = all(read_settings(extra).load_failure_policy == "fail" for extra in ours)
    if kv_transfer_config.kv_load_failure_policy != "recompute" and not fails:
        raise ConfigError(
            "kvdepot below MultiConnector: a load that fails would end its request. Set "
            '"kv_load_failure_policy": "recompute" in --kv-transfer-config, beside "kv_connector": "MultiConnector"'
        )


def _prepare(kv_transfer_config: KVTransferConfig) -> None:
    """Start the shared server, if this engine may, and find out early what a server that is there refuses it for.

    Blocks a second at most; with `kvdepot.required`, 8 s, for a server that answers. Raises KVDepotError.
    """
    from kvdepot.client import admin
    from kvdepot.errors import Unavailable
    from kvdepot.integrations.vllm.settings import PASSING, REQUIRED_S, find_place, read_settings
    from kvdepot.protocol.endpoints import is_taken

    settings = read_settings(kv_transfer_config.kv_connector_extra_config)
    if settings.is_embedded:
        return  # its first worker starts it
    place = find_place(settings, str(kv_transfer_config.engine_id or ""))
    if place.url in _found or not (settings.required or is_taken(place.url)):
        return
    try:
        with admin.connect(place.url, settings.key, REQUIRED_S if settings.required else _LOOK_S):
            _found.add(place.url)
    except PASSING as exc:
        if settings.required:
            raise Unavailable(place.fault() or str(exc)) from exc
