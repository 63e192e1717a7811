"""A worker's lane on real servers: what it copies and when, and that the server gets its memory back in every case."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import uuid
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from kvdepot.client import lane as lanes
from kvdepot.client.calls import answer
from kvdepot.client.copy_speed import LoadSpeed
from kvdepot.client.lane import Lane
from kvdepot.client.operations import BlockIds
from kvdepot.client.socket import Client, MessagingFuture
from kvdepot.client.transfer import PromptChunks, ShardSpec, Transfer
from kvdepot.devices import describe
from kvdepot.devices.accelerator import AcceleratorBlocks
from kvdepot.devices.blocks import ArenaBytes, CopyPiece
from kvdepot.devices.host import HostBlocks
from kvdepot.errors import (
    BadRequest,
    Busy,
    DeadlineExceeded,
    DeviceError,
    KVDepotError,
    ProtocolError,
    Unavailable,
    UnknownInstance,
)
from kvdepot.memory.extents import Bytes
from kvdepot.protocol import wire
from kvdepot.protocol.layout import Layout, Mapping, Segment, build_layout
from tests.client.engine import Later
from tests.conftest import HANG_S, Depot, StartDepot, eventually, suspend
from tests.programs import run
from tests.server.process import kill

CHUNK, PER_CHUNK, BLOCK_BYTES, BLOCKS = 256, 2, 4096, 256
SLICE = PER_CHUNK * BLOCK_BYTES
"""A slice has one chunk."""


class Blocks(HostBlocks):
    """Blocks of random bytes. While the `gate` is shut, copies wait at it before they begin."""

    task_bytes = SLICE

    def __init__(self, fingerprint: bytes = bytes(32)) -> None:
        size = BLOCKS * BLOCK_BYTES
        numbers = [("float32", BLOCK_BYTES)]
        layout = Layout([Mapping("kv", size)], [Segment(0, 0, BLOCK_BYTES, BLOCK_BYTES)], BLOCKS, fingerprint, numbers)
        self.bytes = np.random.default_rng().random((BLOCKS, BLOCK_BYTES // 4), np.float32).view(np.uint8)
        super().__init__(layout, {"kv": self.bytes.reshape(-1)})
        self.gate = threading.Event()
        self.gate.set()
        self.is_waiting = threading.Event()
        self.moves: list[tuple[bool, list[int]]] = []
        self.followed: list[Bytes] = []  # the bytes of arenas
        self.error: BaseException | None = None

    def move(self, arena: ArenaBytes, pieces: Sequence[CopyPiece], is_store: bool) -> None:
        self.is_waiting.set()
        assert self.gate.wait(HANG_S)
        self.moves.append((is_store, [int(block) for piece in pieces for block in piece.block_ids]))
        if self.error is not None:
            raise self.error
        super().move(arena, pieces, is_store)

    def follow(self, arena: ArenaBytes | None) -> threading.Event:
        self.followed += [] if arena is None else [arena.bytes]
        return super().follow(arena)

    def shut(self) -> None:
        self.is_waiting.clear()
        self.gate.clear()

    def wait_at_gate(self) -> None:
        assert self.is_waiting.wait(HANG_S)

    def of(self, ids: Sequence[int]) -> Bytes:
        return self.bytes[list(ids)].copy()


class Rank:
    """One rank of a model of its own: its client, its lane and its blocks."""

    def __init__(self, depot: Depot) -> None:
        self.client = Client(depot.url, depot.context)
        self.lane = Lane(self.client, f"lane-{uuid.uuid4().hex[:6]}")
        self.blocks = Blocks()
        self.spec = ShardSpec(f"model-{uuid.uuid4().hex[:8]}", 1, 0, CHUNK, PER_CHUNK)
        self.lane.add(1, self.blocks)
        self.register()

    def register(self) -> None:
        (message,) = self.spec.register(1, [self.blocks.layout.format])
        self.client.ask(message).result(HANG_S)

    def shards(self, hashes: bytes, ids: Sequence[int], skip: int = 0) -> tuple[list[wire.Shards], list[BlockIds]]:
        packed = np.array(ids, "<u4").tobytes()
        return self.spec.shards([Transfer("r", b"", 0, hashes, packed)]), [BlockIds.unpack(packed, skip)]

    def store(self, hashes: bytes, first: int = 0, event: Any = None) -> MessagingFuture[Any]:
        """Store chunks from blocks, from `first` on."""
        shards, ids = self.shards(hashes, blocks_from(first, hashes))
        return self.lane.submit(wire.Store(1, shards), ids, event)

    def load(self, hashes: bytes, first: int = 100, skip: int = 0, event: Any = None) -> MessagingFuture[Any]:
        shards, ids = self.shards(hashes, blocks_from(first, hashes), skip)
        return self.lane.submit(wire.Retrieve(1, shards), ids, event)

    def wait_placed(self, count: int) -> None:
        """Return when the server has placed this many operations, while the lane is at the gate."""

        def are_placed() -> bool:
            self.client.pump()
            known = sum(each.phase is lanes.CopyPhase.PLACED for each in list(self.lane._live.values()))
            return known + len(self.lane._answers) >= count

        eventually(are_placed)

    def found(self, hashes: bytes) -> int:
        """Chunks that a lookup finds."""
        lookup = PromptChunks(self.spec, hashes, is_chained=False).probe("l")
        return answer(self.client, lookup, wire.Hit, HANG_S).chunks

    def close(self) -> None:
        self.blocks.gate.set()
        if self.lane.close():
            self.client.close()


def chunks(count: int) -> bytes:
    """Hashes that no other test uses."""
    return os.urandom(32 * count)


def blocks_from(first: int, hashes: bytes) -> list[int]:
    return list(range(first, first + len(hashes) // 32 * PER_CHUNK))


def threads(called: str) -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == called]


def is_idle(depot: Depot) -> bool:
    """Whether the server holds nothing for copies."""
    status = depot.status()
    return status["operations"] == 0 and status["reserved_shards"] == 0


MakeRank = Callable[..., Rank]


@pytest.fixture
def make_rank(depot: Depot, start_depot: StartDepot) -> Iterator[MakeRank]:
    """Ranks that end with the test, before its servers do."""
    with contextlib.ExitStack() as ending:
        yield lambda server=depot: ending.enter_context(contextlib.closing(Rank(server)))


@pytest.fixture
def rank(make_rank: MakeRank) -> Rank:
    return make_rank()


# -- copies


def test_what_is_stored_comes_back_and_skipped_blocks_stay_as_they_were(rank: Rank) -> None:
    hashes = chunks(3)
    kept, before = rank.blocks.of([100]), rank.blocks.of(blocks_from(0, hashes))
    assert rank.load(hashes).result(HANG_S) == [False] * 3
    assert rank.store(hashes).result(HANG_S) is True
    assert rank.store(hashes).result(HANG_S) is True, "there is nothing left to copy"
    assert rank.load(hashes, 100, skip=1).result(HANG_S) == [True] * 3
    assert np.array_equal(rank.blocks.of(range(101, 106)), before[1:])
    assert np.array_equal(rank.blocks.of([100]), kept)
    (other,) = [chunks(1)]
    assert rank.load(hashes[:32] + other + hashes[64:], 200).result(HANG_S) == [True, False, True]
    assert np.array_equal(rank.blocks.of([200, 201, 204, 205]), before[[0, 1, 4, 5]])


def test_parts_of_several_requests_are_copied_by_one_message(rank: Rank) -> None:
    hashes, other = chunks(2), chunks(1)
    stored = [rank.shards(hashes, [4, 5, 6, 7]), rank.shards(other, [9, 8])]
    message = wire.Store(1, [part for parts, _ in stored for part in parts])
    assert rank.lane.submit(message, [ids for _, each in stored for ids in each]).result(HANG_S) is True
    loaded = [rank.shards(other, [20, 21], 1), rank.shards(hashes, [22, 23, 24, 25], 1)]
    kept = rank.blocks.of([20, 22])
    asked = wire.Retrieve(1, [part for parts, _ in loaded for part in parts])
    assert rank.lane.submit(asked, [ids for _, each in loaded for ids in each]).result(HANG_S) == [True] * 3
    assert np.array_equal(rank.blocks.of([21, 23, 24, 25]), rank.blocks.of([8, 5, 6, 7]))
    assert np.array_equal(rank.blocks.of([20, 22]), kept)


def test_checksums_are_those_of_the_arena_and_a_corrupt_chunk_is_not_loaded(
    start_depot: StartDepot, make_rank: MakeRank
) -> None:
    depot = start_depot("--verify", "always")
    rank, hashes = make_rank(depot), chunks(2)
    assert rank.store(hashes).result(HANG_S) is True
    assert rank.load(hashes).result(HANG_S) == [True, True]
    view = rank.lane.arenas.of(*rank.client.arena)
    stored = rank.blocks.of([0, 1]).tobytes()
    where = view.bytes.tobytes().index(stored)
    view.bytes[where + 5] ^= 1
    assert rank.load(hashes, 110).result(HANG_S) == [False, True]
    assert depot.status()["counters"]["corrupt_chunks"] == 1


def test_a_comparison_gives_differences_and_asks_before_the_store_behind_it(rank: Rank) -> None:
    hashes, event = chunks(2), Later()
    shards, ids = rank.shards(hashes, [0, 1, 2, 3])

    def compare(event: Any = None) -> MessagingFuture[Any]:
        return rank.lane.submit(wire.Compare(1, shards, 0.5), ids, event)

    first, stored = compare(event), rank.store(hashes, 0, event)
    event.there = True
    assert first.result(HANG_S)[0] == 0 and stored.result(HANG_S) is True, "none was there before"
    assert compare().result(HANG_S)[:2] == [2, 0.0]
    rank.blocks.bytes.view(np.float32)[2:4] *= 1.01
    count, worst, *_ = compare().result(HANG_S)
    assert count == 2 and worst == pytest.approx(0.01, rel=0.1)


def test_loads_go_before_stores_at_every_slice(rank: Rank) -> None:
    known, hashes = chunks(2), chunks(4)
    assert rank.store(known).result(HANG_S) is True
    rank.blocks.moves.clear()
    rank.blocks.shut()
    stored = rank.store(hashes, 10)
    rank.blocks.wait_at_gate()
    loaded = [rank.load(known, first) for first in (100, 110)]
    rank.wait_placed(3)
    rank.blocks.gate.set()
    assert [each.result(HANG_S) for each in loaded] == [[True] * 2] * 2
    assert stored.result(HANG_S) is True
    assert [is_store for is_store, _ in rank.blocks.moves] == [True, *[False] * 4, *[True] * 3]


def test_a_lane_says_what_its_loads_have_left_and_how_fast_they_were(rank: Rank, monkeypatch: Any) -> None:
    known, now, begun = chunks(3), 0.0, HostBlocks.move

    def move(blocks: HostBlocks, arena: ArenaBytes, pieces: Sequence[CopyPiece], is_store: bool) -> None:
        nonlocal now
        begun(blocks, arena, pieces, is_store)
        now += 2.0 if is_store else 0.5

    monkeypatch.setattr(HostBlocks, "move", move)
    rank.lane._clock = lambda: now
    assert rank.store(known).result(HANG_S) is True
    assert rank.lane.queued_bytes() == 0 and rank.lane.load_speed.bytes_s == 0.0
    rank.blocks.shut()
    loaded = [rank.load(known), rank.load(known[:32], 120), rank.load(known, 130, event=Later())]
    stored = rank.store(chunks(2), 20)
    rank.blocks.wait_at_gate()
    assert rank.lane.queued_bytes() == 7 * SLICE
    rank.blocks.gate.set()
    assert [each.result(HANG_S) for each in loaded[:2]] == [[True] * 3, [True]] and stored.result(HANG_S) is True
    assert rank.lane.queued_bytes() == 3 * SLICE, "it waits for its event"
    rank.lane.give_up(loaded[2:], 0.0)
    assert rank.lane.queued_bytes() == 0 and rank.lane.load_speed.bytes_s == SLICE / 0.5


def test_a_speed_is_that_of_most_bytes_whatever_single_copies_took() -> None:
    speed = LoadSpeed()
    speed.add(8 << 20, 0.001)
    for _ in range(4):
        speed.add(16 << 20, 0.016)
    speed.add(16 << 20, 9.0)  # the machine did something else
    for _ in range(20):
        speed.add(4096, 0.001)
    assert speed.bytes_s == pytest.approx((1 << 20) / 0.001)
    for _ in range(32):
        speed.add(4096, 0.001)
    assert speed.bytes_s == pytest.approx(4096 / 0.001)


def test_more_operations_than_a_server_is_asked_at_once_all_end(rank: Rank) -> None:
    rank.blocks.shut()
    parts = [chunks(1) for _ in range(lanes._MOST_AT_SERVER + 20)]
    stored = [rank.store(each, 2 * (i % 100)) for i, each in enumerate(parts)]
    assert len(rank.lane._ready[False]) == 20
    rank.blocks.gate.set()
    assert all(each.result(HANG_S) for each in stored)
    assert all(rank.load(each).result(HANG_S) == [True] for each in parts)
    assert not rank.lane._live and not rank.lane._at_server.total()


def test_blocks_of_an_accelerator_take_the_same_lane(rank: Rank) -> None:
    tensor = torch.randint(0, 256, (BLOCKS, BLOCK_BYTES), dtype=torch.uint8)
    layout = build_layout([describe(tensor, "layer")], [0])
    storages = {layout.mappings[0].name: tensor.untyped_storage()}
    blocks = AcceleratorBlocks(layout, storages, torch.device("cpu"))
    rank.lane.add(7, blocks)
    (message,) = rank.spec.register(7, [layout.format])
    rank.client.ask(message).result(HANG_S)
    shards, ids = rank.shards(chunks(3), range(3, 9))
    assert rank.lane.submit(wire.Store(7, shards), ids).result(HANG_S) is True
    kept = tensor[50].clone()
    _, targets = rank.shards(chunks(3), range(50, 56), 1)
    assert rank.lane.submit(wire.Retrieve(7, shards), targets).result(HANG_S) == [True] * 3
    assert torch.equal(tensor[51:56], tensor[4:9]) and torch.equal(tensor[50], kept)
    assert rank.lane.submit(wire.Compare(7, shards, 0.5), ids).result(HANG_S)[:2] == [3, 0.0]
    blocks.close()


# -- before the first copy


@pytest.mark.faults
def test_the_processors_blocks_follow_each_arena_before_a_copy_and_a_devices_with_it(
    start_depot: StartDepot, make_rank: MakeRank
) -> None:
    depot, on_device = start_depot(), Blocks()
    rank = make_rank(depot)
    on_device.device = torch.device("cpu")
    rank.lane.add(2, on_device)
    eventually(lambda: rank.blocks.followed)
    kill(depot)
    start_depot(url=depot.url, name=depot.name)
    eventually(lambda: len(rank.blocks.followed) == 2)
    assert rank.blocks.moves == on_device.followed == []
    assert rank.store(chunks(1)).result(HANG_S) is True
    assert len(rank.blocks.followed) == 2 and len(on_device.followed) == 1


def test_a_workers_first_store_load_and_comparison_import_no_module(depot: Depot) -> None:
    """They run in an engine's steps, and an import takes tens of milliseconds."""
    code = f"""
import sys
from types import SimpleNamespace
import torch, zmq
from kvdepot.devices.self_test import test_blocks
from kvdepot.protocol import wire
from tests.client.test_lane import HANG_S, Rank, chunks
rank = Rank(SimpleNamespace(url={depot.url!r}, context=zmq.Context()))
test_blocks([rank.blocks])
before = set(sys.modules)
hashes = chunks(2)
assert rank.store(hashes).result(HANG_S) is True
assert rank.load(hashes).result(HANG_S) == [True, True]
shards, ids = rank.shards(hashes, [0, 1, 2, 3])
assert rank.lane.submit(wire.Compare(1, shards, 0.5), ids).result(HANG_S)[:2] == [2, 0.0]
print(sorted(set(sys.modules) - before))
rank.close()
"""
    assert run(sys.executable, "-c", code, cwd=Path(__file__).parents[2]) == "[]\n"


# -- what is refused

WRONG: dict[str, tuple[type[wire.Store | wire.Retrieve], list[BlockIds]]] = {
    "too few": (wire.Store, [BlockIds(np.arange(3))]),
    "of another part": (wire.Store, [BlockIds(np.arange(4)), BlockIds(np.arange(4, 8))]),
    "outside": (wire.Store, [BlockIds(np.array([0, 1, 2, BLOCKS]))]),
    "negative": (wire.Store, [BlockIds(np.array([0, 1, 2, -1]))]),
    "repeated": (wire.Store, [BlockIds(np.array([0, 1, 2, 1]))]),
    "skipped by a store": (wire.Store, [BlockIds(np.arange(4), 1)]),
    "skipped chunk": (wire.Retrieve, [BlockIds(np.arange(4), PER_CHUNK)]),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_blocks_that_do_not_fit_are_refused_and_nothing_is_asked(rank: Rank, wrong: str) -> None:
    kind, ids = WRONG[wrong]
    hashes = chunks(2)
    with pytest.raises(BadRequest):
        rank.lane.submit(kind(1, rank.shards(hashes, range(4))[0]), ids).result(0.0)
    assert not rank.lane._live and rank.found(hashes) == 0


def test_one_block_for_two_requests_and_a_message_without_any_are_refused(rank: Rank) -> None:
    shards, _ = rank.shards(chunks(2), range(4))
    with pytest.raises(BadRequest, match="the same block"):
        rank.lane.submit(wire.Retrieve(1, shards * 2), [BlockIds(np.arange(4)), BlockIds(np.arange(3, 7))]).result(0.0)
    with pytest.raises(BadRequest):
        rank.lane.submit(wire.Store(1, []), []).result(0.0)


def test_more_operations_than_may_wait_are_refused(rank: Rank, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lanes, "_MOST_WAITING", 2)
    event = Later()
    waiting = [rank.store(chunks(1), 0, event) for _ in range(2)]
    with pytest.raises(Busy):
        rank.store(chunks(1), 0, event).result(0.0)
    event.there = True
    assert all(each.result(HANG_S) for each in waiting)


def test_a_converter_that_fails_ends_its_future_and_the_lane_goes_on(rank: Rank) -> None:
    def convert(value: object) -> bool:
        raise AttributeError("a bug")

    shards, ids = rank.shards(chunks(1), [0, 1])
    with pytest.raises(ProtocolError, match="a bug"):
        rank.lane.submit(wire.Store(1, shards), ids, None, convert).result(HANG_S)
    assert rank.store(chunks(1)).result(HANG_S) is True


# -- events


def test_nothing_is_copied_before_its_event_and_no_load_waits_for_anothers(rank: Rank) -> None:
    hashes, event = chunks(1), Later()
    stored = rank.store(hashes, 0, event)
    assert event.asked.wait(HANG_S)
    assert rank.load(chunks(1)).result(HANG_S) == [False]
    rank.blocks.bytes[:2] = 7
    assert not stored.query() and rank.blocks.moves == []
    event.there = True
    assert stored.result(HANG_S) is True
    assert rank.load(hashes).result(HANG_S) == [True]
    assert (rank.blocks.of([100, 101]) == 7).all()


def test_an_event_that_breaks_or_is_none_fails_its_operations_alone(rank: Rank) -> None:
    later = Later()
    broken = rank.store(chunks(1), 0, Later(RuntimeError("CUDA error: an illegal memory access was encountered")))
    refused = rank.store(chunks(1), 0, Later(DeviceError("the GPU has fallen off the bus")))
    none = rank.store(chunks(1), 0, "soon")
    fine = rank.store(chunks(1), 0, later)
    later.there = True
    with pytest.raises(KVDepotError, match="illegal memory access"):
        broken.result(HANG_S)
    with pytest.raises(DeviceError, match="off the bus"):
        refused.result(HANG_S)
    with pytest.raises(BadRequest, match="not an event"):
        none.result(HANG_S)
    assert fine.result(HANG_S) is True


def test_operations_of_one_event_ask_it_once_a_round(rank: Rank) -> None:
    event = Later()
    rank.blocks.shut()
    first = rank.store(chunks(1))  # the lane asks no event while it copies
    rank.blocks.wait_at_gate()
    stored = [rank.store(chunks(1), 0, event) for _ in range(50)]
    event.there = True
    rank.blocks.gate.set()
    assert all(each.result(HANG_S) for each in [first, *stored])
    assert event.queries == 1


def test_an_event_that_does_not_happen_in_time_fails_its_operation(rank: Rank, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lanes, "EVENT_S", 0.05)
    hashes = chunks(1)
    with pytest.raises(DeadlineExceeded, match="event"):
        rank.store(hashes, 0, Later()).result(HANG_S)
    assert rank.found(hashes) == 0 and rank.blocks.moves == []


def test_an_idle_lane_sleeps(rank: Rank) -> None:
    """It does not wake an engine that has nothing to do a thousand times a second."""
    assert rank.store(chunks(1)).result(HANG_S) is True
    (thread,) = threads(rank.lane._called)

    def switches() -> int:
        status = Path(f"/proc/self/task/{thread.native_id}/status").read_text()
        return sum(int(line.split()[1]) for line in status.splitlines() if "ctxt_switches" in line)

    before = -1

    def settled() -> bool:
        nonlocal before
        last, before = before, switches()
        threading.Event().wait(0.05)
        return switches() == before == last

    eventually(settled)


def test_the_lane_uses_all_processors_though_its_engine_is_bound_to_one(depot: Depot, make_rank: MakeRank) -> None:
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(before)})
    try:
        rank = make_rank()
        assert rank.store(chunks(1)).result(HANG_S) is True
        (thread,) = threads(rank.lane._called)
        assert os.sched_getaffinity(thread.native_id or 0) == before
    finally:
        os.sched_setaffinity(0, before)


# -- giving up


def test_what_is_given_up_before_its_event_is_never_copied(rank: Rank) -> None:
    hashes, event = chunks(2), Later()
    stored, loaded = rank.store(hashes, 0, event), rank.load(hashes, 100, 0, event)
    assert rank.lane.give_up([stored, loaded], 0.0) == 2
    for each in (stored, loaded):
        with pytest.raises(KVDepotError, match="given up"):
            each.result(0.0)
    event.there = True
    assert rank.store(chunks(1), 10).result(HANG_S) is True
    assert rank.found(hashes) == 0 and rank.blocks.moves == [(True, [10, 11])]
    assert rank.lane.give_up([stored, loaded], 0.0) == 0


def test_who_gives_up_waits_for_what_ends_in_time(rank: Rank) -> None:
    hashes, event = chunks(2), Later()
    stored = rank.store(hashes, 0, event)
    event.there = True
    assert rank.lane.give_up([stored], HANG_S) == 0
    assert stored.result(0.0) is True and rank.found(hashes) == 2


@pytest.mark.parametrize("is_store", [True, False], ids=["store", "load"])
def test_a_slice_that_is_being_copied_is_waited_for_and_no_other_follows(
    depot: Depot, rank: Rank, is_store: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(lanes, "_COMPLAIN_S", 0.02)
    hashes, behind = chunks(3), chunks(1)
    if not is_store:
        assert rank.store(hashes).result(HANG_S) is True
        rank.blocks.moves.clear()
    rank.blocks.shut()
    operation = rank.store(hashes) if is_store else rank.load(hashes)
    rank.blocks.wait_at_gate()
    waiting = rank.store(behind, 50)
    voided: list[int] = []
    giving_up = threading.Thread(target=lambda: voided.append(rank.lane.give_up([operation, waiting], 0.0)))
    giving_up.start()
    eventually(waiting.query)
    eventually(lambda: "does the device hang?" in caplog.text)
    assert giving_up.is_alive() and not operation.query(), "the engine would write to blocks that are being read"
    rank.blocks.gate.set()
    giving_up.join(HANG_S)
    assert voided == [2] and len(rank.blocks.moves) == 1
    for each in (operation, waiting):
        with pytest.raises(KVDepotError, match="given up"):
            each.result(0.0)
    eventually(lambda: is_idle(depot))
    assert rank.found(hashes) == (0 if is_store else 3) and rank.found(behind) == 0
    assert rank.store(behind, 50).result(HANG_S) is True, "what was given up can be stored later"


@pytest.mark.faults
def test_a_silent_server_fails_operations_and_later_gets_its_memory_back(
    start_depot: StartDepot, make_rank: MakeRank, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lanes, "ANSWER_S", 0.1)
    depot = start_depot()
    rank = make_rank(depot)
    parts = [chunks(1) for _ in range(lanes._MOST_AT_SERVER + 5)]
    suspend(depot.process.pid)
    stored = [rank.store(each) for each in parts]
    for each in stored:
        with pytest.raises(DeadlineExceeded, match="did not answer"):
            each.result(HANG_S)
    assert not rank.lane._ready[False], "what was never asked must not be kept"
    monkeypatch.setattr(lanes, "ANSWER_S", 60.0)
    os.kill(depot.process.pid, signal.SIGCONT)
    eventually(lambda: not rank.lane._live and is_idle(depot))
    assert not any(map(rank.found, parts)) and rank.blocks.moves == []
    assert rank.store(parts[0]).result(HANG_S) is True


# -- devices that fail


@pytest.mark.parametrize("kind", [DeviceError, RuntimeError, SystemExit])
def test_a_copy_that_fails_ends_its_operation_and_the_server_gets_its_memory_back(
    depot: Depot, rank: Rank, kind: type[BaseException]
) -> None:
    hashes = chunks(2)
    rank.blocks.error = kind("no more")
    with pytest.raises(KVDepotError, match="no more"):
        rank.store(hashes).result(HANG_S)
    rank.blocks.error = None
    eventually(lambda: is_idle(depot))
    assert rank.found(hashes) == 0
    assert rank.store(hashes).result(HANG_S) is True
    rank.blocks.error = kind("no more")
    with pytest.raises(KVDepotError, match="no more"):
        rank.load(hashes).result(HANG_S)
    eventually(lambda: is_idle(depot))


def test_a_bug_of_the_lane_ends_what_it_had_to_do_and_nothing_after_it(
    depot: Depot, rank: Rank, monkeypatch: pytest.MonkeyPatch
) -> None:
    rank.blocks.shut()
    hashes = chunks(2)
    stored, waiting = rank.store(hashes), rank.store(chunks(1), 0, Later())
    rank.blocks.wait_at_gate()
    turn, burst = rank.lane._next_placed, threading.Event()

    def next_placed() -> Any:
        if not burst.is_set():
            burst.set()
            raise ValueError("a bug")
        return turn()

    monkeypatch.setattr(rank.lane, "_next_placed", next_placed)
    rank.blocks.gate.set()
    for each in (stored, waiting):
        with pytest.raises(KVDepotError, match="a bug"):
            each.result(HANG_S)
    eventually(lambda: is_idle(depot))
    assert rank.found(hashes) == 0 and rank.store(hashes).result(HANG_S) is True


# -- servers that end


def test_a_completion_that_a_busy_server_refuses_is_sent_again(start_depot: StartDepot, make_rank: MakeRank) -> None:
    depot = start_depot("--max-rate", "1000")
    rank = make_rank(depot)
    rank.blocks.shut()
    stored = rank.store(chunks(1))
    rank.blocks.wait_at_gate()
    flood = [rank.client.ask(wire.Noop()) for _ in range(1100)]
    with pytest.raises(Busy):
        flood[-1].result(HANG_S)
    rank.blocks.gate.set()
    assert stored.result(HANG_S) is True


@pytest.mark.faults
@pytest.mark.parametrize("has_successor", [True, False], ids=["with a successor", "without"])
@pytest.mark.parametrize("step", ["asked", "placed", "copying", "completing"])
def test_a_server_that_is_killed_at_any_step_fails_the_copy_and_nothing_else(
    start_depot: StartDepot, make_rank: MakeRank, step: str, has_successor: bool
) -> None:
    depot = start_depot()
    rank, known, hashes = make_rank(depot), chunks(1), chunks(2)
    assert rank.store(known, 40).result(HANG_S) is True
    rank.blocks.shut()
    if step == "asked":
        suspend(depot.process.pid)
        operations = [rank.store(hashes), rank.load(known)]
    elif step == "placed":
        holding = rank.load(known, 60)  # the lane is at the gate with this one
        rank.blocks.wait_at_gate()
        operations = [rank.store(hashes), rank.load(known)]
        rank.wait_placed(3)
    else:
        operations = [rank.load(known), rank.store(hashes)]
        rank.blocks.wait_at_gate()
        rank.wait_placed(2)
        operations.reverse()
    if step == "completing":
        suspend(depot.process.pid)
        rank.blocks.gate.set()
        eventually(lambda: all(each.phase is lanes.CopyPhase.COMPLETING for each in list(rank.lane._live.values())))
    kill(depot)
    if has_successor:
        start_depot(url=depot.url, name=depot.name)
    rank.blocks.gate.set()
    outcomes: list[Any] = []
    for each in operations:
        try:
            outcomes.append(each.result(HANG_S))
        except KVDepotError as exc:
            outcomes.append(exc)
    if step == "placed":
        with contextlib.suppress(KVDepotError):
            holding.result(HANG_S)
    stored, loaded = outcomes
    if has_successor and step == "asked":  # it is asked anew, unless that took too long to start
        assert stored is True or isinstance(stored, KVDepotError)
        assert loaded == [True] or isinstance(loaded, KVDepotError)
    else:
        assert stored is False or isinstance(stored, KVDepotError)
        assert isinstance(loaded, KVDepotError)
    eventually(lambda: not rank.lane._live)
    if not has_successor:
        depot = start_depot(url=depot.url, name=depot.name)
    again = chunks(1)
    eventually(lambda: succeeds(rank.store(again, 70)))
    assert rank.load(again, 80).result(HANG_S) == [True]
    assert np.array_equal(rank.blocks.of([80, 81]), rank.blocks.of([70, 71]))


def succeeds(future: MessagingFuture[Any]) -> bool:
    with contextlib.suppress(KVDepotError):
        return bool(future.result(HANG_S))
    return False


# -- the end


def test_closing_ends_everything_and_waits_for_the_slice_that_is_copied(depot: Depot, rank: Rank) -> None:
    rank.blocks.shut()
    hashes = chunks(3)
    operations = [rank.store(hashes), rank.store(chunks(1), 10), rank.store(chunks(1), 0, Later())]
    rank.blocks.wait_at_gate()
    closed: list[bool] = []
    closing = threading.Thread(target=lambda: closed.append(rank.lane.close()))
    closing.start()
    eventually(operations[2].query)
    assert closing.is_alive()
    rank.blocks.gate.set()
    closing.join(HANG_S)
    assert closed == [True] and rank.lane.close()
    for each in [*operations, rank.store(chunks(1))]:
        with pytest.raises(Unavailable):
            each.result(0.0)
    assert len(rank.blocks.moves) == 1 and not threads(rank.lane._called)
    with pytest.raises(Unavailable):
        rank.lane.add(2, Blocks())
    assert rank.found(hashes) == 0
    rank.client.close()
    eventually(lambda: is_idle(depot))


def test_closing_while_a_device_hangs_says_so(
    rank: Rank, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(lanes, "_CLOSE_S", 0.05)
    rank.blocks.shut()
    rank.store(chunks(1))
    rank.blocks.wait_at_gate()
    assert rank.lane.close() is False
    assert "does the device hang?" in caplog.text
    rank.blocks.gate.set()
    eventually(rank.lane.close)


def test_a_client_that_is_closed_below_its_lane_ends_all_operations(rank: Rank) -> None:
    waiting = rank.store(chunks(1), 0, Later())
    rank.client.close()
    with pytest.raises(Unavailable):
        waiting.result(HANG_S)
    eventually(lambda: not threads(rank.lane._called))
    with pytest.raises(Unavailable):
        rank.store(chunks(1)).result(0.0)


def test_blocks_that_are_removed_are_copied_no_more(depot: Depot, rank: Rank) -> None:
    hashes, event = chunks(2), Later()
    stored = rank.store(hashes, 0, event)
    rank.lane.remove(1, 0.0)
    with pytest.raises(KVDepotError, match="given up"):
        stored.result(0.0)
    with pytest.raises(UnknownInstance, match="1"):
        rank.store(hashes).result(0.0)
    rank.lane.remove(1)
    event.there = True
    other = Blocks()
    rank.lane.add(1, other)
    assert rank.store(hashes, 20).result(HANG_S) is True
    assert rank.load(hashes, 30).result(HANG_S) == [True, True]
    assert np.array_equal(other.of(range(30, 34)), other.of(range(20, 24))) and rank.blocks.moves == []


def test_threads_that_share_a_lane_get_their_own_bytes(rank: Rank) -> None:
    failed = list[int]()

    def work(number: int) -> None:
        first = 16 * number
        source = rank.blocks.of(range(first, first + 4))
        for _ in range(20):
            hashes = chunks(2)
            if rank.store(hashes, first).result(HANG_S) is not True:
                failed.append(number)
            if rank.load(hashes, first + 8).result(HANG_S) != [True, True]:
                failed.append(number)
            if not np.array_equal(rank.blocks.of(blocks_from(first + 8, hashes)), source):
                failed.append(number)
            rank.lane.give_up([rank.store(hashes, first, Later())], 0.0)

    working = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for each in working:
        each.start()
    for each in working:
        each.join(HANG_S)
    assert not failed and not rank.lane._live


@pytest.mark.faults
def test_what_a_stopped_server_was_asked_is_given_up_and_never_visible(
    start_depot: StartDepot, make_rank: MakeRank
) -> None:
    depot = start_depot()
    rank, hashes = make_rank(depot), chunks(2)
    suspend(depot.process.pid)
    operations = [rank.store(hashes), rank.load(hashes)]
    assert rank.lane.give_up(operations, 0.05) == 2
    os.kill(depot.process.pid, signal.SIGCONT)
    eventually(lambda: is_idle(depot))
    assert rank.found(hashes) == 0 and rank.blocks.moves == []
    eventually(lambda: not rank.lane._live)
    assert rank.store(hashes).result(HANG_S) is True
