"""A server that publishes under its engines' topics, and a router by llm-d's rules: whom does it credit with what?"""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from kvdepot.client.socket import Client
from kvdepot.client.transfer import GroupSpec, ShardSpec, Transfer, pack_block_ids
from kvdepot.errors import BadRequest
from kvdepot.protocol import wire
from kvdepot.protocol.keys import ChunkChain, derive_root, pack_ids
from tests.client.engine import NativeEngine
from tests.conftest import HANG_S, Depot, StartDepot, eventually
from tests.kv_events.desk import CHUNK, PER_CHUNK, Follower, prompt
from tests.kv_events.router import BLOCK, Router
from tests.server.process import kill

pytestmark = pytest.mark.faults

BLOCKS_IN_CHUNK = 4


class Engine(NativeEngine):
    """A scheduler and a worker that name a topic and describe what they store."""

    def __init__(
        self, depot: Depot, topic: str, model: str = "m", block_bytes: int = 64, groups: tuple[GroupSpec, ...] = ()
    ) -> None:
        spec = ShardSpec(model, 1, 0, CHUNK, BLOCKS_IN_CHUNK, groups)
        sizes = range(block_bytes, block_bytes * max(1, len(groups)) + 1, block_bytes)
        super().__init__(depot, spec, [torch.zeros((64, size), dtype=torch.uint8) for size in sizes], topic)

    def store_prompt(self, tokens: list[int], root: bytes = derive_root(), describe: bool = True) -> ChunkChain:
        """Store the whole chunks of a prompt, a dozen at most."""
        chain = ChunkChain(CHUNK, root)
        chain.extend(tokens)
        if describe:
            self.describe(chain, tokens)
        request_id = uuid.uuid4().hex
        blocks = pack_block_ids(list(range(BLOCKS_IN_CHUNK * len(chain))))
        groups = range(max(1, len(self.worker.spec.groups)))
        transfers = [Transfer(request_id, root, 0, bytes(chain.hashes), blocks, group=group) for group in groups]
        self.store(transfers)
        return chain

    def describe(self, chain: ChunkChain, tokens: list[int], first: int = 0) -> None:
        ids = pack_ids(tokens[first * CHUNK : len(chain) * CHUNK], "token ids")
        self.scheduler.describe(chain.parent(first), chain.slice(first, len(chain)), ids)

    def found_keys(self, tokens: list[int]) -> int:
        """Request keys of a prompt that a lookup finds."""
        chain = ChunkChain(CHUNK)
        chain.extend(tokens)
        found = self.found(chain)
        assert found is not None
        return found // BLOCK

    def reconnect(self) -> None:
        """Wait until a server that has restarted knows both."""
        for client in (self.scheduler.client, self.worker.client):
            answer = client.ask(wire.Noop(), deadline_s=None)
            eventually(lambda answer=answer, client=client: client.pump() or answer.query())


class Host:
    """A server, and the engines and followers of one test."""

    def __init__(self, start: StartDepot, endpoint: str) -> None:
        self._start, self.endpoint = start, endpoint
        self.depot = self.serve()
        self.ending = contextlib.ExitStack()

    def serve(self, **options: Any) -> Depot:
        return self._start("--kv-events", self.endpoint, arena_mib=1, **options)

    def engine(self, topic: str, **options: Any) -> Engine:
        return self.ending.enter_context(contextlib.closing(Engine(self.depot, topic, **options)))

    def follower(self, **options: Any) -> Follower:
        return self.ending.enter_context(contextlib.closing(Follower(self.endpoint, **options)))


@pytest.fixture
def host(start_depot: StartDepot, endpoint: str) -> Iterator[Host]:
    made = Host(start_depot, endpoint)
    with made.ending:
        yield made


PODS = ["10.0.0.1:8000", "10.0.0.2:8000", "10.0.0.3:8000"]
TOPICS = [f"kv@{pod}@llama" for pod in PODS]


@pytest.mark.parametrize("clears", [True, False])
def test_what_one_engine_stored_is_credited_to_every_engine_that_can_load_it(host: Host, clears: bool) -> None:
    follower = host.follower(clears=clears)
    first, second, third = (host.engine(topic) for topic in TOPICS)
    host.engine("kv@10.0.0.9:8000@llama", model="of other weights")
    tokens = prompt(1, 3)
    first.store_prompt(tokens)
    follower.wait(lambda router: router.blocks(tokens, "llama") == dict.fromkeys(PODS, 3 * PER_CHUNK))
    longer = tokens + prompt(2, 1)
    third.store_prompt(longer)  # behind what another engine has described
    follower.wait(lambda router: router.blocks(longer, "llama") == dict.fromkeys(PODS, 4 * PER_CHUNK))
    other = tokens[:CHUNK] + prompt(3, 1)
    assert follower.router.blocks(other, "llama") == dict.fromkeys(PODS, PER_CHUNK)
    assert second.found_keys(longer) == 4 * PER_CHUNK
    assert not follower.router.passed_over and not follower.router.twice


def test_a_later_engine_is_credited_with_stored_chunks_and_a_gone_one_with_none(host: Host) -> None:
    follower, tokens = host.follower(clears=False), prompt(1, 5)
    first = host.engine(TOPICS[0])
    first.store_prompt(tokens)
    follower.wait(lambda router: set(router.blocks(tokens, "llama")) == {PODS[0]})
    second = host.engine(TOPICS[1])
    follower.wait(lambda router: router.blocks(tokens, "llama") == dict.fromkeys(PODS[:2], 5 * PER_CHUNK))
    first.close()
    follower.wait(lambda router: router.blocks(tokens, "llama") == {PODS[1]: 5 * PER_CHUNK})
    second.worker.unregister(10.0)  # as an engine that goes to sleep
    follower.wait(lambda router: router.score(tokens, "llama") == {})
    assert not follower.router.twice and follower.replays <= 1


@pytest.mark.faults
def test_an_engine_that_is_credited_can_load_whatever_was_evicted_meanwhile(host: Host) -> None:
    follower = host.follower(clears=False)
    engines = [host.engine(topic, block_bytes=16384) for topic in TOPICS[:2]]  # 64 KiB a chunk: 15 of them
    prompts = [prompt(seed, 1 + seed % 4) for seed in range(24)]
    for seed, tokens in enumerate(prompts):
        engines[seed % 2].store_prompt(tokens)
    there = {i: found for i, tokens in enumerate(prompts) if (found := engines[0].found_keys(tokens))}
    assert 0 < len(there) < len(prompts) and host.depot.status()["evicted_chunks"] > 0

    def credited(router: Router) -> dict[int, dict[str, int]]:
        return {i: scores for i, tokens in enumerate(prompts) if (scores := router.blocks(tokens, "llama"))}

    follower.wait(lambda router: credited(router) == {i: dict.fromkeys(PODS[:2], there[i]) for i in there})
    assert not follower.router.twice
    with contextlib.closing(Client(host.depot.url, host.depot.context)) as client:
        client.ask(wire.ForgetChunks()).result(HANG_S)
    follower.wait(lambda router: credited(router) == {})
    assert not any(follower.router.counts.values())


@pytest.mark.faults
def test_after_a_crash_engines_are_credited_again_with_what_survived(host: Host) -> None:
    follower, tokens = host.follower(clears=False), prompt(1, 3)
    engine = host.engine(TOPICS[0])
    chain = engine.store_prompt(tokens)
    follower.wait(lambda router: router.blocks(tokens, "llama") == {PODS[0]: 3 * PER_CHUNK})
    kill(host.depot)
    url, name = host.depot.url, host.depot.name
    host.depot = host.serve(url=url, name=name)
    engine.reconnect()
    assert engine.found_keys(tokens) == 3 * PER_CHUNK
    later = host.follower()
    engine.describe(chain, tokens)  # as an engine whose lookup has found them
    later.wait(lambda router: router.blocks(tokens, "llama") == {PODS[0]: 3 * PER_CHUNK})


def test_a_server_without_kv_events_wants_no_descriptions(start_depot: StartDepot) -> None:
    engine, tokens = Engine(start_depot(arena_mib=1), TOPICS[0]), prompt(1, 1)
    assert not engine.scheduler.client.welcome.wants_tokens
    chain = engine.store_prompt(tokens)  # which describes it to servers that want it
    described = wire.Describe(chain.root, bytes(chain.hashes), pack_ids(tokens, "token ids"), CHUNK)
    with pytest.raises(BadRequest, match="publishes no token ids"):
        engine.scheduler.client.ask(described).result(HANG_S)
    engine.close()


@pytest.fixture(scope="module")
def publishing(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Depot]:
    """A server of tests that leave nothing in it."""
    endpoint = f"ipc://{tmp_path_factory.mktemp('publishing')}/events.sock"
    with contextlib.closing(Depot("--kv-events", endpoint, arena_mib=1)) as depot:
        yield depot.wait_ready()


@pytest.mark.parametrize(
    "change",
    [
        {"hashes": b""}, {"hashes": bytes(33)}, {"parent": b""}, {"tokens": bytes(4 * CHUNK - 4)},
        {"tokens": bytes(4 * CHUNK + 1)}, {"tokens": bytes(8 * CHUNK + 4)}, {"chunk_tokens": 0}, {"chunk_tokens": -1},
    ],
)  # fmt: skip
def test_a_description_that_does_not_fit_together_is_refused(publishing: Depot, change: dict[str, Any]) -> None:
    good = {"parent": bytes(32), "hashes": bytes(32), "tokens": bytes(4 * CHUNK), "chunk_tokens": CHUNK}
    with contextlib.closing(Client(publishing.url, publishing.context)) as client:
        assert client.ask(wire.Describe(**good)).result(HANG_S) is None  # it fits, though it proves nothing
        with pytest.raises(BadRequest):
            client.ask(wire.Describe(**(good | change))).result(HANG_S)


def test_a_topic_that_is_too_long_is_refused(host: Host) -> None:
    with pytest.raises(BadRequest, match="longer than 1024"):
        host.engine("kv@" + "p" * wire.MAX_TOPIC + "@m")
