"""vLLM's connector.

`KVDepotConnector` can be named by this module, too; it is imported on first use, so that importing the package does not
import vLLM.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvdepot.integrations.vllm.connector import KVDepotConnector

__all__ = ["KVDepotConnector"]


def __getattr__(name: str) -> type[KVDepotConnector]:
    if name != "KVDepotConnector":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from kvdepot.integrations.vllm.connector import KVDepotConnector

    return KVDepotConnector
