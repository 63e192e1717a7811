"""Traces replayed by several policies at several capacities, in parallel processes."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Callable, Generator
from concurrent.futures import ProcessPoolExecutor
from contextlib import closing
from dataclasses import dataclass, field
from typing import TypeAlias

from kvdepot.simulate.replay import Result, replay
from kvdepot.simulate.traces import Trace

Work: TypeAlias = tuple[int, str, int]
"""Number of a trace, policy, capacity in blocks."""

_SMALL = 300_000
"""Up to this many block references, starting processes costs more than it saves."""


@dataclass(frozen=True)
class Sweep:
    """A trace, the capacities to replay it at, and the results."""

    trace: Trace
    capacities: list[int]
    """Sizes in blocks, ascending."""
    block_bytes: int = 0
    """Bytes of KV per block; 0 = not known."""
    results: dict[tuple[str, int], Result] = field(default_factory=dict)
    """The results by policy and capacity."""


def spread(most: int) -> list[int]:
    """Capacities from a 64th of `most` to `most`, each about twice the one before, rounded."""
    sizes = {most or 1}
    for part in (2, 4, 8, 16, 32, 64):
        each = most // part
        step = 10 ** max(len(str(each)) - 2, 0)
        sizes.add(max(each // step * step, 1))
    return sorted(sizes)


def replay_all(
    sweeps: list[Sweep], policies: list[str], jobs: int | None, progress: Callable[[str, int, int], None]
) -> None:
    """Fill in all results. jobs: processes; None = as many as are worthwhile. progress: called with what has been done,
    how much, and of how much."""
    work = [
        (number, policy, capacity)
        for number, sweep in enumerate(sweeps)
        for policy in policies
        for capacity in sweep.capacities
    ]
    references = [len(sweeps[number].trace.blocks) for number, _, _ in work]
    total, done = sum(references), 0
    jobs = min(jobs or (1 if total < _SMALL else os.cpu_count() or 1), len(work))
    progress("replaying", done, total)
    with closing(_results([sweep.trace for sweep in sweeps], work, jobs)) as found:
        for (number, policy, capacity), size, result in zip(work, references, found, strict=True):
            sweeps[number].results[policy, capacity] = result
            done += size
            progress(f"replayed {policy} with {capacity:,} blocks", done, total)


def _results(traces: list[Trace], work: list[Work], jobs: int) -> Generator[Result]:
    """The result of each piece of work, in order. Its processes end with it, also in the middle of a replay."""
    if jobs == 1:
        yield from (replay(traces[number], policy, capacity) for number, policy, capacity in work)
        return
    os.environ["PYTHONSAFEPATH"] = "1"  # processes import nothing from the working directory; Python 3.10 ignores this
    # Spawned, not forked, because this process may have threads (the progress bar's).
    with ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn"), _begin, (traces,)) as pool:
        try:
            yield from pool.map(_replay_one, work)
        except BaseException:
            for process in multiprocessing.active_children():
                process.terminate()
            raise


_traces: list[Trace] = []


def _begin(traces: list[Trace]) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles it
    _traces[:] = traces


def _replay_one(work: Work) -> Result:
    return replay(_traces[work[0]], *work[1:])
