"""SGLang: kvdepot as the third tier of its hierarchical cache, loaded by SGLang's own `dynamic` backend.

Only pages.py and settings.py can be imported without SGLang.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvdepot.integrations.sglang.storage import KVDepotHiCache

__all__ = ["KVDepotHiCache"]


def __getattr__(name: str) -> object:
    """The backend's class, for SGLang's factory; imported late, because it needs SGLang."""
    if name == "KVDepotHiCache":
        from kvdepot.integrations.sglang.storage import KVDepotHiCache

        return KVDepotHiCache
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
