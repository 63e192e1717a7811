"""vLLM's passes over its queue: how long a request may wait for us, and what keeps an engine from standing still.

Used by scheduler.py. In each step, vLLM asks us for its waiting requests one by one. It passes by a request if it is
told None, and ends the pass at the first that does not fit into the free blocks. A request whose asynchronous load we
have promised holds blocks while it waits in that queue. vLLM 0.32 and later schedule such requests first. vLLM 0.30
keeps the order of the queue: a request that does not fit stands before a loaded one, forever if nothing else runs, as
only the loaded one could free blocks (vLLM's issue 57841). So:

- If a pass has ended at a request that did not fit, the next pass is for loaded requests: other requests are told None
  until all loaded ones are scheduled.
- An asynchronous load is promised only if its request fits beside the blocks that others need, by upper bounds. Others
  are requests that wait with blocks: none of them could go on otherwise (for windows, vLLM 0.30 to 0.33 reserve too
  few). Others are also requests that were told None before it in the pass, which vLLM would pass by for ever.
- If nothing was computed or loaded for longer than computing a request takes, the request is told 0 instead of None,
  and never waits for its lookup again. No case is known in which this happens; it bounds what a bug can cost.

Invariant: none of these rules waits for time or for the server where a request could be scheduled.
"""

from __future__ import annotations

import time
from collections.abc import Sized
from typing import TYPE_CHECKING

from vllm.logger import init_logger

from kvdepot.integrations.vllm.phases import RequestPhase
from kvdepot.integrations.vllm.requests import Tracked

if TYPE_CHECKING:
    from vllm.config import SchedulerConfig
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.request import Request

    from kvdepot.integrations.vllm.plan import GroupPlan

log = init_logger(__name__)

PATIENCE_S = 0.5
"""The server may take this long for a lookup, or as long as its tiers may if that is longer. After that, a lookup is
hurried, and only then does waiting count as a stall."""
_PAUSED_S = 0.5
"""A vLLM with requests asks again within milliseconds; if it has made no pass for this long, it was paused."""
_MOST_PLACE = 2**31 - 1
_ANSWER_S, _FIRST_ANSWER_S = 0.0005, 0.002
"""A step waits this long for pending lookups, and for those that it asks for the first time, all requests together: the
server may take its time (docs/decisions.md, "Lookups wait for stores in progress"), and the requests that run must
not."""


class Passes:
    """The pass under way, and what earlier ones have left behind."""

    def __init__(self, config: SchedulerConfig) -> None:
        self._config = config
        self._seats = 1  # requests that vLLM may add to those that run
        self.pool: BlockPool | None = None
        self.plan: GroupPlan | None = None
        self._holders: dict[str, tuple[Tracked, int]] = {}  # by request: it, and the blocks that it still needs
        self._asked = ""  # the last request that was told a number; empty once it has its blocks
        self._is_blocked = False  # whether the last pass ended at a request that did not fit
        self._waited_s = 0.0  # waited for lookups in this pass
        self._held, self._held_blocks = 0, 0  # requests that were told None in this pass, and their blocks
        self._has_hurried = False
        self._computing = 0  # the last step that computes, until its output is back
        self._ended_at = 0.0  # when the last pass ended
        self._idle_since: float | None = None  # end of the first pass that only told requests None
        self._has_warned = False

    def __repr__(self) -> str:
        return f"<Passes: {len(self._holders)} wait with blocks, {self._held} without>"

    # -- a request is asked for

    def must_wait(self, request_id: str) -> bool:
        """Whether loaded requests come first. vLLM asks for this one, so it has no blocks (any more)."""
        self._holders.pop(request_id, None)
        return self._is_blocked and any(each.phase is RequestPhase.LOADED for each, _ in self._holders.values())

    def time_for_answer(self, is_first: bool) -> float:
        """The seconds that the step may wait for the answer to a request's lookup. is_first: asked the first time."""
        return max(0.0, (_FIRST_ANSWER_S if is_first else _ANSWER_S) - self._waited_s)

    def waited(self, seconds: float) -> None:
        self._waited_s += seconds

    def is_overdue(self, tracked: Tracked, server_s: float, compute_s: float) -> bool:
        """Whether to hurry the lookup of a request that is AWAITED: it has waited with a seat for as long as computing
        takes (0.0: unknown), or the server may take.

        vLLM asks for all requests that wait, but the time of those counts for which it has a seat. In each pass only
        the first is hurried: others would still have their short answers when their turn comes.
        """
        now, limit_s = time.monotonic(), min(server_s, compute_s or server_s)
        if self._held >= self._seats or tracked.phase is not RequestPhase.AWAITED:
            return False
        tracked.waits_since = tracked.waits_since or now
        if self._has_hurried or now - tracked.waits_since <= limit_s:
            return False
        self._has_hurried = True
        return True

    def may_load(self, request: Request, loaded_tokens: int) -> bool:
        """Whether an asynchronous load leaves the blocks that other requests need: those that were told None before it
        in this pass, and those that hold blocks already."""
        if self.pool is None or not (self._held or self._holders):
            return True
        needed = self._held_blocks + sum(rest for _, rest in self._holders.values())
        return self._need(request, loaded_tokens) + needed <= int(self.pool.get_num_free_blocks())

    def stands_still(self, limit_s: float) -> bool:
        """Whether nothing was computed for `limit_s`, while requests were told None. Then the time begins anew, and the
        request must be told a number."""
        now = time.monotonic()
        is_loading = any(each.phase is RequestPhase.LOADING for each, _ in self._holders.values())
        if is_loading or self._computing or now - self._ended_at > _PAUSED_S:
            self._idle_since = None  # something goes on, or vLLM was paused
        if self._idle_since is None or now - self._idle_since <= limit_s:
            return False
        self._idle_since = None
        if not self._has_warned:
            self._has_warned = True
            log.warning(
                "kvdepot: this engine computed nothing while a request waited for the depot, for longer than computing "
                "it takes, so it is computed. Please report this; further ones are counted (stalls_broken), not logged"
            )
        return True

    def told(self, request: Request, tokens: int | None) -> None:
        """A request was told this number of tokens, or None."""
        if tokens is not None:
            self._asked = request.request_id
            return
        self._held += 1
        self._held_blocks += self._need(request)

    def place(self, request: Request) -> int:
        """The place of a request in vLLM's queue: the request with the lowest place is scheduled first, and of those
        with equal places the earlier one. vLLM puts a preempted request before others of its priority."""
        turn = 2 * request.priority if self._config.policy == "priority" else 0
        return int(max(-_MOST_PLACE, min(turn - (request.num_preemptions > 0), _MOST_PLACE)))

    # -- afterwards

    def given(self, request_id: str) -> None:
        if self._asked == request_id:
            self._asked = ""

    def holds(self, tracked: Tracked, blocks: int) -> None:
        """A request waits for its load with this many blocks."""
        assert tracked.load is not None
        rest = max(0, self._need(tracked.request, tracked.load.end) - blocks)
        self._holders[tracked.request.request_id] = tracked, rest

    def left(self, request_id: str) -> None:
        self._holders.pop(request_id, None)

    def output(self, step: int) -> None:
        """The output of a step is back. step: its number; 0: not known."""
        if not step or step >= self._computing:
            self._computing = 0

    def ended(self, scheduled: Sized, step: int) -> None:
        """A pass has ended, in which this step was scheduled, with these requests."""
        self._ended_at = time.monotonic()
        self._computing = step if scheduled else self._computing
        if scheduled or not self._held:
            self._idle_since = None
        elif self._idle_since is None:
            self._idle_since = self._ended_at
        self._is_blocked, self._asked = bool(self._asked), ""
        self._waited_s, self._held, self._held_blocks, self._has_hurried = 0.0, 0, 0, False
        self._seats = max(1, self._config.max_num_seqs - len(scheduled))

    def _need(self, request: Request, loaded_tokens: int = 0) -> int:
        """The most blocks that a request has at a time. loaded_tokens: first tokens that are loaded, not computed."""
        if self.plan is None:
            return 0
        tokens: int = request.num_tokens
        return self.plan.most_blocks(tokens, min(tokens - loaded_tokens, self._config.max_num_batched_tokens))
