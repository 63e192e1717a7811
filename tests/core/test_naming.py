"""Engines that give different names to one model share its KV, under the first name."""

from __future__ import annotations

import pytest

from kvdepot.core.tiering.tier import facts_of
from kvdepot.protocol import wire
from kvdepot.protocol.model_names import name_model
from tests.core.desk import Desk, layout, lookup, prompt, retrieve, store
from tests.core.groups import BLOCKS as PER_CHUNK

DIGEST, OTHER = "0123456789abcdef" * 2, "0123456789abcdee" * 2
FIRST, SECOND = name_model("current", DIGEST), name_model("model-8b", DIGEST)


def _register(model: str) -> wire.Register:
    return wire.Register(1, layout(), model, 1, 0, PER_CHUNK)


@pytest.mark.parametrize(
    ("one", "other", "found"),
    [
        (FIRST, SECOND, 3),
        (FIRST, name_model("current", OTHER), 0),
        ("model@0123456789abcdef", "link@0123456789abcdef", 0),
        (f"model@{DIGEST}", f"link@{DIGEST}", 0),
    ],
    ids=["one model", "two models of one name", "names that users chose", "digests that users chose"],
)
def test_engines_share_what_one_digest_names(one: str, other: str, found: int) -> None:
    desk, chain = Desk(), prompt("p", 3)
    desk.hello(b"one"), desk.hello(b"two")
    desk.ask(b"one", _register(one))
    desk.ask(b"one", store(chain, model=one))
    desk.settle()
    assert desk.ask(b"one", lookup(chain, "own", model=one)) == 3
    assert desk.ask(b"two", lookup(chain, "r", model=other)) == found
    desk.ask(b"two", _register(other))
    if found:
        desk.ask(b"two", retrieve(chain, request="r", model=other))
        desk.settle()
        (told,) = desk.depot.status().namespaces
        assert (told.model, told.engines) == (one, 2)
        assert desk.ask(b"two", wire.Count(other)).chunks == 3
        desk.ask(b"two", wire.ForgetChunks(other))
        desk.settle()
        assert desk.ask(b"one", lookup(chain, "again", model=one)) == 0


def test_objects_in_tiers_are_found_under_any_name() -> None:
    facts = []
    for name in (FIRST, SECOND, name_model("current", OTHER)):
        desk = Desk()
        desk.hello(b"one")
        desk.ask(b"one", _register(name))
        (namespace,) = desk.depot.index.namespaces.all()
        facts.append(facts_of(namespace, 0))
    assert facts[0].space == facts[1].space != facts[2].space


def test_a_question_gives_a_model_no_name() -> None:
    desk = Desk()
    desk.hello(b"one")
    desk.ask(b"one", wire.Count(SECOND))
    desk.ask(b"one", wire.ForgetChunks("x" * (wire.MAX_REQUEST_ID + 1) + SECOND))
    desk.ask(b"one", _register(FIRST))
    assert [each.model for each in desk.depot.status().namespaces] == [FIRST]
