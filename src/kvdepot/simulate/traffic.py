"""The traffic of a fleet: a trace, or several copies of it at once, with its prompts as runs of blocks.

Called by simulate/fleet.py. A **run** is a longest sequence of blocks that every prompt of the trace has as a whole or
not at all: prompts part or end only between runs. All blocks of a run are therefore used at the same times, and an LRU
cache holds the beginning of a run or nothing of it. A prompt is a few runs, however many blocks it has, which is what
makes millions of requests fast to replay.

**Copies** stand for more users who do the same at other times: no copy has a block or a session of another, and each
begins a little later, all of them within a twentieth of the trace's length.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvdepot.simulate.traces import Trace

__all__ = ["Batch", "Traffic"]

_BATCH = 1 << 16
_SHIFTED = 1 / 20
"""All copies begin within this part of the trace's length."""

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Batch:
    """Consecutive requests; request i has the runs `[ends[i - 1], ends[i])` of `runs`."""

    first: int
    """Requests before this batch."""
    requests: Ints
    """int64[requests]: which request of the trace each is."""
    copies: Ints
    """int64[requests]: of which copy."""
    times: list[float]
    blocks: list[int]
    """Blocks of each request."""
    ends: list[int]
    runs: list[int]
    """Runs of all requests, concatenated; a number means the same run in all batches."""
    sizes: list[int]
    """Blocks of each entry of `runs`."""

    def __iter__(self) -> Iterator[tuple[list[int], list[int], int]]:
        """The runs of each request, the blocks of each run, and the blocks of all."""
        start = 0
        for end, blocks in zip(self.ends, self.blocks, strict=True):
            yield self.runs[start:end], self.sizes[start:end], blocks
            start = end


class Traffic:
    """`copies` of a trace at once, in order of time."""

    def __init__(self, trace: Trace, copies: int = 1) -> None:
        self.trace = trace
        self.copies = copies
        self._blocks = np.diff(trace.ends, prepend=0)
        is_end = _ends_of_runs(trace)
        at = np.flatnonzero(is_end[trace.blocks])
        self._count = int(is_end.sum())
        self._runs = (np.cumsum(is_end) - 1)[trace.blocks[at]]  # int64: of all prompts, concatenated
        self._ends = np.searchsorted(at, trace.ends)  # of each request in `_runs`
        self._sizes = np.zeros(self._count, np.int64)
        self._sizes[self._runs] = np.diff(at, prepend=-1)  # a prompt's first run begins behind another's last one

    def __repr__(self) -> str:
        return f"<Traffic {len(self)} requests, {self.copies} copies of {self._count} runs>"

    def __len__(self) -> int:
        return len(self.trace) * self.copies

    @property
    def seconds(self) -> float:
        """The length of the trace: the time in which a copy makes its requests."""
        times = self.trace.times
        return float(times[-1] - times[0]) if len(times) else 0.0

    def batches(self) -> Iterator[Batch]:
        """All requests, in order."""
        order = self._order()
        starts = np.concatenate(([0], self._ends))
        for first in range(0, len(order), _BATCH):
            copies, requests = np.divmod(order[first : first + _BATCH], len(self.trace))
            counts = self._ends[requests] - starts[requests]
            ends = np.cumsum(counts)
            places = np.repeat(starts[requests] - ends + counts, counts) + np.arange(int(ends[-1]))
            runs = self._runs[places]
            yield Batch(
                first=first,
                requests=requests,
                copies=copies,
                times=(self.trace.times[requests] + self._shift(copies)).tolist(),
                blocks=self._blocks[requests].tolist(),
                ends=ends.tolist(),
                runs=(runs + np.repeat(copies * self._count, counts)).tolist(),
                sizes=self._sizes[runs].tolist(),
            )

    def _order(self) -> Ints:
        """The requests of all copies by time; request r of copy c is number c * len(trace) + r."""
        if self.copies == 1:
            return np.arange(len(self.trace))
        shifts = self._shift(np.arange(self.copies))
        return np.argsort((self.trace.times[None, :] + shifts[:, None]).reshape(-1), kind="stable")

    def _shift(self, copies: Ints) -> npt.NDArray[np.float64]:
        return copies.astype(np.float64) * (self.seconds * _SHIFTED / self.copies)


def _ends_of_runs(trace: Trace) -> npt.NDArray[np.bool_]:
    """bool[unique]: whether a prompt ends with the block, or prompts part behind it."""
    blocks = trace.blocks
    first = np.zeros(len(blocks) + 1, bool)
    first[0] = True
    first[trace.ends] = True
    behind = np.flatnonzero(~first[:-1])
    before = np.full(trace.unique, -1, np.int64)  # the only block that each can stand behind
    before[blocks[behind]] = blocks[behind - 1]
    is_end: npt.NDArray[np.bool_] = np.bincount(before[before >= 0], minlength=trace.unique) != 1
    is_end[blocks[np.flatnonzero(first[1:])]] = True
    return is_end
