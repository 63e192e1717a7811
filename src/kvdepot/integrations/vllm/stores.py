"""Stores that wait until the output of their step is back, and which of them must be dropped.

Used by scheduler.py. Below vLLM's MultiConnector, another connector may load blocks within a step and report a failure
only with the step's output; vLLM then computes them again. Blocks of that step hold garbage, and so does everything
computed from them, by every request that shares them. So nothing is stored before the step that completed it has come
back without a failure. Invariant: no byte is stored from a block that failed to load, or that was computed from one.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvdepot.client.transfer import Transfer
from kvdepot.integrations.vllm.holds import Holds

if TYPE_CHECKING:
    from vllm.lora.request import LoRARequest

__all__ = ["WaitingStores"]


@dataclass(frozen=True)
class _Waiting:
    step: int
    stores: list[Transfer]
    """Of one request; at least one."""
    read: list[int]
    """Blocks that the request read instead of computing: from vLLM's own cache, or loaded."""
    computed: list[int]
    """The blocks after those."""
    adapter: LoRARequest | None
    held: list[int]
    """Blocks of it that are held (holds.py)."""

    @property
    def request_id(self) -> str:
        return self.stores[0].request_id


class WaitingStores:
    """Stores whose steps have not come back, and those that are ready for the workers.

    Suspect blocks are those that a load failed to fill, and those computed from them. A block stops being suspect when
    a request gets it to compute it anew; until then, requests that read it store nothing.
    """

    def __init__(self, holds: Holds) -> None:
        self._holds = holds
        self._waiting: list[_Waiting] = []
        self._ready: list[_Waiting] = []
        self._suspect: set[int] = set()

    def __repr__(self) -> str:
        return f"<WaitingStores {len(self._waiting)} wait, {len(self._ready)} ready, {len(self._suspect)} suspect>"

    @property
    def has_suspects(self) -> bool:
        """Whether `check` must be called for each request of a step."""
        return bool(self._suspect)

    def check(self, block_ids: list[int], read: int) -> bool:
        """Whether a request may store what it computes. read: how many of its first blocks it did not compute."""
        self._suspect.difference_update(block_ids[read:])
        return self._suspect.isdisjoint(block_ids[:read]) or self._spread(block_ids[:read], block_ids[read:])

    def overwritten(self, block_ids: list[int]) -> None:
        """A request got these blocks for a load of ours, so they are not suspect any more: if that load fails, they are
        computed again."""
        self._suspect.difference_update(block_ids)

    def _spread(self, read: list[int], computed: list[int]) -> bool:
        first = next(i for i, block_id in enumerate(read) if block_id in self._suspect)
        self._suspect.update(read[first:], computed)
        return False

    def add(
        self,
        step: int,
        stores: list[Transfer],
        block_ids: list[int],
        read: int,
        adapter: LoRARequest | None = None,
        held: list[int] | None = None,
    ) -> None:
        """Add the stores of chunks of one request that a step completes.

        block_ids: all blocks of the request up to the end of those chunks, those first that it did not compute; read:
        their number. held: blocks to release once the stores have ended or are dropped.
        """
        self._waiting.append(_Waiting(step, stores, block_ids[:read], block_ids[read:], adapter, held or []))

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
        """Steps up to this one have come back, and their failures were reported before."""
        self._ready += [waiting for waiting in self._waiting if waiting.step <= step]
        self._waiting = [waiting for waiting in self._waiting if waiting.step > step]

    def take(self, step: int) -> list[Transfer]:
        """The stores that are ready, for the workers' orders of this step."""
        ready, self._ready = self._ready, []
        self._holds.send(step, [block for waiting in ready for block in waiting.held])
        return [store for waiting in ready for store in waiting.stores]

    def drop(self, request_id: str) -> None:
        """Drop a request's stores: its blocks were reused, or must not be trusted."""
        self._waiting = self._without(request_id, self._waiting)
        self._ready = self._without(request_id, self._ready)

    def _without(self, request_id: str, all_of_them: list[_Waiting]) -> list[_Waiting]:
        for waiting in all_of_them:
            if waiting.request_id == request_id:
                self._holds.release(waiting.held)
        return [waiting for waiting in all_of_them if waiting.request_id != request_id]

    def waits(self, request_id: str) -> bool:
        return any(waiting.request_id == request_id for waiting in self._waiting)

    def clear(self) -> None:
        """Drop all stores."""
        for waiting in (*self._waiting, *self._ready):
            self._holds.release(waiting.held)
        self._waiting.clear()
        self._ready.clear()
