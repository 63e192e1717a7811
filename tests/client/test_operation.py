"""The operations that adapters report, compared with what was asked; and their spans."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from importlib.util import find_spec

import pytest

from kvdepot.adapters import LoadStoreOp
from kvdepot.client.operation import Began, Operation
from kvdepot.errors import Busy, DeadlineExceeded, Unavailable
from tests.client.engine import CHUNK, Engine
from tests.conftest import HANG_S, Depot, StartDepot, ends, eventually
from tests.server.process import kill


@pytest.fixture
def _needs_otel() -> None:
    if find_spec("opentelemetry") is None or find_spec("opentelemetry.sdk") is None:
        if os.environ.get("CI"):
            pytest.fail("OpenTelemetry's SDK is not installed, and CI must not skip its tests")
        pytest.skip("OpenTelemetry's SDK is not installed")


@pytest.fixture
def engine(depot: Depot) -> Iterator[Engine]:
    """Blocks have 256 bytes, so a chunk has 1 KiB."""
    made = Engine(depot)
    yield made
    made.close()


def watch(engine: Engine) -> list[Operation]:
    told: list[Operation] = []
    engine.scheduler.watch = engine.worker.watch = told.append
    return told


def test_each_operation_is_told_once_with_what_it_did(engine: Engine) -> None:
    told, tokens = watch(engine), list(range(3 * CHUNK))
    begun = time.time_ns()
    engine.lookup(tokens)
    engine.store(tokens[: 2 * CHUNK], list(range(8)))
    engine.lookup(tokens)
    assert engine.retrieve(tokens, list(range(12))) == {8, 9, 10, 11}
    facts = [(each.kind, each.chunks, each.done, each.size_bytes, each.error) for each in told]
    assert facts == [
        ("lookup", 3, 0, 0, None),
        ("store", 2, 2, 2048, None),
        ("lookup", 3, 2, 0, None),
        ("retrieve", 3, 2, 2048, None),
    ]
    assert all(len(each.requests) == 1 and each.took_s > 0 for each in told)
    assert all(begun <= each.began.wall_ns <= time.time_ns() for each in told)
    assert [len(each.stored) for each in told] == [0, 64, 0, 0]


def test_a_lookup_is_told_once_however_often_its_answer_is_asked_for(engine: Engine) -> None:
    told = watch(engine)
    engine.scheduler.maybe_submit_lookup_request("r", token_ids=list(range(CHUNK)))
    assert told == []
    assert engine.scheduler.wait_lookup_result("r", HANG_S) == 0
    assert engine.scheduler.check_lookup_result("r") == 0
    assert len(told) == 1 and told[0].requests == ["r"]
    engine.scheduler.cleanup_lookup_result("r")
    engine.scheduler.maybe_submit_lookup_request("short", token_ids=[1])
    assert engine.scheduler.check_lookup_result("short") == 0
    assert len(told) == 1  # nothing was asked of the depot


@pytest.mark.faults
def test_what_fails_is_told_with_its_error(start_depot: StartDepot) -> None:
    server = start_depot()
    engine = Engine(server)
    told = watch(engine)
    kill(server)
    assert engine.lookup(list(range(CHUNK))) == 0
    engine.worker.submit_store_request("s", LoadStoreOp([0, 1, 2, 3], token_ids=list(range(CHUNK))), None)
    eventually(lambda: engine.worker.get_finished({"s"})[0])
    assert [(each.kind, each.chunks, each.done, each.size_bytes) for each in told] == [
        ("lookup", 1, 0, 0),
        ("store", 1, 0, 0),
    ]
    assert all(isinstance(each.error, Unavailable | DeadlineExceeded) for each in told)
    assert told[1].stored == b""
    engine.close()


@pytest.mark.usefixtures("_needs_otel")
def test_each_operation_is_a_span_in_the_trace_of_its_request(engine: Engine) -> None:
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
    from opentelemetry.trace import SpanKind, StatusCode

    from kvdepot.client.tracing import Spans

    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    trace_id, parent = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
    headers = {"mine": {"traceparent": f"00-{trace_id}-{parent}-01"}}
    spans = Spans(provider, headers.get)
    engine.scheduler.watch = engine.worker.watch = spans
    before = time.time_ns()
    engine.scheduler.maybe_submit_lookup_request("mine", token_ids=list(range(2 * CHUNK)))
    engine.scheduler.wait_lookup_result("mine", HANG_S)
    engine.worker.submit_store_request("mine", LoadStoreOp([0, 1, 2, 3], token_ids=list(range(CHUNK))), None)
    eventually(lambda: engine.worker.get_finished({"mine"})[0])
    spans(Operation("retrieve", ["mine", "other"], Began.now(), 0.5, 3, 0, error=Busy("full")))
    lookup, store, mine, other = exporter.get_finished_spans()
    assert [span.name for span in (lookup, store, mine, other)] == [
        "kvdepot.lookup", "kvdepot.store", "kvdepot.retrieve", "kvdepot.retrieve",
    ]  # fmt: skip
    for span in (lookup, store, mine):
        assert f"{span.context.trace_id:032x}" == trace_id and f"{span.parent.span_id:016x}" == parent
    assert other.parent is None and f"{other.context.trace_id:032x}" != trace_id
    assert before <= lookup.start_time <= lookup.end_time <= store.end_time <= time.time_ns()
    assert lookup.kind is SpanKind.CLIENT
    assert dict(store.attributes or {}) == {
        "kvdepot.chunks": 1, "kvdepot.chunks_done": 1, "kvdepot.size_bytes": 1024, "kvdepot.requests": 1,
        "gen_ai.request.id": "mine",
    }  # fmt: skip
    assert mine.status.status_code is StatusCode.ERROR and mine.status.description == "busy: full"
    assert mine.end_time - mine.start_time == 500_000_000
    assert lookup.status.status_code is StatusCode.UNSET


@pytest.mark.faults
@pytest.mark.usefixtures("_needs_otel")
def test_a_collector_that_never_answers_holds_nobody_up() -> None:
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult

    from kvdepot.client.tracing import Spans

    asked, answer = threading.Event(), threading.Event()

    class Silent(SpanExporter):
        def export(self, spans: object) -> SpanExportResult:
            asked.set()
            answer.wait(2 * HANG_S)
            return SpanExportResult.SUCCESS

    processor = BatchSpanProcessor(Silent(), max_queue_size=512, max_export_batch_size=64)
    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(processor)
    spans = Spans(provider)
    with ends():
        for number in range(1000):  # more than the queue takes
            spans(Operation("lookup", [f"r{number}"], Began.now(), 0.001, 3, 1))
        assert asked.wait(HANG_S)
    answer.set()
    provider.shutdown()
