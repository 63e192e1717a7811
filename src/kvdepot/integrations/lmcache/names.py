"""The names of the `lmcache` package that vLLM 0.15 to 0.17 import for LMCacheMPConnector, and what stands for each.

`lmcache.integration.vllm.vllm_multi_process_adapter` is left out on purpose: without it, vLLM uses its own adapter.
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import NoReturn, TypeVar

from kvdepot.errors import ConfigError

_Function = TypeVar("_Function", bound=Callable[..., object])

_HERE = __name__.removeprefix("kvdepot.")
PROVIDED: dict[str, dict[str, str]] = {
    "lmcache.integration.vllm.utils": {"mla_enabled": f"{_HERE}:mla_enabled"},
    "lmcache.logging": {"init_logger": f"{_HERE}:init_logger"},
    "lmcache.utils": {"_lmcache_nvtx_annotate": f"{_HERE}:annotate", "init_logger": f"{_HERE}:init_logger"},
    "lmcache.v1.multiprocess.custom_types": {
        "CudaIPCWrapper": "adapters:KVCacheHandle",
        "IPCCacheEngineKey": "adapters:IPCCacheEngineKey",
        "KVCache": f"{_HERE}:KVCache",
    },
    "lmcache.v1.multiprocess.mq": {
        "MessageQueueClient": "integrations.lmcache.client:GuardedClient",
        "MessagingFuture": "adapters:MessagingFuture",
    },
    "lmcache.v1.multiprocess.protocol": {
        "RequestType": "adapters:RequestType",
        "get_response_class": "adapters:get_response_class",
    },
}
"""The names that each module provides, and the `module:name` of what each is in this package."""

UNUSED: dict[str, tuple[str, ...]] = {
    "lmcache.config": ("LMCacheEngineMetadata",),
    "lmcache.observability": ("LMCStatsMonitor",),
    "lmcache.v1.cache_engine": ("LMCacheEngine", "LMCacheEngineBuilder"),
    "lmcache.v1.compute.blend": ("LMCBlenderBuilder",),
    "lmcache.v1.config": ("LMCacheEngineConfig", "_validate_and_set_config_value"),
    "lmcache.v1.gpu_connector": (
        "VLLMBufferLayerwiseGPUConnector",
        "VLLMPagedMemGPUConnectorV2",
        "VLLMPagedMemLayerwiseGPUConnector",
    ),
    "lmcache.v1.internal_api_server.api_server": ("InternalAPIServer",),
    "lmcache.v1.lookup_client": ("LookupClientFactory",),
    "lmcache.v1.lookup_client.lmcache_async_lookup_client": ("LMCacheAsyncLookupServer",),
    "lmcache.v1.offload_server.zmq_server": ("ZMQOffloadServer",),
    "lmcache.v1.plugin.runtime_plugin_launcher": ("RuntimePluginLauncher",),
}
"""Names that vLLM also imports, by module, for LMCache's engine inside vLLM; using one is an error."""

_MODULES = {
    ".".join(parts[:depth])
    for parts in (name.split(".") for name in (*PROVIDED, *UNUSED))
    for depth in range(1, len(parts) + 1)
}

KVCache = list[object]
"""Type of what a worker registers: one handle per layer."""


class Names(MetaPathFinder, Loader):
    """Finds and makes the modules."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname not in _MODULES:
            return None
        is_package = any(name.startswith(f"{fullname}.") for name in _MODULES)
        return ModuleSpec(fullname, self, origin="kvdepot", is_package=is_package)

    def create_module(self, spec: ModuleSpec) -> None:
        """None: an ordinary module."""

    def exec_module(self, module: ModuleType) -> None:
        module.__doc__ = "Provided by kvdepot: what vLLM's LMCacheMPConnector imports from LMCache."
        for name, place in PROVIDED.get(module.__name__, {}).items():
            there, _, what = place.partition(":")
            # Late, as vLLM must be configured before its connector is imported.
            setattr(module, name, getattr(importlib.import_module(f"kvdepot.{there}"), what))
        for name in UNUSED.get(module.__name__, ()):
            setattr(module, name, _Unused(f"{module.__name__}.{name}", (), {}))


def _refuse(name: str) -> NoReturn:
    raise ConfigError(
        f"kvdepot does not provide {name}: it supports only vLLM's LMCacheMPConnector; other LMCache connectors need "
        "the lmcache package"
    )


class _Unused(type):
    """The type of classes that can be named, as in annotations, but not used."""

    def __call__(cls, *args: object, **kwargs: object) -> NoReturn:
        _refuse(cls.__qualname__)

    def __getattr__(cls, name: str) -> NoReturn:
        if name.startswith("__"):
            raise AttributeError(name)
        _refuse(cls.__qualname__)


def init_logger(name: str) -> logging.Logger:
    """A logger whose lines appear where vLLM's own do."""
    return logging.getLogger(name)


def annotate(function: _Function) -> _Function:
    """The function itself: LMCache marks it for a profiler here."""
    return function


def mla_enabled(model_config: object) -> bool:
    """Whether a model has one latent KV head, so that all tensor-parallel ranks hold the same KV."""
    return getattr(model_config, "use_mla", False) is True
