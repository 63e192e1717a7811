"""The independent router of these tests follows the rules that it states: events as engines send them."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from tests.kv_events.router import BLOCK, Malformed, Router

TOPIC = b"kv@10.0.0.1:8000@llama"
TOKENS = list(range(3 * BLOCK))
HASHES = [bytes([i]) * 32 for i in range(1, 4)]


def take(router: Router, *events: Any, topic: bytes = TOPIC) -> None:
    router.take(topic, msgspec.msgpack.encode([0.0, events, None]))


def stored(hashes: list[bytes], parent: bytes | None, tokens: list[int], medium: str = "CPU") -> list[Any]:
    return ["BlockStored", hashes, parent, tokens, len(tokens) // len(hashes), None, medium]


def test_arrays_and_maps_mean_the_same() -> None:
    for event in (
        stored(HASHES, None, TOKENS),
        {
            "type": "BlockStored", "block_hashes": HASHES, "parent_block_hash": None, "token_ids": TOKENS,
            "block_size": BLOCK, "medium": "CPU", "locality": "LOCAL",
        },
    ):  # fmt: skip
        router = Router()
        take(router, event)
        assert router.score(TOKENS, "llama") == {"10.0.0.1:8000": pytest.approx(3 * 0.8)}
        assert router.score(TOKENS, "another") == {} == router.score([7, *TOKENS], "llama")


def test_what_was_stored_twice_is_there_until_it_is_removed_twice() -> None:
    router, removed = Router(), ["BlockRemoved", [HASHES[0]], "CPU"]
    take(router, stored([HASHES[0]], None, TOKENS), stored([HASHES[0]], None, TOKENS), removed)
    assert router.blocks(TOKENS, "llama") == {"10.0.0.1:8000": 3} and len(router.twice) == 1
    take(router, removed)
    assert router.score(TOKENS, "llama") == {}


def test_clearing_concerns_one_pod_and_only_where_it_means_something() -> None:
    for clears in (True, False):
        router = Router(clears)
        for topic in (TOPIC, b"kv@b@llama"):
            take(router, stored(HASHES, None, TOKENS), topic=topic)
        take(router, ["AllBlocksCleared"])
        assert set(router.score(TOKENS, "llama")) == ({"b"} if clears else {"b", "10.0.0.1:8000"})


@pytest.mark.parametrize("payload", [[0.0, []], [0.0, [["Other"]], None], [0.0, [{"block_hashes": []}], None]])
def test_what_llm_d_does_not_read_is_malformed(payload: Any) -> None:
    with pytest.raises(Malformed):
        Router().take(TOPIC, msgspec.msgpack.encode(payload))
