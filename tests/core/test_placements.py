"""Clients that copy at any moment, fail, die, connect again and repeat requests, with faulty RAM: no byte is wrong."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import numpy as np
import pytest

from kvdepot.core.transfers import LINGER_S
from kvdepot.errors import BadRequest, UnknownRequest
from kvdepot.memory.allocator import PAGE
from kvdepot.memory.extents import checksum
from kvdepot.protocol import wire
from kvdepot.protocol.keys import HASH_BYTES
from kvdepot.protocol.layout import BlockFormat, chunk_format
from tests.core.desk import Copying, Desk, hit, prompt

pytest.importorskip("hypothesis")

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

PAGES = 12
CLIENTS = st.sampled_from([b"one", b"two", b"three"])
CHAINS = st.sampled_from([prompt(name, 5) for name in "abcd"])
"""20 chunks in each of two formats, of which 12 have room."""
FORMATS = [chunk_format(PAGE, "chunks"), chunk_format(PAGE, "other chunks")]
KINDS = ["store", "store", "retrieve", "retrieve", "compare", "sample"]


@cache
def truth(key: bytes, format: BlockFormat) -> bytes:
    """What every engine computes."""
    return random.Random(key + format.fingerprint).randbytes(PAGE)


@dataclass(eq=False)
class Asked:
    """A request that has no last answer. number: of its message. written: bytes of each chunk that are in the arena.
    is_forgotten: its chunks were forgotten after they had been placed."""

    number: tuple[bytes, bytes]
    request: wire.Copying
    format: BlockFormat
    copying: Copying | None = None
    written: int = 0
    is_forgotten: bool = False

    @property
    def client(self) -> bytes:
        return self.number[0]

    @property
    def is_store(self) -> bool:
        return isinstance(self.request, wire.Store)

    def places(self) -> list[tuple[bytes, int]]:
        """The keys of its chunks, each with its place in memory; none before they are known."""
        if self.copying is None:
            return []
        starts = [start for place in self.copying.placement.places for start, _ in place.extents]
        return list(zip(self.copying.keys(), starts, strict=True))


@dataclass
class Client:
    """A client that is connected. held: by request, what its session holds: the withdrawals that it knows of, and keys,
    places and formats."""

    format: BlockFormat
    is_faulty: bool = False
    held: dict[str, tuple[int, list[tuple[bytes, int, BlockFormat]]]] = field(default_factory=dict)


class PlacementMachine(RuleBasedStateMachine):
    @initialize(verify=st.sampled_from(["off", "sampled", "always"]))
    def begin(self, verify: str) -> None:
        self.desk = Desk(PAGES, {"verify": verify, "verify_hits": 0.1}, is_populated=False)
        self.desk.tick(0.0, 1000.0)
        self.bytes = np.zeros(PAGES * PAGE, np.uint8)
        self.asked: list[Asked] = []
        self.clients: dict[bytes, Client] = {}
        self.ghosts: list[tuple[float, Asked]] = []  # stores of dead clients, and until when a device may write
        self.verify = verify
        for kind, answer in (("store", True), ("retrieve", [True] * 5)):
            assert self._move(b"one", prompt("a", 5), 5, kind) == answer

    def teardown(self) -> None:
        if hasattr(self, "desk"):
            for client in list(self.desk.liveness_files):
                self.desk.die(client)
            self.desk.settle()
            self.desk.linger()
            self.desk.assert_empty()

    def _connect(self, name: bytes) -> Client:
        if name not in self.clients:
            self.desk.hello(name)
            self.clients[name] = Client(FORMATS[0])
            self._register(name)
        return self.clients[name]

    def _register(self, name: bytes) -> None:
        client = self.clients[name]
        fault = "the self-test failed" if client.is_faulty else ""
        request = wire.Register(1, client.format, "m", 1, 0, 1, writer=name.decode(), fault=fault)
        assert self.desk.ask_only(name, request) is None

    @rule(name=CLIENTS, chain=CHAINS, count=st.integers(1, 5), kind=st.sampled_from(KINDS))
    def ask(self, name: bytes, chain: Any, count: int, kind: str) -> None:
        client = self._connect(name)
        parts = [wire.Shards("r", "m", 1, 0, chain.parent(0), 0, chain.slice(0, count), 1)]
        requests: dict[str, wire.Store | wire.Retrieve] = {
            "store": wire.Store(1, parts), "retrieve": wire.Retrieve(1, parts, False),
        }  # fmt: skip
        request = requests.get(kind) or wire.Compare(1, parts, 0.1, kind == "sample")
        asked = self.desk.send(name, request)
        if client.is_faulty:
            assert isinstance(self.desk.answers[asked], BadRequest)
        else:
            self.asked.append(Asked(asked, request, client.format))

    @rule(name=CLIENTS, chain=CHAINS, count=st.integers(1, 5), kind=st.sampled_from(KINDS))
    def move(self, name: bytes, chain: Any, count: int, kind: str) -> None:
        """All of it at once."""
        self._move(name, chain, count, kind)

    def _move(self, name: bytes, chain: Any, count: int, kind: str) -> Any:
        self.ask(name, chain, count, kind)
        for task in list(self.desk.prepares):
            self.desk.prepare(task)
        self.hear()
        each = self.asked[-1] if self.asked else None
        if each is None or each.copying is None:
            return None
        self._write(each, PAGE)
        return self._complete(each)

    @precondition(lambda self: self.desk.prepares)
    @rule(data=st.data(), is_allocated=st.sampled_from([True, True, True, False]))
    def allocate(self, data: st.DataObject, is_allocated: bool) -> None:
        self.desk.prepare(data.draw(st.sampled_from(self.desk.prepares)), is_allocated)

    @invariant()
    def hear(self) -> None:
        """Answers arrive; what is placed lies apart from all that others may write."""
        if not hasattr(self, "desk"):
            return
        placed = {each.asked: each for each in self.desk.copies}
        for each in list(self.asked):
            each.copying = placed.get(each.number)
            answer = self.desk.answers.get(each.number)
            if answer is not None:
                assert each.copying is None
                nothing = isinstance(answer, bool) or answer == wire.Comparison() or not any(answer)
                assert nothing, "an answer without a copy"
                self.asked.remove(each)
        self.desk.check_places()
        promises = [promise for client in self.clients.values() for promise in client.held.values()]
        known = self.desk.index.namespaces.withdrawals  # after further ones, nobody loads by an earlier promise
        held = [place for withdrawals, places in promises if withdrawals == known for place in places]
        writes = [start for each in self.asked if each.is_store for _, start in each.places()]
        reads = {start for each in self.asked if not each.is_store for _, start in each.places()}
        reads |= {start for _, start, _ in held}
        ghosts = {start for _, each in self.ghosts for _, start in each.places()}
        assert not reads & {*writes, *ghosts} and not ghosts & set(writes)
        assert all(self.bytes[start : start + PAGE].tobytes() == truth(key, format) for key, start, format in held)
        self.desk.index.validate()

    @precondition(lambda self: any(each.is_store and each.places() for each in self.asked))
    @rule(data=st.data(), size=st.sampled_from([100, PAGE, PAGE]))
    def write(self, data: st.DataObject, size: int) -> None:
        """A client copies, a part or the whole."""
        self._write(data.draw(st.sampled_from([each for each in self.asked if each.is_store and each.places()])), size)

    def _write(self, each: Asked, size: int) -> None:
        for key, start in each.places() if each.is_store else []:
            self.bytes[start : start + size] = np.frombuffer(truth(key, each.format)[:size], np.uint8)
        each.written = max(each.written, size)

    @precondition(lambda self: self.ghosts)
    @rule(data=st.data())
    def a_device_writes_on_after_its_process_has_died(self, data: st.DataObject) -> None:
        _, each = data.draw(st.sampled_from(self.ghosts))
        for _, start in each.places():
            self.bytes[start : start + PAGE] = 0xDD

    @precondition(lambda self: self.verify == "always")
    @rule(page=st.integers(0, PAGES - 1))
    def memory_loses_a_bit(self, page: int) -> None:
        if all(start != page * PAGE for each in self.asked if each.is_store for _, start in each.places()):
            self.bytes[page * PAGE + 7] ^= 1

    @precondition(lambda self: self.desk.copies)
    @rule(data=st.data(), copied=st.sampled_from([True, True, True, False]))
    def complete(self, data: st.DataObject, copied: bool) -> None:
        placed = [each for each in self.asked if each.copying is not None]
        self._complete(data.draw(st.sampled_from(placed)), copied)

    def _complete(self, each: Asked, copied: bool = True) -> Any:
        assert each.copying is not None
        placement, is_comparison = each.copying.placement, isinstance(each.request, wire.Compare)
        of_another_server = wire.Complete(placement.operation, b"an other", True)
        assert isinstance(self.desk.ask_only(each.client, of_another_server), UnknownRequest)
        copied = copied and (each.written == PAGE or not each.is_store)
        read = {key: self.bytes[start : start + PAGE].tobytes() for key, start in each.places()}
        is_right = [data == truth(key, each.format) for key, data in read.items()]
        sums = [
            checksum(self.bytes, place.extents, PAGE) if place.is_summed and not (is_comparison and right) else 0
            for place, right in zip(placement.places, is_right, strict=True)
        ]
        differences = [[0.0] if right else [0.9, 0.9] for right in is_right] if is_comparison else []
        assert all(is_right) or self.verify == "always" or each.is_store
        self.asked.remove(each)
        self.desk.finish(each.copying, copied, sums, differences)
        answer = self.desk.answers[each.number]
        assert isinstance(
            self.desk.ask_only(each.client, wire.Complete(placement.operation, placement.boot)), UnknownRequest
        )
        if isinstance(answer, wire.Comparison):
            assert answer.worst == 0.0, "a bit that memory has lost accuses an engine"
            assert answer.chunks <= sum(is_right) * copied and not (each.is_forgotten and answer.chunks)
        elif isinstance(answer, list):
            for i, is_served in enumerate(answer):
                key = each.request.shards[0].hashes[i * HASH_BYTES :][:HASH_BYTES]
                assert not (is_served and (each.is_forgotten or not copied))
                assert not is_served or read[key] == truth(key, each.format), "wrong bytes are served"
        else:
            assert isinstance(answer, bool) and (copied or not answer)
        return answer

    @rule(name=CLIENTS, chain=CHAINS, request=st.sampled_from("xy"), kind=st.sampled_from(["", "", "layout", "keys"]))
    def hold(self, name: bytes, chain: Any, request: str, kind: str) -> None:
        """What a lookup finds stays where the answer says, until the session ends."""
        client = self._connect(name)
        hashes, fingerprint = bytes(chain.hashes), client.format.fingerprint
        if kind == "layout":
            fingerprint = b"another"
        if kind == "keys":  # a prefix is recognised by its last hash
            hashes = b"\0" * HASH_BYTES + hashes[HASH_BYTES:]
        lookup = wire.Lookup("m", 1, 1, request, 1, hashes, True, hurries=True, layout=fingerprint)
        found = hit(self.desk.ask_only(name, lookup))
        count, held = found.chunks, found.places
        client.held.pop(request, None)
        assert held is None or (count and self.verify != "always" and kind == "")
        if held is not None:
            assert (held.first, held.size, len(held.ranks)) == (0, PAGE, 1)
            assert held.withdrawals == self.desk.index.namespaces.withdrawals
            keys = [hashes[at : at + HASH_BYTES] for at in range(0, count * HASH_BYTES, HASH_BYTES)]
            for key, place in zip(keys, held.ranks[0], strict=True):
                assert bool(place.checksum) == (self.verify == "sampled" and key[0] < 16)
                assert place.checksum in (0, checksum(self.bytes, place.extents, PAGE))
            starts = [start for place in held.ranks[0] for start, _ in place.extents]
            places = [(key, at, client.format) for key, at in zip(keys, starts, strict=True)]
            client.held[request] = held.withdrawals, places

    @precondition(lambda self: any(client.held for client in self.clients.values()))
    @rule(name=CLIENTS, request=st.sampled_from("xy"))
    def end_session(self, name: bytes, request: str) -> None:
        if name in self.clients:
            self.clients[name].held.pop(request, None)
            self.desk.send(name, wire.EndSession(request))

    @precondition(lambda self: self.asked)
    @rule(data=st.data())
    def repeat(self, data: st.DataObject) -> None:
        """A connection broke: the client registers again, and repeats a request that it has no answer to."""
        each = data.draw(st.sampled_from(self.asked))
        self.desk.send(each.client, wire.Unregister(1))
        self._register(each.client)
        self.desk.deliver(each.client, wire.encode_request(int.from_bytes(each.number[1], "little"), each.request))

    @rule(name=CLIENTS, format=st.sampled_from(FORMATS), is_faulty=st.sampled_from([False, False, True]))
    def register_otherwise(self, name: bytes, format: BlockFormat, is_faulty: bool) -> None:
        """What was placed goes on; what is asked later is of the new registration."""
        client = self._connect(name)
        client.format, client.is_faulty = format, is_faulty
        self._register(name)

    @rule(name=CLIENTS, has_left=st.sampled_from([False, False, True]))
    def die(self, name: bytes, has_left: bool) -> None:
        if self.clients.pop(name, None) is None:
            return
        gone = [each for each in self.asked if each.client == name]
        self.asked = [each for each in self.asked if each.client != name]
        if not has_left:
            self.ghosts += [(self.desk.now + LINGER_S, each) for each in gone if each.is_store and each.places()]
        self.desk.liveness_files[name].left = has_left
        self.desk.die(name)

    @rule(seconds=st.sampled_from([0.5, 1.0, LINGER_S]))
    def pass_time(self, seconds: float) -> None:
        now = self.desk.now + seconds
        self.ghosts = [(end, each) for end, each in self.ghosts if end > now]
        self.desk.tick(now, 1000.0 + now)
        self.desk.expire()

    @rule(name=CLIENTS, is_wanted=st.sampled_from([False, False, False, True]))
    def forget(self, name: bytes, is_wanted: bool) -> None:
        """Not often: then memory is empty."""
        if not is_wanted:
            return
        self._connect(name)
        self.desk.send(name, wire.ForgetChunks())
        self.desk.expire()
        for each in self.asked:
            each.is_forgotten |= each.copying is not None


TestPlacements = PlacementMachine.TestCase
TestPlacements.settings = settings(max_examples=400, stateful_step_count=40)
