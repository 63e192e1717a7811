"""The scheduler's client: outcomes of lookups, without a server. With one: test_contract.py."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from kvdepot.client.scheduler import Cached, Pending, SchedulerClient, Unanswered
from kvdepot.client.transfer import Operation, PromptChunks, ShardSpec
from kvdepot.errors import BadRequest, DeadlineExceeded, ProtocolError, Unavailable
from kvdepot.protocol import wire
from tests.client.answers import Answering

SPEC = ShardSpec("model", 2, 0, 256, 4)
HASHES = bytes(32 * 3)


@pytest.fixture
def scheduler(peer: Any) -> SchedulerClient:
    return SchedulerClient(peer, SPEC)


def test_a_lookup_is_pending_until_it_is_answered_and_sent_once(scheduler: SchedulerClient, peer: Answering) -> None:
    told: list[Operation] = []
    scheduler.watch = told.append
    for _ in range(2):
        scheduler.submit_lookup("r", HASHES)
    assert peer.asked == [wire.Lookup("model", 2, 4, "r", 2, HASHES, True, chunk_tokens=256)]
    assert scheduler.check_lookup("r") == Pending() and not told
    peer.answer([2])
    assert scheduler.check_lookup("r") == scheduler.wait_lookup("r", 1.0) == Cached(512)
    assert scheduler.known_tokens("r") == 512
    assert [(each.kind, each.requests, each.chunks, each.done) for each in told] == [("lookup", ["r"], 3, 2)]


def test_a_prompt_without_a_whole_chunk_is_a_miss_that_nobody_is_asked_for(
    scheduler: SchedulerClient, peer: Answering
) -> None:
    told: list[Operation] = []
    scheduler.watch = told.append
    scheduler.submit_lookup("r", b"")
    assert scheduler.check_lookup("r") == scheduler.wait_lookup("r", 1.0) == Cached(0) and not peer.asked and not told


def test_an_answer_may_end_with_a_tail_of_the_lookup_and_with_no_other(
    scheduler: SchedulerClient, peer: Answering
) -> None:
    tails = (wire.Tail(3, b"l" * 32), wire.Tail(2, b"s" * 32))
    for number, (value, outcome) in enumerate([([3, 0], Cached(768, 0)), ([2, 1], Cached(512, 1)), ([2], Cached(512))]):
        scheduler.submit(f"{number}", PromptChunks(SPEC, HASHES, tails=tails))
        assert peer.asked[-1].tails == tails
        peer.answer(value)
        assert scheduler.check_lookup(f"{number}") == outcome
        assert scheduler.known_tokens(f"{number}") == outcome.tokens
    for value in ([3, 2], [3, -1], [3, 1], [4], [-1], [2, None, [[2]]]):
        scheduler.submit(f"{value}", PromptChunks(SPEC, HASHES, tails=tails))
        peer.answer(value)
        assert isinstance(scheduler.check_lookup(f"{value}"), Unanswered)


@pytest.mark.parametrize("value", [Unavailable("gone"), DeadlineExceeded("late"), BadRequest("odd"), "no hit", 2])
def test_a_lookup_that_failed_is_no_answer(scheduler: SchedulerClient, peer: Answering, value: object) -> None:
    scheduler.submit_lookup("r", HASHES)
    peer.answer(value)
    outcome = scheduler.check_lookup("r")
    assert isinstance(outcome, Unanswered)
    assert outcome.error is value or isinstance(outcome.error, ProtocolError)
    assert scheduler.known_tokens("r") == 0


def test_what_a_former_server_has_is_not_known_and_is_asked_again_by_who_can_wait(
    scheduler: SchedulerClient, peer: Answering
) -> None:
    scheduler.submit_lookup("r", HASHES)
    peer.answer([3])
    assert scheduler.check_lookup("r") == Cached(768)
    peer.incarnation = b"two"
    assert scheduler.known_tokens("r") == 0 and scheduler.check_lookup("r") == Cached(768)
    assert scheduler.wait_lookup("r", 0.0) == Pending() and len(peer.asked) == 2
    peer.answer([0])
    assert scheduler.wait_lookup("r", 0.0) == Cached(0) and len(peer.asked) == 2


def test_silence_is_asked_again_once_a_server_is_heard_and_a_refusal_is_not(
    scheduler: SchedulerClient, peer: Answering
) -> None:
    for request_id, error in (("silent", DeadlineExceeded("late")), ("refused", BadRequest("odd"))):
        scheduler.submit_lookup(request_id, HASHES)
        peer.answer(error)
        assert scheduler.wait_lookup(request_id, 0.0) == Unanswered(error)
    peer.heard += 1
    assert scheduler.wait_lookup("silent", 0.0) == Pending()
    assert scheduler.wait_lookup("refused", 0.0) != Pending()
    assert len(peer.asked) == 3


def test_a_caller_is_held_back_twice_at_most(scheduler: SchedulerClient, peer: Answering) -> None:
    scheduler.submit_lookup("r", HASHES)
    for _ in range(2):
        assert scheduler.wait_lookup("r", 0.0) == Pending()
        peer.answer(DeadlineExceeded("late"))
        peer.heard += 1
    assert isinstance(scheduler.wait_lookup("r", 0.0), Unanswered), "asked a third time"
    assert scheduler.wait_lookup("r", 0.0) == Pending(), "when it comes up anew"


def test_a_lookup_says_the_engines_speed_and_a_hurried_one_replaces_it(
    scheduler: SchedulerClient, peer: Answering
) -> None:
    scheduler.speed = 1000.0
    scheduler.submit_lookup("r", HASHES)
    scheduler.hurry_lookup("r")
    scheduler.hurry_lookup("unknown")
    first, second = peer.asked
    assert isinstance(first, wire.Lookup) and (first.speed, first.hurries) == (1000.0, False)
    assert second == msgspec.structs.replace(first, hurries=True)
    peer.answer([0])  # the server gives the first one up
    assert scheduler.check_lookup("r") == Pending()
    peer.answer([2])
    scheduler.hurry_lookup("r")
    assert scheduler.check_lookup("r") == Cached(512) and len(peer.asked) == 2


def test_a_caller_that_reports_sends_queued_lookups_until_it_hurries(peer: Answering) -> None:
    scheduler = SchedulerClient(peer, SPEC, reports=True)  # type: ignore[arg-type]
    scheduler.place = -1
    scheduler.submit_lookup("r", HASHES)
    scheduler.hurry_lookup("r")
    sent = [(lookup.queued, lookup.hurries, lookup.place) for lookup in peer.asked if isinstance(lookup, wire.Lookup)]
    assert sent == [(True, False, -1), (False, True, -1)]
