"""Telemetry of a real engine's connector and a depot: vLLM's metrics, KV events and traces."""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq
from vllm.distributed.kv_events import KVEventBatch

from kvdepot.client import MessageQueueClient
from kvdepot.client.operation import Began, Operation
from kvdepot.client.transfer import Transfer
from kvdepot.errors import DeadlineExceeded
from kvdepot.integrations.vllm.events import KnownChunks
from kvdepot.integrations.vllm.groups import EventGroup
from kvdepot.integrations.vllm.messages import WorkerReport
from kvdepot.integrations.vllm.stats import KVDepotStats
from kvdepot.keys import ChunkChain, derive_root
from kvdepot.protocol import wire
from tests.conftest import StartDepot, eventually
from tests.vllm.conftest import StartEngine
from tests.vllm.engines import prompt

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of what vLLM imports


class Events:
    """A subscriber that reads with vLLM's own decoder."""

    def __init__(self, endpoint: str) -> None:
        self.context: zmq.Context[Any] = zmq.Context()
        self.socket = self.context.socket(zmq.SUB)
        self.socket.setsockopt(zmq.SUBSCRIBE, b"")
        self.socket.setsockopt(zmq.RECONNECT_IVL, 10)
        self.socket.connect(endpoint)
        self.decoder = msgspec.msgpack.Decoder(KVEventBatch)
        self.events: list[Any] = []
        self.batches = 0

    def hear(self) -> list[Any]:
        """All events so far."""
        while self.socket.poll(0):
            _, _, payload = self.socket.recv_multipart()
            self.events += self.decoder.decode(payload).events
            self.batches += 1
        return self.events

    def of(self, kind: str, since: int = 0) -> list[Any]:
        return [event for event in self.hear()[since:] if type(event).__name__ == kind]

    def tokens_of(self, medium: str, since: int = 0) -> int:
        """Number of tokens that the events say are cached now."""
        return sum(len(event.token_ids) for event in self.of("BlockStored", since) if event.medium == medium)

    def close(self) -> None:
        self.context.destroy(linger=0)


class Collector:
    """An OpenTelemetry collector: OTLP over HTTP, spans by name."""

    def __init__(self) -> None:
        from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

        spans = self.spans = []  # type: ignore[var-annotated]

        class Receiver(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                sent = ExportTraceServiceRequest.FromString(self.rfile.read(int(self.headers["Content-Length"])))
                spans.extend(span for each in sent.resource_spans for scope in each.scope_spans for span in scope.spans)
                self.send_response(200)
                self.end_headers()

            def log_message(self, format: str, *args: Any) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Receiver)
        self.thread = threading.Thread(target=self.server.serve_forever)
        self.thread.start()
        self.url = f"http://127.0.0.1:{self.server.server_port}/v1/traces"

    def close(self) -> None:
        self.server.shutdown()
        self.thread.join()
        self.server.server_close()


@pytest.fixture
def collector() -> Iterator[Collector]:
    made = Collector()
    yield made
    made.close()


@pytest.fixture
def subscribe() -> Iterator[Callable[[str], Events]]:
    """Subscribers that end with the test."""
    with contextlib.ExitStack() as ending:

        def start(endpoint: str) -> Events:
            return ending.enter_context(contextlib.closing(Events(endpoint)))

        yield start


def test_metrics_events_and_traces_of_an_engine_say_what_it_did(
    start_depot: StartDepot,
    models: dict[str, Path],
    start_engine: StartEngine,
    collector: Collector,
    subscribe: Callable[[str], Events],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, value in {
        "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "http/protobuf", "OTEL_BSP_SCHEDULE_DELAY": "100",
        "OTEL_EXPORTER_OTLP_TRACES_INSECURE": "true",
    }.items():  # fmt: skip
        monkeypatch.setenv(name, value)
    server = start_depot("--log-level", "debug", "--log-format", "json", arena_mib=256)
    engine = start_engine(
        models["gqa"], server.url, otlp_traces_endpoint=collector.url,
        kv_events_config={"enable_kv_cache_events": True, "publisher": "zmq", "endpoint": f"ipc://{tmp_path}/engine"},
    )  # fmt: skip
    engines = subscribe(f"ipc://{tmp_path}/engine")
    engine.wait_started()
    tokens = prompt(1, 2 * 256 + 9)
    trace_id, parent = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
    headers = {"traceparent": f"00-{trace_id}-{parent}-01"}
    assert engine.run(tokens, trace_headers=headers)["cached"] == 0
    assert engine.run_fresh(tokens, trace_headers=headers)["cached"] == 512

    # metrics: as asked, and as the server counts
    # (The end of a session is told without an answer.)
    status = eventually(lambda: (now := server.status())["saved"]["tokens"] and now)
    metrics = engine.tell("metrics")
    assert metrics == {f"vllm:kvdepot_{name}": value for name, value in {
        "lookup_chunks": 4, "hit_chunks": 2, "lookup_errors": 0, "lookup_seconds": 2,
        "stored_shards": 2, "stored_bytes": status["stored_bytes"], "store_failed_shards": 0,
        "store_seconds": metrics["vllm:kvdepot_store_seconds"],
        "retrieved_shards": 2, "retrieved_bytes": status["retrieved_bytes"], "retrieve_failed_shards": 0,
        "retrieve_seconds": 1, "uncached_requests": 0, "refused_hints": 0, "lease_errors": 0,
    }.items()}  # fmt: skip
    assert status["stored_bytes"] == status["retrieved_bytes"] > 0
    assert 1 <= metrics["vllm:kvdepot_store_seconds"] <= 2

    # what the load saved; not in time yet, for the engine's first step does not say how fast it is
    assert status["saved"] == {"tokens": 512, "prefill_s": 0.0}

    # the server's log: each request by the id that vLLM gave it
    def by_request() -> list[list[str]]:
        said: dict[str, list[str]] = {}
        for line in map(json.loads, server.logged().splitlines()):
            if "request" in line:
                said.setdefault(line["request"], []).append(line["message"])
        return list(said.values())

    eventually(lambda: sum(map(len, by_request())) >= 4)
    first, second = by_request()
    assert first[0] == "found 0 of 2 chunks"
    assert first[1:] in (["stored 2 of 2 new chunks"], ["stored 1 of 1 new chunks"] * 2)  # in one step, or two
    assert second == ["found 2 of 2 chunks", "retrieved 2 of 2 chunks"]

    # the connector's, among the engine's: blocks by the engine's own hashes, with their tokens
    eventually(lambda: engines.tokens_of("CPU") >= 512)
    own = {tuple(e.block_hashes): e for e in engines.of("BlockStored") if e.medium == "GPU"}
    chunks = [event for event in engines.of("BlockStored") if event.medium == "CPU"]
    assert [token for event in chunks for token in event.token_ids] == tokens[:512]
    blocks = [each for event in chunks for each in event.block_hashes]
    assert set(blocks) <= {each for hashes in own for each in hashes}
    assert chunks[0].parent_block_hash is None and chunks[1].parent_block_hash == chunks[0].block_hashes[-1]
    assert chunks[0].block_size * len(chunks[0].block_hashes) == 256
    assert not [event for event in engines.of("BlockRemoved") if event.medium == "CPU"]

    # what the depot has forgotten is believed until a lookup misses it
    client = MessageQueueClient(server.url, server.context)
    client.ask(wire.Forget("", b"")).result(10.0)
    client.close()
    eventually(lambda: not server.status()["chunks"])
    since = len(engines.hear())
    began = time.monotonic()
    assert engine.run_fresh(tokens)["cached"] == 0
    again_s = time.monotonic() - began
    eventually(lambda: engines.tokens_of("CPU", since) >= 512)  # these come after what was removed
    removed = [event for event in engines.of("BlockRemoved", since) if event.medium == "CPU"]
    assert [each for event in removed for each in event.block_hashes] == blocks
    again = [event for event in engines.of("BlockStored", since) if event.medium == "CPU"]
    assert [each for event in again for each in event.block_hashes] == blocks

    # traces
    def joined() -> list[Any]:
        return [span for span in collector.spans if span.trace_id.hex() == trace_id and "kvdepot" in span.name]

    eventually(lambda: len(joined()) >= 4)
    names = [span.name for span in joined()]
    assert names.count("kvdepot.lookup") == 2 and names.count("kvdepot.retrieve") == 1 and "kvdepot.store" in names
    assert {span.parent_span_id.hex() for span in joined()} == {parent}

    # what a load saves by the speed of the step that computed the prompt again, which its output ended
    assert engine.run_fresh(tokens)["cached"] == 512
    saved = eventually(lambda: (now := server.status()["saved"])["tokens"] == 1024 and now)
    assert 0 < saved["prefill_s"] < again_s
    engine.stop()


def test_the_reused_share_is_vllms_own_external_hit_rate(
    start_depot: StartDepot, models: dict[str, Path], start_engine: StartEngine
) -> None:
    server = start_depot(arena_mib=256)
    engine = start_engine(models["gqa"], server.url)
    engine.wait_started()
    shared = prompt(1, 3 * 256)
    engine.run(shared + prompt(2, 300))
    assert server.status()["tokens"]["bound"] == 0
    engine.run(shared + prompt(3, 77))  # what they share is in vLLM's own cache
    engine.run(prompt(4, 100))  # less than a chunk
    engine.run_fresh(shared + prompt(3, 77))
    engine.run(prompt(5, 700))
    engine.run(shared + prompt(2, 300) + prompt(6, 400))  # partly in vLLM's cache, partly in the depot
    several = [engine.request(prompt(5, 700) + prompt(7 + i, 200 * i)) for i in range(3)]
    engine.tell("reset")
    engine.tell("run", requests=several)
    queries, hits = engine.tell("external")
    assert 0.2 < hits / queries < 0.8, "requests that tell nothing"
    tokens = eventually(lambda: (now := server.status()["tokens"])["asked"] >= queries and now)
    assert (tokens["asked"], tokens["reused"]) == (queries, hits)
    assert tokens["reused"] <= tokens["found"] == tokens["bound"], "nothing was evicted: an infinite cache has no more"
    (usage,) = server.status()["usage"]
    assert (usage["asked_tokens"], usage["reused_tokens"]) == (queries, hits)
    engine.stop()


# -- the connector's parts, without an engine


class Prompt:
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


def told(known: Any) -> list[tuple[str, list[bytes]]]:
    """Events by their hashes, of which vLLM publishes the last 64 bits."""
    return [
        (type(event).__name__, [each.to_bytes(8, "big").rjust(32, b"-") for each in event.block_hashes])
        for event in known.take()
    ]


def test_a_chunk_is_told_as_stored_once_every_rank_has_stored_it() -> None:
    known, one = KnownChunks(2, 8, EventGroup(4)), Prompt(1, 3)
    known.ordered(one, one.chain, range(3), one.transfers(0, 3))
    known.stored(one.stored(0, 2, 0))
    known.stored(one.stored(0, 2, 0))  # for another request with the same beginning
    assert told(known) == []
    known.stored(one.stored(1, 3, 1))
    assert told(known) == [("BlockStored", one.block_hashes[2:4])]
    known.stored(one.stored(0, 1, 1))
    assert told(known) == [("BlockStored", one.block_hashes[:2])]
    known.ordered(one, one.chain, range(2, 3), one.transfers(2, 3))
    known.stored(one.stored(2, 3, 1))
    assert told(known) == []
    known.stored(one.stored(2, 3, 0, 1))
    assert told(known) == [("BlockStored", one.block_hashes[4:6])]


def test_a_lookup_publishes_what_is_there_and_removes_what_is_not() -> None:
    known, one = KnownChunks(1, 8, EventGroup(4)), Prompt(1, 3)
    known.found(one, one.chain, 2, len(one.chain))
    assert told(known) == [("BlockStored", one.block_hashes[:2]), ("BlockStored", one.block_hashes[2:4])]
    known.found(one, one.chain, 2, len(one.chain))
    assert told(known) == []
    known.found(one, one.chain, 1, len(one.chain))
    assert told(known) == [("BlockRemoved", one.block_hashes[2:4])]
    known.lost(one.chain.slice(0, 3))
    assert told(known) == [("BlockRemoved", one.block_hashes[:2])]
    known.found(one, one.chain, 3, len(one.chain))
    told(known)
    known.clear()
    assert [kind for kind, _ in told(known)] == ["BlockRemoved"] * 3


def test_a_lookup_of_a_window_publishes_the_known_parts_and_their_group() -> None:
    known, one = KnownChunks(1, 8, EventGroup(4, 2, "sliding_window", 16, reach=2)), Prompt(1, 4)
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
    assert told(known) == [("BlockRemoved", one.block_hashes[:2]), ("BlockRemoved", one.block_hashes[2:4])]


def test_no_more_is_believed_than_the_limit_and_of_that_what_was_heard_of_last() -> None:
    known, one, two = KnownChunks(1, 8, EventGroup(4), most=3), Prompt(1, 3), Prompt(2, 1)
    known.found(one, one.chain, 3, len(one.chain))
    known.found(one, Prompt(1, 1).chain, 1, len(Prompt(1, 1).chain))  # its first chunk again
    told(known)
    known.found(two, two.chain, 1, len(two.chain))
    assert told(known) == [("BlockStored", two.block_hashes), ("BlockRemoved", one.block_hashes[2:4])]


def test_stats_of_ranks_add_up_and_are_shown_and_empty_when_nothing_has_ended() -> None:
    def operation(kind: str, took_s: float, chunks: int, done: int, size: int = 0, error: Any = None) -> Operation:
        return Operation(kind, ["r"], Began.now(), took_s, chunks, done, size, error)

    one, two = KVDepotStats(), KVDepotStats()
    assert one.is_empty() and one.reduce() == {}
    one.count(operation("lookup", 0.001, 4, 3))
    one.count(operation("lookup", 0.003, 4, 0, error=DeadlineExceeded("late")))
    one.count(operation("retrieve", 0.2, 3, 2, 2000))
    two.count(operation("retrieve", 0.4, 3, 3, 3000))
    two.count(operation("store", 0.5, 2, 0))
    one.aggregate(two)
    assert one.data == {
        "lookup_chunks": 8, "hit_chunks": 3, "lookup_errors": 1, "lookup_seconds": [0.001, 0.003],
        "retrieved_shards": 5, "retrieved_bytes": 5000, "retrieve_failed_shards": 1, "retrieve_seconds": [0.2, 0.4],
        "stored_shards": 0, "stored_bytes": 0, "store_failed_shards": 2, "store_seconds": [0.5],
    }  # fmt: skip
    assert one.reduce() == {
        "lookup_chunks": 8, "hit_chunks": 3, "lookup_errors": 1, "lookups": 2, "lookup_seconds (median)": 0.002,
        "retrieved_shards": 5, "retrieved_bytes": 5000, "retrieve_failed_shards": 1, "retrieves": 2,
        "retrieve_seconds (median)": 0.3, "store_failed_shards": 2, "stores": 1, "store_seconds (median)": 0.5,
    }  # fmt: skip
    one.reset()
    assert one.is_empty()
