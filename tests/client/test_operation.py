"""The operations that adapters report, compared with what was asked."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from kvdepot.client.transfer import Operation
from tests.client.engine import CHUNK, Engine
from tests.conftest import HANG_S, Depot


@pytest.fixture
def engine(depot: Depot) -> Iterator[Engine]:
    """Blocks have 256 bytes, so a chunk has 1 KiB."""
    made = Engine(depot)
    yield made
    made.close()


def watch(engine: Engine) -> list[Operation]:
    told: list[Operation] = []
    engine.scheduler.watch = engine.worker.watch = told.append
    return told


def test_each_operation_is_told_once_with_what_it_did(engine: Engine) -> None:
    told, tokens = watch(engine), list(range(3 * CHUNK))
    engine.lookup(tokens)
    engine.store(tokens[: 2 * CHUNK], list(range(8)))
    engine.lookup(tokens)
    assert engine.retrieve(tokens, list(range(12))) == {8, 9, 10, 11}
    facts = [(each.kind, each.chunks, each.done, each.size_bytes, each.error) for each in told]
    assert facts == [
        ("lookup", 3, 0, 0, None),
        ("store", 2, 2, 2048, None),
        ("lookup", 3, 2, 0, None),
        ("retrieve", 3, 2, 2048, None),
    ]
    assert all(len(each.requests) == 1 and each.took_s > 0 for each in told)


def test_a_lookup_is_told_once_however_often_its_answer_is_asked_for(engine: Engine) -> None:
    told = watch(engine)
    engine.scheduler.maybe_submit_lookup_request("r", token_ids=list(range(CHUNK)))
    assert told == []
    assert engine.scheduler.wait_lookup_result("r", HANG_S) == 0
    assert engine.scheduler.check_lookup_result("r") == 0
    assert len(told) == 1 and told[0].requests == ["r"]
    engine.scheduler.cleanup_lookup_result("r")
    engine.scheduler.maybe_submit_lookup_request("short", token_ids=[1])
    assert engine.scheduler.check_lookup_result("short") == 0
    assert len(told) == 1  # nothing was asked of the depot
