"""`kvdepot simulate`: hit rate as a function of memory, for traces of requests and each eviction policy.

Called by cli/simulate.py; tests and comparisons of policies call `replay`. It runs the server's own index, allocator
and policies, so the hit rates are those of a server.

**A request** is a lookup and a store, as an engine makes them: the longest cached prefix of its blocks is a hit and is
pinned; the rest is reserved, evicting by the policy, and sealed in order; then the pins are released. A block that
finds no room is dropped with all behind it. Requests do not overlap, and generated tokens are not stored.

A block is one page of an `Allocator` without memory behind it, so the capacity is an exact number of blocks.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np
from blake3 import blake3

from kvdepot.core.index.index import Index
from kvdepot.core.index.outcomes import Reserved
from kvdepot.errors import ConfigError
from kvdepot.eviction import POLICIES
from kvdepot.memory.allocator import PAGE, Allocator
from kvdepot.protocol.keys import HASH_BYTES, ROOT
from kvdepot.simulate.bounds import BOUNDS
from kvdepot.simulate.traces import Request, Trace, load
from kvdepot.values import parse_size

__all__ = ["Asked", "Result", "Sweep", "replay", "run"]

Progress: TypeAlias = Callable[[str, int, int], None]
"""Called with what happens, how much is done, and of how much."""

_SMALL = 300_000
"""Up to this many block references, starting processes costs more than it saves."""


@dataclass(frozen=True)
class Result:
    """The result of a policy on a trace at a capacity."""

    policy: str
    capacity_blocks: int
    requests: int
    block_references: int
    hits: int

    @property
    def hit_rate(self) -> float:
        """Hits divided by block references; 0 if there are none."""
        return self.hits / self.block_references if self.block_references else 0.0


def replay(requests: Iterable[Request] | Trace, policy: str, capacity_blocks: int) -> Result:
    """Send requests through an index of `capacity_blocks` blocks that evicts by `policy`, or compute a bound.

    policy: a name in eviction.POLICIES or bounds.BOUNDS; others raise ConfigError.
    """
    trace = requests if isinstance(requests, Trace) else Trace(requests)
    if capacity_blocks < 1:
        raise ConfigError(f"a capacity must be 1 block or more, not {capacity_blocks}")
    if policy in BOUNDS:
        hits = BOUNDS[policy](trace, capacity_blocks)
    elif policy in POLICIES:
        hits = _hits(trace, Index(Allocator(0, capacity_blocks * PAGE), POLICIES[policy]))
    else:
        raise ConfigError(f"no policy is named {policy!r}; available: {', '.join((*POLICIES, *BOUNDS))}")
    return Result(policy, capacity_blocks, len(trace), len(trace.blocks), hits)


def _hits(trace: Trace, index: Index) -> int:
    namespace = index.namespaces.find("trace", 1, 0, b"", 1)
    # Keys distributed like those of real chunks, because policies may sample by key.
    noise = blake3(b"kvdepot simulate").digest(length=HASH_BYTES * max(trace.unique, 1))
    keys = np.frombuffer(noise, np.uint64).reshape(-1, HASH_BYTES // 8)
    hits = 0
    for blocks in trace:
        hashes = keys[blocks].tobytes()
        pin = index.match(namespace, hashes)
        index.hold(pin.chunks)
        hits += pin.matched
        start = pin.matched * HASH_BYTES
        parent = hashes[start - HASH_BYTES : start] if start else ROOT
        outcomes = index.reserve_missing(namespace, 0, hashes[start:], parent, pin.matched + 1, PAGE)
        reserved = [outcome.chunk for outcome in outcomes if isinstance(outcome, Reserved)]
        for chunk in reserved:
            index.seal(chunk, 0)
        index.touch(reserved)
        index.release(pin.chunks)
    return hits


# -- the command


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


@dataclass(frozen=True)
class Sweep:
    """A trace, the capacities to replay it at, and the results."""

    trace: Trace
    capacities: list[int]
    """In blocks, ascending."""
    block_bytes: int = 0
    """Bytes of KV per block; 0 = not known."""
    results: dict[tuple[str, int], Result] = field(default_factory=dict)
    """By policy and capacity."""


def run(args: Asked, progress: Callable[[], AbstractContextManager[Progress]]) -> int:
    """Replay traces and print the results; returns the exit code. Raises ConfigError for invalid arguments.

    progress: shows the progress until the results are printed.
    """
    from kvdepot.simulate import plot as chart

    policies = _names(args.policy) if args.policy is not None else [*POLICIES, *BOUNDS]
    if args.capacity is not None and args.kv_bytes_per_token is None:
        raise ConfigError("--capacity needs --kv-bytes-per-token: the KV size of a token")
    blocks = [_count(text, "--capacity-blocks") for text in _split(args.capacity_blocks)]
    sizes = [_size(text, "--capacity") for text in _split(args.capacity)]
    token_bytes = 0 if args.kv_bytes_per_token is None else _size(args.kv_bytes_per_token, "--kv-bytes-per-token")
    tokens = 0 if args.block_tokens is None else _count(args.block_tokens, "--block-tokens")
    jobs = 0 if args.jobs is None else _count(args.jobs, "--jobs")
    if args.plot is not None:
        chart.check_plot(args.plot)

    sweeps = []
    with progress() as update:
        for path in dict.fromkeys(args.traces):
            update(f"reading {path}", 0, 0)
            trace = load(path)
            trace.block_tokens = tokens or trace.block_tokens
            block_bytes = token_bytes * trace.block_tokens
            fitting = (_fitting(size, block_bytes, path) for size in sizes)
            sweeps.append(Sweep(trace, sorted({*blocks, *fitting}) or _spread(trace.unique), block_bytes))
        _replay_all(sweeps, policies, jobs, update)

    for sweep in sweeps:
        if not len(sweep.trace):
            print(f"kvdepot: {sweep.trace.name}: contains no requests", file=sys.stderr)
    if args.as_json:
        print(chart.as_json(sweeps, policies), flush=True)
    else:
        chart.print_tables(sweeps, policies)
    return 0 if args.plot is None or chart.plot(sweeps, policies, args.plot) else 1


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
    with _replays([sweep.trace for sweep in sweeps], work, jobs) as results:
        for (number, policy, capacity), size, result in zip(work, references, results, strict=True):
            sweeps[number].results[policy, capacity] = result
            done += size
            progress(f"replayed {policy} with {capacity:,} blocks", done, total)


Work: TypeAlias = tuple[int, str, int]
"""Number of a trace, policy, capacity in blocks."""

_traces: list[Trace] = []
"""The traces in a process of `_replays`; set when it starts."""


@contextmanager
def _replays(traces: list[Trace], work: list[Work], jobs: int) -> Iterator[Iterator[Result]]:
    """Results in the order of `work`."""
    if jobs == 1:
        yield (replay(traces[number], policy, capacity) for number, policy, capacity in work)
        return
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


def _begin(traces: list[Trace]) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles it
    _traces[:] = traces


def _replay_one(work: Work) -> Result:
    number, policy, capacity = work
    return replay(_traces[number], policy, capacity)


def _split(text: str | None) -> list[str]:
    return list(dict.fromkeys(part.strip() for part in text.split(","))) if text is not None else []


def _names(text: str) -> list[str]:
    names = _split(text)
    for name in names:
        if name not in POLICIES and name not in BOUNDS:
            raise ConfigError(f"no policy is named {name!r}; available: {', '.join((*POLICIES, *BOUNDS))}")
    return names


def _count(text: str, option: str) -> int:
    if not (text.isascii() and text.isdigit() and int(text)):
        raise ConfigError(f"{option} takes positive whole numbers, not {text!r}")
    return int(text)


def _size(text: str, option: str) -> int:
    try:
        size = round(parse_size(text))
    except (ValueError, OverflowError):
        size = 0
    if size < 1:
        raise ConfigError(f"{option} takes sizes like 64GiB, 500GB or 131072, not {text!r}")
    return size


def _fitting(size: int, block_bytes: int, path: str) -> int:
    """Blocks that fit into `size` bytes."""
    if not block_bytes:
        raise ConfigError(f"{path}: does not give the tokens per block; use --block-tokens")
    if size < block_bytes:
        raise ConfigError(f"--capacity: a block of {path} takes {block_bytes} bytes, more than {size}")
    return size // block_bytes


def _spread(unique: int) -> list[int]:
    """Capacities from a 64th of all blocks to all of them, each about twice the one before, rounded."""
    sizes = {unique or 1}
    for part in (2, 4, 8, 16, 32, 64):
        size = unique // part
        step = 10 ** max(len(str(size)) - 2, 0)
        sizes.add(max(size // step * step, 1))
    return sorted(sizes)
