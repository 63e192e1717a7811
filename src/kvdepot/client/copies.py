"""Copies to and from the arena, in the client's process: what the lane, the library and SGLang have in common.

A store or retrieve has three messages: the client asks, the server answers with a `Placement`, the client copies and
says `Complete`. Invariant: what was placed is completed, whatever happens: the server keeps its memory until then.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from pathlib import Path

from kvdepot.errors import ArenaError, ProtocolError, Unavailable
from kvdepot.memory.arena_view import ArenaView
from kvdepot.memory.extents import checksum
from kvdepot.protocol import wire

COMPLETE_TRIES, BUSY_S = 20, 0.5
"""Tries of completing an operation, and pauses between them, while the server refuses this client's many requests."""


class Arenas:
    """The arenas that a client has mapped: of the server's last run, and of the run before. Any thread."""

    def __init__(self, folder: Path) -> None:
        """folder: of the arenas, as this process sees it."""
        self._folder = folder
        self._lock = threading.Lock()
        self._views: list[ArenaView] = []

    def of(self, name: str, boot: bytes) -> ArenaView:
        """The arena of a server's run, mapped once. Raises Unavailable or ArenaError."""
        with self._lock:
            found = next((view for view in self._views if view.key == (name, boot)), None)
            if found is None:
                try:
                    found = ArenaView(self._folder, name, boot)
                except (ArenaError, OSError, ValueError) as exc:  # its file is gone, or address space is short
                    raise Unavailable(f"the arena cannot be mapped: {exc}") from exc
                self._views = [*self._views[-1:], found]
            return found


def carry(view: ArenaView, placement: wire.Placement, size: int, copy: Callable[[ArenaView], None]) -> wire.Complete:
    """Copy the chunks of a placement, and sum what is to be summed. Returns the message that completes the operation.

    size: bytes of a chunk. copy: moves the bytes of all places, and has stopped when it returns or raises. Raises what
    `copy` raises, Unavailable if the server has been replaced, ProtocolError for places outside the arena; then
    complete the operation with `give_back`.
    """
    check_places(view, placement, size)
    with view.use(extent for place in placement.places for extent in place.extents):
        copy(view)
        return wire.Complete(placement.operation, placement.boot, True, sums(view, placement.places, size))


def give_back(placement: wire.Placement) -> wire.Complete:
    """The message that ends an operation whose bytes were not copied."""
    return wire.Complete(placement.operation, placement.boot, False)


def check_places(view: ArenaView, placement: wire.Placement, size: int) -> None:
    """Raise ProtocolError unless each place has room for a chunk of `size` bytes, within the arena."""
    end = len(view.bytes)
    for place in placement.places:
        if sum(length for _, length in place.extents) < size:
            raise ProtocolError(f"the server's place {place.extents} is too small for a chunk of {size} bytes")
        if any(offset < 0 or length < 1 or offset + length > end for offset, length in place.extents):
            raise ProtocolError(f"the server's place {place.extents} is outside the arena of {end} bytes")


def sums(view: ArenaView, places: Sequence[wire.Place], size: int) -> list[int]:
    """The checksums of places with `size` bytes each; 0 where the server wants none."""
    return [checksum(view.bytes, place.extents, size) if place.is_summed else 0 for place in places]
