"""The names of the `lmcache` package: who gets them, and that all that vLLM imports are there."""

from __future__ import annotations

import importlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvdepot.errors import ConfigError
from kvdepot.integrations.lmcache import has_contract, provide
from tests.conftest import HANG_S

IMPORTED = """
    lmcache.integration.vllm.utils mla_enabled
    lmcache.utils init_logger _lmcache_nvtx_annotate
    lmcache.v1.multiprocess.custom_types CudaIPCWrapper IPCCacheEngineKey KVCache
    lmcache.v1.multiprocess.mq MessageQueueClient MessagingFuture
    lmcache.v1.multiprocess.protocol RequestType get_response_class
    lmcache utils
    lmcache.config LMCacheEngineMetadata
    lmcache.logging init_logger
    lmcache.observability LMCStatsMonitor
    lmcache.v1.cache_engine LMCacheEngine LMCacheEngineBuilder
    lmcache.v1.compute.blend LMCBlenderBuilder
    lmcache.v1.config LMCacheEngineConfig _validate_and_set_config_value
    lmcache.v1.gpu_connector VLLMBufferLayerwiseGPUConnector VLLMPagedMemGPUConnectorV2
    lmcache.v1.gpu_connector VLLMPagedMemLayerwiseGPUConnector
    lmcache.v1.internal_api_server.api_server InternalAPIServer
    lmcache.v1.lookup_client LookupClientFactory
    lmcache.v1.lookup_client.lmcache_async_lookup_client LMCacheAsyncLookupServer
    lmcache.v1.offload_server.zmq_server ZMQOffloadServer
    lmcache.v1.plugin.runtime_plugin_launcher RuntimePluginLauncher
"""
"""What the connector, its adapter and its package import in vLLM 0.15.0, 0.15.1, 0.16.0, 0.17.0 and 0.17.1."""


class Factory:
    """The part of vLLM's KVConnectorFactory that is used."""

    def __init__(self) -> None:
        self._registry: dict[str, Any] = {"LMCacheMPConnector": "vLLM's loader", "OtherConnector": "another"}


def absent(name: str) -> bool:
    return importlib.util.find_spec(name) is None


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    finders = list(sys.meta_path)
    if not absent("lmcache"):
        pytest.skip("lmcache is installed")
    yield
    sys.meta_path[:] = finders
    for name in [name for name in sys.modules if name.partition(".")[0] == "lmcache"]:
        del sys.modules[name]


@pytest.mark.parametrize("version", ["0.15.0", "0.16.0", "0.17.1+cpu", "0.17.2rc1.dev3"])
def test_versions_with_a_connector_of_the_contract_get_the_names(version: str) -> None:
    factory = Factory()
    assert has_contract(version)
    assert provide(version, factory)  # type: ignore[arg-type]
    assert not absent("lmcache.utils")
    assert callable(factory._registry["LMCacheMPConnector"])
    assert factory._registry["OtherConnector"] == "another"


@pytest.mark.parametrize("version", ["0.14.1", "0.18.0", "0.33.0", "1.16.0", "dev", ""])
def test_other_versions_get_nothing(version: str) -> None:
    factory, finders = Factory(), list(sys.meta_path)
    assert not provide(version, factory)  # type: ignore[arg-type]
    assert sys.meta_path == finders
    assert factory._registry["LMCacheMPConnector"] == "vLLM's loader"
    assert absent("lmcache")


def test_every_name_that_vllm_imports_is_there() -> None:
    provide("0.17.1", Factory())  # type: ignore[arg-type]
    for line in IMPORTED.split("\n"):
        for name in line.split()[1:]:
            module = line.split()[0]
            assert getattr(importlib.import_module(module), name, None) is not None or not absent(f"{module}.{name}")


def test_without_an_adapter_in_lmcache_vllm_takes_its_own() -> None:
    provide("0.17.1", Factory())  # type: ignore[arg-type]
    with pytest.raises(ImportError):
        importlib.import_module("lmcache.integration.vllm.vllm_multi_process_adapter")


def test_an_unused_name_can_stand_in_an_annotation_but_not_be_used() -> None:
    provide("0.17.1", Factory())  # type: ignore[arg-type]
    engines = importlib.import_module("lmcache.v1.cache_engine")
    assert engines.LMCacheEngine | None
    for use in (lambda: engines.LMCacheEngine(), lambda: engines.LMCacheEngineBuilder.get_or_create("x")):
        with pytest.raises(ConfigError, match="need the lmcache package"):
            use()


def test_it_is_provided_once() -> None:
    factory = Factory()
    assert provide("0.17.1", factory)  # type: ignore[arg-type]
    finders, loader = list(sys.meta_path), factory._registry["LMCacheMPConnector"]
    assert provide("0.17.1", factory)  # type: ignore[arg-type]
    assert sys.meta_path == finders
    assert factory._registry["LMCacheMPConnector"] is loader


def test_an_installed_lmcache_is_never_shadowed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "lmcache").mkdir()
    (tmp_path / "lmcache" / "__init__.py").write_text("installed = True\n")
    monkeypatch.syspath_prepend(tmp_path)
    factory, finders = Factory(), list(sys.meta_path)
    assert not provide("0.17.1", factory)  # type: ignore[arg-type]
    assert sys.meta_path == finders
    assert factory._registry["LMCacheMPConnector"] == "vLLM's loader"
    assert importlib.import_module("lmcache").installed
    assert absent("lmcache.utils")


_SCRIPT = """
import logging
from kvdepot.integrations.vllm.start import log_with_vllm
log_with_vllm()
log_with_vllm()
vllm = logging.getLogger("vllm")
vllm.setLevel("INFO")
vllm.propagate = False
vllm.addHandler(logging.StreamHandler())
log = logging.getLogger("kvdepot.client.connection")
log.info("reconnected to %s", "a server")
log.info("kvdepot: started %d", 1)
log.debug("unseen")
"""


def test_lines_in_vllms_log_begin_with_the_products_name_once() -> None:
    done = subprocess.run([sys.executable, "-c", _SCRIPT], capture_output=True, text=True, timeout=HANG_S, check=True)
    assert done.stderr.splitlines() == ["kvdepot: reconnected to a server", "kvdepot: started 1"]
