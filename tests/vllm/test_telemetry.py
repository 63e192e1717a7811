"""Telemetry of a real engine's connector and a depot: vLLM's metrics and KV events."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq
from vllm.distributed.kv_events import KVEventBatch

from kvdepot.client import MessageQueueClient
from kvdepot.protocol import wire
from tests.conftest import StartDepot, eventually
from tests.vllm.conftest import StartEngine
from tests.vllm.engines import prompt


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


@pytest.fixture
def subscribe() -> Iterator[Callable[[str], Events]]:
    """Subscribers that end with the test."""
    with contextlib.ExitStack() as ending:

        def start(endpoint: str) -> Events:
            return ending.enter_context(contextlib.closing(Events(endpoint)))

        yield start


def test_metrics_and_events_of_an_engine_say_what_it_did(
    start_depot: StartDepot,
    models: dict[str, Path],
    start_engine: StartEngine,
    subscribe: Callable[[str], Events],
    tmp_path: Path,
) -> None:
    server = start_depot("--log-level", "debug", "--log-format", "json", arena_mib=256)
    engine = start_engine(
        models["gqa"], server.url,
        kv_events_config={"enable_kv_cache_events": True, "publisher": "zmq", "endpoint": f"ipc://{tmp_path}/engine"},
    )  # fmt: skip
    engines = subscribe(f"ipc://{tmp_path}/engine")
    engine.wait_started()
    tokens = prompt(1, 2 * 256 + 9)
    assert engine.run(tokens)["cached"] == 0
    assert engine.run_fresh(tokens)["cached"] == 512

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
