"""Trails of requests: why a prefix ended, what was loaded and stored, who sees it, and that little is kept."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from kvdepot.core import departures
from kvdepot.core.index import matching
from kvdepot.errors import BadRequest, UnknownRequest
from kvdepot.keys import ChunkChain, derive_root
from kvdepot.protocol import wire
from kvdepot.protocol.model_names import name_model
from kvdepot.protocol.trails import ENDS, MOST_TRAILS, Trail
from tests.core.desk import PER_CHUNK, Desk, group_stores, layout, lookup, prompt, retrieve, shards, store
from tests.core.host import look, new_host
from tests.core.wanted import said
from tests.tiers.faulty import MemoryTier


def chain(*ids: int) -> ChunkChain:
    """A prompt of one token a chunk."""
    made = ChunkChain(1, derive_root())
    made.extend(ids)
    return made


def why(desk: Desk, request: str = "r", client: bytes = b"one") -> Trail:
    found = desk.ask(client, wire.Why(request))
    assert isinstance(found, Trail), found
    assert all(each.end in ENDS for each in found.lookups)
    return msgspec.convert(msgspec.to_builtins(found), Trail)


def ends(desk: Desk, asked: ChunkChain, request: str = "r", **options: Any) -> tuple[int, str, str]:
    """What a lookup finds, why it ended there, and the hash that its trail names."""
    desk.ask(b"one", lookup(asked, request, **options))
    desk.ask(b"one", wire.EndSession(request))
    last = why(desk, request).lookups[-1]
    return last.found, last.end, last.next


def hash_at(asked: ChunkChain, chunk: int) -> str:
    return asked.slice(chunk, chunk + 1).hex()


@pytest.fixture
def desk() -> Desk:
    desk = Desk(pages=4)
    desk.hello(b"one", engine="replica-7")
    desk.register(b"one")
    desk.tick(100.0, 1000.0)
    return desk


def test_a_prefix_ends_where_other_text_begins_and_the_trail_says_so(desk: Desk) -> None:
    desk.ask(b"one", store(chain(1, 2, 3), request="stored"))
    asked = chain(1, 2, 9, 10)
    assert ends(desk, asked) == (2, "absent", hash_at(asked, 2))
    (found,) = why(desk).lookups
    assert (found.asked, found.in_memory, found.engine, found.model, found.at) == (4, 2, "replica-7", "m", 1000)
    assert found.branches == 1 and found.gone_s is None, "chunk 3 of the stored prompt follows"
    assert ends(desk, chain(1, 2, 3), "whole") == (3, "whole", "")
    assert ends(desk, chain(1, 2, 3, 4), "longer") == (3, "absent", hash_at(chain(1, 2, 3, 4), 3))
    assert why(desk, "longer").lookups[0].branches == 0


def test_an_evicted_chunk_is_named_with_the_time_since_then(desk: Desk) -> None:
    old = chain(1, 2, 3, 4)
    desk.ask(b"one", store(old))
    desk.ask(b"one", store(chain(7, 8)))  # takes the place of the end of the old prompt
    desk.tick(130.0, 1030.0)
    assert ends(desk, old) == (2, "evicted", hash_at(old, 2))
    assert why(desk).lookups[0].gone_s == 30
    desk.ask(b"one", wire.ForgetChunks())
    assert ends(desk, old, "later") == (0, "removed", hash_at(old, 0))
    desk.register(b"one", 2, fingerprint=b"g" * 32)
    desk.ask(b"one", store(chain(9), 2, model="other"))
    assert ends(desk, old, "other", model="other") == (0, "absent", hash_at(old, 0)), "it was evicted in another model"


def test_the_latest_chunks_that_left_are_remembered(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(departures, "_MOST", 2)
    for number in range(1, 15):
        desk.ask(b"one", store(chain(number)))
    remembered = [number for number in range(1, 11) if ends(desk, chain(number), f"r{number}")[1] == "evicted"]
    assert remembered and remembered == list(range(remembered[0], 11)) and 2 <= len(remembered) <= 6


def test_a_chunk_whose_store_failed_was_never_there(desk: Desk) -> None:
    desk.send(b"one", store(chain(5)))
    desk.finish(desk.copies[0], False)
    assert ends(desk, chain(5)) == (0, "absent", hash_at(chain(5), 0))


def test_a_chunk_that_is_being_stored_or_of_no_known_model_ends_a_prefix(desk: Desk) -> None:
    desk.send(b"one", store(chain(1, 2)))
    hurried = msgspec.structs.replace(lookup(chain(1, 2)), hurries=True)
    assert desk.answers[desk.send(b"one", hurried)] == 0
    assert [each.end for each in why_now(desk).lookups] == ["storing"]
    desk.settle()
    assert ends(desk, chain(1, 2), "other", model="unknown") == (0, "model", hash_at(chain(1), 0))


def why_now(desk: Desk) -> Trail:
    """The trail while copies wait."""
    found = desk.answers[desk.send(b"one", wire.Why("r"))]
    assert isinstance(found, Trail)
    return found


def test_a_window_that_was_stored_at_an_earlier_boundary_only_ends_a_prefix() -> None:
    desk = Desk(pages=64)
    desk.hello(b"one")
    desk.register_groups((0, 2))
    for request in group_stores((0, 2), chain(1, 2, 3), [range(3), range(2)]):
        desk.ask(b"one", request)
    assert ends(desk, chain(1, 2, 3))[:2] == (2, "boundary")


def test_models_that_were_not_searched_are_named_with_what_differs(desk: Desk) -> None:
    here, there = name_model("llama", "a" * 32), name_model("llama", "b" * 32)
    desk.ask(b"one", wire.Register(2, layout(b"g" * 32), here, 1, 0, PER_CHUNK, 16))
    desk.ask(b"one", store(chain(1), 2, model=here))
    desk.ask(b"one", store(chain(1, 2)))
    desk.ask(b"one", lookup(chain(1), model=there))
    assert why(desk).others == [f"{here} has 1 chunk: another identity, chunks of 16 tokens"]
    two = msgspec.structs.replace(lookup(chain(1), "two"), world_size=2)
    desk.ask(b"one", two)
    assert why(desk, "two").others == ["m has 2 chunks: 1 rank"]


@pytest.fixture
def tenants() -> Desk:
    """Two tenants; one has stored a chunk."""
    desk = Desk(settings={"keys": "/nowhere"})
    for client in (b"red", b"blue"):
        desk.hello(client, user=client.decode())
    desk.register(b"red")
    desk.ask(b"red", store(chain(1)))
    return desk


def test_models_of_other_tenants_are_not_named(tenants: Desk) -> None:
    for client in (b"red", b"blue"):
        tenants.ask(client, msgspec.structs.replace(lookup(chain(1)), world_size=2))
    assert why(tenants, client=b"red").others and not why(tenants, client=b"blue").others


def test_a_quarantine_is_the_reason_in_its_own_tenant_alone(tenants: Desk) -> None:
    for namespace in tenants.index.namespaces.all():
        tenants.index.namespaces.quarantine(namespace)
    for client in (b"red", b"blue"):
        tenants.ask(client, lookup(chain(1)))
    found = [why(tenants, client=client).lookups[-1].end for client in (b"red", b"blue")]
    assert found == ["quarantine", "model"]


def test_loads_stores_and_refusals_are_counted_in_shards(desk: Desk) -> None:
    desk.ask(b"one", store(chain(1, 2), request="r"))
    desk.ask(b"one", store(chain(1, 2, 3), request="r"))
    desk.ask(b"one", retrieve(chain(1, 2, 9), request="r"))
    asked = desk.send(b"one", store(chain(5), request="r"))
    desk.finish(desk.copies[0], False)
    assert desk.answers[asked] is False
    desk.ask(b"one", lookup(chain(1, 2, 3)))
    desk.ask(b"one", store(chain(20, 21), request="r"))  # one page is left, and the rest is pinned
    assert why(desk).shards == {
        "stored": 4, "known": 2, "loaded": 2, "not_loaded": 1, "not_stored": 1, "no_room": 1,
    }  # fmt: skip
    desk.ask(b"one", wire.EndSession("r", 1, asked=wire.Asked(4, 3, 1, 1, 1)))
    computed = {"computed as that was sooner": 1, "compared": 1}
    assert why(desk).engine == {"needed": 4, "in its own cache": 1, "found here": 3, "loaded": 1, **computed}
    shards_of = [shards(chain(31, 32), request="s"), shards(chain(41), request="t")]
    desk.ask(b"one", wire.EndSession("r"))
    desk.ask(b"one", wire.Store(1, shards_of))
    assert (why(desk, "s").shards, why(desk, "t").shards) == ({"stored": 2}, {"stored": 1})
    assert isinstance(desk.ask(b"one", retrieve(chain(1), 7, request="r")), Exception)
    assert why(desk).errors == ["Retrieve: no KV tensors are registered under instance 7"]


def test_a_store_that_yields_to_a_queue_is_counted_as_that_and_not_as_dropped(desk: Desk) -> None:
    desk.ask(b"one", store(chain(1, 2, 3, 4), request="stored"))
    (namespace,) = desk.index.namespaces.all()
    said(desk.index, "engine", matching.match(namespace, chain(1, 2, 3).slice(0, 3)).chunks)
    assert desk.ask(b"one", store(chain(7, 8, 9), request="r")) is False
    assert why(desk).shards == {"stored": 1, "wanted": 2}
    counters = desk.depot.counters
    assert (counters["yielded_chunks"], counters["dropped_chunks"], counters["capped_chunks"]) == (2, 0, 0)
    assert ends(desk, chain(1, 2, 3, 4))[0] == 3


def test_a_lookup_names_the_tiers_that_it_loaded_from_and_those_that_were_late() -> None:
    tier = MemoryTier()
    here, there = new_host(tier), new_host(tier, lookup_s=0.5)
    stored = prompt("a", 3)
    here.find(b"one", store(stored))
    there.send(b"one", look(stored))
    there.work()  # it is found; the load hangs
    there.pass_time(0.5)
    (found,) = why(there).lookups
    assert (found.found, found.end, found.late) == (0, "storing", ["disk:///d"])
    there.rest()
    other = prompt("b", 3)
    here.find(b"one", store(other))
    assert there.find(b"one", look(other, "again")) == 3
    (found,) = why(there, "again").lookups
    assert (found.in_memory, found.found, found.late, list(found.tiers)) == (0, 3, [], ["disk:///d"])
    assert found.tiers["disk:///d"] > 0


def test_ids_may_be_cut_and_the_last_request_that_found_nothing_needs_none(desk: Desk) -> None:
    desk.ask(b"one", store(chain(1), request="store"))
    for request, asked in (("cmpl-1-0-ab", 8), ("cmpl-12-0-cd", 9), ("hit", 1)):
        desk.ask(b"one", lookup(chain(asked), request))
    assert why(desk, "cmpl-12").request == "cmpl-12-0-cd"
    assert why(desk, "").request == "cmpl-12-0-cd"
    several = desk.ask(b"one", wire.Why("cmpl-1"))
    assert isinstance(several, BadRequest) and "cmpl-1-0-ab, cmpl-12-0-cd" in str(several)
    unknown = desk.ask(b"one", wire.Why("nobody"))
    assert isinstance(unknown, UnknownRequest) and f"4 latest ones; {MOST_TRAILS} are kept" in str(unknown)


def test_a_tenant_sees_its_own_requests_alone() -> None:
    desk = Desk(settings={"keys": "/nowhere"})
    for client in (b"red", b"blue", b""):
        desk.hello(client or b"none", user=client.decode())
    desk.ask(b"red", lookup(chain(1), "mine"))
    assert why(desk, "mine", b"red").tenant == why(desk, "mine", b"none").tenant == "red"
    for request in ("mine", ""):
        assert isinstance(desk.ask(b"blue", wire.Why(request)), UnknownRequest)


def test_the_latest_requests_are_kept_and_of_each_the_latest_lookups(desk: Desk) -> None:
    for number in range(MOST_TRAILS + 1):
        desk.ask(b"one", lookup(chain(8), f"r{number}."))
    for _ in range(20):
        desk.ask(b"one", lookup(chain(8), "r7."))
    assert isinstance(desk.ask(b"one", wire.Why("r0.")), UnknownRequest)
    assert 1 < len(why(desk, "r7.").lookups) <= 8 and why(desk, "r1.").request == "r1."


def test_lookups_by_hand_and_ids_that_are_too_long_leave_no_trail(desk: Desk) -> None:
    desk.ask(b"one", lookup(chain(8), "warm", readers=0))
    assert isinstance(desk.ask(b"one", lookup(chain(8), "x" * 5000)), BadRequest)
    for request in ("warm", "x", ""):
        assert isinstance(desk.ask(b"one", wire.Why(request)), UnknownRequest)
