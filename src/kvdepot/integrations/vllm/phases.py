"""The phases of a request in the scheduler's half, and the one table of what may follow each.

Used by requests.py (`Tracked.enter`) and scheduler.py, in the manner of client/phases.py: a change that the table lacks
is a bug of ours.

A request lives by two clocks. vLLM asks for it in passes over its queue, and wants a number at once. The server and the
workers answer when they are done. So a request waits for one thing at a time, and that is its phase. The phase alone
says what vLLM is told when it asks, what the request holds, and what ends the wait if nothing else does:

    phase      the request waits for               vLLM is told     it holds         ended at the latest by
    LOOKING    vLLM to ask for it                  (has not asked)  pins
    AWAITED    the answer to its lookup            None             pins             the time of computing: HURRIED
    HURRIED    that answer, from memory alone      None             pins             the client's deadline
    FOUND      free blocks                         the tokens       pins
    LOADING    workers that load its chunks        (does not ask)   pins, blocks     the worker's deadlines (lane.py)
    LOADED     vLLM to schedule it                 (does not ask)   pins, blocks
    COPYING    the step that copies its load       None             pins, blocks     the step's output
    PROVING    the step that compares its load     (does not ask)   pins, blocks     the step's output
    COMPUTING  nothing: the rest is computed       0                blocks
    GIVEN_UP   nothing, and it never will again    0                blocks

Pins are the server's, for the session of a request that has been looked up; they last until its prompt is stored.

- AWAITED and HURRIED are two, because a lookup is hurried once: a server that hangs gets no more time.
- FOUND is not left when vLLM is told the tokens. Blocks may be missing, so vLLM asks again in each pass; and where the
  server was replaced meanwhile, the lookup is repeated (AWAITED).
- LOADED is also the phase after a load that has failed. vLLM may have taken the blocks back then, and asks: the request
  computes.
- COPYING is a phase, although vLLM counts these tokens as computed. The step that copies may be over long after vLLM
  has preempted the request, and until then the chunks must stay.
- GIVEN_UP ends a request's caching: after an error, a reset or other weights, or where the engine stood still and
  waited for its lookup (stalls.py). A preempted request is LOOKING again, but one that is given up stays so.

Two doubts remain. A request under load cannot be given up, as its blocks are being written, so `Tracked.is_cached` says
the same beside the phase until the load has ended. And stores have no phase: a request has several at a time, and they
outlive it, so stores.py follows them by step and block.
"""

from __future__ import annotations

import enum


class RequestPhase(enum.Enum):
    """A stage of a request; the table above says what it waits for."""

    LOOKING = enum.auto()
    AWAITED = enum.auto()
    HURRIED = enum.auto()
    FOUND = enum.auto()
    LOADING = enum.auto()
    LOADED = enum.auto()
    COPYING = enum.auto()
    PROVING = enum.auto()
    COMPUTING = enum.auto()
    GIVEN_UP = enum.auto()


_P = RequestPhase
ASKING = frozenset({_P.LOOKING, _P.AWAITED, _P.HURRIED, _P.FOUND})
"""The phases in which the answer to the lookup counts: no block has been loaded for the request yet."""
IN_STEP = frozenset({_P.COPYING, _P.PROVING})
"""The phases that end with the output of the step that begins them."""
SCHEDULED = IN_STEP | {_P.COMPUTING}

NEXT: dict[RequestPhase, frozenset[RequestPhase]] = {
    _P.LOOKING: frozenset({_P.AWAITED, _P.FOUND, _P.COMPUTING, _P.GIVEN_UP}),
    _P.AWAITED: frozenset({_P.HURRIED, _P.FOUND, _P.COMPUTING, _P.GIVEN_UP}),
    _P.HURRIED: frozenset({_P.FOUND, _P.COMPUTING, _P.GIVEN_UP}),
    _P.FOUND: frozenset({_P.AWAITED, _P.LOADING, _P.COPYING, _P.COMPUTING, _P.GIVEN_UP}),
    _P.LOADING: frozenset({_P.LOADED}),
    _P.LOADED: frozenset({_P.PROVING, _P.COMPUTING}),
    _P.COPYING: frozenset({_P.PROVING, _P.COMPUTING}),
    _P.PROVING: frozenset({_P.COMPUTING}),
    _P.COMPUTING: frozenset({_P.LOOKING, _P.GIVEN_UP}),
    _P.GIVEN_UP: frozenset(),
}
