"""Server processes with tiers behind them, and engines on real shared memory: what one host stored another gets."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import redis
from tools.toy_engine import ToyEngine

from kvdepot.protocol import wire
from tests.cli.command import run
from tests.conftest import HANG_S, Depot, StartDepot, eventually
from tests.ports import free_port
from tests.server.process import kill
from tests.tiers.servers import BUCKET, RedisServer, S3Server, need

need(commands=["redis-server"], modules=["redis", "obstore", "moto", "zstandard", "cryptography"])

CHUNKS = 6


@pytest.fixture
def redis_server(tmp_path: Path) -> Iterator[RedisServer]:
    """One that a test may kill."""
    server = RedisServer(tmp_path)
    yield server
    server.kill()


@pytest.fixture
def redis_url(redis_server: RedisServer) -> str:
    return f"redis://127.0.0.1:{redis_server.port}/0"


@pytest.fixture
def object_url(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "someone")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    server = S3Server(tmp_path)
    yield f"s3://{BUCKET}/kv?endpoint={server.endpoint}&region=us-east-1"
    server.kill()


@contextmanager
def engine(depot: Depot, **options: Any) -> Iterator[ToyEngine]:
    made = ToyEngine(depot.url, context=depot.context, **options)
    try:
        yield made
        assert not made.wrong, made.wrong
    finally:
        made.close()


def tier(depot: Depot, number: int = 0) -> dict[str, Any]:
    found: dict[str, Any] = depot.status()["tiers"][number]
    return found


def saved(depot: Depot, number: int = 0) -> int:
    return int(tier(depot, number)["counters"].get("saved_chunks", 0))


@pytest.mark.parametrize("kind", ["redis", "object", "file"])
def test_an_engine_on_another_host_gets_the_stored_chunks_byte_for_byte(
    kind: str, start_depot: StartDepot, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    if kind == "redis":
        url = request.getfixturevalue("redis_url")
    elif kind == "object":
        url = request.getfixturevalue("object_url")
    else:
        url = f"file://{tmp_path}/shared"
    one, two = start_depot("--tiers", url), start_depot("--tiers", url)
    with engine(one) as here, engine(two, seed=1) as there:
        assert here.store(1, CHUNKS)
        eventually(lambda: saved(one) == CHUNKS)
        assert there.hits([1], CHUNKS) == CHUNKS
        assert there.hits([2], CHUNKS) == 0
    assert two.status()["counters"]["tier_hit_chunks"] == CHUNKS


@pytest.mark.parametrize("kind", ["disk", "redis", "object"])
def test_a_writers_chunks_are_forgotten_after_a_kill_and_where_only_a_tier_has_them(
    kind: str, start_depot: StartDepot, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    url = f"disk://{tmp_path}/kv?capacity_gib=1" if kind == "disk" else request.getfixturevalue(f"{kind}_url")
    bad = wire.ForgetChunks("toy", writer="bad")
    one = start_depot("--tiers", url)
    with engine(one, writer="bad") as here, engine(one, writer="good") as other:
        assert other.store(2, CHUNKS)
        assert here.store(1, CHUNKS)
        eventually(lambda: saved(one) == 2 * CHUNKS)
    kill(one)
    one = start_depot("--tiers", url, url=one.url, name=one.name)
    with engine(one) as reader:
        eventually(lambda: tier(one)["state"] == "up")
        assert one.status()["chunks"] == 2 * CHUNKS
        assert reader.worker.client.ask(bad).result(HANG_S)["removed"]["memory"] == CHUNKS, "the records name it"
        assert [reader.hits([1], CHUNKS), reader.hits([2], CHUNKS)] == [0, CHUNKS]
    with engine(one, writer="bad") as here:
        assert here.store(3, CHUNKS)
        assert here.store(1, CHUNKS), "as before"
        eventually(lambda: saved(one) == 2 * CHUNKS)
    kill(one)
    two = start_depot("--tiers", url)  # its memory is empty
    with engine(two, seed=1) as reader:
        eventually(lambda: tier(two)["state"] == "up")
        assert reader.hits([3], CHUNKS) == CHUNKS
        assert reader.worker.client.ask(bad).result(HANG_S)["removed"]["memory"] == CHUNKS, "the tier names it"
        assert [reader.hits([1, 3], CHUNKS), reader.hits([2], CHUNKS)] == [0, CHUNKS]
    kill(two)
    three = start_depot("--tiers", url)
    with engine(three, seed=2) as reader:
        eventually(lambda: tier(three)["state"] == "up")
        assert [reader.hits([1, 3], CHUNKS), reader.hits([2], CHUNKS)] == [0, CHUNKS]


@pytest.mark.parametrize("options", ["", "&compress=zstd&key_file={key}"])
def test_a_disk_gives_back_what_a_killed_server_without_its_memory_had(
    options: str, start_depot: StartDepot, tmp_path: Path
) -> None:
    key = tmp_path / "key"
    key.touch(0o600)
    key.write_text("ab" * 32)
    url = f"disk://{tmp_path}/kv?capacity_gib=1{options.format(key=key)}"
    one = start_depot("--tiers", url)
    with engine(one) as here:
        assert here.store(1, CHUNKS)
        eventually(lambda: saved(one) == CHUNKS)
    one.process.kill()
    one.process.wait()
    two = start_depot("--tiers", url)
    with engine(two, seed=1) as there:
        eventually(lambda: tier(two)["state"] == "up")
        assert there.hits([1], CHUNKS) == CHUNKS
    if "key_file" in options:
        other = tmp_path / "other"
        other.touch(0o600)
        other.write_text("cd" * 32)
        two.close()
        three = start_depot("--tiers", f"disk://{tmp_path}/kv?capacity_gib=1&key_file={other}")
        with engine(three, seed=2) as stranger:
            assert stranger.hits([1], CHUNKS) == 0
            assert stranger.store(1, CHUNKS)


def test_a_store_that_is_down_at_the_start_is_named_in_log_status_and_command(start_depot: StartDepot) -> None:
    port = free_port()
    depot = start_depot("--tiers", f"redis://:hunter2@127.0.0.1:{port}/0", "--log-level", "info")
    shown = eventually(lambda: (now := tier(depot))["state"] == "circuit breaker open" and now)
    assert "Connection refused" in shown["error"] and shown["error_s"] >= 0
    eventually(lambda: f"tier redis://127.0.0.1:{port}/0: circuit breaker open" in depot.logged())
    said = run("status", "--url", depot.url).stdout
    assert "circuit breaker open" in said and "refused" in said
    with engine(depot) as here:
        assert here.store(1, CHUNKS)
        eventually(lambda: tier(depot)["counters"].get("unavailable_chunks") == CHUNKS)
    assert not tier(depot)["counters"].get("dropped_chunks")
    assert "hunter2" not in depot.logged() + said


def test_a_hung_store_delays_lookups_to_their_deadline_but_neither_hits_nor_a_stop(
    start_depot: StartDepot, redis_server: RedisServer
) -> None:
    url = f"redis://127.0.0.1:{redis_server.port}/0?timeout_s=30"
    depot = start_depot("--tiers", url, "--lookup-s", "0.3", "--drain-s", "1")
    with engine(depot) as toy:
        assert toy.store(1, CHUNKS)
        eventually(lambda: saved(depot) == CHUNKS)
        with redis_server.stopped():
            # How much later than the deadline, and what a hit in memory takes meanwhile, the benchmark measures.
            for family in range(10, 14):
                assert toy.lookup(family, CHUNKS) == 0
            eventually(lambda: tier(depot)["state"] == "circuit breaker open")
            late = tier(depot)["counters"]["late"]
            assert 0 < late <= 4
            assert toy.hits([1], CHUNKS) == CHUNKS
            assert tier(depot)["counters"]["late"] == late, "what is in memory has waited for the store"
        eventually(lambda: tier(depot)["state"] == "up")
        assert toy.store(2, CHUNKS)
        eventually(lambda: saved(depot) == 2 * CHUNKS)
        with redis_server.stopped():
            assert toy.store(3, CHUNKS)
            assert depot.stop() == 0


def test_queued_saves_are_written_before_a_planned_stop(start_depot: StartDepot, tmp_path: Path) -> None:
    url = f"disk://{tmp_path}/kv?capacity_gib=1&threads=1"
    one = start_depot("--tiers", url)
    with engine(one) as toy:
        for family in range(20):
            assert toy.store(family, CHUNKS)
        assert one.stop() == 0
    two = start_depot("--tiers", url)
    with engine(two, seed=1) as there:
        eventually(lambda: there.lookup(19, CHUNKS) == CHUNKS)
        assert sum(there.hits([family], CHUNKS) for family in range(20)) == 20 * CHUNKS


def test_a_user_that_may_write_but_not_read_is_a_fault_for_all_who_look(
    start_depot: StartDepot, redis_server: RedisServer
) -> None:
    with redis.Redis(port=redis_server.port) as client:
        client.execute_command("ACL", "SETUSER", "kv", "on", ">pw", "~*", "+@all", "-getrange")
        depot = start_depot("--tiers", f"redis://kv:pw@127.0.0.1:{redis_server.port}/0", arena_mib=1)
        with engine(depot) as here:
            for family in range(16):  # more than memory holds
                assert here.store(family, CHUNKS)
            eventually(lambda: client.dbsize() >= CHUNKS)
            number = itertools.count()
            eventually(lambda: here.hits([next(number) % 8], CHUNKS) < CHUNKS and tier(depot)["state"] == "reads fail")
            done = run("status", "--url", depot.url)
            assert "reads fail" in done.stdout and "getrange" in done.stdout
            assert "reads fail while other calls succeed" in depot.logged()
            before = client.dbsize()
            assert here.store(99, CHUNKS)
            eventually(lambda: client.dbsize() == before + CHUNKS)
            client.execute_command("ACL", "SETUSER", "kv", "+getrange")
            eventually(lambda: here.hits([next(number) % 8], CHUNKS) == CHUNKS and tier(depot)["state"] == "up")
            client.execute_command("REPLICAOF", "127.0.0.1", str(free_port()))  # as after a failover
            eventually(lambda: here.store(next(number) + 100, 1) and tier(depot)["state"] == "writes fail")
