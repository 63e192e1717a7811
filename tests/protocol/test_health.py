"""The health of a server: which statuses need somebody, and what to do."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from kvdepot.protocol.health import judge
from kvdepot.protocol.status import Engine, Status, TierStatus


def status(**facts: Any) -> Status:
    counts = dict.fromkeys((field.name for field in msgspec.structs.fields(Status) if field.required), 0)
    return Status(**{**counts, "engine_count": 1, **facts})


def test_a_server_without_problems_needs_nobody() -> None:
    assert judge(status()).headline == "Healthy"
    assert judge(status(engine_count=0)).headline == "Healthy, no engine is connected"
    assert judge(status()).level == judge(status(engine_count=0)).level == "good"


@pytest.mark.parametrize(
    ("facts", "trouble", "dropped", "what"),
    [
        ({"unreachable": "the socket is gone"}, "x", 0.0, "No new engine can connect: the socket is gone."),
        ({}, "the server lags: 2 s", 0.0, "The server lags: 2 s."),
        ({"http_failure": "cannot bind 127.0.0.1:7077 (in use); retrying, or choose another --http"}, "", 0.0,
         "HTTP is not served: cannot bind 127.0.0.1:7077 (in use); retrying, or choose another --http."),
        ({"tiers": [TierStatus("s3", "through", "circuit breaker open", 1, 1, None, 0, 0, {}, "refused")]}, "", 0.0,
         "s3: circuit breaker open, retrying with backoff: refused."),
        ({"tiers": [TierStatus("redis", "through", "reads fail", 1, 1, None, 0, 0, {}, "NOPERM")]}, "", 0.0,
         "redis: reads fail, retrying with backoff: NOPERM."),
        ({"tiers": [TierStatus("disk", "through", "up", 9, 500, 1000, 0, 0, {}, free_bytes=40)]}, "", 0.0,
         "disk: its file system is nearly full"),
        ({"faulty_engines": 2, "engines": [
            Engine("a", 1.0, 1.0, ["m"], [0], "", 0, 0, 0, "well"),
            Engine("b", 1.0, 1.0, ["m"], [1], "", 0, 0, 0, "ill", fault="block 3 came back different."),
        ]}, "", 0.0, "2 engines can neither store nor load KV, such as ill: block 3 came back different."),
        ({"faulty_engines": 1}, "", 0.0, "1 engine can neither store nor load KV."),
        ({"divided_engines": 1}, "", 0.0, "1 engine: scheduler and workers disagree on the identity of the KV."),
        ({"settings": {"kv_events": "tcp://127.0.0.1:7078"}, "instances": 1}, "", 0.0,
         "No engine names a topic for its KV events, so routers receive none."),
        ({"counters": {"corrupt_chunks": 1}}, "", 0.0, "1 chunk failed checksum verification"),
        ({"unrecorded_shards": 3}, "", 0.0, "3 shards would not survive a restart"),
        ({}, "", 30.2, "30 shards were dropped in the last 5 minutes: memory was full."),
    ],
)  # fmt: skip
def test_each_problem_is_told_with_what_to_do(facts: dict[str, Any], trouble: str, dropped: float, what: str) -> None:
    health = judge(status(**facts), trouble, dropped)
    (concern,) = health.concerns
    assert (health.level, health.headline) == ("look", "Needs attention: 1 warning")
    assert concern.what.startswith(what)
    assert concern.advice.endswith(".")


@pytest.mark.parametrize("facts", [{"instances": 0}, {"kv_event_topics": 1}, {"settings": {"kv_events": ""}}], ids=str)
def test_kv_events_without_engines_or_with_a_topic_are_no_problem(facts: dict[str, Any]) -> None:
    events = {"settings": {"kv_events": "tcp://127.0.0.1:7078"}, "instances": 1}
    assert judge(status(**{**events, **facts})).level == "good"


def test_a_disk_at_its_capacity_is_no_problem_because_it_evicts() -> None:
    full = TierStatus("disk", "through", "up", 9, 990, 1000, 0, 0, {}, free_bytes=40)
    large = msgspec.structs.replace(full, bytes=100, free_bytes=60)
    assert judge(status(tiers=[full, large])).level == "good"


def test_problems_are_counted() -> None:
    assert judge(status(unrecorded_shards=1), "it lags", 5.0).headline == "Needs attention: 3 warnings"
