"""How a fleet's router chooses the host of a request.

Called by simulate/fleet.py. Nothing here is random: what a router draws is a hash of a number, so that a trace is
routed alike on every machine.

| routing | a request goes to |
|---|---|
| `random` | any host |
| `session` | the host of its session, which is any host |
| `prefix` | the host that holds the longest prefix of its prompt, among those that are not overloaded |

`prefix` knows what the hosts hold at this moment, as routers that follow KV events do, and bounds the load as in
consistent hashing with bounded loads (Mirrokni, Thorup, Zadimoghaddam, "Consistent hashing with bounded loads", 2018).
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterable, Iterator
from typing import Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from kvdepot.simulate.memory import Memory
from kvdepot.simulate.traces import Trace
from kvdepot.simulate.traffic import Batch, Ints

__all__ = ["ROUTINGS", "Holders", "Prefix", "Random", "Routing", "Session", "sessions_of"]

Holders: TypeAlias = dict[int, list[int]]
"""Which hosts hold a run or its beginning, by run."""

_SHARED = 0.01
_MOST_TURNS = 64
"""A block that is in more than `_SHARED` of all prompts, and in more than `_MOST_TURNS`, is not of one session."""

_OVERLOAD = 1.25
_SLACK = 8
"""A host is overloaded with more requests than `_OVERLOAD` times the mean, and `_SLACK` more."""
_LOAD_S = 60.0
"""A request counts as load by exp(-age / _LOAD_S)."""

_CANDIDATES = 8
"""Of more hosts with the same run, this many are compared."""


class Routing(Protocol):
    """The interface of a routing."""

    def hosts(self, batch: Batch) -> Iterable[int]:
        """The host of each request; it may depend on what the hosts hold after the requests before it."""


class Random:
    """Any host, for each request anew."""

    def __init__(self, memories: list[Memory], trace: Trace) -> None:
        self._count = len(memories)

    def hosts(self, batch: Batch) -> list[int]:
        """Hosts by a hash of the request's number."""
        return _drawn(np.arange(batch.first, batch.first + len(batch.requests)), self._count)


class Session:
    """One host for all requests of a session."""

    def __init__(self, memories: list[Memory], trace: Trace) -> None:
        self._count = len(memories)
        self._sessions = sessions_of(trace)
        self._most = int(self._sessions.max(initial=-1)) + 1

    def hosts(self, batch: Batch) -> list[int]:
        """Hosts by a hash of the session's number."""
        return _drawn(self._sessions[batch.requests] + batch.copies * self._most, self._count)


class Prefix:
    """The host with the longest prefix that is not overloaded; if no such host has any, the one with the least load."""

    def __init__(self, memories: list[Memory], trace: Trace) -> None:
        self._memories = memories
        self._holders: Holders = {}
        for host, memory in enumerate(memories):
            memory.watch(host, self._holders)
        self._loads = _Loads(len(memories), float(trace.times.min(initial=np.inf)))

    def hosts(self, batch: Batch) -> Iterator[int]:
        """Hosts, each chosen when it is asked for."""
        draws = _mixed(np.arange(batch.first, batch.first + len(batch.requests))).tolist()
        for (runs, _, _), time_s, draw in zip(batch, batch.times, draws, strict=True):
            self._loads.advance(time_s)
            host = self._longest(runs, draw)
            self._loads.add(host)
            yield host

    def _longest(self, runs: list[int], draw: int) -> int:
        loads, most = self._loads.of, self._loads.most()
        for run in reversed(runs):
            holders = self._holders.get(run)
            if holders is None:
                continue
            if len(holders) > _CANDIDATES:
                holders = [holders[(draw + step) % len(holders)] for step in range(_CANDIDATES)]
            fit = [host for host in holders if loads[host] <= most]
            if fit:
                return max(fit, key=lambda host: (self._memories[host].held[run], -loads[host]))
        return self._loads.least()


ROUTINGS: dict[str, Callable[[list[Memory], Trace], Routing]] = {"random": Random, "session": Session, "prefix": Prefix}
"""Routings by name, called with the memory of each host and the trace."""


def sessions_of(trace: Trace) -> Ints:
    """int64[requests]: numbers of the sessions. Where the trace names none, it is the prompt's family.

    Prompts are of one family if their first block is the same that belongs to one session only: one that is in few
    prompts of the trace (see _SHARED). If all of a prompt's blocks are in many, it is the last one.
    """
    found = trace.sessions.copy()
    unnamed = np.flatnonzero(found < 0)
    if not len(unnamed):
        return found
    blocks, ends = trace.blocks, trace.ends
    uses = np.bincount(blocks, minlength=trace.unique)
    own = np.flatnonzero(uses[blocks] <= max(_MOST_TURNS, _SHARED * len(trace)))
    first = np.append(own, len(blocks))[np.searchsorted(own, np.concatenate(([0], ends[:-1])))]
    at = np.minimum(first, ends - 1)  # empty prompts are no family, and wherever they go
    families = blocks[np.maximum(at, 0)].astype(np.int64) if len(blocks) else np.zeros(len(ends), np.int64)
    found[unnamed] = families[unnamed] + int(found.max()) + 1
    return found


class _Loads:
    """Requests of each host within about a minute.

    Instead of letting all loads fade, new requests weigh more and more, and all are scaled down now and then.
    """

    def __init__(self, hosts: int, begin_s: float) -> None:
        """begin_s: when the first request arrives."""
        self.of = [0.0] * hosts
        self._total = 0.0
        self._weight = 1.0
        self._begin_s = begin_s
        self._least = [(0.0, host) for host in range(hosts)]  # a heap; a load may have grown since its entry was made

    def advance(self, time_s: float) -> None:
        """From now on, requests arrive at `time_s`."""
        age = (time_s - self._begin_s) / _LOAD_S
        if age > 20:
            faded = math.exp(-age)
            self.of[:] = [load * faded for load in self.of]
            self._total *= faded
            self._least = sorted((load, host) for host, load in enumerate(self.of))
            self._begin_s, age = time_s, 0.0
        self._weight = math.exp(age)

    def add(self, host: int) -> None:
        self.of[host] += self._weight
        self._total += self._weight

    def most(self) -> float:
        """A host with more load than this is overloaded."""
        return _OVERLOAD * self._total / len(self.of) + _SLACK * self._weight

    def least(self) -> int:
        """The host with the least load."""
        heap = self._least
        while heap[0][0] != self.of[heap[0][1]]:
            heapq.heapreplace(heap, (self.of[heap[0][1]], heap[0][1]))
        return heap[0][1]


def _drawn(numbers: Ints, count: int) -> list[int]:
    """A number below `count` for each of `numbers`."""
    drawn: list[int] = (_mixed(numbers) % np.uint64(count)).tolist()
    return drawn


def _mixed(numbers: Ints) -> npt.NDArray[np.uint64]:
    """Hashes, by SplitMix64 (Steele, Lea, Flood, "Fast splittable pseudorandom number generators", 2014)."""
    mixed = (numbers.astype(np.uint64) + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return mixed ^ (mixed >> np.uint64(31))
