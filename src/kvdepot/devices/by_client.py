"""Chunks that a client copies itself, to and from the arena that it maps (memory/arena_view.py).

That is one copy instead of two for KV that is in no shared memory. The server's tasks only make memory ready before it,
and sum the bytes afterwards.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvdepot.memory.copier import CopyPiece, Mapped, Memory
from kvdepot.protocol.layout import Layout


class CopiedByClient(Mapped):
    """A registration without tensors of its own. owner: the arena's name, and the boot id of its server."""

    task_bytes = 64 << 20

    def __init__(self, layout: Layout, owner: tuple[str, bytes]) -> None:
        self.layout = layout
        self.owner = owner

    def move(self, memory: Memory, pieces: Sequence[CopyPiece], is_store: bool) -> None:
        """Nothing is left to copy."""

    def close(self) -> None:
        """Nothing is mapped."""
