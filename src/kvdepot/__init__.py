"""kvdepot: a KV-cache server for LLM engines. Prefill once, reuse everywhere.

`kvdepot.connect()` is the library (docs/library.md); `kvdepot serve` starts the server; vLLM finds `KVDepotConnector`
through its plugin entry point; `kvdepot.adapters` has the names of the LMCache contract. docs/internals describes the
files.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvdepot.library import Depot, Namespace, Reuse, Shape, State, connect

__all__ = ["Depot", "Namespace", "Reuse", "Shape", "State", "__version__", "connect"]

__version__ = "0.1.0"


def __getattr__(name: str) -> object:
    """Import the library with its first use: commands and engines do without it, and start sooner."""
    if name in __all__:
        return getattr(import_module("kvdepot.library"), name)
    raise AttributeError(f"module 'kvdepot' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
