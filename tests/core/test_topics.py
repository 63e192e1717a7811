"""Whose KV events are published under which topics: the engines that are registered, each for what it can load."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from kvdepot.core import depot as core
from kvdepot.protocol import wire
from tests.core.desk import PER_CHUNK, Desk, group_requests, layout

NAMED = {"kv_events": "ipc:///nowhere.events"}


def register(desk: Desk, client: bytes, topic: str, model: str = "m", instance: int = 1) -> None:
    request = wire.Register(instance, layout(), model, 1, 0, PER_CHUNK, 1, topic=topic)
    assert desk.ask(client, request) is None


def topics(desk: Desk) -> set[tuple[str, str, int]]:
    """Topic, model and KV cache group."""
    return {(topic, namespace.model, namespace.group) for topic, namespace in desk.depot.topics()}


def test_a_topic_is_there_while_an_engine_that_names_it_is_registered() -> None:
    desk = Desk(settings=NAMED)
    for client in (b"one", b"two", b"three"):
        desk.hello(client)
    request = wire.Register(1, layout(), "m", 1, 0, PER_CHUNK, 1, topic="kv@a@m", fault="the self-test failed")
    assert desk.ask(b"one", request) is None
    assert topics(desk) == set(), "it can load nothing"
    register(desk, b"one", "kv@a@m")
    register(desk, b"two", "kv@a@m")
    register(desk, b"two", "kv@b@n", "n", instance=2)
    register(desk, b"three", "")
    assert topics(desk) == {("kv@a@m", "m", 0), ("kv@b@n", "n", 0)}
    desk.die(b"one")
    assert topics(desk) == {("kv@a@m", "m", 0), ("kv@b@n", "n", 0)}
    assert desk.ask(b"two", wire.Unregister(1)) is None
    assert topics(desk) == {("kv@b@n", "n", 0)}
    desk.die(b"two")
    desk.settle()
    assert topics(desk) == set()


@pytest.mark.parametrize(("reaches", "group"), [((0, 2), 0), ((2, 0, 0), 1), ((2, 1), None)])
def test_a_topic_is_for_the_first_unbounded_group_of_a_model(reaches: tuple[int, ...], group: int | None) -> None:
    desk = Desk(settings=NAMED)
    desk.hello()
    for request in group_requests(reaches):
        named = replace(request, topic="kv@a@m")
        assert desk.ask(b"one", named) is None
    assert topics(desk) == (set() if group is None else {("kv@a@m", "m", group)})


def test_topics_beyond_the_limit_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(core, "_MOST_TOPICS", 2)
    desk = Desk(settings=NAMED)
    desk.hello()
    for instance, name in enumerate("abcab", 1):
        register(desk, b"one", f"kv@{name}@m", f"model {instance}", instance)
    assert {topic for topic, *_ in topics(desk)} == {"kv@a@m", "kv@b@m"}
    assert len(topics(desk)) == 4
