"""Copies between a client's KV and the arena: what the lane, the library and SGLang's pages share."""

from __future__ import annotations

from collections.abc import Callable

from kvdepot.errors import LayoutError, ProtocolError, Unavailable
from kvdepot.memory.arena_view import ArenaView
from kvdepot.memory.extents import checksum
from kvdepot.protocol import wire

_KEPT = 2
"""Arenas: that of this run of the server, and the one before, in which copies may still be ending."""


class Arenas:
    """The arenas that one client has mapped. Any thread."""

    def __init__(self) -> None:
        self._views: list[ArenaView] = []  # the last one is the newest; replaced as a whole

    def of(self, name: str, boot: bytes) -> ArenaView:
        """The arena of this name and run of a server, which is mapped if it is not yet. Raises Unavailable."""
        for view in reversed(self._views):
            if view.key == (name, boot):
                return view
        try:
            view = ArenaView(name, boot)
        except (LayoutError, OSError, ValueError) as exc:  # its file is gone, or address space is short
            raise Unavailable(f"the arena cannot be mapped: {exc}") from exc
        self._views = [*self._views, view][-_KEPT:]
        return view


def carry(view: ArenaView, placement: wire.Placement, size: int, copy: Callable[[ArenaView], None]) -> wire.Complete:
    """Copy the chunks of a placement, and sum those that are to be summed: what ends the operation.

    size: bytes of a chunk. copy: moves the bytes of all places. Blocks until it has. Raises what `copy` raises;
    Unavailable if the server has been replaced, or ProtocolError for places that are none, and then copies nothing.
    """
    extents = [extent for place in placement.places for extent in place.extents]
    if any(offset < 0 or length < 0 or offset + length > len(view.bytes) for offset, length in extents):
        raise ProtocolError("the server has placed chunks outside its arena")
    if any(sum(length for _, length in place.extents) < size for place in placement.places):
        raise ProtocolError(f"the server has placed chunks of {size} bytes in fewer")
    with view.use(extents):
        copy(view)
        sums = [checksum(view.bytes, each.extents, size) if each.is_summed else 0 for each in placement.places]
    return wire.Complete(placement.operation, placement.boot, sums=sums)
