"""What may happen to chunks while a client copies them to its blocks. No lookup has pinned them."""

from __future__ import annotations

import pytest

from kvdepot.protocol import wire
from tests.core.desk import Desk, prompt, retrieve, store

CHAIN = prompt("a", 2)


@pytest.fixture
def desk() -> Desk:
    """Memory for four chunks, in which a client copies the only two."""
    desk = Desk(pages=4)
    for client in (b"one", b"two"):
        desk.hello(client)
        desk.register(client)
    desk.ask(b"one", store(CHAIN))
    return desk


def test_memory_that_a_retrieve_reads_is_given_to_no_store(desk: Desk) -> None:
    asked = desk.send(b"two", retrieve(CHAIN))
    desk.send(b"one", store(prompt("b", 4)))
    desk.check_places()
    desk.settle()
    assert desk.answers[asked] == [True, True]


def test_a_retrieve_gives_no_chunk_that_was_forgotten_while_it_copied(desk: Desk) -> None:
    asked = desk.send(b"two", retrieve(CHAIN))
    desk.depot.removals.step_chunks = 0  # the removal has begun, and has not come to these chunks
    desk.send(b"one", wire.ForgetChunks())
    desk.finish(desk.copies[0])
    desk.depot.removals.step_chunks = 1
    desk.settle()
    assert desk.answers[asked] == [False, False]
    desk.assert_empty()
