"""What an engine that names a topic has the depot tell routers: the connector's part alone, and a real engine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kvdepot.client.scheduler import SchedulerClient
from kvdepot.client.transfer import ShardSpec
from kvdepot.integrations.vllm.events import Descriptions
from kvdepot.protocol import wire
from kvdepot.protocol.keys import ROOT, ChunkChain, derive_root, split_tokens
from tests.client.answers import Answering
from tests.conftest import StartDepot
from tests.kv_events.desk import Follower
from tests.kv_events.router import BLOCK
from tests.kv_events.test_engines import Engine as Client
from tests.vllm.conftest import StartEngine
from tests.vllm.engines import prompt

CHUNK = 8


class Request:
    """The attribute of vLLM's request that is read."""

    def __init__(self, tokens: list[int]) -> None:
        self.all_token_ids = tokens


def chain_of(tokens: list[int], root: bytes = ROOT, lookahead: int = 0) -> ChunkChain:
    chain = ChunkChain(CHUNK, root, lookahead)
    chain.extend(tokens)
    return chain


class Desk:
    """Descriptions, and the client that records what they send."""

    def __init__(self, most: int = 100) -> None:
        self.peer: Any = Answering()
        self.peer.wants_tokens = True
        self.descriptions = Descriptions(SchedulerClient(self.peer, ShardSpec("m", 1, 0, CHUNK, 2)), most)

    def told(self) -> list[bytes]:
        """The keys described since the last call, whose tokens must give them."""
        asked, self.peer.asked = self.peer.asked, []
        keys = []
        for each in asked:
            assert isinstance(each, wire.Describe) and each.chunk_tokens == CHUNK
            found = split_tokens(each.parent, each.hashes, each.tokens, CHUNK)
            assert b"".join(key for key, _ in found) == each.hashes
            keys += [key for key, _ in found]
        return keys


@pytest.mark.parametrize("lookahead", [0, 1, 3])
def test_what_is_stored_is_described_each_time_and_what_is_found_once(lookahead: int) -> None:
    desk, tokens = Desk(), prompt(1, 5 * CHUNK + 4)
    request: Any = Request(tokens)
    chain = chain_of(tokens, lookahead=lookahead)
    keys = [chain.slice(i, i + 1) for i in range(len(chain))]
    desk.descriptions.found(request, chain, 2, len(chain))
    assert desk.told() == keys[:2]
    desk.descriptions.found(request, chain, 2, len(chain))
    desk.descriptions.found(request, chain, 0, len(chain))
    assert desk.told() == []
    desk.descriptions.ordered(request, chain, range(2, 4), ())
    assert desk.told() == keys[2:4]
    desk.descriptions.found(request, chain, 5, len(chain))
    assert desk.told() == keys[4:]
    desk.descriptions.ordered(request, chain, range(1), ())
    assert desk.told() == keys[:1]
    desk.descriptions.restarted()
    desk.descriptions.found(request, chain, 5, len(chain))
    assert desk.told() == keys


def test_salted_prompts_are_not_described() -> None:
    desk, tokens = Desk(), prompt(1, 2 * CHUNK)
    request: Any = Request(tokens)
    chain = chain_of(tokens, derive_root(("salt", "alice")))
    desk.descriptions.ordered(request, chain, range(2), ())
    desk.descriptions.found(request, chain, 2, len(chain))
    assert desk.told() == []


def test_long_prompts_take_several_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvdepot.integrations.vllm.events._MOST_TOKENS", 3 * CHUNK)
    desk, tokens = Desk(), prompt(1, 7 * CHUNK)
    request: Any = Request(tokens)
    chain = chain_of(tokens)
    desk.descriptions.ordered(request, chain, range(7), ())
    assert len(desk.peer.asked) == 3
    assert desk.told() == [chain.slice(i, i + 1) for i in range(7)]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of what vLLM imports
def test_a_real_engine_is_credited_with_what_it_stored_and_with_what_it_finds(
    start_depot: StartDepot, models: dict[str, Path], start_engine: StartEngine, tmp_path: Path
) -> None:
    endpoint = f"ipc://{tmp_path}/depot"
    server = start_depot("--kv-events", endpoint, arena_mib=256)
    engine = start_engine(
        models["gqa"], server.url, extra={"kvdepot.events_topic": "kv@10.0.0.1:8000@llama"},
    ).wait_started()  # fmt: skip
    follower, tokens = Follower(endpoint), prompt(1, 2 * 256 + 9)
    another = Client(server, "kv@10.0.0.2:8000@llama", model="of other weights")
    try:
        assert engine.run(tokens)["cached"] == 0
        credit = {"10.0.0.1:8000": 2 * 256 // BLOCK}
        follower.wait(lambda router: router.blocks(tokens, "llama") == credit)
        assert engine.run_fresh(tokens)["cached"] == 512
        longer = tokens + prompt(2, 256)
        engine.run(longer)
        follower.wait(lambda router: router.blocks(longer, "llama") == {"10.0.0.1:8000": 3 * 256 // BLOCK})
        assert not follower.router.twice and not follower.router.passed_over
        engine.stop()
        follower.wait(lambda router: router.score(tokens, "llama") == {})
    finally:
        another.close()
        follower.close()
