"""What a server tells of itself is what has happened to it: counted by the traffic that a test drives."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import pytest
import torch

from kvdepot import status
from kvdepot.adapters import LMCacheMPSchedulerAdapter, LMCacheMPWorkerAdapter, LoadStoreOp
from kvdepot.client import MessageQueueClient, admin
from kvdepot.core.report import Report, ServerFacts
from kvdepot.errors import BadRequest, ConfigError, UnknownRequest
from kvdepot.metrics import BOUNDS_S, Latencies
from kvdepot.protocol import wire
from tests.conftest import HANG_S, eventually

if TYPE_CHECKING:
    from conftest import Depot, StartDepot

CHUNK = 256
BLOCK = 16
BLOCK_BYTES = 4 * BLOCK * 64 * 4
CHUNK_BYTES = BLOCK_BYTES * CHUNK // BLOCK


def told(depot: Depot) -> status.Status:
    return status.read(depot.status())


@pytest.fixture
def depot(start_depot: StartDepot) -> Depot:
    return start_depot(arena_mib=128)


def an_engine(depot: Depot) -> tuple[LMCacheMPSchedulerAdapter, LMCacheMPWorkerAdapter]:
    place = (depot.url, depot.context, "toy", 1, 0, BLOCK)
    scheduler, worker = LMCacheMPSchedulerAdapter(*place), LMCacheMPWorkerAdapter(*place)
    worker.register_kv_caches({f"layer {i}": torch.zeros(64, BLOCK, 64) for i in range(4)}, [0] * 4)
    return scheduler, worker


def move(worker: LMCacheMPWorkerAdapter, request: str, tokens: list[int], is_store: bool) -> None:
    op = LoadStoreOp(list(range(len(tokens) // BLOCK)), tokens, None, 0, len(tokens))
    (worker.submit_store_request if is_store else worker.submit_retrieve_request)(request, op, None)
    futures = worker.store_futures if is_store else worker.retrieve_futures
    eventually(lambda: worker.get_finished(set()) and not futures)


@pytest.mark.faults
def test_the_report_counts_every_byte_and_token_of_engines(depot: Depot) -> None:
    scheduler, worker = an_engine(depot)
    tokens = list(range(2 * CHUNK))
    move(worker, "first", tokens, is_store=True)
    scheduler.maybe_submit_lookup_request("again", token_ids=tokens)
    assert eventually(lambda: scheduler.check_lookup_result("again")) == 2 * CHUNK
    scheduler.maybe_submit_lookup_request("other", token_ids=[7] * CHUNK)
    eventually(lambda: scheduler.check_lookup_result("other") is not None)
    move(worker, "again", tokens, is_store=False)
    scheduler.end_session("again")
    scheduler.end_session("other", saved_tokens=100, saved_s=0.25)

    now = eventually(lambda: (seen := told(depot)).saved.tokens == 2 * CHUNK + 100 and seen)
    assert now.stored_bytes == now.retrieved_bytes == now.used_bytes == 2 * CHUNK_BYTES
    assert now.saved.prefill_s == 0.25
    (namespace,) = now.namespaces
    assert (namespace.model, namespace.chunks, namespace.lookup_chunks, namespace.hit_chunks) == ("toy", 2, 3, 2)
    by_rank = {tuple(engine.ranks): engine for engine in now.engines}
    assert by_rank[0,].models == by_rank[()].models == ["toy"] and len(now.engines) == 2
    assert all(0 <= engine.idle_s <= engine.since_s <= now.uptime_s + 1 for engine in now.engines)
    times = {latency.request: latency for latency in now.latencies}
    assert {name: times[name].count for name in ("Store", "Retrieve", "Lookup")} == {
        "Store": 1, "Retrieve": 1, "Lookup": 2,
    }  # fmt: skip
    for latency in now.latencies:
        assert sum(latency.buckets) == latency.count and not latency.errors
        assert 0 <= latency.sum_s < 30
    assert abs(now.wall_s - time.time()) < 3 and now.version and len(now.boot) == 16
    assert [event.kind for event in now.events] == ["start", "engine"]
    worker.shutdown()
    scheduler.shutdown()
    eventually(lambda: not told(depot).engines)
    assert "is gone" in told(depot).events[-1].text


def test_a_request_that_fails_is_counted_with_its_time(depot: Depot) -> None:
    scheduler, worker = an_engine(depot)
    with pytest.raises(BadRequest, match=r"saved_tokens -1 or saved_s 0\.0 is out of range"):
        scheduler.mq_client.ask(wire.EndSession("r", -1)).result(HANG_S)
    with pytest.raises(BadRequest, match="saved_tokens 1 or saved_s nan is out of range"):
        scheduler.mq_client.ask(wire.EndSession("r", 1, float("nan"))).result(HANG_S)
    (ends,) = (latency for latency in told(depot).latencies if latency.request == "EndSession")
    assert (ends.count, ends.errors) == (2, 2) and told(depot).saved == status.Saved()
    worker.shutdown()
    scheduler.shutdown()


def test_commands_do_not_count_as_requests_of_engines(depot: Depot) -> None:
    before = told(depot)
    with admin.connect(depot.url) as client:
        with pytest.raises(UnknownRequest):
            admin.why(client, "a typo")
        with pytest.raises(BadRequest, match="no lease"):
            admin.end_lease(client, "another")
        assert admin.leases(client) == []
    now = told(depot)
    assert now.counters["errors"] == before.counters["errors"] and now.latencies == before.latencies
    with admin.connect(depot.url) as engine:
        engine.ask(wire.Lookup("toy", 1, 0, "r", 1, bytes(32))).result(HANG_S)
        with pytest.raises(BadRequest, match="no lease"):
            admin.end_lease(engine, "another")
    assert {each.request for each in told(depot).latencies} - {each.request for each in now.latencies} >= {"EndLease"}


def test_engines_are_all_counted_where_only_some_are_listed(depot: Depot) -> None:
    scheduler, worker = an_engine(depot)
    tokens = list(range(CHUNK))
    move(worker, "first", tokens, is_store=True)
    others = [MessageQueueClient(depot.url, depot.context) for _ in range(70)]
    for other in others:
        other.ask(wire.Lookup("toy", 1, 0, "r", 1, bytes(32))).result(HANG_S)
    with admin.connect(depot.url) as client:
        admin.lease(client, "pin", admin.make_prompt(client, tokens, b"", "toy", ""))
    now = told(depot)
    assert (now.engine_count, len(now.engines)) == (71, 64)
    assert (now.lease_count, now.leased_bytes) == (1, CHUNK_BYTES)
    for each in (*others, scheduler, worker):
        (each.close if isinstance(each, MessageQueueClient) else each.shutdown)()


def test_times_fall_into_the_bucket_that_ends_at_or_above_them() -> None:
    latencies = Latencies()
    for number, took in enumerate((BOUNDS_S[0], BOUNDS_S[0] + 1e-9, 3.0, 1000.0)):
        latencies.begin(b"c", bytes([number]), "Lookup", 0.0)
        latencies.end(b"c", bytes([number]), took > 100, took)
    (lookup,) = latencies.figures()
    filled = {i: count for i, count in enumerate(lookup.buckets) if count}
    assert filled == {0: 1, 1: 1, BOUNDS_S.index(5.0): 1, len(BOUNDS_S): 1}
    assert (lookup.count, lookup.errors) == (4, 1)


@pytest.mark.faults
def test_a_prompts_model_is_named_in_full_where_the_list_may_hide_another(depot: Depot) -> None:
    tokens = list(range(CHUNK))
    place = (depot.url, depot.context, "team/zero", 1, 0, BLOCK)
    worker = LMCacheMPWorkerAdapter(*place)
    layer = {"layer": torch.zeros(64, BLOCK, 64)}
    worker.register_kv_caches(layer)
    others = [LMCacheMPWorkerAdapter(*place[:2], "y" * 300, *place[3:])]
    try:
        others[0].register_kv_caches(layer)
        with admin.connect(depot.url) as client:

            def meant(model: str) -> str:
                return admin.make_prompt(client, tokens, b"", model, "").spec.model

            assert meant("te") == meant("team/zero") == "team/zero"
            for name in ("y", "y" * 256, "y" * 300):
                with pytest.raises(ConfigError, match="256 characters of a name"):
                    meant(name)
            with pytest.raises(ConfigError, match="has 2 models"):
                meant("")
            move(worker, "first", tokens, is_store=True)  # the largest, so it is listed
            others += [LMCacheMPWorkerAdapter(*place[:2], f"team/{i}", *place[3:]) for i in range(100)]
            for other in others[1:]:
                other.register_kv_caches(layer)
            now = told(depot)
            assert (now.namespace_count, len(now.namespaces)) == (102, 100)
            assert meant("team/zero") == "team/zero"
            with pytest.raises(ConfigError, match=r"may also match other models than team/zero.* 2 smallest"):
                meant("team/z")
            with pytest.raises(ConfigError, match=r"no model of this server matches .* models: .* and 2 smaller ones"):
                meant("nobody")
            said = admin.forget(client, "team/", "")
            assert said == wire.ForgetAnswer({"memory": 1})
    finally:
        for each in (worker, *others):
            each.shutdown()


def test_requests_of_clients_that_died_or_never_said_hello_leave_nothing_behind() -> None:
    latencies = Latencies()
    latencies.end(b"c", b"1", False, 1.0)  # an answer to nobody
    latencies.begin(b"c", b"2", "Store", 1.0)
    latencies.gone(b"c")
    latencies.end(b"c", b"2", False, 2.0)
    for number in range(100):
        latencies.begin(b"stranger %d" % number, b"1", "Noop", 0.0)
        latencies.end(b"stranger %d" % number, b"1", True, 1.0)
    assert latencies.figures() == [] and not latencies._asked


def test_the_journal_keeps_the_latest_events() -> None:
    report = Report(ServerFacts())
    for number in range(1000):
        report.note("kind", f"{number} " + "x" * 1000)
    events = report.events
    assert len(events) == 100 and events[-1].text.startswith("999 ") and len(events[0].text) == 200
