"""The library for asyncio; docs/library.md shows it."""

from __future__ import annotations

from kvdepot.library import Shape, State
from kvdepot.library.aio import Depot, Namespace, connect

__all__ = ["Depot", "Namespace", "Shape", "State", "connect"]
