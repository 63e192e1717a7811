"""Clients that lie: of what they ask for, have copied and register. Typed errors, and nobody else loses anything."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import msgspec
import pytest
import torch
from tools.toy_engine import BLOCK, ToyEngine

from kvdepot.client import MessageQueueClient
from kvdepot.errors import BadRequest, KVDepotError, LayoutError, ProtocolError, UnknownInstance, UnknownRequest
from kvdepot.keys import HASH_BYTES, ROOT
from kvdepot.protocol import wire
from kvdepot.protocol.layout import BlockFormat
from tests.conftest import HANG_S, SHM, Depot, StartDepot, eventually
from tests.faults.conftest import MakeEngine

pytestmark = pytest.mark.faults

FORMAT = BlockFormat(os.urandom(32), 1024)
KEYS = b"".join(b"\xff" + os.urandom(HASH_BYTES - 1) for _ in range(2))  # no sum is wanted of such keys


@dataclass
class Scene:
    """A server with a good engine, and somebody else beside it."""

    depot: Depot
    good: ToyEngine
    client: MessageQueueClient

    def ask(self, request: wire.Request) -> Any:
        return self.client.ask(request).result(HANG_S)

    def digest(self) -> str:
        """Of the arena, and the good engine's blocks."""
        digest = hashlib.blake2b((SHM / self.depot.name).read_bytes())
        for part in self.good.parts:
            digest.update(part.tobytes())
        return digest.hexdigest()


@pytest.fixture(scope="module")
def scene() -> Iterator[Scene]:
    depot = Depot("--max-rate", "1000000", arena_mib=4, chunk_size=64).wait_ready()
    good = ToyEngine(depot.url, context=depot.context)
    for family in range(20):
        assert good.store(family, 3)
    client = MessageQueueClient(depot.url, depot.context)
    client.ask(wire.Register(7, FORMAT)).result(HANG_S)
    eventually(lambda: (SHM / depot.name).stat().st_blocks * 512 >= 4 << 20)  # no page is still to come
    yield Scene(depot, good, client)
    client.close()
    good.close()
    depot.close()


@pytest.fixture(autouse=True)
def nothing_is_touched(scene: Scene) -> Iterator[None]:
    before = scene.digest()
    yield
    assert scene.depot.process.poll() is None, scene.depot.logged()
    assert scene.digest() == before
    status = scene.depot.status()
    assert status["operations"] == status["reserved_shards"] == status["holds"] == 0
    assert scene.good.hits(list(range(20)), 3) == 60
    assert not scene.good.wrong


def shards(**changes: Any) -> wire.Shards:
    good = wire.Shards("request", "hostile", 1, 0, ROOT, 0, KEYS, 4)
    return msgspec.structs.replace(good, **changes)


def test_requests_that_lie_are_refused_whole(scene: Scene) -> None:
    """Others of the kind: tests/core/test_depot.py."""
    lies: list[dict[str, Any]] = [
        {"blocks": 0},
        {"blocks": -1},
        {"blocks": 1 << 62},
        {"hashes": KEYS[:-1]},
        {"rank": -1},
        {"world_size": 1 << 40},
        {"request": "r" * 3_000_000},
    ]
    for lie in lies:
        part = shards(**lie)
        for request in (wire.Store(7, [shards(), part]), wire.Retrieve(7, [part, shards()])):
            with pytest.raises(BadRequest):
                scene.ask(request)
    for number in (-1, -(1 << 63), (1 << 63) - 1):
        with suppress(BadRequest):
            assert scene.ask(wire.Lookup("hostile", number, number, "r", number, KEYS)) == [0, None, [], None]
    with pytest.raises(ProtocolError, match="the limit is"):
        scene.ask(wire.Retrieve(7, [shards(request="r" * 10_000_000)]))


@pytest.mark.parametrize(
    "lie",
    [
        {"sums": []}, {"sums": [0]}, {"sums": [0, 0, 0]}, {"sums": [-1, 0]}, {"sums": [1, 1]},
        {"differences": [[0.0], [0.0]]}, {"sums": [], "copied": False},
    ],
    ids=repr,
)  # fmt: skip
def test_a_store_whose_completion_lies_is_not_stored_and_holds_nothing(scene: Scene, lie: dict[str, Any]) -> None:
    placement = scene.ask(wire.Store(7, [shards()]))
    honest = wire.Complete(placement.operation, placement.boot, True, [0, 0])
    lied = msgspec.structs.replace(honest, **lie)
    if lied.copied:
        with pytest.raises(BadRequest):
            scene.ask(lied)
    else:
        assert scene.ask(lied) is False
    with pytest.raises(UnknownRequest):
        scene.ask(honest)
    assert scene.ask(wire.Lookup("hostile", 1, 4, "r", 2, KEYS)) == [0, None, [], None]


def test_who_completes_what_is_not_its_own_changes_nothing(scene: Scene) -> None:
    """Numbers of operations are those of a client's own requests, so that others use the same."""
    placement = scene.ask(wire.Store(7, [shards()]))
    other = MessageQueueClient(scene.depot.url, scene.depot.context)
    try:
        for number in (placement.operation, placement.operation + 1, 0, -1, 1 << 63):
            with pytest.raises(KVDepotError) as refused:
                other.ask(wire.Complete(number, placement.boot, True, [0, 0])).result(HANG_S)
            assert type(refused.value) in (UnknownRequest, ProtocolError)
        with pytest.raises(UnknownRequest):
            scene.ask(wire.Complete(placement.operation, bytes(8), True, [0, 0]))
        assert scene.depot.status()["operations"] == 1
    finally:
        other.close()
        assert scene.ask(wire.Complete(placement.operation, placement.boot, False)) is False


@pytest.mark.parametrize(
    "lie", [{"block_bytes": size} for size in (0, -1, 1 << 62)] + [{"fingerprint": b""}, {"fingerprint": bytes(33)}],
    ids=repr,
)  # fmt: skip
def test_a_format_that_no_worker_has_is_refused(scene: Scene, lie: dict[str, Any]) -> None:
    with pytest.raises(LayoutError):
        scene.ask(wire.Register(9, msgspec.structs.replace(FORMAT, **lie)))
    with pytest.raises(UnknownInstance):
        scene.ask(wire.Store(9, [shards()]))
    scene.ask(wire.Unregister(9))


def test_a_worker_that_registers_another_block_count_while_it_copies_mixes_nothing(
    start_depot: StartDepot, make_engine: MakeEngine
) -> None:
    depot = start_depot(arena_mib=128, chunk_size=64)
    engine = make_engine(depot, blocks=64, width=1 << 12)  # 1 MiB a chunk
    assert engine.store(1, 4)
    for round_ in range(4):
        count = (32, 64)[round_ % 2]
        store, load = engine.begin_store(10 + round_, 6), engine.begin_retrieve(1, 2)
        before = engine.caches  # they live as long as something is under way in them
        engine.caches = {
            "layer.0": torch.zeros((2, count, BLOCK, 1 << 12), dtype=torch.uint8),
            "layer.1": torch.zeros((count, BLOCK, 2 << 12), dtype=torch.uint8),
        }
        engine.worker.register_kv_caches(engine.caches)
        # What was under way ends in the tensors it began in.
        arrived = engine.end_store(store)
        failed = engine.end_retrieve(load)
        assert not engine.wrong, f"round {round_}"
        assert arrived and failed == 0
        del before
        engine.use(engine.caches)
        assert engine.hits([1], 4) == 4 and engine.hits([10 + round_], 6) == 6
        assert not engine.wrong, f"round {round_}"
    status = depot.status()
    assert status["instances"] == 1 and status["operations"] == status["reserved_shards"] == status["holds"] == 0
