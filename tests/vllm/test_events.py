"""Descriptions of chunks, of which the server makes KV events; test_telemetry.py has a real engine's."""

from __future__ import annotations

from typing import Any

import pytest

from kvdepot.client.scheduler import SchedulerClient
from kvdepot.client.transfer import ShardSpec
from kvdepot.integrations.vllm.events import Descriptions
from kvdepot.protocol import wire
from kvdepot.protocol.keys import ROOT, ChunkChain, derive_root, split_tokens
from tests.client.answers import Answering
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
        self.peer.welcome = wire.Welcome(wire.VERSION, CHUNK, wants_tokens=True)
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
def test_stored_chunks_are_described_each_time_and_found_ones_once(lookahead: int) -> None:
    desk, tokens = Desk(), prompt(1, 5 * CHUNK + 4)
    request: Any = Request(tokens)
    chain = chain_of(tokens, lookahead=lookahead)
    keys = [chain.slice(i, i + 1) for i in range(len(chain))]
    desk.descriptions.found(request, chain, 2)
    assert desk.told() == keys[:2]
    desk.descriptions.found(request, chain, 2)
    desk.descriptions.found(request, chain, 0)
    assert desk.told() == []
    desk.descriptions.ordered(request, chain, range(2, 4))
    assert desk.told() == keys[2:4]
    desk.descriptions.found(request, chain, 5)
    assert desk.told() == keys[4:]
    desk.descriptions.ordered(request, chain, range(1))
    assert desk.told() == keys[:1]
    desk.descriptions.restarted()
    desk.descriptions.found(request, chain, 5)
    assert desk.told() == keys


def test_only_the_latest_descriptions_are_remembered() -> None:
    desk, tokens = Desk(most=3), prompt(1, 4 * CHUNK)
    request: Any = Request(tokens)
    chain = chain_of(tokens)
    desk.descriptions.ordered(request, chain, range(4))
    assert len(desk.told()) == 4
    desk.descriptions.found(request, chain, 4)
    assert len(desk.told()) == 4, "the first is forgotten, and a description needs its parent's"


def test_salted_prompts_are_not_described() -> None:
    desk, tokens = Desk(), prompt(1, 2 * CHUNK)
    request: Any = Request(tokens)
    chain = chain_of(tokens, derive_root(("salt", "alice")))
    desk.descriptions.ordered(request, chain, range(2))
    desk.descriptions.found(request, chain, 2)
    assert desk.told() == []


def test_long_prompts_take_several_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvdepot.integrations.vllm.events._MOST_TOKENS", 3 * CHUNK)
    desk, tokens = Desk(), prompt(1, 7 * CHUNK)
    request: Any = Request(tokens)
    chain = chain_of(tokens)
    desk.descriptions.ordered(request, chain, range(7))
    assert len(desk.peer.asked) == 3
    assert desk.told() == [chain.slice(i, i + 1) for i in range(7)]
