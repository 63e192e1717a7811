"""A worker's extension with which one rank's copies are wrong by one bit, as those of a driver that fails may be.

An engine gets it by `worker_extension_cls`. Rank 1 of two writes a wrong byte with each store, into the arena.
"""

from __future__ import annotations

from collections.abc import Sequence

from vllm.distributed.parallel_state import get_tp_group

from kvdepot.devices.blocks import ArenaBytes, CopyPiece
from kvdepot.devices.host import HostBlocks


class WrongCopies:
    """Methods of the worker: none."""


_move = HostBlocks.move


def _move_wrongly(blocks: HostBlocks, arena: ArenaBytes, pieces: Sequence[CopyPiece], is_store: bool) -> None:
    _move(blocks, arena, pieces, is_store)
    if is_store and get_tp_group().rank_in_group == 1:
        arena.bytes[pieces[0].extents[0][0]] ^= 1


HostBlocks.move = _move_wrongly  # type: ignore[method-assign,assignment]
