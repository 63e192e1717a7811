"""Inspections: what is told of chunks, and who sees it."""

from __future__ import annotations

from typing import Any

import pytest

from kvdepot.core import inspections as module
from kvdepot.errors import BadRequest, Busy
from kvdepot.keys import ChunkChain, derive_root
from kvdepot.memory.allocator import PAGE
from kvdepot.protocol import wire
from kvdepot.protocol.chunks import ChunkStatus
from tests.core.desk import Desk, group_stores, lookup, store
from tests.core.groups import BLOCKS


def chain(name: str, *ids: int) -> ChunkChain:
    """A prompt of one token a chunk; those with the same name share their beginning as far as their ids do."""
    made = ChunkChain(1, derive_root(("salt", name)))
    made.extend(ids)
    return made


@pytest.fixture
def desk() -> Desk:
    desk = Desk(pages=64)
    desk.hello(b"one")
    desk.register(b"one")
    desk.tick(100.0, 1000.0)
    return desk


@pytest.mark.parametrize(("model", "hashes"), [("", 0), ("", 31), ("m" * 5000, 32), ("", 17 * 32)])
def test_an_inspection_of_nothing_or_out_of_range_is_refused(desk: Desk, model: str, hashes: int) -> None:
    assert isinstance(desk.ask(b"one", wire.Inspect(model, bytes(hashes))), BadRequest)


def inspect(desk: Desk, client: bytes = b"one", **options: Any) -> list[ChunkStatus]:
    found = desk.ask(client, wire.Inspect(**options))
    assert isinstance(found, list), found
    return found


def test_the_chunks_of_a_prompt_are_told_with_what_holds_them(desk: Desk) -> None:
    stored = chain("a", 1, 2, 3)
    desk.ask(b"one", store(stored))
    desk.ask(b"one", lookup(chain("a", 1, 2)))
    desk.ask(b"one", wire.TakeLease("keep", "retain", "m", 1, BLOCKS, bytes(stored.hashes)))
    desk.tick(130.0, 1030.0)
    asked = chain("a", 1, 2, 3, 4)
    found = inspect(desk, hashes=bytes(asked.hashes))
    assert [(each.hash, each.position, each.state, each.held, each.leased) for each in found] == [
        (asked.hashes[32 * at : 32 * at + 32].hex(), at + 1, "ready", int(at >= 1), 1) for at in range(3)
    ]
    assert {(each.bytes, each.age_s, each.group, each.chunk_tokens, each.model) for each in found} == {
        (PAGE, 30.0, 0, 1, "m")
    }


def test_parts_of_all_groups_are_told_and_chunks_that_are_being_stored(desk: Desk) -> None:
    desk = Desk(pages=64)
    desk.hello(b"one")
    desk.register_groups((0, 2))
    stored = chain("a", 1, 2, 3)
    for request in group_stores((0, 2), stored):
        desk.ask(b"one", request)
    found = inspect(desk, hashes=bytes(stored.hashes))
    assert [(each.group, each.reach, each.position) for each in found] == [
        (0, 0, 1), (0, 0, 2), (0, 0, 3), (1, 2, 0), (1, 2, 0),
    ]  # fmt: skip
    desk.send(b"one", group_stores((0, 2), chain("b", 1))[0])
    (under_way,) = inspect(desk, hashes=bytes(chain("b", 1).hashes))
    assert (under_way.state, under_way.age_s, under_way.held) == ("storing", None, 1)


def test_an_answer_of_too_many_chunks_is_refused(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOST_CHUNKS", 6)  # of all models together
    desk.register(b"one", 2, fingerprint=b"g" * 32)
    stored = chain("a", *range(7))
    desk.ask(b"one", store(stored))
    desk.ask(b"one", store(stored, 2, end=4, model="other"))

    def asked(chunks: int, model: str = "") -> Any:
        return desk.ask(b"one", wire.Inspect(model, bytes(stored.hashes[: 32 * chunks])))

    assert len(asked(3)) == len(asked(6, "m")) == 6
    for refused in (asked(4), asked(7), asked(7, "m")):
        assert isinstance(refused, BadRequest) and "give a model or fewer" in str(refused)


def test_a_tenant_inspects_its_own_chunks_alone() -> None:
    desk = Desk(settings={"keys": "/nowhere"})
    for client in (b"red", b"blue"):
        desk.hello(client, user=client.decode())
    desk.register(b"red")
    desk.ask(b"red", store(chain("a", 1)))
    key = bytes(chain("a", 1).hashes)
    assert len(inspect(desk, b"red", hashes=key)) == 1
    assert inspect(desk, b"blue", hashes=key) == []


def test_an_inspection_counts_as_several_requests() -> None:
    desk = Desk(pages=64, settings={"keys": "/nowhere", "max_rate": 1024})
    desk.hello(b"red", user="red")
    answers = [desk.ask(b"red", wire.Inspect(hashes=bytes(16 * 32))) for _ in range(2048)]
    assert isinstance(answers[250], list) and isinstance(answers[256], Busy)
