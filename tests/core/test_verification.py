"""Comparisons of engines' KV with stored chunks: what is compared, and what follows from a difference."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from kvdepot.errors import BadRequest
from kvdepot.keys import ChunkChain
from kvdepot.protocol import wire
from tests.core.desk import PER_CHUNK, Desk, hit, layout, lookup, prompt, shards, store

LIMIT = 0.25
CORRUPT = [-1.0]
"""Stands for bytes that have another checksum than was stored."""


def register(desk: Desk, client: bytes, writer: str, **facts: str) -> None:
    """An engine whose KV can be compared."""
    desk.hello(client, engine=writer)
    request = wire.Register(1, layout(), "m", 1, 0, PER_CHUNK, 1, writer=writer, facts=facts)
    assert desk.ask(client, request) is None


@pytest.fixture
def desk() -> Desk:
    """Two engines; one has stored four chunks."""
    made = Desk(settings={"verify_hits": 0.1, "verify": "always"})
    register(made, b"one", "first", vllm="0.32", dtype="bfloat16")
    register(made, b"two", "second", vllm="0.33", dtype="bfloat16")
    assert made.ask(b"one", store(prompt("p", 4))) is True
    return made


def compare(desk: Desk, client: bytes, chain: ChunkChain, *found: float | list[float], **how: bool) -> Any:
    """Compare a prompt's chunks, which, or whose parts, differ by this much; returns the answer."""
    asked = desk.send(client, wire.Compare(1, [shards(chain)], LIMIT, **how))
    differences = [each if isinstance(each, list) else [each] for each in found]
    for copying in desk.copies:
        summed = [place.is_summed for place in copying.placement.places]
        sums = [2 if each is CORRUPT else int(each != [0.0] and summed[i]) for i, each in enumerate(differences)]
        desk.finish(copying, sums=sums, differences=[[1.0] if each is CORRUPT else each for each in differences])
    return desk.answers[asked]


def found(desk: Desk, client: bytes, chain: ChunkChain, *, writers: bool = False) -> Any:
    answer = desk.ask(client, replace(lookup(chain), writers=writers))
    desk.ask(client, wire.EndSession("r"))
    return answer if not writers else (hit(answer).chunks, [(run.end, run.writer) for run in hit(answer).writers])


def by(*writers: str) -> tuple[wire.WriterRun, ...]:
    """The writers of four chunks that were compared."""
    return tuple(wire.WriterRun(4, writer) for writer in writers)


def test_a_lookup_says_who_has_stored_what_is_found(desk: Desk) -> None:
    chain = prompt("p", 7)
    assert found(desk, b"one", chain) == 4
    assert found(desk, b"one", chain, writers=True) == (4, [(4, "first")])
    assert desk.ask(b"two", store(chain, first=4, end=6)) is True
    for _ in range(2):
        assert found(desk, b"two", chain, writers=True) == (6, [(4, "first"), (6, "second")])
    assert desk.ask(b"one", store(chain, first=6, end=7)) is True
    assert found(desk, b"two", chain, writers=True) == (7, [(4, "first"), (6, "second"), (7, "first")])
    assert found(desk, b"one", prompt("q", 2), writers=True) == (0, [])


def test_a_chunk_that_another_engine_has_replaced_is_said_to_be_its_own(desk: Desk) -> None:
    chain = prompt("p", 4)
    assert found(desk, b"one", chain, writers=True) == (4, [(4, "first")])
    compare(desk, b"two", chain, 0.0, CORRUPT, 0.0, 0.0)
    assert desk.ask(b"two", store(chain)) is True
    assert found(desk, b"one", chain, writers=True) == (4, [(1, "first"), (2, "second"), (4, "first")])


def test_a_lookup_names_the_writers_of_its_first_sixteen_runs_of_chunks(desk: Desk) -> None:
    for number in range(wire.MAX_WRITER_RUNS + 4):
        assert desk.ask((b"one", b"two")[number % 2], store(prompt("many", number + 1), first=number)) is True
    number, runs = found(desk, b"one", prompt("many", 40), writers=True)
    assert number == wire.MAX_WRITER_RUNS + 4
    assert [end for end, _ in runs] == [*range(1, wire.MAX_WRITER_RUNS + 1)]


def test_equal_chunks_are_counted_and_stay(desk: Desk) -> None:
    assert compare(desk, b"two", prompt("p", 6), 0.0, 0.1, LIMIT, 0.2) == wire.Comparison(4, LIMIT, 0, by("first"))
    status = desk.depot.status()
    assert (status.counters["compared_chunks"], status.counters["differing_chunks"]) == (4, 0)
    assert status.mismatches == status.quarantined == []
    assert desk.ask(b"two", wire.Why("r")).shards == {"stored": 4, "equal": 4}
    assert desk.index.held == 0


def test_an_engine_is_not_compared_with_itself(desk: Desk) -> None:
    assert compare(desk, b"one", prompt("p", 4)) == wire.Comparison()
    assert compare(desk, b"one", prompt("p", 4), *[0.0] * 4, is_sample=True) == wire.Comparison(4, 0.0, 0, by("first"))


def test_experts_are_held_to_the_limit_in_the_first_chunk_of_a_prompt(desk: Desk) -> None:
    most = float("inf")
    assert compare(desk, b"two", prompt("p", 4), 0.1, 0.7, 0.6, 0.7, has_experts=True).worst == 0.1
    assert compare(desk, b"two", prompt("p", 4), 0.3, 0.7, 0.6, 0.7, has_experts=True).worst == 0.3
    assert compare(desk, b"two", prompt("p", 4), 0.1, 0.7, most, 0.7, has_experts=True).worst == most
    assert [each.chunks for each in desk.depot.status().mismatches] == [1, 1]


def test_an_engine_that_differs_is_named_beside_the_other(desk: Desk) -> None:
    parts = [float("inf"), 0.1, float("nan"), float("inf")]  # the largest, then those of the parts
    assert compare(desk, b"two", prompt("p", 4), 0.0, 0.3, parts, 0.0).worst == float("inf")
    status = desk.depot.status()
    for (usage,) in (status.usage, status.model_usage):
        assert (usage.compared_shards, usage.differing_shards) == (4, 2)
    (mismatch,) = status.mismatches
    assert (mismatch.engine, mismatch.writer, mismatch.facts) == ("second", "first", ["vllm: 0.33 | 0.32"])
    assert (mismatch.chunks, mismatch.limit, mismatch.is_sample) == (2, LIMIT, False)
    assert (mismatch.chunk, mismatch.parts) == (bytes(prompt("p", 4).slice(2, 3)).hex(), [0.1, None, 1e9])
    assert status.counters["differing_chunks"] == 2
    assert any(event.kind == "mismatch" for event in status.events)
    assert status.quarantined == [], "the engine that has just started draws the consequences"
    assert found(desk, b"two", prompt("p", 4)) == 4


def test_a_sample_that_differs_puts_its_model_into_quarantine(desk: Desk) -> None:
    compare(desk, b"two", prompt("p", 4), 0.0, 0.0, 0.0, 0.3, is_sample=True)
    assert desk.depot.status().quarantined == ["m"]
    assert found(desk, b"one", prompt("p", 4)) == 0
    assert desk.ask(b"one", wire.EndQuarantine("another")) == 0
    assert desk.ask(b"one", wire.EndQuarantine("m")) == 1
    assert found(desk, b"one", prompt("p", 4)) == 4
    assert desk.depot.status().quarantined == []


def test_chunks_that_are_gone_or_not_comparable_count_as_unknown(desk: Desk) -> None:
    assert compare(desk, b"two", prompt("q", 4)) == wire.Comparison()
    assert compare(desk, b"two", prompt("p", 4), *[float("nan")] * 4) == wire.Comparison(unknown=4, writers=by("first"))
    asked = desk.send(b"two", wire.Compare(1, [shards(prompt("p", 4))], LIMIT))
    forgotten = desk.send(b"one", wire.ForgetChunks("m"))
    for copying in desk.copies:
        desk.finish(copying, sums=[1] * 4, differences=[[1.0]] * 4)
    assert desk.answers[asked] == wire.Comparison(), "forgotten meanwhile"
    desk.settle()
    assert forgotten in desk.answers
    desk.assert_empty()


def test_a_load_gets_the_chunks_of_writers_that_it_names_only(desk: Desk) -> None:
    assert desk.ask(b"two", store(prompt("q", 2))) is True
    both = [shards(prompt("p", 4)), shards(prompt("q", 2))]
    assert desk.ask(b"two", wire.Retrieve(1, both[1:], writers=("second",))) == [True] * 2
    assert desk.ask(b"two", wire.Retrieve(1, both[:1], writers=("second",))) == [False] * 4
    assert desk.ask(b"two", wire.Retrieve(1, both[:1], writers=("second", "first"))) == [True] * 4
    assert desk.ask(b"two", wire.Retrieve(1, both[:1])) == [True] * 4


def test_a_chunk_with_a_wrong_checksum_accuses_nobody(desk: Desk) -> None:
    assert compare(desk, b"two", prompt("p", 4), CORRUPT, 0.0, 0.0, 0.0) == wire.Comparison(3, 0.0, 0, by("first"))
    counters = desk.depot.status().counters
    assert (counters["corrupt_chunks"], counters["differing_chunks"]) == (1, 0)
    assert found(desk, b"one", prompt("p", 4)) == 0


def test_a_quarantine_also_ends_loads_that_were_promised(desk: Desk) -> None:
    assert desk.ask(b"two", lookup(prompt("p", 4))) == 4
    compare(desk, b"one", prompt("p", 4), 0.0, 0.0, 0.0, 0.3, is_sample=True)
    assert desk.ask(b"two", wire.Retrieve(1, [shards(prompt("p", 4))])) == [False] * 4


def test_a_comparison_that_its_client_could_not_make_says_nothing(desk: Desk) -> None:
    asked = desk.send(b"two", wire.Compare(1, [shards(prompt("p", 4))], LIMIT))
    (copying,) = desk.copies
    desk.finish(copying, copied=False)
    assert desk.answers[asked] == wire.Comparison()
    assert desk.index.held == 0


def test_a_comparison_says_how_far_it_met_each_writer(desk: Desk) -> None:
    chain = prompt("p", 6)
    desk.hello(b"three")
    register(desk, b"three", "third")
    assert desk.ask(b"three", store(chain, first=4, end=6)) is True
    answer = compare(desk, b"two", chain, *[0.0] * 6)
    assert answer == wire.Comparison(6, 0.0, 0, (wire.WriterRun(4, "first"), wire.WriterRun(6, "third")))


def test_the_chunks_of_one_writer_can_be_forgotten(desk: Desk) -> None:
    assert desk.ask(b"two", store(prompt("p", 6), first=4, end=6)) is True
    assert desk.ask(b"two", store(prompt("q", 3))) is True
    assert desk.ask(b"two", wire.ForgetChunks("m", writer="second")) == wire.ForgetAnswer({"memory": 5})
    assert found(desk, b"one", prompt("p", 6)) == 4
    assert found(desk, b"one", prompt("q", 3)) == 0


def test_a_sample_is_refused_where_the_server_samples_no_hits() -> None:
    desk = Desk()
    register(desk, b"one", "first")
    assert desk.ask(b"one", store(prompt("p", 4))) is True
    asked = wire.Compare(1, [shards(prompt("p", 4))], LIMIT, is_sample=True)
    assert isinstance(desk.ask(b"one", asked), BadRequest)
    assert desk.depot.status().quarantined == []
    assert compare(desk, b"one", prompt("p", 4)) == wire.Comparison(), "a proof is welcome"


def test_a_tenant_with_many_differences_takes_neither_the_list_nor_the_log_of_others(
    caplog: pytest.LogCaptureFixture,
) -> None:
    desk = Desk(settings={"keys": "/somewhere"})
    for tenant in ("blue", "red"):
        for client in (f"{tenant} one", f"{tenant} two"):
            desk.hello(client.encode(), tenant, engine=client)
            request = wire.Register(1, layout(), "m", 1, 0, PER_CHUNK, 1, writer=client)
            assert desk.ask(client.encode(), request) is None
        assert desk.ask(f"{tenant} one".encode(), store(prompt(tenant, 4))) is True
    compare(desk, b"blue two", prompt("blue", 1), 0.5)
    for _ in range(100):
        compare(desk, b"red two", prompt("red", 1), 0.5)
    found = [each.tenant for each in desk.depot.status().mismatches]
    assert found == ["red"] * 16 + ["blue"]
    assert len(caplog.records) == 2, "the same two engines, again and again"


@pytest.mark.parametrize("limit", [0.0, -1.0, float("nan")])
def test_a_limit_of_differences_that_is_not_positive_is_refused(desk: Desk, limit: float) -> None:
    assert isinstance(desk.ask(b"two", wire.Compare(1, [shards(prompt("p", 4))], limit)), BadRequest)


def test_too_many_or_too_long_facts_are_refused() -> None:
    desk = Desk()
    desk.hello()
    for facts in ({f"fact {i}": "" for i in range(wire.MAX_FACTS + 1)}, {"fact": "x" * 257}, {"y" * 257: ""}):
        assert isinstance(desk.ask(b"one", wire.Register(1, layout(), writer="w", facts=facts)), BadRequest)
