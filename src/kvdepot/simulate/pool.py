"""Replays in parallel processes. Called by simulate/replay.py and simulate/capacity.py."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from typing import Any, TypeAlias, TypeVar

__all__ = ["Progress", "processes", "results"]

Shared = TypeVar("Shared")
Item = TypeVar("Item")
Result = TypeVar("Result")

Progress: TypeAlias = Callable[[str, int, int], None]
"""Called with what happens, how much is done, and of how much."""

_shared: list[Any] = []
"""What a process of `results` works with; set when it starts."""

_SAFE_PATH = "PYTHONSAFEPATH"


def processes(asked: int, is_small: bool, items: int) -> int:
    """How many processes to use. asked: by the user, 0 = as many as are worthwhile."""
    return min(asked or (1 if is_small else os.cpu_count() or 1), items)


@contextmanager
def results(
    work: Callable[[Shared, Item], Result], shared: Shared, items: Sequence[Item], jobs: int
) -> Iterator[Iterator[Result]]:
    """`work(shared, item)` of all items, in their order.

    work: with several jobs, a function of a module. shared: sent to each process once.
    """
    if jobs == 1:
        yield (work(shared, item) for item in items)
        return
    before = os.environ.get(_SAFE_PATH, "")
    os.environ[_SAFE_PATH] = "1"  # they import nothing from the working directory; Python 3.10 ignores this
    # Spawned, not forked, because this process may have threads (the progress bar's).
    pool = ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn"), _begin, (shared,))
    try:
        yield pool.map(_work, [(work, item) for item in items])
    except BaseException:  # interrupted: do not wait for the replays
        for process in multiprocessing.active_children():
            process.terminate()
        raise
    finally:
        pool.shutdown(cancel_futures=True)
        os.environ[_SAFE_PATH] = before  # to Python, empty is as not set


def _begin(shared: Any) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles it
    _shared[:] = [shared]


def _work(task: tuple[Callable[[Any, Any], Any], Any]) -> Any:
    work, item = task
    return work(_shared[0], item)
