"""Load or compute: how much of a hit the workers load from the depot's memory, and how much the engine computes.

Used by scheduler.py once trust.py has said what may be loaded. An engine is two machines side by side: the lanes of its
workers, which copy, and the model, which computes. A request whose first m of n found tokens are loaded computes the
other n - m, and what it has behind them, once its load has ended and its turn to compute has come:

    first token(m) = max(queue of the lanes + load of m, queue of the model) + computing the rest
    first token(0) =                                     queue of the model  + computing all of it

`soonest` finds the m with the smallest sum. If the lanes take less time for a token than the model, m is n, or 0 where
the queue of the lanes is long. Otherwise m is what the lanes load while the model is busy with other requests, or 0
where that gains little. All times are measured: a worker reports the bytes that its lane has queued, and its time for a
block (`LaneTimes`); the speed of prefill is the engine's own (stats.py). Each request that vLLM schedules adds to one
of the two queues before the next request of the same step is asked for. Invariants: without measurements everything is
loaded. By these times, no first token comes more than `MARGIN` and `LEAST_S` later than by computing alone or by
loading alone.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from vllm.v1.request import Request

    from kvdepot.integrations.vllm.messages import LaneTimes, WorkerReport
    from kvdepot.integrations.vllm.plan import GroupPlan, Piece
    from kvdepot.integrations.vllm.stats import PrefillSpeed

MARGIN, LEAST_S = 0.05, 0.005
"""The machine that is faster for a token does all of a hit, unless another division brings the first token sooner by
this share of its time and by this many seconds. Smaller gains are within the noise of the measurements."""
_RETRY_S = 10.0
"""Seconds without a load after which a request that should compute everything tries the lanes again."""
_MOST_TRIED = 0.05
"""The share of the engine's time that such trials may cost."""


class HitPart(NamedTuple):
    """The prompt's first `tokens` tokens, some of which may be in the engine's own cache. in_step: whether the others
    are loaded within the step that computes the rest of the prompt (in_step.py)."""

    tokens: int
    in_step: bool


class Loadable(NamedTuple):
    """A hit behind the tokens that the engine's own cache has.

    tokens: number of tokens that may be loaded. first, step: a load may end after `first` tokens, and after each `step`
    tokens more; step 0: all are loaded or none. rest: number of the prompt's tokens behind the hit, which are computed
    in any case.
    """

    tokens: int
    first: int
    step: int
    rest: int


class Times(NamedTuple):
    """The times of the two machines, in seconds. lane_s, compute_s: until the slowest lane, and the model, have worked
    off their queues. load_s: to load the whole hit. token_s: to compute one token."""

    lane_s: float
    load_s: float
    compute_s: float
    token_s: float


def first_token_s(hit: Loadable, times: Times, loaded: int) -> float:
    """Seconds until a request has its first token, if this many tokens of its hit are loaded."""
    rest_s = (hit.tokens - loaded + hit.rest) * times.token_s
    if not loaded:
        return times.compute_s + rest_s
    return max(times.lane_s + times.load_s * loaded / hit.tokens, times.compute_s) + rest_s


def soonest(hit: Loadable, times: Times) -> int:
    """The tokens of a hit to load: all where lanes are faster for a token than the model, and none where they are
    slower, unless another part brings the first token clearly sooner."""
    ends = {0, hit.tokens}
    if hit.step and times.load_s > 0:
        # Up to where both queues end together, each token that is loaded saves its computation, and costs nothing.
        together = (times.compute_s - times.lane_s) / times.load_s * hit.tokens
        before = hit.first + int((together - hit.first) // hit.step) * hit.step
        ends.update(end for end in (before, before + hit.step) if 0 < end < hit.tokens)
    took_s, fewest = min((first_token_s(hit, times, end), -end) for end in ends)
    usual = hit.tokens if times.load_s <= hit.tokens * times.token_s else 0
    gain_s = first_token_s(hit, times, usual) - took_s
    return -fewest if gain_s > max(LEAST_S, MARGIN * took_s) else usual


class LoadOrCompute:
    """The two queues of one engine, as its scheduler knows them, and the choice for each hit."""

    def __init__(self, prefill: PrefillSpeed) -> None:
        """prefill: the engine's measured speed of computing."""
        self._prefill = prefill
        self._lanes: dict[int, LaneTimes] = {}  # by rank, reported at `_reported_at`
        self._reported_at = time.monotonic()
        self._retry_at = self._reported_at + _RETRY_S
        self._ordered: dict[int, Counter[int]] = {}  # blocks of each group, by step, that no report counts yet
        self._prefilling: dict[str, Request] = {}  # scheduled requests whose prompts are not computed yet
        self._new: list[Request] = []  # requests that were scheduled since `_left` was counted
        self._left: int | None = None  # tokens that `_prefilling` has left to compute; None: not counted in this step

    def __repr__(self) -> str:
        return f"<LoadOrCompute {self._prefill!r}, {len(self._prefilling)} compute, lanes {self._lanes}>"

    def connect(self, plan: GroupPlan, chunk_tokens: int) -> None:
        self._plan, self._chunk_tokens = plan, chunk_tokens

    def choose(self, request: Request, own: int, most: HitPart) -> HitPart:
        """The part of a load to do. own: number of tokens that the engine's own cache has. most: the part that trust
        allows; its `in_step` says whether the load can happen within a step."""
        size, speed, now = self._chunk_tokens, self._prefill.speed, time.monotonic()
        if most.tokens <= own or not speed or not self._lanes:
            return most
        blocks = self._plan.load_blocks(own // size, -(-most.tokens // size))
        compute_s = self._left_tokens() / speed
        lanes = [(self._queued_s(lane, now), lane.load_s(blocks)) for lane in self._lanes.values()]
        lane_s, load_s = max(lanes, key=sum)
        step = 0 if self._plan.is_bounded else size
        hit = Loadable(most.tokens - own, size - own % size, step, max(1, request.num_tokens - most.tokens))
        times = Times(lane_s, load_s, compute_s, 1 / speed)
        if most.in_step and soonest(hit, times._replace(lane_s=compute_s)) == hit.tokens:
            return most  # the worker copies within the step, once the request's turn to compute has come
        loaded = soonest(hit, times)
        if loaded or now < self._retry_at:
            return HitPart(own + loaded, False)
        loaded = min(hit.first, hit.tokens) if step else hit.tokens
        lost_s = first_token_s(hit, times, loaded) - first_token_s(hit, times, 0)
        self._retry_at = now + max(_RETRY_S, lost_s / _MOST_TRIED)
        return HitPart(own + loaded, False)

    def _left_tokens(self) -> int:
        """Tokens that the model still has to compute: in steps under way, and of scheduled prompts behind them."""
        new = self._prefilling.values() if self._left is None else self._new
        before = self._prefill.under_way if self._left is None else self._left
        self._left = before + sum(max(0, each.num_tokens - each.num_computed_tokens) for each in new)
        self._new = []
        return self._left

    def _queued_s(self, lane: LaneTimes, now: float) -> float:
        """Seconds until a lane has done the loads that it was ordered."""
        ordered = sum(self._ordered.values(), Counter[int]())
        reported_s = max(0.0, lane.queued_s - (now - self._reported_at))
        return reported_s + lane.load_s([ordered[group] for group in range(len(lane.block_s))])

    # -- the queues

    def scheduled(self, request: Request) -> None:
        """vLLM has allocated a request's blocks: it is to compute what it does not load."""
        if self._prefilling.get(request.request_id) is not request:
            self._prefilling[request.request_id] = request
            self._new.append(request)

    def ordered(self, step: int, pieces: Sequence[Piece]) -> None:
        """The lanes are to load these blocks, by the orders of a step."""
        blocks = self._ordered.setdefault(step, Counter())
        for piece in pieces:
            blocks[piece.group] += len(piece.blocks) - piece.skip
        self._retry_at = max(self._retry_at, time.monotonic() + _RETRY_S)

    def built(self) -> None:
        """A step is built: drop the requests that compute no prompt any more, or were preempted."""
        new = {each.request_id for each in self._new}
        self._prefilling = {
            request_id: each
            for request_id, each in self._prefilling.items()
            if request_id in new or (0 < each.num_computed_tokens < each.num_tokens - 1 and not each.is_finished())
        }
        self._new, self._left = [], None

    def reported(self, report: WorkerReport) -> None:
        """The output of a step is back, with the times of the workers' lanes."""
        if report.lanes:
            self._lanes, self._reported_at = report.lanes, time.monotonic()
        self._ordered = {step: blocks for step, blocks in self._ordered.items() if step > report.step}
