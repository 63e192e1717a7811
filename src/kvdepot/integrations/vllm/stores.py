"""Stores that wait until the output of their step is back, and the blocks that vLLM must keep for them meanwhile.

Used by scheduler.py. Below vLLM's MultiConnector, another connector may load blocks within a step and report a failure
only with the step's output; vLLM then computes them again. Blocks of that step hold garbage, and so does everything
computed from them, by every request that shares them. So nothing is stored before the step that completed it has come
back without a failure. Invariant: no byte is stored from a block that failed to load, or that was computed from one.

vLLM takes blocks that have left a window from their request when it schedules the request's next step, before the store
of what the last step has computed can be sent. So a block of such a group is held, by a reference in vLLM's own pool,
from the step that computes it until the store has ended on every rank, or is dropped. Blocks of other groups stay with
their request, and the request's end waits for its stores. Invariant: each hold is released exactly once.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kvdepot.client.transfer import Transfer
from kvdepot.integrations.vllm.messages import Terms

if TYPE_CHECKING:
    from vllm.lora.request import LoRARequest
    from vllm.v1.core.block_pool import BlockPool

_SHARE = 2
"""Holds take at most one in this many of the engine's blocks; blocks that would exceed that are not stored."""
_PATIENCE_S = 0.1
"""An engine that has too few blocks waits this long for holds to end before it preempts a request: a store takes some
milliseconds, computing a prompt again takes longer."""


class Holds:
    """The blocks held for stores that wait for their step, and for stores that workers have begun."""

    def __init__(self, ranks: int) -> None:
        self._ranks = ranks
        self._pool: BlockPool | None = None
        self._held = 0
        self._moved_at = 0.0  # when the first of these holds began, or the last one ended
        self._sent: dict[int, list[int]] = {}  # held blocks, by the step whose orders had the stores
        self._ended: dict[int, set[int]] = {}  # ranks on which those stores have ended

    def __repr__(self) -> str:
        return f"<Holds {self._held} blocks, {len(self._sent)} steps under way>"

    def bind(self, pool: BlockPool) -> None:
        """vLLM's blocks; without them, nothing can be held."""
        self._pool = pool

    def hide(self, blocks: Iterable[int]) -> None:
        """Take these blocks out of vLLM's own prefix cache: requests that have them keep them, others do not find
        them."""
        if self._pool is not None:
            self._pool.evict_blocks(set(blocks))

    def hold(self, blocks: list[int]) -> bool:
        """Hold these blocks, unless that would be too many. Returns whether they are held."""
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
        """Whether a block is held. Steps end holds, even if they compute nothing."""
        return self._held > 0

    def will_end_soon(self) -> bool:
        """Whether blocks that vLLM lacks may be released in a moment, so that it need not preempt a request."""
        return self._held > 0 and time.monotonic() < self._moved_at + _PATIENCE_S

    def release(self, blocks: list[int]) -> None:
        if blocks:
            assert self._pool is not None
            self._pool.free_blocks([self._pool.blocks[block] for block in blocks])
            self._held -= len(blocks)
            self._moved_at = time.monotonic()

    def send(self, step: int, blocks: list[int]) -> None:
        """The stores that read these blocks go to the workers with this step's orders."""
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


# -- stores


@dataclass(frozen=True)
class WaitingStore:
    """Stores of one request's chunks that a step completes."""

    step: int
    stores: list[Transfer]
    """At least one."""
    read: list[int]
    """Blocks that the request did not compute: they came from vLLM's own cache, or were loaded."""
    computed: list[int]
    """The blocks after `read`, which the request computed."""
    adapter: LoRARequest | None = None
    """The LoRA adapter that computed the blocks."""
    held: list[int] = field(default_factory=list)
    """Blocks to release once the stores have ended or are dropped."""
    is_kept: bool = True
    """Whether the blocks are stored; if not, they are only compared (trust.py)."""
    terms: Terms | None = None
    """The terms on which the blocks of `compared` are compared."""
    compared: list[Transfer] = field(default_factory=list)

    @property
    def request_id(self) -> str:
        return self.stores[0].request_id


class WaitingStores:
    """Stores whose steps have not come back, and those that are ready for the workers.

    Suspect blocks are those that a load failed to fill, and those computed from them. A block stops being suspect when
    a request gets it to compute it again; until then, requests that read it store nothing.
    """

    def __init__(self, holds: Holds) -> None:
        self._holds = holds
        self._waiting: list[WaitingStore] = []
        self._ready: list[WaitingStore] = []
        self._suspect: set[int] = set()

    def __repr__(self) -> str:
        return f"<WaitingStores {len(self._waiting)} wait, {len(self._ready)} ready, {len(self._suspect)} suspect>"

    @property
    def has_suspects(self) -> bool:
        """Whether `check` must be called for each request of a step."""
        return bool(self._suspect)

    def check(self, block_ids: list[int], read: int) -> bool:
        """Whether a request may store what it computes. read: number of its first blocks that it did not compute."""
        self._suspect.difference_update(block_ids[read:])
        return self._suspect.isdisjoint(block_ids[:read]) or self._spread(block_ids[:read], block_ids[read:])

    def overwritten(self, block_ids: Iterable[int]) -> None:
        """A request got these blocks for a load of ours, so they are not suspect any more: if the load fails, they are
        computed again."""
        self._suspect.difference_update(block_ids)

    def _spread(self, read: list[int], computed: list[int]) -> bool:
        first = next(i for i, block_id in enumerate(read) if block_id in self._suspect)
        self._suspect.update(read[first:], computed)
        return False

    def add(self, store: WaitingStore) -> None:
        self._waiting.append(store)

    def adapters(self, step: int) -> Iterator[tuple[str, LoRARequest]]:
        """Requests with a store of a step up to this one, and the LoRA adapter that computed it."""
        for waiting in self._waiting:
            if waiting.step <= step and waiting.adapter is not None:
                yield waiting.request_id, waiting.adapter

    def failed(self, block_ids: set[int]) -> set[str]:
        """Loads of these blocks have failed: drop the stores of the requests that used them, and return their ids."""
        self._suspect |= block_ids
        tainted: set[str] = set()
        while bad := [w for w in self._waiting if not self._suspect.isdisjoint(w.read)]:
            for waiting in bad:
                self._spread(waiting.read, waiting.computed)
                tainted.add(waiting.request_id)
                self.drop(waiting.request_id)
        return tainted

    def ended(self, step: int) -> None:
        """The outputs of steps up to this one are back, and `failed` was told of their failures before."""
        self._ready += [waiting for waiting in self._waiting if waiting.step <= step]
        self._waiting = [waiting for waiting in self._waiting if waiting.step > step]

    def take(self, step: int) -> list[WaitingStore]:
        """The stores that are ready, for the workers' orders of this step."""
        ready, self._ready = self._ready, []
        self._holds.send(step, [block for waiting in ready for block in waiting.held])
        return ready

    def drop(self, request_id: str | None = None) -> None:
        """Drop a request's stores (None: all), because their blocks were reused or must not be trusted."""
        for stores in (self._waiting, self._ready):
            for dropped in [each for each in stores if request_id in (None, each.request_id)]:
                self._holds.release(dropped.held)
                stores.remove(dropped)

    def waits(self, request_id: str) -> bool:
        return any(waiting.request_id == request_id for waiting in self._waiting)
