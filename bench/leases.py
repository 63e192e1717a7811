"""Lookups that hit, in a core with 10,000 leases beside a core with none; the floor is the core without.

Both cores have the same chunks, and take turns. No socket, no bytes: what is measured is the deciding thread's work,
from the decoded request to the reply, for a lookup of 32 chunks and the end of its session.
"""

from __future__ import annotations

import time

from common import Scale, say
from report import Figure, at_least

from kvdepot.config import Config
from kvdepot.core.depot import Depot
from kvdepot.core.index.index import Index
from kvdepot.core.index.runs import Run
from kvdepot.eviction import POLICIES
from kvdepot.memory.allocator import PAGE, Allocator
from kvdepot.protocol import wire
from kvdepot.protocol.keys import ROOT

__all__ = ["run"]

_CHUNKS = 32
"""Of one prompt that is looked up."""
_PROMPTS = 64
_MODEL = "m"
_CLIENT = b"one"


class _Alive:
    """The liveness file of a client that lives."""

    name = "alive"
    secret = bytes(16)

    def is_alive(self) -> bool:
        return True

    def has_left(self) -> bool:
        return False

    def close(self, remove: bool) -> None:
        """There is no file."""


def run(scale: Scale, notes: list[str]) -> list[Figure]:
    """One figure: the rate of lookups."""
    say("leases: lookups with and without leases")
    cores = _Core(scale.leases, is_leased=False), _Core(scale.leases, is_leased=True)
    rates: tuple[list[float], list[float]] = [], []
    for number in range(-1, scale.lease_rounds):  # the first warms up
        for which in (0, 1) if number % 2 else (1, 0):
            seconds = cores[which].look_up()
            if number >= 0:
                rates[which].append(_PROMPTS / seconds)
    count, held = cores[1].depot.leases.totals("")
    notes.append(f"leases: {count} hold {held >> 20} MiB")
    return [at_least("lookups a second with 10k leases", "1/s", rates[1], rates[0], 0.95)]


class _Core:
    """A core without a server that has prompts of one chunk, perhaps leased, and those that are looked up."""

    def __init__(self, leases: int, is_leased: bool) -> None:
        pages = 2 * leases + _PROMPTS * _CHUNKS
        index = Index(Allocator(0, pages * PAGE), POLICIES["lru"])
        config = Config(url="ipc:///nowhere", chunk_size=256)
        self.depot = Depot(config, index)
        self.depot.tick(0.0, 1000.0)
        self.depot.welcome(_CLIENT, _Alive())
        self._index = index
        (self._namespace,) = index.namespaces.find_groups(_MODEL, 1, 0, [wire.Group(0, 1, 0, bytes(32))])
        self._namespace.live = 1
        short = [self._store(number, 1) for number in range(leases)]
        self._prompts = [self._store(leases + number, _CHUNKS) for number in range(_PROMPTS)]
        for number, hashes in enumerate(short if is_leased else []):
            self._ask(wire.TakeLease(f"{number}", "retain", _MODEL, 1, 1, hashes, ttl_s=3600))

    def _store(self, number: int, chunks: int) -> bytes:
        index = self._index
        hashes = b"".join((number << 32 | i).to_bytes(32, "little") for i in range(1, chunks + 1))
        for chunk in index.reserve(self._namespace, 0, Run(hashes, PAGE, ROOT, 1), 0).chunks:
            index.seal(chunk, 0)
        return hashes

    def _ask(self, request: wire.Request) -> None:
        (reply,) = self.depot.handle(_CLIENT, b"12345678", request)
        if isinstance(getattr(reply, "value", None), Exception):
            raise RuntimeError(f"{request.__class__.__name__}: {reply}")

    def look_up(self) -> float:
        """Seconds for a lookup of each prompt, and the end of its session."""
        begun = time.perf_counter()
        for hashes in self._prompts:
            self._ask(wire.Lookup(_MODEL, 1, 1, "r", 1, hashes))
            self._ask(wire.EndSession("r"))
        return time.perf_counter() - begun
