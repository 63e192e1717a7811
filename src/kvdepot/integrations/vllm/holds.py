"""Blocks that vLLM must not give away while they are being stored, although their request has no more use for them.

Used by the connector's scheduler. vLLM takes blocks that have left a window from their request when it schedules the
request's next step, before the store of what the last step has computed can be sent. So a block of such a group is
held, by a reference in vLLM's own pool, from the step that computes it until the store has ended on every rank, or is
dropped. Blocks of other groups stay with their request, and the request's end waits for its stores. Invariant: each
hold is released exactly once.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.v1.core.block_pool import BlockPool

__all__ = ["Holds"]

_SHARE = 2
"""Holds take at most this fraction (1 / n) of the engine's blocks; what would take more is not stored."""
_PATIENCE_S = 0.1
"""How long an engine that has too few blocks waits for the end of holds before it preempts a request: a store takes
some milliseconds, to compute a prompt again takes longer."""


class Holds:
    """The held blocks: of stores that wait for their step, and of those that workers have begun."""

    def __init__(self, ranks: int) -> None:
        self._ranks = ranks
        self._pool: BlockPool | None = None
        self._held = 0
        self._moved_at = 0.0  # when the first of these holds began, or the last one ended
        self._sent: dict[int, list[int]] = {}  # by the step whose orders had the stores
        self._ended: dict[int, set[int]] = {}  # ranks on which those stores have ended

    def __repr__(self) -> str:
        return f"<Holds {self._held} blocks, {len(self._sent)} steps under way>"

    def bind(self, pool: BlockPool) -> None:
        """vLLM's blocks; without them, nothing can be held."""
        self._pool = pool

    def hold(self, blocks: list[int]) -> bool:
        """Hold these, unless that would be too many."""
        if not blocks:
            return True
        pool = self._pool
        if pool is None or (self._held + len(blocks)) * _SHARE > pool.num_gpu_blocks:
            return False
        pool.touch([pool.blocks[block] for block in blocks])
        if not self._held:
            self._moved_at = time.monotonic()
        self._held += len(blocks)
        return True

    @property
    def is_any_held(self) -> bool:
        """Whether a block is held; steps end that, whether or not they compute anything."""
        return self._held > 0

    def will_end_soon(self) -> bool:
        """Whether blocks that vLLM lacks may be released in a moment, so that it need not preempt a request."""
        return self._held > 0 and time.monotonic() < self._moved_at + _PATIENCE_S

    def release(self, blocks: list[int]) -> None:
        """End a hold of these."""
        if blocks:
            assert self._pool is not None
            self._pool.free_blocks([self._pool.blocks[block] for block in blocks])
            self._held -= len(blocks)
            self._moved_at = time.monotonic()

    def send(self, step: int, blocks: list[int]) -> None:
        """The stores of these go to the workers, with this step's orders."""
        if blocks:
            self._sent[step] = blocks

    def ended(self, steps: Mapping[int, set[int]]) -> None:
        """Stores that went with these steps' orders have ended, on these ranks."""
        for step, ranks in steps.items():
            if step in self._sent:
                by = self._ended.setdefault(step, set())
                by |= ranks
                if len(by) >= self._ranks:
                    del self._ended[step]
                    self.release(self._sent.pop(step))
