"""Every row of the client contract, against a real server process."""

from __future__ import annotations

import itertools
import os
import pickle
import signal
import uuid
from array import array
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from kvdepot import errors
from kvdepot.adapters import (
    IPCCacheEngineKey,
    KVCacheHandle,
    LMCacheMPSchedulerAdapter,
    LMCacheMPWorkerAdapter,
    LoadStoreOp,
    MessageQueueClient,
    MessagingFuture,
    RequestType,
    get_lmcache_chunk_size,
    get_response_class,
    send_lmcache_request,
    striding_block_hashes,
    wrap_kv_caches,
)
from kvdepot.client import lmcache
from kvdepot.client import socket as client_socket
from kvdepot.client.scheduler import Cached, Unanswered
from kvdepot.client.transfer import Operation, pack_block_ids
from kvdepot.devices.host import HostBlocks
from kvdepot.keys import ROOT, ChunkChain
from kvdepot.protocol.endpoints import Claim
from tests.client.engine import BLOCK, CHUNK, PER_CHUNK, Engine, Later, MakeEngine, make_caches, read_blocks
from tests.conftest import HANG_S, Depot, StartDepot, ends, eventually, suspend
from tests.server.process import kill

BLOCKS = 32
_seeds = itertools.count(1)


BAD_IDS = [
    None, 5, "ab", b"abcd", bytearray(b"abcd"), {1, 2}, {1: 2}, ["a"], [1.0], [None], [True], [-1], [2**32], [2**70],
    [[1, 2], [3, 4]], np.array([True]), np.array([1.0]), np.array([[1]]), np.array([-1]), torch.tensor([1.0]),
]  # fmt: skip


@pytest.mark.parametrize("bad", BAD_IDS, ids=repr)
def test_what_is_no_list_of_block_ids_is_a_bad_request(bad: Any) -> None:
    with pytest.raises(errors.BadRequest, match="block ids must be"):
        pack_block_ids(bad)


@pytest.mark.parametrize("kind", [list, tuple, array, np.array, torch.tensor])
@pytest.mark.parametrize("ids", [[], [0], [3, 2**32 - 1, 3]])
def test_block_ids_are_packed_as_little_endian_uint32(kind: Callable[..., Any], ids: list[int]) -> None:
    assert pack_block_ids(kind("Q", ids) if kind is array else kind(ids)) == np.array(ids, "<u4").tobytes()


def prompt(tokens: int) -> list[int]:
    """A prompt that no other test uses."""
    first = next(_seeds) * 1_000_000
    return list(range(first, first + tokens))


def unique(name: str) -> str:
    return f"{name}-{uuid.uuid4().hex[:8]}"


def block_hashes(blocks: int) -> list[bytes]:
    return [os.urandom(32) for _ in range(blocks)]


@pytest.fixture
def make_engine(depot: Depot, start_depot: StartDepot) -> Iterator[MakeEngine]:
    """Engines that end with the test, before its servers do: `make_engine(depot, model=..., ranks=...)`."""
    with ExitStack() as ending:

        def make(server: Depot = depot, **options: Any) -> Engine:
            options.setdefault("caches", [make_caches() for _ in options.get("ranks", [0])])
            return ending.enter_context(closing(Engine(server, **options)))

        yield make


@pytest.fixture
def engine(make_engine: MakeEngine) -> Engine:
    return make_engine()


def ask(client: MessageQueueClient, request_type: RequestType, *payloads: Any) -> Any:
    value = send_lmcache_request(client, request_type, list(payloads)).result(HANG_S)
    assert isinstance(value, get_response_class(request_type))
    return value


def answer(scheduler: LMCacheMPSchedulerAdapter, request_id: str) -> int:
    """The first answer of a lookup, which a polling caller gets."""
    eventually(lambda: scheduler.check_lookup_result(request_id) is not None)
    tokens = scheduler.check_lookup_result(request_id)
    assert tokens is not None
    return tokens


def barrier(worker: LMCacheMPWorkerAdapter | LMCacheMPSchedulerAdapter) -> None:
    """Return when the server has handled all that this adapter has sent."""
    assert ask(worker.mq_client, RequestType.NOOP) == "ok"


# -- module functions


@pytest.mark.parametrize(
    ("count", "blocks_in_chunk", "expected"),
    [(0, 4, []), (3, 4, []), (4, 4, [3]), (11, 4, [3, 7]), (12, 4, [3, 7, 11]), (3, 1, [0, 1, 2])],
)
def test_striding_block_hashes_gives_the_last_hash_of_each_full_chunk(
    count: int, blocks_in_chunk: int, expected: list[int]
) -> None:
    hashes = block_hashes(count)
    assert list(striding_block_hashes(hashes, blocks_in_chunk)) == [hashes[i] for i in expected]


def test_wrap_kv_caches_gives_one_handle_a_layer_in_dict_order_and_views_stay_valid() -> None:
    caches = make_caches()
    view = caches["layer.1"][3]
    before = read_blocks(caches, list(range(BLOCKS)))
    handles = wrap_kv_caches(caches)
    assert all(isinstance(handle, KVCacheHandle) for handle in handles)
    assert [handle.tensor for handle in handles] == list(caches.values())
    with pytest.raises(errors.BadRequest, match=r"layer\.0 cannot leave its process"):
        pickle.dumps(handles[0])
    assert read_blocks(caches, list(range(BLOCKS))) == before
    view.fill_(7)
    assert caches["layer.1"][3].eq(7).all()


@pytest.mark.parametrize(
    "caches", [None, [torch.zeros(16, BLOCK, 4)], {1: torch.zeros(16, BLOCK, 4)}, {"\udc80": None}]
)
def test_kv_caches_that_are_no_dict_of_names_and_tensors_are_refused(caches: Any) -> None:
    with pytest.raises(errors.LayoutError, match=r"layer('s)? name"):
        wrap_kv_caches(caches)


def test_every_request_type_answers_as_the_contract_says(depot: Depot, client: MessageQueueClient) -> None:
    model, tokens, caches = unique("model"), tuple(prompt(2 * CHUNK)), make_caches()
    key = IPCCacheEngineKey(model, 1, 0, token_ids=tokens, start=0, end=2 * CHUNK, request_id="r")
    unseen = IPCCacheEngineKey(model, 1, 0, chunk_hash=b"nobody stored this", request_id="r")
    ids = list(range(2 * PER_CHUNK))
    assert ask(client, RequestType.NOOP) == "ok"
    assert get_lmcache_chunk_size(client) == ask(client, RequestType.GET_CHUNK_SIZE) == CHUNK
    assert ask(client, RequestType.REGISTER_KV_CACHE, 7, wrap_kv_caches(caches)) is None
    assert ask(client, RequestType.LOOKUP, [key.no_worker_id_version()]) == 0
    assert ask(client, RequestType.STORE, [key], 7, ids, b"") is True
    assert ask(client, RequestType.LOOKUP, [key.no_worker_id_version()]) == 2
    stored = read_blocks(caches, ids)
    targets = list(range(16, 16 + 3 * PER_CHUNK))
    before = read_blocks(caches, targets[2 * PER_CHUNK :])
    assert ask(client, RequestType.RETRIEVE, [key, unseen], 7, targets, b"") == [True, False]
    assert read_blocks(caches, targets[: 2 * PER_CHUNK]) == stored
    assert read_blocks(caches, targets[2 * PER_CHUNK :]) == before
    assert ask(client, RequestType.END_SESSION, "r") is None
    assert ask(client, RequestType.CLEAR) is None
    assert ask(client, RequestType.LOOKUP, [key.no_worker_id_version()]) == 0
    assert ask(client, RequestType.UNREGISTER_KV_CACHE, 7) is None
    with pytest.raises(errors.UnknownInstance, match="7"):
        ask(client, RequestType.STORE, [key], 7, ids, b"")


@pytest.mark.parametrize("mode", ["tokens", "hashes"])
def test_keys_of_anothers_adapter_name_the_chunks_of_ours(
    client: MessageQueueClient, engine: Engine, mode: str
) -> None:
    """Somebody else's adapter has the contract's keys and requests, and nothing else of ours."""
    caches, source, targets = make_caches(), list(range(8)), list(range(8, 16))
    ask(client, RequestType.REGISTER_KV_CACHE, 9, wrap_kv_caches(caches))
    for is_ours_first in (False, True):
        what: dict[str, Any] = {"token_ids": prompt(2 * CHUNK)}
        named: list[dict[str, Any]] = [{"token_ids": tuple(what["token_ids"]), "end": 2 * CHUNK}]
        if mode == "hashes":
            what = {"block_hashes": block_hashes(2 * PER_CHUNK)}
            named = [{"chunk_hash": each} for each in striding_block_hashes(what["block_hashes"], PER_CHUNK)]
        keys = [IPCCacheEngineKey(engine.model, 1, 0, request_id="r", **each) for each in named]
        if is_ours_first:
            engine.store(LoadStoreOp(source, **what))
            assert ask(client, RequestType.LOOKUP, [key.no_worker_id_version() for key in keys]) == 2
            assert ask(client, RequestType.RETRIEVE, keys, 9, targets, b"") == [True] * len(keys)
            assert read_blocks(caches, targets) == read_blocks(engine.caches[0], source)
        else:
            assert ask(client, RequestType.STORE, keys, 9, source, b"") is True
            assert engine.lookup(**what) == 2 * CHUNK
            assert engine.retrieve(LoadStoreOp(targets, **what)) == set()
            assert read_blocks(engine.caches[0], targets) == read_blocks(caches, source)


@pytest.mark.parametrize("others", [0, 1])
def test_a_retrieve_never_answers_true_for_blocks_it_did_not_fill(client: MessageQueueClient, others: int) -> None:
    model, tokens, caches = unique("model"), tuple(prompt(CHUNK)), make_caches()
    whole = IPCCacheEngineKey(model, 1, 0, token_ids=tokens, end=CHUNK, request_id="r")
    part = IPCCacheEngineKey(model, 1, 0, token_ids=tokens, end=CHUNK - BLOCK, request_id="r")
    ask(client, RequestType.REGISTER_KV_CACHE, 1, wrap_kv_caches(caches))
    assert ask(client, RequestType.STORE, [whole], 1, [0, 1, 2, 3], b"") is True
    ids = [8, 9, 10, *range(12, 12 + 4 * others)]
    try:
        answer = ask(client, RequestType.RETRIEVE, [part, *[whole] * others], 1, ids, b"")
    except errors.BadRequest:
        return  # said, so the engine recomputes them
    assert answer[0] is False


@pytest.mark.parametrize(
    ("request_type", "payloads"),
    [
        (RequestType.REGISTER_KV_CACHE, []),
        (RequestType.REGISTER_KV_CACHE, [1, ["no handle"]]),
        (RequestType.REGISTER_KV_CACHE, [1, []]),
        (RequestType.UNREGISTER_KV_CACHE, []),
        (RequestType.UNREGISTER_KV_CACHE, ["one"]),
        (RequestType.UNREGISTER_KV_CACHE, [1 << 70]),
        (RequestType.LOOKUP, []),
        (RequestType.LOOKUP, [["no key"]]),
        (RequestType.STORE, [[], 1]),
        (RequestType.STORE, ["no keys", 1, [0], b""]),
        (RequestType.RETRIEVE, [None, 1, [0], b""]),
        (RequestType.END_SESSION, []),
        (RequestType.END_SESSION, ["\ud800"]),
        ("NOOP", []),
    ],
)
def test_wrong_payloads_raise_a_named_error_and_the_client_goes_on(
    client: MessageQueueClient, request_type: Any, payloads: list[Any]
) -> None:
    with pytest.raises(errors.KVDepotError):
        send_lmcache_request(client, request_type, payloads).result(HANG_S)
    assert ask(client, RequestType.NOOP) == "ok"


def test_a_response_of_another_class_than_asked_for_is_an_error(client: MessageQueueClient) -> None:
    with pytest.raises(errors.ProtocolError, match="not str"):
        client.submit_request(RequestType.GET_CHUNK_SIZE, [], response_cls=str).result(HANG_S)


def test_a_future_is_its_own_cuda_future_and_answers_again_and_again(client: MessageQueueClient) -> None:
    future: MessagingFuture[int] = client.submit_request(RequestType.GET_CHUNK_SIZE, [])
    assert future.to_cuda_future() is future
    eventually(future.query)
    assert [future.result(), future.result(timeout=0)] == [CHUNK, CHUNK]


# -- keys and ops


def test_a_key_names_tokens_or_a_hash_and_equals_those_that_name_the_same() -> None:
    key = IPCCacheEngineKey("m", 2, 1, token_ids=(1, 2), start=0, end=2, request_id="a")
    assert key == (same := replace(key, request_id="b")) and hash(key) == hash(same)
    different = {"model_name": "n", "world_size": 1, "worker_id": 0, "token_ids": (1, 3), "end": 1}
    assert not any(key == replace(key, **{name: value}) for name, value in different.items())
    assert key != IPCCacheEngineKey("m", 2, 1, chunk_hash=b"x")
    bare = key.no_worker_id_version()
    assert (bare, bare.request_id, key.worker_id) == (replace(key, worker_id=None), "a", 1)
    for wrong in ({}, {"token_ids": (1,), "chunk_hash": b"x"}):
        with pytest.raises(errors.BadRequest):
            IPCCacheEngineKey("m", 1, 0, **wrong)


def test_an_op_is_as_long_as_its_blocks_and_takes_tokens_or_hashes() -> None:
    assert len(LoadStoreOp([3, 4, 5], token_ids=[1, 2])) == 3
    assert len(LoadStoreOp([], block_hashes=[])) == 0
    op = LoadStoreOp([1], token_ids=[1])
    assert (op.start, op.end, op.block_hashes) == (0, 0, None)
    with pytest.raises(errors.BadRequest):
        LoadStoreOp([1])
    with pytest.raises(errors.BadRequest):
        LoadStoreOp([1], token_ids=[1], block_hashes=[b"x"])


# -- construction and attributes


def test_the_adapters_have_the_attributes_of_the_contract(engine: Engine) -> None:
    scheduler, worker = engine.scheduler, engine.worker
    assert isinstance(scheduler.mq_client, MessageQueueClient)
    assert isinstance(worker.mq_client, MessageQueueClient)
    assert (scheduler.model_name, scheduler.world_size, scheduler.worker_id) == (engine.model, 1, 0)
    assert (worker.model_name, worker.world_size, worker.worker_id) == (engine.model, 1, 0)
    assert scheduler.chunk_size == CHUNK
    assert scheduler.blocks_in_chunk == worker.blocks_in_chunk == PER_CHUNK
    assert scheduler.num_blocks_per_chunk() == worker.num_blocks_per_chunk() == PER_CHUNK
    assert len(scheduler.lookup_futures) == 0
    assert isinstance(worker.instance_id, int)
    assert worker.kv_caches is engine.caches[0]
    for empty in (
        worker.store_futures, worker.retrieve_futures, worker.finished_stores, worker.previously_finished,
    ):  # fmt: skip
        assert len(empty) == 0


def test_a_lookup_that_is_cleaned_up_is_unknown_and_can_be_made_again(engine: Engine) -> None:
    scheduler, tokens = engine.scheduler, prompt(CHUNK)
    engine.store(LoadStoreOp([0, 1, 2, 3], token_ids=tokens))
    for _ in range(2):
        assert engine.lookup(request_id="r", token_ids=tokens) == CHUNK
        assert scheduler.lookup_futures["r"].result() == 1
        scheduler.cleanup_lookup_result("r")
        assert not scheduler.lookup_futures
        with pytest.raises(errors.UnknownRequest):
            scheduler.check_lookup_result("r")
    scheduler.cleanup_lookup_result("never seen")


def test_attributes_of_an_adapter_can_be_set(depot: Depot, engine: Engine) -> None:
    scheduler, tokens, other = engine.scheduler, prompt(2 * CHUNK), unique("model")
    engine.worker.shutdown()
    worker = LMCacheMPWorkerAdapter(depot.url, depot.context, "m", 2, 1, 2 * BLOCK)
    worker.model_name, worker.world_size, worker.worker_id, worker.blocks_in_chunk = other, 1, 0, PER_CHUNK
    engine.workers, engine.caches = [worker], [make_caches()]
    worker.register_kv_caches(engine.caches[0])
    engine.store(LoadStoreOp(list(range(8)), token_ids=tokens))
    assert engine.lookup(token_ids=tokens) == 0
    scheduler.model_name = other
    assert engine.lookup(token_ids=tokens) == 2 * CHUNK
    key = scheduler._create_key([1, 2, 3], start=1, end=2, request_id="r")
    assert key == IPCCacheEngineKey(other, 1, 0, token_ids=(1, 2, 3), start=1, end=2) and key.request_id == "r"
    hashed = scheduler._create_hash_key(b"hash", request_id="q")
    assert hashed == IPCCacheEngineKey(other, 1, None, chunk_hash=b"hash") and hashed.request_id == "q"
    connection = MessageQueueClient(depot.url, depot.context)
    scheduler.mq_client.close()
    scheduler.mq_client = connection
    assert engine.lookup(token_ids=tokens) == 2 * CHUNK
    worker.finished_stores.add("r")
    assert worker.get_finished(set())[0] == {"r"}


@pytest.mark.parametrize("block_size", [3, 100, 512, 0, -64])
@pytest.mark.parametrize("adapter", [LMCacheMPSchedulerAdapter, LMCacheMPWorkerAdapter])
def test_a_block_size_that_does_not_divide_the_chunk_size_is_refused(
    depot: Depot, adapter: Any, block_size: int
) -> None:
    with pytest.raises(errors.BadRequest, match=f"{block_size} does not divide .* {CHUNK}"):
        adapter(depot.url, depot.context, "m", 1, 0, block_size)


@pytest.mark.parametrize("adapter", [LMCacheMPSchedulerAdapter, LMCacheMPWorkerAdapter])
def test_without_a_server_an_adapter_is_not_made(depot: Depot, monkeypatch: pytest.MonkeyPatch, adapter: Any) -> None:
    monkeypatch.setattr(lmcache, "CONNECT_S", 0.2)
    with pytest.raises(errors.Unavailable, match="nobody-here"):
        adapter("ipc:///tmp/kvdepot-nobody-here.sock", depot.context, "m", 1, 0, BLOCK)


# -- lookups


def test_a_lookup_is_none_while_it_is_pending_and_looking_again_is_free(depot: Depot, engine: Engine) -> None:
    scheduler, tokens = engine.scheduler, prompt(CHUNK)
    before = depot.status()["counters"].get("lookups", 0)
    suspend(depot.process.pid)
    try:
        scheduler.maybe_submit_lookup_request("r", token_ids=tokens)
        assert scheduler.check_lookup_result("r") is None
        future = scheduler.lookup_futures["r"]
        with pytest.raises(TimeoutError) as caught:
            future.result(timeout=0.05)
        assert isinstance(caught.value, errors.DeadlineExceeded)
        for _ in range(3):
            scheduler.maybe_submit_lookup_request("r", token_ids=tokens)
        assert scheduler.lookup_futures["r"] is future
    finally:
        os.kill(depot.process.pid, signal.SIGCONT)
    assert answer(scheduler, "r") == 0
    scheduler.maybe_submit_lookup_request("r", token_ids=tokens)
    barrier(scheduler)
    assert depot.status()["counters"]["lookups"] == before + 1


@pytest.mark.parametrize(
    "what",
    [
        {},
        {"token_ids": [1] * CHUNK, "block_hashes": [b"x"] * PER_CHUNK},
        {"token_ids": ["a"] * CHUNK},
        {"block_hashes": ["not bytes"] * PER_CHUNK},
    ],
)
def test_wrong_arguments_of_a_lookup_raise_bad_request_and_leave_no_lookup(
    engine: Engine, what: dict[str, Any]
) -> None:
    with pytest.raises(errors.BadRequest):
        engine.scheduler.maybe_submit_lookup_request("r", **what)
    with pytest.raises(errors.UnknownRequest):
        engine.scheduler.check_lookup_result("r")
    assert engine.lookup(request_id="r", token_ids=prompt(CHUNK)) == 0


# -- store, look up, retrieve


@pytest.mark.parametrize("change", ["model", "width", "dtype", "names", "block size"])
def test_engines_of_two_models_or_layouts_never_see_each_others_chunks(make_engine: MakeEngine, change: str) -> None:
    tokens, hashes = prompt(CHUNK), block_hashes(PER_CHUNK)
    one = make_engine()
    caches, block_size = make_caches(), BLOCK
    if change == "model":
        caches = {name: tensor.clone() for name, tensor in one.caches[0].items()}
    elif change == "width":
        caches = make_caches(width=8)
    elif change == "dtype":
        caches = {name: tensor.view(torch.int8) for name, tensor in caches.items()}
    elif change == "names":
        caches = {f"other.{name}": tensor for name, tensor in caches.items()}
    else:
        block_size = BLOCK // 2
        caches = {"layer.0": torch.zeros(2, BLOCKS, block_size, 8, dtype=torch.uint8)}
    two = make_engine(model="" if change == "model" else one.model, caches=[caches], block_size=block_size)
    one.store(LoadStoreOp([0, 1, 2, 3], token_ids=tokens))
    one.store(LoadStoreOp([4, 5, 6, 7], block_hashes=hashes))
    assert two.lookup(token_ids=tokens) == 0
    ids = list(range(CHUNK // block_size))
    before = {name: tensor.clone() for name, tensor in caches.items()}
    assert two.retrieve(LoadStoreOp(ids, token_ids=tokens)) == set(ids)
    if change != "block size":
        assert two.lookup(block_hashes=hashes) == 0
        assert two.retrieve(LoadStoreOp(ids, block_hashes=hashes)) == set(ids)
    assert all(torch.equal(caches[name], before[name]) for name in caches)
    two.worker.shutdown()
    assert one.retrieve(LoadStoreOp([8, 9, 10, 11], token_ids=tokens)) == set()
    assert one.lookup(token_ids=tokens) == one.lookup(block_hashes=hashes) == CHUNK


@pytest.mark.parametrize(("world_size", "ranks"), [(1, [0, 0]), (2, [0, 0, 1, 1])], ids=["TP 2", "TP 2 and PP 2"])
def test_replicas_of_a_shard_store_it_once_between_them_and_each_gets_it(
    depot: Depot, make_engine: MakeEngine, world_size: int, ranks: list[int]
) -> None:
    """As tensor-parallel ranks do that hold the same bytes: with MLA, or with fewer KV heads than ranks."""
    shards = [make_caches() for _ in range(world_size)]
    caches = [{name: tensor.clone() for name, tensor in shards[rank].items()} for rank in ranks]
    engine = make_engine(ranks=ranks, caches=caches)
    tokens, ids, targets = prompt(2 * CHUNK), list(range(8)), list(range(8, 16))
    before = depot.status()["counters"]
    for worker in engine.workers:  # all at once: the later ones find chunks that are not whole yet
        worker.submit_store_request("r", LoadStoreOp(ids, token_ids=tokens), None)
    for worker in engine.workers:
        assert eventually(lambda worker=worker: worker.get_finished({"r"})[0]) == {"r"}
        assert worker.counters["stores_dropped"] == 0
    counters = depot.status()["counters"]
    assert counters["stored_chunks"] - before.get("stored_chunks", 0) == 2 * world_size, "once a shard"
    assert counters["known_chunks"] - before.get("known_chunks", 0) == 2 * (len(ranks) - world_size)
    # Pinned for all who will retrieve it, as the connector asks.
    chain = ChunkChain(CHUNK, ROOT)
    chain.extend(tokens)
    engine.scheduler.submit_lookup("l", bytes(chain.hashes), readers=len(ranks))
    assert answer(engine.scheduler, "l") == 2 * CHUNK
    for number in range(len(ranks)):
        assert engine.retrieve(LoadStoreOp(targets, token_ids=tokens), rank=number, request_id="l") == set()
        assert read_blocks(caches[number], targets) == read_blocks(caches[number], ids)


def test_a_handle_of_an_event_waits_for_nothing_where_tensors_are_on_the_processor(client: MessageQueueClient) -> None:
    model, tokens, caches = unique("model"), tuple(prompt(CHUNK)), make_caches()
    ask(client, RequestType.REGISTER_KV_CACHE, 1, wrap_kv_caches(caches))
    key = IPCCacheEngineKey(model, 1, 0, tokens, 0, CHUNK)
    assert ask(client, RequestType.STORE, [key], 1, [0, 1, 2, 3], b"\7" * 64) is True
    assert ask(client, RequestType.RETRIEVE, [key], 1, [4, 5, 6, 7], b"\7" * 64) == [True]
    assert read_blocks(caches, [4, 5, 6, 7]) == read_blocks(caches, [0, 1, 2, 3])


def test_unregistering_waits_for_copies_and_then_touches_no_block(client: MessageQueueClient) -> None:
    model, tokens, caches = unique("model"), tuple(prompt(CHUNK)), make_caches()
    ask(client, RequestType.REGISTER_KV_CACHE, 1, wrap_kv_caches(caches))
    key = IPCCacheEngineKey(model, 1, 0, tokens, 0, CHUNK)
    stored = send_lmcache_request(client, RequestType.STORE, [[key], 1, [0, 1, 2, 3], b""])
    ask(client, RequestType.UNREGISTER_KV_CACHE, 1)
    assert stored.query() and stored.result() is True
    assert ask(client, RequestType.LOOKUP, [key.no_worker_id_version()]) == 1


@pytest.mark.parametrize("by_handles", [True, False])
def test_a_device_that_fails_the_self_test_leaves_the_engine_without_a_cache(
    depot: Depot, client: MessageQueueClient, by_handles: bool, monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    def copies_nothing(*args: object) -> None:
        pass

    monkeypatch.setattr(HostBlocks, "move", copies_nothing)
    model, tokens = unique("model"), prompt(CHUNK)
    if by_handles:
        ask(client, RequestType.REGISTER_KV_CACHE, 1, wrap_kv_caches(make_caches()))
        key = IPCCacheEngineKey(model, 1, 0, tuple(tokens), 0, CHUNK)
        with pytest.raises(errors.KVDepotError):
            ask(client, RequestType.STORE, [key], 1, [0, 1, 2, 3], b"")
    else:
        worker = LMCacheMPWorkerAdapter(depot.url, depot.context, model, 1, 0, BLOCK)
        worker.register_kv_caches(make_caches())
        worker.submit_store_request("s", LoadStoreOp([0, 1, 2, 3], token_ids=tokens), None)
        assert eventually(lambda: worker.get_finished({"s"})[0]) == {"s"}
        assert worker.counters["stores_dropped"] == 1
        worker.shutdown()
    assert "runs without a cache" in caplog.text


# -- what failed is said


@pytest.mark.parametrize("is_store", [True, False])
@pytest.mark.parametrize(
    "op",
    [
        {"block_ids": [0, 1, 2], "token_ids": list(range(CHUNK))},
        {"block_ids": list(range(8)), "token_ids": list(range(CHUNK))},
        {"block_ids": [0, 1, 2, -3], "token_ids": list(range(CHUNK))},
        {"block_ids": [0, 1, 2, 3], "token_ids": list(range(2 * CHUNK)), "start": 1, "end": CHUNK + 1},
        {"block_ids": [0, 1, 2, 3], "token_ids": list(range(CHUNK)), "start": CHUNK, "end": 2 * CHUNK},
        {"block_ids": [0, 1, 2, 3], "token_ids": list(range(CHUNK)), "start": -CHUNK, "end": CHUNK},
        {"block_ids": [0, 1, 2, 3], "token_ids": [-1] * CHUNK},
        {"block_ids": [0, 1, 2, 3], "block_hashes": [b"x"] * 3},
        {"block_ids": [0, 1, 2, 3], "block_hashes": ["no bytes"] * 4},
    ],
)
def test_an_op_whose_parts_do_not_agree_raises_bad_request(engine: Engine, op: dict[str, Any], is_store: bool) -> None:
    submit = engine.worker.submit_store_request if is_store else engine.worker.submit_retrieve_request
    with pytest.raises(errors.BadRequest):
        submit("r", LoadStoreOp(**op), None)
    with pytest.raises(errors.BadRequest, match="2 request ids for 1 ops"):
        engine.worker.batched_submit_store_requests(["r", "s"], [LoadStoreOp([1], token_ids=[1])], None)
    assert not engine.worker.store_futures
    assert not engine.worker.retrieve_futures
    assert engine.worker.get_finished({"r"}) == ({"r"}, None)


def test_a_worker_that_has_not_registered_stores_nothing_and_fails_its_retrieves(
    depot: Depot, caplog: pytest.LogCaptureFixture
) -> None:
    worker = LMCacheMPWorkerAdapter(depot.url, depot.context, unique("model"), 1, 0, BLOCK)
    op = LoadStoreOp([0, 1, 2, 3], token_ids=prompt(CHUNK))
    worker.submit_store_request("s", op, None)
    worker.submit_retrieve_request("r", op, None)
    assert eventually(lambda: worker.get_finished({"s"})[0]) == {"s"}
    assert eventually(lambda: not worker.retrieve_futures or worker.get_finished(set())[1])
    assert worker.get_block_ids_with_load_errors() == {0, 1, 2, 3}
    worker.submit_store_request("again", op, None)
    assert eventually(lambda: worker.get_finished({"again"})[0]) == {"again"}
    (warned,) = [r.getMessage() for r in caplog.records if r.levelname == "WARNING" and "not stored" in r.getMessage()]
    assert "'s'" in warned
    worker.shutdown()


def test_tensors_that_cannot_be_described_are_refused_with_their_shapes(depot: Depot) -> None:
    worker = LMCacheMPWorkerAdapter(depot.url, depot.context, unique("model"), 1, 0, BLOCK)
    with pytest.raises(errors.LayoutError, match=r"\[5\]"):
        worker.register_kv_caches({"layer": torch.zeros(5)})
    with pytest.raises(errors.LayoutError, match="the layer"):
        worker.register_kv_caches({"the layer": (torch.zeros(16, BLOCK, 4),)})  # type: ignore[dict-item]
    with pytest.raises(errors.LayoutError):
        worker.register_kv_caches({})
    with pytest.raises(errors.LayoutError, match=r"axis 0 of layer \[1, 4, 512, 32\], .* is 1, and no chunk of 4"):
        worker.register_kv_caches({"layer": torch.zeros(1, 4, 512, 32)})
    stranger = LMCacheMPWorkerAdapter(depot.url, depot.context, unique("model"), 2, 2, BLOCK)
    with pytest.raises(errors.BadRequest, match="rank 2 of world size 2"):
        stranger.register_kv_caches(make_caches())
    stranger.shutdown()
    with pytest.raises(errors.LayoutError, match=r"disagree|do not determine"):
        worker.register_kv_caches({"a": torch.zeros(4, BLOCK, 8), "b": torch.zeros(6, BLOCK, 8)})
    worker.register_kv_caches(make_caches())
    worker.shutdown()


# -- get_finished


@pytest.mark.parametrize("uses", [("store", "store"), ("nothing", "store"), ("store", "nothing"), ("retrieve",) * 2])
def test_an_id_that_is_used_again_ends_each_time_and_once(engine: Engine, uses: tuple[str, ...]) -> None:
    worker = engine.worker
    for use in (*uses, *uses):
        op = LoadStoreOp([0, 1, 2, 3], token_ids=prompt(CHUNK))
        if use == "store":
            worker.submit_store_request("r", op, None)
        elif use == "retrieve":
            worker.submit_retrieve_request("r", op, None)
            assert eventually(lambda: worker.get_finished(set())[1]) == {"r"}
        else:
            assert worker.get_finished(set()) == (None, None)  # the step that computes it
        told = [worker.get_finished({"r"})[0]]
        eventually(lambda told=told: told.append(worker.get_finished({"r"})[0]) or {"r"} in told)
        told += [worker.get_finished({"r"})[0] for _ in range(3)]
        assert told.count({"r"}) == 1 and told.count(None) == len(told) - 1
        assert not worker.finished_stores


# -- events


# -- the end, and servers that go away


def test_after_shutdown_nothing_hangs(depot: Depot) -> None:
    engine = Engine(depot, caches=[make_caches()])
    engine.close()
    op = LoadStoreOp([0, 1, 2, 3], token_ids=prompt(CHUNK))
    engine.worker.submit_store_request("s", op, None)
    engine.worker.submit_retrieve_request("r", op, None)
    assert engine.worker.get_finished({"s"}) == ({"s"}, {"r"})
    assert engine.worker.get_block_ids_with_load_errors() == {0, 1, 2, 3}
    assert engine.lookup(request_id="l", token_ids=prompt(CHUNK)) == 0
    engine.scheduler.end_session("l")


def ask_in_vain(scheduler: LMCacheMPSchedulerAdapter, request_id: str, tokens: list[int]) -> None:
    scheduler.maybe_submit_lookup_request(request_id, token_ids=tokens)
    assert answer(scheduler, request_id) == 0
    assert isinstance(scheduler.check_lookup(request_id), Unanswered)


@pytest.mark.faults
@pytest.mark.parametrize("is_noticed", [True, False], ids=["met", "not met"])
def test_a_lookup_that_found_no_server_is_asked_again_once_one_is_there(
    start_depot: StartDepot, make_engine: MakeEngine, is_noticed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether or not the client had noticed the end of the server before. One that is starting is waited for."""
    monkeypatch.setattr(client_socket, "RETURN_S", 0.0)
    first = start_depot()
    engine, tokens = make_engine(first), prompt(2 * CHUNK)
    scheduler = engine.scheduler
    engine.store(LoadStoreOp(list(range(8)), token_ids=tokens))
    kill(first)
    if is_noticed:
        ask_in_vain(scheduler, "early", tokens)
    ask_in_vain(scheduler, "r", tokens)
    assert scheduler.wait_lookup_result("r", 0.1) == 0, "nobody is there: nobody is waited for"
    starting = Claim(first.url, "url")
    assert scheduler.wait_lookup_result("r", 0.1) == 0, "it takes too long"
    monkeypatch.setattr(client_socket, "RETURN_S", 600.0)
    for _ in range(3):
        assert scheduler.wait_lookup_result("r", 0.01) is None
    assert scheduler.check_lookup_result("r") == 0, "a caller that polls has its answer"
    starting.close()
    second = start_depot(url=first.url, name=first.name)
    assert scheduler.check_lookup_result("r") == 0, "the contract knows no second answer"
    eventually(lambda: scheduler.wait_lookup_result("r", 0.1) == 2 * CHUNK)
    assert scheduler.check_lookup("r") == Cached(2 * CHUNK) and scheduler.known_tokens("r") == 2 * CHUNK
    assert engine.retrieve(LoadStoreOp(list(range(8, 16)), token_ids=tokens)) == set()
    scheduler.end_session("r")
    barrier(scheduler)
    assert second.status()["sessions"] == 0


@pytest.mark.faults
def test_a_server_with_another_chunk_size_is_never_asked_for_wrong_chunks(start_depot: StartDepot) -> None:
    first = start_depot()
    engine, tokens = Engine(first, caches=[make_caches()]), prompt(2 * CHUNK)
    kill(first)
    start_depot(url=first.url, name=first.name, chunk_size=2 * CHUNK)
    engine.store(LoadStoreOp(list(range(8)), token_ids=tokens))
    eventually(lambda: engine.worker.get_finished(set()) == (None, None))
    hit = engine.lookup(token_ids=tokens)
    if hit:  # whatever it says is there must be there, in units the engine knows
        assert hit == 2 * CHUNK
        assert engine.retrieve(LoadStoreOp(list(range(8, 16)), token_ids=tokens)) == set()
        assert read_blocks(engine.caches[0], list(range(8, 16))) == read_blocks(engine.caches[0], list(range(8)))
    engine.close()


def test_a_class_has_the_names_of_the_contract_and_another_client_is_refused(engine: Engine) -> None:
    assert {"model_name", "world_size", "worker_id", "chunk_size", "mq_client"} <= {
        name for name in dir(LMCacheMPWorkerAdapter) if getattr(LMCacheMPWorkerAdapter, name, None) is not None
    }
    before = engine.scheduler.mq_client
    with pytest.raises(errors.BadRequest, match="must be a MessageQueueClient, not a str"):
        engine.scheduler.mq_client = "ipc:///a/socket"  # type: ignore[assignment]
    assert engine.scheduler.mq_client is before


def test_shutdown_with_an_event_still_pending_is_bounded(depot: Depot) -> None:
    engine = Engine(depot, caches=[make_caches()])
    engine.worker.submit_store_request("r", LoadStoreOp([0, 1, 2, 3], token_ids=prompt(CHUNK)), Later())
    with ends():
        engine.close()
    assert engine.worker.get_finished({"r"}) == ({"r"}, None)


def test_of_a_request_only_the_chunks_that_are_missing_fail(engine: Engine) -> None:
    tokens, told = prompt(3 * CHUNK), list[Operation]()
    engine.scheduler.watch = engine.worker.watch = told.append
    engine.store(LoadStoreOp([0, 1, 2, 3], token_ids=tokens[:CHUNK]))
    engine.store(LoadStoreOp([4, 5, 6, 7], token_ids=tokens, start=2 * CHUNK, end=3 * CHUNK))
    targets = list(range(12, 24))
    before = read_blocks(engine.caches[0], targets)
    assert engine.retrieve(LoadStoreOp(targets, token_ids=tokens)) == {16, 17, 18, 19}
    stored = read_blocks(engine.caches[0], list(range(8)))
    assert read_blocks(engine.caches[0], targets) == stored[:4] + before[4:8] + stored[4:]
    engine.lookup(token_ids=tokens)
    size = len(b"".join(stored[:4]))
    assert [(each.kind, each.chunks, each.done, each.size_bytes, each.error) for each in told] == [
        ("store", 1, 1, size, None), ("store", 1, 1, size, None), ("retrieve", 3, 2, 2 * size, None),
        ("lookup", 3, 1, 0, None),
    ]  # fmt: skip
