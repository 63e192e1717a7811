"""Plans copies: turns the pieces of a task into arrays of addresses. No I/O; called on copy threads.

    plan        device[i], host[i], sizes[i]: the copies of one task, in the order of the chunks' bytes in the arena
    one piece   segment s, block i of n:  device  base of s + ids[i] * stride of s
                                          logical n * before(s) + i * size(s)      before = sizes of earlier segments
                                          host    the extent that holds the logical byte

Blocks that are adjacent on both sides become one copy. A copy that spans two extents, or two pieces of pinned memory,
becomes two, because the driver refuses copies that cross from one registration into the next.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from kvdepot.devices.cuda.driver import Addresses
from kvdepot.memory.copier import CopyPiece
from kvdepot.protocol.layout import Layout

Direction: TypeAlias = Literal["store", "retrieve"]
DIRECTIONS: tuple[Direction, Direction] = ("store", "retrieve")
"""From the GPU to the host, and back."""


@dataclass(slots=True)
class CopyPlan:
    """Copies between device and host memory in one direction: uint64[n] each."""

    direction: Direction
    device: Addresses
    host: Addresses
    sizes: Addresses
    edge: int = 0
    """No copy crosses this address on the host's side, nor a multiple of `cut` bytes from there."""
    cut: int = 0

    def __len__(self) -> int:
        return len(self.sizes)

    @property
    def is_store(self) -> bool:
        return self.direction == "store"

    @property
    def total(self) -> int:
        return int(self.sizes.sum())

    def only(self, mask: npt.NDArray[np.bool_]) -> CopyPlan:
        """The copies that a mask, bool[n], selects."""
        if mask.all():
            return self
        return replace(self, device=self.device[mask], host=self.host[mask], sizes=self.sizes[mask])


class Planner:
    """Plans for the tensors of one registration."""

    def __init__(self, layout: Layout, bases: Sequence[int]) -> None:
        segments = layout.segments
        self._bases = np.array([bases[s.mapping] + s.offset for s in segments], np.uint64)[:, None]
        self._strides = np.array([s.stride for s in segments], np.uint64)[:, None]
        self._sizes = np.array([s.size for s in segments], np.uint64)[:, None]
        self._turn = threading.Lock()
        self._before = np.concatenate(([0], np.cumsum(self._sizes[:-1, 0]))).astype(np.uint64)[:, None]

    def plan(self, direction: Direction, pieces: Sequence[CopyPiece], host: int, cut: int) -> CopyPlan:
        """The copies of these pieces. host: address of the arena; cut: no copy crosses a multiple of it there."""
        # In turn: numpy gives the GIL away at each step, and two threads took 2 ms each for what takes one 0.3.
        with self._turn:
            parts = [self._piece(piece, host, cut) for piece in pieces if len(piece.block_ids) > piece.skip]
        nothing = np.empty(0, np.uint64)
        device, places, sizes = parts[0] if parts else (nothing, nothing, nothing)
        if len(parts) > 1:
            device, places, sizes = (np.concatenate(column) for column in zip(*parts, strict=True))
        return CopyPlan(direction, device, places, sizes, host, cut)

    def _piece(self, piece: CopyPiece, host: int, cut: int) -> tuple[Addresses, Addresses, Addresses]:
        count = len(piece.block_ids)
        ids = piece.block_ids[piece.skip :].astype(np.uint64)[None, :]
        index = np.arange(piece.skip, count, dtype=np.uint64)[None, :]
        device = (self._bases + ids * self._strides).reshape(-1)
        logical = (self._before * np.uint64(count) + index * self._sizes).reshape(-1)
        sizes = np.repeat(self._sizes, count - piece.skip)
        device, logical, sizes = merge(device, logical, sizes)
        if len(piece.extents) == 1:
            places = logical + np.uint64(piece.extents[0][0])
        else:
            lengths = np.array([length for _, length in piece.extents], np.uint64)
            starts = np.array([start for start, _ in piece.extents], np.uint64)
            ends = np.cumsum(lengths)
            device, logical, sizes = _split(device, logical, sizes, ends)
            extent = np.searchsorted(ends, logical, "right")
            places = starts[extent] + (logical - (ends[extent] - lengths[extent]))
        last = int((places + sizes).max())
        first = int(places.min()) // cut + 1
        if first * cut < last:
            order = np.argsort(places, kind="stable")
            edges = np.arange(first * cut, last + cut, cut, dtype=np.uint64)
            device, places, sizes = _split(device[order], places[order], sizes[order], edges)
        return device, places + np.uint64(host), sizes


def merge(
    device: Addresses, places: Addresses, sizes: Addresses, edge: int = 0, cut: int = 0
) -> tuple[Addresses, Addresses, Addresses]:
    """Join copies that are adjacent on both sides, but not across `edge` or a multiple of `cut` from there."""
    joined = (device[:-1] + sizes[:-1] == device[1:]) & (places[:-1] + sizes[:-1] == places[1:])
    if cut:
        joined &= (places[1:] - np.uint64(edge)) % np.uint64(cut) != 0
    if not joined.any():
        return device, places, sizes
    first = np.concatenate(([True], ~joined))
    return device[first], places[first], np.add.reduceat(sizes, np.flatnonzero(first))


def _split(
    device: Addresses, places: Addresses, sizes: Addresses, edges: Addresses
) -> tuple[Addresses, Addresses, Addresses]:
    """Cut copies, sorted by their places, wherever they cross one of the ascending `edges`."""
    low = np.searchsorted(edges, places, "right")
    high = np.searchsorted(edges, places + sizes, "left")
    if (low == high).all():
        return device, places, sizes
    parts = (high - low + 1).astype(np.int64)
    source = np.repeat(np.arange(len(sizes)), parts)
    number = np.arange(len(source)) - np.repeat(np.cumsum(parts) - parts, parts)  # which part of its copy
    begins = places[source].copy()
    later = number > 0
    begins[later] = edges[(low[source] + number - 1)[later]]
    ends = (places + sizes)[source].copy()
    inner = number < parts[source] - 1
    ends[inner] = edges[(low[source] + number)[inner]]
    return device[source] + (begins - places[source]), begins, ends - begins
