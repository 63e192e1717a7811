"""`kvdepot simulate`: hit rate as a function of memory, for traces of requests and each eviction policy.

Called by cli/simulate.py; tests and comparisons of policies call `replay`. It runs the server's own index, allocator
and policies, so the hit rates are those of a server.

**A request** is a lookup and a store, as an engine makes them: the longest cached prefix of its blocks is a hit and is
pinned; the rest is reserved, evicting by the policy, and sealed in order; then the pins are released. A block that
finds no room is dropped with all behind it. Requests do not overlap, and generated tokens are not stored.

A block is one page of an `Allocator` without memory behind it, so the capacity is an exact number of blocks.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
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
from kvdepot.simulate.arguments import Asked, names, spread
from kvdepot.simulate.bounds import BOUNDS
from kvdepot.simulate.pool import Progress, processes, results
from kvdepot.simulate.traces import Request, Trace, load

__all__ = ["Result", "Sweep", "replay", "run"]

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
        raise ConfigError(f"unknown policy {policy!r}; available: {', '.join((*POLICIES, *BOUNDS))}")
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

    known = (*POLICIES, *BOUNDS)
    policies = names(args.policy, known, "policy") if args.policy is not None else [*known]
    capacities, token_bytes, tokens, jobs = args.capacities(), args.token_bytes, args.tokens, args.processes
    if args.plot is not None:
        chart.check_plot(args.plot)

    sweeps = []
    with progress() as update:
        for path in dict.fromkeys(args.traces):
            update(f"reading {path}", 0, 0)
            trace = load(path)
            trace.block_tokens = tokens or trace.block_tokens
            block_bytes = token_bytes * trace.block_tokens
            sweeps.append(Sweep(trace, capacities.of(block_bytes, path) or spread(trace.unique), block_bytes))
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
    jobs = processes(jobs, total < _SMALL, len(work))
    progress("replaying", done, total)
    with results(_replay_one, [sweep.trace for sweep in sweeps], work, jobs) as found:
        for (number, policy, capacity), size, result in zip(work, references, found, strict=True):
            sweeps[number].results[policy, capacity] = result
            done += size
            progress(f"replayed {policy} with {capacity:,} blocks", done, total)


Work: TypeAlias = tuple[int, str, int]
"""Number of a trace, policy, capacity in blocks."""


def _replay_one(traces: list[Trace], work: Work) -> Result:
    number, policy, capacity = work
    return replay(traces[number], policy, capacity)
