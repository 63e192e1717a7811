"""The Python library: KV of token sequences in and out of the depot, without an engine. docs/library.md shows it."""

from __future__ import annotations

from kvdepot.client.reuse import Reuse
from kvdepot.library.depot import Depot, connect
from kvdepot.library.namespace import Namespace
from kvdepot.library.shapes import Shape, State

__all__ = ["Depot", "Namespace", "Reuse", "Shape", "State", "connect"]
