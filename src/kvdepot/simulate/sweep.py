"""`kvdepot simulate`: traces replayed by several policies at several capacities, in parallel processes.

Called by cli/simulate.py. Wrong arguments raise ConfigError with the option's name.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import TypeAlias

from kvdepot.errors import ConfigError
from kvdepot.eviction import POLICIES
from kvdepot.simulate.bounds import BOUNDS
from kvdepot.simulate.plot import Sweep, as_json, check_plot, plot, print_tables
from kvdepot.simulate.replay import Result, replay
from kvdepot.simulate.traces import Trace, load
from kvdepot.values import parse_size

Progress: TypeAlias = Callable[[str, int, int], None]
"""Shows what is done now, how much is done, and of how much."""
Work: TypeAlias = tuple[int, str, int]
"""Number of a trace, policy, capacity in blocks."""

_SMALL = 300_000
"""Up to this many block references, starting processes costs more than it saves."""
_SAFE_PATH = "PYTHONSAFEPATH"


@dataclass(frozen=True)
class Asked:
    """The arguments of `kvdepot simulate`, as typed; None = not given."""

    traces: tuple[str, ...]
    policy: str | None = None
    capacity_blocks: str | None = None
    capacity: str | None = None
    kv_bytes_per_token: str | None = None
    block_tokens: str | None = None
    as_json: bool = False
    plot: str | None = None
    jobs: str | None = None


def run(args: Asked, progress: Callable[[], AbstractContextManager[Progress]]) -> int:
    """Replay traces and print the results; returns the exit code. progress: shows it until the results are printed."""
    known = (*POLICIES, *BOUNDS)
    policies = _split(args.policy) or [*known]
    if unknown := [name for name in policies if name not in known]:
        raise ConfigError(f"unknown policy {unknown[0]!r}; available: {', '.join(known)}")
    if args.capacity is not None and args.kv_bytes_per_token is None:
        raise ConfigError("--capacity needs --kv-bytes-per-token: the KV size of a token")
    blocks = [_count(text, "--capacity-blocks") for text in _split(args.capacity_blocks)]
    sizes = [_size(text, "--capacity") for text in _split(args.capacity)]
    token_bytes = _size(args.kv_bytes_per_token, "--kv-bytes-per-token") if args.kv_bytes_per_token is not None else 0
    tokens = _count(args.block_tokens, "--block-tokens") if args.block_tokens is not None else 0
    jobs = _count(args.jobs, "--jobs") if args.jobs is not None else 0
    if args.plot is not None:
        check_plot(args.plot)

    sweeps = []
    with progress() as update:
        for path in dict.fromkeys(args.traces):
            update(f"reading {path}", 0, 0)
            trace = load(path)
            trace.block_tokens = tokens or trace.block_tokens
            block_bytes = token_bytes * trace.block_tokens
            capacities = sorted({*blocks, *(_fitting(size, block_bytes, path) for size in sizes)})
            sweeps.append(Sweep(trace, capacities or _spread(trace.unique), block_bytes))
        _replay_all(sweeps, policies, jobs, update)

    for sweep in sweeps:
        if not len(sweep.trace):
            print(f"kvdepot: {sweep.trace.name}: contains no requests", file=sys.stderr)
    if args.as_json:
        print(as_json(sweeps, policies), flush=True)
    else:
        print_tables(sweeps, policies)
    return 0 if args.plot is None or plot(sweeps, policies, args.plot) else 1


def _split(text: str | None) -> list[str]:
    """The parts of a list with commas, each once."""
    return list(dict.fromkeys(part.strip() for part in text.split(","))) if text is not None else []


def _count(text: str, option: str) -> int:
    if not (text.isascii() and text.isdigit() and int(text)):
        raise ConfigError(f"{option} takes positive whole numbers, not {text!r}")
    return int(text)


def _size(text: str, option: str) -> int:
    """Bytes of a size with or without a unit; at least 1."""
    try:
        found = round(parse_size(text))
    except (ValueError, OverflowError):
        found = 0
    if found < 1:
        raise ConfigError(f"{option} takes sizes like 64GiB, 500GB or 131072, not {text!r}")
    return found


def _fitting(size_bytes: int, block_bytes: int, path: str) -> int:
    """Blocks of the trace at `path` that fit into `size_bytes`."""
    if not block_bytes:
        raise ConfigError(f"{path}: does not give the tokens per block; use --block-tokens")
    if size_bytes < block_bytes:
        raise ConfigError(f"--capacity: a block of {path} takes {block_bytes} bytes, more than {size_bytes}")
    return size_bytes // block_bytes


def _spread(most: int) -> list[int]:
    """Capacities from a 64th of `most` to `most`, each about twice the one before, rounded."""
    sizes = {most or 1}
    for part in (2, 4, 8, 16, 32, 64):
        each = most // part
        step = 10 ** max(len(str(each)) - 2, 0)
        sizes.add(max(each // step * step, 1))
    return sorted(sizes)


def _replay_all(sweeps: list[Sweep], policies: list[str], jobs: int, progress: Progress) -> None:
    """Fill in all results. jobs: processes; 0 = as many as are worthwhile."""
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
    with _results([sweep.trace for sweep in sweeps], work, jobs) as found:
        for (number, policy, capacity), size, result in zip(work, references, found, strict=True):
            sweeps[number].results[policy, capacity] = result
            done += size
            progress(f"replayed {policy} with {capacity:,} blocks", done, total)


@contextmanager
def _results(traces: list[Trace], work: list[Work], jobs: int) -> Iterator[Iterator[Result]]:
    if jobs == 1:
        yield (replay(traces[number], policy, capacity) for number, policy, capacity in work)
        return
    before = os.environ.get(_SAFE_PATH, "")
    os.environ[_SAFE_PATH] = "1"  # they import nothing from the working directory; Python 3.10 ignores this
    # Spawned, not forked, because this process may have threads (the progress bar's).
    pool = ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn"), _begin, (traces,))
    try:
        yield pool.map(_replay_one, work)
    except BaseException:  # interrupted: do not wait for the replays
        for process in multiprocessing.active_children():
            process.terminate()
        raise
    finally:
        pool.shutdown(cancel_futures=True)
        os.environ[_SAFE_PATH] = before  # to Python, empty is as not set


_traces: list[Trace] = []


def _begin(traces: list[Trace]) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles it
    _traces[:] = traces


def _replay_one(work: Work) -> Result:
    number, policy, capacity = work
    return replay(_traces[number], policy, capacity)
