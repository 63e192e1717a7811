"""Inspections: what is told of chunks, who sees it, and that it is made in steps."""

from __future__ import annotations

from typing import Any

import pytest

from kvdepot.core import inspections as module
from kvdepot.core.actions import Reply
from kvdepot.core.inspections import MOST_OF_CLIENT, Inspections
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


def told(desk: Desk, asked: tuple[bytes, bytes]) -> list[Any]:
    """The answer to a request that was sent before."""
    found = desk.answers[asked]
    assert isinstance(found, list), found
    return found


@pytest.fixture
def desk() -> Desk:
    desk = Desk(pages=64)
    desk.hello(b"one")
    desk.register(b"one")
    desk.tick(100.0, 1000.0)
    return desk


@pytest.fixture
def slow(desk: Desk) -> Desk:
    """A desk that passes one chunk a step, with five chunks."""
    desk.ask(b"one", store(chain("a", *range(5))))
    desk.depot.inspections = Inspections(desk.index, desk.depot.tiering, step=1)
    return desk


PROMPT = wire.Inspect(hashes=bytes(chain("a", *range(5)).hashes))


def test_an_answer_is_made_in_steps_between_which_others_are_served(slow: Desk) -> None:
    asked = slow.send(b"one", PROMPT)
    turns = 0
    while asked not in slow.answers:
        assert slow.depot.next_deadline() == 0.0, "the loop must not wait for anybody"
        assert slow.answers[slow.send(b"one", wire.Noop())] == "ok"
        slow.expire()
        turns += 1
    assert turns >= 5 and len(told(slow, asked)) == 5
    assert slow.depot.next_deadline() > 0.0


@pytest.mark.parametrize(
    "request_", [wire.Inspect(), wire.Inspect(hashes=bytes(31)), wire.Inspect("m" * 5000, bytes(32))]
)
def test_an_inspection_of_nothing_or_out_of_range_is_refused(desk: Desk, request_: wire.Request) -> None:
    assert isinstance(desk.ask(b"one", request_), BadRequest)


def test_a_client_that_asks_for_many_is_refused_and_others_are_not(slow: Desk) -> None:
    slow.hello(b"two")
    asked = [slow.send(b"one", PROMPT) for _ in range(12)]
    late = slow.send(b"two", PROMPT)
    slow.settle()
    refused = [isinstance(slow.answers[each], Busy) for each in asked]
    assert refused == [number >= MOST_OF_CLIENT for number in range(12)]
    assert len(told(slow, late)) == 5


def test_inspections_are_refused_at_shutdown_which_they_would_delay(slow: Desk) -> None:
    slow.send(b"one", PROMPT)
    (reply,) = slow.depot.stop_waiting()
    assert isinstance(reply, Reply) and isinstance(reply.value, Busy)
    assert not slow.depot.inspections


def steps_of(desk: Desk, request: wire.Inspect, step: int) -> int:
    """In how many steps an answer is made."""
    client = desk.depot.client(b"one")
    assert client is not None
    inspections = Inspections(desk.index, desk.depot.tiering, step=step)
    steps, answer = 1, inspections.begin(client, b"1", request, 0)
    while not answer:
        steps, answer = steps + 1, inspections.step()
    return steps


def inspect(desk: Desk, client: bytes = b"one", **options: Any) -> list[ChunkStatus]:
    found = desk.ask(client, wire.Inspect(**options))
    assert isinstance(found, list), found
    return found


def test_the_chunks_of_a_prompt_are_told_with_what_holds_them(desk: Desk) -> None:
    stored = chain("a", 1, 2, 3)
    desk.ask(b"one", store(stored))
    desk.ask(b"one", lookup(chain("a", 1, 2)))
    desk.ask(b"one", wire.Lease("keep", "retain", "m", 1, BLOCKS, bytes(stored.hashes)))
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
    (under_way,) = inspect_while_storing(desk, chain("b", 1))
    assert (under_way.state, under_way.age_s, under_way.held) == ("storing", None, 1)


def inspect_while_storing(desk: Desk, stored: ChunkChain) -> list[ChunkStatus]:
    asked = desk.send(b"one", wire.Inspect(hashes=bytes(stored.hashes)))
    while asked not in desk.answers:
        desk.expire()
    return told(desk, asked)


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


def test_hashes_that_memory_lacks_are_passed_many_in_a_step(desk: Desk) -> None:
    desk.ask(b"one", store(chain("a", *range(8))))
    lacking, known = (wire.Inspect(hashes=bytes(chain(each, *range(64)).hashes)) for each in ("lacking", "a"))
    assert steps_of(desk, lacking, step=64) == 2
    assert steps_of(desk, known, step=64) == 3, "what is told takes longer than what is only looked at"


def test_a_tenant_inspects_its_own_chunks_alone() -> None:
    desk = Desk(settings={"keys": "/nowhere"})
    for client in (b"red", b"blue"):
        desk.hello(client, user=client.decode())
    desk.register(b"red")
    desk.ask(b"red", store(chain("a", 1)))
    key = bytes(chain("a", 1).hashes)
    assert len(inspect(desk, b"red", hashes=key)) == 1
    assert inspect(desk, b"blue", hashes=key) == []


def test_an_inspection_counts_as_many_requests_as_it_looks_at_parts() -> None:
    desk = Desk(pages=64, settings={"keys": "/nowhere", "max_rate": 1024})
    for client in (b"red", b"blue"):
        desk.hello(client, user=client.decode())
    for number in range(8):
        desk.register(b"red", number + 1, fingerprint=bytes([number]) * 32)
        desk.ask(b"red", store(chain("a", 1), number + 1, model=f"m{number}"))
    request, cost = wire.Inspect(hashes=bytes(range(256)) * 8 * 256), desk.depot.inspections.cost
    each = 16384 // 128
    assert cost(request) == cost(request, "red") == 4 + 8 * each
    assert cost(wire.Inspect("m3", request.hashes)) == 4 + each
    assert cost(request, "blue") == 4
    answers = [desk.ask(b"red", request) for _ in range(20)]
    assert isinstance(answers[0], list) and isinstance(answers[-1], Busy)
