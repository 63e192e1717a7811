"""One store, retrieve or comparison of a lane (client/lane.py): its blocks, its places, and how far it is.

    WAITING      its event has not happened: the server is asked nothing
    READY        too many others are at the server: the server is asked nothing yet
    ASKED        the server is placing its chunks
    PLACED       it is copied, slice by slice; the server keeps its places until it is completed
    COMPLETING   the server is told that no byte is copied any more
    ENDED

The phases exist because two sides hold memory for a copy: the engine its blocks, the server its places. An operation
may be given up in any phase, but from ASKED on the server still has to hear its end. So being given up is no phase: the
operation is void, copies nothing more, and goes through COMPLETING like any other. Its future ends before that, as the
engine only has to know that its blocks are free.

The lane changes an operation under its lock. While a slice is copied, only the copying thread changes the operation.
The doubt that stays is a device that hangs in a slice: its blocks never come free, and whoever gives them up waits.
"""

from __future__ import annotations

import enum
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from kvdepot.client.copies import check_places, sums
from kvdepot.client.socket import MessagingFuture
from kvdepot.devices.blocks import BlockMemory, CopyPiece, DeviceEvent
from kvdepot.devices.comparison import compare
from kvdepot.errors import BadRequest, ProtocolError
from kvdepot.memory.extents import Ids, checksum
from kvdepot.protocol import wire
from kvdepot.protocol.keys import HASH_BYTES

if TYPE_CHECKING:
    from kvdepot.memory.arena_view import ArenaView


class BlockIds(NamedTuple):
    """The blocks of one `wire.Shards`: of all its chunks, in order. A load does not write the first `skip` of them."""

    ids: Ids
    skip: int = 0

    @classmethod
    def unpack(cls, packed: bytes, skip: int = 0) -> BlockIds:
        """The blocks with these ids, as little-endian uint32."""
        return cls(np.frombuffer(packed, "<u4").astype(np.intp), skip)


class CopyPhase(enum.Enum):
    """A stage of an operation; the table above says what it waits for."""

    WAITING = enum.auto()
    READY = enum.auto()
    ASKED = enum.auto()
    PLACED = enum.auto()
    COMPLETING = enum.auto()
    ENDED = enum.auto()


AT_SERVER = {CopyPhase.ASKED, CopyPhase.PLACED, CopyPhase.COMPLETING}
NEEDS_SERVER = {CopyPhase.READY, CopyPhase.ASKED, CopyPhase.COMPLETING}


@dataclass(slots=True, eq=False)
class LaneOperation:
    request: wire.Copying
    blocks: BlockMemory
    block_ids: Sequence[BlockIds]
    event: DeviceEvent | None
    future: MessagingFuture[Any]
    since: float
    """When it entered its phase, or was last answered."""
    phase: CopyPhase = CopyPhase.WAITING
    is_void: bool = False  # no byte may be copied any more; its future ends, or has ended, with an error
    placement: wire.Placement | None = None
    pieces: list[CopyPiece] = field(default_factory=list)  # one per place, once the placement was checked
    copied: int = 0  # pieces that were copied
    sums: list[int] = field(default_factory=list)
    differences: list[list[float]] = field(default_factory=list)
    tries: int = 0  # how often its completion was sent
    completion: wire.Complete | None = None

    @property
    def is_load(self) -> bool:
        return isinstance(self.request, wire.Retrieve)

    @property
    def chunk_bytes(self) -> int:
        return self.request.shards[0].blocks * self.blocks.layout.block_bytes

    @property
    def left_bytes(self) -> int:
        """Bytes that are not copied yet, without chunks that the server has said it lacks."""
        chunks = len(self.pieces) or sum(len(part.hashes) // HASH_BYTES for part in self.request.shards)
        return (chunks - self.copied) * self.chunk_bytes

    def check(self) -> None:
        """Raise BadRequest unless each chunk has its number of registered blocks, all different. Only stores of
        different requests may have blocks in common."""
        shards, layout = self.request.shards, self.blocks.layout
        if len(shards) != len(self.block_ids) or not shards:
            raise BadRequest(f"block ids of {len(self.block_ids)} parts for {len(shards)} parts of requests")
        used = []
        for part, (ids, skip) in zip(shards, self.block_ids, strict=True):
            chunks = len(part.hashes) // HASH_BYTES
            if len(ids) != chunks * part.blocks or part.blocks != shards[0].blocks or not len(ids):
                raise BadRequest(f"{len(ids)} block ids for {chunks} chunks of {part.blocks} blocks")
            if ids.min() < 0 or ids.max() >= layout.num_blocks:
                raise BadRequest(f"block ids {ids.min()} to {ids.max()} are not within {layout.num_blocks} blocks")
            if not 0 <= skip < part.blocks or (skip and not self.is_load):
                raise BadRequest(f"a {type(self.request).__name__} cannot skip {skip} of {part.blocks} blocks")
            used.append(ids[skip:])
            if _repeats(used[-1]):
                raise BadRequest(f"block ids of request {part.request[:64]!r} repeat")
        if self.is_load and len(used) > 1 and _repeats(np.concatenate(used)):
            raise BadRequest("two requests retrieve into the same block")

    def pieces_of(self, placement: wire.Placement) -> list[CopyPiece]:
        """The blocks of each place. Raises ProtocolError for chunks that were not asked for."""
        chunks, places = placement.chunks, placement.places
        per_chunk = self.request.shards[0].blocks
        ids = np.concatenate([each.ids for each in self.block_ids]).reshape(-1, per_chunk)
        firsts = itertools.accumulate((len(each.ids) // per_chunk for each in self.block_ids), initial=0)
        skips = dict(zip(firsts, (each.skip for each in self.block_ids), strict=False))
        is_known = all(0 <= chunk < len(ids) for chunk in chunks) and len(set(chunks)) == len(chunks)
        if len(places) != len(chunks) or not chunks or not is_known:
            raise ProtocolError(f"the server has placed chunks {chunks[:8]} of {len(ids)} at {len(places)} places")
        return [
            CopyPiece(place.extents, ids[chunk], skips.get(chunk, 0))
            for chunk, place in zip(chunks, places, strict=True)
        ]

    def copy_slice(self, view: ArenaView) -> None:
        """Copy, or compare, as many of the next chunks as one slice has. view: the arena of its placement. Blocks.

        Raises Unavailable if the server was replaced, ProtocolError for places outside the arena, DeviceError.
        """
        request, blocks, size, placement = self.request, self.blocks, self.chunk_bytes, self.placement
        assert placement is not None
        if not self.pieces:
            check_places(view, placement, size)
            self.pieces = self.pieces_of(placement)
        start, end = self.copied, self.copied + max(1, blocks.task_bytes // size)
        pieces, places = self.pieces[start:end], placement.places[start:end]
        with view.use(extent for piece in pieces for extent in piece.extents):
            if isinstance(request, wire.Compare):
                found = compare(blocks, view, pieces, request.has_experts)
                self.differences += found
                self.sums += [
                    checksum(view.bytes, place.extents, size) if place.is_summed and each != [0.0] else 0
                    for place, each in zip(places, found, strict=True)
                ]
            else:
                blocks.move(view, pieces, isinstance(request, wire.Store))
                self.sums += sums(view, places, size)
        self.copied += len(pieces)


def _repeats(ids: Ids) -> bool:
    """Whether an id occurs twice. `np.unique` would import modules in the step of an engine's first store or load."""
    ordered = np.sort(ids)
    return bool((ordered[1:] == ordered[:-1]).any())
