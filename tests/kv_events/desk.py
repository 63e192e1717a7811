"""A publisher of KV events on an index without a server, and a router's subscription to any publisher."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import zmq

from kvdepot.core.index import matching
from kvdepot.core.index.chunk import is_there
from kvdepot.kv_events.feed import Feed
from kvdepot.kv_events.publisher import END, Publisher, replay_endpoint
from kvdepot.protocol.curve import read_client_key
from kvdepot.protocol.keys import ROOT, ChunkChain, pack_ids
from kvdepot.protocol.wire import Describe
from tests.conftest import HANG_S, eventually
from tests.core.shelf import Shelf
from tests.kv_events.router import BLOCK, Router

CHUNK = 256
PER_CHUNK = CHUNK // BLOCK
"""Request keys per chunk."""
A, B = "kv@a@m", "kv@b@m"


def prompt(seed: int, chunks: int) -> list[int]:
    return random.Random(seed).choices(range(1 << 17), k=chunks * CHUNK)


def keys(tokens: Sequence[int], lookahead: int = 0) -> list[bytes]:
    chain = ChunkChain(CHUNK, lookahead=lookahead)
    chain.extend(tokens)
    return [chain.slice(i, i + 1) for i in range(len(chain))]


def described(tokens: Sequence[int], first: int = 0) -> Describe:
    """The description of a prompt's chunks from number `first` on."""
    chain, ids = [ROOT, *keys(tokens)], pack_ids(tokens[first * CHUNK :], "token ids")
    return Describe(chain[first], b"".join(chain[first + 1 :]), ids, CHUNK)


class Follower:
    """A router's subscription: asks for a replay where it joins, and for what it missed."""

    def __init__(
        self, endpoint: str, clears: bool = True, loses: Callable[[int], bool] = lambda seq: False, key: str | Path = ""
    ) -> None:
        """loses: whether the message of this number is lost."""
        self.router = Router(clears)
        self.loses = loses
        self.lost = self.replays = 0
        self.payloads: list[bytes] = []
        self.last: int | None = None
        self._context: zmq.Context[Any] = zmq.Context()
        self._sub, self._dealer = self._context.socket(zmq.SUB), self._context.socket(zmq.DEALER)
        self._sub.setsockopt(zmq.SUBSCRIBE, b"")
        for socket, url in ((self._sub, endpoint), (self._dealer, replay_endpoint(endpoint))):
            socket.setsockopt(zmq.LINGER, 0)
            socket.setsockopt(zmq.RECONNECT_IVL, 10)
            if key:
                read_client_key(key).use(socket)
            socket.connect(url)

    def read(self) -> Router:
        """Take what has arrived."""
        while self._sub.poll(0):
            topic, number, payload = self._sub.recv_multipart()
            seq = int.from_bytes(number, "big")
            if self.loses(seq):
                self.lost += 1
                continue
            if self.last is None or seq > self.last + 1:
                self._replay(0 if self.last is None else self.last + 1)
            if self.last is not None and seq == self.last + 1:
                self._take(topic, seq, payload)
        return self.router

    def _replay(self, first: int) -> None:
        self.replays += 1
        self._dealer.send_multipart((b"", first.to_bytes(8, "big")))
        while self._dealer.poll(1000 * HANG_S):
            empty, topic, number, payload = self._dealer.recv_multipart()
            assert empty == b""
            if number == END:
                assert (topic, payload) == (b"", b"")
                return
            seq = int.from_bytes(number, "big")
            if self.last is None or seq > self.last:
                self._take(topic, seq, payload)

    def _take(self, topic: bytes, seq: int, payload: bytes) -> None:
        self.payloads.append(payload)
        self.router.take(topic, payload)
        self.last = seq

    def wait(self, condition: Callable[[Router], object]) -> None:
        eventually(lambda: condition(self.read()))

    def close(self) -> None:
        self._context.destroy(linger=0)


class Desk:
    """A publisher on the test's own index, with one engine's topic; the test's thread is the deciding one."""

    def __init__(self, endpoint: str, pages: int = 64, most: int = 1 << 17, kept: int = 20_000) -> None:
        self.feed = Feed(most)
        self.shelf = Shelf(pages, listener=self.feed)
        self.index = self.shelf.index
        self.prompts: list[list[int]] = []
        self.context: zmq.Context[Any] = zmq.Context()
        self.endpoint = endpoint
        self.publisher = Publisher(self.feed, endpoint, self.context, kept_messages=kept)

    def start(self) -> Desk:
        self.tick()
        self.publisher.start()
        return self

    def tick(self) -> None:
        self.feed.tick(self.index.namespaces.all(), frozenset([(A, self.shelf.namespace)]))

    def store(self, tokens: list[int]) -> list[int]:
        """Store and describe a prompt's chunks; returns the prompt."""
        self.prompts.append(tokens)
        self.feed.described(described(tokens))
        chain = keys(tokens)
        for number, key in enumerate(chain, 1):
            if matching.is_missing(self.shelf.namespace, 0, key) and (part := self.shelf.reserve(chain, number)):
                self.index.seal(part, 0)
        return tokens

    def count(self, tokens: list[int]) -> int:
        """Chunks of a prompt's beginning that exist."""
        chunks = self.shelf.namespace.chunks
        found = [key in chunks and is_there(chunks[key]) for key in keys(tokens)]
        return [*found, False].index(False)

    def is_known_to(self, router: Router) -> bool:
        """Whether a router believes in the chunks of all prompts that exist, and in no others."""
        return all(router.blocks(each, "m").get("a", 0) == PER_CHUNK * self.count(each) for each in self.prompts)

    def close(self) -> None:
        if not self.context.closed:
            self.publisher.close()
            self.context.destroy(linger=0)
