"""Events under the topics of engines, from the index to a router by llm-d's rules, without a server."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import msgspec
import pytest

from kvdepot.core.index import matching
from kvdepot.core.index.chunk import Chunk, is_there
from kvdepot.kv_events import engine_view
from kvdepot.kv_events.engine_view import EngineView
from kvdepot.kv_events.feed import Feed
from kvdepot.protocol.keys import HASH_BYTES, ROOT, derive_root, pack_ids, split_tokens
from kvdepot.protocol.wire import Describe
from tests.conftest import clear
from tests.core.shelf import Shelf
from tests.kv_events.desk import CHUNK, PER_CHUNK, A, B, described, keys, prompt
from tests.kv_events.router import Router


class Reader:
    """An index whose changes a view turns into messages, and a router that takes them."""

    def __init__(self, pages: int = 64, most: int = 1 << 17, most_bytes: int = 1 << 30) -> None:
        self.feed, self.view = Feed(most), EngineView(most_bytes)
        self.shelf = Shelf(pages, listener=self.feed)
        self.router = Router(clears=False)
        self.topics: set[str] = set()
        self.sent = 0
        self.kept = 1  # messages, by a publisher that keeps as few as it may, after a first one without events

    def read(self) -> Router:
        """What the router believes after all changes so far."""
        namespace = self.shelf.namespace
        self.feed.tick(self.shelf.index.namespaces.all(), frozenset((topic, namespace) for topic in self.topics))
        while changes := self.feed.take(engine_view.BATCH):
            for topics, events in self.view.apply(changes):
                assert sum(len(getattr(event, "block_hashes", ())) for event in events) <= engine_view.BATCH
                for topic in topics:
                    self.take(self.router, topic, events)
                    self.sent += 1
                    self.kept = min(self.kept + 1, self.view.messages)
        assert self.view.messages <= self.kept, "a listing takes the numbers of messages that are kept"
        return self.router

    @staticmethod
    def take(router: Router, topic: bytes, events: Iterable[object]) -> None:
        router.take(topic, msgspec.msgpack.encode([0.0, list(events), None]))

    def listed(self) -> Router:
        """What a router believes that is told everything as of now."""
        router = Router()
        messages = list(self.view.listing())
        assert len(messages) == self.view.messages
        for topic, events in messages:
            self.take(router, topic, events)
        assert not router.passed_over and not router.twice
        return router


@contextmanager
def reading(**options: int) -> Iterator[Reader]:
    reader = Reader(**options)
    yield reader
    reader.feed.close()


def test_chunks_that_arrive_in_any_order_are_published_parents_first() -> None:
    with reading() as reader:
        reader.topics, tokens = {A}, prompt(1, 4)
        chain = keys(tokens)
        reader.feed.described(described(tokens))
        chunks = [reader.shelf.reserve(chain, number) for number in range(1, 5)]
        for chunk in reversed(chunks):
            assert reader.read().score(tokens, "m") == {}
            assert chunk is not None
            reader.shelf.index.seal(chunk, 0)
        assert reader.read().blocks(tokens, "m") == {"a": 4 * PER_CHUNK}
        assert not reader.router.passed_over


def test_loose_chunks_and_wrong_tokens_are_not_published() -> None:
    with reading() as reader:
        reader.topics, tokens = {A}, prompt(1, 2)
        reader.feed.described(described(tokens))
        reader.shelf.store(keys(tokens), loose=True)
        other = prompt(2, 2)
        reader.shelf.store(keys(other))
        good = described(other)
        reader.feed.described(Describe(good.parent, good.hashes, described(tokens).tokens, CHUNK))
        reader.feed.described(Describe(derive_root(("salt", "s")), good.hashes, good.tokens, CHUNK))
        reader.feed.described(described(other, first=1))  # behind a chunk that nobody has described
        assert not reader.read().pods and not any(model.credited for model in reader.view._models.values())


def test_beyond_the_limit_chunks_are_not_credited_but_those_that_are_stay_so() -> None:
    with reading(most_bytes=4 * CHUNK * 3, pages=8) as reader:
        reader.topics, first, second = {A}, prompt(1, 3), prompt(2, 2)
        for tokens in (first, second):
            reader.feed.described(described(tokens))
            reader.shelf.store(keys(tokens))
            reader.read()
        assert reader.router.blocks(first, "m") == {"a": 3 * PER_CHUNK}
        assert reader.router.score(second, "m") == {}
        for chunk in [reader.shelf.namespace.chunks[key] for key in reversed(keys(first))]:
            reader.shelf.index.hide(chunk)
        reader.feed.described(described(second))  # in place of what is not credited any more
        assert reader.read().blocks(second, "m") == {"a": 2 * PER_CHUNK}
        assert reader.router.score(first, "m") == {}


@pytest.mark.parametrize("seed", range(6))
def test_a_router_credits_every_topic_with_the_described_chunks_in_memory(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_view, "BATCH", 3)
    dice = random.Random(seed)
    trunk = prompt(seed, 2)
    prompts = [trunk + prompt(100 * seed + i, 3) for i in range(4)]
    told: set[bytes] = set()
    with reading(pages=16, most=40 if seed % 2 else 1 << 17) as reader:
        index, namespace = reader.shelf.index, reader.shelf.namespace

        def credited(tokens: list[int]) -> dict[str, int]:
            count = 0
            for key in keys(tokens):
                chunk = namespace.chunks.get(key)
                if key not in told or chunk is None or not is_there(chunk):
                    break
                count += 1
            return {topic.split("@")[1]: count * PER_CHUNK for topic in reader.topics if count}

        for _ in range(120):
            tokens = dice.choice(prompts)[: CHUNK * dice.randint(1, 5)]
            parts: list[Chunk] = list(namespace.chunks.values())
            match dice.randrange(8):
                case 0 if parts:
                    index.hide(dice.choice(parts))
                case 1 if parts and (chunk := dice.choice(parts)).sealed:
                    index.mark_corrupt(chunk, 0)
                case 2 if dice.random() < 0.2:
                    clear(index)
                case 3:
                    reader.topics ^= {dice.choice((A, B))}
                case 4 | 5:
                    if len(reader.feed._queue) < 20:  # else it might be dropped
                        reader.feed.described(described(tokens))
                        told |= set(keys(tokens))
                case _:
                    chain = keys(tokens)
                    for number in [n for n, key in enumerate(chain, 1) if matching.is_missing(namespace, 0, key)]:
                        if part := reader.shelf.reserve(chain, number):
                            index.seal(part, 0)
            if dice.random() < 0.4:
                for _ in range(4):  # after an overflow, as long as the listing takes
                    reader.read()
                for each in prompts:
                    assert reader.router.blocks(each, "m") == credited(each)
                    assert reader.listed().blocks(each, "m") == credited(each)
        assert not reader.router.twice and not reader.router.passed_over
        for topics, events in reader.view.apply([None]):
            for topic in topics:
                reader.take(reader.router, topic, events)
        assert not any(reader.router.counts.values()) and not any(reader.router.pods.values())


def test_tokens_are_split_as_far_as_they_give_the_hashes() -> None:
    tokens = prompt(1, 3)
    for lookahead in (0, 1, 5):
        chain = keys([*tokens, *prompt(2, 1)], lookahead)[:3]
        data = pack_ids([*tokens, *prompt(2, 1)][: 3 * CHUNK + lookahead], "token ids")
        found = split_tokens(ROOT, b"".join(chain), data, CHUNK)
        assert found == [(key, pack_ids(tokens[i * CHUNK : (i + 1) * CHUNK], "")) for i, key in enumerate(chain)]
        assert split_tokens(ROOT, b"".join([chain[0], bytes(HASH_BYTES), chain[2]]), data, CHUNK) == found[:1]
        assert split_tokens(ROOT, b"".join(chain), data[:-4], CHUNK) == []
        assert split_tokens(chain[0], b"".join(chain[1:]), data[4 * CHUNK :], CHUNK) == found[1:]
