"""vLLM's connector, one module for what each of vLLM's processes is told or asked.

vLLM finds `KVDepotConnector` here, too, where it is named by this module; importing the rest brings no vLLM.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvdepot.integrations.vllm.connector import KVDepotConnector

__all__ = ["KVDepotConnector"]


def __getattr__(name: str) -> Any:
    if name != "KVDepotConnector":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from kvdepot.integrations.vllm.connector import KVDepotConnector

    return KVDepotConnector
