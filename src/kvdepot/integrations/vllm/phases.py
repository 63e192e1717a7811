"""The phases of a request's load in the scheduler's half, and the one table of what may follow each.

Used by requests.py (`Tracked.enter`) and scheduler.py, in the manner of client/phases.py: a change that the table lacks
is a bug of ours. What a request waits for is its phase, and says what vLLM is told when it asks for the request, what
the request holds, and what ends the wait if nothing else does:

    phase      it waits for                        vLLM is told     holds            at the latest
    LOOKING    vLLM to ask for its lookup          (has not asked)  pins
    AWAITED    the answer to its lookup            None             pins             hurried after the time of computing
    HURRIED    the same, from memory               None             pins             the client's deadline
    FOUND      blocks                              the tokens       pins
    LOADING    workers that load                   (does not ask)   pins, blocks     the worker's deadlines (lane.py)
    LOADED     vLLM to schedule it                 (does not ask)   pins, blocks
    COPYING    the step that copies its load       None             pins, blocks     the step's output
    PROVING    the step that compares its load     (does not ask)   pins, blocks     the step's output
    COMPUTING  nothing: what is left is computed   0                blocks
    GIVEN_UP   nothing, and it never will again    0                blocks

Pins are the server's, for the session of a request that has been looked up; they last until its prompt is stored. A
request is LOADED also where its load has failed. vLLM then may have taken its blocks back, and asks: it computes. One
that vLLM has preempted is LOOKING again. A request is given up where an error, a reset or other weights end its
caching, or where the engine stood still and waited for its lookup (stalls.py).

Why COPYING is a phase: the step that copies may be over long after vLLM has preempted the request, and the chunks must
stay until then. Why FOUND is not left when vLLM is told: blocks may be missing, so vLLM asks in each pass, and where
the server was replaced, the lookup is repeated (AWAITED).
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
