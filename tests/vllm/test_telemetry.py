"""What a real engine and its depot say of what they do: metrics, log, KV events and leases.

One engine and one server for all tests of this file, which compare what was counted before and after.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import pytest

from kvdepot.client import admin
from kvdepot.protocol.leases import LeaseStatus
from tests.conftest import Depot, eventually
from tests.kv_events.desk import Follower
from tests.kv_events.router import BLOCK
from tests.vllm.engines import Engine, nothing_is_held, prompt

STORED = ("tag", "block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium")
"""The fields of an event of a stored chunk, as vLLM wrote its own before 0.32 and routers read them in all versions."""


class Site(NamedTuple):
    """A depot, its engine, and a router that follows the depot's events."""

    depot: Depot
    engine: Engine
    follower: Follower


@pytest.fixture(scope="module")
def site(models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    endpoint = f"ipc://{tmp_path_factory.mktemp('events')}/depot"
    # 64 chunks, of which leases may hold half
    depot = Depot("--log-level", "debug", "--log-format", "json", "--kv-events", endpoint, arena_mib=16)
    extra = {"kvdepot.events_topic": "kv@10.0.0.1:8000@llama"}
    engine = Engine(models["gqa"], depot.wait_ready().url, extra=extra)
    try:
        follower = Follower(endpoint)
        yield Site(depot, engine.wait_started(), follower)
        engine.stop()
        follower.wait(lambda router: router.score(prompt(1, 600), "llama") == {})  # its blocks have left with it
        follower.close()
        eventually(lambda: nothing_is_held(depot.status()))
    finally:
        engine.close()
        depot.close()


def test_metrics_and_log_of_an_engine_say_what_it_did(site: Site) -> None:
    depot, engine = site.depot, site.engine
    tokens = prompt(1, 2 * 256 + 9)
    before, counted, logged = depot.status(), engine.tell("metrics"), len(depot.logged())
    computed, loaded = engine.run(tokens), engine.run_fresh(tokens)
    assert (computed["cached"], loaded["cached"]) == (0, 512)
    assert computed["told"] == {"kvdepot": {"found": 0, "loaded": 0, "compared": 0, "saved_s": 0.0}}
    said = loaded["told"]["kvdepot"]
    assert (said["found"], said["loaded"], said["compared"]) == (512, 512, 0)

    # metrics: as asked, and as the server counts (the end of a session is told without an answer)
    status = eventually(lambda: (now := depot.status())["saved"]["tokens"] > before["saved"]["tokens"] and now)
    moved = {name: status[name] - before[name] for name in ("stored_bytes", "retrieved_bytes")}
    metrics = {name: value - counted[name] for name, value in engine.tell("metrics").items()}
    assert metrics == {f"vllm:kvdepot_{name}": value for name, value in {
        "lookup_chunks": 4, "hit_chunks": 2, "lookup_errors": 0, "lookup_seconds": 2,
        "stored_shards": 2, "stored_bytes": moved["stored_bytes"], "store_failed_shards": 0,
        "store_seconds": metrics["vllm:kvdepot_store_seconds"],
        "retrieved_shards": 2, "retrieved_bytes": moved["retrieved_bytes"], "retrieve_failed_shards": 0,
        "retrieve_seconds": 1, "decoded_chunks": 0, "continued_chunks": 0,
        "uncached_requests": 0, "refused_hints": 0, "computed_tokens": 0, "stalls_broken": 0, "lease_errors": 0,
    }.items()}  # fmt: skip
    assert moved["stored_bytes"] == moved["retrieved_bytes"] > 0
    assert 1 <= metrics["vllm:kvdepot_store_seconds"] <= 2

    # the server's log: each request by the id that vLLM gave it
    def by_request() -> list[list[str]]:
        said: dict[str, list[str]] = {}
        for line in map(json.loads, depot.logged()[logged:].splitlines()):
            if "request" in line:
                said.setdefault(line["request"], []).append(line["message"])
        return list(said.values())

    eventually(lambda: sum(map(len, by_request())) >= 4)
    first, second = by_request()
    assert first[0] == "found 0 of 2 chunks"
    assert first[1:] in (["stored 2 of 2 new chunks"], ["stored 1 of 1 new chunks"] * 2)  # in one step, or two
    assert second == ["found 2 of 2 chunks", "the engine retrieved 2 chunks itself"]

    # what a load saves by the speed of a step that computed as much, which its output ended
    assert engine.run_fresh(tokens, salt="computed again")["cached"] == 0
    before = depot.status()["saved"]
    said = engine.run_fresh(tokens)["told"]["kvdepot"]
    assert said["loaded"] == 512
    saved = eventually(lambda: (now := depot.status()["saved"])["tokens"] == before["tokens"] + 512 and now)
    assert saved["prefill_s"] - before["prefill_s"] == pytest.approx(said["saved_s"]) and said["saved_s"] > 0


def test_the_reused_share_is_vllms_own_external_hit_rate(site: Site) -> None:
    depot, engine = site.depot, site.engine

    def counted() -> dict[str, int]:
        """As vLLM and as the depot counts; the depot's figures once they have all that vLLM's have."""
        queries, hits = engine.tell("external")
        eventually(lambda: depot.status()["tokens"]["asked"] >= queries)
        (usage,) = depot.status()["usage"]
        return {"queries": queries, "hits": hits} | depot.status()["tokens"] | usage

    before = counted()
    shared = prompt(1001, 3 * 256)
    engine.run(shared + prompt(1002, 300))
    engine.run(shared + prompt(1003, 77))  # what they share is in vLLM's own cache
    engine.run(prompt(1004, 100))  # less than a chunk
    engine.run_fresh(shared + prompt(1003, 77))
    engine.run(prompt(1005, 700))
    engine.run(shared + prompt(1002, 300) + prompt(1006, 400))  # partly in vLLM's cache, partly in the depot
    several = [engine.request(prompt(1005, 700) + prompt(1007 + i, 200 * i)) for i in range(3)]
    engine.tell("reset")
    engine.tell("run", requests=several)
    after = counted()
    new = {name: value - before[name] for name, value in after.items() if isinstance(value, int)}
    assert 0.2 < new["hits"] / new["queries"] < 0.8, "requests that tell nothing"
    assert (new["asked"], new["reused"]) == (new["queries"], new["hits"])
    assert new["reused"] <= new["found"]
    assert (new["asked_tokens"], new["reused_tokens"]) == (new["queries"], new["hits"])


def test_an_engine_is_credited_with_what_it_stored_and_with_what_it_finds(site: Site) -> None:
    engine, follower, tokens = site.engine, site.follower, prompt(2001, 2 * 256 + 9)
    engine.tell("reset")
    follower.read()
    before = len(follower.payloads)
    assert engine.run(tokens)["cached"] == 0
    credit = {"10.0.0.1:8000": 2 * 256 // BLOCK}
    follower.wait(lambda router: router.blocks(tokens, "llama") == credit)
    assert engine.run_fresh(tokens)["cached"] == 512
    longer = tokens + prompt(2002, 256)
    engine.run(longer)
    follower.wait(lambda router: router.blocks(longer, "llama") == {"10.0.0.1:8000": 3 * 256 // BLOCK})
    assert not follower.router.twice and not follower.router.passed_over
    events = [event for payload in follower.payloads[before:] for event in msgspec.msgpack.decode(payload)[1]]
    stored = [dict(zip(STORED, event, strict=False)) for event in events if event[0] == "BlockStored"]
    assert {(event["medium"], event["block_size"]) for event in stored} == {("CPU", 256)}
    known = [longer[at : at + 256] for at in range(0, 3 * 256, 256)]
    told = [event["token_ids"][at : at + 256] for event in stored for at in range(0, len(event["token_ids"]), 256)]
    assert [chunk for chunk in told if chunk in known] == known  # events of earlier prompts may come late


def test_a_retained_prompt_survives_a_flood_until_its_session_is_released(site: Site) -> None:
    depot, engine = site.depot, site.engine
    kept, plain, private = (prompt(seed, 4 * 256 + 17) for seed in (3001, 3002, 3003))

    def run(tokens: list[int], salt: str = "", **hints: Any) -> int:
        options = {"transfer": {"kvdepot": hints}} if hints else {}
        return int(engine.run_fresh(tokens, salt=salt, **options)["cached"])

    assert run(kept, retain_s=1 << 31, priority=100, session="agent") == 0
    assert run(plain) == 0
    assert run(private, store=False) == 0
    for seed in range(3010, 3030):
        run(prompt(seed, 4 * 256 + 17))
    assert run(private) == run(plain) == 0
    assert run(kept) == 1024
    for hints in ({"release": True}, {"retain_s": 1}):
        run(prompt(3006, 300), salt="mallory", session="agent", store=False, **hints)

    def listed() -> dict[str, LeaseStatus]:
        with admin.connect(depot.url) as client:
            return {each.name: each for each in admin.leases(client)}

    lease, another = (each for _, each in sorted(listed().items()))
    assert (lease.name, lease.kind, lease.chunks) == ("agent", "retain", 4)
    assert lease.ends_s is not None and lease.ends_s <= 3600 and lease.priority == 50  # as the server's settings say
    assert another.name.startswith("agent@") and "mallory" not in another.name
    longer = [*kept[:1024], *prompt(3004, 256 + 17)]
    assert run(longer, release=True, session="agent") == 1024
    eventually(lambda: "agent" not in listed())
    assert run(longer, store=False) == run(kept, store=False) == 0
    refused = run(prompt(3005, 300), retain_s="long")
    assert refused == 0 and "retain_s" in engine.logged()
