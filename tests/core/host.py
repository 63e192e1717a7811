"""Depots with tiers behind memory, and what their chunks' bytes are: made up once, and the same when they come back."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import numpy as np

from kvdepot.errors import KVDepotError
from kvdepot.keys import ChunkChain
from kvdepot.memory.allocator import PAGE
from kvdepot.memory.extents import checksum
from kvdepot.protocol import wire
from kvdepot.tiers import Options, Tier, parse
from kvdepot.tiers.codec import SLACK, make_codec
from kvdepot.tiers.format import HEADER_BYTES
from kvdepot.tiers.stamps import Stamps
from kvdepot.tiers.worker import MOST_PARTS, Mover, TierTask
from tests.core.desk import PER_CHUNK, Copying, Desk, layout, lookup
from tests.harness import kind_of

TRUTH: dict[tuple[bytes, int, str, int], bytes] = {}
"""What a chunk's bytes are, on any host: by key, rank, model and KV cache group."""


def truth(key: bytes, rank: int, model: str, group: int) -> bytes:
    seed = key + bytes([rank, group]) + model.encode()
    return TRUTH.setdefault((key, rank, model, group), random.Random(seed).randbytes(PAGE))


class Host(Desk):
    """A desk with tiers; what it wants of them waits in `tier_tasks` until it is run."""

    def __init__(
        self, pages: int = 64, settings: dict[str, Any] | None = None, tiers: Sequence[tuple[str, Tier]] = ()
    ) -> None:
        """tiers: (URL, tier) pairs, nearest first."""
        super().__init__(pages, settings, tiers=[parse(url) for url, _ in tiers])
        self.tiers = tiers
        self.bytes = np.zeros(pages * PAGE, np.uint8)
        self.heads = np.zeros((MOST_PARTS, HEADER_BYTES + SLACK), np.uint8)
        self.stamps = [Stamps(make_codec(Options())) for _ in tiers]
        self.done: list[TierTask] = []
        self.seen: list[bytes] = []  # keys that retrieves brought

    def ensure(self, offset: int, size: int) -> bool:
        return True

    def finish(self, copying: Copying, copied: bool = True, **found: Any) -> None:
        client = self.depot.client(copying.client)
        assert client is not None
        operation = client.operations[copying.placement.operation]
        for (chunk, rank), place in zip(operation.chunks, copying.placement.places, strict=True):
            (start, size), *_ = place.extents
            namespace = chunk.namespace
            data = np.frombuffer(truth(chunk.key, rank, namespace.model, namespace.group), np.uint8)
            if isinstance(copying.request, wire.Store):
                self.bytes[start : start + size] = data
            else:
                assert (self.bytes[start : start + size] == data).all(), "a retrieve brings other bytes"
                self.seen.append(chunk.key)
        super().finish(copying, copied, **found)

    def sum_of(self, place: wire.Place) -> int:
        return checksum(self.bytes, place.extents, PAGE)

    def work(self, tier_task: TierTask | None = None) -> TierTask:
        """Do one tier task, the first unless one is given."""
        tier_task = tier_task or self.tier_tasks[0]
        self.tier_tasks = [other for other in self.tier_tasks if other is not tier_task]
        self.done.append(tier_task)
        outcome: Any
        try:
            stamps = self.stamps[tier_task.tier]
            mover = Mover(self.tiers[tier_task.tier][1], self, make_codec(Options()), self.heads, stamps)
            outcome = mover.run(tier_task, self.depot.wall)
        except KVDepotError as exc:
            outcome = exc
        self.finished(tier_task, outcome)
        return tier_task

    def rest(self) -> None:
        """Let everything end."""
        while self.copies or self.tier_tasks or self.depot.removals:
            self.settle()
            while self.tier_tasks:
                self.work()

    def pass_time(self, seconds: float) -> None:
        self.now += seconds
        self.expire()

    def find(self, client: bytes, request: wire.Request) -> Any:
        """Send, let everything end, tiers too, and give the answer."""
        asked = self.send(client, request)
        self.rest()
        return self.answers[asked]

    def kinds(self) -> list[str]:
        return [kind_of(tier_task) for tier_task in self.tier_tasks]

    def assert_quiet(self) -> None:
        """Nothing is held, waits or is on its way."""
        self.rest()
        self.index.validate()
        assert (self.index.held, self.index.reserved, len(self.depot.tiering.loads)) == (0, 0, 0)
        assert not self.depot.tiering.busy


def new_host(
    *tiers: tuple[str, Tier] | Tier, pages: int = 64, world_size: int = 1, model: str = "m", **more: Any
) -> Host:
    pairs = [tier if isinstance(tier, tuple) else ("disk:///d", tier) for tier in tiers]
    host = Host(pages=pages, settings=more, tiers=pairs)
    host.tick(0.0, 1000.0)
    host.rest()
    host.hello()
    for rank in range(world_size):
        register = wire.Register(rank + 1, layout(), model, world_size, rank, PER_CHUNK)
        assert host.ask(b"one", register) is None
    return host


def look(chain: ChunkChain, request: str = "r", **options: Any) -> wire.Lookup:
    plain = lookup(chain, request, **options)
    return wire.Lookup(
        plain.model, plain.world_size, plain.blocks_in_chunk, request, plain.readers, plain.hashes, True,
        options.get("salt", b""),
    )  # fmt: skip
