"""Clients that lie: block ids, ranges, names, layouts. Typed errors, and no byte outside what they own is touched."""

from __future__ import annotations

import hashlib
import os
import socket
import uuid
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from tools.toy_engine import BLOCK, ToyEngine

from kvdepot.adapters import KVCacheHandle
from kvdepot.client import MessageQueueClient
from kvdepot.errors import BadRequest, LayoutError, ProtocolError, UnknownInstance
from kvdepot.keys import HASH_BYTES, ROOT
from kvdepot.protocol import wire
from kvdepot.protocol.layout import Layout, Mapping, Segment, build_layout
from tests.conftest import HANG_S, SHM, Depot, StartDepot, eventually
from tests.faults.conftest import MakeEngine

pytestmark = pytest.mark.faults

BLOCKS = 32
BLOCK_BYTES = 1024
KEYS = os.urandom(2 * HASH_BYTES)


@dataclass
class Scene:
    """A server with a good engine, and somebody else's tensors beside it."""

    depot: Depot
    good: ToyEngine
    client: MessageQueueClient
    tensor: torch.Tensor
    layout: Layout

    def digest(self) -> str:
        """Of the arena, the good engine's files, and the client's own tensors."""
        digest = hashlib.blake2b()
        for path in (SHM / self.depot.name, *(SHM / name for name in self.good.files())):
            digest.update(path.read_bytes())
        digest.update(self.tensor.numpy().tobytes())
        return digest.hexdigest()


@pytest.fixture(scope="module")
def scene() -> Iterator[Scene]:
    depot = Depot("--max-rate", "1000000", arena_mib=4, chunk_size=64).wait_ready()
    good = ToyEngine(depot.url, context=depot.context)
    for family in range(20):
        assert good.store(family, 3)
    client = MessageQueueClient(depot.url, depot.context)
    tensor = torch.randint(0, 256, (BLOCKS, BLOCK_BYTES), dtype=torch.uint8)
    layout = build_layout([KVCacheHandle(tensor, "layer").view], [0])
    client.ask(wire.Register(7, layout)).result(HANG_S)
    eventually(lambda: (SHM / depot.name).stat().st_blocks * 512 >= 4 << 20)  # no page is still to come
    yield Scene(depot, good, client, tensor, layout)
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


def pack(*ids: int) -> bytes:
    return np.array(ids, np.uint32).tobytes()


def shards(**changes: Any) -> wire.Shards:
    good = wire.Shards("request", "hostile", 1, 0, ROOT, 0, KEYS, pack(*range(8)))
    return msgspec.structs.replace(good, **changes)


def test_requests_that_lie_are_refused_whole(scene: Scene) -> None:
    """Others of the kind: tests/core/test_depot.py."""
    lies: list[dict[str, Any]] = [
        {"block_ids": pack(0, 1, 2, 3, 4, 5, 6, BLOCKS)},
        {"block_ids": pack(0, 1, 2, 3, 4, 5, 6, 0xFFFFFFFF)},
        {"block_ids": pack(0, 1, 2, 3, 4, 5, 6, 0)},
        {"skip_blocks": 4},
        {"skip_blocks": -1},
        {"rank": -1},
        {"world_size": 1 << 40},
        {"request": "r" * 3_000_000},
    ]
    for lie in lies:
        part = shards(**lie)
        for request in (wire.Store(7, 1, [shards(), part]), wire.Retrieve(7, [part, shards()])):
            with pytest.raises(BadRequest):
                scene.client.ask(request).result(HANG_S)
    for number in (-1, -(1 << 63), (1 << 63) - 1):
        with suppress(BadRequest):
            assert scene.client.ask(wire.Lookup("hostile", number, number, "r", number, KEYS)).result(HANG_S) == 0
    with pytest.raises(ProtocolError, match="the limit is"):
        scene.client.ask(wire.Retrieve(7, [shards(request="r" * 10_000_000)])).result(HANG_S)


@pytest.fixture
def named(scene: Scene, tmp_path: Path) -> Iterator[Callable[[str], str]]:
    """Names of files that are no tensors of the client's."""
    base = f"kvdepot-test-{uuid.uuid4().hex[:12]}"
    outside = tmp_path / "outside"
    outside.write_bytes(os.urandom(1 << 16))
    target = SHM / base

    names = {
        "a path": str(outside), "a path upwards": f"../..{outside}", "the folder": ".", "the folder above": "..",
        "nothing": "", "a zero byte": "a\0b", "a name of 10 kB": "n" * 10_000, "the arena": scene.depot.name,
        "a liveness file": scene.good.worker.mq_client.liveness.name,
    }  # fmt: skip

    def make(kind: str) -> str:
        match kind:
            case "a FIFO":
                os.mkfifo(target)
            case "a symbolic link":
                target.symlink_to(outside)
            case "a folder":
                target.mkdir()
            case "a socket":
                with socket.socket(socket.AF_UNIX) as listener:
                    listener.bind(str(target))
            case "another user's file":
                target.write_bytes(outside.read_bytes())
                os.chown(target, 12345, 12345)
        return names.get(kind, base)

    before = outside.read_bytes()
    yield make
    assert outside.read_bytes() == before
    if target.is_dir():
        target.rmdir()
    else:
        target.unlink(missing_ok=True)


@pytest.mark.parametrize(
    "kind",
    [
        "a path", "a path upwards", "the folder", "the folder above", "nothing", "a zero byte", "a name of 10 kB",
        "what is not there", "the arena", "a liveness file", "a FIFO", "a symbolic link", "a folder", "a socket",
        "another user's file",
    ],
)  # fmt: skip
def test_a_layout_that_names_what_is_no_tensor_of_the_client_is_refused(
    scene: Scene, named: Callable[[str], str], kind: str
) -> None:
    if kind == "another user's file" and os.geteuid() != 0:
        pytest.skip("needs root, to give a file to somebody else")
    name = named(kind)
    lie = Layout([Mapping(name, 4096)], [Segment(0, 0, 128, 128)], 32, scene.layout.fingerprint)
    try:
        with pytest.raises(LayoutError):
            scene.client.ask(wire.Register(9, lie)).result(HANG_S)
        with pytest.raises(UnknownInstance):
            scene.client.ask(wire.Store(9, 1, [shards()])).result(HANG_S)
    finally:
        scene.client.ask(wire.Unregister(9)).result(HANG_S)


def test_a_client_that_cuts_its_tensors_off_loses_them_and_nobody_else_anything(
    start_depot: StartDepot, make_engine: MakeEngine
) -> None:
    depot = start_depot(arena_mib=16, chunk_size=64)
    good, bad = make_engine(depot), make_engine(depot, model="bad", width=64)
    assert good.store(1, 3) and bad.store(1, 3)
    layer = SHM / bad.files()[-1]
    size = layer.stat().st_size
    os.truncate(layer, 4096)
    client = bad.worker.mq_client
    part = wire.Shards("r", "bad", 1, 0, ROOT, 0, KEYS[:HASH_BYTES], pack(*range(4)))
    assert client.ask(wire.Store(bad.worker.instance_id, 1, [part])).result(HANG_S) is False
    assert depot.process.poll() is None
    assert good.hits([1], 3) == 3 and good.store(2, 3) and good.hits([2], 3) == 3
    assert not good.wrong
    os.truncate(layer, size)


def test_a_worker_that_registers_another_block_count_while_it_copies_mixes_nothing(
    start_depot: StartDepot, make_engine: MakeEngine
) -> None:
    depot = start_depot("--copy-threads", "1", arena_mib=128, chunk_size=64)
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
        with pytest.raises(BadRequest):
            outside = wire.Shards("r", engine.model, 1, 0, ROOT, 0, KEYS[:HASH_BYTES], pack(0, 1, 2, count))
            engine.worker.mq_client.ask(wire.Store(engine.worker.instance_id, 1 << 40, [outside])).result(HANG_S)
        assert engine.hits([1], 4) == 4 and engine.hits([10 + round_], 6) == 6
        assert not engine.wrong, f"round {round_}"
    status = depot.status()
    assert status["instances"] == 1 and status["operations"] == status["reserved_shards"] == status["holds"] == 0
