"""The messages that requests' hints cause; test_telemetry.py has a real engine's."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from kvdepot.client.scheduler import SchedulerClient
from kvdepot.client.transfer import ShardSpec
from kvdepot.errors import Busy
from kvdepot.integrations.vllm.leases import RequestLeases
from kvdepot.integrations.vllm.requests import ChunkRules, RequestChunks, Tracked
from kvdepot.integrations.vllm.stats import KVDepotStats
from kvdepot.protocol import wire
from kvdepot.protocol.keys import HASH_BYTES, ROOT
from tests.client.answers import Answering
from tests.vllm.test_hints import request

CHUNK = 128
"""The request's prompt has 600 tokens: four chunks, and the beginning of a fifth."""


class Desk:
    """The leases of an engine, and the client that records what they send."""

    def __init__(self, saves_decode: bool = False) -> None:
        self.peer: Any = Answering()
        self.stats = KVDepotStats()
        self.saves_decode = saves_decode
        self.leases = RequestLeases(SchedulerClient(self.peer, ShardSpec("m", 2, 0, CHUNK, 8)), self.stats)

    def arrive(self, *arguments: Any) -> Any:
        """A request with these hints, which has decoded 50 tokens."""
        of = request(*arguments)
        tracked = Tracked(of, RequestChunks(of, ROOT, ChunkRules(CHUNK)), self.leases.read(of))
        self.leases.request_arrived(tracked)
        tracked.has_stored_output = self.saves_decode and tracked.hints.stores
        of.append_output_token_ids(list(range(50)))
        return tracked

    def finish(self, tracked: Any, stores_open: bool = False) -> None:
        tracked.stores_open = stores_open
        self.leases.request_ending(tracked)
        self.leases.request_ended(tracked)

    def sent(self) -> list[Any]:
        """The messages since the last call: of leases name, kind, chunks, seconds and priority; of ends the name; of
        removals how many chunks."""
        asked, self.peer.asked = self.peer.asked, []
        return [self._short(message) for message in asked]

    def _short(self, message: Any) -> Any:
        match message:
            case wire.TakeLease():
                assert (message.model, message.world_size, message.chunk_tokens) == ("m", 2, CHUNK)
                assert not message.drops
                chunks = len(message.hashes) // HASH_BYTES
                return (message.name, message.kind, chunks, message.ttl_s, message.priority)
            case wire.EndLease():
                assert message.drops
                return message.name
            case wire.Drop():
                return len(message.hashes) // HASH_BYTES
        raise AssertionError(message)

    def counted(self) -> dict[str, int]:
        stats = self.stats.take()
        return stats.data if stats is not None else {}


def test_a_prompt_is_leased_when_its_pins_end_and_when_its_request_ends() -> None:
    desk = Desk()
    tracked = desk.arrive({"retain_s": 60, "session": "a", "priority": 7})
    assert desk.sent() == []
    desk.leases.prompt_stored(tracked)
    assert desk.sent() == [("a", "retain", 4, 60, 7)]
    desk.finish(tracked)
    assert desk.sent() == [("a", "retain", 4, 60, 7)]


def test_the_output_is_leased_too_where_it_is_stored() -> None:
    desk = Desk(saves_decode=True)
    for hints, chunks in (({"retain_s": 60}, 5), ({"retain_s": 60, "store": False}, 4)):
        tracked = desk.arrive(hints)
        desk.leases.prompt_stored(tracked)
        desk.finish(tracked)
        assert [each[2] for each in desk.sent()] == [4, chunks]


def test_an_expiry_is_leased_when_a_request_ends_and_a_prefetch_when_it_arrives() -> None:
    desk = Desk()
    tracked = desk.arrive({"expire_s": 9}, [("prefetch", {"retain_s": 5, "session": "p"}), ("pin", {"session": "q"})])
    assert desk.sent() == [("p", "prefetch", 4, 5, 50)]
    desk.leases.prompt_stored(tracked)
    assert desk.sent() == [("q", "retain", 4, 3600, 50)]  # the server grants an hour
    desk.finish(tracked)
    assert desk.sent() == [("r/expire", "expire", 4, 9, 50), ("q", "retain", 4, 3600, 50)]


def test_a_release_removes_the_requests_chunks_then_the_sessions_after_its_stores() -> None:
    desk = Desk(saves_decode=True)
    tracked = desk.arrive({"release": True, "session": "a"})
    desk.leases.prompt_stored(tracked)
    desk.finish(tracked, stores_open=True)
    desk.leases.stores_ended(["another"])
    assert desk.sent() == []
    desk.leases.stores_ended(["r"])
    assert desk.sent() == [5, "a", "a/expire"]
    desk.leases.stores_ended(["r"])
    assert desk.sent() == []
    desk.finish(desk.arrive({"release": True}))
    assert desk.sent() == [5, "r", "r/expire"]


def test_without_hints_nothing_is_sent_and_uncached_requests_only_end_leases() -> None:
    desk = Desk()
    tracked = desk.arrive()
    desk.leases.prompt_stored(tracked)
    desk.finish(tracked)
    uncached = desk.arrive({"retain_s": 1}), desk.arrive({"release": True, "session": "a"})
    for tracked in uncached:
        tracked.is_cached = False
        desk.finish(tracked)
    assert desk.sent() == ["a", "a/expire"]


def test_refused_hints_and_refused_leases_are_counted_and_each_reason_is_logged_once(
    caplog_vllm: pytest.LogCaptureFixture,
) -> None:
    desk = Desk()
    for _ in range(2):
        desk.finish(desk.arrive({"retain_s": 1.5}))
    assert desk.sent() == [] and desk.counted() == {"refused_hints": 2}
    tracked = desk.arrive({"retain_s": 5})
    for _ in range(3):
        desk.leases.prompt_stored(tracked)
    desk.peer.answer(4)
    desk.leases.check_answers()
    assert desk.counted() == {}
    desk.peer.answer(Busy("the leases of this tenant hold too much"))
    desk.peer.answer(Busy("the leases of this tenant hold too much"))
    desk.leases.check_answers()
    assert desk.counted() == {"lease_errors": 2}
    said = [record.getMessage() for record in caplog_vllm.records]
    # Where vLLM's plugins have been loaded in this process, copies with the product's name reach vLLM's handlers, too.
    logged = [line for line in said if not line.startswith("kvdepot: ")] or said
    assert len(logged) == 2 and "retain_s" in logged[0] and "hold too much" in logged[1]


def test_tokens_that_cannot_be_hashed_cost_the_lease_alone() -> None:
    desk = Desk()
    tracked = desk.arrive({"retain_s": 5})
    tracked.prompt.hash()
    tracked.request.append_output_token_ids([-1] * 200)
    desk.finish(tracked)
    assert desk.sent() == [] and desk.counted() == {"lease_errors": 1}


@pytest.fixture
def caplog_vllm(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> pytest.LogCaptureFixture:
    """caplog, with the connector's warnings, which vLLM's logger keeps from the root's handlers."""
    import kvdepot.integrations.vllm.leases as module

    monkeypatch.setattr(module.log, "propagate", True)
    caplog.set_level(logging.WARNING, module.log.name)
    return caplog
