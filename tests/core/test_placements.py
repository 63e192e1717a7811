"""Clients that copy chunks themselves, at any later moment, die, connect again, repeat requests: no byte is wrong."""

from __future__ import annotations

import random
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import pytest

from kvdepot.devices.by_client import CopiedByClient
from kvdepot.errors import UnknownRequest
from kvdepot.memory.allocator import PAGE
from kvdepot.protocol import wire
from kvdepot.protocol.keys import HASH_BYTES
from kvdepot.protocol.layout import copied_by_client
from tests.core.desk import BLOCKS, Desk, prompt

pytest.importorskip("hypothesis")

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

PAGES = 12
CLIENTS = st.sampled_from([b"one", b"two", b"three"])
CHAINS = st.sampled_from([prompt(name, 5) for name in "abcd"])
"""20 chunks, of which 12 have room."""
OWNER = "arena", b"bootboot"


@cache
def truth(key: bytes) -> bytes:
    return random.Random(key).randbytes(PAGE)


@dataclass(eq=False)
class Asked:
    """A store or retrieve that has not been completed. written: bytes of each chunk that its client has written."""

    client: bytes
    number: bytes
    request: wire.Store | wire.Retrieve
    placement: wire.Placement | None = None
    written: int = 0
    is_forgotten: bool = False

    def places(self) -> list[tuple[bytes, int]]:
        """The keys of its chunks, each with its place in memory."""
        assert self.placement is not None
        hashes = self.request.shards[0].hashes
        found = []
        for place in self.placement.places:
            ((start, size),) = place.extents
            assert size == PAGE
            found.append((hashes[place.chunk * HASH_BYTES :][:HASH_BYTES], start))
        return found


class PlacementMachine(RuleBasedStateMachine):
    @initialize(verify=st.sampled_from(["off", "always"]))
    def begin(self, verify: str) -> None:
        self.desk = Desk(PAGES, {"verify": verify}, lambda layout: CopiedByClient(layout, OWNER))
        self.bytes = np.zeros(PAGES * PAGE, np.uint8)
        self.asked: list[Asked] = []
        self.held: dict[tuple[bytes, str], list[tuple[bytes, int]]] = {}  # keys and places, by client and request
        self.verify = verify
        self.ask(b"one", prompt("a", 5), 5, True, True)
        self.hear()
        self._write(self.asked[0], PAGE)
        assert self._complete(self.asked[0]) is True
        self.ask(b"one", prompt("a", 5), 5, False, True)
        self.hear()
        assert self._complete(self.asked[0]) == [True] * 5

    def teardown(self) -> None:
        if hasattr(self, "desk"):
            for client in list(self.desk.liveness_files):
                self.desk.die(client)
            self.desk.settle()
            self.desk.assert_empty()

    def _connect(self, client: bytes) -> None:
        if client not in self.desk.liveness_files:
            self.desk.hello(client)
            self._register(client)

    def _register(self, client: bytes) -> None:
        layout = copied_by_client(PAGE, "chunks", BLOCKS)
        assert self.desk.ask(client, wire.Register(1, layout, "m", 1, 0, 1)) is None

    @rule(client=CLIENTS, chain=CHAINS, count=st.integers(1, 5), is_store=st.booleans(), at_once=st.booleans())
    def ask(self, client: bytes, chain: Any, count: int, is_store: bool, at_once: bool) -> None:
        self._connect(client)
        blocks = np.arange(count, dtype="<u4").tobytes()
        part = wire.Shards("r", "m", 1, 0, chain.parent(0), 0, chain.slice(0, count), blocks)
        request = wire.Store(1, 1, [part]) if is_store else wire.Retrieve(1, [part], False)
        self.asked.append(Asked(client, self.desk.send(client, request)[1], request))
        if at_once:
            self.desk.settle()

    @precondition(lambda self: self.desk.tasks)
    @rule(data=st.data(), arrives=st.sampled_from([None, None, None, False]))
    def end_task(self, data: st.DataObject, arrives: bool | None) -> None:
        self.desk.finish(data.draw(st.sampled_from(self.desk.tasks)), arrives)

    @invariant()
    def hear(self) -> None:
        """Answers arrive; what is placed lies apart from all that others may write."""
        if not hasattr(self, "desk"):
            return
        for each in list(self.asked):
            answer = self.desk.answers.pop((each.client, each.number), None)
            if isinstance(answer, wire.Placement):
                assert each.placement in (None, answer), "placed twice"
                each.placement = answer
            elif answer is not None:
                assert each.placement is None, "a repeated request was answered otherwise"
                assert isinstance(answer, bool) or not any(answer)  # there was nothing to copy
                self.asked.remove(each)
        placed = [each for each in self.asked if each.placement is not None]
        writes = [start for each in placed if isinstance(each.request, wire.Store) for _, start in each.places()]
        reads = {start for each in placed if isinstance(each.request, wire.Retrieve) for _, start in each.places()}
        held = [place for places in self.held.values() for place in places]
        reads |= {start for _, start in held}
        assert len(set(writes)) == len(writes) and not reads & set(writes)
        assert all(self.bytes[start : start + PAGE].tobytes() == truth(key) for key, start in held)
        self.desk.index.validate()

    @rule(data=st.data(), size=st.sampled_from([100, PAGE, PAGE]))
    def write(self, data: st.DataObject, size: int) -> None:
        """A client copies, a part or the whole."""
        stores = [each for each in self.asked if each.placement and isinstance(each.request, wire.Store)]
        if stores:
            self._write(data.draw(st.sampled_from(stores)), size)

    def _write(self, each: Asked, size: int) -> None:
        for key, start in each.places():
            self.bytes[start : start + size] = np.frombuffer(truth(key)[:size], np.uint8)
        each.written = max(each.written, size)

    @rule(data=st.data())
    def complete(self, data: st.DataObject) -> None:
        placed = [each for each in self.asked if each.placement is not None]
        if placed:
            self._complete(data.draw(st.sampled_from(placed)))

    def _complete(self, each: Asked) -> object:
        assert each.placement is not None
        of_another_server = wire.Complete(each.placement.operation, b"an other", True)
        assert isinstance(self.desk.ask(each.client, of_another_server), UnknownRequest)
        read = {key: self.bytes[start : start + PAGE].tobytes() for key, start in each.places()}
        self.asked.remove(each)
        answer = self.desk.ask(
            each.client, wire.Complete(each.placement.operation, each.placement.boot, each.written == PAGE)
        )
        if isinstance(each.request, wire.Retrieve):
            assert isinstance(answer, list)
            hashes = each.request.shards[0].hashes
            for i, is_served in enumerate(answer):
                key = hashes[i * HASH_BYTES :][:HASH_BYTES]
                assert not (is_served and each.is_forgotten)
                assert not is_served or read[key] == truth(key), "wrong bytes are served"
        else:
            assert isinstance(answer, bool) and (each.written == PAGE or not answer or not each.places())
        return answer

    @rule(client=CLIENTS, chain=CHAINS, request=st.sampled_from("xy"), kind=st.sampled_from(["", "", "layout", "keys"]))
    def hold(self, client: bytes, chain: Any, request: str, kind: str) -> None:
        """What a lookup finds stays where the answer says, until the session ends."""
        self._connect(client)
        hashes, layout = bytes(chain.hashes), copied_by_client(PAGE, "chunks", BLOCKS).fingerprint
        if kind == "layout":
            layout = b"another"
        if kind == "keys":  # a prefix is recognised by its last hash
            hashes = b"\0" * HASH_BYTES + hashes[HASH_BYTES:]
        lookup = wire.Lookup("m", 1, 1, request, 1, hashes, True, hurries=True, layout=layout)
        count, _, held = self.desk.ask(client, lookup)
        self.held.pop((client, request), None)
        assert (held is None) == (not count or self.verify == "always" or kind != "")
        if held is not None:
            assert (held.first, held.size, len(held.ranks)) == (0, PAGE, 1)
            assert held.withdrawals == self.desk.index.namespaces.withdrawals
            keys = [hashes[at : at + HASH_BYTES] for at in range(0, count * HASH_BYTES, HASH_BYTES)]
            starts = [start for ((start, _),), _ in held.ranks[0]]
            self.held[client, request] = list(zip(keys, starts, strict=True))

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def end_session(self, data: st.DataObject) -> None:
        client, request = data.draw(st.sampled_from(sorted(self.held)))
        del self.held[client, request]
        self.desk.ask(client, wire.EndSession(request))

    @precondition(lambda self: self.asked)
    @rule(data=st.data())
    def repeat(self, data: st.DataObject) -> None:
        """A connection broke: the client registers again, and repeats a request that it has no answer to."""
        each = data.draw(st.sampled_from(self.asked))
        self.desk.send(each.client, wire.Unregister(1))
        self._register(each.client)
        self.desk.deliver(each.client, wire.encode_request(int.from_bytes(each.number, "little"), each.request))

    @rule(client=CLIENTS)
    def die(self, client: bytes) -> None:
        self.asked = [each for each in self.asked if each.client != client]
        self.held = {key: places for key, places in self.held.items() if key[0] != client}
        self.desk.die(client)

    @rule(client=CLIENTS)
    def forget(self, client: bytes) -> None:
        self._connect(client)
        self.desk.send(client, wire.Forget())
        self.desk.expire()
        for each in self.asked:
            each.is_forgotten |= each.placement is not None


TestPlacements = PlacementMachine.TestCase
TestPlacements.settings = settings(max_examples=400, stateful_step_count=40)
