"""What a real engine's connector and a depot tell of themselves: vLLM's metrics, its KV events, its traces."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq

from kvdepot import wire
from kvdepot.client import MessageQueueClient
from tests.conftest import StartDepot, eventually
from tests.vllm.conftest import StartEngine
from tests.vllm.engines import prompt


class Events:
    """A subscriber that reads with vLLM's own decoder."""

    def __init__(self, endpoint: str) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of what vLLM imports
            from vllm.distributed.kv_events import KVEventBatch

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


def test_metrics_events_and_traces_of_an_engine_say_what_it_did(
    start_depot: StartDepot,
    models: dict[str, Path],
    start_engine: StartEngine,
    collector: Collector,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, value in {
        "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "http/protobuf", "OTEL_BSP_SCHEDULE_DELAY": "100",
        "OTEL_EXPORTER_OTLP_TRACES_INSECURE": "true",
    }.items():  # fmt: skip
        monkeypatch.setenv(name, value)
    server = start_depot("--kv-events", f"ipc://{tmp_path}/depot", arena_mib=256)
    depots = Events(f"ipc://{tmp_path}/depot")
    eventually(lambda: depots.hear() or depots.batches)
    engine = start_engine(
        models["gqa"], server.url, otlp_traces_endpoint=collector.url,
        kv_events_config={"enable_kv_cache_events": True, "publisher": "zmq", "endpoint": f"ipc://{tmp_path}/engine"},
    )  # fmt: skip
    engines = Events(f"ipc://{tmp_path}/engine")
    engine.wait_started()
    tokens = prompt(1, 2 * 256 + 9)
    trace_id, parent = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
    headers = {"traceparent": f"00-{trace_id}-{parent}-01"}
    assert engine.run(tokens, trace_headers=headers)["cached"] == 0
    assert engine.run_fresh(tokens, trace_headers=headers)["cached"] == 512

    # metrics: as asked, and as the server counts
    status = server.status()
    metrics = engine.tell("metrics")
    assert metrics == {f"vllm:kvdepot_{name}": value for name, value in {
        "lookup_chunks": 4, "hit_chunks": 2, "lookup_errors": 0, "lookup_seconds": 2,
        "stored_shards": 2, "stored_bytes": status["stored_bytes"], "store_failed_shards": 0,
        "store_seconds": metrics["vllm:kvdepot_store_seconds"],
        "retrieved_shards": 2, "retrieved_bytes": status["retrieved_bytes"], "retrieve_failed_shards": 0,
        "retrieve_seconds": 1,
    }.items()}  # fmt: skip
    assert status["stored_bytes"] == status["retrieved_bytes"] > 0
    assert 1 <= metrics["vllm:kvdepot_store_seconds"] <= 2

    # the depot's own events
    stored = depots.of("BlockStored")
    keys = [key for event in stored for key in event.block_hashes]
    assert len(keys) == 2 and all(len(key) == 32 for key in keys)
    assert {(event.medium, event.block_size, tuple(event.token_ids)) for event in stored} == {("CPU", 256, ())}

    # the connector's, among the engine's: blocks by the engine's own hashes, with their tokens
    engines.hear()
    own = {tuple(e.block_hashes): e for e in engines.of("BlockStored") if e.medium == "GPU"}
    chunks = [event for event in engines.of("BlockStored") if event.medium == "CPU"]
    assert [token for event in chunks for token in event.token_ids] == tokens[:512]
    blocks = [each for event in chunks for each in event.block_hashes]
    assert set(blocks) <= {each for hashes in own for each in hashes}
    assert chunks[0].parent_block_hash is None and chunks[1].parent_block_hash == chunks[0].block_hashes[-1]
    assert chunks[0].block_size * len(chunks[0].block_hashes) == 256
    assert not [event for event in engines.of("BlockRemoved") if event.medium == "CPU"]

    # what the depot has forgotten is believed until a lookup misses it
    since = len(depots.hear())
    client = MessageQueueClient(server.url, server.context)
    client.ask(wire.Forget("", b"")).result(10.0)
    client.close()
    eventually(lambda: depots.of("AllBlocksCleared", since))
    since = len(engines.hear())
    assert engine.run_fresh(tokens)["cached"] == 0
    engines.hear()
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
    depots.close(), engines.close()
    engine.stop()
