"""The home of the client contract: vLLM 0.15 to 0.17, whose LMCacheMPConnector and adapter files run as they are.

They import a package `lmcache`; where it is not installed, the plugin provides the names that they use (names.py), on
the client of the contract. Called by the plugin entry point, in every vLLM process, before any connector is made.
Invariant: an installed `lmcache` is never shadowed, and other versions of vLLM get nothing.
"""

from __future__ import annotations

import importlib.util
import re
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

_FIRST, _LAST = (0, 15), (0, 17)
_CONNECTOR = "LMCacheMPConnector"


def has_contract(version: str) -> bool:
    """Whether this version of vLLM has a connector of the contract, with an adapter file of its own."""
    numbers = re.match(r"(\d+)\.(\d+)", version)
    return numbers is not None and _FIRST <= (int(numbers[1]), int(numbers[2])) <= _LAST


def provide(version: str, factory: type[KVConnectorFactory]) -> bool:
    """Provide the names where they are missing, and have vLLM's factory make the connector from connector.py.

    version: vLLM's. Returns whether the names are provided by kvdepot; safe to call again.
    """
    from kvdepot.integrations.lmcache.names import Names

    if any(isinstance(finder, Names) for finder in sys.meta_path):
        return True
    is_installed = "lmcache" in sys.modules or importlib.util.find_spec("lmcache") is not None
    if not has_contract(version) or _CONNECTOR not in factory._registry or is_installed:
        return False
    sys.meta_path.append(Names())  # last, so that a package that is there always comes first
    factory._registry[_CONNECTOR] = _load
    return True


def _load() -> type[object]:
    from kvdepot.integrations.lmcache.connector import LMCacheMPConnector, without_cuda_events

    without_cuda_events()
    return LMCacheMPConnector
