"""What an engine stored through one depot, an engine gets through another: the same tokens through each shared tier.

One engine stores, into all tiers at once. The other one's depot is started anew for each tier, with that tier alone.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.conftest import Depot, eventually
from tests.tiers.mooncake_servers import Master, needed
from tests.tiers.servers import BUCKET, RedisServer, S3Server, need
from tests.vllm.engines import Engine, output, prompt

TOKENS = prompt(71, 4 * 256 + 17)
OTHER = prompt(72, 256 + 17)
TIERS = ("redis", "object", "mooncake")


class Stored(NamedTuple):
    """What the first engine stored, and its answer."""

    urls: dict[str, str]
    answer: dict[str, Any]
    depot: Depot


@pytest.fixture(scope="module")
def urls(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """The shared stores, each one real."""
    need(commands=["redis-server"], modules=["redis", "obstore", "moto"])
    needed()
    patch = pytest.MonkeyPatch()
    patch.setenv("AWS_ACCESS_KEY_ID", "test")
    patch.setenv("AWS_SECRET_ACCESS_KEY", "test")
    folder = tmp_path_factory.mktemp("stores")
    with ExitStack() as stack:
        stack.callback(patch.undo)
        redis = RedisServer(folder)
        stack.callback(redis.kill)
        bucket = S3Server(folder)
        stack.callback(bucket.kill)
        master = Master()
        stack.callback(master.close)
        master.wait_ready()
        yield {
            "redis": f"redis://127.0.0.1:{redis.port}",
            "object": f"s3://{BUCKET}/vllm?endpoint={bucket.endpoint}&region=us-east-1",
            "mooncake": f"{master.url}?local_host=127.0.0.1&segment_gib=0.125",
        }


@pytest.fixture(scope="module")
def stored(urls: dict[str, str], models: dict[str, Path]) -> Iterator[Stored]:
    """An engine has run, its depot has saved all chunks to every tier, and the engine has ended."""
    depot = Depot("--tiers", *urls.values(), arena_mib=128).wait_ready()
    engine = Engine(models["gqa"], depot.url)
    try:
        engine.wait_started()
        assert engine.run(TOKENS)["cached"] == 0
        answer = engine.run(TOKENS)
        engine.stop()
        eventually(lambda: all(tier["counters"].get("saved_chunks", 0) >= 4 for tier in depot.status()["tiers"]))
        yield Stored(urls, answer, depot)
    finally:
        engine.close()
        depot.close()


@pytest.fixture(scope="module")
def place() -> tuple[str, str]:
    """URL and arena of the second depot, which is started several times."""
    name = f"kvdepot-test-{uuid.uuid4().hex[:12]}"
    return f"ipc:///tmp/{name}.sock", name


@pytest.fixture(scope="module")
def second(place: tuple[str, str], models: dict[str, Path]) -> Iterator[Engine]:
    """The second engine, started while its depot runs."""
    engine = Engine(models["gqa"], place[0])
    yield engine.wait_started()
    engine.close()


@pytest.mark.parametrize("kind", TIERS)
def test_an_engine_elsewhere_gets_the_same_tokens_through(
    kind: str, stored: Stored, place: tuple[str, str], request: pytest.FixtureRequest
) -> None:
    depot = Depot(
        "--tiers", stored.urls[kind], "--lookup-s", "8", arena_mib=128, url=place[0], name=place[1]
    ).wait_ready()
    try:
        assert depot.status()["chunks"] == 0, "its memory begins empty"
        engine: Engine = request.getfixturevalue("second")
        eventually(lambda: engine.run_fresh(OTHER)["cached"])  # both halves of it have met this depot
        through = engine.run_fresh(TOKENS)
        own = engine.run(TOKENS)
        assert through["cached"] == own["cached"] == 1024
        assert output(through) == output(own) == output(stored.answer)
        (tier,) = depot.status()["tiers"]
        assert tier["counters"]["loaded_chunks"] >= 4
    finally:
        depot.close()
