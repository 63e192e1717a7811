"""KV events about the depot's chunks: described to the server, or published by the engine itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
from vllm.distributed.kv_events import BlockStored, KVEventBatch

from kvdepot.client.scheduler import SchedulerClient
from kvdepot.client.transfer import ShardSpec, Transfer
from kvdepot.integrations.vllm.events import Descriptions, KnownChunks
from kvdepot.integrations.vllm.groups import EventGroup
from kvdepot.integrations.vllm.messages import WorkerReport
from kvdepot.protocol import wire
from kvdepot.protocol.keys import ROOT, ChunkChain, derive_root, split_tokens
from tests.client.answers import Answering
from tests.conftest import StartDepot
from tests.kv_events.desk import Follower
from tests.kv_events.router import BLOCK
from tests.kv_events.test_engines import Engine as Client
from tests.vllm.conftest import StartEngine
from tests.vllm.engines import prompt

CHUNK = 8


class Request:
    """The attribute of vLLM's request that is read."""

    def __init__(self, tokens: list[int]) -> None:
        self.all_token_ids = tokens


def chain_of(tokens: list[int], root: bytes = ROOT, lookahead: int = 0) -> ChunkChain:
    chain = ChunkChain(CHUNK, root, lookahead)
    chain.extend(tokens)
    return chain


class Desk:
    """Descriptions, and the client that records what they send."""

    def __init__(self, most: int = 100) -> None:
        self.peer: Any = Answering()
        self.peer.wants_tokens = True
        self.descriptions = Descriptions(SchedulerClient(self.peer, ShardSpec("m", 1, 0, CHUNK, 2)), most)

    def told(self) -> list[bytes]:
        """The keys described since the last call, whose tokens must give them."""
        asked, self.peer.asked = self.peer.asked, []
        keys = []
        for each in asked:
            assert isinstance(each, wire.Describe) and each.chunk_tokens == CHUNK
            found = split_tokens(each.parent, each.hashes, each.tokens, CHUNK)
            assert b"".join(key for key, _ in found) == each.hashes
            keys += [key for key, _ in found]
        return keys


@pytest.mark.parametrize("lookahead", [0, 1, 3])
def test_what_is_stored_is_described_each_time_and_what_is_found_once(lookahead: int) -> None:
    desk, tokens = Desk(), prompt(1, 5 * CHUNK + 4)
    request: Any = Request(tokens)
    chain = chain_of(tokens, lookahead=lookahead)
    keys = [chain.slice(i, i + 1) for i in range(len(chain))]
    desk.descriptions.found(request, chain, 2, len(chain))
    assert desk.told() == keys[:2]
    desk.descriptions.found(request, chain, 2, len(chain))
    desk.descriptions.found(request, chain, 0, len(chain))
    assert desk.told() == []
    desk.descriptions.ordered(request, chain, range(2, 4), ())
    assert desk.told() == keys[2:4]
    desk.descriptions.found(request, chain, 5, len(chain))
    assert desk.told() == keys[4:]
    desk.descriptions.ordered(request, chain, range(1), ())
    assert desk.told() == keys[:1]
    desk.descriptions.restarted()
    desk.descriptions.found(request, chain, 5, len(chain))
    assert desk.told() == keys


def test_only_the_latest_descriptions_are_remembered() -> None:
    desk, tokens = Desk(most=3), prompt(1, 4 * CHUNK)
    request: Any = Request(tokens)
    chain = chain_of(tokens)
    desk.descriptions.ordered(request, chain, range(4), ())
    assert len(desk.told()) == 4
    desk.descriptions.found(request, chain, 4, 4)
    assert len(desk.told()) == 4, "the first is forgotten, and a description needs its parent's"


def test_salted_prompts_are_not_described() -> None:
    desk, tokens = Desk(), prompt(1, 2 * CHUNK)
    request: Any = Request(tokens)
    chain = chain_of(tokens, derive_root(("salt", "alice")))
    desk.descriptions.ordered(request, chain, range(2), ())
    desk.descriptions.found(request, chain, 2, len(chain))
    assert desk.told() == []


def test_long_prompts_take_several_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvdepot.integrations.vllm.events._MOST_TOKENS", 3 * CHUNK)
    desk, tokens = Desk(), prompt(1, 7 * CHUNK)
    request: Any = Request(tokens)
    chain = chain_of(tokens)
    desk.descriptions.ordered(request, chain, range(7), ())
    assert len(desk.peer.asked) == 3
    assert desk.told() == [chain.slice(i, i + 1) for i in range(7)]


def test_a_real_engine_is_credited_with_what_it_stored_and_with_what_it_finds(
    start_depot: StartDepot, models: dict[str, Path], start_engine: StartEngine, tmp_path: Path
) -> None:
    endpoint = f"ipc://{tmp_path}/depot"
    server = start_depot("--kv-events", endpoint, arena_mib=256)
    engine = start_engine(
        models["gqa"], server.url, extra={"kvdepot.events_topic": "kv@10.0.0.1:8000@llama"},
    ).wait_started()  # fmt: skip
    follower, tokens = Follower(endpoint), prompt(1, 2 * 256 + 9)
    another = Client(server, "kv@10.0.0.2:8000@llama", model="of other weights")
    try:
        assert engine.run(tokens)["cached"] == 0
        credit = {"10.0.0.1:8000": 2 * 256 // BLOCK}
        follower.wait(lambda router: router.blocks(tokens, "llama") == credit)
        assert engine.run_fresh(tokens)["cached"] == 512
        longer = tokens + prompt(2, 256)
        engine.run(longer)
        follower.wait(lambda router: router.blocks(longer, "llama") == {"10.0.0.1:8000": 3 * 256 // BLOCK})
        assert not follower.router.twice and not follower.router.passed_over
        decode = msgspec.msgpack.Decoder(KVEventBatch).decode  # as vLLM reads its own engines' events
        events = [event for payload in follower.payloads for event in decode(payload).events]
        stored = [event for event in events if isinstance(event, BlockStored)]
        assert {(event.medium, event.block_size) for event in stored} == {("CPU", 256)}
        assert [token for event in stored for token in event.token_ids] == longer[: 3 * 256]
        engine.stop()
        follower.wait(lambda router: router.score(tokens, "llama") == {})
    finally:
        another.close()
        follower.close()


class Hashed:
    """The attributes of vLLM's request that are read: hashed blocks of 4 tokens, 8 tokens a chunk."""

    lora_request = None

    def __init__(self, seed: int, chunks: int) -> None:
        self.all_token_ids = prompt(seed, 8 * chunks)
        self.block_hashes = [f"{seed}.{i}".encode().rjust(32, b"-") for i in range(2 * chunks)]
        self.chain = ChunkChain(8, derive_root())
        self.chain.extend(self.all_token_ids)

    def transfers(self, first: int, end: int) -> list[Transfer]:
        """The store of these chunks."""
        return [Transfer("r", self.chain.parent(first), first, self.chain.slice(first, end), b"")]

    def stored(self, first: int, end: int, *ranks: int) -> Any:
        """The workers' report of these chunks, in one step."""
        told = WorkerReport()
        for rank in ranks or [0]:
            one = WorkerReport()
            one.add(self.chain.slice(first, end), rank)
            told.aggregate(one)
        return told


def taken(known: Any) -> list[tuple[str, list[bytes]]]:
    """Events by their hashes, of which vLLM publishes the last 64 bits."""
    return [
        (type(event).__name__, [each.to_bytes(8, "big").rjust(32, b"-") for each in event.block_hashes])
        for event in known.take()
    ]


def test_a_chunk_is_told_as_stored_once_every_rank_has_stored_it() -> None:
    known, one = KnownChunks(2, 8, EventGroup(4)), Hashed(1, 3)
    known.ordered(one, one.chain, range(3), one.transfers(0, 3))
    known.stored(one.stored(0, 2, 0))
    known.stored(one.stored(0, 2, 0))  # for another request with the same beginning
    assert taken(known) == []
    known.stored(one.stored(1, 3, 1))
    assert taken(known) == [("BlockStored", one.block_hashes[2:4])]
    known.stored(one.stored(0, 1, 1))
    assert taken(known) == [("BlockStored", one.block_hashes[:2])]
    known.ordered(one, one.chain, range(2, 3), one.transfers(2, 3))
    known.stored(one.stored(2, 3, 1))
    assert taken(known) == []
    known.stored(one.stored(2, 3, 0, 1))
    assert taken(known) == [("BlockStored", one.block_hashes[4:6])]


def test_a_lookup_publishes_what_is_there_and_removes_what_is_not() -> None:
    known, one = KnownChunks(1, 8, EventGroup(4)), Hashed(1, 3)
    known.found(one, one.chain, 2, len(one.chain))
    assert taken(known) == [("BlockStored", one.block_hashes[:2]), ("BlockStored", one.block_hashes[2:4])]
    known.found(one, one.chain, 2, len(one.chain))
    assert taken(known) == []
    known.found(one, one.chain, 1, len(one.chain))
    assert taken(known) == [("BlockRemoved", one.block_hashes[2:4])]
    known.lost(one.chain.slice(0, 3))
    assert taken(known) == [("BlockRemoved", one.block_hashes[:2])]
    known.found(one, one.chain, 3, len(one.chain))
    taken(known)
    known.clear()
    assert [kind for kind, _ in taken(known)] == ["BlockRemoved"] * 3


def test_a_lookup_of_a_window_publishes_the_known_parts_and_their_group() -> None:
    known, one = KnownChunks(1, 8, EventGroup(4, 2, "sliding_window", 16, reach=2)), Hashed(1, 4)
    known.found(one, one.chain, 3, 3)
    stored = list(known.take())
    assert len(stored) == 2
    assert {(e.group_idx, e.kv_cache_spec_kind, e.kv_cache_spec_sliding_window) for e in stored} == {
        (2, "sliding_window", 16)
    }
    known.found(one, one.chain, 2, 3)
    added, removed = known.take()
    assert (added.group_idx, removed.group_idx) == (2, 2)
    assert removed.block_hashes == stored[1].block_hashes
    known.clear()
    assert taken(known) == [("BlockRemoved", one.block_hashes[:2]), ("BlockRemoved", one.block_hashes[2:4])]


def test_no_more_is_believed_than_the_limit_and_of_that_what_was_heard_of_last() -> None:
    known, one, two = KnownChunks(1, 8, EventGroup(4), most=3), Hashed(1, 3), Hashed(2, 1)
    known.found(one, one.chain, 3, len(one.chain))
    known.found(one, Hashed(1, 1).chain, 1, len(Hashed(1, 1).chain))  # its first chunk again
    taken(known)
    known.found(two, two.chain, 1, len(two.chain))
    assert taken(known) == [("BlockStored", two.block_hashes), ("BlockRemoved", one.block_hashes[2:4])]


def test_chunks_that_the_engine_does_not_hash_are_not_published() -> None:
    known, one = KnownChunks(1, 8, EventGroup(4)), Hashed(1, 2)
    del one.block_hashes[3:]
    known.found(one, one.chain, 2, len(one.chain))
    assert taken(known) == [("BlockStored", one.block_hashes[:2])]


def test_a_report_of_several_workers_has_the_step_of_those_that_computed() -> None:
    report = WorkerReport()
    report.aggregate(WorkerReport(step=7, measured=3))
    report.aggregate(WorkerReport())  # of a rank that is idle in this step
    assert report == WorkerReport(step=7, measured=3)
