"""The steps in which requests begin to use what they have loaded: they copy it (in_step.py), or prove it (trust.py).

Used by scheduler.py. A request is COPYING or PROVING (phases.py) from when the step is built until its output is back.
Invariant: until then, the session of such a request does not end, and no other request finds its unproved blocks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from kvdepot.integrations.vllm.messages import Check, Orders
from kvdepot.integrations.vllm.phases import RequestPhase
from kvdepot.integrations.vllm.plan import GroupPlan
from kvdepot.integrations.vllm.requests import Tracked
from kvdepot.integrations.vllm.stores import Holds
from kvdepot.integrations.vllm.trust import Trust

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import KVConnectorBlockState


class Proofs:
    """The requests of one engine that are COPYING or PROVING in steps under way."""

    def __init__(self, trust: Trust, holds: Holds, plan: GroupPlan, chunk_tokens: int) -> None:
        self._trust, self._holds, self._plan, self._chunk_tokens = trust, holds, plan, chunk_tokens
        self._under_way: list[Tracked] = []

    def hide(self, tracked: Tracked, tables: Sequence[Sequence[int]]) -> None:
        """Let no other request read blocks that a request has loaded, or computes on top of them, before they are
        proved: vLLM has just put all these blocks into its own prefix cache."""
        if tracked.load is not None and tracked.load.is_unproven:
            block_ids, read = self._plan.split(tables, tracked.promise.local_tokens)
            self._holds.hide(block_ids[read:])

    def drop(self, tracked: Tracked) -> None:
        """A request has ended, perhaps before its load was proved."""
        if tracked.load is not None and tracked.load.is_unproven:
            self._holds.hide(tracked.load.blocks)

    def begin(self, step: int, tracked: Tracked) -> bool:
        """This step schedules a request that was waiting. Returns whether the step is to prove its load."""
        load = tracked.load
        if tracked.phase is RequestPhase.GIVEN_UP or (load is not None and load.step):
            return False  # also if an earlier step copies the load, and its output is not back
        if load is None or not (load.is_unproven or tracked.phase is RequestPhase.COPYING):
            tracked.enter(RequestPhase.COMPUTING)
            tracked.load = None
            return False
        load.step = step
        self._under_way.append(tracked)
        if load.is_unproven:
            tracked.enter(RequestPhase.PROVING)
        return load.is_unproven

    def prove(self, orders: Orders, state: KVConnectorBlockState, tracked: Tracked, new_tokens: int) -> None:
        """Have this step prove a request's load, by comparing the chunks behind it that the step completes. If they
        differ, or there are none, the load fails, and vLLM takes back what the step has computed."""
        request, load, terms, size = tracked.request, tracked.load, tracked.check, self._chunk_tokens
        assert load is not None and terms is not None
        check = orders.proofs[self._trust.open(terms)] = Check([], terms.compare, load.blocks)
        end = min(request.num_computed_tokens + new_tokens, request.num_tokens) // size
        chunks = range(load.end // size, min(end, len(tracked.prompt.chain)))
        # A part of the load may have failed: vLLM keeps what is before.
        if chunks and tracked.is_cached and request.num_computed_tokens == load.end:
            pieces = self._plan.to_store(state.resolve_block_ids(request.request_id), chunks, request.num_prompt_tokens)
            check.transfers.extend(tracked.transfer(piece) for piece in pieces)

    def disproved(self, failed: set[int]) -> list[Tracked]:
        """The requests whose loads the last step did not prove. failed: the blocks that have failed in that step."""
        return [
            each
            for each in self._under_way
            if each.phase is RequestPhase.PROVING and each.load is not None and not failed.isdisjoint(each.load.blocks)
        ]

    def ended(self, step: int) -> None:
        begun, self._under_way = self._under_way, []
        for tracked in begun:
            if tracked.load is not None and tracked.load.step > step:
                self._under_way.append(tracked)
            else:
                tracked.enter(RequestPhase.COMPUTING)
                tracked.load = None
