"""The list of prefixes: what a family is, who sees it, and that it is made in steps; its counts have a machine
in test_index.py."""

from __future__ import annotations

from typing import Any

import pytest

from kvdepot.core import lists as lists_module
from kvdepot.core.actions import Reply
from kvdepot.core.lists import MOST_OF_CLIENT, Lists
from kvdepot.errors import BadRequest, Busy
from kvdepot.keys import ChunkChain, derive_root
from kvdepot.memory.allocator import PAGE
from kvdepot.protocol import wire
from kvdepot.protocol.prefixes import ChunkStatus, Prefix
from tests.core.desk import Desk, group_stores, lookup, store
from tests.core.groups import BLOCKS


def chain(name: str, *ids: int) -> ChunkChain:
    """A prompt of one token a chunk; those with the same name share their beginning as far as their ids do."""
    made = ChunkChain(1, derive_root(("salt", name)))
    made.extend(ids)
    return made


def ask(desk: Desk, client: bytes = b"one", **options: Any) -> list[Prefix]:
    found = desk.ask(client, wire.Prefixes(**options))
    assert isinstance(found, list), found
    return found


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
    """A desk that passes one chunk a step."""
    desk.depot.lists = Lists(desk.index, desk.depot.tiering, step=1)
    return desk


def test_lookups_that_find_some_of_a_family_are_its_hits(desk: Desk) -> None:
    desk.ask(b"one", store(chain("chat", 1, 2, 3)))
    desk.tick(101.0, 1060.0)
    assert desk.ask(b"one", lookup(chain("chat", 1, 2, 9))) == 2
    assert desk.ask(b"one", lookup(chain("chat", 1, 2, 3), "r2")) == 3
    assert desk.ask(b"one", lookup(chain("chat", 9), "r3")) == 0
    desk.ask(b"one", lookup(chain("chat", 1), "by hand", readers=0))  # as `kvdepot warm` asks
    desk.tick(102.0, 1090.0)
    (found,) = ask(desk)
    assert (found.hits, found.hit_tokens, found.age_s, found.idle_s) == (2, 5, 90.0, 30.0)


@pytest.mark.parametrize(
    ("sort", "names"),
    [("hits", ["b", "c", "a"]), ("tokens", ["a", "c", "b"]), ("bytes", ["a", "c", "b"]), ("idle", ["a", "c", "b"])],
)
def test_families_are_sorted_and_only_the_first_are_told(desk: Desk, sort: str, names: list[str]) -> None:
    prompts = {"a": chain("a", *range(5)), "b": chain("b", 1), "c": chain("c", 1, 2)}
    for each in prompts.values():
        desk.ask(b"one", store(each))
    for number, name in enumerate(["c", "b", "b"]):
        desk.tick(101.0 + number, 1001.0 + number)
        desk.ask(b"one", lookup(prompts[name], f"r{number}"))
    hashes = [prompts[name].hashes[-32:].hex() for name in names]
    assert [each.hash for each in ask(desk, sort=sort)] == hashes
    assert [each.hash for each in ask(desk, sort=sort, most=2)] == hashes[:2]


def test_a_tenant_sees_its_own_families_alone_and_a_client_without_one_sees_all() -> None:
    desk = Desk(settings={"keys": "/nowhere"})
    for client in (b"red", b"blue", b""):
        desk.hello(client or b"none", user=client.decode())
        desk.register(client or b"none")
        desk.ask(client or b"none", store(chain("a", 1)))
    assert [each.tenant for each in ask(desk, b"red")] == ["red"]
    assert [each.tenant for each in ask(desk, b"blue")] == ["blue"]
    assert sorted(each.tenant for each in ask(desk, b"none")) == ["", "blue", "red"]


def test_a_list_is_made_in_steps_between_which_others_are_served(slow: Desk) -> None:
    for number in range(5):
        slow.ask(b"one", store(chain(f"p{number}", 1)))
    asked = slow.send(b"one", wire.Prefixes())
    turns = 0
    while asked not in slow.answers:
        assert slow.depot.next_deadline() == 0.0, "the loop must not wait for anybody"
        assert slow.answers[slow.send(b"one", wire.Noop())] == "ok"
        slow.expire()
        turns += 1
    assert turns >= 5 and len(told(slow, asked)) == 5
    assert slow.depot.next_deadline() > 0.0


@pytest.mark.parametrize(
    "request_",
    [
        wire.Prefixes(sort="age"), wire.Prefixes(most=0), wire.Prefixes(most=1001), wire.Prefixes("m" * 5000),
        wire.Inspect(), wire.Inspect(hashes=bytes(31)), wire.Inspect(end=bytes(31)), wire.Inspect(end=bytes(33)),
        wire.Inspect(hashes=bytes(32), end=bytes(32)), wire.Inspect(end=bytes(32), most=-1),
        wire.Inspect(hashes=bytes(32), most=1),
    ],
)  # fmt: skip
def test_a_list_out_of_range_or_of_nothing_is_refused(desk: Desk, request_: wire.Request) -> None:
    assert isinstance(desk.ask(b"one", request_), BadRequest)


def test_a_client_that_asks_for_many_lists_is_refused_and_others_are_not(slow: Desk) -> None:
    slow.hello(b"two")
    for number in range(20):
        slow.ask(b"one", store(chain(f"p{number}", 1)))
    asked = [slow.send(b"one", wire.Prefixes()) for _ in range(12)]
    late = slow.send(b"two", wire.Prefixes())
    slow.settle()
    refused = [isinstance(slow.answers[each], Busy) for each in asked]
    assert refused == [number >= MOST_OF_CLIENT for number in range(12)]
    assert len(told(slow, late)) == 20


def test_lists_are_refused_at_shutdown_which_they_would_delay(slow: Desk) -> None:
    for number in range(20):
        slow.ask(b"one", store(chain(f"p{number}", 1)))
    slow.send(b"one", wire.Prefixes())
    slow.send(b"one", wire.Inspect(hashes=bytes(chain("p0", 1).hashes)))
    (prefixes, chunks) = slow.depot.stop_waiting()
    for reply in (prefixes, chunks):
        assert isinstance(reply, Reply) and isinstance(reply.value, Busy)
    assert not slow.depot.lists


def steps_of(desk: Desk, request: wire.Prefixes | wire.Inspect, step: int) -> int:
    """In how many steps a list is made."""
    client = desk.depot.client(b"one")
    assert client is not None
    lists = Lists(desk.index, desk.depot.tiering, step=step)
    match request:
        case wire.Prefixes():
            answer = lists.prefixes(client, b"1", request, 0)
        case wire.Inspect():
            answer = lists.inspect(client, b"1", request, 0)
    steps = 1
    while not answer:
        steps, answer = steps + 1, lists.step()
    return steps


def test_a_list_of_many_prefixes_counts_as_many_requests() -> None:
    desk = Desk(pages=64, settings={"max_rate": 64})
    desk.hello(b"one")
    assert len(ask(desk)) == 0
    desk.tick(101.0, 1001.0)
    answers = [desk.ask(b"one", wire.Prefixes()) for _ in range(20)]
    assert isinstance(answers[0], list) and isinstance(answers[-1], Busy)


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
    found = inspect(desk, end=bytes(stored.hashes[-32:]))
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


@pytest.mark.parametrize("by_end", [False, True])
def test_an_answer_of_too_many_chunks_is_refused(desk: Desk, monkeypatch: pytest.MonkeyPatch, by_end: bool) -> None:
    monkeypatch.setattr(lists_module, "MOST_CHUNKS", 6)  # of all models together
    desk.register(b"one", 2, fingerprint=b"g" * 32)
    stored = chain("a", *range(7))
    desk.ask(b"one", store(stored))
    desk.ask(b"one", store(stored, 2, end=4, model="other"))

    def asked(chunks: int, model: str = "") -> Any:
        hashes = bytes(stored.hashes[: 32 * chunks])
        options: dict[str, Any] = {"end": hashes[-32:]} if by_end else {"hashes": hashes}
        return desk.ask(b"one", wire.Inspect(model, **options))

    assert len(asked(3)) == len(asked(6, "m")) == 6
    for refused in (asked(4), asked(7), asked(7, "m")):
        assert isinstance(refused, BadRequest) and "give a model or fewer hashes" in str(refused)


def test_the_end_of_a_prompt_is_told_without_its_beginning(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lists_module, "MOST_CHUNKS", 6)
    stored = chain("a", *range(9))
    desk.ask(b"one", store(stored))
    end = bytes(stored.hashes[-32:])
    assert [each.position for each in inspect(desk, end=end, most=4)] == [6, 7, 8, 9]
    assert isinstance(desk.ask(b"one", wire.Inspect(end=end)), BadRequest)


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
    assert len(inspect(desk, b"red", hashes=key)) == len(inspect(desk, b"red", end=key)) == 1
    assert inspect(desk, b"blue", hashes=key) == inspect(desk, b"blue", end=key) == []


def test_an_inspection_counts_as_many_requests_as_it_looks_at_parts() -> None:
    desk = Desk(pages=64, settings={"keys": "/nowhere"})
    for client in (b"red", b"blue"):
        desk.hello(client, user=client.decode())
    for number in range(8):
        desk.register(b"red", number + 1, fingerprint=bytes([number]) * 32)
        desk.ask(b"red", store(chain("a", 1), number + 1, model=f"m{number}"))
    request, lists = wire.Inspect(hashes=bytes(range(256)) * 8 * 256), desk.depot.lists
    each = 16384 // 128
    assert lists.cost(request) == lists.cost(request, "red") == 4 + 8 * each
    assert lists.cost(wire.Inspect("m3", request.hashes)) == 4 + each
    assert lists.cost(request, "blue") == 4
    assert lists.cost(wire.Inspect(end=bytes(32))) == lists.cost(wire.Inspect(end=bytes(8))) == 4
